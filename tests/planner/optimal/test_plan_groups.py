"""Plans of several groups on shared links: the rates are max-min fair, proved, and reached at the same time."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from budget import examples
from groups_oracle import Group, best_rates
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, SYMMETRIC, WHOLE, carried_shares, wirings

import crossreduce as cr
from crossreduce import ArgumentError, Costs, PlanError, Topology
from crossreduce.planning.groups.groups_bound import RateLevel
from crossreduce.planning.groups.separate_plans import shared_rates
from crossreduce.planning.optimal.bounds.steiner import MANY, few_enough
from crossreduce.schedule import verify

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
LINE = Topology(
    ["cpu:0", "cpu:1", "cpu:2"],
    [("cpu:0", "cpu:1", 10), ("cpu:1", "cpu:0", 10), ("cpu:1", "cpu:2", 30), ("cpu:2", "cpu:1", 30)],
)


def mesh(topology, *shape):
    """Return a topology and the groups of all dimensions of a mesh of its devices."""
    return topology, cr.mesh_groups(topology.devices, shape)


MACHINES = {  # (topology, groups, rates that occur)
    "dgx-1v 2 x TP4": (Topology.machine("dgx-1v"), [range(4), range(4, 8)], {75}),
    "dgx-1v 2 x 4": (*mesh(Topology.machine("dgx-1v"), 2, 4), {Fraction(75, 2), Fraction(200, 3)}),
    "mi300x 2 x 4": (*mesh(Topology.machine("mi300x"), 2, 4), {Fraction(2560, 19)}),
    "mi250 2 x 8": (*mesh(Topology.machine("mi250"), 2, 8), {Fraction(75, 2), 75}),
    "torus 4 x 4": (*mesh(Topology.torus(4, 4, gb_per_s=25), 4, 4), {Fraction(100, 3)}),
    "hgx-h100 x 2": (*mesh(Topology.machine("hgx-h100", 2), 2, 8), {50, Fraction(1800, 7)}),
}
SLOW = ("mi250 2 x 8", "torus 4 x 4")
BOX = Topology.machine("mi300x").subset(range(6))


def check(plan):
    """Check schedules and proof, that all groups together fit the links, and that separate plans are not better."""
    plan.check()
    width = {(link.src, link.dst): link.bandwidth for link in plan.topology.links}
    used = Counter()  # the GB/s that each link carries while all groups run at their rates
    for one, rate in zip(plan.plans, plan.rates, strict=True):
        for pair, share in carried_shares(one.schedule):
            used[pair] += share * rate
    assert all(load <= width[pair] for pair, load in used.items())
    moving = [rate for rate in plan.rates if rate is not None]
    assert not moving or max(load / width[pair] for pair, load in used.items()) == 1  # otherwise all could be faster
    for one, rate, group in zip(plan.plans, plan.rates, plan.groups, strict=True):
        verify(one.schedule)
        assert one.rate == rate
        assert {*one.request.sources, *one.request.destinations} == set(group)
        positions = {one.schedule.devices.index(device) for device in one.request.sources}
        assert {source for chunk in one.schedule.chunks for source in chunk.sources} == positions
    for separate in (plan.separate, plan.separate_without_helpers):
        if separate is not None:
            assert in_order(separate.rates, plan.weights) <= in_order(plan.rates, plan.weights)


def in_order(rates, weights):
    """Return all rates / weights, sorted. A plan is better if its list is greater in lexicographic order."""
    return sorted(rate / weight for rate, weight in zip(rates, weights, strict=True) if rate is not None)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MACHINES])
def test_meshes_of_machines(name):
    """Groups of common jobs have the known rates, which are proved exactly and reached at the same time."""
    topology, groups, rates = MACHINES[name]
    plan = cr.plan_groups(topology, groups)
    check(plan)
    assert plan.ratio == 1
    assert set(plan.rates) == rates


@pytest.mark.parametrize(
    ("weights", "rates", "levels"),
    [
        (None, (5, 25, 5), [(0, 2), (1,)]),
        ((1, 1, 3), (Fraction(5, 2), Fraction(45, 2), Fraction(15, 2)), [(0, 2), (1,)]),
        ((1, 0.1, 1), (5, 25, 5), [(0, 2), (1,)]),
        ((4, 20, 1), (Fraction(60, 7), Fraction(200, 7), Fraction(10, 7)), [(1, 2), (0,)]),
    ],
)
def test_two_links_and_three_groups(weights, rates, levels):
    """The rates and levels of three groups on LINE are the max-min rates that were computed on paper.

    Group 2 uses both links. It shares the first with group 0, and the second with group 1. The first link has 10 GB/s
    in each direction, so groups 0 and 2 have 10 GB/s together. Group 1 has the rest of the second link's 30 GB/s.
    """
    plan = cr.plan_groups(LINE, [(0, 1), (1, 2), (0, 2)], weights)
    check(plan)
    assert plan.rates == rates
    assert [level.groups for level in plan.bound.levels] == levels


def test_rates_are_fixed_and_not_trees():
    """A level fixes rates, not trees: two groups move off the links that a third group needs at a later level."""
    links = [("cpu:0", "cpu:1", 10), ("cpu:0", "cpu:2", 40), ("cpu:2", "cpu:1", 10), ("cpu:2", "cpu:3", 20)]
    both = Topology([f"cpu:{k}" for k in range(4)], [*links, *((b, a, width) for a, b, width in links)])
    plan = cr.plan_groups(both, [(0, 1), (0, 1), (2, 3)], [1, 1, 1])
    check(plan)
    assert plan.rates == (10, 10, 20)
    one_way = Topology(both.devices, [("cpu:0", "cpu:2", 10), ("cpu:2", "cpu:1", 10), ("cpu:0", "cpu:3", 10),
                                      ("cpu:3", "cpu:1", 10), ("cpu:1", "cpu:0", 1)])  # fmt: skip
    plan = cr.plan_groups(one_way, [(0, 1), (0, 2), (1, 0)], collective="broadcast", roots=[0, 0, 1])
    check(plan)
    assert plan.rates == (10, 10, 1)


@pytest.mark.parametrize(("wide", "weights"), [(10**4, (1000, 1, 1000)), (10**6, (1, 1000, 30))])
def test_uneven_links_and_weights(wide, weights):
    """Rates are also exact if they differ by a factor of millions."""
    links = [("cpu:0", "cpu:1", wide), ("cpu:1", "cpu:0", wide), ("cpu:1", "cpu:2", 1), ("cpu:2", "cpu:1", 1)]
    plan = cr.plan_groups(Topology(LINE.devices, links), [(0, 1), (0, 2), (1, 2)], weights)
    check(plan)
    assert plan.ratio == 1
    narrow = [Fraction(weight, weights[1] + weights[2]) for weight in weights[1:]]  # both share the narrow link
    assert plan.rates == (wide - narrow[0], *narrow)


@st.composite
def several(draw, topology):
    """Draw groups of a topology's devices, each as (collective, members, root, weight)."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.lists(st.sampled_from(topology.devices), min_size=1, max_size=3, unique=True))
        collective = draw(st.sampled_from(COLLECTIVES))
        root = draw(st.sampled_from(members)) if collective in ("broadcast", "reduce") else None
        groups.append((collective, tuple(members), root, draw(st.sampled_from([1, 1, 2, Fraction(1, 3)]))))
    return groups


def planned(topology, groups):
    collectives, members, roots, weights = zip(*groups, strict=True)
    return cr.plan_groups(topology, members, weights, collective=collectives, roots=roots, nbytes="1M")


@examples(40)
@given(st.data())
def test_rates_are_those_of_all_trees(data):
    """The rates are the optimum of linear programs over all possible trees of all groups, and are reached together."""
    topology = Topology(*data.draw(wirings((DIRECTED, SYMMETRIC), WHOLE, 4, 1, (True, False))))
    groups = data.draw(several(topology))
    plan = planned(topology, groups)
    check(plan)
    assert plan.ratio == 1
    moving = [Group(*group[:3], float(group[3])) for group in groups if len(group[1]) > 1]
    assume(moving)
    best = best_rates(topology, moving)
    assert [float(rate) for rate in plan.rates if rate is not None] == pytest.approx(best, rel=1e-6)


@examples(25)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 5, 1, (True, False)), st.data())
def test_one_group_has_the_rate_of_its_bound(wiring, data):
    """A single group has the rate of its bound, for any weight."""
    topology = Topology(*wiring)
    members = data.draw(st.lists(st.sampled_from(topology.devices), min_size=2, unique=True))
    collective = data.draw(st.sampled_from(COLLECTIVES))
    weight = data.draw(st.sampled_from([1, 7, 0.3]))
    plan = cr.plan_groups(topology, [members], [weight], collective=collective)
    check(plan)
    limit = cr.bound(topology, collective, plan.plans[0].root, members)
    if len(members) < len(topology.devices) or not topology.switches:
        assert plan.rates[0] == limit.algbw  # otherwise, only cuts prove the bound, which may be higher
    assert plan.plans[0].ratio == 1


def test_rates_of_separate_plans():
    """``shared_rates`` returns the max-min rates that were computed on paper, with and without weights."""
    a, b, c = ("0", "1"), ("1", "2"), ("2", "3")
    widths = {a: Fraction(10), b: Fraction(20), c: Fraction(9)}
    one, two = Fraction(1), Fraction(2)
    # The first link limits the first two plans to 10 / 3; the third plan then has the rest of the second link.
    shares = [{a: one}, {a: two, b: one}, {b: one}]
    assert shared_rates(widths, shares, [one] * 3) == (Fraction(10, 3), Fraction(10, 3), Fraction(50, 3))
    assert shared_rates(widths, shares, [two, one, one]) == (5, Fraction(5, 2), Fraction(35, 2))
    assert shared_rates(widths, [{}, {c: Fraction(1, 3)}], [one, one]) == (None, 27)
    assert shared_rates(widths, [{a: one}, {c: one}], [one, one]) == (10, 9)


def test_losses_compare_with_the_plans_of_each_group():
    """``separate`` has the plans that ``plan`` makes for each group, and their rates while all groups run."""
    plan = cr.plan_groups("dgx-1v", [range(4), range(4, 8)])
    alone = cr.plan("dgx-1v", participants=range(4), algorithm="forest")
    assert plan.separate.plans[0].schedule.rounds == alone.schedule.rounds
    assert plan.separate.plans[0].rate == alone.rate == Fraction(325, 3)
    assert plan.separate.rates == (Fraction(325, 6), Fraction(325, 6))
    assert plan.losses == (Fraction(5, 18), Fraction(5, 18))
    assert plan.separate_without_helpers.rates == (75, 75)
    apart = cr.plan_groups("dgx-1v", [(0, 5), (1, 4)])
    assert apart.separate_without_helpers is None  # 0 and 5 have no link
    assert apart.rates == (75, 75)


@pytest.fixture(scope="module")
def two_levels():
    """A plan whose groups are fixed at two levels, at different rates."""
    plan = cr.plan_groups(LINE, [(0, 1), (1, 2), (0, 2)], [1, 1, 3])
    assert len(plan.bound.levels) == 2
    return plan


def test_forged_certificates_are_refused(two_levels):
    """``check`` refuses a certificate with a changed rate, price, level or group."""
    bound = two_levels.bound
    first, second = bound.levels
    src, dst, price = first.prices[0]
    others = first.prices[1:]

    def with_first(**changes):
        return replace(bound, levels=(first._replace(**changes), second))

    for forged, text in (
        (with_first(rate=first.rate * Fraction(101, 100)), "does not prove the rates"),
        (with_first(prices=(*first.prices, ("cpu:1", "cpu:2", price))), "does not prove the rates"),
        (with_first(prices=((src, dst, -price), *others)), "0 or more"),
        (with_first(prices=(("cpu:0", "cpu:2", price), *others)), "each link"),
        (with_first(prices=((src, dst, 0.5), *others)), "ints or Fractions"),
        (with_first(prices=()), "trees cost 0"),
        (with_first(groups=(0, 1, 2)), "trees cost 0"),
        (with_first(groups=(0, 2, 7)), "one or more groups"),
        (replace(bound, levels=(second, first)), "does not prove the rates"),
        (replace(bound, levels=(first, second._replace(rate=first.rate / 2))), "not decrease"),
        (replace(bound, levels=(first,)), "must have a level"),
        (replace(bound, levels=(first, first)), "no earlier level has fixed"),
        (replace(bound, levels=(RateLevel(Fraction(0), *first[1:]), second)), "above 0"),
        *(
            (replace(bound, groups=(bound.groups[0]._replace(**change), *bound.groups[1:])), text)
            for change, text in (
                ({"weight": Fraction(2)}, "does not prove"),
                ({"weight": 0}, "weight must be"),
                ({"collective": "gossip"}, "has this name"),
                ({"members": ("cpu:9",)}, "in the topology"),
                ({"members": ("cpu:0",) * 2}, "once"),
                ({"root": "cpu:0"}, "have no root"),
                ({"collective": "reduce"}, "must be in its"),
            )
        ),
    ):
        with pytest.raises(PlanError, match=text):
            forged.check()


def test_plans_that_do_not_fit_are_refused(two_levels):
    """``check`` of a plan refuses other rates, fuller links, a wrong schedule, and a proof for another topology."""
    plans = two_levels.plans
    wide = plans[0].request._replace(topology=LINE)
    narrow = Topology(LINE.devices, [link._replace(bandwidth=link.bandwidth / 2) for link in LINE.links])
    for forged, text in (
        (replace(two_levels, plans=(plans[1], plans[0], plans[2])), "another collective or rate"),
        (replace(two_levels, plans=(replace(plans[0], request=wide), *plans[1:])), "another collective or rate"),
        (replace(two_levels, topology=narrow), "more than the bandwidth of a link"),
    ):
        with pytest.raises(PlanError, match=text):
            forged.check()
    other = replace(two_levels, topology=Topology(LINE.devices, [link._replace(latency_s=1) for link in LINE.links]))
    with pytest.raises(PlanError, match="for another topology"):
        other.check()
    broken = replace(plans[0].schedule, rounds=plans[0].schedule.rounds[:-1])
    with pytest.raises(cr.ScheduleError, match="is lost"):
        replace(two_levels, plans=(replace(plans[0], schedule=broken), *plans[1:])).check()


def test_groups_of_many_members():
    """Groups with too many members to find the cheapest trees also reach the proved rates."""
    topology, groups = Topology.mesh(2, 7), [range(13), range(1, 14)]
    assert not few_enough(len(groups[0]), len(topology.devices), MANY)
    plan = cr.plan_groups(topology, groups)
    check(plan)
    assert plan.ratio == 1


def test_links_that_share_a_limit():
    """Groups divide a limit that links share in proportion to their loads on the links. Its parts sum to the limit."""
    machine = Topology.machine("hgx-h100", 2)
    topology = machine.subset([f"host{h}/cuda:{k}" for h in (0, 1) for k in (0, 1)])
    groups = cr.mesh_groups(topology.devices, (2, 2))
    shared = cr.both_directions(topology, 60)
    free = cr.plan_groups(topology, groups, costs=Costs(operation_s=0))
    limited = cr.plan_groups(topology, groups, costs=Costs(operation_s=0, shared=shared))
    assert limited.rates == free.rates
    total = sum(limit.gb_per_s for one in limited.plans for limit in one.request.costs.shared)
    assert total == pytest.approx(60 * len(shared))
    assert limited.seconds[0] > free.seconds[0] * 1.5  # 50 GB/s in each direction need 100, and the limit is 60
    assert limited.seconds[2] == free.seconds[2]  # a group within a host does not use these links
    pair = Topology.full_mesh(2, gb_per_s=10)
    half = [(12, [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")])]
    twice = cr.plan_groups(pair, [(0, 1), (0, 1)], [1, 3], costs=Costs(shared=half))
    assert [one.request.costs.shared[0].gb_per_s for one in twice.plans] == [3, 9]
    with pytest.raises(ArgumentError, match="links of the topology"):
        cr.plan_groups("hgx-h100", [range(8)], costs=Costs(shared=shared))


def test_sizes_and_collectives_of_groups():
    """Each group may have its own collective, root and number of bytes. In a group of one device nothing moves."""
    plan = cr.plan_groups(
        BOX, [range(2), (3, 2, 4), [5]], [1, 2, 1], collective=["all_gather", "broadcast", "reduce"],
        nbytes=["1M", 1 << 20, 0], roots=[None, "cuda:2", 5],
    )  # fmt: skip
    check(plan)
    assert [one.collective for one in plan.plans] == ["all_gather", "broadcast", "reduce"]
    assert [one.nbytes for one in plan.plans] == [1 << 20, 1 << 20, 0]
    assert [one.root for one in plan.plans] == [None, "cuda:2", "cuda:5"]
    assert (plan.rates[2], plan.seconds[2], plan.losses[2]) == (None, 0, 0)
    assert plan.groups[1] == ("cuda:3", "cuda:2", "cuda:4")
    assert plan.weights == (1, 2, 1)
    lone = cr.plan_groups(BOX, [[3]])
    check(lone)
    assert lone.bound.levels == ()
    assert "no data has to move" in lone.explain()
    assert str(lone) == "1 group on 6 devices: - GB/s"
    assert cr.plan_groups(BOX, [range(2)], collective="broadcast").plans[0].root == "cuda:0"


def test_the_same_request_is_planned_once():
    """A repeated request returns the same object, also if devices, weights or sizes are written differently."""
    first = cr.plan_groups("dgx-1v", [range(4), range(4, 8)])
    names = [[f"cuda:{k}" for k in range(4)], [f"GPU:{k}" for k in range(4, 8)]]
    assert cr.plan_groups(Topology.machine("dgx-1v"), names, (1, 1.0), nbytes="64M") is first


APART = Topology(["cpu:0", "cpu:1", "cpu:2"], [("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:0", 1), ("cpu:0", "cpu:2", 1)])
UNEVEN = Topology(["cpu:0", "cpu:1"], [("cpu:0", "cpu:1", 10**7), ("cpu:1", "cpu:0", 1)])


@pytest.mark.parametrize(
    ("groups", "others", "text"),
    [
        ([], {}, "at least one group"),
        ("0-3", {}, "list of lists"),
        ([[0, 1], []], {}, "^group 1: at least one device"),
        *(([[0, 1], wrong], {}, "^group 1: devices must be a list") for wrong in ("01", 2)),
        *(([[0, wrong]], {}, "^group 0: each device may be listed only once") for wrong in (0, "cpu:0")),
        ([[0, 9]], {}, "^group 0: "),
        *(([[0, 1]], {"weights": wrong}, "weights must have one entry per group") for wrong in ([1, 1], 1)),
        *(([[0, 1]], {"weights": [wrong]}, "finite number above 0") for wrong in (0, float("nan"), True, "1")),
        ([[0, 1], [1, 2]], {"weights": [1, 10**7]}, "factor of at most a million"),
        *(([[0, 1]], {"collective": wrong}, "no such collective") for wrong in ("gossip", [3])),
        *(([[0, 1]], {"collective": wrong}, "must have one entry per group") for wrong in (3, ["reduce", "reduce"])),
        ([[0, 1]], {"nbytes": -1}, "nbytes must be an integer"),
        *(([[0, 1]], {"nbytes": wrong}, "nbytes must have one entry per group") for wrong in ([1, 2], 1.5)),
        ([[0, 1]], {"roots": [0, 1], "collective": "reduce"}, "roots must have one entry per group"),
        ([[0, 1]], {"roots": [0]}, "^group 0: all_reduce has no root"),
        ([[0, 1]], {"roots": [2], "collective": "reduce"}, "^group 0: the root must be in its group"),
        ([[0, 1]], {"operation_s": -1}, "operation_s"),
        ([[0, 1]], {"costs": 3}, "Costs"),
    ],
)
def test_invalid_arguments(groups, others, text, monkeypatch):
    """An invalid argument is reported before anything is planned. An error about one group states its number."""
    monkeypatch.setattr("crossreduce.planning.groups.groups.shared_links", None)  # a call would fail
    with pytest.raises(ArgumentError, match=text):
        cr.plan_groups(LINE, groups, **others)


def test_groups_that_cannot_be_planned():
    """An unreachable device, bandwidths that differ too much, and an unknown machine are errors."""
    with pytest.raises(PlanError, match=r"^group 1: all_reduce needs a route from cpu:2"):
        cr.plan_groups(APART, [(0, 1), (1, 2)])
    assert cr.plan_groups(APART, [(0, 1), (1, 2)], collective="broadcast", roots=[0, 1]).rates == (1, 1)
    with pytest.raises(PlanError, match="differ by a factor of more than a million"):
        cr.plan_groups(UNEVEN, [(0, 1)])
    with pytest.raises(ArgumentError, match="no machine"):
        cr.plan_groups("dgx-9", [(0, 1)])


def test_groups_of_a_mesh():
    """The groups of a dimension are the lines along it, as in PyTorch's DeviceMesh. Sizes must fit the devices."""
    names = [str(k) for k in range(8)]
    assert cr.mesh_groups(names, (2, 2, 2)) == tuple(tuple(line) for line in (
        "04", "15", "26", "37", "02", "13", "46", "57", "01", "23", "45", "67"))  # fmt: skip
    assert cr.mesh_groups(names, [8]) == (tuple(names),)
    assert cr.mesh_groups(names, (8, 1))[1:] == tuple((name,) for name in names)
    for shape, text in (((2, 3), "product of a mesh's sizes"), ((), "integers above 0"), ((0,), "above 0"),
                        ((True, 8), "above 0"), ((2.0, 4), "above 0")):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            cr.mesh_groups(names, shape)


def test_the_text_shows_rates_and_losses():
    """``explain`` shows the levels, each group, and the loss with separate plans."""
    plan = cr.plan_groups("dgx-1v", [range(4), range(4, 8)], weights=[1, 3])
    lines = plan.explain().splitlines()
    assert lines[0] == "all_reduce of 2 groups at the same time on 8 devices, which share the links"
    assert lines[2:4] == [
        "  rate      36.11 GB/s (exactly 325/9) x weight: group 1",
        "  rate      41.67 GB/s (exactly 125/3) x weight: group 0",
    ]
    assert "at least 27.08 GB/s x weight instead of 36.11, a loss of 25 %" in lines[4]
    assert lines[7].split()[:8] == ["0", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "41.67", "108.33", "27.08"]
    assert "cuda:7 x 3" in lines[8]
    many = cr.plan_groups(Topology.full_mesh(2), [(0, 1)] * 40, weights=range(1, 41))  # 32 groups are listed
    assert "and 8 more" in many.explain()
    alike = cr.plan_groups(Topology.full_mesh(2), [(0, 1)] * 40)
    assert "and 39 groups of 2 devices with these numbers: 1-39" in alike.explain()
    pairs = [(f"cpu:{2 * k}", f"cpu:{2 * k + 1}", speed) for k, speed in enumerate((10, 20, 20, 20))]
    links = [one for a, b, speed in pairs for one in ((a, b, speed), (b, a, speed))]
    unequal = cr.plan_groups(Topology([f"cpu:{k}" for k in range(8)], links), [pair[:2] for pair in pairs]).explain()
    assert [line.split()[:4] for line in unequal.splitlines() if line.startswith("    ")] == [
        ["0", "cpu:0", "cpu:1", "10.00"],
        ["1", "cpu:2", "cpu:3", "20.00"],
        ["and", "2", "groups", "of"],
    ]
    apart = cr.plan_groups("dgx-1v", [(0, 5), (1, 4)]).explain()
    assert "some groups are not connected" in apart


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_text_fits_a_width(printed, monkeypatch, width):
    """No line is longer than the terminal. In a narrow one, names are above the numbers. The command prints the machine
    and itself below the head, and then the same text."""
    plan = cr.plan_groups(Topology.machine("hgx-h100", 2), cr.mesh_groups(range(16), (2, 8)), weights=[2] * 8 + [1] * 2)
    lines = plan.explain(width).splitlines()
    assert max(map(len, lines)) <= width
    named = lines.index("    0 host0/cuda:0 host1/cuda:0 x 2") if width == 60 else -1
    assert (lines[named + 1].split()[:2] == ["50.00", "400.00"]) == (width == 60)
    assert sum("with these numbers: 1-7" in line for line in lines) == 1
    monkeypatch.setenv("COLUMNS", str(width))
    shown = printed("groups", "hgx-h100", "2x8", "--hosts", "2", "--weights", ",".join("2222222211")).splitlines()
    about = next(k for k, line in enumerate(shown) if line.startswith("  machine   hgx-h100, 2 hosts"))
    assert shown[:about] + shown[-len(lines) + about :] == lines
    assert shown[about + 1].startswith("  command   crossreduce groups hgx-h100 2x8")
    assert max(map(len, shown)) <= width


def test_the_command_line(printed, crossreduce):
    """The command ``groups`` plans listed groups and meshes, as text or JSON. Invalid options are errors."""
    text = printed("groups", "dgx-1v", "0-3;4-7")
    assert "rate      75.00 GB/s: groups 0, 1" in text
    found = json.loads(printed("groups", "hgx-h100", "2x8", "--hosts", "2", "--json"))
    assert [group["rate"]["exact"] for group in found["groups"]] == ["50"] * 8 + ["1800/7"] * 2
    assert found["groups"][0]["devices"] == ["host0/cuda:0", "host1/cuda:0"]
    assert [level["groups"] for level in found["levels"]] == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert found["ratio"]["exact"] == "1"
    weighted = json.loads(printed("groups", "dgx-1v", "0-3;4-7", "--weights", "1,2.5", "--json"))
    assert [group["weight"]["exact"] for group in weighted["groups"]] == ["1", "5/2"]
    for options, problem in (
        (("0-3;4-9",), "not one of the numbers 0 to 7"),
        (("0-3;3,3",), "only once"),
        (("2y4",), "not one of the numbers"),
        (("2x5",), "product of a mesh's sizes"),
        (("2x4", "--weights", "1,2"), "2 for 6 groups"),
        (("0-3;4-7", "--weights", "1,0"), "numbers above 0"),
    ):
        code, _, text = crossreduce("groups", "dgx-1v", *options)
        assert code == 2
        assert problem in text
