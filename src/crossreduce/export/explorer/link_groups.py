"""The links of a topology in groups: those of each network switch, of each host, and the links that a failure removes.

Input: a ``Topology`` and its ``Map``. Output: groups of link numbers for the rows of the page, and the cables and
network cards whose loss is planned.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, NamedTuple

from ...topology import Topology
from .positions import NETWORK, Map, Node

_NUMBER: Final = re.compile(r"[-_.#]?[0-9]+$")


class LinkGroup(NamedTuple):
    """Links that are neighbours on the page."""

    title: str
    between_hosts: bool  # whether these are links of network cards
    links: tuple[int, ...]


class CableOrCard(NamedTuple):
    """A cable (both directions of a link) or a network card."""

    name: str
    links: tuple[int, ...]  # the numbers of the links that fail with it
    nodes: tuple[str, ...]  # the two ends of a cable, or the card


def link_groups(topology: Topology, where: Map) -> tuple[LinkGroup, ...]:
    """Return the links between hosts, by rail or other switch of the network, and then those inside each host.

    Links of a host are in groups by the kinds of their ends, and by bandwidth.

    >>> from .positions import places
    >>> two = Topology.machine("hgx-h100", 2)
    >>> [group.title for group in link_groups(two, places(two))][-3:]
    ['rail7: NICs', 'host0: NVLinks, device - nvswitch', 'host1: NVLinks, device - nvswitch']
    >>> box = Topology.machine("dgx-1v")
    >>> [group.title for group in link_groups(box, places(box))]
    ['device - device, 25 GB/s', 'device - device, 50 GB/s']
    """
    nodes = {node.name: node for node in where.nodes}
    network: dict[str, list[int]] = {}
    inside: dict[tuple[str, str], dict[Fraction, list[int]]] = {}  # by host and ends, and by bandwidth
    between: list[int] = []
    for number, link in enumerate(topology.links):
        src, dst = nodes[link.src], nodes[link.dst]
        if src.box == dst.box:
            name = where.boxes[src.box].name if where.boxes else ""
            if name == NETWORK:
                between.append(number)
            else:
                speeds = inside.setdefault((name, _ends(src, dst)), {})
                speeds.setdefault(link.bandwidth, []).append(number)
            continue
        shared = [node.name for node in (src, dst) if where.boxes[node.box].name == NETWORK]
        names = shared or sorted(where.boxes[node.box].name for node in (src, dst))
        network.setdefault(" - ".join(names), []).append(number)
    hosts = list(dict.fromkeys(name for name, _ in inside))
    return (
        *(LinkGroup(f"{name}: NICs", True, tuple(links)) for name, links in network.items()),
        *([LinkGroup("between switches of the network", True, tuple(between))] if between else []),
        *(
            LinkGroup(
                f"{host}: " * bool(host) + ends + f", {float(speed):.4g} GB/s" * (len(speeds) > 1), False, tuple(links)
            )
            for (host, ends), speeds in sorted(inside.items(), key=lambda group: hosts.index(group[0][0]))
            for speed, links in sorted(speeds.items())
        ),
    )


def _ends(src: Node, dst: Node) -> str:
    """Return the kinds of nodes that a link joins: "device", and the names of switches without their numbers."""
    names = {"device" if node.is_device else _NUMBER.sub("", node.name.rpartition("/")[2]) for node in (src, dst)}
    kinds = {name or "switch" for name in names}
    first, *rest = sorted(kinds, key=lambda kind: (kind != "device", kind))
    nvlinks = "NVLinks, " if "nvswitch" in kinds else ""
    return f"{nvlinks}{first} - {rest[0] if rest else first}"


def parts_of(topology: Topology, where: Map) -> tuple[CableOrCard, ...]:
    """Return the network cards that are nodes of a host, and then all cables.

    >>> from .positions import places
    >>> two = Topology.machine("dgx-1v", 2)
    >>> [part.name for part in parts_of(two, places(two))][:2]
    ['host0/nic0', 'host0/nic1']
    """
    nodes = {node.name: node for node in where.nodes}
    touching: dict[str, list[int]] = {}
    cables: dict[tuple[str, str], list[int]] = {}
    cards: set[str] = set()
    for number, link in enumerate(topology.links):
        cable = link[:2] if (link.dst, link.src) not in cables else link[1::-1]
        cables.setdefault((cable[0], cable[1]), []).append(number)
        for here, there in (link[:2], link[1::-1]):
            touching.setdefault(here, []).append(number)
            outside = where.boxes and nodes[here].box != nodes[there].box
            if outside and not nodes[here].is_device and where.boxes[nodes[here].box].name != NETWORK:
                cards.add(here)
    listed = [CableOrCard(card, tuple(touching[card]), (card,)) for card in topology.nodes if card in cards]
    apart = {ends for ends in cables if cards & set(ends) and nodes[ends[0]].box != nodes[ends[1]].box}  # as the card
    return (
        *listed,
        *(CableOrCard(f"{a} - {b}", tuple(links), (a, b)) for (a, b), links in cables.items() if (a, b) not in apart),
    )
