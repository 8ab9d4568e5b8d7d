"""The best mixture of trees that share the links. Trees may also branch at nodes that take no part.

A mixture is a set of trees, each with a rate at which it carries data. A demand asks for trees that join some members.
The rates of demands are in proportion to their weights, except for demands with fixed rates. The best mixture is the
optimum of a linear program with one variable per tree. There are too many trees to list, so the program begins with a
few. The solution gives each link a price, and the cheapest trees at these prices are added, until they are no cheaper
than those of the program. Then the prices prove that no mixture has a higher rate. For demands of many members, a
heuristic finds cheap trees, which may not be the cheapest. Then the proved rate may be too high.

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

from .demand import Demand, MixedTree
from .linear_program import DENOMINATORS
from .solver import Row, Rows, common_unit, refine, solve
from .steiner import MANY, Arc, CheapestTrees, few_enough
from .steiner_heuristic import HeuristicTrees
from .tree_prices import least_price

_MOST_ROUNDS: Final = 400  # in which trees are added; the rate that is proved by then is valid, but may be too high
_MOST_ROOTS: Final = 8  # the most trees that a round adds to a demand, each with another root
# The heuristic takes much less time than a linear program, so each round adds this many trees, of all demands together.
# After each tree, the prices of its links are raised, that of the most loaded link by the part ``_RAISE``, so that the
# next tree of the demand uses other links.
# (Measured on a torus of 8 x 8 devices: with 8 trees per round, 400 rounds do not reach the bound; with 64, 60 do.)
_TREES_OF_ROUND: Final = 64
_RAISE: Final = 0.1
_MOST_HEURISTIC_ROUNDS: Final = 100  # the most rounds of a program with heuristic trees
_KEPT: Final = 2  # trees per link and demand that such a program keeps when it has more than 1.5 times as many
_NEAR: Final = 1e-9  # the relative error of rates in floating point
# The prices of a program change too much from round to round. So trees are searched at a mean of the last prices and
# the prices that gave the least limit of the rate, until the rate differs from this limit by less than ``_CLOSE``.
_PART_OF_BEST: Final = 0.5
_CLOSE: Final = 1e-3
_MORE_BITS: Final = (24, 48, 96)  # bits of the denominators of weights, if those of ``DENOMINATORS`` are not exact
_UNEVEN: Final = 100_000  # if bandwidths or weights differ by this factor, floating point is too inaccurate
_BITS: Final = 64  # of the refined solutions of such programs
_PARTS: Final = 1 << 30  # numbers that are not simple fractions are rounded to multiples of 1 / _PARTS
# The common denominator of many weights that are rounded one by one may have hundreds of digits. If it is greater than
# this, all weights are rounded to multiples of 1 / _PARTS instead.
_MOST_PARTS: Final = 1 << 40
# The least price of a link, relative to the mean price. So of equally cheap trees, one with few links is found.
_LEAST_PRICE: Final = 1e-7

_Links = Mapping[Arc, Fraction]  # the bandwidths by (src, dst)
# (factor, trees of each demand): trees that fit the bandwidths and reach factor x the wanted rates of the demands
_ScaledTrees = tuple[Fraction, list[list[MixedTree]]]


class Mixture(NamedTuple):
    """Trees that together fit the bandwidths, and the prices that prove that no trees are better."""

    rate: Fraction  # of a demand of weight 1, in GB/s
    trees: list[list[MixedTree]]  # for each demand
    most: Fraction  # the rate that no trees exceed, proved by the prices; equals ``rate`` unless rounding failed
    prices: tuple[Fraction, ...]  # of each link; the cheapest trees of all demands together cost 1


class ProvedRate(NamedTuple):
    """A rate that no trees exceed, and the prices that prove it."""

    most: Fraction  # the rate of a demand of weight 1 without a fixed rate, in GB/s
    prices: tuple[Fraction, ...]  # of each link; trees of all demands without fixed rates together cost 1
    costs: tuple[Fraction, ...]  # for each demand, the price of its cheapest tree


def best_mixture(
    n: int, links: _Links, branch_nodes: Sequence[int], demands: Sequence[Demand], exact_up_to: int = MANY
) -> Mixture | None:
    """Return the best trees, or ``None`` if a demand cannot be met.

    Args:
      n: the number of nodes, which are numbered from 0 to n - 1.
      links: the bandwidth of each link in GB/s, by (src, dst).
      branch_nodes: the nodes at which trees may branch, including all sources, destinations and roots.
      demands: what the trees must connect.
      exact_up_to: the cheapest trees of a demand are searched if ``3**members * branch nodes`` is at most this; see
        ``few_enough``. Otherwise a heuristic finds cheap trees.

    In the example, node 0 reaches both receivers, 1 and 2, through node 3. A narrower link leads directly to node 1.

    >>> links = {(0, 3): 2, (3, 1): 2, (3, 2): 3, (0, 1): 1, (1, 2): 1}
    >>> exact = {arc: Fraction(width) for arc, width in links.items()}
    >>> broadcast = Demand(Fraction(1), (0,), (), (1, 2))
    >>> [str(best_mixture(4, exact, branching, [broadcast]).rate) for branching in ((0, 1, 2, 3), (0, 1, 2))]
    ['3', '2']
    """
    program = TreeProgram(n, links, branch_nodes, demands, exact_up_to)
    if program.solve({}) is None:
        return None
    weights = [demand.weight for demand in demands]
    rate, trees = program.mixture(weights)
    proved = program.proof(rate)
    if rate < proved.most:  # perhaps only because the weights of the trees are rounded
        part, exact = program.exact_mixture([weight * proved.most for weight in weights], quick=True)
        if part == 1:
            rate, trees = proved.most, exact
    tree_weights = [tree.weight for demand_trees in trees for tree in demand_trees]
    if program.heuristic and sum(tree_weights) > _MOST_PARTS * common_unit(tree_weights):
        rate, trees = program.even_mixture(weights)
    return Mixture(rate, trees, proved.most, proved.prices)


class _Column(NamedTuple):
    """A tree as a variable of the program, which is the rate of the tree."""

    demand: int
    tree: MixedTree  # the weight in it is not used
    uses: tuple[tuple[int, int], ...]  # how often the tree uses each link: (number of the link, times), sorted


class TreeProgram:
    """The linear program of some demands and the trees found so far. It can be solved with different fixed rates."""

    def __init__(
        self, n: int, links: _Links, branch_nodes: Sequence[int], demands: Sequence[Demand], exact_up_to: int = MANY
    ) -> None:
        """Start without trees. The arguments are those of ``best_mixture``."""
        self.links, self.demands, self.widths = list(links), demands, list(links.values())
        self.branch_nodes = list(branch_nodes)
        self.fixed: Mapping[int, Fraction] = {}
        widest = float(max(self.widths))
        self.prices = [widest / float(width) for width in self.widths]  # of each link, in the last solution
        self.columns: dict[_Column, None] = {}  # used as an ordered set
        self.weights: list[float] = []  # the rates of the first columns in the last solution; later columns have none
        self.scale = lcm(*(width.denominator for width in self.widths))
        self.largest = max(self.widths)
        sizes = [demand.weight for demand in demands]
        self.uneven = max(self.widths) * max(sizes) > _UNEVEN * min(self.widths) * min(sizes)
        self.number = {arc: k for k, arc in enumerate(links)}
        # If links are equal in both directions, and all demands reduce and copy, each tree that copies is also used
        # backwards, to reduce. Both directions of a link are then used equally, and have one row and one price.
        symmetric = all(links.get((dst, src)) == width for (src, dst), width in links.items())
        self.paired = symmetric and all(set(demand.sources) == set(demand.destinations) for demand in demands)
        self.rows = [k for k, (src, dst) in enumerate(self.links) if src < dst or not self.paired]
        self.trees: dict[tuple[bool, tuple[int, ...]], CheapestTrees | HeuristicTrees] = {}  # see ``_keys``
        self.roots: dict[int, deque[int]] = {}  # by demand in ``heuristic``: the roots, rotated after each round
        back = [(dst, src) for src, dst in self.links]
        for k in range(len(demands)):
            for outward, ends in self._keys(k):
                if (outward, ends) not in self.trees:
                    kind = CheapestTrees if few_enough(len(ends), len(branch_nodes), exact_up_to) else HeuristicTrees
                    self.trees[outward, ends] = kind(n, self.links if outward else back, ends, branch_nodes)
        # The numbers of the demands for which a heuristic finds the trees.
        searches = [[self.trees[key] for key in self._keys(k)] for k in range(len(demands))]
        self.heuristic = {k for k, used in enumerate(searches) if any(isinstance(s, HeuristicTrees) for s in used)}

    def solve(self, fixed: Mapping[int, Fraction]) -> float | None:
        """Return the greatest rate of a demand of weight 1, or ``None`` if a demand cannot be met.

        Trees are added until no cheaper ones are found. ``fixed`` contains the rates in GB/s of some demands, by
        number. Earlier trees of this program must reach these rates. At least one demand must have no fixed rate.
        """
        self.fixed, rate, self.weights = fixed, 0.0, []
        best, tried, part = 0.0, self._scale(self.prices), _PART_OF_BEST  # ``best`` is 1 / the least limit of the rate
        center = tried  # the prices that give the least limit so far (with heuristic trees, this limit is not proved)
        for _ in range(_MOST_HEURISTIC_ROUNDS if self.heuristic else _MOST_ROUNDS):
            cheapest = self._cheapest_trees(tried)
            if cheapest is None:
                return None
            before = len(self.columns)
            self.columns.update((column, None) for _, columns in cheapest for column in columns)
            # No mixture has a higher rate than ``value / cost``: the value of all links, less the price of trees for
            # the fixed rates, divided by the price of trees for the other demands.
            value = sum(price * float(width) for price, width in zip(tried, self.widths, strict=True))
            value -= sum(float(fixed_rate) * cheapest[k][0] for k, fixed_rate in fixed.items())
            free = [(demand.weight, cheapest[k][0]) for k, demand in enumerate(self.demands) if k not in fixed]
            cost = sum(float(weight) * least for weight, least in free)
            if value > 0 and cost / value > best:
                best, center = cost / value, tried
            reached = rate * best >= 1 - _CLOSE if part else rate * cost >= value * (1 - _NEAR)
            if self.weights and (reached or len(self.columns) == before):
                if not part:
                    break
                part = 0.0  # from now on, trees are searched at the last prices
            rate, self.weights, self.prices = self.mix(list(self.columns))
            if self.heuristic:
                self._prune()
            last = self._scale(self.prices)
            tried = [part * a + (1 - part) * b for a, b in zip(center, last, strict=True)] if part else self.prices
        return rate

    def _scale(self, prices: Sequence[float]) -> list[float]:
        """Return the prices times a factor, such that the sum of bandwidth x price is 1. Negative prices become 0."""
        total = sum(max(0.0, price) * float(width) for price, width in zip(prices, self.widths, strict=True))
        return [max(0.0, price) / total for price in prices]

    def mixture(self, wanted: Sequence[Fraction]) -> _ScaledTrees:
        """Return trees of the last solution with exact weights, scaled to the bandwidths.

        The rates of the last solution must be in proportion to the wanted rates, except for rounding errors.
        """
        columns = list(self.columns)[: len(self.weights)]
        unit = float(self.largest * self.scale)
        best: _ScaledTrees = Fraction(0), []
        for most in DENOMINATORS:
            weights = [Fraction(weight * unit).limit_denominator(most) for weight in self.weights]
            rounded = self._fit_weights(columns, weights, wanted)
            if rounded[0] > best[0] * (1 + Fraction(1, 10**9)):
                best = rounded
        return best

    def even_mixture(self, wanted: Sequence[Fraction]) -> _ScaledTrees:
        """Return the result of ``mixture``, but with all weights of trees as multiples of one number per demand."""
        columns = list(self.columns)[: len(self.weights)]
        return self._fit_weights(columns, [Fraction(round(weight * _PARTS)) for weight in self.weights], wanted)

    def exact_mixture(self, rates: Sequence[Fraction], *, quick: bool = False) -> _ScaledTrees:
        """Return the result of ``mixture`` with weights from iterative refinement, which takes more time.

        If ``quick``, only weights of few bits are tried. For many nodes, weights of more bits take minutes.
        """
        used = [column for column, weight in zip(self.columns, self.weights, strict=False) if weight > 0]
        best: _ScaledTrees = Fraction(0), []
        tries = product((used, list(self.columns)), _MORE_BITS)
        for columns, bits in islice(tries, 1) if quick else tries:
            solution = refine(self.program(columns, [rate / self.largest for rate in rates], {}), 2 * bits + 8)
            weights = [(value * self.scale).limit_denominator(1 << bits) for value in solution.values[1:]]
            best = max(best, self._fit_weights(columns, weights, rates), key=lambda mixture: mixture[0])
            if best[0] == 1:
                break
        return best

    def _keys(self, k: int) -> list[tuple[bool, tuple[int, ...]]]:
        """Return the kinds of trees that demand ``k`` needs, each as (whether trees copy, the nodes that they join)."""
        ends = (True, self.demands[k].destinations), (False, self.demands[k].sources)
        return [key for key in ends if key[1]][: 1 if self.paired else 2]

    def _cheapest_trees(self, prices: Sequence[float]) -> list[tuple[float, list[_Column]]] | None:
        """Return, for each demand, (the least price of the trees found, these trees as new columns).

        An exact search finds the cheapest tree from each of the best roots. For demands in ``heuristic``, the trees are
        those of ``_diverse_trees``. Return ``None`` if a demand has no tree.
        """
        # The search needs positive prices. The returned price of a tree is the sum of the true prices.
        floor = _LEAST_PRICE * sum(prices) / len(prices)
        floored = [max(0.0, price) + floor for price in prices]
        cheapest = []
        for k, costs in enumerate(self._costs(floored)):
            if k in self.heuristic:
                columns = self._diverse_trees(k, floored)
            else:
                columns = [self._column(k, root) for root in sorted(costs, key=lambda root: costs[root])[:_MOST_ROOTS]]
            if not columns:
                return None
            least = min(sum(prices[link] * times for link, times in column.uses) for column in columns)
            cheapest.append((least, columns))
        return cheapest

    def _diverse_trees(self, k: int, prices: Sequence[float]) -> list[_Column]:
        """Return many cheap trees of a demand as columns. No two of them use the same links equally often.

        After each tree, the prices of its links are raised, so that the next tree avoids the most loaded links.
        """
        raised = list(prices)
        diverse: dict[tuple[tuple[int, int], ...], _Column] = {}
        for root in self._next_roots(k, prices):
            for key in self._keys(k):
                self.trees[key].price(raised)
            column = self._column(k, root)
            diverse.setdefault(column.uses, column)
            loads = [(link, times / float(self.widths[link])) for link, times in column.uses]
            most = max(load for _, load in loads)
            for link, load in loads:
                raised[link] *= 1 + _RAISE * load / most
        # If the program already has a column with the same use of links, this column is returned instead of a new one.
        listed = {column.uses: column for column in self.columns if column.demand == k}
        return [listed.get(uses, column) for uses, column in diverse.items()]

    def _next_roots(self, k: int, prices: Sequence[float]) -> Iterable[int]:
        """Return the root of each tree that a round adds to a demand in ``heuristic``, or none if it has no tree."""
        for key in self._keys(k):
            self.trees[key].price(prices)
        if k not in self.roots:
            self.roots[k] = deque(root for root in self.demands[k].roots if isfinite(self._cost(k, root)))
        roots = self.roots[k]
        count = max(min(len(roots), _MOST_ROOTS), _TREES_OF_ROUND // len(self.heuristic))
        roots.rotate(-count)  # the next round begins with other roots
        chosen: Iterable[int] = list(roots)[:count]
        if not self.paired:  # in a paired program, the root does not matter: any node of a tree can be its root
            chosen = sorted(chosen, key=lambda root: self._cost(k, root))[:_MOST_ROOTS]
        return islice(cycle(chosen), count)

    def _cost(self, k: int, root: int) -> float:
        """Return the price of the tree that is found for a demand and a root, or infinity if there is none."""
        return (2 if self.paired else 1) * sum(self.trees[key].cost(root) for key in self._keys(k))

    def _prune(self) -> None:
        """Remove the most expensive trees of demands that have too many, except trees of the last solution."""
        listed = list(self.columns)
        kept = {c for c, weight in enumerate(self.weights) if weight > 0}
        for k in range(len(self.demands)):
            of_demand = [c for c, column in enumerate(listed) if column.demand == k]
            if 2 * len(of_demand) > 3 * _KEPT * len(self.rows) and k in self.heuristic:
                price = {c: sum(self.prices[link] * times for link, times in listed[c].uses) for c in of_demand}
                of_demand = sorted(of_demand, key=lambda c: price[c])[: _KEPT * len(self.rows)]
            kept.update(of_demand)
        self.columns = dict.fromkeys(listed[c] for c in sorted(kept))
        self.weights = [self.weights[c] for c in sorted(kept)]

    def _costs(self, prices: Sequence[float]) -> list[dict[int, float]]:
        """Set the prices of the links, and return for each demand a dictionary from roots to prices of cheapest trees.

        A dictionary contains the roots that have a tree. It is empty for demands in ``heuristic``.
        """
        for trees in self.trees.values():
            trees.price(prices)
        by_demand = []
        for k, demand in enumerate(self.demands):
            costs = {root: self._cost(k, root) for root in demand.roots if k not in self.heuristic}
            by_demand.append({root: cost for root, cost in costs.items() if isfinite(cost)})
        return by_demand

    def _column(self, k: int, root: int) -> _Column:
        """Return the tree that was found for a demand and a root, at the last prices, as a column."""
        parents = {key[0]: tuple(self.trees[key].parents(root)) for key in self._keys(k)}
        out, into = parents.get(True), parents.get(False)
        if self.paired:
            into = out
        if into is not None:  # it was found on the reversed links
            into = tuple((node, parent, through[::-1]) for node, parent, through in into)
        uses: Counter[int] = Counter()
        paths = [(parent, *through, node) for node, parent, through in out or ()]
        paths += [(node, *through, parent) for node, parent, through in into or ()]
        for path in paths:
            uses.update(self.number[pair] for pair in pairwise(path))
        return _Column(k, MixedTree(root, Fraction(1), into, out), tuple(sorted(uses.items())))

    def program(self, columns: Sequence[_Column], rates: Sequence[Fraction], fixed: Mapping[int, Fraction]) -> Rows:
        """Return the linear program. It maximises the first variable, a factor of the rates that are not fixed.

        The other variables are the weights of the trees. Weights and fixed rates are divided by ``largest``.
        """
        met: list[Row] = []  # the trees of each demand reach its rate
        for k, rate in enumerate(rates):
            of_demand = [c + 1 for c, column in enumerate(columns) if column.demand == k]
            met.append(([0, *of_demand], [0 if k in fixed else rate, *[-1] * len(of_demand)]))
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
        """Return the greatest rate with these trees, the weight of each tree, and the price of each link."""
        rows = self.program(columns, [demand.weight for demand in self.demands], self.fixed)
        solution = refine(rows, _BITS) if self.uneven else solve(rows)
        prices = [0.0] * len(self.links)
        for k, price in zip(self.rows, solution.prices[len(self.demands) :], strict=True):
            src, dst = self.links[k]
            prices[k] = float(price) / 2 if self.paired else float(price)
            if self.paired:
                prices[self.number[dst, src]] = prices[k]
        values = [float(value) for value in solution.values]
        return values[0] * float(self.largest), values[1:], prices

    def _fit_weights(self, columns: list[_Column], weights: list[Fraction], wanted: Sequence[Fraction]) -> _ScaledTrees:
        """Return the trees of some columns with their weights, scaled to the bandwidths.

        First, the weights of each demand are scaled to its wanted rate. Then all weights are scaled by one factor, so
        that the fullest link is just full.
        """
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
        """Return the least upper limit of the rate that the last prices prove after rounding to fractions.

        ``rate`` is the rate of the trees that were found, or ``None``. A limit that equals it ends the search.
        """
        proofs: list[ProvedRate] = []
        total = sum(price * float(width) for price, width in zip(self.prices, self.widths, strict=True))
        scaled = [max(0.0, price) * float(self.largest) / total for price in self.prices]
        roundings = [[Fraction(price).limit_denominator(most) for price in scaled] for most in DENOMINATORS]
        for prices in [*roundings, [Fraction(round(price * _PARTS), _PARTS) for price in scaled]]:
            scale = lcm(*(price.denominator for price in prices))
            if 2 * scale * sum(prices) >= 1 << 53:
                continue  # ``CheapestTrees`` could not add such prices exactly
            costs = [Fraction(cost, scale) for cost in self._least_prices([int(price * scale) for price in prices])]
            priced = enumerate(zip(self.demands, costs, strict=True))
            unit = sum((demand.weight * cost for k, (demand, cost) in priced if k not in self.fixed), Fraction(0))
            if not unit:
                continue
            value = sum((price * width for price, width in zip(prices, self.widths, strict=True)), Fraction(0))
            proved = (value - sum((fixed * costs[k] for k, fixed in self.fixed.items()), Fraction(0))) / unit
            proofs.append(ProvedRate(proved, tuple(p / unit for p in prices), tuple(cost / unit for cost in costs)))
            if proved == rate:
                break
        assert proofs, "prices in multiples of 1 / _PARTS have exact sums"
        return min(proofs, key=lambda proof: proof.most)

    def _least_prices(self, prices: Sequence[int]) -> list[int]:
        """Return, for each demand, the price of its cheapest tree, or a lower limit if it is in ``heuristic``."""
        least = [int(min(costs.values(), default=0)) for costs in self._costs([float(price) for price in prices])]
        priced = [(*link, price) for link, price in zip(self.links, prices, strict=True)]
        for k, demand in enumerate(self.demands):
            if k in self.heuristic:
                ends = demand.sources, demand.destinations
                least[k] = least_price(priced, self.branch_nodes, *ends, demand.roots, exact=False) or 0
        return least
