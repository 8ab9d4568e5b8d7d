"""Rings on a topology: each visits every device over existing links, and the links fit all rings together."""

import itertools
from collections import Counter
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import names, wired

from crossreduce import Link, Topology, simulate, verify
from crossreduce.planning import Request, ring
from crossreduce.planning.algorithms.rings import parallel_rings, ring_orders
from crossreduce.topology.machines import machine_names


def rings(topology, sources, destinations=None, packs=1, first=0):
    """Return the schedule of the rings on a topology."""
    request = Request("all_reduce", sources, destinations or sources, "ring", topology, 0, packs, first)
    return parallel_rings(topology, request)


def hops(order):
    """Return the pairs of neighbours in a ring."""
    return list(zip(order, (*order[1:], order[0]), strict=True))


def is_ring(topology, order):
    """Return whether each hop of an order of devices has a route that passes no other device of the order."""
    routes = [topology.route(a, b) for a, b in hops(order)]
    return len(order) > 1 and all(route and not set(route[1:-1]) & set(order) for route in routes)


def used(topology, found):
    """Return, for each link, how many hops of the orders have a route over it."""
    return Counter(pair for order in found for a, b in hops(order) for pair in itertools.pairwise(topology.route(a, b)))


def check(topology, found, members):
    """Check that the orders list each member once, are rings, and together fit the links.

    If the first order is not a ring, it must be the only one, with the members as they were given.
    """
    assert found
    assert all(sorted(order) == sorted(members) for order in found)
    if not is_ring(topology, found[0]):
        assert found == (members,)
        return
    assert all(is_ring(topology, order) for order in found)
    width = {(link.src, link.dst): link.bandwidth for link in topology.links}
    routes = [topology.route(a, b) for a, b in itertools.permutations(members, 2)]
    inside = set(members)
    free = [route for route in routes if route and not inside & {*route[1:-1]}]
    pairs = {pair for route in free for pair in itertools.pairwise(route)}
    unit = min(width[pair] for pair in pairs)  # the bandwidth of a ring
    assert all(times * unit <= width[pair] for pair, times in used(topology, found).items())


@examples(150)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_rings_are_found_if_there_are_any(data, n, both_ways):
    """``ring_orders`` returns rings that together fit the links, or, if no ring fits, the devices in their order."""
    topology = data.draw(wired(names(n), both_ways=both_ways))
    members = tuple(data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True)))
    found = ring_orders(topology, members)
    check(topology, found, members)
    if not is_ring(topology, found[0]) and len(members) > 1:
        width = {(link.src, link.dst): link.bandwidth for link in topology.links}
        inside = set(members)
        routes = [topology.route(*pair) for pair in itertools.permutations(members, 2)]
        free = [route for route in routes if not inside & {*route[1:-1]}]
        unit = min((width[pair] for route in free for pair in itertools.pairwise(route)), default=1)
        for rest in itertools.permutations(members[1:]):
            order = (members[0], *rest)
            times = used(topology, [order])
            assert not (is_ring(topology, order) and all(count * unit <= width[pair] for pair, count in times.items()))


@pytest.mark.parametrize("name", [name for name, _ in machine_names()])
def test_rings_of_the_machines(name):
    """Every machine has a ring, and the rings that are found together fit the links."""
    topology = Topology.machine(name)
    found = ring_orders(topology, topology.devices)
    assert is_ring(topology, found[0])
    check(topology, found, topology.devices)


COUNTS = [  # (topology, number of rings)
    (Topology.ring(5), 2),  # one in each direction
    (Topology.ring(2), 1),
    (Topology.full_mesh(5), 4),  # the rings use all 20 links
    (Topology.full_mesh(3), 2),
    (Topology.torus(3, 3), 4),  # the rings use all 36 links
    (Topology.star(6, 450), 1),  # one ring uses all links
    (Topology.machine("dgx-1v"), 6),  # the rings use each direction of all 24 NVLinks
    (Topology.machine("dgx-1p"), 4),  # the rings use each direction of all 16 NVLinks
    (Topology.machine("mi100"), 1),  # the links between the two hives have room for only one ring
]


@pytest.mark.parametrize(("topology", "count"), COUNTS, ids=[repr(topology)[:50] for topology, _ in COUNTS])
def test_the_number_of_rings(topology, count):
    """On topologies whose number of rings is known, all rings that fit together are found."""
    found = ring_orders(topology, topology.devices)
    assert len(found) == count
    assert is_ring(topology, found[0])


def test_wide_links_are_taken_first():
    """If the widest links make a ring, it is the first ring."""
    wide = [Link(f"cpu:{k}", f"cpu:{(k + 2) % 5}", 10) for k in range(5)]
    narrow = [Link(f"cpu:{k}", f"cpu:{(k + 1) % 5}", 3) for k in range(5)]
    first = ring_orders(Topology(names(5), wide + narrow), names(5))[0]
    assert first == ("cpu:0", "cpu:2", "cpu:4", "cpu:1", "cpu:3")


@pytest.mark.parametrize("topology", [Topology.mesh(1, 4), Topology.mesh(3, 3), Topology.star(["cpu:7"])], ids=repr)
def test_topologies_without_a_ring(topology):
    """A line, a grid of 3 x 3 and a single device have no ring: the devices are taken in their order."""
    assert ring_orders(topology, topology.devices) == (topology.devices,)
    schedule = rings(topology, topology.devices)
    verify(schedule)
    assert schedule.rounds == ring(topology.devices).rounds
    simulate(schedule, topology, 1000)  # every hop has a route


@examples(80)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9))
def test_the_schedule_of_rings(data, n, packs, first):
    """All rings have equal shares, each device sends only to the next one of the ring, and the sums are correct."""
    topology = data.draw(wired(names(n)))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple) | st.just(topology.devices)
    sources, destinations = data.draw(some), data.draw(some)
    members = tuple(dict.fromkeys([*sources, *destinations]))
    schedule = rings(topology, sources, destinations, packs, first)
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.devices == members
    found = ring_orders(topology, members)
    each = packs * len(members)  # the chunks of a ring
    assert [chunk.share for chunk in schedule.chunks] == [Fraction(1, len(found) * each)] * (len(found) * each)
    for steps in schedule.rounds:
        for chunk, dst, srcs in steps:
            allowed = hops(found[chunk // each])
            assert all((members[src], members[dst]) in allowed for src in set(srcs) - {dst})
    for chunk in schedule.chunks:
        assert tuple(members[k] for k in chunk.sources) == sources
        assert tuple(members[k] for k in chunk.destinations) == destinations
