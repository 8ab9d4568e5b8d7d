"""The array operations that the library requires from a framework.

Arrays are of the framework's own type; ``Array`` is ``Any`` because the frameworks have no common type. Only three
functions write into an array that they receive: ``combine`` into the donated one, ``write`` into its target, and
``variable_values`` into the old value. Sizes are Python ints, so everything here also traces under ``jax.jit`` and
``tf.function``. Kernels access the arrays' memory by ``host_memory.py`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import UnsupportedError, shown
from ..ops import Numbers, ReduceOp
from ..packing import Cut
from ..values import TensorSpec

Array = Any


class Sparse(NamedTuple):
    """A sparse array as dense arrays: ``k`` slices of the array, and the index of each slice.

    ``kind`` names the array's class, so that a result can be returned in the same class. ``indices`` has one row per
    slice: its shape is ``(k,)``, or ``(k, d)`` if the first ``d`` axes are sparse.
    """

    kind: str
    values: Array
    indices: Array
    shape: tuple[int, ...] | None


class Immutable:
    """Mixin for frameworks with immutable arrays, into which ``out=`` cannot write results."""

    immutable: str
    """The first line of the error that ``out=`` raises."""
    remedy: str
    """The last line of that error: what to do instead."""

    def writable_array(self, value: Any, device: str) -> Array:
        raise UnsupportedError.of(self.immutable, shown(value), self.remedy)

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        raise AssertionError(self.immutable)

    def write(self, target: Array, x: Array) -> None:
        raise AssertionError(self.immutable)


class Framework(Protocol):
    """Array operations of one framework."""

    name: str

    def __hash__(self) -> int:
        """Return a hash, since frameworks are parts of cache keys."""

    def array(self, value: Any) -> Array | Sparse:
        """Convert a user's value: detach parameters, read variables, split sparse arrays into their parts.

        Raises:
          UnsupportedError: the array's kind cannot be reduced (masked, ragged, quantized, ...).
        """

    def spec(self, x: Array) -> TensorSpec:
        """Return shape and dtype. A size that tracing leaves unknown is ``None``."""

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        """Return the common spec of ``values``, if they are plain arrays in host memory that need no conversion.

        This is a fast path for the most common arguments. It may return ``None`` for any values: callers then use
        ``array`` and ``spec``.
        """

    def require(self, devices: tuple[str, ...]) -> None:
        """Raise ``DeviceError`` if one of these devices (canonical names) does not exist here."""

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        """Return how ``op`` over ``count`` components of ``dtype`` is computed.

        Raises:
          UnsupportedError: ``op`` is not defined for ``dtype``, or the framework cannot compute it.
        """

    def to_device(self, x: Array, device: str) -> Array:
        """Return ``x`` on ``device``. The result may be ``x`` itself, or share its memory."""

    def pack(self, xs: Sequence[Array]) -> Array:
        """Return the elements of arrays of one dtype and device, in C order, as one flat array.

        For a single array the result may be a view, or the array itself in its own shape.
        """

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        """Return a range of a flat array's elements, perhaps as a view."""

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        """Return ``xs`` combined in the listed order, left to right, in ``numbers.accumulator``.

        All are on one device, and their dtypes are ``numbers.dtype`` or ``numbers.accumulator``. If ``final``, the
        result is finished (see ``finish``). If ``donated`` is 0 or 1, ``xs[donated]`` has the dtype of the accumulator,
        and the result may be written into its memory; if ``donated`` is -1, the result is a new array.
        """

    def finish(self, x: Array, numbers: Numbers) -> Array:
        """Return ``x`` divided by ``numbers.divisor``, in the dtype ``numbers.result``. It may be ``x`` itself."""

    def times(self, x: Array, factor: float) -> Array:
        """Return a new array on the device of ``x``, of a floating-point or complex dtype: ``x`` times a number."""

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        """Split a flat buffer's parts into tensors (see ``packing.cuts``). Only immutable tensors may share memory.

        ``fresh`` means that no other reference to the parts exists, so a part that is exactly one tensor may be
        returned without a copy.
        """

    def clone(self, x: Array) -> Array:
        """Return a copy of ``x`` that shares memory with nothing (or ``x``, if its class is immutable)."""

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        """Return a new array that joins arrays on one device along an axis. Integer dtypes may be widened."""

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        """Return traced arrays of partly unknown shape, with a check at run time that their shapes are equal.

        Raises:
          UnsupportedError: the framework has no such check.
        """

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new dense array of ``dtype``. Slices with the same index are added.

        Raises:
          ArgumentError: an index is outside the shape. Traced indices are not checked, nor are those of a BCOO, where
            such an index means padding.
        """

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        """Return a sparse array of the class that ``sparse.kind`` names."""

    def writable_array(self, value: Any, device: str) -> Array:
        """Convert a user's array into which a result will be written.

        Raises:
          UnsupportedError: the array cannot be written directly (read-only, not in C order, not on the device, ...).
        """

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        """Return the addresses of the first byte and of the byte after the last, and whether ``x`` is contiguous."""

    def write(self, target: Array, x: Array) -> None:
        """Copy an array of the same shape, dtype and device into ``target``."""


ThreadModes = Callable[[str], AbstractContextManager[object]]
"""Takes a device's name and returns a context in which a thread has the settings that ``thread_modes`` recorded."""


@runtime_checkable
class ReplicaFramework(Framework, Protocol):
    """A ``Framework`` with the functions that ``MirroredStrategy`` requires in addition, for replicas in threads.

    TensorFlow does not implement it, since it has its own ``tf.distribute.MirroredStrategy``. ``writes_variables``:
    whether ``variable_values`` writes into the old values.
    """

    writes_variables: bool

    def accelerators(self) -> tuple[str, ...]:
        """Return the names of this process's devices, without those in host memory."""

    def thread_modes(self) -> ThreadModes:
        """Record the calling thread's settings (gradients, precision, default device), and return a ``ThreadModes``."""

    def is_recorded(self, x: Any) -> bool:
        """Return whether the calling thread records operations on an array for a gradient.

        Raises:
          UnsupportedError: the array is traced, or sparse and recorded, so it cannot be reduced across threads.
        """

    def differentiable(
        self, xs: Sequence[Array], results: Sequence[Array], gradient: Callable[[Sequence[Array]], Sequence[Array]]
    ) -> list[Array]:
        """Return ``results``, recorded as a function of ``xs``. ``gradient`` maps their gradients to those of xs."""

    def variable_values(self, olds: Sequence[Array] | None, xs: Sequence[Array], devices: Sequence[str]) -> list[Array]:
        """Return a variable's arrays after ``xs`` are assigned: copies of them, or ``olds`` with their elements.

        The new values may share memory with the old ones.
        """

    def reduce_axis(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        """Return an array reduced along an axis, in the dtype ``numbers.accumulator``. A mean is only summed."""
