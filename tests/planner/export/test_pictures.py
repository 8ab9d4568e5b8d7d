"""Pictures: SVG and PNG files of nodes, links and trees. Each time they have the same bytes. Writing is atomic."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from drawings import BLUE, GPUS, ORANGE, PART, SVG, panels, words
from strategies import names

from crossreduce import ArgumentError, BackendError, Chunk, PlanError, Schedule, ScheduleError, Step, Topology
from crossreduce.export import EXPORTERS
from crossreduce.export.pictures import PANELS, draw_schedule, draw_topology
from crossreduce.export.pictures.style import DARK
from crossreduce.planning import hierarchical_copy, one_device, ring

RING = Topology.ring(GPUS, 25)


def test_the_suffix_chooses_the_kind(tmp_path, monkeypatch):
    """A path that ends in .svg becomes an SVG file, and one that ends in .png a PNG file. No other file is left in the
    folder. Any other path raises an ArgumentError that shows it."""
    monkeypatch.chdir(tmp_path)
    for draw in (lambda path: draw_topology(PART, path), lambda path: draw_schedule(ring(GPUS), RING, str(path))):
        draw(tmp_path / "a.picture.svg")
        assert ElementTree.fromstring((tmp_path / "a.picture.svg").read_bytes()).tag == f"{SVG}svg"
        draw(tmp_path / "a.Png")
        content = (tmp_path / "a.Png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
    for path in ("picture", "picture.jpg", "picture.svg.gz", "", ".", 3, None, b"a.svg"):
        for draw in (lambda path: draw_topology(PART, path), lambda path: draw_schedule(ring(GPUS), RING, path)):
            with pytest.raises(ArgumentError, match=r"a \.svg or a \.png file[\s\S]*given: "):
                draw(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.Png", "a.picture.svg"]


def drawn(schedule, topology, path):
    """Draw a schedule, and return the panels of its trees and the panel of the use of links."""
    draw_schedule(schedule, topology, path)
    *trees, use, scale = panels(path)
    assert scale.words[-1].startswith("% of the busiest link's time")
    return trees, use


def test_a_schedule_shows_each_tree(tmp_path):
    """A tree's panel has its share, its root (white text on black), a blue arrow for each transfer to the root, and an
    orange arrow for each transfer from the root. TensorFlow's eight trees have one shape, so they have one panel."""
    (tree,), use = drawn(hierarchical_copy(names(8), packs=8), Topology.full_mesh(8, 25), tmp_path / "a.svg")
    assert tree.words == ["8 x 1/8 = the whole buffer", *map(str, range(8))]
    assert tree.white == ["0"]
    assert tree.heads == Counter({BLUE: 7, ORANGE: 7})
    assert use.words == ["use of each link: 32 of 56 carry data", *names(8)]
    assert use.heads.total() == 32
    found = words(tmp_path / "a.svg")
    assert "all_reduce hierarchical_copy: 8 devices, 8 chunks, 4 rounds, 80 steps" in found
    assert "the busiest link allows 50 GB/s" in found
    assert "% of the busiest link's time, 20 ms per GB" in found
    assert found[-4:] == ["partial result, to the root", "result, from the root", "root", "link of 25 GB/s"]


@pytest.mark.parametrize(
    ("schedule", "topology", "roots", "heads"),
    [
        (ring(names(5)), Topology.ring(5), [4], (4, 4)),
        (one_device(names(5)), Topology.star(5), [0], (5, 5)),  # blue: 4 links to the switch, and 1 to the root
        (one_device(names(5), destinations=["cpu:3"]), Topology.full_mesh(5), [3], (4, 0)),
        (one_device(names(5), ["cpu:2"], names(4)[3:]), Topology.full_mesh(5), [2], (0, 1)),
    ],
    ids=["ring", "star", "reduce", "broadcast"],
)
def test_roots_and_directions(tmp_path, schedule, topology, roots, heads):
    """A tree's root is the device that produces the result. A link that carries contributions has a blue arrow, and a
    link that carries the result has an orange one. ``heads``: the numbers of blue and orange arrows."""
    trees, _ = drawn(schedule, topology, tmp_path / "a.svg")
    assert [tree.white for tree in trees] == [[str(root)] for root in roots]
    assert [(tree.heads[BLUE], tree.heads[ORANGE]) for tree in trees] == [heads] * len(roots)


def test_many_trees_are_counted(tmp_path):
    """The first PANELS shapes of trees are drawn. A text has the number and share of the other trees."""
    for count, more in ((PANELS + 4, ["and 4 more trees, 2/9 of the buffer"]), (PANELS, [])):
        chunks = tuple(Chunk(Fraction(1, count), (0,), (k + 1,)) for k in range(count))
        steps = tuple(Step(k, k + 1, (0,)) for k in range(count))  # paths of different lengths, so different shapes
        schedule = Schedule("broadcast", "custom", names(count + 1), chunks, (steps,))
        trees, _ = drawn(schedule, Topology.mesh(1, count + 1), tmp_path / "a.svg")
        assert len(trees) == PANELS == 14
        assert [word for word in words(tmp_path / "a.svg") if "more" in word] == more


def test_the_use_of_links_is_shaded_by_time(tmp_path):
    """In the last panel equally busy links have one colour, and less busy links a paler one."""
    topology = Topology(names(3), [("cpu:0", "cpu:1", 10), ("cpu:0", "cpu:2", 20), ("cpu:1", "cpu:2", 1)])
    broadcast = one_device(names(3), ["cpu:0"])
    _, use = drawn(broadcast, topology, tmp_path / "a.svg")
    assert use.words[0] == "use of each link: 2 of 3 carry data"
    pale, dark = sorted(use.heads, key=lambda colour: -sum(bytes.fromhex(colour[1:])))
    assert use.heads == {pale: 1, dark: 1}
    _, use = drawn(broadcast, Topology.full_mesh(3), tmp_path / "a.svg")
    assert use.heads == {dark: 2}  # the darkest colour shows the busiest links


def test_titles_are_plain_text(tmp_path):
    """A title is drawn unchanged: it is neither a formula nor markup."""
    title = "a $x^2$ & <b> 50 %"
    draw_topology(PART, tmp_path / "a.svg", title=title)
    draw_schedule(ring(GPUS), RING, tmp_path / "b.svg", title=title)
    for name in ("a.svg", "b.svg"):
        assert title in words(tmp_path / name)
        assert ElementTree.parse(tmp_path / name).find(f"{SVG}title").text == title


def test_invalid_arguments_are_refused(tmp_path):
    """Invalid topologies and schedules, and those without a route, are refused, and the old picture stays."""
    path = tmp_path / "a.svg"
    path.write_text("old")
    for draw, arguments, error, text in (
        (draw_topology, [ring(GPUS)], ArgumentError, "this is not a topology"),
        (draw_topology, [None], ArgumentError, r"this is not a topology[\s\S]*None"),
        (draw_schedule, [PART, PART], ArgumentError, "draw_schedule requires a Schedule"),
        (draw_schedule, [ring(GPUS), None], ArgumentError, "this is not a topology"),
        (draw_schedule, [ring(names(2)), Topology(names(2), [])], PlanError, "no route from"),
        (draw_schedule, [replace(ring(GPUS), rounds=()), RING], ScheduleError, "no step brings|lost"),
    ):
        with pytest.raises(error, match=text):
            draw(*arguments, path)
    for width in (5, float("nan"), float("inf"), None):
        with pytest.raises(ArgumentError, match=rf"inches, at least 5.4[\s\S]*width={width}"):
            draw_schedule(ring(GPUS), RING, path, width=width)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_files_are_replaced_atomically(tmp_path, monkeypatch, suffix):
    """If drawing or writing fails, the old file stays, and no part of a new file is left. If the path is a symbolic
    link, its target is written, with the default permissions of a new file."""
    path = tmp_path / f"a.{suffix}"
    path.write_text("old")

    def fails(*args, **kwargs):
        raise OSError("disk full")

    for place in ("matplotlib.figure.Figure.savefig", "os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails)
            with pytest.raises(OSError, match="disk full"):
                draw_topology(PART, path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
    draw_topology(PART, path)
    assert path.read_bytes()[:4] in (b"<?xm", b"\x89PNG")
    with pytest.raises(FileNotFoundError, match=r"There is no such folder: '.*/none'"):
        draw_topology(PART, tmp_path / "none" / f"a.{suffix}")
    (tmp_path / "plain").write_text("")
    (tmp_path / f"link.{suffix}").symlink_to(tmp_path / f"real.{suffix}")
    draw_topology(PART, tmp_path / f"link.{suffix}")
    assert (tmp_path / f"link.{suffix}").is_symlink()
    assert (tmp_path / f"real.{suffix}").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_matplotlib_is_required(tmp_path, monkeypatch):
    """Without matplotlib a picture raises a BackendError with the name of the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda path: draw_topology(PART, path), lambda path: draw_schedule(ring(GPUS), RING, path)):
        with pytest.raises(BackendError, match=r"pictures need matplotlib[\s\S]*pip install matplotlib"):
            draw(tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_pictures_have_dark_colours_for_dark_pages(tmp_path):
    """An SVG has rules that replace each of its colours on dark pages. All its colours are those of the style."""
    draw_topology(PART, tmp_path / "a.svg")
    draw_schedule(ring(GPUS), RING, tmp_path / "b.svg")
    for path in tmp_path.iterdir():
        (rules,) = re.fullmatch(
            r"(?s).*@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}</style>.*", text := path.read_text()
        ).groups()
        used = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", text.replace(rules, "")))
        assert len(used) > 4
        found = re.findall(r'\[style\*="(\w+): (#\w+)"\]\{(\w+):(#\w+)!important\}', rules)
        assert {f"{kind}: {colour}" for kind, colour, *_ in found} == used
        assert all(kind == other and DARK[colour] == dark for kind, colour, other, dark in found)


def test_matplotlib_settings_have_no_effect_and_do_not_change(tmp_path):
    """The caller's matplotlib settings have no effect on a picture, and do not change."""
    import matplotlib

    draw_topology(PART, tmp_path / "a.svg")
    changed = {"font.size": 30, "svg.fonttype": "path", "savefig.bbox": "tight", "axes.facecolor": "red"}
    with matplotlib.rc_context(changed):
        before = dict(matplotlib.rcParams)
        draw_topology(PART, tmp_path / "b.svg")
        assert dict(matplotlib.rcParams) == before
        with pytest.raises(ArgumentError, match="gif"):
            draw_topology(PART, tmp_path / "b.gif")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


WRITE = """
import hashlib, sys
import crossreduce.export.pictures as pictures
assert "matplotlib" not in sys.modules
from crossreduce import Topology, plan
from crossreduce.export import EXPORTERS
topology = Topology.ring(["cuda:0", "cuda:1", "cuda:2", "cuda:3"], 25, 1e-6)
made = plan(topology, nbytes=4096, algorithm="ring")
found = [repr(exporter.write(made)).encode() for exporter in EXPORTERS.values()]
for suffix in ("svg", "png"):
    for draw, args in (("topology", [topology]), ("schedule", [made.schedule, topology])):
        path = f"{sys.argv[1]}/{draw}.{suffix}"
        getattr(pictures, f"draw_{draw}")(*args, path)
        found.append(open(path, "rb").read())
print(*[hashlib.sha256(content).hexdigest() for content in found])
assert "matplotlib.pyplot" not in sys.modules
"""


def test_the_same_bytes_each_time(tmp_path):
    """The same plan gives the same pictures, and the same file of each format, in processes with different hash seeds.
    matplotlib is imported when a picture is drawn, and pyplot never."""
    seen = []
    for seed in ("0", "1"):
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "MPLBACKEND": "Agg"}
        command = [sys.executable, "-c", WRITE, str(tmp_path / seed)]
        seen.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert seen[0] == seen[1]
    assert len(set(seen[0].split())) == len(EXPORTERS) + 4
