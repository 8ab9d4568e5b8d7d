"""Trees for one root of each orbit of a symmetry. The symmetry maps them to trees of all other roots.

If every image of a tree carries the same part of the buffer, all links of an orbit carry the same load. It is the rate,
times the number of links of the orbit that the tree uses, divided by the number of links of the orbit. So the best
trees are the optimum of a linear program with one row for each orbit of links. The solution of the program gives each
orbit a price, and cheap trees at these prices are added, as in ``bounds/column_generation.py``. A tree grows from the
root, always over the cheapest route to a new device (Prim). It is the cheapest tree if both directions of each link
cost the same, as in an all-reduce on links that are equal in both directions. Otherwise the tree may not be the
cheapest, and the rate may stay below the bound.

Source: Prim, Shortest connection networks and some generalizations, Bell System Technical J. 36(6), 1957; Gilmore &
Gomory, A linear programming approach to the cutting-stock problem, Operations Research 9(6), 1961.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final, NamedTuple

from ..bounds.linear_program import DENOMINATORS
from ..bounds.solver import Row, Rows, Solution, solve
from ..bounds.steiner import Parent
from .orbit_bound import Quotient

_MOST_ROUNDS: Final = 60  # in which trees are added
_NEAR: Final = 1e-9  # the relative error of rates in floating point
_LEAST: Final = 1e-9  # rates of trees below this part of the largest one are rounding errors
_TIGHT: Final = 1e-7  # an orbit of links limits the rate if its unused part of the bandwidth is below this
_LARGEST_PRICE: Final = 1 << 24  # the largest price of a link, as an integer; every link costs at least 1


class OrbitTree(NamedTuple):
    """A tree of one root of an orbit. The tree and its images together carry a share of the buffer."""

    root: int
    share: Fraction
    into: tuple[Parent, ...] | None  # edges to reduce over; a route lists the nodes from the child to the parent
    out: tuple[Parent, ...] | None  # edges to copy over; a route lists the nodes from the parent to the child


class _TreeColumn(NamedTuple):
    """A tree as a column of the linear program."""

    root: int
    into: tuple[Parent, ...] | None
    out: tuple[Parent, ...] | None
    used: tuple[tuple[int, int], ...]  # (orbit of links, how many of its links the tree uses)


def best_trees(
    quotient: Quotient, collective: str, weights: Mapping[int, Fraction] | None, limit: Fraction, tree_nodes: int = 0
) -> tuple[Fraction, list[OrbitTree]]:
    """Return the rate in GB/s of the best trees that were found, and the trees.

    Args:
      quotient: the topology and its orbits.
      collective: the name of the collective. Trees of an all-reduce both reduce and copy.
      weights: by orbit of roots, the part of the buffer that starts (or ends) in it. ``None``: an all-reduce.
      limit: the bound in GB/s. Trees that reach it end the search.
      tree_nodes: trees contain this many of the first nodes: devices, then switches that reduce. 0: all devices.
    """
    search = _TreeSearch(quotient, collective, weights, tree_nodes or quotient.n)
    prices = [float(max(quotient.width) / width) for width in quotient.width]
    columns = search.cheap_trees(prices)
    for _ in range(_MOST_ROUNDS):
        single = search.single_tree(list(columns), limit)
        if single is not None:
            return limit, [single]
        solution = solve(search.rows(list(columns)))
        if solution.values[0] * float(search.largest) >= float(limit) * (1 - _NEAR):
            break
        prices = [max(0.0, price) for price in solution.prices[: len(quotient.sizes)]]
        before = len(columns)
        columns.update(search.cheap_trees([p / size for p, size in zip(prices, quotient.sizes, strict=True)]))
        if len(columns) == before:
            break
    return search.exact_rates(list(columns), solution, limit)


class _TreeSearch:
    """The search for cheap trees, and the linear program over some trees."""

    def __init__(
        self, quotient: Quotient, collective: str, weights: Mapping[int, Fraction] | None, tree_nodes: int
    ) -> None:
        self.quotient, self.weights, self.tree_nodes = quotient, weights, tree_nodes
        self.largest = max(quotient.width)
        self.roots = sorted({orbit for orbit in quotient.symmetry.orbits if orbit < tree_nodes})
        if weights is not None:
            self.roots = [root for root in quotient.roots if weights[root]]
        self.reduces = collective in ("all_reduce", "reduce", "reduce_scatter")
        self.copies = collective in ("all_reduce", "broadcast", "all_gather")
        self.orbit_of = dict(zip(quotient.arcs, quotient.orbit, strict=True))
        self.neighbours = {  # by direction (True: outward), for each node: (neighbour, orbit of the link)
            outward: [[(quotient.arcs[k][end], quotient.orbit[k]) for k in links] for links in links_of_nodes]
            for outward, links_of_nodes, end in ((True, quotient.leaving, 1), (False, quotient.entering, 0))
        }

    def cheap_trees(self, prices: Sequence[float]) -> dict[_TreeColumn, None]:
        """Return a cheap tree for each root, given the price of one link of each orbit."""
        quotient = self.quotient
        if self.reduces and self.copies and quotient.paired:
            prices = [price + prices[back] for price, back in zip(prices, quotient.back, strict=True)]
        scale = _LARGEST_PRICE / max(prices)
        costs = [max(1, round(price * scale)) for price in prices]
        columns: dict[_TreeColumn, None] = {}  # used as an ordered set
        for root in self.roots:
            out = self.grow_tree(root, costs, outward=True) if self.copies else None
            into = None
            if self.reduces and out is not None and quotient.paired:  # reduce over the same tree, backwards
                into = tuple((node, parent, through[::-1]) for node, parent, through in out)
            elif self.reduces:
                into = self.grow_tree(root, costs, outward=False)
            used: Counter[int] = Counter()
            for parents, outward in ((into, False), (out, True)):
                for node, parent, through in parents or ():
                    path = (parent, *through, node) if outward else (node, *through, parent)
                    used.update(self.orbit_of[arc] for arc in pairwise(path))
            columns[_TreeColumn(root, into, out, tuple(sorted(used.items())))] = None
        return columns

    def single_tree(self, columns: list[_TreeColumn], limit: Fraction) -> OrbitTree | None:
        """Return a tree that reaches the bound alone with its images, or ``None``. Prefer roots with few images."""
        if len(self.roots) > 1 and self.weights is not None:
            return None
        quotient = self.quotient
        for column in sorted(columns, key=lambda column: quotient.symmetry.sizes[column.root]):
            rates = (quotient.width[orbit] * quotient.sizes[orbit] / count for orbit, count in column.used)
            if min(rates) >= limit:
                return OrbitTree(column.root, Fraction(1), column.into, column.out)
        return None

    def grow_tree(self, root: int, costs: Sequence[int], *, outward: bool) -> tuple[Parent, ...]:
        """Return a cheap tree out of (or into) a root. Of equally cheap routes, take those that begin near the root."""
        n, neighbours = self.tree_nodes, self.neighbours[outward]
        count = len(neighbours)
        joined = [False] * count
        depth = [0] * count
        # The cheapest known route from the tree to each node: its price and depth, and the last node before its end.
        best: list[tuple[int, int]] = [(1 << 62, 0)] * count
        before = [-1] * count
        queue: list[tuple[int, int, int]] = [(0, 0, root)]
        best[root] = (0, 0)
        parents: list[Parent] = []
        missing = n
        while queue and missing:
            price, level, node = heappop(queue)
            if (price, level) > best[node] or joined[node]:
                continue
            if node < n:  # the node joins the tree, so routes from it begin at price 0
                joined[node] = True
                missing -= 1
                if node != root:
                    path = [node]  # backwards, to the tree
                    while path[-1] >= n or len(path) == 1:
                        path.append(before[path[-1]])
                    through = tuple(path[-2:0:-1])
                    parents.append((node, path[-1], through if outward else through[::-1]))
                    level = depth[node] = depth[path[-1]] + 1
                price = 0
            for other, orbit in neighbours[node]:
                route = price + costs[orbit], level
                if route < best[other] and not joined[other]:
                    best[other] = route
                    before[other] = node
                    heappush(queue, (*route, other))
        assert not missing  # every device can be reached
        needed = {*range(self.quotient.n)}  # to remove switches that lead to no device
        for node, parent, _ in reversed(parents):
            if node in needed:
                needed.add(parent)
        return tuple(entry for entry in parents if entry[0] in needed)

    def rows(self, columns: list[_TreeColumn]) -> Rows:
        """Return the linear program. Variable 0 is the total rate, and variable k + 1 the rate of column k."""
        quotient = self.quotient
        by_orbit: list[tuple[list[int], list[Fraction]]] = [([], []) for _ in quotient.sizes]
        numbered = list(enumerate(columns, start=1))
        for k, column in numbered:
            for orbit, count in column.used:
                by_orbit[orbit][0].append(k)
                by_orbit[orbit][1].append(Fraction(count, quotient.sizes[orbit]))
        upper: list[Row] = list(by_orbit)
        limits = [width / self.largest for width in quotient.width]
        needs: list[tuple[Fraction, list[int]]] = [(Fraction(1), list(range(1, len(columns) + 1)))]
        if self.weights is not None:
            needs = [(self.weights[root], [k for k, tree in numbered if tree.root == root]) for root in self.roots]
        for part, trees in needs:  # the sum of the rates of these trees must be at least part x the total rate
            upper.append(([0, *trees], [part] + [-1] * len(trees)))
            limits.append(Fraction(0))
        return Rows(len(columns) + 1, 1, upper, limits, [])

    def exact_rates(
        self, columns: list[_TreeColumn], solution: Solution, limit: Fraction
    ) -> tuple[Fraction, list[OrbitTree]]:
        """Return the best exact rate that is found near a solution, and the trees with their shares of the buffer."""
        rates = solution.values[1 : len(columns) + 1]
        best: tuple[Fraction, dict[int, Fraction]] | None = None
        for exact_rates in self._nearby_rates(columns, rates):
            shares = self._tree_shares(columns, exact_rates)
            if shares is None:
                continue
            loads: dict[int, Fraction] = {}
            for k, share in shares.items():
                for orbit, count in columns[k].used:
                    loads[orbit] = loads.get(orbit, Fraction(0)) + share * count
            rate = min(self.quotient.width[orbit] * self.quotient.sizes[orbit] / load for orbit, load in loads.items())
            if best is None or rate > best[0]:
                best = rate, shares
            if rate >= limit:
                break
        assert best is not None
        rate, shares = best
        return rate, [OrbitTree(columns[k].root, share, columns[k].into, columns[k].out) for k, share in shares.items()]

    def _tree_shares(self, columns: list[_TreeColumn], rates: dict[int, Fraction]) -> dict[int, Fraction] | None:
        """Return the share of the buffer of each tree, in proportion to the rates, by the number of the column.

        With weights, the trees of each orbit of roots share its weight. Without weights, all trees share the buffer.
        Return ``None`` if an orbit of roots has no tree.
        """
        weights = {-1: Fraction(1)} if self.weights is None else {root: self.weights[root] for root in self.roots}
        root_of = {k: -1 if self.weights is None else columns[k].root for k in rates}  # -1: any root
        totals = dict.fromkeys(weights, Fraction(0))
        for k, rate in rates.items():
            totals[root_of[k]] += rate
        if not all(totals.values()):
            return None
        return {k: rate / totals[root_of[k]] * weights[root_of[k]] for k, rate in rates.items() if rate}

    def _nearby_rates(self, columns: list[_TreeColumn], rates: list[float]) -> Iterator[dict[int, Fraction]]:
        """Yield exact rates by column that are near the rates in floating point: simple fractions, then a vertex."""
        scale = max(rates)
        used = {k: rate / scale for k, rate in enumerate(rates) if rate > _LEAST * scale}
        for denominator in DENOMINATORS:
            yield {k: Fraction(rate).limit_denominator(denominator) for k, rate in used.items()}
        # The vertex of the linear program that solves, as equations, the rows that are tight in floating point.
        upper: list[tuple[dict[int, Fraction], Fraction]] = []
        load: dict[int, float] = {}
        for k in used:
            for orbit, count in columns[k].used:
                load[orbit] = load.get(orbit, 0.0) + rates[k] * count
        for orbit, total in load.items():
            capacity = float(self.quotient.width[orbit] / self.largest) * self.quotient.sizes[orbit]
            if total >= capacity * (1 - _TIGHT):
                row = {k: Fraction(dict(columns[k].used)[orbit]) for k in used if orbit in dict(columns[k].used)}
                upper.append((row, self.quotient.width[orbit] * self.quotient.sizes[orbit]))
        if self.weights is not None:  # the rates of orbits of roots must be in proportion to their weights
            first = self.roots[0]
            for root in self.roots[1:]:
                row = {k: 1 / self.weights[root] for k in used if columns[k].root == root}
                row |= {k: -1 / self.weights[first] for k in used if columns[k].root == first}
                upper.append((row, Fraction(0)))
        vertex = solved_exactly(upper, list(used))
        if vertex is not None and all(rate >= 0 for rate in vertex.values()):
            yield vertex


def solved_exactly(rows: list[tuple[dict[int, Fraction], Fraction]], unknowns: list[int]) -> dict[int, Fraction] | None:
    """Return the only solution of linear equations, or ``None`` if there is no solution or more than one.

    ``rows`` contains an equation as (coefficient of each unknown, value of the sum).

    >>> solved_exactly([({0: Fraction(1), 1: Fraction(2)}, Fraction(4)), ({1: Fraction(3)}, Fraction(3))], [0, 1])
    {0: Fraction(2, 1), 1: Fraction(1, 1)}
    """
    left = [(dict(row), value) for row, value in rows]
    done: list[tuple[int, dict[int, Fraction], Fraction]] = []
    for unknown in unknowns:
        pivot_row = next((k for k, (row, _) in enumerate(left) if row.get(unknown)), None)
        if pivot_row is None:
            return None
        pivot, value = left.pop(pivot_row)
        factor = pivot[unknown]
        pivot = {k: a / factor for k, a in pivot.items() if a}
        value /= factor
        for k, (row, other) in enumerate(left):
            times = row.get(unknown)
            if times:
                for j, a in pivot.items():
                    row[j] = row.get(j, Fraction(0)) - times * a
                left[k] = row, other - times * value
        done.append((unknown, pivot, value))
    if any(value for row, value in left if not any(row.values())):
        return None
    solution: dict[int, Fraction] = {}
    for unknown, row, value in reversed(done):
        solution[unknown] = value - sum((a * solution[k] for k, a in row.items() if k != unknown), Fraction(0))
    return {unknown: solution[unknown] for unknown in unknowns}
