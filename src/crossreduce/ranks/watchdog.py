"""``WatchedTransport``: a transport that records which other rank this rank waits for, and a thread that calls a check.

Input: a transport; and the check, a method that can warn of a long wait. Output: a transport with the same messages.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from weakref import WeakMethod

from ..threads import start_thread
from ..transports.base import PendingMessage, Transport

_LOG: Final = logging.getLogger("crossreduce")
_EVERY_S: Final = 0.2


class RemoteWait(NamedTuple):
    """The other rank of the message that this rank waits for, and when the wait began, by ``time.monotonic``."""

    rank: int
    since_s: float


class WatchedTransport:
    """A ``transports.base.Transport`` that records which other rank this rank waits for, and calls ``check``.

    ``check``: a method that a thread calls every 0.2 s; its object is not kept alive by this. If the system cannot
    start the thread, the method is never called, and messages are carried all the same.
    """

    def __init__(self, transport: Transport, check: Callable[[], None]) -> None:
        self.wait: RemoteWait | None = None
        self._transport = transport
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=_check_repeatedly, args=(WeakMethod(check), self._closed), name="crossreduce watchdog", daemon=True
        )
        try:
            start_thread(self._thread)
        except RuntimeError as error:  # the other ranks already expect this one, so it continues
            _LOG.warning("this rank will not warn if another host is late: %s", error)

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> PendingMessage:
        """Start to send."""
        return _WatchedMessage(self._transport.send(address, nbytes, dst, tag), dst, self)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> PendingMessage:
        """Start to receive."""
        return _WatchedMessage(self._transport.receive(address, nbytes, src, tag), src, self)

    def abort(self) -> None:
        """Make all messages of this rank fail soon."""
        self._transport.abort()

    def close(self) -> None:
        """End the thread; the transport stays open."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # 1 s at most: if a signal handler calls this, the watchdog may wait for a log's lock that the caller holds.
            self._thread.join(1)


class _WatchedMessage:
    """A message whose wait is recorded."""

    def __init__(self, pending: PendingMessage, rank: int, watched: WatchedTransport) -> None:
        self._pending, self._rank, self._watched = pending, rank, watched

    def wait(self, timeout_s: float) -> None:
        """Wait for the message."""
        self._watched.wait = RemoteWait(self._rank, time.monotonic())
        try:
            self._pending.wait(timeout_s)
        finally:
            self._watched.wait = None


def _check_repeatedly(method: WeakMethod[Callable[[], None]], closed: threading.Event) -> None:
    while not closed.wait(_EVERY_S):
        check = method()
        if check is None:
            return
        try:
            check()
        except Exception:  # noqa: BLE001 - for example a log handler's: it is reported, and checking continues
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del check  # it would keep its object alive
