"""Partial sums of exact reductions have exactly the sum of their terms.

A block has one or two doubles per element. Doubles that do not fit into it are in a list of "overflow" terms.
"""

import random
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from exact_cases import KINDS, UNSIGNED, exact_sums, narrow, terms_of
from exact_oracle import decoded
from kernel_cases import SETS
from pairs import pairs

from crossreduce import kernels
from crossreduce.ops import Numbers, ReduceOp
from crossreduce.ranks.intra_host.partial_sums import (
    HEADER,
    OVERFLOW_NBYTES,
    PartialSums,
    is_pair,
    most_overflow,
    round_sums,
)

OVERFLOW = np.dtype([("element", "i8"), ("term", "f8")])
SIZES = (1, 67, 300)


class Partial:
    """The partial sums of some rows of terms: ``block`` and ``overflow``. ``of`` combines partial sums."""

    def __init__(self, dtype, size):
        self.pair, self.size = is_pair(dtype), size
        self.memory = np.full(HEADER // 8 + size * (1 + self.pair), 7.0)
        self.block = PartialSums(self.memory.ctypes.data, size, self.pair)
        self.overflow = b""

    @classmethod
    def of_rows(cls, dtype, rows, cut=None):
        """Return the sums of rows. If ``cut`` is given, one call adds the elements before it, and another the rest."""
        made = cls(dtype, rows.shape[1])
        cut = made.size if cut is None else cut
        for first, size in ((0, cut), (cut, made.size - cut)):
            addresses = [row[first:].ctypes.data for row in rows]
            made.overflow += made.block.add(dtype, addresses, b"", first, size)
        return made

    @classmethod
    def of(cls, dtype, parts):
        made = cls(dtype, parts[0].size)
        arrays = [array for part in parts for array in part.block.arrays()]
        made.overflow = made.block.add("float64", arrays, b"".join(part.overflow for part in parts))
        return made

    def terms(self, element):
        """Return the doubles whose sum is an element."""
        high = self.memory[HEADER // 8 :].reshape(1 + self.pair, self.size)[:, element]
        listed = np.frombuffer(self.overflow, OVERFLOW)
        return [*high, *listed["term"][listed["element"] == element]]


def rounded(dtype, parts, divisor):
    """Return the bits of the sums of partial sums, divided and rounded."""
    out = np.zeros(parts[0].size, UNSIGNED[dtype])
    numbers = Numbers(ReduceOp.SUM, dtype, "float64", dtype, divisor, exact=True)
    overflow = b"".join(part.overflow for part in parts)
    round_sums([part.block for part in parts], overflow, numbers, out.ctypes.data, out.size)
    return out


@pytest.mark.parametrize(
    ("kind", "dtype", "isa"), pairs(KINDS, UNSIGNED, SETS), ids=lambda value: getattr(value, "__name__", value)
)
def test_sums_of_partial_sums_have_the_bits_of_rational_arithmetic(kind, dtype, isa):
    """However the terms are distributed to hosts, and in any order of combining them, each sum is rounded once."""
    draw = random.Random(repr((kind.__name__, dtype, isa)))
    with mock.patch.object(kernels, "instruction_set", return_value=isa):
        for size in SIZES:
            hosts = draw.randint(1, 4)
            counts = [draw.choice((1, 2, 3, 8)) for _ in range(hosts)]
            terms = terms_of(kind, size, dtype, sum(counts), size)
            parts, at = [], 0
            for count in counts:
                rows = np.ascontiguousarray(terms[at : at + count])
                parts.append(Partial.of_rows(dtype, rows, draw.randint(0, size)))
                at += count
            while len(parts) > 1 and draw.random() < 0.6:  # a host combines the partial sums of others
                draw.shuffle(parts)
                parts = [Partial.of(dtype, parts[:2]), *parts[2:]]
            divisor = draw.choice((1, len(terms), 3))
            found, right = rounded(dtype, parts, divisor), exact_sums(terms, dtype, divisor)
            wrong = np.flatnonzero(found != right)
            assert not wrong.size, (size, counts, divisor, wrong[:5], found[wrong[:5]], right[wrong[:5]])


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_partial_sums_are_exact(dtype):
    """The doubles of each element add up to exactly the sum of its terms. The number of overflow terms has a bound, and
    is 0 if the terms have similar exponents (kind ``narrow``)."""
    for kind in KINDS:
        terms = terms_of(kind, 3, dtype, 6, 64)
        part = Partial.of_rows(dtype, terms)
        assert len(part.overflow) // OVERFLOW_NBYTES <= (0 if kind is narrow else most_overflow(64, 6))
        for element in range(64):
            numbers = [decoded(int(bits), dtype) for bits in terms[:, element]]
            if all(isinstance(x, Fraction) for x in numbers):
                assert sum(map(Fraction, part.terms(element))) == sum(numbers)


def test_infinite_partial_sums_are_no_overflow():
    """A partial sum beyond the largest float64 is not infinite: only the result is, if no terms of another host cancel
    it and the divisor does not bring it back into the range."""
    most = np.array([[np.finfo(np.float64).max]] * 3)
    parts = [Partial.of_rows("float64", most), Partial.of_rows("float64", -most[:2])]
    assert rounded("float64", parts, divisor=1).view("float64") == most[0]
    assert np.isinf(rounded("float64", parts[:1], divisor=1).view("float64"))
    assert rounded("float64", parts[:1], divisor=3).view("float64") == most[0]


def test_overflow_terms_of_elements_that_do_not_exist_are_refused():
    """A list of overflow terms with an element outside of the array, or with a part of a term, is an error."""
    part = Partial.of_rows("float32", np.ones((2, 4), "float32"))
    numbers = Numbers(ReduceOp.SUM, "float32", "float64", "float32", 1, exact=True)
    out = np.zeros(4, "float32")
    for element in (-1, 4):
        with pytest.raises(ValueError, match="outside of the array"):
            round_sums([part.block], np.array([(element, 1.0)], OVERFLOW).tobytes(), numbers, out.ctypes.data, 4)
    with pytest.raises(ValueError, match="a part of an overflow term"):
        round_sums([part.block], b"12345678", numbers, out.ctypes.data, 4)
