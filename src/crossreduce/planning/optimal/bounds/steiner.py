"""The cheapest trees that join some nodes of a graph and may branch at others (Steiner trees).

Input: a graph whose links have prices. Output: for each possible root, the cheapest tree from it to all terminals (the
nodes to join), and the price of this tree. A tree may branch only at *branch nodes*: devices, which include all
terminals, and switches that multicast. It passes straight through other nodes. The time grows with 3**terminals.

Source: Dreyfus & Wagner, The Steiner problem in graphs, Networks 1(3), 1971.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

# Limits of the number of values that the search combines, 3**terminals * branch nodes. ``FEW`` values take little time,
# ``MANY`` values a few seconds. For one collective the limit is ``FEW``: beyond it, heuristic trees mostly reach the
# bound as well. For several groups the limit is ``MANY``, because only the cheapest trees prove their rates. The check
# of a certificate computes exact prices up to the same limit as the search.
FEW: Final = 1 << 19
MANY: Final = 1 << 24

Arc = tuple[int, int]
Through = tuple[int, ...]  # the nodes that data passes between a node of a tree and its parent
Parent = tuple[int, int, Through]  # (node, its parent, the nodes passed on the way from the parent to the node)


def few_enough(terminals: int, branch_nodes: int, limit: int = FEW) -> bool:
    """Return whether the search for the cheapest trees combines at most ``limit`` values."""
    return int(3**terminals) * branch_nodes <= limit


class CheapestTrees:
    """The search for the cheapest tree out of each possible root.

    The example joins nodes 0, 1 and 2, first with node 3 as a branch node, then with a node 3 that only forwards.

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

    def __init__(self, n: int, arcs: Sequence[Arc], terminals: Sequence[int], branch_nodes: Sequence[int]) -> None:
        """Prepare for a graph of the nodes 0 to n - 1; every terminal is a branch node."""
        self._n, self._arcs, self._branch_nodes = n, arcs, list(branch_nodes)
        self._at = {node: k for k, node in enumerate(self._branch_nodes)}  # by branch node: its index in all arrays
        self._terminals = [self._at[node] for node in terminals]
        self._splits: list[Any] = []  # see ``_combine``

    def price(self, prices: Sequence[float]) -> None:
        """Set the prices of all links, 0 or more, and find the trees. Sums of integers below 2**53 are exact."""
        import numpy as np

        size = len(self._branch_nodes)
        distance, towards = self._hops(prices), np.tile(np.arange(size), (size, 1))
        np.fill_diagonal(distance, 0.0)
        for k in range(size):  # Floyd & Warshall; ``towards`` is the next branch node on the cheapest path
            across = distance[:, k, None] + distance[None, k, :]
            better = across < distance
            distance = np.where(better, across, distance)
            towards = np.where(better, towards[:, k, None], towards)
        self._distance, self._towards = distance, towards
        self._combine()

    def cost(self, root: int) -> float:
        """Return the price of the cheapest tree out of a branch node, or infinity if no tree reaches all terminals."""
        return float(self._cost[-1][self._at[root]])

    def parents(self, root: int) -> list[Parent]:
        """Return the cheapest tree out of a branch node, parents before their children.

        The ``cost`` of the node must be finite, and all prices must be above 0.
        """
        start = self._at[root]
        nexts: dict[int, list[int]] = {}  # for each branch node (its index), the ends of the hops out of it
        hops: dict[tuple[int, int], None] = {}
        self._add_tree(start, (1 << len(self._terminals)) - 1, hops)
        for a, b in hops:
            nexts.setdefault(a, []).append(b)
        # Two branches may contain the same node. A search from the root then keeps only one of the hops into it.
        parent: dict[int, int] = {start: start}
        queue = deque([start])
        while queue:
            a = queue.popleft()
            for b in nexts.get(a, ()):
                if b not in parent:
                    parent[b] = a
                    queue.append(b)
        needed = set(self._terminals)
        for node in reversed(parent):
            if node in needed:
                needed.add(parent[node])
        kept = [(parent[node], node) for node in parent if node in needed and node != start]
        return [(self._branch_nodes[b], self._branch_nodes[a], self._route(a, b)) for a, b in kept]

    def _hops(self, prices: Sequence[float]) -> Any:
        """Return the prices of all hops: ``[a, b]`` is that of the cheapest path that passes no third branch node."""
        import numpy as np

        size = len(self._branch_nodes)
        self._before: Any = None
        if size == self._n:
            hops = np.full((size, size), np.inf)
            for (src, dst), price in zip(self._arcs, prices, strict=True):
                hops[self._at[src], self._at[dst]] = price
            return hops
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        # A link out of a branch node starts at a copy of this node, which no link enters. So a path ends at the first
        # branch node that it reaches.
        starts = [self._n + self._at[src] if src in self._at else src for src, _ in self._arcs]
        ends = [dst for _, dst in self._arcs]
        graph = csr_array((list(prices), (starts, ends)), shape=(self._n + size, self._n + size))
        costs, self._before = dijkstra(graph, indices=range(self._n, self._n + size), return_predecessors=True)
        return costs[:, self._branch_nodes]

    def _route(self, a: int, b: int) -> Through:
        """Return the nodes between two branch nodes on the cheapest path of ``_hops``."""
        if self._before is None:
            return ()
        passed: list[int] = []
        node = int(self._before[a, self._branch_nodes[b]])
        while node < self._n:
            passed.append(node)
            node = int(self._before[a, node])
        return tuple(reversed(passed))

    def _combine(self) -> None:
        """Compute the price of the cheapest tree from each branch node to each set of terminals.

        A set is a number whose bit k stands for terminal k. ``_cost[set][node]`` is the least price of any tree,
        and ``_joined[set][node]`` that of a tree that branches at the node, or consists of the node only.
        """
        import numpy as np

        count = len(self._terminals)
        if not self._splits:  # for each set, all its subsets that contain its lowest terminal, except the set itself
            for wanted in range(1 << count):
                low, rest = wanted & -wanted, wanted & (wanted - 1)
                part, halves = rest, []
                while part:  # each division of the set in two halves is listed once, by the half with ``low``
                    part = (part - 1) & rest
                    halves.append(low | part)
                self._splits.append(np.array(halves, dtype=np.int64))
        size = len(self._branch_nodes)
        self._cost = np.zeros((1 << count, size))
        self._joined = np.full((1 << count, size), np.inf)
        for k, terminal in enumerate(self._terminals):
            self._joined[1 << k, terminal] = 0.0
        for wanted in range(1, 1 << count):
            halves = self._splits[wanted]
            if len(halves):
                self._joined[wanted] = (self._cost[halves] + self._cost[wanted ^ halves]).min(axis=0)
            self._cost[wanted] = (self._distance + self._joined[wanted]).min(axis=1)

    def _add_tree(self, start: int, wanted: int, hops: dict[tuple[int, int], None]) -> None:
        """Add to ``hops`` those of the cheapest tree from node ``start`` to the terminals in ``wanted`` (a bit set)."""
        fork = int((self._distance[start] + self._joined[wanted]).argmin())
        while start != fork:
            after = int(self._towards[start, fork])
            hops[start, after] = None
            start = after
        halves = self._splits[wanted]
        if len(halves):
            half = int(halves[(self._cost[halves, fork] + self._cost[wanted ^ halves, fork]).argmin()])
            self._add_tree(fork, half, hops)
            self._add_tree(fork, wanted ^ half, hops)
