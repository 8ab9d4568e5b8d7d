// Which results of a batch share memory with another array.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Extent { // the memory from the first byte of an array to its last
    const char *start, *stop;
    int64_t tensor, result; // result: -1 for a source
};

// Return a result that shares memory with another result, or with a source; null if there is none. Sorts the extents. A
// source that is also a result of its tensor must be listed only once, as that result.
inline const Extent *find_overlap(std::vector<Extent> &extents) {
    std::sort(extents.begin(), extents.end(), [](const Extent &a, const Extent &b) { return a.start < b.start; });
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
