"""``crossreduce top`` without ranks: rates between two snapshots, the straggler, and tables that fit the terminal."""

import re
from types import SimpleNamespace

import pytest

from crossreduce.cli.top import group_rates
from crossreduce.cli.top.command import _print
from crossreduce.observe.counters import CollectiveStats, WaitStats
from crossreduce.observe.flight_recorder import Op
from crossreduce.observe.observer import GroupView, RankView


def view(now_s, *states, waits, calls=10, between=(0.0, 0.0, 0.0)):
    every = tuple(
        RankView(rank, 100 + rank, state, None, (), CollectiveStats(calls, calls * 1000, 1, sum(w), between[rank]),
                 {other: WaitStats(1, seconds) for other, seconds in enumerate(w) if seconds})
        for rank, (state, w) in enumerate(zip(states, waits, strict=True))
    )  # fmt: skip
    return GroupView((1, 2), "g", "t", "v", 3, 1, now_s, None, every)


STATES = ("running", "running", "running")
NO_WAITS = [[0, 0, 0]] * 3


def test_rates_between_two_snapshots():
    """Rates are differences over the time between snapshots; the straggler's share is that of the others' time."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(12.0, *STATES, waits=[[0, 0, 1.5], [0.1, 0, 1.3], [0.2, 0, 0]], calls=30)
    found = group_rates.compare(before, after)
    assert found.ranks[0] == group_rates.RankRates(10.0, 10_000.0, 0.75, 2, 0.0)
    assert found.ranks[1][2:4] == (pytest.approx(0.7), 2)
    assert found.straggler == group_rates.Straggler(2, pytest.approx(2.8 / 4), False)
    assert group_rates.compare(None, after) == group_rates.GroupRates((None,) * 3, None)
    assert group_rates.compare(after, after).straggler is None
    assert group_rates.compare(before, view(12.0, *STATES, waits=[[0, 0, 0.3], [0, 0, 0], [0, 0, 0]])).straggler is None


def test_a_group_with_other_ranks_is_new():
    """If a group's memory has other ranks than before, there is nothing to compare. Ranks that are dead or have left
    cannot wait: the share of the straggler is that of the others."""
    before, after = view(10.0, *STATES, waits=NO_WAITS), view(12.0, *STATES, waits=NO_WAITS)
    other = after._replace(now_s=10.0, ranks=(*after.ranks[:2], after.ranks[2]._replace(rank=0)))
    assert group_rates.compare(other, after) == group_rates.GroupRates((None,) * 3, None)
    assert group_rates.compare(after._replace(now_s=10.0, ranks=after.ranks[:2]), after).ranks == (None,) * 3
    same = group_rates.compare(other, other._replace(now_s=12.0)).ranks[2]
    assert same == group_rates.RankRates(0.0, 0.0, 0.0, None, 0.0)
    after = view(11.0, "waiting", "dead", "stopped", waits=[[0, 0, 0.9], [0, 0, 0], [0, 0, 0]])
    assert group_rates.compare(before, after).straggler == group_rates.Straggler(2, pytest.approx(0.9), False)


def test_waits_for_other_hosts():
    """A rank that is late because it exchanges data with other hosts is not blamed itself."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(11.0, *STATES, waits=[[0, 0, 0], [0.9, 0, 0], [0.9, 0, 0]], between=(0.8, 0, 0))
    found = group_rates.compare(before, after)
    assert found.straggler == group_rates.Straggler(0, pytest.approx(0.8), True)
    assert found.sentence == "exchanges with other hosts, and waits for them, take 80 % of the time of rank 0"
    nobody = view(11.0, *STATES, waits=NO_WAITS, between=(0.1, 0.7, 0.2))
    assert group_rates.compare(before, nobody).straggler == group_rates.Straggler(1, pytest.approx(0.7), True)
    other = view(11.0, *STATES, waits=[[0, 0, 0.6], [0, 0, 0.9], [0, 0, 0]], between=(0.3, 0, 0))
    assert group_rates.compare(before, other).straggler == group_rates.Straggler(2, pytest.approx(0.75), False)


def rows_of(text):
    """Return the cells of each row of a printed table; the first row is the head."""
    lines = [line for line in text.splitlines() if line[0] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def printed_at(monkeypatch, capsys, width, hosts):
    """Return what ``top`` prints at a width about a group of 3 ranks with large numbers, of which rank 2 is late."""
    op = Op(1234567, "all_reduce sum float32[100000]", 1.0, None)
    waits = [[0, 0, 0.97], [0, 0, 0.97], [0.03, 0, 0]]
    views = []
    for now_s, calls in ((10.0, 0), (11.0, 23_456)):
        seen = view(now_s, "waiting", "waiting", "idle", waits=waits if calls else NO_WAITS, calls=calls)
        each = [one._replace(pid=4_000_000 + one.rank, op=op, late=(2,) if one.rank < 2 else ()) for one in seen.ranks]
        each = [one._replace(total=one.total._replace(nbytes=calls * 10**6)) for one in each]
        views.append(seen._replace(hosts=hosts, ranks=tuple(each)))
    monkeypatch.setenv("COLUMNS", str(width))
    observer = SimpleNamespace(problems=(), hidden=0)
    _print(observer, views[1:], [group_rates.compare(*views)], None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "hosts", "titles"),
    [
        (160, 1, "rank pid state op call calls/s GB/s waiting for"),
        (115, 1, "rank pid state op call calls/s GB/s waiting for"),
        (100, 1, "rank state op call calls/s GB/s waiting for"),
        (80, 1, "rank state op calls/s GB/s waiting for"),
        (100, 2, "rank state op calls/s GB/s waiting for between hosts"),
        (80, 2, "rank state op calls/s GB/s waiting for between hosts"),
        (50, 2, "rank state GB/s waiting for"),
    ],
)
def test_a_narrow_view_has_whole_numbers(monkeypatch, capsys, width, hosts, titles):
    """A narrow view shortens calls, then leaves out columns; it is never wider than the terminal, and every number in
    it is complete."""
    out = printed_at(monkeypatch, capsys, width, hosts)
    assert all(len(line) <= width for line in out.splitlines()), out
    table = rows_of(out)
    heads, cells = table[:-3], table[-3:]
    assert " ".join(" ".join(" ".join(title).split()) for title in zip(*heads, strict=True)) == titles
    columns = dict(zip(heads[0], zip(*cells, strict=True), strict=True))
    due = {
        "rank": ("0", "1", "2"),
        "pid": ("4000000", "4000001", "4000002"),
        "op": ("1234567",) * 3,
        "calls/s": ("23,456.0",) * 3,
        "GB/s": ("23.456",) * 3,
        "waiting": ("97 %", "97 %", "3 %"),
        "for": ("2", "2", "0"),
    }
    assert {name: columns[name] for name in due if name in columns} == {
        name: cells for name, cells in due.items() if name in columns
    }
    assert columns["state"] in (("waits for rank 2", "waits for rank 2", "idle"), ("waiting", "waiting", "idle"))
    call = "all_reduce sum float32[100000]"
    for text in columns.get("call", ()):
        assert text == call if width >= 160 else call.startswith(text.rstrip("…")) and len(text) >= 12, text
        assert {*re.findall(r"\d+", text)} <= {"32", "100000"}, text


@pytest.mark.parametrize("cause", [None, "rank 1 died."])
def test_a_group_whose_ranks_have_ended(monkeypatch, capsys, cause):
    """A group of which another process keeps the memory, and whose ranks have all ended, is described so."""
    views = [view(now_s, "dead", "left", "dead", waits=NO_WAITS)._replace(cause=cause) for now_s in (1.0, 2.0)]
    _print(SimpleNamespace(problems=(), hidden=0), views[1:], [group_rates.compare(*views)], None)
    out = capsys.readouterr().out.splitlines()
    assert out[1] == ("all ranks have ended" if cause is None else "all ranks have ended; broken: rank 1 died.")
    alive = [view(now_s, "dead", "idle", "dead", waits=NO_WAITS) for now_s in (1.0, 2.0)]
    _print(SimpleNamespace(problems=(), hidden=0), alive[1:], [group_rates.compare(*alive)], None)
    assert "ended" not in capsys.readouterr().out
