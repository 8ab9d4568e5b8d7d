"""Routes between the nodes of a topology, and the groups of devices that its fastest links join.

Input: nodes and links. Output: the route to every node that can be reached from one; groups of devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from .links import Link


def routes_from(
    src: str,
    nodes: Sequence[str],
    devices: int,
    order: Mapping[str, int],
    neighbours: Mapping[str, Iterable[str]],
    speeds: Mapping[tuple[str, str], int],
) -> dict[str, tuple[str, ...]]:
    """Return the route from ``src`` to each node that can be reached: see ``Topology.route``.

    Args:
      src: where the routes start.
      nodes: devices, then switches.
      devices: the number of devices among the nodes.
      order: the position of each node.
      neighbours: for each node the nodes to which it has a link.
      speeds: bandwidths in any unit, by the ends of the link.
    """
    routes: dict[str, tuple[str, ...]] = {}
    # Devices on the route, links, minus the least bandwidth, the positions of the nodes: the least entry is the best.
    queue: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, -max(speeds.values(), default=0), (order[src],))]
    while queue:
        passed, hops, narrow, numbers = heapq.heappop(queue)
        here = nodes[numbers[-1]]
        if here in routes:
            continue
        routes[here] = tuple(nodes[number] for number in numbers)
        passed += here != src and numbers[-1] < devices
        for node in neighbours.get(here, ()):
            if node not in routes:
                entry = (passed, hops + 1, max(narrow, -speeds[here, node]), (*numbers, order[node]))
                heapq.heappush(queue, entry)
    return routes


def islands(devices: Iterable[str], nodes: Iterable[str], links: Sequence[Link]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of devices that paths of the fastest links join: see ``Topology.islands``."""
    fastest = max((link.bandwidth for link in links), default=Fraction(0))
    leader = {node: node for node in nodes}

    def find(node: str) -> str:
        while leader[node] != node:
            node = leader[node]
        return node

    for link in links:
        if link.bandwidth == fastest:
            leader[find(link.dst)] = find(link.src)
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(find(device), []).append(device)
    return tuple(tuple(group) for group in groups.values())
