"""The best trees of one collective with helpers: devices that take no part, and switches that reduce.

Input: a topology, a collective and its members. Output: a ``Helped``: the trees, and the prices that prove them.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from ...topology import Topology
from ..topologies import NeutralTopology, neutral, reachable
from .demands import demands_of, too_uneven
from .mixture import Mixture, best_mixture
from .steiner import few_enough


class Helped(NamedTuple):
    """The best trees of a collective with helpers: other devices, and switches that reduce."""

    seen: NeutralTopology  # the members, then the helpers, are its devices
    mixture: Mixture


@lru_cache(maxsize=512)
def helped(
    topology: Topology, collective: str, members: tuple[str, ...], roots: tuple[tuple[str, Fraction], ...] | None = None
) -> Helped | None:
    """Return the best trees among some devices with all helpers; ``None``: no helper, too many members, or no trees.

    Bandwidths or weights of very different sizes also give ``None``, since the program is solved in floating point.
    ``roots``: for all collectives but all-reduce, the roots and their weights; ``None``: all members, with equal
    weights. The rate is that of all roots together.

    >>> half = helped(Topology.machine("mi300x"), "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    >>> half.mixture.rate / 64, half.mixture.rate == half.mixture.most  # links have 64 GB/s
    (Fraction(6, 1), True)
    """
    others = [device for device in topology.devices if device not in members]
    others += [switch.name for switch in topology.switches if switch.reduces]
    # Trees only pass nodes between members. In a one-way collective, members need no routes in both directions.
    after = set[str]().union(*(reachable(topology, member) for member in members))
    before = set[str]().union(*(reachable(topology, member, backwards=True) for member in members))
    helpers = tuple(node for node in others if node in after & before)
    parts = {members.index(root): weight for root, weight in roots or zip(members, repeat(Fraction(1))) if weight}
    uneven = too_uneven(parts.values()) or too_uneven([link.bandwidth for link in topology.links])
    if not helpers or len(members) == 1 or uneven or not few_enough(len(members), len(members) + len(helpers)):
        return None
    seen = neutral(topology, members, helpers)
    number = {node: k for k, node in enumerate(seen.topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in seen.topology.links}
    joints, everyone = tuple(range(len(seen.topology.devices))), tuple(range(len(members)))
    demands = demands_of(collective, everyone, None if collective == "all_reduce" else parts, joints)
    found = best_mixture(len(number), links, joints, demands)
    return None if found is None or not found.rate else Helped(seen, found)
