#include "devices.hpp"

#include <algorithm>

namespace {

std::mutex lock;
// Never destroyed: the driver may already be gone when the process exits.
std::map<int, std::unique_ptr<Device>> &devices = *new std::map<int, std::unique_ptr<Device>>;

const Driver &opened() {
    std::string why;
    const Driver *found = driver(why);
    if (found == nullptr) throw DriverFault{"cuInit", -1, 3}; // CUDA_ERROR_NOT_INITIALIZED
    return *found;
}

} // namespace

ContextGuard::ContextGuard() : driver_(&opened()) {
    require(driver_->context_get_current(&before_), "cuCtxGetCurrent", -1);
    current_ = before_;
}

ContextGuard::~ContextGuard() {
    if (current_ != before_) driver_->context_set_current(before_);
}

std::unique_ptr<Device> described(int number) {
    const Driver &call = opened();
    auto made = std::make_unique<Device>();
    made->number = number;
    int major = 0, minor = 0;
    require(call.device_get(&made->handle, number), "cuDeviceGet", number);
    require(call.device_get_attribute(&made->multiprocessors, MULTIPROCESSOR_COUNT, made->handle),
            "cuDeviceGetAttribute", number);
    require(call.device_get_attribute(&major, COMPUTE_CAPABILITY_MAJOR, made->handle), "cuDeviceGetAttribute", number);
    require(call.device_get_attribute(&minor, COMPUTE_CAPABILITY_MINOR, made->handle), "cuDeviceGetAttribute", number);
    made->capability = 10 * major + minor;
    return made;
}

Device &device(int number) {
    std::lock_guard<std::mutex> locked(lock);
    if (const auto found = devices.find(number); found != devices.end()) return *found->second;
    auto made = described(number);
    require(opened().primary_context_retain(&made->context, made->handle), "cuDevicePrimaryCtxRetain", number);
    return *(devices[number] = std::move(made));
}

void load_kernels(Device &device, const char *code) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    if (device.module != nullptr) return;
    ContextGuard context;
    context.use(device);
    require(call.module_load_data(&device.module, code), "cuModuleLoadData", device.number);
}

bool has_kernels(Device &device) {
    std::lock_guard<std::mutex> locked(device.lock);
    return device.module != nullptr;
}

CUfunction function(Device &device, const std::string &name) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    CUfunction &found = device.functions[name];
    if (found == nullptr) {
        ContextGuard context;
        context.use(device);
        require(call.module_get_function(&found, device.module, name.c_str()), "cuModuleGetFunction", device.number);
    }
    return found;
}

CUstream copy_stream(Device &device, int to) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    CUstream &found = device.copy_streams[to];
    if (found == nullptr) {
        ContextGuard context;
        context.use(device);
        require(call.stream_create(&found, NON_BLOCKING), "cuStreamCreate", device.number);
    }
    return found;
}

bool is_capturing(Device &device, CUstream stream) {
    ContextGuard context;
    context.use(device);
    int found = 0;
    require(opened().stream_is_capturing(stream, &found), "cuStreamIsCapturing", device.number);
    return found != 0;
}

bool enable_peer(Device &device, Device &other) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    if (&device == &other || std::count(device.peers.begin(), device.peers.end(), other.number)) return true;
    int can = 0;
    require(call.device_can_access_peer(&can, device.handle, other.handle), "cuDeviceCanAccessPeer", device.number);
    if (!can) return false;
    ContextGuard context;
    context.use(device);
    const CUresult code = call.context_enable_peer_access(other.context, 0);
    if (code == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED || code == CUDA_ERROR_TOO_MANY_PEERS) return false;
    if (code != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) require(code, "cuCtxEnablePeerAccess", device.number);
    device.peers.push_back(other.number);
    return true;
}

void follow(Device &device, CUstream stream, CUstream after) {
    const Driver &call = opened();
    struct Event {
        const Driver &call;
        CUevent made = nullptr;
        ~Event() {
            if (made != nullptr) call.event_destroy(made); // the driver keeps what a stream waits for
        }
    };
    try {
        ContextGuard context;
        context.use(device);
        Event event{call};
        require(call.event_create(&event.made, DISABLE_TIMING), "cuEventCreate", device.number);
        require(call.event_record(event.made, after), "cuEventRecord", device.number);
        require(call.stream_wait_event(stream, event.made, 0), "cuStreamWaitEvent", device.number);
    } catch (const DriverFault &) {
        CUcontext before = nullptr;
        call.context_get_current(&before);
        call.context_set_current(device.context);
        call.stream_synchronize(after);
        call.context_set_current(before);
        throw;
    }
}
