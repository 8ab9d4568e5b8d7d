"""Forests and bounds of machines with symmetries: what ``forest.py`` and ``bound.py`` use for many devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....schedule import GeneratedSchedule, Schedule
from ....topology import Switch, Topology
from ....topology.automorphisms import symmetry_of
from ....topology.symmetry import Symmetry
from ...algorithms import direct_schedule
from ...requests import Request
from ..bounds.certificate import Bound
from ..bounds.demand import too_uneven
from ..bounds.solver import common_unit
from ..bounds.steiner import Parent
from ..trees.tree_schedule import Tree, TreeShare, depth, trees_to_schedule
from .orbit_bound import Quotient, quotient_bound
from .orbit_trees import OrbitTree, best_trees

# Up to so many devices the programs without symmetry are fast. Their cuts are of single devices, so they say more.
FEW_DEVICES: Final = 32
# With more orbits, the programs on orbits are hardly smaller than those on devices.
_MOST_ORBITS: Final = 128

Roots = tuple[tuple[str, Fraction], ...] | None


class SymmetricForest(NamedTuple):
    """A schedule of trees, generated unless all trees are their own images; see ``forest.Forest``."""

    schedule: Schedule
    k: Fraction
    trees: int
    depth: int
    rate: Fraction  # in GB/s
    limit: Fraction  # the bound of trees that branch only at devices that take part


@lru_cache(maxsize=256)
def symmetric_topology(
    topology: Topology, members: tuple[str, ...], roots: Roots, helpers: tuple[str, ...] = ()
) -> tuple[Topology, Symmetry] | None:
    """Return a topology whose devices are the members, and its symmetry; ``None``: it has too little for its size.

    ``None`` also if bandwidths or weights are so different that a program in floating point proves a poor bound.
    Its first switches are the helpers, which reduce; other devices are switches, which only forward. The symmetry moves
    roots only to roots, if they have the same weights, else nowhere.
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
    found = symmetry_of(topology, fixed)
    orbits = len({orbit for orbit in found.orbits if orbit < len(members)})
    return (topology, found) if orbits <= min(_MOST_ORBITS, (len(members) + 1) // 2) else None


@lru_cache(maxsize=128)
def symmetric_bound(topology: Topology, collective: str, members: tuple[str, ...], roots: Roots) -> Bound | None:
    """Return the bound of a collective on orbits; ``None``: the topology has too little symmetry.

    Devices that take no part may forward and combine.
    """
    participants = {*members}
    helpers = tuple(device for device in topology.devices if device not in participants)
    found = symmetric_topology(topology, members, roots, helpers)
    if found is None:
        return None
    made = quotient_bound(*found, collective, roots)
    symmetry = found[1].renumbered(found[0].nodes, topology.nodes)
    parts = roots or tuple((device, Fraction(1)) for device in members)
    return replace(made, topology=topology, devices=members, roots=parts, symmetry=symmetry)


@lru_cache(maxsize=128)
def symmetric_forest(
    request: Request, collective: str, roots: Roots, helpers: tuple[str, ...] = ()
) -> SymmetricForest | None:
    """Return the forest of a request; ``None``: it has too little symmetry, or too few devices.

    ``collective`` and ``roots`` say which trees the request needs: see ``forest.py``. All trees join the ``helpers``,
    switches that reduce, too.
    """
    topology = request.topology
    assert topology is not None
    if collective == "all_reduce" and set(request.sources) != set(request.destinations):
        return None
    participants = {*request.members}
    members = tuple(device for device in topology.devices if device in participants)
    found = symmetric_topology(topology, members, roots, helpers)
    if found is None:
        return None
    seen, symmetry = found
    quotient = Quotient(seen, symmetry)
    limit = quotient_bound(seen, symmetry, collective, roots).algbw
    assert limit is not None
    weights = None
    if collective != "all_reduce":
        parts = dict(roots or ((device, Fraction(1)) for device in members))
        whole = sum(parts.values(), Fraction(0))
        weights = {
            root: parts.get(seen.nodes[root], Fraction(0)) * symmetry.sizes[root] / whole for root in quotient.roots
        }
    tree_nodes = len(members) + len(helpers)
    rate, trees = best_trees(quotient, collective, weights, limit, tree_nodes)
    shares = [_share(tree) for tree in trees]
    deepest = max((depth(tree) for share in shares for tree in (share.into, share.out) if tree), default=0)
    roots_of_all = sum(symmetry.sizes[root] for root in {tree.root for tree in trees})
    k = 1 / common_unit([tree.share / symmetry.sizes[tree.root] for tree in trees]) / roots_of_all
    base = trees_to_schedule("forest", request, seen.nodes, tree_nodes, shares)
    if all(_is_fixed(tree, symmetry) for tree in trees):  # every image is the tree itself
        return SymmetricForest(base, k, len(trees), deepest, rate, limit)
    schedule = GeneratedSchedule(base, symmetry, seen.nodes, in_order=True)
    return SymmetricForest(schedule, k, len(trees) * symmetry.order, deepest, rate, limit)


def symmetric_direct(request: Request) -> GeneratedSchedule | None:
    """Return the schedule of ``direct`` as images under the symmetry of a topology; ``None``: it has too little.

    Its chunks are in another order than those of ``planners.direct``.
    """
    topology = request.topology
    assert topology is not None
    everyone = {*topology.devices}
    found = symmetric_topology(topology, topology.devices, None)
    if found is None or request.packs != 1 or {*request.sources} != everyone or {*request.destinations} != everyone:
        return None
    symmetry, n = found[1], len(everyone)
    owners = sorted({orbit for orbit in symmetry.orbits if orbit < n})
    base = direct_schedule(
        request._replace(devices=topology.devices), tuple(topology.devices[owner] for owner in owners)
    )
    chunks = tuple(
        chunk._replace(share=Fraction(symmetry.sizes[owner], n))
        for chunk, owner in zip(base.chunks, owners, strict=True)
    )
    return GeneratedSchedule(replace(base, chunks=chunks), symmetry, topology.nodes, in_order=True)


def _is_fixed(tree: OrbitTree, symmetry: Symmetry) -> bool:
    """Return whether a symmetry moves a tree to itself."""
    for moves, _ in symmetry.generators:
        for parents in (tree.into, tree.out):
            images = {(moves[node], moves[up], tuple(moves[k] for k in through)) for node, up, through in parents or ()}
            if moves[tree.root] != tree.root or images != {*(parents or ())}:
                return False
    return True


def _share(tree: OrbitTree) -> TreeShare:
    def made(parents: Sequence[Parent] | None) -> Tree | None:
        return None if parents is None else Tree(tree.root, 1, tuple(parents))

    return TreeShare(tree.root, tree.share, made(tree.into), made(tree.out))
