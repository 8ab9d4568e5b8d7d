"""``Hops``: routes from one device to another that pass only switches. Each transfer of a step uses one hop.

Input: a topology from ``neutral_topology``. Output: arrays for the search for trees.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, Final

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
        self.routes: list[Links] = [route for pair in self.pairs for route in routes[pair]]  # of all pairs, in order
        self.start = np.cumsum([0, *(len(routes[pair]) for pair in self.pairs)])  # the first route of each pair
        self.at = {pair: k for k, pair in enumerate(self.pairs)}
        self.ends = tuple(np.array([pair[end] for pair in self.pairs], dtype=np.intp) for end in (0, 1))
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.through = [tuple(number[pairs[k][1]] for k in route[:-1]) for route in self.routes]  # passed switches
        self._most = int(np.diff(self.start).max(initial=1))  # the most routes that a pair has
        # Each use of a link by a route, as two parallel arrays: the numbers of the routes and those of the links.
        self._route_of_use = np.repeat(np.arange(len(self.routes)), [len(route) for route in self.routes])
        self._link_of_use = np.array([k for route in self.routes for k in route], dtype=np.intp)

    def costs(self, prices: Any) -> tuple[Any, Any]:
        """Return the prices and the routes of the cheapest hops, for each row of link prices in ``prices``.

        The first array has the price of a hop by (row, sender, receiver), which is infinite without a route. The second
        array has the number of its route by (row, pair), or has a single row if each pair has one route.
        """
        import numpy as np

        by_use, count = prices[:, self._link_of_use], len(self.routes)
        if by_use.shape[1] == count:  # no route passes a switch
            by_route = by_use
        else:
            by_route = np.array([np.bincount(self._route_of_use, row, minlength=count) for row in by_use])
        best = self.start[None, :-1]
        if self._most > 1:
            rows = np.arange(len(prices))[:, None]
            best = np.repeat(best, len(prices), axis=0)
            for k in range(1, self._most):
                others = np.minimum(self.start[:-1] + k, self.start[1:] - 1)
                best = np.where(by_route[:, others] < by_route[rows, best], others, best)
            by_route = by_route[rows, best]
        costs = np.full((len(prices), self.n, self.n), np.inf)
        costs[:, self.ends[0], self.ends[1]] = by_route
        return costs, best


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
