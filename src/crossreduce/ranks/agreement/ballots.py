"""``Ballot``: one attempt of one host to make a decision final, by Paxos between the hosts. No I/O, no clock.

Input: the answers of hosts. Output: the next request to them, and whether the decision is final. A host answers from
its ``Registers``, whichever of its ranks is asked. Source: L. Lamport, "Paxos Made Simple" (2001).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..intra_host.registers import Decision


def has_quorum(weights: Mapping[int, int], answered: Collection[int], ended: Collection[int] = ()) -> bool:
    """Return whether enough hosts have answered, so that the others cannot decide anything else.

    Args:
      weights: the number of ranks that vote on each host. Hosts without any have no entry.
      answered: the hosts that have answered.
      ended: hosts that do not count in this ballot, since all of their ranks that vote have certainly ended.

    Hosts are a quorum if they have more than half of the ranks, or half of the ranks and include the lowest host. Any
    two quorums have a host in common. If ``ended`` is not empty, all other hosts must have answered.

    >>> two = {0: 2, 1: 2}
    >>> has_quorum(two, {0}), has_quorum(two, {1}), has_quorum(two, {1}, {0})
    (True, False, True)
    >>> has_quorum({0: 1, 1: 1, 2: 1}, {1, 2}), has_quorum({0: 1, 1: 1, 2: 1}, {2}, {0})
    (True, False)
    """
    if ended:
        return all(host in answered or host in ended for host in weights)
    ranks = 2 * sum(weights.get(host, 0) for host in answered)
    total = sum(weights.values())
    return ranks > total or (ranks == total and min(weights) in answered)


class Ballot:
    """A ballot of host ``own`` for ``decision``, or for another decision that hosts have accepted before.

    The caller asks host ``own`` and after it the others to promise (unless ``accepting``), then in the same order to
    accept, passes on their answers, and sends no further requests when the result is ``final`` or ``refused``.

    Args:
      number: see ``Registers``. A rank uses each number once.
      weights: the number of ranks that vote on each host.
      ended: the hosts on which all ranks have ended. The attribute ``ended``, which the caller passes to
        ``Registers.promise``, is empty if the other hosts are a quorum.
    """

    def __init__(
        self, number: int, own: int, decision: Decision, weights: Mapping[int, int], ended: Collection[int] = ()
    ) -> None:
        self.number, self.own, self.decision, self.weights = number, own, decision, weights
        living = weights.keys() - set(ended)
        self.ended = frozenset[int]() if has_quorum(weights, living) else frozenset(ended)
        # In ballot 0 no host can have accepted anything before, but an ended host may have made a later ballot final.
        self.accepting = number == 0 and not self.ended
        self.final = self.refused = False
        self.answered: set[int] = set()  # in the current phase
        self._last = -1  # the ballot of the last decision that a host has accepted

    def promised(self, host: int, accepted: tuple[int, Decision] | None) -> None:
        """Record the promise of a host. ``accepted``: the result of ``Registers.promise`` there."""
        if self.accepting:
            return
        assert self.own in self.answered or host == self.own, "host own promises first"
        if accepted is not None and accepted[0] > self._last:
            self._last, self.decision = accepted
        self.answered.add(host)
        if has_quorum(self.weights, self.answered, self.ended):
            self.accepting, self.answered = True, set()

    def accepted(self, host: int, decision: Decision | None) -> None:
        """Record the answer of a host to the request to accept: the result of ``Registers.accept`` there.

        Another rank of host ``own`` may have begun the same ballot with another decision, which then counts.
        """
        if decision is None:
            self.refused = True
            return
        if host == self.own:
            self.decision = decision
        assert decision == self.decision, "a ballot has one decision"
        self.answered.add(host)
        self.final = self.own in self.answered and has_quorum(self.weights, self.answered, self.ended)


def read_decision(given: Sequence[Any]) -> Decision:
    """Return a decision that was sent as JSON."""
    members, kind, flag, progress = given
    return Decision(tuple(int(rank) for rank in members), int(kind), bool(flag), int(progress))


def read_decided(given: Sequence[Any] | None) -> tuple[int, Decision] | None:
    """Return a decision that was sent as JSON with its ballot, or ``None``."""
    return None if given is None else (int(given[0]), read_decision(given[1]))
