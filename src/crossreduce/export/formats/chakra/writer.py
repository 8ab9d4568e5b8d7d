"""Write a schedule as Chakra execution traces, one per rank, which ASTRA-sim runs as a custom collective.

Input: a ``Schedule``, its ``Topology`` and the size of the buffer. Output: the nodes of each rank, or the contents of
the files. The trace of a rank follows from its own ``DeviceProgram``, without the programs of the other ranks.

A transfer of a piece becomes one message, or several packets if its route has more than one link: switches in ASTRA-sim
forward whole messages, but switches in ``simulate`` forward bytes as they arrive. A packet is a send node of its source
and a receive node of its destination. A computation combines operands, or joins the packets of a copied piece.

Piece k does round r in tick k + r. All messages of a tick over a link leave together. They wait until the values of all
these messages are complete, and until the link's messages of the previous tick have arrived. The last packets of a
message with several links need not have arrived, since they may still be on later links of the route. So each tick
keeps a link busy for its latency and its bytes, as in ``simulate``. Send nodes express this by dependencies, since
ASTRA-sim starts nodes that wait for nothing in the order of a hash table. Messages take turns packet by packet, so that
they share their link. Rank i sends to rank i + 1 first, so that the ranks do not all send to one rank through a switch.

Both ranks of a message give it the same tag, since both list the messages between them in the same order.

Source: github.com/astra-sim/astra-sim, astra-sim/system/astraccl/custom_collectives/CustomAlgorithm.cc (types of nodes;
names of files; a send is complete when its message has arrived) and astra-sim/network_frontend/analytical/common
(messages match by tag, ends and size; no message is empty); github.com/astra-sim/collectiveapi, chakra_converter
(attributes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ....errors import PlanError
from ....lowering import GeneratedProgram, Program, lower
from ....schedule import Schedule
from ....schedule.costs import Pair
from ....schedule.traffic import NO_COSTS, orbits_of, route_links
from ....topology import Topology, TopologyLike, byte_count, topology_of
from ..ranks import one_rank
from .format import COMM_RECV_NODE, COMM_SEND_NODE, COMP_NODE, TraceNode, encode

MOST_NODES: Final = 100_000
"""The most nodes of all traces together (about 12 MB). Only traces of one piece and one packet may have more."""

PACKETS: Final = 128
"""The least number of packets of a chunk that passes a switch. The switch delays it by 1/128 of its transfer time."""

LEAST_PACKETS: Final = 16
"""The least number of packets of a piece that passes a switch. ``MOST_NODES`` may lower it."""


class Traces(NamedTuple):
    """The nodes of some ranks, and the numbers of pieces and packets."""

    nodes: dict[int, tuple[TraceNode, ...]]  # by rank
    pieces: int  # per chunk
    packets: int  # per piece, of transfers whose routes have several links


def to_chakra(
    schedule: Schedule, topology: TopologyLike, nbytes: int | str, *, rank: int | None = None
) -> dict[str, bytes]:
    """Return the traces of a schedule by file name: ``COLLECTIVE_ALGORITHM.RANK.et``.

    Rank k is the schedule's k-th device. Messages have fixed sizes, so traces are for one size of the buffer. ASTRA-sim
    finds routes itself. If the schedule has another route for a transfer than the topology, the attribute ``through``
    of the send node stores this route.

    Args:
      schedule: any collective in which only devices combine.
      topology: determines the links of each transfer.
      nbytes: bytes of the whole buffer, 0 or more, or text such as "64M".
      rank: the only rank whose trace is made. By default, the traces of all ranks are made.
    Raises:
      PlanError: a switch combines or copies, or the topology has no route for a transfer.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: the number of bytes, the schedule, the topology or the rank is invalid.
      BackendError: protobuf is not installed.

    >>> from crossreduce.planning import ring
    >>> pair = Topology.ring(2, gb_per_s=25)
    >>> sorted(to_chakra(ring(pair.devices), pair, 1 << 20))
    ['all_reduce_ring.0.et', 'all_reduce_ring.1.et']
    """
    nodes_of_ranks, pieces, packets = traces(schedule, topology, nbytes, rank=rank)
    about = {
        "schema": "1.0.2-chakra.0.0.4",
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "nbytes": str(byte_count(nbytes)),
        "pieces": str(pieces),
        "packets": str(packets),
    }
    name = f"{schedule.collective}_{schedule.algorithm}"
    return {
        f"{name}.{each}.et": encode(nodes, {**about, "rank": str(each), "device": schedule.devices[each]})
        for each, nodes in nodes_of_ranks.items()
    }


def traces(schedule: Schedule, topology: TopologyLike, nbytes: int | str, *, rank: int | None = None) -> Traces:
    """Return the nodes of the traces of a schedule; see ``to_chakra``.

    >>> from crossreduce.planning import one_device
    >>> pair = Topology.ring(2)
    >>> for node in traces(one_device(pair.devices), pair, 100).nodes[0]:
    ...     print(node.id, node.name, node.deps)
    0 receive chunk 0 round 0 piece 0 from 1 ()
    1 combine chunk 0 round 0 piece 0 (0,)
    2 send chunk 0 round 1 piece 0 to 1 (1,)
    """
    topology, size = topology_of(topology), byte_count(nbytes)
    program = lower(schedule)
    ranks: Iterable[int] = range(len(program.devices)) if rank is None else [one_rank(rank, program.devices)]
    switches = [name for name in program.devices if name not in topology.devices and name in topology]
    if switches:
        problem = "a rank of a Chakra trace must be a device, but in this schedule switches combine or copy."
        raise PlanError.of(problem, ", ".join(switches), "a machine without in_network")
    division = _TransferDivision(program, topology, size)
    nodes = {each: _RankWriter(division, each).nodes() for each in ranks}
    return Traces(nodes, division.pieces, division.packets)


class _TransferDivision:
    """The numbers of pieces and packets, and the links of each transfer. They are the same for all ranks."""

    def __init__(self, program: Program, topology: Topology, nbytes: int) -> None:
        self.program, self.topology = program, topology
        self.spans = program.spans(nbytes)
        self._links: dict[tuple[int, int, tuple[str, ...] | None], tuple[Pair, ...]] = {}
        self.pieces, self.packets = self._count_pieces()

    def _count_pieces(self) -> tuple[int, int]:
        """Return the pieces per chunk and the packets per piece, lowered if there would be too many nodes."""
        counted, images, whole = self.program, 1, self.program
        if isinstance(whole, GeneratedProgram) and orbits_of(whole.schedule, self.topology, NO_COSTS) is not None:
            counted, images = whole.base, whole.schedule.symmetry.order  # all images of a route have as many links
        lengths = [len(self.links(move.src, move.dst, move.through)) for moves in counted.transfers for move in moves]
        direct, routed = images * lengths.count(1), images * (len(lengths) - lengths.count(1))
        instructions = [instruction for chunk in counted.chunks for instruction in chunk.instructions]
        combinations = images * sum(len(instruction.operands) > 1 for instruction in instructions)
        pieces = self.program.pieces
        packets = max(LEAST_PACKETS, -(-PACKETS // pieces)) if routed else 1
        # A packet has two nodes, and the packets of a routed piece may need a computation that joins them.
        while pieces * (2 * (direct + routed * packets) + combinations + routed) > MOST_NODES:
            if packets > LEAST_PACKETS or (pieces == 1 and packets > 1):
                packets -= packets // 2
            elif pieces > 1:
                pieces -= pieces // 2
            else:
                break
        return pieces, packets

    def links(self, src: int, dst: int, through: tuple[str, ...] | None) -> tuple[Pair, ...]:
        """Return the links of a transfer. If ``through`` is ``None``, it takes the topology's own route."""
        key = src, dst, through
        if key not in self._links:
            names = self.program.devices
            self._links[key] = route_links(self.topology, names[src], names[dst], through)
        return self._links[key]

    def size(self, chunk: int, piece: int) -> int:
        """Return the bytes of a piece of a chunk."""
        start, stop = self.spans[chunk]
        return (stop - start) * (piece + 1) // self.pieces - (stop - start) * piece // self.pieces


@dataclass
class _Message:
    """A transfer of a piece that the rank sends or receives."""

    value: int  # in the numbering of the rank
    piece: int
    src: int
    dst: int
    name: str  # a part of the names of its nodes
    packets: tuple[int, ...]  # the bytes of each
    links: tuple[Pair, ...]
    through: tuple[str, ...] | None  # for a message that is sent: the route, unless it is the topology's own
    received: list[int] = field(default_factory=list)  # the receive nodes of the packets that have been added


class _RankWriter:
    """Builds the nodes of one rank, tick by tick. A node depends only on nodes that were added before it."""

    def __init__(self, division: _TransferDivision, rank: int) -> None:
        self.division, self.rank, self.part = division, rank, division.program.on(rank)
        self.added: list[TraceNode] = []
        self.tags: Counter[tuple[int, int]] = Counter()  # the number of packets so far, by source and destination
        self.ready: dict[tuple[int, int], int] = {}  # by piece and value: the node that completes the value
        # For each link on which messages leave the rank: the send nodes for which its next tick waits.
        self.passed: dict[Pair, tuple[int, ...]] = {}

    def nodes(self) -> tuple[TraceNode, ...]:
        """Return the nodes. A rank without work has one computation, since ASTRA-sim rejects traces without nodes."""
        for tick in range(self.division.program.round_count + self.division.pieces - 1):
            self._add_tick(tick)
        if not self.added:
            self._add(COMP_NODE, "nothing to do", ())
        return tuple(self.added)

    def _add_tick(self, tick: int) -> None:
        """Add the packets of a tick's messages, which take turns, and then the computations of the tick."""
        pieces, rounds = self.division.pieces, self.division.program.round_count
        active_rounds = reversed(range(max(0, tick - pieces + 1), min(tick + 1, rounds)))
        active = [(r, tick - r) for r in active_rounds]  # (round, piece), the first piece first
        ranks = len(self.division.program.devices)
        messages = [message for r, piece in active for message in self._messages(r, piece)]
        messages.sort(key=lambda message: (message.dst - message.src) % ranks)
        leaving: defaultdict[Pair, list[_Message]] = defaultdict(list)
        for message in messages:
            if message.src == self.rank:
                leaving[message.links[0]].append(message)
        dependencies = {link: self._dependencies(link, together) for link, together in leaving.items()}
        sent: defaultdict[Pair, list[tuple[int, int]]] = defaultdict(list)  # (position of the message, packet's node)
        for number in range(max((len(message.packets) for message in messages), default=0)):  # of the packet
            for k, message in enumerate(messages):
                if number < len(message.packets):
                    link = message.links[0]
                    node = self._add_packet(message, number, dependencies.get(link, ()))
                    if message.src == self.rank:
                        sent[link].append((k, node))
                    else:
                        message.received.append(node)
        for link, packets in sent.items():
            last_message = messages[packets[-1][0]]
            behind = len(last_message.links) - 1  # how many packets may still be on later links
            # dict() keeps the last packet of each message.
            self.passed[link] = tuple(dict(packets[: max(1, len(packets) - behind)]).values())
        arrived = {(message.piece, message.value): message for message in messages if message.dst == self.rank}
        for r, piece in active:
            self._add_values(r, piece, arrived)

    def _messages(self, r: int, piece: int) -> Iterator[_Message]:
        """Yield the messages of one piece that the rank sends and receives in a round."""
        division, stage = self.division, self.part.stages[r]
        sends = [(value, self.rank, other) for value, other in stage.sends]
        for value, src, dst in (*sends, *((value, other, self.rank) for value, other in stage.receives)):
            chunk = self.part.values[value].chunk
            size = division.size(chunk, piece)
            if size:
                through = division.program.through(r, chunk, src, dst)
                links = division.links(src, dst, through)
                count = 1 if len(links) == 1 else min(size, division.packets)
                sizes = tuple([size * (k + 1) // count - size * k // count for k in range(count)])
                # Only send nodes store a route, and only another one than the topology's.
                if through is not None and (dst == self.rank or links == division.links(src, dst, None)):
                    through = None
                name = f"chunk {chunk} round {r} piece {piece}"
                yield _Message(value, piece, src, dst, name, sizes, links, through)

    def _dependencies(self, link: Pair, messages: list[_Message]) -> tuple[int, ...]:
        """Return the nodes that must be complete before the messages of a tick leave over a link."""
        values = [self.ready.get((message.piece, message.value)) for message in messages]
        return (*dict.fromkeys(node for node in values if node is not None), *self.passed.get(link, ()))

    def _add_packet(self, message: _Message, number: int, deps: tuple[int, ...]) -> int:
        """Add the node of packet ``number`` of a message, and return the node's id. Only a send has dependencies."""
        src, dst, size = message.src, message.dst, message.packets[number]
        tag = self.tags[src, dst]
        self.tags[src, dst] += 1
        fields = {"src": src, "dst": dst, "size": size, "tag": tag}
        if src == self.rank:
            return self._add(COMM_SEND_NODE, f"send {message.name} to {dst}", deps, through=message.through, **fields)
        return self._add(COMM_RECV_NODE, f"receive {message.name} from {src}", (), **fields)

    def _add_values(self, r: int, piece: int, arrived: dict[tuple[int, int], _Message]) -> None:
        """Record the node that completes each new value of a round, and add the computations that this needs."""
        stage, combined = self.part.stages[r], set[int]()
        for result, operands, _ in stage.combinations:
            combined.update(operands)
            chunk = self.part.values[result].chunk
            if self.division.size(chunk, piece):
                messages = [arrived[piece, value] for value in operands if (piece, value) in arrived]
                # Inputs have no node: they exist at the start.
                needed = [self.ready[piece, value] for value in operands if (piece, value) in self.ready]
                needed += [node for message in messages for node in message.received]
                name = f"combine chunk {chunk} round {r} piece {piece}"
                self.ready[piece, result] = self._add(COMP_NODE, name, tuple(needed))
        for value, _ in stage.receives:
            if value not in combined and (piece, value) in arrived:
                message = arrived[piece, value]
                nodes = tuple(message.received)
                node = nodes[0] if len(nodes) == 1 else self._add(COMP_NODE, f"join {message.name}", nodes)
                self.ready[piece, value] = node

    def _add(self, kind: int, name: str, deps: tuple[int, ...], **fields: Any) -> int:
        self.added.append(TraceNode(len(self.added), kind, name, deps, **fields))
        return len(self.added) - 1
