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
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from ..errors import MismatchError, encoded, rank_list
from ..ranks.connections import rendezvous
from ..ranks.connections.rendezvous import MET, StoreRendezvous
from ..ranks.connections.store import LIMIT_S, StoreClient
from ..ranks.intra_host.board import Board

_PART: Final = 1 << 14  # bytes that are read at once of an answer
_CONNECT_S: Final = 0.1  # how long a query waits for a new connection to a store that answers again
_WAIT_S: Final = 1e-3  # of a request to wait for values; other threads that use the connection wait as long
_CLOSED: Final = "the connection was closed at the other end"
# The requests of torch's own client in the byte order of the machine: the kind in one byte, and texts after their
# lengths. The first request is a constant.
_LENGTH: Final = struct.Struct("=Q")
_VALIDATE: Final = struct.pack("=BI", 0, 0x3C85F7CE)
_SET, _COMPARE_SET, _GET, _CHECK, _WAIT, _DELETE, _MULTI_GET, _CANCEL_WAIT = 1, 2, 3, 5, 6, 8, 10, 12
_YES, _NO = b"\0", b"\1"  # the answers to a check; also of a wait: stored, and cancelled


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
        unique: str = "",
        board: Board | None = None,
    ) -> None:
        """``store``: a ``PrefixStore`` of its own. For the other arguments see ``StoreRendezvous``.

        ``unique``: a name that no other group has in any store, if all ranks know one. ``board``: where these ranks can
        exchange values, too, in the memory of an older group.
        """
        numbers = tuple(global_ranks) or tuple(range(size))
        self._ranks = f"{size} {blake2b(repr(numbers).encode(), digest_size=8).hexdigest()}"
        text = f"{self._ranks} {numbers[rank]}"
        with lost_store_errors(store):
            own, self._limited, first = _with_own_connection(store, timeout_s, text, unique, board is None)
        super().__init__(own, rank, size, timeout_s, numbers, watch)
        self._errors, self._board = _errors(store), board if isinstance(self._limited, _SharedStore) else None
        self._is_compared, self.is_near = self._board is None, self._board is not None and self._board.is_near
        self.owner = numbers.index(0) if self._errors.ranks and 0 in numbers else None
        self._compare_ranks(first)

    def _compare_ranks(self, first: str) -> None:
        """Raise a ``MismatchError`` on all ranks if a rank, with the text ``first``, makes a group of other ranks."""
        theirs, _, other = first.rpartition(" ")
        if theirs in ("", self._ranks):
            return
        numbers, own = self._global_ranks, self._global_ranks[self.rank]
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
        """Return whether the store has values for all keys. Some stores wait a moment for them."""
        if not self._is_compared:
            self._is_compared, text = True, f"{self._ranks} {self._global_ranks[self.rank]}"
            self._compare_ranks(bytes(self._store.compare_set("ranks", b"", text.encode())).decode())
        if isinstance(self._limited, _SharedStore):
            return self._limited.have_arrived(keys, _WAIT_S)
        return bool(self._store.check(keys)) if self._limited is None else super()._have_arrived(keys)

    def _exchanged(self, payload: bytes) -> list[bytes] | None:
        if self._board is None or not isinstance(self._limited, _SharedStore):
            return None
        return self._board.exchange(f"{self._limited.prefix} {self._ranks} {self._calls}", payload)

    def _limit_waits(self, seconds: float) -> None:
        if self._limited is not None:
            self._limited.limit_s = seconds

    def _answers_again(self) -> bool:
        return self._limited is not None and self._limited.answers_again()

    def _store_errors(self) -> AbstractContextManager[None]:
        return self._errors()


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
        self._socket, self._error, self._received, self._arrived = connection, "", b"", select.poll()
        self._arrived.register(connection, select.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()

    __del__ = close

    def call(
        self, request: bytes, limit_s: float, values: int = 0, nbytes: int = 0, wait_s: float | None = None
    ) -> list[bytes]:
        """Send a request. Return the answer: ``values`` texts with their lengths, or one of ``nbytes`` bytes.

        The answer may take ``limit_s`` seconds. A request to wait is cancelled after ``wait_s`` seconds. After an
        error, all calls raise it, as a ``RuntimeError``, until a late answer has arrived. A call within another one, by
        a signal handler or a destructor, uses a new connection.
        """
        if not self._lock.acquire(timeout=limit_s):
            raise RuntimeError(_late(limit_s))
        was_busy, self._busy = self._busy, True
        try:
            if was_busy:
                return _Connection(self._address, limit_s).call(request, limit_s, values, nbytes, wait_s)
            return self._ask(request, limit_s, values, nbytes, wait_s)
        except (OSError, EOFError) as error:
            raise RuntimeError(_late(limit_s) if isinstance(error, TimeoutError) else str(error)) from None
        finally:
            self._busy = was_busy
            self._lock.release()

    def _ask(self, request: bytes, limit_s: float, values: int, nbytes: int, wait_s: float | None) -> list[bytes]:
        """Send a request and return the answer. See ``call``."""
        self.answers_again()
        self.require_usable()
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(request)
            if cancels := wait_s is not None and not self._arrived.poll(wait_s * 1e3):
                self._socket.sendall(bytes([_CANCEL_WAIT]))
            read = [self._read(nbytes or _LENGTH.unpack(self._read(8))[0]) for _ in range(values or bool(nbytes))]
            if cancels and read == [_YES]:  # stored just before the store has read the request to cancel
                self._read(1)
        except OSError as error:
            self._error = _late(limit_s) if isinstance(error, TimeoutError) else str(error)
            raise
        except BaseException:  # such as a KeyboardInterrupt; the answer must not be taken for the next one
            self._error = "a call was interrupted"
            with contextlib.suppress(OSError, EOFError):
                self._connect(limit_s)
            raise
        return read

    def _read(self, nbytes: int) -> bytes:
        """Return the next bytes of an answer."""
        while len(self._received) < nbytes:
            if not (part := self._socket.recv(max(nbytes - len(self._received), _PART))):
                raise ConnectionResetError(_CLOSED)
            self._received += part
        data, self._received = self._received[:nbytes], self._received[nbytes:]
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
        self.connection, self.prefix, self.limit_s = connection, f"/{prefix}", limit_s
        self.answers_again = connection.answers_again

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._run(_SET, [key], value)

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

    def have_arrived(self, keys: Sequence[str], wait_s: float) -> bool:
        """Wait until all keys have values, for at most ``wait_s`` seconds. Return whether they have."""
        return self._run(_WAIT, keys, nbytes=1, counts=True, wait_s=wait_s) == [_YES]

    def delete_key(self, key: str) -> bool:
        """Delete a value. Return whether there was one."""
        return any(self._run(_DELETE, [key], nbytes=8)[0])

    def _run(self, kind: int, keys: Sequence[str], *given: bytes, counts: bool = False, **answer: Any) -> list[bytes]:
        """Send a request. For ``answer`` see ``_Connection.call``."""
        texts = [*((self.prefix + key).encode() for key in keys), *given]
        return self.connection.call(_request(kind, texts, counts), self.limit_s, **answer)


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


def _with_own_connection(
    store: Any, timeout_s: float, text: str, unique: str = "", compares: bool = True
) -> tuple[Any, _SharedStore | PeerStore | None, str]:
    """Return a store for a rendezvous, if possible with a connection that the user does not use.

    The second result has the attribute ``limit_s``: how long an answer may take. It is ``None`` if that has no limit.
    The third one is the ``text`` of the first rank, or "" if the store cannot tell it, or not ``compares``. For
    ``unique`` see ``TorchRendezvous``.

    Calls on one connection run one after another, and a user's call may take minutes. If the store has ended, this
    function raises an error in less than ``timeout_s`` seconds. Calls of the returned store take at most ``timeout_s``
    and at most ``LIMIT_S`` seconds, even if the store's host does not answer. This suffices, since no call waits for
    other ranks in the store. A ``PeerStore`` needs none of this: the function returns it twice, unchanged.
    """
    base, own, limited = _base(store), store, None
    if isinstance(base, dist.TCPStore):
        with contextlib.suppress(EOFError):  # a later version of torch may send other requests
            connection = _connection(base, timeout_s)
            if unique:
                own = _SharedStore(connection, f"crossreduce/{unique}/", min(timeout_s, LIMIT_S))
                return own, own, own.compare_set("ranks", b"", text.encode()).decode() if compares else ""
            first = bytes(store.compare_set("name", "", f"{secrets.token_hex(8)} {text}")).decode()
            name, _, text = first.partition(" ")  # all ranks get those of the first one
            own = _SharedStore(connection, f"crossreduce/{name}/", min(timeout_s, LIMIT_S))
            return own, own, text
    if isinstance(base, PeerStore):
        limited = base
    elif hasattr(store, "clone"):
        try:
            own = _cloned(store, min(store.timeout, timedelta(seconds=timeout_s / 4)))
        except RuntimeError as error:
            if "pure virtual" not in str(error):  # a store that is written in Python cannot be cloned
                raise
    with contextlib.suppress(RuntimeError):  # a store that is written in Python may lack this
        return own, limited, bytes(own.compare_set("ranks", b"", text.encode())).decode()
    return own, limited, ""


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


class _Errors(NamedTuple):
    """Makes contexts that raise a ``PeerLostError`` if a store cannot be reached; if it has ended, now.

    ``ranks``: rank 0 of the world if it probably runs the store. ``owner``: the process that does, in errors.
    """

    connection: _Connection | None
    owner: str
    ranks: list[int]

    def __call__(self) -> AbstractContextManager[None]:
        if self.connection is not None:
            with rendezvous.lost_store_errors(self.owner, self.ranks):
                self.connection.require_open()
        return rendezvous.lost_store_errors(self.owner, self.ranks)


def _errors(store: Any) -> _Errors:
    base = _base(store)
    if isinstance(base, PeerStore):
        return _Errors(None, "rank 0, which runs it,", [0])
    if not isinstance(base, dist.TCPStore):
        return _Errors(None, "the process that runs it", [])
    # torchrun may have started this process, and runs the store.
    has_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    owner, ranks = ("torchrun, which runs it,", []) if has_launcher else ("rank 0, which runs it,", [0])
    return _Errors(_CONNECTIONS.get(_key(base)), owner, ranks)


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
    return _errors(store)()
