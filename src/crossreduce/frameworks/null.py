"""A framework whose arrays have no elements. It counts the copies, additions and bytes of a call, which are its cost.

Input: ``NullArray``s, which have a shape, a dtype and a device but no elements. Output: ``NullArray``s, and ``Counts``.
Pass ``NullFramework().zeros(...)`` to any op of this library instead of arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import UnsupportedError, shown
from ..ops import ACCUMULATORS, INTEGERS, Numbers, ReduceOp
from ..packing import Cut, itemsize
from ..values import IndexedSlices, TensorSpec
from .base import Array, Sparse


@dataclass
class Counts:
    """Counts of operations. Copies inside one device are not counted."""

    copies: int = 0
    """The number of transfers from one device to another."""
    additions: int = 0
    """The number of times that one element was combined with another, by any op."""
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The bytes that were moved from one device to another, by (src, dst)."""

    @property
    def bytes_moved(self) -> int:
        """The sum of ``bytes``."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class NullArray:
    """An array without elements."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    crossreduce_framework: NullFramework

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def like(self, shape: tuple[int, ...], dtype: str | None = None, device: str | None = None) -> NullArray:
        return NullArray(shape, dtype or self.dtype, device or self.device, self.crossreduce_framework)


class NullFramework:
    """The ``Framework`` of ``NullArray``s, with the counts of all operations on them.

    >>> from crossreduce import HierarchicalCopyAllReduce, PerReplica
    >>> null = NullFramework()
    >>> value = PerReplica([null.zeros((1000,), "float32", f"cuda:{k}") for k in range(4)])
    >>> _ = HierarchicalCopyAllReduce().reduce("sum", value, value)
    >>> null.counts.copies, null.counts.additions, null.counts.bytes["cuda:2", "cuda:0"]
    (6, 3000, 4000)
    """

    name: Final = "null"

    def __init__(self) -> None:
        self.counts = Counts()

    def zeros(self, shape: tuple[int, ...], dtype: str, device: str) -> NullArray:
        """Return an array whose operations are counted in ``counts``."""
        return NullArray(tuple(shape), dtype, device, self)

    def array(self, value: Any) -> Array | Sparse:
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", value.values, value.indices, value.dense_shape)
        if isinstance(value, NullArray):
            return value
        raise UnsupportedError.of("a NullFramework accepts only null arrays.", shown(value), "null.zeros(...)")

    def spec(self, x: Array) -> TensorSpec:
        return TensorSpec(x.shape, x.dtype)

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        return None

    def require(self, devices: tuple[str, ...]) -> None:
        pass  # every device is accepted

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        result = "float64" if op is ReduceOp.MEAN and dtype in INTEGERS else dtype
        return Numbers(op, dtype, ACCUMULATORS[op, dtype], result, count if op is ReduceOp.MEAN else 1)

    def to_device(self, x: Array, device: str) -> Array:
        if x.device == device:
            return x
        self.counts.copies += 1
        self.counts.bytes[x.device, device] += x.size * itemsize(x.dtype)
        return x.like(x.shape, device=device)

    def pack(self, xs: Sequence[Array]) -> Array:
        return xs[0].like((sum(x.size for x in xs),))

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        return flat.like((stop - start,))

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        self.counts.additions += (len(xs) - 1) * xs[0].size
        return xs[0].like(xs[0].shape, numbers.result if final else numbers.accumulator)

    def finish(self, x: Array, numbers: Numbers) -> Array:
        return x.like(x.shape, numbers.result)

    def times(self, x: Array, factor: float) -> Array:
        return x

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        return [parts[0].like(shape) for shape, _ in cuts]

    def clone(self, x: Array) -> Array:
        return x

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        return xs[0].like(tuple(shape))

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        return list(xs)  # without tracing every shape is known

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        return sparse.values.like(shape, dtype)

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        return IndexedSlices(sparse.values, sparse.indices, sparse.shape)

    def writable_array(self, value: Any, device: str) -> Array:
        return self.array(value)

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        return 0, 0, True

    def write(self, target: Array, x: Array) -> None:
        pass
