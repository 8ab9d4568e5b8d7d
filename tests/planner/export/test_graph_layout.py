"""Pictures of topologies: the positions of the nodes, and the lines and labels of the links."""

import re
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from budget import examples
from drawings import GPUS, PART, both_ways, panels, texts, two_hosts, words
from hypothesis import given
from hypothesis import strategies as st
from strategies import names, wired

from crossreduce import Topology
from crossreduce.export.pictures import draw_topology
from crossreduce.export.pictures.folding import fold_topology


def test_a_topology_shows_its_nodes_and_speeds(tmp_path):
    """The picture has the name of every device and switch. Its legend has the number of links of each bandwidth."""
    draw_topology(PART, tmp_path / "part.svg")
    assert words(tmp_path / "part.svg") == [*GPUS, "5 devices, 12 links", "50 GB/s each way: 3", "25 GB/s each way: 3"]
    draw_topology(two_hosts(), tmp_path / "hosts.svg", title="Two hosts")
    hosts = [name for host in "ab" for name in ("cuda:0", "cuda:1", "nvswitch", "nic", host)]
    other = ["leaf", "Two hosts", "450 GB/s each way: 4", "50 GB/s each way: 6"]
    assert Counter(words(tmp_path / "hosts.svg")) == Counter(hosts + other)


def test_the_legend(tmp_path):
    """The legend counts a link as "one way" if its reverse link has another bandwidth. More than six bandwidths are
    grouped into ranges that contain all links. The larger of two bandwidths has a thicker and darker line."""
    links = [("cpu:0", "cpu:1", 10), ("cpu:1", "cpu:0", 20), ("cpu:1", "cpu:2", 10), *both_ways(("cpu:0", "cpu:2", 5))]
    draw_topology(Topology(names(3), links), tmp_path / "a.svg")
    assert words(tmp_path / "a.svg")[4:] == ["20 GB/s one way: 1", "10 GB/s one way: 2", "5 GB/s each way: 1"]
    matrix = [[0 if i == j else 5 + 3 * i + 7.5 * j for j in range(6)] for i in range(6)]  # 30 links
    draw_topology(Topology.from_matrix(matrix), tmp_path / "a.svg")
    ranges = [word for word in words(tmp_path / "a.svg") if "GB/s" in word]
    assert 2 <= len(ranges) <= 6
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+ GB/s one way: \d+", word) for word in ranges)
    assert sum(int(word.rpartition(" ")[2]) for word in ranges) == 30
    draw_topology(PART, tmp_path / "a.svg")
    styles = set(re.findall(r"stroke: (#\w+); stroke-width: ([\d.]+)\"", (tmp_path / "a.svg").read_text()))
    (slow, thin), (fast, thick) = sorted(styles, key=lambda style: float(style[1]))
    assert float(thick) > 1.2 * float(thin)
    assert sum(bytes.fromhex(fast[1:])) < sum(bytes.fromhex(slow[1:]))
    for reduces in (False, True):  # the names of switches that reduce are white
        draw_topology(Topology.star(4).with_switches(reducing=reduces), tmp_path / "a.svg")
        assert panels(tmp_path / "a.svg")[0].white == ["switch"] * reduces


def places(topology, path):
    """Draw a topology, and return the positions of its nodes' labels, in the order of the texts in the picture."""
    draw_topology(topology, path)
    labels = [node.rpartition("/")[2] for node in topology.nodes]
    found = [(text, place) for text, place in texts(path) if text in labels]
    assert sorted(text for text, _ in found) == sorted(labels)
    return [place for _, place in found]


def test_grids_are_drawn_as_grids(tmp_path):
    """Devices of a mesh or torus are drawn row by row, in equal rows. A link between the ends of a row or column is a
    curve, so it does not cover the nodes between them."""
    for topology, rows, bent in (
        (Topology.mesh(5, 3), [3] * 5, 0),
        (Topology.torus(4, 4), [4] * 4, 8),
        (Topology.torus(3, 4).without_link("cpu:0", "cpu:3"), [4] * 3, 6),  # one row without a link between its ends
    ):
        found = places(topology, tmp_path / "a.svg")
        heights = Counter(round(y, 2) for _, y in found)
        assert [heights[y] for y in sorted(heights)] == rows
        assert len({round(x, 1) for x, _ in found}) == rows[0]
        assert [y for _, y in found] == sorted(y for _, y in found)
        lines = re.findall(r'<path d="([^z"]*)" clip-path', (tmp_path / "a.svg").read_text())
        assert len(lines) == len(topology.links) / 2
        assert sum(line.count("L") > 1 for line in lines) == bent  # a curve consists of several short lines


def test_other_topologies_are_drawn_on_a_circle(tmp_path):
    """Devices that do not form a grid are drawn on a circle. The switch of a star is in the middle of the circle."""
    for topology in (PART, Topology.ring(6), Topology.star(24)):
        found = places(topology, tmp_path / "a.svg")
        n = len(topology.devices)
        middle = sum(x for x, _ in found[:n]) / n, sum(y for _, y in found[:n]) / n
        far = [((x - middle[0]) ** 2 + (y - middle[1]) ** 2) ** 0.5 for x, y in found]
        assert far[:n] == pytest.approx([far[0]] * n, rel=0.05)
        assert max(far[n:], default=0) < 0.05 * far[0] + 3


@pytest.mark.parametrize(
    ("topology", "boxes", "note"),
    [
        (Topology.machine("hgx-h100", hosts=4), 0, ""),
        (Topology.machine("dgx-1v", hosts=8), 8, "each box is a host (with its number of devices)"),
        (Topology.star(96), 0, ""),
        (Topology.star(256), 16, "each box is a range of devices with the same links"),
        (Topology.full_mesh(100), 15, "each box is a range of devices with the same links"),
    ],
    ids=["4 hosts", "8 hosts", "96", "star", "mesh"],
)
def test_large_topologies_are_folded(tmp_path, topology, boxes, note):
    """A box stands for a host, or for devices with the same links. A link between two boxes has the total bandwidth of
    the links between their devices."""
    draw_topology(topology, tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert (note in found) == bool(note)
    assert sum(bool(re.search(r" \(\d+\)$|:\d+-\d+$", word)) for word in found) == boxes
    folding = fold_topology(topology)
    assert {*folding.boxes} == {*topology.nodes}
    between = Counter()
    for link in topology.links:
        between[folding.boxes[link.src], folding.boxes[link.dst]] += link.bandwidth
    assert {(link.src, link.dst): link.bandwidth for link in folding.topology.links} == {
        ends: bandwidth for ends, bandwidth in between.items() if ends[0] != ends[1]
    }


def test_devices_with_other_links_are_not_folded_together():
    """A ring of 100 devices is not folded, and a device with one slower link is not in the box of its neighbours."""
    assert fold_topology(Topology.ring(100)).topology == Topology.ring(100)
    star = Topology.star(200, 10)
    slower = [link._replace(bandwidth=Fraction(5)) if link.src == "cpu:20" else link for link in star.links]
    labels = fold_topology(Topology(star.devices, slower, star.switches)).labels
    assert "cpu:20" not in labels
    assert labels["cpu:13"] == "cpu:13-19"
    assert labels["cpu:21"].startswith("cpu:21-")


HOSTS = [[""], ["a/"], ["", "b/"], ["a/", "b/", "c/"]]
DEVICES = [tuple(f"{host}cuda:{k}" for host in hosts for k in range(n)) for hosts in HOSTS for n in (1, 3, 5)]


@examples(25)
@given(st.sampled_from(DEVICES).flatmap(lambda devices: wired(devices, most_switches=5)))
def test_no_two_nodes_share_a_position(tmp_path_factory, topology):
    """With any links, on one host or several, every node has its own position in the picture."""
    found = places(topology, tmp_path_factory.mktemp("pictures") / "a.svg")
    for (x, y), (u, v) in combinations(found, 2):
        assert abs(x - u) > 20 or abs(y - v) > 20  # in points; a name is 5 points high, a box 23
