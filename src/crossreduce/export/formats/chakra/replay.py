"""Run Chakra traces on links that are FIFOs, like the analytical network of ASTRA-sim that models congestion.

Input: the traces of all ranks, a ``Topology``. Output: seconds. Nothing is sent and no clock is read.

The model: a link carries one message at a time, in the order in which messages reach it. It is busy for the time of the
bytes at its bandwidth, and the message arrives one latency later. Switches and devices on a route receive a message
completely before they forward it. A send or receive node is complete when the message has arrived at its destination,
and a computation after its duration. A rank starts the nodes that wait for nothing in the order of their numbers.

ASTRA-sim also rounds times down to nanoseconds, takes 1 ns for each computation, and counts 2**30 bytes per GB.

Source: github.com/astra-sim/astra-network-analytical, congestion_aware/network/Link.cc, Chunk.cc, and
common/NetworkFunction.cc; github.com/mlcommons/chakra, src/feeder/et_feeder.h (the order of nodes).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import count

from ....errors import ArgumentError, PlanError, shown
from ....schedule.costs import Pair
from ....schedule.traffic import route_links
from ....topology import TopologyLike, topology_of
from .format import COMM_RECV_NODE, COMM_SEND_NODE, COMP_NODE, TraceNode, decode

_At = tuple[int, int]  # a rank, and the position of a node in its trace


def replay(traces: Iterable[bytes], topology: TopologyLike, devices: Sequence[str] | None = None) -> float:
    """Return the seconds that traces take on a topology whose links are FIFOs.

    Args:
      traces: the content of each rank's file, by rank.
      topology: the network; messages take its routes, or those that the traces name.
      devices: the device of each rank; ``None``: the topology's, in its order.
    Raises:
      ArgumentError: bytes that are not a trace, an unknown node, or more or fewer traces than devices.
      PlanError: some nodes wait for each other or for a message that no rank sends; or a route does not exist.
      BackendError: protobuf is not installed.

    >>> from crossreduce.export.formats.chakra import to_chakra
    >>> from crossreduce.planning import ring
    >>> from crossreduce.topology import Topology
    >>> pair = Topology.ring(2, gb_per_s=25, latency_s=1e-6)
    >>> files = to_chakra(ring(pair.devices), pair, 1_000_000)
    >>> round(replay(files.values(), pair) * 1e6, 3)  # two rounds of 1 us + 500 kB / 25 GB/s
    42.0
    """
    topology = topology_of(topology)
    nodes = [decode(trace).nodes for trace in traces]
    names = topology.devices if devices is None else tuple(devices)
    if len(nodes) != len(names):
        given = f"{len(nodes)} traces, {len(names)} devices"
        raise ArgumentError.of("there must be one trace for each device.", given, "devices=plan.ranks")
    return replay_nodes(nodes, topology, names)


def replay_nodes(nodes: Sequence[Sequence[TraceNode]], topology: TopologyLike, devices: Sequence[str]) -> float:
    """Return the seconds that decoded traces take; see ``replay``."""
    return _Replay(nodes, topology, devices).run()


class _Link:
    """A link: the messages that wait for it, and whether it carries one."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.waiting: deque[_Flight] = deque()
        self.busy = False


class _Flight:
    """A message on its way: its bytes, the links of its route, how many it has passed, and the node that sent it."""

    def __init__(self, size: int, route: list[_Link], sender: _At) -> None:
        self.size, self.route, self.sender, self.passed = size, route, sender, 0


class _Replay:
    def __init__(self, nodes: Sequence[Sequence[TraceNode]], topology: TopologyLike, devices: Sequence[str]) -> None:
        self.nodes, self.topology, self.devices = nodes, topology_of(topology), devices
        self.now = 0.0
        self.numbers = count()  # events at the same time happen in the order in which they were scheduled
        self.events: list[tuple[float, int, _Link | None, _Flight | _At | None]] = []
        self.left: list[list[int]] = []  # how many nodes or messages each node waits for
        self.followers: list[list[list[int]]] = []  # the nodes that wait for each node
        for rank, trace in enumerate(nodes):
            places = {node.id: place for place, node in enumerate(trace)}
            self.left.append([len(set(node.deps)) + (node.kind == COMM_RECV_NODE) for node in trace])
            self.followers.append([[] for _ in trace])
            for place, node in enumerate(trace):
                for dep in dict.fromkeys(node.deps):
                    if dep not in places:
                        problem = f"node {node.id} of rank {rank} depends on node {dep}, which its trace does not have."
                        raise ArgumentError.of(problem, node.name, "the complete trace")
                    self.followers[rank][places[dep]].append(place)
        self.receiver = self._receivers()
        self.links = {
            pair: _Link(float(link.bandwidth) * 1e9, float(link.latency_s))
            for pair, link in self.topology.by_ends.items()
        }
        self.routes: dict[tuple[int, int, tuple[str, ...] | None], list[_Link]] = {}

    def run(self) -> float:
        """Return the time of the last event."""
        for rank, trace in enumerate(self.nodes):
            free = [place for place, left in enumerate(self.left[rank]) if not left]
            for place in sorted(free, key=lambda place: trace[place].id):
                self._start(rank, place)
        while self.events:
            self.now, _, link, what = heapq.heappop(self.events)
            if isinstance(what, tuple):
                self._complete([what])
            elif what is not None:
                self._arrive(what)
            elif link is not None:
                link.busy = False
                if link.waiting:
                    self._carry(link, link.waiting.popleft())
        stuck = [
            (rank, place) for rank, left in enumerate(self.left) for place, number in enumerate(left) if number > 0
        ]
        if stuck:
            rank, place = stuck[0]
            problem = "the traces do not end: nodes wait for each other, or for a message that no rank sends."
            given = f"{len(stuck)} nodes wait, first {shown(self.nodes[rank][place].name)} of rank {rank}"
            raise PlanError.of(problem, given, "traces of all ranks, from one export")
        return self.now

    def _receivers(self) -> dict[_At, _At]:
        """Return the receive node of each send node: the k-th of the same source, destination, tag and size."""
        ends: dict[int, defaultdict[tuple[int, ...], list[_At]]] = {
            kind: defaultdict(list) for kind in (COMM_SEND_NODE, COMM_RECV_NODE)
        }
        for rank, trace in enumerate(self.nodes):
            for place, node in enumerate(trace):
                if node.kind in ends:
                    ends[node.kind][node.src, node.dst, node.tag, node.size].append((rank, place))
                elif node.kind != COMP_NODE:
                    problem = "a replay supports sends, receives and computations only."
                    raise ArgumentError.of(problem, f"node {node.id} of rank {rank} has type {node.kind}")
        sends, receives = ends.values()
        for key, found in sends.items():
            if len(found) > len(receives[key]):
                problem = "each message that a rank sends must have a receive node of the same tag and size."
                given = "from {} to {}, tag {}, {} bytes".format(*key)
                raise PlanError.of(problem, f"{len(found)} sends and {len(receives[key])} receives {given}")
        return {at: to for key, found in sends.items() for at, to in zip(found, receives[key], strict=False)}

    def _route(self, node: TraceNode) -> list[_Link]:
        key = node.src, node.dst, node.through
        if key not in self.routes:
            if not (0 <= node.src < len(self.devices) and 0 <= node.dst < len(self.devices)):
                given = f"{shown(node.name)} from {node.src} to {node.dst}"
                raise ArgumentError.of(f"a message must have ranks from 0 to {len(self.devices) - 1}.", given)
            pairs: tuple[Pair, ...] = route_links(
                self.topology, self.devices[node.src], self.devices[node.dst], node.through
            )
            self.routes[key] = [self.links[pair] for pair in pairs]
        return self.routes[key]

    def _start(self, rank: int, place: int) -> None:
        node = self.nodes[rank][place]
        if node.kind == COMM_SEND_NODE:
            self._queue(_Flight(node.size, self._route(node), (rank, place)))
        else:
            self._schedule(node.duration_micros * 1e-6, None, (rank, place))

    def _queue(self, flight: _Flight) -> None:
        link = flight.route[flight.passed]
        if link.busy:
            link.waiting.append(flight)
        else:
            self._carry(link, flight)

    def _carry(self, link: _Link, flight: _Flight) -> None:
        link.busy = True
        transmission = flight.size / link.bytes_per_s
        self._schedule(transmission + link.latency_s, link, flight)
        self._schedule(transmission, link, None)

    def _schedule(self, seconds: float, link: _Link | None, what: _Flight | _At | None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), link, what))

    def _arrive(self, flight: _Flight) -> None:
        flight.passed += 1
        if flight.passed < len(flight.route):
            self._queue(flight)
            return
        done = [flight.sender]
        receiver = self.receiver.get(flight.sender)
        if receiver is not None:
            self.left[receiver[0]][receiver[1]] -= 1
            if not self.left[receiver[0]][receiver[1]]:
                done.append(receiver)
        self._complete(done)

    def _complete(self, done: list[_At]) -> None:
        """Start the nodes that waited only for these nodes."""
        free: list[_At] = []
        for rank, place in done:
            self.left[rank][place] = -1
            for follower in self.followers[rank][place]:
                self.left[rank][follower] -= 1
                if not self.left[rank][follower]:
                    free.append((rank, follower))
        for rank, place in sorted(free, key=lambda at: (at[0], self.nodes[at[0]][at[1]].id)):
            self._start(rank, place)
