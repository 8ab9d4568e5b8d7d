"""Parts of pictures: a map of a topology, its nodes, its links and arrows, and the shades of bandwidths.

Sizes are in inches. Sizes in a map are multiplied by its scale. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any, Final

from ...topology import Topology
from .graph_layout import NODE, GraphLayout, point_towards
from .style import EDGE, GREY, INK, PALE, PANEL, PAPER, SHADES

_READABLE: Final = 3.3  # the smallest size of a name, in points


def panel(figure: Any, layout: GraphLayout, left: float, bottom: float, scale: float) -> Any:
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
        ax.add_patch(Rectangle(start, span.real, span.imag, facecolor=PANEL, edgecolor=GREY, lw=scale))
        upper = corner.imag > 0  # the host's name is on the side away from the network
        y, va = (opposite.imag + 0.04, "bottom") if upper else (corner.imag - 0.06, "top")
        size = max(9 * scale, 6)
        if scale > 0.25:
            ax.text(corner.real, y, name, va=va, fontsize=size, color=INK)
    return ax


def all_links(ax: Any, topology: Topology, layout: GraphLayout, scale: float) -> None:
    """Draw all links as a pale background. Thicker lines are links of more GB/s."""
    shade = shades(topology)
    by_width: dict[float, dict[frozenset[str], tuple[str, str]]] = {}
    for link in topology.links:
        back = topology.link(link.dst, link.src)
        fastest = max(link.bandwidth, back.bandwidth if back is not None else 0)
        width = background(shade(Fraction(fastest))[2])
        by_width.setdefault(width, {}).setdefault(frozenset((link.src, link.dst)), (link.src, link.dst))
    for width, pairs in sorted(by_width.items()):
        lines(ax, [layout.line(*pair) for pair in pairs.values()], GREY, width * scale**0.5, 0)


def background(width: float) -> float:
    """Return the width of a link in the background, given its width from ``shades``."""
    return 0.45 * width


def nodes(
    ax: Any,
    topology: Topology,
    layout: GraphLayout,
    scale: float,
    roots: Collection[str] = (),
    names: dict[str, str] | None = None,
) -> None:
    """Draw devices as white boxes and switches as grey ones. Roots and switches that reduce are black.

    ``names`` has shorter names of some nodes, which are written in larger letters.
    """
    from matplotlib.patches import FancyBboxPatch

    dark = {*roots, *(switch.name for switch in topology.switches if switch.reduces)}
    devices, names = {*topology.devices}, names or {}
    for node, position in layout.positions.items():
        device, half = node in devices, layout.half_width(node)
        corner = position.real - half + 0.08, position.imag - NODE + 0.08
        style = f"round,pad=0.08,rounding_size={0.08 if device else 0.01}"
        face = INK if node in dark else PAPER if device else PALE
        edge = INK if device else EDGE
        box = FancyBboxPatch(corner, 2 * half - 0.16, 2 * NODE - 0.16, style, fc=face, ec=edge, lw=scale, zorder=4)
        ax.add_patch(box)
        size = (11 if node in names else 7.5) * scale
        if size >= _READABLE:
            name = names.get(node) or layout.label(node)
            text = ax.text(position.real, position.imag, name, ha="center", va="center_baseline", zorder=5)
            text.set(fontsize=size, color=PAPER if node in dark else INK)


def lines(ax: Any, drawn: list[list[complex]], colours: Any, width: float, head: float) -> None:
    """Draw lines in one colour, or in one colour per line. Arrow heads are ``head`` inches long; 0 draws no heads."""
    from matplotlib.collections import LineCollection, PolyCollection

    heads = []
    if head:
        shortened = []
        for *points, last in drawn:
            back = point_towards(last, points[-1], head)
            wing = 0.4j * (last - back)
            heads.append([(point.real, point.imag) for point in (last, back + wing, back - wing)])
            shortened.append([*points, back])
        drawn = shortened
    paths = [[(point.real, point.imag) for point in line] for line in drawn]
    ax.add_collection(LineCollection(paths, colors=colours, linewidths=width, zorder=2), autolim=False)
    ax.add_collection(PolyCollection(heads, facecolors=colours, edgecolors="none", zorder=3), autolim=False)


def shades(topology: Topology) -> Callable[[Fraction], tuple[str, str, float]]:
    """Return a function from a bandwidth to a label, a colour and a width in points."""
    speeds = sorted({link.bandwidth for link in topology.links})
    exact = len(speeds) <= len(SHADES)  # each bandwidth has a shade of its own, rather than each range of bandwidths
    steps = len(speeds) if exact else len(SHADES)
    apart = min(3, 5 // max(1, steps - 1))  # the distance in ``SHADES`` between neighbouring steps
    thin = min(1.0, math.sqrt(60 / max(1, len(topology.links))))  # lines become thinner if they are many

    def shade(speed: Fraction) -> tuple[str, str, float]:
        low, step = speeds[0], (speeds[-1] - speeds[0]) / steps
        level = speeds.index(speed) if exact else min(int((speed - low) / step), steps - 1)
        top = speed if exact else low + step * (level + 1)
        text = f"{float(speed):.4g} GB/s" if exact else f"{float(top - step):.3g} to {float(top):.3g} GB/s"
        width = thin * (0.8 + 3 * math.sqrt(top / speeds[-1]))
        return text, SHADES[5 - apart * (steps - 1 - level)], max(width, 0.4)

    return shade
