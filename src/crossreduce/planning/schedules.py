"""Verified schedules of requests: the registry of algorithms, and the fastest of their schedules on a topology.

Input: a ``Request``. Output: a schedule; a repeated request costs one lookup. ``plan``, the ops, the command line and
the tables of the tests take the algorithms from ``REGISTRY``. Files that only topologies need are imported when they
are first used, so that ``import crossreduce`` stays quick.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from ..errors import PlanError, shown
from ..progress import steps
from ..schedule import Pieces, Schedule, fastest_of, verify
from ..schedule.host_queues import queues
from ..schedule.schedule import many
from ..topology import Topology
from . import algorithms
from .requests import NO_MORE, Request, collective_between
from .topologies import add_routes, reachable_nodes, require_routes

FOREST_DEVICES: Final = 256  # with more devices, and without symmetry, packing trees takes minutes
MOST_DEVICES: Final = 128  # beyond it, a schedule with n**2 steps has more than 16,384 of them

# Beyond so many devices of a symmetric topology, these are not tried: they send as many bytes as a forest or more, in
# more rounds, and all their steps are listed.
_FEW_GENERATED: Final = 48
_LISTED: Final = ("ring", "halving_doubling")

# "one_shot" and "recursive_doubling" can be the fastest for the smallest buffers, but all their transfers are listed.
# With more devices, "one_shot" is listed only if an estimate says that it is faster, and if it has not more transfers
# than this: 1.1 million take about a minute and 1.5 GB.
_MOST_LISTED: Final = 512
_MOST_TRANSFERS: Final = 1 << 21
_SMALL_BYTES: Final = 1 << 24  # of what each device receives in "one_shot"
_WORTH_LISTING: Final = 0.9  # of the best time so far
_SAMPLE: Final = 64  # the number of devices whose routes are counted for the estimate

# Without a topology, "auto" takes "one_device" (the fewest messages) below this many bytes per replica, and may take
# "direct" (a balanced load; see ``choose``) from there on. The limit was not measured here, but taken from a similar
# case: on V100s with PCIe, one-shot all-reduces beat two-shot ones up to 128 KB, not at 384 KB (sglang-V100, issue 2).
DIRECT_FROM_BYTES: Final = 1 << 18


class Algorithm(NamedTuple):
    """The functions that plan with an algorithm, and its properties.

    ``schedules`` returns one or more schedules of a request, which are for any number of bytes, or raises PlanError. If
    there are several, the fastest depends on the number of bytes. A reduce-scatter is derived from an all-reduce whose
    ``packs`` (0: one per device) and ``first`` are ``scatter``; if that is None, ``schedules`` plans it directly.
    """

    schedules: Callable[[Request], list[Schedule]]
    planner: Callable[..., Schedule] | None  # the public function; None: the algorithm needs a topology
    has_root: bool = False  # each pack has a root, which rotates over the devices or is given by the request
    scatter: tuple[int, int] | None = (0, 0)
    most_devices: int | None = MOST_DEVICES  # the number of devices up to which "auto" considers it; None: any


def _single_schedule(schedule: Callable[[Request], Schedule]) -> Callable[[Request], list[Schedule]]:
    return lambda request: [schedule(request)]  # the same schedule on every topology


def _hierarchical_copy(request: Request) -> list[Schedule]:
    if request.topology is None:
        return [algorithms.hierarchical_copy_schedule(request)]
    from .hierarchies import hierarchies

    return hierarchies(request.topology, request)


def _ring(request: Request) -> list[Schedule]:
    if request.topology is None:
        return [algorithms.ring_schedule(request)]
    from .rings import parallel_rings

    return [parallel_rings(request.topology, request)]


def _direct(request: Request) -> list[Schedule]:
    n = len({*request.sources, *request.destinations})
    if request.topology is not None and request.collective == "all_reduce" and n > MOST_DEVICES:
        from .optimal.symmetric.orbit_forest import symmetric_direct

        generated = symmetric_direct(request)
        if generated is not None:
            return [generated]
    found = [algorithms.direct_schedule(request)]
    if request.topology is not None and len(request.destinations) == 1 and len(request.members) > 2:
        found.append(algorithms.direct_schedule(request, request.members))  # all devices reduce a share
    return found


def _one_shot(request: Request) -> list[Schedule]:
    if request.topology is None:
        return [algorithms.one_shot_schedule(request)]
    from .exchanges import exchanges

    return exchanges(request.topology, request)


def _forest(request: Request) -> list[Schedule]:
    from .forest import forest_schedules

    return forest_schedules(request)


REGISTRY: Final[dict[str, Algorithm]] = {
    "one_device": Algorithm(
        _single_schedule(algorithms.one_device_schedule), algorithms.one_device, has_root=True, most_devices=None
    ),
    "hierarchical_copy": Algorithm(_hierarchical_copy, algorithms.hierarchical_copy, has_root=True, most_devices=None),
    "ring": Algorithm(_ring, algorithms.ring, scatter=(1, 1)),  # device k is then the first to complete chunk k
    "halving_doubling": Algorithm(_single_schedule(algorithms.halving_doubling_schedule), algorithms.halving_doubling),
    "recursive_doubling": Algorithm(
        _single_schedule(algorithms.recursive_doubling_schedule), algorithms.recursive_doubling
    ),
    "direct": Algorithm(_direct, algorithms.direct, scatter=(1, 0)),
    "one_shot": Algorithm(_one_shot, algorithms.one_shot),
    "forest": Algorithm(_forest, None, scatter=None, most_devices=FOREST_DEVICES),
}

CHOICES: Final = ("nccl", "auto")  # names that stand for one of the algorithms: see ``plan``
NAMES: Final = (*REGISTRY, *CHOICES)
# The public planners for lists of devices; they have the same first arguments.
PLANNERS: Final = {name: entry.planner for name, entry in REGISTRY.items() if entry.planner is not None}


def choose(sources: tuple[str, ...], destinations: tuple[str, ...], nbytes: int) -> str:
    """Return the algorithm that "auto" stands for without a topology, for ``nbytes`` bytes per replica.

    ``one_device`` if all devices share one memory (the host's, or one GPU's), for small arrays, and for one
    destination; else ``direct``.

    >>> choose(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 1024)
    'one_device'
    """
    if nbytes < DIRECT_FROM_BYTES or len(destinations) == 1:
        return "one_device"
    # A name without its logical number is that of a memory; all CPUs of a host share one.
    memories = {re.sub("(?<=cpu):.*|#.*", "", device) for device in (*sources, *destinations)}
    return "direct" if len(memories) > 1 else "one_device"


@lru_cache(maxsize=4096)
def schedule_for(request: Request) -> Schedule:
    """Return the verified schedule of an all-reduce from any sources to any destinations.

    Without a topology it is the algorithm's own schedule. On a topology it uses only the topology's links, and is the
    fastest in simulation. A topology whose devices have other names is matched by position: its i-th device stands for
    the i-th of the sources, then of the other destinations. Its switches only forward data, since no engine can reduce
    on them.

    Raises:
      PlanError: the algorithm is unknown or cannot plan this; the topology lacks a device of the request, or a route.
    """
    if request.topology is not None:
        return fastest_schedule(request._replace(topology=_match_names(request.topology, request.members)))[0]
    name = request.algorithm
    if name in CHOICES:
        name = choose(request.sources, request.destinations, request.nbytes)
    collective = collective_between(len(request.members), len(request.sources), len(request.destinations))
    (schedule,) = candidates(request._replace(algorithm=name, collective=collective, nbytes=0))
    return schedule


@lru_cache(maxsize=256)
def _match_names(topology: Topology, devices: tuple[str, ...]) -> Topology:
    """Return a topology with the names of these devices; other devices are removed unless they must forward data."""
    topology = topology.with_switches(reducing=False)
    missing = [device for device in devices if device not in topology.devices]
    if len(missing) == len(devices) and len(devices) <= len(topology.devices):
        topology = topology.renamed([*devices, *topology.devices[len(devices) :]])
        missing = []
    if missing:
        given = f"topology of {', '.join(topology.devices)}; request for {', '.join(devices)}"
        remedy = "a topology with the names of the devices in use, or with none of them (matched by position)"
        problem = "the topology lacks a device of this request"
        if len(topology.devices) < len(devices):
            problem += f": it has {many(len(topology.devices), 'device')} for {len(devices)} replicas and destinations"
        raise PlanError.of(f"{problem}.", given, remedy)
    part = topology.part(devices)
    connected = reachable_nodes(part, devices[0]) & reachable_nodes(part, devices[0], backwards=True)
    return part if connected.issuperset(devices) else topology  # the other devices forward only if it is necessary


@lru_cache(maxsize=4096)
def fastest_schedule(request: Request) -> Pieces:
    """Return the fastest schedule of a request on its topology, in pieces that suit its bytes, and its time in s."""
    topology = request.topology
    assert topology is not None
    require_routes(topology, request.sources, request.destinations, request.collective)
    found: dict[Schedule, None] = {}
    for tried in steps(_requests_to_try(topology, request), lambda tried: f"planning {tried.algorithm}"):
        try:
            found.update(dict.fromkeys(candidates(tried._replace(nbytes=0, costs=NO_MORE))))
        except PlanError as error:
            failure = error
    if not found:
        raise failure
    large = len({*request.sources, *request.destinations}) > MOST_DEVICES
    listed = dict.fromkeys(add_routes(schedule, topology) for schedule in found) if large else found
    best = fastest_of(listed, topology, request.nbytes, costs=request.costs)
    if request.algorithm in CHOICES:
        from .optimal.few_step.few_step_forests import faster_forest

        return faster_forest(request, _faster_with_one_shot(request, best))
    return best


def _faster_with_one_shot(request: Request, best: Pieces) -> Pieces:
    """Return the faster one of ``best`` and, for many devices and few bytes, ``one_shot``."""
    topology, n = request.topology, len({*request.sources, *request.destinations})
    few = n > _MOST_LISTED and n * (n - 1) <= _MOST_TRANSFERS and n * request.nbytes <= _SMALL_BYTES
    if topology is None or request.collective != "all_reduce" or request.root is not None or not few:
        return best
    schedule = algorithms.one_shot_schedule(request._replace(algorithm="one_shot"))
    # An estimate: the operations of a host, one after another, the longest way, and the load of the links inside.
    queued = queues(schedule, request.costs.operation_s).values()
    operations_s = max((cost for queue in queued for _, cost in queue.launches), default=0.0)
    latency_s, link_s = _estimate_routes(topology, request.sources, request.destinations)
    if operations_s + latency_s + link_s * request.nbytes >= _WORTH_LISTING * best.seconds:
        return best
    verify(schedule)
    return fastest_of([schedule], topology, request.nbytes, costs=request.costs, known=best)


@lru_cache(maxsize=64)
def _estimate_routes(
    topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...]
) -> tuple[float, float]:
    """Estimate, from the routes of some sources, the longest latency in s and the s per byte of the busiest link."""
    some, loads, latency_s = sources[:: -(-len(sources) // _SAMPLE)], Counter[tuple[str, str]](), Fraction(0)
    for src in some:
        for dst in destinations:
            pairs = tuple(pairwise(topology.route(src, dst) or ()))
            loads.update(pairs[1:])
            latency_s = max(latency_s, sum((topology.by_ends[pair].latency_s for pair in pairs), Fraction(0)))
    slowest = max((count / topology.by_ends[pair].bandwidth for pair, count in loads.items()), default=Fraction(0))
    return float(latency_s), float(slowest) * len(sources) / len(some) / 1e9


def _requests_to_try(topology: Topology, request: Request) -> list[Request]:
    """Return the requests that are tried for a request, each with the name of one algorithm."""
    if request.algorithm not in CHOICES:
        return [request]
    from .forest import is_symmetric

    n, root = len({*request.sources, *request.destinations}), request.root
    generated = n > _FEW_GENERATED and request.collective == "all_reduce" and is_symmetric(request)
    tried = [
        request._replace(algorithm=name)
        for name, entry in REGISTRY.items()
        if (entry.has_root or root is None) and (entry.most_devices is None or n <= entry.most_devices)
        if not (generated and name in _LISTED)
    ]
    if request.collective in ("reduce_scatter", "all_gather") and n > FOREST_DEVICES and is_symmetric(request):
        return [request._replace(algorithm="forest")]  # all others have n**2 steps that no symmetry generates
    if root is None and MOST_DEVICES < n <= _MOST_LISTED and n * request.nbytes <= _SMALL_BYTES:
        tried += [request._replace(algorithm="one_shot"), request._replace(algorithm="recursive_doubling")]
    if root is None and n > FOREST_DEVICES and is_symmetric(request):
        tried.append(request._replace(algorithm="forest"))
        if request.collective == "all_reduce" and n == len(topology.devices):
            tried.append(request._replace(algorithm="direct"))
    several = min(len(request.sources), len(request.destinations)) > 1
    if request.packs == 1 and root is None and several and n <= FOREST_DEVICES:
        from .hierarchies import centre

        # One tree per device, like TensorFlow's rotating roots; and one tree with its root in the middle.
        near = centre(topology, request.sources, request.destinations)
        tried += [] if generated else [request._replace(algorithm="hierarchical_copy", packs=n)]
        tried += [request._replace(algorithm="hierarchical_copy", root=near)]
    return tried


@lru_cache(maxsize=1024)
def candidates(request: Request) -> tuple[Schedule, ...]:
    """Return the verified schedules of a request to a named algorithm, at least one; each is different.

    They do not depend on ``request.nbytes``; callers set it to 0, so that one cache entry serves all sizes.
    """
    made = tuple(dict.fromkeys(_schedules(request)))
    for schedule in made:
        verify(schedule)
    return made


def _schedules(request: Request) -> list[Schedule]:
    name = request.algorithm
    if name not in REGISTRY:
        raise PlanError.of("there is no such algorithm.", shown(name), "one of " + ", ".join(REGISTRY))
    entry = REGISTRY[name]
    if request.root is not None and not entry.has_root:
        rooted = ", ".join(other for other, one in REGISTRY.items() if one.has_root)
        problem = f"the algorithm {name} does not reduce on a root."
        raise PlanError.of(problem, f"root={request.root}", f"no root, or an algorithm with roots: {rooted}")
    if entry.scatter is None or request.collective not in ("reduce_scatter", "all_gather"):
        return entry.schedules(request)
    from .scatter_and_gather import all_gather, reduce_scatter

    if request.collective == "all_gather":
        turned = request.topology and request.topology.reversed()
        scattered = candidates(request._replace(collective="reduce_scatter", topology=turned))
        return [all_gather(schedule) for schedule in scattered]
    packs, first = entry.scatter
    whole = request._replace(collective="all_reduce", packs=packs or len(request.sources), first=first)
    return [reduce_scatter(schedule) for schedule in entry.schedules(whole)]
