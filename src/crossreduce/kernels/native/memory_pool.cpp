#include "memory_pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sys/mman.h>

// The caller of each function holds the interpreter's lock.
namespace {

constexpr size_t HUGE_PAGE = 2 << 20;
std::multimap<size_t, void *> &pool() {
    static auto *blocks = new std::multimap<size_t, void *>; // never destroyed: results may outlive this module
    return *blocks;
}
MemoryUsage usage{0, 0, 0};

void shrink_pool(size_t limit) {
    auto &blocks = pool();
    while (usage.pooled > limit && !blocks.empty()) {
        auto block = std::prev(blocks.end()); // freeing the largest blocks takes the fewest calls
        usage.pooled -= block->first;
        std::free(block->second);
        blocks.erase(block);
    }
}

} // namespace

void *allocate_memory(size_t nbytes) {
    auto &blocks = pool();
    void *memory = nullptr;
    auto found = blocks.find(nbytes); // training steps repeat, so sizes repeat
    if (found != blocks.end()) {
        memory = found->second;
        usage.pooled -= nbytes;
        blocks.erase(found);
    } else {
        size_t live = usage.live + nbytes;
        shrink_pool(usage.peak > live ? usage.peak - live : 0);
        const bool huge = nbytes >= HUGE_PAGE;
        if (posix_memalign(&memory, huge ? HUGE_PAGE : 64, std::max<size_t>(nbytes, 64)) != 0) return nullptr;
#ifdef MADV_HUGEPAGE
        if (huge) madvise(memory, nbytes, MADV_HUGEPAGE); // a hint: fewer page faults and TLB misses
#endif
    }
    usage.live += nbytes;
    usage.peak = std::max(usage.peak, usage.live);
    return memory;
}

void free_memory(void *memory, size_t nbytes) {
    usage.live -= nbytes;
    usage.pooled += nbytes;
    try {
        pool().emplace(nbytes, memory);
    } catch (...) {
        usage.pooled -= nbytes;
        std::free(memory);
    }
}

void empty_pool() { shrink_pool(0); }

MemoryUsage memory_usage() { return usage; }
