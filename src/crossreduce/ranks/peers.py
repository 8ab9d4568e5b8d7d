"""``Peers``: what a rank finds out about the other ranks of its group: which are alive, and which are at fault.

Input: the shared memory of the host, and the rendezvous, at which ranks of different hosts answer a roll call after a
failure. Output: errors that name the ranks at fault. Nothing is aborted here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ..errors import CollectiveTimeout, PeerLostError, ReductionError, decoded, message
from ..observe import diagnostics
from ..observe.diagnostics import DOCTOR, CallSignature
from .connections.peer_requests import Place
from .inter_host.exchange import PeerDisconnected, PeerError
from .intra_host.shared_memory import LEFT, SLICE_S, GroupAborted, StageRunner, WaitTimer, is_stopped
from .transports.base import Rendezvous, RunningCollective, Transport

_LOG: Final = logging.getLogger("crossreduce")
ROLL_CALL_S: Final = 0.7  # how long a rank waits for others to answer, or to publish why they aborted
END_S: Final = 0.2  # how long the memory of a process that dies may stay open after its connections
INNER_PAUSE_S: Final = 1e-3  # the longest time between two queries whether another library has finished


class PeerInfo(NamedTuple):
    """What a rank sends to all others. ``token``: rank 0's identifies the group. ``place``: where it listens."""

    pid: int
    hostname: str
    token: str
    place: Place


class InnerFailure(Exception):  # noqa: N818 - internal: the public error names the rank at fault
    """The collective of another library failed, or took too long."""

    def __init__(self, why: str, *, timed_out: bool) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class Peers(StageRunner):
    """One rank of a group, from the view of which the other ranks are alive, late or lost."""

    rank: int
    size: int
    name: str
    timeout_s: float
    rendezvous: Rendezvous
    transport: Transport | None
    global_ranks: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]
    peers: list[PeerInfo]

    def _require_alive(self, ranks: Iterable[int]) -> None:
        """Raise if ranks of this host have ended."""
        gone = [rank for rank in ranks if not self.memory.alive(rank)]
        if gone:
            left = all(self.memory.last_call(rank).text == LEFT for rank in gone)
            raise self._lost(gone, "left" if left else "died")

    def _require_no_cause(self, timer: WaitTimer) -> None:
        """Raise the reason for which another host has aborted, if there is one."""
        if len(self.hosts) > 1 and (cause := timer.query(self.rendezvous.abort_cause)) is not None:
            raise decoded(cause)

    def _stopped(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if is_stopped(self.peers[rank].pid)]

    def _wait_for_inner(self, running: RunningCollective) -> None:
        """Wait until another library has completed a collective.

        Raises:
          GroupAborted, ReductionError: a rank was lost, or has aborted the group.
          InnerFailure: the timeout has passed.
        """
        timer, began = WaitTimer(self._warn_after_s()), time.monotonic()
        checked, pause_s = began, 0.0
        try:
            while not running.is_completed():
                time.sleep(pause_s)
                now = time.monotonic()
                pause_s = min(INNER_PAUSE_S, (now - began) / 8)
                if now > checked + SLICE_S:
                    checked = now
                    self._check_inner(timer, now - began)
        except InnerFailure:
            raise  # this rank answers the roll call before it closes its connections
        except BaseException:
            if self.transport is not None:
                self.transport.abort()  # the library must not write into the caller's memory any more
            raise

    def _check_inner(self, timer: WaitTimer, waited_s: float) -> None:
        if self.memory.aborting_rank() is not None or self.memory.abort_cause() is not None:
            raise GroupAborted
        self._require_alive(self.host)
        self._require_no_cause(timer)
        if waited_s > self.timeout_s:
            raise InnerFailure(f"it took more than {self.timeout_s:g} s", timed_out=True)
        if timer.is_warning_due():
            self._warn_of_inner(waited_s)

    def _warn_of_inner(self, waited_s: float) -> None:
        call, own = self._current_call(), self.global_ranks[self.rank]
        text = diagnostics.remote_stall_text(waited_s, call, [own], None, self.name)
        if stopped := self._stopped(self.host):
            late = {self.global_ranks[rank]: self.memory.last_call(rank) for rank in stopped}
            text = diagnostics.stall_text(waited_s, call, late, self.name)
        if stopped or len(self.hosts) > 1:
            _LOG.warning("rank %d: %s", own, text)

    def _roll_call(self, error: PeerError | InnerFailure) -> ReductionError:
        """Return the public error for failed communication with other ranks, which names those that do not answer.

        All ranks that notice the failure answer for those of their host that are alive, and then close their
        connections, so that others notice it. A rank that knows the reason publishes it instead, and that one counts.
        """
        timed_out = isinstance(error, TimeoutError) or (isinstance(error, InnerFailure) and error.timed_out)
        suspects = {error.rank} if isinstance(error, PeerError) else {*range(self.size)}
        if isinstance(error, PeerError) and isinstance(error.__cause__, ConnectionResetError):
            return self._lost([error.rank], "left")
        end, closed = time.monotonic() + ROLL_CALL_S, False
        while True:
            if self.memory.aborting_rank() is not None or self.memory.abort_cause() is not None:
                return self._abort_cause()
            try:
                self._require_alive(self.host)
            except PeerLostError as lost:
                return lost
            present = set(self.host) - {*self._stopped(self.host)}
            answers = dict.fromkeys(present, timed_out)
            try:
                if len(self.hosts) > 1:
                    answers = self.rendezvous.roll_call(present, timed_out)
            except OSError as unreachable:
                return self._unreachable(error, timed_out or isinstance(unreachable, TimeoutError))
            finally:
                if not closed and self.transport is not None:
                    self.transport.abort()
                closed = True
            if len(self.hosts) > 1 and (cause := self.rendezvous.abort_cause()) is not None:
                return decoded(cause)
            if isinstance(error, PeerError) and error.rank in answers and len(suspects) == 1:
                suspects = {*range(self.size)}  # that rank has noticed the failure of a third one, and names it first
                end += ROLL_CALL_S / 2
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        missing = [rank for rank in sorted(suspects) if rank not in answers]
        if not missing:
            return self._all_alive(str(error), timed_out)
        absent = [rank for rank in missing if not self.rendezvous.has_left(rank)]
        if not absent:
            return self._lost(missing, "left")
        if timed_out or any(answers.values()):
            return self._late(absent)
        return self._lost(absent, "died")

    def _unreachable(self, error: Exception, timed_out: bool) -> ReductionError:
        """Return the error if the communication failed and the rendezvous cannot be reached either."""
        owner = self.rendezvous.owner
        if owner is not None:
            return self._late([owner]) if timed_out else self._lost([owner], "died or left")
        if isinstance(error, PeerDisconnected):
            return self._lost([error.rank], "died")
        problem = f"{self._during()} failed, and the rendezvous cannot be reached. {diagnostics.UNUSABLE}"
        kind = CollectiveTimeout if timed_out else PeerLostError
        return kind(message(problem, "", f"check the network; {DOCTOR} DIR shows what each rank did last"))

    def _message_failure(self, call: str, peer: int | None, error: OSError) -> ReductionError:
        """Return the public error for ``call``, a message to or from ``peer`` (``None``: from any rank) that failed."""
        own, cause = self.global_ranks[self.rank], self.memory.abort_cause()
        if cause is None and len(self.hosts) > 1:
            self.rendezvous.has_left(self.rank)  # from now on, the store has to answer quickly
            cause = decoded(found) if (found := self.rendezvous.abort_cause()) is not None else None
        if cause is not None and own not in getattr(cause, "ranks", ()):  # others may take this rank for dead
            return cause
        rank = None if peer is None else self.global_ranks[peer]
        given, ranks = [str(error)], [] if rank is None else [rank]
        if peer is not None:
            given.insert(0, f"rank {rank}: pid {self.peers[peer].pid} on host {self.peers[peer].hostname}")
        where = f'{call}, of group "{self.name}"'
        if isinstance(error, TimeoutError):
            problem = f"{where}, did not complete within its timeout. {diagnostics.NO_MESSAGES}"
            remedy = "the matching call on the other rank, with the same tag; or a longer timeout"
            return CollectiveTimeout(message(problem, "; ".join(given), remedy), ranks)
        if isinstance(error, ConnectionAbortedError):
            problem = f"{where}, failed, since an earlier message timed out. {diagnostics.NO_MESSAGES}"
            return CollectiveTimeout(message(problem, "; ".join(given), "restart the job, with a longer timeout"))
        if peer is None:
            problem = f"a connection was lost during {where}. {diagnostics.NO_MESSAGES}"
            return PeerLostError(message(problem, "; ".join(given), "read the last output of all ranks"))
        problem = f"rank {rank} {self._end_of(peer)}; rank {own} was in {where}. They can exchange no more messages."
        return PeerLostError(message(problem, "; ".join(given), f"read the last output of rank {rank}"), ranks)

    def _end_of(self, rank: int) -> str:
        """Return why a rank's connection was closed, as far as this rank can tell."""
        deadline = time.monotonic() + END_S
        while rank in self.host and time.monotonic() < deadline:
            if not self.memory.alive(rank):
                return "left" if self.memory.last_call(rank).text == LEFT else "died"
            time.sleep(END_S / 20)
        return "left" if rank not in self.host and self.rendezvous.has_left(rank) else "closed its connection"

    def _all_alive(self, why: str, timed_out: bool) -> ReductionError:
        """Return the error if the communication between ranks failed that are all alive."""
        problem = f"{self._during()} failed, although all ranks are alive. {diagnostics.UNUSABLE}"
        remedy = f"check the network between the hosts; {DOCTOR} DIR shows what each rank did last"
        return (CollectiveTimeout if timed_out else PeerLostError)(message(problem, why, remedy))

    def _during(self) -> str:
        return f'the communication in {self._current_call().words}, of group "{self.name}",'

    def _current_call(self) -> CallSignature:
        return self.memory.last_call(self.rank)

    def _lost(self, ranks: Sequence[int], how: str) -> PeerLostError:
        peers = {self.global_ranks[rank]: self.peers[rank] for rank in ranks}
        places = {rank: f"pid {peer.pid} on host {peer.hostname}" for rank, peer in peers.items()}
        return PeerLostError(diagnostics.lost_text(places, self._current_call(), self.name, how), places)

    def _late(self, ranks: Iterable[int]) -> CollectiveTimeout:
        late = dict.fromkeys(self.global_ranks[rank] for rank in ranks)
        text = diagnostics.timeout_text(self.timeout_s, self._current_call(), late, self.name)
        return CollectiveTimeout(text, late)

    def _abort_cause(self) -> ReductionError:
        """Return the error for which the group was aborted, the same on all ranks of this host.

        The aborting rank may still be writing it. If that rank dies, is stopped or late, the error names that rank.
        """
        deadline = time.monotonic() + self.timeout_s
        while (error := self.memory.abort_cause()) is None:
            rank = self.memory.aborting_rank()
            if rank is None:  # the aborting rank has just finished writing
                continue
            alive = self.memory.alive(rank)
            if not alive or time.monotonic() > deadline or self.memory.is_stopped(rank):
                return self.memory.abort_cause() or (self._late([rank]) if alive else self._lost([rank], "died"))
            time.sleep(0.001)
        return error
