"""The one loop that walks a schedule and calls a framework.

In: a schedule and the flat arrays of its sources.  Out: each destination's chunks. Nothing runs that
``verify`` has not accepted; that is done once per schedule. The loop uses Python ints only, so it
traces under ``jax.jit`` and ``tf.function`` as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import ScheduleError, message
from ..frameworks import Array, Framework, Numbers
from ..ops import ReduceOp
from ..schedule import Schedule, completing


class Move(NamedTuple):
    """A step, ready to run.

    ``whole``: it makes the chunk's result whole. ``spare``: which of its first two inputs the loop made
    and reads no more, or -1 (see ``Framework.combine``).
    """

    chunk: int
    dst: int
    srcs: tuple[int, ...]
    whole: bool
    spare: int


class Held(NamedTuple):
    """What one destination holds in the end: its parts, one a chunk, in order.

    ``fresh``: it is one part, which the loop made, and no other destination holds the same memory.
    """

    parts: list[Array]
    fresh: bool


@lru_cache(maxsize=1024)
def prepare(schedule: Schedule) -> tuple[tuple[Move, ...], ...]:
    """Verify a schedule, once, and return each chunk's steps in an order in which they can run one by one.

    All of its chunks must have the same sources and destinations. Beyond that they have nothing to do with
    each other, so one goes through all its rounds before the next begins: what is freed on the way is used
    again, and may still be in the cache.
    """
    if any(chunk[1:] != schedule.chunks[0][1:] for chunk in schedule.chunks):
        problem = "only schedules whose chunks all have the same sources and destinations can be executed."
        raise ScheduleError(message(problem, _given(schedule), "all_reduce, reduce or broadcast"))
    flags = completing(schedule)
    moves = [
        Move(*step, whole, -1)
        for steps, wholes in zip(schedule.rounds, flags, strict=True)
        for step, whole in zip(steps, wholes, strict=True)
    ]
    by_chunk: list[list[Move]] = [[] for _ in schedule.chunks]
    for move, spare in zip(moves, _spares(schedule, moves), strict=True):
        by_chunk[move.chunk].append(move._replace(spare=spare))
    return tuple(map(tuple, by_chunk))


def _given(schedule: Schedule) -> str:
    return f"{schedule.collective} by {schedule.algorithm}, {len(schedule.chunks)} chunks"


def _spares(schedule: Schedule, moves: list[Move]) -> list[int]:
    """Say for each move which of its first two inputs may be overwritten by its result.

    A value may be that a combination made, that is not whole yet (a whole one may be of another
    dtype), and that nothing reads later, under any name: copies may share its memory.
    """
    makers: dict[tuple[int, int], int] = {}  # which move made what a device now holds of a chunk
    last_read: dict[int, int] = {}
    inputs: list[list[int]] = []
    for number, move in enumerate(moves):
        read = [makers.get((move.chunk, src), -1) for src in move.srcs]
        last_read.update(dict.fromkeys(read, number))
        inputs.append(read)
        makers[move.chunk, move.dst] = read[0] if len(read) == 1 else number
    kept = {makers.get((c, dst), -1) for c, chunk in enumerate(schedule.chunks) for dst in chunk.destinations}
    return [
        next(
            (
                k
                for k, maker in enumerate(read[:2])
                if maker >= 0
                and not moves[maker].whole
                and maker not in kept
                and last_read[maker] == number
                and read.count(maker) == 1
            ),
            -1,
        )
        if len(read) > 1
        else -1
        for number, read in enumerate(inputs)
    ]


@lru_cache(maxsize=4096)
def ranges(schedule: Schedule, size: int) -> tuple[tuple[int, int, int], ...]:
    """Return the chunks that have elements in a buffer of ``size``, as ``(chunk, start, stop)``.

    An empty buffer goes through one chunk, to get the result's dtype.

    >>> from crossreduce.planning import direct
    >>> ranges(direct(["cpu:0", "cpu:1", "cpu:2"]), 2)
    ((1, 0, 1), (2, 1, 2))
    """
    spans = enumerate(schedule.spans(size))
    return tuple((c, start, stop) for c, (start, stop) in spans if stop > start) or ((0, 0, 0),)


def execute(
    schedule: Schedule,
    framework: Framework,
    op: ReduceOp,
    flats: Sequence[Array],
    size: int | None,
    numbers: Numbers,
) -> list[Held]:
    """Run a schedule whose chunks all have the same sources and destinations.

    Args:
      schedule: what to do.
      framework: the framework of the arrays.
      op: what combines them.
      flats: one flat array a source, in the order of the schedule's sources, each on its device.
      size: elements in each; ``None``: arrays of any shape are taken whole, by a schedule of one chunk.
      numbers: the dtypes to compute in, from ``framework.numbers``.
    Returns:
      For each destination, in order, its part of each of ``ranges``.
    Raises:
      ScheduleError: ``verify`` refuses the schedule, or its chunks differ in sources or destinations.
    """
    moves, devices = prepare(schedule), schedule.devices
    _, sources, destinations = schedule.chunks[0]
    if size is None and len(schedule.chunks) > 1:
        problem = "arrays of open size need a schedule of one chunk."
        raise ScheduleError(message(problem, _given(schedule), "one_device"))
    finish_first = len(sources) == 1 and (numbers.divisor != 1 or numbers.result != numbers.dtype)
    parts: list[list[Array]] = [[] for _ in destinations]
    made: set[int] = set()  # the devices whose cell the loop allocated
    active = ((0, 0, 0),) if size is None else ranges(schedule, size)
    for chunk, start, stop in active:
        cells: dict[int, Array] = {}  # by device
        for source, flat in zip(sources, flats, strict=True):
            x = flat if len(active) == 1 else framework.part(flat, start, stop)
            cells[source] = framework.finish(x, numbers) if finish_first else x
        made.clear()
        for _, dst, srcs, whole, spare in moves[chunk]:
            here = devices[dst]
            if len(srcs) == 1:
                before = cells[srcs[0]]
                cells[dst] = framework.copy(before, here)
                if cells[dst] is not before or srcs[0] in made:
                    made.add(dst)
                else:
                    made.discard(dst)
            else:
                xs = [cells[src] if src == dst else framework.copy(cells[src], here) for src in srcs]
                cells[dst] = framework.combine(op, xs, numbers, whole, spare)
                made.add(dst)
        for own, dst in zip(parts, destinations, strict=True):
            own.append(cells[dst])
    results: list[Held] = []
    taken: set[int] = set()
    for own, dst in zip(parts, destinations, strict=True):
        results.append(Held(own, len(own) == 1 and dst in made and id(own[0]) not in taken))
        taken.add(id(own[0]))
    return results
