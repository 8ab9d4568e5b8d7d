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
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner)
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "runs": repeats}


def in_turn(runs: dict[str, Callable[[], object]], repeats: int, inner: int = 1) -> dict[str, dict[str, float]]:
    """Time several contenders in turn, A B C A B C, so that a machine that drifts drifts for all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(inner):
                run()
            times[name].append((time.perf_counter() - start) / inner)
    return {
        name: {"median_s": statistics.median(ts), "min_s": min(ts), "max_s": max(ts), "runs": repeats}
        for name, ts in times.items()
    }


def machine() -> dict[str, Any]:
    """Describe the machine by what matters to a benchmark, and by nothing that names it."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (x.partition(":")[2].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), model
        )
    versions = {}
    for name in ("crossreduce", "numpy", "torch", "jax", "tensorflow_cpu"):
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


def keep(name: str, result: dict[str, Any]) -> None:
    """Write the result beside earlier ones, unless the command line says where."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
    path = parser.parse_args().json
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), **result}, indent=1) + "\n")
    print(f"kept in {path.name}")
