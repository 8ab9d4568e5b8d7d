"""``one_device``: one device combines everything and sends the result to all destinations."""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Schedule, Step
from ..request import Participants, Request, positions, read_participants
from .packed import Moves, packed_schedule


def one_device(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Plan that one device, the root, combines everything and sends the result to all destinations.

    It has two rounds and the fewest steps, but all bytes pass one device. TensorFlow's ``ReductionToOneDevice`` does
    the same.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer.
      first: the destination that is the root of the first pack; the roots of further packs are the next destinations.
      root: a device that is the root of every pack; it may be neither a source nor a destination.
    Returns:
      A schedule of at most 2 rounds.
    Raises:
      PlanError: a source, destination or root that is not one of ``devices``; fewer than one pack.

    >>> print(one_device(["cpu:0", "cpu:1", "cpu:2"], destinations=["cpu:1"]))
    reduce one_device: 3 devices, 1 chunk, 1 round, 1 step
      round 0: chunk 0: cpu:1 <- cpu:0 + cpu:1 + cpu:2
    """
    participants = read_participants(devices, sources, destinations, packs, first)
    main = None if root is None else positions(participants.devices, [root], "the root")[0]
    return on_root(participants, main)


def one_device_schedules(request: Request) -> list[Schedule]:
    """Return the schedule of a request."""
    main = None if request.root is None else request.members.index(request.root)
    return [on_root(request.participants, main)]


def on_root(participants: Participants, root: int | None, algorithm: str = "one_device") -> Schedule:
    """Return the schedule of ``one_device`` with the position of the root."""
    sources, destinations = participants.sources, participants.destinations

    def moves(pack: int) -> Moves:
        main = destinations[pack % len(destinations)] if root is None else root
        if sources != (main,):
            yield 0, Step(0, main, sources)
        for dst in destinations:
            if dst != main:
                yield 1, Step(0, dst, (main,))

    return packed_schedule(participants, algorithm, 1, moves)
