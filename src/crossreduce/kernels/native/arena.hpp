// Memory that the ranks of one host share: slots for data, ticks at which all have met, and what each was doing.
//
// An op is a course: ticks of jobs, and between two ticks everybody waits for everybody. All ranks run courses of the
// same number of ticks; what differs are the jobs. Half of each slot serves the ops of even number, half the odd ones:
// whoever begins an op knows that all have left the one before the last, so nothing that is still read is overwritten.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine.hpp"

struct Spot { // where an operand of a job lies
    int region;     // a rank: in its slot; ~k: in the caller's k-th buffer
    int64_t offset; // bytes
};

struct Work { // a run of a plan
    const Plan *plan;
    std::vector<Spot> sources, results;
    bool streaming;
};

struct Course {
    std::vector<std::vector<Work>> ticks;
    int regions;  // how many slots its spots are in, from the first
    int buffers;  // of the caller
    int64_t half; // bytes of a slot that its spots reach
};

constexpr int KEPT_OPS = 32;    // ops of each rank that are remembered
constexpr int TEXT_WORDS = 29; // of eight bytes, of what an op is described by
constexpr int TEXT_BYTES = 8 * TEXT_WORDS;
constexpr int CAUSE_BYTES = 2040;

struct Entry { // an op of a rank
    std::atomic<uint64_t> number;            // from 1; 0: none yet, or being written
    std::atomic<int64_t> started_ns, ended_ns; // of the monotonic clock; ended 0: not yet
    std::atomic<uint32_t> length;
    std::atomic<uint64_t> text[TEXT_WORDS]; // others may read it while it is written anew, and find out afterwards

    void write(uint64_t number, const std::string &text, int64_t started_ns);
    // What is written, if it is the op of this number.
    bool read(uint64_t number, std::string &text, int64_t &started_ns, int64_t &ended_ns) const;
};

struct alignas(64) Seat { // a rank
    std::atomic<uint64_t> arrivals; // at how many ticks
    std::atomic<uint64_t> number;   // of its latest op
    Entry entries[KEPT_OPS];
};

struct Control { // where the memory begins; seats and slots follow
    alignas(64) std::atomic<uint64_t> arrivals; // of all ranks at all ticks
    alignas(64) std::atomic<uint32_t> met;      // ticks at which all have met; a futex
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> broken; // 0; 1: the cause is being written; 2: it is there
    uint32_t cause_length;
    char cause[CAUSE_BYTES];
};

enum class Outcome { done, waiting, mismatch, broken, memory };

class SharedMemory {
  public:
    // Maps `slot` bytes a rank, and what goes before. Null where it cannot; errno says why.
    static SharedMemory *map(int fd, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads);
    // The same over memory that is there already, zeroed in the beginning, and stays the caller's.
    static SharedMemory *over(void *memory, int rank, int ranks, int64_t slot, int64_t spin_ns, int threads);
    ~SharedMemory();
    static int64_t bytes(int ranks, int64_t slot);

    // Begin the next op. The course and the memory it names must stay until it is over.
    void begin(const Course &course, std::vector<char *> buffers, const std::string &text);
    // Do the jobs of all ticks before `until`. After about `slice_ns` it returns `waiting`, to be called again.
    Outcome advance(size_t until, int64_t slice_ns);
    // End the op under way here: on all ranks, in the same tick.
    void abandon();
    // Put up why nothing goes on; the first cause stands. Wakes everybody.
    void give_up(const std::string &cause);
    std::string cause() const; // empty: none

    int rank, ranks;
    int64_t slot;
    uint64_t number = 0; // of the latest op
    int64_t spin_ns = 0; // so long a wait stays awake
    Seat &seat(int of) const { return seats[of]; }
    char *memory(int of) const { return slots + of * slot; }
    const Course *current() const { return course; }

  private:
    SharedMemory() = default;
    bool wait(int64_t until_ns);
    void arrive();
    bool work(const std::vector<Work> &works);
    bool alike() const;

    Control *control = nullptr;
    Seat *seats = nullptr;
    char *slots = nullptr;
    size_t mapped = 0; // 0: the memory is the caller's
    int owner = 0; // the process
    int threads = 1;
    uint64_t ticks = 0; // at which this rank has arrived
    const Course *course = nullptr;
    std::vector<char *> buffers;
    size_t next = 0;       // tick of the course
    bool waiting = false;  // for the others to arrive where this rank has
    Entry *entry = nullptr;
};
