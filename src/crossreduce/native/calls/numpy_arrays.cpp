// NumPy arrays in the compiled call path.
#include "arrays.hpp"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>

namespace {

static_assert(sizeof(npy_intp) == sizeof(int64_t), "sizes are passed without a conversion");

class NumPyAccess final : public ArrayAccess {
  public:
    bool view(PyObject *object, bool written, ArrayView &to) const override {
        if (!PyArray_CheckExact(object)) return false;
        auto *array = reinterpret_cast<PyArrayObject *>(object);
        const int needed = NPY_ARRAY_C_CONTIGUOUS | (written ? NPY_ARRAY_WRITEABLE : 0);
        if ((PyArray_FLAGS(array) & needed) != needed || !PyArray_ISNOTSWAPPED(array)) return false;
        to = {PyArray_BYTES(array), reinterpret_cast<const int64_t *>(PyArray_DIMS(array)), PyArray_NDIM(array),
              reinterpret_cast<int64_t>(PyArray_DESCR(array)), HOST};
        return true;
    }

    PyObject *make(const ArrayView &like, int64_t dtype, size_t itemsize, char **data) const override {
        npy_intp sizes[NPY_MAXDIMS];
        size_t nbytes = itemsize;
        for (int axis = 0; axis < like.axes; axis++) {
            sizes[axis] = like.sizes[axis];
            nbytes *= static_cast<size_t>(sizes[axis]);
        }
        char *memory = nullptr;
        const size_t offset = nbytes < POOLED_NBYTES ? 0 : large_array_offset;
        Ref owner(nbytes < POOLED_NBYTES ? nullptr : kernel_api->new_memory(nbytes + offset, &memory));
        if (!owner && nbytes >= POOLED_NBYTES) return nullptr;
        PyObject *descriptor = reinterpret_cast<PyObject *>(dtype);
        Py_IncRef(descriptor); // NewFromDescr steals it; why not Py_INCREF: see empty() in native/arrays
        PyObject *made = PyArray_NewFromDescr(&PyArray_Type, reinterpret_cast<PyArray_Descr *>(descriptor), like.axes,
                                              sizes, nullptr, owner ? memory + offset : nullptr,
                                              owner ? NPY_ARRAY_CARRAY : 0, nullptr);
        if (made == nullptr) return nullptr;
        auto *array = reinterpret_cast<PyArrayObject *>(made);
        *data = PyArray_BYTES(array);
        if (owner) {
            PyObject *base = owner.object;
            Py_INCREF(base); // SetBaseObject steals a reference
            if (PyArray_SetBaseObject(array, base) < 0) {
                Py_DECREF(made);
                return nullptr;
            }
        }
        return made;
    }

    PyObject *dtype_object(int64_t dtype) const override { return reinterpret_cast<PyObject *>(dtype); }
};

const NumPyAccess arrays;

} // namespace

size_t large_array_offset = 0;

int load_numpy() { return PyArray_ImportNumPyAPI(); }

const ArrayAccess *numpy_access(PyObject *array) { return PyArray_CheckExact(array) ? &arrays : nullptr; }
