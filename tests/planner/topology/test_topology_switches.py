"""Topologies with switches: names, routes, grids and stars."""

import dataclasses
import math
import pickle
from fractions import Fraction
from itertools import pairwise, permutations, product

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import device_counts, names

from crossreduce import ArgumentError, Link, Switch, Topology

MICRO = Fraction(1, 10**6)
A, B, C = names(3)

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
    """Nodes are the devices, then the switches; a link may join any two of them, and links are sorted in that order."""
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


@pytest.mark.parametrize("name", ["nvswitch", "host0/nic3", "0", "a.b_c-d#1", "plx/0/1", "cpu0", "cpu/1", "X"])
def test_names_of_switches(name):
    """The name of a switch may have letters, digits and . _ / # -, and is not changed."""
    topology = Topology([A], [(A, name, 1)], [name])
    assert topology.switches == (Switch(name),)
    assert topology.link(A, name).dst == name
    assert Topology.from_json(topology.to_json()) == topology


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "gpu",
        "CUDA",
        "cpu#3",
        "host/cpu",
        "tpu",
        "cpu:0",
        "host0/cuda:1",
        "",
        " ",
        "a b",
        "a:b",
        "-a",
        "é",
        "/a",
        "a\n",
    ],
)
def test_a_switch_cannot_have_a_device_name(name):
    """A switch's name that is also a device's, or is otherwise invalid, raises an ArgumentError that shows it."""
    with pytest.raises(ArgumentError, match=r"(name of a switch must be|cannot have a device's name)[\s\S]*given: "):
        Topology([A], [], [name])


@pytest.mark.parametrize(
    ("switches", "text"),
    [
        (["a", "a"], r"each switch may be listed only once[\s\S]*given: 'a' 2 times"),
        ([Switch("a"), Switch("a", True)], "each switch may be listed only once"),
        ([("a", 1)], r"Switch\.reduces must be True or False[\s\S]*given: 1"),
        ([("a", None)], r"Switch\.reduces must be True or False"),
        ([("a", "yes")], r"Switch\.reduces must be True or False"),
        ([(3, True)], r"the name of a switch must be ASCII letters[\s\S]*given: 3"),
        ([None], r"switches must be a list of Switches or names[\s\S]*given: None"),
        ([("a", True, 3)], r"switches must be a list of Switches or names[\s\S]*given: \('a', True, 3\)"),
        ([()], "switches must be a list of Switches or names"),
        (3, r"switches must be a list of Switches or names[\s\S]*given: 3"),
        (None, "switches must be a list of Switches or names"),
        ("bus", "switches must be a list of Switches or names"),
    ],
)
def test_bad_switches_are_refused(switches, text):
    """An invalid list of switches, or one that lists a switch twice, raises an ArgumentError."""
    with pytest.raises(ArgumentError, match=text):
        Topology([A], [], switches)


@pytest.mark.parametrize("link", [("x", "x", 1), ("x", "z", 1), (A, "z", 1), ("x", A, 0), ("x", B, 1)])
def test_links_of_switches_are_checked_too(link):
    """A link from a switch to itself, to an unknown node or without bandwidth raises an error, as for devices."""
    with pytest.raises(ArgumentError, match=r"a link|device name|bandwidth"):
        Topology([A], [link], ["x"])


@given(topologies(), st.data())
def test_subset_keeps_all_switches(topology, data):
    """A subset has the given devices, every switch unchanged, and the links between these nodes."""
    chosen = data.draw(st.lists(st.sampled_from(topology.devices), min_size=1, unique=True))
    part = topology.subset(chosen)
    assert part.devices == tuple(chosen)
    assert part.switches == topology.switches
    kept = {*chosen, *(switch.name for switch in topology.switches)}
    assert pairs(part) == {pair: speed for pair, speed in pairs(topology).items() if set(pair) <= kept}


@given(topologies(), st.data())
def test_without_link_takes_switches_too(topology, data):
    """The links between two nodes are removed in both directions; all other links and all switches stay."""
    if not topology.links:
        return
    gone = data.draw(st.sampled_from(topology.links))
    less = topology.without_link(gone.dst, gone.src)
    assert less.links == tuple(link for link in topology.links if {link.src, link.dst} != {gone.src, gone.dst})
    assert (less.devices, less.switches) == (topology.devices, topology.switches)


def test_without_link_lists_the_existing_links():
    """A missing link raises an ArgumentError that lists the links out of the first node; a missing node, all nodes."""
    star = Topology.star(3)
    with pytest.raises(
        ArgumentError, match=r"no such link[\s\S]*switch - switch[\s\S]*out of switch: cpu:0, cpu:1, cpu:2"
    ):
        star.without_link("switch", "switch")
    with pytest.raises(ArgumentError, match=r"no such link[\s\S]*out of cpu:0: switch"):
        star.without_link(A, B)
    with pytest.raises(ArgumentError, match=r"no such device[\s\S]*one of cpu:0, cpu:1, cpu:2, switch"):
        star.without_link("switch", "cpu:3")


@given(topologies(), st.booleans())
def test_with_switches_changes_only_whether_they_reduce(topology, reducing):
    """with_switches makes all switches reduce, or none; names, links and devices stay."""
    other = topology.with_switches(reducing=reducing)
    assert [switch.name for switch in other.switches] == [switch.name for switch in topology.switches]
    assert {switch.reduces for switch in other.switches} <= {reducing}
    assert (other.devices, other.links) == (topology.devices, topology.links)


@given(topologies())
def test_renamed_leaves_switches(topology):
    """Devices get other names; switches keep theirs and their links."""
    n = len(topology.devices)
    gpus = tuple(f"host/cuda:{k}" for k in range(n))
    to = dict(zip(topology.devices, gpus, strict=True))
    new = topology.renamed(gpus)
    assert pairs(new) == {(to.get(a, a), to.get(b, b)): speed for (a, b), speed in pairs(topology).items()}
    assert new.switches == topology.switches
    assert new.renamed(topology.devices) == topology


@given(topologies())
def test_equal_topologies_have_equal_hashes(topology):
    """Topologies with equal devices, switches and links are equal and have equal hashes, in any order of the given
    links, and can be pickled."""
    again = Topology(list(topology.devices), topology.links[::-1], [tuple(switch) for switch in topology.switches])
    assert again == topology
    assert hash(again) == hash(topology)
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    assert hash(copy) == hash(topology)
    assert copy.links == topology.links
    if topology.switches:
        assert topology.with_switches(reducing=not topology.switches[0].reduces) != topology
        turned = Topology(topology.devices, topology.links, topology.switches[::-1])
        assert (turned == topology) is (len(topology.switches) == 1)


def test_switches_are_frozen():
    """The switches of a topology, and the parts of a switch, cannot be assigned."""
    star = Topology.star(2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        star.switches = ()
    with pytest.raises(AttributeError, match="can't set attribute"):
        star.switches[0].reduces = True


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
@given(topologies(most_devices=3, most_switches=3))
def test_route_is_the_best_of_all_routes(topology):
    """A route passes the fewest devices; of these routes, it has the fewest links; of these, the greatest bandwidth. It
    is ``None`` if no route exists."""
    for src, dst in product(topology.nodes, repeat=2):
        route = topology.route(src, dst)
        found = list(all_routes(topology, src, dst))
        assert (route is None) is (not found)
        if found:
            assert rank(topology, route)[:3] == min(rank(topology, nodes)[:3] for nodes in found)
            assert route in found


@examples(100)
@given(topologies(most_devices=3, most_switches=3, speeds=st.just(25)))
def test_of_equal_routes_the_first_in_order(topology):
    """If all links have the same bandwidth, route() returns, of the routes with the fewest devices and then the fewest
    links, the first one in the order of the nodes."""
    for src, dst in product(topology.nodes, repeat=2):
        found = list(all_routes(topology, src, dst))
        assert topology.route(src, dst) == min(found, key=lambda nodes: rank(topology, nodes), default=None)


@examples(50)
@given(topologies(most_devices=3, most_switches=3), st.randoms())
def test_equal_topologies_have_equal_routes(topology, random):
    """Routes depend neither on the order in which links are listed nor on earlier calls."""
    links = list(topology.links)
    random.shuffle(links)
    again = Topology(topology.devices, links, topology.switches)
    pairs = list(product(topology.nodes, repeat=2))
    routes = {pair: topology.route(*pair) for pair in pairs}
    random.shuffle(pairs)
    assert {pair: again.route(*pair) for pair in pairs} == routes


def test_routes_of_known_machines():
    """A direct link is preferred to a switch, and a switch with more bandwidth to another one; a route passes a device
    only if there is no other route."""
    star = Topology.star(8, 450)
    assert star.route(A, "cpu:5") == (A, "switch", "cpu:5")
    assert star.route("CPU:0", "switch") == (A, "switch")
    assert star.route(A, A) == (A,)
    both = Topology([A, B], [(A, B, 1), (A, "x", 100), ("x", B, 100)], ["x"])
    assert both.route(A, B) == (A, B)
    assert both.without_link(A, B).route(A, B) == (A, "x", B)
    links = [(A, "slow", 1), ("slow", B, 9), (A, "fast", 5), ("fast", B, 5)]
    assert Topology([A, B], links, ["slow", "fast"]).route(A, B) == (A, "fast", B)
    far = [(A, C, 9), (C, B, 9), (A, "p", 1), ("p", "q", 1), ("q", "r", 1), ("r", B, 1)]
    assert Topology([A, B, C], far, ["p", "q", "r"]).route(A, B) == (A, "p", "q", "r", B)
    assert Topology([A, B, C], far[:-1], ["p", "q", "r"]).route(A, B) == (A, C, B)
    assert Topology([A, B, C], far[1:-1], ["p", "q", "r"]).route(A, B) is None
    assert Topology.ring(6).route(A, "cpu:3") == (A, B, C, "cpu:3")


@pytest.mark.parametrize(("src", "dst"), [(A, "cpu:9"), ("cpu:9", A), ("cpu:9", "cpu:9"), ("switch", "cpu:9")])
def test_no_route_for_unknown_devices(src, dst):
    """A device that is not in the topology raises an ArgumentError, as either argument."""
    with pytest.raises(ArgumentError, match=r"no such device[\s\S]*given: cpu:9"):
        Topology.star(3).route(src, dst)


# Shapes.


@given(st.integers(1, 6), st.integers(1, 6))
def test_mesh(rows, columns):
    """A mesh of r rows numbers its devices row by row, and links neighbours along the rows and the c columns in both
    directions: 2 (r (c-1) + c (r-1)) links."""
    topology = Topology.mesh(rows, columns, (50, 25), MICRO)
    assert topology.devices == names(rows * columns)
    wanted = {}
    for (r, c), (s, d) in product(product(range(rows), range(columns)), repeat=2):
        if abs(r - s) + abs(c - d) == 1:
            wanted[f"cpu:{r * columns + c}", f"cpu:{s * columns + d}"] = 50 if r == s else 25
    assert pairs(topology) == wanted
    assert len(topology.links) == 2 * (rows * (columns - 1) + columns * (rows - 1))
    assert {link.latency_s for link in topology.links} <= {MICRO}
    assert pairs(Topology.mesh(rows, columns, 7)) == dict.fromkeys(wanted, 7)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_torus(shape):
    """A torus links each device to the next one and to the previous one along each dimension; along a dimension of two
    devices these are the same, and there is one link per direction."""
    speeds = tuple(10 + k for k in range(len(shape)))  # the first speed is that of the last dimension
    topology = Topology.torus(*shape, gb_per_s=speeds)
    cells = list(product(*map(range, shape)))
    wanted = {}
    for a, b in permutations(range(len(cells)), 2):
        apart = [k for k in range(len(shape)) if cells[a][k] != cells[b][k]]
        if len(apart) == 1 and (cells[a][apart[0]] - cells[b][apart[0]]) % shape[apart[0]] in (1, shape[apart[0]] - 1):
            wanted[f"cpu:{a}", f"cpu:{b}"] = speeds[len(shape) - 1 - apart[0]]
    assert topology.devices == names(len(cells))
    assert pairs(topology) == wanted
    assert len(topology.links) == len(cells) * sum(min(length - 1, 2) for length in shape)


@given(device_counts)
def test_a_torus_of_one_dimension_is_a_ring(n):
    """A torus of one dimension is a ring, and a mesh of one row is a ring without the link between its ends."""
    assert Topology.torus(n, gb_per_s=5) == Topology.ring(n, 5)
    if n > 2:
        assert Topology.mesh(1, n) == Topology.ring(n).without_link("cpu:0", f"cpu:{n - 1}")


@given(device_counts)
def test_star(n):
    """A star has one switch, which does not reduce, and a link per direction between it and each device."""
    topology = Topology.star(n, Fraction(64, 3), MICRO)
    assert topology.switches == (Switch("switch", False),)
    assert pairs(topology) == {
        pair: Fraction(64, 3) for name in names(n) for pair in ((name, "switch"), ("switch", name))
    }
    assert {link.latency_s for link in topology.links} == {MICRO}
    assert Topology.star(names(n), Fraction(64, 3), MICRO) == topology


def test_shapes_give_every_link_the_latency():
    """full_mesh, ring, from_matrix and torus give each link the given latency, and 0 by default."""
    for make in (
        lambda *latency: Topology.full_mesh(4, 25, *latency),
        lambda *latency: Topology.ring(4, 25, *latency),
        lambda *latency: Topology.from_matrix([[0, 3], [4, 0]], None, *latency),
        lambda *latency: Topology.torus(2, 2, latency_s=latency[0] if latency else 0),
    ):
        assert {link.latency_s for link in make(1e-6).links} == {MICRO}
        assert {link.latency_s for link in make().links} == {0}
        with pytest.raises(ArgumentError, match="a latency must be 0, or a number of seconds"):
            make(-1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Topology.mesh(0, 3), r"each an int of at least 1[\s\S]*\(0, 3\)"),
        (lambda: Topology.mesh(-1, 3), "each an int of at least 1"),
        (lambda: Topology.mesh(2.0, 3), "each an int of at least 1"),
        (lambda: Topology.mesh("2", 3), "each an int of at least 1"),
        (lambda: Topology.torus(), "each an int of at least 1"),
        (lambda: Topology.torus(4, 0), "each an int of at least 1"),
        (lambda: Topology.torus((4, 4)), "each an int of at least 1"),
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
