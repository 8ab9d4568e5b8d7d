"""Trees on links with prices: the cheapest trees, heuristic trees for many devices, and proved limits of prices."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, SYMMETRIC, WHOLE, wirings

from crossreduce import Topology
from crossreduce.planning.optimal.bounds.steiner import CheapestTrees
from crossreduce.planning.optimal.bounds.steiner_heuristic import HeuristicTrees
from crossreduce.planning.optimal.bounds.tree_prices import (
    _lower_bounds,
    branch_nodes_of,
    cheapest_prices,
    least_price,
    price_of_buffer,
)


def check_tree(trees, root, ends, price):
    """Check that a tree joins its root and all ends; return its price."""
    total, reached = 0, {root}
    for node, parent, through in trees.parents(root):
        assert parent in reached
        reached.add(node)
        total += sum(price[pair] for pair in pairwise([parent, *through, node]))
    assert ends <= reached
    return total


@examples(60)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 6, 2, (True, False)), st.integers(1, 4), st.randoms())
def test_prices_of_trees(wiring, count, drawn):
    """Two different algorithms find the same price of the cheapest tree, and the tree has this price.

    Heuristic trees join all ends and are not cheaper. The proved lower limit is not above the price.
    """
    topology = Topology(*wiring)
    ends, branch_nodes = topology.devices[:count], branch_nodes_of(topology)
    number = {node: k for k, node in enumerate(topology.nodes)}
    arcs = [(number[link.src], number[link.dst]) for link in topology.links]
    prices = [drawn.randint(1, 9) for _ in arcs]
    priced = [(link.src, link.dst, Fraction(price)) for link, price in zip(topology.links, prices, strict=True)]
    exact, price = cheapest_prices(priced, ends, set(branch_nodes)), dict(zip(arcs, prices, strict=True))
    numbers = [[number[node] for node in nodes] for nodes in (ends, branch_nodes)]
    best, heuristic = (kind(len(number), arcs, *numbers) for kind in (CheapestTrees, HeuristicTrees))
    best.price(prices)
    heuristic.price([float(price) for price in prices])
    for node in branch_nodes:
        root = number[node]
        if node not in exact:
            assert best.cost(root) == heuristic.cost(root) == float("inf")
            continue
        assert best.cost(root) == check_tree(best, root, {*numbers[0]}, price) == exact[node]
        assert exact[node] <= check_tree(heuristic, root, {*numbers[0]}, price) <= heuristic.cost(root)
    some_free = [(src, dst, drawn.randint(0, 5)) for src, dst, _ in priced]  # some prices are 0
    exact = cheapest_prices(some_free, ends, set(branch_nodes))
    low = _lower_bounds(some_free, ends, branch_nodes, branch_nodes)
    assert low.keys() == exact.keys() & set(branch_nodes)
    assert all(low[root] <= exact[root] and bool(low[root]) == bool(exact[root]) for root in low)


def test_cheap_trees_of_a_line():
    """A path to the next terminal begins at the tree, not at the root. So a tree of a line uses each link once."""
    line = [(k, k + 1) for k in range(13)] + [(k + 1, k) for k in range(13)]  # 14 nodes, linked in both directions
    trees = HeuristicTrees(14, line, range(14), range(14))
    trees.price([1.0] * 26)
    assert [trees.cost(root) for root in range(14)] == [13.0] * 14


def test_equal_directions_have_one_price():
    """If links cost the same in both directions, the lower bound is twice the greatest one of a tree out of a root."""
    topology = Topology.machine("dgx-1v")
    drawn = random.Random(3)
    for _ in range(20):
        cost = {frozenset(link[:2]): drawn.randint(0, 5) for link in topology.links}
        priced = [(*link[:2], cost[frozenset(link[:2])]) for link in topology.links]
        ends = tuple(drawn.sample(topology.devices, 5))
        low = least_price(priced, topology.devices, ends, ends, topology.devices, exact=False)
        assert low == 2 * max(_lower_bounds(priced, ends, topology.devices, ends).values())
        assert low <= least_price(priced, topology.devices, ends, ends, topology.devices, exact=True)


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_devices_changes_no_proved_price(seed):
    """The proved price of the trees of many members does not depend on the order of the members."""
    draw = random.Random(seed)
    topology = Topology.torus(4, 5)
    priced = [(src, dst, Fraction(draw.randint(0, 5))) for src, dst, _, _ in topology.links]
    members = draw.sample(topology.devices, 12)
    orders = [tuple(draw.sample(members, len(members))) for _ in range(5)]
    found = {price_of_buffer(priced, topology.devices, "all_reduce", order, (), exact=False) for order in orders}
    assert len(found) == 1
    assert min(found) > 0
