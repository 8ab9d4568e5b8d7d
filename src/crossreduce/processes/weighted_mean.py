"""Weighted means of ranks: each rank has a weight, and the result is sum(w x) / sum(w) on every rank.

Input: a communicator, this rank's array and its weight. Output: the result, with the same bits on all ranks. The ranks
exchange their weights first, so all of them raise the same error if a weight is invalid. NumPy computes.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from typing import Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

from .. import kernels
from ..errors import UnsupportedError
from ..kernels import FusedProgram, Segment
from ..observe.diagnostics import call_text
from ..ops import ACCUMULATORS, INTEGERS, MOST_WHOLE, ReduceOp, Weights, read_weight, read_weights
from ..packing import itemsize
from ..ranks.array_views import ArrayView
from ..ranks.communicator import Communicator

PIECE_NBYTES: Final = 1 << 22
"""An exact weighted mean gathers at most so many bytes of all ranks together at a time."""


def weighted_mean(communicator: Communicator, source: Any, result: Any, weight: Any, exact: bool) -> None:
    """Write the weighted mean of all ranks' arrays into ``result``, which may be ``source``.

    Args:
      communicator: the group. All of its ranks make this call.
      source: a NumPy array in C order, of the same shape and dtype on all ranks.
      result: an array of the same shape and dtype. The mean of integers is truncated towards zero, as by NCCL.
      weight: this rank's weight. If it is 0, the elements of ``source`` are not used.
      exact: whether the result is the real weighted mean, rounded once.
    Raises:
      ArgumentError: a weight is negative, infinite, NaN or not a number; or all are 0.
      MismatchError: ranks differ in shape or dtype, or make another call.
      UnsupportedError: the mean is not defined for the dtype, or cannot be exact.
    """
    dtype, n = source.dtype, communicator.size
    wide = np.dtype(ACCUMULATORS[ReduceOp.MEAN, dtype.name])
    own = read_weight(weight)
    gathered = np.empty(n)
    text = call_text("all_reduce", "weighted exact mean" if exact else "weighted mean", None, dtype.name, source.shape)
    mine = np.array([math.nan if own is None else float(own)])
    if own is None:
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            given = float(weight)  # if negative or infinite, all ranks report it
            mine[0] = given if given < 0 or math.isinf(given) else math.nan
    communicator.all_gather(_view(mine), [_view(gathered[k : k + 1]) for k in range(n)], text)
    weights = read_weights(gathered.tolist(), n, "rank")
    if exact and dtype.name in INTEGERS:
        problem = "the weighted mean of integers cannot be exact, since it is an integer."
        raise UnsupportedError.of(problem, f"{dtype.name}, exact=True", "exact=False, or an array of floats")
    if exact and not weights.whole:
        problem = "an exact weighted mean needs weights in the ratio of whole numbers"
        remedy = "numbers of samples as weights; or exact=False"
        raise UnsupportedError.of(f"{problem} with a sum of at most {MOST_WHOLE}.", str(gathered.tolist()), remedy)
    if exact:
        _exactly(communicator, source.reshape(-1), result.reshape(-1), weights)
        return
    factor = 0.0
    with suppress(ValueError):  # this rank does not take part
        factor = weights.factors[weights.kept.index(communicator.rank)]
    parts = np.zeros(source.size, wide)
    with np.errstate(all="ignore"):
        if factor:
            parts[:] = source.reshape(-1)
            reals = parts.view(wide.type(0).real.dtype)
            reals *= factor
        communicator.all_reduce(ReduceOp.SUM, _view(parts), _view(parts))
        reals = parts.view(wide.type(0).real.dtype)
        reals /= weights.total
        result.reshape(-1)[:] = _truncated(parts, dtype, n) if dtype.name in INTEGERS else parts


def _truncated(means: Any, dtype: Any, n: int) -> Any:
    """Return means of ``n`` ranks in float64 as integers, truncated towards zero."""
    near = np.rint(means)  # sums were rounded: a mean that is an integer must not become the one below it
    whole = np.where(np.abs(means - near) <= (n + 2) * 2.0**-52 * np.abs(near), near, np.trunc(means))
    most = np.iinfo(dtype).max
    above = whole >= float(most)  # 2**63 and 2**64 do not fit into 64 bits
    return np.where(above, dtype.type(most), np.where(above, 0, whole).astype(dtype))


def _exactly(communicator: Communicator, source: Any, result: Any, weights: Weights) -> None:
    """Gather pieces of all ranks' arrays, and reduce each by the kernel of exact sums."""
    n, count, name = communicator.size, len(weights.kept), source.dtype.name
    step = max(1, PIECE_NBYTES // (source.itemsize * n))
    for start in range(0, source.size, step):
        piece, target = source[start : start + step], result[start : start + step]
        rows = np.empty((n, piece.size), source.dtype)
        communicator.all_gather(_view(piece), [_view(row) for row in rows])
        program = FusedProgram(1, ((0, *range(count)),), (~0,))
        segment = Segment(0, 0, piece.size, 0)
        kernel = kernels.compile_kernel(
            "exact_sum", (name, name, name), sum(weights.whole), count, 1, (piece.size,), (program,), (segment,),
            weights.whole,
        )  # fmt: skip
        kernel.run([[_address(rows[k]) for k in weights.kept]], [[_address(target)]], kernels.threads(), False, False)


def as_array(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return the NumPy array with a view's memory, which must live as long as the array."""
    if not view.size:
        return np.empty(view.shape, np.dtype(view.dtype))
    held: Any = (ctypes.c_char * (view.size * itemsize(view.dtype))).from_address(view.address)
    return np.frombuffer(held, np.dtype(view.dtype)).reshape(view.shape)


def _view(array: Any) -> ArrayView:
    return ArrayView(_address(array), array.size, array.dtype.name, array.shape)


def _address(array: Any) -> int:
    return int(array.ctypes.data)
