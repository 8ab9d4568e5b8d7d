"""What a plan loses if one cable or one network card fails.

Input: a ``Plan`` and its ``Map``. Output: a ``Loss`` for each kind of part, the slowest first, with the plan that is
made without the part. Parts that a symmetry of the topology exchanges are alike, so one of them is planned. If some
devices cannot be reached without the part, the plan is for half of its bandwidth, as if half of its cables had failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from ...errors import PlanError
from ...planning import Plan
from ...planning.schedules import CHOICES
from ...schedule import simulate
from ...topology import Topology
from ...topology.automorphisms import symmetry_of
from .link_groups import CableOrCard, parts_of
from .positions import Map

# With at most this number of devices, at most this number of kinds is planned: the busiest ones. The second number
# is for topologies with little symmetry. A plan takes 0.3 s of CPU time on 8 devices, 1 s on 16, 5 s on 32
# without symmetry, 1.5 s on a torus of 64, and 0.4 s on the 72 of a rack. With more devices none is planned, since a
# topology that has lost its symmetry can take minutes.
_MOST: Final = ((8, 40, 40), (16, 20, 20), (32, 8, 4), (128, 4, 2))


class Loss(NamedTuple):
    """The loss of one part, and of the parts that are alike."""

    parts: tuple[CableOrCard, ...]  # those that are alike; the first one is planned
    is_half: bool  # whether the part has half of its bandwidth, since the plan needs it
    plan: Plan


def faster_plan(plan: Plan, lost: tuple[Loss, ...]) -> Plan:
    """Return the fastest of a plan and the plans without a part, which the complete topology can run, too."""
    best = plan
    for loss in lost:
        if not loss.is_half and loss.plan.request.algorithm == plan.request.algorithm:
            seconds = simulate(loss.plan.schedule, plan.topology, plan.nbytes, costs=plan.request.costs).seconds
            if seconds < best.seconds:
                change = f"the plan that was made without {loss.parts[0].name} is faster, so it is taken"
                best = Plan(plan.request, loss.plan.schedule, seconds, change)
    return best


def losses(plan: Plan, where: Map, advance: Callable[[str], None]) -> tuple[Loss, ...]:
    """Return the losses of the busiest kinds of parts, the slowest first. ``advance`` is called once for each kind.

    >>> from crossreduce import Topology, plan
    >>> from .positions import places
    >>> best = plan(Topology.ring(4, gb_per_s=25), "all_reduce", "1M")
    >>> (loss,) = losses(best, places(best.topology), str)
    >>> loss.parts[0].name, len(loss.parts), loss.plan.algorithm
    ('cpu:0 - cpu:1', 4, 'forest')
    """
    found = []
    for parts in kinds(plan, where)[0]:
        advance(f"without {parts[0].name}")
        found.append(_loss(plan, parts))
    return tuple(sorted(found, key=lambda loss: -loss.plan.seconds))


def kinds(plan: Plan, where: Map) -> tuple[list[tuple[CableOrCard, ...]], int]:
    """Return the kinds of parts that are planned, each with all parts that are alike, and the number of other kinds."""
    topology, request = plan.topology, plan.request
    most, few = next((numbers for devices, *numbers in _MOST if len(topology.devices) <= devices), (0, 0))
    if not most:
        return [], 0
    members = {*request.sources, *request.destinations}
    own = {"broadcast": request.sources, "reduce": request.destinations}.get(plan.collective, ())  # the root
    fixed = (*own, *(device for device in topology.devices if device not in members))
    symmetry = symmetry_of(topology, fixed if request.root in (None, *fixed) else (*fixed, request.root))
    orbit_of = symmetry.links(topology)
    assert orbit_of is not None
    number = {node: k for k, node in enumerate(topology.nodes)}
    by_kind: dict[tuple[int, ...], list[CableOrCard]] = {}
    every = parts_of(topology, where)
    for part in every:
        orbits = (-1 - symmetry.orbits[number[part.nodes[0]]],) if len(part.nodes) == 1 else ()
        by_kind.setdefault(orbits or tuple(sorted({orbit_of[0][link] for link in part.links})), []).append(part)
    pairs = [link[:2] for link in topology.links]
    busy = plan.simulation.busy

    def use(parts: tuple[CableOrCard, ...]) -> float:
        return max(busy.get(pairs[link], 0.0) for part in parts for link in part.links)

    listed = [tuple(parts) for parts in by_kind.values()]
    most = few if 2 * len(listed) > len(every) else most
    kept = sorted(range(len(listed)), key=lambda k: (-use(listed[k]), k))[:most]
    return [listed[k] for k in sorted(kept)], len(listed) - len(kept)


def _loss(plan: Plan, parts: tuple[CableOrCard, ...]) -> Loss:
    """Return the loss of the first of these parts."""
    topology, part = plan.topology, parts[0]
    rest = topology.without_node(part.nodes[0]) if len(part.nodes) == 1 else topology.without_link(*part.nodes)
    requests = [plan] if plan.request.algorithm in CHOICES else [plan, _with_any_algorithm(plan)]
    for each in requests:  # a named algorithm, such as a ring, may need the part where others do not
        with suppress(PlanError):
            return Loss(parts, is_half=False, plan=each.replanned(rest))
    lost = {topology.links[number][:2] for number in part.links}
    slower = (link._replace(bandwidth=link.bandwidth / 2) if link[:2] in lost else link for link in topology.links)
    half = Topology.unchecked(topology.devices, slower, topology.switches, topology.assumed)
    return Loss(parts, is_half=True, plan=plan.replanned(half))


def _with_any_algorithm(plan: Plan) -> Plan:
    """Return the plan with a request that accepts any algorithm."""
    return replace(plan, request=plan.request._replace(algorithm=CHOICES[-1]))
