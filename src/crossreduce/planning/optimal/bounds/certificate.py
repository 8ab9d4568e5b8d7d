"""``Bound``: a rate that no schedule can exceed, and the certificate that proves it.

Input: a ``Bound``. Output: nothing, or PlanError. The check shares no code with the search for bounds.

M is the number of bytes of the whole buffer, T is the time, and algbw is M / T. S is a set of nodes that lacks at least
one of the devices, B(S) is the bandwidth of the links that leave S, and w(S) is the number of bytes that start in S.

- All-gather and broadcast: w_r bytes start at each root r, and all devices need all bytes. (In an all-gather, each of
  the N devices is a root with M / N bytes. In a broadcast, one root has M bytes.) A device outside S must receive w(S)
  bytes over the links that leave S. So algbw <= sum(w) B(S) / w(S) for every S. Without switches, or if each switch has
  as much bandwidth in as out, trees reach the least of these rates (Edmonds 1973). Reduce and reduce-scatter have the
  same bound on the reversed links.
- A switch that does not reduce (or, in the other direction, multicast) sends as much as it receives. If its bandwidths
  in and out differ, trees may reach less than any single cut allows. The best rate is then the optimum of a linear
  program. The certificate is a dual solution: weights of cuts, which give each link a price. At such a switch, prices
  may be shifted from the links into it to the links out of it. If the cuts that contain a root have a total weight of 1
  on average, a unit of rate costs at least 1, so the rate is at most the sum of bandwidth x price.
- In an all-reduce, a reduction to some roots and a broadcast back share the links, in another such linear program. The
  roots are not given, so for each possible root the cuts that contain it must have a total weight of at least 1.
- With helpers (devices that take no part, and switches that reduce), perhaps no trees reach the rate that cuts prove.
  Then the certificate has a price for each link instead. If all trees for a unit of the buffer together cost at least
  1, the rate is at most the sum of bandwidth x price. The check computes the cheapest trees, or for many devices a
  lower limit of the price of all trees (``tree_prices.py``).

Source: Edmonds, Edge-disjoint branchings, in Combinatorial Algorithms, 1973; Zhao et al., ForestColl: Efficient
collective communications on heterogeneous network fabrics, arXiv:2402.06787.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from ....errors import PlanError, shown
from ....topology import Topology
from ....topology.symmetry import Symmetry
from .steiner import few_enough
from .tree_prices import branch_nodes_of, price_of_buffer

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


class Cut(NamedTuple):
    """A set of nodes that lacks at least one of the devices, and its weight in a proof."""

    nodes: frozenset[str]
    weight: Fraction
    outward: bool  # True: data must leave the set for the devices outside; False: their contributions must enter it


@dataclass(frozen=True)
class Bound:
    """A rate that no schedule of a collective on a topology can exceed, and the proof."""

    topology: Topology
    collective: str
    devices: tuple[str, ...]  # the devices that take part
    # (root, amount of data that starts or ends at it, in any unit). Except for broadcast and reduce, all amounts are 1.
    roots: tuple[tuple[str, Fraction], ...]
    algbw: Fraction | None  # the rate in GB/s, exact; None: nothing has to move, so the rate is unlimited
    cuts: tuple[Cut, ...]  # the certificate: one cut, or several cuts that together give each link a price
    # The shifts of prices at switches that do not reduce: (switch, shift in broadcasts, shift in reductions).
    potentials: tuple[tuple[str, Fraction, Fraction], ...] = ()
    prices: tuple[tuple[str, str, Fraction], ...] = ()  # instead of cuts: (src, dst, price per GB/s); other links: 0
    symmetry: Symmetry | None = None  # if given, the weight of a cut or shift is divided equally among its images

    @property
    def tight_cut(self) -> frozenset[str]:
        """The nodes whose links limit the rate: the heaviest cut of the certificate."""
        return max(self.cuts, key=lambda cut: cut.weight).nodes if self.cuts else frozenset()

    def check(self) -> None:
        """Raise PlanError unless the certificate proves the bound."""
        numbers = [self.algbw or 0, *(weight for _, weight in self.roots), *(cut.weight for cut in self.cuts)]
        numbers += [shift for _, *pair in self.potentials for shift in pair] + [price for *_, price in self.prices]
        if self.collective not in COLLECTIVES:
            remedy = "one of " + ", ".join(COLLECTIVES)
            raise PlanError.of("no collective has this name.", shown(self.collective), remedy)
        unknown = sorted(set(self.devices) - set(self.topology.devices))
        if unknown or not self.devices:
            raise PlanError.of("a bound must have devices, all in its topology.", shown(unknown or self.devices))
        inexact = [number for number in numbers if not isinstance(number, (int, Fraction))]
        if inexact:
            raise PlanError.of("the numbers of a certificate must be ints or Fractions.", shown(inexact[0]))
        if len(set(self.devices)) < len(self.devices):
            raise PlanError.of("a bound must list each device once.", shown(self.devices))
        if self.collective not in ("broadcast", "reduce") and dict(self.roots) != dict.fromkeys(self.devices, 1):
            problem = f"every device must be a root of {self.collective}, with the weight 1."
            raise PlanError.of(problem, shown(self.roots))
        if self.algbw is None and len(self.devices) > 1:
            raise PlanError.of("algbw may be None only if one device takes part.", f"{len(self.devices)} devices")
        if self.algbw is None:
            return
        everyone = set(self.devices)
        for cut in self.cuts:
            if cut.weight < 0:
                raise PlanError.of("a cut must have a weight of 0 or more.", f"weight {cut.weight}")
            if everyone <= cut.nodes:
                raise PlanError.of("a cut must leave out at least one of the devices.", shown(sorted(cut.nodes)))
        proved = self._proved_by_prices() if self.prices else self.proved()
        if proved != self.algbw:
            given = f"{self.collective}: {self.algbw} GB/s claimed, {proved} proved"
            raise PlanError.of("the certificate does not prove the bound.", given)

    def proved(self) -> Fraction:
        """Return the rate that the cuts and potentials prove, which may differ from ``algbw``.

        Raises:
          PlanError: the cuts and potentials prove no rate.
        """
        orbits, links = self._orbits()
        sizes = Counter(orbits.values())
        covered: dict[str, Fraction] = {}  # by orbit: the weight of the cuts that contain its nodes, on average
        for cut in self.cuts:
            for node in cut.nodes:
                if node in orbits:
                    orbit = orbits[node]
                    covered[orbit] = covered.get(orbit, Fraction(0)) + cut.weight / sizes[orbit]
        if self.collective == "all_reduce":  # the trees of each root must cross cuts with a total weight of 1 or more
            unit = Fraction(1)
            # If links are equal in both directions, any node of a tree can be its root, also a device that takes part.
            # Otherwise, the best trees may have a helper as their root.
            ends = self.devices if self.topology.symmetric else branch_nodes_of(self.topology)
            for root in ends:
                if covered.get(orbits[root], Fraction(0)) < 1:
                    raise PlanError.of("the cuts that contain a root must have a total weight of at least 1.", root)
        else:
            self._check_direction()
            inside = [covered.get(orbits[root], Fraction(0)) * weight for root, weight in self.roots]
            unit = sum(inside, Fraction(0))
            if unit <= 0:
                problem = "the cuts must contain a root with more than 0 bytes."
                raise PlanError.of(problem, f"roots {shown(self.roots)}, cuts {shown(self.cuts)}")
            unit /= sum((weight for _, weight in self.roots), Fraction(0))
        wrong = {switch for switch, *_ in self.potentials}
        wrong -= {switch.name for switch in self.topology.switches if not switch.reduces}
        if wrong:
            raise PlanError.of("potentials must belong to switches that do not reduce.", ", ".join(sorted(wrong)))
        shifts: dict[str, list[Fraction]] = {}  # by orbit; here and in ``totals``: [in broadcasts, in reductions]
        for switch, *pair in self.potentials:
            orbit_shifts = shifts.setdefault(orbits[switch], [Fraction(0), Fraction(0)])
            for k in (0, 1):
                orbit_shifts[k] += pair[k] / sizes[orbits[switch]]
        # By orbit of links: the bandwidth of one link, and the sum of the prices of all links.
        totals: dict[int, tuple[Fraction, list[Fraction]]] = {}
        for (src, dst, bandwidth, _), link_orbit in zip(self.topology.links, links, strict=True):
            prices = totals.setdefault(link_orbit, (bandwidth, [Fraction(0), Fraction(0)]))[1]
            for k in (0, 1) if shifts else ():
                prices[k] += shifts[orbits[dst]][k] if orbits[dst] in shifts else 0
                prices[k] -= shifts[orbits[src]][k] if orbits[src] in shifts else 0
            for nodes, weight, outward in self.cuts:
                if (src in nodes) > (dst in nodes) if outward else (dst in nodes) > (src in nodes):
                    prices[not outward] += weight
        return sum((bandwidth * max(Fraction(0), *prices) for bandwidth, prices in totals.values()), Fraction(0)) / unit

    def _orbits(self) -> tuple[dict[str, str], Sequence[int]]:
        """Return the orbit of each node and of each link, named after one node or link of the orbit."""
        names = self.topology.nodes
        if self.symmetry is None:
            return {name: name for name in names}, range(len(self.topology.links))
        problem = self.symmetry.problem()
        links = None if problem else self.symmetry.links(self.topology)
        if links is None:
            given = problem or "it changes a link or the kind of a node"
            raise PlanError.of("the symmetry of a certificate must map its topology to itself.", given)
        orbits = {names[k]: names[orbit] for k, orbit in enumerate(self.symmetry.orbits)}
        weights = dict.fromkeys(self.topology.devices, Fraction(0)) | dict(self.roots)
        for device in self.topology.devices:
            first = orbits[device]
            if weights[device] != weights[first] or (device in self.devices) != (first in self.devices):
                problem = "the symmetry of a certificate must map each device to devices with the same data and role."
                raise PlanError.of(problem, f"{first} and {device}")
        return orbits, links[0]

    def _proved_by_prices(self) -> Fraction:
        """Return the rate that the prices of the links prove."""
        if self.cuts or self.potentials or self.symmetry:
            given = f"{len(self.cuts)} cuts, {len(self.prices)} prices"
            raise PlanError.of("a certificate must have cuts or prices, not both.", given)
        links = {(src, dst): bandwidth for src, dst, bandwidth, _ in self.topology.links}
        prices = {(src, dst): price for src, dst, price in self.prices}
        wrong = [pair for pair, price in prices.items() if pair not in links or price < 0]
        if wrong or len(prices) < len(self.prices):
            problem = "prices must be 0 or more, and each link of the topology may have one price."
            raise PlanError.of(problem, shown(wrong or self.prices))
        self._check_roots()
        if not any(weight for _, weight in self.roots):
            raise PlanError.of("at least one root of a bound must have more than 0 bytes.", shown(self.roots))
        priced = [(src, dst, prices.get((src, dst), Fraction(0))) for src, dst in links]
        branch_nodes = branch_nodes_of(self.topology)
        exact = few_enough(len(self.devices), len(branch_nodes))
        cost = price_of_buffer(priced, branch_nodes, self.collective, self.devices, self.roots, exact=exact)
        if cost <= 0:
            raise PlanError.of("trees that join the devices cost 0, so the prices prove nothing.", shown(self.prices))
        return sum((links[src, dst] * price for src, dst, price in self.prices), Fraction(0)) / cost

    def _check_roots(self) -> None:
        if any(weight < 0 or root not in self.devices for root, weight in self.roots):
            raise PlanError.of("roots must be devices of the bound, with 0 bytes or more.", shown(self.roots))

    def _check_direction(self) -> None:
        """Raise PlanError unless all cuts and potentials are for the direction in which the collective moves data."""
        self._check_roots()
        outwards = self.collective in ("broadcast", "all_gather")
        if any(cut.outward != outwards for cut in self.cuts):
            raise PlanError.of(f"the cuts of {self.collective} must have outward={outwards}.", shown(self.cuts))
        wrong = [switch for switch, *pair in self.potentials if pair[outwards]]
        if wrong:
            problem = f"potentials of {self.collective} must be 0 in the direction in which it moves no data."
            raise PlanError.of(problem, ", ".join(wrong))
