"""``Listener``: a port at which this process answers other processes, each connection in a thread of its own.

Input: a key, and a function that answers a process that knows the key. Output: the port. Programs that do not know the
key cannot delay others: the number of their connections is limited, and the oldest connection is closed first.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..transports import tcp
from . import shortage
from .channel import AuthenticatedChannel, accept_channel

UNKNOWN_S: Final = 5.0  # how long a program that connects may take to prove that it knows the key
MOST_UNKNOWN: Final = 64  # connections of unknown programs that are open at once
_PAUSE_S: Final = 0.01  # after a connection that could not be accepted
_ALL: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()


class Listener:
    """Accepts connections at ``port`` until it is closed.

    ``refused``: how many programs have sent a wrong proof.

    Args:
      key: both ends of a connection prove that they know it.
      answer: called with each connection of such a process. The connection is closed when this returns or raises an
        ``OSError``, a ``ValueError`` or an ``EOFError``.
      most_unknown: how many connections of programs without a proof may be open. If there are more, the oldest one is
        closed.
      port: where to listen. 0 means a free port.
      address: the address of this host at which to listen. "" means all its addresses.
    Raises:
      OSError: this process cannot listen there.
    """

    def __init__(
        self,
        key: bytes,
        answer: Callable[[AuthenticatedChannel], None],
        *,
        most_unknown: int = MOST_UNKNOWN,
        port: int = 0,
        address: str = "",
    ) -> None:
        self._key, self._answer, self._most_unknown, self.refused = key, answer, most_unknown, 0
        self._lock, self._closed, self._open = threading.Lock(), False, set[socket.socket]()
        self._unknown: dict[socket.socket, None] = {}  # connections of programs without a proof, the oldest first
        self._socket = tcp.opened_listener(port, address)
        self.port = int(self._socket.getsockname()[1])
        _ALL.add(self)
        start_new_thread(self._accept, ())  # no Thread, whose end Python would await when it exits

    def _accept(self) -> None:
        """Start a thread for each connection, until the listener is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except (OSError, MemoryError) as error:
                if self._closed:
                    return
                shortage.note(error)
                self._drop()  # there may be too many open files
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
                self._unknown[connection] = None
            if len(self._unknown) > self._most_unknown:
                self._drop()
            try:
                start_new_thread(self._run, (connection,))
            except (RuntimeError, MemoryError) as error:  # too many threads
                shortage.note(error)
                self._drop()
                self._end(connection)

    def _drop(self) -> None:
        """Shut down the oldest connection of a program without a proof. Then its thread closes it."""
        with self._lock, suppress(StopIteration, OSError):
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.shutdown(socket.SHUT_RDWR)

    def _run(self, connection: socket.socket) -> None:
        try:
            if (channel := self._channel(connection)) is not None:
                self._answer(channel)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            shortage.note(error)
        finally:
            self._end(connection)

    def _channel(self, connection: socket.socket) -> AuthenticatedChannel | None:
        """Return the channel of a process that knows the key, or ``None`` if its proof is wrong."""
        try:
            channel = accept_channel(connection, self._key, time.monotonic() + UNKNOWN_S)
        except ValueError:
            self.refused += 1
            return None
        with self._lock:
            self._unknown.pop(connection, None)
        return channel

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._unknown.pop(connection, None)
            connection.close()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._closed:  # also in a forked process, by ``close_after_fork``
            return
        with self._lock:
            self._closed = True
            for end in (self._socket, *self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def close_after_fork(self) -> None:
        """Close the descriptors of a forked process. The connections stay open, since the parent still uses them."""
        self._closed = True
        for end in (self._socket, *self._open):
            end.close()


def _after_fork() -> None:
    for listener in list(_ALL):
        listener.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
