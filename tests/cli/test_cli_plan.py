"""``crossreduce plan`` and ``export``: explanations, files, pictures, and requests that cannot be planned."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_line import run_python

import crossreduce as cr
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.export.formats.nccl_graph import to_nccl_graph_xml
from crossreduce.export.formats.trace import to_chrome_trace
from crossreduce.planning.explain import shape
from crossreduce.planning.granularity import is_power_of_two

DGX = cr.Topology.machine("dgx-1v")


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
            "dgx-1v --collective reduce --root GPU:5 --devices 5-6,4",
            DGX.subset(["cuda:5", "cuda:6", "cuda:4"]),
            {"collective": "reduce", "root": "cuda:5"},
        ),
        (
            "dgx-1v --algorithm one_device --packs 3 --without-link 0-3",
            DGX.without_link("cuda:0", "cuda:3"),
            {"algorithm": "one_device", "packs": 3},
        ),
        (
            "hgx-h100 --hosts 2 --in-network --nbytes 1M --algorithm ring",
            cr.Topology.machine("hgx-h100", 2, in_network=True),
            {"nbytes": 1 << 20, "algorithm": "ring"},
        ),
        ("ncv4 --algorithm forest", cr.Topology.machine("ncv4"), {"algorithm": "forest"}),
        ("dgx-1v --devices 6", DGX.subset(["cuda:6"]), {}),
        ("dgx-1v --nbytes 0", DGX, {"nbytes": 0}),
    ],
)
def test_a_plan_is_that_of_the_library(printed, line, machine, options):
    """Text, JSON and steps are those of ``cr.plan`` with the same options."""
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
    assert (report["rounds"], report["pieces"]) == (plan.schedule.round_count, plan.schedule.pieces)
    assert {name: entry["seconds"] for name, entry in report["others"].items()} == {
        name: seconds for name, (seconds, _) in plan.others().items()
    }


@pytest.mark.parametrize(
    ("file", "options", "written"),
    [
        ("a.xml", "", lambda plan: to_msccl_xml(plan.schedule, plan.topology, 4096)),
        ("a.json", "", lambda plan: plan.schedule.to_json()),
        ("a.JSON", "", lambda plan: plan.schedule.to_json()),
        ("a.trace.json", "", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
        ("a.json", "--format mscclpp", lambda plan: to_mscclpp_json(plan.schedule)),
        ("a.xml", "--format nccl-graph", lambda plan: to_nccl_graph_xml(plan.schedule, plan.topology)),
        ("a.txt", "--format schedule", lambda plan: plan.schedule.to_json()),
        ("a.xml", "--format trace", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
        ("a", "--format msccl", lambda plan: to_msccl_xml(plan.schedule, plan.topology, 4096)),
    ],
)
def test_an_export_is_that_of_the_library(printed, tmp_path, file, options, written):
    """The file's format is the given one or that of its suffix; the text is the library's."""
    elsewhere = "trace" not in file + options and "json" not in file.lower() and "schedule" not in options
    elsewhere = elsewhere or "mscclpp" in options  # other programs run the plan: they queue no operations
    by_rank = "msccl" in options or (file, options) == ("a.xml", "")
    options_of_files = {"operation_s": 0 if elsewhere else None, "granularity": 0.02 if by_rank else 0.0}
    plan = cr.plan(DGX, nbytes=4096, algorithm="ring", **options_of_files)
    line = ["export", "dgx-1v", tmp_path / file, "--nbytes", 4096, "--algorithm", "ring", *options.split()]
    ranks = "  ranks     0 cuda:0, 1 cuda:1, 2 cuda:2, 3 cuda:3, 4 cuda:4, 5 cuda:5, 6 cuda:6, 7 cuda:7\n"
    units = plan.schedule.units
    fit = f"bytes is a multiple of {16 * units}" if "mscclpp" in options else f"elements is a multiple of {units}"
    sizes = f"  sizes     messages whose number of {fit}\n"
    assert printed(*line) == plan.explain() + "\n" + (ranks + sizes if by_rank else "")
    assert (tmp_path / file).read_text() == written(plan)
    assert (tmp_path / file).stat().st_mode & 0o777 == 0o666 & ~umask()
    assert {path.name for path in tmp_path.iterdir()} == {file} | ({f"{file}.ranks.json"} if by_rank else set())


def test_a_plan_that_does_not_fit_the_format_is_replaced(printed, crossreduce, tmp_path):
    """With "auto" the fastest plan that the format can hold is exported and explained; a named algorithm is refused."""
    file = tmp_path / "a.xml"
    line = ["export", "hgx-h100", file, "--nbytes", "256M", "--format", "nccl-graph"]
    out = printed(*line)
    assert out.startswith("all_reduce of 256 MiB by ring on 8 devices")
    assert "\n  format    the plan of direct is faster, but does not fit: " in out
    assert file.read_text().startswith("<graphs")
    code, out, error = crossreduce(*map(str, line), "--algorithm", "direct")
    assert (code, out) == (2, "")
    assert "can only have rings" in error


@pytest.mark.parametrize(
    ("command", "name", "start", "words"),
    [
        ("topology", "a.svg", b"<?xml", b"8 V100 in a hybrid cube mesh of NVLink 2"),
        ("topology", "a.PNG", b"\x89PNG", b"8 V100 in a hybrid cube mesh of NVLink 2"),
        ("export", "a.SVG", b"<?xml", b"all_reduce one_device: 4 devices"),
    ],
)
def test_pictures(printed, tmp_path, command, name, start, words):
    """A picture shows the topology, or the schedule on it; no other file is created."""
    selected = ["dgx-1v", "--devices", "0,1,2,3", "--algorithm", "one_device"] if command == "export" else ["dgx-1v"]
    text = printed("plan" if command == "export" else command, *selected)
    line = [command, *selected, *(["--picture"] if command == "topology" else []), tmp_path / name]
    assert printed(*line) == f"{text}{tmp_path / name}: open it in a browser\n"
    json.loads(printed(*line, "--json"))
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(start)
    assert words in picture


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("topology dgx1vv", "there is no machine of this name.\n  given: 'dgx1vv' (str)\n  try:   dgx-1v,"),
        ("plan dgx1vv", "there is no machine of this name."),
        ("topology nope.json", "nope.json cannot be read: No such file or directory."),
        ("plan ./", "./ cannot be read: Is a directory."),
        ("topology --hosts 2", "all options except --json require a machine such as dgx-1v, or a file."),
        ("topology dgx-1v --hosts 0", "--hosts must be 1 or more, not 0."),
        ("topology pcie-8 --hosts 2 --nics foo", "pcie-8 has no such network."),
        ("topology dgx-1v --speeds fast", '--speeds must be one of raw, effective, not "fast".'),
        ("topology this --in-network", "--in-network can only be used with a machine of the library, not with this."),
        ("plan box.json --hosts 2", "can only be used with a machine of the library, not with box.json."),
        ("plan dgx-1v --devices 0,8", '--devices: "8" is not one of the numbers 0 to 7 or the names cuda:0-7.'),
        ("plan dgx-1v --devices cuda:0,cuda:9", '--devices: "cuda:9" is not one of'),
        ("plan dgx-1v --devices 0,cuda:0", "list each device only once, but cuda:0 appears more than once."),
        ("plan pcie-8 --devices 0,plx0", "--devices must only list devices, but plx0 is a switch."),
        (f"plan dgx-1v --devices {'9' * 5000}", "is not one of the numbers 0 to 7"),
        ("plan dgx-1v --without-link 0-5", "there is no such link.\n  given: cuda:0 - cuda:5\n  try:   links out of"),
        ("plan dgx-1v --without-link 0-3 --without-link 3-0", "there is no such link."),
        ("plan dgx-1v --without-link 0", "--without-link must be two numbers such as 0-3, or two names"),
        ("plan dgx-1v --without-link cuda:0-cuda:3", "--without-link must be two numbers"),
        ("plan dgx-1v --without-link 0,nvswitch", '--without-link: "nvswitch" is not one of'),
        ("plan dgx-1v --root 8", '--root: "8" is not one of the numbers 0 to 7'),
        ("plan dgx-1v --root 3 --devices 0,1", "the root must be a device of the topology."),
        ("plan dgx-1v --root 3 --algorithm ring", "ring does not reduce on a root."),
        ("plan dgx-1v --root 3 --collective all_gather", "all_gather has no root."),
        ("plan dgx-1v --packs 0", "--packs must be 1 or more, not 0."),
        ("plan dgx-1v --nbytes 1T", "--nbytes must be a number of bytes such as 8, 64K or 128M"),
        ("plan dgx-1v --collective gather", '--collective must be one of all_reduce, reduce, broadcast'),
        ("plan dgx-1v --algorithm best", '--algorithm must be one of one_device'),
        ("topology dgx-1v --picture a.pdf", "--picture must be a .svg or .png file, not a.pdf."),
        ("topology dgx-1v --export a.xml", "--export must be a .json file, not a.xml."),
        ("export dgx-1v a.yaml", "a.yaml must end in .xml, .json, .trace.json, .html, .svg, .png, or --format must be"),
        ("export dgx-1v a.xml --format yaml", "--format must be one of chakra, msccl, mscclpp, nccl-graph,"),
        ("export dgx-1v . --format msccl", "FILE . is a folder: name a file in it."),
        ("export dgx-1v no/a.svg", "FILE no/a.svg cannot be written: there is no folder /"),
        ("export dgx-1v /dev/null --format trace", "FILE /dev/null cannot be written: it is not a regular"),
        ("plan dgx-1v --devices 0,6", "try:   topology.subset(devices), or --devices on the command line, with "
         "connected devices; or a topology with the missing links"),
        ("export dgx-1v a.xml --devices 0,1,4,5 --without-link 0-4 --without-link 1-5", "needs a route from cuda:0 to "
         "cuda:4, cuda:5, but no link leads out of {cuda:0, cuda:1}."),
        ("export dgx-1v a --algorithm direct --format nccl-graph", "can only have rings"),
        ("export dgx-1v a.xml --devices 0", "a collective of one device has no transfers."),
    ],
)  # fmt: skip
def test_an_impossible_request_is_rejected(crossreduce, tmp_path, monkeypatch, line, words):
    """An impossible request exits with 2 and an error, without output, traceback or file."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert error.startswith("crossreduce: ")
    assert words in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_without_matplotlib_only_the_picture_is_missing(crossreduce, tmp_path, monkeypatch):
    """Without matplotlib the text and the file come as always, and then one line that names the extra."""
    line = ["topology", "dgx-1v", "--export", tmp_path / "a.json"]
    _, text, _ = crossreduce(*line)
    data = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needed = "crossreduce: pictures need matplotlib.  try: pip install 'crossreduce[plot]'\n"
    assert crossreduce(*line, "--picture", tmp_path / "a.svg") == (2, text, needed)
    assert crossreduce("export", "dgx-1v", tmp_path / "a.svg")[::2] == (2, needed)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == data


def test_planning_loads_no_framework(tmp_path):
    """topology, export and verify import no framework except NumPy, no matplotlib, and print no escape codes."""
    code = (
        "import sys\n"
        "from crossreduce.cli import main\n"
        "for line in (['topology', 'dgx-1v'], ['export', 'dgx-1v', sys.argv[1]], ['verify', sys.argv[1]]):\n"
        "    try: main(line)\n"
        "    except SystemExit as stopped: assert not stopped.code, (line, stopped.code)\n"
        "print(sorted({'torch', 'jax', 'tensorflow', 'sklearn', 'matplotlib', 'pynvml'} & set(sys.modules)))"
    )
    ran = run_python(code, tmp_path / "a.xml", TERM="xterm-256color", FORCE_COLOR="", TTY_COMPATIBLE="")
    assert (ran.returncode, ran.stderr) == (0, "")
    sizes = "messages whose number of elements is a multiple of"
    units = re.search(rf"steps, Simple\n  sizes: {sizes} ([0-9]+)\n\[\]\n\Z", ran.stdout)
    assert units is not None
    assert is_power_of_two(int(units[1]))
    assert "\x1b" not in ran.stdout
