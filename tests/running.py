"""How tests of the lower floors run a schedule: one place that knows the loop's arguments."""

import oracle

from crossreduce import ReduceOp
from crossreduce.engines.loop import execute, ranges
from crossreduce.frameworks import get


def bounds(schedule, size):
    """Return the elements ``(start, stop)`` of each part of a result."""
    return tuple((start, stop) for _, start, stop in ranges(schedule, size))


def run_on(backend, schedule, op, flats, size, dtype):
    """Run ``op`` over one flat array a source; return each destination's ``(parts, fresh)``.

    ``size`` ``None``: arrays of any shape, taken whole.
    """
    op = ReduceOp(op)
    return execute(schedule, backend, op, flats, size, backend.numbers(op, dtype, len(flats)))


def run(schedule, op, xs, size):
    """Run ``op`` over NumPy arrays."""
    return run_on(get("numpy"), schedule, op, xs, size, oracle.name_of(xs[0]))
