// Partial sums of exact reductions, which processes send to each other: doubles whose sum is the exact sum of some terms.
//
// Each element has one or two of them, in arrays `high` and `low`. Elements that need more have overflow terms in a list.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.hpp"

struct OverflowTerm {
    int64_t element;
    double term;
};

// The terms of partial sums: arrays, and overflow terms, in any order.
struct Terms {
    DType dtype; // of the arrays; real numbers
    std::vector<const char *> sources;
    std::vector<OverflowTerm> overflow;
};

// Compute `size` partial sums and return their overflow terms, of which the numbers of elements begin with `first`. `low`
// is null if each element has only one double.
std::vector<OverflowTerm> split_partial_sums(const InstructionSet &isa, Terms &terms, double *high, double *low, size_t size,
                                           int64_t first);

// Compute the sums, divided by an integer and rounded once, as elements of a dtype.
void round_partial_sums(const InstructionSet &isa, Terms &terms, uint32_t divisor, DType result, char *to, size_t size);
