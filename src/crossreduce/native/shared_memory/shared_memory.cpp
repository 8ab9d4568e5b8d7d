#include "shared_memory.hpp"

#include <algorithm>
#include <cstring>

#include "available_memory.hpp"
#include "futex.hpp"

#if defined(__linux__)
#include <cerrno>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#endif

namespace {

// Below this many bytes read and written, waking another thread costs more time than it saves.
constexpr int64_t THREADED_NBYTES = 1 << 20;
constexpr int64_t PAGE = 4096;
// A rank with pending messages to or from other hosts sleeps at most this long at a time.
constexpr int64_t NAP_NS = 200000;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "other processes do not share a lock");

// Return a number that differs for other signatures and other ops, except by a chance of 2**-64 (the mix is murmur3's).
uint64_t digest_of(const std::string &signature, uint64_t op) {
    uint64_t digest = op + 0x9e3779b97f4a7c15 * (signature.size() + 1);
    for (size_t at = 0; at < signature.size(); at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, signature.data() + at, std::min<size_t>(8, signature.size() - at));
        digest ^= word;
        digest = (digest ^ digest >> 33) * 0xff51afd7ed558ccd;
        digest = (digest ^ digest >> 33) * 0xc4ceb9fe1a85ec53;
        digest ^= digest >> 33;
    }
    return digest;
}

} // namespace

int64_t SharedMemory::slots_offset(int ranks) {
    const auto before = sizeof(GroupState) + static_cast<size_t>(ranks) * (sizeof(RankState) + row_of_waits(ranks) * sizeof(WaitCounts));
    return (static_cast<int64_t>(before) + PAGE - 1) / PAGE * PAGE;
}

int64_t SharedMemory::nbytes(int ranks, int64_t slot) { return slots_offset(ranks) + ranks * slot; }

SharedMemory *SharedMemory::over(void *memory, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads) {
    auto *made = new SharedMemory();
    made->rank = rank;
    made->ranks = ranks;
    made->slot = slot;
    made->spin_ns = spin_ns;
    made->threads = threads;
    made->group = static_cast<GroupState *>(memory); // all zeros at first
    made->states = reinterpret_cast<RankState *>(static_cast<char *>(memory) + sizeof(GroupState));
    made->wait_counts = reinterpret_cast<WaitCounts *>(made->states + ranks);
    made->slots = static_cast<char *>(memory) + slots_offset(ranks);
    made->calls.attach(made->states[rank].calls, &made->waits(rank, 0));
    return made;
}

void SharedMemory::describe(const std::vector<int64_t> &global_ranks, const std::string &text) {
    if (rank != 0) return;
    for (int of = 0; of < ranks; of++) states[of].global_rank.store(global_ranks[of], std::memory_order_relaxed);
    group->ranks = static_cast<uint32_t>(ranks);
    group->about_length = static_cast<uint32_t>(std::min<size_t>(text.size(), ABOUT_NBYTES));
    std::memcpy(group->about, text.data(), group->about_length);
    group->layout.store(LAYOUT, std::memory_order_release);
}

#if defined(__linux__)

SharedMemory *SharedMemory::map(int fd, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads, int64_t ready) {
    const auto size = static_cast<size_t>(nbytes(ranks, slot));
    struct stat found;
    if (fstat(fd, &found) != 0) return nullptr;
    if (found.st_size < static_cast<off_t>(size)) { // an access beyond the end would kill the process
        errno = ENOSPC;
        return nullptr;
    }
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, size, MADV_DONTFORK); // a forked child is not a rank
    SharedMemory *made = over(at, rank, ranks, slot, spin_ns, threads);
    made->mapped_nbytes = size;
    made->fd = fd;
    made->ready = ready;
    made->process = getpid();
    made->probe = now_ns(CLOCK_MONOTONIC) ^ reinterpret_cast<intptr_t>(made);
    RankState &own = made->states[rank];
    own.process.store(made->process, std::memory_order_relaxed);
    own.probe.store(made->probe, std::memory_order_relaxed);
    own.buffer(0, 0).store(reinterpret_cast<uint64_t>(&made->probe), std::memory_order_release);
    return made;
}

SharedMemory::~SharedMemory() {
    // A forked child may have mapped something else at this address.
    if (mapped_nbytes > 0 && getpid() == process) munmap(group, mapped_nbytes);
}

// Read from a buffer of the caller of another rank's current op. Return false, with errno, if that fails.
bool SharedMemory::read_peer(int of, int buffer, int64_t offset, char *to, int64_t nbytes) const {
    RankState &peer = states[of];
    const auto process_id = static_cast<pid_t>(peer.process.load(std::memory_order_relaxed));
    uint64_t from = peer.buffer(number, static_cast<size_t>(buffer)).load(std::memory_order_acquire) + static_cast<uint64_t>(offset);
    while (nbytes > 0) {
        iovec here = {to, static_cast<size_t>(nbytes)}, there = {reinterpret_cast<void *>(from), here.iov_len};
        const ssize_t count = process_vm_readv(process_id, &here, 1, &there, 1, 0);
        if (count <= 0) return false;
        to += count, from += static_cast<uint64_t>(count), nbytes -= count;
    }
    return true;
}

bool SharedMemory::can_read(int of) const {
    int64_t found = 0;
    return read_peer(of, 0, 0, reinterpret_cast<char *>(&found), sizeof found) &&
           found == states[of].probe.load(std::memory_order_relaxed);
}

// Make this many bytes of each half of this rank's slot usable. Return false if the system has not enough memory: an access
// to memory that is not allocated would then kill the process.
bool SharedMemory::allocate(int64_t nbytes) {
    int64_t wanted = ready;
    while (wanted < nbytes) wanted *= 2; // few calls
    wanted = std::min(wanted, slot / 2);
    // In a control group, Linux does not refuse to allocate, but kills processes.
    if (available_memory() < 2 * static_cast<size_t>(wanted - ready)) return false;
    for (int half = 0; half < 2; half++) {
        const int64_t at = slots_offset(ranks) + rank * slot + half * (slot / 2);
        for (int failure = EINTR; failure == EINTR;)
            if ((failure = posix_fallocate(fd, at + ready, wanted - ready)) != 0 && failure != EINTR) return false;
    }
    ready = wanted;
    return true;
}

void SharedMemory::arrive() {
    RankState &own = states[rank];
    arrivals++;
    met = 0;
    latest = -1;
    waiting = true;
    own.arrivals.store(arrivals, std::memory_order_release);
    // A sleeper counts itself before it reads the bell: either it reads the new value, or this reads its count.
    own.bell.store(static_cast<uint32_t>(arrivals), std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(own.bell);
}

// Whether all ranks have reached this rank's barrier.
bool SharedMemory::all_reached() {
    for (; met < ranks - 1; met++) {
        const int other = (rank + 1 + met) % ranks;
        if (states[other].arrivals.load(std::memory_order_acquire) >= arrivals) continue;
        latest = other;
        return false;
    }
    return true;
}

// Wait until all ranks have reached this rank's barrier, or the time is over; return whether they have.
bool SharedMemory::wait(int64_t until_ns) {
    bool reached = all_reached();
    if (reached && latest < 0) return true;
    if (!reached) {
        const int64_t began = now_ns(CLOCK_MONOTONIC);
        reached = wait_from(began, until_ns);
        calls.add_wait(latest, now_ns(CLOCK_MONOTONIC) - began);
    }
    // The ranks are checked in order, from the first that is missing on, so the last one that was missing arrived last:
    // in this wait, or after an earlier one for the same barrier.
    if (reached) calls.add_barrier(latest);
    return reached;
}

bool SharedMemory::wait_from(int64_t now, int64_t until_ns) {
    // A thread that runs ops beside its process's own work sleeps early: yielding takes the CPU from that work.
    const int64_t yield_ns = std::this_thread::get_id() == maker ? YIELD_NS : HELPER_YIELD_NS;
    const int64_t spin = std::min(until_ns, now + spin_ns), yield = std::min(until_ns, now + yield_ns);
    while (now < spin && !shares_cpu) {
        for (int k = 0; k < 64; k++) {
            if (all_reached()) return true;
            relax();
        }
        now = now_ns(CLOCK_MONOTONIC);
    }
    while (now < yield) {
        if (progress) progress();
        sched_yield();
        const int64_t began = now;
        now = now_ns(CLOCK_MONOTONIC);
        shares_cpu = now - began > SWITCH_NS;
        if (all_reached()) return true;
    }
    while (now < until_ns && group->aborted.load(std::memory_order_acquire) == 0) {
        const int64_t left = progress && progress() ? std::min(until_ns - now, NAP_NS) : until_ns - now;
        RankState &late = states[(rank + 1 + met) % ranks];
        late.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = late.bell.load(std::memory_order_seq_cst);
        // A rank may have been killed or stopped between its arrival and the ring of its bell.
        const bool reached = late.arrivals.load(std::memory_order_acquire) >= arrivals;
        if (!reached) futex_wait(late.bell, seen, left);
        late.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (all_reached()) return true;
        now = now_ns(CLOCK_MONOTONIC);
    }
    return all_reached(); // a rank may have aborted after all had arrived
}

void SharedMemory::abort(const std::string &text) {
    uint32_t none = 0;
    if (!group->aborted.compare_exchange_strong(none, 2 + static_cast<uint32_t>(rank), std::memory_order_acq_rel)) return;
    group->cause_length = static_cast<uint32_t>(std::min<size_t>(text.size(), CAUSE_NBYTES));
    std::memcpy(group->cause, text.data(), group->cause_length);
    group->aborted.store(1, std::memory_order_release);
    for (int of = 0; of < ranks; of++) futex_wake_all(states[of].bell);
}

#else // no futex

SharedMemory *SharedMemory::map(int, int, int, int64_t, int64_t, int, int64_t) {
    errno = ENOSYS;
    return nullptr;
}
SharedMemory::~SharedMemory() = default;
bool SharedMemory::allocate(int64_t) { return false; }
void SharedMemory::arrive() {}
bool SharedMemory::read_peer(int, int, int64_t, char *, int64_t) const { return false; }
bool SharedMemory::can_read(int) const { return false; }
bool SharedMemory::wait(int64_t) { return false; }
bool SharedMemory::wait_from(int64_t, int64_t) { return false; }
void SharedMemory::abort(const std::string &) {}

#endif

std::string SharedMemory::cause() const {
    if (group->aborted.load(std::memory_order_acquire) != 1) return {};
    return {group->cause, std::min<size_t>(group->cause_length, CAUSE_NBYTES)}; // a rank may have written any length
}

int SharedMemory::aborting_rank() const {
    const uint32_t aborted = group->aborted.load(std::memory_order_acquire);
    return aborted < 2 ? -1 : static_cast<int>(aborted - 2);
}

void SharedMemory::begin(const RankProgram &new_program, std::vector<char *> memory, const std::string &signature) {
    program = &new_program;
    buffers = std::move(memory);
    next = executed = 0;
    waiting = begun = differs = false;
    number++;
    const auto turn = static_cast<int64_t>(number / 2 % static_cast<uint64_t>(turns));
    start = static_cast<int64_t>(number % 2) * (slot / 2) + turn * TURN_NBYTES;
    RankState &own = states[rank];
    calls.begin(number, signature, program->kind, program->has_parts ? sent_nbytes() : program->nbytes);
    own.number.store(number, std::memory_order_release);
    const int64_t used = turn * TURN_NBYTES + (program->has_parts ? slot_nbytes_of_parts() : program->slot_nbytes);
    lacks_memory = used > ready && !allocate(used);
    if (is_aborted()) return; // this op will not run; others may still need what the last ones published
    for (size_t k = 0; k < READABLE_BUFFERS && k < buffers.size(); k++)
        own.buffer(number, k).store(reinterpret_cast<uint64_t>(buffers[k]), std::memory_order_relaxed);
    own.digests[number % 2].store(digest_of(signature, number), std::memory_order_relaxed);
}

// Whether all ranks have the same signature for the current op. All ranks have begun it, and none can be so far ahead
// that it has replaced the digest.
bool SharedMemory::signatures_match() const {
    const auto digest = [&](int of) { return states[of].digests[number % 2].load(std::memory_order_relaxed); };
    for (int of = 0; of < ranks; of++)
        if (digest(of) != digest(rank)) return false;
    return true;
}

// Exchange messages with other hosts, or check what the host's first rank has found in doing so.
Outcome SharedMemory::run_messages(const Instruction &one, const Address &address, int64_t until_ns) {
    if (one.messages < 0)
        return *reinterpret_cast<const int32_t *>(memory(0)) == SAME ? Outcome::done : Outcome::differs;
    if (differs || !exchange) return Outcome::done;
    const HostMessages &messages = program->messages[static_cast<size_t>(one.messages)];
    const int64_t began = now_ns(CLOCK_MONOTONIC);
    const Outcome outcome = exchange(messages, address, number, until_ns);
    calls.add_between_hosts(static_cast<uint64_t>(now_ns(CLOCK_MONOTONIC) - began));
    if (outcome != Outcome::done && outcome != Outcome::differs) return outcome;
    calls.trace(messages.compared.empty() ? Phase::between_hosts : Phase::agree, next);
    differs = outcome == Outcome::differs;
    if (!messages.compared.empty()) *reinterpret_cast<int32_t *>(memory(rank)) = differs ? DIFFERENT : SAME;
    return Outcome::done; // the ranks of the host end the op together, when they check this
}

Outcome SharedMemory::run(const std::vector<Instruction> &instructions, int64_t until_ns) {
    const Address address = [&](const BufferRef &ref) {
        if (ref.region >= 0) return memory(ref.region) + ref.offset;
        return buffers[static_cast<size_t>(~ref.region)] + ref.offset;
    };
    // The lines of a result that is written in place are in the cache.
    const bool in_place = buffers.size() > 1 && buffers[0] == buffers[1];
    Phase phase = Phase::none; // of the instructions since the last record of a trace
    const auto trace_until = [&](Phase following) {
        if (phase != Phase::none && phase != following) calls.trace(phase, next);
        phase = following;
    };
    for (; executed < instructions.size(); executed++) {
        const Instruction &one = instructions[executed];
        if (calls.is_traced()) trace_until(one.phase);
        if (one.kernel == nullptr) {
            if (one.messages == PUT_PARTS) {
                put_parts();
                continue;
            }
            const Outcome outcome = one.messages == TAKE_PARTS ? take_parts() : run_messages(one, address, until_ns);
            if (outcome != Outcome::done) return outcome;
            continue;
        }
        if (one.sources[0].region >= PEER_BUFFER) { // a copy
            const int64_t nbytes = one.kernel->elements * static_cast<int64_t>(ITEMSIZES[one.kernel->result]);
            const int peer = one.sources[0].region - PEER_BUFFER;
            const int of = peer / READABLE_BUFFERS, buffer = peer % READABLE_BUFFERS;
            if (read_peer(of, buffer, one.sources[0].offset, address(one.results[0]), nbytes)) continue;
            return group->aborted.load(std::memory_order_acquire) != 0 ? Outcome::aborted : Outcome::unreadable;
        }
        sources.clear();
        results.clear();
        for (const BufferRef &ref : one.sources) sources.push_back({address(ref), nullptr});
        for (const BufferRef &ref : one.results) results.push_back(address(ref));
        const int count = traffic_nbytes(*one.kernel) < THREADED_NBYTES ? 1 : threads;
        if (!run_kernel(*one.kernel, sources, results, count, one.streaming && !in_place)) return Outcome::out_of_memory;
    }
    if (calls.is_traced()) trace_until(Phase::none);
    return Outcome::done;
}

Outcome SharedMemory::advance(size_t until, int64_t slice_ns) {
    const int64_t until_ns = now_ns(CLOCK_MONOTONIC) + slice_ns;
    while (next < until) {
        // A rank that aborted may have left an op unfinished. In its next op it must not arrive at a barrier, since the
        // others would count that for the unfinished op, nor write to its slot, from which they may still read.
        if (!waiting && group->aborted.load(std::memory_order_acquire) != 0) {
            abort_trace();
            return Outcome::aborted;
        }
        if (next > 0 && !begun) {
            if (!waiting) {
                arrive();
                // A rank that never waits must also return regularly, so that its caller can check the peers.
                if (now_ns(CLOCK_MONOTONIC) >= until_ns) return Outcome::waiting;
            }
            if (!wait(until_ns)) {
                calls.trace_open_wait(latest, next);
                if (group->aborted.load() == 0) return Outcome::waiting;
                abort_trace();
                return Outcome::aborted;
            }
            waiting = false;
            if (latest >= 0) calls.trace(Phase::wait, next, latest);
            if (next == 1 && !signatures_match()) {
                end_op(Outcome::mismatch);
                return Outcome::mismatch;
            }
        }
        begun = true;
        if (lacks_memory) return Outcome::out_of_memory;
        const Outcome outcome = run(program->stages[next], until_ns);
        if (outcome == Outcome::aborted) abort_trace();
        if (outcome == Outcome::differs) end_op(Outcome::mismatch);
        if (outcome != Outcome::done) return outcome;
        next++;
        executed = 0;
        begun = false;
    }
    if (next == program->stages.size()) {
        calls.end(static_cast<int>(Outcome::done), true);
        program = nullptr;
    }
    return Outcome::done;
}

void SharedMemory::abort_trace() {
    if (waiting && latest >= 0) calls.trace_open_wait(latest, next);
    calls.abort_trace(static_cast<int>(Outcome::aborted));
}

void SharedMemory::end_op(Outcome outcome) {
    calls.end(static_cast<int>(outcome), false);
    program = nullptr;
}
