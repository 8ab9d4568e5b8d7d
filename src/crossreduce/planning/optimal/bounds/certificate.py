"""``Bound``: a rate that no schedule can exceed, and the certificate that proves it.

Input: the parts of a certificate. Output: nothing, or PlanError. The check shares no code with the search for bounds.

M is the bytes of the whole buffer, T the time, algbw is M / T; S is a set of nodes without at least one of the devices,
B(S) the bandwidth of the links that leave S, w(S) the bytes that start in S.

- Parts of one buffer start at several roots, w_r bytes at root r, and all devices need all parts. (In an all-gather,
  each of the N devices is a root with M / N bytes; in a broadcast, one root has M bytes.) Then algbw <= sum(w) B(S) /
  w(S) for every S, since a device outside must receive w(S) bytes over these links. Without switches, or if each switch
  has as much bandwidth in as out, trees reach the least of these rates (Edmonds 1973). Reduce and reduce-scatter have
  the same bound on the reversed links.
- A switch that does not reduce (or, in the other direction, multicast) sends as much as it receives. If its bandwidths
  in and out differ, trees may reach less than any single cut allows. The best rate is then the optimum of a linear
  program. The certificate is a dual solution: weights of cuts, which give each link a price. Prices may move from the
  links into such a switch to the links out of it. If the cuts that contain a root have a total weight of 1 on average,
  a unit of rate costs at least 1, so the rate is at most the sum of bandwidth x price.
- All-reduce by trees: a reduction to some roots and a broadcast back share the links, in another such linear program.
  The roots are not given, so the cuts that contain any one root must have a total weight of at least 1.
- If devices that take no part help, or switches that reduce, perhaps no trees reach the rate that cuts prove. Then the
  certificate has a price for each link instead. If all trees of a unit of the buffer cost at least 1 together, the rate
  is at most the sum of bandwidth x price. The check computes the cheapest trees (Erickson, Monma & Veinott,
  Send-and-split method for minimum-concave-cost network flows, Math. of Operations Research 12(4), 1987), or, for many
  devices, a price that no trees are below (Wong, A dual ascent approach for Steiner tree problems on a directed graph,
  Math. Programming 28, 1984).

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
from .tree_prices import joints_of, price_of_buffer

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


class Cut(NamedTuple):
    """A set of nodes without at least one of the devices, and its weight in a proof.

    ``outward``: whether data must leave the set, to devices outside; else contributions from outside must enter it.
    """

    nodes: frozenset[str]
    weight: Fraction
    outward: bool


@dataclass(frozen=True)
class Bound:
    """A rate that no schedule of a collective on a topology can exceed, and the proof."""

    topology: Topology
    collective: str
    devices: tuple[str, ...]  # the devices that take part
    roots: tuple[tuple[str, Fraction], ...]  # the data from (or to) each root; broadcast, reduce: in any unit; else 1
    algbw: Fraction | None  # the rate in GB/s, exact; None: nothing has to move, so the rate is unlimited
    cuts: tuple[Cut, ...]  # the certificate: one cut, or several that together give prices to links
    # The shifts of prices at switches that do not reduce: (switch, in broadcasts, in reductions).
    potentials: tuple[tuple[str, Fraction, Fraction], ...] = ()
    prices: tuple[tuple[str, str, Fraction], ...] = ()  # instead of cuts: (src, dst, price per GB/s); the others: 0
    # Each cut stands for its images under this symmetry of the topology, which have equal parts of its weight, and so
    # does the shift of prices at a switch. ``None``: only for itself.
    symmetry: Symmetry | None = None

    @property
    def tight_cut(self) -> frozenset[str]:
        """The nodes whose links limit the rate: the heaviest cut of the certificate."""
        return max(self.cuts, key=lambda cut: cut.weight).nodes if self.cuts else frozenset()

    def check(self) -> None:
        """Raise PlanError unless the certificate proves the bound."""
        numbers = [self.algbw or 0, *(weight for _, weight in self.roots), *(cut.weight for cut in self.cuts)]
        numbers += [shift for _, *two in self.potentials for shift in two] + [price for *_, price in self.prices]
        if self.collective not in COLLECTIVES:
            remedy = "one of " + ", ".join(COLLECTIVES)
            raise PlanError.of("no collective has this name.", shown(self.collective), remedy)
        unknown = sorted(set(self.devices) - set(self.topology.devices))
        if unknown or not self.devices:
            raise PlanError.of("a bound needs devices, all of them in its topology.", shown(unknown or self.devices))
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
        """Return the rate that the cuts and potentials prove on the topology, whatever ``algbw`` is.

        Raises:
          PlanError: they prove none.
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
            # Where links are equal in both directions, a tree can have any of its nodes as its root; else a helper can
            # be the only good one.
            ends = self.devices if self.topology.symmetric else joints_of(self.topology)
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
        shift: dict[str, list[Fraction]] = {}  # by orbit
        for switch, *two in self.potentials:
            here = shift.setdefault(orbits[switch], [Fraction(0), Fraction(0)])
            for k in (0, 1):
                here[k] += two[k] / sizes[orbits[switch]]
        # By orbit of links: the bandwidth of its links, and the sum of their prices in broadcasts and in reductions.
        found: dict[int, tuple[Fraction, list[Fraction]]] = {}
        for (src, dst, bandwidth, _), of_links in zip(self.topology.links, links, strict=True):
            prices = found.setdefault(of_links, (bandwidth, [Fraction(0), Fraction(0)]))[1]
            for k in (0, 1) if shift else ():
                prices[k] += shift[orbits[dst]][k] if orbits[dst] in shift else 0
                prices[k] -= shift[orbits[src]][k] if orbits[src] in shift else 0
            for nodes, weight, outward in self.cuts:
                if (src in nodes) > (dst in nodes) if outward else (dst in nodes) > (src in nodes):
                    prices[not outward] += weight
        return sum((bandwidth * max(Fraction(0), *prices) for bandwidth, prices in found.values()), Fraction(0)) / unit

    def _orbits(self) -> tuple[dict[str, str], Sequence[int]]:
        """Return what stands for the orbit of each node, and of each link: a node, and the number of a link."""
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
            one = orbits[device]
            if weights[device] != weights[one] or (device in self.devices) != (one in self.devices):
                problem = "the symmetry of a certificate must move devices to devices with the same part."
                raise PlanError.of(problem, f"{one} and {device}")
        return orbits, links[0]

    def _proved_by_prices(self) -> Fraction:
        """Return the rate that the prices prove."""
        if self.cuts or self.potentials or self.symmetry:
            raise PlanError.of("a certificate must have cuts or prices, not both.", f"{len(self.cuts)} cuts")
        links = {(src, dst): bandwidth for src, dst, bandwidth, _ in self.topology.links}
        prices = {(src, dst): price for src, dst, price in self.prices}
        wrong = [pair for pair, price in prices.items() if pair not in links or price < 0]
        if wrong or len(prices) < len(self.prices):
            raise PlanError.of(
                "prices must be 0 or more, one for each link of the topology.", shown(wrong or self.prices)
            )
        self._check_roots()
        if not any(weight for _, weight in self.roots):
            raise PlanError.of("at least one root of a bound must have more than 0 bytes.", shown(self.roots))
        priced = [(src, dst, prices.get((src, dst), Fraction(0))) for src, dst in links]
        joints = joints_of(self.topology)
        exact = few_enough(len(self.devices), len(joints))
        cost = price_of_buffer(priced, joints, self.collective, self.devices, self.roots, exact=exact)
        if cost <= 0:
            raise PlanError.of("the prices prove nothing: trees that join the devices cost 0.", shown(self.prices))
        return sum((links[src, dst] * price for src, dst, price in self.prices), Fraction(0)) / cost

    def _check_roots(self) -> None:
        if any(weight < 0 or root not in self.devices for root, weight in self.roots):
            raise PlanError.of("roots must be devices of the bound, with 0 bytes or more.", shown(self.roots))

    def _check_direction(self) -> None:
        """Raise PlanError unless all parts of the certificate are for the direction of the collective."""
        self._check_roots()
        outwards = self.collective in ("broadcast", "all_gather")
        if any(cut.outward != outwards for cut in self.cuts):
            raise PlanError.of(f"the cuts of {self.collective} must have outward={outwards}.", shown(self.cuts))
        other = [switch for switch, *two in self.potentials if two[outwards]]
        if other:
            problem = f"potentials of {self.collective} must be 0 in the direction that it does not use."
            raise PlanError.of(problem, ", ".join(other))
