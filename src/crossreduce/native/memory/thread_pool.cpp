#include "thread_pool.hpp"

#include "per_thread.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <pthread.h>
#include <signal.h>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace {

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t task_added = PTHREAD_COND_INITIALIZER, helpers_done = PTHREAD_COND_INITIALIZER;
ParallelTask *tasks = nullptr; // the tasks with shares left, the newest one last
std::atomic<uint64_t> added{0}; // how many tasks there were
int started = 0;
struct Scratch {
    char *memory = nullptr;
    size_t nbytes = 0;
    ~Scratch() { std::free(memory); }
};
const PerThread<Scratch> scratches;

// Return at least this much memory that belongs to the calling thread, or null.
char *own_scratch(size_t nbytes) {
    Scratch *own = scratches.get();
    if (own == nullptr) return nullptr;
    if (own->nbytes < nbytes) {
        void *memory = nullptr;
        if (posix_memalign(&memory, 4096, nbytes) != 0) return nullptr;
        std::free(own->memory);
        own->memory = static_cast<char *>(memory), own->nbytes = nbytes;
    }
    return own->memory;
}

void before_fork() { pthread_mutex_lock(&lock); }
void after_fork() { pthread_mutex_unlock(&lock); }
void in_child() { // a child has neither the helpers nor the threads that wait for them
    pthread_cond_init(&task_added, nullptr);
    pthread_cond_init(&helpers_done, nullptr);
    tasks = nullptr;
    started = 0;
    pthread_mutex_unlock(&lock);
}
// The handlers are registered when the module is loaded, which holds the GIL. If the first run registered them, another
// thread could fork at that moment without them, and its child would count helpers that it does not have.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, in_child);

// Sets the default floating-point environment of IEEE 754. Frameworks make some threads flush subnormal numbers, but
// results must not depend on the thread.
struct DefaultFloatingPoint {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    DefaultFloatingPoint() { _mm_setcsr(0x1f80); }
    ~DefaultFloatingPoint() { _mm_setcsr(before); }
#else
    std::fenv_t before;
    DefaultFloatingPoint() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&before); }
#endif
};

// Wait as long as a condition holds, but only for some microseconds: as long as it may take a helper to finish its last
// share, or a caller to add another task. To wake a thread that sleeps instead takes longer than that.
template <class Condition> void spin_while(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(30);
    while (condition() && std::chrono::steady_clock::now() < end) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
}

void run_shares(ParallelTask &task, bool is_helper, char *scratch) {
    DefaultFloatingPoint environment;
    while (task.taken.fetch_add(1, std::memory_order_relaxed) < task.shares) {
        const long share = is_helper ? task.shares - 1 - task.last_taken.fetch_add(1, std::memory_order_relaxed)
                                     : task.first_taken++;
        task.function(task.argument, share, scratch);
    }
}

void remove(ParallelTask &task) {
    for (ParallelTask **at = &tasks; *at != nullptr; at = &(*at)->next)
        if (*at == &task) {
            *at = task.next;
            return;
        }
}

void *help(void *) {
    bool spins = false; // after a task, since the next one often follows at once
    pthread_mutex_lock(&lock);
    for (;;) {
        ParallelTask *task = tasks;
        while (task != nullptr && task->active >= task->helpers) task = task->next;
        if (task == nullptr && spins) {
            const uint64_t seen = added;
            pthread_mutex_unlock(&lock);
            spin_while([&] { return added.load(std::memory_order_relaxed) == seen; });
            pthread_mutex_lock(&lock);
            spins = false;
            continue;
        }
        if (task == nullptr) {
            pthread_cond_wait(&task_added, &lock);
            continue;
        }
        spins = true;
        task->active++;
        pthread_mutex_unlock(&lock);
        if (char *scratch = own_scratch(task->scratch_nbytes)) run_shares(*task, true, scratch);
        pthread_mutex_lock(&lock);
        remove(*task); // no share is left, or this thread has no memory
        if (--task->active == 0) pthread_cond_broadcast(&helpers_done);
    }
}

} // namespace

bool run_parallel(ParallelTask &task) {
    char *scratch = own_scratch(task.scratch_nbytes);
    if (scratch == nullptr) return false;
    task.helpers = static_cast<int>(std::min<long>(task.helpers, task.shares - 1)); // more helpers would have no share
    if (task.helpers > 0) {
        pthread_mutex_lock(&lock);
        while (started < task.helpers && start_thread(help)) started++;
        ParallelTask **end = &tasks;
        while (*end != nullptr) end = &(*end)->next;
        *end = &task;
        added++;
        for (int k = 0; k < task.helpers; k++) pthread_cond_signal(&task_added);
        pthread_mutex_unlock(&lock);
    }
    run_shares(task, false, scratch);
    if (task.helpers > 0) {
        spin_while([&] { return task.active.load(std::memory_order_relaxed) > 0; });
        pthread_mutex_lock(&lock);
        remove(task);
        while (task.active > 0) pthread_cond_wait(&helpers_done, &lock);
        pthread_mutex_unlock(&lock);
    }
    return true;
}

int helpers_started() { return started; }

bool start_thread(void *(*function)(void *)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const bool done = pthread_create(&thread, &detached, function, nullptr) == 0;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return done;
}
