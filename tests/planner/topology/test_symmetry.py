"""Plans for many devices by symmetry: bounds, certificates and schedules are those of the machine without symmetry."""

import json
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest

from crossreduce import PlanError, ScheduleError
from crossreduce.planning import bound, plan, ring
from crossreduce.schedule import Schedule, link_shares
from crossreduce.topology import Link, Topology, automorphisms
from crossreduce.topology.symmetry import Symmetry, SymmetryGenerator

MACHINE = Topology.machine("hgx-h100", hosts=5)


def chords(slow: Fraction, fast: Fraction, n: int = 36) -> Topology:
    """Return a ring of slow links with fast links between every sixth device."""
    names = [f"cpu:{k}" for k in range(n)]
    ends = [(k, (k + hop) % n, width) for k in range(n) for hop, width in ((1, slow), (6, fast))]
    links = [Link(names[a], names[b], width) for src, dst, width in ends for a, b in ((src, dst), (dst, src))]
    return Topology(names, links)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_a_bound_is_of_the_topology_that_was_given(collective):
    """The bound of some of the devices names the topology, the devices and the roots in the order of the caller."""
    star = Topology.star(40, 25)
    for members in (star.devices[:36], star.devices[:36][::-1], star.devices[::-1]):
        found = bound(star, collective, devices=members)
        # Trees with a helper as root are better than symmetric trees, and prices of links prove their rate.
        by_prices = collective == "all_reduce" and len(members) < len(star.devices)
        assert (found.symmetry is None) == by_prices
        assert bool(found.prices) == by_prices
        assert (found.topology, found.devices) == (star, members)
        if collective != "broadcast":
            assert found.roots == tuple((device, 1) for device in members)
        found.check()


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda moves, order: (moves[:-1], order), "generator 0 is not a permutation"),
        (lambda moves, order: (tuple(map(str, moves)), order), "generator 0 has numbers that are not integers"),
        (lambda moves, order: (moves, None), "generator 0 has numbers that are not integers"),
        (lambda moves, order: (moves, order + 1), "generator 0 is not the identity after 9 times"),
        (lambda moves, order: (moves, -order), "its order is below 2"),
    ],
)
def test_a_forged_symmetry_is_refused(forge, message):
    """A certificate whose symmetry has an invalid permutation or order is refused with a PlanError."""
    certificate = bound(MACHINE, "all_reduce")
    turn, *others = certificate.symmetry.generators
    symmetry = Symmetry((SymmetryGenerator(*forge(*turn)), *others), certificate.symmetry.nodes)
    with pytest.raises(PlanError, match=message):
        replace(certificate, symmetry=symmetry).check()


def test_large_orders_are_refused():
    """A few bytes of JSON cannot describe more images than there are devices, so reading them takes little memory."""
    swaps = [[[k ^ 1 if k // 2 == pair else k for k in range(36)], 2] for pair in range(18)]
    content = json.loads(ring([f"cpu:{k}" for k in range(36)]).to_json())
    ((moves, order),) = content["symmetry"]["generators"]
    for generators in (swaps, *([[moves, order * factor]] for factor in (2, 10**9, 10**400))):
        content["symmetry"]["generators"] = generators
        with pytest.raises(ScheduleError, match="more images of each chunk than there are devices"):
            Schedule.from_json(json.dumps(content))


def test_uneven_bandwidths_and_weights():
    """Bounds are exact for bandwidths or weights that differ by many orders of magnitude."""
    found = plan(chords(Fraction(1, 10**9), Fraction(10**9)), "all_gather", algorithm="forest")
    assert found.bound.algbw == found.rate == Fraction("9/625000000")
    found.bound.check()
    star = Topology.star(40, 25)
    limit = bound(star, "broadcast", {device: 1 if k else 10**12 for k, device in enumerate(star.devices)})
    assert limit.algbw == 25 * Fraction(10**12 + 39, 10**12 + 38)
    limit.check()


def test_a_generated_schedule_does_not_change():
    """No part of a generated schedule can be assigned or deleted, because caches use it as a key."""
    schedule = ring([f"cpu:{k}" for k in range(36)])
    for part in ("base", "symmetry", "nodes", "in_order", "pieces"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{part}'"):
            setattr(schedule, part, None)
        with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{part}'"):
            delattr(schedule, part)


def test_the_shares_of_links():
    """A generated schedule uses the same share of each link as its explicit form."""
    for collective in ("all_reduce", "all_gather", "broadcast"):
        schedule = plan(MACHINE, collective, algorithm="forest").schedule
        assert link_shares(schedule, MACHINE) == link_shares(schedule.explicit, MACHINE)


def test_a_plan_is_kept_unless_a_link_that_it_uses_became_slower():
    """A generated plan is kept on reordered nodes, and if an idle link becomes slower or a busy one faster."""
    before = plan(MACHINE, "broadcast", algorithm="forest")
    after = before.replanned(Topology(MACHINE.devices[::-1], MACHINE.links, MACHINE.switches[::-1]))
    assert (after.schedule, after.change) == (before.schedule, "kept: nothing changed")
    used = link_shares(before.schedule.explicit, MACHINE)
    *_, idle = (link[:2] for link in MACHINE.links if link[:2] not in used)
    busy = ("host1/cuda:3", "rail3")
    assert busy in used
    for pair, factor, change in ((idle, Fraction(1, 2), "kept"), (busy, 2, "kept"), (busy, Fraction(1, 2), "planned")):
        links = [link._replace(bandwidth=link[2] * factor) if link[:2] == pair else link for link in MACHINE.links]
        now = Topology(MACHINE.devices, links, MACHINE.switches)
        assert before.replanned(now).change.startswith(change)


def test_a_change_of_a_switch_is_named():
    """The reason of a new plan names a switch that can reduce now, or that no longer can."""
    star = Topology.star(4)
    able = star.with_switches(reducing=True)
    assert plan(star).replanned(able).change.endswith("since switch is now able to reduce")
    assert plan(able).replanned(star).change.endswith("switch is no longer able to reduce")


@pytest.mark.parametrize(("fixed", "orbits"), [((), 2), (("host0/cuda:0",), 10)])
def test_the_search_does_not_grow_with_the_hosts(monkeypatch, fixed, orbits):
    """Each host has several GPUs of a kind. One guess matches those of all hosts, so that few refinements suffice."""
    monkeypatch.setattr(automorphisms, "_MOST_TRIES", 15)
    machine = Topology.machine("dgx-1v", hosts=16)
    symmetry = automorphisms.symmetry_of.__wrapped__(machine, fixed)
    assert len({*symmetry.orbits[: len(machine.devices)]}) == orbits
