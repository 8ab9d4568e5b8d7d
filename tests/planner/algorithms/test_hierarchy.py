"""``hierarchical_copy``: TensorFlow's trees for lists of devices, and trees that follow the links of a topology."""

import itertools
from dataclasses import replace
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import names, wired

import crossreduce as cr
from crossreduce import Link, Topology, simulate, verify
from crossreduce.planning import Request, hierarchical_copy, one_device
from crossreduce.planning.schedules import candidates
from crossreduce.schedule import fluid_rate, pipelined
from crossreduce.topology.machines import machine_names

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DGX = Topology.machine("dgx-1v")
H100S = Topology.machine("hgx-h100", hosts=2)


def edges(schedule, c):
    """Return the edges of a chunk's tree into its root, and of the tree out of it, as (child, parent) pairs."""
    everyone = set(schedule.chunks[c].sources)
    cells, up, down = {s: {s} for s in everyone}, [], []
    for steps in schedule.rounds:
        mine = [step for step in steps if step.chunk == c]
        for _, dst, srcs in mine:
            for src in set(srcs) - {dst}:
                copied = cells[src] == everyone and len(srcs) == 1 and len(everyone) > 1
                (down if copied else up).append((dst, src) if copied else (src, dst))
        cells |= {step.dst: set().union(*(cells[src] for src in step.srcs)) for step in mine}
    return up, down


def root_of(schedule, c):
    """Return the root of a chunk's tree: the device that receives partial sums and sends none."""
    up, _ = edges(schedule, c)
    (root,) = {parent for _, parent in up} - {child for child, _ in up}
    return root


def hierarchies(topology, sources=None, destinations=None, packs=1, first=0, root=None):
    """Return the candidates of hierarchical_copy for an all-reduce; by default of all devices."""
    sources, destinations = sources or topology.devices, destinations or topology.devices
    request = Request("all_reduce", sources, destinations, "hierarchical_copy", topology, 0, packs, first, root)
    return candidates(request)


@examples(80)
@given(st.data(), st.integers(2, 7), st.integers(1, 4), st.integers(0, 9))
def test_a_pack_is_one_tree_in_both_directions(data, n, packs, first):
    """Sums of a pack move along a spanning tree to its root, copies back; the roots rotate."""
    topology = data.draw(wired(names(n)))
    for schedule in hierarchies(topology, packs=packs, first=first):
        verify(schedule)
        assert oracle.right(schedule)
        assert schedule.algorithm == "hierarchical_copy"
        assert [chunk.share for chunk in schedule.chunks] == [Fraction(1, packs)] * packs
        for pack in range(packs):
            up, down = edges(schedule, pack)
            assert len(up) == len(set(up)) == n - 1
            assert {child for child, _ in up} == set(range(n)) - {(first + pack) % n}
            assert sorted(up) == sorted(down)


@examples(60)
@given(st.data(), st.integers(2, 6), st.integers(1, 3), st.sampled_from([1, 3 * MIB]))
def test_a_root_is_that_of_every_pack(data, n, packs, nbytes):
    """A given root is that of every tree; the fastest candidate is taken; one_device's schedule is one of them."""
    topology = data.draw(wired(names(n)))
    root = data.draw(st.sampled_from([None, *topology.devices]))
    found = hierarchies(topology, packs=packs, root=root)
    assert one_device(names(n), packs=packs, root=root).rounds in [schedule.rounds for schedule in found]
    for schedule in found:
        roots = [root_of(schedule, pack) for pack in range(packs)]
        due = [pack % n if root is None else names(n).index(root) for pack in range(packs)]
        assert roots == due or (packs == 1 and root is None)
    made = cr.plan(topology, nbytes=nbytes, algorithm="hierarchical_copy", root=root, packs=packs)
    assert replace(made.schedule, pieces=1) in found
    assert made.seconds == min(pipelined(schedule, topology, nbytes)[1] for schedule in found)


@examples(80)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_any_sources_and_destinations(data, n, both_ways):
    """Any devices may be sources and destinations, on any links; every candidate is right."""
    topology = data.draw(wired(names(n), both_ways=both_ways))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True).map(tuple)
    sources, destinations = data.draw(some), data.draw(some)
    for schedule in hierarchies(topology, sources, destinations, packs=2, first=1):
        verify(schedule)
        assert oracle.right(schedule)
        assert simulate(schedule, topology, MIB).seconds >= 0  # every transfer has a route
        for chunk in schedule.chunks:
            assert tuple(schedule.devices[k] for k in chunk.sources) == sources
            assert tuple(schedule.devices[k] for k in chunk.destinations) == destinations


def crossings(topology, schedule, label):
    """Return for each pack how many edges of its tree join devices of different labels."""
    found = []
    for pack in range(len(schedule.chunks)):
        up, _ = edges(schedule, pack)
        found.append(sum(label[schedule.devices[a]] != label[schedule.devices[b]] for a, b in up))
    return found


ISLANDS = {
    "unequal": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "woven": [[0, 2, 4], [1, 3, 5]],
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
}


@pytest.mark.parametrize("name", ISLANDS)
def test_slow_links_are_used_once_per_island(name):
    """Trees for 1 GiB have one edge fewer between islands of fast links than there are islands."""
    groups = ISLANDS[name]
    label = {f"cpu:{k}": number for number, group in enumerate(groups) for k in group}
    n = len(label)
    fast = [Link(f"cpu:{a}", f"cpu:{b}", 50, 1e-6) for group in groups for a, b in itertools.permutations(group, 2)]
    slow = [Link(*pair, 5, 1e-6) for device in label for pair in ((device, "bus"), ("bus", device))]
    topology = Topology(names(n), fast + slow, ["bus"])
    for packs in (1, n):
        made = cr.plan(topology, nbytes=GIB, algorithm="hierarchical_copy", packs=packs)
        assert crossings(topology, made.schedule, label) == [len(groups) - 1] * packs
        plain = cr.plan(topology, nbytes=GIB, algorithm="one_device", packs=packs)
        assert crossings(topology, plain.schedule, label) != crossings(topology, made.schedule, label)
        assert made.seconds < plain.seconds / 1.5
        for pack in range(packs):
            assert root_of(made.schedule, pack) == pack


def test_two_hosts_exchange_each_pack_once():
    """Each pack crosses the network once per direction, and all cards carry the same number of bytes."""
    label = {device: device.split("/")[0] for device in H100S.devices}
    made = cr.plan(H100S, nbytes=GIB, algorithm="hierarchical_copy", packs=16)
    assert crossings(H100S, made.schedule, label) == [1] * 16
    done = simulate(made.schedule, H100S, GIB)
    for k in range(8):
        for host in (0, 1):
            # Each GPU sends 2 of the 16 packs over its rail.
            assert done.bytes[f"host{host}/cuda:{k}", f"rail{k}"] == GIB // 8
    assert made.rate == Fraction(1800, 7)  # the rate inside one machine, so the network is not the limit
    assert cr.plan(H100S, nbytes=GIB, algorithm="one_device", packs=16).rate == 50


def test_tensorflows_trees_are_candidates_on_a_dgx_1v():
    """On a DGX-1V, for which TensorFlow's trees were made, they are candidates, and another candidate is faster."""
    found = hierarchies(DGX, packs=8)
    plain = hierarchical_copy(DGX.devices, packs=8)
    assert plain in found
    assert fluid_rate(plain, DGX) == 50
    made = cr.plan(DGX, nbytes=GIB, algorithm="hierarchical_copy", packs=8)
    assert made.rate == max(fluid_rate(schedule, DGX) for schedule in found) == Fraction(400, 7)
    one = cr.plan(DGX, nbytes=GIB, algorithm="hierarchical_copy")
    assert one.rate == 50  # a chain of double links; TensorFlow's tree reaches 25
    assert fluid_rate(hierarchical_copy(DGX.devices), DGX) == 25


def test_islands_of_the_members():
    """A request's devices are grouped by island (devices joined by fast links); islands without any are left out."""
    label = [k // 3 for k in range(9)]
    cells = [[0 if i == j else 50 if label[i] == label[j] else 1 for j in range(9)] for i in range(9)]
    topology = Topology.from_matrix(cells)
    some = tuple(f"cpu:{k}" for k in (0, 2, 3, 5))
    found = hierarchies(topology, some, some)
    assert hierarchical_copy(some, groups=[some[:2], some[2:]]) in found
    alone = some[:2]  # the request's devices in one island
    assert {len(schedule.rounds) for schedule in hierarchies(topology, alone, alone)} == {2}


@pytest.mark.parametrize("name", [name for name, _ in machine_names()])
def test_never_slower_than_one_device_on_any_machine(name):
    """On no machine, size or number of trees is one_device faster, or TensorFlow's trees."""
    topology = Topology.machine(name)
    n = len(topology.devices)
    for nbytes in (KIB, GIB):
        for packs in (1, n) if n <= 16 else (1,):
            made = cr.plan(topology, nbytes=nbytes, algorithm="hierarchical_copy", packs=packs)
            assert made.seconds <= cr.plan(topology, nbytes=nbytes, algorithm="one_device", packs=packs).seconds
            plain = hierarchical_copy(topology.devices, packs=packs)
            assert made.seconds <= pipelined(plain, topology, nbytes)[1]


@pytest.mark.parametrize(
    ("name", "packs", "least"),
    [("dgx-1v", 1, 3.9), ("dgx-1v", 8, 1.6), ("mi250", 16, 5.0), ("mi100", 8, 3.9), ("epyc-numa-8", 8, 2.2)],
)
def test_much_faster_than_one_device_with_a_hierarchy(name, packs, least):
    """For 1 GiB hierarchical_copy is faster than one_device, at least by these factors, which follow from the links."""
    topology = Topology.machine(name)
    made, plain = (
        cr.plan(topology, nbytes=GIB, algorithm=algorithm, packs=packs)
        for algorithm in ("hierarchical_copy", "one_device")
    )
    assert plain.seconds / made.seconds >= least


# Dumped from a graph of TensorFlow 2.21: for packs 0 to 8 on 8 devices the root and the other device that sums a half.
def trees(schedule):
    """Return for each chunk its combinations, {dst: set of srcs} for each round, and its copies, {dst: src}."""
    found = []
    for chunk in range(len(schedule.chunks)):
        sums, copies = [], {}
        for steps in schedule.rounds:
            mine = [step for step in steps if step.chunk == chunk]
            combined = {step.dst: set(step.srcs) for step in mine if len(step.srcs) > 1}
            sums += [combined] if combined else []
            for step in mine:
                if len(step.srcs) == 1:
                    assert step.dst not in copies
                    copies[step.dst] = step.srcs[0]
        found.append((sums, copies))
    return found


def tf_tree(n, main0, main1):
    """Return the tree of TensorFlow's hierarchical copy for even n, as in its cross_device_utils.py."""
    halves = set(range(n // 2)), set(range(n // 2, n))
    near, far = halves if main0 in halves[0] else halves[::-1]
    sums = [{main0: near, main1: far}] if n > 2 else []
    copies = dict.fromkeys(near - {main0}, main0) | dict.fromkeys(far - {main1}, main1) | {main1: main0}
    return [*sums, {main0: {main0, main1}}], copies


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_hierarchical_copy_on_even_counts_has_tensorflows_trees(n):
    """On n devices the root of pack i is device i mod n, and the main (the device that sums the other half) is n / 2
    devices further; the groups' sums, the sum of the mains and the copies are those of TensorFlow 2.21."""
    schedule = hierarchical_copy(names(n), packs=n + 1)
    assert trees(schedule) == [tf_tree(n, i % n, (i + n // 2) % n) for i in range(n + 1)]
    for first in range(n):
        assert trees(hierarchical_copy(names(n), first=first)) == [tf_tree(n, first, (first + n // 2) % n)]
    if n == 8:  # pack 6 in full, as dumped from a graph of TensorFlow
        assert trees(schedule)[6] == (
            [{6: {4, 5, 6, 7}, 2: {0, 1, 2, 3}}, {6: {6, 2}}],
            {2: 6, 4: 6, 5: 6, 7: 6, 0: 2, 1: 2, 3: 2},
        )


@pytest.mark.parametrize("n", range(3, 18))
def test_hierarchical_copy_has_tensorflows_four_stages(n):
    """The rounds sum the halves, sum the mains, copy to the other main, and copy inside the halves."""
    schedule = hierarchical_copy(names(n), packs=n)
    near, far = set(range(n // 2)), set(range(n // 2, n))
    assert len(schedule.rounds) == 4
    for pack in range(n):
        sums, across, back, copies = ([step for step in steps if step.chunk == pack] for steps in schedule.rounds)
        (total,), (root,) = across, {step.dst for step in across}
        assert {frozenset(step.srcs) for step in sums} == {frozenset(half) for half in (near, far) if len(half) > 1}
        (copy,) = back
        assert copy.srcs == (root,)
        assert set(total.srcs) == {root, copy.dst}
        mains = {root, copy.dst}
        assert {(*step.srcs, step.dst) for step in copies} == {
            (main, d) for main in mains for d in (near if main in near else far) - {main}
        }


@given(st.integers(1, 17), st.integers(0, 40), st.data())
def test_hierarchical_copy_with_groups(n, first, data):
    """With groups, each group is summed on one of its members, and only these exchange data between groups."""
    labels = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    groups = [[f"cpu:{d}" for d in range(n) if labels[d] == label] for label in sorted(set(labels))]
    schedule = hierarchical_copy(names(n), first=first, groups=groups)
    assert oracle.right(schedule)
    crossing = {
        frozenset({src, step.dst})
        for steps in schedule.rounds
        for step in steps
        for src in step.srcs
        if labels[src] != labels[step.dst]
    }
    assert len(crossing) == len(groups) - 1  # the groups' main devices form a star
