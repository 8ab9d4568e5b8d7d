"""The memory of PyTorch tensors on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ...frameworks import Array
from ...frameworks.torch.arrays import DTYPES_BY_NAME, has_no_memory, increment_versions, is_frozen, is_transformed
from ..host import array_memory
from .memory import DeviceMemory, Operands


class TorchDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``. PyTorch's caching allocator and its operations use the current stream of each device."""

    def operands(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> Operands | None:
        if is_transformed() or not _are_on(arrays, devices) or any(has_no_memory(x) for row in arrays for x in row):
            return None
        dense = [[x if x.is_contiguous() else x.contiguous() for x in row] for row in arrays]
        return Operands([[x.data_ptr() for x in row] for row in dense], dense)

    def address(self, array: Array) -> int:
        return int(array.data_ptr())

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> Array:
        return torch.empty(shape, dtype=DTYPES_BY_NAME[dtype], device=torch.device("cuda", device))

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        memory = self.allocate((nbytes,), "uint8", device)
        return memory, self.address(memory)

    def stream(self, device: int) -> int:
        return int(torch._C._cuda_getCurrentRawStream(device))  # only builds with CUDA have this function

    def writable_outputs(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> list[list[int]]:
        if not _are_on(arrays, devices) or not all(
            x.is_contiguous() and not is_frozen(x) for row in arrays for x in row
        ):
            raise BufferError("a tensor cannot be written into")
        return [[x.data_ptr() for x in row] for row in arrays]

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        increment_versions([x for row in outs for x in row])


def _are_on(arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> bool:
    return all(x.is_cuda and x.device.index == device for row in arrays for x, device in zip(row, devices, strict=True))


MEMORY: Final = TorchDeviceMemory()
array_memory("torch")  # called for its effect: the compiled code of prepared calls can then read tensors
