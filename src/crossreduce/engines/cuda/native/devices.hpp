// The CUDA devices of this process: their primary contexts, which all frameworks use, kernels and streams.
#pragma once

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
    CUmodule module = nullptr;       // null: the kernels are not loaded yet
    std::map<std::string, CUfunction> functions;
    std::map<int, CUstream> copy_streams; // for each device to which they copy
    std::vector<int> peers;               // whose memory kernels here can read
    std::mutex lock;                      // of all that follows `capability`
};

// Return what the driver says about a device, without a context, which takes hundreds of megabytes of its memory. Throws
// DriverFault.
std::unique_ptr<Device> described(int number);

// Return a device; its first use retains its primary context, for the life of the process. Throws DriverFault.
Device &device(int number);

// Load the kernels of a device, unless they are loaded already.
void load_kernels(Device &device, const char *code);
bool has_kernels(Device &device);

CUfunction function(Device &device, const std::string &name);

// Return the stream for copies to another device.
CUstream copy_stream(Device &device, int to);

// Return whether work in a stream of a device becomes a part of a graph.
bool is_capturing(Device &device, CUstream stream);

// Let kernels on `device` read and write the memory of `other`. Returns whether the devices can do that.
bool enable_peer(Device &device, Device &other);

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
