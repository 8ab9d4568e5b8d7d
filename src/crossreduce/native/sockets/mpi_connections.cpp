#include "mpi_connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <climits>

namespace {

constexpr int64_t NAP_NS = 50000;     // between two tests of messages, after yielding: MPI cannot wake a rank that sleeps
constexpr int YIELDS = 50;            // so many times as long as for sockets, which wake a rank
constexpr size_t STATUS_NBYTES = 256; // more than an MPI_Status of any MPI

using State = Message::State;

} // namespace

MpiConnections::MpiConnections(const MpiLibrary &given, const std::vector<int> &ranks)
    : Connections(ranks, std::vector<int>(ranks.size(), -1), INT64_MAX, false), library(given) {}

void MpiConnections::begin(Peer &peer, const std::shared_ptr<Message> &message, MpiLibrary::Start start) {
    if (message->header.nbytes > INT_MAX) {
        lose(peer, State::lost, "a message of MPI has at most 2 GiB");
    } else {
        const int tag = library.first_tag + static_cast<int>(message->header.tag);
        const int failure = start(message->data, static_cast<int>(message->header.nbytes), library.byte, peer.rank, tag,
                                  library.comm, &message->request);
        if (failure == 0) return moving.push_back(message);
        lose(peer, State::lost, "MPI reports error " + std::to_string(failure));
    }
    message->state = peer.state;
}

void MpiConnections::begin_receive(Peer &peer, const std::shared_ptr<Message> &message) {
    if (peer.state == State::done) return begin(peer, message, library.receive);
    message->state = peer.state;
}

bool MpiConnections::is_over(Message &message, int &failure) const {
    alignas(16) char status[STATUS_NBYTES];
    int flag = 0;
    failure = library.test(&message.request, &flag, status);
    return failure != 0 || flag != 0;
}

void MpiConnections::move() {
    std::vector<std::pair<int, int>> failures; // peers, and errors of MPI
    const auto over = [&](const std::shared_ptr<Message> &message) {
        int failure;
        if (!is_over(*message, failure)) return false;
        message->state = failure == 0 ? State::done : State::lost;
        if (failure != 0) failures.emplace_back(message->peer, failure);
        return true;
    };
    moving.erase(std::remove_if(moving.begin(), moving.end(), over), moving.end());
    for (const auto &[peer, failure] : failures)
        lose(peers[static_cast<size_t>(peer)], State::lost, "MPI reports error " + std::to_string(failure));
}

int64_t MpiConnections::longest_sleep() const { return NAP_NS; }

int64_t MpiConnections::yield_ns(bool by_maker) const { return YIELDS * Connections::yield_ns(by_maker); }

bool MpiConnections::has_work(const Peer &peer) const {
    return std::any_of(moving.begin(), moving.end(), [&](const auto &each) { return peers[static_cast<size_t>(each->peer)].rank == peer.rank; });
}

void MpiConnections::lose(Peer &peer, State state, const std::string &why) {
    if (peer.state != State::done) return;
    const auto is_kept = [&](const std::shared_ptr<Message> &each) { return &peers[static_cast<size_t>(each->peer)] != &peer; };
    const auto first_lost = std::stable_partition(moving.begin(), moving.end(), is_kept);
    std::vector<std::shared_ptr<Message>> ended(first_lost, moving.end());
    moving.erase(first_lost, moving.end());
    for (const auto &message : ended) {
        int failure;
        message->state = state;
        library.cancel(&message->request);
        if (!is_over(*message, failure)) orphans.push_back(message);
    }
    Connections::lose(peer, state, why);
}

#endif
