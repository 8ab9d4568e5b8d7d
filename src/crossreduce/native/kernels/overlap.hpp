// Which results of a batch share memory with another array.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Extent { // the memory from the first byte of an array to its last
    const char *start, *stop;
    int64_t tensor, result; // result: -1 for a source
};

// Sort by the start, with memory in `scratch`. From some hundred extents on, a sort by digits (LSD radix sort: Knuth, The
// Art of Computer Programming, vol. 3, 5.2.5) takes less than half the time of std::sort.
inline void sort_by_start(std::vector<Extent> &extents, std::vector<Extent> &scratch) {
    constexpr size_t SMALL = 256;
    constexpr int BITS = 11;
    if (extents.size() < SMALL)
        return std::sort(extents.begin(), extents.end(),
                         [](const Extent &a, const Extent &b) { return a.start < b.start; });
    const auto place = [](const Extent &extent) { return reinterpret_cast<uintptr_t>(extent.start); };
    uintptr_t low = place(extents[0]), high = low;
    for (const Extent &extent : extents) low = std::min(low, place(extent)), high = std::max(high, place(extent));
    scratch.resize(extents.size());
    for (int shift = 0; shift < 64 && (high - low) >> shift != 0; shift += BITS) {
        const auto digit = [&](const Extent &extent) { return (place(extent) - low) >> shift & ((1 << BITS) - 1); };
        size_t firsts[(1 << BITS) + 1] = {};
        for (const Extent &extent : extents) firsts[digit(extent) + 1]++;
        if (firsts[digit(extents[0]) + 1] == extents.size()) continue; // all have this digit
        for (int k = 0; k < 1 << BITS; k++) firsts[k + 1] += firsts[k];
        for (const Extent &extent : extents) scratch[firsts[digit(extent)]++] = extent;
        extents.swap(scratch);
    }
}

// Return a result that shares memory with another result, or with a source, or null. Sorts the extents. A
// source that is also a result of its tensor must be listed only once, as that result. `scratch` is only memory.
inline const Extent *find_overlap(std::vector<Extent> &extents, std::vector<Extent> &scratch) {
    sort_by_start(extents, scratch);
    const Extent *furthest = nullptr, *furthest_result = nullptr; // the ends of the extents so far
    for (const Extent &extent : extents) {
        const Extent *other = extent.result >= 0 ? furthest : furthest_result;
        if (other != nullptr && other->stop > extent.start) return extent.result >= 0 ? &extent : other;
        if (furthest == nullptr || extent.stop > furthest->stop) furthest = &extent;
        if (extent.result >= 0 && (furthest_result == nullptr || extent.stop > furthest_result->stop))
            furthest_result = &extent;
    }
    return nullptr;
}
