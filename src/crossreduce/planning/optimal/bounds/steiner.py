"""The cheapest trees that join some nodes of a graph and may branch at others (Steiner trees).

Input: a graph whose links have prices. Output: for each possible root, the price of its cheapest tree to all terminals,
and the tree. Trees branch at *joints*: terminals, other devices, and switches that multicast. They pass straight
through other nodes. The time grows with 3**terminals.

Source: Dreyfus & Wagner, The Steiner problem in graphs, Networks 1(3), 1971.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

# The most values that the search combines twice, 3**terminals * joints: in a short time, and in a few seconds. One
# collective needs no more than ``FEW``: beyond, cheap trees mostly reach its bound, too, and where prices do not prove
# that, cuts do. Nothing else proves the rates of several groups, so their trees are the cheapest ones up to ``MANY``. A
# check computes exact prices up to the same limit as the search.
FEW: Final = 1 << 19
MANY: Final = 1 << 24

Through = tuple[int, ...]  # the nodes that data passes between two nodes of a tree
Parent = tuple[int, int, Through]  # (node, its parent, the nodes passed after the parent)


def few_enough(terminals: int, joints: int, limit: int = FEW) -> bool:
    """Return whether the trees of so many terminals and joints are found in a short time."""
    return int(3**terminals) * joints <= limit


class CheapestTrees:
    """The cheapest trees out of roots.

    In the example, trees from node 0 to nodes 1 and 2 branch at node 3, or pass straight through it.

    >>> arcs = [(0, 3), (3, 1), (3, 2), (0, 1)]
    >>> branching = CheapestTrees(4, arcs, [0, 1, 2], [0, 1, 2, 3])
    >>> branching.price([2.0, 1.0, 1.0, 3.5])
    >>> branching.cost(0), branching.parents(0)
    (4.0, [(3, 0, ()), (1, 3, ()), (2, 3, ())])
    >>> passing = CheapestTrees(4, arcs, [0, 1, 2], [0, 1, 2])
    >>> passing.price([2.0, 1.0, 1.0, 3.5])
    >>> passing.cost(0), passing.parents(0)
    (6.0, [(2, 0, (3,)), (1, 0, (3,))])
    """

    def __init__(
        self, n: int, arcs: Sequence[tuple[int, int]], terminals: Sequence[int], joints: Sequence[int]
    ) -> None:
        """Prepare for a graph of the nodes 0 to n - 1; every terminal is a joint."""
        self._n, self._arcs, self._joints = n, arcs, list(joints)
        self._at = {node: k for k, node in enumerate(self._joints)}
        self._terminals = [self._at[node] for node in terminals]
        self._splits: list[Any] = []

    def price(self, prices: Sequence[float]) -> None:
        """Set the prices of all links, 0 or more. Sums of whole numbers below 2**53 are exact."""
        import numpy as np

        size = len(self._joints)
        reach, towards = self._hops(prices), np.tile(np.arange(size), (size, 1))
        np.fill_diagonal(reach, 0.0)
        for k in range(size):  # Floyd & Warshall; ``towards``: the next joint of the path
            across = reach[:, k, None] + reach[None, k, :]
            better = across < reach
            reach = np.where(better, across, reach)
            towards = np.where(better, towards[:, k, None], towards)
        self._reach, self._towards = reach, towards
        self._combine()

    def cost(self, root: int) -> float:
        """Return the price of the cheapest tree out of a joint; infinite: it does not reach all terminals."""
        return float(self._cost[-1][self._at[root]])

    def parents(self, root: int) -> list[Parent]:
        """Return the cheapest tree out of a joint whose ``cost`` is finite, parents before their children.

        All prices must be above 0.
        """
        start = self._at[root]
        out: dict[int, list[int]] = {}
        hops: dict[tuple[int, int], None] = {}
        self._trace(start, (1 << len(self._terminals)) - 1, hops)
        for a, b in hops:
            out.setdefault(a, []).append(b)
        parent: dict[int, int] = {start: start}
        queue = deque([start])
        while queue:
            a = queue.popleft()
            for b in out.get(a, ()):
                if b not in parent:
                    parent[b] = a
                    queue.append(b)
        needed = set(self._terminals)
        for node in reversed(parent):
            if node in needed:
                needed.add(parent[node])
        return [
            (self._joints[node], self._joints[above], self._route(above, node))
            for node, above in parent.items()
            if node in needed and node != start
        ]

    def _hops(self, prices: Sequence[float]) -> Any:
        """Return the price of the cheapest way from each joint to each other one that passes no third joint."""
        import numpy as np

        size = len(self._joints)
        self._before: Any = None
        if size == self._n:
            hops = np.full((size, size), np.inf)
            for (src, dst), price in zip(self._arcs, prices, strict=True):
                hops[self._at[src], self._at[dst]] = price
            return hops
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        # Links out of a joint start at a copy of it, which no link enters, so no way passes a third joint.
        starts = [self._n + self._at[src] if src in self._at else src for src, _ in self._arcs]
        ends = [dst for _, dst in self._arcs]
        graph = csr_array((list(prices), (starts, ends)), shape=(self._n + size, self._n + size))
        found, self._before = dijkstra(graph, indices=range(self._n, self._n + size), return_predecessors=True)
        return found[:, self._joints]

    def _route(self, a: int, b: int) -> Through:
        """Return the nodes between two joints on their cheapest way."""
        if self._before is None:
            return ()
        passed: list[int] = []
        node = int(self._before[a, self._joints[b]])
        while node < self._n:
            passed.append(node)
            node = int(self._before[a, node])
        return tuple(reversed(passed))

    def _combine(self) -> None:
        """Compute, for each set of terminals, the price of the cheapest tree from each joint to all of the set."""
        import numpy as np

        count = len(self._terminals)
        if not self._splits:
            for wanted in range(1 << count):
                low, rest = wanted & -wanted, wanted & (wanted - 1)
                part, halves = rest, []
                while part:  # all ways to divide the set in two: one part has its lowest terminal
                    part = (part - 1) & rest
                    halves.append(low | part)
                self._splits.append(np.array(halves, dtype=np.int64))
        size = len(self._joints)
        self._cost = np.zeros((1 << count, size))
        self._joined = np.full((1 << count, size), np.inf)
        for k, terminal in enumerate(self._terminals):
            self._joined[1 << k, terminal] = 0.0
        for wanted in range(1, 1 << count):
            halves = self._splits[wanted]
            if len(halves):
                self._joined[wanted] = (self._cost[halves] + self._cost[wanted ^ halves]).min(axis=0)
            self._cost[wanted] = (self._reach + self._joined[wanted]).min(axis=1)

    def _trace(self, start: int, wanted: int, pairs: dict[tuple[int, int], None]) -> None:
        """Add the hops of the cheapest tree from a joint to a set of terminals."""
        fork = int((self._reach[start] + self._joined[wanted]).argmin())
        self._walk(start, fork, pairs)
        halves = self._splits[wanted]
        if len(halves):
            half = int(halves[(self._cost[halves, fork] + self._cost[wanted ^ halves, fork]).argmin()])
            self._trace(fork, half, pairs)
            self._trace(fork, wanted ^ half, pairs)

    def _walk(self, a: int, b: int, pairs: dict[tuple[int, int], None]) -> None:
        """Add the hops of the cheapest way between two joints."""
        while a != b:
            after = int(self._towards[a, b])
            pairs[a, after] = None
            a = after
