"""Bootstrap: the ranks of a group find out which of them share a host, and share memory there.

Input: a rendezvous, and the number of bytes that a host's ranks need. Output: the hosts, a file descriptor of this
host's memory, and the number of CPUs of its ranks. Ranks are on one host if their identifiers (``_identity``) are equal
and one of them could send its memory to all others. The memory has no name in the file system, so nothing is left
behind however a process ends.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import kernels
from ..errors import ReductionError, message
from ..transports.base import Rendezvous

_LOG: Final = logging.getLogger("crossreduce")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")  # names of abstract sockets belong to one network namespace
_NOEXEC: Final = 0x8  # MFD_NOEXEC_SEAL: some systems require it; kernels before 6.3 do not support it


class BootstrapResult(NamedTuple):
    """``hosts``: the ranks of each host, in the order of the hosts' lowest ranks. ``host``: the ranks of this host.

    ``fd``: the memory that the ranks of ``host`` share, zeroed; the caller closes it. ``cpus``: the number of CPUs on
    which at least one of these ranks may run; launchers may bind each rank to CPUs of its own.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]
    fd: int
    cpus: int


class _HostInfo(NamedTuple):
    """What a rank sends to all others. Ranks of equal ``identity`` may share memory, sent to the socket ``name``."""

    identity: list[str]
    name: str
    cpus: list[int]


def bootstrap(rendezvous: Rendezvous, nbytes: Callable[[int], int]) -> BootstrapResult:
    """Find out which ranks share a host, and share memory with them, on Linux. All ranks call it together.

    ``CROSSREDUCE_HOST`` in the environment splits a host: only ranks with the same text can be on one.

    Args:
      rendezvous: where the ranks meet; its all_gather is called three times.
      nbytes: returns the number of bytes that the ranks of one host share, given the number of these ranks.
    Raises:
      ReductionError: a rank cannot allocate memory even for itself alone.
      CollectiveTimeout: some ranks did not reach the rendezvous in time.
    """
    name, cpus = f"crossreduce-{secrets.token_hex(16)}", sorted(os.sched_getaffinity(0))
    own = _HostInfo(_identity() or [name], name, cpus)  # without identifiers it shares no memory
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(1)
        listener.setblocking(False)
        infos = [_HostInfo(*json.loads(info)) for info in rendezvous.all_gather(json.dumps(own).encode())]
        ranks = [rank for rank, info in enumerate(infos) if info.identity == own.identity]
        size, fd, problem = nbytes(len(ranks)), -1, ""
        try:
            try:
                if rendezvous.rank == ranks[0]:
                    fd = _memory(size)
                    _send_to_all(fd, [infos[rank].name for rank in ranks[1:]])
            except OSError as error:
                problem = f"rank {rendezvous.rank} could not share {size} bytes: {error}"
            rendezvous.all_gather(b"")  # after this each listener's queue contains the file descriptor sent to it
            try:
                if fd < 0 and not problem:
                    fd = _received(listener, size)
            except OSError as error:
                problem = f"rank {rendezvous.rank} could not use another rank's memory: {error}"
            problems = [text.decode() for text in rendezvous.all_gather(problem.encode())]
            hosts = _hosts(infos, problems)
            if ranks not in map(list, hosts):
                if rendezvous.rank == ranks[0]:
                    listed = ", ".join(map(str, ranks))
                    text = (
                        f"ranks {listed} are on one host but could not share memory; "
                        "each is now treated as if it were alone on a host."
                    )
                    why = "; ".join(problems[rank] for rank in ranks if problems[rank])
                    remedy = (
                        "more memory for the container, or a different CROSSREDUCE_HOST in each container that cannot "
                        "share memory with the others"
                    )
                    _LOG.warning("%s", message(text, why, remedy))
                if fd >= 0:
                    os.close(fd)
                fd, size = -1, nbytes(1)
                try:
                    fd = _memory(size)
                except OSError as error:
                    given = f"{size} bytes: {error}"
                    raise ReductionError.of("memory could not be allocated.", given, "a larger memory limit") from error
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        host = next(ranks for ranks in hosts if rendezvous.rank in ranks)
        return BootstrapResult(hosts, host, fd, len({cpu for rank in host for cpu in infos[rank].cpus}))


def _identity() -> list[str]:
    """Return the identifiers that are equal on ranks that may share memory; empty if they cannot be read."""
    try:
        system = [_BOOT.read_text().strip(), str(_NETWORK.stat().st_ino), str(os.getuid())]
    except OSError as error:
        _LOG.warning("the host of this rank cannot be identified, so the rank shares no memory: %s", error)
        return []
    return [*system, os.environ.get("CROSSREDUCE_HOST", "")]


def _hosts(infos: Sequence[_HostInfo], problems: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: all those of one identity, or each alone if one of them had a problem.

    >>> _hosts([_HostInfo(["a"], "", [])] * 2 + [_HostInfo(["b"], "", [])] * 2, ["", "", "", "broken"])
    ((0, 1), (2,), (3,))
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, info in enumerate(infos):
        found.setdefault(tuple(info.identity), []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for ranks in found.values():
        hosts += [(rank,) for rank in ranks] if any(problems[rank] for rank in ranks) else [tuple(ranks)]
    return tuple(sorted(hosts))


def _memory(nbytes: int) -> int:
    """Return a file descriptor of allocated memory of fixed size that only this user can open."""
    available = kernels.available_memory()
    if nbytes > available:  # Linux would kill processes before it refused to allocate
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


def _send_to_all(fd: int, names: Sequence[str]) -> None:
    """Send the memory to the listeners of other ranks; they need not accept it yet."""
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect("\0" + name)
            _require_same_user(connection)
            socket.send_fds(connection, [b"m"], [fd])


def _received(listener: Any, nbytes: int) -> int:
    """Return the file descriptor of the memory that another rank sent to this rank's listener."""
    connection, _ = listener.accept()
    with connection:
        connection.setblocking(False)
        _require_same_user(connection)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not fds:
            raise OSError(errno.EBADMSG, "the message contained no file descriptor")
        os.set_inheritable(fds[0], False)
        size = os.fstat(fds[0]).st_size
        if size < nbytes:
            os.close(fds[0])
            problem = f"it has {size} bytes, and this rank needs {nbytes}"
            raise OSError(errno.EBADMSG, f"{problem}; all ranks need the same version of crossreduce")
        return int(fds[0])


def _require_same_user(connection: socket.socket) -> None:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        raise PermissionError(errno.EACCES, f"the other process belongs to user {user}")
