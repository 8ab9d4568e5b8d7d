"""Shares of the buffer that are multiples of 1/2, 1/4, 1/8, ...: exported plans then fit the sizes that users have.

Input: a schedule, whose shares may be any fractions, and its topology. Output: the same schedule with other shares, of
the smallest denominator that costs at most a given part of its rate; without such a denominator, the schedule itself.

A file has as many equal chunks as the least common denominator of its shares. RCCL ignores a file unless the number of
elements is a multiple of that (msccl_lifecycle.cc), and MSCCL++ raises an error (checkMessageSize in
execution_plan.cc); users' sizes are mostly multiples of a power of two.

For each denominator every share is rounded down, and then the units that are left go one by one to the chunk with which
the busiest link stays least busy; at the end units move as long as that helps. This is a heuristic: a result is taken
only if its rate, computed exactly, is within the tolerance.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Final

from ..schedule import Costs, Schedule, carried_chunks, fluid_rate, simulate
from ..topology import Topology
from .requests import NO_MORE

TOLERANCE: Final = 0.02
"""The part of the rate that rounded shares may cost by default."""

MOST_UNITS: Final = 1 << 12
"""The greatest denominator that is tried. A file has an operation for each chunk and step, so few are better."""


def is_power_of_two(number: int) -> bool:
    """Return whether a positive integer is a power of two."""
    return number & (number - 1) == 0


def sizes_that_fit(units: int, what: str = "elements") -> str:
    """Return for which messages a file can be used, as text: those whose number of ``what`` is a multiple of ``units``.

    >>> sizes_that_fit(64, "bytes"), sizes_that_fit(1)
    ('messages whose number of bytes is a multiple of 64', 'messages of any size')
    """
    if units == 1:
        return "messages of any size"
    fit = f"messages whose number of {what} is a multiple of {units}"
    if is_power_of_two(units):
        return fit
    return f"{fit}, WHICH IS NOT A POWER OF TWO: RCCL ignores the file for others, MSCCL++ raises an error"


@lru_cache(maxsize=256)
def round_shares(
    schedule: Schedule,
    topology: Topology,
    tolerance: float = TOLERANCE,
    nbytes: int = 0,
    costs: Costs = NO_MORE,
) -> Schedule:
    """Return a schedule with shares that are multiples of 1/2**m, for the least m within the tolerance.

    Args:
      schedule: one of the five collectives.
      topology: where it runs.
      tolerance: the part of the rate that may be lost, from 0 to 1.
      nbytes: the size of a replica's buffer for which this also has to be true in simulation; 0: no size. If the
        schedule has one piece, only this counts, since its links do not work all the time.
      costs: of the simulation.
    Returns:
      The schedule itself if its shares are such multiples already, or if no such m was found up to ``MOST_UNITS``.
      Chunks whose share becomes 0 are left out.

    >>> from crossreduce import Topology
    >>> from crossreduce.planning import ring
    >>> six = Topology.ring(6, gb_per_s=25)
    >>> [str(chunk.share) for chunk in round_shares(ring(six.devices), six).chunks]
    ['3/16', '3/16', '3/16', '1/8', '3/16', '1/8']
    """
    shares = [chunk.share for chunk in schedule.chunks]
    if all(is_power_of_two(share.denominator) for share in shares):
        return schedule
    rate = fluid_rate(schedule, topology)
    if rate is None:
        return schedule
    least = 0 if nbytes and schedule.pieces == 1 else rate * (1 - Fraction(tolerance))

    def seconds_of(made: Schedule) -> float:
        return simulate(made, topology, nbytes, costs=costs).seconds

    most_s = seconds_of(schedule) / (1 - tolerance) if tolerance < 1 else math.inf
    groups = _groups(schedule)
    use = _use(schedule, topology)
    units = 1
    while units < max(len(groups), 2):
        units *= 2
    while units <= MOST_UNITS:
        if units % len(groups) == 0:
            ways = [_units(use, shares, groups, units)]
            if least == 0:  # the time of one piece depends on each chunk, not only on the busiest link
                ways.append(_nearest(shares, groups, units))
            for counts in ways:
                made = _set_shares(schedule, counts, units)
                found = fluid_rate(made, topology)
                if found is not None and found >= least and seconds_of(made) <= most_s:
                    return made
        units *= 2
    return schedule


def _groups(schedule: Schedule) -> list[list[int]]:
    """Return the chunks whose shares add up to the same part: all, or those of each rank in parts of the buffer."""
    everyone = range(len(schedule.chunks))
    for ends in ("sources", "destinations"):
        of = [getattr(chunk, ends) for chunk in schedule.chunks]
        if all(len(each) == 1 for each in of) and len(set(of)) > 1:
            return [[k for k in everyone if of[k] == each] for each in sorted(set(of))]
    return [list(everyone)]


Use = list[list[tuple[int, int]]]  # for each chunk the links that it uses, and how busy one unit of it keeps each


def _use(schedule: Schedule, topology: Topology) -> Use:
    """Return the use of links, in whole numbers, so that equal loads are equal."""
    links = carried_chunks(schedule, topology)
    scale = math.lcm(*(bandwidth.numerator for bandwidth, _ in links))
    found: Use = [[] for _ in schedule.chunks]
    for link, (bandwidth, counts) in enumerate(links):
        for chunk, count in counts.items():
            found[chunk].append((link, count * int(scale / bandwidth)))
    return found


def _units(use: Use, shares: list[Fraction], groups: list[list[int]], units: int) -> list[int]:
    """Return how many units each chunk gets."""
    found = [math.floor(share * units) for share in shares]
    busy = [0] * (1 + max(link for links in use for link, _ in links))
    for links, count in zip(use, found, strict=True):
        _add(busy, links, count)
    for group in groups:
        for _ in range(units // len(groups) - sum(found[k] for k in group)):
            top = max(busy)
            best = min(group, key=lambda k: (_load_with_unit(busy, use[k], top), found[k] - shares[k] * units, k))
            found[best] += 1
            _add(busy, use[best], 1)
    for _ in range(len(shares)):
        move = _move(use, busy, found, groups)
        if move is None:
            break
        for k, change in zip(move, (-1, 1), strict=True):
            found[k] += change
            _add(busy, use[k], change)
    return found


def _nearest(shares: list[Fraction], groups: list[list[int]], units: int) -> list[int]:
    """Return how many units each chunk gets if those that lose most by rounding down get another one."""
    found = [math.floor(share * units) for share in shares]
    for group in groups:
        missing = units // len(groups) - sum(found[k] for k in group)
        for k in sorted(group, key=lambda k: (found[k] - shares[k] * units, k))[:missing]:
            found[k] += 1
    return found


def _add(busy: list[int], links: list[tuple[int, int]], count: int) -> None:
    for link, load in links:
        busy[link] += load * count


def _load_with_unit(busy: list[int], links: list[tuple[int, int]], top: int) -> int:
    """Return the load of the busiest link with another unit of a chunk; ``top``: without it."""
    return max(top, max((busy[link] + load for link, load in links), default=0))


def _move(use: Use, busy: list[int], found: list[int], groups: list[list[int]]) -> tuple[int, int] | None:
    """Return between which chunks of a group a unit can move so that the busiest link is less busy; ``None``: none."""
    top = max(busy)
    busiest = busy.index(top)
    for group in groups:
        for source in group:
            if not found[source] or all(link != busiest for link, _ in use[source]):
                continue
            _add(busy, use[source], -1)
            rest = max(busy)
            after, target = min((_load_with_unit(busy, use[k], rest), k) for k in group)
            _add(busy, use[source], 1)
            if after < top:
                return source, target
    return None


def _set_shares(schedule: Schedule, found: list[int], units: int) -> Schedule:
    kept = [k for k, count in enumerate(found) if count]
    number = {k: position for position, k in enumerate(kept)}
    chunks = [schedule.chunks[k]._replace(share=Fraction(found[k], units)) for k in kept]
    rounds = [
        tuple(step._replace(chunk=number[step.chunk]) for step in steps if step.chunk in number)
        for steps in schedule.rounds
    ]
    routes = [route._replace(chunk=number[route.chunk]) for route in schedule.routes if route.chunk in number]
    return Schedule(
        schedule.collective, schedule.algorithm, schedule.devices, tuple(chunks), tuple(rounds), schedule.pieces,
        tuple(routes),
    )  # fmt: skip
