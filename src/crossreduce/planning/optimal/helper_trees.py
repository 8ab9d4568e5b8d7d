"""The best trees of one collective with helpers: devices that take no part, and switches that reduce.

Input: a topology, a collective and its members. Output: a ``HelperTrees``: the trees, and the prices that prove them.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from typing import Final, NamedTuple

from ...topology import Topology
from ..requests import Request
from ..topologies import NeutralTopology, neutral_topology, reachable_nodes
from .bounds.column_generation import Mixture, best_mixture
from .bounds.demand import demands_of, too_uneven
from .bounds.steiner import FEW, few_enough
from .bounds.tree_prices import joints_of
from .symmetric.orbit_forest import symmetric_bound, symmetric_forest

_MOST_JOINTS: Final = 256  # for more devices, trees of many members are not searched: it takes minutes


class HelperTrees(NamedTuple):
    """The best trees of a collective with helpers: other devices, and switches that reduce."""

    seen: NeutralTopology  # the members, then the helpers, are its devices
    mixture: Mixture


@lru_cache(maxsize=512)
def best_helper_trees(
    topology: Topology, collective: str, members: tuple[str, ...], roots: tuple[tuple[str, Fraction], ...] | None = None
) -> HelperTrees | None:
    """Return the best trees among some devices with all helpers; ``None``: no helper, too many devices, or no trees.

    Bandwidths or weights of very different sizes also give ``None``, since the program is solved in floating point.
    Among many members only all-reduces are planned so, unless trees that are found by symmetry are as good: trees of
    other collectives gain little by helpers that combine.
    ``roots``: for all collectives but all-reduce, the roots and their weights; ``None``: all members, with equal
    weights. The rate is that of all roots together.

    >>> half = best_helper_trees(Topology.machine("mi300x"), "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    >>> half.mixture.rate / 64, half.mixture.rate == half.mixture.most  # links have 64 GB/s
    (Fraction(6, 1), True)
    """
    members = tuple(device for device in topology.devices if device in members)  # so that proofs need no order
    others = [device for device in topology.devices if device not in members]
    others += [switch.name for switch in topology.switches if switch.reduces]
    # Trees only pass nodes between members. In a one-way collective, members need no routes in both directions.
    after = set[str]().union(*(reachable_nodes(topology, member) for member in members))
    before = set[str]().union(*(reachable_nodes(topology, member, backwards=True) for member in members))
    helpers = tuple(node for node in others if node in after & before)
    parts = {members.index(root): weight for root, weight in roots or zip(members, repeat(Fraction(1))) if weight}
    uneven = too_uneven(parts.values()) or too_uneven([link.bandwidth for link in topology.links])
    joints = len(joints_of(topology))
    exact = few_enough(len(members), joints)
    if not exact and (collective != "all_reduce" or roots is not None or joints > _MOST_JOINTS):
        return None
    if not helpers or len(members) == 1 or uneven or (not exact and _symmetry_suffices(topology, members)):
        return None
    seen = neutral_topology(topology, members, helpers)
    number = {node: k for k, node in enumerate(seen.topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in seen.topology.links}
    able, everyone = tuple(range(len(seen.topology.devices))), tuple(range(len(members)))
    demands = demands_of(collective, everyone, None if collective == "all_reduce" else parts, able)
    found = best_mixture(len(number), links, able, demands, FEW if exact else 0)
    return None if found is None or not found.rate else HelperTrees(seen, found)


def _symmetry_suffices(topology: Topology, members: tuple[str, ...]) -> bool:
    """Return whether trees of an all-reduce that are found by symmetry, without helpers, reach the bound."""
    found = symmetric_forest(Request("all_reduce", members, members, topology=topology), "all_reduce", None)
    limit = symmetric_bound(topology, "all_reduce", members, None) if found else None
    return found is not None and limit is not None and found.rate == limit.algbw
