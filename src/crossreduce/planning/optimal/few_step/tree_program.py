"""The linear program that divides a buffer among trees of limited depth.

Input: a topology, the roots, the number of steps. Output: trees with shares, and the time that they need.

A column c is a tree, or for an all-reduce a tree into a root and one out of it. Each of its hops has a step. Variables:
x_c, the amount of column c, is the part of the buffer that it carries; t_s is the time of step s. The program minimises
the sum of t_s. The amounts of each root add up to the root's part of the buffer. No link carries more in a step than
its bandwidth times t_s. If the buffer is cut into many pieces, all steps are in progress at the same time. Then there
is only one t, and a link carries the sum over all steps.

There are very many trees, so they are found one by one (column generation). The dual of a solution gives each link a
price in each step, and the cheapest trees at these prices are added. The first trees are found with prices that grow
with the load of all trees so far (multiplicative weights), which takes less time than many linear programs. A search
begins with the trees that the search with fewer steps uses. At any prices, the price of the cheapest trees proves a
lower limit of the time. In the end, the amounts are rounded to few equal units.

Source: Garg & Könemann, Faster and simpler algorithms for multicommodity flow, SIAM J. Comput. 37(2), 2007
(multiplicative weights); Wentges, Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming, ITOR 4(2),
1997 (prices between the dual and the best known ones); Cai et al., Synthesizing Optimal Collective Algorithms, PPoPP
2021 (SCCL: steps, rounds and chunks).
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

from ....kernels import native
from ....topology import Topology
from .switch_routes import hops

MOST_EXACT: Final = 10  # devices up to which the cheapest trees are found; with more, trees grow greedily
GAP: Final = 0.01  # the search ends when the time exceeds the proved limit by at most this part
# Before the first linear program, this many rounds find one tree per root each. With several roots they end early after
# n rounds, for n devices, without a new tree (on 26 topologies of up to 16 devices, this does not change the plans).
_FIRST_ROUNDS: Final = 12
_FIRST_ROUNDS_GREEDY: Final = 5  # if trees are not the cheapest
_ROUNDS_PER_STEP: Final = 6  # additional rounds for each step with a single root; 2 if trees are not the cheapest
REFINED: Final = 0.95  # mostly, the later programs reduce the time of the first one at most by this factor
_STEEP: Final = 8.0  # how fast prices grow with the load of a link, in the first rounds
_MOST_PROGRAMS: Final = 6  # 3 if trees are not the cheapest
_MIXES: Final = (1.0, 0.6, 0.3)  # trees are searched at means of the dual, with these weights, and the best prices
_LEAST: Final = 1e-9  # smaller amounts are rounding errors of a solution
# Amounts are rounded to integer numbers of equal units, few of them, since each column becomes a chunk of the schedule.
# The columns of a group have a fixed part of the buffer together: those of a root, or all if any roots are allowed.
_LOSS: Final = 0.02  # rounding may increase the time by this part
_UNITS: Final = (1, 2, 3, 4, 6, 8, 16, 32)  # the numbers of units per group that are tried
_COLUMNS_PER_UNIT: Final = 2  # with more columns per unit than this, rounding costs too much time
_MOST_MOVED: Final = 16  # with more units per group, none are moved to other columns afterwards
_MOST_PASSES: Final = 10  # the most passes over all units that move some of them
_FINE: Final = 5040  # 7!, divisible by 2 to 10: most exact shares are multiples of 1 / _FINE

Edge = tuple[int, int, int, int]  # step, sender, receiver, number of the route in ``Hops.routes``


class Column(NamedTuple):
    """A tree out of a root, and perhaps a tree into the root, as a variable of the linear program."""

    root: int
    into: tuple[Edge, ...]  # (): no tree into the root
    out: tuple[Edge, ...]


# The least time with some columns, their amounts, the prices of links by row, and the price of a column by group.
_Solution = tuple[float, Any, Any, list[float]]


class Shares(NamedTuple):
    """A solution, with the amounts of the columns in units."""

    columns: tuple[tuple[int, Column], ...]  # (number of units, column)
    units: int  # of the whole buffer
    time: float  # the sum of t_s for 1 GB, in seconds, after rounding
    limit: float  # with up to ``MOST_EXACT`` devices, no solution takes less time


@lru_cache(maxsize=512)
def share_among_trees(
    topology: Topology, roots: int | None, steps: int, *, many: bool, paired: bool = False
) -> Shares | None:
    """Return trees with shares of the buffer, or ``None`` if trees of so few steps cannot reach all devices.

    Args:
      topology: a neutral topology, all of whose devices take part.
      roots: the number of a device: trees out of it, as in a broadcast. -1: trees out of all devices, with equal parts
        of the buffer, as in an all-gather. ``None``: trees out of any devices.
      steps: the number of steps.
      many: whether the buffer is cut into many pieces, so that all steps are in progress at the same time.
      paired: whether each column also has a tree into its root. The two trees have ``steps`` steps together. If all
        links are equal in both directions, the tree into the root is the tree out of it, backwards. Then each tree has
        half of the steps, rounded up, and ``Column.into`` is empty.

    >>> mesh = Topology.full_mesh(4, gb_per_s=10)
    >>> shares = share_among_trees(mesh, 0, 2, many=True)
    >>> round(1 / shares.time, 6), [units for units, _ in shares.columns], shares.units
    (30.0, [1, 1, 1], 3)
    """
    first = _begun(topology, roots, steps, many, paired)
    return None if first is None else _Search(topology, roots, steps, many, paired).shares(first)


def expected_time(
    topology: Topology, roots: int | None, steps: int, *, many: bool, paired: bool = False
) -> float | None:
    """Return the time of the shares of ``share_among_trees`` for 1 GB, in seconds, or an estimate of this time.

    For one piece on few devices, it is estimated from the first linear program, which is much quicker. There, later
    programs reduce the time little.
    """
    if many or len(topology.devices) > MOST_EXACT:
        shares = share_among_trees(topology, roots, steps, many=many, paired=paired)
        return shares and shares.time
    first = _begun(topology, roots, steps, many, paired)
    if first is None or first.solution is None:
        return None
    return first.solution[0] / first.scale * REFINED


def least_time(topology: Topology, roots: int | None, steps: int, *, many: bool, paired: bool = False) -> float:
    """Return a lower limit of ``expected_time``, before any linear program is solved; 0 if it has no value."""
    first = _begun(topology, roots, steps, many, paired)
    if first is None or not first.exact:
        return 0.0
    return first.limit / first.scale * (1.0 if many else REFINED)


@lru_cache(maxsize=64)
def _begun(topology: Topology, roots: int | None, steps: int, many: bool, paired: bool) -> _Search | None:
    """Return a search with its first columns. It begins with the trees that the search with fewer steps uses.

    Return ``None`` if there are no trees of so few steps, and where the compiled module was not built.
    """
    if native() is None:
        return None
    fewer = _begun(topology, roots, steps - 1 - paired, many, paired) if steps > 1 + paired else None
    search = _Search(topology, roots, steps, many, paired)
    return search if search.begin(fewer.used if fewer else {}) else None


class _Search:
    """The columns and the linear program.

    Arrays of loads and prices have a row per step, or one row if all steps are in progress at the same time, and in
    each row an entry per link.
    """

    def __init__(self, topology: Topology, roots: int | None, steps: int, many: bool, paired: bool) -> None:
        import numpy as np

        self.hops, self.many = hops(topology), many
        self.mirrored = paired and topology.symmetric  # trees into a root are those out of it, backwards
        self.paired = paired and not topology.symmetric  # trees into a root are searched, too
        self.steps = (steps + 1) // 2 if self.mirrored else steps
        self.roots = list(range(self.hops.n)) if roots is None or roots < 0 else [roots]
        self.groups = self.hops.n if roots == -1 else 1  # groups of columns with a fixed part of the buffer
        self.rows = 1 if many else self.steps
        self.columns: dict[Column, Any] = {}  # by column: its load on each link in each row, for an amount of 1
        self.limit, self.best = 0.0, np.zeros(0)  # the greatest lower limit of the time, and the prices that prove it
        self.width = np.tile(self.hops.bandwidth, (self.rows, 1))
        self.exact = self.hops.n <= MOST_EXACT
        self.scale = float(self.hops.fastest) / (2 if self.mirrored and not many else 1)  # divides times, for 1 GB
        back = []  # the links that carry the same as each link, in the other direction
        if self.mirrored and many:
            number = {(link.src, link.dst): k for k, link in enumerate(topology.links)}
            back = [number[link.dst, link.src] for link in topology.links]
        numbers = self.hops.n, self.hops.links, self.hops.routes, self.roots, back, self.steps
        self.trees = native().TreeSearch(*numbers, many, self.paired)

    def begin(self, known: dict[Column, Any]) -> bool:
        """Add the ``known`` columns and the first other ones. Return whether there are trees out of all roots."""
        import numpy as np

        prices = np.tile(1 / self.hops.bandwidth / self.hops.links, (self.rows, 1))
        load = np.zeros((self.rows, self.hops.links))
        for column, known_load in known.items():  # perhaps of fewer steps
            self.columns[column] = np.zeros_like(load)
            self.columns[column][: len(known_load)] = known_load
        rounds, more = (_FIRST_ROUNDS, _ROUNDS_PER_STEP) if self.exact else (_FIRST_ROUNDS_GREEDY, 2)
        without_new = 0  # the number of rounds since the last new tree
        for turn in range(rounds + more * self.steps if len(self.roots) == 1 else rounds):
            before = len(self.columns)
            cheapest = self._add_cheapest(prices)
            if cheapest is None:
                return False
            without_new = without_new + 1 if len(self.columns) == before else 0
            if without_new == self.hops.n and len(self.roots) > 1:
                break
            for column in cheapest:
                load += self.columns[column]
            busy = load / self.width
            most = busy.max(axis=1, keepdims=True)
            weights = np.exp(_STEEP * math.sqrt(turn + 1) * (busy / np.maximum(most, 1e-12) - 1))
            prices = weights / (weights * self.width).sum(axis=1, keepdims=True)
        return True

    @cached_property
    def solution(self) -> _Solution | None:
        """The solution of the first program, or ``None`` if it fails."""
        return self._solve()

    @property
    def used(self) -> dict[Column, Any]:
        """The columns with an amount above 0 in the first solution, with their loads."""
        amounts = () if self.solution is None else self.solution[1]
        return {each: load for (each, load), x in zip(self.columns.items(), amounts, strict=False) if x > _LEAST}

    def shares(self, first: _Search) -> Shares | None:
        """Return the shares of the last solution, after adding columns to ``first`` and solving several programs."""
        self.columns = dict(first.columns)
        self.limit, self.best, solution = first.limit, first.best, first.solution
        if solution is None:
            return None
        for _ in range(_MOST_PROGRAMS - 1 if self.exact else 2):
            time, _, dual, paid = solution
            before = len(self.columns)
            for part in _MIXES:
                self._add_cheapest(part * dual + (1 - part) * self.best, paid)
            if len(self.columns) == before or (self.exact and time <= self.limit * (1 + GAP)):
                break
            next_solution = self._solve()
            if next_solution is None:
                break
            solution = next_solution
        return self._in_units(solution[1], solution[0])

    def _add_cheapest(self, prices: Any, paid: list[float] | None = None) -> list[Column] | None:
        """Add the cheapest column of each root at the given prices, and return these columns.

        ``paid`` is the price of a column by group: only cheaper columns are added. Return ``None`` if no root reaches
        all devices, or if a root with a fixed part of the buffer does not.
        """
        most = [
            math.inf if paid is None else paid[min(k, self.groups - 1)] * (1 - 1e-7) for k in range(len(self.roots))
        ]
        found = self.trees.cheapest(prices.ravel().tolist(), most)
        columns = list[Column]()
        for root, (_, into, out, load) in zip(self.roots, found, strict=True):
            if out:
                columns.append(Column(root, into, out))
                self._add(columns[-1], load)
        least = [price for price, *_ in found]
        if min(least) == math.inf or (self.groups > 1 and max(least) == math.inf):
            return None
        limit = sum(least) / len(least) if self.groups > 1 else min(least)
        if limit > self.limit:
            self.limit, self.best = limit, prices
        return columns

    def _add(self, column: Column, load: bytes) -> None:
        """Add a column with its load, if it is new."""
        import numpy as np

        if column not in self.columns:
            self.columns[column] = np.frombuffer(load).reshape(self.rows, self.hops.links)

    def _solve(self) -> _Solution | None:
        """Return the solution with the columns so far.

        Return ``None`` if HiGHS finds no solution, because bandwidths differ too much.
        """
        import numpy as np
        from scipy.optimize import linprog

        count, parts = len(self.columns), self.groups  # the variables are the amounts, then the times of the rows
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
        """Return the solution with amounts that are rounded to units. ``exact`` is the time with exact amounts."""
        import numpy as np

        used = np.flatnonzero(amounts > _LEAST)
        all_columns = list(self.columns)
        columns = [all_columns[k] for k in used]
        loads = np.array([self.columns[column] / self.width for column in columns])
        group = np.array([min(column.root, self.groups - 1) for column in columns])
        counts, units, time = round_to_units(amounts[used], loads, group, exact)
        listed = tuple((int(count), column) for count, column in zip(counts, columns, strict=True) if count)
        return Shares(listed, units, time / self.scale, self.limit / self.scale)


def round_to_units(amounts: Any, loads: Any, group: Any, exact: float) -> tuple[Any, int, float]:
    """Return (number of units of each column, number of units of the whole buffer, time).

    Args:
      amounts: the part of the buffer that each column carries.
      loads: for each column, the seconds that each link takes in each row if the column carries the whole buffer.
      group: the group of each column. The groups have equal parts of the buffer.
      exact: the time with exact amounts.
    """
    import numpy as np

    groups = [np.flatnonzero(group == k) for k in range(int(group.max()) + 1)]
    best, fine = None, _fine_shares(amounts, groups)
    exact_units = int(fine.sum()) // len(groups)
    loss = 0.0 if exact_units <= _UNITS[-1] else _LOSS  # few units are enough for the exact amounts: lose nothing
    enough = [units for units in _UNITS if units * len(groups) * _COLUMNS_PER_UNIT >= len(amounts)]
    for units in (*(units for units in enough if units < exact_units), 0):  # 0: take the units of ``fine``
        counts = _distribute_units(amounts, loads, groups, units) if units else fine
        total_units = int(counts.sum())
        time = float((counts[:, None, None] * loads).sum(axis=0).max(axis=1).sum()) / total_units
        if best is None or time < best[2]:
            best = counts, total_units, time
        if time <= exact * (1 + loss + 1e-9):
            break
    assert best is not None
    return best


def _distribute_units(amounts: Any, loads: Any, groups: list[Any], units: int) -> Any:
    """Return the number of units of each column if each group has ``units`` units.

    First, the amount of each column is rounded down to units. Each remaining unit is given to the column with which the
    time is least. Then units are moved between columns of a group as long as this makes the loads more even.
    """
    import numpy as np

    all_units = units * len(groups)
    counts = np.floor(amounts * all_units + 1e-6)
    total = (counts[:, None, None] * loads).sum(axis=0)

    def cost(total: Any, steep: float) -> Any:
        """Return about the sum of the greatest loads of all rows. Other loads that are nearly as great add a little."""
        most = total.max(axis=-1, keepdims=True)
        return (most[..., 0] + np.log(np.exp(steep * (total - most)).sum(axis=-1)) / steep).sum(axis=-1)

    for group in groups:
        for _ in range(units - int(counts[group].sum())):
            missing = amounts[group] * all_units - counts[group]
            chosen = group[(cost(total + loads[group], 3.0) - 1e-3 * missing).argmin()]
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
    """Return the number of units of each column for the largest unit that divides all amounts exactly.

    If this unit would be below 1 / ``_FINE`` of the buffer, return amounts that are rounded to about this unit.

    >>> import numpy as np
    >>> _fine_shares(np.array([2 / 7, 3 / 14, 0.25, 0.25]), [np.array([0, 1]), np.array([2, 3])])
    array([8., 6., 7., 7.])
    """
    import numpy as np

    parts = len(groups)
    possible = np.arange(parts, _FINE, parts)
    for amount in amounts:  # keep the numbers of units for which this amount is an integer number of units
        possible = possible[abs(amount * possible - np.rint(amount * possible)) < 1e-6]
    for units in possible.tolist():
        counts = np.rint(amounts * units)
        if counts.sum() == units:
            return counts
    units = _FINE // parts * parts
    counts = np.floor(amounts * units)
    for group in groups:
        rest = units // parts - int(counts[group].sum())
        counts[group[np.argsort(counts[group] - amounts[group] * units, kind="stable")[:rest]]] += 1
    return counts
