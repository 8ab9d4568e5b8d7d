"""Is the CUDA engine right on these devices? The checks of gpu_run.py: python gpu_checks.py CASE [--driver fake].

``kernels`` compares with the reference, bytes around the results included. ``calls`` draws ops, dtypes, algorithms, 1
to 20 replicas, odd sizes, offsets, strides, ``out=`` and in place, and compares with the host's kernels. Both compare
bits (NaN is NaN). The checks of order use values whose sums are exact.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
from gpu_device import SUPPORT, Gpus, Kernels, devices, fake_cuda, main, say

import crossreduce as cr
from crossreduce.engines import cuda
from crossreduce.engines.cuda import driver, memory

import cuda_launches  # isort: skip - gpu_device lets Python find it

ALGORITHMS = ("one_device", "direct", "one_shot", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling")
DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "complex128", "int8", "int64", "uint8", "bool")
OPS = ("sum", "mean", "min", "max", "product")
MODULES = ("kernels._native", "frameworks._numpy_arrays", "engines.host._calls", "engines.cuda._cuda")
PACKAGES = ("crossreduce", "numpy", "torch", "jax", "jax-cuda13-plugin", "cupy-cuda13x", "nvidia-nccl-cu13", "optree")
COMPUTE_MODE = 20  # CUDA's attribute; 0: processes share the device
N, TURNS, CALLS, GRADIENTS = 8, 6, 300, 161
NAMES = ["cuda:0", *(f"cuda:0#{k}" for k in range(1, N))]


def versions(is_fake: bool) -> None:
    """Report the versions. All compiled modules are there, torch finds the devices, and they take the kernels."""
    found = [f"{each.name} {each.version}" for each in importlib.metadata.distributions() if each.name in PACKAGES]
    for name in MODULES:
        importlib.import_module(f"crossreduce.{name}")
    for number in range(devices(is_fake).count):
        assert not (why := driver.lacks_kernels(number)), why
        mode = fake_cuda.Driver().give("cuDeviceGetAttribute", COMPUTE_MODE, number, kind=ctypes.c_int)
        say(**{"exclusive": True} if mode else {})  # then the cases run one after another
    say(note="; ".join([*driver.devices(), f"python {platform.python_version()}, {', '.join(found)}"]))


def kernels(is_fake: bool) -> None:
    """Launch each kernel once for each kind of numbers, and compare."""
    library, draw = Kernels(is_fake), np.random.default_rng(1)
    for kernel, numbers in library.every:
        cuda_launches.check(library, numbers, draw, kernel, library.block)
    say(note=f"{len(dict(library.every))} kernels agree with the reference, bit for bit")


def raw_launches(is_fake: bool) -> None:
    """Launch each kernel on memory of exactly the size of each array, for memcheck; the values are not looked at."""
    library, draw = Kernels(is_fake), np.random.default_rng(1)
    names = dict(reversed(library.every))  # of the several numbers of a kernel, the first
    for kernel, numbers in names.items():
        made: list[int] = []

        def address_of(size: int, nbytes: int, _: bool, made: list[int] = made) -> int:
            offset = int(draw.choice([0, 0, 1, 2])) * nbytes
            made.append(library.driver.give("cuMemAlloc_v2", offset + size * nbytes, kind=ctypes.c_uint64))
            return made[-1] + offset

        library.queue(kernel, cuda_launches.launch_of(kernel, numbers, (1, 37, 5003), 2, address_of)[0], 7)
        library.driver.call("cuCtxSynchronize")
        for address in made:
            library.driver.call("cuMemFree_v2", address)
    assert not library.fake or not library.fake.report(), library.fake.report()[:3]
    say(note=f"{len(names)} kernels launched on arrays without a byte to spare")


def calls(is_fake: bool) -> None:
    """Draw calls and compare; the engine must run at least nine of ten (it leaves some kinds to torch)."""
    gpus = devices(is_fake)
    mock.patch.stopall()
    draw, by_engine, count = np.random.default_rng(1), 0, 60 if gpus.is_fake else CALLS
    for _ in range(count):
        dtype, op = str(draw.choice(DTYPES)), str(draw.choice(OPS))
        while (dtype == "bool" and op in ("sum", "mean")) or (dtype.startswith("complex") and op in ("min", "max")):
            op = str(draw.choice(OPS))
        by_engine += drawn_call(gpus, draw, dtype, op)
    assert by_engine >= 0.9 * count, f"the CUDA engine ran {by_engine} of {count} calls only"
    say(note=f"{count} calls have the bits of the host's kernels; the CUDA engine ran {by_engine}")


def drawn_call(gpus: Gpus, draw: np.random.Generator, dtype: str, op: str) -> bool:
    """Run a drawn call twice and compare all results; return whether the CUDA engine ran it."""
    n, shapes = int(draw.integers(1, draw.choice([3, 9, 21]))), []
    places = [k * gpus.count // n for k in range(n)]
    names = [f"cuda:{place}" + (f"#{k}" if k else "") for k, place in enumerate(places)]
    for _ in range(int(draw.choice([1, 1, 2, 5]))):
        size = int(draw.integers(0, draw.choice([4, 300, 5000])))
        shapes.append((size,) if draw.random() < 0.7 else (3, size // 3))
    on_host = [[drawn(gpus, draw, dtype, shape) for _ in names] for shape in shapes]
    mode, ops = draw.choice(["new", "out", "in place"]), cr.AllReduceCrossDeviceOps(str(draw.choice(ALGORITHMS)))

    def reduced(rows: list[list[Any]], kind: str, outs: Any = None) -> list[list[Any]]:
        on = [name.replace("cuda", kind) for name in names]
        values = [cr.PerReplica(row, on) for row in rows]
        keywords = {} if outs is None else {"out": [cr.PerReplica(row, on) for row in outs]}
        return [list(result) for result in ops.batch_reduce(op, [(x, x) for x in values], **keywords)]

    def put(rows: Any) -> list[list[Any]]:
        return [[gpus.put(x, place) for x, place in zip(row, places, strict=True)] for row in rows]

    torch, ran, inner = gpus.torch, list[int](), cuda.CudaExecutable.run
    right = reduced([[x.clone() for x in row] for row in on_host], "cpu")
    for _ in range(2):  # the second call may run in compiled code
        rows = put(([x.contiguous() for x in row] if mode == "in place" else row) for row in on_host)
        outs = None if mode == "new" else put([torch.full_like(x, 77) for x in row] for row in right)
        outs = rows if mode == "in place" and right[0][0].dtype == rows[0][0].dtype else outs
        with mock.patch.object(cuda.CudaExecutable, "run", lambda *given: (ran.append(1), inner(*given))[1]):
            results = reduced(rows, "cuda", outs)
        for x, y in zip(chain(*results), chain(*right), strict=True):
            both = (torch.empty(x.numel(), dtype=x.dtype).copy_(each.reshape(-1)) for each in (gpus.on_host(x), y))
            a, b = (each.view(torch.uint8).numpy().tobytes() for each in both)
            same = x.dtype == y.dtype and cuda_launches.equal(a, b, str(y.dtype)[6:])
            assert same, f"wrong bits: {op} of {dtype}, {ops}, {names}, {shapes}, {mode}"
    return bool(ran)


def drawn(gpus: Gpus, draw: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a host tensor of drawn values: at an offset, and maybe transposed or with a stride."""
    step, offset = int(draw.choice([1, 1, 1, 2, 3])), int(draw.integers(0, 9))
    values = cuda_launches.values(draw, dtype, offset + step * int(np.prod(shape)))
    flat = gpus.torch.from_numpy(values.view(np.uint8)).view(getattr(gpus.torch, dtype))[offset::step]
    return flat.view(shape[::-1]).t() if len(shape) == 2 else flat.view(shape)


def full(gpus: Gpus, value: float, size: int = 0) -> Any:
    x = gpus.random((size or gpus.size,), gpus.torch.float32)
    gpus.fill(x, value)
    return x


def reduced(xs: list[Any], op: str = "sum") -> list[Any]:
    return list(cr.all_reduce(xs, op, devices=NAMES[: len(xs)]))


def expect(gpus: Gpus, results: list[Any], value: float) -> None:
    for k, x in enumerate(results):
        wrong = int((gpus.on_host(x) != value).sum())
        assert not wrong, f"{wrong} of {x.numel()} elements of result {k} are not {value}"


def fill_all(gpus: Gpus, xs: list[Any], turn: int) -> float:
    """Let the stream sleep, then fill tensors with values of their own in each turn; return their sum."""
    gpus.sleep()
    for k, x in enumerate(xs):
        gpus.fill(x, turn + k)
    return sum(turn + k for k in range(len(xs)))


def side_stream(is_fake: bool) -> None:
    """A stream sleeps, then writes the inputs; the call runs in it, or in a stream that waits for it."""
    gpus = devices(is_fake)
    xs = [full(gpus, 0) for _ in range(N)]
    for turn in range(TURNS):
        with gpus.side_stream():
            right = fill_all(gpus, xs, turn)
            results = reduced(xs)
        expect(gpus, results, right)
        with gpus.side_stream():
            right = fill_all(gpus, xs, turn + 100)
        expect(gpus, reduced(xs), right)


def reuse(is_fake: bool) -> None:
    """Inputs, or results, are deleted right after the call, and their memory is written again at once."""
    gpus = devices(is_fake)
    for turn in range(TURNS):
        step = 1 + (turn % 2 and not gpus.is_fake)  # strided inputs are copied first
        xs = [full(gpus, 0, gpus.size * step) for _ in range(N)]
        right = fill_all(gpus, xs, turn)
        results = reduced([x[::step] for x in xs])
        for x in xs[: N // 2]:
            gpus.fill(x, 77)
        del x
        xs.clear()
        others = [full(gpus, 5) for _ in range(2 * N)]
        expect(gpus, results, right)
        gpus.sleep()
        results = reduced(others[:N])
        del results
        more = [full(gpus, 9) for _ in range(N)]
        expect(gpus, more, 9)
        expect(gpus, others, 5)


def graph(is_fake: bool) -> None:
    """A captured call gives the results of the inputs' values at each replay, also of strided inputs."""
    gpus = devices(is_fake)
    for op, step in (("sum", 1), ("max", 1), ("mean", 1 if gpus.is_fake else 2)):
        whole = [full(gpus, 0, gpus.size * step) for _ in range(N)]
        replay = gpus.captured(partial(reduced, [x[::step] for x in whole], op))
        for turn in range(TURNS):
            right = fill_all(gpus, whole, turn)
            expect(gpus, replay(), {"sum": right, "max": turn + N - 1, "mean": right / N}[op])


def threads(is_fake: bool) -> None:
    """Two threads, with streams and values of their own, call at the same time."""
    gpus = devices(is_fake)

    def work(thread: int) -> None:
        with contextlib.nullcontext() if gpus.is_fake else gpus.side_stream():
            xs, kept = [full(gpus, 0) for _ in range(N)], []
            for turn in range(TURNS):
                right = fill_all(gpus, xs, 1000 * thread + turn)
                kept += [(reduced(xs), right) for _ in range(8)]
            for results, value in kept:
                expect(gpus, results, value)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def deterministic(is_fake: bool) -> None:
    """With deterministic algorithms results are right, and torch does not fill new results first."""
    gpus = devices(is_fake)
    gpus.torch.use_deterministic_algorithms(True)
    rows = [[full(gpus, k, 1000) for _ in range(GRADIENTS)] for k in range(N)]
    call = partial(cr.all_reduce, rows, devices=NAMES)
    for row in (call(), call())[1]:
        expect(gpus, row[:: GRADIENTS - 1], N * (N - 1) / 2)
    activity = gpus.torch.profiler.ProfilerActivity
    with gpus.torch.profiler.profile(activities=[activity.CPU if gpus.is_fake else activity.CUDA]) as profile:
        call()
        gpus.synchronize()
    found = [event.name[:80] for event in profile.events() if "CUDA" in str(event.device_type)]
    say(row={"kernels": found[:20]}, measured={"deterministic": len(found)} if found else {})


def expandable_segments(is_fake: bool) -> None:
    """Calls are right where torch's allocator has expandable segments, or gets them after its first use."""
    gpus = devices(is_fake)
    full(gpus, 0)
    if "at run time" in sys.argv[1] and not gpus.is_fake:
        gpus.torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    mock.patch.stopall()
    draw = np.random.default_rng(2)
    assert all(drawn_call(gpus, draw, "float32", "sum") for _ in range(40)), "the CUDA engine did not run"


expandable_segments_at_run_time = expandable_segments


def dlpack_from_cupy(is_fake: bool) -> None:
    """CuPy's arrays, written in a stream of CuPy, directly and as tensors of torch."""
    gpus = devices(is_fake)
    if is_fake:
        sys.path.insert(0, str(SUPPORT / "standins"))
        machine = importlib.import_module("cupy._machine")
        machine.allocate, machine.free, machine.checks_order = gpus.fake.memory, lambda *_: None, False
        machine.synchronize = gpus.fake.run
        cuda.device_memory = memory.device_memory  # instead of that of torch's stand-in
    import cupy

    with contextlib.nullcontext() if is_fake else cupy.cuda.Stream(non_blocking=True):
        for turn in range(TURNS):
            xs, right = [cupy.asarray(np.full(gpus.size, turn + k, "float32")) for k in range(N)], N * turn + 28
            assert all((cupy.asnumpy(x) == right).all() for x in reduced(xs)), "wrong sums of CuPy's arrays"
            expect(gpus, [] if is_fake else reduced([gpus.torch.from_dlpack(x) for x in xs]), right)


def dlpack_from_jax(is_fake: bool) -> None:
    """JAX's arrays as tensors of torch, right after the program that makes them was started."""
    import jax

    gpus, made = devices(is_fake), partial(jax.lax.fori_loop, 0, 1000, lambda _, x: x + 1)
    make = jax.jit(lambda value: made(jax.numpy.full(gpus.size, value - 1000)))
    for turn in range(TURNS):
        xs = [gpus.torch.from_dlpack(make(float(turn + k))) for k in range(N)]
        assert is_fake or xs[0].is_cuda, "JAX has no GPU"
        expect(gpus, reduced([gpus.memory.put(x, 0) for x in xs] if is_fake else xs), N * turn + 28)
        gpus.release()


if __name__ == "__main__":
    main(globals())
