"""``crossreduce top`` without ranks: rates between two snapshots, the straggler, and tables that fit the terminal."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossreduce.cli.top.command import Wanted, _print
from crossreduce.cli.top.group_rates import GroupRates, RankRates, Straggler, compare
from crossreduce.observe.counters import CollectiveStats, WaitStats
from crossreduce.observe.flight_recorder import Op
from crossreduce.observe.liveness import is_started_by, program
from crossreduce.observe.observer import GroupView, RankView


def view(now_s, *states, waits, calls=10, between=(0.0, 0.0, 0.0)):
    """Return a snapshot of three ranks. ``waits``: for each rank, the seconds that it has waited for each rank."""
    every = tuple(
        RankView(rank, 100 + rank, state, None, (), CollectiveStats(calls, calls * 1000, 1, sum(own), between[rank]),
                 {other: WaitStats(1, seconds) for other, seconds in enumerate(own) if seconds})
        for rank, (state, own) in enumerate(zip(states, waits, strict=True))
    )  # fmt: skip
    return GroupView((1, 2), "g", "t", "v", 3, 1, now_s, None, every)


STATES = ("running", "running", "running")
NO_WAITS = [[0, 0, 0]] * 3


def test_rates_between_two_snapshots():
    """Rates are differences of counters, divided by the time between two snapshots. The straggler's share is the share
    of the others' time that they waited for it."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(12.0, *STATES, waits=[[0, 0, 1.5], [0.1, 0, 1.3], [0.2, 0, 0]], calls=30)
    found = compare(before, after)
    assert found.ranks[0] == RankRates(10.0, 10_000.0, waiting=0.75, waiting_for=2, between_hosts=0.0)
    assert (found.ranks[1].waiting, found.ranks[1].waiting_for) == (pytest.approx(0.7), 2)
    assert found.straggler == Straggler(2, pytest.approx((1.5 + 1.3) / (2 + 2)), hosts=False)
    assert compare(None, after) == GroupRates((None,) * 3, None)
    assert compare(after, after).straggler is None
    short_waits = view(12.0, *STATES, waits=[[0, 0, 0.3], [0, 0, 0], [0, 0, 0]])
    assert compare(before, short_waits).straggler is None


def test_a_group_with_other_ranks_is_new():
    """If a group's ranks have changed, there are no rates. Dead ranks do not count in the share of the straggler."""
    before, after = view(10.0, *STATES, waits=NO_WAITS), view(12.0, *STATES, waits=NO_WAITS)
    other = before._replace(ranks=(*before.ranks[:2], before.ranks[2]._replace(rank=0)))
    for seen in (other, before._replace(ranks=before.ranks[:2])):
        assert compare(seen, after) == GroupRates((None,) * 3, None)
    after = view(11.0, "waiting", "dead", "stopped", waits=[[0, 0, 0.9], [0, 0, 0], [0, 0, 0]])
    assert compare(before, after).straggler == Straggler(2, pytest.approx(0.9), hosts=False)


def test_waits_for_other_hosts():
    """A rank that is late because it exchanges data with other hosts is not blamed itself. If no rank waits for it, its
    exchanges are reported, too. A rank that exchanges for a short time is not the reason why others wait."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(11.0, *STATES, waits=[[0, 0, 0], [0.9, 0, 0], [0.9, 0, 0]], between=(0.8, 0, 0))
    found = compare(before, after)
    assert found.straggler == Straggler(0, pytest.approx(0.8), hosts=True)
    assert found.sentence == "exchanges with other hosts, and waits for them, take 80 % of the time of rank 0"
    nobody = view(11.0, *STATES, waits=NO_WAITS, between=(0.1, 0.7, 0.2))
    assert compare(before, nobody).straggler == Straggler(1, pytest.approx(0.7), hosts=True)
    other = view(11.0, *STATES, waits=[[0, 0, 0.6], [0, 0, 0.9], [0, 0, 0]], between=(0.3, 0, 0))
    assert compare(before, other).straggler == Straggler(2, pytest.approx(0.75), hosts=False)


def shown(capsys, *views):
    """Return what ``top`` prints about the second of two views."""
    return printed(capsys, [views])


def printed(capsys, pairs, wanted=None):
    """Return what ``top`` prints about several groups, each a pair of views."""
    rates = [compare(*pair) for pair in pairs]
    _print(SimpleNamespace(problems=(), hidden=0), [pair[1] for pair in pairs], rates, wanted or Wanted())
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "hosts", "titles"),
    [
        (160, 1, "rank pid state op call calls/s GB/s waiting for"),
        (115, 1, "rank pid state op call calls/s GB/s waiting for"),
        (100, 1, "rank pid state op calls/s GB/s waiting for"),
        (80, 1, "rank pid state op calls/s GB/s waiting for"),
        (80, 2, "rank pid state calls/s GB/s waiting for between hosts"),
        (50, 2, "rank state GB/s waiting for"),
    ],
)
def test_a_narrow_view_has_whole_numbers(monkeypatch, capsys, width, hosts, titles):
    """A narrow view first shortens the texts of calls and then leaves out columns. It is never wider than the terminal,
    and every number in it is complete."""
    call = "all_reduce sum float32[100000]"
    views = []
    for now_s, calls in ((10.0, 0), (11.0, 23_456)):
        waits = [[0, 0, 0.97], [0, 0, 0.97], [0.03, 0, 0]] if calls else NO_WAITS
        seen = view(now_s, "waiting", "waiting", "idle", waits=waits, calls=calls)
        rank_views = []
        for one in seen.ranks:
            total, late = one.total._replace(nbytes=calls * 10**6), (2,) if one.rank < 2 else ()
            rank_views.append(one._replace(pid=4_000_000, op=Op(1234567, call, 1.0, None), late=late, total=total))
        views.append(seen._replace(hosts=hosts, ranks=tuple(rank_views)))
    monkeypatch.setenv("COLUMNS", str(width))
    out = shown(capsys, *views)
    assert all(len(line) <= width for line in out.splitlines()), out
    table = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in out.splitlines() if line[0] in "┃│"]
    heads, cells = table[:-3], table[-3:]  # titles of several words have several lines
    assert " ".join(" ".join(" ".join(title).split()) for title in zip(*heads, strict=True)) == titles
    columns = {title: " ".join(numbers) for title, *numbers in zip(heads[0], *cells, strict=True)}
    due = {"rank": "0 1 2", "pid": "4000000 4000000 4000000", "op": "1234567 1234567 1234567", "for": "2 2 0"}
    due |= {"calls/s": "23,456.0 23,456.0 23,456.0", "GB/s": "23.456 23.456 23.456", "waiting": "97 % 97 % 3 %"}
    assert all(columns[title] == due[title] for title in due if title in columns), columns
    assert columns["state"] in ("waits for rank 2 waits for rank 2 idle", "waiting waiting idle")
    for row in cells if "call" in heads[0] else ():
        text = row[heads[0].index("call")]
        assert call.startswith(text.rstrip("…"))
        assert len(text.rstrip("…")) >= (len(call) if width >= 160 else 11)


def test_a_group_whose_ranks_have_ended(capsys):
    """If all ranks of a group have ended, but another process keeps its memory, the view says that they have ended."""
    for cause, line in ((None, "all ranks have ended"), ("rank 1 died.", "all ranks have ended; broken: rank 1 died.")):
        ended = [view(now_s, "dead", "left", "dead", waits=NO_WAITS)._replace(cause=cause) for now_s in (1.0, 2.0)]
        assert shown(capsys, *ended).splitlines()[1] == line
    assert "ended" not in shown(capsys, *(view(now_s, "dead", "idle", "dead", waits=NO_WAITS) for now_s in (1.0, 2.0)))


def test_active_groups_come_first_and_idle_ones_are_named(capsys):
    """A group that makes calls comes first, then one that is broken. Groups without calls have no table, but are
    counted and named with the program and process of their first rank. If all are idle, three have a table."""

    def group(name, *states, calls=10, cause=None):
        made = (view(now_s, *states, waits=NO_WAITS, calls=now_s * calls) for now_s in (1, 2))
        return [each._replace(name=name, cause=cause, program=f"{name}.py") for each in made]

    idle = ("idle", "idle", "idle")
    quiet = [group(f"q{k}", *idle, calls=0) for k in range(7)]
    busy, broken = group("busy", *idle), group("broken", "dead", "idle", "idle", calls=0, cause="rank 0 died.")
    out = printed(capsys, [*quiet, broken, busy])
    heads = [line for line in out.splitlines() if line.startswith("group")]
    assert [re.match(r'group "(\w+)" of \1.py \(pid (\d+)\), 3 ranks', head)[1] for head in heads] == ["busy", "broken"]
    named = ", ".join(f'"q{k}" of q{k}.py (pid 100)' for k in range(5))
    assert f"7 more groups are idle (--pid PID shows one): {named}, and 2 more" in " ".join(out.split())
    assert printed(capsys, quiet).count('group "q') == 3
    assert printed(capsys, quiet, Wanted(pid=100)).count('group "q') == 7


def test_programs_and_their_processes():
    """A process is named by its script or module. ``--pid`` selects the groups of a process and of those below it."""
    code = "import os, sys, time; print(os.getppid(), flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        try:
            assert program(child.pid) == f"{Path(sys.executable).name} -c"
            assert program(os.getpid()) not in ("", Path(sys.executable).name)
            assert program(2**22 + 1) == ""
            pids = (child.pid, os.getpid(), os.getppid(), 2**22 + 1)
            assert [is_started_by(child.pid, pid) for pid in pids] == [True, True, True, False]
            rank = view(1, *STATES, waits=NO_WAITS)
            ours = rank._replace(ranks=(rank.ranks[0]._replace(pid=child.pid),))
            assert [Wanted(pid=os.getpid()).includes(each) for each in (ours, rank)] == [True, False]
        finally:
            child.kill()
