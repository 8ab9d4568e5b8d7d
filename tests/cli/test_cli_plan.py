"""``crossreduce plan`` and ``export``: explanations, files, pictures, and requests that cannot be planned."""

import json
import os
import sys

import pytest
from command_line import plan_shown

import crossreduce as cr
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.export.formats.nccl_graph import to_nccl_graph_xml
from crossreduce.export.formats.trace import to_chrome_trace
from crossreduce.planning.explain import shape, wrapped
from crossreduce.planning.optimal.bounds.tight_cuts import heaviest_cuts

DGX = cr.Topology.machine("dgx-1v")

PLANS = {
    "dgx-1v": lambda: cr.plan(DGX),
    "dgx-1v --nbytes 8 --algorithm ring": lambda: cr.plan(DGX, nbytes=8, algorithm="ring"),
    "dgx-1v --collective all_gather --nbytes 1.5G": lambda: cr.plan(DGX, "all_gather", 3 << 29),
    "dgx-1v --collective broadcast --root 3": lambda: cr.plan(DGX, "broadcast", root="cuda:3"),
    "dgx-1v --collective reduce --root GPU:5 --devices 5-6,4": lambda: cr.plan(
        DGX.subset([5, 6, 4]), "reduce", root="cuda:5"
    ),
    "dgx-1v --algorithm one_device --packs 3 --without-link 0-3": lambda: cr.plan(
        DGX.without_link("cuda:0", "cuda:3"), algorithm="one_device", packs=3
    ),
    "hgx-h100 --hosts 2 --in-network --nbytes 1M --algorithm ring": lambda: cr.plan(
        cr.Topology.machine("hgx-h100", 2, in_network=True), nbytes=1 << 20, algorithm="ring"
    ),
    "dgx-1v --devices 6": lambda: cr.plan(DGX.subset([6])),
    "dgx-1v --nbytes 0": lambda: cr.plan(DGX, nbytes=0),
}


@pytest.mark.parametrize("line", PLANS)
def test_a_plan_is_that_of_the_library(printed, line):
    """Text, JSON and steps are those of ``cr.plan`` with the same options."""
    plan = PLANS[line]()
    assert printed("plan", *line.split()) == plan_shown(plan, f"plan {line}")
    assert printed("plan", *line.split(), "--steps") == plan_shown(plan, f"plan {line} --steps") + f"{plan.schedule}\n"
    report = json.loads(printed("plan", *line.split(), "--json", "--steps"))
    assert cr.Schedule.from_json(json.dumps(report.pop("schedule"))) == plan.schedule
    assert report == json.loads(printed("plan", *line.split(), "--json"))
    assert (report["algorithm"], report["seconds"]) == (plan.algorithm, plan.seconds)
    assert report["algbw_gb_per_s"] == plan.algbw
    assert report["ratio"] == {"exact": str(plan.ratio), "value": float(plan.ratio)}
    for entry, rate in ((report["rate"], plan.rate), (report["bound"]["algbw"], plan.bound.algbw)):
        assert entry == (None if rate is None else {"exact": str(rate), "gb_per_s": float(rate)})
    assert set(report["bound"]["tight_cut"]) == next((cut.nodes for cut in heaviest_cuts(plan.bound)), set())
    found = shape(plan.schedule)
    assert (report["depth"], report["roots"]) == (found.depth, list(found.roots))
    assert (report["rounds"], report["pieces"]) == (plan.schedule.round_count, plan.schedule.pieces)
    others = {name: seconds for name, (seconds, _) in plan.others().items()}
    assert {name: entry["seconds"] for name, entry in report["others"].items()} == others


@pytest.mark.parametrize(
    ("file", "options", "written"),
    [
        ("a.xml", "", lambda plan: to_msccl_xml(plan.schedule, plan.topology, 4096)),
        ("a.JSON", "", lambda plan: plan.schedule.to_json()),
        ("a.trace.json", "", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
        ("a.json", "--format mscclpp", lambda plan: to_mscclpp_json(plan.schedule)),
        ("a.xml", "--format nccl-graph", lambda plan: to_nccl_graph_xml(plan.schedule, plan.topology)),
        ("a.txt", "--format schedule", lambda plan: plan.schedule.to_json()),
        ("a.xml", "--format trace", lambda plan: to_chrome_trace(plan.schedule, plan.topology, 4096)),
    ],
)
def test_an_export_is_that_of_the_library(printed, tmp_path, file, options, written):
    """A file has the text that the library writes in the format of --format, or else of the file's suffix."""
    by_rank = "mscclpp" in options or (file, options) == ("a.xml", "")  # MSCCL and MSCCL++ number the ranks
    # Other programs run the plans of these files: they queue no operations.
    plan_options = {"operation_s": 0 if by_rank or "nccl" in options else None, "granularity": 0.02 if by_rank else 0.0}
    plan = cr.plan(DGX, nbytes=4096, algorithm="ring", **plan_options)
    line = ["export", "dgx-1v", tmp_path / file, "--nbytes", 4096, "--algorithm", "ring", *options.split()]
    units = plan.schedule.units
    fit = f"bytes is a multiple of {16 * units}" if options else f"elements is a multiple of {units}"
    notes = "  ranks     0 cuda:0, 1 cuda:1, 2 cuda:2, 3 cuda:3, 4 cuda:4, 5 cuda:5, 6 cuda:6, 7 cuda:7\n"
    notes += f"  sizes     messages whose number of {fit}\n"
    runners = {"a_register_mscclpp.py", "a_measure.py"} if "mscclpp" in options else set()
    notes += "  runners   a_register_mscclpp.py, a_measure.py\n" if runners else ""
    notes = notes if by_rank else ""
    shown = plan_shown(plan, " ".join(map(str, line))) + wrapped(notes.splitlines(), 80) + "\n" * by_rank
    assert printed(*line) == f"{shown}{tmp_path / file}: written\n"
    assert (tmp_path / file).read_text() == written(plan)
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / file).stat().st_mode & 0o777 == 0o666 & ~mask
    maps = {f"{file}.ranks.json"} if by_rank else set()
    assert {path.name for path in tmp_path.iterdir()} == {file} | maps | runners


def test_switches_have_no_rank(printed, tmp_path):
    """The map of ranks of a plan in which a switch adds has the GPUs of the file, and not the switch."""
    file = tmp_path / "a.json"
    out = printed("export", "hgx-h100", file, "--in-network", "--format", "mscclpp")
    gpus = [f"cuda:{k}" for k in range(8)]
    assert "6 cuda:6, 7 cuda:7" in " ".join(out.split())
    assert json.loads(file.with_name("a.json.ranks.json").read_text())["ranks"] == gpus
    assert len(json.loads(file.read_text())["gpus"]) == len(gpus)


def test_a_plan_that_does_not_fit_the_format_is_replaced(printed, crossreduce, tmp_path):
    """With "auto" the fastest plan that fits the format is exported. A named one that does not fit is an error."""
    file = tmp_path / "a.xml"
    line = ["export", "hgx-h100", file, "--nbytes", "256M", "--format", "nccl-graph"]
    out = printed(*line)
    assert out.startswith("all_reduce of 256 MiB by ring on 8 devices")
    assert "\n  format    the plan of direct is faster, but does not fit: " in out
    assert file.read_text().startswith("<graphs")
    code, out, error = crossreduce(*map(str, line), "--algorithm", "direct")
    assert (code, out) == (2, "")
    assert "can only have rings" in error


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG")])
def test_pictures(printed, tmp_path, name, start):
    """``topology --picture`` draws the topology, and ``export`` the schedule. No other file is created."""
    file, part = tmp_path / name, ["dgx-1v", "--devices", "0,1,2,3", "--algorithm", "one_device"]
    export, part_plan = ["export", *part, file], cr.plan(DGX.subset([0, 1, 2, 3]), algorithm="one_device")
    for text, line, title in (
        (printed("topology", "dgx-1v"), ["topology", "dgx-1v", "--picture", file], b"8 V100 in a hybrid cube mesh"),
        (plan_shown(part_plan, " ".join(map(str, export))), export, b"all_reduce one_device: 4 devices"),
    ):
        assert printed(*line) == f"{text}{file}: open it in a browser\n"
        json.loads(printed(*line, "--json"))
        assert list(tmp_path.iterdir()) == [file]
        assert file.read_bytes().startswith(start)
        assert title in file.read_bytes()


IMPOSSIBLE = [
    ("plan dgx1vv", "there is no machine of this name."),
    ("topology nope.json", "nope.json cannot be read: No such file or directory."),
    ("topology --hosts 2", "all options except --json require a machine such as dgx-1v, or a file."),
    ("topology pcie-8 --hosts 2 --nics foo", "pcie-8 has no such network."),
    ("topology dgx-1v --speeds fast", '--speeds must be one of raw, effective, not "fast".'),
    ("topology this --in-network", "--in-network can only be used with a machine of the library, not with this."),
    ("export dgx-1v a.xml --copies 2 --path NVL", "--path, --copies can only be used with --format nccl-graph."),
    ("export dgx-1v a.csv --format nccl-tuner --copies 2", "--copies can only be used with --format nccl-graph."),
    ("topology box.json --in-network", "can only be used with a machine of the library, not with box.json."),
    ("plan dgx-1v --gpu v100 --pcie 4", "--gpu, --pcie can only be used with a table of GPUs in a file, not with dgx"),
    ("plan dgx-1v --devices 0,8", '--devices: "8" is not one of the numbers 0 to 7 or the names cuda:0-7.'),
    ("plan pcie-8 --devices 0,plx0", "--devices must only list devices, but plx0 is a switch."),
    (f"plan dgx-1v --devices {'9' * 5000}", "is not one of the numbers 0 to 7"),
    ("plan dgx-1v --without-link 0-5", "there is no such link.\n  given: cuda:0 - cuda:5\n  try:   links out of"),
    ("plan dgx-1v --nbytes 1T", "--nbytes must be a number of bytes such as 8, 64K or 128M"),
    ("topology dgx-1v --picture a.pdf", "--picture must be a .svg or .png file, not a.pdf."),
    ("topology dgx-1v --export a.xml", "--export must be a .json file, not a.xml."),
    ("export dgx-1v a.yaml", "a.yaml must end in .xml, .json, .trace.json, .html, .svg, .png, or --format must be"),
    ("export dgx-1v a.xml --format yaml", "--format must be one of chakra, msccl, mscclpp, nccl-graph,"),
    ("export dgx-1v . --format msccl", "FILE . is a folder: name a file in it."),
    ("export dgx-1v no/a.svg", "FILE no/a.svg cannot be written: there is no folder /"),
    ("export dgx-1v /dev/null --format trace", "FILE /dev/null cannot be written: it is not a regular"),
    (f"export dgx-1v {'a' * 250}.svg", ".svg cannot be written: File name too long."),  # with .NAME.HEX.svg, not alone
    ("export dgx-1v a.xml --devices 0,1,4,5 --without-link 0-4 --without-link 1-5",
     "needs a route from cuda:0 to cuda:4, cuda:5, but no link leads out of {cuda:0, cuda:1}."),
]  # fmt: skip


def test_an_impossible_request_is_rejected(crossreduce, tmp_path, monkeypatch):
    """An impossible request exits with 2 and an error, without output, traceback or file."""
    monkeypatch.chdir(tmp_path)
    for line, words in IMPOSSIBLE:
        code, out, error = crossreduce(*line.split())
        assert (code, out) == (2, ""), line
        assert error.startswith("crossreduce: ")
        assert words in error
        assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_only_the_picture_is_missing(crossreduce, tmp_path, monkeypatch):
    """Without matplotlib a command prints its text and writes its other file, and then an error names the extra."""
    line = ["topology", "dgx-1v", "--export", tmp_path / "a.json"]
    _, text, _ = crossreduce(*line)
    data = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needed = "crossreduce: pictures need matplotlib.  try: pip install matplotlib\n"
    assert crossreduce(*line, "--picture", tmp_path / "a.svg") == (2, text, needed)
    assert crossreduce("export", "dgx-1v", tmp_path / "a.svg")[::2] == (2, needed)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == data
