"""Cheap trees that join many nodes of a graph, where the cheapest ones would take too long.

Input and output: as ``steiner.py``. A tree begins at its root; the nearest terminal that it does not reach yet is
joined to it by the cheapest way, until it reaches all. Trees without helpers between equal nodes are the cheapest ones.

Source: Takahashi & Matsuyama, An approximate solution for the Steiner problem in graphs, Math. Japonica 24(6), 1980.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .steiner import CheapestTrees


class NearTrees(CheapestTrees):
    """Cheap trees out of roots, in a time that does not grow exponentially.

    >>> arcs = [(0, 3), (3, 1), (3, 2), (0, 1)]
    >>> trees = NearTrees(4, arcs, [0, 1, 2], [0, 1, 2, 3])
    >>> trees.price([2.0, 1.0, 1.0, 3.5])
    >>> trees.cost(0), trees.parents(0)
    (4.0, [(3, 0, ()), (1, 3, ()), (2, 3, ())])
    """

    def cost(self, root: int) -> float:
        """Return the price of a cheap tree out of a joint; infinite: it does not reach all terminals."""
        start = self._at[root]
        if start not in self._made:
            self._made[start] = self._grown(start)
        return self._made[start][0]

    def _combine(self) -> None:
        self._made: dict[int, tuple[float, list[tuple[int, int]]]] = {}

    def _tree_hops(self, start: int) -> Iterable[tuple[int, int]]:
        self.cost(self._joints[start])
        return self._made[start][1]

    def _grown(self, start: int) -> tuple[float, list[tuple[int, int]]]:
        """Return the price and the hops of the tree out of a joint, parents before their children."""
        import numpy as np

        total, pairs, inside = 0.0, list[tuple[int, int]](), {start}
        wanted = [k for k in self._terminals if k != start]
        near: Any = self._reach[start].copy()  # the price of the cheapest way to each joint
        source: Any = np.full(len(near), start)  # the joint of the tree where it begins
        while wanted:
            end = wanted[int(near[wanted].argmin())]
            if not np.isfinite(near[end]):
                return float("inf"), []
            total += float(near[end])
            a = int(source[end])
            while a != end:
                b = int(self._towards[a, end])
                pairs.append((a, b))
                inside.add(b)
                better = self._reach[b] < near
                near, source = np.where(better, self._reach[b], near), np.where(better, b, source)
                a = b
            wanted = [k for k in wanted if k not in inside]
        return total, pairs
