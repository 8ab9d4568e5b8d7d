"""Is the CUDA engine right on these devices? The checks of gpu_run.py: python gpu_checks.py "CASE" [--driver fake].

``Gpus``, and ``FakeGpus`` on the fake driver of the tests (fake_cuda_torch.py), have the same methods. ``Kernels``
launches the library's kernels through the driver alone, without torch. ``kernels`` compares with the reference, bytes
around the results included. ``calls`` draws ops, dtypes, algorithms, 1 to 20 replicas, odd sizes, offsets, strides,
``out=`` and in place, and compares with the host's kernels. Both compare bits (NaN is NaN). The checks of order use
values whose sums are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import crossreduce as cr
from crossreduce.cli.bench.machine import machine
from crossreduce.engines import cuda
from crossreduce.engines.cuda import driver, memory

SUPPORT = Path(__file__).parents[1] / "tests/support"
sys.path[:0] = [str(SUPPORT / each) for each in ("cuda", "runtime", "planner", "")]  # not that of CuPy's stand-in
import cuda_launches
import fake_cuda
from cuda_cases import ALGORITHMS

DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "complex128", "int8", "int64", "uint8", "bool")
MODULES = ("kernels._native", "frameworks._numpy_arrays", "engines.host._calls", "engines.cuda._cuda")
COMPUTE_MODE = 20  # CUDA's attribute; 0: processes share the device
N, TURNS, CALLS, GRADIENTS, KEY = 8, 6, 300, 161, "161 gradients, deterministic, kernels of a call"
NAMES = ["cuda:0", *(f"cuda:0#{k}" for k in range(1, 16))]
Run = Callable[[], Any]
NOTES: list[str] = []  # of the case, for the table


def say(**what: Any) -> None:
    """Report to gpu_run.py: a ``row``, values ``measured`` for targets, a ``note``, or that the case is ``done``."""
    print(json.dumps(what), flush=True)


def main(of_gpus: dict[str, Callable[[Gpus], None]], others: dict[str, Callable[[bool], None]]) -> None:
    """Run the case that the command line names: a function of the devices, or of whether the driver is the fake one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=[*of_gpus, *others], metavar="CASE")
    parser.add_argument("--driver", choices=("real", "fake"), default="real")
    given = parser.parse_args()
    function, is_fake = (of_gpus | others)[given.case], given.driver == "fake"
    if given.case in others:
        function(is_fake)
    else:
        gpus = importlib.import_module("fake_cuda_torch").FakeGpus() if is_fake else Gpus()
        assert not driver.unusable(), driver.unusable()
        fake_cuda.engine_only().start()
        function(gpus)
        gpus.release()
    text = getattr(function, "func", function).__doc__ or ""
    say(note="; ".join(filter(None, NOTES)) or text.partition("\n")[0], done=True)


def named(*functions: Callable[[Any], None]) -> dict[str, Callable[[Any], None]]:
    """Return functions by their names, with spaces."""
    return {function.__name__.replace("_", " "): function for function in functions}


class Gpus:
    """The CUDA devices that torch finds."""

    is_fake, size = False, (1 << 22) + 3  # the elements of the tensors in checks of order

    def __init__(self) -> None:
        import torch

        self.torch, self.count = torch, torch.cuda.device_count()
        assert self.count, "torch finds no CUDA device"

    def put(self, x: Any, device: int = 0) -> Any:
        return x.to(f"cuda:{device}")

    def random(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.torch.randn(shape, device="cuda:0").to(dtype or self.torch.float32)

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def sleep(self) -> None:
        """Let the current stream wait, about 10 ms."""
        self.torch.cuda._sleep(20_000_000)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Within this context another stream is current. It waits for the one before, which waits for it at the end."""
        outer, side = self.torch.cuda.current_stream(), self.torch.cuda.Stream()
        side.wait_stream(outer)
        with self.torch.cuda.stream(side):
            yield
        outer.wait_stream(side)

    def on_host(self, x: Any) -> Any:
        return x.cpu()  # after the current stream only: nothing else may be needed to see results

    def synchronize(self) -> None:
        for device in range(self.count):
            self.torch.cuda.synchronize(device)

    def release(self) -> None:
        self.synchronize()
        self.torch.cuda.empty_cache()

    def captured(self, run: Run) -> Run:
        """Return a function that replays a CUDA graph of ``run`` and returns its results."""
        with self.side_stream():  # torch requires a warm-up in another stream
            run()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            results = run()
        return lambda: (graph.replay(), results)[1]


class Kernels:
    """The kernels on device 0. As attributes they are the functions that cuda_launches.check of the tests calls."""

    def __init__(self, is_fake: bool) -> None:
        self.driver = fake_cuda.FakeDriver(1) if is_fake else fake_cuda.Driver()
        assert not driver.unusable(), driver.unusable()
        fake_cuda.Driver.on(self.driver, 0)
        about, has_large = driver.native().describe(0), driver.accepts_large_tables(0)
        self.multiprocessors = about["multiprocessors"]
        self.every = [each for each in cuda_launches.kernels() if has_large or each.room < cuda_launches.LARGE]
        code = self.driver.give("cuModuleLoadData", driver._code(about["capability"]))
        self.functions = {name: self.driver.give("cuModuleGetFunction", code, name.encode()) for name, *_ in self.every}

    def block(self, nbytes: int) -> np.ndarray:
        """Return pinned memory, which is never freed; all bytes are 0xA5."""
        at = self.driver.give("cuMemHostAlloc", nbytes, 1)
        made = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), np.uint8)
        made[:] = 0xA5
        return made

    def queue(self, name: str, buffer: Any, blocks: int) -> None:
        """Launch a kernel in the default stream."""
        self.driver.launch(self.functions[name], buffer, blocks)

    def __getattr__(self, name: str) -> Callable[[Any, Any], None]:
        wait = partial(self.driver.call, "cuStreamSynchronize", None)
        return lambda buffer, blocks: (self.queue(name, buffer, blocks.value), wait())[1]


def versions(gpus: Gpus) -> None:
    """All compiled modules are there, torch finds the devices, and they take the kernels."""
    for module in MODULES:
        importlib.import_module(f"crossreduce.{module}")
    for number in range(gpus.count):
        assert not (why := driver.lacks_kernels(number)), why
        if fake_cuda.Driver().give("cuDeviceGetAttribute", COMPUTE_MODE, number, kind=ctypes.c_int):
            say(exclusive=True)  # then the cases run one after another
    say(row=(about := machine()))
    NOTES.extend([*driver.devices(), *(f"{name} {version}" for name, version in about["versions"].items())])


def kernels(is_fake: bool) -> None:
    """Launch each kernel once for each of its uses, and compare."""
    library, draw = Kernels(is_fake), np.random.default_rng(1)
    for kernel in library.every:
        cuda_launches.check(library, kernel, draw, library.block)
    NOTES.append(f"{len(library.functions)} kernels agree with the reference, bit for bit")


def raw_launches(is_fake: bool) -> None:
    """Launch each kernel on memory of exactly the size of each array, for memcheck; the values are not looked at."""
    library, draw, made = Kernels(is_fake), np.random.default_rng(1), list[int]()

    def address_of(size: int, nbytes: int, _: bool) -> int:
        offset = int(draw.choice([0, 0, 1, 2])) * nbytes
        made.append(library.driver.give("cuMemAlloc_v2", offset + size * nbytes, kind=ctypes.c_uint64))
        return made[-1] + offset

    for kernel in {kernel.name: kernel for kernel in library.every}.values():
        launch, _ = cuda_launches.launch_of(kernel, (1, 37, 5003), 2, address_of)
        getattr(library, kernel.name)(launch, ctypes.c_uint32(7))
        while made:
            library.driver.call("cuMemFree_v2", made.pop())
    assert not library.driver.report(), library.driver.report()[:3]
    NOTES.append(f"{len(library.functions)} kernels launched on arrays without a byte to spare")


def calls(gpus: Gpus) -> None:
    """Draw calls and compare; the engine must run at least nine of ten (it leaves some kinds to torch)."""
    draw, by_engine, count = np.random.default_rng(1), 0, 60 if gpus.is_fake else CALLS
    for _ in range(count):
        dtype = str(draw.choice(DTYPES))
        ops = ["product", *(["sum", "mean"] if dtype != "bool" else []), *(["min", "max"] if dtype[0] != "c" else [])]
        by_engine += drawn_call(gpus, draw, dtype, str(draw.choice(ops)))
    assert by_engine >= 0.9 * count, f"the CUDA engine ran {by_engine} of {count} calls only"
    NOTES.append(f"{count} calls have the bits of the host's kernels; the CUDA engine ran {by_engine}")


def drawn_call(gpus: Gpus, draw: np.random.Generator, dtype: str, op: str) -> bool:
    """Run a drawn call twice and compare all results; return whether the CUDA engine ran it."""
    mock.patch.stopall()
    torch, n, ran, inner = gpus.torch, int(draw.integers(1, draw.choice([3, 9, 21]))), [], cuda.CudaExecutable.run
    places = [k * gpus.count // n for k in range(n)]
    mode, ops = draw.choice(["new", "out", "in place"]), cr.AllReduceCrossDeviceOps(str(draw.choice(ALGORITHMS)))
    rows = []  # for each tensor and replica: memory on the host, and the shape, strides and offset of a tensor in it
    for size in map(int, draw.integers(0, draw.choice([4, 300, 5000]), int(draw.choice([1, 1, 2, 5])))):
        shape = (size,) if draw.random() < 0.7 else (3, size // 3)
        rows.append([drawn(gpus, draw, dtype, shape, mode == "in place") for _ in places])

    def reduced(kind: str, rows: list[list[Any]], outs: Any = None) -> list[list[Any]]:
        names = [f"{kind}:{place}" + (f"#{k}" if k else "") for k, place in enumerate(places)]
        values = [cr.PerReplica(row, names) for row in rows]
        keywords = {} if outs is None else {"out": [cr.PerReplica(row, names) for row in outs]}
        return [list(result) for result in ops.batch_reduce(op, [(x, x) for x in values], **keywords)]

    right = reduced("cpu", [[x.as_strided(*form).clone() for x, *form in row] for row in rows])
    for _ in range(2):  # the second call may run in compiled code
        xs = [[gpus.put(x, k).as_strided(*form) for k, (x, *form) in zip(places, row, strict=True)] for row in rows]
        outs = [[gpus.put(torch.full_like(x, 77), k) for k, x in zip(places, row, strict=True)] for row in right]
        outs = xs if mode == "in place" and right[0][0].dtype == xs[0][0].dtype else outs
        with mock.patch.object(cuda.CudaExecutable, "run", lambda *given: (ran.append(1), inner(*given))[1]):
            results = reduced("cuda", xs, None if mode == "new" else outs)
        for x, y in zip(chain(*results), chain(*right), strict=True):
            both = (torch.empty(x.numel(), dtype=x.dtype).copy_(each.reshape(-1)) for each in (gpus.on_host(x), y))
            a, b = (each.view(torch.uint8).numpy().tobytes() for each in both)
            same = x.dtype == y.dtype and cuda_launches.equal(a, b, str(y.dtype)[6:])
            assert same, f"wrong bits: {op} of {dtype}, {ops}, {places}, {[y.shape for y, *_ in right]}, {mode}"
    return bool(ran)


def drawn(gpus: Gpus, draw: np.random.Generator, dtype: str, shape: tuple[int, ...], is_dense: bool) -> tuple[Any, ...]:
    """Return drawn values on the host, and the shape, strides and offset of a tensor in them, perhaps transposed."""
    step, offset = 1 if is_dense else int(draw.choice([1, 1, 1, 2, 3])), int(draw.integers(0, 9))
    values = cuda_launches.values(draw, dtype, offset + step * int(np.prod(shape)))
    strides = (shape[-1], 1) if is_dense else (step, shape[0] * step)
    flat = gpus.torch.from_numpy(values.view(np.uint8)).view(getattr(gpus.torch, dtype))
    return flat, shape, strides if len(shape) == 2 else (step,), offset


def full(gpus: Gpus, value: float, size: int = 0) -> Any:
    x = gpus.random((size or gpus.size,))
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


def side_stream(gpus: Gpus) -> None:
    """A stream sleeps, then writes the inputs; the call runs in it, or in a stream that waits for it."""
    xs = [full(gpus, 0) for _ in range(N)]
    for turn in range(2 * TURNS):
        with gpus.side_stream():
            right = fill_all(gpus, xs, turn)
            results = reduced(xs) if turn % 2 else []
        expect(gpus, results or reduced(xs), right)


def reuse(gpus: Gpus) -> None:
    """Inputs, or results, are deleted right after the call, and their memory is written again at once."""
    for turn in range(TURNS):
        step = 1 + (turn % 2 and not gpus.is_fake)  # strided inputs are copied first
        xs = [full(gpus, 0, gpus.size * step) for _ in range(N)]
        right = fill_all(gpus, xs, turn)
        results = reduced([x[::step] for x in xs])
        xs.clear()
        others = [full(gpus, 5) for _ in range(2 * N)]
        expect(gpus, results, right)
        gpus.sleep()
        reduced(others[:N]).clear()
        more = [full(gpus, 9) for _ in range(N)]
        expect(gpus, more, 9)
        expect(gpus, others, 5)


def graph(gpus: Gpus) -> None:
    """A captured call gives the results of the inputs' values at each replay, also of strided inputs."""
    for op, step in (("sum", 1), ("max", 1), ("mean", 1 if gpus.is_fake else 2)):
        whole = [full(gpus, 0, gpus.size * step) for _ in range(N)]
        replay = gpus.captured(partial(reduced, [x[::step] for x in whole], op))
        for turn in range(TURNS):
            right = fill_all(gpus, whole, turn)
            expect(gpus, replay(), {"sum": right, "max": turn + N - 1, "mean": right / N}[op])


def threads(gpus: Gpus) -> None:
    """Two threads, with streams and values of their own, call at the same time."""

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


def deterministic(gpus: Gpus) -> None:
    """With deterministic algorithms results are right, and torch does not fill new results first."""
    gpus.torch.use_deterministic_algorithms(True)
    rows = [[full(gpus, k, 1000) for _ in range(GRADIENTS)] for k in range(N)]
    for _ in range(2):
        expect(gpus, [row[-1] for row in cr.all_reduce(rows, devices=NAMES[:N])], N * (N - 1) / 2)
    with gpus.torch.profiler.profile() as profile:
        cr.all_reduce(rows, devices=NAMES[:N])
        gpus.synchronize()
    found = [event.name[:80] for event in profile.events() if "CUDA" in str(event.device_type)]
    say(row={"kernels": found[:20]}, measured={KEY: len(found)} if found else {})


def expandable_segments(gpus: Gpus) -> None:
    """Calls are right where torch's allocator gets expandable segments after its first use."""
    full(gpus, 0)
    if not gpus.is_fake:
        gpus.torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    draw = np.random.default_rng(2)
    assert all(drawn_call(gpus, draw, "float32", "sum") for _ in range(40)), "the CUDA engine did not run"


def dlpack_from_cupy(gpus: Gpus) -> None:
    """CuPy's arrays, written in a stream of CuPy, directly and as tensors of torch."""
    if gpus.is_fake:
        cuda.device_memory = memory.device_memory  # instead of that of torch's stand-in
    cupy = fake_cuda.cupy_on(gpus.fake) if gpus.is_fake else importlib.import_module("cupy")
    with contextlib.nullcontext() if gpus.is_fake else cupy.cuda.Stream(non_blocking=True):
        for turn in range(TURNS):
            xs, right = [cupy.asarray(np.full(gpus.size, turn + k, "float32")) for k in range(N)], N * turn + 28
            assert all((cupy.asnumpy(x) == right).all() for x in reduced(xs)), "wrong sums of CuPy's arrays"
            expect(gpus, [] if gpus.is_fake else reduced([gpus.torch.from_dlpack(x) for x in xs]), right)


def dlpack_from_jax(gpus: Gpus) -> None:
    """JAX's arrays as tensors of torch, right after the program that makes them was started."""
    import jax

    made = partial(jax.lax.fori_loop, 0, 1000, lambda _, x: x + 1)
    make = jax.jit(lambda value: made(jax.numpy.full(gpus.size, value - 1000)))
    for turn in range(TURNS):
        xs = [gpus.torch.from_dlpack(make(float(turn + k))) for k in range(N)]
        assert gpus.is_fake or xs[0].is_cuda, "JAX has no GPU"
        expect(gpus, reduced([gpus.memory.put(x, 0) for x in xs] if gpus.is_fake else xs), N * turn + 28)
        gpus.release()


ORDER = named(side_stream, reuse, graph, threads, deterministic, expandable_segments, dlpack_from_cupy, dlpack_from_jax)

if __name__ == "__main__":
    main(named(versions, calls) | ORDER, named(kernels, raw_launches))
