"""``Listener``: a port at which this process answers other processes, each connection in a thread of its own.

Input: a key, and a function that answers a process that knows the key. Output: the port. A program that does not know
the key cannot delay others: it gets no thread, and the number of connections without a proof is limited.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..transports import tcp
from ..transports.addresses import end_text
from ..transports.strangers import MOST_UNKNOWN, Strangers
from . import shortage
from .channel import HELLO_NBYTES, AuthenticatedChannel, accept_channel, is_hello

UNKNOWN_S: Final = 5.0  # how long a program that connects may take to prove that it knows the key
_MOST_ACCEPTED: Final = 64  # connections that are accepted before the first messages of others are read
_CHECK_MS: Final = 200  # between two checks for programs that take too long
_IDLE_MS: Final = 60_000  # the same, while there is no such program
_PAUSE_S: Final = 0.01  # after a connection that could not be accepted
_ALL: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()


class Listener:
    """Accepts connections at ``port`` until it is closed.

    ``refused``: how many programs have sent a wrong proof.

    Args:
      key: both ends of a connection prove that they know it.
      answer: called with each connection of such a process. The connection is closed when this returns or raises an
        ``OSError``, a ``ValueError`` or an ``EOFError``.
      most_unknown: how many connections of programs without a proof may be open. If there are more, ``Strangers`` tells
        which one is closed.
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
        self._key, self._answer, self.refused = key, answer, 0
        self._lock, self._closed, self._open = threading.Lock(), False, set[socket.socket]()
        self._first: dict[int, tuple[socket.socket, str, bytearray]] = {}  # incomplete first messages, by descriptor
        self._unknown = Strangers(most_unknown)
        self._greeted = Strangers(most_unknown)  # they have sent a hello, which may be a recorded one
        self._socket = tcp.opened_listener(port, address)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        _ALL.add(self)
        # No Thread, whose end Python would await when it exits.
        start_new_thread(self._accept, (self._socket.fileno(),))

    def _accept(self, listening: int) -> None:
        """Accept connections and read their first messages, until the listener, a descriptor, is closed."""
        readable = select.poll()
        readable.register(listening, select.POLLIN)
        while not self._closed:
            # A limit, since the descriptor may have been closed, and opened again by others, just before.
            ready = [descriptor for descriptor, _ in readable.poll(_CHECK_MS if self._first else _IDLE_MS)]
            for descriptor in ready:
                if descriptor == listening and not self._closed:
                    self._accept_some(readable)
                elif descriptor in self._first:  # it was not dropped just now
                    self._read_first(descriptor, readable)
            while (late := self._unknown.pop(time.monotonic() - UNKNOWN_S)) is not None:
                self._drop(late, readable)
        for connection, _, _ in self._first.values():
            connection.close()

    def _accept_some(self, readable: select.poll) -> None:
        """Accept the connections that wait."""
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, (address, *_) = self._socket.accept()
            except BlockingIOError:
                return
            except (OSError, MemoryError) as error:
                if not self._closed:
                    shortage.note(error)
                    self._make_room(readable)  # there may be too many open files
                return
            connection.setblocking(False)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            if (dropped := self._unknown.add(connection, address)) is not None:
                self._drop(dropped, readable)
            descriptor = connection.fileno()
            self._first[descriptor] = connection, address, bytearray()
            readable.register(descriptor, select.POLLIN)
            self._read_first(descriptor, readable)

    def _make_room(self, readable: select.poll) -> None:
        """Drop the oldest connection without a proof, and wait a moment."""
        if (oldest := self._unknown.pop(math.inf)) is not None:
            self._drop(oldest, readable)
        time.sleep(_PAUSE_S)

    def _read_first(self, descriptor: int, readable: select.poll) -> None:
        """Read what has arrived of a first message. If it is complete, start a thread, or drop the connection."""
        connection, address, hello = self._first[descriptor]
        try:
            part = connection.recv(HELLO_NBYTES - len(hello))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        hello += part
        if part and len(hello) < HELLO_NBYTES:
            return
        if not part or not self._is_hello(connection, bytes(hello)):
            self.refused += bool(part)
            self._drop(connection, readable)
            return
        self._forget(connection, readable)
        with self._lock, suppress(OSError):
            if (dropped := self._greeted.add(connection, address)) is not None:
                dropped.shutdown(socket.SHUT_RDWR)  # then its thread closes it
        try:
            start_new_thread(self._run, (connection, bytes(hello)))
        except (RuntimeError, MemoryError) as error:  # too many threads
            shortage.note(error)
            self._end(connection)
            self._make_room(readable)

    def _is_hello(self, connection: socket.socket, hello: bytes) -> bool:
        """Return whether a first message is valid on its connection, which may have ended."""
        with suppress(OSError):
            return is_hello(hello, self._key, end_text(connection.getsockname()))
        return False

    def _forget(self, connection: socket.socket, readable: select.poll) -> None:
        """Read no first message of a connection any more."""
        self._unknown.discard(connection)
        readable.unregister(connection)
        del self._first[connection.fileno()]

    def _drop(self, connection: socket.socket, readable: select.poll) -> None:
        """Close a connection of a program without a proof."""
        self._forget(connection, readable)
        self._end(connection)

    def _run(self, connection: socket.socket, hello: bytes) -> None:
        try:
            if (channel := self._channel(connection, hello)) is not None:
                self._answer(channel)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            shortage.note(error)
        finally:
            self._end(connection)

    def _channel(self, connection: socket.socket, hello: bytes) -> AuthenticatedChannel | None:
        """Return the channel of a process that knows the key, or ``None`` if its second proof is wrong."""
        try:
            connection.settimeout(UNKNOWN_S)
            return accept_channel(connection, self._key, hello, time.monotonic() + UNKNOWN_S)
        except ValueError:
            self.refused += 1
            return None
        finally:
            with self._lock:
                self._greeted.discard(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._greeted.discard(connection)
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
