"""Maximum flows and minimum cuts with integer capacities, of arcs between nodes 0, 1, ...

SciPy computes a flow (Dinic's algorithm) if its values fit 32 bits and the network has more than ``SMALL`` nodes; else
``_augment`` does.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Any, Final

# For networks of at most this many nodes ``_augment`` is faster than SciPy (0.2 ms per flow, measured with SciPy 1.17).
SMALL: Final = 24
_LARGEST: Final = 2**31 - 1


class Network:
    """A directed graph of the nodes 0 to n - 1 whose arcs have capacities.

    >>> network = Network(4, {(0, 1): 3, (0, 2): 1, (1, 3): 2, (2, 3): 5})
    >>> network.flow(0, 3), network.cut(0, 3)
    (3, frozenset({0, 1}))
    """

    def __init__(self, n: int, capacities: dict[tuple[int, int], int]) -> None:
        self.n = n
        self._arcs: list[dict[int, int]] = [{} for _ in range(n)]
        for (src, dst), capacity in capacities.items():
            if capacity:
                self._arcs[src][dst] = capacity
        self._matrix: Any = None
        self._last: Any = None  # the ends of the latest flow, and its result

    def flow(self, src: int, dst: int) -> int:
        """Return the value of the greatest flow from ``src`` to ``dst``, another node."""
        if self._sparse(src) is None:
            return self._augment(src, dst)[0]
        return int(self._maximum(src, dst).flow_value)

    def cut(self, src: int, dst: int) -> frozenset[int]:
        """Return the smallest set of nodes with ``src`` and without ``dst`` whose outgoing capacity is the least.

        These nodes can be reached over the capacity that a greatest flow leaves, and are the same for every such flow.
        """
        matrix = self._sparse(src)
        if matrix is None:
            return self._augment(src, dst)[1]
        from scipy.sparse.csgraph import breadth_first_order

        left = matrix - self._maximum(src, dst).flow
        left.eliminate_zeros()
        return frozenset(breadth_first_order(left, src, return_predecessors=False).tolist())

    def _maximum(self, src: int, dst: int) -> Any:
        """Return SciPy's flow; the last one is kept, since ``cut`` is mostly called after ``flow``."""
        if self._last is None or self._last[0] != (src, dst):
            from scipy.sparse.csgraph import maximum_flow

            self._last = (src, dst), maximum_flow(self._matrix, src, dst)
        return self._last[1]

    def _sparse(self, src: int) -> Any:
        """Return the capacities as SciPy's sparse matrix; ``None``: ``_augment`` must be used.

        SciPy adds up what flows out of the source, and the capacities of an arc and of the arc back.
        """
        if self.n <= SMALL or self._widest > _LARGEST or sum(self._arcs[src].values()) > _LARGEST:
            return None
        if self._matrix is None:
            import numpy as np
            from scipy.sparse import csr_array

            counts = [len(arcs) for arcs in self._arcs]
            dsts = [dst for arcs in self._arcs for dst in arcs]
            capacities = [capacity for arcs in self._arcs for capacity in arcs.values()]
            starts = np.concatenate([[0], np.cumsum(counts)])
            self._matrix = csr_array(
                (np.array(capacities, np.int32), np.array(dsts, np.int32), starts.astype(np.int32)),
                shape=(self.n, self.n),
            )
        return self._matrix

    @cached_property
    def _widest(self) -> int:
        """The largest sum of the capacities of an arc and of the arc back."""
        arcs = self._arcs
        return max((c + arcs[b].get(a, 0) for a, out in enumerate(arcs) for b, c in out.items()), default=0)

    def _augment(self, src: int, dst: int) -> tuple[int, frozenset[int]]:
        """Return a flow's value and cut by augmenting shortest paths (Edmonds & Karp, J. ACM 19(2), 1972)."""
        if self._last is not None and self._last[0] == (src, dst):
            known: tuple[int, frozenset[int]] = self._last[1]
            return known
        left = [arcs.copy() for arcs in self._arcs]
        value = left[src].pop(dst, 0)
        for node, capacity in left[src].items():  # the paths of one and two arcs, which need no search
            pushed = min(capacity, left[node].get(dst, 0))
            if pushed:
                left[src][node] -= pushed
                left[node][dst] -= pushed
                value += pushed
        while True:
            before: dict[int, int] = {src: src}
            queue = deque([src])
            while queue and dst not in before:
                node = queue.popleft()
                for other, capacity in left[node].items():
                    if capacity and other not in before:
                        before[other] = node
                        queue.append(other)
            if dst not in before:
                self._last = (src, dst), (value, frozenset(before))
                return value, frozenset(before)
            path = [dst]
            while path[-1] != src:
                path.append(before[path[-1]])
            pairs = [(path[k + 1], path[k]) for k in range(len(path) - 1)]
            pushed = min(left[a][b] for a, b in pairs)
            for a, b in pairs:
                left[a][b] -= pushed
                left[b][a] = left[b].get(a, 0) + pushed
            value += pushed
