"""Threadblocks that each run all instructions of some blocks, the same blocks on every GPU.

Input: a collective. Output: threadblocks in ``GpuPlan``s. This suits schedules of one piece, and any order of steps.

Blocks are independent of each other, so a threadblock never waits for another threadblock of its GPU. Operands of a
combination are put into separate scratch memory. A copy is put into the memory where it stays, once the owner of that
memory has signalled that the old content is no longer needed. A sender puts nothing before the receiver has signalled
that its call has begun, since the memory may still belong to an earlier call.

Events are created in one order, in which each signal precedes the waits for it. So no threadblocks wait for each other
in a cycle, provided that all of them run at the same time. Within a round and block, puts of operands come first, then
copies, then combinations. A copy is put into scratch memory if the value that it would overwrite still has to be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from .....lowering import Instruction
from ...collective import Collective, Location
from ...register_allocation import MemoryPlacement
from ..limits import MOST_AT_ONCE, MOST_BUFFERS
from .connections import Extent, GpuPlan, Hosts, LocalEnd, Target, ThreadblockPlan, connect

Pair = tuple[int, int]  # the rank that puts, and the rank that it puts to


@dataclass
class _Event:
    """One action of a threadblock of a rank."""

    kind: str  # "put", "signal", "wait", "re", "copy" or, before all others, "begin"
    time: int  # an event depends only on events of earlier times, and on those of its time that were created before it
    pair: Pair = (-1, -1)  # the pair of this put, or of the put that this signal or wait belongs to
    data: bool = True  # for a signal or wait: True if it reports the arrival of a put, False if it permits a put
    last: bool = False  # for a signal: whether it comes after all other work of the rank
    since: int = -1  # for a wait: the time of the event after which the other rank signals
    srcs: tuple[Extent, ...] = ()  # the memory that it reads
    dst: Extent = ("", 0, 0)  # the memory that it writes
    signals: list[_Event] = field(default_factory=list)  # the signals that follow it

    @property
    def ends(self) -> Pair:
        """For a signal or wait, the rank that signals and the rank that waits."""
        return self.pair if self.data else self.pair[::-1]


class _BlockEvents:
    """The events of one threadblock on each GPU. Together these threadblocks run all instructions of some blocks."""

    def __init__(self, collective: Collective, blocks: list[int], hosts: Hosts, *, inplace: bool) -> None:
        self.collective = collective
        self.placement, self.hosts = MemoryPlacement(collective, blocks, inplace=inplace), hosts
        self.time = 0
        self.events = [[_Event("begin", 0)] for _ in range(collective.ranks)]
        # The values of both are positions in the ``events`` of the rank or the receiver.
        self.touched: dict[tuple[int, int], int] = {}  # by rank and block: the last event that uses the block's memory
        self.cleared: dict[Pair, int] = {}  # by sender and receiver: the event after which the receiver last signalled
        for b in blocks:
            chunk = collective.program.chunks[collective.blocks[b].chunk]
            numbered = enumerate(chunk.instructions, start=len(chunk.sources))
            for _, together in groupby(numbered, key=lambda entry: entry[1].round):
                self._add_round(b, list(together), chunk.devices)
        self._acknowledge(hosts)
        for b in blocks:
            chunk = collective.program.chunks[collective.blocks[b].chunk]
            self.time += 1
            for rank, result in zip(chunk.destinations, chunk.results, strict=True):
                src, dst = self.placement.locations[b, result], collective.output(rank, collective.blocks[b])
                if self.placement.memory(rank, src) != self.placement.memory(rank, dst):
                    self._local(rank, b, "copy", [src], dst)

    def _acknowledge(self, hosts: Hosts) -> None:
        """Let ranks wait at the end until other hosts have received their data, since port channels read it later.

        The operation ``flush`` would wait for a channel, but in MSCCL++ it does nothing.
        """
        self.time += 1
        pairs = {event.pair: None for events in self.events for event in events if event.kind == "put"}
        far = [pair for pair in pairs if hosts.kind(*pair) == "port"]
        for pair in far:
            self.events[pair[1]][-1].signals.append(_Event("signal", self.time, pair, data=False, last=True))
        for pair in far:
            self._event(pair[0], "wait", pair=pair, data=False, since=self.time)

    def _add_round(self, b: int, instructions: list[tuple[int, Instruction]], devices: tuple[int, ...]) -> None:
        """Add the events of a block's instructions in a round: puts of operands, then copies, then combinations."""
        copies = [entry for entry in instructions if len(entry[1].operands) == 1]
        combinations = [entry for entry in instructions if len(entry[1].operands) > 1]
        landed: dict[tuple[int, int], Location] = {}  # where an operand arrived, by operand and device
        self.time += 1
        since = self.time
        for _, (device, operands, *_) in combinations:
            for operand in operands:
                if devices[operand] != device:
                    landed[operand, device] = self.placement.fresh(device, b)
                    self._put(b, operand, (devices[operand], device), landed[operand, device], fresh=True)
        self.time += 1
        ranks = self.collective.ranks
        # Each rank sends to the next rank first, so that not all ranks send to the same one at the same time.
        for value, (device, (operand,), *_) in sorted(
            copies, key=lambda entry: (entry[1].device - devices[entry[1].operands[0]]) % ranks
        ):
            target = self.placement.store(device, b, value)
            self._put(b, operand, (devices[operand], device), target, fresh=False)
        for _, (device, (operand,), *_) in copies:
            self._event(device, "wait", pair=(devices[operand], device), since=self.time)
        self.time += 1
        for value, (device, operands, *_) in combinations:
            for operand in operands:
                if devices[operand] == device:
                    self.placement.read(b, operand)
                else:
                    self._event(device, "wait", pair=(devices[operand], device), since=since)
            inputs = [landed.get((operand, device), self.placement.locations[b, operand]) for operand in operands]
            aside = next(landed[operand, device] for operand in operands if devices[operand] != device)
            self._sum(device, b, inputs, aside, self.placement.store(device, b, value))

    def _sum(self, rank: int, b: int, inputs: list[Location], aside: Location, target: Location) -> None:
        """Sum the inputs in the listed order with as few operations as possible. ``aside`` stores partial sums."""
        while len(inputs) > MOST_BUFFERS:
            self._local(rank, b, "re", inputs[:MOST_BUFFERS], aside)
            inputs = [aside, *inputs[MOST_BUFFERS:]]
        self._local(rank, b, "re", inputs, target)

    def _local(self, rank: int, b: int, kind: str, srcs: Iterable[Location], dst: Location) -> None:
        """Add an event that only uses memory of the rank."""
        extents = tuple(self._extent(rank, b, src) for src in srcs)
        self._event(rank, kind, srcs=extents, dst=self._extent(rank, b, dst))
        self.touched[rank, b] = len(self.events[rank]) - 1

    def _put(self, b: int, value: int, pair: Pair, target: Location, *, fresh: bool) -> None:
        """Put a value into memory of another rank, once that rank has signalled that the memory may be written."""
        src, dst = pair
        # The receiver's event after which the memory is free. Fresh memory is free when the receiver's call begins.
        needed = 0 if fresh else self.touched.get((dst, b), 0)
        if self.cleared.get(pair, -1) < needed:
            last = self.events[dst][needed]
            last.signals.append(_Event("signal", last.time, pair, data=False))
            self.cleared[pair] = needed
            self._event(src, "wait", pair=pair, data=False, since=last.time)
        memory = self._extent(src, b, self.placement.locations[b, value])
        signals = [_Event("signal", self.time, pair)]
        self._event(src, "put", pair=pair, srcs=(memory,), dst=self._extent(dst, b, target), signals=signals)
        self.touched[src, b] = len(self.events[src]) - 1
        if self.hosts.kind(*pair) != "port":  # for a port channel, which reads later, it keeps its memory
            self.placement.read(b, value)

    def _event(self, rank: int, kind: str, **fields: Any) -> None:
        self.events[rank].append(_Event(kind, self.time, **fields))

    def _extent(self, rank: int, b: int, location: Location) -> Extent:
        """Return the extent of a block at a location. Memory that input and output share has one name."""
        return (*self.placement.memory(rank, location), self.collective.blocks[b].size)

    def order(self, rank: int) -> list[_Event]:
        """Return a rank's events and signals in the order of the plan.

        Adjacent events of one kind become one operation. To bring them together, a wait is moved before those puts and
        signals that are later than the event it waits for, and a put is moved before signals.
        """
        ordered: list[_Event] = []
        for event in self.events[rank]:
            position = len(ordered)
            passes = {"wait": ("put", "signal"), "put": ("signal",)}.get(event.kind, ())
            while position and ordered[position - 1].kind in passes and ordered[position - 1].time > event.since:
                position -= 1
            if event.kind != "begin":
                ordered.insert(position, event)
            ordered += event.signals
        return ordered


def _channels(orders: list[list[_Event]]) -> dict[Pair, int]:
    """Return for each (sender, receiver) which of up to two channels between these ranks its puts use: 0 or 1.

    A channel counts the signals in each direction. Puts in both directions share channel 0 if, in each direction, the
    waits have the same order as the signals that they wait for. Otherwise each direction has a separate channel.
    """
    pairs = {event.pair for events in orders for event in events if event.kind == "put"}
    separate = set()
    for ends in {event.ends for events in orders for event in events if event.kind == "signal"}:
        signals, waits = (
            [(event.pair, event.data) for event in orders[rank] if event.kind == kind and event.ends == ends]
            for rank, kind in zip(ends, ("signal", "wait"), strict=True)
        )
        if signals != waits:
            separate.add(frozenset(ends))
    return {pair: int(pair[0] > pair[1] and frozenset(pair) in separate) for pair in sorted(pairs)}


class _BlockWriter:
    """Writes the events of one threadblock. Adjacent puts, signals or waits become one operation if possible."""

    def __init__(
        self, gpu: GpuPlan, events: list[_Event], ends: dict[Pair, LocalEnd], bases: list[int], *, inplace: bool
    ) -> None:
        self.block, self.gpu, self.ends, self.bases, self.inplace = ThreadblockPlan(gpu), gpu, ends, bases, inplace
        self.posts = any(event.kind == "put" and ends[event.pair].kind == "port" for event in events)
        self.open: list[_Event] = []  # events of one kind that become one operation
        for event in events:
            if self.open and not self._joins(event):
                self._flush()
            self.open.append(event)
        if events:
            self._flush()

    def _joins(self, event: _Event) -> bool:
        """Return whether an event can become a part of the operation of the open events."""
        first = self.open[0]
        is_alike = (event.kind, event.last) == (first.kind, first.last) and event.kind not in ("re", "copy")
        if not is_alike or len(self.open) == MOST_AT_ONCE:
            return False
        if event.kind == "put":
            same_kind = self.ends[event.pair].kind == self.ends[first.pair].kind
            return same_kind and event.srcs[0][0] == first.srcs[0][0]
        return self.ends[event.pair] not in [self.ends[other.pair] for other in self.open]

    def _flush(self) -> None:
        """Write the open events as one operation."""
        events, self.open = self.open, []
        kind, first = events[0].kind, events[0]
        if kind == "signal":
            if first.last and self.block.unread:
                self.block.sync()
            self.block.signal([self.ends[event.pair] for event in events])
        elif kind == "wait":
            self.block.wait([self.ends[event.pair] for event in events])
        elif kind == "put":
            self._put(events)
        else:
            dst = self._local_extent(first.dst)
            self.block.reduce([self._local_extent(src) for src in first.srcs], dst, dst)

    def _put(self, events: list[_Event]) -> None:
        """Write puts through channels of one kind as one operation."""
        kind = self.ends[events[0].pair].kind  # of the channels of all events: see ``_joins``
        targets = [Target(kind, event.pair[1], self._extent(event.pair[1], event.dst)) for event in events]
        srcs = [self._local_extent(event.srcs[0]) for event in events]
        if kind == "port":
            ends = [self.ends[event.pair] for event in events]
            self.block.put_on_ports(list(zip(srcs, targets, ends, strict=True)))
        elif len(set(srcs)) == 1 < len(srcs) and not self.posts and (self.inplace or srcs[0][0] != "i"):
            self.block.reduce(srcs[:1], srcs[0], srcs[0], targets)  # sends to all targets at the same time
        else:
            self.block.put(list(zip(srcs, targets, strict=True)))

    def _local_extent(self, extent: Extent) -> Extent:
        return self._extent(self.gpu.rank, extent)

    def _extent(self, rank: int, extent: Extent) -> Extent:
        """Return an extent in a rank's scratch buffer as a part of the scratch buffer of all threadblocks."""
        buffer, index, size = extent
        return buffer, index + (self.bases[rank] if buffer == "s" else 0), size


def add_blocks(collective: Collective, gpus: list[GpuPlan], hosts: Hosts, threadblocks: int, *, inplace: bool) -> None:
    """Add threadblocks for all blocks of a collective to ``gpus``, which has an empty plan for each rank.

    ``threadblocks`` is the largest number of threadblocks per GPU. The blocks are spread evenly over them.
    """
    numbers = range(len(collective.blocks))
    count = min(len(numbers), threadblocks)
    for k in range(count):
        group = _BlockEvents(collective, [b for b in numbers if b * count // len(numbers) == k], hosts, inplace=inplace)
        orders = [group.order(rank) for rank in range(collective.ranks)]
        ends: list[dict[Pair, LocalEnd]] = [{} for _ in gpus]  # for each GPU, the channel of the puts of each pair
        shared: dict[tuple[int, int, int], tuple[LocalEnd, LocalEnd]] = {}
        for (src, dst), which in _channels(orders).items():
            low, high = min(src, dst), max(src, dst)
            if (low, high, which) not in shared:
                shared[low, high, which] = connect(gpus, low, high, hosts.kind(low, high))
            ends[low][src, dst], ends[high][src, dst] = shared[low, high, which]
        bases = [gpu.scratch for gpu in gpus]  # where these blocks' scratch memory starts, by rank
        for gpu in gpus:
            block = _BlockWriter(gpu, orders[gpu.rank], ends[gpu.rank], bases, inplace=inplace).block
            gpu.threadblocks += [block] if block.ops else []
            gpu.scratch += group.placement.scratch[gpu.rank]
