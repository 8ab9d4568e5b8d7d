#include "memory_pool.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <new>
#include <pthread.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "available_memory.hpp"
#include "thread_pool.hpp"

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds KEPT{5}, PERIOD{1};
constexpr size_t HUGE_PAGE = 2 << 20;

struct Freed {
    void *memory;
    Clock::time_point since;
};
using Blocks = std::multimap<size_t, Freed>; // blocks of one size are in the order in which they were freed

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; // guards everything below
struct Lock {
    Lock() { pthread_mutex_lock(&mutex); }
    ~Lock() { pthread_mutex_unlock(&mutex); }
};
// Never destroyed: results, and the thread, may outlive this module.
Blocks &pool = *new Blocks, &leaving = *new Blocks; // `leaving`: blocks that are being returned to the system
MemoryUsage usage{0, 0, 0};
size_t reach = 0; // at the last measurement: bytes in use, bytes in the pool, and the bytes that the system had left
bool watched = false; // whether the thread runs
const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// Return the pages of a block to the system. The C library alone would keep those of blocks that it has not mapped.
void drop_pages(const Blocks::value_type &block) {
    const auto start = reinterpret_cast<uintptr_t>(block.second.memory);
    const uintptr_t first = (start + page - 1) & ~(page - 1), end = (start + block.first) & ~(page - 1);
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED);
}

void release(Blocks &blocks, Blocks::iterator block) {
    drop_pages(*block);
    std::free(block->second.memory);
    blocks.erase(block);
}

// Return the largest blocks to the system, which takes the fewest calls, until at most `limit` bytes are in the pool.
void shrink_pool(size_t limit) {
    while (usage.pooled > limit && !pool.empty()) {
        auto block = std::prev(pool.end());
        usage.pooled -= block->first;
        release(pool, block);
    }
}

// Return the most bytes that the pool may hold if `live` bytes are in use.
size_t limit(size_t live) {
    const auto without = [live](size_t bytes) { return bytes > live ? bytes - live : 0; };
    return std::min(without(usage.peak), without(reach) / 2);
}

void measured(size_t available) {
    reach = usage.live + usage.pooled + available;
    shrink_pool(limit(usage.live));
}

// Return the blocks to the system that were freed at least KEPT before `now`. The mutex is unlocked while their pages
// are dropped, which can take long.
void drop_unused(Clock::time_point now) {
    for (auto block = pool.begin(); block != pool.end();) {
        const size_t nbytes = block->first;
        if (now - block->second.since < KEPT) {
            block = pool.upper_bound(nbytes);
            continue;
        }
        usage.pooled -= nbytes;
        auto left = leaving.insert(pool.extract(block));
        pthread_mutex_unlock(&mutex);
        drop_pages(*left);
        pthread_mutex_lock(&mutex);
        std::free(left->second.memory);
        leaving.erase(left);
        block = pool.lower_bound(nbytes);
    }
}

void *watch(void *) {
    for (;;) {
        std::this_thread::sleep_for(PERIOD);
        const size_t available = available_memory();
        Lock lock;
        measured(available);
        drop_unused(Clock::now());
        watched = !pool.empty();
        if (!watched) return nullptr;
    }
}

void before_fork() { pthread_mutex_lock(&mutex); }
void after_fork() { pthread_mutex_unlock(&mutex); }
void in_child() { // a child has no thread that would return the blocks to the system
    watched = false;
    for (Blocks *blocks : {&pool, &leaving})
        while (!blocks->empty()) release(*blocks, blocks->begin());
    usage.pooled = 0;
    pthread_mutex_unlock(&mutex);
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, in_child);

} // namespace

void *allocate_memory(size_t nbytes) {
    Lock lock;
    void *memory = nullptr;
    auto found = pool.upper_bound(nbytes); // training steps repeat, so sizes repeat
    if (found != pool.begin() && (--found)->first == nbytes) {
        memory = found->second.memory; // the block that was freed last: the others may go if they are not needed
        usage.pooled -= nbytes;
        pool.erase(found);
    } else {
        shrink_pool(limit(usage.live + nbytes));
        const bool huge = nbytes >= HUGE_PAGE;
        const auto allocate = [&] {
            return posix_memalign(&memory, huge ? HUGE_PAGE : 64, std::max<size_t>(nbytes, 64)) == 0;
        };
        if (!allocate()) {
            shrink_pool(0);
            if (!allocate()) return nullptr;
        }
#ifdef MADV_HUGEPAGE
        if (huge) madvise(memory, nbytes, MADV_HUGEPAGE); // a hint: fewer page faults and TLB misses
#endif
    }
    usage.live += nbytes;
    usage.peak = std::max(usage.peak, usage.live);
    return memory;
}

void free_memory(void *memory, size_t nbytes) {
    Lock lock;
    usage.live -= nbytes;
    try {
        pool.emplace(nbytes, Freed{memory, Clock::now()});
    } catch (const std::bad_alloc &) {
        std::free(memory);
        return;
    }
    usage.pooled += nbytes;
    if (!watched) {
        watched = start_thread(watch);
        measured(watched ? available_memory() : 0);
    }
    shrink_pool(watched ? limit(usage.live) : 0);
}

void empty_pool() {
    Lock lock;
    shrink_pool(0);
}

void trim_pool(double later, size_t available) {
    Lock lock;
    measured(available);
    drop_unused(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(later)));
}

MemoryUsage memory_usage() {
    Lock lock;
    return usage;
}
