"""Inputs whose reduction is known exactly, whatever the order: an element is right or wrong.

In: an op, a dtype, a number of devices.  Out: one array a device, and the result. Integers may wrap,
which is exact; floats hold integers small enough that no order of additions rounds. The values are
random, so that a lost, doubled, swapped or misplaced contribution shows. (nccl-tests' verifiable/
has the same aim.)
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..frameworks.numpy import dtype_named

Numbers = np.ndarray[Any, Any]

# Arrays repeat after so many elements. It is prime, so that a shift by a chunk or a pack does not fit.
PERIOD: Final = 65_537
# Up to so many devices may contribute a factor of 2 to a product; float16 ends at 2**15.
_DOUBLINGS: Final = 8
# A mean must be an integer: both of a pair of devices are up to 7 away from one from 8 to 23, on either side.
_SPREAD: Final = 7
# What every integer up to is exact in: 2 to the digits of the significand.
_EXACT: Final = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def inputs(op: str, dtype: str, n: int) -> list[Numbers]:
    """Return one array of ``PERIOD`` elements for each of ``n`` devices.

    Args:
      op: sum, product, min, max or mean.
      dtype: an integer's or a float's name.
      n: how many devices.
    """
    rng = np.random.default_rng([n, len(op)])
    kind = dtype_named(dtype)
    if op == "mean":
        middle = rng.integers(_SPREAD + 1, 24, PERIOD)
        away = rng.integers(-_SPREAD, _SPREAD + 1, (n // 2, PERIOD))
        pairs = [middle + sign * x for x in away for sign in (1, -1)]
        return [x.astype(kind) for x in [*pairs, middle][:n]]
    if dtype not in _EXACT:
        bounds = np.iinfo(kind)
        values = [rng.integers(bounds.min, bounds.max, PERIOD, dtype=kind.type, endpoint=True) for _ in range(n)]
        return [x | kind.type(1) for x in values] if op == "product" else values  # odd: no product is 0
    if op == "product":
        signs = [rng.integers(0, 2, PERIOD) * 2 - 1 for _ in range(n)]
        return [
            (sign * (rng.integers(1, 3, PERIOD) if k < _DOUBLINGS else 1)).astype(kind) for k, sign in enumerate(signs)
        ]
    top = max(1, _EXACT[dtype] // n)
    return [rng.integers(-top, top, PERIOD, endpoint=True).astype(kind) for _ in range(n)]


def result(op: str, arrays: list[Numbers]) -> Numbers:
    """Return the reduction of ``inputs``, by a bare loop that shares no code with the library.

    >>> arrays = inputs("mean", "int8", 3)
    >>> bool((result("mean", arrays) == sum(x.astype(int) for x in arrays) / 3).all())
    True
    """
    kind = arrays[0].dtype
    if op == "mean":
        return np.asarray(sum(x.astype(np.int64) for x in arrays) // len(arrays)).astype(kind)
    wide = kind if kind.kind in "iu" else np.dtype(np.float64)
    whole = arrays[0].astype(wide)
    for x in arrays[1:]:
        y = x.astype(wide)
        if op == "sum":
            whole = whole + y
        elif op == "product":
            whole = whole * y
        else:
            whole = np.where(x < whole, y, whole) if op == "min" else np.where(x > whole, y, whole)
    return whole.astype(kind)


def wrong(got: Numbers, pattern: Numbers, count: int) -> int:
    """Return how many of ``count`` elements are not those of the repeated pattern; NaN never is.

    A mean of integers may come as a float of any width: the pattern's values are exact in all.
    """
    if got.shape != (count,):
        return max(count, 1)
    return int(np.count_nonzero(got != np.resize(pattern, count).astype(got.dtype)))
