"""Routes between the nodes of a topology, and groups of nodes that links join."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from .links import Link

T = TypeVar("T")


def routes_from(
    src: str,
    nodes: Sequence[str],
    devices: int,
    order: Mapping[str, int],
    neighbours: Mapping[str, Iterable[str]],
    speeds: Mapping[tuple[str, str], int],
) -> dict[str, tuple[str, ...]]:
    """Return the routes from ``src``, as ``Topology.route`` defines them; the first ``devices`` nodes are devices."""
    routes: dict[str, tuple[str, ...]] = {}
    # Entries: the number of devices that the route passes, the number of its links, its least bandwidth with the sign
    # reversed, and the positions of its nodes. The least entry is the best route.
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


def groups(items: Iterable[T], pairs: Iterable[tuple[T, T]]) -> list[list[T]]:
    """Return the groups of items that pairs join, directly or through others, in the order of the items.

    >>> groups("abcd", [("d", "b")])
    [['a'], ['b', 'd'], ['c']]
    """
    leader = {item: item for item in items}

    def find(item: T) -> T:
        while leader[item] != item:
            item = leader[item]
        return item

    for a, b in pairs:
        leader[find(b)] = find(a)
    found: dict[T, list[T]] = {}
    for item in leader:
        found.setdefault(find(item), []).append(item)
    return list(found.values())


def joined(devices: Sequence[str], links: Sequence[Link]) -> bool:
    """Return whether links, used in both directions, connect all devices.

    >>> a_b = Link("cpu:0", "cpu:1", 25)
    >>> joined(["cpu:0", "cpu:1"], [a_b]), joined(["cpu:0", "cpu:1", "cpu:2"], [a_b])
    (True, False)
    """
    pairs = [(link.src, link.dst) for link in links]
    nodes = [*devices, *(node for pair in pairs for node in pair)]
    return set(devices) <= set(groups(nodes, pairs)[0])
