// One pool of threads for the whole process. A job is a number of units that may run in any order; the caller works too.
#pragma once

#include <atomic>
#include <cstddef>

struct Job {
    void (*work)(void *given, long unit, char *scratch); // must not throw
    void *given;
    long units;
    int helpers;    // how many threads may help the caller
    size_t scratch; // bytes of working memory that each thread needs; it keeps them until it ends
    std::atomic<long> next{0};
    int active = 0;
    Job *following = nullptr;
};

// Run all units and return when they are done. Returns false where the caller's scratch could not be allocated, and
// then nothing has run. Threads are started when they are first needed; where one cannot be, fewer help. Any number of
// threads may call it at once. A forked child starts with no helpers and makes its own.
bool run_job(Job &job);

// How many helpers were started so far in this process.
int pool_size();
