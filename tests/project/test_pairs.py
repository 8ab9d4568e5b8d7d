"""The covering designs of pairs.py: no pair of values is missing, and the cases are few and always the same."""

import doctest
import itertools
import math

import pairs as module
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import each, pairs


def factors_of(lengths):
    return [[(factor, k) for k in range(length)] for factor, length in enumerate(lengths)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_designs_contain_every_value_and_pair(lengths):
    """Each case has one value of each factor, in their order. ``pairs`` has every pair of values of two factors, each
    case once, and always the same; ``each`` has every value, and as many cases as the largest factor has values."""
    factors = factors_of(lengths)
    cases, fewer = pairs(*factors), each(*factors)
    for case in cases + fewer:
        assert all(value in factor for value, factor in zip(case, factors, strict=True))
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(factors[i], factors[j]))
    assert set(itertools.chain(*cases)) == set(itertools.chain(*fewer)) == set(itertools.chain(*factors))
    assert len(set(cases)) == len(cases) <= math.prod(lengths)
    assert len(fewer) == max(lengths)
    assert pairs(*factors) == cases


@pytest.mark.parametrize(
    ("lengths", "most"), [([4, 5, 8], 40), ([3, 3, 3, 3], 12), ([10, 8, 2, 2], 80), ([2] * 10, 10)]
)
def test_pairs_are_close_to_the_product_of_the_two_largest_factors(lengths, most):
    """The greedy construction stays close to the lower bound, the product of the two largest factors."""
    assert len(pairs(*factors_of(lengths))) <= most


def test_values_may_be_equal_or_unhashable_but_not_missing():
    """Only the positions of values count. A design without factors, or with an empty one, is an error, since a test
    without cases would pass silently. The examples in the docstrings are correct."""
    assert pairs([{}, {}], (k for k in "ab")) == [({}, "a"), ({}, "b"), ({}, "a"), ({}, "b")]
    for design, factors in itertools.product([pairs, each], [[], [[]], [[1, 2], []]]):
        with pytest.raises(AssertionError, match=r"no factors were given|a factor has no values"):
            design(*factors)
    assert doctest.testmod(module) == (0, 2)
