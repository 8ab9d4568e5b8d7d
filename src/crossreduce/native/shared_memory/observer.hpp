// The state of a group as Python objects: for its ranks, and for programs that are not ranks and only read.
#pragma once

#include "module.hpp"
#include "shared_memory.hpp"

constexpr const char *OPS_TEXT =
    "ops(rank): return (number, signature, started_s, ended_s or None) of the rank's last 32 ops, oldest first.";
constexpr const char *COUNTS_TEXT =
    "counts(rank): return (calls, bytes, ns, waited_ns, between_hosts_ns) of the rank's completed ops, one per kind, and "
    "(barriers, ns) of its waits for each rank: at how many barriers that rank was the last one, and how long.";

// Return what these texts say, or null with an error set.
PyObject *ops_of(const SharedMemory &memory, int rank);
PyObject *counts_of(const SharedMemory &memory, int rank);

// A method with a rank as its argument. READ_RANK returns the object's memory and reads the rank; null with an error set.
template <const SharedMemory *(*READ_RANK)(PyObject *, PyObject *, int &), PyObject *(*OF_RANK)(const SharedMemory &, int)>
PyObject *of_rank(PyObject *object, PyObject *args) {
    int rank;
    const SharedMemory *memory = READ_RANK(object, args, rank);
    return memory == nullptr ? nullptr : OF_RANK(*memory, rank);
}
