"""Run a schedule on flat arrays with the loop engine, as tests of the lower floors need it."""

import oracle

from crossreduce import ReduceOp
from crossreduce.engines.loop import run_program
from crossreduce.frameworks import get
from crossreduce.lowering import element_ranges, lower


def bounds(schedule, size):
    """Return the elements ``(start, stop)`` of each part of a result."""
    return tuple((start, stop) for _, start, stop in element_ranges(lower(schedule), size))


def run_on(framework, schedule, op, flats, size, dtype):
    """Run ``op`` over one flat array per source; return each destination's ``(parts, fresh)``.

    ``size`` ``None``: arrays of any shape, which are not cut.
    """
    numbers = framework.numbers(ReduceOp(op), dtype, len(flats))
    return run_program(lower(schedule), framework, flats, size, numbers)


def run(schedule, op, xs, size):
    """Run ``op`` over NumPy arrays."""
    return run_on(get("numpy"), schedule, op, xs, size, oracle.name_of(xs[0]))
