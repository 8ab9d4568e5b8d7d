"""Flows and cuts: the greatest flow is the least cut over all sets of nodes, for capacities of any size."""

import random

import planning_oracle
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from crossreduce.planning.optimal.bounds.flows import Network


@st.composite
def networks(draw, least=2, most=7, widest=5):
    """Draw a network: (number of nodes, capacities of arcs, src, dst)."""
    n = draw(st.integers(least, most))
    pairs = st.permutations(range(n)).map(lambda order: tuple(order[:2]))
    arcs = draw(st.dictionaries(pairs, st.integers(0, widest), max_size=3 * n))
    src, dst = draw(st.permutations(range(n)))[:2]
    return n, arcs, src, dst


def flow_and_cut(n, arcs, src, dst):
    """Return the flow and the cut of a network."""
    network = Network(n, arcs)
    return network.flow(src, dst), network.cut(src, dst)


@examples(200)
@given(networks())
def test_the_greatest_flow_is_the_least_cut(case):
    """On up to 7 nodes the flow is the least capacity out of any set with src and without dst, and the cut is the
    smallest set with this capacity."""
    assert flow_and_cut(*case) == planning_oracle.least_cut(*case)


@given(networks(8, 30, 100), st.sampled_from([1, 2**31, 10**30 + 57]), st.randoms(use_true_random=False))
def test_larger_networks(case, factor, rng):
    """On larger networks the flow is SciPy's, for any unit of capacity and any order of arcs; the cut has its value."""
    n, arcs, src, dst = case
    ends = ([src for src, _ in arcs], [dst for _, dst in arcs])
    wanted = int(maximum_flow(csr_array((list(arcs.values()), ends), shape=(n, n), dtype="int32"), src, dst).flow_value)
    shuffled = list(arcs.items())
    rng.shuffle(shuffled)
    value, cut = flow_and_cut(n, {arc: c * factor for arc, c in shuffled}, src, dst)
    assert value == wanted * factor == factor * sum(c for (a, b), c in arcs.items() if a in cut and b not in cut)
    assert (src in cut, dst in cut) == (True, False)
    assert flow_and_cut(n, arcs, src, dst)[1] == cut


def test_a_flow_does_not_change_the_network():
    """Flows between several pairs of nodes, one after another, do not affect each other."""
    rng = random.Random(3)
    for n in (6, 25):
        arcs = {(a, b): rng.randrange(1, 9) for a in range(n) for b in range(n) if a != b and rng.random() < 3 / n}
        network = Network(n, arcs)
        pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
        found = {pair: (network.flow(*pair), network.cut(*pair)) for pair in pairs}
        assert found == {pair: flow_and_cut(n, arcs, *pair) for pair in reversed(pairs)}
        assert len({value for value, _ in found.values()}) > 1
