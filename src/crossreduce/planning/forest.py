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
from ..schedule import Schedule, fluid_rate
from ..topology import Link, Topology
from .arborescences import Arc, Ways, pack, reaches, without_switches
from .bounds import bound, solved
from .cuts import densest
from .joint import balanced
from .treewise import Share, Through, Tree, depth, treewise, turned
from .views import View, reached, require_ways, view

MOST_TREES: Final = 4
"""Trees a root, on average, up to which a plan keeps to the bound exactly; where that takes more, fewer trees are
tried, within ``TOLERANCE`` of the bound."""

TOLERANCE: Final = Fraction(2, 100)
"""What a plan of few trees may lose. NCCL's own search accepts more: its equal-speed lists step by 5 to 25 %."""

_MOST_KINDS: Final = 3  # widths of helpers that are tried; each takes a plan of its own

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
    require_ways(topology, sources, destinations, collective)
    if len(sources) > 1 and len(destinations) > 1:  # trees lead in and out of any of them
        require_ways(topology, members, members, f"{collective} by trees")
    for helpers in _helpers(topology, members) if collective == "all_reduce" else [()]:
        grown = _grown(view(topology, members, helpers), collective, len(members), sources, destinations)
        if best is None or _rate(grown, topology) > _rate(best, topology):
            best = grown
        if collective == "all_reduce" and set(sources) == set(destinations):
            limit = bound(topology, collective, devices=members).algbw
            if limit is not None and _rate(best, topology) >= limit:
                break
    assert best is not None
    return best


def _helpers(topology: Topology, members: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return sets of nodes to reduce on beside the members: none, the widest ones, these and the next, and so on.

    Such a node, a switch that reduces or a device that takes no part, then is in all trees. That pays for the wide
    switch of a box and not for a thin one between boxes.
    """
    widths: defaultdict[Fraction, list[str]] = defaultdict(list)
    able = [switch.name for switch in topology.switches if switch.reduces]
    joined = reached(topology, members[0]) & reached(topology.reversed(), members[0])
    for node in [*able, *(device for device in topology.devices if device not in members)]:
        if node not in joined:
            continue
        widths[sum((link.bandwidth for link in topology.out_links(node)), Fraction(0))].append(node)
    sets: list[tuple[str, ...]] = [()]
    for width in sorted(widths, reverse=True)[:_MOST_KINDS]:
        sets.append((*sets[-1], *widths[width]))
    return sets


def _rate(grown: Forest, topology: Topology) -> Fraction:
    return fluid_rate(grown.schedule, topology) or Fraction(0)


def _grown(
    seen: View, collective: str, members: int, sources: tuple[str, ...], destinations: tuple[str, ...]
) -> Forest:
    wiring = seen.topology
    inside = {node: k for k, node in enumerate(seen.names[name] for name in wiring.devices)}
    links = {(link.src, link.dst): link.bandwidth for link in wiring.links}
    back = {(dst, src): bandwidth for (src, dst), bandwidth in links.items()}
    each = {k: Fraction(1) for k in range(members)}
    pairs: list[Share]
    if len(inside) == 1:
        pairs, k = [Share(0, Fraction(1), None, None)], Fraction(1)
    elif collective in ("broadcast", "all_gather") or (collective == "all_reduce" and len(sources) == 1):
        trees, k = _trees(wiring, links, each if collective == "all_gather" else {inside[sources[0]]: Fraction(1)})
        pairs = [Share(tree.root, Fraction(tree.weight), None, tree) for tree in trees]
    elif collective in ("reduce", "reduce_scatter") or len(destinations) == 1:
        whole = each if collective == "reduce_scatter" else {inside[destinations[0]]: Fraction(1)}
        trees, k = _trees(wiring, back, whole)
        pairs = [Share(tree.root, Fraction(tree.weight), turned(tree), None) for tree in trees]
    else:
        pairs, k = _both(wiring, links)
    places = [seen.names[name] for name in wiring.nodes]
    schedule = treewise("forest", collective, places, len(inside), sources, destinations, pairs)
    deepest = max((depth(tree) for pair in pairs for tree in (pair.up, pair.down) if tree), default=0)
    return Forest(schedule, k, len(pairs), deepest)


def _both(wiring: Topology, links: dict[Pair, Fraction]) -> tuple[list[Share], Fraction]:
    """Plan an all-reduce: in and out of the same roots."""
    found = solved(wiring)
    if found.reached <= 0:  # no exact solution: half of every link for each way
        half = {pair: bandwidth / 2 for pair, bandwidth in links.items()}
        found = found._replace(roots=dict.fromkeys(wiring.devices, Fraction(1)), down=half, up=half)
    roots = _numbered(wiring, found.roots)
    if wiring.symmetric:  # a reduction takes its broadcast's ways back
        alike = all(used * 2 == links[pair] for pair, used in found.down.items())
        trees, k = _trees(wiring, links if alike else found.down, roots)
        return [Share(tree.root, Fraction(tree.weight), turned(tree), tree) for tree in trees], k
    down, k = _trees(wiring, found.down, roots)
    up, other = _trees(wiring, {(dst, src): used for (src, dst), used in found.up.items()}, roots)
    pairs = []
    for root in roots:
        pairs += _overlaid(
            root, [turned(tree) for tree in up if tree.root == root], [t for t in down if t.root == root]
        )
    return pairs, max(k, other)


def _numbered(wiring: Topology, roots: Mapping[str, Fraction]) -> dict[int, Fraction]:
    return {k: roots[device] for k, device in enumerate(wiring.devices) if roots[device]}


def _overlaid(root: int, ups: list[Tree], downs: list[Tree]) -> list[Share]:
    """Lay a root's trees in and its trees out over each other, share by share."""
    whole_up, whole_down = sum(tree.weight for tree in ups), sum(tree.weight for tree in downs)
    pairs, i, j = [], 0, 0
    left_up, left_down = Fraction(ups[0].weight, whole_up), Fraction(downs[0].weight, whole_down)
    while i < len(ups):
        part = min(left_up, left_down)
        pairs.append(Share(root, part * whole_down, ups[i], downs[j]))
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
    for switch in wiring.switches:
        if sum(b if s == switch.name else -b for (s, d), b in used.items() if switch.name in (s, d)):
            used = balanced(_using(wiring, used), weights)  # wider on one side: what it cannot pass on is no use
            break
    arcs = {(number[src], number[dst]): bandwidth for (src, dst), bandwidth in used.items() if bandwidth}
    groups = [0] * n
    for k, island in enumerate(wiring.islands):
        for device in island:
            groups[number[device]] = k
    switches = range(n, len(number))

    def grown(unit: Fraction, roots: dict[int, int], most: int | None) -> list[Tree] | None:
        ways = Ways()
        for arc, bandwidth in arcs.items():
            ways.add(arc, (), int(bandwidth / unit))
        ways = without_switches(ways, switches, roots, everyone, groups, len(number))
        if not reaches(ways.capacities(), roots, everyone, n):
            return None
        packed = pack(ways.capacities(), roots, n, most)
        return None if packed is None else _with_ways(packed, ways)

    whole = sum(weights.values(), Fraction(0))
    rate = _rate_of(wiring, used, weights) / whole  # of a root of weight 1
    unit = _common([*(rate * weight for weight in weights.values()), *arcs.values()])
    exact = {root: int(rate * weight / unit) for root, weight in weights.items()}
    trees = grown(unit, exact, MOST_TREES * len(exact))
    if trees is not None and len(trees) <= MOST_TREES * len(exact):
        return trees, Fraction(sum(exact.values()), len(exact))
    least = min(weights.values())
    for k in range(1, MOST_TREES + 1):
        roots = {root: max(1, int(k * weight / least)) for root, weight in weights.items()}
        if sum(roots.values()) > MOST_TREES * len(roots):
            break
        coarse = _largest_unit(arcs, roots, rate * whole, everyone, len(number))
        if coarse * sum(roots.values()) >= (1 - TOLERANCE) * rate * whole:
            few = grown(coarse, roots, None)
            if few is not None:
                return few, Fraction(sum(roots.values()), len(roots))
    trees = trees or grown(unit, exact, None)
    if trees is None:
        raise PlanError(message("no forest was found in whole numbers.", repr(wiring), 'algorithm="hierarchical_copy"'))
    return trees, Fraction(sum(exact.values()), len(exact))


def _rate_of(wiring: Topology, used: Mapping[Pair, Fraction], weights: Mapping[int, Fraction]) -> Fraction:
    """Return the rate of all roots together that the used bandwidths allow."""
    shares = {wiring.devices[k]: weight for k, weight in weights.items()}
    _, ratio = densest(_using(wiring, used), shares, outward=True)
    return sum(weights.values(), Fraction(0)) / ratio


def _using(wiring: Topology, used: Mapping[Pair, Fraction]) -> Topology:
    """Return a topology with other bandwidths."""
    links = tuple(Link(src, dst, bandwidth) for (src, dst), bandwidth in used.items() if bandwidth)
    return Topology(wiring.devices, links, wiring.switches)


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


def _straight(src: int, through: Through, dst: int) -> Through:
    """Return a way without its loops, which splitting nodes away one after another can make."""
    nodes = [src]
    for node in (*through, dst):
        if node in nodes:
            del nodes[nodes.index(node) + 1 :]
        else:
            nodes.append(node)
    return tuple(nodes[1:-1])


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
            key = (root, tuple((dst, src, _straight(src, through, dst)) for dst, src, through in parents))
            trees[key] = trees.get(key, 0) + part
            left -= part
    return [Tree(root, weight, parents) for (root, parents), weight in trees.items()]
