"""Topologies: frozen values of devices, switches and directed links; routes, shapes, and topologies as JSON."""

import dataclasses
import json
import math
import pickle
from fractions import Fraction
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from strategies import device_counts, names

from crossreduce import ArgumentError, DeviceError, Link, Switch, Topology

matrices = st.integers(1, 7).flatmap(  # square, with 0 on the diagonal
    lambda n: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 10, 0.5]), min_size=n, max_size=n), min_size=n, max_size=n
    ).map(lambda rows: [[0 if i == j else entry for j, entry in enumerate(row)] for i, row in enumerate(rows)])
)


@given(matrices)
def test_from_matrix_has_a_link_for_each_entry(rows):
    """The entry in row src and column dst is exactly the bandwidth of a link in GB/s, or 0 if there is no link."""
    topology = Topology.from_matrix(rows)
    assert topology.devices == names(len(rows))
    assert all(link == topology.link(*link[:2]) for link in topology.links)
    for i, j in product(range(len(rows)), repeat=2):
        link = topology.link(f"cpu:{i}", f"cpu:{j}")
        assert (link is None) == (rows[i][j] == 0)
        assert link is None or link.bandwidth == Fraction(rows[i][j])


def test_from_matrix_takes_any_numbers():
    """Fractions are taken exactly, and floats as the decimals that they print. A NumPy array can be the matrix."""
    topology = Topology.from_matrix([[0, Fraction(1, 3)], [0.1, 0]], ["GPU:0", "/gpu:1"])
    assert topology.link("cuda:0", "cuda:1") == Link("cuda:0", "cuda:1", Fraction(1, 3), Fraction(0))
    assert topology.link("cuda:1", "cuda:0").bandwidth == Fraction(1, 10)
    for dtype in ("float64", "float32", "int64", "int32", "uint8"):
        assert Topology.from_matrix(np.array([[0, 25], [25, 0]], dtype)) == Topology.full_mesh(2, 25)


@given(device_counts)
def test_ring_and_full_mesh(n):
    """A ring links neighbours, and a full mesh every ordered pair. All links have the same latency, by default 0."""
    pairs, number = set(permutations(names(n), 2)), names(n).index
    neighbours = {(a, b) for a, b in pairs if (number(a) - number(b)) % n in (1, n - 1)}
    for make, wanted in ((Topology.ring, neighbours), (Topology.full_mesh, pairs)):
        for arguments, latency_s in (((), Fraction(0)), ((1e-6,), MICRO)):
            due = {Link(*pair, Fraction(5, 2), latency_s) for pair in wanted}
            assert set(make(n, 2.5, *arguments).links) == due
    matrix = [[0 if a == b else 5 for b in range(n)] for a in range(n)]
    assert Topology.from_matrix(matrix, None, 1e-6) == Topology.full_mesh(n, 5, 1e-6)
    assert Topology.ring(n, 5) == Topology.ring(names(n), Fraction(5)) == Topology.torus(n, gb_per_s=5)


@given(matrices)
def test_islands_are_joined_by_the_fastest_links(rows):
    """Two devices are in one island if and only if links of the greatest bandwidth, in any direction, join them."""
    fastest = max(max(row) for row in rows)
    count, labels = connected_components(csr_array(np.array(rows) == (fastest or -1)), directed=False)
    due = [tuple(f"cpu:{k}" for k in np.flatnonzero(labels == label)) for label in range(count)]
    by_number = sorted(due, key=lambda island: int(island[0].removeprefix("cpu:")))
    assert Topology.from_matrix(rows).islands == tuple(by_number)


A, B, C = names(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((lambda make=make: make([]), "at least one device") for make in (Topology.from_matrix, Topology.full_mesh)),
        (lambda: Topology((), ()), "at least one device"),
        (lambda: Topology.ring(0), r"at least one device[\s\S]*given: 0 \(int\)"),
        *((lambda n=n: Topology.ring(n), "devices must be a list of names") for n in (True, 2.0, "cpu:0")),
        (lambda: Topology.ring([A, "CPU:0"]), "each device may be listed only once: cpu:0 is listed more than once"),
        (lambda: Topology((A, B), (Link(A, A, 1),)), r"two different nodes[\s\S]*cpu:0 -> cpu:0"),
        (lambda: Topology((A, B), (Link(A, C, 1),)), r"nodes of the topology[\s\S]*cpu:0 -> cpu:2"),
        (lambda: Topology((A, B), (Link(A, B, 0),)), r"must have a bandwidth above 0[\s\S]*cpu:0 -> cpu:1, 0 GB/s"),
        (lambda: Topology((A, B), ((A, B, 1), ("CPU:0", "CPU:1", 2))), r"only once[\s\S]*one link with the sum"),
        (lambda: Topology((A, B), (Link(A, B, -1),)), r"a number of GB/s[\s\S]*given: -1"),
        (lambda: Topology.from_matrix([[0, 1], [1]]), r"must be square[\s\S]*2 rows, whose lengths are \[1, 2\]"),
        (lambda: Topology.from_matrix([[7]]), "must not have a link to itself"),
        (lambda: Topology.from_matrix([[0, 1], [1, 0]], [A]), "2 rows, 1 devices"),
        *(
            (lambda x=x: Topology.from_matrix([[0, x], [1, 0]]), rf"a number of GB/s[\s\S]*given: {x!r}")
            for x in (math.nan, math.inf, "1", True, None)
        ),
        (lambda: Topology.ring(3).subset([]), "at least one device"),
        (
            lambda: Topology.ring(3).subset(["cpu:7", A]),
            r"no such device[\s\S]*: cpu:7\n[\s\S]*one of cpu:0, cpu:1, cpu:2",
        ),
        (lambda: Topology.ring(3).subset(A), "devices must be a list of names"),
        (lambda: Topology.ring(4).without_link(A, C), r"no such link[\s\S]*- cpu:2[\s\S]*out of cpu:0: cpu:1, cpu:3"),
        (lambda: Topology.star(3).without_link("switch", "switch"), r"out of switch: cpu:0, cpu:1, cpu:2"),
        (lambda: Topology.star(3).without_link("switch", "cpu:3"), r"one of cpu:0, cpu:1, cpu:2, switch"),
        (lambda: Topology.ring(3).renamed([A, A, B]), "each device may be listed only once"),
        *(
            (lambda count=count: Topology.ring(3).renamed(names(4)[:count]), r"one name for each[\s\S]*try:   3 names")
            for count in (2, 4)
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
    """The order of links and the spelling of names do not count for equality; speeds and the order of devices do. The
    repr counts devices and links. subset() and renamed() keep latencies exactly."""
    forward = Topology((A, B, C), (Link(A, B, 1), Link(B, C, 2.0), Link(C, A, Fraction(3))))
    assert forward == Topology(["CPU:0", B, C], [Link(C, A, 3), Link("CPU:1", C, 2), Link(A, B, 1)])
    assert forward.link("CPU:0", "/cpu:1") == Link(A, B, Fraction(1), Fraction(0))
    for changed in (Link(C, A, 4), Link(C, A, 3, MICRO)):
        assert forward != Topology((A, B, C), (*forward.links[:2], changed))
    assert forward != Topology((A, C, B), forward.links)
    assert repr(Topology.full_mesh(3)) == "Topology(3 devices, 6 links: cpu:0, cpu:1, cpu:2)"
    assert repr(Topology.full_mesh(3).subset([1])) == "Topology(1 device, 0 links: cpu:1)"
    part = Topology.full_mesh(2, 1, Fraction(1, 10**6)).subset([B, A]).renamed(["cpu:5", "cpu:6"])
    assert part.link("cpu:6", "cpu:5").latency_s == Fraction(1, 10**6)


MICRO = Fraction(1, 10**6)

numbers = st.sampled_from([1, 2, 25, 0.1, 12.5, Fraction(64, 3), Fraction(1, 7)])
latencies = st.sampled_from([0, MICRO, Fraction(7, 10**7), 0.25])
switch_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/#-]{0,8}", fullmatch=True).filter(
    lambda name: name.lower() not in ("cpu", "gpu", "cuda", "tpu", "mps", "xpu") and "/" not in name and "#" not in name
)


@st.composite
def topologies(draw, most_devices=4, most_switches=3, speeds=numbers):
    """Draw devices, switches of any names and kinds, and links between any of these nodes."""
    devices = draw(st.permutations(names(most_devices)).map(tuple))[: draw(st.integers(1, most_devices))]
    switches = draw(st.lists(switch_names, max_size=most_switches, unique=True))
    nodes = [*devices, *switches]
    pairs = [pair for pair in permutations(nodes, 2) if draw(st.booleans())]
    links = [Link(a, b, draw(speeds), draw(latencies)) for a, b in pairs]
    return Topology(devices, links, [Switch(name, draw(st.booleans())) for name in switches])


def pairs(topology):
    return {(link.src, link.dst): link.bandwidth for link in topology.links}


# Switches.


def test_a_switch_is_a_node():
    """Nodes are the devices and then the switches. Links may join any two nodes, and are sorted in this order."""
    topology = Topology([B, A], [("x", A, 1), ("x", "y", 2), (B, "x", 3), (A, B, 4)], ["y", Switch("x", True)])
    assert topology.nodes == (B, A, "y", "x")
    assert topology.devices == (B, A)
    assert topology.switches == (Switch("y", False), Switch("x", True))
    assert [(link.src, link.dst) for link in topology.links] == [(B, "x"), (A, B), ("x", A), ("x", "y")]
    assert topology.link("x", "/cpu:0") == Link("x", A, Fraction(1))
    assert topology.link("y", "x") is None
    assert [link.dst for link in topology.out_links("x")] == [A, "y"]
    assert topology.out_links("y") == ()
    assert repr(topology) == "Topology(2 devices, 2 switches, 4 links: cpu:1, cpu:0)"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        topology.switches = ()
    with pytest.raises(AttributeError, match="can't set attribute"):
        topology.switches[0].reduces = True


def test_names_of_switches():
    """A switch's name consists of letters, digits and . _ / # -, and is not changed. Other names are refused."""
    for name in ("nvswitch", "host0/nic3", "0", "a.b_c-d#1", "plx/0/1", "cpu0", "cpu/1", "X"):
        topology = Topology([A], [(A, name, 1)], [name])
        assert topology.switches == (Switch(name),)
        assert topology.link(A, name).dst == name
        assert Topology.from_json(topology.to_json()) == topology
    devices = ["cpu", "gpu", "CUDA", "cpu#3", "host/cpu", "tpu", "cpu:0", "host0/cuda:1"]
    text = r"(a switch's name must be|cannot have a device's name)[\s\S]*given: "
    for name in (*devices, "", " ", "a b", "a:b", "-a", "é", "/a", "a\n"):
        with pytest.raises(ArgumentError, match=text):
            Topology([A], [], [name])


def test_bad_switches_are_refused():
    """An invalid list of switches, or an invalid link of a switch, raises an ArgumentError."""
    not_a_list = "switches must be a list of Switches or names"
    for switches, text in (
        (["a", "a"], r"each switch may be listed only once[\s\S]*given: 'a' 2 times"),
        ([("a", 1)], r"Switch\.reduces must be True or False[\s\S]*given: 1"),
        ([(3, True)], r"a switch's name must be ASCII letters[\s\S]*given: 3"),
        ([None], rf"{not_a_list}[\s\S]*given: None"),
        ([("a", True, 3)], rf"{not_a_list}[\s\S]*given: \('a', True, 3\)"),
        (3, rf"{not_a_list}[\s\S]*given: 3"),
        ("bus", not_a_list),
    ):
        with pytest.raises(ArgumentError, match=text):
            Topology([A], [], switches)
    for link in (("x", "x", 1), ("x", "z", 1), (A, "z", 1), ("x", A, 0), ("x", B, 1)):
        with pytest.raises(ArgumentError, match=r"a link|device name|bandwidth"):
            Topology([A], [link], ["x"])


@given(topologies(), st.data(), st.booleans())
def test_other_topologies_keep_the_rest(topology, data, reducing):
    """subset, without_link, with_switches and renamed return a topology with only this change; the old one is kept."""
    before = topology.to_json()
    chosen = data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True))
    part = topology.subset(name.upper() for name in chosen)  # names in any spelling
    assert (part.devices, part.switches) == (tuple(chosen), topology.switches)
    kept = {*chosen, *(switch.name for switch in topology.switches)}
    assert pairs(part) == {pair: speed for pair, speed in pairs(topology).items() if set(pair) <= kept}
    if topology.links:
        gone = data.draw(st.sampled_from(topology.links))
        less = topology.without_link(gone.dst, gone.src)
        assert less.links == tuple(link for link in topology.links if {link.src, link.dst} != {gone.src, gone.dst})
        assert (less.devices, less.switches) == (topology.devices, topology.switches)
    other = topology.with_switches(reducing=reducing)
    assert other.switches == tuple(Switch(switch.name, reducing) for switch in topology.switches)
    assert (other.devices, other.links) == (topology.devices, topology.links)
    gpus = tuple(f"host/cuda:{k}" for k in range(len(topology.devices)))
    gpu_of = dict(zip(topology.devices, gpus, strict=True))
    new = topology.renamed(gpus)
    assert pairs(new) == {(gpu_of.get(a, a), gpu_of.get(b, b)): speed for (a, b), speed in pairs(topology).items()}
    assert (new.devices, new.switches) == (gpus, topology.switches)
    assert new.renamed(topology.devices) == topology
    assert topology.to_json() == before


@given(topologies())
def test_switches_count_for_equality(topology):
    """Topologies are equal only if their switches have the same kinds and order."""
    if topology.switches:
        assert topology.with_switches(reducing=not topology.switches[0].reduces) != topology
        turned = Topology(topology.devices, topology.links, topology.switches[::-1])
        assert (turned == topology) is (len(topology.switches) == 1)


# Routes.


def all_routes(topology, src, dst):
    """Yield every route from one node to another that passes no node twice."""

    def extended(nodes):
        if nodes[-1] == dst:
            yield nodes
            return
        for other in topology.nodes:
            if other not in nodes and topology.link(nodes[-1], other) is not None:
                yield from extended((*nodes, other))

    yield from extended((src,))


def rank(topology, nodes):
    """Return a route's sort key, as in route()'s docstring: devices passed, links, bandwidth, order of the nodes."""
    speeds = [topology.link(a, b).bandwidth for a, b in pairwise(nodes)]
    passed = sum(node in topology.devices for node in nodes[1:-1])
    return passed, len(nodes), -min(speeds, default=math.inf), [topology.nodes.index(node) for node in nodes]


@examples(150)
@given(topologies(most_devices=3, most_switches=3), st.randoms())
def test_route_is_the_best_of_all_routes(topology, random):
    """A route passes the fewest devices; of these routes it has the fewest links, and of those the most bandwidth. It
    is the same for any order of links and calls. If there is no route, the result is ``None``."""
    links, ends = list(topology.links), list(product(topology.nodes, repeat=2))
    routes = {pair: topology.route(*pair) for pair in ends}
    random.shuffle(links)
    random.shuffle(ends)
    again = Topology(topology.devices, links, topology.switches)
    assert {pair: again.route(*pair) for pair in ends} == routes
    for (src, dst), route in routes.items():
        ways = list(all_routes(topology, src, dst))
        assert (route is None) is (not ways)
        if ways:
            assert rank(topology, route)[:3] == min(rank(topology, nodes)[:3] for nodes in ways)
            assert route in ways


@examples(100)
@given(topologies(most_devices=3, most_switches=3, speeds=st.just(25)))
def test_of_equal_routes_the_first_in_order(topology):
    """Of routes that are equally good, route() returns the first one in the order of the nodes."""
    for ends in product(topology.nodes, repeat=2):
        best = min(all_routes(topology, *ends), key=lambda nodes: rank(topology, nodes), default=None)
        assert topology.route(*ends) == best


def test_routes_of_known_machines():
    """Routes by switches come before routes by devices, also if they have more links. Unknown nodes are refused."""
    star = Topology.star(8, 450)
    assert star.route("CPU:0", "switch") == (A, "switch")
    assert star.route(A, A) == (A,)
    far = [(A, C, 9), (C, B, 9), (A, "p", 1), ("p", "q", 1), ("q", "r", 1), ("r", B, 1)]
    assert Topology([A, B, C], far, ["p", "q", "r"]).route(A, B) == (A, "p", "q", "r", B)
    for ends in ((A, "cpu:9"), ("cpu:9", A), ("cpu:9", "cpu:9"), ("switch", "cpu:9")):
        with pytest.raises(ArgumentError, match=r"no such device[\s\S]*given: cpu:9"):
            star.route(*ends)


# Shapes.


@given(st.integers(1, 6), st.integers(1, 6))
def test_mesh(rows, columns):
    """A mesh numbers its devices row by row, and links neighbours along the rows and the columns in both directions."""
    topology = Topology.mesh(rows, columns, (50, 25), MICRO)
    assert topology.devices == names(rows * columns)
    wanted = {}
    for (r, c), (s, d) in product(product(range(rows), range(columns)), repeat=2):
        if abs(r - s) + abs(c - d) == 1:
            wanted[f"cpu:{r * columns + c}", f"cpu:{s * columns + d}"] = 50 if r == s else 25
    assert pairs(topology) == wanted
    assert {link.latency_s for link in topology.links} <= {MICRO}
    assert pairs(Topology.mesh(rows, columns, 7)) == dict.fromkeys(wanted, 7)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_torus(shape):
    """A torus links neighbours along each dimension, and its ends; two devices have one link in each direction."""
    speeds = tuple(10 + k for k in range(len(shape)))  # the first speed is that of the last dimension
    topology = Topology.torus(*shape, gb_per_s=speeds)
    cells = list(product(*map(range, shape)))
    wanted = {}
    for a, b in permutations(range(len(cells)), 2):
        differing = [k for k in range(len(shape)) if cells[a][k] != cells[b][k]]
        k = differing[0]
        if len(differing) == 1 and (cells[a][k] - cells[b][k]) % shape[k] in (1, shape[k] - 1):
            wanted[f"cpu:{a}", f"cpu:{b}"] = speeds[len(shape) - 1 - k]
    assert topology.devices == names(len(cells))
    assert pairs(topology) == wanted


@given(device_counts)
def test_star(n):
    """A star has one switch, which does not reduce, and a link per direction between it and each device."""
    topology = Topology.star(n, Fraction(64, 3), MICRO)
    assert topology.switches == (Switch("switch", False),)
    ends = {pair for name in names(n) for pair in ((name, "switch"), ("switch", name))}
    assert pairs(topology) == dict.fromkeys(ends, Fraction(64, 3))
    assert {link.latency_s for link in topology.links} == {MICRO}
    assert Topology.star(names(n), Fraction(64, 3), MICRO) == topology


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Topology.mesh(0, 3), r"each an int of at least 1[\s\S]*\(0, 3\)"),
        *((lambda n=n: Topology.mesh(n, 3), "each an int of at least 1") for n in (-1, 2.0, "2")),
        *(
            (lambda shape=shape: Topology.torus(*shape), "each an int of at least 1")
            for shape in ((), (4, 0), ((4, 4),))
        ),
        (lambda: Topology.mesh(2, 2, (1, 2, 3)), r"one speed, or one for each dimension[\s\S]*3 speeds, 2 dimensions"),
        (lambda: Topology.torus(2, 2, gb_per_s=(1,)), "1 speeds, 2 dimensions"),
        (lambda: Topology.mesh(2, 2, "fast"), "a bandwidth must be 0, or a number of GB/s"),
        (lambda: Topology.mesh(2, 2, 0), "must have a bandwidth above 0"),
        (lambda: Topology.star(0), "at least one device"),
        (lambda: Topology.star(3, -1), "a bandwidth must be 0, or a number of GB/s"),
        (lambda: Topology.star([A, A]), "each device may be listed only once"),
    ],
)
def test_bad_shapes_are_refused(make, text):
    """A shape with an invalid size, number of speeds, bandwidth or device raises an ArgumentError."""
    with pytest.raises(ArgumentError, match=text):
        make()


@given(topologies())
def test_json_round_trip(topology):
    """A topology that is written and read, pickled, or made in another order of links, is equal to the last digit."""
    text = topology.to_json()
    mixed = Topology(list(topology.devices), topology.links[::-1], [tuple(switch) for switch in topology.switches])
    for again in (Topology.from_json(text), pickle.loads(pickle.dumps(topology)), mixed):
        assert (again, again.links, hash(again), again.to_json()) == (topology, topology.links, hash(topology), text)


def test_json_is_this_text():
    """The format is fixed: the text of a topology never changes, so every later version can read it."""
    topology = Topology([A, B], [Link(A, "x", Fraction(64, 3), MICRO), Link("x", B, 25)], [Switch("x", True)])
    text = (
        '{"format":"crossreduce.topology/1","devices":["cpu:0","cpu:1"],"switches":[["x",true]],'
        '"links":[["cpu:0","x","64/3","1/1000000"],["x","cpu:1","25","0"]]}'
    )
    assert topology.to_json() == text
    assert Topology.from_json(text) == topology


def test_json_written_by_people():
    """Numbers may be decimals. Latencies and switches may be missing. Device names need not be canonical."""
    text = """{"format": "crossreduce.topology/1", "devices": ["GPU:0", "cuda:1"],
               "links": [["cuda:0", "cuda:1", 25], ["cuda:1", "cuda:0", "12.5", 1e-6]], "made by": "a person"}"""
    wanted = Topology(["cuda:0", "cuda:1"], [("cuda:0", "cuda:1", 25), ("cuda:1", "cuda:0", 12.5, 1e-6)])
    assert Topology.from_json(text) == wanted


TEXT = Topology([A, B], [(A, "x", 1), ("x", B, 1)], ["x"]).to_json()
GOOD = json.loads(TEXT)
# Values that are not allowed for a part of the text. Without switches, the links name an unknown one.
WRONG = {
    "format": ["crossreduce.topology/2", "crossreduce.schedule/1", None],
    "devices": [[], 3, None, "cpu:0", [A, A], [A, 3], [A, "foo"], [[A], B], {A: 1, B: 2}],
    "switches": [
        None, 3, ["x"], [["x"]], [["x", 1]], [["x", None]], [["x", "true"]], [[3, True]], [["x", True, 1]], [],
        [["x", True], ["x", False]], [["cpu:0", True]],
    ],
    "links": [
        None, 3, {}, [3], ["xy1"], [[A, "x"]], [[A]], [[A, "x", "1", "0", "0"]], [[A, "y", "1", "0"]],
        [[A, A, "1", "0"]], [[A, 3, "1", "0"]], [[A, "x", "1", "0"], [A, "x", "2", "0"]], [[A, "x", "1", -1]],
        *([[A, "x", speed, "0"]] for speed in ("0", "-1", -1, "1/0", "1e9", "inf", "nan", math.inf, math.nan, True)),
        *([[A, "x", speed, "0"]] for speed in (None, [1], "9" * 5000, "\uff11")),  # \uff11 is a digit, too
    ],
}  # fmt: skip
MALFORMED = "topology|link|switch|device|bandwidth|latency"


def test_malformed_json_is_refused():
    """Text that is not a topology raises an ArgumentError, never an error of Python's own."""
    texts = ["null", "3", "[]", "{}", '"text"', "nonsense", None, 3, ["x"], b"\xff\xfe", "[" * 100_000, TEXT * 2]
    texts += [TEXT[:end] for end in range(len(TEXT))]
    texts += [TEXT.replace('"1"', "9" * 5000)]
    texts += [json.dumps({key: value for key, value in GOOD.items() if key != name}) for name in GOOD]
    texts += [json.dumps(GOOD | {name: value}) for name, values in WRONG.items() for value in values]
    for text in texts:
        with pytest.raises(ArgumentError, match=MALFORMED):
            Topology.from_json(text)
