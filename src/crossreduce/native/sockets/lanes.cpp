// Which of the connections to a peer carry the parts of large messages. See connections.hpp.
#include "connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

namespace {

constexpr int64_t TRIAL_US = 40000; // that a trial takes at least
constexpr int64_t MOST_PAUSE = int64_t{16} << 30; // bytes from trials to the next ones
constexpr double FASTER = 1.25; // at least, if several lanes shall be used

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
        int nbytes = 0;
        if (ioctl(peer.lanes[k].socket, SIOCOUTQ, &nbytes) == 0) unacknowledged[k] = nbytes;
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

// Decide how many lanes large messages use from now on: all, if these have just been found to move much more bytes per second
// than one does. The system counts the bytes that the other host has acknowledged, and the time while there were such to wait
// for; the time for which the other rank did not read is left out. So neither the sizes of buffers nor pauses of the program
// count. Messages of the ranks are the only ones that are sent for this.
void Connections::choose_lanes(Peer &peer, uint64_t nbytes) {
    peer.until_choice -= static_cast<int64_t>(nbytes);
    if (peer.until_choice > 0) return;
    int64_t moved = 0, busy_us = 0, waited_us = 0;
    std::vector<Progress> now;
    for (const Lane &lane : peer.lanes) {
        now.push_back(progress_of(lane.socket));
        const Progress &from = lane.progress, &to = now.back();
        moved += to.acknowledged - from.acknowledged;
        busy_us = std::max(busy_us, to.busy_us - from.busy_us);
        waited_us = std::max(waited_us, (to.busy_us - from.busy_us) - (to.held_us - from.held_us));
    }
    if (peer.trial != Peer::Trial::none && busy_us < TRIAL_US) return; // too short to be measured
    for (size_t k = 0; k < now.size(); k++) peer.lanes[k].progress = now[k];
    const double speed = static_cast<double>(moved) / static_cast<double>(std::max<int64_t>(waited_us, 1));
    peer.until_choice = TRIAL_NBYTES;
    switch (peer.trial) {
    case Peer::Trial::none:
        peer.trial = Peer::Trial::of_one, peer.used = 1;
        break;
    case Peer::Trial::of_one:
        peer.trial = Peer::Trial::of_all, peer.used = peer.lanes.size(), peer.speed_of_one = speed;
        break;
    case Peer::Trial::of_all:
        peer.trial = Peer::Trial::none, peer.used = speed > FASTER * peer.speed_of_one ? peer.lanes.size() : 1;
        peer.until_choice = peer.pause, peer.pause = std::min(4 * peer.pause, MOST_PAUSE);
    }
}

#endif
