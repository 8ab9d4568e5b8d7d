"""A rendezvous at a store, and the connections of ranks that find each other there.

Input: a store of the ranks of one group: a ``StorePart``, or one of ``torch.distributed`` (``torch/rendezvous.py``).
Output: see ``ranks.transports.base.Rendezvous``. It waits by polling, so that Ctrl-C ends a wait. It is used rarely,
and not for data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from ...errors import CollectiveTimeout, PeerLostError, ReductionError, decoded, encoded, message, rank_list
from ..transports import tcp
from .peers import rail_peers

_CAUSE: Final = "cause"
MET: Final = b"met"  # in the place of the reason of an abort: all ranks have met, so it is too late for one
PAUSES_S: Final = (0.0002, 0.02)  # between queries, first and longest; a query of a local TCPStore takes 23 us
_BEYOND_S: Final = 0.2  # how long a connection may take to a rank that answers only through a relay
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
        """Use ``store``, which rank 0 of the group serves, and wait at most ``timeout_s`` seconds for other ranks.

        ``global_ranks``: the ranks' numbers in errors; empty: 0, 1, ... ``watch`` is called during waits, and raises a
        ``ReductionError`` to end them.
        """
        self._store, self.watch = store, watch
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._global_ranks = tuple(global_ranks) or tuple(range(size))
        self.read_s = _READ_S
        self._calls = 0
        self.owner: int | None = 0
        self._failure: ReductionError | None = None
        self._limit_s: float | None = None  # how long an answer of the store may take; ``None``: the store's own limit
        self._unreachable: OSError | None = None  # why the store cannot be reached any more
        self._answered: dict[int, bool] = {}  # the known answers to a roll call: whether each rank's wait timed out

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks; see ``Rendezvous``. PeerLostError: the store cannot be reached."""
        if self._failure is not None:  # the store may have ended since it was raised
            raise self._failure
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
        with self._store_errors():
            self._raise_cause()
            self._store.set(keys[self.rank], b"." + payload)  # some stores do not distinguish empty from missing values
            self._wait_for(keys)
            found = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            payloads = [bytes(value)[1:] for value in found]
            if self._calls > 1:  # every rank has begun this call, so every rank has read the previous one's payloads
                with contextlib.suppress(RuntimeError):  # an old FileStore cannot delete
                    self._store.delete_key(f"{self._calls - 1}/{self.rank}")
        return payloads

    def meet(self) -> None:
        """Return when all ranks have called this; or, on all of them, raise the reason of an abort published before.

        The store has either that reason or ``MET``, whichever was stored first.
        """
        self.all_gather(b"")
        with self._store_errors():
            self._store.compare_set(_CAUSE, b"", MET)
            self._raise_cause()

    def _wait_for(self, keys: list[str]) -> None:
        """Return when all ranks have stored values at their keys; after ``timeout_s``, abort the group and raise."""
        deadline, pause = time.monotonic() + self.timeout_s, PAUSES_S[0]
        while not self._have_arrived(keys):
            self._raise_cause()
            self.watch()
            if time.monotonic() > deadline:
                pairs = zip(keys, self._global_ranks, strict=True)
                if late := [rank for key, rank in pairs if not self._store.check([key])]:
                    problem = f"{rank_list(late)} did not reach the rendezvous within {self.timeout_s:g} s."
                    given = f"rank {self._global_ranks[self.rank]} waited; the group has {self.size} ranks"
                    remedy = "start all ranks; the same calls in the same order on all of them; a longer timeout"
                    error = CollectiveTimeout(message(problem, given, remedy), late)
                    if self.publish_abort(encoded(error)) != MET:
                        self._raise_cause()  # the stored reason: this error, or one that another rank stored before
                        raise error  # the store cannot be reached
                return
            time.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])

    def _have_arrived(self, keys: list[str]) -> bool:
        """Return whether values are there; this waits for them for a moment."""
        try:
            self._store.wait(keys, timedelta(seconds=PAUSES_S[1]))
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
        """Record that ``reader`` has read the reason of an abort, and wait for ``readers``, at most ``read_s`` seconds.

        If ``watch`` raises, the ranks have another way to find out that the group has failed.
        """
        keys, deadline = [f"read/{rank}" for rank in readers], time.monotonic() + self.read_s
        self._query(_QUERY_S, lambda: self._store.set(f"read/{reader}", b"."))
        with contextlib.suppress(ReductionError):
            while self._query(_QUERY_S, lambda: self._store.check(keys)) is False and time.monotonic() < deadline:
                self.watch()
                time.sleep(PAUSES_S[1])

    def publish_abort(self, cause: bytes) -> bytes:
        """Store why the group was aborted; the first reason, or ``MET``, is kept, and returned."""
        return bytes(self._query(_QUERY_S, lambda: self._store.compare_set(_CAUSE, b"", cause)) or cause)

    def abort_cause(self) -> bytes | None:
        """Return the stored reason, or ``None``. The store has to answer quickly, as ranks wait in an op.

        A rank that has lost the link to the store must notice in time that other ranks have aborted the group.
        """
        return self._known_cause(_CAUSE_S)

    def _known_cause(self, limit_s: float | None = None) -> bytes | None:
        found = self._query(limit_s, lambda: self._store.get(_CAUSE) if self._store.check([_CAUSE]) else None)
        return None if found is None or bytes(found) == MET else bytes(found)

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:
        """Store that ``ranks`` are alive; return all ranks of which this is stored. See ``Rendezvous``."""

        def answers() -> dict[int, bool]:
            for rank in set(ranks) - self._answered.keys():
                self._store.compare_set(f"alive/{rank}", b"", b"timed out" if timed_out else b".")
            for rank in range(self.size):
                if rank not in self._answered and self._store.check([key := f"alive/{rank}"]):
                    self._answered[rank] = bytes(self._store.get(key)) != b"."
            return dict(self._answered)

        found: dict[int, bool] | None = self._query(_QUERY_S, answers)
        if found is None:
            assert self._unreachable is not None
            raise self._unreachable
        return found

    def record_leaving(self) -> None:
        """Store that this rank leaves the group."""
        self._query(_QUERY_S, lambda: self._store.set(f"left/{self.rank}", b"."))

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has stored that it leaves the group."""
        return bool(self._query(_QUERY_S, lambda: self._store.check([f"left/{rank}"])))

    def announce(self, number: int) -> None:
        """Store that this rank has begun a check of the links."""
        self._query(_CAUSE_S, lambda: self._store.set(f"check/{number}/{self.rank}", b"."))

    def have_announced(self, number: int) -> bool:
        """Return whether all ranks have stored that they have begun a check of the links."""
        keys = [f"check/{number}/{rank}" for rank in range(self.size)]
        return bool(self._query(_CAUSE_S, lambda: self._store.check(keys)))

    def leave(self, reader: int, readers: Iterable[int]) -> None:
        """Record that a host has the reason of an abort; a process that runs the store waits for the other hosts."""
        self._await(reader, readers if self.owner == self.rank else [reader])

    def _query(self, limit_s: float | None, query: Callable[[], Any]) -> Any:
        """Return what ``query`` returns; ``None``: the store cannot be reached, now or earlier.

        ``limit_s``: how long an answer may take, at most, from now on; ``None``: as long as before.
        """
        if self._unreachable is None:
            if limit_s is not None and (self._limit_s is None or limit_s < self._limit_s):
                self._limit_s = limit_s
                self._limit_waits(limit_s)
            try:
                return query()
            except RuntimeError as error:  # the class of all errors of stores
                kind = TimeoutError if "Timeout" in str(error) else ConnectionError
                self._unreachable = kind(str(error))
        return None

    # What depends on the store

    def _limit_waits(self, seconds: float) -> None:
        """Let each wait for an answer of the store fail after some seconds."""
        self._store.limit_waits(seconds)

    def _store_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that raises a ``PeerLostError`` if the store cannot be reached."""
        return lost_store_errors("rank 0, which runs it,", [0])


class Origin(NamedTuple):
    """Facts about the ranks of a group that is formed from another one.

    ``watch``: called while this rank waits for others; it raises a ``ReductionError`` if they cannot meet any more.
    ``is_beyond``: whether a rank answers only through a third host, so that the link to it is lost; ``None``: this rank
    was in no earlier group, and cannot tell.
    """

    watch: Callable[[], None] = lambda: None
    is_beyond: Callable[[int], bool] | None = None


NEW: Final = Origin()  # of a group that is not formed of another one


class ConnectionStore:
    """Where the ranks of a group publish how far they are with their connections to each other."""

    def __init__(
        self,
        store: Any,
        rank: int,
        cancelled: threading.Event,
        listen_at: str = "",
        is_beyond: Callable[[int], bool] | None = None,
    ) -> None:
        """Use keys of ``store``, for ``rank``, until ``cancelled`` is set.

        For ``listen_at`` see ``Communicator``, for ``is_beyond`` ``Origin``.
        """
        self._store, self._rank, self._cancelled = store, rank, cancelled
        self._listen_at, self._is_beyond = listen_at, is_beyond
        self._began = 0.0  # when ranks were missing for the first time
        self._given_up: list[int] = []

    def connect(self, hosts: tuple[tuple[int, ...], ...]) -> tuple[dict[int, socket.socket], list[int]]:
        """Return sockets connected to the ranks of other hosts with which this one exchanges messages.

        Second, those of them to which no connection could be made.
        """
        peers = rail_peers(hosts, self._rank) if len(hosts) > 1 else ()
        sockets = tcp.connect(
            self._rank,
            peers,
            self.publish,
            self.read,
            self._cancelled,
            interfaces(),
            self.stalled,
            self._listen_at,
            tcp.PATIENCE_S if self._is_beyond is None else _BEYOND_S,
        )
        return sockets, [peer for peer in peers if peer not in sockets and peer != self._rank]

    def publish(self, address: bytes) -> None:
        """Publish where this rank listens."""
        self._store.set(str(self._rank), address)

    def read(self, peer: int) -> bytes:
        """Wait for the address of a rank."""
        wait(self._store, [str(peer)], self._cancelled)
        return bytes(self._store.get(str(peer)))

    def stalled(self, missing: Sequence[int]) -> list[int]:
        """Publish the ranks to which this one does not get a connection; return those to give up.

        These also miss this one, or have given it up. So a rank that is only late, or was stopped, is not given up.
        """
        now = time.monotonic()
        self._began = self._began or now
        waited = missing
        if self._is_beyond is not None and now < self._began + tcp.PATIENCE_S:
            waited = [peer for peer in missing if self._is_beyond(peer)]
        self._publish_stalled(waited)
        keys = {peer: f"stalled {peer}" for peer in missing}
        published = {peer: json.loads(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}
        found = [
            peer
            for peer, (theirs, given_up) in published.items()
            if self._rank in given_up or (self._rank in theirs and peer in waited)
        ]
        if found:
            self._given_up += found
            self._publish_stalled(waited)
        return found

    def _publish_stalled(self, waited: Sequence[int]) -> None:
        self._store.set(f"stalled {self._rank}", json.dumps([list(waited), self._given_up]).encode())

    def any_of_all(self, value: bool, size: int) -> bool:
        """Return whether ``value`` is true on any of the group's ``size`` ranks, when all have called this.

        Raises:
          ConnectionError: it was cancelled before.
        """
        if value:
            self._store.add("true", 1)
        known, pause = self._store.add("called", 1), PAUSES_S[0]
        while known < size:
            if self._cancelled.wait(pause):
                raise ConnectionError("another rank did not connect")
            pause = min(2 * pause, PAUSES_S[1])
            known = self._store.add("called", 0)
        return bool(self._store.add("true", 0))


def interfaces() -> list[str]:
    """Return the names of the network interfaces between hosts; empty: any."""
    return [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each]


def wait(store: Any, keys: Sequence[str], cancelled: threading.Event) -> None:
    """Return when all values are in a store.

    Raises:
      ConnectionError: ``cancelled`` was set before.
    """
    pause = PAUSES_S[0]
    while not store.check(keys):
        if cancelled.wait(pause):
            raise ConnectionError("another rank did not publish its address")
        pause = min(2 * pause, PAUSES_S[1])


@contextlib.contextmanager
def lost_store_errors(owner: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Raise ``PeerLostError`` if a store cannot be reached. ``owner``: the process that runs it, as ``ranks``."""
    try:
        yield
    except ReductionError:
        raise
    except RuntimeError as error:  # the class of all errors of stores
        problem = f"the store of this group's rendezvous cannot be reached; {owner} has probably ended."
        remedy = f"read the last output of {owner.split(',')[0]}"
        raise PeerLostError(message(problem, str(error), remedy), ranks) from error
