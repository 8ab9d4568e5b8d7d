// What the files of the Python face share. Only the stable ABI of Python 3.11 is used.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <limits>
#include <string>
#include <vector>

#include "engine.hpp"

struct PlanObject {
    PyObject_HEAD
    Plan *plan;
};

// What a Plan object holds, or null with an error set.
const Plan *plan_of(PyObject *object);

// Add the classes Course and Arena to the module.
int add_arena(PyObject *module);

// A new reference to a sequence's element, or null with an error set.
inline PyObject *item(PyObject *sequence, Py_ssize_t k) {
    if (!PyType_HasFeature(Py_TYPE(sequence), Py_TPFLAGS_LIST_SUBCLASS)) return PySequence_GetItem(sequence, k);
    PyObject *found = PyList_GetItem(sequence, k);
    Py_XINCREF(found);
    return found;
}

// A new object, zeroed but for its head, or null with an error set.
template <class Object> Object *allocated(PyTypeObject *type) {
    return reinterpret_cast<Object *>(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
}

// Free an object whose own parts are gone already.
inline void release(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
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
        if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max()) {
            PyErr_SetString(PyExc_ValueError, "a number is out of range");
            return false;
        }
        to.push_back(static_cast<Int>(value));
    }
    return true;
}
