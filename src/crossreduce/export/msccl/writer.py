"""Write a schedule as MSCCL XML, which msccl-executor-nccl, microsoft/msccl and RCCL run.

In: a ``Schedule``.  Out: the file's text, which ``verify_msccl_xml`` has accepted.

How a schedule becomes threadblocks: each GPU has, on each channel, one threadblock for each rank that it sends to
and one for each that it receives from, so receiving never waits for sending. A chunk belongs to one channel. A step
from several sources becomes one message from each, in the listed order; each is added as it arrives (``rrc``), so
the order of combination is the schedule's. Where the destination's own part comes third or later, the messages before
it are added up in scratch memory first.

All messages have one order: the schedule's. A message is received right after it is sent, and whatever a move waits
for comes before it. Done in that order, one slot a connection is enough; so no threadblocks can wait in a circle.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from ...errors import ArgumentError, PlanError, message, shown
from ...schedule.schedule import Schedule
from ..collective import Collective, Place, collective
from .format import LARGEST_COUNT, MOST_CHUNKS, PROTOCOLS, RUNTIMES, broken_limits, read_msccl_xml
from .verifier import verify_msccl_xml

CHANNELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

_NAME: Final = re.compile(r"[A-Za-z0-9_.:+/@-]{1,200}")  # the runtimes' parsers know no escapes and 255 characters


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

    Rank k is the schedule's k-th device. The buffer is cut into as many equal chunks as the shares need; the
    runtimes use the file for messages whose element count is a multiple of them. ``pieces`` has no place in the
    file: the runtimes cut a long message into slices themselves and take each through all steps, one behind the other.

    Args:
      schedule: an all-reduce, reduce-scatter, all-gather, broadcast or reduce of all its devices.
      name: for people; ``None``: made of the collective, algorithm and number of ranks.
      proto: "Simple", "LL" or "LL128".
      runtime: whose limits must hold: "msccl" (msccl-executor-nccl), "rccl", or "both".
      channels: over how many channels chunks are spread; ``None``: the fewest that the limits allow. A channel has one
        threadblock for each rank to send to, which alone does not fill a fast link.
      inplace: for calls whose input and output are the same memory.
      outofplace: for other calls.
      min_bytes: the smallest message that the runtimes use the file for.
      max_bytes: the largest; 0: no limit.
    Returns:
      The text. A reduce or broadcast is right for one root only, which the format cannot say.
    Raises:
      PlanError: the schedule is no such collective, or a limit of the runtime does not allow it; the message
        says which, and what to try.
      ScheduleError: the schedule is wrong.
      ArgumentError: another argument is.

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
        raise ArgumentError(message("unknown protocol.", shown(proto), ", ".join(PROTOCOLS)))
    if runtime not in (*RUNTIMES, "both"):
        raise ArgumentError(message("unknown runtime.", shown(runtime), ", ".join((*RUNTIMES, "both"))))
    if channels is not None and channels < 1:
        raise ArgumentError(message("a file has 1, 2, ... channels.", shown(channels), "channels=None: the fewest"))
    if not (inplace or outofplace):
        raise ArgumentError("a file that is neither for calls in place nor out of place is never used.")
    if min_bytes < 0 or (max_bytes and max_bytes < min_bytes):
        given = f"min_bytes={min_bytes}, max_bytes={max_bytes}"
        raise ArgumentError(
            message("the message sizes run from min_bytes to max_bytes.", given, "max_bytes=0: no limit")
        )
    made = collective(schedule, LARGEST_COUNT)
    title = f"{made.kind}_{schedule.algorithm}_{made.ranks}" if name is None else name
    title = re.sub(r"[^A-Za-z0-9_.:+/@-]", "_", title) if name is None else title
    if not _NAME.fullmatch(title):
        remedy = "up to 200 letters, digits and _ . : + / @ -"
        raise ArgumentError(message("the runtimes' parsers cannot read this name.", shown(name), remedy))
    _check_chunks(made)
    limits = list(RUNTIMES.values()) if runtime == "both" else [RUNTIMES[runtime]]
    broken: list[str] = []
    for count in CHANNELS if channels is None else (channels,):
        if count > max(1, len(made.blocks)) and channels is None:
            break
        export = _Export(made, count, inplace=inplace, outofplace=outofplace)
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
    raise PlanError(
        message(
            f"this schedule does not fit into the runtime: {broken[0]}.",
            schedule.head,
            "fewer packs or chunks, another algorithm, fewer devices, other channels="
            + (', or runtime="msccl"' if runtime != "msccl" and broken[0].startswith("RCCL") else ""),
        )
    )


def _check_chunks(made: Collective) -> None:
    if made.units > MOST_CHUNKS:
        raise PlanError(
            message(
                f"the shares need {made.units} equal chunks, but the runtimes count up to {MOST_CHUNKS}.",
                f"{len(made.blocks)} blocks of 1/{made.units} of the buffer",
                "a plan with fewer trees or rounder shares",
            )
        )


Threads = tuple[int, int, int, int]  # a threadblock: its GPU and channel, the ranks it sends to and receives from


@dataclass
class _Op:
    """A step of the file to be. ``past``: how many ops of each threadblock of its GPU are over when it is."""

    block: Threads
    type: str
    src: Place
    dst: Place
    size: int
    waits: list[_Op]
    past: dict[Threads, int]
    order: int  # among all
    place: int  # in its threadblock
    number: int = -1  # in its threadblock, nops counted too
    signals: bool = False


class _Export:
    """The threadblocks of all GPUs, made op by op in the schedule's order."""

    def __init__(self, made: Collective, channels: int, *, inplace: bool, outofplace: bool) -> None:
        self.made, self.channels, self.inplace = made, channels, inplace
        self.blocks: defaultdict[Threads, list[_Op]] = defaultdict(list)
        self.scratch = [0] * made.ranks
        self.spares: dict[tuple[int, int, str], Place] = {}
        self.held: dict[tuple[int, int], Place] = {}  # where a rank holds a block now
        # By rank and unit of memory: who wrote it last, and who has read it since.
        self.writers: dict[tuple[int, Place], _Op] = {}
        self.readers: defaultdict[tuple[int, Place], list[_Op]] = defaultdict(list)
        self.count = 0
        of_chunk: defaultdict[int, list[int]] = defaultdict(list)
        for number, block in enumerate(made.blocks):
            of_chunk[block.chunk].append(number)
            for rank in range(made.ranks):
                place = made.input(rank, block)
                if place is not None:
                    self.held[rank, number] = place
        for chunk, dst, srcs in made.steps:
            for number in of_chunk[chunk]:
                self._step(number, dst, srcs)
        if outofplace:  # what a rank gives and needs, and never had to change
            for number, block in enumerate(made.blocks):
                for rank in range(made.ranks):
                    place = made.output(rank, block)
                    if place is not None and self.held[rank, number] != place:
                        self._op(
                            (rank, self._channel(number), -1, -1), "cpy", self.held[rank, number], place, block.size
                        )

    def _channel(self, number: int) -> int:
        return number * self.channels // len(self.made.blocks)

    def _step(self, number: int, dst: int, srcs: tuple[int, ...]) -> None:
        """Add a schedule's step, for one block."""
        size = self.made.blocks[number].size
        result = self.made.output(dst, self.made.blocks[number]) or self._spare(dst, number, "result")
        cut = srcs.index(dst) if dst in srcs else 0
        before, after = srcs[:cut], srcs[cut + 1 :] if dst in srcs else srcs
        total = self.held[dst, number] if dst in srcs else None  # where the combination so far is; None: nowhere yet
        if len(before) < 2:
            after = (*before, *after)
        else:
            own, total, aside = total, None, self._spare(dst, number, "sum")
            for src in before:
                total = self._message(number, src, dst, total, aside)
            assert own is not None
            local = self._receiver(number, before[-1], dst)
            total = result if own == result else aside
            self._op(local, "re", aside if own == result else own, total, size)
            if not after and total != result:
                self._op(local, "cpy", total, result, size)
        for src in after:
            total = self._message(number, src, dst, total, result)
        self.held[dst, number] = result

    def _message(self, number: int, src: int, dst: int, add: Place | None, target: Place) -> Place:
        """Send a block from ``src`` to ``target`` on ``dst``, combined with what ``add`` holds there."""
        size, held = self.made.blocks[number].size, self.held[src, number]
        self._op((src, self._channel(number), dst, -1), "s", held, target, size)
        self._op(self._receiver(number, src, dst), "r" if add is None else "rrc", add or held, target, size)
        return target

    def _receiver(self, number: int, src: int, dst: int) -> Threads:
        return dst, self._channel(number), -1, src

    def _spare(self, rank: int, number: int, use: str) -> Place:
        """Return a block's place in a rank's scratch memory."""
        key = rank, number, use
        if key not in self.spares:
            self.spares[key] = Place("s", self.scratch[rank])
            self.scratch[rank] += self.made.blocks[number].size
        return self.spares[key]

    def _units(self, rank: int, place: Place, size: int) -> list[tuple[int, Place]]:
        """Return units of memory by the one name that they have, where buffers may share memory."""
        buffer, offset = place
        if self.inplace and self.made.kind == "allgather" and buffer == "i":
            buffer, offset = "o", offset + rank * self.made.inputs
        elif self.inplace and self.made.kind != "allgather" and buffer == "o":
            buffer, offset = "i", offset + (rank * self.made.outputs if self.made.kind == "reducescatter" else 0)
        return [(rank, Place(buffer, offset + k)) for k in range(size)]

    def _op(self, block: Threads, kind: str, src: Place, dst: Place, size: int) -> None:
        """Add an op, and what it must wait for: who wrote what it reads, who used what it writes."""
        rank = block[0]
        reads = [] if kind == "r" else self._units(rank, src, size)
        writes = [] if kind == "s" else self._units(rank, dst, size)
        if kind == "re":
            reads = reads + writes
        # A value that is written anew has been read before, or the step that wrote it would not be there.
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
        op = _Op(block, kind, src, dst, size, waits, past, self.count, len(mine))
        self.count += 1
        mine.append(op)
        for unit in reads:
            self.readers[unit].append(op)
        for unit in writes:
            self.writers[unit] = op
            self.readers[unit] = []

    def text(self, head: str) -> str:
        """Return the file, with a ``nop`` for each thing that an op waits for beside the last."""
        numbers: defaultdict[int, dict[Threads, int]] = defaultdict(dict)  # of each GPU's threadblocks
        for block in sorted(self.blocks):
            numbers[block[0]][block] = len(numbers[block[0]])
            number = -1
            for op in self.blocks[block]:
                number += max(len(op.waits), 1)
                op.number = number
        lines = [f"<algo {head}>"]
        for rank in range(self.made.ranks):
            sizes = self.made.inputs, self.made.outputs, self.scratch[rank]
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


def _lines(op: _Op, waits: list[tuple[int, int]]) -> list[str]:
    """Return an op's elements: a ``nop`` for each pair of a threadblock and its step that it waits for but the last."""
    return [
        f'      <step s="{op.number - len(waits) + 1 + k}" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" '
        f'cnt="0" depid="{block}" deps="{step}" hasdep="0"/>'
        for k, (block, step) in enumerate(waits[:-1])
    ] + [
        f'      <step s="{op.number}" type="{op.type}" srcbuf="{op.src.buffer}" srcoff="{op.src.offset}" '
        f'dstbuf="{op.dst.buffer}" dstoff="{op.dst.offset}" cnt="{op.size}" '
        f'depid="{waits[-1][0]}" deps="{waits[-1][1]}" hasdep="{op.signals:d}"/>',
    ]
