"""What the execution loop asks of a framework: ``Framework``, a dozen small functions.

Arrays are whatever the framework calls so; ``Array`` is ``Any`` because four frameworks share no type.
No function may write into an array it was given, ``combine``'s spare one apart. Sizes are Python ints,
so the loop traces under ``jax.jit`` and ``tf.function``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import UnsupportedError, message, shown
from ..ops import ReduceOp
from ..packing import Cut
from ..values import TensorSpec

Array = Any


class Sparse(NamedTuple):
    """A sparse array taken apart.

    ``kind`` names the class it came as, so that it can be given back in it; ``indices`` has one row
    for each slice, shape ``(k,)`` or ``(k, d)`` where the first ``d`` axes are sparse.
    """

    kind: str
    values: Array
    indices: Array
    shape: tuple[int, ...] | None


class Numbers(NamedTuple):
    """In which dtypes a reduction is computed, by name, and what the whole is divided by (1: nothing)."""

    dtype: str
    accumulator: str
    result: str
    divisor: int


class Unwritable:
    """What frameworks have in common whose arrays nobody can write: results are memory, adopted when it is filled."""

    unwritable: str
    """Says so, and what to do instead, in two sentences of an error."""
    remedy: str

    def writable(self, blanks: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return blanks

    def overwritable(self, outs: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        raise BufferError

    def overwritten(self, outs: Sequence[Sequence[Array]]) -> None:
        raise AssertionError(self.unwritable)

    def target(self, value: Any, device: str) -> Array:
        raise UnsupportedError(message(self.unwritable, shown(value), self.remedy))

    def extent(self, x: Array) -> tuple[int, int, bool]:
        raise AssertionError(self.unwritable)

    def write(self, target: Array, x: Array) -> None:
        raise AssertionError(self.unwritable)

    def threads(self) -> int | None:
        return None


class Framework(Protocol):
    """A framework's arrays, as the loop sees them."""

    name: str

    def __hash__(self) -> int:
        """Frameworks are keys of caches."""

    def array(self, value: Any) -> Array | Sparse:
        """Take what a user calls an array: detach parameters, read variables, take sparse ones apart.

        Raises:
          UnsupportedError: a kind of array that cannot be reduced (masked, ragged, quantized, ...).
        """

    def spec(self, x: Array) -> TensorSpec:
        """Return shape and dtype; ``None`` for a size that tracing leaves open."""

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        """Return the spec of values in host memory that ``array`` would take as they are, if all have the same one.

        A short cut for what most calls give: ``None`` is always right.
        """

    def require(self, devices: tuple[str, ...]) -> None:
        """Raise ``DeviceError`` where one of these devices (canonical names) is not here."""

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        """Return how ``op`` over ``count`` components of ``dtype`` is computed.

        Raises:
          UnsupportedError: ``op`` is not defined for ``dtype``, or the framework cannot add it.
        """

    def copy(self, x: Array, device: str) -> Array:
        """Return ``x`` on ``device``: itself where it is there already or memory is shared."""

    def pack(self, xs: Sequence[Array]) -> Array:
        """Return the elements of arrays of one dtype and device, in C order, as one flat array.

        Of a single array this may be a view, or the array itself in its own shape.
        """

    def part(self, flat: Array, start: int, stop: int) -> Array:
        """Return a range of a flat array's elements; this may be a view."""

    def combine(self, op: ReduceOp, xs: Sequence[Array], numbers: Numbers, whole: bool, spare: int) -> Array:
        """Return ``xs`` combined in the listed order, left to right, in ``numbers.accumulator``.

        All are on one device; each is of ``numbers.dtype`` or ``numbers.accumulator``. ``whole``: this makes
        the result whole, so ``finish`` it. ``spare``: 0 or 1 where ``xs[0]`` or ``xs[1]`` is of
        ``numbers.accumulator``, was made by the loop and is read no more, so that its memory may
        become the result's; else -1, and the result is a new array.
        """

    def finish(self, x: Array, numbers: Numbers) -> Array:
        """Divide by the divisor where there is one and return the result's dtype. May return ``x``."""

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        """Cut a flat buffer's parts into tensors (see ``packing.cuts``), each with memory of its own.

        ``fresh``: nobody else holds the parts, so one that is a whole tensor may be handed over.
        """

    def own(self, x: Array) -> Array:
        """Return a copy of ``x`` that shares memory with nothing (or ``x``, where nobody can write it)."""

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        """Return a new array that joins arrays on one device along an axis; integers may widen."""

    def alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        """Return arrays that tracing leaves open, made sure to be of one shape, which fits ``spec``, when they run.

        Raises:
          UnsupportedError: the framework cannot make sure of that.
        """

    def dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new dense array of ``dtype``; slices that stand more than once add up in it.

        Raises:
          ArgumentError: an index beyond the shape (where values can be looked at).
        """

    def sparse(self, sparse: Sparse) -> Any:
        """Put a sparse array together again, in the class that ``sparse.kind`` names."""

    # What follows lets the kernels work on arrays in host memory (see ``host.py``). Nested sequences have a row
    # for each tensor of a batch, in it an array for each replica or destination.

    def readable(self, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]] | None:
        """Return what the kernels read in place of the arrays: buffers, addresses or strided addresses.

        ``None``, and the loop takes the arrays: some are traced, or on an accelerator, or watched by a gradient tape.
        """

    def blank(self, shapes: Sequence[tuple[int, ...]], dtype: str, count: int) -> list[list[Any]]:
        """Return memory for ``count`` results of each shape: new arrays, or ``kernels.memory`` to adopt.

        One for all of them suffices where nobody can write into results: ``adopt`` shares it.
        """

    def writable(self, blanks: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Return what the kernels write into in place of blanks."""

    def overwritable(self, outs: Sequence[Sequence[Array]]) -> Sequence[Sequence[Any]]:
        """Return what the kernels write into in place of users' arrays.

        Raises:
          BufferError, ValueError: one that ``target`` would refuse (or the kernels find out).
        """

    def adopt(
        self, blanks: list[list[Any]], shapes: Sequence[tuple[int, ...]], dtype: str, devices: tuple[str, ...]
    ) -> list[tuple[Array, ...]]:
        """Return the arrays, one a device, that filled blanks have become."""

    def threads(self) -> int | None:
        """Return how many threads the framework wants to be used on the host; ``None``: it does not say."""

    def overwritten(self, outs: Sequence[Sequence[Array]]) -> None:
        """Hear that users' arrays were written into."""

    def target(self, value: Any, device: str) -> Array:
        """Take a user's array that is to be written into.

        Raises:
          UnsupportedError: it cannot be written into, is not one run of memory in C order, or not on the device.
        """

    def extent(self, x: Array) -> tuple[int, int, bool]:
        """Return where an array begins and ends in memory, and whether it is one run of memory in C order."""

    def write(self, target: Array, x: Array) -> None:
        """Copy an array of the same shape, dtype and device into a target."""


Modes = Callable[[str], AbstractContextManager[object]]
"""Takes a device's name; inside of what it returns, a thread computes in the modes that another one was in."""


@runtime_checkable
class ReplicaFramework(Framework, Protocol):
    """What else a framework says that can have its replicas in threads of one process (see ``strategy/``).

    TensorFlow does not: it has a ``tf.distribute.MirroredStrategy`` of its own.
    """

    def accelerators(self) -> tuple[str, ...]:
        """Return the names of the devices here that are not the host."""

    def modes(self) -> Modes:
        """Note what the framework keeps for the calling thread alone: whether gradients are recorded, precisions."""

    def recorded(self, x: Any) -> bool:
        """Return whether the calling thread records what is done with an array, for a gradient.

        Raises:
          UnsupportedError: it is traced, or sparse and recorded; such an array cannot meet those of other threads.
        """

    def differentiable(
        self, xs: Sequence[Array], results: Sequence[Array], gradient: Callable[[Sequence[Array]], Sequence[Array]]
    ) -> list[Array]:
        """Return ``results`` as a function of recorded ``xs`` whose gradients ``gradient`` makes of the results'."""

    def held(self, old: Array | None, x: Array, device: str) -> Array:
        """Return what a variable is to hold: memory of its own, or ``old``, written, where others may hold it."""

    def fold(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        """Return an array combined along one of its axes, in ``numbers.accumulator``."""
