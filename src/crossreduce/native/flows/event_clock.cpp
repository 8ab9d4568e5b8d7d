// The event-driven clock of schedules. schedule/clock.py defines it, and has the same in NumPy for many ticks.
#include "module.hpp"

#include <algorithm>

namespace {

constexpr int MOST = 1 << 20; // rounds, pieces

struct Clock {
    int rounds = 0, steps = 0, resources = 0;
    // By read, in the order of rounds and steps. `operand` is 0 for inputs, and else 1 + the number of a step.
    std::vector<int> step, operand, round, queue;
    std::vector<double> latency;
    std::vector<size_t> first_use; // of each read, and then the number of all uses
    std::vector<int> used;         // the number of a resource
    std::vector<size_t> first_read; // of each round, and then the number of all reads
    // By (round, resource): sums over all earlier rounds of the seconds per byte, and of those for messages.
    std::vector<double> transfers, messages;

    // Return the end of the last read. `queueing[w][q]`: the seconds in which host q queues the operations of window w;
    // queue 0 is that of reads whose operations are not queued.
    double total(double nbytes, int pieces, const std::vector<std::vector<double>> &queueing) const {
        const int width = std::min(pieces, rounds);
        const size_t count = static_cast<size_t>(resources), slots = static_cast<size_t>(width);
        std::vector<double> ready((static_cast<size_t>(steps) + 1) * slots, 0.0);
        std::vector<double> free(count, 0.0), load(count, 0.0), queued(queueing[0].size(), 0.0), ends(step.size());
        double end = 0;
        int first = -1, last = -1;
        for (int t = 0; t < rounds + pieces - 1; t++) {
            const int first_before = first, last_before = last;
            first = std::max(0, t - pieces + 1), last = std::min(t, rounds - 1);
            const int window = t < rounds ? t : std::max(rounds - 1, t - std::max(0, pieces - rounds));
            for (size_t q = 0; q < queued.size(); q++) queued[q] += queueing[static_cast<size_t>(window)][q];
            if (first != first_before || last != last_before) {
                const size_t low = static_cast<size_t>(first) * count, high = static_cast<size_t>(last + 1) * count;
                for (size_t k = 0; k < count; k++)
                    load[k] = (transfers[high + k] - transfers[low + k]) * nbytes + messages[high + k] - messages[low + k];
            }
            const size_t from = first_read[static_cast<size_t>(first)], to = first_read[static_cast<size_t>(last + 1)];
            for (size_t k = from; k < to; k++) {
                double start = 0, served = 0;
                if (operand[k]) start = ready[static_cast<size_t>(operand[k]) * slots + static_cast<size_t>((t - round[k]) % width)];
                for (size_t u = first_use[k]; u < first_use[k + 1]; u++) {
                    start = std::max(start, free[static_cast<size_t>(used[u])]);
                    served = std::max(served, load[static_cast<size_t>(used[u])]);
                }
                ends[k] = std::max(start + served, queued[static_cast<size_t>(queue[k])]) + latency[k];
            }
            for (size_t k = from; k < to; k++) {
                const size_t at = static_cast<size_t>(step[k]);
                for (size_t u = first_use[k]; u < first_use[k + 1]; u++)
                    free[static_cast<size_t>(used[u])] = std::max(free[static_cast<size_t>(used[u])], ends[k]);
                double &value = ready[(at + 1) * slots + static_cast<size_t>((t - round[k]) % width)];
                const bool is_first = k == from || step[k - 1] != step[k];
                value = is_first ? ends[k] : std::max(value, ends[k]);
                end = std::max(end, ends[k]);
            }
        }
        return end;
    }
};

struct ClockObject {
    PyObject_HEAD
    Clock *clock;
};

// Read the fields of a `Read` (traffic.py): step 2, operand 3, round 4, latency 6, uses 8. `queues` has those of all steps.
bool read_reads(PyObject *reads, const std::vector<int> &queues, Clock &clock) {
    clock.steps = static_cast<int>(queues.size());
    return read_each(reads, [&](PyObject *read) {
        PyObject *unused, *uses;
        int step, operand, round;
        double latency;
        if (!PyArg_ParseTuple(read, "OOiiiOdOO", &unused, &unused, &step, &operand, &round, &unused, &latency, &unused, &uses)) return false;
        if (step < 0 || step >= clock.steps || operand < -1 || operand >= step) return value_error("a read has an unknown step");
        if (round < (clock.round.empty() ? 0 : clock.round.back()) || round >= clock.rounds)
            return value_error("the reads must be in the order of their rounds");
        clock.step.push_back(step), clock.operand.push_back(operand + 1), clock.round.push_back(round);
        clock.queue.push_back(queues[static_cast<size_t>(step)]);
        clock.latency.push_back(latency), clock.first_use.push_back(clock.used.size());
        clock.first_read[static_cast<size_t>(round) + 1]++;
        return read_each(uses, [&](PyObject *use) {
            int number;
            double often;
            if (!PyArg_ParseTuple(use, "id", &number, &often)) return false;
            if (number < 0 || number >= clock.resources) return value_error("a read uses an unknown resource");
            clock.used.push_back(number);
            return true;
        });
    });
}

// Read for each resource {round: (seconds per byte, seconds for messages)}.
bool read_loads(PyObject *by_round, Clock &clock) {
    const size_t count = static_cast<size_t>(clock.resources), size = static_cast<size_t>(clock.rounds + 1) * count;
    clock.transfers.assign(size, 0.0), clock.messages.assign(size, 0.0);
    size_t resource = 0;
    const bool done = read_each(by_round, [&](PyObject *loads) {
        Ref items(PyMapping_Items(loads));
        return items && read_each(items.object, [&](PyObject *entry) {
            int round;
            PyObject *pair;
            double transfer, message;
            if (!PyArg_ParseTuple(entry, "iO", &round, &pair)) return false;
            Ref both(PySequence_Tuple(pair));
            if (!both || !PyArg_ParseTuple(both.object, "dd", &transfer, &message)) return false;
            if (round < 0 || round >= clock.rounds) return value_error("a load has an unknown round");
            const size_t at = static_cast<size_t>(round + 1) * count + resource;
            clock.transfers[at] = transfer, clock.messages[at] = message;
            return true;
        }) && ++resource;
    });
    for (size_t k = count; done && k < size; k++) {
        clock.transfers[k] += clock.transfers[k - count];
        clock.messages[k] += clock.messages[k - count];
    }
    return done;
}

PyObject *clock_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int rounds;
    PyObject *reads, *by_round, *queue_of_step;
    if (!PyArg_ParseTuple(args, "OOOi", &reads, &by_round, &queue_of_step, &rounds)) return nullptr;
    const Py_ssize_t resources = PySequence_Size(by_round);
    if (resources < 0) return nullptr;
    if (rounds < 1 || rounds > MOST || resources > (Py_ssize_t{1} << 26) / (rounds + 1))
        return PyErr_Format(PyExc_ValueError, "the number of rounds must be from 1 to 2^20, and not have too many resources");
    return make_object<ClockObject>(type, [&](ClockObject &self) {
        self.clock = new Clock();
        Clock &clock = *self.clock;
        clock.rounds = rounds, clock.resources = static_cast<int>(resources);
        clock.first_read.assign(static_cast<size_t>(rounds) + 1, 0);
        std::vector<int> queues;
        if (!read_ints(queue_of_step, queues)) return false;
        if (queues.size() > size_t{1} << 30 || std::any_of(queues.begin(), queues.end(), [](int queue) { return queue < 0; }))
            return value_error("the number of a queue must not be negative");
        if (!read_reads(reads, queues, clock) || !read_loads(by_round, clock)) return false;
        clock.first_use.push_back(clock.used.size());
        for (size_t r = 0; r < static_cast<size_t>(rounds); r++) clock.first_read[r + 1] += clock.first_read[r];
        return true;
    });
}

void clock_dealloc(PyObject *object) {
    delete reinterpret_cast<ClockObject *>(object)->clock;
    free_object(object);
}

PyObject *total(PyObject *object, PyObject *args) {
    const Clock &clock = *reinterpret_cast<ClockObject *>(object)->clock;
    double nbytes;
    int pieces;
    PyObject *queues;
    if (!PyArg_ParseTuple(args, "diO", &nbytes, &pieces, &queues)) return nullptr;
    if (pieces < 1 || pieces > MOST) return PyErr_Format(PyExc_ValueError, "the number of pieces must be from 1 to 2^20");
    try {
        const size_t windows = static_cast<size_t>(clock.rounds + std::min(pieces, clock.rounds) - 1);
        std::vector<std::vector<double>> queueing(windows, std::vector<double>(1, 0.0)); // queue 0 is empty
        const bool read = read_each(queues, [&](PyObject *queue) {
            if (PySequence_Size(queue) != static_cast<Py_ssize_t>(windows)) return value_error("a queue has another number of windows");
            size_t window = 0;
            return read_each(queue, [&](PyObject *seconds) {
                queueing[window++].push_back(PyFloat_AsDouble(seconds));
                return PyErr_Occurred() == nullptr;
            });
        });
        if (!read) return nullptr;
        for (const int queue : clock.queue)
            if (static_cast<size_t>(queue) >= queueing[0].size()) return PyErr_Format(PyExc_ValueError, "a step has an unknown queue");
        const double end = without_lock(-1.0, [&] { return clock.total(nbytes, pieces, queueing); });
        return end < 0 ? PyErr_NoMemory() : PyFloat_FromDouble(end);
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

PyMethodDef clock_methods[] = {
    {"total", total, METH_VARARGS, "Return the end of the last read, for some bytes per piece, pieces, and seconds of the queues by window."},
    {nullptr, nullptr, 0, nullptr}};
} // namespace

int add_event_clock(PyObject *module) {
    return add_class<ClockObject>(module, "crossreduce.kernels._native.EventClock", clock_new, clock_dealloc, clock_methods);
}
