"""``crossreduce topology``: machines, links, bounds, selections and files."""

import json
import os
import re
from pathlib import Path

import pytest
from command_line import expanded, plan_shown

import crossreduce as cr
from crossreduce.cli.support.arguments import read_link
from crossreduce.cli.support.output import atomic_file
from crossreduce.export.files import real_path
from crossreduce.planning import COLLECTIVES
from crossreduce.planning.optimal.bounds.tight_cuts import heaviest_cuts, limited_by
from crossreduce.topology.discover import discover
from crossreduce.topology.machines import machine_names

DGX = cr.Topology.machine("dgx-1v")
TOPO_M = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-7
GPU1\tNV4\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tNV4\t8-15
GPU3\tSYS\tSYS\tNV4\t X \t8-15
"""


def test_machines_are_listed(printed):
    """Without an argument every machine of the library is listed, with its number of devices and its description."""
    out = printed("topology")
    report = json.loads(printed("topology", "--json"))
    assert report["crossreduce"] == cr.__version__
    assert [(entry["name"], entry["description"]) for entry in report["machines"]] == list(machine_names())
    for entry in report["machines"]:
        assert entry["devices"] == len(cr.Topology.machine(entry["name"]).devices)
        assert re.search(rf"│ {entry['name']} +│ {entry['devices']} +│ {entry['description'][:30]}", out)
    assert max(map(len, out.splitlines())) <= 80


def asymmetric(n):
    """Return a topology whose links differ from those in the other direction."""
    rows = [[(a != b) * ((7 * a + 11 * b) % 5 * 2.5 + a) for b in range(n)] for a in range(n)]
    return cr.Topology.from_matrix(rows, [f"cuda:{k}" for k in range(n)])


def test_a_topology_is_a_matrix(printed, tmp_path):
    """Each cell of the matrix is the bandwidth from the row's node to the column's. The table has the exact bounds."""
    path = tmp_path / "a.json"
    for name, topology in (("dgx-1v", DGX), (path, asymmetric(8))):
        path.write_text(topology.to_json())
        lines = printed("topology", name).splitlines()
        start = lines.index("GB/s of each link, from row to column")
        assert lines[start + 1].split() == [str(k) for k in range(8)]
        for k, line in enumerate(lines[start + 2 : start + 10]):
            links = [topology.link(f"cuda:{k}", f"cuda:{j}") for j in range(8)]
            cells = ["." if link is None else f"{float(link.bandwidth):g}" for link in links]
            assert line.split() == [str(k), f"cuda:{k}", *cells]
        for collective in COLLECTIVES:
            exact = cr.bound(topology, collective).algbw
            row = rf"│ {collective} +│ {float(exact):.2f} +│ {exact} +│ (the|every) "
            assert [line for line in lines if re.match(row, line)]
        assert max(map(len, lines[1:])) <= 80


LARGE = {
    "hgx-h100 --hosts 2": cr.Topology.machine("hgx-h100", 2),
    "tpu-v4": cr.Topology.machine("tpu-v4"),
    "pcie-8 --speeds effective": cr.Topology.machine("pcie-8", speeds="effective"),
    "a.json": asymmetric(12),
}


@pytest.mark.parametrize("line", LARGE)
def test_a_large_topology_is_a_list(printed, monkeypatch, tmp_path, line):
    """If the matrix is too wide, lines list every link with its speed and both ends, and nothing else."""
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.chdir(tmp_path)
    topology = LARGE[line]
    Path("a.json").write_text(topology.to_json())
    out = printed("topology", *line.split())
    lines = out[out.index("GB/s of each link\n") :].partition("\n\n")[0].splitlines()[1:]
    found = set()
    for where, nodes, to in (re.fullmatch(r"([0-9,-]+) (.+?): (.+)", line).groups() for line in lines):
        assert [topology.nodes[int(number)] for number in expanded(where)] == expanded(nodes)
        for part in to.split("; "):
            speed, _, ends = part.partition(" to ")
            found |= {(src, dst, speed) for src in expanded(nodes) for dst in expanded(ends)}
    assert found == {(link.src, link.dst, f"{float(link.bandwidth):.4g}") for link in topology.links}


SELECTED = {
    "dgx-1v": DGX,
    "DGX-1 --hosts 2 --nics edr-1": cr.Topology.machine("dgx-1v", 2, nics="edr-1"),
    "hgx-h100 --in-network": cr.Topology.machine("hgx-h100", in_network=True),
    "mi300x --speeds effective": cr.Topology.machine("mi300x", speeds="effective"),
    "dgx-1v --devices 4,cuda:0,GPU:1": DGX.subset([4, 0, 1]),
    "dgx-1v --devices 2,1,0 --without-link 0-1 --without-link cuda:7,4": DGX.without_link(0, 1).subset([2, 1, 0]),
    "dgx-1v --without-link cuda:0-cuda:1 --without-link 2,cuda:3": DGX.without_link(0, 1).without_link(2, 3),
    "pcie-8 --without-link 0-8": cr.Topology.machine("pcie-8").without_link("cuda:0", "plx0"),
    "this": cr.Topology.discover(),
}


@pytest.mark.parametrize("line", SELECTED)
def test_the_selection_is_that_of_the_library(printed, line):
    """The JSON has the topology that the library returns for the same options, its islands, hosts and bounds."""
    topology, report = SELECTED[line], json.loads(printed("topology", *line.split(), "--json"))
    assert cr.Topology.from_json(json.dumps(report["topology"])) == topology
    assert report["notes"] == (list(discover().notes) if line == "this" else [])
    assert report["islands"] == [list(island) for island in topology.islands]
    assert [device for host in report["hosts"].values() for device in host] == list(topology.devices)
    assert list(report["bounds"]) == list(COLLECTIVES)
    for collective, entry in report["bounds"].items():
        if "pcie-8" in line:
            assert entry["algbw"] is None
            assert f"{collective} needs a route from cuda:" in entry["error"]
            continue
        limit = cr.bound(topology, collective)
        rate = None if limit.algbw is None else {"exact": str(limit.algbw), "gb_per_s": float(limit.algbw)}
        assert (entry["error"], entry["algbw"]) == (None, rate)
        assert set(entry["tight_cut"]) == next((cut.nodes for cut in heaviest_cuts(limit)), set())
        assert entry["limited_by"] == (limited_by(limit) if rate else "nothing has to move")


def test_ends_of_a_link_may_be_joined_by_a_hyphen():
    """A hyphen separates numbers and names, also names with hyphens, unless several pairs of nodes are possible."""
    ends = [(name, "rack-1", 10) for name in ("cpu:0", "cpu:1")] + [("rack-1", "rack", 10), ("rack", "1x", 10)]
    box = cr.Topology(
        ["cpu:0", "cpu:1"], [pair for a, b, w in ends for pair in ((a, b, w), (b, a, w))], ["rack-1", "rack", "1x"]
    )
    for text in ("cpu:0-rack-1", "cpu:0,rack-1", "0-rack-1", "0,2"):
        assert read_link("--without-link", text, box) == ("cpu:0", "rack-1")
    for text in ("cpu:0", "rack-rack-1-1", "0-1-2", "0,1,2"):
        with pytest.raises(
            cr.ArgumentError, match="must be two numbers such as 0-3, or two names such as cuda:0,cuda:3"
        ):
            read_link("--without-link", text, box)
    with pytest.raises(cr.ArgumentError, match='"rail9" is not one of'):
        read_link("--without-link", "cpu:0-rail9", box)


def test_a_part_of_a_machine_is_shown(printed):
    """The output for some devices of a machine has the numbers by which they were selected. If these devices are not
    connected, it has the cut that no link leaves instead of the bounds."""
    out = printed("topology", "dgx-1v", "--devices", "6,2,5")
    assert re.search(r"^ +6 +2 +5\n6 cuda:6 .*\n2 cuda:2 .*\n5 cuda:5 ", out, re.MULTILINE)
    out = printed("topology", "dgx-1v", "--devices", "0,5")
    assert "0 cuda:0  . ." in out
    words = " ".join(re.sub("[│├┤]", " ", out[out.index("│ all_reduce ") :]).split())
    assert "all_reduce needs a route from cuda:0 to cuda:5, but no link leads out of {cuda:0}." in words


def test_a_topology_can_be_exported_and_loaded(printed, tmp_path):
    """--export writes the topology's JSON, which the commands topology and plan accept as a file."""
    path = tmp_path / "box.json"
    printed("topology", "hgx-h100", "--hosts", 2, "--in-network", "--export", path)
    topology = cr.Topology.load(path)
    assert topology == cr.Topology.machine("hgx-h100", 2, in_network=True)
    assert path.read_text() == topology.to_json() + "\n"
    assert json.loads(printed("topology", path, "--json"))["topology"] == json.loads(path.read_text())
    line = ["plan", path, "--collective", "all_gather", "--devices", "0,1,8,host1/cuda:1"]
    four = topology.subset([topology.devices[k] for k in (0, 1, 8, 9)])
    assert printed(*line) == plan_shown(cr.plan(four, "all_gather"), " ".join(map(str, line)))


def test_a_file_and_a_machine_are_distinguished(printed, tmp_path, monkeypatch):
    """A file needs no suffix, but a machine's name means the machine. A name with a / is always a file. Text in a
    file's name that looks like markup or an emoji of rich is printed unchanged."""
    monkeypatch.chdir(tmp_path)
    for name in ("wiring", "dgx-1v"):
        Path(name).write_text(TOPO_M)
    four = cr.Topology.load("wiring")
    assert len(four.devices) == 4
    for name, topology in (("wiring", four), ("./dgx-1v", four), ("dgx-1v", DGX)):
        assert json.loads(printed("topology", name, "--json"))["topology"] == json.loads(topology.to_json())
    name = "[red]a:smile:.json"
    Path(name).write_text(DGX.to_json())
    assert printed("topology", name).splitlines()[0] == name


def test_a_file_is_replaced_atomically(printed, tmp_path):
    """A reader that opened the earlier file can still read all of it. A symbolic link remains a symbolic link."""
    path, link = tmp_path / "a.bin", tmp_path / "a.svg"
    path.write_text("earlier")
    link.symlink_to(path)
    with path.open() as reader:
        printed("topology", "dgx-1v", "--picture", link)
        assert reader.read() == "earlier"
    assert (link.is_symlink(), path.read_bytes()[:5]) == (True, b"<?xml")
    assert sorted(tmp_path.iterdir()) == [path, link]


@pytest.mark.parametrize("name", [".", "plan.html"])
def test_links_of_other_users_are_not_followed(crossreduce, tmp_path, monkeypatch, name):
    """In a folder such as /tmp, an output file that is a link of another user, or is behind one, is not written, as in
    Linux itself with ``fs.protected_symlinks``. In other folders the link is followed."""
    target, link, lstat = tmp_path / "target", tmp_path / "link.html", Path.lstat
    link.symlink_to(target)
    if name != ".":
        target.mkdir()
    fields, file, written = [*link.lstat()], link / name, target / name
    fields[4] += 1  # the owner
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(fields) if path == link else lstat(path))
    tmp_path.chmod(0o1777)
    code, _, error = crossreduce("doctor", tmp_path, "--report", file)
    assert (code, f"{file} cannot be written: It is a symbolic link of another user." in error) == (2, True)
    plan = cr.plan("dgx-1v")
    with pytest.raises(PermissionError, match="It is a symbolic link of another user"):
        plan.report(file)
    assert not written.exists()
    tmp_path.chmod(0o777)
    plan.report(file)
    assert written.is_file()


def test_links_are_resolved_as_the_system_does(tmp_path):
    """Relative links, chains and ".." behind a link lead to the same file as in the system. A circle is an error."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, to in (("c", "a/b"), ("a/b/d", "../../e"), ("e", "a/b/new"), ("round", "round"), ("f", tmp_path / "c")):
        (tmp_path / name).symlink_to(to)
    for name in ("c/d", "c/../x", "e", "./a/../c/new", "f/d", "missing/../x", "a//b/./y"):
        assert str(real_path(tmp_path / name)) == os.path.realpath(tmp_path / name)
    with pytest.raises(OSError, match=r"symbolic links|loop"):
        real_path(tmp_path / "round")


def test_a_link_in_place_of_a_file_that_is_written_is_not_followed(tmp_path):
    """Nothing is written through a link with which another user, who may write into the folder, replaces the file that
    is to become the output."""
    victim = tmp_path / "victim"
    victim.write_text("before")
    (folder := tmp_path / "folder").mkdir()
    with atomic_file("--report", folder / "report.html") as file:
        (made,) = folder.iterdir()
        made.unlink()
        made.symlink_to(victim)
        file.write_text("after")
    assert victim.read_text() == "before"


def test_assumed_speeds_are_part_of_the_output(printed, tmp_path):
    """The bounds of a table without speeds are exact only if the links are as assumed. ``topology``, ``plan``, their
    JSON, exported topologies and the page say so. The kind of GPU and other options replace assumptions."""
    file, exported, page = (tmp_path / name for name in ("box.txt", "box.json", "plan.html"))
    file.write_text(TOPO_M)
    texts = [
        "4 NVLinks of 25 GB/s each between GPUs; --gpu sets it",
        "PCIe 3 x16, 15.75 GB/s for each GPU; --pcie sets it",
        "10 GB/s between CPUs; --between-cpus sets it",
    ]
    out = printed("topology", file, "--export", exported)
    for text in texts:
        assert f"assumed   {text}" in out
    assert "exact, as" in out
    assert json.loads(printed("topology", exported, "--json"))["assumed"] == texts
    for source in (file, exported):
        out = printed("plan", source)
        lines = out.splitlines()
        assert [line for line in lines if "assumed   " in line] == [f"  assumed   {text}" for text in texts]
        assert re.search(r"bound .*10\.00 GB/s \(if the links are as assumed\)", out)
        assert json.loads(printed("plan", source, "--json"))["assumed"] == texts
    printed("export", file, page)
    assert all(text in page.read_text() for text in texts)
    known = ["--gpu", "a6000", "--pcie", 3, "--between-cpus", 22]
    out = printed("topology", file, *known)
    assert "assumed  " not in out
    assert "56.25" in out
    assert "assumed  " not in printed("plan", file, *known)
    assert json.loads(printed("plan", file, "--json", *known))["assumed"] == []
    assert json.loads(printed("plan", "dgx-1v", "--json"))["assumed"] == []


def test_options_without_effect_say_so(crossreduce, printed, tmp_path):
    """A note on standard error names each option that changes nothing. Options that change something have no note."""
    path = tmp_path / "box.txt"
    path.write_text(TOPO_M.replace("SYS", "NV4"))
    for args, unused in (
        (
            ("dgx-1v", "--nics", "edr", "--in-network"),
            {"--nics": "there is one host", "--in-network": "no switch of dgx-1v"},
        ),
        ((path, "--gpu", "v100", "--nics", 400, "--pcie", 4), dict.fromkeys(["--nics", "--pcie"], "the same")),
    ):
        code, out, notes = crossreduce("topology", *args, "--json")
        assert (code, json.loads(out)["machine"]) == (0, str(args[0]))
        lines = notes.splitlines()
        assert {line.split()[1] for line in lines} == set(unused)
        assert all("has no effect" in line for line in lines)
        assert all(why in line for line, why in zip(sorted(lines), sorted(unused.values()), strict=True))
    printed("topology", "hgx-h100", "--nics", "efa", "--in-network", "--hosts", 2)
    path.write_text(TOPO_M)
    printed("topology", path, "--gpu", "RTX 3090", "--pcie", 3, "--between-cpus", 22)
