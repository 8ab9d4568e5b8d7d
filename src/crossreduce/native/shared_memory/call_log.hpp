// The one place in which a rank records its calls. The log has three readers: the flight recorder reads the facts
// of the last calls, the counters are sums over the calls of a kind, and a trace has each call with its phases.
//
// The records and the counters are in memory that the ranks share. Only the rank itself writes them; other ranks, and
// programs that only watch (observer.cpp), read them at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "trace_file.hpp"

constexpr int RECORDED_CALLS = 32;  // the number of calls of each rank that the flight recorder stores
constexpr int SIGNATURE_WORDS = 29; // words of 8 bytes
constexpr int SIGNATURE_NBYTES = 8 * SIGNATURE_WORDS;
constexpr int CALL_KINDS = 10; // the collectives, one of which is "other"; crossreduce.observe.counters has their names

struct CallRecord { // the facts of one call
    std::atomic<uint64_t> number;              // the call's number, from 1; 0: the record is empty or being written
    std::atomic<int64_t> started_ns, ended_ns; // by the monotonic clock; ended_ns is 0 until the call ends
    std::atomic<uint32_t> length;
    // Another rank may read the signature while its rank writes it; `read` then returns false.
    std::atomic<uint64_t> signature[SIGNATURE_WORDS];

    void write(uint64_t number, const std::string &signature, int64_t started_ns);
    // Read the record if it is the call of this number; else return false.
    bool read(uint64_t number, std::string &signature, int64_t &started_ns, int64_t &ended_ns) const;
};

struct CallCounts { // sums over a rank's completed calls of one kind; waits are counted while they last
    std::atomic<uint64_t> calls, nbytes, ns, waited_ns, between_hosts_ns;
};

struct WaitCounts { // the waits of one rank for another: at how many barriers it was the last one, and how long
    std::atomic<uint64_t> barriers, ns;
};

struct RankCalls {
    CallCounts counts[CALL_KINDS];
    CallRecord records[RECORDED_CALLS];
};

class CallLog {
  public:
    // Record into the memory of this rank; `by_rank` has its waits for each rank of the host.
    void attach(RankCalls &own, WaitCounts *by_rank) { calls = &own, waits = by_rank; }

    // Begin a call. `kind`: below CALL_KINDS; `nbytes`: what the counters add when it is completed.
    void begin(uint64_t number, const std::string &signature, int kind, int64_t nbytes);
    // A wait for a rank took this long, and has ended or not: the rank was the last one at the barrier.
    void add_wait(int other, int64_t ns) {
        add(waits[other].ns, static_cast<uint64_t>(ns));
        add(counts->waited_ns, static_cast<uint64_t>(ns));
    }
    void add_barrier(int other) { add(waits[other].barriers, 1); }
    void add_between_hosts(uint64_t ns) {
        if (current != nullptr) add(counts->between_hosts_ns, ns);
    }
    // End the current call, if there is one. `completed`: it is counted.
    void end(int outcome, bool completed);

    // Trace the calls that begin from now on in a file; null: in none. Another thread may be in a call,
    // which stays in its file, but must not begin one: the caller has the lock of the Python object for both.
    void trace_to(std::shared_ptr<TraceFile> file) {
        next_trace = std::move(file);
        if (current == nullptr) traced = next_trace;
    }
    bool is_traced() const { return traced != nullptr; }
    int trace_problem() const { return next_trace ? next_trace->problem() : 0; }
    // Trace what this rank has done since the last record of the current call. `other`: for a wait, the last rank.
    void trace(Phase phase, size_t stage, int other = 0);
    void trace_open_wait(int other, size_t stage);
    // End the trace of the current call, which was aborted; its record and counters do not change.
    void abort_trace(int outcome);

    int64_t queued_ns = 0; // since when the next call has waited in a queue, for a trace; 0: it did not

  private:
    // Add to a counter that only this thread writes: cheaper than an atomic addition.
    static void add(std::atomic<uint64_t> &counter, uint64_t more) {
        counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    }

    RankCalls *calls = nullptr;
    WaitCounts *waits = nullptr;
    CallRecord *current = nullptr; // null: between two calls
    CallCounts *counts = nullptr;  // those of the current call's kind
    int64_t nbytes = 0;
    std::shared_ptr<TraceFile> traced, next_trace; // of the current call; of the next one
};
