"""The counters of a rank's calls: ``stats``, OpenMetrics texts, and the files of CROSSREDUCE_METRICS."""

import os
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from host_checks import joined, on
from members import Resources, Warnings, every_call, member, memory
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_new
from prometheus_client.parser import text_string_to_metric_families as parse_old
from ranks import ranks

from crossreduce import kernels
from crossreduce.errors import ContextError, MismatchError
from crossreduce.observe import metrics
from crossreduce.observe.counters import KINDS, CollectiveStats, Stats, WaitStats
from crossreduce.ops import ReduceOp
from crossreduce.ranks.prepared import new_calls, prepare


def parsed(text):
    """Return the samples of an OpenMetrics text: values by name and labels."""
    families = list(parse_new(text))
    assert all(family.type == "counter" for family in families)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def every_collective(rendezvous):
    """Call each collective another number of times, and return the statistics."""
    comm, x = member(rendezvous), np.ones(100, np.float32)
    assert comm.stats() == Stats("world", comm.rank, comm.size, {}, {})
    for number, call in enumerate(every_call(comm, 100).values(), 1):
        for _ in range(number):
            call()
    comm.require_same("barriers of another kind")
    with pytest.raises(MismatchError, match="differ"):
        comm.all_reduce(ReduceOp.SUM if comm.rank else ReduceOp.MAX, memory(x), memory(x))
    found = comm.stats()
    comm.close()
    assert comm.stats().total.calls == found.total.calls
    return found


def test_calls_and_bytes_of_each_collective():
    """Every collective is counted by its name, with the bytes of nccl-tests; calls that fail are not counted."""
    found = ranks(3, every_collective)
    array = 400
    due = {"all_reduce": (1, array), "reduce": (2, array), "broadcast": (3, array), "all_gather": (4, 3 * array)}
    due |= {"reduce_scatter": (5, 3 * array), "gather": (6, 3 * array), "scatter": (7, 3 * array)}
    due |= {"all_to_all": (8, 3 * array), "barrier": (9, 0), "other": (1, 0)}
    assert set(due) == set(KINDS)
    for rank, stats in enumerate(found):
        assert (stats.group, stats.rank, stats.size) == ("world", rank, 3)
        assert {name: one[:2] for name, one in stats.collectives.items()} == {
            k: (n, n * b) for k, (n, b) in due.items()
        }
        assert stats.total.calls == sum(calls for calls, _ in due.values())
        assert all(0 <= one.waiting_s <= one.seconds for name, one in stats.collectives.items() if name != "all_reduce")
        assert stats.total.between_hosts_s == 0
        # The waits for other ranks are those of the collectives, and no rank waits for itself.
        assert sum(wait.seconds for wait in stats.waits.values()) == pytest.approx(stats.total.waiting_s)
        assert rank not in stats.waits


def slow_rank(rendezvous, pause, calls):
    comm = member(rendezvous, 30, "a group")
    x = np.ones(10, np.float32)
    began = time.monotonic()
    for _ in range(calls):
        if comm.rank == 1:
            time.sleep(pause)
        comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
    took = time.monotonic() - began
    stats = comm.stats()
    comm.close()
    return stats, took


def test_the_rank_that_others_wait_for():
    """The time for which the others waited for a slow rank is counted for it, and it was the last at each call."""
    pause, calls = 0.02, 10
    found = ranks(3, slow_rank, pause, calls)
    for rank in (0, 2):
        stats, took = found[rank]
        assert stats.waits[1].seconds > 0.9 * pause * calls
        assert stats.waits[1].barriers >= calls - 2  # on a busy machine another rank may be later once
        assert stats.waits[1].seconds <= stats.total.waiting_s <= stats.total.seconds <= took
        assert str(stats).startswith(f'group "a group", rank {rank} of 3: 10 calls, 400 bytes, ')
        assert "\n  waited for rank 1: 0." in str(stats)
    slow, took = found[1]
    assert slow.total.seconds < took - 0.9 * pause * calls


def prepared(rendezvous):
    comm = member(rendezvous)
    calls, x = new_calls(comm), np.ones(1000, np.float64)
    out = np.empty_like(x)
    comm.all_reduce(ReduceOp.MAX, memory(x), memory(out))
    prepare(calls, comm, "all_reduce", ReduceOp.MAX, None, x, memory(x), out)
    for _ in range(7):
        assert calls.run(comm, "all_reduce", ReduceOp.MAX, 0, x, out) is out
    stats = comm.stats()
    comm.close()
    return stats.collectives


def test_prepared_calls_are_counted():
    """Calls that run without Python are counted as others are."""
    for collectives in ranks(2, prepared):
        assert {name: one[:2] for name, one in collectives.items()} == {"all_reduce": (8, 64_000)}


def while_waiting(rendezvous):
    """Read the statistics in another thread, while the main thread waits for rank 1; return the readings."""
    comm = member(rendezvous)
    comm.barrier()
    readings = []

    def read():
        while len(readings) < 20 or readings[-1].total.waiting_s <= readings[0].total.waiting_s:
            readings.append(comm.stats())
            time.sleep(0.005)
        rendezvous.query("put", ["read"], True)

    if comm.rank == 0:
        thread = threading.Thread(target=read)
        thread.start()
    else:
        assert rendezvous.query("get", ["read"], timeout=20.0) == [True], "the wait is counted when it has ended"
    comm.barrier()
    comm.close()
    return readings


def test_reading_during_a_call():
    """Statistics can be read while a call waits: the wait is counted while it lasts, and no counter decreases."""
    readings, _ = ranks(2, while_waiting)
    for before, after in pairwise(stats.total for stats in readings):
        assert all(x <= y for x, y in zip(before, after, strict=True))


def two_hosts(rendezvous):
    comm = joined(rendezvous)
    x = np.ones(10_000, np.float32)
    for _ in range(3):
        if comm.rank == 3:
            time.sleep(0.05)
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    stats = comm.stats()
    comm.close()
    return stats


def test_the_exchange_between_hosts():
    """On several hosts, leaders count the time of the exchange with other hosts; waits name ranks of the own host."""
    found = ranks(4, two_hosts, environment=on(*"aabb"))
    for rank, stats in enumerate(found):
        assert stats.collectives["all_reduce"][:2] == (3, 120_000)
        assert set(stats.waits) <= {rank ^ 1}
    assert found[0].total.between_hosts_s > 0.08  # it waited for rank 3's host
    assert found[2].waits[3].seconds > 0.08


def forked(rendezvous):
    comm = member(rendezvous)
    comm.barrier()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            comm.stats()
        except ContextError as error:
            os.write(writer, str(error).splitlines()[0].encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 1000).decode()
    os.wait()
    comm.close()
    return text


def test_a_forked_process():
    """A process that was forked from a rank gets an error: it does not have the memory of the group."""
    for text in ranks(2, forked):
        assert text.startswith('group "world" belongs to process ')


# OpenMetrics


def test_openmetrics_of_any_name():
    """Names are escaped as the format requires, and the text is one that parsers of both formats accept."""
    names = ["world", 'a "quoted" one', "back\\slash", "two\nlines", "ümläut", "a{b}=c,d"]
    calls = {"all_reduce": CollectiveStats(3, 1200, 0.5, 0.25, 0.125), "barrier": CollectiveStats(1, 0, 1e-9)}
    for name in names:
        text = Stats(name, 5, 8, calls, {2: WaitStats(4, 1.5)}).openmetrics()
        samples = parsed(text)
        labels = ("collective", "all_reduce"), ("group", name), ("rank", "5")
        assert samples["crossreduce_calls_total", *labels] == 3
        assert samples["crossreduce_bytes_total", *labels] == 1200
        assert samples["crossreduce_call_seconds_total", *labels] == 0.5
        assert samples["crossreduce_wait_seconds_total", *labels] == 0.25
        assert samples["crossreduce_between_hosts_seconds_total", *labels] == 0.125
        where = ("group", name), ("rank", "5"), ("straggler", "2")
        assert samples["crossreduce_straggler_barriers_total", *where] == 4
        assert samples["crossreduce_straggler_seconds_total", *where] == 1.5
        assert len(samples) == 2 * 5 + 2
        old = [one for family in parse_old(text) for one in family.samples]  # that of node_exporter
        assert {(one.name, *sorted(one.labels.items())): one.value for one in old} == samples


def with_metrics(rendezvous, folder):
    kept, before = Warnings(), Resources()
    metrics.writers._every_s = 0.03
    comm = member(rendezvous, name="a/group")
    x, seen = np.ones(10, np.float32), []
    path = Path(folder, f"run-{metrics.name_in_files(comm.name)}-rank{comm.rank}.prom")
    for _ in range(40):
        comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
        time.sleep(0.01)
        if path.exists():
            seen.append(path.read_text())
    comm.close()
    return seen, path.read_text(), kept.texts, Resources() == before


def test_metrics_files(tmp_path, monkeypatch):
    """Each rank replaces its file while it runs, and a last time when the group is closed; a reader never sees a part
    of it, and no counter decreases. The thread ends with the group."""
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path / "new" / "run.prom"))
    for rank, (seen, last, warnings, same) in enumerate(ranks(2, with_metrics, tmp_path / "new")):
        assert (warnings, same) == ([], True)
        labels = ("collective", "all_reduce"), ("group", "a/group"), ("rank", str(rank)), ("run", "run")
        assert len(set(seen)) > 3
        tables = [parsed(text) for text in seen]
        for before, after in pairwise(tables):
            assert all(after[key] >= value for key, value in before.items())
        assert parsed(last)["crossreduce_calls_total", *labels] == 40
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"run-a_group-9d76075c-rank{rank}.prom" for rank in (0, 1)
    ]


def counted(calls):
    return Stats("g", 0, 2, {"barrier": CollectiveStats(calls)}, {})


@pytest.mark.parametrize("hangs", [False, True])
def test_the_last_file_has_the_final_counters(tmp_path, hangs):
    """If a group ends while the thread writes older counters, the file finally has the last ones, and later
    writes do not change it. The end of the group does not wait for a file system that hangs."""
    file, reading, resume = metrics.MetricsFile(tmp_path / "one.prom"), threading.Event(), threading.Event()

    def stats():
        if reading.is_set():
            return counted(2)
        reading.set()
        resume.wait(20 if hangs else 0.3)
        return counted(1)

    thread = threading.Thread(target=file.write, args=(stats,))
    thread.start()
    assert reading.wait(10)
    file.close(stats)
    assert thread.is_alive() or not hangs
    resume.set()
    thread.join()
    file.write(lambda: counted(3))
    assert file.path.read_text() == counted(2).openmetrics()
    assert [*tmp_path.iterdir()] == [file.path]


def test_temporary_files(tmp_path, monkeypatch):
    """Temporary names cannot be guessed, and links are not followed; those of killed ranks are removed."""
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    old, new, other = (tmp_path / f".crossreduce-g-rank{name}" for name in ("0.prom.1", "0.prom.2", "1.prom.1"))
    for path in (old, new, other):
        path.symlink_to(victim)
    for path in (old, other):
        os.utime(path, (1, 1), follow_symlinks=False)
    file = metrics.metrics_file("g", 0)
    assert sorted(tmp_path.iterdir()) == sorted([new, other, victim])
    monkeypatch.setattr(metrics.secrets, "token_hex", lambda _: "2")  # as if it had been guessed
    file.write(lambda: counted(1))
    assert victim.read_text() == "precious"
    monkeypatch.undo()
    mask = os.umask(0o022)
    file.write(lambda: counted(1))
    os.umask(mask)
    assert not file.path.is_symlink()
    assert file.path.stat().st_mode & 0o777 == 0o644  # the collector runs as another user


def test_files_of_different_groups(tmp_path, monkeypatch):
    """Groups of different names have different files, whatever the names; and so have programs that run at the same
    time, whose series differ by a label, too."""
    names = ["a/b", "a b", "a_b", "g" * 80, "g" * 81, "g" * 82, "\u4e16" * 80, "\u4e16" * 81, "a\ud800", "a\ud801", ""]
    for run in ("one.prom", "two.prom"):
        monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path / run))
        for name in names:
            for rank in (0, 123456):
                metrics.metrics_file(name, rank).write(lambda: counted(1))
    series = [key for path in tmp_path.iterdir() for key in parsed(path.read_text())]
    runs = [dict(labels)["run"] for name, *labels in series if name == "crossreduce_calls_total"]
    assert sorted(runs) == sorted(["one", "two"] * 2 * len(names))


def test_waits_in_failed_calls():
    """The text does not call waits a part of the time in completed calls: failed calls have waits, too."""
    text = str(Stats("g", 0, 2, {"barrier": CollectiveStats(1, 32, 0.0, 1.054)}, {})).splitlines()[1]
    assert text == "  barrier: 1 call, 32 bytes, 0.000 s, waited 1.054 s, also in failed calls"
    text = str(Stats("g", 0, 2, {"barrier": CollectiveStats(1, 32, 2.0, 1.0, 0.5)}, {})).splitlines()[1]
    assert text == "  barrier: 1 call, 32 bytes, 2.000 s, waited 1.000 s, 0.500 s between hosts"


def unwritable(rendezvous):
    kept = Warnings()
    metrics.writers._every_s = 0.02
    comm = member(rendezvous)
    for _ in range(10):
        comm.barrier()
        time.sleep(0.01)
    comm.close()
    return kept.texts


@pytest.mark.parametrize("kind", ["a file", "a folder with the name"])
def test_metrics_that_cannot_be_written(tmp_path, monkeypatch, kind):
    """If the folder or the file cannot be written, each rank logs one warning that names it, and calls work."""
    taken = tmp_path / "taken"
    if kind == "a file":
        taken.write_text("")
        chosen, due = taken / "below", rf"cannot make the folder {taken}/below \(CROSSREDUCE_METRICS\)"
    else:
        for rank in range(2):
            (taken / f"crossreduce-world-rank{rank}.prom").mkdir(parents=True)
        chosen, due = taken, rf"cannot write {taken}/crossreduce-world-rank"
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(chosen))
    for rank, texts in enumerate(ranks(2, unwritable)):
        (text,) = texts
        assert text.startswith(f"rank {rank} ")
        assert re.search(due, text), text
    assert not [*tmp_path.glob("**/.*")]


def stuck_writer(rendezvous, pipe):
    """Let the thread that writes files block forever, and make calls meanwhile."""
    hangs = threading.Event()
    metrics.writers._every_s = 0.02
    metrics.MetricsFile.write = lambda *_: (hangs.set(), os.read(pipe, 1))
    comm = member(rendezvous)
    assert hangs.wait(10)
    for _ in range(100):
        comm.barrier()
    return comm.stats().total.calls


def test_a_writer_that_hangs(tmp_path, monkeypatch):
    """Calls do not wait for the thread that writes the files, even if the file system hangs."""
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path))
    reader, writer = os.pipe()
    assert ranks(2, stuck_writer, reader) == [100, 100]
    os.close(reader)
    os.close(writer)


# The compiled counters


def test_invalid_kinds_raise():
    """A rank program of an unknown kind, or with impossible bytes, raises an error."""
    for arguments in ((len(KINDS), 0), (-1, 0), (0, -1), (0, 1 << 60)):
        with pytest.raises(ValueError, match="the kind or the bytes of a call are out of range"):
            kernels.native().RankProgram([[], []], *arguments)
