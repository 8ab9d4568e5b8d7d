"""Views of topologies: the nodes that data can reach, and the same bandwidths under neutral names.

Topologies that differ only in names and latencies have equal neutral topologies, so their plans are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import PlanError
from ..topology import Link, Switch, Topology


def require_routes(topology: Topology, sources: Sequence[str], destinations: Sequence[str], request: str) -> None:
    """Raise PlanError, which names what cannot be reached, unless every source has a route to every destination."""
    everyone = {*sources, *destinations}
    if sources and reachable(topology, sources[0]) >= everyone <= reachable(topology, sources[0], backwards=True):
        return
    for source in sources:
        within = reachable(topology, source)
        beyond = [device for device in destinations if device not in within]
        if beyond:
            inside = ", ".join(node for node in topology.nodes if node in within)
            needed = f"{request} needs a route from {source} to {', '.join(beyond)}"
            remedy = (
                "topology.subset(devices), or --devices on the command line, with connected devices; or a topology "
            )
            remedy += "with the missing links"
            raise PlanError.of(f"{needed}, but no link leads out of {{{inside}}}.", repr(topology), remedy)


def reachable(topology: Topology, start: str, *, backwards: bool = False) -> set[str]:
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


class NeutralTopology(NamedTuple):
    """A topology under neutral names, and the original name of each node."""

    topology: Topology
    names: dict[str, str]


@lru_cache(maxsize=512)
def neutral(topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...] | None = None) -> NeutralTopology:
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
