"""How close are reductions on a CUDA device to the rate of a copy, and how fast are other libraries?

The measurements of gpu_run.py: python gpu_rates.py "CASE" [--driver fake]. Contenders run in turn, by the host's clock,
many calls until the device has finished. A time is the median over the turns of the mean of many calls, a ratio the
median of the ratios within the turns. A row says how many bytes a contender moves (reads plus writes, as its kernels
are written) and what share of the rate of torch's ``copy_`` that is. The sums of all contenders are checked.

``python gpu_rates.py "host cost"`` needs no GPU, but g++: it measures what calls cost on the host apart from the
driver's own time, for results/. The calls of its driver do nothing (stub_cuda.cpp of the tests), and host tensors stand
in for those on CUDA devices. Times are CPU times of the calling thread, since other programs may use the CPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import statistics
import time
from functools import cache, partial, reduce
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from cases import Turns
from common import keep, samples, summary
from contenders import Batch, ours
from gpu_checks import NAMES, NOTES, Gpus, Kernels, Run, cuda_launches, fake_cuda, main, named, say
from host_reduction import RESNET50

import crossreduce as cr

COPY, NEW, OUT, IN_GRAPH, LARGE = "torch copy_", "ours", "ours, out=", "ours, in a CUDA graph", 1 << 28
STACK, JIT = "torch stack().sum(0)", "JAX jit"
SIZES, FAKE_SIZES = (1 << 10, 1 << 15, 1 << 20, 1 << 24, LARGE), (1 << 10, 1 << 12)  # bytes per replica
SHORT, TURNS, LEAST_S = 1 << 22, 5, 0.01  # below SHORT the host's time would count, so graphs are measured, too
BLOCKS = (1, 2, 4, 8)  # per multiprocessor; the library uses 4
COUNTS = ((8, 1), (8, 8), (2, 2), (16, 16))  # of sources and results
Moving = tuple[Run, int]  # returns a list of results per tensor, or ``None``; and the bytes that it moves


class Times(Turns):
    """The times of contenders, each of which is reported as a row. Another library that fails is left out.

    The note gets the rate of ours, relative to that of the first contender.
    """

    def __init__(self, gpus: Any, name: str, contenders: dict[str, Moving], tensors: Any = None) -> None:
        runs, self.rows = {}, {}
        for key, (run, _) in contenders.items():
            try:
                check(gpus, key, run(), tensors)
                runs[key] = run
            except Exception as error:
                if not runs or key.startswith(NEW):  # the first one is what the others are compared with
                    raise
                say(row={"case": name, "contender": key, "error": f"{type(error).__name__}: {error}"[:500]})
        clock = lambda: (gpus.synchronize(), time.perf_counter())[1]  # noqa: E731
        self.times = samples(runs, *((1,) if gpus.is_fake else (TURNS, 1, LEAST_S)), clock=clock)
        for key, times in self.times.items():
            self.rows[key] = {"case": name, "contender": key, **summary(times), "bytes": contenders[key][1]}
            say(row={**self.rows[key], "of_first": self.share(key)})
        NOTES.append(f"{name}: {self.share(IN_GRAPH if IN_GRAPH in runs else NEW):.2f}" if NEW in runs else "")

    def share(self, key: str) -> float:
        """Return the rate of a contender relative to that of the first one."""
        return self.relative_rate(key, next(iter(self.times)))


def check(gpus: Gpus, name: str, results: Any, tensors: list[list[Any]] | None) -> None:
    """Raise unless both ends of every result are the sums, within the error of any order of additions."""
    pairs = zip(results, tensors, strict=True) if results and tensors else ()
    for (components, xs), part in product(pairs, (slice(9999), slice(-9999, None))):
        (*parts,) = (gpus.on_host(gpus.torch.as_tensor(x).reshape(-1)[part]).double() for x in (*xs, *components))
        right, n = sum(parts[: len(xs)]), len(xs)
        bound = (0.05 if xs[0].dtype is gpus.torch.bfloat16 else 1e-5) * sum(x.abs() for x in parts[:n])
        assert all(((got - right).abs() <= bound).all() for got in parts[n:]), f"{name}: wrong sums"


def ways(gpus: Gpus, rows: list[list[Any]], results: int, op: str = "sum", beside: bool = False) -> dict[str, Moving]:
    """Return a copy, and ``batch_reduce`` to one or all replicas: with new results and ``out=``, and in a graph.

    ``beside``: and torch's usual ways, a stack and its sum, and a chain of additions; of one tensor also ``others``.
    """
    n, nbytes, torch = len(rows[0]), sum(row[0].nbytes for row in rows), gpus.torch
    batch = Batch(rows, [[gpus.put(x.clone()) for x in row[:results]] for row in rows])
    to, x = (gpus.random((nbytes // rows[0][0].itemsize,), rows[0][0].dtype) for _ in range(2))
    end = "" if results > 1 else NAMES[0]
    runs = {key: ours(batch, "direct", key == OUT, end, op=op).run for key in (NEW, OUT)}
    if nbytes < SHORT or rows[1:]:
        runs[IN_GRAPH] = gpus.captured(runs[NEW])
    made = {COPY: (lambda: [to.copy_(x)].clear(), 2 * nbytes)}
    made |= {key: (run, (n + results) * nbytes) for key, run in runs.items()}
    if beside:
        copied = lambda x: [x, *(x.clone() for _ in range(results - 1))]  # noqa: E731
        stack = lambda: [copied(torch.stack(row).sum(0)) for row in rows]  # noqa: E731
        chain = lambda: [copied(reduce(torch.Tensor.add_, row[2:], torch.add(*row[:2]))) for row in rows]  # noqa: E731
        made[STACK] = stack, (3 * n + 2 * results - 1) * nbytes
        made["torch add_ chain"] = chain, (3 * n + 2 * results - 5) * nbytes
        made |= {} if rows[1:] else others(gpus, rows[0], results)
    return made


def others(gpus: Gpus, xs: list[Any], results: int) -> dict[str, Moving]:
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
    made = {JIT: (lambda: [[gpus.torch.from_dlpack(x) for x in of_jax()()]], nbytes)}
    if xs[0].dtype is gpus.torch.float32:  # CuPy has no bfloat16
        made["CuPy"] = (lambda: [of_cupy()()] if results > 1 else [[of_cupy()()]], nbytes)
    return made


def rates(gpus: Gpus, n: int, results: int, ops: tuple[str, ...] = ("sum",)) -> None:
    """Measure several sizes in float32 and bfloat16, sums of the largest beside other libraries."""
    sizes = (FAKE_SIZES if gpus.is_fake else SIZES)[0 if ops == ("sum",) else -1 :]
    for dtype, size, op in product((gpus.torch.float32, gpus.torch.bfloat16), sizes, ops):
        rows, is_last = [[gpus.random((size // dtype.itemsize,), dtype) for _ in range(n)]], size == sizes[-1]
        made = ways(gpus, rows, results, op, n == 8 and is_last and op == "sum")
        times = Times(gpus, f"{str(dtype)[6:]} {op} {size >> 10} KiB", made, rows if op == "sum" else None)
        if is_last and dtype is gpus.torch.float32:
            found = {f"times as fast as {key}": times.ratio(key, NEW) for key in (STACK, JIT) if key in times.times}
            found["share of the copy rate"] = times.share(NEW)
            say(measured={f"{op} {n} to {results}, {key}": value for key, value in found.items()})
        del rows, made, times
        gpus.release()


def gradients(gpus: Gpus) -> None:
    """Measure the 161 gradients of ResNet-50: eager, with ``out=``, in a graph, beside torch."""
    shapes = [(min(math.prod(shape), 100),) if gpus.is_fake else shape for shape in RESNET50]
    rows = [[gpus.random(shape) for _ in range(8)] for shape in shapes]
    made = ways(gpus, rows, 8, beside=True)
    times = Times(gpus, "161 gradients", made, rows)
    host = samples({key: made[key][0] for key in (NEW, OUT)}, 15)  # until a call returns
    us = {key: 1e6 * statistics.median(each) for key, each in host.items()}
    NOTES.append(", ".join(f"{key} {each:.0f} us on the host" for key, each in us.items()))
    found = {
        "in a CUDA graph, share of the copy rate": times.share(IN_GRAPH),
        "out=, microseconds on the host": us[OUT],
    }
    say(measured={f"161 gradients, {key}": value for key, value in found.items()}, row={"host_us": us})


def kernels_and_grids(gpus: Gpus) -> None:
    """Measure single kernels of sums: a fixed or any number of sources, in several grids."""
    library = Kernels(False)  # on the driver that is loaded
    kinds = (("sum_f32", 4, "float32"), ("sum_bf16", 4, "bfloat16"), ("sum_f64", 8, "float64"))
    for (kernel, wide, dtype), size in product(kinds, FAKE_SIZES[:1] if gpus.is_fake else (1 << 20, LARGE)):
        kind = getattr(gpus.torch, dtype)
        xs = [gpus.random((size // kind.itemsize,), kind) for _ in range(32)]
        made = {COPY: (lambda xs=xs: [xs[16].copy_(xs[0])].clear(), 2 * size)}
        for sources, results in COUNTS:
            at = [x.data_ptr() for x in xs[:sources]], [x.data_ptr() for x in xs[16 : 16 + results]]
            tensor, nbytes = cuda_launches.Tensor(xs[0].numel(), 0, *at), (kind.itemsize, wide, kind.itemsize)
            packed = cuda_launches.packed([tensor], [(0, 0, 0, 0)], 1, 1, nbytes)
            buffer = ctypes.create_string_buffer(packed, len(packed) + 8)
            fixed = (str(sources),) if sources <= cuda_launches.MAX_FIXED else ()
            for each, blocks in product((*fixed, "any"), BLOCKS):
                run = partial(library.queue, f"{kernel}_{each}", buffer, blocks * library.multiprocessors)
                made[f"{sources} to {results}, {kernel}_{each}, {blocks} blocks"] = run, (sources + results) * size
        times = Times(gpus, f"{size} bytes, {kernel}", made)
        best = max([*times.times][1:], key=times.share)
        NOTES.append(f"{kernel}, {size >> 10} KiB: {times.share(best):.2f} of the copy rate by {best}")
        del xs, made, times
        gpus.release()


def jax_arrays(is_fake: bool, is_traced: bool) -> None:
    """Check and measure sums of 8 JAX arrays to 8 results: the custom call, which XLA may replay as a graph."""
    with importlib.import_module("cuda_jax_runs").gpus() if is_fake else contextlib.nullcontext():
        import jax

        from crossreduce.engines.cuda import jax as cuda_jax

        assert is_fake or jax.default_backend() == "gpu", "JAX has no GPU"
        later = jax.jit(lambda: jax.numpy.zeros(1))  # XLA's stream runs it after all earlier calls
        here = SimpleNamespace(is_fake=is_fake, synchronize=lambda: jax.block_until_ready(later()))
        traced = jax.jit(lambda *xs: list(cr.all_reduce(list(xs))))
        eager = lambda *xs: list(cr.all_reduce(list(xs), devices=NAMES[:8]))  # noqa: E731
        runs = {JIT: jax.jit(lambda *xs: [sum(xs[1:], xs[0])] * 8), NEW: traced if is_traced else eager}
        draw = np.random.default_rng(1)
        for size in FAKE_SIZES[:1] if is_fake else (1 << 10, 1 << 20, 1 << 26):
            for turn in range(3):
                values = [draw.standard_normal(size // 4, "float32") + turn for _ in range(8)]
                right, xs = cr.all_reduce(values)[0], [jax.device_put(x, jax.devices()[0]) for x in values]
                with fake_cuda.engine_only():
                    results = runs[NEW](*xs)
                assert all(np.asarray(x).tobytes() == right.tobytes() for x in results), f"wrong bits: {size} bytes"
            count = traced.lower(*xs).as_text().count(f"@{cuda_jax.TARGET}")
            assert count == 1 or not is_traced, f"the program has {count} custom calls, not 1"
            Times(here, f"{size >> 10} KiB", {key: (partial(run, *xs), 16 * size) for key, run in runs.items()})


def host_cost(_: bool) -> None:
    """Measure what calls cost on the host, where the calls of the driver do nothing."""
    import fake_cuda_torch
    import torch

    from crossreduce.engines.host import prepared

    torch.set_num_threads(1)  # the threads of OpenMP would use the CPU between measurements
    ctypes.CDLL(str(fake_cuda.built(stub=True)), ctypes.RTLD_GLOBAL)
    memory, result = fake_cuda_torch.install(), {}
    prepared.compiled_module().use_device_type(1)  # the CPU's: host tensors are taken for those of cuda:0
    for name, shapes, places in (("1 KiB, one GPU", [(256,)], [0] * 8), ("161 gradients, 8 GPUs", RESNET50, range(8))):
        rows, outs = ([[memory.put(torch.ones(shape), k) for k in places] for shape in shapes] for _ in range(2))
        trees, op = [list(leaves) for leaves in zip(*rows, strict=True)], cr.AllReduceCrossDeviceOps("direct")
        runs = {
            "in place": ours(Batch(rows, rows), "direct", with_out=True).run,
            "out=": ours(Batch(rows, outs), "direct", with_out=True).run,
            "new results": ours(Batch(rows, outs), "direct").run,
            "cr.all_reduce of lists": partial(cr.all_reduce, trees, cross_device_ops=op),
        }
        result[name] = {key: summary(each) for key, each in samples(runs, 25, 1, 0.01, clock=time.thread_time).items()}
        print(name, *(f"{key:30} {row['median_s'] * 1e6:9.2f} us" for key, row in result[name].items()), sep="\n  ")
        memory.release()
    keep("cuda_host_cost", {"driver": "stub", "clock": "CPU time", "cases": result})


RATES = {f"{n} to {m}": partial(rates, n=n, results=m) for n, m in COUNTS}
RATES["min and max"] = partial(rates, n=8, results=8, ops=("min", "max"))
JAX = {"eager": partial(jax_arrays, is_traced=False), "jit": partial(jax_arrays, is_traced=True)}

if __name__ == "__main__":
    main(RATES | named(gradients, kernels_and_grids), JAX | named(host_cost))
