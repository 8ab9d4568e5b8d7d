// A stub of the CUDA driver, libcuda.so.1, for benchmarks: all calls succeed at once and do nothing, so that what
// remains is the engine's own cost on the host. Eight devices, full peer access; all memory is on device 0.
#include <cstdint>
#include <cstdlib>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define DRIVER EXPORTED int
// Functions whose parameters are not looked at, as C callers may call them.
#define SUCCEEDS(name) DRIVER name() { return 0; }
#define COUNTS(name, counter) DRIVER name() { return counter++, 0; }
#define GIVES(name, type, value) DRIVER name(type *result) { return *result = value, 0; }

// So many were queued: for benchmarks that print what a call queues.
EXPORTED uint64_t stub_launches, stub_copies, stub_waits;
uint64_t stub_launches, stub_copies, stub_waits;

static thread_local void *current;
static void *const HANDLE = reinterpret_cast<void *>(0x1000);

SUCCEEDS(cuInit)
GIVES(cuDriverGetVersion, int, 12090)
GIVES(cuDeviceGetCount, int, 8)
DRIVER cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
GIVES(cuDeviceGetName, char, 0)
DRIVER cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 1;
    return 0;
}
DRIVER cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = reinterpret_cast<void *>(0x2000 + 16 * static_cast<uint64_t>(device));
    return 0;
}
SUCCEEDS(cuDevicePrimaryCtxRelease_v2)
GIVES(cuCtxGetCurrent, void *, current)
DRIVER cuCtxSetCurrent(void *context) { return current = context, 0; }
DRIVER cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, 0; }
SUCCEEDS(cuCtxEnablePeerAccess)
SUCCEEDS(cuCtxSynchronize)
GIVES(cuModuleLoadData, void *, HANDLE)
SUCCEEDS(cuModuleUnload)
GIVES(cuModuleGetFunction, void *, HANDLE)
COUNTS(cuLaunchKernel, stub_launches)
GIVES(cuStreamCreate, void *, HANDLE)
SUCCEEDS(cuStreamDestroy_v2)
COUNTS(cuStreamWaitEvent, stub_waits)
SUCCEEDS(cuStreamSynchronize)
DRIVER cuStreamGetCaptureInfo_v2(void *, int *status) { return *status = 0; }
SUCCEEDS(cuThreadExchangeStreamCaptureMode)
GIVES(cuUserObjectCreate, void *, HANDLE)
SUCCEEDS(cuUserObjectRelease)
SUCCEEDS(cuGraphRetainUserObject)
GIVES(cuEventCreate, void *, HANDLE)
SUCCEEDS(cuEventDestroy_v2)
SUCCEEDS(cuEventRecord)
SUCCEEDS(cuMemcpyAsync)
COUNTS(cuMemcpyPeerAsync, stub_copies)
DRIVER cuMemAlloc_v2(void **address, size_t nbytes) { return *address = std::malloc(nbytes), 0; }
DRIVER cuMemFree_v2(void *address) { return std::free(address), 0; }
DRIVER cuMemHostAlloc(void **address, size_t nbytes) { return *address = std::malloc(nbytes), 0; }
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
GIVES(cuGetErrorName, const char *, "CUDA_ERROR_UNKNOWN")
GIVES(cuGetErrorString, const char *, "unknown error")
