"""Views of topologies: the nodes that data can reach, and the same bandwidths under neutral names.

Topologies that differ only in names and latencies have equal neutral topologies, so their plans are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from ..errors import PlanError
from ..schedule import GeneratedSchedule, Route, Schedule
from ..topology import Link, Switch, Topology
from ..topology.automorphisms import extend_to_switches

_MANY: Final = 64  # transfers per device: with more, nearly all routes of each device are needed


def require_routes(topology: Topology, sources: Sequence[str], destinations: Sequence[str], request: str) -> None:
    """Raise PlanError, which names what cannot be reached, unless every source has a route to every destination."""
    everyone = {*sources, *destinations}
    if sources and reachable_nodes(topology, sources[0]) >= everyone <= reachable_nodes(
        topology, sources[0], backwards=True
    ):
        return
    for source in sources:
        within = reachable_nodes(topology, source)
        beyond = [device for device in destinations if device not in within]
        if beyond:
            inside = ", ".join(node for node in topology.nodes if node in within)
            needed = f"{request} needs a route from {source} to {', '.join(beyond)}"
            remedy = (
                "topology.subset(devices), or --devices on the command line, with connected devices; or a topology "
            )
            remedy += "with the missing links"
            raise PlanError.of(f"{needed}, but no link leads out of {{{inside}}}.", repr(topology), remedy)


def reachable_nodes(topology: Topology, start: str, *, backwards: bool = False) -> set[str]:
    """Return the nodes to which data can get from ``start``; or, backwards, from which data can get there."""
    neighbours: dict[str, list[str]] = {}
    for src, dst, _, _ in topology.links:
        if backwards:
            src, dst = dst, src
        neighbours.setdefault(src, []).append(dst)
    found, left = {start}, [start]
    while left:
        for node in neighbours.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def add_routes(schedule: Schedule, topology: Topology) -> Schedule:
    """Return a schedule that names the route of each transfer between devices without a direct link.

    Of a generated schedule, then all images of a transfer take images of its route. A route is searched from the end
    with more transfers, so that one search finds many; from every source, it would take much longer. If a schedule
    needs so many routes that this gains nothing, it is returned unchanged.
    """
    base = schedule.base if isinstance(schedule, GeneratedSchedule) else schedule
    names = base.devices
    needed: dict[tuple[int, int, int], None] = {}
    for r, steps in enumerate(base.rounds):
        for chunk, dst, srcs in steps:
            for src in srcs:
                far = src != dst and (names[src], names[dst]) not in topology.by_ends
                if far and base.through(r, chunk, src, dst) is None:
                    needed[chunk, src, dst] = None
    if not needed or (base is schedule and len(needed) > _MANY * len(names)):
        return schedule
    symmetry = nodes = None
    if isinstance(schedule, GeneratedSchedule):
        symmetry, nodes = schedule.symmetry, schedule.nodes
        if nodes == topology.devices:  # the switches on the routes have to move too
            symmetry, nodes = extend_to_switches(topology, symmetry), topology.nodes
        if symmetry is None or len(nodes) < len(topology.nodes):
            return schedule
    turned = topology.reversed()
    sends, receives = Counter(src for _, src, _ in needed), Counter(dst for *_, dst in needed)
    found: dict[tuple[int, int], tuple[str, ...] | None] = {}
    routes = list(base.routes)
    for chunk, src, dst in needed:
        if (src, dst) not in found:
            if receives[dst] > sends[src]:
                passed = turned.route(names[dst], names[src])
                found[src, dst] = passed and passed[-2:0:-1]
            else:
                passed = topology.route(names[src], names[dst])
                found[src, dst] = passed and passed[1:-1]
        through = found[src, dst]
        if through:  # else the simulation reports the missing route
            routes.append(Route(chunk, src, dst, through))
    routed = Schedule(base.collective, base.algorithm, names, base.chunks, base.rounds, base.pieces, tuple(routes))
    if isinstance(schedule, GeneratedSchedule) and symmetry is not None and nodes is not None:
        return GeneratedSchedule(routed, symmetry, nodes, schedule.in_order)
    return routed


class NeutralTopology(NamedTuple):
    """A topology under neutral names, and the original name of each node."""

    topology: Topology
    names: dict[str, str]


@lru_cache(maxsize=512)
def neutral_topology(
    topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...] | None = None
) -> NeutralTopology:
    """Return a topology without latencies: members and helpers are devices (both may reduce), other nodes switches.

    ``helpers=None``: every other node that can reduce (a reducing switch or a device) is a switch that reduces.
    """
    inside = (*members, *(helpers or ()))
    reducing: set[str] = set()
    if helpers is None:
        reducing = {switch.name for switch in topology.switches if switch.reduces} | set(topology.devices)
    known = frozenset(inside)
    outside = [node for node in topology.nodes if node not in known]
    alias = {node: f"cpu:{k}" for k, node in enumerate(inside)} | {node: f"s{k}" for k, node in enumerate(outside)}
    links = [Link(alias[src], alias[dst], bandwidth) for src, dst, bandwidth, _ in topology.links]
    switches = tuple(Switch(alias[node], node in reducing) for node in outside)
    devices = tuple(alias[node] for node in inside)
    return NeutralTopology(Topology.unchecked(devices, links, switches), {name: node for node, name in alias.items()})
