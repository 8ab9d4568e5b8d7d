"""Bootstrap: the ranks of a group find out which of them share a host, and share memory there.

Input: a rendezvous, and the number of bytes that a host's ranks need. Output: the hosts, a file descriptor of this
host's memory, and the number of CPUs of its ranks. Ranks are on one host if their identifiers (``_identity``) are equal
and the first of them could send its memory to all others. The memory has no name in the file system, so it is always
freed when the processes end.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ... import kernels
from ...errors import MismatchError, ReductionError, message, rank_list
from ...observe.flight_recorder import version
from ..transports.addresses import network_identity
from ..transports.base import Rendezvous

with suppress(ImportError):  # Windows has no fcntl; there, ranks raise a BackendError before they need it
    import fcntl

_LOG: Final = logging.getLogger("crossreduce")
_CREDENTIALS: Final = struct.Struct("3i")  # of the sender of a message: process, user, group
_LEAST_HOSTS: Final = 8  # the shared memory is sized for at least this number of hosts
_MEMORY_S: Final = 30.0  # how long a rank waits for the memory of another rank; it is sent at once
_NOEXEC: Final = 0x8  # MFD_NOEXEC_SEAL: some systems require it; Linux before 6.3 does not support it


class BootstrapResult(NamedTuple):
    """``hosts``: the ranks of each host, sorted by the hosts' lowest ranks. ``host``: the ranks of this host.

    ``fd``: the memory that the ranks of ``host`` share, zeroed; the caller must close it. ``cpus``: the number of CPUs
    on which at least one of these ranks may run, since launchers may bind each rank to CPUs of its own. ``texts``: the
    text of each rank of the group.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]
    fd: int
    cpus: int
    texts: list[str]


class _HostInfo(NamedTuple):
    """The message of a rank to all others. Ranks with equal ``identity`` may share memory. ``name``: its socket's name.

    ``version`` must stay the first field in all versions, since the versions are compared before the rest is read.
    """

    version: str
    identity: list[str]
    name: str
    cpus: list[int]


def bootstrap(
    rendezvous: Rendezvous,
    nbytes: Callable[[int, int], int],
    global_ranks: Sequence[int] | None = None,
    first: Callable[[int, int], Sequence[tuple[int, int]]] | None = None,
    text: str = "",
) -> BootstrapResult:
    """Find out which ranks share a host, and share memory with them, on Linux. All ranks must call it together.

    The environment variable ``CROSSREDUCE_HOST`` can split a host: ranks with different values are on different hosts.

    Args:
      rendezvous: the rendezvous of the ranks.
      nbytes: returns the number of bytes that the ranks of one host share, given the number of these ranks and the
        maximum number of hosts.
      global_ranks: the ranks' numbers in messages; by default 0, 1, ...
      first: given the same, returns the ranges (offset, size) of the memory that are allocated if all ranks are on one
        host; before a rank writes elsewhere, it allocates more. The default is everything.
      text: a text for all other ranks.
    Raises:
      MismatchError: the ranks have different versions of crossreduce; raised on all ranks.
      ReductionError: this rank cannot allocate memory even for itself alone.
      CollectiveTimeout: some ranks did not reach the rendezvous in time.
    """
    rank, name, cpus = rendezvous.rank, _new_name(), sorted(os.sched_getaffinity(0))
    numbers = global_ranks or range(rendezvous.size)
    with _sender(name) as sender, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        own = _HostInfo(version(), _identity() or [name], name, cpus)  # a rank without identifiers is alone
        received = [json.loads(info) for info in rendezvous.all_gather(json.dumps(own).encode())]
        _require_same_version({number: info[0] for number, info in zip(numbers, received, strict=True)})
        infos = [_HostInfo(*info) for info in received]
        ranks = [other for other, info in enumerate(infos) if info.identity == own.identity]
        # Ranks that cannot share memory count as one host each, so there may be more hosts than identities.
        most_hosts = max(_LEAST_HOSTS, len({tuple(info.identity) for info in infos}))
        size, fd, problem, name = nbytes(len(ranks), most_hosts), -1, "", ""
        try:
            try:
                if rank == ranks[0]:  # the first rank of a host allocates the memory and sends it to the others
                    fd = _memory(size, first(len(ranks), most_hosts) if first and len(ranks) == len(infos) else ())
                else:
                    name = _receive_only_from(infos[ranks[0]].name, receiver)
            except OSError as error:
                problem = f"rank {numbers[rank]} could not share {size} bytes: {error}"
            gathered = [json.loads(each) for each in rendezvous.all_gather(json.dumps([name, text]).encode())]
            names, texts = ([each[k] for each in gathered] for k in (0, 1))
            receivers = [names[other] for other in ranks[1:] if rank == ranks[0] and names[other]]
            try:
                _send(sender, fd, receivers)
            except OSError as error:
                problem = problem or f"rank {numbers[rank]} could not send its memory: {error}"
                with suppress(OSError):
                    _send(sender, -1, receivers)  # so that they wait no longer
            try:
                if rank != ranks[0] and not problem:
                    fd = _receive_memory(receiver, size)
            except OSError as error:
                problem = f"rank {numbers[rank]} could not use another rank's memory: {error}"
            problems = [text.decode() for text in rendezvous.all_gather(problem.encode())]
            hosts = _hosts(infos, problems)
            if ranks not in map(list, hosts) and rank == ranks[0]:
                warning = (
                    f"{rank_list(numbers[other] for other in ranks)} are on one host but could not share memory; "
                    "each is now treated as if it were alone on a host."
                )
                why = "; ".join(problems[rank] for rank in ranks if problems[rank])
                remedy = (
                    "more memory for the container, or a different CROSSREDUCE_HOST in each container that cannot "
                    "share memory with the others"
                )
                _LOG.warning("%s", message(warning, why, remedy))
            if any(problems[other] for other in ranks):  # continue alone, with memory for one rank
                if fd >= 0:
                    os.close(fd)
                fd, size = -1, nbytes(1, rendezvous.size)
                try:
                    fd = _memory(size)
                except OSError as error:
                    limits = {errno.EFBIG: "ulimit -f unlimited", errno.EMFILE: "more open files (ulimit -n)"}
                    remedy = limits.get(error.errno or 0, "a larger memory limit")
                    problem = "memory could not be allocated."
                    raise ReductionError.of(problem, f"{size} bytes: {error}", remedy) from error
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        host = next(ranks for ranks in hosts if rank in ranks)
        return BootstrapResult(hosts, host, fd, len({cpu for other in host for cpu in infos[other].cpus}), texts)


def _require_same_version(versions: dict[int, str]) -> None:
    """Raise ``MismatchError`` if the ranks have different versions of crossreduce."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in versions.items():
        ranks_of.setdefault(each, []).append(rank)
    if len(ranks_of) > 1:
        given = "; ".join(f"{rank_list(ranks)}: {each}" for each, ranks in ranks_of.items())
        problem = "the ranks have different versions of crossreduce."
        raise MismatchError.of(problem, given, "pip install the same version on all hosts")


def _identity() -> list[str]:
    """Return the identifiers that are equal on ranks that may share memory, or none if they cannot be read."""
    try:
        system = [*network_identity(), str(os.getuid())]  # names of abstract sockets belong to one network namespace
    except OSError as error:
        if error.errno == errno.EMFILE:  # this rank cannot share memory, but not because of its host
            raise
        _LOG.warning("the host of this rank cannot be identified, so the rank shares no memory: %s", error)
        return []
    return [*system, os.environ.get("CROSSREDUCE_HOST", "")]


def _hosts(infos: Sequence[_HostInfo], problems: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: ranks of the same identity. If one of them had a problem, each is alone on a host.

    >>> _hosts([_HostInfo("1", ["a"], "", [])] * 2 + [_HostInfo("1", ["b"], "", [])] * 2, ["", "", "", "broken"])
    ((0, 1), (2,), (3,))
    """
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, info in enumerate(infos):
        ranks_of.setdefault(tuple(info.identity), []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for ranks in ranks_of.values():
        hosts += [(rank,) for rank in ranks] if any(problems[rank] for rank in ranks) else [tuple(ranks)]
    return tuple(sorted(hosts))


def _memory(nbytes: int, ranges: Sequence[tuple[int, int]] = ()) -> int:
    """Return a file descriptor of memory of fixed size that only this user can open.

    ``ranges``: (offset, size) of the parts that are allocated; everything if there are none.
    """
    available = kernels.available_memory()
    if nbytes > available:  # Linux would not refuse to allocate, but kill processes
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
        os.ftruncate(fd, max(nbytes, 1))
        for offset, size in ranges or [(0, max(nbytes, 1))]:
            os.posix_fallocate(fd, offset, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


# A rank of a host sends the memory through datagram sockets. Their names are public in /proc/net/unix, but processes of
# other programs and users cannot send to them. The sender is shut down for reading before it has a name. A receiver is
# connected to the sender before it has a name, and Linux accepts messages for a connected socket only from its peer.


def _new_name() -> str:
    return f"\0crossreduce-{secrets.token_hex(16)}"


def _sender(name: str) -> socket.socket:
    """Return a datagram socket with this name. Receivers can connect to it, but it receives no messages."""
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sender.shutdown(socket.SHUT_RD)
        sender.bind(name)
    except BaseException:
        sender.close()
        raise
    return sender


def _receive_only_from(sender: str, receiver: socket.socket) -> str:
    """Let ``receiver`` receive messages only from the socket named ``sender``. Return the receiver's new name."""
    name = _new_name()
    receiver.connect(sender)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # not before: it names unconnected sockets
    receiver.bind(name)
    return name


def _send(sender: socket.socket, fd: int, names: Sequence[str]) -> None:
    """Send the memory ``fd``, or, if this is -1, nothing, to the sockets ``names`` of other ranks."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
    sender.settimeout(_MEMORY_S)  # its buffer may be full until some have read their message
    for name in names:
        sender.sendmsg([b"m"], rights, 0, name)


def _receive_memory(receiver: socket.socket, nbytes: int) -> int:
    """Return the file descriptor of the memory that another rank sends to this rank's receiver."""
    room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_LEN(struct.calcsize("i"))
    receiver.settimeout(_MEMORY_S)
    _, parts, _, _ = receiver.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    data_of = {kind: data for _, kind, data in parts}
    if socket.SCM_RIGHTS not in data_of:
        raise OSError(errno.EBADMSG, "the message contained no file descriptor; see ulimit -n")
    (fd,) = struct.unpack("i", data_of[socket.SCM_RIGHTS])
    _, user, _ = _CREDENTIALS.unpack(data_of[socket.SCM_CREDENTIALS])
    size, problem = os.fstat(fd).st_size, ""
    if user != os.getuid():
        problem = f"a process of user {user} sent it"
    elif size < nbytes:
        problem = f"it has {size} bytes, and this rank needs {nbytes}; all ranks need the same version of crossreduce"
    elif not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # an access to what was cut off ends a process
        problem = "its owner could make it smaller"
    if problem:
        os.close(fd)
        raise OSError(errno.EBADMSG, problem)
    return int(fd)
