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
from itertools import chain, product
from typing import Final, NamedTuple

from ...errors import PlanError
from ...schedule import Chunk, Pieces, Route, Schedule, Step, fastest_of, verify
from ...schedule.simulate import LEAST_PIECE
from ...topology import Topology
from ..forest import forest
from ..optimal.bound import bound_of_members
from ..optimal.few_step.tree_program import Column, share_among_trees
from ..requests import Request
from .crossing_trees import AT_CARD, RELAYED, SPREAD, Edge, Style, Tree, TreesInside, Wires, edges_of, wires
from .list_scheduler import (
    CROSSING,
    FORWARDED,
    NO_SHARES,
    Batches,
    TransferOrder,
    by_level,
    in_order,
)
from .staged_shares import Share, staged

MOST_DEVICES: Final = 72  # with more, a plan takes longer than a few seconds
MOST_EDGES: Final = 1 << 14  # with more trees, a plan takes longer than a few seconds
NEAR: Final = 1.02  # a known schedule that takes at most this many times the least time is not improved
WORTH: Final = 0.99  # a schedule is only tried if it may take less than this part of the time of the known one
_LONG: Final = 4  # trees of few steps inside hosts win if transfers take more than this many latencies of a crossing
SHORT: Final = 8  # crossings in one piece win if all transfers take less than this many times the latency of one
_PACKED_QUICKLY: Final = 16  # with at most so many devices, packing trees takes less than a second
_STYLES: Final = [Style(stops, lands) for stops, lands in product((False, True), (AT_CARD, SPREAD, RELAYED))]
_BATCHES: Final = [Batches(1, first) for first in (NO_SHARES, CROSSING, FORWARDED)]
_PARTS: Final = [Batches(part, first) for part in (0.75, 0.5, 0.25) for first in (NO_SHARES, CROSSING)]
_HALVES: Final = [Batches(1, NO_SHARES), Batches(0.5, NO_SHARES)]
_ROOTED: Final = (1, 4, 16)  # the shares of a root
_OF_EACH: Final = (1, 2, 4)  # the shares of each device
_CLOSE: Final = 1.02  # orders that take longer than this many times the best one so far are left out
_GROUPS: Final = (1, 2, 3, 4, 6, 8)  # the groups in which shares cross, as long as more groups take less time
_COPIES: Final = 4  # equal shares use the cards of a host of another size more evenly than one share
_SMALLER: Final = 4  # shares in one or two groups may have this part of the least bytes of others
_WORSE: Final = 1.05  # with these numbers of groups, times up to this many times the least time are found
_BETTER: Final = 0.999  # more groups are tried if the last ones took at most this part of the time of those before
_KEPT: Final = 2  # the styles that are tried with more shares
_TIMED: Final = 3  # the schedules that are simulated
_MOST_PACKED: Final = 12  # the most trees of each device that are packed for bandwidth
_FEW_DEVICES: Final = 8  # with more devices on a host, such trees of few steps are tried, too
_MORE_STEPS: Final = 2  # than the least number of steps, in these trees
_STEPS: Final = 2  # the numbers of steps from the only device where shares land
_PARTS_IN_ALL: Final = 8  # the parts of the data that trees from there carry are multiples of 1 / 8
_FEW_ROUNDS: Final = 8  # with more, pieces in a pipeline are no faster
_MOST_ROUNDS: Final = 20  # the same for packed trees, which have the rate of the bound, or nearly


class _Tried(NamedTuple):
    seconds: float
    number: int
    style: Style
    shares: int  # of each device that has some
    order: TransferOrder
    edges: tuple[Edge, ...]
    starts: tuple[int, ...]  # of the shares
    sizes: tuple[int, ...] = ()  # of the shares, in proportion; (): all are equal


class _Stages(NamedTuple):
    """How shares cross in groups, and are copied in other hosts."""

    stops: bool
    lands: tuple[int, ...] = (AT_CARD,)  # each device has shares of all these kinds in each group
    landed: tuple[TreesInside, tuple[int, ...]] | None = None  # the trees of what has landed, and their parts
    apart: bool = True
    late: bool = False  # whether devices without a card have no shares in the first group
    copies: int = 1  # equal shares instead of one


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

    def add_style(self, style: Style, *, few: bool = False) -> None:
        """Try the trees of a style, unless another one has the same trees. Try only a few orders if ``few``."""
        styles = [style._replace(tree=k) for k in range(self.shares)] if style.inside else [style]
        edges = edges_of(self.lines, self.starts, *styles)
        if self.styles.setdefault(edges, style) is not style:
            return
        if not few and (style.by_level or style.inside or self.lines.greatest_depth == 1):
            for delay in range(self.lines.greatest_depth + 1):
                timed = by_level(self.lines, edges, delay)
                self._add(style, edges, TransferOrder(timed.rounds, timed.seconds([self.size])))
        if not style.by_level:
            self._add_batches(style, edges, _HALVES if few else _BATCHES)

    def add_parts(self, most: int) -> None:
        """Try smaller batches of the trees of the ``most`` best styles."""
        best = list(dict.fromkeys(each.style for each in sorted(self.tried) if not each.style.by_level))[:most]
        for edges, style in self.styles.items():
            if style in best:
                self._add_batches(style, edges, _PARTS)

    def _add_batches(self, style: Style, edges: tuple[Edge, ...], every: Sequence[Batches]) -> None:
        for batches in every:
            order = in_order(self.lines, edges, self.size, batches, self.least_s * _CLOSE)
            if order is not None:
                self._add(style, edges, order)

    def _add(self, style: Style, edges: tuple[Edge, ...], order: TransferOrder) -> None:
        number = self.number + len(self.tried)
        self.tried.append(_Tried(order.seconds, number, style, self.shares, order, edges, self.starts))
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
    long = _least_seconds(request, topology, roots) > _LONG * lines.crossing_s
    for number, packed in enumerate(_packed_styles(lines, long) if len(roots) > 1 else ()):
        assert packed.inside is not None
        shares = len(packed.inside.trees[0])
        search = _CrossingSearch(lines, roots, shares, request.nbytes, math.inf, len(tried))
        search.add_style(packed, few=number > 0)
        if not number:
            search.add_parts(1)
        tried = sorted([*tried, *search.tried])
    factor = 1 + paired
    chosen = [each for each in tried[:_TIMED] if each.seconds * factor < goal]
    # In many pieces, all rounds run at the same time, so the best order of few rounds of each kind is tried, too.
    kinds: dict[tuple[Style, int], _Tried] = {}
    for each in tried:
        most = _MOST_ROUNDS if each.style.inside else _FEW_ROUNDS
        listed = each.shares == numbers[0] or each.style.inside or len(roots) == 1
        if listed and len(each.order.rounds) <= most:
            kinds.setdefault((each.style, each.shares), each)
    if len(roots) > 1:
        known_s = min(tried[0].seconds, goal / factor)
        chosen += _in_stages(request, lines, roots, known_s)
    chosen += [each for k, each in enumerate(kinds.values()) if k < _TIMED or each.style.inside]
    schedules = dict.fromkeys(_schedule(request, each, copying, paired) for each in chosen)
    for schedule in schedules:
        verify(schedule)
    if not schedules:
        return best
    return fastest_of(schedules, topology, request.nbytes, costs=request.costs, known=best)


def _are_worth_it(request: Request, lines: Wires, shares: int) -> bool:
    """Return whether so many shares are not too small, and their trees not too large."""
    return request.nbytes / shares >= LEAST_PIECE and shares * len(lines.devices) <= MOST_EDGES


def _in_stages(request: Request, lines: Wires, roots: tuple[int, ...], least_s: float) -> list[_Tried]:
    """Return the best orders of shares that cross in groups, if they take less than ``least_s``, the fastest first."""
    found: list[_Tried] = []
    for stages in _all_stages(lines):
        before = math.inf
        for groups in _GROUPS:
            shares = [
                Share(root, Style(stops=stages.stops, lands=lands, landed=trees, tree=k), group, weight)
                for root in roots
                for group in range(min(stages.late and lines.to_card[root] > 0, groups - 1), groups)
                for lands in stages.lands
                for trees, k, weight in _landed_trees(stages)
            ]
            if not _are_worth_it(request, lines, max(1, len(shares) // (1 if groups > 2 else _SMALLER))):
                break
            result = staged(lines, shares, request.nbytes / len(roots), least_s * _WORSE, apart=stages.apart)
            seconds = result.order.seconds if result else math.inf
            if result is not None:
                found.append(_Tried(seconds, len(found), shares[0].style, 0, *result))
                least_s = min(least_s, seconds)
            if seconds > before * _BETTER or (groups > 2 and result is None):
                break
            before = seconds
    return [each for each in sorted(found)[:1] if each.seconds <= least_s]


def _landed_trees(stages: _Stages) -> list[tuple[TreesInside | None, int, int]]:
    if stages.landed is None:
        return [(None, 0, 1)] * stages.copies
    return [(stages.landed[0], k, part) for k, part in enumerate(stages.landed[1])]


@lru_cache(maxsize=16)
def _all_stages(lines: Wires) -> list[_Stages]:
    """Return the stages that are tried."""
    several = lines.greatest_depth > 1
    far = max(lines.to_card) > 0
    copies = _COPIES if len({len(members) for members in lines.hosts}) > 1 else 1
    single = list(_few_step_landings(lines)) if several else []
    if single:
        both = [
            (_Stages(stops=False, landed=landed), _Stages(stops=True, landed=landed, late=True)) for landed in single
        ]
        return [_Stages(stops=True), *chain(*both)]
    found = [
        _Stages(stops, apart=apart, copies=copies)
        for stops in ((False, True) if far else (False,))
        for apart in ((True, False) if several else (True,))
    ]
    return [*found, _Stages(stops=True, lands=(AT_CARD, RELAYED), apart=False)] if far and not several else found


def _few_step_landings(lines: Wires) -> Iterator[tuple[TreesInside, tuple[int, ...]]]:
    """Yield trees of few steps out of the device where shares land, and their parts, if each host has only one."""
    landings = sorted({hop.dst for hops in lines.crossings.values() for hop in hops})
    places = {lines.hosts[lines.host_of[device]].index(device) for device in landings}
    for more in range(_STEPS if len(landings) == len(lines.hosts) and len(places) == 1 else 0):
        root = lines.hosts[0][min(places)]
        found = _few_steps(lines, lines.greatest_depth + more, root)
        if found is not None:
            yield found


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
def _packed_styles(lines: Wires, long: bool) -> list[Style]:
    """Return styles with trees inside hosts that are packed for bandwidth: a forest, and some of few steps if ``long``.

    The trees are those of an all-gather on the direct links of the first host. All hosts must have the same links.
    """
    if lines.greatest_depth == 1:
        return []
    every = [_packed_trees(lines)]
    if long and len(lines.hosts[0]) > _FEW_DEVICES:
        few = _few_steps(lines, lines.greatest_depth + _MORE_STEPS)
        every.append(few and few[0])
    trees = [each for each in every if each is not None and len({len(of_device) for of_device in each.trees}) == 1]
    return [Style(False, AT_CARD, inside=each, landed=each) for each in trees]


def _packed_trees(lines: Wires) -> TreesInside | None:
    """Return the trees of a forest that reaches the bound on the direct links of the first host, in equal shares."""
    names, direct = _first_host(lines)
    try:
        found = forest(Request("all_gather", names, names, "forest", direct))
    except PlanError:  # some devices are joined by switches only
        return None
    count, schedule = found.k, found.schedule
    if count.denominator > 1 or count > _MOST_PACKED or set(schedule.devices) != set(names):
        return None
    number = [names.index(name) for name in schedule.devices]
    trees: list[list[Tree]] = [[] for _ in names]
    for c, chunk in enumerate(schedule.chunks):
        edges = [
            (r, number[src], number[dst])
            for r, steps in enumerate(schedule.rounds)
            for k, dst, (src,) in steps
            if k == c
        ]
        trees[number[chunk.sources[0]]] += [tuple(edges)] * int(chunk.share * count * len(names))
    return _in_all_hosts(lines, trees)


def _few_steps(lines: Wires, steps: int, root: int | None = None) -> tuple[TreesInside, tuple[int, ...]] | None:
    """Return trees with at most so many steps inside hosts, and the parts of the data that they carry.

    They are those of an all-gather in many pieces, in equal shares, or of a copy from one device in one piece.
    """
    names, direct = _first_host(lines)
    if not direct.links:  # a single device, or devices that only switches join
        return None
    number = -1 if root is None else lines.hosts[0].index(root)
    found = share_among_trees(direct, number, steps, many=root is None, paired=False)
    if found is None:
        return None
    trees: list[list[Tree]] = [[] for _ in names]
    parts = []
    for units, column in _rounded(found.columns) if root is not None else found.columns:
        tree = tuple(edge[:3] for edge in column.out)
        trees[column.root] += [tree] * (units if root is None else 1)
        parts.append(units)
    if root is None:
        parts = [1] * len(trees[0])
    every = _in_all_hosts(lines, trees) if len(parts) <= _MOST_PACKED else None
    return None if every is None else (every, tuple(parts))


def _rounded(columns: Sequence[tuple[int, Column]]) -> list[tuple[int, Column]]:
    """Return the columns with amounts of ``_PARTS_IN_ALL`` units in all, without those that get none."""
    total = sum(units for units, _ in columns)
    shares = [Fraction(units * _PARTS_IN_ALL, total) for units, _ in columns]
    whole = [int(share) for share in shares]
    order = sorted(range(len(columns)), key=lambda k: whole[k] - shares[k])
    for k in order[: _PARTS_IN_ALL - sum(whole)]:
        whole[k] += 1
    return [(units, column) for units, (_, column) in zip(whole, columns, strict=True) if units]


def _first_host(lines: Wires) -> tuple[tuple[str, ...], Topology]:
    """Return the devices of the first host, and a topology of its direct links."""
    names = tuple(lines.devices[k] for k in lines.hosts[0])
    return names, Topology(names, tuple(link for link in lines.topology.links if {link.src, link.dst} <= {*names}))


def _in_all_hosts(lines: Wires, trees: Sequence[Sequence[Tree]]) -> TreesInside | None:
    """Return trees of the first host for the devices of all hosts, or ``None`` if a host has other devices or links."""
    every: list[list[Tree]] = [[] for _ in lines.devices]
    for members in lines.hosts:
        if len(members) != len(trees):
            return None
        for k, of_device in enumerate(trees):
            every[members[k]] = [
                tuple((step, members[src], members[dst]) for step, src, dst in tree) for tree in of_device
            ]
    edges = {edge[1:] for of_device in every for tree in of_device for edge in tree}
    return TreesInside(every) if edges <= lines.inside.keys() else None


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


def _schedule(request: Request, tried: _Tried, copying: bool, paired: bool) -> Schedule:
    """Return the schedule of an order of edges, which reduces, copies, or first reduces and then copies."""
    edges, sizes = tried.edges, tried.sizes or (1,) * len(tried.starts)
    sources, destinations = (tuple(ends) for ends in request.positions)
    chunks = [
        Chunk(
            Fraction(size, sum(sizes)),
            (start,) if request.collective == "all_gather" else sources,
            (start,) if request.collective == "reduce_scatter" else destinations,
        )
        for start, size in zip(tried.starts, sizes, strict=True)
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
