"""Schedules for several hosts by a list scheduler, if they are faster than a known schedule.

Input: a request and the fastest known schedule. Output: the fastest of this schedule and those of the list scheduler.
Each share of the buffer has a tree that crosses the network once to each other host. A reduce is a broadcast backwards,
and an all-reduce is a reduce-scatter followed by an all-gather over the same trees.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Final, NamedTuple

from ...schedule import Chunk, Pieces, Route, Schedule, Step, fastest_of, verify
from ...schedule.simulate import LEAST_PIECE
from ...topology import Topology
from ..optimal.bound import bound_of_members
from ..requests import Request
from .crossing_trees import AT_CARD, RELAYED, SPREAD, Edge, Style, Wires, edges_of, wires
from .list_scheduler import CROSSING, FORWARDED, NO_SHARES, Batches, TransferOrder, by_level, in_order

MOST_DEVICES: Final = 72  # with more, a plan takes longer than a few seconds
MOST_EDGES: Final = 1 << 14  # with more trees, a plan takes longer than a few seconds
NEAR: Final = 1.02  # a known schedule that takes at most this many times the least time is not improved
WORTH: Final = 0.99  # a schedule is only tried if it may take less than this part of the time of the known one
SHORT: Final = 8  # crossings in one piece win if all transfers take less than this many times the latency of one
_PACKED_QUICKLY: Final = 16  # with at most so many devices, packing trees takes less than a second
_STYLES: Final = [Style(stops, lands) for stops, lands in product((False, True), (AT_CARD, SPREAD, RELAYED))]
_BATCHES: Final = [Batches(1, first) for first in (NO_SHARES, CROSSING, FORWARDED)]
_PARTS: Final = [Batches(part, first) for part in (0.75, 0.5, 0.25) for first in (NO_SHARES, CROSSING)]
_ROOTED: Final = (1, 4, 16)  # the shares of a root
_OF_EACH: Final = (1, 2, 4)  # the shares of each device
_CLOSE: Final = 1.02  # orders that take longer than this many times the best one so far are left out
_KEPT: Final = 2  # the styles that are tried with more shares
_TIMED: Final = 3  # the schedules that are simulated
_FEW_ROUNDS: Final = 8  # with more, pieces in a pipeline are no faster


class _Tried(NamedTuple):
    seconds: float
    number: int
    shares: int  # of each device that has some
    style: Style
    order: TransferOrder


def faster_between_hosts(request: Request, best: Pieces) -> Pieces:
    """Return the fastest of a known schedule, ``best``, and schedules of the list scheduler for several hosts."""
    topology, devices = request.topology, request.members
    assert topology is not None
    roots = _roots(request)
    if roots is None or not request.nbytes or len(devices) > MOST_DEVICES:
        return best
    copying = len(request.sources) == 1 or request.collective == "all_gather"
    view = topology if copying or topology.symmetric else topology.reversed()
    paired = len(roots) > 1 and request.collective == "all_reduce"
    lines = wires(view, devices)
    if lines is None or (paired and not topology.symmetric):
        return best
    goal = best.seconds * WORTH
    if goal <= (_least_seconds(request, topology, roots) + (1 + paired) * lines.crossing_s) * NEAR:
        return best
    tried: list[_Tried] = []
    least_s = math.inf
    numbers = _OF_EACH if len(roots) > 1 else _ROOTED
    styles = [*_STYLES, *_repeated(lines)]
    delays = range(lines.greatest_depth + 1)
    for shares in numbers:
        size = request.nbytes / (shares * len(roots))
        starts = tuple(root for root in roots for _ in range(shares))
        if shares > numbers[0] and (size < LEAST_PIECE or len(starts) * len(devices) > MOST_EDGES):
            break
        before = tried[0] if tried else None
        for style in styles:
            edges = edges_of(lines, starts, style)
            orders = [by_level(lines, edges, size, delay) for delay in delays]
            least_s = min(least_s, *(order.seconds for order in orders))
            for batches in [*_BATCHES, *(_PARTS if len(starts) > lines.most_cards else ())]:
                order = in_order(lines, edges, size, batches, least_s * _CLOSE)
                if order is not None:
                    orders.append(order)
                    least_s = min(least_s, order.seconds)
            tried += [_Tried(order.seconds, len(tried) + k, shares, style, order) for k, order in enumerate(orders)]
        tried.sort()
        if len(roots) > 1:  # the trees of a root are few
            styles = list(dict.fromkeys(each.style for each in tried))[:_KEPT]
            if before is not None and tried[0].seconds >= before.seconds:
                break
    factor = 1 + paired
    chosen = [each for each in tried[:_TIMED] if each.seconds * factor < goal]
    # In many pieces, all rounds run at the same time, so those of few rounds are tried, too.
    chosen += [
        each
        for each in tried
        if (each.shares == numbers[0] or len(roots) == 1) and len(each.order.rounds) <= _FEW_ROUNDS
    ][:_TIMED]
    schedules = dict.fromkeys(_schedule(request, lines, roots, each, copying, paired) for each in chosen)
    for schedule in schedules:
        verify(schedule)
    if not schedules:
        return best
    return fastest_of(schedules, topology, request.nbytes, costs=request.costs, known=best)


def suffices(request: Request) -> bool:
    """Return whether latencies take so long that trees which are packed for bandwidth would be no faster.

    It may be true only for many devices with one share each or more, for which packing takes seconds.
    """
    topology, devices, roots = request.topology, request.members, _roots(request)
    assert topology is not None
    if roots is None or len(roots) == 1 or not _PACKED_QUICKLY < len(devices) <= MOST_DEVICES or not topology.symmetric:
        return False
    lines = wires(topology, devices)
    return lines is not None and _least_seconds(request, topology, roots) < SHORT * lines.crossing_s


def _repeated(lines: Wires) -> list[Style]:
    """Return the styles in which a share crosses several times to a host whose devices are not all neighbours."""
    least, styles = min(len(members) for members in lines.hosts), list[Style]()
    landings = 2 if lines.greatest_depth > 1 else least
    while landings < least:
        styles.append(Style(stops=False, lands=AT_CARD, landings=landings))
        landings *= 2
    return styles


def _roots(request: Request) -> tuple[int, ...] | None:
    """Return the devices at which shares start (or end, if they are reduced), or ``None`` if they cannot be planned."""
    if request.packs != 1 or request.root is not None:
        return None
    sources, destinations = request.positions
    if request.collective in ("all_gather", "reduce_scatter"):
        return tuple(range(len(request.members)))
    if len(sources) == 1:
        return (sources[0],)
    if len(destinations) == 1:
        return (destinations[0],)
    return tuple(range(len(request.members))) if set(sources) == set(destinations) else None


def _least_seconds(request: Request, topology: Topology, roots: tuple[int, ...]) -> float:
    """Return the seconds that the buffer takes at the rate of the bound."""
    collective, members = request.collective, request.members
    root = None if len(roots) > 1 else ((members[roots[0]], Fraction(1)),)
    if root is not None:
        collective = "broadcast" if len(request.sources) == 1 else "reduce"
    return request.nbytes / 1e9 / float(bound_of_members(topology, collective, members, root).algbw or 1e9)


def _schedule(
    request: Request, lines: Wires, roots: Sequence[int], tried: _Tried, copying: bool, paired: bool
) -> Schedule:
    """Return the schedule of an order of edges, which reduces, copies, or first reduces and then copies."""
    starts = [root for root in roots for _ in range(tried.shares)]
    edges = edges_of(lines, tuple(starts), tried.style)
    sources, destinations = (tuple(ends) for ends in request.positions)
    chunks = [
        Chunk(
            Fraction(1, len(starts)),
            (start,) if request.collective == "all_gather" else sources,
            (start,) if request.collective == "reduce_scatter" else destinations,
        )
        for start in starts
    ]
    rounds: list[tuple[Step, ...]] = []
    routes: dict[tuple[int, int, int], tuple[str, ...]] = {}
    if not copying or paired:
        rounds += _reducing(edges, tried.order, set(sources))
        routes.update({(e.share, e.hop.dst, e.hop.src): e.hop.nodes[-2:0:-1] for e in edges})
    if copying or paired:
        rounds += [
            tuple(Step(edges[k].share, edges[k].hop.dst, (edges[k].hop.src,)) for k in r) for r in tried.order.rounds
        ]
        routes.update({(e.share, e.hop.src, e.hop.dst): e.hop.nodes[1:-1] for e in edges})
    listed = tuple(Route(*ends, through) for ends, through in routes.items() if through)
    return Schedule(request.collective, "forest", request.members, tuple(chunks), tuple(rounds), routes=listed)


def _reducing(edges: Sequence[Edge], order: TransferOrder, sources: set[int]) -> Iterator[tuple[Step, ...]]:
    """Yield the rounds of an order backwards: the source of an edge combines the values of its destinations."""
    holders: dict[int, set[int]] = defaultdict(lambda: set(sources))
    for round_edges in reversed(order.rounds):
        arriving = defaultdict[tuple[int, int], list[int]](list)
        for k in round_edges:
            edge = edges[k]
            if edge.hop.dst in holders[edge.share]:
                arriving[edge.share, edge.hop.src].append(edge.hop.dst)
        steps = []
        for (share, device), srcs in arriving.items():
            own = [device] * (device in holders[share])
            steps.append(Step(share, device, tuple(sorted(own + srcs))))
        for share, device in arriving:
            holders[share].add(device)
        if steps:
            yield tuple(steps)
