// Kernels: run fused programs on batches of tensors, without copying the tensors into a flat buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.hpp"

// Combines the operands in order into `slot`. Operand s >= 0 is a source; s < 0 is slot ~s.
struct Fold {
    int slot;
    std::vector<int> operands;
};

// The computation of each element of a segment. The folds run in order. The slot that a fold overwrites may be its
// first operand, but no other.
struct FusedProgram {
    int slots;
    std::vector<Fold> folds;
    std::vector<int> results; // the operand that each result is
};

struct Segment { // elements start..stop of a tensor, in C order
    int64_t tensor, start, stop;
    int program;
};

struct Kernel {
    Op op;
    DType dtype, accumulator, result;
    double divisor; // 1: no division
    int sources, results; // the numbers of sources and of results of each tensor
    std::vector<int64_t> sizes; // the sizes of the tensors, in elements
    std::vector<FusedProgram> programs;
    std::vector<Segment> segments;
    std::vector<uint32_t> weights; // of an exact sum: how often each operand counts; empty: once
    const InstructionSet *isa;
    // Set by `validate`:
    int slots;            // the most slots that one of the programs uses
    bool only_copies;     // whether each result is a source, of which the bytes are copied
    int64_t elements;     // the number of elements in all segments
    bool by_line;         // the programs are small enough to run line by line
    size_t tile_nbytes;   // the bytes of a tile in the accumulator's dtype
    size_t scratch_nbytes; // the bytes of working memory per thread
};

constexpr int MAX_AXES = 64; // the limit of NumPy and DLPack

struct Strided { // the layout of a source that is not contiguous in C order
    int axes;
    int64_t shape[MAX_AXES], strides[MAX_AXES]; // strides in bytes
};

struct Source {
    char *data;
    const Strided *strided; // null: contiguous in C order
};

// Check a kernel and complete it. Returns null, or a description of the fault.
const char *validate(Kernel &kernel);

// Return the number of bytes that one run of the kernel reads and writes.
int64_t traffic_nbytes(const Kernel &kernel);

// Run a kernel. `sources` lists the sources of each tensor in turn, `results` the results. The memory of a result must
// not overlap other results or sources; it may be identical to the memory of a source of the same tensor. `threads`
// includes the caller. Returns false if a thread's working memory could not be allocated; nothing was written then.
bool run_kernel(const Kernel &kernel, const std::vector<Source> &sources, const std::vector<char *> &results,
                int threads, bool streaming);
