"""The kernels in NumPy: the fallback where the extension was not built, and the oracle of the compiled kernels.

Input and output are those of ``crossreduce.kernels``, and the results have the same bits as those of the compiled
kernels. One thread runs the whole program on one tile after another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

from .exact_reference import exact_sum
from .overlap import find_overlap

# The number of elements of a tile: it fits into the second-level cache, and makes the cost of NumPy's calls small.
_TILE: Final = 1 << 15
_Rows = Sequence[Sequence[Any]]  # for each tensor, its sources or its results


def _reals(x: Any) -> Any:
    """Return the real and imaginary parts of complex numbers as one real array, and any other array unchanged."""
    return x.view(x.real.dtype)


def _first_nan(ufunc: np.ufunc, a: Any, b: Any) -> Any:
    """Return ``ufunc(a, b)``. Of two NaNs, the result has the payload of ``a``; NumPy may return that of ``b``."""
    out = ufunc(a, b)
    if out.dtype.kind == "f" and (out != out).any():
        out = np.where(a != a, a + a.dtype.type(0), out)  # adding 0 makes a signaling NaN quiet
    return out


def _sum(a: Any, b: Any) -> Any:
    return _first_nan(np.add, _reals(a), _reals(b)).view(a.dtype)


def product(a: Any, b: Any) -> Any:
    """Return the product. A product of complex numbers consists of four real products, each rounded."""
    if a.dtype.kind != "c":
        return _first_nan(np.multiply, a, b)
    out = np.empty(a.shape, a.dtype)
    real = _first_nan(np.multiply, a.real, b.real), _first_nan(np.multiply, a.imag, b.imag)
    imag = _first_nan(np.multiply, a.imag, b.real), _first_nan(np.multiply, a.real, b.imag)
    out.real = _first_nan(np.subtract, *real)
    out.imag = _first_nan(np.add, *imag)
    return out


_OPS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": _sum,
    "product": product,
    "min": lambda a, b: np.where((a <= b) | (a != a), a, b),
    "max": lambda a, b: np.where((a >= b) | (a != a), a, b),
}


def _convert(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return ``x`` in another dtype, rounded once. NumPy would round float64 to float32, and then to bfloat16."""
    if x.dtype == np.float64 and dtype.name in ("float16", "bfloat16"):
        single = x.astype(np.float32)
        wide = single.astype(np.float64)
        even = (single.view(np.uint32) & 1) == 0
        # Round to odd: if bits were cut off, the last bit of the float32 is 1, so that the second rounding has no tie.
        towards = np.where(wide > x, np.float32(-np.inf), np.float32(np.inf))
        x = np.where((wide != x) & (x == x) & even, np.nextafter(single, towards), single)
    out = x.astype(dtype)
    if dtype == np.float16:
        bits = out.view(np.uint16)
        bits[(bits & 0x7FFF) > 0x7C00] |= 0x200  # make NaNs quiet
    return out


def _array(operand: Any, dtype: np.dtype[Any], size: int) -> Any:
    """Return an operand of ``Kernel.run`` as a NumPy array."""
    if isinstance(operand, int):
        operand = (operand, (size,), (dtype.itemsize,))
    if isinstance(operand, tuple):
        address, shape, strides = operand
        if size == 0:
            return np.empty(shape, dtype)
        low = sum(min(0, (n - 1) * stride) for n, stride in zip(shape, strides, strict=True))
        high = sum(max(0, (n - 1) * stride) for n, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (high - low + dtype.itemsize)).from_address(address + low)
        return np.ndarray(shape, dtype, memory, -low, strides)
    array = operand if isinstance(operand, np.ndarray) else np.asarray(memoryview(operand))
    if array.nbytes != size * dtype.itemsize:
        raise ValueError(f"the size of an array is {array.nbytes} bytes, and must be {size * dtype.itemsize}")
    if array.itemsize == 1 and array.flags.c_contiguous:  # memory without a dtype
        return array.reshape(-1).view(dtype)
    if array.itemsize != dtype.itemsize:
        raise ValueError(f"the item size of an array is {array.itemsize} bytes, and must be {dtype.itemsize}")
    return array.view(dtype)


def _exact_sum(terms: list[Any], divisor: int, dtype: np.dtype[Any], weights: Sequence[int]) -> Any:
    """Return exact sums. The real and imaginary parts of complex numbers are added separately."""
    part = dtype.type(0).real.dtype
    return exact_sum([_reals(x) for x in terms], divisor, part, weights).view(dtype)


class ReferenceKernel:
    """See ``crossreduce.kernels.compile_kernel``."""

    def __init__(
        self,
        op: str,
        dtypes: tuple[str, str, str],
        divisor: float,
        sizes: Sequence[int],
        programs: Sequence[tuple[int, Sequence[Sequence[int]], Sequence[int]]],
        segments: Sequence[tuple[int, int, int, int]],
        weights: Sequence[int] = (),
    ) -> None:
        self._weights = tuple(weights)
        self._combine, self._divisor = _OPS.get(op), divisor  # ``_combine`` is None for exact sums
        self._dtypes = dtype, _, result = [np.dtype(name) for name in dtypes]
        # A kernel that only copies keeps every bit, also that of a signaling NaN.
        self._only_copies = divisor == 1 and dtype == result and not any(folds for _, folds, _ in programs)
        self._sizes, self._programs, self._segments = tuple(sizes), tuple(programs), tuple(segments)

    def run(
        self, sources: _Rows, results: _Rows, threads: int, streaming: bool, check_overlap: bool
    ) -> tuple[int, int] | None:
        """See ``crossreduce.kernels.Kernel``."""
        dtype, _, result = self._dtypes
        ins = [self._views(row, dtype, size) for row, size in zip(sources, self._sizes, strict=True)]
        outs = [self._views(row, result, size) for row, size in zip(results, self._sizes, strict=True)]
        if not all(x.flags.c_contiguous and x.flags.writeable for row in outs for x in row):
            raise ValueError("a result is read-only, or not contiguous")
        outs = [[x.reshape(-1) for x in row] for row in outs]
        if check_overlap and (overlap := _overlap(ins, outs)) is not None:
            return overlap
        with np.errstate(all="ignore"):
            for tensor, start, stop, number in self._segments:
                for begin in range(start, stop, _TILE):
                    self._tile(ins[tensor], outs[tensor], begin, min(stop, begin + _TILE), self._programs[number])
        return None

    def _views(self, operands: Sequence[Any], dtype: np.dtype[Any], size: int) -> list[Any]:
        return [_array(operand, dtype, size) for operand in operands]

    def _tile(self, ins: list[Any], outs: list[Any], start: int, stop: int, program: Any) -> None:
        """Run a ``FusedProgram`` on the elements ``start`` to ``stop`` of a tensor. Its operand ``~k`` is slot k."""
        _, accumulator, result = self._dtypes
        _, folds, result_operands = program
        values: dict[int, Any] = {}

        def read(operand: int) -> Any:  # returns the tile of a source, or the value in a slot
            if operand < 0:  # a slot
                return values[operand]
            x = ins[operand]
            tile = x.reshape(-1)[start:stop] if x.flags.c_contiguous else x.flat[start:stop]
            return tile if self._only_copies else np.ascontiguousarray(tile.astype(accumulator, copy=False))

        for slot, *operands in folds:
            terms = map(read, operands)
            if self._combine is None:  # exact sums
                values[~slot] = _exact_sum([*terms], int(self._divisor), result, self._weights)
            else:
                values[~slot] = reduce(self._combine, terms)
        finished = {operand: read(operand) for operand in set(result_operands)}
        if self._combine is not None:  # not for exact sums, which are divided and rounded already
            finished = {operand: self._finish(value) for operand, value in finished.items()}
            if len(finished) > 1:  # a value may be a view of a source that another result overwrites
                finished = {operand: value.copy() for operand, value in finished.items()}
        for out, operand in zip(outs, result_operands, strict=True):
            out[start:stop] = finished[operand]

    def _finish(self, value: Any) -> Any:
        """Return a value divided by the divisor, in the dtype of the results."""
        result = self._dtypes[2]
        if self._divisor != 1 and value.dtype.kind in "iu":
            wide = value if value.itemsize == 8 else value.astype(np.int64)
            divisor = wide.dtype.type(self._divisor)
            value = ((wide - np.fmod(wide, divisor)) // divisor).astype(value.dtype)  # truncated towards zero
        elif self._divisor != 1:
            value = (_reals(value) / value.real.dtype.type(self._divisor)).view(value.dtype)
        return value if value.dtype == result else _convert(value, result)


def _overlap(ins: list[list[Any]], outs: list[list[Any]]) -> tuple[int, int] | None:
    """Return the (tensor, result) of a result that shares memory with another result or a source, or ``None``.

    A result may have exactly the memory of a contiguous source of its tensor. As in the compiled kernels, an array
    occupies all the memory from its first byte to its last.
    """
    extents: list[tuple[int, int, int, int]] = []  # start, stop, tensor, and the result or -1 (a source)
    for tensor, (sources, results) in enumerate(zip(ins, outs, strict=True)):
        result_bounds = [np.lib.array_utils.byte_bounds(x) for x in results]
        extents.extend((*bounds, tensor, number) for number, bounds in enumerate(result_bounds))
        bounds = [(x, np.lib.array_utils.byte_bounds(x)) for x in sources]
        extents.extend((*at, tensor, -1) for x, at in bounds if at not in result_bounds or not x.flags.c_contiguous)
    return find_overlap(extents)


def memory(nbytes: int) -> Any:
    """Return new memory, aligned to 64 bytes."""
    whole = np.empty(nbytes + 64, np.uint8)
    start = -whole.__array_interface__["data"][0] % 64
    return whole[start : start + nbytes]
