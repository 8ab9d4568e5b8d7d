// What the module crossreduce.kernels._native offers to other compiled modules, in the capsule `_native.API`.
#pragma once

#include "module.hpp"

constexpr const char *KERNEL_API = "crossreduce.kernels._native.API";

struct KernelApi {
    const Kernel *(*kernel_of)(PyObject *);
    int64_t (*traffic_nbytes)(const Kernel &);
    bool (*run)(const Kernel &, const std::vector<Source> &, const std::vector<char *> &, int threads, bool streaming);
    PyObject *(*new_memory)(size_t nbytes, char **data); // an object that owns memory of the pool
    void *(*allocate)(size_t nbytes);                    // memory of the pool without an object
    void (*free)(void *memory, size_t nbytes);
    bool (*can_begin)(PyObject *memory); // whether a SharedMemory is open, is not aborted and runs no op
    void (*set_caller)(PyObject *memory, bool inside); // note that this thread makes a prepared call, or no longer does
    bool (*is_unfinished)(PyObject *memory);           // whether an op has neither ended nor been aborted
    // Begin an op of a SharedMemory, run all stages of its RankProgram, and return the outcome; -1 with an error set.
    int (*begin)(PyObject *memory, PyObject *program, const std::vector<char *> &buffers, const std::string &signature,
                 double slice_s);
};
