"""``StoreClient``: access to a table of small values in the memory of one rank.

Input: a key, and, except on the rank that serves the store, the store's address. Output: methods with the names and the
behaviour of ``torch.distributed``'s stores. Both ends of each connection prove that they know the key.
"""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from ...errors import ReductionError
from ..transports.strangers import MOST_UNKNOWN
from .channel import AuthenticatedChannel, open_channel
from .listener import Listener
from .peer_requests import Json

CONNECT_S: Final = 2.0  # how long a connection may take
LIMIT_S: Final = 10.0  # how long an answer may take; a rank that has lost the link to the store must not wait longer
_WAIT_S: Final = 0.02  # how long the server waits for a key before it answers that the key has no value
_WATCH_S: Final = 0.02  # between two calls of ``watch`` while the server does not answer
_BATCH: Final = 256  # values in one answer, whose length is limited
_TEXT: Final = "latin-1"  # has a character for each byte


class _Table:
    """The values of a store, for any number of threads. Arguments and results are JSON."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def run(self, what: str, keys: Sequence[str], given: Json) -> Json:
        """Execute the operation ``what`` on the values of ``keys``. Return its result.

        ``given``: the value of "set", the amount of "add", and the expected and the desired value of "compare_set".
        """
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

    def answer(self, channel: AuthenticatedChannel) -> None:
        """Answer the requests of another process, until it closes the connection."""
        while True:
            request = channel.receive()
            answer = self.run(request["what"], request["keys"], request["given"])
            channel.send({"answer": answer, "number": request["number"]})


class _Store:
    """The methods of a store. ``watch`` is called during waits, and may end them by an error.

    ``timeout``: how long ``wait`` waits by default. ``limit_s``: how long an answer may take. Methods raise a
    ``RuntimeError``, as those of torch's stores do. Its text begins with "Timeout: " or "Lost: ".
    """

    watch: Callable[[], None]
    timeout = timedelta(minutes=30)
    limit_s: float

    def _run(self, what: str, keys: Sequence[str], given: Json = None) -> Json:
        raise NotImplementedError

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._run("set", [key], value.decode(_TEXT))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for values, and return them."""
        values: list[str] = []
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            while None in (stored := self._run("get", batch)):
                self.wait(batch)
            values += stored
        return [value.encode(_TEXT) for value in values]

    def has_extended_api(self) -> bool:
        """Return whether ``multi_get`` exists."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return int(self._run("add", [key], amount)[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected`` ("" for no value), and return the value that is then stored.

        As a ``TCPStore`` does, return ``expected`` if the key has no value.
        """
        stored = self._run("compare_set", [key], [expected.decode(_TEXT), desired.decode(_TEXT)])[0]
        return expected if stored is None else str(stored).encode(_TEXT)

    def delete_key(self, key: str) -> bool:
        """Delete a value. Return whether there was one."""
        return bool(self._run("delete", [key]))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._run("count", [""]))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._run("check", keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raise a ``RuntimeError`` if this takes longer than ``timeout``."""
        limit_s = (timeout or self.timeout).total_seconds()
        deadline = time.monotonic() + limit_s
        while not self._run("wait", keys):
            self.watch()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timeout: {', '.join(keys)} were not stored within {limit_s:g} s")


class StoreClient(_Store):
    """A store that this process serves at ``port``, or a connection to the store of another process."""

    def __init__(
        self,
        key: bytes,
        address: str = "",
        port: int = 0,
        watch: Callable[[], None] = lambda: None,
        *,
        serve_at: str = "",
        ranks: int = 0,
        connection: socket.socket | None = None,
    ) -> None:
        """Serve a store, unless ``address`` or ``connection`` is given.

        With an address, connect to the store there. With a connection to a store, use it, and close it at the end. For
        ``watch`` see ``_Store``. ``serve_at``: the address at which to serve; "" means all addresses of this host.
        ``port``: 0 means a free port. ``ranks``: how many processes may connect at the same time, besides
        ``MOST_UNKNOWN`` unknown programs.

        Raises:
          OSError: the store cannot be reached, or this process cannot listen there.
        """
        super().__init__()
        self._key, self.watch, self.limit_s = key, watch, LIMIT_S
        self._lock, self._number = threading.Lock(), 0  # of the latest request
        self._connection: socket.socket | None = None
        self._channel: AuthenticatedChannel | None = None  # from the first request on
        self._is_late = False  # whether the answer to the latest request has not arrived in time
        self._listener: Listener | None = None
        if address or connection:
            self._connection = connection or socket.create_connection((address, port), CONNECT_S)
            self.port = port
            self._end = weakref.finalize(self, self._connection.close)
        else:
            self._table = _Table()
            listener = self._listener = Listener(
                key, self._table.answer, most_unknown=MOST_UNKNOWN + ranks, port=port, address=serve_at
            )
            self.port = listener.port
            self._end = weakref.finalize(self, listener.close)

    @property
    def refused(self) -> int:
        """How many programs have connected to the store that this process serves, and have sent a wrong proof."""
        return 0 if self._listener is None else self._listener.refused

    def close(self) -> None:
        """Close the connection, or stop serving the store."""
        self._end()

    def answers_again(self) -> bool:
        """Return whether the answer to a request that has timed out has arrived, or that to a later one."""
        if not self._is_late or self._connection is None or self._connection.fileno() < 0:
            return not self._is_late
        arrived = select.poll()
        arrived.register(self._connection, select.POLLIN)
        return bool(arrived.poll(0))

    def _run(self, what: str, keys: Sequence[str], given: Json = None) -> Json:
        """Execute an operation, in this process or in the one that serves the store. See ``_Table.run``."""
        if self._connection is None:
            return self._table.run(what, keys, given)
        try:
            with self._lock:
                self._number += 1
                request = {"what": what, "keys": list(keys), "given": given, "number": self._number}
                channel = self._channel = self._channel or self._open(self._connection)
                channel.send(request)
                while True:
                    self._wait_for_answer(self._connection)
                    answer = channel.receive(time.monotonic() + self.limit_s)
                    if answer["number"] == self._number:  # not the answer to a request that has timed out
                        self._is_late = False
                        return answer["answer"]
        except ReductionError:  # what ``watch`` raises
            raise
        except (OSError, ValueError, EOFError) as error:
            self._is_late = isinstance(error, TimeoutError)
            kind = "Timeout" if self._is_late else "Lost"
            raise RuntimeError(f"{kind}: the rank that serves the store does not answer: {error}") from None

    def _open(self, connection: socket.socket) -> AuthenticatedChannel:
        """Return a channel over a new connection. If this fails, close the connection."""
        deadline = time.monotonic() + self.limit_s
        try:
            return open_channel(connection, self._key, deadline, lambda: self._wait_for_answer(connection))
        except BaseException:
            connection.close()  # half a handshake cannot be continued
            raise

    def _wait_for_answer(self, connection: socket.socket) -> None:
        """Wait until an answer begins to arrive, and call ``watch`` meanwhile. After ``limit_s``, raise an error."""
        deadline, arrived = time.monotonic() + self.limit_s, select.poll()
        arrived.register(connection, select.POLLIN)
        while not arrived.poll(_WATCH_S * 1e3):
            self.watch()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self.limit_s:g} s")


class StorePart(_Store):
    """A store whose keys begin with ``prefix`` in another store."""

    def __init__(self, store: StoreClient, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def limit_waits(self, seconds: float) -> None:
        """Let each wait for an answer of the store fail after some seconds."""
        self._store.limit_s = seconds

    def answers_again(self) -> bool:
        """See ``StoreClient``."""
        return self._store.answers_again()

    def watch(self) -> None:
        """Call the ``watch`` of the store."""
        self._store.watch()

    def _run(self, what: str, keys: Sequence[str], given: Json = None) -> Json:
        return self._store._run(what, [self._prefix + key for key in keys], given)
