// The Python class Kernel.
#include "module.hpp"

#include "overlap.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <deque>

namespace {

const char *const DTYPE_NAMES[DTYPES] = {"bool",     "int8",    "int16",   "int32",     "int64",
                                         "uint8",    "uint16",  "uint32",  "uint64",    "float16",
                                         "bfloat16", "float32", "float64", "complex64", "complex128"};
const char *const OP_NAMES[OPS] = {"sum", "min", "max", "product", "exact_sum", "band", "bor", "bxor"};

struct KernelObject {
    PyObject_HEAD
    Kernel *kernel;
};

int index_of(const char *name, const char *const *names, int count) {
    for (int k = 0; k < count; k++)
        if (std::strcmp(name, names[k]) == 0) return k;
    return -1;
}

#if defined(__x86_64__) && defined(__GNUC__)
bool has_f16c() { // __builtin_cpu_supports does not support it in Clang before version 19
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool read_program(PyObject *fields, FusedProgram &program) {
    const Py_ssize_t count = PySequence_Size(fields);
    if (count != 3) return count >= 0 && value_error("a program is (slots, folds, results)");
    Ref slots(item(fields, 0)), folds(item(fields, 1)), results(item(fields, 2));
    if (!slots || !folds || !results) return false;
    long number = PyLong_AsLong(slots.object);
    if (number == -1 && PyErr_Occurred()) return false;
    program.slots = static_cast<int>(std::clamp<long>(number, -1, std::numeric_limits<int>::max())); // validated later
    const auto read_fold = [&](PyObject *one) {
        std::vector<int> numbers;
        if (!read_ints(one, numbers)) return false;
        if (numbers.empty()) return value_error("a fold is malformed");
        program.folds.push_back({numbers[0], {numbers.begin() + 1, numbers.end()}});
        return true;
    };
    return read_each(folds.object, read_fold) && read_ints(results.object, program.results);
}

bool read_kernel(Kernel &kernel, PyObject *args) {
    const char *isa, *op, *dtype, *accumulator, *result;
    PyObject *sizes, *programs, *segments, *weights = nullptr;
    if (!PyArg_ParseTuple(args, "sssssdiiOOO|O", &isa, &op, &dtype, &accumulator, &result, &kernel.divisor,
                          &kernel.sources, &kernel.results, &sizes, &programs, &segments, &weights))
        return false;
    kernel.isa = instruction_set(isa);
    int numbers[4] = {op_named(op), dtype_named(dtype), dtype_named(accumulator), dtype_named(result)};
    if (kernel.isa == nullptr || *std::min_element(numbers, numbers + 4) < 0) {
        PyErr_Format(PyExc_ValueError, "unknown instruction set, op or dtype among %s, %s, %s, %s, %s", isa, op, dtype,
                     accumulator, result);
        return false;
    }
    kernel.op = static_cast<Op>(numbers[0]);
    kernel.dtype = static_cast<DType>(numbers[1]);
    kernel.accumulator = static_cast<DType>(numbers[2]);
    kernel.result = static_cast<DType>(numbers[3]);
    const auto read_one_program = [&](PyObject *one) { return read_program(one, kernel.programs.emplace_back()); };
    const auto read_segment = [&](PyObject *one) {
        std::vector<int64_t> fields;
        if (!read_ints(one, fields)) return false;
        if (fields.size() != 4) return value_error("a segment is (tensor, start, stop, program)");
        const auto program = static_cast<int>(std::clamp<int64_t>(fields[3], -1, std::numeric_limits<int>::max()));
        kernel.segments.push_back({fields[0], fields[1], fields[2], program});
        return true;
    };
    if (weights != nullptr && !read_ints(weights, kernel.weights)) return false;
    if (!read_ints(sizes, kernel.sizes) || !read_each(programs, read_one_program) || !read_each(segments, read_segment))
        return false;
    const char *fault = validate(kernel);
    return fault == nullptr || value_error(fault);
}

PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<KernelObject>(type, [&](KernelObject &self) {
        self.kernel = new Kernel();
        return read_kernel(*self.kernel, args);
    });
}

void kernel_dealloc(PyObject *object) {
    delete reinterpret_cast<KernelObject *>(object)->kernel;
    free_object(object);
}

struct Operands { // the operands of one run
    std::vector<Py_buffer> buffers;
    std::deque<Strided> strided; // sources store pointers to the elements
    std::vector<Source> sources;
    std::vector<char *> results;
    ~Operands() {
        for (Py_buffer &buffer : buffers) PyBuffer_Release(&buffer);
    }
};

char *read_address(PyObject *object, int64_t size) {
    void *data = PyLong_AsVoidPtr(object);
    if (data == nullptr && size > 0 && !PyErr_Occurred()) value_error("the address of an array is 0");
    return static_cast<char *>(data);
}

// On macOS, Py_ssize_t and int64_t are two types of 8 bytes: long and long long.
template <class Int>
void add_strided(const Int *shape, const Int *strides, int axes, char *data, Operands &operands) {
    operands.strided.push_back({axes, {}, {}});
    std::copy(shape, shape + axes, operands.strided.back().shape);
    std::copy(strides, strides + axes, operands.strided.back().strides);
    operands.sources.push_back({data, &operands.strided.back()});
}

// Read a source that is a tuple of its address, shape and strides in bytes.
bool read_strided(PyObject *object, int64_t size, size_t itemsize, Operands &operands) {
    PyObject *address, *shape, *strides;
    std::vector<int64_t> sizes, steps;
    if (!PyArg_ParseTuple(object, "OOO", &address, &shape, &strides)) return false;
    char *data = read_address(address, size);
    if (PyErr_Occurred() || !read_ints(shape, sizes) || !read_ints(strides, steps)) return false;
    int64_t count = 1, along = static_cast<int64_t>(itemsize);
    bool fits = !sizes.empty() && sizes.size() == steps.size() && sizes.size() <= MAX_AXES;
    for (int64_t one : sizes) {
        fits = fits && one >= 0 && (count == 0 || one <= std::numeric_limits<int64_t>::max() / count);
        if (fits) count *= one;
    }
    for (size_t axis = 0; fits && count > 0 && axis < sizes.size(); axis++) {
        const int64_t most = std::numeric_limits<int64_t>::max() / (2 * MAX_AXES) / sizes[axis]; // extents do not overflow
        fits = sizes[axis] == 1 || (-most <= steps[axis] && steps[axis] <= most);
    }
    if (!fits || count != size) return value_error("the shape and strides of a source do not fit the kernel");
    bool contiguous = true; // in C order
    for (size_t axis = sizes.size(); axis-- > 0; along *= sizes[axis])
        contiguous = contiguous && (sizes[axis] == 1 || steps[axis] == along);
    if (contiguous || size == 0) operands.sources.push_back({data, nullptr});
    else add_strided(sizes.data(), steps.data(), static_cast<int>(sizes.size()), data, operands);
    return true;
}

bool read_buffer(PyObject *object, int flags, int64_t size, size_t itemsize, Operands &operands, Py_buffer &view) {
    if (PyObject_GetBuffer(object, &view, flags) < 0) return false;
    operands.buffers.push_back(view);
    const auto item_nbytes = static_cast<Py_ssize_t>(itemsize), nbytes = static_cast<Py_ssize_t>(size) * item_nbytes;
    const bool bytes = view.itemsize == 1 && PyBuffer_IsContiguous(&view, 'C'); // memory without a dtype
    if (view.len != nbytes)
        PyErr_Format(PyExc_ValueError, "the size of an array is %zd bytes, and must be %zd", view.len, nbytes);
    else if (!bytes && view.itemsize != item_nbytes)
        PyErr_Format(PyExc_ValueError, "the item size of an array is %zd bytes, and must be %zd", view.itemsize,
                     item_nbytes);
    return !PyErr_Occurred();
}

bool read_source(PyObject *object, int64_t size, size_t itemsize, Operands &operands) {
    if (PyLong_Check(object)) {
        operands.sources.push_back({read_address(object, size), nullptr});
        return !PyErr_Occurred();
    }
    if (PyTuple_Check(object)) return read_strided(object, size, itemsize, operands);
    Py_buffer view;
    if (!read_buffer(object, PyBUF_STRIDES, size, itemsize, operands, view)) return false;
    char *data = static_cast<char *>(view.buf);
    if (size == 0 || PyBuffer_IsContiguous(&view, 'C')) operands.sources.push_back({data, nullptr});
    else add_strided(view.shape, view.strides, view.ndim, data, operands);
    return true;
}

bool read_result(PyObject *object, int64_t size, size_t itemsize, Operands &operands) {
    if (PyLong_Check(object)) {
        operands.results.push_back(read_address(object, size));
        return !PyErr_Occurred();
    }
    Py_buffer view;
    if (!read_buffer(object, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS, size, itemsize, operands, view)) return false;
    operands.results.push_back(static_cast<char *>(view.buf));
    return true;
}

bool read_operands(const Kernel &kernel, PyObject *sources, PyObject *results, Operands &operands) {
    const auto tensors = static_cast<Py_ssize_t>(kernel.sizes.size());
    const size_t in = kernel.sizes.size() * static_cast<size_t>(kernel.sources);
    const size_t out = kernel.sizes.size() * static_cast<size_t>(kernel.results);
    if (PySequence_Size(sources) != tensors || PySequence_Size(results) != tensors)
        return !PyErr_Occurred() && value_error("the number of tensors differs from that of the kernel");
    operands.buffers.reserve(in + out);
    operands.sources.reserve(in);
    operands.results.reserve(out);
    for (Py_ssize_t t = 0; t < tensors; t++) {
        Ref row(item(sources, t)), result_row(item(results, t));
        if (!row || !result_row) return false;
        if (PySequence_Size(row.object) != kernel.sources || PySequence_Size(result_row.object) != kernel.results)
            return !PyErr_Occurred() && value_error("the number of sources or results differs from that of the kernel");
        int64_t size = kernel.sizes[static_cast<size_t>(t)];
        for (int s = 0; s < kernel.sources; s++) {
            Ref one(item(row.object, s));
            if (!one || !read_source(one.object, size, ITEMSIZES[kernel.dtype], operands)) return false;
        }
        for (int r = 0; r < kernel.results; r++) {
            Ref one(item(result_row.object, r));
            if (!one || !read_result(one.object, size, ITEMSIZES[kernel.result], operands)) return false;
        }
    }
    return true;
}

std::vector<Extent> extents_of(const Kernel &kernel, const Operands &operands) {
    std::vector<Extent> extents;
    const bool same_itemsize = ITEMSIZES[kernel.dtype] == ITEMSIZES[kernel.result];
    for (size_t t = 0; t < kernel.sizes.size(); t++) {
        if (kernel.sizes[t] == 0) continue;
        const auto out = kernel.sizes[t] * static_cast<int64_t>(ITEMSIZES[kernel.result]);
        const auto in = kernel.sizes[t] * static_cast<int64_t>(ITEMSIZES[kernel.dtype]);
        char *const *results = &operands.results[t * static_cast<size_t>(kernel.results)];
        for (int r = 0; r < kernel.results; r++)
            extents.push_back({results[r], results[r] + out, static_cast<int64_t>(t), r});
        for (int s = 0; s < kernel.sources; s++) {
            const Source &source = operands.sources[t * static_cast<size_t>(kernel.sources) + static_cast<size_t>(s)];
            const char *low = source.data, *high = source.data + in;
            if (source.strided != nullptr) {
                high = low + ITEMSIZES[kernel.dtype];
                for (int axis = 0; axis < source.strided->axes; axis++) {
                    int64_t reach = (source.strided->shape[axis] - 1) * source.strided->strides[axis];
                    if (reach < 0) low += reach;
                    else high += reach;
                }
            } else if (same_itemsize && std::find(results, results + kernel.results, low) != results + kernel.results) {
                continue; // a source that is itself a result is listed once, as the result
            }
            extents.push_back({low, high, static_cast<int64_t>(t), -1});
        }
    }
    return extents;
}

PyObject *kernel_run(PyObject *object, PyObject *args) {
    const Kernel &kernel = *reinterpret_cast<KernelObject *>(object)->kernel;
    PyObject *sources, *results;
    int threads, streaming, check_overlap;
    if (!PyArg_ParseTuple(args, "OOipp", &sources, &results, &threads, &streaming, &check_overlap)) return nullptr;
    if (threads < 1) return PyErr_Format(PyExc_ValueError, "the number of threads must be at least 1");
    try {
        Operands operands;
        if (!read_operands(kernel, sources, results, operands)) return nullptr;
        std::vector<Extent> extents, scratch;
        if (check_overlap) extents = extents_of(kernel, operands);
        if (const Extent *found = find_overlap(extents, scratch))
            return Py_BuildValue("LL", static_cast<long long>(found->tensor), static_cast<long long>(found->result));
        const auto run = [&](int on, bool streamed) {
            return run_kernel(kernel, operands.sources, operands.results, on, streamed);
        };
        const bool small = traffic_nbytes(kernel) <= MAX_NBYTES_WITH_LOCK;
        if (small ? run(1, false) : without_lock(false, [&] { return run(threads, streaming != 0); })) Py_RETURN_NONE;
    } catch (const std::exception &) { // bad_alloc
    }
    return PyErr_NoMemory();
}

PyMethodDef kernel_methods[] = {
    {"run", kernel_run, METH_VARARGS,
     "run(sources, results, threads, streaming, check_overlap): reduce a batch; see crossreduce.kernels.Kernel.run."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int op_named(const char *name) { return index_of(name, OP_NAMES, OPS); }
int dtype_named(const char *name) { return index_of(name, DTYPE_NAMES, DTYPES); }

const InstructionSet *instruction_set(const char *name) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (std::strcmp(name, "avx512") == 0 && isa_avx512 != nullptr && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return isa_avx512;
    if (std::strcmp(name, "avx2") == 0 && isa_avx2 != nullptr && __builtin_cpu_supports("avx2") && has_f16c())
        return isa_avx2;
#endif
    return std::strcmp(name, "baseline") == 0 ? &isa_baseline : nullptr;
}

const Kernel *kernel_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == reinterpret_cast<void *>(kernel_dealloc))
        return reinterpret_cast<KernelObject *>(object)->kernel;
    PyErr_SetString(PyExc_TypeError, "the object is not a compiled Kernel");
    return nullptr;
}

int add_kernel(PyObject *module) {
    return add_class<KernelObject>(module, "crossreduce.kernels._native.Kernel", kernel_new, kernel_dealloc, kernel_methods);
}
