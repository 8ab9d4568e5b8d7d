"""What do exact sums cost, and what do they give? Sums of 8 replicas with ``exact=True`` beside the default.

Each contender runs in turn with the default; a ratio is the median of the ratios of neighbouring runs: of the time, and
of the CPU time, which other programs on the machine disturb less. All results are written to given arrays (out=), by
all threads. The cases: every dtype of 64 MiB per replica and of 1 KiB, the mean of 7
replicas, cancelling data, and the kernels of each instruction set. Beside them: accumulation in float64 without a
certificate, ``math.fsum`` element by element, and how many elements float64 accumulation gets wrong (from
results/exact_bits.json, which exact_bits.py writes).
Run: python benchmarks/exact_sums.py [--mib 64] [--repeats 9] [--json PATH]
     python benchmarks/exact_sums.py --page docs/explanation/exactness.md, which writes the kept numbers into the page
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import RESULTS, keep

import crossreduce as cr
from crossreduce import kernels
from crossreduce.kernels import FusedProgram, Segment
from crossreduce.planning.explain import duration

N = 8
EXACT = cr.CommunicationOptions(exact=True)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
SOURCES = {
    "ReproBLAS": "Demmel, Ahrens & Nguyen, Efficient Reproducible Floating Point Summation and BLAS, "
    "UCB/EECS-2016-121, 2016: the dot product of 4096 float64 takes 4 times as long as MKL's"
}


def ratios(base: Callable[[], object], others: dict[str, Callable[[], object]], repeats: int, inner: int) -> Any:
    """Return the median seconds of each function, and the median ratios to neighbouring runs of the first."""

    def once(run: Callable[[], object]) -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(inner):
            run()
        return (time.perf_counter() - start) / inner, (time.process_time() - cpu) / inner

    for run in (base, *others.values()):
        run()
    times: dict[str, list[Any]] = {name: [] for name in others}
    for _ in range(repeats):
        for name, run in others.items():
            times[name].append((once(base), once(run)))
    found = {}
    for name, pairs in times.items():
        found[name] = {
            "ratio": statistics.median(own[0] / first[0] for first, own in pairs),
            "cpu_ratio": statistics.median(own[1] / first[1] for first, own in pairs),
            "seconds": statistics.median(own[0] for _, own in pairs),
            "default_seconds": statistics.median(first[0] for first, _ in pairs),
        }
    return found


def arrays(dtype: str, size: int, data: str = "random") -> list[Any]:
    """Return the arrays of all replicas.

    They are random numbers, or pairs of opposite ones of very different magnitudes ("cancelling"), or numbers of which
    every sum needs fixed point: a tie, which 2^-140 breaks while larger numbers cancel ("worst").
    """
    rng = np.random.default_rng(0)
    if data == "worst":
        made = [np.full(size, 2.0**k, "float32") for k in (0, -24, -80, -140)]
        return [*made, -made[2], *(np.zeros(size, "float32") for _ in range(N - 5))]
    made = [rng.standard_normal(size, dtype="float32") for _ in range(N)]
    if data == "cancelling":
        scale = (10.0 ** rng.uniform(0, 12, size)).astype("float32")
        for k in range(0, N - 2, 2):
            made[k] *= scale
            made[k + 1] = -made[k]
    return [x.astype(DTYPES[dtype]) for x in made]


def api(op: str, xs: list[Any], outs: list[Any], options: Any) -> Callable[[], object]:
    """Return a call of ``all_reduce``."""
    return lambda: cr.all_reduce(xs, op, options=options, out=outs)


def kernel(isa: str, op: str, dtypes: tuple[str, str, str], xs: list[Any], outs: list[Any]) -> Callable[[], object]:
    """Return a run of a kernel on one thread."""
    size, program = xs[0].size, FusedProgram(1, ((0, *range(N)),), (~0,) * N)
    made = kernels.native().Kernel(isa, op, *dtypes, 1, N, N, (size,), (program,), (Segment(0, 0, size, 0),))
    sources, results = [x.ctypes.data for x in xs], [x.ctypes.data for x in outs]
    streaming = sum(x.nbytes for x in outs) >= kernels.STREAMING_BYTES
    return lambda: made.run([sources], [results], 1, streaming, False)


def fsum(xs: list[Any]) -> Callable[[], object]:
    """Return the sum by ``math.fsum``, which rounds to float64, of the first elements."""
    rows = [x[:20_000].tolist() for x in xs]
    return lambda: [math.fsum(terms) for terms in zip(*rows, strict=True)]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="bytes of a replica in the large cases")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "exact_sums.json")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        write_tables(arguments.page, json.loads(arguments.json.read_text()))
        return
    rows: dict[str, Any] = {}

    def report(case: str, found: dict[str, Any]) -> None:
        rows[case] = found
        for name, row in found.items():
            times = f"{row['seconds'] * 1e3:10.3f} ms  x{row['ratio']:.2f}, CPU x{row['cpu_ratio']:.2f}"
            print(f"{case:32} {name:24} {times}", flush=True)

    for dtype in DTYPES:
        for nbytes, inner in ((arguments.mib << 20, 1), (1 << 10, 100)):
            size = nbytes // np.dtype(DTYPES[dtype]).itemsize
            text = f"{dtype}, {arguments.mib} MiB" if inner == 1 else f"{dtype}, 1 KiB"
            outs = [np.zeros(size, DTYPES[dtype]) for _ in range(N)]
            for data in ("random", "cancelling", "worst") if dtype == "float32" and inner == 1 else ("random",):
                xs = arrays(dtype, size, data)
                sums = {"exact sum": api("sum", xs, outs, EXACT)}
                repeats = 1 if data == "worst" else arguments.repeats
                report(f"{text}, {data}", ratios(api("sum", xs, outs, None), sums, repeats, inner))
            xs = arrays(dtype, size)
            means = {"exact mean": api("mean", xs[:7], outs[:7], EXACT)}
            report(f"{text}, 7 replicas", ratios(api("mean", xs[:7], outs[:7], None), means, arguments.repeats, inner))
    for isa in kernels.native().supported():
        for dtype in DTYPES:
            size = (4 << 20) // np.dtype(DTYPES[dtype]).itemsize
            xs, outs = arrays(dtype, size), [np.zeros(size, DTYPES[dtype]) for _ in range(N)]
            wide = "float64" if dtype == "float64" else "float32"
            others = {"exact sum": kernel(isa, "exact_sum", (dtype, wide, dtype), xs, outs)}
            if dtype == "float32":
                others["float64, no certificate"] = kernel(isa, "sum", (dtype, "float64", dtype), xs, outs)
            base = kernel(isa, "sum", (dtype, wide, dtype), xs, outs)
            report(f"{isa}, {dtype}, 4 MiB, 1 thread", ratios(base, others, arguments.repeats, 1))
    xs = [x[:20_000] for x in arrays("float64", 20_000)]
    outs = [np.zeros(20_000) for _ in range(N)]
    others = {"exact sum": api("sum", xs, outs, EXACT), "math.fsum": fsum(xs)}
    report("float64, 20,000 elements", ratios(api("sum", xs, outs, None), others, arguments.repeats, 3))
    keep("exact_sums", {"replicas": N, "cases": rows, "sources": SOURCES}, arguments.json)


def write_tables(page: Path, kept: dict[str, Any]) -> None:
    """Write the tables of times and of wrong elements into a page, between its marks."""
    times = ["| 8 replicas, NumPy, in place of the default | time | ratio | ratio of CPU times |", "|---|---|---|---|"]
    for case, contenders in kept["cases"].items():
        for name, row in contenders.items():
            cells = f"{duration(row['seconds'])} | {row['ratio']:.2f} | {row['cpu_ratio']:.2f}"
            times.append(f"| {case}: {name} | {cells} |")
    bits = ["| elements | checked | wrong | wrong in float64 without certificate |", "|---|---|---|---|"]
    for row in json.loads((RESULTS / "exact_bits.json").read_text())["rows"]:
        plain = f"{row['wrong in float64 without certificate']:,} of {row['of sums']:,} sums"
        plain = "not compared (NaNs)" if row["kind"] == "any bits" else plain
        bits.append(f"| {row['dtype']}, {row['kind']} | {row['elements']:,} | {row['wrong']} | {plain} |")
    text = page.read_text()
    for mark, lines in (("times", times), ("bits", bits)):
        head, start, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
        assert end, f"{page} has no marks of {mark}"
        text = head + start + "\n".join(lines) + "\n" + end + tail
    page.write_text(text)


if __name__ == "__main__":
    main()
