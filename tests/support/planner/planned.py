"""Short forms of planning requests, for tests."""

from __future__ import annotations

from crossreduce import Schedule, Topology
from crossreduce.planning import Request, schedule_for

Devices = tuple[str, ...]


def planned(
    algorithm: str, sources: Devices, destinations: Devices, packs: int = 1, first: int = 0, root: str | None = None
) -> Schedule:
    """Return the schedule of an all-reduce between devices that are all linked equally."""
    request = Request("all_reduce", sources, destinations, algorithm, packs=packs, first=first, root=root)
    return schedule_for(request)


def planned_for(
    topology: Topology,
    algorithm: str,
    sources: Devices,
    destinations: Devices,
    nbytes: int,
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Return the schedule of an all-reduce on a topology."""
    return schedule_for(Request("all_reduce", sources, destinations, algorithm, topology, nbytes, packs, first, root))
