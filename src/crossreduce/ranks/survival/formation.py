"""Forms a new group of the remaining ranks of an earlier group, and of processes that join it.

Input: the earlier group, its remaining ranks, and a function that makes a group of ranks that meet at a store. Output:
such a group, with a store that its lowest rank serves, or an error if another rank is lost meanwhile. The ranks find
each other through ``peer_requests``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from ...errors import PeerLostError, message
from ..agreement.lost_ranks import Reach
from ..communicator import Communicator
from ..connections.peer_requests import ANSWER_S, Ended, Peer, Place
from ..connections.rendezvous import Origin
from ..connections.repeated_request import RepeatedRequest
from ..connections.store import CONNECT_S, StoreClient
from .survivors import Closable, Reformed

PAUSE_S: Final = 0.002  # between two requests to a rank
_PATIENCE_S: Final = 0.3  # how long a process that wants to join may take to answer; it may have been stopped
_AT_ONCE: Final = 32  # ranks that are asked at the same time for the processes that want to join
_CHECK_S: Final = 0.1  # between two checks whether the processes that join are alive


class Formed(Closable, Protocol):
    """A group that was formed of another one."""

    communicator: Communicator
    reformed: Reformed | None


Group = TypeVar("Group", bound=Formed)
Watch: TypeAlias = Callable[[], None]


class Settings(NamedTuple):
    """The settings that a new group inherits from the earlier one.

    ``exact``, ``transport``: see ``crossreduce.torch.Options``. ``listen_at``: the loopback address if the ranks listen
    only there.
    """

    timeout_s: float
    name: str
    exact: bool = False
    listen_at: str = ""
    transport: str = "auto"


@dataclass(frozen=True)
class GroupKind(Generic[Group]):
    """A kind of groups: process groups of torch, or groups of NumPy arrays.

    Args:
      name: a process can join a group of its own kind only.
      new_store: serves a store, or connects to one; its arguments are those of ``StoreClient``.
      new_group: returns a group of ranks that meet at a store, or raises a ``ReductionError``. Its arguments: the
        store, the rank, the size, the settings, and the ``Origin`` of the group.
    """

    name: str
    new_store: Callable[..., StoreClient]
    new_group: Callable[[Any, int, int, Settings, Origin], Group]


class GroupFormation(Generic[Group]):
    """Makes a new group of some ranks of ``old`` and, if ``grows``, of the processes that want to join.

    ``timeout_s``: how long the other ranks wait for the rank that serves the store.
    """

    def __init__(
        self, old: Communicator, kind: GroupKind[Group], settings: Settings, timeout_s: float, *, grows: bool
    ) -> None:
        self._old, self._kind, self._settings, self._grows = old, kind, settings, grows
        self._timeout_s = min(timeout_s, settings.timeout_s)
        self._agreements = old.agreements
        self._joiners: dict[str, Peer] = {}  # by their tokens; empty except on the lowest rank
        self._is_joiner_gone = False  # whether a joiner has ended, or does not answer
        self._check_at = 0.0  # the time of the next check of the joiners

    def __call__(self, reformed: Reformed, watch: Watch) -> Group | None:
        """Make the group. For arguments and result see ``survivors.shrink``. The lowest rank serves the store."""
        members, old = reformed.members, self._old
        self._agreements.forget_relays(members)
        key = f"store {self._agreements.number}"
        rank = members.index(old.rank)
        if rank == 0:
            self._joiners, self._is_joiner_gone = self._find_joiners(members) if self._grows else {}, False
            size, store = len(members) + len(self._joiners), None
            if self._joiners or not self._grows:
                secret = _store_key(self._agreements.place_of(old.rank), old.token, self._agreements.number)
                store = self._kind.new_store(secret, serve_at=self._settings.listen_at, ranks=size)
                self._admit(members, store.port)
            self._agreements.published = {key: [size, 0 if store is None else store.port]}  # for ``_ask_for_store``
        else:
            peer = self._agreements.peer(members[0])
            size, port = self._ask_for_store(peer, members, key, watch)
            number = self._agreements.number
            store = connect_store(self._kind, peer, old.token, number, port, watch, members) if port else None
        if store is None:
            return None

        reach = Reach(self._agreements, members)
        origin = Origin(lambda: self._check(watch), lambda rank: rank < len(members) and reach.is_beyond(members[rank]))
        return self._kind.new_group(store, rank, size, self._settings, origin)

    def _find_joiners(self, members: Sequence[int]) -> dict[str, Peer]:
        """Return the processes that want to join and that answer now, by their tokens."""
        agreements, places = self._agreements, self._agreements.joiners()
        others = [rank for rank in members if rank != self._old.rank]
        for start in range(0, len(others), _AT_ONCE):
            asked = others[start : start + _AT_ONCE]
            relays = {rank: agreements.relays(agreements.host_of(rank), members) for rank in asked}
            processes = {rank: [agreements.peer(rank)] for rank in asked}
            inquiry = RepeatedRequest(processes, self._old.token, {"what": "waiting"}, relays=relays)
            until = time.monotonic() + ANSWER_S
            while len(inquiry.found) < len(asked) and time.monotonic() < until:
                inquiry.read(PAUSE_S)
            for answer in inquiry.found.values():
                places |= (answer or {}).get("waiting", {})
        peers = {token: Peer(Place.read(place)) for token, place in sorted(places.items())}
        return {token: peer for token, peer in peers.items() if is_answering(peer, token, _PATIENCE_S)}

    def _admit(self, members: Sequence[int], port: int) -> None:
        """Send each joining process its rank, and all other data that it needs to form the group."""
        agreements = self._agreements
        offer = {
            "what": "admit",
            "size": len(members) + len(self._joiners),
            "port": port,
            "settings": self._settings,
            "token": self._old.token,
            "number": agreements.number + 1,
            "members": [agreements.place_of(rank) for rank in members],
        }
        for k, (token, peer) in enumerate(self._joiners.items()):
            with suppress(Ended):  # ``_check`` notices this
                peer.ask(token, offer | {"rank": len(members) + k})

    def _check(self, watch: Watch) -> None:
        """Raise an error if the new group cannot be formed any more."""
        watch()
        if not self._is_joiner_gone and (now := time.monotonic()) > self._check_at:
            self._check_at = now + _CHECK_S
            self._is_joiner_gone = not all(is_answering(peer, token) for token, peer in self._joiners.items())
        if self._is_joiner_gone:  # also in later calls, which do not ask the joiners again
            problem = "a process that was to join the group has ended, or does not answer."
            raise PeerLostError(message(problem, f"{len(self._joiners)} were to join", "call grow again"))

    def _ask_for_store(self, peer: Peer, members: Sequence[int], key: str, watch: Watch) -> tuple[int, int]:
        """Return the size of the new group and the port of its store. The port is 0 if there is no new group."""
        relays = {0: self._agreements.relays(self._agreements.host_of(members[0]), members)}
        inquiry = RepeatedRequest({0: [peer]}, self._old.token, {"what": "published", "key": key}, PAUSE_S, relays)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            inquiry.read(PAUSE_S)
            answer = inquiry.found.get(0)
            if answer is not None and answer.get("value") is not None:
                size, port = answer["value"]
                return int(size), int(port)
            watch()
        problem = "the rank that serves the store of the new group does not answer."
        raise PeerLostError(message(problem, f"waited {self._timeout_s:g} s", "read its error; check the network"))


def is_answering(peer: Peer, token: str, timeout_s: float = ANSWER_S) -> bool:
    """Return whether a process that wants to join answers in time."""
    try:
        return "ready" in (peer.ask(token, {"what": "ready"}, timeout_s) or {})
    except Ended:
        return False


def connect_store(
    kind: GroupKind[Group], peer: Peer, token: str, number: int, port: int, watch: Watch, relays: Collection[int] = ()
) -> StoreClient:
    """Return the store that ``peer``, of the group ``token``, serves. ``watch`` is called while it does not answer.

    ``number``: that of the agreement after which the new group is formed. ``relays``: the ranks through which ``peer``
    may be reached. If the store is lost, raise a ``PeerLostError``.
    """
    try:
        connection = peer.connection(token, port, CONNECT_S, relays)
        return kind.new_store(_store_key(peer.place, token, number), port=port, watch=watch, connection=connection)
    except OSError as error:
        problem = "the store of the new group cannot be reached."
        place = peer.known or ", ".join(peer.place.addresses)
        raise PeerLostError(message(problem, f"{place}: {error}", "call shrink again")) from None


def _store_key(place: Place, token: str, number: int) -> bytes:
    """Return the key of the store that the process at ``place`` serves. No other connection to the process has it."""
    about, key = f"{token} {number}".encode(), bytes.fromhex(place.key)
    return blake2b(about, key=key, digest_size=16, person=b"store").digest()
