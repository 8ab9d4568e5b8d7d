"""What the cross-device ops ask for: a schedule for some sources and destinations, with or without a topology.

In: names, bytes, perhaps a topology.  Out: verified schedules; the same request costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from ..devices import parse
from ..errors import PlanError, message, shown
from ..schedule import Schedule, verify
from ..topology import Topology
from .forest import forest
from .planners import (
    direct,
    halving_doubling,
    hierarchical_copy,
    one_device,
    one_shot,
    recursive_doubling,
    ring,
)
from .plans import planned_on
from .views import reached

PLANNERS: Final[dict[str, Callable[..., Schedule]]] = {
    "one_device": one_device,
    "hierarchical_copy": hierarchical_copy,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "recursive_doubling": recursive_doubling,
    "direct": direct,
    "one_shot": one_shot,
}

# The planners whose packs have roots, which rotate; the others' packs are all alike.
ROOTED: Final = ("one_device", "hierarchical_copy")

# Below this many bytes a replica the fewest messages win, above it the balanced load. Between the 128 KB up to
# which a one-shot all-reduce beat a two-shot one on PCIe-linked V100s and the 384 KB at which it lost
# (sglang-V100, issue 2); not measured here.
DIRECT_FROM_BYTES: Final = 1 << 18


def choose(sources: tuple[str, ...], destinations: tuple[str, ...], nbytes: int) -> str:
    """Return the algorithm that "auto" stands for where no topology is given, for ``nbytes`` bytes a replica.

    ``one_device`` where all devices share one memory (the host's, or one GPU's; benchmarks/crossover.py has the
    measurement), for small arrays, and for one destination; else ``direct``.

    >>> choose(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 1024)
    'one_device'
    """
    places = [parse(device) for device in {*sources, *destinations}]
    memories = {(place.host, place.kind, place.kind != "cpu" and place.index) for place in places}
    large = nbytes >= DIRECT_FROM_BYTES
    return "direct" if len(memories) > 1 and large and len(destinations) > 1 else "one_device"


@lru_cache(maxsize=4096)
def planned(
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Return a verified schedule between devices any two of which are joined alike.

    Args:
      algorithm: a planner's name.
      sources: canonical names of the devices that contribute, in the order of the replicas.
      destinations: canonical names of the devices that need the result.
      packs: into how many packs the buffer is cut.
      first: where the roots start to rotate.
      root: for ``one_device``, the device to reduce on.
    Raises:
      PlanError: there is no such planner.
    """
    devices = tuple(dict.fromkeys([*sources, *destinations, *([] if root is None else [root])]))
    if algorithm == "forest":
        return forest(Topology.full_mesh(devices), "all_reduce", sources, destinations).schedule
    if algorithm not in PLANNERS:
        raise PlanError(message("there is no such planner.", shown(algorithm), "one of " + ", ".join(PLANNERS)))
    options: dict[str, object] = {} if root is None else {"root": root}
    schedule = PLANNERS[algorithm](devices, sources, destinations, packs=packs, first=first, **options)
    verify(schedule)
    return schedule


def planned_for(
    topology: Topology,
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    nbytes: int,
    packs: int = 1,
    first: int = 0,
    root: str | None = None,
) -> Schedule:
    """Return a verified schedule that takes only the links of a topology, the quickest in simulation.

    A topology whose devices have other names is matched by position: its i-th device stands for
    the i-th of the sources, then of the further destinations. Its switches only pass data on, as whatever executes
    the schedule cannot reduce on them.

    Raises:
      PlanError: the topology lacks a device of the request, or a way to some destination.
    """
    devices = tuple(dict.fromkeys([*sources, *destinations, *([] if root is None else [root])]))
    wiring = _matched(topology, devices)
    return planned_on(wiring, "all_reduce", sources, destinations, nbytes, algorithm, packs, first, root).schedule


@lru_cache(maxsize=256)
def _matched(topology: Topology, devices: tuple[str, ...]) -> Topology:
    topology = topology.with_switches(reducing=False)
    missing = [device for device in devices if device not in topology.devices]
    if len(missing) == len(devices) and len(devices) <= len(topology.devices):
        topology = topology.renamed([*devices, *topology.devices[len(devices) :]])
        missing = []
    if not missing:
        part = topology.subset(devices)
        joined = reached(part, devices[0]) & reached(part.reversed(), devices[0])
        return part if joined.issuperset(devices) else topology  # others help only where it cannot be done without
    raise PlanError(
        message(
            "the topology lacks a device of this request.",
            f"topology of {', '.join(topology.devices)}; request for {', '.join(devices)}",
            "a topology with the names of the devices in use, or with none of them (matched by position)",
        )
    )
