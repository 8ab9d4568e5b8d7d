"""The best mixture of trees that share the links, where trees may branch at nodes that take no part.

Each demand is for trees that join some members; all demands have the same rate, or rates in proportion to weights,
except demands whose rates are fixed. The mixture is the optimum of a linear program with one variable per tree. There
are too many trees to list, so the program begins with a few; its solution gives each link a price, and the cheapest
trees at these prices are added, until none is cheaper than those that it has. Then the prices prove that no mixture has
a higher rate. For demands of many members, trees are cheap, but perhaps not the cheapest; then the proved rate may be
too high.

Source: Gilmore & Gomory, A linear programming approach to the cutting-stock problem, Operations Research 9(6), 1961
(columns added by price); Wentges, Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming,
International Transactions in Operational Research 4(2), 1997 (prices between those of the program and the best ones);
Jain, Mahdian & Salavatipour, Packing Steiner trees, SODA 2003 (the program of trees).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import cycle, islice, pairwise, product
from math import isfinite, lcm
from typing import Final, NamedTuple

from .demand import Arc, Demand, MixedTree
from .linear_program import DENOMINATORS
from .solver import Row, Rows, common_unit, refine, solve
from .steiner import MANY, CheapestTrees, few_enough
from .steiner_heuristic import NearTrees
from .tree_prices import least_price

_MOST_ROUNDS: Final = 400  # what is proved until then remains valid
_MOST_ROOTS: Final = 8  # trees that a round adds to a demand, each of another root
# Cheap trees of many members take much less time than a program, so a round adds many, of all demands together. After
# each tree, the prices of the links that it uses are raised, that of the most loaded one by ``_RAISE``, so that the
# next tree of the demand is another one.
# (Measured on a torus of 8 x 8 devices: 8 trees of a round do not reach the bound in 400 rounds, 64 do in 60.)
_TREES_OF_ROUND: Final = 64
_RAISE: Final = 0.1
_MOST_NEAR_ROUNDS: Final = 100  # of programs with such trees
_KEPT: Final = 2  # trees per link and demand that such a program keeps, if it has half as many more
_NEAR: Final = 1e-9  # the relative error of rates in floating point
# The prices of a program change too much from round to round. Until the rate is ``_CLOSE`` to the least limit that
# prices have given, trees are searched at prices between the last ones and those of that limit.
_PART_OF_BEST: Final = 0.5
_CLOSE: Final = 1e-3
_MORE_BITS: Final = (24, 48, 96)  # of the denominators of weights, if those of ``DENOMINATORS`` are not exact
_UNEVEN: Final = 100_000  # from here on, one solution in floating point is not accurate enough for small rates
_DIGITS: Final = 64  # bits of the solutions of such programs
_FINE: Final = 1 << 30  # prices that are not simple fractions are multiples of 1 / _FINE, and so are many weights
# Many weights that are rounded one by one may have a common denominator of hundreds of digits. From here on, they are
# rounded to multiples of the same part.
_MOST_PARTS: Final = 1 << 40
# The least price of a link, relative to the mean: of equally cheap trees, the one with the fewest hops is taken.
_LEAST_PRICE: Final = 1e-7


class Mixture(NamedTuple):
    """The trees of each demand, which together fit the links, and the prices that prove that no others are better."""

    rate: Fraction  # of a demand of weight 1, in GB/s
    trees: list[list[MixedTree]]
    most: Fraction  # the rate that the prices prove to be the greatest; ``rate`` unless rounding failed
    prices: tuple[Fraction, ...]  # of each link, such that the cheapest trees of all demands together cost 1


class ProvedRate(NamedTuple):
    """A rate that no trees exceed, and the prices that prove it."""

    most: Fraction  # of a demand of weight 1 that is not fixed, in GB/s
    prices: tuple[Fraction, ...]  # of each link, such that trees of all demands that are not fixed together cost 1
    costs: tuple[Fraction, ...]  # for each demand, the price of its cheapest tree


def best_mixture(
    n: int, links: Mapping[Arc, Fraction], joints: Sequence[int], demands: Sequence[Demand], exact_up_to: int = MANY
) -> Mixture | None:
    """Return the best trees; ``None``: a demand cannot be met.

    Args:
      n: the number of nodes; each is a number from 0 to n - 1.
      links: the bandwidth of each, in GB/s.
      joints: the nodes at which trees may branch; all sources, destinations and roots among them.
      exact_up_to: up to which number of values, ``3**members * joints``, the cheapest trees are searched; see
        ``few_enough``. Other demands are met by trees that are cheap, but perhaps not the cheapest.

    Both receivers are behind a hub, node 3. A narrow link is a second way to one of them.

    >>> links = {(0, 3): 2, (3, 1): 2, (3, 2): 3, (0, 1): 1, (1, 2): 1}
    >>> exact = {arc: Fraction(width) for arc, width in links.items()}
    >>> broadcast = Demand(Fraction(1), (0,), (), (1, 2))
    >>> [str(best_mixture(4, exact, joints, [broadcast]).rate) for joints in ((0, 1, 2, 3), (0, 1, 2))]
    ['3', '2']
    """
    program = TreeProgram(n, links, joints, demands, exact_up_to)
    found = program.solve({})
    if found is None:
        return None
    weights = [demand.weight for demand in demands]
    rate, trees = program.mixture(weights)
    proved = program.proof(rate)
    if rate < proved.most:  # perhaps only since weights of the trees are rounded
        part, exact = program.exact_mixture([weight * proved.most for weight in weights], quick=True)
        if part == 1:
            rate, trees = proved.most, exact
    found_weights = [tree.weight for of_demand in trees for tree in of_demand]
    if program.near and sum(found_weights) > _MOST_PARTS * common_unit(found_weights):
        rate, trees = program.even_mixture(weights)
    return Mixture(rate, trees, proved.most, proved.prices)


class _Column(NamedTuple):
    demand: int
    tree: MixedTree  # its weight is not used
    uses: tuple[tuple[int, int], ...]  # how often it uses each link: (number of the link, times), sorted


class TreeProgram:
    """The links, the demands, and the trees that were found for each; more than one program can be solved with them."""

    def __init__(
        self,
        n: int,
        links: Mapping[Arc, Fraction],
        joints: Sequence[int],
        demands: Sequence[Demand],
        exact_up_to: int = MANY,
    ) -> None:
        """Prepare for the arguments of ``best_mixture``."""
        self.links, self.demands, self.widths = list(links), demands, list(links.values())
        self.joints = list(joints)
        self.fixed: Mapping[int, Fraction] = {}
        widest = float(max(self.widths))
        self.prices = [widest / float(width) for width in self.widths]  # of the last program
        self.columns: dict[_Column, None] = {}
        self.weights: list[float] = []  # of the first columns, in the last solution
        self.scale = lcm(*(width.denominator for width in self.widths))
        self.largest = max(self.widths)
        sizes = [one.weight for one in demands]
        self.uneven = max(self.widths) * max(sizes) > _UNEVEN * min(self.widths) * min(sizes)
        self.number = {arc: k for k, arc in enumerate(links)}
        # If links are equal in both directions, and all demands reduce and copy, a tree that copies is one that
        # reduces, backwards. Then both directions of a link are used equally, and have one row and one price.
        symmetric = all(links.get((dst, src)) == width for (src, dst), width in links.items())
        self.paired = symmetric and all(set(one.sources) == set(one.destinations) for one in demands)
        self.rows = [k for k, (src, dst) in enumerate(self.links) if src < dst or not self.paired]
        self.trees: dict[tuple[bool, tuple[int, ...]], CheapestTrees | NearTrees] = {}
        self.roots: dict[int, deque[int]] = {}  # of demands with such trees, in the order in which rounds take them
        back = [(dst, src) for src, dst in self.links]
        for k in range(len(demands)):
            for outward, ends in self._keys(k):
                if (outward, ends) not in self.trees:
                    kind = CheapestTrees if few_enough(len(ends), len(joints), exact_up_to) else NearTrees
                    self.trees[outward, ends] = kind(n, self.links if outward else back, ends, joints)
        # The numbers of the demands whose trees are perhaps not the cheapest.
        self.near = {
            k for k in range(len(demands)) if any(isinstance(self.trees[key], NearTrees) for key in self._keys(k))
        }

    def solve(self, fixed: Mapping[int, Fraction]) -> float | None:
        """Add all trees that are worth their price, and return the greatest rate; ``None``: a demand cannot be met.

        ``fixed``: the rates in GB/s of some demands, by number. Earlier trees of this program reach them, and another
        demand is not fixed.
        """
        self.fixed, rate, self.weights = fixed, 0.0, []
        best, tried, part = 0.0, self._scale(self.prices), _PART_OF_BEST
        center = tried  # the prices that give the least limit so far; of trees that are not the cheapest, no proof
        for _ in range(_MOST_NEAR_ROUNDS if self.near else _MOST_ROUNDS):
            found = self.cheapest_trees(tried)
            if found is None:
                return None
            before = len(self.columns)
            self.columns.update((column, None) for _, of_demand in found for column in of_demand)
            # No mixture has a higher rate than the value of all links, less the price of trees of the fixed rates,
            # divided by the price of a tree for each other demand.
            value = sum(price * float(width) for price, width in zip(tried, self.widths, strict=True))
            value -= sum(float(rate) * found[k][0] for k, rate in fixed.items())
            free = [(one.weight, found[k][0]) for k, one in enumerate(self.demands) if k not in fixed]
            cost = sum(float(weight) * least for weight, least in free)
            if value > 0 and cost / value > best:
                best, center = cost / value, tried
            near = rate * best >= 1 - _CLOSE if part else rate * cost >= value * (1 - _NEAR)
            if self.weights and (near or len(self.columns) == before):
                if not part:
                    break
                part = 0.0
            rate, self.weights, self.prices = self.mix(list(self.columns))
            if self.near:
                self._prune()
            last = self._scale(self.prices)
            tried = [part * a + (1 - part) * b for a, b in zip(center, last, strict=True)] if part else self.prices
        return rate

    def _scale(self, prices: Sequence[float]) -> list[float]:
        """Return prices such that all links together have the value 1."""
        whole = sum(max(0.0, price) * float(width) for price, width in zip(prices, self.widths, strict=True))
        return [max(0.0, price) / whole for price in prices]

    def mixture(self, wanted: Sequence[Fraction]) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return the greatest factor of the wanted rates of all demands that known trees reach, and these trees.

        The last solution must reach rates in proportion to these, except for errors of rounding.
        """
        columns = list(self.columns)[: len(self.weights)]
        whole = float(self.largest * self.scale)
        best: tuple[Fraction, list[list[MixedTree]]] = Fraction(0), []
        for most in DENOMINATORS:
            weights = [Fraction(weight * whole).limit_denominator(most) for weight in self.weights]
            found = self._fit_weights(columns, weights, wanted)
            if found[0] > best[0] * (1 + Fraction(1, 10**9)):
                best = found
        return best

    def even_mixture(self, wanted: Sequence[Fraction]) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return what ``mixture`` does, with weights that are numbers of equal parts of a demand's data."""
        columns = list(self.columns)[: len(self.weights)]
        return self._fit_weights(columns, [Fraction(round(weight * _FINE)) for weight in self.weights], wanted)

    def exact_mixture(
        self, rates: Sequence[Fraction], *, quick: bool = False
    ) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return what ``mixture`` does, for rates that are reached if no number is rounded. It takes more time.

        ``quick``: whether to try only weights of few bits. For many nodes the others take minutes.
        """
        used = [column for column, weight in zip(self.columns, self.weights, strict=False) if weight > 0]
        best: tuple[Fraction, list[list[MixedTree]]] = Fraction(0), []
        tries = product((used, list(self.columns)), _MORE_BITS)
        for kept, bits in islice(tries, 1) if quick else tries:
            solution = refine(self.program(kept, [rate / self.largest for rate in rates], {}), 2 * bits + 8)
            weights = [(value * self.scale).limit_denominator(1 << bits) for value in solution.values[1:]]
            best = max(best, self._fit_weights(kept, weights, rates), key=lambda one: one[0])
            if best[0] == 1:
                break
        return best

    def _keys(self, k: int) -> list[tuple[bool, tuple[int, ...]]]:
        """Return which trees a demand needs: (whether they copy, the nodes that they join)."""
        ends = (True, self.demands[k].destinations), (False, self.demands[k].sources)
        return [key for key in ends if key[1]][: 1 if self.paired else 2]

    def cheapest_trees(self, prices: Sequence[float]) -> list[tuple[float, list[_Column]]] | None:
        """Return for each demand the price of its cheapest tree at these prices of the links, and trees to add.

        These are the cheapest tree out of each of the best roots, or, where the search is not exact, those of
        ``_diverse_trees``. ``None``: a demand has no tree.
        """
        floor = _LEAST_PRICE * sum(prices) / len(prices)
        floored = [max(0.0, price) + floor for price in prices]
        found = []
        for k, costs in enumerate(self._costs(floored)):
            if k in self.near:
                columns = self._diverse_trees(k, floored)
            else:
                columns = [self._column(k, root) for root in sorted(costs, key=lambda root: costs[root])[:_MOST_ROOTS]]
            if not columns:
                return None
            least = min(sum(prices[link] * times for link, times in column.uses) for column in columns)
            found.append((least, columns))
        return found

    def _diverse_trees(self, k: int, prices: Sequence[float]) -> list[_Column]:
        """Return many cheap trees of a demand, no two of which use the same links equally often.

        After each tree, the prices of its links are raised, so that the next tree avoids the most loaded of them.
        """
        raised = list(prices)
        found: dict[tuple[tuple[int, int], ...], _Column] = {}
        for root in self._next_roots(k, prices):
            for key in self._keys(k):
                self.trees[key].price(raised)
            column = self._column(k, root)
            found.setdefault(column.uses, column)
            loads = [(link, times / float(self.widths[link])) for link, times in column.uses]
            most = max(load for _, load in loads)
            for link, load in loads:
                raised[link] *= 1 + _RAISE * load / most
        # Of trees that use links equally, the program keeps the one that it has, and gets no second one.
        known = {column.uses: column for column in self.columns if column.demand == k}
        return [known.get(uses, column) for uses, column in found.items()]

    def _next_roots(self, k: int, prices: Sequence[float]) -> Iterable[int]:
        """Return the roots of the trees of a round; none: the demand has no tree."""
        for key in self._keys(k):
            self.trees[key].price(prices)
        if k not in self.roots:
            self.roots[k] = deque(root for root in self.demands[k].roots if isfinite(self._cost(k, root)))
        roots = self.roots[k]
        count = max(min(len(roots), _MOST_ROOTS), _TREES_OF_ROUND // len(self.near))
        roots.rotate(-count)
        chosen: Iterable[int] = list(roots)[:count]
        if not self.paired:  # else a tree can have any of its nodes as its root
            chosen = sorted(chosen, key=lambda root: self._cost(k, root))[:_MOST_ROOTS]
        return islice(cycle(chosen), count)

    def _cost(self, k: int, root: int) -> float:
        """Return the price of the cheapest tree of a demand out of a root; infinite if no tree is known."""
        return (2 if self.paired else 1) * sum(self.trees[key].cost(root) for key in self._keys(k))

    def _prune(self) -> None:
        """Remove the most expensive of many trees of a demand, unless they have a weight."""
        listed = list(self.columns)
        kept = {c for c, weight in enumerate(self.weights) if weight > 0}
        for k in range(len(self.demands)):
            own = [c for c, column in enumerate(listed) if column.demand == k]
            if 2 * len(own) > 3 * _KEPT * len(self.rows) and k in self.near:
                price = {c: sum(self.prices[link] * times for link, times in listed[c].uses) for c in own}
                own = sorted(own, key=lambda c: price[c])[: _KEPT * len(self.rows)]
            kept.update(own)
        self.columns = dict.fromkeys(listed[c] for c in sorted(kept))
        self.weights = [self.weights[c] for c in sorted(kept)]

    def _costs(self, prices: Sequence[float]) -> list[dict[int, float]]:
        """Set the prices, and return for each demand the price of the cheapest tree of each root that has one.

        If the trees of a demand may not be the cheapest, its dictionary is empty.
        """
        for trees in self.trees.values():
            trees.price(prices)
        found = []
        for k, demand in enumerate(self.demands):
            costs = {root: self._cost(k, root) for root in demand.roots if k not in self.near}
            found.append({root: cost for root, cost in costs.items() if isfinite(cost)})
        return found

    def _column(self, k: int, root: int) -> _Column:
        """Return the cheapest tree of a demand out of a root."""
        made = {key[0]: tuple(self.trees[key].parents(root)) for key in self._keys(k)}
        out, into = made.get(True), made.get(False)
        if self.paired:
            into = out
        if into is not None:  # it was found on the reversed links
            into = tuple((node, parent, through[::-1]) for node, parent, through in into)
        uses: Counter[int] = Counter()
        ways = [(parent, *through, node) for node, parent, through in out or ()]
        ways += [(node, *through, parent) for node, parent, through in into or ()]
        for way in ways:
            uses.update(self.number[pair] for pair in pairwise(way))
        return _Column(k, MixedTree(root, Fraction(1), into, out), tuple(sorted(uses.items())))

    def program(self, columns: Sequence[_Column], rates: Sequence[Fraction], fixed: Mapping[int, Fraction]) -> Rows:
        """Return the program of a factor of the rates of demands that are not fixed, and the weight of each tree.

        Weights and fixed rates are in ``largest``.
        """
        met: list[Row] = []
        for k, rate in enumerate(rates):
            own = [c + 1 for c, column in enumerate(columns) if column.demand == k]
            met.append(([0, *own], [0 if k in fixed else rate, *[-1] * len(own)]))
        within: dict[int, Row] = {k: ([], []) for k in self.rows}
        for c, column in enumerate(columns):
            for link, times in column.uses:
                if link in within:
                    within[link][0].append(c + 1)  # type: ignore[attr-defined]
                    within[link][1].append(times)  # type: ignore[attr-defined]
        limits = [-fixed.get(k, Fraction(0)) / self.largest for k in range(len(met))]
        limits += [self.widths[k] / self.largest for k in self.rows]
        return Rows(len(columns) + 1, 1, [*met, *within.values()], limits, [])

    def mix(self, columns: Sequence[_Column]) -> tuple[float, list[float], list[float]]:
        """Return the greatest rate with these trees, the weight of each, and the price of each link."""
        rows = self.program(columns, [demand.weight for demand in self.demands], self.fixed)
        solution = refine(rows, _DIGITS) if self.uneven else solve(rows)
        prices = [0.0] * len(self.links)
        for k, price in zip(self.rows, solution.prices[len(self.demands) :], strict=True):
            src, dst = self.links[k]
            prices[k] = float(price) / 2 if self.paired else float(price)
            if self.paired:
                prices[self.number[dst, src]] = prices[k]
        values = [float(value) for value in solution.values]
        return values[0] * float(self.largest), values[1:], prices

    def _fit_weights(
        self, columns: Sequence[_Column], weights: Sequence[Fraction], wanted: Sequence[Fraction]
    ) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return the factor of the wanted rates, and the trees, whose weights are scaled so that the links suffice."""
        sums = [Fraction(0)] * len(self.demands)
        for column, weight in zip(columns, weights, strict=True):
            sums[column.demand] += max(Fraction(0), weight)
        if not all(sums):
            return Fraction(0), []
        factors = [rate / total for rate, total in zip(wanted, sums, strict=True)]
        kept = [(c, w * factors[c.demand]) for c, w in zip(columns, weights, strict=True) if w > 0]
        scale = lcm(*(weight.denominator for _, weight in kept))
        used: dict[int, int] = {}  # sums of integers are quick
        for column, weight in kept:
            parts = int(weight * scale)
            for link, times in column.uses:
                used[link] = used.get(link, 0) + times * parts
        rate = min(self.widths[link] * scale / amount for link, amount in used.items())
        trees: list[list[MixedTree]] = [[] for _ in self.demands]
        for column, weight in kept:
            trees[column.demand].append(column.tree._replace(weight=weight * rate))
        return rate, trees

    def proof(self, rate: Fraction | None = None) -> ProvedRate:
        """Return the least rate that the prices of the last program prove to be the greatest, when they are rounded.

        ``rate``: of the trees that were found, if it is known; no proof is better.
        """
        found: list[ProvedRate] = []
        whole = sum(price * float(width) for price, width in zip(self.prices, self.widths, strict=True))
        near = [max(0.0, price) * float(self.largest) / whole for price in self.prices]
        tries = [[Fraction(price).limit_denominator(most) for price in near] for most in DENOMINATORS]
        for exact in [*tries, [Fraction(round(price * _FINE), _FINE) for price in near]]:
            scale = lcm(*(price.denominator for price in exact))
            if 2 * scale * sum(exact) >= 1 << 53:
                continue  # sums of prices would not be exact
            least = [Fraction(cost, scale) for cost in self._least_prices([int(price * scale) for price in exact])]
            free = [
                d.weight * c for k, (d, c) in enumerate(zip(self.demands, least, strict=True)) if k not in self.fixed
            ]
            cost = sum(free, Fraction(0))
            if not cost:
                continue
            value = sum((p * w for p, w in zip(exact, self.widths, strict=True)), Fraction(0))
            proved = (value - sum((rate * least[k] for k, rate in self.fixed.items()), Fraction(0))) / cost
            found.append(ProvedRate(proved, tuple(p / cost for p in exact), tuple(one / cost for one in least)))
            if proved == rate:
                break
        assert found, "prices in multiples of 1 / _FINE have exact sums"
        return min(found, key=lambda one: one.most)

    def _least_prices(self, prices: Sequence[int]) -> list[int]:
        """Return for each demand the price of its cheapest tree; of many members, a price that no tree is below."""
        exact = [int(min(costs.values(), default=0)) for costs in self._costs([float(price) for price in prices])]
        priced = [(*link, price) for link, price in zip(self.links, prices, strict=True)]
        for k, demand in enumerate(self.demands):
            if k in self.near:
                ends = demand.sources, demand.destinations
                exact[k] = least_price(priced, self.joints, *ends, demand.roots, exact=False) or 0
        return exact
