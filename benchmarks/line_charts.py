"""Draw rates and times against the size of an array as lines: reductions in host memory, and all-reduces of ranks.

Input: results/host_reduction.json, from host_reduction.py --sizes, and results/processes.json, from processes.py.
Output: host_reduction.png and ranks.svg in docs/pictures. Run: python benchmarks/line_charts.py [CHART ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from common import RESULTS, size_text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
# The colours are those of Okabe and Ito, for colour-blind readers. Contender: (label, colour, marker, dashes).
LINES = {
    "ours, out=": ("crossreduce, into given arrays", "#D55E00", "o", "-"),
    "ours": ("crossreduce, new arrays", "#E69F00", "s", "-"),
    "NumPy loop and copies": ("NumPy loop and copies", "#000000", "x", "--"),
    "torch stack().sum(0), one result": ("torch stack().sum(0)", "#CC79A7", "v", "--"),
    "TensorFlow ReductionToOneDevice": ("TensorFlow ReductionToOneDevice", "#009E73", "^", "--"),
    "TensorFlow HierarchicalCopyAllReduce": ("TensorFlow HierarchicalCopyAllReduce", "#56B4E9", "D", "--"),
    "JAX jit psum": ("JAX psum, jit", "#0072B2", "P", "--"),
}
OURS = "#D55E00"
PEERS = {
    "gloo": ("#000000", "x"),
    "Open MPI": ("#0072B2", "s"),
    "Intel MPI": ("#009E73", "v"),
    "MPICH": ("#CC79A7", "^"),
}
OTHER = ("#56B4E9", "D")


def draw_host(kept: dict[str, Any], picture: Path) -> None:
    """Draw each contender's median rates as a line, and the rate of a copy of the largest size as a dotted line."""
    sizes = sorted(map(int, kept["sizes"]))
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce"})
    figure, axes = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    copy = next(name for name in kept["sizes"][str(sizes[-1])] if name.startswith("np.copyto"))
    rate = kept["sizes"][str(sizes[-1])][copy]["GBps"]
    axes.axhline(rate, color="0.45", linewidth=1.2, linestyle=":")
    axes.text(sizes[0], rate * 1.1, f"copying {size_text(sizes[-1])} arrays: {rate:.0f} GB/s", color="0.3", va="bottom")
    for name, (label, color, marker, dashes) in LINES.items():
        rows = {size: kept["sizes"][str(size)].get(name) for size in sizes}
        xs = [size for size in sizes if rows[size]]
        if not xs:
            continue
        label += " *" * (rows[xs[-1]]["results"] == 1)
        axes.plot(xs, [rows[x]["GBps"] for x in xs], dashes, marker=marker, color=color, label=label, markersize=4.5)
    axes.set(xscale="log", yscale="log", xlabel="bytes per replica (float32)", ylabel="GB/s, read and written")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    machine = kept["machine"]
    axes.set_title(
        f"Sum over {kept['devices']} replicas in host memory: {machine['cpu']}, {machine['cores']} cores", loc="left"
    )
    axes.legend(frameon=False, loc="lower right", title="* one result; the others make one per replica")
    figure.savefig(picture, dpi=120, metadata={"Date" if picture.suffix == ".svg" else "Software": None})
    print(f"drawn: {picture.name}")


def draw_ranks(kept: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each number of ranks of one host and, below, one for each set of hosts."""
    chosen = [row for row in kept["rows"] if row["collective"] == "all_reduce" and row["dtype"] == "float32"]
    panels = [
        [(f"one host, {place}", {"mpi": place, "torch": place}) for place in places(chosen, ("mpi", "torch"))],
        [(f"hosts: {place}", {"hosts": place}) for place in places(chosen, ("hosts",))],
    ]
    panels = [line for line in panels if line]
    if not panels:
        return
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce"})
    figure = plt.figure(figsize=(11, 3.6 * len(panels)), layout="constrained")
    parts = figure.subfigures(len(panels), 1, squeeze=False)[:, 0]
    for part, line in zip(parts, panels, strict=True):
        every = part.subplots(1, len(line), sharey=True, squeeze=False)[0]
        for axes, (title, where) in zip(every, line, strict=True):
            panel(axes, [row for row in chosen if where.get(row["part"]) == row["place"]])
            axes.set_title(title)
        every[0].set_ylabel("microseconds of an all-reduce")
        every[0].legend(fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    print(f"drawn: {picture.name}")


def places(rows: list[dict[str, Any]], parts: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(row["place"] for row in rows if row["part"] in parts))


def panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the lines of one panel; crossreduce has a solid line for NumPy arrays, and a dashed one for tensors."""

    def line(points: list[dict[str, Any]], key: str, style: str, label: str, colour: str) -> None:
        points = sorted(points, key=lambda row: row["bytes"])
        xs, ys = [row["bytes"] for row in points], [row[key] * 1e6 for row in points]
        axes.loglog(xs, ys, style, color=colour, label=label, markersize=4, linewidth=1.2)

    numpy = [row for row in rows if row["part"] == "mpi" and row["form"] == "out="]
    torch = [row for row in rows if row["part"] != "mpi"]
    peers = list(dict.fromkeys(row["peer"] for row in numpy))
    if peers:
        line([row for row in numpy if row["peer"] == peers[0]], "ours_s", "o-", "crossreduce, NumPy", OURS)
    for peer in peers:
        colour, marker = PEERS.get(peer, OTHER)
        line([row for row in numpy if row["peer"] == peer], "peer_s", f"{marker}-", f"{peer}, NumPy", colour)
    if torch:
        line(torch, "ours_s", "o--", "crossreduce, torch", OURS)
        line(torch, "peer_s", "x--", "gloo, torch", PEERS["gloo"][0])
    limits = [row for row in torch if "floor_s" in row]
    if limits:
        line(limits, "floor_s", "_", "the limit of the links", "0.5")
    sizes = sorted({row["bytes"] for row in rows})
    ticks = sizes[:: 1 + len(sizes) // 7]
    axes.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


CHARTS = {
    "host_reduction": ("host_reduction.json", draw_host, PICTURES / "host_reduction.png"),
    "ranks": ("processes.json", draw_ranks, PICTURES / "ranks.svg"),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or CHARTS:
        results, draw, picture = CHARTS[name]
        draw(json.loads((RESULTS / results).read_text()), picture)
