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
    other = before._replace(ranks=(*before.ranks[:2], before.ranks[2]._replace(rank=0)))
    for seen in (other, before._replace(ranks=before.ranks[:2])):
        assert group_rates.compare(seen, after) == group_rates.GroupRates((None,) * 3, None)
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


def shown(capsys, *views):
    """Return what ``top`` prints about the second of two views."""
    _print(SimpleNamespace(problems=(), hidden=0), views[1:], [group_rates.compare(*views)], None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "hosts", "titles"),
    [
        (160, 1, "rank pid state op call calls/s GB/s waiting for"),
        (115, 1, "rank pid state op call calls/s GB/s waiting for"),
        (100, 1, "rank state op call calls/s GB/s waiting for"),
        (80, 2, "rank state op calls/s GB/s waiting for between hosts"),
        (50, 2, "rank state GB/s waiting for"),
    ],
)
def test_a_narrow_view_has_whole_numbers(monkeypatch, capsys, width, hosts, titles):
    """A narrow view shortens calls, then leaves out columns; it is never wider than the terminal, and every number in
    it is complete."""
    call = "all_reduce sum float32[100000]"
    views = []
    for now_s, calls in ((10.0, 0), (11.0, 23_456)):
        waits = [[0, 0, 0.97], [0, 0, 0.97], [0.03, 0, 0]] if calls else NO_WAITS
        seen = view(now_s, "waiting", "waiting", "idle", waits=waits, calls=calls)
        each = []
        for one in seen.ranks:
            total, late = one.total._replace(nbytes=calls * 10**6), (2,) if one.rank < 2 else ()
            each.append(one._replace(pid=4_000_000, op=Op(1234567, call, 1.0, None), late=late, total=total))
        views.append(seen._replace(hosts=hosts, ranks=tuple(each)))
    monkeypatch.setenv("COLUMNS", str(width))
    out = shown(capsys, *views)
    assert all(len(line) <= width for line in out.splitlines()), out
    table = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in out.splitlines() if line[0] in "┃│"]
    heads, cells = table[:-3], table[-3:]
    assert " ".join(" ".join(" ".join(title).split()) for title in zip(*heads, strict=True)) == titles
    columns = {title: " ".join(numbers) for title, *numbers in zip(heads[0], *cells, strict=True)}
    due = {"rank": "0 1 2", "pid": "4000000 4000000 4000000", "op": "1234567 1234567 1234567", "for": "2 2 0"}
    due |= {"calls/s": "23,456.0 23,456.0 23,456.0", "GB/s": "23.456 23.456 23.456", "waiting": "97 % 97 % 3 %"}
    assert {title: numbers for title, numbers in due.items() if columns.get(title, numbers) != numbers} == {}
    assert columns["state"] in ("waits for rank 2 waits for rank 2 idle", "waiting waiting idle")
    for row in cells if "call" in heads[0] else ():
        text = row[heads[0].index("call")]
        assert text == call if width >= 160 else call.startswith(text.rstrip("…")) and len(text) >= 12


def test_a_group_whose_ranks_have_ended(capsys):
    """A group of which another process keeps the memory, and whose ranks have all ended, is described so."""
    for cause, line in ((None, "all ranks have ended"), ("rank 1 died.", "all ranks have ended; broken: rank 1 died.")):
        ended = [view(now_s, "dead", "left", "dead", waits=NO_WAITS)._replace(cause=cause) for now_s in (1.0, 2.0)]
        assert shown(capsys, *ended).splitlines()[1] == line
    assert "ended" not in shown(capsys, *(view(now_s, "dead", "idle", "dead", waits=NO_WAITS) for now_s in (1.0, 2.0)))
