"""``Plan.replanned``: a plan for the rest of a machine after a failure, or for links whose speeds have changed.

Input: a plan, and the topology as it is now. Output: a plan of the same request. The old schedule is kept if nothing
that it uses became worse and nothing can be faster. If not, the old plan's algorithm alone plans again, and all
algorithms only if it comes less close to the bound than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Final

from ..errors import ArgumentError, PlanError
from ..schedule import simulate
from ..schedule.costs import SharedLimit
from ..schedule.traffic import traffic
from ..topology import Link, Topology
from .planners import Request
from .plans import Plan, planned
from .schedules import CHOICES

_MOST_NAMES: Final = 3
TOLERANCE: Final = 0.02  # a plan that is further from its bound than the old one by at most this part is taken

Pair = tuple[str, str]


def replanned(plan: Plan, topology: Topology) -> Plan:
    """Return the plan of ``plan``'s request on ``topology``; see ``Plan.replanned``."""
    request = _moved(plan, topology)
    what = _changes(plan.topology, topology)
    kept = _kept(plan, request)
    if kept is not None:
        return replace(kept, change=f"kept, although {what}" if what else "kept: nothing has changed")
    for name in dict.fromkeys([plan.algorithm, "forest"]) if request.algorithm in CHOICES else ():
        try:
            again = replace(planned(request._replace(algorithm=name)), request=request)
        except PlanError:  # the algorithm cannot plan it
            continue
        # The search for a bound can take longer than all else. Forests have searched it, so it is known.
        most = again.bound.algbw if name == "forest" else _most(plan, request)
        if _is_near(again, most, plan):
            return replace(again, change=f"planned again by {name} alone, since {what}")
    return replace(planned(request), change=f"planned again, since {what}")


def _is_near(again: Plan, most: Fraction | None, plan: Plan) -> bool:
    """Return whether a plan takes, over the least time at ``most`` GB/s, no longer than ``plan`` over its own bound."""
    if most is None or plan.bound.algbw is None:
        return most is None
    return again.seconds * float(most) <= (1 + TOLERANCE) * plan.seconds * float(plan.bound.algbw)


def _most(plan: Plan, request: Request) -> Fraction | None:
    """Return a rate in GB/s that no schedule of the request exceeds, which is found quickly; ``None``: there is none.

    It is the least of the old bound, if nothing became faster, of that which its cuts prove on the new topology, and of
    what the links of each single device prove.
    """
    topology, collective = request.topology, request.collective
    assert topology is not None
    sources, destinations = set(request.sources), set(request.destinations)
    if len(sources | destinations) == 1:
        return None
    count = len(sources) if collective in ("reduce_scatter", "all_gather") else 0
    rates = []
    for device in sources | destinations:
        # Without its own part, a device sends its contributions to count - 1 parts, or receives these parts.
        part = Fraction(count - 1, count) if count else Fraction(1)
        into = sum((link.bandwidth for link in topology.links if link.dst == device), Fraction(0))
        out = sum((link.bandwidth for link in topology.out_links(device)), Fraction(0))
        if destinations - {device} and device in sources:
            rates.append(out / (1 - part if collective == "all_gather" else part))
        if sources - {device} and device in destinations:
            rates.append(into / (1 - part if collective == "reduce_scatter" else part))
    old = plan.bound
    if old.cuts and set(old.devices) == sources | destinations:
        with suppress(PlanError):
            rates.append(replace(old, topology=topology).proved())
    return min(rates)


def _moved(plan: Plan, topology: Topology) -> Request:
    """Return the plan's request on another topology.

    Raises:
      ArgumentError: no device takes part any more, or the root is lost.
    """
    request, old = plan.request, plan.topology

    def left(given: tuple[str, ...]) -> tuple[str, ...]:
        stayed = tuple(device for device in given if device in topology.devices)
        joined = [device for device in topology.devices if device not in old.devices]
        return (*stayed, *joined) if set(given) == set(old.devices) else stayed

    sources, destinations = left(request.sources), left(request.destinations)
    for root in (request.root, plan.root):
        if root is not None and root not in topology.devices:
            remedy = f'plan(topology, "{request.collective}", root=...) with another root'
            raise ArgumentError.of("the root of the plan is lost.", f"{root}; {topology!r}", remedy)
    if plan.root is not None:  # devices that joined are no roots, even if the topology had one device
        only = (plan.root,)
        sources, destinations = (only, destinations) if request.collective == "broadcast" else (sources, only)
    if not sources or not destinations:
        remedy = "a topology with some of the plan's devices, under their names in the plan"
        given = f"plan of {', '.join(request.members[:_MOST_NAMES])}, ...; {topology!r}"
        raise ArgumentError.of("no device of the plan is left.", given, remedy)
    known = topology.by_ends
    limits = [(speed, tuple(pair for pair in links if pair in known)) for speed, links in request.costs.shared]
    costs = replace(request.costs, shared=tuple(SharedLimit(*limit) for limit in limits if limit[1]))
    return request._replace(sources=sources, destinations=destinations, topology=topology, costs=costs)


def _kept(plan: Plan, request: Request) -> Plan | None:
    """Return the plan with its old schedule, if this is still right; ``None``: it is not."""
    old, new = plan.topology, request.topology
    assert new is not None
    if (request.sources, request.destinations) != (plan.request.sources, plan.request.destinations):
        return None
    try:
        used = traffic(plan.schedule, new).links.keys()
    except PlanError:  # a link that it uses is missing
        return None
    if used != traffic(plan.schedule, old).links.keys() or any(
        _is_faster(old.by_ends[pair], new.by_ends[pair]) for pair in used
    ):
        return None
    seconds = simulate(plan.schedule, new, request.nbytes, costs=request.costs).seconds
    kept = replace(plan, request=request, seconds=seconds)
    # If no link became faster, no other schedule takes less time than on the old topology, on which none was faster.
    faster = any(pair not in old.by_ends or _is_faster(link, old.by_ends[pair]) for pair, link in new.by_ends.items())
    better = faster or {*new.switches} - {*old.switches}
    return kept if not better or (kept.rate is not None and kept.ratio == Fraction(1)) else None


def _is_faster(one: Link, other: Link) -> bool:
    """Return whether a link has more bandwidth or less latency than another one."""
    return one.bandwidth > other.bandwidth or one.latency_s < other.latency_s


def _changes(old: Topology, new: Topology) -> str:
    """Return what differs between two topologies, as text; empty: nothing."""
    there, here = old.by_ends, new.by_ends
    lost = [node for node in old.nodes if node not in new]
    joined = [node for node in new.nodes if node not in old]
    of_nodes = {*lost, *joined}
    both = [pair for pair in there if pair in here]
    slower = [pair for pair in both if _is_faster(there[pair], here[pair])]
    parts = [
        (lost, "lost"),
        (_named(pair for pair in there if pair not in here and not of_nodes.intersection(pair)), "lost"),
        (_named(slower), "slower"),
        (joined, "new"),
        (_named(pair for pair in here if pair not in there and not of_nodes.intersection(pair)), "new"),
        (_named(pair for pair in both if _is_faster(here[pair], there[pair]) and pair not in slower), "faster"),
    ]
    return "; ".join(f"{_listed(names)} {'are' if len(names) > 1 else 'is'} {how}" for names, how in parts if names)


def _named(pairs: Iterable[Pair]) -> list[str]:
    """Return links as text; both directions of a link are one entry."""
    return list({frozenset(pair): "-".join(pair) for pair in reversed(list(pairs))}.values())[::-1]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
