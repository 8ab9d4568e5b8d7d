// Messages that UCX moves: over InfiniBand, RoCE and other networks, or over TCP and shared memory.
//
// The ranks are also connected by sockets, as for `Connections`. Nothing but the end of a rank is noticed there: UCX itself
// notices it after 20 s and more. As without UCX, no thread belongs to the messages; they move while a rank waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "connections.hpp"
#include "ucx_api.hpp"

// UCX's objects of one rank. The methods of workers are called by one thread at a time.
class UcxWorker {
  public:
    explicit UcxWorker(const ucx::Library &library) : library(library) {}
    ~UcxWorker(); // in a forked process nothing is released: the objects are those of the parent
    UcxWorker(const UcxWorker &) = delete;
    UcxWorker &operator=(const UcxWorker &) = delete;

    std::string open(); // create the objects; return an error, or ""
    std::string address() const { return published; }
    bool is_own() const; // false: in a forked process

    const ucx::Library &library;
    void *worker = nullptr;
    int descriptor = -1; // readable when there is something to move

  private:
    void *context = nullptr;
    std::string published;
    int process = 0;
};

class UcxConnections final : public Connections {
  public:
    // `addresses`: the addresses of the peers' workers. `own`: this rank.
    UcxConnections(std::unique_ptr<UcxWorker> worker, int own, std::vector<int> ranks, std::vector<int> sockets,
                   const std::vector<std::string> &addresses, int64_t silent_ns);
    ~UcxConnections() override;
    std::string connect(); // create the endpoints; return an error, or ""
    void close() override;

  protected:
    void begin_send(Peer &peer, const std::shared_ptr<Message> &message) override;
    void begin_receive(Peer &peer, const std::shared_ptr<Message> &message) override;
    bool joins() const override { return true; }
    void move() override;
    short events(const Peer &peer, const Lane &lane) const override;
    int descriptor() const override { return ucx ? ucx->descriptor : -1; }
    bool may_sleep() override;
    int64_t longest_sleep() const override;
    bool has_work(const Peer &peer) const override;
    void lose(Peer &peer, Message::State state, const std::string &why) override;

  private:
    struct End { // of a peer, as UCX knows it
        void *endpoint = nullptr;
        ucx::Status failure = ucx::OK; // of the endpoint
        std::string address;
        std::vector<std::shared_ptr<Message>> moving;
        std::shared_ptr<Message> farewell;              // done: the peer has sent all its messages, and leaves
        Message::State ending = Message::State::pending; // left or lost: what the socket has said
        bool has_left = false;
        std::string why;
        int64_t ends_at = 0; // messages that have not arrived by then are lost
    };

    End &end_of(const Peer &peer) { return ends[static_cast<size_t>(&peer - peers.data())]; }
    const End &end_of(const Peer &peer) const { return ends[static_cast<size_t>(&peer - peers.data())]; }
    void *begin(Peer &peer, const Message &message);
    void start(Peer &peer, const std::shared_ptr<Message> &message);
    void finish_moved(Peer &peer);
    void finish_orphans();
    void take_back();
    void release();
    void read_socket(Peer &peer, int64_t now);
    static void expect_end(End &end, Message::State state, const std::string &why, int64_t ends_at);
    template <class IsDone> void progress_until(int64_t until_ns, IsDone &&is_done);
    static void on_error(void *argument, void *endpoint, ucx::Status status);

    std::unique_ptr<UcxWorker> ucx;
    const int own;
    std::vector<End> ends;                         // one for each of `peers`
    std::vector<std::shared_ptr<Message>> orphans; // messages that have failed, but of which UCX still has the memory
    std::vector<void *> closing;                   // requests
    int64_t looked_at = 0;                         // at the sockets
};
