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
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

from ...errors import PlanError
from ...schedule import Chunk, Pieces, Route, Schedule, Step, fastest_of, verify
from ...schedule.simulate import LEAST_PIECE
from ...topology import Topology
from ..forest import forest
from ..optimal.bound import bound_of_members
from ..requests import Request
from .crossing_trees import AT_CARD, RELAYED, SPREAD, Edge, Style, Wires, edges_of, wires
from .list_scheduler import (
    CROSSING,
    FORWARDED,
    NO_SHARES,
    Batches,
    TimedRounds,
    TransferOrder,
    by_level,
    in_order,
    in_stages,
)

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
# The relative sizes of the shares of each device, at first, if each one crosses after the one before. What crosses last
# is copied while no link between hosts is busy, so it is small. Sums are powers of two, which exported files need.
_FALLING: Final[tuple[tuple[int, ...], ...]] = (
    (22, 10), (18, 10, 4), (26, 20, 12, 6), (24, 16, 10, 8, 4, 2), (14, 12, 11, 9, 7, 5, 4, 2),
    (12, 11, 9, 8, 7, 5, 4, 3, 2, 1, 1, 1),
)  # fmt: skip
# The groups in which four equal shares of each device cross, if hosts have unequal numbers of devices: in larger groups
# they use the cards of the smaller host evenly.
_GROUPS: Final = ((0, 0, 0, 1), (0, 0, 1, 1))
_AT_CARD: Final = [style for style in _STYLES if style.lands == AT_CARD]
_MOST_MOVED: Final = 12  # the most changes of these sizes that are tried, for each share of a device
_WORSE: Final = 1.05  # sizes are not changed if they take more than this many times the least time
_KEPT: Final = 2  # the styles that are tried with more shares
_TIMED: Final = 3  # the schedules that are simulated
_MOST_PACKED: Final = 8  # the most trees of each device that are packed for bandwidth
_FEW_ROUNDS: Final = 8  # with more, pieces in a pipeline are no faster
_MOST_ROUNDS: Final = 20  # the same for packed trees, which have the rate of the bound, or nearly


class _Tried(NamedTuple):
    seconds: float
    number: int
    sizes: tuple[int, ...]  # the relative sizes of the shares of each device that has some
    style: Style
    order: TransferOrder


class _CrossingSearch:
    """The orders of the trees of some shares. Orders that take much longer than the best one so far are left out."""

    def __init__(
        self, lines: Wires, roots: tuple[int, ...], shares: int, nbytes: int, least_s: float, number: int
    ) -> None:
        self.lines, self.shares, self.least_s, self.number = lines, shares, least_s, number
        self.starts = tuple(root for root in roots for _ in range(shares))
        self.size = nbytes / len(self.starts)  # of a share, if shares are equal
        self.tried: list[_Tried] = []
        self.styles: dict[tuple[Edge, ...], Style] = {}  # styles that give different trees

    def add_style(self, style: Style) -> None:
        """Try the trees of a style, unless another one has the same trees."""
        edges = edges_of(self.lines, self.starts, style)
        if self.styles.setdefault(edges, style) is not style:
            return
        if style.by_level or style.packed or self.lines.greatest_depth == 1:
            for delay in range(self.lines.greatest_depth + 1):
                timed = by_level(self.lines, edges, delay)
                self._add(style, TransferOrder(timed.rounds, timed.seconds([self.size])))
        if not style.by_level:
            self._add_batches(style, edges, _BATCHES)

    def add_parts(self, most: int) -> None:
        """Try smaller batches of the trees of the ``most`` best styles."""
        best = list(dict.fromkeys(each.style for each in sorted(self.tried) if not each.style.by_level))[:most]
        for edges, style in self.styles.items():
            if style in best:
                self._add_batches(style, edges, _PARTS)

    def add_falling(self, sizes: tuple[int, ...]) -> None:
        """Let the shares of each device cross in turn. Change their relative sizes as long as this takes less time."""
        nbytes, count = self.size * self.shares, self.shares

        def seconds(rounds: TimedRounds, sizes: Sequence[int]) -> float:
            return rounds.seconds([nbytes * size / sum(sizes) for size in sizes])

        styles = {edges_of(self.lines, self.starts, style): style for style in _AT_CARD}
        kinds = (True, False) if self.lines.greatest_depth > 1 else (True,)
        every = [
            (style, in_stages(self.lines, edges, count, apart=apart))
            for edges, style in styles.items()
            for apart in kinds
        ]
        times = [seconds(rounds, sizes) for _, rounds in every]
        best_s = min(times)
        style, rounds = every[times.index(best_s)]
        moves = [(k, other) for k in range(count) for other in range(count) if k != other]
        left = _MOST_MOVED * count if best_s < self.least_s * _WORSE else 0
        at = 0
        while left and at < len(moves):
            down, up = moves[at]
            moved = tuple(size - (k == down) + (k == up) for k, size in enumerate(sizes))
            if moved[down]:
                left -= 1
                moved_s = seconds(rounds, moved)
                if moved_s < best_s * (1 - 1e-6):
                    sizes, best_s, at = moved, moved_s, -1
            at += 1
        self._add(style, TransferOrder(rounds.rounds, best_s), sizes)

    def add_groups(self) -> None:
        """Let equal shares of each device cross in two groups."""
        for style in _AT_CARD:
            edges = edges_of(self.lines, self.starts, style)
            for groups, apart in product(_GROUPS, (True, False)):
                grouped = tuple(edge._replace(share=groups[edge.share % self.shares]) for edge in edges)
                rounds = in_stages(self.lines, grouped, 2, apart=apart)
                self._add(style, TransferOrder(rounds.rounds, rounds.seconds([self.size])))

    def _add_batches(self, style: Style, edges: Sequence[Edge], every: Sequence[Batches]) -> None:
        for batches in every:
            order = in_order(self.lines, edges, self.size, batches, self.least_s * _CLOSE)
            if order is not None:
                self._add(style, order)

    def _add(self, style: Style, order: TransferOrder, sizes: tuple[int, ...] = ()) -> None:
        sizes = sizes or (1,) * self.shares
        self.tried.append(_Tried(order.seconds, self.number + len(self.tried), sizes, style, order))
        self.least_s = min(self.least_s, order.seconds)


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
    numbers = _OF_EACH if len(roots) > 1 else _ROOTED
    styles = _styles(lines)
    for shares in numbers:
        if shares > numbers[0] and not _are_worth_it(request, lines, shares * len(roots)):
            break
        before = tried[0].seconds if tried else math.inf
        search = _CrossingSearch(lines, roots, shares, request.nbytes, before, len(tried))
        for style in styles:
            search.add_style(style)
        if shares * len(roots) > lines.most_cards:
            search.add_parts(_KEPT)
        tried = sorted([*tried, *search.tried])
        if len(roots) > 1:  # the trees of a root are few
            styles = list(dict.fromkeys(each.style for each in tried))[:_KEPT] if search.least_s < before else []
    packed = _packed_style(lines) if len(roots) > 1 else None
    if packed is not None:
        shares = len(packed.packed[0])
        search = _CrossingSearch(lines, roots, shares, request.nbytes, math.inf, len(tried))
        search.add_style(packed)
        search.add_parts(1)
        tried = sorted([*tried, *search.tried])
    factor = 1 + paired
    chosen = [each for each in tried[:_TIMED] if each.seconds * factor < goal]
    # In many pieces, all rounds run at the same time, so the best order of few rounds of each kind is tried, too.
    kinds: dict[tuple[Style, int], _Tried] = {}
    for each in tried:
        most = _MOST_ROUNDS if each.style.packed else _FEW_ROUNDS
        listed = len(each.sizes) == numbers[0] or each.style.packed or len(roots) == 1
        if listed and len(each.order.rounds) <= most:
            kinds.setdefault((each.style, len(each.sizes)), each)
    if len(roots) > 1:
        known_s = min(tried[0].seconds, best.seconds / factor)
        chosen += [each for each in _falling(request, lines, roots, known_s) if each.seconds * factor < goal]
    chosen += [each for k, each in enumerate(kinds.values()) if k < _TIMED or each.style.packed]
    schedules = dict.fromkeys(_schedule(request, lines, roots, each, copying, paired) for each in chosen)
    for schedule in schedules:
        verify(schedule)
    if not schedules:
        return best
    return fastest_of(schedules, topology, request.nbytes, costs=request.costs, known=best)


def _are_worth_it(request: Request, lines: Wires, shares: int) -> bool:
    """Return whether so many shares are not too small, and their trees not too large."""
    return request.nbytes / shares >= LEAST_PIECE and shares * len(lines.devices) <= MOST_EDGES


def _falling(request: Request, lines: Wires, roots: tuple[int, ...], least_s: float) -> list[_Tried]:
    """Return the best orders of shares whose sizes fall, or that cross in groups, the fastest first."""
    found: list[_Tried] = []
    for sizes in _FALLING:
        if not _are_worth_it(request, lines, len(sizes) * len(roots)):
            break
        search = _CrossingSearch(lines, roots, len(sizes), request.nbytes, least_s, len(found))
        search.add_falling(sizes)
        if found and search.tried[0].seconds > found[-1].seconds:
            break  # the time has a single minimum
        found += search.tried
    shares = len(_GROUPS[0])
    unequal = len({len(members) for members in lines.hosts}) > 1
    if unequal and _are_worth_it(request, lines, shares * len(roots)):
        search = _CrossingSearch(lines, roots, shares, request.nbytes, least_s, len(found))
        search.add_groups()
        found += sorted(search.tried)[:1]
    return sorted(found)[:_KEPT]


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


def _styles(lines: Wires) -> list[Style]:
    """Return the styles to try. Shares cross several times to a host only if its devices are not all neighbours."""
    if lines.greatest_depth == 1:
        return _STYLES
    least, styles, landings = min(len(members) for members in lines.hosts), list(_STYLES), 2
    while landings < least:
        styles.append(Style(stops=False, lands=AT_CARD, landings=landings))
        landings *= 2
    return [*styles, *(style._replace(by_level=True) for style in styles)]


@lru_cache(maxsize=16)
def _packed_style(lines: Wires) -> Style | None:
    """Return the style with trees inside hosts that are packed for bandwidth, or ``None`` if it is not worth trying.

    The trees are those of an all-gather on the direct links of the first host. All hosts must have the same links.
    """
    if lines.greatest_depth == 1 or len({len(members) for members in lines.hosts}) > 1:
        return None
    first = lines.hosts[0]
    names = tuple(lines.devices[k] for k in first)
    direct = Topology(names, tuple(link for link in lines.topology.links if {link.src, link.dst} <= {*names}))
    try:
        found = forest(Request("all_gather", names, names, "forest", direct))
    except PlanError:  # some devices are joined by switches only
        return None
    count, schedule = found.k, found.schedule
    if count.denominator > 1 or count > _MOST_PACKED or set(schedule.devices) != set(names):
        return None
    number = [names.index(name) for name in schedule.devices]
    trees: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in names]
    for c, chunk in enumerate(schedule.chunks):
        edges = [(number[src], number[dst]) for steps in schedule.rounds for k, dst, (src,) in steps if k == c]
        trees[number[chunk.sources[0]]] += [tuple(edges)] * int(chunk.share * count * len(names))
    packed = [
        tuple(tuple((members[src], members[dst]) for src, dst in tree) for tree in trees[k])
        for members in lines.hosts
        for k in range(len(members))
    ]
    by_device = dict(zip((device for members in lines.hosts for device in members), packed, strict=True))
    every = [edge for of_device in packed for tree in of_device for edge in tree]
    if not all(edge in lines.inside for edge in every) or {len(of_device) for of_device in packed} != {int(count)}:
        return None
    return Style(stops=False, lands=AT_CARD, packed=tuple(by_device[k] for k in range(len(lines.devices))))


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
    starts = [root for root in roots for _ in tried.sizes]
    edges = edges_of(lines, tuple(starts), tried.style)
    sources, destinations = (tuple(ends) for ends in request.positions)
    chunks = [
        Chunk(
            Fraction(tried.sizes[k % len(tried.sizes)], sum(tried.sizes) * len(roots)),
            (start,) if request.collective == "all_gather" else sources,
            (start,) if request.collective == "reduce_scatter" else destinations,
        )
        for k, start in enumerate(starts)
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
