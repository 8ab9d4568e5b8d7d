"""A rendezvous that uses a ``torch.distributed`` store.

Input: the store of a process group. Output: see ``ranks.connections.rendezvous``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import torch.distributed as dist

from ..errors import MismatchError, encoded, rank_list
from ..ranks.connections import rendezvous
from ..ranks.connections.rendezvous import MET, StoreRendezvous
from ..ranks.connections.store import LIMIT_S, StoreClient

_MOST_APPENDED: Final = 64  # ranks whose payloads are one value, which each query returns
_CONNECT_S: Final = 0.1  # how long a query waits for a new connection to a store that answers again
_RECORD: Final = struct.Struct("<II")  # before each payload: the rank, and how many bytes follow
_CLOSED: Final = "the connection was closed at the other end"
# The requests of torch's own client in the byte order of the machine: the kind in one byte, and texts after their
# lengths. The first request is a constant.
_LENGTH: Final = struct.Struct("=Q")
_VALIDATE: Final = struct.pack("=BI", 0, 0x3C85F7CE)
_SET, _COMPARE_SET, _GET, _CHECK, _DELETE, _APPEND, _MULTI_GET = 1, 2, 3, 5, 8, 9, 10
_YES, _NO = b"\0", b"\1"


class PeerStore(StoreClient, dist.Store):  # type: ignore[misc]
    """A ``StoreClient`` as a store for ``torch.distributed``.

    Unlike a ``TCPStore``, it looks up no host names, and a wait for a stopped process can be ended.
    """

    timeout = dist.Store.timeout  # ``set_timeout`` changes it
    deleteKey, getNumKeys = StoreClient.delete_key, StoreClient.num_keys  # noqa: N815 - the trampolines' names


class TorchRendezvous(StoreRendezvous):
    """A rendezvous of ``size`` ranks. It uses keys of a store that no other code uses."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        global_ranks: Sequence[int] = (),
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """``store``: a ``PrefixStore`` of its own. For the other arguments see ``StoreRendezvous``."""
        with lost_store_errors(store):
            own, self._limited = _with_own_connection(store, timeout_s)
        super().__init__(own, rank, size, timeout_s, global_ranks, watch)
        numbers = self._global_ranks
        self.owner = numbers.index(0) if _owner(store) == 0 and 0 in numbers else None
        self._require_same_ranks()

    def _require_same_ranks(self) -> None:
        """Raise a ``MismatchError``, on all ranks, if another rank makes this group of other ranks."""
        numbers, own, first = self._global_ranks, self._global_ranks[self.rank], ""
        ranks = f"{self.size} {blake2b(repr(numbers).encode(), digest_size=8).hexdigest()}"
        with contextlib.suppress(RuntimeError):  # a store that is written in Python may lack this
            first = bytes(self._store.compare_set("ranks", b"", f"{ranks} {own}".encode())).decode()
        theirs, _, other = first.rpartition(" ")
        if theirs in ("", ranks):
            return
        size = theirs.split()[0]
        problem = f"the group has {self.size} ranks on rank {own} and {size} on rank {other}."
        if size == str(self.size):
            problem = f"the group has other ranks on rank {own} than on rank {other}."
        remedy = "the same world_size, or WORLD_SIZE, on all ranks; the same ranks in each call of new_group"
        error = MismatchError.of(problem, f"{rank_list(numbers)} on rank {own}", remedy)
        if self.publish_abort(encoded(error)) != MET:
            self._raise_cause()
        raise error

    def _have_arrived(self, keys: list[str]) -> bool:
        """Return whether the store has values for all keys. A ``PeerStore`` waits a moment for them."""
        if isinstance(self._limited, PeerStore):
            return super()._have_arrived(keys)
        return bool(self._store.check(keys))

    def _gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks in call ``_calls``: with few queries if all values fit into one answer."""
        if not isinstance(self._limited, _SharedStore) or self.size > _MOST_APPENDED:
            return super()._gather(payload)
        key, found = str(self._calls), dict[int, bytes]()
        self._store.append(key, _RECORD.pack(self.rank, len(payload)) + payload)
        if self.rank == 0 and self._calls > 2:  # all ranks have begun the previous call, and so read the one before it
            self._store.delete_key(str(self._calls - 2))

        def have_arrived() -> bool:
            value, at = bytes(self._store.get(key)), 0
            while at < len(value):
                rank, nbytes = _RECORD.unpack_from(value, at)
                at += _RECORD.size + nbytes
                found[rank] = value[at - nbytes : at]
            return len(found) == self.size

        self._wait_for(have_arrived, lambda: [rank for rank in range(self.size) if rank not in found])
        return [found[rank] for rank in range(self.size)]

    def _limit_waits(self, seconds: float) -> None:
        if self._limited is not None:
            self._limited.limit_s = seconds

    def _answers_again(self) -> bool:
        return self._limited is not None and self._limited.answers_again()

    def _store_errors(self) -> AbstractContextManager[None]:
        return lost_store_errors(self._store)


class _Connection:
    """A connection to a ``TCPStore``, which the groups of this process share.

    It sends the requests that torch's own client sends. That client prints the stack of its C++ functions if the store
    ends during a call, and waits without a limit for a store that does not answer.
    """

    _socket: Any = None

    def __init__(self, address: Any, limit_s: float) -> None:
        """Connect to the store at ``address``: a name in bytes, which may be longer than those in texts, and a port.

        This takes at most about ``limit_s`` seconds.

        Raises:
          OSError: the store cannot be reached. An ``EOFError``: it does not understand the requests.
        """
        self._address, self._lock, self._error, self._busy = address, threading.RLock(), "", False
        self._connect(limit_s)

    def _connect(self, limit_s: float) -> None:
        connection = socket.create_connection(self._address, limit_s)
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_VALIDATE + _request(_CHECK, [b""], counts=True))
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = connection.recv(1)
            if answer not in (_YES, _NO):
                raise EOFError("the store does not understand the request")
            stack.pop_all()
        self.close()
        self._socket, self._error, self._arrived = connection, "", select.poll()
        self._arrived.register(connection, select.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()

    __del__ = close

    def call(self, request: bytes, limit_s: float, values: int = 0, nbytes: int = 0) -> list[bytes]:
        """Send a request. Return the answer: ``values`` texts with their lengths, or one of ``nbytes`` bytes.

        The answer may take ``limit_s`` seconds. After an error, all calls raise it, as a ``RuntimeError``, until a late
        answer has arrived. A call within another one, by a signal handler or a destructor, uses a new connection.
        """
        if not self._lock.acquire(timeout=limit_s):
            raise RuntimeError(_late(limit_s))
        was_busy, self._busy = self._busy, True
        try:
            if was_busy:
                return _Connection(self._address, limit_s).call(request, limit_s, values, nbytes)
            return self._ask(request, limit_s, values, nbytes)
        except (OSError, EOFError) as error:
            raise RuntimeError(_late(limit_s) if isinstance(error, TimeoutError) else str(error)) from None
        finally:
            self._busy = was_busy
            self._lock.release()

    def _ask(self, request: bytes, limit_s: float, values: int, nbytes: int) -> list[bytes]:
        """Send a request and return the answer. See ``call``."""
        self.answers_again()
        self.require_usable()
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(request)
            return [self._read(nbytes or _LENGTH.unpack(self._read(8))[0]) for _ in range(values or bool(nbytes))]
        except OSError as error:
            self._error = _late(limit_s) if isinstance(error, TimeoutError) else str(error)
            raise
        except BaseException:  # such as a KeyboardInterrupt; the answer must not be taken for the next one
            self._error = "a call was interrupted"
            with contextlib.suppress(OSError, EOFError):
                self._connect(limit_s)
            raise

    def _read(self, nbytes: int) -> bytes:
        """Return the next bytes of an answer."""
        data = b""
        while len(data) < nbytes:
            if not (part := self._socket.recv(nbytes - len(data))):
                raise ConnectionResetError(_CLOSED)
            data += part
        return data

    def require_usable(self) -> None:
        """Raise a ``RuntimeError`` if the store has ended, or after an earlier error.

        A later answer could be that to an earlier request.
        """
        with self._lock:
            if self._error:
                raise RuntimeError(self._error)
            self.require_open()

    def require_open(self) -> None:
        """Raise a ``RuntimeError`` if the store has ended. A call that is under way notices this itself."""
        if self._lock.acquire(blocking=False):
            try:
                if self._unread() == b"":
                    self._error = _CLOSED
                    raise RuntimeError(self._error)
            finally:
                self._lock.release()

    def answers_again(self) -> bool:
        """Return whether the store can be used. If the answer to a call that has timed out has arrived, connect again.

        This takes less than a second, also if the store does not answer again.
        """
        with self._lock:
            if self._error and self._unread():
                with contextlib.suppress(OSError, EOFError):
                    self._connect(_CONNECT_S)
            return not self._error

    def _unread(self) -> bytes | None:
        """Return what has arrived since the last call, or ``None`` if nothing has.

        It is the end of the connection, "", or the beginning of the answer to a call that has timed out.
        """
        if not self._arrived.poll(0):
            return None
        try:
            return bytes(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return b""


class _SharedStore:
    """A ``TCPStore`` whose keys begin with ``prefix``, over a shared connection, with the methods that are used here.

    ``limit_s``: how long an answer may take.
    """

    def __init__(self, connection: _Connection, prefix: str, limit_s: float) -> None:
        self.connection, self._prefix, self.limit_s = connection, f"/{prefix}", limit_s
        self.answers_again = connection.answers_again

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._run(_SET, [key], value)

    def append(self, key: str, value: bytes) -> None:
        """Append to a value, which is empty at first."""
        self._run(_APPEND, [key], value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See ``ranks.connections.store``."""
        return self._run(_COMPARE_SET, [key], expected, desired, values=1)[0]

    def get(self, key: str) -> bytes:
        """Return a value, which must be stored."""
        return self._run(_GET, [key], values=1)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, which must be stored."""
        return self._run(_MULTI_GET, keys, values=len(keys), counts=True)

    def has_extended_api(self) -> bool:
        """Return whether ``multi_get`` exists."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._run(_CHECK, keys, nbytes=1, counts=True) == [_YES]

    def delete_key(self, key: str) -> bool:
        """Delete a value. Return whether there was one."""
        return any(self._run(_DELETE, [key], nbytes=8)[0])

    def _run(
        self, kind: int, keys: Sequence[str], *given: bytes, values: int = 0, nbytes: int = 0, counts: bool = False
    ) -> list[bytes]:
        texts = [*((self._prefix + key).encode() for key in keys), *given]
        return self.connection.call(_request(kind, texts, counts), self.limit_s, values, nbytes)


def _late(limit_s: float) -> str:
    return f"Timeout: waited {limit_s:g} s"


def _request(kind: int, texts: Sequence[bytes], counts: bool) -> bytes:
    """Return a request. ``counts``: whether it begins with the number of texts."""
    parts = [part for text in texts for part in (_LENGTH.pack(len(text)), text)]
    return b"".join([bytes([kind]), *[_LENGTH.pack(len(texts))][:counts], *parts])


_CONNECTIONS: Final[weakref.WeakValueDictionary[tuple[int, str, int], _Connection]] = weakref.WeakValueDictionary()


def _key(base: Any) -> tuple[int, str, int]:
    return os.getpid(), base.host, base.port


def _connection(base: Any, timeout_s: float) -> _Connection:
    """Return this process's connection to the store of ``base``: a new one if there is none, or it does not work."""
    connection = _CONNECTIONS.get(_key(base))
    with contextlib.suppress(RuntimeError):
        if connection is not None:
            connection.require_usable()
            return connection
    try:
        connection = _Connection((base.host.encode(), base.port), min(base.timeout.total_seconds(), timeout_s / 4))
    except OSError as error:
        raise RuntimeError(str(error)) from error
    _CONNECTIONS[_key(base)] = connection
    return connection


def _with_own_connection(store: Any, timeout_s: float) -> tuple[Any, _SharedStore | PeerStore | None]:
    """Return a store for a rendezvous, if possible with a connection that the user does not use.

    The second result has the attribute ``limit_s``: how long an answer may take. It is ``None`` if that has no limit.

    Calls on one connection run one after another, and a user's call may take minutes. If the store has ended, this
    function raises an error in less than ``timeout_s`` seconds. Calls of the returned store take at most ``timeout_s``
    and at most ``LIMIT_S`` seconds, even if the store's host does not answer. This suffices, since no call waits for
    other ranks in the store. A ``PeerStore`` needs none of this: the function returns it twice, unchanged.
    """
    if not hasattr(store, "clone"):
        return store, None
    base = _base(store)
    if isinstance(base, PeerStore):
        return store, base
    if isinstance(base, dist.TCPStore):
        with contextlib.suppress(EOFError):  # a later version of torch may send other requests
            connection = _connection(base, timeout_s)
            name = store.compare_set("name", "", secrets.token_hex(8))  # all ranks get that of the first one
            own = _SharedStore(connection, f"crossreduce/{bytes(name).decode()}/", min(timeout_s, LIMIT_S))
            return own, own
    try:
        return _cloned(store, min(store.timeout, timedelta(seconds=timeout_s / 4))), None
    except RuntimeError as error:
        if "pure virtual" in str(error):  # a store that is written in Python cannot be cloned
            return store, None
        raise


def _cloned(store: Any, limit: timedelta) -> Any:
    """Return ``store.clone()``, which tries to connect for up to 3 times ``limit``."""
    timeout = store.timeout
    try:
        store.set_timeout(limit)
        own = store.clone()
    finally:
        store.set_timeout(timeout)
    own.set_timeout(timeout)
    return own


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _owner(store: Any) -> int | None:
    """Return 0 if rank 0 of the world probably runs the store, or else ``None``."""
    base = _base(store)
    served = isinstance(base, PeerStore) or (isinstance(base, (dist.TCPStore, _SharedStore)) and not _has_launcher())
    return 0 if served else None


def _has_launcher() -> bool:
    """Return whether torchrun has started this process and runs the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class CancellableStore(dist.Store):  # type: ignore[misc]
    """A store for gloo. The event ``cancelled`` ends gloo's waits for the addresses of other ranks."""

    def __init__(self, store: Any, cancelled: threading.Event) -> None:
        super().__init__()
        self._store, self._cancelled = store, cancelled

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, for which the caller has waited."""
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], _timeout: Any = None) -> None:
        """Wait until the store has all values. There is no timeout here: the caller sets ``cancelled``."""
        rendezvous.wait(self._store, keys, self._cancelled)


def lost_store_errors(store: Any) -> AbstractContextManager[None]:
    """Return a context that raises a ``PeerLostError`` if ``store`` cannot be reached; if it has ended, now."""
    ranks = [0] if _owner(store) == 0 else []
    owner = "rank 0, which runs it," if ranks else "torchrun, which runs it,"
    context = partial(
        rendezvous.lost_store_errors, owner if ranks or _has_launcher() else "the process that runs it", ranks
    )
    base = _base(store)
    connection = base.connection if isinstance(base, _SharedStore) else None
    if isinstance(base, dist.TCPStore):
        connection = _CONNECTIONS.get(_key(base))
    if connection is not None:
        with context():
            connection.require_open()
    return context()
