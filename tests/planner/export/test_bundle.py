"""Bundles: files of a collective for all sizes, their ranges, their proof, and requests that are refused."""

import json
import math
from itertools import pairwise

import pytest

import crossreduce as cr
from crossreduce.export.bundle import NO_LIMIT, SIZES, bundle
from crossreduce.export.formats.msccl.format import read_msccl_xml
from crossreduce.export.formats.mscclpp import verify_mscclpp_json
from crossreduce.planning.granularity import is_power_of_two
from crossreduce.schedule import pipelined

NCV4 = cr.Topology.machine("ncv4")
NCV4_PLAN = cr.plan(NCV4, nbytes=1 << 20).schedule
NO_QUEUES = cr.Costs(operation_s=0)


def largest(window):
    """Return the last size of a range that is compared with the best plan."""
    return min(window.most_bytes or SIZES[-1], SIZES[-1])


@pytest.fixture(scope="module")
def small():
    return bundle(NCV4, machine="ncv4")


@pytest.mark.parametrize("name", ["msccl", "mscclpp"])
def test_each_size_has_one_file(small, name):
    """The ranges begin at 0, have no end, and each begins one byte after the one before it ends."""
    windows = small.windows[name]
    assert windows[0].least_bytes == 0
    assert windows[-1].most_bytes == 0 or windows[-1].most_bytes > 1 << 36
    assert len(windows) > 1
    assert all(before.most_bytes + 1 == after.least_bytes for before, after in pairwise(windows))
    paths = [entry["file"] for entry in json.loads(small.files["ranks.json"])["files"] if entry["format"] == name]
    assert len(paths) == len(windows)
    assert set(small.files) == {"README.md", "ranks.json"} | {path for path in small.files if "/" in path}


@pytest.mark.parametrize(
    ("machine", "collective", "root"),
    [("ncv4", "all_reduce", None), pytest.param("dgx-1v", "broadcast", "cuda:7", marks=pytest.mark.slow)],
)
def test_the_plan_of_each_range_is_fast_at_all_its_sizes(machine, collective, root):
    """At each power of two in its range, a plan takes at most 2 % longer than the best plan, both without queues."""
    topology = cr.Topology.machine(machine)
    made = bundle(topology, collective, root, formats=["msccl"])
    assert not made.left_out
    for window in made.windows["msccl"]:
        assert is_power_of_two(window.plan.schedule.units)
        nbytes = 1 << math.ceil(math.log2(max(window.least_bytes, SIZES[0])))
        while nbytes <= largest(window):
            best = cr.plan(topology, collective, nbytes, root=root, costs=NO_QUEUES, granularity=0.02)
            own = pipelined(window.plan.schedule, topology, nbytes, costs=NO_QUEUES)
            assert own.seconds <= best.seconds * 1.0201, nbytes
            nbytes *= 2


def test_the_files_have_their_ranges(small):
    """The sizes of a file are those of its range; MSCCL's files write 0 for no limit, MSCCL++'s the greatest number."""
    for k, window in enumerate(small.windows["msccl"]):
        algo = read_msccl_xml(small.files[f"msccl/all_reduce_{k}.xml"])
        assert (algo.min_bytes, algo.max_bytes) == (window.least_bytes, window.most_bytes)
    for k, window in enumerate(small.windows["mscclpp"]):
        plan = json.loads(small.files[f"mscclpp/all_reduce_{k}.json"])
        assert plan["min_message_size"] == window.least_bytes
        assert plan["max_message_size"] == (window.most_bytes or NO_LIMIT)


def test_ranks_are_in_the_order_of_the_topology():
    """Rank k is the k-th device, whatever the root is; the README and ranks.json have the map and the root."""
    made = bundle(NCV4, "broadcast", "cuda:2", formats=["msccl"], machine="my machine")
    about = json.loads(made.files["ranks.json"])
    assert about["ranks"] == [f"cuda:{k}" for k in range(4)]
    assert about["machine"] == "my machine"
    readme = made.files["README.md"]
    assert "| 2 | cuda:2 |" in readme
    assert "The root is cuda:2, rank 2." in readme
    assert about["root"] == "cuda:2"
    assert "MSCCL_ALGO_DIR" in readme
    assert "mscclpp" not in about["files"][0]["file"]


def test_equal_requests_give_equal_files(small):
    """The same request gives the same bytes."""
    assert bundle(NCV4, machine="ncv4").files == small.files


def test_a_request_without_any_file_is_refused():
    """If no plan fits a format, the error has the reason."""
    one = cr.Topology.machine("ncv4").subset(["cuda:1"])
    with pytest.raises(cr.PlanError, match="no plan of this collective fits") as caught:
        bundle(one)
    assert "a collective of one device has no transfers" in str(caught.value)


def test_the_command_line(printed, crossreduce, tmp_path):
    """``bundle`` writes a new folder that ``verify`` proves, and never adds to a folder with files."""
    folder = tmp_path / "made"
    text = printed("bundle", "ncv4", folder)
    assert f"all_reduce on ncv4: {len(list(folder.glob('*/*')))} files in {folder}" in text
    assert "ranks     0 cuda:0, 1 cuda:1, 2 cuda:2, 3 cuda:3" in text
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "msccl", "mscclpp", "ranks.json"]
    assert "files are right, each for its own sizes." in printed("verify", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, error = crossreduce("bundle", "ncv4", folder)
    assert (code, "it is not an empty or a new folder" in error) == (2, True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_one_format_as_json(printed, tmp_path):
    """``--format`` chooses one of the formats; ``--json`` prints the list of ``ranks.json``."""
    report = json.loads(printed("bundle", "ncv4", tmp_path / "a", "--format", "mscclpp", "--json"))
    assert {entry["format"] for entry in report["files"]} == {"mscclpp"}
    assert report["left_out"] == []
    assert not (tmp_path / "a" / "msccl").exists()
    assert json.loads((tmp_path / "a" / "ranks.json").read_text())["files"] == report["files"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nbytes", "1M"], "No such option: --nbytes"),
        (["--format", "chakra"], "--format must be one of msccl, mscclpp"),
        (["--root", "1"], "--root: a bundle of all_reduce has no root"),
    ],
)
def test_wrong_options(crossreduce, tmp_path, options, text):
    """Options that do not suit a bundle are refused before anything is planned or written."""
    code, out, error = crossreduce("bundle", "ncv4", tmp_path / "a", *options)
    assert (code, out) == (2, "")
    assert text in " ".join(error.split())
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written(crossreduce, tmp_path):
    """A folder in a missing folder, and a file of that name, are refused."""
    (tmp_path / "file").write_text("")
    for path, text in ((tmp_path / "no" / "a", "there is no folder"), (tmp_path / "file", "not an empty or a new")):
        code, _, error = crossreduce("bundle", "ncv4", path)
        assert (code, text in error) == (2, True)
    assert (tmp_path / "file").read_text() == ""


def edit(path, change):
    """Return a function that replaces the text of a file by what ``change`` returns."""
    return lambda folder: (folder / path).write_text(change((folder / path).read_text()))


def listed(change):
    """Return a function that changes the content of ranks.json."""

    def changed(text):
        about = json.loads(text)
        change(about)
        return json.dumps(about)

    return edit("ranks.json", changed)


XML, JSON = "msccl/all_reduce_0.xml", "mscclpp/all_reduce_0.json"


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        (
            edit(XML, lambda text: text.replace('minBytes="0"', 'minBytes="8"')),
            1,
            "its least_bytes is 8, unlike in ranks.json",
        ),
        (edit(XML, lambda text: text.replace('type="rrc"', 'type="r"', 1)), 1, "all_reduce_0.xml is wrong"),
        (listed(lambda about: about["files"].insert(0, about["files"].pop(1))), 1, "another file is for its sizes"),
        (
            lambda folder: (folder / "msccl" / "notes.txt").write_text("notes"),
            2,
            "msccl/notes.txt is not in ranks.json; runtimes would read it, too",
        ),
        (lambda folder: (folder / JSON).unlink(), 2, "No such file"),
        (edit("ranks.json", lambda _: "{}"), 2, "is not the list of a bundle"),
        (edit("ranks.json", lambda _: "[" * 200_000), 2, "is not the list of a bundle"),
        (listed(lambda about: about["files"][0].update(format="foo")), 2, "which is not a file of its format"),
        (listed(lambda about: about["files"][0].update(file="../all_reduce_0.xml")), 2, "which is not a file of its"),
        (listed(lambda about: about["files"][0].update(file=["a"])), 2, "is not the list of a bundle"),
        (listed(lambda about: about["files"][0].update(format="mscclpp")), 2, "which is not a file of its format"),
        (listed(lambda about: about["files"][0].update(elements_multiple_of=3)), 1, "its elements_multiple_of is"),
        (listed(lambda about: about.update(collective="broadcast")), 1, "its collective is all_reduce, unlike"),
        (listed(lambda about: about["ranks"].pop()), 1, "its ranks is 4, unlike in ranks.json"),
        (listed(lambda about: about.update(files=[])), 2, "it must list ranks and files"),
        (edit(JSON, lambda _: NCV4_PLAN.to_json()), 2, "all_reduce_0.json"),
    ],
)
def test_damaged_bundles_are_refused(small, crossreduce, tmp_path, damage, code, text):
    """``verify`` finds wrong files, ranges that differ from the list or overlap, and files that do not belong."""
    for path, content in small.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    damage(tmp_path)
    found, _, error = crossreduce("verify", tmp_path)
    assert (found, text in error) == (code, True), error


def test_a_byte_order_mark_does_not_matter(small, printed, tmp_path):
    """Editors may add a byte order mark to a file."""
    for path, content in small.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content, "utf-8-sig" if path.endswith(".json") else "utf-8")
    assert "files are right" in printed("verify", tmp_path)


def test_an_existing_folder_stays(printed, tmp_path, monkeypatch):
    """An empty folder keeps its identity and mode, so a shell can be inside of it."""
    folder = tmp_path / "here"
    folder.mkdir(mode=0o700)
    monkeypatch.chdir(folder)
    before = folder.stat()
    printed("bundle", "ncv4", ".", "--format", "msccl")
    after = folder.stat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert "files are right" in printed("verify", ".")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_hosts(monkeypatch):
    """Files for several hosts are proved, in MSCCL++ with port channels."""
    monkeypatch.setattr("crossreduce.export.bundle.SIZES", SIZES[::20])
    made = bundle(cr.Topology.machine("ncv4", 2), formats=["mscclpp"])
    for path, text in made.files.items():
        if path.endswith(".json") and "/" in path:
            verify_mscclpp_json(text)


def test_each_file_fits_messages_of_its_range():
    """A file for up to 2,047 bytes of five devices, whose chunks need 2,048, is not written."""
    names = [f"cuda:{k}" for k in range(5)]
    links = [(a, b, 1 + (3 * i + j) % 7) for i, a in enumerate(names) for j, b in enumerate(names) if a != b]
    made = bundle(cr.Topology(names, links), "broadcast", "cuda:1")
    for entry in json.loads(made.files["ranks.json"])["files"]:
        multiple = entry.get("bytes_multiple_of") or entry["elements_multiple_of"]
        if entry["most_bytes"]:
            assert entry["most_bytes"] // multiple * multiple >= max(1, entry["least_bytes"])
