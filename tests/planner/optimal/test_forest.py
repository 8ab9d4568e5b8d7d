"""Forests: they are correct and as fast as the bound, on any topology, known machines, and for any request."""

from collections import Counter
from fractions import Fraction

import oracle
import pytest
from budget import examples
from groups_oracle import best_rate
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from planning_oracle import DECIMAL, DIRECTED, LOOSE, LOPSIDED, ODD, SYMMETRIC, WHOLE, both_ways, reachable, wirings

from crossreduce import PlanError, Topology, bound, plan, verify
from crossreduce.planning import Request
from crossreduce.planning import forest as module
from crossreduce.planning.optimal.trees.fitting import MOST_TREES, TOLERANCE
from crossreduce.schedule import fluid_rate

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
CLOSE = 1 - TOLERANCE
# The phases of Hypothesis without shrinking, for slow tests: each attempt to shrink would take as long as the test.
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
    """Check that a forest verifies, sums correctly, counts its trees and has routes without loops. Return its rate."""
    schedule = found.schedule
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.algorithm == "forest"
    assert found.trees == len(schedule.chunks)
    assert set(schedule.devices) <= set(topology.nodes)
    for chunk, src, dst, through, _ in schedule.routes:
        nodes = [schedule.devices[src], *through, schedule.devices[dst]]
        assert len(set(nodes)) == len(nodes) > 2, f"the route of chunk {chunk} has a loop: {nodes}"
    return fluid_rate(schedule, topology)


def check_close(found, topology, wanted):
    """Check that the rate is the wanted one, or CLOSE to it with few trees. Return whether it is the wanted one."""
    rate = check_right(found, topology)
    assert rate <= wanted
    if rate < wanted:
        assert rate >= CLOSE * wanted
        assert found.trees <= MOST_TREES * len(topology.devices)
    return rate == wanted


@st.composite
def requested(draw):
    """Draw (topology, collective, sources, destinations). Other devices may forward and reduce."""
    topology = Topology(*draw(wirings((SYMMETRIC, DIRECTED, LOOSE), WHOLE, reducing=(False, False, True))))
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
    """Forests come close to the bound, 97 % of them exactly, also at switches with different bandwidths in and out."""
    counts = Counter()

    @examples(120)
    @given(wirings((SYMMETRIC, DIRECTED, LOPSIDED), WHOLE + ODD))
    def law(wiring):
        topology = Topology(*wiring)
        for collective in COLLECTIVES:
            counts[check_close(forest_of_all(topology, collective), topology, limit(topology, collective))] += 1

    law()
    assert counts[True] >= 0.97 * counts.total()
    assert counts.total() >= 100


@example(both_ways("0-1 3/8, 0-2 1/8, 0-s 1/8, 0-t 1/8, 2-s 5000"))
@examples(40, phases=UNSHRUNK)
@given(wirings((SYMMETRIC, DIRECTED, LOPSIDED), DECIMAL))
def test_decimal_bandwidths(wiring):
    """All collectives come close to their bounds if bandwidths are decimals of very different sizes."""
    topology = Topology(*wiring)
    for collective in COLLECTIVES:
        check_close(forest_of_all(topology, collective), topology, limit(topology, collective))


@examples(40)
@given(wirings((SYMMETRIC, DIRECTED), WHOLE + ODD), st.sampled_from([Fraction(1, 1000), 3, 2**20]))
def test_plans_do_not_depend_on_units_and_names(wiring, factor):
    """The same links in other units give the same plan. If devices are renamed, only the names in the plan change."""
    topology = Topology(*wiring)
    links = [link._replace(bandwidth=link.bandwidth * factor) for link in topology.links]
    scaled = Topology(topology.devices, links, topology.switches)
    for collective in ("all_gather", "broadcast"):
        assert forest_of_all(scaled, collective) == forest_of_all(topology, collective)
        names = [f"host{k}/cuda:{k}" for k in range(len(topology.devices))]
        found, renamed = (forest_of_all(each, collective).schedule for each in (topology, topology.renamed(names)))
        assert (renamed.chunks, renamed.rounds) == (found.chunks, found.rounds)
        assert renamed.devices[: len(names)] == tuple(names)


MACHINES = [
    ("dgx-1p", {}), ("dgx-1v", {}), ("dgx-2", {}), ("dgx-a100", {}), ("hgx-h100", {}), ("mi250", {}), ("mi300x", {}),
    ("pcie-8", {"speeds": "effective"}), ("nvlink-pairs-4", {"speeds": "effective"}), ("mi100", {}),
    ("hgx-h100", {"hosts": 2}), ("ndv2", {"hosts": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), MACHINES, ids=[f"{name}-{o.get('hosts', 1)}" for name, o in MACHINES])
def test_forests_of_machines(name, options):
    """On all devices of these machines, all five collectives reach the bound exactly."""
    topology = Topology.machine(name, **options)
    for collective in COLLECTIVES:
        assert check_close(forest_of_all(topology, collective), topology, limit(topology, collective)), collective


def test_partners_on_other_hosts_have_the_same_place():
    """Where a network's switch joins several GPUs of each host, GPU k exchanges data with GPU k of other hosts."""
    for options in ({"name": "dgx-a100", "nics": "hdr"}, {"name": "dgx-a100"}, {"name": "p4d"}):
        schedule = forest_of_all(Topology.machine(hosts=2, **options), "all_gather").schedule
        names = [[name.split("/") for name in schedule.devices][k] for k in range(16)]
        steps = {(names[step.dst][1], names[src][1]) for each in schedule.rounds for step in each for src in step.srcs
                 if names[step.dst][0] != names[src][0]}  # fmt: skip
        assert steps == {(f"cuda:{k}", f"cuda:{k}") for k in range(8)}


@pytest.mark.parametrize(("name", "rate", "depth"), [("hgx-h100", 450, 2), ("gb200-nvl72", 900, 1)])
def test_switches_in_the_network_reduce(name, rate, depth):
    """If the switch combines and multicasts, each device sends and receives its buffer once."""
    topology = Topology.machine(name, in_network=True)
    found = forest_of_all(topology, "all_reduce")
    assert check_right(found, topology) == rate
    # The root is a device, two hops from the others. On a large machine, a tree found by symmetry begins at the switch.
    assert (found.trees, found.depth) == (1, depth)
    assert found.schedule.devices == (*topology.devices, "nvswitch")


def test_machines_are_planned_with_k_trees():
    """k, the number of trees and (for k = 1) the depth of an all-gather are those of ForestColl's paper."""
    for name, k, trees in (("dgx-1v", 6, 16), ("dgx-2", 1, 16), ("mi300x", 1, 8), ("mi250", 3, 24)):
        found = forest_of_all(Topology.machine(name), "all_gather")
        assert (found.k, found.trees) == (k, trees)
        assert found.depth == 1 or k > 1


def check_request(topology, collective, sources, destinations):
    """Check the forest of a request: its devices, sums and rate, or the error if there is no route."""
    if not joined(topology, sources, destinations):
        with pytest.raises(PlanError, match=r"needs a route from \S+ to .*, but no link leads out of {"):
            forest(topology, collective, sources, destinations)
        return
    members = tuple(dict.fromkeys([*sources, *destinations]))
    several = collective == "all_reduce" and min(len(sources), len(destinations)) > 1
    if several and not joined(topology, members, members):
        with pytest.raises(PlanError, match=r"by trees needs a route from \S+ to .*, but no link leads out of {"):
            forest(topology, collective, sources, destinations)
        return
    found = forest(topology, collective, sources, destinations)
    rate, schedule = check_right(found, topology), found.schedule
    assert schedule.devices[: len(members)] == members
    assert all(node in topology.nodes for node in schedule.devices)
    for chunk in schedule.chunks:
        assert collective == "all_gather" or tuple(schedule.devices[k] for k in chunk.sources) == sources
        assert collective == "reduce_scatter" or tuple(schedule.devices[k] for k in chunk.destinations) == destinations
    if collective in ("reduce_scatter", "all_gather"):
        wanted = bound(topology, collective, devices=members).algbw
    else:
        wanted = plan(topology, "all_reduce", 1, "forest", sources, destinations).bound.algbw
    if wanted is None:
        assert rate is None
    elif rate is not None:
        assert rate <= wanted


@examples(250)
@given(requested())
def test_any_sources_and_destinations(ask):
    """Forests give the correct sums for any sources and destinations.

    If a source cannot reach a destination, the error names both. Other unreachable devices do not matter.
    """
    check_request(*ask)


@pytest.mark.parametrize(
    ("links", "destinations"), [("02 03 12 13", ("cpu:2", "cpu:3")), ("01 10 12 23 32", ("cpu:1", "cpu:2", "cpu:3"))]
)
def test_no_way_back_from_destinations_to_sources(links, destinations):
    """An all-reduce to several destinations needs routes back from them to its sources; to one, it needs none."""
    topology = Topology([f"cpu:{k}" for k in range(4)], [(f"cpu:{a}", f"cpu:{b}", 1) for a, b in links.split()])
    words = r"all_reduce by trees needs a route from cpu:\d to .*, but no link leads out of {"
    with pytest.raises(PlanError, match=words):
        forest(topology, "all_reduce", ("cpu:0", "cpu:1"), destinations)
    for destination in destinations:
        check_right(forest(topology, "all_reduce", ("cpu:0", "cpu:1"), (destination,)), topology)


ONE_WAY = ("broadcast", "reduce", "all_gather", "reduce_scatter")


@examples(80)
@given(wirings((LOPSIDED, DIRECTED, SYMMETRIC), WHOLE + ODD, most_devices=4), st.sampled_from(COLLECTIVES))
def test_bounds_are_the_best_rate_of_any_trees(wiring, collective):
    """If switches only forward, the bound is the best rate of any trees, and the forest reaches it."""
    topology = Topology(*wiring)
    root = topology.devices[0] if collective in ("broadcast", "reduce") else None
    limit = bound(topology, collective, root)
    limit.check()
    assert float(limit.algbw) == pytest.approx(best_rate(topology, collective, topology.devices), rel=1e-6)
    check_close(forest_of_all(topology, collective), topology, limit.algbw)


@examples(80)
@given(wirings((LOPSIDED, DIRECTED, SYMMETRIC), WHOLE, 4, reducing=(True, True, False)), st.sampled_from(ONE_WAY))
def test_trees_branch_at_switches_that_multicast(wiring, collective):
    """Forests come close to the rate of the best trees that branch at devices and at switches that reduce."""
    topology = Topology(*wiring)
    rate = check_right(forest_of_all(topology, collective), topology)
    best = best_rate(topology, collective, topology.devices)
    assert float(CLOSE) * best * (1 - 1e-6) <= float(rate) <= best * (1 + 1e-6)
    root = topology.devices[0] if collective in ("broadcast", "reduce") else None
    assert rate <= bound(topology, collective, root).algbw


# The switch s receives 2 GB/s from cpu:0, for cpu:1 and cpu:2. A link of 1 GB/s leads directly to cpu:1.
BYPASS = [
    ("cpu:0", "s", 2), ("s", "cpu:1", 2), ("s", "cpu:2", 3), ("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:2", 1),
    ("cpu:1", "cpu:0", 5), ("cpu:2", "cpu:0", 5),
]  # fmt: skip


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_some_trees_branch_at_a_switch_and_others_do_not(collective):
    """If a switch has too little bandwidth for all trees, only some of them branch there."""
    topology = Topology(["cpu:0", "cpu:1", "cpu:2"], BYPASS, [("s", True)])
    topology = topology.reversed() if collective == "reduce" else topology
    # Trees of 2 GB/s together branch at the switch, and a tree of 1 GB/s uses the direct link.
    assert check_right(forest_of_all(topology, collective), topology) == bound(topology, collective, "cpu:0").algbw == 3
    # Without multicast, cpu:1 and cpu:2 receive at most 4 GB/s, 2 each: 2 from the switch and 1 over each other link.
    plain = topology.with_switches(reducing=False)
    assert check_right(forest_of_all(plain, collective), plain) == bound(plain, collective, "cpu:0").algbw == 2
