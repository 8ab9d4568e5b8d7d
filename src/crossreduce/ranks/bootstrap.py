"""Who shares a host, found out by the ranks themselves, and the memory that they share.

In: a place to meet, and how many bytes a host's ranks need.  Out: the hosts, a file descriptor of this host's memory,
and how many CPUs its ranks have. Ranks are on one host when the kernel says so and one of them could hand its memory to
all others; it has no name anywhere, so nothing can be left behind, whatever dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import ReductionError, message
from ..transports.base import Rendezvous

_LOG: Final = logging.getLogger("crossreduce")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")  # names of abstract sockets belong to one network namespace
_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
_NOEXEC: Final = 0x8  # MFD_NOEXEC_SEAL, which some systems insist on and kernels before 6.3 do not know


class Meeting(NamedTuple):
    """What the ranks of a group found out.

    Args:
      hosts: the ranks of each host, ascending; hosts in the order of their lowest ranks.
      host: those of this rank's.
      fd: memory that these share, zeroed; the caller closes it.
      cpus: on how many CPUs they may run: launchers bind ranks to CPUs of their own, so all of theirs count.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]
    fd: int
    cpus: int


class _Card(NamedTuple):
    """What a rank tells all others: equal identities may share memory; where it can be handed memory; its CPUs."""

    identity: list[str]
    name: str
    cpus: list[int]


def meet(rendezvous: Rendezvous, nbytes: Callable[[int], int]) -> Meeting:
    """Find out who shares a host, and share memory with them. All ranks call it together.

    ``CROSSREDUCE_HOST`` in the environment splits a host: only ranks with the same text can be on one.

    Args:
      rendezvous: where the ranks meet; it is used three times.
      nbytes: how many bytes the ranks of one host share, given how many they are.
    Raises:
      ReductionError: there is no memory even for one rank.
      CollectiveTimeout: some ranks did not come.
    """
    identity = _identity()
    with socket.socket(socket.AF_UNIX if identity else socket.AF_INET, socket.SOCK_STREAM) as door:
        name = f"crossreduce-{secrets.token_hex(16)}"
        if identity:
            door.bind("\0" + name)
            door.listen(1)
            door.setblocking(False)
        # Whoever cannot share has an identity that nobody else has.
        own = _Card([*identity, os.environ.get("CROSSREDUCE_HOST", "")] if identity else [name], name, _cpus())
        cards = [_Card(*json.loads(said)) for said in rendezvous.all_gather(json.dumps(own).encode())]
        ranks = [rank for rank, card in enumerate(cards) if card.identity == own.identity]
        size, fd, problem = nbytes(len(ranks)), -1, ""
        try:
            try:
                if rendezvous.rank == ranks[0]:
                    fd = _memory(size)
                    _hand_over(fd, [cards[rank].name for rank in ranks[1:]])
            except OSError as error:
                problem = f"rank {rendezvous.rank} could not share {size} bytes: {error}"
            rendezvous.all_gather(b"")  # what was handed over lies at every door now
            try:
                if fd < 0 and not problem:
                    fd = _take(door, size)
            except OSError as error:
                problem = f"rank {rendezvous.rank} was handed no memory: {error}"
            problems = [said.decode() for said in rendezvous.all_gather(problem.encode())]
            hosts = _hosts(cards, problems)
            if ranks not in map(list, hosts):
                if rendezvous.rank == ranks[0]:
                    _LOG.warning("%s", _dissolved(ranks, problems))
                if fd >= 0:
                    os.close(fd)
                fd = -1
                fd = _own_memory(nbytes(1))
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        host = next(ranks for ranks in hosts if rendezvous.rank in ranks)
        return Meeting(hosts, host, fd, len({cpu for rank in host for cpu in cards[rank].cpus}))


def _identity() -> list[str]:
    """Return what ranks that may share memory have in common; empty: this system has no way to share it."""
    if not hasattr(os, "memfd_create"):
        return []
    try:
        return [_BOOT.read_text().strip(), str(_NETWORK.stat().st_ino), str(os.getuid())]
    except OSError as error:
        _LOG.warning("this rank's host is unknown, so it shares memory with none: %s", error)
        return []


def _cpus() -> list[int]:
    """Return the CPUs that this process may run on, as far as the system says."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _hosts(cards: Sequence[_Card], problems: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the hosts: ranks of one identity, or each for itself where one of them met a problem.

    >>> _hosts([_Card(["a"], "", [])] * 2 + [_Card(["b"], "", [])] * 2, ["", "", "", "broken"])
    ((0, 1), (2,), (3,))
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, card in enumerate(cards):
        found.setdefault(tuple(card.identity), []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for ranks in found.values():
        hosts += [(rank,) for rank in ranks] if any(problems[rank] for rank in ranks) else [tuple(ranks)]
    return tuple(sorted(hosts))


def _dissolved(ranks: Sequence[int], problems: Sequence[str]) -> str:
    why = "; ".join(problems[rank] for rank in ranks if problems[rank])
    listed = ", ".join(map(str, ranks))
    return message(
        f"ranks {listed} seem to share a host but no memory; each counts as a host of its own.",
        why,
        "more memory for the container, or CROSSREDUCE_HOST set to another text on each host",
    )


def _memory(nbytes: int) -> int:
    """Return memory that only this user can open, of a size that nobody can change, and that is really there."""
    if not hasattr(os, "memfd_create"):
        fd, path = tempfile.mkstemp()
        Path(path).unlink()
        os.ftruncate(fd, nbytes)
        return fd
    available = _available()
    if nbytes > available:  # asked for more, the kernel would end processes before it said no
        raise OSError(errno.ENOMEM, f"{available} bytes are available")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("crossreduce", flags | _NOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("crossreduce", flags)
    try:
        os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _available() -> int:
    """Return how many bytes this process may still take, as far as the system says."""
    found = [1 << 62]
    with suppress(OSError, ValueError, IndexError):
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) << 10)
    with suppress(OSError):
        for row in _GROUP.read_text().splitlines():
            _, kind, group = row.split(":", 2)
            version = {"": ("", "memory.max", "memory.current", "inactive_file")}.get(kind)
            if "memory" in kind.split(","):
                version = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if version is None:
                continue
            root, limit, usage, cache = version
            top = Path(_GROUPS, root)
            own = top / group.lstrip("/")
            for place in (own, *own.parents):  # one above may have the limit; a container may see its own as the top
                with suppress(OSError, ValueError, KeyError):  # no limit: the file is missing, or says "max"
                    stats = dict(line.split() for line in Path(place, "memory.stat").read_text().splitlines())
                    most, used = (int(Path(place, name).read_text()) for name in (limit, usage))
                    found.append(max(0, most - used + int(stats[cache])))
                if place == top:
                    break
    return min(found)


def _own_memory(nbytes: int) -> int:
    try:
        return _memory(nbytes)
    except OSError as error:
        given = f"{nbytes} bytes: {error}"
        raise ReductionError(message("there is no memory to work in.", given, "a larger memory limit")) from error


def _hand_over(fd: int, names: Sequence[str]) -> None:
    """Leave the memory at the doors of other ranks; they need not look for it yet."""
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as way:
            way.setblocking(False)
            way.connect("\0" + name)
            _require_same_user(way)
            socket.send_fds(way, [b"m"], [fd])


def _take(door: Any, nbytes: int) -> int:
    """Return the memory that was left at this rank's door."""
    way, _ = door.accept()
    with way:
        way.setblocking(False)
        _require_same_user(way)
        _, fds, _, _ = socket.recv_fds(way, 1, 1)
        if not fds:
            raise OSError(errno.EBADMSG, "no memory was in the message")
        os.set_inheritable(fds[0], False)
        if os.fstat(fds[0]).st_size < nbytes:  # another library's version on the other side
            size = os.fstat(fds[0]).st_size
            os.close(fds[0])
            raise OSError(errno.EBADMSG, f"it has {size} bytes, not {nbytes}")
        return int(fds[0])


def _require_same_user(way: socket.socket) -> None:
    if sys.platform == "linux":
        credentials = struct.unpack("3i", way.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if credentials[1] != os.getuid():
            raise PermissionError(errno.EACCES, f"the other side belongs to user {credentials[1]}")
