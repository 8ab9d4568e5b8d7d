"""Draw the charts of the page on benchmarks from the results that are kept under ``benchmarks/results/``.

Input: the JSON files. Output: an SVG per chart, ``benchmarks.md`` with the charts and, under each, the machine, the
date and the versions of its results, and ``results.md`` with a row per file. Nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import host_grid
import line_charts

from crossreduce.cli.bench.chart import draw_ratios

OURS, PEER, OTHER = "#D55E00", "#0072B2", "#56B4E9"  # Okabe and Ito, for colour-blind readers


class Chart(NamedTuple):
    """A chart of the page: its title, the file of results, a description, and the function that draws it."""

    name: str
    title: str
    results: str
    text: str
    draw: Callable[[dict[str, Any], Path], None]
    made_by: str


def bars(path: Path, labels: list[str], series: dict[str, tuple[list[float], str]], xlabel: str) -> None:
    """Draw groups of horizontal bars, a group per label from the top, and in each a bar per series."""
    figure, axes = plt.subplots(figsize=(8.6, 0.9 + 0.19 * len(labels) * (len(series) + 0.8)), layout="constrained")
    height = 0.8 / len(series)
    for k, (name, (values, colour)) in enumerate(series.items()):
        places = [row + k * height for row in range(len(labels))]
        drawn = axes.barh(places, values, height * 0.92, label=name, color=colour)
        axes.bar_label(drawn, [f"{value:.3g}" if value else "none" for value in values], padding=2, fontsize=7)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(labels))], labels)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.01)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(series), frameon=False)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def machines(kept: dict[str, Any], path: Path) -> None:
    """Draw the planned rate of all-reduces on each machine as a part of its bound, beside other algorithms."""
    rows = [row for row in kept["machines"] if row["collective"] == "all_reduce"]
    series = {}
    for name, key, colour in (
        ("the plan", "rate", OURS),
        ("TensorFlow's trees", "tensorflow", PEER),
        ("rings", "rings", OTHER),
        ("one device", "one_device", "#999999"),
    ):
        parts = [100 * Fraction(row[key]) / Fraction(row["bound"]) if row.get(key) else 0 for row in rows]
        series[name] = ([float(part) for part in parts], colour)
    bars(path, [row["name"] for row in rows], series, "percent of the bound, for large arrays")


def parts(kept: dict[str, Any], path: Path) -> None:
    """Draw, for all parts of each machine of eight devices, the median part of the bound that algorithms reach."""
    found = kept["subsets"]
    keys = {"the plan": ("ratio", OURS), "TensorFlow's trees": ("tensorflow", PEER), "rings": ("rings", OTHER)}
    series = {
        name: ([float(100 * Fraction(found[machine][key]["median"])) for machine in found], colour)
        for name, (key, colour) in keys.items()
    }
    bars(path, list(found), series, "percent of the bound, median of all parts of two to eight devices")


def frameworks(kept: dict[str, Any], path: Path) -> None:
    """Draw the time of a framework's own reduction as a multiple of crossreduce's, for each job in its programs."""
    names = {
        "tensorflow_gradients": "TensorFlow: ResNet-50's gradients",
        "tensorflow_small": "TensorFlow: 160 x 1 KiB",
        "tensorflow_large": "TensorFlow: 64 MiB",
        "jax_gradients": "JAX: ResNet-50's gradients",
        "jax_small": "JAX: 160 x 1 KiB",
        "jax_large": "JAX: 64 MiB",
    }
    compiled, eager = [], []
    for case in names:
        rows = kept["cases"][case]["rows"]
        times = {name: row["median_s"] for name, row in rows.items()}
        peers = {name: seconds for name, seconds in times.items() if not name.startswith("ours")}
        for ways, graph in ((compiled, True), (eager, False)):
            peer = [s for name, s in peers.items() if ("tf.function" in name or "jit" in name) == graph]
            ours = times["ours, tf.function" if graph and "ours, tf.function" in times else "ours"]
            ways.append(peer[0] / ours if peer else 0)
    series = {"in a compiled program": (compiled, OURS), "eager": (eager, OTHER)}
    bars(path, list(names.values()), series, "time of the framework's own op / time of crossreduce (above 1: slower)")


CHARTS = (
    Chart(
        *("libraries", "Other libraries, one process and ranks", "against.json"),
        "The time of other libraries for the same all-reduce, as a multiple of crossreduce's time.",
        lambda kept, path: draw_ratios(kept, path),
        "crossreduce bench --against jax,tensorflow,torch,numpy,gloo,mpi --keep-memory -J FILE",
    ),
    Chart(
        *("host", "Eight replicas in host memory", "host_reduction.json"),
        "The bytes read and written per second by a sum over eight replicas in one process.",
        line_charts.draw_host,
        "python benchmarks/host_reduction.py --sizes",
    ),
    Chart(
        *("grid", "Sizes and numbers of replicas", "host_grid.json"),
        "The same rate for 2, 8 and 32 replicas, beside a loop in C and one in NumPy.",
        lambda kept, path: host_grid.draw(kept["rows"], path),
        "python benchmarks/host_grid.py",
    ),
    Chart(
        *("frameworks", "Inside the programs of TensorFlow and JAX", "plugins.json"),
        "How many times as long the framework's own reduction takes, with eight devices of a CPU.",
        frameworks,
        "python benchmarks/plugins.py",
    ),
    Chart(
        *("ranks", "One process per rank", "processes.json"),
        "The microseconds of an all-reduce of ranks on one host.",
        line_charts.draw_ranks,
        "python benchmarks/processes.py",
    ),
    Chart(
        *("hosts", "One process per rank, several hosts", "hosts.json"),
        "The microseconds of an all-reduce of ranks on several hosts, which are network namespaces of one machine.",
        line_charts.draw_hosts,
        "python benchmarks/hosts.py",
    ),
    Chart(
        *("machines", "Plans of whole machines", "planning.json"),
        "The calculated rate of an all-reduce, as a part of the bound, which no plan can exceed. Nothing ran on a GPU.",
        machines,
        "python benchmarks/planning.py",
    ),
    Chart(
        *("parts", "Plans of parts of machines", "planning.json"),
        "The same for jobs that have only some of the eight devices of a machine.",
        parts,
        "python benchmarks/planning.py",
    ),
)


def write(folder: Path) -> None:
    """Draw all charts into ``folder`` and write the pages' text beside them."""
    sections = []
    for chart in CHARTS:
        kept = json.loads((RESULTS / chart.results).read_text())
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce", "savefig.facecolor": "white"})
            chart.draw(kept, folder / f"{chart.name}.svg")
            plt.close("all")
        sections.append(
            f"## {chart.title}\n\n{chart.text}\n\n"
            f"```{{image}} ../_generated/{chart.name}.svg\n:alt: {chart.text}\n```\n\n"
            f"{described(kept)}\nResults: `benchmarks/results/{chart.results}`, made by `{chart.made_by}`.\n"
        )
    (folder / "benchmarks.md").write_text("\n".join(sections))
    (folder / "results.md").write_text(table())


def described(kept: dict[str, Any]) -> str:
    """Return the machine, the date and the versions of results as Markdown."""
    at, versions = kept["machine"], dict(kept["machine"]["versions"])
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    text = f"{date(kept)}, {at['cores']} cores of {at['cpu']}, {at['system']}, Python {at['python']}; {listed}."
    for library, number in kept.get("libraries", {}).items():
        text += f" {library}: {number.partition(',')[0]}."
    return f"*{text}*\n"


def date(kept: dict[str, Any]) -> str:
    return str(kept["date"] if "date" in kept else kept["start_time"])[:10]


def table() -> str:
    """Return a Markdown table with the date, the machine and the versions of each file of results."""
    lines = ["| file | date | machine | Python and versions |", "|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        at = kept["machine"]
        versions = ", ".join(f"{name} {number}" for name, number in at["versions"].items())
        lines.append(
            f"| `{path.name}` | {date(kept)} | {at['cores']} cores of {at['cpu']} | {at['python']}; {versions} |"
        )
    return "\n".join(lines) + "\n"
