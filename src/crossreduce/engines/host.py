"""The host engine: a schedule becomes a program, and whole batches go through the kernels where they lie.

In: a buffer's layout and the schedules of its parts.  Out: a plan of the kernels, made once. On a host all
devices share one memory, so of a schedule only the order of combination is left: what a device would
receive is read where it is, and a chain of steps is one pass.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .. import kernels
from ..frameworks import Numbers
from ..kernels import Program
from ..ops import ReduceOp
from ..packing import Buffer, itemsize
from ..schedule import Schedule
from .loop import prepare, ranges


class Part(NamedTuple):
    """A range of a buffer's elements and the schedule that reduces it."""

    schedule: Schedule
    start: int
    stop: int


class Piece(NamedTuple):
    """A buffer and the parts that tile it."""

    parts: tuple[Part, ...]
    buffer: Buffer


class HostPlan(NamedTuple):
    """The kernels' plan of one buffer, and what it costs."""

    plan: kernels.Plan
    threaded: bool
    past_cache: bool


def host_plan(pieces: tuple[Piece, ...], op: ReduceOp, numbers: Numbers, results: int | None = None) -> HostPlan:
    """Return the kernels' plan for tensors of one dtype, sources and destinations.

    Args:
      pieces: buffers of known sizes; their tensors are numbered on from one to the next.
      op: what combines the components.
      numbers: in which dtypes.
      results: how many of the destinations' results are written, as the others would be the same bit by bit;
        ``None``: all.
    Raises:
      ScheduleError: ``verify`` refuses a schedule.
    """
    programs: dict[Program, int] = {}
    segments: list[kernels.Segment] = []
    sizes: list[int] = []
    for parts, buffer in pieces:
        spans = [
            (len(sizes) + k, span.start, span.start + span.size) for k, span in enumerate(buffer.spans) if span.size
        ]
        sizes.extend(span.size for span in buffer.spans)
        first = 0  # of the spans that reach beyond where we are
        for schedule, base, end in parts:
            for chunk, low, high in ranges(schedule, end - base):
                low, high = base + low, base + high
                number = programs.setdefault(program(schedule, chunk, results), len(programs))
                while first < len(spans) and spans[first][2] <= low:
                    first += 1
                for tensor, start, stop in itertools.islice(spans, first, None):
                    if start >= high:
                        break
                    segment = kernels.Segment(tensor, max(low, start) - start, min(high, stop) - start, number)
                    last = segments[-1] if segments else None
                    if last is not None and (*last[:1], *last[2:]) == (tensor, segment.start, number):
                        segments[-1] = last._replace(stop=segment.stop)
                    else:
                        segments.append(segment)
    _, sources, destinations = pieces[0].parts[0].schedule.chunks[0]
    results = len(destinations) if results is None else results
    name = "sum" if op is ReduceOp.MEAN else op.value
    plan = kernels.plan(name, numbers, len(sources), results, tuple(sizes), tuple(programs), tuple(segments))
    written = sum(sizes) * results * itemsize(numbers.result)
    read = sum(sizes) * len(sources) * itemsize(numbers.dtype)
    return HostPlan(plan, written + read >= kernels.THREADED_BYTES, written >= kernels.PAST_CACHE_BYTES)


@lru_cache(maxsize=4096)
def program(schedule: Schedule, chunk: int, results: int | None = None) -> Program:
    """Return what the steps of one chunk compute, with all copies gone, for the first ``results`` destinations or all.

    Chains are one fold: where a value is the first operand of another and nothing else reads it, its operands
    take its place. The order of combination stays what it was, so results stay the same to the bit.

    >>> from crossreduce.planning import direct, hierarchical_copy
    >>> program(direct(["cpu:0", "cpu:1", "cpu:2"]), 1)
    Program(slots=1, folds=((0, 0, 1, 2),), results=(-1, -1, -1))
    >>> program(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), 0).folds
    ((0, 2, 3), (1, 0, 1, -1))
    """
    _, sources, destinations = schedule.chunks[chunk]
    cells = {source: k for k, source in enumerate(sources)}
    folds: dict[int, list[int]] = {}  # by value; values below len(sources) are sources
    for move in prepare(schedule)[chunk]:
        if len(move.srcs) == 1:
            cells[move.dst] = cells[move.srcs[0]]
        else:
            value = len(sources) + len(folds)
            folds[value] = [cells[src] for src in move.srcs]
            cells[move.dst] = value
    wanted = [cells[dst] for dst in destinations[:results]]
    needed = set(wanted)
    for value in reversed(folds):
        if value in needed:
            needed.update(folds[value])
    folds = {value: operands for value, operands in folds.items() if value in needed}
    reads = Counter([*wanted, *(operand for operands in folds.values() for operand in operands)])
    joined = set()
    for operands in folds.values():
        if operands[0] in folds and reads[operands[0]] == 1:
            joined.add(operands[0])
            operands[:1] = folds[operands[0]]
    return _with_slots({value: operands for value, operands in folds.items() if value not in joined}, wanted)


def _with_slots(folds: dict[int, list[int]], results: list[int]) -> Program:
    """Give each value a slot, and one that is read no more to another value."""
    last_read = {operand: value for value, operands in folds.items() for operand in operands}
    slot_of: dict[int, int] = {}
    free: list[int] = []
    slots = 0
    written = []
    for value, operands in folds.items():
        dying = [x for x in dict.fromkeys(operands) if x in folds and last_read[x] == value and x not in results]
        given = [~slot_of[x] if x in folds else x for x in operands]
        if operands[0] in dying and operands.count(operands[0]) == 1:
            slot_of[value] = slot_of[operands[0]]
            dying.remove(operands[0])
        elif free:
            slot_of[value] = free.pop()
        else:
            slot_of[value] = slots
            slots += 1
        free.extend(slot_of[x] for x in dying)
        written.append((slot_of[value], *given))
    return Program(slots, tuple(written), tuple(~slot_of[x] if x in folds else x for x in results))


def run_on_host(
    made: HostPlan,
    sources: Sequence[Sequence[Any]],
    results: Sequence[Sequence[Any]],
    threads: int | None,
    apart: bool = False,
) -> tuple[int, int] | None:
    """Run a plan: see ``kernels.Plan.run``. ``threads``: the framework's own limit, where it has one."""
    count = 1
    if made.threaded:
        count = kernels.threads() if threads is None else min(kernels.threads(), threads)
    return made.plan.run(sources, results, count, made.past_cache, apart)
