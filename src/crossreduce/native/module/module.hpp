// Helpers of the Python bindings. They use only the stable ABI of Python 3.11 (setup.py defines Py_LIMITED_API). For a
// free-threaded interpreter, which that ABI does not support, they are compiled for its version.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel.hpp"

// Add the class Kernel; RankProgram and SharedMemory; Mailboxes; Connections; UcxWorker; Observer; the functions of partial sums;
// FlowNetwork; TreeSearch; EventClock; or the custom calls of XLA. Return -1 with an error set if that fails.
int add_kernel(PyObject *module);
int add_xla_call(PyObject *module);
int add_process_calls(PyObject *module);
int add_shared_memory(PyObject *module);
int add_mailboxes(PyObject *module);
int add_connections(PyObject *module);
int add_ucx(PyObject *module);
int add_observer(PyObject *module);
int add_partial_sums(PyObject *module);
int add_flow_network(PyObject *module);
int add_tree_search(PyObject *module);
int add_event_clock(PyObject *module);

// Used by other compiled modules: see kernel_api.hpp.
bool can_begin(PyObject *memory);
void set_caller(PyObject *memory, bool inside);
bool is_unfinished(PyObject *memory);
int begin(PyObject *memory, PyObject *program, const std::vector<char *> &buffers, const std::string &signature,
          double slice_s);

// Return the kernel of a Kernel object, or null with an error set.
const Kernel *kernel_of(PyObject *object);

// A run with at most this traffic keeps the interpreter's lock: releasing and reacquiring it could take longer.
constexpr int64_t MAX_NBYTES_WITH_LOCK = 1 << 15;

// Return the number of an op or a dtype, or -1 if the name is unknown.
int op_named(const char *name);
int dtype_named(const char *name);

// Return the functions of an instruction set, or null if this build or this machine does not support it.
const InstructionSet *instruction_set(const char *name);

// The module's slots after its function Py_mod_exec.
#ifdef Py_GIL_DISABLED
#define END_OF_MODULE_SLOTS {Py_mod_gil, Py_MOD_GIL_NOT_USED}, {0, nullptr}
#else
#define END_OF_MODULE_SLOTS {0, nullptr}
#endif

// Return a new reference to an element of a sequence, or null with an error set.
inline PyObject *item(PyObject *sequence, Py_ssize_t k) {
#ifdef Py_GIL_DISABLED // another thread may remove the element between the two calls below
    return PyList_Check(sequence) ? PyList_GetItemRef(sequence, k) : PySequence_GetItem(sequence, k);
#else
    if (!PyList_Check(sequence)) return PySequence_GetItem(sequence, k);
    PyObject *found = PyList_GetItem(sequence, k);
    Py_XINCREF(found);
    return found;
#endif
}

// Return a new object, which is zero except for its header and is then completed by `fill`; or null with an error set,
// also if `fill` returns false or throws.
template <class Object, class Fill> PyObject *make_object(PyTypeObject *type, Fill &&fill) {
    PyObject *made = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (made == nullptr) return nullptr;
    try {
        if (fill(*reinterpret_cast<Object *>(made))) return made;
    } catch (const std::exception &) { // bad_alloc; length_error for a sequence that is longer than any memory
        PyErr_NoMemory();
    }
    Py_DECREF(made);
    return nullptr;
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

// Add a class to a module. Return -1 with an error set if that fails.
template <class Object> int add_class(PyObject *module, const char *name, PyType_Slot *slots) {
    PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
    Ref made(PyType_FromSpec(&spec));
    return made ? PyModule_AddType(module, reinterpret_cast<PyTypeObject *>(made.object)) : -1;
}

// Add a class with a constructor, a destructor and methods, or null.
template <class Object>
int add_class(PyObject *module, const char *name, newfunc construct, destructor destroy, PyMethodDef *methods) {
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void *>(construct)},
                           {Py_tp_dealloc, reinterpret_cast<void *>(destroy)},
                           {methods != nullptr ? Py_tp_methods : 0, methods},
                           {0, nullptr}};
    return add_class<Object>(module, name, slots);
}

// Call `read` with each element of a sequence until it returns false. Return whether all elements were read; if not, an
// error is set.
template <class Read> bool read_each(PyObject *sequence, Read &&read) {
    const Py_ssize_t size = PySequence_Size(sequence);
    for (Py_ssize_t k = 0; k < size; k++) {
        Ref one(item(sequence, k));
        if (!one || !read(one.object)) return false;
    }
    return size >= 0;
}

template <class Int> bool read_ints(PyObject *sequence, std::vector<Int> &to) {
    const Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) return false;
    to.reserve(static_cast<size_t>(size));
    return read_each(sequence, [&](PyObject *one) {
        const long long value = PyLong_AsLongLong(one);
        if (value == -1 && PyErr_Occurred()) return false;
        const auto narrowed = static_cast<Int>(value);
        if (static_cast<long long>(narrowed) != value || (std::is_unsigned<Int>::value && value < 0))
            return value_error("an integer is out of range");
        to.push_back(narrowed);
        return true;
    });
}

// Return a function with METH_FASTCALL as PyMethodDef has it.
template <class Function> PyCFunction as_function(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A method during which no other method of the object runs, except while a thread waits without the interpreter's lock.
// That lock ensures this; free-threaded interpreters have locks per object instead, which are released likewise.
template <PyObject *(*METHOD)(PyObject *, PyObject *)> PyObject *locked(PyObject *object, PyObject *args) {
#ifdef Py_GIL_DISABLED
    PyObject *result;
    Py_BEGIN_CRITICAL_SECTION(object);
    result = METHOD(object, args);
    Py_END_CRITICAL_SECTION();
    return result;
#else
    return METHOD(object, args);
#endif
}

// Call `run` without the interpreter's lock. Return its result, or `otherwise` if it throws.
template <class Result, class Run> Result without_lock(Result otherwise, Run &&run) {
    PyThreadState *state = PyEval_SaveThread();
    try {
        otherwise = run();
    } catch (const std::exception &) { // bad_alloc
    }
    PyEval_RestoreThread(state);
    return otherwise;
}
