"""What every benchmark here shares: a timer, the machine's description, and the JSON that is kept."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def seconds(run: Callable[[], object], repeats: int, inner: int = 1) -> dict[str, float]:
    """Time ``run`` after one warm-up: median, least and greatest seconds of one call."""
    return in_turn({"": run}, repeats, inner)[""]


def in_turn(runs: dict[str, Callable[[], object]], repeats: int, inner: int = 1) -> dict[str, dict[str, float]]:
    """Time several contenders in turn, A B C A B C, so that a machine that drifts drifts for all of them."""
    return {name: summary(times) for name, times in samples(runs, repeats, inner).items()}


def samples(
    runs: dict[str, Callable[[], object]], repeats: int, inner: int = 1, least_s: float = 0.0, rest_s: float = 0.0
) -> dict[str, list[float]]:
    """Return the seconds of one call, in each repeat, of contenders timed in turn after one warm-up each.

    ``least_s``: a contender that is quicker is called as often in a row as takes so long, ``inner`` times at least.
    ``rest_s``: a pause before each contender, in which the last one's waiting threads go to sleep.
    """
    inners, times = {}, {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        if least_s:
            run()
        inners[name] = max(inner, int(least_s / (time.perf_counter() - start)))
        times[name] = []
    for _ in range(repeats):
        for name, run in runs.items():
            time.sleep(rest_s)
            start = time.perf_counter()
            for _ in range(inners[name]):
                run()
            times[name].append((time.perf_counter() - start) / inners[name])
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, least and greatest of the seconds of several runs."""
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "runs": len(times)}


def machine() -> dict[str, Any]:
    """Describe the machine by what matters to a benchmark, and by nothing that names it."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (x.partition(":")[2].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), model
        )
    versions = {}
    for name in ("crossreduce", "numpy", "ml_dtypes", "torch", "jax", "tensorflow_cpu", "mpi4py"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
    }


def keep(name: str, result: dict[str, Any], path: Path | None = None) -> None:
    """Write the result beside earlier ones, or to ``path``; where that is left open, the command line may say."""
    if path is None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
        path = parser.parse_args().json
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), **result}, indent=1) + "\n")
    print(f"kept in {path.name}")
