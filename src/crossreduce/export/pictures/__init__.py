"""Pictures of topologies and schedules, as SVG or PNG files.

A failure leaves the old file and no part of a new one. The same input gives the same SVG. The functions require
matplotlib (the "plot" extra), open no window and do not depend on the caller's matplotlib settings. On a dark page, a
browser shows an SVG in dark colours. Trees of the same shape are drawn once. Large topologies are folded, so that one
box stands for several devices.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections import Counter
from fractions import Fraction
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, shown
from ...schedule import Schedule, fluid_rate, simulate
from ...topology import Topology, TopologyLike, topology_of
from .figure import new_figure, title_height, wrap_title
from .folding import Folding, fold_topology
from .graph_layout import GraphLayout, graph_layout, label
from .grouping import ScheduleTree, tree_groups
from .map_parts import all_links, background, lines, nodes, panel, shades
from .style import COPY, GREY, INK, REDUCE, USES

PANELS: Final = 14  # the largest number of trees in a picture of a schedule

# Of a picture of a schedule, in inches:
_WIDTH: Final = 14.0  # the largest width, unless the caller names one
_LEAST_WIDTH: Final = 5.4  # in which the legend and the scale of shades have room
_AREA: Final = 126.0  # the largest area of all panels
_CELL: Final = 1.9  # the least width of a panel


def draw_topology(topology: TopologyLike, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw devices, switches and links as a picture. Thicker and darker lines are links of more GB/s.

    ``graph_layout`` determines the positions. If there are several hosts, each has a frame. Several hosts with more
    than 40 devices, and hosts with more than 96, are folded: a box stands for a host, or for devices with the same
    links.

    Args:
      topology: the topology, a machine's name or the path of its file.
      path: a file that ends in .svg or .png; an existing file is replaced.
      title: the picture's title, by default the numbers of devices, switches and links.
    Raises:
      ArgumentError: the topology or the path is invalid.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    complete = topology_of(topology)
    plurals = {"device": "devices", "switch": "switches", "link": "links"}
    counts = zip(map(len, (complete.devices, complete.switches, complete.links)), plurals, strict=True)
    head = title or ", ".join(f"{n} {noun if n == 1 else plurals[noun]}" for n, noun in counts if n)
    topology, _, names, note = fold_topology(complete)  # a smaller topology, if there are many devices
    layout = graph_layout(topology, names)
    wide, high = layout.size
    head = f"{head}\n{note}" if note else head
    width = max(wide, min(5.2, 0.4 + 0.105 * max(map(len, head.splitlines()))), 2.2)
    head = wrap_title(head, width)
    shade = shades(topology)
    drawn: dict[tuple[str, Any, float, bool], list[list[complex]]] = {}  # by label, colour, width, whether both ways
    for link in topology.links:
        back = topology.link(link.dst, link.src)
        equal = back is not None and back.bandwidth == link.bandwidth
        if equal and layout.order[link.src] > layout.order[link.dst]:
            continue  # one line shows both directions of a link
        side = 0.0 if back is None or equal else 0.05
        line = layout.line(link.src, link.dst) if equal else layout.arrow(link.src, link.dst, side)
        drawn.setdefault((*shade(link.bandwidth), equal), []).append(line)
    columns = max(1, int(width / 2.6))
    foot = 0.3 + 0.2 * math.ceil(len(drawn) / columns)
    with new_figure(path, width, foot + high + title_height(head), head) as figure:
        ax = panel(figure, layout, (width - wide) / 2, foot, 1)
        nodes(ax, topology, layout, 1)
        for (speed, colour, thick, equal), same in sorted(drawn.items(), key=lambda kind: (-kind[0][2], kind[0][3])):
            lines(ax, same, colour, thick, 0 if equal else 0.13)
            directions = "each way" if equal else "one way"
            text = f"{speed} {directions}: {len(same)}"
            ax.plot([], [], color=colour, linewidth=thick, marker=None if equal else ">", label=text)  # for the legend
        if drawn:
            figure.legend(loc="lower center", ncols=min(columns, len(drawn)), frameon=False, fontsize=9)


def draw_schedule(
    schedule: Schedule,
    topology: TopologyLike,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    width: float = _WIDTH,
) -> None:
    """Draw the trees of a schedule, each on a small map of the topology, and the use of each link.

    Trees of the same shape share a panel, which shows one tree, the number of trees and their share of the buffer (see
    ``tree_groups``). Black nodes are roots (devices that produce the result, or the only source) and reducing switches.
    Blue arrows are partial results, and orange arrows are results. The last panel shades each link by the time that its
    bytes need, relative to the busiest link. The first ``PANELS`` shapes are drawn, and others are only counted. Large
    topologies are folded as by ``draw_topology``. Links between boxes then have the use of the busiest link.

    Args:
      schedule: the schedule.
      topology: as for ``draw_topology``; it must have the schedule's devices.
      path: a file that ends in .svg or .png; an existing file is replaced.
      title: the picture's title, by default the schedule's kind and counts, and the rate that the busiest link allows.
      width: the largest width in inches, at least 5.4. A narrow picture has more rows.
    Raises:
      ArgumentError: the schedule, the topology, the path or the width is invalid.
      PlanError: the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError.of("draw_schedule requires a Schedule.", shown(schedule), "plan.schedule")
    if not isinstance(width, (int, float)) or not _LEAST_WIDTH <= width < math.inf:
        problem = f"the width of a picture of a schedule is a finite number of inches, at least {_LEAST_WIDTH}."
        raise ArgumentError.of(problem, f"width={shown(width)}", f"width={_LEAST_WIDTH}")
    topology = topology_of(topology)
    groups = tree_groups(schedule, topology)
    folding = fold_topology(topology)
    layout = graph_layout(folding.topology, folding.labels)
    rate = fluid_rate(schedule, topology)
    head = title or schedule.head + ("" if rate is None else f"\nthe busiest link allows {float(rate):.4g} GB/s")
    head += f"\n{folding.note}" if folding.note else ""
    shown_groups = groups[:PANELS]
    grid = _grid(len(shown_groups), layout.size, [group.title for group in shown_groups], width)
    names = {} if folding.note else _numbers(topology)
    shade = shades(folding.topology)
    speeds = dict.fromkeys(shade(link.bandwidth) for link in folding.topology.links)
    entries = 4 + len(speeds) + (len(groups) > PANELS)
    columns = max(1, int((grid.width - 2.9) / 2.1))
    foot = max(0.75, 0.25 + 0.2 * math.ceil(entries / columns))
    head = wrap_title(head, grid.width)
    with new_figure(path, grid.width, grid.height + foot + title_height(head), head) as figure:
        for k, group in enumerate(shown_groups):
            column, row = grid.cells[k]
            left = grid.width * column / grid.columns + (grid.width / grid.columns - layout.size[0] * grid.scale) / 2
            bottom = foot + grid.height - grid.cell * (row + 1)
            ax = panel(figure, layout, left, bottom, grid.scale)
            ax.set_title(grid.titles[k], fontsize=9, pad=3, loc="center")
            _tree(ax, folding, layout, grid.scale, group.tree, names)
        column, row = (grid.columns - grid.span, 0) if grid.span > 1 else grid.cells[len(shown_groups)]
        across, tall = grid.width / grid.columns, grid.cell * grid.span
        left = across * (column + grid.span / 2) - layout.size[0] * grid.large / 2
        above_map = max(0.0, tall - layout.size[1] * grid.large - 0.4) / 2 if grid.span > 1 else 0.0
        bottom = foot + grid.height - grid.cell * row - tall + above_map
        ax = panel(figure, layout, left, bottom, grid.large)
        _use(ax, schedule, topology, folding, layout, grid.large, rate)
        for text, colour in (("partial result, to the root", REDUCE), ("result, from the root", COPY)):
            ax.plot([], [], color=colour, linewidth=2, marker=">", label=text)
        ax.plot([], [], color=INK, marker="s", markersize=8, linestyle="", label="root")
        for speed, _, thick in sorted(speeds, key=lambda speed: speed[2]):
            ax.plot([], [], color=GREY, linewidth=max(2 * background(thick), 0.8), label=f"link of {speed}")
        if len(groups) > PANELS:
            rest = sum((group.share for group in groups[PANELS:]), Fraction(0))
            text = f"and {sum(group.count for group in groups[PANELS:])} more trees, {rest} of the buffer"
            ax.plot([], [], linestyle="", label=text)
        figure.legend(loc="lower left", ncols=columns, frameon=False, fontsize=9)


class _Grid(NamedTuple):
    """The cells of a picture of trees. The map of the use of links is at the right, and covers several cells."""

    columns: int
    span: int  # the map of the use of links covers this number of columns and of rows
    cells: list[tuple[int, int]]  # the column and row of each tree
    titles: list[str]
    scale: float  # of the maps of trees
    large: float  # the scale of the map of the use of links
    cell: float  # the height of a row
    width: float
    height: float


def _grid(count: int, size: tuple[float, float], titles: list[str], widest: float) -> _Grid:
    """Return the grid with the largest maps and the fewest empty cells for ``count`` trees and one map of the links.

    ``size`` is the width and height of a map in inches, at full size. ``titles`` has the title of each tree. ``widest``
    is the largest width of the grid in inches.
    """
    span = 1 if count < 4 else 2
    best: tuple[float, _Grid] | None = None
    for columns in range(span, min(count + span**2, int(widest / _CELL)) + 1):
        rows = max(span, math.ceil((count + span**2) / columns))
        # For a map in a cell, below a title of 0.5 inches. A picture that may be wider is not lower.
        room = widest / columns, _AREA / min(widest, _WIDTH) / rows - 0.5
        scale = min(1.0, room[0] / size[0], room[1] / size[1])
        width = max(columns * max(size[0] * scale, _CELL), _LEAST_WIDTH)
        heads = ["\n".join(textwrap.wrap(title, max(12, int(width / columns / 0.08)))) for title in titles]
        cell = size[1] * scale + 0.2 + 0.16 * max(title.count("\n") + 1 for title in heads)
        large = min(1.4, span * width / columns / size[0], (span * cell - 0.4) / size[1]) if span > 1 else scale
        right = columns - span if span > 1 else columns  # the map of the use of links is at the right, or the last one
        cells = [(k, row) for row in range(rows) for k in range(columns) if k < right or row >= span]
        filled = (count * scale**2 + large**2) * size[0] * size[1] / (width * rows * cell)  # the maps' part of the area
        grid = _Grid(columns, span, cells, heads, scale, large, cell, width, rows * cell)
        if best is None or filled * scale > best[0]:
            best = filled * scale, grid
    assert best is not None
    return best[1]


def _numbers(topology: Topology) -> dict[str, str]:
    """Return the number of each device as its short name, or nothing if devices are of several kinds."""
    names = {device: label(device) for device in topology.devices}
    if len({name.partition(":")[0] for name in names.values()}) > 1:
        return {}
    return {device: name.partition(":")[2] for device, name in names.items()}


def _tree(
    ax: Any, folding: Folding, layout: GraphLayout, scale: float, tree: ScheduleTree, names: dict[str, str]
) -> None:
    """Draw a tree on a map of the topology. ``names`` has the short names of devices."""
    all_links(ax, folding.topology, layout, scale)
    links = Counter((folding.boxes[src], folding.boxes[dst], final) for src, dst, final in tree.links)
    for final, colour in ((False, REDUCE), (True, COPY)):
        arrows = []
        for src, dst, is_final in links:
            # Arrows are right of their link. If partial values pass over it, too, a result's arrow is further right.
            if is_final is final and src != dst:
                side = 0.14 if final and (src, dst, False) in links else 0.05
                arrows.append(layout.arrow(src, dst, side))
        lines(ax, arrows, colour, 1.6 * scale**0.5, 0.16)
    nodes(ax, folding.topology, layout, scale, {folding.boxes[root] for root in tree.roots}, names)


def _use(
    ax: Any,
    schedule: Schedule,
    topology: Topology,
    folding: Folding,
    layout: GraphLayout,
    scale: float,
    rate: Fraction | None,
) -> None:
    """Draw the links, shaded by their use, and the scale of the shades."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    nbytes = 1 << 30  # relative times would be the same for other large sizes
    busy = {pair: seconds for pair, seconds in simulate(schedule, topology, nbytes).busy.items() if seconds}
    most = max(busy.values(), default=1.0)
    all_links(ax, folding.topology, layout, scale)
    drawn: dict[tuple[str, str], float] = {}
    for (src, dst), seconds in busy.items():
        pair = folding.boxes[src], folding.boxes[dst]
        if pair[0] != pair[1]:
            drawn[pair] = max(drawn.get(pair, 0.0), seconds)
    used = sorted((seconds, pair) for pair, seconds in drawn.items())
    arrows = [layout.arrow(*pair, 0.06) for _, pair in used]
    lines(
        ax,
        arrows,
        [USES[min(math.ceil(len(USES) * seconds / most), len(USES)) - 1] for seconds, _ in used],
        2.2 * scale**0.5,
        0.16,
    )
    nodes(ax, folding.topology, layout, scale)
    ax.set_title(f"use of each link: {len(busy)} of {len(topology.links)} carry data", fontsize=9, pad=3, loc="center")
    wide, high = ax.figure.get_size_inches()
    bar = ax.figure.add_axes((1 - 2.6 / wide, 0.5 / high, 2.3 / wide, 0.12 / high))
    percents = [100 * k / len(USES) for k in range(len(USES) + 1)]
    scale_bar = ScalarMappable(BoundaryNorm(percents, len(USES)), ListedColormap(USES))
    ax.figure.colorbar(scale_bar, cax=bar, orientation="horizontal", ticks=percents[::2], spacing="proportional")
    milliseconds = 0.0 if rate is None else 1000 / float(rate)
    number = f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"
    slowest = f", {number} ms per GB" if milliseconds else ""
    bar.set_xlabel(f"% of the busiest link's time{slowest}", fontsize=8)
    bar.tick_params(labelsize=7)
