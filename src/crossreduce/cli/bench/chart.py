"""The chart of ``crossreduce bench --against``: the ratios of its report over the sizes.

Input: the report, as in its JSON. Output: an SVG or PNG file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ...export.pictures.figure import new_figure
from ...planning.explain import size
from .ranks import PEERS as RANK_PEERS

DEFAULT, KEPT = "default", "kept"  # whether the processes of a row kept freed memory


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
    ("#0072b2", "#d55e00", "#cc79a7", "#1f2328", "#b58900", "#56b4e9", "#009e73"),
)
_DARK: Final = _Theme(
    *("#0d1117", "#f0f6fc", "#9198a1", "#30363d", "#3fb950"),
    ("#4aa3df", "#ff8c42", "#e39cc6", "#f0f6fc", "#e6c229", "#7fd1ff", "#33c79a"),
)
_MARKERS: Final = "osv^DPX"
_NAMES: Final = {
    "jax": "JAX",
    "tensorflow": "TensorFlow",
    "torch": "torch",
    "numpy": "NumPy loop",
    "gloo": "gloo",
    "mpi": "MPI",
    "impi": "Intel MPI",
}


class FastestWay(NamedTuple):
    """The fastest of the ways in which a peer, another library, reduces arrays, such as "loop" of torch."""

    row: dict[str, Any]  # of ``rows`` in the report: the results for one size and one setting of the memory
    peer: str
    way: str
    ratio: float  # its time divided by that of crossreduce
    quartiles: tuple[float, float]  # of the ratios of all rounds
    one_result: bool  # whether all devices share one result array


def fastest_ways(report: dict[str, Any]) -> list[FastestWay]:
    """Return the fastest way of each peer in each row of a report; peers without a way are left out."""
    return [
        FastestWay(
            *(row, peer, measured["fastest"], way["ratio"]),
            tuple(way.get("quartiles", (way["ratio"], way["ratio"]))),  # earlier reports lack them
            way["one_result"],
        )
        for row in report["rows"]
        for peer, measured in row["peers"].items()
        if measured["fastest"] is not None and (way := measured["ways"][measured["fastest"]])
    ]


def draw_ratios(
    report: dict[str, Any],
    path: str | os.PathLike[str],
    fewer_ranks: dict[str, Any] | None = None,
    *,
    dark: bool = False,
) -> None:
    """Draw a line per peer: the time of its fastest way as a multiple of crossreduce's time, over the size.

    Both axes are logarithmic. Dashed lines stand for ranks, and dotted lines for processes that keep freed memory.
    Vertical lines go from the first to the third quartile of the rounds.

    Args:
      report: the content of the file of ``crossreduce bench --against --output``.
      path: a file that ends in .svg or .png; an existing file is replaced.
      fewer_ranks: another such content, of another number of ranks, whose lines have open markers.
      dark: whether the background is dark.
    Raises:
      ArgumentError: an invalid path.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    theme = _DARK if dark else _LIGHT
    config, machine, fastest = report["config"], report["machine"], fastest_ways(report)
    curves = list(_curves(report, [DEFAULT, KEPT])) + list(_curves(fewer_ranks, [DEFAULT]) if fewer_ranks else [])
    ratios = [1.0, *(end for curve in curves for each in curve.points for end in (each.ratio, *each.quartiles))]
    sizes = sorted({row["size"] for row in report["rows"]})
    peers = list(dict.fromkeys(peer for row in report["rows"] for peer in row["peers"]))
    low, high = min(ratios) / 1.3, max(ratios) * 1.3
    title = "Time of other libraries, as a multiple of crossreduce's time"
    if report["crossreduce"].get("exact"):  # reports of versions that had no exact sums lack it
        title += " with exact sums"
    width, height = 9.4, 5.2
    with new_figure(path, width, height, title) as drawn:
        drawn.set_facecolor(theme.paper)
        drawn.suptitle(title, fontsize=12, y=1 - 0.15 / height, color=theme.ink, weight="bold")
        axes = drawn.add_axes((0.07, 0.17, 0.74, 0.73))
        axes.set_facecolor(theme.paper)
        for curve in curves:
            number, xs = peers.index(curve.peer), [each.row["size"] for each in curve.points]
            colour, is_kept = theme.colours[number % len(theme.colours)], curve.label is None
            axes.plot(
                xs,
                [each.ratio for each in curve.points],
                linestyle=":" if is_kept else "--" if curve.peer in RANK_PEERS else "-",
                color=colour,
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4 if is_kept else 6,
                markerfacecolor=theme.paper if is_kept or curve.report is not report else colour,
                label=curve.label,
            )
            if not is_kept:
                axes.vlines(xs, *zip(*(each.quartiles for each in curve.points), strict=True), colors=colour, alpha=0.6)
        if any(row["memory"] == KEPT for row in report["rows"]):
            axes.plot([], [], linestyle=":", color=theme.text, label="keep_memory()")
        axes.axhline(1, color=theme.good, linewidth=2)
        axes.text(1.01, 1, "crossreduce = 1", color=theme.good, va="center", weight="bold", fontsize=10,
                  transform=axes.get_yaxis_transform())  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        labelled = sizes[:: math.ceil(len(sizes) / 11)]  # at most 11 sizes
        axes.set_xticks(labelled, [size(nbytes) for nbytes in labelled])
        ticks = [k * 10.0**power for power in range(-6, 7) for k in (1, 2, 5) if low <= k * 10.0**power <= high]
        axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.tick_params(colors=theme.text, labelsize=9)
        axes.grid(color=theme.line, linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=theme.line)
        handles, labels = axes.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.815, 0.91), frameon=False,
                     fontsize=9, labelcolor=theme.ink)  # fmt: skip
        place = f"{machine['cores']} cores of an {machine['cpu']}"
        about = f"{config['collective']}, {config['op']} of {config['type']}, {config['devices']} devices"
        shared = list(dict.fromkeys(_NAMES[each.peer] for each in fastest if each.one_result))
        foot = f"{' and '.join(shared)}: all devices share one result, so fewer bytes are written." if shared else ""
        counts = sorted({curve.report["config"]["devices"] for curve in curves if curve.peer in RANK_PEERS})
        more = [str(count) for count in counts if count > machine["cores"]]
        if more:
            foot = f"{' and '.join(more)} ranks share {machine['cores']} cores, which is rarely useful. {foot}"
        if fewer_ranks is not None and (cpu := fewer_ranks["machine"]["cpu"]) != machine["cpu"]:
            foot = f"{fewer_ranks['config']['devices']} ranks: {cpu}. {foot}"
        for k, text in enumerate((f"bytes per device; {about}; medians and quartiles on {place}", foot)):
            drawn.text(0.07, 0.075 - 0.04 * k, text, color=theme.text, fontsize=9)


class _Curve(NamedTuple):
    """The points of a peer in a report. ``label``: ``None`` for processes that keep freed memory."""

    report: dict[str, Any]
    peer: str
    label: str | None
    points: list[FastestWay]


def _curves(report: dict[str, Any], memories: list[str]) -> Iterator[_Curve]:
    """Yield the curves of a report for these settings of the memory."""
    fastest = fastest_ways(report)
    for peer in dict.fromkeys(peer for row in report["rows"] for peer in row["peers"]):
        label = _NAMES[peer] + (f", {report['config']['devices']} ranks" if peer in RANK_PEERS else "")
        for memory in memories:
            points = [each for each in fastest if (each.peer, each.row["memory"]) == (peer, memory)]
            if points:
                yield _Curve(report, peer, label if memory == DEFAULT else None, points)
