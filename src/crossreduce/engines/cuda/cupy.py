"""The memory of CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import cupy

from ...frameworks import Array
from ...frameworks.numpy.arrays import DTYPES_BY_NAME
from .memory import DeviceMemory, Operands


class CuPyDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``. CuPy's memory pool and its operations use the current stream of the current device."""

    def operands(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> Operands | None:
        if not _are_on(arrays, devices):
            return None
        dense = [[x if x.flags.c_contiguous else _contiguous_copy(x) for x in row] for row in arrays]
        return Operands([[x.data.ptr for x in row] for row in dense], dense)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> Array:
        with cupy.cuda.Device(device):
            return cupy.empty(shape, DTYPES_BY_NAME[dtype])

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        memory = self.allocate((nbytes,), "uint8", device)
        return memory, self.address(memory)

    def stream(self, device: int) -> int:
        return int(cupy.cuda.get_current_stream(device).ptr)

    def writable_outputs(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> list[list[int]]:
        if not _are_on(arrays, devices) or not all(x.flags.c_contiguous for row in arrays for x in row):
            raise BufferError("an array cannot be written into")
        return [[x.data.ptr for x in row] for row in arrays]

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        pass


def _contiguous_copy(x: Array) -> Array:
    with x.device:
        return x.copy()


def _are_on(arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> bool:
    return all(x.device.id == device for row in arrays for x, device in zip(row, devices, strict=True))


MEMORY: Final = CuPyDeviceMemory()
