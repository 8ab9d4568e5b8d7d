"""``CallRunner``: runs the calls of one rank, one after the other, by the engine of its group.

Input: the key of a call, and a function that compiles it. Output: an executed call, or the same error on every rank.
The group is aborted if a call fails, or is interrupted by an exception.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import CollectiveTimeout, ContextError, MismatchError, PeerLostError, ReductionError
from ..observe.diagnostics import CallSignature, mismatch_text, planned_text
from .connections.peers import Membership
from .failures.abort import GroupAbort, copy_error
from .failures.failure_detector import FailureDetector
from .failures.peer_errors import InnerFailure, PeerError
from .failures.stage_runner import StageRunner
from .inter_host.call_comparison import Presence
from .inter_host.multi_host import MultiHostEngine
from .inter_host.one_host import ExecutableCache, OneHostEngine, RankExecutable
from .intra_host.shared_memory import GroupAborted, RankMemory
from .transports.base import Rendezvous


class CallRunner:
    """Runs calls. ``lock`` is held during each call. ``closed``: whether all later calls raise a ``ContextError``."""

    def __init__(
        self,
        members: Membership,
        memory: RankMemory,
        rendezvous: Rendezvous,
        engine: OneHostEngine | MultiHostEngine,
        detector: FailureDetector,
        abort: GroupAbort,
    ) -> None:
        self.lock, self.closed = threading.Lock(), False
        self.executables = ExecutableCache()
        self._members, self._memory, self._rendezvous = members, memory, rendezvous
        self._engine, self._detector, self._abort = engine, detector, abort
        self._stages = StageRunner(memory, detector)
        self._caller: int | None = None  # the thread that is in a call in Python
        self._pid = os.getpid()
        self._presence: Presence | None = None

    def run(
        self,
        key: Any,
        compile_call: Callable[[], RankExecutable],
        addresses: tuple[int, ...],
        inner: Callable[[], None] | None,
        release: Callable[[], None],
    ) -> None:
        """Run a collective call on the caller's buffers, under ``lock``.

        Args:
          key: the key of the call's executable in the cache.
          compile_call: compiles the call if ``key`` is not cached.
          addresses: the addresses of the caller's buffers.
          inner: executes the call in another library, or ``None``: see ``OneHostEngine.run``.
          release: called at the end, under ``lock``, if the group was closed during the call, as by a signal handler.
        """
        self.require_usable()  # before the lock, which is never released if it was held during a fork
        with self.lock:
            self._caller = threading.get_ident()
            try:
                self._require_intact()
                executable = self.executables.get(key) or self.executables.add(key, compile_call())
                timeout_s = self._detector.timeout_s
                self._finish(lambda: self._engine.run(executable, addresses, self._stages, timeout_s, inner))
            finally:
                self._caller = None
                if self.closed:
                    release()

    def resume(self, executable: RankExecutable, outcome: int) -> None:
        """Complete a prepared call, which stopped with ``outcome`` in compiled code. The caller holds ``lock``."""
        self._finish(lambda: self._engine.resume(executable, outcome, self._stages, self._detector.timeout_s))

    def abandon(self) -> None:
        """Abort the group because an exception has interrupted a call."""
        self._abort.publish(self._detector.lost([self._members.rank], "was interrupted"))

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort the group if the enclosed inter-host communication fails."""
        try:
            yield
        except ReductionError:  # raised by a call of this group, which has aborted it if necessary
            raise
        except (ConnectionError, TimeoutError) as error:
            detector = self._detector
            failure = detector.roll_call(error) if isinstance(error, PeerError) else detector.remote_failure(error)
            self._abort.publish(failure)
            self._abort.raise_cause()
        except BaseException:  # Ctrl-C: other hosts' messages would be written to memory that is about to be freed
            self.abandon()
            raise

    def close(self) -> bool:
        """Refuse later calls. Return whether a signal handler calls this while its thread is in a call."""
        self.closed = True
        return self._is_in_call()

    def is_usable(self) -> bool:
        """Return whether the group is open and belongs to this process."""
        return not self.closed and os.getpid() == self._pid

    def require_usable(self) -> None:
        """Raise a ``ContextError`` if this thread must not make a call now: see ``Communicator``."""
        name = self._members.name
        if os.getpid() != self._pid:
            problem = f'group "{name}" belongs to process {self._pid}, from which this process was forked.'
            raise ContextError.of(problem, f"process {os.getpid()}", "make the group after the fork, or use spawn")
        if self._is_in_call():
            problem = f'this thread is already in a call of group "{name}".'
            raise ContextError.of(problem, "a call in a signal handler", "call only close() or abort() in a handler")
        self._require_open()  # before ``run`` takes the lock, for which a handler during close() would wait forever

    def _is_in_call(self) -> bool:
        """Return whether this thread is in a call, which then was interrupted by a signal handler."""
        return threading.get_ident() in (self._caller, self._memory.native.caller())

    def _require_open(self) -> None:
        if self.closed:
            raise ContextError.of(f'group "{self._members.name}" is closed.', remedy="make a new group")

    def _require_intact(self) -> None:
        """Raise an error if the group is closed or aborted. If a call was interrupted, abort the group first."""
        self._require_open()
        if self._abort.error is not None:
            raise copy_error(self._abort.error)
        if self._memory.running or self._engine.has_unfinished_exchange:  # a second Ctrl-C prevented the abort
            self.abandon()
            self._abort.raise_cause()

    def _finish(self, run: Callable[[], bool]) -> None:
        """Execute a call by ``run``, which returns whether all ranks made the same call. Raise public errors."""
        failed = False
        calls: dict[int, CallSignature] = {}
        try:
            if not run():
                calls = self._calls_of_all()
        except GroupAborted:  # another rank has recorded the reason
            failed = True
        except (InnerFailure, PeerError, ReductionError) as error:
            self._abort.publish(error if isinstance(error, ReductionError) else self._detector.roll_call(error))
            if error.__cause__ is not None or not isinstance(error, (CollectiveTimeout, PeerLostError)):
                self._abort.raise_cause()  # in the handler, so that the traceback shows ``error``, too: it says more
            failed = True
        except BaseException:  # Ctrl-C, or what a signal handler raised
            if self._memory.running or isinstance(self._engine, MultiHostEngine):
                self.abandon()
            raise
        if failed:  # outside of the handlers, so that the traceback does not show an internal error, too
            self._abort.raise_cause()
        if calls:
            named = {self._members.global_ranks[rank]: call for rank, call in calls.items()}
            raise _mismatch(named, self._members.name)  # no local variable: the traceback would refer to the error

    def _calls_of_all(self) -> dict[int, CallSignature]:
        """Return the current call of each rank of the group."""
        if isinstance(self._engine, MultiHostEngine):
            own = [*self._detector.current_call(), self._engine.digest.hex()]
            calls = [json.loads(call) for call in self._gathered(self._engine, json.dumps(own).encode())]
            if len({(number, text) for number, text, _ in calls}) == 1:  # only the plans of the call differ
                calls = [[number, planned_text(text, bytes.fromhex(plan)), plan] for number, text, plan in calls]
            return {rank: CallSignature(number, text) for rank, (number, text, _) in enumerate(calls)}
        number = self._memory.number
        recorded = {rank: {op[0]: op[1] for op in self._memory.ops(rank)} for rank in self._members.host}
        return {rank: CallSignature(number, texts.get(number, "?")) for rank, texts in recorded.items()}

    def _gathered(self, engine: MultiHostEngine, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, which meet at the rendezvous. Notice ranks that are lost meanwhile."""
        presence = self._presence = Presence(
            engine.neighbours, engine.transport
        )  # kept: a failed message uses its memory

        def watch() -> None:
            self._detector.require_alive(self._members.host)
            presence.check()

        before, self._rendezvous.watch = self._rendezvous.watch, watch
        try:
            texts = self._rendezvous.all_gather(text)
        finally:
            self._rendezvous.watch = before
        presence.end(self._detector.timeout_s)
        return texts


def _mismatch(calls: Mapping[int, CallSignature], name: str) -> MismatchError:
    error = MismatchError(mismatch_text(calls, name))
    error.calls = tuple(call.text for call in calls.values())
    return error
