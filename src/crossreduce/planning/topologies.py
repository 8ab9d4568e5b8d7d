"""Views of topologies: the nodes that data can reach, routes of transfers, and topologies with neutral names.

Topologies that differ only in names and latencies have equal neutral topologies. Caches can thus share their plans.
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

_MANY_TRANSFERS: Final = 64  # per device; with more, nearly all routes of each device are needed


def require_routes(topology: Topology, sources: Sequence[str], destinations: Sequence[str], request: str) -> None:
    """Raise PlanError if a source does not have a route to a destination.

    The error names the devices that cannot be reached. ``request`` is its subject, such as "all_reduce".
    """
    everyone = {*sources, *destinations}
    if sources and everyone <= reachable_nodes(topology, sources[0]):
        back = reachable_nodes(topology, sources[0], backwards=True)
        if everyone <= back:  # then every device has a route to every other one, through the first source
            return
    for source in sources:
        reached = reachable_nodes(topology, source)
        missed = [device for device in destinations if device not in reached]
        if missed:
            inside = ", ".join(node for node in topology.nodes if node in reached)
            needed = f"{request} needs a route from {source} to {', '.join(missed)}"
            remedy = "topology.subset(devices), or --devices on the command line, with connected devices; "
            remedy += "or a topology with the missing links"
            raise PlanError.of(f"{needed}, but no link leads out of {{{inside}}}.", repr(topology), remedy)


def reachable_nodes(topology: Topology, start: str, *, backwards: bool = False) -> set[str]:
    """Return ``start`` and all nodes to which it has a route; if ``backwards``, all nodes that have a route to it."""
    neighbours: dict[str, list[str]] = {}
    for src, dst, _, _ in topology.links:
        if backwards:
            src, dst = dst, src
        neighbours.setdefault(src, []).append(dst)
    reached, unvisited = {start}, [start]
    while unvisited:
        for node in neighbours.get(unvisited.pop(), ()):
            if node not in reached:
                reached.add(node)
                unvisited.append(node)
    return reached


def add_routes(schedule: Schedule, topology: Topology) -> Schedule:
    """Return the schedule with an explicit route for each transfer between devices without a direct link.

    In a generated schedule, the images of a transfer then take the images of its route. One search finds all routes
    from a device, or on the reversed topology all routes to it. So the route of a transfer is searched from that end
    which has more transfers, because fewer searches are then necessary. If a schedule needs so many routes that this
    saves nothing, the schedule is returned unchanged.
    """
    base = schedule.base if isinstance(schedule, GeneratedSchedule) else schedule
    names = base.devices
    needed: dict[tuple[int, int, int], None] = {}
    for r, steps in enumerate(base.rounds):
        for chunk, dst, srcs in steps:
            for src in srcs:
                has_no_link = src != dst and (names[src], names[dst]) not in topology.by_ends
                if has_no_link and base.through(r, chunk, src, dst) is None:
                    needed[chunk, src, dst] = None
    if not needed or (base is schedule and len(needed) > _MANY_TRANSFERS * len(names)):
        return schedule
    symmetry = nodes = None
    if isinstance(schedule, GeneratedSchedule):
        symmetry, nodes = schedule.symmetry, schedule.nodes
        if nodes == topology.devices:  # the symmetry has to map also the switches on the routes
            symmetry, nodes = extend_to_switches(topology, symmetry), topology.nodes
        if symmetry is None or len(nodes) < len(topology.nodes):
            return schedule
    backwards = reversed_topology(topology)
    sends, receives = Counter(src for _, src, _ in needed), Counter(dst for *_, dst in needed)
    passed: dict[tuple[int, int], tuple[str, ...] | None] = {}  # the nodes between source and destination
    routes = list(base.routes)
    for chunk, src, dst in needed:
        if (src, dst) not in passed:
            if receives[dst] > sends[src]:
                route = backwards.route(names[dst], names[src])
                passed[src, dst] = route and route[-2:0:-1]
            else:
                route = topology.route(names[src], names[dst])
                passed[src, dst] = route and route[1:-1]
        through = passed[src, dst]
        if through:  # if there is no route, the simulation reports it
            routes.append(Route(chunk, src, dst, through))
    routed = Schedule(base.collective, base.algorithm, names, base.chunks, base.rounds, base.pieces, tuple(routes))
    if isinstance(schedule, GeneratedSchedule) and symmetry is not None and nodes is not None:
        return GeneratedSchedule(routed, symmetry, nodes, schedule.in_order)
    return routed


@lru_cache(maxsize=256)
def reversed_topology(topology: Topology) -> Topology:
    """Return the topology with reversed links, always as the same object, and the given object if it is equal.

    Caches would compare two equal topologies link by link at each lookup.
    """
    backwards = topology.reversed()
    return topology if backwards == topology else backwards


class NeutralTopology(NamedTuple):
    """A topology under neutral names, and the original name of each node."""

    topology: Topology
    names: dict[str, str]


@lru_cache(maxsize=512)
def neutral_topology(
    topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...] | None = None
) -> NeutralTopology:
    """Return a topology with neutral names and without latencies.

    Its devices are the members and the helpers, which all may reduce. The other nodes become switches, which forward.
    If ``helpers`` is ``None``, other nodes that are devices or reducing switches become reducing switches.
    """
    device_nodes = (*members, *(helpers or ()))
    reducing: set[str] = set()
    if helpers is None:
        reducing = {switch.name for switch in topology.switches if switch.reduces} | set(topology.devices)
    kept = frozenset(device_nodes)
    others = [node for node in topology.nodes if node not in kept]
    alias = {node: f"cpu:{k}" for k, node in enumerate(device_nodes)} | {node: f"s{k}" for k, node in enumerate(others)}
    links = [Link(alias[src], alias[dst], bandwidth) for src, dst, bandwidth, _ in topology.links]
    switches = tuple(Switch(alias[node], node in reducing) for node in others)
    devices = tuple(alias[node] for node in device_nodes)
    return NeutralTopology(Topology.unchecked(devices, links, switches), {name: node for node, name in alias.items()})
