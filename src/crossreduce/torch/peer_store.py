"""``PeerStore``: a store for ``torch.distributed`` in the memory of one rank, which the others reach.

Input: for the rank that serves it, a key; for the others its address as well. Output: a ``dist.Store``. Unlike a
``TCPStore`` it looks up no names, and a wait for a process that was stopped can be ended.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from ..errors import ReductionError
from ..ranks.contact import Json, receive, send
from ..transports import tcp

CONNECT_S: Final = 2.0  # how long a connection may take
LIMIT_S: Final = 10.0  # how long an answer may take; a rank that has lost the link to the store must not wait longer
_WAIT_S: Final = 0.02  # how long the server waits for a key before it answers that it is not there
_WATCH_S: Final = 0.02  # between two looks whether a wait for the server must end
_TEXT: Final = "latin-1"  # has a character for each byte


class _Table:
    """The values of a store, for any number of threads. The methods' arguments and results are JSON."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def run(self, what: str, keys: Sequence[str], given: Json) -> Json:
        """Execute one operation."""
        with self._changed:
            values, (key, *_) = self._values, keys
            if what == "set":
                values[key] = given
            elif what == "add":
                values[key] = str(int(values.get(key, "0")) + given)
            elif what == "compare_set":
                expected, desired = given
                if values.get(key, "") == expected:
                    values[key] = desired
            elif what == "delete":
                return values.pop(key, None) is not None
            elif what == "count":
                return len(values)
            elif what == "wait":
                return self._changed.wait_for(lambda: all(each in values for each in keys), _WAIT_S)
            elif what == "check":
                return all(each in values for each in keys)
            if what in ("set", "add", "compare_set"):
                self._changed.notify_all()
            return [values.get(each) for each in keys]


class _Server:
    """Answers the requests of other processes to a table, in one thread for each of them."""

    def __init__(self, key: bytes, table: _Table) -> None:
        self._key, self._table, self._process = key, table, os.getpid()
        self._listener = tcp.opened_listener()
        self.port = int(self._listener.getsockname()[1])
        self._lock, self._closed, self._open = threading.Lock(), False, set[socket.socket]()
        start_new_thread(self._accept, ())

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.01)  # such as too many open files
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            try:
                start_new_thread(self._answer, (connection,))
            except RuntimeError:  # too many threads
                self._end(connection)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError, EOFError):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                request = receive(connection, self._key, b"request")
                answer = self._table.run(request["what"], request["keys"], request["given"])
                send(connection, self._key, b"answer", {"answer": answer, "number": request["number"]})
        self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End all connections. A forked process only closes its descriptors, since its parent still answers."""
        if os.getpid() != self._process:
            for end in (self._listener, *self._open):
                end.close()
            return
        with self._lock:
            self._closed = True
            ends = [self._listener, *self._open]
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._listener.close()


class PeerStore(dist.Store):  # type: ignore[misc]
    """A store that a rank serves; ``port`` is where. ``watch`` is called during waits, and may raise to end them."""

    def __init__(self, key: bytes, address: str = "", port: int = 0, watch: Callable[[], None] = lambda: None) -> None:
        """Serve a store; or, with an address, connect to it.

        Raises:
          OSError: it cannot be reached.
        """
        super().__init__()
        self._key, self.watch = key, watch
        self._lock, self._number = threading.Lock(), 0  # of the latest request
        self.limit_s = LIMIT_S  # how long an answer may take
        self._connection: socket.socket | None = None
        if address:
            self._connection = socket.create_connection((address, port), CONNECT_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.port = port
            weakref.finalize(self, self._connection.close)
        else:
            self._table = _Table()
            server = _Server(key, self._table)
            self.port = server.port
            weakref.finalize(self, server.close)

    def _run(self, what: str, keys: Sequence[str], given: Json = None) -> Json:
        if self._connection is None:
            return self._table.run(what, keys, given)
        try:
            with self._lock:
                self._number += 1
                request = {"what": what, "keys": list(keys), "given": given, "number": self._number}
                send(self._connection, self._key, b"request", request)
                while True:
                    self._wait_for_answer(self._connection)
                    answer = receive(self._connection, self._key, b"answer")
                    if answer["number"] == self._number:  # not the answer to a request that was given up
                        return answer["answer"]
        except ReductionError:  # what ``watch`` raises
            raise
        except (OSError, ValueError, EOFError) as error:
            kind = "Timeout" if isinstance(error, TimeoutError) else "Lost"
            raise RuntimeError(f"{kind}: the rank that serves the store does not answer: {error}") from None

    def _wait_for_answer(self, connection: socket.socket) -> None:
        deadline, arrived = time.monotonic() + self.limit_s, select.poll()
        arrived.register(connection, select.POLLIN)
        while not arrived.poll(_WATCH_S * 1e3):
            self.watch()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self.limit_s:g} s")

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._run("set", [key], value.decode(_TEXT))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for values, and return them."""
        while None in (found := self._run("get", keys)):
            self.wait(keys)
        return [str(value).encode(_TEXT) for value in found]

    def has_extended_api(self) -> bool:
        """Return whether ``multi_get`` exists."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return int(self._run("add", [key], amount)[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected`` (empty: there is none), and return the value.

        As a ``TCPStore`` does, return ``expected`` if there is no value.
        """
        found = self._run("compare_set", [key], [expected.decode(_TEXT), desired.decode(_TEXT)])[0]
        return expected if found is None else str(found).encode(_TEXT)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return bool(self._run("delete", [key]))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._run("count", [""]))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - the trampolines' names

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all values are there."""
        return bool(self._run("check", keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all values are there.

        Raises:
          RuntimeError: the time has passed.
        """
        limit_s = (timeout or self.timeout).total_seconds()
        deadline = time.monotonic() + limit_s
        while not self._run("wait", keys):
            self.watch()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timeout: {', '.join(keys)} were not stored within {limit_s:g} s")
