"""Exact sums in Python's integers: the fallback where the extension was not built, and the compiled kernels' oracle.

Input: NumPy arrays of terms. Output: for each element the real sum, perhaps divided by an integer, rounded once, to
nearest even. ``native/kernels/exact.hpp`` defines the results for NaN, infinities and zeros. Floats are read and
written as bits; the result depends neither on the caller's rounding mode, nor on whether it flushes subnormals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_UNIT: Final = -1074  # all finite floats are multiples of 2 ** _UNIT
# The precision: the bits of a normal number's mantissa, with the leading one. The unit: the exponent of the smallest
# positive number, of which all others are multiples.
_FORMATS: Final = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}


def exact_sum(terms: Sequence[Any], divisor: int, dtype: np.dtype[Any], weights: Sequence[int] = ()) -> Any:
    """Return the exact sum of real arrays of one size, divided by ``divisor``, in a float dtype.

    ``weights``: how often each array counts; (): once.

    >>> import numpy as np
    >>> exact_sum([np.float32([1e30]), np.float32([1]), np.float32([-1e30])], 1, np.dtype("float32"))
    array([1.], dtype=float32)
    """
    parts = [_read(x) for x in terms]
    total = sum(x.units * times for x, times in zip(parts, weights or [1] * len(parts), strict=True))
    precision, unit = _FORMATS[dtype.name]
    sign_bit = 1 << (8 * dtype.itemsize - 1)
    infinity = sign_bit - (1 << (precision - 1))
    bits = np.array([_round(abs(number), divisor, precision, unit) for number in total], np.uint64)
    bits = np.minimum(bits, np.uint64(infinity))  # an overflow
    negative = (total < 0) | np.logical_and.reduce([x.negative & (x.units == 0) & ~x.infinite & ~x.nan for x in parts])
    # Whether +inf, or -inf, is among the terms of an element.
    up, down = (np.logical_or.reduce([x.infinite & (x.negative == sign) for x in parts]) for sign in (False, True))
    nan = np.logical_or.reduce([x.nan for x in parts]) | (up & down)
    bits[up | down] = infinity
    negative = np.where(up | down, down, negative)
    bits[negative] |= np.uint64(sign_bit)
    bits[nan] = infinity | 1 << (precision - 2)  # a quiet NaN
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


class _Terms(NamedTuple):
    """Floats as Python's integers: each float is ``units`` times 2 ** ``_UNIT``. Infinities and NaN have 0 units."""

    units: Any
    negative: Any  # whether the sign bit is 1
    infinite: Any
    nan: Any


def _read(x: Any) -> _Terms:
    """Return floats as ``_Terms``, from the signs, exponents and fractions in their bits."""
    precision, unit = _FORMATS[x.dtype.name]
    bits = x.view(f"u{x.itemsize}").astype(np.uint64).astype(np.int64)
    negative = (bits >> (8 * x.itemsize - 1) & 1) == 1
    largest = (1 << (8 * x.itemsize - precision)) - 1  # the exponent of infinities and NaN
    exponent, fraction = bits >> (precision - 1) & largest, bits & ((1 << (precision - 1)) - 1)
    finite = exponent != largest
    mantissa = np.where(finite, fraction | (exponent > 0).astype(np.int64) << (precision - 1), 0)
    shift = np.maximum(exponent, 1) - 1 + unit - _UNIT
    units = np.where(negative, -mantissa, mantissa).astype(object) << shift.astype(object)
    return _Terms(units, negative, ~finite & (fraction == 0), ~finite & (fraction != 0))


def _round(magnitude: int, divisor: int, precision: int, unit: int) -> int:
    """Return the bits of the float nearest to ``magnitude * 2 ** _UNIT / divisor``, in the format of these parameters.

    If the result is too large for the format, the returned integer is at least that of infinity.
    """
    # The exponent of the result's last bit. With it the quotient has ``precision`` bits before the point, or one less.
    exponent = max(magnitude.bit_length() - divisor.bit_length() + _UNIT - precision + 1, unit)
    if exponent > unit and (magnitude // (divisor << (exponent - _UNIT))).bit_length() < precision:
        exponent -= 1
    unit_of_whole = divisor << (exponent - _UNIT)
    whole, rest = divmod(magnitude, unit_of_whole)
    whole += 2 * rest > unit_of_whole or (2 * rest == unit_of_whole and whole % 2 == 1)  # to nearest even
    return whole + ((exponent - unit) << (precision - 1))  # the leading bit of ``whole`` adds 1 to the exponent
