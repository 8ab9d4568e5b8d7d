"""The replicas of one run: their threads, where they meet, and how they end.

In: a function a replica.  Out: what each returned, or the first error, once all threads have ended.

A replica that needs the others (``Crew.meet``) leaves its call and sleeps. The thread that called ``run`` sleeps too,
until all replicas wait (it does what they ask for, and wakes them), or until they cannot meet any more: they want
different things, one has returned, one has failed, or the time is up. Nobody polls. Knows no arrays.
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

from ..errors import ContextError, MismatchError, ReductionError, StalledError, message

TIMEOUT_S: Final = 600.0
"""How long replicas wait for each other where nobody says: as long as torch.distributed's NCCL operations do."""


class Stopped(BaseException):
    """Ends a replica because another one failed. No ``Exception``, so that handlers in replicas let it pass."""


@dataclass(slots=True, eq=False)
class Call:
    """What a replica asks for where it meets the others.

    Args:
      key: has to be equal on all replicas.
      wants: says in words what is asked for.
      value: the replica's part.
      merge: takes all parts, in the order of the replicas, and returns what each gets.
      timeout_s: how long the replica waits; ``None``: as long as the run says.
    """

    key: object
    wants: Callable[[], str]
    value: Any
    merge: Callable[[list[Any]], Sequence[Any]]
    timeout_s: float | None = None
    deadline: float = 0.0


class Crew:
    """The replicas of one run.

    Args:
      devices: a name for each replica.
      timeout_s: how long replicas wait for others, and the caller, after an error, for those that still compute.
    """

    def __init__(self, devices: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        n = len(devices)
        self._devices = devices
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards all that follows
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes the caller
        self._turns: list[SimpleQueue[tuple[Any, BaseException | None]]] = [SimpleQueue() for _ in range(n)]
        self._calls: list[Call | None] = [None] * n  # of those that wait
        self._ended = [False] * n
        self._results: list[Any] = [None] * n
        self._failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self._stopping = False

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call each function in a thread of its own, in a copy of this thread's context; return what they return.

        Raises:
          Whatever a replica raises, with the replica's number in a note; MismatchError and StalledError where
          they cannot meet. The others have ended by then, but for such as compute on after the timeout.
        """
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._live, k, body), name=f"crossreduce replica {k}", daemon=True
            )
            for k, body in enumerate(bodies)
        ]
        try:
            for thread in threads:
                thread.start()
            self._serve()
            left = self._dismiss(threads)
        except BaseException as error:  # Ctrl-C, mostly; or a thread that cannot be started
            self._stop([thread.ident is not None for thread in threads])
            self._note_left(error, self._dismiss(threads))
            self._failures.clear()
            raise
        if not self._failures:
            return self._results
        try:
            raise self._told(left)
        finally:
            self._failures.clear()  # whose tracebacks would hold this frame, and so themselves

    def _told(self, left: list[int]) -> BaseException:
        """Return the first error, with notes on where it was raised and on what else went wrong."""
        (first, error), others = self._failures[0], self._failures[1:]
        error.add_note(f"in replica {first} of {len(self._devices)}, on {self._devices[first]}")
        alike: dict[str, list[int]] = {}
        for k, other in others:
            alike.setdefault(_said(other), []).append(k)
        for said, replicas in alike.items():
            who = ", ".join(f"replica {k} on {self._devices[k]}" for k in replicas)
            error.add_note(f"{who} failed later: {said}")
        self._note_left(error, left)
        return error

    def meet(self, replica: int, call: Call) -> Any:
        """Wait, in a replica, until all have called; return what the caller's thread made for this one."""
        if os.getpid() != self._process:  # where nobody would ever wake it
            raise ContextError(
                message(
                    "a forked process has no other replicas to meet.",
                    f"{call.wants()} in a child of replica {replica} on {self._devices[replica]}",
                    "do it in the replica itself",
                )
            )
        patience = self._timeout_s if call.timeout_s is None else call.timeout_s
        call.deadline = monotonic() + patience
        with self._lock:
            if self._stopping:
                raise Stopped
            if self._ended[replica]:
                raise ContextError(
                    message(
                        "this replica has returned and can meet the others no more.",
                        f"{call.wants()} in replica {replica} on {self._devices[replica]}",
                        "do it before the replica's function returns (a backward pass through an all_reduce, too)",
                    )
                )
            if self._calls[replica] is not None:
                raise ContextError(
                    message(
                        "a replica can do one thing at a time with the others.",
                        f"{call.wants()}, while replica {replica} waits in another thread",
                        "one thread a replica",
                    )
                )
            first = next((other for other in self._calls if other is not None), call)
            self._calls[replica] = call
            alone = any(self._ended) or first.key != call.key
            if alone or None not in self._calls or patience < self._timeout_s:
                self._bell.put(None)
        result, error = self._turns[replica].get()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def _live(self, replica: int, body: Callable[[], Any]) -> None:
        """A replica's thread."""
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
                self._bell.put(None)
        failure = None  # its traceback holds this frame

    def _serve(self) -> None:
        """Do what replicas ask for, in the caller's thread, until all have returned or one has failed."""
        wait = self._timeout_s
        while not self._stopping:
            with suppress(Empty):
                self._bell.get(timeout=min(wait, threading.TIMEOUT_MAX))
            with self._lock:
                calls = [call for call in self._calls if call is not None]
                if self._stopping or (all(self._ended) and not calls):  # replicas' own threads may call, too
                    return
                now = monotonic()
                error = self._impossible(calls, now)
                if error is not None:
                    self._fail(error)
                    return
                wait = min((call.deadline - now for call in calls), default=self._timeout_s)
            if len(calls) == len(self._calls):
                wait = self._timeout_s
                self._merge(calls)
            del calls  # whose arrays are the replicas', to free while this waits

    def _merge(self, calls: list[Call]) -> None:
        try:
            results = calls[0].merge([call.value for call in calls])
        except Exception as error:  # noqa: BLE001 - it is raised where the replicas called
            with self._lock:
                self._fail(error)
            return
        with self._lock:
            for replica, result in enumerate(results):
                self._wake(replica, result, None)

    def _impossible(self, calls: list[Call], now: float) -> ReductionError | None:
        """Return why those that wait will not meet the others, if that is known."""
        if not calls:
            return None
        if any(self._ended):
            return MismatchError(
                message(
                    "some replicas wait for others that have returned.",
                    self._states(),
                    "call it on all replicas, as often and in the same order",
                )
            )
        if any(call.key != calls[0].key for call in calls):
            return MismatchError(
                message(
                    "the replicas want different things.",
                    self._states(),
                    "the same calls on all replicas, in the same order, on trees of the same structure",
                )
            )
        late = [call for call in calls if now >= call.deadline]
        if late and len(calls) < len(self._calls):
            self._timeout_s = min(call.timeout_s or self._timeout_s for call in late)  # so long, too, after the error
            return StalledError(
                message(
                    "replicas waited for others until their time was up.",
                    self._states(),
                    f"CommunicationOptions(timeout_seconds=...), if that takes longer than {self._timeout_s:g} s",
                )
            )
        return None

    def _states(self) -> str:
        """Say what each replica does."""
        said = []
        for k, (call, ended) in enumerate(zip(self._calls, self._ended, strict=True)):
            doing = "has returned" if ended else "still computes" if call is None else f"waits in {call.wants()}"
            said.append(f"replica {k} on {self._devices[k]} {doing}")
        return "; ".join(said)

    def _fail(self, error: BaseException) -> None:
        """End the run with an error that is raised in the first replica that waits, so that it tells from where."""
        replica = next(k for k, call in enumerate(self._calls) if call is not None)
        self._failures.append((replica, error))
        self._wake(replica, None, error)
        self._release()

    def _wake(self, replica: int, result: Any, error: BaseException | None) -> None:
        self._calls[replica] = None
        self._turns[replica].put((result, error))

    def _release(self) -> None:
        """Let no replica wait any more."""
        self._stopping = True
        for replica, call in enumerate(self._calls):
            if call is not None:
                self._wake(replica, None, Stopped())

    def _stop(self, started: Sequence[bool]) -> None:
        with self._lock:
            self._release()
            self._ended = [ended or not begun for ended, begun in zip(self._ended, started, strict=True)]

    def _dismiss(self, threads: Sequence[threading.Thread]) -> list[int]:
        """Wait until all replicas have ended, and return those that do not within the timeout."""
        deadline = monotonic() + self._timeout_s
        while True:
            with self._lock:
                left = [k for k, ended in enumerate(self._ended) if not ended]
            now = monotonic()
            if not left or now >= deadline:
                break
            with suppress(Empty):
                self._bell.get(timeout=min(deadline - now, threading.TIMEOUT_MAX))
        for k, thread in enumerate(threads):
            if k not in left and thread.is_alive():
                thread.join()
        return left

    def _note_left(self, error: BaseException, left: list[int]) -> None:
        if left:
            names = ", ".join(map(str, left))
            error.add_note(f"after {self._timeout_s:g} s still computing, and left behind: replica {names}")


def _said(error: BaseException) -> str:
    """Return an exception's type and text; one that has none must not hide the first."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__
