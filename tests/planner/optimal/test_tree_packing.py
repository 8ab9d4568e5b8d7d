"""Trees that share the links: packed trees, the arcs that replace switches, and the flows and cuts below them."""

from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from itertools import pairwise
from unittest.mock import patch

import planning_oracle
import pytest
from budget import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, SYMMETRIC, WHOLE, wirings
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from crossreduce import Topology
from crossreduce.planning.optimal.bounds.cuts import Network
from crossreduce.planning.optimal.trees import packing, switches
from crossreduce.planning.optimal.trees.packing import pack_trees
from crossreduce.planning.optimal.trees.switches import Capacities, all_reached, replace_switches

FACTORS = st.sampled_from([1, 1, 6, 60, 2**33 + 1, 10**15 + 37])


def fits(capacities, roots, sinks, n):
    """Return whether every set of nodes that lacks a sink has capacity out for the roots in it (Edmonds)."""
    return all(
        sum(units for root, units in roots.items() if root in inside)
        <= sum(c for (a, b), c in capacities.items() if a in inside and b not in inside)
        for inside in planning_oracle.subsets(range(n))
        if not inside >= set(sinks)
    )


@st.composite
def drawn_capacities(draw, most_nodes=5):
    """Draw (capacity of each arc, units of trees of each root, n); all trees may or may not fit."""
    n = draw(st.integers(2, most_nodes))
    pairs = st.permutations(range(n)).map(lambda order: tuple(order[:2]))
    arcs = draw(st.dictionaries(pairs, st.integers(1, 6), min_size=1, max_size=n * n))
    roots = draw(st.dictionaries(st.integers(0, n - 1), st.integers(1, 4), min_size=1))
    return arcs, roots, n


@st.composite
def full(draw, most_nodes=5):
    """Draw (capacities, roots, n) whose trees fit: the capacities that random trees need, and sometimes more."""
    n = draw(st.integers(2, most_nodes))
    arcs, roots = Counter(), Counter()
    for _ in range(draw(st.integers(1, 5))):
        order = draw(st.permutations(range(n)))
        units = draw(st.integers(1, 4))
        roots[order[0]] += units
        for k in range(1, n):
            arcs[order[draw(st.integers(0, k - 1))], order[k]] += units
    factor = draw(FACTORS)
    arcs = {arc: units * factor for arc, units in arcs.items()}
    for pair in draw(st.lists(st.permutations(range(n)).map(lambda order: tuple(order[:2])), max_size=2)):
        arcs[pair] = arcs.get(pair, 0) + draw(st.integers(1, 3))
    return arcs, {root: units * factor for root, units in roots.items()}, n


def check_trees(batches, arcs, roots, n):
    """Check that every tree spans all nodes, that each root has all its units, and that no arc is overloaded."""
    used, units = Counter(), Counter()
    for root, weight, tree in batches:
        assert weight > 0
        units[root] += weight
        reached = {root}
        for src, dst in tree:
            assert src in reached
            assert dst not in reached
            reached.add(dst)
            used[src, dst] += weight
        assert reached == set(range(n))
    assert units == Counter(roots)
    assert all(weight <= arcs.get(arc, 0) for arc, weight in used.items())


@examples(200)
@given(drawn_capacities())
def test_all_reached_is_edmonds_condition(case):
    """all_reached returns whether every set of nodes that lacks a sink has enough capacity out of it (Edmonds)."""
    arcs, roots, n = case
    for sinks in ([n - 1], range(n)):
        assert all_reached(arcs, roots, sinks, n) == fits(arcs, roots, sinks, n)


@examples(200)
@given(full(), st.booleans())
def test_the_trees_of_capacities_are_found_again(case, thorough):
    """pack_trees finds all trees in capacities made of trees, whether it grows them all at once or one by one."""
    arcs, roots, n = case
    assert all_reached(arcs, roots, range(n), n)
    given_ = dict(arcs)
    with patch.object(packing, "_all_at_once", return_value=None) if thorough else nullcontext():
        batches = pack_trees(arcs, roots, n)
    assert arcs == given_
    check_trees(batches, arcs, roots, n)


def test_batches_are_few():
    """The number of batches does not grow with the capacities: a batch stands for many units of one tree."""
    ring = {(a, b): 10**12 for a in range(6) for b in ((a + 1) % 6, (a - 1) % 6)}
    roots = dict.fromkeys(range(6), 10**12 * 2 // 6)
    with patch.object(packing, "_all_at_once", return_value=None):
        assert len(pack_trees(ring, roots, 6)) <= 24


@st.composite
def switched(draw):
    """Draw (topology, capacity of each arc by node numbers, units by root); switches have equal capacity in and out.

    The roots have as many units as can reach all devices at once on these capacities.
    """
    topology = Topology(*draw(wirings((SYMMETRIC, DIRECTED), WHOLE)))
    assume(topology.switches)
    number = {node: k for k, node in enumerate(topology.nodes)}
    weights = draw(st.dictionaries(st.sampled_from(topology.devices), st.integers(1, 3).map(Fraction), min_size=1))
    rate = planning_oracle.cut_bound(topology, weights, outward=True)
    whole = sum(weights.values())
    units = {number[root]: rate * weight / whole for root, weight in weights.items()}
    scale = draw(st.sampled_from([1, 6, 60]))
    for amount in units.values():
        scale *= (amount * scale).denominator
    arcs = {(number[link.src], number[link.dst]): int(link.bandwidth * scale) for link in topology.links}
    return topology, arcs, {root: int(amount * scale) for root, amount in units.items()}


@examples(150)
@given(switched(), st.booleans(), st.data())
def test_switches_are_split_off_without_loss(case, one_by_one, data):
    """Even switches are replaced by arcs that name them, respect the links, and fit all trees."""
    topology, arcs, roots = case
    n, devices = len(topology.nodes), range(len(topology.devices))
    groups = [data.draw(st.integers(0, 1)) for _ in devices]
    capacities = Capacities()
    for arc, capacity in arcs.items():
        capacities.add(arc, (), capacity)
    alone = patch.object(switches, "_even_shares", return_value={}) if one_by_one else nullcontext()
    with alone, planning_oracle.at_most(5):
        split = replace_switches(capacities, range(len(devices), n), roots, devices, groups, n)
    used = Counter()
    for (u, t), here in split.items():
        assert {u, t} <= set(devices)
        assert u != t
        for through, capacity in here.items():
            assert capacity > 0
            for pair in pairwise((u, *through, t)):
                used[pair] += capacity
    assert all(amount <= arcs.get(pair, 0) for pair, amount in used.items())
    assert fits(split.totals(), roots, devices, len(devices))


@pytest.mark.parametrize("width", [7, 10**6 + 3, 2**60 + 33])
def test_wide_switches_need_no_more_time(width):
    """The switch of a star whose members have different widths is replaced within seconds, for widths of any size."""
    widths = [width, 3 * width + 1, 2 * width + 5, width + 2]
    capacities = Capacities()
    for k, capacity in enumerate(widths):
        capacities.add((k, 4), (), capacity)
        capacities.add((4, k), (), capacity)
    with planning_oracle.at_most(5):
        split = replace_switches(capacities, [4], {0: width}, range(4), [0] * 4, 5)
    assert fits(split.totals(), {0: width}, range(4), 4)
    assert len(split) <= 12


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
    """On up to 7 nodes the flow is the least cut, and the cut the smallest set with this capacity."""
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
