// Memory for results, from a pool that reuses freed blocks.
//
// Fresh memory costs more than the reduction that fills it, because the system clears every page first. So freed blocks
// stay in the pool for some seconds. A thread then returns them to the system; it exists only while the pool is not
// empty. The pool holds at most
// - as many bytes as, with those in use, make the most bytes that were ever in use;
// - half of the bytes that the machine, or the control group of this process, would have left without the pool. The
//   thread measures them once a second.
//
// Any thread may call any function. A forked child starts with an empty pool.
#pragma once

#include <cstddef>

struct MemoryUsage {
    size_t live, pooled, peak; // bytes in use, bytes in the pool, the most bytes ever in use
};

void *allocate_memory(size_t nbytes); // aligned to at least 64 bytes; null: out of memory
void free_memory(void *memory, size_t nbytes);
void empty_pool();
// Do what the thread does once a second, as if the time were `later` seconds later, and `available` bytes were left.
void trim_pool(double later, size_t available);
MemoryUsage memory_usage();
