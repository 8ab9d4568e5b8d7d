"""``Membership``: the ranks of a group, their hosts, and the ``PeerInfo`` that each of them has sent to all others.

These are plain values, which never change. ``failure_detector`` finds ranks that fail later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from ...errors import rank_list
from ..transports.choice import Offer
from .peer_requests import Place

Hosts: TypeAlias = tuple[tuple[int, ...], ...]  # the ranks of each host, ascending


class PeerInfo(NamedTuple):
    """What a rank sends to all others. ``place``: where it listens. The ``token`` of rank 0 identifies the group.

    ``offer``: the transport between hosts that it wants.
    """

    pid: int
    hostname: str
    token: str
    place: Place
    offer: Offer


@dataclass(frozen=True)
class Membership:
    """The ranks of a group, from the view of rank ``rank``.

    ``global_ranks``: the ranks' numbers in messages and errors, such as those in a larger group.
    """

    name: str
    rank: int
    global_ranks: tuple[int, ...]
    hosts: Hosts
    peers: tuple[PeerInfo, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.peers)

    @property
    def token(self) -> str:
        """The text that identifies the group to other processes."""
        return self.peers[0].token

    @property
    def own(self) -> int:
        """This rank's number in messages and errors."""
        return self.global_ranks[self.rank]

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)

    def global_hosts(self) -> list[list[int]]:
        """Return the ranks of each host, by their numbers in messages."""
        return [[self.global_ranks[rank] for rank in host] for host in self.hosts]

    def link_text(self, a: int, b: int) -> str:
        """Return the text by which errors name two hosts, given their numbers."""
        hosts = self.global_hosts()
        return " and ".join(f"host {host} ({rank_list(hosts[host])})" for host in (a, b))


def rail_peers(hosts: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    """Return the rail leaders, one of each host, among which ``rank`` exchanges data. If it is not a leader, return ().

    >>> rail_peers(((0, 1), (2, 3, 4)), 3), rail_peers(((0, 1), (2, 3, 4)), 4)
    ((1, 3), ())
    """
    place = next(ranks for ranks in hosts if rank in ranks).index(rank)
    return tuple(ranks[place] for ranks in hosts) if place < min(map(len, hosts)) else ()
