// The Python classes Connections and PendingMessage.
#include "module.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "connections.hpp"
#include "futex.hpp"
#include "mpi_connections.hpp"

#if defined(__linux__)

namespace {

constexpr int64_t SLICE_NS = 50000000; // a signal that comes just before a wait for the system is handled this late
constexpr int64_t CHECK_NS = 1000000000; // between two checks for silent hosts

struct ConnectionsObject {
    PyObject_HEAD
    std::shared_ptr<Connections> *connections;
};

struct MessageObject {
    PyObject_HEAD
    std::shared_ptr<Connections> *connections;
    std::shared_ptr<Message> *message;
    long rank;
};

PyTypeObject *connections_type = nullptr, *message_type = nullptr;

Connections &connections_of(PyObject *object) { return **reinterpret_cast<ConnectionsObject *>(object)->connections; }

PyObject *connections_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<ConnectionsObject>(type, [&](ConnectionsObject &self) {
        PyObject *ranks_given, *sockets_given;
        std::vector<int> ranks, sockets;
        double silent_s;
        int measures = 0;
        if (!PyArg_ParseTuple(args, "OOd|p", &ranks_given, &sockets_given, &silent_s, &measures) || !read_ints(ranks_given, ranks) ||
            !read_ints(sockets_given, sockets))
            return false;
        if (ranks.empty() ? !sockets.empty() : sockets.empty() || sockets.size() % ranks.size() != 0)
            return value_error("there must be equally many sockets, at least one, for each rank");
        self.connections = new std::shared_ptr<Connections>(std::make_shared<Connections>(
            std::move(ranks), std::move(sockets), static_cast<int64_t>(silent_s * 1e9), measures != 0));
        return true;
    });
}

void connections_dealloc(PyObject *object) {
    delete reinterpret_cast<ConnectionsObject *>(object)->connections;
    free_object(object);
}

PyObject *begin(PyObject *object, PyObject *const *args, Py_ssize_t count, bool sending) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "4 arguments expected, %zd given", count);
    char *address = static_cast<char *>(PyLong_AsVoidPtr(args[0]));
    const long long nbytes = PyLong_AsLongLong(args[1]);
    const long rank = PyLong_AsLong(args[2]);
    const long long tag = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    Connections &connections = connections_of(object);
    const int peer = connections.index_of(static_cast<int>(rank));
    if (peer < 0) return PyErr_Format(PyExc_ValueError, "this rank is not connected to rank %ld", rank);
    if (nbytes < 0 || tag < 0) return value_error("sizes and tags are at least 0"), nullptr;
    return reinterpret_cast<PyObject *>(make_object<MessageObject>(message_type, [&](MessageObject &self) {
        self.rank = rank;
        self.connections = new std::shared_ptr<Connections>(*reinterpret_cast<ConnectionsObject *>(object)->connections);
        self.message = new std::shared_ptr<Message>();
        const auto run = [&] {
            const auto number = static_cast<uint64_t>(tag);
            *self.message = sending ? connections.send(peer, number, address, nbytes)
                                    : connections.receive(peer, number, address, nbytes);
            return true;
        };
        // Another thread may hold the lock of the connections for as long as it copies a message.
        return without_lock(false, run) || (PyErr_NoMemory(), false);
    }));
}

PyObject *send(PyObject *object, PyObject *const *args, Py_ssize_t count) { return begin(object, args, count, true); }

PyObject *receive(PyObject *object, PyObject *const *args, Py_ssize_t count) { return begin(object, args, count, false); }

PyObject *abort_all(PyObject *object, PyObject *) {
    without_lock(0, [&] { return connections_of(object).abort(), 0; });
    Py_RETURN_NONE;
}

PyObject *close_all(PyObject *object, PyObject *) {
    without_lock(0, [&] { return connections_of(object).close(), 0; });
    Py_RETURN_NONE;
}

PyObject *lanes(PyObject *object, PyObject *rank) {
    const long number = PyLong_AsLong(rank);
    if (PyErr_Occurred()) return nullptr;
    const int peer = connections_of(object).index_of(static_cast<int>(number));
    if (peer < 0) return PyErr_Format(PyExc_ValueError, "this rank is not connected to rank %ld", number);
    return PyLong_FromSize_t(connections_of(object).lanes_of(peer));
}

PyObject *close_after_fork(PyObject *object, PyObject *) {
    connections_of(object).close_after_fork();
    Py_RETURN_NONE;
}

void message_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<MessageObject *>(object);
    delete self->message;
    delete self->connections;
    free_object(object);
}

// Return whether a message is complete; -1 with an error set if it has failed.
int is_complete(const MessageObject &self, Message::State state) {
    switch (state) {
    case Message::State::done:
        return 1;
    case Message::State::lost:
        PyErr_Format(PyExc_ConnectionError, "the connection to rank %ld was lost: %s", self.rank,
                     (*self.connections)->why((*self.message)->peer).c_str());
        return -1;
    case Message::State::left:
        PyErr_Format(PyExc_ConnectionResetError, "rank %ld has left the group", self.rank);
        return -1;
    case Message::State::aborted:
        PyErr_SetString(PyExc_ConnectionError, "this rank has aborted the group");
        return -1;
    default:
        return 0;
    }
}

PyObject *message_poll(PyObject *object, PyObject *argument) {
    auto *self = reinterpret_cast<MessageObject *>(object);
    const double seconds = PyFloat_AsDouble(argument);
    if (PyErr_Occurred()) return nullptr;
    if (!(seconds >= 0 && seconds <= 1)) return value_error("a poll takes from 0 to 1 s"), nullptr;
    const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
    const auto state = without_lock(Message::State::pending, [&] { return (*self->connections)->wait(**self->message, until); });
    const int complete = PyErr_CheckSignals() < 0 ? -1 : is_complete(*self, state);
    return complete < 0 ? nullptr : PyBool_FromLong(complete);
}

PyObject *message_wait(PyObject *object, PyObject *argument) {
    auto *self = reinterpret_cast<MessageObject *>(object);
    const double timeout_s = PyFloat_AsDouble(argument);
    if (PyErr_Occurred()) return nullptr;
    if (std::isnan(timeout_s)) return value_error("the timeout must be a number"), nullptr;
    Connections &connections = **self->connections;
    Message &message = **self->message;
    const int64_t limit = static_cast<int64_t>(std::min(std::max(timeout_s, 0.0), 1e9) * 1e9);
    int64_t began = now_ns(), check_at = began + connections.silent_ns; // `began`: or when bytes were last seen to move
    uint64_t moved = connections.moved_with(message);
    while (true) {
        const int64_t until = began + std::min(limit, now_ns() - began + SLICE_NS);
        bool had_memory = false;
        const auto state = without_lock(Message::State::pending, [&] {
            const auto found = connections.wait(message, until);
            had_memory = true;
            return found;
        });
        if (!had_memory) return PyErr_NoMemory();
        const int complete = is_complete(*self, state);
        if (complete < 0) return nullptr;
        if (complete > 0) Py_RETURN_NONE;
        if (PyErr_CheckSignals() < 0) return nullptr;
        if (now_ns() >= check_at) {
            check_at = now_ns() + CHECK_NS;
            without_lock(0, [&] { return connections.drop_silent(), 0; });
        }
        if (const uint64_t now_moved = connections.moved_with(message); now_moved != moved) {
            moved = now_moved, began = now_ns();
        } else if (now_ns() >= began + limit) {
            connections.disconnect(message.peer, "an earlier message did not complete in time");
            PyErr_Format(PyExc_TimeoutError, "the message to or from rank %ld did not complete in time", self->rank);
            return nullptr;
        }
    }
}

PyMethodDef connections_methods[] = {
    {"send", as_function(send), METH_FASTCALL, "send(address, nbytes, rank, tag): begin to send; return the message."},
    {"receive", as_function(receive), METH_FASTCALL, "receive(address, nbytes, rank, tag): expect a message; return it."},
    {"abort", abort_all, METH_NOARGS, "Make all messages fail. Any thread may call it."},
    {"close", close_all, METH_NOARGS, "Tell the peers that this rank leaves, make all messages fail, and close the sockets."},
    {"lanes", lanes, METH_O, "lanes(rank): return how many sockets large messages to a rank use now."},
    {"close_after_fork", close_after_fork, METH_NOARGS, "Close the sockets in a forked process."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot connections_slots[] = {{Py_tp_new, reinterpret_cast<void *>(connections_new)},
                                   {Py_tp_dealloc, reinterpret_cast<void *>(connections_dealloc)},
                                   {Py_tp_methods, connections_methods},
                                   {0, nullptr}};

PyMethodDef message_methods[] = {
    {"poll", message_poll, METH_O, "poll(seconds): wait at most so long; return whether the message is complete."},
    {"wait", message_wait, METH_O,
     "wait(timeout_s): return when the memory may be used again; see crossreduce.ranks.transports.base.PendingMessage."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot message_slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(message_dealloc)},
                               {Py_tp_methods, message_methods},
                               {0, nullptr}};

} // namespace

std::shared_ptr<Connections> *connections_in(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) != reinterpret_cast<void *>(connections_new)) {
        PyErr_SetString(PyExc_TypeError, "the argument must be Connections");
        return nullptr;
    }
    return reinterpret_cast<ConnectionsObject *>(object)->connections;
}

// Return (PendingMessage, rank) for a message that has begun.
PyObject *new_pending(const std::shared_ptr<Connections> &connections, std::shared_ptr<Message> message) {
    const int rank = connections->rank_of(message->peer);
    Ref pending(reinterpret_cast<PyObject *>(make_object<MessageObject>(message_type, [&](MessageObject &self) {
        self.rank = rank;
        self.connections = new std::shared_ptr<Connections>(connections);
        self.message = new std::shared_ptr<Message>(std::move(message));
        return true;
    })));
    return pending ? Py_BuildValue("Oi", pending.object, rank) : nullptr;
}

// Return a Connections object, also of a derived class.
PyObject *new_connections(std::shared_ptr<Connections> connections) {
    return reinterpret_cast<PyObject *>(make_object<ConnectionsObject>(connections_type, [&](ConnectionsObject &self) {
        self.connections = new std::shared_ptr<Connections>(std::move(connections));
        return true;
    }));
}

static PyObject *mpi_connections(PyObject *, PyObject *args) {
    PyObject *ranks_given, *functions_given;
    std::vector<int> ranks;
    std::vector<uintptr_t> functions;
    unsigned long long comm, byte;
    int first_tag;
    if (!PyArg_ParseTuple(args, "OOKKi", &ranks_given, &functions_given, &comm, &byte, &first_tag) ||
        !read_ints(ranks_given, ranks) || !read_ints(functions_given, functions))
        return nullptr;
    if (functions.size() != 4) return value_error("four functions are needed"), nullptr;
    MpiLibrary library;
    library.send = reinterpret_cast<MpiLibrary::Start>(functions[0]);
    library.receive = reinterpret_cast<MpiLibrary::Start>(functions[1]);
    library.test = reinterpret_cast<MpiLibrary::Test>(functions[2]);
    library.cancel = reinterpret_cast<MpiLibrary::Cancel>(functions[3]);
    library.comm = comm, library.byte = byte, library.first_tag = first_tag;
    try {
        return new_connections(std::make_shared<MpiConnections>(library, ranks));
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

static PyMethodDef functions[] = {
    {"mpi_connections", mpi_connections, METH_VARARGS,
     "mpi_connections(ranks, functions, comm, byte, first_tag): return Connections over MPI. `functions`: the addresses of "
     "MPI_Isend, MPI_Irecv, MPI_Test and MPI_Cancel. `comm`, `byte`: handles."},
    {nullptr, nullptr, 0, nullptr}};

int add_connections(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    if (add_class<MessageObject>(module, "crossreduce.kernels._native.PendingMessage", message_slots) < 0) return -1;
    message_type = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(module, "PendingMessage")); // never released
    if (message_type == nullptr) return -1;
    if (add_class<ConnectionsObject>(module, "crossreduce.kernels._native.Connections", connections_slots) < 0) return -1;
    connections_type = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(module, "Connections")); // never released
    return connections_type == nullptr ? -1 : 0;
}

#else

int add_connections(PyObject *) { return 0; }

#endif
