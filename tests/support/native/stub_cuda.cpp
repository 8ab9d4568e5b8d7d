// A stub of the CUDA driver, libcuda.so.1, for benchmarks: all calls succeed at once and do nothing, so that what
// remains is the engine's own cost on the host. Eight devices, full peer access; all memory is on device 0.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define DRIVER extern "C" __attribute__((visibility("default"))) int

// So many were queued: for benchmarks that print what a call queues.
extern "C" __attribute__((visibility("default"))) uint64_t stub_launches, stub_copies, stub_waits;
uint64_t stub_launches, stub_copies, stub_waits;

static thread_local void *current;
static void *const HANDLE = reinterpret_cast<void *>(0x1000);

static int give(void **handle) {
    *handle = HANDLE;
    return 0;
}
static int give(int *value, int given) {
    *value = given;
    return 0;
}
static int give(const char **text, const char *given) {
    *text = given;
    return 0;
}

DRIVER cuInit(unsigned) { return 0; }
DRIVER cuDriverGetVersion(int *version) { return give(version, 12090); }
DRIVER cuDeviceGetCount(int *count) { return give(count, 8); }
DRIVER cuDeviceGet(int *device, int ordinal) { return give(device, ordinal); }
DRIVER cuDeviceGetName(char *name, int nbytes, int) {
    std::strncpy(name, "Stub GPU", static_cast<size_t>(nbytes));
    return 0;
}
DRIVER cuDeviceGetAttribute(int *value, int attribute, int) {
    return give(value, attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 1);
}
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = reinterpret_cast<void *>(0x2000 + 16 * static_cast<uint64_t>(device));
    return 0;
}
DRIVER cuDevicePrimaryCtxRelease_v2(int) { return 0; }
DRIVER cuCtxGetCurrent(void **context) {
    *context = current;
    return 0;
}
DRIVER cuCtxSetCurrent(void *context) {
    current = context;
    return 0;
}
DRIVER cuDeviceCanAccessPeer(int *can, int device, int peer) { return give(can, device != peer); }
DRIVER cuCtxEnablePeerAccess(void *, unsigned) { return 0; }
DRIVER cuCtxSynchronize() { return 0; }
DRIVER cuModuleLoadData(void **module, const void *) { return give(module); }
DRIVER cuModuleUnload(void *) { return 0; }
DRIVER cuModuleGetFunction(void **function, void *, const char *) { return give(function); }
DRIVER cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **) {
    stub_launches++;
    return 0;
}
DRIVER cuStreamCreate(void **stream, unsigned) { return give(stream); }
DRIVER cuStreamDestroy_v2(void *) { return 0; }
DRIVER cuStreamWaitEvent(void *, void *, unsigned) {
    stub_waits++;
    return 0;
}
DRIVER cuStreamSynchronize(void *) { return 0; }
DRIVER cuStreamGetCaptureInfo_v2(void *, int *status, uint64_t *, void **, const void **, size_t *) { return give(status, 0); }
DRIVER cuThreadExchangeStreamCaptureMode(int *) { return 0; }
DRIVER cuUserObjectCreate(void **object, void *, void (*)(void *), unsigned, unsigned) { return give(object); }
DRIVER cuUserObjectRelease(void *, unsigned) { return 0; }
DRIVER cuGraphRetainUserObject(void *, void *, unsigned, unsigned) { return 0; }
DRIVER cuEventCreate(void **event, unsigned) { return give(event); }
DRIVER cuEventDestroy_v2(void *) { return 0; }
DRIVER cuEventRecord(void *, void *) { return 0; }
DRIVER cuMemcpyAsync(uint64_t, uint64_t, size_t, void *) { return 0; }
DRIVER cuMemcpyPeerAsync(uint64_t, void *, uint64_t, void *, size_t, void *) {
    stub_copies++;
    return 0;
}
DRIVER cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    *address = reinterpret_cast<uint64_t>(std::malloc(nbytes));
    return 0;
}
DRIVER cuMemFree_v2(uint64_t address) {
    std::free(reinterpret_cast<void *>(address));
    return 0;
}
DRIVER cuMemHostAlloc(void **address, size_t nbytes, unsigned) {
    *address = std::malloc(nbytes);
    return 0;
}
DRIVER cuMemFreeHost(void *address) {
    std::free(address);
    return 0;
}
DRIVER cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t address) { // segments of 2 MiB
    constexpr uint64_t SEGMENT = uint64_t{2} << 20;
    for (unsigned k = 0; k < count; k++)
        switch (attributes[k]) {
        case 1: cuDevicePrimaryCtxRetain(static_cast<void **>(data[k]), 0); break;
        case 2: *static_cast<unsigned *>(data[k]) = 2; break;
        case 10: *static_cast<bool *>(data[k]) = true; break;
        case 11: *static_cast<uint64_t *>(data[k]) = address / SEGMENT * SEGMENT; break;
        case 12: *static_cast<uint64_t *>(data[k]) = SEGMENT; break;
        }
    return 0;
}
DRIVER cuGetErrorName(int, const char **text) { return give(text, "CUDA_ERROR_UNKNOWN"); }
DRIVER cuGetErrorString(int, const char **text) { return give(text, "unknown error"); }
