"""A rendezvous that uses a ``torch.distributed`` store.

Input: the store of a process group. Output: see ``ranks.connections.rendezvous``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ..errors import MismatchError, encoded, rank_list
from ..ranks.connections import rendezvous
from ..ranks.connections.rendezvous import MET, StoreRendezvous
from ..ranks.connections.store import LIMIT_S
from .peer_store import PeerStore

_LOOK_S: Final = 1.0  # between two checks whether other ranks use gloo


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
        if isinstance(self._connection, PeerStore):
            return super()._have_arrived(keys)
        return bool(self._store.check(keys))

    def _limit_waits(self, seconds: float) -> None:
        _limit_waits(self._connection, seconds)

    def _store_errors(self) -> AbstractContextManager[None]:
        return lost_store_errors(self._store)


def gloo_check(store: Any, rank: int, size: int, global_ranks: Sequence[int]) -> Callable[[], None]:
    """Return a function that raises a ``MismatchError`` if other ranks make a group with gloo.

    ``store``: the store of the group, in which gloo publishes where each rank listens. ``global_ranks``: the ranks'
    numbers in errors, by default 0, 1, ...
    """
    numbers, look_at = tuple(global_ranks) or range(size), 0.0

    def check() -> None:
        nonlocal look_at
        if (now := time.monotonic()) < look_at:
            return
        look_at = now + _LOOK_S
        gloo: list[int] = []
        with contextlib.suppress(RuntimeError):  # a lost store, which the caller notices, too
            gloo = [number for place, number in enumerate(numbers) if store.check([f"0/{place}"])]
        if gloo and numbers[rank] not in gloo:  # otherwise an earlier group of this name may have used gloo
            problem = f"not all ranks make the group with the same backend: gloo on {rank_list(gloo)}."
            raise MismatchError.of(problem, f"crossreduce on rank {numbers[rank]}", "the same backend on all ranks")

    return check


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
            with contextlib.suppress(OSError):  # a descriptor that was closed meanwhile, such as the directory's
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
