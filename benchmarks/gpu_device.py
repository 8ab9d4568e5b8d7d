"""CUDA devices for the cases of gpu_run.py: torch's, or a stand-in on the fake driver of the tests; and raw kernels.

``Gpus`` and ``FakeGpus`` have the same methods: tensors on devices, order, CUDA graphs, and times, which mean nothing
on the fake driver. ``Kernels`` launches the library's kernels through the driver alone, without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

SUPPORT = Path(__file__).parents[1] / "tests/support"
sys.path[:0] = [str(SUPPORT / each) for each in ("cuda", "runtime", "planner", "")]

import cuda_launches
import fake_cuda

from crossreduce.engines import loop
from crossreduce.engines.cuda import driver

_MADE: list[Gpus] = []
Run = Callable[[], Any]


def say(**what: Any) -> None:
    """Report to gpu_run.py: a ``row``, values ``measured`` for targets, a ``note``, or that the case is ``done``."""
    print(json.dumps(what), flush=True)


def main(functions: dict[str, Callable[[bool], None]]) -> None:
    """Run the function that the command line names, with spaces in the place of "_"; ``--driver fake`` may follow."""
    function = functions[sys.argv[1].replace(" ", "_").lower()]
    say(note=(function.__doc__ or "").partition("\n")[0])
    function(sys.argv[2:] == ["--driver", "fake"])
    for gpus in _MADE:
        gpus.release()
    say(done=True)


def engine_only() -> Any:
    """Return a context in which a call fails if a framework's operations reduce its arrays, not the CUDA engine."""
    refused = AssertionError("the framework's operations reduced the arrays, not the CUDA engine")
    return mock.patch.object(loop, "_reduce_buffer", side_effect=refused)


class Gpus:
    """The CUDA devices that torch finds."""

    is_fake, size = False, (1 << 22) + 3  # the elements of the tensors in checks of order

    def __init__(self) -> None:
        import torch

        self.torch, self.count = torch, torch.cuda.device_count()
        assert not driver.unusable(), driver.unusable()
        assert self.count, "torch finds no CUDA device"

    def put(self, x: Any, device: int = 0) -> Any:
        """Return a host tensor on a device, with the same strides."""
        made = self.torch.empty(x.untyped_storage().nbytes(), dtype=self.torch.uint8, device=f"cuda:{device}")
        made = made.view(x.dtype)
        made.copy_(self.torch.as_strided(x, (made.numel(),), (1,), 0))
        return made.as_strided(x.shape, x.stride(), x.storage_offset())

    def random(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
        return self.torch.randn(shape, device=f"cuda:{device}").to(dtype)

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

    def seconds(self, run: Run, calls: int, by_wall: bool = False) -> float:
        """Return the seconds of one call between CUDA events in the current stream, or by the host's clock."""
        by_events = not by_wall and not self.is_fake
        begin, end = (self.torch.cuda.Event(enable_timing=True) if by_events else mock.Mock() for _ in range(2))
        self.synchronize()
        start = time.perf_counter()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        self.synchronize()
        return (begin.elapsed_time(end) / 1e3 if by_events else time.perf_counter() - start) / calls

    def host_seconds(self, run: Run) -> float:
        """Return the seconds until a call returns, without waiting for the device, whose queue is empty before."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def captured(self, run: Run) -> Run:
        """Return a function that replays a CUDA graph of ``run`` and returns its results."""
        with self.side_stream():  # torch requires a warm-up in another stream
            run()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            results = run()
        return lambda: (graph.replay(), results)[1]


class FakeGpus(Gpus):
    """Host tensors on the fake driver. It runs all code paths; its times are meaningless."""

    is_fake, size = True, 3_001

    def __init__(self) -> None:
        import fake_cuda_torch
        import torch

        self.torch, self.fake, self.count = torch, fake_cuda.FakeDriver(fake_cuda.built(), 2, "full", seed=1), 2
        self.memory = fake_cuda_torch.install(self.fake)
        self.fake.call("cuInit", 0)
        fake_cuda.Driver.on(self.fake, 0)  # as torch does

    def put(self, x: Any, device: int = 0) -> Any:
        copy, shape = x.untyped_storage().clone(), (x.storage_offset(), x.shape, x.stride())
        return self.memory.put(self.torch.empty(0, dtype=x.dtype).set_(copy, *shape), device)

    def random(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
        return self.memory.put(self.torch.randn(shape).to(dtype), device)

    def fill(self, x: Any, value: float) -> None:
        data = self.torch.full_like(x, value).view(self.torch.uint8).numpy().tobytes()
        self.fake.write(x.data_ptr(), data, self.memory.stream(0))

    def sleep(self) -> None:
        pass  # the queues run late and in a random order anyway

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self.fake.run()
        outer, self.memory.streams[0] = self.memory.stream(0), self.fake.stream(0)
        yield
        self.memory.streams[0] = outer
        self.fake.run()

    def on_host(self, x: Any) -> Any:
        self.fake.run()
        return x.clone()

    def synchronize(self) -> None:
        self.fake.run()

    def release(self) -> None:
        self.fake.run()
        self.memory.release()
        assert not (report := self.fake.report()), report[:3]
        self.fake.clear()

    def captured(self, run: Run) -> Run:
        stream = self.memory.stream(0)
        run()
        self.fake.run()
        self.fake.call("cuStreamBeginCapture_v2", stream, 1)
        results = run()
        made = self.fake.give("cuGraphInstantiateWithFlags", self.fake.end_capture(stream), 0)
        return lambda: (self.fake.call("cuGraphLaunch", made, stream), results)[1]


def devices(is_fake: bool) -> Gpus:
    """Return the devices, on which from now on only the CUDA engine may reduce."""
    engine_only().start()
    _MADE.append(FakeGpus() if is_fake else Gpus())
    return _MADE[-1]


class Kernels:
    """The kernels on device 0. As attributes they are the functions that cuda_launches.check of the tests calls."""

    def __init__(self, is_fake: bool) -> None:
        self.fake = fake_cuda.FakeDriver(fake_cuda.built(), 1) if is_fake else None
        assert not driver.unusable(), driver.unusable()
        self.driver, self._functions = fake_cuda.Driver(), dict[str, int]()
        self.driver.on(0)
        about, has_large = driver.native().describe(0), driver.accepts_large_tables(0)
        self.multiprocessors = about["multiprocessors"]
        every = [(name, kind) for kind in cuda_launches.all_numbers() for name in cuda_launches.kernels_of(kind)]
        self.every = [each for each in every if has_large or not each[0].endswith("_large")]  # with kinds of numbers
        self._module = self.driver.give("cuModuleLoadData", driver._code(about["capability"]))

    def block(self, nbytes: int) -> np.ndarray:
        """Return pinned memory, which is never freed; all bytes are 0xA5."""
        at = self.driver.give("cuMemHostAlloc", nbytes, 1)
        made = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), np.uint8)
        made[:] = 0xA5
        return made

    def queue(self, name: str, buffer: Any, blocks: int) -> None:
        """Launch a kernel in the default stream."""
        if name not in self._functions:
            self._functions[name] = self.driver.give("cuModuleGetFunction", self._module, name.encode())
        self.driver.launch(self._functions[name], buffer, blocks)

    def __getattr__(self, name: str) -> Callable[[Any, Any], None]:
        def launch(buffer: Any, blocks: Any) -> None:
            self.queue(name, buffer, blocks.value)
            self.driver.call("cuCtxSynchronize")

        return launch
