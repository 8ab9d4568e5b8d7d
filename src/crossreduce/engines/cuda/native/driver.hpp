// The CUDA driver, opened at run time: neither this library's build nor its installation needs CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// Types and constants of cuda.h (CUDA 12).
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUmodule = struct CUmod_st *;
using CUfunction = struct CUfunc_st *;
using CUstream = struct CUstream_st *;
using CUevent = struct CUevent_st *;
using CUgraph = struct CUgraph_st *;
using CUuserObject = struct CUuserObject_st *;

constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;
constexpr CUresult CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217, CUDA_ERROR_TOO_MANY_PEERS = 711;
constexpr CUresult CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905;
constexpr int MULTIPROCESSOR_COUNT = 16, COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76;
constexpr unsigned NON_BLOCKING = 1, DISABLE_TIMING = 2, NO_DESTRUCTOR_SYNC = 1, GRAPH_MOVE = 1;
constexpr int CAPTURE_MODE_RELAXED = 2, CAPTURE_STATUS_ACTIVE = 1;
constexpr unsigned MEMORY_TYPE_DEVICE = 2;
enum PointerAttribute {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_IS_MANAGED = 8,
    POINTER_IS_LEGACY_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MEMPOOL = 17,
};

// X(member, name in the library, parameters)
#define DRIVER_FUNCTIONS(X)                                                                                            \
    X(init, "cuInit", (unsigned))                                                                                      \
    X(driver_get_version, "cuDriverGetVersion", (int *))                                                               \
    X(device_get_count, "cuDeviceGetCount", (int *))                                                                   \
    X(device_get, "cuDeviceGet", (CUdevice *, int))                                                                    \
    X(device_get_name, "cuDeviceGetName", (char *, int, CUdevice))                                                     \
    X(device_get_attribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                                            \
    X(primary_context_retain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                                     \
    X(context_get_current, "cuCtxGetCurrent", (CUcontext *))                                                           \
    X(context_set_current, "cuCtxSetCurrent", (CUcontext))                                                             \
    X(device_can_access_peer, "cuDeviceCanAccessPeer", (int *, CUdevice, CUdevice))                                    \
    X(context_enable_peer_access, "cuCtxEnablePeerAccess", (CUcontext, unsigned))                                      \
    X(module_load_data, "cuModuleLoadData", (CUmodule *, const void *))                                                \
    X(module_unload, "cuModuleUnload", (CUmodule))                                                                     \
    X(module_get_function, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                              \
    X(launch_kernel, "cuLaunchKernel",                                                                                 \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))  \
    X(stream_create, "cuStreamCreate", (CUstream *, unsigned))                                                         \
    X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                                                                \
    X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                           \
    X(stream_synchronize, "cuStreamSynchronize", (CUstream))                                                           \
    X(stream_get_capture_info, "cuStreamGetCaptureInfo_v2",                                                            \
      (CUstream, int *, uint64_t *, CUgraph *, const void **, size_t *))                                               \
    X(thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                      \
    X(user_object_create, "cuUserObjectCreate", (CUuserObject *, void *, void (*)(void *), unsigned, unsigned))        \
    X(user_object_release, "cuUserObjectRelease", (CUuserObject, unsigned))                                            \
    X(graph_retain_user_object, "cuGraphRetainUserObject", (CUgraph, CUuserObject, unsigned, unsigned))                \
    X(event_create, "cuEventCreate", (CUevent *, unsigned))                                                            \
    X(event_destroy, "cuEventDestroy_v2", (CUevent))                                                                   \
    X(event_record, "cuEventRecord", (CUevent, CUstream))                                                              \
    X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                             \
    X(mem_free, "cuMemFree_v2", (CUdeviceptr))                                                                         \
    X(pointer_get_attributes, "cuPointerGetAttributes", (unsigned, int *, void **, CUdeviceptr))                       \
    X(memcpy_async, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                     \
    X(memcpy_peer_async, "cuMemcpyPeerAsync",                                                                          \
      (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream))                                              \
    X(get_error_name, "cuGetErrorName", (CUresult, const char **))                                                     \
    X(get_error_string, "cuGetErrorString", (CUresult, const char **))

struct Driver {
#define MEMBER(member, name, parameters) CUresult(*member) parameters;
    DRIVER_FUNCTIONS(MEMBER)
#undef MEMBER
};

// A call of the driver that failed.
struct DriverFault {
    const char *call;
    int device; // -1: none in particular
    CUresult code;
};

// Return the driver, or null; then `why` names the missing part, or the call of the driver that failed.
const Driver *driver(std::string &why);

// Return the driver. Throws DriverFault if it cannot be used.
const Driver &opened();

struct FaultText {
    std::string name, text; // of the code; or why there is no driver
};
FaultText text_of(const DriverFault &fault);

// Throw a DriverFault unless a call succeeded.
inline void require(CUresult code, const char *call, int device) {
    if (code != CUDA_SUCCESS) throw DriverFault{call, device, code};
}
