"""``Joiner``: a process that becomes a rank of a group that exists.

Input: an invitation, which names a rank of the group. Output: the group, once its ranks call ``grow``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from ..errors import CollectiveTimeout, PeerLostError, ReductionError, message
from ..ranks import contact
from ..ranks.agreement import read_decision
from ..ranks.contact import Ended, Json, Peer, Place
from ..ranks.survivors import FORMED, Reformed
from .forming import PAUSE_S, connected, formed
from .group import Group

_KNOCK_S: Final = 0.3  # between two requests to let this process join


class Joiner:
    """A process that wants to join a group of which it knows some ranks."""

    def __init__(self, group: str, places: Sequence[Place]) -> None:
        self._group, self._places = group, list(places)
        self._token = secrets.token_hex(8)
        self._offer: dict[str, Json] | None = None
        self._own = contact.listen()
        contact.register(self._token, self._answer)

    def close(self) -> None:
        """Stop answering requests."""
        contact.unregister(self._token)

    def _answer(self, request: dict[str, Json]) -> dict[str, Json]:
        if request["what"] == "admit":
            self._offer = request
        return {"ready": True}

    def join(self, timeout_s: float) -> Group:
        """Wait for a group, and form it together with its ranks."""
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
                made = self._formed(offer)
            except ReductionError:  # a rank was lost meanwhile; the others may form another group
                continue
            if self._is_valid(offer, made, deadline):
                made.reformed = Reformed((), 0)
                return made
            made.close()
        problem = "the ranks of the group did not let this process join."
        raise CollectiveTimeout(message(problem, f"waited {timeout_s:g} s", "call grow on all ranks of the group"))

    def _knock(self) -> None:
        """Ask a rank of the group to let this process join.

        Raises:
          PeerLostError: none can be reached any more.
        """
        request = {"what": "join", "token": self._token, "place": self._own}
        ended = 0
        for place in list(self._places):
            peer = Peer(place)
            answer = peer.ask(self._group, request)
            if answer is None and not peer.refused:
                continue
            if answer is None or "unknown" in answer:
                ended += 1
            elif "moved" in answer:
                self._group = answer["moved"]
                return self._knock()
            else:
                self._places = [Place.read(each) for each in answer["members"]]
                return None
        if ended == len(self._places):
            problem = "no rank of the group is left that this process knows."
            raise PeerLostError(message(problem, f"{ended} ranks have ended", "a new invitation"))
        return None

    def _formed(self, offer: dict[str, Json]) -> Group:
        members = [Peer(Place.read(place)) for place in offer["members"]]
        leader, timeout = members[0], timedelta(seconds=offer["timeout_s"])

        def watch() -> None:
            if self._decision(offer, members) is False:
                raise PeerLostError(message("the ranks of the group have given up to form it.", "", "wait"))

        watch()  # finds an address of the lowest rank
        if not leader.known:
            raise PeerLostError(message("the rank that serves the store does not answer.", "", "wait"))
        store = connected(leader, offer["port"], watch)
        return formed(store, offer["rank"], offer["size"], timeout, offer["name"], watch, exact=offer["exact"])

    def _decision(self, offer: dict[str, Json], members: Sequence[Peer], made: Group | None = None) -> bool | None:
        """Return whether the ranks have formed the group; ``None``: they have not decided yet."""
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
                return made is not None and answer["moved"] == made.communicator.token
            elif answer["decided"] is not None:
                decision = read_decision(answer["decided"][1])
                return decision.flag and decision.kind == FORMED
            else:
                return None
        return False if unreached == len(members) else None

    def _is_valid(self, offer: dict[str, Json], made: Group, deadline: float) -> bool:
        """Wait until the ranks have decided whether the group is formed."""
        members = [Peer(Place.read(place)) for place in offer["members"]]
        while time.monotonic() < deadline + offer["timeout_s"]:
            decided = self._decision(offer, members, made)
            if decided is not None:
                return decided
            time.sleep(PAUSE_S)
        return False
