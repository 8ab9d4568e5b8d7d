"""``Joiner``: a process that becomes a rank of an existing group.

Input: an invitation, which names a rank of the group. Output: the group, once its ranks call ``grow``.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Final, Generic

from ...errors import ArgumentError, CollectiveTimeout, PeerLostError, ReductionError, message
from ..agreement.ballots import read_decision
from ..communicator import Communicator
from ..connections import peer_requests
from ..connections.peer_requests import Ended, Json, Peer, Place
from ..connections.rendezvous import Origin
from ..failures.abort import shortage_named
from ..transports.addresses import loopback
from .formation import PAUSE_S, Group, GroupKind, Settings, connect_store
from .survivors import FORMED, Reformed

_KNOCK_S: Final = 0.3  # between two requests to let this process join
_FORMING_S: Final = 10.0  # how much longer than the wait for ``grow`` it may take to form the group
_INVITING: Final = 8  # the number of ranks that an invitation names, besides the rank that makes it


def invitation(group: Communicator, kind: str) -> str:
    """Return a text with which a process can join a group. It contains keys of ranks, so it must be kept secret.

    ``kind``: the name of the group's ``GroupKind``. If the group is closed, or belongs to another process, a
    ``ContextError`` is raised.
    """
    group.require_usable()
    step = -(-group.size // _INVITING)  # rounded up: at most ``_INVITING`` ranks, at equal distances
    ranks = [group.rank, *(rank for rank in range(0, group.size, step) if rank != group.rank)]
    return json.dumps([kind, group.token, [group.agreements.place_of(rank) for rank in ranks]])


def join(invited: str, kind: GroupKind[Group], timeout_s: float) -> Group:
    """Wait until the ranks of a group call ``grow``, and form it together with them.

    Raises:
      ArgumentError: the text is not an invitation, or it is an invitation to a group of another kind.
      CollectiveTimeout: the ranks did not call ``grow`` in time.
      PeerLostError: no rank of the group can be reached any more.
      ReductionError: this process lacks open files, memory or threads.
    """
    try:
        name, token, places = _read(invited)
    except (TypeError, ValueError, RecursionError) as error:  # the text may have keys, so the error does not show it
        given = f"a str of {len(invited)} characters" if isinstance(invited, str) else type(invited).__name__
        raise ArgumentError.of("this is not an invitation.", given, "what invitation() returned") from error
    if name != kind.name:
        problem = "this is an invitation to a group of another kind."
        raise ArgumentError.of(problem, f"a group of {name}", f"an invitation to a group of {kind.name}")
    with shortage_named("this process cannot join the group."):
        joiner = Joiner(token, places, kind)
        try:
            return joiner.join(timeout_s)
        finally:
            joiner.close()


def _read(invited: str) -> tuple[str, str, list[Place]]:
    """Return the kind of the group to which a text invites, its token, and the places of some of its ranks.

    Raise a ``TypeError``, ``ValueError`` or ``RecursionError`` if the text is not an invitation.
    """
    name, token, places = json.loads(invited)
    if not isinstance(name, str) or not isinstance(token, str) or not places:
        raise ValueError("the kind, the token or the places are missing")
    return name, token, [Place.read(place) for place in places]


class Joiner(Generic[Group]):
    """A process that wants to join the group with the token ``group``. Some ranks of the group listen at ``places``."""

    def __init__(self, group: str, places: Sequence[Place], kind: GroupKind[Group]) -> None:
        self._group, self._places, self._kind = group, list(places), kind
        self._token = secrets.token_hex(8)
        self._offer: dict[str, Json] | None = None
        loopbacks = {loopback(address) for place in places for address in place.addresses}
        self._listen_at = loopbacks.pop() if len(loopbacks) == 1 else ""  # "" is also in it, unless all are loopback
        self._own = peer_requests.listen(self._listen_at)
        peer_requests.register(self._token, self._answer, self._listen_at)

    def close(self) -> None:
        """Stop answering requests."""
        peer_requests.unregister(self._token, address=self._listen_at)

    def _answer(self, request: dict[str, Json]) -> dict[str, Json]:
        """Answer a request of a rank of the group: an offer to form a group, or a check of this process."""
        if request["what"] == "admit":
            self._offer = request
        return {"ready": True}

    def join(self, timeout_s: float) -> Group:
        """Wait until the ranks let this process join, and return the group that it has formed together with them."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._knock()
            until = min(deadline, time.monotonic() + _KNOCK_S)
            while self._offer is None and time.monotonic() < until:
                time.sleep(PAUSE_S)
            offer, self._offer = self._offer, None
            if offer is None:
                continue
            try:
                group = self._form(offer, deadline + _FORMING_S)
            except ReductionError:  # a rank was lost meanwhile; the others may form another group
                continue
            if self._is_formed(offer, group, deadline + _FORMING_S):
                group.reformed = Reformed((), 0)
                return group
            group.close()
        problem = "the ranks of the group did not let this process join."
        remedy = "call grow on all ranks of the group; a longer timeout"
        raise CollectiveTimeout(message(problem, f"waited {timeout_s:g} s", remedy))

    def _knock(self) -> None:
        """Ask the known ranks of the group, one after another, to let this process join, until one of them answers.

        Raises:
          PeerLostError: all of them have ended or left the group.
        """
        request = {"what": "join", "token": self._token, "place": self._own}
        ended = 0
        for place in list(self._places):
            peer = Peer(place)
            answer = peer.ask(self._group, request)
            if answer is None and not peer.refused:  # it may only be slow, and is asked again later
                continue
            if answer is None or "unknown" in answer:  # its process has ended, or it has left the group
                ended += 1
            elif "moved" in answer:  # the rank is in a new group, which has replaced the one known here
                self._group = answer["moved"]
                return self._knock()
            else:
                self._places = [Place.read(each) for each in answer["members"]]
                return None
        if ended == len(self._places):
            problem = "all ranks of the group that this process knows have ended, or have left the group."
            raise PeerLostError(message(problem, f"{ended} ranks", "a new invitation"))
        return None

    def _form(self, offer: dict[str, Json], deadline: float) -> Group:
        """Return the group of an offer, formed with its other ranks. ``GroupFormation._admit`` makes offers."""
        members = [Peer(Place.read(place)) for place in offer["members"]]
        leader = members[0]

        def watch() -> None:
            if self._decision(offer, members) is False:
                raise PeerLostError(message("the ranks of the group stopped forming it.", "", "wait"))
            if time.monotonic() > deadline:
                raise CollectiveTimeout(message("the group was not formed in time.", "", "a longer timeout"))

        watch()  # its requests find the address at which the lowest rank can be reached
        if not leader.known:
            raise PeerLostError(message("the rank that serves the store does not answer.", "", "wait"))
        store = connect_store(self._kind, leader, offer["token"], offer["number"] - 1, offer["port"], watch)
        return self._kind.new_group(store, offer["rank"], offer["size"], Settings(*offer["settings"]), Origin(watch))

    def _decision(self, offer: dict[str, Json], members: Sequence[Peer], group: Group | None = None) -> bool | None:
        """Return whether the ranks have formed the group of an offer, or ``None`` if they have not decided this yet.

        ``group``: the group, if this process has formed it. Its token distinguishes it from later groups of the ranks.
        """
        request = {"what": "result", "number": offer["number"]}
        unreached = 0
        for peer in members:
            try:
                answer = peer.ask(offer["token"], request)
            except Ended:
                answer = None
            if answer is None or "unknown" in answer:
                unreached += 1
            elif "moved" in answer:
                return group is not None and answer["moved"] == group.communicator.token
            elif answer["decided"] is not None:
                decision = read_decision(answer["decided"][1])
                return decision.flag and decision.kind == FORMED
            else:
                return None
        return False if unreached == len(members) else None

    def _is_formed(self, offer: dict[str, Json], group: Group, deadline: float) -> bool:
        """Wait until the ranks have decided whether the group is formed, and return their decision."""
        members = [Peer(Place.read(place)) for place in offer["members"]]
        while time.monotonic() < deadline:
            decided = self._decision(offer, members, group)
            if decided is not None:
                return decided
            time.sleep(PAUSE_S)
        return False
