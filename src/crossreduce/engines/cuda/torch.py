"""The memory of PyTorch tensors on CUDA devices.

New results of one replica share a block of memory: to allocate each, as ``torch.empty`` does, takes longer on the
host than everything else. Each is a tensor of its own, not a view of others: they share no version and no place in
autograd. The memory is that of torch's allocator, so that ``record_stream`` works. Deterministic mode does not fill it:
all of it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._C._dynamo import guards

from ...frameworks import Array
from ...frameworks.torch.arrays import DTYPES_BY_NAME, has_no_memory, increment_versions, is_frozen, is_transformed
from ..host import array_memory
from ..host.prepared import compiled_module
from .memory import DeviceMemory, Operands

_reinterpret_tensor: Final[Any] = getattr(guards, "_reinterpret_tensor")  # noqa: B009 -- it has no type
_ALIGNMENT: Final = 512  # bytes, of results in a block; torch's allocator aligns to as many


class TorchDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``. PyTorch's caching allocator and its operations use the current stream of each device.

    While ``torch.cuda.graph`` captures, the allocator takes memory of the captured device from a pool of the graph.
    """

    belongs_to_graphs = True

    def operands(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> Operands | None:
        if is_transformed() or not _are_on(arrays, devices) or any(has_no_memory(x) for row in arrays for x in row):
            return None
        dense = [[x if x.is_contiguous() else x.contiguous() for x in row] for row in arrays]
        return Operands([[x.data_ptr() for x in row] for row in dense], dense)

    def address(self, array: Array) -> int:
        return int(array.data_ptr())

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> Array:
        return torch.empty(shape, dtype=DTYPES_BY_NAME[dtype], device=self._device(device))

    def allocate_all(self, shapes: Sequence[tuple[int, ...]], dtype: str, devices: Sequence[int]) -> list[list[Array]]:
        if len(shapes) == 1 and not torch.are_deterministic_algorithms_enabled():
            return super().allocate_all(shapes, dtype, devices)
        kind = DTYPES_BY_NAME[dtype]
        steps = [-(-math.prod(shape) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
        blocks, rows, at = [self.block(kind, sum(steps), device) for device in devices], [], 0
        for shape, step in zip(shapes, steps, strict=True):
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            if step:
                rows.append([_reinterpret_tensor(block, shape, strides, at) for block in blocks])
            else:
                rows.append([block.new_empty(shape) for block in blocks])
            at += step // kind.itemsize
        return rows

    def block(self, dtype: torch.dtype, nbytes: int, device: int) -> Array:
        """Return a new tensor of ``nbytes`` bytes, whose memory is not filled."""
        memory = torch.UntypedStorage(nbytes, device=self._device(device))
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, 0, (nbytes // dtype.itemsize,), (1,))

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        memory = torch.UntypedStorage(nbytes, device=self._device(device))
        return memory, memory.data_ptr()

    def _device(self, number: int) -> torch.device:
        return torch.device("cuda", number)

    def device(self, x: Array) -> int:
        """Return the number of a tensor's device."""
        return int(x.device.index)

    def stream(self, device: int) -> int:
        return int(torch._C._cuda_getCurrentRawStream(device))  # only builds with CUDA have this function

    def writable_outputs(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> list[list[int]]:
        if not _are_on(arrays, devices) or not all(
            x.is_contiguous() and not is_frozen(x) and not has_no_memory(x) for row in arrays for x in row
        ):
            raise BufferError("a tensor cannot be written into")
        return [[x.data_ptr() for x in row] for row in arrays]

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        increment_versions([x for row in outs for x in row])


def _are_on(arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> bool:
    return all(x.is_cuda and x.device.index == device for row in arrays for x, device in zip(row, devices, strict=True))


def use_in_compiled_code(memory: TorchDeviceMemory) -> None:
    """Let compiled code of prepared calls read tensors, and allocate memory as ``memory`` does."""
    array_memory("torch")  # called for its effect
    if (module := compiled_module()) is not None:
        is_filled = torch._C._get_deterministic_algorithms  # then it fills new memory, unless the user sets otherwise
        block = lambda like, nbytes: memory.block(like.dtype, nbytes, memory.device(like))  # noqa: E731
        module.use_torch_devices(is_filled, block, _reinterpret_tensor, memory.scratch, _ALIGNMENT)


MEMORY: Final = TorchDeviceMemory()
use_in_compiled_code(MEMORY)
