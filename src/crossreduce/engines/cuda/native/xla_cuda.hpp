// Plans as custom calls of XLA: see xla_cuda.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

class Plan;

// Return the plan of a Plan object, or null if the object is not a plan.
Plan *plan_in(PyObject *object);

// Functions of the module `_cuda`.
extern PyMethodDef xla_cuda_functions[];
