// How the compiled call path reads and makes the arrays of one framework.
#pragma once

#include <memory>

#include "kernel_api.hpp"

constexpr int HOST = -1;

// Return a new tuple of objects, or null with an error set.
PyObject *tuple_of(const std::vector<PyObject *> &objects);

struct ArrayView { // an array in C order
    char *data;
    const int64_t *sizes;
    int axes;
    int64_t dtype; // identifies the dtype among those of the framework
    int device;    // the number of a CUDA device, or HOST
};

using TemporaryMemory = std::shared_ptr<void>; // the address that it holds is on a device

class ArrayAccess {
  public:
    virtual ~ArrayAccess() = default;
    // Return whether an array is one that needs no conversion and that nothing traces; if so, describe it. `written`:
    // whether it will be written into. A Python error may be set if the result is false.
    virtual bool view(PyObject *array, bool written, ArrayView &to) const = 0;
    // Describe many arrays; return false if `view` does for one of them.
    virtual bool view_all(const std::vector<PyObject *> &arrays, bool written, std::vector<ArrayView> &to) const {
        to.resize(arrays.size());
        for (size_t k = 0; k < arrays.size(); k++)
            if (!view(arrays[k], written, to[k])) return false;
        return true;
    }
    // The same as `view`, for arrays in host memory only.
    bool view_on_host(PyObject *array, bool written, ArrayView &to) const {
        return view(array, written, to) && to.device == HOST;
    }
    // Return a new array with the sizes of `like` and another dtype, and its memory; or null with an error set.
    virtual PyObject *make(const ArrayView &like, int64_t dtype, size_t itemsize, char **data) const = 0;
    // Whether new memory on CUDA devices must be taken as a block, even for one array.
    virtual bool prefers_blocks() const { return false; }
    // Return a new array of the framework's allocator, with the sizes, dtype and CUDA device of another one, and its
    // memory; or null with an error set.
    virtual PyObject *make_like(PyObject *, char **) const { return nullptr; }
    // The number of bytes to a multiple of which results begin in a block.
    virtual size_t alignment() const { return 1; }
    // Return a new array of `nbytes` bytes with undefined content, with the dtype and CUDA device of another one; or null
    // with an error set. `make_in` returns a new array with sizes and strides at an element of such a block, whose memory
    // it shares.
    virtual PyObject *make_block(PyObject *, size_t, char **) const { return nullptr; }
    virtual PyObject *make_in(PyObject *, PyObject *, PyObject *, size_t) const { return nullptr; }
    // Return temporary memory on a CUDA device, which its deleter frees; or null with an error set.
    virtual TemporaryMemory temporary(int, int64_t) const { return nullptr; }
    // Return whether the current stream of a CUDA device was found.
    virtual bool stream(int, uint64_t &) const { return false; }
    // Whether arrays may be used now. Each call asks once.
    virtual bool is_usable() const { return true; }
    // Tell the framework that arrays were written into. Return false with an error set if that fails.
    virtual bool mark_written(const std::vector<PyObject *> &) const { return true; }
    // Return an object that must stay alive as long as the number of an array's dtype is used, or null.
    virtual PyObject *dtype_object(int64_t) const { return nullptr; }
};

// Return the access to the arrays of an object's class, or null. The classes are exact: a subclass has its own rules.
const ArrayAccess *access_of(PyObject *array);

extern size_t large_array_offset;  // of NumPy's large arrays from a cache line; see frameworks/numpy/host_memory.py
int load_numpy();                  // return -1 with an error set if NumPy's C API cannot be used
const ArrayAccess *numpy_access(PyObject *array);
PyObject *use_torch(PyObject *, PyObject *args);
PyObject *use_torch_layout(PyObject *, PyObject *args);
PyObject *use_torch_devices(PyObject *, PyObject *args);
PyObject *use_device_type(PyObject *, PyObject *number);
const ArrayAccess *torch_access(PyObject *array);

extern const KernelApi *kernel_api;
extern const struct CudaApi *cuda_api; // null until a plan is prepared; see engines/cuda/native/cuda_api.hpp
// From this size on, results use memory of the pool; see kernels.POOLED_BYTES.
constexpr size_t POOLED_NBYTES = size_t{1} << 17;
