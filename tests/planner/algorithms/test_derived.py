"""Reduce-scatters and all-gathers derived from all-reduces: device i has part i, without unneeded transfers."""

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
from crossreduce.planning.algorithms.scatter_and_gather import all_gather, reduce_scatter
from crossreduce.planning.topologies import reversed_topology

MIB = 1 << 20


def owners(schedule, end):
    """Return the device of each chunk: its only destination (end 2), or its only source (end 1)."""
    return [device for (device,) in (chunk[end] for chunk in schedule.chunks)]


def check_parts(schedule, collective, members):
    """Check that a reduce-scatter leaves part i of the sum on device i, or that an all-gather copies it from there."""
    n = len(members)
    single, several = (2, 1) if collective == "reduce_scatter" else (1, 2)  # 1: sources, 2: destinations
    assert schedule.collective == collective
    assert schedule.devices[:n] == tuple(members)
    at = Fraction(0)  # where a chunk begins, as a part of the buffer
    for owner, chunk in zip(owners(schedule, single), schedule.chunks, strict=True):
        assert Fraction(owner, n) <= at
        at += chunk.share
        assert at <= Fraction(owner + 1, n)
        assert set(chunk[several]) == set(range(n))
    assert at == 1
    verify(schedule)
    assert oracle.right(schedule)


def moves(schedule):
    """Return the number of transfers by (chunk, src, dst)."""
    steps = [step for steps in schedule.rounds for step in steps]
    return Counter((chunk, src, dst) for chunk, dst, srcs in steps for src in set(srcs) - {dst})


@examples(80)
@given(st.data(), st.integers(2, 7), st.sampled_from([*NAMED, "auto"]), st.booleans())
def test_some_devices_of_any_topology(data, n, algorithm, both_ways):
    """If some devices of a topology take part, in any order, part i is on the i-th of them."""
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
    """An all-gather takes as long as a reduce-scatter on the reversed links, and moves the same bytes backwards."""
    there = [("cpu:0", "a", 25), ("cpu:1", "a", 12), ("cpu:2", "b", 25), ("cpu:3", "b", 3), ("a", "b", 10)]
    back = [(dst, src, gb_per_s * 2 + 1) for src, dst, gb_per_s in there]
    uneven = Topology(names(4), [Link(*link, 1e-6) for link in there + back], ["a", "b"])
    around = [Link(f"cpu:{k}", f"cpu:{(k + 1) % 4}", 25, 1e-6) for k in range(4)]
    for topology in (uneven, Topology(names(4), around)):
        gather = cr.plan(topology, "all_gather", 5 * MIB, algorithm)
        scatter = cr.plan(topology.reversed(), "reduce_scatter", 5 * MIB, algorithm)
        assert gather.seconds == pytest.approx(scatter.seconds, rel=1e-9)
        assert gather.bound.algbw == scatter.bound.algbw
        gathered = simulate(gather.schedule, topology, MIB).bytes
        scattered = simulate(scatter.schedule, topology.reversed(), MIB).bytes
        assert {(b, a): count for (a, b), count in gathered.items()} == scattered


@examples(100)
@given(algorithms, st.integers(1, 9), st.integers(0, 9))
def test_the_steps_that_are_kept_of_an_all_reduce(algorithm, n, first):
    """A reduce-scatter has only the transfers of an all-reduce that bring a chunk to its owner.

    An all-gather has the reversed transfers, except those that are not needed.
    """
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
        if algorithm in PAIRED:  # log2 n rounds
            assert len(scattered.rounds) == n.bit_length() - 1


def test_owners_of_chunks():
    """A device owns the chunks that it completes, without copies. If one completes all, all own equally many."""
    for planner in PLANNERS.values():
        scattered = reduce_scatter(planner(names(8), packs=8))
        assert all(len(step.srcs) > 1 for steps in scattered.rounds for step in steps)
    whole = PLANNERS["one_device"](names(3), root="cpu:1", packs=6)
    scattered = reduce_scatter(whole)
    assert owners(scattered, 2) == [0, 0, 1, 1, 2, 2]
    check_parts(scattered, "reduce_scatter", names(3))
    mains = replace(hierarchical_copy(names(4), packs=4), collective="all_reduce")
    assert owners(reduce_scatter(mains), 2) == [0, 1, 2, 3]


def test_reversed_topologies_are_one_object():
    """Planning does not make several equal topologies: caches would compare all of their links at each lookup."""
    ring = Topology.ring(4, gb_per_s=2)
    assert reversed_topology(ring) is ring
    one_way = Topology(ring.devices, ring.links[::2])
    assert reversed_topology(one_way) == one_way.reversed() != one_way
    assert reversed_topology(Topology(ring.devices, ring.links[::2])) is reversed_topology(one_way)
