"""What ranks write down when their group breaks, and what ``crossreduce doctor`` reads from it."""

import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import ranks

import crossreduce as cr
from crossreduce.cli import main
from crossreduce.ranks import record
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.flight_recorder import History, Op
from crossreduce.ranks.shared_memory import LEFT
from crossreduce.transports.base import Buffer

GOLDEN = Path(__file__).parent / "dumps"
SUM = "all_reduce sum float32[10]"


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Run ``crossreduce doctor`` in this process; give its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "150")

    def run(*args):
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", *map(str, args)])
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory that ranks are told to write into."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def history(rank, last, ended=None, pid=None):
    ops = [Op(k, SUM, k + 0.25, k + 0.5) for k in range(max(1, last - 31), last)]
    return History(rank, (*ops, Op(last, SUM, last + 0.25, ended)) if last else (), pid)


def taken(rank, *histories, hosts=((0, 1, 2, 3),), group="world", token="7"):
    return record.taken(group, token, rank, hosts, "why", histories)


def test_the_story_of_a_broken_group(doctor):
    """Two hosts, one rank behind, one of which nothing is known: words and table are as they were approved."""
    code, out, err = doctor(GOLDEN)
    assert (code, err) == (0, "")
    assert out == (GOLDEN / "doctor.txt").read_text()


def test_json_has_the_same_facts(doctor):
    """``--json`` names who is behind, who is silent and of whom nothing is known."""
    code, out, _ = doctor(GOLDEN, "--json")
    (incident,) = json.loads(out)["incidents"]
    assert code == 0
    assert (incident["behind"], incident["silent"], incident["missing"]) == ([3], [3], [5])
    assert [place["sequence"] for place in incident["places"]] == [17, 17, 17, 16, 17, 0]
    assert incident["places"][3] | {"seconds": None} == {
        "rank": 3, "host": 0, "hostname": "alpha", "pid": 4003, "sequence": 16, "text": "barrier",
        "state": "finished", "seconds": None, "dumped": False, "stack": [],
    }  # fmt: skip


def test_what_is_written_is_read_again(here):
    """A dump of 32 ops of each of 4 ranks comes back as it was, closed to others, and nothing lies beside it."""
    dump = taken(2, *(history(rank, 100 + rank, pid=10 + rank) for rank in range(4)))
    path = record.write(dump)
    assert path == here / "rank2.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(here.stat().st_mode) == 0o700
    assert [each.name for each in here.iterdir()] == ["rank2.json"]
    assert record.read(here) == ((dump,), ())
    assert [len(each.ops) for each in dump.histories] == [32] * 4


def test_all_threads_stacks_are_written_and_nothing_of_the_environment(here, monkeypatch):
    """Where each thread stands is there, by function and line; no variable's value is."""
    monkeypatch.setenv("A_SECRET", "hunter2hunter2")
    stop = threading.Event()

    def stands_here(password):
        stop.wait(60)

    thread = threading.Thread(target=stands_here, args=("tiger5tiger5",), name="the waiting one")
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            dump = taken(0, history(0, 1), hosts=((0,),))
            if any("stands_here" in [f.function for f in each.stack] for each in dump.threads):
                break
            assert time.monotonic() < deadline
    finally:
        stop.set()
        thread.join()
    content = record.write(dump).read_text()
    assert dump.threads[0].name == "MainThread"
    assert any(frame.function == "stands_here" for each in dump.threads for frame in each.stack)
    assert {each.name for each in dump.threads} >= {"MainThread", "the waiting one"}
    assert "hunter2" not in content
    assert "tiger5tiger5" not in content.replace('\\"tiger5tiger5\\"', "")  # the source line above may be quoted
    assert dump.versions.keys() >= {"python", "crossreduce", "platform"}


def test_an_older_dump_is_kept(here, caplog):
    """A second dump of a rank is numbered, the first stays as it was, and the log says so."""
    first, second = taken(0, history(0, 5), token="1"), taken(0, history(0, 9), token="2")
    before = record.write(first).read_bytes()
    with caplog.at_level("WARNING", logger="crossreduce"):
        assert record.write(second) == here / "rank0.2.json"
    assert "rank0.json is another dump's" in caplog.text
    assert (here / "rank0.json").read_bytes() == before
    assert record.read(here).dumps == (first, second)


def test_ranks_share_a_directory_of_their_own(tmp_path, monkeypatch):
    """Without CROSSREDUCE_DUMP_DIR the ranks of a group meet in one new directory, closed to others."""
    monkeypatch.delenv("CROSSREDUCE_DUMP_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = [record.write(taken(rank, history(rank, 3), group="a/../b c")) for rank in range(3)]
    assert {path.parent for path in paths} == {paths[0].parent}
    assert paths[0].parent.parent == tmp_path
    assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
    other = record.write(taken(0, history(0, 3), group="a/../b c", token="8"))
    assert other.parent != paths[0].parent


@pytest.mark.parametrize("trap", ["a link", "open to all"])
def test_a_directory_of_somebody_else_is_not_written_into(tmp_path, monkeypatch, trap):
    """A link, or a directory that others can read, where the dumps would go is left alone."""
    monkeypatch.delenv("CROSSREDUCE_DUMP_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    if trap == "a link":
        (tmp_path / "crossreduce-world-7").symlink_to(victim)
    else:
        (tmp_path / "crossreduce-world-7").mkdir()
        (tmp_path / "crossreduce-world-7").chmod(0o777)
    path = record.write(taken(0, history(0, 3)))
    assert path.parent.name.startswith("crossreduce-world-7-")
    assert not list(victim.iterdir())
    assert not list((tmp_path / "crossreduce-world-7").iterdir())


def test_a_dump_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch, caplog):
    """Where there is no place for it, there is a warning and no exception."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level("WARNING", logger="crossreduce"):
        assert record.write(taken(0, history(0, 3))) is None
    assert "rank 0 could not write down what it did last" in caplog.text


def test_a_rank_killed_while_it_writes_leaves_no_half_dump(here):
    """Under a real name there is a whole file or none, whenever the writer is killed."""
    code = (
        "import os, sys\n"
        "from crossreduce.ranks import record\n"
        "history = record.History(0, tuple(record.Op(k, 'x' * 1000, 0.0, None) for k in range(1, 2000)))\n"
        "dump = record.taken('world', '7', 0, ((0,),), 'why', [history])\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    record.write(dump)\n"
    )
    for pause in (0.0, 0.013, 0.03):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert writer.stdout.readline() == b"ready\n"
            while not here.exists() or not list(here.glob("rank*.json")):
                time.sleep(0.001)
            time.sleep(pause)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate(timeout=60)
    files = list(here.glob("rank*.json"))
    assert files
    assert len(record.read(here).dumps) == len(files)


BROKEN = {
    "empty": "",
    "cut short": None,
    "no dump": '{"format": "something else"}',
    "a list": "[1, 2]",
    "another version": '{"format": "crossreduce dump", "version": 99}',
    "fields missing": '{"format": "crossreduce dump", "version": 1, "group": "world"}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_named_and_the_rest_is_read(here, doctor, fault):
    """One broken dump among four costs that rank's story and no other's."""
    for rank in range(4):
        path = record.write(taken(rank, *(history(other, 9 if other == 1 else 10) for other in range(4))))
    path.write_text(path.read_text()[:-200] if BROKEN[fault] is None else BROKEN[fault])
    code, out, err = doctor(here)
    assert code == 0
    assert "rank3.json cannot be read: it" in err
    assert re.search(r"rank 1 \(pid \d+ on .*\) is behind: it was still in op 9", out)
    assert "ranks 0, 2, 3 were in op 10" in out  # the others saw rank 3 in shared memory


@pytest.mark.parametrize(("field", "value"), [
    ("rank", "0"), ("rank", True), ("rank", -1), ("rank", 4), ("size", 3), ("hosts", [[0, 1], [1, 2, 3]]),
    ("hosts", [7]), ("histories", [3]), ("histories", [{"rank": 0, "ops": [{"sequence": 1}]}]), ("threads", {}),
    ("now_s", None), pytest.param("now_s", 10**400, id="now_s-huge"), ("now_s", math.nan), ("now_s", -math.inf),
])  # fmt: skip
def test_a_field_that_cannot_be_is_refused(here, field, value):
    """Whatever is wrong in a file is one problem, and no exception."""
    path = record.write(taken(0, history(0, 1)))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    found = record.read(here)
    assert found.dumps == ()
    (problem,) = found.problems
    assert problem.startswith("rank0.json cannot be read: its ")


@pytest.mark.parametrize("made", [False, True])
def test_nothing_readable_exits_with_1(doctor, tmp_path, made):
    """A directory that is missing, or empty, is said to be so."""
    if made:
        (tmp_path / "d").mkdir()
    code, out, err = doctor(tmp_path / "d")
    assert (code, out) == (1, "")
    assert ("has no dumps" if made else "cannot be read: No such file") in err
    assert doctor(tmp_path / "d", "--json")[0] == 1


def test_a_rank_stopped_inside_the_call_is_suspected(here, doctor):
    """Where all have begun the same call, the one that wrote nothing is named."""
    for rank in (0, 1, 3):
        record.write(taken(rank, *(history(other, 7, pid=other + 50) for other in range(4))))
    _, out, _ = doctor(here)
    assert re.search(r"rank 2 \(pid 52 on .*\) is suspected: it began op 7", out)
    assert "It wrote no dump" in out


def test_a_rank_without_a_call_is_behind(here, doctor):
    """A rank that never called anything is behind all others."""
    record.write(taken(0, history(0, 1), history(1, 0), hosts=((0, 1),)))
    assert "is behind: it has made no call so far; op 1" in doctor(here)[1]


def test_a_rank_that_comes_when_all_is_over_was_late_all_the_same(here, doctor):
    """What a late rank writes once it has come does not hide that the others gave up without it."""
    for rank, now, last in ((0, 40.0, 7), (1, 40.1, 7), (2, 55.0, 7)):
        seen = [history(other, 7 if other < 2 else last if now > 50 else 6, ended=None) for other in range(3)]
        late = History(2, (*history(2, 6, ended=6.5).ops, *([Op(7, SUM, 54.9, None)] if now > 50 else [])))
        dump = taken(rank, *seen[:2], late, hosts=((0, 1, 2),))
        record.write(dump._replace(now_s=now))
    _, out, _ = doctor(here)
    assert re.search(r"rank 2 \(.*\) is behind: it had finished op 6, .* 33.5 s before; op 7, .*, waits for it", out)
    assert "none of them is behind" not in out


def test_a_rank_that_left_is_said_to_have_left(here, doctor):
    """Leaving is no call: a rank that left did so after its last one."""
    left = History(1, (*history(1, 4, ended=4.5).ops, Op(5, LEFT, 5.0, None)))
    record.write(
        taken(0, history(0, 5), left, hosts=((0, 1),))._replace(cause="rank 1 left during op 5, x.", now_s=6.0)
    )
    _, out, _ = doctor(here)
    assert re.search(r"rank 1 \(.*\) left the group after op 4, all_reduce .*\. It wrote no dump\.", out)
    assert "suspected" not in out


def test_ranks_equally_far_blame_nobody(here, doctor):
    """All wrote, all are in the same call: nobody is behind."""
    for rank in range(4):
        record.write(taken(rank, *(history(other, 7) for other in range(4))))
    assert "All ranks were equally far: none of them is behind." in doctor(here)[1]


def test_each_group_has_its_own_story(here, doctor):
    """Dumps of two groups, and of one group twice, in one directory are told apart."""
    for group, token in (("world", "1"), ("world", "2"), ("pair", "1")):
        record.write(taken(0, history(0, 3), history(1, 2), hosts=((0, 1),), group=group, token=token))
    out = doctor(here)[1]
    assert [line.split(",")[0] for line in out.splitlines() if line.startswith("Group")] == [
        'Group "pair"',
        'Group "world"',
        'Group "world"',
    ]


def test_a_file_cannot_command_the_terminal(here, doctor):
    """What a terminal would obey, and what would be markup, is shown as text."""
    op = Op(1, "\x1b[2Jall_reduce [bold]x[/bold]", 0.0, None)
    record.write(taken(0, History(0, (op,)), hosts=((0,),)))
    out = doctor(here)[1]
    assert "\x1b" not in out
    assert "[bold]x[/bold]" in out


def until_one_stops(rendezvous, timeout_s):
    """One rank's life: 40 calls; rank 2 stops its own process before its 38th, and the others lose patience."""
    communicator = Communicator(rendezvous, None, name="world", timeout_s=timeout_s)
    x = np.full(10, 3.0**communicator.rank, np.float32)
    there = Buffer(x.ctypes.data, x.size, "float32", x.shape)
    for number in range(1, 41):
        if communicator.rank == 2 and number == 38:
            os.kill(os.getpid(), signal.SIGSTOP)
        communicator.broadcast(there, 1)


def test_a_stopped_rank_is_found_in_what_the_others_wrote(here, doctor):
    """R11: ranks 0 and 1 time out and write; doctor names rank 2, its process and the call it never made."""
    pids = []
    results = ranks(3, until_one_stops, 1.5, check=False, timeout_s=12, begun=ended_later(pids, here, 2))
    for rank in (0, 1):
        error = results[rank]
        assert isinstance(error, cr.CollectiveTimeout), error
        assert error.ranks == (2,)
        assert f"crossreduce doctor {here}" in str(error)
    found = record.read(here)
    first = next(dump for dump in found.dumps if dump.rank == 0)
    assert [len(history.ops) for history in first.histories] == [32] * 3
    code, out, err = doctor(here)
    assert (code, err) == (0, "")
    assert re.search(
        rf"rank 2 \(pid {pids[2]} on .*\) is behind: it had finished op 37, broadcast root 1 float32\[10\], .*"
        r"op 38, broadcast root 1 float32\[10\], waits for it\.",
        out,
    )
    assert "ranks 0, 1 were in op 38" in out
    assert "until_one_stops (tests/test_doctor.py:" in out


def ended_later(pids, directory, count):
    """Return what notes the ranks' pids, and ends the stopped one once so many others have written."""

    def begun(given):
        pids.extend(given)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and len(list(directory.glob("rank*.json"))) < count:
            time.sleep(0.01)
        os.kill(given[2], signal.SIGKILL)

    return begun
