"""Is ``crossreduce.jax.all_reduce`` faster than ``jax.lax.psum`` on the CPU devices of one process?

Both run under ``jit`` and ``shard_map`` on 8 devices, for one array of 64 B to 64 MiB, and for ResNet-50's 161
gradients; the arrays are donated, or not. The contenders of a case run in turn, and the ratio is the median of their
ratios within each turn. A donated array is the result of the call before, so its memory is not new.

Run: python benchmarks/jax_all_reduce.py [--repeats N] [--only TEXT] [--json PATH]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optree
from common import RESULTS, keep, size_text, summary
from contenders import N, jax_mesh
from host_reduction import resnet50

MIN_S, MAX_CALLS = 0.02, 100  # a fast contender is called repeatedly in a turn
TARGETS = {  # the most times of all_reduce / psum, by the case
    "float32, donated: 64 MiB": 0.22,
    "float32, donated: 16 MiB": 0.45,
    "float32, donated: 1 KiB": 1.0,
    "float32, donated: ResNet-50's 161 gradients": 0.4,
}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="the number of turns of each case")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS / "jax_all_reduce.json")
    options = parser.parse_args()
    shapes = optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))
    gradients = [math.prod(shape) for shape in shapes]
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
        keep("jax_all_reduce", {"devices": N, "cases": kept}, options.json)


if __name__ == "__main__":
    main()
