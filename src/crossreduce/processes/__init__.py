"""Collectives of NumPy arrays among processes that any launcher has started, and that can go on when some of them die.

Input: a rank, the number of ranks, and an address at which rank 0 listens: from the launcher's environment, or as
arguments. Output: a ``RankGroup``. It needs neither PyTorch nor MPI. The ranks of a host reduce through shared memory,
hosts exchange data over TCP. For programs under ``mpiexec`` see ``mpi.py``.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from operator import index
from typing import Any, Final, TypeVar

from .. import kernels
from ..errors import (
    ArgumentError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    ReductionError,
    encoded,
    message,
    shown,
)
from ..ranks.communicator import Communicator
from ..ranks.connections.rendezvous import MET, NEW, ConnectionStore, Origin, StoreRendezvous, reaching
from ..ranks.connections.store import LIMIT_S, StoreClient, StorePart
from ..ranks.membership import Hosts
from ..ranks.survival import joining, survivors
from ..ranks.survival.forming import Forming, GroupKind, Settings
from ..ranks.survival.survivors import SHRINK_S, Reformed
from ..ranks.transports.base import Transport
from ..ranks.transports.tcp import TcpTransport, loopback
from ..reduction.validation import seconds
from .array_group import ArrayGroup

__all__ = ["RankGroup", "Reformed", "join", "join_invited"]

_ANSWER_S: Final = 1.0  # how long rank 0 may take to answer at least, even if the timeout is shorter
_PAUSES_S: Final = (0.01, 0.5)  # between two attempts to reach rank 0, first and longest
_REFUSED_S: Final = 3.0  # how long another program may answer at the address; it may be an earlier job that ends
_LATE_S: Final = 5.0  # how long rank 0 waits for the others to read why they cannot meet
_MOST: Final = 1 << 16  # ranks
_OTHER_KEY: Final = "the same key on all ranks: {} connections to this rank did not prove that they know it"
Result = TypeVar("Result")


def join(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    key: str | None = None,
    timeout_s: float = 300.0,
    name: str = "world",
) -> RankGroup:
    """Make a group of processes. All of them call it.

    What is not given is read from the environment, where ``torchrun`` and other launchers set it: ``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Where torchrun serves a store of its own at that port, the next
    port is used. Rank 0 listens at the address until its group ends. If it is this host's own ("localhost"), only
    processes of this host can connect, to rank 0 and to all others, also when the group shrinks or grows.

    Args:
      rank: this process's number, from 0.
      size: the number of processes.
      address: where rank 0 listens, as "HOST:PORT". If ``size`` is 1, it only tells whether other hosts can connect
        later, to join; without it they cannot.
      key: a secret text of all ranks; ``None``: the environment variable ``CROSSREDUCE_KEY``. Each message to the
        address and each answer then has a proof that the sender knows it. Without a key any program that reaches the
        address can take part. Nothing is encrypted; see docs/processes.md.
      timeout_s: how long this, and then every call, waits for other ranks, in seconds.
      name: the group's name in messages.
    Raises:
      ArgumentError: an argument or variable is missing or invalid, two processes have the same rank, rank 0 cannot
        listen there, or another program, or one with another key, answers there.
      MismatchError: processes differ in ``size``, or in their version of crossreduce.
      CollectiveTimeout: some ranks did not come in time.
      BackendError: the compiled kernels are missing, or this system is not Linux.

    >>> import numpy as np
    >>> with join(rank=0, size=1) as group:  # a group of this process alone
    ...     group.all_reduce(np.arange(3.0), "mean")
    array([0., 1., 2.])
    """
    timeout_s = seconds(timeout_s)
    if not isinstance(name, str):
        raise ArgumentError.of("name must be a text.", shown(name), 'name="world"')
    own, count = _number(rank, "rank", "RANK"), _number(size, "size", "WORLD_SIZE")
    if not 0 <= own < count <= _MOST:
        problem = f"the rank must be at least 0 and less than the size, which is at most {_MOST}."
        raise ArgumentError.of(problem, f"rank {own}, size {count}")
    secret = _digest(os.environ.get("CROSSREDUCE_KEY", "") if key is None else key)
    host, port, listen_at = _meeting(address, count)
    kernels.native()  # it loads a file, and programs that connect from now on may have this process open many
    store = _served(secret, host, port, count) if own == 0 else _reached(secret, host, port, own, timeout_s)
    try:
        _meet(store, own, count, timeout_s)
    except CollectiveTimeout as error:
        store.close()
        if own == 0 and store.refused:
            raise CollectiveTimeout(f"{error}; {_OTHER_KEY.format(store.refused)}", error.ranks) from None
        raise
    except BaseException:
        store.close()
        raise
    store.limit_s = LIMIT_S
    return _group_of(store, own, count, Settings(timeout_s, name, listen_at=listen_at))


def join_invited(invitation: str, timeout_s: float = 60.0) -> RankGroup:
    """Join the group of an ``RankGroup.invitation`` when its ranks next call ``grow``.

    Args:
      invitation: what ``invitation`` returned on any rank of the group.
      timeout_s: how long this waits for ``grow``, in seconds. If the ranks have called it by then, forming the group
        may take 10 s more.
    Returns:
      The group, with this process as one of the last ranks. Its first call is the one that the others make when
      ``grow`` has returned a group.
    Raises:
      ArgumentError: this is not an invitation to a group of this module, or ``timeout_s`` is not a number.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
    """
    return joining.join(invitation, _KIND, seconds(timeout_s))


class RankGroup(ArrayGroup):
    """The processes that joined. All make the same calls in the same order; each returns with this rank's result.

    Arrays may have any shape and layout; results are new arrays in C order, or ``out``, which may be the input array.
    Dtypes are those of the library, bfloat16 of ml_dtypes included. ``with`` or ``close`` leaves the group.

    ``rank`` is this process's number, from 0; ``size`` is the number of ranks; ``hosts`` has the ranks of each host,
    which share memory. ``reformed``: of a group that ``shrink`` or ``grow`` has formed, its ranks that were in the
    earlier group, by their numbers there, and how many calls have succeeded there on all of them; ``Reformed((), 0)``
    in a process that ``join_invited`` has let in; else ``None``.

    If a rank dies, calls of the others raise a ``PeerLostError``, and they go on with ``shrink`` or ``committed``. One
    thread at a time calls ``agree``, ``shrink``, ``committed`` or ``grow``; a second one gets a ``ContextError``.
    """

    def __init__(self, communicator: Communicator, store: StoreClient) -> None:
        """Users call ``join`` instead."""
        super().__init__(communicator)
        self.reformed: Reformed | None = None
        self._store, self._agreeing = store, threading.Lock()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        super().close()
        self._store.close()

    def agree(self, flag: bool, timeout_s: float | None = None) -> bool:
        """Return whether ``flag`` is true on all ranks: the same answer on all that survive this call.

        All ranks call it together, also after a call of the group has failed. Ranks that have died do not count.

        Args:
          flag: what this rank brings.
          timeout_s: how long ranks that are alive are waited for, in seconds; later ones are excluded from the group
            for good. ``None``: 10 s longer than the timeout of the group, since a rank may come from a call that timed
            out.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ExcludedError: the other ranks have gone on without this one, or it reaches too few of them.
        """
        limit_s = None if timeout_s is None else seconds(timeout_s)
        with self._alone():
            return survivors.agree(self.communicator, bool(flag), limit_s)

    def shrink(self, timeout_s: float = SHRINK_S) -> RankGroup:
        """Form a group of the ranks that are left, after a ``PeerLostError`` or ``CollectiveTimeout``; close this one.

        All ranks that are left call it; a call of this group that another rank is in fails as soon as one rank calls
        this. The new group has ranks 0, 1, ... in the order of the earlier ones. What a lost rank had not sent is gone:
        repeat the step that failed.

        Args:
          timeout_s: how long ranks that are alive are waited for, in seconds. Ranks that are later, or are stopped, are
            excluded for good: pass more if ranks may compute for longer before they call this. Ranks that have ended
            are not waited for.
        Returns:
          The new group, with ``reformed``.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ContextError: this group is closed, or another thread is in ``agree``, ``shrink`` or ``grow``.
          ExcludedError: the others have gone on without this rank, or it reaches too few of them: of the hosts' ranks
            more than half, or half with the lowest one, unless all others have ended.
        """
        limit_s = seconds(timeout_s)
        with self._alone():
            made, reformed = survivors.shrink(self.communicator, self._forming(limit_s, grows=False), limit_s)
            return self._followed_by(made, reformed)

    def committed(
        self,
        step: Callable[[RankGroup], Result],
        changed: Callable[[RankGroup], None] = lambda _: None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[RankGroup, Result]:
        """Run a step until it has succeeded on all ranks that are left; return their group, and its result.

        If ranks are lost, the others shrink the group and repeat the step in the new one. So ``step`` changes nothing
        that a repetition needs; what follows this call is done by all ranks or by none::

            group, gradient = group.committed(lambda group: group.all_reduce(gradient_of(weights, group.rank)))
            weights -= 0.1 * gradient

        Args:
          step: called with the group, on all ranks; it raises ``PeerLostError`` or ``CollectiveTimeout`` if ranks are
            lost.
          changed: called with the new group before the step is repeated, to divide the work anew. If ranks are lost in
            it, the others shrink the group and call it again.
          timeout_s: how long ranks that are alive are waited for when the step has failed, in seconds; later ones are
            excluded for good, also if they only compute for longer. ``None``: 10 s longer than the timeout of the
            group; 10 s if the step raised a ``CollectiveTimeout``, since late ranks were waited for already. A rank
            whose step has succeeded always waits as ``agree`` does by default. Ranks that have ended or are stopped
            are not waited for.
        Returns:
          The group in which the step has succeeded, which is this one unless ranks were lost, and what ``step``
          returned there.
        Raises:
          ArgumentError, ExcludedError: as for ``shrink``.
          MismatchError: ``step`` has raised it, as on all ranks. The group can still be used.
          Exception: what ``step`` raises, if it is another error. This rank then leaves the group, and the others
            continue without it.
        """
        limit_s, groups = None if timeout_s is None else seconds(timeout_s), [self]
        shrink_s = self.communicator.timeout_s + SHRINK_S if limit_s is None else limit_s

        def shrink() -> Reformed:
            groups.append(groups[-1].shrink(shrink_s))
            assert groups[-1].reformed is not None
            return groups[-1].reformed

        result = survivors.committed(
            lambda: step(groups[-1]),
            lambda: changed(groups[-1]),
            lambda done, wait_s: groups[-1].agree(done, wait_s),
            shrink,
            lambda error: groups[-1].communicator.give_up(error),
            lambda error: groups[-1]._leave(error),
            limit_s,
        )
        return groups[-1], result

    def grow(self, timeout_s: float = SHRINK_S) -> RankGroup | None:
        """Let the processes in that have called ``join_invited``; all ranks call it together.

        The new group has the ranks of this one first, in their order, and then the new ones; this one is closed. The
        new ranks have no state yet: if this returns a group, broadcast it from rank 0, on all ranks by the same call.

        Args:
          timeout_s: how long ranks of the group that are alive are waited for, in seconds. Later ones are excluded for
            good: pass more if ranks may compute for longer before they call this. Ranks that have ended or are stopped
            are not waited for.
        Returns:
          The new group, with ``reformed``; ``None``, on all ranks: no process waits, and this group stays as it is. If
          a rank of it was excluded, or has ended, its next call fails with a ``PeerLostError``.
        Raises:
          ArgumentError: ``timeout_s`` is not a number.
          ContextError: this group is closed.
          ExcludedError: the others have gone on without this rank, or it reaches too few of them.
          PeerLostError: other ranks call ``shrink``.
          ReductionError: the new group could not be formed.
        """
        limit_s = seconds(timeout_s)
        with self._alone():
            made, reformed = survivors.grow(self.communicator, self._forming(limit_s, grows=True), limit_s)
            return None if made is None else self._followed_by(made, reformed)

    def invitation(self) -> str:
        """Return a text with which a new process can ``join_invited`` this group, by any channel that keeps it secret.

        It names this rank and a few others. It stays valid when the group shrinks or grows, as long as one of these
        processes is in it. If the group met at "localhost", only processes of this host can join.

        Raises:
          ContextError: this group is closed, or belongs to another process.
        """
        return joining.invitation(self.communicator, _KIND.name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise a ``ContextError`` if another thread is in ``agree``, ``shrink`` or ``grow``."""
        if not self._agreeing.acquire(blocking=False):
            problem = f'another thread is in agree, shrink or grow of group "{self.communicator.name}".'
            raise ContextError.of(problem, threading.current_thread().name, "call them in one thread")
        try:
            yield
        finally:
            self._agreeing.release()

    def _leave(self, error: BaseException) -> None:
        """Leave the group if an error of a step requires it."""
        if survivors.must_leave(self.communicator, error):
            self.communicator.abort()

    def _forming(self, timeout_s: float, *, grows: bool) -> Forming[RankGroup]:
        group = self.communicator
        settings = Settings(group.timeout_s, group.name, listen_at=group.listen_at)
        return Forming(group, _KIND, settings, timeout_s, grows=grows)

    def _followed_by(self, made: RankGroup, reformed: Reformed) -> RankGroup:
        """Close this group, whose ranks go on in a new one, and return that."""
        made.reformed = reformed
        self.communicator.succeed(made.communicator.token)
        self.close()
        return made


# How ranks find each other


def _number(given: Any, what: str, variable: str) -> int:
    """Return a number that the caller or the environment gave."""
    value: Any = os.environ.get(variable) if given is None else given
    if isinstance(value, bool):
        raise ArgumentError.of(f"{what} must be an integer.", shown(value))
    remedy = f"{what}=..., or a launcher that sets {variable}, such as torchrun"
    if value is None:
        raise ArgumentError.of(f"{what} was not given, and {variable} is not set.", f"{what}=None", remedy)
    try:
        return int(value) if given is None else index(value)
    except (TypeError, ValueError):
        where = variable if given is None else what
        raise ArgumentError.of(f"{where} must be an integer.", shown(value), remedy) from None


def _place(address: Any) -> tuple[str, int]:
    """Return the host and the port at which rank 0 listens."""
    given, further = address, 0
    if address is None:
        host, port = (os.environ.get(variable) for variable in ("MASTER_ADDR", "MASTER_PORT"))
        if host is None or port is None:
            problem = "address was not given, and MASTER_ADDR and MASTER_PORT are not both set."
            raise ArgumentError.of(problem, f"MASTER_ADDR={host}, MASTER_PORT={port}", 'address="HOST:PORT"')
        given = f"{host}:{port}"
        further = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens at MASTER_PORT itself
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) + further < 1 << 16:
        raise ArgumentError.of("this is not an address.", shown(given), '"HOST:PORT", such as "node0:29500"')
    return host, int(port) + further


def _is_host(text: str) -> bool:
    """Return whether a text can be a host's name or address."""
    try:
        return bool(text.encode("idna")) and text.isprintable() and " " not in text
    except UnicodeError:  # an empty or too long part
        return False


def _meeting(address: Any, size: int) -> tuple[str, int, str]:
    """Return the host and the port at which rank 0 listens, and the address at which all ranks do; empty: at all."""
    if size > 1:
        host, port = _place(address)
        return host, port, loopback(host)
    host = "localhost"
    with suppress(ArgumentError):  # a rank alone meets nobody, but processes of other hosts may join it later
        host, _ = _place(address)
    return "localhost", 0, loopback(host)


def _digest(key: Any) -> bytes:
    """Return the key of the store for a secret text."""
    if not isinstance(key, str):
        raise ArgumentError.of("key must be a text.", type(key).__name__, "the same secret text on all ranks")
    return blake2b(key.encode(errors="surrogatepass"), digest_size=16, person=b"crossreduce key").digest()


def _served(key: bytes, host: str, port: int, size: int) -> StoreClient:
    """Serve the store of a group."""
    try:
        return StoreClient(key, port=port, serve_at=loopback(host), ranks=size)
    except OSError as error:
        remedy = "another port, or end the program that listens there"
        raise ArgumentError.of(f"rank 0 cannot listen at port {port}.", str(error), remedy) from error


def _reached(key: bytes, host: str, port: int, rank: int, timeout_s: float) -> StoreClient:
    """Connect to the store that rank 0 serves, once it does so."""
    began, pause, refused_at = time.monotonic(), _PAUSES_S[0], 0.0
    while True:
        store: StoreClient | None = None
        try:
            store = StoreClient(key, host, port)
            store.limit_s = min(LIMIT_S, max(_ANSWER_S, began + timeout_s - time.monotonic()))
            store.num_keys()
        except (OSError, RuntimeError) as error:
            now, failure = time.monotonic(), error
            if store is not None:
                store.close()
        else:
            store.limit_s = LIMIT_S
            return store
        if isinstance(failure, OSError) or "Timeout" in str(failure):  # rank 0 does not listen yet, or was stopped
            if now > began + timeout_s:
                if isinstance(failure, OSError):
                    problem = f"rank {rank} did not reach rank 0 at {host}:{port} within {timeout_s:g} s."
                    remedy = "start all ranks; the address of rank 0's host; a longer timeout; read the last output of "
                    remedy += "rank 0; join_invited, if the other ranks have continued without a rank that is restarted"
                else:
                    problem = f"what listens at {host}:{port} did not answer rank {rank} within {timeout_s:g} s."
                    remedy = "a port at which no other program listens; or rank 0 is stopped; a longer timeout"
                raise CollectiveTimeout(message(problem, str(failure), remedy), [0])
        else:
            refused_at = refused_at or now
            if now > refused_at + min(_REFUSED_S, timeout_s):
                problem = f"what listens at {host}:{port} does not accept rank {rank}."
                remedy = "the same key on all ranks; a port at which no other program listens"
                raise ArgumentError.of(problem, str(failure), remedy)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def _meet(store: StoreClient, rank: int, size: int, timeout_s: float) -> None:
    """Wait for all ranks, each of which is there once, with the same size.

    A process that comes after all ranks have met can no longer end their group. If they cannot meet, rank 0 keeps the
    store for some seconds, so that ranks that come later get the reason, too.
    """
    rendezvous = StoreRendezvous(StorePart(store, "meet/"), rank, size, timeout_s)
    if rank == 0:
        rendezvous.read_s = _LATE_S
    with reaching("rank 0, which runs it,", [0]):
        own, names = secrets.token_hex(8).encode(), StorePart(store, "rank/")
        first = names.compare_set("size", b"", f"{size} {rank}".encode()).decode()
        is_first = names.compare_set(str(rank), b"", own) == own
    error: ReductionError | None = None
    if (other := first.split())[0] != str(size):
        problem = f"the size is {size} on rank {rank} and {other[0]} on rank {other[1]}."
        error = MismatchError.of(problem, remedy="the same size, or WORLD_SIZE, on all ranks")
    elif not is_first:
        problem = f"two processes have joined as rank {rank}."
        error = ArgumentError.of(
            problem, remedy="a number of its own for each rank; an address of its own for each job"
        )
    if error is not None:
        if rendezvous.publish_abort(encoded(error)) == MET:
            remedy = "join_invited, which a process calls that is restarted; an address of its own for each job"
            raise type(error).of(problem, "the group at this address is complete", remedy)
        with suppress(ReductionError):  # it waits until others have read the error
            rendezvous.all_gather(b"")
        raise error
    rendezvous.meet()


def _nothing() -> None:
    """Watch nothing."""


def _group_of(store: StoreClient, rank: int, size: int, settings: Settings, origin: Origin = NEW) -> RankGroup:
    """Return a group whose ranks meet at a store, which this closes if they cannot."""

    def connected(cancelled: threading.Event, hosts: Hosts) -> Transport:
        part = StorePart(store, "tcp/")
        places = ConnectionStore(part, rank, cancelled, settings.listen_at, origin.is_beyond)
        return TcpTransport(*places.connect(hosts))

    name, timeout_s, listen_at = settings.name, settings.timeout_s, settings.listen_at
    try:
        rendezvous = StoreRendezvous(StorePart(store, "group/"), rank, size, timeout_s, watch=origin.watch)
        communicator = Communicator(
            rendezvous, connected, name=name, timeout_s=timeout_s, overlapping=False, listen_at=listen_at
        )
    except BaseException:
        store.close()
        raise
    rendezvous.watch = store.watch = _nothing  # that of ``origin`` refers to the earlier group
    return RankGroup(communicator, store)


_KIND: Final[GroupKind[RankGroup]] = GroupKind("NumPy ranks", StoreClient, _group_of)
