"""``Lookout``: a wire that knows for whom it waits; the engines between hosts wait without a word.

In: a wire.  Out: the same wire, and a thread that looks, now and then, whether a wait has become a long one.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from weakref import WeakMethod

from ..transports.base import Pending, Wire

_LOG: Final = logging.getLogger("crossreduce")
_EVERY_S: Final = 0.2


class Wait(NamedTuple):
    """For which rank's message this one waits, and since when by ``time.monotonic``."""

    rank: int
    since_s: float


class Lookout:
    """A ``contract.Wire``.

    Args:
      wire: what carries the messages.
      look: is called every 0.2 s in a thread of its own; a method, whose object is not kept alive for it. Where the
        system grants no thread it is not called, and messages go their way.
    """

    def __init__(self, wire: Wire, look: Callable[[], None]) -> None:
        self.waits: Wait | None = None
        self._wire = wire
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=_look, args=(WeakMethod(look), self._over), name="crossreduce lookout", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # other ranks have met this one already, and would wait for it
            _LOG.warning("this rank will not warn when another host is late: %s", error)

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> Pending:
        """Start to send."""
        return _Watched(self._wire.send(address, nbytes, dst, tag), dst, self)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> Pending:
        """Start to receive."""
        return _Watched(self._wire.receive(address, nbytes, src, tag), src, self)

    def abort(self) -> None:
        """Make all messages under way fail soon."""
        self._wire.abort()

    def close(self) -> None:
        """End the thread; the wire stays as it is."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1)  # not for ever: a signal's handler may close while its own thread holds a log's lock


class _Watched:
    """A message under way, whose wait is known."""

    def __init__(self, pending: Pending, rank: int, lookout: Lookout) -> None:
        self._pending, self._rank, self._lookout = pending, rank, lookout

    def wait(self, timeout_s: float) -> None:
        """Wait as the wire does."""
        self._lookout.waits = Wait(self._rank, time.monotonic())
        try:
            self._pending.wait(timeout_s)
        finally:
            self._lookout.waits = None


def _look(method: WeakMethod[Callable[[], None]], over: threading.Event) -> None:
    while not over.wait(_EVERY_S):
        look = method()
        if look is None:
            return
        try:
            look()
        except Exception:  # noqa: BLE001 - such as a log's handler's: it is reported, and the next long wait is seen
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del look  # or this thread would keep its object
