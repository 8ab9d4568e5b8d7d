"""Make the threadblocks of an MSCCL XML file: their operations, and the operations that each one waits for.

Input: an ``Arrangement``: the blocks, their channels and their forwarded messages. Output: the text of the file.

Each GPU has, on each channel, one threadblock for each rank that it sends to and one for each rank that it receives
from, so that no receive is queued behind a send. A receive that forwards its message has both peers in one threadblock.
An instruction of several operands becomes one message from each other device, in the listed order. Each message is
added as it arrives (``rrc``). If the device's own operand is third or later, the messages before it are first added up
in other memory.

The order in which operations are added proves that no threadblocks wait for each other in a cycle. Piece k of a chunk
does round r in tick k + r. Tick by tick, chunk by chunk and block by block, all sends are added before the receives. So
the values that the previous round left are sent before new values take their memory, and a connection has at most one
message that is not yet received. A message of one unit needs one of the connection's slots, so each operation can run
when all operations before it are done. A message of more units may need more slots than the connection has. Then its
send ends only after its receive has begun. So in a block of more units, values that a round sends keep their memory
until the round ends, and no receive of a round waits for a send of the same round other than its own. A forwarded
message is sent earlier than in this order. For files with such messages, only the verifier excludes deadlocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from ....lowering import Instruction, Numbered
from ..collective import Location
from ..register_allocation import MemoryPlacement
from .arrangement import MOST_CHANNELS, Arrangement
from .execution import too_large
from .format import LARGEST_COUNT, MOST_ELEMENTS, READS, SENDS, WRITES

# A threadblock: its GPU, its channel, the rank that it sends to and the rank that it receives from (or -1).
Threads = tuple[int, int, int, int]

MOST_COPIES: Final = 32
"""The most copies of a threadblock. A copy may have to wait twice, which takes two steps."""


@dataclass
class _XmlOp:
    """A ``step`` element of the file, other than ``nop``."""

    block: Threads
    type: str
    src: Location
    dst: Location
    size: int  # the number of units
    waits: list[_XmlOp]  # operations of other threadblocks of the GPU that must be done before it starts
    past: dict[Threads, int]  # the number of operations of each threadblock that are surely done when it is done
    order: int  # its position among all operations
    place: int  # its position in its threadblock
    number: int = -1  # the number of its <step> element in the threadblock; ``nop`` elements count, too
    signals: bool = False  # whether another operation waits for it


class _LocalOp(NamedTuple):
    """An operation on a device, in the threadblock that receives from ``peer``."""

    type: str
    peer: int
    sent: int | None  # the value that ``peer`` sends for a receive (r and rrc); None for a local re or cpy
    src: Location
    dst: Location


class _Copy(NamedTuple):
    """A copy from one buffer of a rank to another one."""

    is_input: bool  # then the copy waits for nothing
    src: Location
    dst: Location
    size: int


class XmlWriter:
    """The threadblocks of all GPUs (up to ``most`` each, if possible). Operations are added in the order of rounds."""

    def __init__(self, arrangement: Arrangement, most: int, *, inplace: bool, outofplace: bool) -> None:
        self.arrangement, self.collective = arrangement, arrangement.collective
        collective = arrangement.collective
        self.placement = MemoryPlacement(collective, range(len(collective.blocks)), inplace=inplace)
        self.blocks: defaultdict[Threads, list[_XmlOp]] = defaultdict(list)
        # By rank and unit of memory: the last writer, and the readers since then.
        self.writers: dict[tuple[int, Location], _XmlOp] = {}
        self.readers: defaultdict[tuple[int, Location], list[_XmlOp]] = defaultdict(list)
        self.count = 0
        blocks_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by chunk and piece
        for b, block in enumerate(collective.blocks):
            blocks_of[block.chunk, arrangement.pieces[b]].append(b)
        rounds = collective.program.by_round
        last_piece = max(arrangement.pieces, default=0)
        for tick in range(len(rounds) + last_piece):
            for r in range(max(0, tick - last_piece), min(tick + 1, len(rounds))):
                for chunk, together in groupby(rounds[r], key=lambda numbered: numbered.chunk):
                    same_round = list(together)
                    for b in blocks_of[chunk, tick - r]:
                        self._add_round(b, same_round)
        self._add_copies(most, outofplace=outofplace)

    @property
    def channels(self) -> int:
        return max((channel for _, channel, *_ in self.blocks), default=0) + 1

    @property
    def steps(self) -> int:
        """The number of steps of all threadblocks."""
        return sum(max(len(op.waits), 1) for ops in self.blocks.values() for op in ops)

    def too_large(self) -> str:
        """Return why the file is too large to be read or verified, or "" if it is not."""
        lists = self.blocks.values()
        elements = 1 + self.collective.ranks + len(lists) + self.steps
        if elements > MOST_ELEMENTS:
            return f"at most {MOST_ELEMENTS} XML elements are read, the file needs {elements}"
        work = 2 * self.collective.ranks * self.collective.units + sum(op.size for ops in lists for op in ops)
        return too_large(sum(map(len, lists)), work)

    @property
    def most_steps(self) -> int:
        """The largest number of steps of a threadblock that has peers."""
        lists = (ops for (_, _, send, recv), ops in self.blocks.items() if max(send, recv) >= 0)
        return max((sum(max(len(op.waits), 1) for op in ops) for ops in lists), default=1)

    def _add_round(self, b: int, instructions: list[Numbered]) -> None:
        """Add a round's instructions of one block: all sends, then the receives and local operations."""
        block, placement, forwards = self.collective.blocks[b], self.placement, self.arrangement.forwards
        devices = self.collective.places[block.chunk]
        sent = [
            value for _, _, (device, operands, *_) in instructions for value in operands if devices[value] != device
        ]
        for value in sent if block.size == 1 else ():  # of larger blocks, the memory is kept until the round ends
            placement.read(b, value)
        listed = [(entry.value, entry.instruction, list(self._local_ops(b, *entry[1:]))) for entry in instructions]
        for value, instruction, ops in listed:
            for op in ops:
                if op.sent is not None and forwards.get((block.chunk, op.sent)) != value:
                    channel = self.arrangement.channel(b, op.sent, value)
                    threads = op.peer, channel, instruction.device, -1
                    self._op(threads, "s", placement.locations[b, op.sent], op.dst, block.size)
        for value, instruction, ops in listed:
            channel, after = 0, forwards.get((block.chunk, value))
            for k, op in enumerate(ops):
                # A local operation runs in the threadblock of the message before it.
                channel = channel if op.sent is None else self.arrangement.channel(b, op.sent, value)
                send, kind = -1, op.type
                if after is not None and k + 1 == len(ops):
                    send = devices[after]
                    stored = op.type == "r" or (block.chunk, value) not in self.arrangement.unstored
                    kind = {"r": "rcs", "rrc": "rrcs" if stored else "rrs"}[op.type]
                self._op((instruction.device, channel, send, op.peer), kind, op.src, op.dst, block.size)
        for value in sent if block.size > 1 else ():
            placement.read(b, value)

    def _local_ops(self, b: int, value: int, instruction: Instruction) -> Iterator[_LocalOp]:
        """Yield the operations of an instruction on its own device, and choose the memory of its value."""
        device, operands = instruction.device, instruction.operands
        number, placement = self.collective.blocks[b].chunk, self.placement
        places, results = self.collective.places[number], self.collective.program.chunks[number].results
        local = next((operand for operand in operands if places[operand] == device), None)
        total = None  # the location of the operands combined so far
        if local is not None:
            total = placement.locations[b, local]
            placement.read(b, local)
        unstored = local is not None and (number, value) in self.arrangement.unstored
        target = total if unstored and total and len(operands) == 2 else placement.store(device, b, value)

        def receive(operand: int, add: Location | None, to: Location) -> _LocalOp:
            src = add or placement.locations.get((b, operand), to)  # runtimes ignore the source of r
            return _LocalOp("r" if add is None else "rrc", places[operand], operand, src, to)

        position = 0 if local is None else operands.index(local)
        before, after = operands[:position], operands[position + (local is not None) :]
        if total is None or len(before) < 2:  # two operands commute: local + first is first + local
            after = (*before, *after)
        else:  # add up the operands before the local one in ``aside``
            is_separate = placement.memory(device, total) != placement.memory(device, target)
            aside = target if is_separate else placement.scratch_for(device, b)
            for k, operand in enumerate(before):
                yield receive(operand, aside if k else None, aside)
            src, total = (aside, target) if total == target else (total, aside)  # adds one of both sums to the other
            peer = places[before[-1]]
            yield _LocalOp("re", peer, None, src, total)
            if not after and total != target and value in results:
                yield _LocalOp("cpy", peer, None, total, target)
            elif not after:
                placement.move(device, b, value, total)
        for operand in after:
            yield receive(operand, total, target)
            total = target

    def _add_copies(self, most: int, *, outofplace: bool) -> None:
        """Add copies of results that are not in the output, such as a broadcast root's input in calls out of place.

        If the arrangement spreads copies, each part of a chunk has a separate threadblock for its copies, as long as
        the rank has at most ``most`` threadblocks. Otherwise copies have as few threadblocks as ``MOST_COPIES`` allows.
        """
        copies: defaultdict[int, dict[tuple[int, int], list[_Copy]]] = defaultdict(dict)  # by rank, chunk and part
        for b, block in enumerate(self.collective.blocks):
            chunk = self.collective.program.chunks[block.chunk]
            for rank, result in zip(chunk.destinations, chunk.results, strict=True):
                src, dst = self.placement.locations[b, result], self.collective.output(rank, block)
                is_elsewhere = self.placement.memory(rank, src) != self.placement.memory(rank, dst)
                if is_elsewhere or (outofplace and src != dst):
                    part_copies = copies[rank].setdefault((block.chunk, self.arrangement.parts[b]), [])
                    _append_copy(part_copies, _Copy(result < len(chunk.sources), src, dst, block.size))
        used = Counter(rank for rank, *_ in self.blocks)
        for rank, by_part in copies.items():
            count = sum(map(len, by_part.values()))
            threadblocks = min(most - used[rank], MOST_CHANNELS) if self.arrangement.spread else 0
            threadblocks = max(threadblocks, -(-count // MOST_COPIES))
            added = 0
            for number, part_copies in enumerate(by_part.values()):
                for _, src, dst, size in part_copies:
                    channel = number if len(by_part) <= threadblocks else added * threadblocks // count
                    self._op((rank, channel, -1, -1), "cpy", src, dst, size)
                    added += 1

    def _units(self, rank: int, location: Location, size: int) -> list[tuple[int, Location]]:
        """Return the units of memory at a location. A unit that input and output share has one name."""
        buffer, offset = self.placement.memory(rank, location)
        return [(rank, Location(buffer, offset + k)) for k in range(size)]

    def _op(self, block: Threads, kind: str, src: Location, dst: Location, size: int) -> None:
        """Add an operation. It waits for writers of memory that it reads, and for readers of memory that it writes."""
        rank = block[0]
        reads = self._units(rank, src, size) if kind in READS else []
        writes = self._units(rank, dst, size) if kind in WRITES else []
        if kind == "re":
            reads = reads + writes
        # A write waits for the readers of the old value. These have waited for its writer, so the write need not.
        earlier = {id(op): op for unit in reads if (op := self.writers.get(unit))}
        earlier.update((id(op), op) for unit in writes for op in self.readers[unit])
        before = self.blocks[block]
        past = dict(before[-1].past) if before else {}
        waits = []
        for other in sorted(earlier.values(), key=lambda op: -op.order):
            if other.block != block and past.get(other.block, 0) <= other.place:
                waits.append(other)
                other.signals = True
                for key, count in other.past.items():
                    past[key] = max(past.get(key, 0), count)
        past[block] = len(before) + 1
        op = _XmlOp(block, kind, src, dst, size, waits, past, self.count, len(before))
        self.count += 1
        before.append(op)
        for unit in reads:
            self.readers[unit].append(op)
        for unit in writes:
            self.writers[unit] = op
            self.readers[unit] = [op] if kind in SENDS else []  # a value that only this step sends has no other reader

    def text(self, head: str) -> str:
        """Return the text of the file, given the attributes of ``<algo>``."""
        numbers: defaultdict[int, dict[Threads, int]] = defaultdict(dict)  # by GPU: the ids of its threadblocks
        for block in sorted(self.blocks):
            numbers[block[0]][block] = len(numbers[block[0]])
            number = -1
            for op in self.blocks[block]:
                number += max(len(op.waits), 1)
                op.number = number
        lines = [f"<algo {head}>"]
        for rank in range(self.collective.ranks):
            sizes = self.collective.inputs, self.collective.outputs, self.placement.scratch[rank]
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


def _append_copy(copies: list[_Copy], new: _Copy) -> None:
    """Append a copy. If it and the last copy are adjacent copies of inputs, which wait for nothing, join them."""
    if copies and new.is_input and copies[-1].is_input:
        _, (buffer, start), (dst_buffer, dst_start), count = copies[-1]
        is_next = new[1:3] == ((buffer, start + count), (dst_buffer, dst_start + count))
        if is_next and count + new.size <= LARGEST_COUNT:
            copies[-1] = copies[-1]._replace(size=count + new.size)
            return
    copies.append(new)


def _lines(op: _XmlOp, waits: list[tuple[int, int]]) -> list[str]:
    """Return the ``<step>`` lines of an operation, of which its own has the number ``op.number`` and is the last.

    ``waits``: the (threadblock, step) pairs that it waits for, or ``[(-1, -1)]`` if it waits for none. A step can wait
    for one other step only, so there is a ``nop`` before it for each of ``waits`` but the last.
    """
    nop = "nop", Location("i", -1), Location("o", -1), 0, False
    elements = [nop] * (len(waits) - 1) + [(op.type, op.src, op.dst, op.size, op.signals)]
    numbers = range(op.number - len(waits) + 1, op.number + 1)
    return [
        f'      <step s="{number}" type="{kind}" srcbuf="{src.buffer}" srcoff="{src.offset}" dstbuf="{dst.buffer}" '
        f'dstoff="{dst.offset}" cnt="{size}" depid="{block}" deps="{step}" hasdep="{signals:d}"/>'
        for number, (kind, src, dst, size, signals), (block, step) in zip(numbers, elements, waits, strict=True)
    ]
