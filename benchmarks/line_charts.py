"""Draw rates and times against the size of an array as lines: reductions in host memory, and all-reduces of ranks.

Input: results/host_reduction.json, from host_reduction.py --sizes, processes.json, from processes.py, and hosts.json,
from hosts.py. Output: host_reduction.png, ranks.svg and hosts.svg in docs/pictures.
Run: python benchmarks/line_charts.py [CHART ...]
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
HOST_LINES = {
    "crossreduce": (OURS, "o"),
    "crossreduce, UCX": ("#E69F00", "D"),
    "crossreduce.mpi": ("#CC79A7", "v"),
    "gloo": PEERS["gloo"],
    "Open MPI": PEERS["Open MPI"],
    "sockets": ("0.5", "_"),
}


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
    """Draw a panel for each number of ranks of one host."""
    chosen = [row for row in kept["rows"] if row["collective"] == "all_reduce" and row["dtype"] == "float32"]
    panels = [
        (f"one host, {place}", [row for row in chosen if row["place"] == place])
        for place in dict.fromkeys(row["place"] for row in chosen)
    ]
    draw_panels(panels, panel, picture)


def draw_hosts(kept: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each network between hosts with an MTU of 9000, or of 1 Gbit/s."""
    chosen = [row for row in kept["rows"] if row["collective"] == "all_reduce"]
    names = [name for name in dict.fromkeys(row["network"] for row in chosen) if "9000" in name or ", 1 Gbit" in name]
    draw_panels([(name, [row for row in chosen if row["network"] == name]) for name in names], host_panel, picture)


def draw_panels(panels: list[tuple[str, list[dict[str, Any]]]], draw: Any, picture: Path) -> None:
    """Draw panels with these titles in lines of three."""
    if not panels:
        return
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce"})
    lines = -(-len(panels) // 3)
    figure, every = plt.subplots(lines, 3, figsize=(11, 3.6 * lines), sharey=True, squeeze=False, layout="constrained")
    for axes in every.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, rows) in zip(every.flat, panels, strict=False):
        draw(axes, rows)
        axes.set_title(title)
    for line in every:
        line[0].set_ylabel("microseconds of an all-reduce")
    every[0][0].legend(fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    print(f"drawn: {picture.name}")


def panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the lines of one panel; crossreduce has a solid line for NumPy arrays, and a dashed one for tensors."""

    numpy = [row for row in rows if row["part"] == "mpi" and row["form"] == "out="]
    torch = [row for row in rows if row["part"] != "mpi"]
    peers = list(dict.fromkeys(row["peer"] for row in numpy))
    if peers:
        line(axes, of([row for row in numpy if row["peer"] == peers[0]], "ours_s"), "o-", "crossreduce, NumPy", OURS)
    for peer in peers:
        colour, marker = PEERS.get(peer, OTHER)
        points = of([row for row in numpy if row["peer"] == peer], "peer_s")
        line(axes, points, f"{marker}-", f"{peer}, NumPy", colour)
    if torch:
        line(axes, of(torch, "ours_s"), "o--", "crossreduce, torch", OURS)
        line(axes, of(torch, "peer_s"), "x--", "gloo, torch", PEERS["gloo"][0])
    ticks(axes, rows)


def host_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the lines of one network between hosts."""
    for name, (colour, marker) in HOST_LINES.items():
        line(axes, {row["bytes"]: row["seconds"][name] for row in rows}, f"{marker}-", name, colour)
    ticks(axes, rows)


def of(rows: list[dict[str, Any]], key: str) -> dict[int, float]:
    """Return the seconds of ``key`` by size."""
    return {row["bytes"]: row[key] for row in rows}


def line(axes: Any, seconds: dict[int, float], style: str, label: str, colour: str) -> None:
    xs = sorted(seconds)
    axes.loglog(xs, [seconds[x] * 1e6 for x in xs], style, color=colour, label=label, markersize=4, linewidth=1.2)


def ticks(axes: Any, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({row["bytes"] for row in rows})
    shown = sizes[:: 1 + len(sizes) // 7]
    axes.set_xticks(shown, [size_text(tick) for tick in shown], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


CHARTS = {
    "host_reduction": ("host_reduction.json", draw_host, PICTURES / "host_reduction.png"),
    "ranks": ("processes.json", draw_ranks, PICTURES / "ranks.svg"),
    "hosts": ("hosts.json", draw_hosts, PICTURES / "hosts.svg"),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or CHARTS:
        results, draw, picture = CHARTS[name]
        draw(json.loads((RESULTS / results).read_text()), picture)
