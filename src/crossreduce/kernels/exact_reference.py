"""Exact sums in Python's integers: the fallback where the extension was not built, and an oracle of compiled kernels.

Input: NumPy arrays of terms. Output: for each element the real sum, perhaps divided by an integer, rounded once, to
nearest even. ``native/exact.hpp`` defines the results for NaN, infinities and zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_UNIT: Final = -1074  # all finite floats are multiples of 2 ** _UNIT
# The bits of a normal number's mantissa, the leading one included, and the exponent of the smallest number.
_FORMATS: Final = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}


def exact_sum(terms: Sequence[Any], divisor: int, dtype: np.dtype[Any]) -> Any:
    """Return the exact sum of real arrays of one size, divided by ``divisor``, in a float dtype.

    >>> import numpy as np
    >>> exact_sum([np.float32([1e30]), np.float32([1]), np.float32([-1e30])], 1, np.dtype("float32"))
    array([1.], dtype=float32)
    """
    wide = [x.astype(np.float64) for x in terms]
    # The sum where a term is infinite or NaN, and the sign of a sum that is zero.
    added = np.full_like(wide[0], -0.0)
    for x in wide:
        added += np.where(np.isfinite(x), np.copysign(0, x), x)
    finite = np.logical_and.reduce([np.isfinite(x) for x in wide])
    total: Any = 0
    for x in wide:
        fraction, exponent = np.frexp(np.where(finite, x, 0))
        mantissa = np.ldexp(fraction, 53).astype(np.int64)
        shift = exponent - 53 - _UNIT  # negative for subnormal numbers, whose mantissas end in zeros
        mantissa >>= np.maximum(-shift, 0)
        total = total + (mantissa.astype(object) << np.maximum(shift, 0).astype(object))
    precision, unit = _FORMATS[dtype.name]
    nonzero = finite & (total != 0)
    added[np.isnan(added)] = np.nan
    added[nonzero] = [_nearest(number, divisor, precision, unit) for number in total[nonzero]]
    return added.astype(dtype)


def _nearest(numerator: int, divisor: int, precision: int, unit: int) -> float:
    """Return ``numerator * 2 ** _UNIT / divisor``, rounded to a multiple of 2 ** ``unit`` with ``precision`` bits."""
    magnitude, sign = abs(numerator), -1.0 if numerator < 0 else 1.0
    # The exponent of the last bit: the quotient's integer part has ``precision`` bits then, or one less.
    exponent = max(magnitude.bit_length() - divisor.bit_length() + _UNIT - precision + 1, unit)
    if exponent > unit and (magnitude // (divisor << (exponent - _UNIT))).bit_length() < precision:
        exponent -= 1
    unit_of_whole = divisor << (exponent - _UNIT)
    whole, rest = divmod(magnitude, unit_of_whole)
    whole += 2 * rest > unit_of_whole or (2 * rest == unit_of_whole and whole % 2 == 1)  # to nearest even
    try:
        return math.ldexp(sign * whole, exponent)
    except OverflowError:
        return sign * math.inf
