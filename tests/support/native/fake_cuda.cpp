// A fake CUDA driver, libcuda.so.1, for tests of the CUDA engine without a GPU.
//
// It has the functions of the driver that the engine and the tests call, with the signatures and result codes of cuda.h
// (CUDA 12.9). Each call checks what the real driver checks, and queues work instead of doing it (fake_queues.hpp).
// What fails because the caller made a mistake is reported as well. cuda_host.cpp, which is linked to it, has the bodies
// of the kernels.
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
inline Stream &stream_of(const void *handle) {
    Context &context = current();
    if (handle) {
        Stream &stream = of_handle(state->streams, handle, "stream");
        context_at(stream.context, "the stream's context");
        return stream;
    }
    if (!context.legacy) context.legacy = add_stream(context, true, true, true);
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

// The context of a device, which a framework retains from now on.
inline Context &foreign_context(int device) {
    Context &context = context_of(std::max(device, 0));
    context.is_foreign = true;
    return context;
}
inline Allocation &allocation_at(uint64_t address) {
    Allocation *found = state->memory.find(address);
    if (!found) refuse(INVALID_VALUE, "the address is not known");
    return *found;
}

} // namespace fake

using namespace fake;

// ---- functions for tests; those that return int return 0, or the code with which they failed, which is reported

#define CONTROL extern "C" __attribute__((visibility("default")))
#define CHECKED(...) { return locked([&] { return guarded(__func__, [&] __VA_ARGS__); }); }

// Restart with `devices` devices. peers[a * devices + b]: device a can access memory of device b. All handles and
// addresses become invalid. cuInit counts once for the process, as in the real driver.
CONTROL int fake_reset(int devices, const uint8_t *peers, uint64_t seed) CHECKED({
    state = std::make_unique<State>(devices, peers, seed);
    faults.clear();
})
// Forget reports, counts, faults and what is read wrongly, but no handles; for an engine that keeps its streams.
CONTROL int fake_clear() CHECKED({
    state->reports.clear();
    state->corrupted.clear();
    faults.clear();
})
// The n-th call of a function from now on (1: the next one) fails with a code and does nothing; code 0: it succeeds.
CONTROL int fake_fail(const char *name, uint64_t n, int code) CHECKED({
    Faults &of = faults[name];
    of.codes[of.calls + n] = code;
})
// How often a function was called.
CONTROL uint64_t fake_count(const char *name) { return locked([&] { return faults[name].calls; }); }
// A line for each of: 0 the reports, 1 the kinds of objects that were not released, without those of the framework and of
// the test. The text is kept until this thread's next call.
CONTROL const char *fake_text(int what) {
    static thread_local std::string text;
    return locked([&] {
        text.clear();
        std::map<std::string, size_t> live{{"modules", state->modules.size()}, {"events", state->events.size()},
                                           {"graphs", state->graphs.size()}, {"executable graphs", state->execs.size()}};
        for (auto &[handle, each] : state->streams) live["streams"] += !each->is_foreign;
        for (auto &[handle, each] : state->contexts) live["contexts retained"] += static_cast<size_t>(each->retained);
        for (auto &[begin, each] : state->memory.all()) live["bytes"] += each.is_live && !each.is_foreign ? each.nbytes : 0;
        if (what == 0)
            for (const std::string &each : state->reports) text += each + "\n";
        if (what == 1)
            for (auto &[kind, count] : live) text += count ? kind + ": " + std::to_string(count) + "\n" : "";
        return text.c_str();
    });
}

// Execute everything that is queued; for the host it is complete, as if it had synchronised with all streams.
CONTROL int fake_run() CHECKED({
    state->execute_all();
    for (auto &[handle, each] : state->streams) fake::join(state->host_clock, each->clock);
})

// Return memory of a device (or of the host: -1, pinned) that belongs to a framework, of a kind: see Kind.
CONTROL uint64_t fake_memory(uint64_t nbytes, int device, int kind) {
    return locked([&] { return state->memory.allocate(nbytes, device, foreign_context(device).handle, true, kind); });
}
// Let kernels of a device read what another one owns wrongly.
CONTROL int fake_corrupt(int reader, int owner) CHECKED({ state->corrupted.insert({reader, owner}); })
// Let memory be of a kind until it is freed.
CONTROL int fake_kind(uint64_t address, int kind) CHECKED({ allocation_at(address).kind = kind; })
// Let the next cuModuleGetFunction wait until fake_resume, as if for a device that waits for the caller; at most ten
// seconds. fake_resume returns whether a call waited.
CONTROL int fake_hold() { return held = 1, 0; }
CONTROL int fake_resume() {
    int waiting = 2;
    return held.compare_exchange_strong(waiting, 0);
}
// Memory of the caller that counts as a device's until it is given back.
CONTROL int fake_own(uint64_t address, uint64_t nbytes, int device, int kind) CHECKED({
    if (!nbytes) return;
    state->shadow.forget(address, nbytes);
    state->memory.own(address, nbytes, device, foreign_context(device).handle, true, kind);
})
// Free or give back memory of fake_memory or fake_own.
CONTROL int fake_disown(uint64_t address) CHECKED({
    const Allocation &found = allocation_at(address);
    if (!found.is_foreign || found.begin != address) refuse(INVALID_VALUE, "the address is not known");
    state->note_host({address, found.nbytes, true}, "freeing");
    state->execute_all(); // the memory may vanish
    state->shadow.forget(address, found.nbytes);
    state->memory.all().erase(address);
})
// A stream of a framework.
CONTROL void *fake_stream(int device, unsigned flags) {
    return locked([&] { return pointer(add_stream(foreign_context(device), flags == 0, true, false)); });
}

// The host accesses memory.
CONTROL int fake_host_access(uint64_t address, uint64_t nbytes, int writes)
    CHECKED({ state->note_host({address, nbytes, writes != 0}, "the host"); })
// An operation of a framework in a stream, which may be the default one of a device: it writes given bytes, which are
// copied, or reads them into memory that the caller keeps until the operation has run.
CONTROL int fake_queue(void *handle, int device, uint64_t address, char *bytes, uint64_t nbytes, int writes) CHECKED({
    struct Restore {
        uint64_t to = current_handle;
        ~Restore() { current_handle = to; }
    } restore;
    current_handle = foreign_context(device).handle;
    Stream &stream = stream_of(handle);
    Work work = work_of("the framework", stream, {{address, nbytes, writes != 0}});
    const std::vector<char> given(bytes, bytes + (writes ? nbytes : 0));
    work.body = [=] { writes ? std::memcpy(pointer(address), given.data(), nbytes) : std::memcpy(bytes, pointer(address), nbytes); };
    state->queue_work(stream, std::move(work));
})

#include "fake_driver.hpp"
