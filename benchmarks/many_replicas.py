"""How long does the first reduction of many replicas in one process take, compared with later ones and a plain loop?

The first call plans, proves and prepares a schedule of about n**2 steps. Arrays are small (4,096 float32), so that the
preparation is most of it. Times are CPU seconds, and each first call has a process of its own.
Run: python benchmarks/many_replicas.py
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import RESULTS, keep, summary

import crossreduce as cr

ALGORITHMS = ("ring", "direct", "halving_doubling")
REPLICAS = (64, 256, 1000)
ELEMENTS, PROCESSES, LATER_RUNS = 4096, 5, 11


def plain(arrays):
    """Sum arrays one after another, and copy the sum for each replica."""
    total = arrays[0] + arrays[1]
    for x in arrays[2:]:
        total += x
    return [total, *(total.copy() for _ in arrays[1:])]


def measured(algorithm: str, n: int) -> dict[str, list[float]]:
    """Return the CPU seconds of the first call of this process, and those of later calls and of the plain loop."""
    warm = cr.PerReplica([np.ones(8, np.float32)] * 2)
    cr.AllReduceCrossDeviceOps("one_device").reduce("sum", warm, warm)  # imports, and loads the kernels
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(ELEMENTS).astype(np.float32) for _ in range(n)]
    value, ops = cr.PerReplica(arrays), cr.AllReduceCrossDeviceOps(algorithm)

    def seconds(run):
        start = time.process_time()
        run()
        return time.process_time() - start

    first = seconds(lambda: ops.reduce("sum", value, value))
    runs = {"later": lambda: ops.reduce("sum", value, value), "plain": lambda: plain(arrays)}
    times = {name: [] for name in runs}
    for _ in range(LATER_RUNS):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {"first": [first], **times}


def in_processes(algorithm: str, n: int) -> dict[str, dict[str, float]]:
    """Return the ``summary`` of the times of several processes; "preparation": a first call less a later one."""
    found: dict[str, list[float]] = {"preparation": []}
    for _ in range(PROCESSES):
        command = [sys.executable, __file__, "--child", algorithm, str(n)]
        times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found["preparation"].append(times["first"][0] - sorted(times["later"])[LATER_RUNS // 2])
        for name, seconds in times.items():
            found.setdefault(name, []).extend(seconds)
    return {name: summary(seconds) for name, seconds in found.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=RESULTS / "many_replicas.json")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child[0], int(options.child[1]))))
        return
    print(f"{ELEMENTS} float32 per replica: medians of CPU time")
    print(f"{'algorithm':18} {'replicas':>8} {'preparation':>12} {'later call':>11} {'plain loop':>11}")
    kept = {}
    for algorithm in ALGORITHMS:
        for n in REPLICAS:
            rows = kept[f"{algorithm} {n}"] = in_processes(algorithm, n)
            first, later, loop = (rows[name]["median_s"] for name in ("preparation", "later", "plain"))
            print(f"{algorithm:18} {n:8} {first:10.3f} s {later * 1e3:8.2f} ms {loop * 1e3:8.2f} ms", flush=True)
    settings = {"clock": "CPU time of the process", "elements": ELEMENTS, "dtype": "float32", "processes": PROCESSES}
    keep("many_replicas", {**settings, "cases": kept}, options.json)


if __name__ == "__main__":
    main()
