"""CuPy: arrays on CUDA devices.

CuPy computes on the current device, so each function makes the device of its arrays the current one. Work is queued on
the current stream of each device. CuPy's own kernels flush subnormal float32 numbers to 0; NaNs lose their payload.

Sources, in CuPy 14.2.0: ``cupy/_core/_kernel.pyx`` (arrays of other devices than the current one raise an error, unless
the devices have peer access), ``core.pyx`` (copies between devices), and ``cupy/cuda/compiler.py`` (``-ftz=true``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Final

import cupy
import ml_dtypes  # noqa: F401 - gives NumPy, which has CuPy's dtypes, the dtype "bfloat16"
import numpy as np

from ...devices import parse
from ...errors import DeviceError, UnsupportedError, shown
from ...ops import ALONG_AXIS, ELEMENTWISE, Numbers, ReduceOp
from ...packing import Cut
from ...values import IndexedSlices, TensorSpec
from ..base import Array, Sparse, ThreadModes
from ..numpy.arrays import DTYPES_BY_NAME, NumPy, divide_in_place, index_error

_UFUNCS: Final[dict[ReduceOp, Any]] = {op: getattr(cupy, name) for op, name in ELEMENTWISE.items()}
# CuPy 14 computes with the bfloat16 of ml_dtypes, whose type code is "E". CuPy 13 has no kernels for it.
_HAS_BFLOAT16: Final = "EE->E" in cupy.add.types


@cache
def _count() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no device
        return 0


@lru_cache(maxsize=4096)
def _place(device: str) -> Any:
    """Return the physical ``cupy.cuda.Device`` of a canonical name."""
    return cupy.cuda.Device(parse(device).index)


@lru_cache(maxsize=1024)
def _require(devices: tuple[str, ...]) -> None:
    """Raise a ``DeviceError`` if a device is not a CUDA device of this process."""
    for device in devices:
        place = parse(device)
        if place.host or place.kind != "cuda" or place.index >= _count():
            here = ", ".join(f'"cuda:{k}"' for k in range(_count()))
            problem = "CuPy arrays can only be on CUDA devices of this process."
            remedy = f'{here}; "cuda:0#1" is a second logical device on cuda:0' if here else "a machine with a GPU"
            raise DeviceError.of(problem, device, remedy)


class CuPy(NumPy):
    """The ``Framework`` of CuPy arrays. It inherits from ``NumPy`` the functions that are the same for CuPy.

    NumPy's own functions call those of CuPy if their arguments are CuPy arrays.
    """

    name = "cupy"

    def array(self, value: Any) -> Array | Sparse:
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", self._plain(value.values), self._plain(value.indices), value.dense_shape)
        return self._plain(value)

    def _plain(self, value: Any) -> Array:
        if not isinstance(value, cupy.ndarray):
            remedy = "a cupy.ndarray; for a sparse matrix, matrix.toarray() or crossreduce.IndexedSlices"
            raise UnsupportedError.of("this is not a CuPy array that can be reduced.", shown(value), remedy)
        if not _HAS_BFLOAT16 and value.dtype.name == "bfloat16":
            problem = f"CuPy {cupy.__version__} cannot compute with bfloat16."
            raise UnsupportedError.of(problem, str(self.spec(value)), "CuPy 14 or newer, or cast to float32")
        return value if type(value) is cupy.ndarray else value.view(cupy.ndarray)

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        return None  # none of the arrays is in host memory

    def require(self, devices: tuple[str, ...]) -> None:
        _require(devices)

    def to_device(self, x: Array, device: str) -> Array:
        here, there = x.device, _place(device)
        if here.id == there.id:
            return x
        with here:
            if not x.flags.c_contiguous:
                x = x.copy()
            sender = cupy.cuda.get_current_stream()
            computed = sender.record(cupy.cuda.Event(disable_timing=True))
        with there:
            # CuPy queues the copy on the receiver's stream, and does not make it wait for the sender's.
            receiver = cupy.cuda.get_current_stream()
            receiver.wait_event(computed)
            copy = x.copy()
            copied = receiver.record(cupy.cuda.Event(disable_timing=True))
        with here:
            sender.wait_event(copied)  # only then may the sender's memory be written, or freed and used again
        return copy

    def pack(self, xs: Sequence[Array]) -> Array:
        with xs[0].device:
            return xs[0].reshape(-1) if len(xs) == 1 else cupy.concatenate([x.reshape(-1) for x in xs])

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        ufunc, dtype = _UFUNCS[numbers.op], DTYPES_BY_NAME[numbers.accumulator]
        with xs[0].device:
            out = ufunc(xs[0], xs[1], out=xs[donated] if donated >= 0 else None, dtype=dtype)
            for x in xs[2:]:
                ufunc(out, x, out=out, dtype=dtype)
            if final:
                if numbers.divisor != 1:
                    divide_in_place(out, numbers.divisor)
                return out.astype(DTYPES_BY_NAME[numbers.result], copy=False)
        return out

    def finish(self, x: Array, numbers: Numbers) -> Array:
        with x.device:
            return super().finish(x, numbers)

    def times(self, x: Array, factor: float) -> Array:
        with x.device:
            return x * factor

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        with parts[0].device:
            return super().unpack(parts, cuts, fresh)

    def clone(self, x: Array) -> Array:
        with x.device:
            return x.copy()

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        with xs[0].device:
            return super().concat(xs, axis)

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        with sparse.indices.device:
            indices = cupy.asnumpy(sparse.indices)
        if indices.size and (indices.min() < 0 or indices.max() >= shape[0]):
            raise index_error(int(indices.min()), int(indices.max()), shape)
        # CuPy's add.at adds slices in any order. To fix the order, pass k adds the k-th slice of each row.
        order = np.argsort(indices, kind="stable")
        ordered = indices[order].astype(np.int64)
        rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)  # the number of earlier slices of the row
        with sparse.values.device:
            out = cupy.zeros(shape, DTYPES_BY_NAME[dtype])
            for k in range(rank.max(initial=-1) + 1):
                rows, slices = cupy.asarray(ordered[rank == k]), cupy.asarray(order[rank == k])
                out[rows] = cupy.add(out[rows], sparse.values[slices], dtype=out.dtype)
        return out

    def writable_array(self, value: Any, device: str) -> Array:
        if type(value) is cupy.ndarray and value.flags.c_contiguous and value.device.id == _place(device).id:
            return value
        if isinstance(value, cupy.ndarray):
            where = f"cuda:{value.device.id}, for {device}"
            order = "" if value.flags.c_contiguous else ", not in C order"
            given = f"{type(value).__name__} {self.spec(value)} on {where}{order}"
        else:
            given = shown(value)
        problem = "results need CuPy arrays in C order that are on their destination."
        remedy = f"with cupy.cuda.Device({_place(device).id}): cupy.empty(shape, dtype)"
        raise UnsupportedError.of(problem, given, remedy)

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        low, high = cupy.byte_bounds(x)
        return int(low), int(high), bool(x.flags.c_contiguous)

    def write(self, target: Array, x: Array) -> None:
        with target.device:
            target[...] = x

    def accelerators(self) -> tuple[str, ...]:
        return tuple(f"cuda:{k}" for k in range(_count()))

    def thread_modes(self) -> ThreadModes:
        # A thread that uses the caller's streams needs no synchronization with the caller.
        streams = [cupy.cuda.get_current_stream(k) for k in range(_count())]

        @contextmanager
        def within(device: str) -> Iterator[None]:
            place = parse(device)
            if place.kind != "cuda" or place.index >= len(streams):  # a device of another framework
                yield
            else:
                with _place(device), streams[place.index]:
                    yield

        return within

    def variable_values(self, olds: Sequence[Array] | None, xs: Sequence[Array], devices: Sequence[str]) -> list[Array]:
        return [self.clone(x) for x in xs]

    def reduce_axis(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        dtype, reduce = DTYPES_BY_NAME[numbers.accumulator], getattr(cupy, ALONG_AXIS[ELEMENTWISE[op]])
        with x.device:  # CuPy's sums and products of small integers are int64, so they wrap around in the last step
            return reduce(x.astype(dtype, copy=False), axis).astype(dtype, copy=False)


FRAMEWORK = CuPy()
