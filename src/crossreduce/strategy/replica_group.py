"""The threads of one run's replicas: how they start, wait for each other and end.

Input: one function per replica. Output: the value that each function returned, or the first error, once all threads
have ended or the timeout is over. This module does not handle arrays.

A replica that needs the others calls ``ReplicaGroup.rendezvous`` and sleeps at a lock of its own, its gate. The replica
that arrives last executes the call for all, and opens its own gate; each replica that wakes opens the gates of two
others. So a thread that is woken finds few others that want the interpreter's lock (GIL) at the same time. (In an older
version, the caller executed each call and woke all replicas, and each often slept twice: at its queue and at the GIL. A
call of 8 replicas had 22 to 29 voluntary context switches on 2 cores, and has 11 to 13 now.)

The thread that called ``run``, the caller, sleeps until all replicas have returned or one has failed. It also wakes if
the replicas can no longer all arrive (they make different calls, one has returned, or the timeout is over), and for a
call that only this thread can execute. No thread polls, and no lock is held while arrays are reduced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from ..errors import ContextError, MismatchError, ReductionError, StalledError
from ..threads import memory_is_limited, start_thread

TIMEOUT_S: Final = 600.0
"""How long replicas wait for each other by default. torch.distributed has the same limit for NCCL's operations."""

START_S: Final = 1.0
"""How long an interrupted run waits for a thread whose start it interrupted."""


class Stopped(BaseException):
    """Ends a replica if the run failed elsewhere. Handlers in replicas do not catch it: it is not an ``Exception``."""


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """A replica's call of an operation that all replicas take part in.

    Args:
      key: must be equal on all replicas.
      description: returns the call in words, for errors.
      value: the replica's operand.
      merge: takes the operands of all replicas, in their order, and returns one result per replica.
      timeout_s: how long the replica waits. ``None`` means the timeout of the run.
      in_caller: whether ``merge`` must run in the thread that called ``run``, because it calls the user's functions, or
        depends on settings of that thread. Otherwise it runs in the thread of any replica, in the caller's context.
    """

    key: object
    description: Callable[[], str]
    value: Any
    merge: Callable[[list[Any]], Sequence[Any]]
    timeout_s: float | None = None
    in_caller: bool = True
    deadline: float = 0.0  # when the replica stops waiting; ``rendezvous`` sets it


class ReplicaGroup:
    """The replicas of one run.

    Args:
      devices: one name per replica.
      timeout_s: how long replicas wait for others, and after an error the caller for replicas that still compute.
    """

    def __init__(self, devices: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        n = len(devices)
        self._devices = devices
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the attributes below, except for replies, results and the root
        self._wakeup = threading.Lock()  # locked, except while the caller is woken
        self._wakeup.acquire()
        self._wake_at = monotonic() + timeout_s  # when the caller wakes by itself
        self._gates = [threading.Lock() for _ in range(n)]  # each is locked, except while its replica is woken
        for gate in self._gates:
            gate.acquire()
        self._replies: list[tuple[Any, BaseException | None]] = [(None, None)] * n  # written before the gate is opened
        self._root = 0  # the replica that is woken first
        self._calls: list[CollectiveCall | None] = [None] * n  # the call in which each replica waits, if it does
        self._waiting = 0  # the number of replicas that wait
        self._first: CollectiveCall | None = None  # the call of the replica that has waited longest
        self._differ = False  # whether a later call has another key
        self._merging = False  # whether a replica executes the call for all
        self._ended = [False] * n
        self._results: list[Any] = [None] * n
        self._failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self._stopping = False
        self._context = Context()  # of the caller

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call each function in its own thread, in a copy of this thread's context, and return their results.

        Raises:
          The exception of the first replica that failed, with the replica's number in a note. MismatchError and
          StalledError if the replicas cannot all arrive at a call. The threads have ended by then, except for those
          that still compute after the timeout.
        """
        self._context = copy_context()
        # Where memory is limited, no replica takes what the threads of later ones need to start: see ``start_thread``.
        is_limited = memory_is_limited()
        all_started = threading.Lock() if is_limited else nullcontext()
        threads = []
        for k, body in enumerate(bodies):
            call, name = (self._run_replica, k, body, all_started), f"crossreduce replica {k}"
            threads.append(threading.Thread(target=copy_context().run, args=call, name=name, daemon=True))
        try:
            with all_started:
                for thread in threads:
                    start_thread(thread, is_limited)
            self._serve()
            left = self._join(threads)
        except BaseException as error:  # usually Ctrl-C; or a thread that cannot be started
            with self._lock:
                self._stop_all()
                for k, thread in enumerate(threads):
                    self._ended[k] |= thread.ident is None
            self._note_left_running(error, self._join(threads))
            self._failures.clear()
            raise
        if not self._failures:
            return self._results
        try:
            raise self._first_error(left)
        finally:
            self._failures.clear()  # their tracebacks refer to this frame: a reference cycle

    def _first_error(self, left: list[int]) -> BaseException:
        """Return the first error, with notes on the replica that raised it and on later errors."""
        (first, error), others = self._failures[0], self._failures[1:]
        error.add_note(f"in replica {first} of {len(self._devices)}, on {self._devices[first]}")
        replicas_by_text: dict[str, list[int]] = {}
        for k, other in others:
            replicas_by_text.setdefault(_text(other), []).append(k)
        for text, replicas in replicas_by_text.items():
            names = ", ".join(f"replica {k} on {self._devices[k]}" for k in replicas)
            error.add_note(f"{names} failed later: {text}")
        self._note_left_running(error, left)
        return error

    def rendezvous(self, replica: int, call: CollectiveCall) -> Any:
        """Wait, in a replica's thread, until all replicas have made this call, and return this replica's result.

        The replica that arrives last executes the call, or wakes the caller of ``run`` to do so if a call has
        ``in_caller``. The executing thread wakes one replica. Each woken replica wakes its children in a binary tree.
        """
        if os.getpid() != self._process:  # before the lock, which another thread may have held during the fork
            problem = "a collective call was made in a forked process, which does not contain the other replicas."
            given = f"{call.description()} in a child process of replica {replica} on {self._devices[replica]}"
            raise ContextError.of(problem, given, "make the call in the replica itself")
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        call.deadline = monotonic() + timeout_s
        with self._lock:
            if self._stopping:
                raise Stopped
            self._require_may_wait(replica, call)
            self._calls[replica] = call
            self._waiting += 1
            if self._first is None:
                self._first = call
            elif call.key != self._first.key:
                self._differ = True
            arrived, obstacle = self._waiting == len(self._calls), self._differ or any(self._ended)
            executes = arrived and not obstacle and not any(other is None or other.in_caller for other in self._calls)
            if executes:
                self._merging = True
            elif arrived or obstacle or call.deadline < self._wake_at:
                # The caller executes the call, or raises an error, or sleeps again until this deadline.
                self._wake_at = min(self._wake_at, call.deadline)
                self._wake()
        if executes:
            self._merge(replica, self._context.run)
        del call  # so that the replica can free its arrays
        self._gates[replica].acquire()
        result, error = self._replies[replica]
        self._replies[replica] = (None, None)
        if error is None:
            self._wake_children(replica)
            return result
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a reference cycle

    def _require_may_wait(self, replica: int, call: CollectiveCall) -> None:
        """Raise a ``ContextError`` if a replica has returned, or already waits in another thread."""
        if self._ended[replica]:
            problem = "this replica has already returned, so it cannot wait for the others."
            given = f"{call.description()} in replica {replica} on {self._devices[replica]}"
            remedy = "make the call, and backward() through an all_reduce, before the replica's function returns"
            raise ContextError.of(problem, given, remedy)
        if self._calls[replica] is not None:
            problem = "this replica is already waiting in a collective call of another thread."
            given = f"{call.description()}, while replica {replica} waits in another thread"
            raise ContextError.of(problem, given, "call from one thread per replica")

    def _run_replica(self, replica: int, body: Callable[[], Any], begin: AbstractContextManager[Any]) -> None:
        """Call a replica's function in its thread, store its result or error, and wake the caller if it must act.

        The function is called when ``begin`` has been entered and left.
        """
        failure: BaseException | None = None
        try:
            with begin:
                pass
            if not self._stopping:
                self._results[replica] = body()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - SystemExit in a replica reaches the caller, too
            failure = error
        with self._lock:
            self._ended[replica] = True
            if failure is not None:
                # An error that ``_fail`` raised in this replica is in the list already.
                if all(failure is not other for _, other in self._failures):
                    self._failures.append((replica, failure))
                self._stop_all()
            # The caller must act if a replica has failed, if all have returned, or if others wait for this one in vain.
            if self._stopping or all(self._ended) or any(call is not None for call in self._calls):
                self._wake()
        failure = None  # its traceback refers to this frame: a reference cycle

    def _wake(self) -> None:
        """Wake the thread that called ``run``. The lock is held."""
        if self._wakeup.locked():
            self._wakeup.release()

    def _serve(self) -> None:
        """Execute the replicas' calls, in the caller's thread, until all have returned or one has failed."""
        while not self._stopping:
            self._wakeup.acquire(timeout=max(0.0, min(self._wake_at - monotonic(), threading.TIMEOUT_MAX)))
            with self._lock:
                calls = [call for call in self._calls if call is not None]
                if self._stopping or (all(self._ended) and not calls):  # ``calls``: other threads of ended replicas
                    return
                now = monotonic()
                error = self._obstacle(calls, now)
                if error is not None:
                    self._fail(error)
                    return
                arrived = len(calls) == len(self._calls)
                merging = arrived and any(call.in_caller for call in calls)
                if now >= self._wake_at:  # once all have arrived no deadline counts, however long the reduction takes
                    deadlines = [] if arrived else [call.deadline for call in calls]
                    self._wake_at = min(deadlines, default=now + self._timeout_s)
            del calls  # so that the replicas can free their arrays while this thread waits
            if merging:
                try:
                    self._merge(0, _call)
                except BaseException:  # Ctrl-C, perhaps after the replies were stored and before a replica was woken
                    with self._lock:
                        self._stop_all()
                        if self._gates[0].locked():
                            self._gates[0].release()
                    raise

    def _merge(self, root: int, run: Callable[..., Any]) -> None:
        """Execute the call in which all replicas wait, store the replies and wake the first replica, ``root``."""
        calls = [call for call in self._calls if call is not None]
        if len(calls) < len(self._calls):  # the run was stopped after all had arrived
            return
        try:
            results = run(calls[0].merge, [call.value for call in calls])
        except Exception as error:  # noqa: BLE001 - it is raised in the replica that called
            with self._lock:
                if not self._stopping:
                    self._fail(error)
                    self._wake()
            return
        with self._lock:
            if self._stopping:  # all replicas have been woken
                return
            self._replies = [(result, None) for result in results]
            self._root = root
            self._calls = [None] * len(self._calls)
            self._waiting, self._first = 0, None
            self._merging = False
            if any(self._ended):  # the calls were made by other threads of the replicas; the caller may not know yet
                self._wake()
        self._gates[root].release()

    def _wake_children(self, replica: int) -> None:
        """Wake a replica's children in the binary tree of replicas, before the replica can make its next call."""
        n = len(self._gates)
        child = 2 * ((replica - self._root) % n) + 1
        if child < n:
            self._gates[(self._root + child) % n].release()
            if child + 1 < n:
                self._gates[(self._root + child + 1) % n].release()

    def _obstacle(self, calls: list[CollectiveCall], now: float) -> ReductionError | None:
        """Return an error if the waiting replicas cannot continue, because of different calls or a missed deadline."""
        if not calls or self._merging:
            return None
        if any(self._ended):
            problem = "some replicas wait for others that have returned."
            return MismatchError.of(problem, self._states(), "the same calls on all replicas, in the same order")
        if any(call.key != calls[0].key for call in calls):
            remedy = "the same calls on all replicas, in the same order, on trees of the same structure"
            return MismatchError.of("the replicas make different calls.", self._states(), remedy)
        late = [call for call in calls if now >= call.deadline]
        if late and len(calls) < len(self._calls):
            self._timeout_s = min(call.timeout_s or self._timeout_s for call in late)  # ``_join`` then waits as long
            remedy = f"CommunicationOptions(timeout_seconds=...) if the others need more than {self._timeout_s:g} s"
            return StalledError.of("replicas waited for others until the timeout.", self._states(), remedy)
        return None

    def _states(self) -> str:
        """Return a text about what each replica is doing."""
        states = []
        for k, (call, ended) in enumerate(zip(self._calls, self._ended, strict=True)):
            waits = "is still computing" if call is None else f"waits in {call.description()}"
            states.append(f"replica {k} on {self._devices[k]} {'has returned' if ended else waits}")
        return "; ".join(states)

    def _fail(self, error: BaseException) -> None:
        """End the run with an error. The first replica that waits raises it, so that the traceback shows the call."""
        replica = next(k for k, call in enumerate(self._calls) if call is not None)
        self._failures.append((replica, error))
        self._stop_replica(replica, error)
        self._stop_all()

    def _stop_replica(self, replica: int, error: BaseException) -> None:
        """Wake a replica that waits, and raise an error there. It wakes no others."""
        self._calls[replica] = None
        self._replies[replica] = (None, error)
        self._gates[replica].release()

    def _stop_all(self) -> None:
        """Stop replicas that wait at once, and the others at their next call. The caller holds the lock."""
        self._stopping = True
        for replica, call in enumerate(self._calls):
            if call is not None:
                self._stop_replica(replica, Stopped())

    def _join(self, threads: Sequence[threading.Thread]) -> list[int]:
        """Wait for all replicas to end, at most for the timeout, and return the numbers of those that still run."""
        deadline = monotonic() + self._timeout_s
        for k, thread in enumerate(threads):
            while not self._ended[k] and (left_s := deadline - monotonic()) > 0:
                wait_s = min(left_s, threading.TIMEOUT_MAX)
                # If Ctrl-C interrupts ``Thread.start``, Python may release twice a lock that both threads use. The new
                # thread may then end, or wait forever, before it reaches ``_run_replica``.
                try:
                    thread.join(wait_s)
                except RuntimeError:  # it is starting; if it reaches ``_run_replica``, the run is stopping
                    self._wakeup.acquire(timeout=min(wait_s, START_S))
                    self._ended[k] = True
                else:
                    self._ended[k] |= not thread.is_alive()
        left = [k for k, ended in enumerate(self._ended) if not ended]
        for k, thread in enumerate(threads):
            if k not in left and thread.is_alive():
                thread.join()
        return left

    def _note_left_running(self, error: BaseException, left: list[int]) -> None:
        if left:
            names = ", ".join(map(str, left))
            error.add_note(f"still computing after {self._timeout_s:g} s, and left running: replica {names}")


def _call(function: Callable[..., Any], argument: Any) -> Any:
    return function(argument)


def _text(error: BaseException) -> str:
    """Return an exception's type and text, or only the type if ``__str__`` raises an error."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__
