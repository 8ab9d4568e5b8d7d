"""The chart of ``crossreduce bench --against``: the ratios of its report over the sizes.

Input: the report, as in its JSON. Output: an SVG or PNG file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ...export.pictures import style
from ...export.pictures.figure import new_figure, wrap_title
from .ranks import PEERS as RANK_PEERS

DEFAULT, KEPT = "default", "kept"  # whether the processes of a row kept freed memory


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
    width: float = style.WIDTH,
) -> None:
    """Draw a line per peer: the time of its fastest way as a multiple of crossreduce's time, over the size.

    Both axes are logarithmic. Dashed lines with open markers stand for processes that keep freed memory. Vertical lines
    go from the first to the third quartile of the rounds.

    Args:
      report: the content of the file of ``crossreduce bench --against --output``.
      path: a file that ends in .svg or .png; an existing file is replaced.
      fewer_ranks: another such content, of another number of ranks, whose lines are dotted and have open markers.
      width: of the picture, in inches.
    Raises:
      ArgumentError: an invalid path.
      BackendError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    config, machine, fastest = report["config"], report["machine"], fastest_ways(report)
    curves = list(_curves(report, [DEFAULT, KEPT])) + list(_curves(fewer_ranks, [DEFAULT]) if fewer_ranks else [])
    ratios = [1.0, *(end for curve in curves for each in curve.points for end in (each.ratio, *each.quartiles))]
    title = "Time of other libraries, as a multiple of crossreduce's time"
    if report["crossreduce"].get("exact"):  # reports of versions that had no exact sums lack it
        title += " with exact sums"
    with new_figure(path, width, 6.0, title, head=wrap_title(title, width), fit=True) as drawn:
        axes = drawn.subplots()
        for curve in curves:
            is_kept = curve.memory == KEPT
            points = {each.row["size"]: each.ratio for each in curve.points}
            more: dict[str, Any] = {"label": None if is_kept else curve.label}
            if curve.report is not report:
                more |= {"linestyle": ":", "markerfacecolor": style.PAPER}
            style.line(axes, points, _NAMES[curve.peer], dashed=is_kept, **more)
            if not is_kept:
                ends = zip(*(each.quartiles for each in curve.points), strict=True)
                axes.vlines(list(points), *ends, colors=style.look(_NAMES[curve.peer]).colour, alpha=0.6)
        if any(curve.memory == KEPT for curve in curves):
            axes.plot([], [], linestyle="--", marker="o", markerfacecolor=style.PAPER, color=style.TEXT,
                      label="keep_memory()")  # fmt: skip
        axes.axhline(1, color=style.OURS, linewidth=2, label="crossreduce = 1")
        style.size_axis(axes, sorted({row["size"] for row in report["rows"]}))
        style.value_axis(axes, min(ratios) / 1.3, max(ratios) * 1.3, "x")
        style.legend_below(drawn, axes, 3 if width >= style.WIDTH else 2)
        counts = sorted({curve.report["config"]["devices"] for curve in curves if curve.peer in RANK_PEERS})
        crowded = [str(count) for count in counts if count > machine["cores"]]
        shared = list(dict.fromkeys(_NAMES[each.peer] for each in fastest if each.one_result))
        notes = [
            f"bytes per device; {config['collective']}, {config['op']} of {config['type']}, "
            f"{config['devices']} devices; medians and quartiles on {machine['cores']} cores of an {machine['cpu']}"
        ]
        if fewer_ranks is not None and (cpu := fewer_ranks["machine"]["cpu"]) != machine["cpu"]:
            notes.append(f"{fewer_ranks['config']['devices']} ranks: {cpu}.")
        if crowded:
            notes.append(f"{' and '.join(crowded)} ranks share {machine['cores']} cores, which is rarely useful.")
        if counts:
            notes.append("Ranks call crossreduce through torch.")
        if shared:
            notes.append(f"{' and '.join(shared)}: all devices share one result, so fewer bytes are written.")
        style.note(axes, *notes)


class _Curve(NamedTuple):
    """The points of a peer in a report. ``memory``: whether its processes kept freed memory."""

    report: dict[str, Any]
    peer: str
    label: str
    memory: str
    points: list[FastestWay]


def _curves(report: dict[str, Any], memories: list[str]) -> Iterator[_Curve]:
    """Yield the curves of a report for these settings of the memory."""
    fastest = fastest_ways(report)
    for peer in dict.fromkeys(peer for row in report["rows"] for peer in row["peers"]):
        label = _NAMES[peer] + (f", {report['config']['devices']} ranks" if peer in RANK_PEERS else "")
        for memory in memories:
            points = [each for each in fastest if (each.peer, each.row["memory"]) == (peer, memory)]
            if points:
                yield _Curve(report, peer, label, memory, points)
