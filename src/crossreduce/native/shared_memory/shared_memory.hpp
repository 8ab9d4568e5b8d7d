// Memory that the ranks of one host share: slots for data, barriers, a flight recorder, and the cause of an abort.
//
// An op runs a rank program: stages of instructions, with a barrier of all ranks between two stages. The programs of
// all ranks have the same number of stages, at least two; their instructions differ. Half of each slot serves the ops
// of even number, the other half those of odd number. A rank that begins op n has passed a barrier of op n - 1, and all
// ranks reach that barrier after they complete op n - 2. So no rank overwrites data that another rank still reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernel.hpp"
#include "call_log.hpp"

constexpr int PEER_BUFFER = 1 << 20;
constexpr int READABLE_BUFFERS = 64; // how many of the first buffers of a caller other ranks may read
constexpr int64_t TURN_NBYTES = 1 << 15; // the distance between the places at which ops begin

struct BufferRef { // the location of an operand
    // A rank: that rank's slot; ~k: the caller's buffer k; PEER_BUFFER + READABLE_BUFFERS r + k: buffer k of rank r's.
    int region;
    int64_t offset; // bytes
};

struct Instruction { // runs a kernel
    const Kernel *kernel; // null: exchanges messages or parts, or checks that all hosts make the same call
    std::vector<BufferRef> sources, results;
    bool streaming;
    Phase phase = Phase::none; // what a trace calls it; see `phase_of`
    int messages = -1;         // without a kernel: which of the program's `messages`; -1: checks; or one of these:
};
constexpr int PUT_PARTS = -2, TAKE_PARTS = -3;

// What a rank exchanges with ranks of other hosts.
struct HostMessages {
    struct Part {
        int rank;
        BufferRef at;
        int64_t nbytes;
    };
    std::vector<Part> sends, receives;
    // If not empty, the call is compared with that of these ranks: each message begins with its digest. The parts that
    // are for, or from, one rank follow in the same message, with at most `room` bytes.
    std::vector<int> compared;
    std::string digest; // DIGEST_NBYTES
    int64_t room = 0;
    // It is complete when so many messages are that the op has begun so far, from the first; -1: all.
    long long sent = -1, received = -1;
};
constexpr size_t DIGEST_NBYTES = 16;

// What an instruction does: it copies the caller's data into a slot, combines operands, or copies a result out.
inline Phase phase_of(const Instruction &one) {
    if (one.sources.size() > 1) return Phase::reduce;
    const bool to_slot = one.results[0].region >= 0, from_caller = one.sources[0].region < 0;
    return to_slot && from_caller ? Phase::copy_in : Phase::copy_out;
}

struct RankProgram {
    std::vector<std::vector<Instruction>> stages;
    int slots;           // how many slots the instructions use, from the first
    int peers;           // of how many ranks, from the first, they may read the callers' buffers
    int buffers;         // how many of the caller's buffers they use
    int64_t slot_nbytes; // the bytes of each slot that they use, in one half
    int kind;            // of the collective, below CALL_KINDS; and its bytes, for the counters
    int64_t nbytes;
    std::vector<HostMessages> messages; // to which instructions refer
    // An all-to-all of parts of any sizes (parts.cpp). The caller's buffers are a table of numbers, the data to send, one part
    // after the other, and memory for what is received. A row of the table has the size of a unit in bytes, the units to send
    // to each rank, and those to receive from each; before the rows is the result of the call: NOT_MOVED or MOVED.
    bool has_parts = false;
    int64_t most_part = 0;    // the data of a rank is in its slot if none of its parts has more bytes; otherwise others
    bool reads_parts = false; // read its memory, if this is true
};
constexpr int64_t NOT_MOVED = 0, MOVED = 1;

constexpr int CAUSE_NBYTES = 2040;
constexpr int ABOUT_NBYTES = 1000;
// Identifies the memory of a group; the last digits are the version of its layout. Change it with the structures below.
constexpr uint64_t LAYOUT = 0x6372726564'000001;

struct alignas(64) RankState {
    // What other ranks read at every barrier is in one cache line.
    std::atomic<uint64_t> arrivals;   // the number of barriers that the rank has reached
    std::atomic<uint64_t> digests[2]; // of the signatures of its last two ops, by the parity of their numbers
    std::atomic<uint32_t> bell;       // a futex: the lower half of `arrivals`
    std::atomic<uint32_t> sleepers;   // the number of ranks that wait on it
    // The addresses of buffers 0 and 1 of the callers of its last two ops; at first the address of `probe`.
    std::atomic<uint64_t> first_buffers[2][2];
    alignas(64) std::atomic<uint64_t> number; // the number of the rank's latest op
    std::atomic<int64_t> process, probe;      // the rank's process; a number that can also be read in its memory
    std::atomic<int64_t> global_rank;         // its number in messages
    RankCalls calls;
    std::atomic<uint64_t> more_buffers[2][READABLE_BUFFERS - 2];

    // The address of a buffer of the caller of an op.
    std::atomic<uint64_t> &buffer(uint64_t op, size_t k) {
        return k < 2 ? first_buffers[op % 2][k] : more_buffers[op % 2][k - 2];
    }
};

struct GroupState { // at the start of the memory; the states of the ranks, their waits and the slots follow
    alignas(64) std::atomic<uint32_t> aborted; // 0: no; 1: yes; 2 + rank: this rank is writing the cause
    uint32_t cause_length;
    char cause[CAUSE_NBYTES];
    // What a program that is not a rank needs to read the memory. It stays at this place in all layouts.
    std::atomic<uint64_t> layout; // LAYOUT when the rest is written
    uint32_t ranks, about_length;
    char about[ABOUT_NBYTES];
};

// `elsewhere`: the rank waits for a message of another host. `differs`: the call of another host differs.
enum class Outcome { done, waiting, mismatch, aborted, out_of_memory, unreadable, elsewhere, differs };
constexpr int32_t SAME = 1, DIFFERENT = 2; // the first word of a rank's slot, if its program compares hosts

class SharedMemory {
  public:
    // Map the memory of all ranks, with slots of `slot` bytes. Returns null and sets errno if that fails. `ready`: how many
    // bytes at the start of each half of a slot the system has allocated; for an op that needs more, its rank allocates them
    // in its own slot. The descriptor must stay open.
    static SharedMemory *map(int fd, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads, int64_t ready);
    // Use the caller's memory, which must be zero before the first rank uses it and must outlive this object.
    static SharedMemory *over(void *memory, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads);
    // Map what precedes the slots, to be read only (observer.cpp). Returns null and sets errno if that fails: EINVAL if
    // the memory is not that of a group, EPROTO if it has another layout, EAGAIN if its ranks have not described it.
    static SharedMemory *observe(int fd);
    ~SharedMemory();
    static int64_t nbytes(int ranks, int64_t slot);
    // Describe the group, for observers, with the numbers of the ranks of this host. Only the first rank does something,
    // so that an observer sees either all of it or nothing.
    void describe(const std::vector<int64_t> &global_ranks, const std::string &about);

    // Begin the next op. The program, the buffers and their memory must stay valid until the op ends.
    void begin(const RankProgram &program, std::vector<char *> buffers, const std::string &signature);
    // Run the stages before `until`. Returns `waiting` after about `slice_ns`; the caller then calls it again.
    Outcome advance(size_t until, int64_t slice_ns);
    // End the current op early. All ranks must do so in the same stage.
    void end_op(Outcome outcome = Outcome::done);
    // End the trace of the current op, which was aborted. No other thread may run stages.
    void abort_trace();
    // Abort the group and wake all ranks. Later causes are ignored.
    void abort(const std::string &cause);
    // Whether this rank can read the memory of another rank's process. Asked before the first op.
    bool can_read(int of) const;
    std::string cause() const; // empty: not aborted, or the cause is incomplete
    bool is_aborted() const { return group->aborted.load(std::memory_order_acquire) != 0; }
    int aborting_rank() const; // the rank that is writing the cause; -1: none

    int rank, ranks;
    int64_t slot;
    uint64_t number = 0; // the number of this rank's latest op
    int64_t spin_ns = 0; // how long a rank spins before it yields its CPU, and then sleeps
    // At how many places in their half of each slot the ops begin, in turn; the same on all ranks.
    int turns = 1;
    // Called while a rank waits: moves messages to and from other hosts, and returns whether some are pending.
    std::function<bool()> progress;
    // Continues an exchange of op `number` until a time: `done`, `elsewhere`, `differs`, or `out_of_memory`.
    using Address = std::function<char *(const BufferRef &)>;
    std::function<Outcome(const HostMessages &, const Address &, uint64_t number, int64_t until_ns)> exchange;
    CallLog calls; // of this rank
    RankState &state(int of) const { return states[of]; }
    // The waits of one rank for another.
    WaitCounts &waits(int by, int of) const { return wait_counts[static_cast<size_t>(by) * row_of_waits(ranks) + of]; }
    const GroupState &about_group() const { return *group; }
    // The memory of a rank's slot for the current op, and how many bytes an op may use there.
    char *memory(int of) const { return slots + of * slot + start; }
    int64_t room() const { return slot / 2 - (turns - 1) * TURN_NBYTES; }
    const RankProgram *current() const { return program; }

  private:
    SharedMemory() = default;
    static int64_t slots_offset(int ranks);
    static size_t row_of_waits(int ranks) { return (static_cast<size_t>(ranks) + 3) / 4 * 4; } // whole cache lines
    bool allocate(int64_t nbytes);
    void arrive();
    bool all_reached();
    bool wait(int64_t until_ns);
    bool wait_from(int64_t now, int64_t until_ns);
    Outcome run(const std::vector<Instruction> &instructions, int64_t until_ns);
    Outcome run_messages(const Instruction &one, const Address &address, int64_t until_ns);
    int64_t *row_of_parts(int of) const { return reinterpret_cast<int64_t *>(buffers[0]) + 1 + of * (1 + 2 * int64_t{ranks}); }
    int64_t sent_nbytes() const;
    int64_t slot_nbytes_of_parts() const; // of this rank
    void put_parts();
    Outcome take_parts();
    bool read_peer(int of, int buffer, int64_t offset, char *to, int64_t nbytes) const;
    bool signatures_match() const;

    GroupState *group = nullptr;
    RankState *states = nullptr;
    WaitCounts *wait_counts = nullptr;
    char *slots = nullptr;
    size_t mapped_nbytes = 0; // 0: the memory is the caller's
    int fd = -1;
    int64_t ready = INT64_MAX; // how many bytes of each half of its slot this rank may use
    bool lacks_memory = false; // the current op needs more, and the system has not enough
    std::thread::id maker = std::this_thread::get_id();
    bool shares_cpu = false; // whether another thread ran on this processor when this rank yielded last
    int process = 0;          // the process that mapped the memory
    int threads = 1;
    int64_t probe = 0;
    uint64_t arrivals = 0; // the number of barriers that this rank has reached
    int met = 0;           // how many other ranks, from the next one on, are known to have reached the last of them
    const RankProgram *program = nullptr;
    std::vector<char *> buffers;
    std::vector<Source> sources; // of an instruction, and the memory of its results
    std::vector<char *> results;
    int64_t start = 0;    // where the current op's memory begins in each slot
    size_t next = 0;      // the next stage
    bool begun = false;   // this rank has passed the barrier before it
    size_t executed = 0;  // how many of its instructions were executed
    bool differs = false; // this rank has found that the call of another host differs
    bool waiting = false; // this rank has reached a barrier that others have not
    int latest = -1; // the rank for which this one has last waited at its barrier; -1: it has not waited
};
