#include "mailboxes.hpp"

#include <algorithm>
#include <cstring>

#include "futex.hpp"

#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#endif

namespace {

struct OfferPayload {
    uint64_t nbytes, address;
};

// All rings of a rank together have at most about this many bytes; one of them has at most MOST and at least LEAST.
constexpr uint64_t RINGS_NBYTES = 1 << 18, MOST = 1 << 16, LEAST = 1 << 8;
constexpr uint64_t EAGER_NBYTES = 1 << 13; // from here on, one copy by process_vm_readv takes less time than two copies
constexpr uint64_t ALIGNMENT = 32;         // of records
constexpr uint64_t SHARED_NBYTES = 1 << 22; // two threads read a message of so many bytes, if each rank has a CPU
constexpr int PARTS_AT_ONCE = 64;
constexpr uint64_t CROWDED_NBYTES = 1 << 22;
constexpr int64_t LEAVE_NS = 1000000000;   // the longest wait of a rank that leaves until other hosts have its messages
constexpr uint64_t KEPT_NBYTES = 200;      // memory of a message without a receive whose tag no other has, but for its bytes

uint64_t ring_capacity(int ranks) {
    uint64_t made = MOST;
    while (made > LEAST && made * static_cast<uint64_t>(ranks) > RINGS_NBYTES) made /= 2;
    return made;
}

uint64_t record_nbytes(uint64_t length) {
    return (sizeof(Record) + length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

} // namespace

int64_t Mailboxes::head_nbytes(int ranks) {
    const auto n = static_cast<int64_t>(ranks);
    return n * static_cast<int64_t>(sizeof(Box)) + n * n * static_cast<int64_t>(sizeof(Ring));
}

int64_t Mailboxes::nbytes(int ranks) {
    return head_nbytes(ranks) + int64_t{ranks} * ranks * static_cast<int64_t>(ring_capacity(ranks));
}

#if defined(__linux__)

Mailboxes *Mailboxes::over(void *memory, int rank, int ranks, int64_t spin_ns, bool may_read) {
    auto *made = new Mailboxes();
    made->rank = rank;
    made->ranks = ranks;
    made->spin_ns = spin_ns;
    made->may_read = may_read;
    made->process = getpid();
    made->capacity = ring_capacity(ranks);
    made->eager = std::min(EAGER_NBYTES, made->capacity / 4);
    const auto n = static_cast<size_t>(ranks);
    made->boxes = static_cast<Box *>(memory);
    made->rings = reinterpret_cast<Ring *>(made->boxes + n);
    made->bytes = reinterpret_cast<char *>(made->rings + n * n);
    made->outgoing.resize(n);
    made->streams.resize(n);
    made->tails.resize(n);
    made->kept.resize(n);
    made->readable.resize(n, -1);
    made->probe = now_ns() ^ static_cast<int64_t>(reinterpret_cast<intptr_t>(made));
    Box &own = made->own();
    own.process.store(made->process);
    own.probe.store(made->probe);
    own.address.store(reinterpret_cast<uint64_t>(&made->probe));
    made->scanned.store(own.bell.load() - 1); // others may have sent something already
    return made;
}

Mailboxes *Mailboxes::map(int fd, int64_t offset, int rank, int ranks, int64_t spin_ns, bool may_read) {
    const auto size = static_cast<size_t>(nbytes(ranks));
    struct stat found;
    if (fstat(fd, &found) != 0) return nullptr;
    if (found.st_size < offset + static_cast<int64_t>(size)) { // an access beyond the end would kill the process
        errno = ENOSPC;
        return nullptr;
    }
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, size, MADV_DONTFORK); // a forked child is not a rank
    Mailboxes *made = over(at, rank, ranks, spin_ns, may_read);
    made->mapped = at;
    made->mapped_nbytes = size;
    made->file = fd;
    made->rings_offset = offset + head_nbytes(ranks) + rank * ranks * static_cast<int64_t>(made->capacity);
    return made;
}

Mailboxes::~Mailboxes() { close(); }

bool Mailboxes::enter() {
    users.fetch_add(1);
    if (!closed.load()) return true;
    users.fetch_sub(1);
    return false;
}

bool Mailboxes::close() {
    if (closed.exchange(true)) return false;
    // After this store no other rank completes a message whose bytes it has read in this process.
    own().mood.store(LEFT);
    own().help.fetch_add(1);
    futex_wake_all(own().help);
    for (;;) {
        own().bell.fetch_add(1);
        futex_wake_all(own().bell);
        wake_remote_helper();
        if (users.load() == 0) break;
        sched_yield();
    }
    for (std::thread *each : {helper, remote_helper}) {
        if (each != nullptr) each->join();
        delete each;
    }
    // A socket that is closed while data arrives there drops what it has not delivered.
    if (are_remotes_open.load()) connections->flush(now_ns() + LEAVE_NS);
    if (mapped_nbytes > 0) munmap(mapped, mapped_nbytes);
    return true;
}

// Rings

void Mailboxes::copy_out(int src, uint64_t position, void *to, uint64_t count) const {
    const char *from = bytes + static_cast<uint64_t>(src * ranks + rank) * capacity;
    if (count == 0) return; // `to` may be null
    const uint64_t at = position % capacity, first = std::min(count, capacity - at);
    std::memcpy(to, from + at, first);
    std::memcpy(static_cast<char *>(to) + first, from, count - first);
}

// Wake the threads of a rank that wait, since something has changed for it.
void Mailboxes::notify(int of) const {
    Box &box = boxes[of];
    // A sleeper counts itself before it reads the bell: either it reads the new value, or this reads its count.
    box.bell.fetch_add(1);
    if (box.sleepers.load() > 0) futex_wake_all(box.bell);
}

// Write a record if there is room for it.
bool Mailboxes::put(int dst, const Record &record, const char *payload) {
    if (is_remote(dst)) return put_remote(dst, record, payload);
    Ring &to = ring(rank, dst);
    const uint64_t head = to.head.load(std::memory_order_relaxed), size = record_nbytes(record.length);
    uint64_t &tail = tails[static_cast<size_t>(dst)];
    if (head + size - tail > capacity) {
        tail = to.tail.load(std::memory_order_acquire);
        if (head + size - tail > capacity) {
            to.wanted.store(1); // the receiver stores its tail before it reads this
            tail = to.tail.load();
            if (head + size - tail > capacity) return false;
        }
    }
    if (file >= 0) allocate_rings();
    char *at = bytes + static_cast<uint64_t>(rank * ranks + dst) * capacity;
    const auto copy = [&](uint64_t position, const void *from, uint64_t count) {
        const uint64_t begin = position % capacity, first = std::min(count, capacity - begin);
        std::memcpy(at + begin, from, first);
        std::memcpy(at, static_cast<const char *>(from) + first, count - first);
    };
    copy(head, &record, sizeof record);
    if (record.length > 0) copy(head + sizeof record, payload, record.length);
    to.head.store(head + size, std::memory_order_release);
    notify(dst);
    return true;
}

// Write the records that wait for room, then parts of messages.
void Mailboxes::flush(int dst) {
    auto &records = outgoing[static_cast<size_t>(dst)];
    for (; !records.empty(); records.pop_front()) {
        Outgoing &next = records.front();
        if (!put(dst, next.record, next.record.kind == DATA ? next.message->memory : next.payload.data())) return;
        if (next.message == nullptr) {
            replies--;
            update_pending();
        } else if (next.record.kind != OFFER && !completes_later(dst, next.message, next.status)) {
            complete(next.message, next.status);
        }
    }
    auto &parts = streams[static_cast<size_t>(dst)];
    for (int written = 0; !parts.empty(); written++) {
        if (written == PARTS_AT_ONCE) return notify(rank); // a thread that waits must return regularly
        MailboxMessage &next = *parts.front();
        const uint64_t count = std::min(next.nbytes - next.moved, capacity / 4);
        const Record record = {PART, static_cast<uint32_t>(count), static_cast<int64_t>(next.moved), next.id};
        if (!put(dst, record, next.memory + next.moved)) return;
        next.moved += count;
        if (next.moved < next.nbytes) continue;
        complete(parts.front(), MessageStatus::done);
        parts.pop_front();
    }
}

// A receive, if there is one, is complete when the reply is in the ring: until then its rank must not leave.
void Mailboxes::reply(int dst, uint32_t kind, uint64_t id, const Shared &message, MessageStatus status) {
    outgoing[static_cast<size_t>(dst)].push_back({{kind, 0, 0, id}, {}, message, status});
    if (message == nullptr) replies++;
    update_pending();
    flush(dst);
}

void Mailboxes::drain(int src) {
    Ring &from = ring(src, rank);
    const uint64_t head = from.head.load(std::memory_order_acquire); // of later records the bell tells
    uint64_t tail = from.tail.load(std::memory_order_relaxed);
    while (tail != head) {
        Record record;
        copy_out(src, tail, &record, sizeof record);
        // No rank has written this. What follows cannot be found, so no message from that rank arrives any more.
        if (head - tail > capacity || record_nbytes(record.length) > head - tail) return;
        arrived(src, record, tail + sizeof record);
        tail += record_nbytes(record.length);
        from.tail.store(tail);
        // The sender sets `wanted` before it reads the tail. It is woken once half of the ring is free.
        if (head - tail <= capacity / 2 && from.wanted.load() != 0) {
            from.wanted.store(0);
            notify(src);
        }
    }
}

// Handle a record, whose payload is at a position of the ring.
void Mailboxes::arrived(int src, const Record &record, uint64_t position) {
    if (record.kind == CROWDED || record.kind == ROOMY) {
        if (is_remote(src)) remote(src).crowded = record.kind == CROWDED;
        return;
    }
    if (record.kind == DONE || record.kind == PULL) {
        const auto found = messages.find(record.id);
        if (found == messages.end() || found->second->status != MessageStatus::waiting) return;
        const Shared message = found->second;
        if (record.kind == DONE) return complete(message, MessageStatus::done);
        if (message->withdrawn || message->peer != src) return;
        if (is_remote(src)) return move_bytes(message, src);
        streams[static_cast<size_t>(src)].push_back(message);
        return flush(src);
    }
    if (record.kind == PART) {
        const auto found = pulled.find({src, record.id});
        if (found == pulled.end()) return;
        const Shared message = found->second;
        const auto at = static_cast<uint64_t>(record.tag);
        if (at > message->nbytes || record.length > message->nbytes - at) return; // no rank has written this
        take(src, position, message->memory + at, record.length);
        message->moved += record.length;
        if (message->moved < message->nbytes) return;
        pulled.erase(found);
        return complete(message, MessageStatus::done);
    }
    OfferPayload offer = {record.length, 0};
    if (record.kind == OFFER) take(src, position, &offer, sizeof offer);
    const uint64_t id = record.kind == OFFER ? record.id : 0;
    if (const Shared message = matching(src, record.tag)) {
        if (id == 0 && offer.nbytes == message->nbytes) take(src, position, message->memory, record.length);
        return deliver(message, src, offer.nbytes, id, offer.address);
    }
    Unexpected kept_one = {++last_order, offer.nbytes, id, offer.address, {}};
    if (id == 0) {
        kept_one.payload.resize(record.length);
        take(src, position, kept_one.payload.data(), record.length);
        uint64_t &count = kept[static_cast<size_t>(src)];
        count += KEPT_NBYTES + record.length;
        if (count > CROWDED_NBYTES) set_crowded(src, true);
    }
    unexpected[{src, record.tag}].push_back(std::move(kept_one));
}

// Messages

// Return the first receive that matches a message, and remove it from those; or null.
Mailboxes::Shared Mailboxes::matching(int src, int64_t tag) {
    auto found = posted.find({src, tag});
    const auto any = posted.find({ANY_RANK, tag});
    if (any != posted.end() &&
        (found == posted.end() || any->second.front()->id < found->second.front()->id))
        found = any;
    if (found == posted.end()) return nullptr;
    Shared message = found->second.front();
    found->second.pop_front();
    if (found->second.empty()) posted.erase(found);
    return message;
}

// Complete a receive with a message that was copied to it, or begin to read an offer.
void Mailboxes::deliver(const Shared &message, int src, uint64_t nbytes, uint64_t offer, uint64_t address) {
    message->source = src;
    message->found_nbytes = nbytes;
    if (nbytes != message->nbytes) {
        if (offer != 0) return reply(src, DONE, offer, message, MessageStatus::mismatch);
        return complete(message, MessageStatus::mismatch);
    }
    if (offer == 0) return complete(message, MessageStatus::done);
    message->offer = offer;
    message->address = address;
    if (is_remote(src)) {
        move_bytes(message, src);
        reply(src, PULL, offer);
    } else if (can_read(src)) {
        reads.push_back(message);
        unread.store(static_cast<int>(reads.size()));
        // While its sender waits, a second thread reads every other piece: this took 0.55 of the time for 64 MiB.
        if (nbytes >= SHARED_NBYTES && spin_ns > 0) wake_helper(rank);
    } else {
        pulled[{src, offer}] = message;
        reply(src, PULL, offer);
    }
}

void Mailboxes::update_pending() { own().pending.store(unfinished + replies > 0); }

uint64_t Mailboxes::send(int dst, int64_t tag, char *memory, uint64_t nbytes) {
    return or_no_memory([&] { return begin_send(dst, tag, memory, nbytes); });
}

uint64_t Mailboxes::receive(int src, int64_t tag, char *memory, uint64_t nbytes) {
    return or_no_memory([&] { return begin_receive(src, tag, memory, nbytes); });
}

uint64_t Mailboxes::begin_send(int dst, int64_t tag, char *memory, uint64_t nbytes) {
    const Lock lock(mutex);
    if (is_remote(dst)) open_remotes();
    auto &records = outgoing[static_cast<size_t>(dst)];
    const bool crowded = is_remote(dst) ? remote(dst).crowded : ring(rank, dst).crowded.load(std::memory_order_relaxed) != 0;
    const bool inside = nbytes <= (is_remote(dst) ? remote_eager : eager) && !crowded;
    Record record = {DATA, static_cast<uint32_t>(inside ? nbytes : 0), tag, 0};
    const bool is_put = inside && records.empty() && put(dst, record, memory);
    if (is_put && !(is_remote(dst) && !remote(dst).sent.empty())) return 0;
    const auto message = std::make_shared<MailboxMessage>();
    message->id = record.id = ++last_id;
    message->sends = true;
    message->peer = dst;
    message->source = dst;
    message->tag = tag;
    message->memory = memory;
    message->nbytes = nbytes;
    Outgoing next = {record, {}, message};
    if (!inside) {
        const OfferPayload offer = {nbytes, reinterpret_cast<uint64_t>(memory)};
        next.record.kind = OFFER;
        next.record.length = sizeof offer;
        next.payload.resize(sizeof offer);
        std::memcpy(next.payload.data(), &offer, sizeof offer);
    }
    messages[message->id] = message;
    unfinished++;
    if (is_put)
        completes_later(dst, message, MessageStatus::done);
    else
        records.push_back(std::move(next));
    start_helper();
    update_pending();
    flush(dst);
    if (is_remote(dst) && helper_sleeps_at_sockets.load()) wake_remote_helper();
    return message->id;
}

uint64_t Mailboxes::begin_receive(int src, int64_t tag, char *memory, uint64_t nbytes) {
    const Lock lock(mutex);
    if (is_remote(src) || (src == ANY_RANK && !remotes.empty())) open_remotes();
    const auto message = std::make_shared<MailboxMessage>();
    message->id = ++last_id;
    message->peer = src;
    message->tag = tag;
    message->memory = memory;
    message->nbytes = nbytes;
    messages[message->id] = message;
    unfinished++;
    auto found = unexpected.end();
    for (int of = src == ANY_RANK ? 0 : src; of < (src == ANY_RANK ? everyone() : src + 1); of++) {
        const auto one = unexpected.find({of, tag});
        if (one != unexpected.end() &&
            (found == unexpected.end() || one->second.front().order < found->second.front().order))
            found = one;
    }
    if (found == unexpected.end()) {
        posted[{src, tag}].push_back(message);
    } else {
        const int of = found->first.first;
        const Unexpected first = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) unexpected.erase(found);
        if (first.offer == 0) {
            if (first.nbytes == nbytes && nbytes > 0) std::memcpy(memory, first.payload.data(), nbytes);
            uint64_t &count = kept[static_cast<size_t>(of)];
            count -= KEPT_NBYTES + first.nbytes;
            if (count < CROWDED_NBYTES / 2) set_crowded(of, false);
        }
        deliver(message, of, first.nbytes, first.offer, first.address);
    }
    start_helper();
    update_pending();
    if (is_remote(src) && helper_sleeps_at_sockets.load()) wake_remote_helper();
    return message->id;
}

bool Mailboxes::is_pending(uint64_t id) {
    const Lock lock(mutex);
    const auto found = messages.find(id);
    return found != messages.end() && found->second->status == MessageStatus::waiting;
}

void Mailboxes::forget(uint64_t id) {
    const Lock lock(mutex);
    const auto found = messages.find(id);
    if (found == messages.end()) return;
    found->second->forgotten = true;
    if (found->second->status != MessageStatus::waiting) messages.erase(found);
}

std::vector<uint64_t> Mailboxes::completed() {
    if (!has_ended.load(std::memory_order_relaxed)) return {};
    const Lock lock(mutex);
    has_ended.store(false, std::memory_order_relaxed);
    return std::exchange(ended, {});
}

#else // no futex

Mailboxes *Mailboxes::map(int, int64_t, int, int, int64_t, bool) {
    errno = ENOSYS;
    return nullptr;
}
Mailboxes::~Mailboxes() = default;
bool Mailboxes::enter() { return false; }
bool Mailboxes::close() { return true; }
uint64_t Mailboxes::send(int, int64_t, char *, uint64_t) { return 0; }
uint64_t Mailboxes::receive(int, int64_t, char *, uint64_t) { return 0; }
bool Mailboxes::is_pending(uint64_t) { return false; }
void Mailboxes::forget(uint64_t) {}
std::vector<uint64_t> Mailboxes::completed() { return {}; }

#endif
