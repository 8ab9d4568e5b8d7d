"""Predicted times: how long a schedule takes on a topology, and the load of each link.

Input: a ``Schedule``, a ``Topology``, bytes, perhaps ``Costs``. Output: a ``Simulation``. Nothing is executed.

The model: a chunk is cut into ``pieces`` p, and piece j does round r in tick r + j. A transfer of a piece starts when
its operand is there and its links are free of the transfers of earlier ticks. Transfers of a tick that share a link
share its bandwidth, and switches and devices on a route forward bytes as they arrive. A transfer occupies its links for
the sum of their latencies and the time that its bytes take on the busiest of them. ``clock.py`` has the details, and
``lock_step.py`` an upper limit in closed form. For one chunk that travels d hops both are (d + p - 1)(latency + bytes /
p / bandwidth), the time of a pipelined chain in Hockney's model.

CUDA devices execute operations that a thread of their host queues: in each tick one launch for all combinations of a
device that have the same number of operands (a copy has one operand), whatever their chunks, pieces and rounds are.
Links carry data while operations are queued. Further costs count only if they are stated: see ``Costs``.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Sanders, Speck & Träff,
Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat
from typing import Final, NamedTuple

from ..errors import ArgumentError, PlanError, shown
from ..progress import steps
from ..topology import Topology, TopologyLike, byte_count, topology_of
from ..topology.topology_like import MOST_BYTES
from .clock import EventClock
from .costs import Costs, Pair, costs_of
from .generated_schedule import GeneratedSchedule
from .host_queues import operation_count, queues
from .lock_step import Loads, LockStep
from .schedule import Schedule
from .traffic import shares_of_links, traffic

# The least bytes of a piece. Smaller ones would save little time: any link in links.json carries 1.5 KB in its latency.
LEAST_PIECE: Final = 1024

# The greatest number of pieces p. More would save little time: apart from latencies, R rounds take at most
# 1 + (R - 1) / p times as long as the busiest link needs for all its data.
MOST_PIECES: Final = 1 << 16

# A schedule whose operations are queued may take this many times the least time if it then has fewer pieces: near the
# least time, each further piece saves little time, and its operations keep the host busy.
LONGER: Final = 1.005

_FACTORS: Final = (1.5, 1.15)  # the search for the best number of pieces multiplies and divides by these
_EQUAL: Final = 1e-9  # the relative error of seconds in floating point


@dataclass(frozen=True)
class Simulation:
    """The predicted execution of a schedule on a topology."""

    seconds: float  # from the start of the first transfer to the end of the last one
    busy: dict[Pair, float]  # for each used link, by (src, dst), the seconds that it needs for its data
    bytes: dict[Pair, int]  # for each used link, the bytes that it carries, if chunks are cut between elements
    ticks: tuple[float, ...]  # by how many seconds each tick extends the time (in tick t piece j does round t - j)
    operations: int = 0  # queued operations: one per tick, device and number of operands
    # (name, fraction of the time in which it is busy) of each resource and each host's queue, the busiest first.
    limits: tuple[tuple[str, float], ...] = ()


def simulate(
    schedule: Schedule,
    topology: TopologyLike,
    nbytes: int | str,
    itemsize: int = 1,
    *,
    operation_s: float | None = None,
    costs: Costs | None = None,
) -> Simulation:
    """Return the predicted time of a schedule on a topology, and the bytes and busy time of each link.

    Args:
      schedule: its devices and routes must be nodes of the topology.
      topology: the links: a ``Topology``, a machine's name or a file's path.
      nbytes: the size of the whole buffer (of one replica's, for an all-reduce), 0 or more, or text such as "64M".
      itemsize: bytes of an element; chunks are cut between elements.
      operation_s: short for ``costs=Costs(operation_s=...)``.
      costs: what else takes time. By default, only operations of CUDA devices do.
    Raises:
      ArgumentError: an argument has the wrong type, or a number of bytes or seconds is invalid.
      PlanError: the topology has no route for a transfer.

    >>> from crossreduce.planning import ring
    >>> topology = Topology.ring(4, gb_per_s=25, latency_s=1e-6)
    >>> simulation = simulate(ring(topology.devices), topology, 100_000_000)
    >>> round(simulation.seconds * 1e6, 3)  # 6 rounds of 1 us + 25 MB / 25 GB/s
    6006.0
    >>> simulation.bytes["cpu:0", "cpu:1"]
    150000000
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError.of("simulate needs a Schedule.", shown(schedule), "plan.schedule")
    topology, nbytes = topology_of(topology), byte_count(nbytes)
    elements = _elements(nbytes, itemsize)
    timing = _Timing(schedule, topology, nbytes, costs_of(costs, operation_s))
    flows = timing.loads.traffic
    busy = timing.busy(schedule.pieces)
    busy_links = {pair: busy[number] for pair, number in flows.link_numbers.items()}
    if flows.orbits is not None:
        shares = shares_of_links(schedule, flows)
        carried = {pair: itemsize * round(elements * share) for pair, share in shares.items()}
        busy_links = {pair: busy_links[listed] for pair, listed in flows.used.items()}
    else:
        spans = schedule.spans(elements)
        carried = {
            pair: itemsize * sum(spans[chunk][1] - spans[chunk][0] for chunks in by_round.values() for chunk in chunks)
            for pair, by_round in flows.links.items()
        }
    if not nbytes or not schedule.round_count:
        return Simulation(0.0, busy_links, carried, ())
    ticks = timing.clock.run(schedule.pieces)
    seconds = timing.seconds(schedule.pieces)
    limits = [(name, load / (seconds or 1.0)) for name, load in zip(timing.names, busy, strict=True)]
    every_tick = tuple(chain.from_iterable(repeat(tick, count) for tick, count in ticks))
    limits.sort(key=lambda limit: -limit[1])
    return Simulation(seconds, busy_links, carried, every_tick, operation_count(schedule), tuple(limits))


class Pieces(NamedTuple):
    """A schedule with the number of pieces that was chosen for a number of bytes, and its time."""

    schedule: Schedule
    seconds: float


def pipelined(
    schedule: Schedule, topology: Topology, nbytes: int, operation_s: float | None = None, *, costs: Costs | None = None
) -> Pieces:
    """Return the schedule cut into the number of pieces that takes the least time for ``nbytes`` bytes, and that time.

    The search starts at the best number for the lock-step clock. If this clock is not exact, other numbers are tried
    with the event-driven clock as long as the time decreases: with at least as many pieces as rounds, the time is a
    convex function of the number. If operations are queued, the result may take up to ``LONGER`` times the least time
    in return for fewer pieces. Pieces of an average chunk have at least ``LEAST_PIECE`` bytes if the chunk is cut.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(4, gb_per_s=25, latency_s=1e-6)
    >>> schedule, seconds = pipelined(one_device(topology.devices), topology, 1 << 20)
    >>> schedule.pieces, seconds == simulate(schedule, topology, 1 << 20).seconds
    (8, True)
    """
    return fastest_of([schedule], topology, nbytes, costs=costs_of(costs, operation_s))


def fastest_of(
    schedules: Iterable[Schedule], topology: Topology, nbytes: int, *, costs: Costs, known: Pieces | None = None
) -> Pieces:
    """Return the fastest of some schedules and of ``known``, a result for another schedule. Each is cut into pieces.

    The lock-step clock ranks the schedules. A schedule is not simulated if its busiest device or resource, or its
    longest chain of latencies, shows that it is no faster than the best one so far. Among equally fast schedules,
    ``known`` is preferred, and then the one that ranks first.

    Raises:
      PlanError: the topology lacks a route for a transfer of each schedule.
    """
    nbytes = byte_count(nbytes)
    listed = list(schedules)
    least = [_least_seconds(schedule, topology, nbytes) for schedule in listed] if len(listed) > 1 else [0.0]
    # A schedule that takes longer than the limit is not the fastest, even though ``best_pieces`` may exceed the least
    # time by ``LONGER``.
    limit = math.inf if known is None else known.seconds
    timings: dict[int, _Timing] = {}
    for k in sorted(range(len(listed)), key=least.__getitem__):
        if least[k] > limit:
            break
        try:
            timing = _Timing(listed[k], topology, nbytes, costs)
        except PlanError as error:
            failure = error
            continue
        if not nbytes or not listed[k].round_count:
            return Pieces(listed[k].cut_into(1), 0.0)
        if timing.floor <= limit:
            timings[k] = timing
            limit = min(limit, LONGER * timing.lock_step_best[0])
    best = known
    if not timings and best is None:
        raise failure
    ranked = sorted(timings, key=lambda k: (timings[k].lock_step_best[0], k))
    for timing in steps([timings[k] for k in ranked], "comparing schedules"):
        if best is None or timing.floor < best.seconds:
            pieces = timing.best_pieces()
            if best is None or timing.seconds(pieces) < best.seconds:
                best = Pieces(timing.schedule.cut_into(pieces), timing.seconds(pieces))
    assert best is not None
    return best


def _least_seconds(schedule: Schedule, topology: Topology, nbytes: int) -> float:
    """Return a lower bound of the time: the seconds of the busiest device, or of the busiest link between two devices.

    A link is counted if all transfers between its devices use it.
    """
    if isinstance(schedule, GeneratedSchedule):
        return 0.0  # its steps would first have to be listed
    shares = [float(share) for share, _, _ in schedule.chunks]
    carried = defaultdict[tuple[int, int], float](float)
    for steps_of_round in schedule.rounds:
        for chunk, dst, srcs in steps_of_round:
            for src in srcs:
                carried[src, dst] += shares[chunk]
    names, (out, into, direct) = schedule.devices, _bandwidths(topology)
    routed = {(src, dst) for _, src, dst, _, _ in schedule.routes}
    sent, received, least = [0.0] * len(names), [0.0] * len(names), 0.0
    for (src, dst), share in carried.items():
        if src != dst:
            sent[src] += share
            received[dst] += share
            bandwidth = direct.get((names[src], names[dst]))
            if bandwidth and (src, dst) not in routed:
                least = max(least, share / bandwidth)
    for bandwidths, shares_of_devices in ((out, sent), (into, received)):
        for device, share in zip(names, shares_of_devices, strict=True):
            if share and bandwidths.get(device):
                least = max(least, share / bandwidths[device])
    return least * nbytes / 1e9


@lru_cache(maxsize=64)
def _bandwidths(topology: Topology) -> tuple[dict[str, float], dict[str, float], dict[Pair, float]]:
    """Return the bandwidth in GB/s of all links out of each node, of all links into it, and of each link."""
    out, into = defaultdict[str, float](float), defaultdict[str, float](float)
    for src, dst, bandwidth, _ in topology.links:
        out[src] += float(bandwidth)
        into[dst] += float(bandwidth)
    return out, into, {pair: float(link.bandwidth) for pair, link in topology.by_ends.items()}


@lru_cache(maxsize=256)
def loads_of(schedule: Schedule, topology: Topology, costs: Costs) -> Loads:
    """Return the loads of a schedule in one piece, which are the same for all sizes."""
    return Loads(traffic(schedule, topology, replace(costs, operation_s=0)), queues(schedule, costs.operation_s))


class _Timing:
    """The times of a schedule for a number of bytes, by the number of pieces."""

    def __init__(self, schedule: Schedule, topology: Topology, nbytes: int, costs: Costs) -> None:
        self.schedule, self.nbytes, self.loads = schedule, nbytes, loads_of(schedule.cut_into(1), topology, costs)
        self._seconds: dict[int, float] = {}

    @cached_property
    def lock_step(self) -> LockStep:
        return LockStep(self.loads, self.nbytes)

    @cached_property
    def clock(self) -> EventClock:
        return EventClock(self.loads, self.nbytes)

    @cached_property
    def most(self) -> int:
        """The largest allowed number of pieces."""
        return max(1, min(self.nbytes // self.schedule.chunk_count // LEAST_PIECE, MOST_PIECES))

    def seconds(self, pieces: int) -> float:
        """Return the time of the event-driven clock."""
        if pieces not in self._seconds:
            self._seconds[pieces] = self.clock.total(pieces)
        return self._seconds[pieces]

    def busy(self, pieces: int) -> list[float]:
        """Return the seconds in which each resource is busy, and then those of each host's queue."""
        busy = [transfer * self.nbytes + each * pieces for transfer, each in self.loads.sums]
        width = min(pieces, self.loads.rounds)
        for queue in self.loads.queues.values():
            queued = self.loads.queued(queue, width)
            busy.append(math.fsum(queued) + max(0, pieces - width) * queued[width - 1])
        return busy

    @property
    def names(self) -> list[str]:
        """The name of each entry of ``busy``."""
        resources = [resource.name for resource in self.loads.traffic.resources]
        return resources + [f"the operations of {host or 'the host'}" for host in self.loads.queues]

    @property
    def floor(self) -> float:
        """A lower bound of the seconds for every number of pieces."""
        return max([*self.busy(1), self.loads.traffic.longest_s])

    @cached_property
    def lock_step_best(self) -> tuple[float, int]:
        """The least time of the lock-step clock, and its number of pieces."""
        return min((self.lock_step.total(pieces), pieces) for pieces in self.lock_step.candidates(self.most))

    def best_pieces(self) -> int:
        """Return the number of pieces that takes the least time: see ``pipelined``."""
        limit, best = self.lock_step_best
        if not self.loads.queues and self.seconds(best) > limit * (1 - _EQUAL):
            return best  # the closed form is exact
        for factor in _FACTORS:
            before = 0
            while before != best:
                before = best
                best = self._fastest_pieces([best, math.ceil(best * factor), math.floor(best / factor)])
        best = self._fastest_pieces([1, best])  # if shares differ, the time may have a second minimum
        if not self.loads.queues or best == 1:
            return best
        # With queues, the time has a sharp minimum, so the last interval is searched to the end.
        low, high = math.floor(best / _FACTORS[-1]), min(math.ceil(best * _FACTORS[-1]), self.most)
        while high - low > 2:
            middle = (low + high) // 2
            if self._fastest_pieces([middle, middle + 1]) == middle:
                high = middle + 1
            else:
                low = middle
        return self._fewest_pieces(self._fastest_pieces([best, *range(low, high + 1)]))

    def _fewest_pieces(self, best: int) -> int:
        """Return the least of some numbers from ``best / 2`` to ``best`` whose time is near the least time."""
        longest = LONGER * self.seconds(best)
        tried = sorted({math.ceil(best * k / 32) for k in range(16, 33)})
        # a binary search, since the time decreases up to ``best``
        return tried[bisect_left(tried, True, key=lambda pieces: self.seconds(pieces) <= longest)]

    def _fastest_pieces(self, tried: Iterable[int]) -> int:
        allowed = (pieces for pieces in tried if 1 <= pieces <= self.most)
        return min(allowed, key=lambda pieces: (self.seconds(pieces), pieces))


def _elements(nbytes: int, itemsize: int) -> int:
    if not isinstance(itemsize, int) or isinstance(itemsize, bool) or not 1 <= itemsize <= MOST_BYTES:
        problem = f"itemsize must be an integer from 1 to {MOST_BYTES}."
        raise ArgumentError.of(problem, f"itemsize={shown(itemsize)}", "itemsize=4")
    if nbytes % itemsize:
        given, remedy = f"nbytes={nbytes}, itemsize={itemsize}", f"nbytes={nbytes - nbytes % itemsize}"
        raise ArgumentError.of("nbytes must be a multiple of itemsize.", given, remedy)
    return nbytes // itemsize
