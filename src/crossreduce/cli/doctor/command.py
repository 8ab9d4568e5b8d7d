"""``crossreduce doctor``: report which rank broke a group of ranks, from the dumps of their flight recorders.

Input: the directory of the dumps. Output: sentences and a table, JSON, or a page with a time line. Without a directory,
the GPUs of this machine are checked.
"""

from __future__ import annotations

import gc
import json as json_module
import sys
from dataclasses import asdict
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Annotated, Final

from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from ...errors import ArgumentError
from ...observe.flight_recorder import read
from ..support.output import atomic_file, print_lines, printable, terminal
from ..support.peers import check_peers, describe, is_wrong
from .diagnosis import Incident, diagnose
from .page import page

_MAX_ROWS: Final = 200  # of the table, which takes a millisecond per row


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
        print_lines([json_module.dumps({"peer_reads": facts}, indent=2)] if json else describe(facts))
        raise Exit(int(is_wrong(facts)))
    enabled = gc.isenabled()
    gc.disable()  # there is no garbage before the report, and with 20,000 dumps, collections double the time
    try:
        dumps_read = read(directory)
        groups = [list(dumps) for _, dumps in groupby(dumps_read.dumps, key=lambda dump: (dump.group, dump.token))]
        incidents = [diagnose(dumps) for dumps in groups]
    finally:
        if enabled:
            gc.enable()
    with atomic_file("--report", report) as file:
        if file is not None and incidents:
            pairs = list(zip(incidents, groups, strict=True))
            file.write_text(page(pairs, dumps_read.problems), "utf-8", errors="replace")
    if json:
        facts = {"incidents": [asdict(each) for each in incidents], "problems": list(dumps_read.problems)}
        print(json_module.dumps(facts, indent=2))
    else:
        for incident in incidents:
            _show(incident)
        for problem in dumps_read.problems:
            print("crossreduce:", "\n".join(map(printable, problem.splitlines())), file=sys.stderr)
    if not incidents:
        raise Exit(1)


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
