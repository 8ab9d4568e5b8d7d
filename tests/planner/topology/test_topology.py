"""Topologies: frozen values of devices and directed links."""

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import device_counts, names

from crossreduce import ArgumentError, DeviceError, Link, Topology

matrices = st.integers(1, 7).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 10, 0.5]), min_size=n, max_size=n), min_size=n, max_size=n
    ).map(lambda rows: [[0 if i == j else entry for j, entry in enumerate(row)] for i, row in enumerate(rows)])
)


def pairs(topology):
    return {(link.src, link.dst): link.bandwidth for link in topology.links}


@given(matrices)
def test_from_matrix_has_a_link_for_each_entry(rows):
    """Row src, column dst, GB/s: an entry above 0 is a link of exactly that bandwidth, 0 is not a link."""
    topology = Topology.from_matrix(rows)
    wanted = {
        (f"cpu:{i}", f"cpu:{j}"): Fraction(entry) for i, row in enumerate(rows) for j, entry in enumerate(row) if entry
    }
    assert topology.devices == names(len(rows))
    assert pairs(topology) == wanted
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            link = topology.link(f"cpu:{i}", f"cpu:{j}")
            assert (None if link is None else link.bandwidth) == (entry or None)


def test_from_matrix_takes_any_numbers():
    """Fractions are kept exactly, a float as the decimal number that it prints; names become canonical."""
    topology = Topology.from_matrix([[0, Fraction(1, 3)], [0.1, 0]], ["GPU:0", "/gpu:1"])
    assert topology.link("cuda:0", "cuda:1") == Link("cuda:0", "cuda:1", Fraction(1, 3), Fraction(0))
    assert topology.link("cuda:1", "cuda:0").bandwidth == Fraction(1, 10)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "uint8"])
def test_from_matrix_takes_a_numpy_matrix(dtype):
    """A matrix of bandwidths can be a NumPy array of integers or floats."""
    topology = Topology.from_matrix(np.array([[0, 25], [25, 0]], dtype))
    assert pairs(topology) == {("cpu:0", "cpu:1"): 25, ("cpu:1", "cpu:0"): 25}


@given(device_counts)
def test_ring(n):
    """A ring links each device to the next one and to the previous one, in both directions, and has no other links."""
    wanted = {(f"cpu:{i}", f"cpu:{j}") for i in range(n) for j in range(n) if i != j and (i - j) % n in (1, n - 1)}
    topology = Topology.ring(n, 5)
    assert set(pairs(topology)) == wanted
    assert len(topology.links) == len(wanted)
    assert set(pairs(topology).values()) <= {5}
    assert topology == Topology.ring(names(n), Fraction(5))


@given(device_counts)
def test_full_mesh(n):
    """A full mesh has a link for each ordered pair."""
    topology = Topology.full_mesh(n, 2.5)
    assert pairs(topology) == {(a, b): Fraction(5, 2) for a in names(n) for b in names(n) if a != b}
    assert len(topology.links) == n * (n - 1)


@given(matrices, st.data())
def test_subset_keeps_links_among_the_chosen(rows, data):
    """A subset has the given devices, in the given order, and exactly the links between them."""
    topology = Topology.from_matrix(rows)
    chosen = data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True))
    part = topology.subset(name.upper() for name in chosen)
    assert part.devices == tuple(chosen)
    assert pairs(part) == {pair: b for pair, b in pairs(topology).items() if set(pair) <= set(chosen)}


@given(matrices, st.data())
def test_without_link_removes_both_directions(rows, data):
    """The links between two devices are removed in both directions; all others stay, and the original topology does not
    change."""
    topology = Topology.from_matrix(rows)
    before = pairs(topology)
    if not before:
        return
    a, b = data.draw(st.sampled_from(sorted(before)))
    less = topology.without_link(b, a)
    assert pairs(less) == {pair: width for pair, width in before.items() if set(pair) != {a, b}}
    assert less.devices == topology.devices
    assert pairs(topology) == before


@given(matrices)
def test_renamed_keeps_the_wiring(rows):
    """The i-th device gets the i-th name, and so do the ends of its links."""
    topology = Topology.from_matrix(rows)
    n = len(rows)
    turned = tuple(f"cuda:{(k + 3) % n}" for k in range(n))
    new = topology.renamed(turned)
    assert new.devices == turned
    to = dict(zip(topology.devices, turned, strict=True))
    assert pairs(new) == {(to[a], to[b]): width for (a, b), width in pairs(topology).items()}
    assert new.renamed(topology.devices) == topology


def closure(n, joined):
    """Return the connected components of n devices and these undirected pairs, as tuples of names."""
    groups, left = [], list(range(n))
    while left:
        group = {left[0]}
        while grown := {j for i, j in joined if i in group} | {i for i, j in joined if j in group}:
            if grown <= group:
                break
            group |= grown
        groups.append(tuple(f"cpu:{k}" for k in sorted(group)))
        left = [k for k in left if k not in group]
    return tuple(groups)


@given(matrices)
def test_islands_are_joined_by_the_fastest_links(rows):
    """Two devices are in one island if and only if links of the greatest bandwidth, in any direction, join them."""
    fastest = max(max(row) for row in rows)
    joined = [(i, j) for i, row in enumerate(rows) for j, entry in enumerate(row) if entry and entry == fastest]
    assert Topology.from_matrix(rows).islands == closure(len(rows), joined)


def test_islands_of_known_machines():
    """Two groups of four with slower links between them are two islands; links of one bandwidth make one island."""
    quads = [[0 if i == j else 50 if i // 4 == j // 4 else 25 for j in range(8)] for i in range(8)]
    assert Topology.from_matrix(quads).islands == (names(8)[:4], names(8)[4:])
    assert Topology.ring(5).islands == (names(5),)
    assert Topology.full_mesh(1).islands == (("cpu:0",),)
    woven = [[0 if i == j else 9 if i % 2 == j % 2 else 1 for j in range(5)] for i in range(5)]
    assert Topology.from_matrix(woven).islands == (("cpu:0", "cpu:2", "cpu:4"), ("cpu:1", "cpu:3"))


A, B, C = names(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Topology((), ()), "at least one device"),
        (lambda: Topology.ring(0), r"at least one device[\s\S]*given: 0 \(int\)"),
        (lambda: Topology.full_mesh(-3), r"at least one device[\s\S]*given: -3 \(int\)"),
        (lambda: Topology.from_matrix([]), "at least one device"),
        (lambda: Topology.full_mesh([]), "at least one device"),
        (lambda: Topology.ring(True), "devices must be a list of names"),
        (lambda: Topology.ring(2.0), "devices must be a list of names"),
        (lambda: Topology.ring("cpu:0"), "devices must be a list of names"),
        (lambda: Topology.ring([A, "CPU:0"]), "each device may be listed only once: cpu:0 is listed more than once"),
        (lambda: Topology((A, B), (Link(A, A, 1),)), r"two different nodes[\s\S]*cpu:0 -> cpu:0"),
        (lambda: Topology((A, B), (Link(A, C, 1),)), r"nodes of the topology[\s\S]*cpu:0 -> cpu:2"),
        (lambda: Topology((A, B), (Link(A, B, 0),)), r"must have a bandwidth above 0[\s\S]*cpu:0 -> cpu:1, 0 GB/s"),
        (
            lambda: Topology((A, B), (Link(A, B, 1), Link("CPU:0", "CPU:1", 2))),
            r"only once[\s\S]*one link with the sum",
        ),
        (lambda: Topology((A, B), (Link(A, B, -1),)), r"a number of GB/s[\s\S]*given: -1"),
        (lambda: Topology.from_matrix([[0, 1], [1]]), r"must be square[\s\S]*2 rows, whose lengths are \[1, 2\]"),
        (lambda: Topology.from_matrix([[0, 1, 2], [1, 0, 2]]), "must be square"),
        (lambda: Topology.from_matrix([[7]]), "must not have a link to itself"),
        (lambda: Topology.from_matrix([[0, 1], [1, 0]], [A]), "2 rows, 1 devices"),
        (lambda: Topology.from_matrix([[0, math.nan], [1, 0]]), r"a number of GB/s[\s\S]*given: nan"),
        (lambda: Topology.from_matrix([[0, math.inf], [1, 0]]), r"a number of GB/s[\s\S]*given: inf"),
        (lambda: Topology.from_matrix([[0, "1"], [1, 0]]), r"a number of GB/s[\s\S]*given: '1'"),
        (lambda: Topology.from_matrix([[0, True], [1, 0]]), r"a number of GB/s[\s\S]*given: True"),
        (lambda: Topology.from_matrix([[0, None], [1, 0]]), r"a number of GB/s[\s\S]*given: None"),
        (lambda: Topology.full_mesh(2, -5), r"a number of GB/s[\s\S]*given: -5"),
        (lambda: Topology.ring(3).subset([]), "at least one device"),
        (
            lambda: Topology.ring(3).subset(["cpu:7", A]),
            r"no such device[\s\S]*given: cpu:7\n[\s\S]*one of cpu:0, cpu:1, cpu:2",
        ),
        (lambda: Topology.ring(3).subset(A), "devices must be a list of names"),
        (lambda: Topology.ring(3).without_link(A, "cpu:9"), r"no such device[\s\S]*cpu:9"),
        (
            lambda: Topology.ring(4).without_link(A, C),
            r"no such link[\s\S]*cpu:0 - cpu:2[\s\S]*out of cpu:0: cpu:1, cpu:3",
        ),
        (lambda: Topology.ring(4).without_link(A, A), r"no such link[\s\S]*cpu:0 - cpu:0"),
        (lambda: Topology.ring(3).renamed([A, A, B]), "each device may be listed only once"),
    ],
)
def test_bad_topologies_are_refused(make, text):
    """Invalid arguments raise an ArgumentError that states the problem and the given value."""
    with pytest.raises(ArgumentError, match=text):
        make()


def test_invalid_names_are_device_errors():
    """A name that cannot be parsed raises a DeviceError that shows it."""
    for make in (lambda: Topology.ring(["foo"]), lambda: Topology((A,), (Link(A, "bar", 1),))):
        with pytest.raises(DeviceError, match=r"given: '(foo|bar)'"):
            make()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_renamed_needs_one_name_per_device(count):
    """Too few or too many names raise an ArgumentError that states the number of devices."""
    with pytest.raises(ArgumentError, match=r"one name for each device[\s\S]*try:   3 names"):
        Topology.ring(3).renamed(names(4)[:count])


@pytest.mark.parametrize("latency", [-1, math.nan, math.inf, "x", None])
def test_latency_is_a_number_of_seconds(latency):
    """A latency that is not a finite number of seconds, 0 or more, raises an ArgumentError."""
    with pytest.raises(ArgumentError, match="latency"):
        Topology((A, B), (Link(A, B, 1, latency),))


def test_link_accepts_every_spelling():
    """link() accepts names in any spelling, like subset() and without_link()."""
    assert Topology.ring(3).link("CPU:0", "/cpu:1") == Link(A, B, Fraction(1), Fraction(0))


def test_equal_topologies_have_equal_hashes():
    """Topologies with equal devices and links are equal; the order of the given links does not matter."""
    forward = Topology((A, B, C), (Link(A, B, 1), Link(B, C, 2.0), Link(C, A, Fraction(3))))
    backward = Topology(["CPU:0", B, C], [Link(C, A, 3), Link("CPU:1", C, 2), Link(A, B, 1)])
    assert forward == backward
    assert hash(forward) == hash(backward)
    assert forward.links == backward.links
    assert len({forward, backward}) == 1
    assert forward != Topology((A, C, B), forward.links)
    assert forward != Topology((A, B, C), (*forward.links[:2], Link(C, A, 4)))
    assert forward != Topology((A, B, C), (*forward.links[:2], Link(C, A, 3, Fraction(1, 10**6))))


def test_latencies_are_kept():
    """The latency of a link is kept exactly, through subset() and renamed()."""
    topology = Topology((A, B), (Link(A, B, 1, Fraction(1, 10**6)),))
    assert topology.subset([B, A]).renamed(["cpu:5", "cpu:6"]).link("cpu:6", "cpu:5").latency_s == Fraction(1, 10**6)


def test_topologies_are_frozen():
    """No part of a topology can be assigned, its links included."""
    topology = Topology.ring(3)
    for name in ("devices", "links"):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
            setattr(topology, name, ())
    with pytest.raises(AttributeError, match="can't set attribute"):
        topology.links[0].src = B
    assert isinstance(topology.links, tuple)
    assert isinstance(topology.devices, tuple)


def test_repr_and_pickle():
    """A repr lists the devices and counts the links; a topology can be pickled, also after islands were computed."""
    topology = Topology.full_mesh(3)
    assert repr(topology) == "Topology(3 devices, 6 links: cpu:0, cpu:1, cpu:2)"
    assert repr(topology.subset([1])) == "Topology(1 device, 0 links: cpu:1)"
    assert topology.islands
    assert pickle.loads(pickle.dumps(topology)) == topology
