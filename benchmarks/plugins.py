"""Are the plug-ins as fast as the frameworks' own collectives?

TensorFlow: ``crossreduce.tensorflow.HierarchicalCopyAllReduce`` is compared with TensorFlow's class of the same name,
eagerly and in a ``tf.function``. JAX: ``crossreduce.jax.all_reduce`` is compared with ``jax.lax.psum``, both under
``jit`` and ``shard_map``; and ``cr.all_reduce`` of lists of arrays, one list per device, with the same psum of sharded
arrays. There are 8 replicas in one process, with random data. As in host_reduction.py, the contenders of a case run in
turn, the ratio of two contenders is the median of their ratios within each turn, and each result is compared with that
of a plain NumPy loop.

Run: python benchmarks/plugins.py [--quick] [--repeats N] [--only NAME] [--json PATH]
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cases import QUICK, Case, Sizes
from common import RESULTS, keep, size_text
from contenders import (
    HCA,
    HCA_GRAPH,
    IN_GRAPH,
    JAX,
    Batch,
    Contender,
    N,
    jax_function,
    jax_mesh,
    jax_peer,
    tensorflow,
    tensorflow_ops,
    tensorflow_peers,
)
from host_reduction import RESNET50

import crossreduce as cr

OURS, OURS_GRAPH = "ours", "ours" + IN_GRAPH
REPLICAS = [f"cpu:{k}" for k in range(N)]


def in_tensorflow(name: str, batch: Batch, sizes: Sizes) -> Case:
    """Return the case that compares the plug-in for TensorFlow with TensorFlow's own class."""
    tensorflow()
    import crossreduce.tensorflow as crt

    op = crt.HierarchicalCopyAllReduce(1)
    both = {**tensorflow_ops(batch, {OURS: op, OURS_GRAPH: op}), **tensorflow_peers(batch, HCA, HCA_GRAPH)}
    # Each graph runs after a contender that uses TensorFlow's threads, so they are awake for both graphs.
    contenders = {name: both[name] for name in (OURS, HCA, OURS_GRAPH, HCA_GRAPH)}
    case = Case(f"TensorFlow: {name}", contenders, sizes.many_repeats, sizes)
    case.require_speed(OURS_GRAPH, HCA_GRAPH, 1)
    case.require_speed(OURS_GRAPH, HCA, 2)
    case.require_speed(OURS, HCA, 2)
    return case


def in_jax(name: str, batch: Batch, sizes: Sizes, least: float) -> Case:
    """Return the case that compares the plug-in for JAX with ``psum``."""
    jax_mesh()
    from crossreduce.jax import all_reduce

    ours = jax_function(batch, lambda xs: all_reduce(xs, "replica"))
    case = Case(f"JAX, jit: {name}", {OURS: ours, **jax_peer(batch)}, sizes.repeats, sizes)
    case.require_speed(OURS, JAX, least)
    return case


def along_schedules(name: str, batch: Batch, sizes: Sizes) -> Case:
    """Return the case that compares schedules for equal links with XLA's own all-reduce; no speed is required."""
    jax_mesh()
    from crossreduce.jax import all_reduce

    def by(algorithm: str) -> Contender:
        return jax_function(batch, lambda xs: all_reduce(xs, "replica", algorithm=algorithm))

    contenders = {f"ours, {algorithm}": by(algorithm) for algorithm in ("auto", "ring", "halving_doubling")}
    return Case(f"JAX, jit, along schedules: {name}", {**contenders, **jax_peer(batch)}, sizes.repeats, sizes)


def eagerly_in_jax(name: str, batch: Batch, sizes: Sizes) -> Case:
    """Return the case that compares ``cr.all_reduce`` of one list of arrays per device with ``psum``."""
    jax_mesh()
    import jax

    trees = [
        [jax.device_put(x, device) for x in xs]
        for xs, device in zip(zip(*batch.tensors, strict=True), jax.devices("cpu"), strict=False)
    ]

    def read(results: Any) -> list[list[np.ndarray]]:
        return [[np.asarray(x) for x in components] for components in zip(*results, strict=True)]

    ours = Contender(batch, lambda: jax.block_until_ready(cr.all_reduce(trees)), read)
    case = Case(f"JAX, eagerly: {name}", {OURS: ours, **jax_peer(batch)}, sizes.repeats, sizes)
    case.require_speed(OURS, JAX, 1)
    return case


def in_replicas(sizes: Sizes) -> Case:
    """Return the case that compares ``all_reduce`` in the threads of ``MirroredStrategy`` with ``cr.all_reduce``."""
    batch = Batch.random([(sizes.small // 4,)])
    strategy, calls = cr.MirroredStrategy(REPLICAS), 20
    (xs,) = batch.tensors
    value = cr.PerReplica(xs, REPLICAS)

    def step(x: np.ndarray) -> np.ndarray:
        context = cr.get_replica_context()
        for _ in range(calls - 1):
            context.all_reduce("sum", x)
        return context.all_reduce("sum", x)

    def bare() -> list[np.ndarray]:
        for _ in range(calls - 1):
            cr.all_reduce(xs)
        return cr.all_reduce(xs)

    contenders = {
        f"MirroredStrategy.run of {calls} all_reduces": Contender(
            batch, lambda: strategy.run(step, (value,)), lambda result: [list(result.values)]
        ),
        f"{calls} times cr.all_reduce": Contender(batch, bare, lambda results: [results]),
    }
    return Case(f"{N} replicas' threads, {size_text(sizes.small)}", contenders, sizes.many_repeats, sizes)


def cases(sizes: Sizes) -> dict[str, Callable[[], Case]]:
    """Return, for the name of each case, a function that makes the case."""
    shapes = RESNET50
    if sizes.quick:
        shapes = [(min(math.prod(shape), 64),) for shape in shapes]

    def one(share: int = 1) -> Batch:
        return Batch.random([(sizes.large // 4 // share,)])

    def many() -> Batch:
        return Batch.random([(sizes.small // 4,)] * 160)

    def gradients() -> Batch:
        return Batch.random(shapes)

    large, small, tree = size_text(sizes.large), f"160 x {size_text(sizes.small)}", "ResNet-50's 161 gradients"
    return {
        "tensorflow_large": lambda: in_tensorflow(large, one(), sizes),
        "tensorflow_small": lambda: in_tensorflow(small, many(), sizes),
        "tensorflow_gradients": lambda: in_tensorflow(tree, gradients(), sizes),
        "jax_gradients": lambda: in_jax(tree, gradients(), sizes, 1),
        "jax_small": lambda: in_jax(small, many(), sizes, 3),
        "jax_large": lambda: in_jax(large, one(), sizes, 1),
        "jax_schedules": lambda: along_schedules(size_text(sizes.large // 4), one(4), sizes),
        "jax_eager_one": lambda: eagerly_in_jax(size_text(sizes.small), Batch.random([(sizes.small // 4,)]), sizes),
        "jax_eager_small": lambda: eagerly_in_jax(small, many(), sizes),
        "jax_eager_gradients": lambda: eagerly_in_jax(tree, gradients(), sizes),
        "replicas": lambda: in_replicas(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few repeats, to see whether it runs")
    parser.add_argument("--repeats", type=int, help="the number of turns of each case")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS / "plugins.json")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes(repeats=15)
    if options.repeats is not None:
        sizes = sizes._replace(repeats=options.repeats, many_repeats=options.repeats)
    tensorflow(), jax_mesh()  # configures the devices of both frameworks before either is used
    kept = {}
    for name, case in cases(sizes).items():
        if options.only in name:
            gc.collect()
            gc.freeze()  # so that garbage collections within a turn do not scan the objects of earlier cases
            kept[name] = case().kept()
    if not options.only:
        keep("plugins", {"replicas": N, "cases": kept}, options.json)


if __name__ == "__main__":
    main()
