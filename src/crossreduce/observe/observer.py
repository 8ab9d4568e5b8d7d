"""Reads the groups of this machine from a program that is not a rank.

Input: the processes of this user in ``/proc``. Each rank has its group's memory open, so there is a link to it in
``/proc/PID/fd``. Output: snapshots. The memory is opened and mapped for reading only, and no lock is taken, so
observers do not affect a group. Its ranks may end at any time.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import kernels
from ..errors import BackendError, decoded
from .counters import CollectiveStats, WaitStats, rank_counts, total_of
from .flight_recorder import Op, version
from .liveness import LEFT, is_stopped, lock_holder, program

_LINK: Final = "/memfd:crossreduce"
_UNDESCRIBED: Final = errno.EAGAIN  # the ranks are still forming the group
# The process has ended, or it has closed the memory, and perhaps opened a socket (ENXIO).
_GONE: Final = (errno.ENOENT, errno.ESRCH, errno.ENXIO)
_OTHER_LAYOUT: Final = (errno.EPROTO, errno.EINVAL)  # the memory is of another version


class RankView(NamedTuple):
    """One rank at the time of a snapshot.

    ``state``: "running" (in a collective), "waiting" (in a collective, for other ranks of the host), "idle" (between
    collectives), "stopped" (by a signal), "left" (the group) or "dead". ``pid`` is ``None`` if the process has ended.
    ``late``: the ranks of this host that have not reached the barrier at which this rank waits. ``total`` and ``waits``
    count since the start of the group.
    """

    rank: int
    pid: int | None
    state: str
    op: Op | None
    late: tuple[int, ...]
    total: CollectiveStats
    waits: dict[int, WaitStats]


class GroupView(NamedTuple):
    """The ranks of a group on this host. ``cause``: the error that broke the group, or ``None`` if it can be used.

    ``now_s``: the time of the snapshot by ``time.monotonic``. ``key``: device and inode of the group's memory.
    ``program``: the script or module that the first living rank runs, or "".
    """

    key: tuple[int, int]
    name: str
    token: str
    version: str
    size: int
    hosts: int
    now_s: float
    cause: str | None
    ranks: tuple[RankView, ...]
    program: str = ""

    @property
    def pid(self) -> int | None:
        """The process of the first living rank, or ``None``."""
        return next((one.pid for one in self.ranks if one.pid is not None), None)


class _Watched(NamedTuple):
    fd: int
    native: Any  # a native ``Observer``
    about: dict[str, Any]  # what the ranks wrote with ``RankMemory.describe``


class Observer:
    """Finds the groups of this machine's processes, and returns snapshots of them.

    ``problems`` describes memory that cannot be read. ``hidden`` counts processes of other users, which are not
    searched. The groups of this process are left out: when it closed their memory here, it would also lose its locks as
    a rank, and the other ranks would regard it as dead.
    """

    def __init__(self) -> None:
        """Raise ``BackendError`` if this system does not support groups."""
        if kernels.native() is None or not Path("/proc/self/fd").is_dir():
            problem = "groups of ranks can be watched only on Linux, with the compiled kernels."
            raise BackendError.of(problem, remedy="crossreduce top on the machine and in the environment of the ranks")
        self.problems: tuple[str, ...] = ()
        self.hidden = 0
        self._watched: dict[tuple[int, int], _Watched] = {}

    def search(self) -> None:
        """Add new groups, and remove groups whose memory no process of this user has open as a rank any more."""
        links, self.hidden = _descriptors()
        own = {key for key, _ in _memories(Path("/proc/self"))}
        problems = []
        for key in [*self._watched]:
            if key not in links:
                self._forget(key)
        for key in links.keys() - self._watched.keys() - own:
            problem = self._attach(key, links[key])
            if problem is not None:
                problems.append(problem)
        self.problems = tuple(sorted(problems))

    def snapshots(self) -> list[GroupView]:
        """Return the current state of each group, sorted by name."""
        views = [_group(key, watched) for key, watched in self._watched.items()]
        return sorted(views, key=lambda view: (view.name, view.key))

    def close(self) -> None:
        """Release the memory of all groups."""
        for key in [*self._watched]:
            self._forget(key)

    def _attach(self, key: tuple[int, int], link: Path) -> str | None:
        """Open the memory of a link in ``/proc``. Return why it cannot be read, or ``None`` if that is no problem."""
        fd = -1
        try:
            fd = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != key:  # the process has closed it and opened something else
                return None
            native = kernels.native().Observer(fd)
            self._watched[key] = _Watched(fd, native, _description(native.about()))
            fd = -1  # do not close it below
        except ValueError as error:
            return f"a group of process {link.parts[2]} has a malformed description, and cannot be shown: {error}"
        except OSError as error:
            number, process = error.errno, link.parts[2]
            if number in _OTHER_LAYOUT:
                text = f"a group of process {process} has memory of another version of crossreduce than {version()}"
                return f"{text}, and cannot be read.  try: crossreduce top in the environment of that process"
            if number not in (_UNDESCRIBED, *_GONE):
                return f"{link} cannot be read: {os.strerror(number or 0)}."
        finally:
            if fd >= 0:
                os.close(fd)
        return None

    def _forget(self, key: tuple[int, int]) -> None:
        watched = self._watched.pop(key)
        watched.native.close()
        os.close(watched.fd)


def _description(text: bytes) -> dict[str, Any]:
    """Return the description of a group from its JSON. Raise a ``ValueError`` if it was not written by a rank."""
    try:
        about = json.loads(text)
    except RecursionError:
        about = None
    if not isinstance(about, dict) or not all(type(about.get(key, 1)) is int for key in ("size", "hosts")):
        raise ValueError("no rank has written it")
    return about


def _descriptors() -> tuple[dict[tuple[int, int], Path], int]:
    """Return links to groups' memory by (device, inode), and the number of processes that cannot be searched."""
    links: dict[tuple[int, int], Path] = {}
    hidden = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                for key, link in _memories(process):
                    links.setdefault(key, link)
            except PermissionError:
                hidden += 1
    return links, hidden


def _memories(process: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return (device, inode) and a link for each group's memory that a process has open as a rank.

    Ranks open it for writing and observers for reading, which the permissions of the link tell.

    Raises:
      PermissionError: the process belongs to another user.
    """
    memories = []
    try:
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # raised if the process has closed the descriptor
                if str(link.readlink()).startswith(_LINK) and link.lstat().st_mode & stat.S_IWUSR:
                    status = link.stat()
                    memories.append(((status.st_dev, status.st_ino), link))
    except PermissionError:
        raise
    except OSError:  # the process has ended
        pass
    return memories


def _group(key: tuple[int, int], watched: _Watched) -> GroupView:
    """Return a snapshot of a group."""
    fd, native, about = watched
    ranks = native.ranks()
    numbers = [rank for rank, *_ in ranks]
    pids = [lock_holder(fd, place) for place in range(len(ranks))]
    # Calls are read before the arrivals of other ranks, so that no rank seems to wait for a rank that is ahead of it.
    ops = [[Op(*op) for op in native.ops(place)] for place in range(len(ranks))]
    arrivals = [arrived for _, _, arrived, _ in native.ranks()]
    views = []
    for place, number in enumerate(numbers):
        counts = rank_counts(native.counts(place))
        op, pid = ops[place][-1] if ops[place] else None, pids[place]
        late = tuple(numbers[k] for k, arrived in enumerate(arrivals) if arrived < ranks[place][2])
        state = "idle"
        if op is not None and op.text == LEFT:
            op, state = (ops[place][-2] if len(ops[place]) > 1 else None), "left"
        elif pid is None:
            state = "dead"
        elif is_stopped(pid):
            state = "stopped"
        elif op is not None and op.ended_s is None:
            state = "waiting" if late else "running"
        total = total_of(counts.collectives)
        waits = {numbers[k]: wait for k, wait in counts.waits.items()}
        views.append(RankView(number, pid, state, op, late if state == "waiting" else (), total, waits))
    cause = native.cause()
    error = str(decoded(cause)) if cause else None
    name, token, made_by = (str(about.get(field)) for field in ("name", "token", "version"))
    size, hosts = int(about.get("size", len(ranks))), int(about.get("hosts", 1))
    view = GroupView(key, name, token, made_by, size, hosts, time.monotonic(), error, tuple(views))
    return view if view.pid is None else view._replace(program=program(view.pid))
