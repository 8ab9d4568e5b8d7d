"""Write a schedule as Chakra execution traces, one per rank, which ASTRA-sim runs as a custom collective.

Input: a ``Schedule``, its ``Topology``, bytes. Output: the nodes of each rank, or the contents of the files.

A transfer of a piece becomes one message, or several packets if its route has more than one link: ASTRA-sim's switches
forward whole messages, those of ``simulate`` forward bytes as they arrive. A packet is a send node of its source and a
receive node of its destination. A computation combines operands, or joins the packets of a copied piece.

The messages of a tick (piece + round) leave over a link together: when the values of all of them are there, and when
the messages of the link's previous tick have arrived, apart from the last packets, one on each further link of their
route. So each tick keeps a link busy for the latency and for its bytes, as in ``simulate``. This has to be in the
dependencies of the send nodes, since ASTRA-sim starts nodes that wait for nothing in the order of a hash table. The
messages leave packet by packet in turn, so that they share their link, and rank i sends to rank i + 1 first, so that
ranks do not all send to the same one through a switch.

Source: github.com/astra-sim/astra-sim, astra-sim/system/astraccl/custom_collectives/CustomAlgorithm.cc (types of nodes;
names of files; a send is complete when its message has arrived) and astra-sim/network_frontend/analytical/common
(messages match by tag, ends and size; no message is empty); github.com/astra-sim/collectiveapi, chakra_converter
(attributes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ...errors import PlanError
from ...lowering import Instruction, Program, lower
from ...schedule import Schedule, byte_count
from ...schedule.costs import Pair
from ...schedule.traffic import route_links
from ...topology import Topology, TopologyLike, topology_of
from .format import COMM_RECV_NODE, COMM_SEND_NODE, COMP_NODE, TraceNode, encode

MOST_NODES: Final = 100_000
"""The greatest number of nodes in all traces, as long as fewer packets and pieces can reduce it: about 12 MB."""

PACKETS: Final = 128
"""The least number of packets of a chunk that passes a switch: the switch delays it by 1 / 128 of its bytes' time."""

LEAST_PACKETS: Final = 16
"""The packets of a piece that passes a switch, unless there would be too many nodes."""


class Traces(NamedTuple):
    """The nodes of each rank, and into how many parts chunks are cut."""

    nodes: tuple[tuple[TraceNode, ...], ...]  # by rank
    pieces: int  # per chunk
    packets: int  # per piece, of transfers whose routes have several links


def to_chakra(schedule: Schedule, topology: TopologyLike, nbytes: int | str) -> dict[str, bytes]:
    """Return the traces of a schedule, by the name of their file: ``COLLECTIVE_ALGORITHM.RANK.et``.

    Rank k is the schedule's k-th device. Messages have fixed sizes, so traces are for one size of the buffer. ASTRA-sim
    finds its own routes; a send node stores the schedule's in the attribute ``through`` if it is not the topology's.

    Args:
      schedule: any collective whose nodes are devices.
      topology: determines the links of each transfer.
      nbytes: bytes of the whole buffer, 0 or more, or text such as "64M".
    Raises:
      PlanError: a switch combines, or the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: an invalid number of bytes, schedule or topology.
      BackendError: protobuf is not installed.

    >>> from crossreduce.planning import ring
    >>> pair = Topology.ring(2, gb_per_s=25)
    >>> sorted(to_chakra(ring(pair.devices), pair, 1 << 20))
    ['all_reduce_ring.0.et', 'all_reduce_ring.1.et']
    """
    made = traces(schedule, topology, nbytes)
    about = {
        "schema": "1.0.2-chakra.0.0.4",
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "nbytes": str(byte_count(nbytes)),
        "pieces": str(made.pieces),
        "packets": str(made.packets),
    }
    name = f"{schedule.collective}_{schedule.algorithm}"
    return {
        f"{name}.{rank}.et": encode(nodes, {**about, "rank": str(rank), "device": device})
        for rank, (device, nodes) in enumerate(zip(schedule.devices, made.nodes, strict=True))
    }


def traces(schedule: Schedule, topology: TopologyLike, nbytes: int | str) -> Traces:
    """Return the nodes of the traces of a schedule; see ``to_chakra``.

    >>> from crossreduce.planning import one_device
    >>> pair = Topology.ring(2)
    >>> for node in traces(one_device(pair.devices), pair, 100).nodes[0]:
    ...     print(node.id, node.name, node.deps)
    0 receive chunk 0 value 1 piece 0 from 1 ()
    1 combine chunk 0 value 2 piece 0 (0,)
    2 send chunk 0 value 2 piece 0 to 1 (1,)
    """
    topology, size = topology_of(topology), byte_count(nbytes)
    program = lower(schedule)
    switches = [name for name in program.devices if name not in topology.devices and name in topology]
    if switches:
        problem = "a rank of a Chakra trace must be a device, but in this schedule switches combine or copy."
        raise PlanError.of(problem, ", ".join(switches), "a machine without in_network")
    return _Writer(program, topology, size).traces()


@dataclass
class _Message:
    """A transfer of a piece."""

    chunk: int
    value: int
    piece: int
    src: int
    dst: int
    packets: tuple[int, ...]  # the bytes of each
    links: tuple[Pair, ...]
    through: tuple[str, ...] | None  # the nodes of the route if it is not the topology's own
    received: list[int] = field(default_factory=list)  # the receive nodes of its packets, once they exist

    @property
    def name(self) -> str:
        """The name of its nodes."""
        return f"chunk {self.chunk} value {self.value} piece {self.piece}"


class _Writer:
    """Builds the nodes of all ranks, tick by tick; a node depends only on nodes of earlier ticks or before it."""

    def __init__(self, program: Program, topology: Topology, nbytes: int) -> None:
        self.program, self.topology = program, topology
        self.spans = program.spans(nbytes)
        self.links: dict[tuple[int, int, tuple[str, ...] | None], tuple[Pair, ...]] = {}
        self.pieces, self.packets = self._parts()
        self.nodes: list[list[TraceNode]] = [[] for _ in program.devices]
        self.tags: Counter[tuple[int, int]] = Counter()  # the messages so far, by source and destination
        self.ready: dict[tuple[int, int, int], int] = {}  # by chunk, piece and value: the node that completes the value
        self.passed: dict[Pair, tuple[int, ...]] = {}  # for each first link: the nodes of its latest tick to wait for

    def traces(self) -> Traces:
        """Return the traces. A rank without work has one computation, since ASTRA-sim rejects traces without nodes."""
        for tick in range(self.program.round_count + self.pieces - 1):
            self._add_tick(tick)
        for rank, nodes in enumerate(self.nodes):
            if not nodes:
                self._add(rank, COMP_NODE, "nothing to do", ())
        return Traces(tuple(map(tuple, self.nodes)), self.pieces, self.packets)

    def _parts(self) -> tuple[int, int]:
        """Return the pieces per chunk and the packets per piece; fewer than planned if there were too many nodes."""
        routes = [len(self._links(one.src, one.dst, one.through)) for sent in self.program.transfers for one in sent]
        direct, routed = routes.count(1), len(routes) - routes.count(1)
        combinations = sum(len(made.operands) > 1 for chunk in self.program.chunks for made in chunk.instructions)
        pieces = self.program.pieces
        packets = max(LEAST_PACKETS, -(-PACKETS // pieces)) if routed else 1
        while pieces * (2 * (direct + routed * packets) + combinations + routed) > MOST_NODES:
            if packets > LEAST_PACKETS or 1 == pieces < packets:
                packets -= packets // 2
            elif pieces > 1:
                pieces -= pieces // 2
            else:
                break
        return pieces, packets

    def _links(self, src: int, dst: int, through: tuple[str, ...] | None) -> tuple[Pair, ...]:
        key = src, dst, through
        if key not in self.links:
            self.links[key] = route_links(self.topology, self.program.devices[src], self.program.devices[dst], through)
        return self.links[key]

    def _add_tick(self, tick: int) -> None:
        """Add the messages of a tick, packet by packet in turn, and then its computations."""
        found = list(self._messages(tick))
        messages = sorted(
            (message for _, _, messages in found for message in messages),
            key=lambda message: (message.dst - message.src) % len(self.nodes),
        )
        together: defaultdict[Pair, list[_Message]] = defaultdict(list)
        for message in messages:
            together[message.links[0]].append(message)
        starts = {link: self._start(link, leaving) for link, leaving in together.items()}
        sent: defaultdict[Pair, list[tuple[int, int]]] = defaultdict(list)  # packets, with the number of their message
        for number in range(max((len(message.packets) for message in messages), default=0)):
            for k, message in enumerate(messages):
                if number < len(message.packets):
                    link = message.links[0]
                    sent[link].append((k, self._add_packet(message, number, starts[link])))
        for link, packets in sent.items():
            behind = len(messages[packets[-1][0]].links) - 1  # the packets on the further links of the route
            self.passed[link] = tuple(dict(packets[: max(1, len(packets) - behind)]).values())
        for (chunk, piece, value), made, inputs in found:
            self._add_value((chunk, piece, value), made, inputs)

    def _messages(self, tick: int) -> Iterator[tuple[tuple[int, int, int], Instruction, list[_Message]]]:
        """Yield the (chunk, piece, value) that are made in a tick, each with the messages of its operands."""
        for r in reversed(range(max(0, tick - self.pieces + 1), min(tick + 1, self.program.round_count))):
            piece, transfers = tick - r, iter(self.program.transfers[r])
            for chunk, value, made in self.program.by_round[r]:
                start, stop = self.spans[chunk]
                size = (stop - start) * (piece + 1) // self.pieces - (stop - start) * piece // self.pieces
                messages = []
                for operand in made.operands:
                    if self.program.chunks[chunk].devices[operand] == made.device:
                        continue
                    transfer = next(transfers)
                    links = self._links(transfer.src, transfer.dst, transfer.through)
                    count = 1 if len(links) == 1 else min(size, self.packets)
                    sizes = tuple([size * (k + 1) // count - size * k // count for k in range(count)])
                    route = transfer.through
                    if route is not None and links == self._links(transfer.src, transfer.dst, None):
                        route = None
                    ends = transfer.src, transfer.dst
                    messages.append(_Message(chunk, operand, piece, *ends, sizes, links, route))
                if size:
                    yield (chunk, piece, value), made, messages

    def _start(self, link: Pair, messages: list[_Message]) -> tuple[int, ...]:
        """Return the nodes that a tick's messages over a link wait for."""
        values = [self.ready.get((message.chunk, message.piece, message.value)) for message in messages]
        return (*dict.fromkeys(node for node in values if node is not None), *self.passed.get(link, ()))

    def _add_packet(self, message: _Message, number: int, deps: tuple[int, ...]) -> int:
        """Add the nodes of a packet, and return that of its source."""
        src, dst, size = message.src, message.dst, message.packets[number]
        tag = self.tags[src, dst]
        self.tags[src, dst] += 1
        facts = {"src": src, "dst": dst, "size": size, "tag": tag}
        sent = self._add(src, COMM_SEND_NODE, f"send {message.name} to {dst}", deps, through=message.through, **facts)
        message.received.append(self._add(dst, COMM_RECV_NODE, f"receive {message.name} from {src}", (), **facts))
        return sent

    def _add_value(self, key: tuple[int, int, int], made: Instruction, messages: list[_Message]) -> None:
        """Record the node that completes a value, and add a computation if several nodes do."""
        chunk, piece, value = key
        devices = self.program.chunks[chunk].devices
        own = [(chunk, piece, operand) for operand in made.operands if devices[operand] == made.device]
        needed = [self.ready[operand] for operand in own if operand in self.ready]  # an input is there at the start
        needed += [node for message in messages for node in message.received]
        if len(made.operands) == 1 and len(needed) == 1:
            self.ready[key] = needed[0]
            return
        verb = "combine" if len(made.operands) > 1 else "join"
        name = f"{verb} chunk {chunk} value {value} piece {piece}"
        self.ready[key] = self._add(made.device, COMP_NODE, name, tuple(needed))

    def _add(self, rank: int, kind: int, name: str, deps: tuple[int, ...], **facts: Any) -> int:
        number = len(self.nodes[rank])
        self.nodes[rank].append(TraceNode(number, kind, name, deps, **facts))
        return number
