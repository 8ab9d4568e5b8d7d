"""The transfers of trees in rounds, on the event-driven clock.

Input: edges, the bytes of a share, and how much a link carries at once. Output: rounds of edges, and the time of the
last one. There are two orders. The list scheduler starts a transfer when its share is there and its links are free,
beside the transfers that start with it, the critical path first. The other order has a round for each level of the
trees: a link then carries all its shares of a level at once, which costs one latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

from .crossing_trees import Edge, Wires


class Batches(NamedTuple):
    """How many of the shares that are ready a link carries at once; each batch costs a latency."""

    part: float  # at most this part of all shares that must still cross on a link between hosts cross at once
    first: int = 0  # the shares that go before other ones, in batches of their own: a number below


# Which shares go first.
NO_SHARES: Final = 0
CROSSING: Final = 1  # those that must cross
FORWARDED: Final = 2  # and those that the receiver forwards


class TransferOrder(NamedTuple):
    """Rounds of positions in the list of edges, and the seconds that they take."""

    rounds: list[list[int]]
    seconds: float


class TimedRounds:
    """Rounds of edges, and the seconds that they take for any sizes of the shares."""

    def __init__(self, wires: Wires, edges: Sequence[Edge], numbers: Sequence[int]) -> None:
        """Make rounds: each edge is in the round of its number. The number of its parent is lower."""
        import numpy as np

        by_number: dict[int, list[int]] = {}
        for k, number in enumerate(numbers):
            by_number.setdefault(number, []).append(k)
        self.rounds = [by_number[number] for number in sorted(by_number)]
        self._seconds_per_byte = np.array(wires.seconds_per_byte)
        self._share = np.array([edge.share for edge in edges])
        self._parent = np.array([edge.parent for edge in edges])
        latency_s = np.array([edge.hop.latency_s for edge in edges])
        links = [edge.hop.links for edge in edges]
        self._arrays = []  # of each round
        for edges_of_round in self.rounds:
            listed, of_round = np.array(edges_of_round), [links[k] for k in edges_of_round]
            counts = np.array([len(each) for each in of_round])
            used = np.array([link for each in of_round for link in each])
            first = np.concatenate([[0], np.cumsum(counts)[:-1]])
            self._arrays.append((listed, self._parent[listed], latency_s[listed], counts, used, first))

    def seconds(self, share_bytes: Sequence[float]) -> float:
        """Return the seconds if share k has ``share_bytes[k % len(share_bytes)]`` bytes."""
        return float(self._times(share_bytes)[1].max())

    def _times(self, share_bytes: Sequence[float]) -> tuple[Any, Any, list[Any]]:
        """Return when each edge starts and ends, and for each round the seconds of the transfers on each link."""
        import numpy as np

        nbytes = np.array(share_bytes)[self._share % len(share_bytes)]
        free = np.zeros(len(self._seconds_per_byte))
        begin, arrival = np.zeros(len(nbytes)), np.zeros(len(nbytes) + 1)  # parent -1 is the last one: a share's start
        loads = []
        for listed, parent, latency_s, counts, used, first in self._arrays:
            load = np.bincount(used, np.repeat(nbytes[listed], counts), len(free)) * self._seconds_per_byte
            start = np.maximum(arrival[parent], np.maximum.reduceat(free[used], first))
            begin[listed] = start
            arrival[listed] = end = start + np.maximum.reduceat(load[used], first) + latency_s
            np.maximum.at(free, used, np.repeat(end, counts))
            loads.append(load)
        return begin, arrival, loads

    def slope(self, share_bytes: Sequence[float]) -> tuple[float, Any]:
        """Return the seconds, and for each share by how many seconds each byte of it makes the critical path longer.

        The seconds are a convex function of the sizes: maxima of sums of them.
        """
        import numpy as np

        begin, arrival, loads = self._times(share_bytes)
        slope, before, parent, links = np.zeros(len(share_bytes)), arrival.max(), -1, None
        seconds = float(before)
        for (listed, parents, _, counts, used, first), load in zip(self._arrays[::-1], loads[::-1], strict=True):
            ends = arrival[listed] == before
            if links is not None:  # the next edge of the path waits for its parent, or until its links are free
                ends &= (listed == parent) | np.logical_or.reduceat(np.isin(used, links), first)
            if before > 0 and ends.any():
                k = int(ends.argmax())
                links, parent, before = used[first[k] : first[k] + counts[k]], parents[k], begin[listed[k]]
                busiest = links[load[links].argmax()]
                shares = self._share[np.repeat(listed, counts)[used == busiest]] % len(slope)
                slope += np.bincount(shares, minlength=len(slope)) * self._seconds_per_byte[busiest]
        return seconds, slope


def by_level(wires: Wires, edges: Sequence[Edge], delay: int) -> TimedRounds:
    """Return a round for each level of the trees. What has crossed is copied ``delay`` rounds later."""
    level: list[int] = []
    for edge in edges:
        parent = edge.parent
        level.append(0 if parent < 0 else level[parent] + 1 + delay * edges[parent].crosses)
    return TimedRounds(wires, edges, level)


def in_stages(wires: Wires, edges: Sequence[Edge], groups: Sequence[int], *, apart: bool) -> TimedRounds:
    """Return rounds in which the shares cross in groups: share k belongs to the group ``groups[k % len(groups)]``.

    First, shares move to the devices from which they cross. Then the groups cross in turn, while shares are copied
    within their own hosts. A group of shares that need not move first crosses at once. In the other hosts, each group
    is copied in rounds of its own if they are ``apart``. Otherwise it is copied in a pipeline: each level beside the
    next level of the group before.
    """
    leads = [edge.crosses for edge in edges]
    landed = [False] * len(edges)  # whether an edge is below a crossing
    level = [edge.level for edge in edges]
    for k, edge in enumerate(edges):
        landed[k] = edge.parent >= 0 and (landed[edge.parent] or edges[edge.parent].crosses)
    for k in range(len(edges) - 1, -1, -1):
        if edges[k].parent >= 0 and leads[k]:
            leads[edges[k].parent] = True
    group = [groups[edge.share % len(groups)] for edge in edges]
    crossing = [0] * (max(groups) + 1)  # the rounds in which the groups cross
    for k, edge in enumerate(edges):
        if edge.crosses:
            crossing[group[k]] = max(crossing[group[k]], 1 + level[edge.parent] if edge.parent >= 0 else 0)
    for g in range(1, len(crossing)):
        crossing[g] = max(crossing[g], crossing[g - 1] + 1)
    before = 1 + max((level[k] for k, edge in enumerate(edges) if leads[k] and not edge.crosses), default=-1)
    depth = 1 + max((level[k] for k in range(len(edges)) if landed[k]), default=0)
    numbers: list[int] = []
    for k, edge in enumerate(edges):
        if landed[k]:
            numbers.append(crossing[-1] + 1 + group[k] * (depth if apart else 1) + level[k])
        elif edge.crosses:
            numbers.append(crossing[group[k]])
        else:
            earliest = max(level[k], numbers[edge.parent] + 1 if edge.parent >= 0 else 0)
            numbers.append(earliest if leads[k] else max(before, earliest))
    return TimedRounds(wires, edges, numbers)


def in_order(
    wires: Wires, edges: Sequence[Edge], share_bytes: float, batches: Batches, most_s: float = math.inf
) -> TransferOrder | None:
    """Return the rounds of a list of edges, in which parents come before their children.

    Return ``None`` as soon as it is known that they take ``most_s`` seconds or more.
    """
    seconds = [each * share_bytes for each in wires.seconds_per_byte]
    below = [0.0] * len(edges)  # the least time from the start of an edge to the last arrival that needs it
    children: list[list[int]] = [[] for _ in edges]
    leads = [edge.crosses for edge in edges]  # whether the share goes first on this edge
    left = [0] * len(seconds)  # the edges that each link still has to carry
    for k in range(len(edges) - 1, -1, -1):
        edge = edges[k]
        below[k] += edge.hop.latency_s + max(seconds[link] for link in edge.hop.links)
        for link in edge.hop.links:
            left[link] += 1
        if edge.parent >= 0:
            children[edge.parent].append(k)
            below[edge.parent] = max(below[edge.parent], below[k])
            leads[edge.parent] = leads[edge.parent] or leads[k] or batches.first == FORWARDED
    order = sorted(range(len(edges)), key=lambda k: (not leads[k], -below[k], k))
    rank = [0] * len(edges)
    for position, k in enumerate(order):
        rank[k] = position
    ready = [rank[k] for k, edge in enumerate(edges) if edge.parent < 0]
    free = [0.0] * len(seconds)
    blocked: list[list[int]] = [[] for _ in seconds]  # for each link, ready edges that wait until it is free
    arriving: list[tuple[float, int]] = []
    now = end = 0.0
    rounds: list[list[int]] = []
    while ready or arriving:
        load: dict[int, int] = {}
        urgent: set[int] = set()
        room: dict[int, int] = {}
        taken = []
        for position in sorted(ready):
            k = order[position]
            links = edges[k].hop.links
            for link in links:
                if free[link] > now or (batches.first and link in urgent and not leads[k]):
                    break
                if batches.part < 1 and edges[k].crosses:
                    if link not in room:
                        room[link] = max(1, round(left[link] * batches.part))
                    if load.get(link, 0) >= room[link]:
                        break
            else:
                taken.append(k)
                if leads[k]:
                    urgent.update(links)
                for link in links:
                    load[link] = load.get(link, 0) + 1
                continue
            blocked[link].append(position)
        if taken:
            busy = {link: count * seconds[link] for link, count in load.items()}
            for k in taken:
                hop = edges[k].hop
                if now + below[k] >= most_s:
                    return None
                done = now + max(busy[link] for link in hop.links) + hop.latency_s
                heappush(arriving, (done, k))
                end = max(end, done)
                for link in hop.links:
                    free[link] = max(free[link], done)
                    left[link] -= 1
            rounds.append(taken)
        ready = []
        if arriving:
            now = arriving[0][0]
            while arriving and arriving[0][0] <= now * (1 + 1e-12):
                done, k = heappop(arriving)
                now = max(now, done)
                ready += [rank[child] for child in children[k]]
                for link in edges[k].hop.links:
                    if free[link] <= now and blocked[link]:
                        ready += blocked[link]
                        blocked[link] = []
    return TransferOrder(rounds, end)
