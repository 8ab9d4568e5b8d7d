"""NumPy: arrays in host memory, which all devices ``cpu:k`` share.

A copy to another device returns the same array. Each result gets its own memory when it is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

from ...errors import ArgumentError, DeviceError, UnsupportedError, shown
from ...ops import ACCUMULATORS, COMPLEX, DTYPES, ELEMENTWISE, INTEGERS, Numbers, ReduceOp
from ...packing import Cut
from ...values import IndexedSlices, TensorSpec
from ..base import Array, Sparse, ThreadModes

DTYPES_BY_NAME: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(name) for name in DTYPES}
_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {op: getattr(np, name) for op, name in ELEMENTWISE.items()}


def _complex_product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the product as four real products, each rounded, as the kernels do.

    NumPy's own function uses fused operations for vectors, but not for the elements that remain, so the position of an
    element in the array affects its rounding. Replicas that compute the same product would get different bits.
    """
    from ...kernels.reference import product  # not at the top: the compiled kernels need no reference

    result = product(a, b)
    if out is None:
        return result
    out[...] = result
    return out


@lru_cache(maxsize=256)
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@lru_cache(maxsize=1024)
def numbers_of(op: ReduceOp, dtype: str, count: int, mean_of_integers: str = "float64") -> Numbers:
    """Return how a framework computes an op over ``count`` components, given the dtype of its means of integers."""
    is_mean = op is ReduceOp.MEAN
    result = mean_of_integers if is_mean and dtype in INTEGERS else dtype
    return Numbers(op, dtype, ACCUMULATORS[op, dtype], result, count if is_mean else 1)


@lru_cache(maxsize=1024)
def _require(devices: tuple[str, ...]) -> None:
    """Raise a ``DeviceError`` if a device is not a CPU device of this host."""
    for device in devices:
        if not device.startswith("cpu:"):
            problem = "NumPy arrays can only be on CPU devices of this host."
            raise DeviceError.of(problem, device, '"cpu:0", "cpu:1", ...')


def _uniform_in_python(values: tuple[Any, ...]) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Return the common shape and dtype of arrays, for ``Framework.uniform``."""
    first = values[0]
    if type(first) is not np.ndarray or not first.dtype.isnative:
        return None
    dtype, shape = first.dtype, first.shape
    alike = all(type(x) is np.ndarray and x.dtype is dtype and x.shape == shape for x in values)
    return (shape, dtype) if alike else None


try:  # the compiled function does the same several times faster
    from .._numpy_arrays import uniform as _uniform
except ImportError:
    _uniform = _uniform_in_python


class NumPy:
    """The ``Framework`` of NumPy arrays and Python numbers."""

    name = "numpy"
    writes_variables = False

    def array(self, value: Any) -> Array | Sparse:
        if type(value) is np.ndarray and value.dtype.isnative:
            return value
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", self._plain(value.values), self._plain(value.indices), value.dense_shape)
        return self._plain(value)

    def _plain(self, value: Any) -> Array:
        if isinstance(value, np.ma.MaskedArray):
            remedy = "fill the masked elements: value.filled(0)"
            raise UnsupportedError.of("masked arrays cannot be reduced.", shown(value), remedy)
        array = np.asarray(value)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def spec(self, x: Array) -> TensorSpec:
        return TensorSpec(x.shape, _name(x.dtype))

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        shape_and_dtype = _uniform(values)
        return None if shape_and_dtype is None else TensorSpec(shape_and_dtype[0], _name(shape_and_dtype[1]))

    def require(self, devices: tuple[str, ...]) -> None:
        _require(devices)

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        return numbers_of(op, dtype, count)

    def to_device(self, x: Array, device: str) -> Array:
        return x

    def pack(self, xs: Sequence[Array]) -> Array:
        if len(xs) == 1:
            return xs[0].reshape(-1)
        return np.concatenate(xs, axis=None)

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        return flat[start:stop]

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        of_complex = numbers.op is ReduceOp.PRODUCT and numbers.accumulator in COMPLEX
        ufunc: Any = _complex_product if of_complex else _UFUNCS[numbers.op]
        with _no_float_warnings():
            if donated >= 0:
                out = ufunc(xs[0], xs[1], out=xs[donated])
            elif numbers.accumulator == numbers.dtype:
                out = ufunc(xs[0], xs[1])
            else:
                out = ufunc(xs[0], xs[1], dtype=DTYPES_BY_NAME[numbers.accumulator])
            out = np.asarray(out)  # NumPy returns a scalar for arrays without axes
            for x in xs[2:]:
                ufunc(out, x, out=out)
            if final:
                if numbers.divisor != 1:
                    divide_in_place(out, numbers.divisor)
                if numbers.result != numbers.accumulator:
                    return out.astype(DTYPES_BY_NAME[numbers.result])
        return out

    def finish(self, x: Array, numbers: Numbers) -> Array:
        with _no_float_warnings():
            if numbers.divisor != 1:
                x = x.astype(DTYPES_BY_NAME[numbers.accumulator])
                divide_in_place(x, numbers.divisor)
            return x.astype(DTYPES_BY_NAME[numbers.result], copy=False)

    def times(self, x: Array, factor: float) -> Array:
        return np.asarray(x * factor)  # NumPy returns a scalar for arrays without axes

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        if fresh and len(parts) == len(cuts) == 1:
            return [parts[0].reshape(cuts[0][0])]
        tensors = []
        for shape, pieces in cuts:
            if len(pieces) == 1:
                ((part, start, stop),) = pieces
                tensor = parts[part][start:stop].copy()
            else:
                tensor = np.concatenate([parts[part][start:stop] for part, start, stop in pieces])
            tensors.append(tensor if len(shape) == 1 else tensor.reshape(shape))
        return tensors

    def clone(self, x: Array) -> Array:
        return np.array(x, order="C")

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        if len({x.dtype for x in xs}) > 1 and all(x.dtype.kind in "iu" for x in xs):
            xs = [x.astype(np.int64) for x in xs]  # NumPy and CuPy would join int64 and uint64 to float64
        return np.concatenate(xs, axis=axis)

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        return list(xs)  # without tracing every shape is known

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        indices = sparse.indices
        if indices.size and (indices.min() < 0 or indices.max() >= shape[0]):
            raise index_error(int(indices.min()), int(indices.max()), shape)
        out = np.zeros(shape, DTYPES_BY_NAME[dtype])
        with _no_float_warnings():
            np.add.at(out, indices, sparse.values)
        return out

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        return IndexedSlices(sparse.values, sparse.indices, sparse.shape)

    def writable_array(self, value: Any, device: str) -> Array:
        if type(value) is np.ndarray and value.flags.writeable and value.flags.c_contiguous and value.dtype.isnative:
            return value
        if isinstance(value, IndexedSlices):
            given, remedy = "IndexedSlices, a sparse array", "numpy.empty(shape, dtype)"
        elif not isinstance(value, np.ndarray):
            given, remedy = f"a number ({type(value).__name__})", "numpy.array(x), an array without axes"
        else:
            given = _kind(value)
            plain = value.flags.writeable and type(value) is not np.ndarray and not isinstance(value, np.ma.MaskedArray)
            remedy = "numpy.asarray(x), the same memory" if plain else "numpy.empty(shape, dtype)"
        raise UnsupportedError.of("results need writable NumPy arrays in C order and native byte order.", given, remedy)

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        start = int(x.__array_interface__["data"][0])
        if x.flags.c_contiguous:
            return start, start + x.nbytes, True
        low, high = np.lib.array_utils.byte_bounds(x)
        return int(low), int(high), False

    def write(self, target: Array, x: Array) -> None:
        target[...] = x

    def accelerators(self) -> tuple[str, ...]:
        return ()

    def thread_modes(self) -> ThreadModes:
        return nullcontext  # NumPy's errstate is a context variable, and the caller copies the context to its threads

    def is_recorded(self, x: Any) -> bool:
        return False

    def differentiable(
        self, xs: Sequence[Array], results: Sequence[Array], gradient: Callable[[Sequence[Array]], Sequence[Array]]
    ) -> list[Array]:
        raise AssertionError(f"{self.name} has no gradients")

    def variable_values(self, olds: Sequence[Array] | None, xs: Sequence[Array], devices: Sequence[str]) -> list[Array]:
        values = [self.clone(x) for x in xs]
        for value in values:  # reads of a variable return these arrays themselves: users must not write into them
            value.flags.writeable = False
        return values

    def reduce_axis(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        dtype = DTYPES_BY_NAME[numbers.accumulator]
        return np.asarray(_UFUNCS[op].reduce(x.astype(dtype, copy=False), axis=axis, dtype=dtype))


def _kind(x: Array) -> str:
    """Return an array's type, and the properties that can prevent writes into it."""
    flags = [] if x.flags.writeable else ["read-only"]
    flags += [] if x.flags.c_contiguous else ["not in C order"]
    flags += [] if x.dtype.isnative else ["not in native byte order"]
    return f"{type(x).__name__} {TensorSpec(x.shape, x.dtype.name)}, {', '.join(flags) or 'a subclass'}"


def _no_float_warnings() -> np.errstate:
    """Return a context in which infinities, NaN and underflow do not cause warnings."""
    return np.errstate(all="ignore")


def divide_in_place(x: Array, divisor: float) -> None:
    """Divide in place and round once: unlike NumPy and CuPy, divide real and imaginary parts separately."""
    parts = (x.real, x.imag) if x.dtype.kind == "c" else (x,)
    for part in parts:
        np.true_divide(part, divisor, out=part)


def index_error(lowest: int, highest: int, shape: tuple[int, ...]) -> ArgumentError:
    """Return the error for sparse indices outside the dense shape."""
    problem = "a sparse array has an index outside its dense shape."
    given = f"indices from {lowest} to {highest}, shape {shape}"
    return ArgumentError.of(problem, given, f"indices from 0 to {shape[0] - 1}" if shape[0] else "no slices")


FRAMEWORK = NumPy()
