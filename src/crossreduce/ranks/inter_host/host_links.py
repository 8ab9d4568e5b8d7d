"""``HostLinks``: which hosts of a group can exchange messages directly.

Input: the ranks that could not connect to each other. Output: the pairs of hosts without a link, and errors about them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ...errors import ReductionError, UnsupportedError
from ..connections.peers import Membership
from ..transports.base import Rendezvous
from .call_comparison import Patience
from .multi_host import MultiHostEngine
from .two_level import Lost, distances, lost_links

_LOG: Final = logging.getLogger("crossreduce")
NETWORK_REMEDY: Final = "a network on which all ranks reach each other; CROSSREDUCE_IFNAME names the interface"
PATIENCE_S: Final = 10.0  # time limit of a message in a check of the links; TCP resends a lost packet after 1 to 3 s


class HostLinks:
    """The links between the hosts of a group. ``lost``: the pairs of hosts without a link, in ascending order.

    ``transport``: the name of the transport on which the ranks have agreed, or "" without other hosts.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        self.lost: Lost = ()
        self.transport = ""
        self._checks = 0

    def __contains__(self, pair: tuple[int, int]) -> bool:
        """Return whether two hosts, by their numbers, can exchange messages directly."""
        return (min(pair), max(pair)) not in self.lost

    def unreached(
        self, call: Callable[[], None], engine: MultiHostEngine, rendezvous: Rendezvous, timeout_s: float
    ) -> dict[int, list[int]]:
        """Run a call that all ranks make. Return for each rank the ranks whose messages did not arrive in time.

        A message may take ``PATIENCE_S`` after all ranks have begun the call, or less if ``timeout_s`` is short.
        """
        self._checks += 1
        number = self._checks
        # The first messages of an op take one round per link of the longest route. Each round may take ``limit_s``.
        limit_s = min(PATIENCE_S, timeout_s / (1 + engine.diameter))
        patience = Patience(lambda: rendezvous.have_announced(number), limit_s)
        rendezvous.announce(number)
        engine.patience = patience
        try:
            call()
        finally:
            engine.patience = None
        own = json.dumps(sorted(patience.given_up)).encode()
        return {rank: json.loads(given_up) for rank, given_up in enumerate(rendezvous.all_gather(own))}

    def lose(self, unreached: Mapping[int, Iterable[int]]) -> bool:
        """Add the links of ranks that did not reach each other to ``lost``. Return whether a link was added.

        ``unreached``: for each rank the ranks that it did not reach.

        Raises:
          ReductionError: some hosts have no route to each other any more, not even through other hosts.
        """
        lost = tuple(sorted({*self.lost, *lost_links(self._members.hosts, unreached)}))
        if lost == self.lost:
            return False
        self.lost = lost
        if any(hops < 0 for hops in distances(len(self._members.hosts), lost)[0]):
            given = f"no connection between {self.text}"
            raise ReductionError.of("the ranks could not connect to each other.", given, NETWORK_REMEDY)
        if self._members.rank == 0:
            text = 'group "%s": no connection between %s. Collectives pass through other hosts.'
            _LOG.warning(text, self._members.name, self.text)
        return True

    def require(self, method: str, peer: int) -> None:
        """Raise an ``UnsupportedError`` if the host of this rank has no link to that of ``peer``."""
        hosts = self._members.hosts
        own, other = hosts.index(self._members.host), next(k for k, ranks in enumerate(hosts) if peer in ranks)
        if (own, other) not in self:
            problem = f"a {method} needs a connection between the hosts of both ranks."
            given = f"no connection between {self._members.link_text(own, other)}"
            raise UnsupportedError.of(problem, given, "a collective, which passes through other hosts")

    def require_all(self, call: str) -> None:
        """Raise an ``UnsupportedError`` if a link is lost: another library executes ``call`` and needs all links."""
        if self.lost:
            problem = f"{call} of these arguments needs a connection between every two hosts."
            given = f"no connection between {self.text}"
            raise UnsupportedError.of(problem, given, "a collective of the library, which passes through other hosts")

    @property
    def text(self) -> str:
        """The pairs of hosts without a link, as errors show them."""
        return "; ".join(self._members.link_text(*pair) for pair in self.lost)
