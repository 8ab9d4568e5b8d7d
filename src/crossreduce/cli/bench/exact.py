"""Inputs whose reduction is exact in any order of combination, so that each element is either right or wrong.

Input: an op, a dtype, a number of devices. Output: one array per device, and the result. Integers may wrap around,
which is exact. Floats are such small integers that no order of additions rounds. The values are random, so that a lost,
doubled, swapped or misplaced contribution changes the result. (nccl-tests' verifiable/ has the same purpose.)
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np
from numpy.typing import NDArray

# Arrays repeat this number of elements. It is prime, so that a shift by a chunk or a pack changes the elements.
PERIOD: Final = 65_537
# The number of devices that may contribute a factor of 2 to a product; the largest power of 2 in float16 is 2**15.
_DOUBLINGS: Final = 8
# For means, each element has an integer m from 8 to 23. The devices of a pair contribute m + x and m - x, with x up to
# this number, and a device without a partner m. So the mean over all devices is m.
_SPREAD: Final = 7
# All integers up to this one are exact: 2 to the number of significand digits.
_EXACT: Final = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def inputs(op: str, dtype: str, n: int, ranks: bool = False) -> list[NDArray[Any]]:
    """Return one array of ``PERIOD`` elements of an integer or floating-point dtype for each of ``n`` devices.

    ``ranks`` tells whether the devices are ranks. Ranks compute means of integers as NCCL does: the sum wraps around,
    and the quotient is truncated towards zero. In one process, the mean of integers is exact, a float.
    """
    rng = np.random.default_rng([n, len(op)])
    kind = np.dtype(dtype)
    if op == "mean" and (not ranks or dtype in _EXACT):
        means = rng.integers(_SPREAD + 1, 24, PERIOD)
        differences = rng.integers(-_SPREAD, _SPREAD + 1, (n // 2, PERIOD))
        pairs = [means + sign * x for x in differences for sign in (1, -1)]
        return [x.astype(kind) for x in [*pairs, means][:n]]
    if dtype not in _EXACT:
        bounds = np.iinfo(kind)
        values = [rng.integers(bounds.min, bounds.max, PERIOD, dtype=kind.type, endpoint=True) for _ in range(n)]
        return [x | kind.type(1) for x in values] if op == "product" else values  # odd, so that no product is 0
    if op == "product":
        signs = [rng.integers(0, 2, PERIOD) * 2 - 1 for _ in range(n)]
        return [
            (sign * (rng.integers(1, 3, PERIOD) if k < _DOUBLINGS else 1)).astype(kind) for k, sign in enumerate(signs)
        ]
    bound = max(1, _EXACT[dtype] // n)  # so that all sums of n values are exact
    return [rng.integers(-bound, bound, PERIOD, endpoint=True).astype(kind) for _ in range(n)]


def result(op: str, arrays: list[NDArray[Any]], ranks: bool = False) -> NDArray[Any]:
    """Return the reduction of ``inputs``, computed by a loop that shares no code with the library.

    >>> arrays = inputs("mean", "int8", 3)
    >>> bool((result("mean", arrays) == sum(x.astype(int) for x in arrays) / 3).all())
    True
    """
    kind = arrays[0].dtype
    if op == "mean" and ranks and kind.kind in "iu":
        return quotient(result("sum", arrays), len(arrays))
    if op == "mean":
        return np.asarray(sum(x.astype(np.int64) for x in arrays) // len(arrays)).astype(kind)
    wide = kind if kind.kind in "iu" else np.dtype(np.float64)
    total = arrays[0].astype(wide)
    for x in arrays[1:]:
        y = x.astype(wide)
        if op == "sum":
            total = total + y
        elif op == "product":
            total = total * y
        else:
            total = np.where(x < total, y, total) if op == "min" else np.where(x > total, y, total)
    return total.astype(kind)


def quotient(total: NDArray[Any], n: int) -> NDArray[Any]:
    """Return integers divided by ``n`` and truncated towards zero.

    >>> quotient(np.array([-128, -7, 7], "int8"), 3).tolist()
    [-42, -2, 2]
    """
    wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
    return np.asarray((wide - np.fmod(wide, n)) // n).astype(total.dtype)


def wrong(got: NDArray[Any], pattern: NDArray[Any], count: int) -> int:
    """Return how many of ``count`` elements differ from the repeated ``pattern``. If the shape is wrong, all do.

    NaN differs from every value. A mean of integers may be a float of any width, all of which hold the pattern exactly.
    """
    if got.shape != (count,):
        return max(count, 1)
    return int(np.count_nonzero(got != np.resize(pattern, count).astype(got.dtype)))
