"""``WatchedTransport``: a transport that records which other rank this rank waits for, and warns of long waits.

Input: a transport, and a check: a function that warns of a long wait. Output: a transport with the same messages. One
thread of the process calls the checks of all its groups. The thread ends when there are no more groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ...observe.periodic_checks import PeriodicChecks
from ..transports.base import PendingMessage, Transport

_EVERY_S: Final = 0.2  # between two checks of the current wait


class RemoteWait(NamedTuple):
    """The other rank of the message for which this rank waits, and the time when the wait began (``monotonic``)."""

    rank: int
    since_s: float


_WATCHDOG: Final = PeriodicChecks("crossreduce watchdog", _EVERY_S, "this rank will not warn if another host is late")


class WatchedTransport:
    """A ``ranks.transports.base.Transport`` that records which other rank this rank waits for.

    The process's watchdog calls ``check`` with the current wait every 0.2 s. If the system cannot start its thread,
    messages are carried without checks.
    """

    def __init__(self, transport: Transport, check: Callable[[RemoteWait | None], None]) -> None:
        self.wait: RemoteWait | None = None
        self._transport, self._check_wait = transport, check
        for name in ("connections", "lag", "message_nbytes"):  # see ``HostTransport`` and ``Transport``
            if hasattr(transport, name):
                setattr(self, name, getattr(transport, name))
        self._watchdog = _WATCHDOG  # a reference: ``close`` may run when Python has cleared this module
        self._key = self._watchdog.add(self._check)

    def _check(self) -> None:  # a method: the watchdog references its object weakly
        self._check_wait(self.wait)

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> PendingMessage:
        """Start to send."""
        return _WatchedMessage(self._transport.send(address, nbytes, dst, tag), dst, self)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> PendingMessage:
        """Start to receive."""
        return _WatchedMessage(self._transport.receive(address, nbytes, src, tag), src, self)

    def watch(self, pending: PendingMessage, rank: int) -> PendingMessage:
        """Return a message that the transport's compiled object has begun, as one whose wait is recorded."""
        wrap = getattr(self._transport, "wrap", None)
        return _WatchedMessage(pending if wrap is None else wrap(pending, rank), rank, self)

    def abort(self) -> None:
        """Make all messages of this rank fail soon."""
        self._transport.abort()

    def close(self) -> None:
        """Stop calling ``check``. The transport stays open."""
        self._watchdog.remove(self._key)


class _WatchedMessage:
    """A message whose wait is recorded."""

    def __init__(self, pending: PendingMessage, rank: int, watched: WatchedTransport) -> None:
        self._pending, self._rank, self._watched = pending, rank, watched

    def poll(self, seconds: float) -> bool:
        """Wait at most so long. Return whether the message is complete; that of a plug-in cannot tell."""
        poll = getattr(self._pending, "poll", None)
        return poll is not None and bool(poll(seconds))

    def wait(self, timeout_s: float) -> None:
        """Wait for the message."""
        self._watched.wait = RemoteWait(self._rank, time.monotonic())
        try:
            self._pending.wait(timeout_s)
        finally:
            self._watched.wait = None
