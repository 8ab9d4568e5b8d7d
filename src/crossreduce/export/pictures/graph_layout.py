"""Positions of a topology's nodes in a picture: complex numbers, in inches of a drawing at full size."""

from __future__ import annotations

import cmath
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final

from ...topology import Topology
from .folding import hosts_of, switches_of

NODE: Final = 0.16  # half of the height of a node's box
BAR_FROM: Final = 24  # the switch of a star with more devices than this is drawn as a bar
_TOP: Final = math.pi / 2


@dataclass(frozen=True)
class GraphLayout:
    """Positions of the nodes of a topology."""

    positions: dict[str, complex]
    hosts: tuple[tuple[str, complex, complex], ...] = ()  # for each frame: name, lower left corner, upper right corner
    bent: frozenset[frozenset[str]] = frozenset()  # links drawn as curves, since other nodes are between their ends
    bars: dict[str, float] = field(default_factory=dict)  # half the widths of wide boxes, whose links are vertical
    labels: dict[str, str] = field(default_factory=dict)  # names in the picture that differ from those of ``label``

    @cached_property
    def order(self) -> dict[str, int]:
        """The index of each node in ``positions``."""
        return {node: number for number, node in enumerate(self.positions)}

    @cached_property
    def corners(self) -> tuple[complex, complex]:
        """The lower left and upper right corner of the drawing."""
        points = [*self.positions.values(), *(point for a, b in self.bent for point in self.line(a, b))]
        points += [corner for _, *frame in self.hosts for corner in frame]
        for node, place in self.positions.items():
            beyond = max(0.0, self.half_width(node) - 0.32)  # of wide boxes
            points += [place - beyond, place + beyond]
        x, y = [point.real for point in points], [point.imag for point in points]
        return complex(min(x) - 0.4, min(y) - 0.3), complex(max(x) + 0.4, max(y) + 0.3)

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the drawing."""
        span = self.corners[1] - self.corners[0]
        return span.real, span.imag

    def label(self, node: str) -> str:
        """Return a node's name in the picture."""
        return self.labels.get(node) or label(node)

    def half_width(self, node: str) -> float:
        """Return half of the width of a node's box."""
        return self.bars.get(node) or half_width(self.label(node))

    def line(self, src: str, dst: str, side: float = 0.0) -> list[complex]:
        """Return the points of a link, shifted to the right of its direction by ``side``."""
        a, b = self.positions[src], self.positions[dst]
        if src in self.bars or dst in self.bars:
            a, b = (complex(b.real, a.imag), b) if src in self.bars else (a, complex(a.real, b.imag))
        left = 1j * (b - a) / abs(b - a)
        a, b = a - side * left, b - side * left
        if frozenset((src, dst)) not in self.bent:
            return [a, b]
        top = (a + b) / 2 + left * (0.8 if self.order[src] < self.order[dst] else -0.8)  # of a quadratic Bezier curve
        return [(1 - t) ** 2 * a + 2 * t * (1 - t) * top + t * t * b for t in (k / 16 for k in range(17))]

    def arrow(self, src: str, dst: str, side: float = 0.0) -> list[complex]:
        """Return the points of a link between the boxes of its ends, so that no box hides the head of the arrow."""
        return self._outside(dst, self._outside(src, self.line(src, dst, side))[::-1])[::-1]

    def _outside(self, node: str, points: list[complex]) -> list[complex]:
        """Return a line that starts at ``node``, without the part under the node's box."""
        centre, wide, high = self.positions[node], self.half_width(node) + 0.05, NODE + 0.05
        offsets = [point - centre for point in points]
        outside = (k for k, off in enumerate(offsets) if abs(off.real) > wide or abs(off.imag) > high)
        left = next(outside, len(points) - 1)
        start, rest = offsets[left - 1], offsets[left] - offsets[left - 1]
        most = 0.4 if len(points) == 2 else 1.0  # the largest fraction to cut off, so that a line stays visible
        x = (math.copysign(wide, rest.real) - start.real) / (rest.real or 1e-9)
        y = (math.copysign(high, rest.imag) - start.imag) / (rest.imag or 1e-9)
        return [points[left - 1] + rest * min(abs(x), abs(y), most), *points[left:]]


def point_towards(a: complex, b: complex, distance: float) -> complex:
    """Return the point at a distance from ``a`` in the direction of ``b``."""
    return a + (b - a) * distance / abs(b - a)


def label(node: str) -> str:
    """Return a node's name without its host."""
    return node.rpartition("/")[2]


def half_width(node: str) -> float:
    """Return half of the width of a node's box."""
    return max(0.22, 0.036 * len(label(node)) + 0.05)


def graph_layout(topology: Topology, labels: dict[str, str] | None = None) -> GraphLayout:
    """Return the positions of a topology's nodes.

    On one host, the devices of a mesh or torus of 2 or 3 dimensions are placed on a grid. Devices of a large star are
    placed in rows above and below the switch. Other devices are placed clockwise on a circle, with the switches inside.
    Several hosts are placed in two rows with the network between the rows. ``labels`` are those of a ``Folding``. With
    them, each device stands for several, and hosts have no frames.

    >>> graph_layout(Topology.mesh(2, 2)).positions["cpu:3"]
    (1-1j)
    """
    near: dict[str, set[str]] = {node: set() for node in topology.nodes}
    for link in topology.links:
        near[link.src].add(link.dst)
        near[link.dst].add(link.src)
    hosts = hosts_of(topology)
    switches = [switch.name for switch in topology.switches]
    if labels:
        return GraphLayout(_circle(topology.devices, switches, near, labels), labels=labels)
    if len(hosts) > 1:
        return _hosts(hosts, switches_of(topology, hosts), near)
    is_star = len(switches) == 1 and all(near[device] == {*switches} for device in topology.devices)
    if is_star and len(topology.devices) > BAR_FROM:
        return _bar(topology.devices, switches[0])
    shape = None if switches else _grid(topology.devices, near)
    if shape is not None:
        return _on_grid(topology.devices, near, shape)
    return GraphLayout(_circle(topology.devices, switches, near))


def _bar(devices: Sequence[str], switch: str) -> GraphLayout:
    """Place the devices of a star in two rows above the switch, which is a bar, and in two rows below it.

    The outer rows are shifted by half a column, so that their links pass between the boxes of the inner rows.
    """
    columns, gap = math.ceil(len(devices) / 4), 2 * max(map(half_width, devices)) + 0.3
    heights = (1.6, 0.8, -0.8, -1.6)
    positions = {switch: 0j}
    for k, device in enumerate(devices):
        row, column = divmod(k, columns)
        shift = 0.25 if row in (0, 3) else -0.25
        positions[device] = complex((column - (columns - 1) / 2 + shift) * gap, heights[row])
    return GraphLayout(positions, bars={switch: (columns / 2 + 0.25) * gap})


def _grid(devices: Sequence[str], near: dict[str, set[str]]) -> tuple[int, ...] | None:
    """Return the shape of the mesh or torus that the devices form row by row, or ``None`` if they form none."""
    n = len(devices)
    sides = [side for side in range(2, n) if n % side == 0]
    shapes = [(a, n // a) for a in sides] + [(a, b, n // (a * b)) for a in sides for b in sides if n // (a * b) > 1]
    shapes = [shape for shape in shapes if math.prod(shape) == n]
    for shape in sorted(shapes, key=lambda shape: (len(shape), sum(shape))):
        cells = dict(zip(devices, product(*map(range, shape)), strict=True))
        pairs = [(cells[a], cells[b]) for a in devices for b in near[a] if cells[a] < cells[b]]
        expected = sum(n // side * (side - 1) for side in shape)  # the number of pairs of neighbours
        if all(_step(*pair, shape) for pair in pairs) and sum(_step(*pair, shape) == 1 for pair in pairs) == expected:
            return shape
    return None


def _step(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> int:
    """Return 1 for two neighbours on a grid, the distance for two ends of a row or column, and 0 for other cells."""
    steps = [(abs(x - y), side) for x, y, side in zip(a, b, shape, strict=True) if x != y]
    return steps[0][0] if len(steps) == 1 and steps[0][0] in (1, steps[0][1] - 1) else 0


def _on_grid(devices: Sequence[str], near: dict[str, set[str]], shape: tuple[int, ...]) -> GraphLayout:
    cells = dict(zip(devices, product(*map(range, shape)), strict=True))
    # A third dimension is drawn up and to the right, within the gap to the next column.
    gap = 1.0 if len(shape) == 2 else 0.8 * (shape[0] + 1)
    positions = {
        device: complex(column, -row) * gap + sum(depth * (0.75 + 0.5j) for depth in deep)
        for device, (*deep, row, column) in cells.items()
    }
    bent = {frozenset((a, b)) for a in devices for b in near[a] if _step(cells[a], cells[b], shape) > 1}
    return GraphLayout(positions, bent=frozenset(bent))


def _circle(
    devices: Sequence[str], switches: Sequence[str], near: dict[str, set[str]], labels: dict[str, str] | None = None
) -> dict[str, complex]:
    """Place devices on a circle, clockwise from the top, and switches on inner circles, the farthest ones innermost."""
    widest = 2 * max(half_width(name) for name in labels.values()) + 0.1 if labels else 0.0
    levels = _levels(devices, switches, near)
    radii: list[float] = []
    for level in reversed(levels):
        radii.insert(0, max(_radius(len(level), 1.0), radii[0] + 0.8 if radii else 0.0))
    radius = max(
        _radius(len(devices), max(widest, 1.1 if len(devices) <= 16 else 0.72)), radii[0] + 0.8 if radii else 0.0
    )
    first = _TOP if len(devices) != 2 else math.pi  # two devices are side by side
    positions = {device: cmath.rect(radius, first - k * math.tau / len(devices)) for k, device in enumerate(devices)}
    for level, distance in zip(levels, radii, strict=True):
        positions |= _spread(level, distance, positions, near)
    return positions


def _hosts(
    hosts: dict[str, list[str]], switches: dict[str | None, list[str]], near: dict[str, set[str]]
) -> GraphLayout:
    """Place hosts with their switches in two rows, and the network (``switches[None]``) between the rows."""
    inner = {host: _host(devices, switches[host], near) for host, devices in hosts.items()}
    wide = max(abs(place.real) for positions in inner.values() for place in positions.values()) * 2 + 1.0
    high = max(place.imag for positions in inner.values() for place in positions.values())
    core = _levels({node for positions in inner.values() for node in positions}, switches[None], near)
    middle = 0.9 + 0.45 * len(core)  # the distance from the network's middle to the nearest row of each host
    across = math.ceil(len(hosts) / 2)
    positions: dict[str, complex] = {}
    frames = []
    for k, (host, within) in enumerate(inner.items()):
        column, side = (k, 1j) if k < across else (k - across, -1j)
        left = (column - across / 2) * wide
        positions |= {
            node: left + wide / 2 + place.real + side * (middle + place.imag) for node, place in within.items()
        }
        ends = sorted(((side * (middle - 0.35)).imag, (side * (middle + high + 0.35)).imag))
        frames.append((host or "this host", complex(left + 0.1, ends[0]), complex(left + wide - 0.1, ends[1])))
    for depth, level in enumerate(core):
        gap = max(0.8, 0.6 * across * wide / len(level))
        positions |= _row(level, 0.9j * ((len(core) - 1) / 2 - depth), gap, positions, near)
    return GraphLayout(positions, tuple(frames))


def _host(devices: Sequence[str], switches: Sequence[str], near: dict[str, set[str]]) -> dict[str, complex]:
    """Place the nodes of one host. Switches with links out of the host are lowest, and the devices are above them."""
    inside = {*devices, *switches}
    gates = [switch for switch in switches if not near[switch] <= inside]  # switches with links out of the host
    others = [switch for switch in switches if switch not in gates]
    base = 0.9j if gates else 0j
    if any(near[device] & set(devices) for device in devices):
        ring = _circle(devices, others, near)
        lowest = min(place.imag for place in ring.values())
        positions = {node: place - 1j * lowest + base for node, place in ring.items()}
    else:
        positions = {device: base + 0.8 * (k - (len(devices) - 1) / 2) for k, device in enumerate(devices)}
        for depth, level in enumerate(_levels(devices, others, near), start=1):
            positions |= _row(level, base + 0.9j * depth, max(0.9, 0.8 * len(devices) / len(level)), positions, near)
    return positions | _row(gates, 0j, 0.8, positions, near)


def _row(
    nodes: Sequence[str], middle: complex, gap: float, positions: dict[str, complex], near: dict[str, set[str]]
) -> dict[str, complex]:
    """Place nodes in a row, in the order of the mean positions of their neighbours."""

    def mean(node: str) -> float:
        x = [positions[other].real for other in near[node] if other in positions]
        return round(math.fsum(x) / len(x), 6) if x else 0.0

    return {node: middle + gap * (k - (len(nodes) - 1) / 2) for k, node in enumerate(sorted(nodes, key=mean))}


def _levels(outside: Collection[str], switches: Sequence[str], near: dict[str, set[str]]) -> list[list[str]]:
    """Return the switches in groups, by their distance in links from the nodes in ``outside``."""
    levels, front, remaining = [], set(outside), list(switches)
    while remaining:
        level = [switch for switch in remaining if near[switch] & front] or remaining
        levels.append(level)
        front, remaining = set(level), [switch for switch in remaining if switch not in level]
    return levels


def _radius(count: int, gap: float) -> float:
    """Return the radius of a circle on which ``count`` nodes are ``gap`` apart."""
    return 0.0 if count < 2 else gap / (2 * math.sin(math.pi / count))


def _spread(
    nodes: Sequence[str], radius: float, positions: dict[str, complex], near: dict[str, set[str]]
) -> dict[str, complex]:
    """Place nodes evenly on a circle, each near the direction of its neighbours."""
    # Nodes are sorted clockwise from this angle. Rounding could move a node that is exactly there from one end of the
    # order to the other, and many nodes are exactly at the top, so the angle is beside the top.
    seam = _TOP + 0.1
    directions = {
        node: sum((positions[other] / abs(positions[other]) for other in sorted(near[node] & positions.keys())), 0j)
        for node in nodes
    }
    clear = {node: direction for node, direction in directions.items() if abs(direction) > 1e-6}
    last = 9  # above tau, so nodes without a clear direction are last
    ordered = sorted(
        nodes, key=lambda node: (seam - cmath.phase(directions[node])) % math.tau if node in clear else last
    )
    slots = {node: cmath.rect(1, _TOP - k * math.tau / len(nodes)) for k, node in enumerate(ordered)}
    # The circle is turned so that nodes are, on average, in the direction of their neighbours.
    turn = sum((direction / abs(direction) / slots[node] for node, direction in clear.items()), 0j)
    return {node: radius * slot * (turn / abs(turn) if abs(turn) > 1e-6 else 1) for node, slot in slots.items()}
