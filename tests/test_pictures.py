"""Pictures: SVG and PNG files that show every node, link and tree, the same bytes each time, whole or not at all."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import names

from crossreduce import (
    ArgumentError,
    BackendError,
    Chunk,
    PlanError,
    ReductionError,
    Route,
    Schedule,
    ScheduleError,
    Step,
    Switch,
    Topology,
)
from crossreduce.export.pictures import PANELS, draw_schedule, draw_topology
from crossreduce.planning import PLANNERS, hierarchical_copy, one_device, ring

SVG = "{http://www.w3.org/2000/svg}"
BLUE, ORANGE = "#2166ac", "#e08214"
GPUS = tuple(f"cuda:{k}" for k in range(5))
# Devices 0, 1, 2, 4 and 5 of a DGX-1V.
PART = Topology.from_matrix(
    [[0, 50, 25, 50, 0], [50, 0, 25, 0, 25], [25, 25, 0, 0, 0], [50, 0, 0, 0, 50], [0, 25, 0, 50, 0]], GPUS
)


def both_ways(*links):
    return [one for a, b, speed in links for one in ((a, b, speed), (b, a, speed))]


def two_hosts():
    """Return two hosts of two GPUs, a switch and a network card each, and a switch between them."""
    links = []
    for host in ("a", "b"):
        for k in range(2):
            links += [(f"{host}/cuda:{k}", f"{host}/nvswitch", 450), (f"{host}/cuda:{k}", f"{host}/nic", 50)]
        links.append((f"{host}/nic", "leaf", 50))
    devices = [f"{host}/cuda:{k}" for host in ("a", "b") for k in range(2)]
    return Topology(devices, both_ways(*links), ["a/nvswitch", "a/nic", "b/nvswitch", "b/nic", "leaf"])


def texts(path):
    """Return the words of an SVG in the order of drawing, with their places."""
    found = []
    for element in ElementTree.parse(path).iter(f"{SVG}text"):
        style = element.get("transform", "") + f" translate({element.get('x', 0)} {element.get('y', 0)})"
        place = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", style)
        found.append(("".join(element.itertext()), (float(place[1]), float(place[2]))))
    return found


def words(path):
    return [text for text, _ in texts(path)]


def panels(path):
    """Return what each panel of an SVG shows: its words, those in white, its arrow heads and lines by colour."""
    found = []
    for axes in ElementTree.parse(path).iter(f"{SVG}g"):
        if not re.fullmatch(r"axes_\d+", axes.get("id", "")):
            continue
        labels = [("".join(text.itertext()), text.get("style")) for text in axes.iter(f"{SVG}text")]
        drawn = {"PolyCollection": Counter(), "LineCollection": Counter()}
        for group in axes.iter(f"{SVG}g"):
            kind = group.get("id", "").partition("_")[0]
            for shape in group if kind in drawn else ():
                style = dict(part.split(": ") for part in shape.get("style", "").split("; ") if part)
                drawn[kind][style["fill" if kind == "PolyCollection" else "stroke"]] += 1
        white = [word for word, style in labels if "fill: #ffffff" in style]
        found.append(Panel([word for word, _ in labels], white, drawn["PolyCollection"], drawn["LineCollection"]))
    return found


class Panel(NamedTuple):
    """A panel of a picture."""

    words: list
    white: list
    heads: Counter
    lines: Counter


@pytest.mark.parametrize("suffix", [".svg", ".SVG", ".png", ".Png"])
def test_the_suffix_chooses_the_kind(tmp_path, suffix):
    """A path that ends in .svg becomes an SVG file, .png a PNG file; nothing else is left in the folder."""
    for draw in (
        lambda path: draw_topology(PART, path),
        lambda path: draw_schedule(ring(GPUS), ring_of(GPUS), str(path)),
    ):
        path = tmp_path / f"a.picture{suffix}"
        draw(path)
        content = path.read_bytes()
        if suffix.lower() == ".svg":
            assert ElementTree.fromstring(content).tag == f"{SVG}svg"
        else:
            assert content.startswith(b"\x89PNG\r\n\x1a\n")
            assert content.endswith(b"IEND\xaeB`\x82")
        assert [one.name for one in tmp_path.iterdir()] == [path.name]


def ring_of(devices):
    return Topology.ring(devices, 25)


@pytest.mark.parametrize("path", ["picture", "picture.jpg", "picture.svg.gz", "", ".", 3, None, b"a.svg"])
def test_other_paths_are_refused(tmp_path, monkeypatch, path):
    """A path of another kind is an ArgumentError that shows it, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for draw in (lambda: draw_topology(PART, path), lambda: draw_schedule(ring(GPUS), ring_of(GPUS), path)):
        with pytest.raises(ArgumentError, match=r"an SVG or a PNG file[\s\S]*given: "):
            draw()
    assert list(tmp_path.iterdir()) == []


# Topologies.


def test_a_topology_shows_its_nodes_and_speeds(tmp_path):
    """Every device and switch stands there by its name, and the legend has each bandwidth with its count of links."""
    draw_topology(PART, tmp_path / "part.svg")
    assert words(tmp_path / "part.svg") == [*GPUS, "5 devices, 12 links", "50 GB/s each way: 3", "25 GB/s each way: 3"]
    draw_topology(two_hosts(), tmp_path / "hosts.svg", title="Two hosts")
    found = Counter(words(tmp_path / "hosts.svg"))
    assert found == Counter(
        ["cuda:0", "cuda:1", "nvswitch", "nic", "a"] * 1
        + ["cuda:0", "cuda:1", "nvswitch", "nic", "b"] * 1
        + ["leaf", "Two hosts", "450 GB/s each way: 4", "50 GB/s each way: 6"]
    )


def test_one_way_links_are_told_apart(tmp_path):
    """Links whose way back is missing or of another speed are counted as one way, and drawn with heads."""
    links = [("cpu:0", "cpu:1", 10), ("cpu:1", "cpu:0", 20), ("cpu:1", "cpu:2", 10), *both_ways(("cpu:0", "cpu:2", 5))]
    draw_topology(Topology(names(3), links), tmp_path / "a.svg")
    assert words(tmp_path / "a.svg")[4:] == ["20 GB/s one way: 1", "10 GB/s one way: 2", "5 GB/s each way: 1"]


def test_many_speeds_share_six_shades(tmp_path):
    """Of more than six bandwidths the legend has ranges, and every link is in one of them."""
    matrix = [[0 if i == j else 5 + 3 * i + 7.5 * j for j in range(6)] for i in range(6)]
    draw_topology(Topology.from_matrix(matrix), tmp_path / "a.svg")
    ranges = [word for word in words(tmp_path / "a.svg") if "GB/s" in word]
    assert 2 <= len(ranges) <= 6
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+ GB/s one way: \d+", word) for word in ranges)
    assert sum(int(word.rpartition(" ")[2]) for word in ranges) == 30


def test_switches_that_reduce_are_black(tmp_path):
    """A switch that combines in the network stands out, its name in white, from one that only passes data on."""
    for reduces in (False, True):
        draw_topology(Topology.star(4).with_switches(reducing=reduces), tmp_path / "a.svg")
        assert panels(tmp_path / "a.svg")[0].white == ["switch"] * reduces


def test_faster_links_are_thicker_and_darker(tmp_path):
    """Of two bandwidths the greater has the thicker line, and another colour."""
    draw_topology(PART, tmp_path / "a.svg")
    styles = set(re.findall(r"stroke: (#\w+); stroke-width: ([\d.]+)\"", (tmp_path / "a.svg").read_text()))
    (slow, thin), (fast, thick) = sorted(styles, key=lambda style: float(style[1]))
    assert float(thick) > 1.2 * float(thin)
    assert sum(bytes.fromhex(fast[1:])) < sum(bytes.fromhex(slow[1:]))


def places(topology, path):
    """Draw a topology; return each node's place in the picture, by its label, in order."""
    draw_topology(topology, path)
    labels = [node.rpartition("/")[2] for node in topology.nodes]
    found = [(text, place) for text, place in texts(path) if text in labels]
    assert sorted(text for text, _ in found) == sorted(labels)
    return [place for _, place in found]


@pytest.mark.parametrize(
    ("topology", "rows"),
    [
        (Topology.mesh(2, 2), [2, 2]),
        (Topology.mesh(3, 5), [5] * 3),
        (Topology.mesh(5, 3), [3] * 5),
        (Topology.torus(4, 4), [4] * 4),
        (Topology.torus(3, 4).without_link("cpu:0", "cpu:3"), [4] * 3),  # an end that is not joined
    ],
)
def test_grids_stand_on_grids(tmp_path, topology, rows):
    """Devices of a mesh or torus stand row by row, all rows alike."""
    found = places(topology, tmp_path / "a.svg")
    heights = Counter(round(y, 2) for _, y in found)
    assert [heights[y] for y in sorted(heights)] == rows
    assert len({round(x, 1) for x, _ in found}) == rows[0]
    assert [y for _, y in found] == sorted(y for _, y in found)


def test_ends_that_are_joined_are_bent(tmp_path):
    """A link from a row's or column's end to its start goes round, and does not lie over those between."""
    for topology, bent in ((Topology.mesh(3, 4), 0), (Topology.torus(3, 4), 7), (Topology.torus(2, 3), 2)):
        draw_topology(topology, tmp_path / "a.svg")
        lines = re.findall(r'<path d="([^z"]*)" clip-path', (tmp_path / "a.svg").read_text())
        assert len(lines) == len(topology.links) / 2
        assert sum(line.count("L") > 1 for line in lines) == bent


@pytest.mark.parametrize("topology", [Topology.torus(2, 2, 2), Topology.torus(3, 3, 3), Topology.torus(2, 3, 4)])
def test_grids_of_three_dimensions_go_back(tmp_path, topology):
    """A third dimension is drawn up and to the right, so each device has a place of its own."""
    found = places(topology, tmp_path / "a.svg")
    (x0, y0), (x1, y1) = found[0], found[len(found) // (3 if len(found) == 27 else 2)]
    assert x1 > x0
    assert y1 < y0


@pytest.mark.parametrize(
    "topology", [PART, Topology.ring(6), Topology.full_mesh(9), Topology.star(16), Topology.star(40)]
)
def test_others_stand_on_a_circle(tmp_path, topology):
    """Other devices stand on a circle, equally far from its middle, where a star's switch is."""
    found = places(topology, tmp_path / "a.svg")
    n = len(topology.devices)
    middle = sum(x for x, _ in found[:n]) / n, sum(y for _, y in found[:n]) / n
    far = [((x - middle[0]) ** 2 + (y - middle[1]) ** 2) ** 0.5 for x, y in found]
    assert far[:n] == pytest.approx([far[0]] * n, rel=0.05)
    assert max(far[n:], default=0) < 0.05 * far[0] + 3


@st.composite
def machines(draw):
    """Draw devices of one or several hosts, switches of theirs and between them, and any links."""
    hosts = draw(st.sampled_from([[""], ["a/"], ["", "b/"], ["a/", "b/", "c/"]]))
    devices = [f"{host}cuda:{k}" for host in hosts for k in range(draw(st.integers(1, 5)))]
    inner = [f"{host}{name}" for host in hosts for name in ("sw0", "sw1", "nic") if draw(st.booleans())]
    switches = [*inner, *("leaf", "spine")[: draw(st.integers(0, 2))]]
    nodes = [*devices, *switches]
    pairs = draw(
        st.lists(st.tuples(*[st.sampled_from(nodes)] * 2).filter(lambda p: p[0] != p[1]), max_size=25, unique=True)
    )
    speeds = st.sampled_from([1, Fraction(64, 3), 450])
    links = [(a, b, draw(speeds)) for a, b in pairs]
    return Topology(devices, links, [Switch(name, draw(st.booleans())) for name in switches])


@settings(max_examples=25)
@given(machines())
def test_no_two_nodes_share_a_place(tmp_path_factory, topology):
    """Whatever is linked to whatever, on one host or several, every node has a place of its own in the picture."""
    found = places(topology, tmp_path_factory.mktemp("pictures") / "a.svg")
    for k, (x, y) in enumerate(found):
        for u, v in found[:k]:
            assert abs(x - u) > 20 or abs(y - v) > 20  # points; a name is 5 high, a box 23


# Schedules.


def drawn(schedule, topology, path):
    """Draw a schedule; return its trees' panels and that of the links' use."""
    draw_schedule(schedule, topology, path)
    *trees, use, scale = panels(path)
    assert scale.words[-1] == "% of the busiest link's time"
    return trees, use


def test_a_schedule_shows_each_tree(tmp_path):
    """Each of TensorFlow's trees has a panel with its share, its root in black, an arrow for each move there, in
    blue, and away from there, in orange."""
    trees, use = drawn(hierarchical_copy(names(8), packs=8), Topology.full_mesh(8, 25), tmp_path / "a.svg")
    assert [tree.words for tree in trees] == [["1/8 of the buffer", *names(8)]] * 8
    assert [tree.white for tree in trees] == [[f"cpu:{k}"] for k in range(8)]
    assert [tree.heads for tree in trees] == [Counter({BLUE: 7, ORANGE: 7})] * 8
    assert use.words == ["use of each link: 32 of 56 carry data", *names(8)]
    assert use.heads.total() == 32
    found = words(tmp_path / "a.svg")
    assert "all_reduce hierarchical_copy: 8 devices, 8 chunks, 4 rounds, 80 steps" in found
    assert "the busiest link allows 50 GB/s" in found
    assert found[-3:] == ["to the root", "from the root", "root"]


@pytest.mark.parametrize(
    ("schedule", "topology", "roots", "heads"),
    [
        (ring(names(5)), Topology.ring(5), [4, 0, 1, 2, 3], (4, 4)),
        (one_device(names(5)), Topology.star(5), [0], (5, 5)),  # 4 links to the switch and 1 on, 1 back and 4 out
        (one_device(names(5), destinations=["cpu:3"]), Topology.full_mesh(5), [3], (4, 0)),
        (one_device(names(5), ["cpu:2"], names(4)[3:]), Topology.full_mesh(5), [2], (0, 1)),
        (
            one_device(names(3), root="cpu:1"),
            Topology(names(3), both_ways(("cpu:0", "cpu:1", 1), ("cpu:1", "cpu:2", 1))),
            [1],
            (2, 2),
        ),
    ],
    ids=["ring", "star", "reduce", "broadcast", "root"],
)
def test_roots_and_directions(tmp_path, schedule, topology, roots, heads):
    """A root is where a chunk is first whole; moves up to there are blue, one arrow a link, and moves on are orange."""
    trees, _ = drawn(schedule, topology, tmp_path / "a.svg")
    assert [tree.white for tree in trees] == [[f"cpu:{root}"] for root in roots]
    assert [(tree.heads[BLUE], tree.heads[ORANGE]) for tree in trees] == [heads] * len(roots)


def test_what_is_passed_on_before_it_is_whole_is_blue(tmp_path):
    """A device that only forwards a part on its way to the root is on the way to the root."""
    devices = names(3)
    chunk = Chunk(Fraction(1), (0, 2), (2,))
    schedule = Schedule("reduce", "by hand", devices, (chunk,), ((Step(0, 1, (0,)),), (Step(0, 2, (1, 2)),)))
    (tree,), _ = drawn(schedule, Topology.ring(3), tmp_path / "a.svg")
    assert tree.heads == {BLUE: 2}
    assert tree.white == ["cpu:2"]


def test_chunks_that_take_the_same_way_share_a_panel(tmp_path):
    """Chunks of the same moves are one tree with the sum of their shares; another route makes another tree."""
    bus = [("cpu:0", "bus", 9), ("bus", "cpu:1", 9)]
    topology = Topology(names(3), [*Topology.full_mesh(3).links, *bus], ["bus"])
    schedule = ring(names(3), packs=3)
    trees, _ = drawn(schedule, topology, tmp_path / "a.svg")
    assert [tree.words[0] for tree in trees] == ["1/3 of the buffer"] * 3
    trees, _ = drawn(one_device(names(3)), topology, tmp_path / "a.svg")
    assert [tree.words[0] for tree in trees] == ["the whole buffer"]
    routed = replace(schedule, routes=(Route(4, 0, 1, ("bus",)),))
    trees, use = drawn(routed, topology, tmp_path / "a.svg")
    assert sorted(tree.words[0] for tree in trees) == ["1/3 of the buffer"] * 2 + [
        "1/9 of the buffer",
        "2/9 of the buffer",
    ]
    assert use.words[0] == "use of each link: 5 of 8 carry data"


def test_many_trees_are_counted(tmp_path):
    """Of more trees than PANELS the first are drawn, and the others counted with their share."""
    trees, _ = drawn(ring(names(16)), Topology.ring(16), tmp_path / "a.svg")
    assert len(trees) == PANELS == 12
    assert "and 4 more trees, 1/4 of the buffer" in words(tmp_path / "a.svg")
    drawn(ring(names(3), packs=12), Topology.ring(3), tmp_path / "a.svg")
    assert not [word for word in words(tmp_path / "a.svg") if "more" in word]


def test_the_use_of_links_is_shaded_by_time(tmp_path):
    """In the last panel links that are equally busy have one colour, links that are less so a paler one."""
    topology = Topology(names(3), [("cpu:0", "cpu:1", 10), ("cpu:0", "cpu:2", 20), ("cpu:1", "cpu:2", 1)])
    broadcast = one_device(names(3), ["cpu:0"])
    _, use = drawn(broadcast, topology, tmp_path / "a.svg")
    assert use.words[0] == "use of each link: 2 of 3 carry data"
    pale, dark = sorted(use.heads, key=lambda colour: -sum(bytes.fromhex(colour[1:])))
    assert use.heads == {pale: 1, dark: 1}
    _, use = drawn(broadcast, Topology.full_mesh(3), tmp_path / "a.svg")
    assert use.heads == {dark: 2}  # the darkest is the busiest


@pytest.mark.parametrize("algorithm", [*PLANNERS])
def test_every_planner_can_be_drawn(tmp_path, algorithm):
    """Every planner's schedules are drawn, through a switch and between hosts; each tree has a root."""
    hosts = two_hosts()
    for topology in (Topology.star(5), hosts):
        trees, _ = drawn(PLANNERS[algorithm](topology.devices), topology, tmp_path / "a.svg")
        if topology is not hosts:  # whose panels are too small for names
            assert all(tree.white for tree in trees)


def test_nothing_to_move(tmp_path):
    """A schedule of no rounds has one panel with its roots and no arrow, and no rate."""
    lone = Schedule("broadcast", "none", names(2), (Chunk(Fraction(1), (0,), (0,)),), ())
    (tree,), use = drawn(lone, Topology.ring(2), tmp_path / "a.svg")
    assert tree.white == ["cpu:0"]
    assert tree.heads == use.heads == {}
    assert not [word for word in words(tmp_path / "a.svg") if "GB/s" in word]
    draw_topology(Topology(names(1), []), tmp_path / "b.svg")
    assert words(tmp_path / "b.svg") == ["cpu:0", "1 device"]


# What stays as it was.


def test_titles_are_plain_text(tmp_path):
    """A title stands there as it is given: no formula, no markup."""
    title = "a $x^2$ & <b> 50 %"
    draw_topology(PART, tmp_path / "a.svg", title=title)
    draw_schedule(ring(GPUS), ring_of(GPUS), tmp_path / "b.svg", title=title)
    for name in ("a.svg", "b.svg"):
        assert title in words(tmp_path / name)
        assert ElementTree.parse(tmp_path / name).find(f"{SVG}title").text == title


@pytest.mark.parametrize(
    ("draw", "error", "text"),
    [
        (lambda path: draw_topology(ring(GPUS), path), ArgumentError, "no topology to draw"),
        (lambda path: draw_topology(None, path), ArgumentError, r"no topology to draw[\s\S]*None"),
        (lambda path: draw_schedule(PART, PART, path), ArgumentError, "no schedule on a topology to draw"),
        (lambda path: draw_schedule(ring(GPUS), None, path), ArgumentError, "no schedule on a topology to draw"),
        (lambda path: draw_schedule(ring(names(2)), Topology(names(2), []), path), PlanError, "no way from"),
        (
            lambda path: draw_schedule(replace(ring(GPUS), rounds=()), ring_of(GPUS), path),
            ScheduleError,
            "no step brings|is lost",
        ),
    ],
)
def test_what_cannot_be_drawn(tmp_path, draw, error, text):
    """What is no topology or schedule, a schedule that is wrong, or one without a way is refused before a file is
    written; a picture that was there stays."""
    path = tmp_path / "a.svg"
    path.write_text("old")
    with pytest.raises(error, match=text):
        draw(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch, suffix):
    """When drawing or writing fails the old file stays, and no part of a new one is left."""
    path = tmp_path / f"a.{suffix}"
    path.write_text("old")

    def fails(*args, **kwargs):
        raise OSError("disk full")

    for place in ("matplotlib.figure.Figure.savefig", "pathlib.Path.write_bytes", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails)
            with pytest.raises(OSError, match="disk full"):
                draw_topology(PART, path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
    draw_topology(PART, path)
    assert path.read_bytes()[:4] in (b"<?xm", b"\x89PNG")
    with pytest.raises(FileNotFoundError):
        draw_topology(PART, tmp_path / "none" / f"a.{suffix}")


def test_links_to_files_and_rights_are_kept(tmp_path):
    """A path that is a symbolic link has the picture where it points; a new file has the rights that new files have."""
    (tmp_path / "plain").write_text("")
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    draw_topology(PART, tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "real.svg").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_matplotlib_is_asked_for(tmp_path, monkeypatch):
    """Without matplotlib a picture is a BackendError that names the extra, and an error of this library."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda path: draw_topology(PART, path), lambda path: draw_schedule(ring(GPUS), ring_of(GPUS), path)):
        with pytest.raises(
            BackendError, match=r"pictures need matplotlib[\s\S]*pip install 'crossreduce\[plot\]'"
        ) as caught:
            draw(tmp_path / "a.svg")
        assert isinstance(caught.value, (ReductionError, ImportError))
    assert list(tmp_path.iterdir()) == []


def test_settings_are_neither_followed_nor_changed(tmp_path):
    """The caller's matplotlib settings make no difference to a picture, and are the same afterwards."""
    import matplotlib

    draw_topology(PART, tmp_path / "a.svg")
    changed = {
        "font.size": 30,
        "svg.fonttype": "path",
        "savefig.bbox": "tight",
        "lines.linewidth": 9,
        "axes.facecolor": "red",
    }
    with matplotlib.rc_context(changed):
        before = dict(matplotlib.rcParams)
        draw_topology(PART, tmp_path / "b.svg")
        assert dict(matplotlib.rcParams) == before
        with pytest.raises(ArgumentError):
            draw_topology(PART, tmp_path / "b.gif")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


DRAW = """
import hashlib, sys
import crossreduce.export.pictures as pictures
assert "matplotlib" not in sys.modules
from crossreduce import Topology
from crossreduce.planning import direct
topology = Topology.mesh(2, 3)
for suffix in ("svg", "png"):
    for draw, args in (("topology", [topology]), ("schedule", [direct(topology.devices), topology])):
        path = f"{sys.argv[1]}/{draw}.{suffix}"
        getattr(pictures, f"draw_{draw}")(*args, path)
        print(hashlib.sha256(open(path, "rb").read()).hexdigest())
assert "matplotlib.pyplot" not in sys.modules
"""


def test_the_same_bytes_each_time(tmp_path):
    """The same input gives the same bytes in processes with different hash seeds, and pyplot is never imported."""
    seen = set()
    for seed in ("0", "1"):
        (tmp_path / seed).mkdir()
        command = [sys.executable, "-c", DRAW, str(tmp_path / seed)]
        ran = subprocess.run(
            command, env={"PYTHONHASHSEED": seed, "MPLBACKEND": "Agg"}, capture_output=True, check=True
        )
        seen.add(ran.stdout)
    assert len(seen) == 1
    assert len(set(seen.pop().split())) == 4
