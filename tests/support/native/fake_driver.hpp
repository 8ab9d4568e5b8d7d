// The fake CUDA driver: the driver's functions for devices, contexts, modules, launches and memory. Part of
// fake_cuda.cpp.
#pragma once

#include "fake_control.hpp"

#define DRIVER extern "C" __attribute__((visibility("default"))) int
#define BODY(...) { return call(__func__, [&] __VA_ARGS__); }

// ---- the driver, devices and contexts

DRIVER cuInit(unsigned flags) BODY({
    check_given(flags == 0);
    is_initialised = true;
})
DRIVER cuDriverGetVersion(int *version) BODY({
    check_given(version);
    *version = 12090;
})
DRIVER cuDeviceGetCount(int *count) BODY({
    check_given(count);
    *count = state->devices;
})
DRIVER cuDeviceGet(int *device, int ordinal) BODY({
    check_given(device);
    if (ordinal < 0 || ordinal >= state->devices)
        refuse(INVALID_DEVICE, "device " + std::to_string(ordinal) + " does not exist");
    *device = ordinal;
})
DRIVER cuDeviceGetName(char *name, int nbytes, int device) BODY({
    check_given(name && nbytes > 0);
    context_of(device);
    snprintf(name, static_cast<size_t>(nbytes), "Fake GPU %d", device);
})
DRIVER cuDeviceGetAttribute(int *value, int attribute, int device) BODY({
    check_given(value);
    context_of(device);
    static const std::map<int, int> attributes{{16, 132}, {20, 0}, {75, 9}, {76, 0}, {41, 1}}; // an H100 has these
    const auto found = attributes.find(attribute);
    if (found == attributes.end())
        refuse(INVALID_VALUE, "the fake driver has no attribute " + std::to_string(attribute));
    *value = found->second;
})
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) BODY({
    check_given(context);
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
    check_given(context);
    *context = state->contexts.count(current_handle) ? pointer(current_handle) : nullptr; // it may be of before a reset
})
DRIVER cuCtxSetCurrent(void *context) BODY({
    const uint64_t handle = reinterpret_cast<uint64_t>(context);
    if (handle) {
        const auto found = state->contexts.find(handle);
        if (found == state->contexts.end()) refuse(INVALID_CONTEXT, "the context does not exist");
        if (!found->second->is_active()) refuse(CONTEXT_IS_DESTROYED, "the context was released");
    }
    current_handle = handle;
})
DRIVER cuDeviceCanAccessPeer(int *can, int device, int peer) BODY({
    check_given(can);
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
    Context &context = current();
    check_given(module);
    if (!image) refuse(INVALID_VALUE, "there is no image");
    *module = add(state->modules, Module{context.handle});
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
        check_given(function && name);
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
    state->launched.insert(found.name);
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
    check_given(attributes && data);
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

// ---- errors: texts of the code that tests look at

DRIVER cuGetErrorName(int code, const char **text) {
    return *text = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr, SUCCESS;
}
DRIVER cuGetErrorString(int, const char **text) { return *text = "unspecified launch failure", SUCCESS; }
