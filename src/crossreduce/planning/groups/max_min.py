"""The greatest rates of several groups on shared links: first the least rate / weight, then the next, and so on.

Input: a topology and the needs of groups. Output: the trees of each group, which together fit the links, and a
``GroupsBound``. Level by level, one program (``column_generation.py``) has the trees of all groups: those of fixed
groups, at their rates, and those of the others at the greatest common rate. Groups whose trees have a price above 0 are
fixed at it. Only rates are fixed: trees of all groups may change at each level.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from ...topology import Topology
from ..optimal.bounds.column_generation import ProvedRate, TreeProgram
from ..optimal.bounds.demand import Demand, MixedTree, demands_of
from ..optimal.bounds.tree_prices import joints_of
from .groups_bound import GroupNeed, GroupsBound, RateLevel

_NEAR: Final = Fraction(1, 10**8)  # the relative error of rates in floating point
_FINE: Final = 1 << 30  # rates that are not proved are multiples of 1 / _FINE or simpler
_LEAST_PAID: Final = Fraction(1, 10**6)  # groups that pay less, perhaps by rounding, are fixed at a later level
_ZERO: Final = Fraction(0)


class SharedLinks(NamedTuple):
    """The trees of each group, which together fit the links, and the proof of their rates."""

    trees: tuple[tuple[MixedTree, ...], ...]  # of each group; nodes are numbered as in ``Topology.nodes``
    bound: GroupsBound


def shared_links(topology: Topology, groups: tuple[GroupNeed, ...]) -> SharedLinks:
    """Return the best trees of groups, each of which is connected.

    >>> ring = Topology.ring(4, gb_per_s=25)
    >>> pairs = [GroupNeed("all_reduce", pair, None, Fraction(1)) for pair in (ring.devices[:2], ring.devices[2:])]
    >>> found = shared_links(ring, tuple(pairs))
    >>> [str(rate) for rate in found.bound.rates], found.bound.ratio
    (['25', '25'], Fraction(1, 1))
    """
    number = {node: k for k, node in enumerate(topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in topology.links}
    joints = tuple(number[joint] for joint in joints_of(topology))
    demands: list[Demand] = []
    of_group: list[range] = []  # the numbers of each group's demands
    for group in groups:
        start = len(demands)
        if len(group.members) > 1:
            roots = None if group.collective == "all_reduce" else {number[root]: part for root, part in group.roots}
            parts = demands_of(group.collective, tuple(number[device] for device in group.members), roots, joints)
            demands += [part._replace(weight=part.weight * group.weight) for part in parts]
        of_group.append(range(start, len(demands)))
    if not demands:
        return SharedLinks(((),) * len(groups), GroupsBound(topology, groups, ()))
    program = TreeProgram(len(number), links, joints, demands)
    fixed: dict[int, Fraction] = {}  # by the number of the demand
    found: list[tuple[ProvedRate, Fraction, tuple[int, ...]]] = []  # of each level: the proof, the rate, the groups
    while len(fixed) < len(demands):
        near = program.solve(fixed)
        assert near is not None, "every group is connected"
        proof = program.proof()
        # The trees of the last level decide whether the proved rates are reached exactly.
        rate = proof.most if near >= proof.most * (1 - _NEAR) else Fraction(near).limit_denominator(_FINE)
        rate = max(rate, found[-1][1] if found else rate)
        free = [k for k, own in enumerate(of_group) if own and own[0] not in fixed]
        paid = {k: sum((demands[d].weight * proof.costs[d] for d in of_group[k]), _ZERO) for k in free}  # 1 in all
        at_limit = tuple(k for k in free if paid[k] >= _LEAST_PAID)
        found.append((proof, rate, at_limit))
        fixed |= {d: rate * demands[d].weight for k in at_limit for d in of_group[k]}
    rates = [fixed[d] for d in range(len(demands))]
    factor, trees = program.mixture(rates)
    if factor != 1:
        factor, trees = max((factor, trees), program.exact_mixture(rates), key=lambda one: one[0])
    if factor != 1:  # weights of trees could not be made exact
        factor = Fraction(int(factor * _FINE), _FINE)
    levels = _levels(topology, demands, of_group, found, factor)
    listed = tuple(tuple(tree for d in own for tree in trees[d]) for own in of_group)
    return SharedLinks(listed, GroupsBound(topology, groups, levels))


def _levels(
    topology: Topology,
    demands: list[Demand],
    of_group: list[range],
    found: list[tuple[ProvedRate, Fraction, tuple[int, ...]]],
    factor: Fraction,
) -> tuple[RateLevel, ...]:
    """Return the levels of a certificate, with the rates times a factor: the part that the trees reach."""
    levels = []
    fixed: dict[int, Fraction] = {}  # the rates of demands
    for proof, rate, groups in found:
        value = sum((link.bandwidth * price for link, price in zip(topology.links, proof.prices, strict=True)), _ZERO)
        value -= sum((amount * proof.costs[d] for d, amount in fixed.items()), _ZERO)
        free = sum((one.weight * proof.costs[d] for d, one in enumerate(demands) if d not in fixed), _ZERO)
        prices = tuple((*link[:2], price) for link, price in zip(topology.links, proof.prices, strict=True) if price)
        levels.append(RateLevel(rate * factor, value / free, groups, prices))
        fixed |= {d: rate * factor * demands[d].weight for k in groups for d in of_group[k]}
    return tuple(levels)
