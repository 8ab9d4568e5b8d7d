// Waits for messages: how a thread yields, sleeps at the sockets, and moves what it can. See connections.hpp.
#include "connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <linux/sockios.h>
#include <poll.h> // POLLRDHUP needs _GNU_SOURCE, which g++ and clang++ define
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "futex.hpp"

namespace {

constexpr uint64_t MOST_AWAITED = 1 << 17; // bytes
constexpr int LOOKS = 4; // for data, before a thread that does not share its processor yields
constexpr int64_t SHARED_WAIT_NS = 1000000; // of several threads that wait, one may move another one's message

using State = Message::State;

} // namespace

// Let the system report data of a large message only if there is much, or all of the rest.
void Connections::want_at_once(Lane &lane) {
    const uint64_t left = lane.active && !lane.blocked ? lane.header.follows() - lane.moved : 1;
    const int least = static_cast<int>(std::min(left, MOST_AWAITED));
    if (least == lane.least) return;
    lane.least = least;
    (void)setsockopt(lane.socket, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least); // other sockets do not know it
}

// Sleep until something can be moved, or `bell` is readable. Return false if a signal came.
bool Connections::sleep(std::unique_lock<std::mutex> &held, int64_t ns, int bell) {
    std::vector<pollfd> polled;
    const auto has_rest = [](const Peer &peer) { return !peer.rest.empty(); }; // another lane may have become the best one
    if (waiters > 1 || std::any_of(peers.begin(), peers.end(), has_rest)) ns = std::min(ns, SHARED_WAIT_NS);
    for (Peer &peer : peers)
        for (Lane &lane : peer.lanes)
            if (const short wanted = has_work(peer) ? events(peer, lane) : short{0}; wanted != 0) {
                if ((wanted & POLLIN) != 0) want_at_once(lane);
                polled.push_back({lane.socket, wanted, 0});
            }
    for (const int more : {descriptor(), bell})
        if (more >= 0) polled.push_back({more, POLLIN, 0});
    // A peer is lost if nothing more can be read from it before something else is expected.
    for (Peer &peer : peers) {
        const auto is_over = [&](const Lane &lane) {
            return lane.ended || (lane.blocked && lane.closing) || (peer.divided == 0 && &lane != peer.lanes.data());
        };
        if (peer.state != State::done || peer.expectations == 0 || peer.lanes.empty()) continue;
        if (!std::all_of(peer.lanes.begin(), peer.lanes.end(), is_over)) continue;
        lose(peer, State::lost, CLOSED_CONNECTION);
        return true;
    }
    if (!may_sleep()) return true;
    held.unlock();
    const timespec time = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    const bool interrupted = ppoll(polled.data(), polled.size(), &time, nullptr) < 0;
    held.lock();
    if (interrupted) return false;
    for (const pollfd &each : polled)
        for (Peer &peer : peers)
            for (Lane &lane : peer.lanes)
                if (lane.socket == each.fd && lane.blocked && (each.revents & (POLLRDHUP | POLLERR | POLLHUP)) != 0)
                    lane.closing = true;
    return true;
}

namespace {

struct Counted { // one more while it exists, also if there is no memory for a message that nobody expects yet
    int &count;
    explicit Counted(int &of) : count(of) { count++; }
    Counted(const Counted &) = delete;
    Counted &operator=(const Counted &) = delete;
    ~Counted() { count--; }
};

} // namespace

Message::State Connections::wait(Message &message, int64_t until_ns) {
    // While a large message is under way, other processes of the host shall get the CPU.
    const bool yields = message.header.nbytes < LARGE_NBYTES && std::this_thread::get_id() == maker;
    const int64_t yield_until_ns = now_ns() + yield_ns(yields);
    std::unique_lock<std::mutex> held(lock);
    const Counted waiter(waiters);
    for (int looks = 0;;) {
        move();
        const int64_t left = std::min(until_ns - now_ns(), longest_sleep());
        if (message.state != State::pending || until_ns <= now_ns()) break;
        const int64_t before = now_ns();
        if (before < yield_until_ns) { // to wake a rank that sleeps takes longer than most small messages
            held.unlock();
            if (shares_cpu || ++looks % LOOKS == 0) {
                sched_yield();
                shares_cpu = now_ns() - before > SWITCH_NS;
            }
            held.lock();
        } else if (!sleep(held, left, -1)) {
            break; // by a signal
        }
    }
    return message.state;
}

bool Connections::pause(int64_t until_ns, int bell) {
    std::unique_lock<std::mutex> held(lock);
    const Counted waiter(waiters);
    const int64_t left = std::min(until_ns - now_ns(), longest_sleep());
    const bool undisturbed = left <= 0 || sleep(held, left, bell);
    move();
    return undisturbed;
}

void Connections::flush(int64_t until_ns) {
    const timespec pause = {0, 200000};
    for (size_t k = 0; k < peers.size(); k++)
        for (const Lane &lane : peers[k].lanes)
            for (int left = 1; left > 0 && state_of(static_cast<int>(k)) == State::done && now_ns() < until_ns;)
                if (ioctl(lane.socket, SIOCOUTQ, &left) != 0 || left == 0 || nanosleep(&pause, nullptr) != 0) break;
}

State Connections::state_of(int peer) {
    const std::lock_guard<std::mutex> held(lock);
    return peers[static_cast<size_t>(peer)].state;
}

int64_t Connections::yield_ns(bool by_maker) const { return by_maker ? YIELD_NS : HELPER_YIELD_NS; }

#endif
