// The Python functions of partial sums; see partial_sums.hpp and ranks/intra_host/partial_sums.py.
#include "module.hpp"

#include <cstring>

#include "exact.hpp"
#include "partial_sums.hpp"

namespace {

// Read the terms of `size` sums. `overflow` consists of the bytes of overflow terms.
bool read_terms(const char *isa, const char *dtype, PyObject *sources, const Py_buffer &overflow, Py_ssize_t size,
                const InstructionSet *&set, Terms &terms) {
    set = instruction_set(isa);
    const int number = dtype_named(dtype);
    if (set == nullptr || number < 0 || set->partial[number] == nullptr || size < 0)
        return value_error("an unknown instruction set, a dtype that has no partial sums, or a negative size");
    terms.dtype = static_cast<DType>(number);
    const auto read = [&](PyObject *one) {
        terms.sources.push_back(static_cast<const char *>(PyLong_AsVoidPtr(one)));
        return !PyErr_Occurred();
    };
    if (!read_each(sources, read)) return false;
    terms.overflow.resize(static_cast<size_t>(overflow.len) / sizeof(OverflowTerm));
    if (terms.sources.empty() || overflow.len != static_cast<Py_ssize_t>(terms.overflow.size() * sizeof(OverflowTerm)))
        return value_error("no sources, or a part of an overflow term");
    if (overflow.len > 0) std::memcpy(terms.overflow.data(), overflow.buf, static_cast<size_t>(overflow.len));
    for (const OverflowTerm &each : terms.overflow)
        if (each.element < 0 || each.element >= size) return value_error("an overflow term is outside of the array");
    return true;
}

struct Buffer { // releases a buffer
    Py_buffer view{};
    ~Buffer() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
};

PyObject *split(PyObject *, PyObject *args) {
    const char *isa, *dtype;
    PyObject *sources, *high, *low;
    Buffer overflow;
    Py_ssize_t size;
    long long first;
    if (!PyArg_ParseTuple(args, "ssOy*OOnL", &isa, &dtype, &sources, &overflow.view, &high, &low, &size, &first))
        return nullptr;
    try {
        const InstructionSet *set;
        Terms terms;
        if (!read_terms(isa, dtype, sources, overflow.view, size, set, terms)) return nullptr;
        auto *const to = static_cast<double *>(PyLong_AsVoidPtr(high)), *const second = static_cast<double *>(PyLong_AsVoidPtr(low));
        if (PyErr_Occurred()) return nullptr;
        std::vector<OverflowTerm> left;
        const auto run = [&] { return left = split_partial_sums(*set, terms, to, second, static_cast<size_t>(size), first), true; };
        if (without_lock(false, run))
            return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(left.data()),
                                             static_cast<Py_ssize_t>(left.size() * sizeof(OverflowTerm)));
    } catch (const std::exception &) { // bad_alloc
    }
    return PyErr_NoMemory();
}

PyObject *round(PyObject *, PyObject *args) {
    const char *isa, *result;
    PyObject *sources, *to;
    Buffer overflow;
    Py_ssize_t size;
    unsigned divisor;
    if (!PyArg_ParseTuple(args, "ssIOy*On", &isa, &result, &divisor, &sources, &overflow.view, &to, &size)) return nullptr;
    try {
        const InstructionSet *set;
        Terms terms;
        if (!read_terms(isa, "float64", sources, overflow.view, size, set, terms)) return nullptr;
        const int number = dtype_named(result);
        auto *const results = static_cast<char *>(PyLong_AsVoidPtr(to));
        if (PyErr_Occurred()) return nullptr;
        if (number < 0 || set->exact[F64][number] == nullptr || divisor < 1 || divisor > MAX_EXACT_COUNT)
            return value_error("partial sums cannot be rounded to this dtype, or not be divided by this integer"), nullptr;
        const auto run = [&] {
            round_partial_sums(*set, terms, divisor, static_cast<DType>(number), results, static_cast<size_t>(size));
            return true;
        };
        if (without_lock(false, run)) Py_RETURN_NONE;
    } catch (const std::exception &) { // bad_alloc
    }
    return PyErr_NoMemory();
}

PyMethodDef functions[] = {
    {"split_partial_sums", split, METH_VARARGS,
     "split_partial_sums(isa, dtype, sources, overflow, high, low, size, first): write partial sums, return overflow terms."},
    {"round_partial_sums", round, METH_VARARGS,
     "round_partial_sums(isa, result, divisor, sources, overflow, to, size): write the rounded sums of partial sums."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int add_partial_sums(PyObject *module) { return PyModule_AddFunctions(module, functions); }
