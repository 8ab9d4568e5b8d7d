"""Large topologies with fewer boxes, for pictures: one box per host, or per range of devices with the same links.

Input: a ``Topology``. Output: a ``Folding`` with a smaller topology, where a device may stand for several, and the
names of the boxes. Pure: no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Final, NamedTuple

from ...devices import parse
from ...topology import Link, Topology

HOSTS_FROM: Final = 40  # several hosts with more devices than this are folded
DEVICES_FROM: Final = 96  # one host with more devices than this is folded
BOXES: Final = 16  # devices with the same links become about this number of boxes


class Folding(NamedTuple):
    """A topology with fewer nodes."""

    topology: Topology  # each link has the sum of the bandwidths of all links that it stands for
    boxes: dict[str, str]  # for each node of the complete topology, the node that stands for it
    labels: dict[str, str]  # the names of nodes that stand for several nodes
    note: str  # a line for readers, or "" if nothing is folded


def fold_topology(topology: Topology) -> Folding:
    """Return a topology with fewer nodes if it has too many devices for a picture.

    >>> folding = fold_topology(Topology.machine("hgx-h100", hosts=16))
    >>> len(folding.topology.devices), folding.labels["host3/cuda:0"]
    (16, 'host3 (8)')
    """
    hosts = hosts_of(topology)
    if len(hosts) > 1 and len(topology.devices) > HOSTS_FROM:
        switches_by_host = switches_of(topology, hosts)
        groups = {
            f"{host or 'this host'} ({len(nodes)})": [*nodes, *switches_by_host[host]] for host, nodes in hosts.items()
        }
        note = "each box is a host (with its number of devices)"
    elif len(hosts) == 1 and len(topology.devices) > DEVICES_FROM:
        groups = {f"{run[0]}-{run[-1].rpartition(':')[2]}": run for run in _runs(topology) if len(run) > 1}
        note = "each box is a range of devices with the same links"
    else:
        groups, note = {}, ""
    boxes = {node: node for node in topology.nodes}
    for nodes in groups.values():
        boxes |= dict.fromkeys(nodes, nodes[0])
    if not groups:
        return Folding(topology, boxes, {}, "")
    links_between: dict[tuple[str, str], list[Link]] = {}
    for link in topology.links:
        ends = boxes[link.src], boxes[link.dst]
        if ends[0] != ends[1]:
            links_between.setdefault(ends, []).append(link)
    links = [
        Link(*ends, sum((link.bandwidth for link in all_), Fraction(0)), min(link.latency_s for link in all_))
        for ends, all_ in links_between.items()
    ]
    devices = [device for device in topology.devices if boxes[device] == device]
    switches = [switch for switch in topology.switches if boxes[switch.name] == switch.name]
    labels = {nodes[0]: name for name, nodes in groups.items()}
    return Folding(Topology(tuple(devices), tuple(links), tuple(switches)), boxes, labels, note)


def hosts_of(topology: Topology) -> dict[str, list[str]]:
    """Return the devices of each host, by the host's name, which is "" for this process's own host."""
    hosts: dict[str, list[str]] = {}
    for device in topology.devices:
        hosts.setdefault(parse(device).host, []).append(device)
    return hosts


def switches_of(topology: Topology, hosts: dict[str, list[str]]) -> dict[str | None, list[str]]:
    """Return the switches of each host, and with the key ``None`` the switches between hosts.

    A switch belongs to the host with which its name starts. Without such a name, it belongs to a host if it has links
    to devices of only this host.
    """
    host_of = {device: host for host, devices in hosts.items() for device in devices}
    near: dict[str, set[str]] = {switch.name: set() for switch in topology.switches}
    for link in topology.links:
        for a, b in ((link.src, link.dst), (link.dst, link.src)):
            if a in near and b in host_of:
                near[a].add(host_of[b])
    by_host: dict[str | None, list[str]] = {None: [], **{host: [] for host in hosts}}
    for switch, linked_hosts in near.items():
        prefix = switch.partition("/")[0]
        candidates = {prefix} if prefix in hosts else linked_hosts
        by_host[candidates.pop() if len(candidates) == 1 else None].append(switch)
    return by_host


def _runs(topology: Topology) -> Iterable[list[str]]:
    """Yield runs of consecutive devices that have the same links to all other nodes."""
    most = math.ceil(len(topology.devices) / BOXES)  # devices of a run
    links: dict[str, dict[tuple[str, bool], Fraction]] = {device: {} for device in topology.devices}
    for link in topology.links:
        if link.src in links:
            links[link.src][link.dst, True] = link.bandwidth
        if link.dst in links:
            links[link.dst][link.src, False] = link.bandwidth
    run: list[str] = []
    for device in topology.devices:
        if run and (len(run) == most or not _alike(run[0], device, links)):
            yield run
            run = []
        run.append(device)
    yield run


def _alike(a: str, b: str, links: dict[str, dict[tuple[str, bool], Fraction]]) -> bool:
    """Return whether two devices have the same links to all other nodes, and equal links to each other."""
    if len(links[a]) != len(links[b]):
        return False
    swapped = {a: b, b: a}  # a's link to b must equal b's link to a
    return all(links[b].get((swapped.get(node, node), out)) == speed for (node, out), speed in links[a].items())
