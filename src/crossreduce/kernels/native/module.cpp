// The Python face of the kernels: Plan, Memory, and what this machine offers. Only the stable ABI of Python 3.11 is used.
#include "face.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "memory.hpp"
#include "pool.hpp"

namespace {

const char *const TYPE_NAMES[TYPES] = {"bool",   "int8",    "int16",    "int32",   "int64",   "uint8",     "uint16", "uint32",
                                       "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};
const char *const OP_NAMES[OPS] = {"sum", "min", "max", "product"};
// A run that moves less keeps the interpreter's lock: to give it up and get it back could take longer.
constexpr int64_t QUICK = 1 << 15;

int named(const char *name, const char *const *names, int count) {
    for (int k = 0; k < count; k++)
        if (std::strcmp(name, names[k]) == 0) return k;
    return -1;
}

#if defined(__x86_64__) && defined(__GNUC__)
bool has_f16c() { // Clang's __builtin_cpu_supports does not know it before version 19
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const Tiles *tiles_named(const char *name) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (std::strcmp(name, "avx512") == 0 && tiles_avx512 != nullptr && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return tiles_avx512;
    if (std::strcmp(name, "avx2") == 0 && tiles_avx2 != nullptr && __builtin_cpu_supports("avx2") && has_f16c())
        return tiles_avx2;
#endif
    return std::strcmp(name, "baseline") == 0 ? &tiles_baseline : nullptr;
}

// Plan

bool read_program(PyObject *given, Program &program) {
    Py_ssize_t parts = PySequence_Size(given);
    if (parts < 0) return false;
    if (parts != 3) {
        PyErr_SetString(PyExc_ValueError, "a program is (slots, folds, results)");
        return false;
    }
    Ref slots(item(given, 0)), folds(item(given, 1)), results(item(given, 2));
    if (!slots || !folds || !results) return false;
    long most = PyLong_AsLong(slots.object);
    if (most == -1 && PyErr_Occurred()) return false;
    program.slots = static_cast<int>(std::clamp<long>(most, -1, std::numeric_limits<int>::max())); // check refuses both
    Py_ssize_t count = PySequence_Size(folds.object);
    if (count < 0) return false;
    for (Py_ssize_t k = 0; k < count; k++) {
        Ref one(item(folds.object, k));
        std::vector<int> numbers;
        if (!one || !read_ints(one.object, numbers)) return false;
        if (numbers.empty()) {
            PyErr_SetString(PyExc_ValueError, "a fold is malformed");
            return false;
        }
        program.folds.push_back({numbers[0], {numbers.begin() + 1, numbers.end()}});
    }
    return read_ints(results.object, program.results);
}

bool read_plan(Plan &plan, PyObject *args) {
    const char *isa, *op, *dtype, *accumulator, *result;
    PyObject *sizes, *programs, *segments;
    if (!PyArg_ParseTuple(args, "sssssdiiOOO", &isa, &op, &dtype, &accumulator, &result, &plan.divisor, &plan.sources,
                          &plan.results, &sizes, &programs, &segments))
        return false;
    plan.tiles = tiles_named(isa);
    int numbers[4] = {named(op, OP_NAMES, OPS), named(dtype, TYPE_NAMES, TYPES), named(accumulator, TYPE_NAMES, TYPES),
                      named(result, TYPE_NAMES, TYPES)};
    if (plan.tiles == nullptr || *std::min_element(numbers, numbers + 4) < 0) {
        PyErr_Format(PyExc_ValueError, "unknown to the kernels: one of %s, %s, %s, %s, %s", isa, op, dtype, accumulator,
                     result);
        return false;
    }
    plan.op = static_cast<Op>(numbers[0]);
    plan.dtype = static_cast<Type>(numbers[1]);
    plan.accumulator = static_cast<Type>(numbers[2]);
    plan.result = static_cast<Type>(numbers[3]);
    if (!read_ints(sizes, plan.sizes)) return false;
    Py_ssize_t count = PySequence_Size(programs);
    if (count < 0) return false;
    for (Py_ssize_t k = 0; k < count; k++) {
        Ref one(item(programs, k));
        plan.programs.emplace_back();
        if (!one || !read_program(one.object, plan.programs.back())) return false;
    }
    count = PySequence_Size(segments);
    if (count < 0) return false;
    for (Py_ssize_t k = 0; k < count; k++) {
        Ref one(item(segments, k));
        std::vector<int64_t> four;
        if (!one || !read_ints(one.object, four)) return false;
        if (four.size() != 4) {
            PyErr_SetString(PyExc_ValueError, "a segment is (tensor, start, stop, program)");
            return false;
        }
        const auto program = static_cast<int>(std::clamp<int64_t>(four[3], -1, std::numeric_limits<int>::max()));
        plan.segments.push_back({four[0], four[1], four[2], program});
    }
    const char *problem = check(plan);
    if (problem != nullptr) PyErr_SetString(PyExc_ValueError, problem);
    return problem == nullptr;
}

PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *) {
    auto *self = allocated<PlanObject>(type);
    if (self == nullptr) return nullptr;
    PyObject *made = reinterpret_cast<PyObject *>(self);
    try {
        self->plan = new Plan();
        if (read_plan(*self->plan, args)) return made;
    } catch (const std::exception &) { // bad_alloc, or length_error for what is longer than any memory
        PyErr_NoMemory();
    }
    Py_DECREF(made);
    return nullptr;
}

void plan_dealloc(PyObject *object) {
    delete reinterpret_cast<PlanObject *>(object)->plan;
    release(object);
}

// What a run was given, held until it is over.
struct Given {
    std::vector<Py_buffer> buffers;
    std::vector<Strided> strided;
    std::vector<Operand> sources;
    std::vector<char *> results;
    ~Given() {
        for (Py_buffer &buffer : buffers) PyBuffer_Release(&buffer);
    }
};

bool is_address(PyObject *object) { return PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_LONG_SUBCLASS); }
bool is_tuple(PyObject *object) { return PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_TUPLE_SUBCLASS); }

char *read_address(PyObject *object, int64_t size) {
    void *data = PyLong_AsVoidPtr(object);
    if (data == nullptr && size > 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "nothing lies at address 0");
    return static_cast<char *>(data);
}

// An array's address, shape and strides in bytes, as a tuple.
bool read_strided(PyObject *object, int64_t size, size_t itemsize, Given &given) {
    PyObject *address, *shape, *strides;
    std::vector<int64_t> sizes, steps;
    if (!PyArg_ParseTuple(object, "OOO", &address, &shape, &strides)) return false;
    char *data = read_address(address, size);
    if (PyErr_Occurred() || !read_ints(shape, sizes) || !read_ints(strides, steps)) return false;
    int64_t count = 1, along = static_cast<int64_t>(itemsize);
    bool fits = !sizes.empty() && sizes.size() == steps.size() && sizes.size() <= MOST_AXES;
    for (int64_t one : sizes) {
        fits = fits && one >= 0 && (count == 0 || one <= std::numeric_limits<int64_t>::max() / count);
        if (fits) count *= one;
    }
    if (!fits || count != size) {
        PyErr_SetString(PyExc_ValueError, "a strided source does not fit the plan");
        return false;
    }
    bool dense = true; // one run of memory in C order after all
    for (size_t axis = sizes.size(); axis-- > 0; along *= sizes[axis]) dense = dense && (sizes[axis] == 1 || steps[axis] == along);
    if (dense || size == 0) {
        given.sources.push_back({data, nullptr});
        return true;
    }
    given.strided.push_back({static_cast<int>(sizes.size()), {}, {}});
    std::copy(sizes.begin(), sizes.end(), given.strided.back().shape);
    std::copy(steps.begin(), steps.end(), given.strided.back().strides);
    given.sources.push_back({data, &given.strided.back()});
    return true;
}

bool read_source(PyObject *object, int64_t size, size_t itemsize, Given &given) {
    if (is_address(object)) {
        given.sources.push_back({read_address(object, size), nullptr});
        return !PyErr_Occurred();
    }
    if (is_tuple(object)) return read_strided(object, size, itemsize, given);
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_STRIDES) < 0) return false;
    given.buffers.push_back(view);
    if (view.len != size * static_cast<Py_ssize_t>(itemsize)) {
        PyErr_SetString(PyExc_ValueError, "a source has another size than the plan");
        return false;
    }
    if (size == 0 || PyBuffer_IsContiguous(&view, 'C')) {
        given.sources.push_back({static_cast<char *>(view.buf), nullptr});
        return true;
    }
    given.strided.push_back({view.ndim, {}, {}});
    std::copy(view.shape, view.shape + view.ndim, given.strided.back().shape);
    std::copy(view.strides, view.strides + view.ndim, given.strided.back().strides);
    given.sources.push_back({static_cast<char *>(view.buf), &given.strided.back()});
    return true;
}

bool read_result(PyObject *object, int64_t size, size_t itemsize, Given &given) {
    if (is_address(object)) {
        given.results.push_back(read_address(object, size));
        return !PyErr_Occurred();
    }
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) return false;
    given.buffers.push_back(view);
    if (view.len != size * static_cast<Py_ssize_t>(itemsize)) {
        PyErr_SetString(PyExc_ValueError, "a result has another size than the plan");
        return false;
    }
    given.results.push_back(static_cast<char *>(view.buf));
    return true;
}

struct Range {
    const char *start, *stop;
    int64_t tensor, number; // number: of the result, or -1 for a source
};

// Return the first result that shares memory with another one, or with a source other than by being it.
bool find_overlap(const Plan &plan, const Given &given, int64_t &tensor, int64_t &number) {
    std::vector<Range> ranges;
    const bool same_size = SIZES[plan.dtype] == SIZES[plan.result];
    for (size_t t = 0; t < plan.sizes.size(); t++) {
        if (plan.sizes[t] == 0) continue;
        const auto out = plan.sizes[t] * static_cast<int64_t>(SIZES[plan.result]);
        const auto in = plan.sizes[t] * static_cast<int64_t>(SIZES[plan.dtype]);
        for (int r = 0; r < plan.results; r++) {
            const char *data = given.results[t * static_cast<size_t>(plan.results) + static_cast<size_t>(r)];
            ranges.push_back({data, data + out, static_cast<int64_t>(t), r});
        }
        for (int s = 0; s < plan.sources; s++) {
            const Operand &source = given.sources[t * static_cast<size_t>(plan.sources) + static_cast<size_t>(s)];
            const char *low = source.data, *high = source.data + in;
            if (source.strided != nullptr) {
                high = low + SIZES[plan.dtype];
                for (int axis = 0; axis < source.strided->axes; axis++) {
                    int64_t reach = (source.strided->shape[axis] - 1) * source.strided->strides[axis];
                    if (reach < 0) low += reach;
                    else high += reach;
                }
            } else if (same_size) {
                bool in_place = false;
                for (int r = 0; r < plan.results; r++)
                    in_place = in_place ||
                               given.results[t * static_cast<size_t>(plan.results) + static_cast<size_t>(r)] == low;
                if (in_place) continue; // the result stands for it
            }
            ranges.push_back({low, high, static_cast<int64_t>(t), -1});
        }
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.start < b.start; });
    const Range *furthest = nullptr, *furthest_result = nullptr; // of those that start before
    for (const Range &range : ranges) {
        const Range *other = range.number >= 0 ? furthest : furthest_result;
        if (other != nullptr && other->stop > range.start) {
            const Range &result = range.number >= 0 ? range : *other;
            tensor = result.tensor;
            number = result.number;
            return true;
        }
        if (furthest == nullptr || range.stop > furthest->stop) furthest = &range;
        if (range.number >= 0 && (furthest_result == nullptr || range.stop > furthest_result->stop))
            furthest_result = &range;
    }
    return false;
}

bool read_given(const Plan &plan, PyObject *sources, PyObject *results, Given &given) {
    const auto tensors = static_cast<Py_ssize_t>(plan.sizes.size());
    const size_t in = plan.sizes.size() * static_cast<size_t>(plan.sources);
    const size_t out = plan.sizes.size() * static_cast<size_t>(plan.results);
    if (PySequence_Size(sources) != tensors || PySequence_Size(results) != tensors) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there are more or fewer tensors than in the plan");
        return false;
    }
    given.buffers.reserve(in + out);
    given.sources.reserve(in);
    given.results.reserve(out);
    for (Py_ssize_t t = 0; t < tensors; t++) {
        Ref of_tensor(item(sources, t)), to_tensor(item(results, t));
        if (!of_tensor || !to_tensor) return false;
        if (PySequence_Size(of_tensor.object) != plan.sources || PySequence_Size(to_tensor.object) != plan.results) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a tensor has too many or too few sources or results");
            return false;
        }
    }
    given.strided.reserve(in); // their addresses are kept, so they must not move
    for (Py_ssize_t t = 0; t < tensors; t++) {
        Ref of_tensor(item(sources, t)), to_tensor(item(results, t));
        if (!of_tensor || !to_tensor) return false;
        int64_t size = plan.sizes[static_cast<size_t>(t)];
        for (int s = 0; s < plan.sources; s++) {
            Ref one(item(of_tensor.object, s));
            if (!one || !read_source(one.object, size, SIZES[plan.dtype], given)) return false;
        }
        for (int r = 0; r < plan.results; r++) {
            Ref one(item(to_tensor.object, r));
            if (!one || !read_result(one.object, size, SIZES[plan.result], given)) return false;
        }
    }
    return true;
}

// run(sources, results, threads, streaming, apart) -> None, or (tensor, result) of a result that overlaps
PyObject *plan_run(PyObject *object, PyObject *args) {
    const Plan &plan = *reinterpret_cast<PlanObject *>(object)->plan;
    PyObject *sources, *results;
    int threads, streaming, apart;
    if (!PyArg_ParseTuple(args, "OOipp", &sources, &results, &threads, &streaming, &apart)) return nullptr;
    if (threads < 1) {
        PyErr_SetString(PyExc_ValueError, "there must be one thread at least");
        return nullptr;
    }
    try {
        Given given;
        if (!read_given(plan, sources, results, given)) return nullptr;
        int64_t tensor, number;
        if (apart && find_overlap(plan, given, tensor, number)) {
            return Py_BuildValue("LL", static_cast<long long>(tensor), static_cast<long long>(number));
        }
        bool done;
        if (traffic(plan) <= QUICK) {
            done = run(plan, given.sources, given.results, 1, false);
        } else {
            PyThreadState *state = PyEval_SaveThread();
            try {
                done = run(plan, given.sources, given.results, threads, streaming != 0);
            } catch (const std::bad_alloc &) {
                done = false;
            }
            PyEval_RestoreThread(state);
        }
        if (!done) return PyErr_NoMemory();
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

PyMethodDef plan_methods[] = {
    {"run", plan_run, METH_VARARGS,
     "run(sources, results, threads, streaming, apart): for each tensor a list of sources and one of results, each a "
     "buffer or an address; a source also (address, shape, strides). apart: look for results that overlap first, and "
     "return (tensor, result) of one where there is, with nothing written."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot plan_slots[] = {{Py_tp_new, reinterpret_cast<void *>(plan_new)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(plan_dealloc)},
                            {Py_tp_methods, plan_methods},
                            {0, nullptr}};
PyType_Spec plan_spec = {"crossreduce.kernels._native.Kernel", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, plan_slots};

// Memory

struct MemoryObject {
    PyObject_HEAD
    void *data;
    Py_ssize_t size;
};

PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *) {
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "n", &size)) return nullptr;
    if (size < 0) {
        PyErr_SetString(PyExc_ValueError, "memory has no negative size");
        return nullptr;
    }
    auto *self = allocated<MemoryObject>(type);
    if (self == nullptr) return nullptr;
    PyObject *made = reinterpret_cast<PyObject *>(self);
    self->size = size;
    self->data = take_memory(static_cast<size_t>(size));
    if (self->data != nullptr) return made;
    Py_DECREF(made);
    return PyErr_NoMemory();
}

void memory_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<MemoryObject *>(object);
    if (self->data != nullptr) give_memory(self->data, static_cast<size_t>(self->size));
    release(object);
}

int memory_buffer(PyObject *object, Py_buffer *view, int flags) {
    auto *self = reinterpret_cast<MemoryObject *>(object);
    return PyBuffer_FillInfo(view, object, self->data, self->size, 0, flags);
}

Py_ssize_t memory_length(PyObject *object) { return reinterpret_cast<MemoryObject *>(object)->size; }

PyType_Slot memory_slots[] = {{Py_tp_new, reinterpret_cast<void *>(memory_new)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(memory_dealloc)},
                              {Py_bf_getbuffer, reinterpret_cast<void *>(memory_buffer)},
                              {Py_sq_length, reinterpret_cast<void *>(memory_length)},
                              {0, nullptr}};
PyType_Spec memory_spec = {"crossreduce.kernels._native.Memory", sizeof(MemoryObject), 0, Py_TPFLAGS_DEFAULT,
                           memory_slots};

// The module

PyObject *usage(PyObject *, PyObject *) {
    Usage now = memory_usage();
    return Py_BuildValue("{s:n,s:n,s:n}", "live", static_cast<Py_ssize_t>(now.live), "pooled",
                         static_cast<Py_ssize_t>(now.kept), "peak", static_cast<Py_ssize_t>(now.peak));
}

PyObject *drop(PyObject *, PyObject *) {
    drop_kept();
    Py_RETURN_NONE;
}

PyObject *supported(PyObject *, PyObject *) {
    const char *const all[] = {"avx512", "avx2", "baseline"};
    PyObject *names = PyList_New(0);
    for (const char *name : all) {
        if (names == nullptr || tiles_named(name) == nullptr) continue;
        Ref text(PyUnicode_FromString(name));
        if (!text || PyList_Append(names, text.object) < 0) {
            Py_DECREF(names);
            return nullptr;
        }
    }
    return names;
}

PyObject *helpers(PyObject *, PyObject *) { return PyLong_FromLong(pool_size()); }

PyMethodDef functions[] = {
    {"supported", supported, METH_NOARGS, "The instruction sets that are compiled in and run here, best first."},
    {"usage", usage, METH_NOARGS, "Bytes of result memory: live, kept for reuse, and the most that were live."},
    {"empty_pool", drop, METH_NOARGS, "Return the kept memory to the system."},
    {"helpers", helpers, METH_NOARGS, "How many threads of the pool this process has."},
    {nullptr, nullptr, 0, nullptr}};

int fill(PyObject *module) {
    Ref plan(PyType_FromSpec(&plan_spec)), memory(PyType_FromSpec(&memory_spec));
    if (!plan || !memory) return -1;
    if (PyModule_AddObjectRef(module, "Kernel", plan.object) < 0) return -1;
    if (PyModule_AddObjectRef(module, "Memory", memory.object) < 0) return -1;
    return add_arena(module);
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_native",
                          "Compiled kernels; see crossreduce.kernels.",
                          0,
                          functions,
                          module_slots,
                          nullptr,
                          nullptr,
                          nullptr};

} // namespace

const Plan *plan_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == reinterpret_cast<void *>(plan_dealloc))
        return reinterpret_cast<PlanObject *>(object)->plan;
    PyErr_SetString(PyExc_TypeError, "this is no plan of the compiled kernels");
    return nullptr;
}

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
