"""Bounds on the orbits of a symmetry: the program of ``bounds/cut_program.py`` with one variable for each orbit.

The constraints of that program are the same for all images under a symmetry. So the mean of a solution's images is a
solution of the same rate, and it has the same value on all links of an orbit: one variable stands for all of them. A
cut that it violates is found by a maximum flow on the whole graph, to one device of each orbit. In the proof a cut
stands for all its images, each with an equal part of its weight: ``Bound.check`` needs only to count how many links of
each orbit cross it.

Source: Bödi, Herr & Joswig, Algorithms for highly symmetric linear and integer programs, Math. Programming 137, 2013.
"""

from __future__ import annotations

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

_FINE: Final = 1 << 28  # the rate in units of capacity, in the search for violated cuts: SciPy's flows have 32 bits
_MOST_ROUNDS: Final = 200  # of new cuts; then the bound is that of the cuts so far
_LEAST: Final = 1e-11  # smaller weights of cuts, relative to the largest, are rounding errors

Pair = tuple[str, str]


class OrbitCut(NamedTuple):
    """A cut and what its images have in common; see ``Cut``."""

    nodes: frozenset[int]
    outward: bool


class Quotient:
    """A topology, all of whose devices take part, and the orbits of its nodes and links."""

    def __init__(self, topology: Topology, symmetry: Symmetry) -> None:
        found = symmetry.links(topology)
        assert found is not None
        self.topology, self.symmetry = topology, symmetry
        self.n = len(topology.devices)
        number = {node: k for k, node in enumerate(topology.nodes)}
        self.number = number
        self.arcs = [(number[link.src], number[link.dst]) for link in topology.links]
        least, sizes = found
        kept = sorted(sizes)
        at = {link: k for k, link in enumerate(kept)}
        self.orbit = [at[link] for link in least]  # of each link, numbered from 0
        self.sizes = [sizes[link] for link in kept]
        self.width = [topology.links[link].bandwidth for link in kept]
        self.paired = topology.symmetric
        by_arc = {arc: k for k, arc in enumerate(self.arcs)}
        self.back = [self.orbit[by_arc[self.arcs[link][::-1]]] for link in kept] if self.paired else []
        self.roots = sorted({orbit for orbit in symmetry.orbits if orbit < self.n})  # a device of each orbit
        plain = {number[switch.name] for switch in topology.switches if not switch.reduces}
        self.plain = sorted({orbit for orbit in symmetry.orbits if orbit in plain})
        self.leaving: list[list[int]] = [[] for _ in number]
        self.entering: list[list[int]] = [[] for _ in number]
        for k, (src, dst) in enumerate(self.arcs):
            self.leaving[src].append(k)
            self.entering[dst].append(k)

    def crossing(self, nodes: frozenset[int], *, outward: bool) -> dict[int, int]:
        """Return how many links of each orbit leave a set of nodes (or enter it)."""
        found: dict[int, int] = {}
        small = 2 * len(nodes) <= len(self.leaving)
        inside = nodes if small else [node for node in range(len(self.leaving)) if node not in nodes]
        listed, far = (self.leaving, 1) if outward == small else (self.entering, 0)
        for node in inside:
            for k in listed[node]:
                if (self.arcs[k][far] in nodes) != small:
                    found[self.orbit[k]] = found.get(self.orbit[k], 0) + 1
        return found

    def parts(self, nodes: frozenset[int]) -> dict[int, Fraction]:
        """Return the part of each orbit of devices that is in a set of nodes."""
        found: dict[int, int] = {}
        for node in nodes:
            if node < self.n:
                orbit = self.symmetry.orbits[node]
                found[orbit] = found.get(orbit, 0) + 1
        return {orbit: Fraction(count, self.symmetry.sizes[orbit]) for orbit, count in found.items()}


class _Program:
    """The linear program: rates of orbits of roots, bandwidths of orbits of links, for each kind of trees."""

    def __init__(self, quotient: Quotient, collective: str, weights: Mapping[int, Fraction] | None) -> None:
        """``weights``: of the data of each orbit of roots, which sum up to 1; ``None``: an all-reduce."""
        self.quotient, self.weights = quotient, weights
        links = len(quotient.sizes)
        outward = collective in ("broadcast", "all_gather")
        self.ways: tuple[bool, ...] = (outward,)
        if weights is None:
            self.ways = (True,) if quotient.paired else (True, False)
        self.rates = len(quotient.roots) if weights is None else 1
        self.column = {root: k if weights is None else 0 for k, root in enumerate(quotient.roots)}
        self.first = {way: self.rates + k * links for k, way in enumerate(self.ways)}
        self.columns = self.rates + len(self.ways) * links
        self.largest = max(quotient.width)

    def covered_parts(self, nodes: frozenset[int]) -> dict[int, Fraction]:
        """Return, for each rate, the part of its data that starts in a set of nodes (or must end there)."""
        found: dict[int, Fraction] = {}
        for root, part in self.quotient.parts(nodes).items():
            part *= 1 if self.weights is None else self.weights.get(root, 0)
            found[self.column[root]] = found.get(self.column[root], Fraction(0)) + part
        return found

    def first_cuts(self) -> dict[OrbitCut, None]:
        """Return the cuts around one device of each orbit and around its island."""
        quotient, topology = self.quotient, self.quotient.topology
        everyone = frozenset(range(len(topology.nodes)))
        sets = [frozenset({root}) for root in quotient.roots]
        islands = topology.islands
        if len(islands) > 1:
            reps = {*quotient.roots}
            for island in islands:
                inside = {quotient.number[device] for device in island}
                if inside & reps:
                    near = {quotient.arcs[k][1] for node in inside for k in quotient.leaving[node]}
                    inside |= {s for s in near if all(quotient.arcs[k][1] in inside for k in quotient.leaving[s])}
                    sets.append(frozenset(inside))
        sets += [everyone - nodes for nodes in sets]
        devices = frozenset(range(quotient.n))
        return {OrbitCut(nodes, way): None for way in self.ways for nodes in sets if not devices <= nodes}

    def rows(self, cuts: Iterable[OrbitCut]) -> Rows:
        """Return the program with some cuts, with bandwidths divided by the largest."""
        quotient = self.quotient
        upper: list[Row] = []
        for nodes, outward in cuts:
            inside, across = self.covered_parts(nodes), quotient.crossing(nodes, outward=outward)
            first = self.first[outward]
            columns = [*inside, *(first + orbit for orbit in across)]
            upper.append((columns, [*inside.values(), *(-count for count in across.values())]))
        limits = [Fraction(0)] * len(upper)
        for orbit, width in enumerate(quotient.width):
            columns = [first + orbit for first in self.first.values()]
            if quotient.paired and self.weights is None:
                columns = sorted({columns[0], self.first[True] + quotient.back[orbit]})
                factor = 2 if len(columns) == 1 else 1  # an orbit that is its own way back is used twice
                upper.append((columns, [factor] * len(columns)))
            else:
                upper.append((columns, [1] * len(columns)))
            limits.append(width / self.largest)
        equal: list[Row] = []
        for switch in quotient.plain:
            for first in self.first.values():
                signs: dict[int, int] = {}
                for listed, sign in ((quotient.entering[switch], 1), (quotient.leaving[switch], -1)):
                    for k in listed:
                        column = first + quotient.orbit[k]
                        signs[column] = signs.get(column, 0) + sign
                equal.append(([c for c, sign in signs.items() if sign], [sign for sign in signs.values() if sign]))
        return Rows(self.columns, self.rates, upper, limits, equal)

    def violated_cuts(self, values: list[float]) -> list[OrbitCut]:
        """Return cuts that a solution violates: minimum cuts from the roots to one device of each orbit."""
        quotient = self.quotient
        rate = sum(values[: self.rates])
        if rate <= 0:
            return []
        scale = _FINE / rate
        source = len(quotient.topology.nodes)
        found: dict[OrbitCut, None] = {}
        for way in self.ways:
            first = self.first[way]
            widths = [round(values[first + orbit] * scale) for orbit in range(len(quotient.sizes))]
            capacities = {
                (arc if way else arc[::-1]): widths[orbit]
                for arc, orbit in zip(quotient.arcs, quotient.orbit, strict=True)
            }
            fed = 0
            for device in range(quotient.n):
                root = quotient.symmetry.orbits[device]
                share = values[self.column[root]] / quotient.symmetry.sizes[root]
                share *= 1 if self.weights is None else float(self.weights.get(root, 0))
                capacities[source, device] = round(share * scale)
                fed += capacities[source, device]
            network = Network(source + 1, capacities)
            slack = 2 * len(quotient.arcs)
            for sink in quotient.roots:
                if network.flow(source, sink) < fed - slack:
                    found[OrbitCut(network.cut(source, sink) - {source}, way)] = None
        return list(found)

    def proof(
        self, solution: Solution, cuts: list[OrbitCut], limit: int
    ) -> tuple[Fraction, list[Cut], list[tuple[int, bool, Fraction]]]:
        """Return the rate that the rounded dual proves, its cuts, and the shifts of prices at switches."""
        quotient, names = self.quotient, self.quotient.topology.nodes
        most = max(solution.prices[: len(cuts)], default=0.0) or 1.0

        def rounded(value: float) -> Fraction:
            return Fraction(value / most).limit_denominator(limit) if abs(value) > _LEAST * most else Fraction(0)

        weights = [
            (cut, max(Fraction(0), rounded(v))) for cut, v in zip(cuts, solution.prices[: len(cuts)], strict=True)
        ]
        weights = [(cut, weight) for cut, weight in weights if weight]
        covered = [Fraction(0)] * self.rates
        price = {way: [Fraction(0)] * len(quotient.sizes) for way in self.ways}  # sums over the links of an orbit
        for (nodes, outward), weight in weights:
            for column, part in self.covered_parts(nodes).items():
                covered[column] += weight * part
            for orbit, count in quotient.crossing(nodes, outward=outward).items():
                price[outward][orbit] += weight * count
        shifts: list[tuple[int, bool, Fraction]] = []
        balances = ((switch, way) for switch in quotient.plain for way in self.ways)
        for (switch, way), value in zip(balances, solution.shifts, strict=True):
            shift = -rounded(value)
            if shift:
                shifts.append((switch, way, shift))
                for listed, sign in ((quotient.entering[switch], 1), (quotient.leaving[switch], -1)):
                    for k in listed:
                        price[way][quotient.orbit[k]] += sign * shift
        unit = min(covered)
        if not unit:
            return Fraction(-1), [], []
        total = Fraction(0)
        for orbit, width in enumerate(quotient.width):
            here = [price[way][orbit] for way in self.ways]
            if quotient.paired and self.weights is None:
                # Half of a price is for broadcasts, half for reductions in the reverse direction.
                there = price[True][quotient.back[orbit]]
                total += width * max(Fraction(0), here[0], there) / 2
            else:
                total += width * max(Fraction(0), *here)
        half = 2 if quotient.paired and self.weights is None else 1
        ways = (True, False) if half == 2 else ()
        listed_cuts = [
            Cut(frozenset(names[k] for k in nodes), weight / unit / half, outward)
            for (nodes, own), weight in weights
            for outward in ways or (own,)
        ]
        if half == 2:
            shifts = [(s, way, shift * (1 if way else -1)) for s, _, shift in shifts for way in (True, False)]
        return total / unit, listed_cuts, [(s, way, shift / unit / half) for s, way, shift in shifts]


@lru_cache(maxsize=256)
def quotient_bound(
    topology: Topology, symmetry: Symmetry, collective: str, roots: tuple[tuple[str, Fraction], ...] | None = None
) -> Bound:
    """Return the bound of a collective among all devices of a topology, proved on the orbits of a symmetry.

    Args:
      topology: its devices take part; there are two or more, and all of them are connected.
      symmetry: a symmetry of it; if there are ``roots``, it moves roots only to roots of the same weight.
      collective: its name.
      roots: of a broadcast or reduce; ``None``: all devices.

    >>> from crossreduce.topology.automorphisms import symmetry_of
    >>> machine = Topology.machine("hgx-h100", hosts=4)
    >>> found = quotient_bound(machine, symmetry_of(machine), "all_reduce")
    >>> str(found.algbw), len(found.cuts)
    ('8000/31', 2)
    >>> found.check()
    """
    quotient = Quotient(topology, symmetry)
    everyone = roots or tuple((device, Fraction(1)) for device in topology.devices)
    weights = None
    if collective != "all_reduce":
        whole = sum((weight for _, weight in everyone), Fraction(0))
        weights = dict.fromkeys(quotient.roots, Fraction(0))
        for name, weight in everyone:
            weights[symmetry.orbits[quotient.number[name]]] += weight / whole
    program = _Program(quotient, collective, weights)
    cuts = program.first_cuts()
    for _ in range(_MOST_ROUNDS):
        solution = solve(program.rows(cuts))
        new = [cut for cut in program.violated_cuts(solution.values) if cut not in cuts]
        if not new:
            break
        cuts.update(dict.fromkeys(new))
    near = sum(solution.values[: program.rates]) * float(program.largest) * (1 + 1e-9)
    proofs = []
    for limit in DENOMINATORS:
        proofs.append(program.proof(solution, list(cuts), limit))
        if 0 < proofs[-1][0] <= near:
            break
    rate, listed, shifts = min((proof for proof in proofs if proof[0] > 0), key=lambda proof: proof[0])
    shift: dict[str, list[Fraction]] = {}
    for switch, way, value in shifts:
        shift.setdefault(topology.nodes[switch], [Fraction(0), Fraction(0)])[not way] += value
    potentials = tuple((name, down, up) for name, (down, up) in shift.items())
    return Bound(topology, collective, topology.devices, everyone, rate, tuple(listed), potentials, symmetry=symmetry)
