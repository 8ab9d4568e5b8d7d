// Prepared calls of ranks: a collective that was called before, with an array of the same class, dtype and sizes, runs
// again without Python, unless a rank is late or dead, or the calls differ: then the path in Python continues it.
//
// As in calls.cpp, this only recognises. Whatever differs from an earlier call takes the path in Python.
#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "prepared_calls.hpp"

namespace {

constexpr int64_t MAX_STAGES = 1 << 15; // of all programs; see ranks/communicator.py

std::atomic<uint64_t> forks{0}; // how often an ancestor of this process was forked since the module was loaded

struct BufferPlace { // a buffer of a rank program
    enum Base : int { in_array, in_result, in_memory } base; // the array that is given; the result; an address
    int64_t offset; // bytes
};

struct RankCall {
    std::vector<int64_t> signature;
    PyObject *kept = nullptr; // a tuple of objects that must live as long as this
    PyObject *executable, *program;
    std::string text; // describes the call
    std::vector<BufferPlace> buffers;
    std::vector<int64_t> sizes; // of the result
    size_t itemsize;
    int64_t nbytes, result_nbytes;
    bool in_place; // whether the result may be the array itself
    bool copied;   // whether the result is a copy of the array, made afterwards
    ~RankCall() { Py_XDECREF(kept); }
};

using Table = std::unordered_map<uint64_t, std::shared_ptr<RankCall>>;

struct RankCallsObject {
    PyObject_HEAD
    PyObject *memory, *acquire, *release; // the SharedMemory, and methods of the lock of its communicator
    uint64_t forks;
    Table *table;
    std::vector<int64_t> *signature; // of the call that runs; the lock protects it
    int64_t stages; // of the programs in the table
    double slice_s; // see ranks/intra_host/shared_memory.py
};

// Set the signature of a call. Return false if it cannot be one that was prepared; an error may be set.
bool read_signature(PyObject *name, PyObject *op, PyObject *root, const ArrayView &view, std::vector<int64_t> &to) {
    // None: arrays are copied. Ops other than names need not be a ReduceOp: only those that were prepared are found.
    if (PyUnicode_CheckExact(op)) op = read_op(op);
    if (op == nullptr || !PyLong_CheckExact(root)) return false;
    const long number = PyLong_AsLong(root);
    if (number == -1 && PyErr_Occurred()) return false;
    // The names of collectives are interned, and ops are singletons: their addresses identify them.
    to = {reinterpret_cast<int64_t>(name), reinterpret_cast<int64_t>(op), number, view.dtype, view.axes};
    to.insert(to.end(), view.sizes, view.sizes + view.axes);
    return true;
}

// Keeps the error that is set, if any, while it lives; other errors are lost.
class SavedError {
  public:
    SavedError() { PyErr_Fetch(&type, &value, &traceback); }
    ~SavedError() { PyErr_Restore(type, value, traceback); }
    SavedError(const SavedError &) = delete;
    SavedError &operator=(const SavedError &) = delete;

  private:
    PyObject *type, *value, *traceback;
};

} // namespace

PyObject *run_rank_call(PyObject *object, PyObject *const *arguments, int64_t *begun, bool written) {
    auto &self = *reinterpret_cast<RankCallsObject *>(object);
    PyObject *communicator = arguments[0], *x = arguments[4], *out = arguments[5];
    const ArrayAccess *access = access_of(x);
    ArrayView view, target;
    if (access == nullptr || self.forks != forks || !access->is_usable() || !access->view_on_host(x, out == x, view))
        return none_or_error();
    try {
        // Another thread may add calls, but only while it has the lock.
        Ref locked(PyObject_CallFunctionObjArgs(self.acquire, Py_False, nullptr));
        if (!locked || locked.object != Py_True) return none_or_error();
        struct Release {
            PyObject *method, *memory;
            ~Release() {
                const SavedError saved;
                kernel_api->set_caller(memory, false);
                Ref done(PyObject_CallNoArgs(method));
            }
        } release{self.release, self.memory};
        std::vector<int64_t> &signature = *self.signature; // no Python code runs while it is used
        if (!read_signature(arguments[1], arguments[2], arguments[3], view, signature)) return none_or_error();
        const auto found = self.table->find(hash_of(signature));
        if (found == self.table->end() || found->second->signature != signature || !kernel_api->can_begin(self.memory))
            return none_or_error();
        const std::shared_ptr<RankCall> call = found->second;
        Ref result(nullptr);
        const ArrayView like{nullptr, call->sizes.data(), static_cast<int>(call->sizes.size()), view.dtype, HOST};
        if (out == Py_None) {
            result.object = access->make(like, view.dtype, call->itemsize, &target.data);
            if (!result) return nullptr;
        } else if (out == x) {
            target = view;
            if (!call->in_place) return none_or_error();
        } else {
            if (access_of(out) != access || !access->view_on_host(out, true, target) || target.dtype != like.dtype ||
                !same_sizes(target, like))
                return none_or_error();
            const bool apart = view.data + call->nbytes <= target.data || target.data + call->result_nbytes <= view.data;
            if (!apart && !(call->in_place && view.data == target.data)) return none_or_error();
        }
        std::vector<char *> buffers;
        buffers.reserve(call->buffers.size());
        char *const bases[] = {view.data, target.data};
        for (const BufferPlace &place : call->buffers)
            buffers.push_back(place.base == BufferPlace::in_memory ? reinterpret_cast<char *>(place.offset)
                                                                   : bases[place.base] + place.offset);
        kernel_api->set_caller(self.memory, true); // a signal handler may use the group
        if (begun != nullptr) ++*begun;
        if (written && !access->mark_written({out})) return nullptr;
        const int outcome = kernel_api->begin(self.memory, call->program, buffers, call->text, self.slice_s);
        if (outcome != 0) {
            Ref done(PyObject_CallMethod(communicator, "resume", "Oi", call->executable, outcome));
            if (!done && kernel_api->is_unfinished(self.memory)) { // a signal handler raised before `resume` could act
                const SavedError saved;
                Ref aborted(PyObject_CallMethod(communicator, "abandon", nullptr));
            }
            if (!done) return nullptr;
        }
        if (call->copied && target.data != view.data) {
            const auto copy = [&] { return std::memcpy(target.data, view.data, static_cast<size_t>(call->nbytes)); };
            if (call->nbytes <= MAX_NBYTES_WITH_LOCK) copy();
            else without_lock<void *>(nullptr, copy);
        }
        PyObject *written = result ? result.object : out;
        Py_INCREF(written);
        return written;
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

namespace {

PyObject *run(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 6) return PyErr_Format(PyExc_TypeError, "6 arguments expected, %zd given", count);
    return run_rank_call(object, arguments, nullptr, false);
}

bool read_buffer(PyObject *fields, RankCall &call) {
    int base;
    long long offset;
    if (!PyArg_ParseTuple(fields, "iL", &base, &offset)) return false;
    const int64_t ends[] = {call.nbytes, call.result_nbytes, INT64_MAX};
    if (base < 0 || base > BufferPlace::in_memory || offset < 0 || offset > ends[base])
        return value_error("a buffer is outside of its array");
    call.buffers.push_back({static_cast<BufferPlace::Base>(base), offset});
    return true;
}

int64_t nbytes_of(const int64_t *sizes, size_t axes, size_t itemsize) {
    auto found = static_cast<int64_t>(itemsize);
    for (size_t axis = 0; axis < axes; axis++) found *= sizes[axis];
    return found;
}

PyObject *add(PyObject *object, PyObject *args) {
    auto &self = *reinterpret_cast<RankCallsObject *>(object);
    PyObject *name, *op, *root, *x, *sizes, *executable, *program, *buffers;
    const char *text;
    Py_ssize_t length, itemsize;
    long long stages;
    int in_place, copied;
    if (!PyArg_ParseTuple(args, "OOOOO!nOOLs#Opp", &name, &op, &root, &x, &PyTuple_Type, &sizes, &itemsize, &executable,
                          &program, &stages, &text, &length, &buffers, &in_place, &copied))
        return nullptr;
    const ArrayAccess *access = access_of(x);
    ArrayView view;
    if (access == nullptr || !access->view_on_host(x, false, view)) return none_or_error();
    try {
        auto call = std::make_shared<RankCall>();
        if (!read_signature(name, op, root, view, call->signature)) return none_or_error();
        if (!read_ints(sizes, call->sizes)) return nullptr;
        call->executable = executable, call->program = program;
        call->text.assign(text, static_cast<size_t>(length));
        call->itemsize = static_cast<size_t>(itemsize), call->in_place = in_place != 0, call->copied = copied != 0;
        call->nbytes = nbytes_of(view.sizes, static_cast<size_t>(view.axes), call->itemsize);
        call->result_nbytes = nbytes_of(call->sizes.data(), call->sizes.size(), call->itemsize);
        if (!read_each(buffers, [&](PyObject *one) { return read_buffer(one, *call); })) return nullptr;
        PyObject *dtype = access->dtype_object(view.dtype);
        call->kept = PyTuple_Pack(4, name, executable, program, dtype == nullptr ? Py_None : dtype);
        if (call->kept == nullptr) return nullptr;
        if ((self.stages += stages) > MAX_STAGES) { // forget all others
            self.table->clear();
            self.stages = stages;
        }
        (*self.table)[hash_of(call->signature)] = std::move(call);
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *memory, *lock;
    double slice_s;
    if (!PyArg_ParseTuple(args, "OOd", &memory, &lock, &slice_s)) return nullptr;
    return make_object<RankCallsObject>(type, [&](RankCallsObject &self) {
        self.table = new Table();
        self.signature = new std::vector<int64_t>();
        self.forks = forks;
        self.slice_s = slice_s;
        self.memory = memory;
        Py_INCREF(memory);
        self.acquire = PyObject_GetAttrString(lock, "acquire");
        self.release = PyObject_GetAttrString(lock, "release");
        return self.acquire != nullptr && self.release != nullptr;
    });
}

void calls_dealloc(PyObject *object) {
    auto &self = *reinterpret_cast<RankCallsObject *>(object);
    delete self.table;
    delete self.signature;
    for (PyObject *one : {self.memory, self.acquire, self.release}) Py_XDECREF(one);
    free_object(object);
}

PyMethodDef methods[] = {
    {"run", as_function(run), METH_FASTCALL,
     "run(communicator, collective, op, root, x, out): return the result of a call that was prepared; None: it was not."},
    {"add", add, METH_VARARGS,
     "add(collective, op, root, x, result_sizes, itemsize, executable, program, stages, text, buffers, in_place, "
     "copied): prepare a call. A buffer of the program is (0, offset in x), (1, offset in the result) or (2, address); `in_place`: the result may be x; `copied`: "
     "x is copied to the result afterwards. The caller holds the lock."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int add_rank_calls(PyObject *module) {
#if !defined(_WIN32)
    if (pthread_atfork(nullptr, nullptr, [] { forks++; }) != 0) return PyErr_SetFromErrno(PyExc_OSError), -1;
#endif
    return add_class<RankCallsObject>(module, "crossreduce.engines.host._calls.RankCalls", calls_new, calls_dealloc, methods);
}
