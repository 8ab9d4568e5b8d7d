"""``Request``, the one value that planning takes, and the border at which names become canonical.

Input: names in any spelling. Output: canonical names and positions. Nothing behind this file parses a name again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import PlanError
from ..topology import Topology
from ..values import read_devices


class Request(NamedTuple):
    """A collective to plan.

    Args:
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      sources: canonical names of the devices that contribute, in the order in which they are combined.
      destinations: canonical names of the devices that need the result.
      algorithm: a name of the registry, "auto", or "nccl", which is planned as "auto".
      topology: the links that may be used; ``None``: any two devices are linked equally.
      nbytes: of the buffer: of one replica's, for an all-reduce; of all parts together, for an all-gather.
      packs: the number of equal packs of the buffer. Each has its own root, if the algorithm has roots.
      first: the number of the first pack's root.
      root: canonical name of the root of all packs; ``None``: roots rotate over the devices.
    """

    collective: str
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    algorithm: str = "auto"
    topology: Topology | None = None
    nbytes: int = 0
    packs: int = 1
    first: int = 0
    root: str | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """The devices that take part: sources, then other destinations, then the root."""
        root = () if self.root is None else (self.root,)
        return tuple(dict.fromkeys([*self.sources, *self.destinations, *root]))

    @property
    def participants(self) -> Participants:
        """The members and their positions."""
        members = self.members
        position = {device: k for k, device in enumerate(members)}
        return Participants(
            members,
            tuple(position[device] for device in self.sources),
            tuple(position[device] for device in self.destinations),
            self.packs,
            self.first,
            self.collective,
        )


class Participants(NamedTuple):
    """The input of planners that need no topology: devices, and positions in ``devices``.

    Args:
      devices: canonical names, in the order of the schedule's devices.
      sources: positions of the devices that contribute.
      destinations: positions of the devices that need the result.
      packs: as in ``Request``.
      first: as in ``Request``.
      collective: the name for the schedule.
    """

    devices: tuple[str, ...]
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    packs: int
    first: int
    collective: str


def read_participants(
    devices: Sequence[str],
    sources: Sequence[str] | None,
    destinations: Sequence[str] | None,
    packs: int,
    first: int,
) -> Participants:
    """Return the participants that a caller names; ``None``: all devices.

    Raises:
      PlanError: no devices, a source or destination that is not one of the devices, fewer than one pack.
    """
    names = read_devices(devices)
    if not names:
        raise PlanError.of("a plan needs at least one device.", "no devices")
    if not isinstance(packs, int) or packs < 1 or not isinstance(first, int):
        given = f"packs={packs!r}, first={first!r}"
        raise PlanError.of("the buffer is cut into 1, 2, ... packs.", given, "packs=1")
    gives, takes = positions(names, sources, "the sources"), positions(names, destinations, "the destinations")
    return Participants(names, gives, takes, packs, first, collective_between(len(names), len(gives), len(takes)))


def collective_between(devices: int, sources: int, destinations: int) -> str:
    """Return the name of the collective with so many sources and destinations among so many devices.

    >>> collective_between(3, 3, 3), collective_between(3, 1, 3), collective_between(3, 2, 1)
    ('all_reduce', 'broadcast', 'reduce')
    """
    if sources == destinations == devices:
        return "all_reduce"
    return "broadcast" if sources == 1 else "reduce"


def positions(names: tuple[str, ...], chosen: Iterable[str] | None, what: str) -> tuple[int, ...]:
    """Return the positions of devices in ``names``; ``None``: of all.

    Raises:
      PlanError: no device, or one that is not in ``names``.
    """
    if chosen is None:
        return tuple(range(len(names)))
    wanted = read_devices(chosen)
    if not wanted:
        raise PlanError.of(f"{what} must be at least one device.", "none", ", ".join(names))
    number = {device: k for k, device in enumerate(names)}
    for device in wanted:
        if device not in number:
            raise PlanError.of(f"{what} must be among the devices.", device, "one of " + ", ".join(names))
    return tuple(number[device] for device in wanted)
