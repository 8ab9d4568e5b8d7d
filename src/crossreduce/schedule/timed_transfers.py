"""The times of every transfer in a simulation.

Input: a ``Schedule``, a ``Topology``, bytes, perhaps ``Costs``. Output: an iterator over ``TimedTransfer``. For a
generated schedule whose symmetry the topology has, only the base is simulated: all images of a transfer have the times
of this transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ..topology import TopologyLike, byte_count, topology_of
from .clock import EventClock
from .costs import Costs, Pair, costs_of
from .generated_schedule import GeneratedSchedule
from .schedule import Schedule
from .simulate import loads_of
from .traffic import Read


class TimedTransfer(NamedTuple):
    """A piece of a chunk that moves between two devices over links, with its start and end in seconds."""

    round: int
    piece: int
    chunk: int
    src: str
    dst: str
    links: tuple[Pair, ...]
    latency_s: float  # of all the links
    start: float
    end: float


def timeline(
    schedule: Schedule,
    topology: TopologyLike,
    nbytes: int | str,
    *,
    costs: Costs | None = None,
    node: str | None = None,
) -> Iterator[TimedTransfer]:
    """Yield all transfers with their simulated times, tick by tick. For other arguments and errors see ``simulate``.

    With ``node``, only transfers whose route has this device or switch are computed.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.topology import Topology
    >>> pair = Topology.ring(2, gb_per_s=25)
    >>> [(move.round, move.src, move.end) for move in timeline(ring(pair.devices), pair, 50_000)]
    [(0, 'cpu:0', 1e-06), (0, 'cpu:1', 1e-06), (1, 'cpu:1', 2e-06), (1, 'cpu:0', 2e-06)]
    """
    topology, size = topology_of(topology), byte_count(nbytes)
    loads = loads_of(schedule.cut_into(1), topology, costs_of(costs))
    if not size or not schedule.round_count:
        return
    images = _ReadImages(schedule, node) if isinstance(schedule, GeneratedSchedule) and loads.traffic.orbits else None
    for t, k, start, end in EventClock(loads, size).intervals(schedule.pieces):
        read = loads.traffic.reads[k]
        if not read.pairs:
            continue
        if images is not None:
            moved = images.images(k, read)
        else:
            moved = [(read.chunk, schedule.devices[read.src], schedule.devices[read.dst], read.pairs)]
        for chunk, src, dst, links in moved:
            if node is None or any(node in link for link in links):
                yield TimedTransfer(read.round, t - read.round, chunk, src, dst, links, read.latency_s, start, end)


_Moved = tuple[int, str, str, tuple[Pair, ...]]  # a chunk, its source and destination, and the links


class _ReadImages:
    """The images of the reads in a generated schedule's base. With ``node``, only images whose route has that node."""

    def __init__(self, schedule: GeneratedSchedule, node: str | None) -> None:
        self.schedule, self.node = schedule, node
        self.position = {name: k for k, name in enumerate(schedule.nodes)}
        self.number = {pair: number for number, pair in enumerate(schedule.numbering)}
        self.elements = defaultdict[int, list[int]](list)  # for each node, the elements that move it to ``node``
        if node in self.position:
            for element, origin in enumerate(schedule.symmetry.origins(self.position[node])):
                self.elements[origin].append(element)
        self.made: dict[int, list[_Moved]] = {}

    def images(self, number: int, read: Read) -> list[_Moved]:
        """Return the images of a read, given its number."""
        if number not in self.made:
            self.made[number] = self._make(read)
        return self.made[number]

    def _make(self, read: Read) -> list[_Moved]:
        base, names, symmetry = self.schedule.base, self.schedule.nodes, self.schedule.symmetry
        through = base.through(read.round, read.chunk, read.src, read.dst) or ()
        route = [read.src, *(self.position[name] for name in through), read.dst]
        if self.node is None:
            images = dict(enumerate(zip(*map(symmetry.images, route), strict=True)))  # by element
        else:
            elements = (element for origin in dict.fromkeys(route) for element in self.elements[origin])
            images = {element: tuple([symmetry.image(element, k) for k in route]) for element in elements}
        moved_chunks = []
        for element, image in images.items():
            path = [names[k] for k in image]
            moved_chunks.append((self.number[element, read.chunk], path[0], path[-1], tuple(pairwise(path))))
        return moved_chunks
