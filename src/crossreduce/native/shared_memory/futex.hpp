// Waiting for other processes: the clock, a pause between two reads, and futexes in shared memory.
#pragma once

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// After spinning a rank yields its CPU until it has waited for this time, then it sleeps: to wake a sleeping rank takes
// about 50 us, to yield to another one 1 us.
constexpr int64_t YIELD_NS = 200000;
// How long a thread yields its CPU that did not make the group: a step of DDP on 8 ranks took 0.96 of the time with YIELD_NS.
constexpr int64_t HELPER_YIELD_NS = 20000;

// If yielding takes longer, another thread has run on this processor: perhaps the rank that is awaited, which spinning delays.
constexpr int64_t SWITCH_NS = 1500;

inline int64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
    timespec time;
    clock_gettime(clock, &time);
    return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#if defined(__linux__)
// Sleep for at most `ns` while the word has this value. Return false if a signal ended the sleep.
inline bool futex_wait(std::atomic<uint32_t> &word, uint32_t value, int64_t ns) {
    timespec time = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    return syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0) == 0 || errno != EINTR;
}
inline void futex_wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
#endif
