"""The linear program of trees: variables, the cuts that limit them, and exact checks of solutions.

Variables: x_r is the rate of the trees rooted at node r, a device or a switch that reduces. cB_e and cR_e are the
bandwidths of link e that broadcasts and reductions use. The program maximises the sum of all x_r. Its constraints are:

- cB_e + cR_e is at most the bandwidth of link e.
- The flow into a switch that cannot reduce equals the flow out of it.
- S is any set of nodes that does not contain all devices. The sum of x_r over the roots in S is at most the sum of cB_e
  over the links that leave S, and at most the sum of cR_e over the links that enter S.

If links are equal in both directions, reductions use the routes of the broadcasts backwards, which halves the program.
If the roots have weights, there are only broadcasts, and one variable is the total rate. The rate of each root is a
part of it, in proportion to the weight of the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Final, NamedTuple

from ....topology import Topology
from .cuts import Network, tightest_cut
from .solver import Row, Rows, Solution

_PARTS: Final = 1 << 20  # capacities are rounded to 1 / _PARTS in the search for cuts that a float solution violates


class TreeKind(NamedTuple):
    """The variables of all trees of one kind: of broadcasts, or of reductions."""

    columns: list[int]  # for each link, the number of the variable that is its used bandwidth
    outward: bool  # True: broadcasts; False: reductions
    # By root: (number of a variable, factor). The rate of the root is this variable times the factor.
    rates: dict[int, tuple[int, int | Fraction]]


class NodeCut(NamedTuple):
    """A set of nodes that the data of a ``TreeKind`` must leave, or enter in reductions; see ``Cut``."""

    nodes: frozenset[int]
    kind: int  # the position in ``CutProgram.kinds``


class Proof(NamedTuple):
    """A dual solution and the rate that it proves."""

    rate: Fraction
    cuts: list[tuple[frozenset[int], Fraction, bool]]  # (nodes, weight, outward)
    potentials: dict[int, tuple[Fraction, Fraction]]  # by switch: the shifts of prices (in broadcasts, in reductions)


class CutProgram:
    """The linear program of a topology, in bandwidths that are scaled to integers."""

    def __init__(self, topology: Topology, weights: Mapping[int, Fraction] | None = None) -> None:
        """Make the program of an all-reduce, or of broadcasts from roots with ``weights``."""
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
        m = len(self.arcs)
        self.weighted = weights is not None
        self.paired = weights is None and topology.symmetric  # reductions use the routes of broadcasts backwards
        # If links are equal in both directions, any node of a tree can be its root, so devices suffice as roots.
        reducing = [] if self.paired else [number[switch.name] for switch in topology.switches if switch.reduces]
        roots = [*range(self.n), *reducing]
        self.rates = len(roots) if weights is None else 1  # how many variables are rates: the first ones
        columns = [[self.rates + k * m + link for link in range(m)] for k in (0, 1)]  # of broadcasts, of reductions
        if weights is None:
            rates: dict[int, tuple[int, int | Fraction]] = {root: (k, 1) for k, root in enumerate(roots)}
            directions = (True,) if self.paired else (True, False)
            self.kinds = [TreeKind(columns[k], outward, rates) for k, outward in enumerate(directions)]
        else:
            total = sum(weights.values(), Fraction(0))
            rates = {root: (0, weight / total) for root, weight in weights.items() if weight}
            self.kinds = [TreeKind(columns[0], True, rates)]
        self.columns = self.rates + m * len(self.kinds)
        # For each link, the variables that share its bandwidth.
        self.sharing = list(zip(*(kind.columns for kind in self.kinds), strict=True))
        if self.paired:
            column_of = dict(zip(self.arcs, columns[0], strict=True))
            self.sharing = [(column_of[src, dst], column_of[dst, src]) for src, dst in self.arcs]
        # The rate of an all-reduce whose reduce-scatter uses half of each link and its all-gather the other half. It is
        # the optimum on most machines if all of their devices take part. It is 0 unless the program is paired.
        self.simple = Fraction(0)
        if self.paired:
            _, ratio = tightest_cut(topology, dict.fromkeys(topology.devices, Fraction(1)), outward=True)
            self.simple = self.n / ratio / 2

    def root_rates(self, kind: TreeKind, values: Sequence[Fraction]) -> dict[int, Fraction]:
        """Return the rate of each root in a solution."""
        return {root: part * values[column] for root, (column, part) in kind.rates.items()}

    def first_cuts(self) -> dict[NodeCut, None]:
        """Return the cuts around each device and each island, which are devices joined by the fastest links."""
        everyone = frozenset(range(len(self.topology.nodes)))
        sets = [frozenset({v}) for v in range(self.n)] + self._islands()
        sets += [everyone - nodes for nodes in sets]
        return {NodeCut(nodes, k): None for k in range(len(self.kinds)) for nodes in sets}

    def _islands(self) -> list[frozenset[int]]:
        """Return the islands if there are several. Each includes the switches that have links to this island only."""
        number = {node: k for k, node in enumerate(self.topology.nodes)}
        groups = [frozenset(number[device] for device in island) for island in self.topology.islands]
        ends = {switch: {self.arcs[k][1] for k in self.leaving[switch]} for switch in range(self.n, len(number))}
        islands = [group | {switch for switch, nodes in ends.items() if nodes and nodes <= group} for group in groups]
        return islands if len(groups) > 1 else []

    def crossing(self, cut: NodeCut) -> list[int]:
        """Return the numbers of the links that cross a cut, sorted."""
        nodes, outward = cut.nodes, self.kinds[cut.kind].outward
        if 2 * len(nodes) <= len(self.leaving):
            links, end = (self.leaving, 1) if outward else (self.entering, 0)
            return sorted(k for node in nodes for k in links[node] if self.arcs[k][end] not in nodes)
        # Most nodes are inside, so the links of those outside are fewer.
        links, end = (self.entering, 0) if outward else (self.leaving, 1)
        outside = (node for node in range(len(links)) if node not in nodes)
        return sorted(k for node in outside for k in links[node] if self.arcs[k][end] in nodes)

    @property
    def least_cut(self) -> Fraction:
        """An upper bound of the rate in scaled units, like ``width``: that of the tightest cut.

        For an all-reduce, it is the cut of a broadcast from the first device or of a reduction to it.
        """
        roots = {self.topology.devices[0]: Fraction(1)}
        if self.weighted:
            roots = {self.topology.devices[root]: Fraction(part) for root, (_, part) in self.kinds[0].rates.items()}
        directions = (True,) if self.weighted else (True, False)
        return min(self.scale / tightest_cut(self.topology, roots, outward=outward)[1] for outward in directions)

    def rows(self, cuts: Iterable[NodeCut], unit: int, most: int) -> Rows:
        """Return the program with the constraints of some cuts. Bandwidths: at most ``most``, divided by ``unit``."""
        upper: list[Row] = []
        for cut in cuts:  # the sum of the rates of the roots inside <= the bandwidth across the cut
            kind = self.kinds[cut.kind]
            inside: dict[int, int | Fraction] = {}
            for root in cut.nodes:
                if root in kind.rates:
                    column, part = kind.rates[root]
                    inside[column] = inside.get(column, 0) + part
            across = [kind.columns[k] for k in self.crossing(cut)]
            upper.append(([*inside, *across], [*inside.values()] + [-1] * len(across)))
        limits = [Fraction(0)] * len(upper)
        # The sum of the variables that share a link <= its bandwidth.
        links = zip(self.sharing, self.width, strict=True)
        shared = {tuple(sorted(columns)): Fraction(min(width, most), unit) for columns, width in links}
        upper += [(columns, [1] * len(columns)) for columns in shared]
        equal: list[Row] = []
        for node, kind in self.balances():  # the flow into the node == the flow out of it
            signs = [(c, (d == node) - (s == node)) for c, (s, d) in zip(kind.columns, self.arcs, strict=True)]
            equal.append(([c for c, sign in signs if sign], [sign for _, sign in signs if sign]))
        return Rows(self.columns, self.rates, upper, limits + list(shared.values()), equal)

    def balances(self) -> list[tuple[int, TreeKind]]:
        """Return (switch, kind) for each constraint: trees of a kind carry as much out of a plain switch as into it."""
        # The order of these rows decides which of equally good solutions is found.
        return [(node, kind) for node in self.plain for kind in self.kinds]

    def nearly_violated(self, values: Sequence[float]) -> list[NodeCut]:
        """Return minimum cuts from the roots to devices that a float solution violates by more than rounding errors."""
        integers = [round(value * _PARTS) for value in values]
        cuts: dict[NodeCut, None] = {}
        for k, kind in enumerate(self.kinds):
            rates = {root: round(part * integers[column]) for root, (column, part) in kind.rates.items()}
            needed = sum(part * values[column] for column, part in kind.rates.values()) * _PARTS - 2 * len(self.arcs)
            cuts.update(dict.fromkeys(self._cuts_below(k, needed=needed, rates=rates, values=integers)))
        return list(cuts)

    def violated_cuts(self, values: Sequence[Fraction]) -> list[NodeCut]:
        """Return, for each kind of trees, minimum cuts with less bandwidth than the rates of the roots inside.

        ``values``: an exact value for each variable of the program, in the order of their numbers.
        """
        cuts: list[NodeCut] = []
        for k, kind in enumerate(self.kinds):
            exact_rates = self.root_rates(kind, values)
            scale = lcm(*(value.denominator for value in (*values, *exact_rates.values())))  # max-flow needs integers
            rates = {root: int(rate * scale) for root, rate in exact_rates.items()}
            integers = [int(value * scale) for value in values]
            cuts += self._cuts_below(k, needed=sum(rates.values()), rates=rates, values=integers)
        return cuts

    def _cuts_below(self, k: int, *, needed: float, rates: dict[int, int], values: Sequence[int]) -> list[NodeCut]:
        """Return a minimum cut for each device to which less than ``needed`` can flow from the roots of kind ``k``.

        ``rates``: the flow that each root feeds in. ``values``: the variables of the program. All are in one unit.
        """
        kind, source = self.kinds[k], len(self.topology.nodes)  # the source, an additional node, feeds the roots
        arc_columns = zip(self.arcs, kind.columns, strict=True)
        capacities = {(arc if kind.outward else arc[::-1]): values[column] for arc, column in arc_columns}
        network = Network(source + 1, capacities | {(source, root): rate for root, rate in rates.items()})
        cuts: dict[NodeCut, None] = {}
        for sink in range(self.n):
            if network.flow(source, sink) < needed:
                cuts[NodeCut(network.cut(source, sink) - {source}, k)] = None
        return list(cuts)

    def fits(self, values: Sequence[Fraction]) -> bool:
        """Return whether a solution meets all constraints except the cuts."""
        links = zip(self.sharing, self.width, strict=True)
        within = all(sum(values[c] for c in columns) <= Fraction(width, self.scale) for columns, width in links)
        return within and all(
            not sum(values[c] * ((d == node) - (s == node)) for c, (s, d) in zip(kind.columns, self.arcs, strict=True))
            for node, kind in self.balances()
        )

    def proof(self, solution: Solution, cuts: Sequence[NodeCut], limit: int) -> Proof:
        """Return the proof by a dual solution that is rounded to fractions with denominators up to ``limit``.

        ``cuts`` are those of the program, in the order of ``rows``.
        """

        def rounded(value: float | Fraction) -> Fraction:
            return Fraction(value).limit_denominator(limit)

        cut_weights = (max(Fraction(0), rounded(price)) for price in solution.prices[: len(cuts)])
        weights = [(cut, weight) for cut, weight in zip(cuts, cut_weights, strict=True) if weight]
        shifts = [(node, kind, -rounded(v)) for (node, kind), v in zip(self.balances(), solution.shifts, strict=True)]
        # For each rate variable, the total weight of the cuts that contain the root, or the mean over several roots.
        covered = [Fraction(0)] * self.rates
        price = [Fraction(0)] * self.columns  # of each variable of a link
        for cut, weight in weights:
            kind = self.kinds[cut.kind]
            for root in cut.nodes:
                if root in kind.rates:
                    column, part = kind.rates[root]
                    covered[column] += weight * part
            for k in self.crossing(cut):
                price[kind.columns[k]] += weight
        for node, kind, shift in shifts:
            for k in self.entering[node]:
                price[kind.columns[k]] += shift
            for k in self.leaving[node]:
                price[kind.columns[k]] -= shift
        unit = min(covered)
        if not unit:  # these weights prove nothing: return a trivial bound
            return Proof(Fraction(sum(self.width)), [], {})
        shared = {tuple(sorted(columns)): width for columns, width in zip(self.sharing, self.width, strict=True)}
        total = sum(width * max(Fraction(0), *(price[c] for c in columns)) for columns, width in shared.items())
        # In a paired program, half of each price is for broadcasts, and half is for reductions backwards.
        directions = (True, False) if self.paired else ()
        factor = 1 / unit / max(1, len(directions))
        listed = [
            (cut.nodes, weight * factor, outward)
            for cut, weight in weights
            for outward in directions or (self.kinds[cut.kind].outward,)
        ]
        potentials = {switch: (Fraction(0), Fraction(0)) for switch in self.plain}
        for switch, kind, shift in shifts:
            down, up = potentials[switch]
            amount = shift * factor
            if self.paired:
                potentials[switch] = amount, -amount
            else:
                potentials[switch] = (down + amount, up) if kind.outward else (down, up + amount)
        return Proof(Fraction(total) / unit / self.scale, listed, potentials)

    def feasible_rate(self, values: Sequence[Fraction]) -> Fraction:
        """Return the rate of an exact solution, or -1 if it violates a constraint."""
        if not self.fits(values) or self.violated_cuts(values):
            return Fraction(-1)
        return sum(values[: self.rates], Fraction(0))
