"""Schedules made of equal packs, for the planners that need no topology.

Input: the steps of one pack. Output: a schedule of all packs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction

from ...schedule import Chunk, Schedule, Step
from ..request import Participants

Moves = Iterable[tuple[int, Step]]
"""The steps of one pack, in any order: (round, step). A step's chunk is one of the pack's own chunks, from 0."""


def packed_schedule(participants: Participants, algorithm: str, chunks: int, moves: Callable[[int], Moves]) -> Schedule:
    """Return the schedule of all packs.

    Args:
      participants: the devices, and the number of packs.
      algorithm: its name.
      chunks: the number of equal chunks of each pack.
      moves: returns the steps of a pack, given its number plus ``participants.first``.
    """
    devices, sources, destinations, packs, first, collective = participants
    rounds: defaultdict[int, list[Step]] = defaultdict(list)
    for pack in range(packs):
        for number, (chunk, dst, srcs) in moves(pack + first):
            rounds[number].append(Step(pack * chunks + chunk, dst, srcs))
    share = Chunk(Fraction(1, packs * chunks), sources, destinations)
    steps = tuple(tuple(rounds[number]) for number in sorted(rounds))
    return Schedule(collective, algorithm, devices, (share,) * (packs * chunks), steps)
