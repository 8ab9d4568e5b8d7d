#include "connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h> // POLLRDHUP needs _GNU_SOURCE, which g++ and clang++ define
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

#include "futex.hpp"

namespace {

constexpr size_t STAGED_NBYTES = 1 << 16;      // read at once beyond the end of a message
constexpr size_t FIRST_NBYTES = 1 << 13;       // read at once between messages: the rest of a large one is not copied
constexpr uint64_t MOST_EARLY_NBYTES = 1 << 20; // of a message that is read before it is expected
constexpr size_t MOST_PARTS = 16;              // of one call to the system
constexpr int LEAST_REPEATS = 2;               // a packet or its answer may be lost
constexpr uint64_t LEAST_PART = 1 << 16, MOST_PART = 1 << 20; // bytes of a part
constexpr uint64_t PARTS_PER_LANE = 4;          // of a very large message, so that a slow lane may send fewer of them

using State = Message::State;

std::shared_ptr<Message> new_message(int peer, uint64_t tag, char *data, int64_t nbytes) {
    auto made = std::make_shared<Message>();
    made->header = {tag, static_cast<uint64_t>(nbytes)};
    made->data = data;
    made->peer = peer;
    return made;
}

iovec part(void *at, size_t nbytes) {
    iovec made;
    made.iov_base = at;
    made.iov_len = nbytes;
    return made;
}

// Return whether the other host has answered nothing for `limit_ns`, although the system has repeated data, or probes of
// a full buffer, several times. The host of a rank that reads nothing, since it was stopped or is late, answers these.
bool is_silent(int socket, int64_t limit_ns) {
    tcp_info info = {};
    socklen_t size = sizeof info;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
    const bool repeats = (info.tcpi_unacked > 0 && info.tcpi_retransmits >= LEAST_REPEATS) || info.tcpi_probes >= LEAST_REPEATS;
    return repeats && int64_t{info.tcpi_last_ack_recv} * 1000000 >= limit_ns;
}

} // namespace

Connections::Connections(std::vector<int> ranks, std::vector<int> sockets, int64_t limit_ns, bool chooses)
    : silent_ns(limit_ns), measures(chooses) {
    const size_t lanes = ranks.empty() ? 0 : sockets.size() / ranks.size();
    for (size_t k = 0; k < ranks.size(); k++) {
        peers.emplace_back();
        Peer &peer = peers.back();
        peer.rank = ranks[k];
        peer.lanes.resize(lanes);
        for (size_t lane = 0; lane < lanes; lane++) peer.lanes[lane].socket = sockets[k * lanes + lane];
        peer.used = peer.chosen = chooses ? 1 : lanes;
    }
}

Connections::~Connections() {
    for (Peer &peer : peers)
        for (Lane &lane : peer.lanes)
            if (lane.socket >= 0) ::close(lane.socket);
}

int Connections::index_of(int rank) const {
    for (size_t k = 0; k < peers.size(); k++)
        if (peers[k].rank == rank) return static_cast<int>(k);
    return -1;
}

std::shared_ptr<Message> Connections::send(int index, uint64_t tag, char *data, int64_t nbytes, const std::string &head) {
    const auto made = new_message(index, tag, data, nbytes + static_cast<int64_t>(head.size()));
    made->is_sent = true;
    if (joins() && !head.empty()) {
        made->joined.reserve(made->header.nbytes);
        made->joined.assign(head.begin(), head.end());
        made->joined.insert(made->joined.end(), data, data + nbytes);
        made->data = made->joined.data();
    } else {
        made->head = head.data(), made->head_nbytes = head.size();
    }
    const std::lock_guard<std::mutex> held(lock);
    Peer &peer = peers[static_cast<size_t>(index)];
    if (peer.state != State::done) {
        made->state = peer.state;
        return made;
    }
    begin_send(peer, made);
    return made;
}

void Connections::begin_send(Peer &peer, const std::shared_ptr<Message> &message) {
    MessageHeader &header = message->header;
    header.number = peer.numbers[header.tag]++;
    peer.sending++;
    const uint64_t nbytes = header.nbytes;
    if (peer.lanes.size() > 1 && measures) choose_lanes(peer, nbytes);
    if (nbytes >= LARGE_NBYTES && (peer.used > 1 || !peer.rest.empty())) {
        header.part = static_cast<uint32_t>(std::clamp(nbytes / (peer.used * PARTS_PER_LANE), LEAST_PART, MOST_PART));
        peer.rest.push_back({message, header, 0});
    } else {
        Lane &first = peer.lanes.front();
        first.out.push_back({message, header, 0});
        if (first.out.size() == 1) write_to(peer, first);
    }
    if (!peer.rest.empty()) hand_out(peer);
}

std::shared_ptr<Message> Connections::receive(int index, uint64_t tag, char *data, int64_t nbytes) {
    const auto made = new_message(index, tag, data, nbytes);
    const std::lock_guard<std::mutex> held(lock);
    begin_receive(peers[static_cast<size_t>(index)], made);
    return made;
}

void Connections::begin_receive(Peer &peer, const std::shared_ptr<Message> &message) {
    Inbox &inbox = peer.inboxes[message->header.tag];
    const size_t at = inbox.expected - inbox.first;
    const bool is_new = at == inbox.arrivals.size();
    if (peer.state != State::done && (is_new || !inbox.arrivals[at].complete)) {
        message->state = peer.state;
        return;
    }
    if (is_new) inbox.arrivals.emplace_back();
    Arrival &arrival = inbox.arrivals[at];
    if (arrival.begun && arrival.nbytes > message->header.nbytes) {
        lose(peer, State::lost, TOO_LARGE);
        message->state = peer.state;
        return;
    }
    inbox.expected++;
    peer.expectations++;
    arrival.wanted = message;
    if (arrival.complete) deliver(peer, inbox, arrival);
}

// Complete an expected message that has arrived.
void Connections::deliver(Peer &peer, Inbox &inbox, Arrival &arrival) {
    if (!arrival.early.empty()) std::memcpy(arrival.wanted->data, arrival.early.data(), arrival.early.size());
    arrival.wanted->state = State::done;
    peer.expectations--;
    for (auto &all = inbox.arrivals; !all.empty() && all.front().complete && all.front().wanted != nullptr; inbox.first++) all.pop_front();
}

void Connections::write_to(Peer &peer, Lane &lane) {
    while (!lane.out.empty()) {
        iovec parts[MOST_PARTS];
        size_t count = 0;
        for (Part &each : lane.out) {
            if (count + 3 > MOST_PARTS) break;
            if (each.moved < sizeof(MessageHeader))
                parts[count++] = part(reinterpret_cast<char *>(&each.header) + each.moved, sizeof(MessageHeader) - each.moved);
            const Message &whole = *each.message;
            const uint64_t end = each.header.offset + each.header.follows();
            uint64_t at = each.header.offset + std::max<uint64_t>(each.moved, sizeof(MessageHeader)) - sizeof(MessageHeader);
            if (at < std::min(end, whole.head_nbytes)) {
                parts[count++] = part(const_cast<char *>(whole.head) + at, std::min(end, whole.head_nbytes) - at);
                at = std::min(end, whole.head_nbytes);
            }
            if (at < end) parts[count++] = part(whole.data + (at - whole.head_nbytes), end - at);
        }
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t sent = sendmsg(lane.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) return;
            const std::string why = std::strerror(errno);
            for (Lane &each : peer.lanes) read_from(peer, each); // what it has sent before it ended
            return lose(peer, State::lost, why);
        }
        peer.sent_nbytes += static_cast<uint64_t>(sent);
        for (uint64_t left = static_cast<uint64_t>(sent); left > 0;) {
            Part &first = lane.out.front();
            const uint64_t all = sizeof(MessageHeader) + first.header.follows(), taken = std::min(all - first.moved, left);
            first.moved += taken, left -= taken;
            if (first.moved < all) break;
            Message &whole = *first.message;
            whole.moved += first.header.follows();
            if (whole.moved == whole.header.nbytes) whole.state = State::done, peer.sending--;
            lane.out.pop_front();
        }
    }
}

// Begin the part whose header is staged. Return false if it has to wait, or is the last one.
bool Connections::begin_incoming(Peer &peer, Lane &lane) {
    const MessageHeader &header = lane.header;
    if (!lane.active) {
        std::memcpy(&lane.header, lane.staged.data() + lane.staged_begin, sizeof(MessageHeader));
        lane.staged_begin += sizeof(MessageHeader);
        if (header.tag == FAREWELL) {
            peer.said_farewell = lane.ended = true;
            return false;
        }
        lane.active = true;
        lane.moved = 0;
    }
    Inbox &inbox = peer.inboxes[header.tag];
    const uint32_t at = header.number - inbox.first;
    while (inbox.arrivals.size() <= at) inbox.arrivals.emplace_back();
    Arrival &arrival = inbox.arrivals[at];
    if (!arrival.begun) {
        lane.blocked = arrival.wanted == nullptr && header.nbytes > MOST_EARLY_NBYTES;
        if (lane.blocked) return false;
        if (arrival.wanted == nullptr) {
            arrival.early.assign(header.nbytes, 0);
        } else if (arrival.wanted->header.nbytes < header.nbytes) {
            lose(peer, State::lost, TOO_LARGE);
            return false;
        }
        arrival.begun = true;
        arrival.nbytes = header.nbytes;
        peer.divided += header.part != 0;
    }
    lane.blocked = false;
    lane.into = &arrival;
    return true;
}

void Connections::finish_incoming(Peer &peer, Lane &lane) {
    Arrival &arrival = *lane.into;
    lane.active = false;
    lane.into = nullptr;
    arrival.arrived += lane.header.follows();
    if (arrival.arrived != arrival.nbytes) return;
    arrival.complete = true;
    peer.divided -= lane.header.part != 0;
    if (arrival.wanted != nullptr) deliver(peer, peer.inboxes[lane.header.tag], arrival);
}

void Connections::read_from(Peer &peer, Lane &lane) {
    const size_t room = &lane == peer.lanes.data() ? STAGED_NBYTES : sizeof(MessageHeader);
    if (peer.expectations > 0 && lane.staged.empty()) lane.staged.resize(room);
    while (peer.state == State::done && peer.expectations > 0 && !lane.ended) {
        const size_t staged = lane.staged_end - lane.staged_begin;
        if (!lane.active || lane.blocked) {
            if ((lane.active || staged >= sizeof(MessageHeader)) && !begin_incoming(peer, lane)) return;
        }
        iovec parts[2];
        size_t count = 0;
        if (lane.active) {
            Arrival &arrival = *lane.into;
            const bool is_early = arrival.wanted == nullptr || !arrival.early.empty();
            char *to = (is_early ? arrival.early.data() : arrival.wanted->data) + lane.header.offset + lane.moved;
            const uint64_t left = lane.header.follows() - lane.moved;
            const size_t taken = std::min<uint64_t>(left, lane.staged_end - lane.staged_begin);
            if (taken > 0) std::memcpy(to, lane.staged.data() + lane.staged_begin, taken);
            lane.staged_begin += taken;
            lane.moved += taken;
            if (taken == left) {
                finish_incoming(peer, lane);
                continue;
            }
            parts[count++] = part(to + taken, left - taken);
        }
        // Nothing is staged now but, between messages, the start of a header.
        const size_t kept = lane.staged_end - lane.staged_begin;
        if (kept > 0) std::memmove(lane.staged.data(), lane.staged.data() + lane.staged_begin, kept);
        lane.staged_begin = 0, lane.staged_end = kept;
        // Behind a part, or a large message, there is probably another one, which shall not be copied.
        const bool reads_large = lane.active && (lane.header.part != 0 || parts[0].iov_len >= STAGED_NBYTES);
        const size_t beyond = reads_large ? sizeof(MessageHeader) : lane.active ? room : std::min(room, FIRST_NBYTES);
        parts[count++] = part(lane.staged.data() + kept, reads_large ? beyond : beyond - kept);
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t got = recvmsg(lane.socket, &message, MSG_DONTWAIT);
        if (got < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) lose(peer, State::lost, std::strerror(errno));
            return;
        }
        lane.ended = got == 0;
        peer.received_nbytes += static_cast<uint64_t>(got);
        const size_t direct = count == 2 ? std::min<size_t>(static_cast<size_t>(got), parts[0].iov_len) : 0;
        lane.moved += direct;
        lane.staged_end += static_cast<size_t>(got) - direct;
        if (lane.active && lane.moved == lane.header.follows()) finish_incoming(peer, lane);
    }
}

void Connections::lose(Peer &peer, State state, const std::string &why) {
    if (peer.state != State::done) return;
    peer.state = state;
    peer.why = why;
    for (const Part &each : peer.rest) each.message->state = state;
    peer.rest.clear();
    for (auto &[tag, inbox] : peer.inboxes)
        for (Arrival &each : inbox.arrivals)
            if (each.wanted != nullptr && !each.complete) each.wanted->state = state, each.wanted.reset();
    for (Lane &lane : peer.lanes) {
        for (const Part &each : lane.out) each.message->state = state;
        lane.out.clear();
        lane.active = lane.blocked = false;
        if (lane.socket >= 0) shutdown(lane.socket, SHUT_RDWR);
    }
    peer.sending = peer.expectations = 0;
}

bool Connections::progress() {
    const std::unique_lock<std::mutex> held(lock, std::try_to_lock);
    if (!held) return true;
    move();
    return std::any_of(peers.begin(), peers.end(), [&](const Peer &peer) { return has_work(peer); });
}

void Connections::move() {
    for (Peer &peer : peers) {
        if (peer.state != State::done) continue;
        for (Lane &lane : peer.lanes) write_to(peer, lane);
        if (!peer.rest.empty()) hand_out(peer);
        bool reads_all = true; // also the lanes that only have parts
        for (size_t k = 0; k < peer.lanes.size() && reads_all; k++) {
            read_from(peer, peer.lanes[k]);
            reads_all = peer.divided > 0;
        }
        // What the other lanes still have of the last messages is read before the peer is lost.
        if (peer.lanes.front().ended && (!reads_all || std::all_of(peer.lanes.begin(), peer.lanes.end(), [](const Lane &lane) { return lane.ended; })))
            lose(peer, peer.said_farewell ? State::left : State::lost, peer.said_farewell ? "it has left the group" : CLOSED_CONNECTION);
    }
}

short Connections::events(const Peer &peer, const Lane &lane) const {
    // While a message blocks others, nothing is read, so the end of the connection has to be noticed by `sleep`.
    const bool reads = peer.expectations > 0 && !lane.ended && (peer.divided > 0 || &lane == peer.lanes.data());
    return static_cast<short>((!reads || (lane.blocked && lane.closing) ? 0 : lane.blocked ? POLLRDHUP : POLLIN) | (lane.out.empty() ? 0 : POLLOUT));
}

bool Connections::has_work(const Peer &peer) const { return peer.state == State::done && (peer.sending > 0 || peer.expectations > 0); }

void Connections::drop_silent() {
    const std::lock_guard<std::mutex> held(lock);
    for (Peer &peer : peers)
        if (peer.state == State::done && std::any_of(peer.lanes.begin(), peer.lanes.end(), [&](const Lane &lane) { return is_silent(lane.socket, silent_ns); }))
            lose(peer, State::lost, "its host has not answered for " + std::to_string(silent_ns / 1000000000) + " s");
}

void Connections::disconnect(int peer, const std::string &why) {
    const std::lock_guard<std::mutex> held(lock);
    lose(peers[static_cast<size_t>(peer)], State::lost, why);
}

void Connections::abort() {
    const std::lock_guard<std::mutex> held(lock);
    for (Peer &peer : peers) lose(peer, State::aborted, "this rank has aborted the group");
}

void Connections::close() {
    const std::lock_guard<std::mutex> held(lock);
    const MessageHeader farewell = {FAREWELL, 0};
    for (Peer &peer : peers) {
        if (peer.state == State::done && peer.sending == 0)
            (void)!::send(peer.lanes.front().socket, &farewell, sizeof farewell, MSG_DONTWAIT | MSG_NOSIGNAL);
        lose(peer, State::aborted, "this rank has left the group");
        for (Lane &lane : peer.lanes)
            if (waiters == 0 && lane.socket >= 0) ::close(std::exchange(lane.socket, -1));
    }
}

void Connections::close_after_fork() { // no lock: another thread of the parent may have held it
    for (Peer &peer : peers) {
        peer.state = State::aborted;
        for (Lane &lane : peer.lanes)
            if (lane.socket >= 0) ::close(std::exchange(lane.socket, -1));
    }
}

std::string Connections::why(int peer) {
    const std::lock_guard<std::mutex> held(lock);
    return peers[static_cast<size_t>(peer)].why;
}

uint64_t Connections::moved_with(const Message &message) {
    const std::lock_guard<std::mutex> held(lock);
    const Peer &peer = peers[static_cast<size_t>(message.peer)];
    return message.is_sent ? peer.sent_nbytes : peer.received_nbytes;
}

size_t Connections::lanes_of(int peer) {
    const std::lock_guard<std::mutex> held(lock);
    return peers[static_cast<size_t>(peer)].chosen;
}

#endif
