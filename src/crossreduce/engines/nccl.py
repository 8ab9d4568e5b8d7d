"""The NCCL engine: NVIDIA's library reduces arrays that are each on another GPU of this process.

Input: a layout whose caller chose "nccl". Output: results, queued on the current stream of each device. NCCL selects
links and the order of combination itself, so the layout's programs do not run. If NCCL cannot reduce the arrays, or
would do it against this library's contract, ``refusal`` returns the reason, and another engine runs the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from ..devices import parse
from ..frameworks import Array
from ..ops import FLOATS, HALVES, Numbers, ReduceOp
from ..packing import itemsize
from . import nccl_library
from .base import Layout
from .cuda.memory import DeviceMemory, Operands, device_memory
from .nccl_library import Call

_OPS: Final = {
    ReduceOp.SUM: nccl_library.SUM,
    ReduceOp.MEAN: nccl_library.SUM,  # the sum is divided afterwards; for NCCL's own average, see NcclExecutable
    ReduceOp.MIN: nccl_library.MIN,
    ReduceOp.MAX: nccl_library.MAX,
    ReduceOp.PRODUCT: nccl_library.PRODUCT,
}
# For dtypes that NCCL does not have: the dtype as which it reads the array, and how many such elements make up one
# element of the array. (An array of bools contains only the bytes 0 and 1.)
_PARTS: Final = {"bool": ("uint8", 1), "complex64": ("float32", 2), "complex128": ("float64", 2)}


class NcclEngine:
    """See ``engines.base.Engine``. It is not in ``ENGINES``: ``pipeline.py`` tries it first if "nccl" was chosen."""

    name = "nccl"
    checks_overlap = False

    def refusal(self, layout: Layout, numbers: Numbers) -> str | None:
        """Return why NCCL cannot be used for a layout, or ``None`` if it can."""
        reason = _refusal(layout, numbers)
        if reason is None:
            library = nccl_library.library()
            reason = library if isinstance(library, str) else None
        return reason

    def supports(self, layout: Layout) -> bool:
        """Return whether NCCL can be used with this framework and these devices."""
        return _wrong_devices(layout) is None

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Operands | None:
        """Return the arrays' addresses, or ``None`` if they are traced, or not on their devices."""
        return _memory(layout).operands(arrays, _indices(layout.sources))

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> NcclExecutable:
        return NcclExecutable(layout, numbers)


class NcclExecutable:
    """Queues collectives, one per tensor and device, as one group. See ``engines.base.Executable``.

    NCCL's average multiplies every input by the reciprocal of n, which is exact if n is a power of two. For other n,
    the framework divides the sum, so that the mean of n ones is 1.
    Source: NCCL, hostToDevRedOp in src/enqueue.cc, FuncPreMulSum in src/device/reduce_kernel.h.
    """

    prepared = None

    def __init__(self, layout: Layout, numbers: Numbers) -> None:
        library = nccl_library.library()
        assert not isinstance(library, str), library
        self._library, self._memory = library, _memory(layout)
        self._layout, self._numbers = layout, numbers
        self._sources, self._destinations = _indices(layout.sources), _indices(layout.destinations)
        self._devices = tuple(sorted({*self._sources, *self._destinations}))
        n = len(self._sources)
        averages = numbers.divisor == n and n & (n - 1) == 0
        self._divides = numbers.divisor != 1 and not averages
        function = _function(self._sources, self._destinations)
        assert function is not None
        self._function = function
        if function == "ncclBroadcast":
            self._parts = itemsize(numbers.dtype)  # it copies bytes, of any dtype
            # the arguments of each call between the size and the communicator
            self._trailing: tuple[int, ...] = nccl_library.DATA_TYPES["uint8"], self._devices.index(self._sources[0])
            return
        dtype, self._parts = _PARTS.get(numbers.dtype, (numbers.dtype, 1))
        op = nccl_library.AVERAGE if numbers.op is ReduceOp.MEAN and averages else _OPS[numbers.op]
        self._trailing = nccl_library.DATA_TYPES[dtype], op
        if function == "ncclReduce":
            self._trailing = *self._trailing, self._devices.index(self._destinations[0])

    def run(self, operands: Operands, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Queue the collectives and, if the sums must be divided, the divisions behind them on the same streams."""
        memory, framework, numbers = self._memory, self._layout.framework, self._numbers
        if out is None:
            results: Sequence[Sequence[Array]] = memory.allocate_all(
                self._layout.shapes, numbers.result, self._destinations
            )
            targets = [[memory.address(x) for x in row] for row in results]
        else:
            results, targets = out, memory.writable_outputs(out, self._destinations)
        streams = [memory.stream(device) for device in self._devices]
        self._library.run(self._devices, streams, self._calls(operands.addresses, targets))
        if out is None and self._divides:
            return [tuple(framework.finish(x, numbers) for x in row) for row in results]
        if out is not None:
            for row in out if self._divides else ():
                for target, device in zip(row, self._layout.destinations, strict=True):
                    x = framework.writable_array(target, device)
                    framework.write(x, framework.finish(x, numbers))
            memory.mark_dirty(out)
        return results

    def _calls(self, sources: list[list[int]], targets: list[list[int]]) -> Iterator[Call]:
        """Yield the collectives of all ranks. An address is ``None`` if the rank has no such array."""
        for shape, row, results in zip(self._layout.shapes, sources, targets, strict=True):
            size = math.prod(shape) * self._parts
            sent = dict(zip(self._sources, row, strict=True))
            received = dict(zip(self._destinations, results, strict=True))
            for rank, device in enumerate(self._devices if size else ()):
                # NCCL requires the root of a broadcast to receive, too. If it has no result, it receives in place.
                target = received.get(device, sent.get(device) if self._function == "ncclBroadcast" else None)
                yield Call(self._function, rank, (sent.get(device), target, size, *self._trailing))


def _memory(layout: Layout) -> DeviceMemory:
    memory = device_memory(layout.framework.name)
    assert memory is not None, "refused"
    return memory


def _indices(devices: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(parse(device).index for device in devices)


def _function(sources: tuple[int, ...], destinations: tuple[int, ...]) -> str | None:
    """Return the name of NCCL's collective between these devices, or ``None`` if NCCL lacks it."""
    if set(sources) == set(destinations):
        return "ncclAllReduce"
    if len(sources) == 1:
        return "ncclBroadcast"
    return "ncclReduce" if len(destinations) == 1 and destinations[0] in sources else None


@lru_cache(maxsize=1024)
def _wrong_devices(layout: Layout) -> str | None:
    """Return why NCCL cannot be used with a layout's framework and devices, or ``None`` if it can."""
    devices = [parse(device) for device in {*layout.sources, *layout.destinations}]
    if not all(device.kind == "cuda" and not device.host for device in devices):
        return "not all devices are CUDA devices of this process"
    # XLA has its own communicators. Collectives of several communicators may block each other unless all GPUs run them
    # in the same order.
    if layout.framework.name == "jax" or device_memory(layout.framework.name) is None:
        return f"this release does not pass {layout.framework.name} arrays to NCCL"
    if len(devices) < 2:
        return "there is only one device"
    if len({device.index for device in devices}) < len(devices):
        return "several logical devices share a GPU, which NCCL refuses"
    if _function(_indices(layout.sources), _indices(layout.destinations)) is None:
        return "NCCL needs one source, one destination among the sources, or the same sources and destinations"
    return None


@lru_cache(maxsize=1024)
def _refusal(layout: Layout, numbers: Numbers) -> str | None:
    """Return why NCCL cannot be used for a layout and an op, or ``None`` if it can, provided that it is installed."""
    op, dtype = numbers.op, numbers.dtype
    reason = _wrong_devices(layout)
    if reason is not None:
        return reason
    if numbers.result != dtype:
        return "NCCL's mean of integers is an integer"
    if len(layout.sources) == 1:
        return None  # a copy of bytes
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in FLOATS:
        return "NCCL's minimum and maximum lose NaN"  # fminf, fmaxf in src/device/reduce_kernel.h
    if dtype in HALVES:
        return f"NCCL rounds every addition and product of {dtype}, and may overflow"  # __hadd, __hmul, same file
    if op is ReduceOp.PRODUCT and dtype in _PARTS and dtype != "bool":
        return "NCCL cannot multiply complex numbers"
    if dtype not in _PARTS and dtype not in nccl_library.DATA_TYPES:
        return f"NCCL has no {dtype}"
    return None


ENGINE: Final = NcclEngine()
