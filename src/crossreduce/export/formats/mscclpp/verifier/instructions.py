"""The operations of an MSCCL++ plan as the executor's kernel runs them, for a message of one size.

Input: a ``MscclppPlan`` and a ``PlanLayout``. Output: for each threadblock, a list of instructions that move bytes or
synchronise threads. Pipelines are unrolled.

- All threads of a threadblock run the operations in order, and wait for each other only at a ``nop`` and a
  ``barrier`` (``__syncthreads``), and before the puts of an ``rppkt`` on port channels. Thread k of a threadblock
  signals, waits and flushes on the k-th channel of an operation, and puts to its k-th port channel.
- ``pws`` and ``pwsf`` on memory channels send no signal.

Source: src/core/include/execution_kernel.hpp in github.com/microsoft/mscclpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from .....errors import ScheduleError
from ...proof import BUFFERS, TooLargeError, quoted_name
from ..format import MscclppPlan, PlanOperation
from ..layout import WORD, PlanLayout
from .data_moves import WHOLE, Move, MoveMaker

MOST_INSTRUCTIONS: Final = 1 << 17  # of a plan with unrolled pipelines; more take minutes
MOST_ITERATIONS: Final = (1 << 16) - 1  # the kernel counts iterations with 16 bits

ChannelEnd = tuple[str, int, int, int]  # type, rank, other rank, number among their channels of this type


class PlanInstruction(NamedTuple):
    """An instruction of a threadblock.

    Its kind is "move", "post" (a move that a port channel makes later), "sync" (of the threads of the threadblock),
    "barrier" (of threadblocks), "signal", "wait", "flush", "complete" (the flush in pwsf), "acquire" or "release".
    """

    kind: str
    operation: str  # the position of the operation in the threadblock, in words
    thread: int = -1  # the only thread that runs it, or -1 if all threads run it together
    move: Move | None = None
    channel: ChannelEnd | None = None  # the end at the GPU that runs it
    relaxed: bool = False  # whether a signal or wait does not make data visible
    number: int = -1  # of a barrier or semaphore
    meeting: int = 0  # for a barrier, how many threadblocks wait for each other


def channel_ends(plan: MscclppPlan) -> list[dict[tuple[str, int], ChannelEnd]]:
    """Return for each GPU the ends of its channels, by type and number.

    If rank a lists several channels of a type to rank b, the k-th one is the same channel as the k-th one to a that b
    lists. (The tags in setupConnections of executor.cc pair them.)
    """
    ends: list[dict[tuple[str, int], ChannelEnd]] = []
    for rank, gpu in enumerate(plan.gpus):
        ends.append({})
        for kind, peers in gpu.channels.items():
            seen: dict[int, int] = {}
            for number, peer in enumerate(peers):
                ends[rank][kind, number] = (kind, rank, peer, seen.get(peer, 0))
                seen[peer] = seen.get(peer, 0) + 1
    return ends


def instructions(plan: MscclppPlan, layout: PlanLayout) -> list[list[PlanInstruction]]:
    """Return the instructions of each threadblock, in the order of GPUs and threadblocks.

    Raises:
      ScheduleError: an operation accesses bytes outside of a buffer or parts of words, or there are more than
        ``MOST_INSTRUCTIONS`` instructions.
    """
    ends = channel_ends(plan)
    lists: list[list[PlanInstruction]] = []
    total = 0
    for rank, gpu in enumerate(plan.gpus):
        for block in range(len(gpu.threadblocks)):
            lists.append([])
            for instruction in _Unroller(plan, layout, rank, block, ends[rank]).instructions():
                lists[-1].append(instruction)
                total += 1
                if total > MOST_INSTRUCTIONS:
                    problem = f"plan {quoted_name(plan.name)}: the plan is too large to be verified."
                    remedy = f"up to {MOST_INSTRUCTIONS} operations, with all iterations of pipelines"
                    raise TooLargeError.of(problem, f"messages of {layout.nbytes} bytes", remedy)
    return lists


class _Unroller:
    """Makes the instructions of one threadblock."""

    def __init__(
        self, plan: MscclppPlan, layout: PlanLayout, rank: int, block: int, ends: dict[tuple[str, int], ChannelEnd]
    ) -> None:
        self.layout, self.ends = layout, ends
        self.here = f"plan {quoted_name(plan.name)}, gpu {rank}, tb {block}"
        self.block = plan.gpus[rank].threadblocks[block]
        self.maker = MoveMaker(plan, layout, rank, block)

    def instructions(self) -> Iterator[PlanInstruction]:
        """Yield the instructions. The instructions of a pipeline are repeated for each iteration."""
        for number, op in enumerate(self.block.operations):
            at = f"op {number} ({op.name})"
            if op.name != "pipeline":
                yield from self._operation(op, at, 0, WHOLE)
                continue
            for k in range(-(-op.chunks * self.layout.chunk // op.unit) & MOST_ITERATIONS):
                for position, inner in enumerate(op.operations):
                    place = f"{at}, iteration {k}, op {position} ({inner.name})"
                    yield from self._operation(inner, place, k * op.unit, op.unit)

    def _operation(self, op: PlanOperation, at: str, offset: int, unit: int) -> Iterator[PlanInstruction]:
        """Yield the instructions of one operation, or of its iteration of ``unit`` bytes from ``offset`` on."""
        if op.name == "nop":
            yield PlanInstruction("sync", at)
        elif op.name == "barrier":
            yield PlanInstruction("barrier", at, number=op.barrier[0], meeting=op.barrier[1])
        elif op.name in ("sem_acquire", "sem_release"):
            for thread, number in enumerate(op.semaphores):
                yield PlanInstruction(op.name[4:], at, thread, number=number)
        elif op.name in ("signal", "wait", "flush", "rlxsignal", "rlxwait"):
            relaxed = op.name.startswith("rlx") and op.channel_type == "memory"
            for thread, position in enumerate(op.channels):
                end = self._end(op.channel_type, position)
                yield PlanInstruction(op.name.removeprefix("rlx"), at, thread, channel=end, relaxed=relaxed)
        elif op.channel_type == "port":
            yield from self._port(op, at, offset, unit)
        else:
            for move in self.maker.moves(op, offset, unit):
                if move.size:
                    yield PlanInstruction("move", at, move=self._check_move(move, at))

    def _port(self, op: PlanOperation, at: str, offset: int, unit: int) -> Iterator[PlanInstruction]:
        """Yield the instructions of an operation on data that uses port channels."""
        if op.name == "rppkt":
            yield PlanInstruction("move", at, move=self._check_move(self.maker.packets_read(op), at))
            yield PlanInstruction("sync", at)
        for thread, move in enumerate(self.maker.posts(op, offset, unit)):
            end = self._end("port", op.channels[thread])
            if move.size:
                yield PlanInstruction("post", at, thread, move=self._check_move(move, at), channel=end)
            if op.name in ("pws", "pwsf"):
                yield PlanInstruction("signal", at, thread, channel=end)
            if op.name == "pwsf":
                yield PlanInstruction("complete", at, thread, channel=end)

    def _end(self, kind: str, position: int) -> ChannelEnd:
        return self.ends[kind, self.block.channels[kind][position]]

    def _check_move(self, move: Move, at: str) -> Move:
        """Return a move. Raise a ScheduleError unless it is within the buffers and consists of whole words."""
        for place in move.srcs + move.dsts:
            end, size = place.start + place.scale * move.size, self.layout.size(place.area)
            rank, name = place.area
            buffer = f"the {BUFFERS.get(name, 'input and output')} buffer of gpu {rank}"
            if end > size:
                text = f"accesses bytes {place.start} to {end - 1} of {buffer}, which has {size} bytes"
                raise ScheduleError(f"{self.here}, {at}: {text} (messages of {self.layout.nbytes} bytes).")
            if place.start % WORD or move.size % (WORD // place.scale):
                text = f"accesses {place.scale * move.size} bytes from byte {place.start} of {buffer}"
                rest = f"which are not multiples of {WORD}: the executor handles the rest of a word wrongly"
                raise ScheduleError(f"{self.here}, {at}: {text}, {rest}.")
        return move
