"""``crossreduce trace``: the merged trace of all ranks, the table, the straggler, and predictions."""

import json
import re
import struct
import sys

import pytest
from members import member, summed
from trace_events import read_events
from traced_ranks import CALLS, LATE_S, copied, in_threads, only_group, traced

from crossreduce import Topology, simulate
from crossreduce.cli.trace import _prediction, _show
from crossreduce.observe.traces import calls as trace_calls
from crossreduce.observe.traces.summary import SummaryRow, straggler
from crossreduce.packing import itemsize
from crossreduce.ranks.inter_host.two_level import host_schedule


def test_the_merged_trace_is_valid(of_two, trace, tmp_path):
    """``-o`` writes events that a strict reader accepts: each call, its phases, and an arrow for each wait."""
    code, out, err = trace(of_two, "-o", tmp_path / "trace.json")
    assert (code, err, "14 calls of 2 ranks" in out) == (0, "", True)
    events = read_events((tmp_path / "trace.json").read_text())
    group, _ = only_group(of_two)
    called = [event for event in events if event.get("cat") == "call"]
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
    arrow_ends = [event for event in events if event["ph"] == "f"]
    assert len(arrow_ends) == len(waits) > 2
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name[:14] for name in names] == ['"world" rank 0', '"world" rank 1']


def test_a_large_trace_is_cut_for_the_viewer(of_two, trace, tmp_path, monkeypatch):
    """If there are too many phases, ``-o`` writes only the newest calls of all ranks, and a note says so."""
    monkeypatch.setattr(sys.modules["crossreduce.cli.trace"], "MOST_PHASES", 60)
    code, out, err = trace(of_two, "-o", tmp_path / "trace.json")
    events = read_events((tmp_path / "trace.json").read_text())
    numbers = sorted(event["args"]["op"] for event in events if event.get("cat") == "call")
    assert numbers == sorted(2 * [*range(numbers[0], 8)])  # of 2 ranks, up to the last call, number 7
    assert 1 < numbers[0] <= 7
    assert f"{numbers[0] - 1} older ones are left out" in err
    assert (code, f"{len(numbers)} calls" in out) == (0, True)


def test_the_table(of_two, trace):
    """Without ``-o`` the command prints the straggler, and a table with a row for each text. ``--json`` prints both."""
    code, out, err = trace(of_two)
    assert (code, err) == (0, "")
    assert re.search(r"^rank 1 keeps the others waiting: \d\d % of their time in collectives$", out, re.MULTILINE)
    assert "5.34 MiB" in out
    report = json.loads(trace(of_two, "--json")[1])
    assert {row["text"]: row["calls"] for row in report["rows"]}[CALLS[0]] == 3
    assert all(row["predicted_seconds"] is None for row in report["rows"])
    (named,) = report["stragglers"]
    assert (named["group"], named["rank"]) == ("world", 1)
    assert 0.5 < named["share"] <= 1
    (late,) = (row for row in report["rows"] if row["text"] == CALLS[-1])
    assert late["rank_seconds"][0]["seconds"] > 0.8 * LATE_S


def row_of(text, calls=12_345, queue=None, waited_for=((1, 0.9), (0, 0.06), (2, 0.04)), **fields):
    """Return a row of 4 ranks, whose calls took 1 s on rank 1 and 3 s on each other rank."""
    row = SummaryRow("g", "t", text, 1_234_567, calls, 1, 0.123e-3, 98.7e-6, queue, 0.5, waited_for,
                     ((0, 3.0), (1, 1.0), (2, 3.0), (3, 3.0)))  # fmt: skip
    return row._replace(**fields)


@pytest.mark.parametrize("queue", [None, 0.0123])
def test_a_narrow_table_has_whole_words(monkeypatch, capsys, queue):
    """At every width the words and numbers of the table are complete, and lines break only at spaces. Columns of queues
    and plans are shown only if they have content, and only in wide tables."""
    texts = ["all_reduce sum float32[100000]", "reduce_scatter sum bfloat16[1024]", "barrier"]
    rows = [row_of(text, queue=queue) for text in texts]
    for width in (60, 80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        _show(rows, [None, queue, None])
        out = capsys.readouterr().out
        assert all(len(line) <= width for line in out.splitlines()), out
        assert "…" not in out
        words = set(re.sub("[┃│┏━┳┓┡╇┩└─┴┘]", " ", out).split())
        due = {*" ".join(texts).split(), "1.18", "MiB", "us", "98.7", "waiting", "50", "rank", "90", "%,"}
        due |= {"123", "median"} if width >= 80 else set()
        due |= {"12345", "10", "GB/s", "count"} if width >= (100 if queue else 80) else set()
        due |= {"queue", "plan", "12.3"} if queue and width >= 80 else set()
        assert due <= words
        assert words & {"queue", "plan", "12.3"} <= due
    assert all(text in out for text in texts)
    assert "rank 1 90 %, rank 0 6 %, rank 2 4 %" in out


def test_the_straggler_of_a_trace(monkeypatch, capsys):
    """The straggler is the rank for which others waited longest in all calls of the group, with the fraction of their
    time. Long calls count more than short ones. If waits are short, no rank is named."""
    waits = row_of("a", waiting=0.5, waited_for=((1, 0.9), (0, 0.1)))  # 10 s of all ranks, 5 s of them waiting
    assert straggler([waits]) == (1, pytest.approx(4.5 / 9))
    short = row_of("b", waiting=0.9, waited_for=((2, 1.0),), rank_seconds=((0, 1.0), (1, 1.0), (2, 0.1), (3, 1.0)))
    assert straggler([waits, short]) == (1, pytest.approx(4.5 / (10 + 3.1 - 2)))
    assert straggler([row_of("c", waiting=0.0, waited_for=())])[1] == 0
    assert straggler([row_of("d", waiting=0.0, waited_for=(), rank_seconds=((0, 1.0),))]) == (0, 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    _show([row_of("barrier", waiting=0.05)], [None])
    assert "no straggler: ranks wait for less than 10 % of their time in collectives\n" in capsys.readouterr().out


def test_runs_in_one_directory_are_apart(of_two, tmp_path, trace):
    """The files of two runs in one directory stay apart, since their processes differ. The command shows the last run,
    or the run with the number ``--run``. If there is no such run, it is an error."""
    copied(of_two, tmp_path / "runs")
    traced(2, in_threads, tmp_path / "runs")
    report = json.loads(trace(tmp_path / "runs", "--json")[1])
    assert {row["group"] for row in report["rows"]} == {"world", "second"}
    assert any("2 runs" in note for note in report["notes"])
    first = json.loads(trace(tmp_path / "runs", "--json", "--run", "1")[1])
    assert {row["text"] for row in first["rows"]} == {*CALLS}
    cases = (tmp_path / "runs", 3, "2 runs", "--run 1 to 2"), (of_two, 2, "1 run", "--run 1\n")
    for folder, run, has, valid in cases:
        code, _, err = trace(folder, "--run", run)
        assert (code, f"has {has}." in err, valid in err) == (2, True, True)


def test_predictions_are_those_of_the_schedule(of_hosts, tmp_path, trace):
    """The prediction of a call on measured links is the simulated time of the hosts' schedule. Calls before the
    measurement have a prediction only if ``--topology`` gives the links."""
    code, _, err = trace(of_hosts, "-o", tmp_path / "out.json")
    assert code == 0, err
    events = read_events((tmp_path / "out.json").read_text())
    plans = [event for event in events if event.get("cat") == "plan"]
    assert [event["args"]["op"] for event in plans] == [10] * 5  # the call after ``plan_on``, on 5 ranks
    names = ["host0/cpu:0", "host1/cpu:0"]
    links, slow = (Topology.full_mesh(names, gb_per_s=speed, latency_s=1e-5) for speed in (2, 1))
    schedule = host_schedule(links, ((0, 1, 2), (3, 4)), "all_reduce", 1 << 19, None)
    seconds = simulate(schedule, links, 400_000).seconds
    assert {event["dur"] for event in plans} == {round(seconds * 1e6, 3)}
    (tmp_path / "slow.json").write_text(slow.to_json())
    rows = json.loads(trace(of_hosts, "--json", "--topology", tmp_path / "slow.json")[1])["rows"]
    by_text = {row["text"]: row["predicted_seconds"] for row in rows}
    assert by_text["all_reduce sum float32[100000]"] > 1.5 * seconds
    assert by_text["all_reduce sum float32[10]"] > 0


def test_predictions_of_exact_sums_are_for_the_bytes_that_travel():
    """An exact float32 all-reduce has the prediction of a usual one with 1.5 times the elements, since it sends partial
    sums as float64 and results as float32. Maxima and integers are sent unchanged."""
    links = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0", "host2/cpu:0"], gb_per_s=2, latency_s=1e-5)
    group, predict = trace_calls.GroupTrace("world", "token", ((0, 1), (2,), (3,)), {}, ()), _prediction(links)

    def seconds(op, dtype, size):
        text, nbytes = f"all_reduce {op} {dtype}[{size}]", size * itemsize(dtype)
        return predict(group, trace_calls.TracedCall(1, text, nbytes, 0, 1, 0, None, ()))

    assert seconds("exact_sum", "float32", 200_000) == seconds("sum", "float32", 300_000) > 1e-4
    assert seconds("exact_mean", "float64", 200_000) == seconds("mean", "float64", 300_000)
    assert seconds("exact_sum", "float16", 200_000) == seconds("sum", "int8", 1_000_000)
    assert seconds("max", "float32", 200_000) == seconds("sum", "int32", 200_000)
    assert seconds("exact_product", "float32", 8) is None


def test_bad_directories(of_two, tmp_path, trace):
    """A missing folder, and a folder without traces, are errors. A trace without calls causes a note."""
    (tmp_path / "empty").mkdir()
    (tmp_path / f"rank0.{'a' * 16}.trace").write_bytes(b"nonsense" * 100)
    problems = {"missing": "cannot be read", "empty": "has no trace that can be read", "": "not a trace of crossred"}
    for folder, problem in problems.items():
        code, _, err = trace(tmp_path / folder)
        assert (code, problem in err) == (2, True)
    for path in copied(of_two, tmp_path / "uncalled"):
        data = bytearray(path.read_bytes())
        struct.pack_into("=Q", data, 48, 0)  # the number of records
        path.write_bytes(data)
    code, out, err = trace(tmp_path / "uncalled")
    assert (code, out, "no calls were recorded" in err) == (0, "", True)


def of_many_shapes(rendezvous, shapes):
    group = member(rendezvous)
    for size in range(1, shapes + 1):
        summed(group, size)
    group.close()


def test_many_shapes(tmp_path, trace):
    """More than a thousand different texts of calls are stored. If there is no room for a text, a note says so. The
    table has a limited number of rows."""
    traced(1, of_many_shapes, tmp_path, 3000, environment=[{"CROSSREDUCE_TRACE_BYTES": "512K"}])
    group, notes = only_group(tmp_path)
    texts = [call.text for call in group.ranks[0].calls if call.text != "?"]
    unknown = len(group.ranks[0].calls) - len(texts)
    assert len(set(texts)) == len(texts) > 1000
    assert unknown > 500
    assert f'there was no room for the texts of {unknown} calls, which are shown as "?"' in "".join(notes)
    code, out, _ = trace(tmp_path)
    assert code == 0
    assert "more rows" in out
    assert len(out.splitlines()) < 1000
