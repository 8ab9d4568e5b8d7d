"""Flows and cuts: the greatest flow is the least cut over every set of nodes, whoever computes it."""

import random
from unittest.mock import patch

import planning_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossreduce.planning import flows
from crossreduce.planning.flows import Network

INT32 = 2**31 - 1  # what SciPy's flows hold


@st.composite
def networks(draw, least=2, most=7, widest=5):
    """Draw (n, capacities of arcs, src, dst)."""
    n = draw(st.integers(least, most))
    pairs = st.permutations(range(n)).map(lambda order: tuple(order[:2]))
    arcs = draw(st.dictionaries(pairs, st.integers(0, widest), max_size=3 * n))
    src, dst = draw(st.permutations(range(n)))[:2]
    return n, arcs, src, dst


def both(n, arcs, src, dst):
    """Return (flow, cut) as the loop finds them, after making sure that SciPy finds the same."""
    found = []
    for small in (1 << 30, 0):
        with patch.object(flows, "SMALL", small):
            network = Network(n, arcs)
            assert (network._sparse() is None) == (small > 0 or sum(arcs.values()) > INT32)
            found.append((network.flow(src, dst), network.cut(src, dst)))
    assert found[0] == found[1]
    return found[0]


@settings(max_examples=200)
@given(networks())
def test_the_greatest_flow_is_the_least_cut(case):
    """On up to 7 nodes the flow is the least capacity that leaves any set, and the cut the smallest set it leaves."""
    assert both(*case) == planning_oracle.least_cut(*case)


def test_a_way_can_be_led_elsewhere():
    """The shortest way, 0-3-2-1, is in the way of two: 3 must give up 2 for 5, so that 4 can have it."""
    arcs = dict.fromkeys([(3, 2), (3, 5), (0, 3), (0, 4), (2, 1), (4, 2), (5, 1)], 1)
    assert both(6, arcs, 0, 1) == (2, frozenset({0}))


@given(networks(8, 30, 100))
def test_scipy_finds_what_the_loop_finds(case):
    """On larger networks SciPy's flow and cut are the loop's."""
    _, arcs, src, dst = case
    value, cut = both(*case)
    assert src in cut
    assert dst not in cut
    assert value == sum(c for (a, b), c in arcs.items() if a in cut and b not in cut)


@given(networks(13, 20, 100), st.sampled_from([2**24, 2**31, 2**40, 10**30 + 57]))
def test_capacities_of_any_size(case, factor):
    """Capacities beyond 32 bits scale the flow and leave the cut as it is."""
    n, arcs, src, dst = case
    value, cut = both(*case)
    assert both(n, {arc: c * factor for arc, c in arcs.items()}, src, dst) == (value * factor, cut)


@pytest.mark.parametrize("spare", [-1, 0, 1, 2])
def test_the_limit_of_32_bits(spare):
    """Just below, at and just beyond the greatest sum of capacities that SciPy can hold, the flow is right."""
    wide = INT32 - 40 + spare
    arcs = {(0, 1): wide, (1, 2): 20, (0, 2): 7, (2, 3): 13}  # all capacities: INT32 + spare
    arcs |= {(k, k + 1): 0 for k in range(3, 14)}
    assert sum(arcs.values()) == INT32 + spare
    assert both(15, arcs, 0, 2) == (27, frozenset({0, 1}))
    assert both(15, arcs, 0, 1) == (wide, frozenset({0, 2, 3}))


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["scipy", "loop"])
@settings(max_examples=50)
@given(networks(2, 16, 9), st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_how_the_network_was_written(small, case, rng):
    """Arcs in another order, or set one by one, give the same flow and cut: plans rest on them."""
    n, arcs, src, dst = case
    shuffled = list(arcs.items())
    rng.shuffle(shuffled)
    with patch.object(flows, "SMALL", small):
        network, first = Network(n, {}), Network(n, arcs)
        for (a, b), capacity in shuffled:
            network.set(a, b, capacity)
        assert (network.flow(src, dst), network.cut(src, dst)) == (first.flow(src, dst), first.cut(src, dst))


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["scipy", "loop"])
@settings(max_examples=50)
@given(networks(2, 16, 9), st.data())
def test_set_changes_what_later_flows_find(small, case, data):
    """After a change, 0 included, flows and cuts are those of a network that was made so."""
    n, arcs, src, dst = case
    changed = st.tuples(st.sampled_from(sorted(arcs) or [(src, dst)]), st.integers(0, 9))
    with patch.object(flows, "SMALL", small):
        network = Network(n, arcs)
        network.flow(src, dst)
        now = dict(arcs)
        for arc, capacity in data.draw(st.lists(changed, max_size=4)):
            network.set(*arc, capacity)
            now[arc] = capacity
            fresh = Network(n, now)
            assert (network.flow(src, dst), network.cut(src, dst)) == (fresh.flow(src, dst), fresh.cut(src, dst))


def test_a_flow_leaves_the_network_as_it_was():
    """Flows between other nodes, one after another, do not see each other."""
    rng = random.Random(3)
    for n in (6, flows.SMALL + 1):
        arcs = {(a, b): rng.randrange(1, 9) for a in range(n) for b in range(n) if a != b and rng.random() < 3 / n}
        network = Network(n, arcs)
        pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
        found = {pair: (network.flow(*pair), network.cut(*pair)) for pair in pairs}
        assert found == {pair: (Network(n, arcs).flow(*pair), Network(n, arcs).cut(*pair)) for pair in reversed(pairs)}
        assert len({value for value, _ in found.values()}) > 1
