#include "ucx_connections.hpp"

#if defined(__linux__)

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "futex.hpp"

namespace {

constexpr unsigned API_MAJOR = 1, API_MINOR = 10; // of the functions in ucx_api.hpp
constexpr int TAG_BITS = 40;                      // of a tag for UCX; the others have the number of the sender
constexpr uint64_t TAG_MASK = (uint64_t{1} << TAG_BITS) - 1;
constexpr int64_t LOST_NS = 100000000;   // from the end of a process to the arrival of the last message that it has sent
constexpr int64_t LEFT_NS = 10000000000; // the same for a rank that says that it leaves: lost packets are sent again
constexpr int64_t CLOSE_NS = 1000000000; // for the last messages of a rank that leaves
constexpr int64_t FLUSH_NS = 100000000;  // for the network's answer to them; over TCP, UCX needs one of the other rank
constexpr int64_t PAUSE_NS = 5000000;    // between two looks for messages of a rank that has ended
constexpr int64_t LOOK_NS = 1000000;     // between two looks at the sockets
constexpr int64_t SPIN_NS = 20000;       // before a sleep: an RDMA network answers within a few microseconds
constexpr int MOST_STEPS = 64;           // of UCX, between two looks at the clock

using State = Message::State;

} // namespace

bool UcxWorker::is_own() const { return process == getpid(); }

UcxWorker::~UcxWorker() {
    if (!is_own()) return;
    if (worker != nullptr) library.destroy_worker(worker);
    if (context != nullptr) library.cleanup(context);
}

std::string UcxWorker::open() {
    process = getpid();
    ucx::Parameters about{};
    about.field_mask = ucx::Parameters::FEATURES;
    about.features = ucx::Parameters::TAG | ucx::Parameters::WAKEUP;
    ucx::Status status = library.init(API_MAJOR, API_MINOR, &about, nullptr, &context);
    if (status != ucx::OK) return std::string("UCX cannot start: ") + library.text_of(status);
    ucx::WorkerParameters threads{};
    threads.field_mask = ucx::WorkerParameters::THREAD_MODE;
    threads.thread_mode = ucx::WorkerParameters::SERIALIZED;
    status = library.create_worker(context, &threads, &worker);
    if (status != ucx::OK) return std::string("UCX finds no network: ") + library.text_of(status);
    void *address = nullptr;
    size_t nbytes = 0;
    status = library.get_descriptor(worker, &descriptor);
    if (status == ucx::OK) status = library.get_address(worker, &address, &nbytes);
    if (status != ucx::OK) return std::string("UCX cannot wait for messages: ") + library.text_of(status);
    published.assign(static_cast<const char *>(address), nbytes);
    library.release_address(worker, address);
    return "";
}

UcxConnections::UcxConnections(std::unique_ptr<UcxWorker> worker, int own, std::vector<int> ranks, std::vector<int> sockets,
                               const std::vector<std::string> &addresses, int64_t silent_ns)
    : Connections(std::move(ranks), std::move(sockets), silent_ns), ucx(std::move(worker)), own(own), ends(addresses.size()) {
    for (size_t k = 0; k < ends.size(); k++) ends[k].address = addresses[k];
}

template <class IsDone> void UcxConnections::progress_until(int64_t until_ns, IsDone &&is_done) {
    while (!is_done() && now_ns() < until_ns) {
        ucx->library.progress(ucx->worker);
        for (Peer &peer : peers)
            if (peer.state == State::done) finish_moved(peer);
        finish_orphans();
    }
}

UcxConnections::~UcxConnections() { release(); }

// Fail all messages, and release UCX's objects.
void UcxConnections::release() {
    if (!ucx || !ucx->is_own()) return; // in a forked process
    for (Peer &peer : peers) lose(peer, State::aborted, "this rank has left the group");
    // An endpoint that is closed by force gives back the memory of its messages at once, or soon.
    progress_until(now_ns() + CLOSE_NS, [&] { return orphans.empty() && closing.empty(); });
    ucx.reset();
}

std::string UcxConnections::connect() {
    const std::lock_guard<std::mutex> held(lock);
    for (Peer &peer : peers) {
        End &end = end_of(peer);
        ucx::EndpointParameters about{};
        about.field_mask =
            ucx::EndpointParameters::REMOTE_ADDRESS | ucx::EndpointParameters::ERROR_MODE | ucx::EndpointParameters::ERROR_HANDLER;
        about.address = end.address.data();
        about.error_mode = ucx::EndpointParameters::BY_PEER;
        about.handler = on_error;
        about.argument = &end.failure;
        if (const ucx::Status status = ucx->library.create_endpoint(ucx->worker, &about, &end.endpoint); status != ucx::OK) {
            end.endpoint = nullptr;
            for (Peer &each : peers) each.lanes.front().socket = -1; // the caller keeps them
            return "UCX cannot connect to rank " + std::to_string(peer.rank) + ": " + ucx->library.text_of(status);
        }
        end.farewell = std::make_shared<Message>();
        end.farewell->header = {FAREWELL, 0};
        start(peer, end.farewell);
    }
    return "";
}

void UcxConnections::on_error(void *argument, void *, ucx::Status status) { *static_cast<ucx::Status *>(argument) = status; }

void *UcxConnections::begin(Peer &peer, const Message &message) {
    const bool sending = message.is_sent;
    const ucx::RequestParameters about{};
    const uint64_t tag = message.header.tag & TAG_MASK, from = static_cast<uint64_t>(sending ? own : peer.rank) << TAG_BITS;
    if (sending) return ucx->library.send(end_of(peer).endpoint, message.data, message.header.nbytes, from | tag, &about);
    return ucx->library.receive(ucx->worker, message.data, message.header.nbytes, from | tag, ~uint64_t{0}, &about);
}

void UcxConnections::start(Peer &peer, const std::shared_ptr<Message> &message) {
    message->request = begin(peer, *message);
    end_of(peer).moving.push_back(message);
    if (ucx::status_of(message->request) != ucx::IN_PROGRESS) finish_moved(peer);
}

void UcxConnections::begin_send(Peer &peer, const std::shared_ptr<Message> &message) { start(peer, message); }

void UcxConnections::begin_receive(Peer &peer, const std::shared_ptr<Message> &message) {
    if (peer.state == State::done) return start(peer, message);
    message->state = peer.state;
    if (!ucx || peer.state == State::aborted) return;
    message->request = begin(peer, *message); // it may have arrived before the peer left, or was lost
    if (ucx::status_of(message->request) == ucx::OK) message->state = State::done;
    if (ucx::status_of(message->request) != ucx::IN_PROGRESS) return;
    ucx->library.cancel(ucx->worker, message->request);
    orphans.push_back(message);
    take_back();
}

// Finish the messages with a peer that UCX has moved. If one has failed, the peer is lost.
void UcxConnections::finish_moved(Peer &peer) {
    std::vector<std::shared_ptr<Message>> &moving = end_of(peer).moving;
    ucx::Status failure = ucx::OK;
    const auto is_over = [&](const std::shared_ptr<Message> &message) {
        ucx::Status status = ucx::status_of(message->request);
        const bool is_request = status == ucx::IN_PROGRESS;
        if (is_request) status = ucx->library.check(message->request);
        if (status == ucx::IN_PROGRESS) return false;
        if (is_request) ucx->library.free_request(message->request);
        message->request = nullptr;
        if (status == ucx::OK)
            message->state = State::done;
        else
            message->state = State::lost, failure = status;
        return true;
    };
    moving.erase(std::remove_if(moving.begin(), moving.end(), is_over), moving.end());
    if (failure == ucx::TRUNCATED) lose(peer, State::lost, TOO_LARGE);
    if (failure != ucx::OK) lose(peer, State::lost, ucx->library.text_of(failure));
}

void UcxConnections::move() {
    if (!ucx) return; // closed
    for (int k = 0; k < MOST_STEPS && ucx->library.progress(ucx->worker) != 0; k++) {
    }
    const int64_t now = now_ns();
    const bool looks = now - looked_at > LOOK_NS;
    if (looks) looked_at = now;
    for (Peer &peer : peers) {
        if (peer.state != State::done) continue;
        End &end = end_of(peer);
        finish_moved(peer);
        if (looks && end.ending == State::pending) read_socket(peer, now);
        if (end.farewell->state == State::done && !end.has_left) {
            end.has_left = true;
            expect_end(end, State::left, "it has left the group", now + LOST_NS);
        }
        if (end.failure != ucx::OK && end.ending == State::pending)
            expect_end(end, State::lost, ucx->library.text_of(end.failure), now + LOST_NS);
        if (end.ending != State::pending && now >= end.ends_at) lose(peer, end.ending, end.why);
    }
    finish_orphans();
}

// Read from the socket of a peer that it leaves, or that its process has ended.
void UcxConnections::read_socket(Peer &peer, int64_t now) {
    MessageHeader header;
    const ssize_t got = recv(peer.lanes.front().socket, &header, sizeof header, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    End &end = end_of(peer);
    if (got == static_cast<ssize_t>(sizeof header) && header.tag == FAREWELL)
        expect_end(end, State::left, "it has left the group", now + LEFT_NS);
    else
        expect_end(end, State::lost, got < 0 ? std::strerror(errno) : "it has closed the connection", now + LOST_NS);
}

void UcxConnections::expect_end(End &end, State state, const std::string &why, int64_t ends_at) {
    end.ending = state;
    end.why = why;
    end.ends_at = ends_at;
}

short UcxConnections::events(const Peer &peer, const Lane &) const { return end_of(peer).ending == State::pending ? POLLIN : short{0}; }

bool UcxConnections::has_work(const Peer &peer) const {
    return peer.state == State::done && end_of(peer).moving.size() > (end_of(peer).farewell->request == nullptr ? 0 : 1);
}

int64_t UcxConnections::longest_sleep() const {
    const auto ends_soon = [&](const Peer &peer) { return peer.state == State::done && end_of(peer).ending != State::pending; };
    return std::any_of(peers.begin(), peers.end(), ends_soon) ? PAUSE_NS : INT64_MAX;
}

bool UcxConnections::may_sleep() {
    if (!ucx) return true;
    const int64_t until = now_ns() + SPIN_NS;
    do {
        if (ucx->library.progress(ucx->worker) != 0) return false;
    } while (now_ns() < until);
    return ucx->library.arm(ucx->worker) != ucx::BUSY;
}

void UcxConnections::lose(Peer &peer, State state, const std::string &why) {
    if (peer.state != State::done) return;
    End &end = end_of(peer);
    for (const auto &message : end.moving) {
        message->state = state;
        ucx->library.cancel(ucx->worker, message->request);
    }
    orphans.insert(orphans.end(), end.moving.begin(), end.moving.end());
    end.moving.clear();
    if (end.endpoint != nullptr) {
        ucx::RequestParameters about{};
        about.mask = ucx::RequestParameters::FLAGS;
        about.flags = ucx::RequestParameters::FORCE;
        void *request = ucx->library.close_endpoint(end.endpoint, &about);
        if (ucx::status_of(request) == ucx::IN_PROGRESS) closing.push_back(request);
        end.endpoint = nullptr;
    }
    Connections::lose(peer, state, why);
    take_back();
}

// Wait until UCX no longer writes to the memory of messages that have failed, which their owners then free.
void UcxConnections::take_back() {
    const int64_t until = now_ns() + CLOSE_NS;
    for (finish_orphans(); !orphans.empty() && now_ns() < until; finish_orphans()) ucx->library.progress(ucx->worker);
}

// Give back the requests that UCX has finished for peers that are lost.
void UcxConnections::finish_orphans() {
    const auto is_over = [&](void *request) {
        if (ucx->library.check(request) == ucx::IN_PROGRESS) return false;
        ucx->library.free_request(request);
        return true;
    };
    orphans.erase(std::remove_if(orphans.begin(), orphans.end(), [&](const auto &each) { return is_over(each->request); }), orphans.end());
    closing.erase(std::remove_if(closing.begin(), closing.end(), is_over), closing.end());
}

void UcxConnections::close() {
    {
        const std::lock_guard<std::mutex> held(lock);
        if (!ucx || !ucx->is_own()) return; // closed before, or in a forked process
        const auto is_sent = [](const std::shared_ptr<Message> &message) { return message->is_sent; };
        const auto sends = [=](const End &end) { return std::any_of(end.moving.begin(), end.moving.end(), is_sent); };
        for (Peer &peer : peers) {
            if (peer.state != State::done || sends(end_of(peer))) continue; // a message that is not sent yet fails
            const auto farewell = std::make_shared<Message>();
            farewell->header = {FAREWELL, 0};
            farewell->is_sent = true;
            start(peer, farewell);
        }
        progress_until(now_ns() + CLOSE_NS, [=] { return std::none_of(ends.begin(), ends.end(), sends); });
        // A message that is sent, so that its memory may change, may still be in UCX's own memory.
        for (Peer &peer : peers) {
            if (sends(end_of(peer))) lose(peer, State::aborted, "this rank has left the group"); // without a farewell
            if (peer.state != State::done) continue;
            const ucx::RequestParameters about{};
            void *request = ucx->library.flush(end_of(peer).endpoint, &about);
            if (ucx::status_of(request) == ucx::IN_PROGRESS) closing.push_back(request);
        }
        progress_until(now_ns() + FLUSH_NS, [&] { return closing.empty(); });
    }
    Connections::close();
    const std::lock_guard<std::mutex> held(lock);
    if (!has_waiters()) release();
}

#endif
