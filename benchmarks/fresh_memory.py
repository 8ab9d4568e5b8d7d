"""How long do the frameworks' reductions take if the C library keeps freed memory, and how much memory does that cost?

Each contender runs in fresh processes, with the defaults and after ``crossreduce.keep_memory()`` in turn. Kept: the
median time of a call, the page faults per call, and the resident memory after the calls and at its peak. The ratio is
the median over the turns of time with the defaults / time with kept memory.

Run: python benchmarks/fresh_memory.py [--quick] [--turns N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, keep
from contenders import HCA, JAX, LOOP, TORCH, Batch, N, jax_peer, loop, ours, tensorflow_peers, torch_peer

import crossreduce as cr

OURS, NO_ONEDNN = "ours direct", HCA + ", without oneDNN"
MAKERS = {
    JAX: jax_peer,
    HCA: lambda batch: tensorflow_peers(batch, HCA),
    NO_ONEDNN: lambda batch: {NO_ONEDNN: tensorflow_peers(batch, HCA)[HCA]},
    TORCH: torch_peer,
    LOOP: lambda batch: {LOOP: loop(batch)},
    OURS: lambda batch: {OURS: ours(batch, "direct")},
}
LARGE, SMALL = "64 MiB", "160 x 1 KiB"
SHAPES = {LARGE: [(1 << 24,)], SMALL: [(256,)] * 160}
CASES = [(LARGE, name) for name in MAKERS] + [(SMALL, JAX)]  # small: the price of one arena for all threads
SETTINGS = ("default", "kept")
WARM_UP, CALLS = 20, 15  # the kept memory grows in the first calls, until free blocks fit


def measure(case: str, name: str, setting: str, quick: bool) -> dict[str, float]:
    """Measure one contender in this process."""
    if setting == "kept":
        assert cr.keep_memory()
    batch = Batch.random([(16,)] if quick else SHAPES[case])
    run = MAKERS[name](batch)[name].run
    for _ in range(WARM_UP):
        run()
    times, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    status = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}
    return {
        "median_s": statistics.median(times),
        "faults_per_call": faults / CALLS,
        "resident_bytes": status["VmRSS:"],
        "peak_bytes": status["VmHWM:"],
    }


def in_process(*words: str) -> dict[str, float]:
    """Run ``measure`` in a fresh process."""
    onednn = {"TF_ENABLE_ONEDNN_OPTS": "0"} if NO_ONEDNN in words else {}  # oneDNN has an allocator that keeps memory
    command, environment = [sys.executable, __file__, "--one", *words], {**os.environ, **onednn}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def table(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the Markdown table in docs/host.md."""
    yield "| reduction | default | with `keep_memory()` | times as fast | page faults per call | most resident memory |"
    yield "|---|---|---|---|---|---|"
    for case, found in kept.items():
        rows = [found[setting] for setting in SETTINGS]
        times = " | ".join(f"{row['median_s'] * 1e3:.3g} ms" for row in rows)
        faults = " to ".join(f"{row['faults_per_call']:,.0f}" for row in rows)
        most = " to ".join(f"{row['peak_bytes'] / 2**30:.1f} GiB" for row in rows)
        yield f"| {case} | {times} | {found['ratio']:.1f} | {faults} | {most} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one turn, to see whether it runs")
    parser.add_argument("--turns", type=int, default=5, help="the number of processes per contender and setting")
    parser.add_argument("--json", type=Path, default=RESULTS / "fresh_memory.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one, given.quick)))
        return
    kept = {}
    for case, name in CASES:
        words = ["--quick"] if given.quick else []
        turns = [
            {setting: in_process(case, name, setting, *words) for setting in SETTINGS}
            for _ in range(1 if given.quick else given.turns)
        ]
        rows = {
            setting: {key: statistics.median(turn[setting][key] for turn in turns) for key in turns[0][setting]}
            for setting in SETTINGS
        }
        ratio = statistics.median(turn["default"]["median_s"] / turn["kept"]["median_s"] for turn in turns)
        kept[f"{case}: {name}"] = {"ratio": ratio, **rows}
        print(f"\n{case} over {N} devices: {name}: {ratio:.2f} times as fast with kept memory")
        for setting, row in rows.items():
            print(
                f"  {setting:8} {row['median_s'] * 1e3:9.3f} ms, {row['faults_per_call']:8.0f} page faults per call, "
                f"{row['resident_bytes'] / 2**20:.0f} MiB resident, {row['peak_bytes'] / 2**20:.0f} MiB at most"
            )
    print("\n".join(["", *table(kept)]))
    if not given.quick:
        keep("fresh_memory", {"devices": N, "dtype": "float32", "cases": kept}, given.json)


if __name__ == "__main__":
    main()
