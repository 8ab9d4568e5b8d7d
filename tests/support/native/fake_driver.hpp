// The fake CUDA driver: the driver's functions. Part of fake_cuda.cpp.
#pragma once

#define DRIVER extern "C" __attribute__((visibility("default"))) int
#define BODY(...) { return call(__func__, [&] __VA_ARGS__); }

// ---- the driver, devices and contexts

DRIVER cuInit(unsigned flags) BODY({
    check_given(flags == 0);
    is_initialised = true;
})
DRIVER cuDriverGetVersion(int *version) BODY({ *version = 12090; })
DRIVER cuDeviceGetCount(int *count) BODY({ *count = state->devices; })
DRIVER cuDeviceGet(int *device, int ordinal) BODY({ *device = context_of(ordinal).device; })
DRIVER cuDeviceGetName(char *name, int nbytes, int device) BODY({
    snprintf(name, static_cast<size_t>(nbytes), "Fake GPU %d", context_of(device).device);
})
DRIVER cuDeviceGetAttribute(int *value, int attribute, int device) BODY({
    context_of(device);
    static const std::map<int, int> attributes{{16, 132}, {20, 0}, {75, 9}, {76, 0}, {41, 1}}; // an H100 has these
    const auto found = attributes.find(attribute);
    if (found == attributes.end())
        refuse(INVALID_VALUE, "the fake driver has no attribute " + std::to_string(attribute));
    *value = found->second;
})
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) BODY({
    Context &found = context_of(device);
    if (!found.is_active()) state->check_unsafe();
    found.retained++;
    *context = pointer(found.handle);
})
DRIVER cuDevicePrimaryCtxRelease_v2(int device) BODY({
    Context &found = context_of(device);
    if (found.retained == 0) refuse(INVALID_CONTEXT, "the primary context was not retained");
    found.retained--;
})
DRIVER cuCtxGetCurrent(void **context) BODY({
    *context = state->contexts.count(current_handle) ? pointer(current_handle) : nullptr; // it may be of before a reset
})
DRIVER cuCtxSetCurrent(void *context) BODY({
    current_handle = context ? context_at(reinterpret_cast<uint64_t>(context), "the context").handle : 0;
})
DRIVER cuDeviceCanAccessPeer(int *can, int device, int peer) BODY({
    context_of(device), context_of(peer);
    *can = device != peer && state->peers[static_cast<size_t>(device * state->devices + peer)];
})
DRIVER cuCtxEnablePeerAccess(void *peer, unsigned flags) BODY({
    state->check_unsafe();
    check_given(flags == 0);
    Context &context = current(), &other = context_at(reinterpret_cast<uint64_t>(peer), "the peer's context");
    if (&context == &other) refuse(INVALID_CONTEXT, "a context cannot be its own peer");
    if (!state->peers[static_cast<size_t>(context.device * state->devices + other.device)])
        return PEER_ACCESS_UNSUPPORTED;
    return context.peers.insert(other.device).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
})

// ---- modules and launches

DRIVER cuModuleLoadData(void **module, const void *image) BODY({
    state->check_unsafe();
    check_given(image);
    *module = add(state->modules, Module{current().handle});
})
DRIVER cuModuleUnload(void *module) BODY({
    state->check_unsafe();
    current();
    of_handle(state->modules, module, "module");
    const uint64_t handle = reinterpret_cast<uint64_t>(module);
    for (auto it = state->functions.begin(); it != state->functions.end();)
        it = it->second->module == handle ? state->functions.erase(it) : std::next(it);
    state->modules.erase(handle);
})
DRIVER cuModuleGetFunction(void **function, void *module, const char *name) {
    wait_until_continued();
    return call(__func__, [&] {
        const uint64_t context = of_handle(state->modules, module, "module").context;
        if (context != current().handle) refuse(INVALID_HANDLE, "the module belongs to another context");
        static void *const self = [] {
            Dl_info info{};
            dladdr(reinterpret_cast<void *>(&fake_reset), &info);
            return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
        }();
        const auto body = reinterpret_cast<void (*)(const void *, uint32_t)>(dlsym(self, name));
        const auto traits = reinterpret_cast<const int32_t *(*)()>(dlsym(self, (std::string(name) + "_traits").c_str()));
        if (!body || !traits) return NOT_FOUND;
        *function = add(state->functions, Function{context, reinterpret_cast<uint64_t>(module), name, body, traits()});
        return SUCCESS;
    });
}
DRIVER cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *handle, void **parameters,
                      void **extra) BODY({
    Context &context = current();
    Function &found = of_handle(state->functions, function, "function");
    if (found.context != context.handle) refuse(INVALID_HANDLE, "the function belongs to another context");
    Stream &stream = stream_of(handle);
    if (stream.context != context.handle) refuse(INVALID_HANDLE, "the stream belongs to another context");
    if (!grid_x || grid_y != 1 || grid_z != 1 || block_x != cuda_reduce::THREADS || block_y != 1 || block_z != 1 ||
        shared)
        refuse(INVALID_VALUE, "the kernels have blocks of 256 threads in one dimension and no dynamic shared memory");
    check_given(parameters && parameters[0] && !extra);
    state->queue_work(stream, launch_work(found, context, parameters[0], grid_x));
})

// ---- memory

DRIVER cuMemAlloc_v2(uint64_t *address, size_t nbytes) BODY({
    state->check_unsafe();
    Context &context = current();
    check_given(address && nbytes);
    *address = state->memory.allocate(nbytes, context.device, context.handle, false);
    return *address ? SUCCESS : OUT_OF_MEMORY;
})
DRIVER cuMemFree_v2(uint64_t address) BODY({
    if (!address) return;
    state->check_unsafe();
    current();
    Allocation *found = state->memory.find(address);
    if (!found || !found->is_live || found->begin != address || found->device == HOST)
        refuse(INVALID_VALUE, "the address is not that of an allocation");
    state->note_host({address, found->nbytes, true}, "cuMemFree");
    found->is_live = false;
})
DRIVER cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) BODY({
    state->check_unsafe();
    Context &context = current();
    check_given(address && nbytes && flags < 8);
    *address = pointer(state->memory.allocate(nbytes, HOST, context.handle, false));
    return *address ? SUCCESS : OUT_OF_MEMORY;
})
DRIVER cuMemcpyAsync(uint64_t to, uint64_t from, size_t nbytes, void *handle) BODY({
    Stream &stream = stream_of(handle);
    const Context &context = *state->contexts.at(stream.context);
    for (const uint64_t each : {to, from})
        if (const Allocation *found = state->memory.find(each); found && !state->can_access(context, found->device))
            refuse(INVALID_VALUE, "the copy crosses to device " + std::to_string(found->device) +
                                      ", to which device " + std::to_string(context.device) +
                                      " has no peer access");
    return copy(to, from, nbytes, "copy", stream);
})
DRIVER cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t nbytes,
                         void *handle) BODY({
    Stream &stream = stream_of(handle);
    for (const auto &[address, given] : {std::pair{to, to_context}, std::pair{from, from_context}}) {
        const Context &context = context_at(reinterpret_cast<uint64_t>(given), "a context of the copy");
        const Allocation *found = state->memory.find(address);
        if (!found || found->device != context.device)
            refuse(INVALID_VALUE, "an address is not in memory of device " + std::to_string(context.device));
    }
    return copy(to, from, nbytes, "peer copy", stream);
})
DRIVER cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t address) BODY({
    state->check_unsafe(); // perhaps: see devices.cpp
    current();
    const Allocation *found = state->memory.find(address);
    if (found && !found->is_live) found = nullptr; // then all values are 0
    const bool is_owned = found && (found->kind == PLAIN || found->kind == MANAGED); // by a context, that of its device
    for (unsigned k = 0; k < count; k++) {
        const int kind = found ? found->kind : -1;
        switch (attributes[k]) {
        case 1: *static_cast<void **>(data[k]) = pointer(is_owned ? found->context : 0); break;
        case 2: *static_cast<unsigned *>(data[k]) = !found ? 0 : found->device == HOST ? 1 : 2; break;
        case 8: *static_cast<bool *>(data[k]) = kind == MANAGED; break;
        case 10: *static_cast<bool *>(data[k]) = kind == PLAIN || kind == FOREIGN_CONTEXT; break;
        case 11: *static_cast<uint64_t *>(data[k]) = found ? found->begin : 0; break;
        case 12: *static_cast<size_t *>(data[k]) = found ? found->nbytes : 0; break;
        case 17: *static_cast<void **>(data[k]) = kind == POOL ? data : nullptr; break;
        default: refuse(INVALID_VALUE, "the fake driver has no attribute " + std::to_string(attributes[k]) + " of pointers");
        }
    }
})

// ---- streams and events

DRIVER cuStreamCreate(void **stream, unsigned flags) BODY({
    Context &context = current();
    check_given(flags <= 1);
    *stream = pointer(add_stream(context, flags == 0, false, false));
})
DRIVER cuStreamDestroy_v2(void *handle) BODY({
    current();
    check_given(handle);
    Stream &stream = of_handle(state->streams, handle, "stream");
    if (stream.capture) state->invalidate(CAPTURE_UNSUPPORTED, "the stream is capturing", stream.capture);
    state->streams.erase(stream.handle);
})
DRIVER cuStreamSynchronize(void *handle) BODY({
    Stream &stream = stream_of(handle);
    if (stream.capture) state->invalidate(CAPTURE_UNSUPPORTED, "the stream is capturing", stream.capture);
    state->catch_up(stream);
    state->synchronize(stream);
    context_at(stream.context, "the stream's context"); // an operation may have failed
})
DRIVER cuEventCreate(void **event, unsigned flags) BODY({
    check_given(flags < 8);
    *event = add(state->events, Event{{}, current().handle});
})
DRIVER cuEventDestroy_v2(void *event) BODY({
    current();
    erase(state->events, event, "event");
})
DRIVER cuEventRecord(void *handle, void *stream_handle) BODY({
    Event &event = of_handle(state->events, handle, "event");
    Stream &stream = stream_of(stream_handle);
    if (event.context != stream.context)
        refuse(INVALID_HANDLE, "the event and the stream belong to different contexts");
    if (stream.capture) State::check_capture(stream.capture);
    else state->catch_up(stream);
    static_cast<Place &>(event) = stream;
})
DRIVER cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) BODY({
    Stream &stream = stream_of(stream_handle);
    check_given(flags == 0);
    Event &event = of_handle(state->events, handle, "event");
    if (stream.capture) State::check_capture(stream.capture);
    if (!event.capture && !stream.capture) {
        state->catch_up(stream);
        stream.join(event);
        return SUCCESS;
    }
    if (!event.capture)
        state->invalidate(CAPTURE_ISOLATION, "a capturing stream waits for an event that was not captured",
                          stream.capture);
    if (!event.capture->is_active && stream.capture)
        state->invalidate(CAPTURE_ISOLATION, "a capturing stream waits for an event of an earlier capture",
                          stream.capture);
    if (!event.capture->is_active)
        refuse(CAPTURED_EVENT, "the event was last recorded in a capture that has ended");
    State::check_capture(event.capture);
    if (stream.is_legacy)
        state->invalidate(CAPTURE_IMPLICIT, "the default stream cannot be captured", event.capture);
    if (stream.capture && stream.capture != event.capture)
        state->invalidate(CAPTURE_MERGE, "two captures would be merged", [&](const Capture &each) {
            return &each == stream.capture.get() || &each == event.capture.get();
        });
    stream.capture = event.capture;
    stream.nodes.insert(event.nodes.begin(), event.nodes.end());
    return SUCCESS;
})

// ---- capture and graphs

DRIVER cuStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *, void **graph, const void **, size_t *) BODY({
    const Stream &stream = stream_of(handle);
    *status = !stream.capture ? 0 : stream.capture->invalid.empty() ? 1 : 2;
    if (*status != 1) return;
    if (!stream.capture->graph) stream.capture->graph = new_handle();
    *graph = pointer(stream.capture->graph);
})
DRIVER cuThreadExchangeStreamCaptureMode(int *mode) BODY({
    check_given(mode && *mode >= 0 && *mode <= 2);
    std::swap(*mode, thread_mode);
})
DRIVER cuUserObjectCreate(void **object, void *owned, void (*release)(void *), unsigned count, unsigned flags) BODY({
    check_given(object && release && count == 1 && flags == 1);
    const uint64_t handle = new_handle();
    state->user_objects[handle].reset(new UserObject{owned, release});
    *object = pointer(handle);
})
DRIVER cuUserObjectRelease(void *object, unsigned count) BODY({
    check_given(count == 1);
    erase(state->user_objects, object, "user object");
})
DRIVER cuGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) BODY({
    check_given(count == 1 && flags == 1); // the caller's reference moves to the graph
    const auto is_it = [&](const auto &each) { return each->graph == reinterpret_cast<uint64_t>(graph); };
    const auto found = std::find_if(state->captures.begin(), state->captures.end(), is_it);
    if (found == state->captures.end()) refuse(INVALID_VALUE, "the graph is not one that is being captured");
    (*found)->objects.push_back(erase(state->user_objects, object, "user object"));
})
DRIVER cuStreamBeginCapture_v2(void *handle, int mode) BODY({
    check_given(mode >= 0 && mode <= 2);
    Stream &stream = stream_of(handle);
    if (stream.is_legacy) refuse(CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    if (stream.capture) refuse(ILLEGAL_STATE, "the stream is capturing");
    stream.capture =
        std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), {}, true, "", 0, {}});
    stream.nodes.clear();
    state->captures.push_back(stream.capture);
})
DRIVER cuStreamEndCapture(void *handle, void **graph) BODY({
    *graph = nullptr;
    Stream &stream = stream_of(handle);
    const std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) refuse(ILLEGAL_STATE, "the stream is not capturing");
    std::set<int> joined = stream.nodes; // the nodes that the end of the stream depends on
    for (int k = static_cast<int>(capture->nodes.size()) - 1; k >= 0; k--) {
        const auto &predecessors = capture->nodes[static_cast<size_t>(k)].predecessors;
        if (joined.count(k)) joined.insert(predecessors.begin(), predecessors.end());
    }
    capture->is_active = false;
    for (auto &[other, each] : state->streams)
        if (each->capture == capture) each->capture = nullptr, each->nodes.clear();
    state->captures.erase(std::find(state->captures.begin(), state->captures.end(), capture));
    State::check_capture(capture);
    if (joined.size() < capture->nodes.size())
        refuse(CAPTURE_UNJOINED, "the stream does not wait for all captured work");
    const uint64_t made = capture->graph ? capture->graph : new_handle();
    state->graphs[made] = std::make_shared<Graph>(Graph{capture->nodes, std::move(capture->objects)});
    *graph = pointer(made);
})
DRIVER cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) BODY({
    current();
    check_given(exec && flags == 0);
    GraphExec made{{}, of_handle(state->graphs, graph, "graph"), {}};
    for (const Node &each : made.nodes)
        if (!made.chains.count(each.chain)) made.chains[each.chain] = {state->chains++, 0};
    *exec = add(state->execs, std::move(made));
})
DRIVER cuGraphLaunch(void *exec, void *handle) BODY({
    GraphExec &found = of_handle(state->execs, exec, "executable graph");
    Stream &stream = stream_of(handle);
    if (stream.capture)
        state->invalidate(NOT_SUPPORTED, "the fake driver cannot capture the launch of a graph", stream.capture);
    state->launch(found, stream);
})
DRIVER cuGraphExecDestroy(void *exec) BODY({ erase(state->execs, exec, "executable graph"); })
DRIVER cuGraphDestroy(void *graph) BODY({ erase(state->graphs, graph, "graph"); })

// ---- errors: texts of the code that tests look at

DRIVER cuGetErrorName(int code, const char **text) {
    return *text = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr, SUCCESS;
}
DRIVER cuGetErrorString(int, const char **text) { return *text = "unspecified launch failure", SUCCESS; }
