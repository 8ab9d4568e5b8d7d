"""A time that no all-gather between hosts can undercut on the event-driven clock, whatever its trees and pieces.

Input: a topology and the bytes of the buffer. Output: seconds, the greatest of the bounds of ``least_seconds``. All use
two properties of ``schedule/clock.py``. A transfer of b bytes takes the latency of its route, and on each of its links
at least the time of everything that the link carries in the same tick. The ticks of a link follow each other: the next
one starts when all transfers of the one before have ended. So a link of c bytes per second whose routes have at least
the latency l, in k ticks that start at a or later and end at b or earlier, carries at most c (b - a - k l) bytes.

The bound of a host. Let W be the bytes that the n devices of a host do not have, T the time of the schedule, and the
age of an event the time from it to the end, T minus its time. A *landing* is a transfer from another host to a device
of this one, or to a switch of it that multicasts. An *arrival* is the landing, or a transfer inside the host, by which
a device first gets a byte; every byte of W has n of them. Take any age t. Let L(t) be the bytes of landings of age t or
more, and R(t) those of later landings. The bytes that first land at age t or more are at most L(t), and have at most n
arrivals each. All arrivals of the other bytes are landings of a lower age, or transfers that start at a lower age. Let
D(t) be the bytes of all transfers in ticks whose last transfer starts at a lower age. Then

    n W <= n L(t) + R(t) + D(t)    for each age t.

For the age T, bytes that the host's own devices have count, too: n W + n (n - 1) M / N <= R + D. Besides, a landing of
age t serves at most b(t) devices, the most that a device reaches with latencies up to t. So n W is at most the sum of
b(t) over all landed bytes. Every row has the form: the sum over all links of what their ticks contribute >= a number.

For prices w of the rows, a link contributes at most the value of its best ticks. The price of a landed byte does not
fall with its age, and changes at the ages of the rows only. To move the end of a tick to the next such age loses
nothing: the tick carries more bytes, and those that the next tick loses are worth no more. Ticks inside the host are
the same backwards: their price does not rise with the age of their start. So dynamic programming over the ages of the
rows finds the best ticks exactly. If the best values of all links together are less than the priced numbers at a time
T, then no schedule takes T or less (weak duality, for any prices). The prices are found by a linear program over the
ticks that were found so far.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog

import crossreduce as cr
from crossreduce.schedule.costs import between_hosts

AGES = 40  # the ages of rows, besides those at which devices come into reach
ROUNDS = 60  # the most linear programs
SAFE = 1 - 1e-7  # results are lower by this factor, for rounding errors


class Group(NamedTuple):
    """Equal links: their number, bytes per second, and the least latency of a route through them."""

    count: int
    speed: float
    latency_s: float


class Host(NamedTuple):
    """What the bound of a host depends on."""

    devices: int
    landing: tuple[Group, ...]  # the links from other hosts
    inside: tuple[Group, ...]  # the other links to devices
    reach: tuple[tuple[float, int], ...]  # latencies, and the most devices that a device reaches within each


def least_seconds(topology: cr.Topology, nbytes: int) -> float:
    """Return the greatest of four lower bounds of the seconds of an all-gather among all devices.

    They are: the longest of the quickest routes; for each device, the bytes that its links can carry to it, each with
    the latency of at least one tick; the time at the rate of the tightest cut after the least latency of a link; and
    for each host the bound that the module's docstring proves.
    """
    latency = _latencies(topology)
    number = {node: k for k, node in enumerate(topology.nodes)}
    devices = [number[name] for name in topology.devices]
    senders = [*devices, *(number[switch.name] for switch in topology.switches if switch.reduces)]
    share = nbytes / len(devices)
    bounds = [float(latency[np.ix_(devices, devices)].max())]
    for device in devices:
        links = [link for link in topology.links if number[link.dst] == device]
        others = [other for other in senders if other != device]
        groups = [
            Group(1, float(link.bandwidth) * 1e9, _through(latency, number, link, others, [device])) for link in links
        ]
        bounds.append(_filled(groups, nbytes - share))
    rate = cr.bound(topology, "all_gather").algbw
    bounds.append(nbytes / 1e9 / float(rate or 1) + min(float(link.latency_s) for link in topology.links))
    for host in dict.fromkeys(_hosts(topology)):
        outside = nbytes - share * host.devices
        if outside:
            bounds.append(_host_bound(host, outside, share, max(bounds)))
    return max(bounds) * SAFE


def _filled(groups: list[Group], nbytes: float) -> float:
    """Return the time at which some links can have carried some bytes, each after its latency."""
    low, high = 0.0, max(group.latency_s for group in groups) + nbytes / max(group.speed for group in groups)
    for _ in range(60):
        middle = (low + high) / 2
        carried = sum(group.count * group.speed * max(0.0, middle - group.latency_s) for group in groups)
        low, high = (low, middle) if carried >= nbytes else (middle, high)
    return low


def _latencies(topology: cr.Topology) -> Any:
    """Return the least latency from each node to each other one."""
    n = len(topology.nodes)
    number = {node: k for k, node in enumerate(topology.nodes)}
    least = np.full((n, n), np.inf)
    np.fill_diagonal(least, 0.0)
    for link in topology.links:
        least[number[link.src], number[link.dst]] = float(link.latency_s)
    for k in range(n):
        np.minimum(least, least[:, k : k + 1] + least[k], out=least)
    return least


def _through(latency: Any, number: dict[str, int], link: Any, sources: list[int], destinations: list[int]) -> float:
    """Return the least latency of a route from one of some devices to another one, through a link."""
    before = latency[sources, number[link.src]].min(initial=np.inf)
    after = latency[number[link.dst], destinations].min(initial=np.inf)
    return float(before + float(link.latency_s) + after)


@lru_cache(maxsize=16)
def _hosts(topology: cr.Topology) -> tuple[Host, ...]:
    """Return each host. Times are rounded to 1e-15 s, so that equal hosts are equal."""
    latency = _latencies(topology)
    number = {node: k for k, node in enumerate(topology.nodes)}
    senders = [*topology.devices, *(switch.name for switch in topology.switches if switch.reduces)]
    every = [number[name] for name in senders]
    found = []
    for prefix in dict.fromkeys(name.rpartition("/")[0] for name in topology.devices):
        own = [number[name] for name in senders if name.rpartition("/")[0] == prefix]
        devices = [number[name] for name in topology.devices if name.rpartition("/")[0] == prefix]
        landing: Counter[tuple[float, float]] = Counter()
        inside: Counter[tuple[float, float]] = Counter()
        for link in topology.links:
            if link.dst.rpartition("/")[0] != prefix:
                continue
            speed = float(link.bandwidth) * 1e9
            if between_hosts(link.src, link.dst):
                groups, ends = landing, (every, own)
            elif number[link.dst] in devices:
                groups, ends = inside, ([k for k in own if k != number[link.dst]], [number[link.dst]])
            else:
                continue
            least = _through(latency, number, link, *ends)
            if least < np.inf:
                groups[speed, round(least, 15)] += 1
        within = latency[np.ix_(own, devices)]
        reach = [(float(each), int((within <= each + 1e-15).sum(axis=1).max())) for each in np.unique(within.round(15))]
        both = [tuple(Group(count, *key) for key, count in sorted(links.items())) for links in (landing, inside)]
        found.append(Host(len(devices), *both, tuple(reach)))
    return tuple(found)


def _host_bound(host: Host, outside: float, share: float, known: float) -> float:
    """Return the bound of a host, at least ``known``, for the bytes of other hosts and those of each of its devices."""
    longest = (
        sum(outside * host.devices / group.speed + group.latency_s for group in (*host.landing, *host.inside)) + known
    )
    ages = _ages(host, known)
    rows = _Rows(host, ages, outside, share)
    time, columns = known, rows.first_columns()
    stalled = 0
    for _ in range(ROUNDS):
        prices = rows.prices(columns, time)
        if prices is None:
            break
        found, best = rows.root(prices, longest)
        grown = found > time * (1 + 1e-5)
        stalled = 0 if grown else stalled + 1
        time = max(time, found)
        new = [column for column in best if column not in columns]
        columns |= dict.fromkeys(new)
        if stalled > 6 or not (new or grown):
            break
    return time


def _ages(host: Host, known: float) -> Any:
    """Return ages from 0 to at most ``known``: those at which devices come into reach, and others between them."""
    reached = [age for age, _ in host.reach if age <= known]  # all of them: no device is farther than ``known``
    spread = np.linspace(0, known, AGES // 2, endpoint=False)
    close = known * 0.5 ** (np.arange(AGES // 2) / 3)
    return np.unique(np.concatenate([reached, spread, close[1:]]).round(15))


Column = tuple[bool, int, tuple[int, ...]]  # whether it lands, the number of the group, and the ages of its ticks


class _Rows:
    """The rows of the module's docstring for one host: those of ages, that of the reach, and that of all arrivals."""

    def __init__(self, host: Host, ages: Any, outside: float, share: float) -> None:
        self.host, self.ages, n = host, ages, host.devices
        count = len(ages)
        reach = np.array([max(b for age, b in host.reach if age <= t + 1e-15) for t in ages])
        at_least = ages[:, None] >= ages[None, :]  # [age of the landing, age of the row]
        self.landed = np.column_stack([np.where(at_least, n, 1), reach, np.ones(count)])
        # A tick that starts between an age and the next one counts for rows of greater ages.
        self.moved = np.column_stack([ages[None, :] > ages[:, None], np.zeros(count), np.ones(count)])
        self.numbers = np.array([n * outside] * (count + 1) + [n * outside + n * (n - 1) * share])
        self.groups = [(True, k, group) for k, group in enumerate(host.landing)]
        self.groups += [(False, k, group) for k, group in enumerate(host.inside)]

    def first_columns(self) -> dict[Column, None]:
        """Return the columns of one tick."""
        return {(lands, k, (age,)): None for lands, k, _ in self.groups for age in range(len(self.ages))}

    def contribution(self, column: Column, time: float) -> Any:
        """Return what the ticks of a column contribute to each row if the schedule takes some time."""
        lands, k, ticks = column
        group = (self.host.landing if lands else self.host.inside)[k]
        if lands:
            before = np.array([time, *self.ages[list(ticks[:-1])]])
            nbytes = group.speed * (before - self.ages[list(ticks)] - group.latency_s)
            return np.maximum(nbytes, 0.0) @ self.landed[list(ticks)]
        starts = self._starts(time)[list(ticks)]
        nbytes = group.speed * (starts - np.append(starts[1:], 0.0) - group.latency_s)
        return np.maximum(nbytes, 0.0) @ self.moved[list(ticks)]

    def _starts(self, time: float) -> Any:
        return np.append(self.ages[1:], time)

    def prices(self, columns: dict[Column, None], time: float) -> Any:
        """Return the prices of rows, scaled to 1, for which the best of some columns are worth the least."""
        groups = {(lands, k): number for number, (lands, k, _) in enumerate(self.groups)}
        rows, g = len(self.numbers), len(self.groups)
        matrix = np.zeros((len(columns), rows + g))
        for line, column in enumerate(columns):
            matrix[line, :rows] = self.contribution(column, time) / self.numbers
            matrix[line, rows + groups[column[:2]]] = -1.0
        worth = np.array([0.0] * rows + [float(group.count) for *_, group in self.groups])
        total = np.array([[1.0] * rows + [0.0] * g])
        found = linprog(worth, A_ub=matrix, b_ub=np.zeros(len(columns)), A_eq=total, b_eq=[1.0], method="highs")
        return None if found.x is None else np.maximum(found.x[:rows], 0.0) / self.numbers

    def root(self, prices: Any, longest: float) -> tuple[float, list[Column]]:
        """Return the time at which the best ticks are worth the priced numbers, and these ticks.

        The value of the best ticks is a convex function of the time that increases, so Newton's method from above ends
        at the root.
        """
        goal = float(prices @ self.numbers)
        time, columns = longest, list[Column]()
        for _ in range(100):
            value = slope = 0.0
            columns = []
            for lands, k, group in self.groups:
                best, growth, ticks = self._best(lands, group, prices, time)
                value, slope = value + group.count * best, slope + group.count * growth
                columns.append((lands, k, ticks))
            if abs(value - goal) <= 1e-9 * goal:
                return time, [each for each in columns if each[2]]
            if slope <= 0 or value < goal:
                break
            time -= (value - goal) / slope
        return 0.0, [each for each in columns if each[2]]

    def _best(self, lands: bool, group: Group, prices: Any, time: float) -> tuple[float, float, tuple[int, ...]]:
        """Return the value of the best ticks of a link, its growth with the time, and the ages of the ticks."""
        ages, latency = self.ages, group.latency_s
        if lands:
            price, order = group.speed * (self.landed @ prices), range(len(ages) - 1, -1, -1)
            alone, gaps = price * (time - ages - latency), ages[:, None] - ages[None, :] - latency  # [before, after]
        else:
            price, order = group.speed * (self.moved @ prices), range(len(ages))
            starts = self._starts(time)
            alone, gaps = price * (starts - latency), starts[None, :] - starts[:, None] - latency
        alone = np.maximum(alone, 0.0)
        gained = np.maximum(gaps, 0.0) * price[None, :]
        value, before = alone.copy(), np.full(len(ages), -1)
        done: list[int] = []
        for k in order:
            if done:
                through = value[done] + gained[done, k]
                most = int(through.argmax())
                if through[most] > value[k] and gained[done[most], k] > 0:
                    value[k], before[k] = through[most], done[most]
            done.append(k)
        last = int(value.argmax())
        if value[last] <= 0:
            return 0.0, 0.0, ()
        ticks = [last]
        while before[ticks[-1]] >= 0:
            ticks.append(int(before[ticks[-1]]))
        ticks.reverse()
        if lands:
            growth = price[ticks[0]]
        else:
            ticks.reverse()  # the earliest tick, whose age is the greatest, comes first
            growth = price[ticks[0]] if ticks[0] == len(ages) - 1 else 0.0
        return float(value[last]), float(growth), tuple(ticks)
