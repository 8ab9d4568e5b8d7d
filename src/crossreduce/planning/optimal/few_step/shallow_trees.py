"""Trees of limited depth of the least price: each step has its own price for each hop.

Input: for each step the prices of all hops. Output: for each root, and each step with which its tree begins, the price
and the hops of a tree that reaches all devices by the last step.

With up to ``MOST_EXACT`` devices the trees are the cheapest, by dynamic programming over the sets of devices that a
tree has reached: from set A to set B in one step costs, for each device of B that is not in A, the cheapest hop from a
device of A. With more devices, trees grow greedily, and the cheapest of a few is taken.

Source: Dreyfus & Wagner, The Steiner problem in graphs, Networks 1(3), 1971 (dynamic programming over sets of nodes);
Alpert, Hu, Huang, Kahng & Karger, Prim-Dijkstra tradeoffs for improved performance-driven routing tree design, IEEE
TCAD 14(7), 1995 (greedy trees).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

MOST_EXACT: Final = 10  # devices; the exact search takes 3**n times as long as one hop

_PARTS_OF_PATHS: Final = (0.0, 0.5)  # how much the price of the path to a hop counts

Edge = tuple[int, int, int]  # the step, the device that sends, the device that receives


class Trees(Protocol):
    """The cheapest trees that were found."""

    def price(self, root: int, start: int) -> float:
        """Return the price of a tree out of a root whose first step is ``start``."""

    def edges(self, root: int, start: int) -> list[Edge]:
        """Return its hops, in the order of the steps."""


def cheapest_trees(costs: list[Any], root: int | None = None) -> Trees:
    """Return the trees for the prices of the steps: ``costs[s][u, v]`` is the price of the hop from u to v in step s.

    With a root, only its trees are found, which takes a third of the time.

    >>> import numpy as np
    >>> line = np.array([[9, 1, 5], [1, 9, 1], [5, 1, 9]])
    >>> found = cheapest_trees([line, line])
    >>> found.price(0, 0), found.edges(0, 0), found.price(0, 1)
    (2.0, [(0, 0, 1), (1, 1, 2)], 6.0)
    """
    return _Exact(costs, root) if len(costs[0]) <= MOST_EXACT else _Grown(costs)


class _Sets(NamedTuple):
    """All pairs of sets A and B of devices with A within B, sorted by A and then by B."""

    a: Any
    b: Any
    start: Any  # for each A its first pair
    ends: list[int]  # the same, and the end
    reached: list[int]  # the same as b
    # For 1, 2, ... devices in B that are not in A: these pairs, the pairs without the last of these devices, and the
    # place of A and this device in an array with a row for each set and a column for each device.
    by_size: list[tuple[Any, Any, Any]]


@lru_cache(maxsize=16)
def _sets(n: int, first: int) -> _Sets:
    """Return the pairs of sets of n devices, written as binary numbers; the least A is ``first``."""
    import numpy as np

    # Digit v of a number in base 3: whether device v is in neither set, in B, or in both.
    digits = np.arange(3**n)[:, None] // 3 ** np.arange(n) % 3
    bits = 1 << np.arange(n)
    a, b = (digits == 2) @ bits, (digits > 0) @ bits
    order = np.lexsort((b, a))
    order = order[a[order] >= first]
    a, b, digits = a[order], b[order], digits[order]
    number = np.zeros(3**n, dtype=np.intp)
    number[order] = np.arange(len(order))
    size = (digits == 1).sum(axis=1)
    last = n - 1 - (digits[:, ::-1] == 1).argmax(axis=1)  # of pairs with a device that is in B only
    without = number[np.where(size > 0, order - 3**last, order)]
    start = np.searchsorted(a, np.arange(1 << n))
    groups = [np.flatnonzero(size == k) for k in range(1, n + 1)]
    by_size = [(group, without[group], a[group] * n + last[group]) for group in groups]
    return _Sets(a, b, start, [*start.tolist(), len(a)], b.tolist(), by_size)


class _Exact:
    """The cheapest trees. ``least[s][A]``: the least price of reaching all devices from the set A in steps s, s + 1,
    ...; with a root, A has the other devices only."""

    def __init__(self, costs: list[Any], root: int | None) -> None:
        import numpy as np

        self.root, self.costs = root, costs
        self.others = [k for k in range(len(costs[0])) if k != root]
        self.n = len(self.others)
        self.sets = _sets(self.n, 1 if root is None else 0)
        full, first = (1 << self.n) - 1, 0 if root is not None else 1
        different = {id(cost): cost for cost in costs}
        # For each array of costs and each device the prices of the hops to it.
        self.into = {key: cost.T.tolist() for key, cost in different.items()}
        prices = dict(zip(different, self._prices(np.array(list(different.values()))), strict=True))
        after = np.full(full + 1, np.inf)
        after[full] = 0.0
        self.least = [after]
        self.choices: list[Any] = []
        for cost in reversed(costs):
            values = prices[id(cost)] + after[self.sets.b]
            after = np.full(full + 1, np.inf)
            after[first:] = np.minimum.reduceat(values, self.sets.start[first:])
            self.least.append(after)
            self.choices.append(values)
        self.least.reverse()
        self.choices.reverse()

    def _prices(self, costs: Any) -> Any:
        """Return, for each of some arrays of costs, the price of each pair of sets."""
        import numpy as np

        sets, n, count = self.sets, self.n, len(costs)
        least = np.full((1 << n, n, count), np.inf)  # of a hop from some device of a set
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
        """Return the set in which only the root is."""
        return 0 if self.root is not None else 1 << root

    def price(self, root: int, start: int) -> float:
        return float(self.least[start][self._root_set(root)])

    def edges(self, root: int, start: int) -> list[Edge]:
        reached, senders, found = self._root_set(root), [root], list[Edge]()
        outside = [] if self.root is None else [root]
        for step in range(start, len(self.choices)):
            first, end = self.sets.ends[reached], self.sets.ends[reached + 1]
            if end - first == 1:  # all devices are reached
                break
            after = self.sets.reached[first + int(self.choices[step][first:end].argmin())]
            new = [v for k, v in enumerate(self.others) if (after & ~reached) >> k & 1]
            if len(senders) == 1:
                found += [(step, root, v) for v in new]
            else:
                into = self.into[id(self.costs[step])]
                found += [(step, min(senders, key=into[v].__getitem__), v) for v in new]
            senders = [*outside, *(v for k, v in enumerate(self.others) if after >> k & 1)]
            reached = after
        return found


class _Grown:
    """Trees that grow device by device, by the least of the price of a hop plus a part of the price of the path to
    it."""

    def __init__(self, costs: list[Any]) -> None:
        import numpy as np

        self.costs = costs
        self.n, self.steps = len(costs[0]), len(costs)
        # For each step the least price of each hop in this step or a later one, and the step of this price.
        self.later = [np.full((self.n, self.n), np.inf)]
        self.when = [np.full((self.n, self.n), self.steps)]
        for step, cost in reversed(list(enumerate(costs))):
            closer = cost <= self.later[-1]
            self.later.append(np.where(closer, cost, self.later[-1]))
            self.when.append(np.where(closer, step, self.when[-1]))
        self.later.reverse()
        self.when.reverse()
        self._trees: dict[tuple[int, int], tuple[float, list[Edge]]] = {}

    def price(self, root: int, start: int) -> float:
        return self._tree(root, start)[0]

    def edges(self, root: int, start: int) -> list[Edge]:
        return self._tree(root, start)[1]

    def _tree(self, root: int, start: int) -> tuple[float, list[Edge]]:
        if (root, start) not in self._trees:
            found = [self._grow(root, start, part) for part in _PARTS_OF_PATHS]
            self._trees[root, start] = min([*found, self._earliest_tree(root, start)], key=lambda tree: tree[0])
        return self._trees[root, start]

    def _grow(self, root: int, start: int, part: float) -> tuple[float, list[Edge]]:
        import numpy as np

        total, found = 0.0, []
        sender = np.full(self.n, root)
        step = self.when[start][root].copy()
        price = self.later[start][root].copy()
        rank = price.copy()
        missing = np.ones(self.n, dtype=bool)
        missing[root] = False
        rank[root] = np.inf
        for _ in range(self.n - 1):
            v = int(rank.argmin())
            if rank[v] == np.inf:
                return np.inf, []
            total += float(price[v])
            at = int(step[v])
            found.append((at, int(sender[v]), v))
            far = rank[v] * part
            missing[v] = False
            rank[v] = np.inf
            better = missing & (self.later[at + 1][v] + far < rank)
            rank = np.where(better, self.later[at + 1][v] + far, rank)
            price = np.where(better, self.later[at + 1][v], price)
            step, sender = np.where(better, self.when[at + 1][v], step), np.where(better, v, sender)
        return total, sorted(found)

    def _earliest_tree(self, root: int, start: int) -> tuple[float, list[Edge]]:
        """Return a tree that reaches every device as early as possible, over the cheapest of such hops."""
        import numpy as np

        reached = np.zeros(self.n, dtype=bool)
        reached[root] = True
        total, found = 0.0, []
        for step in range(start, self.steps):
            ways = np.where(reached[:, None], self.costs[step], np.inf)
            senders = ways.argmin(axis=0)
            prices = ways[senders, np.arange(self.n)]
            new = np.flatnonzero(~reached & (prices < np.inf))
            found += [(step, int(senders[v]), int(v)) for v in new]
            total += float(prices[new].sum())
            reached[new] = True
        return (total, found) if reached.all() else (float("inf"), [])
