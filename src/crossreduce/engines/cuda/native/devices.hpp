// The CUDA devices of this process: their primary contexts, which all frameworks use, kernels and streams.
//
// Call none of these functions with the interpreter's lock, except `function` and `device` of a device that exists: the
// driver, or another thread that holds a lock here, may wait for work on a GPU that needs Python to go on.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.hpp"

struct Device {
    int number;
    CUdevice handle;
    CUcontext context = nullptr;
    int multiprocessors, capability; // 90: 9.0
    std::atomic<bool> is_loaded{false};
    std::map<std::string, CUfunction> functions; // all kernels; constant once `is_loaded`
    std::map<int, CUstream> copy_streams;        // for each device to which they copy
    std::vector<int> peers;                      // whose memory kernels here can read
    std::mutex lock;                             // of all that follows `is_loaded`
};

// Return what the driver says about a device, without a context, which takes hundreds of megabytes of its memory. Throws
// DriverFault.
std::unique_ptr<Device> described(int number);

// Return a device; its first use retains its primary context, for the life of the process. Throws DriverFault.
Device &device(int number);

// Load all kernels of a device, unless they are loaded already. None is loaded later: that could wait for the device.
void load_kernels(Device &device, const char *code);

// Return a kernel of a device.
CUfunction function(const Device &device, const std::string &name);

// Return the stream for copies to another device.
CUstream copy_stream(Device &device, int to);

struct Capturing {
    bool is = false;         // whether work in a stream becomes a part of a graph
    CUgraph graph = nullptr; // null if the capture is invalid
};
Capturing capturing(const Device &device, CUstream stream);

// Let a graph own an object. When the graph and all that were instantiated from it are destroyed, a thread of the driver
// calls `release`, which must call neither the driver nor Python. If this throws, `release` has been called, too.
void keep_in_graph(CUgraph graph, void *owned, void (*release)(void *));

// Let kernels on `device` read and write the memory of `other`. Returns whether the devices can do that.
bool enable_peer(Device &device, Device &other);

// Return whether kernels of all devices with peer access may read the memory at these addresses (0: none): whether it is
// memory of cuMemAlloc in the primary contexts. Other memory (pools, mapped segments, that of other contexts or processes)
// is mapped for each device by its owner, and a kernel that reads it elsewhere ends the process's context.
bool are_peer_readable(const std::vector<uint64_t> &addresses, const std::vector<Device *> &devices);

// Make work queued later in `stream` wait for the work in `after`. Throws DriverFault; then nothing in `after` is
// still running.
void follow(Device &device, CUstream stream, CUstream after);

// While it exists, the thread's current context may be changed; then the thread has its own one again.
class ContextGuard {
  public:
    ContextGuard();
    ~ContextGuard();
    ContextGuard(const ContextGuard &) = delete;
    ContextGuard &operator=(const ContextGuard &) = delete;
    void use(const Device &device) {
        if (current_ == device.context) return;
        require(driver_->context_set_current(device.context), "cuCtxSetCurrent", device.number);
        current_ = device.context;
    }

    // Make a context current, whatever is. Does not throw.
    void set(const Device &device) {
        if (driver_->context_set_current(device.context) == CUDA_SUCCESS) current_ = device.context;
    }

  private:
    const Driver *driver_;
    CUcontext before_ = nullptr, current_ = nullptr;
};

// While it exists, calls of this thread that a global capture forbids do not fail and do not invalidate a capture.
class RelaxedCapture {
  public:
    RelaxedCapture();
    ~RelaxedCapture();
    RelaxedCapture(const RelaxedCapture &) = delete;
    RelaxedCapture &operator=(const RelaxedCapture &) = delete;

  private:
    const Driver *driver_;
    int mode_ = CAPTURE_MODE_RELAXED; // then the mode before
    bool is_set_;
};
