"""The max-min fair rates of several groups on shared links, and trees that reach them.

The least rate / weight of a group is as great as possible, then the next one, and so on. Input: a topology, and the
needs of groups. Output: the trees of each group, which together fit the links, and a ``GroupsBound``. At each level, a
linear program (``column_generation.py``) finds the greatest common rate / weight of all groups that are not fixed. Then
groups whose trees have a price above 0 are fixed: they keep this rate, but their trees may change at later levels.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from ...topology import Topology
from ..optimal.bounds.column_generation import ProvedRate, TreeProgram
from ..optimal.bounds.demand import Demand, MixedTree, demands_of
from ..optimal.bounds.tree_prices import branch_nodes_of
from .groups_bound import GroupNeed, GroupsBound, RateLevel

_NEAR: Final = Fraction(1, 10**8)  # the relative error of rates in floating point
_PARTS: Final = 1 << 30  # rates that are not proved are rounded to denominators of at most _PARTS
_LEAST_PAID: Final = Fraction(1, 10**6)  # groups whose trees have a lower price, perhaps by rounding, are fixed later
_ZERO: Final = Fraction(0)
_LevelProof = tuple[ProvedRate, Fraction, tuple[int, ...]]  # (proof, planned rate / weight, groups fixed at the level)


class SharedLinks(NamedTuple):
    """The trees of each group, which together fit the links, and the proof of their rates."""

    trees: tuple[tuple[MixedTree, ...], ...]  # for each group; nodes are numbered as in ``Topology.nodes``
    bound: GroupsBound


def shared_links(topology: Topology, groups: tuple[GroupNeed, ...]) -> SharedLinks:
    """Return the trees of groups that have max-min fair rates, and the proof. Each group must be connected.

    >>> ring = Topology.ring(4, gb_per_s=25)
    >>> pairs = [GroupNeed("all_reduce", pair, None, Fraction(1)) for pair in (ring.devices[:2], ring.devices[2:])]
    >>> bound = shared_links(ring, tuple(pairs)).bound
    >>> [str(rate) for rate in bound.rates], bound.ratio
    (['25', '25'], Fraction(1, 1))
    """
    number = {node: k for k, node in enumerate(topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in topology.links}
    branch_nodes = tuple(number[node] for node in branch_nodes_of(topology))
    demands: list[Demand] = []
    group_demands: list[range] = []  # the numbers of each group's demands
    for group in groups:
        start = len(demands)
        if len(group.members) > 1:
            roots = None if group.collective == "all_reduce" else {number[root]: part for root, part in group.roots}
            members = tuple(number[device] for device in group.members)
            parts = demands_of(group.collective, members, roots, branch_nodes)
            demands += [part._replace(weight=part.weight * group.weight) for part in parts]
        group_demands.append(range(start, len(demands)))
    if not demands:
        return SharedLinks(((),) * len(groups), GroupsBound(topology, groups, ()))
    program = TreeProgram(len(number), links, branch_nodes, demands)
    fixed: dict[int, Fraction] = {}  # by the number of the demand: its fixed rate in GB/s
    proofs: list[_LevelProof] = []
    while len(fixed) < len(demands):
        float_rate = program.solve(fixed)
        assert float_rate is not None, "every group is connected"
        proof = program.proof()
        # The proved rate is assumed here. The trees of the last level show below whether it is reached exactly.
        is_proved = float_rate >= proof.most * (1 - _NEAR)
        rate = proof.most if is_proved else Fraction(float_rate).limit_denominator(_PARTS)
        rate = max(rate, proofs[-1][1] if proofs else rate)
        free = [k for k, numbers in enumerate(group_demands) if numbers and numbers[0] not in fixed]
        # The price of each free group's trees. The sum of these prices is 1.
        paid = {k: sum((demands[d].weight * proof.costs[d] for d in group_demands[k]), _ZERO) for k in free}
        at_limit = tuple(k for k in free if paid[k] >= _LEAST_PAID)
        proofs.append((proof, rate, at_limit))
        fixed |= {d: rate * demands[d].weight for k in at_limit for d in group_demands[k]}
    rates = [fixed[d] for d in range(len(demands))]
    factor, trees = program.mixture(rates)
    if factor != 1:
        factor, trees = max((factor, trees), program.exact_mixture(rates), key=lambda mixture: mixture[0])
    if factor != 1:  # the exact weights of the trees were not found, so all rates are reduced by a simple factor
        factor = Fraction(int(factor * _PARTS), _PARTS)
    levels = _levels(topology, demands, group_demands, proofs, factor)
    group_trees = tuple(tuple(tree for d in numbers for tree in trees[d]) for numbers in group_demands)
    return SharedLinks(group_trees, GroupsBound(topology, groups, levels))


def _levels(
    topology: Topology, demands: list[Demand], group_demands: list[range], proofs: list[_LevelProof], factor: Fraction
) -> tuple[RateLevel, ...]:
    """Return the levels of a certificate for rates that are ``factor`` times those in ``proofs``."""
    levels = []
    fixed: dict[int, Fraction] = {}  # by the number of the demand: its rate in GB/s
    for proof, rate, groups in proofs:
        value = sum((link.bandwidth * price for link, price in zip(topology.links, proof.prices, strict=True)), _ZERO)
        value -= sum((amount * proof.costs[d] for d, amount in fixed.items()), _ZERO)
        free = sum((demand.weight * proof.costs[d] for d, demand in enumerate(demands) if d not in fixed), _ZERO)
        prices = tuple((*link[:2], price) for link, price in zip(topology.links, proof.prices, strict=True) if price)
        levels.append(RateLevel(rate * factor, value / free, groups, prices))
        fixed |= {d: rate * factor * demands[d].weight for k in groups for d in group_demands[k]}
    return tuple(levels)
