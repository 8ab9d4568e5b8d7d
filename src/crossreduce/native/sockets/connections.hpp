// Messages between ranks of different hosts, over sockets that are connected already.
//
// No thread belongs to them: messages move while a rank waits for one of them, or at a barrier (`progress`). In the
// meantime the buffers of the system contain what a rank has sent. A rank reads from a peer only while it expects a message from it.
//
// There may be several connections (lanes) to a peer. Small messages use the first one. A large message may be cut into parts,
// of which each lane sends the next one as soon as it can; the first part is always sent over the first lane. Each part is
// preceded by a header, with the number of the message among those of its tag, so that the order of parts does not matter: the
// k-th message with a tag is received by the k-th `receive` of that tag. The sender alone decides how many lanes it uses.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct MessageHeader {
    uint64_t tag, nbytes; // of the whole message
    uint64_t offset = 0;  // of the part that follows
    uint32_t number = 0;  // of the message, among those of its tag
    uint32_t part = 0;    // bytes that follow; 0: all
    uint64_t follows() const { return part != 0 ? part : nbytes; }
};

struct Message {
    enum class State { pending, done, lost, left, aborted };
    MessageHeader header;
    char *data;
    const char *head = nullptr; // what is sent before the data
    uint64_t head_nbytes = 0;
    std::vector<char> joined; // both, if they must be in one place
    uint64_t moved = 0;       // bytes that are sent
    int peer;           // index of the peer
    std::atomic<State> state{State::pending};
    bool is_sent = false;    // else it is received
    void *request = nullptr; // of UCX, while it moves the message
};

constexpr uint64_t LARGE_NBYTES = 1 << 18; // a message with so many bytes, that is, four parts, may use several lanes
constexpr uint64_t FAREWELL = ~uint64_t{0}; // the tag by which a rank says that it leaves
constexpr const char *TOO_LARGE = "a message is larger than this rank expects";

constexpr const char *CLOSED_CONNECTION = "it has closed the connection";

class Connections {
  public:
    // Use connected sockets, which this object closes: `ranks` of the peers, and `sockets`, equally many for each of them, in
    // the same order. A host that answers nothing for `silent_ns` is lost. `measures`: whether large messages use several
    // sockets only if this is found to be faster, and otherwise the first one.
    Connections(std::vector<int> ranks, std::vector<int> sockets, int64_t silent_ns, bool measures = false);
    virtual ~Connections();
    Connections(const Connections &) = delete;
    Connections &operator=(const Connections &) = delete;

    int index_of(int rank) const; // of a peer; -1: this rank is not connected to it
    int rank_of(int peer) const { return peers[static_cast<size_t>(peer)].rank; }
    // Begin to send, or expect, a message. Its memory must stay valid until it is no longer pending. `head`, also memory
    // that must stay valid, is sent before the data, in the same message.
    std::shared_ptr<Message> send(int peer, uint64_t tag, char *data, int64_t nbytes, const std::string &head = {});
    std::shared_ptr<Message> receive(int peer, uint64_t tag, char *data, int64_t nbytes);
    // Move messages until one is no longer pending, until a time of the monotonic clock, or until a signal comes.
    Message::State wait(Message &message, int64_t until_ns);
    // Sleep until something can be moved, until `bell` is readable, a time, or a signal, then move it. False: a signal came.
    bool pause(int64_t until_ns, int bell);
    // Wait until the hosts of the peers have received all that was written, or until a time.
    void flush(int64_t until_ns);
    Message::State state_of(int peer); // done: it is connected; else why not
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
    std::string why(int peer);  // why the connection to a peer is closed
    size_t lanes_of(int peer); // how many sockets large messages to a peer use now
    // How many bytes were sent to, or received from, the peer of a message. UCX does not show this: 0.
    uint64_t moved_with(const Message &message);
    const int64_t silent_ns;

  protected:
    struct Arrival { // a message that is expected, or arrives
        std::shared_ptr<Message> wanted; // null: it is not expected yet
        std::vector<char> early;         // its bytes, if it began to arrive before it was expected
        uint64_t nbytes = 0, arrived = 0;
        bool begun = false, complete = false;
    };
    struct Inbox { // the messages with one tag
        std::deque<Arrival> arrivals;
        uint32_t first = 0, expected = 0; // numbers: of the first arrival, and of the next message that will be expected
    };
    struct Part { // that is being sent
        std::shared_ptr<Message> message;
        MessageHeader header;
        uint64_t moved; // bytes, the header included
    };
    struct Progress { // of a socket, as the system counts it
        int64_t acknowledged = 0, busy_us = 0, held_us = 0; // held: since the other end does not read
    };
    struct Lane { // a socket
        int socket;
        std::deque<Part> out;
        MessageHeader header{}; // of the part that is being read
        bool active = false;    // there is such a part
        bool blocked = false;   // it is large and not expected yet, so it stays in the socket
        bool closing = false;   // the other end sends nothing more, which was noticed while this was blocked
        bool ended = false;     // nothing more can be read
        Arrival *into = nullptr;
        uint64_t moved = 0;       // bytes of the part
        std::vector<char> staged; // bytes that were read and belong to no message yet: from `staged_begin` on
        size_t staged_begin = 0, staged_end = 0;
        int least = 1; // bytes of which the system reports that they can be read
        Progress progress;
    };
    struct Peer {
        int rank;
        std::vector<Lane> lanes;
        Message::State state = Message::State::done; // done: connected; else why not
        std::string why;
        bool said_farewell = false;
        std::map<uint64_t, Inbox> inboxes;    // by tag
        std::map<uint64_t, uint32_t> numbers; // of the next message to send, by tag
        size_t sending = 0, expectations = 0; // messages
        uint64_t sent_nbytes = 0, received_nbytes = 0;
        size_t divided = 0;                   // messages of which a part has arrived, but not all
        std::deque<Part> rest;                // what no lane has begun to send of large messages
        // How many lanes large messages use, and how this is found out (see `choose_lanes`)
        size_t used = 1, chosen = 1; // now, and outside of trials
        bool on_trial = true, in_turn = false;
        unsigned turns = 0;
        int64_t until_trial = 0, pause = int64_t{1} << 30; // bytes to the next trial, and from it to another one
        struct Tried {
            int64_t moved = 0, waited_us = 0;
            int turns = 0;
            double fastest = 0; // bytes per us
            double speed() const { return static_cast<double>(moved) / static_cast<double>(waited_us); }
        } tried[2]; // with one lane, and with all
    };

    // What `UcxConnections` does in another way, with the lock held
    virtual void begin_send(Peer &peer, const std::shared_ptr<Message> &message);
    virtual void begin_receive(Peer &peer, const std::shared_ptr<Message> &message);
    virtual bool joins() const { return false; }   // whether a message must be in one place
    virtual void move();                           // what can be moved at once
    virtual short events(const Peer &peer, const Lane &lane) const; // of the socket, for which a wait must end
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
    bool sleep(std::unique_lock<std::mutex> &held, int64_t ns, int bell);
    static void want_at_once(Lane &lane);
    void write_to(Peer &peer, Lane &lane);
    void read_from(Peer &peer, Lane &lane);
    bool begin_incoming(Peer &peer, Lane &lane);
    void finish_incoming(Peer &peer, Lane &lane);
    static void deliver(Peer &peer, Inbox &inbox, Arrival &arrival);
    void hand_out(Peer &peer);
    void choose_lanes(Peer &peer, uint64_t nbytes);
    static bool end_turn(Peer &peer);
    static Progress progress_of(int socket);

    const bool measures;
    int waiters = 0;
    std::atomic<bool> shares_cpu{true}; // whether another thread ran on the processor of a waiting one when it yielded last
    const std::thread::id maker = std::this_thread::get_id();
};
