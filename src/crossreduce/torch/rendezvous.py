"""A rendezvous that uses a ``torch.distributed`` store.

Input: the store of a process group. Output: see ``ranks.connections.rendezvous``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..ranks.connections import rendezvous
from ..ranks.connections.rendezvous import StoreRendezvous
from ..ranks.connections.store import LIMIT_S, StoreClient


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
            own, self._connection = _with_own_connection(store, timeout_s)
        super().__init__(own, rank, size, timeout_s, global_ranks, watch)
        numbers = self._global_ranks
        self.owner = numbers.index(0) if _owner(store) == 0 and 0 in numbers else None

    def _have_arrived(self, keys: list[str]) -> bool:
        """Return whether the store has values for all keys. A ``PeerStore`` waits a moment for them."""
        if isinstance(self._connection, PeerStore):
            return super()._have_arrived(keys)
        return bool(self._store.check(keys))

    def _limit_waits(self, seconds: float) -> None:
        _limit_waits(self._connection, seconds)

    def _store_errors(self) -> AbstractContextManager[None]:
        return lost_store_errors(self._store)


def _with_own_connection(store: Any, timeout_s: float) -> tuple[Any, int | PeerStore | None]:
    """Return a store with the same data, if possible with a connection of its own, and the connection's descriptor.

    Calls on one connection run one after another, and a user's call may take minutes. If the store has ended, this
    function raises an error in less than ``timeout_s`` seconds. Calls of the returned store take at most ``timeout_s``
    and at most ``LIMIT_S`` seconds, even if the store's host does not answer. This suffices, since no call waits for
    other ranks in the store. A ``PeerStore`` needs none of this: the function returns it twice, unchanged.
    """
    if not hasattr(store, "clone"):
        return store, None
    if isinstance(base := _base(store), PeerStore):
        return store, base
    timeout, earlier_sockets = store.timeout, _sockets()
    try:
        # ``clone`` tries to connect for up to 3 times the timeout of the store.
        store.set_timeout(min(timeout, timedelta(seconds=timeout_s / 4)))
        own = store.clone()
    except RuntimeError as error:
        if "pure virtual" in str(error):  # a store that is written in Python cannot be cloned
            return store, None
        raise
    finally:
        store.set_timeout(timeout)
    own.set_timeout(timeout)
    port = getattr(base, "port", None)
    for _, descriptor in _sockets().items() - earlier_sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1] == port:
                _limit_waits(descriptor, min(timeout_s, LIMIT_S))
                return own, descriptor
    return own, None


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by their names in /proc. Without /proc there are none."""
    links = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # a descriptor that has been closed, such as the directory's
                links[str(entry.readlink())] = int(entry.name)
    return {link: descriptor for link, descriptor in links.items() if link.startswith("socket:")}


def _limit_waits(connection: int | PeerStore | None, seconds: float) -> None:
    """Set the time limit of each wait for data of a connection: a ``PeerStore`` or the descriptor of a socket."""
    if isinstance(connection, PeerStore):
        connection.limit_s = seconds
    elif connection is not None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as opened:
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
    """Return a context that raises a ``PeerLostError`` if ``store`` cannot be reached."""
    if _owner(store) == 0:
        return rendezvous.lost_store_errors("rank 0, which runs it,", [0])
    return rendezvous.lost_store_errors("torchrun, which runs it," if _has_launcher() else "the process that runs it")
