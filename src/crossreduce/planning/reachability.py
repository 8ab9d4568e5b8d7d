"""The nodes of a topology that data can reach.

Input: a topology and devices. Output: the nodes that can be reached, or PlanError if a route is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..topology import Topology


def require_routes(topology: Topology, sources: Sequence[str], destinations: Sequence[str], request: str) -> None:
    """Raise unless there is a route from every source to every destination.

    Raises:
      PlanError: it names the devices that can be reached and those that cannot.
    """
    everyone = {*sources, *destinations}
    if sources and reachable(topology, sources[0]) >= everyone <= reachable(topology, sources[0], backwards=True):
        return
    for source in sources:
        within = reachable(topology, source)
        beyond = [device for device in destinations if device not in within]
        if beyond:
            inside = ", ".join(node for node in topology.nodes if node in within)
            problem = (
                f"{request} needs a route from {source} to {', '.join(beyond)}, but no link leads out of {{{inside}}}."
            )
            remedy = "topology.subset(devices) with connected devices, or a topology with the missing links"
            raise PlanError.of(problem, repr(topology), remedy)


def reachable(topology: Topology, start: str, *, backwards: bool = False) -> set[str]:
    """Return the nodes to which data can get from ``start``; or, backwards, from which data can get there."""
    neighbours: dict[str, list[str]] = {}
    for src, dst, _, _ in topology.links:
        if backwards:
            src, dst = dst, src
        neighbours.setdefault(src, []).append(dst)
    found, left = {start}, [start]
    while left:
        for node in neighbours.get(left.pop(), ()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found
