"""The covering designs of pairs.py: no pair of values is missing, and the cases are few and always the same."""

import doctest
import itertools
import math

import pairs as module
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import each, pairs

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def factors_of(lengths):
    return [[(factor, k) for k in range(length)] for factor, length in enumerate(lengths)]


@given(sizes)
def test_pairs_contain_every_pair_of_values(lengths):
    """Every pair of values of two factors is in a case; each case has one value of each factor, in their order."""
    factors = factors_of(lengths)
    cases = pairs(*factors)
    for case in cases:
        assert all(value in factor for value, factor in zip(case, factors, strict=True))
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(factors[i], factors[j]))
    assert {value for case in cases for value in case} == set(itertools.chain(*factors))


@given(sizes)
def test_each_contains_every_value(lengths):
    """Every value is in a case, and there are only as many cases as the largest factor has values."""
    factors = factors_of(lengths)
    cases = each(*factors)
    assert len(cases) == max(lengths)
    for k, factor in enumerate(factors):
        assert {case[k] for case in cases} == set(factor)


@given(sizes)
def test_pairs_are_few_and_always_the_same(lengths):
    """No case is listed twice, there are never more than in the full product, and a second call returns the same."""
    cases = pairs(*factors_of(lengths))
    assert len(set(cases)) == len(cases) <= math.prod(lengths)
    assert pairs(*factors_of(lengths)) == cases


@pytest.mark.parametrize(
    ("lengths", "most"), [([4, 5, 8], 40), ([3, 3, 3, 3], 12), ([10, 8, 2, 2], 80), ([2] * 10, 10), ([7], 7)]
)
def test_pairs_are_close_to_the_product_of_the_two_largest_factors(lengths, most):
    """The greedy construction stays close to the lower bound, the product of the two largest factors."""
    assert len(pairs(*factors_of(lengths))) <= most


def test_values_may_be_equal_or_unhashable():
    """A factor may be a generator, and may have equal or unhashable values; only the positions count."""
    assert pairs([{}, {}], (k for k in "ab")) == [({}, "a"), ({}, "b"), ({}, "a"), ({}, "b")]


@pytest.mark.parametrize("design", [pairs, each])
@pytest.mark.parametrize("factors", [[], [[]], [[1, 2], []]])
def test_a_factor_without_values_is_refused(design, factors):
    """No factors, or an empty one, raise an AssertionError, since a test without cases would pass silently."""
    with pytest.raises(AssertionError, match=r"no factors were given|a factor has no values"):
        design(*factors)


def test_examples_run():
    """The examples in the docstrings are correct."""
    assert doctest.testmod(module) == (0, 2)
