"""Maximum flows, and flows that end early, on random networks."""

import random

import pytest
from scipy.optimize import linprog

from crossreduce.planning.optimal.bounds.cuts import MOST_COMPILED, Network


def random_network(seed):
    """Return a number of nodes, and random capacities of their arcs."""
    rng = random.Random(seed)
    n = rng.randint(3, 9)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b and rng.random() < 0.5]
    return n, {pair: rng.randint(1, 20) for pair in pairs}


def by_linear_program(n, capacities):
    """Return the maximum flow from node 0 to node n - 1, by a linear program."""
    arcs = list(capacities)
    inner = [[(arc[1] == node) - (arc[0] == node) for arc in arcs] for node in range(1, n - 1)]
    value = [(arc[1] == n - 1) - (arc[0] == n - 1) for arc in arcs]
    bounds = [(0, capacities[arc]) for arc in arcs]
    return round(-linprog([-each for each in value], A_eq=inner, b_eq=[0] * (n - 2), bounds=bounds).fun) if arcs else 0


@pytest.mark.parametrize("unit", [1, MOST_COMPILED])
@pytest.mark.parametrize("seed", range(40))
def test_a_flow_that_is_large_enough_ends_early(seed, unit):
    """``flow_up_to`` returns the maximum, or a value between the wanted one and the maximum. Then the cut is right, and
    the smallest one. Flows are compiled, or in Python if the capacities are large."""
    n, capacities = random_network(seed)
    smallest = Network(n, {pair: MOST_COMPILED * units for pair, units in capacities.items()}).cut(0, n - 1)
    most = unit * by_linear_program(n, capacities)
    capacities = {pair: unit * units for pair, units in capacities.items()}
    assert Network(n, capacities).flow(0, n - 1) == most
    for enough in {0, 1, most // 2, most, most + 1}:
        network = Network(n, capacities)
        assert min(most, enough) <= network.flow_up_to(enough, 0, n - 1) <= most
        cut = network.cut(0, n - 1)
        assert cut == smallest
        assert most == sum(units for (a, b), units in capacities.items() if a in cut and b not in cut)
        assert 0 in cut
        assert n - 1 not in cut


def test_it_does_end_early():
    """Of 100 disjoint paths of three arcs, only as many are used as are needed."""
    arcs = {(0, 1 + k): 1 for k in range(100)} | {(1 + k, 101 + k): 1 for k in range(100)}
    network = Network(202, arcs | {(101 + k, 201): 1 for k in range(100)})
    assert network.flow_up_to(7, 0, 201) == 7
    assert network.flow_up_to(1000, 0, 201) == network.flow(0, 201) == 100
