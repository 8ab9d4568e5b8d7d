// Messages between ranks of different hosts, over sockets that are connected already.
//
// No thread belongs to them: messages move while a rank waits for one of them, or at a barrier (`progress`). In the
// meantime the buffers of the system contain what a rank has sent. Each message is preceded by a header with its tag and size. Messages
// of one tag between two ranks arrive in order. A rank reads from a peer only while it expects a message from it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct MessageHeader {
    uint64_t tag, nbytes;
};

struct Message {
    enum class State { pending, done, lost, left, aborted };
    MessageHeader header;
    char *data;
    int64_t moved = 0; // bytes; of a message that is sent, the header counts
    int peer;          // index of the peer
    State state = State::pending;
    bool is_sent = false;    // else it is received
    void *request = nullptr; // of UCX, while it moves the message
};

constexpr uint64_t FAREWELL = ~uint64_t{0}; // the tag by which a rank says that it leaves
constexpr const char *TOO_LARGE = "a message is larger than this rank expects";

class Connections {
  public:
    // Use connected sockets, which this object closes: `ranks` and `sockets` of the peers. A host that answers nothing
    // for `silent_ns` is lost.
    Connections(std::vector<int> ranks, std::vector<int> sockets, int64_t silent_ns);
    virtual ~Connections();
    Connections(const Connections &) = delete;
    Connections &operator=(const Connections &) = delete;

    int index_of(int rank) const; // of a peer; -1: this rank is not connected to it
    int rank_of(int peer) const { return peers[static_cast<size_t>(peer)].rank; }
    // Begin to send, or expect, a message. Its memory must stay valid until it is no longer pending.
    std::shared_ptr<Message> send(int peer, uint64_t tag, char *data, int64_t nbytes);
    std::shared_ptr<Message> receive(int peer, uint64_t tag, char *data, int64_t nbytes);
    // Move messages until one is no longer pending, until a time of the monotonic clock, or until a signal comes.
    Message::State wait(Message &message, int64_t until_ns);
    // Move what can be moved at once. Return whether messages are pending.
    bool progress();
    // Close the connections to silent hosts. A wait calls this after `silent_ns`.
    void drop_silent();
    // Close the connection to a peer, since a message was not completed.
    void disconnect(int peer, const std::string &why);
    // Make all messages fail, and the peers' messages to this rank. Any thread may call it.
    void abort();
    // Tell the peers that this rank leaves, abort, and close the sockets if no thread waits.
    virtual void close();
    // In a forked process: close the sockets, which stay open in the parent.
    void close_after_fork();
    std::string why(int peer); // why the connection to a peer is closed
    const int64_t silent_ns;

  protected:
    struct Incoming {       // the message that is being read
        bool active = false;
        bool blocked = false; // it is large and not expected yet, so it stays in the socket
        MessageHeader header{};
        uint64_t moved = 0;
        std::shared_ptr<Message> into; // null: `early`
        std::vector<char> early;
    };
    struct Peer {
        int rank, socket;
        Message::State state = Message::State::done; // done: connected; else why not
        std::string why;
        bool said_farewell = false;
        std::deque<std::shared_ptr<Message>> out;
        std::map<uint64_t, std::deque<std::shared_ptr<Message>>> expected; // by tag
        std::map<uint64_t, std::deque<std::vector<char>>> early;           // complete messages, not expected yet
        size_t expectations = 0;
        Incoming incoming;
        std::vector<char> staged; // bytes that were read and belong to no message yet: from `staged_begin` on
        size_t staged_begin = 0, staged_end = 0;
    };

    // What `UcxConnections` does in another way, with the lock held
    virtual void begin_send(Peer &peer, const std::shared_ptr<Message> &message);
    virtual void begin_receive(Peer &peer, const std::shared_ptr<Message> &message);
    virtual void move();                           // what can be moved at once
    virtual short events(const Peer &peer) const;  // of the socket, for which a wait must end
    virtual int descriptor() const { return -1; }  // another one at which a wait ends
    virtual bool may_sleep() { return true; }      // false: something has arrived meanwhile
    virtual int64_t longest_sleep() const { return INT64_MAX; } // in ns
    virtual int64_t yield_ns(bool by_maker) const; // how long a wait yields before it sleeps; by the thread that made this
    virtual bool has_work(const Peer &peer) const;
    virtual void lose(Peer &peer, Message::State state, const std::string &why);
    bool has_waiters() const { return waiters > 0; }

    std::mutex lock;
    std::vector<Peer> peers;

  private:
    void write_to(Peer &peer);
    void read_from(Peer &peer);
    bool begin_incoming(Peer &peer);
    void finish_incoming(Peer &peer);

    int waiters = 0;
    const std::thread::id maker = std::this_thread::get_id();
};
