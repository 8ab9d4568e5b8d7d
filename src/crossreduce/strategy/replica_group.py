"""The threads of one run's replicas: how they start, wait for each other and end.

Input: one function per replica. Output: the value that each function returned, or the first error, once all threads
have ended or the timeout is over. This module does not handle arrays.

A replica that needs the others calls ``ReplicaGroup.rendezvous`` and sleeps. The thread that called ``run`` sleeps too,
until all replicas wait, and then executes their call and wakes them; or until they can no longer all arrive, because
they make different calls, one has returned, one has failed or the timeout is over. No thread polls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from ..errors import ContextError, MismatchError, ReductionError, StalledError
from ..threads import start_thread

TIMEOUT_S: Final = 600.0
"""How long replicas wait for each other by default: as long as torch.distributed's NCCL operations."""


class Stopped(BaseException):
    """Ends a replica if the run failed elsewhere. Not an ``Exception``, so handlers in replicas do not catch it."""


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """A replica's call of an operation that all replicas take part in.

    Args:
      key: must be equal on all replicas.
      description: returns the call in words, for errors.
      value: the replica's operand.
      merge: takes the operands of all replicas, in their order, and returns one result per replica.
      timeout_s: how long the replica waits; ``None``: the timeout of the run.
    """

    key: object
    description: Callable[[], str]
    value: Any
    merge: Callable[[list[Any]], Sequence[Any]]
    timeout_s: float | None = None
    deadline: float = 0.0


class ReplicaGroup:
    """The replicas of one run.

    Args:
      devices: one name per replica.
      timeout_s: how long replicas wait for others, and how long the caller waits, after an error, for replicas that are
        still computing.
    """

    def __init__(self, devices: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        n = len(devices)
        self._devices = devices
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards _calls and _ended, and is held to add a failure or to stop
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # wakes the caller
        self._replies: list[SimpleQueue[tuple[Any, BaseException | None]]] = [SimpleQueue() for _ in range(n)]
        self._calls: list[CollectiveCall | None] = [None] * n  # the calls of the replicas that wait
        self._ended = [False] * n
        self._results: list[Any] = [None] * n
        self._failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self._stopping = False

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call each function in its own thread, in a copy of this thread's context, and return their results.

        Raises:
          The exception of the first replica that failed, with the replica's number in a note. MismatchError and
          StalledError if the replicas cannot all arrive at a call. The threads have ended by then, except for those
          that still compute after the timeout.
        """
        threads = []
        for k, body in enumerate(bodies):
            call, name = (self._run_replica, k, body), f"crossreduce replica {k}"
            threads.append(threading.Thread(target=copy_context().run, args=call, name=name, daemon=True))
        try:
            for thread in threads:
                start_thread(thread)
            self._serve()
            left = self._join(threads)
        except BaseException as error:  # usually Ctrl-C; or a thread that cannot be started
            with self._lock:
                self._release()
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
        """Wait, in a replica's thread, until all replicas have called; return this replica's result."""
        if os.getpid() != self._process:  # no thread of this process would ever wake it
            problem = "a collective call was made in a forked process, which does not contain the other replicas."
            given = f"{call.description()} in a child process of replica {replica} on {self._devices[replica]}"
            raise ContextError.of(problem, given, "make the call in the replica itself")
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        call.deadline = monotonic() + timeout_s
        with self._lock:
            if self._stopping:
                raise Stopped
            if self._ended[replica]:
                problem = "this replica has already returned, so it cannot wait for the others."
                given = f"{call.description()} in replica {replica} on {self._devices[replica]}"
                remedy = "make the call, and backward() through an all_reduce, before the replica's function returns"
                raise ContextError.of(problem, given, remedy)
            if self._calls[replica] is not None:
                problem = "this replica is already waiting in a collective call of another thread."
                given = f"{call.description()}, while replica {replica} waits in another thread"
                raise ContextError.of(problem, given, "call from one thread per replica")
            first = next((other for other in self._calls if other is not None), call)
            self._calls[replica] = call
            mismatched = any(self._ended) or first.key != call.key
            if mismatched or None not in self._calls or timeout_s < self._timeout_s:
                self._wakeups.put(None)
        result, error = self._replies[replica].get()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def _run_replica(self, replica: int, body: Callable[[], Any]) -> None:
        """Run one replica in its thread."""
        failure: BaseException | None = None
        try:
            if not self._stopping:
                self._results[replica] = body()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - SystemExit in a replica reaches the caller, too
            failure = error
        with self._lock:
            self._ended[replica] = True
            if failure is not None:
                if all(failure is not known for _, known in self._failures):
                    self._failures.append((replica, failure))
                self._release()
            if self._stopping or all(self._ended) or any(call is not None for call in self._calls):
                self._wakeups.put(None)
        failure = None  # its traceback refers to this frame: a reference cycle

    def _serve(self) -> None:
        """Execute the replicas' calls, in the caller's thread, until all have returned or one has failed."""
        wait_s = self._timeout_s
        while not self._stopping:
            with suppress(Empty):
                self._wakeups.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
            with self._lock:
                calls = [call for call in self._calls if call is not None]
                if self._stopping or (all(self._ended) and not calls):  # a thread of a replica may call
                    return
                now = monotonic()
                error = self._obstacle(calls, now)
                if error is not None:
                    self._fail(error)
                    return
                wait_s = min((call.deadline - now for call in calls), default=self._timeout_s)
            if len(calls) == len(self._calls):
                wait_s = self._timeout_s
                self._merge(calls)
            del calls  # so that the replicas can free their arrays while this thread waits

    def _merge(self, calls: list[CollectiveCall]) -> None:
        try:
            results = calls[0].merge([call.value for call in calls])
        except Exception as error:  # noqa: BLE001 - it is raised in the replica that called
            with self._lock:
                self._fail(error)
            return
        with self._lock:
            for replica, result in enumerate(results):
                self._wake(replica, result, None)

    def _obstacle(self, calls: list[CollectiveCall], now: float) -> ReductionError | None:
        """Return the error because of which the waiting replicas cannot continue, if there is one."""
        if not calls:
            return None
        if any(self._ended):
            problem = "some replicas wait for others that have returned."
            return MismatchError.of(problem, self._states(), "the same calls on all replicas, in the same order")
        if any(call.key != calls[0].key for call in calls):
            remedy = "the same calls on all replicas, in the same order, on trees of the same structure"
            return MismatchError.of("the replicas make different calls.", self._states(), remedy)
        late = [call for call in calls if now >= call.deadline]
        if late and len(calls) < len(self._calls):
            self._timeout_s = min(call.timeout_s or self._timeout_s for call in late)  # ``_join`` waits as long, too
            remedy = f"CommunicationOptions(timeout_seconds=...) if the others need more than {self._timeout_s:g} s"
            return StalledError.of("replicas waited for others until the timeout.", self._states(), remedy)
        return None

    def _states(self) -> str:
        """Return what each replica is doing, in words."""
        states = []
        for k, (call, ended) in enumerate(zip(self._calls, self._ended, strict=True)):
            waits = "is still computing" if call is None else f"waits in {call.description()}"
            states.append(f"replica {k} on {self._devices[k]} {'has returned' if ended else waits}")
        return "; ".join(states)

    def _fail(self, error: BaseException) -> None:
        """End the run with an error. The first replica that waits raises it, so that the traceback shows the call."""
        replica = next(k for k, call in enumerate(self._calls) if call is not None)
        self._failures.append((replica, error))
        self._wake(replica, None, error)
        self._release()

    def _wake(self, replica: int, result: Any, error: BaseException | None) -> None:
        self._calls[replica] = None
        self._replies[replica].put((result, error))

    def _release(self) -> None:
        """Stop all replicas that wait, and each other one at its next call."""
        self._stopping = True
        for replica, call in enumerate(self._calls):
            if call is not None:
                self._wake(replica, None, Stopped())

    def _join(self, threads: Sequence[threading.Thread]) -> list[int]:
        """Wait until all replicas have ended, and return those that have not ended within the timeout."""
        deadline = monotonic() + self._timeout_s
        while True:
            with self._lock:
                left = [k for k, ended in enumerate(self._ended) if not ended]
            now = monotonic()
            if not left or now >= deadline:
                break
            with suppress(Empty):
                self._wakeups.get(timeout=min(deadline - now, threading.TIMEOUT_MAX))
        for k, thread in enumerate(threads):
            if k not in left and thread.is_alive():
                thread.join()
        return left

    def _note_left_running(self, error: BaseException, left: list[int]) -> None:
        if left:
            names = ", ".join(map(str, left))
            error.add_note(f"still computing after {self._timeout_s:g} s, and left running: replica {names}")


def _text(error: BaseException) -> str:
    """Return an exception's type and text; only the type if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__
