"""``crossreduce verify``: prove that the schedule in a file computes its collective.

Input: MSCCL XML or an MSCCL++ plan (JSON) of any tool, or the JSON of a ``Schedule``. Output: what was proved, or the
fault. No schedule runs.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Exit, Option

from .. import Schedule
from .. import verify as prove
from ..errors import ArgumentError, ScheduleError
from ..planning.granularity import sizes_that_fit
from ..topology.formats.json_format import why_not
from .support.output import Bar, print_lines, progress

MAX_NBYTES: Final = 1 << 26  # bytes; the JSON of a schedule of a million steps has 20 million


def verify(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE|DIR",
            help="MSCCL XML, an MSCCL++ plan (JSON), a schedule in crossreduce's JSON, or a folder of bundle "
            "or groups --export.",
        ),
    ],
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that the schedule in a file computes its collective.

    Each result contains each contribution exactly once; MSCCL XML and MSCCL++
    plans are also proved to be free of deadlocks and races. In a folder that
    crossreduce bundle or groups --export wrote, all files are proved and
    compared with ranks.json or groups.json. The exit code is 1 if a schedule is
    wrong, and 2 if a file cannot be read, or is too large to be verified.
    """
    try:
        if file.is_dir():
            prove_folder = _prove_groups if (file / "groups.json").exists() else _prove_bundle
            proof_text = prove_folder(file, _Proved(shown=not json))
        else:
            with progress("reading", 2) as advance:
                proof_text = _prove_file(file, lambda: advance("proving"))
    except _WrongFileError as error:
        if json:
            print(json_module.dumps({"file": str(file), "right": False, "fault": str(error)}, indent=2))
        else:
            print(f"crossreduce: {error}", file=sys.stderr)
        raise Exit(1) from None
    except _UnprovenError as error:
        if json:
            about = {"file": str(file), "right": None, "proved": error.proved, "fault": str(error)}
            print(json_module.dumps(about, indent=2))
        else:
            print(f"crossreduce: {error}", file=sys.stderr)
        raise Exit(2) from None
    facts = {"file": str(file), "right": True, "proved": proof_text.splitlines()}
    print(json_module.dumps(facts, indent=2) if json else proof_text.splitlines()[-1] if file.is_dir() else proof_text)


class _WrongFileError(Exception):
    """A file can be read, but its schedule is wrong."""


class _UnprovenError(Exception):
    """Files are too large to be verified. ``proved``: what was proved of others."""

    def __init__(self, problem: str, proved: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.proved = [*proved]


class _Proved:
    """What was proved of the files of a folder. With ``shown``, each text is printed at once."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self.texts: list[str] = []

    def add(self, name: str, text: str, bar: Bar) -> None:
        self.texts.append(f"{name}: {text}")
        if self._shown:
            with bar.hide():
                print_lines(self.texts[-1:])


def _prove_file(file: Path, on_read: Callable[[], None]) -> str:
    """Prove a file, and return what was proved. ``on_read`` is called when the file was read, before it is proved.

    Raises:
      _WrongFileError: the schedule in the file is wrong.
      _UnprovenError: it is too large to be verified.
    """
    from ..export.formats.proof import TooLargeError

    try:
        proof = _read(file)
    except ScheduleError as error:
        kinds = "MSCCL XML (<algo>), MSCCL++ plans, and schedules in JSON (crossreduce export MACHINE plan.json)"
        raise ArgumentError(f"{file}: {error}\n  files that can be verified: {kinds}") from error
    on_read()
    try:
        return proof()
    except TooLargeError as error:
        raise _UnprovenError(f"{file} was not verified: {error}") from error
    except ScheduleError as error:
        raise _WrongFileError(f"{file} is wrong: {error}") from error


def _prove_bundle(folder: Path, proved: _Proved) -> str:
    """Prove all files of a bundle, and return what was proved.

    Raises:
      _WrongFileError: a file is wrong.
      _UnprovenError: files are too large to be verified. All others are right.
    """
    from ..export.bundle import FORMAT, SUFFIXES

    about = _read_list(folder / "ranks.json", FORMAT, _check_bundle_list)
    listed = [entry["file"] for entry in about["files"]]
    for path in sorted(path for name in SUFFIXES for path in (folder / name).glob("*")):
        if f"{path.parent.name}/{path.name}" not in listed:
            problem = f"{path.parent.name}/{path.name} is not listed in ranks.json, but runtimes would read it"
            raise ArgumentError(f"{folder}: {problem}.")
    ranks = {"collective": about["collective"], "ranks": len(about["ranks"])}
    least_size = dict.fromkeys(SUFFIXES, 0)  # by format: the least size that no earlier file covers

    def compare(entry: dict[str, Any], path: Path) -> None:
        name = entry["format"]
        _compare(path, _facts(name, path), entry | ranks, "ranks.json")
        if entry["least_bytes"] < least_size[name]:
            raise _WrongFileError(f"{path} is wrong: an earlier file is for some of its sizes")
        least_size[name] = entry["most_bytes"] + 1 if entry["most_bytes"] else 1 << 64  # 0 means: no largest size

    right = f"{folder}: {len(listed)} files are right, each for its own sizes."
    return _prove_files(folder, about["files"], compare, proved, right)


def _prove_groups(folder: Path, proved: _Proved) -> str:
    """Prove the files of all groups: see ``_prove_bundle``."""
    from ..export.groups import FORMAT

    about = _read_list(folder / "groups.json", FORMAT, _check_groups_list)
    entries = [entry for entry in about["groups"] if "file" in entry]

    def compare(entry: dict[str, Any], path: Path) -> None:
        facts = _facts("mscclpp", path)
        stated = {what: facts[what] for what in ("collective", "ranks", "bytes_multiple_of")}
        _compare(path, stated, entry | {"ranks": len(entry["ranks"])}, "groups.json")

    return _prove_files(folder, entries, compare, proved, f"{folder}: the files of {len(entries)} groups are right.")


def _prove_files(
    folder: Path,
    entries: Sequence[dict[str, Any]],
    compare: Callable[[dict[str, Any], Path], None],
    proved: _Proved,
    right: str,
) -> str:
    """Prove the file of each entry of a folder's list, and return what was proved, which ends with the text ``right``.

    ``compare`` raises an error if a file differs from its entry.
    """
    unproven = []
    with progress("proving", len(entries), lines=True) as advance:
        for entry in entries:
            path, text = folder / entry["file"], ""
            advance.detail(entry["file"], 0, 1)
            try:
                text = _prove_file(path, lambda: None)
            except _UnprovenError as error:
                unproven.append(str(error))
            compare(entry, path)
            if text:
                proved.add(entry["file"], text, advance)
            advance("proving")
    texts = proved.texts
    if unproven:
        problem = (
            f"{folder}: {len(texts)} of {len(entries)} files are right; {len(unproven)} too large to be verified.\n"
        )
        raise _UnprovenError(problem + "\n".join(unproven), texts)
    return "\n".join([*texts, right])


def _facts(name: str, path: Path) -> dict[str, Any]:
    """Return what a proved file of a format states about itself."""
    from ..export.bundle import facts_of

    try:
        return facts_of(name, path.read_text("utf-8-sig"))
    except ScheduleError as error:
        raise ArgumentError(f"{path} is not a file of {name}: {error}") from error


def _compare(path: Path, facts: dict[str, Any], expected: dict[str, Any], source: str) -> None:
    """Raise a ``_WrongFileError`` if a fact differs from what ``source`` states about the file."""
    for what, value in facts.items():
        if value != expected.get(what):
            raise _WrongFileError(f"{path} is wrong: its {what} is {value}, unlike in {source}")


def _read_list(file: Path, form: str, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the content of a folder's list of files. ``check`` raises an error if it is malformed."""
    try:
        read: dict[str, Any] = json_module.loads(file.read_text("utf-8-sig"))
        if read["format"] != form:
            raise ValueError(f'its format is not "{form}"')  # noqa: TRY301 - caught below
        check(read)
    except OSError as error:
        problem = f"{file} cannot be read: {error.strerror}."
        raise ArgumentError(
            f"{problem} A folder must be one that crossreduce bundle or groups --export wrote."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind = "a bundle" if file.name == "ranks.json" else "groups"
        raise ArgumentError(f"{file} is not the list of {kind}: {why_not(error)}.") from error
    return read


def _check_bundle_list(read: dict[str, Any]) -> None:
    """Raise an error unless the content of a bundle's ``ranks.json`` lists ranks and files."""
    from ..export.bundle import SUFFIXES

    listed = {key: read[key] for key in ("collective", "ranks", "files")}
    for entry in listed["files"]:
        path = re.fullmatch(r"([a-z]+)/[A-Za-z0-9_.-]+", entry["file"])
        if entry["format"] not in SUFFIXES or path is None or path[1] != entry["format"]:
            raise ValueError(f"it lists {entry['file']!r:.99}, which is not a file of its format")
        if not isinstance(entry["least_bytes"], int) or not isinstance(entry["most_bytes"], int):
            raise ValueError("sizes must be integers")  # noqa: TRY004
    if not isinstance(listed["ranks"], list) or not listed["files"]:
        raise ValueError("it must list ranks and files")


def _check_groups_list(read: dict[str, Any]) -> None:
    """Raise an error unless the content of ``groups.json`` lists groups, of which one or more have a file."""
    if not any("file" in entry for entry in read["groups"]):
        raise ValueError("it must list groups with files")
    for entry in read["groups"]:
        if not isinstance(entry["ranks"], list):
            raise ValueError("it must list the ranks of each group")  # noqa: TRY004
        if not re.fullmatch("group_[0-9]+[.]json", entry.get("file", "group_0.json")):
            raise ValueError(f"it lists {entry['file']!r:.99}, which is not a file of a group")


def _read(file: Path) -> Callable[[], str]:
    """Read a file, and return a function that proves it. That returns what was proved, or raises a ScheduleError."""
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
    from ..export.formats.mscclpp.json_fields import is_mscclpp_json

    start = text.lstrip()[:1]
    if start not in ("<", "{"):
        raise ArgumentError(f"{file} is neither MSCCL XML nor a plan or schedule in JSON.")
    if start == "<":
        return _msccl_proof(file, text)
    if is_mscclpp_json(text):
        return _mscclpp_proof(file, text)
    schedule = Schedule.from_json(text)

    def proof_text() -> str:
        prove(schedule)
        return f"{schedule.head}: right."

    return proof_text


def _msccl_proof(file: Path, text: str) -> Callable[[], str]:
    """Return a function that proves MSCCL XML and returns what was proved."""
    from ..export.formats.msccl.format import read_msccl_xml
    from ..export.formats.msccl.verifier import verify_msccl_xml
    from ..export.formats.proof import VERIFIABLE

    algo = read_msccl_xml(text)
    _check_collective(file, algo.coll, VERIFIABLE)
    return lambda: f"{verify_msccl_xml(text)}\n  sizes: {sizes_that_fit(algo.chunks)}"


def _mscclpp_proof(file: Path, text: str) -> Callable[[], str]:
    """Return a function that proves an MSCCL++ plan and returns what was proved."""
    from ..export.formats.mscclpp.format import read_mscclpp_json
    from ..export.formats.mscclpp.verifier import verify_mscclpp_json
    from ..export.formats.proof import VERIFIABLE

    _check_collective(file, read_mscclpp_json(text).collective, VERIFIABLE)

    def proof_text() -> str:
        report = verify_mscclpp_json(text)
        return f"{report}\n  sizes: {report.sizes}"

    return proof_text


def _check_collective(file: Path, kind: str, verifiable: Collection[str]) -> None:
    if kind not in verifiable:
        problem = f"{file} cannot be verified: its collective is {kind[:60]}"
        raise ArgumentError(f"{problem}, not one of {', '.join(sorted(verifiable))}.")
