"""``crossreduce verify``: prove that a schedule's file computes what it claims, whoever wrote it.

In: MSCCL XML, or a schedule's JSON.  Out: what was proved, or what is wrong. Nothing runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from .. import Schedule
from .. import verify as prove
from ..errors import ArgumentError, ScheduleError
from .output import progress

LARGEST: Final = 1 << 26  # bytes; the JSON of a schedule of a million steps has 20 million


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="MSCCL XML, or a schedule in crossreduce's JSON.")],
) -> None:
    """Prove that a schedule's file computes its collective, whoever wrote it.

    Each result has each contribution exactly once; MSCCL XML is also free of
    deadlocks and races. Exits with 1 where it is wrong, and with 2 where it
    cannot be read or judged.
    """
    with progress("reading", 2) as tick:
        try:
            proof = _read(file)
        except ScheduleError as error:
            error.prefix(str(file))
            raise
        tick("proving")
        fault = None
        try:
            proved = proof()
        except ScheduleError as error:
            fault = error
    if fault is not None:
        print(f"crossreduce: {file} is wrong: {fault}", file=sys.stderr)
        raise typer.Exit(1)
    print(proved)


def _read(file: Path) -> Callable[[], str]:
    """Read a file, and return the function that says in words what is proved of it, or raises ScheduleError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{file} is no text in UTF-8.") from error
    if len(data) > LARGEST:
        raise ArgumentError(f"{file} has more than {LARGEST} bytes.")
    start = text.lstrip()[:1]
    if start not in ("<", "{"):
        raise ArgumentError(f"{file} is neither MSCCL XML nor a schedule in JSON.")
    if start == "{":
        schedule = Schedule.from_json(text)

        def proved() -> str:
            prove(schedule)
            return f"{schedule.head}: right."

        return proved
    from ..export.msccl.format import JUDGED, read_msccl_xml
    from ..export.msccl.verifier import verify_msccl_xml

    kind = read_msccl_xml(text).coll
    if kind not in JUDGED:
        raise ArgumentError(f"{file} cannot be judged: its collective is {kind}, and not {', '.join(sorted(JUDGED))}.")
    return lambda: str(verify_msccl_xml(text))
