#include "pool.hpp"

#include <algorithm>
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
pthread_cond_t arrived = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
Job *jobs = nullptr; // those whose units are not all taken, newest last
int started = 0;
pthread_once_t once = PTHREAD_ONCE_INIT;
pthread_key_t key;
struct Scratch {
    char *memory;
    size_t size;
};
thread_local Scratch own{nullptr, 0};

// At least so much memory of the thread's own, or null.
char *own_scratch(size_t size) {
    if (own.size < size) {
        void *memory = nullptr;
        if (posix_memalign(&memory, 4096, size) != 0) return nullptr;
        std::free(own.memory);
        own = {static_cast<char *>(memory), size};
        pthread_setspecific(key, memory); // freed when the thread ends
    }
    return own.memory;
}

void before_fork() { pthread_mutex_lock(&lock); }
void after_fork() { pthread_mutex_unlock(&lock); }
void in_child() { // the helpers are not here, nor are the threads whose jobs they helped with
    pthread_mutex_init(&lock, nullptr);
    pthread_cond_init(&arrived, nullptr);
    pthread_cond_init(&left, nullptr);
    jobs = nullptr;
    started = 0;
}
void set_up() {
    pthread_key_create(&key, std::free);
    pthread_atfork(before_fork, after_fork, in_child);
}

// Floating point as IEEE 754 has it by default, whatever the calling thread was set to (frameworks flush subnormals in
// some threads): results must not depend on which thread works.
struct DefaultNumbers {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    DefaultNumbers() { _mm_setcsr(0x1f80); }
    ~DefaultNumbers() { _mm_setcsr(before); }
#else
    std::fenv_t before;
    DefaultNumbers() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultNumbers() { std::fesetenv(&before); }
#endif
};

void take_units(Job &job, char *memory) {
    DefaultNumbers numbers;
    for (long unit; (unit = job.next.fetch_add(1, std::memory_order_relaxed)) < job.units;)
        job.work(job.given, unit, memory);
}

void unlist(Job &job) {
    for (Job **at = &jobs; *at != nullptr; at = &(*at)->following)
        if (*at == &job) {
            *at = job.following;
            return;
        }
}

void *help(void *) {
    pthread_mutex_lock(&lock);
    for (;;) {
        Job *job = jobs;
        while (job != nullptr && job->active >= job->helpers) job = job->following;
        if (job == nullptr) {
            pthread_cond_wait(&arrived, &lock);
            continue;
        }
        job->active++;
        pthread_mutex_unlock(&lock);
        if (char *memory = own_scratch(job->scratch)) take_units(*job, memory);
        pthread_mutex_lock(&lock);
        unlist(*job); // nothing is left of it to take, or this thread cannot
        if (--job->active == 0) pthread_cond_broadcast(&left);
    }
}

void start_helpers(int wanted) { // with the lock held
    sigset_t all, before;
    sigfillset(&all); // signals are for the program's own threads
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (started < wanted && pthread_create(&thread, &detached, help, nullptr) == 0) started++;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace

bool run_job(Job &job) {
    pthread_once(&once, set_up);
    char *memory = own_scratch(job.scratch);
    if (memory == nullptr) return false;
    job.helpers = static_cast<int>(std::min<long>(job.helpers, job.units - 1)); // more would find nothing to do
    if (job.helpers > 0) {
        pthread_mutex_lock(&lock);
        if (started < job.helpers) start_helpers(job.helpers);
        Job **end = &jobs;
        while (*end != nullptr) end = &(*end)->following;
        *end = &job;
        for (int k = 0; k < job.helpers; k++) pthread_cond_signal(&arrived);
        pthread_mutex_unlock(&lock);
    }
    take_units(job, memory);
    if (job.helpers > 0) {
        pthread_mutex_lock(&lock);
        unlist(job);
        while (job.active > 0) pthread_cond_wait(&left, &lock);
        pthread_mutex_unlock(&lock);
    }
    return true;
}

int pool_size() { return started; }
