"""Access to the memory of a framework's arrays: what the host engine needs beside array operations.

Input: a framework's name. Output: its ``HostMemory``. Nested sequences have one row per tensor of a batch, with one
array per replica or destination.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

from ... import kernels
from ...frameworks import Array
from ...packing import itemsize

FRAMEWORKS: Final = ("numpy", "torch", "jax", "tensorflow")
"""Modules of this package; each defines ``MEMORY``."""


class HostMemory(Protocol):
    """The memory of one framework's arrays, and new arrays on memory that a kernel has filled."""

    shares_results: bool
    """Whether one result suffices for all destinations, because arrays are immutable."""

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        """Return what the kernels read: buffers, addresses or strided addresses.

        ``None``: some arrays are traced, or on an accelerator, or recorded by a gradient tape.
        """

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        """Return memory for ``count`` results of each shape: new arrays, or ``kernels.memory`` for ``wrap``."""

    def writable(self, blanks: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Return the form in which the kernels write into allocated memory."""

    def writable_outputs(self, outs: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        """Return the form in which the kernels write into a user's arrays.

        Raises:
          BufferError, ValueError: an array that ``Framework.writable_array`` would refuse (the kernels may find more).
        """

    def wrap(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        """Return filled memory as arrays, one per device."""

    def threads(self) -> int | None:
        """Return the framework's own limit of threads on the host; ``None``: it has none."""

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        """Tell the framework that a user's arrays were written into."""


class SharedResults:
    """Mixin for frameworks with immutable arrays: one result is computed, and all devices' arrays share its memory."""

    shares_results = True

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        assert count == 1
        size = itemsize(dtype)
        return [[kernels.memory(math.prod(shape) * size)] for shape in shapes]

    def writable(self, blanks: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return blanks

    def writable_outputs(self, outs: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        raise BufferError("these arrays are immutable")

    def threads(self) -> int | None:
        return None

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        raise AssertionError("immutable arrays are never written into")


@lru_cache(maxsize=16)
def host_memory(framework: str) -> HostMemory | None:
    """Return a framework's ``HostMemory``, importing it on first use; ``None``: its arrays have no memory."""
    if framework not in FRAMEWORKS:
        return None
    memory: HostMemory = importlib.import_module(f".{framework}", __package__).MEMORY
    return memory
