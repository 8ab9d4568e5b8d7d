"""Traces of ranks: what a file contains, that it survives its process, and the merged trace of all ranks."""

import json
import os
import re
import resource
import signal
import struct
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from members import Warnings, member, memory, summed
from ranks import Died, ranks
from test_multi_host import joined, on
from test_rank_prepared import group_of
from trace_events import read_events

import crossreduce.trace
from crossreduce import ArgumentError, ReductionError, Topology, simulate
from crossreduce.cli.trace import _prediction, _show
from crossreduce.observe.traces import calls as trace_calls
from crossreduce.observe.traces.calls import CallPart, read_directory
from crossreduce.observe.traces.clocks import ClockShift, align
from crossreduce.observe.traces.format import RECORD, Facts, Phase, read_trace
from crossreduce.observe.traces.summary import SummaryRow, straggler, summarize
from crossreduce.ops import ReduceOp
from crossreduce.packing import itemsize
from crossreduce.ranks import tracing
from crossreduce.ranks.inter_host.host_parts import host_schedule
from crossreduce.ranks.intra_host.shared_memory import BROKEN, LEFT

LATE_S = 0.15
WORK = {Phase.COPY_IN, Phase.REDUCE, Phase.COPY_OUT}


@pytest.fixture
def trace(crossreduce):
    """Return a function that runs ``crossreduce trace`` and returns its exit code, stdout and stderr."""
    return lambda *args: crossreduce("trace", *args)


def traced(n, function, folder, *args, environment=None, **options):
    """Run ranks with CROSSREDUCE_TRACE, and return their results."""
    variables = [{"CROSSREDUCE_TRACE": str(folder), **own} for own in environment or [{}] * n]
    return ranks(n, function, *args, environment=variables, **options)


def only_group(folder):
    found = read_directory(folder)
    ((group,),) = found.runs
    return group, found.notes


def some_calls(rendezvous):
    """Make 3 small and 2 large all-reduces, most of them in compiled code; rank 1 is late for the last one."""
    group, counter = group_of(rendezvous)
    for _ in range(3):
        group.all_reduce(np.ones(8, np.float32))
    x = np.ones(700_001)
    group.all_reduce(x)
    group.broadcast(x, 1)
    group.barrier()
    if group.rank == 1:
        time.sleep(LATE_S)
    group.all_reduce(x)
    group.close()
    return counter.hits


CALLS = [
    *["all_reduce sum float32[8]"] * 3,
    "all_reduce sum float64[700001]",
    "broadcast root 1 float64[700001]",
    "barrier",
    "all_reduce sum float64[700001]",
]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """Return the folder with the trace of ``some_calls`` on two ranks."""
    folder = tmp_path_factory.mktemp("trace")
    assert traced(2, some_calls, folder) == [3, 3]
    return folder


def test_a_trace_has_each_call_of_each_rank(of_two):
    """The files of two ranks have all calls, prepared or not, with numbers, texts, bytes and outcomes."""
    group, notes = only_group(of_two)
    assert (group.name, group.hosts, sorted(group.ranks), notes) == ("world", ((0, 1),), [0, 1], ())
    for rank, found in group.ranks.items():
        assert [call.text for call in found.calls] == CALLS
        assert [call.number for call in found.calls] == [*range(1, 8)]
        assert [call.nbytes for call in found.calls] == [32] * 3 + [5_600_008] * 2 + [None, 5_600_008]
        assert {call.outcome for call in found.calls} == {0}
        assert (found.facts.rank, found.facts.group) == (rank, "world")
    assert len({found.facts.pid for found in group.ranks.values()}) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in of_two.iterdir())


def test_phases_sum_to_the_call(of_two):
    """Within a call the phases follow each other without a gap, and sum to its time; calls follow each other."""
    group, _ = only_group(of_two)
    for found in group.ranks.values():
        last = 0
        for call in found.calls:
            assert last <= call.begin_ns < call.end_ns
            last = call.end_ns
            at = call.begin_ns
            for part in call.parts:
                assert part.begin_ns == at <= part.end_ns
                at = part.end_ns
            assert 0 <= call.end_ns - at < 100_000_000  # from the last record to the end; more only if it lost its CPU
            total = sum(part.end_ns - part.begin_ns for part in call.parts)
            assert total == at - call.begin_ns
        gaps = [call.end_ns - call.parts[-1].end_ns for call in found.calls if call.parts]
        assert min(gaps) < 20_000


def test_phases_are_those_of_the_program(of_two):
    """A small all-reduce copies in and reduces; a broadcast copies in on the root and out elsewhere; a barrier only
    waits. No wait is for the rank itself, and stages do not decrease."""
    group, _ = only_group(of_two)
    for rank, found in group.ranks.items():
        kinds = [[part.phase for part in call.parts if part.phase in WORK] for call in found.calls]
        assert kinds[0] == kinds[1] == [Phase.COPY_IN, Phase.REDUCE]
        assert {*kinds[3]} == WORK
        # Where other ranks may read the root's memory, the root copies nothing.
        assert {*kinds[4]} <= {Phase.COPY_IN} if rank == 1 else {*kinds[4]} == {Phase.COPY_OUT}
        assert kinds[5] == []
        for call in found.calls:
            stages = [part.stage for part in call.parts]
            assert stages == sorted(stages)
            waits = [part.waited_for for part in call.parts if part.phase is Phase.WAIT]
            assert all(other == 1 - rank for other in waits)


def test_a_wait_is_for_the_late_rank(of_two):
    """Rank 0 waits for rank 1 at least as long as that one is late, and the summary names rank 1."""
    group, _ = only_group(of_two)
    call = group.ranks[0].calls[-1]
    first = next(part for part in call.parts if part.phase is Phase.WAIT)
    assert first.waited_for == 1
    assert (first.end_ns - first.begin_ns) / 1e9 > 0.8 * LATE_S
    other = group.ranks[1].calls[-1]
    assert first.end_ns >= other.begin_ns  # one clock
    rows = summarize([group], align([group]))
    row = next(row for row in rows if row.text == CALLS[-1])
    assert (row.calls, row.unfinished, row.waited_for[0][0]) == (2, 0, 1)
    assert row.waiting > 0.3
    assert row.gb_per_s == pytest.approx(5_600_008 / row.seconds / 1e9)


def test_the_merged_trace_is_valid(of_two, trace, tmp_path):
    """``-o`` writes events that the strict reader accepts: each call, its phases, and an arrow for each wait."""
    code, out, err = trace(of_two, "-o", tmp_path / "trace.json")
    assert (code, err) == (0, "")
    assert "14 calls of 2 ranks" in out
    events = read_events((tmp_path / "trace.json").read_text())
    group, _ = only_group(of_two)
    called = [event for event in events if event.get("cat") == "call"]
    assert len(called) == 14
    assert min(event["ts"] for event in called) == 0
    start = min(call.begin_ns for each in group.ranks.values() for call in each.calls)
    for rank, process in ((0, 1), (1, 2)):
        mine = [event for event in called if event["pid"] == process]
        assert [event["name"] for event in mine] == CALLS
        for event, call in zip(mine, group.ranks[rank].calls, strict=True):
            assert event["ts"] == (call.begin_ns - start) / 1e3
            assert event["dur"] == pytest.approx((call.end_ns - call.begin_ns) / 1e3, abs=1e-3)
            assert (event["args"]["op"], event["args"].get("bytes")) == (call.number, call.nbytes)
    phases = [event for event in events if event.get("cat") == "phase"]
    assert len(phases) == sum(len(call.parts) for each in group.ranks.values() for call in each.calls)
    waits = [event for event in phases if event["name"].startswith("wait for rank")]
    assert len([event for event in events if event["ph"] == "f"]) == len(waits) > 2
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name[:14] for name in names] == ['"world" rank 0', '"world" rank 1']


def test_a_large_trace_is_cut_for_the_viewer(of_two, trace, tmp_path, monkeypatch):
    """If there are too many phases, ``-o`` writes the newest calls of all ranks, and a note says so."""
    monkeypatch.setattr(sys.modules["crossreduce.cli.trace"], "MOST_PHASES", 60)
    code, out, err = trace(of_two, "-o", tmp_path / "trace.json")
    events = read_events((tmp_path / "trace.json").read_text())
    numbers = [event["args"]["op"] for event in events if event.get("cat") == "call"]
    kept = sorted({*numbers})
    assert kept == [*range(kept[0], 8)]
    assert sorted(numbers) == sorted(2 * kept)
    assert 1 < kept[0] <= 7
    assert f"{kept[0] - 1} older ones are left out" in err
    assert (code, f"{2 * len(kept)} calls" in out) == (0, True)


def test_the_table(of_two, trace, monkeypatch):
    """Without ``-o`` the straggler is named, and there is a table with a row for each text, at most as wide as the
    terminal."""
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = trace(of_two)
        assert (code, err) == (0, "")
        assert all(len(line) <= width for line in out.splitlines())
        assert re.search(r"^rank 1 keeps the others waiting: \d\d % of their time in collectives$", out, re.MULTILINE)
        assert "5.34 MiB" in out
        assert "queue" not in out
        assert "plan" not in out
    assert "all_reduce sum float64[700001]" in out
    code, out, _ = trace(of_two, "--json")
    report = json.loads(out)
    assert [row["calls"] for row in report["rows"] if row["text"] == CALLS[0]] == [3]
    assert all(row["predicted_seconds"] is None for row in report["rows"])
    (named,) = report["stragglers"]
    assert (named["group"], named["rank"]) == ("world", 1)
    spent = {rank: sum(row["rank_seconds"][rank]["seconds"] for row in report["rows"]) for rank in (0, 1)}
    assert spent[0] > spent[1] + 0.8 * LATE_S
    assert 0.5 < named["share"] <= 1


def row_of(text, calls=12_345, queue=None, waited_for=((1, 0.9), (0, 0.06), (2, 0.04)), **fields):
    """Return a row of 4 ranks, whose calls took 1 s on rank 1 and 3 s on each other rank."""
    row = SummaryRow("g", "t", text, 1_234_567, calls, 1, 0.123e-3, 98.7e-6, queue, 0.5, waited_for,
                     ((0, 3.0), (1, 1.0), (2, 3.0), (3, 3.0)))  # fmt: skip
    return row._replace(**fields)


@pytest.mark.parametrize("width", [60, 80, 100, 130, 200])
@pytest.mark.parametrize("queue", [None, 0.0123])
def test_a_narrow_table_has_whole_words(monkeypatch, capsys, width, queue):
    """At every width all words and numbers of the table are whole, and calls are broken at spaces; columns of queues
    and plans are there only if they have content."""
    monkeypatch.setenv("COLUMNS", str(width))
    texts = ["all_reduce sum float32[100000]", "reduce_scatter sum bfloat16[1024]", "barrier"]
    rows = [row_of(text, queue=queue) for text in texts]
    _show(rows, [None, queue, None])
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines()), out
    assert "…" not in out
    words = set(re.sub("[┃│┏━┳┓┡╇┩└─┴┘]", " ", out).split())
    due = {*" ".join(texts).split(), "1.18", "MiB", "us", "98.7", "waiting", "50", "rank", "90", "%,"}
    assert due <= words
    assert words & {"queue", "plan"} == ({"queue", "plan"} if queue and width >= 80 else set())
    assert ("12.3" in words) == (queue is not None and width >= 80)
    if width >= 80:
        assert {"123", "median"} <= words
    if width >= (100 if queue else 80):
        assert {"12345", "10", "GB/s", "count"} <= words
    if width >= 200:
        assert all(text in out for text in texts)
        assert "rank 1 90 %, rank 0 6 %, rank 2 4 %" in out


def test_the_straggler_of_a_trace():
    """The share is that of the other ranks' time in all calls of the group; long calls count more than short ones."""
    waits = row_of("a", waiting=0.5, waited_for=((1, 0.9), (0, 0.1)))  # 10 s of all ranks, 5 s of them waiting
    assert straggler([waits]) == (1, pytest.approx(4.5 / 9))
    short = row_of("b", waiting=0.9, waited_for=((2, 1.0),), rank_seconds=((0, 1.0), (1, 1.0), (2, 0.1), (3, 1.0)))
    assert straggler([waits, short]) == (1, pytest.approx(4.5 / (10 + 3.1 - 2)))
    assert straggler([row_of("c", waiting=0.0, waited_for=())])[1] == 0
    assert straggler([row_of("d", waiting=0.0, waited_for=(), rank_seconds=((0, 1.0),))]) == (0, 0.0)


def test_without_a_straggler_the_table_says_so(monkeypatch, capsys):
    """If waits are short, no rank is named."""
    monkeypatch.setenv("COLUMNS", "80")
    _show([row_of("barrier", waiting=0.05)], [None])
    assert "no rank keeps the others waiting for 10 % of their time in collectives\n" in capsys.readouterr().out


def endless(rendezvous, folder):
    group = member(rendezvous)
    while True:
        summed(group, 20)
        Path(folder, f"{group.rank}").touch()


def test_a_killed_rank_leaves_a_readable_file(tmp_path):
    """After SIGKILL the file has all calls up to the one that ran, without a gap, and none is malformed."""
    flags = tmp_path / "flags"
    flags.mkdir()

    def kill(pids):
        deadline = time.monotonic() + 30
        while len([*flags.iterdir()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)

    results = traced(2, endless, tmp_path / "trace", flags, begun=kill, check=False)
    assert isinstance(results[1], Died)
    group, notes = only_group(tmp_path / "trace")
    for found in group.ranks.values():
        numbers = [call.number for call in found.calls]
        assert numbers == [*range(1, len(numbers) + 1)]
        assert len(numbers) > 3
        assert all(call.end_ns is not None for call in found.calls[:-1])
    assert group.ranks[0].calls[-1].outcome == BROKEN  # it waited for rank 1
    assert group.ranks[0].calls[-1].parts[-1].waited_for == 1
    assert not [note for note in notes if "malformed" in note or "truncated" in note]


def one_never_calls(rendezvous, folder):
    """Rank 2 does not make the third call. Return what the trace of rank 0 shows during its wait, and its error."""
    group = member(rendezvous, timeout_s=1)
    summed(group)
    summed(group)
    if group.rank == 2:
        time.sleep(2)
        group.close()
        return None
    shown = []

    def look():
        shown.append(only_group(folder)[0].ranks[0].calls[-1])

    timer = threading.Timer(0.6, look)
    timer.start()
    with pytest.raises(ReductionError) as caught:
        summed(group, 7)
    timer.join()
    group.close()
    return shown[0], type(caught.value).__name__


def test_a_call_that_times_out_is_in_its_trace(tmp_path, trace):
    """A wait is recorded before it ends, and to its end if the group is aborted. It names the missing rank."""
    (shown, error), other, _ = traced(3, one_never_calls, tmp_path, tmp_path)
    assert {error, other[1]} == {"CollectiveTimeout"}
    assert (shown.number, shown.end_ns, shown.parts[-1].phase, shown.parts[-1].waited_for) == (3, None, Phase.WAIT, 2)
    assert 0.3e9 < shown.last_ns - shown.begin_ns < 2e9
    group, notes = only_group(tmp_path)
    assert notes == ()
    assert group.ranks[2].calls[-1].number == 2
    for rank in (0, 1):
        call = group.ranks[rank].calls[-1]
        wait = call.parts[-1]
        assert (call.number, call.text, call.outcome) == (3, "all_reduce sum int64[7]", BROKEN)
        assert (wait.phase, wait.waited_for) == (Phase.WAIT, 2)
        assert wait.end_ns - wait.begin_ns > 0.9e9
        assert wait.end_ns <= call.end_ns < wait.end_ns + 1e9
        assert [part.phase for part in call.parts].count(Phase.WAIT) == 1
    (row,) = [row for row in summarize([group], align([group])) if row.text.endswith("[7]")]
    assert (row.calls, row.unfinished, row.seconds) == (1, 1, None)
    assert row.waiting > 0.9
    assert row.waited_for == ((2, 1.0),)
    assert trace(tmp_path, "-o", tmp_path / "out.json")[0] == 0
    assert '"outcome":"the group was aborted"' in (tmp_path / "out.json").read_text()


def in_threads(rendezvous):
    """Make calls of two groups in a thread each, and of one of them in a third one."""
    one, two = member(rendezvous), member(rendezvous, name="second")

    def run(group, count):
        for _ in range(count):
            summed(group, 10)

    threads = [threading.Thread(target=run, args=pair) for pair in ((one, 40), (two, 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = threading.Thread(target=run, args=(one, 5))
    later.start()
    later.join()
    one.close()
    two.close()


def test_threads_and_several_groups(tmp_path, trace):
    """Each group has files of its own; calls of several threads are in the order of their numbers."""
    traced(2, in_threads, tmp_path)
    found = read_directory(tmp_path)
    (groups,) = found.runs
    assert sorted(group.name for group in groups) == ["second", "world"]
    for group in groups:
        for of_rank in group.ranks.values():
            assert [call.number for call in of_rank.calls] == [*range(1, 46 if group.name == "world" else 31)]
            assert all(a.end_ns <= b.begin_ns for a, b in zip(of_rank.calls, of_rank.calls[1:], strict=False))
    assert trace(tmp_path, "-o", tmp_path / "all.json")[0] == 0
    events = read_events((tmp_path / "all.json").read_text())
    assert len({event["pid"] for event in events}) == 4


def test_runs_in_one_directory_are_apart(tmp_path, trace):
    """Files of two runs are two runs, by their processes; the command shows the last one, or the one of ``--run``."""
    traced(2, some_calls, tmp_path)
    traced(2, in_threads, tmp_path)
    code, out, err = trace(tmp_path, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert {row["group"] for row in report["rows"]} == {"world", "second"}
    assert any("2 runs" in note for note in report["notes"])
    first = json.loads(trace(tmp_path, "--json", "--run", "1")[1])
    assert {row["text"] for row in first["rows"]} == {*CALLS}
    code, _, err = trace(tmp_path, "--run", "3")
    assert (code, "has 2 runs." in err, "--run 1 to 2" in err) == (2, True, True)


def test_a_run_that_does_not_exist(of_two, trace):
    """The number of a run beyond the only one is refused, in the singular."""
    code, _, err = trace(of_two, "--run", "2")
    assert (code, "has 1 run." in err) == (2, True)
    assert err.rstrip().endswith("--run 1")


def without(rendezvous):
    assert crossreduce.trace is not None
    group = member(rendezvous)
    summed(group)
    assert group.traced is None
    group.close()


def test_no_trace_without_the_variable(tmp_path, monkeypatch):
    """If CROSSREDUCE_TRACE is not set or empty, no file is written."""
    monkeypatch.chdir(tmp_path)
    ranks(2, without)
    ranks(2, without, environment=[{"CROSSREDUCE_TRACE": ""}] * 2)
    assert [*tmp_path.iterdir()] == []


def many(rendezvous, calls):
    group, _ = group_of(rendezvous)
    x = np.ones(4)
    for _ in range(calls):
        group.all_reduce(x)
    group.close()


def test_a_full_file_keeps_the_newest_calls(tmp_path):
    """A file has at most CROSSREDUCE_TRACE_BYTES; then new records replace the oldest, and a note says so."""
    traced(1, many, tmp_path, 9000, environment=[{"CROSSREDUCE_TRACE_BYTES": "256K"}])
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 1 << 18
    group, notes = only_group(tmp_path)
    numbers = [call.number for call in group.ranks[0].calls]
    assert numbers == [*range(9001 - len(numbers), 9001)]
    assert 1000 < len(numbers) < 9000
    assert all([part.phase for part in call.parts] == [Phase.COPY_OUT] for call in group.ranks[0].calls[1:])
    assert any("were replaced" in note for note in notes)


def test_a_growing_file_keeps_all_calls(tmp_path):
    """Below its limit a file grows, and its end is cut to what is used."""
    traced(1, many, tmp_path, 9000, environment=[{"CROSSREDUCE_TRACE_BYTES": "4M"}])
    (path,) = tmp_path.iterdir()
    group, notes = only_group(tmp_path)
    assert [call.number for call in group.ranks[0].calls] == [*range(1, 9001)]
    assert notes == ()
    assert 9000 * 2 * 32 < path.stat().st_size < 9000 * 2 * 32 + (1 << 18) + (1 << 13)  # texts, facts


def on_a_full_disk(rendezvous, folder):
    group, _ = group_of(rendezvous)
    warnings = Warnings()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_400_000, resource.RLIM_INFINITY))
    crossreduce.trace.start(folder)
    x = np.ones(4)
    for _ in range(9000):
        assert group.all_reduce(x)[0] == group.size
    group.close()
    return warnings.texts


def test_a_full_disk_does_not_fail_a_call(tmp_path):
    """If the file cannot grow, calls go on, the newest records are kept, and there is one warning per file."""
    for texts in ranks(2, on_a_full_disk, tmp_path):
        (text,) = texts
        assert "could not grow (File too large)" in text
    group, notes = only_group(tmp_path)
    assert [found.calls[-1].number for found in group.ranks.values()] == [9000, 9000]
    assert all(len(found.calls) < 9000 for found in group.ranks.values())
    assert sum("could not grow" in note for note in notes) == 2


def in_two_groups(rendezvous):
    warnings = Warnings()
    for name in ("world", "second"):
        group = member(rendezvous, name=name)
        summed(group)
        assert group.traced is None
        group.close()
    return warnings.texts


def test_an_unwritable_directory_is_one_warning(tmp_path):
    """If the directory cannot be made, groups work, and each process warns once."""
    (tmp_path / "file").touch()
    for texts in traced(2, in_two_groups, tmp_path / "file" / "trace"):
        (text,) = texts
        assert "cannot write its trace" in text
    for texts in traced(1, in_two_groups_traced, tmp_path, environment=[{"CROSSREDUCE_TRACE_BYTES": "many"}]):
        (text,) = texts
        assert "CROSSREDUCE_TRACE_BYTES is ignored" in text
    for texts in traced(1, in_two_groups_traced, tmp_path, environment=[{"CROSSREDUCE_TRACE_BYTES": "9" * 5000}]):
        (text,) = texts
        assert "CROSSREDUCE_TRACE_BYTES is ignored" in text


def in_two_groups_traced(rendezvous):
    warnings = Warnings()
    for name in ("world", "second"):
        group = member(rendezvous, name=name)
        summed(group)
        assert group.traced is not None
        group.close()
    return warnings.texts


def by_function(rendezvous, folder):
    group = member(rendezvous)
    summed(group, 3)
    with crossreduce.trace.recording(folder):
        summed(group, 5)
        later = member(rendezvous, name="later")
        summed(later, 7)
    summed(group, 9)
    crossreduce.trace.start(folder, "1M")
    summed(group, 11)
    crossreduce.trace.stop()
    summed(later, 13)
    later.close()
    group.close()


def test_the_functions_trace_the_calls_between_them(tmp_path):
    """``recording``, ``start`` and ``stop`` trace the calls in between, of groups made before and in between."""
    ranks(2, by_function, tmp_path)
    (groups,) = read_directory(tmp_path).runs
    texts = {group.name: [call.text for call in group.ranks[1].calls] for group in groups}
    assert texts == {
        "world": ["all_reduce sum int64[5]", "all_reduce sum int64[11]"],
        "later": ["all_reduce sum int64[7]"],
    }
    assert len([*tmp_path.glob("rank1.*.2.trace")]) == 2


@pytest.mark.parametrize("nbytes", [1, "1K", "many", -1, 1 << 50, "9" * 5000])
def test_invalid_limits(tmp_path, nbytes):
    """An invalid limit is an error, and nothing is started."""
    with pytest.raises(ArgumentError, match=r"nbytes must be|limit of a trace|nbytes is too long"):
        crossreduce.trace.start(tmp_path / "new", nbytes)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("directory", [None, "", "a\0b", b"a", 3])
def test_invalid_directories(tmp_path, monkeypatch, directory):
    """What is not the name of a directory is an error, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="not the name of a directory"):
        crossreduce.trace.start(directory)
    assert [*tmp_path.iterdir()] == []


def test_a_group_that_is_made_during_stop_is_not_traced(tmp_path, monkeypatch):
    """``register`` waits for a ``stop`` in another thread, and then does not trace the new group."""
    entered, opened, order = threading.Event(), [], []
    old, new = SimpleNamespace(lock=None, traced=None), SimpleNamespace(traced=None)

    def acquire(timeout):
        del timeout
        entered.set()
        thread.join(0.3)
        order.append("stopped")
        return False

    def register():
        entered.wait(10)
        tracing.register(new)
        order.append("registered")

    old.lock, old.name = SimpleNamespace(acquire=acquire), "old"
    thread = threading.Thread(target=register)
    monkeypatch.setattr(tracing, "_GROUPS", Groups([old]))
    monkeypatch.setattr(tracing, "_STARTED", [tracing._Settings(tmp_path, 1 << 20)])
    monkeypatch.setattr(tracing, "_open", lambda group, settings: opened.append((group, settings)))
    thread.start()
    crossreduce.trace.stop()
    thread.join()
    assert order == ["stopped", "registered"]
    assert opened == []


class Groups(list):
    """A set of groups that need no hash."""

    add = list.append


def test_start_in_an_unwritable_directory(tmp_path):
    """``start`` raises if the directory cannot be made."""
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="a trace cannot be written to"):
        crossreduce.trace.start(tmp_path / "file" / "trace")


# Several hosts


def across_hosts(rendezvous):
    """Make calls of various sizes between hosts; another rank is late each time."""
    comm, transport = joined(rendezvous)
    for k, size in enumerate((10, 1000, 100_000, 10, 300_000, 10, 1000, 50)):
        time.sleep(0.01 if k % comm.size == comm.rank else 0)
        x = np.ones(size, np.float32)
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
        assert x[0] == comm.size
    comm.plan_on(Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=2, latency_s=1e-5))
    x = np.ones(100_000, np.float32)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    comm.close()
    transport.close()


@pytest.fixture(scope="module")
def of_hosts(tmp_path_factory):
    """Return the folder with the trace of ``across_hosts``, with ranks 0 to 2 on one host, 3 and 4 on another."""
    folder = tmp_path_factory.mktemp("hosts")
    traced(5, across_hosts, folder, environment=on("a", "a", "a", "b", "b"))
    return folder


def test_phases_between_hosts(of_hosts):
    """Leaders compare each call with the other hosts and exchange data; other ranks only wait for their host."""
    group, _ = only_group(of_hosts)
    assert group.hosts == ((0, 1, 2), (3, 4))
    for rank, found in group.ranks.items():
        assert len(found.calls) == 10
        for call in found.calls:
            kinds = [part.phase for part in call.parts]
            leader = rank != 2
            compares = call.text.startswith("links between hosts planned as ")  # plan_on, which moves no data
            assert compares == (call.number == 9)
            assert kinds.count(Phase.AGREE) == leader
            assert (Phase.BETWEEN_HOSTS in kinds) == (leader and not compares)
            waits = {part.waited_for for part in call.parts if part.phase is Phase.WAIT}
            assert waits <= {0, 1, 2} - {rank} if rank < 3 else waits <= {3, 4} - {rank}
            at = call.begin_ns
            for part in call.parts:
                assert part.begin_ns == at
                at = part.end_ns


def shifted(folder, target, clock, add_ns, ranks_):
    """Copy a trace; the files of some ranks get another clock, to whose times nanoseconds are added."""
    target.mkdir()
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".trace" and int(path.name[4 : path.name.index(".")]) in ranks_:
            length, texts_at, records_at, _, _, count, _, *clocks = struct.unpack_from("=6Qq6q", data, 8)
            facts = Facts.decoded(bytes(data[112 : 112 + length]))._replace(clock=clock).encoded()
            assert len(facts) <= texts_at - 112
            struct.pack_into("=Q", data, 8, len(facts))
            data[112 : 112 + len(facts)] = facts
            clocks[0] += add_ns
            clocks[3] += add_ns
            struct.pack_into("=6q", data, 64, *clocks)
            for k in range(count):
                at = records_at + 32 * k + 8
                begin, end = struct.unpack_from("=2q", data, at)
                struct.pack_into("=2q", data, at, begin + add_ns, end + add_ns if end else 0)
        (target / path.name).write_bytes(data)
    return target


def test_clocks_of_hosts_are_aligned(of_hosts, tmp_path, trace):
    """If the clock of the second host differs, the calls' messages give the difference within the stated error."""
    add = 123_456_789_012
    group, _ = only_group(shifted(of_hosts, tmp_path / "shifted", "another", add, (3, 4)))
    shifts = align([group])
    shift = shifts["another"]
    assert shift.error_ns is not None
    assert abs(shift.add_ns + add) <= shift.error_ns < 50_000_000
    original, _ = only_group(of_hosts)
    assert align([original]) == {original.ranks[0].facts.clock: ClockShift(0, 0)}
    code, _, err = trace(tmp_path / "shifted", "-o", tmp_path / "out.json")
    assert code == 0
    assert "was aligned with an error of at most" in err
    read_events((tmp_path / "out.json").read_text())


def test_the_tightest_limits_count(of_hosts):
    """Of several calls, the one in which a host was late limits the difference from one side, and so does the other."""
    group, _ = only_group(of_hosts)
    template = group.ranks[0].calls[0]

    def compared(rank, clock, spans):
        calls = tuple(
            template._replace(number=number, parts=(CallPart(Phase.AGREE, begin, end, 1, None),))
            for number, (begin, end) in enumerate(spans, 1)
        )
        found = group.ranks[rank]
        return found._replace(facts=found.facts._replace(clock=clock), calls=calls)

    # The clock of rank 3 is 1000 behind, and messages take 10: rank 3 is late in the first call, rank 0 in the second.
    here = compared(0, "one", [(0, 510), (2000, 2015)])
    there = compared(3, "two", [(-500, -485), (600, 1010)])
    shifts = align([group._replace(ranks={0: here, 3: there})])
    assert shifts == {"one": ClockShift(0, 0), "two": ClockShift(1000, 10)}


def test_without_common_calls_the_calendar_is_used(of_hosts, tmp_path):
    """If no call can be compared, the calendar clocks align the hosts, with an unknown error."""
    group, _ = only_group(shifted(of_hosts, tmp_path / "shifted", "another", -(10**9), (3, 4)))
    alone = {rank: of._replace(calls=of.calls[: 1 if rank > 2 else 0]) for rank, of in group.ranks.items()}
    shift = align([group._replace(ranks=alone)])["another"]
    assert shift.error_ns is None
    assert abs(shift.add_ns - 10**9) < 5_000_000  # the files were begun within milliseconds on one machine


def test_waits_for_other_hosts_name_a_rank_there(of_hosts):
    """Ranks that wait for a leader which waits for another host blame a rank of the other host."""
    group, _ = only_group(of_hosts)
    rows = summarize([group], align([group]))
    assert {rank for row in rows for rank, _ in row.waited_for} >= {0, 3}
    for row in rows:
        assert sum(share for _, share in row.waited_for) <= 1 + 1e-9


def test_predictions_are_those_of_the_schedule(of_hosts, tmp_path, trace):
    """Calls on measured links have the simulated seconds of the hosts' schedule beside them; the others have none,
    unless ``--topology`` gives the links."""
    code, out, err = trace(of_hosts, "-o", tmp_path / "out.json")
    assert code == 0, err
    events = read_events((tmp_path / "out.json").read_text())
    plans = [event for event in events if event.get("cat") == "plan"]
    assert [event["args"]["op"] for event in plans] == [10] * 5
    topology = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=2, latency_s=1e-5)
    schedule = host_schedule(topology, ((0, 1, 2), (3, 4)), "all_reduce", 1 << 19, None)
    seconds = simulate(schedule, topology, 400_000).seconds
    assert {event["dur"] for event in plans} == {round(seconds * 1e6, 3)}
    slow = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=1, latency_s=1e-5)
    (tmp_path / "slow.json").write_text(slow.to_json())
    rows = json.loads(trace(of_hosts, "--json", "--topology", tmp_path / "slow.json")[1])["rows"]
    by_text = {row["text"]: row["predicted_seconds"] for row in rows}
    assert by_text["all_reduce sum float32[100000]"] > 1.5 * seconds
    assert by_text["all_reduce sum float32[10]"] > 0
    del out


def test_predictions_of_exact_sums_are_for_the_bytes_that_travel():
    """The prediction of an exact float32 all-reduce is that of a default one with 1.5 times the bytes, as partial sums
    are float64 and results float32; maxima and integers are sent as they are."""
    links = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0", "host2/cpu:0"], gb_per_s=2, latency_s=1e-5)
    group = trace_calls.GroupTrace("world", "token", ((0, 1), (2,), (3,)), {}, ())
    predict = _prediction(links)

    def seconds(op, dtype, size):
        text, nbytes = f"all_reduce {op} {dtype}[{size}]", size * itemsize(dtype)
        return predict(group, trace_calls.TracedCall(1, text, nbytes, 0, 1, 0, None, ()))

    assert seconds("exact_sum", "float32", 200_000) == seconds("sum", "float32", 300_000) > 1e-4
    assert seconds("exact_mean", "float64", 200_000) == seconds("mean", "float64", 300_000)
    assert seconds("exact_sum", "float16", 200_000) == seconds("sum", "int8", 1_000_000)
    assert seconds("max", "float32", 200_000) == seconds("sum", "int32", 200_000)
    assert seconds("exact_product", "float32", 8) is None


# Bad input


def test_bad_directories(tmp_path, trace):
    """A missing folder, and one without traces, are errors that say what to do."""
    code, _, err = trace(tmp_path / "missing")
    assert code == 2
    assert "cannot be read" in err
    code, _, err = trace(tmp_path)
    assert code == 2
    assert "has no trace that can be read" in err
    (tmp_path / f"rank0.{'a' * 16}.trace").write_bytes(b"nonsense" * 100)
    code, _, err = trace(tmp_path)
    assert code == 2
    assert "not a trace of crossreduce" in err


def rows_of(content):
    return [row for part in content.records for row in RECORD.iter_unpack(part)]


def copied(of_two, target):
    target.mkdir()
    for path in of_two.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return sorted(target.iterdir())


def test_a_truncated_file_is_read_to_its_end(of_two, tmp_path, trace):
    """Of a truncated file the records before the cut are read, and a note says how many are missing."""
    first, second = copied(of_two, tmp_path / "cut")
    whole = read_trace(first)
    first.write_bytes(first.read_bytes()[: -32 * 10 - 5])
    content = read_trace(first)
    assert rows_of(content) == rows_of(whole)[:-11]
    assert content.notes == (f"it is truncated: 11 of {len(rows_of(whole))} records are missing",)
    second.write_bytes(second.read_bytes()[:4100])
    code, _, err = trace(tmp_path / "cut", "-o", tmp_path / "o.json")
    assert code == 0
    assert "truncated before its first record" in err
    assert "has no file of rank 1." in err
    read_events((tmp_path / "o.json").read_text())


def test_malformed_files_are_notes(of_two, tmp_path):
    """Random bytes in a header or in records raise nothing else than the documented errors."""
    draw = np.random.default_rng(0)
    first, second = copied(of_two, tmp_path / "bad")
    data = second.read_bytes()
    for _ in range(200):
        bad = bytearray(data)
        at = int(draw.integers(8, 400)) if draw.integers(2) else int(draw.integers(8, len(bad)))
        bad[at : at + 8] = draw.bytes(8)
        second.write_bytes(bad)
        found = read_directory(tmp_path / "bad")
        assert sum(len(group.ranks) for run in found.runs for group in run) in (1, 2)
    assert first.exists()


def test_corrupt_sizes_need_no_memory(of_two, tmp_path):
    """Numbers of records that the file does not have, and calls of impossible size, are notes or ignored."""
    first, second = copied(of_two, tmp_path / "bad")
    data = bytearray(second.read_bytes())
    whole = len(rows_of(read_trace(second)))
    for capacity, count in ((1 << 28, 1 << 28), (1 << 36, 1 << 62)):
        struct.pack_into("=2Q", data, 40, capacity, count)
        second.write_bytes(data)
        tracemalloc.start()
        content = read_trace(second)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(rows_of(content)) in (whole, whole - 1)
        assert "is truncated" in content.notes[0]
        assert peak < 4 << 20
    for capacity, count in ((0, 5), (1 << 60, 5)):
        struct.pack_into("=2Q", data, 40, capacity, count)
        second.write_bytes(data)
        with pytest.raises(ValueError, match="header is malformed"):
            read_trace(second)
    with first.open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(first)


@pytest.mark.parametrize("digits", [1, 18, 19, 4000, 5000])
def test_impossible_shapes_have_no_bytes(digits):
    """The bytes of an array from a corrupt text are those of an array that can exist, or unknown."""
    text = f"all_reduce sum float32[{'9' * digits}]"
    assert trace_calls.array_nbytes(text, 2) == (36 if digits == 1 else None)


def test_other_kinds_of_files_are_notes(of_two, tmp_path):
    """A FIFO with the name of a trace or of a topology is not waited for."""
    copied(of_two, tmp_path / "fifo")
    for name in ("rank0.ab.trace", "topology.ab.1.json"):
        os.mkfifo(tmp_path / "fifo" / name)
    found = read_directory(tmp_path / "fifo")
    assert sorted(found.notes) == [
        f"{name} cannot be read: it is not a regular file." for name in ("rank0.ab.trace", "topology.ab.1.json")
    ]
    assert len(found.runs) == 1


def test_processes_of_containers_are_apart(of_two, tmp_path):
    """Two runs whose processes have equal pids, as in containers, are two runs."""
    target = tmp_path / "both"
    copied(of_two, target)
    for path in of_two.iterdir():
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("=Q", data, 8)
        facts = Facts.decoded(bytes(data[112 : 112 + length]))
        assert len(facts.process) == 32
        text = facts._replace(token="ab", process="1f").encoded()
        struct.pack_into("=Q", data, 8, len(text))
        data[112 : 112 + len(text)] = text
        (target / path.name.replace(facts.token, "ab")).write_bytes(data)
    assert [len(run) for run in read_directory(target).runs] == [1, 1]


def test_a_trace_without_calls_says_so(of_two, tmp_path, trace):
    """If no call was recorded, a note says so."""
    for path in copied(of_two, tmp_path / "empty"):
        data = bytearray(path.read_bytes())
        struct.pack_into("=Q", data, 48, 0)
        path.write_bytes(data)
    code, out, err = trace(tmp_path / "empty")
    assert (code, out) == (0, "")
    assert "no calls were recorded" in err


def of_many_shapes(rendezvous, shapes):
    group = member(rendezvous)
    for size in range(1, shapes + 1):
        summed(group, size)
    group.close()


def test_many_shapes(tmp_path, trace):
    """The calls of thousands of shapes have texts; without room for them, a note says so. The table has a limit."""
    traced(1, of_many_shapes, tmp_path / "large", 3000)
    group, notes = only_group(tmp_path / "large")
    assert {call.text for call in group.ranks[0].calls} == {f"all_reduce sum int64[{k}]" for k in range(1, 3001)}
    assert notes == ()
    code, out, _ = trace(tmp_path / "large")
    assert code == 0
    assert "and 2900 more rows" in out
    assert len(out.splitlines()) < 1000
    traced(1, of_many_shapes, tmp_path / "small", 3000, environment=[{"CROSSREDUCE_TRACE_BYTES": "512K"}])
    group, notes = only_group(tmp_path / "small")
    unknown = sum(call.text == "?" for call in group.ranks[0].calls)
    assert unknown > 500
    assert f'the texts of {unknown} calls had no room, so they are "?"' in "".join(notes)


def test_the_reader_and_the_writer_agree_on_texts():
    """The reader leaves out the op that a rank writes when it leaves the group."""
    assert trace_calls.LEFT == LEFT
