"""The command line's topology, plan and verify, and bench on a topology."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.cli import main
from crossreduce.cli.arguments import read_algorithms, read_link, read_members, read_node
from crossreduce.cli.output import grouped
from crossreduce.export.msccl.writer import to_msccl_xml
from crossreduce.export.mscclpp import to_mscclpp_json
from crossreduce.export.nccl_graph import to_nccl_graph_xml
from crossreduce.export.trace import to_chrome_trace
from crossreduce.options import ALGORITHMS
from crossreduce.planning.bounds import COLLECTIVES
from crossreduce.planning.explain import limited_by, shape
from crossreduce.topology.machines import machine_names

DGX = cr.Topology.machine("dgx-1v")
# As msccl-tools writes it: an all-gather of two ranks, out of place, without the attributes that came later.
FOREIGN = """\
<algo name="by_hand" nchannels="1" nchunksperloop="2" proto="Simple" ngpus="2" coll="allgather" inplace="0">
  <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""
TOPO_M = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-7
GPU1\tNV4\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tNV4\t8-15
GPU3\tSYS\tSYS\tNV4\t X \t8-15
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A terminal's usual width, whatever the one that the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def crossreduce(capsys):
    """Run a command line in this process; give its exit code, stdout and stderr."""

    def run(*args):
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def printed(crossreduce):
    """Run a command line that must succeed in silence; give what it printed."""

    def run(*args):
        code, out, error = crossreduce(*args)
        assert (code, error) == (0, "")
        return out

    return run


def expand(text):
    """Return the names that ``grouped`` joined."""
    names = []
    for part in text.split():
        match = re.fullmatch(r"(.*?)([0-9][0-9,-]*)", part)
        for run in match[2].split(",") if match else [""]:
            first, _, last = run.partition("-")
            numbers = range(int(first), int(last or first) + 1) if run else [""]
            names += [f"{match[1] if match else part}{number}" for number in numbers]
    return names


@given(st.lists(st.sampled_from(["cuda:", "host0/cuda:", "nic", ""]).flatmap(
    lambda prefix: st.integers(0, 99).map(lambda number: f"{prefix}{number}")) | st.sampled_from(["nvswitch", "ib"]),
    max_size=12))  # fmt: skip
def test_grouped_names_lose_nothing(names):
    """From the short form of any names all of them can be read again, in their order."""
    assert expand(grouped(names)) == names


# ---- topology


def test_machines_are_listed(printed):
    """Without an argument every machine of the library is named, with how many devices it has and what it is."""
    out = printed("topology")
    report = json.loads(printed("topology", "--json"))
    assert report["crossreduce"] == cr.__version__
    assert [(entry["name"], entry["description"]) for entry in report["machines"]] == list(machine_names())
    for entry in report["machines"]:
        assert entry["devices"] == len(cr.Topology.machine(entry["name"]).devices)
        assert re.search(rf"│ {entry['name']} +│ {entry['devices']} +│ {entry['description'][:30]}", out)
    assert max(map(len, out.splitlines())) <= 80


def one_way(n):
    """A topology in which no link is like the one the other way, if there is one."""
    rows = [[0 if a == b else (7 * a + 11 * b) % 5 * 2.5 + a for b in range(n)] for a in range(n)]
    return cr.Topology.from_matrix(rows, [f"cuda:{k}" for k in range(n)])


def test_a_topology_is_a_matrix(printed, tmp_path):
    """Each cell of the matrix is the link from the row's node to the column's, and the table has the exact bounds."""
    path = tmp_path / "a.json"
    for name, topology in (("dgx-1v", DGX), (path, one_way(8))):
        path.write_text(topology.to_json())
        lines = printed("topology", name).splitlines()
        start = lines.index("GB/s of each link, from row to column")
        assert lines[start + 1].split() == [str(k) for k in range(8)]
        for k, line in enumerate(lines[start + 2 : start + 10]):
            number, node, *cells = line.split()
            assert (number, node) == (str(k), f"cuda:{k}")
            links = [topology.link(node, f"cuda:{j}") for j in range(8)]
            assert cells == ["." if link is None else f"{float(link.bandwidth):g}" for link in links]
        for collective in COLLECTIVES:
            exact = cr.bound(topology, collective).algbw
            row = rf"│ {collective} +│ {float(exact):.2f} +│ {exact} +│ (the|every) "
            assert [line for line in lines if re.match(row, line)]
        assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize("line", ["hgx-h100 --hosts 2", "tpu-v4", "gb200-nvl72", "pcie-8 --speeds effective", "a.json"])
def test_a_large_topology_is_a_list(printed, monkeypatch, tmp_path, line):
    """Where the matrix is too wide, lines name every link, with its speed and both ends, and nothing else."""
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.chdir(tmp_path)
    name, *options = line.split()
    if name == "a.json":
        Path(name).write_text(one_way(12).to_json())
        topology = one_way(12)
    else:
        speeds = "effective" if "effective" in line else "raw"
        topology = cr.Topology.machine(name, 2 if "hosts" in line else 1, speeds=speeds)
    out = printed("topology", name, *options)
    lines = out[out.index("GB/s of each link\n") :].partition("\n\n")[0].splitlines()[1:]
    found = set()
    for where, nodes, to in (re.fullmatch(r"([0-9,-]+) (.+?): (.+)", line).groups() for line in lines):
        assert [topology.nodes[int(number)] for number in expand(where)] == expand(nodes)
        for part in to.split("; "):
            speed, _, ends = part.partition(" to ")
            found |= {(src, dst, speed) for src in expand(nodes) for dst in expand(ends)}
    assert found == {(link.src, link.dst, f"{float(link.bandwidth):.4g}") for link in topology.links}


@pytest.mark.parametrize(
    ("line", "topology"),
    [
        ("dgx-1v", DGX),
        ("DGX-1 --hosts 2 --nics edr-1", cr.Topology.machine("dgx-1v", 2, nics="edr-1")),
        ("hgx-h100 --in-network", cr.Topology.machine("hgx-h100", in_network=True)),
        ("mi300x --speeds effective", cr.Topology.machine("mi300x", speeds="effective")),
        ("dgx-1v --devices 4,cuda:0,GPU:1", DGX.subset(["cuda:4", "cuda:0", "cuda:1"])),
        (
            "dgx-1v --devices 2,1,0 --without-link 0-1 --without-link cuda:7,4",
            DGX.without_link("cuda:0", "cuda:1").subset(["cuda:2", "cuda:1", "cuda:0"]),
        ),
        ("pcie-8 --without-link 0-8", cr.Topology.machine("pcie-8").without_link("cuda:0", "plx0")),
        ("this", cr.Topology.discover()),
    ],
)
def test_the_selection_is_that_of_the_library(printed, line, topology):
    """The JSON has the topology that the library makes of the same options, with its islands, hosts and bounds."""
    report = json.loads(printed("topology", *line.split(), "--json"))
    assert cr.Topology.from_json(json.dumps(report["topology"])) == topology
    assert report["islands"] == [list(island) for island in topology.islands]
    assert [device for host in report["hosts"].values() for device in host] == list(topology.devices)
    assert list(report["bounds"]) == list(COLLECTIVES)
    for collective, entry in report["bounds"].items():
        if "pcie-8" in line:
            assert entry["algbw"] is None
            assert f"{collective} needs a way from cuda:" in entry["error"]
            continue
        limit = cr.bound(topology, collective)
        assert entry["error"] is None
        assert set(entry["tight_cut"]) == limit.tight_cut
        if limit.algbw is None:
            assert (entry["algbw"], entry["limited_by"]) == (None, "nothing has to move")
        else:
            assert entry["algbw"] == {"exact": str(limit.algbw), "gb_per_s": float(limit.algbw)}
            assert entry["limited_by"] == limited_by(limit)


def test_positions_are_those_of_the_whole_machine(printed):
    """A part of a machine shows each device under the number that selects it."""
    out = printed("topology", "dgx-1v", "--devices", "6,2,5")
    assert re.search(r"^ +6 +2 +5\n6 cuda:6 .*\n2 cuda:2 .*\n5 cuda:5 ", out, re.MULTILINE)


def test_where_there_is_no_way_the_wiring_is_still_shown(printed):
    """A topology in pieces is shown; instead of the bounds stands which cut no link leaves."""
    out = printed("topology", "dgx-1v", "--devices", "0,5")
    assert "0 cuda:0  . ." in out
    assert " ".join(re.findall(r"│ all_reduce .*│ (.*?) *│\n│.*│ (.*?) *│\n│.*│ (.*?) *│", out)[0]) == (
        "all_reduce needs a way from cuda:0 to cuda:5, and no link leads out of {cuda:0}."
    )


def test_a_topology_comes_back_from_its_file(printed, tmp_path):
    """--export writes the topology's JSON, which is a FILE for every command."""
    path = tmp_path / "box.json"
    printed("topology", "hgx-h100", "--hosts", 2, "--in-network", "--export", path)
    topology = cr.Topology.load(path)
    assert topology == cr.Topology.machine("hgx-h100", 2, in_network=True)
    assert path.read_text() == topology.to_json() + "\n"
    assert json.loads(printed("topology", path, "--json"))["topology"] == json.loads(path.read_text())
    planned = printed("plan", path, "--collective", "all_gather", "--devices", "0,1,8,host1/cuda:1")
    four = topology.subset([topology.devices[k] for k in (0, 1, 8, 9)])
    assert planned == cr.plan(four, "all_gather").explain() + "\n"


def test_a_file_is_told_from_a_machine(printed, crossreduce, tmp_path, monkeypatch):
    """A file without a suffix is read where no machine is called so; with a / before it a file it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("wiring", "dgx-1v"):
        Path(name).write_text(TOPO_M)
    four = json.loads(cr.Topology.load("wiring").to_json())
    assert len(four["devices"]) == 4
    assert json.loads(printed("topology", "wiring", "--json"))["topology"] == four
    assert json.loads(printed("topology", "./dgx-1v", "--json"))["topology"] == four
    assert json.loads(printed("topology", "dgx-1v", "--json"))["topology"] == json.loads(DGX.to_json())
    code, out, error = crossreduce("topology", "wirings")
    assert (code, out) == (2, "")
    assert "there is no machine of this name." in error


def test_names_are_printed_as_they_are(printed, tmp_path, monkeypatch):
    """What looks like rich's markup or an emoji in a file's name is shown as it stands."""
    monkeypatch.chdir(tmp_path)
    name = "[red]a:smile:.json"
    Path(name).write_text(DGX.to_json())
    assert printed("topology", name).splitlines()[0] == name


def test_a_broken_file_is_refused(crossreduce, tmp_path):
    """Of a topology's file that is cut short anywhere, none is taken for a whole one, and none ends in a traceback."""
    for name, text in {"a.json": DGX.to_json()[:-1], "a.txt": TOPO_M[: TOPO_M.rindex("X")]}.items():
        path = tmp_path / name
        for end in (*range(0, len(text), len(text) // 8), len(text)):
            path.write_text(text[:end])
            for command in ("topology", "plan"):
                code, out, error = crossreduce(command, path)
                assert (code, out) == (2, ""), end
                assert error.startswith(f"crossreduce: {path}: ")


# ---- plan


def umask():
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("line", "machine", "options"),
    [
        ("dgx-1v", DGX, {}),
        ("dgx-1v --nbytes 8 --algorithm ring", DGX, {"nbytes": 8, "algorithm": "ring"}),
        ("dgx-1v --collective all_gather --nbytes 1.5G", DGX, {"collective": "all_gather", "nbytes": 3 << 29}),
        ("dgx-1v --collective broadcast --root 3", DGX, {"collective": "broadcast", "root": "cuda:3"}),
        (
            "dgx-1v --collective reduce --root GPU:5 --devices 5,4,7",
            DGX.subset(["cuda:5", "cuda:4", "cuda:7"]),
            {"collective": "reduce", "root": "cuda:5"},
        ),
        (
            "dgx-1v --algorithm one_device --packs 3 --without-link 0-3",
            DGX.without_link("cuda:0", "cuda:3"),
            {"algorithm": "one_device", "packs": 3},
        ),
        (
            "hgx-h100 --hosts 2 --speeds effective --nbytes 1M --algorithm ring",
            cr.Topology.machine("hgx-h100", 2, speeds="effective"),
            {"nbytes": 1 << 20, "algorithm": "ring"},
        ),
        ("ncv4 --algorithm forest", cr.Topology.machine("ncv4"), {"algorithm": "forest"}),
        ("dgx-1v --devices 6", DGX.subset(["cuda:6"]), {}),
        ("dgx-1v --nbytes 0", DGX, {"nbytes": 0}),
    ],
)
def test_a_plan_is_that_of_the_library(printed, line, machine, options):
    """Text, JSON and steps of the command line are those of ``cr.plan`` with the same options."""
    plan = cr.plan(machine, **options)
    assert printed("plan", *line.split()) == plan.explain() + "\n"
    assert printed("plan", *line.split(), "--steps") == f"{plan.explain()}\n{plan.schedule}\n"
    report = json.loads(printed("plan", *line.split(), "--json", "--steps"))
    assert cr.Schedule.from_json(json.dumps(report.pop("schedule"))) == plan.schedule
    assert report == json.loads(printed("plan", *line.split(), "--json"))
    assert report["algorithm"] == plan.algorithm
    assert (report["seconds"], report["algbw_gb_per_s"]) == (plan.seconds, plan.algbw)
    assert report["ratio"] == {"exact": str(plan.ratio), "value": float(plan.ratio)}
    for entry, rate in ((report["rate"], plan.rate), (report["bound"]["algbw"], plan.bound.algbw)):
        assert entry == (None if rate is None else {"exact": str(rate), "gb_per_s": float(rate)})
    assert set(report["bound"]["tight_cut"]) == plan.bound.tight_cut
    found = shape(plan.schedule)
    assert (report["k"]["exact"], report["depth"], report["roots"]) == (str(found.k), found.depth, list(found.roots))
    assert (report["rounds"], report["pieces"]) == (len(plan.schedule.rounds), plan.schedule.pieces)
    assert {name: entry["seconds"] for name, entry in report["others"].items()} == {
        name: seconds for name, (seconds, _) in plan.others().items()
    }


def test_known_numbers_of_a_dgx_1(printed):
    """The all-reduce of a DGX-1V has the bound 600/7 GB/s, which the plan reaches; a broadcast has 150."""
    report = json.loads(printed("plan", "dgx-1v", "--json"))
    assert report["bound"]["algbw"] == report["rate"] == {"exact": "600/7", "gb_per_s": 600 / 7}
    assert report["ratio"] == {"exact": "1", "value": 1.0}
    report = json.loads(printed("plan", "dgx-1v", "--collective", "broadcast", "--json"))
    assert report["bound"]["algbw"]["exact"] == "150"


@pytest.mark.parametrize(
    ("file", "options", "written"),
    [
        ("a.xml", "", lambda plan: to_msccl_xml(plan.schedule)),
        ("a.json", "", lambda plan: plan.schedule.to_json()),
        ("a.JSON", "", lambda plan: plan.schedule.to_json()),
        ("a.trace.json", "", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
        ("a.json", "--format mscclpp", lambda plan: to_mscclpp_json(plan.schedule)),
        ("a.xml", "--format nccl-graph", lambda plan: to_nccl_graph_xml(plan.schedule, plan.topology)),
        ("a.txt", "--format schedule", lambda plan: plan.schedule.to_json()),
        ("a.xml", "--format trace", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
        ("a", "--format msccl", lambda plan: to_msccl_xml(plan.schedule)),
    ],
)
def test_an_export_is_that_of_the_library(printed, tmp_path, file, options, written):
    """The file's format is the one that is named, or its suffix's; the text is the library's."""
    plan = cr.plan(DGX, nbytes=4096, algorithm="ring")
    line = ["plan", "dgx-1v", "--nbytes", 4096, "--algorithm", "ring", "--export", tmp_path / file, *options.split()]
    assert printed(*line) == plan.explain() + "\n"
    assert (tmp_path / file).read_text() == written(plan)
    assert (tmp_path / file).stat().st_mode & 0o777 == 0o666 & ~umask()
    assert list(tmp_path.iterdir()) == [tmp_path / file]


@pytest.mark.parametrize(
    ("command", "name", "start", "words"),
    [
        ("topology", "a.svg", b"<?xml", b"8 V100 in a hybrid cube mesh of NVLink 2"),
        ("topology", "a.PNG", b"\x89PNG", b"8 V100 in a hybrid cube mesh of NVLink 2"),
        ("plan", "a.SVG", b"<?xml", b"all_reduce one_device: 4 devices"),
    ],
)
def test_pictures(printed, tmp_path, command, name, start, words):
    """--picture draws the wiring, or the schedule on it, and leaves nothing else behind."""
    line = [command, "dgx-1v", *(["--devices", "0,1,2,3", "--algorithm", "one_device"] if command == "plan" else [])]
    printed(*line, "--picture", tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(start)
    assert words in picture


# ---- what cannot be done


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("topology dgx1vv", "there is no machine of this name.\n  given: 'dgx1vv' (str)\n  try:   dgx-1v,"),
        ("plan dgx1vv", "there is no machine of this name."),
        ("topology nope.json", "nope.json cannot be read: No such file or directory."),
        ("topology ./nope", "./nope cannot be read: No such file or directory."),
        ("plan .", "there is no machine of this name."),
        ("plan ./", "./ cannot be read: Is a directory."),
        ("topology --hosts 2", "name a machine or a file, such as dgx-1v, for these options."),
        ("topology --picture a.svg", "name a machine or a file"),
        ("topology dgx-1v --hosts 0", "--hosts must be 1 or more, not 0."),
        ("topology pcie-8 --hosts 2 --nics foo", "pcie-8 has no such network."),
        ("topology dgx-1v --speeds fast", '--speeds must be one of raw, effective, not "fast".'),
        ("topology this --in-network", "--in-network are for the library's machines, not for this."),
        ("plan box.json --hosts 2", "are for the library's machines, not for box.json."),
        ("plan dgx-1v --devices 0,8", '--devices: there is no "8" among 0 to 7, cuda:0-7.'),
        ("plan dgx-1v --devices 0,-1", '--devices: there is no "-1" among 0 to 7'),
        ("plan dgx-1v --devices 0,,1", '--devices: there is no "" among 0 to 7'),
        ("plan dgx-1v --devices cuda:0,cuda:9", '--devices: there is no "cuda:9" among'),
        ("plan dgx-1v --devices 0,cuda:0", "--devices takes devices, each once, and cuda:0 is"),
        ("plan pcie-8 --devices 0,plx0", "--devices takes devices, each once, and plx0 is a switch"),
        (f"plan dgx-1v --devices {'9' * 5000}", "among 0 to 7"),
        ("plan dgx-1v --without-link 0-5", "there is no such link.\n  given: cuda:0 - cuda:5\n  try:   links out of"),
        ("plan dgx-1v --without-link 0-3 --without-link 3-0", "there is no such link."),
        ("plan dgx-1v --without-link 0", "--without-link takes two positions such as 0-3, or two names"),
        ("plan dgx-1v --without-link 0-1-2", "--without-link takes two positions"),
        ("plan dgx-1v --without-link 0,1,2", "--without-link takes two positions"),
        ("plan dgx-1v --without-link cuda:0-cuda:3", "--without-link takes two positions"),
        ("plan dgx-1v --without-link 0,nvswitch", '--without-link: there is no "nvswitch" among'),
        ("plan dgx-1v --root 8", '--root: there is no "8" among 0 to 7'),
        ("plan dgx-1v --root 3 --devices 0,1", "the root must be a device of the topology."),
        ("plan dgx-1v --root 3 --algorithm ring", "ring reduces on no root."),
        ("plan dgx-1v --root 3 --collective all_gather", "all_gather has no root."),
        ("plan dgx-1v --packs 0", "--packs must be 1 or more, not 0."),
        ("plan dgx-1v --nbytes 1T", "--nbytes takes bytes such as 8, 64K or 128M"),
        ("plan dgx-1v --collective gather", '--collective must be one of all_reduce, reduce, broadcast'),
        ("plan dgx-1v --algorithm best", '--algorithm must be one of one_device'),
        ("plan dgx-1v --picture a.pdf", "--picture takes a .svg or .png file, not a.pdf."),
        ("topology dgx-1v --picture a.pdf", "--picture takes a .svg or .png file, not a.pdf."),
        ("topology dgx-1v --export a.xml", "--export takes a .json file, not a.xml."),
        ("plan dgx-1v --export a.yaml", "--export takes a file that ends in .xml, .trace.json, .json, or a --format"),
        ("plan dgx-1v --export a.xml --format yaml", "--format must be one of msccl, mscclpp, nccl-graph, schedule"),
        ("plan dgx-1v --format msccl", "--format is of a file: name it with --export."),
        ("plan dgx-1v --picture no/a.svg", "--picture no/a.svg cannot be written: No such file or directory."),
        ("plan dgx-1v --export file/a.xml", "--export file/a.xml cannot be written: Not a directory."),
        ("plan dgx-1v --export /dev/null --format trace", "--export /dev/null cannot be written: it is no regular"),
        ("topology dgx-1v --export no/a.json", "--export no/a.json cannot be written: No such file or directory."),
        ("plan dgx-1v --devices 0,5", "needs a way from cuda:0 to cuda:5, and no link leads out of {cuda:0}."),
        (
            "plan dgx-1v --devices 0,1,4,5 --without-link 0-4 --without-link 1-5 --picture a.svg --export a.xml",
            "needs a way from cuda:0 to cuda:4, cuda:5, and no link leads out of {cuda:0, cuda:1}.",
        ),
        ("plan dgx-1v --algorithm direct --format nccl-graph --export a --picture a.svg", "an NCCL graph has rings"),
        ("plan dgx-1v --devices 0 --export a.xml", "one device has nobody to send to."),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(crossreduce, tmp_path, monkeypatch, line, words):
    """A request that is wrong exits with 2 and says why, with no output, no traceback and no file."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert error.startswith("crossreduce: ")
    assert words in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("line", ["plan", "verify", "plan dgx-1v --steep", "topology dgx-1v --hosts two"])
def test_what_is_no_command_line_is_refused(crossreduce, line):
    """A missing argument, an unknown option and a broken number exit with 2."""
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert "Usage: crossreduce" in error


@pytest.mark.parametrize("command", ["plan", "topology"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")])
def test_a_failed_run_leaves_files_as_they_were(crossreduce, tmp_path, monkeypatch, command, fault):
    """Whatever happens before the last file is whole leaves all earlier files untouched, and nothing beside them."""

    def fail(*args, **options):
        raise fault

    picture, export = tmp_path / "a.svg", tmp_path / "a.json"
    for path in (picture, export):
        path.write_text("earlier")
    last = (
        "crossreduce.export.pictures.draw_schedule"
        if command == "plan"
        else "crossreduce.cli.topology.Topology.to_json"
    )
    monkeypatch.setattr(last, fail)
    code, out, _ = crossreduce(command, "dgx-1v", "--export", export, "--picture", picture)
    assert (code, out) == (130 if isinstance(fault, KeyboardInterrupt) else 2, "")
    assert sorted(tmp_path.iterdir()) == [export, picture]
    assert [path.read_text() for path in (picture, export)] == ["earlier"] * 2


def test_a_file_is_replaced_whole(printed, tmp_path):
    """A reader that holds the earlier file goes on reading that one; a link to it goes on being a link."""
    path, link = tmp_path / "a.bin", tmp_path / "a.svg"
    path.write_text("earlier")
    link.symlink_to(path)
    with path.open() as reader:
        printed("topology", "dgx-1v", "--picture", link)
        assert reader.read() == "earlier"
    assert link.is_symlink()
    assert path.read_bytes().startswith(b"<?xml")
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_without_matplotlib_pictures_name_the_extra(crossreduce, tmp_path, monkeypatch):
    """Where matplotlib is not installed, --picture says what to install, and the export is not written either."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = ["plan", "dgx-1v", "--picture", tmp_path / "a.svg", "--export", tmp_path / "a.xml"]
    code, out, error = crossreduce(*line)
    assert (code, out) == (2, "")
    assert "pip install 'crossreduce[plot]'" in error
    assert list(tmp_path.iterdir()) == []


# ---- verify


def forms():
    """Yield good files: MSCCL XML of ours and of others, and our schedules."""
    yield "foreign.xml", FOREIGN, "allgather, out of place: right."
    for algorithm in ("ring", "forest"):
        schedule = cr.plan(DGX.subset(DGX.devices[:4]), algorithm=algorithm).schedule
        yield f"{algorithm}.xml", to_msccl_xml(schedule), "allreduce, in place and out of place: right."
        yield f"{algorithm}.json", schedule.to_json(), f"{schedule.head}: right."


@pytest.mark.parametrize(("name", "text", "words"), list(forms()), ids=lambda value: str(value)[:12])
def test_a_right_file_is_proved(printed, tmp_path, name, text, words):
    """A file that is right exits with 0 and says what was proved, whoever wrote it, byte order mark or not."""
    path = tmp_path / name
    path.write_text(text)
    assert printed("verify", path).startswith(words)
    path.write_text("\ufeff" + text, "utf-8")
    assert printed("verify", path).startswith(words)


WRONG = {
    "a copy is left out": (FOREIGN.replace('type="cpy"', 'type="nop"', 1), "was never written"),
    "a chunk lands elsewhere": (FOREIGN.replace('dstoff="1" cnt', 'dstoff="0" cnt', 1), "a race"),
    "nobody sends": (FOREIGN.replace('type="s"', 'type="nop"', 1), "sends 0 times to gpu 1"),
    "outside of the buffer": (FOREIGN.replace('srcoff="0"', 'srcoff="9"', 1), "chunks 9 to 9 of the input buffer"),
    "a device gets nothing": (
        '{"format":"crossreduce.schedule/1","collective":"broadcast","algorithm":"x","devices":["cpu:0","cpu:1"],'
        '"chunks":[["1",[0],[0,1]]],"rounds":[],"pieces":1}',
        "cpu:1",
    ),
    "a part is counted twice": (
        '{"format":"crossreduce.schedule/1","collective":"reduce","algorithm":"x","devices":["cpu:0","cpu:1"],'
        '"chunks":[["1",[0,1],[0]]],"rounds":[[[0,0,[0,1]]],[[0,0,[0,1]]]],"pieces":1}',
        "the contribution of device cpu:1 a second time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_refuted(crossreduce, tmp_path, fault):
    """A file that can be read and is wrong exits with 1, and the fault is on stderr."""
    text, words = WRONG[fault]
    path = tmp_path / "a.file"
    path.write_text(text)
    code, out, error = crossreduce("verify", path)
    assert (code, out) == (1, "")
    assert error.startswith(f"crossreduce: {path} is wrong: ")
    assert words in error


BOMB = '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><algo name="&b;"/>'
UNREADABLE = {
    "empty": b"",
    "blank": b" \n\t ",
    "binary": b"\x89PNG\x00\xff",
    "text": b"all is well",
    "entities": BOMB.encode(),
    "another file": b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><algo/>',
    "deep XML": b"<algo>" * 100_000,
    "deep JSON": b'{"a":' * 100_000,
    "a huge number": FOREIGN.replace('ngpus="2"', 'ngpus="99999999999999999"').encode(),
    "NCCL's": b'<system version="1"><cpu numaid="0"/></system>',
    "a topology": DGX.to_json().encode(),
    "another collective": FOREIGN.replace("allgather", "custom").encode(),
    "a number of 10**6 digits": b'{"format":"crossreduce.schedule/1","pieces":' + b"9" * 10**6 + b"}",
    "two roots": (FOREIGN + FOREIGN).encode(),
    "UTF-16": FOREIGN.encode("utf-16"),
    "too long": b"<" + b" " * (1 << 26),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_file_that_cannot_be_read_is_no_proof(crossreduce, tmp_path, fault):
    """What is neither right nor wrong, because it is no schedule, exits with 2 and is named."""
    path = tmp_path / "a.xml"
    path.write_bytes(UNREADABLE[fault])
    code, out, error = crossreduce("verify", path)
    assert (code, out) == (2, "")
    assert error.startswith(f"crossreduce: {path}")
    assert len(error) < 2000


@pytest.mark.parametrize(("name", "text", "_"), list(forms()), ids=lambda value: str(value)[:12])
def test_a_file_that_is_cut_short_is_no_proof(crossreduce, tmp_path, name, text, _):
    """Cut short anywhere, no file is proved, or even called wrong."""
    path = tmp_path / name
    for end in range(0, len(text.rstrip()), len(text) // 12):
        path.write_text(text[:end])
        assert crossreduce("verify", path)[:2] == (2, ""), end


def test_what_is_no_file_cannot_be_verified(crossreduce, tmp_path):
    """A folder and a file that is not there exit with 2."""
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file or directory")):
        assert crossreduce("verify", path) == (2, "", f"crossreduce: {path} cannot be read: {words}.\n")


# ---- bench


def test_all_algorithms_are_all_planners():
    """ "all" is every algorithm that is a planner of its own, the forest included."""
    assert read_algorithms("-A", "all") == [name for name in ALGORITHMS if name not in ("auto", "nccl")]
    assert "forest" in read_algorithms("-A", "all")


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_bench_plans_on_a_topology(printed, tmp_path, monkeypatch, collective):
    """Every algorithm runs on a machine's wiring without a wrong element, on as many devices as it has."""
    used = set()

    class Ops(cr.AllReduceCrossDeviceOps):
        def __init__(self, *args, topology):
            used.add(topology)
            super().__init__(*args, topology=topology)

    monkeypatch.setattr("crossreduce.cli.bench.AllReduceCrossDeviceOps", Ops)
    path = tmp_path / "bench.json"
    small = ["-b", 600, "-e", 600, "-n", 1, "-w", 0, "-A", "all", "--collective", collective, "-J", path]
    out = printed("bench", "--topology", "ncv4", *small)
    report = json.loads(path.read_text())
    assert used == {cr.Topology.machine("ncv4").renamed([f"cpu:{k}" for k in range(4)])}
    assert "\n# Planned on the topology: ncv4\n" in out
    assert report["crossreduce"]["topology"] == "ncv4"
    assert [row["algorithm"] for row in report["results"]] == read_algorithms("-A", "all")
    assert {row["out_of_place"]["nwrong"] for row in report["results"]} == {0}
    assert len(report["devices"]) == 4


def test_bench_takes_the_first_devices_of_a_topology(printed, crossreduce, tmp_path):
    """Fewer devices than the topology has are its first ones; more are refused, and so are devices without a way."""
    small = ["bench", "-b", 8, "-e", 8, "-n", 1, "--topology"]
    assert "device  2 [cpu:2]" in printed(*small, "dgx-1v", "-g", 3)
    code, out, error = crossreduce(*small, "dgx-1v", "-g", 9)
    assert (code, out, error) == (2, "", "crossreduce: --devices: the topology has 8, and not 9.\n")
    path = tmp_path / "apart.json"
    path.write_text(DGX.subset(["cuda:0", "cuda:5"]).to_json())
    code, _, error = crossreduce(*small, path)
    assert code == 2
    assert "needs a way from cpu:0 to cpu:1, and no link leads out of {cpu:0}." in error


def test_bench_leads_through_devices_of_the_same_names(printed, tmp_path):
    """Where the names are the topology's own, the others stay in it: data may go through them."""
    path = tmp_path / "line.json"
    line = cr.Topology.mesh(1, 3)
    path.write_text(cr.Topology(("cpu:0", "cpu:2", "cpu:1"), line.links).to_json())
    assert "# Out of bounds values : 0 OK" in printed(
        "bench", "-b", 8, "-e", 8, "-n", 1, "--topology", path, "-g", "cpu:0,cpu:2"
    )


# ---- words


@given(st.data())
def test_a_node_is_named_or_numbered(data):
    """Every node is found by its position and by its name, every link by either of both its ends."""
    topology = cr.Topology.machine(data.draw(st.sampled_from(["dgx-1v", "pcie-8", "mi100", "ncv4"])))
    link = data.draw(st.sampled_from(topology.links))

    def spelled(node):
        return data.draw(st.sampled_from([node, f" {node} ", str(topology.nodes.index(node))]))

    assert read_node("-x", spelled(link.src), topology) == link.src
    assert read_link("-x", f"{spelled(link.src)},{spelled(link.dst)}", topology) == (link.src, link.dst)
    a, b = (topology.nodes.index(node) for node in (link.src, link.dst))
    assert read_link("-x", f"{a}-{b}", topology) == (link.src, link.dst)
    devices = data.draw(st.permutations(topology.devices))
    assert read_members("-x", ",".join(map(spelled, devices)), topology) == tuple(devices)


# ---- in a process of its own


def run(*args, code="from crossreduce.cli import main; main(sys.argv[1:])", **options):
    """Run a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", *map(str, args)], check=False, timeout=100, **options
    )


def test_planning_loads_no_framework(tmp_path):
    """Planning, bounds and verifying load no array framework but NumPy, no matplotlib, and write no escape codes."""
    path = tmp_path / "a.xml"
    code = (
        "from crossreduce.cli import main\n"
        "for line in (['topology', 'dgx-1v'], ['plan', 'dgx-1v', '--export', sys.argv[1]], ['verify', sys.argv[1]]):\n"
        "    try: main(line)\n"
        "    except SystemExit as stopped: assert not stopped.code, (line, stopped.code)\n"
        "print(sorted({'torch', 'jax', 'tensorflow', 'sklearn', 'matplotlib', 'pynvml'} & set(sys.modules)))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    ran = run(path, code=code, capture_output=True, text=True, env=environment | {"TERM": "xterm-256color"})
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith(
        "right.\n  8 GPUs, 1 channels, 48 chunks, 8 threadblocks a GPU, 1344 steps, Simple\n[]\n"
    )
    assert "\x1b" not in ran.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_progress_is_shown_on_a_terminal_only(tmp_path):
    """On a terminal stderr shows what is being done, without colours if NO_COLOR is set; stdout is pure JSON."""
    import pty

    here, there = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"}
    ran = run("plan", "dgx-1v", "--json", stdout=subprocess.PIPE, stderr=there, env=environment)
    os.close(there)
    shown = os.read(here, 1 << 16).decode()
    os.close(here)
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["machine"] == "dgx-1v"
    assert "planning" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)
