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
    """All pairs of sets A and B of devices with A within B, sorted by A."""

    a: Any
    b: Any
    start: Any  # for each A its first pair, and the end
    without: Any  # for each pair, the pair of A and B without its last device that is not in A; -1: A = B
    last: Any  # this device
    by_size: list[Any]  # the pairs with 1, 2, ... devices in B that are not in A


@lru_cache(maxsize=16)
def _sets(n: int, first: int) -> _Sets:
    """Return the pairs of sets of n devices, written as binary numbers; the least A is ``first``."""
    import numpy as np

    pairs = [(a, b) for a in range(first, 1 << n) for b in range(a, 1 << n) if a & b == a]
    number = {pair: k for k, pair in enumerate(pairs)}
    more = [b & ~a for a, b in pairs]
    last = [new.bit_length() - 1 for new in more]
    without = [number.get((a, b & ~(1 << v)), -1) if b != a else -1 for (a, b), v in zip(pairs, last, strict=True)]
    size = np.array([new.bit_count() for new in more])
    a, b = np.array(pairs).T
    start = np.concatenate([np.searchsorted(a, np.arange(1 << n)), [len(pairs)]])
    by_size = [np.flatnonzero(size == k) for k in range(1, n + 1)]
    return _Sets(a, b, start, np.array(without), np.array(last), by_size)


class _Exact:
    """The cheapest trees. ``least[s][A]``: the least price of reaching all devices from the set A in steps s, s + 1,
    ...; with a root, A has the other devices only."""

    def __init__(self, costs: list[Any], root: int | None) -> None:
        import numpy as np

        self.root = root
        self.others = [k for k in range(len(costs[0])) if k != root]
        self.n = len(self.others)
        self.sets = _sets(self.n, 1 if root is None else 0)
        full = (1 << self.n) - 1
        after = np.full(full + 1, np.inf)
        after[full] = 0.0
        self.least = [after]
        self.choices: list[Any] = []
        self.senders: list[Any] = []
        known: tuple[Any, Any, Any] | None = None
        for cost in reversed(costs):
            if known is None or known[0] is not cost:
                known = cost, *self._prices(cost)
            _, senders, prices = known
            values = prices + after[self.sets.b]
            after = np.full(full + 1, np.inf)
            after[self.sets.a[0] :] = np.minimum.reduceat(values, self.sets.start[self.sets.a[0] : -1])
            self.least.append(after)
            self.choices.append(values)
            self.senders.append(senders)
        for listed in (self.least, self.choices, self.senders):
            listed.reverse()

    def _prices(self, cost: Any) -> tuple[Any, Any]:
        """Return the cheapest sender in each set to each device, and the price of each pair of sets."""
        import numpy as np

        sets, n = self.sets, self.n
        least, sender = np.full((1 << n, n), np.inf), np.zeros((1 << n, n), dtype=np.intp)
        if self.root is not None:
            least[0], sender[0] = cost[self.root][self.others], self.root
        for k, u in enumerate(self.others):
            half, price = slice(0, 1 << k), cost[u][self.others]
            closer = price < least[half]
            least[1 << k : 2 << k] = np.where(closer, price, least[half])
            sender[1 << k : 2 << k] = np.where(closer, u, sender[half])
        prices = np.zeros(len(sets.a))
        for group in sets.by_size:
            prices[group] = prices[sets.without[group]] + least[sets.a[group], sets.last[group]]
        return sender, prices

    def _only(self, root: int) -> int:
        """Return the set in which only the root is."""
        return 0 if self.root is not None else 1 << root

    def price(self, root: int, start: int) -> float:
        return float(self.least[start][self._only(root)])

    def edges(self, root: int, start: int) -> list[Edge]:
        reached, found = self._only(root), []
        for step in range(start, len(self.choices)):
            first, end = self.sets.start[reached], self.sets.start[reached + 1]
            after = int(self.sets.b[first + int(self.choices[step][first:end].argmin())])
            new = after & ~reached
            found += [
                (step, int(self.senders[step][reached, v]), self.others[v]) for v in range(self.n) if new >> v & 1
            ]
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
            found = [self._grown(root, start, part) for part in _PARTS_OF_PATHS]
            self._trees[root, start] = min([*found, self._early(root, start)], key=lambda tree: tree[0])
        return self._trees[root, start]

    def _grown(self, root: int, start: int, part: float) -> tuple[float, list[Edge]]:
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

    def _early(self, root: int, start: int) -> tuple[float, list[Edge]]:
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
