"""The cheapest trees of limited depth. Each step has its own price for each hop.

Input: for each step the prices of all hops. Output: for each root and each first step of a tree, the price and the hops
of a tree that reaches all devices by the last step.

With up to ``MOST_EXACT`` devices the trees are the cheapest, by dynamic programming over the sets of devices that a
tree has reached. If a tree grows from set A to set B in one step, it pays the cheapest hop from A for each device of B
that is not in A. With more devices, a few trees grow greedily, and the cheapest of them is taken.

Source: Dreyfus & Wagner, The Steiner problem in graphs, Networks 1(3), 1971 (dynamic programming over sets of nodes);
Alpert, Hu, Huang, Kahng & Karger, Prim-Dijkstra tradeoffs for improved performance-driven routing tree design, IEEE
TCAD 14(7), 1995 (greedy trees).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

MOST_EXACT: Final = 10  # devices; the exact search takes 3**n times as long as one hop

_PARTS_OF_PATHS: Final = (0.0, 0.5)  # tried as the part of a path's price in the rank of a hop: see ``_GreedyTrees``

Edge = tuple[int, int, int]  # the step, the device that sends, the device that receives


class Trees(Protocol):
    """The cheapest tree that was found for each root and each first step."""

    def price(self, root: int, start: int) -> float:
        """Return the price of the tree whose first step is ``start``, or infinity if there is no such tree."""

    def edges(self, root: int, start: int) -> list[Edge]:
        """Return the hops of this tree, in the order of the steps."""


def cheapest_trees(costs: list[Any], root: int | None = None) -> Trees:
    """Return the cheapest trees, where ``costs[s][u, v]`` is the price of the hop from u to v in step s.

    If a root is given, only trees out of this root are found, which takes a third of the time.

    >>> import numpy as np
    >>> line = np.array([[9, 1, 5], [1, 9, 1], [5, 1, 9]])
    >>> trees = cheapest_trees([line, line])
    >>> trees.price(0, 0), trees.edges(0, 0), trees.price(0, 1)
    (2.0, [(0, 0, 1), (1, 1, 2)], 6.0)
    """
    return _ExactTrees(costs, root) if len(costs[0]) <= MOST_EXACT else _GreedyTrees(costs)


class _SetPairs(NamedTuple):
    """All pairs of sets A and B of devices with A within B, sorted by A and then by B. Sets are bit sets."""

    a: Any  # for each pair, set A
    b: Any  # for each pair, set B
    start: Any  # for each A, the number of the first pair with it
    ends: list[int]  # ``start`` as a list, followed by the number of pairs
    reached: list[int]  # ``b`` as a list
    # Entry k - 1 is for the pairs with k devices in B that are not in A. Let v be the last of them. The entry has the
    # numbers of these pairs, those of the pairs without v in B, and the indices of (A, v) in a flat array of n columns.
    by_size: list[tuple[Any, Any, Any]]


@lru_cache(maxsize=16)
def _set_pairs(n: int, first: int) -> _SetPairs:
    """Return all pairs of sets of n devices whose set A is at least ``first``. (Set 0 is the empty set.)"""
    import numpy as np

    # Each pair is a number in base 3. Digit v tells whether device v is in neither set (0), in B (1) or in both (2).
    digits = np.arange(3**n)[:, None] // 3 ** np.arange(n) % 3
    bits = 1 << np.arange(n)
    a, b = (digits == 2) @ bits, (digits > 0) @ bits
    order = np.lexsort((b, a))
    order = order[a[order] >= first]
    a, b, digits = a[order], b[order], digits[order]
    number = np.zeros(3**n, dtype=np.intp)  # the position of each pair after sorting
    number[order] = np.arange(len(order))
    size = (digits == 1).sum(axis=1)
    last = n - 1 - (digits[:, ::-1] == 1).argmax(axis=1)  # the last device that is only in B
    without = number[np.where(size > 0, order - 3**last, order)]
    start = np.searchsorted(a, np.arange(1 << n))
    groups = [np.flatnonzero(size == k) for k in range(1, n + 1)]
    by_size = [(group, without[group], a[group] * n + last[group]) for group in groups]
    return _SetPairs(a, b, start, [*start.tolist(), len(a)], b.tolist(), by_size)


class _ExactTrees:
    """The cheapest trees. ``least[s][A]`` is the least price to reach all devices from set A in steps s, s + 1, ...

    If a root is given, the sets contain only the other devices.
    """

    def __init__(self, costs: list[Any], root: int | None) -> None:
        import numpy as np

        self.root, self.costs = root, costs
        self.others = [k for k in range(len(costs[0])) if k != root]
        self.n = len(self.others)
        self.sets = _set_pairs(self.n, 1 if root is None else 0)
        full, first = (1 << self.n) - 1, 0 if root is not None else 1
        different = {id(cost): cost for cost in costs}
        # For each array of costs and each device, the prices of the hops into the device.
        self.into = {key: cost.T.tolist() for key, cost in different.items()}
        prices = dict(zip(different, self._pair_prices(np.array(list(different.values()))), strict=True))
        least = np.full(full + 1, np.inf)
        least[full] = 0.0
        self.least = [least]
        self.choices: list[Any] = []  # for each step, by pair of sets: the least price if the tree grows from A to B
        for cost in reversed(costs):
            values = prices[id(cost)] + least[self.sets.b]
            least = np.full(full + 1, np.inf)
            least[first:] = np.minimum.reduceat(values, self.sets.start[first:])
            self.least.append(least)
            self.choices.append(values)
        self.least.reverse()
        self.choices.reverse()

    def _pair_prices(self, costs: Any) -> Any:
        """Return, by array of costs and pair of sets, the price of growing from A to B in one step."""
        import numpy as np

        sets, n, count = self.sets, self.n, len(costs)
        least = np.full((1 << n, n, count), np.inf)  # for each set and device, the cheapest hop from the set to it
        to_others = costs[:, :, self.others].transpose(1, 2, 0)
        if self.root is not None:
            least[0] = to_others[self.root]
        for k, u in enumerate(self.others):
            np.minimum(to_others[u], least[: 1 << k], out=least[1 << k : 2 << k])
        prices, hops = np.zeros((len(sets.a), count)), least.reshape(-1, count)
        for group, without, hop in sets.by_size:
            prices[group] = prices[without] + hops[hop]
        return prices.T.copy()

    def _root_set(self, root: int) -> int:
        """Return the set of reached devices at the start, when only the root has the data."""
        return 0 if self.root is not None else 1 << root

    def price(self, root: int, start: int) -> float:
        return float(self.least[start][self._root_set(root)])

    def edges(self, root: int, start: int) -> list[Edge]:
        reached, senders, edges = self._root_set(root), [root], list[Edge]()
        outside = [] if self.root is None else [root]
        for step in range(start, len(self.choices)):
            first, end = self.sets.ends[reached], self.sets.ends[reached + 1]
            if end - first == 1:  # all devices are reached
                break
            after = self.sets.reached[first + int(self.choices[step][first:end].argmin())]
            new = [v for k, v in enumerate(self.others) if (after & ~reached) >> k & 1]
            if len(senders) == 1:
                edges += [(step, root, v) for v in new]
            else:
                into = self.into[id(self.costs[step])]
                edges += [(step, min(senders, key=into[v].__getitem__), v) for v in new]
            senders = [*outside, *(v for k, v in enumerate(self.others) if after >> k & 1)]
            reached = after
        return edges


class _GreedyTrees:
    """Cheap trees that grow device by device, each time over the hop of the least rank.

    The rank of a hop is its price plus a part of the rank of the hop by which its sender was reached.
    """

    def __init__(self, costs: list[Any]) -> None:
        import numpy as np

        self.costs = costs
        self.n, self.steps = len(costs[0]), len(costs)
        # For each step: the least price of each hop in this step or a later one, and the earliest step with this price.
        self.least = [np.full((self.n, self.n), np.inf)]
        self.when = [np.full((self.n, self.n), self.steps)]
        for step, cost in reversed(list(enumerate(costs))):
            no_dearer = cost <= self.least[-1]
            self.least.append(np.where(no_dearer, cost, self.least[-1]))
            self.when.append(np.where(no_dearer, step, self.when[-1]))
        self.least.reverse()
        self.when.reverse()
        self._trees: dict[tuple[int, int], tuple[float, list[Edge]]] = {}

    def price(self, root: int, start: int) -> float:
        return self._tree(root, start)[0]

    def edges(self, root: int, start: int) -> list[Edge]:
        return self._tree(root, start)[1]

    def _tree(self, root: int, start: int) -> tuple[float, list[Edge]]:
        if (root, start) not in self._trees:
            greedy = [self._grow(root, start, part) for part in _PARTS_OF_PATHS]
            self._trees[root, start] = min([*greedy, self._earliest_tree(root, start)], key=lambda tree: tree[0])
        return self._trees[root, start]

    def _grow(self, root: int, start: int, part: float) -> tuple[float, list[Edge]]:
        """Return (price, hops) of a greedy tree. The rank of a hop counts ``part`` of the rank of the hop before it."""
        import numpy as np

        total, edges = 0.0, []
        # For each device, the best hop to it from the tree: sender, step, price and rank.
        sender = np.full(self.n, root)
        step = self.when[start][root].copy()
        price = self.least[start][root].copy()
        rank = price.copy()
        missing = np.ones(self.n, dtype=bool)
        missing[root] = False
        rank[root] = np.inf
        for _ in range(self.n - 1):
            v = int(rank.argmin())
            if rank[v] == np.inf:
                return np.inf, []
            total += float(price[v])
            after = int(step[v]) + 1  # the first step in which v can send
            edges.append((after - 1, int(sender[v]), v))
            path_rank = rank[v] * part
            missing[v] = False
            rank[v] = np.inf
            better = missing & (self.least[after][v] + path_rank < rank)
            rank = np.where(better, self.least[after][v] + path_rank, rank)
            price = np.where(better, self.least[after][v], price)
            step, sender = np.where(better, self.when[after][v], step), np.where(better, v, sender)
        return total, sorted(edges)

    def _earliest_tree(self, root: int, start: int) -> tuple[float, list[Edge]]:
        """Return (price, hops) of a tree that reaches each device in the earliest step, over its cheapest hop then."""
        import numpy as np

        reached = np.zeros(self.n, dtype=bool)
        reached[root] = True
        total, edges = 0.0, []
        for step in range(start, self.steps):
            hop_prices = np.where(reached[:, None], self.costs[step], np.inf)
            senders = hop_prices.argmin(axis=0)
            prices = hop_prices[senders, np.arange(self.n)]
            new = np.flatnonzero(~reached & (prices < np.inf))
            edges += [(step, int(senders[v]), int(v)) for v in new]
            total += float(prices[new].sum())
            reached[new] = True
        return (total, edges) if reached.all() else (float("inf"), [])
