"""``one_shot``: every destination reads every source and combines them itself."""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Schedule, Step
from ..request import Participants, read_participants
from .packed import Moves, packed_schedule


def one_shot(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan that every destination reads the original of every source and combines them all.

    It has one round, the fewest, at the price of the most bytes: every destination receives the whole buffer of every
    other source. So it suits small buffers. Every element is combined in the order of the sources, so its bits equal
    those of ``one_device``. It is fast only if there is a link from every source to every destination.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; all have the same steps.
      first: ignored, since this schedule has no root that could rotate; all planners accept it.
    Returns:
      A schedule of at most 1 round.
    Raises:
      PlanError: as ``one_device``.

    >>> print(one_shot(["cpu:0", "cpu:1"]))
    all_reduce one_shot: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1
    """
    return one_shot_schedule(read_participants(devices, sources, destinations, packs, first))


def one_shot_schedule(participants: Participants) -> Schedule:
    """Return the schedule of ``one_shot`` with positions."""

    def moves(_: int) -> Moves:
        for dst in participants.destinations:
            if participants.sources != (dst,):
                yield 0, Step(0, dst, participants.sources)

    return packed_schedule(participants, "one_shot", 1, moves)
