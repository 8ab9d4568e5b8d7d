"""The chart of ``crossreduce bench --against``: the ratios of its report over the sizes.

Input: the report, as in its JSON. Output: an SVG or PNG file.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final, NamedTuple

from ...export.pictures import new_figure
from ...planning.explain import size
from .ranks import PEERS as RANK_PEERS


class _Theme(NamedTuple):
    paper: str
    ink: str
    text: str  # the colour of less important text
    line: str
    good: str  # the colour of crossreduce
    colours: tuple[str, ...]


# Colours that colour-blind readers can tell apart: Okabe and Ito's (jfly.uni-koeln.de/color), brighter on dark.
_LIGHT: Final = _Theme(
    *("#ffffff", "#1f2328", "#59636e", "#d8dee4", "#1a7f37"),
    ("#0072b2", "#d55e00", "#cc79a7", "#1f2328", "#b58900", "#56b4e9"),
)
_DARK: Final = _Theme(
    *("#0d1117", "#f0f6fc", "#9198a1", "#30363d", "#3fb950"),
    ("#4aa3df", "#ff8c42", "#e39cc6", "#f0f6fc", "#e6c229", "#7fd1ff"),
)
_MARKERS: Final = "osv^DP"
_NAMES: Final = {
    "jax": "JAX",
    "tensorflow": "TensorFlow",
    "torch": "torch",
    "numpy": "NumPy loop",
    "gloo": "gloo",
    "mpi": "MPI",
}


def draw_ratios(report: dict[str, Any], path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Draw the times of each peer's fastest way as multiples of crossreduce's, over the sizes; both axes logarithmic.

    Dashed lines are ranks, dotted lines processes that keep memory.

    Args:
      report: the content of the file of ``crossreduce bench --against --json``.
      path: a file that ends in .svg or .png; an existing file is replaced.
      dark: whether the background is dark.
    Raises:
      ArgumentError: an invalid path.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    theme, rows, config, machine = _DARK if dark else _LIGHT, report["rows"], report["config"], report["machine"]
    sizes = sorted({row["size"] for row in rows})
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    title = "Time of other libraries, as a multiple of crossreduce's time"
    width, height = 9.4, 5.2
    with new_figure(path, width, height, title) as drawn:
        drawn.set_facecolor(theme.paper)
        drawn.suptitle(title, fontsize=12, y=1 - 0.15 / height, color=theme.ink, weight="bold")
        axes = drawn.add_axes((0.07, 0.17, 0.74, 0.69))
        axes.set_facecolor(theme.paper)
        least, most = 1.0, 1.0
        for number, peer in enumerate(peers):
            colour, marker = theme.colours[number % 6], _MARKERS[number % 6]
            for memory in ("default", "kept"):
                points = [
                    (row["size"], found["ways"][found["fastest"]]["ratio"])
                    for row in rows
                    if row["memory"] == memory
                    and (found := row["peers"].get(peer)) is not None
                    and found["fastest"] is not None
                ]
                if not points:
                    continue
                least, most = min(least, *(y for _, y in points)), max(most, *(y for _, y in points))
                label = _NAMES[peer] + (f", {config['devices']} ranks" if peer in RANK_PEERS else "")
                kept = memory == "kept"
                line = ":" if kept else "--" if peer in RANK_PEERS else "-"
                axes.plot(
                    *zip(*points, strict=True),
                    linestyle=line,
                    color=colour,
                    marker=marker,
                    markersize=4 if kept else 6,
                    markerfacecolor=theme.paper if kept else colour,
                    label=f"{label}, kept memory" if kept else label,
                )
        axes.axhline(1, color=theme.good, linewidth=2)
        axes.text(1.01, 1, "crossreduce = 1", color=theme.good, va="center", weight="bold", fontsize=10,
                  transform=axes.get_yaxis_transform())  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(least / 1.3, most * 1.3)
        axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes], minor=False)
        ticks = [k * 10.0**power for power in range(math.floor(math.log10(least)), 4) for k in (1, 2, 5)]
        ticks = [tick for tick in ticks if least / 1.3 <= tick <= most * 1.3]
        axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.tick_params(colors=theme.text, labelsize=9)
        axes.grid(color=theme.line, linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=theme.line)
        handles, labels = axes.get_legend_handles_labels()
        legend = drawn.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.815, 0.87), frameon=False,
                              fontsize=9, labelcolor=theme.ink)  # fmt: skip
        legend.set_in_layout(False)
        place = f"{machine['cores']} cores of an {machine['cpu']}"
        about = f"{config['collective']}, {config['op']} of {config['type']}, {config['devices']} devices"
        for k, text in enumerate((f"bytes per device; {about}; medians on {place}", _foot(report))):
            drawn.text(0.07, 0.075 - 0.04 * k, text, color=theme.text, fontsize=9)


def _foot(report: dict[str, Any]) -> str:
    """Return the note about results that share memory."""
    ways = [
        (peer, found["ways"][found["fastest"]])
        for row in report["rows"]
        for peer, found in row["peers"].items()
        if found["fastest"] is not None
    ]
    names = list(dict.fromkeys(_NAMES[peer] for peer, way in ways if way["one_result"]))
    return f"{' and '.join(names)}: all devices share one result, so fewer bytes are written." if names else ""
