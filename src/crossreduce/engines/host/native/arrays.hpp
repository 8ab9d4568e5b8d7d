// How the compiled call path reads and makes the arrays of one framework.
#pragma once

#include "kernel_api.hpp"

struct ArrayView { // an array in C order, in host memory
    char *data;
    const int64_t *sizes;
    int axes;
    int64_t dtype; // identifies the dtype among those of the framework
};

class ArrayAccess {
  public:
    virtual ~ArrayAccess() = default;
    // Return whether an array is one that needs no conversion and that nothing traces; if so, describe it. `written`:
    // whether it will be written into. A Python error may be set if the result is false.
    virtual bool view(PyObject *array, bool written, ArrayView &to) const = 0;
    // Return a new array with the sizes of `like` and another dtype, and its memory; or null with an error set.
    virtual PyObject *make(const ArrayView &like, int64_t dtype, size_t itemsize, char **data) const = 0;
    // Whether arrays may be used now. Asked once a call.
    virtual bool is_usable() const { return true; }
    // Tell the framework that arrays, in a tuple, were written into. Return false with an error set if that fails.
    virtual bool mark_written(PyObject *) const { return true; }
    // Return an object that must stay alive as long as the number of an array's dtype is used, or null.
    virtual PyObject *dtype_object(int64_t) const { return nullptr; }
};

// Return the access to the arrays of an object's class, or null. The classes are exact: a subclass has its own rules.
const ArrayAccess *access_of(PyObject *array);

extern size_t large_array_offset;  // of NumPy's large arrays from a cache line; see engines/host/numpy.py
int load_numpy();                  // return -1 with an error set if NumPy's C API cannot be used
const ArrayAccess *numpy_access(PyObject *array);
PyObject *use_torch(PyObject *, PyObject *args);
const ArrayAccess *torch_access(PyObject *array);

extern const KernelApi *kernel_api;
// From this size on, results use memory of the pool; see kernels.POOLED_BYTES.
constexpr size_t POOLED_NBYTES = size_t{1} << 17;
