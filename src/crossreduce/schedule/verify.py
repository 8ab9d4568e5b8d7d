"""Run a schedule symbolically and prove that it computes its collective.

The evaluation counts how often each source's contribution is in the value that a device stores: never, once, or more
than once. Sets would miss a contribution that is added twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import ScheduleError, shown
from .generated_schedule import GeneratedSchedule
from .schedule import Schedule, Step


class _Contributions(NamedTuple):
    """A symbolic value: which sources' contributions it contains."""

    once: int  # bit s is set if the value contains the contribution of source s
    twice: int  # bit s is set if it contains this more than once
    made_by: tuple[int, int] | None  # round and step; None for an input


_Cells = dict[tuple[int, int], _Contributions]  # by chunk and device
# (round, number in the round), the step, the value that it wrote, the values that it read
_Evaluated = tuple[tuple[int, int], Step, _Contributions, tuple[_Contributions, ...]]


def verify(schedule: Schedule) -> None:
    """Raise unless every destination ends up with every source's contribution exactly once.

    All steps of a round read the values that the previous round left, and no two steps of a round write the same
    chunk on the same device. Intermediate values, and values on devices that are not destinations, do not matter.

    Raises:
      ScheduleError: a contribution is lost (it never arrives), stale (a value was read before it had arrived) or
        doubled (added twice), a step reads from a device that does not store the chunk yet, or two steps of a round
        write the same chunk on the same device. The error names the chunk, the devices and any step at fault.

    >>> from crossreduce.planning import ring
    >>> verify(ring(["cpu:0", "cpu:1", "cpu:2"]))
    """
    if not isinstance(schedule, Schedule):
        remedy = "Schedule.from_json for JSON text; crossreduce verify FILE for MSCCL XML"
        raise ScheduleError.of("this is not a Schedule.", shown(schedule), remedy)
    if isinstance(schedule, GeneratedSchedule):
        # Every other chunk is the image of a base chunk under a permutation of the devices, so its result is right if
        # that of the base chunk is. The schedule's constructor has checked the permutations.
        schedule = schedule.base
    if "_is_proved" in schedule.__dict__ or _is_right(schedule):
        schedule.__dict__["_is_proved"] = True  # schedules are immutable, so one proof of each object is enough
        return
    cells = _initial_cells(schedule)
    for _ in _evaluate(schedule, cells):
        pass
    for c, chunk in enumerate(schedule.chunks):
        everyone = sum(1 << source for source in chunk.sources)
        for dst in chunk.destinations:
            result = cells.get((c, dst))
            if result is None or result.twice or result.once != everyone:
                raise ScheduleError(_explain(schedule, c, dst, everyone))


def _is_right(schedule: Schedule) -> bool:
    """Return whether every destination gets every contribution once, and no step has a fault, even a harmless one.

    This does the same as ``_evaluate`` in half of the time, without the data for error texts. The result may be False
    for a valid schedule: a value that no destination needs may contain a contribution twice.
    """
    cells = [{source: 1 << source for source in chunk.sources} for chunk in schedule.chunks]
    for steps in schedule.rounds:
        written: dict[tuple[int, int], int] = {}
        for chunk, dst, srcs in steps:
            values, once = cells[chunk], 0
            for src in srcs:
                value = values.get(src, 0)
                if not value or once & value:
                    return False
                once |= value
            written[chunk, dst] = once
        if len(written) < len(steps):
            return False
        for (chunk, dst), once in written.items():
            cells[chunk][dst] = once
    for (_, sources, destinations), values in zip(schedule.chunks, cells, strict=True):
        everyone = sum([1 << source for source in sources])
        if any(values.get(dst) != everyone for dst in destinations):
            return False
    return True


def _initial_cells(schedule: Schedule) -> _Cells:
    """Return the inputs: each source of a chunk stores its own contribution."""
    return {(c, s): _Contributions(1 << s, 0, None) for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}


def _evaluate(schedule: Schedule, cells: _Cells) -> Iterator[_Evaluated]:
    """Run the schedule on ``cells``, round by round, and yield every step with the values that it wrote and read."""
    for r, steps in enumerate(schedule.rounds):
        written: _Cells = {}
        for s, step in enumerate(steps):
            chunk, dst, srcs = step
            if (chunk, dst) in written:
                earlier = written[chunk, dst].made_by
                assert earlier is not None
                raise ScheduleError(
                    f"round {r}, step {s} ({schedule.describe(step)}): step {earlier[1]} of the same "
                    f"round writes chunk {chunk} on {schedule.devices[dst]} too, so a contribution can be lost."
                )
            once = twice = 0
            read = []
            for src in srcs:
                value = cells.get((chunk, src))
                if value is None:
                    raise ScheduleError(
                        f"round {r}, step {s} ({schedule.describe(step)}): device {schedule.devices[src]} does not "
                        f"store chunk {chunk} yet, so it has no contribution to send."
                    )
                twice |= value.twice | (once & value.once)
                once |= value.once
                read.append(value)
            written[chunk, dst] = _Contributions(once, twice, (r, s))
            yield (r, s), step, written[chunk, dst], tuple(read)
        cells.update(written)


def _explain(schedule: Schedule, c: int, dst: int, everyone: int) -> str:
    """Return the error text for a wrong value of chunk c at ``dst``, with a contribution and the step at fault.

    ``everyone`` is the bit set of all sources of the chunk.
    """
    cells = _initial_cells(schedule)
    history = {where: (step, written, read) for where, step, written, read in _evaluate(schedule, cells)}
    device = schedule.devices[dst]
    value = cells.get((c, dst))
    if value is None:
        first, *others = (schedule.devices[source] for source in schedule.chunks[c].sources)
        lost = f"the contribution of device {first}{', among others,' if others else ''} is lost."
        return f"no step brings chunk {c} to its destination {device}: {lost}"
    origin = "there from the start, since no step writes it"
    if value.made_by is not None:
        r, s = value.made_by
        origin = f"made by round {r}, step {s} ({schedule.describe(history[r, s][0])})"
    if value.twice:
        source = (value.twice & -value.twice).bit_length() - 1  # the first one in the bit set
        while True:  # search for the step that added it twice: none of its operands has it twice
            assert value.made_by is not None
            r, s = value.made_by
            step, _, read = history[r, s]
            earlier = next((operand for operand in read if operand.twice >> source & 1), None)
            if earlier is None:
                return (
                    f"round {r}, step {s} ({schedule.describe(step)}) adds the contribution of device "
                    f"{schedule.devices[source]} a second time, and it reaches destination {device} doubled."
                )
            value = earlier
    missing = everyone & ~value.once  # cannot be 0: the value is wrong, but contains nothing twice
    source = (missing & -missing).bit_length() - 1
    # The value is stale if the contribution reaches dst, or a device that dst read from, after dst has read.
    inputs = {dst} if value.made_by is None else set(history[value.made_by][0].srcs) | {dst}
    since = (-1, -1) if value.made_by is None else value.made_by
    for (r, s), (step, written, _) in history.items():
        is_later = r > since[0] or (r == since[0] and s != since[1])
        if is_later and step.chunk == c and step.dst in inputs and written.once >> source & 1:
            when = "only later, in" if r > since[0] else "only at the end of this round, by"
            return (
                f"{device} stores a stale chunk {c}, {origin}: the contribution of device "
                f"{schedule.devices[source]} reaches {schedule.devices[step.dst]} {when} "
                f"round {r}, step {s} ({schedule.describe(step)})."
            )
    return f"{device} stores chunk {c}, {origin}, and the contribution of device {schedule.devices[source]} is lost."
