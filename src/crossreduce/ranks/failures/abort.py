"""``GroupAbort``: makes all ranks of a group stop with the same error, and raises it on this rank.

Input: the error of the rank that aborts the group. Output: the valid error, the same on all ranks, and a dump of the
flight recorder. ``failure_detector`` finds out which ranks are at fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ...errors import CollectiveTimeout, ExcludedError, PeerLostError, ReductionError, decoded, encoded, message
from ...observe import flight_recorder
from ...observe.diagnostics import DOCTOR
from ..connections import shortage
from ..connections.peers import Membership
from ..intra_host.shared_memory import RankMemory
from ..transports.base import Rendezvous, Transport
from .failure_detector import FailureDetector


class GroupAbort:
    """Aborts a group after a failure. ``error``: the error of all later calls, or ``None`` until a call raised it."""

    def __init__(
        self,
        members: Membership,
        memory: RankMemory,
        rendezvous: Rendezvous,
        transport: Transport | None,
        detector: FailureDetector,
    ) -> None:
        self._members, self._memory, self._detector = members, memory, detector
        self._rendezvous, self._transport = rendezvous, transport
        self._several_hosts = len(members.hosts) > 1
        self.error: ReductionError | None = None

    @property
    def cause(self) -> ReductionError | None:
        """The error with which the group was aborted, or ``None``. If the memory is closed, raise a ``ValueError``."""
        return self.error or self._memory.abort_cause()

    def publish(self, error: ReductionError) -> None:
        """Make all ranks, also those of other hosts, stop with this error, or with the error of an earlier abort."""
        try:
            if self._several_hosts and not self._has_lost_store(error):
                error = decoded(self._rendezvous.publish_abort(encoded(self._memory.abort_cause() or error)))
        finally:  # another Ctrl-C may end the call above
            self._memory.abort(error)
            self._close_connections()

    def raise_cause(self) -> NoReturn:
        """Write the flight recorder's dump, and raise the error with which the group was aborted."""
        self._close_connections()  # if another rank aborted, other hosts may still wait for this rank
        members, error = self._members, self._detector.abort_cause()
        if self._several_hosts and not self._has_lost_store(error):
            # Hosts of lost ranks notice the loss themselves, unless all their ranks are lost or they cannot be reached.
            lost = {*getattr(error, "ranks", ())}
            readers = [
                host[0] for host in members.hosts if lost.isdisjoint(members.global_ranks[rank] for rank in host)
            ]
            self._rendezvous.leave(members.host[0], readers)
        path = flight_recorder.write(self._dump(str(error)))
        if path is not None:  # the message ends in the hint "crossreduce doctor DIR": fill in the folder of the dump
            error = copy_error(error, str(error).replace(f"{DOCTOR} DIR", f"{DOCTOR} {path.parent}"))
        self.error = error
        raise copy_error(error)  # a copy, since an error that is raised again keeps its old traceback

    def _close_connections(self) -> None:
        if self._several_hosts and self._transport is not None:
            self._transport.abort()

    def _has_lost_store(self, error: ReductionError) -> bool:
        return names_owner(error, self._rendezvous.owner, self._members.global_ranks)

    def _dump(self, cause: str) -> flight_recorder.Dump:
        members, histories = self._members, []
        for rank in members.host:
            ops = tuple(flight_recorder.Op(*op) for op in self._memory.ops(rank))
            histories.append(flight_recorder.History(members.global_ranks[rank], ops, members.peers[rank].pid))
        hosts = members.global_hosts()
        return flight_recorder.new_dump(members.name, members.token, members.own, hosts, cause, histories)


def names_owner(error: ReductionError, owner: int | None, global_ranks: Sequence[int]) -> bool:
    """Return whether an error reports the loss of rank ``owner``, so that the store that it serves has ended."""
    return isinstance(error, PeerLostError) and owner is not None and global_ranks[owner] in error.ranks


def copy_error(error: ReductionError, text: str | None = None) -> ReductionError:
    """Return a new error of the same class about the same ranks, with ``text`` if it is given."""
    copy = type(error)(str(error) if text is None else text)
    if isinstance(copy, (CollectiveTimeout, PeerLostError)):
        copy.ranks = getattr(error, "ranks", ())
    return copy


@contextmanager
def left_after_errors(abort: Callable[[], None], require_usable: Callable[[], None]) -> Iterator[None]:
    """Return a context in which any error makes this rank leave its group, also Ctrl-C: others must not count on it.

    ``abort``, ``require_usable``: those of its ``Communicator``. The latter raises the error if the group was closed.
    """
    try:
        yield
    except BaseException as error:
        try:
            if isinstance(error, (TypeError, ValueError)):  # the memory is closed
                require_usable()
            shortage.check()  # ``abort`` releases memory
        finally:
            abort()
        raise


@contextmanager
def shortage_named(problem: str) -> Iterator[None]:
    """Return a context whose errors have the text ``problem`` and the reason if this process lacked something in it.

    Errors of connections that failed for it would name other ranks, or the network. An ``ExcludedError`` remains one,
    and any other error, such as a ``MemoryError``, becomes a ``ReductionError``.
    """
    began = time.monotonic()
    try:
        yield
    except (ReductionError, OSError, MemoryError, RuntimeError, LookupError) as error:  # the latter: no codec
        shortage.note(error)
        reason = shortage.since(began)
        if not reason or (isinstance(error, ReductionError) and reason in str(error)):
            raise
        given = reason if reason in str(error) or not str(error) else f"{reason}; {str(error).splitlines()[0]}"
        text = message(problem, given, shortage.REMEDY)
        raise (ExcludedError if isinstance(error, ExcludedError) else ReductionError)(text) from error
