"""A topology as a planner sees it: who takes part, and what only passes data on.

In: a topology, the devices that take part.  Out: a ``View``, in which these are the devices and all else are switches,
under neutral names, so that equal wirings give equal plans and are planned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import PlanError, message
from ..topology import Link, Switch, Topology


class View(NamedTuple):
    """A topology under neutral names, and what its nodes are called in the caller's."""

    topology: Topology
    names: dict[str, str]


@lru_cache(maxsize=512)
def view(topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...] | None = None) -> View:
    """Make the members a topology's devices, and the rest its switches.

    Args:
      helpers: other nodes that are to reduce, as devices of their own. ``None``: every node that could (a switch
        that is made for it, a device that takes no part) is a switch that reduces.
    """
    inside = (*members, *(helpers or ()))
    reducing = {switch.name for switch in topology.switches if switch.reduces} | set(topology.devices)
    if helpers is not None:
        reducing.clear()
    outside = [node for node in topology.nodes if node not in set(inside)]
    alias = {node: f"cpu:{k}" for k, node in enumerate(inside)} | {node: f"s{k}" for k, node in enumerate(outside)}
    links = tuple(Link(alias[src], alias[dst], bandwidth) for src, dst, bandwidth, _ in topology.links)
    switches = tuple(Switch(alias[node], node in reducing) for node in outside)
    devices = tuple(alias[node] for node in inside)
    return View(Topology(devices, links, switches), {name: node for node, name in alias.items()})


def require_ways(topology: Topology, sources: Sequence[str], destinations: Sequence[str], request: str) -> None:
    """Raise unless data can get from every source to every destination.

    Raises:
      PlanError: it names the devices that can be reached and those that cannot.
    """
    back = topology.reversed()
    if sources and reached(topology, sources[0]) >= {*sources, *destinations} <= reached(back, sources[0]):
        return
    for source in sources:
        within = reached(topology, source)
        beyond = [device for device in destinations if device not in within]
        if beyond:
            inside = ", ".join(node for node in topology.nodes if node in within)
            raise PlanError(
                message(
                    f"{request} needs a way from {source} to {', '.join(beyond)}, and no link leads out of "
                    f"{{{inside}}}.",
                    repr(topology),
                    "topology.subset(devices) with devices that are joined, or a topology with the missing links",
                )
            )


def reached(topology: Topology, start: str) -> set[str]:
    """Return the nodes that data can get to from one."""
    around: dict[str, list[str]] = {}
    for src, dst, _, _ in topology.links:
        around.setdefault(src, []).append(dst)
    found, left = {start}, [start]
    while left:
        for node in around.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found
