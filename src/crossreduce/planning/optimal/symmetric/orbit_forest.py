"""Forests and bounds of large symmetric topologies, for ``forest.py`` and ``bound.py``."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....schedule import GeneratedSchedule, Schedule
from ....topology import Switch, Topology
from ....topology.automorphisms import symmetry_of
from ....topology.symmetry import Symmetry
from ...algorithms.equal_links import direct_schedule
from ...requests import Request
from ..bounds.certificate import Bound
from ..bounds.demand import too_uneven
from ..bounds.solver import common_unit
from ..trees.tree_schedule import Tree, TreeShare, depth, trees_to_schedule
from .orbit_bound import Quotient, quotient_bound
from .orbit_trees import OrbitTree, best_trees

# Up to this many devices, programs without symmetry are fast. Their cuts name single devices, which is more precise.
FEW_DEVICES: Final = 32
# With more orbits, the programs on orbits are hardly smaller than those on devices.
_MOST_ORBITS: Final = 128

Roots = tuple[tuple[str, Fraction], ...] | None


class SymmetricForest(NamedTuple):
    """A schedule of trees, with the other fields of ``forest.Forest``, and the rate and bound of the trees."""

    schedule: Schedule  # generated, unless the symmetry maps every tree to itself
    k: Fraction
    trees: int
    depth: int
    rate: Fraction  # in GB/s
    limit: Fraction  # the bound of trees that branch only at devices that take part


@lru_cache(maxsize=256)
def symmetric_topology(
    topology: Topology, members: tuple[str, ...], roots: Roots, helpers: tuple[str, ...] = ()
) -> tuple[Topology, Symmetry] | None:
    """Return the topology with only the members as devices, and its symmetry, or ``None``.

    The helpers become the first switches of the topology, which reduce. All other devices become switches that only
    forward. The symmetry maps each root to itself, except if all members are roots with the same weight.

    ``None`` is returned if there are few devices or many orbits, or if bandwidths or weights differ so much that a
    program in floating point would prove a poor bound.
    """
    if len(topology.devices) <= FEW_DEVICES or len(members) < 2:
        return None
    if too_uneven({link.bandwidth for link in topology.links}) or too_uneven({part for _, part in roots or () if part}):
        return None
    if {*members} == {*topology.devices}:
        members = topology.devices
    if helpers or members != topology.devices:
        combining = {*members, *helpers}
        switches = [Switch(helper, True) for helper in helpers]
        switches += [switch for switch in topology.switches if switch.name not in combining]
        switches += [Switch(device, False) for device in topology.devices if device not in combining]
        topology = Topology.unchecked(members, topology.links, tuple(switches))
    fixed = () if roots is None else tuple(root for root, weight in roots if weight)
    if len(fixed) == len(members) and len({weight for _, weight in roots or ()}) == 1:
        fixed = ()
    symmetry = symmetry_of(topology, fixed)
    orbits = len({orbit for orbit in symmetry.orbits if orbit < len(members)})
    return (topology, symmetry) if orbits <= min(_MOST_ORBITS, (len(members) + 1) // 2) else None


@lru_cache(maxsize=128)
def symmetric_bound(topology: Topology, collective: str, members: tuple[str, ...], roots: Roots) -> Bound | None:
    """Return the bound of a collective, found on orbits, or ``None`` if ``symmetric_topology`` returns ``None``.

    Devices that take no part may forward and combine.
    """
    participants = {*members}
    helpers = tuple(device for device in topology.devices if device not in participants)
    symmetric = symmetric_topology(topology, members, roots, helpers)
    if symmetric is None:
        return None
    proved = quotient_bound(*symmetric, collective, roots)
    symmetry = symmetric[1].renumbered(symmetric[0].nodes, topology.nodes)
    parts = roots or tuple((device, Fraction(1)) for device in members)
    return replace(proved, topology=topology, devices=members, roots=parts, symmetry=symmetry)


@lru_cache(maxsize=128)
def symmetric_forest(
    request: Request, collective: str, roots: Roots, helpers: tuple[str, ...] = ()
) -> SymmetricForest | None:
    """Return the forest of a request, found on orbits, or ``None`` if ``symmetric_topology`` returns ``None``.

    An all-reduce whose sources are not its destinations also gives ``None``. ``collective`` and ``roots`` define which
    trees the request needs: see ``forest.py``. All trees also contain all ``helpers``, which are switches that reduce.
    """
    topology = request.topology
    assert topology is not None
    if collective == "all_reduce" and set(request.sources) != set(request.destinations):
        return None
    participants = {*request.members}
    members = tuple(device for device in topology.devices if device in participants)
    symmetric = symmetric_topology(topology, members, roots, helpers)
    if symmetric is None:
        return None
    topology, symmetry = symmetric
    quotient = Quotient(topology, symmetry)
    limit = quotient_bound(topology, symmetry, collective, roots).algbw
    assert limit is not None
    weights = None
    if collective != "all_reduce":
        parts = dict(roots or ((device, Fraction(1)) for device in members))
        total = sum(parts.values(), Fraction(0))
        nodes, sizes = topology.nodes, symmetry.sizes
        weights = {root: parts.get(nodes[root], Fraction(0)) * sizes[root] / total for root in quotient.roots}
    tree_nodes = len(members) + len(helpers)
    rate, trees = best_trees(quotient, collective, weights, limit, tree_nodes)
    shares = [_tree_share(tree) for tree in trees]
    deepest = max((depth(tree) for share in shares for tree in (share.into, share.out) if tree), default=0)
    root_count = sum(symmetry.sizes[root] for root in {tree.root for tree in trees})  # roots of all images of the trees
    k = 1 / common_unit([tree.share / symmetry.sizes[tree.root] for tree in trees]) / root_count
    base = trees_to_schedule("forest", request, topology.nodes, tree_nodes, shares)
    if all(_is_fixed(tree, symmetry) for tree in trees):
        return SymmetricForest(base, k, len(trees), deepest, rate, limit)
    schedule = GeneratedSchedule(base, symmetry, topology.nodes, in_order=True)
    return SymmetricForest(schedule, k, len(trees) * symmetry.order, deepest, rate, limit)


def symmetric_direct(request: Request) -> GeneratedSchedule | None:
    """Return the schedule of algorithm "direct", generated by the symmetry of the topology.

    Its chunks are in another order than those of ``direct``. ``None`` is returned without such a symmetry,
    or if not all devices are sources and destinations, or if the request has several packs.
    """
    topology = request.topology
    assert topology is not None
    everyone = {*topology.devices}
    symmetric = symmetric_topology(topology, topology.devices, None)
    if symmetric is None or request.packs != 1 or {*request.sources} != everyone or {*request.destinations} != everyone:
        return None
    symmetry, n = symmetric[1], len(everyone)
    owners = sorted({orbit for orbit in symmetry.orbits if orbit < n})  # one device of each orbit
    owner_names = tuple(topology.devices[owner] for owner in owners)
    base = direct_schedule(request._replace(devices=topology.devices), owner_names)
    shares = [Fraction(symmetry.sizes[owner], n) for owner in owners]
    chunks = tuple(chunk._replace(share=share) for chunk, share in zip(base.chunks, shares, strict=True))
    return GeneratedSchedule(replace(base, chunks=chunks), symmetry, topology.nodes, in_order=True)


def _is_fixed(tree: OrbitTree, symmetry: Symmetry) -> bool:
    """Return whether all generators of a symmetry map a tree to itself."""
    for moves, _ in symmetry.generators:
        for parents in (tree.into, tree.out):
            images = {(moves[node], moves[up], tuple(moves[k] for k in through)) for node, up, through in parents or ()}
            if moves[tree.root] != tree.root or images != {*(parents or ())}:
                return False
    return True


def _tree_share(tree: OrbitTree) -> TreeShare:
    into, out = (None if parents is None else Tree(tree.root, 1, parents) for parents in (tree.into, tree.out))
    return TreeShare(tree.root, tree.share, into, out)
