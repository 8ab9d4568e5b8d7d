"""``Ballot``: one attempt of one host to make a decision final; Paxos between the hosts of a group. No I/O, no clock.

Input: the answers of hosts. Output: what to ask them next, and whether the decision is final. A host answers with its
``Registers``, so it answers the same whichever of its ranks are alive. Source: L. Lamport, "Paxos Made Simple" (2001).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .registers import Decision


def has_quorum(weights: Mapping[int, int], answered: Collection[int], ended: Collection[int]) -> bool:
    """Return whether so many hosts have answered that no others can decide anything else.

    Args:
      weights: the number of ranks that vote on each host. Hosts without any have no entry.
      answered: the hosts that have answered.
      ended: the hosts on which certainly no rank lives any more.

    It needs hosts with more than half of the ranks; or with half of them, the lowest host included; or all hosts that
    have not ended. Any two such sets have a host in common, unless all hosts of the earlier one have ended.

    >>> two = {0: 2, 1: 2}
    >>> has_quorum(two, {0}, set()), has_quorum(two, {1}, set()), has_quorum(two, {1}, {0})
    (True, False, True)
    >>> has_quorum({0: 1, 1: 1, 2: 1}, {1, 2}, set()), has_quorum({0: 1, 1: 1, 2: 1}, {2}, {0})
    (True, False)
    """
    if not answered:
        return False
    if all(host in answered or host in ended for host in weights):
        return True
    ranks = 2 * sum(weights.get(host, 0) for host in answered)
    total = sum(weights.values())
    return ranks > total or (ranks == total and min(weights) in answered)


class Ballot:
    """A ballot of host ``own`` for ``decision``, unless hosts have accepted another one before.

    The caller asks hosts to promise (unless ``accepting``), then host ``own`` and after it the others to accept, passes
    on their answers, and asks no more when this is ``final`` or ``refused``.
    """

    def __init__(self, number: int, own: int, decision: Decision, weights: Mapping[int, int]) -> None:
        self.number, self.own, self.decision, self.weights = number, own, decision, weights
        self.accepting = number == 0  # no host can have accepted anything before
        self.final = self.refused = False
        self.answered: set[int] = set()  # in the current phase
        self.ended: set[int] = set()
        self._last = -1  # the ballot of the last decision that a host has accepted

    def promised(self, host: int, accepted: tuple[int, Decision] | None) -> None:
        """A host has promised; ``accepted``: see ``Registers.promise``."""
        if self.accepting:
            return
        if accepted is not None and accepted[0] > self._last:
            self._last, self.decision = accepted
        self.answered.add(host)
        self._count()

    def accepted(self, host: int, decision: Decision | None) -> None:
        """A host has accepted ``decision`` in this ballot; ``None``: it has promised not to.

        Another rank of host ``own`` may have begun the same ballot with another decision, which then counts.
        """
        if decision is None:
            self.refused = True
            return
        if host == self.own:
            self.decision = decision
        assert decision == self.decision, "a ballot has one decision"
        self.answered.add(host)
        self._count()

    def lost(self, host: int) -> None:
        """All ranks of a host have certainly ended."""
        self.ended.add(host)
        self._count()

    def _count(self) -> None:
        if self.own not in self.answered or not has_quorum(self.weights, self.answered, self.ended):
            return
        if self.accepting:
            self.final = True
        else:
            self.accepting, self.answered = True, set()
