"""``crossreduce top``: a live view of the groups of ranks on this machine, and of who keeps the others waiting.

Input: the memory of the groups, which is only read. Output: a view on the terminal, a table, or JSON. The command does
not disturb a group: it takes no lock of the group, and can be ended at any time.
"""

from __future__ import annotations

import json as json_module
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from ...errors import ArgumentError, printable, shown
from ...observe.liveness import is_started_by
from ...observe.observer import GroupView, Observer
from ..support.output import terminal
from ..support.tables import TableColumn, can_fit, columns_that_fit, fitted_table
from .group_rates import GroupRates, compare, percent_text, state_words

_LEAST_INTERVAL_S: Final = 0.1
_MOST_INTERVAL_S: Final = 3600.0
_MOST_ROWS: Final = 1000  # the most rows of a table that is printed, and not shown live
_LEAST_ROWS: Final = 3  # the rows of each group if the terminal has too few lines for all ranks
_LINES_BESIDE: Final = 8  # the lines of a group besides the rows: text, the frame and head of the table, a note
_SHORTEST_CALL: Final = 16  # the fewest characters of a call that a narrow table shows
# The columns that narrow tables leave out, one after another. Before the second tuple, states are shortened.
_LEFT_OUT: Final = (("call",), ("op", "pid", "calls/s", "between hosts", "GB/s"))
_MOST_IDLE: Final = 3  # the tables of idle groups, if all are idle; otherwise idle groups have none
_MOST_NAMED: Final = 5  # of the idle groups without a table
_BAD: Final = ("dead", "stopped")  # states of ranks, as are these:
_ENDED: Final = ("dead", "left")


class Wanted(NamedTuple):
    """Which groups are shown: all, those of a name, or those with a rank that a process has started or is."""

    name: str | None = None
    pid: int | None = None

    def includes(self, view: GroupView) -> bool:
        """Return whether a group is shown."""
        started = (one.pid is not None and is_started_by(one.pid, self.pid) for one in view.ranks if self.pid)
        return self.name in (None, view.name) and (self.pid is None or any(started))


def top(
    once: Annotated[bool, Option("--once", help="Print the state after one interval, and exit.")] = False,
    interval: Annotated[float, Option(help="Seconds between two updates.")] = 1.0,
    group: Annotated[str | None, Option(help="Only groups of this name.")] = None,
    pid: Annotated[int | None, Option(help="Only groups of this process, or of one that it has started.")] = None,
    json: Annotated[bool, Option("--json", help="Print one line of JSON per update.")] = False,
) -> None:
    """Watch the ranks of this machine: calls, GB/s, waits, and the straggler.

    It shows the groups of your own processes, and reads their memory without
    disturbing them. Press q to quit. With --once, the exit code is 1 if it
    finds no group.
    """
    if not _LEAST_INTERVAL_S <= interval <= _MOST_INTERVAL_S:
        limits = f"{_LEAST_INTERVAL_S:g} to {_MOST_INTERVAL_S:g}"
        raise ArgumentError.of("--interval must be a number of seconds.", shown(interval), limits)
    observer, wanted = Observer(), Wanted(group, pid)
    try:
        if once:
            _print_once(observer, interval, wanted, json)
        elif json:
            for views, rates in _updates(observer, interval, wanted, _sleep):
                print(json_module.dumps(_report(observer, views, rates)), flush=True)
        elif not sys.stdout.isatty():
            for views, rates in _updates(observer, interval, wanted, _sleep):
                _print(observer, views, rates, wanted)
        else:
            _show_live(observer, interval, wanted)
    finally:
        observer.close()


def _print_once(observer: Observer, interval: float, wanted: Wanted, json: bool) -> None:
    updates = _updates(observer, interval, wanted, _sleep)
    next(updates)  # the first update has no rates
    views, rates = next(updates)
    if json:
        print(json_module.dumps(_report(observer, views, rates)))
    else:
        _print(observer, views, rates, wanted)
    if not views:
        raise Exit(1)


def _print(observer: Observer, views: Sequence[GroupView], rates: Sequence[GroupRates], wanted: Wanted) -> None:
    console = terminal()
    console.print(_page(observer, views, rates, wanted, None, console.width))


def _show_live(observer: Observer, interval: float, wanted: Wanted) -> None:
    """Update the screen until the user presses q or Ctrl-C."""
    with _keys() as wait_for_key, Live(screen=True, auto_refresh=False) as live:
        for views, rates in _updates(observer, interval, wanted, wait_for_key):
            width, height = live.console.size
            live.update(_page(observer, views, rates, wanted, height, width), refresh=True)


def _updates(
    observer: Observer, interval: float, wanted: Wanted, wait: Callable[[float], bool]
) -> Iterator[tuple[list[GroupView], list[GroupRates]]]:
    """Yield the groups and their rates, now and after each interval, until ``wait(interval)`` returns True."""
    before: dict[tuple[int, int], GroupView] = {}
    while True:
        observer.search()
        views = [view for view in observer.snapshots() if wanted.includes(view)]
        yield views, [compare(before.get(view.key), view) for view in views]
        before = {view.key: view for view in views}
        if wait(interval):
            return


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for the key q, up to a number of seconds, and returns whether it was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # Windows has neither this module nor groups of ranks
    import tty

    number = sys.stdin.fileno()
    settings = termios.tcgetattr(number)

    def wait_for_key(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            ready = select.select([number], [], [], remaining)[0]
            if ready and os.read(number, 1) in (b"q", b"Q", b""):  # b"": the terminal was closed
                return True
        return False

    try:
        tty.setcbreak(number)
        yield wait_for_key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, settings)


def _page(
    observer: Observer,
    views: Sequence[GroupView],
    rates: Sequence[GroupRates],
    wanted: Wanted,
    height: int | None,
    width: int,
) -> RenderableType:
    """Return the content of the screen: the groups, and why memory could not be read.

    Groups that make calls come first. Beside others, idle groups are only named, unless the user has selected groups.
    ``height``: the lines of the terminal, which limit the ranks that are shown of each group, or ``None``.
    """
    parts: list[RenderableType] = []
    pairs = sorted(zip(views, rates, strict=True), key=lambda pair: _priority(*pair))
    idle = sum(_priority(*pair) == 2 for pair in pairs) if wanted == Wanted() else 0
    count = len(pairs) - idle or min(idle, _MOST_IDLE)
    rows = _MOST_ROWS if height is None else max(_LEAST_ROWS, (height - 2) // max(1, count) - _LINES_BESIDE)
    for view, rate in pairs[:count]:
        parts += [*_head(view, rate), _table(view, rate, rows, width)]
        if len(view.ranks) > rows:
            parts.append(Text(f"{len(view.ranks) - rows} more ranks of this group: --once or --json lists them"))
    if named := [printable(_name(view)) for view, _ in pairs[count:]]:
        more = f", and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        groups = "1 more group is" if len(named) == 1 else f"{len(named)} more groups are"
        listed = f"{', '.join(named[:_MOST_NAMED])}{more}"
        parts.append(Text(f"{groups} idle (--pid PID shows one): {listed}", style="dim"))
    if not views:
        of_name = "" if wanted.name is None else f' of the name "{printable(wanted.name)}"'
        of_process = "" if wanted.pid is None else f" of process {wanted.pid}"
        parts.append(Text(f"No group of ranks{of_name}{of_process} runs in your processes on this machine."))
        if observer.hidden:
            parts.append(Text(f"{observer.hidden} processes of other users were not searched.", style="dim"))
    parts += [Text(printable(problem), style="yellow") for problem in observer.problems]
    return Group(*parts)


def _priority(view: GroupView, rates: GroupRates) -> int:
    """Return 0 for a group that makes calls, 2 if it is idle or has ended, and 1 for others, such as broken ones."""
    states = {one.state for one in view.ranks}
    if states & {"running", "waiting"} or any(rate and rate.calls_per_s for rate in rates.ranks):
        return 0
    is_quiet = states <= {"idle", "left"} or states <= {*_ENDED}
    return 2 if is_quiet and view.cause is None and all(rates.ranks) else 1


def _name(view: GroupView) -> str:
    """Return the name of a group, with its program and the process of its first rank."""
    return f'"{view.name}"' if view.pid is None else f'"{view.name}" of {view.program or "a program"} (pid {view.pid})'


def _head(view: GroupView, rates: GroupRates) -> Iterator[Text]:
    """Yield the two lines above a group's table: its name, size and last op; and what is wrong, or the straggler."""
    size = f"{len(view.ranks)} rank{'' if len(view.ranks) == 1 else 's'}"
    if view.hosts > 1:
        size = f"{len(view.ranks)} of {view.size} ranks are on this host, one of {view.hosts}"
    last = max((one.op.sequence for one in view.ranks if one.op), default=0)
    yield Text(printable(f"group {_name(view)}, {size}, op {last}"), style="bold")
    ended = "all ranks have ended" if all(one.state in _ENDED for one in view.ranks) else ""
    if view.cause is not None:
        cause = "broken: " + view.cause.partition("\n")[0]
        yield Text(printable(f"{ended}; {cause}" if ended else cause), style="bold red")
    elif ended:
        yield Text(ended, style="dim")
    elif rates.straggler is not None:
        by_rank = {one.rank: one for one in view.ranks}
        state = by_rank[rates.straggler.rank].state
        yield Text(rates.sentence + (f"; it is {state}" if state in _BAD else ""), style="bold red")
    else:
        measured = any(one is not None for one in rates.ranks)
        yield Text(rates.sentence if measured else "measuring ...", style="green" if measured else "dim")


def _table(view: GroupView, rates: GroupRates, rows: int, width: int) -> Table:
    """Return a table of up to ``rows`` ranks. If there are more, the straggler and ranks in a bad state come first."""
    straggler = None if rates.straggler is None else rates.straggler.rank
    pairs = list(zip(view.ranks, rates.ranks, strict=True))
    if len(pairs) > rows:
        pairs.sort(key=lambda pair: (pair[0].rank != straggler, pair[0].state not in _BAD, pair[0].rank))
    ranks = [one for one, _ in pairs[:rows]]
    rank_rates = [rate for _, rate in pairs[:rows]]
    calls = ["-" if one.op is None else printable(one.op.text) for one in ranks]
    columns = [
        TableColumn("rank", [str(one.rank) for one in ranks]),
        TableColumn("pid", ["-" if one.pid is None else str(one.pid) for one in ranks]),
        TableColumn("state", [state_words(one) for one in ranks], left=True),
        TableColumn("op", ["-" if one.op is None else str(one.op.sequence) for one in ranks]),
        TableColumn("call", calls, left=True, shortest=_SHORTEST_CALL),
        TableColumn("calls/s", [f"{rate.calls_per_s:,.1f}" if rate else "-" for rate in rank_rates]),
        TableColumn("GB/s", [f"{rate.bytes_per_s / 1e9:.3f}" if rate else "-" for rate in rank_rates]),
        TableColumn("waiting", [percent_text(rate.waiting) if rate else "-" for rate in rank_rates]),
        TableColumn(
            "for", [str(rate.waiting_for) if rate and rate.waiting_for is not None else "-" for rate in rank_rates]
        ),
    ]
    if view.hosts > 1:
        shares = [percent_text(rate.between_hosts) if rate else "-" for rate in rank_rates]
        columns.append(TableColumn("between hosts", shares))
    columns = columns_that_fit(columns, _LEFT_OUT[0], width)
    if not can_fit(columns, width):  # states may lose "waits for rank 1": the column "for" names the rank, too
        brief = TableColumn("state", [one.state for one in ranks], left=True)
        columns = columns_that_fit([brief if each.title == "state" else each for each in columns], _LEFT_OUT[1], width)
    styles = {
        number: "bold red" if one.rank == straggler or one.state in _BAD else "dim"
        for number, one in enumerate(ranks)
        if one.rank == straggler or one.state in (*_BAD, "left")
    }
    return fitted_table(columns, width, styles)


def _report(observer: Observer, views: Sequence[GroupView], rates: Sequence[GroupRates]) -> dict[str, Any]:
    """Return one update as a dict for JSON."""
    groups = []
    for view, rate in zip(views, rates, strict=True):
        ranks = []
        for one, each in zip(view.ranks, rate.ranks, strict=True):
            counters = {
                "total": one.total._asdict(),
                "waits": {str(rank): wait._asdict() for rank, wait in one.waits.items()},
            }
            call = None if one.op is None else one.op._asdict()
            facts = {"rank": one.rank, "pid": one.pid, "state": one.state, "late": one.late, "op": call}
            ranks.append({**facts, **counters, "rates": None if each is None else each._asdict()})
        about = {
            name: getattr(view, name)
            for name in ("name", "program", "token", "version", "size", "hosts", "now_s", "cause")
        }
        straggler = None if rate.straggler is None else rate.straggler._asdict()
        groups.append({"group": about.pop("name"), **about, "straggler": straggler, "ranks": ranks})
    return {"groups": groups, "problems": observer.problems, "hidden_processes": observer.hidden}
