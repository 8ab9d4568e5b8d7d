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

constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;
constexpr CUresult CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217, CUDA_ERROR_TOO_MANY_PEERS = 711;
constexpr int MULTIPROCESSOR_COUNT = 16, COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76;
constexpr unsigned NON_BLOCKING = 1, DISABLE_TIMING = 2;

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
    X(module_get_function, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                              \
    X(launch_kernel, "cuLaunchKernel",                                                                                 \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))  \
    X(stream_create, "cuStreamCreate", (CUstream *, unsigned))                                                         \
    X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                                                                \
    X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                           \
    X(stream_synchronize, "cuStreamSynchronize", (CUstream))                                                           \
    X(stream_is_capturing, "cuStreamIsCapturing", (CUstream, int *))                                                   \
    X(event_create, "cuEventCreate", (CUevent *, unsigned))                                                            \
    X(event_destroy, "cuEventDestroy_v2", (CUevent))                                                                   \
    X(event_record, "cuEventRecord", (CUevent, CUstream))                                                              \
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

// Throw a DriverFault unless a call succeeded.
inline void require(CUresult code, const char *call, int device) {
    if (code != CUDA_SUCCESS) throw DriverFault{call, device, code};
}
