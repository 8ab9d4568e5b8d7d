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
b(t) over all landed bytes. And every byte must reach each device: if the latencies from all landing links to a device
exceed the least ones from these links to any device by d or more, a byte of W lands in a tick that, without this rest
of its route, has the age d or more. Every row has the form: the sum over all links of what their ticks contribute >= a
number.

Devices without a network card of their own come late. Let l be the least latency of a route through a landing link of c
bytes per second. Call b - l - D / c the start of a tick that carries D bytes and ends at b. It is not before the end of
the tick before. Let the delay of a device be the least latency from it to a landing link, minus the least one from any
device to this link, at the landing link where this difference is least. If a tick carries a byte of a device with the
delay d, then a read of the tick starts when this byte is there. The read takes the latencies of its route, and D / c
for all bytes of the tick. So the tick does not start before d. All rows hold for each d, with the bytes W of the
devices whose delay is d or more, and with the landings of ticks that start at d or later.

For prices w of the rows, a link contributes at most the value of its best ticks. The price of a landed byte changes at
the ages of the rows, and at the delays as starts of ticks. Between two of these points, the value of some ticks is
linear in each end and each start, so the best ones are at such points. The price of bytes inside the host does not rise
with the age of the start of their tick. To move this start to the next age of a row loses nothing: the tick carries
more bytes, and those that another tick loses are worth no more. So dynamic programming over these points finds the best
ticks exactly. If the best values of all links together are less than the priced numbers at a time T, then no schedule
takes T or less (weak duality, for any prices). The prices are found by a linear program over the ticks that were found
so far.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog

import crossreduce as cr
from crossreduce.schedule.costs import between_hosts

AGES = 80  # the ages of rows, besides those at which devices come into reach
ROUNDS = 120  # the most linear programs
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
    late: tuple[tuple[float, int], ...]  # delays, ascending, and the other hosts' devices with each delay or more
    far_s: float  # the greatest of the least ages at which a byte must land to reach a device


def least_seconds(topology: cr.Topology, nbytes: int, enough: float = np.inf) -> float:
    """Return the greatest of four lower bounds of the seconds of an all-gather among all devices.

    They are: the longest of the quickest routes; for each device, the bytes that its links can carry to it, each with
    the latency of at least one tick; the time at the rate of the tightest cut after the least latency of a link; and
    for each host the bound that the module's docstring proves. The search for the last one ends when it is ``enough``.
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
            bounds.append(_host_bound(host, outside, share, max(bounds), enough))
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
        others = [number[name] for name in topology.devices if name.rpartition("/")[0] != prefix]
        own = [number[name] for name in senders if name.rpartition("/")[0] == prefix]
        devices = [number[name] for name in topology.devices if name.rpartition("/")[0] == prefix]
        landing: Counter[tuple[float, float]] = Counter()
        inside: Counter[tuple[float, float]] = Counter()
        delay, far = np.full(len(others), np.inf), np.full(len(devices), np.inf)
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
                if groups is landing:
                    to_link = latency[:, number[link.src]]
                    from_link = latency[number[link.dst]]
                    np.minimum(delay, to_link[others] - to_link[every].min(), out=delay)
                    np.minimum(far, from_link[devices] - from_link[own].min(), out=far)
        within = latency[np.ix_(own, devices)]
        reach = [(float(each), int((within <= each + 1e-15).sum(axis=1).max())) for each in np.unique(within.round(15))]
        both = [tuple(Group(count, *key) for key, count in sorted(links.items())) for links in (landing, inside)]
        starts = np.unique([0.0, *delay[delay < np.inf].round(15)])
        late = [(float(start), int((delay >= start - 1e-15).sum())) for start in starts]
        found.append(Host(len(devices), *both, tuple(reach), tuple(late), float(far.max().round(15))))
    return tuple(found)


def _host_bound(host: Host, outside: float, share: float, known: float, enough: float) -> float:
    """Return the bound of a host, at least ``known``, for the bytes of other hosts and those of each of its devices."""
    longest = (
        sum(outside * host.devices / group.speed + group.latency_s for group in (*host.landing, *host.inside)) + known
    )
    ages = _ages(host, known)
    rows = _Rows(host, ages, outside, share)
    time, columns = known, rows.first_columns()
    stalled = 0
    for _ in range(ROUNDS):
        prices = rows.prices(columns, time) if time < enough else None
        if prices is None:
            break
        found, best = rows.root(prices, time, longest)
        grown = found > time * (1 + 1e-5)
        stalled = 0 if grown else stalled + 1
        time = max(time, found)
        new = [column for column in best if column not in columns]
        columns |= dict.fromkeys(new)
        if stalled > 30 or not (new or grown):
            break
    return time


def _ages(host: Host, known: float) -> Any:
    """Return ages from 0 to at most ``known``: those at which devices come into reach, and others between them."""
    reached = [age for age, _ in host.reach if age <= known]  # all of them: no device is farther than ``known``
    spread = np.linspace(0, known, AGES // 2, endpoint=False)
    close = known * 0.5 ** (np.arange(AGES // 2) / 3)
    return np.unique(np.concatenate([reached, spread, close[1:]]).round(15))


# Whether it lands, the number of the group, and the points of the starts and ends of its ticks, the first tick first.
Column = tuple[bool, int, tuple[tuple[int, int], ...]]


class _Rows:
    """The rows of the module's docstring for one host: those of ages, of the reach, of a far device, of all arrivals.

    All but the last one are repeated for each delay. Points are numbered: first the ages, ascending, and then
    the delays, which are times from the start.
    """

    def __init__(self, host: Host, ages: Any, outside: float, share: float) -> None:
        self.host, self.ages, n = host, ages, host.devices
        self.delays = np.array([delay for delay, _ in host.late])
        count = len(ages)
        # Ticks inside the host that start between an age and the next one count for rows of greater ages.
        moved = np.column_stack([ages[None, :] > ages[:, None], np.zeros((count, 2))])
        self.moved = np.column_stack([*([moved] * len(self.delays)), np.ones(count)])
        late = share * np.array([devices for _, devices in host.late])[:, None] * np.array([*([n] * (count + 1)), 1])
        self.numbers = np.append(late.ravel(), n * outside + n * (n - 1) * share)
        self.groups = [(True, k, group) for k, group in enumerate(host.landing)]
        self.groups += [(False, k, group) for k, group in enumerate(host.inside)]

    def first_columns(self) -> dict[Column, None]:
        """Return the columns of one tick."""
        ages, starts = range(len(self.ages)), range(len(self.ages), len(self.ages) + len(self.delays))
        columns: list[Column] = []
        for lands, k, _ in self.groups:
            columns += [(lands, k, ((start, age),)) for age in ages for start in (starts if lands else (0,))]
        return dict.fromkeys(columns)

    def _points(self, time: float) -> Any:
        """Return the ages of all points."""
        return np.concatenate([self.ages, time - self.delays])

    def _landed(self, ages: Any) -> Any:
        """Return for landings at some ages, by the kind of row, what a byte contributes: see ``contribution``."""
        n = self.host.devices
        reached = np.array([age for age, _ in self.host.reach])
        most = np.maximum.accumulate([devices for _, devices in self.host.reach])
        reach = most[np.searchsorted(reached, ages + 1e-15, side="right") - 1]
        counted = np.where(ages[:, None] >= self.ages[None, :] - 1e-15, n, 1)
        return np.column_stack([counted, reach, ages >= self.host.far_s - 1e-15])

    def contribution(self, column: Column, time: float) -> Any:
        """Return what the ticks of a column contribute to each row if the schedule takes some time."""
        lands, k, ticks = column
        group = (self.host.landing if lands else self.host.inside)[k]
        if lands:
            points = self._points(time)
            start, end = (points[[tick[side] for tick in ticks]] for side in (0, 1))
            nbytes = group.speed * np.maximum(start - end - group.latency_s, 0.0)
            is_late = (time - start)[:, None] >= self.delays[None, :] - 1e-15  # [tick, delay]
            by_delay = np.einsum("t,td,tr->dr", nbytes, is_late, self._landed(end))
            return np.append(by_delay.ravel(), nbytes.sum())
        ends = [end for _, end in ticks]
        starts = self._starts(time)[ends]
        nbytes = group.speed * (starts - np.append(starts[1:], 0.0) - group.latency_s)
        return np.maximum(nbytes, 0.0) @ self.moved[ends]

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

    def root(self, prices: Any, known: float, longest: float) -> tuple[float, list[Column]]:
        """Return a time at which the best ticks are worth less than the priced numbers, and the best ticks there.

        The value of the best ticks does not fall with the time, so the time is found by bisection. It is ``known`` if
        the best ticks are worth enough then.
        """
        goal = float(prices @ self.numbers)
        low, high = known, longest
        best = self._all_best(prices, known)
        if best[0] < goal:
            while high - low > 1e-7 * low:
                middle = (low + high) / 2
                found = self._all_best(prices, middle)
                low, high, best = (middle, high, found) if found[0] < goal else (low, middle, best)
        return low, best[1]

    def _all_best(self, prices: Any, time: float) -> tuple[float, list[Column]]:
        """Return the value of the best ticks of all links, and these ticks."""
        value, columns = 0.0, list[Column]()
        for lands, k, group in self.groups:
            best, ticks = self._best_landing(group, prices, time) if lands else self._best_inside(group, prices, time)
            value += group.count * best
            if ticks:
                columns.append((lands, k, ticks))
        return value, columns

    def _best_landing(self, group: Group, prices: Any, time: float) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Return the value of the best ticks of a link that lands, and their starts and ends."""
        points = self._points(time)
        order = sorted((k for k in range(len(points)) if 0 <= points[k] <= time), key=lambda k: (-points[k], k))
        ages = points[order]
        by_delay = prices[:-1].reshape(len(self.delays), -1) @ self._landed(ages).T  # [delay, point]
        price = np.cumsum(by_delay, axis=0) + prices[-1]
        eligible = (time - ages[:, None] >= self.delays[None, :] - 1e-15).sum(axis=1) - 1  # [point]
        # [start, end]: the value of a tick
        nbytes = np.maximum(ages[:, None] - ages[None, :] - group.latency_s, 0.0)
        tick = group.speed * nbytes * price[eligible]
        value, before = np.zeros(len(order)), [-1] * len(order)  # -1: no tick ends here
        for end in range(1, len(order)):
            through = value[:end] + tick[:end, end]
            most = int(through.argmax())
            value[end] = value[end - 1]
            if through[most] > value[end] * (1 + 1e-12):
                value[end], before[end] = through[most], most
        ticks = []
        at = len(order) - 1
        while at > 0:
            if before[at] < 0:
                at -= 1
            else:
                ticks.append((order[before[at]], order[at]))
                at = before[at]
        return float(value[-1]), tuple(ticks[::-1])

    def _best_inside(self, group: Group, prices: Any, time: float) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Return the value of the best ticks of a link inside the host, and the ages of their starts, as ends."""
        ages, latency = self.ages, group.latency_s
        price, starts = group.speed * (self.moved @ prices), self._starts(time)
        gained = np.maximum(starts[None, :] - starts[:, None] - latency, 0.0) * price[None, :]  # [after, before]
        value, after = np.maximum(price * (starts - latency), 0.0), np.full(len(ages), -1)
        for k in range(1, len(ages)):
            through = value[:k] + gained[:k, k]
            most = int(through.argmax())
            if through[most] > value[k] and gained[most, k] > 0:
                value[k], after[k] = through[most], most
        last = int(value.argmax())
        if value[last] <= 0:
            return 0.0, ()
        ticks = [last]
        while after[ticks[-1]] >= 0:
            ticks.append(int(after[ticks[-1]]))
        return float(value[last]), tuple((0, k) for k in ticks)
