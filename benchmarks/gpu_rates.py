"""How close are reductions on a CUDA device to the rate of a copy, and how fast are other libraries?

The measurements of gpu_run.py: python gpu_rates.py CASE [--driver fake]. Contenders run in turn, between CUDA events
(JAX and several GPUs: by the host's clock). A time is the median over the turns of the mean of many calls, a ratio the
median of the ratios within the turns. A row says how many bytes a contender moves (reads plus writes, as its kernels
are written) and what share of the rate of torch's ``copy_`` that is. The sums of all contenders are checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import statistics
import time
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import optree
from gpu_device import Gpus, Kernels, Run, devices, driver, engine_only, fake_cuda, main, say
from host_reduction import resnet50

import crossreduce as cr

import cuda_launches  # isort: skip - gpu_device lets Python find it

COPY, IN_GRAPH, LARGE = "torch copy_", "ours, in a CUDA graph", 1 << 28
SIZES, FAKE_SIZES = (1 << 10, 1 << 15, 1 << 20, 1 << 24, LARGE), (1 << 10, 1 << 12)  # bytes per replica
SHORT, TURNS, LEAST_S = 1 << 22, 7, 0.015  # below SHORT the host's time would count, so graphs are measured, too
BLOCKS, USED_BLOCKS = (1, 2, 4, 8), 4  # per multiprocessor, of the sweep; and those of the library
COUNTS = ((8, 1), (8, 8), (2, 2), (16, 16))  # of sources and results
NAMES = ["cuda:0", *(f"cuda:0#{k}" for k in range(1, 16))]


class Contender(NamedTuple):
    """A way to reduce: ``run`` returns a list of results per tensor, or ``None``, and moves so many bytes."""

    run: Run
    nbytes: int
    by_wall: bool = False


class Times:
    """The times of contenders, each of which is reported as a row. Another library that fails is left out."""

    def __init__(self, gpus: Gpus, name: str, contenders: dict[str, Contender], tensors: Any = None) -> None:
        self.times: dict[str, list[float]] = {}
        self.nbytes, counts = {key: one.nbytes for key, one in contenders.items()}, {}
        for key, one in contenders.items():
            try:
                check(gpus, key, one.run(), tensors)
                once = gpus.seconds(one.run, 1, one.by_wall)
            except Exception as error:
                if key.startswith("ours"):
                    raise
                say(row={"case": name, "contender": key, "error": f"{type(error).__name__}: {error}"[:500]})
                continue
            self.times[key], counts[key] = [], 1 if gpus.is_fake else min(300, max(2, int(LEAST_S / once)))
        for _ in range(1 if gpus.is_fake else TURNS):
            for key, count in counts.items():
                self.times[key].append(gpus.seconds(contenders[key].run, count, contenders[key].by_wall))
        for key, times in self.times.items():
            row = {"case": name, "contender": key, "median_s": statistics.median(times), "min_s": min(times)}
            say(row={**row, "max_s": max(times), "bytes": self.nbytes[key], "of_copy": self.share(key)})

    def faster(self, ours: str, other: str) -> float | None:
        """Return how many times as fast one contender is as another, or ``None`` if one was not measured."""
        if ours not in self.times or other not in self.times:
            return None
        return statistics.median(b / a for a, b in zip(self.times[ours], self.times[other], strict=True))

    def share(self, key: str) -> float:
        """Return the rate of a contender relative to the copy's; 0 if there is no copy."""
        return (self.faster(key, COPY) or 0) * self.nbytes[key] / self.nbytes.get(COPY, 1)


def check(gpus: Gpus, name: str, results: Any, tensors: list[list[Any]] | None) -> None:
    """Raise unless both ends of every result are the sums, within the error of any order of additions."""
    pairs = zip(results or (), tensors or (), strict=bool(results and tensors))
    for (components, xs), part in product(pairs, (slice(9999), slice(-9999, None))):
        parts = [gpus.on_host(x.reshape(-1)[part]).double() for x in xs]
        bound = (0.05 if xs[0].dtype is gpus.torch.bfloat16 else 1e-5) * sum(x.abs() for x in parts)
        for x in components:
            got = gpus.on_host(gpus.torch.as_tensor(x).reshape(-1)[part]).double()
            assert ((got - sum(parts)).abs() <= bound).all(), f"{name}: wrong sums"


def ours(rows: list[list[Any]], results: int, out: Any = None, op: str = "sum") -> Contender:
    """Return a call of ``batch_reduce`` to one or all replicas; it reads the sources and writes the results once."""
    values = [cr.PerReplica(row, NAMES[: len(row)]) for row in rows]
    ops, pairs = cr.AllReduceCrossDeviceOps("direct"), [(x, x if results > 1 else NAMES[0]) for x in values]
    keywords = {} if out is None else {"out": [cr.PerReplica(row[:results], NAMES[:results]) for row in out]}
    nbytes = sum(row[0].nbytes for row in rows) * (len(rows[0]) + results)
    return Contender(lambda: [list(each) for each in ops.batch_reduce(op, pairs, **keywords)], nbytes)


def copy(to: Any, x: Any) -> dict[str, Contender]:
    return {COPY: Contender(lambda: [to.copy_(x)].clear(), 2 * x.nbytes)}


def torchs(gpus: Gpus, rows: list[list[Any]], results: int) -> dict[str, Contender]:
    """Return torch's usual ways: a stack and its sum, and a chain of additions."""
    torch, nbytes, n, copies = gpus.torch, sum(row[0].nbytes for row in rows), len(rows[0]), results - 1

    def copied(sums: list[Any]) -> Any:
        return [[x, *(x.clone() for _ in range(copies))] for x in sums]

    def chain() -> Any:
        sums = [torch.add(row[0], row[1]) for row in rows]
        for x, row in zip(sums, rows, strict=True):
            for y in row[2:]:
                x.add_(y)
        return copied(sums)

    stack = lambda: copied([torch.stack(row).sum(0) for row in rows])  # noqa: E731
    return {
        "torch stack().sum(0)": Contender(stack, (3 * n + 1 + 2 * copies) * nbytes),
        "torch add_ chain": Contender(chain, (3 * (n - 1) + 2 * copies) * nbytes),
    }


def others(gpus: Gpus, xs: list[Any], results: int) -> dict[str, Contender]:
    """Return a jitted sum of JAX and CuPy's elementwise kernel, with as many results."""
    n, nbytes = len(xs), (len(xs) + results) * xs[0].nbytes

    @cache
    def of_jax() -> Run:
        import jax

        program = jax.jit(lambda *ys: [sum(ys[1:], ys[0])] * results)
        return partial(program, *[jax.dlpack.from_dlpack(x) for x in xs])

    @cache
    def of_cupy() -> Run:
        import cupy

        total, each = " + ".join(f"x{k}" for k in range(n)), "; ".join(f"y{k} = sum" for k in range(results))
        names = (", ".join(f"T {c}{k}" for k in range(m)) for c, m in (("x", n), ("y", results)))
        kernel = cupy.ElementwiseKernel(*names, f"T sum = {total}; {each}", f"sum_{n}_{results}")
        return partial(kernel, *[cupy.from_dlpack(x) for x in xs])

    # XLA's stream runs the calls in order, and torch.from_dlpack makes torch's stream wait for it.
    made = {"JAX jit": Contender(lambda: [[gpus.torch.from_dlpack(x) for x in of_jax()()]], nbytes, by_wall=True)}
    if xs[0].dtype is gpus.torch.float32:  # CuPy has no bfloat16
        made["CuPy"] = Contender(lambda: [of_cupy()()] if results > 1 else [[of_cupy()()]], nbytes)
    return made


def rates(is_fake: bool, n: int, results: int, ops: tuple[str, ...] = ("sum",)) -> None:
    """Measure several sizes in float32 and bfloat16, sums of the largest beside other libraries."""
    gpus, notes = devices(is_fake), []
    sizes = (FAKE_SIZES if is_fake else SIZES)[0 if ops == ("sum",) else -1 :]
    for dtype, size, op in product((gpus.torch.float32, gpus.torch.bfloat16), sizes, ops):
        rows, out = ([[gpus.random((size // dtype.itemsize,), dtype) for _ in range(n)]] for _ in range(2))
        contenders = copy(out[0][0], rows[0][0])
        contenders |= {"ours": ours(rows, results, op=op), "ours, out=": ours(rows, results, out, op)}
        if size < SHORT:
            contenders[IN_GRAPH] = contenders["ours"]._replace(run=gpus.captured(contenders["ours"].run))
        if n == 8 and size == sizes[-1] and op == "sum":
            contenders |= torchs(gpus, rows, results) | others(gpus, rows[0], results)
        name = f"{op} {n} to {results}, {size} bytes, {str(dtype)[6:]}"
        times = Times(gpus, name, contenders, rows if op == "sum" else None)
        best = IN_GRAPH if size < SHORT else "ours"
        notes.append(f"{str(dtype)[6:]} {op} {size >> 10}K {times.share(best):.2f}")
        if size == sizes[-1] and dtype is gpus.torch.float32 and op == "sum":
            measured = {f"{n} to {results}": times.share("ours")}
            measured |= {"stack": times.faster("ours", "torch stack().sum(0)")} if results == 1 else {}
            say(measured=measured | ({"jax": times.faster("ours", "JAX jit")} if results == 8 else {}))
        del rows, out, contenders, times
        gpus.release()
    say(note=f"of the copy rate: {', '.join(notes)}")


def gradients(is_fake: bool) -> None:
    """Measure the 161 gradients of ResNet-50: eager, with ``out=``, in a graph, beside torch; then small tensors."""
    gpus, notes = devices(is_fake), []
    leaves = optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))
    shapes = [(min(math.prod(shape), 100),) if is_fake else shape for shape in leaves]
    for name, each in (("161 gradients", shapes), ("160 x 1 KiB", [(256,)] * 160), ("1 KiB", [(256,)])):
        rows, out = ([[gpus.random(shape, gpus.torch.float32) for _ in range(8)] for shape in each] for _ in range(2))
        contenders = copy(*(gpus.random((sum(map(math.prod, each)),), gpus.torch.float32) for _ in range(2)))
        contenders |= {"ours": ours(rows, 8), "ours, out=": ours(rows, 8, out), **torchs(gpus, rows, 8)}
        contenders[IN_GRAPH] = contenders["ours"]._replace(run=gpus.captured(contenders["ours"].run))
        times = Times(gpus, name, contenders, rows)
        turns = range(2 if is_fake else 15)
        host = {
            key: 1e6 * statistics.median(gpus.host_seconds(one.run) for _ in turns) for key, one in contenders.items()
        }
        say(row={"case": name, "host_us": host})
        say(measured={"graph": times.share(IN_GRAPH), "host": host["ours, out="]} if each is shapes else {})
        on_host = ", ".join(f"{key} {host[key]:.0f}" for key in ("ours", "ours, out="))
        notes.append(f"{name}: graph {times.share(IN_GRAPH):.2f} of the copy rate, us on the host: {on_host}")
        del rows, out, contenders, times
        gpus.release()
    say(note="; ".join(notes))


def several_gpus(is_fake: bool) -> None:
    """Measure an all-reduce of one tensor per GPU: algorithms, and NCCL."""
    gpus = devices(is_fake)
    xs = [gpus.random(((FAKE_SIZES[-1] if is_fake else LARGE) // 4,), gpus.torch.float32, k) for k in range(gpus.count)]
    value, outs = cr.PerReplica(xs, [f"cuda:{k}" for k in range(gpus.count)]), [gpus.torch.empty_like(x) for x in xs]
    nbytes = 2 * (gpus.count - 1) * xs[0].nbytes  # over the links in all, the least of any all-reduce
    contenders = {}
    for algorithm in ("direct", "ring", "hierarchical_copy"):
        run = partial(cr.AllReduceCrossDeviceOps(algorithm).reduce, "sum", value, value)
        contenders[f"ours, {algorithm}"] = Contender(lambda run=run: [list(run())], nbytes, True)
    nccl = Contender(lambda: [[gpus.torch.cuda.nccl.all_reduce(xs, outs), outs][1]], nbytes, True)
    times = Times(gpus, f"{gpus.count} GPUs", contenders | {"NCCL": nccl}, [xs]) if gpus.count > 1 else None
    ratio = times and times.faster("NCCL", "ours, direct")
    say(measured={"nccl": ratio} if ratio else {}, note=f"{gpus.count} GPUs{'' if times else ': nothing to measure'}")


def kernels_and_grids(is_fake: bool) -> None:
    """Measure single kernels of sums: a fixed or any number of sources, in several grids, beside those in use."""
    gpus, notes, library = devices(is_fake), [], Kernels(False)  # on the driver that is loaded
    kinds = (("sum_f32", 4, "float32"), ("sum_bf16", 4, "bfloat16"), ("sum_f64", 8, "float64"))
    for (name, wide, dtype), size in product(kinds, FAKE_SIZES[:1] if is_fake else (1 << 20, LARGE)):
        nbytes, used = getattr(gpus.torch, dtype).itemsize, {}
        xs = [gpus.random((size // nbytes,), getattr(gpus.torch, dtype)) for _ in range(32)]
        contenders = copy(xs[16], xs[0])
        for sources, results in COUNTS:
            at = [x.data_ptr() for x in xs[:sources]], [x.data_ptr() for x in xs[16 : 16 + results]]
            tensor, one = cuda_launches.Tensor(size // nbytes, 0, *at), (nbytes, wide, nbytes)
            packed = cuda_launches.packed([tensor], [(0, 0, 0, 0)], 1, 1, one)
            buffer = ctypes.create_string_buffer(packed, len(packed) + 8)
            fixed = (str(sources),) if sources <= cuda_launches.MAX_FIXED else ()
            for kind, blocks in product((*fixed, "any"), BLOCKS):
                run = partial(library.queue, f"{name}_{kind}", buffer, blocks * library.multiprocessors)
                key = f"{sources} to {results}, {name}_{kind}, {blocks} blocks"
                contenders[key] = Contender(run, (sources + results) * size)
                used.setdefault(f"{sources} to {results}", []).append(key)
        times = Times(gpus, f"{size} bytes, {name}", contenders)
        for keys in used.values():
            here = next(key for key in keys if key.endswith(f"{USED_BLOCKS} blocks"))
            best = min(keys, key=lambda key, times=times: statistics.median(times.times[key]))
            if times.faster(best, here) > 1.05:
                notes.append(f"{size >> 10}K, {best}: {times.faster(best, here):.2f} times as fast as {USED_BLOCKS}")
        del xs
        gpus.release()
    say(note="; ".join(notes) or "the grids that are used are within 5 % of the best")


def jax_arrays(is_fake: bool, is_traced: bool) -> None:
    """Check and measure sums of 8 JAX arrays to 8 results: the custom call, which XLA may replay as a graph."""
    stand_in = is_fake and importlib.import_module("cuda_jax_runs").gpus(fake_cuda.built())
    with stand_in or contextlib.nullcontext():
        import jax

        from crossreduce.engines.cuda import jax as cuda_jax

        assert not driver.unusable(), driver.unusable()
        assert is_fake or jax.default_backend() == "gpu", "JAX has no GPU"

        def seconds(run: Run, calls: int, _: bool) -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                results = run()
            jax.block_until_ready(results)
            return (time.perf_counter() - begin) / calls

        traced = jax.jit(lambda *xs: list(cr.all_reduce(list(xs))))
        eager = lambda *xs: list(cr.all_reduce(list(xs), devices=NAMES[:8]))  # noqa: E731
        runs = {"ours": traced if is_traced else eager, "JAX": jax.jit(lambda *xs: [sum(xs[1:], xs[0])] * 8)}
        draw, notes = np.random.default_rng(1), []
        for size in FAKE_SIZES[:1] if is_fake else (1 << 10, 1 << 20, 1 << 26):
            for turn in range(3 if size <= 1 << 20 else 1):
                values = [draw.standard_normal(size // 4, "float32") + turn for _ in range(8)]
                right, xs = cr.all_reduce(values)[0], [jax.device_put(x, jax.devices()[0]) for x in values]
                with engine_only():
                    results = runs["ours"](*xs)
                assert all(np.asarray(x).tobytes() == right.tobytes() for x in results), f"wrong bits: {size} bytes"
            count = traced.lower(*xs).as_text().count(f"@{cuda_jax.TARGET}")
            assert count == 1 or not is_traced, f"the program has {count} custom calls, not 1"
            calls = {name: Contender(partial(run, *xs), 9 * size) for name, run in runs.items()}
            times = Times(SimpleNamespace(is_fake=is_fake, seconds=seconds), f"{size} bytes", calls)
            notes.append(f"{size >> 10}K {times.faster('ours', 'JAX'):.2f}")
    say(note=f"times as fast as a jitted sum with 8 results: {', '.join(notes)}")


RATES = {f"{n}_to_{m}": partial(rates, n=n, results=m) for n, m in COUNTS}
RATES["min_and_max"] = partial(rates, n=8, results=8, ops=("min", "max"))
JAX = {"eager": partial(jax_arrays, is_traced=False), "jit": partial(jax_arrays, is_traced=True)}

if __name__ == "__main__":
    main(globals() | RATES | JAX)
