// Exact sums: the real sum of floats, or its quotient by an integer, rounded once, to nearest even.
//
// The result does not depend on the order of the terms, so it is the same however a reduction is cut and scheduled. If
// a term is NaN, or infinities of both signs are among the terms, the result is the NaN whose only payload is the quiet
// bit, with sign 0. An exact zero is -0 if all terms are -0, else +0. A result that rounds to zero has the sign of the
// sum.
#pragma once

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.hpp"

// Sums and quotients of at most this many terms, and by integers up to this, are supported: the quotient of the vector
// code needs the product of an integer and of 27 bits to fit into a double.
constexpr uint32_t MAX_EXACT_COUNT = 1 << 24;

// A term that is a float of any size, as a double, which holds it exactly. `at` is its address.
double read_term(DType dtype, const char *at);

// A fixed-point number that holds every sum of up to 2^31 doubles exactly. It computes the elements that the vector code
// cannot certify.
class ExactAccumulator {
  public:
    void add(double term, uint32_t times = 1); // all `times` together: at most 2^31
    // Store the sum, divided by an integer, as an element of a dtype.
    void store(DType dtype, uint32_t divisor, char *to) const;
    // Return doubles whose sum is this sum: at least one, in descending order; the first is zero only if the sum is.
    std::vector<double> components() const;

  private:
    // Bit k of limb i has the value 2^(32 i + k + BOTTOM). The lowest limb is only for bits of a quotient: a term is a
    // multiple of 2^-1074. Limbs are signed and exceed 32 bits until the carries are propagated.
    static constexpr int BOTTOM = -1074 - 32, LIMBS = (1024 + 32 - BOTTOM) / 32 + 2;
    int64_t limbs[LIMBS] = {};
    int lowest = LIMBS, highest = -1; // the limbs that terms were added to
    bool any_nan = false, infinite[2] = {false, false}, all_negative_zero = true;
};

// Sets rounding to nearest and arithmetic with subnormals, as long as it lives. Threads of XLA and TensorFlow flush
// subnormals to zero, and a caller may have set either.
class DefaultArithmetic {
  public:
    DefaultArithmetic() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before); }
    DefaultArithmetic(const DefaultArithmetic &) = delete;
    DefaultArithmetic &operator=(const DefaultArithmetic &) = delete;

  private:
    std::fenv_t before;
};

// Compute exact sums in which source k counts `weights[k]` times, and write them to all targets. The weights are not 0,
// and their sum is at most MAX_EXACT_COUNT.
void sum_weighted_exactly(const ExactSum &sum, const std::vector<uint32_t> &weights, DType source, DType result,
                          const Output &output, size_t size);

// Compute one element: add the terms that are `offset` bytes after each source's address.
void sum_one_exactly(const ExactSum &sum, DType source, DType result, size_t offset, char *to);
