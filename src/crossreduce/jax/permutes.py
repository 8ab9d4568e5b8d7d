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
from ..schedule import Schedule, verify

Place = tuple[int, int]
"""A row: of which value, and its number there. Each stack has values of its own, in the order in which they come to be:
first the device's own chunks, then, round by round, what each permutation brings and what each fold makes."""

Table = tuple[tuple[Place, ...], ...]
"""For each device the places of some rows; as many for all."""


class Permute(NamedTuple):
    """Devices send rows to each other; what comes is a value in each stack.

    ``pairs``: ``(src, dst)``, each device at most once on either side. ``loads``: for each stack the rows that each
    device sends; no rows where nobody has any to send.
    """

    pairs: tuple[tuple[int, int], ...]
    loads: tuple[Table, ...]


class Fold(NamedTuple):
    """Devices combine rows of one stack, in the operands' order; the result is a value of that stack."""

    stack: int
    operands: tuple[Table, ...]


class Program(NamedTuple):
    """What all devices run.

    ``stacks``: the schedule's chunks by share, so that the rows of a stack are of one length, give or take one element.
    ``rounds``: permutations, then folds. ``results``: for each stack where its chunks are in the end.

    No value is ever changed, so copies cost nothing, and XLA need not guard what it overwrites: with rows updated in
    place, a ring over 8 CPU devices copied its whole buffer in each of 14 rounds.
    """

    devices: int
    stacks: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[tuple[Permute, ...], tuple[Fold, ...]], ...]
    results: tuple[Table, ...]

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
    n = len(everyone)
    held = Held(
        {(stack, device, row): (0, row) for stack, row in where.values() for device in range(n)}, [1] * len(stacks), n
    )
    rounds = tuple(
        _round([(*where[chunk], dst, srcs) for chunk, dst, srcs in steps], held) for steps in schedule.rounds
    )
    results = tuple(
        tuple(tuple(held.places[s, device, row] for row in range(len(chunks))) for device in range(n))
        for s, chunks in enumerate(stacks)
    )
    return Program(n, stacks, rounds, results)


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


class Held(NamedTuple):
    """Where each device has each row of each stack now; how many values each stack has; how many devices there are."""

    places: dict[tuple[int, int, int], Place]
    values: list[int]
    devices: int


def _round(
    steps: Sequence[tuple[int, int, int, tuple[int, ...]]], held: Held
) -> tuple[tuple[Permute, ...], tuple[Fold, ...]]:
    """Turn steps ``(stack, row, dst, srcs)`` into permutations and folds. All is read as it was before the round."""
    before, stacks, n = dict(held.places), range(len(held.values)), held.devices
    loads: defaultdict[tuple[int, int], list[set[int]]] = defaultdict(lambda: [set() for _ in stacks])
    jobs: defaultdict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for stack, row, dst, srcs in steps:
        # a + b is b + a to the bit, and with the own part last the operands' kinds are the same on all devices.
        jobs[stack, dst, srcs[::-1] if len(srcs) == 2 and srcs[1] != dst else srcs].append(row)
        for src in srcs:
            if src != dst:
                loads[src, dst][stack].add(row)
    listed = {pair: [sorted(rows) for rows in per_stack] for pair, per_stack in loads.items()}
    permutes, came = [], {}
    for pairs in _matchings(listed):
        senders = {src: listed[src, dst] for src, dst in pairs}
        tables = []
        for stack in stacks:
            for src, dst in pairs:
                numbered = enumerate(listed[src, dst][stack])
                came.update({(src, dst, stack, row): (held.values[stack], k) for k, row in numbered})
            most = max(len(rows[stack]) for rows in senders.values())
            # Whoever has fewer rows to send repeats one; nobody reads it.
            sent = {src: (rows[stack] + [*rows[stack][-1:], 0][:1] * most)[:most] for src, rows in senders.items()}
            tables.append(_table({src: [before[stack, src, row] for row in rows] for src, rows in sent.items()}, n))
            held.values[stack] += 1
        permutes.append(Permute(tuple(sorted(pairs)), tuple(tables)))

    def places(stack: int, dst: int, src: int, rows: list[int]) -> list[Place]:
        return [before[stack, dst, row] if src == dst else came[src, dst, stack, row] for row in rows]

    folds = []
    for (stack, count, _, _), by_device in _alike(jobs).items():
        tables = [
            _table({dst: places(stack, dst, srcs[k], rows) for dst, (srcs, rows) in by_device.items()}, n)
            for k in range(count)
        ]
        for dst, (_, rows) in by_device.items():
            made = [(held.values[stack], k) for k in range(len(rows))] if count > 1 else tables[0][dst]
            held.places.update({(stack, dst, row): place for row, place in zip(rows, made, strict=True)})
        if count > 1:
            folds.append(Fold(stack, tuple(tables)))
            held.values[stack] += 1
    return tuple(permutes), tuple(folds)


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
