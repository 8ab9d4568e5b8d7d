// Messages with ranks of other hosts, over connections: see mailboxes.hpp.
#include "mailboxes.hpp"

#include <algorithm>
#include <cstring>
#include <exception>

#include "futex.hpp"

#if defined(__linux__)

namespace {

constexpr uint64_t RECORDS = 1, BYTES = 2;    // the tags of the connections' messages
constexpr uint64_t ROOMS_NBYTES = 1 << 21;    // memory for the next records of all other ranks together, at most about
constexpr uint64_t LEAST_EAGER_NBYTES = 1 << 11;
constexpr int64_t GRACE_NS = 2000000;         // the helper leaves the sockets for so long to threads that wait again
constexpr int64_t LONG_NS = 100000000;        // between two looks whether such a thread still waits
constexpr int64_t SHARED_NS = 1000000;        // the longest sleep of a thread that others cannot wake
constexpr int64_t CHECK_NS = 1000000000;      // between two checks for silent hosts

} // namespace

void Mailboxes::reach(std::shared_ptr<Connections> made, const std::vector<int> &indices) {
    const Lock lock(mutex);
    connections = std::move(made);
    remotes.resize(indices.size());
    for (size_t k = 0; k < indices.size(); k++) remotes[k].index = indices[k];
    const auto n = static_cast<size_t>(everyone());
    remote_eager = std::clamp(ROOMS_NBYTES / n, LEAST_EAGER_NBYTES, REMOTE_EAGER_NBYTES); // the same on all ranks
    outgoing.resize(n);
    streams.resize(n);
    kept.resize(n);
}

// Expect records of all ranks, from the first message with another host on.
void Mailboxes::open_remotes() {
    if (are_remotes_open.exchange(true)) return;
    for (Remote &each : remotes)
        if (each.index >= 0) expect_record(each);
    remote_helper = start_thread(&Mailboxes::help_remotes);
}

void Mailboxes::expect_record(Remote &from) {
    from.room.resize(sizeof(Record) + remote_eager);
    from.arriving = connections->receive(from.index, RECORDS, from.room.data(), static_cast<int64_t>(from.room.size()));
}

// Send a record, unless an earlier one is not written yet.
bool Mailboxes::put_remote(int dst, const Record &record, const char *payload) {
    Remote &to = remote(dst);
    if (!to.sent.empty() || to.index < 0) return false;
    SentRecord made = {std::vector<char>(sizeof record + record.length), nullptr, nullptr, MessageStatus::done};
    std::memcpy(made.bytes.data(), &record, sizeof record);
    if (record.length > 0) std::memcpy(made.bytes.data() + sizeof record, payload, record.length);
    made.moving = connections->send(to.index, RECORDS, made.bytes.data(), static_cast<int64_t>(made.bytes.size()));
    if (made.moving->state != Message::State::done) to.sent.push_back(std::move(made));
    return true;
}

// Whether the record that was put last is not written yet. Then the message is complete when it is.
bool Mailboxes::completes_later(int dst, const Shared &message, MessageStatus status) {
    if (!is_remote(dst) || remote(dst).sent.empty()) return false;
    remote(dst).sent.back().message = message;
    remote(dst).sent.back().status = status;
    return true;
}

// Copy from a position of the ring from a rank, or from the record of a rank of another host.
void Mailboxes::take(int src, uint64_t position, void *to, uint64_t count) const {
    if (!is_remote(src)) return copy_out(src, position, to, count);
    if (count > 0) std::memcpy(to, remote_payload, count);
}

// Tell a rank whether it must not send the bytes of messages any more before this rank receives them.
void Mailboxes::set_crowded(int src, bool crowded) {
    if (!is_remote(src)) return ring(src, rank).crowded.store(crowded ? 1 : 0, std::memory_order_relaxed);
    if (std::exchange(remote(src).was_told, crowded) != crowded) reply(src, crowded ? CROWDED : ROOMY, 0);
}

// Begin to send, or receive, the bytes of an offer.
void Mailboxes::move_bytes(const Shared &message, int other) {
    Remote &with = remote(other);
    const auto nbytes = static_cast<int64_t>(message->nbytes);
    with.moved.push_back({message->sends ? connections->send(with.index, BYTES, message->memory, nbytes)
                                         : connections->receive(with.index, BYTES, message->memory, nbytes),
                          message});
}

// Do what can be done with the ranks of other hosts. Return whether anything had changed.
bool Mailboxes::progress_remotes() {
    using State = Message::State;
    connections->progress();
    const Lock lock(mutex);
    bool changed = false;
    for (int of = ranks; of < everyone(); of++) {
        Remote &each = remote(of);
        if (each.index < 0) continue;
        while (!each.sent.empty() && each.sent.front().moving->state == State::done) {
            const SentRecord one = std::move(each.sent.front());
            each.sent.pop_front();
            if (one.message != nullptr) complete(one.message, one.status);
            changed = true;
        }
        if (each.sent.empty() && !outgoing[static_cast<size_t>(of)].empty()) flush(of);
        while (each.arriving->state == State::done) {
            Record record;
            std::memcpy(&record, each.room.data(), sizeof record);
            remote_payload = each.room.data() + sizeof record;
            changed = true;
            if (record.length <= remote_eager) arrived(of, record, 0); // else no rank has written it
            expect_record(each);
        }
        const auto is_over = [&](const Moved &one) {
            if (one.moving->state != State::done) return false;
            complete(one.message, MessageStatus::done);
            return true;
        };
        const auto left = std::remove_if(each.moved.begin(), each.moved.end(), is_over);
        changed = changed || left != each.moved.end();
        each.moved.erase(left, each.moved.end());
    }
    // Other threads may wait for what has completed now.
    if (changed && sleepers_at_sockets.load() > 0) wake_remote_helper();
    return changed;
}

// Sleep at the connections, and move what can be moved then. Return false if a signal came.
bool Mailboxes::pause(int64_t until_ns, const Bells::Bell &bell) {
    if (bell.fd < 0) until_ns = std::min(until_ns, now_ns() + SHARED_NS);
    const bool undisturbed = connections->pause(until_ns, bell.fd);
    bell.reset();
    return undisturbed;
}

// Wake all threads that sleep at the connections, and the helper.
void Mailboxes::wake_remote_helper() {
    bells.ring();
    remote_help.fetch_add(1);
    futex_wake_all(remote_help);
}

// Move what no thread waits for. A thread that waits for a rank of another host moves everything itself, without a switch
// between threads, so the helper stays away from the sockets while threads wait and shortly after.
void Mailboxes::help_remotes() {
    if (!has_memory()) return;
    [[maybe_unused]] const volatile int exceptions = std::uncaught_exceptions(); // see `help`
    const Bells::Bell bell(bells);
    int64_t checked = now_ns();
    while (!closed.load()) {
        const uint32_t seen = remote_help.load();
        const bool others_wait = sleepers_at_sockets.load() > 0;
        if (now_ns() >= checked + CHECK_NS) {
            checked = now_ns();
            connections->drop_silent();
        }
        if (mixed_waiters.load() == 0 && (others_wait || now_ns() < last_slept_at_sockets.load() + GRACE_NS)) {
            helper_waits_long.store(others_wait);
            if (!closed.load()) futex_wait(remote_help, seen, others_wait ? LONG_NS : GRACE_NS);
            helper_waits_long.store(false);
            continue;
        }
        helper_sleeps_at_sockets.store(true);
        if (!closed.load()) pause(now_ns() + CHECK_NS, bell);
        helper_sleeps_at_sockets.store(false);
        // Connections have read further records, for which no socket wakes a thread.
        while (!closed.load() && has_memory() && advance(now_ns())) {
        }
    }
}

// End a message that is not complete if a rank of another host knows of it, or may know of it. Its memory must not be used
// any more, so this ends the connection to that rank. Return false if no other host knows of it.
bool Mailboxes::end_remote(const Shared &message) {
    const int of = message->sends ? message->peer : message->source;
    if (of == ANY_RANK || !is_remote(of)) return false;
    Remote &with = remote(of);
    const auto is_its = [&](const auto &one) { return one.message == message; };
    const auto &records = outgoing[static_cast<size_t>(of)];
    if (std::any_of(records.begin(), records.end(), is_its)) return false; // not even a part of it was sent
    const auto record = std::find_if(with.sent.begin(), with.sent.end(), is_its);
    if (record != with.sent.end()) { // a copy is being sent
        const MessageStatus status = record->status;
        record->message = nullptr;
        complete(message, status);
        return true;
    }
    connections->disconnect(with.index, "a message was withdrawn");
    with.moved.erase(std::remove_if(with.moved.begin(), with.moved.end(), is_its), with.moved.end());
    complete(message, MessageStatus::mismatch);
    return true;
}

void Mailboxes::give_up() {
    own().mood.store(GAVE_UP);
    if (connections != nullptr) connections->abort();
}

RankMood Mailboxes::mood(int of) const {
    if (!is_remote(of)) return static_cast<RankMood>(boxes[of].mood.load());
    const Message::State state = remote(of).index < 0 ? Message::State::left : connections->state_of(remote(of).index);
    return state == Message::State::done ? OPEN : state == Message::State::left ? LEFT : GAVE_UP;
}

std::string Mailboxes::why(int of) const {
    return remote(of).index >= 0 ? connections->why(remote(of).index) : "there was never a connection";
}

#else

std::string Mailboxes::why(int) const { return ""; }
void Mailboxes::reach(std::shared_ptr<Connections>, const std::vector<int> &) {}
void Mailboxes::give_up() {}
RankMood Mailboxes::mood(int) const { return OPEN; }

#endif
