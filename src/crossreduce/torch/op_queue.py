"""The ops of one group, in the order in which they were called.

In: functions to call.  Out: ``torch.distributed.Work``. A call that waits runs in the caller's own thread as long as
nothing is before it; all others run in one thread of the group's. Knows no collectives.
"""

from __future__ import annotations

import inspect
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeout, ContextError, message


class Finished(dist.Work):  # type: ignore[misc]
    """An op that has run."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def synchronize(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return list(self._tensors)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class Landing(Finished):
    """Another engine's work, after which something is left to do: the first wait does it."""

    def __init__(self, work: Any, last: Callable[[], None], tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self._work, self._last = work, last
        self._landed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._landed:
            self._work.wait(*([timeout] if timeout else []))
            self._last()
            self._landed = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def result(self) -> list[Any]:
        self.wait()
        return super().result()

    def get_future(self) -> Any:
        self.wait()
        return super().get_future()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class Queued(dist.Work):  # type: ignore[misc]
    """An op that runs in its group's thread, sooner or later."""

    def __init__(self, job: Callable[[], None], tensors: Sequence[Any], line: Line) -> None:
        super().__init__()
        self._job: Callable[[], None] | None = job
        self._tensors, self._line = tensors, line
        self._error: BaseException | None = None
        self._gate = threading.Lock()  # held until the op has run; a lock's wait hears Ctrl-C, a future's does not
        self._gate.acquire()
        self._future: Any = None
        self._future_lock = threading.Lock()

    def run(self) -> None:
        job, self._job = self._job, None  # what the job holds is let go here
        try:
            assert job is not None
            job()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            self._error = error

    def finish(self) -> None:
        """Let those who wait go on."""
        self._gate.release()
        with self._future_lock:
            if self._future is not None:
                self._settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the op has run, and raise what it raised; no time, or none at all, is all the group's timeout.

        Raises:
          CollectiveTimeout: ``timeout`` is over. The op goes on.
        """
        self._line.reach(self)
        limit = timeout.total_seconds() if timeout else -1
        if not self._gate.acquire(timeout=limit if limit > 0 else -1):
            problem = "an op has not ended within the timeout of its wait."
            raise CollectiveTimeout(message(problem, f"{limit:g} s", "wait again: it is still under way"))
        self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return not self._gate.locked()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        self._line.reach(self)
        with self._future_lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._settle()
            return self._future

    def _settle(self) -> None:
        if self._future.done():
            return
        if self._error is None:
            self._future.set_result(list(self._tensors))
        elif isinstance(self._error, Exception):
            self._future.set_exception(self._error)
        else:
            self._future.set_exception(RuntimeError(repr(self._error)))


def untraced(*classes: type) -> None:
    """Keep torch.compile out of classes' methods.

    C++ calls them back while a compiled model runs, as DDP's reducer does; torch.compile would take them for its own.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.8
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in classes:
        for method in vars(each).values():
            if inspect.isfunction(method):
                frames.set_code_exec_strategy(method.__code__, skip)


untraced(Finished, Landing, Queued)


class Line:
    """Ops run one after another, in the order of their calls."""

    def __init__(self, name: str, inline: bool) -> None:
        """Make a line; ``name`` is the group's. ``inline``: an op that is waited for may run in the caller's thread."""
        self.name = name
        self._inline = inline
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._before = 0  # ops that wait or run
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _LINES.add(self)

    def run(self, job: Callable[[], None], tensors: Sequence[Any], later: bool) -> dist.Work:
        """Run ``job``: now, or ``later`` in the line's thread.

        Raises:
          ContextError: the group was destroyed, or belongs to the process that this one was forked from.
          Exception: what ``job`` raises, if it runs now.
        """
        if later or self._before or not self._inline or self._refusal is not None:
            work = self._put(job, tensors)
            if not later:
                work.wait()
            return work
        job()
        return Finished(tensors)

    def _put(self, job: Callable[[], None], tensors: Sequence[Any]) -> Queued:
        work = Queued(job, tensors, self)
        with self._lock:
            self.require_open()
            self._before += 1
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self,), name=f"crossreduce {self.name}", daemon=True
                )
                self._thread.start()
        return work

    def require_open(self) -> None:
        """Raise unless the group may be used.

        Raises:
          ContextError: it was destroyed, or belongs to the process that this one was forked from.
        """
        if self._refusal is not None:
            raise ContextError(message(self._refusal, f'group "{self.name}"', "make a new group where you need one"))

    def step(self) -> bool:
        """Take the next op, run it, and return whether there may be more."""
        work = self._queue.get()
        if work is None:
            return False
        work.run()
        with self._lock:
            self._before -= 1
        work.finish()
        return True

    def reach(self, work: Queued) -> None:
        """Run all that is before ``work``, and it, if this is the line's own thread.

        It is one that runs the callbacks of futures, and a callback may wait for another op: nobody else would run it.
        """
        if threading.current_thread() is self._thread:
            while not work.is_completed():
                self.step()

    @property
    def foreign(self) -> bool:
        """Whether this process was forked from the one that the group belongs to."""
        return self._refusal == _FORKED

    def close(self, drain_s: float) -> bool:
        """Take no more ops; wait ``drain_s`` seconds at most for those under way, and return whether all have ended."""
        with self._lock:
            if self._refusal is None:
                self._refusal = "this process group was destroyed."
                self._queue.put(None)
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(drain_s)
        return not thread.is_alive()

    def disown(self) -> None:
        """Refuse all ops: this is a forked process, which has neither the group's thread nor its place in the group."""
        self._lock = threading.Lock()  # another thread may have held it
        self._refusal = _FORKED


_FORKED: Final = "a process group cannot be used in a process that was forked from its own."
_LINES: Final[weakref.WeakSet[Line]] = weakref.WeakSet()


def _work(line: Line) -> None:
    while line.step():
        pass


def _forked() -> None:
    for line in list(_LINES):
        line.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
