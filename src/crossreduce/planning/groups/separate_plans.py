"""The rates of plans that are made separately, but run at the same time and share links.

Input: a topology, and the collectives of several groups. Output: ``SeparatePlans``. In the fluid model, all trees of a
plan move a large buffer at one rate. The rates of all plans grow together, in proportion to their weights, until a link
is full. Then the rates of the plans that use this link are fixed, and the rates of the other plans grow further.

Source: Bertsekas & Gallager, Data Networks, 2nd edition, 1992, section 6.5 (max-min fair rates).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...errors import PlanError
from ...schedule import link_shares
from ...schedule.costs import Pair
from ...topology import Topology
from ..plans import Plan, plan_request
from ..requests import NO_MORE, Request
from .groups_bound import GroupNeed


@dataclass(frozen=True)
class SeparatePlans:
    """A plan for each group, made as if no other group existed, and their rates if all run at the same time."""

    plans: tuple[Plan, ...]  # for each group: trees that have the greatest rate if the group runs alone
    rates: tuple[Fraction | None, ...]  # for each group: GB/s while all groups run; None if nothing has to move


def separate_plans(
    topology: Topology, groups: tuple[GroupNeed, ...], nbytes: tuple[int, ...], *, helpers: bool
) -> SeparatePlans | None:
    """Return a plan for each group alone, by algorithm "forest", and the rates of these plans on shared links.

    If ``helpers`` is true, devices outside a group forward and combine its data. If it is false, return ``None`` if the
    devices of a group are not connected without them.
    """
    plans = []
    for group, size in zip(groups, nbytes, strict=True):
        members = tuple(device for device in topology.devices if device in group.members)
        try:
            plans.append(plan_request(request_of(group, topology if helpers else topology.part(members), size)))
        except PlanError:  # the devices of the group have no route to each other
            return None
    widths = {(link.src, link.dst): link.bandwidth for link in topology.links}
    shares = [link_shares(plan.schedule, plan.topology) for plan in plans]
    return SeparatePlans(tuple(plans), shared_rates(widths, shares, [group.weight for group in groups]))


def losses(rates: Sequence[Fraction | None], separate: Sequence[Fraction | None]) -> tuple[Fraction, ...]:
    """Return the part of the rate that each group loses with separate plans. It is below 0 if the group gains."""
    pairs = zip(rates, separate, strict=True)
    return tuple(Fraction(0) if rate is None or other is None else 1 - other / rate for rate, other in pairs)


def request_of(group: GroupNeed, topology: Topology, nbytes: int) -> Request:
    """Return the request to plan one group's collective by algorithm "forest"."""
    root = group.members if group.root is None else (group.root,)
    sources = root if group.collective == "broadcast" else group.members
    destinations = root if group.collective == "reduce" else group.members
    return Request(group.collective, sources, destinations, "forest", topology, nbytes, costs=NO_MORE)


def shared_rates(
    widths: Mapping[Pair, Fraction], shares: Sequence[Mapping[Pair, Fraction]], weights: Sequence[Fraction]
) -> tuple[Fraction | None, ...]:
    """Return the max-min fair rates of plans that share links.

    Args:
      widths: the bandwidth of each link in GB/s.
      shares: for each plan, the part of its buffer that each link carries. Links that it does not use are left out.
      weights: the weights of the plans.

    In the example, the first link limits the first two plans. The third plan gets the rest of the second link.

    >>> ab, cd = ("a", "b"), ("c", "d")
    >>> rates = shared_rates({ab: Fraction(10), cd: Fraction(20)}, [{ab: 1}, {ab: 1, cd: 1}, {cd: 1}], [1, 1, 1])
    >>> [str(rate) for rate in rates]
    ['5', '5', '15']
    """
    rates: list[Fraction | None] = [None] * len(shares)
    free = {k for k, links in enumerate(shares) if links}
    while free:
        levels: dict[Pair, Fraction] = {}  # for each link, the rate / weight of free plans at which it is full
        for pair in {pair: None for k in sorted(free) for pair in shares[k]}:
            used = sum((rate * shares[k].get(pair, 0) for k, rate in enumerate(rates) if rate), Fraction(0))
            load = sum((weights[k] * shares[k].get(pair, 0) for k in sorted(free)), Fraction(0))
            levels[pair] = (widths[pair] - used) / load
        least = min(levels.values())
        full = {pair for pair, level in levels.items() if level == least}
        for k in [k for k in free if full & shares[k].keys()]:
            rates[k] = least * weights[k]
            free.remove(k)
    return tuple(rates)
