"""Cheap trees that join many nodes of a graph, for which a search for the cheapest trees would take too long.

Input and output are those of ``steiner.py``. A tree grows from the root. In each step the cheapest path from the tree
to a terminal outside is added. The tree is the cheapest one if all branch nodes are terminals and if each link costs
the same in both directions.

Source: Takahashi & Matsuyama, An approximate solution for the Steiner problem in graphs, Math. Japonica 24(6), 1980.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from .steiner import Arc, Parent


class HeuristicTrees:
    """The search for a cheap tree out of each possible root, in a time that does not grow exponentially.

    >>> arcs = [(0, 3), (3, 1), (3, 2), (0, 1)]
    >>> trees = HeuristicTrees(4, arcs, [0, 1, 2], [0, 1, 2, 3])
    >>> trees.price([2.0, 1.0, 1.0, 3.5])
    >>> trees.cost(0), trees.parents(0)
    (4.0, [(3, 0, ()), (1, 3, ()), (2, 3, ())])
    """

    def __init__(self, n: int, arcs: Sequence[Arc], terminals: Sequence[int], branch_nodes: Sequence[int]) -> None:
        """Prepare for a graph of the nodes 0 to n - 1; every terminal is a branch node."""
        self._terminals, self._branch_nodes = frozenset(terminals), frozenset(branch_nodes)
        self._leaving: list[list[tuple[int, int]]] = [[] for _ in range(n)]  # by node, links out of it: (to, number)
        for k, (src, dst) in enumerate(arcs):
            self._leaving[src].append((dst, k))

    def price(self, prices: Sequence[float]) -> None:
        """Set the prices of all links, 0 or more."""
        self._prices = prices
        self._trees: dict[int, tuple[float, list[Parent]]] = {}  # by root, at these prices

    def cost(self, root: int) -> float:
        """Return the price of a cheap tree out of a branch node, or infinity if no tree reaches all terminals."""
        return self._tree(root)[0]

    def parents(self, root: int) -> list[Parent]:
        """Return a cheap tree out of a branch node, parents before their children. ``cost(root)`` must be finite."""
        return self._tree(root)[1]

    def _tree(self, root: int) -> tuple[float, list[Parent]]:
        if root not in self._trees:
            self._trees[root] = self._grow(root)
        return self._trees[root]

    def _grow(self, root: int) -> tuple[float, list[Parent]]:
        """Return (price, tree) of a tree that grows from the root, by Dijkstra's search for cheapest paths.

        When the search finds a terminal, the branch nodes of the path to it become part of the tree. Their distance is
        then 0, so the search continues from them.
        """
        inside = {root}
        missing = len(self._terminals - inside)
        distance = [inf] * len(self._leaving)  # the price of the cheapest known path to each node from the tree
        before = [root] * len(self._leaving)  # the node before it on this path
        distance[root] = 0.0
        queue = [(0.0, root)]
        total, parents = 0.0, list[Parent]()
        while missing:
            if not queue:
                return inf, []
            price, node = heappop(queue)
            if price > distance[node]:
                continue
            if node in self._terminals and node not in inside:
                total += price
                path = [node]  # backwards: from the terminal to the tree
                while path[-1] not in inside:
                    path.append(before[path[-1]])
                ends = [k for k, passed in enumerate(path) if passed in self._branch_nodes]
                for start, end in reversed([*zip(ends[1:], ends, strict=False)]):  # from the tree to the terminal
                    joined = path[end]
                    parents.append((joined, path[start], tuple(path[start - 1 : end : -1])))
                    inside.add(joined)
                    missing -= joined in self._terminals
                    distance[joined] = 0.0
                    heappush(queue, (0.0, joined))
                continue
            for other, link in self._leaving[node]:
                length = price + self._prices[link]
                if length < distance[other]:
                    distance[other], before[other] = length, node
                    heappush(queue, (length, other))
        return total, parents
