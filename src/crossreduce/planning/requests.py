"""``Request``, which contains all arguments of planning.

Input: canonical names, or the arguments of a public planner for lists of devices. Output: a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import PlanError
from ..schedule import Costs
from ..topology import Topology
from ..values import read_devices

NO_MORE = Costs()  # no costs besides the time of the links


class Request(NamedTuple):
    """A collective to plan. All names are canonical."""

    collective: str  # "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather"
    sources: tuple[str, ...]  # the devices that contribute, in the order in which they are combined
    destinations: tuple[str, ...]  # the devices that need the result
    algorithm: str = "auto"  # a name of the registry, "auto", or "nccl", which is planned as "auto"
    topology: Topology | None = None  # the links that may be used; None: every two devices are linked equally
    nbytes: int = 0  # the size of one replica's buffer; for an all-gather, the size of all parts together
    packs: int = 1  # the number of equal packs of the buffer, each with its own root, if the algorithm has roots
    first: int = 0  # the number of the first pack's root, owner or start among the devices that can have this role
    root: str | None = None  # the root of all packs; None: roots rotate over the devices
    devices: tuple[str, ...] = ()  # the devices of the schedule; (): sources, then other destinations, then the root
    costs: Costs = NO_MORE  # what a simulation counts besides the links
    granularity: float = 0.0  # the part of the rate that rounded shares may cost (see ``plan``); 0: exact shares

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
    """Return the name of a collective, given the numbers of its members, sources and destinations.

    >>> collective_between(3, 3, 3), collective_between(3, 1, 3), collective_between(3, 2, 1)
    ('all_reduce', 'broadcast', 'reduce')
    """
    if sources == destinations == members:
        return "all_reduce"
    return "broadcast" if sources == 1 else "reduce"


def read_request(
    algorithm: str,
    devices: Sequence[str],
    sources: Sequence[str] | None,
    destinations: Sequence[str] | None,
    packs: int,
    first: int,
) -> Request:
    """Check the arguments of a public planner, and return them as a request with canonical names."""
    names = read_devices(devices)
    if not names:
        raise PlanError.of("a plan needs at least one device.", "no devices", 'devices=["cpu:0", "cpu:1"]')
    if not isinstance(packs, int) or isinstance(packs, bool) or packs < 1:
        raise PlanError.of("packs must be an int > 0.", f"packs={packs!r}", "packs=1")
    if not isinstance(first, int):
        raise PlanError.of("first must be an int.", f"first={first!r}", "first=0")
    source_names = read_members(names, sources, "the sources")
    destination_names = read_members(names, destinations, "the destinations")
    collective = collective_between(len(names), len(source_names), len(destination_names))
    return Request(collective, source_names, destination_names, algorithm, packs=packs, first=first, devices=names)


def read_members(names: tuple[str, ...], chosen: Sequence[str] | None, what: str) -> tuple[str, ...]:
    """Return the canonical names of the chosen devices, or all ``names`` if ``chosen`` is ``None``.

    PlanError: a device is not among ``names``. ``what`` is the subject of the errors, such as "the sources".
    """
    if chosen is None:
        return names
    chosen_names = read_devices(chosen)
    if not chosen_names:
        raise PlanError.of(f"{what} must be at least one device.", "none", ", ".join(names))
    for device in chosen_names:
        if device not in names:
            raise PlanError.of(f"{what} must be among the devices.", device, "one of " + ", ".join(names))
    return chosen_names


def busbw_factor(collective: str, count: int) -> float:
    """Return busbw / algbw of a collective of ``count`` devices, as nccl-tests' doc/PERFORMANCE.md defines it.

    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8), busbw_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(collective)
    return 1.0 if times is None else times * ((count - 1) / count)
