// Which of the connections to a peer carry the parts of large messages. See connections.hpp.
#include "connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <bitset>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

namespace {

constexpr int64_t TRIAL_NBYTES = 8 << 20;         // that the turns of one lane, or of all, move at least
constexpr int64_t TURN_US = 40000;                // that a turn takes at least: the system counts in steps of up to 10 ms
constexpr int64_t MOST_PAUSE = int64_t{16} << 30; // bytes from trials to the next ones
constexpr int LEAST_TURNS = 3;                    // of each
constexpr double FASTER = 1.5;                    // so much must all lanes be, in all turns together and in the fastest ones

int64_t unacknowledged_of(int socket) {
    int nbytes = 0;
    return ioctl(socket, SIOCOUTQ, &nbytes) == 0 ? nbytes : 0;
}

bool uses_all(unsigned turn) { return (std::bitset<32>(turn).count() & 1) != 0; }

} // namespace

// Return zeros if the system does not count them (before Linux 4.10), or if it is no TCP socket.
Connections::Progress Connections::progress_of(int socket) {
    int64_t counts[24] = {}; // the later members of linux/tcp.h's tcp_info, which the C library's one may not have
    socklen_t size = sizeof counts;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, counts, &size) != 0 || size < sizeof counts) return {};
    return {counts[15], counts[21], counts[22]}; // tcpi_bytes_acked, tcpi_busy_time, tcpi_rwnd_limited
}

// Give parts of large messages to lanes. The next part is for the lane of which the other host has the most acknowledged: the
// system accepts more than it can send, and a slow lane shall get fewer parts. It waits until that lane can send it. The first
// part of a message is for the first lane. No lane has it before parts of earlier messages: it stays there until it is expected.
void Connections::hand_out(Peer &peer) {
    std::vector<int64_t> unacknowledged(peer.used);
    for (size_t k = 0; k < peer.used; k++) {
        unacknowledged[k] = unacknowledged_of(peer.lanes[k].socket);
        for (const Part &each : peer.lanes[k].out) unacknowledged[k] += static_cast<int64_t>(each.header.follows());
    }
    while (!peer.rest.empty()) {
        MessageHeader &rest = peer.rest.front().header;
        const bool begins = rest.offset == 0;
        const auto least = begins ? unacknowledged.begin() : std::min_element(unacknowledged.begin(), unacknowledged.end());
        Lane &lane = peer.lanes[static_cast<size_t>(least - unacknowledged.begin())];
        if (!begins && !lane.out.empty()) return;
        Part next = peer.rest.front();
        next.header.part = static_cast<uint32_t>(std::min<uint64_t>(rest.part, rest.nbytes - rest.offset));
        rest.offset += rest.part;
        if (rest.offset >= rest.nbytes) peer.rest.pop_front();
        *least += next.header.part;
        lane.out.push_back(std::move(next));
        write_to(peer, lane);
    }
}

// Before a message is sent: find out whether all lanes move many more bytes per second than one, and decide how many are used.
// In a trial, messages use one lane and all of them by turns, so that both get the same kinds of calls. A turn lasts until
// nearly nothing is under way, or until it is long. Which turns use all lanes follows the Thue-Morse sequence, so that no period
// of the program can match it. The system counts the bytes that the other host has acknowledged, and the time while there were
// such to wait for; the time for which the other rank did not read is left out. So neither the sizes of buffers nor pauses of
// the program count. Messages of the ranks are the only ones that are sent for this. One short turn does not decide: what the
// other rank sends at the time may delay acknowledgements, and full buffers of the network the first bytes.
void Connections::choose_lanes(Peer &peer, uint64_t nbytes) {
    if (nbytes < LARGE_NBYTES) return;
    if (!peer.on_trial) {
        peer.until_trial -= static_cast<int64_t>(nbytes);
        peer.on_trial = peer.until_trial <= 0;
    }
    if (!peer.on_trial || peer.sending > 1) return;
    if (peer.in_turn && !end_turn(peer)) return;
    if (!peer.on_trial) return;
    for (Lane &lane : peer.lanes) lane.progress = progress_of(lane.socket);
    peer.on_trial = peer.in_turn = peer.lanes.front().progress.acknowledged > 0; // else the system does not count them
    if (!peer.in_turn)
        peer.until_trial = INT64_MAX;
    else
        peer.used = uses_all(++peer.turns) ? peer.lanes.size() : 1;
}

// Return whether a turn has ended.
bool Connections::end_turn(Peer &peer) {
    Peer::Tried &tried = peer.tried[uses_all(peer.turns)];
    int64_t moved = 0, waited_us = 0, left = 0;
    for (const Lane &lane : peer.lanes) {
        const Progress &from = lane.progress, to = progress_of(lane.socket);
        moved += to.acknowledged - from.acknowledged;
        waited_us = std::max(waited_us, (to.busy_us - from.busy_us) - (to.held_us - from.held_us));
        left += unacknowledged_of(lane.socket);
    }
    if (waited_us < TURN_US || (left >= static_cast<int64_t>(LARGE_NBYTES) && moved < TRIAL_NBYTES)) return false;
    peer.in_turn = false;
    const double speed = static_cast<double>(moved) / static_cast<double>(waited_us);
    tried = {tried.moved + moved, tried.waited_us + waited_us, tried.turns + 1, std::max(tried.fastest, speed)};
    peer.used = peer.chosen;
    for (const Peer::Tried &each : peer.tried)
        if (each.moved < TRIAL_NBYTES || each.turns < LEAST_TURNS) return true;
    const auto &[one, all] = peer.tried;
    const bool is_faster = all.fastest > FASTER * one.fastest && all.speed() > FASTER * one.speed();
    peer.used = peer.chosen = is_faster ? peer.lanes.size() : 1;
    peer.tried[0] = peer.tried[1] = {};
    peer.on_trial = false, peer.until_trial = peer.pause;
    peer.pause = std::min(4 * peer.pause, MOST_PAUSE);
    return true;
}

#endif
