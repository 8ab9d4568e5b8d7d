"""Shares of the buffer that are multiples of 1/2, 1/4, 1/8, ...: exported plans then fit the sizes that users have.

Input: a schedule, whose shares may be any fractions, and its topology. Output: the same schedule with other shares, of
the smallest denominator that costs at most a given part of its rate, or the schedule itself where there is none.

A file has as many equal chunks as the least common denominator of its shares. RCCL ignores a file unless the number of
elements is a multiple of that (msccl_lifecycle.cc), and MSCCL++ raises an error (checkMessageSize in
execution_plan.cc); users' sizes are mostly multiples of a power of two.

For each denominator every share is rounded down, and then the units that are left go one by one to the chunk with which
the busiest link stays least busy; at the end units move as long as that helps. This is a heuristic: a result is taken
only if its rate, computed exactly, is within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..schedule import Schedule, carried_chunks, fluid_rate
from ..topology import Topology

TOLERANCE: Final = 0.02
"""The part of the rate that rounded shares may cost by default."""

MOST_UNITS: Final = 1 << 10
"""The greatest denominator that is tried. A file has an operation for each chunk and step, so few are better."""

_MOVES: Final = 4  # how often a unit moves, per chunk


def is_power_of_two(number: int) -> bool:
    """Return whether a positive integer is a power of two."""
    return number & (number - 1) == 0


@lru_cache(maxsize=256)
def rounded(schedule: Schedule, topology: Topology, tolerance: float = TOLERANCE) -> Schedule:
    """Return a schedule with shares that are multiples of 1/2**m, for the least m within the tolerance.

    Args:
      schedule: one of the five collectives.
      topology: where it runs.
      tolerance: the part of the rate that may be lost, from 0 to 1.
    Returns:
      The schedule itself if its shares are such multiples already, or if no such m was found up to ``MOST_UNITS``.
      Chunks whose share becomes 0 are left out.

    >>> from crossreduce import Topology
    >>> from crossreduce.planning import ring
    >>> six = rounded(ring([f"cpu:{k}" for k in range(6)]), Topology.ring(6, gb_per_s=25), 0.2)
    >>> [str(chunk.share) for chunk in six.chunks]
    ['3/16', '3/16', '3/16', '3/16', '1/8', '1/8']
    """
    shares = [chunk.share for chunk in schedule.chunks]
    if all(is_power_of_two(share.denominator) for share in shares):
        return schedule
    rate = fluid_rate(schedule, topology)
    if rate is None:
        return schedule
    least = rate * (1 - Fraction(tolerance))
    groups = _groups(schedule)
    links = carried_chunks(schedule, topology)
    use = np.zeros((len(links), len(shares)))
    for link, (bandwidth, counts) in enumerate(links):
        use[link, list(counts)] = [count / float(bandwidth) for count in counts.values()]
    units = 1
    while units < max(len(groups), 2):
        units *= 2
    while units <= MOST_UNITS:
        if units % len(groups) == 0:
            made = _with_shares(schedule, _units(use, shares, groups, units), units)
            found = fluid_rate(made, topology)
            if found is not None and found >= least:
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


def _units(use: NDArray[Any], shares: list[Fraction], groups: list[list[int]], units: int) -> list[int]:
    """Return how many units each chunk gets. ``use``: how busy a share of 1 of each chunk keeps each link."""
    found = np.array([share * units // 1 for share in shares], dtype=np.int64)
    busy = use @ found
    for group in groups:
        members = np.array(group)
        for _ in range(units // len(groups) - int(found[members].sum())):
            with_one = (busy[:, None] + use[:, members]).max(axis=0)
            best = members[_least(with_one, [found[k] - shares[k] * units for k in group])]
            found[best] += 1
            busy += use[:, best]
    for _ in range(_MOVES * len(shares)):
        for source, target in _moves(use, busy, found, groups):
            changed = busy - use[:, source] + use[:, target]
            if changed.max() < busy.max() * (1 - 1e-12):
                found[source] -= 1
                found[target] += 1
                busy = changed
                break
        else:
            break
    return [int(each) for each in found]


def _least(values: NDArray[Any], ties: list[Fraction]) -> int:
    """Return the position of the least value; of nearly equal ones that with the least ``ties``."""
    near = np.flatnonzero(values <= values.min() * (1 + 1e-12))
    return int(min(near, key=lambda k: (ties[k], k)))


def _moves(
    use: NDArray[Any], busy: NDArray[Any], found: NDArray[Any], groups: list[list[int]]
) -> Iterator[tuple[int, int]]:
    """Yield moves of a unit from a chunk that the busiest link carries to another one of its group, best ones first."""
    link = int(busy.argmax())
    for group in groups:
        members = np.array(group)
        for source in members[(use[link, members] > 0) & (found[members] > 0)]:
            after = (busy[:, None] - use[:, [source]] + use[:, members]).max(axis=0)
            yield int(source), int(members[int(after.argmin())])


def _with_shares(schedule: Schedule, found: list[int], units: int) -> Schedule:
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
