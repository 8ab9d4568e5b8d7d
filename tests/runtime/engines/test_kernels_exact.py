"""Exact sums of the kernels have the bits of rational arithmetic, on every instruction set."""

import itertools

import exact_reference
import ml_dtypes
import numpy as np
import pytest
from budget import examples
from exact_cases import KINDS, UNSIGNED, broken_ties, edges, exact_sums, large, terms_of
from exact_oracle import FORMATS, exact_sum
from exact_reference import random_terms, reference_sums
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import SETS, Case, Setup, check, setups
from pairs import pairs

from crossreduce.kernels import FusedProgram, Segment

DTYPES = tuple(UNSIGNED)
# Sources and results: partial sums of other processes are float64.
CONVERTED = [*((dtype, dtype) for dtype in DTYPES), *(("float64", dtype) for dtype in DTYPES[:3])]


every_set = pytest.mark.parametrize("isa", SETS)
PLAIN = 1, False, False  # the last arguments of ``run``: one thread, no streaming stores, no search for overlaps


def named(value):
    """Return the name of a parameter, the same in every process."""
    return value.__name__ if callable(value) else str(value)


def exact_case(dtypes, divisor, n, size, results=1):
    """Return the case that adds ``n`` sources exactly."""
    program = FusedProgram(1, ((0, *range(n)),), (~0,) * results)
    source, result = dtypes
    segments = (Segment(0, 0, size, 0),)
    return Case("exact_sum", (source, source, result), divisor, n, results, (size,), (program,), segments)


def stored(array, dtype):
    """Return bits as an array that a kernel accepts."""
    return array if dtype == "bfloat16" else array.view(dtype)


def assert_exact(isa, terms, dtypes, divisor=1, right=None):
    """Assert that a kernel ("numpy": the one in NumPy) gives the bits of the reference in fixed point, or ``right``."""
    source, result = dtypes
    case = exact_case(dtypes, divisor, *terms.shape)
    out = np.zeros(terms.shape[1], UNSIGNED[result])
    kernel = case.reference() if isa == "numpy" else case.native(isa)
    kernel.run([[stored(row, source) for row in terms]], [[stored(out, result)]], *PLAIN)
    assert_same(out, reference_sums(terms, source, divisor, result) if right is None else right, terms)


def assert_same(got, right, terms):
    """Assert that all bits are equal. The message shows the first element that differs."""
    wrong = np.flatnonzero(got != right)
    if wrong.size:
        at = wrong[0]
        given = ", ".join(f"{int(x):#x}" for x in terms[:, at])
        message = f"{wrong.size} of {right.size} differ, first {at}: {int(got[at]):#x} instead of {int(right[at]):#x}"
        raise AssertionError(f"{message}; terms {given}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_rounds_as_the_formats_do(dtype):
    """The oracle returns a single term unchanged, and for two terms the same bits as NumPy's addition."""
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    bits = np.unique(np.random.default_rng(0).integers(0, 2 ** (8 * kind.itemsize), 500, "u8", endpoint=False))
    numbers = bits.astype(UNSIGNED[dtype]).view(kind)
    finite = bits[np.isfinite(numbers.astype("float64"))].astype(UNSIGNED[dtype])
    assert [exact_sum([x], dtype) for x in finite] == finite.tolist()
    with np.errstate(all="ignore"):
        right = finite.view(kind) + finite[::-1].view(kind)  # IEEE addition rounds the exact sum of two
    got = [exact_sum(pair, dtype) for pair in zip(finite, finite[::-1], strict=True)]
    assert got == right.view(UNSIGNED[dtype]).tolist()


MANY = (*KINDS, *exact_reference.KINDS)  # functions that make terms in Python, names of kinds that are made in C++
HARD = (broken_ties, edges, large)  # ties that much smaller numbers break, and partial sums that overflow


def terms_of_kind(kind, seed, dtype, n, size):
    return terms_of(kind, seed, dtype, n, size) if callable(kind) else random_terms(dtype, kind, seed, n, size)


@pytest.mark.parametrize(
    ("kind", "dtypes", "isa"),
    dict.fromkeys([*pairs(MANY, CONVERTED, SETS), *itertools.product(HARD, CONVERTED, SETS)]),
    ids=named,
)
def test_thousands_of_sums_have_the_bits_of_rational_arithmetic(isa, dtypes, kind):
    """Sums and quotients of any data and any number of terms have the bits of the reference, which rounds once."""
    large_size = 10_000 if isinstance(kind, str) else 4_000
    for seed, n in enumerate((1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64)):
        size = large_size if n in (2, 3, 5, 8, 9, 64) else (3, 64, 101, 37)[seed % 4]
        terms = terms_of_kind(kind, seed + 50, dtypes[0], n, size)
        for divisor in {1, n, n + 3} if size < 200 else {1, n}:  # 1: a sum, n: a mean
            assert_exact(isa, terms, dtypes, divisor)


@every_set
@pytest.mark.parametrize(("dtype", "digits"), [("float32", 53), ("bfloat16", 53), ("bfloat16", 24)])
def test_the_certificate_of_exact_partial_sums_is_not_too_generous(isa, dtype, digits):
    """Sums are right at, and next to, the largest spread of exponents with which partial sums have ``digits`` bits.

    Six terms add up to a tie. The last two differ by the unit of the smaller one, which breaks the tie; but a sum of
    all terms in order loses that unit, because it has one bit more than ``digits``.
    """
    stored, bias = FORMATS[dtype][1], (1 << (FORMATS[dtype][0] - 1)) - 1
    precision = stored + 1
    largest = digits - precision - 3  # of 8 terms, whose sum may need 3 bits more than a term
    sign = 1 << sum(FORMATS[dtype])
    columns = []
    for spread, tie in itertools.product((largest, largest + 1), range(4, 84, 16)):
        total = (4 << precision) + tie
        mantissas = [total // 6 + (k < total % 6) for k in range(6)]
        exponent, low = bias + 20, bias + 20 - spread
        terms = [exponent << stored | mantissa - (1 << stored) for mantissa in mantissas]
        terms += [low << stored | (1 << stored) - 3, sign | low << stored | (1 << stored) - 4]
        columns.append(terms)
    terms = np.array(columns * 8, UNSIGNED[dtype]).T.copy()
    assert_exact(isa, terms, (dtype, dtype), 1, exact_sums(terms, dtype))


@every_set
def test_quotients_next_to_ties(isa):
    """Quotients of bfloat16s are right if they are as near as possible to a tie (the middle of two bfloat16s) without
    being equal to it: s / n differs from an odd number m of 9 bits by 1 / n. Subnormal quotients are right, too."""
    draw, found = np.random.default_rng(0), []
    m = np.arange(257, 512, 2)
    for k in range(9, 26):
        s = draw.permutation(np.arange(128, 256))[:, None] << k
        for step in (-1, 1):
            places = np.argwhere(((s + step) % m == 0) & ((s + step) // m <= 1 << 24))[:4]
            found += [(int(s[i, 0]), (int(s[i, 0]) + step) // int(m[j])) for i, j in places]
    assert {k for k in range(9, 24) for _, n in found if n >> k == 1} == {*range(9, 24)}
    for s, n in found:
        smallest = -133 - s.bit_length() + n.bit_length()
        bits = [np.float32(s * 2.0**exponent).view("u4") >> 16 for exponent in (0, -30, smallest)]
        terms = np.array([[*bits, bits[0] | 0x8000] * 12], "u2")
        assert_exact(isa, terms, ("bfloat16", "bfloat16"), n, exact_sums(terms, "bfloat16", n))


@every_set
def test_quotients_of_float16_next_to_ties(isa):
    """Quotients are right if they are equal to a tie (the middle of two float16s), or differ very little from it: the
    sum has up to 28 bits and is a multiple of the divisor, or next to one."""
    middles = np.arange(2049, 4096, 2)  # odd numbers of 12 bits
    for n, shift, step in itertools.product((1, 3, 7, 1023, 2047, 4095, 8191), range(6), (-1, 0, 1)):
        sums = (middles * n << shift) + step
        sums = sums[sums < 1 << 28]
        digits = np.stack([sums & 0x7FF, sums >> 11 & 0x7FF, sums >> 22])
        terms = (digits * np.array([[2.0**-24], [2.0**-13], [2.0**-2]])).astype("float16").view("u2")
        assert_exact(isa, terms, ("float16", "float16"), n)


@every_set
def test_float16_next_to_the_limit_of_sums_in_integers(isa):
    """Sums of 31 and 32 bits are right, for both signs, also next to elements whose terms are small."""
    for n in (1, 2, 3, 4, 5, 8, 9, 64):
        exponents = 22 - (n - 1).bit_length() + np.arange(-1, 2)
        few = exponents[:, None, None] << 10 | np.array([[0], [1], [0x3FF]]) | np.array([0, 0x8000])
        terms = np.tile(np.repeat(few, 32), (n, 1)).astype("u2")
        terms[-1, 2::3] = 1  # breaks ties
        terms[:, np.arange(terms.shape[1]) % 32 < 16] &= 0x83FF
        for divisor in (1, 3, n):
            assert_exact(isa, terms, ("float16", "float16"), divisor)


@every_set
def test_something_tiny_breaks_a_tie(isa):
    """A result is rounded up if it exceeds a tie by a tiny number, even if a third of the number underflows in float64,
    or if float32 cannot represent the number."""
    for dtype, divisor, numbers, right in (
        ("float32", 3, [3 + 3 * 2.0**-24, 2.0**-1074, 0.0], np.float32(1 + 2.0**-23).view("u4")),
        ("bfloat16", 1, [2.0**-134, 2.0**-170], 1),
    ):
        terms = np.array(numbers).reshape(-1, 1).repeat(40, axis=1).view("u8")
        assert_exact(isa, terms, ("float64", dtype), divisor, np.full(40, right))


@pytest.mark.parametrize("dtypes", CONVERTED, ids=named)
def test_the_references_have_the_bits_of_rational_arithmetic(dtypes):
    """The compiled reference, with which other tests compare, gives the bits of exact fractions. NumPy's does, too."""
    source, result = dtypes
    for seed, (kind, n) in enumerate(itertools.product(MANY, (1, 2, 7, 33))):
        terms = terms_of_kind(kind, seed, source, n, 10)
        for divisor in {1, n, 3}:
            right = exact_sums(terms, source, divisor, result)
            assert_same(reference_sums(terms, source, divisor, result), right, terms)
            assert_exact("numpy", terms, dtypes, divisor, right)


EVERY = [*CONVERTED, ("complex64", "complex64"), ("complex128", "complex128")]


@pytest.mark.parametrize(("dtypes", "isa"), pairs(EVERY, SETS), ids=named)
@examples(15)
@given(
    setup=setups(in_place=True),
    n=st.integers(1, 20),
    results=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=3),
    mean=st.booleans(),
)
def test_arrays_of_any_layout(isa, dtypes, setup, n, results, sizes, mean):
    """Arrays may have any layout and alignment, and results may be sources. Only bytes of the results are written."""
    case = exact_case(dtypes, n if mean else 1, n, 0, results)
    in_place = tuple((r, s) for r, s in setup.in_place if s < n and r < results and dtypes[0] == dtypes[1])
    segments = tuple(Segment(k, size // 5, size, 0) for k, size in enumerate(sizes))
    case = case._replace(sizes=tuple(sizes), segments=segments)
    check(case, setup._replace(in_place=in_place), case.native(isa))


@pytest.mark.parametrize(("dtype", "isa"), pairs([*DTYPES, "complex64"], SETS))
def test_large_arrays_and_threads(isa, dtype):
    """Several threads with streaming stores write every element, for any offsets of the arrays in a cache line."""
    case = exact_case((dtype, dtype), 3, 3, 20_007, results=3)._replace(segments=(Segment(0, 5, 20_000, 0),))
    for offsets in ((0,), (16, 64, 16), (1, 3)):
        check(case, Setup(kind="numbers", offsets=offsets, threads=3, streaming=True), case.native(isa))
