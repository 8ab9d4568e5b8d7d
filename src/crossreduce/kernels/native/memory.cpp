#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sys/mman.h>

// All of it is called with the interpreter's lock held.
namespace {

constexpr size_t HUGE_PAGE = 2 << 20;
std::multimap<size_t, void *> &kept_blocks() {
    static auto *blocks = new std::multimap<size_t, void *>; // never destroyed: results may outlive this module
    return *blocks;
}
Usage usage{0, 0, 0};

void drop_until(size_t most) {
    auto &blocks = kept_blocks();
    while (usage.kept > most && !blocks.empty()) {
        auto block = std::prev(blocks.end()); // the greatest: the fewest calls
        usage.kept -= block->first;
        std::free(block->second);
        blocks.erase(block);
    }
}

} // namespace

void *take_memory(size_t nbytes) {
    auto &blocks = kept_blocks();
    void *memory = nullptr;
    auto found = blocks.find(nbytes); // steps repeat, so sizes do
    if (found != blocks.end()) {
        memory = found->second;
        usage.kept -= nbytes;
        blocks.erase(found);
    } else {
        size_t wanted = usage.live + nbytes;
        drop_until(usage.peak > wanted ? usage.peak - wanted : 0);
        const bool huge = nbytes >= HUGE_PAGE;
        if (posix_memalign(&memory, huge ? HUGE_PAGE : 64, std::max<size_t>(nbytes, 64)) != 0) return nullptr;
#ifdef MADV_HUGEPAGE
        if (huge) madvise(memory, nbytes, MADV_HUGEPAGE); // a hint: fewer faults, fewer look-ups of addresses
#endif
    }
    usage.live += nbytes;
    usage.peak = std::max(usage.peak, usage.live);
    return memory;
}

void give_memory(void *memory, size_t nbytes) {
    usage.live -= nbytes;
    usage.kept += nbytes;
    try {
        kept_blocks().emplace(nbytes, memory);
    } catch (...) {
        usage.kept -= nbytes;
        std::free(memory);
    }
}

void drop_kept() { drop_until(0); }

Usage memory_usage() { return usage; }
