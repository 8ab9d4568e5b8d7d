"""What ranks did last, in files that are written when a group breaks: ``crossreduce doctor`` reads them.

In: plain values, as shared memory keeps them of all ranks of a host.  Out: ``DIR/rank<r>.json``, whole or not at all,
for the eyes of this user only. No environment is written, which may hold secrets; the stacks have no values either.
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
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ..errors import message

T = TypeVar("T")

_LOG: Final = logging.getLogger("crossreduce")
_FORMAT: Final = "crossreduce dump"
_VERSION: Final = 1
_LARGEST: Final = 1 << 26  # bytes; a real dump of 64 ranks has under 1 MiB
_FILE: Final = re.compile(r"rank\d{1,9}(\.\d{1,9})?\.json")


class Op(NamedTuple):
    """A collective that a rank called: seconds are those of ``time.monotonic``, which all processes of a host share."""

    sequence: int
    text: str
    started_s: float
    ended_s: float | None
    """``None`` while it runs."""


class History(NamedTuple):
    """The last calls of one rank, the oldest first."""

    rank: int
    ops: tuple[Op, ...]
    pid: int | None = None


class Frame(NamedTuple):
    """Where a function stands."""

    file: str
    line: int
    function: str
    code: str


class Thread(NamedTuple):
    """A thread's name and its stack, the innermost function last."""

    name: str
    stack: tuple[Frame, ...]


class Dump(NamedTuple):
    """What one rank wrote down. ``time`` is by the clock on the wall, ``now_s`` by the one of ``Op``."""

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
    """The dumps of a directory, in the order of group, time and rank, and what else is there, in words."""

    dumps: tuple[Dump, ...]
    problems: tuple[str, ...]


def taken(
    group: str, token: str, rank: int, hosts: Sequence[Sequence[int]], cause: str, histories: Iterable[History]
) -> Dump:
    """Return the dump of this process as it stands now.

    Args:
      group: the group's name.
      token: what all ranks of this group share and no other group has, such as when it met.
      rank: this one's.
      hosts: the ranks of each host.
      cause: why the group is broken.
      histories: the last calls of this rank and of those that share its host.
    """
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
    """Write a dump, and return its file; ``None``, and a warning in the log, where that is not possible.

    Its directory is CROSSREDUCE_DUMP_DIR; else one that all ranks of the group on this host share, for this user only,
    among the system's temporary files. A file that is there is kept: the new one is numbered.
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
        _LOG.warning("rank %d could not write down what it did last: %s", dump.rank, error)
        return None
    if path.name != f"rank{dump.rank}.json":
        _LOG.warning("%s is another dump's; this one is %s", path.with_name(f"rank{dump.rank}.json"), path.name)
    return path


def read(directory: Path) -> Found:
    """Read a directory's dumps: as many as are there, whatever else is.

    Never raises: a file that is missing half, or is no dump, is one of ``problems``.
    """
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
        problems.append(message(f"{directory} has no dumps.", remedy="the directory that a CollectiveTimeout names"))
    return Found(tuple(sorted(dumps, key=lambda dump: (dump.group, dump.token, dump.rank))), tuple(problems))


def _directory(dump: Dump) -> Path:
    """Return the directory to write into, which exists then."""
    asked = os.environ.get("CROSSREDUCE_DUMP_DIR")
    if asked:
        path = Path(asked)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
    readable = re.sub(r"[^\w.-]+", "_", f"{dump.group}-{dump.token}")[:100]
    path = Path(tempfile.gettempdir()) / f"crossreduce-{readable}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # Another rank made it; or somebody else, who would read or redirect what is written.
        found = path.lstat()
        own = getattr(os, "getuid", lambda: found.st_uid)()  # Windows has no owners by number
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != own or found.st_mode & 0o077:
            path = Path(tempfile.mkdtemp(prefix=f"crossreduce-{readable}-"))
    return path


def _published(temporary: Path, directory: Path, rank: int) -> Path:
    """Give a whole file the first name that is free; a link, unlike a rename, never replaces what is there."""
    k = 1
    while True:
        path = directory / (f"rank{rank}.json" if k == 1 else f"rank{rank}.{k}.json")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            k += 1
        except OSError:  # a file system without links
            if not path.exists():
                return temporary.rename(path)
            k += 1
        else:
            return path


def _threads() -> tuple[Thread, ...]:
    """Return the stacks of all threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    return tuple(
        Thread(
            names.get(ident, "unknown"),
            tuple(Frame(x.filename, x.lineno or 0, x.name, x.line or "") for x in traceback.extract_stack(frame)),
        )
        for ident, frame in frames
    )


@cache
def version() -> str:
    """Return the version of crossreduce."""
    try:
        return importlib.metadata.version("crossreduce")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of what takes part; nothing is imported for it."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "crossreduce": version()}
    for name in ("numpy", "torch", "mpi4py"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def _plain(value: Any) -> Any:
    """Return what JSON can hold of named tuples: their fields by name."""
    if hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _content(path: Path) -> Any:
    if not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error


def _dump(found: Any) -> Dump:
    """Return the dump that was read, or raise ValueError that says what is wrong with it."""
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError("it is no dump of crossreduce's")
    if found.get("version") != _VERSION:
        raise ValueError(f"it is of version {found.get('version')}, not {_VERSION}")
    dump = Dump(
        group=_text(found, "group"),
        token=_text(found, "token"),
        rank=_whole(found, "rank"),
        size=_whole(found, "size"),
        hosts=_many(found, "hosts", _ranks),
        cause=_text(found, "cause"),
        hostname=_text(found, "hostname"),
        pid=_whole(found, "pid"),
        time=_text(found, "time"),
        now_s=_seconds(found, "now_s"),
        histories=_many(found, "histories", _history),
        threads=_many(found, "threads", _thread),
        versions={str(k): str(v) for k, v in _field(found, "versions", dict).items()},
    )
    ranks = [rank for host in dump.hosts for rank in host]
    if not len(set(ranks)) == len(ranks) == dump.size or dump.rank not in ranks:
        raise ValueError("its ranks are not those of its hosts")
    return dump


def _history(found: Any) -> History:
    pid = None if found.get("pid") is None else _whole(found, "pid")
    return History(_whole(found, "rank"), _many(found, "ops", _op), pid)


def _op(found: Any) -> Op:
    ended = None if found.get("ended_s") is None else _seconds(found, "ended_s")
    return Op(_whole(found, "sequence"), _text(found, "text"), _seconds(found, "started_s"), ended)


def _thread(found: Any) -> Thread:
    return Thread(_text(found, "name"), _many(found, "stack", _frame))


def _frame(found: Any) -> Frame:
    return Frame(_text(found, "file"), _whole(found, "line"), _text(found, "function"), _text(found, "code"))


def _ranks(found: Any) -> tuple[int, ...]:
    return tuple(_whole({"rank": rank}, "rank") for rank in found)


def _many(found: Any, name: str, read_one: Callable[[Any], T]) -> tuple[T, ...]:
    items = _field(found, name, list)
    kind = list if name == "hosts" else dict
    if not all(isinstance(item, kind) for item in items):
        raise ValueError(f'its "{name}" are not as they should be')
    return tuple(read_one(item) for item in items)


def _text(found: Any, name: str) -> str:
    return str(_field(found, name, str))


def _whole(found: Any, name: str) -> int:
    value = int(_field(found, name, int))
    if value < 0:
        raise ValueError(f'its "{name}" is negative')
    return value


def _seconds(found: Any, name: str) -> float:
    value = _field(found, name, (int, float))
    if not abs(value) < 1e15:  # also no NaN; JSON may hold what no float can
        raise ValueError(f'its "{name}" is no time')
    return float(value)


def _field(found: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    value = found.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'its "{name}" is missing, or not as it should be')  # noqa: TRY004 - what a file holds
    return value
