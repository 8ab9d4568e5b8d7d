"""Routes between the nodes of a topology, and groups of nodes that links connect."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from .links import Link

T = TypeVar("T")


class RoutesFrom:
    """The routes from one node, as ``Topology.route`` defines them. They are computed on demand."""

    def __init__(
        self,
        src: str,
        nodes: Sequence[str],
        devices: int,
        neighbours: Mapping[str, Iterable[Link]],
        order: Mapping[str, int],
        speeds: Mapping[tuple[str, str], int],
    ) -> None:
        """Prepare the search from ``src``. The first ``devices`` of ``nodes`` are devices, and the others switches.

        By node, ``neighbours`` has the links out of it, and ``order`` its position in ``nodes``.
        """
        self.src, self.nodes, self.devices = src, nodes, devices
        self.neighbours, self.order, self.speeds = neighbours, order, speeds
        self.routes: dict[str, tuple[str, ...]] = {}
        self.lock = threading.Lock()  # threads that plan on one topology search the same routes
        # Entries: the number of devices that the route passes, the number of its links, its least bandwidth with the
        # sign reversed, and the positions of its nodes. The least entry is the best route.
        start = (0, 0, -max(speeds.values(), default=0), (order[src],))
        self.queue: list[tuple[int, int, int, tuple[int, ...]]] = [start]

    def to(self, dst: str) -> tuple[str, ...] | None:
        """Return the nodes of the route to a node, or ``None`` if it is unreachable."""
        if dst not in self.routes:
            with self.lock:
                self._search(dst)
        return self.routes.get(dst)

    def _search(self, dst: str) -> None:
        """Find routes in the order of their entries until one leads to ``dst``. The caller holds the lock."""
        routes, nodes, order, speeds, queue = self.routes, self.nodes, self.order, self.speeds, self.queue
        while queue and dst not in routes:
            passed, hops, negative_speed, numbers = heapq.heappop(queue)
            here = nodes[numbers[-1]]
            if here in routes:
                continue
            routes[here] = tuple(nodes[number] for number in numbers)
            passed += here != self.src and numbers[-1] < self.devices
            for link in self.neighbours.get(here, ()):
                node = link.dst
                if node not in routes:
                    entry = (passed, hops + 1, max(negative_speed, -speeds[here, node]), (*numbers, order[node]))
                    heapq.heappush(queue, entry)


def groups(items: Iterable[T], pairs: Iterable[tuple[T, T]]) -> list[list[T]]:
    """Return the groups of items that pairs connect, directly or through other items. Items keep their order.

    >>> groups("abcd", [("d", "b")])
    [['a'], ['b', 'd'], ['c']]
    """
    leader = {item: item for item in items}  # another item of the group, or for one item of each group itself

    def find(item: T) -> T:
        while leader[item] != item:
            item = leader[item]
        return item

    for a, b in pairs:
        leader[find(b)] = find(a)
    members: dict[T, list[T]] = {}
    for item in leader:
        members.setdefault(find(item), []).append(item)
    return list(members.values())


def is_connected(devices: Sequence[str], links: Sequence[Link]) -> bool:
    """Return whether links, used in both directions, connect all devices.

    >>> a_b = Link("cpu:0", "cpu:1", 25)
    >>> is_connected(["cpu:0", "cpu:1"], [a_b]), is_connected(["cpu:0", "cpu:1", "cpu:2"], [a_b])
    (True, False)
    """
    pairs = [(link.src, link.dst) for link in links]
    nodes = [*devices, *(node for pair in pairs for node in pair)]
    return set(devices) <= set(groups(nodes, pairs)[0])
