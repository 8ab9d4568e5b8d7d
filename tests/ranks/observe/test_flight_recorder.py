"""The flight recorder writes dumps when a group breaks, and reads them back."""

import itertools
import json
import math
import os
import random
import re
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from histories import history, new_dump

from crossreduce.observe import flight_recorder


def test_a_written_dump_is_read_back(dump_directory):
    """A dump with 32 ops of each of 4 ranks is read back unchanged. Only its user can read it. It is the only file."""
    dump = new_dump(2, *(history(rank, 100 + rank, pid=10 + rank) for rank in range(4)))
    path = flight_recorder.write(dump)
    assert path == dump_directory / "rank2.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(dump_directory.stat().st_mode) == 0o700
    assert [each.name for each in dump_directory.iterdir()] == ["rank2.json"]
    assert flight_recorder.read(dump_directory) == ((dump,), ())
    assert [len(each.ops) for each in dump.histories] == [32] * 4


def test_any_hosts_are_read_back(dump_directory):
    """Any division of ranks among hosts, in any order, is written and read back unchanged."""
    rng, ranks, dumps = random.Random(0), list(range(60)), []
    for number in range(4):
        ends = sorted(rng.sample(range(1, 60), 20)) if number % 2 else []  # 21 hosts, or one
        hosts = tuple(tuple(ranks[a:b]) for a, b in itertools.pairwise([0, *ends, 60]))
        dumps.append(new_dump(number, history(number, 1), hosts=hosts, token=str(number)))
        flight_recorder.write(dumps[-1])
        rng.shuffle(ranks)
    assert flight_recorder.read(dump_directory) == (tuple(dumps), ())


def test_the_histories_of_ranks_without_a_dump_are_in_the_newest_dump_of_their_host(dump_directory):
    """A dump that is read contains its own rank's history. The newest dump of a host also contains the histories of the
    ranks of this host that have written no dump."""
    for rank, now in ((0, 50.0), (1, 60.0), (4, 70.0)):  # ranks 2, 3 and 5 write none
        host = range(4) if rank < 4 else range(4, 6)
        dump = new_dump(rank, *(history(other, 9) for other in host), hosts=((0, 1, 2, 3), (4, 5)))
        flight_recorder.write(dump._replace(now_s=now))
    found = flight_recorder.read(dump_directory).dumps
    assert [[each.rank for each in dump.histories] for dump in found] == [[0], [1, 2, 3], [4, 5]]


def test_stacks_of_all_threads_are_written_but_no_values(dump_directory, monkeypatch):
    """A dump contains the functions on each thread's stack, but no environment variables and no values of variables."""
    monkeypatch.setenv("A_SECRET", "hunter2hunter2")
    begun, stop = threading.Event(), threading.Event()

    def waits_here(password):
        begun.set()
        stop.wait(30)

    thread = threading.Thread(target=waits_here, args=("tiger5" * 2,), name="the waiting one")
    thread.start()
    assert begun.wait(10)
    dump = new_dump(0, history(0, 1), hosts=((0,),))
    stop.set()
    thread.join()
    stacks = {each.name: [frame.function for frame in each.stack] for each in dump.threads}
    assert dump.threads[0].name == "MainThread"
    assert "waits_here" in stacks["the waiting one"]
    content = flight_recorder.write(dump).read_text()
    assert "hunter2" not in content
    assert "tiger5tiger5" not in content
    assert dump.versions.keys() >= {"python", "crossreduce", "platform"}


def test_an_older_dump_is_kept(dump_directory, caplog):
    """The file of a rank's second dump gets a number, the first file is unchanged, and a warning is logged."""
    first, second = new_dump(0, history(0, 5), token="1"), new_dump(0, history(0, 9), token="2")
    before = flight_recorder.write(first).read_bytes()
    with caplog.at_level("WARNING", logger="crossreduce"):
        assert flight_recorder.write(second) == dump_directory / "rank0.2.json"
    assert "rank0.json already exists" in caplog.text
    assert (dump_directory / "rank0.json").read_bytes() == before
    assert flight_recorder.read(dump_directory).dumps == (first, second)


@pytest.mark.parametrize(("chosen", "limit"), [(True, "_MOST_DUMPS"), (False, "_MOST_BYTES")])
def test_old_dumps_of_ended_processes_are_deleted(tmp_path, monkeypatch, chosen, limit):
    """When a rank writes a dump, the oldest dumps of its rank number, and empty directories, are deleted until a limit
    is met. Dumps of running processes, other ranks and other hosts, and other files, are kept."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "crossreduce-mine") if chosen else "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = subprocess.Popen(["true"])
    process.wait()

    def written(number, rank=0, **fields):
        dump = new_dump(rank, history(rank, 3), token=str(number))._replace(**{"pid": process.pid, **fields})
        path = flight_recorder.write(dump)
        os.utime(path, (time.time() - 1000 + number,) * 2)
        return path

    kept = [written(1, pid=os.getpid()), written(2, rank=10), written(3, hostname="another")]
    malformed = '{\n "format": "crossreduce dump",\n "hostname": "\\x",\n "pid": 1,\n'
    for name, content in (("rank0.77.json", "{}"), ("rank0.78.json", malformed)):
        kept.append(kept[0].with_name(name))
        kept[-1].write_text(content)
        os.utime(kept[-1], (0, 0))
    old = [written(4 + k) for k in range(5)]
    size = old[0].stat().st_size
    monkeypatch.setattr(flight_recorder, limit, 3 if limit == "_MOST_DUMPS" else 3 * size + 1000)
    newest = written(10)  # either limit has room for it and for two of the old dumps
    assert all(path.exists() for path in [newest, *old[-2:], *kept])
    assert not any(path.exists() for path in old[:-2])
    assert len({path.parent for path in old[:-2]}) == (1 if chosen else 3)
    assert chosen or not any(path.parent.exists() for path in old[:-2])
    written(11, rank=1)
    assert old[-2].exists()


def test_ranks_share_a_directory_of_their_own(tmp_path, monkeypatch):
    """Without CROSSREDUCE_DUMP_DIR the ranks of a group share a new directory that only their user can read. If a link,
    or a directory that others can access, has its name, another directory is created."""
    monkeypatch.delenv("CROSSREDUCE_DUMP_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = [flight_recorder.write(new_dump(rank, history(rank, 3), group="a/../b c")) for rank in range(3)]
    (folder,) = {path.parent for path in paths}
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    victim, link, shared = (tmp_path / name for name in ("victim", "crossreduce-world-7", "crossreduce-world-8"))
    victim.mkdir(mode=0o700)
    link.symlink_to(victim)
    shared.mkdir()
    shared.chmod(0o777)
    for taken in (link, shared):
        path = flight_recorder.write(new_dump(0, history(0, 3), token=taken.name[-1]))
        assert path.parent.name.startswith(f"{taken.name}-")
        assert [*taken.iterdir()] == []


def test_a_dump_that_cannot_be_written_raises_nothing(tmp_path, monkeypatch, caplog):
    """If a dump cannot be written, a warning is logged and no exception is raised."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level("WARNING", logger="crossreduce"):
        assert flight_recorder.write(new_dump(0, history(0, 3))) is None
    assert "rank 0 could not write its flight recorder dump" in caplog.text


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_links_and_fifos_in_a_shared_directory(dump_directory, monkeypatch, has_hard_links):
    """A rank writes its dump although links, FIFOs and other files have the names of dumps: it follows and replaces no
    link, does not wait for the writer of a FIFO, and soon finds a free name. ``read`` follows no link, either."""
    outside = flight_recorder.write(new_dump(1, history(1, 3))).rename(dump_directory.parent / "rank1.json")
    before = outside.read_bytes()
    for name, target in (("rank0.json", "nowhere"), ("rank0.2.json", outside), ("rank1.json", outside)):
        (dump_directory / name).symlink_to(target)
    for name in ("rank0.3.json", "rank1.2.json"):
        os.mkfifo(dump_directory / name)
    for k in range(4, 100):
        (dump_directory / f"rank0.{k}.json").touch()
    names = {path.name for path in dump_directory.iterdir()}
    monkeypatch.setattr(flight_recorder, "_MOST_DUMPS", 0)
    if not has_hard_links:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: (dump_directory / "none" / "none").touch())
    written = []
    write = threading.Thread(target=lambda: written.append(flight_recorder.write(new_dump(0, history(0, 3)))))
    write.daemon = True  # Python would wait for it at its end
    write.start()
    write.join(30)
    (path,) = written
    assert re.fullmatch(r"rank0\.\d{1,9}\.json", path.name)
    assert {each.name for each in dump_directory.iterdir()} == names | {path.name}
    assert path.name != "rank0.100.json"
    assert outside.read_bytes() == before
    found = flight_recorder.read(dump_directory)
    assert [dump.rank for dump in found.dumps] == [0]
    assert sum(problem.endswith("it is a symbolic link.") for problem in found.problems) == 3
    assert sum(problem.endswith("it is not a regular file.") for problem in found.problems) == 2


def test_dumps_of_several_users_are_noted(dump_directory, monkeypatch):
    """In a directory in which others may write, a dump of another user may be forged. So a problem says so."""
    paths, lstat = [flight_recorder.write(new_dump(rank, history(rank, 3))) for rank in range(2)], Path.lstat
    fields = [*paths[1].lstat()]
    fields[4] += 1  # the owner
    other = os.stat_result(fields, {"st_mtime_ns": 0})
    monkeypatch.setattr(Path, "lstat", lambda path: other if path == paths[1] else lstat(path))
    dumps, (problem,) = flight_recorder.read(dump_directory)
    assert [dump.rank for dump in dumps] == [0, 1]
    assert problem == f"the files belong to several users ({fields[4] - 1}, {fields[4]}), so some may be forged."


def test_a_rank_killed_while_it_writes_leaves_no_partial_dump(dump_directory, monkeypatch):
    """A file gets the name of a dump only when it is complete."""
    link, linked = Path.hardlink_to, []

    def checked_link(path, temporary):
        linked.append((json.loads(temporary.read_text())["rank"], path.exists()))  # fails if the JSON is incomplete
        link(path, temporary)

    monkeypatch.setattr(Path, "hardlink_to", checked_link)
    assert flight_recorder.write(new_dump(0, history(0, 3))) == dump_directory / "rank0.json"
    assert linked == [(0, False)]


def test_a_broken_file_is_a_problem(dump_directory):
    """An empty, truncated, nested or foreign file, or one of a newer version, is one problem. Other dumps are read."""
    dump = new_dump(0, history(0, 3))
    flight_recorder.write(dump)
    begin = '{"format": "crossreduce dump", "version": '
    others = "", "[1, 2]", "[" * 100_000, '{"format": "something else"}'
    for content in (*others, begin + '2, "group"', begin + '2, "group": "world"}', begin + "99}"):
        (dump_directory / "rank1.json").write_text(content)
        (found,), (problem,) = flight_recorder.read(dump_directory)
        assert found == dump
        assert problem.startswith("rank1.json cannot be read: it")
    os.truncate(dump_directory / "rank1.json", 1 << 40)
    assert flight_recorder.read(dump_directory).problems == (
        "rank1.json cannot be read: it has more than 67108864 bytes.",
    )


def test_the_newest_dumps_of_a_large_directory_are_read(dump_directory, monkeypatch):
    """A limited number of bytes is read of a directory, the newest files first, and a problem says so. Files that are
    too large take no room. Files with more calls of a rank than ranks record are not read. Long texts are cut."""
    for rank in range(4):
        path = flight_recorder.write(new_dump(rank, history(rank, 3))._replace(cause="x" * 20_000))
        os.utime(path, (1000 + rank,) * 2)
    for name in ("rank7.json", "rank8.json"):
        (dump_directory / name).touch()
        os.truncate(dump_directory / name, 1 << 40)
    many = new_dump(9, history(9, 3), hosts=((9,),))
    flight_recorder.write(many._replace(histories=(many.histories[0]._replace(ops=many.histories[0].ops * 30),)))
    limit = (
        3 * (path.stat().st_size + 1000)
        + (dump_directory / "rank9.json").stat().st_size
        + 6 * flight_recorder._PER_FILE
    )
    monkeypatch.setattr(flight_recorder, "_MOST_READ", limit)
    dumps, problems = flight_recorder.read(dump_directory)
    assert [dump.rank for dump in dumps] == [1, 2, 3]
    assert {len(dump.cause) for dump in dumps} == {10_000}
    assert problems[0] == "the oldest 1 of 7 dumps are left out: 0 MiB of a directory are read at most."
    assert problems[1:3] == tuple(f"rank{k}.json cannot be read: it has more than 67108864 bytes." for k in (7, 8))
    assert problems[3] == "rank9.json cannot be read: it has more than 64 calls of one rank."


@pytest.mark.parametrize(("field", "value"), [
    ("rank", "0"), ("rank", True), ("rank", -1), ("rank", 4), ("size", 3), ("hosts", [[0, 1], [2, 3]]),
    ("hosts", "0-1;1-3"), ("hosts", ""), ("hosts", "0-3;"), ("hosts", "3-0"), ("hosts", "0-999999999"),
    ("hosts", "0-3x0"), ("hosts", "0-3x2"), ("hosts", "0-1x2x2"), ("hosts", "0-99x9999999"), ("hosts", "0-1x1,3"),
    ("histories", [3]), ("histories", [{"rank": 0, "ops": [{"sequence": 1}]}]), ("histories", [{"rank": [0]}]),
    ("histories", [{"rank": 0, "ops": ["1 2 3"]}]), ("histories", [{"rank": 0, "ops": ["1 nan - x"]}]),
    ("hosts", "0-999999"), ("threads", {}),
    ("threads", [{"name": "x", "stack": [{"file": "f", "line": -1, "function": "g", "code": ""}]}]),
    ("now_s", None), pytest.param("now_s", 10**400, id="now_s-huge"), ("now_s", math.nan), ("now_s", -math.inf),
])  # fmt: skip
def test_a_malformed_field_is_a_problem(dump_directory, field, value):
    """A malformed field of a file is reported as one problem, and no exception is raised."""
    path = flight_recorder.write(new_dump(0, history(0, 1)))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    dumps, (problem,) = flight_recorder.read(dump_directory)
    assert dumps == ()
    assert problem.startswith("rank0.json cannot be read: its ")
