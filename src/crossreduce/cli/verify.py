"""``crossreduce verify``: prove that the schedule in a file computes its collective.

Input: MSCCL XML of any tool, or the JSON of a ``Schedule``. Output: the proved facts, or the fault. No schedule runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Exit

from .. import Schedule
from .. import verify as prove
from ..errors import ArgumentError, ScheduleError
from ..planning.granularity import sizes_that_fit
from .output import progress

MAX_NBYTES: Final = 1 << 26  # bytes; the JSON of a schedule of a million steps has 20 million


def verify(
    file: Annotated[Path, Argument(metavar="FILE", help="MSCCL XML, or a schedule in crossreduce's JSON.")],
) -> None:
    """Prove that the schedule in a file computes its collective.

    Each result contains each contribution exactly once; MSCCL XML is also
    proved to be free of deadlocks and races. The exit code is 1 if the
    schedule is wrong, and 2 if the file cannot be read or verified.
    """
    with progress("reading", 2) as advance:
        try:
            proof = _read(file)
        except ScheduleError as error:
            kinds = "MSCCL XML (<algo>) and schedules in crossreduce's JSON (plan --export plan.json)"
            raise ArgumentError(f"{file}: {error}\n  files that can be verified: {kinds}") from error
        advance("proving")
        fault = None
        try:
            proved = proof()
        except ScheduleError as error:
            fault = error
    if fault is not None:
        print(f"crossreduce: {file} is wrong: {fault}", file=sys.stderr)
        raise Exit(1)
    print(proved)


def _read(file: Path) -> Callable[[], str]:
    """Read a file, and return the function that proves it and returns the proved facts, or raises ScheduleError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_NBYTES + 1)
        if len(data) > MAX_NBYTES:
            raise ArgumentError(f"{file} is larger than {MAX_NBYTES} bytes.")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{file} is not UTF-8 text.") from error
    start = text.lstrip()[:1]
    if start not in ("<", "{"):
        raise ArgumentError(f"{file} is neither MSCCL XML nor a schedule in JSON.")
    if start == "{":
        schedule = Schedule.from_json(text)

        def proved() -> str:
            prove(schedule)
            return f"{schedule.head}: right."

        return proved
    from ..export.msccl.format import VERIFIABLE, read_msccl_xml
    from ..export.msccl.verifier import verify_msccl_xml

    algo = read_msccl_xml(text)
    kind = algo.coll
    if kind not in VERIFIABLE:
        problem = f"{file} cannot be verified: its collective is {kind}"
        raise ArgumentError(f"{problem}, not one of {', '.join(sorted(VERIFIABLE))}.")
    return lambda: f"{verify_msccl_xml(text)}\n  sizes: {sizes_that_fit(algo.chunks)}"
