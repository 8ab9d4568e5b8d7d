// The progress of messages: reading the memory of other processes, waiting, the helper, and withdrawing.
#include <algorithm>
#include <cstdlib>
#include <exception>

#include "futex.hpp"
#include "mailboxes.hpp"

#if defined(__linux__)
#include <csignal>
#include <fcntl.h>
#include <optional>
#include <sched.h>
#include <sys/uio.h>
#include <system_error>

namespace {

constexpr uint64_t PIECE = 1 << 18;       // how much is read before a thread looks for other work, or ends its wait
constexpr int64_t FIRST_NAP_NS = 1000000; // a rank that sleeps asks the other one for help after this time,
                                          // and again each time it has doubled
constexpr int64_t HELP_NS = 100000000;    // a helper without work sleeps after this time
constexpr size_t MOST_POLLED = 8;         // with more ranks of other hosts, a look for their messages takes too long
constexpr size_t SPARE_NBYTES = 1 << 16;  // more than the work of one look at the rings allocates

} // namespace

// Whether some memory can be allocated. If not, a helper leaves the work to threads that wait, which can raise errors.
bool Mailboxes::has_memory() {
    void *volatile spare = std::malloc(SPARE_NBYTES); // volatile: the compiler must not leave this out
    std::free(spare);
    return spare != nullptr;
}

// Let the system allocate the rings that this rank writes: an access to memory that it cannot allocate would kill the process.
void Mailboxes::allocate_rings() {
    for (int failure = EINTR; failure != 0;)
        if ((failure = posix_fallocate(file, rings_offset, ranks * static_cast<int64_t>(capacity))) != 0 && failure != EINTR)
            throw std::bad_alloc();
    file = -1;
}

void Mailboxes::complete(const Shared &message, MessageStatus status) {
    message->status.store(status);
    if (message->forgotten) {
        messages.erase(message->id);
        ended.push_back(message->id);
        has_ended.store(true, std::memory_order_relaxed);
    }
    unfinished--;
    update_pending();
    if (own().sleepers.load() > 0) notify(rank); // another thread of this rank may wait for this message
}

// Read from the memory of another rank's process. Return false if that fails.
bool Mailboxes::read_peer(int of, uint64_t from, char *to, uint64_t count) const {
    const auto process_id = static_cast<pid_t>(boxes[of].process.load());
    while (count > 0) {
        iovec here = {to, static_cast<size_t>(count)}, there = {reinterpret_cast<void *>(from), here.iov_len};
        const ssize_t moved = process_vm_readv(process_id, &here, 1, &there, 1, 0);
        if (moved <= 0) return false;
        to += moved, from += static_cast<uint64_t>(moved), count -= static_cast<uint64_t>(moved);
    }
    return true;
}

bool Mailboxes::can_read(int src) {
    signed char &known = readable[static_cast<size_t>(src)];
    if (known < 0) {
        int64_t found = 0;
        known = may_read && read_peer(src, boxes[src].address.load(), reinterpret_cast<char *>(&found), sizeof found) &&
                found == boxes[src].probe.load();
    }
    return known != 0;
}

// Begin to read no further piece of a message.
void Mailboxes::end_reading(const Shared &message) {
    const auto at = std::find(reads.begin(), reads.end(), message);
    if (at != reads.end()) reads.erase(at);
    unread.store(static_cast<int>(reads.size()));
}

// Read a piece of an offer without the lock; other threads may read others. Return false if no piece is left.
bool Mailboxes::read_some(Lock &lock) {
    if (reads.empty()) return false;
    const Shared message = reads.front();
    const uint64_t start = message->moved, count = std::min(PIECE, message->nbytes - start);
    message->moved += count;
    message->readers++;
    if (message->moved == message->nbytes) end_reading(message);
    lock.unlock();
    const bool good = read_peer(message->source, message->address + start, message->memory + start, count);
    lock.lock();
    message->readers--;
    message->read += count;
    if (!good) {
        message->failed = true;
        end_reading(message);
    }
    if (message->withdrawn || message->readers > 0) return true;
    // A rank that leaves says so before it frees its memory. Its message is lost, and its end will be noticed.
    // After a rank has given up, others do not wait for it to read their memory.
    if ((message->failed || message->read == message->nbytes) && (mood(message->source) != OPEN || mood(rank) != OPEN))
        return true;
    if (message->failed) {
        readable[static_cast<size_t>(message->source)] = 0;
        message->moved = 0;
        pulled[{message->source, message->offer}] = message;
        reply(message->source, PULL, message->offer);
    } else if (message->read == message->nbytes) {
        reply(message->source, DONE, message->offer, message, MessageStatus::done);
    }
    return true;
}

// Progress

// Do what this rank can do now; begin nothing after `until_ns`. Return whether anything had changed. It does nothing, now
// and later, once there is no memory for it.
bool Mailboxes::advance(int64_t until_ns) {
    try {
        return !out_of_memory.load() && or_no_memory([&] { return progress(until_ns); });
    } catch (const std::bad_alloc &) {
        return false;
    }
}

bool Mailboxes::progress(int64_t until_ns) {
    const bool changed = are_remotes_open.load() && progress_remotes();
    if (own().bell.load() == scanned.load(std::memory_order_relaxed) && unread.load(std::memory_order_relaxed) == 0)
        return changed;
    Lock lock(mutex);
    do {
        const uint32_t seen = own().bell.load();
        if (seen != scanned.load(std::memory_order_relaxed)) {
            scanned.store(seen);
            for (int of = 0; of < ranks; of++) {
                drain(of);
                if (!outgoing[static_cast<size_t>(of)].empty() || !streams[static_cast<size_t>(of)].empty()) flush(of);
            }
        }
    } while (read_some(lock) && now_ns() < until_ns && !closed.load());
    return true;
}

int Mailboxes::source_of(uint64_t id) {
    const Lock lock(mutex);
    const auto found = messages.find(id);
    return found == messages.end() ? ANY_RANK : found->second->source;
}

MessageStatus Mailboxes::wait(uint64_t id, int64_t slice_ns, int &source, uint64_t &nbytes) {
    Shared message;
    {
        const Lock lock(mutex);
        const auto found = messages.find(id);
        if (found == messages.end()) return MessageStatus::unknown;
        message = found->second;
    }
    const auto finished = [&] { return message->status.load() != MessageStatus::waiting; };
    const auto result = [&] {
        const MessageStatus status = message->status.load();
        if (status == MessageStatus::waiting && out_of_memory.load()) return MessageStatus::no_memory;
        if (status == MessageStatus::waiting) return status; // another thread may match it now
        source = message->source;
        nbytes = message->found_nbytes;
        return status;
    };
    // A thread that waits for any rank sleeps at the bell, and the remote helper at the sockets.
    const bool is_far = is_remote(message->peer), is_mixed = message->peer == ANY_RANK && are_remotes_open.load();
    int64_t now = now_ns(), since = now, nap = FIRST_NAP_NS;
    const int64_t until = now + slice_ns;
    bool changed = advance(until);
    if (slice_ns <= 0 && !finished()) call_for_help(message->peer);
    if (slice_ns <= 0 || finished()) return result();
    std::atomic<int> &count = is_far ? sleepers_at_sockets : waiters;
    count.fetch_add(1);
    if (is_mixed && mixed_waiters.fetch_add(1) == 0) wake_remote_helper();
    bool undisturbed = true; // by signals, which Python handles
    std::optional<Bells::Bell> bell;
    while (undisturbed && !finished() && (now = now_ns()) < until && !closed.load() && !out_of_memory.load()) {
        if (now < since + spin_ns && !is_far && !shares_cpu.load()) {
            for (int k = 0; k < 64 && !(changed = advance(until)); k++) relax();
        } else if ((is_far && changed) || (now < since + YIELD_NS && (!is_far || remotes.size() <= MOST_POLLED))) {
            sched_yield();
            shares_cpu.store(now_ns() - now > SWITCH_NS);
            changed = advance(until);
        } else if (is_far) {
            if (bell) {
                undisturbed = pause(std::min(now + nap, until), *bell);
                nap = std::min(2 * nap, slice_ns);
            } else {
                bell.emplace(bells); // before the last look for work
            }
            changed = advance(until);
        } else {
            call_for_help(message->peer);
            own().sleepers.fetch_add(1);
            const uint32_t seen = own().bell.load();
            if (seen == scanned.load() && !finished() && unread.load() == 0 && !closed.load())
                undisturbed = futex_wait(own().bell, seen, std::min(nap, until - now));
            own().sleepers.fetch_sub(1);
            nap = std::min(2 * nap, slice_ns);
            changed = advance(until);
        }
        if (changed) since = now_ns();
    }
    count.fetch_sub(1);
    if (is_mixed) mixed_waiters.fetch_sub(1);
    if (is_far) {
        last_slept_at_sockets.store(now_ns());
        if (own().pending.load() != 0 && helper_waits_long.load()) wake_remote_helper();
    }
    return result();
}

// Wake the helper of a rank, or of all ranks, if it can do anything.
void Mailboxes::call_for_help(int of) const {
    if (is_remote(of)) return;
    for (int to = of == ANY_RANK ? 0 : of; to < (of == ANY_RANK ? ranks : of + 1); to++) {
        Box &box = boxes[to];
        if (to == rank || box.pending.load() == 0) continue;
        wake_helper(to);
    }
}

void Mailboxes::wake_helper(int of) const {
    boxes[of].help.fetch_add(1);
    if (boxes[of].helpers.load() > 0) futex_wake_all(boxes[of].help);
}

void Mailboxes::start_helper() {
    if (helper != nullptr || helper_failed || unfinished == 0) return;
    helper = start_thread(&Mailboxes::help);
    helper_failed = helper == nullptr;
}

// Return null if there are too many threads, or no memory: then only waiting threads make progress.
std::thread *Mailboxes::start_thread(void (Mailboxes::*run)()) {
    sigset_t all, before; // signals are for Python's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread *made = nullptr;
    try {
        made = new std::thread([this, run] { (this->*run)(); });
    } catch (const std::exception &) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return made;
}

// The helper works while another rank waits for this one, and no thread of this rank waits, or while it reads.
void Mailboxes::help() {
    Box &box = own();
    if (!has_memory()) return;
    // glibc ends a process in which a thread cannot allocate what its exceptions need: do it now.
    [[maybe_unused]] const volatile int exceptions = std::uncaught_exceptions();
    while (!closed.load()) {
        const uint32_t seen = box.help.load();
        box.helpers.store(1);
        if (!closed.load()) futex_wait(box.help, seen, int64_t{3600} * 1000000000);
        box.helpers.store(0);
        if (box.help.load() == seen) continue;
        int64_t worked = now_ns();
        while (!closed.load() && (waiters.load() == 0 || unread.load() > 0) && box.pending.load() != 0 && now_ns() < worked + HELP_NS) {
            if (has_memory() && advance(now_ns() + HELP_NS)) {
                worked = now_ns();
                continue;
            }
            box.sleepers.fetch_add(1);
            const uint32_t value = box.bell.load();
            if (value == scanned.load() && unread.load() == 0 && !closed.load()) futex_wait(box.bell, value, HELP_NS / 4);
            box.sleepers.fetch_sub(1);
        }
    }
}

// Withdrawing

bool Mailboxes::withdraw(uint64_t id) {
    return or_no_memory([&] { return end(id); });
}

bool Mailboxes::end(uint64_t id) {
    Lock lock(mutex);
    const auto found = messages.find(id);
    if (found == messages.end()) return true;
    const Shared message = found->second;
    if (message->status != MessageStatus::waiting) return true;
    if (end_remote(message)) return true;
    MessageStatus status = MessageStatus::mismatch;
    const auto is_its = [&](const Outgoing &one) { return one.message == message; };
    std::deque<Outgoing> none, &records = message->source == ANY_RANK ? none : outgoing[static_cast<size_t>(message->source)];
    const auto record = std::find_if(records.begin(), records.end(), is_its);
    if (message->sends && record == records.end()) { // its offer was sent
        message->withdrawn = true;
        auto &parts = streams[static_cast<size_t>(message->peer)];
        parts.erase(std::remove(parts.begin(), parts.end(), message), parts.end());
        return false;
    }
    if (message->sends) {
        records.erase(record);
    } else if (record != records.end()) { // it has ended, except that its reply was not written
        status = record->status;
        record->message = nullptr;
        replies++;
    } else if (message->offer == 0) {
        const auto at = posted.find({message->peer, message->tag});
        at->second.erase(std::find(at->second.begin(), at->second.end(), message));
        if (at->second.empty()) posted.erase(at);
    } else if (pulled.erase({message->source, message->offer}) == 0) { // of a pulled one, the next parts are dropped
        message->withdrawn = true;
        end_reading(message);
        while (message->readers > 0) {
            lock.unlock();
            sched_yield();
            lock.lock();
        }
        if (message->status != MessageStatus::waiting) return true; // another thread has withdrawn it, too
        reply(message->source, DONE, message->offer);
    }
    complete(message, status);
    return true;
}

#else // no futex

bool Mailboxes::withdraw(uint64_t) { return true; }
int Mailboxes::source_of(uint64_t) { return ANY_RANK; }
MessageStatus Mailboxes::wait(uint64_t, int64_t, int &, uint64_t &) { return MessageStatus::done; }

#endif
