"""``crossreduce doctor``: the rank to blame, the state of each rank, and unreadable dumps."""

import json
import re
import shutil
import sys

import pytest
from histories import SUM, history, new_dump
from paths import SUPPORT

from crossreduce.cli.doctor import command
from crossreduce.cli.support import peers
from crossreduce.observe import flight_recorder
from crossreduce.observe.flight_recorder import Frame, History, Op, Thread
from crossreduce.observe.liveness import LEFT

GOLDEN = SUPPORT / "dumps"


@pytest.fixture
def doctor(crossreduce):
    """Return a function that runs ``crossreduce doctor`` and returns its exit code, stdout and stderr."""
    return lambda *args: crossreduce("doctor", *args)


@pytest.fixture
def report(dump_directory, doctor):
    """Return a function that writes dumps in an empty directory and returns the report on them."""

    def of(*dumps):
        shutil.rmtree(dump_directory, ignore_errors=True)
        for dump in dumps:
            flight_recorder.write(dump)
        return doctor(dump_directory)[1]

    return of


def test_the_report_on_a_broken_group(doctor, monkeypatch):
    """The report on two hosts with one rank behind and one rank without information equals doctor.txt. Its table is at
    most as wide as the terminal, and nothing in it is cut off."""
    code, out, err = doctor(GOLDEN)
    assert (code, err) == (0, "")
    assert out == (GOLDEN / "doctor.txt").read_text()
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        table = [line for line in doctor(GOLDEN)[1].splitlines() if line[0] in "┏┃┡│└"]
        assert len(table) > 10
        assert all(len(line) <= width and "…" not in line for line in table), table


def test_json_has_the_same_facts(doctor):
    """``--json`` has the ranks that are behind, those without a dump, and those without any information."""
    code, out, _ = doctor(GOLDEN, "--json")
    (incident,) = json.loads(out)["incidents"]
    assert code == 0
    assert (incident["behind"], incident["without_dump"], incident["missing"]) == ([3], [3], [5])
    assert [state["sequence"] for state in incident["ranks"]] == [17, 17, 17, 16, 17, 0]
    assert incident["ranks"][3] | {"seconds": None} == {
        "rank": 3, "host": 0, "hostname": "alpha", "pid": 4003, "sequence": 16, "text": "barrier",
        "state": "finished", "seconds": None, "dumped": False, "stack": [],
    }  # fmt: skip


@pytest.mark.parametrize("content", [None, '{"format": "crossreduce dump", "version": 99}'])
def test_a_broken_file_is_named_and_the_others_are_read(dump_directory, doctor, content):
    """If one of four dumps is truncated, or of another version, an error names it, and the other three are read."""
    for rank in range(4):
        path = flight_recorder.write(new_dump(rank, *(history(other, 9 if other == 1 else 10) for other in range(4))))
    path.write_text(content or path.read_text()[:-200])
    code, out, err = doctor(dump_directory)
    assert code == 0
    assert "rank3.json cannot be read: it" in err
    assert re.search(r"rank 1 \(pid \d+ on .*\) is behind: it was in op 9", out)
    assert "ranks 0, 2, 3 were in op 10" in out  # rank 3's state is in the dumps of the others


def test_without_a_readable_dump_the_exit_code_is_1(doctor, tmp_path):
    """A missing or empty directory is reported, and the exit code is 1."""
    for words in ("cannot be read: No such file", "CollectiveTimeout or PeerLostError"):
        code, out, err = doctor(tmp_path / "d")
        assert (code, out, words in err) == (1, "", True)
        assert doctor(tmp_path / "d", "--json")[0] == 1
        (tmp_path / "d").mkdir(exist_ok=True)


def test_reports_on_large_groups_are_short(dump_directory, doctor):
    """A report on 20,000 ranks has a table of 200 ranks; the JSON has all ranks."""
    hosts = tuple(tuple(range(first, first + 8)) for first in range(0, 20_000, 8))
    known = [history(other, 40 - (other == 7), pid=other + 50) for other in hosts[0]]
    for rank in range(6):
        flight_recorder.write(new_dump(rank, *known, hosts=hosts))
    code, out, err = doctor(dump_directory)
    assert (code, err) == (0, "")
    assert re.search(r"rank 7 \(pid 57 on .*\) is behind: it was in op 39", out)
    assert "19800 of 20000 ranks are not in the table; --json has all of them." in out
    (incident,) = json.loads(doctor(dump_directory, "--json")[1])["incidents"]
    assert (len(incident["ranks"]), incident["behind"], len(incident["missing"])) == (20_000, [7], 19_992)


def test_ranks_that_are_behind_are_named(report):
    """Up to 20 ranks that are behind have a sentence each, and the others share one. A rank that made no call is
    behind, and so is a rank that makes the missing call only after the others have aborted."""
    out = report(new_dump(0, *(history(rank, 3 if rank else 4) for rank in range(100)), hosts=(tuple(range(100)),)))
    assert len(re.findall(r"^rank \d+ \(.*\) is behind: ", out, re.MULTILINE)) == 20
    assert "The same, or similar, is true of ranks 21-99." in out
    out = report(new_dump(0, history(0, 1), history(1, 0), hosts=((0, 1),)))
    assert f"is behind: it called neither op 1, {SUM}, nor any op before it." in out
    waiting, before = [history(rank, 7) for rank in (0, 1)], history(2, 6, ended=6.5)
    after = History(2, (*before.ops, Op(7, SUM, 54.9, None)))
    dumps = []
    for rank, now_s, late in ((0, 40.0, before), (1, 40.1, before), (2, 55.0, after)):
        dumps.append(new_dump(rank, *waiting, late, hosts=((0, 1, 2),))._replace(now_s=now_s))
    found = r"rank 2 \(.*\) is behind: it finished op 6, .*, 33\.5 s before the group broke; it did not call op 7, .*\."
    assert re.search(found, report(*dumps))


def test_ranks_that_are_not_behind(report):
    """If all ranks made the same call, no rank is behind, but a rank without a dump is suspected. A rank that left is
    reported, and not suspected: leaving does not count as a call."""
    same = [new_dump(rank, *(history(other, 7, pid=other + 50) for other in range(4))) for rank in range(4)]
    assert "No rank is behind: all ranks reached the same call." in report(*same)
    out = report(same[0], same[1], same[3])
    assert re.search(r"rank 2 \(pid 52 on .*\) is suspected: it called op 7, .*, and stopped in this call\.", out)
    assert "It wrote no dump: it was stopped, busy or dead." in out
    left = History(1, (*history(1, 4, ended=4.5).ops, Op(5, LEFT, 5.0, None)))
    dump = new_dump(0, history(0, 5), left, hosts=((0, 1),))
    out = report(dump._replace(cause="rank 1 left during op 5, x.", now_s=6.0))
    assert re.search(r"rank 1 \(.*\) left the group after op 4, all_reduce .*\. It wrote no dump\.", out)
    assert "suspected" not in out


def test_ranks_that_died_are_said_to_have_died(report, doctor, dump_directory):
    """If the error says which ranks died, these are reported as dead, not as suspected or behind; a rank that wrote a
    dump did not die. Ranks that had not called the op are not blamed then."""
    same = [history(rank, 6 if rank == 3 else 7, pid=rank + 50) for rank in range(5)]
    dumps = [new_dump(rank, *same, hosts=((0, 1, 2, 3, 4),)) for rank in (0, 4)]
    out = report(*(dump._replace(cause="ranks 1, 2, 4 died during op 7, x.") for dump in dumps))
    for rank in (1, 2):
        assert re.search(
            rf"^rank {rank} \(pid {rank + 50} on .*\) died: its last call was op 7, {re.escape(SUM)}\. ", out, re.M
        )
    assert "rank 3 had not called op 7" in out
    assert not re.search("suspected|is behind|rank 4 .*died:", out)
    (incident,) = json.loads(doctor(dump_directory, "--json")[1])["incidents"]
    assert (incident["behind"], [each["state"] for each in incident["ranks"]]) == (
        [1, 2],
        ["running", "died", "died", "running", "running"],
    )


def test_the_stack_shows_the_code_of_the_user(report):
    """Of a rank that is behind, the innermost functions outside of packages are shown, or those of packages if there
    are no others. A script in the folder of a checkout is the user's."""
    packages = [Frame(f"/x/lib/python3.11/{path}/y.py", 1, "inner", "") for path in ("site-packages/torch", "asyncio")]
    checkout = Frame("/home/a/crossreduce/src/crossreduce/ranks/z.py", 1, "wait", "")
    for frames, shown in (
        ([Frame("/home/a/train.py", 7, "main", ""), *packages, checkout], "main (a/train.py:7)"),
        ([Frame("/a/crossreduce/train.py", 7, "main", ""), *packages, checkout], "main (crossreduce/train.py:7)"),
        (packages, "inner (asyncio/y.py:1)"),
    ):
        dump = new_dump(1, history(0, 7), history(1, 6), hosts=((0, 1),))
        assert f"Its main thread was in {shown}." in report(
            dump._replace(threads=(Thread("MainThread", tuple(frames)),))
        )


@pytest.mark.parametrize(("limit", "most"), [("_MAX_GROUPS", 2), ("_MAX_CALLS", 7)])
def test_the_newest_of_many_groups_are_reported(dump_directory, doctor, monkeypatch, limit, most):
    """If there are too many groups, or too many ranks and calls in them, the newest groups are reported, and a problem
    names the number of the others. Of many problems some are printed."""
    monkeypatch.setattr(command, limit, most)
    for k in range(5):
        dump = new_dump(0, history(0, 3), hosts=((0,),), group=f"g{k}", token=str(k))
        flight_recorder.write(dump._replace(time=f"2026-01-0{1 + 4 * k % 5} 10:00:00"))
    for k in range(50):
        (dump_directory / f"rank1.{k}.json").touch()
    monkeypatch.setattr(command, "_MAX_PROBLEMS", 20)
    code, out, err = doctor(dump_directory)
    found = [line.split(",")[0] for line in out.splitlines() if line.startswith("Group")]
    assert (code, found) == (0, ['Group "g1"', 'Group "g2"'])
    assert len(err.splitlines()) == 21
    assert "31 more problems; --json has them" in err
    assert "the dumps of 3 other groups are left out: they are older." in doctor(dump_directory, "--json")[1]


def test_each_group_is_reported(report):
    """Groups whose dumps are in one directory are reported separately, even if two have the same name. Control
    characters in a dump are not printed, and markup is printed as text."""
    op = Op(1, "\x1b[2Jall_reduce [bold]x[/bold]", 0.0, None)
    named = (("world", "1"), ("world", "2"), ("pair", "1"))
    out = report(*(new_dump(0, History(0, (op,)), hosts=((0,),), group=name, token=token) for name, token in named))
    groups = [line.split(",")[0] for line in out.splitlines() if line.startswith("Group")]
    assert groups == ['Group "pair"', 'Group "world"', 'Group "world"']
    assert "\x1b" not in out
    assert "[bold]x[/bold]" in out


CAUSE = "cause: probably the IOMMU, or the access control (ACS)"
REMEDY = "try:   CROSSREDUCE_P2P=0, so that the driver copies between GPUs"
FOUND = 'print(json.dumps({{"devices": [0, 1, 2], "unusable": "", "failing": {}}}))'
MACHINES = {  # what the process that checks the GPUs does; the lines that are printed; the exit code
    FOUND.format([]): (["3 GPUs read each other's memory rightly, where the driver lets them"], 0),
    FOUND.format([[0, 2], [2, 0]]): (["cuda:0 reads cuda:2 wrongly", "cuda:2 reads cuda:0 wrongly", CAUSE, REMEDY], 1),
    FOUND.format([[0, k] for k in range(1, 11)]): (["cuda:0 reads cuda:8 wrongly", "and 2 more pairs", CAUSE], 1),
    "assert os.environ['CROSSREDUCE_P2P'] == '1'; sys.exit('CUDA error\\n  700')": (
        ["failed: CUDA error 700", CAUSE],
        1,
    ),
    "os.kill(os.getpid(), 6)": (["failed: it ended with exit code -6", REMEDY], 1),
    "time.sleep(60)": (["failed: it did not end within 1 s", CAUSE, REMEDY], 1),
}


@pytest.mark.parametrize("code", MACHINES)
def test_reads_between_gpus(code, crossreduce, monkeypatch):
    """``doctor`` without dumps names the GPUs that read others wrongly, the cause and a remedy."""
    lines, exit_code = MACHINES[code]
    monkeypatch.setattr(peers, "COMMAND", [sys.executable, "-c", f"import json, os, sys, time; {code}"])
    monkeypatch.setattr(peers, "TIMEOUT_S", 1 if "sleep" in code else 60)
    ended, out, err = crossreduce("doctor")
    assert (ended, err) == (exit_code, "")
    assert all(line in out for line in (*lines, "crossreduce doctor DIR")), out
    facts = json.loads(crossreduce("doctor", "--json")[1])["peer_reads"]
    assert bool(facts["failing"] or facts["error"]) == bool(exit_code)
