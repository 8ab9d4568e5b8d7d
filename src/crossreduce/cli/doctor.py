"""``crossreduce doctor``: who broke a group of ranks, read from what they wrote down.

In: the directory of the dumps.  Out: words, then a table; or JSON. A rank that could not write, being stopped or
dead, is judged by what the others of its host saw of it in shared memory.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ranks.diagnostics import named
from ..ranks.flight_recorder import Dump, Frame, History, Thread, read
from ..ranks.shared_memory import LEFT

_SHOWN: Final = 3  # functions of a stack
_SILENT: Final = ": it was stopped, busy elsewhere, or dead"
_WITHIN: Final = re.compile(r"[/\\](crossreduce[/\\](processes|torch)|torch[/\\]distributed)[/\\]")


@dataclass(frozen=True)
class Place:
    """Where one rank was when its group broke. ``state``: finished, begun, left, idle (no call so far) or unknown."""

    rank: int
    host: int
    hostname: str | None
    pid: int | None
    sequence: int
    text: str
    state: str
    seconds: float | None
    """Since it began the call, or ended it, until the first rank of its host gave up."""
    dumped: bool
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Incident:
    """How one group broke: what is said of it, and where each rank was."""

    group: str
    time: str
    cause: str
    words: tuple[str, ...]
    behind: tuple[int, ...]
    missing: tuple[int, ...]
    """Of these there is neither a dump nor a trace."""
    silent: tuple[int, ...]
    """These wrote no dump, but others saw them."""
    places: tuple[Place, ...]


def doctor(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the ranks wrote what they did last.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which rank kept the others waiting, and where each of them stood.

    Ranks write these files when they lose another or have waited too long:
    into CROSSREDUCE_DUMP_DIR, or where the error says. Exits with 1 if there
    is nothing that can be read.
    """
    found = read(directory)
    incidents = [incident(list(dumps)) for _, dumps in groupby(found.dumps, key=lambda dump: (dump.group, dump.token))]
    if json:
        report = {"incidents": [asdict(each) for each in incidents], "problems": list(found.problems)}
        print(json_module.dumps(report, indent=2))
    else:
        for each in incidents:
            _show(each)
        for problem in found.problems:
            print("crossreduce:", "\n".join(map(_safe, problem.splitlines())), file=sys.stderr)
    if not incidents:
        raise typer.Exit(1)


def incident(dumps: Sequence[Dump]) -> Incident:
    """Return what the dumps of one group's ranks say together; at least one, of any ranks."""
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.now_s)}
    first = min(newest.values(), key=lambda dump: (dump.time, dump.rank))
    by_rank = {rank: _place(rank, first, newest) for rank in sorted(rank for host in first.hosts for rank in host)}
    places = list(by_rank.values())
    last = max(place.sequence for place in places)
    text = next(place.text for place in places if place.sequence == last)
    missing = [place.rank for place in places if place.state == "unknown"]
    silent = [place.rank for place in places if not place.dumped and place.state != "unknown"]
    behind = [place.rank for place in places if place.state == "left"]
    behind += [place.rank for place in places if place.state not in ("unknown", "left") and place.sequence < last]
    if not behind:  # nobody is at an earlier call: who began the last one and could not even write is suspected
        behind = [
            place.rank for place in places if place.sequence == last and not place.dumped and place.state == "begun"
        ]
    ended = re.search(" (died|left|was interrupted|were interrupted) ", first.cause.split("\n")[0])
    words = [_said(by_rank[rank], last, text, "" if ended else _SILENT) for rank in sorted(behind)]
    waiting = [place.rank for place in places if place.sequence == last and place.rank not in behind]
    begun = [rank for rank in waiting if by_rank[rank].state == "begun"]
    if begun and last:
        words.append(f"{named(begun)} {_was(begun)} in op {last}, {text}.")
    finished = [rank for rank in waiting if by_rank[rank].state == "finished"]
    if finished:
        words.append(f"{named(finished)} had finished op {last}, {text}.")
    if missing:
        words.append(f"Nothing is known of {named(missing)}: no dump, and no trace in another rank's.")
    if not behind and not missing:
        words.append("All ranks were equally far: none of them is behind.")
    return Incident(
        group=first.group,
        time=first.time,
        cause=first.cause,
        words=tuple(words),
        behind=tuple(behind),
        missing=tuple(missing),
        silent=tuple(silent),
        places=tuple(places),
    )


def _place(rank: int, first: Dump, dumps: dict[int, Dump]) -> Place:
    """Return where a rank was when the first of its host gave up: by its own dump, else by the latest of its host's."""
    host = next(k for k, ranks in enumerate(first.hosts) if rank in ranks)
    own = dumps.get(rank)
    beside = [dumps[other] for other in first.hosts[host] if other in dumps]
    witnesses = [own] if own is not None else sorted(beside, key=lambda dump: -dump.now_s)
    seen = next((history for dump in witnesses for history in dump.histories if history.rank == rank), None)
    history = seen or History(rank, ())
    # Who is late may come after all and write down another picture: ranks of a host have one clock, so all are seen as
    # they were when the first gave up.
    now_s = min((dump.now_s for dump in beside), default=0.0)
    ops = [op._replace(ended_s=None if op.ended_s is None or op.ended_s > now_s else op.ended_s) for op in history.ops]
    before = [op for op in ops if op.started_s <= now_s]
    op = max(before, default=None)
    left = op is not None and op.text == LEFT
    if left:
        op = max((each for each in before if each.text != LEFT), default=None)
    state = "unknown" if seen is None else "left" if left else "idle" if op is None else "finished"
    if state == "finished" and op is not None and op.ended_s is None:
        state = "begun"
    seconds = None if op is None else now_s - (op.started_s if op.ended_s is None else op.ended_s)
    return Place(
        rank=rank,
        host=host,
        hostname=next((dump.hostname for dump in [*witnesses, *beside]), None),
        pid=own.pid if own is not None else history.pid,
        sequence=op.sequence if op else 0,
        text=op.text if op else "",
        state=state,
        seconds=seconds,
        dumped=own is not None,
        stack=_stack(own.threads) if own is not None else (),
    )


def _said(place: Place, last: int, text: str, silent: str) -> str:
    """Return what is said of a rank that is behind; ``silent``: why it may have written no dump."""
    where = f"{named([place.rank])} ({_process(place)})"
    ago = "" if place.seconds is None else f" {place.seconds:.1f} s before"
    if place.state == "left":
        line = f"{where} left the group after op {place.sequence}{f', {place.text}' if place.text else ''}."
    elif place.sequence == last:
        line = f"{where} is suspected: it began op {last}, {text},{ago} and stopped in it."
    elif place.state == "idle":
        line = f"{where} is behind: it has made no call so far; op {last}, {text}, waits for it."
    else:
        did = "was still in" if place.state == "begun" else "had finished"
        line = f"{where} is behind: it {did} op {place.sequence}, {place.text},{ago}; op {last}, {text}, waits for it."
    if not place.dumped:
        return f"{line} It wrote no dump{silent}."
    return line + (f" It stood at {place.stack[0]}." if place.stack else "")


def _process(place: Place) -> str:
    pid = "pid unknown" if place.pid is None else f"pid {place.pid}"
    return pid if place.hostname is None else f"{pid} on {place.hostname}"


def _was(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _stack(threads: tuple[Thread, ...]) -> tuple[str, ...]:
    """Return the main thread's innermost functions, the innermost first: those of the program that called us."""
    frames = list(threads[0].stack) if threads else []
    own = [frame for frame in frames if not _WITHIN.search(frame.file)]
    return tuple(_at(frame) for frame in reversed((own or frames)[-_SHOWN:]))


def _at(frame: Frame) -> str:
    return f"{frame.function} ({'/'.join(Path(frame.file).parts[-2:])}:{frame.line})"


def _show(each: Incident) -> None:
    """Print one group's story for people."""
    console = Console()
    hosts = len({place.host for place in each.places})
    ranks = f"{len(each.places)} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    lines = [f'Group "{each.group}", {ranks}, {each.time}', *each.words, "They raised:", *each.cause.splitlines()]
    for line in lines:
        print(_safe(line))
    table = Table("rank", "host", "pid", "op", "call", "state", "since", "dump")
    table.add_column("stands at", overflow="fold")  # a place without its line is of no use
    for place in each.places:
        mark = "bold red" if place.rank in (*each.behind, *each.missing) else ""
        cells = [
            str(place.rank),
            "-" if place.hostname is None else place.hostname,
            "-" if place.pid is None else str(place.pid),
            str(place.sequence or "-"),
            place.text or "-",
            place.state,
            "-" if place.seconds is None else f"{place.seconds:.1f} s",
            "yes" if place.dumped else "no",
            "\n".join(place.stack) or "-",
        ]
        table.add_row(*(Text("\n".join(map(_safe, cell.split("\n")))) for cell in cells), style=mark)
    console.print(table)


def _safe(text: str) -> str:
    """Return a file's text without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)
