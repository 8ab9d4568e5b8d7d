"""Bootstrap: the ranks of a group find out which of them share a host, and share memory there.

Input: a rendezvous, and the number of bytes that a host's ranks need. Output: the hosts, and a file descriptor of this
host's memory. Ranks are on one host if their identifiers (``_identity``) are equal and the one that came first could
send its memory to all others. The memory has no name in the file system, so it is always freed when the processes end.
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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ... import kernels
from ...errors import CollectiveTimeout, MismatchError, ReductionError, message, rank_list
from ...observe.flight_recorder import version
from ..transports.addresses import network_identity
from ..transports.base import Rendezvous
from . import votes

with suppress(ImportError):  # Windows has no fcntl; there, ranks raise a BackendError before they need it
    import fcntl

_LOG: Final = logging.getLogger("crossreduce")
_CREDENTIALS: Final = struct.Struct("3i")  # of the sender of a message: process, user, group
_LEAST_HOSTS: Final = 8  # the shared memory is sized for at least this number of hosts
_MOST_EARLY: Final = 16  # the ranks of a group for which memory is made before it is known that they are on one host
_SEND_S: Final = 30.0  # how long the memory may take to be sent, if the buffer for this is full
_SHARE: Final = (
    0.9  # of the timeout: the wait for memory. Ranks of other hosts wait for this rank, and shall not name it.
)
_SLICE_S: Final = 0.05  # how often a rank that waits for it checks that the other rank has not ended
_UNCHECKED: Final = 1 << 20  # bytes that a rank allocates without a check of the available memory, as any program does
_NOEXEC: Final = 0x8  # MFD_NOEXEC_SEAL: some systems require it; Linux before 6.3 does not support it


class BootstrapResult(NamedTuple):
    """``hosts``: the ranks of each host, sorted by the hosts' lowest ranks. ``host``: the ranks of this host.

    ``fd``: the memory that the ranks of ``host`` share, zeroed, or -1; the caller must close it. ``cpus``: of each rank
    of the group, those on which it may run, since launchers may bind each rank to CPUs of its own. ``values``: of each
    rank. ``problem``: why this rank does not share memory, or "".
    """

    hosts: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]
    fd: int
    cpus: list[list[int]]
    values: list[Any]
    problem: str

    @property
    def cpu_count(self) -> int:
        """The number of CPUs on which at least one rank of this host may run."""
        return len({cpu for rank in self.host for cpu in self.cpus[rank]})


class _HostInfo(NamedTuple):
    """The message of a rank to all others. ``source``: the rank of its host that makes the memory. ``name``: where it
    receives that, or "".

    ``version`` must stay the first field in all versions, since the versions are compared before the rest is read.
    """

    version: str
    source: int
    name: str
    cpus: list[int]
    value: Any


def bootstrap(
    rendezvous: Rendezvous,
    nbytes: Callable[[int, int], int],
    global_ranks: Sequence[int] | None = None,
    first: Callable[[int, int], Sequence[tuple[int, int]]] | None = None,
    value: Any = None,
) -> BootstrapResult:
    """Find out which ranks share a host, and share memory with them, on Linux. All ranks must call it together.

    The environment variable ``CROSSREDUCE_HOST`` can split a host: ranks with different values are on different hosts.

    Args:
      rendezvous: the rendezvous of the ranks.
      nbytes: returns the number of bytes that the ranks of one host share, given the number of these ranks and the
        maximum number of hosts. The memory has more: its end is for ``votes``.
      global_ranks: the ranks' numbers in messages; by default 0, 1, ...
      first: given the same, returns the ranges (offset, size) of the memory that are allocated if all ranks are on one
        host; before a rank writes elsewhere, it allocates more. The default is everything.
      value: a value for all other ranks that JSON can represent.
    Raises:
      MismatchError: the ranks have different versions of crossreduce; raised on all ranks.
      ReductionError: this rank cannot allocate memory even for itself alone.
      CollectiveTimeout: some ranks did not reach the rendezvous in time, or one did not send the memory.
    """
    rank, everyone, name, problem = rendezvous.rank, rendezvous.size, _new_name(), ""
    numbers = global_ranks or range(everyone)
    if rendezvous.is_near and (near := _bootstrap_near(rendezvous, nbytes, numbers, first, value)) is not None:
        return near
    fd, sizes = -1, (0, 0)  # the memory of this rank's host, and for how many ranks and hosts this rank has made it
    with _sender(name) as sender, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        # The first rank of a host that comes here makes the memory and sends it. A rank without identifiers is alone.
        key = json.dumps([version(), *(_identity() or [name])])
        source, sent_from = json.loads(rendezvous.first(key, json.dumps([rank, name]).encode()))

        def make(ranks: int = everyone, hosts: int = _LEAST_HOSTS) -> None:
            """Make memory, if this rank has to. That for the ranks of a single host is made while other ranks come."""
            nonlocal fd, sizes, problem
            if source == rank and (ranks, hosts) != sizes:
                _close(fd)
                fd, sizes, problem = -1, (ranks, hosts), ""
                try:
                    fd = _memory(nbytes(*sizes), first(*sizes) if first and ranks == everyone else ())
                except OSError as error:
                    problem = f"rank {numbers[rank]} could not share {nbytes(*sizes)} bytes: {error}"

        try:
            received_at = ""
            try:
                received_at = "" if source == rank else _receive_only_from(sent_from, receiver)
            except OSError as error:
                problem = f"rank {numbers[rank]} could not use another rank's memory: {error}"
            own = _HostInfo(version(), source, received_at, sorted(os.sched_getaffinity(0)), value)
            early = make if everyone <= _MOST_EARLY else lambda: None
            received = [json.loads(info) for info in rendezvous.all_gather(json.dumps(own).encode(), early)]
            _require_same_version({number: info[0] for number, info in zip(numbers, received, strict=True)})
            infos = [_HostInfo(*info) for info in received]
            ranks = [other for other, info in enumerate(infos) if info.source == source]
            # Ranks that cannot share memory count as one host each, so there may be more hosts than sources.
            most_hosts = max(_LEAST_HOSTS, len({info.source for info in infos}))
            make(len(ranks), most_hosts)
            receivers = [infos[other].name for other in ranks if source == rank and infos[other].name]
            try:
                _send(sender, fd, receivers)
            except OSError as error:
                problem = problem or f"rank {numbers[rank]} could not send its memory: {error}"
                with suppress(OSError):
                    _send(sender, -1, receivers)  # so that they wait no longer
            try:
                if source != rank and not problem:
                    limit_s = _SHARE * rendezvous.timeout_s
                    fd = _receive_memory(receiver, nbytes(len(ranks), most_hosts), limit_s)
            except TimeoutError:  # that rank is probably stopped
                late = f"rank {numbers[source]} did not send the memory of its host within {limit_s:g} s."
                remedy = f"continue rank {numbers[source]} if it was stopped; a longer timeout"
                text = message(late, f"rank {numbers[rank]} waited", remedy)
                raise CollectiveTimeout(text, [numbers[source]]) from None
            except OSError as error:
                problem = f"rank {numbers[rank]} could not use another rank's memory: {error}"
            found = BootstrapResult(
                _hosts(infos), tuple(ranks), fd, [each.cpus for each in infos], [each.value for each in infos], problem
            )
            return settled(found, rendezvous, nbytes, numbers) if problem or len(found.hosts) > 1 else found
        except BaseException:
            _close(fd)
            raise


def _bootstrap_near(
    rendezvous: Rendezvous,
    nbytes: Callable[[int, int], int],
    numbers: Sequence[int],
    first: Callable[[int, int], Sequence[tuple[int, int]]] | None,
    value: Any,
) -> BootstrapResult | None:
    """Do the same as ``bootstrap`` for ranks of which each may open what the others have opened.

    Rank 0 makes the memory before it goes to the rendezvous, and the others open it in /proc. The result is ``None`` on
    all ranks if ``CROSSREDUCE_HOST`` is no longer the same on all of them.
    """
    rank, sizes, fd, problem, name = rendezvous.rank, (rendezvous.size, _LEAST_HOSTS), -1, "", ""
    try:
        if rank == 0:
            try:
                fd = _memory(nbytes(*sizes), first(*sizes) if first else ())
                name = f"{os.getpid()}/fd/{fd} {os.fstat(fd).st_ino}"
            except OSError as error:
                problem = f"rank {numbers[rank]} could not share {nbytes(*sizes)} bytes: {error}"
        own = _HostInfo(version(), 0, name, sorted(os.sched_getaffinity(0)), [_chosen_host(), value])
        received = [json.loads(info) for info in rendezvous.all_gather(json.dumps(own).encode())]
        _require_same_version({number: info[0] for number, info in zip(numbers, received, strict=True)})
        infos = [_HostInfo(*info) for info in received]
        if len({each.value[0] for each in infos}) > 1:
            _close(fd)
            return None
        try:
            if rank != 0:
                fd = _opened(infos[0].name, nbytes(*sizes))
        except OSError as error:
            problem = f"rank {numbers[rank]} could not use another rank's memory: {error}"
        ranks = tuple(range(rendezvous.size))
        found = BootstrapResult(
            (ranks,), ranks, fd, [each.cpus for each in infos], [each.value[1] for each in infos], problem
        )
        return settled(found, rendezvous, nbytes, numbers) if problem else found
    except BaseException:
        _close(fd)
        raise


def _opened(name: str, nbytes: int) -> int:
    """Return a file descriptor of the memory that another rank has made. ``name``: its path below /proc, and its inode.

    Raise an ``OSError`` if it is not there: that rank has ended, or could not make it.
    """
    path, _, inode = name.partition(" ")
    if not path:
        raise OSError(errno.ENOMEM, "there is none")
    fd = os.open(f"/proc/{path}", os.O_RDWR | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (str(found.st_ino), found.st_uid) != (inode, os.getuid()) or found.st_size < nbytes:  # that rank has ended
        os.close(fd)
        raise OSError(errno.ESTALE, "it has been closed")
    return fd


def settled(
    found: BootstrapResult, rendezvous: Rendezvous, nbytes: Callable[[int, int], int], numbers: Sequence[int]
) -> BootstrapResult:
    """Return the result after a split of those hosts whose ranks cannot all share memory. All ranks call it together.

    If ``bootstrap`` has found one host, ranks that have the memory call this only if they find that others do not. For
    the arguments and errors see there; ``numbers`` are the global ranks.
    """
    problems = [text.decode() for text in rendezvous.all_gather(found.problem.encode())]
    if not any(problems[other] for other in found.host):
        return found._replace(hosts=_split(found.hosts, problems))
    rank, here = rendezvous.rank, found.host
    if rank == here[0] and len(here) > 1:
        warning = (
            f"{rank_list(numbers[other] for other in here)} are on one host but could not share memory; each is now "
            "treated as if it were alone on a host."
        )
        why = "; ".join(problems[other] for other in here if problems[other])
        remedy = (
            "more memory for the container, or a different CROSSREDUCE_HOST in each container that cannot share memory "
            "with the others"
        )
        _LOG.warning("%s", message(warning, why, remedy))
    size = nbytes(1, rendezvous.size)
    try:
        fd = _memory(size)
    except OSError as error:
        limits = {errno.EFBIG: "ulimit -f unlimited", errno.EMFILE: "more open files (ulimit -n)"}
        remedy = limits.get(error.errno or 0, "a larger memory limit")
        raise ReductionError.of("memory could not be allocated.", f"{size} bytes: {error}", remedy) from error
    _close(found.fd)
    return found._replace(hosts=_split(found.hosts, problems), host=(rank,), fd=fd)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


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
    return [*system, _chosen_host()]


def _chosen_host() -> str:
    return os.environ.get("CROSSREDUCE_HOST", "")


def _hosts(infos: Sequence[_HostInfo]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: those with one source."""
    ranks_of: dict[int, list[int]] = {}
    for rank, info in enumerate(infos):
        ranks_of.setdefault(info.source, []).append(rank)
    return tuple(map(tuple, ranks_of.values()))


def _split(hosts: Sequence[Sequence[int]], problems: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host. If one of them had a problem, each is alone on a host.

    >>> _split([(0, 1), (2, 3)], ["", "", "", "broken"])
    ((0, 1), (2,), (3,))
    """
    apart = [any(problems[rank] for rank in ranks) for ranks in hosts]
    pairs = zip(hosts, apart, strict=True)
    return tuple(
        sorted(part for ranks, alone in pairs for part in ([(x,) for x in ranks] if alone else [tuple(ranks)]))
    )


def _memory(nbytes: int, ranges: Sequence[tuple[int, int]] = ()) -> int:
    """Return a file descriptor of memory of fixed size that only this user can open, with memory for votes at its end.

    ``ranges``: (offset, size) of the parts that are allocated; everything if there are none.
    """
    end = votes.offset(nbytes)
    ranges = [*(ranges or [(0, end)]), (end, votes.NBYTES)]
    # Linux would not refuse to allocate, but kill processes. To find out what is available takes 0.5 ms.
    if sum(size for _, size in ranges) > _UNCHECKED and nbytes > (available := kernels.available_memory()):
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
        os.ftruncate(fd, end + votes.NBYTES)
        for offset, size in ranges:
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
    sender.settimeout(_SEND_S)  # its buffer may be full until some have read their message
    failure: OSError | None = None
    for name in names:
        try:
            sender.sendmsg([b"m"], rights, 0, name)
        except OSError as error:  # this rank may have ended; the others wait
            failure = error
    if failure is not None:
        raise failure


def _receive_memory(receiver: socket.socket, nbytes: int, limit_s: float) -> int:
    """Return the file descriptor of the memory that another rank sends to this rank's receiver.

    Raise a ``TimeoutError`` if it sends nothing within ``limit_s``, and another ``OSError`` if the memory is unusable.
    """
    room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_LEN(struct.calcsize("i"))
    receiver.settimeout(_SLICE_S)
    until, has_ended = time.monotonic() + limit_s, False
    while True:
        with suppress(TimeoutError):
            _, parts, _, _ = receiver.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            break
        if has_ended:
            raise ConnectionResetError("that rank has ended")
        if time.monotonic() > until:
            raise TimeoutError("the memory did not come")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:  # what was sent before the end is still read
            has_ended = other.connect_ex(receiver.getpeername()) != 0
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
