"""A schedule as a program that every device runs alike: permutations, and tables of who picks what.

In: a ``Schedule`` whose devices stand for positions along an axis.  Out: a ``Program``, made once per schedule; plain
numbers, no arrays. A round becomes as few permutations as its busiest device has partners, since in one permutation
a device sends to one other and takes from one other. What differs from device to device is a table of rows, a
column a device; where all columns are alike, whoever runs the program can cut without looking at who it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import ScheduleError, message
from ..schedule import Schedule, Step, verify

Place = tuple[int, int]
"""A row: of the state (0), or of what permutation k brought (k + 1); and its number there."""

Table = tuple[tuple[Place, ...], ...]
"""For each device the places of some rows; as many for all."""


class Permute(NamedTuple):
    """Devices send rows to each other.

    ``pairs``: ``(src, dst)``, each device at most once on either side. ``loads``: for each stack the rows of the state
    that each device sends; no rows where nobody has any to send.
    """

    pairs: tuple[tuple[int, int], ...]
    loads: tuple[Table, ...]


class Update(NamedTuple):
    """Some devices fold rows into rows of one stack of the state.

    ``active``: which devices do. ``rows``: the rows that each of them writes. ``operands``: what is folded, in order;
    all is read as it was before the round. A single operand is a copy.
    """

    stack: int
    active: tuple[bool, ...]
    rows: Table
    operands: tuple[Table, ...]


class Program(NamedTuple):
    """``stacks``: the schedule's chunks by share, so that the rows of a stack are of one length (give or take one
    element). ``rounds``: permutations that may run together, and what is done with what they bring."""

    devices: int
    stacks: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[tuple[Permute, ...], tuple[Update, ...]], ...]

    @property
    def permutes(self) -> int:
        """How many permutations there are in all rounds."""
        return sum(len(permutes) for permutes, _ in self.rounds)


@lru_cache(maxsize=256)
def program(schedule: Schedule) -> Program:
    """Verify a schedule and return what its devices do.

    Raises:
      ScheduleError: ``verify`` refuses it, or a chunk does not go from all devices to all.

    >>> from crossreduce.planning import direct, one_device, ring
    >>> names = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    >>> [program(planner(names)).permutes for planner in (ring, direct, one_device)]
    [6, 6, 6]
    """
    verify(schedule)
    everyone = set(range(len(schedule.devices)))
    if any(set(chunk.sources) != everyone or set(chunk.destinations) != everyone for chunk in schedule.chunks):
        raise ScheduleError(
            message("every device of an axis gives, and needs, every chunk.", schedule.head, "an all_reduce")
        )
    by_share: defaultdict[object, list[int]] = defaultdict(list)
    for number, chunk in enumerate(schedule.chunks):
        by_share[chunk.share].append(number)
    stacks = tuple(map(tuple, by_share.values()))
    where = {chunk: (s, row) for s, chunks in enumerate(stacks) for row, chunk in enumerate(chunks)}
    rounds = tuple(_round(steps, where, len(stacks), len(everyone)) for steps in schedule.rounds if steps)
    return Program(len(everyone), stacks, rounds)


def ranges(rows: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
    """Split rows, a line a device, into ranges that are as long on all devices: each device's start, and the length.

    >>> ranges([[0, 1, 4], [2, 3, 4]])
    [((0, 2), 2), ((4, 4), 1)]
    """
    found: list[tuple[tuple[int, ...], int]] = []
    for column in zip(*rows, strict=True):
        starts, size = found[-1] if found else ((), 0)
        if found and all(row == start + size for row, start in zip(column, starts, strict=True)):
            found[-1] = starts, size + 1
        else:
            found.append((column, 1))
    return found


def _round(
    steps: Sequence[Step], where: dict[int, Place], stacks: int, n: int
) -> tuple[tuple[Permute, ...], tuple[Update, ...]]:
    loads: defaultdict[tuple[int, int], list[set[int]]] = defaultdict(lambda: [set() for _ in range(stacks)])
    jobs: defaultdict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for chunk, dst, srcs in steps:
        stack, row = where[chunk]
        if len(srcs) == 2 and srcs[1] != dst:
            srcs = (srcs[1], srcs[0])  # a + b is b + a to the bit, and the own part is last on all devices
        jobs[stack, dst, srcs].append(row)
        for src in srcs:
            if src != dst:
                loads[src, dst][stack].add(row)
    listed = {pair: [sorted(rows) for rows in per_stack] for pair, per_stack in loads.items()}
    permutes, found = [], {}
    for number, pairs in enumerate(_matchings(listed)):
        for pair in pairs:
            for stack, rows in enumerate(listed[pair]):
                found.update({(*pair, stack, row): (number + 1, k) for k, row in enumerate(rows)})
        senders = {src: listed[src, dst] for src, dst in pairs}
        tables = []
        for stack in range(stacks):
            most = max(len(rows[stack]) for rows in senders.values())
            # Whoever has fewer rows to send repeats one; nobody reads it.
            sent = {src: (rows[stack] + [*rows[stack][-1:], 0][:1] * most)[:most] for src, rows in senders.items()}
            tables.append(_table({src: [(0, row) for row in rows] for src, rows in sent.items()}, n))
        permutes.append(Permute(tuple(sorted(pairs)), tuple(tables)))

    updates = []
    for (stack, count, _, _), by_device in _alike(jobs).items():

        def places(dst: int, src: int, rows: list[int], stack: int = stack) -> list[Place]:
            return [(0, row) if src == dst else found[src, dst, stack, row] for row in rows]

        operands = tuple(
            _table({dst: places(dst, srcs[k], rows) for dst, (srcs, rows) in by_device.items()}, n)
            for k in range(count)
        )
        written = _table({dst: [(0, row) for row in rows] for dst, (_, rows) in by_device.items()}, n)
        updates.append(Update(stack, tuple(d in by_device for d in range(n)), written, operands))
    return tuple(permutes), tuple(updates)


Jobs = dict[tuple[int, int, int, int], dict[int, tuple[tuple[int, ...], list[int]]]]


def _alike(jobs: dict[tuple[int, int, tuple[int, ...]], list[int]]) -> Jobs:
    """Put jobs together that differ only in rows and devices: at most one a device in each group."""
    groups: Jobs = {}
    for (stack, dst, srcs), rows in sorted(jobs.items()):
        at = 0
        while dst in groups.get((stack, len(srcs), len(rows), at), {}):
            at += 1
        groups.setdefault((stack, len(srcs), len(rows), at), {})[dst] = (srcs, sorted(rows))
    return groups


def _table(places: dict[int, list[Place]], n: int) -> Table:
    """Return a column for each device; one that has none gets the first one's, and what it makes of it is not used."""
    first = places[min(places)]
    return tuple(tuple(places.get(device, first)) for device in range(n))


def _matchings(loads: dict[tuple[int, int], list[list[int]]]) -> list[list[tuple[int, int]]]:
    """Split pairs ``(src, dst)`` into as few sets as the busiest device has partners, with each device once a side.

    König's theorem: a bipartite graph's edges take as many colours as its greatest degree. Pairs that are as far apart,
    and send as much, come first, and so mostly land together.
    """
    n = 1 + max((max(pair) for pair in loads), default=0)
    order = sorted(loads, key=lambda pair: ([-len(rows) for rows in loads[pair]], (pair[1] - pair[0]) % n, pair))
    degree = max((max(_count(order, side)) for side in (0, 1)), default=0)
    # By side, device and colour: the partner.
    partner: list[dict[tuple[int, int], int]] = [{}, {}]

    def free(side: int, device: int) -> int:
        return next(colour for colour in range(degree) if (device, colour) not in partner[side])

    def paint(pair: tuple[int, int], colour: int) -> None:
        partner[0][pair[0], colour], partner[1][pair[1], colour] = pair[1], pair[0]

    for src, dst in order:
        both = (c for c in range(degree) if (src, c) not in partner[0] and (dst, c) not in partner[1])
        colour = next(both, None)
        if colour is None:
            # Swap two colours along the path that starts at dst, which cannot reach src: it then has one's free colour.
            colour, other = free(0, src), free(1, dst)
            path, side, device, wanted = [], 1, dst, colour
            while (device, wanted) in partner[side]:
                mate = partner[side][device, wanted]
                path.append(((mate, device) if side else (device, mate), wanted))
                side, device, wanted = 1 - side, mate, other if wanted == colour else colour
            for pair, old in path:
                del partner[0][pair[0], old], partner[1][pair[1], old]
            for pair, old in path:
                paint(pair, other if old == colour else colour)
        paint((src, dst), colour)
    found: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    for (src, colour), dst in partner[0].items():
        found[colour].append((src, dst))
    return found


def _count(pairs: Iterable[tuple[int, int]], side: int) -> list[int]:
    counts: defaultdict[int, int] = defaultdict(int)
    for pair in pairs:
        counts[pair[side]] += 1
    return list(counts.values()) or [0]
