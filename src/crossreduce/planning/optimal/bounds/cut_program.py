"""The linear program of trees: its variables, the cuts that limit them, and the exact checks of its solutions.

Variables: x_r, the rate rooted at node r, a device or a switch that reduces; cB_e and cR_e, the bandwidth of link e
that broadcasts and reductions use. Maximise sum(x) subject to cB_e + cR_e <= b_e; the flow into a switch that cannot
reduce equals the flow out of it; and for every set S of nodes that does not contain all devices, the sum of x_r over
the roots r in S is at most the sum of cB_e over the links that leave S, and at most the sum of cR_e over the links that
enter S. If links are equal in both directions, reductions use the routes of the broadcasts backwards, which halves the
program. If the roots have weights, there are broadcasts only: one variable is the rate of all roots, of which each has
a part in proportion to its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Final, NamedTuple

from ....topology import Topology
from .cuts import Network, tightest_cut
from .solver import Row, Rows, Solution

_FINE: Final = 1 << 20  # capacities are rounded to 1 / _FINE in the search for cuts that a float solution violates


class Usage(NamedTuple):
    """Trees of one kind that use the links: broadcasts (``outward``) or reductions."""

    columns: list[int]  # the variable of each link
    outward: bool
    rates: dict[int, tuple[int, int | Fraction]]  # by root: its variable, and the part of it that is the root's rate


class NodeCut(NamedTuple):
    """A set of nodes by their numbers that the data of a ``Usage`` must cross; see ``Cut``."""

    nodes: frozenset[int]
    usage: int


class Proof(NamedTuple):
    """A dual solution and the rate that it proves."""

    rate: Fraction
    cuts: list[tuple[frozenset[int], Fraction, bool]]  # (nodes, weight, outward)
    potentials: dict[int, tuple[Fraction, Fraction]]  # by switch: (in broadcasts, in reductions)


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
        # Where links are equal in both directions, a tree can have any of its nodes as its root.
        able = [] if self.paired else [number[switch.name] for switch in topology.switches if switch.reduces]
        roots = [*range(self.n), *able]
        self.rates = len(roots) if weights is None else 1  # the first columns are rates
        columns = [[self.rates + way * m + k for k in range(m)] for way in (0, 1)]
        if weights is None:
            free: dict[int, tuple[int, int | Fraction]] = {root: (k, 1) for k, root in enumerate(roots)}
            ways = (True,) if self.paired else (True, False)
            self.usages = [Usage(columns[k], outward, free) for k, outward in enumerate(ways)]
        else:
            whole = sum(weights.values(), Fraction(0))
            parts: dict[int, tuple[int, int | Fraction]]
            parts = {root: (0, weight / whole) for root, weight in weights.items() if weight}
            self.usages = [Usage(columns[0], True, parts)]
        self.columns = self.rates + m * len(self.usages)
        # sharing: for each link, the columns that share its bandwidth.
        self.sharing = list(zip(*(usage.columns for usage in self.usages), strict=True))
        if self.paired:
            back = {arc: self.rates + k for k, arc in enumerate(self.arcs)}
            self.sharing = [
                (column, back[dst, src]) for (column,), (src, dst) in zip(self.sharing, self.arcs, strict=True)
            ]
        # simple: the rate if a reduce-scatter uses half of every link and an all-gather the other half. It is the
        # optimum on most machines if all of their devices take part. 0: it was not computed.
        self.simple = Fraction(0)
        if self.paired:
            _, ratio = tightest_cut(topology, dict.fromkeys(topology.devices, Fraction(1)), outward=True)
            self.simple = self.n / ratio / 2

    def root_rates(self, usage: Usage, values: Sequence[Fraction]) -> dict[int, Fraction]:
        """Return the rate of each root in a solution."""
        return {root: part * values[column] for root, (column, part) in usage.rates.items()}

    def first_cuts(self) -> dict[NodeCut, None]:
        """Return the cuts around each device and each island of devices."""
        everyone = frozenset(range(len(self.topology.nodes)))
        sets = [frozenset({v}) for v in range(self.n)] + self._islands()
        sets += [everyone - nodes for nodes in sets]
        return {NodeCut(nodes, k): None for k in range(len(self.usages)) for nodes in sets}

    def _islands(self) -> list[frozenset[int]]:
        """Return the islands, if there are several, each with the switches whose links lead to this island only."""
        number = {node: k for k, node in enumerate(self.topology.nodes)}
        groups = [frozenset(number[device] for device in island) for island in self.topology.islands]
        near = {switch: {self.arcs[k][1] for k in self.leaving[switch]} for switch in range(self.n, len(number))}
        inside = [group | {switch for switch, others in near.items() if others and others <= group} for group in groups]
        return inside if len(groups) > 1 else []

    def crossing(self, cut: NodeCut) -> list[int]:
        """Return the numbers of the links that cross a cut, sorted."""
        nodes, outward = cut.nodes, self.usages[cut.usage].outward
        if 2 * len(nodes) <= len(self.leaving):
            near, far = (self.leaving, 1) if outward else (self.entering, 0)
            return sorted(k for node in nodes for k in near[node] if self.arcs[k][far] not in nodes)
        near, far = (self.entering, 0) if outward else (self.leaving, 1)
        outside = (node for node in range(len(near)) if node not in nodes)
        return sorted(k for node in outside for k in near[node] if self.arcs[k][far] in nodes)

    @property
    def least_cut(self) -> Fraction:
        """The bandwidth of the narrowest cut that all data of some device must cross, an upper bound of the rate.

        It is in scaled units, like ``width``.
        """
        roots = {self.topology.devices[0]: Fraction(1)}
        if self.weighted:
            roots = {self.topology.devices[root]: Fraction(part) for root, (_, part) in self.usages[0].rates.items()}
        ways = (True,) if self.weighted else (True, False)
        return min(self.scale / tightest_cut(self.topology, roots, outward=outward)[1] for outward in ways)

    def rows(self, cuts: Iterable[NodeCut], unit: int, most: int) -> Rows:
        """Return the program with some of its cuts, its bandwidths limited to ``most`` and divided by ``unit``."""
        upper: list[Row] = []
        for cut in cuts:
            usage = self.usages[cut.usage]
            inside: dict[int, int | Fraction] = {}
            for root in cut.nodes:
                if root in usage.rates:
                    column, part = usage.rates[root]
                    inside[column] = inside.get(column, 0) + part
            across = [usage.columns[k] for k in self.crossing(cut)]
            upper.append(([*inside, *across], [*inside.values()] + [-1] * len(across)))
        limits = [Fraction(0)] * len(upper)
        shared = {
            tuple(sorted(two)): Fraction(min(b, most), unit) for two, b in zip(self.sharing, self.width, strict=True)
        }
        upper += [(columns, [1] * len(columns)) for columns in shared]
        equal: list[Row] = []
        for node, usage in self.balances():
            signs = [(c, (d == node) - (s == node)) for c, (s, d) in zip(usage.columns, self.arcs, strict=True)]
            equal.append(([c for c, sign in signs if sign], [sign for _, sign in signs if sign]))
        return Rows(self.columns, self.rates, upper, limits + list(shared.values()), equal)

    def balances(self) -> list[tuple[int, Usage]]:
        """Return each node that sends as much as it receives, with the usage of the links that is meant."""
        # The order of the rows decides which of equally good solutions is found.
        return [(node, usage) for node in self.plain for usage in self.usages]

    def nearly_violated(self, values: Sequence[float]) -> list[NodeCut]:
        """Return cuts that a float solution violates: for each device and usage, a minimum cut from the roots."""
        fine = [round(value * _FINE) for value in values]
        found: dict[NodeCut, None] = {}
        for k, usage in enumerate(self.usages):
            rates = {root: round(part * fine[column]) for root, (column, part) in usage.rates.items()}
            needed = sum(part * values[column] for column, part in usage.rates.values()) * _FINE - 2 * len(self.arcs)
            found.update(dict.fromkeys(self._cuts_below(needed, k, rates, fine)))
        return list(found)

    def violated_cuts(self, values: Sequence[Fraction]) -> list[NodeCut]:
        """Return cuts that an exact solution violates; none: no cut is violated."""
        found: list[NodeCut] = []
        for k, usage in enumerate(self.usages):
            rooted = self.root_rates(usage, values)
            scale = lcm(*(value.denominator for value in (*values, *rooted.values())))
            rates = {root: int(rate * scale) for root, rate in rooted.items()}
            found += self._cuts_below(sum(rates.values()), k, rates, [int(value * scale) for value in values])
        return found

    def _cuts_below(self, needed: float, k: int, rates: dict[int, int], values: Sequence[int]) -> list[NodeCut]:
        """Return a minimum cut for each sink of a usage to which less than ``needed`` can flow from the roots."""
        usage, source = self.usages[k], len(self.topology.nodes)  # the source, one more node, feeds the roots
        pairs = zip(self.arcs, usage.columns, strict=True)
        capacities = {(arc if usage.outward else arc[::-1]): values[column] for arc, column in pairs}
        network = Network(source + 1, capacities | {(source, root): rate for root, rate in rates.items()})
        found: dict[NodeCut, None] = {}
        for sink in range(self.n):
            if network.flow(source, sink) < needed:
                found[NodeCut(network.cut(source, sink) - {source}, k)] = None
        return list(found)

    def fits(self, values: Sequence[Fraction]) -> bool:
        """Return whether a solution keeps to the bandwidths, and forwarding switches send as much as they receive."""
        within = all(
            sum(values[c] for c in shared) <= Fraction(b, self.scale)
            for shared, b in zip(self.sharing, self.width, strict=True)
        )
        return within and all(
            not sum(values[c] * ((d == node) - (s == node)) for c, (s, d) in zip(usage.columns, self.arcs, strict=True))
            for node, usage in self.balances()
        )

    def proof(self, solution: Solution, cuts: Sequence[NodeCut], limit: int) -> Proof:
        """Round a dual solution to denominators up to ``limit``, and return the rate that it proves."""

        def rounded(value: float | Fraction) -> Fraction:
            return Fraction(value).limit_denominator(limit)

        weights = [
            (cut, max(Fraction(0), rounded(v))) for cut, v in zip(cuts, solution.prices[: len(cuts)], strict=True)
        ]
        weights = [(cut, weight) for cut, weight in weights if weight]
        shifts = [(node, usage, -rounded(v)) for (node, usage), v in zip(self.balances(), solution.shifts, strict=True)]
        # By rate: the total weight of the cuts that its trees must cross (on average, if the roots have weights).
        covered = [Fraction(0)] * self.rates
        price = [Fraction(0)] * self.columns  # of the use of each link
        for cut, weight in weights:
            usage = self.usages[cut.usage]
            for root in cut.nodes:
                if root in usage.rates:
                    column, part = usage.rates[root]
                    covered[column] += weight * part
            for k in self.crossing(cut):
                price[usage.columns[k]] += weight
        for node, usage, shift in shifts:
            for k in self.entering[node]:
                price[usage.columns[k]] += shift
            for k in self.leaving[node]:
                price[usage.columns[k]] -= shift
        unit = min(covered)
        if not unit:
            return Proof(Fraction(sum(self.width)), [], {})
        shared = {tuple(sorted(columns)): b for columns, b in zip(self.sharing, self.width, strict=True)}
        total = sum(b * max(Fraction(0), *(price[c] for c in columns)) for columns, b in shared.items())
        ways = (True, False) if self.paired else ()  # half of a price is for broadcasts, half for reductions backwards
        half = Fraction(1, 2) if self.paired else Fraction(1)
        listed = [
            (cut.nodes, weight / unit * half, outward)
            for cut, weight in weights
            for outward in ways or (self.usages[cut.usage].outward,)
        ]
        potentials = {switch: (Fraction(0), Fraction(0)) for switch in self.plain}
        for switch, usage, shift in shifts:
            down, up = potentials.get(switch, (Fraction(0), Fraction(0)))
            amount = shift / unit * half
            if self.paired:
                potentials[switch] = amount, -amount
            else:
                potentials[switch] = (down + amount, up) if usage.outward else (down, up + amount)
        return Proof(Fraction(total) / unit / self.scale, listed, potentials)

    def feasible_rate(self, values: Sequence[Fraction]) -> Fraction:
        """Return the rate of an exact solution; -1: it violates a constraint."""
        if not self.fits(values) or self.violated_cuts(values):
            return Fraction(-1)
        return sum(values[: self.rates], Fraction(0))
