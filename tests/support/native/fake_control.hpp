// The fake CUDA driver: functions for tests. Part of fake_cuda.cpp.
#pragma once

#define CONTROL extern "C" __attribute__((visibility("default")))

namespace fake {

inline const char *kept(std::string text) { // until this thread's next call
    static thread_local std::string last;
    last = std::move(text);
    return last.c_str();
}
inline std::string lines(const std::vector<std::string> &all) {
    std::string made;
    for (const std::string &each : all) made += each + "\n";
    return made;
}
// Run the body of a control function; return 0, or the code with which it failed, which is reported.
template <class Body> int control(const char *name, Body body) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    try {
        body();
        return SUCCESS;
    } catch (const Refused &refused) {
        state->report(std::string(name) + ": " + refused.why + " (" + std::to_string(refused.code) + ")");
        return refused.code;
    }
}

} // namespace fake

// Restart with `devices` devices. peers[a * devices + b]: device a can access memory of device b. All handles and
// addresses become invalid. cuInit counts once for the process, as in the real driver.
CONTROL void fake_reset(int devices, const uint8_t *peers, uint64_t seed) {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::state = std::make_unique<fake::State>(devices, peers, seed);
    fake::faults.clear();
}
// Forget reports, operations, counts, faults and what is read wrongly, but no handles; for an engine that keeps its streams.
CONTROL void fake_clear() {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::state->reports.clear();
    fake::state->log.clear();
    fake::state->corrupted.clear();
    fake::faults.clear();
}
// The n-th call of a function from now on (1: the next one) fails, or succeeds without doing anything.
CONTROL void fake_fail(const char *name, uint64_t n, int code) {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::Faults &of = fake::faults[name];
    of.fails[of.counted + n] = code;
}
CONTROL void fake_drop(const char *name, uint64_t n) {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::Faults &of = fake::faults[name];
    of.drops.insert(of.counted + n);
}
CONTROL uint64_t fake_count(const char *name) {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    return fake::faults[name].calls;
}

CONTROL const char *fake_report() {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    return fake::kept(fake::lines(fake::state->reports));
}
CONTROL const char *fake_operations() {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    return fake::kept(fake::lines(fake::state->log));
}
// The objects not released: a line for each kind. Those of the framework and of the test are left out.
CONTROL const char *fake_live() {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    const fake::State &s = *fake::state;
    std::map<std::string, size_t> live{{"modules", s.modules.size()},
                                       {"events", s.events.size()},
                                       {"graphs", s.graphs.size()},
                                       {"executable graphs", s.execs.size()}};
    for (auto &[handle, each] : s.streams) live["streams"] += !each->is_foreign;
    for (auto &[handle, each] : s.contexts) live["contexts retained"] += static_cast<size_t>(each->retained);
    for (auto &[begin, each] : fake::state->memory.all())
        if (each.is_live && !each.is_foreign)
            live[each.device == fake::HOST ? "pinned bytes" : "device bytes"] += each.nbytes;
    std::string made;
    for (auto &[what, count] : live)
        if (count) made += what + ": " + std::to_string(count) + "\n";
    return fake::kept(made);
}

// Execute everything that is queued; for the host it is complete, as if it had synchronised with all streams.
CONTROL void fake_run() {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::state->execute_all();
    for (auto &[handle, each] : fake::state->streams) fake::join(fake::state->host_clock, each->clock);
}

// Memory of a device (or of the host: -1, pinned) that belongs to a framework, whose context is active from now on.
CONTROL uint64_t fake_memory(uint64_t nbytes, int device) {
    uint64_t address = 0;
    fake::control("fake_memory", [&] {
        fake::Context &context = fake::context_of(std::max(device, 0));
        context.is_foreign = true;
        address = fake::state->memory.allocate(nbytes, device, context.handle, true);
    });
    return address;
}
// Let kernels of a device read what another one owns wrongly.
CONTROL void fake_corrupt(int reader, int owner) {
    const std::lock_guard<std::recursive_mutex> lock(fake::mutex);
    fake::state->corrupted.insert({reader, owner});
}
// Let memory be of a kind: see Kind. It stays until the memory is freed.
CONTROL int fake_kind(uint64_t address, int kind) {
    return fake::control("fake_kind", [&] {
        fake::Allocation *found = fake::state->memory.find(address);
        if (!found) fake::refuse(fake::INVALID_VALUE, "the address is not known");
        found->kind = kind;
    });
}
// Let the next cuModuleGetFunction wait until fake_continue, as if for a device that waits for the caller; at most ten
// seconds. fake_continue returns whether a call waited.
CONTROL void fake_hold() { fake::held = 1; }
CONTROL int fake_continue() {
    int waiting = 2;
    return fake::held.compare_exchange_strong(waiting, 0);
}
// Memory of the caller that counts as a device's until it is given back.
CONTROL int fake_own(uint64_t address, uint64_t nbytes, int device) {
    return fake::control("fake_own", [&] {
        fake::Context &context = fake::context_of(std::max(device, 0));
        context.is_foreign = true;
        fake::state->shadow.forget(address, nbytes);
        fake::state->memory.own(address, nbytes, device, context.handle, true);
    });
}
// Free or give back memory of fake_memory or fake_own.
CONTROL int fake_disown(uint64_t address) {
    return fake::control("fake_disown", [&] {
        const fake::Allocation *found = fake::state->memory.find(address);
        if (!found || !found->is_foreign || found->begin != address)
            fake::refuse(fake::INVALID_VALUE, "the address is not known");
        fake::state->note_host({address, found->nbytes, true}, "freeing");
        fake::state->execute_all(); // the memory may vanish
        fake::state->shadow.forget(address, found->nbytes);
        fake::state->memory.all().erase(address);
    });
}
// A stream of a framework.
CONTROL void *fake_stream(int device, unsigned flags) {
    uint64_t handle = 0;
    fake::control("fake_stream", [&] {
        fake::Context &context = fake::context_of(device);
        context.is_foreign = true;
        handle = fake::add_stream(context, flags == 0, true, false);
    });
    return fake::pointer(handle);
}

// The host accesses memory.
CONTROL int fake_host_access(uint64_t address, uint64_t nbytes, int writes) {
    return fake::control("fake_host_access",
                         [&] { fake::state->note_host({address, nbytes, writes != 0}, "the host"); });
}
// An operation of a framework in a stream, which may be the default one of a device: it writes given bytes, which are
// copied, or reads them into memory that the caller keeps until the operation has run.
CONTROL int fake_queue(void *handle, int device, uint64_t address, void *bytes, uint64_t nbytes, int writes) {
    return fake::control("fake_queue", [&] {
        const uint64_t before = fake::current_handle;
        struct Restore {
            uint64_t to;
            ~Restore() { fake::current_handle = to; }
        } restore{before};
        fake::Context &context = fake::context_of(device);
        context.is_foreign = true;
        fake::current_handle = context.handle;
        fake::Stream &stream = fake::stream_of(handle);
        fake::Work work{};
        work.name = "the framework";
        work.context = stream.context;
        work.device = stream.device;
        work.accesses = {{address, nbytes, writes != 0}};
        if (writes) {
            auto copy =
                std::make_shared<std::vector<char>>(static_cast<char *>(bytes), static_cast<char *>(bytes) + nbytes);
            work.body = [copy, address] { std::memcpy(fake::pointer(address), copy->data(), copy->size()); };
        } else {
            work.body = [=] { std::memcpy(bytes, fake::pointer(address), nbytes); };
        }
        fake::state->queue_work(stream, std::move(work));
    });
}
