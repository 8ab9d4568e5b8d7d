"""All-reduces by exchanges in several levels: in each level the devices of a group read each other's values.

Input: a topology and a request. Output: schedules with one round per level. ``one_shot`` is the one with a single
level; several levels take more rounds and send fewer bytes. With hosts, the devices of a host exchange first, and then
each with its counterparts on the other hosts. With up to ``MOST_SEARCHED`` devices several ways to form groups are
tried.

Source: Bruck, Ho, Kipnis, Upfal & Weathersby, Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8(11), 1997 (exchanges at any radix).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, islice, pairwise, permutations
from math import lcm, prod
from typing import Final

from ..devices import parse
from ..schedule import Chunk, Schedule, Step
from ..topology import Topology
from .algorithms import one_shot_schedule
from .requests import Request

MOST_SEARCHED: Final = 8  # with more devices, only the groups that hosts make are tried
_MOST_TRIED: Final = 24  # ways to form groups of given sizes; those with fast hops come first

Group = tuple[int, ...]  # devices that exchange, in the order in which their values are combined
Level = tuple[Group, ...]


def exchanges(topology: Topology, request: Request) -> list[Schedule]:
    """Return the schedule of ``one_shot`` for a request, and for all-reduces those with several levels.

    >>> from crossreduce.planning import Request
    >>> box = Topology.machine("dgx-1v")
    >>> print(exchanges(box, Request("all_reduce", box.devices, box.devices, "one_shot", box))[1].head)
    all_reduce one_shot: 8 devices, 1 chunk, 2 rounds, 16 steps
    """
    found = [one_shot_schedule(request)]
    members = request.members
    if request.packs > 1 or not (set(request.sources) == set(request.destinations) == set(members)):
        return found
    for levels in _arrangements(topology, members):
        rounds = [tuple(Step(0, device, group) for group in level for device in sorted(group)) for level in levels]
        chunk = Chunk(Fraction(1), *request.positions)
        found.append(Schedule(request.collective, request.algorithm, members, (chunk,), tuple(rounds)))
    return found


@lru_cache(maxsize=256)
def _arrangements(topology: Topology, members: tuple[str, ...]) -> tuple[tuple[Level, ...], ...]:
    """Return ways to exchange in two or more levels, each level with groups of one size."""
    number = {device: k for k, device in enumerate(members)}
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for device in members:
        hosts[parse(device).host].append(number[device])
    found: list[tuple[Level, ...]] = []
    alike = len(hosts) > 1 and len({len(group) for group in hosts.values()}) == 1
    if len(hosts) == len(members) > 1 or (not alike and len(members) > MOST_SEARCHED):
        return ()
    links = _Links(topology, members)
    if alike:
        columns = tuple(zip(*hosts.values(), strict=True))
        size = len(columns)
        for sizes in [(size,), *_factors(size)] if all(map(links.is_joined, columns)) else []:
            parts = [_best_of(links, group, sizes) for group in hosts.values()]
            if all(part is not None for part in parts):
                merged = [sum((part[k] for part in parts if part), ()) for k in range(len(sizes))]
                found.append((*merged, columns))
    else:
        searched = (_best_of(links, tuple(number.values()), sizes) for sizes in _factors(len(members)))
        found += [levels for levels in searched if levels is not None]
    return tuple(found)


def _factors(n: int) -> list[tuple[int, ...]]:
    """Return the ways to write n as a product of two or more factors, in each order; [] above ``MOST_SEARCHED``.

    >>> _factors(8)
    [(2, 4), (2, 2, 2), (4, 2)]
    """
    if n > MOST_SEARCHED:
        return []
    found: list[tuple[int, ...]] = []
    for first in range(2, n):
        if n % first == 0:
            found += [(first, n // first), *((first, *rest) for rest in _factors(n // first))]
    return found


class _Links:
    """The links of the hops between members: routes that pass no other member."""

    def __init__(self, topology: Topology, members: Sequence[str]) -> None:
        self.speeds, inside = topology.speeds, set(members)
        self.hops: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}
        for i, a in enumerate(members):
            for j, b in enumerate(members):
                route = topology.route(a, b) if a != b else None
                if route is not None and inside.isdisjoint(route[1:-1]):
                    self.hops[i, j] = tuple(pairwise(route))
        self.narrow = {ends: min(self.speeds[pair] for pair in hop) for ends, hop in self.hops.items()}
        scale = lcm(*(self.speeds[pair] for hop in self.hops.values() for pair in hop))
        self.seconds = {pair: scale // speed for pair, speed in self.speeds.items()}  # per byte, in some unit

    def is_joined(self, group: Group) -> bool:
        """Return whether all devices of a group have hops to each other."""
        return all((a, b) in self.hops for a in group for b in group if a != b)

    def is_uniform(self, devices: Sequence[int]) -> bool:
        """Return whether the hops between all devices are equally fast and share links in the same way."""
        hops = [self.hops.get((a, b)) for a in devices for b in devices if a != b]
        return None not in hops and len({tuple(self.speeds[pair] for pair in hop) for hop in hops if hop}) == 1

    def load(self, level: Level) -> int:
        """Return how long the busiest link of a level is busy, in the unit of ``seconds``."""
        busy: defaultdict[tuple[str, str], int] = defaultdict(int)
        for group in level:
            for ends in permutations(group, 2):
                for pair in self.hops[ends]:
                    busy[pair] += self.seconds[pair]
        return max(busy.values())


def _best_of(links: _Links, devices: Sequence[int], sizes: tuple[int, ...]) -> tuple[Level, ...] | None:
    """Return the levels with groups of these sizes that take the least time; ``None``: there are no such groups.

    A level takes as long as its busiest link is busy.
    """
    best: tuple[int, tuple[Level, ...]] | None = None
    if prod(sizes) != len(devices):
        return None
    most_tried = 1 if links.is_uniform(devices) else _MOST_TRIED  # with equal hops, all groups take the same time
    for levels in islice(_all_levels(links, tuple(devices), sizes), most_tried):
        time = sum(map(links.load, levels))
        if best is None or time < best[0]:
            best = time, levels
    return best and best[1]


def _all_levels(links: _Links, devices: Group, sizes: tuple[int, ...]) -> Iterator[tuple[Level, ...]]:
    """Yield ways to exchange: first in groups of the first size, then in each set of one device of each group.

    All these sets exchange in the same way, so all devices combine the values in one order and get the same bits.
    """
    if len(sizes) == 1:
        if links.is_joined(devices):
            yield ((devices,),)
        return
    for rows in _partitions(links, devices, sizes[0]):
        for columns in _columns(links, rows, sizes[1]):
            for levels in _shapes(tuple(range(len(rows))), sizes[1:]):
                deeper = tuple(
                    tuple(tuple(column[row] for row in group) for column in columns for group in level)
                    for level in levels
                )
                if all(links.is_joined(group) for level in deeper for group in level):
                    yield (rows, *deeper)


def _shapes(rows: Group, sizes: tuple[int, ...]) -> Iterator[tuple[Level, ...]]:
    """Yield ways in which devices, one of each row, exchange in groups of these sizes, by the numbers of the rows."""
    if len(sizes) == 1:
        yield ((rows,),)
        return
    for groups in _all_partitions(rows, sizes[0]):
        columns = tuple(zip(*groups, strict=True))
        for levels in _shapes(tuple(range(len(groups))), sizes[1:]):
            deeper = (
                tuple(tuple(column[k] for k in group) for column in columns for group in level) for level in levels
            )
            yield (groups, *deeper)


def _all_partitions(numbers: Group, size: int) -> Iterator[Level]:
    """Yield the ways to divide numbers into groups of a size."""
    if not numbers:
        yield ()
        return
    first, others = numbers[0], numbers[1:]
    for rest in combinations(others, size - 1):
        for groups in _all_partitions(tuple(number for number in others if number not in rest), size):
            yield ((first, *rest), *groups)


def _partitions(links: _Links, devices: Group, size: int) -> Iterator[Level]:
    """Yield the ways to divide devices into groups of a size whose devices have hops to each other."""
    if not devices:
        yield ()
        return
    first, others = devices[0], devices[1:]
    near = sorted(others, key=lambda other: -links.narrow.get((first, other), 0))
    for rest in combinations(near, size - 1):
        group = (first, *sorted(rest))
        if links.is_joined(group):
            left = tuple(device for device in others if device not in rest)
            for groups in _partitions(links, left, size):
                yield (group, *groups)


def _columns(links: _Links, rows: Level, size: int) -> Iterator[Level]:
    """Yield the ways to take one device of each row, as often as a row has devices; ``size`` of them exchange first."""
    if len(rows) == 1:
        yield tuple((device,) for device in rows[0])
        return
    for rest in _columns(links, rows[1:], size):
        for order in permutations(rest):
            columns = tuple((device, *column) for device, column in zip(rows[0], order, strict=True))
            if size < len(columns[0]) or len(columns[0]) < len(rows) or all(map(links.is_joined, columns)):
                yield columns
