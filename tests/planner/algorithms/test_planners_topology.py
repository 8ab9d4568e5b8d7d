"""Planners on topologies: schedules use only links of the topology, and connected devices can always be planned."""

import itertools
import re

import oracle
import pytest
from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st
from planned import planned, planned_for
from planning_oracle import reachable
from strategies import NAMED, names, requests, wired

from crossreduce import Link, PlanError, Topology, devices, simulate, verify
from crossreduce.planning import PLANNERS, Request, choose, hierarchical_copy, one_device, plan, ring
from crossreduce.planning.schedules import candidates


def used_links(schedule, topology):
    """Return the links that a schedule uses. Steps without a route of the schedule use that of the topology."""
    through = {(*route[:3], route.round): route.through for route in schedule.routes}
    pairs = set()
    for r, steps in enumerate(schedule.rounds):
        for chunk, dst, srcs in steps:
            for src in set(srcs) - {dst}:
                a, b = schedule.devices[src], schedule.devices[dst]
                passed = through.get((chunk, src, dst, r), through.get((chunk, src, dst, None)))
                pairs.update(itertools.pairwise(topology.route(a, b) if passed is None else (a, *passed, b)))
    return pairs


def hierarchies(topology, members, packs=1, first=0):
    """Return the schedules from which hierarchical_copy chooses for an all-reduce."""
    return candidates(Request("all_reduce", members, members, "hierarchical_copy", topology, 0, packs, first))


def links(topology):
    return {(link.src, link.dst) for link in topology.links}


@st.composite
def one_way(draw):
    """Draw a topology with links in any direction, which may leave devices without a route to each other."""
    n = draw(st.integers(1, 7))
    entries = draw(st.lists(st.sampled_from([0, 1, 1, 10, 10]), min_size=n * n, max_size=n * n))
    return Topology.from_matrix([[0 if i == j else entries[i * n + j] for j in range(n)] for i in range(n)])


@st.composite
def requests_on(draw, topologies):
    """Draw a topology, and the other arguments of ``planned_for`` except the algorithm and the root."""
    topology = draw(topologies)
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple) | st.just(topology.devices)
    nbytes = st.sampled_from([0, 1, 1000, 1 << 22])
    return topology, (draw(some), draw(some), draw(nbytes), draw(st.integers(1, 3)), draw(st.integers(0, 9)))


joined = st.integers(1, 7).flatmap(lambda n: wired(names(n)))


def check_planned(topology, ask):
    """Check that the schedule of a request is correct, has the requested devices, and uses only links."""
    _, sources, destinations, *_ = ask
    schedule = planned_for(topology, *ask)
    verify(schedule)
    assert used_links(schedule, topology) <= links(topology)
    if schedule.algorithm != "forest":  # a forest may reduce on other devices
        assert {*schedule.devices} == {*sources, *destinations}


@examples(60)
@given(ask=requests(st.integers(1, 9)))
def test_a_forest_needs_no_topology(ask):
    """Without a topology "forest" plans any request on a full mesh, correctly. Packs have no effect."""
    schedule = planned("forest", ask.sources, ask.destinations, ask.packs, ask.first)
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.algorithm == "forest"
    assert schedule.devices == tuple(dict.fromkeys([*ask.sources, *ask.destinations]))
    assert schedule == planned("forest", ask.sources, ask.destinations)


def refused(topology, ask):
    """Plan a request. Return ``None``, or the text of its PlanError, which must name two devices without a route."""
    try:
        check_planned(topology, ask)
    except PlanError as error:
        src, dst = re.search(r"route from (\S+) to ([^ ,]+)", str(error).splitlines()[0].rstrip(".")).groups()
        assert dst not in reachable(topology, src), str(error)  # noqa: PT017 - a plan is correct, too
        cut = re.search(r"no link leads out of \{(.*)\}", str(error))
        assert cut is None or set(cut[1].split(", ")) == reachable(topology, src)
        return str(error)
    return None


# APART: cpu:2, which does not take part, cannot be reached. DOWN: only the first two devices reach the others.
APART = Topology(names(3), [Link("cpu:0", "cpu:1", 1), Link("cpu:1", "cpu:0", 1)])
DOWN = Topology(names(4), [Link(a, b, 1) for a in names(4)[:2] for b in names(4)[2:]])


@examples(50)
@given(requests_on(one_way() | joined))
@example((APART, (names(2), names(2), 8, 1, 0)))
@example((DOWN, (names(4)[:2], names(4)[2:], 8, 1, 0)))
def test_what_cannot_be_planned_names_devices_that_no_way_joins(ask):
    """An algorithm plans a request, or its error names a device that another cannot reach; "auto" plans if any does."""
    topology, (sources, destinations, *rest) = ask
    texts = [refused(topology, (algorithm, sources, destinations, *rest)) for algorithm in (*NAMED, "auto")]
    if any(not reachable(topology, source) >= set(destinations) for source in sources):
        assert all("needs a route" in (text or "") for text in texts)
    if all(reachable(topology, device) >= set(topology.devices) for device in topology.devices):
        assert texts == [None] * len(texts)
    assert (texts[-1] is None) == (None in texts[:-1])  # the last text is that of "auto"


@pytest.mark.parametrize("n", range(1, 10))
def test_plain_planners_on_a_full_mesh_and_a_ring_on_a_ring(n):
    """On a full mesh, planners that ignore topologies plan as without one. On a ring, "ring" uses both directions."""
    everyone = names(n)
    for algorithm in ("one_device", "halving_doubling", "recursive_doubling", "direct", "one_shot"):
        plan = planned_for(Topology.full_mesh(n), algorithm, everyone, everyone, 100, 2, 1)  # bytes, packs, first
        assert plan == PLANNERS[algorithm](everyone, packs=2, first=1)  # 100 bytes are not cut into pieces
    mesh = hierarchies(Topology.full_mesh(n), everyone, packs=2, first=1)
    assert hierarchical_copy(everyone, packs=2, first=1) in mesh
    around = planned_for(Topology.ring(n), "ring", everyone, everyone, 100)
    assert used_links(around, Topology.ring(n)) == links(Topology.ring(n))
    if n > 2:  # the first n chunks are those of a ring in one direction
        one_direction = ring(everyone).rounds
        assert [tuple(step for step in steps if step.chunk < n) for steps in around.rounds] == list(one_direction)
        assert len(around.chunks) == 2 * n


def test_a_topology_of_other_names_is_matched_by_position():
    """If a topology has other names than the request, its i-th device stands for the i-th device of the request."""
    quads = Topology.mesh(2, 2, (50, 5)).without_link(1, 3)  # its devices are named cpu:0 to cpu:3
    gpus = tuple(f"cuda:{k}" for k in (3, 1, 4, 0))
    for algorithm in (*NAMED, "auto"):
        schedule = planned_for(quads, algorithm, gpus, gpus, 10**6)
        assert schedule == planned_for(quads.renamed(gpus), algorithm, gpus, gpus, 10**6)
        assert schedule.devices == gpus
    words = r"the topology lacks a device[\s\S]*cpu:0, cpu:1, cpu:2, cpu:3; request for cpu:0, cuda:1"
    with pytest.raises(PlanError, match=words):
        planned_for(quads, "one_device", ("cpu:0", "cuda:1"), ("cpu:0",), 8)
    with pytest.raises(PlanError, match="lacks a device of this request: it has 4 devices for 5 replicas"):
        planned_for(quads, "ring", tuple(f"cuda:{k}" for k in range(5)), ("cuda:0",), 8)


def test_auto_finds_the_root_that_is_near_to_all():
    """On a star whose hub is not the first device, "auto" is at least as fast as a reduction on the hub."""
    cells = [[int(2 in (i, j) and i != j) for j in range(5)] for i in range(5)]  # cpu:2 is linked with all others
    star = Topology.from_matrix(cells, latency_s=1e-6)
    hub = simulate(one_device(names(5), root="cpu:2"), star, 8).seconds
    assert hub < simulate(one_device(names(5)), star, 8).seconds
    assert simulate(planned_for(star, "auto", names(5), names(5), 8), star, 8).seconds <= hub


def test_auto_without_a_topology():
    """Without a topology, "auto" is "direct" for large buffers of several devices with several destinations.

    For small buffers, one destination, or devices that share one memory, it is "one_device".
    """
    everyone = names(4)
    gpus = tuple(f"cuda:{k}" for k in range(4))
    assert choose(gpus, gpus, 1000) == "one_device"
    assert choose(gpus, gpus, 1 << 24) == "direct"
    assert choose(gpus, gpus[:1], 1 << 24) == "one_device"
    for one_memory in (everyone, ("cuda:0", "cuda:0#1", "cuda:0#2")):
        assert choose(one_memory, one_memory, 1 << 24) == "one_device"
    hosts = ("cpu:0", "host1/cpu:0")
    assert choose(hosts, hosts, 1 << 24) == "direct"


def test_auto_on_a_full_mesh_and_a_ring():
    """On a full mesh with latencies, "auto" is "one_shot" for small buffers (one round) and "direct" for large ones.

    On a ring of four, it takes at most four latencies for a small buffer, and is "ring" for large ones.
    """
    everyone = names(4)
    mesh, around = Topology.full_mesh(4, 25, 1e-6), Topology.ring(4, 25, 1e-6)
    assert planned_for(mesh, "auto", everyone, everyone, 1000).algorithm == "one_shot"
    assert planned_for(mesh, "auto", everyone, everyone, 1 << 24).algorithm == "direct"
    assert simulate(planned_for(around, "auto", everyone, everyone, 8), around, 8).seconds < 4.01e-6
    assert planned_for(around, "auto", everyone, everyone, 1 << 24).algorithm == "ring"


def test_names_are_parsed_once(monkeypatch):
    """Planning parses each name that a caller gives once. It parses no names while it makes the schedule."""
    everyone = names(12)
    parsed = []
    parse = devices.parse
    monkeypatch.setattr(devices, "parse", lambda name: parsed.append(name) or parse(name))
    for number, collective in enumerate(("all_reduce", "all_gather")):
        topology = Topology.full_mesh(12, 25 + number, 1e-6)
        parsed.clear()
        plan(topology, collective, 1 << 20, sources=everyone, destinations=everyone)
        assert parsed == [*everyone, *everyone]
    parsed.clear()
    assert PLANNERS["ring"](everyone).rounds
    assert parsed == [*everyone]
