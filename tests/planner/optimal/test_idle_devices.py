"""Plans in which devices that take no part forward and combine, compared with lists of all trees."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from math import lcm

import pytest
from budget import examples
from groups_oracle import Group, best_rates
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, SYMMETRIC, WHOLE, TooManyTreesError, wirings

import crossreduce as cr
from crossreduce import PlanError, Topology
from crossreduce.errors import ArgumentError
from crossreduce.planning.optimal.bounds.certificate import Cut
from crossreduce.planning.optimal.bounds.column_generation import TreeProgram, best_mixture
from crossreduce.planning.optimal.bounds.demand import Demand
from crossreduce.planning.optimal.bounds.steiner import few_enough
from crossreduce.planning.optimal.bounds.tree_prices import joints_of
from crossreduce.schedule import verify

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def planned(topology, collective, members):
    """Return the forest of some devices; the root of a reduce or broadcast is the first."""
    root = members[0] if collective in ("reduce", "broadcast") else None
    return cr.plan(topology, collective, "64M", "forest", root=root, participants=members, operation_s=0)


def check(plan):
    """Check that a plan is right and as fast as its bound, and that the bound is proved."""
    verify(plan.schedule)
    plan.bound.check()
    assert plan.ratio == 1
    assert plan.rate == plan.bound.algbw


@pytest.mark.parametrize("machine", ["dgx-1v", "mi300x", "hgx-h100", "pcie-8"])
def test_parts_of_a_machine_reach_the_bound(machine):
    """Parts of machines of eight, connected or not: the plan reaches the bound of the complete machine."""
    topology = Topology.machine(machine)
    for size in (2, 4, 7) if machine != "mi300x" else (3, 5):
        for collective in ("all_reduce", COLLECTIVES[1 + size % 4]):
            members = random.Random(f"{machine} {size} {collective}").sample(range(8), size)
            check(planned(topology, collective, tuple(topology.devices[k] for k in sorted(members))))


@pytest.mark.parametrize(
    ("machine", "width", "count"),
    [*(("hgx-h100", 450, n) for n in (2, 5, 7)), *(("dgx-2", 150, n) for n in (10, 15))],
)
def test_helpers_on_a_switch_are_as_good_as_published(machine, width, count):
    """On a switch, the rate of an all-reduce with helpers is that of BytePS (Jiang et al., OSDI 2020, section 4.1):
    n devices and k helpers need 2 n (n - 1) / (n**2 + k n - 2 k) times the buffer, but at least the buffer itself."""
    topology = Topology.machine(machine)
    n, k = count, len(topology.devices) - count
    needed = max(Fraction(1), Fraction(2 * n * (n - 1), n * n + k * n - 2 * k))
    plan = planned(topology, "all_reduce", tuple(f"cuda:{device}" for device in range(n)))
    check(plan)
    assert plan.rate == width / needed


@examples(80)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 5, 1, (True, False)), st.sampled_from(COLLECTIVES), st.integers(2, 4))
def test_bounds_are_the_rate_of_the_best_trees(wiring, collective, count):
    """The bound of a collective with helpers is the optimum of a program over all trees, and is reached."""
    topology = Topology(*wiring)
    members = topology.devices[:count]
    assume(len(topology.devices) > count)
    root = members[0] if collective in ("broadcast", "reduce") else None
    try:
        (best,) = best_rates(topology, [Group(collective, members, root, 1.0)])
    except TooManyTreesError:
        assume(False)
    plan = planned(topology, collective, members)
    check(plan)
    assert float(plan.rate) == pytest.approx(best, rel=1e-6)


ONE_WAY = "1 s1, 2 3, 2 4, 3 s1, 3 s1, 4 2, 4 0, 0 s0, s0 2, s1 1, s1 s0"


def test_a_helper_can_be_the_root_of_an_all_reduce():
    """Where links go in one direction only, the best tree may have its root at a helper; the bound allows that."""
    ends = [tuple(f"cpu:{end}" if end.isdigit() else end for end in pair.split()) for pair in ONE_WAY.split(", ")]
    links = [(src, dst, ends.count((src, dst))) for src, dst in dict.fromkeys(ends)]
    topology = Topology([f"cpu:{k}" for k in range(5)], links, [cr.Switch("s0", True), cr.Switch("s1", True)])
    plan = planned(topology, "all_reduce", ("cpu:1", "cpu:3", "cpu:0"))
    check(plan)
    assert plan.rate == 1


def test_helpers_of_one_way_collectives_need_no_way_back():
    """A broadcast passes devices that cannot send to the members that come before them."""
    links = [("cpu:0", "cpu:3", 2), ("cpu:3", "cpu:1", 2), ("cpu:3", "cpu:2", 2), ("cpu:0", "cpu:1", 1)]
    down = Topology([f"cpu:{k}" for k in range(4)], links)
    for topology, collective in ((down, "broadcast"), (down.reversed(), "reduce")):
        plan = planned(topology, collective, ("cpu:0", "cpu:1", "cpu:2"))
        check(plan)
        assert plan.rate == 2
        assert plan.helpers == ("cpu:3",)


@pytest.mark.parametrize(
    ("machine", "hosts", "count"),
    [("mi250", 1, 12), ("mi300x", 2, 13), pytest.param("dgx-1v", 2, 11, marks=pytest.mark.slow)],
)
def test_all_reduces_of_large_parts_reach_the_bound(machine, hosts, count):
    """With too many members for the cheapest trees, cheap ones reach the bound, too, and its prices prove it."""
    topology = Topology.machine(machine, hosts)
    members = set(random.Random(count).sample(topology.devices, count))
    assert not few_enough(count, len(topology.devices))
    plan = planned(topology, "all_reduce", tuple(device for device in topology.devices if device in members))
    verify(plan.schedule)
    plan.bound.check()
    assert plan.helpers
    assert plan.ratio == 1


def test_shares_of_many_trees_have_a_common_denominator():
    """The shares of many trees are multiples of one part of the buffer: few digits."""
    topology = Topology.torus(3, 3, 3)
    plan = planned(topology, "all_reduce", tuple(f"cpu:{k}" for k in range(2, 27)))
    verify(plan.schedule)
    assert plan.ratio > 1 - Fraction(1, 10**7)
    assert lcm(*(chunk.share.denominator for chunk in plan.schedule.chunks)) < 1 << 50
    assert "all_reduce" in plan.explain()


@pytest.mark.parametrize("both_ways", [True, False])
def test_all_reduces_on_random_graphs_are_near_the_bound(both_ways):
    """On graphs without structure, cuts prove what prices do not; links that go one way leave little unproved."""
    draw = random.Random(f"0 {both_ways}")
    n = draw.randint(12, 18)
    links = {}
    for _ in range(3):
        ring = draw.sample(range(n), n)
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            links[a, b] = width = draw.choice([1, 2, 5])
            if both_ways:
                links[b, a] = width
    topology = Topology([f"cpu:{k}" for k in range(n)], [(f"cpu:{a}", f"cpu:{b}", w) for (a, b), w in links.items()])
    plan = planned(topology, "all_reduce", topology.devices[: draw.randint(10, n - 1)])
    verify(plan.schedule)
    plan.bound.check()
    assert plan.ratio <= 1
    assert plan.ratio >= (1 - Fraction(1, 10**7) if both_ways else Fraction(9, 10))


def test_cuts_must_hold_for_roots_that_take_no_part():
    """Where links differ in their two directions, cuts of an all-reduce must count trees with a helper as root."""
    links = [("cpu:0", "cpu:2", 1), ("cpu:2", "cpu:0", 2), ("cpu:1", "cpu:2", 1), ("cpu:2", "cpu:1", 2)]
    topology = Topology([f"cpu:{k}" for k in range(3)], links)
    limit = cr.bound(topology, "all_reduce", devices=range(2))
    limit.check()
    assert limit.algbw == 1
    around = tuple(Cut(frozenset({device}), Fraction(1), True) for device in limit.devices)
    with pytest.raises(PlanError, match=r"contain a root (.|\n)*cpu:2"):
        replace(limit, algbw=Fraction(2), cuts=around, prices=()).check()


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "all_reduce"])
def test_in_large_parts_all_trees_use_the_same_helpers(collective):
    """With many members, other collectives than all-reduces try whole sets of helpers."""
    topology = Topology.machine("mi250")
    assert not few_enough(12, 16)
    plan = planned(topology, collective, topology.devices[:12])
    verify(plan.schedule)
    assert plan.ratio >= Fraction(98, 100)


@examples(60)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 6, 1, (True, False)), st.integers(2, 4), st.sampled_from([True, False]))
def test_cheap_trees_and_their_proof_bracket_the_best_rate(wiring, count, all_reduce):
    """Cheap trees are not faster than the best ones, and the prices that prove their rate allow the best ones."""
    topology = Topology(*wiring)
    assume(len(topology.devices) >= count)
    number = {node: k for k, node in enumerate(topology.nodes)}
    links = {(number[src], number[dst]): Fraction(bandwidth) for src, dst, bandwidth, _ in topology.links}
    joints = tuple(number[joint] for joint in joints_of(topology))
    members = tuple(range(count))
    demands = [Demand(Fraction(1), joints if all_reduce else (0,), members if all_reduce else (), members)]
    best = best_mixture(len(number), links, joints, demands)
    cheap = best_mixture(len(number), links, joints, demands, exact_up_to=0)
    assume(best is not None and best.rate)
    assert cheap.rate <= best.rate <= cheap.most
    assert best.rate == best.most


@pytest.fixture(scope="module", params=[("hgx-h100", 5), ("dgx-2", 10)])
def priced(request):
    """A bound that is proved by prices: some of the devices on a switch, few or many."""
    machine, count = request.param
    limit = cr.bound(machine, "all_reduce", devices=range(count))
    assert limit.prices
    assert not limit.cuts
    limit.check()
    return limit


def test_forged_prices_are_rejected(priced):
    """Prices prove the rate that the cheapest trees allow, and no other."""
    (src, dst, price), *others = priced.prices
    for forged, text in (
        (replace(priced, algbw=priced.algbw * Fraction(99, 100)), "does not prove"),
        (replace(priced, prices=((src, dst, price / 2), *others)), "does not prove"),
        (replace(priced, prices=((src, dst, -price), *others)), "0 or more"),
        (replace(priced, prices=(("cuda:0", "cuda:1", price), *others)), "each link"),
        (replace(priced, prices=((src, dst, price), *priced.prices)), "each link"),
        (replace(priced, prices=((priced.topology.devices[-1], "nvswitch", price),)), "join the devices cost 0"),
        (replace(priced, prices=((src, dst, 0.5), *others)), "ints or Fractions"),
        (replace(priced, cuts=cr.bound("hgx-h100", "all_reduce", devices=range(2)).cuts), "cuts or prices, not both"),
    ):
        with pytest.raises(PlanError, match=text):
            forged.check()


@pytest.mark.parametrize(("demands", "most"), [(1, 64), (2, 64), (16, 128)])
def test_a_round_adds_few_trees_of_many_demands(demands, most):
    """All demands together get about as many cheap trees in a round, so that a program of many demands stays small."""
    topology = Topology.torus(4, 4)
    number = {node: k for k, node in enumerate(topology.nodes)}
    links = {(number[src], number[dst]): bandwidth for src, dst, bandwidth, _ in topology.links}
    everyone = tuple(range(16))
    wanted = [Demand(Fraction(1), (root,), (), everyone) for root in range(demands)]
    program = TreeProgram(16, links, everyone, wanted, 0)
    rounds = [program.cheapest_trees(program.prices) for _ in range(3)]
    counts = [sum(len(columns) for _, columns in found) for found in rounds]
    assert demands <= min(counts)
    assert max(counts) <= most


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_roots_without_bytes(collective, priced):
    """A root with 0 bytes changes no bound; roots that all have 0 bytes prove nothing."""
    machine = Topology.machine("hgx-h100", 8)
    for topology, count in ((machine, 40), (machine, 64), (Topology.machine("mi300x"), 5)):
        one, two = (cr.bound(topology, collective, roots, range(count)) for roots in ({1: 1}, {0: 0, 1: 1}))
        two.check()
        assert one.algbw == two.algbw
    for roots in ((), ((priced.devices[0], Fraction(0)),)):
        with pytest.raises(PlanError, match="more than 0 bytes"):
            replace(priced, collective=collective, roots=roots).check()


def test_prices_of_devices_without_trees_are_rejected(priced):
    """Where no tree joins the devices, prices prove nothing."""
    one_way = Topology(["cpu:0", "cpu:1"], [("cpu:0", "cpu:1", 1)])
    roots = (("cpu:0", Fraction(1)), ("cpu:1", Fraction(1)))
    apart = replace(priced, topology=one_way, devices=one_way.devices, roots=roots)
    for collective, text in (("all_reduce", "join the devices cost 0"), ("all_gather", "does not prove")):
        with pytest.raises(PlanError, match=text):
            replace(apart, collective=collective, prices=(("cpu:0", "cpu:1", Fraction(1)),)).check()


@examples(50)
@given(st.lists(st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3)]), min_size=16, max_size=16))
def test_no_prices_prove_less_than_a_plan_reaches(prices):
    """Whatever the prices are, the rate that they prove is not below that of the best plan."""
    limit = cr.bound("hgx-h100", "all_reduce", devices=range(5))
    links = limit.topology.links
    forged = replace(limit, prices=tuple((a.src, a.dst, p) for a, p in zip(links, prices, strict=True) if p))
    assume(forged.prices)
    try:
        proved = forged._proved_by_prices()
    except PlanError:
        return  # they prove nothing
    assert proved >= limit.algbw


def test_participants_are_sources_and_destinations():
    """``participants`` is short for both; a root is one of them; nothing else can be given with it."""
    box = Topology.machine("mi300x")
    both = cr.plan(box, sources=range(4), destinations=range(4))
    assert cr.plan(box, participants=range(4)) == both
    assert both.helpers == ("cuda:4", "cuda:5", "cuda:6", "cuda:7")
    assert cr.plan(box).helpers == ()
    assert cr.plan(box, "reduce", root=2, participants=[1, 2]).request.sources == ("cuda:1", "cuda:2")
    assert cr.plan(box, "broadcast", participants=[1, 2]).request.destinations == ("cuda:1", "cuda:2")
    with pytest.raises(ArgumentError, match="neither can be given"):
        cr.plan(box, participants=range(4), sources=range(4))
    with pytest.raises(ArgumentError, match="root must take part"):
        cr.plan(box, "broadcast", root=7, participants=range(4))
    with pytest.raises(ArgumentError, match="at least one device"):
        cr.plan(box, participants=[])


def test_the_text_says_what_helpers_gain():
    """``explain`` names the helpers, and compares with the bound without them, if there is one."""
    box = Topology.machine("dgx-1v")
    assert (
        "cuda:4, cuda:6, cuda:7 forward and combine; 2.17 x the bound without them, 50.00 GB/s"
        in planned(box, "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:5")).explain()
    )
    apart = planned(box, "all_reduce", ("cuda:0", "cuda:5"))
    assert apart.bound_without_helpers is None
    assert "without them some devices cannot be reached" in apart.explain()
    assert "export it for another tool" in apart.explain()
    assert "helpers" not in cr.plan(box).explain()
    assert "together, not by cuts" in planned("hgx-h100", "all_reduce", tuple(f"cuda:{k}" for k in range(5))).explain()


def test_the_command_line(printed, crossreduce, tmp_path):
    """``--participants`` plans with helpers; a format without them says so, and "auto" writes a plan that fits."""
    line = ("export", "mi300x", "--participants", "0-3")
    found = json.loads(printed("plan", *line[1:], "--algorithm", "forest", "--json"))
    assert found["helpers"] == ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]
    assert found["ratio"]["exact"] == "1"
    file = tmp_path / "plan.xml"
    code, _, text = crossreduce(*line, "--algorithm", "forest", file)
    assert code == 2
    assert "every rank must be a source or a destination" in text
    assert not file.exists()
    assert "is faster, but does not fit" in printed(*line, "--nbytes", "256M", file)
    assert file.read_text().count("<gpu ") == 4
    page = tmp_path / "plan.html"
    printed("export", "hgx-h100", page, "--participants", "0-4", "--algorithm", "forest")
    assert page.stat().st_size < 1_000_000
