"""Trees on several hosts: each share of the buffer reaches each host over the network, and is copied there.

Input: a topology, its devices by host, and the device where each share starts. Output: ``Edge`` lists. The network
cards of a host get equal parts: each crossing takes the cards that have carried least so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final, NamedTuple

from ...schedule.costs import between_hosts
from ...topology import Topology


class Hop(NamedTuple):
    """A route between two devices, by number."""

    src: int
    dst: int
    nodes: tuple[str, ...]  # from the source to the destination
    links: tuple[int, ...]
    latency_s: float


class Edge(NamedTuple):
    """A copy of a share from one device to another; ``parent`` is the edge that brings it to the source, or -1."""

    share: int
    hop: Hop
    parent: int
    crosses: bool  # to another host
    level: int  # inside a host, the number of edges (or of steps) before it; 0 for an edge to another host


Tree = tuple[tuple[int, int, int], ...]  # (step, source, destination), sorted by step


class TreesInside:
    """The trees of shares inside hosts: for each device, those of shares that start or land there."""

    def __init__(self, trees: Sequence[Sequence[Tree]]) -> None:
        self.trees = trees


class Style(NamedTuple):
    """How shares reach the network and leave it."""

    stops: bool  # whether a share is first copied to the device at the network card, and crosses from there
    lands: int  # where it is copied from: AT_CARD, SPREAD or RELAYED
    landings: int = 1  # how often it crosses to each host; more than once only AT_CARD
    by_level: bool = False  # whether links inside a host carry equal parts at each level of the trees, not only in all
    inside: TreesInside | None = None  # ``None``: the trees inside a host have the fewest levels
    landed: TreesInside | None = None  # the same for shares that have landed
    tree: int = 0  # which of these trees


# Where a share that has crossed is copied from: the device at the card; any device of the host, so that all of them
# get equal parts, to which it goes without a stop; or such a device, to which the device at the card copies it.
AT_CARD: Final = 0
SPREAD: Final = 1
RELAYED: Final = 2


class Wires:
    """The links of a topology of several hosts, and the routes on them."""

    def __init__(self, topology: Topology, devices: tuple[str, ...]) -> None:
        self.topology, self.devices = topology, devices
        self.number = {(link.src, link.dst): k for k, link in enumerate(topology.links)}
        self.seconds_per_byte = [1e-9 / float(link.bandwidth) for link in topology.links]
        self.latency_s = [float(link.latency_s) for link in topology.links]
        self.at = {name: k for k, name in enumerate(devices)}
        by_host = defaultdict[str, list[int]](list)
        for k, name in enumerate(devices):
            by_host[name.rpartition("/")[0]].append(k)
        self.hosts = list(by_host.values())
        self._depths: dict[tuple[int, ...], dict[int, int]] = {}
        self.host_of = {device: h for h, members in enumerate(self.hosts) for device in members}
        inside = [self._routes(k, crossing=False) for k in range(len(devices))]
        self.inside = {(hop.src, hop.dst): hop for hops in inside for hop in hops}  # through switches of the host
        # By (host, host): the routes that leave one device and reach the other without passing a third one.
        self.crossings: dict[tuple[int, int], list[Hop]] = defaultdict(list)
        for k in range(len(devices)):
            for hop in self._routes(k, crossing=True):
                self.crossings[self.host_of[k], self.host_of[hop.dst]].append(hop)

    def hop(self, nodes: Sequence[str]) -> Hop:
        """Return the hop along some nodes."""
        links = tuple(self.number[pair] for pair in pairwise(nodes))
        latency_s = sum(self.latency_s[k] for k in links)
        return Hop(self.at[nodes[0]], self.at[nodes[-1]], tuple(nodes), links, latency_s)

    def _routes(self, start: int, *, crossing: bool) -> list[Hop]:
        """Return the widest of the quickest routes through switches, inside the host or to devices of other hosts."""
        name = self.devices[start]
        home = name.rpartition("/")[0]
        found: dict[str, tuple[str, ...]] = {}
        waiting: list[tuple[float, float, tuple[str, ...]]] = [(0.0, 0.0, (name,))]
        while waiting:
            latency_s, slowest, nodes = heappop(waiting)
            node = nodes[-1]
            if node in found:
                continue
            found[node] = nodes
            if node in self.topology.devices and node != name:
                continue
            for link in self.topology.out_links(node):
                if (not crossing and between_hosts(*link[:2])) or link.dst in found:
                    continue
                width = max(slowest, 1 / float(link.bandwidth))
                heappush(waiting, (latency_s + float(link.latency_s), width, (*nodes, link.dst)))
        return [
            self.hop(nodes)
            for node, nodes in found.items()
            if node in self.at and node != name and (node.rpartition("/")[0] != home) == crossing
        ]

    @property
    def is_joined(self) -> bool:
        """Whether every host can be left for every other one, and the devices of each host are joined inside it."""
        pairs = [(a, b) for a in range(len(self.hosts)) for b in range(len(self.hosts)) if a != b]
        return (
            len(self.hosts) > 1
            and all(self.crossings.get(pair) for pair in pairs)
            and all(len(self.depths((members[0],))) == len(members) for members in self.hosts)
        )

    @cached_property
    def crossing_s(self) -> float:
        """The least latency of a route to another host, in seconds."""
        return min(hop.latency_s for hops in self.crossings.values() for hop in hops)

    @cached_property
    def most_cards(self) -> int:
        """The most devices of a host that have a route to another host of their own."""
        cards = {hop.src for hops in self.crossings.values() for hop in hops}
        return max(len(cards.intersection(members)) for members in self.hosts)

    @cached_property
    def greatest_depth(self) -> int:
        """The most hops between two devices of a host."""
        return max(max(self.depths((k,)).values()) for k in range(len(self.devices)))

    def depths(self, roots: tuple[int, ...]) -> dict[int, int]:
        """Return the devices that some devices of a host reach inside it, and their distances in hops."""
        if roots not in self._depths:
            depth = self._depths[roots] = dict.fromkeys(roots, 0)
            for node in (queue := list(roots)):
                for other in self.hosts[self.host_of[node]]:
                    if other not in depth and (node, other) in self.inside:
                        depth[other] = depth[node] + 1
                        queue.append(other)
        return self._depths[roots]

    @cached_property
    def to_card(self) -> list[int]:
        """For each device, the hops to the nearest device of its host that has a route to another host of its own."""
        cards = {hop.src for hops in self.crossings.values() for hop in hops}
        return [min(hops for at, hops in self.depths((k,)).items() if at in cards) for k in range(len(self.devices))]

    def path(self, src: int, dst: int) -> tuple[str, ...]:
        """Return the nodes of a route inside a host, perhaps through other devices."""
        nodes = self.devices[dst : dst + 1]
        depth = self.depths((src,))
        while dst != src:
            up = next(k for k in depth if depth[k] == depth[dst] - 1 and (k, dst) in self.inside)
            nodes, dst = (*self.inside[up, dst].nodes[:-1], *nodes), up
        return nodes


@lru_cache(maxsize=16)
def wires(topology: Topology, devices: tuple[str, ...]) -> Wires | None:
    """Return the wires of several hosts, or ``None`` if there is one host, or some are not joined."""
    found = Wires(topology, devices)
    return found if found.is_joined else None


class _Load:
    """The shares that each link carries so far, in all and by the level of the edges in their trees."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.counts: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(wires.seconds_per_byte))

    def add(self, hop: Hop, level: int) -> None:
        for counts in (self.counts[level], self.counts[-1]):
            for k in hop.links:
                counts[k] += 1

    def after(self, hop: Hop, level: int = -1) -> float:
        """Return the load of the busiest link of a hop, once it carries one more share. -1 stands for all levels."""
        counts, seconds = self.counts[level], self.wires.seconds_per_byte
        return max((counts[k] + 1) * seconds[k] for k in hop.links)


class _Trees:
    """The edges of the trees so far."""

    def __init__(self, wires: Wires) -> None:
        self.wires, self.load = wires, _Load(wires)
        self.edges: list[Edge] = []
        self.levels: list[int] = []  # of each edge: how many edges are above it

    def add(self, share: int, hop: Hop, parent: int, *, crosses: bool = False, step: int = -1) -> int:
        """Add an edge, and return its number."""
        level = 0 if parent < 0 else self.levels[parent] + 1
        self.load.add(hop, level)
        inside = 0 if crosses or parent < 0 or self.edges[parent].crosses else self.edges[parent].level + 1
        self.edges.append(Edge(share, hop, parent, crosses, max(inside, step)))
        self.levels.append(level)
        return len(self.edges) - 1

    def relay(self, share: int, have: dict[int, int], src: int, dst: int) -> None:
        """Add an edge that copies a share from one device to another of its host, unless they are the same."""
        if dst != src:
            have[dst] = self.add(share, self.wires.hop(self.wires.path(src, dst)), have[src])

    def spread(
        self, share: int, have: dict[int, int], roots: tuple[int, ...], style: Style, inside: TreesInside | None
    ) -> dict[int, int]:
        """Add the edges that copy a share from ``roots`` to the other devices of their host.

        ``have`` contains the edges that bring the share to some of them. Return it with an edge for each device.
        """
        wires, load = self.wires, self.load
        if inside:
            trees = inside.trees[roots[0]]
            for step, src, dst in trees[style.tree % len(trees)]:
                have[dst] = self.add(share, wires.inside[src, dst], have[src], step=step)
            return have
        depth = wires.depths(roots)
        ups = list(roots)
        for node in sorted(depth, key=lambda node: (depth[node], node)):
            if node not in have:
                hops = [wires.inside[up, node] for up in ups if depth[up] < depth[node] and (up, node) in wires.inside]

                def price(hop: Hop) -> tuple[float, ...]:
                    if not style.by_level:
                        return depth[hop.src], load.after(hop), hop.src
                    parent = have[hop.src]
                    level = 0 if parent < 0 else self.levels[parent] + 1
                    return depth[hop.src], load.after(hop, level), load.after(hop), hop.src

                hop = min(hops, key=price) if len(hops) > 1 else hops[0]
                have[node] = self.add(share, hop, have[hop.src])
            if node not in ups:
                ups.append(node)
        return have


@lru_cache(maxsize=64)
def edges_of(wires: Wires, starts: tuple[int, ...], *styles: Style) -> tuple[Edge, ...]:
    """Return the edges of the trees of shares that start at some devices. Parents come before their children.

    The style of share k is ``styles[k % len(styles)]``. All styles have equally many landings.
    """
    trees = _Trees(wires)
    inside: list[dict[int, int]] = []  # for each share, the edge that brings it to a device of its host
    rooted = len(set(starts)) == 1
    for share, start in enumerate(starts):
        style = styles[share % len(styles)]
        have, members = {start: -1}, wires.hosts[wires.host_of[start]]
        target = members[share % len(members)] if rooted and style.lands == RELAYED else start
        trees.relay(share, have, start, target)
        inside.append(trees.spread(share, have, (target,), style, style.inside))
    landed = [0] * len(wires.devices)
    crossings_of = _crossings(wires, starts, styles[0].landings)
    for share in _in_turn(starts):
        start, style = starts[share], styles[share % len(styles)]
        for crossings in crossings_of[share]:
            have = {}
            for crossing in crossings:
                card, parent = crossing.dst, inside[share][crossing.src]
                before: tuple[str, ...] = ()
                after: tuple[str, ...] = ()
                if not style.stops and crossing.src != start:
                    before, parent = wires.path(start, crossing.src)[:-1], -1
                target = card
                if style.lands != AT_CARD:
                    members = wires.hosts[wires.host_of[card]]
                    target = min(members, key=lambda k: (landed[k], k != card, (k - start) % len(wires.devices)))
                landed[target] += 1
                if style.lands == SPREAD and target != card:
                    card, after = target, wires.path(card, target)[1:]
                hop = wires.hop((*before, *crossing.nodes, *after)) if before or after else crossing
                have[card] = trees.add(share, hop, parent, crosses=True)
            trees.relay(share, have, card, target)
            trees.spread(share, have, tuple(have) if style.landings > 1 else (target,), style, style.landed)
    return tuple(trees.edges)


def _in_turn(starts: Sequence[int]) -> list[int]:
    """Return all shares: the first one of each start, then the second ones, and so on. Each turn gets equal parts."""
    return sorted(range(len(starts)), key=lambda k: (starts[:k].count(starts[k]), k))


@lru_cache(maxsize=64)
def _crossings(wires: Wires, starts: tuple[int, ...], landings: int) -> list[list[list[Hop]]]:
    """Return for each share and each other host its crossings. All cards get equal parts.

    A device with a card sends its own shares itself, up to its part; other shares take the card with the least load.
    After the first crossing to a host, each further one lands as far as possible from the ones before.
    """
    cards = {hop.src for hops in wires.crossings.values() for hop in hops}
    count = len(wires.devices)
    parts = []
    for host, members in enumerate(wires.hosts):
        shares = sum(wires.host_of[start] == host for start in starts)
        parts.append(-(-shares // max(1, len(cards.intersection(members)))))
    load, landed, sent = _Load(wires), [0] * count, [0] * count
    chosen: list[list[list[Hop]]] = [[] for _ in starts]
    for share in sorted(_in_turn(starts), key=lambda share: starts[share] not in cards):
        start = starts[share]
        home = wires.host_of[start]
        own = start in cards and sent[start] < parts[home]
        sent[start] += 1

        def price(hop: Hop, start: int = start) -> tuple[object, ...]:
            away = (hop.src - start) % count, (hop.dst - start) % count
            return load.after(hop), hop.src != start, landed[hop.dst], away

        for host in range(len(wires.hosts)):
            if host == home:
                continue
            every = wires.crossings[home, host]
            usable = [hop for hop in every if hop.src == start] if own else every
            crossings: list[Hop] = []
            while len(crossings) < landings:
                if crossings:
                    depth = wires.depths(tuple(hop.dst for hop in crossings))
                    same = [hop for hop in every if hop.src == crossings[0].src]
                    usable = [hop for hop in same if depth[hop.dst] == max(depth[hop.dst] for hop in same)]
                    if not depth[usable[0].dst]:
                        break
                crossings.append(min(usable or every, key=price))
                load.add(crossings[-1], 0)
                landed[crossings[-1].dst] += 1
            chosen[share].append(crossings)
    return chosen
