#include "arena.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Below so many bytes read and written, waking a thread costs more than it helps.
constexpr int64_t THREADED = 1 << 20;
constexpr int64_t PAGE = 4096;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "a lock would be in one process only");

int64_t now_ns(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

int64_t slots_at(int ranks) {
    const auto before = static_cast<int64_t>(sizeof(Control)) + ranks * static_cast<int64_t>(sizeof(Seat));
    return (before + PAGE - 1) / PAGE * PAGE;
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t> &word, uint32_t value, int64_t ns) {
    timespec time = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#endif

} // namespace

int64_t SharedMemory::bytes(int ranks, int64_t slot) { return slots_at(ranks) + ranks * slot; }

SharedMemory *SharedMemory::over(void *memory, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads) {
    auto *made = new SharedMemory();
    made->rank = rank;
    made->ranks = ranks;
    made->slot = slot;
    made->spin_ns = spin_ns;
    made->threads = threads;
    made->control = static_cast<Control *>(memory); // zeros, which is how everything begins
    made->seats = reinterpret_cast<Seat *>(static_cast<char *>(memory) + sizeof(Control));
    made->slots = static_cast<char *>(memory) + slots_at(ranks);
    return made;
}

// The number is taken away before anything else changes, and is there again after everything has: each store releases
// what was stored before it, each load acquires before the next.
void Entry::write(uint64_t of, const std::string &words, int64_t ns) {
    number.store(0, std::memory_order_relaxed);
    const size_t size = std::min<size_t>(words.size(), TEXT_BYTES);
    length.store(static_cast<uint32_t>(size), std::memory_order_release);
    started_ns.store(ns, std::memory_order_release);
    ended_ns.store(0, std::memory_order_release);
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, words.data() + at, std::min<size_t>(8, size - at));
        text[at / 8].store(word, std::memory_order_release);
    }
    number.store(of, std::memory_order_release);
}

bool Entry::read(uint64_t of, std::string &words, int64_t &started, int64_t &ended) const {
    if (number.load(std::memory_order_acquire) != of) return false;
    const size_t size = std::min<size_t>(length.load(std::memory_order_acquire), TEXT_BYTES);
    char copy[TEXT_BYTES];
    for (size_t at = 0; at < size; at += 8) {
        const uint64_t word = text[at / 8].load(std::memory_order_acquire);
        std::memcpy(copy + at, &word, 8);
    }
    words.assign(copy, size);
    started = started_ns.load(std::memory_order_acquire);
    ended = ended_ns.load(std::memory_order_acquire);
    return number.load(std::memory_order_relaxed) == of;
}

#if defined(__linux__)

SharedMemory *SharedMemory::map(int fd, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads) {
    const auto size = static_cast<size_t>(bytes(ranks, slot));
    struct stat found;
    if (fstat(fd, &found) != 0) return nullptr;
    if (found.st_size < static_cast<off_t>(size)) { // whoever touches what is beyond dies
        errno = ENOSPC;
        return nullptr;
    }
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, size, MADV_DONTFORK); // a forked child must not take part in its parent's place
    SharedMemory *made = over(at, rank, ranks, slot, spin_ns, threads);
    made->mapped = size;
    made->owner = getpid();
    return made;
}

SharedMemory::~SharedMemory() {
    if (mapped > 0 && getpid() == owner) munmap(control, mapped); // in a forked child something else may be there
}

void SharedMemory::arrive() {
    // The last to arrive says so; all before it are in the release sequence, so whoever reads `met` sees their writes.
    const uint64_t all = control->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
    ticks++;
    // After it counts: whoever ends in between is missing at the next tick, and does not seem to have come to this one.
    seats[rank].arrivals.store(ticks, std::memory_order_relaxed);
    waiting = true;
    if (all % static_cast<uint64_t>(ranks) == 0) {
        control->met.store(static_cast<uint32_t>(ticks), std::memory_order_seq_cst);
        if (control->sleepers.load(std::memory_order_seq_cst) > 0) wake_all(control->met);
    }
}

// Whether all have arrived where this rank has, by then.
bool SharedMemory::wait(int64_t until_ns) {
    const auto before = [&](uint32_t met) { return static_cast<int32_t>(met - static_cast<uint32_t>(ticks)) < 0; };
    const auto reached = [&] { return !before(control->met.load(std::memory_order_acquire)); };
    if (reached()) return true;
    int64_t now = now_ns(CLOCK_MONOTONIC);
    const int64_t spin = std::min(until_ns, now + spin_ns);
    while (now < spin) {
        for (int k = 0; k < 64; k++) {
            if (reached()) return true;
            relax();
        }
        now = now_ns(CLOCK_MONOTONIC);
    }
    while (now < until_ns && control->broken.load(std::memory_order_acquire) == 0) {
        // Counted first, then looked at: whoever changes it afterwards sees the count and wakes.
        control->sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = control->met.load(std::memory_order_seq_cst);
        if (before(seen)) sleep_while(control->met, seen, until_ns - now);
        control->sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (reached()) return true;
        now = now_ns(CLOCK_MONOTONIC);
    }
    // The last to arrive may have been killed or stopped before it said so.
    return reached() || control->arrivals.load(std::memory_order_acquire) >= ticks * static_cast<uint64_t>(ranks);
}

void SharedMemory::give_up(const std::string &text) {
    uint32_t none = 0;
    if (!control->broken.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) return;
    control->cause_length = static_cast<uint32_t>(std::min<size_t>(text.size(), CAUSE_BYTES));
    std::memcpy(control->cause, text.data(), control->cause_length);
    control->broken.store(2, std::memory_order_release);
    wake_all(control->met);
}

#else // no futex

SharedMemory *SharedMemory::map(int, int, int, int64_t, int64_t, int) {
    errno = ENOSYS;
    return nullptr;
}
SharedMemory::~SharedMemory() = default;
void SharedMemory::arrive() {}
bool SharedMemory::wait(int64_t) { return false; }
void SharedMemory::give_up(const std::string &) {}

#endif

std::string SharedMemory::cause() const {
    if (control->broken.load(std::memory_order_acquire) != 2) return {};
    return {control->cause, control->cause_length};
}

void SharedMemory::begin(const Course &of, std::vector<char *> memory, const std::string &text) {
    course = &of;
    buffers = std::move(memory);
    next = 0;
    waiting = false;
    number++;
    entry = &seats[rank].entries[number % KEPT_OPS];
    entry->write(number, text, now_ns(CLOCK_MONOTONIC));
    seats[rank].number.store(number, std::memory_order_release);
}

// Whether all ranks described their op of this number in the same words. They have all begun it, and none can be so far
// ahead that it uses the entry again.
bool SharedMemory::alike() const {
    const uint32_t length = entry->length.load(std::memory_order_relaxed);
    for (int of = 0; of < ranks; of++) {
        const Entry &other = seats[of].entries[number % KEPT_OPS];
        if (other.number.load(std::memory_order_acquire) != number) return false;
        if (other.length.load(std::memory_order_relaxed) != length) return false;
        for (size_t word = 0; word < (length + 7) / 8; word++)
            if (other.text[word].load(std::memory_order_relaxed) != entry->text[word].load(std::memory_order_relaxed))
                return false;
    }
    return true;
}

bool SharedMemory::work(const std::vector<Work> &works) {
    const int64_t half = static_cast<int64_t>(number % 2) * (slot / 2);
    const auto at = [&](const Spot &spot) {
        if (spot.region >= 0) return memory(spot.region) + half + spot.offset;
        return buffers[static_cast<size_t>(~spot.region)] + spot.offset;
    };
    std::vector<Operand> sources;
    std::vector<char *> results;
    for (const Work &one : works) {
        sources.clear();
        results.clear();
        for (const Spot &spot : one.sources) sources.push_back({at(spot), nullptr});
        for (const Spot &spot : one.results) results.push_back(at(spot));
        const int helping = traffic(*one.plan) < THREADED ? 1 : threads;
        if (!run(*one.plan, sources, results, helping, one.streaming)) return false;
    }
    return true;
}

Outcome SharedMemory::advance(size_t until, int64_t slice_ns) {
    const int64_t until_ns = now_ns(CLOCK_MONOTONIC) + slice_ns;
    while (next < until) {
        // Whoever gave up may have left an op in the middle. In its next op it must neither arrive, which others would
        // take for an arrival at this one, nor write to its slot, where they may still read what the last op left.
        if (!waiting && control->broken.load(std::memory_order_acquire) != 0) return Outcome::broken;
        if (next > 0) {
            if (!waiting) {
                arrive();
                // Also whoever never waits looks round now and then.
                if (now_ns(CLOCK_MONOTONIC) >= until_ns) return Outcome::waiting;
            }
            if (!wait(until_ns)) return control->broken.load() != 0 ? Outcome::broken : Outcome::waiting;
            waiting = false;
            if (next == 1 && !alike()) {
                abandon();
                return Outcome::mismatch;
            }
        }
        if (!work(course->ticks[next])) return Outcome::memory;
        next++;
    }
    if (next == course->ticks.size()) abandon();
    return Outcome::done;
}

void SharedMemory::abandon() {
    if (course != nullptr) entry->ended_ns.store(now_ns(CLOCK_MONOTONIC), std::memory_order_relaxed);
    course = nullptr;
}
