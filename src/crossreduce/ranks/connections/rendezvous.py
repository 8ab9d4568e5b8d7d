"""A rendezvous at a store, and the connections of ranks that find each other there.

Input: a store of the ranks of one group: a ``StorePart``, or one of ``torch.distributed`` (``torch/rendezvous.py``).
Output: see ``ranks.transports.base.Rendezvous``. It waits by polling, so that Ctrl-C ends a wait. It carries no data of
collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from ...errors import CollectiveTimeout, PeerLostError, ReductionError, decoded, encoded, message, rank_list
from ..transports import tcp
from ..transports.addresses import chosen_interfaces
from ..transports.base import Links, first_of
from ..transports.choice import socket_count
from .peers import rail_peers

_CAUSE: Final = "cause"
MET: Final = b"met"  # stored instead of the reason of an abort once all ranks have met; a later reason is not stored
PAUSES_S: Final = (0.0002, 0.02)  # between queries, first and longest; a query of a local TCPStore takes 23 us
_GROWTH: Final = 1.3  # of these pauses: a rank waits at most so many times as long as others need
_BEYOND_S: Final = 0.2  # how long a connection may take to a rank that answers only through a relay
_QUERY_S: Final = 1.0  # how long a query of a store may take after the communication of the group has failed
_CAUSE_S: Final = 2.0  # how long a query of a store may take during an op
_READ_S: Final = 1.0  # how long a rank waits for others to read the cause: if it ends, the store may end, too


class StoreRendezvous:
    """A rendezvous of ``size`` ranks at keys of a store that no other code uses."""

    is_near = False

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

        ``global_ranks``: the ranks' numbers in errors, by default 0, 1, ... ``watch``: called during waits. It raises a
        ``ReductionError`` to end them.
        """
        self._store, self.watch = store, watch
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._global_ranks = tuple(global_ranks) or tuple(range(size))
        self.read_s = _READ_S
        self._calls, self._has_aborted = 0, False
        self.owner: int | None = 0
        self._failure: ReductionError | None = None
        self._limit_s: float | None = None  # how long an answer may take, if that differs from the store's own limit
        self._unreachable: OSError | None = None  # why the store cannot be reached, or did not answer in time
        self._unsent: bytes | None = None  # the reason of an abort that could not be stored yet
        self._answered: dict[int, bool] = {}  # for each rank that answered the roll call, whether its wait timed out

    def first(self, key: str, value: bytes) -> bytes:
        """Return the ``value`` that was stored first for this ``key``. See ``Rendezvous``."""
        with self._store_errors():
            try:
                return bytes(self._store.compare_set(f"first {key}", b"", value))
            except RuntimeError as error:
                if not re.search("pure virtual|Not implemented", str(error)):  # of a store that is written in Python
                    raise
        return first_of(self, key, value)

    def all_gather(self, payload: bytes, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the payloads of all ranks. See ``Rendezvous``. If the store is lost, raise a ``PeerLostError``."""
        if self._failure is not None:  # the store may have ended since
            raise self._failure
        self._calls += 1
        with self._store_errors():
            if self._has_aborted:  # a rank that waits for others looks for the reason of an abort meanwhile
                self._raise_cause()
            keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], b"." + payload)  # some stores treat an empty value as a missing one
            meanwhile()
            payloads = self._exchanged(payload)
            if payloads is None:
                self._wait_for(keys)
                values = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
                payloads = [bytes(value)[1:] for value in values]
            if self._calls > 1:  # every rank has begun this call, so every rank has read the previous one's payloads
                with contextlib.suppress(RuntimeError):  # an old FileStore cannot delete
                    self._store.delete_key(f"{self._calls - 1}/{self.rank}")
            return payloads

    def _exchanged(self, payload: bytes) -> list[bytes] | None:  # noqa: ARG002
        """Return the payloads of all ranks without the store, or ``None`` if that is not possible."""
        return None

    def meet(self) -> None:
        """Return when all ranks have called this. If a rank has aborted before, raise its error on all ranks.

        The store keeps either this error or ``MET``, whichever was stored first.
        """
        self.all_gather(b"")
        with self._store_errors():
            self._store.compare_set(_CAUSE, b"", MET)
            self._raise_cause()

    def _wait_for(self, keys: list[str]) -> None:
        """Return when all ranks have stored values at their keys. After ``timeout_s``, raise an error on all ranks."""
        asked, pause = time.monotonic(), PAUSES_S[0]
        deadline, look_at = asked + self.timeout_s, asked + PAUSES_S[1]
        while not self._have_arrived(keys):
            self.watch()
            if (now := time.monotonic()) > look_at:  # each query of the store takes time
                look_at = now + PAUSES_S[1]
                self._raise_cause()
            if now > deadline:
                pairs = zip(keys, self._global_ranks, strict=True)
                if late := [rank for key, rank in pairs if not self._store.check([key])]:
                    problem = f"{rank_list(late)} did not reach the rendezvous within {self.timeout_s:g} s."
                    given = f"rank {self._global_ranks[self.rank]} waited; the group has {self.size} ranks"
                    remedy = "start all ranks; the same calls in the same order on all of them; a longer timeout"
                    error = CollectiveTimeout(message(problem, given, remedy), late)
                    if self.publish_abort(encoded(error)) != MET:
                        self._raise_cause()  # the stored reason: this error, or one that another rank stored before
                        raise error  # the store cannot be reached
                return  # the others have arrived just now
            time.sleep(max(0.0, asked + pause - now))  # not if ``_have_arrived`` has waited
            asked, pause = time.monotonic(), min(_GROWTH * pause, PAUSES_S[1])

    def _have_arrived(self, keys: list[str]) -> bool:
        """Wait up to ``PAUSES_S[1]`` seconds for values, and return whether all of them are stored."""
        try:
            self._store.wait(keys, timedelta(seconds=PAUSES_S[1]))
        except RuntimeError as error:
            if isinstance(error, ReductionError) or "Timeout" not in str(error):
                raise
            return False
        return True

    def _raise_cause(self) -> None:
        """If a rank has published the reason of an abort, wait until the ranks left have read it, and raise it."""
        if (cause := self._known_cause()) is None:
            return
        self._failure = error = decoded(cause)
        lost = getattr(error, "ranks", ())
        self._confirm_read(self.rank, [rank for rank, number in enumerate(self._global_ranks) if number not in lost])
        raise error

    def _confirm_read(self, reader: int, readers: Iterable[int]) -> None:
        """Record that ``reader`` has read the reason of an abort. Wait up to ``read_s`` seconds until ``readers`` have.

        The wait ends early, without an error, if ``watch`` raises: others then detect the failure without the store.
        """
        keys, deadline = [f"read/{rank}" for rank in readers], time.monotonic() + self.read_s
        self._query(_QUERY_S, lambda: self._store.set(f"read/{reader}", b"."))
        with contextlib.suppress(ReductionError):
            while self._query(_QUERY_S, lambda: self._store.check(keys)) is False and time.monotonic() < deadline:
                self.watch()
                time.sleep(PAUSES_S[1])

    def publish_abort(self, cause: bytes) -> bytes:
        """Store why the group was aborted, unless a reason or ``MET`` is stored already. Return the stored value."""
        self._has_aborted = True
        stored = self._query(_QUERY_S, lambda: self._store.compare_set(_CAUSE, b"", cause))
        self._unsent = cause if stored is None else None
        return bytes(stored or cause)

    def abort_cause(self) -> bytes | None:
        """Return the stored reason, or ``None``. The store has to answer within ``_CAUSE_S``.

        Ranks call this during an op, and must soon notice a lost link to the store: others may have aborted the group.
        """
        return self._known_cause(_CAUSE_S)

    def _known_cause(self, limit_s: float | None = None) -> bytes | None:
        """Return the stored reason of an abort, or ``None``. For ``limit_s`` see ``_query``."""
        stored = self._query(limit_s, lambda: self._store.get(_CAUSE) if self._store.check([_CAUSE]) else None)
        return None if stored is None or bytes(stored) == MET else bytes(stored)

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:
        """Store that ``ranks`` are alive. Return all ranks of which this is stored. See ``Rendezvous``."""

        def exchange() -> dict[int, bool]:
            for rank in set(ranks) - self._answered.keys():
                self._store.compare_set(f"alive/{rank}", b"", b"timed out" if timed_out else b".")
            for rank in range(self.size):
                if rank not in self._answered and self._store.check([key := f"alive/{rank}"]):
                    self._answered[rank] = bytes(self._store.get(key)) != b"."
            return dict(self._answered)

        answered: dict[int, bool] | None = self._query(_QUERY_S, exchange)
        if answered is None:
            assert self._unreachable is not None
            raise self._unreachable
        return answered

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
        """Record that a host has the reason of an abort. The process that runs the store waits for the other hosts."""
        self._confirm_read(reader, readers if self.owner == self.rank else [reader])

    def _query(self, limit_s: float | None, query: Callable[[], Any]) -> Any:
        """Return what ``query`` returns, or ``None`` if this or an earlier query has not reached the store.

        A store that has not answered in time is used again when its late answer has arrived. No query waits for that.
        ``limit_s``: the most seconds that this and later answers may take, or ``None`` to keep the current limit.
        """
        if isinstance(self._unreachable, TimeoutError) and self._answers_again():
            self._unreachable = None
        if self._unreachable is None:
            if limit_s is not None and (self._limit_s is None or limit_s < self._limit_s):
                self._limit_s = limit_s
                self._limit_waits(limit_s)
            try:
                if self._unsent is not None:
                    self._store.compare_set(_CAUSE, b"", self._unsent)
                    self._unsent = None
                return query()
            except RuntimeError as error:  # the class of all errors of stores
                kind = TimeoutError if "Timeout" in str(error) else ConnectionError
                self._unreachable = kind(str(error))
        return None

    # What depends on the store

    def _limit_waits(self, seconds: float) -> None:
        """Let each wait for an answer of the store fail after some seconds."""
        self._store.limit_waits(seconds)

    def _answers_again(self) -> bool:
        """Return whether the store can be used again, after a query that has timed out. This is quick."""
        return bool(self._store.answers_again())

    def _store_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that raises a ``PeerLostError`` if the store cannot be reached."""
        return lost_store_errors("rank 0, which runs it,", [0])


class Origin(NamedTuple):
    """What is known about the ranks of a group that is formed from another one.

    ``watch``: called while this rank waits for others; it raises a ``ReductionError`` if they cannot meet any more.
    ``is_beyond``: returns whether a rank answers only through a third host, so that the link to it is lost. It is
    ``None`` if this rank was in no earlier group, and so cannot find out. ``parent``: the communicator of a group that
    all ranks are still in, their numbers there, and what distinguishes groups of one name.
    """

    watch: Callable[[], None] = lambda: None
    is_beyond: Callable[[int], bool] | None = None
    parent: tuple[Any, Sequence[int], str] | None = None


NEW: Final = Origin()  # of a group that is not formed from another one


class ConnectionStore:
    """Publishes, in a store, the addresses of ranks, and the ranks to which they have no connection yet."""

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

    def connect(
        self,
        hosts: tuple[tuple[int, ...], ...],
        transport: str,
        everyone: bool = False,
        without: Collection[int] = (),
    ) -> Links:
        """Return sockets that are connected to the rail leaders of other hosts with which this rank exchanges data.

        ``transport``: the name of the transport that will use them. ``everyone``: connect to all ranks of other hosts,
        by one connection each. ``without``: ranks that are known to be out of reach.
        """
        peers = rail_peers(hosts, self._rank)
        count, measures = socket_count(transport, len(hosts))
        if everyone:
            peers = tuple(rank for host in hosts if self._rank not in host for rank in host)
            count, measures = 1, False
        lost = [peer for peer in peers if peer in without]
        peers = tuple(peer for peer in peers if peer not in without)
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
            count,
            next(ranks.index(self._rank) for ranks in hosts if self._rank in ranks),
        )
        unreached = [*lost, *(peer for peer in peers if peer not in sockets and peer != self._rank)]
        first = {peer: each[0] for peer, each in sockets.items()}
        further = {peer: each[1:] for peer, each in sockets.items()}
        return Links(self._rank, first, unreached, self._cancelled, further, measures)

    def publish(self, address: bytes) -> None:
        """Publish where this rank listens."""
        self._store.set(str(self._rank), address)

    def read(self, peer: int) -> bytes:
        """Wait for the address of a rank."""
        wait(self._store, [str(peer)], self._cancelled)
        return bytes(self._store.get(str(peer)))

    def stalled(self, missing: Sequence[int]) -> list[int]:
        """Publish the ranks to which this one gets no connection. Return the ranks to which it must stop connecting.

        Two ranks give each other up if both have published that they get no connection to the other one. So a rank that
        is only late, or was stopped, is not given up.
        """
        now = time.monotonic()
        self._began = self._began or now
        overdue = missing
        if self._is_beyond is not None and now < self._began + tcp.PATIENCE_S:
            overdue = [peer for peer in missing if self._is_beyond(peer)]
        self._publish_stalled(overdue)
        keys = {peer: f"stalled {peer}" for peer in missing}
        published = {peer: json.loads(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}
        lost = [
            peer
            for peer, (their_overdue, their_given_up) in published.items()
            if self._rank in their_given_up or (self._rank in their_overdue and peer in overdue)
        ]
        if lost:
            self._given_up += lost
            self._publish_stalled(overdue)
        return lost

    def _publish_stalled(self, overdue: Sequence[int]) -> None:
        """Publish the ranks to which this one gets no connection, and the ranks that it has given up."""
        self._store.set(f"stalled {self._rank}", json.dumps([list(overdue), self._given_up]).encode())


def interfaces() -> list[str]:
    """Return the names of the network interfaces to use between hosts. An empty list means any.

    Raise an ``ArgumentError`` if CROSSREDUCE_IFNAME selects none.
    """
    if rule := os.environ.get("CROSSREDUCE_IFNAME"):
        return chosen_interfaces(rule)
    return [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each]


def wait(store: Any, keys: Sequence[str], cancelled: threading.Event) -> None:
    """Wait until a store has values at all keys. Raise a ``ConnectionError`` if ``cancelled`` is set before."""
    pause = PAUSES_S[0]
    while not store.check(keys):
        if cancelled.wait(pause):
            raise ConnectionError("another rank did not publish its address")
        pause = min(2 * pause, PAUSES_S[1])


@contextlib.contextmanager
def lost_store_errors(owner: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Raise a ``PeerLostError`` if a store cannot be reached. ``owner`` names the process of ``ranks`` that runs it."""
    try:
        yield
    except ReductionError:
        raise
    except RuntimeError as error:  # the class of all errors of stores
        state = "does not answer" if re.search("(?i)timed? ?out", str(error)) else "has probably ended"
        problem = f"the store of this group's rendezvous cannot be reached; {owner} {state}."
        remedy = f"read the last output of {owner.split(',')[0]}"
        raise PeerLostError(message(problem, str(error), remedy), ranks) from error
