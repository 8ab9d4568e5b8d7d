"""The linear program that shares a buffer among trees of limited depth.

Input: a topology, the collective, the number of steps. Output: trees with shares, and the time that they need.

Variables: x_c, the amount of column c, a tree (for an all-reduce a tree into a root and one out of it) whose hops each
have a step; t_s, the time of step s. Minimise the sum of t_s such that the amounts of each root add up to its part of
the buffer, and that no link carries more in a step than its bandwidth times t_s. If the buffer is cut into many pieces,
all steps are in progress at the same time: there is one t, and a link carries the sum over all steps.

There are very many trees, so they are found one by one (column generation): a solution's dual gives each link a price
in each step, and the cheapest trees at these prices are added. The first ones are found with prices that grow with the
load of all trees so far (multiplicative weights), which takes less time than to solve the program again and again. A
search begins with the trees that the search with fewer steps uses. At any prices the cheapest trees prove a lower limit
of the time. The amounts are then rounded to few equal units.

Source: Garg & Könemann, Faster and simpler algorithms for multicommodity flow, SIAM J. Comput. 37(2), 2007
(multiplicative weights); Wentges, Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming, ITOR 4(2),
1997 (prices between the dual and the best known ones); Cai et al., Synthesizing Optimal Collective Algorithms, PPoPP
2021 (SCCL: steps, rounds and chunks).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ....topology import Topology
from .shallow_trees import MOST_EXACT, Trees, cheapest_trees
from .switch_routes import hops

GAP: Final = 0.01  # the search ends when the time is at most this part above the proved limit
# Sets of trees that are found before the first linear program; with several roots, fewer if as many sets one after
# another as there are devices have no new tree (measured on 26 topologies of up to 16 devices: the plans are the same).
_WARM: Final = 12
_WARM_GREEDY: Final = 5  # the same, if trees are not exact
_WARM_PER_STEP: Final = 6  # and more for each step, if each set has only one tree; 2, if it is not exact
REFINED: Final = 0.95  # the part of the time after the first program that the later ones mostly end with
_STEEP: Final = 8.0  # how fast prices grow with the load of a link, in the first trees
_MOST_PROGRAMS: Final = 6  # 3, if trees are not exact
_MIXES: Final = (1.0, 0.6, 0.3)  # parts of the new prices in those that find trees; the rest are the best so far
_LEAST: Final = 1e-9  # smaller amounts are rounding errors of a solution
# Amounts are rounded to whole numbers of few equal units: a chunk of a schedule is a share of them.
_LOSS: Final = 0.02  # the part of the time that rounding may cost
_UNITS: Final = (1, 2, 3, 4, 6, 8, 16, 32)  # into how many units each group's part is divided
_COLUMNS_PER_UNIT: Final = 2  # with more columns than this, so few units cost too much time
_MOST_MOVED: Final = 16  # with more units, none are moved afterwards
_MOST_PASSES: Final = 10  # over all units; a pass that moves none is the last one
_FINE: Final = 5040  # 7!, divisible by 2 to 10: most exact shares are multiples of its inverse

Edge = tuple[int, int, int, int]  # step, sender, receiver, route


class Column(NamedTuple):
    """A tree into a root, or none, and a tree out of it."""

    root: int
    into: tuple[Edge, ...]
    out: tuple[Edge, ...]


class Shares(NamedTuple):
    """A solution."""

    columns: tuple[tuple[int, Column], ...]  # each with its units
    units: int  # of the whole buffer
    time: float  # the sum of t_s for 1 GB, in seconds, after rounding
    limit: float  # with up to ``MOST_EXACT`` devices, no solution takes less


class _Begun(NamedTuple):
    """A search after its first linear program."""

    columns: dict[Column, Any]  # with the load of each link in each row, for an amount of 1
    used: list[Column]  # those with an amount
    limit: float  # the greatest limit
    best: Any  # the prices that prove it
    solved: tuple[float, Any, Any, list[float]]  # see ``_Search.solved``
    time: float  # of the program, for 1 GB, in seconds


@lru_cache(maxsize=512)
def share_among_trees(
    topology: Topology, roots: int | None, steps: int, *, many: bool, paired: bool = False
) -> Shares | None:
    """Return shares of trees on a neutral topology whose devices are all members; ``None``: a device is not reached.

    Args:
      roots: a device: trees out of it, as in a broadcast; -1: trees out of all devices with equal parts, as in an
        all-gather; ``None``: trees out of any roots.
      steps: the number of steps.
      many: the buffer is cut into many pieces.
      paired: there is also a tree into each root; the trees of a pair have ``steps`` steps together. If all links are
        equal in both directions, this is the tree out of the root backwards, so half of the steps, rounded up, are for
        each, and ``Column.into`` is empty.

    >>> mesh = Topology.full_mesh(4, gb_per_s=10)
    >>> found = share_among_trees(mesh, 0, 2, many=True)
    >>> round(1 / found.time, 6), [units for units, _ in found.columns], found.units
    (30.0, [1, 1, 1], 3)
    """
    begun = _begin_search(topology, roots, steps, many, paired)
    return begun and _Search(topology, roots, steps, many, paired).shares(begun)


def expected_time(
    topology: Topology, roots: int | None, steps: int, *, many: bool, paired: bool = False
) -> float | None:
    """Return the time of ``shared``, or a time near it that is known much sooner, after one linear program.

    Where trees are exact and for one piece, later programs make the time mostly at most a twentieth less.
    """
    if many or len(topology.devices) > MOST_EXACT:
        found = share_among_trees(topology, roots, steps, many=many, paired=paired)
        return found and found.time
    begun = _begin_search(topology, roots, steps, many, paired)
    return begun and begun.time * REFINED


@lru_cache(maxsize=64)
def _begin_search(topology: Topology, roots: int | None, steps: int, many: bool, paired: bool) -> _Begun | None:
    """Return a search after its first program; it begins with the trees that are used with fewer steps."""
    fewer = _begin_search(topology, roots, steps - 1 - paired, many, paired) if steps > 1 + paired else None
    return _Search(topology, roots, steps, many, paired).begin(fewer.used if fewer else [])


class _Search:
    def __init__(self, topology: Topology, roots: int | None, steps: int, many: bool, paired: bool) -> None:
        import numpy as np

        self.hops, self.many = hops(topology), many
        self.mirrored = paired and topology.symmetric
        self.paired = paired and not topology.symmetric
        self.steps = (steps + 1) // 2 if self.mirrored else steps
        self.roots = list(range(self.hops.n)) if roots is None or roots < 0 else [roots]
        self.groups = self.hops.n if roots == -1 else 1  # of roots whose parts of the buffer are fixed
        self.rows = 1 if many else self.steps
        self.columns: dict[Column, Any] = {}  # with the load of each link in each row, for an amount of 1
        self.limit, self.best = 0.0, np.zeros(0)  # the greatest limit, and the prices that prove it
        self.width = np.tile(self.hops.bandwidth, (self.rows, 1))
        self.exact = self.hops.n <= MOST_EXACT
        self.scale = float(self.hops.fastest) / (2 if self.mirrored and not many else 1)
        if self.mirrored:
            number = {(link.src, link.dst): k for k, link in enumerate(topology.links)}
            self.back = np.array([number[link.dst, link.src] for link in topology.links])

    def begin(self, known: list[Column]) -> _Begun | None:
        """Return the search after its first program; ``known``: columns to begin with."""
        import numpy as np

        prices = np.tile(1 / self.hops.bandwidth / self.hops.links, (self.rows, 1))
        load = np.zeros((self.rows, self.hops.links))
        for column in known:
            self._add(column)
        warm, more = (_WARM, _WARM_PER_STEP) if self.exact else (_WARM_GREEDY, 2)
        same = 0  # sets one after another without a new tree
        for turn in range(warm + more * self.steps if len(self.roots) == 1 else warm):
            before = len(self.columns)
            found = self._add_cheapest(prices)
            if found is None:
                return None
            same = same + 1 if len(self.columns) == before else 0
            if same == self.hops.n and len(self.roots) > 1:
                break
            for column in found:
                load += self.columns[column]
            busy = load / self.width
            most = busy.max(axis=1, keepdims=True)
            weights = np.exp(_STEEP * math.sqrt(turn + 1) * (busy / np.maximum(most, 1e-12) - 1))
            prices = weights / (weights * self.width).sum(axis=1, keepdims=True)
        solved = self.solve()
        if solved is None:
            return None
        used = [column for column, amount in zip(self.columns, solved[1], strict=True) if amount > _LEAST]
        return _Begun(self.columns, used, self.limit, self.best, solved, solved[0] / self.scale)

    def shares(self, begun: _Begun) -> Shares:
        """Return the solution."""
        self.columns = dict(begun.columns)
        self.limit, self.best, solved = begun.limit, begun.best, begun.solved
        for _ in range(_MOST_PROGRAMS - 1 if self.exact else 2):
            time, amounts, dual, paid = solved
            known = len(self.columns)
            for part in _MIXES:
                self._add_cheapest(part * dual + (1 - part) * self.best, paid)
            if len(self.columns) == known or (self.exact and time <= self.limit * (1 + GAP)):
                break
            further = self.solve()
            if further is None:
                break
            solved = further
        time, amounts, *_ = solved
        return self._in_units(amounts, time)

    def _add_cheapest(self, prices: Any, paid: list[float] | None = None) -> list[Column] | None:
        """Add the cheapest column of each root, and return them; ``None``: no root reaches all devices.

        ``paid``: only columns that cost less than this, by group, are added.
        """
        paired_prices = prices + prices[:, self.back] if self.mirrored and self.many else prices
        different, best = self.hops.costs(paired_prices)
        costs, routes = ((list(of_rows) * self.steps)[: self.steps] for of_rows in (different, best.tolist()))
        root = self.roots[0] if len(self.roots) == 1 else None
        out = cheapest_trees(costs, root)
        into = cheapest_trees(_reverse_prices(costs), root) if self.paired else None
        least, found = [], []
        for k, root in enumerate(self.roots):
            start, price = 0, out.price(root, 0)
            if into is not None:
                both = ((into.price(root, self.steps - k) + out.price(root, k), k) for k in range(self.steps + 1))
                price, start = min(both)
            least.append(price)
            if price == math.inf or (paid is not None and price >= paid[min(k, self.groups - 1)] * (1 - 1e-7)):
                continue
            first = () if into is None else self._edges(into, root, self.steps - start, routes, turned=True)
            found.append(Column(root, first, self._edges(out, root, start, routes)))
            self._add(found[-1])
        if min(least) == math.inf or (self.groups > 1 and max(least) == math.inf):
            return None
        limit = sum(least) / len(least) if self.groups > 1 else min(least)
        if limit > self.limit:
            self.limit, self.best = limit, prices
        return found

    def _edges(
        self, trees: Trees, root: int, start: int, routes: list[Any], *, turned: bool = False
    ) -> tuple[Edge, ...]:
        found = []
        for step, u, v in trees.edges(root, start):
            edge = (self.steps - 1 - step, v, u) if turned else (step, u, v)
            found.append((*edge, routes[edge[0]][self.hops.at[edge[1:]]]))
        return tuple(sorted(found))

    def _add(self, column: Column) -> None:
        import numpy as np

        if column in self.columns:
            return
        links = self.hops.links
        used = [
            link if self.many else step * links + link
            for step, _, _, route in (*column.into, *column.out)
            for link in self.hops.routes[route]
        ]
        load = np.bincount(used, minlength=self.rows * links).reshape(self.rows, links).astype(float)
        if self.mirrored and self.many:
            load += load[:, self.back]
        self.columns[column] = load

    def solve(self) -> tuple[float, Any, Any, list[float]] | None:
        """Return the least time with these columns, their amounts, the prices, and what an amount costs, by group.

        ``None``: HiGHS finds no solution, since bandwidths are too far apart.
        """
        import numpy as np
        from scipy.optimize import linprog

        count, parts = len(self.columns), self.groups
        links = np.arange(self.rows * self.hops.links)
        loads = np.zeros((links.size, count + self.rows))
        loads[:, :count] = np.array([load.ravel() for load in self.columns.values()]).T
        loads[links, count + links // self.hops.links] = -self.width.ravel()
        sums = np.zeros((parts, count + self.rows))
        sums[[min(column.root, parts - 1) for column in self.columns], range(count)] = 1
        solution = linprog(
            np.concatenate([np.zeros(count), np.ones(self.rows)]),
            A_ub=loads,
            b_ub=np.zeros(links.size),
            A_eq=sums,
            b_eq=np.full(parts, 1 / parts),
            method="highs-ds",
        )
        if solution.status != 0:  # with exact arithmetic, any column of each group would be a solution
            return None
        prices = np.maximum(0.0, -solution.ineqlin.marginals).reshape(self.rows, self.hops.links)
        return float(solution.fun), solution.x[:count], prices, solution.eqlin.marginals.tolist()

    def _in_units(self, amounts: Any, exact: float) -> Shares:
        """Return the solution with the amounts of the columns rounded to whole units, of which the buffer has few.

        ``exact``: the time with the exact amounts.
        """
        import numpy as np

        used = np.flatnonzero(amounts > _LEAST)
        listed = list(self.columns)
        columns = [listed[k] for k in used]
        loads = np.array([self.columns[column] / self.width for column in columns])
        group = np.array([min(column.root, self.groups - 1) for column in columns])
        counts, units, time = round_to_units(amounts[used], loads, group, exact)
        found = tuple((int(count), column) for count, column in zip(counts, columns, strict=True) if count)
        return Shares(found, units, time / self.scale, self.limit / self.scale)


def _reverse_prices(costs: list[Any]) -> list[Any]:
    """Return the prices for trees into a root, which are found backwards; steps of the same prices share them."""
    turned: dict[int, Any] = {}
    return [turned.setdefault(id(cost), cost.T.copy()) for cost in reversed(costs)]


def round_to_units(amounts: Any, loads: Any, group: Any, exact: float) -> tuple[Any, int, float]:
    """Return how many units each column gets, the units of the whole buffer, and the time.

    Args:
      amounts: the part of the buffer of each column.
      loads: the seconds of each link in each step for the whole buffer, by column.
      group: the group of each column; the groups have equal parts of the buffer.
      exact: the time with exact amounts.
    """
    import numpy as np

    groups = [np.flatnonzero(group == k) for k in range(int(group.max()) + 1)]
    found, fine = None, _fine_shares(amounts, groups)
    exact_units = int(fine.sum()) // len(groups)
    loss = 0.0 if exact_units <= _UNITS[-1] else _LOSS  # these exact amounts have few units
    enough = [units for units in _UNITS if units * len(groups) * _COLUMNS_PER_UNIT >= len(amounts)]
    for units in (*(units for units in enough if units < exact_units), 0):
        counts = _move_units(amounts, loads, groups, units) if units else fine
        whole = int(counts.sum())
        time = float((counts[:, None, None] * loads).sum(axis=0).max(axis=1).sum()) / whole
        if found is None or time < found[2]:
            found = counts, whole, time
        if time <= exact * (1 + loss + 1e-9):
            break
    assert found is not None
    return found


def _move_units(amounts: Any, loads: Any, groups: list[Any], units: int) -> Any:
    """Return how many units each column gets, ``units`` in each group.

    Columns get the units of their share, rounded down; the units that are left go one by one to the column that makes
    the time least. Then units move between columns of a group as long as this makes the loads more even.
    """
    import numpy as np

    whole = units * len(groups)
    counts = np.floor(amounts * whole + 1e-6)
    total = (counts[:, None, None] * loads).sum(axis=0)

    def cost(total: Any, steep: float) -> Any:
        """Return about the sum of the greatest loads of the steps; other loads near them count a little."""
        most = total.max(axis=-1, keepdims=True)
        return (most[..., 0] + np.log(np.exp(steep * (total - most)).sum(axis=-1)) / steep).sum(axis=-1)

    for group in groups:
        for _ in range(units - int(counts[group].sum())):
            chosen = group[(cost(total + loads[group], 3.0) - 1e-3 * (amounts[group] * whole - counts[group])).argmin()]
            counts[chosen] += 1
            total = total + loads[chosen]
    for steep in (2.0, 8.0) if units <= _MOST_MOVED else ():
        for _ in range(_MOST_PASSES):
            moved = False
            for group in groups:
                for k in group[counts[group] > 0]:
                    rest = total - loads[k]
                    costs = cost(rest + loads[group], steep)
                    if costs.min() < cost(total, steep) - 1e-9:
                        target = group[costs.argmin()]
                        counts[k] -= 1
                        counts[target] += 1
                        total, moved = rest + loads[target], True
            if not moved:
                break
    return counts


def _fine_shares(amounts: Any, groups: list[Any]) -> Any:
    """Return shares as multiples of a unit, exactly if the unit is 1 / ``_FINE`` or more, else rounded.

    >>> import numpy as np
    >>> _fine_shares(np.array([2 / 7, 3 / 14, 0.25, 0.25]), [np.array([0, 1]), np.array([2, 3])])
    array([8., 6., 7., 7.])
    """
    import numpy as np

    parts = len(groups)
    possible = np.arange(parts, _FINE, parts)
    for amount in amounts:  # leaves the numbers of units of which each amount is a multiple
        possible = possible[abs(amount * possible - np.rint(amount * possible)) < 1e-6]
    for whole in possible.tolist():
        counts = np.rint(amounts * whole)
        if counts.sum() == whole:
            return counts
    whole = _FINE // parts * parts
    counts = np.floor(amounts * whole)
    for group in groups:
        rest = whole // parts - int(counts[group].sum())
        counts[group[np.argsort(counts[group] - amounts[group] * whole, kind="stable")[:rest]]] += 1
    return counts
