// A file with the calls of one rank: records of fixed size, in memory that is mapped from the file. So they survive a
// process that is killed. When the file has reached its limit, or the disk is full, new records replace the oldest.
//
// One thread at a time writes: the one that runs the rank's op. `crossreduce.observe.traces` may read it at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

enum class Phase : uint8_t { none, call, queue, wait, copy_in, reduce, copy_out, between_hosts, agree, inner };

struct TraceRecord {
    Phase phase;
    uint8_t outcome;   // of a call: 255: it has not ended; else an `Outcome`
    uint16_t rank;     // of a wait: the rank of this host that arrived last
    uint32_t detail;   // of a call: the number of its text; of others: the stage
    int64_t begin_ns, end_ns; // by the monotonic clock
    uint64_t number;   // of the op
};

struct TraceHeader { // at the start of the file; a JSON text follows, then the texts of calls, then the records
    std::atomic<uint64_t> magic;
    uint64_t json_nbytes, texts_at, records_at;
    std::atomic<uint64_t> texts_nbytes; // the used part
    std::atomic<uint64_t> capacity;     // the number of records for which the file has room
    std::atomic<uint64_t> count;        // the number of records ever written; number k is at place k % capacity
    std::atomic<int64_t> problem;       // why the file could not grow (errno); 0: it could, or has reached its limit
    int64_t clocks[2][3];               // the monotonic and the calendar clock, and the error: at the start, and later
};
static_assert(sizeof(TraceRecord) == 32 && sizeof(TraceHeader) == 112, "crossreduce/observe/traces/format.py has these sizes");

class TraceFile {
  public:
    // Write to an empty file of at most `limit` bytes (more if its start needs more); `fd` is duplicated. Return null
    // and set errno if that fails.
    static std::shared_ptr<TraceFile> open(int fd, const std::string &json, int64_t limit);
    ~TraceFile();
    TraceFile(const TraceFile &) = delete;
    TraceFile &operator=(const TraceFile &) = delete;

    // Begin a call. `queued_ns`: since when it has waited in a queue; 0: it did not.
    void begin(uint64_t number, const std::string &text, int64_t now_ns, int64_t queued_ns);
    // Record what the call did from the end of its last record until now.
    void record(Phase phase, int64_t now_ns, int rank, size_t stage) {
        add({phase, 0, static_cast<uint16_t>(rank), static_cast<uint32_t>(stage), mark, now_ns, number});
        mark = now_ns;
        open_wait = false;
    }
    // Record a wait that has not ended. The next record of the call replaces it, since it begins at the same time.
    void record_open_wait(int64_t now_ns, int rank, size_t stage) {
        add({Phase::wait, 0, static_cast<uint16_t>(rank), static_cast<uint32_t>(stage), mark, now_ns, number});
        open_wait = running;
    }
    void end(int64_t now_ns, int outcome);
    int problem() const { return static_cast<int>(header->problem.load(std::memory_order_relaxed)); }

  private:
    TraceFile() = default;
    void add(const TraceRecord &record) {
        if (!running) return; // the call was aborted
        if (open_wait) records[place - 1] = record;
        else write(record);
    }
    void write(const TraceRecord &record) {
        if (place == capacity) renew();
        records[place++] = record;
        header->count.store(++count, std::memory_order_release);
    }
    void renew(); // grow the file, or begin to replace the oldest records
    bool reserve(int64_t from, int64_t until);
    uint32_t text_number(const std::string &text);

    int fd = -1, process = 0;
    char *memory = nullptr;
    int64_t nbytes = 0, limit = 0; // of the file now, and at most
    uint64_t texts_room = 0, texts_reserved = 0; // for texts, at most and now
    TraceHeader *header = nullptr;
    TraceRecord *records = nullptr;
    uint64_t capacity = 0, count = 0, place = 0;
    bool full = false;
    std::unordered_map<std::string, uint32_t> texts;
    uint64_t number = 0, call = 0; // of the current op, and of its record
    uint32_t text = 0;
    int64_t mark = 0, began = 0; // the end of the last record; the start of the call
    bool running = false, open_wait = false; // the last record is that of a wait that has not ended
};
