// What the module crossreduce.engines.cuda._cuda offers to other compiled modules, in the capsule `_cuda.API`.
#pragma once

#include <cstdint>
#include <vector>

#define PY_SSIZE_T_CLEAN
#include <Python.h>

constexpr const char *CUDA_API = "crossreduce.engines.cuda._cuda.API";

struct CudaApi {
    using Words = std::vector<uint64_t>;
    enum Fit { FITS, IS_UNREADABLE, IS_CAPTURED, FAILED };

    // Return the numbers of a plan's devices, and the bytes of temporary memory that a run needs on each; or null if the
    // object is not a plan.
    const std::vector<int> *(*devices)(PyObject *);
    const std::vector<int64_t> *(*scratch)(PyObject *);
    // Return the plan that runs where peers cannot read the memory; borrowed; null: there is none yet.
    PyObject *(*otherwise)(PyObject *plan);
    // Return whether a plan can run now: peers can read what they must, and no graph has to keep the memory. If this
    // FAILED, an error is set. For the arguments see `run`.
    Fit (*fit)(PyObject *plan, const Words &addresses, const Words &streams);
    // Queue the operations of a plan that fits: `addresses` of sources, results and temporary memory; the current stream of
    // each device. Returns false with an error set if that fails.
    bool (*run)(PyObject *plan, const Words &addresses, const Words &streams);
};
