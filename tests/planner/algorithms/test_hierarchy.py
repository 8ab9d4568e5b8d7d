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
from crossreduce import Link, Topology, verify
from crossreduce.planning import Request, hierarchical_copy, one_device
from crossreduce.planning.schedules import candidates
from crossreduce.schedule import pipelined

MIB, GIB = 1 << 20, 1 << 30


def edges(schedule, c):
    """Return the (child, parent) edges of a chunk's tree into its root, and those of its tree out of the root."""
    everyone = set(schedule.chunks[c].sources)
    cells, up, down = {s: {s} for s in everyone}, [], []  # cells: the contributions that each device has
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
    """The sums of a pack move along a spanning tree to its root, and copies move back along it. The roots rotate."""
    topology = data.draw(wired(names(n)))
    for schedule in hierarchies(topology, packs=packs, first=first):
        verify(schedule)
        assert oracle.right(schedule)
        assert schedule.algorithm == "hierarchical_copy"
        assert [chunk.share for chunk in schedule.chunks] == [Fraction(1, packs)] * packs
        for pack in range(packs):
            up, down = edges(schedule, pack)
            assert len(up) == len(set(up)) == n - 1
            assert {child for child, _ in up} == set(range(n)) - {(first + pack) % n}  # all devices but the root
            assert sorted(up) == sorted(down)


@examples(60)
@given(st.data(), st.integers(2, 6), st.integers(1, 3), st.sampled_from([1, 3 * MIB]))
def test_a_root_is_that_of_every_pack(data, n, packs, nbytes):
    """A given root is the root of every tree. The plan is the fastest candidate, and one_device is a candidate."""
    topology = data.draw(wired(names(n)))
    root = data.draw(st.sampled_from([None, *topology.devices]))
    found = hierarchies(topology, packs=packs, root=root)
    assert one_device(names(n), packs=packs, root=root).rounds in [schedule.rounds for schedule in found]
    for schedule in found:
        roots = [root_of(schedule, pack) for pack in range(packs)]
        wanted = [pack % n if root is None else names(n).index(root) for pack in range(packs)]
        assert roots == wanted or (packs == 1 and root is None)  # a single pack may have any root
    made = cr.plan(topology, nbytes=nbytes, algorithm="hierarchical_copy", root=root, packs=packs)
    assert replace(made.schedule, pieces=1) in found
    assert made.seconds == min(pipelined(schedule, topology, nbytes)[1] for schedule in found)


def crossings(topology, schedule, label):
    """Return for each pack how many edges of its tree into the root join devices of different labels."""
    found = []
    for pack in range(len(schedule.chunks)):
        up, _ = edges(schedule, pack)
        found.append(sum(label[schedule.devices[a]] != label[schedule.devices[b]] for a, b in up))
    return found


ISLANDS = {  # groups of devices that fast links join
    "unequal": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "woven": [[0, 2, 4], [1, 3, 5]],
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
}


@pytest.mark.parametrize("name", ISLANDS)
def test_slow_links_are_used_once_per_island(name):
    """Trees for 1 GiB have the least number of edges between islands: one fewer than there are islands."""
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


def test_islands_of_the_members():
    """The devices of a request are grouped by island. Islands without devices of the request are left out."""
    label = [k // 3 for k in range(9)]  # three islands of three devices
    cells = [[0 if i == j else 50 if label[i] == label[j] else 1 for j in range(9)] for i in range(9)]
    topology = Topology.from_matrix(cells)
    some = tuple(f"cpu:{k}" for k in (0, 2, 3, 5))
    found = hierarchies(topology, some, some)
    assert hierarchical_copy(some, groups=[some[:2], some[2:]]) in found
    alone = some[:2]  # devices of one island: a reduction and a copy, and no rounds between islands
    assert {len(schedule.rounds) for schedule in hierarchies(topology, alone, alone)} == {2}


@pytest.mark.parametrize("n", range(3, 18))
def test_hierarchical_copy_has_tensorflows_four_stages(n):
    """The four rounds of a pack are those of TensorFlow 2.21, with a main device in each half of the devices.

    They sum each half on its main, add the sums on one main (the root), copy the result to the other main, and copy it
    inside the halves. The root of pack i is device i. For even n, the other main is n / 2 devices further.
    """
    schedule = hierarchical_copy(names(n), packs=n)
    near, far = set(range(n // 2)), set(range(n // 2, n))
    assert len(schedule.rounds) == 4
    for pack in range(n):
        sums, across, back, copies = ([step for step in steps if step.chunk == pack] for steps in schedule.rounds)
        (total,), (root,) = across, {step.dst for step in across}  # total: the step that adds the two sums
        assert {frozenset(step.srcs) for step in sums} == {frozenset(half) for half in (near, far) if len(half) > 1}
        (copy,) = back
        assert copy.srcs == (root,)
        assert set(total.srcs) == {root, copy.dst}
        mains = {root, copy.dst}
        assert root == pack
        assert n % 2 or copy.dst == (pack + n // 2) % n
        half = {main: near if main in near else far for main in mains}
        assert {(*step.srcs, step.dst) for step in copies} == {(main, d) for main in mains for d in half[main] - {main}}


@given(st.integers(1, 17), st.integers(0, 40), st.data())
def test_hierarchical_copy_with_groups(n, first, data):
    """With groups, each group is summed on one of its members. Only these members exchange data between groups."""
    labels = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    groups = [[f"cpu:{d}" for d in range(n) if labels[d] == label] for label in sorted(set(labels))]
    schedule = hierarchical_copy(names(n), first=first, groups=groups)
    assert oracle.right(schedule)
    reads = [(src, step.dst) for steps in schedule.rounds for step in steps for src in step.srcs]
    crossing = {frozenset(pair) for pair in reads if len({labels[device] for device in pair}) > 1}
    assert len(crossing) == len(groups) - 1  # the groups' main devices form a star
