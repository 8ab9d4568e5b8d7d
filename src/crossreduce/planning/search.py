"""The fastest schedule of a request in simulation.

Input: a ``Request`` with a topology. Output: a schedule, cut into the number of pieces that suits its bytes, and its
predicted seconds. Every schedule is verified.
"""

from __future__ import annotations

from functools import lru_cache

from ..errors import PlanError
from ..schedule import Schedule, pipelined, verify
from .algorithms.hierarchy import centre
from .derived import all_gather, reduce_scatter
from .reachability import require_routes
from .registry import CHOICES, MOST_TREES, REGISTRY, algorithm
from .request import Request


@lru_cache(maxsize=4096)
def fastest(request: Request) -> tuple[Schedule, float]:
    """Return the fastest schedule of a request on its topology, and its seconds.

    Raises:
      PlanError: a destination cannot be reached, or the algorithm cannot do the collective.
    """
    topology = request.topology
    assert topology is not None
    require_routes(topology, request.sources, request.destinations, request.collective)
    found = []
    for tried in _tried(request):
        try:
            made = [pipelined(schedule, topology, request.nbytes) for schedule in candidates(tried._replace(nbytes=0))]
            found.append(min(made, key=lambda one: one[1]))
        except PlanError as error:
            failure = error
    if not found:
        raise failure
    return min(found, key=lambda one: one[1])


def _tried(request: Request) -> list[Request]:
    """Return the requests to named algorithms that a request stands for."""
    if request.algorithm not in CHOICES:
        return [request]
    n, root = len({*request.sources, *request.destinations}), request.root
    tried = [
        request._replace(algorithm=name)
        for name, entry in REGISTRY.items()
        if (entry.has_root or root is None) and (entry.most_devices is None or n <= entry.most_devices)
    ]
    several = min(len(request.sources), len(request.destinations)) > 1
    if request.packs == 1 and root is None and several and n <= MOST_TREES:
        # One tree per device, like TensorFlow's rotating roots; and one tree with its root in the middle.
        near = centre(request.topology, request.sources, request.destinations) if request.topology else None
        tried += [request._replace(algorithm="hierarchical_copy", packs=n)]
        tried += [request._replace(algorithm="hierarchical_copy", root=near)]
    return tried


@lru_cache(maxsize=1024)
def candidates(request: Request) -> tuple[Schedule, ...]:
    """Return the verified schedules of a request to a named algorithm, at least one; each is different.

    They do not depend on ``request.nbytes``, so callers set it to 0.

    Raises:
      PlanError: the algorithm cannot do it.
    """
    made = tuple(dict.fromkeys(_schedules(request)))
    for schedule in made:
        verify(schedule)
    return made


def _schedules(request: Request) -> list[Schedule]:
    entry = algorithm(request.algorithm)
    if request.root is not None and not entry.has_root:
        rooted = ", ".join(name for name, other in REGISTRY.items() if other.has_root)
        raise PlanError.of(f"{request.algorithm} does not reduce on a root.", f"root={request.root}", rooted)
    if entry.scatter is None or request.collective not in ("reduce_scatter", "all_gather"):
        return entry.schedules(request)
    if request.collective == "all_gather":
        turned = request.topology and request.topology.reversed()
        scattered = candidates(request._replace(collective="reduce_scatter", topology=turned))
        return [all_gather(schedule) for schedule in scattered]
    packs, first = entry.scatter
    whole = request._replace(collective="all_reduce", packs=packs or len(request.sources), first=first)
    return [reduce_scatter(schedule) for schedule in entry.schedules(whole)]
