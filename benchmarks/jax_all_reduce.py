"""Is ``crossreduce.jax.all_reduce`` faster than ``jax.lax.psum`` on the CPU devices of one process, or of several?

Both run under ``jit`` and ``shard_map`` on 8 devices, for one array of 64 B to 64 MiB, and for ResNet-50's 161
gradients; the arrays are donated, or not. The contenders of a case run in turn, and the ratio is the median of their
ratios within each turn. A donated array is the result of the call before, so its memory is not new.

With ``--processes``, both run in jobs of 2 and 4 processes on this machine, with 1 and 4 devices each, where psum sends
data by gloo. The processes of a job measure together, and process 0 reports.

Run: python benchmarks/jax_all_reduce.py [--processes] [--repeats N] [--only TEXT] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, keep, size_text, summary, tests_on_path
from contenders import N, jax_mesh
from host_reduction import RESNET50

MIN_S, MAX_CALLS = 0.02, 100  # a fast contender is called repeatedly in a turn
TARGETS = {  # the most times of all_reduce / psum, by the case
    "float32, donated: 64 MiB": 0.22,
    "float32, donated: 16 MiB": 0.45,
    "float32, donated: 1 KiB": 1.0,
    "float32, donated: ResNet-50's 161 gradients": 0.4,
}

JOBS = ((2, 1), (2, 4), (4, 1), (4, 4))  # processes, and devices of each
MOST_SHARED = 1 << 30  # bytes of the arrays of all devices of a job
JOB_TARGETS = {"1 KiB": 1 / 3, "64 MiB": 1 / 3}  # as TARGETS, for jobs of several processes


def program(reduce: Callable[[Any], Any], donated: bool) -> Any:
    """Return a jitted function that reduces a list of arrays over 8 devices."""
    import jax

    rows = jax.sharding.PartitionSpec("replica")
    over = jax.shard_map(reduce, mesh=jax_mesh(), in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(over, donate_argnums=0 if donated else ())


def arrays(sizes: list[int], dtype: str) -> list[Any]:
    """Return new arrays of random numbers, each with one row per device."""
    import jax

    sharding = jax.sharding.NamedSharding(jax_mesh(), jax.sharding.PartitionSpec("replica"))
    rng = np.random.default_rng(0)
    rows = [np.broadcast_to(rng.standard_normal(size, np.float32) * 1e-9, (N, size)) for size in sizes]
    return [jax.device_put(x.astype(dtype), sharding) * 1 for x in rows]


def compare(sizes: list[int], dtype: str, donated: bool, repeats: int) -> dict[str, Any]:
    """Return the times of both contenders and the median of their ratios."""
    import jax

    from crossreduce.jax import all_reduce

    contenders = {
        "all_reduce": program(lambda xs: all_reduce(xs, "replica"), donated),
        "psum": program(lambda xs: jax.lax.psum(xs, "replica"), donated),
    }
    xs = {name: arrays(sizes, dtype) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    calls = 1
    for turn in range(repeats + 2):
        for name, run in contenders.items():
            values = jax.block_until_ready(xs[name])
            start = time.perf_counter()
            for _ in range(calls):
                results = jax.block_until_ready(run(values))
                values = results if donated else values
            seconds = (time.perf_counter() - start) / calls
            xs[name] = values
            if turn > 1:
                times[name].append(seconds)
            elif turn == 1 and name == "psum":
                calls = max(1, min(MAX_CALLS, int(MIN_S / seconds)))
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    return {**{name: summary(seconds) for name, seconds in times.items()}, "ratio": ratio}


def work(number: int, processes: int, devices: int, address: str, repeats: int) -> None:
    """Measure in one process of a job. Process 0 prints the cases as JSON."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, number)
    from crossreduce.jax import all_reduce

    rows = jax.sharding.PartitionSpec("replica")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    functions = {"all_reduce": lambda x: all_reduce(x, "replica"), "psum": lambda x: jax.lax.psum(x, "replica")}
    found: dict[str, Any] = {}
    for size in (1 << k for k in range(10, 27, 4)):
        count = processes * devices
        if size * count > MOST_SHARED:
            continue
        sharding = jax.sharding.NamedSharding(mesh, rows)
        x = jax.make_array_from_callback(
            (count, size // 4), sharding, lambda _, size=size: np.ones((1, size // 4), "f4")
        )
        runs = {
            name: jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
            for name, function in functions.items()
        }
        calls = max(1, min(50, (1 << 20) // size * 5))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 1):
            for name, run in runs.items():
                jax.block_until_ready(run(x))  # all processes begin together
                start = time.perf_counter()
                for _ in range(calls):
                    jax.block_until_ready(run(x))
                if turn:
                    times[name].append((time.perf_counter() - start) / calls)
        ratio = statistics.median(times["all_reduce"]) / statistics.median(times["psum"])
        found[size_text(size)] = {**{name: summary(seconds) for name, seconds in times.items()}, "ratio": ratio}
    if number == 0:
        print(json.dumps(found), flush=True)


def compare_jobs(repeats: int, only: str) -> dict[str, Any]:
    """Run all jobs, print their ratios, and return their cases."""
    tests_on_path()
    from free_port import free_port

    kept = {}
    for processes, devices in JOBS:
        name, address = f"{processes} x {devices}", f"127.0.0.1:{free_port()}"
        if only not in name:
            continue
        arguments = [str(processes), str(devices), address, str(repeats)]
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", str(number), *arguments], stdout=subprocess.PIPE, text=True
            )
            for number in range(processes)
        ]
        kept[name] = json.loads(workers[0].communicate()[0].splitlines()[-1])
        for worker in workers:
            worker.wait()
        for size, found in kept[name].items():
            most = JOB_TARGETS.get(size, 1.0)
            ours, theirs = (found[key]["median_s"] * 1e3 for key in ("all_reduce", "psum"))
            verdict = "" if found["ratio"] <= most else "MISSED"
            text = f"{ours:9.3f} ms, psum {theirs:9.3f} ms: {found['ratio']:.2f} (<= {most:.2f})"
            print(f"{name}: {size:8} {text} {verdict}")
    return kept


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        number, processes, devices, address, repeats = sys.argv[2:]
        work(int(number), int(processes), int(devices), address, int(repeats))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="the number of turns of each case")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--processes", action="store_true", help="measure jobs of several processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = options.json or RESULTS / f"jax_{'processes' if options.processes else 'all_reduce'}.json"
    if options.processes:
        jobs = compare_jobs(options.repeats, options.only)
        if not options.only:
            keep("jax_processes", {"jobs": jobs}, path)
        return
    gradients = [math.prod(shape) for shape in RESNET50]
    kept = {}
    for dtype in ("float32", "bfloat16"):
        width = 4 if dtype == "float32" else 2
        for donated in (True, False):
            cases = {size_text(1 << k): [(1 << k) // width] for k in range(6, 27, 2)}
            for text, sizes in {**cases, "ResNet-50's 161 gradients": gradients}.items():
                name = f"{dtype}, {'donated' if donated else 'not donated'}: {text}"
                if options.only not in name:
                    continue
                kept[name] = found = compare(sizes, dtype, donated, options.repeats)
                most = TARGETS.get(name, 1.0)
                ours, theirs = (found[key]["median_s"] * 1e3 for key in ("all_reduce", "psum"))
                verdict = "" if found["ratio"] <= most else "MISSED"
                print(f"{name:50} {ours:9.3f} ms, psum {theirs:9.3f} ms: {found['ratio']:.2f} (<= {most:g}) {verdict}")
    if not options.only:
        keep("jax_all_reduce", {"devices": N, "cases": kept}, path)


if __name__ == "__main__":
    main()
