// A stub of the CUDA driver, libcuda.so.1, for benchmarks: all calls succeed at once and do nothing, so that what
// remains is the engine's own cost on the host. Eight devices, full peer access; all memory is on device 0.
#include "driver.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define GIVES(name, type, value) EXPORTED int name(type *result, ...) { return *result = value, 0; }

static thread_local void *current;
static void *const HANDLE = reinterpret_cast<void *>(0x1000);

EXPORTED int succeeds() { return 0; }
asm(".irp name, cuInit, cuCtxEnablePeerAccess, cuModuleUnload, cuLaunchKernel, cuStreamDestroy_v2, cuStreamWaitEvent, "
    "cuStreamSynchronize, cuThreadExchangeStreamCaptureMode, cuUserObjectRelease, cuGraphRetainUserObject, "
    "cuEventDestroy_v2, cuEventRecord, cuMemcpyAsync, cuMemcpyPeerAsync, cuMemFree_v2\n"
    ".globl \\name\n .set \\name, succeeds\n .endr");
GIVES(cuDriverGetVersion, int, 12090)
GIVES(cuDeviceGetCount, int, 8)
EXPORTED int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
GIVES(cuDeviceGetName, char, 0)
EXPORTED int cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == MULTIPROCESSOR_COUNT ? 132 : attribute == COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return 0;
}
EXPORTED int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = reinterpret_cast<void *>(0x2000 + 16 * static_cast<uint64_t>(device));
    return 0;
}
GIVES(cuCtxGetCurrent, void *, current)
EXPORTED int cuCtxSetCurrent(void *context) { return current = context, 0; }
EXPORTED int cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, 0; }
GIVES(cuModuleLoadData, void *, HANDLE)
GIVES(cuModuleGetFunction, void *, HANDLE)
GIVES(cuStreamCreate, void *, HANDLE)
EXPORTED int cuStreamGetCaptureInfo_v2(void *, int *status, ...) { return *status = 0; }
GIVES(cuUserObjectCreate, void *, HANDLE)
GIVES(cuEventCreate, void *, HANDLE)
GIVES(cuMemAlloc_v2, void *, HANDLE)
EXPORTED int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t address) { // segments of 2 MiB
    constexpr uint64_t SEGMENT = uint64_t{2} << 20;
    for (unsigned k = 0; k < count; k++)
        switch (attributes[k]) {
        case POINTER_CONTEXT: cuDevicePrimaryCtxRetain(static_cast<void **>(data[k]), 0); break;
        case POINTER_MEMORY_TYPE: *static_cast<unsigned *>(data[k]) = MEMORY_TYPE_DEVICE; break;
        case POINTER_IS_LEGACY_IPC_CAPABLE: *static_cast<bool *>(data[k]) = true; break;
        case POINTER_RANGE_START: *static_cast<uint64_t *>(data[k]) = address / SEGMENT * SEGMENT; break;
        case POINTER_RANGE_SIZE: *static_cast<uint64_t *>(data[k]) = SEGMENT; break;
        }
    return 0;
}
GIVES(cuGetErrorName, const char *, "CUDA_ERROR_UNKNOWN")
GIVES(cuGetErrorString, const char *, "unknown error")
