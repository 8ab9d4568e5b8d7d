"""Draw the times of all-reduces of ranks against their size, on one host and between hosts.

Input: results/processes.json, from processes.py. Output: docs/pictures/ranks.svg.
Run: python benchmarks/rank_chart.py [--json PATH] [--picture PATH]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS, size_text

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "ranks.svg"
OURS = "#D55E00"
# The colours are those of Okabe and Ito, for colour-blind readers.
PEERS = {
    "gloo": ("#000000", "x"),
    "Open MPI": ("#0072B2", "s"),
    "Intel MPI": ("#009E73", "v"),
    "MPICH": ("#CC79A7", "^"),
}
OTHER = ("#56B4E9", "D")


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each number of ranks of one host and, below, one for each set of hosts."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if row["collective"] == "all_reduce" and row["dtype"] == "float32"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "processes.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    draw(json.loads(given.json.read_text())["rows"], given.picture)


if __name__ == "__main__":
    main()
