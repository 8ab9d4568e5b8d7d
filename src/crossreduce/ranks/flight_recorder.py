"""Flight recorder: files with the last calls of each rank, written when a group breaks, for ``crossreduce doctor``.

Input: the last calls of all ranks of a host, which shared memory records. Output: ``DIR/rank<r>.json``, written
completely or not at all, and readable by this user only. The files contain no environment variables, which may be
secret, and stacks without the values of variables.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from ..errors import message

_LOG: Final = logging.getLogger("crossreduce")
_FORMAT: Final = "crossreduce dump"
_VERSION: Final = 1
_LARGEST: Final = 1 << 26  # bytes; a dump of 64 ranks has less than 1 MiB
_FILE: Final = re.compile(r"rank\d{1,9}(\.\d{1,9})?\.json")


class Op(NamedTuple):
    """A collective that a rank called. Seconds are those of ``time.monotonic``, which all processes of a host share."""

    sequence: int
    text: str
    started_s: float
    ended_s: float | None
    """``None``: it has not ended."""


class History(NamedTuple):
    """The last calls of one rank, the oldest first."""

    rank: int
    ops: tuple[Op, ...]
    pid: int | None = None


class Frame(NamedTuple):
    """The position of one function in a stack."""

    file: str
    line: int
    function: str
    code: str


class Thread(NamedTuple):
    """A thread's name and its stack, the innermost function last."""

    name: str
    stack: tuple[Frame, ...]


class Dump(NamedTuple):
    """The content of one rank's file. ``cause``: the text of the error that broke the group.

    ``token`` differs between groups of one name. ``time`` is the calendar time of the dump; ``now_s`` is the same time
    on the clock of ``Op``. ``histories`` are those of all ranks of this host.
    """

    group: str
    token: str
    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    cause: str
    hostname: str
    pid: int
    time: str
    now_s: float
    histories: tuple[History, ...]
    threads: tuple[Thread, ...]
    versions: dict[str, str]


class Found(NamedTuple):
    """The dumps of a directory, in the order of group, token and rank, and descriptions of unreadable files."""

    dumps: tuple[Dump, ...]
    problems: tuple[str, ...]


def new_dump(
    group: str, token: str, rank: int, hosts: Sequence[Sequence[int]], cause: str, histories: Iterable[History]
) -> Dump:
    """Return the dump of this process in its current state; for the arguments see ``Dump``."""
    return Dump(
        group=group,
        token=token,
        rank=rank,
        size=sum(map(len, hosts)),
        hosts=tuple(map(tuple, hosts)),
        cause=cause,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        time=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        now_s=time.monotonic(),
        histories=tuple(sorted(histories)),
        threads=_threads(),
        versions=versions(),
    )


def write(dump: Dump) -> Path | None:
    """Write a dump and return its file; if that is not possible, log a warning and return ``None``.

    The directory is CROSSREDUCE_DUMP_DIR; else one below the system's temporary directory: only this user can read it,
    and, unless its name was taken, the group's ranks here share it. An existing file is kept; the new one is numbered.
    """
    try:
        directory = _directory(dump)
        content = json.dumps({"format": _FORMAT, "version": _VERSION, **_plain(dump)}, indent=1) + "\n"
        number, name = tempfile.mkstemp(dir=directory, prefix=f".rank{dump.rank}.")
        temporary = Path(name)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(content)
            path = _published(temporary, directory, dump.rank)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("rank %d could not write its flight recorder dump: %s", dump.rank, error)
        return None
    if path.name != f"rank{dump.rank}.json":
        _LOG.warning("%s already exists; this dump is %s", path.with_name(f"rank{dump.rank}.json"), path.name)
    return path


def read(directory: Path) -> Found:
    """Return all dumps of a directory; this never raises, and describes unreadable files in ``problems``."""
    dumps, problems = [], []
    try:
        paths = sorted(path for path in directory.iterdir() if _FILE.fullmatch(path.name))
    except OSError as error:
        return Found((), (f"{directory} cannot be read: {error.strerror}.",))
    for path in paths:
        try:
            dumps.append(_dump(_content(path)))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"{path.name} cannot be read: {why}.")
    if not paths:
        remedy = "the directory in the text of the CollectiveTimeout or PeerLostError"
        problems.append(message(f"{directory} has no dumps.", remedy=remedy))
    return Found(tuple(sorted(dumps, key=lambda dump: (dump.group, dump.token, dump.rank))), tuple(problems))


def _directory(dump: Dump) -> Path:
    """Return the directory to write into, after creating it if necessary."""
    chosen = os.environ.get("CROSSREDUCE_DUMP_DIR")
    if chosen:
        path = Path(chosen)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
    readable = re.sub(r"[^\w.-]+", "_", f"{dump.group}-{dump.token}")[:100]
    path = Path(tempfile.gettempdir()) / f"crossreduce-{readable}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # Another rank created it; or another user, who could then read or redirect the files.
        found = path.lstat()
        own = getattr(os, "getuid", lambda: found.st_uid)()  # Windows has no numeric user ids
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != own or found.st_mode & 0o077:
            path = Path(tempfile.mkdtemp(prefix=f"crossreduce-{readable}-"))
    return path


def _published(temporary: Path, directory: Path, rank: int) -> Path:
    """Give a complete file the first free name; a hard link, unlike a rename, never replaces an existing file."""
    k = 0
    while True:
        k += 1
        path = directory / (f"rank{rank}.json" if k == 1 else f"rank{rank}.{k}.json")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if path.exists():
                continue
            return temporary.rename(path)
        return path


def _threads() -> tuple[Thread, ...]:
    """Return the stacks of all threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    threads = []
    # The list contains this function's own frame. It is emptied, since that cycle would keep the group's memory alive.
    while frames:
        ident, frame = frames.pop(0)
        stack = (Frame(x.filename, x.lineno or 0, x.name, x.line or "") for x in traceback.extract_stack(frame))
        threads.append(Thread(names.get(ident, "unknown"), tuple(stack)))
        del frame
    return tuple(threads)


@cache
def version() -> str:
    """Return the version of crossreduce."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("crossreduce")
    return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and crossreduce, and of NumPy, torch and mpi4py if imported."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "crossreduce": version()}
    for name in ("numpy", "torch", "mpi4py"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def _plain(value: Any) -> Any:
    """Return named tuples as dictionaries and tuples as lists, for JSON."""
    if hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _content(path: Path) -> Any:
    if not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _dump(found: Any) -> Dump:
    """Return a dump from parsed JSON, or raise ``ValueError`` if it is not a dump."""
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError("it is not a dump of crossreduce")
    if found.get("version") != _VERSION:
        raise ValueError(f"its version is {found.get('version')}, not {_VERSION}")
    dump: Dump = _typed(Dump, found, "content")
    ranks = [rank for host in dump.hosts for rank in host]
    if not len(set(ranks)) == len(ranks) == dump.size or dump.rank not in ranks:
        raise ValueError("its ranks do not match its hosts")
    return dump


def _typed(kind: Any, value: Any, name: str) -> Any:
    """Return parsed JSON as a value of type ``kind``, or raise a ValueError that contains ``name``, the field's."""
    form, parts = get_origin(kind), get_args(kind)
    if form is UnionType:  # ``int | None``
        return None if value is None else _typed(parts[0], value, name)
    if form is tuple and isinstance(value, list):
        return tuple(_typed(parts[0], item, name) for item in value)
    if form is dict and isinstance(value, dict):
        return {str(key): str(item) for key, item in value.items()}
    if hasattr(kind, "_fields") and isinstance(value, dict):
        return kind(*(_typed(of, value.get(field), field) for field, of in _types(kind).items()))
    # NaN is not below 1e15 either; JSON may contain numbers that a float cannot represent.
    if kind is float and type(value) in (int, float) and abs(value) < 1e15:
        return float(value)
    if (kind is str and isinstance(value, str)) or (kind is int and type(value) is int and value >= 0):
        return value
    raise ValueError(f'its "{name}" is missing or malformed')


_types = cache(get_type_hints)
