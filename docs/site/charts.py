"""Draw the charts of the page on benchmarks from the results that are kept under ``benchmarks/results/``.

Input: the JSON files. Output: an SVG per chart, and ``benchmarks.md`` with the charts and, under each, the machine, the
date and the versions of its results. Nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import result_charts

from crossreduce.cli.bench.chart import draw_ratios


class Chart(NamedTuple):
    """A chart of the page: its title, the file of results, a description, and the function that draws it."""

    name: str
    title: str
    results: str
    text: str
    draw: Callable[[dict[str, Any], Path], None]
    made_by: str


CHARTS = (
    Chart(
        *("libraries", "Other libraries, one process and ranks", "against.json"),
        "The time of other libraries for the same all-reduce, as a multiple of crossreduce's time.",
        draw_ratios,
        "crossreduce bench --against jax,tensorflow,torch,numpy,gloo,mpi --keep-memory -J FILE",
    ),
    Chart(
        *("host", "Eight replicas in host memory", "host_reduction.json"),
        "The bytes read and written per second by a sum over eight replicas in one process.",
        result_charts.draw_host,
        "python benchmarks/host_reduction.py --sizes",
    ),
    Chart(
        *("grid", "Sizes and numbers of replicas", "host_grid.json"),
        "The same rate for 2, 8 and 32 replicas, beside a loop in C and one in NumPy.",
        result_charts.draw_grid,
        "python benchmarks/host_grid.py",
    ),
    Chart(
        *("frameworks", "Inside the programs of TensorFlow and JAX", "plugins.json"),
        "How many times as long the framework's own reduction takes, with eight devices of a CPU.",
        result_charts.draw_frameworks,
        "python benchmarks/plugins.py",
    ),
    Chart(
        *("ranks", "One process per rank", "processes.json"),
        "The microseconds of an all-reduce of ranks on one host.",
        result_charts.draw_ranks,
        "python benchmarks/processes.py",
    ),
    Chart(
        *("hosts", "One process per rank, several hosts", "hosts.json"),
        "The microseconds of an all-reduce of ranks on several hosts, which are network namespaces of one machine.",
        result_charts.draw_hosts,
        "python benchmarks/hosts.py",
    ),
    Chart(
        *("machines", "Plans of whole machines", "planning.json"),
        "The calculated rate of an all-reduce, as a part of the bound, which no plan can exceed. Nothing ran on a GPU.",
        result_charts.draw_machines,
        "python benchmarks/planning.py",
    ),
    Chart(
        *("parts", "Plans of parts of machines", "planning.json"),
        "The same for jobs that have only some of the eight devices of a machine.",
        result_charts.draw_parts,
        "python benchmarks/planning.py",
    ),
)


def write(folder: Path) -> None:
    """Draw all charts into ``folder`` and write the pages' text beside them."""
    sections = []
    for chart in CHARTS:
        kept = json.loads((RESULTS / chart.results).read_text())
        chart.draw(kept, folder / f"{chart.name}.svg")
        sections.append(
            f"## {chart.title}\n\n{chart.text}\n\n"
            f"![{chart.text}](../_generated/{chart.name}.svg)\n\n"
            f"{described(kept)}\nResults: `benchmarks/results/{chart.results}`, made by `{chart.made_by}`.\n"
        )
    (folder / "benchmarks.md").write_text("\n".join(sections))


def described(kept: dict[str, Any]) -> str:
    """Return the machine, the date and the versions of results as Markdown."""
    at, versions = kept["machine"], dict(kept["machine"]["versions"])
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    text = f"{date(kept)}, {at['cores']} cores of {at['cpu']}, {at['system']}, Python {at['python']}; {listed}."
    for library, number in kept.get("libraries", {}).items():
        text += f" {library}: {number.partition(',')[0]}."
    text = text.replace("*", "\\*")  # MPIs name themselves, such as "for Linux* OS"
    return f"*{text}*\n"


def date(kept: dict[str, Any]) -> str:
    return str(kept["date"] if "date" in kept else kept["start_time"])[:10]
