"""The text and JSON formats of nccl-tests, which existing parsers read.

Input: a ``BenchRequest`` and ``Row``s. Output: lines and dicts, with the columns and keys of nccl-tests 2.19.6
(src/util.cu) and these differences. The first line names this library. In-place columns are N/A (null in JSON) if
nothing was measured in place. ``env`` is empty, since environment variables may be secrets. This library adds keys.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ... import __version__
from ...devices import parse
from ..support.output import print_lines, progress
from .request import BenchRequest, Row, Timing


def header(request: BenchRequest) -> list[str]:
    """Return the lines before the tables."""
    step = f"{request.step_factor}(factor)" if request.step_factor > 1 else f"{request.step_bytes}(bytes)"
    gpus = 1 if request.processes else len(request.devices)  # the devices of each process
    lines = [
        f"# crossreduce version {__version__} framework={request.framework}-{request.framework_version} "
        f"transport={request.transport}",
        f"# Collective test starting: {request.collective}_perf",
        f"# nThread 1 nGpus {gpus} minBytes {request.minimum_bytes} maxBytes {request.maximum_bytes} step: {step} "
        f"warmup iters: {request.warmup_iters} iters: {request.iterations} agg iters: 1 "
        f"validation: {request.validation} graph: 0 unalign: 0",
    ]
    if request.transport == "in-process emulation":
        where = "IN-PROCESS EMULATION: ALL DEVICES ARE HOST MEMORY OF ONE MACHINE"
        lines += ["#", f"# {where}. THESE ARE NOT GPU NUMBERS."]
    if request.processes:
        lines += ["#", "# EACH RANK'S DATA IS IN HOST MEMORY. THESE ARE NOT GPU NUMBERS."]
    if request.exact:
        lines += ["#", "# Sums of crossreduce are exact: rounded once."]
    lines += ["#", "# Using devices"]
    return lines + [
        f"#  Rank {d['rank']:2} Group {d['group']:2} Pid {d['pid']:6} on {d['hostname']:>10} device {d['device']:2} "
        f"[{d['device_hex']}] {d['device_info']}"
        for d in devices(request)
    ]


def devices(request: BenchRequest) -> list[dict[str, Any]]:
    """Return a dict per device, with the keys of nccl-tests. ``device_hex`` is this library's name of the device."""
    places = request.processes or [(os.getpid(), socket.gethostname())] * len(request.devices)
    host = "host memory" if request.processes else "host memory (in-process emulation)"
    return [
        {
            "rank": rank,
            "group": 0,
            "pid": pid,
            "hostname": hostname,
            "device": parse(name).index,
            "device_hex": name,
            "device_info": host if parse(name).kind == "cpu" else parse(name).kind,
        }
        for rank, (name, (pid, hostname)) in enumerate(zip(request.devices, places, strict=True))
    ]


def print_table(request: BenchRequest, name: str, rows: Iterable[Row]) -> list[Row]:
    """Print the table of one algorithm or backend, each row as soon as it is measured, and return the rows."""
    print_lines(_table_header(request, name))
    measured = []
    with progress(f"measuring {name}", len(list(request.sizes())) * len(request.roots), quiet=True) as bar:
        for row in rows:
            with bar.hide():
                print_lines([_line(request, row)])
            measured.append(row)
            bar(f"measuring {name}")
    return measured


def _table_header(request: BenchRequest, algorithm: str) -> list[str]:
    titles, units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    if request.per_iter_timing:
        titles, units = [*titles, "i_min", "i_max", "i_p99", "i_cv%"], [*units, "(us)", "(us)", "(us)", "(%)"]
        over = "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)"
    else:
        over = "           out-of-place                       in-place          "
    return [
        "#",
        f"# Backend: {algorithm}" if request.processes else f"# Algorithm: {algorithm}, packs: {request.num_packs}",
        "#",
        "#" + " " * 51 + over,
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {_aligned(request, titles * 2)} ",
        f"# {'(B)':>10}  {'(elements)':>12}  {'':8}  {'':6}  {'':6}  {_aligned(request, units * 2)} ",
    ]


def _line(request: BenchRequest, row: Row) -> str:
    cells = [cell for timing in (row.out_of_place, row.in_place) for cell in _cells(request, timing)]
    return f"{row.size:12}  {row.count:12}  {row.type:>8}  {row.redop:>6}  {row.root:6}  {_aligned(request, cells)}"


def _cells(request: BenchRequest, timing: Timing | None) -> list[str]:
    """Return the cells of one half of a line, which has the timing out of place or in place, if there is one."""
    if timing is None:
        return ["N/A"] * len(_widths(request))
    wrong = "N/A" if timing.nwrong is None else f"{timing.nwrong:g}"
    cells = [_fit(timing.time_us, 7), _fit(timing.algbw, 6), _fit(timing.busbw, 6), wrong]
    if request.per_iter_timing:
        stats = timing.per_iter()
        cells += [_fit(stats[key], 7) for key in ("min_us", "max_us", "p99_us", "cv_pct")]
    return cells


def footer(request: BenchRequest, rows: list[Row]) -> list[str]:
    """Return the lines after the tables. As in nccl-tests, "Out of bounds values" counts wrong timings."""
    bad = bad_count(rows)
    return [
        f"# Out of bounds values : {bad} {'FAILED' if bad else 'OK'}",
        f"# Avg bus bandwidth    : {_average_busbw(rows):g} ",
        "#",
        f"# Collective test concluded: {request.collective}_perf",
    ]


def report(request: BenchRequest, rows: list[Row], start_time: str) -> dict[str, Any]:
    """Return the run as a dict: the keys of nccl-tests, whose booleans are strings, and keys of this library."""
    step = "step_factor" if request.step_factor > 1 else "step_bytes"
    return {
        "version": 2,  # the version of this layout: nccl-tests' JSON_FILE_VERSION
        "start_time": start_time,
        "args": list(request.args),
        "env": {},
        "nccl_version": None,
        "crossreduce": {
            "version": __version__,
            "transport": request.transport,
            "framework": request.framework,
            "framework_version": request.framework_version,
            "exact": request.exact,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "config": {
            "nthreads": 1,
            "ngpus": 1 if request.processes else len(request.devices),
            "minimum_bytes": request.minimum_bytes,
            "maximum_bytes": request.maximum_bytes,
            step: getattr(request, step),
            "warmup_iters": request.warmup_iters,
            "iterations": request.iterations,
            "aggregated_iterations": 1,
            "validation": request.validation,
            "graph": 0,
            "blocking_collectives": "true",
            "per_iter_timing": str(request.per_iter_timing).lower(),
            "parallel_init": "false",
            "algorithms": list(request.algorithms),
            "num_packs": request.num_packs,
        },
        "devices": devices(request),
        "results": results(request, rows),
        "out_of_bounds": {"count": bad_count(rows), "okay": str(bad_count(rows) == 0).lower()},
        "average_bus_bandwidth": {"bandwidth": _average_busbw(rows), "okay": "unchecked"},
        "errors": [],
        "end_time": now(),
    }


def results(request: BenchRequest, rows: list[Row]) -> list[dict[str, Any]]:
    """Return a dict per row, with nccl-tests' keys and ``algorithm``."""
    return [
        {
            "size": row.size,
            "count": row.count,
            "type": row.type,
            "redop": row.redop,
            "root": str(row.root),
            "out_of_place": _timing_json(row.out_of_place),
            "out_of_place_per_iter": row.out_of_place.per_iter(),
            "in_place": None if row.in_place is None else _timing_json(row.in_place),
            **({} if row.in_place is None else {"in_place_per_iter": row.in_place.per_iter()}),
            "actual_iterations": len(row.out_of_place.times_s),
            "experiment_name": f"{request.collective}_perf",
            "algorithm": row.algorithm,
        }
        for row in rows
    ]


def ratios(rows: list[Row], peers: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """Return, for each row, each peer's median time divided by the row's. In-place times are used if there are any.

    ``times_us``: for each peer, and first for the rows themselves, their least, median and greatest time.
    """

    def times(row: Row) -> dict[str, float]:
        stats = (row.in_place or row.out_of_place).per_iter()
        return {key: stats[f"{key}_us"] for key in ("min", "p50", "max")}

    ratios_by_size = []
    for k, row in enumerate(rows):
        times_us = {row.algorithm: times(row)} | {name: times(theirs[k]) for name, theirs in peers.items()}
        by_peer = {name: times_us[name]["p50"] / times_us[row.algorithm]["p50"] for name in peers}
        ratios_by_size.append({"size": row.size, "root": str(row.root), "by_peer": by_peer, "times_us": times_us})
    return ratios_by_size


def ratio_lines(ratios_by_size: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the footer with the result of ``ratios``."""

    def line(size: object, root: object, cells: Iterable[str]) -> str:
        return f"# {size:>10}  {root:>6}  " + "  ".join(f"{cell:>30}" for cell in cells)

    lines = [
        "# Median times of calls, us (fastest to slowest), and the peers' medians divided by those of crossreduce;",
        "# the tables above have means",
        line("size", "root", ratios_by_size[0]["times_us"]),
    ]
    for row in ratios_by_size:
        texts = []
        for name, each in row["times_us"].items():
            spread = f"{_fit(each['p50'], 7)} ({_fit(each['min'], 7)} to {_fit(each['max'], 7)})"
            texts.append(spread + (f" [{row['by_peer'][name]:.2f}x]" if name in row["by_peer"] else ""))
        lines.append(line(row["size"], row["root"], texts))
    return lines


def now() -> str:
    """Return the local time as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _timing_json(timing: Timing) -> dict[str, Any]:
    return {"time": timing.time_us, "alg_bw": timing.algbw, "bus_bw": timing.busbw, "nwrong": timing.nwrong}


def bad_count(rows: list[Row]) -> int:
    """Return the number of timings with wrong elements."""
    return sum(1 for row in rows for timing in row.timings if timing.nwrong)


def _average_busbw(rows: list[Row]) -> float:
    busbws = [timing.busbw for row in rows for timing in row.timings]
    return math.fsum(busbws) / len(busbws)


def _aligned(request: BenchRequest, cells: list[str]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _widths(request) * 2, strict=True))


def _widths(request: BenchRequest) -> list[int]:
    return [7, 6, 6, 6, *([7, 7, 7, 7] if request.per_iter_timing else [])]


def _fit(value: float, width: int) -> str:
    """Return a number as text, like nccl-tests' getFloatStr: up to ``width`` characters, or one more after rounding.

    >>> [_fit(x, 6) for x in (1.234, 123.456, 1234.56, 123456.7)]
    ['1.23', '123.46', '1234.6', '123457']
    """
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    if digits < width + 1:
        return f"{value:.0f}"
    return f"{value:.1e}" if width >= 7 else f"{value:.0e}"
