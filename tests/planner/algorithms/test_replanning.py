"""``Plan.replanned``: plans after a failure, or for links whose speeds have changed."""

from dataclasses import replace
from fractions import Fraction

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMED
from test_plan import COLLECTIVES, DGX, MIB, MICRO

import crossreduce as cr
from crossreduce import ArgumentError, PlanError, Topology, verify
from crossreduce.planning import plans, schedules
from crossreduce.planning.replanning import changes, quick_bound, runs_as_before
from crossreduce.schedule.traffic import traffic

MESH = Topology.full_mesh(4, 25, MICRO)
LINE = Topology.mesh(1, 3)


def with_speed(topology, src, dst, factor):
    """Return a topology in which the bandwidth of the links between two nodes is multiplied by a factor."""
    ends = {topology.node(src), topology.node(dst)}
    links = [
        link._replace(bandwidth=link.bandwidth * Fraction(factor)) if {link.src, link.dst} == ends else link
        for link in topology.links
    ]
    return Topology(topology.devices, links, topology.switches)


def never(*_):
    pytest.fail("this must not be planned")


def test_a_plan_that_uses_nothing_worse_is_kept(monkeypatch):
    """If a link is lost that the schedule does not use, the schedule is kept, and nothing is planned or searched."""
    plan = cr.plan(DGX, nbytes=MIB, algorithm="hierarchical_copy")
    used = {frozenset(pair) for pair in traffic(plan.schedule, DGX).links}
    unused = next(link for link in DGX.links if {link.src, link.dst} not in used)
    monkeypatch.setattr(plans, "fastest_schedule", never)
    monkeypatch.setattr(schedules, "candidates", never)
    kept = plan.replanned(DGX.without_link(unused.src, unused.dst))
    assert kept.schedule is plan.schedule
    assert kept.seconds == plan.seconds
    assert kept.topology == DGX.without_link(unused.src, unused.dst)
    assert kept.change == f"kept, although {unused.src}-{unused.dst} is lost"
    same = plan.replanned(DGX)
    assert same == plan
    assert same.change == "kept: nothing changed"


def test_a_plan_that_uses_something_worse_is_made_again():
    """If a link or device of the schedule is lost or slower, the request is planned again, and explain states why."""
    plan = cr.plan(DGX, nbytes=256 * MIB)
    for now, what in (
        (DGX.without_link(0, 3), "cuda:0-cuda:3 is lost"),
        (with_speed(DGX, 0, 3, "1/4"), "cuda:0-cuda:3 is slower"),
        (DGX.without_node(5), "cuda:5 is lost"),
    ):
        again = plan.replanned(now)
        verify(again.schedule)
        traffic(again.schedule, now)  # raises if it uses a missing link
        assert again.change.startswith("planned again")
        assert again.change.endswith(f"since {what}")
        assert f"  changed   {again.change}\n" in again.explain()
        assert again.request.sources == now.devices
        assert again.seconds < 1.03 * cr.plan(now, nbytes=256 * MIB).seconds
    assert "changed" not in plan.explain()


def test_a_plan_is_not_kept_if_another_one_may_be_faster():
    """If a link becomes faster, a schedule is only kept if it still reaches the bound."""
    slow = with_speed(MESH, 0, 3, "1/10")
    before = cr.plan(slow, nbytes=1 << 30)
    again = before.replanned(MESH)
    assert again.change.startswith("planned again")
    assert again.change.endswith("since cpu:0-cpu:3 is faster")
    assert again.seconds < before.seconds / 1.15
    ends = [("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:0", 1), ("cpu:1", "cpu:2", 9), ("cpu:2", "cpu:1", 9)]
    line = Topology(["cpu:0", "cpu:1", "cpu:2"], ends)
    limited = cr.plan(line, nbytes=MIB)  # the first link limits its rate
    kept = limited.replanned(with_speed(line, 1, 2, 2))
    assert kept.change == "kept, although cpu:1-cpu:2 is faster"
    assert kept.ratio == 1


def test_devices_that_join_take_part():
    """New devices take part if all devices took part before, and otherwise do not."""
    three = MESH.without_node(3)
    assert cr.plan(three).replanned(MESH).request.sources == MESH.devices
    assert cr.plan(three).replanned(MESH).change.endswith("since cpu:3 is new")
    some = cr.plan(three, participants=[0, 1]).replanned(MESH)
    assert some.request.sources == some.request.destinations == ("cpu:0", "cpu:1")
    assert cr.plan(three, "broadcast", root=2).replanned(MESH).request.destinations == MESH.devices
    assert cr.plan(Topology.full_mesh(1), "broadcast").replanned(MESH).root == "cpu:0"


def test_only_what_is_left_takes_part():
    """Lost devices are neither sources nor destinations. The links of a lost switch are lost, too.

    Limits that links share apply to the remaining links.
    """
    two = Topology.machine("ndv2", hosts=2)
    left = two.without_node("host0/nic0")
    assert left.links == tuple(link for link in two.links if "host0/nic0" not in (link.src, link.dst))
    assert set(left.nodes) == set(two.nodes) - {"host0/nic0"}
    for collective in COLLECTIVES:
        plan = cr.plan(MESH, collective, MIB, root="cpu:0" if collective in ("broadcast", "reduce") else None)
        left = plan.replanned(MESH.without_node(2))
        assert (left.collective, left.root) == (collective, plan.root)
        assert "cpu:2" not in {*left.request.sources, *left.request.destinations}
        verify(left.schedule)
    costs = cr.Costs(shared=cr.both_directions(MESH, 30, [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]))
    left = cr.plan(MESH, nbytes=MIB, costs=costs).replanned(MESH.without_node(2))
    assert [limit.links for limit in left.request.costs.shared] == [(("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: cr.plan(MESH, "broadcast", root=1).replanned(MESH.without_node(1)), ArgumentError, "root of the plan"),
        (
            lambda: cr.plan(MESH, "reduce", root=1).replanned(MESH.without_node(1)),
            ArgumentError,
            r"not in the topology[\s\S]*cpu:1;",
        ),
        (lambda: cr.plan(MESH).replanned(DGX), ArgumentError, "no device of the plan is in the topology"),
        (lambda: cr.plan(MESH).replanned(7), ArgumentError, "not a topology"),
        (lambda: cr.plan(LINE).replanned(LINE.without_link(0, 1)), PlanError, "needs a route from cpu:0 to cpu:1"),
        (lambda: MESH.without_node("cpu:9"), ArgumentError, r"no such device or switch[\s\S]*cpu:9[\s\S]*one of cpu:0"),
        (lambda: MESH.without_node("nvswitch"), cr.errors.DeviceError, "nvswitch"),
        (lambda: Topology.full_mesh(1).without_node(0), ArgumentError, r"only device[\s\S]*cpu:0"),
    ],
)
def test_what_cannot_be_planned_again_raises(make, kind, text):
    """Replanning raises an error if the root is lost, no device is left, a route is missing or a node is unknown."""
    with pytest.raises(kind, match=text):
        make()


def test_a_long_list_of_changes_is_shortened():
    """At most three changes of a kind are named. A change in both directions of a link is named once."""
    assert changes(DGX, DGX.without_node(7).without_node(6)) == "cuda:6, cuda:7 are lost"
    half = Topology(DGX.devices, [link._replace(bandwidth=link.bandwidth / 2) for link in DGX.links])
    assert changes(DGX, half) == "cuda:0-cuda:1, cuda:0-cuda:2, cuda:1-cuda:2 and 13 others are slower"


@st.composite
def changed(draw):
    """Draw two topologies with the same devices and different links."""
    n = draw(st.integers(2, 5))
    speeds = st.sampled_from([1, 2, 3, 10])
    rows = [[0 if a == b else draw(speeds) for b in range(n)] for a in range(n)]
    later = [[0 if a == b else draw(st.sampled_from([0, 1, 2, 3, 10])) for b in range(n)] for a in range(n)]
    for k in range(n):  # a ring stays, so that all devices are connected
        later[k][(k + 1) % n] = later[k][(k + 1) % n] or 1
    return Topology.from_matrix(rows, latency_s=MICRO), Topology.from_matrix(later, latency_s=MICRO)


@examples(40)
@given(changed(), st.sampled_from(COLLECTIVES), st.sampled_from((*NAMED, "auto")), st.sampled_from((8, 64 * MIB)))
def test_a_plan_that_was_made_again_is_right(pair, collective, algorithm, nbytes):
    """After any change of links, the new plan is verified, and has the simulated time on the new topology.

    If the old schedule is kept, it takes no longer than before. The bound of ``quick_bound`` is not too low.
    """
    old, new = pair
    root = "cpu:0" if collective in ("broadcast", "reduce") else None
    try:
        before = cr.plan(old, collective, nbytes, algorithm, root=root)
        whole = cr.plan(new, collective, nbytes, algorithm, root=root)
    except PlanError:
        return
    again = before.replanned(new)
    verify(again.schedule)
    assert again.request == whole.request
    assert again.seconds == pytest.approx(cr.simulate(again.schedule, new, nbytes).seconds, rel=1e-9)
    assert quick_bound(before.bound, again.request) >= again.bound.algbw
    if again.change.startswith("kept"):
        assert runs_as_before(before.schedule, before.request, again.request)
        assert again.seconds <= before.seconds * (1 + 1e-9)
    elif again.change.startswith("planned again, "):
        assert again.seconds == whole.seconds
    assert replace(again, change="") == again
