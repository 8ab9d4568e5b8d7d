"""What no schedule can beat: exact bounds on a collective's rate, each with a certificate that anyone can check.

In: a topology, a collective, perhaps its roots.  Out: a ``Bound``. M is the full buffer's bytes, T the time, algbw
is M / T; S is a set of nodes that lacks a device, B(S) the bandwidth of the links that leave S.

- One buffer's parts start at several roots, w_r bytes at root r, and all devices need all of them (all-gather: every
  device is a root of M / N; broadcast: one root of M; several broadcasts at once). Then algbw <= sum(w) B(S) / w(S)
  for every S, since a device outside must get w(S) over these links. The least over S is reached by trees (Edmonds
  1973). Reduce and reduce-scatter are the same on the reversed links.
- All-reduce by trees: a reduction to some roots and a broadcast back share the links. The best rate is a linear
  program's. Its dual weighs cuts, which is the certificate: if every root is in cuts of weight 1 in sum, every unit
  of rate uses links worth 1, so the rate is at most what all links are worth. A switch that does not reduce
  gives out as much as it takes in, so worth may be shifted from the links into it to those out of it.

Source: Edmonds, Edge-disjoint branchings, in Combinatorial Algorithms, 1973; Zhao et al., ForestColl: Efficient
collective communications on heterogeneous network fabrics, arXiv:2402.06787. The search is Newton's
(Dinkelbach, On nonlinear fractional programming, Management Science 13(7), 1967).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ..devices import canonical
from ..errors import ArgumentError, PlanError, message, shown
from ..topology import Topology
from .cuts import densest
from .joint import Joint, joint
from .views import require_ways, view

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
Roots = str | Mapping[str, int | Fraction] | None


class Cut(NamedTuple):
    """A set of nodes that lacks a device, and what it counts for in a proof.

    ``outward``: what the devices outside need from the roots inside must leave over its links;
    else what they contribute must enter over them.
    """

    nodes: frozenset[str]
    weight: Fraction
    outward: bool


@dataclass(frozen=True)
class Bound:
    """The greatest rate that a collective can have on a topology, and the proof.

    Args:
      topology: of which it is true.
      collective: its name.
      devices: those that take part.
      roots: the bytes that start at (or end on) each root, for one buffer of ``sum(roots.values())`` bytes.
      algbw: the rate in GB/s, exact; ``None``: nothing has to move, so there is no limit.
      cuts: the certificate. One cut, but for an all-reduce.
      potentials: for an all-reduce, what passing each switch shifts: (switch, in broadcasts, in reductions).
    """

    topology: Topology
    collective: str
    devices: tuple[str, ...]
    roots: tuple[tuple[str, Fraction], ...]
    algbw: Fraction | None
    cuts: tuple[Cut, ...]
    potentials: tuple[tuple[str, Fraction, Fraction], ...] = ()

    @property
    def tight_cut(self) -> frozenset[str]:
        """The nodes whose links make the bound: the heaviest cut of the certificate."""
        return max(self.cuts, key=lambda cut: cut.weight).nodes if self.cuts else frozenset()

    def check(self) -> None:
        """Raise unless the certificate proves the bound; shares no code with the search.

        Raises:
          PlanError: it does not.
        """
        known = set(self.topology.devices)
        numbers = [self.algbw or 0, *(weight for _, weight in self.roots), *(cut.weight for cut in self.cuts)]
        numbers += [shift for _, *two in self.potentials for shift in two]
        if self.collective not in COLLECTIVES or not self.devices or not known.issuperset(self.devices):
            raise PlanError(message("a bound is one of a collective between devices.", shown(self)))
        if not all(isinstance(number, (int, Fraction)) for number in numbers) or len(set(self.devices)) < len(
            self.devices
        ):
            raise PlanError(message("a proof is in exact numbers, of each device once.", shown(self)))
        if self.collective not in ("broadcast", "reduce") and dict(self.roots) != dict.fromkeys(self.devices, 1):
            raise PlanError(message(f"in a {self.collective} every device is a root alike.", shown(self.roots)))
        if self.algbw is None and len(self.devices) > 1:
            raise PlanError(message("this certificate proves nothing.", f"{self.collective}, no bound"))
        if self.algbw is None:
            return
        everyone = set(self.devices)
        if any(cut.weight < 0 or everyone <= cut.nodes for cut in self.cuts):
            raise PlanError(message("a cut of the certificate lacks no device.", shown(self.cuts)))
        proved = self._proved_jointly() if self.collective == "all_reduce" else self._proved_by_one_cut()
        if proved != self.algbw:
            given = f"{self.collective}: {self.algbw} GB/s claimed, {proved} proved"
            raise PlanError(message("the certificate does not prove the bound.", given))

    def _proved_by_one_cut(self) -> Fraction:
        way = self.collective in ("broadcast", "all_gather")
        if len(self.cuts) != 1 or self.cuts[0].outward != way:
            raise PlanError(
                message(f"a {self.collective} is limited by one cut its bytes must cross.", shown(self.cuts))
            )
        ((nodes, _, outward),) = self.cuts
        crossing = [link for link in self.topology.links if (link.src in nodes) > (link.dst in nodes)]
        if not outward:
            crossing = [link for link in self.topology.links if (link.dst in nodes) > (link.src in nodes)]
        width = sum((link.bandwidth for link in crossing), Fraction(0))
        inside = sum((weight for root, weight in self.roots if root in nodes), Fraction(0))
        if inside <= 0 or any(weight < 0 or root not in self.devices for root, weight in self.roots):
            raise PlanError(message("a cut must have a root's bytes inside.", shown(self.roots)))
        return sum((weight for _, weight in self.roots), Fraction(0)) * width / inside

    def _proved_jointly(self) -> Fraction:
        for root in self.devices:  # every root's trees cross cuts of weight 1
            if sum((cut.weight for cut in self.cuts if root in cut.nodes), Fraction(0)) < 1:
                raise PlanError(message("a root is in cuts of too little weight.", root))
        shift = {switch: two for switch, *two in self.potentials}
        if not shift.keys() <= {switch.name for switch in self.topology.switches if not switch.reduces}:
            raise PlanError(message("only switches that do not reduce have potentials.", shown(self.potentials)))
        worth = Fraction(0)
        for src, dst, bandwidth, _ in self.topology.links:
            prices = [Fraction(0), Fraction(0)]
            for nodes, weight, outward in self.cuts:
                crosses = (src in nodes) > (dst in nodes) if outward else (dst in nodes) > (src in nodes)
                prices[not outward] += weight * crosses
            for way in (0, 1):
                prices[way] += (shift[dst][way] if dst in shift else 0) - (shift[src][way] if src in shift else 0)
            worth += bandwidth * max(Fraction(0), *prices)
        return worth


def bound(topology: Topology, collective: str, root: Roots = None, devices: Iterable[str] | None = None) -> Bound:
    """Return what no schedule of a collective can beat on a topology, with its proof.

    Args:
      topology: any in which data can get where it must.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      root: for a broadcast or reduce, the root; a mapping gives the bytes of several that run together, whose sum is
        the buffer that ``algbw`` counts; ``None``: the root for which the rate is greatest.
      devices: those that take part; the others only pass on and combine. ``None``: all.
    Raises:
      ArgumentError: an unknown collective, a root that is no device or that the collective has not, weights below 0.
      PlanError: some device cannot be reached; the cut is named.

    >>> box = Topology.star([f"cuda:{k}" for k in range(8)], 450)
    >>> [str(bound(box, collective).algbw) for collective in COLLECTIVES]
    ['1800/7', '450', '450', '3600/7', '3600/7']
    >>> bound(box.with_switches(reducing=True), "all_reduce").algbw
    Fraction(450, 1)
    """
    if not isinstance(topology, Topology):
        raise ArgumentError(message("a bound needs a Topology.", shown(topology), 'Topology.machine("dgx-1v")'))
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        raise ArgumentError(
            message("there is no such collective.", shown(collective), "one of " + ", ".join(COLLECTIVES))
        )
    members = topology.devices if devices is None else topology.members(devices)
    return _bound(topology, collective, _roots(members, collective, root), members)


def _roots(members: tuple[str, ...], collective: str, root: Roots) -> tuple[tuple[str, Fraction], ...] | None:
    if root is None:
        return None
    if collective not in ("broadcast", "reduce"):
        raise ArgumentError(message(f"{collective} has no root.", f"root={shown(root)}", "broadcast or reduce"))
    if not isinstance(root, (str, Mapping)):
        raise ArgumentError(message("a root is a device, or several with their bytes.", shown(root), '"cuda:0"'))
    given = root if isinstance(root, Mapping) else {root: 1}
    roots: dict[str, Fraction] = {}
    for name, weight in given.items():
        device = canonical(name)
        if device not in members:
            known = "one of " + ", ".join(members)
            raise ArgumentError(message("the root must be a device that takes part.", shown(name), known))
        if isinstance(weight, bool) or not isinstance(weight, (int, Fraction)) or weight < 0:
            raise ArgumentError(message("a root has 0 bytes or more.", f"{name}: {shown(weight)}", "{root: nbytes}"))
        roots[device] = roots.get(device, Fraction(0)) + weight
    if not any(roots.values()):
        raise ArgumentError(message("some root must have some bytes.", shown(root), '{"cuda:0": 1}'))
    return tuple(sorted(roots.items(), key=lambda item: members.index(item[0])))


@lru_cache(maxsize=4096)
def _bound(
    topology: Topology, collective: str, roots: tuple[tuple[str, Fraction], ...] | None, members: tuple[str, ...]
) -> Bound:
    everyone = tuple((device, Fraction(1)) for device in members)
    if len(members) == 1:
        return Bound(topology, collective, members, roots or everyone, None, ())
    if roots is None and collective in ("broadcast", "reduce"):
        # Where links are alike both ways, the least cut between any two devices is the limit of every root.
        choices = members[:1] if topology.symmetric else members
        bounds: list[Bound] = []
        for device in choices:
            try:
                bounds.append(_bound(topology, collective, ((device, Fraction(1)),), members))
            except PlanError as error:  # from here not all can be reached; from another they may
                lost = error
        if not bounds:
            raise lost
        return max(bounds, key=lambda best: best.algbw or 0)
    parts = roots or everyone
    starts = [root for root, weight in parts if weight]
    gives, takes = (members, starts) if collective == "reduce" else (starts, members)
    require_ways(topology, gives, takes, collective)
    wiring, names = view(topology, members)
    if collective == "all_reduce":
        found = solved(wiring)
        cuts = tuple(Cut(frozenset(names[node] for node in nodes), weight, way) for nodes, weight, way in found.cuts)
        potentials = tuple((names[switch], down, up) for switch, down, up in found.potentials)
        return Bound(topology, collective, members, parts, found.rate, cuts, potentials)
    alias = {node: name for name, node in names.items()}
    outward = collective in ("broadcast", "all_gather")
    inside, ratio = densest(wiring, {alias[root]: weight for root, weight in parts}, outward=outward)
    whole = sum((weight for _, weight in parts), Fraction(0))
    cut = Cut(frozenset(names[node] for node in inside), Fraction(1), outward)
    return Bound(topology, collective, members, parts, whole / ratio, (cut,))


@lru_cache(maxsize=1024)
def solved(topology: Topology) -> Joint:
    """Return the all-reduce's linear program on a connected topology, solved."""
    return joint(topology)
