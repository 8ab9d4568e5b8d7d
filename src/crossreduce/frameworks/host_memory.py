"""Access to the memory of arrays on the host: what the kernels require from a framework.

Input: arrays, or the shapes of results. Output: buffers and addresses that kernels read and write, and arrays made of
memory that a kernel has filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from .. import kernels
from ..packing import itemsize
from .base import Array


class ArrayMemory(Protocol):
    """Lets kernels read and write one framework's arrays, and makes new arrays of memory that a kernel has filled.

    Nested sequences have one row per tensor of a batch, with one array per replica or destination.
    """

    shares_results: bool
    """Whether one result suffices for all destinations, because arrays are immutable."""

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        """Return the arrays in the form that the kernels read: buffers, addresses or strided addresses.

        Return ``None`` if the kernels cannot read some of them, for example traced ones or those on an accelerator.
        """

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        """Return memory for ``count`` results of each shape: new arrays, or buffers that ``wrap`` turns into arrays."""

    def writable(self, arrays: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Return allocated memory in the form that the kernels accept: writable buffers or addresses."""
        return arrays

    def writable_outputs(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        """Return a user's arrays in the form that the kernels accept, as for ``writable``.

        Raises:
          BufferError, ValueError: an array cannot be written into. Some frameworks leave this check to the kernel.
        """

    def wrap(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        """Return arrays of memory that ``allocate`` returned and a kernel filled: per tensor one array per device."""
        return list(map(tuple, blanks))

    def threads(self) -> int | None:
        """Return the framework's own limit on the number of threads, or ``None`` if it sets no limit."""
        return None

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        """Tell the framework that a user's arrays were written into."""


class SharedResults(ArrayMemory, Protocol):
    """The memory of immutable arrays: one result is computed, and the arrays of all devices share its memory."""

    shares_results: bool = True

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        assert count == 1
        size = itemsize(dtype)
        return [[kernels.memory(math.prod(shape) * size)] for shape in shapes]

    def writable_outputs(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        raise BufferError("these arrays are immutable")

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        raise AssertionError("immutable arrays are never written into")
