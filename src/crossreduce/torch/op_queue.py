"""Executes the ops of one group in the order of their calls.

Input: functions to call. Output: ``torch.distributed.Work``. In an ``inline`` queue, a synchronous call runs in the
caller's thread if no other op is pending. All other calls run in one thread of the group.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeout, ContextError, ReductionError, UnsupportedError
from ..ranks.communicator import Communicator
from ..threads import start_thread

REMEDY: Final = "create the group again: shrink, grow and destroy_process_group end all earlier groups"
_begin_work: Final = dist.Work.__init__  # this name and __slots__ save 0.2 us per work
# If only C++ code refers to a work, torch 2.4 to 2.6 (not 2.8) forgets its Python part, and then waits for ever. So
# the tensors of a work refer to it until it was waited for.
KEEPS_WORKS: Final = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)
_WAIT_S: Final = 0.5  # the longest delay of a signal that arrives just before a wait, see ``Queued.wait``


class InMode(Exception):  # noqa: N818 - not an error
    """A synchronous op raises this, before it has begun, if modes of its thread would change its operations."""


class Finished(dist.Work):  # type: ignore[misc]
    """The work of an op that has run. In subclasses the op may be pending, so they override ``wait`` and others."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        _begin_work(self)
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


def keep(work: Any, tensors: Any) -> None:
    """Let tensors in nested lists refer to the works that write them, of which a tensor can have several."""
    for each in tensors:
        if isinstance(each, torch.Tensor):
            each.__dict__.setdefault("_crossreduce_works", []).append(work)
        else:
            keep(work, each)


def release(work: Any, tensors: Any) -> None:
    """Remove the references of ``keep``."""
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            release(work, each)
        elif work in (works := each.__dict__.get("_crossreduce_works", [])):
            works.remove(work)
            if not works:  # with works the tensor could not be copied or saved
                each.__dict__.pop("_crossreduce_works", None)


class Works(Finished):
    """The work of several works together. Its result is ``tensors``."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self._works = works
        if KEEPS_WORKS:
            keep(self, tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        if KEEPS_WORKS:
            release(self, self._tensors)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def _source_rank(self) -> int:
        return int(self._works[0]._source_rank())


class Queued(Finished):
    """An op that runs in its group's thread."""

    def __init__(self, function: Callable[[], None], tensors: Sequence[Any], ops: OpQueue) -> None:
        super().__init__(tensors)
        self._function: Callable[[], None] | None = function
        self._ops = ops
        self._since_ns = 0 if ops.communicator is None or ops.communicator.traced is None else time.monotonic_ns()
        self._error: BaseException | None = None
        # Held until the op has run. A lock, since Ctrl-C ends a wait for a lock, but not a wait for a future.
        self._running = threading.Lock()
        self._running.acquire()
        self._future: Any = None
        self._future_lock = threading.Lock()

    def run(self) -> None:
        function, self._function = self._function, None  # releases the function's references
        try:
            assert function is not None
            if self._since_ns and self._ops.communicator is not None:
                self._ops.communicator.memory.native.trace_queued(self._since_ns)
            function()
        except UnsupportedError as error:
            self._error = self._ops.completed(error).with_traceback(None)
        except ReductionError as error:  # the frames of its traceback would refer to the tensors, and to this op
            self._error = error.with_traceback(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            self._error = error

    def finish(self) -> None:
        """Release the waiting threads."""
        self._running.release()
        with self._future_lock:
            if self._future is not None:
                self._complete_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the op has run, and raise its error. If ``timeout`` is not above 0, wait without a limit.

        Raises:
          CollectiveTimeout: ``timeout`` has passed. The op continues.
        """
        self._ops.run_until(self)
        limit = timeout.total_seconds() if timeout else 0
        deadline = time.monotonic() + limit if limit > 0 else math.inf
        # A signal that arrives just before a wait for a lock does not end the wait, so each wait is short.
        while not self._running.acquire(timeout=min(_WAIT_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                problem = "the op did not complete within the timeout of this wait."
                raise CollectiveTimeout.of(problem, f"{limit:g} s", "wait again: the op continues")
        self._running.release()
        if KEEPS_WORKS:
            release(self, self._tensors)
        if self._error is not None:  # a copy avoids a cycle: raised errors refer to frames, and these to this work
            error = copy.copy(self._error) if isinstance(self._error, ReductionError) else self._error
            try:
                raise error from self._error.__cause__
            finally:
                del error, self  # of other errors
        return True

    def is_completed(self) -> bool:
        return not self._running.locked()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Any:
        self._ops.run_until(self)
        if KEEPS_WORKS:
            release(self, self._tensors)
        with self._future_lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._complete_future()
            return self._future

    def _complete_future(self) -> None:
        error = self._error
        if error is None and not self._future.done():
            self._future.set_result(list(self._tensors))
        elif not self._future.done():
            self._future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def exclude_from_compile(*classes: type) -> None:
    """Make torch.compile skip the methods of classes.

    C++ code such as DDP's reducer calls these methods while a compiled model runs. torch.compile must not trace them.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # torch is older than 2.8
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in classes:
        for method in vars(each).values():
            if inspect.isfunction(method):
                frames.set_code_exec_strategy(method.__code__, skip)


exclude_from_compile(Finished, Queued)


class OpQueue:
    """Runs ops one after another, in the order of their calls."""

    def __init__(
        self, name: str, inline: bool, communicator: Communicator | None = None, alternative: str = ""
    ) -> None:
        """Make a queue for the group ``name``. ``inline``: whether a synchronous op may run in the caller's thread.

        ``communicator``: its trace records how long ops wait in the queue. It is ``None`` if ops are not collectives.
        ``alternative``: what else a user can do about an ``UnsupportedError``.
        """
        self.name, self.communicator, self._alternative = name, communicator, alternative
        self._inline = inline
        self.runs_inline = inline
        """Whether the caller's thread may run a synchronous op now: none is pending, and new ops are not refused."""
        self._refusal: str | None = None  # why new ops are refused
        self._lock = threading.Lock()
        self._required = threading.local()  # ``work``: see ``call_after``
        self._pending = 0  # ops of the queue's thread that wait or run
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Not Thread.join: if Ctrl-C ends it, Python 3.11 regards the thread as ended, although it still runs.
        self._ended = threading.Event()
        _QUEUES.add(self)

    def run(self, function: Callable[[], None], tensors: Sequence[Any], asynchronous: bool) -> dist.Work:
        """Run ``function`` and return its work. If ``asynchronous``, return at once: the queue's thread runs it.

        Raises:
          ContextError: see ``require_open``.
          Exception: the error of ``function``, if it is not asynchronous.
        """
        if asynchronous:
            return self._put(function, tensors)
        if not self.runs_inline:
            self._put(function, tensors).wait()
        else:
            try:
                function()
            except InMode:
                self._put(function, tensors).wait()
            except UnsupportedError as error:
                raise self.completed(error) from None
        return Finished(tensors)

    def completed(self, error: UnsupportedError) -> UnsupportedError:
        """Return an error with the queue's alternative added to its text."""
        if self._alternative:
            error.args = (f"{error}; {self._alternative}",)
        return error

    def call_after(self, work: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(*arguments)``. Ops that it puts into this queue do not run if that of ``work`` fails: they
        have the same error."""
        outer, self._required.work = getattr(self._required, "work", None), work
        try:
            return function(*arguments)
        finally:
            self._required.work = outer

    def _put(self, function: Callable[[], None], tensors: Sequence[Any]) -> Queued:
        """Put an op into the queue, start the queue's thread if there is none, and return the op's work."""
        if (required := getattr(self._required, "work", None)) is not None:
            function = partial(_run_after, required, function)
        work = Queued(function, tensors, self)
        with self._lock:
            self.require_open()
            self._pending += 1
            self.runs_inline = False
            self._queue.put(work)
            if self._thread is None:
                self._start()
        if KEEPS_WORKS:  # not if the op was refused: the tensors could no longer be copied or saved
            keep(work, tensors)
        return work

    def _start(self) -> None:
        """Start the queue's thread. The caller must hold the lock."""
        self._thread = threading.Thread(target=self._run_all, name=f"crossreduce {self.name}", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._thread = None  # if this thread has started, it ends at once; the next op starts another thread
            raise

    def require_open(self) -> None:
        """Raise ``ContextError`` if the group was destroyed, or if this process was forked from the group's process."""
        if self._refusal is not None:
            raise ContextError.of(self._refusal, f'group "{self.name}"', REMEDY)

    def run_next(self) -> bool:
        """Run the next op and return whether there may be more."""
        work = self._queue.get()
        if work is None:
            return False
        work.run()
        with self._lock:
            self._pending -= 1
            self.runs_inline = self._inline and not self._pending and self._refusal is None
        work.finish()
        return True

    def _run_all(self) -> None:
        with self._lock:
            if threading.current_thread() is not self._thread:  # ``_start`` has failed
                return
        while self.run_next():
            pass
        self._ended.set()

    def run_until(self, work: Queued) -> None:
        """If this is the queue's own thread, run all ops up to ``work``.

        The queue's thread also runs the callbacks of futures. If a callback waits for an op, no other thread runs it.
        """
        if threading.current_thread() is self._thread:
            while not work.is_completed():
                self.run_next()

    @property
    def is_closed(self) -> bool:
        """Whether new ops are refused."""
        return self._refusal is not None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the group's process."""
        return self._refusal == _FORKED

    def close(self, drain_s: float) -> bool:
        """Refuse new ops. Return whether all pending ops end within ``drain_s`` s, or this is the queue's thread.

        An idle thread may end later.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal, self.runs_inline = "this process group was destroyed.", False
                self._queue.put(None)
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        return self._ended.wait(drain_s) or not self._pending

    def disable_after_fork(self) -> None:
        """Refuse all ops in a forked process, which has neither the group's thread nor a rank in the group."""
        self._lock = threading.Lock()  # another thread may have held the old lock during the fork
        self._refusal, self.runs_inline = _FORKED, False


def _run_after(required: Any, function: Callable[[], None]) -> None:
    if (error := required.exception()) is not None:
        raise error
    function()


def wait_in_backward(work: Any) -> None:
    """Wait for work at the end of the current backward pass, in the thread that called ``backward``.

    Otherwise DDP, in C++, would wait for a future: Ctrl-C does not end this wait, and it loses the class of an error.
    The callback that is queued here runs before the one that DDP queues after its last bucket.
    """
    torch.autograd.Variable._execution_engine.queue_callback(work.wait)


def is_called_by_backward(file: str) -> bool:
    """Return whether C++ called the calling method, in ``file``, in a backward pass.

    If so, the next Python frame outside of that file is the one that started the backward pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


_FORKED: Final = "a process group cannot be used in a process that was forked from the one that made it."
_QUEUES: Final[weakref.WeakSet[OpQueue]] = weakref.WeakSet()


def _after_fork() -> None:
    if _QUEUES:
        gc.freeze()  # if a child collected its parent's groups, gloo's destructor would abort it
    for ops in list(_QUEUES):
        ops.disable_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
