"""Traces of a process's groups: opens and closes the file that each rank writes.

Input: a directory, from ``start`` or CROSSREDUCE_TRACE. Output: ``DIR/rank<r>.<token>.trace`` for each group of this
process. Native code (``trace_file.hpp``) writes these files, and ``crossreduce.observe.traces`` reads them. A trace
never makes a call fail: errors are logged as warnings.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ...errors import ArgumentError, message, shown
from ...topology import Topology, byte_count
from ..files import numbers, temporary_file
from ..flight_recorder import version
from .format import DEFAULT_NBYTES, LEAST_NBYTES, Facts

_LOG: Final = logging.getLogger("crossreduce")
_MOST_TEXT: Final = 100  # characters of a limit
_LOCK_S: Final = 5.0  # how long `start` and `stop` wait for a call of a group that runs in another thread


class TracedGroup(Protocol):
    """The attributes of ``Communicator`` that this module uses."""

    lock: threading.Lock
    memory: Any  # a ``RankMemory``
    name: str
    token: str
    rank: int
    hosts: tuple[tuple[int, ...], ...]
    global_ranks: tuple[int, ...]
    peers: tuple[Any, ...]  # of type ``PeerInfo``
    traced: Path | None  # the trace file, or ``None`` if the group is not traced

    @property
    def host_topology(self) -> Topology | None:
        """The links between hosts, if they were measured."""


class _Settings(NamedTuple):
    directory: Path
    nbytes: int


_GROUPS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_STARTED: Final[list[_Settings | None]] = []  # the settings of the last `start` or `stop`; if empty, the environment's
_WARNED: Final[set[str]] = set()
_CHANGE: Final = [threading.RLock()]  # held while the settings or the set of groups change; a signal handler may nest


def start(directory: str | os.PathLike[str], nbytes: int | str = DEFAULT_NBYTES) -> None:
    """Write traces of this process's groups, also of groups that are made later, to files in a directory.

    Args:
      directory: the directory, which is created if it does not exist.
      nbytes: the maximum bytes of each file. When a file is full, new records replace the oldest ones.
    Raises:
      ArgumentError: ``nbytes`` is invalid or too small, or the directory cannot be created or written.
    """
    limit = _limit(nbytes)
    name = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ArgumentError.of("this is not the name of a directory.", shown(directory), 'start("traces")')
    path = Path(name).absolute()
    try:
        _make(path)
    except OSError as error:
        problem = f"a trace cannot be written to {path}."
        raise ArgumentError.of(problem, error.strerror or str(error), "a directory that can be written") from error
    _set(_Settings(path, limit))


def stop() -> None:
    """Close all trace files of this process. Groups that are made later are not traced, either."""
    _set(None)


def register(group: TracedGroup) -> None:
    """Trace a new group if tracing is on."""
    with _CHANGE[0]:
        _GROUPS.add(group)
        settings = _STARTED[-1] if _STARTED else _from_environment()
        if settings is not None:
            _open(group, settings)


def close(group: TracedGroup) -> None:
    """End the file of a group, and warn if it is incomplete. Native code closes it after the current call."""
    if group.traced is None:
        return
    with suppress(ValueError):  # raised if the group is closed
        problem = group.memory.native.trace_problem()
        if problem:
            text = f"{group.traced} could not grow ({os.strerror(problem)}), so it has only the last calls."
            _warn_once(str(group.traced), text, "more space on the disk, or a smaller CROSSREDUCE_TRACE_BYTES")
        group.memory.native.trace_to(-1, b"", 0)
    group.traced = None


def write_topology(group: TracedGroup) -> None:
    """Write the links between hosts, from which later calls of a traced group are planned, to predict their times.

    The file replaces whatever has its name: others can guess it, since the names of traces contain the token.
    """
    topology = group.host_topology
    if group.traced is None or topology is None or group.rank != min(group.memory.host):
        return
    path = group.traced.parent / f"topology.{group.token}.{group.memory.number}.json"
    try:
        with temporary_file(path.parent, f".{path.name}.", topology.to_json()) as file:
            file.replace(path)
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}, so predictions are missing or wrong."
        _warn_once(str(path), text, "a directory that only this user can write")


def _set(settings: _Settings | None) -> None:
    with _CHANGE[0]:
        _STARTED[:] = [settings]
        for group in list(_GROUPS):
            _change(group, settings)


def _change(group: TracedGroup, settings: _Settings | None) -> None:
    """End the file of a group. Begin another one if ``settings`` is not ``None``."""
    if not group.lock.acquire(timeout=_LOCK_S):
        text = f'group "{group.name}" is in a call, so its trace was neither started nor stopped.'
        _LOG.warning("%s", message(text, remedy="start and stop between calls"))
        return
    try:
        with suppress(ValueError):  # raised if the group is closed
            close(group)
            if settings is not None:
                _open(group, settings)
    finally:
        group.lock.release()


def _open(group: TracedGroup, settings: _Settings) -> None:
    """Begin a file for a group. If that fails, log a warning."""
    rank = group.global_ranks[group.rank]
    own = group.peers[group.rank]
    hosts = tuple(tuple(group.global_ranks[each] for each in host) for host in group.hosts)
    facts = Facts(group.name, group.token, rank, hosts, own.hostname, own.pid, _process(), _clock(), version())
    try:
        _make(settings.directory)
        fd, path = _new_file(settings.directory, f"rank{rank}.{group.token}")
        try:
            group.memory.native.trace_to(fd, facts.encode(), settings.nbytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        text = f"rank {rank} cannot write its trace to {settings.directory}: {reason}."
        _warn_once(str(settings.directory), text, "a directory that can be written, with free space")
        return
    group.traced = path
    write_topology(group)


def _new_file(directory: Path, name: str) -> tuple[int, Path]:
    """Create a file that only this user can read. If the name is taken, the new file gets a number."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    for k in numbers():
        path = directory / (f"{name}.trace" if k == 1 else f"{name}.{k}.trace")
        with suppress(FileExistsError):
            return os.open(path, flags, 0o600), path
    raise AssertionError("numbers() is endless")


def _make(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, "it is write-protected")


def _from_environment() -> _Settings | None:
    """Return the settings of CROSSREDUCE_TRACE and CROSSREDUCE_TRACE_BYTES, or ``None`` if tracing is off."""
    directory = os.environ.get("CROSSREDUCE_TRACE")
    if not directory:
        return None
    limit, text = DEFAULT_NBYTES, os.environ.get("CROSSREDUCE_TRACE_BYTES")
    if text:
        try:
            limit = _limit(text)
        except ArgumentError as error:
            _warn_once("CROSSREDUCE_TRACE_BYTES", f"CROSSREDUCE_TRACE_BYTES is ignored: {error}", "")
    return _Settings(Path(directory).absolute(), limit)


def _limit(nbytes: int | str) -> int:
    """Return the limit of a file in bytes. Raise ``ArgumentError`` if it is invalid."""
    if isinstance(nbytes, str):
        if len(nbytes) > _MOST_TEXT:  # ``int`` fails for several thousand digits
            raise ArgumentError.of("nbytes is too long.", f"{len(nbytes)} characters", '"64M"')
        if nbytes.isdecimal():
            nbytes = int(nbytes)
    limit = byte_count(nbytes)
    if not LEAST_NBYTES <= limit <= 1 << 40:
        problem = "the limit of a trace must be from 256 KiB to 1 TiB."
        raise ArgumentError.of(problem, f"{limit} bytes", '"64M"')
    return limit


@lru_cache(maxsize=1)
def _process() -> str:
    """Return a random text, the same for all groups of this process."""
    return secrets.token_hex(16)


def _clock() -> str:
    """Return a text that is equal for processes that share a monotonic clock."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/time").stat().st_ino))
    return " ".join(parts) or f"process {os.getpid()}"


def _forget() -> None:
    """In a forked child, forget the groups of the parent, and replace the lock, which a thread may have held."""
    _GROUPS.clear()
    _CHANGE[0] = threading.RLock()
    _process.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _warn_once(about: str, text: str, remedy: str) -> None:
    """Log a warning if this process has not logged one about the same file, directory or variable."""
    if about not in _WARNED:
        _WARNED.add(about)
        _LOG.warning("%s", message(text, remedy=remedy))
