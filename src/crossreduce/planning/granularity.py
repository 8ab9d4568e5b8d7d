"""Round the chunks' shares of the buffer to multiples of 1/2**m, so that exported plans fit most message sizes.

Input: a schedule, whose shares may be any fractions, and its topology. Output: the same schedule with rounded shares.
Their common denominator is the smallest power of two that costs at most a given part of the rate. If there is no such
power of two, the output is the schedule itself.

The number of equal chunks in a file is the least common denominator of the shares. If the number of elements is not a
multiple of it, RCCL ignores the file (msccl_lifecycle.cc), and MSCCL++ raises an error (checkMessageSize in
execution_plan.cc). Users' sizes are mostly multiples of a power of two.

For each denominator that is tried, a share consists of units of 1 / denominator. Every share is rounded down. Then the
remaining units are added one by one, each to the chunk that raises the load of the busiest link least. Finally units
are moved between chunks as long as the busiest link becomes less busy. This is a heuristic: a result is taken only if
its rate, computed exactly, is within the tolerance.
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
"""The greatest denominator that is tried. A file has an operation for each chunk and step, so few chunks are better."""


def is_power_of_two(number: int) -> bool:
    """Return whether a positive integer is a power of two."""
    return number & (number - 1) == 0


def sizes_that_fit(units: int, what: str = "elements") -> str:
    """Return a text about the messages for which a file can be used. Their number of ``what`` is a multiple of units.

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
      schedule: a schedule of one of the five collectives.
      topology: the topology on which it runs.
      tolerance: the part of the rate that may be lost, from 0 to 1.
      nbytes: a size of the buffer for which the simulated rate must be within the tolerance, too; 0: no size. If the
        schedule has one piece, only the simulation counts, since its links are idle part of the time.
      costs: the costs in the simulation.
    Returns:
      The schedule with rounded shares and without the chunks whose share becomes 0. The schedule itself is returned if
      its shares are such multiples already, or if no 2**m up to ``MOST_UNITS`` is within the tolerance.

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

    def seconds_of(rounded: Schedule) -> float:
        return simulate(rounded, topology, nbytes, costs=costs).seconds

    most_s = seconds_of(schedule) / (1 - tolerance) if tolerance < 1 else math.inf
    groups = _groups(schedule)
    use = _link_use(schedule, topology)
    units = 1
    while units < max(len(groups), 2):
        units *= 2
    while units <= MOST_UNITS:
        if units % len(groups) == 0:
            roundings = [_least_load_units(use, shares, groups, units)]
            if least == 0:  # the time of one piece depends on each chunk, not only on the busiest link
                roundings.append(_nearest_units(shares, groups, units))
            for counts in roundings:
                rounded = _set_shares(schedule, counts, units)
                rounded_rate = fluid_rate(rounded, topology)
                if rounded_rate is not None and rounded_rate >= least and seconds_of(rounded) <= most_s:
                    return rounded
        units *= 2
    return schedule


def _groups(schedule: Schedule) -> list[list[int]]:
    """Return groups of chunks. The rounded shares of each group must have the same sum.

    If each rank owns a part of the buffer, as in a reduce-scatter, a group contains the chunks of a rank. Otherwise
    there is one group of all chunks.
    """
    everyone = range(len(schedule.chunks))
    for ends in ("sources", "destinations"):
        owners = [getattr(chunk, ends) for chunk in schedule.chunks]
        if all(len(owner) == 1 for owner in owners) and len(set(owners)) > 1:
            return [[k for k in everyone if owners[k] == owner] for owner in sorted(set(owners))]
    return [list(everyone)]


# For each chunk and each link that it uses, the number of the link, and its load by one unit of the chunk. A load is a
# time in a common unit, as an integer, so that equal ones compare as equal.
Use = list[list[tuple[int, int]]]


def _link_use(schedule: Schedule, topology: Topology) -> Use:
    """Return the use of links by each chunk; links are numbered in the order of ``carried_chunks``."""
    links = carried_chunks(schedule, topology)
    scale = math.lcm(*(bandwidth.numerator for bandwidth, _ in links))
    use: Use = [[] for _ in schedule.chunks]
    for link, (bandwidth, counts) in enumerate(links):
        for chunk, count in counts.items():
            use[chunk].append((link, count * int(scale / bandwidth)))
    return use


def _least_load_units(use: Use, shares: list[Fraction], groups: list[list[int]], units: int) -> list[int]:
    """Return the number of units of each chunk, by the heuristic that the module's docstring describes."""
    counts = [math.floor(share * units) for share in shares]
    busy = [0] * (1 + max(link for links in use for link, _ in links))
    for links, count in zip(use, counts, strict=True):
        _add_load(busy, links, count)
    for group in groups:
        for _ in range(units // len(groups) - sum(counts[k] for k in group)):
            top = max(busy)
            best = min(group, key=lambda k: (_load_with_unit(busy, use[k], top), counts[k] - shares[k] * units, k))
            counts[best] += 1
            _add_load(busy, use[best], 1)
    for _ in range(len(shares)):  # limits the time of the heuristic
        move = _find_move(use, busy, counts, groups)
        if move is None:
            break
        for k, change in zip(move, (-1, 1), strict=True):
            counts[k] += change
            _add_load(busy, use[k], change)
    return counts


def _nearest_units(shares: list[Fraction], groups: list[list[int]], units: int) -> list[int]:
    """Return the number of units of each chunk, rounded down, or up for the chunks that would lose most by that."""
    counts = [math.floor(share * units) for share in shares]
    for group in groups:
        missing = units // len(groups) - sum(counts[k] for k in group)
        for k in sorted(group, key=lambda k: (counts[k] - shares[k] * units, k))[:missing]:
            counts[k] += 1
    return counts


def _add_load(busy: list[int], links: list[tuple[int, int]], count: int) -> None:
    for link, load in links:
        busy[link] += load * count


def _load_with_unit(busy: list[int], links: list[tuple[int, int]], top: int) -> int:
    """Return the load of the busiest link with another unit of a chunk; ``top`` is the load without that unit."""
    return max(top, max((busy[link] + load for link, load in links), default=0))


def _find_move(use: Use, busy: list[int], counts: list[int], groups: list[list[int]]) -> tuple[int, int] | None:
    """Return two chunks of a group: a unit moved from the first one to the second one makes the busiest link less busy.

    Return ``None`` if there are no such chunks.
    """
    top = max(busy)
    busiest = busy.index(top)
    for group in groups:
        for source in group:
            if not counts[source] or all(link != busiest for link, _ in use[source]):
                continue
            _add_load(busy, use[source], -1)
            top_without = max(busy)
            after, target = min((_load_with_unit(busy, use[k], top_without), k) for k in group)
            _add_load(busy, use[source], 1)
            if after < top:
                return source, target
    return None


def _set_shares(schedule: Schedule, counts: list[int], units: int) -> Schedule:
    """Return the schedule in which chunk k has ``counts[k] / units`` of the buffer, without chunks of share 0."""
    kept = [k for k, count in enumerate(counts) if count]
    number = {k: position for position, k in enumerate(kept)}
    chunks = [schedule.chunks[k]._replace(share=Fraction(counts[k], units)) for k in kept]
    rounds = [
        tuple(step._replace(chunk=number[step.chunk]) for step in steps if step.chunk in number)
        for steps in schedule.rounds
    ]
    routes = [route._replace(chunk=number[route.chunk]) for route in schedule.routes if route.chunk in number]
    names = schedule.collective, schedule.algorithm, schedule.devices
    return Schedule(*names, tuple(chunks), tuple(rounds), schedule.pieces, tuple(routes))
