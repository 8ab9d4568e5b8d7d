"""Trees for one root of each orbit of a symmetry, which its elements move to all others.

If every image of a tree carries the same part of the buffer, all links of an orbit carry the same load: the links of
the orbit that the tree uses, times the rate, divided by the links of the orbit. So the best trees are the optimum of a
linear program with one row for each orbit of links. Its solution gives each orbit a price, and the cheapest trees at
these prices are added, as in ``bounds/column_generation.py``. Trees grow from the root, always over the cheapest route
to a new device (Prim). Where a link and the link back cost the same, as in an all-reduce on equal links both ways, no
tree is cheaper; elsewhere there may be cheaper ones, and the rate may stay below the bound.

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

_MOST_ROUNDS: Final = 60  # of new trees; then the rate is that of the trees so far
_NEAR: Final = 1e-9  # the relative error of rates in floating point
_LEAST: Final = 1e-9  # smaller rates, relative to the largest, are rounding errors
_TIGHT: Final = 1e-7  # an orbit of links with less room than this, relatively, limits the rate
_STEPS: Final = 1 << 24  # the largest price of a link, as an integer; every link costs at least 1


class OrbitTree(NamedTuple):
    """A tree of a root of an orbit, whose images share a part of the buffer."""

    root: int
    share: Fraction
    into: tuple[Parent, ...] | None  # how it reduces; a route has the nodes passed before the parent
    out: tuple[Parent, ...] | None  # how it copies; a route has the nodes passed after the parent


class _TreeColumn(NamedTuple):
    root: int
    into: tuple[Parent, ...] | None
    out: tuple[Parent, ...] | None
    used: tuple[tuple[int, int], ...]  # for each orbit of links, how many of them the tree uses


def best_trees(
    quotient: Quotient, collective: str, weights: Mapping[int, Fraction] | None, limit: Fraction, tree_nodes: int = 0
) -> tuple[Fraction, list[OrbitTree]]:
    """Return the rate in GB/s of the best trees that were found, and the trees.

    Args:
      quotient: the topology and its orbits.
      collective: its name; trees of an all-reduce both reduce and copy.
      weights: for each orbit of roots, the part of the buffer that starts (or ends) in it; ``None``: an all-reduce.
      limit: the bound; trees that reach it end the search.
      tree_nodes: all trees join the first so many nodes: the devices, and perhaps switches that reduce; 0: the
        devices.
    """
    search = _TreeSearch(quotient, collective, weights, tree_nodes or quotient.n)
    prices = [float(max(quotient.width) / width) for width in quotient.width]
    columns = search.cheap_trees(prices)
    for _ in range(_MOST_ROUNDS):
        alone = search.single_tree(list(columns), limit)
        if alone is not None:
            return limit, [alone]
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
    """The linear program over some trees."""

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
        self.near = {
            way: [[(quotient.arcs[k][far], quotient.orbit[k]) for k in listed] for listed in lists]
            for way, lists, far in ((True, quotient.leaving, 1), (False, quotient.entering, 0))
        }

    def cheap_trees(self, prices: Sequence[float]) -> dict[_TreeColumn, None]:
        """Return a cheap tree for each root at some prices of the orbits' links."""
        quotient = self.quotient
        if self.reduces and self.copies and quotient.paired:
            prices = [price + prices[back] for price, back in zip(prices, quotient.back, strict=True)]
        scale = _STEPS / max(prices)
        steps = [max(1, round(price * scale)) for price in prices]
        found: dict[_TreeColumn, None] = {}
        for root in self.roots:
            out = into = None
            if self.copies:
                out = self.grow_tree(root, steps, outward=True)
            if self.reduces:
                both = out is not None and quotient.paired
                into = None if both else self.grow_tree(root, steps, outward=False)
                if both and out is not None:
                    into = tuple((node, parent, through[::-1]) for node, parent, through in out)
            used: Counter[int] = Counter()
            for parents, outward in ((into, False), (out, True)):
                for node, parent, through in parents or ():
                    path = (parent, *through, node) if outward else (node, *through, parent)
                    used.update(self.orbit_of[arc] for arc in pairwise(path))
            found[_TreeColumn(root, into, out, tuple(sorted(used.items())))] = None
        return found

    def single_tree(self, columns: list[_TreeColumn], limit: Fraction) -> OrbitTree | None:
        """Return a tree that reaches the bound alone, of the root with the fewest images, or ``None``."""
        if len(self.roots) > 1 and self.weights is not None:
            return None
        quotient = self.quotient
        for column in sorted(columns, key=lambda column: quotient.symmetry.sizes[column.root]):
            rates = (quotient.width[orbit] * quotient.sizes[orbit] / count for orbit, count in column.used)
            if min(rates) >= limit:
                return OrbitTree(column.root, Fraction(1), column.into, column.out)
        return None

    def grow_tree(self, root: int, steps: Sequence[int], *, outward: bool) -> tuple[Parent, ...]:
        """Return a cheap tree out of (or into) a root; of equally cheap routes, those nearest to the root are taken."""
        n, near = self.tree_nodes, self.near[outward]
        count = len(near)
        joined = [False] * count
        depth = [0] * count
        # The cheapest known way to each node from the tree: its price and depth, and the node before it.
        known: list[tuple[int, int]] = [(1 << 62, 0)] * count
        before = [-1] * count
        queue: list[tuple[int, int, int]] = [(0, 0, root)]
        known[root] = (0, 0)
        parents: list[Parent] = []
        missing = n
        while queue and missing:
            price, level, node = heappop(queue)
            if (price, level) > known[node] or joined[node]:
                continue
            if node < n:
                joined[node] = True
                missing -= 1
                if node != root:
                    path = [node]
                    while path[-1] >= n or len(path) == 1:
                        path.append(before[path[-1]])
                    through = tuple(path[-2:0:-1])
                    parents.append((node, path[-1], through if outward else through[::-1]))
                    level = depth[node] = depth[path[-1]] + 1
                price = 0
            for other, orbit in near[node]:
                way = price + steps[orbit], level
                if way < known[other] and not joined[other]:
                    known[other] = way
                    before[other] = node
                    heappush(queue, (*way, other))
        assert not missing  # every device can be reached
        return self._prune(parents)

    def _prune(self, parents: list[Parent]) -> tuple[Parent, ...]:
        """Return a tree without the switches from which no device hangs."""
        needed = {*range(self.quotient.n)}
        for node, parent, _ in reversed(parents):
            if node in needed:
                needed.add(parent)
        return tuple(entry for entry in parents if entry[0] in needed)

    def rows(self, columns: list[_TreeColumn]) -> Rows:
        """Return the program: the first variable is the rate, the others the rates of the trees."""
        quotient = self.quotient
        by_orbit: list[tuple[list[int], list[Fraction]]] = [([], []) for _ in quotient.sizes]
        for k, column in enumerate(columns, start=1):
            for orbit, count in column.used:
                by_orbit[orbit][0].append(k)
                by_orbit[orbit][1].append(Fraction(count, quotient.sizes[orbit]))
        upper: list[Row] = list(by_orbit)
        limits = [width / self.largest for width in quotient.width]
        needs: list[tuple[Fraction, list[int]]] = [(Fraction(1), list(range(1, len(columns) + 1)))]
        if self.weights is not None:
            needs = [
                (self.weights[root], [k for k, column in enumerate(columns, start=1) if column.root == root])
                for root in self.roots
            ]
        for part, of_root in needs:
            upper.append(([0, *of_root], [part] + [-1] * len(of_root)))
            limits.append(Fraction(0))
        return Rows(len(columns) + 1, 1, upper, limits, [])

    def exact_rates(
        self, columns: list[_TreeColumn], solution: Solution, limit: Fraction
    ) -> tuple[Fraction, list[OrbitTree]]:
        """Return exact rates near those of a solution, as shares of the buffer, and the rate of the trees with them."""
        rates = solution.values[1 : len(columns) + 1]
        best: tuple[Fraction, dict[int, Fraction]] | None = None
        for made in self._nearby_rates(columns, rates):
            shares = self._shares_by_root(columns, made)
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

    def _shares_by_root(self, columns: list[_TreeColumn], rates: dict[int, Fraction]) -> dict[int, Fraction] | None:
        """Return shares in proportion to rates, so that each orbit of roots has its part; ``None``: one has no tree."""
        whole: dict[int, Fraction] = {}
        for k, rate in rates.items():
            root = -1 if self.weights is None else columns[k].root
            whole[root] = whole.get(root, Fraction(0)) + rate
        if any(not whole.get(root) for root in ([-1] if self.weights is None else self.roots)):
            return None
        if self.weights is None:
            return {k: rate / whole[-1] for k, rate in rates.items() if rate}
        return {k: rate / whole[columns[k].root] * self.weights[columns[k].root] for k, rate in rates.items() if rate}

    def _nearby_rates(self, columns: list[_TreeColumn], rates: list[float]) -> Iterator[dict[int, Fraction]]:
        """Yield exact rates that are close to those in floating point: simple fractions, then a vertex."""
        scale = max(rates)
        used = {k: rate / scale for k, rate in enumerate(rates) if rate > _LEAST * scale}
        for denominator in DENOMINATORS:
            yield {k: Fraction(rate).limit_denominator(denominator) for k, rate in used.items()}
        # The rows that are tight in floating point determine the vertex.
        upper: list[tuple[dict[int, Fraction], Fraction]] = []
        load: dict[int, float] = {}
        for k in used:
            for orbit, count in columns[k].used:
                load[orbit] = load.get(orbit, 0.0) + rates[k] * count
        for orbit, total in load.items():
            room = float(self.quotient.width[orbit] / self.largest) * self.quotient.sizes[orbit]
            if total >= room * (1 - _TIGHT):
                row = {k: Fraction(dict(columns[k].used)[orbit]) for k in used if orbit in dict(columns[k].used)}
                upper.append((row, self.quotient.width[orbit] * self.quotient.sizes[orbit]))
        if self.weights is not None:  # the rates of two orbits of roots are in proportion to their parts
            first = self.roots[0]
            for root in self.roots[1:]:
                row = {k: 1 / self.weights[root] for k in used if columns[k].root == root}
                row |= {k: -1 / self.weights[first] for k in used if columns[k].root == first}
                upper.append((row, Fraction(0)))
        found = solved_exactly(upper, list(used))
        if found is not None and all(rate >= 0 for rate in found.values()):
            yield found


def solved_exactly(rows: list[tuple[dict[int, Fraction], Fraction]], unknowns: list[int]) -> dict[int, Fraction] | None:
    """Return the one solution of linear equations, each ``(coefficients, value)``; ``None``: none, or several.

    >>> solved_exactly([({0: Fraction(1), 1: Fraction(2)}, Fraction(4)), ({1: Fraction(3)}, Fraction(3))], [0, 1])
    {0: Fraction(2, 1), 1: Fraction(1, 1)}
    """
    left = [(dict(row), value) for row, value in rows]
    done: list[tuple[int, dict[int, Fraction], Fraction]] = []
    for unknown in unknowns:
        at = next((k for k, (row, _) in enumerate(left) if row.get(unknown)), None)
        if at is None:
            return None
        pivot, value = left.pop(at)
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
    found: dict[int, Fraction] = {}
    for unknown, row, value in reversed(done):
        found[unknown] = value - sum((a * found[k] for k, a in row.items() if k != unknown), Fraction(0))
    return {unknown: found[unknown] for unknown in unknowns}
