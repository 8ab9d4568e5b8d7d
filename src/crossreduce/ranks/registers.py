"""``Registers``: what the ranks of one host write down for agreements, in memory that outlives each of these ranks.

Input: memory that the ranks of a host share. Output: for each agreement of the group (see ``agreement``) the arrivals
of the host's ranks, the host's promises and accepted decisions, and the decision that is final. No rank waits for
another one here, so a rank that dies or is stopped at any moment blocks nobody.

A host is one acceptor. For each ballot of an agreement it has a register that is written once: with "nothing", which
rules out that the host accepts a decision in this ballot, or with an accepted decision. So a promise of Paxos is: write
"nothing" into all registers of earlier ballots that are not written. Source: H. Howard and R. Mortier, "A Generalised
Solution to Distributed Consensus" (2019), https://arxiv.org/abs/1902.06776.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from .. import kernels

BALLOTS: Final = 64  # of an agreement
_RING: Final = 4  # agreements in memory at a time: a rank that arrives at number k has left all up to k - 1
_UNSET, _NOTHING, _ACCEPTED = range(3)  # the states of a register
_STATE_BITS, _PLACE_BITS = 2, 22  # a register's word: number of the agreement, place of the rank with the value, state
_POSITION_WORDS: Final = 4  # of a rank: the number of its agreement, kind and flag, count, unused
_WORD: Final = 8  # bytes


class Contribution(NamedTuple):
    """What one rank brings to an agreement.

    ``number``: of the agreement, from 1; 0: this rank has arrived at none. ``kind``: what the rank wants to agree on; a
    small number. ``progress``: a number of which the least one is agreed on.
    """

    number: int
    kind: int
    flag: bool
    progress: int


class Decision(NamedTuple):
    """The result of an agreement. ``members``: the ranks of the group that took part, ascending.

    ``kind``: the greatest kind of all members. ``flag``: whether all flags are true and all kinds equal. ``progress``:
    the least one.
    """

    members: tuple[int, ...]
    kind: int
    flag: bool
    progress: int

    @classmethod
    def of(cls, contributions: dict[int, Contribution]) -> Decision:
        """Return the decision of ranks with these contributions.

        >>> Decision.of({0: Contribution(1, 0, True, 7), 2: Contribution(1, 0, True, 6)})
        Decision(members=(0, 2), kind=0, flag=True, progress=6)
        """
        given = contributions.values()
        same = len({each.kind for each in given}) == 1
        flag = same and all(each.flag for each in given)
        kind, progress = max(each.kind for each in given), min(each.progress for each in given)
        return cls(tuple(sorted(contributions)), kind, flag, progress)


class Overtaken(Exception):  # noqa: N818 - internal: the caller raises the public error
    """The group has gone on to later agreements without this rank."""


class Registers:
    """The registers of one host, in the view of its rank at ``place``; it has ``ranks`` of the group's ``size`` ranks.

    ``memory``: a writable buffer of ``nbytes(ranks, size)`` bytes, at first zero, which all ranks of the host share.
    """

    def __init__(self, memory: Any, place: int, ranks: int, size: int) -> None:
        self._memory, self._place, self._ranks = memory, place, ranks
        self._value_words = _value_words(size)
        self._native = kernels.native()
        self._lock = threading.Lock()  # one thread at a time writes this rank's values
        view = memoryview(memory)
        self._words = view[: self.nbytes(ranks, size)].cast("B").cast("Q")

    @staticmethod
    def nbytes(ranks: int, size: int) -> int:
        """Return the bytes of memory for ``ranks`` ranks of a host in a group of ``size`` ranks."""
        values = ranks * _RING * (BALLOTS + 1) * _value_words(size)
        return _WORD * (_RING * (BALLOTS + 1) + _POSITION_WORDS * ranks + values)

    def close(self) -> None:
        """Release the memory. Other methods must not be called any more."""
        with self._lock:
            self._words.release()

    # Arrivals

    def arrive(self, contribution: Contribution) -> None:
        """Write this rank's contribution to an agreement, at which it has arrived now."""
        at = self._position(self._place)
        with self._lock:
            self._words[at + 1] = contribution.kind << 1 | contribution.flag
            self._words[at + 2] = contribution.progress
            self._native.store_word(self._memory, at, contribution.number)

    def contribution(self, place: int) -> Contribution:
        """Return what the rank at ``place`` wrote at its latest arrival. It changes once that agreement is decided."""
        at = self._position(place)
        number = self._native.load_word(self._memory, at)
        kind = self._words[at + 1]
        return Contribution(number, kind >> 1, bool(kind & 1), self._words[at + 2])

    # Ballots

    def promise(self, number: int, ballot: int) -> tuple[int, Decision] | None:
        """Rule out to accept in an earlier ballot from now on; return the last accepted decision, with its ballot.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        found = None
        with self._lock:
            for earlier in range(ballot):
                if self._write(number, earlier, _NOTHING) == _ACCEPTED:
                    found = earlier, self._value(number, earlier)
        return found

    def accept(self, number: int, ballot: int, decision: Decision) -> Decision | None:
        """Accept a decision in a ballot; return the one that was accepted in it first; ``None``: that is ruled out.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        with self._lock:
            self._store(number, ballot, decision)
            return self._value(number, ballot) if self._write(number, ballot, _ACCEPTED) == _ACCEPTED else None

    def decide(self, number: int, decision: Decision) -> None:
        """Write the final decision of an agreement."""
        with self._lock:
            self._store(number, BALLOTS, decision)
            self._write(number, BALLOTS, _ACCEPTED)

    def decision(self, number: int) -> Decision | None:
        """Return the final decision of an agreement, if this host knows it.

        Raises:
          Overtaken: the group is at a later agreement.
        """
        with self._lock:
            return self._value(number, BALLOTS) if self._state(number, BALLOTS)[0] == _ACCEPTED else None

    # Words

    def _state(self, number: int, ballot: int) -> tuple[int, int]:
        """Return the state of a register and its word."""
        word = self._native.load_word(self._memory, self._register(number, ballot))
        written = word >> (_STATE_BITS + _PLACE_BITS)
        if written > number:
            raise Overtaken
        return (word & ((1 << _STATE_BITS) - 1) if written == number else _UNSET), word

    def _write(self, number: int, ballot: int, state: int) -> int:
        """Write a register if it is not written, and return its state."""
        while True:
            known, before = self._state(number, ballot)
            if known != _UNSET:
                return known
            after = (number << _PLACE_BITS | self._place) << _STATE_BITS | state
            self._native.swap_word(self._memory, self._register(number, ballot), before, after)

    def _value(self, number: int, ballot: int) -> Decision:
        """Return the decision in a register."""
        _, word = self._state(number, ballot)
        at = self._slot(word >> _STATE_BITS & ((1 << _PLACE_BITS) - 1), number, ballot)
        kind, progress, *mask = self._words[at : at + self._value_words]
        if self._state(number, ballot)[1] != word:
            raise Overtaken
        return Decision(_ranks_of(mask), kind >> 1, bool(kind & 1), progress)

    def _store(self, number: int, ballot: int, decision: Decision) -> None:
        """Write a decision where a register that this rank writes will find it."""
        if self._state(number, ballot)[0] != _UNSET:
            return
        at = self._slot(self._place, number, ballot)
        mask = _mask_of(decision.members, self._value_words - 2)
        for k, word in enumerate((decision.kind << 1 | decision.flag, decision.progress, *mask)):
            self._words[at + k] = word

    def _register(self, number: int, ballot: int) -> int:
        return number % _RING * (BALLOTS + 1) + ballot

    def _position(self, place: int) -> int:
        return _RING * (BALLOTS + 1) + _POSITION_WORDS * place

    def _slot(self, place: int, number: int, ballot: int) -> int:
        slots = (place * _RING + number % _RING) * (BALLOTS + 1) + ballot
        return self._position(self._ranks) + slots * self._value_words


def _value_words(size: int) -> int:
    return 2 + -(-size // 64)


def _mask_of(ranks: Iterable[int], words: int) -> list[int]:
    mask = [0] * words
    for rank in ranks:
        mask[rank // 64] |= 1 << rank % 64
    return mask


def _ranks_of(mask: Iterable[int]) -> tuple[int, ...]:
    return tuple(64 * k + bit for k, word in enumerate(mask) for bit in range(64) if word >> bit & 1)
