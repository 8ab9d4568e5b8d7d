// The module crossreduce.kernels._native: result memory, instruction sets and threads; the classes of the other files.
#include "module.hpp"

#include <atomic>

#include "available_memory.hpp"
#include "kernel_api.hpp"
#include "memory_pool.hpp"
#include "thread_pool.hpp"

namespace {

struct MemoryObject {
    PyObject_HEAD
    void *data;
    Py_ssize_t nbytes;
};

PyObject *make_memory(PyTypeObject *type, Py_ssize_t nbytes) {
    return make_object<MemoryObject>(type, [&](MemoryObject &self) {
        self.nbytes = nbytes;
        self.data = allocate_memory(static_cast<size_t>(nbytes));
        if (self.data == nullptr) throw std::bad_alloc();
        return true;
    });
}

PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *) {
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "n", &nbytes)) return nullptr;
    if (nbytes < 0) return PyErr_Format(PyExc_ValueError, "the size of memory must not be negative");
    return make_memory(type, nbytes);
}

void memory_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<MemoryObject *>(object);
    if (self->data != nullptr) free_memory(self->data, static_cast<size_t>(self->nbytes));
    free_object(object);
}

int memory_buffer(PyObject *object, Py_buffer *view, int flags) {
    auto *self = reinterpret_cast<MemoryObject *>(object);
    return PyBuffer_FillInfo(view, object, self->data, self->nbytes, 0, flags);
}

Py_ssize_t memory_length(PyObject *object) { return reinterpret_cast<MemoryObject *>(object)->nbytes; }

PyType_Slot memory_slots[] = {{Py_tp_new, reinterpret_cast<void *>(memory_new)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(memory_dealloc)},
                              {Py_bf_getbuffer, reinterpret_cast<void *>(memory_buffer)},
                              {Py_sq_length, reinterpret_cast<void *>(memory_length)},
                              {0, nullptr}};

PyObject *usage(PyObject *, PyObject *) {
    MemoryUsage now = memory_usage();
    return Py_BuildValue("{s:n,s:n,s:n}", "live", static_cast<Py_ssize_t>(now.live), "pooled",
                         static_cast<Py_ssize_t>(now.pooled), "peak", static_cast<Py_ssize_t>(now.peak));
}

PyObject *empty(PyObject *, PyObject *) {
    empty_pool();
    Py_RETURN_NONE;
}

PyObject *trim(PyObject *, PyObject *args) {
    double later;
    Py_ssize_t available;
    if (!PyArg_ParseTuple(args, "dn", &later, &available)) return nullptr;
    trim_pool(later, static_cast<size_t>(available));
    Py_RETURN_NONE;
}

PyObject *available(PyObject *, PyObject *args) {
    const char *meminfo = "/proc/meminfo", *group = "/proc/self/cgroup", *groups = "/sys/fs/cgroup";
    if (!PyArg_ParseTuple(args, "|sss", &meminfo, &group, &groups)) return nullptr;
    return PyLong_FromSize_t(available_memory(meminfo, group, groups));
}

PyObject *supported(PyObject *, PyObject *) {
    PyObject *names = PyList_New(0);
    for (const char *name : {"avx512", "avx2", "baseline"}) {
        if (names == nullptr || instruction_set(name) == nullptr) continue;
        Ref text(PyUnicode_FromString(name));
        if (!text || PyList_Append(names, text.object) < 0) Py_CLEAR(names);
    }
    return names;
}

// The words of registers that processes share (ranks/intra_host/registers.py): aligned, of 64 bits.
std::atomic<uint64_t> *word_of(Py_buffer &view, Py_ssize_t index) {
    if (index >= 0 && index < view.len / 8 && reinterpret_cast<uintptr_t>(view.buf) % 8 == 0)
        return static_cast<std::atomic<uint64_t> *>(view.buf) + index;
    PyErr_SetString(PyExc_ValueError, "the index is not that of a word of the memory, or the memory is not aligned");
    return nullptr;
}

PyObject *load_word(PyObject *, PyObject *args) {
    Py_buffer view;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "w*n", &view, &index)) return nullptr;
    const std::atomic<uint64_t> *word = word_of(view, index);
    PyObject *found = word == nullptr ? nullptr : PyLong_FromUnsignedLongLong(word->load());
    PyBuffer_Release(&view);
    return found;
}

PyObject *store_word(PyObject *, PyObject *args) {
    Py_buffer view;
    Py_ssize_t index;
    unsigned long long value;
    if (!PyArg_ParseTuple(args, "w*nK", &view, &index, &value)) return nullptr;
    std::atomic<uint64_t> *word = word_of(view, index);
    if (word != nullptr) word->store(value);
    PyBuffer_Release(&view);
    if (word == nullptr) return nullptr;
    Py_RETURN_NONE;
}

PyObject *swap_word(PyObject *, PyObject *args) {
    Py_buffer view;
    Py_ssize_t index;
    unsigned long long before, after;
    if (!PyArg_ParseTuple(args, "w*nKK", &view, &index, &before, &after)) return nullptr;
    std::atomic<uint64_t> *word = word_of(view, index);
    uint64_t expected = before;
    const bool swapped = word != nullptr && word->compare_exchange_strong(expected, after);
    PyBuffer_Release(&view);
    return word == nullptr ? nullptr : PyBool_FromLong(swapped);
}

PyObject *helpers(PyObject *, PyObject *) { return PyLong_FromLong(helpers_started()); }

PyMethodDef functions[] = {
    {"supported", supported, METH_NOARGS, "Return the instruction sets that this machine supports, best first."},
    {"memory_usage", usage, METH_NOARGS, "Return the bytes of result memory in use, in the pool, and the most ever in use."},
    {"empty_pool", empty, METH_NOARGS, "Return pooled memory to the system."},
    {"trim_pool", trim, METH_VARARGS, "Trim the pool as if some seconds had passed and some bytes were left; for tests."},
    {"available_memory", available, METH_VARARGS, "Return the bytes that this process may still allocate."},
    {"load_word", load_word, METH_VARARGS, "Return a word of 64 bits of a buffer, which other processes may write."},
    {"store_word", store_word, METH_VARARGS, "Write a word of 64 bits of a buffer, after all earlier writes."},
    {"swap_word", swap_word, METH_VARARGS, "Replace a word of a buffer if it has the expected value; return whether it had."},
    {"helpers", helpers, METH_NOARGS, "Return the number of threads that the pool of this process has started."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject *memory_type = nullptr;

PyObject *new_memory(size_t nbytes, char **data) {
    PyObject *made = make_memory(memory_type, static_cast<Py_ssize_t>(nbytes));
    if (made != nullptr) *data = static_cast<char *>(reinterpret_cast<MemoryObject *>(made)->data);
    return made;
}

KernelApi api = {kernel_of,       traffic_nbytes, run_kernel, new_memory,    allocate_memory,
                 free_memory, can_begin,      set_caller, is_unfinished, begin};

// Whether a sum of several NaNs has the payload of the first one. Clang may swap the operands of an addition, and arm64
// prefers a signaling NaN.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
constexpr long FIRST_PAYLOAD = 1;
#else
constexpr long FIRST_PAYLOAD = 0;
#endif

int fill(PyObject *module) {
    if (add_class<MemoryObject>(module, "crossreduce.kernels._native.Memory", memory_slots) < 0) return -1;
    memory_type = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(module, "Memory")); // until the process ends
    Ref capsule(PyCapsule_New(&api, KERNEL_API, nullptr));
    if (memory_type == nullptr || !capsule || PyModule_AddObjectRef(module, "API", capsule.object) < 0) return -1;
    if (PyModule_AddIntMacro(module, FIRST_PAYLOAD) < 0) return -1;
    for (const auto add : {add_kernel, add_shared_memory, add_mailboxes, add_connections, add_ucx, add_observer, add_partial_sums,
                           add_flow_network, add_tree_search, add_event_clock})
        if (add(module) < 0) return -1;
    return add_xla_call(module) < 0 ? -1 : add_process_calls(module);
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill)}, END_OF_MODULE_SLOTS};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Compiled kernels; see crossreduce.kernels.", 0, functions,
                          module_slots, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
