"""Traces of ranks: the content of the files, also after a rank was killed, and when files are written."""

import itertools
import os
import resource
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
from members import Warnings, array_group, member, starter, summed
from ranks import Died, ranks
from trace_events import read_events
from traced_ranks import CALLS, LATE_S, in_threads, only_group, traced

import crossreduce.trace
from crossreduce import ArgumentError, CollectiveTimeout
from crossreduce.observe.traces import recording as tracing
from crossreduce.observe.traces.calls import read_directory
from crossreduce.observe.traces.clocks import align
from crossreduce.observe.traces.format import Phase
from crossreduce.observe.traces.summary import summarize
from crossreduce.ranks.intra_host.shared_memory import BROKEN

WORK = {Phase.COPY_IN, Phase.REDUCE, Phase.COPY_OUT}


def test_a_trace_has_each_call_of_each_rank(of_two):
    """The files of two ranks contain all calls, prepared or not, with numbers, texts, bytes and outcomes."""
    group, notes = only_group(of_two)
    assert (group.name, group.hosts, sorted(group.ranks), notes) == ("world", ((0, 1),), [0, 1], ())
    nbytes = [32] * 3 + [5_600_008] * 2 + [None, 5_600_008]
    due = [*zip(range(1, 8), CALLS, nbytes, [0] * 7, strict=True)]
    for rank, found in group.ranks.items():
        assert [(call.number, call.text, call.nbytes, call.outcome) for call in found.calls] == due
        assert (found.facts.rank, found.facts.group) == (rank, "world")
    assert len({found.facts.pid for found in group.ranks.values()}) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in of_two.iterdir())


def test_phases_are_those_of_the_program(of_two):
    """A small all-reduce copies in and reduces, a broadcast copies in on the root and out elsewhere, and a barrier only
    waits. A call's phases follow each other without a gap, in the order of stages. No rank waits for itself."""
    group, _ = only_group(of_two)
    for rank, found in group.ranks.items():
        kinds = [[part.phase for part in call.parts if part.phase in WORK] for call in found.calls]
        assert kinds[0] == kinds[1] == [Phase.COPY_IN, Phase.REDUCE]
        assert {*kinds[3]} == WORK
        # Rank 1 is the root. If other ranks may read its memory, it copies nothing.
        if rank == 1:
            assert {*kinds[4]} <= {Phase.COPY_IN}
        else:
            assert {*kinds[4]} == {Phase.COPY_OUT}
        assert kinds[5] == []
        last_end = 0
        for call in found.calls:
            ends = [call.begin_ns, *(part.end_ns for part in call.parts)]
            assert [part.begin_ns for part in call.parts] == ends[:-1]
            times = [last_end, *ends, call.end_ns]
            assert times == sorted(times)
            assert call.begin_ns < call.end_ns
            last_end = call.end_ns
            stages = [part.stage for part in call.parts]
            assert stages == sorted(stages)
            assert all(part.waited_for == 1 - rank for part in call.parts if part.phase is Phase.WAIT)
        # A call ends soon after its last phase. The minimum, since the rank may lose its CPU in between.
        assert min(call.end_ns - call.parts[-1].end_ns for call in found.calls if call.parts) < 20_000


def test_a_wait_is_for_the_late_rank(of_two):
    """Rank 0 waits for rank 1 for the time by which rank 1 is late, and the summary names rank 1."""
    group, _ = only_group(of_two)
    first = next(part for part in group.ranks[0].calls[-1].parts if part.phase is Phase.WAIT)
    assert first.waited_for == 1
    assert (first.end_ns - first.begin_ns) / 1e9 > 0.8 * LATE_S
    assert first.end_ns >= group.ranks[1].calls[-1].begin_ns  # both ranks have the same clock
    (row,) = (row for row in summarize([group], align([group])) if row.text == CALLS[-1])
    assert (row.calls, row.unfinished, row.waited_for[0][0]) == (2, 0, 1)
    assert row.waiting > 0.3
    assert row.gb_per_s == pytest.approx(5_600_008 / row.seconds / 1e9)


def endless(rendezvous, started):
    group = member(rendezvous)
    for number in itertools.count():
        summed(group, 20)
        if number == 50:
            started.ready()


def test_a_killed_rank_leaves_a_readable_file(tmp_path):
    """After SIGKILL the file contains all calls up to the running one, without a gap, and no record is malformed."""
    with starter(2) as started:

        def kill(pids):
            started.wait()
            os.kill(pids[1], signal.SIGKILL)

        results = traced(2, endless, tmp_path, started, begun=kill, check=False)
    assert isinstance(results[1], Died)
    group, notes = only_group(tmp_path)
    for found in group.ranks.values():
        assert [call.number for call in found.calls] == [*range(1, len(found.calls) + 1)]
        assert len(found.calls) > 3
        assert all(call.end_ns is not None for call in found.calls[:-1])
    last = group.ranks[0].calls[-1]
    assert (last.outcome, last.parts[-1].waited_for) == (BROKEN, 1)
    assert not [note for note in notes if "malformed" in note or "truncated" in note]


def one_never_calls(rendezvous, folder):
    """Rank 2 does not make the third call. Return this call in the trace while this rank waits, and its error."""
    group = member(rendezvous, timeout_s=1)
    summed(group)
    summed(group)
    if group.rank == 2:
        time.sleep(1.5)
        group.close()
        return None
    shown = []
    timer = threading.Timer(0.6, lambda: shown.append(only_group(folder)[0].ranks[0].calls[-1]))
    timer.start()
    with pytest.raises(CollectiveTimeout) as caught:
        summed(group, 7)
    timer.join()
    group.close()
    return shown[0], str(caught.value)


def test_a_call_that_times_out_is_in_its_trace(tmp_path, trace):
    """The trace shows a wait already before it ends, and with its end after the group was aborted. The wait and the
    error name the missing rank. The error also contains the last call of that rank."""
    (shown, error), (_, same), _ = traced(3, one_never_calls, tmp_path, tmp_path)
    assert error == same
    assert error.startswith('rank 2 did not complete op 3, all_reduce sum int64[7], of group "world", within the')
    assert "its last call was op 2, all_reduce sum int64[1000]" in error
    assert (shown.number, shown.end_ns, shown.parts[-1].phase, shown.parts[-1].waited_for) == (3, None, Phase.WAIT, 2)
    assert 0.3e9 < shown.last_ns - shown.begin_ns < 2e9
    group, notes = only_group(tmp_path)
    assert (notes, group.ranks[2].calls[-1].number) == ((), 2)
    for rank in (0, 1):
        call = group.ranks[rank].calls[-1]
        (wait,) = (part for part in call.parts if part.phase is Phase.WAIT)
        assert (call.number, call.text, call.outcome) == (3, "all_reduce sum int64[7]", BROKEN)
        assert (wait, wait.waited_for) == (call.parts[-1], 2)
        assert wait.begin_ns + 0.9e9 < wait.end_ns <= call.end_ns < wait.end_ns + 1e9
    (row,) = [row for row in summarize([group], align([group])) if row.text.endswith("[7]")]
    assert (row.calls, row.unfinished, row.seconds, row.waited_for) == (1, 1, None, ((2, 1.0),))
    assert row.waiting > 0.9
    assert trace(tmp_path, "-o", tmp_path / "out.json")[0] == 0
    assert '"outcome":"the group was aborted"' in (tmp_path / "out.json").read_text()


def test_threads_and_several_groups(tmp_path, trace):
    """Each group has files of its own. The calls of several threads are in the order of their numbers."""
    traced(2, in_threads, tmp_path)
    (groups,) = read_directory(tmp_path).runs
    assert sorted(group.name for group in groups) == ["second", "world"]
    for group in groups:
        for of_rank in group.ranks.values():
            count = 45 if group.name == "world" else 30
            assert [call.number for call in of_rank.calls] == [*range(1, count + 1)]
            assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(of_rank.calls))
    assert trace(tmp_path, "-o", tmp_path / "all.json")[0] == 0
    events = read_events((tmp_path / "all.json").read_text())
    assert len({event["pid"] for event in events}) == 4


def many(rendezvous, calls):
    group, x = array_group(member(rendezvous)), np.ones(4)
    for _ in range(calls):
        group.all_reduce(x)
    group.close()


@pytest.mark.parametrize("limit", ["256K", "4M"])
def test_a_file_grows_to_its_limit(tmp_path, limit):
    """Up to its limit, CROSSREDUCE_TRACE_BYTES, a file grows and contains all calls; its unused end is cut off. At the
    limit new records replace the oldest ones, and a note says so."""
    traced(1, many, tmp_path, 9000, environment=[{"CROSSREDUCE_TRACE_BYTES": limit}])
    (path,) = tmp_path.iterdir()
    group, notes = only_group(tmp_path)
    numbers = [call.number for call in group.ranks[0].calls]
    assert numbers == [*range(9001 - len(numbers), 9001)]
    assert all([part.phase for part in call.parts] == [Phase.COPY_OUT] for call in group.ranks[0].calls[1:])
    if limit == "256K":
        assert path.stat().st_size <= 1 << 18
        assert 1000 < len(numbers) < 9000
        assert any("were replaced" in note for note in notes)
    else:
        assert (len(numbers), notes) == (9000, ())
        records = 9000 * 2 * 32  # bytes: each call has a record for itself and one for its phase
        assert records < path.stat().st_size < records + (1 << 18) + (1 << 13)  # plus texts and header


def on_a_full_disk(rendezvous, folder):
    group, warnings = array_group(member(rendezvous)), Warnings()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_400_000, resource.RLIM_INFINITY))
    crossreduce.trace.start(folder)
    for _ in range(9000):
        group.all_reduce(np.ones(4))
    group.close()
    return warnings.texts


def test_a_full_disk_does_not_fail_a_call(tmp_path):
    """If the file cannot grow, calls still succeed, the newest records are kept, and there is one warning per file."""
    for (text,) in ranks(2, on_a_full_disk, tmp_path):
        assert "could not grow (File too large)" in text
    group, notes = only_group(tmp_path)
    assert [found.calls[-1].number for found in group.ranks.values()] == [9000, 9000]
    assert all(len(found.calls) < 9000 for found in group.ranks.values())
    assert sum("could not grow" in note for note in notes) == 2


def in_two_groups(rendezvous, are_traced):
    warnings = Warnings()
    for name in ("world", "second"):
        group = member(rendezvous, name=name)
        summed(group)
        assert (group.traced is not None) == are_traced
        group.close()
    return warnings.texts


def test_wrong_variables(tmp_path, monkeypatch):
    """If CROSSREDUCE_TRACE is not set or empty, no file is written. If the directory cannot be created, or the limit is
    not a number of bytes, groups work, and each process logs one warning."""
    monkeypatch.chdir(tmp_path)
    assert ranks(2, in_two_groups, False) == [[], []]
    assert ranks(2, in_two_groups, False, environment=[{"CROSSREDUCE_TRACE": ""}] * 2) == [[], []]
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    for (text,) in traced(2, in_two_groups, tmp_path / "file" / "trace", False):
        assert "cannot write its trace" in text
    limits = [{"CROSSREDUCE_TRACE_BYTES": limit} for limit in ("many", "9" * 5000)]
    for (text,) in traced(2, in_two_groups, tmp_path, True, environment=limits):
        assert "CROSSREDUCE_TRACE_BYTES is ignored" in text


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
    """Calls in a ``recording`` block, and between ``start`` and ``stop``, are traced, also those of older groups."""
    ranks(2, by_function, tmp_path)
    (groups,) = read_directory(tmp_path).runs
    arrays = {group.name: [call.text.split()[-1] for call in group.ranks[1].calls] for group in groups}
    assert arrays == {"world": ["int64[5]", "int64[11]"], "later": ["int64[7]"]}
    assert len([*tmp_path.glob("rank1.*.2.trace")]) == 2


def test_invalid_arguments_of_start(tmp_path, monkeypatch):
    """Invalid limits, invalid names, and directories that cannot be created are errors. Then no file is written."""
    monkeypatch.chdir(tmp_path)
    for nbytes in (1, "1K", "many", -1, 1 << 50, "9" * 5000):
        with pytest.raises(ArgumentError, match=r"nbytes must be|limit of a trace|nbytes is too long"):
            crossreduce.trace.start(tmp_path / "new", nbytes)
    for directory in (None, "", "a\0b", b"a", 3):
        with pytest.raises(ArgumentError, match="not the name of a directory"):
            crossreduce.trace.start(directory)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="a trace cannot be written to"):
        crossreduce.trace.start(tmp_path / "file" / "trace")


def test_a_group_that_is_made_during_stop_is_not_traced(tmp_path, monkeypatch):
    """``register`` waits for a ``stop`` in another thread, and then does not trace the new group."""
    entered, opened, order = threading.Event(), [], []

    def acquire(timeout):  # ``stop`` calls it for an older group
        entered.set()
        thread.join(0.3)  # ends early if ``register`` does not wait
        order.append("stopped")
        return False

    def register():
        entered.wait(10)
        tracing.register(mock.Mock(traced=None))
        order.append("registered")

    thread = threading.Thread(target=register)
    monkeypatch.setattr(tracing, "_GROUPS", {mock.Mock(lock=mock.Mock(acquire=acquire), traced=None)})
    monkeypatch.setattr(tracing, "_STARTED", [tracing._Settings(tmp_path, 1 << 20)])
    monkeypatch.setattr(tracing, "_open", lambda *opening: opened.append(opening))
    thread.start()
    crossreduce.trace.stop()
    thread.join()
    assert (order, opened) == (["stopped", "registered"], [])
