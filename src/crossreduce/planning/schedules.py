"""Schedules for the cross-device ops, with or without a topology.

Input: a ``Request``. Output: a verified schedule; the same request costs one lookup.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ..devices import parse
from ..errors import PlanError
from ..schedule import Schedule
from ..topology import Topology
from .reachability import reachable
from .registry import CHOICES
from .request import Request, collective_between
from .search import candidates, fastest

# Below this many bytes per replica the fewest messages are the fastest, above it a balanced load. It is between the
# 128 KB up to which a one-shot all-reduce was faster than a two-shot one on V100s linked by PCIe, and the 384 KB at
# which it was slower (sglang-V100, issue 2); not measured here.
DIRECT_FROM_BYTES: Final = 1 << 18


def choose(sources: tuple[str, ...], destinations: tuple[str, ...], nbytes: int) -> str:
    """Return the algorithm that "auto" stands for without a topology, for ``nbytes`` bytes per replica.

    ``one_device`` if all devices share one memory (the host's, or one GPU's; benchmarks/crossover.py has the
    measurement), for small arrays, and for one destination; else ``direct``.

    >>> choose(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 1024)
    'one_device'
    """
    places = [parse(device) for device in {*sources, *destinations}]
    memories = {(place.host, place.kind, place.kind != "cpu" and place.index) for place in places}
    large = nbytes >= DIRECT_FROM_BYTES
    return "direct" if len(memories) > 1 and large and len(destinations) > 1 else "one_device"


@lru_cache(maxsize=4096)
def schedule_for(request: Request) -> Schedule:
    """Return the verified schedule of an all-reduce from any sources to any destinations.

    Without a topology it is the algorithm's own schedule, and the collective is named after the numbers of sources and
    destinations. On a topology it uses its links only, and is the fastest in simulation. A topology whose devices have
    other names is matched by position: its i-th device stands for the i-th of the sources, then of the other
    destinations. Its switches only forward data, since no engine can reduce on them.

    Raises:
      PlanError: an unknown algorithm, or one that cannot do it; the topology lacks a device of the request, or a route
        to a destination.
    """
    if request.topology is not None:
        return fastest(request._replace(topology=_matched(request.topology, request.members)))[0]
    name = request.algorithm
    if name in CHOICES:
        name = choose(request.sources, request.destinations, request.nbytes)
    collective = collective_between(len(request.members), len(request.sources), len(request.destinations))
    (schedule,) = candidates(request._replace(algorithm=name, collective=collective, nbytes=0))
    return schedule


@lru_cache(maxsize=256)
def _matched(topology: Topology, devices: tuple[str, ...]) -> Topology:
    """Return a topology with the names of the devices, without the devices that are not needed."""
    topology = topology.with_switches(reducing=False)
    missing = [device for device in devices if device not in topology.devices]
    if len(missing) == len(devices) and len(devices) <= len(topology.devices):
        topology = topology.renamed([*devices, *topology.devices[len(devices) :]])
        missing = []
    if missing:
        given = f"topology of {', '.join(topology.devices)}; request for {', '.join(devices)}"
        remedy = "a topology with the names of the devices in use, or with none of them (matched by position)"
        raise PlanError.of("the topology lacks a device of this request.", given, remedy)
    part = topology.part(devices)
    connected = reachable(part, devices[0]) & reachable(part, devices[0], backwards=True)
    return part if connected.issuperset(devices) else topology  # the other devices forward only if it is necessary
