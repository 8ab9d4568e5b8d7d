// The Python face of the memory that ranks share: Course and Arena.
#include "face.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "arena.hpp"

namespace {

constexpr int64_t MOST_BYTES = int64_t{1} << 46;

// Course

struct CourseObject {
    PyObject_HEAD
    Course *course;
    PyObject *plans; // a list that holds on to them
};

bool malformed(const char *problem) {
    PyErr_SetString(PyExc_ValueError, problem);
    return false;
}

// Read [(region, offset), ...], so many bytes of each being in use.
bool read_spots(PyObject *given, size_t count, int64_t bytes, std::vector<Spot> &spots, Course &course) {
    if (PySequence_Size(given) != static_cast<Py_ssize_t>(count))
        return !PyErr_Occurred() && malformed("a job has another number of operands than its plan");
    for (size_t k = 0; k < count; k++) {
        Ref one(item(given, static_cast<Py_ssize_t>(k)));
        std::vector<int64_t> two;
        if (!one || !read_ints(one.object, two)) return false;
        if (two.size() != 2 || two[1] < 0 || two[1] > MOST_BYTES || two[0] < -1000000 || two[0] > 1000000)
            return malformed("an operand of a job is (region, offset)");
        const int region = static_cast<int>(two[0]);
        if (region >= 0) {
            course.regions = std::max(course.regions, region + 1);
            course.half = std::max(course.half, two[1] + bytes);
        } else {
            course.buffers = std::max(course.buffers, ~region + 1);
        }
        spots.push_back({region, two[1]});
    }
    return true;
}

bool read_work(PyObject *given, CourseObject &self, std::vector<Work> &works) {
    PyObject *plan, *sources, *results;
    int streaming;
    if (!PyTuple_Check(given)) return malformed("a job is (plan, sources, results, streaming)");
    if (!PyArg_ParseTuple(given, "OOOp", &plan, &sources, &results, &streaming)) return false;
    const Plan *found = plan_of(plan);
    if (found == nullptr || PyList_Append(self.plans, plan) < 0) return false;
    if (found->sizes.size() != 1) return malformed("a job's plan is of one tensor");
    works.push_back({found, {}, {}, streaming != 0});
    Work &work = works.back();
    const int64_t size = found->sizes[0];
    return read_spots(sources, static_cast<size_t>(found->sources), size * static_cast<int64_t>(SIZES[found->dtype]),
                      work.sources, *self.course) &&
           read_spots(results, static_cast<size_t>(found->results), size * static_cast<int64_t>(SIZES[found->result]),
                      work.results, *self.course);
}

bool read_course(CourseObject &self, PyObject *args) {
    PyObject *ticks;
    if (!PyArg_ParseTuple(args, "O", &ticks)) return false;
    const Py_ssize_t count = PySequence_Size(ticks);
    if (count < 0) return false;
    if (count < 2) return malformed("a course has two ticks at least: all must meet");
    for (Py_ssize_t t = 0; t < count; t++) {
        Ref jobs(item(ticks, t));
        const Py_ssize_t works = jobs ? PySequence_Size(jobs.object) : -1;
        if (works < 0) return false;
        self.course->ticks.emplace_back();
        for (Py_ssize_t w = 0; w < works; w++) {
            Ref one(item(jobs.object, w));
            if (!one || !read_work(one.object, self, self.course->ticks.back())) return false;
        }
    }
    return true;
}

PyObject *course_new(PyTypeObject *type, PyObject *args, PyObject *) {
    auto *self = allocated<CourseObject>(type);
    if (self == nullptr) return nullptr;
    PyObject *made = reinterpret_cast<PyObject *>(self);
    try {
        self->course = new Course();
        self->plans = PyList_New(0);
        if (self->plans != nullptr && read_course(*self, args)) return made;
    } catch (const std::exception &) {
        PyErr_NoMemory();
    }
    Py_DECREF(made);
    return nullptr;
}

void course_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<CourseObject *>(object);
    delete self->course;
    Py_XDECREF(self->plans);
    release(object);
}

PyType_Slot course_slots[] = {{Py_tp_new, reinterpret_cast<void *>(course_new)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(course_dealloc)},
                              {0, nullptr}};
PyType_Spec course_spec = {"crossreduce.kernels._native.RankProgram", sizeof(CourseObject), 0, Py_TPFLAGS_DEFAULT,
                           course_slots};

// Arena

struct ArenaObject {
    PyObject_HEAD
    SharedMemory *memory; // null: closed
    PyObject *running;    // the course under way
    bool busy;            // a thread is in it, without the interpreter's lock
};

ArenaObject *arena_of(PyObject *object) { return reinterpret_cast<ArenaObject *>(object); }

// An arena that is open, and, where an op is to go on, has no other thread in it.
bool usable(const ArenaObject *self, bool alone) {
    if (self->memory == nullptr) return malformed("the arena is closed");
    return !(alone && self->busy) || malformed("another thread is in the arena");
}

// The arena's memory and the rank that a call names, or null with an error set.
const SharedMemory *read_rank(PyObject *object, PyObject *args, int &rank) {
    if (!PyArg_ParseTuple(args, "i", &rank) || !usable(arena_of(object), false)) return nullptr;
    const SharedMemory *memory = arena_of(object)->memory;
    if (rank >= 0 && rank < memory->ranks) return memory;
    malformed("there is no such rank");
    return nullptr;
}

bool sane_slice(double slice_s) { // also no NaN
    return (slice_s >= 0 && slice_s <= 1e6) || malformed("a slice is from 0 to 1e6 seconds");
}

// Arena(fd, rank, ranks, slot, spin_s, threads)
PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int fd, rank, ranks, threads;
    long long slot;
    double spin_s;
    if (!PyArg_ParseTuple(args, "iiiLdi", &fd, &rank, &ranks, &slot, &spin_s, &threads)) return nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks || ranks > 100000 || slot < 0 || slot > MOST_BYTES / ranks ||
        slot % 8192 != 0 || threads < 1 || !(spin_s >= 0 && spin_s < 1)) {
        malformed("an arena is (fd, rank, ranks, bytes of a slot in whole pages twice, seconds to spin, threads)");
        return nullptr;
    }
    auto *self = allocated<ArenaObject>(type);
    if (self == nullptr) return nullptr;
    PyObject *made = reinterpret_cast<PyObject *>(self);
    try {
        self->memory = SharedMemory::map(fd, rank, ranks, slot, static_cast<int64_t>(spin_s * 1e9), threads);
        if (self->memory != nullptr) return made;
        PyErr_SetFromErrno(PyExc_OSError);
    } catch (const std::exception &) {
        PyErr_NoMemory();
    }
    Py_DECREF(made);
    return nullptr;
}

void arena_dealloc(PyObject *object) {
    delete arena_of(object)->memory;
    Py_XDECREF(arena_of(object)->running);
    release(object);
}

PyObject *arena_nbytes(PyObject *, PyObject *args) {
    int ranks;
    long long slot;
    if (!PyArg_ParseTuple(args, "iL", &ranks, &slot)) return nullptr;
    if (ranks < 1 || ranks > 100000 || slot < 0 || slot > MOST_BYTES / ranks) {
        malformed("there are too few or too many ranks or bytes");
        return nullptr;
    }
    return PyLong_FromLongLong(SharedMemory::bytes(ranks, slot));
}

PyObject *go_on(ArenaObject *self, Py_ssize_t until, double slice_s) {
    const Course *course = self->memory->current();
    if (course == nullptr || until < 0 || static_cast<size_t>(until) > course->ticks.size()) {
        malformed("there is no op under way, or it has fewer ticks");
        return nullptr;
    }
    Outcome outcome;
    self->busy = true;
    PyThreadState *state = PyEval_SaveThread();
    try {
        outcome = self->memory->advance(static_cast<size_t>(until), static_cast<int64_t>(slice_s * 1e9));
    } catch (const std::exception &) { // bad_alloc
        outcome = Outcome::memory;
    }
    PyEval_RestoreThread(state);
    self->busy = false;
    if (self->memory->current() == nullptr) Py_CLEAR(self->running);
    return PyLong_FromLong(static_cast<long>(outcome));
}

// begin(course, addresses, text, until, slice_s) -> outcome
PyObject *arena_begin(PyObject *object, PyObject *args) {
    ArenaObject *self = arena_of(object);
    PyObject *given, *addresses;
    const char *text;
    Py_ssize_t length, until;
    double slice_s;
    if (!PyArg_ParseTuple(args, "OOs#nd", &given, &addresses, &text, &length, &until, &slice_s)) return nullptr;
    if (PyType_GetSlot(Py_TYPE(given), Py_tp_dealloc) != reinterpret_cast<void *>(course_dealloc)) {
        PyErr_SetString(PyExc_TypeError, "this is no course");
        return nullptr;
    }
    const Course &course = *reinterpret_cast<CourseObject *>(given)->course;
    if (!usable(self, true) || !sane_slice(slice_s)) return nullptr;
    const SharedMemory &memory = *self->memory;
    if (until < 0 || static_cast<size_t>(until) > course.ticks.size() || memory.current() != nullptr ||
        course.regions > memory.ranks || course.half > memory.slot / 2 ||
        PySequence_Size(addresses) < course.buffers) {
        if (!PyErr_Occurred()) malformed("the course does not fit the arena, or an op is under way");
        return nullptr;
    }
    try {
        std::vector<char *> buffers;
        for (int k = 0; k < course.buffers; k++) {
            Ref one(item(addresses, k));
            buffers.push_back(one ? static_cast<char *>(PyLong_AsVoidPtr(one.object)) : nullptr);
            if (PyErr_Occurred()) return nullptr;
        }
        Py_INCREF(given);
        Py_XDECREF(self->running);
        self->running = given;
        self->memory->begin(course, std::move(buffers), {text, static_cast<size_t>(length)});
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    return go_on(self, until, slice_s);
}

// advance(until, slice_s) -> outcome
PyObject *arena_advance(PyObject *object, PyObject *args) {
    Py_ssize_t until;
    double slice_s;
    if (!PyArg_ParseTuple(args, "nd", &until, &slice_s)) return nullptr;
    if (!usable(arena_of(object), true) || !sane_slice(slice_s)) return nullptr;
    return go_on(arena_of(object), until, slice_s);
}

PyObject *arena_end_op(PyObject *object, PyObject *) {
    if (!usable(arena_of(object), true)) return nullptr;
    arena_of(object)->memory->abandon();
    Py_CLEAR(arena_of(object)->running);
    Py_RETURN_NONE;
}

PyObject *arena_abort(PyObject *object, PyObject *args) {
    const char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y#", &text, &length) || !usable(arena_of(object), false)) return nullptr;
    arena_of(object)->memory->give_up({text, static_cast<size_t>(length)});
    Py_RETURN_NONE;
}

PyObject *arena_cause(PyObject *object, PyObject *) {
    if (!usable(arena_of(object), false)) return nullptr;
    const std::string cause = arena_of(object)->memory->cause();
    return PyBytes_FromStringAndSize(cause.data(), static_cast<Py_ssize_t>(cause.size()));
}

PyObject *arena_address(PyObject *object, PyObject *args) {
    int rank;
    const SharedMemory *memory = read_rank(object, args, rank);
    if (memory == nullptr) return nullptr;
    const int64_t half = static_cast<int64_t>(memory->number % 2) * (memory->slot / 2);
    return PyLong_FromVoidPtr(memory->memory(rank) + half);
}

PyObject *arena_number(PyObject *object, PyObject *) {
    if (!usable(arena_of(object), false)) return nullptr;
    return PyLong_FromUnsignedLongLong(arena_of(object)->memory->number);
}

PyObject *arena_running(PyObject *object, PyObject *) {
    return PyBool_FromLong(arena_of(object)->memory != nullptr && arena_of(object)->memory->current() != nullptr);
}

PyObject *arena_arrivals(PyObject *object, PyObject *) {
    if (!usable(arena_of(object), false)) return nullptr;
    const SharedMemory &memory = *arena_of(object)->memory;
    PyObject *all = PyList_New(0);
    for (int rank = 0; all != nullptr && rank < memory.ranks; rank++) {
        Ref one(PyLong_FromUnsignedLongLong(memory.seat(rank).arrivals.load()));
        if (!one || PyList_Append(all, one.object) < 0) Py_CLEAR(all);
    }
    return all;
}

// ops(rank) -> [(number, text, started_s, ended_s or None)], oldest first
PyObject *arena_ops(PyObject *object, PyObject *args) {
    int rank;
    const SharedMemory *memory = read_rank(object, args, rank);
    if (memory == nullptr) return nullptr;
    const Seat &seat = memory->seat(rank);
    const uint64_t last = seat.number.load(std::memory_order_acquire);
    PyObject *all = PyList_New(0);
    for (uint64_t number = last < KEPT_OPS ? 1 : last - KEPT_OPS + 1; all != nullptr && number <= last; number++) {
        std::string text;
        int64_t started, ended;
        if (!seat.entries[number % KEPT_OPS].read(number, text, started, ended)) continue; // being written anew
        Ref end(ended == 0 ? Py_BuildValue("") : PyFloat_FromDouble(static_cast<double>(ended) * 1e-9));
        Ref words(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
        if (!end || !words) Py_CLEAR(all);
        else {
            Ref one(Py_BuildValue("(KOdO)", static_cast<unsigned long long>(number), words.object,
                                  static_cast<double>(started) * 1e-9, end.object));
            if (!one || PyList_Append(all, one.object) < 0) Py_CLEAR(all);
        }
    }
    return all;
}

PyObject *arena_close(PyObject *object, PyObject *) {
    ArenaObject *self = arena_of(object);
    if (self->memory != nullptr && !usable(self, true)) return nullptr;
    delete self->memory;
    self->memory = nullptr;
    Py_CLEAR(self->running);
    Py_RETURN_NONE;
}

PyMethodDef arena_methods[] = {
    {"nbytes", arena_nbytes, METH_VARARGS | METH_STATIC, "nbytes(ranks, slot): how large the memory has to be."},
    {"begin", arena_begin, METH_VARARGS,
     "begin(course, addresses, text, until, slice_s): begin an op, then as advance. The memory must stay until it is over."},
    {"advance", arena_advance, METH_VARARGS,
     "advance(until, slice_s): do the ticks before `until`; 0 done, 1 still waiting for others, 2 their ops differ, 3 "
     "given up, 4 no memory."},
    {"end_op", arena_end_op, METH_NOARGS, "End the op under way: on all ranks, in the same tick."},
    {"abort", arena_abort, METH_VARARGS, "abort(cause): say why nothing goes on; the first cause stands."},
    {"cause", arena_cause, METH_NOARGS, "The cause that was put up; empty: none."},
    {"address", arena_address, METH_VARARGS, "address(rank): where the half of its slot begins that this op uses."},
    {"close", arena_close, METH_NOARGS, "Let go of the memory; the arena is of no use afterwards."},
    {"number", arena_number, METH_NOARGS, "The number of this rank's latest op, from 1."},
    {"running", arena_running, METH_NOARGS, "Whether an op is under way."},
    {"arrivals", arena_arrivals, METH_NOARGS, "At how many ticks each rank has arrived."},
    {"ops", arena_ops, METH_VARARGS, "ops(rank): (number, text, started_s, ended_s or None) of its last 32, oldest first."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot arena_slots[] = {{Py_tp_new, reinterpret_cast<void *>(arena_new)},
                             {Py_tp_dealloc, reinterpret_cast<void *>(arena_dealloc)},
                             {Py_tp_methods, arena_methods},
                             {0, nullptr}};
PyType_Spec arena_spec = {"crossreduce.kernels._native.SharedMemory", sizeof(ArenaObject), 0, Py_TPFLAGS_DEFAULT, arena_slots};

} // namespace

int add_arena(PyObject *module) {
    Ref course(PyType_FromSpec(&course_spec)), arena(PyType_FromSpec(&arena_spec));
    if (!course || !arena) return -1;
    if (PyModule_AddObjectRef(module, "RankProgram", course.object) < 0) return -1;
    return PyModule_AddObjectRef(module, "SharedMemory", arena.object);
}
