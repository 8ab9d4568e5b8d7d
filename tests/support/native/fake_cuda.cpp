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

struct Faults { // of one function
    uint64_t calls = 0;
    std::map<uint64_t, int> codes; // of calls that do nothing, by their number
};

inline std::recursive_mutex mutex;
inline std::unique_ptr<State> state;
inline bool is_initialised = false;
inline std::map<std::string, Faults> faults;
inline uint64_t next_handle = 0x1000; // handles are not used twice, not even after a reset
inline thread_local uint64_t current_handle = 0;

template <class Body> auto locked(Body body) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return body();
}
// A call that stands for one that waits for the device, which waits for the test: see fake_hold.
inline std::atomic<int> held{0}; // 1: the next such call waits; 2: one does
inline void wait_until_continued() {
    int next = 1;
    if (!held.compare_exchange_strong(next, 2)) return;
    for (int k = 0; k < 500 && held == 2; k++) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    locked([] {
        if (held.exchange(0) == 2) state->report("a call waited for the device in vain");
    });
}

inline uint64_t new_handle() { return next_handle += 16; }

// Run the body of a function, and report why it is refused. Returns its code.
template <class Body> int guarded(const std::string &name, Body body) {
    try {
        if constexpr (std::is_void_v<decltype(body())>) return body(), SUCCESS;
        else return body();
    } catch (const Refused &refused) {
        if (!refused.why.empty()) state->report(name + ": " + refused.why + " (" + std::to_string(refused.code) + ")");
        return refused.code;
    }
}
// Run the body of a driver's function: count the call, fail or drop it on a test's request, and report its mistakes.
template <class Body> int call(const std::string &name, Body body) {
    if (UserObject::is_releasing) std::abort(); // it must not call the driver
    return locked([&] {
        Faults &of = faults[name];
        if (const auto found = of.codes.find(++of.calls); found != of.codes.end()) return found->second;
        if (!state || (!is_initialised && name != "cuInit")) return NOT_INITIALIZED;
        const int code = guarded(name, body);
        state->execute_some();
        return code;
    });
}

template <class T> T &of_handle(Table<T> &table, const void *handle, const char *what) {
    const auto found = table.find(reinterpret_cast<uint64_t>(handle));
    if (found == table.end()) refuse(INVALID_HANDLE, std::string("the ") + what + " does not exist or was destroyed");
    return *found->second;
}
inline void *pointer(uint64_t handle) { return reinterpret_cast<void *>(handle); }
template <class T> void *add(Table<T> &table, T &&object) { // returns its new handle
    const uint64_t handle = new_handle();
    table[handle] = std::make_shared<T>(std::move(object));
    return pointer(handle);
}
template <class T> std::shared_ptr<T> erase(Table<T> &table, const void *handle, const char *what) {
    of_handle(table, handle, what);
    const auto found = table.find(reinterpret_cast<uint64_t>(handle));
    std::shared_ptr<T> object = found->second;
    return table.erase(found), object;
}
inline void check_given(bool is_given) {
    if (!is_given) refuse(INVALID_VALUE, "an argument is invalid");
}

inline Context &context_of(int device) {
    if (device < 0 || device >= state->devices) refuse(INVALID_DEVICE, "device " + std::to_string(device) + " does not exist");
    for (auto &[handle, each] : state->contexts)
        if (each->device == device) return *each;
    const uint64_t handle = new_handle();
    return *(state->contexts[handle] = std::make_shared<Context>(Context{handle, device}));
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
    const uint64_t handle = new_handle();
    const int number = is_legacy ? 0 : ++state->numbers[context.device];
    state->streams[handle] = std::make_shared<Stream>(Stream{
        {}, handle, context.handle, context.device, number, is_blocking, is_foreign, is_legacy, state->chains++});
    return handle;
}
// Return the stream of a handle; 0 is the default one of the current context.
inline Stream &stream_of(const void *handle, bool invalidates = true) {
    Context &context = current();
    if (handle) {
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

inline Work work_of(const char *name, const Stream &stream, std::vector<Access> accesses) {
    return {name, stream.context, stream.device, {}, std::move(accesses), {}, false};
}
inline int copy(uint64_t to, uint64_t from, size_t nbytes, const char *name, Stream &stream) {
    if (nbytes == 0) return SUCCESS;
    if (to < from + nbytes && from < to + nbytes) refuse(INVALID_VALUE, "source and destination overlap");
    if (stream.capture && (!state->memory.find(to) || !state->memory.find(from)))
        state->invalidate(CAPTURE_UNSUPPORTED, "a copy of pageable memory cannot be captured", stream.capture);
    Work work = work_of(name, stream, {{from, nbytes, false}, {to, nbytes, true}});
    work.body = [to, from, nbytes] { std::memcpy(pointer(to), pointer(from), nbytes); };
    state->queue_work(stream, std::move(work));
    return SUCCESS;
}

} // namespace fake

#include "fake_streams.hpp"
