"""Host tensors of torch as tensors on CUDA devices, for the CUDA engine on the fake or the stub driver.

The engine, the pipeline and torch's ``Framework`` are the library's own. Only functions that ask torch for a device are
replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fake_cuda
import torch

from crossreduce import values
from crossreduce.engines import cuda
from crossreduce.engines.cuda import torch as torch_memory
from crossreduce.frameworks.torch import arrays as torch_framework
from crossreduce.reduction import pipeline


class StandInMemory(torch_memory.TorchDeviceMemory):
    """torch's ``DeviceMemory``, with tensors in host memory that count as a device's. ``fake=None``: the stub driver.

    All tensors stay alive until ``release``, since the fake driver's work runs later than it is queued.
    """

    def __init__(self, fake: Any = None):
        self.fake, self.devices, self.kept, self.streams = fake, {}, [], {}
        self.kind, self.blocks = fake_cuda.PLAIN, 0  # of new memory; how many blocks were made

    def put(self, x: torch.Tensor, device: int) -> torch.Tensor:
        """Note that a tensor is on a device, and return it."""
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if address not in self.devices:
            self.devices[address] = device
            if self.fake is not None:
                self.kept.append(storage)
                self.fake.own(address, storage.nbytes(), device, self.kind)
        return x

    def release(self) -> None:
        """Wait for the driver, and forget all tensors."""
        for storage in self.kept:
            if storage.nbytes():
                self.fake.disown(storage.data_ptr())
        self.kept.clear()
        self.devices.clear()

    def device(self, x: torch.Tensor) -> int:
        """Return the number of a tensor's device, or -1 if it is in host memory."""
        return self.devices.get(x.untyped_storage().data_ptr(), -1)

    def operands(self, arrays: Any, devices: Any) -> Any:
        found = super().operands(arrays, devices)
        if found is not None and self.fake is not None:
            for row in found.arrays:
                for x, device in zip(row, devices, strict=True):
                    self.put(x, device)
        return found

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> torch.Tensor:
        return self._made(super().allocate(shape, dtype, device), device)

    def block(self, dtype: torch.dtype, nbytes: int, device: int) -> torch.Tensor:
        self.blocks += 1
        return self._made(super().block(dtype, nbytes, device), device)

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        made = self.block(torch.uint8, nbytes, device)
        return made, made.data_ptr()

    def _made(self, x: torch.Tensor, device: int) -> torch.Tensor:
        return x if self.fake is None else self.put(x, device)

    def _device(self, number: int) -> torch.device:
        return torch.device("cpu")

    def stream(self, device: int) -> int:
        if self.fake is not None and device not in self.streams:
            self.streams[device] = self.fake.stream(device)
        return self.streams.get(device, 0)

    def mark_dirty(self, outs: Any) -> None:
        pass


def install(fake: Any = None) -> StandInMemory:
    """Replace torch's devices in this process, for good, and return the ``StandInMemory``.

    The driver's library must be loaded already: ``fake_cuda.FakeDriver``, or the stub with ``ctypes.CDLL``.
    """
    memory = StandInMemory(fake)
    original, framework = values.locate, torch_framework.FRAMEWORK

    def locate(x: Any) -> str | None:
        device = memory.device(x) if isinstance(x, torch.Tensor) else -1
        return f"cuda:{device}" if device >= 0 else original(x)

    def uniform(tensors: tuple[Any, ...]) -> Any:
        """Return ``None`` for tensors on devices, as torch's framework does."""
        return None if memory.device(tensors[0]) >= 0 else type(framework).uniform(framework, tensors)

    values.locate = pipeline.locate = locate
    torch_framework.FRAMEWORK.uniform = uniform
    torch_framework._place = lambda device: torch.device("cpu")
    torch_framework._require = lambda devices: None
    torch_memory._are_on = lambda arrays, devices: all(
        x.is_cpu if fake is None else memory.device(x) == device
        for row in arrays
        for x, device in zip(row, devices, strict=True)
        if x.numel()
    )
    torch_memory.use_in_compiled_code(memory)
    cuda.device_memory = lambda name: memory if name == "torch" else None
    return memory


class FakeGpus:
    """Host tensors on the fake driver, with the methods of benchmarks/gpu_checks.py's ``Gpus``; times mean nothing."""

    is_fake, size = True, 3_001

    def __init__(self) -> None:
        self.torch, self.fake, self.count = torch, fake_cuda.FakeDriver(2, seed=1), 2
        self.memory, self.synchronize = install(self.fake), self.fake.run
        self.fake.call("cuInit", 0)
        fake_cuda.Driver.on(self.fake, 0)  # as torch does

    def put(self, x: torch.Tensor, device: int = 0) -> torch.Tensor:
        return self.memory.put(x.clone(), device)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.put(torch.randn(shape).to(dtype))

    def fill(self, x: torch.Tensor, value: float) -> None:
        data = torch.full_like(x, value).view(torch.uint8).numpy().tobytes()
        self.fake.write(x.data_ptr(), data, self.memory.stream(0))

    def sleep(self) -> None:
        pass  # the queues run late and in a random order anyway

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self.synchronize()
        outer, self.memory.streams[0] = self.memory.stream(0), self.fake.stream(0)
        yield
        self.memory.streams[0] = outer
        self.synchronize()

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return x.clone()

    def release(self) -> None:
        self.synchronize()
        self.memory.release()
        assert not (report := self.fake.report()), report[:3]
        self.fake.clear()

    def captured(self, run: Any) -> Any:
        stream = self.memory.stream(0)
        run()
        self.synchronize()
        self.fake.call("cuStreamBeginCapture_v2", stream, 1)
        results = run()
        made = self.fake.give("cuGraphInstantiateWithFlags", self.fake.end_capture(stream), 0)
        return lambda: (self.fake.call("cuGraphLaunch", made, stream), results)[1]
