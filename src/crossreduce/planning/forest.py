"""The ``forest`` planner: trees packed to the bound, each with a share of the buffer.

In: a topology and who gives and takes.  Out: a ``Forest``: a schedule whose fluid rate is the bound's, and how it came
about. Broadcasts and all-gathers are trees out of their roots; reductions and reduce-scatters the same on the reversed
links; an all-reduce has for each root trees in and trees out, which share the links as the linear program of
``joint.py`` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Final, NamedTuple

from ..errors import PlanError, message
from ..schedule import Chunk, Route, Schedule, Step, fluid_rate
from ..topology import Link, Switch, Topology
from .arborescences import Arc, Through, Tree, Ways, pack, reaches, without_switches
from .bounds import densest, require_connected, solved

MOST_TREES: Final = 4
"""Trees a root, on average, up to which a plan keeps to the bound exactly; where that takes more, fewer trees are
tried, within ``TOLERANCE`` of the bound."""

TOLERANCE: Final = Fraction(2, 100)
"""What a plan of few trees may lose. NCCL's own search accepts more: its equal-speed lists step by 5 to 25 %."""

Pair = tuple[str, str]


class Forest(NamedTuple):
    """A schedule of packed trees.

    Args:
      schedule: one chunk a tree.
      k: unit trees a root, on average: the finest common part of all trees, as ForestColl counts them.
      trees: how many different ones.
      depth: links from root to leaf, switches aside, in the deepest tree.
    """

    schedule: Schedule
    k: Fraction
    trees: int
    depth: int


class _View(NamedTuple):
    """A topology as a planner sees it: the members are its devices, whatever else there is are its switches."""

    topology: Topology
    names: dict[str, str]  # of its nodes in the caller's topology


@lru_cache(maxsize=512)
def forest(
    topology: Topology,
    collective: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
) -> Forest:
    """Plan trees that together run at the bound's rate.

    Args:
      topology: any in which data can get from every source to every destination.
      collective: "all_reduce", "reduce" and "broadcast" have one buffer from all sources to all destinations;
        "reduce_scatter" and "all_gather" have a part of it on each device.
      sources: the devices that contribute.
      destinations: the devices that need the result. Other devices of the topology only forward.
    Raises:
      PlanError: some destination cannot be reached; the cut is named.

    >>> box = Topology.star([f"cuda:{k}" for k in range(8)], 450)
    >>> grown = forest(box, "all_gather", box.devices, box.devices)
    >>> grown.k, grown.trees, grown.depth
    (Fraction(1, 1), 8, 1)
    """
    members = tuple(dict.fromkeys([*sources, *destinations]))
    best: Forest | None = None
    for promoted in _promotions(topology):
        view = _view(topology, members, promoted)
        require_connected(view.topology, collective)
        grown = _grown(view, collective, len(members), sources, destinations)
        if best is None or _rate(grown, topology) > _rate(best, topology):
            best = grown
    assert best is not None
    return best


def _promotions(topology: Topology) -> list[tuple[str, ...]]:
    """Return the sets of reducing switches to use as such: none, the widest ones, these and the next, and so on.

    A switch that reduces takes part like a device that has nothing to give, so all trees span it. That pays for the
    wide switch of a box and not for a thin one between boxes.
    """
    widths: defaultdict[Fraction, list[str]] = defaultdict(list)
    for switch in topology.switches:
        if switch.reduces:
            widths[sum((link.bandwidth for link in topology.out_links(switch.name)), Fraction(0))].append(switch.name)
    sets: list[tuple[str, ...]] = [()]
    for width in sorted(widths, reverse=True):
        sets.append((*sets[-1], *widths[width]))
    return sets


def _view(topology: Topology, members: Sequence[str], promoted: Sequence[str]) -> _View:
    """Make the members, and the switches that reduce, the devices of a topology, and the rest its switches."""
    inside = [*members, *promoted]
    outside = [node for node in topology.nodes if node not in set(inside)]
    alias = {node: f"cpu:{k}" for k, node in enumerate(inside)} | {node: f"s{k}" for k, node in enumerate(outside)}
    links = tuple(Link(alias[src], alias[dst], bandwidth) for src, dst, bandwidth, _ in topology.links)
    devices = tuple(alias[node] for node in inside)
    switches = tuple(Switch(alias[node]) for node in outside)
    return _View(Topology(devices, links, switches), {name: node for node, name in alias.items()})


def _rate(grown: Forest, topology: Topology) -> Fraction:
    return fluid_rate(grown.schedule, topology) or Fraction(0)


class _Pair(NamedTuple):
    """What reduces a share of the buffer to a root, and what takes it from there; both as trees out of the root."""

    root: int
    weight: Fraction
    up: Tree | None
    down: Tree | None


def _grown(
    view: _View, collective: str, members: int, sources: tuple[str, ...], destinations: tuple[str, ...]
) -> Forest:
    wiring = view.topology
    inside = {node: k for k, node in enumerate(view.names[name] for name in wiring.devices)}
    links = {(link.src, link.dst): link.bandwidth for link in wiring.links}
    back = {(dst, src): bandwidth for (src, dst), bandwidth in links.items()}
    each = {k: Fraction(1) for k in range(members)}
    pairs: list[_Pair]
    if len(inside) == 1:
        pairs, k = [_Pair(0, Fraction(1), None, None)], Fraction(1)
    elif collective in ("broadcast", "all_gather") or (collective == "all_reduce" and len(sources) == 1):
        trees, k = _trees(wiring, links, each if collective == "all_gather" else {inside[sources[0]]: Fraction(1)})
        pairs = [_Pair(tree.root, Fraction(tree.weight), None, tree) for tree in trees]
    elif collective in ("reduce", "reduce_scatter") or len(destinations) == 1:
        whole = each if collective == "reduce_scatter" else {inside[destinations[0]]: Fraction(1)}
        trees, k = _trees(wiring, back, whole)
        pairs = [_Pair(tree.root, Fraction(tree.weight), _turned(tree), None) for tree in trees]
    else:
        pairs, k = _both(wiring, links)
    schedule = _schedule(view, collective, sources, destinations, pairs)
    deepest = max((_depth(tree) for pair in pairs for tree in (pair.up, pair.down) if tree), default=0)
    return Forest(schedule, k, len(pairs), deepest)


def _both(wiring: Topology, links: dict[Pair, Fraction]) -> tuple[list[_Pair], Fraction]:
    """Plan an all-reduce: in and out of the same roots."""
    each = {k: Fraction(1) for k in range(len(wiring.devices))}
    found = solved(wiring)
    if wiring.symmetric:
        whole = Fraction(len(each))
        _, ratio = densest(wiring, {device: Fraction(1) for device in wiring.devices}, outward=True)
        if whole / ratio / 2 == found.rate:  # a reduce-scatter, then an all-gather on the ways back: every root alike
            trees, k = _trees(wiring, links, each)
        else:
            trees, k = _trees(wiring, found.down, _numbered(wiring, found.roots))
        return [_Pair(tree.root, Fraction(tree.weight), _turned(tree), tree) for tree in trees], k
    roots = _numbered(wiring, found.roots)
    down, k = _trees(wiring, found.down, roots)
    up, other = _trees(wiring, {(dst, src): used for (src, dst), used in found.up.items()}, roots)
    pairs = []
    for root in roots:
        pairs += _overlaid(
            root, [_turned(tree) for tree in up if tree.root == root], [t for t in down if t.root == root]
        )
    return pairs, max(k, other)


def _numbered(wiring: Topology, roots: Mapping[str, Fraction]) -> dict[int, Fraction]:
    return {k: roots[device] for k, device in enumerate(wiring.devices) if roots[device]}


def _overlaid(root: int, ups: list[Tree], downs: list[Tree]) -> list[_Pair]:
    """Lay a root's trees in and its trees out over each other, share by share."""
    whole_up, whole_down = sum(tree.weight for tree in ups), sum(tree.weight for tree in downs)
    pairs, i, j = [], 0, 0
    left_up, left_down = Fraction(ups[0].weight, whole_up), Fraction(downs[0].weight, whole_down)
    while i < len(ups):
        part = min(left_up, left_down)
        pairs.append(_Pair(root, part * whole_down, ups[i], downs[j]))
        left_up, left_down = left_up - part, left_down - part
        if not left_up:
            i += 1
            left_up = Fraction(ups[i].weight, whole_up) if i < len(ups) else Fraction(0)
        if not left_down:
            j += 1
            left_down = Fraction(downs[j].weight, whole_down) if j < len(downs) else Fraction(0)
    return pairs


def _trees(
    wiring: Topology, used: Mapping[Pair, Fraction], weights: Mapping[int, Fraction]
) -> tuple[list[Tree], Fraction]:
    """Return trees out of roots of the given weights, that together use no more of each link, and k."""
    number = {node: k for k, node in enumerate(wiring.nodes)}
    n, everyone = len(wiring.devices), range(len(wiring.devices))
    arcs = {(number[src], number[dst]): bandwidth for (src, dst), bandwidth in used.items() if bandwidth}
    groups = [0] * n
    for k, island in enumerate(wiring.islands):
        for device in island:
            groups[number[device]] = k
    switches = range(n, len(number))

    def grown(unit: Fraction, roots: dict[int, int]) -> list[Tree] | None:
        ways = Ways()
        for arc, bandwidth in arcs.items():
            ways.add(arc, (), int(bandwidth / unit))
        ways = without_switches(ways, switches, roots, everyone, groups, len(number))
        if not reaches(ways.capacities(), roots, everyone, n):
            return None
        return _with_ways(pack(ways.capacities(), roots, n), ways)

    whole = sum(weights.values(), Fraction(0))
    rate = _rate_of(wiring, used, weights) / whole  # of a root of weight 1
    unit = _common([*(rate * weight for weight in weights.values()), *arcs.values()])
    exact = {root: int(rate * weight / unit) for root, weight in weights.items()}
    trees = grown(unit, exact)
    if trees is not None and len(trees) <= MOST_TREES * max(len(weights), 1):
        return trees, Fraction(sum(exact.values()), len(exact))
    least = min(weights.values())
    for k in range(1, MOST_TREES + 1):
        roots = {root: max(1, int(k * weight / least)) for root, weight in weights.items()}
        if sum(roots.values()) > MOST_TREES * len(roots):
            break
        coarse = _largest_unit(arcs, roots, rate * whole, everyone, len(number))
        if coarse * sum(roots.values()) >= (1 - TOLERANCE) * rate * whole:
            few = grown(coarse, roots)
            if few is not None and (trees is None or len(few) < len(trees)):
                return few, Fraction(sum(roots.values()), len(roots))
    if trees is None:
        raise PlanError(
            message("no forest was found: a switch takes in another bandwidth than it gives out.", repr(wiring))
        )
    return trees, Fraction(sum(exact.values()), len(exact))


def _rate_of(wiring: Topology, used: Mapping[Pair, Fraction], weights: Mapping[int, Fraction]) -> Fraction:
    """Return the rate of all roots together that the used bandwidths allow."""
    links = tuple(Link(src, dst, bandwidth) for (src, dst), bandwidth in used.items() if bandwidth)
    shares = {wiring.devices[k]: weight for k, weight in weights.items()}
    _, ratio = densest(Topology(wiring.devices, links, wiring.switches), shares, outward=True)
    return sum(weights.values(), Fraction(0)) / ratio


def _common(values: Iterable[Fraction]) -> Fraction:
    """Return the greatest number of which all are whole multiples."""
    listed = [value for value in values if value]
    scale = lcm(*(value.denominator for value in listed))
    return Fraction(gcd(*(int(value * scale) for value in listed)), scale)


def _largest_unit(
    arcs: Mapping[Arc, Fraction], roots: dict[int, int], rate: Fraction, sinks: Sequence[int], n: int
) -> Fraction:
    """Return the largest unit such that capacities rounded down to whole units carry all the roots' trees, or 0.

    Only a unit at which some capacity is a whole multiple can be the largest; those that lose too much are left out.
    """
    most = rate / sum(roots.values())
    units = {
        bandwidth / parts
        for bandwidth in set(arcs.values())
        for parts in range(-(-bandwidth // most), int(bandwidth / (most * (1 - TOLERANCE))) + 1)
    }
    tried = sorted(units, reverse=True)
    low, high = 0, len(tried)
    while low < high:
        middle = (low + high) // 2
        capacities = {arc: int(bandwidth / tried[middle]) for arc, bandwidth in arcs.items()}
        if reaches(capacities, roots, sinks, n):
            high = middle
        else:
            low = middle + 1
    return tried[low] if low < len(tried) else Fraction(0)


def _with_ways(batches: Sequence[tuple[int, int, list[Arc]]], ways: Ways) -> list[Tree]:
    """Give each tree its way through the switches; a batch that needs two ways between two nodes is parted."""
    trees: dict[tuple[int, tuple[tuple[int, int, Through], ...]], int] = {}
    for root, weight, arcs in batches:
        left = weight
        while left:
            part, parents = left, []
            for src, dst in arcs:
                here = ways[src, dst]
                # A way with room for all of them, else the widest; the first of those.
                through = max(here, key=lambda way: min(here[way], left))
                part = min(part, here[through])
                parents.append((dst, src, through))
            for dst, src, through in parents:
                ways[src, dst][through] -= part
                if not ways[src, dst][through]:
                    del ways[src, dst][through]
            key = (root, tuple(parents))
            trees[key] = trees.get(key, 0) + part
            left -= part
    return [Tree(root, weight, parents) for (root, parents), weight in trees.items()]


def _turned(tree: Tree) -> Tree:
    """Return a tree whose ways between child and parent are listed as the child takes them."""
    return tree._replace(parents=tuple((node, parent, through[::-1]) for node, parent, through in tree.parents))


def _depth(tree: Tree) -> int:
    depth = {tree.root: 0}
    for node, parent, _ in tree.parents:
        depth[node] = depth[parent] + 1
    return max(depth.values())


def _schedule(
    view: _View,
    collective: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    pairs: list[_Pair],
) -> Schedule:
    """Write trees down as rounds: a device combines as soon as all its children have, and copies on at once."""
    names = view.names
    devices = tuple(names[name] for name in view.topology.devices)
    number = {device: k for k, device in enumerate(devices)}
    givers, takers = [number[s] for s in sources], [number[d] for d in destinations]
    nodes = [names[name] for name in view.topology.nodes]
    whole = sum((pair.weight for pair in pairs), Fraction(0))
    if collective in ("all_gather", "reduce_scatter"):  # each device's part stands at its place
        pairs = sorted(pairs, key=lambda pair: pair.root)
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    chunks, routes = [], []
    for c, pair in enumerate(pairs):
        here = [pair.root]
        gives = here if collective == "all_gather" else givers
        takes = here if collective == "reduce_scatter" else takers
        chunks.append(Chunk(pair.weight / whole, tuple(gives), tuple(takes)))
        ready = dict.fromkeys(gives, 0)
        if pair.up is not None:
            children: defaultdict[int, list[int]] = defaultdict(list)
            for node, parent, _ in reversed(pair.up.parents):  # leaves first
                below = [child for child in children[node] if child in ready]
                if below:
                    own = [node] if node in ready else []
                    start = max(ready[child] for child in below)
                    rounds[start].append(Step(c, node, tuple(sorted(below + own))))
                    ready[node] = start + 1
                children[parent].append(node)
            below = [child for child in children[pair.root] if child in ready]
            if below:
                own = here if pair.root in ready else []
                start = max(ready[child] for child in below)
                rounds[start].append(Step(c, pair.root, tuple(sorted(below + own))))
                ready[pair.root] = start + 1
            routes += [Route(c, node, parent, through) for node, parent, through in pair.up.parents if through]
        if pair.down is not None:
            wanted = set(takes)
            for node, parent, _ in reversed(pair.down.parents):
                if node in wanted:
                    wanted.add(parent)
            at = {pair.root: ready[pair.root]}
            for node, parent, through in pair.down.parents:
                if node in wanted:
                    rounds[at[parent]].append(Step(c, node, (parent,)))
                    at[node] = at[parent] + 1
                    if through:
                        routes.append(Route(c, parent, node, through))
    return Schedule(
        collective,
        "forest",
        devices,
        tuple(chunks),
        tuple(tuple(rounds[r]) for r in sorted(rounds)),
        routes=tuple(Route(c, src, dst, tuple(nodes[k] for k in through)) for c, src, dst, through in routes),
    )
