"""Are exact sums right? Compare the kernels with sums in fixed point, on many random elements.

For each dtype and kind of data, in turn with 2 to 64 terms: sums and means of random elements by the kernels of each
instruction set, beside the reference of exact_reference.cpp of the tests, which tests compare with fractions. Besides,
float64 accumulation without a certificate: how many sums of floats does it round wrongly?
Run: python benchmarks/exact_bits.py [--elements 1000000000] [--others 100000000] [--jobs N] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import RESULTS, keep, tests_on_path

from crossreduce import kernels
from crossreduce.kernels import FusedProgram, Segment

tests_on_path()
from exact_reference import FORMATS, KINDS, random_terms, reference_sums

TERMS = (2, 3, 4, 5, 8, 16, 32, 64)
SIZE = 1 << 16  # elements of a case


def dtype_of(name: str) -> Any:
    """Return NumPy's dtype with a name."""
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def kernel_sums(isa: str, terms: Any, dtype: str, divisor: int) -> Any:
    """Return the bits of the kernels' exact sums."""
    n, size = terms.shape
    program, out = FusedProgram(1, ((0, *range(n)),), (~0,)), np.empty(size, terms.dtype)
    made = kernels.native().Kernel(
        isa, "exact_sum", dtype, dtype, dtype, divisor, n, 1, (size,), (program,), (Segment(0, 0, size, 0),)
    )
    addresses = [row.ctypes.data for row in terms]
    made.run([addresses], [[out.ctypes.data]], 1, False, False)
    return out


def accumulated(terms: Any, dtype: str) -> Any:
    """Return the bits of sums in float64, rounded to the dtype at the end."""
    total = terms[0].view(dtype_of(dtype)).astype(np.float64)
    for row in terms[1:]:
        total += row.view(dtype_of(dtype))
    return total.astype(dtype_of(dtype)).view(terms.dtype)


def compare(dtype: str, kind: str, elements: int) -> dict[str, Any]:
    """Compare at least a number of elements, and return the counts of different ones."""
    done = wrong = wrong_accumulated = seed = 0
    sets = kernels.native().supported()
    start = time.perf_counter()
    while done < elements:
        n = TERMS[seed % len(TERMS)]
        divisor = n if seed // len(TERMS) % 2 else 1
        terms = random_terms(dtype, kind, seed, n, SIZE)
        right = reference_sums(terms, dtype, divisor)
        wrong += int((kernel_sums(sets[seed % len(sets)], terms, dtype, divisor) != right).sum())
        if divisor == 1 and kind != "any bits":  # no NaNs, whose payloads may differ
            with np.errstate(all="ignore"):
                wrong_accumulated += int((accumulated(terms, dtype) != right).sum())
        done += SIZE
        seed += 1
    return {
        "dtype": dtype,
        "kind": kind,
        "elements": done,
        "wrong": wrong,
        "wrong in float64 without certificate": wrong_accumulated,
        "of sums": done // 2,
        "seconds": round(time.perf_counter() - start),
    }


def main() -> int:
    """Compare all dtypes and kinds; the exit code is 1 if an element differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000_000, help="of float32, of all kinds together")
    parser.add_argument("--others", type=int, default=100_000_000, help="of each other dtype")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, default=RESULTS / "exact_bits.json")
    arguments = parser.parse_args()
    counts = {dtype: arguments.elements if dtype == "float32" else arguments.others for dtype in FORMATS}
    cases = list(itertools.product(sorted(FORMATS, key=lambda name: name != "float32"), KINDS))
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        shares = [-(-counts[dtype] // len(KINDS)) for dtype, _ in cases]
        for row in pool.map(compare, *zip(*cases, strict=True), shares):
            rows.append(row)
            print(row, flush=True)
    found = {"instruction sets": kernels.native().supported(), "terms": TERMS, "rows": rows}
    keep("exact_bits", found, arguments.json)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
