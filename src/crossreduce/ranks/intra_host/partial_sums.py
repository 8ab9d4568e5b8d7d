"""Partial sums of exact reductions: the exact sums of some ranks' terms, as hosts send them to each other.

Input: addresses of arrays. Output: a block of memory, and further terms. A block begins with a line whose first 8 bytes
are the number of further terms. Then an array has one double for each sum of real numbers. Sums of float64 have a
second array of doubles. If an exact sum needs more doubles, these are further terms: each is the number of an element
and a double, 16 bytes. The exact sum is the sum of all its doubles. Further terms are sent in a message of their own,
which is rarely needed: one float64 holds most sums of float32 exactly, and two hold most sums of float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ... import kernels
from ...ops import COMPLEX, Numbers
from ...packing import itemsize
from .programs import LINE

HEADER: Final = LINE
FURTHER_NBYTES: Final = 16  # of a further term
_DOUBLE: Final = 8
_REAL: Final = {"complex64": "float32", "complex128": "float64"}
_COMPONENTS: Final = 48  # doubles of a sum: 2098 bits need 40; for each rank there may be one more, beyond their range


def reals(dtype: str) -> int:
    """Return how many real numbers an element consists of."""
    return 2 if dtype in COMPLEX else 1


def is_pair(dtype: str) -> bool:
    """Return whether partial sums of a dtype have two doubles for each real number."""
    return dtype in ("float64", "complex128")


def partial_itemsize(numbers: Numbers) -> int:
    """Return the bytes of an element of a partial result, without further terms.

    >>> from crossreduce.ops import ReduceOp
    >>> partial_itemsize(Numbers(ReduceOp.SUM, "float64", "float64", "float64", 1, exact=True))
    16
    """
    if not numbers.exact:
        return itemsize(numbers.accumulator)
    return _DOUBLE * reals(numbers.dtype) * (1 + is_pair(numbers.dtype))


def travelling_itemsize(numbers: Numbers, collective: str) -> int:
    """Return the bytes per element of messages between hosts, on average, without further terms.

    An all-reduce sends as many results as partial results; other reductions send partial results only. This counts the
    size of partial results in exact reductions. In others all elements count as the dtype, although partial results of
    half types are float32.

    >>> from crossreduce.ops import ReduceOp
    >>> exact = Numbers(ReduceOp.SUM, "float32", "float64", "float32", 1, exact=True)
    >>> [travelling_itemsize(exact, name) for name in ("all_reduce", "reduce_scatter")]
    [6, 8]
    """
    if not numbers.exact:
        return itemsize(numbers.dtype)
    partial = partial_itemsize(numbers)
    return (partial + itemsize(numbers.result)) // 2 if collective == "all_reduce" else partial


def header_nbytes(numbers: Numbers) -> int:
    """Return the bytes before the elements of a partial result."""
    return HEADER if numbers.exact else 0


def most_further(size: int, ranks: int) -> int:
    """Return the most further terms that ``size`` real numbers can have, each the sum of ``ranks`` terms."""
    return size * (_COMPONENTS + ranks)


class PartialSums(NamedTuple):
    """A block of ``size`` partial sums of real numbers, at an address."""

    address: int
    size: int
    pair: bool

    def arrays(self, first: int = 0) -> list[int]:
        """Return the addresses of element number ``first`` in the block's arrays."""
        high = self.address + HEADER + first * _DOUBLE
        return [high, high + self.size * _DOUBLE] if self.pair else [high]

    def write_count(self, further: bytes | bytearray) -> None:
        """Write the number of further terms."""
        ctypes.c_int64.from_address(self.address).value = len(further) // FURTHER_NBYTES

    def read_count(self) -> int:
        """Return the number of further terms."""
        return ctypes.c_int64.from_address(self.address).value

    def add(
        self, dtype: str, sources: Sequence[int], further: bytes | bytearray, first: int = 0, size: int | None = None
    ) -> bytes:
        """Write the partial sums of ``size`` real numbers, from number ``first`` on; return their further terms.

        ``sources``: addresses of arrays of ``dtype``. ``further``: terms that are added to those of the arrays.
        """
        high, low = [*self.arrays(first), 0][:2]
        count = self.size if size is None else size
        name = _REAL.get(dtype, dtype)
        own_further: bytes = kernels.native().split_partial_sums(
            kernels.instruction_set(), name, sources, further, high, low, count, first
        )
        return own_further


def round_sums(
    blocks: Iterable[PartialSums], further: bytes | bytearray, numbers: Numbers, address: int, size: int
) -> None:
    """Write the sums of ``size`` real numbers of all blocks, divided and rounded once, to an address."""
    sources = [array for block in blocks for array in block.arrays()]
    name = _REAL.get(numbers.result, numbers.result)
    kernels.native().round_partial_sums(
        kernels.instruction_set(), name, numbers.divisor, sources, further, address, size
    )
