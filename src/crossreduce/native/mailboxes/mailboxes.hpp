// Messages between two ranks of a host, through memory that the ranks share.
//
// Each ordered pair of ranks has a ring of bytes, which one rank writes and the other reads. A ring contains records:
//   data   a message of few bytes, with its tag; its send is complete
//   offer  a message of more bytes: its tag, its size and its address in the sender's process
//   done   the other rank has read the message of an offer
//   pull   the other rank cannot read the sender's memory (process_vm_readv), and requests the parts of an offer
//   part   some bytes of a message that was pulled
// Messages and receives are matched by source and tag, in their orders. A message that came before its receive is kept
// in memory of the receiving process; beyond CROWDED_NBYTES a sender only makes offers.
//
// Whichever thread waits for a message does all work of its rank. If no thread waits, a rank that waits for this one
// wakes its helper, a thread that otherwise sleeps: so a receive that has begun completes a send, and a send that did
// not fit into a ring continues, also while their rank computes or is in a collective.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bells.hpp"
#include "connections.hpp"

constexpr int ANY_RANK = -1;
constexpr uint64_t REMOTE_EAGER_NBYTES = 1 << 16; // the most of a message that is sent as data to another host

enum class MessageStatus { waiting, done, mismatch, unknown, no_memory };

struct Ring { // from one rank to another
    alignas(64) std::atomic<uint64_t> head; // how many bytes were written
    std::atomic<uint32_t> wanted;           // the sender waits for room
    alignas(64) std::atomic<uint64_t> tail; // how many bytes were read
    std::atomic<uint32_t> crowded;          // the receiver keeps many messages that it has not received yet
};

enum RankMood : uint32_t { OPEN, LEFT, GAVE_UP };

struct Box { // of one rank
    alignas(64) std::atomic<uint32_t> bell; // a futex: changes when another rank has written or read something
    std::atomic<uint32_t> sleepers;         // how many threads of the rank sleep until that
    alignas(64) std::atomic<uint32_t> help; // a futex: changes when another rank waits for this one
    std::atomic<uint32_t> helpers;          // whether the helper sleeps until that
    std::atomic<uint32_t> pending;          // whether messages of this rank are not complete, or replies wait
    std::atomic<uint32_t> mood;             // a RankMood: whether its offers are valid
    std::atomic<int64_t> process, probe;    // its process, and a number that can also be read in its memory,
    std::atomic<uint64_t> address;          // at this address
};

enum Kind : uint32_t { DATA, OFFER, DONE, PULL, PART, CROWDED, ROOMY };

struct Record {
    uint32_t kind, length; // a Kind; `length` bytes follow
    int64_t tag;           // of a part: its position in the message
    uint64_t id;           // the sender's number of the message; of `done` and `pull`, the receiver's of those
};

struct MailboxMessage { // a send or receive of this rank
    uint64_t id;
    bool sends = false;
    int peer; // ANY_RANK: any
    int64_t tag;
    char *memory;
    uint64_t nbytes;
    bool forgotten = false; // no call will request its result
    std::atomic<MessageStatus> status{MessageStatus::waiting};
    // Of a receive: the matching message. Of a send, `source` is the peer.
    int source = ANY_RANK;
    uint64_t found_nbytes = 0, offer = 0, address = 0;
    uint64_t moved = 0; // bytes sent or received as parts, or that threads read or have read
    uint64_t read = 0;  // bytes that were read
    int readers = 0;    // how many threads read pieces of the sender's memory, without the lock
    bool failed = false, withdrawn = false;
};

class Mailboxes {
  public:
    // Map the memory of all ranks at an offset of a file. Returns null and sets errno if that fails. `may_read`: whether
    // to use process_vm_readv where the system allows it.
    static Mailboxes *map(int fd, int64_t offset, int rank, int ranks, int64_t spin_ns, bool may_read);
    // Use the caller's memory, which must be zero before the first rank uses it and must outlive this object.
    static Mailboxes *over(void *memory, int rank, int ranks, int64_t spin_ns, bool may_read);
    ~Mailboxes();
    static int64_t nbytes(int ranks);
    static int64_t head_nbytes(int ranks); // at the start: what must be allocated. A rank allocates the rings that it writes.

    // Also exchange messages with ranks of other hosts, whose numbers follow those of this host, in this order. `indices`:
    // of these ranks in `connections`, or -1 for a rank that cannot be reached. Call it before the first message.
    void reach(std::shared_ptr<Connections> connections, const std::vector<int> &indices);

    // Any thread may call these methods, but only while `enter` has returned true and `leave` was not called.
    bool enter(); // false: closed
    void leave() { users.fetch_sub(1); }

    // Begin to send or receive; return 0 if the message is complete, else its number. The memory must stay valid while
    // `is_pending`. If there is no memory for this, or was none earlier, they throw std::bad_alloc: after that no message
    // makes progress, since one may be lost, and all calls that wait return `no_memory`.
    uint64_t send(int dst, int64_t tag, char *memory, uint64_t nbytes);
    uint64_t receive(int src, int64_t tag, char *memory, uint64_t nbytes);
    // Make progress, and return the message's status; wait for it up to about `slice_ns`, or until a signal. For a
    // complete one, also its source and size.
    MessageStatus wait(uint64_t id, int64_t slice_ns, int &source, uint64_t &nbytes);
    int source_of(uint64_t id); // the other rank of a message; ANY_RANK: not known yet
    bool is_pending(uint64_t id);
    // Free the result of a message, as soon as it is complete; `completed` then returns its number, once.
    void forget(uint64_t id);
    std::vector<uint64_t> completed();
    // Withdraw a message that is not complete: of a receive, nothing is written any more. Return false if it is an offer
    // that the other rank knows of: its memory is still needed, and only `give_up` makes the other rank not use it.
    bool withdraw(uint64_t id);
    // From now on, others must not use this rank's offers, and this rank uses none.
    void give_up();
    std::string why(int of) const; // the connection to a rank of another host was lost, or ""
    RankMood mood(int of) const;   // of a rank of another host: GAVE_UP if the connection to it was lost

    bool close(); // wait until no thread uses this object, and end the helper; false: another thread does or has done so

    int rank, ranks; // of this host
    int everyone() const { return ranks + static_cast<int>(remotes.size()); } // the number of ranks of all hosts

  private:
    using Shared = std::shared_ptr<MailboxMessage>;
    using Lock = std::unique_lock<std::mutex>;
    struct Outgoing { // a record that waits for room in a ring
        Record record;
        std::vector<char> payload;
        Shared message; // data and offers: the send; replies: the receive that is complete when they are written, or null
        MessageStatus status = MessageStatus::done; // its status then
    };
    struct Unexpected { // a message without a receive
        uint64_t order;
        uint64_t nbytes, offer, address; // offer is 0 for a message that `payload` contains
        std::vector<char> payload;
    };

    struct SentRecord { // to a rank of another host, that is not written yet
        std::vector<char> bytes;
        std::shared_ptr<Message> moving;
        Shared message; // complete, with this status, when the record is written; or null
        MessageStatus status;
    };
    struct Moved { // the bytes of an offer that was pulled
        std::shared_ptr<Message> moving;
        Shared message;
    };
    struct Remote { // a rank of another host
        int index = -1;
        std::vector<char> room; // for the next record
        std::shared_ptr<Message> arriving;
        std::deque<SentRecord> sent;
        std::vector<Moved> moved;
        bool crowded = false, was_told = false; // whether it keeps many messages; whether this rank has told it the same
    };

    Mailboxes() = default;
    Box &own() const { return boxes[rank]; }
    Ring &ring(int src, int dst) const { return rings[src * ranks + dst]; }
    void copy_out(int src, uint64_t position, void *to, uint64_t count) const;
    void notify(int of) const;
    bool put(int dst, const Record &record, const char *payload);
    void flush(int dst);
    void reply(int dst, uint32_t kind, uint64_t id, const Shared &message = nullptr,
               MessageStatus status = MessageStatus::done);
    template <class Run> auto or_no_memory(Run &&run);
    bool advance(int64_t until_ns);
    bool progress(int64_t until_ns);
    uint64_t begin_send(int dst, int64_t tag, char *memory, uint64_t nbytes);
    uint64_t begin_receive(int src, int64_t tag, char *memory, uint64_t nbytes);
    bool end(uint64_t id);
    void drain(int src);
    void arrived(int src, const Record &record, uint64_t position);
    void take(int src, uint64_t position, void *to, uint64_t count) const;
    void set_crowded(int src, bool crowded);
    Shared matching(int src, int64_t tag);
    void deliver(const Shared &message, int src, uint64_t nbytes, uint64_t offer, uint64_t address);
    void complete(const Shared &message, MessageStatus status);
    bool read_some(Lock &lock);
    void end_reading(const Shared &message);
    bool can_read(int src);
    bool read_peer(int of, uint64_t from, char *to, uint64_t count) const;
    void update_pending();
    void call_for_help(int of) const;
    void wake_helper(int of) const;
    static bool has_memory();
    void allocate_rings();
    void start_helper();
    void help();
    std::thread *start_thread(void (Mailboxes::*run)());
    bool is_remote(int of) const { return of >= ranks; }
    Remote &remote(int of) { return remotes[static_cast<size_t>(of - ranks)]; }
    const Remote &remote(int of) const { return remotes[static_cast<size_t>(of - ranks)]; }
    void open_remotes();
    void expect_record(Remote &from);
    void move_bytes(const Shared &message, int other);
    bool put_remote(int dst, const Record &record, const char *payload);
    bool completes_later(int dst, const Shared &message, MessageStatus status);
    bool progress_remotes();
    bool pause(int64_t until_ns, const Bells::Bell &bell);
    void wake_remote_helper();
    void help_remotes();
    bool end_remote(const Shared &message);

    Box *boxes = nullptr;
    Ring *rings = nullptr;
    char *bytes = nullptr;
    uint64_t capacity = 0, eager = 0, remote_eager = 0; // of a ring; of a message that is sent as data, on this host or not
    int64_t spin_ns = 0, probe = 0;
    bool may_read = true;
    void *mapped = nullptr;
    size_t mapped_nbytes = 0; // 0: the memory is the caller's
    int file = -1;            // if the rings that this rank writes are not allocated yet: the memory's descriptor
    int64_t rings_offset = 0; // and where they are there
    int process = 0;

    std::atomic<bool> closed{false}, out_of_memory{false};
    std::atomic<bool> shares_cpu{false}; // whether another thread ran when a thread that waits yielded last, see SWITCH_NS
    std::atomic<int> users{0}, waiters{0};
    std::atomic<uint32_t> scanned{0}; // the bell's value when the rings were last read
    std::atomic<int> unread{0};       // the size of `reads`
    std::atomic<bool> has_ended{false}; // whether `ended` contains any
    std::shared_ptr<Connections> connections; // to the ranks of other hosts, or null
    Bells bells;                              // of the threads that sleep at the connections
    std::atomic<bool> are_remotes_open{false};
    std::atomic<int> sleepers_at_sockets{0}, mixed_waiters{0}; // threads that wait for a message
    std::atomic<bool> helper_sleeps_at_sockets{false}, helper_waits_long{false};
    std::atomic<uint32_t> remote_help{0};     // a futex of the remote helper
    std::atomic<int64_t> last_slept_at_sockets{0};
    const char *remote_payload = nullptr;     // of the record that has arrived
    std::mutex mutex;                 // of all that follows
    uint64_t last_id = 0, last_order = 0;
    uint64_t unfinished = 0;                                                    // how many messages are not complete
    uint64_t replies = 0;                                                       // and replies wait that complete none
    std::unordered_map<uint64_t, Shared> messages;                              // all but complete ones that were forgotten
    std::map<std::pair<int, int64_t>, std::deque<Shared>> posted;               // receives, by source and tag
    std::map<std::pair<int, int64_t>, std::list<Unexpected>> unexpected;        // by source and tag
    std::map<std::pair<int, uint64_t>, Shared> pulled;                          // receives, by source and offer
    std::deque<Shared> reads;                                                   // receives that read offers
    std::vector<std::deque<Outgoing>> outgoing;                                 // by rank
    std::vector<std::deque<Shared>> streams;                                    // sends that were pulled, by rank
    std::vector<uint64_t> tails, kept;                                          // of the rings to other ranks; bytes
    std::vector<signed char> readable;                                          // by rank; -1: not known
    std::vector<uint64_t> ended;                                                // for `completed`
    std::vector<Remote> remotes;
    std::thread *helper = nullptr, *remote_helper = nullptr;
    bool helper_failed = false;
};

// Return the result of `run`. If it throws, since there is no memory, the messages cannot go on.
template <class Run> auto Mailboxes::or_no_memory(Run &&run) {
    try {
        if (!out_of_memory.load()) return run();
    } catch (const std::bad_alloc &) {
        out_of_memory.store(true);
        notify(rank); // other threads that wait
    }
    throw std::bad_alloc();
}
