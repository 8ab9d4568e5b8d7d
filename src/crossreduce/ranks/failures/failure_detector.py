"""``FailureDetector``: finds out which ranks of a group are alive, late, stopped or lost, and which are at fault.

Input: the shared memory of the host, and the rendezvous, at which ranks of different hosts answer a roll call after a
failure. Output: errors that name the ranks at fault, the same on every rank. ``abort`` aborts the group.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from ...errors import CollectiveTimeout, ContextError, PeerLostError, ReductionError, decoded, message
from ...observe import diagnostics
from ...observe.diagnostics import DOCTOR, UNUSABLE, CallSignature
from ...observe.liveness import LEFT, is_stopped
from ..connections.peers import Membership
from ..intra_host.shared_memory import SLICE_S, GroupAborted, RankMemory, WaitTimer
from ..intra_host.slot_words import is_waiting_for_hosts
from ..transports.base import Rendezvous, RunningCollective, Transport
from .peer_errors import InnerFailure, PeerDisconnected, PeerError
from .watchdog import RemoteWait

_LOG: Final = logging.getLogger("crossreduce")
ROLL_CALL_S: Final = 0.7  # how long a rank waits for others to answer, or to publish why they aborted
END_S: Final = 0.2  # how long the memory of a process that dies may stay open after its connections
INNER_PAUSE_S: Final = 1e-3  # the longest time between two queries whether another library has finished
WARN_AFTER_S: Final = 30.0  # shorter waits are normal while a rank compiles or writes a checkpoint
DECISION_S: Final = 5.0  # how long after the timeout a rank waits for a rank that finds out which other host is late
_SILENT: Final = re.compile("timed out|has not answered")  # in the reason why a connection was lost
REMOTE_CAUSE_S: Final = 0.3  # how long a rank waits for another host to publish why it aborted


class FailureDetector:
    """Finds out, for one rank, the state of the other ranks.

    ``timeout_s``: how long this rank waits for other ranks. ``warn_s``: it warns after this time, or after half of
    ``timeout_s`` if that is shorter. Both may be changed between calls.
    """

    def __init__(
        self,
        members: Membership,
        memory: RankMemory,
        rendezvous: Rendezvous,
        transport: Transport | None,
        timeout_s: float,
    ) -> None:
        self.timeout_s, self.warn_s = timeout_s, WARN_AFTER_S
        self._members, self._memory, self._rendezvous, self._transport = members, memory, rendezvous, transport
        self._several_hosts = len(members.hosts) > 1
        self._warned_of: RemoteWait | None = None

    # While a rank waits

    def warn_after_s(self) -> float:
        """Return the seconds of waiting after which a warning is due."""
        return min(self.warn_s, self.timeout_s / 2)

    def check(self, timer: WaitTimer) -> None:
        """Raise an error if a missing rank has ended, another host has aborted, or the timeout has passed.

        Warn of late ranks when a warning is due. This is called every ``SLICE_S`` seconds of a wait at a barrier.
        """
        memory, members = self._memory, self._members
        missing = memory.missing()
        waited_s = timer.waited_s(memory.arrivals())
        if gone := [rank for rank in missing if not memory.alive(rank)]:
            still_missing = memory.missing()  # a rank may have arrived, completed the call and left since then
            self.require_alive([rank for rank in gone if rank in still_missing])
        self._raise_remote_cause(timer)
        # If all missing ranks wait for another host, they can name the rank at fault, so they get more time.
        remote = self._several_hosts and all(
            is_waiting_for_hosts(memory, rank) and not is_stopped(members.peers[rank].pid) for rank in missing
        )
        timed_out = bool(missing) and waited_s > self.timeout_s + DECISION_S * timer.has_excuse(remote)
        if timed_out or (missing and timer.is_warning_due()):
            missing = self._stopped(missing) or missing  # the other missing ranks may wait for the stopped ones
            late, call = self._last_calls(missing), self.current_call()
            if timed_out:
                raise CollectiveTimeout(diagnostics.timeout_text(self.timeout_s, call, late, members.name), late)
            warning = diagnostics.stall_text(waited_s, call, late, members.name)
            if remote:
                warning = diagnostics.remote_stall_text(waited_s, call, late, None, members.name)
            self._warn(warning)

    def require_alive(self, ranks: Iterable[int]) -> None:
        """Raise a ``PeerLostError`` if any of these ranks of this host has ended."""
        gone = [rank for rank in ranks if not self._memory.alive(rank)]
        if gone:
            left = all(self._memory.last_call(rank).text == LEFT for rank in gone)
            raise self.lost(gone, "left" if left else "died")

    def warn_of_remote_wait(self, wait: RemoteWait | None) -> None:
        """Warn once per ``wait`` if it takes long. The thread that waits for the message cannot do this itself."""
        if wait is None or wait is self._warned_of:
            return
        waited_s = time.monotonic() - wait.since_s
        if waited_s < self.warn_after_s():
            return
        self._warned_of, members = wait, self._members
        with suppress(ValueError):  # raised if the group has been closed
            call, peer = self.current_call(), members.global_ranks[wait.rank]
            self._warn(diagnostics.remote_stall_text(waited_s, call, [members.own], peer, members.name))

    def wait_for_inner(self, running: RunningCollective) -> None:
        """Wait until another library has completed a collective.

        Raises:
          GroupAborted, ReductionError: a rank was lost, or has aborted the group.
          InnerFailure: the timeout has passed.
        """
        timer, began = WaitTimer(self.warn_after_s()), time.monotonic()
        checked, moved, progress, pause_s = began, began, running.progress, 0.0
        try:
            while not running.wait(pause_s):
                now = time.monotonic()
                pause_s = min(INNER_PAUSE_S, (now - began) / 8)
                if now > checked + SLICE_S:
                    checked = now
                    if progress != running.progress:
                        moved, progress = now, running.progress
                    self._check_inner(timer, now - moved)
        except InnerFailure:
            raise  # this rank answers the roll call before it closes its connections
        except BaseException:
            if self._transport is not None:
                self._transport.abort()  # the library must not write into the caller's memory any more
            raise

    def _check_inner(self, timer: WaitTimer, waited_s: float) -> None:
        """Raise an error if another library's collective must end. See ``wait_for_inner``. Warn of a long wait."""
        if self._is_aborted():
            raise GroupAborted
        self.require_alive(self._members.host)
        self._raise_remote_cause(timer)
        if waited_s > self.timeout_s:
            raise InnerFailure(f"the call took more than {self.timeout_s:g} s", timed_out=True)
        if not timer.is_warning_due():
            return
        call, members = self.current_call(), self._members
        stopped = self._stopped(members.host)
        if stopped:
            self._warn(diagnostics.stall_text(waited_s, call, self._last_calls(stopped), members.name))
        elif self._several_hosts:
            self._warn(diagnostics.remote_stall_text(waited_s, call, [members.own], None, members.name))

    def _raise_remote_cause(self, timer: WaitTimer) -> None:
        """Raise the error with which another host has aborted the group, if one has."""
        if self._several_hosts and (cause := timer.query(self._rendezvous.abort_cause)) is not None:
            raise decoded(cause)

    def _warn(self, text: str) -> None:
        _LOG.warning("rank %d: %s", self._members.own, text)

    # After a failure

    def roll_call(self, error: PeerError | InnerFailure) -> ReductionError:
        """Return the public error for failed communication with other ranks. It names the ranks that do not answer.

        All ranks that notice the failure answer for the ranks of their host that are alive. Then they close their
        connections, so that others notice the failure, too. A rank that has the reason publishes it, and all raise it.
        """
        members, rendezvous = self._members, self._rendezvous
        timed_out = isinstance(error, TimeoutError) or (isinstance(error, InnerFailure) and error.timed_out)
        suspects = {error.rank} if isinstance(error, PeerError) else {*range(members.size)}
        if isinstance(error, PeerError) and isinstance(error.__cause__, ConnectionResetError):
            return self.lost([error.rank], "left")  # see ``PendingMessage.wait``
        end, closed = time.monotonic() + ROLL_CALL_S, False
        while True:
            if self._is_aborted():
                return self.abort_cause()
            try:
                self.require_alive(members.host)
            except PeerLostError as lost:
                return lost
            present = set(members.host) - {*self._stopped(members.host)}
            answers = dict.fromkeys(present, timed_out)
            try:
                if self._several_hosts:
                    answers = rendezvous.roll_call(present, timed_out)
            except OSError as unreachable:
                return self._unreachable_error(error, timed_out or isinstance(unreachable, TimeoutError))
            finally:
                if not closed and self._transport is not None:
                    self._transport.abort()
                closed = True
            if self._several_hosts and (cause := rendezvous.abort_cause()) is not None:
                return decoded(cause)
            if isinstance(error, PeerError) and error.rank in answers and len(suspects) == 1:
                suspects = {*range(members.size)}  # that rank is alive, so it has noticed the failure of a third one
                end += ROLL_CALL_S / 2
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        missing = [rank for rank in sorted(suspects) if rank not in answers]
        if not missing:
            problem = f"{self._communication()} failed, although all ranks are alive. {UNUSABLE}"
            remedy = f"check the network between the hosts; {DOCTOR} DIR shows what each rank did last"
            return (CollectiveTimeout if timed_out else PeerLostError)(message(problem, str(error), remedy))
        absent = [rank for rank in missing if not rendezvous.has_left(rank)]
        if not absent:
            return self.lost(missing, "left")
        if timed_out or any(answers.values()):
            return self._late_error(absent)
        return self.lost(absent, "died")

    def _unreachable_error(self, error: Exception, timed_out: bool) -> ReductionError:
        """Return the public error if the communication failed and the rendezvous cannot be reached either."""
        owner = self._rendezvous.owner
        if isinstance(error, PeerDisconnected) and owner is not None and _SILENT.search(str(error)):
            return self.lost(sorted({error.rank, owner}), "died or left")
        if owner is not None:
            return self._late_error([owner]) if timed_out else self.lost([owner], "died or left")
        if isinstance(error, PeerDisconnected):
            return self.lost([error.rank], "died")
        problem = f"{self._communication()} failed, and the rendezvous cannot be reached. {UNUSABLE}"
        kind = CollectiveTimeout if timed_out else PeerLostError
        return kind(message(problem, "", f"check the network; {DOCTOR} DIR shows what each rank did last"))

    def remote_failure(self, error: Exception) -> ReductionError:
        """Return the public error for a failed operation between hosts if it does not tell which ranks failed.

        If another rank has aborted because of a third one, the reason is published at about this time.
        """
        deadline = time.monotonic() + REMOTE_CAUSE_S
        while (cause := self._rendezvous.abort_cause()) is None and time.monotonic() < deadline:
            time.sleep(REMOTE_CAUSE_S / 20)
        if cause is not None:
            return decoded(cause)
        call = f'{self.current_call().words}, of group "{self._members.name}",'
        problem = f"{call} did not complete between hosts. {UNUSABLE}"
        kind = CollectiveTimeout if isinstance(error, TimeoutError) else PeerLostError
        return kind(message(problem, str(error), f"{DOCTOR} DIR shows what each rank did last"))

    def message_failure(
        self, method: str, peer: int | None, error: OSError, died: bool, takes_any: bool
    ) -> ReductionError:
        """Return the public error for a failed send or receive of the caller, which uses the group's connections.

        Args:
          method: "send" or "recv".
          peer: the other rank, or a lost one from which the message might come, or ``None``.
          error: a ``TimeoutError`` or a ``ConnectionError``.
          died: whether the process of ``peer``, on another host, has ended.
          takes_any: whether the message may come from any rank.
        """
        other = "any rank" if peer is None or takes_any else f"rank {self._members.global_ranks[peer]}"
        call = f"{method} {'to' if method == 'send' else 'from'} {other}"
        with suppress(ValueError, OSError):  # raised by the memory if this rank closes the group at the same time
            return self._message_failure(call, peer, error, died)
        problem = f'group "{self._members.name}" was closed during {call}.'
        return ContextError.of(problem, str(error), "wait for all messages before the group is closed")

    def _message_failure(self, call: str, peer: int | None, error: OSError, died: bool) -> ReductionError:
        """Return the error of ``message_failure``. ``call``: the words for the send or receive."""
        members = self._members
        own, cause = members.own, self._memory.abort_cause()
        if cause is None and self._several_hosts:
            self._rendezvous.has_left(members.rank)  # called only because the store must then answer quickly
            published = self._rendezvous.abort_cause()
            cause = None if published is None else decoded(published)
        if cause is not None and own not in getattr(cause, "ranks", ()):  # not an error about the death of this rank
            return cause
        rank = None if peer is None else members.global_ranks[peer]
        given, ranks = [str(error)], [] if rank is None else [rank]
        if peer is not None:
            given.insert(0, f"rank {rank}: {self._process_text(peer)}")
        where = f'{call}, of group "{members.name}"'
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
        problem = (
            f"rank {rank} {self._end_of(peer, died)}; rank {own} was in {where}. They cannot exchange more messages."
        )
        return PeerLostError(message(problem, "; ".join(given), f"read the last output of rank {rank}"), ranks)

    def _end_of(self, rank: int, died: bool) -> str:
        """Return how a rank ended: "left", "died", or, if this rank cannot tell, "closed its connection"."""
        on_this_host = rank in self._members.host
        deadline = time.monotonic() + END_S
        while on_this_host and time.monotonic() < deadline:
            if not self._memory.alive(rank):
                return "left" if self._memory.last_call(rank).text == LEFT else "died"
            time.sleep(END_S / 20)
        if not on_this_host and self._rendezvous.has_left(rank):
            return "left"
        return "died" if died else "closed its connection"

    def abort_cause(self) -> ReductionError:
        """Return the error with which the group was aborted, the same on all ranks of this host.

        The aborting rank may still be writing it. If this rank dies, is stopped or late, the returned error names it.
        """
        memory, deadline = self._memory, time.monotonic() + self.timeout_s
        while (error := memory.abort_cause()) is None:
            rank = memory.aborting_rank()
            if rank is None:  # the aborting rank has just finished writing
                continue
            alive = memory.alive(rank)
            if not alive or time.monotonic() > deadline or memory.is_stopped(rank):
                return memory.abort_cause() or (self._late_error([rank]) if alive else self.lost([rank], "died"))
            time.sleep(0.001)
        return error

    # Errors and states

    def lost(self, ranks: Sequence[int], how: str) -> PeerLostError:
        """Return the error for ranks that were lost during the current call. For ``how`` see ``lost_text``."""
        processes = {self._members.global_ranks[rank]: self._process_text(rank) for rank in ranks}
        return PeerLostError(diagnostics.lost_text(processes, self.current_call(), self._members.name, how), processes)

    def interrupted_message(self) -> PeerLostError:
        """Return the error for an interruption of this rank while it waited for a message."""
        own, name = self._members.own, self._members.name
        problem = f'rank {own} was interrupted while it waited for a message of group "{name}". {UNUSABLE}'
        remedy = f"read the last output of rank {own}; {DOCTOR} DIR shows the last calls of each rank"
        return PeerLostError(message(problem, self._process_text(self._members.rank), remedy), [own])

    def current_call(self) -> CallSignature:
        """Return the last call that this rank began."""
        return self._memory.last_call(self._members.rank)

    def _late_error(self, ranks: Iterable[int]) -> CollectiveTimeout:
        late = dict.fromkeys(self._members.global_ranks[rank] for rank in ranks)
        text = diagnostics.timeout_text(self.timeout_s, self.current_call(), late, self._members.name)
        return CollectiveTimeout(text, late)

    def _communication(self) -> str:
        return f'the communication in {self.current_call().words}, of group "{self._members.name}",'

    def _process_text(self, rank: int) -> str:
        peer = self._members.peers[rank]
        return f"pid {peer.pid} on host {peer.hostname}"

    def _last_calls(self, ranks: Iterable[int]) -> dict[int, CallSignature]:
        return {self._members.global_ranks[rank]: self._memory.last_call(rank) for rank in ranks}

    def _stopped(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if is_stopped(self._members.peers[rank].pid)]

    def _is_aborted(self) -> bool:
        return self._memory.aborting_rank() is not None or self._memory.abort_cause() is not None
