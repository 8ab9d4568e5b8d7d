"""Forests: their schedules are right, as fast as the bound, and the same in every process."""

from collections import Counter
from fractions import Fraction

import oracle
import planning_oracle
import pytest
from budget import examples
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from planning_oracle import (
    DECIMAL,
    DIRECTED,
    LOOSE,
    LOPSIDED,
    ODD,
    SYMMETRIC,
    WHOLE,
    Wiring,
    both_ways,
    reachable,
    wirings,
)

from crossreduce import Topology, bound, verify
from crossreduce.planning import Request
from crossreduce.planning import forest as module
from crossreduce.planning.optimal.trees.fitting import MOST_TREES, TOLERANCE
from crossreduce.schedule import fluid_rate

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
CLOSE = 1 - TOLERANCE
DGX_1V = Topology.machine("dgx-1v")


# Links of 0.1 GB/s in each direction, but 12.6 GB/s from cpu:0 into s. The fractions equal floats, not the decimals.
NEARLY = Wiring(
    ("cpu:0", "cpu:1"),
    (("cpu:0", "cpu:1", Fraction(0.1)), ("cpu:1", "cpu:0", Fraction(0.1)), ("cpu:0", "s", Fraction(12.6)),
     ("s", "cpu:0", Fraction(0.1)), ("cpu:0", "t", Fraction(0.1)), ("t", "cpu:0", Fraction(0.1))),
    (("s", False), ("t", False)),
)  # fmt: skip


# The phases without shrinking, for tests that fail after a long time: each try to shrink would take as long.
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


def forest(topology, collective, sources, destinations):
    """Return the forest of a request."""
    return module.forest(Request(collective, tuple(sources), tuple(destinations), topology=topology))


def forest_of_all(topology, collective, root=None):
    """Return the forest of a collective on all devices; the default root is the first device."""
    root = root or topology.devices[0]
    sources = (root,) if collective == "broadcast" else topology.devices
    destinations = (root,) if collective == "reduce" else topology.devices
    return forest(topology, collective, sources, destinations)


def limit(topology, collective, root=None):
    """Return the bound of a collective on all devices; the default root is the first device."""
    single = collective in ("reduce", "broadcast")
    return bound(topology, collective, root or topology.devices[0] if single else None).algbw


def check_right(found, topology):
    """Check that a forest verifies, sums right, counts its trees, and has routes without loops; return its rate."""
    schedule = found.schedule
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.algorithm == "forest"
    assert found.trees == len(schedule.chunks)
    assert all(schedule.rounds)
    assert set(schedule.devices) <= set(topology.nodes)
    for chunk, src, dst, through, _ in schedule.routes:
        nodes = [schedule.devices[src], *through, schedule.devices[dst]]
        assert len(set(nodes)) == len(nodes) > 2, f"the route of chunk {chunk} has a loop: {nodes}"
    rate = fluid_rate(schedule, topology)
    assert rate is None or rate == planning_oracle.rate(schedule, topology)
    return rate


def check_close(found, topology, wanted):
    """Check that the rate is the wanted one, or is less by at most the tolerance and has few trees. Return whether it
    is the wanted one."""
    rate = check_right(found, topology)
    assert rate <= wanted
    if rate < wanted:
        assert rate >= CLOSE * wanted
        assert found.trees <= MOST_TREES * len(topology.devices)
    return rate == wanted


@st.composite
def requested(draw, kinds=(SYMMETRIC, DIRECTED, LOOSE)):
    """Draw a topology and a request: some sources and some destinations; other devices may forward and reduce."""
    topology = Topology(*draw(wirings(kinds, WHOLE, reducing=(False, False, True))))
    collective = draw(st.sampled_from(COLLECTIVES))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple)
    sources, destinations = draw(some), draw(some)
    if collective == "broadcast":
        sources = sources[:1]
    if collective == "reduce":
        destinations = destinations[:1]
    if collective in ("reduce_scatter", "all_gather"):
        destinations = sources
    return topology, collective, sources, destinations


def joined(topology, sources, destinations):
    """Return whether there is a route from every source to every destination."""
    return all(reachable(topology, source) >= set(destinations) for source in sources)


def test_forests_reach_the_bound():
    """On any connected wiring whose switches have as much bandwidth in as out, all five collectives reach the rate of
    the bound: exactly, or within the tolerance with few trees."""
    counts = Counter()

    @examples(120)
    @given(wirings((SYMMETRIC, DIRECTED), WHOLE + ODD))
    def law(wiring):
        topology = Topology(*wiring)
        for collective in COLLECTIVES:
            counts[check_close(forest_of_all(topology, collective), topology, limit(topology, collective))] += 1

    law()
    print(f"at the bound: {counts[True]}, within {TOLERANCE} of it: {counts[False]}")
    assert counts[True] >= 0.97 * counts.total()
    assert counts.total() >= 100


@examples(60)
@given(wirings((LOPSIDED,), WHOLE + ODD))
def test_switches_that_take_in_more_than_they_give_out(wiring):
    """If the bandwidth into a switch is not that out of it, all collectives reach their bounds within the tolerance,
    and these are the best rates of any trees."""
    topology = Topology(*wiring)
    for collective in COLLECTIVES:
        found, wanted = forest_of_all(topology, collective), limit(topology, collective)
        check_close(found, topology, wanted)
        if collective != "all_reduce":
            single = collective in ("reduce", "broadcast")
            weights = dict.fromkeys(topology.devices[: 1 if single else None], Fraction(1))
            trees = planning_oracle.trees_bound(topology, weights, collective in ("broadcast", "all_gather"))
            assert float(wanted) == pytest.approx(trees, rel=1e-6, abs=0)


@examples(60)
@given(wirings((SYMMETRIC, DIRECTED), WHOLE + ODD, reducing=(True, False)))
def test_switches_that_reduce(wiring):
    """If switches reduce, an all-reduce reaches at least its bound for switches that do not, within the tolerance, and
    may stay below its own bound; the other collectives reach theirs."""
    topology = Topology(*wiring)
    plain = topology.with_switches(reducing=False)
    for collective in COLLECTIVES:
        found, wanted = forest_of_all(topology, collective), limit(topology, collective)
        if collective == "all_reduce":
            rate = check_right(found, topology)
            assert CLOSE * limit(plain, collective) <= rate <= wanted
        else:
            check_close(found, topology, wanted)


@pytest.mark.parametrize("hub", ["s", "cpu:3"])
@pytest.mark.parametrize(("collective", "rate"), [("broadcast", 1), ("reduce", 1), ("all_gather", 1)])
def test_one_way_collectives_branch_where_they_can(hub, collective, rate):
    """A hub with one link in and two out, which can copy and combine, supplies both receivers at the full rate.

    Cuts prove that an all-gather has at most 3/2. But cpu:0 has one link of 1 GB/s out, which must carry all data to
    cpu:1 and cpu:2. If the hub is a device, the bound counts trees, too.
    """
    devices = ("cpu:0", "cpu:1", "cpu:2")
    links = [("cpu:0", hub, 1), (hub, "cpu:1", 1), (hub, "cpu:2", 1), ("cpu:1", "cpu:0", 1), ("cpu:2", "cpu:0", 1)]
    topology = Topology([*devices, *([hub] * (hub != "s"))], links, [("s", True)] * (hub == "s"))
    topology = topology.reversed() if collective == "reduce" else topology
    root = "cpu:0" if collective in ("broadcast", "reduce") else None
    limit = bound(topology, collective, root, devices).algbw
    assert limit == (Fraction(3, 2) if collective == "all_gather" and hub == "s" else rate)
    sources, destinations = {"broadcast": (devices[:1], devices), "reduce": (devices, devices[:1])}.get(
        collective, (devices, devices)
    )
    assert check_right(forest(topology, collective, sources, destinations), topology) == rate


@example(both_ways("0-1 3/8, 0-2 1/8, 0-s 1/8, 0-t 1/8, 2-s 5000"))
@examples(40, phases=UNSHRUNK)
@given(wirings((SYMMETRIC, DIRECTED, LOPSIDED), DECIMAL))
def test_decimal_bandwidths(wiring):
    """With decimal bandwidths of large ratios, as measured, all collectives reach their bounds."""
    topology = Topology(*wiring)
    for collective in COLLECTIVES:
        with planning_oracle.at_most(5):
            found = forest_of_all(topology, collective)
        check_close(found, topology, limit(topology, collective))


@examples(40)
@given(wirings((SYMMETRIC, DIRECTED), WHOLE + ODD), st.sampled_from([Fraction(1, 1000), 3, 2**20]))
def test_plans_do_not_depend_on_units(wiring, factor):
    """The same wiring in other units has the same plan."""
    topology = Topology(*wiring)
    links = [link._replace(bandwidth=link.bandwidth * factor) for link in topology.links]
    scaled = Topology(topology.devices, links, topology.switches)
    for collective in ("all_gather", "broadcast"):
        assert forest_of_all(scaled, collective) == forest_of_all(topology, collective)


@given(wirings((SYMMETRIC, DIRECTED), WHOLE, reducing=(False, True)), st.sampled_from(COLLECTIVES))
def test_plans_do_not_depend_on_names(wiring, collective):
    """If devices are renamed, only the names in the plan change."""
    topology = Topology(*wiring)
    names = [f"host{k}/cuda:{k}" for k in range(len(topology.devices))]
    one, two = forest_of_all(topology, collective).schedule, forest_of_all(topology.renamed(names), collective).schedule
    assert (one.chunks, one.rounds) == (two.chunks, two.rounds)
    assert two.devices[: len(names)] == tuple(names)
