"""``PeriodicChecks``: a thread of this process that calls functions at regular intervals.

Input: bound methods. Output: their calls, until they are removed or their objects are garbage collected.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakMethod

from ..threads import start_thread

_LOG: Final = logging.getLogger("crossreduce")


class PeriodicChecks:
    """A thread of this process that calls the added functions every ``every_s`` seconds. It ends if there are none.

    ``name``: the name of the thread. ``lost``: the warning if the system cannot start the thread.
    """

    def __init__(self, name: str, every_s: float, lost: str) -> None:
        self._name, self._every_s, self._lost = name, every_s, lost
        self._keys = itertools.count()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        self._forget()

    def _forget(self) -> None:
        """Remove all functions and the thread. A forked process has neither the groups nor the thread of its parent."""
        # Reentrant: a signal handler or finalizer may close a transport while its thread adds or removes another one.
        self._lock = threading.RLock()
        self._checks: dict[int, WeakMethod[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()  # set to end the current thread

    def add(self, check: Callable[[], None]) -> int:
        """Call ``check`` until ``remove`` is called with the returned key, or its object is garbage collected."""
        with self._lock:
            key = next(self._keys)
            self._checks[key] = WeakMethod(check)
            if self._thread is None:
                self._closed = threading.Event()
                target, arguments = self._check_repeatedly, (self._closed,)
                self._thread = threading.Thread(target=target, args=arguments, name=self._name, daemon=True)
                try:
                    start_thread(self._thread)
                except BaseException as error:
                    self._closed.set()  # if the thread has started, it ends at once
                    self._thread = None
                    if not isinstance(error, (RuntimeError, MemoryError)):
                        raise
                    # Continue without the thread, since the other ranks already expect this rank.
                    _LOG.warning("%s: %s", self._lost, error)
            return key

    def remove(self, key: int) -> None:
        """Remove the check with this key. When no check is left, the thread ends."""
        with self._lock:
            self._checks.pop(key, None)
            thread = None if self._checks else self._end()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            # 1 s at most: if a signal handler calls this, the watchdog may wait for a log's lock that the caller holds.
            thread.join(1)

    def _end(self) -> threading.Thread | None:
        """Make the thread end soon, and return it. The caller must hold the lock."""
        thread, self._thread = self._thread, None
        self._closed.set()
        return thread

    def _check_repeatedly(self, closed: threading.Event) -> None:
        while not closed.wait(self._every_s):
            for key, method in list(self._checks.items()):
                check = method()
                if check is None:
                    with self._lock:
                        self._checks.pop(key, None)
                        if not self._checks and not closed.is_set():
                            self._end()
                    continue
                try:
                    check()
                except Exception:  # noqa: BLE001 - such as an error of a log handler; report it and continue
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
                del check  # it would keep its object alive until the next check
