"""Access to the memory of arrays on CUDA devices, for engines that call CUDA libraries with addresses and streams.

Input: arrays of one framework. Output: addresses, streams and new arrays. A file per framework
implements ``DeviceMemory``; devices are numbers, as in ``cuda:3``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from ...frameworks import Array

_LOG: Final = logging.getLogger("crossreduce")

FRAMEWORKS: Final = {"torch": ".torch", "cupy": ".cupy", "jax": ".jax.memory"}
"""The frameworks whose arrays can be in the memory of CUDA devices, and their modules."""


class Operands(NamedTuple):
    """The addresses of contiguous arrays, one row per tensor, and these arrays. Strided arrays have been copied.

    Keep this object until the work that reads the addresses has been queued on the devices' current streams, since
    frameworks reuse freed memory in the order of the streams. ``owners`` are other objects that keep the memory.
    """

    addresses: list[list[int]]
    arrays: Sequence[Sequence[Array]]
    owners: Any = None


class DeviceMemory(Protocol):
    """Lets an engine read, write and make one framework's arrays on CUDA devices.

    Nested sequences have one row per tensor of a batch, with one array per replica or destination. All work of these
    functions is queued on the calling thread's current stream of the array's device; nothing waits for it.

    ``belongs_to_graphs`` is whether memory that is allocated while the stream of its device is captured belongs to the
    graph, so that nothing else gets it after it was freed.
    """

    belongs_to_graphs: bool = False

    def ordinal(self, index: int) -> int | None:
        """Return the CUDA driver's number of the framework's ``cuda:index``, or ``None`` if it cannot be used."""
        return index

    def operands(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> Operands | None:
        """Return the addresses of arrays. Strided arrays are copied first.

        Args:
          arrays: the array k of every row should be on the device ``devices[k]``.
          devices: the numbers of CUDA devices; a number may occur several times.
        Returns:
          The operands, or ``None`` if an array is on another device, is traced, or has no memory.
        """

    def address(self, array: Any) -> int:
        """Return the address of a contiguous array, such as one from ``allocate``."""

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """Return a new contiguous array with undefined content. If arrays are immutable, return memory for one."""

    def allocate_all(self, shapes: Sequence[tuple[int, ...]], dtype: str, devices: Sequence[int]) -> list[list[Any]]:
        """Return for each shape a row with one new array per device, as from ``allocate``."""
        return [[self.allocate(shape, dtype, device) for device in devices] for shape in shapes]

    def scratch(self, nbytes: int, device: int) -> tuple[Any, int]:
        """Return an object that owns temporary memory, and the address. See ``Operands`` for the lifetime."""

    def stream(self, device: int) -> int:
        """Return the calling thread's current stream of a device, as a ``cudaStream_t``; 0 is the default stream."""

    def queueing(self, devices: Sequence[int], results: list[list[Any]]) -> AbstractContextManager[list[list[Array]]]:
        """Return a context in which the work that writes results is queued on the current streams of devices.

        Args:
          devices: the devices whose streams or memory the work uses.
          results: what ``allocate_all`` returned.
        Returns:
          A context. When it ends, its value has the results as arrays, and operands, results and temporary memory may
          be released, also if an error was raised.
        """
        return nullcontext(results)

    def writable_outputs(self, arrays: Sequence[Sequence[Array]], devices: Sequence[int]) -> list[list[int]]:
        """Return the addresses of a user's arrays, into which results are written. ``devices``: as for ``operands``.

        Raises:
          BufferError: an array cannot be written in place.
        """

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        """Tell the framework that a user's arrays were written into."""


@lru_cache(maxsize=16)
def device_memory(framework: str) -> DeviceMemory | None:
    """Return a framework's ``DeviceMemory``, importing it on first use.

    It is ``None`` if the framework is not in ``FRAMEWORKS``, or if its version lacks what the module imports.
    """
    if framework not in FRAMEWORKS:
        return None
    try:
        memory: DeviceMemory = importlib.import_module(FRAMEWORKS[framework], __package__).MEMORY
    except Exception as error:  # noqa: BLE001 -- another version of the framework may raise any class
        _LOG.info("the CUDA kernels and NCCL cannot be used with this version of %s (%s)", framework, error)
        return None
    return memory
