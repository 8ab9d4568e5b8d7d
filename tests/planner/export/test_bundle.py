"""Bundles: the files of a collective for all sizes, the ranges of sizes, their proof, and invalid requests."""

import json
import math
from itertools import pairwise

import pytest

import crossreduce as cr
from crossreduce.export import bundle as bundles
from crossreduce.export.bundle import NO_LIMIT, SIZES, bundle
from crossreduce.export.formats.msccl.format import read_msccl_xml
from crossreduce.export.formats.mscclpp import verify_mscclpp_json
from crossreduce.export.formats.mscclpp.verifier import instructions
from crossreduce.planning.granularity import is_power_of_two
from crossreduce.schedule import pipelined

NCV4 = cr.Topology.machine("ncv4")
NO_QUEUES = cr.Costs(operation_s=0)


@pytest.fixture(scope="module", autouse=True)
def few_sizes():
    """Compare plans at every fifth size only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "SIZES", SIZES[::5])
        yield


@pytest.fixture(scope="module")
def small():
    return bundle(NCV4, machine="ncv4")


def test_each_size_has_one_file(small):
    """The ranges of a format cover all sizes from 0 on without gaps. Each file stores the limits of its range. For no
    limit, MSCCL's files have 0, and MSCCL++'s files the greatest number."""
    entries = json.loads(small.files["ranks.json"])["files"]
    runners = {"register_mscclpp.py", "measure.py"}
    assert small.files.keys() == {"README.md", "ranks.json", *runners, *(entry["file"] for entry in entries)}
    for name, windows in small.windows.items():
        assert windows[0].least_bytes == 0
        assert windows[-1].most_bytes == 0 or windows[-1].most_bytes > 1 << 36
        assert len(windows) == len([entry for entry in entries if entry["format"] == name]) > 1
        assert all(before.most_bytes + 1 == after.least_bytes for before, after in pairwise(windows))
    for k, window in enumerate(small.windows["msccl"]):
        algo = read_msccl_xml(small.files[f"msccl/all_reduce_{k}.xml"])
        assert (algo.min_bytes, algo.max_bytes) == (window.least_bytes, window.most_bytes)
    for k, window in enumerate(small.windows["mscclpp"]):
        plan = json.loads(small.files[f"mscclpp/all_reduce_{k}.json"])
        assert plan["min_message_size"] == window.least_bytes
        assert plan["max_message_size"] == (window.most_bytes or NO_LIMIT)


@pytest.mark.parametrize(
    ("machine", "collective", "root"),
    [("ncv4", "all_reduce", None), pytest.param("dgx-1v", "broadcast", "cuda:7", marks=pytest.mark.slow)],
)
def test_the_plan_of_each_range_is_fast_at_all_its_sizes(monkeypatch, machine, collective, root):
    """At each power of two in its range, a plan takes at most 2 % longer than the best plan for this size. The costs of
    operation queues are left out."""
    monkeypatch.setattr(bundles, "SIZES", SIZES)
    topology = cr.Topology.machine(machine)
    made = bundle(topology, collective, root, formats=["msccl"])
    assert not made.left_out
    for window in made.windows["msccl"]:
        assert is_power_of_two(window.plan.schedule.units)
        nbytes = 1 << math.ceil(math.log2(max(window.least_bytes, SIZES[0])))
        while nbytes <= min(window.most_bytes or SIZES[-1], SIZES[-1]):
            best = cr.plan(topology, collective, nbytes, root=root, costs=NO_QUEUES, granularity=0.02)
            own = pipelined(window.plan.schedule, topology, nbytes, costs=NO_QUEUES)
            assert own.seconds <= best.seconds * 1.0201, nbytes
            nbytes *= 2


def test_ranks_are_in_the_order_of_the_topology():
    """Rank k is the k-th device of the topology, also if another one is the root. The README and ranks.json list the
    devices of the ranks, and the root."""
    made = bundle(NCV4, "broadcast", "cuda:2", formats=["msccl"], machine="my machine")
    about = json.loads(made.files["ranks.json"])
    assert (about["machine"], about["root"]) == ("my machine", "cuda:2")
    assert about["ranks"] == [f"cuda:{k}" for k in range(4)]
    for text in ("| 2 | cuda:2 |", "The root is cuda:2, rank 2.", "MSCCL_ALGO_DIR", " --nproc_per_node=4 "):
        assert text in made.files["README.md"]
    assert "mscclpp" not in about["files"][0]["file"]


def test_a_request_without_any_file_is_refused():
    """If no plan fits a format, the error has the reason."""
    with pytest.raises(cr.PlanError, match="no plan of this collective fits") as caught:
        bundle(NCV4.subset(["cuda:1"]))
    assert "a collective of one device has no transfers" in str(caught.value)


def test_the_command_line(small, printed, crossreduce, tmp_path):
    """``bundle`` writes the files of the function ``bundle`` into a new folder, and refuses a folder with files.
    ``verify`` proves the files, also if an editor has added a byte order mark to them."""
    folder = tmp_path / "made"
    text = printed("bundle", "ncv4", folder)
    assert f"all_reduce on ncv4: {len(list(folder.glob('*/*')))} files in {folder}" in text
    assert "ranks     0 cuda:0, 1 cuda:1, 2 cuda:2, 3 cuda:3" in text
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert written == small.files
    code, _, error = crossreduce("bundle", "ncv4", folder)
    assert (code, "it exists and is not an empty folder" in error) == (2, True)
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()} == written
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text(), "utf-8-sig")
    assert "files are right, each for its own sizes." in printed("verify", folder)


def test_assumed_speeds_are_named(printed, tmp_path):
    """The command, the README and ranks.json of a bundle, and the file of NCCL's tuner, name the speeds that a table of
    GPUs does not state. Without such speeds there is no line about them."""
    table = tmp_path / "box.txt"
    table.write_text("      GPU0 GPU1 GPU2\nGPU0  X  PIX SYS\nGPU1 PIX  X  SYS\nGPU2 SYS SYS  X\n")
    assumed = ["PCIe 3 x16, 15.75 GB/s for each GPU; --pcie sets it", "10 GB/s between CPUs; --between-cpus sets it"]
    text = printed("bundle", table, tmp_path / "files", "--format", "msccl")
    assert json.loads((tmp_path / "files" / "ranks.json").read_text())["assumed"] == assumed
    assert (
        f"so assumed:\n\n- {assumed[0]}\n- {assumed[1]}\n\n## msccl" in (tmp_path / "files" / "README.md").read_text()
    )
    tuner = printed("export", table, tmp_path / "tuner.csv", "--format", "nccl-tuner")
    for line in assumed:
        assert f"  assumed   {line}\n" in text
        assert f"  assumed   {line}\n" in tuner
        assert f"# assumed: {line}\n" in (tmp_path / "tuner.csv").read_text()
    for option, exact in (("--pcie", "4"), ("--between-cpus", "22")):
        text = printed("export", table, tmp_path / "tuner.csv", "--format", "nccl-tuner", option, exact)
        assert text.count("  assumed   ") == 1
    assert "  assumed   " not in printed("export", "ncv4", tmp_path / "tuner.csv", "--format", "nccl-tuner")


def test_a_file_that_is_too_large_to_be_verified(small, crossreduce, tmp_path, monkeypatch):
    """``verify`` does not call such a file wrong: it proves the others, names it, and exits with 2."""
    for path, text in small.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(instructions, "MOST_INSTRUCTIONS", 0)
    large, right = (
        sorted(path for path in small.files if path.startswith(f"{name}/")) for name in ("mscclpp", "msccl")
    )
    assert large
    code, out, error = crossreduce("verify", tmp_path)
    assert code == 2
    assert [line.partition(":")[0] for line in out.splitlines() if line.startswith("msccl")] == right
    count = len(right) + len(large)
    assert f"{tmp_path}: {len(right)} of {count} files are right; {len(large)} too large to be verified." in error
    assert [path for path in large if f"{tmp_path / path} was not verified: plan" in error] == large
    assert "wrong" not in error
    code, out, error = crossreduce("verify", tmp_path, "--json")
    report = json.loads(out)
    assert (code, report["right"], len(report["proved"]), error) == (2, None, len(right), "")
    code, out, error = crossreduce("verify", tmp_path / large[0])
    assert (code, out, error.startswith(f"crossreduce: {tmp_path / large[0]} was not verified: ")) == (2, "", True)


def test_one_format_in_a_folder_that_exists(printed, tmp_path, monkeypatch):
    """``--format`` chooses one format, and ``--json`` prints the list of ``ranks.json``. An empty folder may exist."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    report = json.loads(printed("bundle", "ncv4", ".", "--format", "msccl", "--json"))
    assert {entry["format"] for entry in report["files"]} == {"msccl"}
    assert json.loads((folder / "ranks.json").read_text())["files"] == report["files"]
    assert "files are right" in printed("verify", ".")


@pytest.mark.parametrize(
    ("path", "options", "text"),
    [
        ("a", ["--nbytes", "1M"], "crossreduce bundle has no option --nbytes."),
        ("a", ["--format", "chakra"], "--format must be one of msccl, mscclpp"),
        ("a", ["--root", "1"], "--root cannot be used with all_reduce"),
        ("no/a", [], "there is no folder"),
        ("file", [], "it exists and is not an empty folder"),
    ],
)
def test_wrong_options_and_folders(crossreduce, tmp_path, path, options, text):
    """Options that do not suit a bundle, and folders that cannot be made, are refused before anything is written."""
    (tmp_path / "file").write_text("mine")
    code, out, error = crossreduce("bundle", "ncv4", tmp_path / path, *options)
    assert (code, out) == (2, "")
    assert text in " ".join(error.split())
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def edit(path, change):
    """Return a function of a folder that replaces the text of a file in it by ``change(text)``."""
    return lambda folder: (folder / path).write_text(change((folder / path).read_text()))


def listed(change):
    """Return a function of a folder that lets ``change`` modify the content of ranks.json."""

    def changed(text):
        about = json.loads(text)
        change(about)
        return json.dumps(about)

    return edit("ranks.json", changed)


def entry(**changes):
    """Return a function of a folder that changes the first file's entry in ranks.json."""
    return listed(lambda about: about["files"][0].update(changes))


XML, JSON = "msccl/all_reduce_0.xml", "mscclpp/all_reduce_0.json"
# (damage, exit code of verify, words of the error): 1 for files that are wrong, 2 for a folder that is not a bundle.
DAMAGE = [
    (edit(XML, lambda text: text.replace('minBytes="0"', 'minBytes="8"')), 1, "its least_bytes is 8, unlike in ranks"),
    (edit(XML, lambda text: text.replace('type="rrc"', 'type="r"', 1)), 1, "all_reduce_0.xml is wrong"),
    (listed(lambda about: about["files"].insert(0, about["files"].pop(1))), 1, "is for some of its sizes"),
    (entry(elements_multiple_of=3), 1, "its elements_multiple_of is"),
    (listed(lambda about: about.update(collective="broadcast")), 1, "its collective is all_reduce, unlike"),
    (lambda folder: (folder / "msccl" / "notes.txt").write_text(""), 2, "notes.txt is not listed in ranks.json"),
    (lambda folder: (folder / JSON).unlink(), 2, "No such file"),
    (edit("ranks.json", lambda _: "{}"), 2, "is not the list of a bundle: it lacks 'format'"),
    (entry(format="mscclpp"), 2, "which is not a file of its format"),
    (entry(file="../all_reduce_0.xml"), 2, "which is not a file of its"),
    (listed(lambda about: about.update(files=[])), 2, "it must list ranks and files"),
    (edit(JSON, lambda _: cr.plan(NCV4, nbytes=1 << 20).schedule.to_json()), 2, "all_reduce_0.json"),
]


@pytest.mark.parametrize(("damage", "code", "text"), DAMAGE)
def test_damaged_bundles_are_refused(small, crossreduce, tmp_path, damage, code, text):
    """``verify`` finds wrong files, ranges that overlap or differ from the list, and files that the list lacks."""
    for path, content in small.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    damage(tmp_path)
    found, _, error = crossreduce("verify", tmp_path)
    assert (found, text in error) == (code, True), error


def test_hosts(monkeypatch):
    """The MSCCL++ files of a bundle for two hosts, which use port channels, are right."""
    monkeypatch.setattr(bundles, "SIZES", SIZES[::20])
    made = bundle(cr.Topology.machine("ncv4", 2), formats=["mscclpp"])
    for path, text in made.files.items():
        if path.endswith(".json") and "/" in path:
            verify_mscclpp_json(text)


def test_each_file_fits_messages_of_its_range(small):
    """A file is not written if all messages of its range are shorter than the number of bytes that the file needs."""
    window = small.windows["mscclpp"][0]

    def write(most_bytes):
        bundles._text("mscclpp", window._replace(least_bytes=0, most_bytes=most_bytes), 0, window.plan)

    write(1 << 20)
    with pytest.raises(cr.PlanError, match="none of them in its range"):
        write(8)
