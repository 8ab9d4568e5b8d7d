"""Hops: the ways from one device to another that pass only switches, so that a step takes one of them.

Input: a neutral topology (see ``topologies.neutral``). Output: arrays for the search for trees.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, Final

from ....topology import Topology

MOST_ROUTES: Final = 4  # of two devices; more would hardly help

Links = tuple[int, ...]


class Hops:
    """The hops of a topology: for each ordered pair of devices some shortest routes through switches, as link
    numbers."""

    def __init__(self, topology: Topology) -> None:
        import numpy as np

        self.n = len(topology.devices)
        pairs = [(link.src, link.dst) for link in topology.links]
        self.links = len(pairs)
        self.fastest = max(link.bandwidth for link in topology.links)
        # Bandwidths as parts of the greatest, so that the numbers of linear programs are near 1.
        self.bandwidth = np.array([float(link.bandwidth / self.fastest) for link in topology.links])
        routes = _routes(topology, {pair: k for k, pair in enumerate(pairs)})
        self.pairs = sorted(routes)
        self.routes: list[Links] = [route for pair in self.pairs for route in routes[pair]]
        self.start = np.cumsum([0, *(len(routes[pair]) for pair in self.pairs)])
        self.at = {pair: k for k, pair in enumerate(self.pairs)}
        self.ends = tuple(np.array([pair[end] for pair in self.pairs], dtype=np.intp) for end in (0, 1))
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.through = [tuple(number[pairs[k][1]] for k in route[:-1]) for route in self.routes]
        self._most = int(np.diff(self.start).max(initial=1))  # routes of two devices
        self._first = self.start[None, :-1]
        self._route_of_use = np.repeat(np.arange(len(self.routes)), [len(route) for route in self.routes])
        self._link_of_use = np.array([k for route in self.routes for k in route], dtype=np.intp)

    def costs(self, prices: Any) -> tuple[Any, Any]:
        """Return, for each row of prices, the price of the cheapest hop between each two devices (infinite: none).

        The second array has the route of this price for each row and pair. If each pair has one route, it has one row.
        """
        import numpy as np

        by_use, count = prices[:, self._link_of_use], len(self.routes)
        if by_use.shape[1] == count:  # no route passes a switch
            by_route = by_use
        else:
            by_route = np.array([np.bincount(self._route_of_use, row, minlength=count) for row in by_use])
        best = self._first
        if self._most > 1:
            rows = np.arange(len(prices))[:, None]
            best = np.repeat(best, len(prices), axis=0)
            for k in range(1, self._most):
                others = np.minimum(self.start[:-1] + k, self.start[1:] - 1)
                best = np.where(by_route[:, others] < by_route[rows, best], others, best)
            by_route = by_route[rows, best]
        found = np.full((len(prices), self.n, self.n), np.inf)
        found[:, self.ends[0], self.ends[1]] = by_route
        return found, best


@lru_cache(maxsize=256)
def hops(topology: Topology) -> Hops:
    """Return the hops of a topology: here all of them pass the switch, but a link between two devices is a hop, too.

    >>> hops(Topology.star(3, 450)).pairs
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    return Hops(topology)


def _routes(topology: Topology, number: dict[tuple[str, str], int]) -> dict[tuple[int, int], list[Links]]:
    """Return up to ``MOST_ROUTES`` shortest routes for each pair of devices that has a route through switches only."""
    at = {device: k for k, device in enumerate(topology.devices)}
    found: dict[tuple[int, int], list[Links]] = {}
    for src, k in at.items():
        length = {src: 0}
        ways: dict[str, list[Links]] = {src: [()]}
        queue = deque([src])
        while queue:
            node = queue.popleft()
            for link in topology.out_links(node):
                other = link.dst
                if other == src or length.setdefault(other, length[node] + 1) <= length[node]:
                    continue
                if other not in ways:
                    ways[other] = []
                    if other not in at:
                        queue.append(other)
                more = [(*way, number[node, other]) for way in ways[node]]
                ways[other] = (ways[other] + more)[:MOST_ROUTES]
        found.update({(k, at[device]): ways[device] for device in ways if device in at and device != src})
    return found
