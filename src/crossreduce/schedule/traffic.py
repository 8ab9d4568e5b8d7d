"""What a schedule does to a topology: the links that it uses in each round, and its exact rate.

Input: a ``Schedule``, a ``Topology``, ``Costs``. Output: values that do not depend on the number of bytes or pieces;
``lock_step.py`` and ``clock.py`` compute times from them.

A *read* is an operand of a step. If the operand is on another device, the read is a transfer over the links of a route.
A *resource* limits the speed of reads: a link, the messages of a link, a limit that several links share, or the memory
of a device that combines values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Final, NamedTuple

from ..errors import PlanError
from ..topology import Topology
from ..topology.symmetry import orbit_minima
from .costs import Costs, Pair, between_hosts
from .generated_schedule import GeneratedSchedule
from .host_queues import queue_name
from .schedule import Chunk, Schedule

NO_COSTS: Final = Costs(operation_s=0)


class Read(NamedTuple):
    """An operand of a step."""

    src: int  # the devices, by number; equal if the operand is on the step's own device
    dst: int
    step: int  # the number of the step in the schedule
    operand: int  # the number of the step that made the value, or -1 if it is an input
    round: int
    chunk: int
    latency_s: float  # of all links of its route
    pairs: tuple[Pair, ...]  # the links of its route
    uses: tuple[tuple[int, float], ...]  # (number of a resource, how often this carries each byte of the chunk)


class Resource(NamedTuple):
    """What limits the speed of reads. A read of b bytes takes b * ``seconds_per_byte`` + ``seconds_per_message``."""

    name: str  # for readers
    seconds_per_byte: float
    seconds_per_message: float = 0.0


class Traffic(NamedTuple):
    """The reads of a schedule on a topology, round by round.

    For a generated schedule whose symmetry the topology has, only the reads of the base are listed, and one link stands
    for all links of its orbit. In each round, the links of an orbit carry equal parts of what all chunks send over it.
    """

    shares: tuple[float, ...]  # of the listed chunks
    rounds: int
    reads: tuple[Read, ...]
    resources: tuple[Resource, ...]
    links: dict[Pair, dict[int, list[int]]]  # for each used link, the chunks that it carries in each round
    link_numbers: dict[Pair, int]  # the number of each of these links among the resources
    latency_s: tuple[float, ...]  # for each round the longest latency of its routes
    longest_s: float  # the longest sum of latencies of transfers that depend on each other
    hosts: tuple[str, ...]  # for each step, the queue of its operation (see queue_name); "" if it queues none
    orbits: Orbits | None  # None if every link stands only for itself

    def copies(self, pair: Pair) -> int:
        """Return the number of links for which a link of ``links`` stands."""
        return 1 if self.orbits is None else self.orbits.sizes[pair]

    @property
    def used(self) -> dict[Pair, Pair]:
        """For each link that is used, the link of ``links`` that stands for it."""
        if self.orbits is None:
            return {pair: pair for pair in self.links}
        return {pair: listed for pair, listed in self.orbits.link.items() if listed in self.links}


class Orbits(NamedTuple):
    """The orbits of links, of shared limits and of devices under the symmetry of a schedule."""

    order: int  # the number of elements of the group
    link: dict[Pair, Pair]  # for each link the one that stands for its orbit
    sizes: dict[Pair, int]  # for each link that stands for an orbit, the number of links in the orbit
    limit: list[int]  # for each shared limit, the number of the limit that stands for its orbit
    limit_sizes: list[int]  # for each shared limit, the number of limits in its orbit
    device: dict[str, str]  # for each device or switch the one that stands for its orbit
    device_sizes: dict[str, int]  # for each device or switch that stands for an orbit, the size of the orbit


@lru_cache(maxsize=256)
def orbits_of(schedule: GeneratedSchedule, topology: Topology, costs: Costs) -> Orbits | None:
    """Return the orbits of links under a schedule's symmetry, or ``None`` if topology or costs lack this symmetry.

    The result is also ``None`` if a transfer takes the topology's own route over several links. Among equally good
    routes the topology chooses by names, so the image of such a route need not be the route of the image.
    """
    names, symmetry, base = topology.nodes, schedule.symmetry, schedule.base
    if {*names} != {*schedule.nodes}:
        return None
    for r, steps in enumerate(base.rounds):
        for chunk, dst, srcs in steps:
            for src in srcs:
                ends = base.devices[src], base.devices[dst]
                if src != dst and ends not in topology.by_ends and base.through(r, chunk, src, dst) is None:
                    return None
    if schedule.nodes != names:
        symmetry = symmetry.renumbered(schedule.nodes, names)
    link_orbits = symmetry.links(topology)
    if link_orbits is None:
        return None
    least, counts = link_orbits  # for each link, the link that stands for its orbit; the sizes of orbits
    pairs = [(link.src, link.dst) for link in topology.links]
    number = {name: k for k, name in enumerate(names)}
    limits = [(limit.gb_per_s, frozenset(limit.links)) for limit in costs.shared]
    number_of_limit = {limit: k for k, limit in enumerate(limits)}
    images = []
    for moves, _ in symmetry.generators:
        moved_limits = [
            (speed, frozenset((names[moves[number[src]]], names[moves[number[dst]]]) for src, dst in links))
            for speed, links in limits
        ]
        if len(number_of_limit) < len(limits) or any(limit not in number_of_limit for limit in moved_limits):
            return None
        images.append([number_of_limit[limit] for limit in moved_limits])
    limit_orbits = orbit_minima(images, len(limits))
    limit_counts = Counter(limit_orbits)
    return Orbits(
        order=symmetry.order,
        link={pair: pairs[k] for pair, k in zip(pairs, least, strict=True)},
        sizes={pairs[k]: count for k, count in counts.items()},
        limit=limit_orbits,
        limit_sizes=[limit_counts[k] for k in limit_orbits],
        device={names[k]: names[orbit] for k, orbit in enumerate(symmetry.orbits)},
        device_sizes={names[k]: count for k, count in symmetry.sizes.items()},
    )


def traffic(schedule: Schedule, topology: Topology, costs: Costs = NO_COSTS) -> Traffic:
    """Return the traffic of a schedule, which does not depend on the number of pieces and bytes.

    Raises:
      PlanError: the topology has no route for a transfer.
    """
    return _traffic(schedule.cut_into(1), topology, costs)


class _Path(NamedTuple):
    """The route of a read; the fields are those of ``Read``."""

    pairs: tuple[Pair, ...] = ()
    latency_s: float = 0.0
    uses: tuple[tuple[int, float], ...] = ()
    links: tuple[dict[int, list[int]], ...] = ()  # the entries of ``Traffic.links`` for these links


NO_PATH: Final = _Path()


@lru_cache(maxsize=256)
def _traffic(schedule: Schedule, topology: Topology, costs: Costs) -> Traffic:
    costs.require_links(topology)
    orbits = orbits_of(schedule, topology, costs) if isinstance(schedule, GeneratedSchedule) else None
    if isinstance(schedule, GeneratedSchedule) and orbits is not None:
        schedule = schedule.base
    devices, resources = schedule.devices, _Resources(topology, costs, orbits)
    paths: dict[tuple[int, int, tuple[str, ...] | None], _Path] = {}
    # For each chunk and device, the number of the step that made the value there.
    latest = {(c, source): -1 for c, chunk in enumerate(schedule.chunks) for source in chunk.sources}
    reads: list[Read] = []
    latencies, step, through = [], 0, None
    chain_s: list[float] = []  # for each step, the longest sum of latencies of transfers up to its value
    for r, steps in enumerate(schedule.rounds):
        longest, written = 0.0, {}
        for chunk, dst, srcs in steps:
            chain_s.append(0.0)
            combining = resources.combining(devices[dst], len(srcs))
            for src in srcs:
                path, uses = NO_PATH, combining
                if src != dst:
                    if schedule.routes:
                        through = schedule.through(r, chunk, src, dst)
                    if (src, dst, through) not in paths:
                        paths[src, dst, through] = resources.path(devices[src], devices[dst], through)
                    path = paths[src, dst, through]
                    uses = path.uses + combining if combining else path.uses
                    for by_round in path.links:
                        by_round.setdefault(r, []).append(chunk)
                    longest = max(longest, path.latency_s)
                operand = latest.get((chunk, src), -1)
                chain_s[step] = max(chain_s[step], path.latency_s + (chain_s[operand] if operand >= 0 else 0.0))
                reads.append(Read(src, dst, step, operand, r, chunk, path.latency_s, path.pairs, uses))
            written[chunk, dst] = step
            step += 1
        latest.update(written)
        latencies.append(longest)
    shares = tuple(float(chunk.share) for chunk in schedule.chunks)
    host_of = [queue_name(device) for device in devices]
    hosts = tuple("" if srcs == (dst,) else host_of[dst] for steps in schedule.rounds for _, dst, srcs in steps)
    numbers = {pair: resources.numbers[pair] for pair in resources.links}
    return Traffic(
        shares=shares,
        rounds=len(latencies),
        reads=tuple(reads),
        resources=tuple(resources.listed),
        links=resources.links,
        link_numbers=numbers,
        latency_s=tuple(latencies),
        longest_s=max(chain_s, default=0.0),
        hosts=hosts,
        orbits=orbits,
    )


class _Resources:
    """Lists and numbers the resources that the reads of a schedule use."""

    def __init__(self, topology: Topology, costs: Costs, orbits: Orbits | None) -> None:
        self.topology, self.costs, self.orbits = topology, costs, orbits
        self.listed: list[Resource] = []
        self.links: dict[Pair, dict[int, list[int]]] = {}
        self.numbers: dict[object, int] = {}
        self.of_link: dict[Pair, list[tuple[int, float]]] = {}  # the results of ``uses``
        self.shared: defaultdict[Pair, list[int]] = defaultdict(list)  # for each link, the shared limits that it is in
        for k, limit in enumerate(costs.shared):
            for pair in limit.links:
                self.shared[pair].append(k)

    def number(self, key: object, resource: Resource) -> int:
        """Return the number of the resource with this key. The first call for a key adds ``resource``."""
        if key not in self.numbers:
            self.numbers[key] = len(self.listed)
            self.listed.append(resource)
        return self.numbers[key]

    def path(self, src: str, dst: str, through: tuple[str, ...] | None) -> _Path:
        """Return the path of a route. Its links are replaced by the links that stand for their orbits."""
        pairs, latency = _route(self.topology, src, dst, through)
        if self.orbits is not None:
            pairs = tuple(self.orbits.link[pair] for pair in pairs)
        uses = tuple(use for pair in pairs for use in self.uses(pair))
        return _Path(pairs, latency, uses, tuple(self.links.setdefault(pair, {}) for pair in pairs))

    def uses(self, pair: Pair) -> list[tuple[int, float]]:
        """Return (number, how often it carries each byte that the link carries) for each resource of a link.

        Each read of the base stands for one read in each image, and these are spread evenly over the link's orbit.
        """
        if pair in self.of_link:
            return self.of_link[pair]
        link = f"the link {pair[0]} -> {pair[1]}"
        orbits, copies = self.orbits, 1
        if orbits is not None:
            copies = orbits.sizes[pair]
            link += f", one of {copies} equal ones" if copies > 1 else ""
        uses = [(self.number(pair, Resource(link, _seconds_per_byte(self.topology)[pair])), 1 / copies)]
        if self.costs.messages_per_s is not None and between_hosts(*pair):
            often = 1.0 if orbits is None else orbits.order / copies
            messages = Resource(f"the messages of {link}", 0.0, often / self.costs.messages_per_s)
            uses.append((self.number(("messages", pair), messages), 1.0))
        for k in self.shared[pair]:
            if orbits is not None:
                k = orbits.limit[k]
            speed, links = self.costs.shared[k]
            name = f"the {speed:g} GB/s that {len(links)} links share, such as {links[0][0]} -> {links[0][1]}"
            often = 1.0 if orbits is None else 1 / orbits.limit_sizes[k]
            uses.append((self.number(("shared", k), Resource(name, 1 / (speed * 1e9))), often))
        self.of_link[pair] = uses
        return uses

    def combining(self, device: str, operands: int) -> tuple[tuple[int, float], ...]:
        """Return the use of a device's memory per operand. A combination reads all operands and writes the result."""
        speed = self.costs.reduction_gb_per_s
        if speed is None or operands < 2:
            return ()
        copies = 1
        if self.orbits is not None:
            device = self.orbits.device[device]
            copies = self.orbits.device_sizes[device]
        number = self.number(("combining", device), Resource(f"the reductions of {device}", 1 / (speed * 1e9)))
        return ((number, (operands + 1) / operands / copies),)


def fluid_rate(schedule: Schedule, topology: Topology) -> Fraction | None:
    """Return the exact rate in GB/s that a schedule approaches as its buffer grows, or ``None`` if no data moves.

    The busiest link determines the rate.

    >>> from crossreduce.planning import ring
    >>> fluid_rate(ring(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), Topology.ring(4, gb_per_s=25))
    Fraction(50, 3)
    """
    flows = traffic(schedule, topology)
    chunks = counted_chunks(schedule, flows)
    equal = len({chunk.share for chunk in chunks}) == 1
    shares: dict[int | tuple[int, ...], Fraction] = {}
    rates = []
    for pair, by_round in flows.links.items():
        carried = [chunk for carried_in_round in by_round.values() for chunk in carried_in_round]
        amount = len(carried) if equal else tuple(carried)  # equal shares only need to be counted
        if amount not in shares:
            shares[amount] = sum((chunks[chunk].share for chunk in carried), Fraction(0))
        if shares[amount]:
            rates.append((topology.by_ends[pair].bandwidth, shares[amount] / flows.copies(pair)))
    return min((bandwidth / share for bandwidth, share in dict.fromkeys(rates)), default=None)


def link_shares(schedule: Schedule, topology: Topology) -> dict[Pair, Fraction]:
    """Return for each used link the data that it carries, as a fraction of the buffer, which can exceed 1.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(3, gb_per_s=25)
    >>> link_shares(one_device(topology.devices), topology)["cpu:1", "switch"]
    Fraction(1, 1)
    """
    return shares_of_links(schedule, traffic(schedule, topology))


def shares_of_links(schedule: Schedule, flows: Traffic) -> dict[Pair, Fraction]:
    """Return the same as ``link_shares``, given the traffic of the schedule."""
    chunks = counted_chunks(schedule, flows)
    shares = {
        pair: sum((chunks[chunk].share for carried in by_round.values() for chunk in carried), Fraction(0))
        for pair, by_round in flows.links.items()
    }
    return {pair: shares[listed] / flows.copies(listed) for pair, listed in flows.used.items()}


def counted_chunks(schedule: Schedule, flows: Traffic) -> tuple[Chunk, ...]:
    """Return the chunks to which the chunk numbers in the traffic of a schedule refer.

    These are all chunks, or only those of a generated schedule's ``base`` if the topology has the symmetry.
    """
    return schedule.base.chunks if isinstance(schedule, GeneratedSchedule) and flows.orbits else schedule.chunks


def carried_chunks(schedule: Schedule, topology: Topology) -> list[tuple[Fraction, Counter[int]]]:
    """Return (bandwidth in GB/s, how often the link carries each chunk) for each used link.

    >>> from crossreduce.planning import one_device
    >>> topology = Topology.star(2, gb_per_s=25)
    >>> carried_chunks(one_device(topology.devices), topology)[0]
    (Fraction(25, 1), Counter({0: 1}))
    """
    carried = []
    if isinstance(schedule, GeneratedSchedule):
        schedule = schedule.explicit
    for pair, by_round in traffic(schedule, topology).links.items():
        counts = Counter(chunk for chunks in by_round.values() for chunk in chunks)
        carried.append((topology.by_ends[pair].bandwidth, counts))
    return carried


def route_links(topology: Topology, src: str, dst: str, through: tuple[str, ...] | None = None) -> tuple[Pair, ...]:
    """Return the links of a route as (src, dst). Without ``through``, this is the topology's own route.

    Raises:
      PlanError: a node or a link of the route does not exist.
    """
    unknown = [node for node in (src, *(through or ()), dst) if node not in topology]
    if unknown:
        given = f"a topology of {', '.join(topology.nodes)}"
        problem = f"the topology has no route from {src} to {dst}: it has no node {', '.join(unknown)}."
        raise PlanError.of(problem, given, "the topology for which the schedule was planned")
    nodes = topology.route(src, dst) if through is None else (src, *through, dst)
    pairs = () if nodes is None else tuple(pairwise(nodes))
    if nodes is None or any(pair not in topology.by_ends for pair in pairs):
        out = ", ".join(link.dst for link in topology.out_links(src)) or "none"
        by = "" if through is None else f" through {', '.join(through)}"
        gap = next((f"no link from {a} to {b}" for a, b in pairs if (a, b) not in topology.by_ends), "")
        remedy = "the topology for which the schedule was planned, or one with the missing links"
        given = gap or f"links out of {src}: {out}"
        raise PlanError.of(f"the topology has no route from {src} to {dst}{by}.", given, remedy)
    return pairs


@lru_cache(maxsize=1 << 15)
def _route(topology: Topology, src: str, dst: str, through: tuple[str, ...] | None) -> tuple[tuple[Pair, ...], float]:
    """Return the links of a route, and the sum of their latencies."""
    pairs, (latencies, scale) = route_links(topology, src, dst, through), _latencies(topology)
    return pairs, sum([latencies[pair] for pair in pairs]) / scale


@lru_cache(maxsize=64)
def _latencies(topology: Topology) -> tuple[dict[Pair, int], int]:
    """Return the latency of each link in whole units, and the number of units in a second."""
    scale = lcm(*(link.latency_s.denominator for link in topology.links))
    return {pair: int(link.latency_s * scale) for pair, link in topology.by_ends.items()}, scale


@lru_cache(maxsize=64)
def _seconds_per_byte(topology: Topology) -> dict[Pair, float]:
    return {pair: 1 / (float(link.bandwidth) * 1e9) for pair, link in topology.by_ends.items()}
