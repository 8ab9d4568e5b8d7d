// How the elements of a kernel's arrays are read, combined and written, and what a program's results are.
#pragma once

#include <algorithm>

#include "kernel.hpp"

// A pass reads at most this many sources. A fold of more sources runs tile by tile, in several passes.
constexpr size_t MAX_PASS_SOURCES = 8;
// Programs with more operands than this, slots included, also run tile by tile.
constexpr size_t MAX_LINE_OPERANDS = 32;
// The bytes of the accumulator's dtype in a tile. From about 8 KiB on, glibc copies with an instruction that does not
// read the lines that it overwrites. Measured: 64 arrays of 16 KiB take 0.94 of the time with tiles of 4 KiB.
constexpr size_t TILE_NBYTES = 8192;
// Programs with many slots use smaller tiles, so that the working memory of a thread stays below this.
constexpr size_t MAX_SCRATCH = 512 * 1024;

inline bool is_complex(DType dtype) { return dtype == C64 || dtype == C128; }
inline bool is_half(DType dtype) { return dtype == F16 || dtype == BF16; }
// Return the dtype of the real and imaginary parts, or the dtype itself.
inline DType part_of(DType dtype) { return dtype == C64 ? F32 : dtype == C128 ? F64 : dtype; }

using Divide = void (*)(char *data, size_t size, double divisor);

// The pass function of a kernel and the formats that it reads and writes.
struct Format {
    PassFunction function;
    size_t line;                           // units in a line of the results
    size_t units;                          // units per element: 2 if complex
    size_t in, acc, out;                   // bytes of a unit of the sources, accumulator and results
    bool convert_sources, convert_results; // whether tiles are converted before and after the pass
    Divide divide = nullptr;               // divides integers, instead of the pass and of the conversion after it
    // Whether tiles of the accumulator's dtype have another order of elements within each line (isa.inc, WidenedPairs).
    // Then all passes over a tile divide it into the same lines, and a line is never stored in part.
    bool permuted = false;
};

Format format_of(const Kernel &kernel);

// Whether all results are the same value.
inline bool has_one_value(const FusedProgram &program) {
    const auto &results = program.results;
    return std::equal(results.begin() + 1, results.end(), results.begin());
}

// Whether all results are the value of the last fold, which is then written from registers.
inline bool ends_in_fold(const FusedProgram &program) {
    return has_one_value(program) && !program.folds.empty() && program.results[0] == ~program.folds.back().slot;
}
