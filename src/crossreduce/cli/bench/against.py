"""``crossreduce bench --against``: one table and one chart of the times of other libraries beside those of crossreduce.

Input: a ``BenchRequest`` and the names of peers. Output: a table, JSON, a picture, and an exit code: 1 if an element is
wrong. Each peer is measured by ``contest`` in new processes, in turn with crossreduce.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ... import __version__, kernels
from ...devices import parse
from ...errors import ArgumentError, BackendError, UnsupportedError
from ...frameworks import package
from ...planning.explain import duration, size
from ..support.output import atomic_file, drawing_bar, json_report, print_files, progress, terminal
from ..train.trainers import TRAINERS
from . import nccl_tests, ranks
from .chart import DEFAULT, KEPT, draw_ratios, fastest_ways
from .launch import launch, terminate
from .machine import machine
from .request import BenchRequest

PEERS: Final = ("jax", "tensorflow", "torch", "numpy", *ranks.PEERS)
_PLACES: Final = {False: "one_process", True: "ranks"}  # where crossreduce runs: in ranks if the peer has ranks
_SHOWN_NBYTES: Final = 20_000  # of a process's output, only the last bytes are shown


def measure(request: BenchRequest, peers: tuple[str, ...], keep: bool, picture: Path | None) -> int:
    """Measure crossreduce beside each peer, and return the exit code. ``keep``: also in processes that keep memory."""
    request = replace(request, backends=tuple(peer for peer in peers if peer in ranks.PEERS))
    require(request, peers, keep)
    start_time = nccl_tests.now()
    turns = [(peer, DEFAULT) for peer in peers] + [(peer, KEPT) for peer in peers if keep and peer not in ranks.PEERS]
    with atomic_file("--picture", picture) as file:
        texts = [f"measuring {peer}{', kept memory' if memory == KEPT else ''}" for peer, memory in turns]
        with json_report(request.output, request.json) as write:
            with progress(texts[0], len(turns)) as advance:
                measured = []
                for (peer, memory), next_text in zip(turns, [*texts[1:], ""], strict=True):
                    measured.append((peer, memory, contest(request, peer, memory)))
                    advance(next_text)
            report = report_of(request, measured, start_time)
            write(report)
            show(report)
        if file is not None:
            with drawing_bar():
                draw_ratios(report, file)
    if not request.json:
        print_files(picture)
    return int(report["wrong"] > 0)


def require(request: BenchRequest, peers: Iterable[str], keep: bool) -> None:
    """Raise an error if a peer is not installed, or does not support the devices, the op or the dtype."""
    if any(parse(device).kind != "cpu" for device in request.devices):
        raise ArgumentError("--against measures arrays in host memory: list cpu devices only, as in --devices 8.")
    if keep and kernels.glibc() is None:
        problem = "--keep-memory is not possible: the C library of this system is not glibc."
        raise BackendError.of(problem, remedy="omit --keep-memory")
    for name in (*peers, request.framework):
        if name in TRAINERS and find_spec(name) is None:
            problem = f"--against cannot measure {name}: it is not installed."
            raise BackendError.of(problem, remedy=f"pip install {package(name)}, or omit {name}")
    if request.backends:
        ranks.require(request, "--against")
    if request.op == "mean" and "int" in request.dtype:
        problem = "--against does not support means of integers: libraries define them differently."
        raise UnsupportedError.of(problem, f"-d {request.dtype}", "-d float, or another op")


def contest(request: BenchRequest, peer: str, memory: str) -> list[dict[str, Any]]:
    """Measure a peer in new processes, and return the rows that the module ``contest`` writes."""
    module, text, count = f"{__package__}.contest", request.to_json(), len(request.devices)
    with tempfile.TemporaryDirectory() as folder:
        args = [text, peer, folder, *(["keep"] if memory == KEPT else [])]
        if peer == "gloo":
            code = launch([sys.executable, "-m", module, *args], count)
        elif peer in ranks.MPIS:
            code = _run(ranks.mpi_command(peer, count, module, *args), ranks.mpi_environment(peer))
        else:
            code = _run([sys.executable, "-m", module, *args])
        if code:
            raise BackendError.of(f"the measurement of {peer} ended with exit code {code}.")
        rows: list[dict[str, Any]] = json.loads(Path(folder, "times.json").read_text())
        return rows


def _run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a command and return its exit code. If it fails, write the end of its output to standard error."""
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        stack.callback(terminate, [running], 10.0)  # after Ctrl-C; mpiexec then terminates its ranks
        code = running.wait()
        if code:
            output.seek(max(0, output.seek(0, 2) - _SHOWN_NBYTES))
            sys.stderr.write(output.read().decode("utf-8", "replace"))
        return code


def report_of(
    request: BenchRequest, measured: list[tuple[str, str, list[dict[str, Any]]]], start_time: str
) -> dict[str, Any]:
    """Return the run as a dict. ``measured`` has each peer, its setting of the memory, and its rows of ``contest``."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    our_times: dict[tuple[int, str, bool], list[float]] = {}  # by size, setting of the memory, and whether in ranks
    wrong = 0
    for peer, memory, peer_rows in measured:
        for peer_row in peer_rows:
            nbytes, contenders = peer_row["size"], peer_row["contenders"]
            ours = contenders.pop(ranks.OURS)
            wrong += ours["nwrong"] + sum(way["nwrong"] for way in contenders.values())
            our_times.setdefault((nbytes, memory, peer in ranks.PEERS), []).extend(ours["times_s"])
            ways = {name: _compared(ours["times_s"], way) for name, way in contenders.items()}
            fastest = min(ways, key=lambda name: ways[name]["median_s"], default=None)
            row = rows.setdefault((nbytes, memory), {"size": nbytes, "memory": memory, "ours": {}, "peers": {}})
            row["peers"][peer] = {"fastest": fastest, "ours": _summary(ours["times_s"]), "ways": ways}
    for (nbytes, memory, in_ranks), times in our_times.items():
        rows[nbytes, memory]["ours"][_PLACES[in_ranks]] = _summary(times)
    order = (DEFAULT, KEPT)
    return {
        "version": 1,
        "start_time": start_time,
        "args": ["crossreduce", *request.args[1:]],
        "crossreduce": {
            "version": __version__,
            "framework": request.framework,
            "algorithm": request.algorithms[0],
            "exact": request.exact,
        },
        "machine": machine(),
        "config": {
            "collective": request.collective,
            "op": request.op,
            "type": request.dtype,
            "devices": len(request.devices),
            "warmup_iters": request.warmup_iters,
            "rounds": request.iterations,
            "average": request.average,
        },
        "rows": sorted(rows.values(), key=lambda row: (row["size"], order.index(row["memory"]))),
        "wrong": wrong,
        "end_time": nccl_tests.now(),
    }


def _compared(ours: list[float], way: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a peer's way, and of its time divided by ours in each round: the median and the quartiles."""
    ratios = [theirs / mine for theirs, mine in zip(way["times_s"], ours, strict=True)]
    first, ratio, third = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ratio": ratio,
        "quartiles": [first, third],
        **_summary(way["times_s"]),
        "one_result": way["one_result"],
        "wrong": way["nwrong"],
    }


def _summary(times: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    config, rows = report["config"], report["rows"]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    columns = {
        place: [peer for peer in peers if (peer in ranks.PEERS) is in_ranks] for in_ranks, place in _PLACES.items()
    }
    columns = {place: names for place, names in columns.items() if names}
    table = Table("size", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, names in columns.items():
        count = "1 process" if place == _PLACES[False] else f"{config['devices']} ranks"
        table.add_column(f"ours,\n{count}", justify="right", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right")
    for row in rows:
        cells = ["  kept" if row["memory"] == KEPT else size(row["size"])]
        for place, names in columns.items():
            cells.append(_time(row["ours"].get(place)))
            cells += [_cell(row["peers"].get(name)) for name in names]
        table.add_row(*cells)
    exactly = " with exact sums" if report["crossreduce"]["exact"] else ""
    console = terminal()
    console.print(
        f"{config['collective']}, {config['op']} of {config['type']}, {config['devices']} devices in host memory. The "
        f"times of crossreduce{exactly}, and those of the others as multiples of them: above 1x crossreduce is faster.",
        highlight=False,
    )
    console.print(table)
    for line in notes(report):
        console.print(line, highlight=False, markup=False)


def _time(summary: dict[str, float] | None) -> str:
    """Return the median time of crossreduce as a cell."""
    return "" if summary is None else duration(summary["median_s"])


def _cell(measured: dict[str, Any] | None) -> str:
    """Return the ratio of a peer's fastest way as a cell, red if the peer is faster."""
    if measured is None:
        return ""
    if measured["fastest"] is None:
        return "-"
    way = measured["ways"][measured["fastest"]]
    text = ratio_text(way["ratio"]) + ("*" if way["one_result"] else "")
    return f"[red]{text}[/red]" if way["ratio"] < 1 else text


def ratio_text(ratio: float) -> str:
    """Return a ratio with at least two significant digits.

    >>> [ratio_text(x) for x in (0.254, 3.14159, 31.4159)]
    ['0.25x', '3.1x', '31x']
    """
    return f"{ratio:.{2 if ratio < 0.995 else 1 if ratio < 9.95 else 0}f}x"


def notes(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines after the table."""
    fastest, config = fastest_ways(report), report["config"]
    if any(each.one_result for each in fastest):
        yield "* All devices share one result, so fewer bytes are written; crossreduce writes one for each device."
    if len(fastest) < sum(len(row["peers"]) for row in report["rows"]):
        yield f"- This library has no all-reduce for {config['op']} of {config['type']}."
    names_by_peer: dict[str, dict[str, None]] = {}
    for each in fastest:
        if each.peer in TRAINERS:
            names_by_peer.setdefault(each.peer, {})[each.way] = None
    if names_by_peer:
        yield "Fastest ways: " + "; ".join(f"{peer}: {', '.join(names)}" for peer, names in names_by_peer.items())
    if any(row["memory"] == KEPT for row in report["rows"]):
        yield "kept: after crossreduce.keep_memory(), which lets all libraries reuse freed memory."
    faster = [
        f"{each.peer} ({size(each.row['size'])}{', kept' if each.row['memory'] == KEPT else ''}: "
        f"{ratio_text(each.ratio)})"
        for each in fastest
        if each.ratio < 1
    ]
    yield "Faster than crossreduce: " + (", ".join(faster) or "none")
    yield f"Wrong elements: {report['wrong']}"
