// The fake CUDA driver: functions for tests. Part of fake_cuda.cpp. Those that return int return 0, or the code with which
// they failed, which is reported.
#pragma once

namespace fake {

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

#define CONTROL extern "C" __attribute__((visibility("default")))
#define CHECKED(...) { return locked([&] { return guarded(__func__, [&] __VA_ARGS__); }); }

// Restart with `devices` devices. peers[a * devices + b]: device a can access memory of device b. All handles and
// addresses become invalid. cuInit counts once for the process, as in the real driver.
CONTROL int fake_reset(int devices, const uint8_t *peers, uint64_t seed) CHECKED({
    state = std::make_unique<State>(devices, peers, seed);
    faults.clear();
})
// Forget reports, launches, counts, faults and what is read wrongly, but no handles; for an engine that keeps its
// streams.
CONTROL int fake_clear() CHECKED({
    state->reports.clear();
    state->launched.clear();
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
// A line for each of: 0 the reports, 1 the names of launched kernels, 2 the kinds of objects that were not released.
// Those of the framework and of the test are left out. The text is kept until this thread's next call.
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
            for (const std::string &each : state->launched) text += each + "\n";
        if (what == 2)
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
    return locked([&] {
        const uint64_t address = state->memory.allocate(nbytes, device, foreign_context(device).handle, true);
        allocation_at(address).kind = kind;
        return address;
    });
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
    const Context &context = foreign_context(device);
    state->shadow.forget(address, nbytes);
    state->memory.own(address, nbytes, device, context.handle, true);
    allocation_at(address).kind = kind;
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
