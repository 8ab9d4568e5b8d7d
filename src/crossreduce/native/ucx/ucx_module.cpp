// The Python class UcxWorker, which makes a Connections object whose messages UCX moves. UcxWorker(path) opens UCX's
// library, and raises an OSError if it cannot.
#include "module.hpp"

#include <memory>

#include "ucx_connections.hpp"

#if defined(__linux__)

PyObject *new_connections(std::shared_ptr<Connections> connections);

namespace {

struct WorkerObject {
    PyObject_HEAD
    UcxWorker *worker;
    const ucx::Library *library;
};

bool os_error(const std::string &text) {
    PyErr_SetString(PyExc_OSError, text.c_str());
    return false;
}

PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<WorkerObject>(type, [&](WorkerObject &self) {
        const char *path;
        if (!PyArg_ParseTuple(args, "s", &path)) return false;
        std::string why = "there is no memory";
        without_lock(0, [&] {
            self.library = ucx::open_library(path, why);
            if (self.library != nullptr) self.worker = new UcxWorker(*self.library);
            return 0;
        });
        return self.worker != nullptr || os_error(why);
    });
}

void worker_dealloc(PyObject *object) {
    delete reinterpret_cast<WorkerObject *>(object)->worker;
    free_object(object);
}

PyObject *version(PyObject *object, void *) {
    const ucx::Library &library = *reinterpret_cast<WorkerObject *>(object)->library;
    return PyUnicode_FromFormat("%u.%u.%u", library.major, library.minor, library.release);
}

PyObject *open(PyObject *object, PyObject *) {
    UcxWorker *worker = reinterpret_cast<WorkerObject *>(object)->worker;
    if (worker == nullptr || worker->worker != nullptr) return value_error("the worker was opened before"), nullptr;
    const std::string why = without_lock(std::string("there is no memory"), [&] { return worker->open(); });
    if (!why.empty()) return os_error(why), nullptr;
    return PyBytes_FromStringAndSize(worker->address().data(), static_cast<Py_ssize_t>(worker->address().size()));
}

PyObject *connect(PyObject *object, PyObject *args) {
    auto *self = reinterpret_cast<WorkerObject *>(object);
    PyObject *ranks_given, *sockets_given, *addresses_given;
    std::vector<int> ranks, sockets;
    std::vector<std::string> addresses;
    int own;
    double silent_s;
    if (!PyArg_ParseTuple(args, "iOOOd", &own, &ranks_given, &sockets_given, &addresses_given, &silent_s) ||
        !read_ints(ranks_given, ranks) || !read_ints(sockets_given, sockets))
        return nullptr;
    const bool were_read = read_each(addresses_given, [&](PyObject *one) {
        char *data;
        Py_ssize_t nbytes;
        if (PyBytes_AsStringAndSize(one, &data, &nbytes) < 0) return false;
        addresses.emplace_back(data, static_cast<size_t>(nbytes));
        return true;
    });
    if (!were_read) return nullptr;
    if (ranks.size() != sockets.size() || ranks.size() != addresses.size())
        return value_error("there must be one socket and one address for each rank"), nullptr;
    if (self->worker == nullptr || self->worker->worker == nullptr) return value_error("the worker must be open"), nullptr;
    std::shared_ptr<UcxConnections> made;
    std::string why = "there is no memory";
    without_lock(0, [&] {
        made = std::make_shared<UcxConnections>(std::unique_ptr<UcxWorker>(self->worker), own, ranks, sockets, addresses,
                                                static_cast<int64_t>(silent_s * 1e9));
        self->worker = nullptr;
        why = made->connect();
        return 0;
    });
    if (why.empty()) return new_connections(made);
    os_error(why);
    without_lock(0, [&] { return made.reset(), 0; });
    return nullptr;
}

PyMethodDef methods[] = {
    {"open", open, METH_NOARGS, "Start UCX, and return the bytes by which other ranks reach this worker."},
    {"connect", connect, METH_VARARGS,
     "connect(rank, ranks, sockets, addresses, silent_s): return Connections to the workers of other ranks. Call it once."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {{"version", version, nullptr, "The version of UCX, such as 1.22.0.", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void *>(worker_new)},
                       {Py_tp_dealloc, reinterpret_cast<void *>(worker_dealloc)},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, properties},
                       {0, nullptr}};

} // namespace

int add_ucx(PyObject *module) { return add_class<WorkerObject>(module, "crossreduce.kernels._native.UcxWorker", slots); }

#else

int add_ucx(PyObject *) { return 0; }

#endif
