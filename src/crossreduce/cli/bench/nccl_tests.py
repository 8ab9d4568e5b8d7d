"""The text and JSON formats of nccl-tests, which existing parsers read.

Input: a ``Config`` and ``Row``s. Output: lines and dicts. Columns and keys are those of nccl-tests 2.19.6
(src/util.cu), with these differences: the first line names this library; the in-place columns are N/A (null in JSON)
for arrays that cannot be written (JAX, TensorFlow), for broadcasts, and for gathers and scatters of ranks; ``env`` is
empty, whereas nccl-tests writes all environment variables, secrets included; keys of this library are added. Nothing
is measured here.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import __version__
from ...devices import parse


@dataclass(frozen=True)
class Config:
    """The settings of a run; names as in the ``config`` of nccl-tests, sizes in bytes."""

    framework: str
    framework_version: str
    collective: str
    algorithms: tuple[str, ...]
    num_packs: int
    devices: tuple[str, ...]
    minimum_bytes: int
    maximum_bytes: int
    step_bytes: int
    step_factor: int
    warmup_iters: int
    iterations: int
    validation: int
    per_iter_timing: bool
    processes: tuple[tuple[int, str], ...] = ()
    """The pid and host of each rank, whose ``algorithms`` are backends; empty: this process drives all devices."""

    def sizes(self) -> Iterator[int]:
        """Yield the sizes in bytes, in nccl-tests' order."""
        nbytes = self.minimum_bytes
        while nbytes <= self.maximum_bytes:
            yield nbytes
            nbytes = nbytes * self.step_factor if self.step_factor > 1 else nbytes + self.step_bytes

    @property
    def program(self) -> str:
        return f"{self.collective}_perf"

    @property
    def transport(self) -> str:
        if self.processes:
            hosts = len({host for _, host in self.processes})
            return f"ranks on {hosts} host{'s' if hosts > 1 else ''}"
        kinds = {parse(device).kind for device in self.devices}
        return "in-process emulation" if kinds == {"cpu"} else "in-process"


def busbw_factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw of a collective, as defined in nccl-tests' doc/PERFORMANCE.md."""
    shared = (ranks - 1) / ranks
    return {"all_reduce": 2 * shared, "all_gather": shared, "reduce_scatter": shared}.get(collective, 1.0)


@dataclass(frozen=True)
class Timing:
    """The calls of one size, out of place or in place. ``nwrong`` is ``None`` if the elements were not checked."""

    size: int
    times_s: tuple[float, ...]
    nwrong: int | None
    busbw_factor: float

    @property
    def time_us(self) -> float:
        """The mean time of a call, which nccl-tests calls time."""
        return 1e6 * sum(self.times_s) / len(self.times_s)

    @property
    def algbw(self) -> float:
        """Bytes of one replica divided by time, in GB/s (1e9)."""
        return self.size / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        return self.algbw * self.busbw_factor

    def per_iter(self) -> dict[str, Any]:
        """Return statistics of the calls' times."""
        times = np.sort(np.array(self.times_s)) * 1e6
        return {
            "min_us": float(times[0]),
            "max_us": float(times[-1]),
            "avg_us": self.time_us,
            "p50_us": float(np.median(times)),
            "p95_us": _percentile(times, 95),
            "p99_us": _percentile(times, 99),
            "stdev_us": float(times.std()),
            "cv_pct": float(100 * times.std() / times.mean()),
            "times_us": [1e6 * t for t in self.times_s],
        }


@dataclass(frozen=True)
class Row:
    """One measured size."""

    algorithm: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Timing
    in_place: Timing | None

    @property
    def timings(self) -> list[Timing]:
        """The timings of both forms, or of the only one."""
        return [self.out_of_place] if self.in_place is None else [self.out_of_place, self.in_place]


def header(config: Config) -> list[str]:
    """Return the lines before the tables."""
    step = f"{config.step_factor}(factor)" if config.step_factor > 1 else f"{config.step_bytes}(bytes)"
    lines = [
        f"# crossreduce version {__version__} framework={config.framework}-{config.framework_version} "
        f"transport={config.transport}",
        f"# Collective test starting: {config.program}",
        f"# nThread 1 nGpus {_driven(config)} minBytes {config.minimum_bytes} maxBytes {config.maximum_bytes} "
        f"step: {step} warmup iters: {config.warmup_iters} iters: {config.iterations} agg iters: 1 "
        f"validation: {config.validation} graph: 0 unalign: 0",
    ]
    if config.transport == "in-process emulation":
        lines += [
            "#",
            "# IN-PROCESS EMULATION: ALL DEVICES ARE HOST MEMORY OF ONE MACHINE. THESE ARE NOT GPU NUMBERS.",
        ]
    if config.processes:
        lines += ["#", "# EACH RANK'S DATA IS IN HOST MEMORY. THESE ARE NOT GPU NUMBERS."]
    lines += ["#", "# Using devices"]
    return lines + [
        f"#  Rank {d['rank']:2} Group {d['group']:2} Pid {d['pid']:6} on {d['hostname']:>10} device {d['device']:2} "
        f"[{d['device_hex']}] {d['device_info']}"
        for d in devices(config)
    ]


def devices(config: Config) -> list[dict[str, Any]]:
    """Return the devices in nccl-tests' keys; ``device_hex`` is this library's name of the device."""
    places = config.processes or [(os.getpid(), socket.gethostname())] * len(config.devices)
    host = "host memory" if config.processes else "host memory (in-process emulation)"
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
        for rank, (name, (pid, hostname)) in enumerate(zip(config.devices, places, strict=True))
    ]


def table_header(config: Config, algorithm: str) -> list[str]:
    """Return the column headers for one algorithm, or for one backend of ranks."""
    sub = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    left = f"# {'':10}  {'':12}  {'':8}  {'':6}  {'':6}"
    if config.per_iter_timing:
        sub = [*sub[0], "i_min", "i_max", "i_p99", "i_cv%"], [*sub[1], "(us)", "(us)", "(us)", "(%)"]
        over = "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)"
    else:
        over = "           out-of-place                       in-place          "
    names, units = ("  ".join(f"{x:>{w}}" for x, w in zip(s * 2, _widths(config) * 2, strict=True)) for s in sub)
    return [
        "#",
        f"# Backend: {algorithm}" if config.processes else f"# Algorithm: {algorithm}, packs: {config.num_packs}",
        "#",
        left + over,
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {names} ",
        f"# {'(B)':>10}  {'(elements)':>12}  {'':8}  {'':6}  {'':6}  {units} ",
    ]


def line(config: Config, row: Row) -> str:
    """Return a row of the table."""
    cells = [cell for timing in (row.out_of_place, row.in_place) for cell in _cells(config, timing)]
    text = "  ".join(f"{x:>{w}}" for x, w in zip(cells, _widths(config) * 2, strict=True))
    return f"{row.size:12}  {row.count:12}  {row.type:>8}  {row.redop:>6}  {row.root:6}  {text}"


def _cells(config: Config, timing: Timing | None) -> list[str]:
    if timing is None:
        return ["N/A"] * len(_widths(config))
    wrong = "N/A" if timing.nwrong is None else f"{timing.nwrong:g}"
    cells = [_fit(timing.time_us, 7), _fit(timing.algbw, 6), _fit(timing.busbw, 6), wrong]
    if config.per_iter_timing:
        stats = timing.per_iter()
        cells += [_fit(stats[key], 7) for key in ("min_us", "max_us", "p99_us", "cv_pct")]
    return cells


def footer(config: Config, rows: list[Row]) -> list[str]:
    """Return the lines after the tables; like nccl-tests, count the timings that have wrong elements."""
    bad = _bad(rows)
    return [
        f"# Out of bounds values : {bad} {'FAILED' if bad else 'OK'}",
        f"# Avg bus bandwidth    : {_average(rows):g} ",
        "#",
        f"# Collective test concluded: {config.program}",
    ]


def report(config: Config, rows: list[Row], args: list[str], start_time: str) -> dict[str, Any]:
    """Return the run in nccl-tests' keys, where "true" and "false" are strings, with this library's keys added."""
    factor = config.step_factor > 1
    return {
        "version": 2,  # of this layout, nccl-tests' JSON_FILE_VERSION
        "start_time": start_time,
        "args": args,
        "env": {},
        "nccl_version": None,
        "crossreduce": {
            "version": __version__,
            "transport": config.transport,
            "framework": config.framework,
            "framework_version": config.framework_version,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "config": {
            "nthreads": 1,
            "ngpus": _driven(config),
            "minimum_bytes": config.minimum_bytes,
            "maximum_bytes": config.maximum_bytes,
            **({"step_factor": config.step_factor} if factor else {"step_bytes": config.step_bytes}),
            "warmup_iters": config.warmup_iters,
            "iterations": config.iterations,
            "aggregated_iterations": 1,
            "validation": config.validation,
            "graph": 0,
            "blocking_collectives": "true",
            "per_iter_timing": _bool(config.per_iter_timing),
            "parallel_init": "false",
            "algorithms": list(config.algorithms),
            "num_packs": config.num_packs,
        },
        "devices": devices(config),
        "results": results(config, rows),
        "out_of_bounds": {"count": _bad(rows), "okay": _bool(_bad(rows) == 0)},
        "average_bus_bandwidth": {"bandwidth": _average(rows), "okay": "unchecked"},
        "errors": [],
        "end_time": now(),
    }


def results(config: Config, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows in nccl-tests' keys."""
    return [
        {
            "size": row.size,
            "count": row.count,
            "type": row.type,
            "redop": row.redop,
            "root": str(row.root),
            "out_of_place": _timing(row.out_of_place),
            "out_of_place_per_iter": row.out_of_place.per_iter(),
            "in_place": None if row.in_place is None else _timing(row.in_place),
            **({} if row.in_place is None else {"in_place_per_iter": row.in_place.per_iter()}),
            "actual_iterations": len(row.out_of_place.times_s),
            "experiment_name": config.program,
            "algorithm": row.algorithm,
        }
        for row in rows
    ]


def ratios(rows: list[Row], peers: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """Return for each row the peers' median times divided by its own, in place if that form was measured."""

    def median(row: Row) -> float:
        return float(np.median((row.in_place or row.out_of_place).times_s))

    return [
        {
            "size": row.size,
            "root": str(row.root),
            "by_peer": {name: median(theirs[k]) / median(row) for name, theirs in peers.items()},
        }
        for k, row in enumerate(rows)
    ]


def ratio_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return ``ratios`` as lines of the footer."""

    def line(size: object, root: str, cells: Iterable[str]) -> str:
        return f"# {size:>10}  {root:>6}  " + "  ".join(f"{cell:>8}" for cell in cells)

    return [
        "# Median times of the peers divided by those of crossreduce: above 1 crossreduce is faster",
        line("size", "root", found[0]["by_peer"]),
        *(line(row["size"], row["root"], (f"{ratio:.2f}x" for ratio in row["by_peer"].values())) for row in found),
    ]


def now() -> str:
    """Return the local time as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _timing(timing: Timing) -> dict[str, Any]:
    return {"time": timing.time_us, "alg_bw": timing.algbw, "bus_bw": timing.busbw, "nwrong": timing.nwrong}


def _driven(config: Config) -> int:
    """Return the number of devices per process."""
    return 1 if config.processes else len(config.devices)


def _bad(rows: list[Row]) -> int:
    return sum(1 for row in rows for timing in row.timings if timing.nwrong)


def _average(rows: list[Row]) -> float:
    found = [timing.busbw for row in rows for timing in row.timings]
    return math.fsum(found) / len(found)


def _widths(config: Config) -> list[int]:
    return [7, 6, 6, 6, *([7, 7, 7, 7] if config.per_iter_timing else [])]


def _percentile(ordered: Any, percent: int) -> float:
    n = len(ordered)
    return float(ordered[min(n - 1, (n * percent + 99) // 100 - 1)])


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _fit(value: float, width: int) -> str:
    """Return a number in at most ``width`` characters, like getFloatStr of nccl-tests.

    >>> [_fit(x, 6) for x in (1.234, 123.456, 1234.56, 123456.7)]
    ['1.23', '123.46', '1234.6', '123457']
    """
    digits = 0
    while value >= 10**digits:
        digits += 1
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    if digits < width + 1:
        return f"{value:.0f}"
    return f"{value:.1e}" if width >= 7 else f"{value:.0e}"
