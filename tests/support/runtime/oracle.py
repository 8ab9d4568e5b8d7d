"""Correct results of reductions and schedules, and bounds of rounding errors, in plain Python loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

HALVES = ("float16", "bfloat16")
# u, the unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROUNDOFF |= {"complex64": 2.0**-24, "complex128": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
SMALLEST |= {"complex64": 2.0**-149, "complex128": 2.0**-1074}  # the smallest positive number of each dtype


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype with a name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def name_of(array: np.ndarray[Any, Any]) -> str:
    """Return the name of an array's dtype."""
    return array.dtype.name


def reduce(op: str, arrays: Sequence[Any], result: str | None = None) -> np.ndarray[Any, Any]:
    """Reduce arrays of one shape and dtype, element by element. ``result`` is the result's dtype, by default NumPy's.

    Finite real numbers are combined exactly (as fractions) and then rounded, to float64 and to the result's dtype;
    complex products are computed in complex128. Integer sums and products wrap around as in two's complement. The mean
    of integers is their true mean. If the result is an integer, it is NCCL's mean: the wrapped sum is divided and
    truncated towards zero.
    """
    arrays = [np.asarray(array) for array in arrays]
    dtype = name_of(arrays[0])
    assert all(array.shape == arrays[0].shape and name_of(array) == dtype for array in arrays)
    integer = arrays[0].dtype.kind in "iu"
    result = result or ("float64" if op == "mean" and integer else dtype)
    columns = zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
    out = np.empty(arrays[0].size, dtype_of(result))
    truncated = op == "mean" and integer and out.dtype.kind in "iu"
    with np.errstate(over="ignore"):  # a sum that exceeds the dtype is correctly inf
        for position, column in enumerate(columns):
            value = _element("sum" if truncated else op, column)
            if truncated:
                value = math.trunc(Fraction(_wrapped(value, arrays[0].dtype), len(arrays)))
            elif integer and op in ("sum", "product"):
                value = _wrapped(value, arrays[0].dtype)
            out[position] = value
    return out.reshape(arrays[0].shape)


def _element(op: str, numbers: Sequence[Any]) -> Any:
    if isinstance(numbers[0], complex):
        assert op in ("sum", "mean", "product"), "complex numbers have no order"
        if op == "product":
            return _combined(op, numbers)
        return complex(_element(op, [z.real for z in numbers]), _element(op, [z.imag for z in numbers]))
    if op in ("min", "max"):
        best = numbers[0]
        for number in numbers:
            if number != number:
                return number  # NaN propagates
            if (number < best) if op == "min" else (number > best):
                best = number
        return best
    if isinstance(numbers[0], bool):
        assert op == "product", "a sum of bools is not defined"
        return all(numbers)
    if (isinstance(numbers[0], int) and op != "mean") or not all(math.isfinite(number) for number in numbers):
        return _combined(op, numbers)
    exact = _combined(op, [Fraction(number) for number in numbers])
    return _float(exact / len(numbers) if op == "mean" else exact)


def _combined(op: str, numbers: Sequence[Any]) -> Any:
    total = numbers[0]
    for number in numbers[1:]:
        total = total * number if op == "product" else total + number
    return total


def _float(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _wrapped(number: int, dtype: np.dtype[Any]) -> int:
    bits = dtype.itemsize * 8
    number %= 1 << bits
    return number - (1 << bits) if dtype.kind == "i" and number >> (bits - 1) else number


def tolerance(arrays: Sequence[Any], depth: int, dtype: str, op: str = "sum") -> np.ndarray[Any, Any]:
    """Return for each element the largest error of a correct result, compared with ``reduce``.

    The bound is derived, not chosen. The error of a sum whose numbers pass at most ``depth`` additions is at most
    depth*u/(1 - depth*u) * sum|x| (Higham, The accuracy of floating point summation, SISC 1993). The error of a product
    is at most the same factor times the product. In addition the division of a mean, the rounding to a half type and
    the rounding of the oracle each add an error of one u of the result. For integers, bools, min and max it is 0.
    """
    arrays = [np.asarray(array) for array in arrays]
    zero = np.zeros(arrays[0].shape)
    if op in ("min", "max") or dtype not in ROUNDOFF:
        return zero
    # A complex product consists of four real products and two sums.
    u = ROUNDOFF["float32" if dtype in HALVES else dtype] * (4 if op == "product" and "complex" in dtype else 1)
    gamma = depth * u / (1 - depth * u)
    wide = [np.abs(array.astype("complex128" if array.dtype.kind == "c" else "float64")) for array in arrays]
    with np.errstate(all="ignore"):
        size = zero + (1.0 if op == "product" else 0.0)
        for magnitudes in wide:
            size = size * magnitudes if op == "product" else size + magnitudes
        if op == "mean":
            size = size / len(arrays)
        exact = np.abs(reduce(op, arrays, dtype).astype("complex128" if "complex" in dtype else "float64"))
        # The computed result may be larger than the exact one by gamma * size, and rounding is relative to it.
        bound = gamma * size + 2 * ROUNDOFF[dtype] * (exact + gamma * size) + 2 * SMALLEST[dtype]
    return np.where(np.isfinite(bound), bound, 0.0)


def check(got: Any, op: str, arrays: Sequence[Any], depth: int | None = None, result: str | None = None) -> None:
    """Assert that ``got`` is the reduction of ``arrays``: integers exactly, floats within ``tolerance``. ``depth`` is
    the largest number of additions that an element passes, by default those of a sum from left to right."""
    wanted = reduce(op, arrays, result)
    got = np.asarray(got)
    assert got.shape == wanted.shape, f"shape {got.shape}, wanted {wanted.shape}"
    assert name_of(got) == name_of(wanted), f"dtype {name_of(got)}, wanted {name_of(wanted)}"
    allowed = tolerance(arrays, len(arrays) - 1 if depth is None else depth, name_of(wanted), op)
    wide = "complex128" if wanted.dtype.kind == "c" else "float64"
    if name_of(wanted) not in ROUNDOFF:
        np.testing.assert_array_equal(got, wanted)
        return
    got, wanted = got.astype(wide), wanted.astype(wide)
    with np.errstate(invalid="ignore"):
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) | (np.abs(got - wanted) <= allowed)
    assert same.all(), f"{op}: got {got[~same][:5]}, wanted {wanted[~same][:5]}, allowed {allowed[~same][:5]}"


def contributions(n: int, dtype: str = "int64", shape: tuple[int, ...] = ()) -> list[np.ndarray[Any, Any]]:
    """Return one array per device, filled with ``(n + 1) ** device``. The digits of a sum count the contributions."""
    made = dtype_of(dtype)
    most = sum((n + 1) ** device for device in range(n))
    room = np.iinfo(made).max if made.kind in "iu" else int(2 / ROUNDOFF[dtype]) // 2
    assert most <= room, f"{dtype} cannot hold the sum of (n + 1) ** device for n = {n}"
    return [np.full(shape, (n + 1) ** device, made) for device in range(n)]


Cells = dict[tuple[int, int], int]  # values by (chunk, device)


class WrongStepError(Exception):
    """A step reads a cell that stores nothing, or writes a cell that another step of its round writes, too."""


def base_of(schedule: Any) -> int:
    """Return a base that is above the count of every contribution in every value, so that digits of sums are counts."""
    most = (max((len(srcs) for _, _, srcs in steps), default=1) for steps in schedule.rounds)
    return max(len(schedule.devices), math.prod(most)) + 1


def run(schedule: Any) -> Cells:
    """Run a schedule's steps, where the input of device d is ``base_of(schedule)**d``, and return the final values.

    Every step of a round reads the values that the previous round left. Only plain numbers of the schedule are read:
    chunks of (share, sources, destinations), rounds of (chunk, dst, srcs).
    """
    base = base_of(schedule)
    cells = {(c, s): base**s for c, (_, sources, _) in enumerate(schedule.chunks) for s in sources}
    for steps in schedule.rounds:
        written: Cells = {}
        for chunk, dst, srcs in steps:
            if (chunk, dst) in written:
                raise WrongStepError(f"chunk {chunk}: two steps of a round write device {dst}")
            if any((chunk, src) not in cells for src in srcs):
                raise WrongStepError(f"chunk {chunk}: device {dst} reads {srcs}")
            written[chunk, dst] = sum(cells[chunk, src] for src in srcs)
        cells |= written
    return cells


def right(schedule: Any) -> bool:
    """Return whether each destination receives each source's contribution exactly once."""
    base = base_of(schedule)
    try:
        cells = run(schedule)
    except WrongStepError:
        return False
    return all(
        cells.get((c, dst)) == sum(base**source for source in sources)
        for c, (_, sources, destinations) in enumerate(schedule.chunks)
        for dst in destinations
    )


def depth(schedule: Any) -> int:
    """Return an upper bound of the additions that a contribution passes on its way to a destination."""
    passed: dict[tuple[int, int], int] = {}
    for steps in schedule.rounds:
        before = dict(passed)
        for chunk, dst, srcs in steps:
            passed[chunk, dst] = max(before.get((chunk, src), 0) for src in srcs) + len(srcs) - 1
    return max(passed.values(), default=0)
