"""Flows and cuts: the greatest flow is the least cut over all sets of nodes, with SciPy and with the Python loop."""

import random
from unittest.mock import patch

import planning_oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from crossreduce.planning.optimal.bounds import flows
from crossreduce.planning.optimal.bounds.flows import Network

INT32 = 2**31 - 1  # the limit of SciPy's flows


@st.composite
def networks(draw, least=2, most=7, widest=5):
    """Draw a network: (number of nodes, capacities of arcs, src, dst)."""
    n = draw(st.integers(least, most))
    pairs = st.permutations(range(n)).map(lambda order: tuple(order[:2]))
    arcs = draw(st.dictionaries(pairs, st.integers(0, widest), max_size=3 * n))
    src, dst = draw(st.permutations(range(n)))[:2]
    return n, arcs, src, dst


def both(n, arcs, src, dst):
    """Return (flow, cut) of the Python loop, and check that SciPy's are equal, if SciPy supports the capacities."""
    found = []
    for small in (1 << 30, 0):
        with patch.object(flows, "SMALL", small):
            network = Network(n, arcs)
            out = sum(capacity for (a, _), capacity in arcs.items() if a == src)
            widest = max((capacity + arcs.get((b, a), 0) for (a, b), capacity in arcs.items()), default=0)
            assert (network._sparse(src) is None) == (small > 0 or max(out, widest) > INT32)
            found.append((network.flow(src, dst), network.cut(src, dst)))
    assert found[0] == found[1]
    return found[0]


@examples(200)
@given(networks())
def test_the_greatest_flow_is_the_least_cut(case):
    """On up to 7 nodes the flow is the least capacity out of any set with src and without dst, and the cut is the
    smallest set with this capacity."""
    assert both(*case) == planning_oracle.least_cut(*case)


@given(networks(13, 20, 100), st.sampled_from([2**24, 2**31, 2**40, 10**30 + 57]))
def test_capacities_of_any_size(case, factor):
    """If all capacities are multiplied, even beyond 32 bits, the flow is, too, and the cut does not change."""
    n, arcs, src, dst = case
    value, cut = both(*case)
    assert both(n, {arc: c * factor for arc, c in arcs.items()}, src, dst) == (value * factor, cut)


@pytest.mark.parametrize("excess", [-1, 0, 1, 2])
def test_the_limit_of_32_bits(excess):
    """Just below, at and just above the greatest capacity out of the source that SciPy supports, the flow is right."""
    wide = INT32 - 7 + excess
    arcs = {(0, 1): wide, (1, 2): 20, (0, 2): 7, (2, 3): 13}
    arcs |= {(k, k + 1): 0 for k in range(3, 14)}
    assert wide + arcs[0, 2] == INT32 + excess
    assert both(15, arcs, 0, 2) == (27, frozenset({0, 1}))
    assert both(15, arcs, 0, 1) == (wide, frozenset({0, 2, 3}))


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["scipy", "loop"])
@examples(50)
@given(networks(2, 16, 9), st.randoms(use_true_random=False))
def test_the_order_of_arcs_does_not_matter(small, case, rng):
    """Arcs in another order give the same flow and cut, on which plans depend."""
    n, arcs, src, dst = case
    shuffled = list(arcs.items())
    rng.shuffle(shuffled)
    with patch.object(flows, "SMALL", small):
        network, first = Network(n, dict(shuffled)), Network(n, arcs)
        assert (network.flow(src, dst), network.cut(src, dst)) == (first.flow(src, dst), first.cut(src, dst))


def test_a_flow_does_not_change_the_network():
    """Flows between several pairs of nodes, one after another, do not affect each other."""
    rng = random.Random(3)
    for n in (6, flows.SMALL + 1):
        arcs = {(a, b): rng.randrange(1, 9) for a in range(n) for b in range(n) if a != b and rng.random() < 3 / n}
        network = Network(n, arcs)
        pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
        found = {pair: (network.flow(*pair), network.cut(*pair)) for pair in pairs}
        assert found == {pair: (Network(n, arcs).flow(*pair), Network(n, arcs).cut(*pair)) for pair in reversed(pairs)}
        assert len({value for value, _ in found.values()}) > 1
