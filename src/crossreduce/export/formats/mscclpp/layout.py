"""Compute where a plan's chunks are in memory for a message of one size, and choose sizes that represent all others.

Input: a ``MscclppPlan`` and the bytes of a chunk. Output: ranges of memory areas.

The executor's arithmetic, in ``getOffset``, ``calcOffset`` and ``calScratchBufferSize`` of execution_plan.cc and in
``setupRegisteredMemories`` of executor.cc:

- Chunks have equal sizes, which must be multiples of ``buffer_alignment``. A group of n threadblocks divides an
  operation's bytes into n parts. Their sizes are multiples of ``buffer_alignment``, too, and the larger ones are first.
- In place, the input of an all-gather is a part of the output, and the output of a reduce-scatter a part of the input.
  A GPU that accesses such a part of another GPU adds the offset of its *own* part, and a port channel reads its own
  GPU's buffers at their start. So plans should name the larger buffer.
- With two scratch buffers, local operations and packets use the second half in even calls. Remote accesses without
  packets, port channels without packets, and switch channels use the first half in all calls.
- Packets take twice the bytes of their data, at twice the offset. With ``reuse_resources``, each chunk has an equal
  share of 64 MiB of scratch memory. A longer chunk uses its share repeatedly.

Source: src/core/executor/{execution_plan.cc,executor.cc}, src/core/include/{execution_common.hpp,execution_kernel.hpp}
in github.com/microsoft/mscclpp.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ....errors import ArgumentError, ScheduleError, shown
from ..proof import quoted_name
from .format import MscclppPlan, PlanOperation, read_mscclpp_json

WORD: Final = 16  # bytes; operations on data process such words, and handle the remaining bytes wrongly
REUSED_SCRATCH: Final = 1 << 26  # PREDFINED_SCRATCH_SIZE, bytes
MOST_SIZES: Final = 8  # the most sizes of chunks that are verified, spread over all sizes that fit

Area = tuple[int, str]  # a GPU and one of its buffers: "i", "o", "s", or "io" for input and output in place


class Range(NamedTuple):
    """The start of bytes in an area."""

    area: Area
    start: int
    scale: int = 1  # 2 for packets, which take twice the bytes of their data


class PlanLayout:
    """The memory of a plan whose chunks have ``chunk`` bytes. ``half`` (0, 1): which of two scratch buffers is used."""

    def __init__(self, plan: MscclppPlan, chunk: int, half: int = 0) -> None:
        self.plan, self.chunk = plan, chunk
        gpu = plan.gpus[0]
        self.input, self.output = chunk * gpu.inputs, chunk * gpu.outputs
        self.scratch = [self._scratch_bytes(gpu.scratch) for gpu in plan.gpus]
        self.second_half = [half * size // 2 if plan.double else 0 for size in self.scratch]

    def _scratch_bytes(self, chunks: int) -> int:
        """Return the size in bytes of a scratch buffer of ``chunks`` chunks (calScratchBufferSize)."""
        if self.plan.reuse and chunks:
            return REUSED_SCRATCH << int(self.plan.double)  # half of the default buffer of 128 MiB, or all of it
        size = self.chunk * chunks * (2 if self.plan.protocol == "LL" else 1) * (2 if self.plan.double else 1)
        return -(-size // self.plan.alignment) * self.plan.alignment

    def share(self, rank: int) -> int:
        """Return the bytes after which a chunk of a reused scratch buffer is used again (calMaxScratchChunkSize)."""
        chunks = max(1, self.plan.gpus[rank].scratch)
        size = -(-(REUSED_SCRATCH >> int(self.plan.double)) // chunks)
        return -(-size // self.plan.alignment) * self.plan.alignment

    def size(self, area: Area) -> int:
        """Return the number of bytes of an area."""
        rank, name = area
        sizes = {"i": self.input, "o": self.output, "s": self.scratch[rank], "io": max(self.input, self.output)}
        return sizes[name]

    def offset(self, rank: int, buffer: str, chunk: int) -> int:
        """Return the offset of a chunk in a buffer (getOffset)."""
        if buffer == "s" and self.plan.reuse and self.share(rank) < self.chunk:
            return chunk * self.share(rank)
        return chunk * self.chunk

    def shifted(self, rank: int, buffer: str, offset: int) -> int:
        """Return by how many bytes a pipeline's iteration that starts at ``offset`` shifts its accesses to a buffer."""
        return offset % self.share(rank) if buffer == "s" and self.plan.reuse else offset

    def part(self, size: int, group: tuple[int, int]) -> tuple[int, int]:
        """Return the offset and size of one part of ``size`` bytes. ``group`` is (k, n), and stands for part k of n.

        This repeats the executor's calcOffset and calcSize, with their fault: if there are fewer units of ``alignment``
        bytes than parts, the remainders are wrong and sizes can be huge.
        """
        (k, n), units = group, size // self.plan.alignment
        if n == 1 or not units:
            return 0, size
        starts = [j * (units // n) + min(j % units, units % n) for j in (k, k + 1)]
        return starts[0] * self.plan.alignment, (starts[1] - starts[0]) * self.plan.alignment % (1 << 32)

    def local(self, rank: int, buffer: str, offset: int, scale: int = 1) -> Range:
        """Return the bytes that a GPU accesses at an offset of its own buffer."""
        base = self.second_half[rank] if buffer == "s" else self._own_part(rank, buffer)
        return Range(self._area(rank, buffer), base + scale * offset, scale)

    def remote(self, accessor: int, rank: int, buffer: str, offset: int, scale: int = 1) -> Range:
        """Return the bytes that one GPU accesses at an offset of another GPU's buffer."""
        base = self.second_half[accessor] if scale == 2 else 0
        return Range(self._area(rank, buffer), base + scale * (offset + self._own_part(accessor, buffer)), scale)

    def port_source(self, rank: int, buffer: str, offset: int) -> Range:
        """Return the bytes that a port channel reads at an offset of its own GPU's buffer."""
        return Range(self._area(rank, buffer), offset)

    def _area(self, rank: int, buffer: str) -> Area:
        return rank, "io" if self.plan.inplace and buffer in "io" else buffer

    def _own_part(self, rank: int, buffer: str) -> int:
        """Return the offset of a rank's part in the larger buffer if, in place, ``buffer`` is this part, or 0."""
        parts = {"allgather": ("i", self.input), "reducescatter": ("o", self.output)}
        smaller, size = parts.get(self.plan.collective, ("", 0))
        return rank * size if self.plan.inplace and buffer == smaller else 0

    @property
    def nbytes(self) -> int:
        """The size of the message: the bytes of the output for an all-gather, and of the input otherwise."""
        return self.output if self.plan.collective == "allgather" else self.input


def check_buffers(plan: MscclppPlan) -> None:
    """Raise a ScheduleError unless the sizes of the buffers are those of the plan's collective."""
    ranks, first = len(plan.gpus), plan.gpus[0]
    at = f"plan {quoted_name(plan.name)}"
    for rank, gpu in enumerate(plan.gpus):
        if (gpu.inputs, gpu.outputs) != (first.inputs, first.outputs):
            given = f"gpu {rank}: {gpu.inputs} and {gpu.outputs} chunks, gpu 0: {first.inputs} and {first.outputs}"
            raise ScheduleError.of(f"{at}: all GPUs must have buffers of the same size.", given)
    ratio = {"allgather": (1, ranks), "reducescatter": (ranks, 1)}.get(plan.collective, (1, 1))
    if not first.inputs or first.inputs * ratio[1] != first.outputs * ratio[0]:
        problem = f"{at}: input and output have wrong numbers of chunks for {plan.collective} of {ranks} GPUs."
        raise ScheduleError.of(problem, f"input_chunks={first.inputs}, output_chunks={first.outputs}")
    if plan.collective == "alltoall" and first.inputs % ranks:
        problem = f"{at}: all ranks must have the same number of chunks in alltoall."
        raise ScheduleError.of(problem, f"{first.inputs} chunks, {ranks} ranks")


def message_chunks(plan: MscclppPlan) -> int:
    """Return the number of chunks of a message: of the output for an all-gather, and of the input otherwise."""
    return plan.gpus[0].outputs if plan.collective == "allgather" else plan.gpus[0].inputs


def bytes_of_json(text: str) -> int:
    """Return the number of bytes of which a message's size must be a multiple, given the text of a plan.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.formats.mscclpp import to_mscclpp_json
    >>> bytes_of_json(to_mscclpp_json(ring(["cuda:0", "cuda:1"])))
    32
    """
    return unit_bytes(read_mscclpp_json(text))


def unit_bytes(plan: MscclppPlan) -> int:
    """Return the number of bytes of which a message's size must be a multiple (checkMessageSize)."""
    return plan.alignment * message_chunks(plan)


def chunk_bytes(plan: MscclppPlan, nbytes: int) -> int:
    """Return the bytes of a chunk of a message. Raise an ArgumentError if the executor refuses such a message."""
    unit = unit_bytes(plan)
    if nbytes < 1 or nbytes % unit or not plan.min_bytes <= nbytes <= plan.max_bytes:
        limits = f"from {plan.min_bytes} to {plan.max_bytes}" if plan.max_bytes < 2**64 - 1 else "of any size"
        if plan.min_bytes and plan.max_bytes == 2**64 - 1:
            limits = f"of at least {plan.min_bytes}"
        remedy = f"a multiple of {unit} bytes; the plan is for messages {limits}"
        raise ArgumentError.of("the plan does not run for a message of this size.", shown(nbytes), remedy)
    return nbytes // message_chunks(plan)


def typical_chunks(plan: MscclppPlan) -> list[int]:
    """Return sizes of chunks that represent all messages: see ``verifier.py``. Raise a ScheduleError if none fits."""
    step, count = math.lcm(plan.alignment, WORD), message_chunks(plan)
    least = max(step, -(-plan.min_bytes // (count * step)) * step, -(-least_divisible(plan) // step) * step)
    most = plan.max_bytes // count // step * step
    if least > most:
        given = f"{count} chunks of multiples of {step} bytes, {plan.min_bytes} to {plan.max_bytes} bytes"
        raise ScheduleError.of(f"plan {quoted_name(plan.name)}: no message has a valid size.", given)
    operations = list(all_operations(plan))
    parts = math.lcm(*{operation.group[1] for operation in operations})
    # The smallest chunk, a chunk with 3 more steps for each part, and the next larger size of both.
    chunks = [least, least + step, least + 3 * parts * step, least + (3 * parts + 1) * step]
    for unit, chunk_count in sorted({(op.unit, op.chunks) for op in operations if op.unit and op.chunks}):
        start = least - least % unit if least > unit else 0
        whole = [start + iterations * unit // chunk_count // step * step for iterations in (1, 2, 3)]
        chunks += [*whole, whole[1] + step, max(step, whole[0] - step)]  # more than 2 iterations, less than 1
    fitting = sorted({chunk for chunk in chunks if least <= chunk <= most})
    if len(fitting) > MOST_SIZES:
        return [fitting[k * len(fitting) // MOST_SIZES] for k in range(MOST_SIZES)]
    return fitting


def reuse_chunk(plan: MscclppPlan) -> int | None:
    """Return the bytes of a chunk that uses its share of a reused scratch buffer more than once.

    The result is ``None`` if the plan has no scratch buffer, or is not for messages of this size.
    """
    step = math.lcm(plan.alignment, WORD)
    shares = [PlanLayout(plan, step).share(rank) for rank, gpu in enumerate(plan.gpus) if gpu.scratch]
    chunk = -(-2 * max(shares, default=0) // step) * step + step
    return chunk if shares and chunk * message_chunks(plan) <= plan.max_bytes else None


def least_divisible(plan: MscclppPlan) -> int:
    """Return the bytes of the smallest chunks that the groups of threadblocks divide correctly (see ``part``)."""
    spans = [(op.group[1], span.size) for op in all_operations(plan) for span in op.srcs + op.dsts if op.group[1] > 1]
    return max((-(-n * plan.alignment // size) for n, size in spans if size), default=1)


def all_operations(plan: MscclppPlan) -> list[PlanOperation]:
    """Return the operations of all threadblocks, including those in pipelines."""
    outer = [op for gpu in plan.gpus for block in gpu.threadblocks for op in block.operations]
    return outer + [op for pipeline in outer for op in pipeline.operations]
