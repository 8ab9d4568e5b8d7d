"""The counters of a rank's calls: ``stats``, OpenMetrics texts, and the files of CROSSREDUCE_METRICS."""

import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from host_checks import joined, on
from members import Resources, Warnings, array_group, every_call, member, summed
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_new
from prometheus_client.parser import text_string_to_metric_families as parse_old
from ranks import ranks

from crossreduce.errors import MismatchError
from crossreduce.observe import metrics
from crossreduce.observe.counters import KINDS, CollectiveStats, Stats, WaitStats


def parsed(text):
    """Return the samples of an OpenMetrics text: a dictionary from (name, *labels) to values."""
    families = list(parse_new(text))
    assert all(family.type == "counter" for family in families)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def every_collective(rendezvous):
    """Call collective number k of ``every_call`` k times, and return the statistics."""
    comm = member(rendezvous)
    assert comm.stats() == Stats("world", comm.rank, comm.size, {}, {})
    for number, call in enumerate(every_call(comm, 100).values(), 1):
        for _ in range(number):
            call()
    comm.require_same("barriers of another kind")  # counted as "other"
    with pytest.raises(MismatchError, match="differ"):
        summed(comm, 1 + comm.rank)
    found = comm.stats()
    comm.close()
    assert comm.stats().total.calls == found.total.calls
    return found


def test_calls_and_bytes_of_each_collective():
    """Every collective is counted by its name, with bytes as in nccl-tests. Calls that fail are not counted."""
    array = 400
    due = {"all_reduce": (1, array), "reduce": (2, array), "broadcast": (3, array), "all_gather": (4, 3 * array)}
    due |= {"reduce_scatter": (5, 3 * array), "gather": (6, 3 * array), "scatter": (7, 3 * array)}
    due |= {"all_to_all": (8, 3 * array), "barrier": (9, 0), "other": (1, 0)}
    assert set(due) == set(KINDS)
    due = {name: (calls, calls * nbytes) for name, (calls, nbytes) in due.items()}
    for rank, stats in enumerate(ranks(3, every_collective)):
        assert (stats.group, stats.rank, stats.size) == ("world", rank, 3)
        assert {name: one[:2] for name, one in stats.collectives.items()} == due
        assert stats.total.calls == sum(calls for calls, _ in due.values())
        # ``all_reduce`` is left out, since the failed call counts in its waits only.
        assert all(0 <= one.waiting_s <= one.seconds for name, one in stats.collectives.items() if name != "all_reduce")
        assert stats.total.between_hosts_s == 0
        # The waits for other ranks are those of the collectives, and no rank waits for itself.
        assert sum(wait.seconds for wait in stats.waits.values()) == pytest.approx(stats.total.waiting_s)
        assert rank not in stats.waits


def slow_rank(rendezvous, pause, calls):
    comm = member(rendezvous, 30, "a group")
    began = time.monotonic()
    for k in range(calls):
        if comm.rank == 1:  # it is late even if the others had to wait for a CPU
            rendezvous.query("get", [("begun", k, rank) for rank in (0, 2)], timeout=100.0)
            time.sleep(pause)
        else:
            rendezvous.query("put", [("begun", k, comm.rank)], True)
        summed(comm, 10)
    took = time.monotonic() - began
    comm.close()
    return comm.stats(), took


def test_the_rank_that_others_wait_for():
    """The other ranks count their waits for a slow rank with the number of this rank: their time and barriers."""
    pause, calls = 0.05, 10
    first, (slow, took), third = ranks(3, slow_rank, pause, calls)
    assert slow.total.seconds < took - pause * calls
    for stats, took in (first, third):
        assert stats.waits[1].seconds > 0.4 * pause * calls
        assert stats.waits[1].barriers >= calls - 2  # on a busy machine another rank may be later once
        assert stats.waits[1].seconds <= stats.total.waiting_s <= stats.total.seconds <= took
        assert str(stats).startswith(f'group "a group", rank {stats.rank} of 3: 10 calls, 800 bytes, ')
        assert "\n  waited for rank 1: " in str(stats)


def prepared(rendezvous):
    group = array_group(member(rendezvous))
    for _ in range(8):
        group.all_reduce(np.ones(1000))
    return group.stats().collectives


def test_prepared_calls_are_counted():
    """Prepared calls, which run without Python code, are counted like other calls."""
    for collectives in ranks(2, prepared):
        assert {name: one[:2] for name, one in collectives.items()} == {"all_reduce": (8, 64_000)}


def while_waiting(rendezvous):
    """Read the statistics of rank 0 in another thread, while its main thread waits for rank 1. Return the readings."""
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
        assert rendezvous.query("get", ["read"], timeout=100.0) == [True], "the wait is counted when it has ended"
    comm.barrier()
    comm.close()
    return readings


def test_reading_during_a_call():
    """Statistics can be read while a call waits. The wait is counted before it ends, and no counter decreases."""
    readings, _ = ranks(2, while_waiting)
    for before, after in pairwise(stats.total for stats in readings):
        assert all(x <= y for x, y in zip(before, after, strict=True))


def two_hosts(rendezvous):
    comm = joined(rendezvous)
    for _ in range(3):
        time.sleep(0.1 if comm.rank == 3 else 0)
        summed(comm, 10_000)
    comm.close()
    return comm.stats()


def test_the_exchange_between_hosts():
    """On several hosts, leaders count the time of the exchange with other hosts. Waits name only ranks of the host."""
    found = ranks(4, two_hosts, environment=on(*"aabb"))
    for rank, stats in enumerate(found):
        assert stats.collectives["all_reduce"][:2] == (3, 240_000)
        assert set(stats.waits) <= {rank ^ 1}  # the other rank of the host
    assert found[0].total.between_hosts_s > 0.08  # rank 0 waited for the host of rank 3, which is late
    assert found[2].waits[3].seconds > 0.08


def test_openmetrics_of_any_name():
    """Any group names are escaped in the OpenMetrics text, which parsers of OpenMetrics and Prometheus accept."""
    calls = {"all_reduce": CollectiveStats(3, 1200, 0.5, 0.25, 0.125), "barrier": CollectiveStats(1, 0, 1e-9)}
    for name in ("world", 'a "quoted" one', "back\\slash", "two\nlines", "ümläut", "a{b}=c,d"):
        text = Stats(name, 5, 8, calls, {2: WaitStats(4, 1.5)}).openmetrics()
        samples = parsed(text)
        labels = ("collective", "all_reduce"), ("group", name), ("rank", "5")
        due = {"calls": 3, "bytes": 1200, "call_seconds": 0.5, "wait_seconds": 0.25, "between_hosts_seconds": 0.125}
        assert {each: samples[f"crossreduce_{each}_total", *labels] for each in due} == due
        where = ("group", name), ("rank", "5"), ("straggler", "2")
        assert samples["crossreduce_straggler_barriers_total", *where] == 4
        assert samples["crossreduce_straggler_seconds_total", *where] == 1.5
        assert len(samples) == 2 * 5 + 2  # 5 of each collective, 2 of the straggler
        old = [one for family in parse_old(text) for one in family.samples]  # the format of node_exporter
        assert {(one.name, *sorted(one.labels.items())): one.value for one in old} == samples


def with_metrics(rendezvous, folder):
    kept, before = Warnings(), Resources()
    metrics.writers._every_s = 0.03
    comm, seen = member(rendezvous, name="a/group"), []
    path = Path(folder, f"run-{metrics.name_in_files(comm.name)}-rank{comm.rank}.prom")
    for _ in range(40):
        summed(comm, 10)
        time.sleep(0.01)
        if path.exists():
            seen.append(path.read_text())
    comm.close()
    return seen, path.read_text(), kept.texts, Resources() == before


def test_metrics_files(tmp_path, monkeypatch):
    """Each rank replaces its file while it runs, and a last time when the group is closed. A reader never sees an
    incomplete file, and no counter decreases. The thread ends with the group."""
    folder = tmp_path / "new"
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(folder / "run.prom"))
    for rank, (seen, last, warnings, same) in enumerate(ranks(2, with_metrics, folder)):
        assert (warnings, same) == ([], True)
        assert len(set(seen)) > 3
        for before, after in pairwise(map(parsed, seen)):
            assert all(after[key] >= value for key, value in before.items())
        labels = ("collective", "all_reduce"), ("group", "a/group"), ("rank", str(rank)), ("run", "run")
        assert parsed(last)["crossreduce_calls_total", *labels] == 40
    assert {path.name for path in folder.iterdir()} == {f"run-a_group-9d76075c-rank{rank}.prom" for rank in (0, 1)}


def counted(calls):
    return Stats("g", 0, 2, {"barrier": CollectiveStats(calls)}, {})


@pytest.mark.parametrize("hangs", [False, True])
def test_the_last_file_has_the_final_counters(tmp_path, hangs):
    """If a group ends while the thread writes older counters, the file finally contains the last counters. Later writes
    do not change it. The end of the group does not wait for a file system that hangs."""
    file, reading, resume = metrics.MetricsFile(tmp_path / "one.prom"), threading.Event(), threading.Event()

    def stats():
        if reading.is_set():
            return counted(2)
        reading.set()
        resume.wait(100 if hangs else 0.3)
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
    """Old temporary files of a killed rank are removed. New ones have random names, and do not follow a link."""
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    old, new, other = (tmp_path / f".crossreduce-g-rank{name}" for name in ("0.prom.1", "0.prom.2", "1.prom.1"))
    for path in (old, new, other):
        path.symlink_to(victim)
    for path in (old, other):
        os.utime(path, (1, 1), follow_symlinks=False)
    file = metrics.metrics_file("g", 0)
    assert {*tmp_path.iterdir()} == {new, other, victim}
    with monkeypatch.context() as patch:
        patch.setattr(metrics.secrets, "token_hex", lambda _: "2")  # as if it had been guessed
        file.write(lambda: counted(1))
    mask = os.umask(0o022)
    file.write(lambda: counted(1))
    os.umask(mask)
    assert victim.read_text() == "precious"
    assert not file.path.is_symlink()
    assert file.path.stat().st_mode & 0o777 == 0o644  # the collector runs as another user


def test_files_of_different_groups(tmp_path, monkeypatch):
    """Groups with different names have different files. So do programs that run at the same time and have different
    names in CROSSREDUCE_METRICS. The label ``run`` of their counters is different, too."""
    names = ["a/b", "a b", "a_b", "g" * 80, "g" * 81, "g" * 82, "\u4e16" * 80, "\u4e16" * 81, "a\ud800", "a\ud801", ""]
    for run in ("one.prom", "two.prom"):
        monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path / run))
        for name in names:
            for rank in (0, 123456):
                metrics.metrics_file(name, rank).write(lambda: counted(1))
    series = [key for path in tmp_path.iterdir() for key in parsed(path.read_text())]
    runs = [dict(labels)["run"] for name, *labels in series if name == "crossreduce_calls_total"]
    assert sorted(runs) == sorted(["one", "two"] * 2 * len(names))


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
        chosen, due = taken / "below", f"cannot make the folder {taken}/below (CROSSREDUCE_METRICS)"
    else:
        for rank in range(2):
            (taken / f"crossreduce-world-rank{rank}.prom").mkdir(parents=True)
        chosen, due = taken, f"cannot write {taken}/crossreduce-world-rank"
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(chosen))
    for rank, (text,) in enumerate(ranks(2, unwritable)):
        assert text.startswith(f"rank {rank} ")
        assert due in text
    assert not [*tmp_path.glob("**/.*")]


def stuck_writer(rendezvous):
    """Make calls while the thread that writes files hangs."""
    hangs = threading.Event()
    metrics.writers._every_s = 0.02
    metrics.MetricsFile.write = lambda *_: (hangs.set(), threading.Event().wait())
    comm = member(rendezvous)
    assert hangs.wait(10)
    for _ in range(100):
        comm.barrier()
    return comm.stats().total.calls


def test_a_writer_that_hangs(tmp_path, monkeypatch):
    """Calls do not wait for the thread that writes the files, even if the file system hangs."""
    monkeypatch.setenv("CROSSREDUCE_METRICS", str(tmp_path))
    assert ranks(2, stuck_writer) == [100, 100]
