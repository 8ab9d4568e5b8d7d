"""Changes of a topology, for ``Plan.replanned``.

Input: a request, a schedule and a bound on the old topology, and the new topology. Output: the request on the new one,
whether the schedule still runs as before, a text about the changes, and a rate that no new schedule exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Final

from ..errors import ArgumentError, PlanError
from ..schedule import Schedule
from ..schedule.costs import SharedLimit
from ..schedule.traffic import traffic
from ..topology import Link, Topology
from .optimal.bounds.certificate import Bound
from .requests import Request

_MOST_NAMES: Final = 3

Pair = tuple[str, str]


def quick_bound(old: Bound, request: Request) -> Fraction | None:
    """Return a rate in GB/s that no schedule of a request exceeds, without a search; ``None`` if nothing has to move.

    It is the least of two kinds of limits: for each device, the bandwidth of its own links; and the bound that the cuts
    of ``old``, a bound on the old topology, prove on the new topology.
    """
    topology, collective = request.topology, request.collective
    assert topology is not None
    sources, destinations = set(request.sources), set(request.destinations)
    if len(sources | destinations) == 1:
        return None
    count = len(sources) if collective in ("reduce_scatter", "all_gather") else 0
    rates = []
    for device in sources | destinations:
        # A device of a reduce-scatter sends its contributions to the parts of all others, and receives at least one
        # value of its own part. In an all-gather, it sends its own part, and receives the parts of all others.
        others = Fraction(count - 1, count) if count else Fraction(1)
        into = sum((link.bandwidth for link in topology.links if link.dst == device), Fraction(0))
        out = sum((link.bandwidth for link in topology.out_links(device)), Fraction(0))
        if destinations - {device} and device in sources:
            rates.append(out / (1 - others if collective == "all_gather" else others))
        if sources - {device} and device in destinations:
            rates.append(into / (1 - others if collective == "reduce_scatter" else others))
    if old.cuts and set(old.devices) == sources | destinations:
        with suppress(PlanError):
            rates.append(replace(old, topology=topology).proved())
    return min(rates)


def move_request(request: Request, topology: Topology) -> Request:
    """Return the request on another topology: without lost devices, and with new ones if all old ones took part.

    Raises:
      ArgumentError: no device takes part any more, or the root is lost.
    """
    old = request.topology
    assert old is not None
    fixed = {"broadcast": request.sources, "reduce": request.destinations}.get(request.collective, ())  # the root

    def devices_now(before: tuple[str, ...]) -> tuple[str, ...]:
        """Return the sources or destinations on the new topology, given those on the old one."""
        stayed = tuple(device for device in before if device in topology.devices)
        joined = [device for device in topology.devices if device not in old.devices]
        return (*stayed, *joined) if stayed and set(before) == set(old.devices) else stayed

    sources, destinations = devices_now(request.sources), devices_now(request.destinations)
    for root in (*fixed, *([] if request.root is None else [request.root])):
        if root not in topology.devices:
            remedy = f'plan(topology, "{request.collective}", root=...) with another root'
            raise ArgumentError.of("the root of the plan is not in the topology.", f"{root}; {topology!r}", remedy)
    if fixed:  # no new device becomes a root, even if the root was the only device
        sources, destinations = (fixed, destinations) if request.collective == "broadcast" else (sources, fixed)
    if not sources or not destinations:
        remedy = "a topology with some of the plan's devices, under their names in the plan"
        given = f"plan of {', '.join(request.members[:_MOST_NAMES])}, ...; {topology!r}"
        raise ArgumentError.of("no device of the plan is in the topology.", given, remedy)
    shared = [
        (speed, tuple(pair for pair in links if pair in topology.by_ends)) for speed, links in request.costs.shared
    ]
    limits = tuple(SharedLimit(speed, links) for speed, links in shared if links)
    costs = replace(request.costs, shared=limits)
    return request._replace(sources=sources, destinations=destinations, topology=topology, costs=costs)


def runs_as_before(schedule: Schedule, before: Request, request: Request) -> bool:
    """Return whether a schedule of ``before`` also does ``request``, uses the same links, and none became slower."""
    old, new = before.topology, request.topology
    assert old is not None
    assert new is not None
    if (request.sources, request.destinations) != (before.sources, before.destinations):
        return False
    try:
        used = traffic(schedule, new).used.keys()
    except PlanError:  # the new topology lacks a link that the schedule uses
        return False
    same = used == traffic(schedule, old).used.keys()
    return same and not any(_is_faster(old.by_ends[pair], new.by_ends[pair]) for pair in used)


def has_gained(old: Topology, new: Topology) -> bool:
    """Return whether the new topology has a new or faster link, or a new or changed switch.

    If not, every schedule takes at least as long as on the old topology. So an old schedule that was the fastest, and
    takes no longer now, is still the fastest.
    """
    links = any(pair not in old.by_ends or _is_faster(link, old.by_ends[pair]) for pair, link in new.by_ends.items())
    return links or not {*new.switches} <= {*old.switches}


def _is_faster(one: Link, other: Link) -> bool:
    """Return whether a link has more bandwidth or less latency than another one."""
    return one.bandwidth > other.bandwidth or one.latency_s < other.latency_s


def changes(old: Topology, new: Topology) -> str:
    """Return a text about the differences between two topologies, or "" if there are none.

    Links of lost or new nodes are not listed.
    """
    before, now = old.by_ends, new.by_ends
    lost = [node for node in old.nodes if node not in new]
    joined = [node for node in new.nodes if node not in old]
    listed = {*lost, *joined}
    both = [pair for pair in before if pair in now]
    slower = [pair for pair in both if _is_faster(before[pair], now[pair])]
    reduced = {switch.name: switch.reduces for switch in old.switches}
    differ = [switch for switch in new.switches if reduced.get(switch.name, switch.reduces) != switch.reduces]
    parts = [
        (lost, "lost"),
        (_link_names(pair for pair in before if pair not in now and not listed.intersection(pair)), "lost"),
        (_link_names(slower), "slower"),
        (joined, "new"),
        (_link_names(pair for pair in now if pair not in before and not listed.intersection(pair)), "new"),
        (_link_names(pair for pair in both if _is_faster(now[pair], before[pair]) and pair not in slower), "faster"),
        ([switch.name for switch in differ if switch.reduces], "now able to reduce"),
        ([switch.name for switch in differ if not switch.reduces], "no longer able to reduce"),
    ]
    return "; ".join(f"{_names_text(names)} {'are' if len(names) > 1 else 'is'} {how}" for names, how in parts if names)


def _link_names(pairs: Iterable[Pair]) -> list[str]:
    """Return the names of links. Both directions of a link have one name, that of the first direction."""
    # A dictionary keeps the last value of a key, so the first direction must come last.
    return list({frozenset(pair): "-".join(pair) for pair in reversed(list(pairs))}.values())[::-1]


def _names_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
