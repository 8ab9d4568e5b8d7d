"""``recursive_doubling``: pairwise exchanges of the whole buffer at distances 1, 2, 4, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...schedule import Schedule, Step, live_rounds
from ..request import Participants, read_participants
from .packed import Moves, packed_schedule


def recursive_doubling(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
) -> Schedule:
    """Plan pairwise exchanges of the whole buffer, at distances 1, 2, 4, ...

    An all-reduce takes log2(n) rounds, the fewest in which every device sends to one device at a time; in each of
    them every device sends its whole buffer. If the number of sources is not a power of two, each source beyond the
    largest power first adds its data to that of a partner, and receives the result from it at the end. Both devices of
    a pair combine their values in the same order, so every destination receives the same bits.

    Args:
      devices: names; sources are paired in this order.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all. Destinations that are not paired receive it at the
        end, along a binomial tree. Exchanges that no destination needs are left out, so a reduce to one device is a
        binomial tree, too.
      packs: the number of equal packs of the buffer; all have the same steps.
      first: ignored, since this schedule has no root that could rotate; all planners accept it.
    Returns:
      A schedule of log2(n) rounds for an all-reduce of n = 2**k devices, of 2 more for other n.
    Raises:
      PlanError: as ``one_device``.

    >>> print(recursive_doubling(["cpu:0", "cpu:1"]))
    all_reduce recursive_doubling: 2 devices, 1 chunk, 1 round, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1

    Source: Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1),
    2005.
    """
    return recursive_doubling_schedule(read_participants(devices, sources, destinations, packs, first))


def recursive_doubling_schedule(participants: Participants) -> Schedule:
    """Return the schedule of ``recursive_doubling`` with positions."""
    sources, destinations = participants.sources, participants.destinations
    width = 1 << (len(sources).bit_length() - 1)
    paired, extras = sources[:width], sources[width:]
    levels = width.bit_length() - 1
    partner_of = dict(zip(extras, paired, strict=False))

    def moves(_: int) -> Moves:
        for extra, partner in partner_of.items():
            yield 0, Step(0, partner, (partner, extra))
        for level in range(levels):
            distance = 1 << level
            for i in range(width):
                yield level + 1, Step(0, paired[i], (paired[i & ~distance], paired[i | distance]))
        copies = [(dst, partner_of[dst]) for dst in destinations if dst in partner_of]
        waiting = [dst for dst in destinations if dst not in paired and dst not in partner_of]
        complete = list(paired)  # the devices with the result
        after = levels + 1
        while copies or waiting:  # each complete device sends to one other device per round
            busy = {src for _, src in copies}
            free = [device for device in complete if device not in busy]
            copies += zip(waiting, free, strict=False)
            waiting = waiting[len(free) :]
            for dst, src in copies:
                yield after, Step(0, dst, (src,))
            complete += [dst for dst, _ in copies]
            copies, after = [], after + 1

    schedule = packed_schedule(participants, "recursive_doubling", 1, moves)
    if set(paired) <= set(destinations):
        return schedule
    return replace(schedule, rounds=tuple(tuple(steps) for steps in live_rounds(schedule)))
