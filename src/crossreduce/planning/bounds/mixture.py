"""The best mixture of trees that share the links, where trees may branch at nodes that take no part.

Each demand is for trees that join some members; all demands have the same rate, or rates in proportion to weights. The
mixture is the optimum of a linear program with one variable per tree. There are too many trees to list, so the program
begins with a few; its solution gives each link a price, and the cheapest trees at these prices are added, until none is
cheaper than those that it has. Then the prices prove that no mixture has a higher rate.

Source: Gilmore & Gomory, A linear programming approach to the cutting-stock problem, Operations Research 9(6), 1961
(columns added by price); Jain, Mahdian & Salavatipour, Packing Steiner trees, SODA 2003 (the program of trees).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, repeat
from math import isfinite, lcm
from typing import Final, NamedTuple

from ...topology import Topology
from ..topologies import NeutralTopology, neutral, reachable
from .linear_program import DENOMINATORS
from .solver import Row, Rows, solved
from .steiner import CheapestTrees, Parent, few_enough

_MOST_ROUNDS: Final = 400
_MOST_ROOTS: Final = 8  # trees that a round adds to a demand, each of another root
_NEAR: Final = 1e-9  # the relative error of rates in floating point
_MOST_UNEVEN: Final = 1_000_000  # of bandwidths or weights: the largest divided by the smallest
_FINE: Final = 1 << 30  # prices that are not simple fractions are multiples of 1 / _FINE
# The least price of a link, relative to the mean: of equally cheap trees, the one with the fewest hops is taken.
_LEAST_PRICE: Final = 1e-7

Arc = tuple[int, int]


class Demand(NamedTuple):
    """Trees that reduce from all sources to a root, copy from the root to all destinations, or both."""

    weight: Fraction  # its rate is in proportion to it
    roots: tuple[int, ...]  # any of these nodes may be the root of a tree
    sources: tuple[int, ...]  # (): its trees only copy
    destinations: tuple[int, ...]  # (): its trees only reduce


class MixedTree(NamedTuple):
    """A tree of a mixture; parents come before their children."""

    root: int
    weight: Fraction  # in GB/s
    into: tuple[Parent, ...] | None  # how it reduces; a route has the nodes on the way to the parent
    out: tuple[Parent, ...] | None  # how it copies; a route has the nodes on the way from the parent


class Mixture(NamedTuple):
    """The trees of each demand, which together fit the links, and the prices that prove that no others are better."""

    rate: Fraction  # of a demand of weight 1, in GB/s
    trees: list[list[MixedTree]]
    most: Fraction  # the rate that the prices prove to be the greatest; ``rate`` unless rounding failed
    prices: tuple[Fraction, ...]  # of each link, such that the cheapest trees of all demands together cost 1


class Helped(NamedTuple):
    """The best trees of a collective with helpers: other devices, and switches that reduce."""

    seen: NeutralTopology  # the members, then the helpers, are its devices
    mixture: Mixture


@lru_cache(maxsize=512)
def helped(
    topology: Topology, collective: str, members: tuple[str, ...], roots: tuple[tuple[str, Fraction], ...] | None = None
) -> Helped | None:
    """Return the best trees among some devices with all helpers; ``None``: no helper, too many members, or no trees.

    Bandwidths or weights of very different sizes also give ``None``, since the program is solved in floating point.
    ``roots``: for all collectives but all-reduce, the roots and their weights; ``None``: all members, with equal
    weights. The rate is that of all roots together.

    >>> half = helped(Topology.machine("mi300x"), "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    >>> half.mixture.rate / 64, half.mixture.rate == half.mixture.most  # links have 64 GB/s
    (Fraction(6, 1), True)
    """
    others = [device for device in topology.devices if device not in members]
    others += [switch.name for switch in topology.switches if switch.reduces]
    near = reachable(topology, members[0]) & reachable(topology, members[0], backwards=True)
    helpers = tuple(node for node in others if node in near)
    parts = {members.index(root): weight for root, weight in roots or zip(members, repeat(Fraction(1))) if weight}
    given = parts.values()
    widths = [link.bandwidth for link in topology.links]
    uneven = max(given) > _MOST_UNEVEN * min(given) or max(widths, default=1) > _MOST_UNEVEN * min(widths, default=1)
    if not helpers or len(members) == 1 or uneven or not few_enough(len(members), len(members) + len(helpers)):
        return None
    seen = neutral(topology, members, helpers)
    number = {node: k for k, node in enumerate(seen.topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in seen.topology.links}
    joints, everyone = tuple(range(len(seen.topology.devices))), tuple(range(len(members)))
    demands = [Demand(Fraction(1), joints, everyone, everyone)]
    if collective != "all_reduce":
        outward = collective in ("broadcast", "all_gather")
        ends = ((), everyone) if outward else (everyone, ())
        demands = [Demand(weight / sum(given), (root,), *ends) for root, weight in parts.items()]
    found = best_mixture(len(number), links, joints, demands)
    return None if found is None or not found.rate else Helped(seen, found)


def best_mixture(
    n: int, links: Mapping[Arc, Fraction], joints: Sequence[int], demands: Sequence[Demand]
) -> Mixture | None:
    """Return the best trees; ``None``: a demand cannot be met.

    Args:
      n: the number of nodes; each is a number from 0 to n - 1.
      links: the bandwidth of each, in GB/s.
      joints: the nodes at which trees may branch; all sources, destinations and roots among them.

    Both receivers are behind a hub, node 3. A narrow link is a second way to one of them.

    >>> links = {(0, 3): 2, (3, 1): 2, (3, 2): 3, (0, 1): 1, (1, 2): 1}
    >>> exact = {arc: Fraction(width) for arc, width in links.items()}
    >>> broadcast = Demand(Fraction(1), (0,), (), (1, 2))
    >>> [str(best_mixture(4, exact, joints, [broadcast]).rate) for joints in ((0, 1, 2, 3), (0, 1, 2))]
    ['3', '2']
    """
    search = _TreeProgram(n, links, joints, demands)
    widest = float(max(links.values()))
    prices = [widest / float(width) for width in links.values()]
    columns: dict[_Column, None] = {}
    rate, weights = 0.0, list[float]()
    for _ in range(_MOST_ROUNDS):
        found = search.cheapest(prices)
        if found is None:
            return None
        before = len(columns)
        columns.update((column, None) for _, of_demand in found for column in of_demand)
        # No mixture has a higher rate than the value of all links, divided by the price of a tree for each demand.
        value = sum(price * float(width) for price, width in zip(prices, links.values(), strict=True))
        cost = sum(float(one.weight) * least for one, (least, _) in zip(demands, found, strict=True))
        if weights and (len(columns) == before or rate * cost >= value * (1 - _NEAR)):
            break
        rate, weights, prices = search.mixed(list(columns))
    made, trees = search.rounded(list(columns)[: len(weights)], weights)
    return Mixture(made, trees, *search.proof(prices, made))


class _Column(NamedTuple):
    demand: int
    tree: MixedTree  # its weight is not used
    uses: tuple[tuple[int, int], ...]  # how often it uses each link: (number of the link, times), sorted


class _TreeProgram:
    """The links, the demands, and the cheapest trees of each."""

    def __init__(self, n: int, links: Mapping[Arc, Fraction], joints: Sequence[int], demands: Sequence[Demand]) -> None:
        self.links, self.demands, self.widths = list(links), demands, list(links.values())
        self.scale = lcm(*(width.denominator for width in self.widths))
        self.largest = max(self.widths)
        self.number = {arc: k for k, arc in enumerate(links)}
        # If links are equal in both directions, and all demands reduce and copy, a tree that copies is one that
        # reduces, backwards. Then both directions of a link are used equally, and have one row and one price.
        symmetric = all(links.get((dst, src)) == width for (src, dst), width in links.items())
        self.paired = symmetric and all(set(one.sources) == set(one.destinations) for one in demands)
        self.rows = [k for k, (src, dst) in enumerate(self.links) if src < dst or not self.paired]
        self.trees: dict[tuple[bool, tuple[int, ...]], CheapestTrees] = {}
        back = [(dst, src) for src, dst in self.links]
        for k in range(len(demands)):
            for outward, ends in self._keys(k):
                if (outward, ends) not in self.trees:
                    self.trees[outward, ends] = CheapestTrees(n, self.links if outward else back, ends, joints)

    def _keys(self, k: int) -> list[tuple[bool, tuple[int, ...]]]:
        """Return which trees a demand needs: (whether they copy, the nodes that they join)."""
        ends = (True, self.demands[k].destinations), (False, self.demands[k].sources)
        return [key for key in ends if key[1]][: 1 if self.paired else 2]

    def cheapest(self, prices: Sequence[float]) -> list[tuple[float, list[_Column]]] | None:
        """Return for each demand the price of its cheapest tree, and a tree of each of the best roots.

        ``None``: a demand has no tree.
        """
        floor = _LEAST_PRICE * sum(prices) / len(prices)
        floored = [max(0.0, price) + floor for price in prices]
        found = []
        for k, costs in enumerate(self._costs(floored)):
            columns = [self._column(k, root) for root in sorted(costs, key=lambda root: costs[root])[:_MOST_ROOTS]]
            if not columns:
                return None
            found.append((min(sum(prices[link] * n for link, n in one.uses) for one in columns), columns))
        return found

    def _costs(self, prices: Sequence[float]) -> list[dict[int, float]]:
        """Set the prices, and return for each demand the price of the cheapest tree of each root that has one."""
        for trees in self.trees.values():
            trees.price(prices)
        ways = 2 if self.paired else 1
        found = []
        for k, demand in enumerate(self.demands):
            costs = {root: ways * sum(self.trees[key].cost(root) for key in self._keys(k)) for root in demand.roots}
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

    def program(self, columns: Sequence[_Column]) -> Rows:
        """Return the program of the rate of a demand of weight 1, and the weight of each tree; both in ``largest``."""
        met: list[Row] = []
        for k, demand in enumerate(self.demands):
            own = [c + 1 for c, column in enumerate(columns) if column.demand == k]
            met.append(([0, *own], [demand.weight, *[-1] * len(own)]))
        within: dict[int, Row] = {k: ([], []) for k in self.rows}
        for c, column in enumerate(columns):
            for link, times in column.uses:
                if link in within:
                    within[link][0].append(c + 1)  # type: ignore[attr-defined]
                    within[link][1].append(times)  # type: ignore[attr-defined]
        limits = [Fraction(0)] * len(met) + [self.widths[k] / self.largest for k in self.rows]
        return Rows(len(columns) + 1, 1, [*met, *within.values()], limits, [])

    def mixed(self, columns: Sequence[_Column]) -> tuple[float, list[float], list[float]]:
        """Return the greatest rate with these trees, the weight of each, and the price of each link."""
        solution = solved(self.program(columns))
        prices = [0.0] * len(self.links)
        for k, price in zip(self.rows, solution.prices[len(self.demands) :], strict=True):
            src, dst = self.links[k]
            prices[k] = price / 2 if self.paired else price
            if self.paired:
                prices[self.number[dst, src]] = price / 2
        return solution.values[0] * float(self.largest), solution.values[1:], prices

    def rounded(self, columns: Sequence[_Column], weights: Sequence[float]) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return trees with exact weights, the simplest that reach the rate of the weights in floating point."""
        whole = float(self.largest * self.scale)
        best: tuple[Fraction, list[list[MixedTree]]] = Fraction(0), []
        for most in DENOMINATORS:
            found = self._fitted(columns, [Fraction(weight * whole).limit_denominator(most) for weight in weights])
            if found[0] > best[0] * (1 + Fraction(1, 10**9)):
                best = found
        return best

    def _fitted(
        self, columns: Sequence[_Column], weights: Sequence[Fraction]
    ) -> tuple[Fraction, list[list[MixedTree]]]:
        """Return the rate and the trees, whose weights are scaled: demands have equal rates, and links suffice."""
        sums = [Fraction(0)] * len(self.demands)
        for column, weight in zip(columns, weights, strict=True):
            sums[column.demand] += max(Fraction(0), weight)
        if not all(sums):
            return Fraction(0), []
        factors = [demand.weight / total for demand, total in zip(self.demands, sums, strict=True)]
        kept = [(c, w * factors[c.demand]) for c, w in zip(columns, weights, strict=True) if w > 0]
        used: dict[int, Fraction] = {}
        for column, weight in kept:
            for link, times in column.uses:
                used[link] = used.get(link, Fraction(0)) + times * weight
        rate = min(self.widths[link] / amount for link, amount in used.items())
        trees: list[list[MixedTree]] = [[] for _ in self.demands]
        for column, weight in kept:
            trees[column.demand].append(column.tree._replace(weight=weight * rate))
        return rate, trees

    def proof(self, prices: Sequence[float], rate: Fraction) -> tuple[Fraction, tuple[Fraction, ...]]:
        """Return the least rate that rounded prices prove to be the greatest, and these prices."""
        found: list[tuple[Fraction, tuple[Fraction, ...]]] = []
        whole = sum(price * float(width) for price, width in zip(prices, self.widths, strict=True))
        near = [max(0.0, price) * float(self.largest) / whole for price in prices]
        tries = [[Fraction(price).limit_denominator(most) for price in near] for most in DENOMINATORS]
        for exact in [*tries, [Fraction(round(price * _FINE), _FINE) for price in near]]:
            scale = lcm(*(price.denominator for price in exact))
            if 2 * scale * sum(exact) >= 1 << 53:
                continue  # sums of prices would not be exact
            least = [min(costs.values()) for costs in self._costs([float(price * scale) for price in exact])]
            if not sum(least):
                continue
            cost = sum((d.weight * int(c) for d, c in zip(self.demands, least, strict=True)), Fraction(0)) / scale
            proved = sum((p * w for p, w in zip(exact, self.widths, strict=True)), Fraction(0)) / cost
            found.append((proved, tuple(price / cost for price in exact)))
            if proved == rate:
                break
        assert found, "prices in multiples of 1 / _FINE have exact sums"
        return min(found, key=lambda one: one[0])
