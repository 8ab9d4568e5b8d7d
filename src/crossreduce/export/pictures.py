"""Pictures of topologies and schedules, as SVG or PNG files.

A failure leaves the old file and no part of a new one. The same input gives the same SVG. The functions require
matplotlib (the "plot" extra), open no window and do not depend on the caller's matplotlib settings.
"""

from __future__ import annotations

import errno
import io
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, BackendError, shown
from ..lowering import lower
from ..schedule import Schedule, fluid_rate, simulate
from ..schedule.traffic import route_links
from ..topology import Topology, TopologyLike, topology_of
from .graph_layout import NODE, GraphLayout, graph_layout, half_width, label, towards

PANELS: Final = 12  # the largest number of trees in a picture of a schedule

_REDUCE, _COPY = "#2166ac", "#e08214"  # a blue and an orange that colour-blind readers can tell apart
_INK, _GREY, _PALE = "#1b1f24", "#c3cad2", "#eef1f4"
# Shades of bandwidth, from slow to fast: ColorBrewer's YlGnBu without its palest (colorbrewer2.org).
_SHADES: Final = ("#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")
_READABLE: Final = 0.45  # names can be read at this scale or a larger one
_DPI, _PIXELS = 150, 8000  # dots per inch of a PNG, and the most pixels of a side: its bitmap takes at most 256 MB


def draw_topology(topology: TopologyLike, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw devices, switches and links; thicker and darker lines are links of more GB/s.

    ``graph_layout`` determines the positions. If there are several hosts, each has a frame.

    Args:
      topology: the topology, a machine's name or the path of its file.
      path: a file that ends in .svg or .png; an existing file is replaced.
      title: the picture's title; ``None``: the numbers of devices, switches and links.
    Raises:
      ArgumentError: an invalid topology or path.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    topology = topology_of(topology)
    plurals = {"device": "devices", "switch": "switches", "link": "links"}
    counts = zip(map(len, (topology.devices, topology.switches, topology.links)), plurals, strict=True)
    head = ", ".join(f"{n} {noun if n == 1 else plurals[noun]}" for n, noun in counts if n)
    layout = graph_layout(topology)
    wide, high = layout.size
    width = max(wide, 5.2)
    shade = _shades(topology)
    lines: dict[tuple[str, Any, float, bool], list[list[complex]]] = {}  # by label, colour, width, whether both ways
    for link in topology.links:
        back = topology.link(link.dst, link.src)
        even = back is not None and back.bandwidth == link.bandwidth
        if even and layout.order[link.src] > layout.order[link.dst]:
            continue  # one line shows both directions of a link
        side = 0.0 if back is None or even else 0.05
        line = layout.line(link.src, link.dst) if even else layout.arrow(link.src, link.dst, side)
        lines.setdefault((*shade(link.bandwidth), even), []).append(line)
    columns = int(width / 2.6)
    foot = 0.3 + 0.2 * math.ceil(len(lines) / columns)
    with new_figure(path, width, foot + high + 0.5, title or head) as figure:
        ax = _panel(figure, layout, (width - wide) / 2, foot, 1)
        _nodes(ax, topology, layout, 1)
        for (speed, colour, thick, even), drawn in sorted(lines.items(), key=lambda kind: (-kind[0][2], kind[0][3])):
            _lines(ax, drawn, colour, thick, 0 if even else 0.13)
            directions = "each way" if even else "one way"
            text = f"{speed} {directions}: {len(drawn)}"
            ax.plot([], [], color=colour, linewidth=thick, marker=None if even else ">", label=text)
        if lines:
            figure.legend(loc="lower center", ncols=min(columns, len(lines)), frameon=False, fontsize=9)


def draw_schedule(
    schedule: Schedule, topology: TopologyLike, path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw the trees of a schedule, each on a small map of the topology, and the use of each link.

    Chunks with the same transfers share a panel. Black nodes are roots (devices that produce the result, or the only
    source) and reducing switches. Blue arrows are partial results, orange ones results. The last panel shades each link
    by the time that its bytes need, relative to the busiest. The first ``PANELS`` trees are drawn, the others counted.

    Args:
      schedule: the schedule.
      topology: has the schedule's devices; given as for ``draw_topology``.
      path: a file that ends in .svg or .png; an existing file is replaced.
      title: the picture's title; ``None``: the schedule's kind and counts, and the rate that the busiest link allows.
    Raises:
      ArgumentError: an invalid schedule, topology or path.
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError.of("draw_schedule requires a Schedule.", shown(schedule), "plan.schedule")
    topology = topology_of(topology)
    trees = _trees(schedule, topology)
    layout = graph_layout(topology)
    rate = fluid_rate(schedule, topology)
    head = schedule.head + ("" if rate is None else f"\nthe busiest link allows {float(rate):.4g} GB/s")
    shown_trees = trees[:PANELS]
    columns = math.ceil(math.sqrt(len(shown_trees)))
    rows = math.ceil(len(shown_trees) / columns)
    # Scales of a tree's panel and of the larger panel of the links. In panels of 2.4 inches most names can be read.
    small = min(1, max((2.4 if len(trees) > 4 else 3.4) / max(layout.size), 0.3))
    wide, high = max(layout.size[0] * small, 1.7), layout.size[1] * small + 0.35
    large = min(1.4, max((high * rows - 0.35) / layout.size[1], 4.2 / max(layout.size), 0.6))
    across, tall = max(layout.size[0] * large, 3.2), layout.size[1] * large + 0.35
    foot = 0.9
    width = max(wide * columns + 0.2 + across, 6.5)
    height = max(high * rows, tall) + foot
    with new_figure(path, width, height + 0.7, title or head) as figure:
        for k, tree in enumerate(shown_trees):
            left = wide * (k % columns) + (wide - layout.size[0] * small) / 2
            ax = _panel(figure, layout, left, height - high * (k // columns + 1), small)
            ax.set_title(tree.title, fontsize=9, pad=3)
            _tree(ax, topology, layout, small, tree)
        left = width - (across + layout.size[0] * large) / 2
        ax = _panel(figure, layout, left, (height - foot - tall) / 2 + foot, large)
        _use(ax, schedule, topology, layout, large)
        for text, colour in (("to the root", _REDUCE), ("from the root", _COPY)):
            ax.plot([], [], color=colour, linewidth=2, marker=">", label=text)
        ax.plot([], [], color=_INK, marker="s", markersize=8, linestyle="", label="root")
        figure.legend(loc="lower left", ncols=3, frameon=False, fontsize=9)
        if len(trees) > PANELS:
            rest = sum(tree.share for tree in trees[PANELS:])
            words = f"and {len(trees) - PANELS} more trees, {rest} of the buffer"
            figure.text(0.15 / width, 0.5 / (height + 0.7), words, fontsize=9)


class _Tree(NamedTuple):
    """Chunks with the same roots and transfers. ``links`` counts values by (src, dst, whether the value is final)."""

    title: str
    share: Fraction
    roots: frozenset[str]
    links: Counter[tuple[str, str, bool]]


def _trees(schedule: Schedule, topology: Topology) -> list[_Tree]:
    """Return the trees of a schedule; chunks with the same roots and transfers are one tree."""
    program = lower(schedule)
    roots = [
        frozenset(chunk.sources if len(chunk.sources) == 1 else (i.device for i in chunk.instructions if i.final))
        for chunk in program.chunks
    ]
    transfers_of: list[list[tuple[Any, ...]]] = [[] for _ in program.chunks]
    for c, *transfer in chain.from_iterable(program.transfers):
        transfers_of[c].append(tuple(transfer))
    alike: dict[Any, list[int]] = {}
    for c, transfers in enumerate(transfers_of):
        alike.setdefault((roots[c], tuple(transfers)), []).append(c)
    trees = []
    for (tops, transfers), chunks in alike.items():
        links: Counter[tuple[str, str, bool]] = Counter()
        for src, dst, through, final in transfers:
            pairs = route_links(topology, program.devices[src], program.devices[dst], through)
            links.update((*pair, final) for pair in pairs)
        share = sum((program.chunks[c].share for c in chunks), Fraction(0))
        title = "the whole buffer" if share == 1 else f"{share} of the buffer"
        trees.append(_Tree(title, share, frozenset(program.devices[device] for device in tops), links))
    return trees


def _tree(ax: Any, topology: Topology, layout: GraphLayout, scale: float, tree: _Tree) -> None:
    """Draw a tree."""
    _all_links(ax, topology, layout, scale)
    for final, colour in ((False, _REDUCE), (True, _COPY)):
        arrows = []
        for src, dst, kind in tree.links:
            # Arrows are right of their link. If partial values pass over it, too, a result's arrow is further right.
            if kind is final:
                side = 0.14 if final and (src, dst, False) in tree.links else 0.05
                arrows.append(layout.arrow(src, dst, side))
        _lines(ax, arrows, colour, 1.6 * scale**0.5, 0.16)
    _nodes(ax, topology, layout, scale, tree.roots)


def _use(ax: Any, schedule: Schedule, topology: Topology, layout: GraphLayout, scale: float) -> None:
    """Draw the links, shaded by their use, and the scale of the shades."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    busy = simulate(schedule, topology, 1 << 30).busy
    most = max(busy.values(), default=0.0) or 1.0
    shades = LinearSegmentedColormap.from_list("use", ["#f0d4e6", "#c2459d", "#4d004b"])
    _all_links(ax, topology, layout, scale)
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


def _panel(figure: Any, layout: GraphLayout, left: float, bottom: float, scale: float) -> Any:
    """Return axes for a map of the layout. ``left`` and ``bottom`` are their position in the figure, in inches."""
    from matplotlib.patches import Rectangle

    wide, high = figure.get_size_inches()
    (low, up), (across, tall) = layout.corners, layout.size
    ax = figure.add_axes((left / wide, bottom / high, across * scale / wide, tall * scale / high))
    ax.set_axis_off()
    ax.set_xlim(low.real, up.real)
    ax.set_ylim(low.imag, up.imag)
    for name, corner, opposite in layout.hosts:
        start, span = (corner.real, corner.imag), opposite - corner
        ax.add_patch(Rectangle(start, span.real, span.imag, facecolor="#f6f8fa", edgecolor=_GREY, lw=scale))
        upper = corner.imag > 0  # the host's name is on the side away from the network
        y, va = (opposite.imag + 0.04, "bottom") if upper else (corner.imag - 0.06, "top")
        if scale >= _READABLE:
            ax.text(corner.real, y, name, va=va, fontsize=9 * scale, color=_INK)
    return ax


def _all_links(ax: Any, topology: Topology, layout: GraphLayout, scale: float) -> None:
    """Draw all links as a pale background."""
    pairs = {frozenset((link.src, link.dst)): (link.src, link.dst) for link in topology.links}
    _lines(ax, [layout.line(*pair) for pair in pairs.values()], _GREY, 0.8 * scale, 0)


def _nodes(ax: Any, topology: Topology, layout: GraphLayout, scale: float, roots: Collection[str] = ()) -> None:
    """Draw devices as white boxes, switches as grey ones; roots and switches that reduce are black."""
    from matplotlib.patches import FancyBboxPatch

    dark = {*roots, *(switch.name for switch in topology.switches if switch.reduces)}
    for node, position in layout.positions.items():
        device, half = node in topology.devices, half_width(node)
        corner = position.real - half + 0.08, position.imag - NODE + 0.08
        style = f"round,pad=0.08,rounding_size={0.08 if device else 0.01}"
        face = _INK if node in dark else "white" if device else _PALE
        edge = _INK if device else "#6b7683"
        box = FancyBboxPatch(corner, 2 * half - 0.16, 2 * NODE - 0.16, style, fc=face, ec=edge, lw=scale, zorder=4)
        ax.add_patch(box)
        if scale >= _READABLE:
            text = ax.text(position.real, position.imag, label(node), ha="center", va="center_baseline", zorder=5)
            text.set(fontsize=7.5 * scale, color="white" if node in dark else _INK)


def _lines(ax: Any, lines: list[list[complex]], colours: Any, width: float, head: float) -> None:
    """Draw lines, in one colour or in one colour per line. Arrow heads are ``head`` inches long; 0: none."""
    from matplotlib.collections import LineCollection, PolyCollection

    heads = []
    if head:
        shortened = []
        for *points, last in lines:
            back = towards(last, points[-1], head)
            wing = 0.4j * (last - back)
            heads.append([(point.real, point.imag) for point in (last, back + wing, back - wing)])
            shortened.append([*points, back])
        lines = shortened
    drawn = [[(point.real, point.imag) for point in line] for line in lines]
    ax.add_collection(LineCollection(drawn, colors=colours, linewidths=width, zorder=2), autolim=False)
    ax.add_collection(PolyCollection(heads, facecolors=colours, edgecolors="none", zorder=3), autolim=False)


def _shades(topology: Topology) -> Callable[[Fraction], tuple[str, str, float]]:
    """Return a function from a bandwidth to a label, a colour and a width in points."""
    speeds = sorted({link.bandwidth for link in topology.links})
    exact = len(speeds) <= len(_SHADES)
    steps = len(speeds) if exact else len(_SHADES)
    apart = min(3, 5 // max(1, steps - 1))
    thin = min(1.0, math.sqrt(60 / max(1, len(topology.links))))

    def shade(speed: Fraction) -> tuple[str, str, float]:
        low, step = speeds[0], (speeds[-1] - speeds[0]) / steps
        level = speeds.index(speed) if exact else min(int((speed - low) / step), steps - 1)
        top = speed if exact else low + step * (level + 1)
        text = f"{float(speed):.4g} GB/s" if exact else f"{float(top - step):.3g} to {float(top):.3g} GB/s"
        width = thin * (0.8 + 3 * math.sqrt(top / speeds[-1]))
        return text, _SHADES[5 - apart * (steps - 1 - level)], max(width, 0.4)

    return shade


@contextmanager
def new_figure(path: str | os.PathLike[str], width: float, height: float, title: str) -> Iterator[Any]:
    """Yield a figure of ``width`` x ``height`` inches, and write it to ``path`` if the block ends without an error."""
    kind = os.fspath(path).lower().rpartition(".")[2] if isinstance(path, (str, os.PathLike)) else ""
    if kind not in ("svg", "png"):
        raise ArgumentError.of("a picture must be a .svg or a .png file.", shown(path), '"topology.svg"')
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        problem = f"pictures need matplotlib, which cannot be imported: {error}"
        raise BackendError.of(problem, remedy="pip install 'crossreduce[plot]'") from error
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Text in files can be searched; names are not formulas; files do not contain a random salt.
        matplotlib.rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "crossreduce"})
        figure = Figure(figsize=(width, height), dpi=min(_DPI, _PIXELS / max(width, height)))
        figure.suptitle(title, fontsize=12, y=1 - 0.15 / height)
        yield figure
        drawn = io.BytesIO()
        about = {"Date": None, "Creator": "crossreduce"} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, metadata=about | {"Title": title})
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        part = Path(folder) / target.name
        part.write_bytes(drawn.getvalue())
        part.replace(target)
