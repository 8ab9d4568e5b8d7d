"""CUDA devices for benchmarks: torch's, or a stand-in on the fake driver of the tests, which measures nothing.

Both have the same methods: tensors on a device, the times of a function on the device and on the host, CUDA graphs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import tests_on_path

from crossreduce.engines import cuda
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda.encoding import split_launch
from crossreduce.engines.cuda.streams import Launch
from crossreduce.reduction import pipeline

tests_on_path()
import fake_cuda
import fake_cuda_torch

HOST_CALLS = 15  # of a measurement of host time; the driver's queue is empty before each

Run = Callable[[], object]


class Gpus:
    """The CUDA devices that torch finds."""

    is_fake = False
    torch_device = "cuda:0"  # where torch makes new tensors

    def __init__(self) -> None:
        self.count = torch.cuda.device_count()

    def describe(self) -> dict[str, Any]:
        """Return the properties of the devices and their driver, for the JSON file."""
        native = driver.native()
        found = [dict(native.describe(k)) for k in range(self.count)]
        return {"devices": found, "cuda_of_torch": torch.version.cuda, "is_fake": self.is_fake}

    def put(self, x: torch.Tensor, device: int = 0) -> torch.Tensor:
        """Return a host tensor on a device, with the same strides; a tensor on a device unchanged."""
        if x.is_cuda:
            return x
        made = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device=f"cuda:{device}").view(x.dtype)
        made.copy_(torch.as_strided(x, (made.numel(),), (1,), 0))
        return made.as_strided(x.shape, x.stride(), x.storage_offset())

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, device: int = 0) -> torch.Tensor:
        """Return random numbers on a device."""
        return torch.randn(shape, device=f"cuda:{device}").to(dtype)

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu()

    def free_nbytes(self) -> int:
        """Return how much of the memory of the first device is free."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(0)[0])

    def synchronize(self) -> None:
        """Wait for all devices."""
        for device in range(self.count):
            torch.cuda.synchronize(device)

    def release(self) -> None:
        """Free what earlier cases used."""
        self.synchronize()
        torch.cuda.empty_cache()

    def device_seconds(self, run: Run, calls: int) -> float:
        """Return the seconds of one call between two CUDA events in the current stream of the first device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    def wall_seconds(self, run: Run, calls: int) -> float:
        """Return the seconds of one call by the host's clock, from synchronised to synchronised."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return (time.perf_counter() - begin) / calls

    def host_seconds(self, run: Run) -> float:
        """Return the seconds until a call returns, without waiting for the device."""
        times = []
        for _ in range(2 if self.is_fake else HOST_CALLS):
            self.synchronize()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def captured(self, run: Run) -> Run:
        """Return a function that replays a CUDA graph of ``run``."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # torch's documentation requires a warm-up in another stream
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()

        def replay() -> object:
            graph.replay()
            return results

        return replay


class FakeGpus(Gpus):
    """Host tensors on the fake driver. It runs all code paths of a benchmark; its times are meaningless."""

    is_fake = True
    torch_device = "cpu"

    def __init__(self, library: Path, count: int) -> None:
        self.fake = fake_cuda.FakeDriver(library, count, "full", seed=1)
        self.memory = fake_cuda_torch.install(self.fake)
        self.count = count

    def put(self, x: torch.Tensor, device: int = 0) -> torch.Tensor:
        made = x.untyped_storage().clone()
        return self.memory.put(
            torch.empty(0, dtype=x.dtype).set_(made, x.storage_offset(), x.shape, x.stride()), device
        )

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, device: int = 0) -> torch.Tensor:
        return self.memory.put(torch.randn(shape).to(dtype), device)

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return x.clone()

    def free_nbytes(self) -> int:
        return 1 << 40

    def synchronize(self) -> None:
        self.fake.run()

    def release(self) -> None:
        self.memory.release()
        report = self.fake.report()
        assert not report, report[:3]
        self.fake.clear()

    def device_seconds(self, run: Run, calls: int) -> float:
        return self.wall_seconds(run, calls)

    def captured(self, run: Run) -> Run:
        return run


@contextlib.contextmanager
def executed() -> Iterator[list[tuple[Any, Any, Any]]]:
    """Within this context, collect the layout, the values and the executable of each run of the pipeline."""
    found: list[tuple[Any, Any, Any]] = []
    inner = pipeline._run

    def run(layout: Any, jobs: Any, with_out: bool) -> Any:
        executable, results = inner(layout, jobs, with_out)
        found.append((layout, jobs, executable))
        return executable, results

    with mock.patch.object(pipeline, "_run", run):
        yield found


def queued(run: Run) -> dict[str, int]:
    """Return how many launches and copies a call of this library queues; raise unless the CUDA engine runs it all."""
    counts = {"launches": 0, "copies": 0}
    with executed() as found:
        run()
    assert found, "the call did not reach the pipeline"
    for _, _, executable in found:
        assert isinstance(executable, cuda.CudaExecutable), f"{type(executable).__name__} ran, not the CUDA engine"
        made = executable.planned.operations
        for operation in made.operations:
            if isinstance(operation.work, Launch):
                large = driver.accepts_large_tables(made.devices[operation.work.device])
                counts["launches"] += len(list(split_launch(operation.work, large)))
            else:
                counts["copies"] += 1
    return counts


def host_tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    """Return bytes of NumPy as a tensor of a dtype, without a copy."""
    return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, dtype))
