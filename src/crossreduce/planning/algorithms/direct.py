"""``direct``: every owner reduces one share of the buffer and sends it to all destinations."""

from __future__ import annotations

from collections.abc import Sequence

from ...schedule import Schedule, Step
from ..request import Participants, positions, read_participants
from .packed import Moves, packed_schedule


def direct(
    devices: Sequence[str],
    sources: Sequence[str] | None = None,
    destinations: Sequence[str] | None = None,
    *,
    packs: int = 1,
    first: int = 0,
    owners: Sequence[str] | None = None,
) -> Schedule:
    """Plan that every owner reduces one share of the buffer and then sends it to all destinations.

    It has two rounds, sends as few bytes as a ring, and combines every element in the order of the devices, so its bits
    equal those of ``one_device``. It is fast only if there is a link between every two devices.

    Args:
      devices: names, in the order in which components are combined.
      sources: the devices that contribute; ``None``: all.
      destinations: the devices that need the result; ``None``: all.
      packs: the number of equal packs of the buffer; each is divided into one share per owner.
      first: the owner of the first share of the first pack.
      owners: the devices that reduce one share each; ``None``: the destinations. With all devices as owners, a reduce
        to one root is shared by all of them.
    Returns:
      A schedule of at most 2 rounds.
    Raises:
      PlanError: as ``one_device``; or an owner is not one of the devices.

    >>> print(direct(["cpu:0", "cpu:1"]))
    all_reduce direct: 2 devices, 2 chunks, 2 rounds, 4 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 0: chunk 1: cpu:1 <- cpu:0 + cpu:1
      round 1: chunk 0: cpu:1 <- cpu:0
      round 1: chunk 1: cpu:0 <- cpu:1
    """
    participants = read_participants(devices, sources, destinations, packs, first)
    shares = None if owners is None else positions(participants.devices, owners, "the owners")
    return direct_schedule(participants, shares)


def direct_schedule(participants: Participants, owners: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule of ``direct`` with positions."""
    sources, destinations = participants.sources, participants.destinations
    owners = destinations if owners is None else owners

    def moves(pack: int) -> Moves:
        for chunk in range(len(owners)):
            owner = owners[(chunk + pack) % len(owners)]
            if sources != (owner,):
                yield 0, Step(chunk, owner, sources)
            for dst in destinations:
                if dst != owner:
                    yield 1, Step(chunk, dst, (owner,))

    return packed_schedule(participants, "direct", len(owners), moves)
