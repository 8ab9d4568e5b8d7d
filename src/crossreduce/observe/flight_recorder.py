"""Flight recorder: files with the last calls of each rank, written when a group breaks, for ``crossreduce doctor``.

Input: the last calls of all ranks of a host, from shared memory. Output: ``DIR/rank<r>.json``, which only this user can
read, written completely or not at all. The files contain neither environment variables nor the values of variables in
stacks, since these may be secret.
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
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from types import UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from ..errors import message
from .files import numbers, open_regular, owners_note, statuses, temporary_file

_LOG: Final = logging.getLogger("crossreduce")
_FORMAT: Final = "crossreduce dump"
_VERSION: Final = 2
_LARGEST: Final = 1 << 26  # the maximum bytes of a dump; a dump of 64 ranks has less than 1 MiB
_MOST_READ: Final = 1 << 31  # the maximum bytes of the dumps that are read of a directory, including:
_PER_FILE: Final = 1 << 14  # bytes; reading a small file takes as long as reading these
_MOST_RANKS: Final = 1 << 17
_MOST_OPS: Final = 64  # the maximum calls of one rank in a dump; ranks record 32
_MOST_TEXT: Final = 10_000  # the characters of a longer text that are read
_RUN: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_MOST_DUMPS: Final = 10  # for each rank number, this many dumps are kept after their processes have ended
_MOST_BYTES: Final = 1 << 24  # the maximum total bytes of these dumps
_DAY_S: Final = 86_400.0
_HEAD: Final = re.compile(rf'{{\n "format": "{_FORMAT}",\n[^\0]*?\n "hostname": (".*"),\n "pid": ([0-9]+),\n')
_FILE: Final = re.compile(r"rank\d{1,9}(\.\d{1,9})?\.json")


class Op(NamedTuple):
    """A collective that a rank called. Times are from ``time.monotonic``, which all processes of a host share."""

    sequence: int
    text: str
    started_s: float
    ended_s: float | None
    """``None`` if the collective has not ended."""


class History(NamedTuple):
    """The last calls of one rank, oldest first."""

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
    """A thread's name, and its stack with the innermost function last."""

    name: str
    stack: tuple[Frame, ...]


class Dump(NamedTuple):
    """The content of one rank's file. ``cause``: the text of the error that broke the group.

    ``token`` differs between groups with the same name. ``time``: the calendar time of the dump. ``now_s``: the same
    time on the clock of ``Op``. A file contains the ``histories`` of all ranks of its host; ``read`` returns fewer.
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
    """The dumps of a directory, sorted by group, token and rank, and descriptions of unreadable files."""

    dumps: tuple[Dump, ...]
    problems: tuple[str, ...]


def new_dump(
    group: str, token: str, rank: int, hosts: Sequence[Sequence[int]], cause: str, histories: Iterable[History]
) -> Dump:
    """Return a dump with the current state of this process. For the arguments see ``Dump``."""
    return Dump(
        group=group,
        token=token,
        rank=rank,
        size=sum(map(len, hosts)),
        hosts=tuple(map(tuple, hosts)),
        cause=cause,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        time=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f%z}",
        now_s=time.monotonic(),
        histories=tuple(sorted(histories)),
        threads=_threads(),
        versions=versions(),
    )


def write(dump: Dump) -> Path | None:
    """Write a dump and return its path. If that fails, log a warning and return ``None``.

    The directory is CROSSREDUCE_DUMP_DIR, or else a directory in the system's temporary directory that only this user
    can read. The group's ranks of this host share it if its name was free. An existing file is kept, and the new one
    gets a number. Then old dumps of this rank number are deleted (see ``_remove_old``).
    """
    try:
        directory = _directory(dump)
        fields = {"format": _FORMAT, "version": _VERSION, **_plain(dump)}
        content = json.dumps({**fields, "hosts": _hosts_text(dump.hosts)}, indent=1) + "\n"
        with temporary_file(directory, f".rank{dump.rank}.", content) as temporary:
            path = _publish(temporary, directory, dump.rank)
    except OSError as error:
        _LOG.warning("rank %d could not write its flight recorder dump: %s", dump.rank, error)
        return None
    with suppress(OSError):
        _remove_old(path)
    if path.name != f"rank{dump.rank}.json":
        _LOG.warning("%s already exists; this dump is %s", path.with_name(f"rank{dump.rank}.json"), path.name)
    return path


def read(directory: Path) -> Found:
    """Return the dumps of a directory. Unreadable files are described in ``problems``, and no error is raised.

    If the directory has too many dumps, the newest ones are read, and a problem states how many were left out.
    Each dump contains the history of its own rank. The history of a rank without a dump is in the newest dump that
    describes this rank. All other histories are left out, since reading them would take minutes for thousands of ranks.
    """
    entries: list[tuple[Dump, Path, tuple[int, ...]]] = []
    problems = []
    try:
        found = statuses(path for path in directory.iterdir() if _FILE.fullmatch(path.name))
    except OSError as error:
        return Found((), (f"{directory} cannot be read: {error.strerror}.",))
    problems += owners_note(found.values())
    newest_first = sorted(found, key=lambda path: (-found[path].st_mtime_ns, path))
    nbytes = (found[path].st_size for path in newest_first)
    totals = accumulate(_PER_FILE + (size if size <= _LARGEST else 0) for size in nbytes)
    paths = [path for path, total in zip(newest_first, totals, strict=True) if total <= _MOST_READ]
    if len(paths) < len(found):
        limit = f"{_MOST_READ >> 20} MiB of a directory are read at most"
        problems.append(f"the oldest {len(found) - len(paths)} of {len(found)} dumps are left out: {limit}.")
    for path in sorted(paths):
        try:
            dump, described = _parsed_dump(_content(path))
            entries.append((dump, path, described))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"{path.name} cannot be read: {why}.")
    if not paths:
        remedy = "the directory in the text of the CollectiveTimeout or PeerLostError"
        problems.append(message(f"{directory} has no dumps.", remedy=remedy))
    dumps = []
    read_ranks = {(dump.group, dump.token, dump.rank) for dump, _, _ in entries}
    for dump, path, described in sorted(entries, key=lambda each: -each[0].now_s):
        absent = {rank for rank in described if (dump.group, dump.token, rank) not in read_ranks}
        if absent:
            with suppress(OSError, ValueError):  # it was deleted, or one of these histories is malformed
                dump, _ = _parsed_dump(_content(path), absent)
                read_ranks.update((dump.group, dump.token, rank) for rank in absent)
        dumps.append(dump)
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
        # Another rank has created it, or another user, who could then read or redirect the files.
        if not _is_private(path):
            path = Path(tempfile.mkdtemp(prefix=f"crossreduce-{readable}-"))
    return path


def _publish(temporary: Path, directory: Path, rank: int) -> Path:
    """Give a complete file the first free name, by a hard link, as a rename could replace a file. Return its path."""
    for k in numbers():
        path = directory / (f"rank{rank}.json" if k == 1 else f"rank{rank}.{k}.json")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                continue
            return temporary.rename(path)
        return path
    raise AssertionError("numbers() is endless")


def _remove_old(newest: Path) -> None:
    """Delete the oldest dumps with the rank number and the owner of ``newest`` whose processes have ended.

    The newest dumps are kept: at most ``_MOST_DUMPS`` with at most ``_MOST_BYTES`` together. Dumps are searched in
    CROSSREDUCE_DUMP_DIR or, by default, in all directories of this user beside that of ``newest``.
    """
    chosen, rank = bool(os.environ.get("CROSSREDUCE_DUMP_DIR")), newest.name.partition(".")[0]
    folders = [newest.parent] if chosen else [x for x in newest.parent.parent.glob("crossreduce-*") if _is_private(x)]
    files = [x for folder in folders for x in folder.glob(f"{rank}.*") if _FILE.fullmatch(x.name)]
    statuses, owner = [(path, path.lstat()) for path in files], newest.lstat().st_uid
    own = [(path, status) for path, status in statuses if stat.S_ISREG(status.st_mode) and status.st_uid == owner]
    count = nbytes = 0
    for path, status in sorted(own, key=lambda each: -each[1].st_mtime_ns):
        count, nbytes = count + 1, nbytes + status.st_size
        if (count > _MOST_DUMPS or nbytes > _MOST_BYTES) and _has_ended(path, status.st_mtime):
            path.unlink(missing_ok=True)
            if not chosen:
                with suppress(OSError):  # raised if the directory has other files
                    path.parent.rmdir()


def _has_ended(path: Path, written: float) -> bool:
    """Return whether a file is a dump of a process that has ended; on another host, whether it is older than a day."""
    head = None
    with suppress(OSError, ValueError), open_regular(path) as file:
        head = _HEAD.match(file.read(1 << 16).decode(errors="replace"))
    if head is None:
        return False
    if head[1] != json.dumps(socket.gethostname()):
        return time.time() - written > _DAY_S
    return not Path("/proc", head[2]).exists()


def _is_private(path: Path) -> bool:
    """Return whether this is a directory of this user, and not a link, that no other user can read."""
    status = path.lstat()
    own = getattr(os, "getuid", lambda: status.st_uid)()  # Windows has no numeric user ids
    return stat.S_ISDIR(status.st_mode) and status.st_uid == own and not status.st_mode & 0o077


def _threads() -> tuple[Thread, ...]:
    """Return the stacks of all threads of this process. The main thread comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    threads = []
    # This function's own frame is in the list, a cycle that would keep the group's memory alive. So empty the list.
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
    """Return the versions of Python, the platform, crossreduce and, if they are imported, NumPy, torch and mpi4py."""
    packages = {"python": platform.python_version(), "platform": platform.platform(), "crossreduce": version()}
    for name in ("numpy", "torch", "mpi4py"):
        if name in sys.modules:
            packages[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return packages


def _plain(value: Any) -> Any:
    """Return a value for JSON: named tuples become dictionaries, calls lines of text, and tuples lists."""
    if isinstance(value, Op):
        ended = "-" if value.ended_s is None else repr(value.ended_s)
        return f"{value.sequence} {value.started_s!r} {ended} {value.text}"
    if hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _hosts_text(hosts: Sequence[Sequence[int]]) -> str:
    """Return the ranks of hosts as a short text with ranges; reading 20,000 single numbers would take a millisecond.

    >>> _hosts_text([(0, 1, 2, 7), (4, 5)]), _hosts("0-2,7;4-5")[0]
    ('0-2,7;4-5', ((0, 1, 2, 7), (4, 5)))
    """
    texts = []
    for ranks in hosts:
        runs = [[*run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
        ends = [(run[0][1], run[-1][1]) for run in runs]
        texts.append(",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends))
    return ";".join(texts)


@lru_cache(4)  # all dumps of a group have the same text
def _hosts(text: str) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """Return the ranks of each host, and all ranks, from a text such as "0-2,7;4-5"."""
    hosts: list[tuple[int, ...]] = []
    count = 0
    for host in text.split(";"):
        ranks: list[int] = []
        for part in host.split(","):
            run = _RUN.fullmatch(part)
            ends = range(int(run[1]), int(run[2] or run[1]) + 1) if run else range(0)
            count += len(ends)
            if not ends or count > _MOST_RANKS:
                raise ValueError('its "hosts" is malformed')
            ranks += ends
        hosts.append(tuple(ranks))
    all_ranks = frozenset(rank for host in hosts for rank in host)
    if len(all_ranks) < count:
        raise ValueError('its "hosts" contains a rank twice')
    return tuple(hosts), all_ranks


def _content(path: Path) -> Any:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        content = file.read(_LARGEST)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _parsed_dump(content: Any, others: Set[int] = frozenset()) -> tuple[Dump, tuple[int, ...]]:
    """Return a dump from parsed JSON, and the ranks that it describes. Raise ``ValueError`` if it is not a dump.

    The returned dump contains only the histories of its own rank and of ``others``.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("it is not a dump of crossreduce")
    if content.get("version") != _VERSION:
        raise ValueError(f"its version is {content.get('version')}, not {_VERSION}")
    if not isinstance(content.get("hosts"), str):
        raise _malformed_error("hosts")
    histories, own = content.get("histories"), content.get("rank")
    if not isinstance(histories, list) or not all(isinstance(each, dict) for each in histories):
        raise _malformed_error("histories")
    described = tuple(each.get("rank") for each in histories)
    if not all(type(rank) is int for rank in described):
        raise _malformed_error("rank")
    kept = [each for each, rank in zip(histories, described, strict=True) if rank == own or rank in others]
    if any(type(each.get("ops")) is list and len(each["ops"]) > _MOST_OPS for each in kept):
        raise ValueError(f"it has more than {_MOST_OPS} calls of one rank")
    dump: Dump = _reader(Dump, "content")({**content, "histories": kept, "hosts": []})
    hosts, ranks = _hosts(content["hosts"])
    if len(ranks) != dump.size or dump.rank not in ranks:
        raise ValueError("its ranks do not match its hosts")
    return dump._replace(hosts=hosts), described


def _malformed_error(name: str) -> ValueError:
    return ValueError(f'its "{name}" is missing or malformed')


@cache
def _reader(kind: Any, name: str) -> Callable[[Any], Any]:
    """Return a function that converts parsed JSON to the type ``kind``.

    If the JSON does not have this type, the function raises a ``ValueError`` about the field ``name``.
    """
    form, parts = get_origin(kind), get_args(kind)
    if form is UnionType:  # ``int | None``
        read_value = _reader(parts[0], name)
        return lambda value: None if value is None else read_value(value)
    if form is tuple:
        read_item = _reader(parts[0], name)
        return lambda value: tuple(map(read_item, _require(value, type(value) is list, name)))
    if form is dict:
        return lambda value: {str(k): str(v) for k, v in _require(value, type(value) is dict, name).items()}
    if kind is Op:
        return lambda line: _read_op(line, name)
    if hasattr(kind, "_fields"):
        types = get_type_hints(kind)
        fields, kinds = [(field, _reader(of, field)) for field, of in types.items()], [*types.values()]

        def structure(value: Any) -> Any:
            _require(value, type(value) is dict, name)
            if kind is Frame:  # fast path: most values of a dump are in frames
                values = [*map(value.get, types)]
                if [*map(type, values)] == kinds and values[1] >= 0:
                    return Frame._make(values)
            return kind(*[read(value.get(field)) for field, read in fields])

        return structure
    if kind is float:
        # The limit refuses NaN and integers that are too large for a float, which JSON may contain.
        return lambda value: float(_require(value, type(value) in (int, float) and abs(value) < 1e15, name))
    if kind is int:
        return lambda value: _require(value, type(value) is int and value >= 0, name)
    assert kind is str
    return lambda value: _require(value, type(value) is str, name)[:_MOST_TEXT]


def _require(value: Any, is_valid: bool, name: str) -> Any:
    if not is_valid:
        raise _malformed_error(name)
    return value


def _read_op(line: Any, name: str) -> Op:
    """Return a call from a line of text, as written by ``_plain``."""
    try:
        sequence, started, ended, text = line.split(" ", 3)
        op = Op(int(sequence), text[:_MOST_TEXT], float(started), None if ended == "-" else float(ended))
    except (AttributeError, ValueError):
        raise _malformed_error(name) from None
    if op.sequence < 0 or not -1e15 < op.started_s < 1e15 or not (op.ended_s is None or -1e15 < op.ended_s < 1e15):
        raise _malformed_error(name)
    return op
