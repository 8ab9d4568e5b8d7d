"""Forests for any sources and destinations, also if some devices cannot be reached."""

from fractions import Fraction

import pytest
from budget import examples
from hypothesis import given
from planning_oracle import (
    DIRECTED,
    LOOSE,
    SYMMETRIC,
)
from test_forest import COLLECTIVES, check_right, forest, forest_of_all, joined, requested

from crossreduce import PlanError, Topology, bound, plan, verify


def check_request(topology, collective, sources, destinations):
    if not joined(topology, sources, destinations):
        with pytest.raises(PlanError, match=r"needs a route from \S+ to .*, but no link leads out of {"):
            forest(topology, collective, sources, destinations)
        return
    members = tuple(dict.fromkeys([*sources, *destinations]))
    if (
        min(len(sources), len(destinations)) > 1
        and collective == "all_reduce"
        and not joined(topology, members, members)
    ):
        with pytest.raises(PlanError, match=r"by trees needs a route from \S+ to .*, but no link leads out of {"):
            forest(topology, collective, sources, destinations)
        return
    found = forest(topology, collective, sources, destinations)
    rate, schedule = check_right(found, topology), found.schedule
    assert schedule.devices[: len(members)] == members
    assert all(node in topology.nodes for node in schedule.devices)
    for chunk in schedule.chunks:
        gives, takes = ([schedule.devices[k] for k in part] for part in chunk[1:])
        assert collective == "all_gather" or tuple(gives) == sources
        assert collective == "reduce_scatter" or tuple(takes) == destinations
    if collective in ("reduce_scatter", "all_gather"):
        wanted = bound(topology, collective, devices=members).algbw
    else:
        wanted = plan(topology, "all_reduce", 1, "forest", sources, destinations).bound.algbw
    if wanted is None:
        assert rate is None
    elif rate is not None:
        assert rate <= wanted


@examples(200)
@given(requested((SYMMETRIC, DIRECTED)))
def test_any_sources_and_destinations(ask):
    """Forests give the right sums for sources and destinations that are disjoint, overlap or are one device."""
    check_request(*ask)


@examples(200)
@given(requested((LOOSE,)))
def test_devices_that_are_not_joined(ask):
    """If a source cannot reach a destination, the error names both; unreachable devices that take no part do not
    matter."""
    check_request(*ask)


@pytest.mark.parametrize(
    ("links", "destinations"), [("02 03 12 13", ("cpu:2", "cpu:3")), ("01 10 12 23 32", ("cpu:1", "cpu:2", "cpu:3"))]
)
def test_no_way_back_from_destinations_to_sources(links, destinations):
    """Any source or destination may be the root of a tree, so an all-reduce to several destinations raises a PlanError
    if these cannot reach its several sources; an all-reduce to one destination does not."""
    topology = Topology([f"cpu:{k}" for k in range(4)], [(f"cpu:{a}", f"cpu:{b}", 1) for a, b in links.split()])
    with pytest.raises(
        PlanError, match=r"all_reduce by trees needs a route from cpu:\d to .*, but no link leads out of {"
    ):
        forest(topology, "all_reduce", ("cpu:0", "cpu:1"), destinations)
    for destination in destinations:
        check_right(forest(topology, "all_reduce", ("cpu:0", "cpu:1"), (destination,)), topology)


def test_one_device():
    """For one device no data moves, on any topology."""
    for topology in (Topology(["cpu:0"], []), Topology.ring(3), Topology.star(3)):
        for collective in COLLECTIVES:
            found = forest(topology, collective, ("cpu:0",), ("cpu:0",))
            assert (found.schedule.rounds, found.trees, found.depth) == ((), 1, 0)
            verify(found.schedule)


@pytest.mark.parametrize("n", range(3, 8))
def test_one_way_rings(n):
    """On a ring of links in one direction each chunk travels once round the ring, twice in an all-reduce."""
    devices = [f"cpu:{k}" for k in range(n)]
    topology = Topology(devices, [(devices[k - 1], devices[k], 12) for k in range(n)])
    for collective, laps in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        found = forest_of_all(topology, collective)
        assert check_right(found, topology) == Fraction(12 * n, laps * (n - 1))
        assert (found.depth, len(found.schedule.rounds)) == (n - 1, laps * (n - 1))
    for collective in ("broadcast", "reduce"):
        assert check_right(forest_of_all(topology, collective, devices[2]), topology) == 12
