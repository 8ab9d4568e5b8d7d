"""Schedules by the algorithm ``hierarchical_copy`` for a topology.

Input: a topology and a request. Output: schedules with one tree per pack, into the pack's root and back out of it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Final, NamedTuple

from ..schedule import Schedule
from ..topology import Topology
from .algorithms import hierarchical_copy_schedule, one_device_schedule
from .optimal.trees.tree_schedule import Tree, TreeShare, trees_to_schedule
from .requests import Request

MOST_DEVICES: Final = 128  # the most devices for which trees are grown edge by edge, since that compares all pairs
MOST_NODES: Final = 1024  # the most nodes of all trees together: the product of devices and packs
KINDS: Final = ("widest", "shortest", "load_aware")


class _Edge(NamedTuple):
    """The links from one member to another and back, and the numbers of the nodes that each route passes."""

    links: tuple[tuple[str, str], ...]
    there: tuple[int, ...]
    back: tuple[int, ...]


def hierarchies(topology: Topology, request: Request) -> list[Schedule]:
    """Return the schedules of a request by ``hierarchical_copy``; which is the fastest depends on the buffer's bytes.

    They are ``one_device``; two halves as groups, as in TensorFlow; the islands of the topology as groups, such as the
    hosts of a cluster; and spanning trees of the links: see ``tree_schedules``. If the request has a root, only the
    first and the last kind are possible, and only the first one if the root is neither a source nor a destination.
    """
    root = request.root
    found = [one_device_schedule(request)]
    if root is None:
        found.append(hierarchical_copy_schedule(request))
        inside = {device: k for k, device in enumerate(request.members)}
        groups = [[inside[device] for device in island if device in inside] for island in topology.islands]
        groups = [group for group in groups if group]
        if len(groups) > 1:
            found.append(hierarchical_copy_schedule(request, groups))
    if root is None or root in request.sources or root in request.destinations:
        found += tree_schedules(topology, request)
    return found


def tree_schedules(topology: Topology, request: Request) -> list[Schedule]:
    """Return schedules with one tree per pack, for each kind of tree; none above ``MOST_DEVICES`` or ``MOST_NODES``.

    - widest: the fastest link that leads out of the tree is added next, so the tree contains all of an island before a
      link between islands;
    - shortest: each device has the fewest hops to the root; of equal numbers of hops, the fastest link is added first;
    - load_aware: like widest, but a link that the tree already uses k times has its speed divided by k + 1. If one
      switch joins all devices by equal links, this is a chain with the root in its middle.
    """
    members, packs = request.members, request.packs
    if len(members) > MOST_DEVICES or len(members) * packs > MOST_NODES:
        return []
    destinations = frozenset(request.destinations)
    roots = [s for s in request.sources if s in destinations] or list(request.sources)
    number = {device: k for k, device in enumerate(members)}
    starts = [number[request.root or roots[(request.first + pack) % len(roots)]] for pack in range(packs)]
    inside = frozenset(members)
    nodes = (*members, *(node for node in topology.nodes if node not in inside))
    edges = _edges(topology, members, {node: k for k, node in enumerate(nodes)})
    found = []
    for kind in KINDS:
        trees = {start: _tree(topology, edges, start, kind) for start in dict.fromkeys(starts)}
        shares = [TreeShare(start, Fraction(1), *both) for start in starts if (both := trees[start])]
        if len(shares) == packs:
            found.append(trees_to_schedule("hierarchical_copy", request, nodes, len(members), shares))
    return found


def centre(topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]) -> str | None:
    """Return the source that is a destination and whose furthest other device is the fewest links away, there and back.

    The first of equal ones is returned; ``None``: no device qualifies, or there are more than ``MOST_DEVICES`` devices.
    """
    members = {*sources, *destinations}
    if len(members) > MOST_DEVICES:
        return None
    best: tuple[int, int, str] | None = None
    needed = frozenset(destinations)
    for k, device in enumerate(s for s in sources if s in needed):
        routes = [(topology.route(device, other), topology.route(other, device)) for other in members]
        if all(there and back for there, back in routes):
            far = max(len(there) + len(back) for there, back in routes if there and back)
            best = min(best or (far, k, device), (far, k, device))
    return best and best[2]


def _edges(topology: Topology, members: tuple[str, ...], number: dict[str, int]) -> list[dict[int, _Edge]]:
    """Return for each member the edges to others by routes, there and back, that pass no other member."""
    inside = frozenset(members)
    routes = {
        (a, b): route
        for a in members
        for b in members
        if a != b and (route := topology.route(a, b)) and (len(route) == 2 or inside.isdisjoint(route[1:-1]))
    }
    edges: list[dict[int, _Edge]] = []
    for a in members:
        found: dict[int, _Edge] = {}
        for k, b in enumerate(members):
            there, back = routes.get((a, b)), routes.get((b, a))
            if there is not None and back is not None:
                between = [tuple(number[node] for node in route[1:-1]) for route in (there, back)]
                found[k] = _Edge((*pairwise(there), *pairwise(back)), *between)
        edges.append(found)
    return edges


def _tree(topology: Topology, edges: list[dict[int, _Edge]], start: int, kind: str) -> tuple[Tree, Tree] | None:
    """Return a tree into a root and the same tree out of it, built best edge first; ``None``: it misses a member."""
    speeds, counts = topology.speeds, kind == "load_aware"
    # Speeds are multiplied by ``scale``: their division by 1 to len(edges) uses of a link then has no remainder.
    scale = lcm(*range(1, len(edges) + 1)) if counts else 1
    load: defaultdict[tuple[str, str], int] = defaultdict(int)
    depth = {start: 0}

    def key(a: int, b: int) -> tuple[int, int]:
        links = edges[a][b].links
        narrow = min(speeds[pair] * scale // (1 + load[pair]) if counts else speeds[pair] for pair in links)
        return (depth[a], -narrow) if kind == "shortest" else (-narrow, depth[a])

    queue: list[tuple[tuple[int, int], int, int]] = []

    def extend(a: int) -> None:
        for b in edges[a]:
            if b not in depth:
                heapq.heappush(queue, (key(a, b), a, b))

    extend(start)
    into, out = [], []
    while queue:
        best, a, b = heapq.heappop(queue)
        if b in depth:
            continue
        if counts and (now := key(a, b)) > best:  # the tree has used these links since they were queued
            heapq.heappush(queue, (now, a, b))
            continue
        edge = edges[a][b]
        for pair in edge.links:
            load[pair] += 1
        depth[b] = depth[a] + 1
        out.append((b, a, edge.there))
        into.append((b, a, edge.back))
        extend(b)
    return (Tree(start, 1, tuple(into)), Tree(start, 1, tuple(out))) if len(depth) == len(edges) else None
