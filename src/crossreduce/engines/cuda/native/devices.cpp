#include "devices.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace {

std::mutex lock;
// Never destroyed: the driver may already be gone when the process exits.
std::map<int, std::unique_ptr<Device>> &devices = *new std::map<int, std::unique_ptr<Device>>;
constexpr int MAX_KNOWN = 64;
std::atomic<Device *> known[MAX_KNOWN]; // some of `devices`, without a lock

const char *const KERNELS[] = {
#define ENTRY(name, ...) #name,
#define KERNEL(name, source, result, op, step, kinds) kinds(name, step, source, result, op)
#include "kernels.inc"
};

} // namespace

ContextGuard::ContextGuard() : driver_(&opened()) {
    require(driver_->context_get_current(&before_), "cuCtxGetCurrent", -1);
    current_ = before_;
}

ContextGuard::~ContextGuard() {
    if (current_ != before_) driver_->context_set_current(before_);
}

RelaxedCapture::RelaxedCapture()
    : driver_(&opened()), is_set_(driver_->thread_exchange_capture_mode(&mode_) == CUDA_SUCCESS) {}

RelaxedCapture::~RelaxedCapture() {
    if (is_set_) driver_->thread_exchange_capture_mode(&mode_);
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
    const bool is_small = number >= 0 && number < MAX_KNOWN;
    if (Device *found = is_small ? known[number].load(std::memory_order_acquire) : nullptr) return *found;
    std::lock_guard<std::mutex> locked(lock);
    if (const auto found = devices.find(number); found != devices.end()) return *found->second;
    auto made = described(number);
    const RelaxedCapture relaxed;
    require(opened().primary_context_retain(&made->context, made->handle), "cuDevicePrimaryCtxRetain", number);
    Device &found = *(devices[number] = std::move(made));
    if (is_small) known[number].store(&found, std::memory_order_release);
    return found;
}

void load_kernels(Device &device, const char *code) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    if (device.is_loaded) return;
    const RelaxedCapture relaxed;
    ContextGuard context;
    context.use(device);
    CUmodule module = nullptr;
    require(call.module_load_data(&module, code), "cuModuleLoadData", device.number);
    try {
        for (const char *name : KERNELS)
            require(call.module_get_function(&device.functions[name], module, name), "cuModuleGetFunction", device.number);
    } catch (const DriverFault &) {
        call.module_unload(module);
        throw;
    }
    device.is_loaded = true;
}

CUfunction function(const Device &device, const std::string &name) {
    const auto found = device.is_loaded ? device.functions.find(name) : device.functions.end();
    if (found == device.functions.end()) throw DriverFault{"cuModuleGetFunction", device.number, 500}; // NOT_FOUND
    return found->second;
}

CUstream copy_stream(Device &device, int to) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    CUstream &found = device.copy_streams[to];
    if (found == nullptr) {
        const RelaxedCapture relaxed;
        ContextGuard context;
        context.use(device);
        require(call.stream_create(&found, NON_BLOCKING), "cuStreamCreate", device.number);
    }
    return found;
}

Capturing capturing(const Device &device, CUstream stream) {
    ContextGuard context;
    context.use(device);
    int status = 0;
    CUgraph graph = nullptr;
    require(opened().stream_get_capture_info(stream, &status, nullptr, &graph, nullptr, nullptr),
            "cuStreamGetCaptureInfo_v2", device.number);
    return {status != 0, status == CAPTURE_STATUS_ACTIVE ? graph : nullptr};
}

void keep_in_graph(CUgraph graph, void *owned, void (*release)(void *)) {
    const Driver &call = opened();
    CUuserObject object = nullptr;
    if (const CUresult code = call.user_object_create(&object, owned, release, 1, NO_DESTRUCTOR_SYNC)) {
        release(owned);
        throw DriverFault{"cuUserObjectCreate", -1, code};
    }
    if (const CUresult code = call.graph_retain_user_object(graph, object, 1, GRAPH_MOVE)) {
        call.user_object_release(object, 1);
        throw DriverFault{"cuGraphRetainUserObject", -1, code};
    }
}

bool enable_peer(Device &device, Device &other) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(device.lock);
    if (&device == &other || std::count(device.peers.begin(), device.peers.end(), other.number)) return true;
    int can = 0;
    require(call.device_can_access_peer(&can, device.handle, other.handle), "cuDeviceCanAccessPeer", device.number);
    if (!can) return false;
    const RelaxedCapture relaxed;
    ContextGuard context;
    context.use(device);
    const CUresult code = call.context_enable_peer_access(other.context, 0);
    if (code == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED || code == CUDA_ERROR_TOO_MANY_PEERS) return false;
    if (code != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) require(code, "cuCtxEnablePeerAccess", device.number);
    device.peers.push_back(other.number);
    return true;
}

bool are_peer_readable(const std::vector<uint64_t> &addresses, const std::vector<Device *> &owners) {
    const Driver &call = opened();
    const RelaxedCapture relaxed; // CUDA does not document whether a capture permits the query
    ContextGuard context;
    context.use(*owners[0]);
    // Starts and sizes of allocations of this call, by an address in units of 2 MiB, and of the last ones, which others in
    // large allocations are in. Nothing is kept for later calls: an address may then be of other memory.
    std::array<std::pair<uint64_t, uint64_t>, 1024> readable{};
    std::array<std::pair<uint64_t, uint64_t>, 16> last{};
    size_t found = 0;
    for (const uint64_t address : addresses) {
        auto &[start, nbytes] = readable[(address >> 21) % readable.size()];
        if (address == 0 || address - start < nbytes) continue;
        const auto holds = [&](const auto &one) { return address - one.first < one.second; };
        if (const auto one = std::find_if(last.begin(), last.end(), holds); one != last.end()) {
            std::tie(start, nbytes) = *one;
            continue;
        }
        CUcontext owner = nullptr;
        void *pool = nullptr;
        unsigned type = 0, is_managed = 0, is_legacy = 0; // the driver writes an int or a bool, of which these are larger
        int attributes[] = {POINTER_CONTEXT,     POINTER_MEMORY_TYPE, POINTER_IS_MANAGED, POINTER_IS_LEGACY_IPC_CAPABLE,
                            POINTER_RANGE_START, POINTER_RANGE_SIZE,  POINTER_MEMPOOL};
        void *values[] = {&owner, &type, &is_managed, &is_legacy, &start, &nbytes, &pool};
        require(call.pointer_get_attributes(7, attributes, values, address), "cuPointerGetAttributes", owners[0]->number);
        const auto owns = [&](const Device *one) { return one->context == owner; };
        if (type != MEMORY_TYPE_DEVICE || is_managed || !is_legacy || pool != nullptr ||
            std::none_of(owners.begin(), owners.end(), owns))
            return false;
        last[found++ % last.size()] = {start, nbytes};
    }
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
        const RelaxedCapture relaxed;
        CUcontext before = nullptr;
        call.context_get_current(&before);
        call.context_set_current(device.context);
        call.stream_synchronize(after);
        call.context_set_current(before);
        throw;
    }
}
