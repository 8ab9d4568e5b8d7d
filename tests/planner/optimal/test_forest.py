"""Forests: they are right and as fast as the bound, on any wiring, known machines, and for any request."""

import itertools
from collections import Counter
from fractions import Fraction

import oracle
import planning_oracle
import pytest
from budget import examples
from groups_oracle import Group, best_rates
from hypothesis import Phase, assume, example, given
from hypothesis import strategies as st
from planning_oracle import (
    DECIMAL,
    DIRECTED,
    LOOSE,
    LOPSIDED,
    ODD,
    SYMMETRIC,
    WHOLE,
    TooManyTreesError,
    Wiring,
    both_ways,
    reachable,
    wirings,
)

from crossreduce import PlanError, Topology, bound, plan, verify
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
    """Check that the rate is the wanted one, or little less with few trees. Return whether it is the wanted one."""
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
    """Where switches have equal bandwidth in and out, all collectives reach the bound, nearly always exactly."""
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
    """At uneven switches all collectives reach their bounds, the best rates of any trees."""
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
    """If switches reduce, an all-reduce is at least as fast as without, and the others reach their bounds."""
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


def test_damaged_dgx_1s_reach_their_bound():
    """All connected subsets of a DGX-1V, and all with a lost link, reach the bound of an all-reduce."""
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
    """If a source cannot reach a destination, the error names both; other unreachable devices do not matter."""
    check_request(*ask)


@pytest.mark.parametrize(
    ("links", "destinations"), [("02 03 12 13", ("cpu:2", "cpu:3")), ("01 10 12 23 32", ("cpu:1", "cpu:2", "cpu:3"))]
)
def test_no_way_back_from_destinations_to_sources(links, destinations):
    """An all-reduce to several destinations needs ways back from them to its sources."""
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


ONE_WAY = ("broadcast", "reduce", "all_gather", "reduce_scatter")


def best_rate(topology, collective, members):
    """Return the rate of the best trees; too many trees: hypothesis draws another example."""
    root = members[0] if collective in ("broadcast", "reduce") else None
    try:
        return best_rates(topology, [Group(collective, members, root, 1.0)])[0]
    except TooManyTreesError:
        assume(False)


def forest_of(topology, collective, members):
    sources = members[:1] if collective == "broadcast" else members
    destinations = members[:1] if collective == "reduce" else members
    return forest(topology, collective, sources, destinations)


@examples(80)
@given(wirings((LOPSIDED, DIRECTED), WHOLE + ODD, most_devices=4), st.sampled_from(ONE_WAY))
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
    """Forests have the rate of the best trees that branch at devices and at switches that reduce."""
    topology = Topology(*wiring)
    rate = check_right(forest_of_all(topology, collective), topology)
    best = best_rate(topology, collective, topology.devices)
    assert float(CLOSE) * best * (1 - 1e-6) <= float(rate) <= best * (1 + 1e-6)
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
    assert float(CLOSE) * best * (1 - 1e-6) <= float(rate) <= best * (1 + 1e-6)


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
