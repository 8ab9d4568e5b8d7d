"""Pictures of topologies and schedules.

In: a ``Topology``, or a ``Schedule`` and the topology it runs on, and a path.  Out: an SVG or PNG file,
whole or not at all; the same input gives the same SVG. Needs matplotlib (the "plot" extra), which is imported
when a picture is drawn; opens no window, and neither follows nor changes the caller's matplotlib settings.

Places are complex numbers, in inches of a drawing at full size.
"""

from __future__ import annotations

import cmath
import io
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, BackendError, message, shown
from ..lowering import lower
from ..schedule import Schedule, fluid_rate, simulate
from ..schedule.simulate import way
from ..topology import Topology

PANELS: Final = 12
"""How many trees of a schedule are drawn; the others are counted."""

_REDUCE, _COPY = "#2166ac", "#e08214"  # a blue and an orange that colour-blind readers can tell apart
_INK, _GREY, _PALE = "#1b1f24", "#c3cad2", "#eef1f4"
# Shades of bandwidth, from slow to fast: ColorBrewer's YlGnBu without its palest (colorbrewer2.org).
_SHADES: Final = ("#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")
_NODE: Final = 0.16  # half of a node's height
_TOP: Final = math.pi / 2
_READABLE: Final = 0.45  # the scale from which on names can be read
_DPI, _PIXELS = 150, 8000  # a PNG's dots an inch, and the most along a side: below 200 MB while it is drawn


def draw_topology(topology: Topology, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw devices, switches and links; the thicker and darker a link, the more GB/s it carries.

    Devices stand on a grid where the links are those of a mesh or torus of 2 or 3 dimensions, else on a circle,
    clockwise in the topology's order, with the switches inside. Several hosts stand in two rows, in a frame each,
    with the network between the rows.

    Args:
      topology: any.
      path: a file that ends in .svg or .png; one that is there is replaced.
      title: ``None``: how many devices, switches and links there are.
    Raises:
      ArgumentError: no topology, or a path of another kind.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    if not isinstance(topology, Topology):
        raise ArgumentError(message("this is no topology to draw.", shown(topology), "Topology.ring(4)"))
    counts = {"device": topology.devices, "switch": topology.switches, "link": topology.links}
    many = {"switch": "switches"}
    head = ", ".join(
        f"{len(parts)} {what if len(parts) == 1 else many.get(what, what + 's')}"
        for what, parts in counts.items()
        if parts
    )
    layout = _layout(topology)
    wide, high = layout.size
    width = max(wide, 5.2)
    shade = _shades(topology)
    lines: dict[tuple[str, Any, float, bool], list[list[complex]]] = {}  # by label, colour, width and evenness
    for link in topology.links:
        back = topology.link(link.dst, link.src)
        even = back is not None and back.bandwidth == link.bandwidth
        if even and layout.order[link.src] > layout.order[link.dst]:
            continue  # one line shows both directions
        side = 0.0 if back is None or even else 0.05
        line = layout.line(link.src, link.dst) if even else layout.arrow(link.src, link.dst, side)
        lines.setdefault((*shade(link.bandwidth), even), []).append(line)
    columns = int(width / 2.6)
    foot = 0.3 + 0.2 * math.ceil(len(lines) / columns)
    with _figure(path, width, foot + high + 0.5, title or head) as figure:
        ax = _panel(figure, layout, (width - wide) / 2, foot, 1)
        _nodes(ax, topology, layout, 1)
        for (label, colour, thick, even), drawn in sorted(lines.items(), key=lambda kind: (-kind[0][2], kind[0][3])):
            _lines(ax, drawn, colour, thick, 0 if even else 0.13)
            words = f"{label} {'each' if even else 'one'} way: {len(drawn)}"
            ax.plot([], [], color=colour, linewidth=thick, marker=None if even else ">", label=words)
        if lines:
            figure.legend(loc="lower center", ncols=min(columns, len(lines)), frameon=False, fontsize=9)


def draw_schedule(
    schedule: Schedule, topology: Topology, path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw the trees of a schedule, each on a small map of the topology, and how busy each link is.

    Chunks that take the same way share a panel. Blue arrows lead to the roots, the devices that first hold
    the whole result; orange ones carry it on. The last panel shades each link by the time that its bytes need,
    relative to the busiest link's. The first ``PANELS`` trees are drawn, the others counted.

    Args:
      schedule: one that is right: a tree needs a root.
      topology: where it runs.
      path: a file that ends in .svg or .png; one that is there is replaced.
      title: ``None``: the schedule's kind and counts, and the rate that the busiest link allows.
    Raises:
      ArgumentError: no schedule or topology, or a path of another kind.
      PlanError: a move for which the topology has no way.
      ScheduleError: the schedule does not compute what it claims.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    if not isinstance(schedule, Schedule) or not isinstance(topology, Topology):
        given = f"{shown(schedule)}, {shown(topology)}"
        raise ArgumentError(message("this is no schedule on a topology to draw.", given, "plan.schedule, topology"))
    trees = _trees(schedule, topology)
    layout = _layout(topology)
    rate = fluid_rate(schedule, topology)
    head = schedule.head + ("" if rate is None else f"\nthe busiest link allows {float(rate):.4g} GB/s")
    shown_trees = trees[:PANELS]
    columns = math.ceil(math.sqrt(len(shown_trees)))
    rows = math.ceil(len(shown_trees) / columns)
    # Panels of so many inches for a tree, more for the one of the links' use; names can be read from 2.4 on mostly.
    small = min(1, max((2.4 if len(trees) > 4 else 3.4) / max(layout.size), 0.3))
    wide, high = max(layout.size[0] * small, 1.7), layout.size[1] * small + 0.35
    large = min(1.4, max((high * rows - 0.35) / layout.size[1], 4.2 / max(layout.size), 0.6))
    across, tall = max(layout.size[0] * large, 3.2), layout.size[1] * large + 0.35
    foot = 0.9
    width = max(wide * columns + 0.2 + across, 6.5)
    height = max(high * rows, tall) + foot
    with _figure(path, width, height + 0.7, title or head) as figure:
        for k, tree in enumerate(shown_trees):
            left = wide * (k % columns) + (wide - layout.size[0] * small) / 2
            ax = _panel(figure, layout, left, height - high * (k // columns + 1), small)
            ax.set_title(tree.title, fontsize=9, pad=3)
            _tree(ax, topology, layout, small, tree)
        left = width - (across + layout.size[0] * large) / 2
        ax = _panel(figure, layout, left, (height - foot - tall) / 2 + foot, large)
        _use(ax, schedule, topology, layout, large)
        for label, colour in (("to the root", _REDUCE), ("from the root", _COPY)):
            ax.plot([], [], color=colour, linewidth=2, marker=">", label=label)
        ax.plot([], [], color=_INK, marker="s", markersize=8, linestyle="", label="root")
        figure.legend(loc="lower left", ncols=3, frameon=False, fontsize=9)
        if len(trees) > PANELS:
            rest = sum(tree.share for tree in trees[PANELS:])
            words = f"and {len(trees) - PANELS} more trees, {rest} of the buffer"
            figure.text(0.15 / width, 0.5 / (height + 0.7), words, fontsize=9)


# Where things stand.


@dataclass(frozen=True)
class _Layout:
    """Where each node stands, the frames of the hosts (name, lower left, upper right), and which links are bent."""

    places: dict[str, complex]
    hosts: tuple[tuple[str, complex, complex], ...] = ()
    bent: frozenset[frozenset[str]] = frozenset()

    @cached_property
    def order(self) -> dict[str, int]:
        return {node: number for number, node in enumerate(self.places)}

    @cached_property
    def corners(self) -> tuple[complex, complex]:
        """The lower left and upper right corner of everything."""
        points = [*self.places.values(), *(point for a, b in self.bent for point in self.line(a, b))]
        points += [corner for _, *frame in self.hosts for corner in frame]
        x, y = [point.real for point in points], [point.imag for point in points]
        return complex(min(x) - 0.4, min(y) - 0.3), complex(max(x) + 0.4, max(y) + 0.3)

    @property
    def size(self) -> tuple[float, float]:
        span = self.corners[1] - self.corners[0]
        return span.real, span.imag

    def line(self, src: str, dst: str, side: float = 0.0) -> list[complex]:
        """Return the points of a link, shifted to the right of its direction by ``side``."""
        a, b = self.places[src], self.places[dst]
        left = 1j * (b - a) / abs(b - a)
        a, b = a - side * left, b - side * left
        if frozenset((src, dst)) not in self.bent:
            return [a, b]
        top = (a + b) / 2 + left * (0.8 if self.order[src] < self.order[dst] else -0.8)
        return [(1 - t) ** 2 * a + 2 * t * (1 - t) * top + t * t * b for t in (k / 16 for k in range(17))]

    def arrow(self, src: str, dst: str, side: float = 0.0) -> list[complex]:
        """Return the points of a link from rim to rim, so that no node hides an arrow's head."""
        return self._outside(dst, self._outside(src, self.line(src, dst, side))[::-1])[::-1]

    def _outside(self, node: str, points: list[complex]) -> list[complex]:
        """Cut off where a line starts under its node's box."""
        centre, wide, high = self.places[node], _half(node) + 0.05, _NODE + 0.05
        offs = [point - centre for point in points]
        left = next((k for k, off in enumerate(offs) if abs(off.real) > wide or abs(off.imag) > high), len(offs) - 1)
        start, way = offs[left - 1], offs[left] - offs[left - 1]
        most = 0.4 if len(points) == 2 else 1.0  # of neighbours that are too near, something is left between them
        x = (math.copysign(wide, way.real) - start.real) / (way.real or 1e-9)
        y = (math.copysign(high, way.imag) - start.imag) / (way.imag or 1e-9)
        return [points[left - 1] + way * min(abs(x), abs(y), most), *points[left:]]


def _towards(a: complex, b: complex, distance: float) -> complex:
    return a + (b - a) * distance / abs(b - a)


def _label(node: str) -> str:
    """Return a name without its host's."""
    return node.rpartition("/")[2]


def _half(node: str) -> float:
    """Return half of a node's width."""
    return max(0.22, 0.036 * len(_label(node)) + 0.05)


def _layout(topology: Topology) -> _Layout:
    near: dict[str, set[str]] = {node: set() for node in topology.nodes}
    for link in topology.links:
        near[link.src].add(link.dst)
        near[link.dst].add(link.src)
    hosts: dict[str, list[str]] = {}
    for device in topology.devices:
        hosts.setdefault(parse(device).host, []).append(device)
    switches = [switch.name for switch in topology.switches]
    if len(hosts) > 1:
        return _hosts(hosts, switches, near)
    shape = None if switches else _grid(topology.devices, near)
    return (
        _Layout(_circle(topology.devices, switches, near)) if shape is None else _on_grid(topology.devices, near, shape)
    )


def _grid(devices: Sequence[str], near: dict[str, set[str]]) -> tuple[int, ...] | None:
    """Return the shape of the mesh or torus that devices make row by row, or ``None``."""
    n = len(devices)
    sides = [side for side in range(2, n) if n % side == 0]
    shapes = [(a, n // a) for a in sides] + [(a, b, n // (a * b)) for a in sides for b in sides if n // (a * b) > 1]
    for shape in sorted(
        (shape for shape in shapes if math.prod(shape) == n), key=lambda shape: (len(shape), sum(shape))
    ):
        cells = dict(zip(devices, product(*map(range, shape)), strict=True))
        pairs = [(cells[a], cells[b]) for a in devices for b in near[a] if cells[a] < cells[b]]
        due = sum(n // side * (side - 1) for side in shape)  # links between neighbours
        if all(_step(*pair, shape) for pair in pairs) and sum(_step(*pair, shape) == 1 for pair in pairs) == due:
            return shape
    return None


def _step(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> int:
    """Return 1 for neighbours on a grid, the distance round a torus' end, or 0 for others."""
    steps = [(abs(x - y), side) for x, y, side in zip(a, b, shape, strict=True) if x != y]
    return steps[0][0] if len(steps) == 1 and steps[0][0] in (1, steps[0][1] - 1) else 0


def _on_grid(devices: Sequence[str], near: dict[str, set[str]], shape: tuple[int, ...]) -> _Layout:
    cells = dict(zip(devices, product(*map(range, shape)), strict=True))
    # A third dimension goes back: up and to the right, within the gap to the next column.
    gap = 1.0 if len(shape) == 2 else 0.8 * (shape[0] + 1)
    places = {
        device: complex(column, -row) * gap + sum(depth * (0.75 + 0.5j) for depth in deep)
        for device, (*deep, row, column) in cells.items()
    }
    bent = {frozenset((a, b)) for a in devices for b in near[a] if _step(cells[a], cells[b], shape) > 1}
    return _Layout(places, bent=frozenset(bent))


def _circle(devices: Sequence[str], switches: Sequence[str], near: dict[str, set[str]]) -> dict[str, complex]:
    """Place devices on a circle, clockwise from the top, and switches inside it, the further away the further in."""
    levels = _levels(devices, switches, near)
    radii: list[float] = []
    for level in reversed(levels):
        radii.insert(0, max(_radius(len(level), 1.0), radii[0] + 0.8 if radii else 0.0))
    radius = max(_radius(len(devices), 1.1 if len(devices) <= 16 else 0.72), radii[0] + 0.8 if radii else 0.0)
    places = {device: cmath.rect(radius, _TOP - k * math.tau / len(devices)) for k, device in enumerate(devices)}
    for level, distance in zip(levels, radii, strict=True):
        places |= _spread(level, distance, places, near)
    return places


def _hosts(hosts: dict[str, list[str]], switches: Sequence[str], near: dict[str, set[str]]) -> _Layout:
    """Place hosts in two rows, above and below the network between them."""
    host_of = {device: host for host, devices in hosts.items() for device in devices}
    own: dict[str | None, list[str]] = {None: [], **{host: [] for host in hosts}}
    for switch in switches:
        named = switch.partition("/")[0]
        around = {named} if named in hosts else {host_of[node] for node in near[switch] if node in host_of}
        own[around.pop() if len(around) == 1 else None].append(switch)
    inner = {host: _host(devices, own[host], near) for host, devices in hosts.items()}
    wide = max(abs(place.real) for places in inner.values() for place in places.values()) * 2 + 1.0
    high = max(place.imag for places in inner.values() for place in places.values())
    core = _levels({node for places in inner.values() for node in places}, own[None], near)
    middle = 0.9 + 0.45 * len(core)  # from the network's middle to the hosts' lowest row
    across = math.ceil(len(hosts) / 2)
    places: dict[str, complex] = {}
    frames = []
    for k, (host, within) in enumerate(inner.items()):
        column, side = (k, 1j) if k < across else (k - across, -1j)
        left = (column - across / 2) * wide
        places |= {node: left + wide / 2 + place.real + side * (middle + place.imag) for node, place in within.items()}
        ends = sorted(((side * (middle - 0.35)).imag, (side * (middle + high + 0.35)).imag))
        frames.append((host or "this host", complex(left + 0.1, ends[0]), complex(left + wide - 0.1, ends[1])))
    for depth, level in enumerate(core):
        gap = max(0.8, 0.6 * across * wide / len(level))
        places |= _row(level, 0.9j * ((len(core) - 1) / 2 - depth), gap, places, near)
    return _Layout(places, tuple(frames))


def _host(devices: Sequence[str], switches: Sequence[str], near: dict[str, set[str]]) -> dict[str, complex]:
    """Place one of several hosts: what leads out of it in the lowest row, then the devices, then its other switches.

    Devices that are linked to each other stand on a circle instead.
    """
    inside = {*devices, *switches}
    gates = [switch for switch in switches if not near[switch] <= inside]
    others = [switch for switch in switches if switch not in gates]
    base = 0.9j if gates else 0j
    if any(near[device] & set(devices) for device in devices):
        ring = _circle(devices, others, near)
        lowest = min(place.imag for place in ring.values())
        places = {node: place - 1j * lowest + base for node, place in ring.items()}
    else:
        places = {device: base + 0.8 * (k - (len(devices) - 1) / 2) for k, device in enumerate(devices)}
        for depth, level in enumerate(_levels(devices, others, near), start=1):
            places |= _row(level, base + 0.9j * depth, max(0.9, 0.8 * len(devices) / len(level)), places, near)
    return places | _row(gates, 0j, 0.8, places, near)


def _row(
    nodes: Sequence[str], middle: complex, gap: float, places: dict[str, complex], near: dict[str, set[str]]
) -> dict[str, complex]:
    """Place nodes in a row, in the order of their neighbours' middles."""

    def wish(node: str) -> float:
        x = [places[other].real for other in near[node] if other in places]
        return round(math.fsum(x) / len(x), 6) if x else 0.0

    return {node: middle + gap * (k - (len(nodes) - 1) / 2) for k, node in enumerate(sorted(nodes, key=wish))}


def _levels(outside: Collection[str], switches: Sequence[str], near: dict[str, set[str]]) -> list[list[str]]:
    """Sort switches by how many links they are away from what is outside."""
    levels, front, left = [], set(outside), list(switches)
    while left:
        level = [switch for switch in left if near[switch] & front] or left
        levels.append(level)
        front, left = set(level), [switch for switch in left if switch not in level]
    return levels


def _radius(count: int, gap: float) -> float:
    """Return the radius of a circle on which ``count`` nodes are ``gap`` apart."""
    return 0.0 if count < 2 else gap / (2 * math.sin(math.pi / count))


def _spread(
    nodes: Sequence[str], radius: float, places: dict[str, complex], near: dict[str, set[str]]
) -> dict[str, complex]:
    """Place nodes evenly on a circle, each as near as can be to the direction of its neighbours."""
    seam = _TOP + 0.1  # where the sorting starts: where no node stands, so that rounding does not reorder
    wishes = {
        node: sum((places[other] / abs(places[other]) for other in sorted(near[node] & places.keys())), 0j)
        for node in nodes
    }
    clear = {node: wish for node, wish in wishes.items() if abs(wish) > 1e-6}
    ordered = sorted(nodes, key=lambda node: (seam - cmath.phase(wishes[node])) % math.tau if node in clear else 9)
    slots = {node: cmath.rect(1, _TOP - k * math.tau / len(nodes)) for k, node in enumerate(ordered)}
    turn = sum((wish / abs(wish) / slots[node] for node, wish in clear.items()), 0j)
    return {node: radius * slot * (turn / abs(turn) if abs(turn) > 1e-6 else 1) for node, slot in slots.items()}


# What is drawn.


class _Tree(NamedTuple):
    """Chunks that take the same way: the links on it, by (src, dst, whether it leads from the root)."""

    title: str
    share: Fraction
    roots: frozenset[str]
    links: Counter[tuple[str, str, bool]]


def _trees(schedule: Schedule, topology: Topology) -> list[_Tree]:
    """Return what each chunk's moves make, chunks of the same moves together."""
    program = lower(schedule)
    roots = [
        frozenset(chunk.sources if len(chunk.sources) == 1 else (i.device for i in chunk.instructions if i.final))
        for chunk in program.chunks
    ]
    moves: list[list[tuple[int, int, tuple[str, ...] | None, bool]]] = [[] for _ in program.chunks]
    for transfers in program.transfers:
        for c, src, dst, through, final in transfers:
            moves[c].append((src, dst, through, final))
    alike: dict[Any, list[int]] = {}
    for c, made_of in enumerate(moves):
        alike.setdefault((roots[c], tuple(made_of)), []).append(c)
    trees = []
    for (held, made_of), chunks in alike.items():
        links: Counter[tuple[str, str, bool]] = Counter()
        for src, dst, nodes, copies in made_of:
            pairs = way(topology, schedule.devices[src], schedule.devices[dst], nodes)
            links.update((*pair, copies) for pair in pairs)
        share = sum((schedule.chunks[c].share for c in chunks), Fraction(0))
        title = "the whole buffer" if share == 1 else f"{share} of the buffer"
        trees.append(_Tree(title, share, frozenset(schedule.devices[d] for d in held), links))
    return trees


def _tree(ax: Any, topology: Topology, layout: _Layout, scale: float, tree: _Tree) -> None:
    _wires(ax, topology, layout, scale)
    for copies, colour in ((False, _REDUCE), (True, _COPY)):
        arrows = []
        for src, dst, kind in tree.links:
            if kind is copies:  # opposite ways keep right; a copy goes outside a sum that goes the same way
                side = 0.14 if copies and (src, dst, False) in tree.links else 0.05
                arrows.append(layout.arrow(src, dst, side))
        _lines(ax, arrows, colour, 1.6 * scale**0.5, 0.16)
    _nodes(ax, topology, layout, scale, tree.roots)


def _use(ax: Any, schedule: Schedule, topology: Topology, layout: _Layout, scale: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    busy = simulate(schedule, topology, 1 << 30).busy
    most = max(busy.values(), default=0.0) or 1.0
    shades = LinearSegmentedColormap.from_list("use", ["#f0d4e6", "#c2459d", "#4d004b"])
    _wires(ax, topology, layout, scale)
    used = sorted((seconds, pair) for pair, seconds in busy.items() if seconds)
    arrows = [layout.arrow(*pair, 0.06) for _, pair in used]
    _lines(ax, arrows, [shades(seconds / most) for seconds, _ in used], 2.2 * scale**0.5, 0.16)
    _nodes(ax, topology, layout, scale)
    ax.set_title(f"use of each link: {len(used)} of {len(topology.links)} carry data", fontsize=9, pad=3)
    wide, high = ax.figure.get_size_inches()
    bar = ax.figure.add_axes((1 - 2.6 / wide, 0.5 / high, 2.3 / wide, 0.12 / high))
    ax.figure.colorbar(ScalarMappable(Normalize(0, 100), shades), cax=bar, orientation="horizontal")
    bar.set_xlabel("% of the busiest link's time", fontsize=8)
    bar.tick_params(labelsize=7)


def _panel(figure: Any, layout: _Layout, left: float, bottom: float, scale: float) -> Any:
    """Return axes for a map of the layout, with their lower left corner at a place of the figure, in inches."""
    from matplotlib.patches import Rectangle

    wide, high = figure.get_size_inches()
    (low, up), (across, tall) = layout.corners, layout.size
    ax = figure.add_axes((left / wide, bottom / high, across * scale / wide, tall * scale / high))
    ax.set_axis_off()
    ax.set_xlim(low.real, up.real)
    ax.set_ylim(low.imag, up.imag)
    for name, corner, opposite in layout.hosts:
        span = opposite - corner
        ax.add_patch(
            Rectangle((corner.real, corner.imag), span.real, span.imag, facecolor="#f6f8fa", edgecolor=_GREY, lw=scale)
        )
        upper = corner.imag > 0  # the name stands on the side that no link leaves
        y, va = (opposite.imag + 0.04, "bottom") if upper else (corner.imag - 0.06, "top")
        if scale >= _READABLE:
            ax.text(corner.real, y, name, va=va, fontsize=9 * scale, color=_INK)
    return ax


def _wires(ax: Any, topology: Topology, layout: _Layout, scale: float) -> None:
    """Draw all links as a pale background."""
    pairs = {frozenset((link.src, link.dst)): (link.src, link.dst) for link in topology.links}
    _lines(ax, [layout.line(*pair) for pair in pairs.values()], _GREY, 0.8 * scale, 0)


def _nodes(ax: Any, topology: Topology, layout: _Layout, scale: float, roots: Collection[str] = ()) -> None:
    """Draw devices as white boxes, switches as grey ones; roots and switches that reduce are black."""
    from matplotlib.patches import FancyBboxPatch

    dark = {*roots, *(switch.name for switch in topology.switches if switch.reduces)}
    for node, place in layout.places.items():
        device = node in topology.devices
        half = _half(node)
        box = FancyBboxPatch(
            (place.real - half + 0.08, place.imag - _NODE + 0.08),
            2 * half - 0.16,
            2 * _NODE - 0.16,
            boxstyle=f"round,pad=0.08,rounding_size={0.08 if device else 0.01}",
            facecolor=_INK if node in dark else "white" if device else _PALE,
            edgecolor=_INK if device else "#6b7683",
            linewidth=scale,
            zorder=4,
        )
        ax.add_patch(box)
        if scale < _READABLE:
            continue
        ink = "white" if node in dark else _INK
        ax.text(
            place.real,
            place.imag,
            _label(node),
            ha="center",
            va="center_baseline",
            fontsize=7.5 * scale,
            color=ink,
            zorder=5,
        )


def _lines(ax: Any, lines: list[list[complex]], colours: Any, width: float, head: float) -> None:
    """Draw lines of one colour or of one each; with arrow heads of ``head`` inches where it is not 0."""
    from matplotlib.collections import LineCollection, PolyCollection

    heads = []
    if head:
        shortened = []
        for *points, last in lines:
            back = _towards(last, points[-1], head)
            wing = 0.4j * (last - back)
            heads.append([(point.real, point.imag) for point in (last, back + wing, back - wing)])
            shortened.append([*points, back])
        lines = shortened
    drawn = [[(point.real, point.imag) for point in line] for line in lines]
    ax.add_collection(LineCollection(drawn, colors=colours, linewidths=width, zorder=2), autolim=False)
    ax.add_collection(PolyCollection(heads, facecolors=colours, edgecolors="none", zorder=3), autolim=False)


def _shades(topology: Topology) -> Callable[[Fraction], tuple[str, str, float]]:
    """Return what gives each bandwidth a label, a colour and a width in points."""
    speeds = sorted({link.bandwidth for link in topology.links})
    exact = len(speeds) <= len(_SHADES)
    steps = len(speeds) if exact else len(_SHADES)
    apart = min(3, 5 // max(1, steps - 1))
    thin = min(1.0, math.sqrt(60 / max(1, len(topology.links))))

    def shade(speed: Fraction) -> tuple[str, str, float]:
        low, step = speeds[0], (speeds[-1] - speeds[0]) / steps
        level = speeds.index(speed) if exact else min(int((speed - low) / step), steps - 1)
        top = speed if exact else low + step * (level + 1)
        label = f"{float(speed):.4g} GB/s" if exact else f"{float(top - step):.3g} to {float(top):.3g} GB/s"
        width = thin * (0.8 + 3 * math.sqrt(top / speeds[-1]))
        return label, _SHADES[5 - apart * (steps - 1 - level)], max(width, 0.4)

    return shade


@contextmanager
def _figure(path: str | os.PathLike[str], width: float, height: float, title: str) -> Iterator[Any]:
    """Yield a figure of so many inches, and write it to ``path`` when the block is left without an error."""
    kind = os.fspath(path).lower().rpartition(".")[2] if isinstance(path, (str, os.PathLike)) else ""
    if kind not in ("svg", "png"):
        raise ArgumentError(message("a picture is an SVG or a PNG file.", shown(path), '"topology.svg"'))
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            f"pictures need matplotlib, which cannot be imported: {error}\n  try:   pip install 'crossreduce[plot]'"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Text as text, so that it can be searched; names are no formulas; no salt of its own in each file.
        matplotlib.rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "crossreduce"})
        figure = Figure(figsize=(width, height), dpi=min(_DPI, _PIXELS / max(width, height)))
        figure.suptitle(title, fontsize=12, y=1 - 0.15 / height)
        yield figure
        drawn = io.BytesIO()
        if kind == "svg":
            figure.savefig(drawn, format=kind, metadata={"Date": None, "Creator": "crossreduce", "Title": title})
        else:
            figure.savefig(drawn, format=kind, metadata={"Software": None, "Title": title})
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / target.name
        part.write_bytes(drawn.getvalue())
        part.replace(target)
