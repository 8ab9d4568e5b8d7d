"""All-reduces by exchanges in several levels: in each level the devices of a group read each other's values.

Input: a topology and a request. Output: schedules with one round per level. The schedule with a single level is that of
``one_shot``; several levels take more rounds and send fewer bytes. With several hosts, the devices of a host exchange
first. Then each device exchanges with the devices at the same position on the other hosts. With up to ``MOST_SEARCHED``
devices, several ways to form groups are tried.

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

from ...devices import parse
from ...schedule import Chunk, Schedule, Step
from ...topology import Topology
from ..requests import Request
from .equal_links import one_shot_schedule

MOST_SEARCHED: Final = 8  # with more devices, the only groups are the devices of a host and those at one position
_MOST_TRIED: Final = 24  # of the ways to form groups of given sizes; those with fast hops come first

Group = tuple[int, ...]  # devices that exchange, in the order in which their values are combined
Level = tuple[Group, ...]


def exchanges(topology: Topology, request: Request) -> list[Schedule]:
    """Return the schedule of ``one_shot`` for a request, and for an all-reduce also schedules with several levels.

    >>> from crossreduce.planning import Request
    >>> box = Topology.machine("dgx-1v")
    >>> print(exchanges(box, Request("all_reduce", box.devices, box.devices, "one_shot", box))[1].head)
    all_reduce one_shot: 8 devices, 1 chunk, 2 rounds, 16 steps
    """
    schedules = [one_shot_schedule(request)]
    members = request.members
    if request.packs > 1 or not (set(request.sources) == set(request.destinations) == set(members)):
        return schedules
    for levels in _arrangements(topology, members):
        rounds = [tuple(Step(0, device, group) for group in level for device in sorted(group)) for level in levels]
        chunk = Chunk(Fraction(1), *request.positions)
        schedules.append(Schedule(request.collective, request.algorithm, members, (chunk,), tuple(rounds)))
    return schedules


@lru_cache(maxsize=256)
def _arrangements(topology: Topology, members: tuple[str, ...]) -> tuple[tuple[Level, ...], ...]:
    """Return sequences of two or more levels. Within a level, all groups have the same size."""
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for number, device in enumerate(members):
        hosts[parse(device).host].append(number)
    arrangements: list[tuple[Level, ...]] = []
    equal_hosts = len(hosts) > 1 and len({len(devices) for devices in hosts.values()}) == 1
    if len(hosts) == len(members) > 1 or (not equal_hosts and len(members) > MOST_SEARCHED):
        return ()  # one device per host, or too many devices for a search
    links = _Links(topology, members)
    if equal_hosts:
        columns = tuple(zip(*hosts.values(), strict=True))  # column k: the k-th device of every host
        size = len(columns)
        for sizes in [(size,), *_factors(size)] if all(map(links.is_joined, columns)) else []:
            inside = [_best_of(links, devices, sizes) for devices in hosts.values()]  # the levels within each host
            if all(levels is not None for levels in inside):
                merged = [sum((levels[k] for levels in inside if levels), ()) for k in range(len(sizes))]
                arrangements.append((*merged, columns))
    else:
        searched = (_best_of(links, range(len(members)), sizes) for sizes in _factors(len(members)))
        arrangements += [levels for levels in searched if levels is not None]
    return tuple(arrangements)


def _factors(n: int) -> list[tuple[int, ...]]:
    """Return the ways to write n as an ordered product of two or more factors, or [] if n > ``MOST_SEARCHED``.

    >>> _factors(8)
    [(2, 4), (2, 2, 2), (4, 2)]
    """
    if n > MOST_SEARCHED:
        return []
    products: list[tuple[int, ...]] = []
    for first in range(2, n):
        if n % first == 0:
            products += [(first, n // first), *((first, *rest) for rest in _factors(n // first))]
    return products


class _Links:
    """The hops between members, by their numbers. A hop is a route that passes no other member, as a tuple of links."""

    def __init__(self, topology: Topology, members: Sequence[str]) -> None:
        self.speeds, inside = topology.speeds, set(members)
        self.hops: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}
        for i, a in enumerate(members):
            for j, b in enumerate(members):
                route = topology.route(a, b) if a != b else None
                if route is not None and inside.isdisjoint(route[1:-1]):
                    self.hops[i, j] = tuple(pairwise(route))
        self.hop_speeds = {ends: min(self.speeds[pair] for pair in hop) for ends, hop in self.hops.items()}
        scale = lcm(*(self.speeds[pair] for hop in self.hops.values() for pair in hop))
        self.times = {pair: scale // speed for pair, speed in self.speeds.items()}  # per byte, in a common unit

    def is_joined(self, group: Group) -> bool:
        """Return whether all devices of a group have hops to each other."""
        return all((a, b) in self.hops for a in group for b in group if a != b)

    def is_uniform(self, devices: Sequence[int]) -> bool:
        """Return whether there are hops between all devices, and their links have the same speeds in the same order."""
        hops = [self.hops.get((a, b)) for a in devices for b in devices if a != b]
        return None not in hops and len({tuple(self.speeds[pair] for pair in hop) for hop in hops if hop}) == 1

    def load(self, level: Level) -> int:
        """Return how long the busiest link of a level is busy, in the unit of ``times``."""
        busy: defaultdict[tuple[str, str], int] = defaultdict(int)
        for group in level:
            for ends in permutations(group, 2):
                for pair in self.hops[ends]:
                    busy[pair] += self.times[pair]
        return max(busy.values())


def _best_of(links: _Links, devices: Sequence[int], sizes: tuple[int, ...]) -> tuple[Level, ...] | None:
    """Return the fastest sequence of levels whose groups have these sizes, among the first few of ``_all_levels``.

    Its time is the sum over its levels of the busiest link's time. Return ``None`` if the sizes do not fit the devices.
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
    """Yield sequences of levels; ``sizes[k]`` is the size of the groups of level k.

    The groups of the first level are called rows. In the later levels, devices exchange only within columns, which have
    one device of each row. All columns exchange in the same way, so all devices add in one order and get the same bits.
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
    """Yield the sequences of levels of one column, for these sizes of groups. Each device is given by its row."""
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
    """Yield the ways to divide numbers into groups of ``size`` numbers."""
    if not numbers:
        yield ()
        return
    first, others = numbers[0], numbers[1:]
    for rest in combinations(others, size - 1):
        for groups in _all_partitions(tuple(number for number in others if number not in rest), size):
            yield ((first, *rest), *groups)


def _partitions(links: _Links, devices: Group, size: int) -> Iterator[Level]:
    """Yield the ways to divide devices into groups of ``size`` devices that all have hops to each other."""
    if not devices:
        yield ()
        return
    first, others = devices[0], devices[1:]
    fastest_first = sorted(others, key=lambda other: -links.hop_speeds.get((first, other), 0))
    for rest in combinations(fastest_first, size - 1):
        group = (first, *sorted(rest))
        if links.is_joined(group):
            remaining = tuple(device for device in others if device not in rest)
            for groups in _partitions(links, remaining, size):
                yield (group, *groups)


def _columns(links: _Links, rows: Level, size: int) -> Iterator[Level]:
    """Yield the ways to divide the devices of the rows into columns, each with one device of each row.

    The last ``size`` devices of a column must be joined by hops. The caller checks the other groups.
    """
    if len(rows) == 1:
        yield tuple((device,) for device in rows[0])
        return
    for rest in _columns(links, rows[1:], size):
        for order in permutations(rest):
            columns = tuple((device, *column) for device, column in zip(rows[0], order, strict=True))
            if size < len(rows) or all(map(links.is_joined, columns)):
                yield columns
