"""Write a schedule as an MSCCL++ execution plan, JSON that its executor runs on NVIDIA and AMD GPUs.

In: a ``Schedule``.  Out: the plan's text.

Five operations are used, over memory channels: ``put`` writes a block into another GPU's memory, ``signal`` and
``wait`` say that something has happened, ``re`` adds local blocks in the listed order, ``copy`` moves one; ``nop``
joins a threadblock's threads in between. (``get`` and ``rre`` would do with fewer, but ``rre`` always begins with the
own part, and the executor's handleGet, as read, uses each side's offset for the other.)

Chunks have nothing to do with each other, so each threadblock has chunks of its own, on every GPU the same ones, and
needs no other threadblock of its GPU. What is to be added lands in scratch memory, at a place of its own; what is
only copied lands where it belongs, once its owner has said that it needs the old content no more. Nothing is put
before the receiver has said that it has begun, since its memory may still belong to an earlier call.

One order of all events exists, the schedule's: whatever is waited for was signalled before. So no threadblocks can
wait in a circle, provided that all of them run at the same time.

Source: github.com/microsoft/mscclpp, src/core/executor/execution_plan.cc and src/core/include/execution_kernel.hpp
(what is read and done), execution_common.hpp (limits), python/mscclpp/language (how plans are written).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, PlanError, message, shown
from ..schedule.schedule import Schedule
from .collective import Collective, Place, collective

MOST_OPERATIONS: Final = 64  # MAX_OPERATION of a threadblock
MOST_CHANNELS: Final = 16  # MAX_CHANNEL of a threadblock; also how many remote buffers it has
MOST_AT_ONCE: Final = 8  # MAX_CHANNEL_PER_OPERATION
MOST_ADDED: Final = 10  # MAX_LOCAL_BUFFER_PER_OPERATION + MAX_CHANNEL_PER_OPERATION: inputs of a ``re``
MOST_THREADBLOCKS: Final = 80  # they wait for each other, so all must be resident: V100 has 80 multiprocessors
ALIGNMENT: Final = 16  # bytes; the executor takes sizes that are a multiple of it for each chunk


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

    Rank k is the schedule's k-th device. The buffer is cut into as many equal chunks as the shares need; the executor
    takes sizes that are a multiple of 16 bytes for each, and adds: plans are for sums. ``pieces`` has no place in
    the plan.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices, which must be able
        to write into each other's memory.
      name: the executor keeps plans apart by it; ``None``: made of the collective, algorithm and number of ranks.
      inplace: for calls whose input and output are the same memory, else for other calls.
      threadblocks: over how many threadblocks a GPU's chunks are spread; ``None``: one a chunk, at most 80.
      threads: of a threadblock.
      min_bytes: the smallest message that the plan is for.
      max_bytes: the largest.
    Raises:
      PlanError: the schedule is no such collective, or has more steps or peers a threadblock than the executor takes.
      ScheduleError: the schedule is wrong.
      ArgumentError: another argument is.

    >>> from crossreduce.planning import direct
    >>> plan = json.loads(to_mscclpp_json(direct(["cuda:0", "cuda:1"])))
    >>> [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
    ['signal', 'wait', 'nop', 're', 'wait', 'nop', 'put', 'nop', 'signal']
    """
    if threadblocks is not None and not 1 <= threadblocks <= MOST_THREADBLOCKS:
        remedy = f"1 to {MOST_THREADBLOCKS}"
        raise ArgumentError(message("a GPU has some threadblocks, all at once.", shown(threadblocks), remedy))
    if threads not in range(32, 1025, 32):
        raise ArgumentError(message("a threadblock has 32, 64, ... 1024 threads.", shown(threads), "threads=1024"))
    if not 0 <= min_bytes <= max_bytes < 2**64:
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError(message("the message sizes run from min_bytes to max_bytes.", given))
    made = collective(schedule)
    count = min(len(made.blocks), threadblocks or MOST_THREADBLOCKS)
    groups = [_Group(made, number, count, inplace) for number in range(count)]
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


@dataclass
class _Event:
    """Something that a rank's threadblock does. ``after``: signals that go out as soon as it is over.

    A signal says either that a put is done (``data``) or that a place may be written to (not ``data``).
    """

    kind: str  # "put", "wait", "re", "copy" or, before everything, "begin"
    time: int
    pair: Pair = (-1, -1)
    data: bool = True
    since: int = -1  # of a wait: when what it waits for was signalled
    srcs: tuple[tuple[str, int, int], ...] = ()  # local: buffer, first unit, number of units
    dst: tuple[str, int, int] = ("", 0, 0)
    after: list[tuple[Pair, bool]] = field(default_factory=list)


class _Group:
    """What one threadblock of each GPU does: all steps of its chunks, in the schedule's order."""

    def __init__(self, made: Collective, number: int, count: int, inplace: bool) -> None:
        self.made, self.inplace = made, inplace
        self.time = 0
        self.programs = [[_Event("begin", -1)] for _ in range(made.ranks)]
        self.scratch: list[int] = [0] * made.ranks  # units of scratch memory, from the group's first on
        self.held: dict[Pair, tuple[str, int]] = {}  # where a rank holds a block now, by rank and block
        self.touched: dict[Pair, int] = {}  # a rank's last event that touches its place of a block, by position
        self.cleared: dict[Pair, int] = {}  # up to which of the receiver's events the sender knows
        self.spares: dict[Pair, tuple[str, int]] = {}
        mine = [b for b in range(len(made.blocks)) if b * count // len(made.blocks) == number]
        for b in mine:
            for rank in range(made.ranks):
                own = made.input(rank, made.blocks[b])
                if own is not None:
                    self.held[rank, b] = self._named(rank, own)
            for chunk, dst, srcs in made.steps:
                if chunk == made.blocks[b].chunk:
                    self._step(b, dst, srcs)
            for rank in range(made.ranks):
                result = made.output(rank, made.blocks[b])
                if result is not None and self.held[rank, b] != self._named(rank, result):
                    self._local(rank, b, "copy", (self.held[rank, b],), self._named(rank, result))

    def _named(self, rank: int, place: Place) -> tuple[str, int]:
        """Name a place by the buffer whose address is known to others: in place, the larger of input and output."""
        buffer, offset = place
        if not self.inplace:
            return buffer, offset
        if self.made.kind == "allgather":
            return "o", offset + (rank * self.made.inputs if buffer == "i" else 0)
        return "i", offset + (rank * self.made.outputs if buffer == "o" and self.made.kind == "reducescatter" else 0)

    def _step(self, b: int, dst: int, srcs: tuple[int, ...]) -> None:
        block = self.made.blocks[b]
        result = self.made.output(dst, block)
        place = self._spare(dst, b) if result is None else self._named(dst, result)
        others = [src for src in srcs if src != dst]
        if len(srcs) == 1:
            self._put(b, srcs[0], dst, place, fresh=False)
        else:
            landing = {src: self._scratch(dst, block.size) for src in others}
            for src in others:
                self._put(b, src, dst, landing[src], fresh=True)
        for src in others:
            self._event(dst, "wait", pair=(src, dst), since=self.programs[src][-1].time)
        if len(srcs) > 1:
            inputs = [landing.get(src, self.held.get((dst, b), place)) for src in srcs]
            self._add(dst, b, inputs, place)
        self.held[dst, b] = place

    def _add(self, rank: int, b: int, inputs: list[tuple[str, int]], place: tuple[str, int]) -> None:
        """Add up in the listed order, in as many operations as it takes."""
        while len(inputs) > MOST_ADDED:
            first, inputs = inputs[:MOST_ADDED], inputs[MOST_ADDED:]
            total = next(part for part in first if part[0] == "s")
            self._local(rank, b, "re", tuple(first), total)
            inputs.insert(0, total)
        self._local(rank, b, "re", tuple(inputs), place)

    def _local(self, rank: int, b: int, kind: str, srcs: tuple[tuple[str, int], ...], dst: tuple[str, int]) -> None:
        size = self.made.blocks[b].size
        self._event(rank, kind, srcs=tuple((*src, size) for src in srcs), dst=(*dst, size))
        self.touched[rank, b] = len(self.programs[rank]) - 1

    def _put(self, b: int, src: int, dst: int, place: tuple[str, int], *, fresh: bool) -> None:
        """Put a block into ``place`` of ``dst``, once that rank has said that it may be written to."""
        known = self.cleared.get((src, dst), -1)
        needed = 0 if fresh else self.touched.get((dst, b), 0)
        if known < needed:
            now = self.programs[dst][needed]
            now.after.append(((src, dst), False))
            self.cleared[src, dst] = needed
            self._event(src, "wait", pair=(src, dst), data=False, since=now.time)
        size = self.made.blocks[b].size
        self._event(src, "put", pair=(src, dst), srcs=((*self.held[src, b], size),), dst=(*place, size))
        self.programs[src][-1].after.append(((src, dst), True))
        self.touched[src, b] = len(self.programs[src]) - 1

    def _event(self, rank: int, kind: str, **facts: Any) -> None:
        self.time += 1
        self.programs[rank].append(_Event(kind, self.time, **facts))

    def _scratch(self, rank: int, size: int) -> tuple[str, int]:
        self.scratch[rank] += size
        return "s", self.scratch[rank] - size

    def _spare(self, rank: int, b: int) -> tuple[str, int]:
        if (rank, b) not in self.spares:
            self.spares[rank, b] = self._scratch(rank, self.made.blocks[b].size)
        return self.spares[rank, b]

    def order(self, rank: int) -> list[_Item]:
        """Return a rank's events and signals in the order in which they are written down.

        A wait moves ahead of puts and signals that came after what it waits for, so that waits stand together; puts
        move ahead of signals that stand next to them, so that one ``nop`` serves all.
        """
        items: list[_Item] = []
        for event in self.programs[rank]:
            at = len(items)
            if event.kind == "wait":
                while at and items[at - 1].kind in ("put", "signal") and items[at - 1].time > event.since:
                    at -= 1
            elif event.kind == "put":
                while at and items[at - 1].kind == "signal":
                    at -= 1
            if event.kind != "begin":
                items.insert(at, _Item(event.kind, event.time, event.pair, event.data, event))
            items += [_Item("signal", event.time, pair, data, event) for pair, data in event.after]
        return items


class _Item(NamedTuple):
    """An event, or a signal that goes out after it: what it is about, and when it happens."""

    kind: str
    time: int
    pair: Pair
    data: bool
    event: _Event

    @property
    def way(self) -> Pair:
        """Of a signal or wait: who signals, and who waits."""
        return self.pair if self.data else self.pair[::-1]


def _channels(orders: list[list[_Item]]) -> dict[Pair, int]:
    """Return for each pair of ranks that puts which of the channels between the two is its own, 0 or 1.

    A channel has one counter each way. Puts both ways share one, if every signal then still meets its wait.
    """
    pairs = {item.pair for items in orders for item in items if item.kind == "put"}
    apart = set()
    for way in {item.way for items in orders for item in items if item.kind == "signal"}:
        signals, waits = (
            [(item.pair, item.data) for item in orders[rank] if item.kind == kind and item.way == way]
            for rank, kind in zip(way, ("signal", "wait"), strict=True)
        )
        if signals != waits:
            apart.add(frozenset(way))
    return {pair: int(pair[0] > pair[1] and frozenset(pair) in apart) for pair in sorted(pairs)}


class _Gpu:
    """One rank's part of the plan, to which the groups' threadblocks are added."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.scratch = 0
        self.peers: list[int] = []  # of its channels
        self.buffers: list[tuple[int, str]] = []  # of others: rank and buffer
        self.threadblocks: list[dict[str, Any]] = []

    def add(self, items: list[_Item], channels: dict[Pair, int], bases: list[int]) -> None:
        """Add a threadblock. ``channels`` numbers this GPU's channels; ``bases`` is where scratch memory begins."""
        block = _Threadblock(self, channels, bases)
        for item in items:
            block.add(item)
        block.flush()
        if block.ops:
            self.threadblocks.append(block.content(len(self.threadblocks)))


class _Threadblock:
    """Operations, made of items that stand together."""

    def __init__(self, gpu: _Gpu, channels: dict[Pair, int], bases: list[int]) -> None:
        self.gpu, self.number, self.bases = gpu, channels, bases
        self.ops: list[dict[str, Any]] = []
        self.channels: list[int] = []
        self.buffers: list[int] = []
        self.open: list[_Item] = []  # items of one kind, to become one operation
        self.unread = False  # a wait is over that not all threads know of
        self.dirty = ""  # "put" or another operation on data that not all threads have ended

    def add(self, item: _Item) -> None:
        """Add an item, to those before it if they can be one operation."""
        if self.open and not self._joins(item):
            self.flush()
        self.open.append(item)

    def _joins(self, item: _Item) -> bool:
        first = self.open[0]
        if item.kind != first.kind or item.kind in ("re", "copy") or len(self.open) == MOST_AT_ONCE:
            return False
        if item.kind == "put":
            return item.event.srcs[0][0] == first.event.srcs[0][0]
        return self.number[item.pair] not in [self.number[other.pair] for other in self.open]

    def flush(self) -> None:
        """Write down the items that stand open."""
        items, self.open = self.open, []
        if not items:
            return
        kind = items[0].kind
        if kind in ("signal", "wait"):
            if kind == "signal" and self.dirty:
                self._join_threads()
            ids = [_index(self.channels, self.number[item.pair]) for item in items]
            self.ops.append({"name": kind, "channel_ids": ids, "channel_type": "memory"})
            self.unread = self.unread or kind == "wait"
            return
        if self.unread or (self.dirty and (kind, self.dirty) != ("put", "put")):
            self._join_threads()
        self.dirty = kind
        own = self.gpu.rank
        op = {
            "name": kind,
            "src_buff": [self._local(own, span) for item in items for span in item.event.srcs],
            "dst_buff": [
                self._remote(item.pair[1], item.event.dst) if kind == "put" else self._local(own, item.event.dst)
                for item in items
            ],
        }
        self.ops.append(op | {"put": {"channel_type": "memory"}, "re": {"reduce_op": "sum"}}.get(kind, {}))

    def _join_threads(self) -> None:
        self.ops.append({"name": "nop"})
        self.unread, self.dirty = False, ""

    def _local(self, rank: int, span: tuple[str, int, int]) -> dict[str, Any]:
        buffer, index, size = span
        return {"type": buffer, "index": index + (self.bases[rank] if buffer == "s" else 0), "size": size}

    def _remote(self, rank: int, span: tuple[str, int, int]) -> dict[str, Any]:
        found = self._local(rank, span)
        known = _index(self.gpu.buffers, (rank, found.pop("type")))
        return {"buffer_id": _index(self.buffers, known), **found}

    def content(self, number: int) -> dict[str, Any]:
        """Return the threadblock as the plan has it."""
        used = {"channel_type": "memory", "channel_ids": self.channels}
        buffers = {"access_channel_type": "memory", "remote_buffer_ids": self.buffers}
        return {
            "id": number,
            "ops": self.ops,
            "channels": [used] if self.channels else [],
            "remote_buffer_refs": [buffers] if self.buffers else [],
        }


def _index(known: list[Any], value: Any) -> int:
    """Return a value's position in a list, to which it is added if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _gpus(schedule: Schedule, made: Collective, groups: list[_Group]) -> list[dict[str, Any]]:
    gpus = [_Gpu(rank) for rank in range(made.ranks)]
    for group in groups:
        orders = [group.order(rank) for rank in range(made.ranks)]
        numbers: list[dict[Pair, int]] = [{} for _ in gpus]  # for each GPU: its channels, by who puts to whom
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
            gpu.add(orders[gpu.rank], numbers[gpu.rank], bases)
            gpu.scratch += group.scratch[gpu.rank]
    _check(schedule, gpus)
    return [
        {
            "id": gpu.rank,
            "input_chunks": made.inputs,
            "output_chunks": made.outputs,
            "scratch_chunks": gpu.scratch,
            "threadblocks": gpu.threadblocks,
            "channels": [{"channel_type": "memory", "connected_to": gpu.peers}] if gpu.peers else [],
            "remote_buffers": [
                {"rank": rank, "type": buffer, "access_channel_types": ["memory"]} for rank, buffer in gpu.buffers
            ],
            "semaphores": [],
        }
        for gpu in gpus
    ]


def _check(schedule: Schedule, gpus: list[_Gpu]) -> None:
    for gpu in gpus:
        for block in gpu.threadblocks:
            for what, count, most in (
                ("operations", len(block["ops"]), MOST_OPERATIONS),
                ("channels", sum(len(used["channel_ids"]) for used in block["channels"]), MOST_CHANNELS),
                (
                    "remote buffers",
                    sum(len(r["remote_buffer_ids"]) for r in block["remote_buffer_refs"]),
                    MOST_CHANNELS,
                ),
            ):
                if count > most:
                    problem = f"MSCCL++ has {most} {what} a threadblock, {schedule.devices[gpu.rank]} needs {count}."
                    remedy = "fewer packs or trees, a larger threadblocks=, another algorithm, fewer devices"
                    raise PlanError(message(problem, schedule.head, remedy))
