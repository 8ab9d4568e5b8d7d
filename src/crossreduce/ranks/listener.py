"""``Listener``: a port at which this process answers other processes, each connection in a thread of its own.

Input: a function that answers a connection. Output: the port. That function decides who may send what. Connections of
unknown programs cannot delay others: their number is limited, and the oldest one is closed if there are more.
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
from typing import Final, TypeAlias

from ..transports import tcp

MOST_UNKNOWN: Final = 64  # connections of unknown programs that are open at once
_PAUSE_S: Final = 0.01  # after a connection that could not be accepted
Answer: TypeAlias = Callable[[socket.socket, Callable[[], None]], None]
_ALL: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()


class Listener:
    """Accepts connections until it is closed. ``port`` is where.

    Args:
      answer: called with each connection, which is closed when this returns or raises an ``OSError``, a ``ValueError``
        or an ``EOFError``; and with a function, which it calls as soon as the other program has shown who it is.
      most_unknown: how many connections may be open whose programs have not shown who they are. If there are more, the
        oldest one is closed.
      port: 0: a free one.
      address: of this host, where to listen; empty: at all of them.
    Raises:
      OSError: this process cannot listen there.
    """

    def __init__(self, answer: Answer, *, most_unknown: int = MOST_UNKNOWN, port: int = 0, address: str = "") -> None:
        self._answer, self._most_unknown = answer, most_unknown
        self._lock, self._closed, self._open = threading.Lock(), False, set[socket.socket]()
        self._unknown: dict[socket.socket, None] = {}  # of programs that have not shown who they are; the oldest first
        self._socket = tcp.opened_listener(port, address)
        self.port = int(self._socket.getsockname()[1])
        _ALL.add(self)
        start_new_thread(self._accept, ())  # no Thread, whose end Python would await when it exits

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                self._drop()  # such as too many open files
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
            except RuntimeError:  # too many threads
                self._drop()
                self._end(connection)

    def _drop(self) -> None:
        """Let the thread of the oldest connection of an unknown program close it."""
        with self._lock, suppress(StopIteration, OSError):
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.shutdown(socket.SHUT_RDWR)

    def _run(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError, ValueError, EOFError):
                self._answer(connection, lambda: self._know(connection))
        finally:
            self._end(connection)

    def _know(self, connection: socket.socket) -> None:
        with self._lock:
            self._unknown.pop(connection, None)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._unknown.pop(connection, None)
            connection.close()

    def close(self) -> None:
        """Stop listening, and end all connections; in a forked process nothing is left to do."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            for end in (self._socket, *self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def close_after_fork(self) -> None:
        """Close a forked process's descriptors, not the connections: its parent still answers, until its end."""
        self._closed = True
        for end in (self._socket, *self._open):
            end.close()


def _after_fork() -> None:
    for listener in list(_ALL):
        listener.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
