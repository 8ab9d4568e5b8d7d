"""``Hops``: routes from one device to another that pass only switches. Each transfer of a step uses one hop.

Input: a topology from ``neutral_topology``. Output: arrays for the search for trees.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final

from ....topology import Topology

MOST_ROUTES: Final = 4  # between two devices; more would hardly help

Links = tuple[int, ...]  # the numbers of the links of a route


class Hops:
    """The hops of a topology: for each ordered pair of devices, some shortest routes through switches."""

    def __init__(self, topology: Topology) -> None:
        import numpy as np

        self.n = len(topology.devices)
        pairs = [(link.src, link.dst) for link in topology.links]
        self.links = len(pairs)
        self.fastest = max(link.bandwidth for link in topology.links)
        # Bandwidths as parts of the greatest one, so that the numbers in linear programs are near 1.
        self.bandwidth = np.array([float(link.bandwidth / self.fastest) for link in topology.links])
        routes = _routes(topology, {pair: k for k, pair in enumerate(pairs)})
        self.pairs = sorted(routes)  # (device, device) of each hop
        self.routes = [(pair, route) for pair in self.pairs for route in routes[pair]]
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.through = [tuple(number[pairs[k][1]] for k in route[:-1]) for _, route in self.routes]  # passed switches


@lru_cache(maxsize=256)
def hops(topology: Topology) -> Hops:
    """Return the hops of a topology. In the example, all hops pass the switch. A link between devices is also a hop.

    >>> hops(Topology.star(3, 450)).pairs
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    return Hops(topology)


def _routes(topology: Topology, number: dict[tuple[str, str], int]) -> dict[tuple[int, int], list[Links]]:
    """Return up to ``MOST_ROUTES`` shortest routes for each pair of devices that has a route through switches only."""
    at = {device: k for k, device in enumerate(topology.devices)}
    all_routes: dict[tuple[int, int], list[Links]] = {}
    for src, k in at.items():
        length = {src: 0}
        routes: dict[str, list[Links]] = {src: [()]}  # the shortest routes from src to each node
        queue = deque([src])
        while queue:
            node = queue.popleft()
            for link in topology.out_links(node):
                other = link.dst
                if other == src or length.setdefault(other, length[node] + 1) <= length[node]:
                    continue
                if other not in routes:
                    routes[other] = []
                    if other not in at:
                        queue.append(other)
                further = [(*route, number[node, other]) for route in routes[node]]
                routes[other] = (routes[other] + further)[:MOST_ROUTES]
        all_routes.update({(k, at[device]): routes[device] for device in routes if device in at and device != src})
    return all_routes
