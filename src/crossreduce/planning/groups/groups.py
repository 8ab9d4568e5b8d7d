"""``plan_groups``: plans of several groups that run at the same time on shared links, with a proof of their rates.

Input: a topology, groups of devices (such as the tensor-parallel and the data-parallel groups of a job), weights.
Output: a ``GroupsPlan``. The least rate / weight of a group is as great as possible, then the next one, and so on. A
part of the bandwidth of each link is reserved for each group. Devices outside a group may forward and combine its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import isfinite, prod
from numbers import Rational, Real
from typing import Any

from ...errors import ArgumentError, PlanError, ReductionError, shown
from ...schedule import Costs, SharedLimit, costs_of, link_shares, pipelined, verify
from ...schedule.costs import Pair
from ...schedule.schedule import many
from ...topology import Link, Topology, TopologyLike, byte_count, topology_of
from ..forest import forest_of_trees
from ..optimal.bound import bound_of_members
from ..optimal.bounds.certificate import COLLECTIVES
from ..optimal.bounds.demand import too_uneven
from ..optimal.bounds.tree_prices import branch_nodes_of
from ..plans import Plan, plan_request
from ..topologies import require_routes
from .groups_bound import GroupNeed, GroupsBound
from .max_min import shared_links
from .separate_plans import SeparatePlans, losses, request_of, separate_plans


@dataclass(frozen=True)
class GroupsPlan:
    """Plans of several groups on shared links, their rates while all of them run, and the proof of these rates."""

    topology: Topology
    # The plan of each group. The topology of the plan has only the bandwidth that is reserved for the group. So the
    # rate, seconds and simulation of the plan are those of the group while all other groups run.
    plans: tuple[Plan, ...]
    bound: GroupsBound  # the proof that no rate can be raised without reducing one that is as low or lower

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each group, in the given order."""
        return tuple(group.members for group in self.bound.groups)

    @property
    def weights(self) -> tuple[Fraction, ...]:
        """The weight of each group."""
        return tuple(group.weight for group in self.bound.groups)

    @property
    def rates(self) -> tuple[Fraction | None, ...]:
        """The algbw in GB/s that each plan approaches as the buffer grows; ``None`` if nothing moves in the group."""
        return self.bound.rates

    @property
    def seconds(self) -> tuple[float, ...]:
        """The predicted seconds of each group, if it uses only the bandwidth that is reserved for it."""
        return tuple(plan.seconds for plan in self.plans)

    @property
    def ratio(self) -> Fraction:
        """The least quotient of a planned and a proved rate. If it is 1, no plans have better rates."""
        return self.bound.ratio

    @cached_property
    def separate(self) -> SeparatePlans:
        """A plan for each group alone with all helpers, and the rates of these plans if they run at the same time."""
        plans = separate_plans(self.topology, self.bound.groups, self._sizes, helpers=True)
        assert plans is not None, "every group is connected"
        return plans

    @cached_property
    def separate_without_helpers(self) -> SeparatePlans | None:
        """The same as ``separate``, but without helpers. ``None`` if some groups are not connected without them."""
        return separate_plans(self.topology, self.bound.groups, self._sizes, helpers=False)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(plan.nbytes for plan in self.plans)

    @property
    def losses(self) -> tuple[Fraction, ...]:
        """The part of the rate that each group loses with the ``separate`` plans. It is below 0 if the group gains."""
        return losses(self.rates, self.separate.rates)

    def check(self) -> None:
        """Check that the schedules are correct, that together they reach the rates, and that the proof is valid.

        Raises:
          ScheduleError: a schedule is wrong.
          PlanError: a plan has another collective or rate than its group, a link carries more than its bandwidth, or
            the proof is not valid.
        """
        used: dict[Pair, Fraction] = {}
        for plan, group, rate in zip(self.plans, self.bound.groups, self.rates, strict=True):
            verify(plan.schedule)
            if plan.rate != rate or request_of(group, plan.topology, plan.nbytes)[:3] != plan.request[:3]:
                raise PlanError.of("the plan of a group has another collective or rate.", f"{plan}: {plan.rate} GB/s")
            for pair, share in link_shares(plan.schedule, self.topology).items():
                used[pair] = used.get(pair, Fraction(0)) + share * (rate or 0)
        for pair, amount in used.items():
            if amount > self.topology.by_ends[pair].bandwidth:
                given = f"{pair[0]} -> {pair[1]}: {amount} GB/s of {self.topology.by_ends[pair].bandwidth}"
                raise PlanError.of("the groups together use more than the bandwidth of a link.", given)
        if self.bound.topology != self.topology:
            raise PlanError.of("the proof is for another topology.", repr(self.bound.topology))
        self.bound.check()

    def explain(self, width: int | None = None) -> str:
        """Return a text with the rates of all groups, the levels that limit them, and the losses with separate plans.

        Of three or more groups with the same numbers, the first one is shown. ``width``: of the longest line.
        """
        from .group_text import explain_groups

        return explain_groups(self.bound, self.plans, self.separate, self.separate_without_helpers, width)

    def __str__(self) -> str:
        rates = ", ".join("-" if rate is None else f"{float(rate):.2f}" for rate in self.rates)
        return f"{many(len(self.plans), 'group')} on {len(self.topology.devices)} devices: {rates} GB/s"


def mesh_groups(devices: Sequence[str], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of all dimensions of a mesh of devices, as in PyTorch's ``DeviceMesh`` and JAX's ``Mesh``.

    Devices are numbered row by row. A group is a line along a dimension. Groups of the first dimension come first.

    >>> for group in mesh_groups(["cpu:0", "cpu:1", "cpu:2", "cpu:3", "cpu:4", "cpu:5"], (2, 3)):
    ...     print(*group)
    cpu:0 cpu:3
    cpu:1 cpu:4
    cpu:2 cpu:5
    cpu:0 cpu:1 cpu:2
    cpu:3 cpu:4 cpu:5
    """
    sizes = tuple(shape)
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ArgumentError.of("a mesh needs sizes that are integers above 0.", shown(shape), "(2, 4)")
    if prod(sizes) != len(devices):
        given = f"{' x '.join(map(str, sizes))} = {prod(sizes)}, {len(devices)} devices"
        remedy = f"sizes with the product {len(devices)}"
        raise ArgumentError.of("the product of a mesh's sizes must be its number of devices.", given, remedy)
    groups = []
    for axis, size in enumerate(sizes):
        stride = prod(sizes[axis + 1 :])
        starts = [k for k in range(len(devices)) if k // stride % size == 0]  # with coordinate 0 along the axis
        groups += [tuple(devices[start + stride * k] for k in range(size)) for start in starts]
    return tuple(groups)


def plan_groups(
    topology: TopologyLike,
    groups: Iterable[Iterable[str | int]],
    weights: Iterable[float | Fraction] | None = None,
    *,
    collective: str | Iterable[str] = "all_reduce",
    nbytes: int | str | Iterable[int | str] = 1 << 26,
    roots: Iterable[str | int | None] | None = None,
    operation_s: float | None = None,
    costs: Costs | None = None,
) -> GroupsPlan:
    """Plan collectives of several groups that run at the same time on the links of one topology.

    The least rate / weight of a group is as great as possible. Among such plans, the second least is as great as
    possible, and so on. Groups may overlap, as tensor-parallel and data-parallel groups do. Devices outside a group
    forward and combine its data if that makes the plans faster.

    Args:
      topology: a ``Topology``, the name of a machine or the path of a file.
      groups: the devices of each group, by name or number. In a group of one device, nothing moves.
      weights: one per group, above 0. On the same links, a group of weight 2 has twice the rate of a group of weight 1.
        ``None``: all weights are 1.
      collective: one name for all groups, or one name per group.
      nbytes: the size of a group's whole buffer: one for all groups, or one per group. Trees do not depend on it.
      roots: one per group: the root of a broadcast or reduce, or ``None`` for the device with the greatest bound.
      operation_s: short for ``costs=Costs(operation_s=...)``; see ``plan``.
      costs: what else takes time. Groups divide limits that links share. Each group counts other costs on its own.
    Returns:
      A plan whose schedules are verified. A repeated request returns a cached plan.
    Raises:
      ArgumentError: no groups, an argument without one entry per group, or an invalid group, weight, collective, size
        or root.
      PlanError: a device of a group cannot be reached, or bandwidths differ by a factor of more than a million.
      OSError: the file of the topology cannot be read.

    >>> both = plan_groups("dgx-1v", [range(4), range(4, 8)], nbytes="64M")
    >>> [str(rate) for rate in both.rates], both.ratio
    (['75', '75'], Fraction(1, 1))
    >>> print(plan_groups("dgx-1v", [range(4), range(4, 8)], weights=[1, 3]))
    2 groups on 8 devices: 41.67, 108.33 GB/s
    """
    topology = topology_of(topology)
    members = _read_groups(topology, groups)
    count = len(members)
    names = _one_per_group("collective", collective, count, str)
    for name in names:
        if not isinstance(name, str) or name not in COLLECTIVES:
            raise ArgumentError.of("there is no such collective.", shown(name), "one of " + ", ".join(COLLECTIVES))
    sizes = tuple(byte_count(size) for size in _one_per_group("nbytes", nbytes, count, (int, str)))
    exact = [Fraction(1)] * count if weights is None else [_weight(w) for w in _entries("weights", weights, count)]
    if too_uneven(exact):
        raise ArgumentError.of("weights must differ by a factor of at most a million.", shown(weights), "weights=None")
    root_list = [None] * count if roots is None else _entries("roots", roots, count)
    costs = costs_of(costs, operation_s)
    costs.require_links(topology)
    if too_uneven([link.bandwidth for link in topology.links]):
        problem = "groups cannot be planned if bandwidths differ by a factor of more than a million."
        raise PlanError.of(problem, repr(topology), "a topology without the slowest links")
    needs = []
    for k, (group, name, root, weight) in enumerate(zip(members, names, root_list, exact, strict=True)):
        try:
            needs.append(GroupNeed(name, group, _root(topology, name, group, root), weight))
            request = request_of(needs[-1], topology, 0)
            require_routes(topology, request.sources, request.destinations, name)
        except ReductionError as error:
            error.prefix(f"group {k}")
            raise
    return _plan_checked_groups(topology, tuple(needs), sizes, costs)


def _read_groups(topology: Topology, groups: Any) -> list[tuple[str, ...]]:
    """Return the canonical names of the devices of each group."""
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise ArgumentError.of("groups must be a list of lists of devices.", shown(groups), "[[0, 1], [2, 3]]")
    members = []
    for k, group in enumerate(groups):
        try:
            members.append(topology.members(group))
        except ReductionError as error:
            error.prefix(f"group {k}")
            raise
    if not members:
        raise ArgumentError.of("at least one group must be given.", shown(groups), "[[0, 1], [2, 3]]")
    return members


def _one_per_group(what: str, given: Any, count: int, single: Any) -> list[Any]:
    """Return one value per group, given a list, or one value (of the type ``single``) for all groups."""
    return [given] * count if isinstance(given, single) else _entries(what, given, count)


def _entries(what: str, given: Any, count: int) -> list[Any]:
    """Return an argument as a list. Raise ArgumentError unless it has ``count`` entries, one per group."""
    entries = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else None
    if entries is None or len(entries) != count:
        given_here = f"{shown(given)} for {many(count, 'group')}"
        raise ArgumentError.of(f"{what} must have one entry per group.", given_here)
    return entries


def _weight(given: object) -> Fraction:
    weight = Fraction(0)  # invalid, unless it is replaced
    if isinstance(given, Rational) and not isinstance(given, bool):
        weight = Fraction(int(given.numerator), int(given.denominator))
    elif isinstance(given, Real) and not isinstance(given, bool) and isfinite(given):
        weight = Fraction(repr(float(given)))  # 0.1 becomes 1/10, not its binary approximation
    if weight > 0:
        return weight
    raise ArgumentError.of("a weight must be a finite number above 0.", shown(given), "weights=[1, 2]")


def _root(topology: Topology, collective: str, members: tuple[str, ...], root: str | int | None) -> str | None:
    """Return the name of a group's root (by default the device with the greatest bound), or ``None`` if it has none."""
    if collective not in ("broadcast", "reduce"):
        if root is not None:
            raise ArgumentError.of(f"{collective} has no root.", f"root {shown(root)}", "None in roots")
        return None
    if root is None:
        return members[0] if len(members) == 1 else bound_of_members(topology, collective, members).roots[0][0]
    name = topology.node(root)
    if name not in members:
        raise ArgumentError.of("the root must be in its group.", shown(root), "one of " + ", ".join(members))
    return name


@lru_cache(maxsize=64)
def _plan_checked_groups(
    topology: Topology, groups: tuple[GroupNeed, ...], sizes: tuple[int, ...], costs: Costs
) -> GroupsPlan:
    shared = shared_links(topology, groups)
    used: list[dict[Pair, Fraction]] = []  # for each group, the GB/s that it uses of each link
    schedules = []
    for group, trees, rate in zip(groups, shared.trees, shared.bound.rates, strict=True):
        request = request_of(group, topology, 0)
        if rate is None:  # a group of one device
            part = Topology.unchecked(group.members, ())
            schedules.append(plan_request(request._replace(topology=part)).schedule)
            used.append({})
            continue
        branch_nodes = [topology.nodes.index(node) for node in branch_nodes_of(topology)]
        schedule = forest_of_trees(request, topology.nodes, branch_nodes, trees).schedule
        verify(schedule)
        schedules.append(schedule)
        used.append({pair: share * rate for pair, share in link_shares(schedule, topology).items()})
    plans = []
    for k, (group, schedule, size) in enumerate(zip(groups, schedules, sizes, strict=True)):
        part = _used_part(topology, group.members, used[k])
        group_costs = replace(costs, shared=_divide_limits(costs.shared, used, k))
        in_pieces, seconds = pipelined(schedule, part, size, costs=group_costs)
        plans.append(Plan(request_of(group, part, size)._replace(costs=group_costs), in_pieces, seconds))
    return GroupsPlan(topology, tuple(plans), shared.bound)


def _used_part(topology: Topology, members: tuple[str, ...], used: dict[Pair, Fraction]) -> Topology:
    """Return the topology that has only the links and the bandwidths that a group uses."""
    nodes = {*members, *(node for pair in used for node in pair)}
    links = [Link(*link[:2], used[link[:2]], link.latency_s) for link in topology.links if link[:2] in used]
    devices = tuple(device for device in topology.devices if device in nodes)
    return Topology.unchecked(devices, links, tuple(switch for switch in topology.switches if switch.name in nodes))


def _divide_limits(
    limits: tuple[SharedLimit, ...], used: list[dict[Pair, Fraction]], k: int
) -> tuple[SharedLimit, ...]:
    """Return the part of each shared limit for group ``k``, in proportion to the group's load on the limit's links."""
    divided = []
    for limit in limits:
        amounts = [sum((links.get(pair, Fraction(0)) for pair in limit.links), Fraction(0)) for links in used]
        if amounts[k]:
            speed = limit.gb_per_s * float(amounts[k] / sum(amounts))
            divided.append(SharedLimit(speed, tuple(pair for pair in limit.links if pair in used[k])))
    return tuple(divided)
