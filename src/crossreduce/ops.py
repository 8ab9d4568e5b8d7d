"""Reduction ops, and the dtypes in which they are computed.

Input: an op's name and a dtype's name. Output: whether the pair is defined, and the dtype to accumulate in. Dtypes are
names here, so no framework is needed.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from .errors import ArgumentError, UnsupportedError, message, shown


class ReduceOp(enum.Enum):
    """An elementwise reduction of the components of a per-replica value.

    Names are accepted in any case:

    >>> ReduceOp("Mean") is ReduceOp.MEAN
    True
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        if isinstance(value, str):
            for member in cls:
                if member.value == value.lower():
                    return member
        remedy = "one of " + ", ".join(f'"{member.value}"' for member in cls) + ", or a ReduceOp"
        if type(value).__module__.startswith("tensorflow."):  # its strategies accept any object as cross_device_ops
            remedy += "; as cross_device_ops of a tf.distribute.Strategy, crossreduce.tensorflow's op of the same name"
        raise ArgumentError(message("this is not a known reduction.", shown(value), remedy))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


def read_op(op: object) -> ReduceOp:
    """Return a ``ReduceOp``, given itself or its name.

    Raises:
      ArgumentError: it is neither.
    """
    if isinstance(op, (ReduceOp, str)):
        return ReduceOp(op)
    return ReduceOp._missing_(op)  # Enum would compare it with ==, which arrays answer elementwise


HALVES: Final = frozenset({"float16", "bfloat16"})
FLOATS: Final = HALVES | {"float32", "float64"}
COMPLEX: Final = frozenset({"complex64", "complex128"})
INTEGERS: Final = frozenset({f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
DTYPES: Final = FLOATS | COMPLEX | INTEGERS | {"bool"}


class Numbers(NamedTuple):
    """How a reduction is computed: the op, three dtypes by name, and the divisor of the result (1: none)."""

    op: ReduceOp
    dtype: str
    accumulator: str
    result: str
    divisor: int

    @property
    def kernel_op(self) -> str:
        """The op that combines two values: a mean is a sum that is divided at the end."""
        return "sum" if self.op is ReduceOp.MEAN else self.op.value


def copying(dtype: str) -> Numbers:
    """Return the ``Numbers`` of a copy."""
    return Numbers(ReduceOp.SUM, dtype, dtype, dtype, 1)


def require_dtype(dtype: str) -> None:
    """Raise ``UnsupportedError`` for a dtype that this library does not support."""
    if dtype not in DTYPES:
        raise UnsupportedError(
            message(
                f"arrays of dtype {dtype} cannot be reduced, broadcast or gathered.",
                f"dtype {dtype}",
                "cast to one of " + ", ".join(sorted(DTYPES)),
            )
        )


def accumulator(op: ReduceOp, dtype: str) -> str:
    """Return the name of the dtype in which ``op`` over components of ``dtype`` is accumulated.

    Half types accumulate in float32 and are rounded once at the end. The mean of integers accumulates in float64, so
    that it cannot overflow (sums up to 2**53 are exact); a framework without float64 uses its widest float. Everything
    else accumulates in its own dtype: integer sums and products wrap around, as in every framework.

    Raises:
      UnsupportedError: ``op`` is not defined for ``dtype``.

    >>> accumulator(ReduceOp.MEAN, "float16"), accumulator(ReduceOp.SUM, "int8")
    ('float32', 'int8')
    """
    require_dtype(dtype)
    if dtype == "bool" and op in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            message(
                f"the {op.value} of bools is not defined.",
                f"op {op.value}, dtype bool",
                'cast to an integer, or use "max" (any) or "min" (all)',
            )
        )
    if dtype in COMPLEX and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedError(
            message(
                "complex numbers have no order.",
                f"op {op.value}, dtype {dtype}",
                "reduce the real part, or the magnitude",
            )
        )
    if dtype in HALVES and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return "float32"
    if dtype in INTEGERS and op is ReduceOp.MEAN:
        return "float64"
    return dtype
