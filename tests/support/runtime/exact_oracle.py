"""The exact sum of floats, given and returned as bits, in rational arithmetic of plain Python integers."""

import math
from fractions import Fraction

FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""For each dtype, (number of bits of the exponent, number of stored bits of the mantissa)."""


def decoded(bits, dtype):
    """Return the number that ``bits`` encode: a ``Fraction``, or a float that is infinite or NaN."""
    exponent_bits, stored = FORMATS[dtype]
    sign = -1 if bits >> (exponent_bits + stored) else 1
    exponent, mantissa = bits >> stored & ((1 << exponent_bits) - 1), bits & ((1 << stored) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    bias = (1 << (exponent_bits - 1)) - 1
    whole = mantissa + (1 << stored if exponent else 0)
    return sign * whole * Fraction(2) ** (max(exponent, 1) - bias - stored)


def nearest(number, dtype):
    """Return the bits of the float that is nearest to a positive ``Fraction``. Ties are rounded to even."""
    exponent_bits, stored = FORMATS[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = max(number.numerator.bit_length() - number.denominator.bit_length() - 1, 1 - bias)
    while number >= Fraction(2) ** (exponent + 1):
        exponent += 1
    whole = round(number / Fraction(2) ** (exponent - stored))  # Python rounds to nearest even
    bits = whole + ((exponent + bias - 1) << stored)
    return min(bits, ((1 << exponent_bits) - 1) << stored)


def exact_sum(terms, dtype, divisor=1, result=None):
    """Return the bits of the exact sum of ``terms`` (given as bits) over ``divisor``, rounded once to ``result``."""
    exponent_bits, stored = FORMATS[result or dtype]
    sign = 1 << (exponent_bits + stored)
    infinity = ((1 << exponent_bits) - 1) << stored
    numbers = [decoded(int(bits), dtype) for bits in terms]
    special = {str(x) for x in numbers if isinstance(x, float)}  # some of "inf", "-inf" and "nan"
    if "nan" in special or len(special) > 1:
        return infinity | 1 << (stored - 1)
    if special:
        return infinity | (sign if special == {"-inf"} else 0)
    total = sum(numbers) / divisor
    if total == 0:
        negative_zero = 1 << sum(FORMATS[dtype])
        return sign if all(int(bits) == negative_zero for bits in terms) else 0
    return nearest(abs(total), result or dtype) | (sign if total < 0 else 0)
