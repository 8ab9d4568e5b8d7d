// The class Observer: reads the memory of a group, which is mapped without the right to write.
#include "observer.hpp"

#include <algorithm>
#include <cerrno>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace {

constexpr uint64_t VERSION_MASK = 0xffffff; // the digits of LAYOUT that are the version
constexpr uint32_t MOST_RANKS = 1024; // of a host; a snapshot reads a pair of counters for each two of them

// Append to a list an object that is new, or null with an error set; the list becomes null on failure.
void append(PyObject *&list, PyObject *object) {
    Ref one(object);
    if (list != nullptr && (!one || PyList_Append(list, one.object) < 0)) Py_CLEAR(list);
}

unsigned long long value(const std::atomic<uint64_t> &counter) { return counter.load(std::memory_order_relaxed); }

struct ObserverObject {
    PyObject_HEAD
    SharedMemory *memory; // null: closed
};

const SharedMemory *memory_of(PyObject *object) {
    const SharedMemory *memory = reinterpret_cast<ObserverObject *>(object)->memory;
    if (memory == nullptr) PyErr_SetString(PyExc_ValueError, "the observer is closed");
    return memory;
}

const SharedMemory *read_rank(PyObject *object, PyObject *args, int &rank) {
    if (!PyArg_ParseTuple(args, "i", &rank)) return nullptr;
    const SharedMemory *memory = memory_of(object);
    if (memory == nullptr || (rank >= 0 && rank < memory->ranks)) return memory;
    PyErr_SetString(PyExc_ValueError, "the rank is out of range");
    return nullptr;
}

PyObject *observer_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd)) return nullptr;
    return make_object<ObserverObject>(type, [&](ObserverObject &self) {
        self.memory = SharedMemory::observe(fd);
        if (self.memory == nullptr) PyErr_SetFromErrno(PyExc_OSError);
        return self.memory != nullptr;
    });
}

void observer_dealloc(PyObject *object) {
    delete reinterpret_cast<ObserverObject *>(object)->memory;
    free_object(object);
}

PyObject *observer_close(PyObject *object, PyObject *) {
    ObserverObject *self = reinterpret_cast<ObserverObject *>(object);
    delete self->memory;
    self->memory = nullptr;
    Py_RETURN_NONE;
}

PyObject *observer_about(PyObject *object, PyObject *) {
    const SharedMemory *memory = memory_of(object);
    if (memory == nullptr) return nullptr;
    const GroupState &group = memory->about_group();
    const auto length = std::min<uint32_t>(group.about_length, ABOUT_NBYTES);
    return PyBytes_FromStringAndSize(group.about, static_cast<Py_ssize_t>(length));
}

PyObject *observer_cause(PyObject *object, PyObject *) {
    const SharedMemory *memory = memory_of(object);
    if (memory == nullptr) return nullptr;
    try {
        const std::string cause = memory->cause();
        return PyBytes_FromStringAndSize(cause.data(), static_cast<Py_ssize_t>(cause.size()));
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

PyObject *observer_ranks(PyObject *object, PyObject *) {
    const SharedMemory *memory = memory_of(object);
    PyObject *all = memory == nullptr ? nullptr : PyList_New(0);
    for (int rank = 0; all != nullptr && rank < memory->ranks; rank++) {
        const RankState &state = memory->state(rank);
        append(all, Py_BuildValue("(LLKK)", static_cast<long long>(state.global_rank.load()),
                                  static_cast<long long>(state.process.load()), value(state.arrivals), value(state.number)));
    }
    return all;
}

PyMethodDef methods[] = {
    {"about", locked<observer_about>, METH_NOARGS, "Return the text with which the ranks have described the group."},
    {"cause", locked<observer_cause>, METH_NOARGS, "Return the cause of the group's abort; empty: it was not aborted."},
    {"ranks", locked<observer_ranks>, METH_NOARGS,
     "Return (global_rank, process, arrivals, number of the last op) of each rank of the host."},
    {"ops", locked<of_rank<read_rank, ops_of>>, METH_VARARGS, OPS_TEXT},
    {"counts", locked<of_rank<read_rank, counts_of>>, METH_VARARGS, COUNTS_TEXT},
    {"close", locked<observer_close>, METH_NOARGS, "Unmap the memory; afterwards other methods raise ValueError."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

PyObject *ops_of(const SharedMemory &memory, int rank) {
    const RankState &state = memory.state(rank);
    const uint64_t last = state.number.load(std::memory_order_acquire);
    const uint64_t first = last < RECORDED_CALLS ? 1 : last - RECORDED_CALLS + 1, ops = last - first + 1;
    PyObject *all = PyList_New(0);
    for (uint64_t k = 0; all != nullptr && k < ops; k++) { // a count: corrupt memory may have the greatest number as `last`
        const uint64_t number = first + k;
        std::string signature;
        int64_t started, ended;
        if (!state.calls.records[number % RECORDED_CALLS].read(number, signature, started, ended)) continue;
        Ref end(ended == 0 ? Py_BuildValue("") : PyFloat_FromDouble(static_cast<double>(ended) * 1e-9));
        Ref text(PyUnicode_DecodeUTF8(signature.data(), static_cast<Py_ssize_t>(signature.size()), "replace"));
        append(all, !end || !text ? nullptr
                                  : Py_BuildValue("(KOdO)", static_cast<unsigned long long>(number), text.object,
                                                  static_cast<double>(started) * 1e-9, end.object));
    }
    return all;
}

PyObject *counts_of(const SharedMemory &memory, int rank) {
    PyObject *kinds = PyList_New(0), *waits = PyList_New(0);
    for (const CallCounts &of : memory.state(rank).calls.counts)
        append(kinds, Py_BuildValue("(KKKKK)", value(of.calls), value(of.nbytes), value(of.ns), value(of.waited_ns),
                                    value(of.between_hosts_ns)));
    for (int other = 0; waits != nullptr && other < memory.ranks; other++) {
        const WaitCounts &of = memory.waits(rank, other);
        append(waits, Py_BuildValue("(KK)", value(of.barriers), value(of.ns)));
    }
    Ref first(kinds), second(waits);
    return !first || !second ? nullptr : Py_BuildValue("(OO)", kinds, waits);
}

#if defined(__linux__)

SharedMemory *SharedMemory::observe(int fd) {
    struct stat found;
    if (fstat(fd, &found) != 0) return nullptr;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || found.st_size < static_cast<off_t>(sizeof(GroupState))) {
        errno = EINVAL;
        return nullptr;
    }
    // The ranks seal the memory before they describe it. An access beyond the end of memory that its owner has truncated
    // would kill this process.
    if (!(seals & F_SEAL_SHRINK)) {
        errno = EAGAIN;
        return nullptr;
    }
    void *start = mmap(nullptr, sizeof(GroupState), PROT_READ, MAP_SHARED, fd, 0);
    if (start == MAP_FAILED) return nullptr;
    const auto *group = static_cast<const GroupState *>(start);
    const uint64_t layout = group->layout.load(std::memory_order_acquire);
    const uint32_t ranks = group->ranks;
    munmap(start, sizeof(GroupState));
    const bool known = layout == LAYOUT && ranks >= 1 && ranks <= MOST_RANKS;
    const auto size = known ? static_cast<size_t>(slots_offset(static_cast<int>(ranks))) : 0;
    if (!known || found.st_size < static_cast<off_t>(size)) {
        errno = layout == 0 ? EAGAIN : layout != LAYOUT && (layout ^ LAYOUT) <= VERSION_MASK ? EPROTO : EINVAL;
        return nullptr;
    }
    void *at = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    SharedMemory *made = over(at, 0, static_cast<int>(ranks), 0, 0, 1);
    made->mapped_nbytes = size;
    made->process = getpid();
    return made;
}

#else

SharedMemory *SharedMemory::observe(int) {
    errno = ENOSYS;
    return nullptr;
}

#endif

int add_observer(PyObject *module) {
    return add_class<ObserverObject>(module, "crossreduce.kernels._native.Observer", observer_new, observer_dealloc, methods);
}
