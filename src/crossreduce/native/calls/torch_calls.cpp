// All-reduces of torch's process groups that were prepared, without Python: given as torch.distributed gives them to a
// backend, or directly.
//
// As in rank_calls.cpp, this only recognises. Whatever differs from a synchronous call in place of one tensor, with the
// group's timeout, outside of modes and profilers of torch, takes the path in Python.
#include <cstring>

#include "prepared_calls.hpp"

namespace {

// A number in the C++ object of a Python object that pybind11 has made. Its place is not documented: it is the only one
// that has, in several objects, the numbers that torch's functions return.
template <class Number> class Field {
  public:
    // `probes`: tuples of an object and its number. Return whether there is exactly one place.
    bool find(PyObject *probes) {
        int places = 0;
        for (size_t at = 0; at + sizeof(Number) <= LEAST_NBYTES; at += sizeof(Number)) {
            bool fits = true;
            const bool is_read = read_each(probes, [&](PyObject *fields) {
                PyObject *object;
                long long number;
                if (!PyArg_ParseTuple(fields, "OL", &object, &number)) return false;
                fits = fits && memory_of(object) != nullptr && number_at(object, at) == static_cast<Number>(number);
                return true;
            });
            if (!is_read) return false;
            if (fits) at_ = at, places++;
        }
        return places == 1;
    }
    Number read(PyObject *object) const { return number_at(object, at_); }
    static const char *memory_of(PyObject *object) { return reinterpret_cast<const Instance *>(object)->value; }

  private:
    static constexpr size_t LEAST_NBYTES = 64; // no object that is read has fewer
    struct Instance {
        PyObject_HEAD
        const char *value; // null before __init__
    };
    size_t at_ = 0;

    static Number number_at(PyObject *object, size_t at) {
        Number number;
        std::memcpy(&number, memory_of(object) + at, sizeof number);
        return number;
    }
};

PyTypeObject *options_type; // torch's class of the options of an all-reduce; null: the layout is unknown
Field<uint8_t> op_field, async_field;
Field<int64_t> limit_field, timeout_field; // milliseconds; the second one in the settings of a group
PyObject *name_runs_inline, *zero;

struct TorchCallsObject {
    PyObject_HEAD
    PyObject *calls, *communicator, *queue, *settings; // RankCalls, Communicator, OpQueue; torch keeps the timeout in settings
    PyObject *name, *ops; // of the collective; for each op of torch, by its number, (torch's object, ReduceOp or None)
    PyObject *is_profiled, *work; // a function; the class of the work of a call that has run
    long long timeout_ms; // the communicator's
    int64_t begun; // how many calls began here
};

// Run a call if it was prepared and if this thread may run it now. Return the tensor; None: it was not; or null with an error set.
PyObject *run_now(TorchCallsObject &self, PyObject *op, PyObject *tensor, bool has_limit) {
    if (options_type == nullptr || (!has_limit && timeout_field.read(self.settings) != self.timeout_ms)) Py_RETURN_NONE;
    Ref may_run(PyObject_GetAttr(self.queue, name_runs_inline));
    if (may_run.object != Py_True) return none_or_error();
    Ref profiled(PyObject_CallNoArgs(self.is_profiled));
    if (profiled.object != Py_False) return none_or_error();
    PyObject *const arguments[] = {self.communicator, self.name, op, zero, tensor, tensor};
    return run_rank_call(self.calls, arguments, &self.begun);
}

PyObject *allreduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "2 arguments expected, %zd given", count);
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    PyObject *tensors = arguments[0], *options = arguments[1];
    if (Py_TYPE(options) != options_type || limit_field.memory_of(options) == nullptr || async_field.read(options) != 0 ||
        !PyList_CheckExact(tensors) || PyList_Size(tensors) != 1)
        Py_RETURN_NONE;
    const int64_t limit = limit_field.read(options);
    PyObject *named = PyTuple_GetItem(self.ops, op_field.read(options));
    if (named == nullptr || (limit > 0 && limit != self.timeout_ms)) return none_or_error();
    Ref tensor(item(tensors, 0));
    if (!tensor || PyTuple_GetItem(named, 1) == Py_None) return none_or_error(); // None would be no op
    Ref done(run_now(self, PyTuple_GetItem(named, 1), tensor.object, limit > 0));
    if (!done) return nullptr;
    if (done.object == Py_None) Py_RETURN_NONE;
    return PyObject_CallFunctionObjArgs(self.work, tensors, nullptr);
}

PyObject *all_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "2 arguments expected, %zd given", count);
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    PyObject *op = arguments[1];
    for (Py_ssize_t k = 0; !PyUnicode_CheckExact(op) && k < PyTuple_Size(self.ops); k++) {
        PyObject *named = PyTuple_GetItem(self.ops, k);
        if (PyTuple_GetItem(named, 0) == op) op = PyTuple_GetItem(named, 1);
    }
    if (op == Py_None) Py_RETURN_NONE;
    return run_now(self, op, arguments[0], false);
}

PyObject *begun(PyObject *object, PyObject *) {
    return PyLong_FromLongLong(reinterpret_cast<TorchCallsObject *>(object)->begun);
}

PyObject **references(TorchCallsObject &self) { return &self.calls; } // the first of NUMBER
constexpr int NUMBER = 8;

PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<TorchCallsObject>(type, [&](TorchCallsObject &self) {
        const bool is_read = PyArg_ParseTuple(args, "OOOOUO!OOL", &self.calls, &self.communicator, &self.queue, &self.settings,
                                              &self.name, &PyTuple_Type, &self.ops, &self.is_profiled, &self.work, &self.timeout_ms);
        for (int k = 0; k < NUMBER; k++) Py_XINCREF(references(self)[k]);
        return is_read;
    });
}

void calls_dealloc(PyObject *object) {
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    for (int k = 0; k < NUMBER; k++) Py_XDECREF(references(self)[k]);
    free_object(object);
}

PyMethodDef methods[] = {
    {"allreduce", as_function(allreduce), METH_FASTCALL,
     "allreduce(tensors, options): return the work of a call that was prepared and has run; None: it was not."},
    {"all_reduce", as_function(all_reduce), METH_FASTCALL,
     "all_reduce(tensor, op): reduce a tensor in place and return it, if the call was prepared; None: it was not."},
    {"begun", begun, METH_NOARGS, "begun(): return how many calls have begun here."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

PyObject *use_torch_options(PyObject *, PyObject *args) {
    PyObject *type, *ops, *is_async, *limits, *timeouts;
    if (!PyArg_ParseTuple(args, "OOOOO", &type, &ops, &is_async, &limits, &timeouts)) return nullptr;
    const bool is_known = op_field.find(ops) && async_field.find(is_async) && limit_field.find(limits) && timeout_field.find(timeouts);
    if (PyErr_Occurred()) return nullptr;
    Py_INCREF(type); // until the process ends
    options_type = is_known ? reinterpret_cast<PyTypeObject *>(type) : nullptr;
    return PyBool_FromLong(is_known);
}

int add_torch_calls(PyObject *module) {
    name_runs_inline = PyUnicode_InternFromString("runs_inline");
    zero = PyLong_FromLong(0);
    if (name_runs_inline == nullptr || zero == nullptr) return -1;
    return add_class<TorchCallsObject>(module, "crossreduce.engines.host._calls.TorchCalls", calls_new, calls_dealloc, methods);
}
