"""``Request``, the one value that planning takes.

Input: canonical names, bytes, perhaps a topology. Output: the positions of the devices that take part.
"""

from __future__ import annotations

from typing import NamedTuple

from ..schedule import Costs
from ..topology import Topology

NO_MORE = Costs()


class Request(NamedTuple):
    """A collective to plan. All names are canonical."""

    collective: str  # "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather"
    sources: tuple[str, ...]  # the devices that contribute, in the order in which they are combined
    destinations: tuple[str, ...]  # the devices that need the result
    algorithm: str = "auto"  # a name of the registry, "auto", or "nccl", which is planned as "auto"
    topology: Topology | None = None  # the links that may be used; None: any two devices are linked equally
    nbytes: int = 0  # the size of one replica's buffer; for an all-gather, the size of all parts together
    packs: int = 1  # the number of equal packs of the buffer, each with its own root, if the algorithm has roots
    first: int = 0  # the first pack's root, owner or start: its number among the devices that can be it
    root: str | None = None  # the root of all packs; None: roots rotate over the devices
    devices: tuple[str, ...] = ()  # the devices of the schedule; (): sources, then other destinations, then the root
    costs: Costs = NO_MORE  # what a simulation counts besides the links
    granularity: float = 0.0  # the part of the rate that shares in powers of two may cost; 0: exact shares

    @property
    def members(self) -> tuple[str, ...]:
        """The devices that take part, in the order of the schedule's devices."""
        root = () if self.root is None else (self.root,)
        return self.devices or tuple(dict.fromkeys([*self.sources, *self.destinations, *root]))

    @property
    def positions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of the sources and of the destinations among the members."""
        number = {device: k for k, device in enumerate(self.members)}
        return tuple(number[source] for source in self.sources), tuple(number[dst] for dst in self.destinations)


def collective_between(members: int, sources: int, destinations: int) -> str:
    """Return the name of the collective with so many sources and destinations among so many devices.

    >>> collective_between(3, 3, 3), collective_between(3, 1, 3), collective_between(3, 2, 1)
    ('all_reduce', 'broadcast', 'reduce')
    """
    if sources == destinations == members:
        return "all_reduce"
    return "broadcast" if sources == 1 else "reduce"
