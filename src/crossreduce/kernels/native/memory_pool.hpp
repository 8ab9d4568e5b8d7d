// Memory for results, from a pool that reuses freed blocks.
//
// Fresh memory costs more than the reduction that fills it, because the system clears every page first. So freed blocks
// stay in the pool. The bytes in use and in the pool together never exceed the most bytes that were ever in use.
#pragma once

#include <cstddef>

struct MemoryUsage {
    size_t live, pooled, peak; // bytes in use, bytes in the pool, the most bytes ever in use
};

void *allocate_memory(size_t nbytes); // aligned to at least 64 bytes; null: out of memory
void free_memory(void *memory, size_t nbytes);
void empty_pool();
MemoryUsage memory_usage();
