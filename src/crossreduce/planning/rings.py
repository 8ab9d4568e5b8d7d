"""Rings on a topology: orders of devices in which each has a link or route to the next that passes none of the others.

Input: a topology and a request. Output: a schedule of rings that run side by side. Each ring takes the same bandwidth,
that of the narrowest link of all routes, from every link that it uses; rings are added, at most 16, while one is found.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

from ..schedule import Chunk, Schedule, Step
from ..topology import Topology
from .algorithms import ring_schedule
from .requests import Request

# The search for one ring stops after so many steps: finding a Hamiltonian cycle is NP-complete (Karp 1972).
_MOST_STEPS: Final = 5_000
_MOST_RINGS: Final = 16  # of one schedule, also if the links have room for more
_MOST_CHUNKS: Final = 512  # of all rings together; a ring of n devices has n chunks

Pair = tuple[str, str]


def parallel_rings(topology: Topology, request: Request) -> Schedule:
    """Return a schedule of rings that share the links of a topology, each with an equal share of the buffer."""
    devices, (sources, destinations) = request.members, request.positions
    chunks: list[Chunk] = []
    rounds: list[list[Step]] = []
    orders = ring_orders(topology, devices)
    for order in orders:
        one = ring_schedule(request._replace(devices=order))
        here = [devices.index(device) for device in order]
        base = len(chunks)
        chunks += [Chunk(share / len(orders), sources, destinations) for share, _, _ in one.chunks]
        rounds += [[] for _ in one.rounds[len(rounds) :]]
        for found, steps in zip(rounds, one.rounds, strict=False):
            found += [Step(base + c, here[dst], tuple(here[src] for src in srcs)) for c, dst, srcs in steps]
    return Schedule(request.collective, "ring", devices, tuple(chunks), tuple(map(tuple, rounds)))


@lru_cache(maxsize=256)
def ring_orders(topology: Topology, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return orders of devices for rings that share the links, at least one.

    If no ring was found, the order is that of ``devices``; a route to the next device may then pass others.

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
    # Two searches: all rings start at the first device, or each at another one, to leave a host over different links.
    for rotates in (False, True):
        left = speeds.copy()
        rings: list[tuple[str, ...]] = []
        while len(rings) < min(_MOST_RINGS, max(1, _MOST_CHUNKS // len(devices))):
            turn = len(rings) % len(devices) if rotates else 0
            order = _ring((*devices[turn:], *devices[:turn]), routes, left, unit)
            if order is None:
                break
            rings.append(order)
            for hop in zip(order, (*order[1:], order[0]), strict=True):
                for pair in routes[hop]:
                    left[pair] -= unit
        best = max(best, rings, key=len)
    return tuple(best) or (devices,)


def _ring(
    devices: tuple[str, ...], routes: dict[Pair, tuple[Pair, ...]], left: dict[Pair, int], unit: int
) -> tuple[str, ...] | None:
    """Return a ring that the links have room for, found depth first, the widest route first; ``None``: none found."""
    if len(devices) == 1:
        return None
    n = len(devices)
    number = {device: k for k, device in enumerate(devices)}
    free = left.copy()
    room = {hop: min(left[pair] for pair in route) for hop, route in routes.items()}
    nexts: dict[str, list[str]] = {device: [] for device in devices}
    for (here, there), width in room.items():
        if width >= unit:
            nexts[here].append(there)
    for here, others in nexts.items():
        others.sort(key=lambda there: (-room[here, there], (number[there] - number[here]) % n))
    closing = {here for here in devices if room.get((here, devices[0]), 0) >= unit}

    def use(hop: Pair, amount: int) -> bool:
        """Use a route, or release it if ``amount`` is negative; return whether it has room."""
        if amount > 0 and any(free[pair] < amount for pair in routes[hop]):
            return False
        for pair in routes[hop]:
            free[pair] -= amount
        return True

    path, visited = [devices[0]], {devices[0]}
    choices = [nexts[devices[0]].copy()]
    for _ in range(_MOST_STEPS):
        if len(path) == n and (path[-1], path[0]) in routes and use((path[-1], path[0]), unit):
            return tuple(path)
        if len(path) == n or not choices[-1]:
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
        closable = len(path) == n or not closing <= visited
        choices.append(nexts[there].copy() if closable else [])
    return None
