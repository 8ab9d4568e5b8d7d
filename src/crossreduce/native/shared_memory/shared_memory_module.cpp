// The Python class SharedMemory.
#include "rank_program_module.hpp"

#include <algorithm>
#include <cerrno>

#include "connections.hpp"
#include "host_exchange.hpp"
#include "observer.hpp"
#include "shared_memory.hpp"

#if defined(__linux__)
// The value of a Connections object; null, with an error set, for others.
std::shared_ptr<Connections> *connections_in(PyObject *object);
PyObject *new_pending(const std::shared_ptr<Connections> &connections, std::shared_ptr<Message> message);
#endif

namespace {

struct SharedMemoryObject {
    PyObject_HEAD
    SharedMemory *memory; // null: closed
    PyObject *running;    // the rank program of the current op, or null
    std::shared_ptr<HostExchange> *hosts; // or null
    bool busy;            // a thread runs stages without the interpreter's lock
    unsigned long caller; // the thread that makes a prepared call, or 0
};

SharedMemoryObject *memory_of(PyObject *object) { return reinterpret_cast<SharedMemoryObject *>(object); }

// Check that the memory is open and, if `exclusive`, that no other thread runs stages.
bool usable(const SharedMemoryObject *self, bool exclusive) {
    if (self->memory == nullptr) return value_error("the shared memory is closed");
    return !(exclusive && self->busy) || value_error("another thread runs an op of this rank");
}

// Return the memory, and the rank that is the only argument; or null with an error set.
const SharedMemory *read_rank(PyObject *object, PyObject *args, int &rank) {
    if (!PyArg_ParseTuple(args, "i", &rank) || !usable(memory_of(object), false)) return nullptr;
    const SharedMemory *memory = memory_of(object)->memory;
    if (rank >= 0 && rank < memory->ranks) return memory;
    value_error("the rank is out of range");
    return nullptr;
}

bool valid_slice(double slice_s) { // false for NaN
    return (slice_s >= 0 && slice_s <= 1e6) || value_error("slice_s must be from 0 to 1e6 seconds");
}

PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int fd, rank, ranks, threads, turns = 1;
    long long slot, ready = 0;
    double spin_s;
    if (!PyArg_ParseTuple(args, "iiiLdi|iL", &fd, &rank, &ranks, &slot, &spin_s, &threads, &turns, &ready)) return nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks || ranks > MAX_RANKS || slot < 0 || slot > MAX_NBYTES / ranks ||
        slot % 8192 != 0 || threads < 1 || !(spin_s >= 0 && spin_s < 1) || turns < 1 || turns > 1024 ||
        (turns > 1 && slot / 2 < turns * TURN_NBYTES) || ready < 0 || ready > slot / 2 || ready % 4096 != 0)
        return PyErr_Format(PyExc_ValueError, "the arguments are (fd, rank, ranks, slot, spin_s, threads, turns, ready), with "
                                              "0 <= rank < ranks, slot a multiple of 8192 bytes, spin_s from 0 to 1, "
                                              "threads at least 1, turns from 1 to 1024 if half a slot has room, and ready at "
                                              "most half a slot, in pages");
    return make_object<SharedMemoryObject>(type, [&](SharedMemoryObject &self) {
        self.memory = SharedMemory::map(fd, rank, ranks, slot, static_cast<int64_t>(spin_s * 1e9), threads,
                                        ready == 0 ? INT64_MAX : ready);
        if (self.memory == nullptr) PyErr_SetFromErrno(PyExc_OSError);
        else self.memory->turns = turns;
        return self.memory != nullptr;
    });
}

void memory_dealloc(PyObject *object) {
    delete memory_of(object)->memory;
    delete memory_of(object)->hosts;
    Py_XDECREF(memory_of(object)->running);
    free_object(object);
}

PyObject *memory_nbytes(PyObject *, PyObject *args) {
    int ranks;
    long long slot;
    if (!PyArg_ParseTuple(args, "iL", &ranks, &slot)) return nullptr;
    if (ranks < 1 || ranks > MAX_RANKS || slot < 0 || slot > MAX_NBYTES / ranks)
        return PyErr_Format(PyExc_ValueError, "the number of ranks or the size of a slot is out of range");
    return PyLong_FromLongLong(SharedMemory::nbytes(ranks, slot));
}

Outcome run_stages(SharedMemoryObject *self, size_t until, double slice_s) {
    self->busy = true;
    const Outcome outcome = without_lock(Outcome::out_of_memory, [&] {
        return self->memory->advance(until, static_cast<int64_t>(slice_s * 1e9));
    });
    self->busy = false;
    if (self->memory->current() == nullptr) Py_CLEAR(self->running);
    return outcome;
}

PyObject *advance_op(SharedMemoryObject *self, Py_ssize_t until, double slice_s) {
    const RankProgram *program = self->memory->current();
    if (program == nullptr || until < 0 || static_cast<size_t>(until) > program->stages.size())
        return PyErr_Format(PyExc_ValueError, "no op is running, or its program has fewer stages");
    return PyLong_FromLong(static_cast<long>(run_stages(self, static_cast<size_t>(until), slice_s)));
}

void begin_op(SharedMemoryObject *self, PyObject *program, std::vector<char *> buffers, const std::string &signature) {
    self->memory->begin(*program_of(program), std::move(buffers), signature);
    Py_INCREF(program);
    Py_XDECREF(self->running);
    self->running = program;
}

PyObject *memory_begin(PyObject *object, PyObject *args) {
    SharedMemoryObject *self = memory_of(object);
    PyObject *program_object, *addresses;
    const char *signature;
    Py_ssize_t length, until;
    double slice_s;
    if (!PyArg_ParseTuple(args, "OOs#nd", &program_object, &addresses, &signature, &length, &until, &slice_s))
        return nullptr;
    const RankProgram *program = program_of(program_object);
    if (program == nullptr || !usable(self, true) || !valid_slice(slice_s)) return nullptr;
    const SharedMemory &memory = *self->memory;
    if (until < 0 || static_cast<size_t>(until) > program->stages.size() || memory.current() != nullptr ||
        program->slots > memory.ranks || program->peers > memory.ranks || program->slot_nbytes > memory.room() ||
        PySequence_Size(addresses) < program->buffers) {
        if (!PyErr_Occurred()) value_error("the rank program does not fit the shared memory, or an op is running");
        return nullptr;
    }
    try {
        std::vector<char *> buffers;
        // The first ones also if only other ranks read them.
        const Py_ssize_t most = std::max(program->buffers, READABLE_BUFFERS);
        const Py_ssize_t count = std::min<Py_ssize_t>(PySequence_Size(addresses), most);
        for (Py_ssize_t k = 0; k < count; k++) {
            Ref one(item(addresses, k));
            buffers.push_back(one ? static_cast<char *>(PyLong_AsVoidPtr(one.object)) : nullptr);
            if (PyErr_Occurred()) return nullptr;
        }
        begin_op(self, program_object, std::move(buffers), {signature, static_cast<size_t>(length)});
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    return advance_op(self, until, slice_s);
}

PyObject *memory_advance(PyObject *object, PyObject *args) {
    Py_ssize_t until;
    double slice_s;
    if (!PyArg_ParseTuple(args, "nd", &until, &slice_s)) return nullptr;
    if (!usable(memory_of(object), true) || !valid_slice(slice_s)) return nullptr;
    return advance_op(memory_of(object), until, slice_s);
}

PyObject *memory_end_op(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), true)) return nullptr;
    memory_of(object)->memory->end_op(Outcome::mismatch);
    Py_CLEAR(memory_of(object)->running);
    Py_RETURN_NONE;
}

PyObject *memory_abort(PyObject *object, PyObject *args) {
    const char *cause;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y#", &cause, &length) || !usable(memory_of(object), false)) return nullptr;
    memory_of(object)->memory->abort({cause, static_cast<size_t>(length)});
    if (!memory_of(object)->busy) memory_of(object)->memory->abort_trace(); // else the thread that runs stages does it
    Py_RETURN_NONE;
}

PyObject *memory_cause(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), false)) return nullptr;
    const std::string cause = memory_of(object)->memory->cause();
    return PyBytes_FromStringAndSize(cause.data(), static_cast<Py_ssize_t>(cause.size()));
}

PyObject *memory_aborting_rank(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), false)) return nullptr;
    return PyLong_FromLong(memory_of(object)->memory->aborting_rank());
}

PyObject *memory_address(PyObject *object, PyObject *args) {
    int rank;
    const SharedMemory *memory = read_rank(object, args, rank);
    if (memory == nullptr) return nullptr;
    return PyLong_FromVoidPtr(memory->memory(rank));
}

PyObject *memory_caller(PyObject *object, PyObject *) { return PyLong_FromUnsignedLong(memory_of(object)->caller); }

PyObject *memory_can_read(PyObject *object, PyObject *args) {
    int rank;
    const SharedMemory *memory = read_rank(object, args, rank);
    if (memory != nullptr && memory->state(rank).process.load() == 0) Py_RETURN_NONE;
    return memory == nullptr ? nullptr : PyBool_FromLong(memory->can_read(rank));
}

PyObject *memory_carry(PyObject *object, PyObject *connections) {
    if (!usable(memory_of(object), true)) return nullptr;
#if defined(__linux__)
    const auto *found = connections_in(connections);
    if (found == nullptr) return nullptr;
    SharedMemoryObject *self = memory_of(object);
    const auto hosts = std::make_shared<HostExchange>(*found);
    delete self->hosts;
    self->hosts = new std::shared_ptr<HostExchange>(hosts);
    self->memory->progress = [hosts] { return hosts->connections->progress(); };
    self->memory->exchange = [hosts](const auto &...all) { return hosts->run(all...); };
#else
    (void)connections;
#endif
    Py_RETURN_NONE;
}

PyObject *memory_awaited(PyObject *object, PyObject *) {
#if defined(__linux__)
    const SharedMemoryObject *self = memory_of(object);
    if (self->hosts != nullptr)
        if (auto message = (*self->hosts)->awaited()) return new_pending((*self->hosts)->connections, std::move(message));
#endif
    return value_error("no message is awaited"), nullptr;
}

PyObject *memory_number(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), false)) return nullptr;
    return PyLong_FromUnsignedLongLong(memory_of(object)->memory->number);
}

PyObject *memory_running(PyObject *object, PyObject *) {
    return PyBool_FromLong(memory_of(object)->memory != nullptr && memory_of(object)->memory->current() != nullptr);
}

PyObject *memory_arrivals(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), false)) return nullptr;
    const SharedMemory &memory = *memory_of(object)->memory;
    PyObject *all = PyList_New(0);
    for (int rank = 0; all != nullptr && rank < memory.ranks; rank++) {
        Ref one(PyLong_FromUnsignedLongLong(memory.state(rank).arrivals.load()));
        if (!one || PyList_Append(all, one.object) < 0) Py_CLEAR(all);
    }
    return all;
}

PyObject *memory_describe(PyObject *object, PyObject *args) {
    PyObject *numbers;
    const char *about;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Oy#", &numbers, &about, &length) || !usable(memory_of(object), true)) return nullptr;
    SharedMemory *memory = memory_of(object)->memory;
    Ref list(PySequence_List(numbers));
    if (!list) return nullptr;
    if (PyList_Size(list.object) != memory->ranks) {
        PyErr_SetString(PyExc_ValueError, "describe needs the number of each rank of the host");
        return nullptr;
    }
    std::vector<int64_t> global_ranks;
    for (int rank = 0; rank < memory->ranks; rank++) {
        global_ranks.push_back(PyLong_AsLongLong(PyList_GetItem(list.object, rank)));
        if (PyErr_Occurred()) return nullptr;
    }
    memory->describe(global_ranks, {about, static_cast<size_t>(length)});
    Py_RETURN_NONE;
}

PyObject *memory_count_between_hosts(PyObject *object, PyObject *args) {
    long long ns;
    if (!PyArg_ParseTuple(args, "L", &ns) || !usable(memory_of(object), true)) return nullptr;
    memory_of(object)->memory->calls.add_between_hosts(ns < 0 ? 0 : static_cast<uint64_t>(ns));
    Py_RETURN_NONE;
}

PyObject *memory_close(PyObject *object, PyObject *) {
    SharedMemoryObject *self = memory_of(object);
    if (self->memory != nullptr && !usable(self, true)) return nullptr;
    delete self->memory;
    self->memory = nullptr;
    Py_CLEAR(self->running);
    Py_RETURN_NONE;
}

PyObject *memory_trace_to(PyObject *object, PyObject *args) {
    int fd;
    const char *json;
    Py_ssize_t length;
    long long limit;
    if (!PyArg_ParseTuple(args, "iy#L", &fd, &json, &length, &limit) || !usable(memory_of(object), false)) return nullptr;
    try {
        std::shared_ptr<TraceFile> file;
        if (fd >= 0) {
            if (limit < 0 || limit > MAX_NBYTES) return value_error("the limit of the trace is out of range"), nullptr;
            file = TraceFile::open(fd, {json, static_cast<size_t>(length)}, limit);
            if (!file) return PyErr_SetFromErrno(PyExc_OSError);
        }
        memory_of(object)->memory->calls.trace_to(std::move(file));
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

PyObject *memory_trace_problem(PyObject *object, PyObject *) {
    if (!usable(memory_of(object), false)) return nullptr;
    return PyLong_FromLong(memory_of(object)->memory->calls.trace_problem());
}

PyObject *memory_trace_queued(PyObject *object, PyObject *args) {
    long long ns;
    if (!PyArg_ParseTuple(args, "L", &ns) || !usable(memory_of(object), false)) return nullptr;
    memory_of(object)->memory->calls.queued_ns = ns;
    Py_RETURN_NONE;
}

PyObject *memory_trace(PyObject *object, PyObject *args) {
    int phase;
    Py_ssize_t stage;
    if (!PyArg_ParseTuple(args, "in", &phase, &stage) || !usable(memory_of(object), true)) return nullptr;
    memory_of(object)->memory->calls.trace(static_cast<Phase>(phase), static_cast<size_t>(stage));
    Py_RETURN_NONE;
}

PyMethodDef memory_methods[] = {
    {"nbytes", memory_nbytes, METH_VARARGS | METH_STATIC,
     "nbytes(ranks, slot): return the size of the memory for this many ranks, with slots of `slot` bytes."},
    {"begin", locked<memory_begin>, METH_VARARGS,
     "begin(program, addresses, signature, until, slice_s): begin an op, then advance it. The caller must keep the "
     "memory at the addresses alive until the op ends."},
    {"advance", locked<memory_advance>, METH_VARARGS,
     "advance(until, slice_s): run the stages before `until`. Returns 0: done; 1: still waiting for other ranks; 2: "
     "the signatures differ; 3: aborted; 4: out of memory; 5: the memory of another rank cannot be read; 6: waiting for "
     "a message of another host; 7: another host makes another call."},
    {"end_op", locked<memory_end_op>, METH_NOARGS, "End the current op early; all ranks must do so in the same stage."},
    {"abort", locked<memory_abort>, METH_VARARGS, "abort(cause): abort the group; later causes are ignored."},
    {"cause", locked<memory_cause>, METH_NOARGS,
     "Return the cause of the abort; empty: the group is not aborted, or the cause is incomplete."},
    {"aborting_rank", locked<memory_aborting_rank>, METH_NOARGS, "Return the rank that is writing the cause of an abort, or -1."},
    {"address", locked<memory_address>, METH_VARARGS,
     "address(rank): return the address of the half of the rank's slot that the current op uses."},
    {"awaited", locked<memory_awaited>, METH_NOARGS, "After outcome 6: return the PendingMessage of another host, and its rank."},
    {"caller", locked<memory_caller>, METH_NOARGS, "Return the identity of the thread that makes a prepared call, or 0."},
    {"can_read", locked<memory_can_read>, METH_VARARGS,
     "can_read(rank): return whether this process may read the memory of the rank's process, or None if that does not use "
     "the memory yet. Only before the first op."},
    {"carry", locked<memory_carry>, METH_O, "carry(connections): move their messages while this rank waits at a barrier."},
    {"close", locked<memory_close>, METH_NOARGS, "Unmap the memory; afterwards every other method raises ValueError."},
    {"number", locked<memory_number>, METH_NOARGS, "Return the number of this rank's latest op, starting at 1."},
    {"running", locked<memory_running>, METH_NOARGS, "Return whether an op is running."},
    {"arrivals", locked<memory_arrivals>, METH_NOARGS, "Return the number of barriers that each rank has reached."},
    {"ops", locked<of_rank<read_rank, ops_of>>, METH_VARARGS, OPS_TEXT},
    {"counts", locked<of_rank<read_rank, counts_of>>, METH_VARARGS, COUNTS_TEXT},
    {"describe", locked<memory_describe>, METH_VARARGS,
     "describe(global_ranks, about): if this rank is the first, describe the ranks of the host and the group, for "
     "observers."},
    {"count_between_hosts", locked<memory_count_between_hosts>, METH_VARARGS,
     "count_between_hosts(ns): add to the time that the current op has spent in the exchange with other hosts."},
    {"trace_to", locked<memory_trace_to>, METH_VARARGS,
     "trace_to(fd, json, limit): record the ops that begin from now on in an empty file, of at most `limit` bytes, with "
     "a text at its start; fd -1: in none."},
    {"trace_problem", locked<memory_trace_problem>, METH_NOARGS, "Return why the trace could not grow (errno), or 0."},
    {"trace_queued", locked<memory_trace_queued>, METH_VARARGS,
     "trace_queued(ns): since when, by the monotonic clock, the next op has waited in a queue."},
    {"trace", locked<memory_trace>, METH_VARARGS,
     "trace(phase, stage): record that this rank has executed a phase outside of the stages, since its last record."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool can_begin(PyObject *object) {
    const SharedMemoryObject *self = memory_of(object);
    return self->memory != nullptr && !self->busy && self->memory->current() == nullptr && !self->memory->is_aborted();
}

void set_caller(PyObject *object, bool inside) {
    memory_of(object)->caller = inside ? PyThread_get_thread_ident() : 0;
}

bool is_unfinished(PyObject *object) {
    const SharedMemoryObject *self = memory_of(object);
    return self->memory != nullptr && self->memory->current() != nullptr && !self->memory->is_aborted();
}

int begin(PyObject *object, PyObject *program, const std::vector<char *> &buffers, const std::string &signature,
          double slice_s) {
    SharedMemoryObject *self = memory_of(object);
    begin_op(self, program, buffers, signature);
    return static_cast<int>(run_stages(self, program_of(program)->stages.size(), slice_s));
}

int add_shared_memory(PyObject *module) {
    if (add_rank_program(module) < 0) return -1;
    return add_class<SharedMemoryObject>(module, "crossreduce.kernels._native.SharedMemory", memory_new, memory_dealloc, memory_methods);
}
