"""``hierarchical_copy`` on a topology: the hierarchy is read from the wiring.

In: a topology, who gives and takes.  Out: schedules with one tree a pack, along which everything is reduced to the
pack's root and copied back the same way. There are several ways to read a hierarchy, each best somewhere; which one
depends on the buffer's size, so all are returned.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Final

from ..schedule import Schedule
from ..topology import Topology
from .planners import hierarchical_copy, one_device
from .treewise import Share, Tree, treewise

MOST_DEVICES: Final = 128
"""Devices up to which trees are grown edge by edge, which looks at every two of them; beyond, the islands must do."""

MOST_EDGES: Final = 1024
"""Devices times packs up to which that is done."""

Way = tuple[str, ...]


def hierarchies(
    topology: Topology,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    packs: int,
    first: int,
    root: str | None,
) -> list[Schedule]:
    """Return the schedules of all readings of a topology's hierarchy.

    - one level: every device straight to the root, as ``one_device``, so that no reading can be worse than that;
    - islands: the groups that the fastest links join reduce to one device each, and these to the root, as on a
      DGX-1; and TensorFlow's two halves as groups;
    - wide: the tree out of the root that always takes the fastest link next, so all of an island comes before the
      links between islands;
    - near: the tree of the fewest hops to the root, and of those the fastest links;
    - mindful: as wide, but a link that the tree uses already counts as that much slower, which makes a chain where
      one switch joins all.

    Args:
      first: where the packs' roots start to rotate over the devices that give and take.
      root: of all packs; ``None``: they rotate. One that neither gives nor takes leaves but one level.
    """
    members = tuple(dict.fromkeys([*sources, *destinations, *([] if root is None else [root])]))
    found = [one_device(members, sources, destinations, packs=packs, first=first, root=root)]
    if root is None:
        found.append(hierarchical_copy(members, sources, destinations, packs=packs, first=first))
        groups = [[device for device in island if device in members] for island in topology.islands]
        groups = [group for group in groups if group]
        if len(groups) > 1:
            found.append(hierarchical_copy(members, sources, destinations, packs=packs, first=first, groups=groups))
    if root is not None and root not in sources and root not in destinations:
        return [replace(schedule, algorithm="hierarchical_copy") for schedule in found]
    roots = [s for s in sources if s in destinations] or list(sources)
    chosen = [members.index(root or roots[(first + pack) % len(roots)]) for pack in range(packs)]
    ways = _ways(topology, members) if len(members) <= MOST_DEVICES and len(members) * packs <= MOST_EDGES else {}
    places = (*members, *(node for node in topology.nodes if node not in members))
    for kind in ("wide", "near", "mindful") if ways else ():
        trees = {start: _tree(topology, members, places, ways, start, kind) for start in dict.fromkeys(chosen)}
        shares = [Share(start, Fraction(1), *both) for start in chosen if (both := trees[start])]
        if len(shares) == packs:
            n = len(members)
            found.append(treewise("hierarchical_copy", found[0].collective, places, n, sources, destinations, shares))
    return [replace(schedule, algorithm="hierarchical_copy") for schedule in found]


def centre(topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]) -> str | None:
    """Return the first of the devices that give and take whose furthest others are nearest, in links."""
    members = set(sources) | set(destinations)
    best: tuple[int, int, str] | None = None
    for k, device in enumerate(s for s in sources if s in destinations and len(members) <= MOST_DEVICES):
        ways = [(topology.route(device, other), topology.route(other, device)) for other in members]
        if all(there and back for there, back in ways):
            far = max(len(there) + len(back) for there, back in ways if there and back)
            best = min(best or (far, k, device), (far, k, device))
    return best and best[2]


def _ways(topology: Topology, members: tuple[str, ...]) -> dict[str, dict[str, tuple[Way, Way]]]:
    """Return the ways there and back between members that pass no other member."""
    inside = set(members)
    ways: dict[str, dict[str, tuple[Way, Way]]] = {member: {} for member in members}
    for a in members:
        for b in members:
            there, back = topology.route(a, b), topology.route(b, a)
            if a != b and there and back and not inside & {*there[1:-1], *back[1:-1]}:
                ways[a][b] = there, back
    return ways


def _tree(
    topology: Topology,
    members: tuple[str, ...],
    places: tuple[str, ...],
    ways: dict[str, dict[str, tuple[Way, Way]]],
    start: int,
    kind: str,
) -> tuple[Tree, Tree] | None:
    """Grow a tree into and out of a root, the best edge first; ``None`` where it cannot reach all members."""
    width = {(link.src, link.dst): link.bandwidth for link in topology.links}
    load: defaultdict[tuple[str, str], int] = defaultdict(int)
    number = {place: k for k, place in enumerate(places)}
    depth = {members[start]: 0}

    def key(a: str, b: str) -> tuple[Fraction, Fraction]:
        there, back = ways[a][b]
        used = load if kind == "mindful" else {}
        narrow = min(width[pair] / (1 + used.get(pair, 0)) for way in (there, back) for pair in pairwise(way))
        return (Fraction(depth[a]), -narrow) if kind == "near" else (-narrow, Fraction(depth[a]))

    queue: list[tuple[tuple[Fraction, Fraction], int, int]] = []

    def offer(a: str) -> None:
        for b in ways[a]:
            if b not in depth:
                heapq.heappush(queue, (key(a, b), number[a], number[b]))

    offer(members[start])
    ups, downs = [], []
    while queue:
        best, i, j = heapq.heappop(queue)
        a, b = members[i], members[j]
        if b in depth:
            continue
        now = key(a, b)
        if now > best:  # the tree has used this way since
            heapq.heappush(queue, (now, i, j))
            continue
        there, back = ways[a][b]
        for way in (there, back):
            for pair in pairwise(way):
                load[pair] += 1
        depth[b] = depth[a] + 1
        downs.append((j, i, tuple(number[node] for node in there[1:-1])))
        ups.append((j, i, tuple(number[node] for node in back[1:-1])))
        offer(b)
    return (Tree(start, 1, tuple(ups)), Tree(start, 1, tuple(downs))) if len(depth) == len(members) else None
