"""The links that limit a bound: its heaviest cuts, and a text about them.

Input: a ``Bound``. Output: ``TightCut`` values, whose links are those of the named devices, or a text. A cut is given
by the nodes on one side. Only its links are tight: with one network card less in host0 than in host1, the cards of
host0 limit the rate, on whichever side of the cut the switch of the network is.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Final, NamedTuple

from ....devices import parse
from ....schedule.schedule import many
from ....topology import Link, Topology
from .certificate import Bound, Cut

_MOST_NAMES: Final = 8
_MOST_LINKS: Final = 2  # that are named one by one


class TightCut(NamedTuple):
    """A cut, described by that of its sides whose devices or hosts have the links that cross it."""

    devices: tuple[str, ...]  # of this side
    nodes: frozenset[str]  # of this side: the devices and switches
    direction: str  # "into" or "out of" this side
    links: tuple[Link, ...]
    of: int  # the number of all links between this side without switches of the network, and all else
    own: bool  # whether all links end at a device or a host of this side


def heaviest_cuts(limit: Bound) -> list[TightCut]:
    """Return the cuts with the greatest weight in a bound, those of the least bandwidth first.

    >>> from crossreduce.planning import bound
    >>> from crossreduce import Topology
    >>> [(cut.devices, cut.direction) for cut in heaviest_cuts(bound(Topology.star(4), "broadcast", "cpu:1"))]
    [(('cpu:0',), 'into')]
    """
    network = _network(limit.topology)
    heaviest = max((cut.weight for cut in limit.cuts), default=Fraction(0))
    found = [_described(limit, cut, network) for cut in limit.cuts if cut.weight == heaviest]
    return sorted(found, key=lambda cut: _bandwidth(cut.links))


def _network(topology: Topology) -> dict[str, list[Link]]:
    """Return the links of each switch of the network, if there are several hosts.

    A switch belongs to the host with which its name starts. Without such a name, it belongs to the network, unless all
    of its links lead to two or more devices of one host. A rail to which only one device is left is of the network.
    """
    hosts = {parse(device).host for device in topology.devices}
    if len(hosts) == 1:
        return {}
    names = (switch.name for switch in topology.switches)
    network: dict[str, list[Link]] = {name: [] for name in names if name.partition("/")[0] not in hosts}
    for link in topology.links:
        for end in link[:2]:
            if end in network:
                network[end].append(link)
    for name, links in list(network.items()):
        near = {end for link in links for end in link[:2]} - {name}
        if len(near) > 1 and near <= {*topology.devices} and len({parse(device).host for device in near}) == 1:
            del network[name]
    return network


def _described(limit: Bound, cut: Cut, network: dict[str, list[Link]]) -> TightCut:
    """Return the description of a cut. ``network`` has the links of each switch between hosts.

    Both sides are described, each without the switches that can be on the other side of an equal cut. The best one has
    all links that cross the cut at its own nodes, no switch of the network, and the fewest devices.
    """
    options = []
    for inside in (False, True):
        nodes = _without_network(cut, network, inside=inside)
        side = nodes if inside else frozenset(limit.topology.nodes) - nodes
        links = _crossing(limit.topology.links, nodes, outward=cut.outward)
        alone = side - network.keys()
        of = _crossing(limit.topology.links, alone, outward=cut.outward == inside)
        ends = [link.src if link.src in side else link.dst for link in links]
        own = all(end in limit.topology.devices or (network and end not in network) for end in ends)
        devices = tuple(device for device in limit.devices if device in side)
        direction = "out of" if cut.outward == inside else "into"
        options.append(TightCut(devices, side, direction, links, len(of), own))
    return min(options, key=lambda option: (not option.own, bool(option.nodes & network.keys()), len(option.devices)))


def _without_network(cut: Cut, network: dict[str, list[Link]], *, inside: bool) -> frozenset[str]:
    """Return the nodes of an equal cut with the fewest switches of the network in its set, or outside it."""
    nodes, moved = cut.nodes, True
    while moved:
        moved = False
        for switch, links in network.items():
            after = nodes ^ {switch}
            if (switch in nodes) == inside and (
                _bandwidth(_crossing(links, after, outward=cut.outward))
                == _bandwidth(_crossing(links, nodes, outward=cut.outward))
            ):
                nodes, moved = after, True
    return nodes


def _crossing(links: Iterable[Link], nodes: frozenset[str], *, outward: bool) -> tuple[Link, ...]:
    """Return the links that leave a set of nodes, or if not ``outward``, those that enter it."""
    crossing = (link for link in links if (link.src in nodes) != (link.dst in nodes))
    return tuple(link for link in crossing if (link.src in nodes) == outward)


def _bandwidth(links: Iterable[Link]) -> Fraction:
    return sum((link.bandwidth for link in links), Fraction(0))


def limited_by(limit: Bound) -> str:
    """Return a text about the links that limit a bound: links with prices, or those of the heaviest cuts.

    >>> from crossreduce.planning import bound
    >>> from crossreduce import Topology
    >>> star = Topology.star(4, 450)
    >>> limited_by(bound(star, "broadcast", "cpu:1")), limited_by(bound(star, "all_reduce"))
    ('the link into cpu:0 (450 GB/s)', "every device's own links: 450 GB/s by 1 link in and out")
    """
    if limit.prices:
        widths = {(link.src, link.dst): link.bandwidth for link in limit.topology.links}
        src, dst, _ = max(limit.prices, key=lambda priced: priced[2] * widths[priced[:2]])
        more = len(limit.prices) - 1
        others = f" and {more} more" if more else ""
        together = f"{many(more + 1, 'link')} together, not by cuts"
        return f"{together}: {src} -> {dst} ({_number(widths[src, dst])} GB/s){others}"
    sides: dict[tuple[str, ...], dict[str, TightCut]] = {}  # devices -> direction -> cut
    for cut in heaviest_cuts(limit):
        sides.setdefault(cut.devices, {})[cut.direction] = cut
    if len(sides) == len(limit.devices) > 1 and all(len(devices) == 1 for devices in sides):
        kinds = dict.fromkeys(
            (len(cut.links), _bandwidth(cut.links), len(side)) for side in sides.values() for cut in side.values()
        )
        ways = {1: "one way", 2: "in and out"}
        words = [f"{_number(width)} GB/s by {many(n, 'link')} {ways[count]}" for n, width, count in kinds]
        return f"every device's own links: {'; '.join(words)}"
    texts = [_side_text(limit, list(side.values())) for side in sides.values()]
    more = len(texts) - 2
    return " and ".join(texts[:2]) + (f", with {more} more such cut{'s' * (more > 1)}" if more > 0 else "")


def _side_text(limit: Bound, cuts: list[TightCut]) -> str:
    """Return a text about the links into and out of some devices: for each direction, their number and GB/s."""
    devices = cuts[0].devices
    hosts = {parse(device).host for device in devices}
    on_hosts = [device for device in limit.devices if parse(device).host in hosts]
    name, noun = devices_text(devices), "link"
    if len(devices) > 1:
        name = f"{{{name}}}"
    if len(hosts) == 1 and "" not in hosts and len(on_hosts) == len(devices) < len(limit.devices):
        (name,), noun = hosts, "NIC"  # these are all devices of one host, so the links are its network cards
    ways: dict[str, list[str]] = {}  # the directions, by the text before and behind them
    for cut in cuts:
        width, count = _number(_bandwidth(cut.links)), len(cut.links)
        if noun == "NIC" and not cut.own:  # links between switches of the network
            names = ", ".join(f"{link.src} -> {link.dst}" for link in cut.links[:_MOST_LINKS])
            more = f" and {count - _MOST_LINKS} more" if count > _MOST_LINKS else ""
            ways.setdefault(f"the link{'s' * (count > 1)} {names}{more} ({width} GB/s)", [])
            continue
        counted = f"{count} of the {cut.of} {noun}s" if noun == "NIC" and count < cut.of else f"the {noun}"
        if count > 1 and counted.startswith("the"):
            counted = f"the {count} {noun}s"
        ways.setdefault(f"{counted} {{}} {name} ({width} GB/s)", []).append(cut.direction)
    return " and ".join(text.replace("{}", " and ".join(directions), 1) for text, directions in ways.items())


def devices_text(devices: tuple[str, ...]) -> str:
    """Return the names of devices, of many only the first eight.

    >>> devices_text(("cpu:0", "cpu:1"))
    'cpu:0, cpu:1'
    """
    more = len(devices) - _MOST_NAMES
    return ", ".join(devices[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.4g}"
