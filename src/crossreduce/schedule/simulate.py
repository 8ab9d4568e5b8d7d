"""Predicted times: how long a schedule takes on a topology, and the load of each link.

Input: a ``Schedule``, a ``Topology``, bytes. Output: a ``Simulation``. Nothing is executed and no clock is read.

The model: rounds are synchronous. A chunk is cut into ``pieces`` p; in tick t piece j does round t - j, so up to p
rounds are in progress at once, and R rounds take R + p - 1 ticks. A tick takes the longest latency of its transfers
(added up along each route), and then the time that its busiest link needs for all its bytes in that tick: transfers
over one link share its bandwidth, and switches and devices on the route forward bytes as they arrive. Combining takes
no time. For one chunk that travels d hops this is (d + p - 1)(latency + bytes / p / bandwidth), the time of a pipelined
chain in Hockney's model.

CUDA devices execute operations that a thread of their host queues: in each tick one launch for all combinations of a
device that have the same number of operands (a copy has one operand), whatever their chunks, pieces and rounds are.
Links carry data while operations are queued, so a tick takes the longer of two times: that of its busiest link, and
that in which a host queues all its operations of the tick.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Sanders, Speck & Träff,
Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, PlanError, shown
from ..topology import Topology, TopologyLike, topology_of
from .schedule import Schedule, live_rounds

# The least bytes of a piece; smaller ones would save little: any link in links.json carries 1.5 KB in its latency.
LEAST_PIECE: Final = 1024

# The greatest number of pieces p; more would save little time: apart from latencies, R rounds take at most
# 1 + (R - 1) / p times as long as the busiest link needs for all its data.
MOST_PIECES: Final = 1 << 16

# The largest buffer that is simulated: an exbibyte, more memory than any machine has.
MOST_BYTES: Final = 1 << 60

# The seconds in which a host queues one operation of a CUDA device. Assumed, and not measured on any GPU.
OPERATION_S: Final = 2e-6

# How much longer than the least time a schedule may take whose operations are queued, if it has fewer pieces: near the
# least time, each piece saves little, and its operations keep the host busy.
LONGER: Final = 1.005

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NBYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmg]?)(?:i?b)?", re.IGNORECASE)

Pair = tuple[str, str]


@dataclass(frozen=True)
class Simulation:
    """The predicted execution of a schedule on a topology."""

    seconds: float  # from the start of the first transfer to the end of the last one
    busy: dict[Pair, float]  # for each used link, by (src, dst), the seconds that it needs for its data
    bytes: dict[Pair, int]  # for each of these links, the bytes that it carries, in whole elements
    ticks: tuple[float, ...]  # the seconds of each tick; in tick t piece j does round t - j
    operations: int = 0  # in all ticks: one per tick, device and number of operands


def byte_count(given: object) -> int:
    """Return a number of bytes: an int from 0 to ``MOST_BYTES``, or text in which K, M and G are powers of 1024.

    Raises:
      ArgumentError: it is neither.

    >>> byte_count("64M") == byte_count("65536 KiB") == byte_count(64 << 20)
    True
    """
    number = given
    if isinstance(given, str) and (match := _NBYTES.fullmatch(given.strip())) is not None:
        number = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MOST_BYTES:
        return number
    problem = f'nbytes must be an integer from 0 to {MOST_BYTES}, or text such as "64K" or "128M".'
    raise ArgumentError.of(problem, f"nbytes={shown(given)}", "nbytes=1 << 20")


def seconds_of(given: object) -> float | None:
    """Return the seconds of an operation, a number from 0 to 1, or ``None``.

    Raises:
      ArgumentError: it is something else.
    """
    if given is None or (isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1):
        return given
    problem = "operation_s must be a number of seconds from 0 to 1, or None."
    raise ArgumentError.of(problem, shown(given), f"operation_s={OPERATION_S}")


def simulate(
    schedule: Schedule,
    topology: TopologyLike,
    nbytes: int | str,
    itemsize: int = 1,
    *,
    operation_s: float | None = None,
) -> Simulation:
    """Return the predicted time of a schedule on a topology, and the bytes and busy time of each link.

    Args:
      schedule: its devices and routes must be nodes of the topology.
      topology: the links: a ``Topology``, a machine's name or a file's path.
      nbytes: the size of the whole buffer (of one replica's, for an all-reduce), 0 or more, or text such as "64M".
      itemsize: bytes of an element; chunks are cut between elements.
      operation_s: the seconds in which a host queues one operation; ``None``: ``OPERATION_S`` for those of CUDA
        devices, 0 for those of other devices.
    Raises:
      ArgumentError: not a schedule or a topology, or an invalid number of bytes or seconds.
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
    spans = schedule.spans(_elements(nbytes, itemsize))
    traffic = _traffic(schedule, topology)
    carried = {
        pair: itemsize * sum(spans[chunk][1] - spans[chunk][0] for chunks in by_round.values() for chunk in chunks)
        for pair, by_round in traffic.chunks.items()
    }
    timing = _Timing(schedule, traffic, nbytes, seconds_of(operation_s))
    busy = {pair: sum(timing.loads[load].values()) for pair, load in traffic.load_of.items()}
    if not nbytes or not traffic.latency_s:
        return Simulation(0.0, busy, carried, ())
    (ticks, repeated), middle = timing.ticks(schedule.pieces), len(traffic.latency_s) - 1
    ticks[middle:middle] = [ticks[middle]] * repeated
    return Simulation(timing.total(schedule.pieces), busy, carried, tuple(ticks), _operations(schedule))


def fluid_rate(schedule: Schedule, topology: Topology) -> Fraction | None:
    """Return the rate in GB/s that a schedule approaches as its buffer grows: that of its busiest link.

    The rate is exact. ``None``: no data moves.

    >>> from crossreduce.planning import ring
    >>> fluid_rate(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), Topology.ring(4, gb_per_s=25))
    Fraction(50, 3)
    """
    traffic = _traffic(schedule, topology)
    amounts = [sum((schedule.chunks[chunk].share for chunk in chunks), Fraction(0)) for chunks in traffic.amounts]
    shares = [sum((amounts[amount] for _, amount in load.by_round), Fraction(0)) for load in traffic.loads]
    return min(
        (load.bandwidth / share for load, share in zip(traffic.loads, shares, strict=True) if share), default=None
    )


def carried_chunks(schedule: Schedule, topology: Topology) -> list[tuple[Fraction, Counter[int]]]:
    """Return for each link that is used its bandwidth in GB/s, and how often it carries each chunk.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(2, gb_per_s=25)
    >>> carried_chunks(one_device(topology.devices), topology)[0]
    (Fraction(25, 1), Counter({0: 1}))
    """
    found = []
    for pair, by_round in _traffic(schedule, topology).chunks.items():
        counts = Counter(chunk for chunks in by_round.values() for chunk in chunks)
        found.append((topology.by_ends[pair].bandwidth, counts))
    return found


def pipelined(
    schedule: Schedule, topology: Topology, nbytes: int, operation_s: float | None = None
) -> tuple[Schedule, float]:
    """Return the schedule cut into the number of pieces that takes the least time for ``nbytes`` bytes, and that time.

    If the number of pieces p is at least the number of rounds, the time is a + b p + c / p, which is least at
    p = sqrt(c / b), or at a p with which in some tick a host queues operations as long as the busiest link carries
    data. Of the smaller numbers, 1 to 32 and powers of two are tried. If operations are queued, the time may be up to
    ``LONGER`` times the least, with fewer pieces. If an average chunk is cut, its pieces
    have at least ``LEAST_PIECE`` bytes.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(4, gb_per_s=25, latency_s=1e-6)
    >>> schedule, seconds = pipelined(one_device(topology.devices), topology, 1 << 20)
    >>> schedule.pieces, seconds == simulate(schedule, topology, 1 << 20).seconds
    (8, True)
    """
    nbytes = byte_count(nbytes)
    traffic = _traffic(schedule, topology)
    deep = len(traffic.latency_s)
    if not nbytes or not deep:
        return schedule.cut_into(1), 0.0
    timing = _Timing(schedule, traffic, nbytes, seconds_of(operation_s))
    most = max(1, min(nbytes // len(schedule.chunks) // LEAST_PIECE, MOST_PIECES))
    tried = {1, deep, most, *range(2, min(deep, 33)), *(1 << k for k in range(deep.bit_length()))}
    windows = timing.windows(deep)
    latency, transfer, queued = windows[deep - 1]  # of a tick in which all rounds are in progress; for one piece
    if latency:
        ramps = sum(seconds for _, seconds, _ in windows) - deep * transfer
        best = math.sqrt(max(ramps, 0.0) / latency)
        tried |= {math.floor(best), math.ceil(best)}
    for _, transfer, seconds in windows if queued else ():
        if seconds * most > transfer:
            tried |= {math.floor(transfer / seconds), math.ceil(transfer / seconds)}
    times = {pieces: timing.total(pieces) for pieces in sorted(tried) if 1 <= pieces <= most}
    pieces = min(times, key=lambda pieces: (times[pieces], pieces))
    if queued:
        times |= {fewer: timing.total(fewer) for fewer in (math.ceil(pieces * k / 32) for k in range(16, 32))}
        pieces = min(fewer for fewer in times if times[fewer] <= LONGER * times[pieces])
    return schedule.cut_into(pieces), times[pieces]


def route_links(topology: Topology, src: str, dst: str, through: tuple[str, ...] | None = None) -> tuple[Pair, ...]:
    """Return the links, by (src, dst), of a route, by default the topology's; PlanError: a link does not exist."""
    unknown = [node for node in (src, *(through or ()), dst) if node not in topology]
    if unknown:
        given = f"a topology of {', '.join(topology.nodes)}"
        problem = f"the topology has no route from {src} to {dst}: it has no node {', '.join(unknown)}."
        raise PlanError.of(problem, given, "the topology for which the schedule was planned")
    nodes = topology.route(src, dst) if through is None else (src, *through, dst)
    pairs = () if nodes is None else tuple(pairwise(nodes))
    if nodes is None or any(pair not in topology.by_ends for pair in pairs):
        out = ", ".join(link.dst for link in topology.out_links(src)) or "none"
        by = "" if through is None else f" through {', '.join(through)}"
        gap = next((f"no link from {a} to {b}" for a, b in pairs if (a, b) not in topology.by_ends), "")
        remedy = "the topology for which the schedule was planned, or one with the missing links"
        given = gap or f"links out of {src}: {out}"
        raise PlanError.of(f"the topology has no route from {src} to {dst}{by}.", given, remedy)
    return pairs


class _Load(NamedTuple):
    """The use of a link: its bandwidth, and (round, position in ``amounts``) for each round that uses it."""

    bandwidth: Fraction
    by_round: tuple[tuple[int, int], ...]


class _Traffic(NamedTuple):
    """The use of all links."""

    chunks: dict[Pair, dict[int, list[int]]]  # for each link, the chunks that it carries in each round
    load_of: dict[Pair, int]  # each link's position in ``loads``; links with the same load are always equally busy
    loads: tuple[_Load, ...]  # the different loads
    amounts: tuple[tuple[int, ...], ...]  # for each amount of data, chunks whose shares add up to it
    latency_s: tuple[float, ...]  # for each round the longest latency of its routes


@lru_cache(maxsize=256)
def _traffic(schedule: Schedule, topology: Topology) -> _Traffic:
    chunks_of: dict[Pair, dict[int, list[int]]] = {}
    latencies = _collect(schedule, topology, chunks_of)
    equal = len({chunk.share for chunk in schedule.chunks}) == 1
    amounts: dict[int | tuple[int, ...], tuple[int, tuple[int, ...]]] = {}  # the position and the chunks of an amount
    loads: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, _Load]] = {}
    load_of: dict[Pair, int] = {}
    for pair, by_round in chunks_of.items():
        used = []
        for r, chunks in by_round.items():
            amount = len(chunks) if equal else tuple(chunks)  # equal shares only need to be counted
            if amount not in amounts:
                amounts[amount] = len(amounts), tuple(chunks)
            used.append((r, amounts[amount][0]))
        key = topology.speeds[pair], tuple(used)
        if key not in loads:
            loads[key] = len(loads), _Load(topology.by_ends[pair].bandwidth, key[1])
        load_of[pair] = loads[key][0]
    different, listed = (load for _, load in loads.values()), (chunks for _, chunks in amounts.values())
    return _Traffic(chunks_of, load_of, tuple(different), tuple(listed), tuple(latencies))


def _collect(schedule: Schedule, topology: Topology, chunks_of: dict[Pair, dict[int, list[int]]]) -> list[float]:
    """Fill in the chunks that each link carries in each round, and return the latency of each round."""
    devices, links = schedule.devices, topology.by_ends
    paths: dict[tuple[int, int, tuple[str, ...] | None], tuple[list[dict[int, list[int]]], float]] = {}
    latencies = []
    through = None
    for r, steps in enumerate(schedule.rounds):
        longest = 0.0
        for chunk, dst, srcs in steps:
            for src in srcs:
                if src == dst:
                    continue
                if schedule.routes:
                    through = schedule.through(r, chunk, src, dst)
                path = paths.get((src, dst, through))
                if path is None:
                    pairs = route_links(topology, devices[src], devices[dst], through)
                    latency = float(sum(links[pair].latency_s for pair in pairs))
                    path = paths[src, dst, through] = [chunks_of.setdefault(pair, {}) for pair in pairs], latency
                for by_round in path[0]:
                    by_round.setdefault(r, []).append(chunk)
                longest = max(longest, path[1])
        latencies.append(longest)
    return latencies


class _Launch(NamedTuple):
    """A device's operations with the same number of operands: one in every tick with one of these rounds."""

    rounds: tuple[int, ...]
    number: int  # of such operations, on devices of the same host and kind


@lru_cache(maxsize=256)
def _launches(schedule: Schedule) -> dict[tuple[str, str], tuple[_Launch, ...]]:
    """Return the operations of a schedule, by host and kind of device."""
    rounds_of: dict[tuple[int, int], dict[int, None]] = {}
    for r, steps in enumerate(live_rounds(schedule)):
        for _, dst, srcs in steps:
            rounds_of.setdefault((dst, len(srcs)), {})[r] = None
    found: dict[tuple[str, str], Counter[tuple[int, ...]]] = {}
    for (dst, _), rounds in rounds_of.items():
        if ":" in schedule.devices[dst]:  # else it is a switch, which combines without operations
            device = parse(schedule.devices[dst])
            found.setdefault((device.host, device.kind), Counter())[tuple(rounds)] += 1
    return {where: tuple(_Launch(*one) for one in counts.items()) for where, counts in found.items()}


def _operations(schedule: Schedule) -> int:
    """Return the number of operations in all ticks."""
    pieces = schedule.pieces
    return sum(
        launch.number * (pieces + sum(min(b - a, pieces) for a, b in pairwise(launch.rounds)))
        for launches in _launches(schedule).values()
        for launch in launches
    )


def _queueing(schedule: Schedule, operation_s: float | None) -> list[list[tuple[_Launch, float]]]:
    """Return, for each host that queues operations, its operations and the seconds in which it queues them once."""
    hosts: defaultdict[str, list[tuple[_Launch, float]]] = defaultdict(list)
    if not operation_s and not (operation_s is None and any("cuda:" in device for device in schedule.devices)):
        return []  # without costs, the operations need not be counted
    for (host, kind), launches in _launches(schedule).items():
        cost = operation_s if operation_s is not None else OPERATION_S if kind == "cuda" else 0.0
        if cost:
            hosts[host] += [(launch, launch.number * cost) for launch in launches]
    return list(hosts.values())


class _Timing:
    """The times of a schedule's ticks; shares are not rounded to elements, so that no rate exceeds the bound."""

    def __init__(self, schedule: Schedule, traffic: _Traffic, nbytes: int, operation_s: float | None) -> None:
        shares = [float(chunk.share) * nbytes for chunk in schedule.chunks]
        amounts = [math.fsum(shares[c] for c in chunks) for chunks in traffic.amounts]
        self.latency_s = traffic.latency_s
        self.loads: list[dict[int, float]] = []  # for each load its seconds by round
        for bandwidth, by_round in traffic.loads:
            speed = float(bandwidth) * 1e9
            self.loads.append({r: amounts[amount] / speed for r, amount in by_round})
        self.queueing = _queueing(schedule, operation_s)
        self._windows: dict[int, list[tuple[float, float, float]]] = {}

    def ticks(self, pieces: int) -> tuple[list[float], int]:
        """Return the seconds of the ticks, and how often the one in which all rounds are in progress is repeated."""
        rounds = len(self.latency_s)
        windows = self.windows(min(pieces, rounds))
        ticks = [latency + max(transfer / pieces, queued) for latency, transfer, queued in windows]
        return ticks, max(0, pieces - rounds)

    def total(self, pieces: int) -> float:
        """Return the sum of all ticks without listing them."""
        ticks, repeated = self.ticks(pieces)
        return math.fsum([*ticks, repeated * ticks[len(self.latency_s) - 1]])

    def windows(self, width: int) -> list[tuple[float, float, float]]:
        """Return the latency and the seconds of the busiest link and of the busiest host, of windows of rounds.

        Windows of up to ``width`` rounds slide over all rounds.
        """
        if width not in self._windows:
            rounds = len(self.latency_s)
            busiest = [0.0] * (rounds + width - 1)
            for by_round in self.loads:
                load = 0.0
                for t in range(min(by_round), min(max(by_round) + width, len(busiest))):
                    load += by_round.get(t, 0.0)
                    load -= by_round.get(t - width, 0.0)
                    if load > busiest[t]:
                        busiest[t] = load
            latencies, queued = _sliding_max(self.latency_s, width), self._queued(width, len(busiest))
            self._windows[width] = list(zip(latencies, busiest, queued, strict=True))
        return self._windows[width]

    def _queued(self, width: int, ticks: int) -> list[float]:
        """Return the seconds in which the busiest host queues the operations of each window."""
        most = [0.0] * ticks
        for launches in self.queueing:
            seconds = [0.0] * ticks
            for launch, cost in launches:
                start = 0  # the first tick in which this operation has not been counted
                for r in launch.rounds:
                    for t in range(max(start, r), r + width):
                        seconds[t] += cost
                    start = r + width
            most = list(map(max, most, seconds))
        return most


def _sliding_max(values: tuple[float, ...], width: int) -> list[float]:
    """Return the greatest value of each window of up to ``width`` neighbours that slides over all values."""
    found: list[float] = []
    falling: deque[int] = deque()  # positions of values that may still be the greatest
    for t in range(len(values) + width - 1):
        if t < len(values):
            while falling and values[falling[-1]] <= values[t]:
                falling.pop()
            falling.append(t)
        if falling[0] <= t - width:
            falling.popleft()
        found.append(values[falling[0]])
    return found


def _elements(nbytes: int, itemsize: int) -> int:
    if not isinstance(itemsize, int) or isinstance(itemsize, bool) or not 1 <= itemsize <= MOST_BYTES:
        problem = f"itemsize must be an integer from 1 to {MOST_BYTES}."
        raise ArgumentError.of(problem, f"itemsize={shown(itemsize)}", "itemsize=4")
    if nbytes % itemsize:
        given, remedy = f"nbytes={nbytes}, itemsize={itemsize}", f"nbytes={nbytes - nbytes % itemsize}"
        raise ArgumentError.of("nbytes must be a multiple of itemsize.", given, remedy)
    return nbytes // itemsize
