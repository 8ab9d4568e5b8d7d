// Two functions that run for every tensor of a batch of NumPy arrays, without a Python object per array and property.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>

namespace {

PyArrayObject *exact(PyObject *object) {
    return PyArray_CheckExact(object) ? reinterpret_cast<PyArrayObject *>(object) : nullptr;
}

PyObject *uniform(PyObject *, PyObject *values) {
    const Py_ssize_t count = PyTuple_Size(values);
    if (count < 0) return nullptr;
    PyArrayObject *first = count > 0 ? exact(PyTuple_GetItem(values, 0)) : nullptr;
    if (first == nullptr || !PyArray_ISNOTSWAPPED(first)) Py_RETURN_NONE;
    const int ndim = PyArray_NDIM(first);
    const npy_intp *sizes = PyArray_DIMS(first);
    for (Py_ssize_t k = 1; k < count; k++) {
        PyArrayObject *x = exact(PyTuple_GetItem(values, k));
        if (x == nullptr || PyArray_DESCR(x) != PyArray_DESCR(first) || PyArray_NDIM(x) != ndim ||
            !std::equal(sizes, sizes + ndim, PyArray_DIMS(x)))
            Py_RETURN_NONE;
    }
    PyObject *shape = PyTuple_New(ndim);
    for (int axis = 0; shape != nullptr && axis < ndim; axis++) {
        PyObject *size = PyLong_FromSsize_t(sizes[axis]);
        if (size == nullptr || PyTuple_SetItem(shape, axis, size) < 0) Py_CLEAR(shape);
    }
    return shape == nullptr ? nullptr : Py_BuildValue("(NO)", shape, reinterpret_cast<PyObject *>(PyArray_DESCR(first)));
}

PyObject *empty(PyObject *, PyObject *args) {
    PyObject *shape, *dtype;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyTuple_Type, &shape, &PyArrayDescr_Type, &dtype, &count)) return nullptr;
    npy_intp sizes[NPY_MAXDIMS];
    const Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim > NPY_MAXDIMS) return PyErr_Format(PyExc_ValueError, "an array cannot have %zd axes", ndim);
    for (Py_ssize_t axis = 0; axis < ndim; axis++) {
        sizes[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
        if (sizes[axis] == -1 && PyErr_Occurred()) return nullptr;
    }
    PyObject *made = PyList_New(count);
    for (Py_ssize_t k = 0; made != nullptr && k < count; k++) {
        // NewFromDescr steals a reference. With Python 3.14, NumPy's dtypes are immortal, and it does not return references
        // to them. The macro Py_INCREF of older headers counts these all the same, so the count would grow without end.
        Py_IncRef(dtype);
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, reinterpret_cast<PyArray_Descr *>(dtype),
                                               static_cast<int>(ndim), sizes, nullptr, nullptr, 0, nullptr);
        if (array == nullptr || PyList_SetItem(made, k, array) < 0) Py_CLEAR(made);
    }
    return made;
}

PyMethodDef functions[] = {
    {"uniform", uniform, METH_O,
     "uniform(values): return the shape and dtype that all arrays of a tuple have, or None. None also if a value is not "
     "exactly a NumPy array in native byte order."},
    {"empty", empty, METH_VARARGS, "empty(shape, dtype, count): return a list of `count` new arrays."},
    {nullptr, nullptr, 0, nullptr}};

int fill(PyObject *) { return PyArray_ImportNumPyAPI(); }

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill)},
#ifdef Py_GIL_DISABLED
                            {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                            {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_numpy_arrays",
                          "See crossreduce.frameworks.numpy.", 0, functions, slots,
                          nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__numpy_arrays() { return PyModuleDef_Init(&definition); }
