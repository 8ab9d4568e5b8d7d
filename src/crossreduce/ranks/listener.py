"""``Listener``: a port at which this process answers other processes, each connection in a thread of its own.

Input: a function that answers a connection. Output: the port. That function decides who may send what.
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

_ALL: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()


class Listener:
    """Accepts connections until it is closed. ``port`` is where.

    Args:
      answer: called with each connection, which is closed when this returns or raises an ``OSError``, a ``ValueError``
        or an ``EOFError``.
      most: how many connections are answered at the same time; further ones wait.
      port: 0: a free one.
      address: of this host, where to listen; empty: at all of them.
    Raises:
      OSError: this process cannot listen there.
    """

    def __init__(self, answer: Callable[[socket.socket], None], *, most: int, port: int = 0, address: str = "") -> None:
        self._answer = answer
        self._free = threading.BoundedSemaphore(most)
        self._lock, self._closed, self._open = threading.Lock(), False, set[socket.socket]()
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
                time.sleep(0.01)  # such as too many open files
                continue
            self._free.acquire()
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            try:
                start_new_thread(self._run, (connection,))
            except RuntimeError:  # too many threads
                self._end(connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError, ValueError, EOFError):
                self._answer(connection)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()
        self._free.release()

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
