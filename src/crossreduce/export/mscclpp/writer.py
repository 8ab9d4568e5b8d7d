"""Write a schedule as an MSCCL++ execution plan, JSON that its executor runs on NVIDIA and AMD GPUs.

Input: a ``Schedule``. Output: the text of the plan.

The plan uses six operations over memory channels: ``put`` writes a block into another GPU's memory, ``signal`` and
``wait`` synchronise two GPUs, ``re`` adds local blocks in the listed order, ``copy`` copies one, and ``nop``
synchronises the threads of a threadblock. (``get`` and ``rre``, which read other GPUs, would make plans shorter. But
``rre`` always begins with the GPU's own block, and the executor's handleGet swaps the offsets of the two GPUs.)

Chunks are independent of each other, so each threadblock has its own chunks, the same ones on every GPU, and never
waits for another threadblock of its GPU. Operands of a combination are put into separate scratch memory. A copy is
put into the memory where its value stays, once the owner of that memory has signalled that it no longer needs the old
content. Nothing is put before the receiver has signalled that it has begun, since its memory may still belong to an
earlier call.

Events are made in one order, in which each signal precedes the waits for it. So no threadblocks wait for each other
in a cycle, provided that all of them run at the same time. Within a round and block, the order is: puts of
operands, then copies, then combinations. A copy is put into scratch memory if the value that it replaces is still to
be read, as when two devices swap their values.

Source: github.com/microsoft/mscclpp, src/core/executor/execution_plan.cc and src/core/include/execution_kernel.hpp
(the format and its meaning), execution_common.hpp (limits), python/mscclpp/language (examples of plans).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from ...errors import ArgumentError, PlanError, shown
from ...lowering import Instruction
from ...schedule import Schedule
from ..collective import Collective, Location, collective, require_integers
from ..placement import MemoryPlacement

MOST_OPERATIONS: Final = 64  # MSCCL++'s MAX_OPERATION of a threadblock
MOST_CHANNELS: Final = 16  # MSCCL++'s MAX_CHANNEL of a threadblock; also the limit of its remote buffers
MOST_AT_ONCE: Final = 8  # MSCCL++'s MAX_CHANNEL_PER_OPERATION
MOST_ADDED: Final = 10  # MAX_LOCAL_BUFFER_PER_OPERATION + MAX_CHANNEL_PER_OPERATION: inputs of a ``re``
MOST_THREADBLOCKS: Final = 80  # each waits for some of other GPUs: all must be resident; V100 has 80 multiprocessors
ALIGNMENT: Final = 16  # bytes; the executor requires each unit's size to be a multiple of it


def to_mscclpp_json(
    schedule: Schedule,
    *,
    name: str | None = None,
    inplace: bool = True,
    threadblocks: int | None = None,
    threads: int = 1024,
    min_bytes: int = 0,
    max_bytes: int = 2**64 - 1,
) -> str:
    """Return a schedule as an MSCCL++ execution plan.

    Rank k is the schedule's k-th device. The buffer is divided into equal units, as small as the shares need; the
    size of each in bytes must be a multiple of 16. The executor adds, so plans are for sums. The plan does not store
    ``pieces``.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices, each of which must
        have access to the memory of the others.
      name: the executor distinguishes plans by it; ``None``: made of the collective, algorithm and number of ranks.
      inplace: whether the plan is for calls whose input and output are the same memory, or for other calls.
      threadblocks: at most this number per GPU, over which the chunks are spread; ``None``: at most 80.
      threads: the number of threads per threadblock.
      min_bytes: the smallest message that the plan is for.
      max_bytes: the largest.
    Raises:
      PlanError: the schedule is not such a collective, or a threadblock needs more operations or peers than the
        executor allows.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: another argument is invalid.

    >>> from crossreduce.planning import direct
    >>> plan = json.loads(to_mscclpp_json(direct(["cuda:0", "cuda:1"])))
    >>> [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
    ['signal', 'wait', 'nop', 're', 'wait', 'nop', 'put', 'nop', 'signal']
    """
    require_integers(threadblocks=threadblocks, threads=threads, min_bytes=min_bytes, max_bytes=max_bytes)
    if threadblocks is not None and not 1 <= threadblocks <= MOST_THREADBLOCKS:
        problem = f"threadblocks, the number per GPU, must be 1 to {MOST_THREADBLOCKS}."
        raise ArgumentError.of(problem, shown(threadblocks), f"threadblocks={MOST_THREADBLOCKS}")
    if threads not in range(32, 1025, 32):
        raise ArgumentError.of("threads must be one of 32, 64, ... 1024.", shown(threads), "threads=1024")
    if not 0 <= min_bytes <= max_bytes < 2**64:
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError.of("sizes must satisfy 0 <= min_bytes <= max_bytes < 2**64.", given)
    made = collective(schedule)
    count = min(len(made.blocks), threadblocks or MOST_THREADBLOCKS)
    numbers = range(len(made.blocks))
    groups = [
        _BlockEvents(made, [b for b in numbers if b * count // len(numbers) == k], inplace=inplace)
        for k in range(count)
    ]
    plan = {
        "name": f"{made.kind}_{schedule.algorithm}_{made.ranks}" if name is None else name,
        "collective": made.kind,
        "protocol": "Simple",
        "inplace": inplace,
        "reuse_resources": False,
        "gpus": _gpus(schedule, made, groups),
        "num_threads_per_block": threads,
        "use_double_scratch_buffer": False,
        "buffer_alignment": ALIGNMENT,
        "min_message_size": min_bytes,
        "max_message_size": max_bytes,
    }
    return json.dumps(plan, indent=1)


Pair = tuple[int, int]  # the rank that puts, and the rank that it puts to
Extent = tuple[str, int, int]  # a part of a buffer: the buffer, its first unit and the number of units


@dataclass
class _Event:
    """One action of a threadblock of a rank."""

    kind: str  # "put", "signal", "wait", "re", "copy" or, before all others, "begin"
    time: int  # an event depends only on events of earlier times, and on those of its time that were created before it
    pair: Pair = (-1, -1)  # the pair of this put, or of the put that this signal or wait belongs to
    data: bool = True  # for a signal or wait: True: it reports the data of a put; False: it permits the put
    since: int = -1  # for a wait: the time of the event whose end is signalled
    srcs: tuple[Extent, ...] = ()  # the memory that it reads
    dst: Extent = ("", 0, 0)  # the memory that it writes
    signals: list[_Event] = field(default_factory=list)  # the signals that follow it

    @property
    def ends(self) -> Pair:
        """Of a signal or wait: the rank that signals, and the rank that waits."""
        return self.pair if self.data else self.pair[::-1]


class _BlockEvents:
    """The events of one threadblock of each GPU, which run all instructions of some blocks."""

    def __init__(self, made: Collective, blocks: list[int], *, inplace: bool) -> None:
        self.made = made
        self.placement = MemoryPlacement(made, blocks, inplace=inplace)
        self.time = 0
        self.events = [[_Event("begin", 0)] for _ in range(made.ranks)]
        # Positions in ``events``. ``touched``, by rank and block: the rank's last event that uses the block's memory.
        # ``cleared``, by sender and receiver: the last event of the receiver that it has signalled to the sender.
        self.touched: dict[tuple[int, int], int] = {}
        self.cleared: dict[Pair, int] = {}
        for b in blocks:
            chunk = made.program.chunks[made.blocks[b].chunk]
            numbered = enumerate(chunk.instructions, start=len(chunk.sources))
            for _, together in groupby(numbered, key=lambda entry: entry[1].round):
                self._add_round(b, list(together), chunk.devices)
            self.time += 1
            for rank, result in zip(chunk.destinations, chunk.results, strict=True):
                src, dst = self.placement.locations[b, result], made.output(rank, made.blocks[b])
                if self.placement.memory(rank, src) != self.placement.memory(rank, dst):
                    self._local(rank, b, "copy", [src], dst)

    def _add_round(self, b: int, instructions: list[tuple[int, Instruction]], devices: tuple[int, ...]) -> None:
        """Add a round's instructions of one block: puts of operands, then copies, then combinations."""
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
        for value, (device, (operand,), *_) in copies:
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
            self._add(device, b, inputs, aside, self.placement.store(device, b, value))

    def _add(self, rank: int, b: int, inputs: list[Location], aside: Location, target: Location) -> None:
        """Add the inputs in the listed order by as few operations as possible; partial sums are stored in ``aside``."""
        while len(inputs) > MOST_ADDED:
            self._local(rank, b, "re", inputs[:MOST_ADDED], aside)
            inputs = [aside, *inputs[MOST_ADDED:]]
        self._local(rank, b, "re", inputs, target)

    def _local(self, rank: int, b: int, kind: str, srcs: Iterable[Location], dst: Location) -> None:
        extents = tuple(self._extent(rank, b, src) for src in srcs)
        self._event(rank, kind, srcs=extents, dst=self._extent(rank, b, dst))
        self.touched[rank, b] = len(self.events[rank]) - 1

    def _put(self, b: int, value: int, pair: Pair, target: Location, *, fresh: bool) -> None:
        """Put a value into memory of another rank, once that rank has signalled that the memory may be written."""
        src, dst = pair
        needed = 0 if fresh else self.touched.get((dst, b), 0)
        if self.cleared.get(pair, -1) < needed:
            last = self.events[dst][needed]
            last.signals.append(_Event("signal", last.time, pair, data=False))
            self.cleared[pair] = needed
            self._event(src, "wait", pair=pair, data=False, since=last.time)
        own = self._extent(src, b, self.placement.locations[b, value])
        signals = [_Event("signal", self.time, pair)]
        self._event(src, "put", pair=pair, srcs=(own,), dst=self._extent(dst, b, target), signals=signals)
        self.touched[src, b] = len(self.events[src]) - 1
        self.placement.read(b, value)

    def _event(self, rank: int, kind: str, **facts: Any) -> None:
        self.events[rank].append(_Event(kind, self.time, **facts))

    def _extent(self, rank: int, b: int, location: Location) -> Extent:
        """Return the extent of a location; in place, the smaller of input and output is a part of the larger."""
        return (*self.placement.memory(rank, location), self.made.blocks[b].size)

    def order(self, rank: int) -> list[_Event]:
        """Return a rank's events and signals in the order of the plan.

        So that events of one kind are adjacent and become one operation, waits move ahead of puts and signals whose
        time is later than that of the awaited event, and puts move ahead of signals.
        """
        ordered: list[_Event] = []
        for event in self.events[rank]:
            at = len(ordered)
            passes = {"wait": ("put", "signal"), "put": ("signal",)}.get(event.kind, ())
            while at and ordered[at - 1].kind in passes and ordered[at - 1].time > event.since:
                at -= 1
            if event.kind != "begin":
                ordered.insert(at, event)
            ordered += event.signals
        return ordered


def _channels(orders: list[list[_Event]]) -> dict[Pair, int]:
    """Return for each pair of ranks which of the channels between the two its puts use, 0 or 1.

    A channel counts the signals of each direction. Puts in both directions share channel 0 if, in each direction, the
    waits are in the order of the signals that they wait for; otherwise each direction has its own channel.
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


@dataclass
class _GpuPlan:
    """One rank's part of the plan, to which threadblocks are added."""

    rank: int
    scratch: int = 0  # the size of the scratch buffer, in units
    peers: list[int] = field(default_factory=list)  # the other rank of each of its channels
    buffers: list[tuple[int, str]] = field(default_factory=list)  # (rank, buffer) of other ranks that it accesses
    threadblocks: list[_ThreadblockPlan] = field(default_factory=list)


class _ThreadblockPlan:
    """The operations of one threadblock; adjacent puts, signals or waits become one operation if the format allows."""

    def __init__(self, gpu: _GpuPlan, events: list[_Event], channels: dict[Pair, int], bases: list[int]) -> None:
        self.gpu, self.number, self.bases = gpu, channels, bases
        self.ops: list[dict[str, Any]] = []
        self.channels: list[int] = []
        self.buffers: list[int] = []
        self.open: list[_Event] = []  # events of one kind that become one operation
        self.unread = False  # a wait has ended since the threads were synchronised
        self.dirty = ""  # the kind of the last operation on data since the threads were synchronised
        for event in events:
            if self.open and not self._joins(event):
                self._flush()
            self.open.append(event)
        if events:
            self._flush()

    def _joins(self, event: _Event) -> bool:
        first = self.open[0]
        if event.kind != first.kind or event.kind in ("re", "copy") or len(self.open) == MOST_AT_ONCE:
            return False
        if event.kind == "put":
            return event.srcs[0][0] == first.srcs[0][0]
        return self.number[event.pair] not in [self.number[other.pair] for other in self.open]

    def _flush(self) -> None:
        """Write the open events as one operation."""
        events, self.open = self.open, []
        kind = events[0].kind
        if kind in ("signal", "wait"):
            if kind == "signal" and self.dirty:
                self._sync_threads()
            ids = [_index(self.channels, self.number[event.pair]) for event in events]
            self.ops.append({"name": kind, "channel_ids": ids, "channel_type": "memory"})
            self.unread = self.unread or kind == "wait"
            return
        if self.unread or (self.dirty and (kind, self.dirty) != ("put", "put")):
            self._sync_threads()
        self.dirty = kind
        srcs = [self._local(self.gpu.rank, src) for event in events for src in event.srcs]
        dsts = [
            self._remote(event.pair[1], event.dst) if kind == "put" else self._local(self.gpu.rank, event.dst)
            for event in events
        ]
        extra = {"put": {"channel_type": "memory"}, "re": {"reduce_op": "sum"}}.get(kind, {})
        self.ops.append({"name": kind, "src_buff": srcs, "dst_buff": dsts, **extra})

    def _sync_threads(self) -> None:
        self.ops.append({"name": "nop"})
        self.unread, self.dirty = False, ""

    def _local(self, rank: int, extent: Extent) -> dict[str, Any]:
        buffer, index, size = extent
        return {"type": buffer, "index": index + (self.bases[rank] if buffer == "s" else 0), "size": size}

    def _remote(self, rank: int, extent: Extent) -> dict[str, Any]:
        found = self._local(rank, extent)
        known = _index(self.gpu.buffers, (rank, found.pop("type")))
        return {"buffer_id": _index(self.buffers, known), **found}

    def content(self, number: int) -> dict[str, Any]:
        """Return the threadblock in the plan's form."""
        used = {"channel_type": "memory", "channel_ids": self.channels}
        buffers = {"access_channel_type": "memory", "remote_buffer_ids": self.buffers}
        return {
            "id": number,
            "ops": self.ops,
            "channels": [used] if self.channels else [],
            "remote_buffer_refs": [buffers] if self.buffers else [],
        }


def _index(known: list[Any], value: Any) -> int:
    """Return a value's position in a list; a new value is added to the list."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _gpus(schedule: Schedule, made: Collective, groups: list[_BlockEvents]) -> list[dict[str, Any]]:
    gpus = [_GpuPlan(rank) for rank in range(made.ranks)]
    for group in groups:
        orders = [group.order(rank) for rank in range(made.ranks)]
        numbers: list[dict[Pair, int]] = [{} for _ in gpus]  # for each GPU: the channel of each pair's puts
        shared: dict[tuple[int, int, int], list[int]] = {}
        for (src, dst), which in _channels(orders).items():
            key = min(src, dst), max(src, dst), which
            if key not in shared:
                shared[key] = [len(gpus[rank].peers) for rank in key[:2]]
                gpus[key[0]].peers.append(key[1])
                gpus[key[1]].peers.append(key[0])
            for rank, number in zip(key, shared[key], strict=False):
                numbers[rank][src, dst] = number
        bases = [gpu.scratch for gpu in gpus]
        for gpu in gpus:
            block = _ThreadblockPlan(gpu, orders[gpu.rank], numbers[gpu.rank], bases)
            gpu.threadblocks += [block] if block.ops else []
            gpu.scratch += group.placement.scratch[gpu.rank]
            for what, used, most in (
                ("operations", block.ops, MOST_OPERATIONS),
                ("channels", block.channels, MOST_CHANNELS),
                ("remote buffers", block.buffers, MOST_CHANNELS),
            ):
                if len(used) > most:
                    needed = f"{schedule.devices[gpu.rank]} needs {len(used)}"
                    problem = f"MSCCL++ allows {most} {what} per threadblock, but {needed}."
                    remedy = "fewer packs or trees, a larger threadblocks=, another algorithm, fewer devices"
                    raise PlanError.of(problem, schedule.head, remedy)
    return [
        {
            "id": gpu.rank,
            "input_chunks": made.inputs,
            "output_chunks": made.outputs,
            "scratch_chunks": gpu.scratch,
            "threadblocks": [block.content(number) for number, block in enumerate(gpu.threadblocks)],
            "channels": [{"channel_type": "memory", "connected_to": gpu.peers}] if gpu.peers else [],
            "remote_buffers": [
                {"rank": rank, "type": buffer, "access_channel_types": ["memory"]} for rank, buffer in gpu.buffers
            ],
            "semaphores": [],
        }
        for gpu in gpus
    ]
