"""The memory of NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from ... import kernels
from ...frameworks import Array
from ...frameworks.host_memory import ArrayMemory
from .arrays import DTYPES_BY_NAME


def _empty_in_python(shape: tuple[int, ...], dtype: np.dtype[Any], count: int) -> list[Any]:
    return [np.empty(shape, dtype) for _ in range(count)]


try:  # does the same as ``_empty_in_python``, several times faster
    from ...frameworks._numpy_arrays import empty as _empty
except ImportError:
    _empty = _empty_in_python


class NumPyMemory(ArrayMemory):
    """See ``ArrayMemory``. Arrays have the buffer protocol, so the kernels read and write them directly."""

    shares_results = False

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        if arrays and arrays[0][0].dtype.kind == "V":
            return [[x.view(np.uint16) for x in row] for row in arrays]  # the buffer protocol has no bfloat16
        return arrays

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        kind = DTYPES_BY_NAME[dtype]
        return [_allocate(shape, kind, count) for shape in shapes]

    writable = writable_outputs = readable

    def mark_dirty(self, outs: Sequence[Sequence[Array]]) -> None:
        pass


def _allocate(shape: tuple[int, ...], dtype: np.dtype[Any], count: int) -> list[Any]:
    """Return new arrays. Large ones use memory from the pool of ``kernels.memory``."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < kernels.POOLED_BYTES:
        return _empty(shape, dtype, count)
    offset = large_array_offset()
    return [np.frombuffer(kernels.memory(nbytes + offset), dtype, offset=offset).reshape(shape) for _ in range(count)]


@cache
def large_array_offset() -> int:
    """Return the offset of NumPy's own large arrays from the start of a cache line, usually 16 bytes.

    Results get the same offset, so that each cache line of a result is computed from one line of each source. With
    another offset it is computed from parts of two lines, which takes 1.5 times as long (benchmarks/host_reduction.py).
    """
    return int(np.empty(1 << 20, np.uint8).__array_interface__["data"][0] % 64)


MEMORY: Final = NumPyMemory()
