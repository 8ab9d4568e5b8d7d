"""Maximum flows and minimum cuts with integer capacities of any size, of arcs between nodes 0, 1, ...

SciPy's flows are limited to capacities of 32 bits, and were not faster on the networks of planning.

Source: Dinitz, Algorithm for solution of a problem of maximum flow in a network with power estimation, Soviet
Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

from collections import deque


class Network:
    """A directed graph of the nodes 0 to n - 1 whose arcs have capacities.

    >>> network = Network(4, {(0, 1): 3, (0, 2): 1, (1, 3): 2, (2, 3): 5})
    >>> network.flow(0, 3), network.cut(0, 3)
    (3, frozenset({0, 1}))
    """

    def __init__(self, n: int, capacities: dict[tuple[int, int], int]) -> None:
        self._arcs: list[dict[int, int]] = [{} for _ in range(n)]
        for (src, dst), capacity in capacities.items():
            if capacity:
                self._arcs[src][dst] = capacity
        # The ends and the result of the last flow, since ``cut`` is mostly called after ``flow``.
        self._last: tuple[tuple[int, int], tuple[int, frozenset[int]]] | None = None

    def flow(self, src: int, dst: int) -> int:
        """Return the value of the greatest flow from ``src`` to ``dst``, another node."""
        return self._solve(src, dst)[0]

    def cut(self, src: int, dst: int) -> frozenset[int]:
        """Return the minimum cut, as the set of nodes on the side of ``src``; if there are several, the smallest set.

        These nodes can be reached over the capacity that a greatest flow leaves, and are the same for every such flow.
        """
        return self._solve(src, dst)[1]

    def _solve(self, src: int, dst: int) -> tuple[int, frozenset[int]]:
        if self._last is None or self._last[0] != (src, dst):
            self._last = (src, dst), self._augment(src, dst)
        return self._last[1]

    def _augment(self, src: int, dst: int) -> tuple[int, frozenset[int]]:
        """Return the value of the greatest flow, and the nodes of the minimum cut."""
        left = [arcs.copy() for arcs in self._arcs]
        value = left[src].pop(dst, 0)
        for node, capacity in left[src].items():  # the paths of one and two arcs, which need no search
            pushed = min(capacity, left[node].get(dst, 0))
            if pushed:
                left[src][node] -= pushed
                left[node][dst] -= pushed
                value += pushed
        while True:
            level, queue = {src: 0}, deque([src])
            while queue and dst not in level:
                node = queue.popleft()
                for other, capacity in left[node].items():
                    if capacity and other not in level:
                        level[other] = level[node] + 1
                        queue.append(other)
            if dst not in level:
                return value, frozenset(level)
            value += _push_blocking_flow(left, level, src, dst)


def _push_blocking_flow(left: list[dict[int, int]], level: dict[int, int], src: int, dst: int) -> int:
    """Push flow along paths on which the level rises by 1 per arc, until no such path is left; return the value."""
    value, path = 0, [src]
    onward: dict[int, list[int]] = {}  # for each node, the next nodes that may still lead to ``dst``
    while path:
        node = path[-1]
        if node == dst:
            pairs = [(path[k], path[k + 1]) for k in range(len(path) - 1)]
            pushed = min(left[a][b] for a, b in pairs)
            value += pushed
            for a, b in pairs:
                left[a][b] -= pushed
                left[b][a] = left[b].get(a, 0) + pushed
            del path[next(k for k, (a, b) in enumerate(pairs) if not left[a][b]) + 1 :]  # back to the first full arc
            continue
        if node not in onward:
            onward[node] = [other for other in left[node] if level.get(other) == level[node] + 1]
        nodes = onward[node]
        while nodes and not left[node][nodes[-1]]:
            nodes.pop()
        if nodes:
            path.append(nodes[-1])
        else:
            path.pop()
            if path:
                onward[path[-1]].pop()
    return value
