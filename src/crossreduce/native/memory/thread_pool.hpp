// One thread pool per process. The shares of a task run in any order; the calling thread runs shares too.
#pragma once

#include <atomic>
#include <cstddef>

struct ParallelTask {
    void (*function)(void *argument, long share, char *scratch); // must not throw
    void *argument;
    long shares;
    int helpers;           // the maximum number of threads that help the caller
    size_t scratch_nbytes; // the bytes of working memory per thread; a thread keeps them until it ends
    // The caller takes shares from the first one on, helpers from the last one: if calls repeat with the same memory, it
    // is then more often in the cache of the same core.
    std::atomic<long> taken{0}, last_taken{0}; // by all threads; by helpers
    long first_taken = 0;                      // by the caller
    std::atomic<int> active{0}; // helpers that are running shares; changed under the pool's lock
    ParallelTask *next = nullptr;
};

// Run all shares, and return when they are done. Returns false if the caller's working memory could not be allocated;
// no share has run then. Threads are started when they are first needed; if one cannot be started, fewer threads help.
// Any number of threads may call this at once. A forked child starts without helpers and starts its own.
bool run_parallel(ParallelTask &task);

// Return how many helpers this process has started.
int helpers_started();

// Start a thread that ends by itself and handles no signals: the program's own threads do. Return whether it started.
bool start_thread(void *(*function)(void *));
