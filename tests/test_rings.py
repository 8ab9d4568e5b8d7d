"""Rings: each is a way round all devices that is there, all together fit on the links, and the schedule is theirs."""

import itertools
from collections import Counter
from fractions import Fraction

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import names, wired

import crossreduce as cr
from crossreduce import Link, Topology, simulate, verify
from crossreduce.planning import ring
from crossreduce.planning.rings import orders, rings
from crossreduce.schedule import fluid_rate
from crossreduce.topology.machines import machine_names

DGX = Topology.machine("dgx-1v")
H100S = Topology.machine("hgx-h100", hosts=2)


def hops(order):
    return list(zip(order, (*order[1:], order[0]), strict=True))


def real(topology, order):
    """Return whether each hop of an order has a way that passes no other of its devices."""
    ways = [topology.route(a, b) for a, b in hops(order)]
    return len(order) > 1 and all(way and not set(way[1:-1]) & set(order) for way in ways)


def used(topology, found):
    """Return how often the hops of orders pass each link."""
    return Counter(pair for order in found for a, b in hops(order) for pair in itertools.pairwise(topology.route(a, b)))


def check(topology, found, members):
    """Each order has each device once, and its hops have ways; if each uses as much as the narrowest link has, all
    together use no link beyond its bandwidth. Or there is one order, made up."""
    assert found
    assert all(sorted(order) == sorted(members) for order in found)
    if not real(topology, found[0]):
        assert found == (members,)
        return
    assert all(real(topology, order) for order in found)
    width = {(link.src, link.dst): link.bandwidth for link in topology.links}
    ways = [topology.route(a, b) for a, b in itertools.permutations(members, 2)]
    inside = set(members)
    pairs = {pair for way in ways if way and not inside & {*way[1:-1]} for pair in itertools.pairwise(way)}
    unit = min(width[pair] for pair in pairs)
    assert all(times * unit <= width[pair] for pair, times in used(topology, found).items())


@settings(max_examples=150)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_rings_are_there_wherever_there_are_any(data, n, both_ways):
    """Orders are rings over links that are there, side by side within the bandwidths; where no ring was found there is
    none whose hops fit on the links."""
    topology = data.draw(wired(names(n), both_ways=both_ways))
    members = tuple(data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True)))
    found = orders(topology, members)
    check(topology, found, members)
    if not real(topology, found[0]) and len(members) > 1:
        width = {(link.src, link.dst): link.bandwidth for link in topology.links}
        inside = set(members)
        ways = {pair: topology.route(*pair) for pair in itertools.permutations(members, 2)}
        free = {pair: way for pair, way in ways.items() if not inside & {*way[1:-1]}}
        unit = min((width[pair] for way in free.values() for pair in itertools.pairwise(way)), default=1)
        for rest in itertools.permutations(members[1:]):
            order = (members[0], *rest)
            times = used(topology, [order])
            assert not (real(topology, order) and all(count * unit <= width[pair] for pair, count in times.items()))


@pytest.mark.parametrize("name", [name for name, _ in machine_names()])
def test_rings_of_the_machines(name):
    """On every machine rings are found that fit side by side."""
    topology = Topology.machine(name)
    check(topology, orders(topology, topology.devices), topology.devices)


COUNTS = [
    (Topology.ring(5), 2),  # both ways round
    (Topology.ring(2), 1),
    (Topology.full_mesh(5), 4),  # all 20 links
    (Topology.full_mesh(3), 2),
    (Topology.torus(3, 3), 4),  # all 36 links
    (Topology.star(6, 450), 1),  # one fills each device's link
    (Topology.machine("dgx-1v"), 6),  # all 48 NVLinks, two rings over the double ones
    (Topology.machine("dgx-1p"), 4),  # all 32
    (Topology.machine("mi100"), 1),  # one between the two hives
]


@pytest.mark.parametrize(("topology", "count"), COUNTS, ids=[repr(topology)[:50] for topology, _ in COUNTS])
def test_as_many_rings_as_there_is_room_for(topology, count):
    """The number of rings that fit side by side on machines where it is known."""
    found = orders(topology, topology.devices)
    assert len(found) == count
    assert real(topology, found[0])


def test_a_ring_for_each_rail():
    """On two hosts of 8 GPUs with 8 rails there are 8 rings, and each rail carries one into each host."""
    found = orders(H100S, H100S.devices)
    assert len(found) == 8
    times = used(H100S, found)
    for k in range(8):
        for host in (0, 1):
            assert times[f"host{host}/cuda:{k}", f"rail{k}"] == times[f"rail{k}", f"host{host}/cuda:{k}"] == 1
    for order in found:
        assert sum(a.split("/")[0] != b.split("/")[0] for a, b in hops(order)) == 2


def test_wide_links_are_taken_first():
    """A ring leaves a narrow link out where the wide ones go round."""
    wide = [Link(f"cpu:{k}", f"cpu:{(k + 2) % 5}", 10) for k in range(5)]
    narrow = [Link(f"cpu:{k}", f"cpu:{(k + 1) % 5}", 3) for k in range(5)]
    first = orders(Topology(names(5), wide + narrow), names(5))[0]
    assert first == ("cpu:0", "cpu:2", "cpu:4", "cpu:1", "cpu:3")


@pytest.mark.parametrize("topology", [Topology.mesh(1, 4), Topology.mesh(3, 3), Topology.star(["cpu:7"])], ids=repr)
def test_where_no_ring_is(topology):
    """A line and an odd grid have no ring: the order is the devices' own, and data passes others on some hops."""
    assert orders(topology, topology.devices) == (topology.devices,)
    schedule = rings(topology, topology.devices, topology.devices, 1, 0)
    verify(schedule)
    assert schedule.rounds == ring(topology.devices).rounds
    simulate(schedule, topology, 1000)  # every hop has a way


# The schedule.


@settings(max_examples=80)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9))
def test_the_schedule_of_rings(data, n, packs, first):
    """Each ring has an equal share of the buffer, in chunks that move only from its devices to the next ones; any may
    give and any take; the result is right."""
    topology = data.draw(wired(names(n)))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple) | st.just(topology.devices)
    sources, destinations = data.draw(some), data.draw(some)
    members = tuple(dict.fromkeys([*sources, *destinations]))
    schedule = rings(topology, sources, destinations, packs, first)
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.devices == members
    found = orders(topology, members)
    each = packs * len(members)
    assert [chunk.share for chunk in schedule.chunks] == [Fraction(1, len(found) * each)] * (len(found) * each)
    for steps in schedule.rounds:
        for chunk, dst, srcs in steps:
            allowed = hops(found[chunk // each])
            assert all((members[src], members[dst]) in allowed for src in set(srcs) - {dst})
    for chunk in schedule.chunks:
        assert tuple(members[k] for k in chunk.sources) == sources
        assert tuple(members[k] for k in chunk.destinations) == destinations


@pytest.mark.parametrize("name", ["dgx-1v", "dgx-1p", "dgx-2", "dgx-a100", "hgx-b200", "gb200-nvl72", "pcie-8"])
def test_rings_reach_the_bound(name):
    """On these machines the rings fill all links, so nothing beats them when large."""
    topology = Topology.machine(name)
    schedule = rings(topology, topology.devices, topology.devices, 1, 0)
    assert fluid_rate(schedule, topology) == cr.bound(topology, "all_reduce").algbw


def test_rings_of_a_part_lead_round_the_others():
    """Rings of some devices take ways through switches and through devices that take no part, and none through one that
    does."""
    part = tuple(f"cuda:{k}" for k in (0, 3, 5, 6))
    made = cr.plan(DGX, nbytes=1 << 20, algorithm="ring", sources=part, destinations=part)
    assert made.schedule.devices == part
    assert set(simulate(made.schedule, DGX, 1000).bytes) <= {(link.src, link.dst) for link in DGX.links}
    for order in orders(DGX, part):
        assert real(DGX, order)
        assert {node for a, b in hops(order) for node in DGX.route(a, b)[1:-1]} <= {
            "cuda:1",
            "cuda:2",
            "cuda:4",
            "cuda:7",
        }
