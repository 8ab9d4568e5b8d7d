"""Reduce-scatters and all-gathers derived from all-reduces: the i-th device has part i, without needless
transfers."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALGORITHMS, NAMED, algorithms, names, wired

import crossreduce as cr
from crossreduce import Link, Topology, simulate, verify
from crossreduce.planning import PLANNERS, hierarchical_copy
from crossreduce.planning.scatter_and_gather import all_gather, reduce_scatter

MIB = 1 << 20
DGX = Topology.machine("dgx-1v")


def owners(schedule, end):
    """Return the device of each chunk: its only destination (end 2), or its only source (end 1)."""
    found = [chunk[end] for chunk in schedule.chunks]
    assert all(len(one) == 1 for one in found)
    return [device for (device,) in found]


def check_parts(schedule, collective, members):
    """Check that a reduce-scatter leaves part i of the sum on device i, or that an all-gather copies it from there."""
    n = len(members)
    mine, others = (2, 1) if collective == "reduce_scatter" else (1, 2)
    assert schedule.collective == collective
    assert schedule.devices[:n] == tuple(members)
    at = Fraction(0)
    for owner, chunk in zip(owners(schedule, mine), schedule.chunks, strict=True):
        assert Fraction(owner, n) <= at
        at += chunk.share
        assert at <= Fraction(owner + 1, n)
        assert set(chunk[others]) == set(range(n))
    assert at == 1
    verify(schedule)
    assert oracle.right(schedule)


def moves(schedule):
    """Count the transfers of each chunk from each device to each other one."""
    return Counter(
        (chunk, src, dst) for steps in schedule.rounds for chunk, dst, srcs in steps for src in set(srcs) - {dst}
    )


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_part_i_is_on_device_i(algorithm, n):
    """By every algorithm on every wiring, part i of a reduce-scatter or all-gather is on the i-th device."""
    wirings = [Topology.full_mesh(n, 25, 1e-6), Topology.ring(n, 25, 1e-6), Topology.star(n, 450, 1e-6)]
    wirings += [Topology.mesh(3, n // 3, 25, 1e-6)] if n % 3 == 0 else [Topology.mesh(1, n, 25, 1e-6)]
    wirings += [DGX.subset(DGX.devices[:n])] if n <= 8 else []
    for topology in wirings:
        for collective in ("reduce_scatter", "all_gather"):
            members = topology.devices[:: 1 if collective == "all_gather" else -1]
            check_parts(cr.plan(topology, collective, MIB, algorithm, members).schedule, collective, members)


@examples(80)
@given(st.data(), st.integers(2, 7), st.sampled_from([*NAMED, "auto"]), st.booleans())
def test_some_devices_of_any_topology(data, n, algorithm, both_ways):
    """For some devices of any topology, in any order, part i is on the i-th of them."""
    topology = data.draw(wired(names(n), both_ways=both_ways))
    members = data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True))
    for collective in ("reduce_scatter", "all_gather"):
        made = cr.plan(topology, collective, 1000, algorithm, destinations=members)
        check_parts(made.schedule, collective, members)


# If the number of devices is not a power of two, these algorithms first add the data of some devices to that of a
# partner, which later sends them their part of the sum. So their chunks need more transfers than the least possible.
PAIRED = ("halving_doubling", "recursive_doubling")
TREES = [name for name in NAMED if name not in PAIRED]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_all_gather_reverses_a_reduce_scatter(algorithm):
    """An all-gather takes as long as a reduce-scatter on the reversed links."""
    there = [("cpu:0", "a", 25), ("cpu:1", "a", 12), ("cpu:2", "b", 25), ("cpu:3", "b", 3), ("a", "b", 10)]
    back = [(dst, src, gb_per_s * 2 + 1) for src, dst, gb_per_s in there]
    uneven = Topology(names(4), [Link(*link, 1e-6) for link in there + back], ["a", "b"])
    around = [Link(f"cpu:{k}", f"cpu:{(k + 1) % 4}", 25, 1e-6) for k in range(4)]
    for topology in (uneven, Topology(names(4), around)):
        gather = cr.plan(topology, "all_gather", 5 * MIB, algorithm)
        scatter = cr.plan(topology.reversed(), "reduce_scatter", 5 * MIB, algorithm)
        assert gather.seconds == pytest.approx(scatter.seconds, rel=1e-9)
        assert gather.bound.algbw == scatter.bound.algbw
        over = simulate(gather.schedule, topology, MIB).bytes
        assert {(b, a): count for (a, b), count in over.items()} == simulate(
            scatter.schedule, topology.reversed(), MIB
        ).bytes


@examples(100)
@given(algorithms, st.integers(1, 9), st.integers(0, 9))
def test_the_steps_that_are_kept_of_an_all_reduce(algorithm, n, first):
    """A reduce-scatter keeps the steps that bring a chunk to its owner; an all-gather reverses its transfers."""
    whole = PLANNERS[algorithm](names(n), packs=n, first=first)
    scattered = reduce_scatter(whole)
    check_parts(scattered, "reduce_scatter", names(n))
    assert scattered.algorithm == algorithm
    assert moves(scattered).total() <= moves(whole).total()
    per_part = Counter(owners(scattered, 2))
    assert set(per_part.values()) == {len(whole.chunks) // n}
    gathered = all_gather(scattered)
    check_parts(gathered, "all_gather", names(n))
    back = Counter({(c, dst, src): times for (c, src, dst), times in moves(scattered).items()})
    assert moves(gathered) <= back
    assert moves(gathered).total() == len(gathered.chunks) * (n - 1)
    if algorithm in TREES or n & (n - 1) == 0:
        assert moves(gathered) == back
        if algorithm not in ("recursive_doubling", "one_shot"):  # in these two, several devices compute each result
            assert back.total() * 2 == moves(whole).total()
        assert len(gathered.rounds) == len(scattered.rounds)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rounds_of_powers_of_two(n):
    """For n a power of 2 the reduce-scatter of halving_doubling is its halving: log2 n rounds, of which one has
    n**3 / 2 additions, one n**3 / 4, and so on. The all-gather of recursive_doubling is that of MPICH: log2 n rounds,
    in the k-th of which every device receives 2**k parts from one device."""
    scattered = reduce_scatter(PLANNERS["halving_doubling"](names(n), packs=n))
    assert len(scattered.rounds) == n.bit_length() - 1
    additions = {sum(len(step.srcs) - 1 for step in steps) for steps in scattered.rounds}
    assert additions == {n**3 >> k for k in range(1, n.bit_length())}
    gathered = all_gather(reduce_scatter(PLANNERS["recursive_doubling"](names(n), packs=n)))
    assert len(gathered.rounds) == n.bit_length() - 1
    for k, steps in enumerate(gathered.rounds):
        received = Counter((step.srcs[0], step.dst) for step in steps)
        assert set(received.values()) == {1 << k}
        assert len({dst for _, dst in received}) == len(received) == n


def test_routes_are_reversed_too():
    """An all-gather uses a reduce-scatter's routes backwards; these are only for its own transfers."""
    # Two routes between any two devices: transfers without a route of their own use the first bus.
    links = [Link(a, b, 10) for bus in ("b0", "b1") for d in names(3) for a, b in ((d, bus), (bus, d))]
    topology = Topology(names(3), links, ["b0", "b1"])
    scatter = cr.plan(topology, "reduce_scatter", MIB, "forest").schedule
    gather = all_gather(scatter)
    assert scatter.routes
    assert {(*r[:3], r.through) for r in gather.routes} == {
        (r.chunk, r.dst, r.src, r.through[::-1]) for r in scatter.routes
    }
    verify(gather)
    forward, backward = (simulate(one, topology, MIB) for one in (scatter, gather))
    assert {(b, a): count for (a, b), count in forward.bytes.items()} == backward.bytes
    named = {route[:3] for route in scatter.routes}
    assert named <= set(moves(scatter))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunks_stay_where_they_are_first_complete(algorithm):
    """Devices own the chunks that they complete, if these are equally many: then there are no copies."""
    n = 8
    scattered = reduce_scatter(PLANNERS[algorithm](names(n), packs=n))
    assert all(len(step.srcs) > 1 for steps in scattered.rounds for step in steps)


def test_owners_in_turn():
    """If one device completes all chunks, the same number of them is assigned to each device."""
    whole = PLANNERS["one_device"](names(3), root="cpu:1", packs=6)
    scattered = reduce_scatter(whole)
    assert owners(scattered, 2) == [0, 0, 1, 1, 2, 2]
    check_parts(scattered, "reduce_scatter", names(3))
    mains = replace(hierarchical_copy(names(4), packs=4), collective="all_reduce")
    assert owners(reduce_scatter(mains), 2) == [0, 1, 2, 3]
