"""The linear program of trees: its variables, the cuts that limit them, and the exact checks of its solutions.

Variables: x_r, the rate rooted at device r; cB_e and cR_e, the bandwidth of link e that broadcasts and reductions use.
Maximise sum(x) subject to cB_e + cR_e <= b_e; the flow into a switch that cannot reduce equals the flow out of it; and
for every set S of nodes that does not contain all devices, the sum of x_r over the roots r in S is at most the sum of
cB_e over the links that leave S, and at most the sum of cR_e over the links that enter S. If links are equal in both
directions, reductions use the routes of the broadcasts backwards, which halves the program. If the roots have weights,
there are broadcasts only: one variable is the rate of all roots, of which each has a part in proportion to its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Final, NamedTuple

from ...topology import Topology
from .cuts import tightest_cut
from .flows import Network
from .solver import Row, Rows, Solution

_FINE: Final = 1 << 20  # capacities are rounded to 1 / _FINE in the search for cuts that a float solution violates


class NodeCut(NamedTuple):
    """A set of nodes by their numbers, and the direction in which data must cross it; see ``Cut``."""

    nodes: frozenset[int]
    outward: bool


class Proof(NamedTuple):
    """A dual solution and the rate that it proves."""

    rate: Fraction
    cuts: list[tuple[NodeCut, Fraction]]
    potentials: dict[int, tuple[Fraction, Fraction]]  # by switch: (in broadcasts, in reductions)


class CutProgram:
    """The linear program of a topology, in bandwidths that are scaled to integers."""

    def __init__(self, topology: Topology, weights: Mapping[int, Fraction] | None = None) -> None:
        self.topology = topology
        self.n, self.links = len(topology.devices), topology.links
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.arcs = [(number[link.src], number[link.dst]) for link in self.links]
        self.leaving: list[list[int]] = [[] for _ in number]  # the links out of each node
        self.entering: list[list[int]] = [[] for _ in number]
        for k, (src, dst) in enumerate(self.arcs):
            self.leaving[src].append(k)
            self.entering[dst].append(k)
        self.plain = [number[switch.name] for switch in topology.switches if not switch.reduces]
        # Bandwidths are scaled to integers, so that they add no denominators to an exact solution.
        self.scale = lcm(*(link.bandwidth.denominator for link in self.links))
        self.width = [int(link.bandwidth * self.scale) for link in self.links]
        self.largest = max(self.width)
        self.parts: dict[int, Fraction] | None = None  # each root's part of the rate; ``None``: any
        if weights is not None:
            whole = sum(weights.values(), Fraction(0))
            self.parts = {root: weight / whole for root, weight in weights.items() if weight}
        self.rates = self.n if weights is None else 1  # the first columns are rates of roots
        m = len(self.arcs)
        self.down = [self.rates + k for k in range(m)]
        self.paired = weights is None and topology.symmetric  # reductions use the routes of broadcasts backwards
        if self.paired:
            back = {arc: k for k, arc in enumerate(self.arcs)}
            self.up = [self.rates + back[dst, src] for src, dst in self.arcs]
        else:
            self.up = [] if self.parts else [column + m for column in self.down]
        one_way = self.paired or self.parts is not None
        self.directions = [(self.down, True)] if one_way else [(self.down, True), (self.up, False)]
        self.columns = self.rates + m * len(self.directions)
        # simple: the rate if a reduce-scatter uses half of every link and an all-gather the other half. It is the
        # optimum on most machines if all of their devices take part. 0: it was not computed.
        self.simple = Fraction(0)
        if self.paired:
            _, ratio = tightest_cut(topology, dict.fromkeys(topology.devices, Fraction(1)), outward=True)
            self.simple = self.n / ratio / 2

    @property
    def sharing(self) -> list[tuple[int, ...]]:
        """For each link, the columns that share its bandwidth."""
        return list(zip(self.down, self.up, strict=True)) if self.up else [(column,) for column in self.down]

    def rooted(self, values: Sequence[Fraction]) -> dict[int, Fraction]:
        """Return the rate of each root in a solution."""
        if self.parts is not None:
            return {root: part * values[0] for root, part in self.parts.items()}
        return dict(enumerate(values[: self.n]))

    def first_cuts(self) -> dict[NodeCut, None]:
        """Return the cuts around each device and each island of devices."""
        everyone = frozenset(range(len(self.topology.nodes)))
        sets = [frozenset({v}) for v in range(self.n)] + self._islands()
        sets += [everyone - nodes for nodes in sets]
        return {NodeCut(nodes, outward): None for _, outward in self.directions for nodes in sets}

    def _islands(self) -> list[frozenset[int]]:
        """Return the islands, if there are several, each with the switches whose links lead to this island only."""
        number = {node: k for k, node in enumerate(self.topology.nodes)}
        groups = [frozenset(number[device] for device in island) for island in self.topology.islands]
        near = {switch: {self.arcs[k][1] for k in self.leaving[switch]} for switch in range(self.n, len(number))}
        inside = [group | {switch for switch, others in near.items() if others and others <= group} for group in groups]
        return inside if len(groups) > 1 else []

    def crossing(self, cut: NodeCut) -> list[int]:
        """Return the numbers of the links that cross a cut, sorted."""
        nodes = cut.nodes
        if 2 * len(nodes) <= len(self.leaving):
            near, far = (self.leaving, 1) if cut.outward else (self.entering, 0)
            return sorted(k for node in nodes for k in near[node] if self.arcs[k][far] not in nodes)
        near, far = (self.entering, 0) if cut.outward else (self.leaving, 1)
        outside = (node for node in range(len(near)) if node not in nodes)
        return sorted(k for node in outside for k in near[node] if self.arcs[k][far] in nodes)

    @property
    def least_cut(self) -> Fraction:
        """The bandwidth of the narrowest cut that all data of some device must cross, an upper bound of the rate.

        It is in scaled units, like ``width``.
        """
        topology = self.topology
        roots = {0} if self.parts is None else set(self.parts)
        first = {topology.devices[root]: self.parts[root] if self.parts else Fraction(1) for root in roots}
        ways = (True,) if self.parts else (True, False)
        return min(self.scale / tightest_cut(topology, first, outward=outward)[1] for outward in ways)

    def rows(self, cuts: Iterable[NodeCut], unit: int, most: int) -> Rows:
        """Return the program with some of its cuts, its bandwidths limited to ``most`` and divided by ``unit``."""
        upper: list[Row] = []
        for cut in cuts:
            inside: dict[int, int | Fraction] = {r: 1 for r in cut.nodes if r < self.n}
            if self.parts is not None:
                part = sum((self.parts.get(r, Fraction(0)) for r in inside), Fraction(0))
                inside = {0: part} if part else {}
            columns_of = self.down if cut.outward else self.up
            across = [columns_of[k] for k in self.crossing(cut)]
            upper.append(([*inside, *across], [*inside.values()] + [-1] * len(across)))
        limits = [Fraction(0)] * len(upper)
        shared = {
            tuple(sorted(two)): Fraction(min(b, most), unit) for two, b in zip(self.sharing, self.width, strict=True)
        }
        upper += [(columns, [1] * len(columns)) for columns in shared]
        equal: list[Row] = []
        for switch in self.plain:
            for columns, _ in self.directions:
                signs = [(c, (d == switch) - (s == switch)) for c, (s, d) in zip(columns, self.arcs, strict=True)]
                equal.append(([c for c, sign in signs if sign], [sign for _, sign in signs if sign]))
        return Rows(self.columns, self.rates, upper, limits + list(shared.values()), equal)

    def network(self, rates: Mapping[int, int], values: Sequence[int], columns: list[int], outward: bool) -> Network:
        """Return the network of used links, reversed unless ``outward``; a source, the last node, feeds the roots."""
        pairs = zip(self.arcs, columns, strict=True)
        capacities = {(arc if outward else arc[::-1]): values[column] for arc, column in pairs}
        source = len(self.topology.nodes)
        return Network(source + 1, capacities | {(source, root): rate for root, rate in rates.items()})

    def nearly_violated(self, values: Sequence[float]) -> list[NodeCut]:
        """Return cuts that a float solution violates: for each device and direction, a minimum cut from the roots."""
        fine = [round(value * _FINE) for value in values]
        rates = dict(enumerate(fine[: self.n]))
        if self.parts is not None:
            rates = {root: round(part * fine[0]) for root, part in self.parts.items()}
        needed = sum(values[: self.rates]) * _FINE - 2 * len(self.arcs)
        return self._cuts_below(needed, rates, fine)

    def violated(self, values: Sequence[Fraction]) -> list[NodeCut]:
        """Return cuts that an exact solution violates; none: no cut is violated."""
        rooted = self.rooted(values)
        scale = lcm(*(value.denominator for value in (*values, *rooted.values())))
        rates = {root: int(rate * scale) for root, rate in rooted.items()}
        return self._cuts_below(sum(rates.values()), rates, [int(value * scale) for value in values])

    def _cuts_below(self, needed: float, rates: Mapping[int, int], values: Sequence[int]) -> list[NodeCut]:
        source = len(self.topology.nodes)
        found: dict[NodeCut, None] = {}
        for columns, outward in self.directions:
            network = self.network(rates, values, columns, outward)
            for sink in range(self.n):
                if network.flow(source, sink) < needed:
                    found[NodeCut(network.cut(source, sink) - {source}, outward)] = None
        return list(found)

    def fits(self, values: Sequence[Fraction]) -> bool:
        """Return whether a solution keeps to the bandwidths, and switches that cannot reduce send what they receive."""
        within = all(
            sum(values[c] for c in shared) <= Fraction(b, self.scale)
            for shared, b in zip(self.sharing, self.width, strict=True)
        )
        return within and all(
            not sum(values[c] * ((d == switch) - (s == switch)) for c, (s, d) in zip(columns, self.arcs, strict=True))
            for switch in self.plain
            for columns, _ in self.directions
        )

    def proof(self, solution: Solution, cuts: Sequence[NodeCut], limit: int) -> Proof:
        """Round a dual solution to denominators up to ``limit``, and return the rate that it proves."""

        def rounded(value: float | Fraction) -> Fraction:
            return Fraction(value).limit_denominator(limit)

        prices = [max(Fraction(0), rounded(v)) for v in solution.prices[: len(cuts)]]
        shifts = [-rounded(v) for v in solution.shifts]
        weights = list(zip(cuts, prices, strict=True))
        if self.paired:  # half of the price of a cut is for broadcasts, half for the reductions backwards
            weights = [(NodeCut(cut.nodes, outward), price / 2) for cut, price in weights for outward in (True, False)]
            potentials = {switch: (s / 2, -s / 2) for switch, s in zip(self.plain, shifts, strict=True)}
        elif self.parts is not None:
            potentials = {switch: (s, Fraction(0)) for switch, s in zip(self.plain, shifts, strict=True)}
        else:
            potentials = {w: (shifts[2 * k], shifts[2 * k + 1]) for k, w in enumerate(self.plain)}
        covered = [sum((w for cut, w in weights if r in cut.nodes), Fraction(0)) for r in range(self.n)]
        # The total weight of the cuts that the trees of any root must cross (on average, if the roots have weights).
        least = min(covered)
        if self.parts is not None:
            least = sum((part * covered[root] for root, part in self.parts.items()), Fraction(0))
        if not least:
            return Proof(Fraction(sum(self.width)), [], {})
        weights = [(cut, w / least) for cut, w in weights if w]
        potentials = {switch: (a / least, b / least) for switch, (a, b) in potentials.items()}
        price = [[Fraction(0), Fraction(0)] for _ in self.arcs]  # by link: its price in broadcasts and in reductions
        for cut, w in weights:
            for k in self.crossing(cut):
                price[k][not cut.outward] += w
        for switch, shift in potentials.items():
            for d in (0, 1):
                for k in self.entering[switch]:
                    price[k][d] += shift[d]
                for k in self.leaving[switch]:
                    price[k][d] -= shift[d]
        total = sum(width * max(Fraction(0), *two) for width, two in zip(self.width, price, strict=True))
        return Proof(Fraction(total) / self.scale, weights, potentials)

    def feasible(self, values: Sequence[Fraction]) -> Fraction:
        """Return the rate of an exact solution; -1: it violates a constraint."""
        if not self.fits(values) or self.violated(values):
            return Fraction(-1)
        return sum(values[: self.rates], Fraction(0))
