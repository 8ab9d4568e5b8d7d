"""A new group of the ranks of an earlier one that are left, and of processes that join: its store, and its ranks.

Input: the earlier group, and its ranks that are left. Output: a ``Group`` with a store that its lowest rank serves; or
an error, if another rank is lost meanwhile. The ranks find each other through ``ranks.contact``.
"""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self

import torch.distributed as dist

from ..errors import PeerLostError, ReductionError, message
from ..ranks.contact import Ended, Peer, Place
from ..ranks.membership import renewed
from ..ranks.survivors import Reformed
from .group import Group
from .rendezvous import OWN_STORES, beside, end_connections

PAUSE_S: Final = 0.002  # between two questions to a rank
_WATCH_S: Final = 0.02  # between two looks whether a group can still be formed
_CHECK_S: Final = 0.1  # between two looks whether the processes are alive that form a group with this one
_CONNECT: Final = timedelta(seconds=5)  # how long a connection to a store may take


class Forming:
    """The new group of some ranks of ``old``, and of the processes that want to join if ``grows``."""

    def __init__(self, old: Group, *, grows: bool) -> None:
        self._old, self._grows = old, grows
        self._agreements = old.communicator.agreements
        self._joiners: dict[str, Peer] = {}  # by their tokens; known to the lowest rank only
        self._check_at = 0.0

    def __call__(self, reformed: Reformed, watch: Callable[[], None]) -> Group | None:
        """Make the group; for arguments and result see ``survivors.shrink``. The lowest rank serves the store."""
        members, old = reformed.members, self._old
        key = f"store {self._agreements.number}"
        rank = members.index(old.rank())
        if rank == 0:
            self._joiners = self._waiting(members) if self._grows else {}
            size, store = len(members) + len(self._joiners), None
            if self._joiners or not self._grows:
                store = served(old.timeout)
                self._admit(members, store.port)
            port, address = 0 if store is None else store.port, ""
            self._agreements.published[key] = [size, port]
        else:
            peer, store = self._agreements.peer(members[0]), None
            size, port = self._asked(peer, key, watch)
            address = peer.known
        if not port:
            return None
        with Guard(lambda: self._check(watch), port) as guard:
            store = store or connected(address, port, old.timeout, guard.check)
            return formed(store, rank, size, old.timeout, old.communicator.name, guard.check)

    def _waiting(self, members: Sequence[int]) -> dict[str, Peer]:
        """Return the processes that want to join and answer now."""
        places = self._agreements.joiners()
        for rank in members:
            if rank != self._old.rank():
                with suppress(Ended):
                    peer = self._agreements.peer(rank)
                    answer = peer.ask(self._old.communicator.token, {"what": "waiting"})
                    places |= (answer or {}).get("waiting", {})
        peers = {token: Peer(Place.read(place)) for token, place in sorted(places.items())}
        return {token: peer for token, peer in peers.items() if answers(peer, token)}

    def _admit(self, members: Sequence[int], port: int) -> None:
        """Tell the processes that join their ranks."""
        agreements = self._agreements
        offer = {
            "what": "admit",
            "size": len(members) + len(self._joiners),
            "port": port,
            "timeout_s": self._old.timeout.total_seconds(),
            "name": self._old.communicator.name,
            "token": self._old.communicator.token,
            "number": agreements.number + 1,
            "members": [agreements.place_of(rank) for rank in members],
        }
        for k, (token, peer) in enumerate(self._joiners.items()):
            with suppress(Ended):  # the check finds that
                peer.ask(token, offer | {"rank": len(members) + k})

    def _check(self, watch: Callable[[], None]) -> None:
        """Raise if the new group cannot be formed any more."""
        watch()
        if self._joiners and (now := time.monotonic()) > self._check_at:
            self._check_at = now + _CHECK_S
            gone = [token for token, peer in self._joiners.items() if not answers(peer, token)]
            if gone:
                problem = "a process that was to join the group has ended, or does not answer."
                raise PeerLostError(message(problem, f"{len(gone)} of {len(self._joiners)}", "call grow again"))

    def _asked(self, peer: Peer, key: str, watch: Callable[[], None]) -> tuple[int, int]:
        """Return the size of the group and the port of the store that its lowest rank serves; 0: no new group."""
        limit_s = self._old.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            answer = None
            with suppress(Ended):
                answer = peer.ask(self._old.communicator.token, {"what": "published", "key": key})
            if answer is not None and answer.get("value") is not None:
                size, port = answer["value"]
                return int(size), int(port)
            watch()
            time.sleep(PAUSE_S)
        problem = "the rank that serves the store of the new group does not answer."
        raise PeerLostError(message(problem, f"waited {limit_s:g} s", "check the network between the hosts"))


class Guard:
    """Looks, in a thread, whether a group can still be formed; if not, it ends this process's connections to the store.

    So a rank does not wait, in the store's own code, for a process that was stopped. ``watch``: raises a
    ``ReductionError`` if the group cannot be formed. ``port``: of the store. All uses of the store are in a ``with``
    block, which raises the error of ``watch`` in any case.
    """

    def __init__(self, watch: Callable[[], None], port: int) -> None:
        self._watch, self._port = watch, port
        self._failure: ReductionError | None = None
        self._left = threading.Event()

    def __enter__(self) -> Self:
        start_new_thread(self._run, ())  # no Thread, whose start Ctrl-C may interrupt
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left.set()  # before the check: from now on, the thread ends no connection after a failure
        if kind is None or issubclass(kind, ReductionError):
            self.check()

    def check(self) -> None:
        """Raise the error of ``watch``, if it has raised one."""
        if self._failure is not None:
            raise renewed(self._failure)

    def _run(self) -> None:
        with suppress(ValueError):  # the earlier group was closed: the new one is formed, or has failed
            while self._failure is None and not self._left.wait(_WATCH_S):
                try:
                    self._watch()
                except ReductionError as error:
                    self._failure = error
        while not self._left.wait(_WATCH_S):  # again and again, since torch may connect once more
            end_connections(self._port)


def answers(peer: Peer, token: str) -> bool:
    """Return whether a process that wants to join answers."""
    try:
        return "ready" in (peer.ask(token, {"what": "ready"}) or {})
    except Ended:
        return False


def served(timeout: timedelta) -> Any:
    """Return a store that this process serves, at a free port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    OWN_STORES.add(store.port)
    return store


def connected(address: str, port: int, timeout: timedelta, watch: Callable[[], None]) -> Any:
    """Return the store that another process serves; ``watch`` is called meanwhile, and raises to end that.

    Raises:
      PeerLostError: it cannot be reached.
    """
    limit = min(timeout, _CONNECT)
    make = partial(dist.TCPStore, address, port, is_master=False, wait_for_workers=False, timeout=limit)
    try:
        store = beside(make, watch)
    except RuntimeError as error:
        problem = "the store of the new group cannot be reached."
        raise PeerLostError(message(problem, f"{address}: {error}", "call shrink again")) from None
    store.set_timeout(timeout)
    OWN_STORES.add(port)
    return store


def formed(store: Any, rank: int, size: int, timeout: timedelta, name: str, watch: Callable[[], None]) -> Group:
    """Return a group whose ranks meet at ``store``; ``watch`` raises if they cannot."""
    made = Group(dist.PrefixStore("formed/", store), rank, size, timeout, name, watch=watch)
    made.base_store = store
    return made
