// A compiled layout: the operations that run for it, without the addresses, which each run gets.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices.hpp"

struct Place { // an address: that of a row of the table, and an offset in bytes
    uint32_t row;
    int64_t offset;
};

struct PartOfLaunch {
    int64_t size; // in units
    uint16_t order;
    size_t first_place; // of its sources and results, in Launching::places
};

struct Launching {
    CUfunction function = nullptr;
    bool large = false;
    int sources = 0, results = 0, stack = 1;
    double divisor = 1;
    uint32_t kind = 0;
    int values = 1, units = 1;       // of a thread, and of an element, in units
    std::vector<uint8_t> unit_nbytes; // of each place of a part, for each order: that of source k, ..., of result k, ...
    std::vector<std::array<uint64_t, 4>> orders; // push, fold, fold_twice, wide: see `Order` in reduce.cuh
    std::vector<PartOfLaunch> parts;
    std::vector<Place> places;
};

struct Copying {
    int from, to; // positions of devices
    Place source, target;
    size_t nbytes;
};

struct Operating {
    bool is_copy;
    size_t number;          // in `launches` or `copies`
    int stream;
    std::vector<int> waits; // for events; BEGIN: for work queued before
    int event;              // that is recorded after it; -1: none
};

struct StreamOf {
    int device;  // a position in `devices`
    int to;      // the device to which it copies; -1: the caller's current stream
};

constexpr int BEGIN = -1;

extern std::atomic<uint64_t> launched; // the kernels that this process has launched

class Plan {
  public:
    std::vector<int> numbers;      // of the devices
    std::vector<int64_t> scratch;  // bytes of temporary memory per device
    std::vector<Device *> devices;
    std::vector<StreamOf> streams; // first those of the callers, one per device
    std::vector<Launching> launches;
    std::vector<Copying> copies;
    std::vector<Operating> operations;
    int events = 0;           // how many operations record one
    bool reads_peers = false; // whether kernels read the memory of other devices
    // See `Operations` in operations.py: streams for which the first one waits; events for which it waits at the end; and
    // streams that then wait for it.
    std::vector<int> begins, ends, resumes;

    Plan() = default;
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;
    ~Plan();

    // Queue all operations. `current`: the callers' current streams, one per device. Returns the graph that captures them,
    // or null; that of a plan of one device only if `is_kept`: if a graph has to keep the memory at the addresses. Throws
    // DriverFault; then nothing that was queued is still running.
    CUgraph run(const std::vector<uint64_t> &addresses, const std::vector<CUstream> &current, bool is_kept = false);

  private:
    std::mutex lock_;                // of a run, whose events are those of the plan
    std::vector<CUevent> events_;    // of operations, of streams before they begin, and of the first one at the end
    std::vector<int> event_devices_; // of the events of operations, as positions
    struct Captured { // a stream for copies of runs that are captured in a graph
        int device; // a position in `devices`
        CUstream stream, origin; // the first caller's stream, which takes part in the same capture
    };
    std::vector<Captured> captured_;
    // Of the last run: the addresses, and the parameters of each launch, which are the same for the same addresses.
    std::vector<uint64_t> filled_for_;
    std::vector<std::unique_ptr<unsigned char[]>> filled_;

    const Device &owner_of_event(size_t event) const;
    void make_events(ContextGuard &context);
    std::vector<CUstream> streams_of_run(ContextGuard &context, const std::vector<CUstream> &current, bool is_captured);
    void record(ContextGuard &context, const std::vector<CUstream> &queues, size_t stream, size_t event);
    void wait(ContextGuard &context, const std::vector<CUstream> &queues, size_t stream, size_t event);
    size_t begin_event(size_t stream) const { return static_cast<size_t>(events) + stream; }
    size_t end_event() const { return static_cast<size_t>(events) + devices.size(); }
    void fill_parameters(const std::vector<uint64_t> &addresses);
    void launch(ContextGuard &context, size_t number, CUstream stream, const Device &device);
};

// Let kernels of `reader` read a pattern in the memory of `owner`; return whether they read it right. `copy`: a plan of the
// reader that copies `nbytes` bytes from row 0 to row 1. Throws DriverFault.
bool reads_peer_rightly(Plan &copy, Device &reader, Device &owner, size_t nbytes);
