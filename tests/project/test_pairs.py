"""The covering designs of pairs.py: the combinations of parameters with which tests of several parameters run."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import each, pairs


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_designs_contain_every_value_and_pair(lengths):
    """``pairs`` has every pair of values of any two factors, and no case twice. ``each`` has every value."""
    factors = [[(factor, k) for k in range(length)] for factor, length in enumerate(lengths)]
    cases, fewer = pairs(*factors), each(*factors)
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(factors[i], factors[j]))
    for design in (cases, fewer):
        assert [set(values) for values in zip(*design, strict=True)] == [set(factor) for factor in factors]
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("design", [pairs, each])
def test_an_empty_design_is_an_error(design):
    """A design without factors, or with an empty one, is an error, since a test without cases would pass silently."""
    for factors in ([], [[]], [[1, 2], []]):
        with pytest.raises(AssertionError, match=r"no factors were given|a factor has no values"):
            design(*factors)
