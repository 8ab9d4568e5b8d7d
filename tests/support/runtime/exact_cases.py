"""Terms for exact sums, as rows of bits, of kinds for which a sum in floating point is often wrong."""

import numpy as np
from exact_oracle import FORMATS, exact_sum

UNSIGNED = {"float16": "u2", "bfloat16": "u2", "float32": "u4", "float64": "u8"}


class Bits:
    """Random bits of a dtype's terms."""

    def __init__(self, rng, dtype, terms, size):
        self.exponent_bits, self.stored = FORMATS[dtype]
        self.rng, self.shape = rng, (terms, size)
        self.top = (1 << self.exponent_bits) - 1  # the exponent of infinities and NaNs
        self.middle = self.top // 2  # the exponent of 1.0

    def below(self, limit):
        """Return random numbers from 0 to ``limit - 1``."""
        return self.rng.integers(0, limit, self.shape, dtype=np.uint64, endpoint=False)

    def mantissas(self, sparse=False):
        """Return random mantissas, of which few bits are 1 if ``sparse``."""
        limit = 1 << self.stored
        found = self.below(limit)
        return found & self.below(limit) & self.below(limit) & self.below(limit) if sparse else found

    def made(self, exponents, mantissas):
        """Return terms with these exponents and mantissas, and random signs."""
        signs = self.below(2) << np.uint64(self.exponent_bits + self.stored)
        return signs | exponents << np.uint64(self.stored) | mantissas

    def exponents(self, low, count):
        """Return random exponents of finite numbers, from ``low`` on."""
        low = max(low, 0)
        return np.uint64(low) + self.below(max(1, min(count, self.top - low)))


def plain(name, low, count, sparse=False):
    """Return a kind of terms with random mantissas, and with finite exponents, the ``count`` from ``low(bits)`` on."""

    def kind(bits):
        return bits.made(bits.exponents(low(bits), count), bits.mantissas(sparse))

    kind.__name__ = name
    return kind


# Most float64 sums of narrow terms are exact, and most sums of near terms are just no longer exact. Sums of ties, whose
# mantissas have few bits, are often exactly between two numbers. Partial sums of large terms overflow.
narrow = plain("narrow", lambda bits: bits.middle, 3)
near = plain("near", lambda bits: bits.middle - 20, 38)
wide = plain("wide", lambda bits: 0, 1 << 11)
ties = plain("ties", lambda bits: bits.middle - 30, 60, sparse=True)
subnormal = plain("subnormal", lambda bits: 0, 3)
large = plain("large", lambda bits: bits.top - 3, 3)


def cancelling(bits):
    """Return pairs of opposite numbers, of which a few differ in the last bit, in random order."""
    terms = bits.made(bits.exponents(bits.middle - 30, 60), bits.mantissas())
    half = len(terms) // 2
    sign = np.uint64(1 << (bits.exponent_bits + bits.stored))
    terms[half : 2 * half] = terms[:half] ^ sign ^ (bits.below(8)[:half] == 0).astype(np.uint64)
    return terms[bits.rng.permutation(len(terms))]


def zeros(bits):
    """Return zeros of both signs among other numbers."""
    kept = bits.below(3) == 0
    return bits.made(np.where(kept, np.uint64(bits.middle), np.uint64(0)), np.where(kept, bits.mantissas(), 0))


def negative_zeros(bits):
    """Return negative zeros. Every third column has one positive zero."""
    terms = np.full(bits.shape, 1 << (bits.exponent_bits + bits.stored), np.uint64)
    terms[0, ::3] = 0
    return terms


def special(bits):
    """Return infinities and NaNs among other numbers, whose partial sums may overflow."""
    terms = np.where(bits.below(2) == 0, narrow(bits), large(bits))
    kinds = bits.below(30)
    sign = np.uint64(1 << (bits.exponent_bits + bits.stored))
    infinity = np.uint64(bits.top << bits.stored)
    return np.where(kinds < 2, (terms & sign) | infinity | np.where(kinds == 0, bits.mantissas(), 0), terms)


def edges(bits):
    """Return one, its neighbours, and the smallest and largest numbers. Tiny numbers break ties of others."""
    one = bits.middle << bits.stored
    few = [0, 1, 2, 1 << bits.stored, one - 2, one - 1, one, one + 1, one + 2, (bits.top << bits.stored) - 1]
    signs = bits.below(2) << np.uint64(bits.exponent_bits + bits.stored)
    return signs | np.array(few, np.uint64)[bits.below(len(few)).astype(int)]


def broken_ties(bits):
    """Return powers of two that are one, two or more mantissas apart. Much smaller numbers break ties of others."""
    precision, middle = bits.stored + 1, bits.middle
    steps = [k * precision + d for k in range(-1, 5) for d in (0, 1)]
    few = np.array([middle - step for step in steps if 0 < middle - step < bits.top], np.uint64)
    return bits.made(few[bits.below(len(few)).astype(int)], np.zeros(bits.shape, np.uint64))


def any_bits(bits):
    """Return terms of any bits."""
    return bits.made(bits.below(bits.top + 1), bits.mantissas())


PLAIN = (narrow, near, wide, ties, subnormal, large)
KINDS = (*PLAIN, cancelling, zeros, negative_zeros, special, edges, broken_ties, any_bits)


def terms_of(kind, seed, dtype, terms, size):
    """Return terms in the storage of a dtype, one row per term."""
    return kind(Bits(np.random.default_rng(seed), dtype, terms, size)).astype(UNSIGNED[dtype])


def exact_sums(terms, dtype, divisor=1, result=None):
    """Return the exact sum of each column, in the storage of the result's dtype: see ``exact_sum``."""
    columns = [exact_sum(column, dtype, divisor, result) for column in terms.T]
    return np.array(columns, UNSIGNED[result or dtype])
