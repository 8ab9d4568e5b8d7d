"""How near does a reduction on host memory come to the rate of the memory, beside its peers?

8 replicas in one process, steady state, random data (memory of zeros is faster on some CPUs). All contenders of a
case are timed in turn; each ratio is the median of the ratios within a turn, and stands beside what is asked of it.
Rates count what has to move: the bytes of the sources, read once, and of the results that have memory of their own,
written once. Results are poisoned and reduced again before they are compared with a plain NumPy loop: to the bit
where the order is the loop's, else within the bound of Higham (The accuracy of floating point summation, 1993).

TensorFlow runs on 8 logical CPUs, JAX on 8 CPU devices, gloo and Open MPI in 8 processes on this machine. Peers that
are not installed are said to be "not here". Run: python benchmarks/host_reduction.py [--quick] [--sizes] [--json PATH]
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import optree
from common import RESULTS, keep, samples, summary

import crossreduce as cr
from crossreduce import kernels

N = 8
THREADS = 2  # of NumPy's contenders
LARGE, SMALL = 1 << 26, 1 << 10
STEP_S = 0.02  # quicker contenders are called as often in a row as takes so long
REST_S = 0.005  # OpenMP's threads spin for some milliseconds after their work
HCA, R2O = "TensorFlow HierarchicalCopyAllReduce", "TensorFlow ReductionToOneDevice"
IN_GRAPH = ", tf.function"
HCA_GRAPH, R2O_GRAPH = HCA + IN_GRAPH, R2O + IN_GRAPH
JAX, TORCH, GLOO, MPI = "JAX jit psum", "torch stack().sum(0), one result", "gloo, 8 processes", "Open MPI, 8 processes"
COPY = f"np.copyto, {THREADS} threads"

Arrays = list[list[np.ndarray]]  # for each tensor one array a replica


class Sizes(NamedTuple):
    """How large and how often."""

    large: int = LARGE
    small: int = SMALL
    sources: int = 1 << 29  # bytes read and written by each number of sources
    repeats: int = 9
    often: int = 25  # where calls are short, or differ by little
    quick: bool = False


QUICK = Sizes(large=1 << 16, sources=1 << 20, repeats=2, often=2, quick=True)


class Batch:
    """Tensors, one component a replica, and memory for their results."""

    def __init__(self, given: Arrays, outs: Arrays):
        self.given, self.outs = given, outs
        self.read = sum(x.nbytes for xs in given for x in xs)
        self.tensor = self.read // len(given[0])  # bytes of a replica

    @classmethod
    def random(cls, shapes: Iterable[tuple[int, ...]], replicas: int = N, dtype: Any = np.float32) -> Batch:
        """Each array has memory of its own, which was written: what never was is one page of zeros."""
        rng, shapes = np.random.default_rng(0), list(shapes)
        given = [[rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(replicas)] for shape in shapes]
        return cls(given, [[np.full(shape, np.nan, dtype) for _ in range(replicas)] for shape in shapes])

    def cut(self, shapes: Iterable[tuple[int, ...]]) -> Batch:
        """Cut the only tensor into others, each where a line of the cache begins if the whole does."""
        starts, shapes = [0], list(shapes)
        for shape in shapes:
            starts.append(starts[-1] + whole_lines(math.prod(shape)))

        def cut(xs: list[np.ndarray]) -> Arrays:
            return [
                [x[start : start + math.prod(shape)].reshape(shape) for x in xs]
                for start, shape in zip(starts, shapes, strict=False)
            ]

        return Batch(cut(self.given[0]), cut(self.outs[0]))

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """What a plain loop over the replicas sums up."""
        return [plain_sum(xs) for xs in self.given]

    @cached_property
    def allowed(self) -> list[np.ndarray]:
        """How far two orders of summation may lie apart: twice gamma(n - 1) sum |x|."""
        u = float(np.finfo(np.float32).eps) / 2
        d = len(self.given[0]) - 1
        return [plain_sum([np.abs(x) for x in xs]) * np.float32(2.001 * d * u / (1 - d * u)) for xs in self.given]

    def check(self, results: Arrays, exact: bool) -> None:
        """Raise where a result is not the sum of the components, all their elements looked at."""
        assert len(results) == len(self.given)
        for t, components in enumerate(results):
            for k, x in enumerate(components):
                if any(address(x) == address(y) for y in components[:k]):
                    continue
                x = x.reshape(self.expected[t].shape)
                right = np.array_equal(x, self.expected[t])
                if not right and not exact:
                    right = bool((np.abs(x - self.expected[t]) <= self.allowed[t]).all())
                if not right:
                    raise AssertionError(f"tensor {t}, result {k}: not the sum of its components")


class Contender(NamedTuple):
    """A way to reduce a batch.

    ``run`` is what is timed, ``read`` makes NumPy arrays of what it returns, without a copy. Where the results are
    ``exact``, they equal a plain loop's to the bit; ``None``: not compared, since ``check`` says what is right.
    """

    batch: Batch
    run: Callable[[], Any]
    read: Callable[[Any], Arrays]
    exact: bool | None = False
    check: Callable[[Arrays], None] | None = None


class Case:
    """Contenders timed in turn, their results checked, and what was asked of them."""

    def __init__(self, name: str, contenders: dict[str, Contender], repeats: int, sizes: Sizes):
        self.name, self.judged, self.asked = name, not sizes.quick, []
        runs = {key: one.run for key, one in contenders.items()}
        self.times = samples(runs, repeats, least_s=STEP_S, rest_s=REST_S)
        self.rows = {}
        for key, one in contenders.items():
            own = verified(one)
            nbytes = one.batch.read + sum(own) * one.batch.tensor // len(own)
            row = summary(self.times[key])
            self.rows[key] = {**row, "bytes": nbytes, "GBps": nbytes / row["median_s"] / 1e9, "results": max(own)}
        print(f"\n{name}\n  {'':42} {'median ms':>10} {'least':>9} {'most':>9} {'GB/s':>6}  results")
        for key, row in self.rows.items():
            times = " ".join(f"{row[x] * 1e3:{w}.4g}" for x, w in (("median_s", 10), ("min_s", 9), ("max_s", 9)))
            print(f"  {key:42} {times} {row['GBps']:6.1f}  {row['results']}")

    def ratio(self, this: str, other: str) -> float | None:
        """How many times as long as ``other`` does ``this`` take? The median over the turns; None: one is not here."""
        if this not in self.times or other not in self.times:
            return None
        return statistics.median(a / b for a, b in zip(self.times[this], self.times[other], strict=True))

    def relative(self, this: str, other: str) -> float:
        """This one's bytes a second, as a multiple of the other's."""
        return self.ratio(other, this) * self.rows[this]["bytes"] / self.rows[other]["bytes"]

    def faster(self, ours: str, other: str, least: float) -> None:
        """Ask that ours is so many times as fast as another."""
        self.ask(f"{ours}: times as fast as {other}", self.ratio(other, ours), least=least)

    def rate(self, this: str, other: str, least: float) -> None:
        """Ask that this one's bytes a second are at least so many times the other's."""
        self.ask(f"{this}: rate / that of {other}", self.relative(this, other), least=least)

    def ask(self, what: str, got: float | None, least: float | None = None, most: float | None = None) -> None:
        """Print and keep what is asked beside what was got; ``least`` or ``most`` is given."""
        limit, sign = (least, ">=") if least is not None else (most, "<=")
        met, said = None, "not here"
        if got is not None:
            met = got >= limit if sign == ">=" else got <= limit
            said = f"got {got:<8.4g} {'' if met else 'MISSED' if self.judged else 'not judged: too small'}"
        print(f"    {what:90} asked {sign} {limit:<6g} {said}")
        self.asked.append({"what": what, "asked": f"{sign} {limit:g}", "got": got, "met": met})

    def kept(self) -> dict[str, Any]:
        return {"rows": self.rows, "asked": self.asked}


def verified(one: Contender) -> list[int]:
    """Poison the results, run again, compare; return how many results of each tensor have memory of their own."""
    for components in one.read(one.run()):
        for x in components:
            if x.flags.writeable:
                x.fill(np.nan)
    results = one.read(one.run())
    if one.check is not None:
        one.check(results)
    if one.exact is not None:
        one.batch.check(results, one.exact)
    return [len({address(x) for x in components}) for components in results]


def whole_lines(size: int) -> int:
    """Round a number of float32 up to lines of 64 bytes."""
    return -(-size // 16) * 16


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def plain_sum(xs: list[np.ndarray]) -> np.ndarray:
    acc = xs[0].copy()
    for x in xs[1:]:
        acc += x
    return acc


# --- ours ---


def given(results: Any) -> Arrays:
    """Read one ``Mirrored`` or a list of them."""
    return [list(x) for x in (results if isinstance(results, list) else [results])]


def ours(
    batch: Batch, algorithm: str, into: bool = False, to: str | None = None, exact: bool | None = False
) -> Contender:
    """``reduce`` or ``batch_reduce`` of ours, to fresh results or ``into`` those of the batch; ``to`` one device."""
    op = cr.AllReduceCrossDeviceOps(algorithm)
    values = [cr.PerReplica(xs) for xs in batch.given]
    outs = [cr.PerReplica(xs[:1] if to else xs) for xs in batch.outs]
    if len(values) == 1:
        keywords = {"out": outs[0]} if into else {}
        return Contender(batch, lambda: op.reduce("sum", values[0], to or values[0], **keywords), given, exact)
    keywords = {"out": outs} if into else {}
    pairs = [(value, to or value) for value in values]
    return Contender(batch, lambda: op.batch_reduce("sum", pairs, **keywords), given, exact)


def ours_tree(batch: Batch, structure: Any, into: bool = False) -> Contender:
    """``cr.all_reduce`` of one tree a replica."""

    def trees(arrays: Arrays) -> list[Any]:
        return [optree.tree_unflatten(structure, leaves) for leaves in zip(*arrays, strict=True)]

    def read(results: list[Any]) -> Arrays:
        return [list(leaves) for leaves in zip(*(optree.tree_leaves(tree) for tree in results), strict=True)]

    values = trees(batch.given)
    keywords = {"out": trees(batch.outs)} if into else {}
    return Contender(batch, lambda: cr.all_reduce(values, "sum", **keywords), read)


# --- NumPy ---


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


def on_threads(work: Callable[[int, int], None], size: int) -> None:
    """Call ``work(start, stop)`` for equal shares, one a thread."""
    cuts = [k * size // THREADS for k in range(THREADS + 1)]
    list(pool().map(work, cuts[:-1], cuts[1:]))


def copy(batch: Batch) -> Contender:
    """The rate of the memory: each thread copies its half of each array."""

    def share(thread: int, _: int) -> None:
        for x, out in pairs:
            start, stop = thread * x.size // THREADS, (thread + 1) * x.size // THREADS
            np.copyto(out[start:stop], x[start:stop])

    def check(results: Arrays) -> None:
        assert all(np.array_equal(x, out) for x, out in zip(batch.given[0], results[0], strict=True))

    def run() -> Arrays:
        on_threads(share, THREADS)
        return batch.outs

    pairs = list(zip(batch.given[0], batch.outs[0], strict=True))
    return Contender(batch, run, lambda outs: outs, None, check)


def loop(batch: Batch) -> Contender:
    """A plain loop, and a copy for each replica."""

    def run() -> Arrays:
        totals = [plain_sum(xs) for xs in batch.given]
        return [[total, *(total.copy() for _ in xs[1:])] for total, xs in zip(totals, batch.given, strict=True)]

    return Contender(batch, run, lambda results: results, True)


def chunked(batch: Batch) -> Contender:
    """NumPy as well as it goes: pieces that stay in the second-level cache, on threads, into results that are there."""
    piece = 1 << 15

    def share(begin: int, end: int) -> None:
        first, second, *others = batch.given[0]
        out, *copies = batch.outs[0]
        for start in range(begin, end, piece):
            at = slice(start, min(end, start + piece))
            np.add(first[at], second[at], out=out[at])
            for x in others:
                np.add(out[at], x[at], out=out[at])
            for x in copies:
                np.copyto(x[at], out[at])

    def run() -> Arrays:
        on_threads(share, batch.given[0][0].size)
        return batch.outs

    return Contender(batch, run, lambda outs: outs, True)


# --- the frameworks ---


def here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * N
    )
    return tf


@cache
def jax_mesh() -> Any:
    import jax

    jax.config.update("jax_num_cpu_devices", N)
    return jax.sharding.Mesh(np.array(jax.devices("cpu")), ("replica",))


def tensorflow_peers(batch: Batch, *names: str) -> dict[str, Contender]:
    """TensorFlow's ops by their names here: ``batch_reduce``, eagerly and in a ``tf.function``."""
    if not here("tensorflow"):
        return {}
    tf = tensorflow()
    ops = {HCA: tf.distribute.HierarchicalCopyAllReduce(1), R2O: tf.distribute.ReductionToOneDevice()}
    return tensorflow_ops(batch, {name: ops[name.removesuffix(IN_GRAPH)] for name in names})


def tensorflow_ops(batch: Batch, ops: dict[str, Any]) -> dict[str, Contender]:
    """``batch_reduce`` of ``tf.distribute.CrossDeviceOps``, in a ``tf.function`` where the name ends so."""
    tf = tensorflow()
    from tensorflow.python.distribute import values  # no public way to make one

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

    pairs = [(value, value) for value in map(per_replica, batch.given)]
    return {name: Contender(batch, call(name, op), read) for name, op in ops.items()}


def jax_peer(batch: Batch) -> dict[str, Contender]:
    """JAX's psum under jit and shard_map."""
    if not here("jax"):
        return {}
    jax_mesh()
    import jax

    return {JAX: jax_function(batch, lambda xs: jax.lax.psum(xs, "replica"))}


def jax_function(batch: Batch, function: Callable[[Any], Any]) -> Contender:
    """A function under jit and shard_map, over the axis "replica"; each tensor is sharded, a row a device."""
    mesh = jax_mesh()
    import jax

    rows = jax.sharding.PartitionSpec("replica")
    sharding = jax.sharding.NamedSharding(mesh, rows)
    stacked = [jax.device_put(np.stack(xs), sharding) for xs in batch.given]
    summed = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))

    def read(results: Any) -> Arrays:
        return [[np.asarray(shard.data)[0] for shard in x.addressable_shards] for x in results]

    return Contender(batch, lambda: jax.block_until_ready(summed(stacked)), read)


def torch_peer(batch: Batch) -> dict[str, Contender]:
    """What one writes in torch: stack and sum, to one result."""
    if not here("torch"):
        return {}
    import torch

    xs = [torch.from_numpy(x) for x in batch.given[0]]
    return {TORCH: Contender(batch, lambda: torch.stack(xs).sum(0), lambda x: [[x.numpy()]])}


# --- other processes ---


class Gloo:
    """gloo's all_reduce, in place, by processes that wait without a CPU until they are told to go."""

    def __init__(self, batch: Batch):
        import torch.multiprocessing as mp

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._given = batch.given[0]
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._tensors = [shared(x) for x in self._given]
        self._pipes, self._processes = [], []
        for rank, tensor in enumerate(self._tensors):
            mine, its = context.Pipe()
            arguments = (rank, len(self._given), f"{self._folder.name}/meet", tensor, its)
            self._processes.append(context.Process(target=gloo_rank, args=arguments, daemon=True))
            self._pipes.append(mine)
        for process in self._processes:
            process.start()
        atexit.register(self.end)
        self._hear()  # all have met
        check = partial(self._check, batch)
        self.contender = Contender(batch, self.go, lambda tensors: [[x.numpy() for x in tensors]], None, check)

    def go(self) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(True)
        self._hear()
        return self._tensors

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def _hear(self) -> None:
        for pipe in self._pipes:
            pipe.recv()

    def _check(self, batch: Batch, _: Arrays) -> None:
        """Compare the sum of fresh data: what is there was summed up many times."""
        for x, tensor in zip(self._given, self._tensors, strict=True):
            tensor.numpy()[:] = x
        batch.check([[x.numpy() for x in self.go()]], exact=False)


def shared(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x.copy()).share_memory_()


def gloo_rank(rank: int, world: int, meet: str, tensor: Any, pipe: Any) -> None:
    """Be one process of ``Gloo``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    dist.barrier()
    pipe.send(True)
    while pipe.recv():
        dist.all_reduce(tensor)
        pipe.send(True)
    dist.destroy_process_group()


def open_mpi(size: int, repeats: int) -> dict[str, float] | None:
    """Time MPI_Allreduce of as many float32; its processes wait on a CPU, so it is not timed in turn."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None or not here("mpi4py"):
        return None
    words = ["-n", str(N), "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    command = [mpiexec, *words, sys.executable, __file__, "--mpi-rank", str(size), str(repeats)]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        print(f"  {MPI}: {done.stderr.strip()[-300:]}")
        return None
    return summary(json.loads(done.stdout))


def mpi_rank(size: int, repeats: int) -> None:
    """Be one process of ``open_mpi``; the first one prints the seconds of each repeat."""
    import time

    from mpi4py import MPI as mpi  # noqa: N811 - a name here is taken

    world = mpi.COMM_WORLD
    ranks = [world.rank] if world.rank else range(world.size)
    xs = [np.random.default_rng(rank).standard_normal(size, np.float32) for rank in ranks]
    x = xs[0]
    out, times = np.full_like(x, np.nan), []
    for _ in range(repeats + 1):
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(x, out)
        world.Barrier()
        times.append(time.perf_counter() - start)
    if world.rank == 0:
        allowed = 2.001 * 7 * 2.0**-24 * plain_sum([np.abs(x) for x in xs])
        assert (np.abs(out - plain_sum(xs)) <= allowed).all()
        print(json.dumps(times[1:]))


# --- the cases ---


def large(sizes: Sizes) -> Case:
    """One large tensor over 8 devices: each op of ours, the rate of the memory, every peer."""
    batch = Batch.random([(sizes.large // 4,)])
    to_all, fresh, one = "ours direct, out=", "ours direct", "ours direct to one, out="
    tree, forest = "ours hierarchical_copy, out=", "ours forest, out="
    contenders = {
        COPY: copy(batch),
        to_all: ours(batch, "direct", into=True, exact=True),
        fresh: ours(batch, "direct", exact=True),
        tree: ours(batch, "hierarchical_copy", into=True),
        forest: ours(batch, "forest", into=True),
        one: ours(batch, "direct", into=True, to="cpu:0", exact=True),
        "ours direct to one": ours(batch, "direct", to="cpu:0", exact=True),
        "NumPy loop and copies": loop(batch),
        f"NumPy in pieces, {THREADS} threads, out=": chunked(batch),
        **torch_peer(batch),
        **tensorflow_peers(batch, HCA, R2O),
        **jax_peer(batch),
    }
    gloo = Gloo(batch) if here("torch") and not sizes.quick else None
    if gloo:
        contenders[GLOO] = gloo.contender
    case = Case(f"{N} x {said(sizes.large)} float32", contenders, sizes.repeats, sizes)
    if gloo:
        gloo.end()
    mpi = None if sizes.quick else open_mpi(sizes.large // 4, sizes.repeats)
    if mpi:
        nbytes = 2 * N * sizes.large
        case.rows[MPI] = {**mpi, "bytes": nbytes, "GBps": nbytes / mpi["median_s"] / 1e9, "results": N}
    print(f"  {MPI:42} " + (f"{mpi['median_s'] * 1e3:10.4g}, not in turn" if mpi else "  not here"))
    for this in (to_all, fresh):
        case.rate(this, COPY, 1.2)
        case.faster(this, JAX, 7)
    case.ask("ours hierarchical_copy: times as long as direct", case.ratio(tree, to_all), most=1.25)
    case.ask("ours forest: times as long as direct", case.ratio(forest, to_all), most=1.25)
    for this in (one, "ours direct to one"):
        case.faster(this, R2O, 1)
        case.faster(this, TORCH, 1.5)
    return case


def halves(sizes: Sizes) -> Case:
    """float16 and bfloat16, as many bytes as float32: as quick, and rounded once."""
    contenders, name = {}, "ours direct, out=, {}".format
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        dtype = np.dtype(dtype)
        batch = Batch.random([(sizes.large // dtype.itemsize,)], dtype=dtype)
        exact = None if dtype.itemsize == 2 else True
        contenders[name(dtype.name)] = ours(batch, "direct", into=True, exact=exact)
    case = Case(f"{N} x {said(sizes.large)} of half types", contenders, sizes.repeats, sizes)
    for dtype in ("float16", "bfloat16"):
        case.rate(name(dtype), name("float32"), 0.8)
        case.ask(f"{dtype}: error in ulp against float64", error_ulp(contenders[name(dtype)].batch), most=0.51)
    return case


def error_ulp(batch: Batch) -> float:
    """Return the greatest error of the results of a half type, in units in the last place of the exact sum.

    Of sums that keep an eighth of sum |x|, or more: float32 adds at most gamma(7) sum |x| to the half unit of the
    rounding, 0.004 ulp of such a sum in float16; where more cancels it counts for more. That bound is checked for all.
    """
    (xs,), (outs,) = batch.given, batch.outs
    assert all(np.array_equal(out.view(np.uint16), outs[0].view(np.uint16)) for out in outs[1:])
    digits, least = (11, -14) if xs[0].dtype == np.float16 else (8, -126)
    gamma = 7 * 2.0**-24 / (1 - 7 * 2.0**-24)
    worst, piece = 0.0, 1 << 18

    def ulp(x: np.ndarray) -> np.ndarray:
        return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - (digits - 1))

    for start in range(0, xs[0].size, piece):
        parts = [x[start : start + piece].astype(np.float64) for x in xs]
        exact, size = plain_sum(parts), plain_sum([np.abs(x) for x in parts])
        error = np.abs(outs[0][start : start + piece].astype(np.float64) - exact)
        assert (error <= ulp(np.abs(exact) + gamma * size) / 2 + gamma * size).all()
        keeps = np.abs(exact) >= size / 8
        worst = max(worst, float(np.max(error[keeps] / ulp(exact[keeps]))))
    return worst


def resnet50() -> dict[str, Any]:
    """Return the tree of the shapes of ResNet-50's parameters (He et al., arXiv:1512.03385, table 1)."""

    def convolution(out: int, of: int, width: int) -> dict[str, Any]:
        return {"weight": (out, of, width, width), "scale": (out,), "shift": (out,)}

    tree: dict[str, Any] = {"stem": convolution(64, 3, 7)}
    of = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        tree[f"stage{stage + 1}"] = []
        for number in range(blocks):
            block = {
                "reduce": convolution(width, of, 1),
                "conv": convolution(width, width, 3),
                "expand": convolution(4 * width, width, 1),
            }
            if number == 0:
                block["shortcut"] = convolution(4 * width, of, 1)
            tree[f"stage{stage + 1}"].append(block)
            of = 4 * width
    return {**tree, "classifier": {"weight": (1000, of), "bias": (1000,)}}


def gradients(sizes: Sizes, alone: bool) -> Case:
    """ResNet-50's gradients, tree in, tree out, beside the frameworks; or, alone, beside one tensor of as many bytes.

    The two are apart because what is asked of the second is a small difference: it takes more turns.
    """
    shapes, structure = optree.tree_flatten(resnet50(), is_leaf=lambda node: isinstance(node, tuple))
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    if sizes.quick:
        shapes = [(min(math.prod(shape), 64),) for shape in shapes]
    flat = Batch.random([(sum(whole_lines(math.prod(shape)) for shape in shapes),)])
    batch = flat.cut(shapes)  # the same memory, since some is slower than other
    fresh, into, bare = "ours all_reduce", "ours all_reduce, out=", "ours reduce of one flat tensor, out="
    contenders = {into: ours_tree(batch, structure, into=True), fresh: ours_tree(batch, structure)}
    name = f"ResNet-50's gradients, 161 tensors, {batch.tensor / 2**20:.3g} MiB, over {N} devices"
    if alone:
        contenders[bare] = ours(flat, "auto", into=True)
        case = Case(f"{name}, beside one tensor", contenders, sizes.often, sizes)
        for this in (into, fresh):
            case.ask(f"{this}: over the time of the bytes, %", (case.ratio(this, bare) - 1) * 100, most=3)
        return case
    contenders |= {**tensorflow_peers(batch, HCA, HCA_GRAPH, R2O), **jax_peer(batch)}
    case = Case(name, contenders, sizes.repeats, sizes)
    for this in (fresh, into):
        case.faster(this, HCA, 8)
        case.faster(this, HCA_GRAPH, 3.5)
        case.faster(this, R2O, 1.8)
        case.faster(this, JAX, 2)
    return case


def many_small(sizes: Sizes) -> Case:
    """Many small tensors: what the calls cost."""
    batch = Batch.random([(sizes.small // 4,)] * 160)
    contenders = {
        "ours batch_reduce": ours(batch, "auto"),
        "ours batch_reduce, out=": ours(batch, "auto", into=True),
        "NumPy loop and copies": loop(batch),
        **tensorflow_peers(batch, HCA, HCA_GRAPH, R2O, R2O_GRAPH),
        **jax_peer(batch),
    }
    case = Case(f"160 x {said(sizes.small)} float32 over {N} devices", contenders, sizes.repeats, sizes)
    for this in ("ours batch_reduce", "ours batch_reduce, out="):
        case.faster(this, HCA, 100)
        case.faster(this, HCA_GRAPH, 15)
        case.faster(this, JAX, 15)
        case.ask(f"{this}: ms", case.rows[this]["median_s"] * 1e3, most=1)
    return case


def one_small(sizes: Sizes) -> Case:
    """One small tensor: what a call costs."""
    batch = Batch.random([(sizes.small // 4,)])
    contenders = {
        "ours reduce": ours(batch, "auto"),
        "ours reduce, out=": ours(batch, "auto", into=True),
        "NumPy loop and copies": loop(batch),
        **torch_peer(batch),
        **tensorflow_peers(batch, HCA, HCA_GRAPH, R2O, R2O_GRAPH),
        **jax_peer(batch),
    }
    case = Case(f"{said(sizes.small)} float32 over {N} devices", contenders, sizes.often, sizes)
    for this in ("ours reduce", "ours reduce, out="):
        for peer in (JAX, HCA, HCA_GRAPH, R2O, R2O_GRAPH):
            case.faster(this, peer, 5)
        case.ask(f"{this}: us", case.rows[this]["median_s"] * 1e6, most=40)
    return case


def sources(sizes: Sizes, to_one: bool) -> Case:
    """From 2 to 64 sources, as many bytes in all: does the rate stay?

    All are cut from the same memory, since some is slower than other, and begin where those of NumPy do that are as
    large: a page apart, all at the same place in their pages.
    """
    counts, page = (2, 3, 5, 8, 16, 64), 1024
    total, room = sizes.sources // 4, 65 * page
    rng = np.random.default_rng(0)
    read = rng.standard_normal((total * 64 // 65 if to_one else total // 2) + room, np.float32)
    written = np.full(total // 2 + room, np.nan, np.float32)

    def batch(n: int, results: int) -> Batch:
        size = total // (n + results) // page * page
        starts = range(0, n * (size + page), size + page)
        return Batch([[read[k : k + size] for k in starts]], [[written[k : k + size] for k in starts[:results]]])

    contenders = {COPY: copy(batch(2, 2))}
    name = ("{} to 1" if to_one else "{} to each").format
    for n in counts:
        one = batch(n, 1 if to_one else n)
        contenders[name(n)] = ours(one, "direct", into=True, to="cpu:0" if to_one else None, exact=True)
    what = "one result" if to_one else "a result each"
    case = Case(f"2 to 64 sources, {what}, {said(sizes.sources)} read and written", contenders, sizes.repeats, sizes)
    rates = [case.relative(name(n), COPY) for n in counts if n <= 16]
    case.ask("2 to 16 sources: greatest rate / least rate", max(rates) / min(rates), most=1.25)
    if to_one:
        case.rate(name(64), COPY, 0.8)
    return case


def sweep(sizes: Sizes) -> dict[str, Any]:
    """From 1 KiB to 64 MiB a replica: ours, the peers that run in one process, and the rate of the memory."""
    kept = {}
    exponents = range(10, sizes.large.bit_length(), 2)
    for nbytes in (1 << exponent for exponent in exponents):
        batch = Batch.random([(nbytes // 4,)])
        contenders = {
            COPY: copy(batch),
            "ours, out=": ours(batch, "auto", into=True),
            "ours": ours(batch, "auto"),
            "NumPy loop and copies": loop(batch),
            **torch_peer(batch),
            **tensorflow_peers(batch, HCA, R2O),
            **jax_peer(batch),
        }
        case = Case(f"{said(nbytes)} float32 over {N} devices", contenders, max(3, sizes.repeats // 2), sizes)
        kept[str(nbytes)] = case.rows
    return kept


def said(nbytes: int) -> str:
    """Return bytes in words: ``64 MiB``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few repeats: whether it runs at all")
    parser.add_argument("--sizes", action="store_true", help="also from 1 KiB to 64 MiB, for the picture")
    parser.add_argument("--repeats", type=int, help="turns of each case")
    parser.add_argument("--only", default="", help="only the cases whose function has this in its name")
    parser.add_argument("--json", type=Path, default=RESULTS / "host_reduction.json")
    parser.add_argument("--mpi-rank", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        mpi_rank(*options.mpi_rank)
        return
    sizes = QUICK if options.quick else Sizes()
    if options.repeats:
        sizes = sizes._replace(repeats=options.repeats, often=options.repeats)
    kernel = {"instruction_set": kernels.instruction_set(), "threads": kernels.threads()}
    print(f"kernels: {kernel['instruction_set']}, {kernel['threads']} threads")
    jobs = {
        "large": large,
        "halves": halves,
        "gradients": partial(gradients, alone=False),
        "gradients_alone": partial(gradients, alone=True),
        "many_small": many_small,
        "one_small": one_small,
        "sources_to_each": partial(sources, to_one=False),
        "sources_to_one": partial(sources, to_one=True),
    }
    cases = []
    for name, job in jobs.items():
        if options.only in name:
            cases.append(job(sizes))
            gc.collect()  # the frameworks' functions, and what they hold, are in cycles
    kept = {case.name: case.kept() for case in cases}
    result = {"devices": N, "dtype": "float32", "quick": options.quick, "kernels": kernel, "cases": kept}
    if options.sizes:
        result["sizes"] = sweep(sizes)
    asked = [one for case in cases for one in case.asked]
    print(f"\n{sum(one['met'] is True for one in asked)} of {len(asked)} asked were met")
    for one in asked:
        if one["met"] is False and not sizes.quick:
            print(f"  missed: {one['what']}: asked {one['asked']}, got {one['got']:.4g}")
    keep("host_reduction", result, options.json)


if __name__ == "__main__":
    main()
