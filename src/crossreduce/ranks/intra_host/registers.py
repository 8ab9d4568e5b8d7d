"""``Registers``: the records of one host's ranks for agreements, in memory that outlives each of these ranks.

Input: memory that the ranks of a host share. Output: for each agreement of the group (see ``agreement``) the arrivals
of the host's ranks, the host's promises and accepted decisions, and the decision that is final. No rank waits for
another one here, so a rank that dies or is stopped at any moment does not block others.

Each host is one acceptor of Paxos. For each ballot of an agreement it has a register that is written once: with an
accepted decision, or with "nothing", after which the host cannot accept a decision in this ballot. So the promise of
Paxos is to write "nothing" into all registers of earlier ballots that are not written yet. Source: H. Howard and R.
Mortier, "A Generalised Solution to Distributed Consensus" (2019), https://arxiv.org/abs/1902.06776.

The survivors of a group decide without hosts that have ended, although messages of such hosts may still arrive. So a
ballot that does not count the votes of these hosts rules out all their ballots, and all final decisions of their
ballots that have not arrived yet. For the latter, a host has one more register per host, for the final decision that a
ballot of that host has made. A host answers a request only if it has the same electors as the sender (``follows``).
``tests/ranks/survival/test_membership_model.py`` checks these rules in all runs of small groups.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from ... import kernels

ROUNDS: Final = 16  # the most rounds of an agreement; in each round every host has one ballot
_RING: Final = 4  # agreements in memory at the same time; a rank that arrives at number k has left all earlier ones
_UNSET, _NOTHING, _ACCEPTED = range(3)  # the states of a register
_STATE_BITS, _PLACE_BITS = 2, 22  # a register's word: number of the agreement, place of the rank with the value, state
_POSITION_WORDS: Final = 4  # words of a rank's arrival: number of its agreement, kind and flag, progress, unused
_WORD: Final = 8  # bytes


class Contribution(NamedTuple):
    """The input of one rank to an agreement.

    ``number``: the agreement's number, from 1, or 0 if this rank has arrived at none. ``kind``: a small number for what
    the rank wants to agree on. ``progress``: a number; the decision contains the lowest progress of all members.
    """

    number: int
    kind: int
    flag: bool
    progress: int


class Decision(NamedTuple):
    """The result of an agreement. ``members``: the ranks of the group that took part, ascending.

    ``kind``: the highest kind of the members. ``flag``: whether all their flags are true and all their kinds are equal.
    ``progress``: their lowest progress.
    """

    members: tuple[int, ...]
    kind: int
    flag: bool
    progress: int

    @classmethod
    def of(cls, contributions: dict[int, Contribution]) -> Decision:
        """Return the decision that follows from the contributions of the members, by rank.

        >>> Decision.of({0: Contribution(1, 0, True, 7), 2: Contribution(1, 0, True, 6)})
        Decision(members=(0, 2), kind=0, flag=True, progress=6)
        """
        values = contributions.values()
        same_kind = len({each.kind for each in values}) == 1
        flag = same_kind and all(each.flag for each in values)
        kind, progress = max(each.kind for each in values), min(each.progress for each in values)
        return cls(tuple(sorted(contributions)), kind, flag, progress)


class Overtaken(Exception):  # noqa: N818 - internal: the caller raises the public error
    """The group has gone on to later agreements without this rank."""


class Registers:
    """Access of one rank to the registers of its host. ``place``: its index among the ``ranks`` ranks of the host.

    ``memory``: ``nbytes(ranks, size, hosts)`` writable bytes, at first zero, which all ranks of the host share. The
    ballots of host h have the numbers h, h + hosts, h + 2 hosts, ..., below ``ballots``.
    """

    def __init__(self, memory: Any, place: int, ranks: int, size: int, hosts: int) -> None:
        self._memory, self._place, self._ranks, self._hosts = memory, place, ranks, hosts
        self.ballots = ROUNDS * hosts
        self._final = self.ballots + hosts  # number of the register with the final decision; see ``_state``
        self._value_words = _value_words(size)
        self._native = kernels.native()
        self._lock = threading.Lock()  # one thread at a time writes this rank's values
        view = memoryview(memory)
        self._words = view[: self.nbytes(ranks, size, hosts)].cast("B").cast("Q")

    @staticmethod
    def nbytes(ranks: int, size: int, hosts: int) -> int:
        """Return the bytes of memory for ``ranks`` ranks of a host in a group of ``size`` ranks on ``hosts`` hosts."""
        registers = _RING * (ROUNDS * hosts + hosts + 1)
        return _WORD * (registers + _POSITION_WORDS * ranks + registers * ranks * _value_words(size))

    def close(self) -> None:
        """Release the memory. Other methods must not be called any more."""
        with self._lock:
            self._words.release()

    # Arrivals

    def arrive(self, contribution: Contribution) -> None:
        """Write this rank's contribution to an agreement; from now on this rank has arrived at it."""
        at = self._position(self._place)
        with self._lock:
            self._words[at + 1] = contribution.kind << 1 | contribution.flag
            self._words[at + 2] = contribution.progress
            self._native.store_word(self._memory, at, contribution.number)  # last: publishes the other words

    def contribution(self, place: int) -> Contribution:
        """Return the contribution of the rank at ``place`` to the latest agreement at which it has arrived."""
        at = self._position(place)
        number = self._native.load_word(self._memory, at)
        kind = self._words[at + 1]
        return Contribution(number, kind >> 1, bool(kind & 1), self._words[at + 2])

    # Ballots

    def promise(self, number: int, ballot: int, ended: Collection[int] = ()) -> tuple[int, Decision] | None:
        """Prevent this host from accepting a decision in an earlier ballot, or in any ballot of the hosts ``ended``.

        Return the last decision that was already accepted or final in one of these ballots, with its ballot's number.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        ruled_out = [*range(ballot)]
        for host in ended:
            ruled_out += [*range(host, self.ballots, self._hosts), self.ballots + host]
        with self._lock:
            accepted = [each for each in ruled_out if self._write(number, each, _NOTHING) == _ACCEPTED]
            return max((self._value(number, each) for each in accepted), default=None)

    def accept(self, number: int, ballot: int, decision: Decision) -> Decision | None:
        """Accept a decision if this ballot has none yet. Return the ballot's decision, or ``None`` if it is ruled out.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        with self._lock:
            accepted = self._accept(number, ballot, ballot, decision)
            return accepted and accepted[1]

    def decide(self, number: int, ballot: int, decision: Decision) -> bool:
        """Write the decision that a ballot has made final. Return whether this host now has the final decision.

        It does not have it if it has ruled out all ballots of that ballot's host. A later ballot then brings it.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        with self._lock:
            if self._accept(number, self.ballots + ballot % self._hosts, ballot, decision) is not None:
                self._accept(number, self._final, ballot, decision)
            return self._state(number, self._final)[0] == _ACCEPTED

    def decision(self, number: int) -> tuple[int, Decision] | None:
        """Return the final decision of an agreement and the ballot that made it final, or ``None`` if it is unknown.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        with self._lock:
            return self._value(number, self._final) if self._state(number, self._final)[0] == _ACCEPTED else None

    def follows(self, number: int, previous: tuple[int, Decision] | None) -> bool:
        """Return whether this host has the same electors for agreement ``number`` as a host that sent it a request.

        Only then may this host answer the request. ``previous``: ``decision(number - 1)`` of the other host, or
        ``None`` for the first agreement. This host records it, too.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        if previous is None:
            return number == 1
        self.decide(number - 1, *previous)
        own = self.decision(number - 1)
        return own is not None and own[1] == previous[1]

    # Words

    def _state(self, number: int, register: int) -> tuple[int, int]:
        """Return the state of a register and its word.

        Registers are numbered: first one for each ballot, then one for each host, for the final decision that a ballot
        of that host made. The last register has the final decision of this host.
        """
        word = self._native.load_word(self._memory, self._register(number, register))
        written = word >> (_STATE_BITS + _PLACE_BITS)
        if written > number:
            raise Overtaken
        return (word & ((1 << _STATE_BITS) - 1) if written == number else _UNSET), word

    def _write(self, number: int, register: int, state: int) -> int:
        """Write a state into a register that is not written yet. Return the register's state."""
        while True:
            current, before = self._state(number, register)
            if current != _UNSET:
                return current
            after = (number << _PLACE_BITS | self._place) << _STATE_BITS | state
            self._native.swap_word(self._memory, self._register(number, register), before, after)

    def _accept(self, number: int, register: int, ballot: int, decision: Decision) -> tuple[int, Decision] | None:
        """Write a decision into a register that is not written yet. Return its content, or ``None`` if "nothing"."""
        self._store(number, register, ballot, decision)
        return self._value(number, register) if self._write(number, register, _ACCEPTED) == _ACCEPTED else None

    def _value(self, number: int, register: int) -> tuple[int, Decision]:
        """Return the decision in a register, and the ballot in which it was accepted."""
        _, word = self._state(number, register)
        at = self._slot(word >> _STATE_BITS & ((1 << _PLACE_BITS) - 1), number, register)
        ballot, kind, progress, *mask = self._words[at : at + self._value_words]
        if self._state(number, register)[1] != word:
            raise Overtaken
        return ballot, Decision(_ranks_of(mask), kind >> 1, bool(kind & 1), progress)

    def _store(self, number: int, register: int, ballot: int, decision: Decision) -> None:
        """Write a decision into this rank's slot for a register, before ``_write`` publishes the slot there."""
        while True:
            state, before = self._state(number, register)
            if state != _UNSET:
                return
            if before >> (_STATE_BITS + _PLACE_BITS) == number:
                break
            # The register belongs to an earlier agreement, and its value may be in this rank's slot: empty it first.
            after = (number << _PLACE_BITS | self._place) << _STATE_BITS | _UNSET
            self._native.swap_word(self._memory, self._register(number, register), before, after)
        at = self._slot(self._place, number, register)
        mask = _mask_of(decision.members, self._value_words - 3)
        for k, word in enumerate((ballot, decision.kind << 1 | decision.flag, decision.progress, *mask)):
            self._words[at + k] = word

    # Positions in the memory, in words: first all registers, then the arrivals of all ranks, then the slots. Each rank
    # has a slot for each register, for the value that it writes.

    def _register(self, number: int, register: int) -> int:
        return number % _RING * (self._final + 1) + register

    def _position(self, place: int) -> int:
        return _RING * (self._final + 1) + _POSITION_WORDS * place

    def _slot(self, place: int, number: int, register: int) -> int:
        slot = (place * _RING + number % _RING) * (self._final + 1) + register
        return self._position(self._ranks) + slot * self._value_words


def _value_words(size: int) -> int:
    return 3 + -(-size // 64)  # ballot, kind and flag, progress, one bit for each rank


def _mask_of(ranks: Iterable[int], words: int) -> list[int]:
    mask = [0] * words
    for rank in ranks:
        mask[rank // 64] |= 1 << rank % 64
    return mask


def _ranks_of(mask: Iterable[int]) -> tuple[int, ...]:
    return tuple(64 * k + bit for k, word in enumerate(mask) for bit in range(64) if word >> bit & 1)
