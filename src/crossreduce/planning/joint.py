"""The best all-reduce by trees, as a linear program: reductions to roots and broadcasts from them share the links.

In: a topology.  Out: ``Joint``: the rate, how the roots and links are used, and the prices that prove it, all exact.

Variables: x_r, the rate rooted at device r; cB_e and cR_e, what broadcasts and reductions use of link e. Maximise
sum(x) subject to cB_e + cR_e <= b_e, what enters a switch that cannot reduce leaves it, and for every set S of nodes
that lacks a device x(S) <= cB(S leaves), x(S) <= cR(S enters): by Edmonds' theorem that is when trees exist.
There are exponentially many S; minimum cuts find those that a solution breaks, until none is. HiGHS solves each
program in floating point; its solution and its dual are rounded to fractions and then proved exactly, each on its own,
so that nothing rests on the rounding. Where links are alike both ways, a reduction may take each broadcast's way back,
which halves the program.

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, Preserving and increasing local
edge-connectivity in mixed graphs, SIAM J. Discrete Math. 8(2), 1995 (switches); Huangfu & Hall, Parallelizing the dual
revised simplex method, Math. Prog. Comp. 10, 2018 (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import lcm
from typing import Any, Final, NamedTuple

from ..topology import Topology
from .cuts import densest
from .flows import Network

# Denominators tried when a solution in floating point is made exact, the simplest first. Vertices of these programs
# have small ones; HiGHS is accurate to about 1e-9.
DENOMINATORS: Final = (12, 60, 420, 5040, 100_000, 10_000_000)
_FINE: Final = 1 << 20  # the largest capacity, when a solution in floating point is looked through for broken cuts
_MOST_ROUNDS: Final = 500
_COARSE: Final = 1 << 10  # what a plan may lose to rounding, at most one part in so many

Pair = tuple[str, str]


class Joint(NamedTuple):
    """An all-reduce by trees.

    Args:
      rate: what no such all-reduce can beat, in GB/s.
      cuts: (nodes, weight, whether outward), the proof.
      potentials: (switch, in broadcasts, in reductions), its other part.
      reached: what ``roots``, ``down`` and ``up`` reach; equals ``rate`` unless the rounding failed (-1: wholly).
        Where equal roots and half of every link for each way reach it, these are the ones.
      roots: the rate rooted at each device.
      down, up: what broadcasts and reductions use of each link, GB/s, by (src, dst).
    """

    rate: Fraction
    cuts: tuple[tuple[frozenset[str], Fraction, bool], ...]
    potentials: tuple[tuple[str, Fraction, Fraction], ...]
    reached: Fraction
    roots: dict[str, Fraction]
    down: dict[Pair, Fraction]
    up: dict[Pair, Fraction]


class _Cut(NamedTuple):
    nodes: frozenset[int]
    outward: bool


def joint(topology: Topology) -> Joint:
    """Solve the program for a connected topology of two or more devices.

    >>> solved = joint(Topology.ring(4, gb_per_s=3))
    >>> solved.rate, solved.reached
    (Fraction(4, 1), Fraction(4, 1))
    """
    program = _Program(topology)
    found = program.exact(*program.solved())
    if found.reached * (_COARSE + 1) < found.rate * _COARSE:  # bandwidths of many digits
        program = _Program(_rounded_down(topology))
        coarse = program.exact(*program.solved())
        if coarse.reached > found.reached:
            found = coarse._replace(rate=found.rate, cuts=found.cuts, potentials=found.potentials)
    return found


def _rounded_down(topology: Topology) -> Topology:
    """Return the topology with bandwidths of few digits, none of which loses more than 1 / ``_COARSE``."""
    links = []
    for link in topology.links:
        step = Fraction(1)
        while link.bandwidth < step * _COARSE:
            step /= 2
        while link.bandwidth >= 2 * step * _COARSE:
            step *= 2
        links.append(link._replace(bandwidth=link.bandwidth // step * step))
    return Topology(topology.devices, tuple(links), topology.switches)


def balanced(topology: Topology, weights: Mapping[int, Fraction]) -> dict[Pair, Fraction]:
    """Return bandwidths that trees out of roots of these weights can use up, where switches are wider on one side.

    What such a switch cannot pass on is taken away so that the trees lose the least; each switch then gives out what
    it takes in.

    >>> lopsided = Topology(["cpu:0", "cpu:1"], [("cpu:0", "s", 5), ("s", "cpu:1", 3), ("cpu:1", "cpu:0", 1)], ["s"])
    >>> balanced(lopsided, {0: Fraction(1)})["cpu:0", "s"]
    Fraction(3, 1)
    """
    program = _Program(topology, weights)
    solution, _ = program.solved()
    for limit in DENOMINATORS:
        values = program.rounded(solution, limit)
        if program.fits(values):
            return {(link.src, link.dst): values[c] for link, c in zip(program.links, program.down, strict=True)}
    return {}


class _Program:
    """The linear program: columns x, then cB, then (where links differ both ways) cR.

    With ``weights`` there are no reductions, and the roots' rates are in the proportion of the weights.
    """

    def __init__(self, topology: Topology, weights: Mapping[int, Fraction] | None = None) -> None:
        self.topology, self.weights = topology, weights
        self.n, self.links = len(topology.devices), topology.links
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.arcs = [(number[link.src], number[link.dst]) for link in self.links]
        self.plain = [number[switch.name] for switch in topology.switches if not switch.reduces]
        # Whole numbers, so that only what the program itself divides by is left to guess when it is made exact.
        self.scale = lcm(*(link.bandwidth.denominator for link in self.links))
        self.width = [int(link.bandwidth * self.scale) for link in self.links]
        self.largest = max(self.width)
        m = len(self.arcs)
        self.down = [self.n + k for k in range(m)]
        self.twofold = weights is None and topology.symmetric  # reductions take the broadcasts' ways back
        if self.twofold:
            back = {arc: k for k, arc in enumerate(self.arcs)}
            self.up = [self.n + back[dst, src] for src, dst in self.arcs]
        else:
            self.up = [] if weights else [column + m for column in self.down]
        self.ways = [(self.down, True)] if self.twofold or weights else [(self.down, True), (self.up, False)]
        self.columns = self.n + m * len(self.ways)
        # Half of every link for a reduce-scatter, half for an all-gather back: on most whole machines nothing beats it.
        self.sure = Fraction(0)
        if self.twofold:
            _, ratio = densest(topology, dict.fromkeys(topology.devices, Fraction(1)), outward=True)
            self.sure = self.n / ratio / 2

    def solved(self) -> tuple[Any, list[_Cut]]:
        """Solve with ever more cuts, until the solution breaks none, or is no better than what is surely reached."""
        cuts = self.first_cuts()
        for _ in range(_MOST_ROUNDS):
            solution = self.solve(cuts)
            if self.sure and -solution.fun * self.largest <= self.sure * self.scale * (1 + 1e-9):
                break
            broken = [cut for cut in self.broken(solution) if cut not in cuts]
            if not broken:
                break
            cuts.update(dict.fromkeys(broken))
        return solution, list(cuts)

    @property
    def sharing(self) -> list[tuple[int, ...]]:
        """The columns that share each link."""
        return list(zip(self.down, self.up, strict=True)) if self.up else [(column,) for column in self.down]

    def first_cuts(self) -> dict[_Cut, None]:
        """What each device, and each island of devices, must get and send, whatever the rest does."""
        everyone = frozenset(range(len(self.topology.nodes)))
        sets = [frozenset({v}) for v in range(self.n)] + self.islands()
        sets += [everyone - nodes for nodes in sets]
        return {_Cut(nodes, outward): None for _, outward in self.ways for nodes in sets}

    def islands(self) -> list[frozenset[int]]:
        """Return the topology's islands, each with the switches that lead nowhere else."""
        number = {node: k for k, node in enumerate(self.topology.nodes)}
        groups = [frozenset(number[device] for device in island) for island in self.topology.islands]
        if len(groups) < 2:
            return []
        near: dict[int, set[int]] = {}
        for src, dst in self.arcs:
            near.setdefault(src, set()).add(dst)
        return [
            group | {switch for switch in range(self.n, len(number)) if near.get(switch, {-1}) <= group}
            for group in groups
        ]

    def crossing(self, cut: _Cut) -> list[int]:
        """Return the columns of what crosses a cut."""
        if cut.outward:
            return [c for c, (s, d) in zip(self.down, self.arcs, strict=True) if s in cut.nodes and d not in cut.nodes]
        return [c for c, (s, d) in zip(self.up, self.arcs, strict=True) if d in cut.nodes and s not in cut.nodes]

    def solve(self, cuts: Iterable[_Cut]) -> Any:
        """Return SciPy's solution, with the duals."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        rows: list[tuple[list[int], list[float]]] = []
        for cut in cuts:
            roots = [r for r in cut.nodes if r < self.n]
            across = self.crossing(cut)
            rows.append((roots + across, [1.0] * len(roots) + [-1.0] * len(across)))
        self.cut_rows = len(rows)
        limits = {tuple(sorted(shared)): b / self.largest for shared, b in zip(self.sharing, self.width, strict=True)}
        rows += [([*shared], [1.0] * len(shared)) for shared in limits]
        equal: list[tuple[list[int], list[float]]] = []
        for switch in self.plain:
            for columns, _ in self.ways:
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
        assert solution.status == 0, solution.message  # bounded by the links, and nothing at all is feasible
        return solution

    def broken(self, solution: Any) -> list[_Cut]:
        """Return cuts that a solution breaks: for each device the least, from either side."""
        values = solution.x.tolist()
        needed = sum(values[: self.n])
        found: dict[_Cut, None] = {}
        for columns, outward in self.ways:
            roots = [round(value * _FINE) for value in values[: self.n]]
            used = {
                (arc if outward else arc[::-1]): round(values[column] * _FINE)
                for arc, column in zip(self.arcs, columns, strict=True)
            }
            source = len(self.topology.nodes)
            network = Network(source + 1, used | {(source, r): rate for r, rate in enumerate(roots)})
            for sink in range(self.n):
                if network.flow(source, sink) < needed * _FINE - 2 * len(used):
                    found[_Cut(network.cut(source, sink) - {source}, outward)] = None
        return list(found)

    def exact(self, solution: Any, cuts: list[_Cut]) -> Joint:
        """Make a solution exact, and prove it."""
        near = -solution.fun * self.largest / self.scale * (1 + 1e-9)
        proofs = []
        for limit in DENOMINATORS:
            proofs.append(self.proved(solution, cuts, limit))
            if proofs[-1][0] <= near:
                break
        rate, weights, potentials = min(proofs, key=lambda proof: proof[0])
        halves = [self.sure / self.n] * self.n + [link.bandwidth / 2 for link in self.links] * len(self.ways)
        best = self.sure or Fraction(-1), halves
        for limit in DENOMINATORS if best[0] < rate else ():
            values = self.rounded(solution, limit)
            best = max(best, (self.feasible(values), values), key=lambda found: found[0])
            if best[0] == rate:
                break
        reached, values = best
        nodes = self.topology.nodes
        pairs = [(link.src, link.dst) for link in self.links]
        named = [(frozenset(nodes[k] for k in cut.nodes), weight, cut.outward) for cut, weight in weights if weight]
        return Joint(
            rate,
            tuple(named),
            tuple((nodes[switch], *two) for switch, two in potentials.items()),
            reached,
            {device: values[k] for k, device in enumerate(self.topology.devices)},
            {pair: values[c] for pair, c in zip(pairs, self.down, strict=True)},
            {pair: values[c] for pair, c in zip(pairs, self.up, strict=True)},
        )

    def rounded(self, solution: Any, limit: int) -> list[Fraction]:
        """Return a solution in GB/s, of denominators up to ``limit`` where bandwidths are whole numbers."""
        return [
            max(Fraction(0), Fraction(float(value) * self.largest).limit_denominator(limit)) / self.scale
            for value in solution.x
        ]

    def proved(
        self, solution: Any, cuts: list[_Cut], limit: int
    ) -> tuple[Fraction, list[tuple[_Cut, Fraction]], dict[int, tuple[Fraction, Fraction]]]:
        """Round the dual to denominators of up to ``limit``, and return the rate that it proves."""

        def rounded(value: float) -> Fraction:
            return Fraction(float(value)).limit_denominator(limit)

        prices = [max(Fraction(0), rounded(-v)) for v in solution.ineqlin.marginals[: self.cut_rows]]
        shifts = [rounded(v) for v in solution.eqlin.marginals] if self.plain else []
        weights = list(zip(cuts, prices, strict=True))
        if self.twofold:  # half of a cut's price is for broadcasts, half for the reductions on their ways back
            weights = [(_Cut(cut.nodes, way), price / 2) for cut, price in weights for way in (True, False)]
            potentials = {switch: (s / 2, -s / 2) for switch, s in zip(self.plain, shifts, strict=True)}
        else:
            potentials = {w: (shifts[2 * k], shifts[2 * k + 1]) for k, w in enumerate(self.plain)}
        least = min(sum((w for cut, w in weights if r in cut.nodes), Fraction(0)) for r in range(self.n))
        if not least:
            return Fraction(sum(self.width)), [], {}
        weights = [(cut, w / least) for cut, w in weights if w]
        potentials = {switch: (a / least, b / least) for switch, (a, b) in potentials.items()}
        worth = Fraction(0)
        for (src, dst), width in zip(self.arcs, self.width, strict=True):
            price = [Fraction(0), Fraction(0)]
            for cut, w in weights:
                tail, head = (src, dst) if cut.outward else (dst, src)
                if tail in cut.nodes and head not in cut.nodes:
                    price[not cut.outward] += w
            none = (Fraction(0), Fraction(0))
            for way in (0, 1):
                price[way] += potentials.get(dst, none)[way] - potentials.get(src, none)[way]
            worth += width * max(Fraction(0), *price)
        return worth / self.scale, weights, potentials

    def fits(self, values: list[Fraction]) -> bool:
        """Return whether an exact solution keeps within the links, and every switch passes on what it gets."""
        within = all(
            sum(values[c] for c in shared) <= Fraction(b, self.scale)
            for shared, b in zip(self.sharing, self.width, strict=True)
        )
        return within and all(
            not sum(values[c] * ((d == switch) - (s == switch)) for c, (s, d) in zip(columns, self.arcs, strict=True))
            for switch in self.plain
            for columns, _ in self.ways
        )

    def feasible(self, values: list[Fraction]) -> Fraction:
        """Return the rate of an exact solution; -1 where it breaks a row or a cut."""
        if not self.fits(values):
            return Fraction(-1)
        rate = sum(values[: self.n], Fraction(0))
        scale = lcm(*(value.denominator for value in values))
        source = len(self.topology.nodes)
        for columns, outward in self.ways:
            used = {
                (arc if outward else arc[::-1]): int(values[c] * scale)
                for arc, c in zip(self.arcs, columns, strict=True)
            }
            network = Network(source + 1, used | {(source, r): int(values[r] * scale) for r in range(self.n)})
            if any(network.flow(source, sink) < rate * scale for sink in range(self.n)):
                return Fraction(-1)
        return rate
