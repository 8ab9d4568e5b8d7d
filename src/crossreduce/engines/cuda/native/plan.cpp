#include "plan.hpp"

#include <algorithm>
#include <cstring>

#include "reduce.cuh"

namespace {

using cuda_reduce::LargeLaunch;
using cuda_reduce::Order;
using cuda_reduce::Part;
using cuda_reduce::SmallLaunch;
using cuda_reduce::THREADS;
using cuda_reduce::VECTOR_NBYTES;
using cuda_reduce::streams_of;

constexpr uint32_t BLOCKS_PER_MULTIPROCESSOR = 4; // so many are resident: see __launch_bounds__ in reduce.cu

struct Start { // see Part in reduce.cuh
    int head;
    bool is_aligned;
};

// Return where the vectors of a part begin: where those of the first result are aligned. If not all others are aligned
// there, the words around the first vector of each source must be within the source.
Start start_of(const uint64_t *addresses, const uint8_t *nbytes, const Launching &launch) {
    const auto sources = static_cast<size_t>(launch.sources), count = sources + static_cast<size_t>(launch.results);
    const auto past_vector = [&](size_t k, int head) { // the bytes between the beginning of a vector and unit `head`
        const uint64_t vector = std::min<uint64_t>(VECTOR_NBYTES, static_cast<uint64_t>(launch.values) * nbytes[k]);
        return (addresses[k] + static_cast<uint64_t>(head) * nbytes[k]) % vector;
    };
    const uint64_t vector = std::min<uint64_t>(VECTOR_NBYTES, static_cast<uint64_t>(launch.values) * nbytes[sources]);
    const uint64_t rest = (vector - past_vector(sources, 0)) % vector;
    int head = rest % nbytes[sources] == 0 ? static_cast<int>(rest / nbytes[sources]) : 0;
    if (head % launch.units != 0) head = 0;
    uint64_t differing = rest % nbytes[sources]; // bits of the addresses, and of the sizes
    for (size_t k = 1; k < count; k++)
        differing |= ((addresses[k] ^ addresses[0]) & (VECTOR_NBYTES - 1)) | static_cast<uint64_t>(nbytes[k] ^ nbytes[0]);
    bool is_aligned = past_vector(sources, head) == 0;
    if (differing) // not the usual case, without a division for each address
        for (size_t k = 0; k < count; k++) is_aligned = is_aligned && past_vector(k, head) == 0;
    if (is_aligned) return {head, true};
    for (size_t k = 0; k < sources; k++)
        if (past_vector(k, head) > static_cast<uint64_t>(head) * nbytes[k]) return {head + launch.values, false};
    return {head, false};
}

} // namespace

std::atomic<uint64_t> launched{0};

template <class Launch>
static void fill(Launch &launch, const Launching &from, const std::vector<uint64_t> &addresses, uint32_t devices) {
    const size_t count = static_cast<size_t>(from.sources + from.results);
    launch.divisor = from.divisor;
    launch.parts = static_cast<uint32_t>(from.parts.size());
    launch.sources = static_cast<uint16_t>(from.sources);
    launch.results = static_cast<uint16_t>(from.results);
    launch.orders = static_cast<uint16_t>(from.orders.size());
    launch.stack = static_cast<uint16_t>(from.stack);
    launch.kind = static_cast<uint16_t>(from.kind);
    static_assert(sizeof(from.orders[0]) == sizeof(Order), "the fields of an order");
    unsigned char *at = launch.table;
    std::memcpy(at, from.orders.data(), from.orders.size() * sizeof(Order));
    auto *parts = reinterpret_cast<Part *>(at + from.orders.size() * sizeof(Order));
    auto *pointers = reinterpret_cast<uint64_t *>(parts + from.parts.size());
    uint32_t tile = 0;
    const int64_t units_of_tile = static_cast<int64_t>(from.values) * THREADS;
    for (const PartOfLaunch &one : from.parts) {
        for (size_t k = 0; k < count; k++) {
            const Place &place = from.places[one.first_place + k];
            pointers[k] = addresses[place.row] + static_cast<uint64_t>(place.offset);
        }
        const auto [head, is_aligned] = start_of(pointers, &from.unit_nbytes[one.order * count], from);
        *parts++ = {one.size, tile, one.order, static_cast<uint8_t>(head), is_aligned};
        tile += static_cast<uint32_t>(std::max<int64_t>(1, (one.size - head + units_of_tile - 1) / units_of_tile));
        pointers += count;
    }
    launch.tiles = tile;
    launch.streams = streams_of(devices, launch.parts);
    launch.length = (tile + 2u * launch.streams - 1) / (2u * launch.streams) * 2;
}

void Plan::fill_parameters(const std::vector<uint64_t> &addresses) {
    if (addresses == filled_for_) return;
    filled_for_.clear();
    const auto count = static_cast<uint32_t>(devices.size());
    for (size_t k = 0; k < launches.size(); k++) {
        if (filled_.size() == k) filled_.emplace_back(new unsigned char[launches[k].large ? sizeof(LargeLaunch) : sizeof(SmallLaunch)]);
        if (launches[k].large) fill(*reinterpret_cast<LargeLaunch *>(filled_[k].get()), launches[k], addresses, count);
        else fill(*reinterpret_cast<SmallLaunch *>(filled_[k].get()), launches[k], addresses, count);
    }
    filled_for_ = addresses;
}

void Plan::launch(ContextGuard &context, size_t number, CUstream stream, const Device &device) {
    const uint32_t most = static_cast<uint32_t>(device.multiprocessors) * BLOCKS_PER_MULTIPROCESSOR;
    void *arguments[] = {filled_[number].get()}; // the driver copies them
    context.use(device);
    const uint32_t tiles = reinterpret_cast<const SmallLaunch *>(filled_[number].get())->tiles; // where that of large ones is
    require(opened().launch_kernel(launches[number].function, std::min(tiles, most), 1, 1, THREADS, 1, 1, 0, stream,
                                           arguments, nullptr),
            "cuLaunchKernel", device.number);
    launched.fetch_add(1, std::memory_order_relaxed);
}

// Events of operations are of the devices of their streams; then each device has one, and the first one another.
const Device &Plan::owner_of_event(size_t event) const {
    const auto of_operations = static_cast<size_t>(events);
    if (event < of_operations) return *devices[static_cast<size_t>(event_devices_[event])];
    return *devices[event - of_operations < devices.size() ? event - of_operations : 0];
}

void Plan::make_events(ContextGuard &context) {
    const Driver &call = opened();
    if (event_devices_.empty())
        for (const Operating &one : operations) // in the order of their numbers
            if (one.event >= 0) event_devices_.push_back(streams[static_cast<size_t>(one.stream)].device);
    while (events_.size() <= end_event()) {
        const Device &owner = owner_of_event(events_.size());
        CUevent made;
        context.use(owner);
        require(call.event_create(&made, DISABLE_TIMING), "cuEventCreate", owner.number);
        events_.push_back(made);
    }
}

std::vector<CUstream> Plan::streams_of_run(ContextGuard &context, const std::vector<CUstream> &current, bool is_captured) {
    const Driver &call = opened();
    std::vector<CUstream> found(current);
    for (size_t k = current.size(); k < streams.size(); k++) {
        Device &owner = *devices[static_cast<size_t>(streams[k].device)];
        if (!is_captured) {
            found.push_back(copy_stream(owner, devices[static_cast<size_t>(streams[k].to)]->number));
            continue;
        }
        // A stream that takes part in a capture can do nothing else until that capture ends.
        context.use(owner);
        const auto usable = [&](const Captured &one) {
            if (one.device != streams[k].device || std::count(found.begin(), found.end(), one.stream)) return false;
            return one.origin == current[0] || !capturing(owner, one.stream).is;
        };
        auto one = std::find_if(captured_.begin(), captured_.end(), usable);
        if (one == captured_.end()) {
            CUstream made;
            const RelaxedCapture relaxed;
            require(call.stream_create(&made, NON_BLOCKING), "cuStreamCreate", owner.number);
            one = captured_.insert(one, {streams[k].device, made, nullptr});
        }
        one->origin = current[0];
        found.push_back(one->stream);
    }
    return found;
}

void Plan::record(ContextGuard &context, const std::vector<CUstream> &queues, size_t stream, size_t event) {
    const Device &owner = *devices[static_cast<size_t>(streams[stream].device)];
    context.use(owner);
    require(opened().event_record(events_[event], queues[stream]), "cuEventRecord", owner.number);
}

void Plan::wait(ContextGuard &context, const std::vector<CUstream> &queues, size_t stream, size_t event) {
    const Device &owner = *devices[static_cast<size_t>(streams[stream].device)];
    context.use(owner);
    require(opened().stream_wait_event(queues[stream], events_[event], 0), "cuStreamWaitEvent", owner.number);
}

CUgraph Plan::run(const std::vector<uint64_t> &addresses, const std::vector<CUstream> &current, bool is_kept) {
    const Driver &call = opened();
    std::lock_guard<std::mutex> locked(lock_);
    ContextGuard context;
    const Capturing captured = devices.size() > 1 || is_kept ? capturing(*devices[0], current[0]) : Capturing{};
    const std::vector<CUstream> queues = streams_of_run(context, current, captured.is);
    const bool alone = queues.size() == 1;
    if (!alone) make_events(context);
    fill_parameters(addresses);
    try {
        for (const int stream : begins) {
            record(context, queues, static_cast<size_t>(stream), begin_event(static_cast<size_t>(stream)));
            wait(context, queues, 0, begin_event(static_cast<size_t>(stream)));
        }
        if (!alone && !captured.is && capturing(*devices[0], current[0]).is) // it joined the capture of another stream
            throw DriverFault{"cuStreamWaitEvent", devices[0]->number, CUDA_ERROR_STREAM_CAPTURE_ISOLATION};
        if (!alone) record(context, queues, 0, begin_event(0));
        for (const Operating &one : operations) {
            const auto stream = static_cast<size_t>(one.stream);
            const Device &owner = *devices[static_cast<size_t>(streams[stream].device)];
            for (const int event : one.waits)
                wait(context, queues, stream, event == BEGIN ? begin_event(0) : static_cast<size_t>(event));
            if (one.is_copy) {
                const Copying &copy = copies[one.number];
                const auto at = [&](const Place &place) { return addresses[place.row] + static_cast<uint64_t>(place.offset); };
                context.use(owner);
                require(call.memcpy_peer_async(at(copy.target), devices[static_cast<size_t>(copy.to)]->context,
                                               at(copy.source), devices[static_cast<size_t>(copy.from)]->context,
                                               copy.nbytes, queues[stream]),
                        "cuMemcpyPeerAsync", owner.number);
            } else {
                launch(context, one.number, queues[stream], owner);
            }
            if (one.event >= 0) record(context, queues, stream, static_cast<size_t>(one.event));
        }
        for (const int event : ends) wait(context, queues, 0, static_cast<size_t>(event));
        if (!resumes.empty()) record(context, queues, 0, end_event());
        for (const int stream : resumes) wait(context, queues, static_cast<size_t>(stream), end_event());
        return captured.graph;
    } catch (const DriverFault &) {
        // The caller will free memory that operations in other streams than its own may still use.
        const RelaxedCapture relaxed;
        for (size_t k = 0; k < queues.size() && !alone; k++) {
            context.set(*devices[static_cast<size_t>(streams[k].device)]);
            call.stream_synchronize(queues[k]);
        }
        throw;
    }
}

Plan::~Plan() {
    if (events_.empty() && captured_.empty()) return;
    const Driver &call = opened();
    try {
        const RelaxedCapture relaxed;
        ContextGuard context;
        for (size_t k = 0; k < events_.size(); k++) {
            context.use(owner_of_event(k));
            call.event_destroy(events_[k]);
        }
        for (const Captured &one : captured_) {
            context.use(*devices[static_cast<size_t>(one.device)]);
            call.stream_destroy(one.stream);
        }
    } catch (const DriverFault &) { // at the end of the process, when the driver is already gone
    }
}

bool reads_peer_rightly(Plan &copy, Device &reader, Device &owner, size_t nbytes) {
    const Driver &call = opened();
    const RelaxedCapture relaxed;
    ContextGuard context;
    struct Memory { // of a device, and a stream for it
        const Driver &call;
        ContextGuard &context;
        const Device &device;
        CUdeviceptr address = 0;
        CUstream stream = nullptr;

        void allocate(size_t size) {
            context.use(device);
            require(call.mem_alloc(&address, size), "cuMemAlloc", device.number);
            require(call.stream_create(&stream, NON_BLOCKING), "cuStreamCreate", device.number);
        }
        void copy(uint64_t to, uint64_t from, size_t size) {
            context.use(device);
            require(call.memcpy_async(to, from, size, stream), "cuMemcpyAsync", device.number);
            require(call.stream_synchronize(stream), "cuStreamSynchronize", device.number);
        }
        ~Memory() {
            context.set(device);
            if (stream != nullptr) call.stream_destroy(stream);
            if (address != 0) call.mem_free(address);
        }
    };
    Memory source{call, context, owner}, target{call, context, reader};
    source.allocate(nbytes), target.allocate(nbytes);
    std::vector<uint32_t> pattern(nbytes / sizeof(uint32_t)), found(pattern.size());
    const auto host = [](std::vector<uint32_t> &each) { return reinterpret_cast<uint64_t>(each.data()); };
    uint32_t word = 1;
    for (uint32_t &each : pattern) each = word = word * 1664525 + 1013904223; // of Knuth's and Lewis's generator
    target.copy(target.address, host(found), nbytes); // zeros
    source.copy(source.address, host(pattern), nbytes);
    copy.run({source.address, target.address}, {target.stream});
    target.copy(host(found), target.address, nbytes);
    return found == pattern;
}
