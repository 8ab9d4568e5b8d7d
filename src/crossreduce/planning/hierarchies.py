"""Schedules by the algorithm ``hierarchical_copy`` for a topology.

Input: a topology and a request. Output: schedules with one tree per pack. Data is reduced along the tree into the
pack's root, and the result is copied along the same tree out of the root.
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
from .algorithms.equal_links import hierarchical_copy_schedule, one_device_schedule
from .optimal.trees.tree_schedule import Tree, TreeShare, trees_to_schedule
from .requests import Request

MOST_DEVICES: Final = 128  # the most devices for which trees are built edge by edge, since that compares all pairs
MOST_NODES: Final = 1024  # the most nodes of all trees together: the product of devices and packs
KINDS: Final = ("widest", "shortest", "load_aware")


class _Edge(NamedTuple):
    """The routes from one member to another and back."""

    links: tuple[tuple[str, str], ...]  # of both routes
    speed: int  # of the slowest of them, as in ``Topology.speeds``
    there: tuple[int, ...]  # the numbers of the nodes that the route passes
    back: tuple[int, ...]


def hierarchies(topology: Topology, request: Request) -> list[Schedule]:
    """Return candidate schedules of "hierarchical_copy" for a request. Which one is the fastest depends on its bytes.

    The groups are: all devices (``one_device``); two halves, as in TensorFlow; or the islands of the topology, such as
    the hosts of a cluster. The other candidates are spanning trees of the links: see ``tree_schedules``. If the request
    has a root, only ``one_device`` and trees are tried, and no trees if the root is neither a source nor a destination.
    """
    root = request.root
    schedules = [one_device_schedule(request)]
    if root is None:
        schedules.append(hierarchical_copy_schedule(request))
        position = {device: k for k, device in enumerate(request.members)}
        groups = [[position[device] for device in island if device in position] for island in topology.islands]
        groups = [group for group in groups if group]
        if len(groups) > 1:
            schedules.append(hierarchical_copy_schedule(request, groups))
    if root is None or root in request.sources or root in request.destinations:
        schedules += tree_schedules(topology, request)
    return schedules


def tree_schedules(topology: Topology, request: Request) -> list[Schedule]:
    """Return a schedule with one tree per pack for each kind of tree, or [] above ``MOST_DEVICES`` or ``MOST_NODES``.

    - widest: the fastest link that leads out of the tree is added next, so a tree contains all devices of an island
      before it contains a link to another island;
    - shortest: each device has the fewest hops to the root; of equal numbers of hops, the fastest link is added first;
    - load_aware: like widest, but the speed of a link that the tree already uses k times is divided by k + 1. If one
      switch joins all devices by equal links, this is a chain with the root in the middle.
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
    schedules = []
    for kind in KINDS:
        trees = {start: _spanning_tree(topology, edges, start, kind) for start in dict.fromkeys(starts)}
        shares = [TreeShare(start, Fraction(1), *both) for start in starts if (both := trees[start])]
        if len(shares) == packs:
            schedules.append(trees_to_schedule("hierarchical_copy", request, nodes, len(members), shares))
    return schedules


def centre(topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]) -> str | None:
    """Return the central device: its longest route to another device and back has the fewest links.

    It is a source and a destination, and the first one of several equal ones. Return ``None`` if there is no such
    device, or if there are more than ``MOST_DEVICES`` devices.
    """
    members = {*sources, *destinations}
    if len(members) > MOST_DEVICES:
        return None
    best: tuple[int, int, str] | None = None
    needed = frozenset(destinations)
    for k, device in enumerate(s for s in sources if s in needed):
        routes = [(topology.route(device, other), topology.route(other, device)) for other in members]
        if all(there and back for there, back in routes):
            longest = max(len(there) + len(back) for there, back in routes if there and back)
            best = min(best or (longest, k, device), (longest, k, device))
    return best and best[2]


def _edges(topology: Topology, members: tuple[str, ...], number: dict[str, int]) -> list[dict[int, _Edge]]:
    """Return the edges of each member, by the number of the other one. Their routes pass no third member."""
    inside = frozenset(members)
    routes = {
        (a, b): route
        for a in members
        for b in members
        if a != b and (route := topology.route(a, b)) and (len(route) == 2 or inside.isdisjoint(route[1:-1]))
    }
    edges: list[dict[int, _Edge]] = []
    for a in members:
        edges_of_a: dict[int, _Edge] = {}
        for k, b in enumerate(members):
            there, back = routes.get((a, b)), routes.get((b, a))
            if there is not None and back is not None:
                between = [tuple(number[node] for node in route[1:-1]) for route in (there, back)]
                links = *pairwise(there), *pairwise(back)
                edges_of_a[k] = _Edge(links, min([topology.speeds[pair] for pair in links]), *between)
        edges.append(edges_of_a)
    return edges


def _spanning_tree(
    topology: Topology, edges: list[dict[int, _Edge]], start: int, kind: str
) -> tuple[Tree, Tree] | None:
    """Return a tree into the root ``start`` and the same tree out of it, or ``None`` if no edges reach some members.

    The best edge out of the tree is added next; ``kind`` determines which edge is the best.
    """
    speeds, load_aware = topology.speeds, kind == "load_aware"
    # Speeds are multiplied by ``scale``: their division by 1 to len(edges) uses of a link then has no remainder.
    scale = lcm(*range(1, len(edges) + 1)) if load_aware else 1
    load: defaultdict[tuple[str, str], int] = defaultdict(int)  # how often the tree uses each link
    depth = {start: 0}

    def key(a: int, b: int) -> tuple[int, int]:  # the best edge has the least key
        edge = edges[a][b]
        speed = edge.speed
        if load_aware:
            speed = min([speeds[pair] * scale // (1 + load[pair]) for pair in edge.links])
        return (depth[a], -speed) if kind == "shortest" else (-speed, depth[a])

    queue: list[tuple[tuple[int, int], int, int]] = []  # a heap of edges: key, member of the tree, new member

    def queue_edges(a: int) -> None:
        for b in edges[a]:
            if b not in depth:
                heapq.heappush(queue, (key(a, b), a, b))

    queue_edges(start)
    into, out = [], []
    while queue:
        queued_key, a, b = heapq.heappop(queue)
        if b in depth:
            continue
        if load_aware and (now := key(a, b)) > queued_key:  # the tree has used these links since they were queued
            heapq.heappush(queue, (now, a, b))
            continue
        edge = edges[a][b]
        for pair in edge.links:
            load[pair] += 1
        depth[b] = depth[a] + 1
        out.append((b, a, edge.there))
        into.append((b, a, edge.back))
        queue_edges(b)
    return (Tree(start, 1, tuple(into)), Tree(start, 1, tuple(out))) if len(depth) == len(edges) else None
