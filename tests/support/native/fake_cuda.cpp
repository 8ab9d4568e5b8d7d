// A fake CUDA driver, libcuda.so.1, for tests of the CUDA engine without a GPU.
//
// It has the functions of the driver that the engine and the tests call, with the signatures and result codes of cuda.h
// (CUDA 12.9). Each call checks what the real driver checks, and queues work instead of doing it (fake_queues.hpp).
// What fails because the caller made a mistake is reported as well. fake_control.hpp has the functions for tests, and
// cuda_host.cpp, which is linked to it, the bodies of the kernels.
#include <dlfcn.h>

#include <atomic>
#include <chrono>

#include "fake_launches.hpp"

namespace fake {

// ---- calls

struct Faults {                      // of one function
    uint64_t calls = 0, counted = 0; // all; since the last fail or drop was set
    std::map<uint64_t, int> fails;   // by the number of the call
    std::set<uint64_t> drops;        // calls that do nothing and succeed
};

inline std::recursive_mutex mutex;
inline std::unique_ptr<State> state;
inline bool is_initialised = false;
inline std::map<std::string, Faults> faults;
inline uint64_t next_handle = 0x1000; // handles are not used twice, not even after a reset
inline thread_local uint64_t current_handle = 0;

// A call that stands for one that waits for the device, which waits for the test: see fake_hold.
inline std::atomic<int> held{0}; // 1: the next such call waits; 2: one does
inline void wait_until_continued() {
    int next = 1;
    if (!held.compare_exchange_strong(next, 2)) return;
    for (int k = 0; k < 500 && held == 2; k++) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (held.exchange(0) == 2) state->report("a call waited for the device in vain");
}

inline uint64_t new_handle() { return next_handle += 16; }

// Run the body of a driver's function: count the call, fail or drop it on a test's request, and report its mistakes.
template <class Body> int call(const char *name, Body body, bool needs_init = true) {
    if (UserObject::is_releasing) std::abort(); // it must not call the driver
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    Faults &of = faults[name];
    of.calls++;
    const uint64_t number = ++of.counted;
    if (const auto found = of.fails.find(number); found != of.fails.end()) return found->second;
    if (of.drops.count(number)) return SUCCESS;
    if (!state || (needs_init && !is_initialised)) {
        if (state) state->report(std::string(name) + ": cuInit was not called (3)");
        return NOT_INITIALIZED;
    }
    int code = SUCCESS;
    try {
        if constexpr (std::is_void_v<decltype(body())>) body();
        else code = body();
    } catch (const Refused &refused) {
        code = refused.code;
        if (!refused.why.empty())
            state->report(std::string(name) + ": " + refused.why + " (" + std::to_string(code) + ")");
    }
    state->execute_some();
    return code;
}

template <class T> T &of_handle(Table<T> &table, const void *handle, const char *what) {
    const auto found = table.find(reinterpret_cast<uint64_t>(handle));
    if (found == table.end()) refuse(INVALID_HANDLE, std::string("the ") + what + " does not exist or was destroyed");
    return *found->second;
}
inline void *pointer(uint64_t handle) { return reinterpret_cast<void *>(handle); }
inline void check_given(bool is_given) {
    if (!is_given) refuse(INVALID_VALUE, "an argument is invalid");
}

inline Context &context_of(int device) {
    if (device < 0 || device >= state->devices) refuse(INVALID_DEVICE, "device " + std::to_string(device) + " does not exist");
    for (auto &[handle, each] : state->contexts)
        if (each->device == device) return *each;
    auto made = std::make_shared<Context>();
    made->handle = new_handle();
    made->device = device;
    state->contexts[made->handle] = made;
    return *made;
}
inline Context &context_at(uint64_t handle, const char *what) {
    const auto found = state->contexts.find(handle);
    if (found == state->contexts.end()) refuse(INVALID_CONTEXT, std::string(what) + " does not exist");
    if (!found->second->is_active()) refuse(CONTEXT_IS_DESTROYED, std::string(what) + " was released");
    if (found->second->failed) refuse(found->second->failed, "");
    return *found->second;
}
inline Context &current() {
    if (!state->contexts.count(current_handle)) refuse(INVALID_CONTEXT, "no context is current");
    return context_at(current_handle, "the current context");
}

inline uint64_t add_stream(Context &context, bool is_blocking, bool is_foreign, bool is_legacy) {
    auto made = std::make_shared<Stream>();
    made->handle = new_handle();
    made->context = context.handle;
    made->device = context.device;
    made->number = is_legacy ? 0 : ++state->numbers[context.device];
    made->is_blocking = is_blocking;
    made->is_foreign = is_foreign;
    made->is_legacy = is_legacy;
    made->chain = state->chains++;
    state->streams[made->handle] = made;
    return made->handle;
}
// Return the stream of a handle, which may be one of the default streams of the current context.
inline Stream &stream_of(const void *handle, bool invalidates = true) {
    Context &context = current();
    const uint64_t number = reinterpret_cast<uint64_t>(handle);
    if (number == 2) {
        uint64_t &own = context.per_thread[std::this_thread::get_id()];
        if (!own) own = add_stream(context, true, true, false);
        return *state->streams.at(own);
    }
    if (number > 2) {
        Stream &stream = of_handle(state->streams, handle, "stream");
        context_at(stream.context, "the stream's context");
        return stream;
    }
    if (!context.legacy) context.legacy = add_stream(context, true, true, true);
    auto implied = [&](const Capture &each) { // a capturing stream would have to wait for the default one
        const auto origin = state->streams.find(each.origin);
        return origin != state->streams.end() && origin->second->is_blocking &&
               origin->second->context == context.handle;
    };
    for (auto &each : state->captures)
        if (implied(*each))
            state->invalidate(CAPTURE_IMPLICIT, "the default stream is used while a blocking stream captures",
                              [&](const Capture &other) { return invalidates && implied(other); });
    return *state->streams.at(context.legacy);
}

inline void log(const std::string &what, const Stream &stream, const std::string &rest) {
    state->log.push_back(what + " device=" + std::to_string(stream.device) +
                         " stream=" + std::to_string(stream.number) + rest + (stream.capture ? " captured" : ""));
}

inline std::string owner_text(uint64_t address) {
    const Allocation *found = state->memory.find(address);
    return !found ? "pageable" : found->device == HOST ? "pinned" : std::to_string(found->device);
}
inline int copy(uint64_t to, uint64_t from, size_t nbytes, const char *name, Stream &stream) {
    if (nbytes == 0) return SUCCESS;
    if (to < from + nbytes && from < to + nbytes) refuse(INVALID_VALUE, "source and destination overlap");
    if (stream.capture && (owner_text(to) == "pageable" || owner_text(from) == "pageable"))
        state->invalidate(CAPTURE_UNSUPPORTED, "a copy of pageable memory cannot be captured", stream.capture);
    log(name, stream, " from=" + owner_text(from) + " to=" + owner_text(to) + " bytes=" + std::to_string(nbytes));
    Work work{};
    work.name = name;
    work.context = stream.context;
    work.device = stream.device;
    work.accesses = {{from, nbytes, false}, {to, nbytes, true}};
    work.body = [to, from, nbytes] { std::memcpy(pointer(to), pointer(from), nbytes); };
    state->queue_work(stream, std::move(work));
    return SUCCESS;
}

// Forget all that lives in a context.
inline void reset_context(Context &context) {
    for (auto &[handle, stream] : state->streams)
        if (stream->context == context.handle) state->execute(stream->frontier);
    auto drop = [&](auto &table) {
        for (auto it = table.begin(); it != table.end();)
            it = it->second->context == context.handle ? table.erase(it) : std::next(it);
    };
    drop(state->streams), drop(state->events), drop(state->functions), drop(state->modules);
    for (auto &[begin, each] : state->memory.all())
        if (each.context == context.handle && !each.is_foreign) each.is_live = false;
    for (auto &[handle, other] : state->contexts) other->peers.erase(context.device);
    context.peers.clear();
    context.per_thread.clear();
    context.legacy = 0;
    context.failed = 0;
}

inline int free_memory(uint64_t begin, bool is_pinned, const char *name) {
    if (!begin) return SUCCESS;
    state->check_unsafe();
    current();
    Allocation *found = state->memory.find(begin);
    if (!found || !found->is_live || found->begin != begin || (found->device == HOST) != is_pinned)
        refuse(INVALID_VALUE, "the address is not that of an allocation");
    state->note_host({begin, found->nbytes, true}, name);
    found->is_live = false;
    return SUCCESS;
}

inline const char *const ERRORS[][2] = {
    // the codes that the fake driver returns, and common ones for injected faults
    {"0 CUDA_SUCCESS", "no error"},
    {"1 CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {"2 CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {"3 CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {"100 CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {"101 CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {"200 CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {"201 CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {"209 CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {"217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {"222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {"400 CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {"401 CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {"500 CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {"700 CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {"701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {"704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {"709 CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {"711 CUDA_ERROR_TOO_MANY_PEERS", "peer mapping resources exhausted"},
    {"716 CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {"719 CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {"801 CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {"900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {"901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {"902 CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {"903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {"904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {"905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {"906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {"907 CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {"908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {"999 CUDA_ERROR_UNKNOWN", "unknown error"},
};

} // namespace fake

#include "fake_streams.hpp"
