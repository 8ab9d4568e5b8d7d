"""``halving_doubling``: a reduce-scatter by recursive halving and an all-gather by recursive doubling."""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Schedule, Step
from ..request import Participants, read_participants
from .packed import Moves, packed_schedule


def halving_doubling(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan a reduce-scatter by recursive halving and an all-gather by recursive doubling.

    It sends as few bytes as a ring, in 2 log2(n) rounds. If the number of sources is not a power of two, each source
    beyond the largest power first adds its data to that of a partner, and receives the result from it at the end. If
    the destinations do not include all paired sources, every destination copies its chunks from the devices that
    reduced them.

    Args:
      devices: names; sources are paired in this order.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; all have the same steps.
      first: ignored, since this schedule has no root that could rotate; all planners accept it.
    Returns:
      A schedule of 2 log2(n) rounds for an all-reduce of n = 2**k devices, of 2 more for other n.
    Raises:
      PlanError: as ``one_device``.

    >>> len(halving_doubling([f"cpu:{k}" for k in range(8)]).rounds)
    6

    Source: Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1),
    2005.
    """
    return halving_doubling_schedule(read_participants(devices, sources, destinations, packs, first))


def halving_doubling_schedule(participants: Participants) -> Schedule:
    """Return the schedule of ``halving_doubling`` with positions."""
    sources, destinations = participants.sources, participants.destinations
    width = 1 << (len(sources).bit_length() - 1)
    paired, extras = sources[:width], sources[width:]
    levels = width.bit_length() - 1

    def moves(_: int) -> Moves:
        for chunk in range(width):
            for partner, extra in zip(paired, extras, strict=False):
                yield 0, Step(chunk, partner, (partner, extra))
            for level in range(levels):
                far = width >> (level + 1)
                for i in range(width):
                    if (i ^ chunk) < far:  # i keeps the half of the buffer with this chunk
                        low, high = sorted((i, i ^ far))
                        yield level + 1, Step(chunk, paired[i], (paired[low], paired[high]))
            after = levels + 1
            if not set(paired) <= set(destinations):
                for dst in destinations:
                    if dst != paired[chunk]:
                        yield after, Step(chunk, dst, (paired[chunk],))
                continue
            for level in range(levels):
                near = 1 << level
                for i in range(width):
                    if near <= (i ^ chunk) < 2 * near:
                        yield after + level, Step(chunk, paired[i], (paired[i ^ near],))
            for k, dst in enumerate(d for d in destinations if d not in paired):
                src = paired[extras.index(dst) if dst in extras else k % width]
                yield after + levels, Step(chunk, dst, (src,))

    return packed_schedule(participants, "halving_doubling", width, moves)
