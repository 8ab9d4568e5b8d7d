"""Reduction ops, the dtypes in which they are computed, and the weights of means.

Input: an op's name and a dtype's name. Output: whether the pair is defined, and the dtype to accumulate in. Dtypes are
names here, so no framework is needed. A weighted mean is sum(w x) / sum(w).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeAlias

from .errors import ArgumentError, UnsupportedError, shown


class ReduceOp(enum.Enum):
    """An elementwise reduction of the components of a per-replica value.

    Names are accepted in upper and lower case, also "avg" and "prod", as in torch and NCCL:

    >>> ReduceOp("Mean"), ReduceOp("avg"), ReduceOp("prod")
    (ReduceOp.MEAN, ReduceOp.MEAN, ReduceOp.PRODUCT)
    """

    SUM = "sum"
    MEAN = AVG = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = PROD = "product"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call in every cache lookup

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        if isinstance(value, str):
            op = cls.__members__.get(value.upper())
            if op is not None:
                return op
        remedy = "one of " + ", ".join(f'"{name.lower()}"' for name in cls.__members__) + ", or a ReduceOp"
        if type(value).__module__.startswith("tensorflow."):  # tf.distribute passes its ReduceOp to cross_device_ops
            remedy += "; as cross_device_ops of a tf.distribute.Strategy, crossreduce.tensorflow's op of the same name"
        raise ArgumentError.of("this is not a known reduction.", shown(value), remedy)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


class BitwiseOp(enum.Enum):
    """A bitwise reduction of integers or bools, which only the ranks of process groups have."""

    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__


AnyOp: TypeAlias = ReduceOp | BitwiseOp

HALVES: Final = frozenset({"float16", "bfloat16"})
FLOATS: Final = HALVES | {"float32", "float64"}
COMPLEX: Final = frozenset({"complex64", "complex128"})
INTEGERS: Final = frozenset({f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
DTYPES: Final = FLOATS | COMPLEX | INTEGERS | {"bool"}


_MANTISSA_BITS: Final = {"float32": 24, "float64": 53}


class Numbers(NamedTuple):
    """How a reduction computes: its op, and the names of its dtypes."""

    op: ReduceOp  # only in the programs of ranks also a BitwiseOp
    dtype: str  # of the components
    accumulator: str  # the dtype of partial results
    result: str  # the dtype of the result
    divisor: float  # for a mean, the number of components or the sum of their weights; otherwise 1
    exact: bool = False  # whether the result is the real sum or mean, rounded once, without using the accumulator
    weights: tuple[int, ...] = ()  # of an exact weighted mean, how often each component counts; (): once

    def exactly(self) -> Numbers:
        """Return the same reduction with ``exact=True``.

        Some reductions are returned unchanged, because they never depend on the order of the components: minima,
        maxima, sums and products of integers, and means of integers whose sums always fit the accumulator.

        Raises:
          UnsupportedError: this is a product of floats, or a mean of integers whose sums may not fit the accumulator.
        """
        given = f"op {self.op.value}, dtype {self.dtype}, exact=True"
        if self.dtype in INTEGERS and self.op is ReduceOp.MEAN:
            bits = int(self.dtype.lstrip("uint")) + (int(self.divisor) - 1).bit_length()  # of the largest sum
            if bits > _MANTISSA_BITS[self.accumulator]:
                values = f"{self.divisor} {self.dtype} values"
                problem = f"the mean of {values} is not exact, because it accumulates in {self.accumulator}."
                raise UnsupportedError.of(problem, given, "the sum, divided by the caller; or exact=False")
        if self.dtype not in FLOATS | COMPLEX or self.op in (ReduceOp.MIN, ReduceOp.MAX):
            return self
        if self.op is ReduceOp.PRODUCT:
            problem = "a product cannot be exact: the product of n floats has n times as many digits as one."
            raise UnsupportedError.of(problem, given, "exact=False")
        return self._replace(exact=True)


KERNEL_OPS: Final[dict[tuple[AnyOp, bool], str]] = {
    (op, exact): "exact_sum" if exact else "sum" if op is ReduceOp.MEAN else op.value
    for op in (*ReduceOp, *BitwiseOp)
    for exact in (False, True)
}
"""For each op, and whether it is exact, its name in the kernels. A mean is a sum that is divided at the end."""

ELEMENTWISE: Final = {
    ReduceOp.SUM: "add",
    ReduceOp.MEAN: "add",  # the sum is divided at the end
    ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum",
    ReduceOp.PRODUCT: "multiply",
}
"""For each op, the name of the function that combines two arrays in NumPy, torch and jax.numpy. All propagate NaN."""

OF_ALL_RANKS: Final = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
"""The collectives that move one array per rank. Their sizes count the arrays of all ranks, as in nccl-tests."""

ALONG_AXIS: Final = {"add": "sum", "minimum": "amin", "maximum": "amax", "multiply": "prod"}
"""For each elementwise function, the function that combines an array along an axis in the same way."""


def copy_numbers(dtype: str) -> Numbers:
    """Return the ``Numbers`` of a copy, which is the sum of one component."""
    return Numbers(ReduceOp.SUM, dtype, dtype, dtype, 1)


def require_dtype(dtype: str) -> None:
    """Raise ``UnsupportedError`` for a dtype that this library does not support."""
    if dtype not in DTYPES:
        problem = f"arrays of dtype {dtype} cannot be reduced, broadcast or gathered."
        raise UnsupportedError.of(problem, f"dtype {dtype}", "cast to one of " + ", ".join(sorted(DTYPES)))


class _Accumulators(dict[tuple[ReduceOp, str], str]):
    """The class of ``ACCUMULATORS``. A missing pair raises an error that states why it is not defined."""

    def __missing__(self, key: tuple[ReduceOp, str]) -> str:
        op, dtype = key
        require_dtype(dtype)
        given = f"op {op.value}, dtype {dtype}"
        if dtype == "bool":
            remedy = 'cast to an integer, or use "max" (any) or "min" (all)'
            raise UnsupportedError.of(f"the {op.value} of bools is not defined.", given, remedy)
        remedy = "reduce the real part, or the magnitude"
        raise UnsupportedError.of(f"the {op.value} of complex numbers is not defined.", given, remedy)


def _accumulator(op: ReduceOp, dtype: str) -> str:
    if dtype in HALVES and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return "float32"
    return "float64" if dtype in INTEGERS and op is ReduceOp.MEAN else dtype


def _is_defined(op: ReduceOp, dtype: str) -> bool:
    if dtype == "bool":
        return op not in (ReduceOp.SUM, ReduceOp.MEAN)
    return dtype not in COMPLEX or op not in (ReduceOp.MIN, ReduceOp.MAX)


ACCUMULATORS: Final = _Accumulators(
    {(op, dtype): _accumulator(op, dtype) for op in ReduceOp for dtype in sorted(DTYPES) if _is_defined(op, dtype)}
)
"""The dtype in which an op accumulates components of a dtype: ``ACCUMULATORS[op, dtype]``.

Sums, means and products of half types accumulate in float32 and are rounded once at the end. The mean of integers
accumulates in float64, so that it cannot overflow; sums up to 2**53 are exact. A framework without float64 uses its
widest float. All other pairs accumulate in the dtype of the components, so integer sums and products wrap around, as in
every framework. A pair that is not defined raises ``UnsupportedError``.

>>> ACCUMULATORS[ReduceOp.MEAN, "float16"], ACCUMULATORS[ReduceOp.SUM, "int8"]
('float32', 'int8')
"""


MOST_WHOLE: Final = 1 << 24
"""Exact weighted means need weights in the ratio of whole numbers with at most this sum."""


class Weights(NamedTuple):
    """The weights of the replicas that take part.

    >>> read_weights([2, 0, 6.0], 3)
    Weights(kept=(0, 2), factors=(0.25, 0.75), whole=(1, 3))
    """

    kept: tuple[int, ...]  # the numbers of the replicas whose weights are not 0
    factors: tuple[float, ...]  # 1 if they are equal; else their weights, scaled by a power of two to less than 1
    whole: tuple[int, ...]  # the smallest whole numbers in the same ratio; (): their sum exceeds ``MOST_WHOLE``

    @property
    def are_equal(self) -> bool:
        """Whether the weighted mean is the mean of the replicas that take part."""
        return len(set(self.factors)) == 1

    @property
    def total(self) -> float:
        """The sum of the factors, rounded once."""
        return math.fsum(self.factors)


def read_weights(given: Any, count: int, what: str = "replica") -> Weights:
    """Return the weights of ``count`` replicas, or of other members that ``what`` names.

    Raises:
      ArgumentError: there is another number of weights; one is negative, infinite, NaN or not a number; or all are 0.
    """
    listed = None
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, dict, set, frozenset)):
        with suppress(TypeError):  # an array without axes
            listed = list(given)
    problem = f"weights must have one number for each {what}."
    if listed is None or len(listed) != count:
        raise ArgumentError.of(problem, shown(given), f"weights=[...] of {count} numbers, such as numbers of samples")
    exact = [read_weight(weight) for weight in listed]
    wrong = [f"{shown(listed[k])} for {what} {k}" for k, weight in enumerate(exact) if weight is None]
    if wrong:
        problem = "a weight must be a finite number, 0 or more."
        raise ArgumentError.of(problem, ", ".join(wrong[:4]), f"0 for a {what} that does not take part")
    values = [weight or Fraction(0) for weight in exact]
    if not any(values):
        raise ArgumentError.of("the weights must not all be 0.", shown(given), "at least one weight above 0")
    kept = tuple(k for k, weight in enumerate(values) if weight)
    positive = [values[k] for k in kept]
    largest = max(positive)
    scale = Fraction(2) ** (largest.denominator.bit_length() - largest.numerator.bit_length() - 1)
    lowest = math.lcm(*(weight.denominator for weight in positive))
    numerators = [int(weight * lowest) for weight in positive]
    divisor = math.gcd(*numerators)
    whole = tuple(number // divisor for number in numerators)
    equal = len(set(positive)) == 1
    factors = tuple(1.0 if equal else float(weight * scale) for weight in positive)
    return Weights(kept, factors, whole if sum(whole) <= MOST_WHOLE else ())


def read_weight(weight: Any) -> Fraction | None:
    """Return a weight as an exact number, or ``None`` if it is negative, infinite, NaN or not a real number."""
    if isinstance(weight, (str, bytes, bool)) or getattr(getattr(weight, "dtype", None), "kind", "") in ("b", "c"):
        return None
    try:
        exact = Fraction(float(weight))  # raises for numbers that are too large
        with suppress(TypeError, AttributeError):  # TensorFlow raises the latter
            exact = Fraction(operator.index(weight))  # integers may have more digits than a float
    except (TypeError, ValueError, OverflowError, RuntimeError):  # JAX: a traced number; torch: complex, meta
        return None
    return exact if exact >= 0 else None


def require_mean(op: ReduceOp) -> None:
    """Raise an ``ArgumentError`` if weights were given for another op than the mean."""
    if op is not ReduceOp.MEAN:
        remedy = 'op "mean", or inputs that the caller multiplies'
        raise ArgumentError.of("only a mean can have weights.", f'op "{op.value}"', remedy)
