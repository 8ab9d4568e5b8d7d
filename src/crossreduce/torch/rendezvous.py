"""A rendezvous at a ``torch.distributed`` store.

Input: the store of a process group. Output: see ``transports.base.Rendezvous``. It waits by polling, so that Ctrl-C
ends a wait. It is used rarely, and not for data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ..errors import CollectiveTimeout, PeerLostError, ReductionError, decoded, encoded, message, rank_list
from .peer_store import LIMIT_S, PeerStore

_CAUSE: Final = "cause"
_PAUSES_S: Final = (0.0002, 0.02)  # between queries, first and longest; a query of a local TCPStore takes 23 us
_QUERY_S: Final = 1.0  # how long a query of a store may take after the communication of the group has failed
_CAUSE_S: Final = 2.0  # the same for a query in an op
_READ_S: Final = 1.0  # how long a rank waits for others to read the cause: its end may be the end of the store


class StoreRendezvous:
    """A rendezvous of ``size`` ranks at keys of a store that no other code uses."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        global_ranks: Sequence[int] = (),
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Use ``store`` (a ``PrefixStore`` of its own), and wait at most ``timeout_s`` seconds for other ranks.

        ``global_ranks``: the ranks' numbers in errors; empty: 0, 1, ... ``watch`` is called during waits, and raises a
        ``ReductionError`` to end them.
        """
        self.watch = watch
        with reaching(store):
            self._store, self._connection = _with_own_connection(store, timeout_s)
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._global_ranks = tuple(global_ranks) or tuple(range(size))
        self._calls = 0
        self.owner = self._global_ranks.index(0) if _owner(store) == 0 and 0 in self._global_ranks else None
        self._failure: ReductionError | None = None
        self._is_quick = False  # whether a query may take ``_CAUSE_S`` only
        self._unreachable: OSError | None = None  # why the store cannot be reached any more
        self._answered: dict[int, bool] = {}  # the known answers to a roll call: whether each rank's wait timed out

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks; see ``Rendezvous``. PeerLostError: the store cannot be reached."""
        if self._failure is not None:  # the store may have ended since it was raised
            raise self._failure
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
        with reaching(self._store):
            self._raise_cause()
            self._store.set(keys[self.rank], b"." + payload)  # some stores do not distinguish empty from missing values
            self._wait_for(keys)
            found = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            payloads = [bytes(value)[1:] for value in found]
            if self._calls > 1:  # every rank has begun this call, so every rank has read the previous one's payloads
                with contextlib.suppress(RuntimeError):  # an old FileStore cannot delete
                    self._store.delete_key(f"{self._calls - 1}/{self.rank}")
        return payloads

    def _wait_for(self, keys: list[str]) -> None:
        deadline, pause = time.monotonic() + self.timeout_s, _PAUSES_S[0]
        while not self._have_arrived(keys):
            self._raise_cause()
            self.watch()
            if time.monotonic() > deadline:
                late = [
                    rank for key, rank in zip(keys, self._global_ranks, strict=True) if not self._store.check([key])
                ]
                if late:
                    problem = f"{rank_list(late)} did not reach the rendezvous within {self.timeout_s:g} s."
                    given = f"rank {self._global_ranks[self.rank]} waited; the group has {self.size} ranks"
                    remedy = "start all ranks; the same calls in the same order on all of them; a longer timeout"
                    error = CollectiveTimeout(message(problem, given, remedy), late)
                    self.publish_abort(encoded(error))
                    self._raise_cause()
                    raise error
                return
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def _have_arrived(self, keys: list[str]) -> bool:
        """Return whether values are there; a ``PeerStore`` waits for them for a moment."""
        if not isinstance(self._connection, PeerStore):
            return bool(self._store.check(keys))
        try:
            self._store.wait(keys, timedelta(seconds=_PAUSES_S[1]))
        except RuntimeError as error:
            if isinstance(error, ReductionError) or "Timeout" not in str(error):
                raise
            return False
        return True

    def _raise_cause(self) -> None:
        """If a rank has published the reason of an abort, raise it once all ranks that can do so have read it."""
        if (cause := self._known_cause()) is None:
            return
        self._failure = error = decoded(cause)
        lost = getattr(error, "ranks", ())
        self._await(self.rank, [rank for rank, number in enumerate(self._global_ranks) if number not in lost])
        raise error

    def _await(self, reader: int, readers: Iterable[int]) -> None:
        """Record that ``reader`` has read the reason of an abort, and wait for ``readers``, for a second at most.

        If ``watch`` raises, the ranks have another way to find out that the group has failed.
        """
        keys, deadline = [f"read/{rank}" for rank in readers], time.monotonic() + _READ_S
        self._query(lambda: self._store.set(f"read/{reader}", b"."))
        with contextlib.suppress(ReductionError):
            while self._query(lambda: self._store.check(keys)) is False and time.monotonic() < deadline:
                self.watch()
                time.sleep(_PAUSES_S[1])

    def publish_abort(self, cause: bytes) -> bytes:
        """Store why the group was aborted; the first reason is kept, and returned."""
        _limit_waits(self._connection, _QUERY_S)
        return bytes(self._query(lambda: self._store.compare_set(_CAUSE, "", cause)) or cause)

    def abort_cause(self) -> bytes | None:
        """Return the stored reason, or ``None``. From now on, the store has to answer quickly, as ranks wait in an op.

        A rank that has lost the link to the store must notice in time that other ranks have aborted the group.
        """
        if not self._is_quick:
            _limit_waits(self._connection, _CAUSE_S)
            self._is_quick = True
        return self._known_cause()

    def _known_cause(self) -> bytes | None:
        found = self._query(lambda: self._store.get(_CAUSE) if self._store.check([_CAUSE]) else None)
        return None if found is None else bytes(found)

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:
        """Store that ``ranks`` are alive; return all ranks of which this is stored. See ``Rendezvous``."""

        def answers() -> dict[int, bool]:
            for rank in set(ranks) - self._answered.keys():
                self._store.compare_set(f"alive/{rank}", "", b"timed out" if timed_out else b".")
            for rank in range(self.size):
                if rank not in self._answered and self._store.check([key := f"alive/{rank}"]):
                    self._answered[rank] = bytes(self._store.get(key)) != b"."
            return dict(self._answered)

        _limit_waits(self._connection, _QUERY_S)
        found: dict[int, bool] | None = self._query(answers)
        if found is None:
            assert self._unreachable is not None
            raise self._unreachable
        return found

    def record_leaving(self) -> None:
        """Store that this rank leaves the group."""
        _limit_waits(self._connection, _QUERY_S)
        self._query(lambda: self._store.set(f"left/{self.rank}", b"."))

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has stored that it leaves the group."""
        _limit_waits(self._connection, _QUERY_S)
        return bool(self._query(lambda: self._store.check([f"left/{rank}"])))

    def announce(self, number: int) -> None:
        """Store that this rank has begun a check of the links."""
        self._query(lambda: self._store.set(f"check/{number}/{self.rank}", b"."))

    def has_announced(self, rank: int, number: int) -> bool:
        """Return whether a rank has stored that it has begun a check of the links."""
        return bool(self._query(lambda: self._store.check([f"check/{number}/{rank}"])))

    def leave(self, reader: int, readers: Iterable[int]) -> None:
        """Record that a host has the reason of an abort; a process that runs the store waits for the other hosts."""
        self._await(reader, readers if self.owner == self.rank else [reader])

    def _query(self, query: Callable[[], Any]) -> Any:
        """Return what ``query`` returns; ``None``: the store cannot be reached, now or earlier."""
        if self._unreachable is None:
            try:
                return query()
            except RuntimeError as error:  # the class of all errors of stores
                kind = TimeoutError if "Timeout" in str(error) else ConnectionError
                self._unreachable = kind(str(error))
        return None


def _with_own_connection(store: Any, timeout_s: float) -> tuple[Any, int | PeerStore | None]:
    """Return a store with a connection of its own, if possible, to the same data, and the connection's descriptor.

    Calls on one connection run one after another, and a user's call may take minutes. If the store has ended, this
    raises in less than ``timeout_s`` seconds; torch tries to connect for up to 3 times the timeout of the store. A call
    takes at most ``timeout_s`` seconds, too, and at most ``LIMIT_S``: this class makes no calls that wait for other
    ranks in the store, and torch waits without limit for a store whose host does not answer. A ``PeerStore`` needs none
    of that.
    """
    if not hasattr(store, "clone"):
        return store, None
    if isinstance(found := _base(store), PeerStore):
        return store, found
    before, opened = store.timeout, _sockets()
    try:
        store.set_timeout(min(before, timedelta(seconds=timeout_s / 4)))
        own = store.clone()
    except RuntimeError as error:
        if "pure virtual" in str(error):  # a store that is written in Python
            return store, None
        raise
    finally:
        store.set_timeout(before)
    own.set_timeout(before)
    port = getattr(_base(store), "port", None)
    for _, descriptor in _sockets().items() - opened.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            if found.getpeername()[1] == port:
                _limit_waits(descriptor, min(timeout_s, LIMIT_S))
                return own, descriptor
    return own, None


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by their names in the system; empty if it has no list."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed in the meantime, such as the list's own one
                found[str(entry.readlink())] = int(entry.name)
    return {link: descriptor for link, descriptor in found.items() if link.startswith("socket:")}


def _limit_waits(connection: int | PeerStore | None, seconds: float) -> None:
    """Let each wait for data of a connection fail after some seconds."""
    if isinstance(connection, PeerStore):
        connection.limit_s = seconds
    elif connection is not None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _base(store: Any) -> Any:
    """Return the store without its prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _owner(store: Any) -> int | None:
    """Return the rank of the world whose process probably runs a store, or ``None``: another process, or none."""
    base = _base(store)
    served = isinstance(base, PeerStore) or (isinstance(base, dist.TCPStore) and not _has_launcher())
    return 0 if served else None


def _has_launcher() -> bool:
    """Return whether torchrun started this process, and runs its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class CancellableStore(dist.Store):  # type: ignore[misc]
    """A store for gloo, which waits there for the addresses of other ranks, until ``cancelled`` is set."""

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
        """Return when all values are there; the timeout is that of the caller who cancels."""
        pause = _PAUSES_S[0]
        while not self._store.check(keys):
            if self._cancelled.wait(pause):
                raise ConnectionError("another rank did not publish its address")
            pause = min(2 * pause, _PAUSES_S[1])


class ConnectionStore:
    """Where the ranks of a group publish how far they are with their connections to each other."""

    def __init__(self, store: Any, rank: int, cancelled: threading.Event) -> None:
        """Use keys of ``store``, for ``rank``, until ``cancelled`` is set."""
        self._store, self._rank, self._cancelled = store, rank, cancelled
        self._waiting = CancellableStore(store, cancelled)

    def publish(self, address: bytes) -> None:
        """Publish where this rank listens."""
        self._store.set(str(self._rank), address)

    def read(self, peer: int) -> bytes:
        """Wait for the address of a rank."""
        self._waiting.wait([str(peer)])
        return self._waiting.get(str(peer))

    def stalled(self, missing: Sequence[int]) -> list[int]:
        """Publish the ranks to which this one does not get a connection; return those that also miss this one.

        So a rank that is only late, or was stopped, is not given up.
        """
        self._store.set(f"stalled {self._rank}", json.dumps(list(missing)))
        keys = {peer: f"stalled {peer}" for peer in missing}
        published = {peer: json.loads(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}
        return [peer for peer, ranks in published.items() if self._rank in ranks]

    def any_of_all(self, value: bool, size: int) -> bool:
        """Return whether ``value`` is true on any of the group's ``size`` ranks, when all have called this.

        Raises:
          ConnectionError: it was cancelled before.
        """
        if value:
            self._store.add("true", 1)
        known, pause = self._store.add("called", 1), _PAUSES_S[0]
        while known < size:
            if self._cancelled.wait(pause):
                raise ConnectionError("another rank did not connect")
            pause = min(2 * pause, _PAUSES_S[1])
            known = self._store.add("called", 0)
        return bool(self._store.add("true", 0))


@contextlib.contextmanager
def reaching(store: Any) -> Iterator[None]:
    """Raise ``PeerLostError`` if ``store`` cannot be reached."""
    try:
        yield
    except ReductionError:
        raise
    except RuntimeError as error:  # the class of all errors of stores
        ranks, owner = [], "the process that runs it"
        if _owner(store) == 0:
            ranks, owner = [0], "rank 0, which runs it,"
        elif _has_launcher():
            owner = "torchrun, which runs it,"
        problem = f"the store of this group's rendezvous cannot be reached; {owner} has probably ended."
        remedy = f"read the last output of {owner.split(',')[0]}"
        raise PeerLostError(message(problem, str(error), remedy), ranks) from error
