"""Write the tables of docs/speed.md from the measured times.

Input: host_reduction.json, plugins.json, processes.json, hosts.json and against.json in results/. Output: the part of
docs/speed.md after the line ``MARK``. The same input gives the same text. Nothing is measured here.
Run: python benchmarks/speed.py [--results FOLDER] [--page PATH]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from common import RESULTS, size_text

from crossreduce.cli.bench.chart import fastest_ways

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
MARK = "<!-- benchmarks/speed.py writes the rest of this page. -->\n"
FILES = ("against", "host_reduction", "plugins", "processes", "hosts")

LOOP, PSUM = "NumPy loop and copies", "JAX jit psum"
STACK, GRAPH = "torch stack().sum(0), one result", ", tf.function"
HCA, R2O = "TensorFlow HierarchicalCopyAllReduce", "TensorFlow ReductionToOneDevice"
IN_PLACE, EAGER = "crossreduce, into given arrays (`out=`)", "TensorFlow, hierarchical copy"
IN_GRAPH, ONE = "TensorFlow, in a `tf.function`", "TensorFlow, to one device"
OURS = "crossreduce"
SIZES = {LOOP: "NumPy loop", STACK: "torch `stack().sum(0)`", R2O: ONE, HCA: EAGER, PSUM: "JAX `psum`"}


class Job(NamedTuple):
    """A job, which is a reduction that several libraries do, and the rows of its times in a file of results.

    Args:
      text: the job in words.
      case: the name of its case in the file.
      ours: the name of the row of crossreduce with which the others are compared.
      peers: the names of the rows of other libraries, and their labels in the table.
      context: the names of further rows, which are not reductions by another library, and their labels.
    """

    text: str
    case: str
    ours: str
    peers: dict[str, str]
    context: Mapping[str, str] = MappingProxyType({})


class Row(NamedTuple):
    """The times of a job in seconds: those of one library, or others to compare them with (see ``Job.context``).

    A star in a label marks results that share memory; each result of crossreduce has its own.
    """

    label: str
    median_s: float
    least_s: float
    most_s: float
    ratio: float  # median_s divided by that of crossreduce
    peer: bool = True  # whether this is another library


ONE_PROCESS = (
    Job(
        "8 x 64 MiB, a result on each of 8 devices",
        *("8 x 64 MiB float32", "ours direct"),
        {
            HCA: EAGER,
            LOOP: "NumPy loop",
            PSUM: "JAX `psum`",
        },
        {"ours direct, out=": IN_PLACE, "np.copyto, 2 threads": "a copy of as many bytes (`np.copyto`, 2 threads)"},
    ),
    Job(
        "8 x 64 MiB, one result",
        *("8 x 64 MiB float32", "ours direct to one"),
        {R2O: ONE, STACK: "torch `stack().sum(0)`"},
        context={"ours direct to one, out=": IN_PLACE},
    ),
    Job(
        "ResNet-50's 161 gradients, 97.5 MiB, a tree per replica, 8 replicas",
        *("ResNet-50's gradients, 161 tensors, 97.5 MiB, over 8 devices", "ours all_reduce"),
        {R2O: ONE, PSUM: "JAX `psum`", HCA + GRAPH: IN_GRAPH, HCA: EAGER},
        {"ours all_reduce, out=": IN_PLACE},
    ),
    Job(
        "160 x 1 KiB, 8 replicas",
        *("160 x 1 KiB float32 over 8 devices", "ours batch_reduce"),
        {LOOP: "NumPy loop", HCA + GRAPH: IN_GRAPH, PSUM: "JAX `psum`", R2O: ONE, HCA: EAGER},
        {"ours batch_reduce, out=": IN_PLACE},
    ),
    Job(
        "1 KiB, 8 replicas",
        *("1 KiB float32 over 8 devices", "ours reduce"),
        {**SIZES, HCA + GRAPH: IN_GRAPH},
        context={"ours reduce, out=": IN_PLACE},
    ),
)

SHARD_MAP = "JAX `psum`, in `jax.shard_map`"
IN_FRAMEWORKS = tuple(
    Job(
        f"{text}, {framework}",
        *(f"{file}_{case}", ours, peers),
    )
    for framework, file, ours, peers in (
        ("TensorFlow", "tensorflow", "ours" + GRAPH, {HCA + GRAPH: IN_GRAPH}),
        ("JAX", "jax", "ours", {PSUM: SHARD_MAP}),
    )
    for case, text in (("gradients", "ResNet-50's gradients"), ("small", "160 x 1 KiB"), ("large", "64 MiB"))
)

TABLES = {
    "One process, arrays in host memory": ("host_reduction", ONE_PROCESS),
    "Inside the frameworks' compiled programs, 8 replicas": ("plugins", IN_FRAMEWORKS),
}
# The tables of ranks, by the part of processes.json.
GRIDS = {
    "mpi": "One process per rank, one host, NumPy arrays: crossreduce / the fastest MPI",
    "torch": "One process per rank, one host, torch tensors: crossreduce / gloo",
    "ddp": "A step of DDP with 25 M parameters: crossreduce / gloo",
}
HOST_PEERS = ("gloo", "Open MPI")
ALONE = "no reduction"


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Return the content of each file of results, by name."""
    return {name: json.loads((results / f"{name}.json").read_text()) for name in FILES}


def rows_of(kept: dict[str, Any], job: Job) -> list[Row]:
    """Return the rows of a job: first that of crossreduce, then all others, the fastest first.

    Rows that ``kept`` does not contain are left out.
    """
    case = kept["cases"][job.case]
    times = case["rows"] if "rows" in case else case["seconds"]
    labels = {job.ours: OURS, **job.context, **job.peers}
    ours = times[job.ours]
    found = []
    for name, label in labels.items():
        if name in times:
            time = times[name]
            star = " *" if time.get("results", 1) < ours.get("results", 1) else ""
            ratio = time["median_s"] / ours["median_s"]
            found.append(Row(label + star, time["median_s"], time["min_s"], time["max_s"], ratio, name in job.peers))
    return [found[0], *sorted(found[1:], key=lambda row: row.ratio)]


def time_text(seconds: float) -> str:
    """Return a time with two digits or more, such as ``24 ms``."""
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("us", 1e-6))
    return f"{seconds / scale:.{1 if seconds / scale < 9.95 else 0}f} {unit}"


def ratio_text(ratio: float) -> str:
    """Return a ratio with two digits or more, such as ``5.1 x``."""
    return f"{ratio:.{2 if ratio < 0.995 else 1 if ratio < 9.95 else 0}f} x"


def table(kept: dict[str, Any], jobs: tuple[Job, ...]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the times of jobs."""
    yield "| job | library | median | fastest to slowest | multiple of crossreduce |"
    yield "|---|---|---|---|---|"
    for job in jobs:
        text = job.text
        for row in rows_of(kept, job):
            spread = f"{time_text(row.least_s)} to {time_text(row.most_s)}"
            ratio = "" if row.label == OURS else ratio_text(row.ratio)
            yield f"| {text} | {row.label} | {time_text(row.median_s)} | {spread} | {ratio} |"
            text = ""


def against_table(report: dict[str, Any]) -> Iterator[str]:
    """Yield a table of ``crossreduce bench --against``: the times of crossreduce, and the ratios of other libraries.

    Ratios of libraries that are faster are bold.
    """
    names = list(dict.fromkeys(peer for row in report["rows"] for peer in row["peers"]))
    yield f"| array | memory | crossreduce, 1 process | {report['config']['devices']} ranks | {' | '.join(names)} |"
    yield "|---" * (4 + len(names)) + "|"
    fastest = {(id(each.row), each.peer): each for each in fastest_ways(report)}
    for row in report["rows"]:
        times = [row["ours"].get(place) for place in ("one_process", "ranks")]
        cells = [
            size_text(row["size"]),
            row["memory"],
            *("" if time is None else time_text(time["median_s"]) for time in times),
        ]
        for name in names:
            each = fastest.get((id(row), name))
            text = "" if each is None else ratio_text(each.ratio)
            text = f"**{text}**" if each is not None and each.ratio < 1 else text
            cells.append(text + " *" * (each is not None and each.one_result))
        yield f"| {' | '.join(cells)} |"


def grid(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of one part of processes.json: the time of crossreduce and that of its fastest peer by size.

    Times of peers that are faster are bold. Of several forms of a collective, the one with ``out=`` is shown.
    """
    sizes = sorted({row["bytes"] for row in rows})
    yield f"| ranks | collective | {' | '.join(map(size_text, sizes))} |"
    yield "|---" * (2 + len(sizes)) + "|"
    places, collectives = (list(dict.fromkeys(row[key] for row in rows)) for key in ("place", "collective"))
    for place in places:
        for collective in collectives:
            for dtype in ("float32", "bfloat16"):
                cases = [r for r in rows if (r["place"], r["collective"], r["dtype"]) == (place, collective, dtype)]
                shown = [row for row in cases if row["form"] == "out="] or cases
                cells = [grid_cell([row for row in shown if row["bytes"] == size]) for size in sizes]
                if shown:
                    kind = "" if dtype == "float32" else f", {dtype}"
                    yield f"| {place} | `{collective}`{kind} | {' | '.join(cells)} |"


def grid_cell(rows: list[dict[str, Any]]) -> str:
    """Return the times of a point: the row of the fastest peer, and the limit of the links if there is one."""
    peers = [row for row in rows if row["peer"] != ALONE]
    if not peers:
        return ""
    row = max(peers, key=lambda row: row["ratio"])
    peer = time_text(row["peer_s"])
    text = f"{time_text(row['ours_s'])} / {f'**{peer}**' if row['ratio'] > 1 else peer}"
    text += f"; limit {time_text(row['floor_s'])}" if "floor_s" in row else ""
    alone = [time_text(row["peer_s"]) for row in rows if row["peer"] == ALONE]
    return text + (f"; {ALONE} {alone[0]}" if alone else "")


def hosts_grid(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of hosts.json: the times of crossreduce, of its fastest peer, and of sockets, by size.

    Times of peers that are faster are bold.
    """
    sizes = sorted({row["bytes"] for row in rows})
    yield f"| hosts and ranks, links | collective | {' | '.join(map(size_text, sizes))} |"
    yield "|---" * (2 + len(sizes)) + "|"
    points = {(row["network"], row["collective"], row["bytes"]): row for row in rows}
    for network, collective in dict.fromkeys(key[:2] for key in points):
        cells = []
        for size in sizes:
            row = points.get((network, collective, size))
            cells.append("")
            if row:
                seconds = row["seconds"]
                peer = max(HOST_PEERS, key=lambda name: row["ratios"][f"{OURS} / {name}"])
                text = time_text(seconds[peer])
                text = f"**{text}**" if row["ratios"][f"{OURS} / {peer}"] > 1 else text
                cells[-1] = f"{time_text(seconds[OURS])} / {text} / {time_text(seconds['sockets'])}"
        yield f"| {network} | `{collective}` | {' | '.join(cells)} |"


def requirements(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the requirements of processes.py and hosts.py."""
    yield "| requirement | measured | at most | |"
    yield "|---|---|---|---|"
    for each in (*kept["processes"]["requirements"], *kept["hosts"]["requirements"]):
        met = "met" if each["met"] else f"not met: {each['greatest']}"
        yield f"| {each['what']} | {each['value']:.3g} | {each['limit']:.3g} | {met} |"


def faster_ranks(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the points of processes.json at which a peer is faster, one line per collective and peer."""
    yield "| ranks | collective | faster | sizes | at most |"
    yield "|---|---|---|---|---|"
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["ratio"] > 1 and row["peer"] != ALONE:
            key = tuple(row[key] for key in ("part", "place", "collective", "form", "peer"))
            found.setdefault(key, []).append(row)
    for (_, place, collective, form, peer), points in found.items():
        sizes = ", ".join(size_text(row["bytes"]) for row in points)
        most = max(row["ratio"] for row in points)
        yield f"| {place} | `{collective}` {form} | {peer} | {sizes} | {most:.2f} x |"


def faster(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the jobs, and of the sizes of a single array, for which another library is faster."""
    yield "| job | crossreduce | faster |"
    yield "|---|---|---|"
    for file, jobs in TABLES.values():
        for job in jobs:
            ours, *others = rows_of(kept[file], job)
            yield from faster_line(job.text, ours, others)
    for size, rows in kept["host_reduction"].get("sizes", {}).items():
        job = Job(f"One array of {size_text(int(size))} per replica", size, "ours", SIZES)
        ours, *others = rows_of({"cases": {size: {"rows": rows}}}, job)
        yield from faster_line(job.text, ours, others)


def faster_line(text: str, ours: Row, others: list[Row]) -> Iterator[str]:
    """Yield a line of the table of ``faster``, if another library is faster."""
    peers = [row for row in others if row.peer and row.ratio < 1]
    if peers:
        times = ", ".join(f"{row.label} {time_text(row.median_s)}" for row in peers)
        yield f"| {text} | {time_text(ours.median_s)} | {times} |"


def machine_text(kept: dict[str, Any]) -> str:
    """Return, as text, the machine and the versions with which a file of results was measured."""
    machine = kept["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    place = f"{machine['cores']} cores of an {machine['cpu']}, {machine['system']}, Python {machine['python']}"
    return f"{place};\n{versions}."


def figures(kept: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of the page."""
    machines: dict[str, list[str]] = {}
    for name, content in kept.items():
        machines.setdefault(machine_text(content), []).append(f"`{name}.json`")
    lines = ["## The machine", ""]
    for text, names in machines.items():
        lines += [*([f"{', '.join(names)}:"] if len(machines) > 1 else []), text, ""]
    instruction_set = kept["host_reduction"]["kernels"]["instruction_set"]
    lines += [f"The kernels use {instruction_set}. A star marks results that share one memory, so that fewer bytes are"]
    lines += ["written; each result of crossreduce has its own memory.", ""]
    lines += ["## One array per device", "", "Ratios of libraries that are faster are bold. `kept`: after"]
    lines += ["`crossreduce.keep_memory()`, see [host.md](host.md#fresh-memory-in-all-libraries).", ""]
    lines += [*against_table(kept["against"]), ""]
    for title, (file, jobs) in TABLES.items():
        lines += [f"## {title}", "", *table(kept[file], jobs), ""]
    ranks = kept["processes"]["rows"]
    for part, title in GRIDS.items():
        rows = [row for row in ranks if row["part"] == part]
        lines += [*((f"## {title}", "", *grid(rows), "") if rows else ())]
    between = kept["hosts"]["rows"]
    lines += ["## One process per rank, several hosts: crossreduce / the faster of gloo and Open MPI / sockets", ""]
    lines += [*hosts_grid(between), "", "## Requirements of ranks", "", *requirements(kept), ""]
    lines += ["## Where another library is faster", "", *faster(kept), ""]
    points = len([row for row in ranks if row["peer"] != ALONE])
    count = sum(row["ratio"] > 1 and row["peer"] != ALONE for row in ranks)
    lines += [f"Ranks of one host: a peer is faster at {count} of {points} points.", "", *faster_ranks(ranks), ""]
    for peer in HOST_PEERS:
        behind = sum(row["ratios"][f"{OURS} / {peer}"] > 1 for row in between)
        lines += [f"Several hosts: {peer} is faster at {behind} of {len(between)} points.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measured times")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    head, mark, _ = given.page.read_text().partition(MARK)
    given.page.write_text(f"{head}{mark}\n{figures(read(given.results))}")
    print(f"written: {given.page.name}")


if __name__ == "__main__":
    main()
