"""Forests on known machines: their rates, and the numbers of trees of ForestColl's paper."""

import itertools
from fractions import Fraction

import pytest
from test_forest import COLLECTIVES, DGX_1V, check_close, check_right, forest_of_all, joined, limit

from crossreduce import PlanError, Topology
from crossreduce.schedule import fluid_rate


def test_damaged_dgx_1s_reach_their_bound():
    """On all connected subsets of a DGX-1V's devices, and on the DGX-1V without any one of its 16 links, an all-reduce
    reaches its bound, which is at least half of the all-gather's."""
    damaged = [DGX_1V.without_link(a, b) for a, b in itertools.combinations(DGX_1V.devices, 2) if DGX_1V.link(a, b)]
    subsets = [DGX_1V.subset(d) for n in range(2, 9) for d in itertools.combinations(DGX_1V.devices, n)]
    assert (len(damaged), len(subsets)) == (16, 247)
    exact = 0
    for topology in damaged + subsets:
        if not joined(topology, topology.devices[:1], topology.devices):
            with pytest.raises(PlanError, match="no link leads out of"):
                forest_of_all(topology, "all_reduce")
            continue
        wanted = limit(topology, "all_reduce")
        assert wanted >= limit(topology, "all_gather") / 2
        exact += check_close(forest_of_all(topology, "all_reduce"), topology, wanted)
    assert exact == 16 + 197


MACHINES = [
    ("dgx-1p", {}), ("dgx-1v", {}), ("dgx-2", {}), ("dgx-a100", {}), ("hgx-h100", {}), ("mi250", {}), ("mi300x", {}),
    ("pcie-8", {"speeds": "effective"}), ("nvlink-pairs-4", {"speeds": "effective"}), ("mi100", {}),
    ("hgx-h100", {"hosts": 2}), ("ndv2", {"hosts": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), MACHINES, ids=[f"{name}-{o.get('hosts', 1)}" for name, o in MACHINES])
def test_forests_of_machines(name, options):
    """On these complete machines all five collectives reach the bound exactly."""
    topology = Topology.machine(name, **options)
    for collective in COLLECTIVES:
        assert check_close(forest_of_all(topology, collective), topology, limit(topology, collective)), collective


def test_few_trees_where_the_bound_takes_many():
    """Two DGX A100 need 13 trees per root to reach the bound; a plan with one per root is within 1.1 % of it."""
    topology = Topology.machine("dgx-a100", 2)
    found = forest_of_all(topology, "all_gather")
    assert not check_close(found, topology, limit(topology, "all_gather"))
    assert (found.k, found.trees) == (1, 16)
    assert fluid_rate(found.schedule, topology) / limit(topology, "all_gather") == Fraction(90, 91)


@pytest.mark.parametrize(("name", "rate", "depth"), [("hgx-h100", 450, 2), ("gb200-nvl72", 900, 1)])
def test_switches_in_the_network_reduce(name, rate, depth):
    """If the switch combines and multicasts, each device sends and receives its buffer once."""
    topology = Topology.machine(name, in_network=True)
    found = forest_of_all(topology, "all_reduce")
    assert check_right(found, topology) == rate
    # The root is a device, two hops from the others; on a large machine, whose tree is found by symmetry, the switch.
    assert (found.trees, found.depth) == (1, depth)
    assert found.schedule.devices == (*topology.devices, "nvswitch")


def test_machines_are_planned_with_k_trees():
    """k, the number of trees and the depth on some machines are those of ForestColl's paper."""
    for name, k, trees, depth in (
        ("dgx-1v", 6, 16, None),
        ("dgx-2", 1, 16, 1),
        ("mi300x", 1, 8, 1),
        ("mi250", 3, 24, None),
    ):
        found = forest_of_all(Topology.machine(name), "all_gather")
        assert found.k == k
        assert found.trees == trees
        assert depth in (None, found.depth)
        assert found.k.denominator == 1
