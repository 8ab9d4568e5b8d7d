"""``crossreduce doctor``: report which rank broke a group of ranks, from the dumps of their flight recorders.

Input: the directory of the dumps. Output: sentences and a table, JSON, or a page with a time line. Without a directory,
the GPUs of this machine are checked.
"""

from __future__ import annotations

import gc
import json as json_module
import sys
from dataclasses import asdict
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import Annotated, Final

from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from ... import __version__
from ...errors import ArgumentError, printable
from ...observe.flight_recorder import Dump, read
from ..support.output import INVOKED, atomic_file, print_lines, terminal
from ..support.peers import check_peers, describe, is_wrong
from .diagnosis import Incident, diagnose
from .page import page

_MAX_ROWS: Final = 200  # of the table, which takes a millisecond per row
_MAX_GROUPS: Final = 50
_MAX_CALLS: Final = 1 << 20  # of all groups but the newest one together; each rank counts as a call, too
_MAX_PROBLEMS: Final = 200  # that are printed


def doctor(
    directory: Annotated[Path | None, Argument(metavar="DIR", help="The directory of the ranks' dumps.")] = None,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    report: Annotated[Path | None, Option(metavar="FILE.html", help="Write a page with a time line.")] = None,
) -> None:
    """Find the rank that kept the others waiting, and the state of each rank.

    Ranks write dumps when a rank is lost or a timeout has passed: into
    CROSSREDUCE_DUMP_DIR, or into the directory that the error names. The
    exit code is 1 if no dump can be read.

    Without DIR: check that the GPUs of this machine read each other's memory
    rightly. The exit code is 1 if one does not.
    """
    if directory is None:
        if report is not None:
            problem = "--report needs the directory of dumps."
            raise ArgumentError.of(problem, "no DIR", "crossreduce doctor DIR --report FILE.html")
        facts = check_peers()
        lines = [*describe(facts), "to read the dumps of ranks: crossreduce doctor DIR"]
        print_lines([json_module.dumps({"peer_reads": facts}, indent=2)] if json else lines)
        raise Exit(int(is_wrong(facts)))
    enabled = gc.isenabled()
    gc.disable()  # there is no garbage before the report, and with 20,000 dumps, collections double the time
    try:
        dumps_read = read(directory)
        found = [list(dumps) for _, dumps in groupby(dumps_read.dumps, key=lambda dump: (dump.group, dump.token))]
        groups, problems = _newest(found), list(dumps_read.problems)
        if len(groups) < len(found):
            problems.append(f"the dumps of {len(found) - len(groups)} other groups are left out: they are older.")
        incidents = [diagnose(dumps) for dumps in groups]
    finally:
        if enabled:
            gc.enable()
    with atomic_file("--report", report) as file:
        if file is not None and incidents:
            pairs = list(zip(incidents, groups, strict=True))
            about = f"{printable(INVOKED.get())} · crossreduce {__version__}"
            file.write_text(page(pairs, problems, about), "utf-8", errors="replace")
    if json:
        facts = {"incidents": [asdict(each) for each in incidents], "problems": problems}
        print(json_module.dumps(facts, indent=2))
    else:
        for incident in incidents:
            _show(incident)
        for problem in problems[:_MAX_PROBLEMS]:
            print("crossreduce:", printable(problem, "\n"), file=sys.stderr)
        if problems[_MAX_PROBLEMS:]:
            print(f"crossreduce: {len(problems) - _MAX_PROBLEMS} more problems; --json has them", file=sys.stderr)
    if not incidents:
        raise Exit(1)


def _newest(groups: list[list[Dump]]) -> list[list[Dump]]:
    """Return the groups whose dumps are the newest, in the given order: as many as can be reported in some seconds."""
    order = sorted(range(len(groups)), key=lambda k: max(dump.time for dump in groups[k]), reverse=True)
    costs = (groups[k][0].size + sum(len(each.ops) for dump in groups[k] for each in dump.histories) for k in order[1:])
    kept = [k for k, cost in zip(order[1:_MAX_GROUPS], accumulate(costs), strict=False) if cost <= _MAX_CALLS]
    return [groups[k] for k in sorted([*order[:1], *kept])]


def _show(incident: Incident) -> None:
    """Print one incident as text and a table."""
    title = f'Group "{incident.group}", {incident.about}'
    print_lines(map(printable, [title, *incident.findings, "The ranks raised:", *incident.raised.splitlines()]))
    table = Table()  # only columns with long texts may become narrower; their texts are folded and never cut off
    for name, long in (("rank", False), ("host, pid", True), ("op", False), ("state", False), ("dump", False)):
        table.add_column(name, no_wrap=not long, overflow="fold")
    table.add_column("call, stack", overflow="fold")
    blamed = {*incident.behind, *incident.missing}
    by_priority = chain(sorted(blamed), incident.without_dump, (state.rank for state in incident.ranks))
    listed = set(islice(dict.fromkeys(by_priority), _MAX_ROWS))
    for state in (state for state in incident.ranks if state.rank in listed):
        process = f"{state.hostname or '-'}\n{state.pid or '-'}"
        elapsed = "" if state.seconds is None else f"\n{state.seconds:.1f} s"
        dumped, called = "yes" if state.dumped else "no", "\n".join([state.text or "-", *state.stack])
        cells = [str(state.rank), process, str(state.sequence or "-"), f"{state.state}{elapsed}", dumped, called]
        style = "bold red" if state.rank in blamed else ""
        table.add_row(*(Text("\n".join(map(printable, cell.split("\n")))) for cell in cells), style=style)
    terminal().print(table)
    count = len(incident.ranks)
    if count > len(listed):
        print(f"{count - len(listed)} of {count} ranks are not in the table; --json has all of them.")
