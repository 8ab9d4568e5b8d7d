"""Symmetric machines: the symmetries that are found, bounds and trees on their orbits, and generated schedules.

Oracles: the programs without symmetry, on machines that are small enough for them; and generated schedules with all
their steps listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from large_machines import dragonfly, fat_tree, half_empty

import crossreduce as cr
from crossreduce import Topology
from crossreduce.errors import PlanError, ScheduleError
from crossreduce.planning import algorithms, direct, halving_doubling, ring
from crossreduce.planning.forest import forest
from crossreduce.planning.optimal import bound as bounds
from crossreduce.planning.optimal.bound import bound_of_members
from crossreduce.planning.optimal.symmetric import orbit_forest as symmetric
from crossreduce.planning.optimal.symmetric.orbit_bound import quotient_bound
from crossreduce.planning.requests import Request
from crossreduce.schedule import Costs, GeneratedSchedule, Schedule, SharedLimit, fluid_rate, simulate, verify
from crossreduce.schedule.generated_schedule import rotations
from crossreduce.schedule.link_use import link_use
from crossreduce.topology.automorphisms import symmetry_of
from crossreduce.topology.symmetry import Symmetry, SymmetryGenerator

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
H100S = Topology.machine("hgx-h100", 5)  # 40 devices; with more than 32 plans are generated
MACHINES = {
    "mi250": lambda: Topology.machine("mi250"),
    "pcie-8": lambda: Topology.machine("pcie-8"),
    "dgx-1v x 4": lambda: Topology.machine("dgx-1v", 4),
    "mi250 x 2": lambda: Topology.machine("mi250", 2),
    "dgx-2 x 2": lambda: Topology.machine("dgx-2", 2),
    "hgx-h100 x 4": lambda: Topology.machine("hgx-h100", 4),
    "hgx-h100 x 4, a lost link": lambda: Topology.machine("hgx-h100", 4).without_link("host0/cuda:3", "rail3"),
    "hgx-h100 x 4, half empty": lambda: half_empty(4),
    "tpu-v4": lambda: Topology.machine("tpu-v4"),
    "ring": lambda: Topology.ring(12),
    "torus 3 x 5": lambda: Topology.torus(3, 5, gb_per_s=(1, 2)),
    "torus 4 x 4, a lost link": lambda: Topology.torus(4, 4).without_link(0, 1),
    "fat tree": lambda: fat_tree(4),
    "dragonfly": lambda: dragonfly(5, 2, 2),
}

ALL = (*COLLECTIVES, "reduce", "broadcast")
# For each machine an all-reduce and one other collective; the rest is slow.
ONE_OF_EACH = [
    pytest.param(name, collective, marks=[] if collective in ("all_reduce", ALL[1 + k % 4]) else pytest.mark.slow)
    for k, name in enumerate(MACHINES)
    if name != "tpu-v4"
    for collective in ALL
]
ONE_OF_EACH += [pytest.param("tpu-v4", collective, marks=pytest.mark.slow) for collective in ALL]


@pytest.mark.parametrize(
    ("topology", "order", "orbits"),
    [
        (Topology.ring(12), 12, 1),
        (Topology.torus(4, 6), 24, 1),
        (Topology.machine("hgx-h100", 33), 264, 1),
        (Topology.machine("hgx-h100", 16).without_link("host0/cuda:3", "rail3"), 105, 4),
        (half_empty(33), 128, 3),
        (fat_tree(8), 128, 1),
        (dragonfly(9, 4, 2), 54, 7),
    ],
    ids=str,
)
def test_symmetries_join_the_devices_of_machines(topology: Topology, order: int, orbits: int):
    """The permutations that are found generate groups of these orders, with these numbers of orbits of devices."""
    found = symmetry_of(topology)
    assert found.order == order
    assert len({orbit for orbit in found.orbits if orbit < len(topology.devices)}) == orbits


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use symmetry for any number of devices."""
    caches = (symmetric.symmetric_topology, symmetric.symmetric_forest, bounds.bound_of_members, forest)
    monkeypatch.setattr(symmetric, "FEW_DEVICES", 1)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def check_explicit(schedule: GeneratedSchedule, topology: Topology) -> None:
    """Check the rate, the time, the operations and the use of links against those of the list of all steps."""
    explicit = schedule.explicit
    verify(schedule)
    verify(explicit)
    assert schedule.steps == explicit.steps
    assert schedule.chunk_count == len(explicit.chunks)
    assert schedule.units == explicit.units
    assert fluid_rate(schedule, topology) == fluid_rate(explicit, topology)
    free, costly = Costs(operation_s=0), Costs(operation_s=1e-6, reduction_gb_per_s=100.0, messages_per_s=1e6)
    for pieces, cost in ((1, free), (7, costly)):
        one = simulate(schedule.cut_into(pieces), topology, 10**8, costs=cost)
        other = simulate(explicit.cut_into(pieces), topology, 10**8, costs=cost)
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
        assert one.operations == other.operations
        assert one.busy == pytest.approx(other.busy)
        assert one.bytes.keys() == other.bytes.keys()
        assert all(abs(one.bytes[pair] - other.bytes[pair]) <= schedule.chunk_count for pair in one.bytes)
    few = link_use(schedule, topology, 10**8, one.seconds, 9, costly)
    every = link_use(explicit, topology, 10**8, one.seconds, 9, costly)
    assert few.keys() == every.keys()
    assert all(few[pair].carried == pytest.approx(every[pair].carried, abs=1.0) for pair in few)
    assert all(few[pair].transfers == every[pair].transfers for pair in few)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("name", "collective"), ONE_OF_EACH)
def test_plans_by_symmetry_are_those_of_all_devices(name: str, collective: str):
    """The bound, the trees and the generated schedule are those without symmetry."""
    topology = MACHINES[name]()
    first, everyone = topology.devices[:1], topology.devices
    if collective in COLLECTIVES:
        limit = quotient_bound(topology, symmetry_of(topology), collective)
        limit.check()
        assert limit.algbw == bound_of_members(topology, collective, topology.devices).algbw
    sources, destinations = {"broadcast": (first, everyone), "reduce": (everyone, first)}.get(
        collective, (everyone,) * 2
    )
    request = Request(collective, sources, destinations, "forest", topology)
    roots = ((*first, Fraction(1)),) if collective in ("broadcast", "reduce") else None
    found = symmetric.symmetric_forest(request, collective, roots)
    if found is None:
        assert len({*symmetry_of(topology, first).orbits}) > len(everyone) // 2  # too irregular
    else:
        check_explicit(found.schedule, topology)


def test_shared_limits_are_kept_or_break_the_symmetry():
    """Limits that the symmetry moves to each other count once; one that it does not keep makes all steps count."""
    plan = cr.plan(H100S, nbytes="64M", algorithm="forest", operation_s=0)
    assert isinstance(plan.schedule, GeneratedSchedule)

    def limit(host: int, speed: float) -> SharedLimit:
        return SharedLimit(speed, tuple((f"host{host}/cuda:{k}", f"rail{k}") for k in range(8)))

    for shared in ([limit(host, 100.0) for host in range(5)], [limit(2, 50.0)]):
        costs = Costs(operation_s=0, shared=tuple(shared))
        one, other = (simulate(s, H100S, 1 << 26, costs=costs) for s in (plan.schedule, plan.schedule.explicit))
        assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
        assert one.seconds > plan.seconds


@pytest.mark.parametrize("planner", [ring, direct, halving_doubling])
def test_planners_generate_the_schedules_that_they_listed(monkeypatch, planner):
    """With many devices, ring, direct and halving_doubling return a few chunks; all images are the same as before."""
    for n, first in ((33, 0), (40, 3), (64, 3)):
        names = [f"cpu:{k}" for k in range(n)]
        generated = planner(names, first=first)
        with monkeypatch.context() as patch:
            patch.setattr(algorithms, "GENERATED_FROM", n)
            listed = planner(names, first=first)
        assert not isinstance(listed, GeneratedSchedule)
        if isinstance(generated, GeneratedSchedule):
            assert len(generated.base.chunks) < len(listed.chunks)
            assert generated.explicit == listed
            assert str(generated) == str(listed)
            assert Schedule.from_json(generated.to_json()) == generated
        else:
            assert (planner, n) == (halving_doubling, 33)  # one device has a partner


def test_all_parts_of_a_machine_with_1024_devices():
    """The plan reaches the bound exactly, stores a few steps for each device, and is proved without listing it."""
    topology = Topology.machine("hgx-h100", 128)
    plan = cr.plan(topology)
    schedule = plan.schedule
    assert isinstance(schedule, GeneratedSchedule)
    assert (plan.ratio, str(plan.bound.algbw)) == (1, "25600/127")
    assert schedule.base.steps <= 3 * 1024
    assert schedule.steps > 1024 * 1024
    plan.bound.check()
    verify(schedule)
    assert not {"chunks", "rounds", "routes"} & schedule.__dict__.keys()  # nothing was listed
    assert "100 % of it reached" in plan.explain()
    assert not {"rounds", "routes"} & schedule.__dict__.keys()


@pytest.mark.parametrize(
    ("topology", "collective", "idle"),
    [
        (H100S.without_link("host0/cuda:3", "rail3"), "all_reduce", ()),
        (H100S.without_link("host0/cuda:3", "rail3"), "reduce", ()),
        (half_empty(5), "all_gather", ()),
        (Topology.machine("hgx-h100", 5, in_network=True), "all_reduce", ()),
        (Topology.machine("hgx-h100", 5, in_network=True), "reduce_scatter", ()),
        (Topology.machine("hgx-h100", 6), "all_reduce", range(3, 48, 8)),
    ],
)
def test_leftovers_split_orbits(topology: Topology, collective: str, idle: range):
    """A lost link, a half-empty host or idle devices leave plans by symmetry at the bound."""
    members = [k for k in range(len(topology.devices)) if k not in idle]
    plan = cr.plan(topology, collective, nbytes="1G", participants=members, algorithm="forest")
    assert isinstance(plan.schedule, GeneratedSchedule)
    verify(plan.schedule)
    plan.bound.check()
    assert plan.ratio == 1
    assert not {topology.devices[k] for k in idle} & {*plan.schedule.devices}


def test_forged_certificates_are_refused():
    """A certificate with a wrong symmetry, wrong weights or a wrong rate proves nothing."""
    topology = Topology.machine("hgx-h100", 2)
    true = quotient_bound(topology, symmetry_of(topology), "all_reduce")
    assert true.symmetry is not None
    assert true.algbw is not None
    first, *rest = true.symmetry.generators
    swapped = SymmetryGenerator((first.moves[1], first.moves[0], *first.moves[2:]), first.order)
    members = topology.devices[:-1]
    some: dict[str, Any] = {"devices": members, "roots": tuple((device, Fraction(1)) for device in members)}
    for changes, text in (
        ({"symmetry": Symmetry((swapped, *rest), len(topology.nodes))}, r"must map its topology to itself"),
        ({"topology": topology.without_link("host0/cuda:3", "rail3")}, r"must map its topology to itself"),
        ({"cuts": tuple(cut._replace(weight=cut.weight / 2) for cut in true.cuts)}, r"total weight of at least 1"),
        ({"algbw": true.algbw * Fraction(99, 100)}, r"does not prove the bound"),
        (some, r"devices with the same data and role"),
    ):
        with pytest.raises(PlanError, match=text):
            replace(true, **changes).check()


def test_wrong_symmetries_are_refused():
    """A schedule needs permutations of its own nodes that commute and have the orders that they claim."""
    names = ["cpu:0", "cpu:1", "cpu:2"]
    base = direct(names)
    turn = SymmetryGenerator((1, 2, 0), 3)
    GeneratedSchedule(base, Symmetry((turn,), 3), base.devices)
    for symmetry, nodes, text in (
        (Symmetry((SymmetryGenerator((1, 2, 0), 2),), 3), base.devices, "order"),
        (Symmetry((turn, SymmetryGenerator((1, 0, 2), 2)), 3), base.devices, "commute"),
        (Symmetry((turn,), 3), ("cpu:1", "cpu:0", "cpu:2"), "devices of the base first"),
        (Symmetry((SymmetryGenerator((3, 1, 2, 0), 2),), 4), (*base.devices, "switch"), "devices to devices"),
        (Symmetry((SymmetryGenerator((1, 2), 3),), 3), base.devices, "not a permutation"),
    ):
        with pytest.raises(ScheduleError, match=text):
            GeneratedSchedule(base, symmetry, nodes)


def test_other_orders_of_devices():
    """A generated schedule whose devices are listed in another order is the same one."""
    names = [f"cpu:{k}" for k in range(6)]
    base = ring(names)
    one = replace(
        base,
        chunks=(base.chunks[0]._replace(share=Fraction(1)),),
        rounds=tuple(tuple(step for step in steps if step.chunk == 0) for steps in base.rounds),
    )
    schedule = GeneratedSchedule(one, rotations([6], 6), one.devices)
    order = ["cpu:3", "cpu:1", "cpu:5"]
    moved = schedule.ordered_by(order)
    assert moved.devices == ("cpu:3", "cpu:1", "cpu:5", "cpu:0", "cpu:2", "cpu:4")
    assert moved.explicit == schedule.explicit.ordered_by(order)
    assert schedule.cut_into(4).explicit == schedule.explicit.cut_into(4)
    assert schedule != schedule.cut_into(4)
