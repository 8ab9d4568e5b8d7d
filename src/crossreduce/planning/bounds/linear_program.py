"""The best all-reduce by trees, as a linear program: reductions to roots and broadcasts from them share the links.

Input: a topology. Output: an ``Optimum``: the rate, the use of roots and links, and the prices that prove it, all
exact.

Variables: x_r, the rate rooted at device r; cB_e and cR_e, the bandwidth of link e that broadcasts and reductions use.
Maximise sum(x) subject to cB_e + cR_e <= b_e; the flow into a switch that cannot reduce equals the flow out of it; and
for every set S of nodes that does not contain all devices, the sum of x_r over the roots r in S is at most the sum of
cB_e over the links that leave S, and at most the sum of cR_e over the links that enter S. Trees exist exactly then, by
Edmonds' theorem. There are exponentially many sets S; minimum cuts find those that a solution violates, until it
violates none. HiGHS solves each program in floating point; its solution and its dual are rounded to fractions, and each
is then proved exactly, so rounding cannot make a result wrong. If links are equal in both directions, reductions use
the routes of the broadcasts backwards, which halves the program.

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, Preserving and increasing local
edge-connectivity in mixed graphs, SIAM J. Discrete Math. 8(2), 1995 (switches); Huangfu & Hall, Parallelizing the dual
revised simplex method, Math. Prog. Comp. 10, 2018 (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any, Final, NamedTuple

from ...topology import Link, Topology
from .cuts import tightest_cut
from .flows import Network

# Denominators that are tried when a solution in floating point is made exact, the simplest first. Vertices of these
# programs have small ones; HiGHS is accurate to about 1e-9.
DENOMINATORS: Final = (12, 60, 420, 5040, 100_000, 10_000_000)
_FINE: Final = 1 << 20  # capacities are rounded to 1 / _FINE in the search for cuts that a solution violates
_MOST_ROUNDS: Final = 500
_COARSE: Final = 1 << 10  # rounding may reduce the rate of a plan by at most this part: 1 / _COARSE

Pair = tuple[str, str]


class Optimum(NamedTuple):
    """The best all-reduce by trees."""

    rate: Fraction  # the upper bound of its rate in GB/s
    cuts: tuple[tuple[frozenset[str], Fraction, bool], ...]  # (nodes, weight, outward); see ``Cut``
    potentials: tuple[tuple[str, Fraction, Fraction], ...]  # (switch, in broadcasts, in reductions); see ``Bound``
    # The rate of ``roots``, ``down`` and ``up``; it equals ``rate`` unless rounding failed (-1: no solution). If
    # equal rates of all roots, with half of every bandwidth for ``down`` and half for ``up``, reach ``rate``, they are
    # the solution.
    reached: Fraction
    roots: dict[str, Fraction]  # the rate rooted at each device
    down: dict[Pair, Fraction]  # the bandwidth of each link that broadcasts use, GB/s, by (src, dst)
    up: dict[Pair, Fraction]  # the bandwidth of each link that reductions use, likewise


class _Cut(NamedTuple):
    nodes: frozenset[int]
    outward: bool


@lru_cache(maxsize=1024)
def optimum(topology: Topology) -> Optimum:
    """Return the best all-reduce on a connected topology of two or more devices.

    >>> found = optimum(Topology.ring(4, gb_per_s=3))
    >>> found.rate, found.reached
    (Fraction(4, 1), Fraction(4, 1))
    """
    program = _LinearProgram(topology)
    found = program.exact(*program.solved())
    if found.reached * (_COARSE + 1) < found.rate * _COARSE:  # bandwidths of many digits make rounding lose too much
        program = _LinearProgram(_rounded_down(topology))
        coarse = program.exact(*program.solved())
        if coarse.reached > found.reached:
            found = coarse._replace(rate=found.rate, cuts=found.cuts, potentials=found.potentials)
    return found


def _rounded_down(topology: Topology) -> Topology:
    """Return the topology with bandwidths rounded down to few digits; each loses at most 1 / ``_COARSE`` of itself."""
    links: list[Link] = []
    for link in topology.links:
        step = Fraction(1)
        while link.bandwidth < step * _COARSE:
            step /= 2
        while link.bandwidth >= 2 * step * _COARSE:
            step *= 2
        links.append(link._replace(bandwidth=link.bandwidth // step * step))
    return Topology.unchecked(topology.devices, links, topology.switches)


def balanced_bandwidths(topology: Topology, weights: Mapping[int, Fraction]) -> dict[Pair, Fraction]:
    """Return the bandwidth of each link for trees out of the roots; ``{}``: no exact solution was found.

    The rates of the roots are proportional to ``weights``. At each switch that cannot reduce, the bandwidths of the
    links into it add up to those of the links out of it.

    >>> uneven = Topology(["cpu:0", "cpu:1"], [("cpu:0", "s", 5), ("s", "cpu:1", 3), ("cpu:1", "cpu:0", 1)], ["s"])
    >>> balanced_bandwidths(uneven, {0: Fraction(1)})["cpu:0", "s"]
    Fraction(3, 1)
    """
    program = _LinearProgram(topology, weights)
    solution, _ = program.solved()
    for limit in DENOMINATORS:
        values = program.rounded(solution, limit)
        if program.fits(values):
            return {(link.src, link.dst): values[c] for link, c in zip(program.links, program.down, strict=True)}
    return {}


class _LinearProgram:
    """The linear program: columns x, then cB, then (if links differ in the two directions) cR.

    With ``weights`` the program has broadcasts only, and the rates of the roots are proportional to the weights.
    """

    def __init__(self, topology: Topology, weights: Mapping[int, Fraction] | None = None) -> None:
        self.topology, self.weights = topology, weights
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
        self.down = [self.n + k for k in range(m)]
        self.paired = weights is None and topology.symmetric  # reductions use the routes of broadcasts backwards
        if self.paired:
            back = {arc: k for k, arc in enumerate(self.arcs)}
            self.up = [self.n + back[dst, src] for src, dst in self.arcs]
        else:
            self.up = [] if weights else [column + m for column in self.down]
        self.directions = [(self.down, True)] if self.paired or weights else [(self.down, True), (self.up, False)]
        self.columns = self.n + m * len(self.directions)
        # simple: the rate if a reduce-scatter uses half of every link and an all-gather the other half. It is the
        # optimum on most machines if all of their devices take part. 0: it was not computed.
        self.simple = Fraction(0)
        if self.paired:
            _, ratio = tightest_cut(topology, dict.fromkeys(topology.devices, Fraction(1)), outward=True)
            self.simple = self.n / ratio / 2

    def solved(self) -> tuple[Any, list[_Cut]]:
        """Solve with more and more cuts, until the solution violates none, or is not better than ``simple``."""
        cuts = self.first_cuts()
        for _ in range(_MOST_ROUNDS):
            solution = self.solve(cuts)
            if self.simple and -solution.fun * self.largest <= self.simple * self.scale * (1 + 1e-9):
                break
            violated = [cut for cut in self.violated(solution) if cut not in cuts]
            if not violated:
                break
            cuts.update(dict.fromkeys(violated))
        return solution, list(cuts)

    @property
    def sharing(self) -> list[tuple[int, ...]]:
        """For each link, the columns that share its bandwidth."""
        return list(zip(self.down, self.up, strict=True)) if self.up else [(column,) for column in self.down]

    def first_cuts(self) -> dict[_Cut, None]:
        """Return the cuts around each device and each island of devices."""
        everyone = frozenset(range(len(self.topology.nodes)))
        sets = [frozenset({v}) for v in range(self.n)] + self.islands()
        sets += [everyone - nodes for nodes in sets]
        return {_Cut(nodes, outward): None for _, outward in self.directions for nodes in sets}

    def islands(self) -> list[frozenset[int]]:
        """Return the islands, if there are several, each with the switches whose links lead to this island only."""
        number = {node: k for k, node in enumerate(self.topology.nodes)}
        groups = [frozenset(number[device] for device in island) for island in self.topology.islands]
        near = {switch: {self.arcs[k][1] for k in self.leaving[switch]} for switch in range(self.n, len(number))}
        inside = [group | {switch for switch, others in near.items() if others and others <= group} for group in groups]
        return inside if len(groups) > 1 else []

    def crossing(self, cut: _Cut) -> list[int]:
        """Return the numbers of the links that cross a cut, sorted."""
        nodes = cut.nodes
        if 2 * len(nodes) <= len(self.leaving):
            near, far = (self.leaving, 1) if cut.outward else (self.entering, 0)
            return sorted(k for node in nodes for k in near[node] if self.arcs[k][far] not in nodes)
        near, far = (self.entering, 0) if cut.outward else (self.leaving, 1)
        outside = (node for node in range(len(near)) if node not in nodes)
        return sorted(k for node in outside for k in near[node] if self.arcs[k][far] in nodes)

    def solve(self, cuts: Iterable[_Cut]) -> Any:
        """Return SciPy's solution, with the duals."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        rows: list[tuple[list[int], list[float]]] = []
        for cut in cuts:
            roots = [r for r in cut.nodes if r < self.n]
            columns_of = self.down if cut.outward else self.up
            across = [columns_of[k] for k in self.crossing(cut)]
            rows.append((roots + across, [1.0] * len(roots) + [-1.0] * len(across)))
        self.cut_rows = len(rows)
        limits = {tuple(sorted(shared)): b / self.largest for shared, b in zip(self.sharing, self.width, strict=True)}
        rows += [([*shared], [1.0] * len(shared)) for shared in limits]
        equal: list[tuple[list[int], list[float]]] = []
        for switch in self.plain:
            for columns, _ in self.directions:
                signs = [(c, (d == switch) - (s == switch)) for c, (s, d) in zip(columns, self.arcs, strict=True)]
                equal.append(([c for c, sign in signs if sign], [float(sign) for _, sign in signs if sign]))
        if self.weights is not None:
            parts = [float(self.weights.get(r, 0) / sum(self.weights.values())) for r in range(self.n)]
            equal += [([*range(self.n)], [(k == r) - parts[r] for k in range(self.n)]) for r in range(self.n)]

        def matrix(entries: list[tuple[list[int], list[float]]]) -> Any:
            starts = np.cumsum([0, *(len(columns) for columns, _ in entries)])
            columns = [c for row, _ in entries for c in row]
            values = [v for _, row in entries for v in row]
            return csr_array((values, columns, starts), shape=(len(entries), self.columns))

        objective = np.zeros(self.columns)
        objective[: self.n] = -1.0
        bounds = [0.0] * self.cut_rows + list(limits.values())
        fixed = {"A_eq": matrix(equal), "b_eq": np.zeros(len(equal))} if equal else {}
        solution = linprog(objective, A_ub=matrix(rows), b_ub=bounds, **fixed, method="highs-ds")
        assert solution.status == 0, solution.message  # bounded by the links, and 0 is feasible
        return solution

    def network(self, values: list[int], columns: list[int], *, outward: bool) -> Network:
        """Return the network of used links, reversed unless ``outward``; a source, the last node, feeds the roots."""
        pairs = zip(self.arcs, columns, strict=True)
        capacities = {(arc if outward else arc[::-1]): values[column] for arc, column in pairs}
        source = len(self.topology.nodes)
        return Network(source + 1, capacities | {(source, r): values[r] for r in range(self.n)})

    def violated(self, solution: Any) -> list[_Cut]:
        """Return cuts that a solution violates: for each device, in each direction, a minimum cut from the roots."""
        values = solution.x.tolist()
        needed, source = sum(values[: self.n]), len(self.topology.nodes)
        found: dict[_Cut, None] = {}
        for columns, outward in self.directions:
            network = self.network([round(value * _FINE) for value in values], columns, outward=outward)
            for sink in range(self.n):
                if network.flow(source, sink) < needed * _FINE - 2 * len(self.arcs):
                    found[_Cut(network.cut(source, sink) - {source}, outward)] = None
        return list(found)

    def exact(self, solution: Any, cuts: list[_Cut]) -> Optimum:
        """Return the exact solution and its proof."""
        near = -solution.fun * self.largest / self.scale * (1 + 1e-9)
        proofs = []
        for limit in DENOMINATORS:
            proofs.append(self.proved(solution, cuts, limit))
            if proofs[-1][0] <= near:
                break
        rate, weights, potentials = min(proofs, key=lambda proof: proof[0])
        halves = [self.simple / self.n] * self.n + [link.bandwidth / 2 for link in self.links] * len(self.directions)
        best = self.simple or Fraction(-1), halves
        for limit in DENOMINATORS if best[0] < rate else ():
            values = self.rounded(solution, limit)
            best = max(best, (self.feasible(values), values), key=lambda found: found[0])
            if best[0] == rate:
                break
        reached, values = best
        nodes = self.topology.nodes
        pairs = [(link.src, link.dst) for link in self.links]
        named = [(frozenset(nodes[k] for k in cut.nodes), weight, cut.outward) for cut, weight in weights if weight]
        shifts = tuple((nodes[switch], *two) for switch, two in potentials.items())
        roots = {device: values[k] for k, device in enumerate(self.topology.devices)}
        down, up = ({pair: values[c] for pair, c in zip(pairs, used, strict=True)} for used in (self.down, self.up))
        return Optimum(rate, tuple(named), shifts, reached, roots, down, up)

    def rounded(self, solution: Any, limit: int) -> list[Fraction]:
        """Return the solver's values as fractions in GB/s, with denominators of at most ``limit * self.scale``."""
        return [
            max(Fraction(0), Fraction(float(value) * self.largest).limit_denominator(limit)) / self.scale
            for value in solution.x
        ]

    def proved(
        self, solution: Any, cuts: list[_Cut], limit: int
    ) -> tuple[Fraction, list[tuple[_Cut, Fraction]], dict[int, tuple[Fraction, Fraction]]]:
        """Round the dual to denominators up to ``limit``; return the rate that it proves, its cuts and its
        potentials."""

        def rounded(value: float) -> Fraction:
            return Fraction(float(value)).limit_denominator(limit)

        prices = [max(Fraction(0), rounded(-v)) for v in solution.ineqlin.marginals[: self.cut_rows]]
        shifts = [rounded(v) for v in solution.eqlin.marginals] if self.plain else []
        weights = list(zip(cuts, prices, strict=True))
        if self.paired:  # half of the price of a cut is for broadcasts, half for the reductions backwards
            weights = [(_Cut(cut.nodes, outward), price / 2) for cut, price in weights for outward in (True, False)]
            potentials = {switch: (s / 2, -s / 2) for switch, s in zip(self.plain, shifts, strict=True)}
        else:
            potentials = {w: (shifts[2 * k], shifts[2 * k + 1]) for k, w in enumerate(self.plain)}
        least = min(sum((w for cut, w in weights if r in cut.nodes), Fraction(0)) for r in range(self.n))
        if not least:
            return Fraction(sum(self.width)), [], {}
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
        return Fraction(total) / self.scale, weights, potentials

    def fits(self, values: list[Fraction]) -> bool:
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

    def feasible(self, values: list[Fraction]) -> Fraction:
        """Return the rate of an exact solution; -1: it violates a constraint."""
        if not self.fits(values):
            return Fraction(-1)
        rate = sum(values[: self.n], Fraction(0))
        scale = lcm(*(value.denominator for value in values))
        source = len(self.topology.nodes)
        for columns, outward in self.directions:
            network = self.network([int(value * scale) for value in values], columns, outward=outward)
            if any(network.flow(source, sink) < rate * scale for sink in range(self.n)):
                return Fraction(-1)
        return rate
