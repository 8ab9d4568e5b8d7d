"""``crossreduce verify``: prove that the schedule in a file computes its collective.

Input: MSCCL XML or an MSCCL++ plan (JSON) of any tool, or the JSON of a ``Schedule``. Output: the proved facts, or the
fault. No schedule runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Exit

from .. import Schedule
from .. import verify as prove
from ..errors import ArgumentError, ScheduleError
from ..planning.granularity import sizes_that_fit
from .output import progress

MAX_NBYTES: Final = 1 << 26  # bytes; the JSON of a schedule of a million steps has 20 million


def verify(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE|DIR",
            help="MSCCL XML, an MSCCL++ plan (JSON), a schedule in crossreduce's JSON, or a folder of plan --bundle.",
        ),
    ],
) -> None:
    """Prove that the schedule in a file computes its collective.

    Each result contains each contribution exactly once; MSCCL XML and MSCCL++
    plans are also proved to be free of deadlocks and races. In a folder that
    plan --bundle wrote, all files are proved, and the sizes for which they are.
    The exit code is 1 if a schedule is wrong, and 2 if a file cannot be read or
    verified.
    """
    if file.is_dir():
        print(_bundle(file))
        return
    print(_proved(file))


def _proved(file: Path) -> str:
    """Return the proved facts about a file, or exit with 1 if it is wrong."""
    with progress("reading", 2) as advance:
        try:
            proof = _read(file)
        except ScheduleError as error:
            kinds = "MSCCL XML (<algo>), MSCCL++ plans and schedules in crossreduce's JSON (plan --export plan.json)"
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
    return proved


def _bundle(folder: Path) -> str:
    """Return the proved facts about all files of a bundle, or exit with 1 if one of them is wrong."""
    from ..export.bundle import range_of

    listed = _list_of(folder / "ranks.json")
    known = {entry["file"] for entry in listed}
    texts = []
    for name in ("msccl", "mscclpp"):
        inside = sorted(path for path in (folder / name).glob("*") if f"{name}/{path.name}" not in known)
        if inside:
            raise ArgumentError(f"{folder}: {name}/{inside[0].name} is not in ranks.json; runtimes would read it, too.")
        entries = [entry for entry in listed if entry["format"] == name]
        due = 0  # the first size for which there is no file yet
        for entry in entries:
            path = folder / entry["file"]
            facts = _proved(path)
            least, most = range_of(name, path.read_text("utf-8"))
            if (least, most) != (entry["least_bytes"], entry["most_bytes"]) or least < due:
                print(f"crossreduce: {path} is wrong: it is for {least} to {most} bytes, which ranks.json does not say "
                      "or another file is for", file=sys.stderr)  # fmt: skip
                raise Exit(1)
            due = most + 1 if most else 1 << 64
            texts.append(f"{entry['file']}: {facts}")
    return "\n".join([*texts, f"{folder}: {len(known)} files are right, each for its own sizes."])


def _list_of(file: Path) -> list[dict[str, Any]]:
    """Return the files that a bundle's list of ranks and files names."""
    from ..export.bundle import FORMAT

    try:
        read = json.loads(file.read_text("utf-8"))
        if read["format"] != FORMAT:
            raise ValueError(f'its format is not "{FORMAT}"')  # noqa: TRY301 - as the other faults
        entries = [
            {key: entry[key] for key in ("file", "format", "least_bytes", "most_bytes")} for entry in read["files"]
        ]
    except OSError as error:
        raise ArgumentError(
            f"{file} cannot be read: {error.strerror}. A folder must be one of plan --bundle."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{file} is not the list of a bundle: {error}.") from error
    return entries


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
    from ..export.mscclpp.fields import is_mscclpp_json

    start = text.lstrip()[:1]
    if start not in ("<", "{"):
        raise ArgumentError(f"{file} is neither MSCCL XML nor a plan or schedule in JSON.")
    if start == "<":
        return _msccl(file, text)
    if is_mscclpp_json(text):
        return _mscclpp(file, text)
    schedule = Schedule.from_json(text)

    def proved() -> str:
        prove(schedule)
        return f"{schedule.head}: right."

    return proved


def _msccl(file: Path, text: str) -> Callable[[], str]:
    from ..export.msccl.format import VERIFIABLE, read_msccl_xml
    from ..export.msccl.verifier import verify_msccl_xml

    algo = read_msccl_xml(text)
    _check_collective(file, algo.coll, VERIFIABLE)
    return lambda: f"{verify_msccl_xml(text)}\n  sizes: {sizes_that_fit(algo.chunks)}"


def _mscclpp(file: Path, text: str) -> Callable[[], str]:
    from ..export.mscclpp.format import VERIFIABLE, read_mscclpp_json
    from ..export.mscclpp.verifier import verify_mscclpp_json

    _check_collective(file, read_mscclpp_json(text).collective, VERIFIABLE)

    def proved() -> str:
        report = verify_mscclpp_json(text)
        return f"{report}\n  sizes: {report.sizes}"

    return proved


def _check_collective(file: Path, kind: str, verifiable: Collection[str]) -> None:
    if kind not in verifiable:
        problem = f"{file} cannot be verified: its collective is {kind[:60]}"
        raise ArgumentError(f"{problem}, not one of {', '.join(sorted(verifiable))}.")
