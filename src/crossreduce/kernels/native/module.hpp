// Helpers of the Python bindings. They use only the stable ABI of Python 3.11.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <limits>
#include <string>
#include <vector>

#include "kernel.hpp"

// Add the class Kernel, or the classes RankProgram and SharedMemory. Return -1 with an error set if that fails.
int add_kernel(PyObject *module);
int add_shared_memory(PyObject *module);

// Return the kernel of a Kernel object, or null with an error set.
const Kernel *kernel_of(PyObject *object);

// Return the functions of an instruction set, or null if this build or this machine does not support it.
const InstructionSet *instruction_set(const char *name);

// Return a new reference to an element of a sequence, or null with an error set.
inline PyObject *item(PyObject *sequence, Py_ssize_t k) {
    if (!PyType_HasFeature(Py_TYPE(sequence), Py_TPFLAGS_LIST_SUBCLASS)) return PySequence_GetItem(sequence, k);
    PyObject *found = PyList_GetItem(sequence, k);
    Py_XINCREF(found);
    return found;
}

// Return a new object, zero except for its header, or null with an error set.
template <class Object> Object *allocate(PyTypeObject *type) {
    return reinterpret_cast<Object *>(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
}

// Free the memory of an object whose members are already destroyed.
inline void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

// Set a ValueError and return false.
inline bool value_error(const char *text) {
    PyErr_SetString(PyExc_ValueError, text);
    return false;
}

struct Ref { // owns one reference
    PyObject *object;
    explicit Ref(PyObject *made) : object(made) {}
    Ref(const Ref &) = delete;
    Ref &operator=(const Ref &) = delete;
    ~Ref() { Py_XDECREF(object); }
    explicit operator bool() const { return object != nullptr; }
};

template <class Int> bool read_ints(PyObject *sequence, std::vector<Int> &to) {
    Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) return false;
    to.reserve(static_cast<size_t>(size));
    for (Py_ssize_t k = 0; k < size; k++) {
        Ref one(item(sequence, k));
        if (!one) return false;
        long long value = PyLong_AsLongLong(one.object);
        if (value == -1 && PyErr_Occurred()) return false;
        if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max())
            return value_error("an integer is out of range");
        to.push_back(static_cast<Int>(value));
    }
    return true;
}
