// What an instruction set gives the engine: a walk through a program, a few cache lines of results at a time.
//
// For each step all sources are read, combined in registers and written to all results, so that reading and writing
// overlap; whole lines may go past the cache, and then what they overwrite is not read first. Values are combined in
// the listed order, left to right. Where several terms of a sum are NaN the first one's payload is kept; the least or
// greatest of equal numbers (0 and -0) is the first.
#pragma once

#include <cstddef>
#include <cstdint>

enum Type { BOOL, I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64, C64, C128, TYPES };
constexpr size_t SIZES[TYPES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16}; // bytes of an element
enum Op { SUM, MIN, MAX, PRODUCT, OPS };

// Unit i of an operand lies at base + i * advance. A unit is an element, or one part of a complex one. `wide`: it is of
// the accumulator's type where sources are not.
struct Place {
    const char *base;
    size_t advance;
    bool wide;
};
struct Fold { // combines the operands and keeps the value, in the accumulator's type, unless `keep` is null
    const Place *operands;
    size_t count;
    char *keep;
    size_t keep_advance;
};
struct Target {
    char *data;
    bool past; // past the cache; then every line written is aligned
};
struct Value { // what goes to some results: the last fold's, or what lies in a place
    Place from;
    bool last;
    const Target *to;
    size_t count;
};
struct Walk {
    const Fold *fold;
    size_t folds;
    const Value *value;
    size_t values;
    double divisor; // of the results; 1: nothing is divided
};

constexpr size_t LINE = 64;      // bytes of a cache line; what is written is written in whole lines
constexpr size_t MOST_LINES = 4; // of results that are walked at a time

// Walk the units start..stop, whole lines of results. A place that does not advance holds MOST_LINES of them.
using Walker = void (*)(const Walk &walk, size_t start, size_t stop);
using Convert = void (*)(void *dst, const void *src, size_t size);

struct Tiles {
    const char *name;
    Walker same[OPS][TYPES];       // sources, accumulator and results of one type; null: the op is not defined
    Walker half[OPS][2];           // sources and results F16 or BF16, accumulator F32; sums and products
    Walker pairs[OPS];             // the same for BF16, quicker, where no value on the way is longer than a line
    Convert convert[TYPES][TYPES]; // [from][to], any size; null: never needed
};

extern const Tiles tiles_baseline;
extern const Tiles *const tiles_avx2; // null where it is not compiled for it
extern const Tiles *const tiles_avx512;
