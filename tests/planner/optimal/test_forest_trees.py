"""One-way bounds and forests, compared with the best mixture of all possible trees."""

from fractions import Fraction

import planning_oracle
import pytest
from budget import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, LOPSIDED, ODD, SYMMETRIC, WHOLE, TooManyTreesError, wirings
from test_forest import CLOSE, check_close, check_right, forest, forest_of_all

from crossreduce import Topology, bound

ONE_WAY = ("broadcast", "reduce", "all_gather", "reduce_scatter")


def best_rate(topology, collective, members):
    """Return the rate of the best trees; too many trees: hypothesis draws another example."""
    single = collective in ("broadcast", "reduce")
    weights = dict.fromkeys(members[: 1 if single else None], Fraction(1))
    try:
        return planning_oracle.best_trees(topology, weights, collective in ("broadcast", "all_gather"), members)
    except TooManyTreesError:
        assume(False)


def forest_of(topology, collective, members):
    sources = members[:1] if collective == "broadcast" else members
    destinations = members[:1] if collective == "reduce" else members
    return forest(topology, collective, sources, destinations)


@examples(80)
@given(wirings((LOPSIDED, DIRECTED), WHOLE + ODD, most_devices=4), st.sampled_from(ONE_WAY))
def test_bounds_are_the_best_rate_of_any_trees(wiring, collective):
    """If switches only forward, the bound is the rate of the best mixture of all trees, and the forest reaches it, also
    at switches with different bandwidths in and out."""
    topology = Topology(*wiring)
    root = topology.devices[0] if collective in ("broadcast", "reduce") else None
    limit = bound(topology, collective, root)
    limit.check()
    assert float(limit.algbw) == pytest.approx(best_rate(topology, collective, topology.devices), rel=1e-7, abs=0)
    check_close(forest_of_all(topology, collective), topology, limit.algbw)


@examples(80)
@given(wirings((LOPSIDED, DIRECTED, SYMMETRIC), WHOLE, 4, reducing=(True, True, False)), st.sampled_from(ONE_WAY))
def test_trees_branch_at_switches_that_multicast(wiring, collective):
    """Forests have the rate of the best trees that branch at any device, and at any switch that reduces or multicasts;
    the bound may be greater, since it counts cuts only."""
    topology = Topology(*wiring)
    rate = check_right(forest_of_all(topology, collective), topology)
    best = best_rate(topology, collective, topology.devices)
    assert float(CLOSE) * best * (1 - 1e-7) <= float(rate) <= best * (1 + 1e-7)
    root = topology.devices[0] if collective in ("broadcast", "reduce") else None
    assert rate <= bound(topology, collective, root).algbw


@examples(60)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 5, 1, (True, False)), st.sampled_from(ONE_WAY), st.integers(2, 4))
def test_trees_branch_at_devices_that_take_no_part(wiring, collective, count):
    """Devices that are neither sources nor destinations copy and combine, if that makes the trees faster."""
    topology = Topology(*wiring)
    members = topology.devices[:count]
    rate = check_right(forest_of(topology, collective, members), topology)
    best = best_rate(topology, collective, members)
    assert float(CLOSE) * best * (1 - 1e-7) <= float(rate) <= best * (1 + 1e-7)


# cpu:1 and cpu:2 are behind the hub s, which has 2 GB/s in; a link of 1 GB/s leads round it.
BYPASS = [
    ("cpu:0", "s", 2), ("s", "cpu:1", 2), ("s", "cpu:2", 3), ("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:2", 1),
    ("cpu:1", "cpu:0", 5), ("cpu:2", "cpu:0", 5),
]  # fmt: skip


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_some_trees_branch_at_a_switch_and_others_do_not(collective):
    """If a switch has too little bandwidth for all trees, only some of them branch there."""
    topology = Topology(["cpu:0", "cpu:1", "cpu:2"], BYPASS, [("s", True)])
    topology = topology.reversed() if collective == "reduce" else topology
    assert check_right(forest_of_all(topology, collective), topology) == bound(topology, collective, "cpu:0").algbw == 3
    plain = topology.with_switches(reducing=False)
    assert check_right(forest_of_all(plain, collective), plain) == bound(plain, collective, "cpu:0").algbw == 2
