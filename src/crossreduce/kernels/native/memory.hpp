// Memory for results, which is used again when a result is no longer held.
//
// Fresh memory costs more than the reduction that fills it: the system clears every page first. So freed blocks are
// kept, but never so many that those in use and those kept together are more than were once in use at the same time.
#pragma once

#include <cstddef>

struct Usage {
    size_t live, kept, peak; // bytes in use, kept for reuse, the most that were in use
};

void *take_memory(size_t nbytes); // aligned to 64 bytes at least; null: there is none
void give_memory(void *memory, size_t nbytes);
void drop_kept();
Usage memory_usage();
