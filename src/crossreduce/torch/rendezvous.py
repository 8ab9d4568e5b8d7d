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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ..errors import MismatchError, encoded, rank_list
from ..ranks.connections import rendezvous
from ..ranks.connections.rendezvous import MET, StoreRendezvous
from ..ranks.connections.store import LIMIT_S, StoreClient

_MOST_APPENDED: Final = 64  # ranks whose payloads are one value, which each query returns
_CONNECT_S: Final = 0.1  # how long a query waits for a new connection to a store that answers again
_RECORD: Final = struct.Struct("<II")  # before each payload: the rank, and how many bytes follow
# From the end of one connection of a process that dies to the end of another one, on a machine with many processes. The
# longer time is for a rank that runs the store.
_END_S: Final = (0.05, 0.5)


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
        self._awaited_s = 0.0
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

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:
        """Store that ``ranks`` are alive. See ``Rendezvous``."""
        present = list(ranks)
        self._await_end(self.owner is not None and self.owner not in present)
        return super().roll_call(present, timed_out)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has stored that it leaves the group."""
        self._await_end(rank == self.owner)
        return super().has_left(rank)

    def _await_end(self, is_owner: bool) -> None:
        """After a failure, wait a moment for the end of the store, which may be a part of it.

        ``is_owner``: whether the rank that runs the store has failed.
        """
        if self._awaited_s < (limit_s := _END_S[is_owner]) and isinstance(self._limited, _SharedStore):
            self._limited.await_end(limit_s - self._awaited_s)
            self._awaited_s = limit_s

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

    Each new connection takes seconds if host names cannot be resolved, also on the rank that serves the store.
    """

    def __init__(self, base: Any, timeout_s: float) -> None:
        """Connect to the store of ``base``. If it has ended, raise an error in less than ``timeout_s`` seconds."""
        limit, earlier = min(base.timeout, timedelta(seconds=timeout_s / 4)), _sockets()
        addresses = {address for address in map(_peer, earlier.values()) if address and address[1] == base.port}
        if len(addresses) == 1:  # that of ``base``: with it, the host name need not be resolved again
            ((host, port),) = addresses
            self.store = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False)
            self.store.set_timeout(base.timeout)
        else:
            self.store = _cloned(base, limit)
        new = [descriptor for link, descriptor in _sockets().items() if link not in earlier]
        self._descriptor = next((each for each in new if (_peer(each) or ("", 0))[1] == base.port), None)
        self._lock, self._limit_s, self._error = threading.RLock(), 0.0, ""
        self._arrived = select.poll()
        if self._descriptor is not None:
            self._arrived.register(self._descriptor, select.POLLIN)

    def call(self, method: Callable[..., Any], limit_s: float, *arguments: Any) -> Any:
        """Call a method of the store. Its answer may take ``limit_s`` seconds. After an error, all calls raise it."""
        with self._lock:
            self.require_usable()
            if limit_s != self._limit_s and self._descriptor is not None:
                _limit_waits(self._descriptor, limit_s)
                self._limit_s = limit_s
            try:
                return method(*arguments)
            except RuntimeError as error:
                self._error = str(error)
                raise

    def require_usable(self) -> None:
        """Raise a ``RuntimeError`` if the store has ended, or after an earlier error.

        A later answer could be that to an earlier request.
        """
        with self._lock:
            if self._error:
                raise RuntimeError(self._error)
            self.require_open()

    def require_open(self, wait_s: float = 0.0) -> None:
        """Raise a ``RuntimeError`` if the store has ended, or ends within ``wait_s`` seconds.

        A call would print the stack of torch's C++ functions.
        """
        with self._lock:
            if self._unread(wait_s) == b"":
                self._error = "the connection was closed at the other end"
                raise RuntimeError(self._error)

    def has_answered(self) -> bool:
        """Return whether the answer to a call that has timed out has arrived."""
        return bool(self._unread(0.0))

    def _unread(self, wait_s: float) -> bytes | None:
        """Return what has arrived since the last call, or arrives within ``wait_s`` seconds. Nothing has: ``None``.

        It is the end of the connection, "", or the beginning of the answer to a call that has timed out.
        """
        if self._descriptor is None or not self._arrived.poll(wait_s * 1e3):
            return None
        try:
            with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""


class _SharedStore:
    """A store whose keys begin with ``prefix``, over a shared connection. ``limit_s``: how long an answer may take."""

    def __init__(self, connection: _Connection, prefix: str, limit_s: float) -> None:
        self.limit_s, self._prefix = limit_s, prefix
        self._connecting: threading.Thread | None = None
        self._connected: list[_Connection] = []  # what that thread has made
        self._use(connection)

    def _use(self, connection: _Connection) -> None:
        self._connection, self.underlying_store = connection, connection.store
        self._store = dist.PrefixStore(self._prefix, connection.store)

    def answers_again(self) -> bool:
        """Return whether the store answers after a call that has timed out. Then it is used over a new connection.

        A thread connects, since torch waits without a limit for a store that does not answer.
        """
        if not self._connected and self._connection.has_answered():
            if self._connecting is None or not self._connecting.is_alive():
                self._connecting = threading.Thread(target=self._connect, name="crossreduce store", daemon=True)
                self._connecting.start()
            self._connecting.join(_CONNECT_S)
        if self._connected:
            self._use(self._connected.pop())
            return True
        return False

    def _connect(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._connected.append(_connection(self.underlying_store, self.limit_s))

    def await_end(self, wait_s: float) -> None:
        """Wait for the end of the store, since the connection of its process to this one was lost before."""
        with contextlib.suppress(RuntimeError):  # the next call raises it, too
            self._connection.require_open(wait_s)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return lambda *arguments: self._connection.call(method, self.limit_s, *arguments)


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
    connection = _CONNECTIONS[_key(base)] = _Connection(base, timeout_s)
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


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Return the address to which an internet socket is connected, or ``None``, also for an address with a scope."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port, *more = connection.getpeername()
            return None if any(more[1:]) else (host, port)
    return None


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by their names in /proc. Without /proc there are none."""
    links = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # a descriptor that has been closed, such as the directory's
                links[str(entry.readlink())] = int(entry.name)
    return {link: descriptor for link, descriptor in links.items() if link.startswith("socket:")}


def _limit_waits(descriptor: int, seconds: float) -> None:
    """Set the time limit of each wait for data of a socket."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _owner(store: Any) -> int | None:
    """Return 0 if rank 0 of the world probably runs the store, or else ``None``."""
    base = _base(store)
    served = isinstance(base, PeerStore) or (isinstance(base, dist.TCPStore) and not _has_launcher())
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
    if isinstance(base, dist.TCPStore) and (connection := _CONNECTIONS.get(_key(base))) is not None:
        with context():
            connection.require_open()
    return context()
