// Collectives of torch's process groups that were prepared, without Python: given as torch.distributed gives them to a
// backend, or, for all-reduces, directly.
//
// As in rank_calls.cpp, this only recognises. Whatever differs from a synchronous call with one tensor, or one input and
// one output, with the group's timeout, outside of modes and profilers of torch, takes the path in Python.
#include <cstring>

#include "prepared_calls.hpp"

namespace {

// A number in the C++ object of a Python object that pybind11 has made. Its place is not documented: it is the only one
// that has, in several objects, the numbers that torch's functions return.
template <class Number> class Field {
  public:
    // `probes`: tuples of an object, of at least `nbytes`, and its number; None: these objects have no such number. Return
    // whether there is exactly one place.
    bool find(PyObject *probes, size_t nbytes) {
        if (probes == Py_None) return true;
        int places = 0;
        for (size_t at = 0; at + sizeof(Number) <= nbytes; at += sizeof(Number)) {
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

// The collectives. Their options are of different classes.
enum Collective : int { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, COLLECTIVES };

struct Options {
    PyTypeObject *type = nullptr; // torch's class; null: the layout is unknown
    Field<uint8_t> op, is_async;
    Field<int64_t> limit_ms, root;
};

Options options_of[COLLECTIVES];
Field<int64_t> timeout_field; // milliseconds, in the settings of a group
bool has_timeout_field = false;
PyObject *name_runs_inline, *zero;

struct TorchCallsObject {
    PyObject_HEAD
    PyObject *calls, *communicator, *queue, *settings; // RankCalls, Communicator, OpQueue; torch keeps the timeout in settings
    PyObject *names, *ops; // of the collectives; for each op of torch, by its number, (torch's object, ReduceOp or None)
    PyObject *is_profiled, *work; // a function; the class of the work of a call that has run
    long long timeout_ms, rank; // the communicator's
    int64_t begun; // how many calls began here
};

// Run a call if it was prepared and if this thread may run it now. Return the result; None: it was not; or null with an
// error set. `written`: whether this rank's result is written.
PyObject *run_now(TorchCallsObject &self, Collective collective, PyObject *op, PyObject *root, PyObject *tensor, PyObject *out,
                  bool has_limit, bool written) {
    if (!has_limit && (!has_timeout_field || timeout_field.read(self.settings) != self.timeout_ms)) Py_RETURN_NONE;
    Ref may_run(PyObject_GetAttr(self.queue, name_runs_inline));
    if (may_run.object != Py_True) return none_or_error();
    Ref profiled(PyObject_CallNoArgs(self.is_profiled));
    if (profiled.object != Py_False) return none_or_error();
    PyObject *const arguments[] = {self.communicator, PyTuple_GetItem(self.names, collective), op, root, tensor, out};
    return run_rank_call(self.calls, arguments, &self.begun, written);
}

// Run a call with these options, and return a new reference to its work; None: it was not prepared; or null with an error
// set. `results`: a list, for the work; null: a list of `out`.
PyObject *run_with(TorchCallsObject &self, Collective collective, PyObject *given, PyObject *tensor, PyObject *out,
                   PyObject *results) {
    const Options &options = options_of[collective];
    if (Py_TYPE(given) != options.type || Field<uint8_t>::memory_of(given) == nullptr || options.is_async.read(given) != 0)
        Py_RETURN_NONE;
    const int64_t limit = options.limit_ms.read(given);
    if (limit > 0 && limit != self.timeout_ms) Py_RETURN_NONE;
    PyObject *op = Py_None;
    if (collective == ALL_REDUCE || collective == REDUCE_SCATTER) {
        PyObject *named = PyTuple_GetItem(self.ops, options.op.read(given));
        if (named == nullptr) return none_or_error();
        op = PyTuple_GetItem(named, 1);
        if (op == Py_None) Py_RETURN_NONE; // None would be no op
    }
    const int64_t from = collective == BROADCAST ? options.root.read(given) : 0;
    Ref root(PyLong_FromLongLong(from));
    if (!root) return nullptr;
    const bool written = collective != BROADCAST || from != self.rank;
    Ref done(run_now(self, collective, op, root.object, tensor, out, limit > 0, written));
    if (!done || done.object == Py_None) return done ? none_or_error() : nullptr;
    Ref made(results == nullptr ? Py_BuildValue("[O]", out) : nullptr);
    if (results == nullptr && !made) return nullptr;
    return PyObject_CallFunctionObjArgs(self.work, results == nullptr ? made.object : results, nullptr);
}

// (tensors, options)
template <Collective collective> PyObject *in_place(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "2 arguments expected, %zd given", count);
    PyObject *tensors = arguments[0];
    if (!PyList_CheckExact(tensors) || PyList_Size(tensors) != 1) Py_RETURN_NONE;
    Ref tensor(item(tensors, 0));
    if (!tensor) return none_or_error();
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    return run_with(self, collective, arguments[1], tensor.object, tensor.object, tensors);
}

// (output, tensor, options)
template <Collective collective> PyObject *moved(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "3 arguments expected, %zd given", count);
    if (arguments[0] == Py_None) Py_RETURN_NONE; // run_rank_call would make a new output
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    return run_with(self, collective, arguments[2], arguments[1], arguments[0], nullptr);
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
    return run_now(self, ALL_REDUCE, op, zero, arguments[0], arguments[0], false, true);
}

PyObject *begun(PyObject *object, PyObject *) {
    return PyLong_FromLongLong(reinterpret_cast<TorchCallsObject *>(object)->begun);
}

PyObject **references(TorchCallsObject &self) { return &self.calls; } // the first of NUMBER
constexpr int NUMBER = 8;

PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<TorchCallsObject>(type, [&](TorchCallsObject &self) {
        const bool is_read = PyArg_ParseTuple(args, "OOOOO!O!OOLL", &self.calls, &self.communicator, &self.queue, &self.settings,
                                              &PyTuple_Type, &self.names, &PyTuple_Type, &self.ops, &self.is_profiled,
                                              &self.work, &self.timeout_ms, &self.rank);
        for (int k = 0; k < NUMBER; k++) Py_XINCREF(references(self)[k]);
        return is_read;
    });
}

void calls_dealloc(PyObject *object) {
    auto &self = *reinterpret_cast<TorchCallsObject *>(object);
    for (int k = 0; k < NUMBER; k++) Py_XDECREF(references(self)[k]);
    free_object(object);
}

constexpr const char IN_PLACE[] = "(tensors, options): return the work of a call that was prepared and has run; None: it was not.";
constexpr const char MOVED[] = "(output, tensor, options): return the work of a call that was prepared and has run; None: it was not.";

PyMethodDef methods[] = {
    {"allreduce", as_function(in_place<ALL_REDUCE>), METH_FASTCALL, IN_PLACE},
    {"broadcast", as_function(in_place<BROADCAST>), METH_FASTCALL, IN_PLACE},
    {"all_gather_single", as_function(moved<ALL_GATHER>), METH_FASTCALL, MOVED},
    {"reduce_scatter_single", as_function(moved<REDUCE_SCATTER>), METH_FASTCALL, MOVED},
    {"all_to_all_single", as_function(moved<ALL_TO_ALL>), METH_FASTCALL, MOVED},
    {"all_reduce", as_function(all_reduce), METH_FASTCALL,
     "all_reduce(tensor, op): reduce a tensor in place and return it, if the call was prepared; None: it was not."},
    {"begun", begun, METH_NOARGS, "begun(): return how many calls have begun here."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

PyObject *use_torch_options(PyObject *, PyObject *args) {
    PyObject *settings, *kinds;
    if (!PyArg_ParseTuple(args, "OO", &settings, &kinds)) return nullptr;
    bool are_known = has_timeout_field = timeout_field.find(settings, 64);
    int collective = 0;
    for (Options &each : options_of) each.type = nullptr;
    const bool are_read = read_each(kinds, [&](PyObject *one) {
        PyObject *type, *ops, *is_async, *limits, *roots;
        long long nbytes;
        if (!PyArg_ParseTuple(one, "OLOOOO", &type, &nbytes, &ops, &is_async, &limits, &roots)) return false;
        if (collective == COLLECTIVES) return value_error("there are fewer collectives");
        Options &found = options_of[collective++];
        const auto size = static_cast<size_t>(nbytes);
        const bool is_known = found.op.find(ops, size) && found.is_async.find(is_async, size) && found.limit_ms.find(limits, size) &&
                              found.root.find(roots, size);
        Py_INCREF(type); // until the process ends
        found.type = is_known ? reinterpret_cast<PyTypeObject *>(type) : nullptr;
        are_known = are_known && is_known;
        return PyErr_Occurred() == nullptr;
    });
    return are_read ? PyBool_FromLong(are_known && collective == COLLECTIVES) : nullptr;
}

int add_torch_calls(PyObject *module) {
    name_runs_inline = PyUnicode_InternFromString("runs_inline");
    zero = PyLong_FromLong(0);
    if (name_runs_inline == nullptr || zero == nullptr) return -1;
    return add_class<TorchCallsObject>(module, "crossreduce.engines.host._calls.TorchCalls", calls_new, calls_dealloc, methods);
}
