// The functions that are compiled once for each instruction set: passes over the data, and conversions of dtypes.
//
// A pass runs a fused program on a few cache lines of the results at a time. It reads the sources, combines them in
// registers and writes all results, so that reading and writing overlap. Whole lines can be written with streaming
// stores; the processor then does not read the lines before it writes them. Operands are combined in the listed
// order, left to right. If several terms of a sum are NaN, the result has the first one's payload if GCC compiled it for
// x86-64 (FIRST_PAYLOAD in module.cpp). The minimum or maximum of equal numbers (0 and -0) is the first of them.
#pragma once

#include <cstddef>
#include <cstdint>

enum DType { BOOL, I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64, C64, C128, DTYPES };
constexpr size_t ITEMSIZES[DTYPES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16}; // bytes
enum Op { SUM, MIN, MAX, PRODUCT, EXACT_SUM, BAND, BOR, BXOR, OPS }; // the last three: bitwise, of bytes

// The location of an operand: unit i is at base + i * stride. A unit is an element, or a real or imaginary part of one.
struct Location {
    const char *base;
    size_t stride;       // 0: the operand is a buffer of MAX_LINES lines that every iteration reuses
    bool is_accumulator; // it has the accumulator's dtype, even if the sources have a half dtype
};
struct PassFold { // combines the operands; stores the value in the accumulator's dtype, unless `out` is null
    const Location *operands;
    size_t count;
    char *out;
    size_t out_stride;
};
struct Target { // memory of a result
    char *data;
    bool streaming; // write with streaming stores; every line must then be aligned
};
struct Output { // a value and the results that it is written to
    Location from;
    bool is_last_fold; // the value is the last fold's, in registers, and `from` is not used
    Target *targets;
    size_t count;
};
struct Pass {
    const PassFold *folds;
    size_t fold_count;
    const Output *outputs;
    size_t output_count;
    double divisor; // the results are divided by it; 1: no division
};

constexpr size_t LINE = 64;     // bytes of a cache line; a pass writes whole lines
constexpr size_t MAX_LINES = 4; // lines of results in one iteration of a pass

// Run a pass on the units start..stop, which are whole lines of the results.
using PassFunction = void (*)(const Pass &pass, size_t start, size_t stop);
using Convert = void (*)(void *dst, const void *src, size_t size);

struct ExactSum { // the terms of a run of exact sums, and their divisor
    const char *const *sources; // the address of each source's first term; terms are real numbers, and contiguous
    size_t count;               // of sources
    uint32_t divisor;
    int carry_bits; // the bits that a sum may need besides those of its terms: log2 of the count, rounded up
    char *padding;  // working memory, EXACT_PADDING bytes per source

    ExactSum(const char *const *sources, size_t count, uint32_t divisor, char *padding)
        : sources(sources), count(count), divisor(divisor), carry_bits(0), padding(padding) {
        while ((size_t{1} << carry_bits) < count) carry_bits++;
    }
};
constexpr size_t EXACT_PADDING = 320;

// Compute `size` exact sums, and write them to all targets. If some are written with streaming stores, these must be
// aligned to lines. A target may have the memory of a source.
using ExactFunction = void (*)(const ExactSum &sum, const Output &output, size_t size);

// Compute `size` partial sums: element i is high[i] + low[i]. Elements of which that is perhaps not so, or, unless `pairs`,
// of which low[i] is not zero, are listed; of the former low[i] is NaN. `low` is set for listed elements, and for all if
// `pairs`. Returns the number of listed elements; `listed` has room for `size`.
using PartialFunction = size_t (*)(const ExactSum &sum, bool pairs, double *high, double *low, uint32_t *listed, size_t size);

struct InstructionSet {
    const char *name;
    PassFunction same[OPS][DTYPES];  // sources, accumulator and results of one dtype; null: the op is not defined
    PassFunction half[OPS][2];       // sources and results F16 or BF16, accumulator F32; sums and products only
    PassFunction pairs[OPS];         // faster than `half` for BF16; intermediate values have another order in each line
    Convert convert[DTYPES][DTYPES]; // [from][to], any size; null: never needed
    ExactFunction exact[DTYPES][DTYPES]; // [sources][results]; null: not defined
    PartialFunction partial[DTYPES];     // null: not defined
};

extern const InstructionSet isa_baseline;
extern const InstructionSet *const isa_avx2; // null if the compiler does not support the instruction set
extern const InstructionSet *const isa_avx512;
