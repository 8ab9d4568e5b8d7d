"""Run a schedule on arrays without the rest of the library, with the engine ``loop`` or any other engine."""

import sys
from contextlib import contextmanager

import oracle
import recording

from crossreduce import ReduceOp
from crossreduce.engines import base
from crossreduce.engines.base import Layout, LoweredBuffer, ProgramRange, engine_named
from crossreduce.engines.loop import run_program
from crossreduce.frameworks import get
from crossreduce.lowering import lower
from crossreduce.packing import Buffer, Span

sys.modules["crossreduce.engines.recording"] = recording  # so that the library finds this engine of the tests

ENGINES = ("host", "loop")
"""Every engine that computes on NumPy arrays, except "recording" of the tests, which runs programs like "loop"."""


def run_on(framework, schedule, op, flats, size, dtype):
    """Run the engine ``loop`` on one flat array per source. If ``size`` is ``None``, arrays may have any shape."""
    numbers = framework.numbers(ReduceOp(op), dtype, len(flats))
    return run_program(lower(schedule), framework, flats, size, numbers)


def run(schedule, op, xs, size):
    """Run the engine ``loop`` on NumPy arrays."""
    return run_on(get("numpy"), schedule, op, xs, size, oracle.name_of(xs[0]))


def run_engine(engine, schedule, op, xs, framework=None, out=None):
    """Run an engine on one tensor of any shape, with one array per source. Return each destination's array."""
    framework = framework or get("numpy")
    spec = framework.spec(xs[0])
    program, size = lower(schedule), xs[0].size
    chunk = program.chunks[0]
    sources, destinations = (tuple(program.devices[k] for k in ends) for ends in (chunk.sources, chunk.destinations))
    buffer = Buffer(spec.dtype, size, (Span(tensor=0, start=0, size=size, shape=spec.shape),), packs=1, first=0)
    lowered = LoweredBuffer(buffer, (ProgramRange(program, 0, size),))
    layout = Layout(framework, (0,), (lowered,), sources, destinations)
    chosen = engine_named(engine)
    assert chosen.supports(layout)
    executable = chosen.compile(layout, framework.numbers(ReduceOp(op), spec.dtype, len(xs)), out is not None)
    (results,) = executable.run(chosen.bind(layout, [list(xs)]), None if out is None else [out])
    return list(results)


@contextmanager
def only(name):
    """Make the pipeline select this engine, or the engine ``loop`` for arrays that this one does not support."""
    before = list(base.ENGINES)
    base.ENGINES[:] = dict.fromkeys([name, "loop"])
    try:
        yield engine_named(name)
    finally:
        base.ENGINES[:] = before
