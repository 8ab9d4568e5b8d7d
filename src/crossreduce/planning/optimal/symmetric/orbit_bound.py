"""Bounds of symmetric topologies: the program of ``bounds/cut_program.py`` with one variable per orbit of links.

An orbit is a set of nodes, or of links, that the symmetry maps to each other. The symmetry maps each constraint of that
program to a constraint, and a solution to a solution. So the mean of a solution's images is a solution of the same
rate. It has the same value on all links of an orbit, so that one variable suffices for the orbit. A violated cut is
found by a maximum flow on the whole graph, to one device of each orbit. In the proof a cut stands for all its images,
each with an equal part of its weight. So ``Bound.check`` only counts how many links of each orbit cross the cut.

Source: Bödi, Herr & Joswig, Algorithms for highly symmetric linear and integer programs, Math. Programming 137, 2013.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....topology import Topology
from ....topology.symmetry import Symmetry
from ..bounds.certificate import Bound, Cut
from ..bounds.cuts import Network
from ..bounds.linear_program import DENOMINATORS
from ..bounds.solver import Row, Rows, Solution, solve

_RATE_UNITS: Final = 1 << 28  # the rate as a flow in the search for violated cuts: SciPy's flows have 32 bits
_MOST_ROUNDS: Final = 200  # in which cuts are added; if cuts are then missing, the bound is too high, but valid
_LEAST: Final = 1e-11  # weights of cuts below this part of the largest weight are rounding errors

Pair = tuple[str, str]


class OrbitCut(NamedTuple):
    """A cut that stands for all its images under the symmetry; see ``Cut``."""

    nodes: frozenset[int]
    outward: bool


class Quotient:
    """A topology, all of whose devices take part, and the orbits of its nodes and links."""

    def __init__(self, topology: Topology, symmetry: Symmetry) -> None:
        orbits = symmetry.links(topology)
        assert orbits is not None
        self.topology, self.symmetry = topology, symmetry
        self.n = len(topology.devices)
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.number = number
        self.arcs = [(number[link.src], number[link.dst]) for link in topology.links]
        least, sizes = orbits
        firsts = sorted(sizes)  # the first link of each orbit
        index = {link: k for k, link in enumerate(firsts)}
        self.orbit = [index[link] for link in least]  # the orbit of each link; orbits of links are numbered from 0
        self.sizes = [sizes[link] for link in firsts]  # the number of links in each orbit
        self.width = [topology.links[link].bandwidth for link in firsts]  # the bandwidth of one link of each orbit
        self.paired = topology.symmetric
        by_arc = {arc: k for k, arc in enumerate(self.arcs)}
        # For each orbit of links, the orbit of the links in the other direction.
        self.back = [self.orbit[by_arc[self.arcs[link][::-1]]] for link in firsts] if self.paired else []
        self.roots = sorted({orbit for orbit in symmetry.orbits if orbit < self.n})  # a device of each orbit
        plain = {number[switch.name] for switch in topology.switches if not switch.reduces}
        self.plain = sorted({orbit for orbit in symmetry.orbits if orbit in plain})  # a plain switch of each orbit
        self.leaving: list[list[int]] = [[] for _ in number]  # the links out of each node, by number
        self.entering: list[list[int]] = [[] for _ in number]
        for k, (src, dst) in enumerate(self.arcs):
            self.leaving[src].append(k)
            self.entering[dst].append(k)

    def crossing(self, nodes: frozenset[int], *, outward: bool) -> dict[int, int]:
        """Return, by orbit, how many links leave a set of nodes (or enter it, if not ``outward``)."""
        counts: dict[int, int] = {}
        small = 2 * len(nodes) <= len(self.leaving)  # if not, the other nodes are fewer, so their links are counted
        smaller_side = nodes if small else [node for node in range(len(self.leaving)) if node not in nodes]
        links, end = (self.leaving, 1) if outward == small else (self.entering, 0)
        for node in smaller_side:
            for k in links[node]:
                if (self.arcs[k][end] in nodes) != small:
                    counts[self.orbit[k]] = counts.get(self.orbit[k], 0) + 1
        return counts

    def parts(self, nodes: frozenset[int]) -> dict[int, Fraction]:
        """Return, for each orbit of devices, the part of its devices that is in a set of nodes."""
        counts = Counter(self.symmetry.orbits[node] for node in nodes if node < self.n)
        return {orbit: Fraction(count, self.symmetry.sizes[orbit]) for orbit, count in counts.items()}


class _Program:
    """The linear program. Its variables are rates of roots, and the bandwidths that trees of each direction use.

    An all-reduce has a rate for each orbit of roots, and trees in both directions. If links are equal in both, trees
    into a root are the trees out of it backwards, without variables of their own. Other collectives have one rate.
    """

    def __init__(self, quotient: Quotient, collective: str, weights: Mapping[int, Fraction] | None) -> None:
        """``weights``: by orbit of roots, the part of the data that belongs to them. ``None``: an all-reduce."""
        self.quotient, self.weights = quotient, weights
        links = len(quotient.sizes)
        self.directions: tuple[bool, ...] = (collective in ("broadcast", "all_gather"),)  # True: out of the roots
        if weights is None:
            self.directions = (True,) if quotient.paired else (True, False)
        self.rates = len(quotient.roots) if weights is None else 1  # how many variables are rates: the first ones
        self.column = {root: k if weights is None else 0 for k, root in enumerate(quotient.roots)}  # the rate of a root
        # By direction: the first variable of a bandwidth; the others follow in the order of the orbits.
        self.first = {outward: self.rates + k * links for k, outward in enumerate(self.directions)}
        self.columns = self.rates + len(self.directions) * links
        self.largest = max(quotient.width)

    def covered_parts(self, nodes: frozenset[int]) -> dict[int, Fraction]:
        """Return, by variable of a rate, the part of the data that starts (or must end) in a set of nodes."""
        parts: dict[int, Fraction] = {}
        for root, part in self.quotient.parts(nodes).items():
            part *= 1 if self.weights is None else self.weights.get(root, 0)
            parts[self.column[root]] = parts.get(self.column[root], Fraction(0)) + part
        return parts

    def first_cuts(self) -> dict[OrbitCut, None]:
        """Return the cuts around one device of each orbit and around its island, and those around all other nodes."""
        quotient, topology = self.quotient, self.quotient.topology
        everyone = frozenset(range(len(topology.nodes)))
        sets = [frozenset({root}) for root in quotient.roots]
        islands = topology.islands
        for island in islands if len(islands) > 1 else ():
            inside = {quotient.number[device] for device in island}
            if not inside.isdisjoint(quotient.roots):
                near = {quotient.arcs[k][1] for node in inside for k in quotient.leaving[node]}
                inside |= {s for s in near if all(quotient.arcs[k][1] in inside for k in quotient.leaving[s])}
                sets.append(frozenset(inside))  # with the switches all of whose links lead into it
        sets += [everyone - nodes for nodes in sets]
        devices = frozenset(range(quotient.n))
        return {OrbitCut(nodes, outward): None for outward in self.directions for nodes in sets if not devices <= nodes}

    def rows(self, cuts: Iterable[OrbitCut]) -> Rows:
        """Return the program with the constraints of some cuts. Bandwidths are divided by the largest one."""
        quotient = self.quotient
        upper: list[Row] = []
        for nodes, outward in cuts:  # the data that starts inside has to cross the cut
            inside, across = self.covered_parts(nodes), quotient.crossing(nodes, outward=outward)
            first = self.first[outward]
            columns = [*inside, *(first + orbit for orbit in across)]
            upper.append((columns, [*inside.values(), *(-count for count in across.values())]))
        limits = [Fraction(0)] * len(upper)
        for orbit, width in enumerate(quotient.width):
            columns = [first + orbit for first in self.first.values()]
            if quotient.paired and self.weights is None:
                columns = sorted({columns[0], self.first[True] + quotient.back[orbit]})
                factor = 2 if len(columns) == 1 else 1  # an orbit that contains both directions is used twice
                upper.append((columns, [factor] * len(columns)))
            else:
                upper.append((columns, [1] * len(columns)))
            limits.append(width / self.largest)
        equal: list[Row] = []
        for switch in quotient.plain:  # trees use as much bandwidth into a plain switch as out of it
            for first in self.first.values():
                signs: Counter[int] = Counter()
                signs.update(first + quotient.orbit[k] for k in quotient.entering[switch])
                signs.subtract(first + quotient.orbit[k] for k in quotient.leaving[switch])
                equal.append(([c for c, sign in signs.items() if sign], [sign for sign in signs.values() if sign]))
        return Rows(self.columns, self.rates, upper, limits, equal)

    def violated_cuts(self, values: list[float]) -> list[OrbitCut]:
        """Return the minimum cuts from the roots to one device of each orbit that a solution violates."""
        quotient = self.quotient
        rate = sum(values[: self.rates])
        if rate <= 0:
            return []
        scale = _RATE_UNITS / rate
        source = len(quotient.topology.nodes)  # an additional node, which feeds the roots
        cuts: dict[OrbitCut, None] = {}
        for outward in self.directions:
            first = self.first[outward]
            widths = [round(values[first + orbit] * scale) for orbit in range(len(quotient.sizes))]
            arcs = quotient.arcs if outward else [(dst, src) for src, dst in quotient.arcs]
            capacities = {arc: widths[orbit] for arc, orbit in zip(arcs, quotient.orbit, strict=True)}
            fed = 0
            for device in range(quotient.n):
                root = quotient.symmetry.orbits[device]
                share = values[self.column[root]] / quotient.symmetry.sizes[root]
                share *= 1 if self.weights is None else float(self.weights.get(root, 0))
                capacities[source, device] = round(share * scale)
                fed += capacities[source, device]
            network = Network(source + 1, capacities)
            slack = 2 * len(quotient.arcs)  # the most that rounding of capacities can change a flow
            for sink in quotient.roots:
                if network.flow(source, sink) < fed - slack:
                    cuts[OrbitCut(network.cut(source, sink) - {source}, outward)] = None
        return list(cuts)

    def proof(
        self, solution: Solution, cuts: list[OrbitCut], limit: int
    ) -> tuple[Fraction, list[Cut], list[tuple[int, bool, Fraction]]]:
        """Return (the rate that a rounded dual solution proves, its cuts, its shifts of prices at switches).

        A shift is (switch, whether for broadcasts, amount). The weights of cuts and the shifts are rounded to fractions
        with denominators up to ``limit``. If they prove nothing, the rate is -1.
        """
        quotient, names = self.quotient, self.quotient.topology.nodes
        most = max(solution.prices[: len(cuts)], default=0.0) or 1.0

        def rounded(value: float) -> Fraction:
            return Fraction(value / most).limit_denominator(limit) if abs(value) > _LEAST * most else Fraction(0)

        cut_weights = (max(Fraction(0), rounded(price)) for price in solution.prices[: len(cuts)])
        weights = [(cut, weight) for cut, weight in zip(cuts, cut_weights, strict=True) if weight]
        covered = [Fraction(0)] * self.rates  # the total weight of the cuts that contain the roots of each rate
        # By direction and orbit: the sum of the prices of the links of the orbit.
        price = {outward: [Fraction(0)] * len(quotient.sizes) for outward in self.directions}
        for (nodes, outward), weight in weights:
            for column, part in self.covered_parts(nodes).items():
                covered[column] += weight * part
            for orbit, count in quotient.crossing(nodes, outward=outward).items():
                price[outward][orbit] += weight * count
        shifts: list[tuple[int, bool, Fraction]] = []
        balances = ((switch, outward) for switch in quotient.plain for outward in self.directions)
        for (switch, outward), value in zip(balances, solution.shifts, strict=True):
            shift = -rounded(value)
            if shift:
                shifts.append((switch, outward, shift))
                for links, sign in ((quotient.entering[switch], 1), (quotient.leaving[switch], -1)):
                    for k in links:
                        price[outward][quotient.orbit[k]] += sign * shift
        unit = min(covered)
        if not unit:
            return Fraction(-1), [], []
        total = Fraction(0)
        for orbit, width in enumerate(quotient.width):
            prices = [price[outward][orbit] for outward in self.directions]
            if quotient.paired and self.weights is None:
                # Half of a price is for broadcasts, and half is for reductions in the reverse direction.
                prices.append(price[True][quotient.back[orbit]])
                total += width * max(Fraction(0), *prices) / 2
            else:
                total += width * max(Fraction(0), *prices)
        if not (quotient.paired and self.weights is None):
            listed = [Cut(frozenset(names[k] for k in cut.nodes), w / unit, cut.outward) for cut, w in weights]
            return total / unit, listed, [(switch, outward, shift / unit) for switch, outward, shift in shifts]
        both = (True, False)  # each cut and shift is listed for both directions, with half of its weight
        listed = [Cut(frozenset(names[k] for k in cut.nodes), w / unit / 2, out) for cut, w in weights for out in both]
        shifts = [(switch, out, (shift if out else -shift) / unit / 2) for switch, _, shift in shifts for out in both]
        return total / unit, listed, shifts


@lru_cache(maxsize=256)
def quotient_bound(
    topology: Topology, symmetry: Symmetry, collective: str, roots: tuple[tuple[str, Fraction], ...] | None = None
) -> Bound:
    """Return the bound of a collective among all devices of a topology, proved on the orbits of a symmetry.

    Args:
      topology: connected, with two or more devices, all of which take part.
      symmetry: a symmetry of the topology. It maps ``roots`` only to roots of the same weight.
      collective: the name of the collective.
      roots: the roots of a broadcast or reduce with their weights. ``None``: all devices, with equal weights.

    >>> from crossreduce.topology.automorphisms import symmetry_of
    >>> machine = Topology.machine("hgx-h100", hosts=4)
    >>> proved = quotient_bound(machine, symmetry_of(machine), "all_reduce")
    >>> str(proved.algbw), len(proved.cuts)
    ('8000/31', 2)
    >>> proved.check()
    """
    quotient = Quotient(topology, symmetry)
    parts = roots or tuple((device, Fraction(1)) for device in topology.devices)
    weights = None
    if collective != "all_reduce":
        total = sum((weight for _, weight in parts), Fraction(0))
        weights = dict.fromkeys(quotient.roots, Fraction(0))
        for name, weight in parts:
            weights[symmetry.orbits[quotient.number[name]]] += weight / total
    program = _Program(quotient, collective, weights)
    cuts = program.first_cuts()
    for _ in range(_MOST_ROUNDS):
        solution = solve(program.rows(cuts))
        new = [cut for cut in program.violated_cuts(solution.values) if cut not in cuts]
        if not new:
            break
        cuts.update(dict.fromkeys(new))
    near = sum(solution.values[: program.rates]) * float(program.largest) * (1 + 1e-9)  # the rate, with rounding
    proofs = []
    for limit in DENOMINATORS:
        proofs.append(program.proof(solution, list(cuts), limit))
        if 0 < proofs[-1][0] <= near:
            break
    rate, listed, shifts = min((proof for proof in proofs if proof[0] > 0), key=lambda proof: proof[0])
    by_switch: dict[str, list[Fraction]] = {}
    for switch, outward, shift in shifts:
        by_switch.setdefault(topology.nodes[switch], [Fraction(0), Fraction(0)])[not outward] += shift
    potentials = tuple((name, down, up) for name, (down, up) in by_switch.items())
    return Bound(topology, collective, topology.devices, parts, rate, tuple(listed), potentials, symmetry=symmetry)
