"""Finds the ranks of a group that are lost, or behind a lost link, while the others form a new group.

Input: the agreements of a group. Output: ranks. Nothing here waits for an answer of another host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ..connections.repeated_request import RepeatedRequest
from ..intra_host.registers import Overtaken
from .agreement import LOOK_S, Agreements

_REACH_S: Final = 0.1  # from an answer to the next request that checks whether a host can be reached
_RECENT_S: Final = 1.0  # for how long a direct answer shows that a link is not lost


class Reach:
    """Finds out which ranks of other hosts answer only through a relay, so that the link to their hosts is lost."""

    def __init__(self, group: Agreements, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self._inquiry: RepeatedRequest | None = None

    def is_beyond(self, rank: int) -> bool:
        """Return whether a rank answers only through a relay, and its host has not answered directly for ``_RECENT_S``.

        The first call starts requests in the background, later calls read the answers, and none waits.
        """
        group, members = self._group, self._members
        if self._inquiry is None:
            others = {group.host_of(each) for each in members} - {group.own_host}
            # Any request would do: only who answers counts, and whether directly.
            self._inquiry = group.inquiry(others, members, {"what": "published", "key": ""}, _REACH_S)
        self._inquiry.read()
        if rank not in group.others or group.others[rank].relay is None:
            return False
        reached_at = max(group.others[each].reached_at for each in group.hosts[group.host_of(rank)])
        return reached_at < time.monotonic() - _RECENT_S


class Watch:
    """Finds the electors of the next agreement that are lost before they have arrived at it.

    ``failed``: of the ranks that ``lost`` has returned, those that have arrived with the flag false.
    """

    def __init__(self, group: Agreements, electors: Sequence[int]) -> None:
        self.failed: list[int] = []
        self._group, self._electors, self._number = group, electors, group.number + 1
        self._inquiry: RepeatedRequest | None = None

    def lost(self) -> list[int]:
        """Return the electors that have ended, are stopped, have arrived with the flag false, or have a silent host.

        This does not wait for answers of other hosts, so it is called repeatedly.
        """
        group, electors, number = self._group, self._electors, self._number
        try:
            if self._inquiry is None:
                others = {group.host_of(rank) for rank in electors} - {group.own_host}
                request = group.request("status", number, electors=electors)
                self._inquiry = group.inquiry(others, electors, request, LOOK_S)
            self._inquiry.read()
            statuses = {**self._inquiry.found, group.own_host: group.status(number, electors)}
        except Overtaken:  # they have excluded this rank
            return [rank for rank in electors if rank != group.rank]
        lost = []
        for rank in electors:
            host = group.host_of(rank)
            is_lost = host != group.own_host and self._inquiry.is_silent(host)
            if host in statuses:
                status = statuses[host] or {}  # ``None``: all electors there have ended
                arrived = status.get("arrived", {}).get(str(rank))  # kind, flag, progress
                if arrived and not arrived[1] and rank not in self.failed:
                    self.failed.append(rank)
                is_lost = is_lost or (not arrived[1] if arrived else rank not in status.get("late", []))
            if is_lost:
                lost.append(rank)
        return lost
