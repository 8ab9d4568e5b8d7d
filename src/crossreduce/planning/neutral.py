"""Topologies under neutral names, so that equal wirings have equal plans and are planned once.

Input: a topology and the devices that take part. Output: a ``NeutralTopology``, in which these are the devices and all
other nodes are switches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..topology import Link, Switch, Topology


class NeutralTopology(NamedTuple):
    """A topology under neutral names, and the original name of each node."""

    topology: Topology
    names: dict[str, str]


@lru_cache(maxsize=512)
def neutral(topology: Topology, members: tuple[str, ...], helpers: tuple[str, ...] | None = None) -> NeutralTopology:
    """Return a topology whose devices are the members and helpers, and whose other nodes are switches.

    Args:
      topology: the original.
      members: the devices that take part.
      helpers: other nodes that reduce, as devices. The switches then do not reduce. ``None``: every other node that can
        reduce (a reducing switch, or a device that does not take part) is a switch that reduces.
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
