"""Plans in which helpers (devices that take no part) forward and combine, compared with the best of all trees."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from math import lcm

import pytest
from budget import examples
from groups_oracle import best_rate
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import DIRECTED, SYMMETRIC, WHOLE, wirings

import crossreduce as cr
from crossreduce import PlanError, Topology
from crossreduce.errors import ArgumentError
from crossreduce.planning.optimal.bounds.certificate import Cut
from crossreduce.planning.optimal.bounds.steiner import few_enough
from crossreduce.schedule import verify

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def planned(topology, collective, members):
    """Return the forest plan of some devices. The root of a reduce or broadcast is the first of them."""
    root = members[0] if collective in ("reduce", "broadcast") else None
    return cr.plan(topology, collective, "64M", "forest", root=root, participants=members, operation_s=0)


def check(plan):
    """Check that a plan is correct and as fast as its bound, and that the bound is proved."""
    verify(plan.schedule)
    plan.bound.check()
    assert plan.ratio == 1
    assert plan.rate == plan.bound.algbw


@pytest.mark.parametrize("machine", ["dgx-1v", "mi300x", "hgx-h100", "pcie-8"])
def test_parts_of_a_machine_reach_the_bound(machine):
    """Plans of some devices of a machine reach their bound, also if only the other devices connect them."""
    topology = Topology.machine(machine)
    for size in (2, 4, 7) if machine != "mi300x" else (3, 5):
        for collective in ("all_reduce", COLLECTIVES[1 + size % 4]):  # and one other, depending on the size
            members = random.Random(f"{machine} {size} {collective}").sample(range(8), size)
            check(planned(topology, collective, tuple(topology.devices[k] for k in sorted(members))))


@pytest.mark.parametrize(
    ("machine", "width", "count"),
    [*(("hgx-h100", 450, n) for n in (2, 5, 7)), *(("dgx-2", 150, n) for n in (10, 15))],
)
def test_helpers_on_a_switch_are_as_good_as_published(machine, width, count):
    """On a switch, the rate of an all-reduce with helpers is that of BytePS (Jiang et al., OSDI 2020, section 4.1).

    Each of n devices with k helpers sends 2 n (n - 1) / (n**2 + k n - 2 k) times the buffer, but at least the buffer.
    """
    topology = Topology.machine(machine)
    n, k = count, len(topology.devices) - count
    needed = max(Fraction(1), Fraction(2 * n * (n - 1), n * n + k * n - 2 * k))
    plan = planned(topology, "all_reduce", tuple(f"cuda:{device}" for device in range(n)))
    check(plan)
    assert plan.rate == width / needed


@examples(80)
@given(wirings((DIRECTED, SYMMETRIC), WHOLE, 5, 1, (True, False)), st.sampled_from(COLLECTIVES), st.integers(2, 4))
def test_bounds_are_the_rate_of_the_best_trees(wiring, collective, count):
    """The plan of a collective with helpers reaches its bound, which is the best rate of all possible trees."""
    topology = Topology(*wiring)
    members = topology.devices[:count]
    assume(len(topology.devices) > count)
    best = best_rate(topology, collective, members)
    plan = planned(topology, collective, members)
    check(plan)
    assert float(plan.rate) == pytest.approx(best, rel=1e-6)


# Links of 1 GB/s (src dst); a link that is listed twice has 2 GB/s.
ONE_WAY = "1 s1, 2 3, 2 4, 3 s1, 3 s1, 4 2, 4 0, 0 s0, s0 2, s1 1, s1 s0"


def test_a_helper_can_be_the_root_of_an_all_reduce():
    """With links in one direction only, the best tree may have a helper as its root. The bound includes such trees."""
    ends = [tuple(f"cpu:{end}" if end.isdigit() else end for end in pair.split()) for pair in ONE_WAY.split(", ")]
    links = [(src, dst, ends.count((src, dst))) for src, dst in dict.fromkeys(ends)]
    topology = Topology([f"cpu:{k}" for k in range(5)], links, [cr.Switch("s0", True), cr.Switch("s1", True)])
    plan = planned(topology, "all_reduce", ("cpu:1", "cpu:3", "cpu:0"))
    check(plan)
    assert plan.rate == 1


def test_a_switch_can_be_the_root_of_an_all_reduce():
    """If no device has links to and from a switch, the best trees have their root at the switch."""
    links = [("cpu:0", "s", 1), ("cpu:1", "s", 1), ("s", "cpu:2", 1), ("s", "cpu:3", 1), ("cpu:2", "cpu:0", 2),
             ("cpu:3", "cpu:1", 2)]  # fmt: skip
    limit = cr.bound(Topology([f"cpu:{k}" for k in range(4)], links, [cr.Switch("s", True)]), "all_reduce")
    limit.check()
    assert limit.algbw == 1


def test_helpers_of_one_way_collectives_need_no_way_back():
    """A broadcast passes a helper that has no route back to the root; a reduce passes one that has none from it."""
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
    """With too many members to find the cheapest trees, heuristic trees reach the bound, and their prices prove it.

    In other collectives, all trees use the same helpers. Their plans come within 2 % of the bound.
    """
    topology = Topology.machine(machine, hosts)
    members = set(random.Random(count).sample(topology.devices, count))
    assert not few_enough(count, len(topology.devices))
    plan = planned(topology, "all_reduce", tuple(device for device in topology.devices if device in members))
    verify(plan.schedule)
    plan.bound.check()
    assert plan.helpers
    assert plan.ratio == 1
    for collective in COLLECTIVES[1:] if machine == "mi250" else ():
        assert planned(topology, collective, topology.devices[:count]).ratio >= Fraction(98, 100)


def test_shares_of_many_trees_have_a_common_denominator():
    """The shares of many trees have a common denominator below 2**50, although the bound is reached within 1e-7."""
    topology = Topology.torus(3, 3, 3)
    plan = planned(topology, "all_reduce", tuple(f"cpu:{k}" for k in range(2, 27)))
    verify(plan.schedule)
    assert plan.ratio > 1 - Fraction(1, 10**7)
    assert lcm(*(chunk.share.denominator for chunk in plan.schedule.chunks)) < 1 << 50
    assert "all_reduce" in plan.explain()


def test_cuts_must_hold_for_roots_that_take_no_part():
    """If links differ in their two directions, cuts of an all-reduce must also limit trees with a helper as root."""
    links = [("cpu:0", "cpu:2", 1), ("cpu:2", "cpu:0", 2), ("cpu:1", "cpu:2", 1), ("cpu:2", "cpu:1", 2)]
    topology = Topology([f"cpu:{k}" for k in range(3)], links)
    limit = cr.bound(topology, "all_reduce", devices=range(2))
    limit.check()
    assert limit.algbw == 1
    around = tuple(Cut(frozenset({device}), Fraction(1), True) for device in limit.devices)
    with pytest.raises(PlanError, match=r"contain a root (.|\n)*cpu:2"):
        replace(limit, algbw=Fraction(2), cuts=around, prices=()).check()


@pytest.fixture(scope="module", params=[("hgx-h100", 5), ("dgx-2", 10)])
def priced(request):
    """A bound of some devices on a switch that is proved by prices: of few devices, and of many."""
    machine, count = request.param
    limit = cr.bound(machine, "all_reduce", devices=range(count))
    assert limit.prices
    assert not limit.cuts
    limit.check()
    return limit


def test_forged_prices_are_rejected(priced):
    """``check`` refuses a certificate with another rate, or with prices that are changed or invalid."""
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


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_roots_without_bytes(collective, priced):
    """A root with 0 bytes does not change a bound. Without a root of more than 0 bytes, a certificate is refused."""
    machine = Topology.machine("hgx-h100", 8)
    for topology, count in ((machine, 40), (machine, 64), (Topology.machine("mi300x"), 5)):
        single, with_empty = (cr.bound(topology, collective, r, range(count)) for r in ({1: 1}, {0: 0, 1: 1}))
        with_empty.check()
        assert with_empty.algbw == single.algbw
    for roots in ((), ((priced.devices[0], Fraction(0)),)):
        with pytest.raises(PlanError, match="more than 0 bytes"):
            replace(priced, collective=collective, roots=roots).check()


def test_participants_are_sources_and_destinations():
    """``participants`` sets sources and destinations, which cannot be given as well. A root must be one of them."""
    box = Topology.machine("mi300x")
    both = cr.plan(box, sources=range(4), destinations=range(4))
    assert cr.plan(box, participants=range(4)) == both
    assert both.helpers == ("cuda:4", "cuda:5", "cuda:6", "cuda:7")
    assert cr.plan(box).helpers == ()
    assert cr.plan(box, "reduce", root=2, participants=[1, 2]).request.sources == ("cuda:1", "cuda:2")
    assert cr.plan(box, "broadcast", participants=[1, 2]).request.destinations == ("cuda:1", "cuda:2")
    with pytest.raises(ArgumentError, match="neither can be given"):
        cr.plan(box, participants=range(4), sources=range(4))
    with pytest.raises(ArgumentError, match="root must be a participant"):
        cr.plan(box, "broadcast", root=7, participants=range(4))
    with pytest.raises(ArgumentError, match="at least one device"):
        cr.plan(box, participants=[])


def test_the_text_says_what_helpers_gain():
    """``explain`` names the helpers, and compares the rate with the bound without helpers, if there is one."""
    box = Topology.machine("dgx-1v")
    text = planned(box, "all_reduce", ("cuda:0", "cuda:1", "cuda:2", "cuda:5")).explain()
    assert "cuda:4, cuda:6, cuda:7 forward and combine; 2.17 x the bound without them, 50.00 GB/s" in text
    apart = planned(box, "all_reduce", ("cuda:0", "cuda:5"))
    assert apart.bound_without_helpers is None
    assert "without them some devices cannot be reached" in apart.explain()
    assert "export it for another tool" in apart.explain()
    assert "helpers" not in cr.plan(box).explain()
    assert "together, not by cuts" in planned("hgx-h100", "all_reduce", tuple(f"cuda:{k}" for k in range(5))).explain()


def test_the_command_line(printed, crossreduce, tmp_path):
    """``--participants`` plans with helpers. The XML format cannot express them: "forest" fails, "auto" avoids them."""
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
