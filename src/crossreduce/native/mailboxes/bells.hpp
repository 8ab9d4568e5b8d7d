// Wakes threads that sleep at sockets. Each of them has an eventfd of its own: if they shared one, the first thread that
// resets it could do so before another one has seen it.
#pragma once

#if defined(__linux__)
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <sys/eventfd.h>
#include <unistd.h>
#include <vector>

class Bells {
  public:
    Bells() = default;
    Bells(const Bells &) = delete;
    Bells &operator=(const Bells &) = delete;
    ~Bells() {
        for (const int fd : spare) ::close(fd);
    }

    // Wake all threads that have a bell. If such a thread does not sleep, its next sleep ends at once.
    void ring() {
        const std::lock_guard<std::mutex> held(lock);
        const uint64_t one = 1;
        for (const int fd : used) (void)!::write(fd, &one, sizeof one);
    }

    class Bell { // of one thread
      public:
        explicit Bell(Bells &made_by) noexcept : all(made_by) {
            const std::lock_guard<std::mutex> held(all.lock);
            try {
                all.used.reserve(all.used.size() + 1);
                all.spare.reserve(all.used.size() + all.spare.size() + 1);
            } catch (const std::bad_alloc &) {
                return;
            }
            if (all.spare.empty()) {
                fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            } else {
                fd = all.spare.back();
                all.spare.pop_back();
            }
            if (fd >= 0) all.used.push_back(fd);
        }
        ~Bell() {
            if (fd < 0) return;
            const std::lock_guard<std::mutex> held(all.lock);
            all.used.erase(std::find(all.used.begin(), all.used.end(), fd));
            reset();
            all.spare.push_back(fd);
        }
        Bell(const Bell &) = delete;
        Bell &operator=(const Bell &) = delete;
        // Call this after a sleep and before looking for work, so that nothing is missed.
        void reset() const {
            uint64_t rung;
            if (fd >= 0) (void)!::read(fd, &rung, sizeof rung);
        }
        int fd = -1; // readable: it was rung; -1: there are too many descriptors, or no memory

      private:
        Bells &all;
    };

  private:
    std::mutex lock; // of the lists
    std::vector<int> used, spare;
};
#else
struct Bells {
    struct Bell {};
};
#endif
