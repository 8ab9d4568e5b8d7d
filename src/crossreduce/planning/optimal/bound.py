"""``bound``: the greatest rate of a collective on a topology, with its proof. ``bounds/certificate.py`` has the theory.

The bound of an all-reduce is the optimum of a linear program. The bound of another collective is that of the tightest
cut if every switch has equal bandwidths in and out. Otherwise it is also the optimum of a linear program. If other
devices help, perhaps no trees reach the rate that cuts prove. Then the bound is the optimum of a program over all trees
(``column_generation.py``). Source of the search for the tightest cut (Newton's method): Dinkelbach, On nonlinear
fractional programming, Management Science 13(7), 1967.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

from ...errors import ArgumentError, PlanError, shown
from ...topology import Topology, TopologyLike, topology_of
from ..topologies import neutral_topology, require_routes
from .bounds.certificate import COLLECTIVES, Bound, Cut
from .symmetric.orbit_forest import symmetric_bound

# On topologies with more nodes, if trees with helpers reach their bound, cuts are not searched: it can take minutes.
_MOST_NODES: Final = 24
_ROUNDING: Final = Fraction(1, 10**6)  # the relative error of rates of rounded trees

Roots = str | int | Mapping[str, int | Fraction] | Mapping[int, int | Fraction] | None
RootWeights = tuple[tuple[str, Fraction], ...]  # (canonical name of a root, its weight)


def bound(
    topology: TopologyLike, collective: str, root: Roots = None, devices: Iterable[str | int] | None = None
) -> Bound:
    """Return the greatest rate that a schedule of a collective can have on a topology, with its proof.

    Args:
      topology: any in which data can get from the sources to the destinations: a ``Topology``, the name of a machine
        or the path of a file.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      root: for a broadcast or reduce, the root, or a mapping from several roots to their bytes. The data of several
        roots moves at the same time, and ``algbw`` counts the sum. ``None``: the root with the greatest rate.
      devices: the devices that take part, by name or number; the others only forward and combine. ``None``: all.
    Raises:
      ArgumentError: an unknown collective, an invalid root, a root for a collective without one, or invalid bytes.
      PlanError: a device cannot be reached. The error names the cut.

    >>> box = Topology.star([f"cuda:{k}" for k in range(8)], 450)
    >>> [str(bound(box, collective).algbw) for collective in COLLECTIVES]
    ['1800/7', '450', '450', '3600/7', '3600/7']
    >>> bound(box.with_switches(reducing=True), "all_reduce").algbw
    Fraction(450, 1)
    """
    topology = topology_of(topology)
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        known = "one of " + ", ".join(COLLECTIVES)
        raise ArgumentError.of("there is no such collective.", shown(collective), known)
    members = topology.devices if devices is None else topology.members(devices)
    return bound_of_members(topology, collective, members, _read_roots(topology, members, collective, root))


def _read_roots(topology: Topology, members: tuple[str, ...], collective: str, root: Roots) -> RootWeights | None:
    """Return the roots for ``bound_of_members``: (canonical name, weight) in the order of the members, or ``None``."""
    if root is None:
        return None
    if collective not in ("broadcast", "reduce"):
        raise ArgumentError.of(f"{collective} has no root.", f"root={shown(root)}", "root=None")
    if isinstance(root, bool) or not isinstance(root, (str, int, Mapping)):
        problem = "a root must be a device, or a mapping from devices to bytes."
        raise ArgumentError.of(problem, shown(root), '"cuda:0"')
    given = root if isinstance(root, Mapping) else {root: 1}
    roots: dict[str, Fraction] = {}
    for name, weight in given.items():
        device = topology.node(name)
        if device not in members:
            known = "one of " + ", ".join(members)
            raise ArgumentError.of("the root must be a device that takes part.", shown(name), known)
        if isinstance(weight, bool) or not isinstance(weight, (int, Fraction)) or weight < 0:
            problem = "the bytes of a root must be an int or a Fraction, 0 or more."
            raise ArgumentError.of(problem, f"{name}: {shown(weight)}", '{"cuda:0": 1 << 20}')
        roots[device] = roots.get(device, Fraction(0)) + weight
    if not any(roots.values()):
        raise ArgumentError.of("at least one root must have more than 0 bytes.", shown(root), '{"cuda:0": 1}')
    return tuple(sorted(roots.items(), key=lambda item: members.index(item[0])))


@lru_cache(maxsize=4096)
def bound_of_members(
    topology: Topology, collective: str, members: tuple[str, ...], roots: RootWeights | None = None
) -> Bound:
    """Return the bound of a collective among some devices, which are given by canonical names.

    ``roots`` are the roots and their weights. If it is ``None``, the root of a broadcast or reduce is the member with
    the greatest bound; in other collectives, all members are roots with equal weights.
    """
    everyone = tuple((device, Fraction(1)) for device in members)
    if len(members) == 1:
        return Bound(topology, collective, members, roots or everyone, None, ())
    if roots is None and collective in ("broadcast", "reduce"):
        return _best_root(topology, collective, members)
    parts = roots or everyone
    used_roots = [root for root, weight in parts if weight]
    sources, destinations = (members, used_roots) if collective == "reduce" else (used_roots, members)
    require_routes(topology, sources, destinations, collective)
    by_trees, reached = _bound_by_trees(topology, collective, members, roots)
    if by_trees is None and (by_symmetry := symmetric_bound(topology, collective, members, roots)) is not None:
        return by_symmetry
    # If trees reach the bound, cuts cannot prove a lower one, but a shorter proof. They are searched if this is quick.
    slow = len(topology.nodes) > _MOST_NODES or (collective == "all_reduce" and not topology.symmetric)
    if by_trees is not None and reached and slow:
        return by_trees
    by_cuts = _bound_by_cuts(topology, collective, members, parts)
    return by_cuts if by_trees is None or (by_cuts.algbw or 0) <= (by_trees.algbw or 0) else by_trees


def _bound_by_trees(
    topology: Topology, collective: str, members: tuple[str, ...], roots: RootWeights | None
) -> tuple[Bound | None, bool]:
    """Return the bound that the prices of links prove for trees with helpers, and whether trees reach this bound.

    The bound is ``None`` if all devices take part, or if ``best_helper_trees`` returns ``None``.
    """
    if all(device in members for device in topology.devices):
        return None, False
    from .helper_trees import best_helper_trees

    best = best_helper_trees(topology, collective, members, roots)
    if best is None:
        return None, False
    names, links = best.neutral.names, best.neutral.topology.links
    priced = zip(links, best.mixture.prices, strict=True)
    prices = tuple((names[link.src], names[link.dst], price) for link, price in priced if price)
    parts = roots or tuple((device, Fraction(1)) for device in members)
    proved = Bound(topology, collective, members, parts, best.mixture.most, (), prices=prices)
    return proved, best.mixture.rate >= best.mixture.most * (1 - _ROUNDING)


def _bound_by_cuts(topology: Topology, collective: str, members: tuple[str, ...], parts: RootWeights) -> Bound:
    """Return the lowest bound that cuts prove."""
    if collective == "all_reduce":
        from .bounds.linear_program import optimum

        neutral, names = neutral_topology(topology, members)
        best = optimum(neutral)
        cuts = tuple(Cut(frozenset(names[k] for k in nodes), weight, outward) for nodes, weight, outward in best.cuts)
        potentials = tuple((names[switch], down, up) for switch, down, up in best.potentials)
        return Bound(topology, collective, members, parts, best.rate, cuts, potentials)
    return _one_way_bound(topology, collective, members, parts)


def _one_way_bound(topology: Topology, collective: str, members: tuple[str, ...], parts: RootWeights) -> Bound:
    """Return the bound of a collective other than all-reduce, which the tightest cut or a linear program proves.

    If all switches that only forward have as much bandwidth in as out, the tightest cut gives the exact rate.
    """
    from .bounds.cuts import cuts_suffice, tightest_cut

    neutral, names = neutral_topology(topology, members)
    alias = {node: name for name, node in names.items()}
    outward = collective in ("broadcast", "all_gather")
    inside, ratio = tightest_cut(neutral, {alias[root]: weight for root, weight in parts}, outward=outward)
    rate = sum((weight for _, weight in parts), Fraction(0)) / ratio
    cut = Cut(frozenset(names[node] for node in inside), Fraction(1), outward)
    if not cuts_suffice(neutral):
        from .bounds.linear_program import optimum

        numbers = {device: k for k, device in enumerate(members)}
        weights = tuple((numbers[root], weight) for root, weight in parts if weight)
        best = optimum(neutral if outward else neutral.reversed(), weights)
        if best.rate < rate:
            cuts = tuple(Cut(frozenset(names[node] for node in nodes), w, outward) for nodes, w, _ in best.cuts)
            # On reversed links, the links into a switch are those out of it. So a shift of prices has the other sign.
            unused = Fraction(0)
            potentials = tuple(
                (names[switch], shift, unused) if outward else (names[switch], unused, -shift)
                for switch, shift, _ in best.potentials
            )
            return Bound(topology, collective, members, parts, best.rate, cuts, potentials)
    return Bound(topology, collective, members, parts, rate, (cut,))


def _best_root(topology: Topology, collective: str, members: tuple[str, ...]) -> Bound:
    """Return the bound of the root with the greatest rate."""
    # If links are equal in both directions, every root has the same bound: the least cut that separates two members.
    candidates = members[:1] if topology.symmetric else members
    bounds: list[Bound] = []
    for device in candidates:
        try:
            bounds.append(bound_of_members(topology, collective, members, ((device, Fraction(1)),)))
        except PlanError as error:  # this root does not reach all devices; another one may
            failure = error
    if not bounds:
        raise failure
    return max(bounds, key=lambda limit: limit.algbw or 0)
