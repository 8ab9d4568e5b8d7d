"""Rings that are really there: orders of the devices in which each has a link, or a way through switches, to the next.

In: a topology and devices.  Out: orders, which may be used side by side. Rings are taken out one after another as
long as the links' bandwidth lasts, in units of the narrowest link, the widest way first.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from ..schedule import Chunk, Schedule, Step
from ..topology import Topology
from .planners import ring

# A search for one ring gives up after so many steps: finding a Hamiltonian cycle is NP-complete (Karp 1972).
_MOST_STEPS = 5_000
_MOST_RINGS = 16  # NCCL builds as many channels on its widest machines
_MOST_CHUNKS = 512  # a ring of n devices has n chunks of 2(n - 1) steps each

Pair = tuple[str, str]


@lru_cache(maxsize=256)
def orders(topology: Topology, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return orders of devices for rings that share the links: at least one.

    Where no ring was found the order is that of the devices, and some hops lead through others.

    >>> orders(Topology.ring(4), ("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    (('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'), ('cpu:0', 'cpu:3', 'cpu:2', 'cpu:1'))
    """
    inside = set(devices)
    ways = {
        (a, b): tuple(pairwise(way))
        for a in devices
        for b in devices
        if a != b and (way := topology.route(a, b)) and not inside & {*way[1:-1]}
    }
    room = {(link.src, link.dst): link.bandwidth for link in topology.links}
    unit = min((room[pair] for way in ways.values() for pair in way), default=Fraction(1))
    found: dict[bool, list[tuple[str, ...]]] = {}
    for turning in (
        False,
        True,
    ):  # rings that all start alike, or each elsewhere: it leaves a host over other links then
        left, rings = room.copy(), found.setdefault(turning, [])
        while len(rings) < min(_MOST_RINGS, max(1, _MOST_CHUNKS // len(devices))):
            turn = len(rings) % len(devices) if turning else 0
            order = _ring((*devices[turn:], *devices[:turn]), ways, left, unit)
            if order is None:
                break
            rings.append(order)
            for hop in zip(order, (*order[1:], order[0]), strict=True):
                for pair in ways[hop]:
                    left[pair] -= unit
    best = max(found.values(), key=lambda rings: len(rings))
    return tuple(best) or (devices,)


def _ring(
    devices: tuple[str, ...], ways: dict[Pair, tuple[Pair, ...]], left: dict[Pair, Fraction], unit: Fraction
) -> tuple[str, ...] | None:
    """Look for one ring, depth first, the widest way first."""
    if len(devices) == 1:
        return None
    number = {device: k for k, device in enumerate(devices)}
    n = len(devices)
    free = left.copy()
    room = {hop: min(left[pair] for pair in way) for hop, way in ways.items()}

    def onward(here: str) -> list[str]:
        nexts = [there for there in devices if room.get((here, there), 0) >= unit]
        return sorted(nexts, key=lambda there: (-room[here, there], (number[there] - number[here]) % n))

    def take(hop: Pair, amount: Fraction) -> bool:
        """Use a way, or give it back; whether there is room for it."""
        if amount > 0 and any(free[pair] < amount for pair in ways[hop]):
            return False
        for pair in ways[hop]:
            free[pair] -= amount
        return True

    path = [devices[0]]
    choices = [onward(devices[0])]
    for _ in range(_MOST_STEPS):
        if len(path) == n and (path[-1], path[0]) in ways and take((path[-1], path[0]), unit):
            return tuple(path)
        if len(path) == n or not choices[-1]:
            if len(path) == 1:
                return None
            choices.pop()
            there = path.pop()
            take((path[-1], there), -unit)
            continue
        there = choices[-1].pop(0)
        if there in path or not take((path[-1], there), unit):
            continue
        path.append(there)
        choices.append(onward(there))
        if len(path) < n and not any(room.get((last, path[0]), 0) >= unit for last in devices if last not in path):
            choices[-1] = []  # nobody is left from whom the ring could close
    return None


def rings(
    topology: Topology, sources: tuple[str, ...], destinations: tuple[str, ...], packs: int, first: int
) -> Schedule:
    """Return a schedule of rings side by side, each with an equal share of the buffer."""
    members = tuple(dict.fromkeys([*sources, *destinations]))
    number = {device: k for k, device in enumerate(members)}
    chunks: list[Chunk] = []
    rounds: list[list[Step]] = []
    found = orders(topology, members)
    for order in found:
        one = ring(order, sources, destinations, packs=packs, first=first)
        here = [number[device] for device in one.devices]
        base = len(chunks)
        chunks += [
            Chunk(share / len(found), tuple(here[s] for s in gives), tuple(here[d] for d in takes))
            for share, gives, takes in one.chunks
        ]
        for r, steps in enumerate(one.rounds):
            if r == len(rounds):
                rounds.append([])
            rounds[r] += [Step(base + c, here[dst], tuple(here[src] for src in srcs)) for c, dst, srcs in steps]
    return Schedule(one.collective, "ring", members, tuple(chunks), tuple(map(tuple, rounds)))
