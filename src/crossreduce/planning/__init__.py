"""From a request to a verified schedule: choose a planner, ask it, prove the result, remember it.

In: an algorithm's name, the devices, perhaps a topology.  Out: a ``Schedule`` that ``verify``
accepted.  No arrays, no I/O, no clock: the same request gives the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from ..devices import parse
from ..errors import PlanError, message, shown
from ..schedule import Schedule, verify
from ..topology import Topology
from .planners import direct, halving_doubling, hierarchical_copy, one_device, ring

__all__ = ["PLANNERS", "choose", "direct", "halving_doubling", "hierarchical_copy", "one_device", "planned", "ring"]

PLANNERS: Final[dict[str, Callable[..., Schedule]]] = {
    "one_device": one_device,
    "hierarchical_copy": hierarchical_copy,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
}

# The planners whose packs have roots, which rotate; the others' packs are all alike.
ROOTED: Final = ("one_device", "hierarchical_copy")

# Below this many bytes a replica the fewest messages win, above it the balanced load. Between the 128 KB up to
# which a one-shot all-reduce beat a two-shot one on PCIe-linked V100s and the 384 KB at which it lost
# (sglang-V100, issue 2); not measured here.
DIRECT_FROM_BYTES: Final = 1 << 18


def choose(
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    nbytes: int,
    topology: Topology | None,
    packs: int = 1,
    first: int = 0,
) -> tuple[str, int]:
    """Return the algorithm that "auto" stands for, for ``nbytes`` bytes a replica, and its first root.

    Without a topology: ``one_device`` where all devices share one memory (the host's, or one GPU's;
    benchmarks/crossover.py has the measurement), for small arrays, and for one destination; else
    ``direct``. On a topology: the first of these two, hierarchical_copy, ring and halving_doubling whose
    steps all have links, from any root.

    Raises:
      PlanError: none of them can run on the topology.

    >>> choose(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 1024, None)
    ('one_device', 0)
    """
    return _chosen(sources, destinations, nbytes >= DIRECT_FROM_BYTES, topology, packs, first)


@lru_cache(maxsize=4096)
def _chosen(
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    large: bool,
    topology: Topology | None,
    packs: int,
    first: int,
) -> tuple[str, int]:
    order = ["one_device", "direct"]
    places = [parse(device) for device in {*sources, *destinations}]
    memories = {(place.host, place.kind, place.kind != "cpu" and place.index) for place in places}
    apart = topology is not None or len(memories) > 1
    if apart and large and len(destinations) > 1:
        order.reverse()
    if topology is None:
        return order[0], first
    for algorithm in dict.fromkeys([*order, "hierarchical_copy", "ring", "halving_doubling"]):
        for root in range(first, first + (len(places) if algorithm in ROOTED else 1)):
            try:
                planned(algorithm, sources, destinations, packs, root, topology)
            except PlanError:
                continue
            return algorithm, root
    raise PlanError(
        message(
            "no algorithm of this release can reach all destinations over the links of this topology alone.",
            f"{topology!r}; sources {', '.join(sources)}; destinations {', '.join(destinations)}",
            "more links (a full mesh, a ring, or a link from one device to all), or topology=None",
        )
    )


@lru_cache(maxsize=4096)
def planned(
    algorithm: str,
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    packs: int = 1,
    first: int = 0,
    topology: Topology | None = None,
    root: str | None = None,
) -> Schedule:
    """Return a verified schedule for these sources and destinations; the same request costs one look-up.

    A topology whose devices have other names is matched by position: its i-th device stands for
    the i-th of the sources, then of the further destinations.

    Args:
      algorithm: a key of ``PLANNERS``.
      sources: canonical names of the devices that contribute, in the order of the replicas.
      destinations: canonical names of the devices that need the result.
      packs: into how many packs the buffer is cut.
      first: where the roots start to rotate.
      topology: the links that may be used; ``None``: all.
      root: for ``one_device``, the device to reduce on.
    Raises:
      PlanError: a step would need a link that the topology lacks, or a device it does not have.
    """
    if algorithm not in PLANNERS:
        raise PlanError(message("there is no such planner.", shown(algorithm), "one of " + ", ".join(PLANNERS)))
    members = dict.fromkeys([*sources, *destinations, *([] if root is None else [root])])
    devices = tuple(members)
    options: dict[str, object] = {} if root is None else {"root": root}
    wiring = None if topology is None else _matched(topology, devices)
    if wiring is not None and algorithm == "hierarchical_copy" and len(wiring.islands) > 1:
        options["groups"] = [[d for d in island if d in members] for island in wiring.islands]
    if wiring is not None and algorithm == "ring":
        devices = wiring.devices  # a ring may lead through devices that neither give nor take
    schedule = PLANNERS[algorithm](devices, sources, destinations, packs=packs, first=first, **options)
    if wiring is not None:
        _require_links(schedule, wiring)
    verify(schedule)
    return schedule


def _matched(topology: Topology, devices: tuple[str, ...]) -> Topology:
    missing = [device for device in devices if device not in topology.devices]
    if not missing:
        return topology
    if len(missing) == len(devices) and len(devices) <= len(topology.devices):
        extra = topology.devices[len(devices) :]
        return topology.renamed([*devices, *extra])
    raise PlanError(
        message(
            "the topology lacks a device of this request.",
            f"topology of {', '.join(topology.devices)}; request for {', '.join(devices)}",
            "a topology with the names of the devices in use, or with none of them (matched by position)",
        )
    )


def _require_links(schedule: Schedule, topology: Topology) -> None:
    for steps in schedule.rounds:
        for step in steps:
            dst = schedule.devices[step.dst]
            for src in (schedule.devices[number] for number in step.srcs):
                if src != dst and topology.link(src, dst) is None:
                    out = ", ".join(link.dst for link in topology.links if link.src == src) or "none"
                    raise PlanError(
                        message(
                            f"{schedule.algorithm} needs a link from {src} to {dst}, and the topology has none.",
                            f"links out of {src}: {out}",
                            'another algorithm ("auto" tries all), or topology=None to let data take any way',
                        )
                    )
