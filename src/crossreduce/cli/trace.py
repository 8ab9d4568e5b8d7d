"""``crossreduce trace``: the collectives of all ranks on one clock, for Perfetto or as a table.

Input: the directory of a trace (CROSSREDUCE_TRACE, ``crossreduce.trace``). Output: a table, JSON, or a file in Chrome's
Trace Event Format, in which each call has the predicted time of its plan.

The prediction is the simulated time of the schedule between hosts. It requires that the links between the hosts were
measured (``measure_topology``) or are given by ``--topology``. It does not contain the work inside the hosts, and calls
on one host have no prediction.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final

from rich.text import Text
from typer import Argument, Option

from ..errors import ArgumentError, ReductionError, printable, rank_list
from ..observe.traces.calls import CALL_TEXT, EXACT, GroupTrace, TracedCall, newest, read_directory
from ..observe.traces.chrome import Predict, to_chrome
from ..observe.traces.clocks import ClockShift, align
from ..observe.traces.summary import SummaryRow, straggler, summarize
from ..ops import ReduceOp, copy_numbers
from ..packing import itemsize
from ..ranks.inter_host.two_level import host_names, host_schedule
from ..ranks.intra_host.instructions import reduction_numbers
from ..ranks.intra_host.partial_sums import partial_itemsize, travelling_itemsize
from ..schedule import simulate
from ..topology import Topology
from .support.output import atomic_file, print_lines, progress, short_size, terminal
from .support.tables import TableColumn, columns_that_fit, fitted_table
from .top.group_rates import NOTEWORTHY, percent_text, waiting_sentence

_LEFT_OUT: Final = ("GB/s", "count", "plan", "queue", "median")  # columns that narrow tables lack, in this order
MOST_PHASES: Final = 1_000_000  # calls and phases in a file for a viewer, which needs about 250 bytes for each
_MOST_SHOWN: Final = 3  # the most ranks that a row names as ranks for which others waited
_MOST_NOTES: Final = 20
_MOST_ROWS: Final = 100  # of each group, the rows with the most time


def trace(
    directory: Annotated[Path, Argument(metavar="DIR", help="The directory of the ranks' files.")],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write Chrome Trace Event JSON, for Perfetto.")
    ] = None,
    run: Annotated[int, Option("--run", metavar="K", help="The run, if there are several; 0: the last.", min=0)] = 0,
    topology: Annotated[
        Path | None, Option("--topology", metavar="FILE", help="The links between the hosts, for predictions.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show the collectives that ranks have recorded: times, waits, and for whom.

    Ranks record them if CROSSREDUCE_TRACE names a directory, or by
    crossreduce.trace.start. With -o, all ranks are written on one clock to a
    file that ui.perfetto.dev and chrome://tracing open.
    """
    links = None if topology is None else Topology.load(topology)
    with atomic_file("--output", output) as file, progress("reading", 3) as advance:
        traces = read_directory(directory)
        if run > len(traces.runs):
            last = len(traces.runs)
            problem = f"{directory} has {last} run{'' if last == 1 else 's'}."
            raise ArgumentError.of(problem, f"--run {run}", "--run 1" if last == 1 else f"--run 1 to {last}")
        groups = traces.runs[(run or len(traces.runs)) - 1]
        advance("aligning clocks")
        shifts = align(groups)
        notes = [*traces.notes, *_notes(groups, shifts, len(traces.runs), run, links)]
        predict = _prediction(links)
        advance("writing")
        if file is not None:
            shown = [newest(group, MOST_PHASES // len(groups)) for group in groups]
            left_out = sum(count for _, count in shown)
            if left_out:
                notes.append(f"{output} has the newest calls only: {left_out} older ones are left out.")
            file.write_text(to_chrome([group for group, _ in shown], shifts, predict, notes), "utf-8")
        if not any(trace.calls for group in groups for trace in group.ranks.values()):
            notes.append("no calls were recorded.")
        rows = summarize(groups, shifts) if json or output is None else []
        newest_calls = {
            (group.token, call.text): (group, call)
            for group in groups
            for trace in reversed(group.ranks.values())
            for call in trace.calls
        }
        predicted = [predict(*newest_calls[row.token, row.text]) for row in rows]
        advance("done")
    if json:
        stragglers = [_straggler_json(group_rows) for group_rows in _by_group(rows)]
        report = {"rows": [*map(_row_json, rows, predicted)], "stragglers": stragglers, "notes": notes}
        print(json_module.dumps(report, indent=2))
        return
    if output is None:
        _show(rows, predicted)
    else:
        calls = sum(len(each.calls) for group, _ in shown for each in group.ranks.values())
        ranks = sum(len(group.ranks) for group in groups)
        print_lines([f"{output}: {calls} calls of {ranks} ranks; open it at https://ui.perfetto.dev"])
    for note in notes[:_MOST_NOTES]:
        print("crossreduce:", printable(note), file=sys.stderr)
    if notes[_MOST_NOTES:]:
        print(f"crossreduce: {len(notes) - _MOST_NOTES} more notes; --json has all of them", file=sys.stderr)


def _notes(
    groups: Sequence[GroupTrace], shifts: dict[str, ClockShift], run_count: int, run: int, given: Topology | None
) -> list[str]:
    """Return sentences about missing files, missing predictions, and how well the clocks are aligned."""
    notes = []
    if run_count > 1 and not run:
        notes.append(f"the directory has {run_count} runs; this is the last, and --run 1 is the first.")
    for group in groups:
        missing = [rank for host in group.hosts for rank in host if rank not in group.ranks]
        if missing:
            notes.append(f'group "{group.name}" ({group.token}) has no file of {rank_list(missing)}.')
        if len(group.hosts) > 1 and not group.topologies and given is None:
            text = f'group "{group.name}": no prediction, since the links between its hosts were not measured'
            notes.append(f"{text} (measure_topology, or --topology).")
    hosts = {trace.facts.clock: trace.facts.hostname for group in groups for trace in group.ranks.values()}
    for clock, shift in shifts.items():
        if shift.error_ns is None:
            notes.append(f"the clock of host {hosts[clock]} was aligned by the calendar time only, with unknown error.")
        elif shift.error_ns:
            error = f"{shift.error_ns / 1e3:.1f} us"
            notes.append(f"the clock of host {hosts[clock]} was aligned with an error of at most {error}.")
    return notes


def _prediction(given: Topology | None) -> Predict:
    """Return a function that predicts the seconds of a call: on ``given``, or on the links measured before the call."""

    @lru_cache(maxsize=4096)
    def simulated_s(hosts: tuple[tuple[int, ...], ...], topology: Topology, text: str, nbytes: int) -> float | None:
        match = CALL_TEXT.fullmatch(text)
        if match is None or nbytes == 0:
            return None
        collective, root = match["collective"], match["root"]
        op, dtype, ranks = match["op"], match["dtype"], sum(map(len, hosts))
        try:
            numbers = copy_numbers(dtype)
            if op:
                numbers = reduction_numbers(ReduceOp(op.removeprefix(EXACT)), dtype, ranks, op.startswith(EXACT))
            widened = partial_itemsize(numbers) > itemsize(numbers.result)
            moved = nbytes // itemsize(dtype) * travelling_itemsize(numbers, collective)
            rounded = 1 << (moved - 1).bit_length()  # ranks plan for these bytes, too
            schedule = host_schedule(topology, hosts, collective, rounded, None if root is None else int(root), widened)
            return float(simulate(schedule, topology, moved).seconds)
        except (ReductionError, ValueError, KeyError):  # such as a topology of other hosts
            return None

    def predict(group: GroupTrace, call: TracedCall) -> float | None:
        if len(group.hosts) < 2 or call.nbytes is None:
            return None
        measured = bisect_left(group.topologies, call.number, key=itemgetter(0))  # how many before the call
        topology = group.topologies[measured - 1][1] if given is None and measured else given
        if topology is None or {*topology.devices} != {*host_names(len(group.hosts))}:
            return None
        hosts, local = _local_ranks(group)  # plans use these ranks, but texts of calls name the global rank of a root
        text = re.sub(r"root (\d{1,18})\b", lambda match: f"root {local.get(int(match[1]), match[1])}", call.text)
        return simulated_s(hosts, topology, text, call.nbytes)

    return predict


def _local_ranks(group: GroupTrace) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Return each host's ranks, numbered within the group from 0, and a dict from global ranks to these numbers."""
    local = {rank: k for k, rank in enumerate(sorted(rank for host in group.hosts for rank in host))}
    return tuple(tuple(local[rank] for rank in host) for host in group.hosts), local


def _row_json(row: SummaryRow, predicted: float | None) -> dict[str, Any]:
    lists = {
        "waited_for": [{"rank": rank, "share": share} for rank, share in row.waited_for],
        "rank_seconds": [{"rank": rank, "seconds": seconds} for rank, seconds in row.rank_seconds],
    }
    return {**row._asdict(), **lists, "gb_per_s": row.gb_per_s, "predicted_seconds": predicted}


def _straggler_json(rows: Sequence[SummaryRow]) -> dict[str, Any]:
    rank, share = straggler(rows)
    named = share >= NOTEWORTHY
    return {"group": rows[0].group, "token": rows[0].token, "rank": rank if named else None, "share": share}


def _by_group(rows: Iterable[SummaryRow]) -> list[list[SummaryRow]]:
    groups: dict[str, list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault(row.token, []).append(row)
    return [*groups.values()]


def _show(rows: Sequence[SummaryRow], predicted: Sequence[float | None]) -> None:
    """Print for each group the rank for which the others wait, and a table with the predicted seconds of each row."""
    plans = dict(zip(((row.token, row.text) for row in rows), predicted, strict=True))
    console = terminal()
    for group_rows in _by_group(rows):
        rank, share = straggler(group_rows)
        console.print(Text(printable(f'group "{group_rows[0].group}" ({group_rows[0].token})'), style="bold"))
        named = share >= NOTEWORTHY
        sentence = f"{waiting_sentence(rank if named else None, share)} in collectives"
        console.print(Text(sentence, "bold red" if named else "green"))
        shown = group_rows[:_MOST_ROWS]
        columns = _columns(shown, [plans[row.token, row.text] for row in shown])
        console.print(fitted_table(columns_that_fit(columns, _LEFT_OUT, console.width, 0), console.width))
        if group_rows[_MOST_ROWS:]:
            print_lines([f"and {len(group_rows) - _MOST_ROWS} more rows; --json has all of them"])


def _columns(rows: Sequence[SummaryRow], plans: Sequence[float | None]) -> list[TableColumn]:
    """Return the columns of a group's table. Columns for queues and plans are left out if they would be empty."""
    columns = [
        TableColumn("call", [printable(row.text) for row in rows], left=True, fold=" "),
        TableColumn("bytes", ["-" if row.nbytes is None else short_size(row.nbytes) for row in rows]),
        TableColumn("count", [_count(row) for row in rows], fold=" "),
        TableColumn("median", [_time(row.seconds) for row in rows]),
        TableColumn("GB/s", ["-" if row.gb_per_s is None else f"{row.gb_per_s:.3g}" for row in rows]),
        TableColumn("not waiting", [_time(row.own_seconds) for row in rows]),
    ]
    if any(row.queue_seconds is not None for row in rows):
        columns.append(TableColumn("queue", [_time(row.queue_seconds) for row in rows]))
    columns.append(TableColumn("waiting", [percent_text(row.waiting) for row in rows]))
    columns.append(TableColumn("for whom", [_whom(row) for row in rows], left=True, fold=", "))
    if any(seconds is not None for seconds in plans):
        columns.append(TableColumn("plan", [_time(seconds) for seconds in plans]))
    return columns


def _count(row: SummaryRow) -> str:
    return f"{row.calls}" + (f" ({row.unfinished} not ended)" if row.unfinished else "")


def _whom(row: SummaryRow) -> str:
    ranks = [f"rank {rank} {percent_text(share)}" for rank, share in row.waited_for[:_MOST_SHOWN]]
    return ", ".join([*ranks, *(["..."] if row.waited_for[_MOST_SHOWN:] else [])]) or "-"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    unit, value = next(
        ((unit, seconds * factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if seconds * factor >= 1),
        ("us", seconds * 1e6),
    )
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
