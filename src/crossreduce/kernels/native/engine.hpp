// Walk a program, tile by tile, through whole batches of tensors where they lie.
#pragma once

#include <cstdint>
#include <vector>

#include "tiles.hpp"

// slot `out` becomes the combination of the operands in order: a source s >= 0, or slot ~s for s < 0.
struct Combination {
    int out;
    std::vector<int> operands;
};

// What is done to each element of a range: values that are made of the sources, and which of them each result is.
// `folds` run in order; a slot may be the first operand of the fold that overwrites it, and no other.
struct Program {
    int slots;
    std::vector<Combination> folds;
    std::vector<int> results; // as operands
};

struct Segment { // elements of one tensor
    int64_t tensor, start, stop;
    int program;
};

struct Plan {
    Op op;
    Type dtype, accumulator, result;
    double divisor; // 1: nothing is divided
    int sources, results;
    std::vector<int64_t> sizes; // of the tensors, in elements
    std::vector<Program> programs;
    std::vector<Segment> segments;
    const Tiles *tiles;
    // Set by check:
    int slots;           // the most of any program
    int64_t elements;    // in all segments
    bool by_line;        // whether programs are so small that they are walked line by line
    size_t tile_bytes;   // of accumulator in a tile
    size_t scratch;      // bytes of working memory a thread
};

constexpr int MOST_AXES = 64; // NumPy's and DLPack's own limit

struct Strided { // a source that is not one run of memory in C order
    int axes;
    int64_t shape[MOST_AXES], strides[MOST_AXES]; // strides in bytes
};

struct Operand {
    char *data;
    const Strided *strided; // null: one run in C order
};

// Return null, or what is wrong with a plan.
const char *check(Plan &plan);

// The bytes that a run of the plan reads and writes.
int64_t traffic(const Plan &plan);

// Run it. `sources` has the plan's number of sources for each tensor, `results` likewise; every result is distinct
// memory, or exactly a source's of the same tensor and place. `threads` counts the caller. Returns false where a
// thread's working memory could not be allocated; then nothing was written.
bool run(const Plan &plan, const std::vector<Operand> &sources, const std::vector<char *> &results, int threads,
         bool streaming);
