"""Ways to reduce a batch of tensors on host memory: this library, NumPy, TensorFlow, JAX and torch.

Input: a ``Batch``. Output: a ``Contender``, which a benchmark times and whose results it checks. TensorFlow runs on 8
logical CPUs, JAX on 8 CPU devices; a framework that is not installed has no contender.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import optree

import crossreduce as cr

N = 8
THREADS = 2  # the number of threads of NumPy's contenders copy and chunked
IN_GRAPH = ", tf.function"
HCA, R2O = "TensorFlow HierarchicalCopyAllReduce", "TensorFlow ReductionToOneDevice"
HCA_GRAPH, R2O_GRAPH = HCA + IN_GRAPH, R2O + IN_GRAPH
JAX, TORCH, LOOP = "JAX jit psum", "torch stack().sum(0), one result", "NumPy loop and copies"
COPY = f"np.copyto, {THREADS} threads"

Arrays = list[list[np.ndarray]]  # for each tensor one array per replica


class Batch:
    """Tensors with one component per replica, and memory for their results."""

    def __init__(self, tensors: Arrays, outs: Arrays):
        self.tensors, self.outs = tensors, outs
        self.read_nbytes = sum(x.nbytes for xs in tensors for x in xs)
        self.replica_nbytes = self.read_nbytes // len(tensors[0])

    @classmethod
    def random(cls, shapes: Iterable[tuple[int, ...]], replicas: int = N, dtype: Any = np.float32) -> Batch:
        """Return a batch of random tensors. The results' memory is written, too, so that it has pages of its own."""
        rng, shapes = np.random.default_rng(0), list(shapes)
        tensors = [[rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(replicas)] for shape in shapes]
        return cls(tensors, [[np.full(shape, np.nan, dtype) for _ in range(replicas)] for shape in shapes])

    def split(self, shapes: Iterable[tuple[int, ...]]) -> Batch:
        """Return a batch of parts of this batch's only tensor; each starts at a cache line if the whole tensor does."""
        starts, shapes = [0], list(shapes)
        for shape in shapes:
            starts.append(starts[-1] + whole_lines(math.prod(shape)))

        def parts(xs: list[np.ndarray]) -> Arrays:
            return [
                [x[start : start + math.prod(shape)].reshape(shape) for x in xs]
                for start, shape in zip(starts, shapes, strict=False)
            ]

        return Batch(parts(self.tensors[0]), parts(self.outs[0]))

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """The sum of each tensor's components by a plain loop."""
        return [plain_sum(xs) for xs in self.tensors]

    @cached_property
    def tolerance(self) -> list[np.ndarray]:
        """A bound on the difference between sums of n components in two orders: twice gamma(n - 1) sum |x|.

        gamma(k) is k u / (1 - k u) with u = 2**-24; 2.001, not 2, since the bound itself is rounded.
        Source: Higham, The accuracy of floating point summation, SISC 14(4), 1993.
        """
        u = float(np.finfo(np.float32).eps) / 2
        d = len(self.tensors[0]) - 1
        return [plain_sum([np.abs(x) for x in xs]) * np.float32(2.001 * d * u / (1 - d * u)) for xs in self.tensors]

    def check(self, results: Arrays, exact: bool) -> None:
        """Raise unless each element of each result equals the plain loop's: exactly, or else within the tolerance."""
        assert len(results) == len(self.tensors)
        for t, components in enumerate(results):
            for k, x in enumerate(components):
                if any(address(x) == address(y) for y in components[:k]):
                    continue
                x = x.reshape(self.expected[t].shape)
                right = np.array_equal(x, self.expected[t])
                if not right and not exact:
                    right = bool((np.abs(x - self.expected[t]) <= self.tolerance[t]).all())
                if not right:
                    raise AssertionError(f"tensor {t}, result {k}: not the sum of its components")


class Contender(NamedTuple):
    """A way to reduce a batch.

    Args:
      batch: the input.
      run: the function that is timed.
      read: converts what ``run`` returns to NumPy arrays, without a copy.
      exact: whether the results must equal those of a plain loop bit for bit or only within the tolerance; ``None``:
        they are not compared with the loop.
      check: a further check, which raises if the results are wrong.
    """

    batch: Batch
    run: Callable[[], Any]
    read: Callable[[Any], Arrays]
    exact: bool | None = False
    check: Callable[[Arrays], None] | None = None


def whole_lines(size: int) -> int:
    """Return ``size``, a number of float32, rounded up to whole cache lines of 64 bytes."""
    return -(-size // 16) * 16


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def plain_sum(xs: list[np.ndarray]) -> np.ndarray:
    acc = xs[0].copy()
    for x in xs[1:]:
        acc += x
    return acc


# --- this library ---


def ours(
    batch: Batch, algorithm: str, with_out: bool = False, to: str = "", exact: bool | None = False, op: str = "sum"
) -> Contender:
    """Return a contender that calls ``reduce`` for one tensor, ``batch_reduce`` for several.

    ``to``: the only device that gets the results; by default, all devices of the tensors get them.
    """
    ops = cr.AllReduceCrossDeviceOps(algorithm)
    values = [cr.PerReplica(xs) for xs in batch.tensors]
    outs = [cr.PerReplica(xs[:1] if to else xs) for xs in batch.outs]
    if len(values) == 1:
        keywords = {"out": outs[0]} if with_out else {}
        return Contender(batch, lambda: [ops.reduce(op, values[0], to or values[0], **keywords)], components, exact)
    keywords = {"out": outs} if with_out else {}
    pairs = [(value, to or value) for value in values]
    return Contender(batch, lambda: ops.batch_reduce(op, pairs, **keywords), components, exact)


def components(results: Any) -> Arrays:
    """Return the components of a list of ``Mirrored``."""
    return [list(x) for x in results]


def ours_tree(batch: Batch, structure: Any, with_out: bool = False) -> Contender:
    """Return a contender that calls ``cr.all_reduce`` with one tree per replica."""

    def trees(arrays: Arrays) -> list[Any]:
        return [optree.tree_unflatten(structure, leaves) for leaves in zip(*arrays, strict=True)]

    def read(results: list[Any]) -> Arrays:
        return [list(leaves) for leaves in zip(*(optree.tree_leaves(tree) for tree in results), strict=True)]

    values = trees(batch.tensors)
    keywords = {"out": trees(batch.outs)} if with_out else {}
    return Contender(batch, lambda: cr.all_reduce(values, "sum", **keywords), read)


# --- NumPy ---


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


def on_threads(work: Callable[[int, int], None], size: int) -> None:
    """Call ``work(start, stop)`` for equal shares of ``range(size)``, one per thread."""
    cuts = [k * size // THREADS for k in range(THREADS + 1)]
    list(pool().map(work, cuts[:-1], cuts[1:]))


def copy(batch: Batch) -> Contender:
    """Return a contender that copies the first tensor, to measure the memory's rate; each thread copies a share."""

    def share(thread: int, _: int) -> None:
        for x, out in pairs:
            start, stop = thread * x.size // THREADS, (thread + 1) * x.size // THREADS
            np.copyto(out[start:stop], x[start:stop])

    def check(results: Arrays) -> None:
        assert all(np.array_equal(x, out) for x, out in zip(batch.tensors[0], results[0], strict=True))

    def run() -> Arrays:
        on_threads(share, THREADS)
        return batch.outs

    pairs = list(zip(batch.tensors[0], batch.outs[0], strict=True))
    return Contender(batch, run, lambda outs: outs, None, check)


def loop(batch: Batch) -> Contender:
    """Return a contender that sums in a plain loop and copies the sum for each other replica."""

    def run() -> Arrays:
        totals = [plain_sum(xs) for xs in batch.tensors]
        return [[total, *(total.copy() for _ in xs[1:])] for total, xs in zip(totals, batch.tensors, strict=True)]

    return Contender(batch, run, lambda results: results, True)


def chunked(batch: Batch) -> Contender:
    """Return NumPy's fastest way: threads reduce the first tensor into ``outs`` in pieces that fit the L2 cache."""
    piece = 1 << 15

    def share(begin: int, end: int) -> None:
        first, second, *others = batch.tensors[0]
        out, *copies = batch.outs[0]
        for start in range(begin, end, piece):
            at = slice(start, min(end, start + piece))
            np.add(first[at], second[at], out=out[at])
            for x in others:
                np.add(out[at], x[at], out=out[at])
            for x in copies:
                np.copyto(x[at], out[at])

    def run() -> Arrays:
        on_threads(share, batch.tensors[0][0].size)
        return batch.outs

    return Contender(batch, run, lambda outs: outs, True)


# --- the frameworks ---


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def tensorflow() -> Any:
    """Return the module of TensorFlow, configured for 8 logical CPUs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * N
    )
    return tf


@cache
def jax_mesh() -> Any:
    """Return a mesh of 8 CPU devices with the axis "replica"."""
    import jax

    jax.config.update("jax_num_cpu_devices", N)
    return jax.sharding.Mesh(np.array(jax.devices("cpu")), ("replica",))


def tensorflow_peers(batch: Batch, *names: str) -> dict[str, Contender]:
    """Return contenders that run the named ops of TensorFlow; see ``tensorflow_ops``."""
    if not installed("tensorflow"):
        return {}
    tf = tensorflow()
    ops = {HCA: tf.distribute.HierarchicalCopyAllReduce(1), R2O: tf.distribute.ReductionToOneDevice()}
    return tensorflow_ops(batch, {name: ops[name.removesuffix(IN_GRAPH)] for name in names})


def tensorflow_ops(batch: Batch, ops: dict[str, Any]) -> dict[str, Contender]:
    """Return for each of several ``tf.distribute.CrossDeviceOps`` a contender that calls its ``batch_reduce``.

    An op runs in a ``tf.function`` if its name ends with ``IN_GRAPH``, else eagerly.
    """
    tf = tensorflow()
    from tensorflow.python.distribute import values  # TensorFlow has no public way to make a PerReplica

    def per_replica(arrays: list[np.ndarray]) -> Any:
        components = []
        for k, array in enumerate(arrays):
            with tf.device(f"CPU:{k}"):
                components.append(tf.identity(tf.constant(array)))
        return values.PerReplica(components)

    def call(name: str, op: Any) -> Callable[[], Any]:
        def run() -> list[Any]:
            return [x.values for x in op.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)]

        return tf.function(run, autograph=False) if name.endswith(IN_GRAPH) else run

    def read(results: Any) -> Arrays:
        return [[np.asarray(memoryview(x)) for x in components] for components in results]

    pairs = [(value, value) for value in map(per_replica, batch.tensors)]
    return {name: Contender(batch, call(name, op), read) for name, op in ops.items()}


def jax_peer(batch: Batch) -> dict[str, Contender]:
    """Return, by name, a contender that calls JAX's ``psum`` under ``jit`` and ``shard_map``, if JAX is installed."""
    if not installed("jax"):
        return {}
    jax_mesh()
    import jax

    return {JAX: jax_function(batch, lambda xs: jax.lax.psum(xs, "replica"))}


def jax_function(batch: Batch, function: Callable[[Any], Any]) -> Contender:
    """Return a contender that calls a function under ``jit``; ``shard_map`` splits tensors over "replica"."""
    mesh = jax_mesh()
    import jax

    rows = jax.sharding.PartitionSpec("replica")
    sharding = jax.sharding.NamedSharding(mesh, rows)
    stacked = [jax.device_put(np.stack(xs), sharding) for xs in batch.tensors]
    summed = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))

    def read(results: Any) -> Arrays:
        return [[np.asarray(shard.data)[0] for shard in x.addressable_shards] for x in results]

    return Contender(batch, lambda: jax.block_until_ready(summed(stacked)), read)


def torch_peer(batch: Batch) -> dict[str, Contender]:
    """Return, by name, a contender with torch's usual code, a sum of stacked tensors, if torch is installed."""
    if not installed("torch"):
        return {}
    import torch

    xs = [torch.from_numpy(x) for x in batch.tensors[0]]
    return {TORCH: Contender(batch, lambda: torch.stack(xs).sum(0), lambda x: [[x.numpy()]])}
