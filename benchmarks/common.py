"""Shared by all benchmarks: a timer, a description of the machine, and the JSON file of results."""

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossreduce.cli.bench.machine import machine

RESULTS = Path(__file__).parent / "results"


def tests_on_path() -> None:
    """Let Python find the modules of the tests: oracles, clocks of exported files, simulated hosts."""
    support = Path(__file__).parents[1] / "tests/support"
    sys.path[:0] = [str(support), *map(str, support.iterdir())]


def in_turn(runs: dict[str, Callable[[], object]], repeats: int, inner: int = 1) -> dict[str, dict[str, float]]:
    """Return the ``summary`` of the times of each contender. They run in turn, so that a drift in speed affects all."""
    return {name: summary(times) for name, times in samples(runs, repeats, inner).items()}


def samples(
    runs: dict[str, Callable[[], object]],
    repeats: int,
    inner: int = 1,
    least_s: float = 0.0,
    rest_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return for each contender the seconds of one call in each repeat. They run in turn, after a warm-up each.

    Args:
      runs: the contenders by name.
      repeats: how many times each contender is measured.
      inner: the least number of calls per measurement.
      least_s: about the least time of a measurement; a contender that is faster is called more often.
      rest_s: a pause before each measurement, during which waiting threads of the previous contender go to sleep.
      clock: returns seconds.
    """

    def seconds(run: Callable[[], object], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            run()
        return clock() - start

    inners, times = dict.fromkeys(runs, inner), {name: [] for name in runs}
    for name, run in runs.items():
        run()
        while least_s and seconds(run, inners[name]) < least_s:
            inners[name] *= 2
    for _ in range(repeats):
        for name, run in runs.items():
            time.sleep(rest_s)
            times[name].append(seconds(run, inners[name]) / inners[name])
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, least and greatest of several times, and their number."""
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "runs": len(times)}


def size_text(nbytes: int) -> str:
    """Return a number of bytes as text, such as ``64 MiB``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def keep(name: str, result: dict[str, Any], path: Path | None = None) -> None:
    """Write a result to ``path``, by default ``name``.json in results/."""
    path = path or RESULTS / f"{name}.json"
    kept = {"benchmark": name, "date": datetime.date.today().isoformat(), "machine": machine(), **result}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"kept in {path.name}")
