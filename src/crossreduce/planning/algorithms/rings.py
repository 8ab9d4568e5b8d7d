"""Rings on a topology: each device has a link to the next device of the ring, or a route that passes no other device.

Input: a topology and a request. Output: a schedule of rings that run side by side. Each ring takes the same bandwidth,
that of the narrowest link of all routes, from every link that it uses. Rings are added until no more is found, or 16.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

from ...schedule import Chunk, Schedule, Step
from ...topology import Topology
from ..requests import Request
from .equal_links import ring_schedule

# The search for one ring stops after so many steps: finding a Hamiltonian cycle is NP-complete (Karp 1972).
_MOST_STEPS: Final = 5_000
_MOST_RINGS: Final = 16  # of one schedule, even if the links have enough bandwidth for more
_MOST_CHUNKS: Final = 512  # of all rings together; a ring of n devices has n chunks

Pair = tuple[str, str]


def parallel_rings(topology: Topology, request: Request) -> Schedule:
    """Return a schedule of rings that run at the same time, each with an equal share of the buffer."""
    devices, (sources, destinations) = request.members, request.positions
    chunks: list[Chunk] = []
    rounds: list[list[Step]] = []
    orders = ring_orders(topology, devices)
    for order in orders:
        ring = ring_schedule(request._replace(devices=order))
        position = [devices.index(device) for device in order]
        first_chunk = len(chunks)
        chunks += [Chunk(share / len(orders), sources, destinations) for share, _, _ in ring.chunks]
        rounds += [[] for _ in ring.rounds[len(rounds) :]]
        for merged, steps in zip(rounds, ring.rounds, strict=False):
            merged += [Step(first_chunk + c, position[d], tuple([position[s] for s in srcs])) for c, d, srcs in steps]
    return Schedule(request.collective, "ring", devices, tuple(chunks), tuple(map(tuple, rounds)))


@lru_cache(maxsize=256)
def ring_orders(topology: Topology, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return one or more rings that share the links of a topology, each as the order of its devices.

    If no ring is found, ``devices`` itself is the only order. A route to the next device may then pass other devices.

    >>> ring_orders(Topology.ring(4), ("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    (('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'), ('cpu:0', 'cpu:3', 'cpu:2', 'cpu:1'))
    """
    inside = set(devices)
    routes = {
        (a, b): tuple(pairwise(route))
        for a in devices
        for b in devices
        if a != b and (route := topology.route(a, b)) and (len(route) == 2 or not inside & {*route[1:-1]})
    }
    speeds = topology.speeds
    unit = min((speeds[pair] for route in routes.values() for pair in route), default=1)
    best: list[tuple[str, ...]] = []
    # There are two searches. In the first one, the search for every ring starts at the first device. In the second one,
    # each ring starts at another device, so that rings leave a host over different links.
    for rotates in (False, True):
        left = speeds.copy()  # the bandwidths that no ring uses yet
        rings: list[tuple[str, ...]] = []
        while len(rings) < min(_MOST_RINGS, max(1, _MOST_CHUNKS // len(devices))):
            start = len(rings) % len(devices) if rotates else 0
            order = _find_ring((*devices[start:], *devices[:start]), routes, left, unit)
            if order is None:
                break
            rings.append(order)
            for hop in zip(order, (*order[1:], order[0]), strict=True):
                for pair in routes[hop]:
                    left[pair] -= unit
        best = max(best, rings, key=len)
    return tuple(best) or (devices,)


def _find_ring(
    devices: tuple[str, ...], routes: dict[Pair, tuple[Pair, ...]], left: dict[Pair, int], unit: int
) -> tuple[str, ...] | None:
    """Return a ring that starts at the first device, or ``None`` if none is found.

    ``routes`` has the links of each hop. Each link of the ring must have ``unit`` of the bandwidth in ``left``. The
    search is depth first. It tries wide routes first. Of equally wide ones, it tries that to the next device first.
    """
    if len(devices) == 1:
        return None
    n = len(devices)
    number = {device: k for k, device in enumerate(devices)}
    free = left.copy()
    widths = {hop: min(left[pair] for pair in route) for hop, route in routes.items()}
    nexts: dict[str, list[str]] = {device: [] for device in devices}
    for (here, there), width in widths.items():
        if width >= unit:
            nexts[here].append(there)
    for here, others in nexts.items():
        others.sort(key=lambda there: (-widths[here, there], (number[there] - number[here]) % n))
    closing = {here for here in devices if widths.get((here, devices[0]), 0) >= unit}  # the possible last devices

    def use(hop: Pair, amount: int) -> bool:
        """Take bandwidth from the links of a route, or release it if ``amount`` is negative; return whether it fits."""
        if amount > 0 and any(free[pair] < amount for pair in routes[hop]):
            return False
        for pair in routes[hop]:
            free[pair] -= amount
        return True

    path, visited = [devices[0]], {devices[0]}
    choices = [nexts[devices[0]].copy()]  # for each device of the path, the next devices that were not tried
    for _ in range(_MOST_STEPS):
        if len(path) == n and (path[-1], path[0]) in routes and use((path[-1], path[0]), unit):
            return tuple(path)
        if len(path) == n or not choices[-1]:  # a dead end: go back by one device
            if len(path) == 1:
                return None
            choices.pop()
            there = path.pop()
            visited.discard(there)
            use((path[-1], there), -unit)
            continue
        there = choices[-1].pop(0)
        if there in visited or not use((path[-1], there), unit):
            continue
        path.append(there)
        visited.add(there)
        closable = len(path) == n or not closing <= visited  # a possible last device is left
        choices.append(nexts[there].copy() if closable else [])
    return None
