"""Partial sums of exact reductions: the exact sums of some ranks' terms, as hosts send them to each other.

Input: addresses of arrays. Output: a block of memory, and overflow terms. An exact sum is stored as the sum of several
doubles. The block stores the first one of each sum in an array, and for sums of float64 the second one in another
array. All other doubles are overflow terms: an element's number and a double, 16 bytes together. A block begins with a
header of one cache line, whose first 8 bytes are the number of overflow terms. They are sent in a message of their own,
which is rarely needed: most sums of float32 fit into one float64, and most of float64 into two.
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
OVERFLOW_NBYTES: Final = 16  # of an overflow term
_DOUBLE: Final = 8
_REAL: Final = {"complex64": "float32", "complex128": "float64"}
_COMPONENTS: Final = 48  # doubles of a sum: 2098 bits need 40. A sum that exceeds their range has one more per rank


def reals(dtype: str) -> int:
    """Return how many real numbers an element consists of."""
    return 2 if dtype in COMPLEX else 1


def is_pair(dtype: str) -> bool:
    """Return whether partial sums of a dtype have two doubles for each real number."""
    return dtype in ("float64", "complex128")


def partial_itemsize(numbers: Numbers) -> int:
    """Return the bytes of an element of a partial result, without overflow terms.

    >>> from crossreduce.ops import ReduceOp
    >>> partial_itemsize(Numbers(ReduceOp.SUM, "float64", "float64", "float64", 1, exact=True))
    16
    """
    if not numbers.exact:
        return itemsize(numbers.accumulator)
    return _DOUBLE * reals(numbers.dtype) * (1 + is_pair(numbers.dtype))


def travelling_itemsize(numbers: Numbers, collective: str) -> int:
    """Return the average bytes per element of messages between hosts, without overflow terms.

    In an exact all-reduce this is the mean of the sizes of a partial result and of a result, since it sends as many of
    each. Other exact reductions send only partial results. In reductions that are not exact, elements count with the
    size of the dtype, although partial results of half types are float32.

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
    """Return the bytes before the elements of a partial result: a header in exact reductions, otherwise none."""
    return HEADER if numbers.exact else 0


def most_overflow(size: int, ranks: int) -> int:
    """Return the maximum number of overflow terms of ``size`` real sums, each of one term per rank."""
    return size * (_COMPONENTS + ranks)


class PartialSums(NamedTuple):
    """A block of ``size`` partial sums of real numbers at an address. ``pair``: whether it has two arrays."""

    address: int
    size: int
    pair: bool

    def arrays(self, first: int = 0) -> list[int]:
        """Return, for each array of the block, the address of its element number ``first``."""
        high = self.address + HEADER + first * _DOUBLE
        return [high, high + self.size * _DOUBLE] if self.pair else [high]

    def write_count(self, overflow: bytes | bytearray) -> None:
        """Write the number of overflow terms into the header."""
        ctypes.c_int64.from_address(self.address).value = len(overflow) // OVERFLOW_NBYTES

    def read_count(self) -> int:
        """Return the number of overflow terms in the header."""
        return ctypes.c_int64.from_address(self.address).value

    def add(
        self, dtype: str, sources: Sequence[int], overflow: bytes | bytearray, first: int = 0, size: int | None = None
    ) -> bytes:
        """Write ``size`` real sums (default: all) into the block, from number ``first`` on. Return the overflow terms.

        ``sources``: addresses of the arrays to sum, of ``dtype``. ``overflow``: overflow terms that are added to them.
        """
        high, low = [*self.arrays(first), 0][:2]
        count = self.size if size is None else size
        name = _REAL.get(dtype, dtype)
        new_overflow: bytes = kernels.native().split_partial_sums(
            kernels.instruction_set(), name, sources, overflow, high, low, count, first
        )
        return new_overflow


def round_sums(
    blocks: Iterable[PartialSums], overflow: bytes | bytearray, numbers: Numbers, address: int, size: int
) -> None:
    """Write the ``size`` sums of all blocks and overflow terms, divided and rounded once, to an address."""
    sources = [array for block in blocks for array in block.arrays()]
    name = _REAL.get(numbers.result, numbers.result)
    kernels.native().round_partial_sums(
        kernels.instruction_set(), name, numbers.divisor, sources, overflow, address, size
    )
