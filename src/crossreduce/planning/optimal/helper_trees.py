"""The best trees of one collective with helpers: devices that take no part, and switches that reduce.

Input: a topology, a collective and its members. Output: a ``HelperTrees``: the trees, and the prices of links that
prove that no trees are faster.
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
from .bounds.tree_prices import branch_nodes_of
from .symmetric.orbit_forest import symmetric_bound, symmetric_forest

_MOST_BRANCH_NODES: Final = 256  # with more, the heuristic search for trees of many members takes minutes


class HelperTrees(NamedTuple):
    """The best trees of a collective with helpers."""

    neutral: NeutralTopology  # its devices are the members, followed by the helpers
    mixture: Mixture


@lru_cache(maxsize=512)
def best_helper_trees(
    topology: Topology, collective: str, members: tuple[str, ...], roots: tuple[tuple[str, Fraction], ...] | None = None
) -> HelperTrees | None:
    """Return the best trees among some devices, which may branch at any helpers, or ``None``.

    ``None`` is returned if there is no helper, if there are too many nodes, or if no trees were found. It is also
    returned if bandwidths or weights differ very much, since the program is solved in floating point. Among many
    members, only all-reduces are planned, if trees by symmetry do not reach their bound. Helpers that combine make
    other collectives hardly faster.

    ``roots`` are the roots and their weights, except for an all-reduce. ``None``: all members, with equal weights. The
    rate is that of all roots together.

    >>> half = best_helper_trees(Topology.machine("mi300x"), "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    >>> half.mixture.rate / 64, half.mixture.rate == half.mixture.most  # links have 64 GB/s
    (Fraction(6, 1), True)
    """
    members = tuple(device for device in topology.devices if device in members)  # in one order for all requests
    others = [device for device in topology.devices if device not in members]
    others += [switch.name for switch in topology.switches if switch.reduces]
    # A helper can be reached from a member, and can reach a member, perhaps another one: in a broadcast or reduce, two
    # members need not have routes in both directions.
    after = set[str]().union(*(reachable_nodes(topology, member) for member in members))
    before = set[str]().union(*(reachable_nodes(topology, member, backwards=True) for member in members))
    helpers = tuple(node for node in others if node in after & before)
    parts = {members.index(root): weight for root, weight in roots or zip(members, repeat(Fraction(1))) if weight}
    uneven = too_uneven(parts.values()) or too_uneven([link.bandwidth for link in topology.links])
    branch_nodes = len(branch_nodes_of(topology))
    exact = few_enough(len(members), branch_nodes)
    if not exact and (collective != "all_reduce" or roots is not None or branch_nodes > _MOST_BRANCH_NODES):
        return None
    if not helpers or len(members) == 1 or uneven or (not exact and _symmetry_suffices(topology, members)):
        return None
    neutral = neutral_topology(topology, members, helpers)
    number = {node: k for k, node in enumerate(neutral.topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in neutral.topology.links}
    combining, everyone = tuple(range(len(neutral.topology.devices))), tuple(range(len(members)))
    demands = demands_of(collective, everyone, None if collective == "all_reduce" else parts, combining)
    mixture = best_mixture(len(number), links, combining, demands, FEW if exact else 0)
    return None if mixture is None or not mixture.rate else HelperTrees(neutral, mixture)


def _symmetry_suffices(topology: Topology, members: tuple[str, ...]) -> bool:
    """Return whether trees of an all-reduce that are found by symmetry and contain no helpers reach the bound."""
    forest = symmetric_forest(Request("all_reduce", members, members, topology=topology), "all_reduce", None)
    limit = symmetric_bound(topology, "all_reduce", members, None) if forest else None
    return forest is not None and limit is not None and forest.rate == limit.algbw
