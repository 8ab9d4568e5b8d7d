"""Cheap trees that join many nodes of a graph, where the cheapest ones would take too long.

Input and output: as ``steiner.py``. A tree begins at its root; the nearest terminal that it does not reach yet is
joined to it by the cheapest way, until it reaches all. Trees without helpers between equal nodes are the cheapest ones.

Source: Takahashi & Matsuyama, An approximate solution for the Steiner problem in graphs, Math. Japonica 24(6), 1980.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from .steiner import Parent


class NearTrees:
    """Cheap trees out of roots, in a time that does not grow exponentially.

    >>> arcs = [(0, 3), (3, 1), (3, 2), (0, 1)]
    >>> trees = NearTrees(4, arcs, [0, 1, 2], [0, 1, 2, 3])
    >>> trees.price([2.0, 1.0, 1.0, 3.5])
    >>> trees.cost(0), trees.parents(0)
    (4.0, [(3, 0, ()), (1, 3, ()), (2, 3, ())])
    """

    def __init__(
        self, n: int, arcs: Sequence[tuple[int, int]], terminals: Sequence[int], joints: Sequence[int]
    ) -> None:
        """Prepare for a graph of the nodes 0 to n - 1; every terminal is a joint."""
        self._terminals, self._joints = frozenset(terminals), frozenset(joints)
        self._near: list[list[tuple[int, int]]] = [[] for _ in range(n)]  # the links out of each node: (to, number)
        for k, (src, dst) in enumerate(arcs):
            self._near[src].append((dst, k))

    def price(self, prices: Sequence[float]) -> None:
        """Set the prices of all links, 0 or more."""
        self._prices = prices
        self._made: dict[int, tuple[float, list[Parent]]] = {}

    def cost(self, root: int) -> float:
        """Return the price of a cheap tree out of a joint; infinite: it does not reach all terminals."""
        return self._tree(root)[0]

    def parents(self, root: int) -> list[Parent]:
        """Return a cheap tree out of a joint whose ``cost`` is finite, parents before their children."""
        return self._tree(root)[1]

    def _tree(self, root: int) -> tuple[float, list[Parent]]:
        if root not in self._made:
            self._made[root] = self._grow(root)
        return self._made[root]

    def _grow(self, root: int) -> tuple[float, list[Parent]]:
        """Return the price and the tree, which grows from the root like Dijkstra's tree of cheapest ways.

        When the nearest terminal is found, the joints of the path to it become part of the tree: their distance is 0.
        """
        inside = {root}
        missing = len(self._terminals - inside)
        far = [inf] * len(self._near)  # the price of the cheapest known way to each node from the tree
        before = [root] * len(self._near)  # the node before it on this way
        far[root] = 0.0
        queue = [(0.0, root)]
        total, parents = 0.0, list[Parent]()
        while missing:
            if not queue:
                return inf, []
            price, node = heappop(queue)
            if price > far[node]:
                continue
            if node in self._terminals and node not in inside:
                total += price
                way = [node]
                while way[-1] not in inside:
                    way.append(before[way[-1]])
                ends = [k for k, passed in enumerate(way) if passed in self._joints]
                for near, end in reversed([*zip(ends[1:], ends, strict=False)]):
                    joint = way[end]
                    parents.append((joint, way[near], tuple(way[near - 1 : end : -1])))
                    inside.add(joint)
                    missing -= joint in self._terminals
                    far[joint] = 0.0
                    heappush(queue, (0.0, joint))
                continue
            for other, link in self._near[node]:
                length = price + self._prices[link]
                if length < far[other]:
                    far[other], before[other] = length, node
                    heappush(queue, (length, other))
        return total, parents
