#pragma once

#include "module.hpp"
#include "shared_memory.hpp"

constexpr int64_t MAX_NBYTES = int64_t{1} << 46; // of a slot, of a call, and of a trace
constexpr int MAX_RANKS = 100000;                // of a host

// The value of a RankProgram object; null, with an error set, for others. It is valid as long as the object.
const RankProgram *program_of(PyObject *object);

// Add the class RankProgram to a module. Return -1 with an error set if that fails.
int add_rank_program(PyObject *module);
