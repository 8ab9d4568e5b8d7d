"""Positions of nodes and hosts in the plan explorer, in pixels at full size. The y axis points downwards.

Input: a ``Topology``. Output: a ``Map``. One host has the positions of ``graph_layout``. With several hosts, each host
is a box with its nodes inside, and the switches that belong to no host are a box in the middle. When a reader folds a
box, no box moves or changes its size, so the picture keeps its layout.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ...topology import Link, Topology
from ..pictures.folding import hosts_of, switches_of
from ..pictures.graph_layout import graph_layout, label

NETWORK: Final = "the network"  # the name of its box; names of hosts have no spaces
_PIXELS: Final = 100.0  # per inch of graph_layout
_MARGIN: Final = 46.0  # from the outermost nodes of a box to its border
_GAP: Final = 80.0  # between boxes
_RATIO: Final = 1.25  # the width of a picture of several hosts, divided by its height
_ROWS: Final = 8  # up to this number of hosts are in two rows; more hosts are placed around the network
_NAMES: Final = 16  # with more devices than this, labels are numbers
_CELLS: Final = 16  # with more devices than this, a host whose links all lead from devices to switches is a rack
_TRAY: Final = 4  # cells in a column
_PITCH: Final = 84.0  # from a cell to the next one
_MOST_BENT: Final = 100  # with more nodes, hosts are folded at first, and lines are straight


class Node(NamedTuple):
    """A device or switch and its position."""

    name: str
    label: str
    x: float
    y: float
    box: int  # the number of the box that contains it, or -1
    is_device: bool
    is_cell: bool  # whether it is a cell of a rack; its links to switches of its box are parts of the cell, not lines


class Box(NamedTuple):
    """A host, or the network between hosts. ``x`` and ``y`` are its centre."""

    name: str
    x: float
    y: float
    width: float
    height: float


class Map(NamedTuple):
    """All positions."""

    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]
    bends: dict[
        tuple[str, str], float
    ]  # for links drawn as curves, the control point's distance from the straight line
    size: float  # the width of a device's symbol


def places(topology: Topology) -> Map:
    """Return the positions of a topology's nodes and hosts.

    >>> positions = places(Topology.machine("hgx-h100", 4))
    >>> [box.name for box in positions.boxes], positions.nodes[0].label
    (['host0', 'host1', 'host2', 'host3', 'the network'], '0')
    """
    groups = _groups(topology)
    cells = {device for members in groups.values() for device in _cells(topology, members)}
    if len(groups) == 1:
        positions, bends = _inner(topology, topology.nodes)
        boxes: list[Box] = []
        box_of = dict.fromkeys(topology.nodes, -1)
    else:
        inner = {name: _inner(topology, members) for name, members in groups.items()}
        boxes = _boxes({name: _extent(positions) for name, (positions, _) in inner.items()})
        positions, bends, box_of = {}, {}, {}
        for number, box in enumerate(boxes):
            box_positions, curves = inner[box.name]
            x, y = _middle(box_positions)
            positions |= {node: (box.x + place[0] - x, box.y + place[1] - y) for node, place in box_positions.items()}
            bends |= curves
            box_of |= dict.fromkeys(box_positions, number)
    size = _symbol([positions[device] for device in topology.devices])
    shown = [
        link for link in topology.links if not cells.intersection(link[:2]) or box_of[link.src] != box_of[link.dst]
    ]
    bends |= _around_nodes(shown, positions, bends, size)
    short = len(topology.devices) > _NAMES
    nodes = tuple(
        Node(node, _label(node, short=short), *positions[node], box_of[node], node in topology.devices, node in cells)
        for node in topology.nodes
    )
    return Map(nodes, tuple(boxes), bends, size)


def _around_nodes(links: list[Link], positions: dict[str, Place], bent: Curves, size: float) -> Curves:
    """Return the bends of straight links that would pass over a node which is not one of their ends."""
    places_ = {node: complex(*place) for node, place in positions.items()}
    bends: Curves = {}
    if len(places_) > _MOST_BENT:
        return bends
    for link in links:
        if link[:2] in bent or (link.dst, link.src) in bent:
            continue
        others = [place for node, place in places_.items() if node not in link[:2]]
        a, b = places_[link.src], places_[link.dst]
        # The straight line first, and then curves on both sides, farther and farther away.
        tried = [0.0, *(size * k / 2 * side for k in range(1, 11) for side in (1, -1))]
        bend = max(tried, key=lambda bend: min(_distance(a, b, bend, others), size * 0.6))
        if bend:  # both directions have one curve
            bends[link.src, link.dst] = -bends.get((link.dst, link.src), -bend)
    return bends


def _distance(a: complex, b: complex, bend: float, others: list[complex]) -> float:
    """Return the distance of the nearest node from a quadratic curve between two places. ``bend``: see ``Map``."""
    top = (a + b) / 2 - 1j * (b - a) / abs(b - a) * bend
    points = ((1 - t) ** 2 * a + 2 * t * (1 - t) * top + t * t * b for t in (k / 24 for k in range(25)))
    return min((abs(point - other) for point in points for other in others), default=math.inf)


def _label(node: str, *, short: bool) -> str:
    name = label(node)
    return name.rpartition(":")[2] if short and ":" in name else name


def _groups(topology: Topology) -> dict[str, list[str]]:
    """Return the nodes of each host, and then those of ``NETWORK``. With one host, there is a single group."""
    hosts = hosts_of(topology)
    if len(hosts) == 1:
        return {"": list(topology.nodes)}
    switches = switches_of(topology, hosts)
    groups = {host or "this host": [*devices, *switches[host]] for host, devices in hosts.items()}
    return groups | ({NETWORK: switches[None]} if switches[None] else {})


Place = tuple[float, float]  # x and y
Curves = dict[tuple[str, str], float]  # see ``Map.bends``


def _inner(topology: Topology, members: list[str] | tuple[str, ...]) -> tuple[dict[str, Place], Curves]:
    """Return the positions of the nodes of one box, relative to each other, and its links that are curves."""
    inside = set(members)
    devices = tuple(node for node in members if node in topology.devices)
    if not devices:  # the network is a compact grid
        across = math.ceil(math.sqrt(len(members) * 1.6))
        return {node: (k % across * 120.0, k // across * 80.0) for k, node in enumerate(members)}, {}
    if _cells(topology, members):
        return _rack(devices, [node for node in members if node not in devices]), {}
    links = [link for link in topology.links if inside.issuperset(link[:2])]
    switches = tuple(switch for switch in topology.switches if switch.name in inside)
    layout = graph_layout(Topology.unchecked(devices, links, switches))
    positions = {node: (place.real * _PIXELS, -place.imag * _PIXELS) for node, place in layout.positions.items()}
    bends = {}
    for link in links:
        if frozenset(link[:2]) in layout.bent:
            bends[link.src, link.dst] = 80.0 if layout.order[link.src] < layout.order[link.dst] else -80.0
    return positions, bends


def _cells(topology: Topology, members: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices of a box that are drawn as cells of a rack: many devices, whose links all lead to switches.

    Lines from so many devices to a switch would cover each other. A cell shows the use of its links instead.
    """
    devices = tuple(node for node in members if node in topology.devices)
    inside, known = set(members), set(devices)
    ends = [link[:2] for link in topology.links if inside.issuperset(link[:2])]
    star = bool(ends) and all((src in known) != (dst in known) for src, dst in ends)
    return devices if star and len(devices) > _CELLS else ()


def _rack(devices: tuple[str, ...], switches: list[str]) -> dict[str, Place]:
    """Return positions of devices in columns of four, above and below their switches in the middle."""
    columns = math.ceil(len(devices) / _TRAY)
    high = _TRAY * _PITCH + 30.0
    # Of the even numbers of rows of columns, the one whose picture is nearest to ``_RATIO``.
    rows = min(
        range(2, 2 * columns + 1, 2),
        key=lambda rows: abs(math.ceil(columns / rows) * _PITCH / (rows * high) - _RATIO),
    )
    across = math.ceil(columns / rows)
    positions = {}
    for k, device in enumerate(devices):
        column, place = divmod(k, _TRAY)
        row, column = divmod(column, across)
        middle = 70.0 if row >= rows / 2 else -70.0  # room for the switches
        x = (column - (across - 1) / 2) * _PITCH
        positions[device] = (x, (row - rows / 2) * high + (place + 0.5) * _PITCH + middle)
    wide = max(120.0, across * _PITCH / max(1, len(switches)))
    return positions | {switch: ((k - (len(switches) - 1) / 2) * wide, 0.0) for k, switch in enumerate(switches)}


def _extent(positions: dict[str, Place]) -> Place:
    """Return the width and height of a box around nodes."""
    x, y = ([place[axis] for place in positions.values()] for axis in (0, 1))
    return max(x) - min(x) + 2 * _MARGIN, max(y) - min(y) + 2 * _MARGIN


def _middle(positions: dict[str, Place]) -> Place:
    x, y = ([place[axis] for place in positions.values()] for axis in (0, 1))
    return (max(x) + min(x)) / 2, (max(y) + min(y)) / 2


def _boxes(extents: dict[str, Place]) -> list[Box]:
    """Return the boxes of the hosts in two rows, or of many hosts along the sides of a rectangle.

    The network is in the middle. ``extents`` has the width and height of each box, by its name.
    """
    hosts = [name for name in extents if name != NETWORK]
    wide = max(extents[name][0] for name in hosts) + _GAP  # from a column to the next one
    high = max(extents[name][1] for name in hosts) + _GAP  # from a row to the next one
    width = wide - _GAP
    net = extents.get(NETWORK)
    n = len(hosts)
    if n <= _ROWS:
        across = math.ceil(n / 2)
        middle = (net[1] + 2 * _GAP) if net else 0.0
        wide = max(wide, _RATIO * (2 * high + middle) / across)
        cells = [(k % across, k // across) for k in range(n)]
        spots = [((column - (across - 1) / 2) * wide, row * (high + middle)) for column, row in cells]
        between = (high + middle) / 2
    else:
        across, down = _rectangle(n, high / wide)
        cells = _perimeter(across, down)[:n]
        spots = [((column - (across - 1) / 2) * wide, row * high) for column, row in cells]
        between = (down - 1) / 2 * high
    boxes = [Box(name, *spot, width, high - _GAP) for name, spot in zip(hosts, spots, strict=True)]
    return boxes + ([Box(NETWORK, 0.0, between, *net)] if net else [])


def _rectangle(count: int, cell_ratio: float) -> tuple[int, int]:
    """Return the columns and rows of the smallest rectangle whose border has room for ``count`` cells.

    Among equally long borders, the one whose picture is nearest to ``_RATIO`` is chosen. ``cell_ratio`` is the height
    of a cell divided by its width.
    """
    fits = [
        (across, down)
        for across in range(3, count + 1)
        for down in range(3, count + 1)
        if 2 * (across + down) - 4 >= count
    ]
    return min(fits, key=lambda fit: (sum(fit), abs(fit[1] * cell_ratio * _RATIO - fit[0])))


def _perimeter(across: int, down: int) -> list[tuple[int, int]]:
    """Return the cells along the border of a rectangle, clockwise from the upper left corner."""
    top = [(column, 0) for column in range(across)]
    right = [(across - 1, row) for row in range(1, down)]
    bottom = [(column, down - 1) for column in reversed(range(across - 1))]
    left = [(0, row) for row in reversed(range(1, down - 1))]
    return top + right + bottom + left


def _symbol(positions: list[Place]) -> float:
    """Return the width of a device's symbol: 78 % of the distance between the nearest devices, at most 64 pixels."""
    near = [math.dist(a, b) for k, a in enumerate(positions) for b in positions[k + 1 :]]
    return min(64.0, 0.78 * min(near, default=80.0))
