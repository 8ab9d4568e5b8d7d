"""The bytes that the data operations of an MSCCL++ plan move, as in the handlers of the executor's kernel.

Input: an operation and the ``PlanLayout`` of a message. Output: moves of ranges of memory.

- Data is processed in words of 16 bytes. A packet has 8 bytes of data. Packets are always read from scratch memory,
  even if the operation names another buffer.
- ``put`` uses the buffer of its first source for all sources. ``get`` swaps the offsets of the two GPUs. ``pwsf``
  passes an invalid source offset; the moves use the offset of the plan.
- In a pipeline, iteration k of an operation processes up to unit_size bytes from byte k * unit_size on. Beyond the end
  of the operation's bytes, a subtraction overflows, and the iteration processes unit_size bytes. Operations on packets
  process all bytes in each iteration.
- A port channel copies packets with their flags.

Source: src/core/include/execution_kernel.hpp in github.com/microsoft/mscclpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ..format import ChunkSpan, MscclppPlan, PlanOperation
from ..layout import WORD, PlanLayout, Range

WHOLE: Final = (1 << 32) - 1  # the unit of operations outside of pipelines
_WRAP: Final = 1 << 32  # sizes and offsets are numbers of 32 bits


class Move(NamedTuple):
    """Data that threads combine in the listed order, and store."""

    srcs: tuple[Range, ...]
    dsts: tuple[Range, ...]
    size: int  # bytes of data; a range with scale 2 has twice the bytes
    word: int  # the bytes of data that a thread processes in one step


class MoveMaker:
    """Makes the moves of one threadblock."""

    def __init__(self, plan: MscclppPlan, layout: PlanLayout, rank: int, block: int) -> None:
        self.plan, self.layout, self.rank = plan, layout, rank
        self.gpu = plan.gpus[rank]
        self.block = self.gpu.threadblocks[block]

    def moves(self, op: PlanOperation, offset: int, unit: int) -> Iterator[Move]:
        """Yield, in order, the moves that the threads make in an iteration of ``unit`` bytes from ``offset`` on."""
        if op.name in ("put", "pws", "pwsf"):
            for src, dst in zip(op.srcs, op.dsts, strict=True):
                near = self.layout.local(self.rank, op.srcs[0].buffer, self._start(op, src, offset))
                yield Move((near,), (self._remote(op, dst, offset),), self._size(op, dst, offset, unit), WORD)
        elif op.name == "get":
            for src, dst in zip(op.srcs, op.dsts, strict=True):
                far = self.layout.remote(self.rank, *self._target(op, src), self._start(op, dst, offset))
                near = self.layout.local(self.rank, dst.buffer, self._start(op, src, offset))
                yield Move((far,), (near,), self._size(op, src, offset, unit), WORD)
        elif op.name in ("glres", "gstore"):  # 4 bytes, since the switch adds some dtypes one by one
            src = op.srcs[0]
            srcs = self._switch(op, src, offset) if op.name == "glres" else (self._local(op, src, offset),)
            size = self._size(op, src, offset, unit)
            yield Move(srcs, self._switch(op, op.dsts[0], offset), size, WORD // 4)
        elif op.name.endswith("pkt"):
            yield from self._packet_moves(op)
        else:  # copy, re, res, rre, rres
            srcs, dsts = (
                tuple((self._local if span.kind == "l" else self._remote)(op, span, offset) for span in spans)
                for spans in (op.srcs, op.dsts)
            )
            if self.plan.reuse and op.name in ("re", "res"):
                srcs = srcs[:1] + tuple(self._reused_source(op, k, offset) for k in range(1, len(srcs)))
            yield Move(srcs, dsts, self._size(op, op.srcs[0], offset, unit), WORD)

    def _packet_moves(self, op: PlanOperation) -> Iterator[Move]:
        """Yield the moves of an operation that reads or writes packets."""
        size = self._bytes(op, op.srcs[0])
        if op.name == "ppkt":
            for src, dst in zip(op.srcs, op.dsts, strict=True):
                near = self.layout.local(self.rank, op.srcs[0].buffer, self._start(op, src, 0))
                yield Move((near,), (self._remote(op, dst, 0, 2),), self._bytes(op, src), WORD // 2)
            return
        if op.name in ("rppkt", "upkt", "gstorepkt"):
            srcs = [self.packets(op, 0)]
        else:
            srcs = [*(self.packets(op, k) for k in range(1, len(op.srcs))), self._local(op, op.srcs[0], 0)]
        dsts: list[Range] = []
        for k, dst in enumerate(op.dsts):
            if dst.kind == "w":
                dsts += self._switch(op, dst, 0, 2)
            elif dst.kind == "r":
                dsts.append(self._remote(op, dst, 0, 2))
            else:
                dsts.append(self._local(op, dst, 0, 2 if op.name == "cpkt" or k else 1))
        yield Move(tuple(srcs), tuple(dsts), size, WORD // 2)

    def posts(self, op: PlanOperation, offset: int, unit: int) -> Iterator[Move]:
        """Yield the move that each port channel of an operation makes later."""
        scale = 2 if op.name.endswith("pkt") else 1
        for k, dst in enumerate(op.dsts):
            src = op.srcs[0 if op.name == "rppkt" else k]
            size = scale * self._bytes(op, src) if scale == 2 else self._size(op, dst, offset, unit)
            buffer = "s" if op.name == "rppkt" else src.buffer
            half = self.layout.second_half[self.rank] if scale == 2 and buffer == "s" else 0
            source = self.layout.port_source(self.rank, buffer, half + scale * self._start(op, src, offset, scale))
            yield Move((source,), (self._remote(op, dst, offset, scale)._replace(scale=1),), size, WORD)

    def packets(self, op: PlanOperation, k: int) -> Range:
        """Return the packets that are source k of an operation."""
        return self.layout.local(self.rank, "s", self._start(op, op.srcs[k], 0), 2)

    def packets_read(self, op: PlanOperation) -> Move:
        """Return the move with which a ``rppkt`` waits for its packets, before port channels copy them."""
        return Move((self.packets(op, 0),), (), self._bytes(op, op.srcs[0]), WORD // 2)

    def _bytes(self, op: PlanOperation, span: ChunkSpan) -> int:
        """Return the number of bytes of a span that the threadblock processes in all iterations."""
        return self.layout.part(span.size * self.layout.chunk, op.group)[1]

    def _size(self, op: PlanOperation, span: ChunkSpan, offset: int, unit: int) -> int:
        """Return the number of these bytes that one iteration processes."""
        return min((self._bytes(op, span) - offset) % _WRAP, unit)

    def _start(self, op: PlanOperation, span: ChunkSpan, offset: int, scale: int = 1) -> int:
        """Return the offset of a span's bytes in its buffer."""
        buffer = self._target(op, span)[1]
        start = self.layout.offset(self.rank, buffer, span.first)
        start += self.layout.part(span.size * self.layout.chunk, op.group)[0]
        return start + (0 if scale == 2 else self.layout.shifted(self.rank, buffer, offset))

    def _target(self, op: PlanOperation, span: ChunkSpan) -> tuple[int, str]:
        """Return the GPU and buffer of a span. A span of a switch channel has the GPU that runs the operation."""
        if span.kind == "l":
            return self.rank, span.buffer
        if span.kind == "w":
            return self.rank, self.gpu.switches[self.block.channels["switch"][span.number]][0]
        remote = self.gpu.buffers[self.block.buffers[op.channel_type][span.number]]
        return remote.rank, remote.buffer

    def _local(self, op: PlanOperation, span: ChunkSpan, offset: int, scale: int = 1) -> Range:
        """Return where the bytes of a span of local memory start. ``scale`` is 2 for packets."""
        return self.layout.local(self.rank, span.buffer, self._start(op, span, offset, scale), scale)

    def _remote(self, op: PlanOperation, span: ChunkSpan, offset: int, scale: int = 1) -> Range:
        start = self._start(op, span, offset, scale)
        return self.layout.remote(self.rank, *self._target(op, span), start, scale)

    def _switch(self, op: PlanOperation, span: ChunkSpan, offset: int, scale: int = 1) -> tuple[Range, ...]:
        """Return where the bytes of a switch channel's span start, one range for each GPU of the channel."""
        buffer, ranks = self.gpu.switches[self.block.channels["switch"][span.number]]
        start = self._start(op, span, offset, scale)
        return tuple(self.layout.remote(self.rank, rank, buffer, start, scale) for rank in ranks)

    def _reused_source(self, op: PlanOperation, k: int, offset: int) -> Range:
        """Return source k of a ``re``. By a fault of the executor, iterations shift it like destination k."""
        span, number = op.srcs[k], op.dsts[k].number if k < len(op.dsts) else 0
        start = self._start(op, span, 0) + self.layout.shifted(self.rank, "ios"[number] if number < 3 else "i", offset)
        return self.layout.local(self.rank, span.buffer, start)
