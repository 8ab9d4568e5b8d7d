"""Write a schedule as MSCCL XML, which msccl-executor-nccl, microsoft/msccl and RCCL run.

Each GPU has, on each channel, one threadblock for each rank that it sends to and one for each rank that it receives
from, so that no receive is queued behind a send. A block, a part of a chunk whose units move together, belongs to one
channel. An instruction of several operands becomes one message from each other device, in the listed order; each is
added as it arrives (``rrc``). If the device's own operand is third or later, the messages before it are added up
first, in other memory.

The order in which operations are added proves that no threadblocks wait for each other in a cycle. Round by round,
chunk by chunk and block by block, all sends are added before the receives, so the values that the previous round left
are sent before new values take their memory, and a connection has at most one message that is not yet received. A
message of one unit needs one of the connection's slots, so each operation can run when all operations before it are
done. A message of more units may need more slots than the connection has, and then its send ends only after its receive
has begun. In a block of more units, values that a round sends therefore keep their memory until the round ends, so that
no receive of a round waits for a send of the same round other than its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from ...errors import ArgumentError, PlanError, shown
from ...lowering import Instruction, Numbered
from ...schedule import Schedule
from ..collective import Collective, Location, collective, require_integers
from ..placement import MemoryPlacement
from .format import LARGEST_COUNT, MOST_CHUNKS, PROTOCOLS, RUNTIMES, broken_limits, read_msccl_xml
from .verifier import verify_msccl_xml

CHANNELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

# The runtimes' parsers read at most 255 characters of an attribute, and do not decode XML escapes.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:+/@-]{1,200}")


def to_msccl_xml(
    schedule: Schedule,
    *,
    name: str | None = None,
    proto: str = "Simple",
    runtime: str = "both",
    channels: int | None = None,
    inplace: bool = True,
    outofplace: bool = True,
    min_bytes: int = 0,
    max_bytes: int = 0,
) -> str:
    """Return a schedule as MSCCL XML.

    Rank k is ``schedule.devices[k]``. The buffer is divided into equal chunks, as small as the shares need; the
    runtimes use the file for messages whose element count is a multiple of the number of chunks. ``pieces`` is not in
    the file: the runtimes divide a long message into slices and run all steps for each slice, one after the other.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices.
      name: the name in the file, for readers; ``None``: made of the collective, algorithm and number of ranks.
      proto: "Simple", "LL" or "LL128".
      runtime: the runtime whose limits must hold: "msccl" (msccl-executor-nccl), "rccl", or "both".
      channels: the number of channels over which the chunks are spread; ``None``: the fewest of ``CHANNELS`` that the
        limits allow. A channel has one threadblock for each rank to send to, and one alone does not fill a fast link.
      inplace: whether the file is for calls whose input and output are the same memory.
      outofplace: whether the file is for calls whose input and output are different memory.
      min_bytes: the smallest message that the runtimes use the file for.
      max_bytes: the largest; 0: no limit.
    Returns:
      The text. The format does not store the root of a reduce or broadcast, so such a file is right for one root only.
    Raises:
      PlanError: the schedule is not such a collective, or a limit of the runtime does not allow it. The message has
        the limit and a remedy.
      ScheduleError: ``verify`` rejects the schedule.
      ArgumentError: another argument is invalid.

    >>> from crossreduce.planning import direct
    >>> print(to_msccl_xml(direct(["cuda:0", "cuda:1"])))  # doctest: +ELLIPSIS
    <algo name="allreduce_direct_2" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" ...>
      <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">
        <tb id="0" send="-1" recv="1" chan="0">
          <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
          <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="1" deps="0" hasdep="0"/>
        </tb>
    ...
    """
    if proto not in PROTOCOLS:
        raise ArgumentError.of("unknown protocol.", shown(proto), ", ".join(PROTOCOLS))
    if runtime not in (*RUNTIMES, "both"):
        raise ArgumentError.of("unknown runtime.", shown(runtime), ", ".join((*RUNTIMES, "both")))
    require_integers(channels=channels, min_bytes=min_bytes, max_bytes=max_bytes)
    if channels is not None and channels < 1:
        raise ArgumentError.of("channels must be at least 1.", shown(channels), "channels=None: the fewest")
    if not (inplace or outofplace):
        problem = "a file must be for calls in place, calls out of place, or both."
        raise ArgumentError.of(problem, "inplace=False, outofplace=False", "outofplace=True")
    if min_bytes < 0:
        raise ArgumentError.of("min_bytes must not be negative.", shown(min_bytes), "min_bytes=0")
    if max_bytes and max_bytes < min_bytes:
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError.of("max_bytes must not be below min_bytes.", given, "max_bytes=0: no limit")
    made = collective(schedule, LARGEST_COUNT)
    title = f"{made.kind}_{schedule.algorithm}_{made.ranks}" if name is None else name
    title = re.sub(r"[^A-Za-z0-9_.:+/@-]", "_", title)[:200] if name is None else title
    if not isinstance(title, str) or not _NAME.fullmatch(title):
        remedy = "up to 200 letters, digits and _ . : + / @ -"
        raise ArgumentError.of("the name must have 1 to 200 plain characters.", shown(title), remedy)
    if made.units > MOST_CHUNKS:
        problem = f"the shares need {made.units} equal chunks, but the runtimes count up to {MOST_CHUNKS}."
        given = f"{len(schedule.chunks)} shares of the buffer, multiples of 1/{made.units}"
        raise PlanError.of(problem, given, "fewer packs, another algorithm, or shares of a smaller denominator")
    limits = list(RUNTIMES.values()) if runtime == "both" else [RUNTIMES[runtime]]
    broken: list[str] = []
    for count in CHANNELS if channels is None else (channels,):
        if count > max(1, len(made.blocks)) and channels is None:
            break
        export = _XmlWriter(made, count, inplace=inplace, outofplace=outofplace)
        text = export.text(
            f'name="{title}" proto="{proto}" nchannels="{count}" nchunksperloop="{made.units}" ngpus="{made.ranks}" '
            f'coll="{made.kind}" inplace="{inplace:d}" outofplace="{outofplace:d}" minBytes="{min_bytes}" '
            f'maxBytes="{max_bytes}"'
        )
        algo = read_msccl_xml(text)
        broken = [problem for limit in limits for problem in broken_limits(algo, limit)]
        if not broken:
            verify_msccl_xml(text, slots=1)
            return text
    remedy = "fewer packs or chunks, another algorithm, fewer devices, other channels="
    if runtime != "msccl" and broken[0].startswith("RCCL"):
        remedy += ', or runtime="msccl"'
    raise PlanError.of(f"this schedule does not fit into the runtime: {broken[0]}.", schedule.head, remedy)


Threads = tuple[int, int, int, int]  # a threadblock: its GPU and channel, the ranks it sends to and receives from


@dataclass
class _XmlOp:
    """A ``step`` element of the file, other than ``nop``."""

    block: Threads
    type: str
    src: Location
    dst: Location
    size: int  # the number of units
    waits: list[_XmlOp]  # operations of other threadblocks of the GPU that must be done before it starts
    past: dict[Threads, int]  # how many operations of each threadblock of the GPU are surely done when it is done
    order: int  # its position among all operations
    place: int  # its position in its threadblock
    number: int = -1  # the number of its <step> element in the threadblock; ``nop`` elements count, too
    signals: bool = False  # whether another operation waits for it


class _LocalOp(NamedTuple):
    """An operation on a device, in the threadblock that receives from ``peer``."""

    type: str
    peer: int
    sent: int | None  # the value that ``peer`` sends for a receive (r and rrc); None: a local re or cpy
    src: Location
    dst: Location


class _XmlWriter:
    """The threadblocks of all GPUs, to which operations are added in the order of the rounds."""

    def __init__(self, made: Collective, channels: int, *, inplace: bool, outofplace: bool) -> None:
        self.made, self.channels = made, channels
        self.placement = MemoryPlacement(made, range(len(made.blocks)), inplace=inplace)
        self.blocks: defaultdict[Threads, list[_XmlOp]] = defaultdict(list)
        # By rank and unit of memory: the last writer, and the readers since then.
        self.writers: dict[tuple[int, Location], _XmlOp] = {}
        self.readers: defaultdict[tuple[int, Location], list[_XmlOp]] = defaultdict(list)
        self.count = 0
        blocks_of: defaultdict[int, list[int]] = defaultdict(list)
        for b, block in enumerate(made.blocks):
            blocks_of[block.chunk].append(b)
        for instructions in made.program.by_round:
            for chunk, together in groupby(instructions, key=lambda numbered: numbered.chunk):
                same_round = list(together)
                for b in blocks_of[chunk]:
                    self._add_round(b, same_round)
        for b in range(len(made.blocks)):
            self._add_copies(b, outofplace=outofplace)

    def _channel(self, b: int) -> int:
        return b * self.channels // len(self.made.blocks)

    def _add_round(self, b: int, instructions: list[Numbered]) -> None:
        """Add a round's instructions of one block: all sends, then the receives and local operations."""
        block, channel, placement = self.made.blocks[b], self._channel(b), self.placement
        devices = self.made.program.chunks[block.chunk].devices
        sent = [
            value for _, _, (device, operands, *_) in instructions for value in operands if devices[value] != device
        ]
        for value in sent if block.size == 1 else ():
            placement.read(b, value)
        made = [(entry.instruction.device, list(self._local_ops(b, *entry[1:]))) for entry in instructions]
        for device, ops in made:
            for op in ops:
                if op.sent is not None:
                    self._op((op.peer, channel, device, -1), "s", placement.locations[b, op.sent], op.dst, block.size)
        for device, ops in made:
            for op in ops:
                self._op((device, channel, -1, op.peer), op.type, op.src, op.dst, block.size)
        for value in sent if block.size > 1 else ():
            placement.read(b, value)

    def _local_ops(self, b: int, value: int, instruction: Instruction) -> Iterator[_LocalOp]:
        """Yield the operations of an instruction on its own device, and choose the memory of its value."""
        device, operands = instruction.device, instruction.operands
        placement, chunk = self.placement, self.made.program.chunks[self.made.blocks[b].chunk]
        own = next((operand for operand in operands if chunk.devices[operand] == device), None)
        total = None  # the location of the operands combined so far
        if own is not None:
            total = placement.locations[b, own]
            placement.read(b, own)
        target = placement.store(device, b, value)

        def receive(operand: int, add: Location | None, to: Location) -> _LocalOp:
            src = add or placement.locations[b, operand]
            return _LocalOp("r" if add is None else "rrc", chunk.devices[operand], operand, src, to)

        position = 0 if own is None else operands.index(own)
        before, after = operands[:position], operands[position + (own is not None) :]
        if total is None or len(before) < 2:  # two operands commute: own + first is first + own
            after = (*before, *after)
        else:
            apart = placement.memory(device, total) != placement.memory(device, target)
            aside = target if apart else placement.spare(device, b)
            for k, operand in enumerate(before):
                yield receive(operand, aside if k else None, aside)
            src, total = (aside, target) if total == target else (total, aside)
            peer = chunk.devices[before[-1]]
            yield _LocalOp("re", peer, None, src, total)
            if not after and total != target:
                yield _LocalOp("cpy", peer, None, total, target)
        for operand in after:
            yield receive(operand, total, target)
            total = target

    def _add_copies(self, b: int, *, outofplace: bool) -> None:
        """Copy results that are elsewhere to the output, such as a broadcast root's input in calls out of place."""
        block = self.made.blocks[b]
        chunk = self.made.program.chunks[block.chunk]
        for rank, result in zip(chunk.destinations, chunk.results, strict=True):
            src, dst = self.placement.locations[b, result], self.made.output(rank, block)
            apart = self.placement.memory(rank, src) != self.placement.memory(rank, dst)
            if apart or (outofplace and src != dst):
                self._op((rank, self._channel(b), -1, -1), "cpy", src, dst, block.size)

    def _units(self, rank: int, location: Location, size: int) -> list[tuple[int, Location]]:
        """Return a location's units of memory. If input and output share a unit, its name is the same for both."""
        buffer, offset = self.placement.memory(rank, location)
        return [(rank, Location(buffer, offset + k)) for k in range(size)]

    def _op(self, block: Threads, kind: str, src: Location, dst: Location, size: int) -> None:
        """Add an operation. It waits for writers of memory that it reads, and for readers of memory that it writes."""
        rank = block[0]
        reads = [] if kind == "r" else self._units(rank, src, size)
        writes = [] if kind == "s" else self._units(rank, dst, size)
        if kind == "re":
            reads = reads + writes
        # A write waits for the old value's readers. They have waited for the old value's writer: the write need not.
        earlier = {id(op): op for unit in reads if (op := self.writers.get(unit))}
        earlier.update((id(op), op) for unit in writes for op in self.readers[unit])
        mine = self.blocks[block]
        past = dict(mine[-1].past) if mine else {}
        waits = []
        for other in sorted(earlier.values(), key=lambda op: -op.order):
            if other.block != block and past.get(other.block, 0) <= other.place:
                waits.append(other)
                other.signals = True
                for key, count in other.past.items():
                    past[key] = max(past.get(key, 0), count)
        past[block] = len(mine) + 1
        op = _XmlOp(block, kind, src, dst, size, waits, past, self.count, len(mine))
        self.count += 1
        mine.append(op)
        for unit in reads:
            self.readers[unit].append(op)
        for unit in writes:
            self.writers[unit] = op
            self.readers[unit] = []

    def text(self, head: str) -> str:
        """Return the file. Each wait of an operation but the last is a ``nop`` element in front of the operation."""
        numbers: defaultdict[int, dict[Threads, int]] = defaultdict(dict)  # by GPU: the ids of its threadblocks
        for block in sorted(self.blocks):
            numbers[block[0]][block] = len(numbers[block[0]])
            number = -1
            for op in self.blocks[block]:
                number += max(len(op.waits), 1)
                op.number = number
        lines = [f"<algo {head}>"]
        for rank in range(self.made.ranks):
            sizes = self.made.inputs, self.made.outputs, self.placement.scratch[rank]
            lines.append('  <gpu id="{}" i_chunks="{}" o_chunks="{}" s_chunks="{}">'.format(rank, *sizes))
            for block, number in numbers[rank].items():
                _, channel, send, recv = block
                lines.append(f'    <tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
                for op in self.blocks[block]:
                    waits = [(numbers[rank][other.block], other.number) for other in op.waits]
                    lines += _lines(op, waits or [(-1, -1)])
                lines.append("    </tb>")
            lines.append("  </gpu>")
        return "\n".join([*lines, "</algo>", ""])


def _lines(op: _XmlOp, waits: list[tuple[int, int]]) -> list[str]:
    """Return an operation's elements: a ``nop`` for each wait (threadblock, step) but the last, then its own."""
    nop = "nop", Location("i", -1), Location("o", -1), 0, False
    elements = [nop] * (len(waits) - 1) + [(op.type, op.src, op.dst, op.size, op.signals)]
    numbers = range(op.number - len(waits) + 1, op.number + 1)
    return [
        f'      <step s="{number}" type="{kind}" srcbuf="{src.buffer}" srcoff="{src.offset}" dstbuf="{dst.buffer}" '
        f'dstoff="{dst.offset}" cnt="{size}" depid="{block}" deps="{step}" hasdep="{signals:d}"/>'
        for number, (kind, src, dst, size, signals), (block, step) in zip(numbers, elements, waits, strict=True)
    ]
