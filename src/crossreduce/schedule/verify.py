"""Run a schedule symbolically and prove that it computes what it claims.

In: a Schedule.  Out: nothing, or ScheduleError.  Knows no tensors, clocks or frameworks; a
contribution is just a device's number. What is counted is how often each source's contribution is
in what a device holds: never, once, or more. Sets would miss a contribution that is added twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import ScheduleError, message, shown
from .schedule import Schedule, Step


class Held(NamedTuple):
    """What a device holds of a chunk: bit s of ``once`` says that source s is in it, of ``twice`` that it
    is in it more than once. ``unsure``: it depends on which step of a round ran first."""

    once: int
    twice: int
    unsure: bool
    made_by: tuple[int, int] | None  # round and step; None: it was there from the start


def verify(schedule: Schedule) -> None:
    """Raise unless every destination ends up with every source's contribution exactly once.

    A round's steps may run in any order or at the same time, so a schedule whose result depends on
    that order is refused as well. What a device holds in between, and what is left on devices that are
    no destination, does not matter.

    Raises:
      ScheduleError: names the round and step, the chunk, the device and the contribution: lost (it never
        arrives), stale (it was read before the contribution had arrived), doubled (added twice), or a
        device that is asked for a chunk it does not hold, or two steps of one round that race.

    >>> from crossreduce.planning import ring
    >>> verify(ring(["cpu:0", "cpu:1", "cpu:2"]))
    """
    completing(schedule)


def completing(schedule: Schedule) -> list[list[bool]]:
    """Verify a schedule, and return for each step of each round whether it makes a chunk's result whole.

    Such a step combines several values into one that has every contribution once; what follows only
    copies it. Here, and only here, a mean is divided and a half type rounded.

    Raises:
      ScheduleError: as ``verify``.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(message("this is no schedule.", shown(schedule), "Schedule.from_json for its text"))
    flags = [[False] * len(steps) for steps in schedule.rounds]
    wholes = [sum(1 << source for source in chunk.sources) for chunk in schedule.chunks]
    cells = _start(schedule)
    for r, s, step, held, _ in _walk(schedule, cells):
        flags[r][s] = len(step.srcs) > 1 and held.once == wholes[step.chunk] and not held.twice
    for c, chunk in enumerate(schedule.chunks):
        for dst in chunk.destinations:
            last = cells.get((c, dst))
            if last is None or last.unsure or last.twice or last.once != wholes[c]:
                raise ScheduleError(_explain(schedule, c, dst, wholes[c]))
    return flags


def _start(schedule: Schedule) -> Cells:
    return {(c, s): Held(1 << s, 0, False, None) for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}


Cells = dict[tuple[int, int], Held]
Made = tuple[int, int, Step, Held, tuple[Held, ...]]


def _walk(schedule: Schedule, cells: Cells) -> Iterator[Made]:
    """Run the schedule on ``cells``; yield each step's round and number, what it makes, and what it read."""
    for r, steps in enumerate(schedule.rounds):
        made: Cells = {}
        writers: Counter[tuple[int, int]] = Counter((step.chunk, step.dst) for step in steps)
        reads: list[tuple[Held, ...]] = []
        for s, step in enumerate(steps):
            for src in step.srcs:
                if (step.chunk, src) not in cells:
                    raise ScheduleError(
                        f"round {r}, step {s} ({schedule.describe(step)}): "
                        f"device {schedule.devices[src]} holds nothing of chunk {step.chunk} yet, "
                        "so it has no contribution to give."
                    )
            read = tuple(cells[step.chunk, src] for src in step.srcs)
            reads.append(read)
            once = twice = 0
            for held in read:
                twice |= held.twice | (once & held.once)
                once |= held.once
            cell = (step.chunk, step.dst)
            raced = cell in made and (made[cell][:2] != (once, twice) or made[cell].unsure)
            made[cell] = Held(once, twice, raced or any(held.unsure for held in read), (r, s))
        # A step that reads what another step of this round changes gets the old value or the new one.
        settled = False
        while not settled:
            settled = True
            for step in steps:
                cell = (step.chunk, step.dst)
                own = {step.dst} if writers[cell] == 1 else set()  # its own value, which nobody else changes
                for other in ((step.chunk, src) for src in step.srcs if src not in own):
                    differs = other in made and (made[other][:2] != cells[other][:2] or made[other].unsure)
                    if differs and not made[cell].unsure:
                        made[cell] = made[cell]._replace(unsure=True)
                        settled = False
        cells.update(made)
        for s, step in enumerate(steps):
            yield r, s, step, made[step.chunk, step.dst], reads[s]


def _explain(schedule: Schedule, c: int, dst: int, wanted: int) -> str:
    """Say which contribution went wrong at a destination, and which step is to blame."""
    cells = _start(schedule)
    history = {(r, s): (step, held, read) for r, s, step, held, read in _walk(schedule, cells)}
    device = schedule.devices[dst]
    held = cells.get((c, dst))
    if held is None:
        first = schedule.devices[schedule.chunks[c].sources[0]]
        return (
            f"no step brings chunk {c} to its destination {device}: "
            f"the contribution of device {first}, among others, is lost."
        )
    place = "as it was at the start, since no step writes it there"
    if held.made_by is not None:
        r, s = held.made_by
        place = f"made by round {r}, step {s} ({schedule.describe(history[r, s][0])})"
    if held.unsure:
        return (
            f"what {device} holds of chunk {c} in the end, {place}, depends on the order of steps that "
            f"run in the same round, so a contribution such as device {_first(schedule, wanted)}'s may be stale."
        )
    if held.twice:
        source = (held.twice & -held.twice).bit_length() - 1
        while True:  # back to the step that doubled it: none of the values it read had it twice
            assert held.made_by is not None
            r, s = held.made_by
            step, _, read = history[r, s]
            earlier = next((value for value in read if value.twice >> source & 1), None)
            if earlier is None:
                return (
                    f"round {r}, step {s} ({schedule.describe(step)}) adds the contribution of device "
                    f"{schedule.devices[source]} a second time, and it reaches destination {device} doubled."
                )
            held = earlier
    missing = wanted & ~held.once  # only sources hold anything at the start, so there is nothing else to find
    source = (missing & -missing).bit_length() - 1
    inputs = {dst} if held.made_by is None else set(history[held.made_by][0].srcs) | {dst}
    since = (-1, -1) if held.made_by is None else held.made_by
    for (r, s), (step, made, _) in history.items():
        if (r, s) > since and step.chunk == c and step.dst in inputs and made.once >> source & 1:
            return (
                f"{device} holds a stale chunk {c}, {place}: the contribution of device "
                f"{schedule.devices[source]} reaches {schedule.devices[step.dst]} only later, "
                f"in round {r}, step {s} ({schedule.describe(step)})."
            )
    return f"{device} holds chunk {c}, {place}, in which the contribution of device {schedule.devices[source]} is lost."


def _first(schedule: Schedule, bits: int) -> str:
    return schedule.devices[(bits & -bits).bit_length() - 1]
