#include "connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h> // POLLRDHUP needs _GNU_SOURCE, which g++ and clang++ define
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "futex.hpp"

namespace {

constexpr size_t STAGED_NBYTES = 1 << 16;      // read at once beyond the end of a message
constexpr uint64_t MOST_EARLY_NBYTES = 1 << 20; // of a message that is read before it is expected
constexpr size_t MOST_PARTS = 16;              // of one call to the system
constexpr int LEAST_REPEATS = 2;               // a packet or its answer may be lost
constexpr int64_t SHARED_WAIT_NS = 1000000;    // of several threads that wait, one may move another one's message

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

Connections::Connections(std::vector<int> ranks, std::vector<int> sockets, int64_t limit_ns) : silent_ns(limit_ns) {
    for (size_t k = 0; k < ranks.size(); k++) {
        peers.emplace_back();
        peers.back().rank = ranks[k];
        peers.back().socket = sockets[k];
        peers.back().staged.resize(STAGED_NBYTES);
    }
}

Connections::~Connections() {
    for (Peer &peer : peers)
        if (peer.socket >= 0) ::close(peer.socket);
}

int Connections::index_of(int rank) const {
    for (size_t k = 0; k < peers.size(); k++)
        if (peers[k].rank == rank) return static_cast<int>(k);
    return -1;
}

std::shared_ptr<Message> Connections::send(int index, uint64_t tag, char *data, int64_t nbytes) {
    const auto made = new_message(index, tag, data, nbytes);
    made->is_sent = true;
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
    peer.out.push_back(message);
    if (peer.out.size() == 1) write_to(peer);
}

std::shared_ptr<Message> Connections::receive(int index, uint64_t tag, char *data, int64_t nbytes) {
    const auto made = new_message(index, tag, data, nbytes);
    const std::lock_guard<std::mutex> held(lock);
    begin_receive(peers[static_cast<size_t>(index)], made);
    return made;
}

void Connections::begin_receive(Peer &peer, const std::shared_ptr<Message> &message) {
    std::deque<std::vector<char>> &early = peer.early[message->header.tag];
    if (!early.empty() && early.front().size() <= message->header.nbytes) {
        if (!early.front().empty()) std::memcpy(message->data, early.front().data(), early.front().size());
        early.pop_front();
        message->state = State::done;
        return;
    }
    if (!early.empty()) lose(peer, State::lost, TOO_LARGE);
    if (peer.state != State::done) {
        message->state = peer.state;
        return;
    }
    peer.expected[message->header.tag].push_back(message);
    peer.expectations++;
}

void Connections::write_to(Peer &peer) {
    while (!peer.out.empty()) {
        iovec parts[MOST_PARTS];
        size_t count = 0;
        for (const auto &each : peer.out) {
            if (count + 2 > MOST_PARTS) break;
            const int64_t of_header = static_cast<int64_t>(sizeof(MessageHeader)) - each->moved;
            if (of_header > 0)
                parts[count++] = part(reinterpret_cast<char *>(&each->header) + each->moved, static_cast<size_t>(of_header));
            const int64_t moved = std::max<int64_t>(0, -of_header);
            const int64_t left = static_cast<int64_t>(each->header.nbytes) - moved;
            if (left > 0) parts[count++] = part(each->data + moved, static_cast<size_t>(left));
        }
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        ssize_t sent = sendmsg(peer.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) lose(peer, State::lost, std::strerror(errno));
            return;
        }
        while (sent > 0) {
            Message &first = *peer.out.front();
            const int64_t left = static_cast<int64_t>(sizeof(MessageHeader) + first.header.nbytes) - first.moved;
            const int64_t taken = std::min<int64_t>(left, sent);
            first.moved += taken, sent -= taken;
            if (taken < left) break;
            first.state = State::done;
            peer.out.pop_front();
        }
    }
}

// Begin the message whose header is staged. Return false if it has to wait, or is the last one.
bool Connections::begin_incoming(Peer &peer) {
    Incoming &incoming = peer.incoming;
    if (!incoming.active) {
        std::memcpy(&incoming.header, peer.staged.data() + peer.staged_begin, sizeof(MessageHeader));
        peer.staged_begin += sizeof(MessageHeader);
        if (incoming.header.tag == FAREWELL) {
            peer.said_farewell = true;
            lose(peer, State::left, "it has left the group");
            return false;
        }
        incoming.active = true;
        incoming.moved = 0;
        incoming.into = nullptr;
    }
    const auto expected = peer.expected.find(incoming.header.tag);
    if (expected != peer.expected.end() && !expected->second.empty()) {
        incoming.into = expected->second.front();
        if (incoming.into->header.nbytes < incoming.header.nbytes) {
            lose(peer, State::lost, TOO_LARGE);
            return false;
        }
        expected->second.pop_front();
    } else if (incoming.header.nbytes > MOST_EARLY_NBYTES) {
        incoming.blocked = true;
        return false;
    } else {
        incoming.early.assign(incoming.header.nbytes, 0);
    }
    incoming.blocked = false;
    return true;
}

void Connections::finish_incoming(Peer &peer) {
    Incoming &incoming = peer.incoming;
    incoming.active = false;
    if (incoming.into == nullptr) {
        auto &expected = peer.expected[incoming.header.tag];
        if (expected.empty()) {
            peer.early[incoming.header.tag].push_back(std::move(incoming.early));
            return;
        }
        incoming.into = expected.front(); // it was expected while it was read
        if (incoming.into->header.nbytes < incoming.header.nbytes) {
            lose(peer, State::lost, TOO_LARGE);
            return;
        }
        expected.pop_front();
        if (!incoming.early.empty()) std::memcpy(incoming.into->data, incoming.early.data(), incoming.early.size());
    }
    incoming.into->state = State::done;
    incoming.into = nullptr;
    peer.expectations--;
}

void Connections::read_from(Peer &peer) {
    Incoming &incoming = peer.incoming;
    while (peer.state == State::done && peer.expectations > 0) {
        const size_t staged = peer.staged_end - peer.staged_begin;
        if (!incoming.active || incoming.blocked) {
            if ((incoming.active || staged >= sizeof(MessageHeader)) && !begin_incoming(peer)) return;
        }
        iovec parts[2];
        size_t count = 0;
        if (incoming.active) {
            char *to = (incoming.into != nullptr ? incoming.into->data : incoming.early.data()) + incoming.moved;
            const uint64_t left = incoming.header.nbytes - incoming.moved;
            const size_t taken = std::min<uint64_t>(left, peer.staged_end - peer.staged_begin);
            if (taken > 0) std::memcpy(to, peer.staged.data() + peer.staged_begin, taken);
            peer.staged_begin += taken;
            incoming.moved += taken;
            if (taken == left) {
                finish_incoming(peer);
                continue;
            }
            parts[count++] = part(to + taken, left - taken);
        }
        // Nothing is staged now but, between messages, the start of a header.
        const size_t kept = peer.staged_end - peer.staged_begin;
        if (kept > 0) std::memmove(peer.staged.data(), peer.staged.data() + peer.staged_begin, kept);
        peer.staged_begin = 0, peer.staged_end = kept;
        parts[count++] = part(peer.staged.data() + kept, STAGED_NBYTES - kept);
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t got = recvmsg(peer.socket, &message, MSG_DONTWAIT);
        if (got < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) lose(peer, State::lost, std::strerror(errno));
            return;
        }
        if (got == 0) {
            lose(peer, State::lost, "it has closed the connection");
            return;
        }
        const size_t direct = count == 2 ? std::min<size_t>(static_cast<size_t>(got), parts[0].iov_len) : 0;
        incoming.moved += direct;
        peer.staged_end += static_cast<size_t>(got) - direct;
        if (incoming.active && incoming.moved == incoming.header.nbytes) finish_incoming(peer);
    }
}

void Connections::lose(Peer &peer, State state, const std::string &why) {
    if (peer.state != State::done) return;
    peer.state = state;
    peer.why = why;
    if (peer.incoming.into != nullptr) peer.incoming.into->state = state;
    peer.incoming = Incoming();
    for (const auto &each : peer.out) each->state = state;
    peer.out.clear();
    for (const auto &tag : peer.expected)
        for (const auto &each : tag.second) each->state = state;
    peer.expected.clear();
    peer.expectations = 0;
    if (peer.socket >= 0) shutdown(peer.socket, SHUT_RDWR);
}

Message::State Connections::wait(Message &message, int64_t until_ns) {
    std::vector<pollfd> polled;
    const int64_t yield_until_ns = now_ns() + yield_ns(std::this_thread::get_id() == maker);
    std::unique_lock<std::mutex> held(lock);
    struct Waiter {
        int &count;
        ~Waiter() { count--; } // also if there is no memory for a message that nobody expects yet
    } const waiter{++waiters};
    while (true) {
        move();
        int64_t left = std::min(until_ns - now_ns(), longest_sleep());
        if (message.state != State::pending || until_ns <= now_ns()) break;
        if (now_ns() < yield_until_ns) { // to wake a rank that sleeps takes longer than most small messages
            held.unlock();
            sched_yield();
            held.lock();
            continue;
        }
        if (waiters > 1) left = std::min(left, SHARED_WAIT_NS);
        polled.clear();
        for (const Peer &peer : peers)
            if (const short wanted = has_work(peer) ? events(peer) : short{0}; wanted != 0) polled.push_back({peer.socket, wanted, 0});
        if (descriptor() >= 0) polled.push_back({descriptor(), POLLIN, 0});
        if (!may_sleep()) continue;
        held.unlock();
        const timespec time = {static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
        const bool interrupted = ppoll(polled.data(), polled.size(), &time, nullptr) < 0;
        held.lock();
        if (interrupted) break; // by a signal
        for (const pollfd &each : polled)
            for (Peer &peer : peers)
                if (peer.socket == each.fd && peer.incoming.blocked && (each.revents & (POLLRDHUP | POLLERR | POLLHUP)) != 0)
                    lose(peer, State::lost, "it has closed the connection");
    }
    return message.state;
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
        write_to(peer);
        read_from(peer);
    }
}

int64_t Connections::yield_ns(bool by_maker) const { return by_maker ? YIELD_NS : HELPER_YIELD_NS; }

short Connections::events(const Peer &peer) const {
    // While a message blocks others, nothing is read, so the end of the connection has to be noticed here.
    const int reads = peer.expectations == 0 ? 0 : peer.incoming.blocked ? POLLRDHUP : POLLIN;
    return static_cast<short>(reads | (peer.out.empty() ? 0 : POLLOUT));
}

bool Connections::has_work(const Peer &peer) const {
    return peer.state == State::done && (!peer.out.empty() || peer.expectations > 0);
}

void Connections::drop_silent() {
    const std::lock_guard<std::mutex> held(lock);
    for (Peer &peer : peers)
        if (peer.state == State::done && is_silent(peer.socket, silent_ns))
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
        if (peer.state == State::done && peer.out.empty())
            (void)!::send(peer.socket, &farewell, sizeof farewell, MSG_DONTWAIT | MSG_NOSIGNAL);
        lose(peer, State::aborted, "this rank has left the group");
        if (waiters == 0 && peer.socket >= 0) {
            ::close(peer.socket);
            peer.socket = -1;
        }
    }
}

void Connections::close_after_fork() { // no lock: another thread of the parent may have held it
    for (Peer &peer : peers) {
        peer.state = State::aborted;
        if (peer.socket >= 0) ::close(peer.socket);
        peer.socket = -1;
    }
}

std::string Connections::why(int peer) {
    const std::lock_guard<std::mutex> held(lock);
    return peers[static_cast<size_t>(peer)].why;
}

#endif
