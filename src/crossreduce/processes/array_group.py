"""``ArrayGroup``: the collectives of NumPy arrays in a group of ranks.

Input: a ``Communicator``, and arrays. Output: arrays. ``mpi.py`` and ``rank_group.py`` make the groups.
"""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any, Self

import numpy as np

from ..errors import ArgumentError, UnsupportedError, shown
from ..observe.counters import Stats
from ..ops import INTEGERS, ReduceOp, require_dtype, require_mean
from ..options import CommunicationOptions
from ..ranks.array_views import ArrayView
from ..ranks.communicator import Communicator
from ..ranks.measurement import measure
from ..ranks.prepared import call_name, new_calls, prepare
from ..reduction.validation import read_op
from ..topology import Topology
from .weighted_mean import weighted_mean

Array = np.ndarray[Any, Any]


class ArrayGroup:
    """The ranks that joined. All make the same calls in the same order. Each call returns this rank's result.

    Arrays may have any shape and layout; results are new arrays in C order, or ``out``, which may be the input array.
    Dtypes are those of the library, bfloat16 of ml_dtypes included. ``with`` or ``close`` leaves the group.

    ``rank`` is this process's number, from 0; ``size`` is the number of ranks; ``hosts`` has the ranks of each host.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Users call ``join`` instead."""
        self.communicator = communicator
        self._calls = new_calls(communicator)
        self.rank, self.size, self.hosts = communicator.rank, communicator.size, communicator.hosts

    def all_reduce(
        self, x: Any, op: ReduceOp | str = "sum", out: Array | None = None, *, exact: bool = False, weight: Any = None
    ) -> Array:
        """Return the reduction of all ranks' arrays, with the same bits on every rank.

        Args:
          x: an array, of the same shape and dtype on all ranks.
          op: "sum", "mean", "min", "max" or "product". The mean of integers is their true mean, as float64.
          out: the array for the result; by default a new array.
          exact: whether sums and means of floats are the exact real numbers, rounded once: the same bits for every
            order of the ranks, and any number of hosts (see docs/explanation/exactness.md).
          weight: for the op "mean", this rank's weight, such as its number of samples; all ranks pass one. The result
            is sum(w x) / sum(w). The array of a rank of weight 0 is not used, even if it contains NaN. With ``exact``,
            the weights must be in the ratio of whole numbers with a sum of at most 2**24.
        Raises:
          ArgumentError: ``exact`` is not a bool. Or, on all ranks, a weight is negative, infinite or NaN, or all are 0.
          MismatchError: ranks differ in shape, dtype, op or ``exact``; nothing was written, and the group can still be
            used.
          UnsupportedError: the op is not defined for the dtype, or is an exact product of floats.
          PeerLostError, CollectiveTimeout: a rank died or was late; the group cannot be used again.
        """
        exact = _flag(exact)
        if weight is not None:
            op = read_op(op)
            require_mean(op)
            source, result = _with_result(array := _readable(x, op), array.shape, out)
            weighted_mean(self.communicator, source, result, weight, exact)
            return result
        name = call_name("all_reduce", exact)
        done: Array | None = self._calls.run(self.communicator, name, op, 0, x, out)  # a prepared call
        if done is not None:
            return done
        op = read_op(op)
        source = _readable(x, op)
        source, result = _with_result(source, source.shape, out)
        self.communicator.all_reduce(op, _view(source), _view(result), exact)
        self._prepare("all_reduce", op, None, x, source, _view(source), result, exact)
        return result

    def reduce(
        self, x: Any, op: ReduceOp | str = "sum", root: int = 0, out: Array | None = None, *, exact: bool = False
    ) -> Array | None:
        """Return the reduction on rank ``root`` and ``None`` on all others. See ``all_reduce``."""
        op, exact, root = read_op(op), _flag(exact), _root(root)
        source = _readable(x, op)
        if self.rank != root:
            self.communicator.reduce(op, _view(source), None, root, exact)
            return None
        source, result = _with_result(source, source.shape, out)
        self.communicator.reduce(op, _view(source), _view(result), root, exact)
        return result

    def broadcast(self, x: Any, root: int = 0, out: Array | None = None) -> Array:
        """Return the array of rank ``root``. ``x`` has the same shape and dtype on every rank."""
        root = _root(root)
        done: Array | None = self._calls.run(self.communicator, "broadcast", None, root, x, out)
        if done is not None:
            return done
        source = _readable(x)
        source, result = _with_result(source, source.shape, out)
        array = _view(source if self.rank == root else result)
        self.communicator.broadcast(array, root)
        if self.rank == root and result is not source:
            np.copyto(result, source)
        self._prepare("broadcast", None, root, x, source, array, result)
        return result

    def all_gather(self, x: Any, out: Array | None = None) -> Array:
        """Return all ranks' arrays, stacked, of shape ``(size, *x.shape)``."""
        done: Array | None = self._calls.run(self.communicator, "all_gather", None, 0, x, out)
        if done is not None:
            return done
        source = _readable(x)
        source, result = _with_result(source, (self.size, *source.shape), out)
        self.communicator.all_gather(_view(source), _row_views(result))
        self._prepare("all_gather", None, None, x, source, _view(source), result)
        return result

    def reduce_scatter(
        self, x: Any, op: ReduceOp | str = "sum", out: Array | None = None, *, exact: bool = False
    ) -> Array:
        """Return this rank's row of the reduction. ``x`` has shape ``(size, ...)``. See ``all_reduce``."""
        exact = _flag(exact)
        name = call_name("reduce_scatter", exact)
        done: Array | None = self._calls.run(self.communicator, name, op, 0, x, out)
        if done is not None:
            return done
        op = read_op(op)
        source = self._require_rows(_readable(x, op))
        source, result = _with_result(source, source.shape[1:], out)
        self.communicator.reduce_scatter(op, _row_views(source), _view(result), exact)
        self._prepare("reduce_scatter", op, None, x, source, _view(result), result, exact)
        return result

    def gather(self, x: Any, root: int = 0, out: Array | None = None) -> Array | None:
        """Return all ranks' arrays, stacked, on rank ``root`` and ``None`` on all others."""
        source, root = _readable(x), _root(root)
        result = None
        if self.rank == root:
            source, result = _with_result(source, (self.size, *source.shape), out)
        self.communicator.gather(_view(source), None if result is None else _row_views(result), root)
        return result

    def scatter(self, x: Any, out: Array, root: int = 0) -> Array:
        """Copy this rank's row of ``root``'s array to ``out`` and return ``out``.

        Args:
          x: on rank ``root`` an array of shape ``(size, *out.shape)``; ignored on all others.
          out: on every rank an array of the same shape and dtype.
        """
        root = _root(root)
        _, result = _with_result(_readable(out), np.shape(out), out)
        source = None
        if self.rank == root:
            source = self._require_rows(_readable(x))
            if source.shape[1:] != result.shape or source.dtype != result.dtype:
                sizes = f"x {source.dtype}{source.shape}, out {result.dtype}{result.shape}"
                remedy = f"x of {result.dtype} and shape {(self.size, *result.shape)}"
                raise ArgumentError.of("each row of x must have the shape and dtype of out.", sizes, remedy)
            source, _ = _with_result(source, result.shape, result)
        self.communicator.scatter(None if source is None else _row_views(source), _view(result), root)
        return result

    def all_to_all(self, x: Any, out: Array | None = None) -> Array:
        """Return an array whose row k is row ``rank`` of ``x`` on rank k. Both arrays have shape ``(size, ...)``.

        Raises:
          ArgumentError: ``x`` has another number of rows, or is a list of parts of different shapes.
        """
        done: Array | None = self._calls.run(self.communicator, "all_to_all", None, 0, x, out)
        if done is not None:
            return done
        source = self._require_rows(_readable(x))
        source, result = _with_result(source, source.shape, out)
        if np.may_share_memory(source, result):  # a row would be written before it is read
            source = source.copy()
        self.communicator.all_to_all(_row_views(source), _row_views(result))
        self._prepare("all_to_all", None, None, x, source, _view(source[0, ...]), result)
        return result

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.communicator.barrier()

    def measure_topology(self, seconds: float = 1.0) -> Topology:
        """Measure the links between hosts, use them in all later plans, and return them. See ``ranks.measurement``."""
        return measure(self.communicator, seconds)

    def stats(self) -> Stats:
        """Return statistics of this rank's calls so far: bytes, seconds, and how long it waited for which rank.

        >>> print(group.stats())  # doctest: +SKIP
        group "world", rank 0 of 8: 120 calls, 480000 bytes, 0.310 s, waited 0.120 s
          all_reduce: 120 calls, 480000 bytes, 0.310 s, waited 0.120 s
          waited for rank 3: 0.097 s, at 71 barriers
        """
        return self.communicator.stats()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        self.communicator.close()

    def __enter__(self) -> Self:
        """Return the group itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _prepare(
        self,
        collective: str,
        op: ReduceOp | None,
        root: int | None,
        x: Any,
        source: Array,
        array: ArrayView,
        result: Array,
        exact: bool = False,
    ) -> None:
        """Prepare a call that has just run, unless its array had to be converted or copied."""
        if source is x:
            prepare(self._calls, self.communicator, collective, op, root, source, array, result, exact)

    def _require_rows(self, source: Array) -> Array:
        if source.ndim == 0 or source.shape[0] != self.size:
            problem = f"the array must have one row for each of the {self.size} ranks."
            raise ArgumentError.of(problem, f"shape {source.shape}", f"shape ({self.size}, ...)")
        return source


def _readable(x: Any, op: ReduceOp | None = None) -> Array:
    """Return an array that the kernels can read, in C order and this machine's byte order."""
    if type(x) is not np.ndarray and _is_masked(x):
        problem = "masked arrays cannot be reduced."
        raise UnsupportedError.of(problem, shown(x), "fill the masked elements: x.filled(0)")
    try:
        array = np.asarray(x)
    except ValueError:
        shapes = [getattr(part, "shape", part) for part in (x if isinstance(x, (list, tuple)) else [x])]
        problem = "the parts of an array must have the same shape, also those of an all_to_all."
        raise ArgumentError.of(
            problem, shown(shapes), "parts padded to one shape, and their sizes in a further array"
        ) from None
    if array.dtype.byteorder not in "=|":
        array = array.astype(array.dtype.newbyteorder("="))
    require_dtype(array.dtype.name)
    if op is ReduceOp.MEAN and array.dtype.name in INTEGERS:
        array = array.astype(np.float64)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _is_masked(x: Any) -> bool:
    """Return whether an array is masked, or one in nested lists is: NumPy would ignore its mask."""
    return isinstance(x, np.ma.MaskedArray) or (isinstance(x, (list, tuple)) and any(map(_is_masked, x)))


def _with_result(source: Array, shape: tuple[int, ...], out: Array | None) -> tuple[Array, Array]:
    """Return the input and the array for a result of shape ``shape``. The input is copied if the result overlaps it.

    Input and result may be exactly the same memory, since each element is read before it is written.
    """
    if out is None:
        return source, np.empty(shape, source.dtype)
    fits = isinstance(out, np.ndarray) and not _is_masked(out) and out.shape == shape and out.dtype == source.dtype
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        what = shown(out)
        if isinstance(out, np.ndarray):
            what = f"{out.dtype}{out.shape}" + ", read-only" * (not out.flags.writeable)
            what += ", not in C order" * (not out.flags.c_contiguous) + ", masked" * _is_masked(out)
        problem = f"out must be a writable NumPy array in C order, of {source.dtype} and shape {shape}."
        raise ArgumentError.of(problem, what, f'out=numpy.empty({shape}, "{source.dtype}")')
    in_place = source.ctypes.data == out.ctypes.data and source.nbytes == out.nbytes
    return source if in_place or not np.may_share_memory(source, out) else source.copy(), out


def _root(root: Any) -> int:
    """Return a root as an integer, or raise an ``ArgumentError``. The communicator checks that the rank exists."""
    if type(root) is int:
        return root
    with suppress(TypeError):
        if not isinstance(root, (bool, np.ndarray)):
            return index(root)
    raise ArgumentError.of("root must be the number of a rank.", shown(root), "root=0")


def _flag(exact: Any) -> bool:
    """Return ``exact``, or raise an ``ArgumentError`` if it is not a bool."""
    return exact if isinstance(exact, bool) else CommunicationOptions(exact=exact).exact


def _view(array: Array) -> ArrayView:
    return ArrayView(array.ctypes.data, array.size, array.dtype.name, array.shape)


def _row_views(array: Array) -> list[ArrayView]:
    return [_view(array[k, ...]) for k in range(len(array))]
