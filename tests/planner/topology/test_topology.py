"""Topologies: frozen values of devices and directed links."""

import math
from fractions import Fraction
from itertools import permutations, product

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


@given(matrices)
def test_from_matrix_has_a_link_for_each_entry(rows):
    """Row src, column dst, GB/s: an entry above 0 is a link of exactly that bandwidth, 0 is not a link."""
    topology = Topology.from_matrix(rows)
    assert topology.devices == names(len(rows))
    assert all(link == topology.link(*link[:2]) for link in topology.links)
    for i, j in product(range(len(rows)), repeat=2):
        link = topology.link(f"cpu:{i}", f"cpu:{j}")
        assert (None if link is None else link.bandwidth) == (Fraction(rows[i][j]) or None)


def test_from_matrix_takes_any_numbers():
    """Fractions are exact, floats the decimals that they print; NumPy arrays are matrices, too."""
    topology = Topology.from_matrix([[0, Fraction(1, 3)], [0.1, 0]], ["GPU:0", "/gpu:1"])
    assert topology.link("cuda:0", "cuda:1") == Link("cuda:0", "cuda:1", Fraction(1, 3), Fraction(0))
    assert topology.link("cuda:1", "cuda:0").bandwidth == Fraction(1, 10)
    for dtype in ("float64", "float32", "int64", "int32", "uint8"):
        assert Topology.from_matrix(np.array([[0, 25], [25, 0]], dtype)) == Topology.full_mesh(2, 25)


@given(device_counts)
def test_ring_and_full_mesh(n):
    """A ring links neighbours, a full mesh every ordered pair; all links have one latency, 0 by default."""
    pairs, order = set(permutations(names(n), 2)), names(n).index
    neighbours = {(a, b) for a, b in pairs if (order(a) - order(b)) % n in (1, n - 1)}
    for make, wanted in ((Topology.ring, neighbours), (Topology.full_mesh, pairs)):
        for latency in ((), (1e-6,)):
            due = {Link(*pair, Fraction(5, 2), Fraction(len(latency), 10**6)) for pair in wanted}
            assert set(make(n, 2.5, *latency).links) == due
    matrix = [[0 if a == b else 5 for b in range(n)] for a in range(n)]
    assert Topology.from_matrix(matrix, None, 1e-6) == Topology.full_mesh(n, 5, 1e-6)
    assert Topology.ring(n, 5) == Topology.ring(names(n), Fraction(5)) == Topology.torus(n, gb_per_s=5)


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


A, B, C = names(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((lambda make=make: make([]), "at least one device") for make in (Topology.from_matrix, Topology.full_mesh)),
        (lambda: Topology((), ()), "at least one device"),
        (lambda: Topology.ring(0), r"at least one device[\s\S]*given: 0 \(int\)"),
        (lambda: Topology.full_mesh(-3), r"at least one device[\s\S]*given: -3 \(int\)"),
        *((lambda n=n: Topology.ring(n), "devices must be a list of names") for n in (True, 2.0, "cpu:0")),
        (lambda: Topology.ring([A, "CPU:0"]), "each device may be listed only once: cpu:0 is listed more than once"),
        (lambda: Topology((A, B), (Link(A, A, 1),)), r"two different nodes[\s\S]*cpu:0 -> cpu:0"),
        (lambda: Topology((A, B), (Link(A, C, 1),)), r"nodes of the topology[\s\S]*cpu:0 -> cpu:2"),
        (lambda: Topology((A, B), (Link(A, B, 0),)), r"must have a bandwidth above 0[\s\S]*cpu:0 -> cpu:1, 0 GB/s"),
        (lambda: Topology((A, B), ((A, B, 1), ("CPU:0", "CPU:1", 2))), r"only once[\s\S]*one link with the sum"),
        (lambda: Topology((A, B), (Link(A, B, -1),)), r"a number of GB/s[\s\S]*given: -1"),
        (lambda: Topology.from_matrix([[0, 1], [1]]), r"must be square[\s\S]*2 rows, whose lengths are \[1, 2\]"),
        (lambda: Topology.from_matrix([[0, 1, 2], [1, 0, 2]]), "must be square"),
        (lambda: Topology.from_matrix([[7]]), "must not have a link to itself"),
        (lambda: Topology.from_matrix([[0, 1], [1, 0]], [A]), "2 rows, 1 devices"),
        *(
            (lambda x=x: Topology.from_matrix([[0, x], [1, 0]]), rf"a number of GB/s[\s\S]*given: {x!r}")
            for x in (math.nan, math.inf, "1", True, None)
        ),
        (lambda: Topology.full_mesh(2, -5), r"a number of GB/s[\s\S]*given: -5"),
        (lambda: Topology.ring(3).subset([]), "at least one device"),
        (
            lambda: Topology.ring(3).subset(["cpu:7", A]),
            r"no such device[\s\S]*: cpu:7\n[\s\S]*one of cpu:0, cpu:1, cpu:2",
        ),
        (lambda: Topology.ring(3).subset(A), "devices must be a list of names"),
        (lambda: Topology.ring(3).without_link(A, "cpu:9"), r"no such device[\s\S]*cpu:9"),
        (lambda: Topology.ring(4).without_link(A, C), r"no such link[\s\S]*- cpu:2[\s\S]*out of cpu:0: cpu:1, cpu:3"),
        (lambda: Topology.ring(4).without_link(A, A), r"no such link[\s\S]*cpu:0 - cpu:0"),
        (lambda: Topology.ring(3).renamed([A, A, B]), "each device may be listed only once"),
        *(
            (lambda count=count: Topology.ring(3).renamed(names(4)[:count]), r"one name for each[\s\S]*try:   3 names")
            for count in (1, 2, 4)
        ),
        *((lambda x=x: Topology((A, B), (Link(A, B, 1, x),)), "latency") for x in (-1, math.nan, math.inf, "x", None)),
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


def test_spellings_and_repr():
    """Order and spelling do not matter; a repr counts links; latencies are exact through subset() and renamed()."""
    forward = Topology((A, B, C), (Link(A, B, 1), Link(B, C, 2.0), Link(C, A, Fraction(3))))
    assert forward == Topology(["CPU:0", B, C], [Link(C, A, 3), Link("CPU:1", C, 2), Link(A, B, 1)])
    assert forward.link("CPU:0", "/cpu:1") == Link(A, B, Fraction(1), Fraction(0))
    for changed in (Link(C, A, 4), Link(C, A, 3, Fraction(1, 10**6))):
        assert forward != Topology((A, B, C), (*forward.links[:2], changed))
    assert forward != Topology((A, C, B), forward.links)
    assert repr(Topology.full_mesh(3)) == "Topology(3 devices, 6 links: cpu:0, cpu:1, cpu:2)"
    assert repr(Topology.full_mesh(3).subset([1])) == "Topology(1 device, 0 links: cpu:1)"
    part = Topology.full_mesh(2, 1, Fraction(1, 10**6)).subset([B, A]).renamed(["cpu:5", "cpu:6"])
    assert part.link("cpu:6", "cpu:5").latency_s == Fraction(1, 10**6)
