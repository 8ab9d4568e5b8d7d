// What the module crossreduce.engines.cuda._cuda offers to other compiled modules, in the capsule `_cuda.API`.
#pragma once

#include <cstdint>
#include <vector>

#define PY_SSIZE_T_CLEAN
#include <Python.h>

constexpr const char *CUDA_API = "crossreduce.engines.cuda._cuda.API";

struct CudaApi {
    // Return the numbers of a plan's devices, and the bytes of temporary memory that a run needs on each; or null if the
    // object is not a plan.
    const std::vector<int> *(*devices)(PyObject *);
    const std::vector<int64_t> *(*scratch)(PyObject *);
    // Return whether work in a stream of a device becomes a part of a graph.
    bool (*is_capturing)(int device, uint64_t stream);
    // Queue the operations of a plan: `addresses` of sources, results and temporary memory; the current stream of each
    // device. Returns false with an error set if that fails.
    bool (*run)(PyObject *plan, const std::vector<uint64_t> &addresses, const std::vector<uint64_t> &streams);
};
