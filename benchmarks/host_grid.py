"""Is there a size or a number of replicas at which a plain loop is faster?

Sums of 2 to 64 NumPy arrays of 64 B to 256 MiB (as far as 4 GiB hold all of them), of three dtypes, at the start of a
page and 16 bytes after a cache line, into given arrays (out=) and into new ones. In turn with them, on one thread: a
NumPy loop with copies, and a tiled loop in C, which adds up to four sources at a time into a tile of 8 KiB and copies
that to each result. ``np.copyto`` of the same bytes, on all threads, shows the rate of the memory. The questions:

- excess: by how many microseconds is a call slower than the faster loop? (With new results: than the faster loop and
  ``np.empty`` for each result.)
- rate: from 4 MiB read and written on, how many times as fast as the NumPy loop is it?
- cliff: by which factor does the time grow if the size doubles, and how much more than that of the faster loop? (from
  16 KiB on)

With --frameworks, torch tensors beside torch's own chain of ``add_`` and copies, instead of the grid.
Run: python benchmarks/host_grid.py [--quick] [--frameworks] [--json PATH]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import RESULTS, keep, size_text

import crossreduce as cr
from crossreduce import kernels

MOST_BYTES = 4 << 30  # of all arrays of a case
REPLICAS = (2, 3, 8, 16, 32, 64)
DTYPES = {"float32": ("float", np.dtype("float32")), "float64": ("double", np.dtype("float64"))}
DTYPES["bfloat16"] = ("bfloat16", np.dtype(ml_dtypes.bfloat16))
LOOP, C, OURS, FRESH, COPY, EMPTY = "NumPy loop", "tiled C loop", "ours, out=", "ours", "copy", "np.empty"
C_LOOP = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static float widened(uint16_t x) { uint32_t y = (uint32_t)x << 16; float z; memcpy(&z, &y, 4); return z; }
static uint16_t narrowed(float x) {
    uint32_t y; memcpy(&y, &x, 4);
    return x == x ? (uint16_t)((y + 0x7fff + (y >> 16 & 1)) >> 16) : (uint16_t)((y >> 16 & 0x8000) | 0x7fc0);
}
#define SAME(x) (x)
#define LOOP(NAME, T, ACC, READ, WRITE) \\
void NAME(const T **src, int sources, T **dst, int results, size_t size) { \\
    enum { TILE = 8192 / sizeof(ACC) }; \\
    static __thread ACC tile[TILE] __attribute__((aligned(64))); \\
    static __thread T out[TILE] __attribute__((aligned(64))); \\
    for (size_t at = 0; at < size; at += TILE) { \\
        const size_t n = size - at < TILE ? size - at : TILE; \\
        for (size_t i = 0; i < n; i++) tile[i] = READ(src[0][at + i]); \\
        int k = 1; \\
        for (; k + 3 < sources; k += 4) { \\
            const T *a = src[k] + at, *b = src[k + 1] + at, *c = src[k + 2] + at, *d = src[k + 3] + at; \\
            for (size_t i = 0; i < n; i++) \\
                tile[i] = (((tile[i] + READ(a[i])) + READ(b[i])) + READ(c[i])) + READ(d[i]); \\
        } \\
        for (; k < sources; k++) for (size_t i = 0; i < n; i++) tile[i] += READ(src[k][at + i]); \\
        for (size_t i = 0; i < n; i++) out[i] = WRITE(tile[i]); \\
        for (int r = 0; r < results; r++) memcpy(dst[r] + at, out, n * sizeof(T)); \\
    } \\
}
LOOP(sum_float, float, float, SAME, SAME)
LOOP(sum_double, double, double, SAME, SAME)
LOOP(sum_bfloat16, uint16_t, float, widened, narrowed)
"""


def compiled() -> ctypes.CDLL:
    """Compile the C loop for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(C_LOOP)
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def array(nbytes: int, dtype: np.dtype, offset: int, value: float) -> np.ndarray:
    """Return an array that begins ``offset`` bytes after the start of a page."""
    memory = np.empty(nbytes + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + offset
    found = memory[start : start + nbytes].view(dtype)
    found[:] = value
    return found


def medians(runs: dict[str, Callable[[], object]], least: int, budget_s: float) -> dict[str, float]:
    """Return the median seconds of a call of each contender; they run in turn, at least ``least`` turns."""
    inner, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        inner[name] = max(1, int(1e-4 / max(time.perf_counter() - start, 1e-7)))
    end = time.perf_counter() + budget_s
    for turn in itertools.count():
        if turn >= least and time.perf_counter() > end:
            return {name: statistics.median(found) for name, found in times.items()}
        for name, run in runs.items():
            run()  # finds the caches as it leaves them itself
            start = time.perf_counter()
            for _ in range(inner[name]):
                run()
            times[name].append((time.perf_counter() - start) / inner[name])
    raise AssertionError


def grid_case(library: Any, dtype: str, replicas: int, nbytes: int, offset: int, budget_s: float) -> dict[str, float]:
    """Return the median seconds of all contenders for one size."""
    name, kind = DTYPES[dtype]
    xs = [array(nbytes, kind, offset, float(k % 4)) for k in range(replicas)]
    outs = [array(nbytes, kind, offset, -1.0) for _ in xs]
    value, out = cr.PerReplica(xs), cr.PerReplica(outs)
    ops = cr.HierarchicalCopyAllReduce()
    sources, results = ((ctypes.c_void_p * replicas)(*(x.ctypes.data for x in each)) for each in (xs, outs))
    in_c, size = getattr(library, f"sum_{name}"), ctypes.c_size_t(nbytes // kind.itemsize)

    def loop() -> None:
        np.add(xs[0], xs[1], out=outs[0])
        for x in xs[2:]:
            np.add(outs[0], x, out=outs[0])
        for result in outs[1:]:
            result[:] = outs[0]

    threads = kernels.threads()

    def copy() -> None:
        for result, x in zip(outs, xs, strict=True):
            np.copyto(result, x)

    runs = {
        LOOP: loop,
        C: lambda: in_c(sources, replicas, results, replicas, size),
        OURS: lambda: ops.reduce("sum", value, value, out=out),
        FRESH: lambda: ops.reduce("sum", value, value),
        EMPTY: lambda: [np.empty(x.shape, x.dtype) for x in xs],
    }
    if dtype == "bfloat16" and nbytes * replicas > 1 << 24:
        del runs[LOOP]  # it takes seconds
    with ThreadPoolExecutor(threads) as pool:
        parts = [range(k, replicas, threads) for k in range(threads)]
        if nbytes * replicas >= 1 << 20:
            copy_some = lambda some: [np.copyto(outs[k], xs[k]) for k in some]  # noqa: E731
            runs[COPY] = lambda: list(pool.map(copy_some, parts))
        else:
            runs[COPY] = copy
        for run in (runs[C], runs[OURS]):
            for x in outs:
                x[:] = -1
            run()
            expected = float(sum(k % 4 for k in range(replicas)))
            assert all((x.astype("float64") == expected).all() for x in outs), "a wrong sum"
        return medians(runs, 3, budget_s)


def fastest(seconds: dict[str, float], name: str) -> float:
    """Return the faster loop's seconds; if the contender ``name`` makes new results, with those of ``np.empty``."""
    return min(seconds.get(loop, float("inf")) for loop in (LOOP, C)) + (seconds[EMPTY] if name == FRESH else 0)


def grid(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of the grid."""
    library = compiled()
    exponents = (10, 14, 16) if quick else (6, 8, 10, 12, *range(14, 29))
    for dtype, replicas, offset in itertools.product(DTYPES, (2, 8) if quick else REPLICAS, (16, 0)):
        for exponent in exponents:
            nbytes = 1 << exponent
            if 2 * replicas * nbytes > MOST_BYTES:
                continue
            if (dtype != "float32" or offset == 0) and exponent % 2:
                continue  # every size for float32, every other one elsewhere
            found = grid_case(library, dtype, replicas, nbytes, offset, 0.05 if quick else 0.15)
            row = {"dtype": dtype, "replicas": replicas, "offset": offset, "bytes": nbytes, "seconds": found}
            excess = [(found[name] - fastest(found, name)) * 1e6 for name in (OURS, FRESH)]
            rates = [fastest(found, name) / found[name] for name in (OURS, FRESH)]
            print(
                f"  {dtype:9} {replicas:3} x {size_text(nbytes):8} +{offset:2}: "
                + " ".join(f"{name} {seconds * 1e6:.4g}" for name, seconds in found.items())
                + f" us; out= {excess[0]:+.1f} us, x{rates[0]:.2f}; new {excess[1]:+.1f} us, x{rates[1]:.2f}",
                flush=True,
            )
            yield row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers to the questions, and print them."""
    answers: dict[str, Any] = {}
    for name in (OURS, FRESH):
        excess = {}
        for row in rows:
            found = row["seconds"]
            key = f"{row['dtype']} {row['replicas']} x {size_text(row['bytes'])} +{row['offset']}"
            excess[key] = (found[name] - fastest(found, name)) * 1e6
        slower = {key: value for key, value in excess.items() if value > 3}
        worst = sorted(slower.items(), key=lambda item: -item[1])[:5]
        large = {}
        for least in (2, 8):
            ratios = [
                row["seconds"][LOOP] / row["seconds"][name]
                for row in rows
                if LOOP in row["seconds"] and row["replicas"] >= least and 2 * row["replicas"] * row["bytes"] >= 1 << 22
            ]
            large[f"from {least} replicas"] = {"least": min(ratios, default=None)}
            if ratios:
                large[f"from {least} replicas"]["median"] = statistics.median(ratios)
        doubled = [
            (a["seconds"], b["seconds"])
            for a, b in itertools.pairwise(rows)
            if b["bytes"] == 2 * a["bytes"] and a["bytes"] >= 1 << 14
        ]
        steps = [b[name] / a[name] for a, b in doubled]
        beside = [step * fastest(a, name) / fastest(b, name) for step, (a, b) in zip(steps, doubled, strict=True)]
        answers[name] = {
            "cases": len(excess),
            "slower by more than 3 us": len(slower),
            "worst, us": dict(worst),
            "times as fast as the NumPy loop, from 4 MiB on": large,
            "greatest factor of a doubled size": max(steps, default=None),
            "greatest factor of a doubled size, over the loop's": max(beside, default=None),
        }
        print(f"\n{name}: {answers[name]}")
    return answers


def torch_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of torch tensors, beside torch's own operations."""
    import torch

    ops = cr.HierarchicalCopyAllReduce()
    for replicas, exponent in itertools.product((2, 8, 32), (8, 10) if quick else range(6, 27, 2)):
        size = (1 << exponent) // 4
        if 2 * replicas * size * 4 > MOST_BYTES:
            continue
        xs, outs = ([torch.ones(size) for _ in range(replicas)] for _ in range(2))
        value, out = cr.PerReplica(xs), cr.PerReplica(outs)

        def chain(xs: list[Any] = xs, outs: list[Any] = outs) -> None:
            torch.add(xs[0], xs[1], out=outs[0])
            for x in xs[2:]:
                outs[0].add_(x)
            for result in outs[1:]:
                result.copy_(outs[0])

        def fresh(xs: list[Any] = xs) -> list[Any]:
            total = xs[0] + xs[1]
            for x in xs[2:]:
                total.add_(x)
            return [total, *(total.clone() for _ in xs[1:])]

        runs = {
            "torch add_ and copies, out=": chain,
            "torch add_ and clones": fresh,
            OURS: lambda value=value, out=out: ops.reduce("sum", value, value, out=out),
            FRESH: lambda value=value: ops.reduce("sum", value, value),
        }
        found = medians(runs, 5, 0.05 if quick else 0.3)
        ratios = found[OURS] / found["torch add_ and copies, out="], found[FRESH] / found["torch add_ and clones"]
        print(
            f"  {replicas} x {size_text(4 * size)}: ours / torch: out= {ratios[0]:.2f}, new {ratios[1]:.2f}", flush=True
        )
        yield {"replicas": replicas, "bytes": 4 * size, "seconds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--frameworks", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = "host_grid_torch" if options.frameworks else "host_grid"
    rows = list(torch_rows(options.quick) if options.frameworks else grid(options.quick))
    result = {"rows": rows} | ({} if options.frameworks else {"answers": summary(rows)})
    if options.json is not None or not options.quick:
        keep(name, {"threads": kernels.threads(), **result}, options.json or RESULTS / f"{name}.json")


if __name__ == "__main__":
    main()
