"""A clock for schedules: how long one takes on a topology, and what each link does meanwhile.

In: a ``Schedule``, a ``Topology``, bytes.  Out: a ``Simulation``.  Nothing runs and no clock is read.

The model: rounds are kept in step. A chunk is cut into ``pieces`` p; in tick t piece j does round t - j, so up to
p rounds are on their way at once and R rounds take R + p - 1 ticks. A tick takes the longest latency of
its moves (added up along each route) and then as long as its busiest link needs for all the bytes that it
carries in that tick: moves that share a link share its bandwidth, and switches and devices on the way pass
bytes on as they come. Combining takes no time. For one chunk that travels d hops this is the pipelined chain's
(d + p - 1)(latency + bytes / p / bandwidth), as in Hockney's model.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Sanders, Speck & Träff,
Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35(12), 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from ..errors import ArgumentError, PlanError, message, shown
from ..topology import Topology
from .schedule import Schedule

LEAST_PIECE: Final = 1024
"""Bytes of a chunk below which it is not cut further: far below every link's latency x bandwidth (0.7 us x 25 GB/s
is 17 KB), so that more pieces would not be faster anyway."""

MOST_PIECES: Final = 1 << 16
"""Pieces beyond which more change nothing that can be seen: R rounds cost (R - 1) / p more than the links' own time."""

MOST_BYTES: Final = 1 << 60
"""The largest buffer that is simulated, an exbibyte: beyond it floats no longer tell a piece from the whole."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Simulation:
    """What a schedule does on a topology.

    Args:
      seconds: from the first move's start to the last one's end.
      busy: for each link that is used, by (src, dst), the seconds in which it carries bytes at its full bandwidth.
      bytes: for each of these links, how many bytes it carries: whole elements, while times count exact shares.
      ticks: how long each tick takes, in seconds; tick t has piece j in round t - j.
    """

    seconds: float
    busy: dict[Pair, float]
    bytes: dict[Pair, int]
    ticks: tuple[float, ...]


def simulate(schedule: Schedule, topology: Topology, nbytes: int, itemsize: int = 1) -> Simulation:
    """Return how long a schedule takes on a topology, and each link's bytes and busy time.

    Args:
      schedule: any; its devices and routes are nodes of the topology.
      topology: where it runs.
      nbytes: of the whole buffer (one replica's, for an all-reduce), 0 or more.
      itemsize: bytes of an element; chunks are cut between elements.
    Raises:
      ArgumentError: a negative or broken number of bytes, or no topology.
      PlanError: a move for which the topology has no way.

    >>> from crossreduce.planning import ring
    >>> topology = Topology.ring(4, gb_per_s=25, latency_s=1e-6)
    >>> simulation = simulate(ring(topology.devices), topology, 100_000_000)
    >>> round(simulation.seconds * 1e6, 3)  # 6 rounds of 1 us + 25 MB / 25 GB/s
    6006.0
    >>> simulation.bytes["cpu:0", "cpu:1"]
    150000000
    """
    if not isinstance(schedule, Schedule) or not isinstance(topology, Topology):
        given = f"{shown(schedule)}, {shown(topology)}"
        raise ArgumentError(message("simulate takes a Schedule and a Topology.", given, "plan.schedule, topology"))
    spans = schedule.spans(_elements(nbytes, itemsize))
    traffic = _traffic(schedule, topology)
    carried: dict[Pair, int] = {}
    for moves in traffic:
        for pair, chunks in moves.chunks.items():
            count = sum(spans[chunk][1] - spans[chunk][0] for chunk in chunks)
            carried[pair] = carried.get(pair, 0) + itemsize * count
    rounds = _rounds(schedule, topology, traffic, nbytes)
    busy: dict[Pair, float] = {}
    for moving in rounds:
        for pair, seconds in moving.seconds.items():
            busy[pair] = busy.get(pair, 0.0) + seconds
    ticks = _ticks(rounds, schedule.pieces) if nbytes and rounds else []
    seconds = _seconds(rounds, schedule.pieces) if ticks else 0.0
    return Simulation(seconds, busy, carried, tuple(ticks))


def fluid_rate(schedule: Schedule, topology: Topology) -> Fraction | None:
    """Return the rate in GB/s that a schedule nears as its buffer grows: what its busiest link allows.

    Exact. ``None``: it moves nothing.

    >>> from crossreduce.planning import ring
    >>> fluid_rate(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), Topology.ring(4, gb_per_s=25))
    Fraction(50, 3)
    """
    load: dict[Pair, Fraction] = {}
    for moves in _traffic(schedule, topology):
        for pair, chunks in moves.chunks.items():
            load[pair] = load.get(pair, Fraction(0)) + sum(schedule.chunks[chunk].share for chunk in chunks)
    rates = [_bandwidth(topology, pair) / share for pair, share in load.items() if share]
    return min(rates, default=None)


def pipelined(schedule: Schedule, topology: Topology, nbytes: int) -> tuple[Schedule, float]:
    """Return the schedule in the number of pieces that takes the least time for ``nbytes`` bytes, and that time.

    For p pieces, at least as many as rounds, the time is a + b p + c / p, least at p = sqrt(c / b); fewer are tried one
    by one up to 32, then by doubling. No piece of the average chunk is below ``LEAST_PIECE`` bytes.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(4, gb_per_s=25, latency_s=1e-6)
    >>> schedule, seconds = pipelined(one_device(topology.devices), topology, 1 << 20)
    >>> schedule.pieces, seconds == simulate(schedule, topology, 1 << 20).seconds
    (8, True)
    """
    rounds = _rounds(schedule, topology, _traffic(schedule, topology), _elements(nbytes, 1))
    if not nbytes or not rounds:
        return schedule.cut_into(1), 0.0
    deep = len(rounds)
    most = max(1, min(nbytes // len(schedule.chunks) // LEAST_PIECE, MOST_PIECES))
    tried = {1, deep, most, *range(2, min(deep, 33)), *(1 << k for k in range(deep.bit_length()))}
    windows = _windows(rounds, deep)
    latency, transfer = windows[deep - 1]  # of a tick in which all rounds are on their way
    if latency:
        ramps = sum(seconds for _, seconds in windows) - deep * transfer
        best = math.sqrt(max(ramps, 0.0) / latency)
        tried |= {math.floor(best), math.ceil(best)}
    times = {pieces: _seconds(rounds, pieces) for pieces in sorted(tried) if 1 <= pieces <= most}
    pieces = min(times, key=lambda pieces: (times[pieces], pieces))
    return schedule.cut_into(pieces), times[pieces]


class _Moves(NamedTuple):
    """What a round moves: which chunks over which link, and the longest latency of its routes."""

    chunks: dict[Pair, tuple[int, ...]]
    latency_s: float


class _Round(NamedTuple):
    """A round for one size: seconds of transfer on each link, and the latency."""

    seconds: dict[Pair, float]
    latency_s: float


@lru_cache(maxsize=256)
def _traffic(schedule: Schedule, topology: Topology) -> tuple[_Moves, ...]:
    rounds = []
    for r, steps in enumerate(schedule.rounds):
        chunks: dict[Pair, list[int]] = {}
        latency = Fraction(0)
        for chunk, dst, srcs in steps:
            for src in srcs:
                if src == dst:
                    continue
                through = schedule.through(r, chunk, src, dst)
                pairs = way(topology, schedule.devices[src], schedule.devices[dst], through)
                latency = max(latency, sum((topology.link(*pair).latency_s for pair in pairs), Fraction(0)))  # type: ignore[union-attr]
                for pair in pairs:
                    chunks.setdefault(pair, []).append(chunk)
        rounds.append(_Moves({pair: tuple(moved) for pair, moved in chunks.items()}, float(latency)))
    return tuple(rounds)


def way(topology: Topology, src: str, dst: str, through: tuple[str, ...] | None = None) -> tuple[Pair, ...]:
    """Return the links from ``src`` to ``dst``, by (src, dst): through the named nodes, or as the topology routes it.

    Raises:
      PlanError: there is no way, or a link on it is missing.
    """
    unknown = [node for node in (src, *(through or ()), dst) if node not in topology]
    if unknown:
        given = f"{', '.join(unknown)}; nodes {', '.join(topology.nodes)}"
        raise PlanError(
            message(
                f"the topology has no way from {src} to {dst}: it lacks a node.",
                given,
                "the topology it was planned for",
            )
        )
    nodes = topology.route(src, dst) if through is None else (src, *through, dst)
    pairs = () if nodes is None else tuple(pairwise(nodes))
    if nodes is None or any(topology.link(*pair) is None for pair in pairs):
        out = ", ".join(link.dst for link in topology.out_links(src)) or "none"
        by = "" if through is None else f" through {', '.join(through)}"
        raise PlanError(message(f"the topology has no way from {src} to {dst}{by}.", f"links out of {src}: {out}"))
    return pairs


def _rounds(schedule: Schedule, topology: Topology, traffic: tuple[_Moves, ...], nbytes: int) -> list[_Round]:
    """Return each round's seconds, of exact shares: rounding to elements would make some schedules beat the bound."""
    shares = [float(chunk.share) * nbytes for chunk in schedule.chunks]
    speeds = {pair: float(_bandwidth(topology, pair)) * 1e9 for moves in traffic for pair in moves.chunks}
    return [
        _Round(
            {pair: math.fsum(shares[c] for c in chunks) / speeds[pair] for pair, chunks in moves.chunks.items()},
            moves.latency_s,
        )
        for moves in traffic
    ]


def _ticks(rounds: list[_Round], pieces: int) -> list[float]:
    """Return each tick's seconds, in order."""
    windows = _windows(rounds, min(pieces, len(rounds)))
    ticks = [latency + transfer / pieces for latency, transfer in windows]
    if pieces > len(rounds):  # the middle ticks, in which all rounds are on their way, are all alike
        middle = len(rounds) - 1
        ticks[middle:middle] = [ticks[middle]] * (pieces - len(rounds))
    return ticks


def _seconds(rounds: list[_Round], pieces: int) -> float:
    """Return the sum of all ticks without listing them."""
    windows = _windows(rounds, min(pieces, len(rounds)))
    ticks = [latency + transfer / pieces for latency, transfer in windows]
    more = max(0, pieces - len(rounds))
    return math.fsum([*ticks, more * ticks[len(rounds) - 1]])


def _windows(rounds: list[_Round], width: int) -> list[tuple[float, float]]:
    """Return (latency, busiest link's seconds) of each set of rounds that are on their way together.

    These are the windows of ``width`` neighbouring rounds that slide over all of them, in and out again.
    """
    load: dict[Pair, float] = {}
    windows = []
    for t in range(len(rounds) + width - 1):
        if t < len(rounds):
            for pair, seconds in rounds[t].seconds.items():
                load[pair] = load.get(pair, 0.0) + seconds
        if t >= width:
            for pair, seconds in rounds[t - width].seconds.items():
                load[pair] -= seconds
        within = rounds[max(0, t - width + 1) : t + 1]
        windows.append((max(moves.latency_s for moves in within), max(0.0, *load.values()) if load else 0.0))
    return windows


def _elements(nbytes: int, itemsize: int) -> int:
    whole = [isinstance(number, int) and not isinstance(number, bool) for number in (nbytes, itemsize)]
    if not all(whole) or not 0 <= nbytes <= MOST_BYTES or itemsize < 1 or nbytes % itemsize:
        problem = f"nbytes is a whole number of bytes from 0 to {MOST_BYTES}, of whole elements."
        raise ArgumentError(message(problem, f"nbytes={shown(nbytes)}, itemsize={shown(itemsize)}", "1 << 20"))
    return nbytes // itemsize


def _bandwidth(topology: Topology, pair: Pair) -> Fraction:
    link = topology.link(*pair)
    assert link is not None
    return link.bandwidth
