"""Find limits of MSCCL++'s executor that a plan exceeds, and faults of the executor that affect the plan.

Source: src/core/include/{execution_common,execution_kernel}.hpp and src/core/executor/{execution_plan,executor}.cc in
github.com/microsoft/mscclpp; the numbers of multiprocessors are those of NVIDIA's specifications.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .format import MscclppPlan, PlanOperation
from .layout import WORD, all_operations, least_divisible, message_chunks

MOST_OPERATIONS: Final = 64  # MAX_OPERATION, those in pipelines included
MOST_CHANNELS: Final = 16  # MAX_CHANNEL, of each type and threadblock; also the limit of remote buffers
MOST_AT_ONCE: Final = 8  # MAX_CHANNEL_PER_OPERATION
MOST_BUFFERS: Final = 10  # MAX_LOCAL_BUFFER_PER_OPERATION + MAX_CHANNEL_PER_OPERATION: of an operation, on each side
MOST_BARRIERS: Final = 16  # MAX_DEVICE_SYNCERS
MOST_SEMAPHORES: Final = 16  # MAX_DEVICE_SEMAPHORES, of an operation
REGISTERS: Final = 1024  # threads whose registers fit into a multiprocessor: __launch_bounds__(1024, 1) of the kernel
MOST_RESIDENT: Final = 4  # threadblocks whose plans, of 12,272 bytes each, fit into a multiprocessor's shared memory
MULTIPROCESSORS: Final = {"V100": 80, "MI250X (one die)": 110, "A100": 108, "H100": 132, "B200": 148, "MI300X": 304}


def broken_limits(plan: MscclppPlan) -> Iterator[str]:
    """Yield, in words, the limits that a plan exceeds, and remarks about running it."""
    for rank, gpu in enumerate(plan.gpus):
        for number, block in enumerate(gpu.threadblocks):
            in_pipelines = sum(len(op.operations) for op in block.operations)
            counts = {
                "operations": (len(block.operations) + in_pipelines, MOST_OPERATIONS),
                **{f"{kind} channels": (len(ids), MOST_CHANNELS) for kind, ids in block.channels.items()},
                **{f"remote buffers ({kind})": (len(ids), MOST_CHANNELS) for kind, ids in block.buffers.items()},
            }
            for what, (count, most) in counts.items():
                if count > most:
                    yield f"the executor allows {most} {what} per threadblock, gpu {rank}, tb {number} has {count}"
    operations = all_operations(plan)
    for what, most, count in (
        ("channels of an operation", MOST_AT_ONCE, max((len(op.channels) for op in operations), default=0)),
        ("sources of an operation", MOST_BUFFERS, max((len(op.srcs) for op in operations), default=0)),
        ("destinations of an operation", MOST_BUFFERS, max((len(op.dsts) for op in operations), default=0)),
        ("barriers of a GPU", MOST_BARRIERS, max((op.barrier[0] for op in operations), default=-1) + 1),
        ("semaphores of an operation", MOST_SEMAPHORES, max((len(op.semaphores) for op in operations), default=0)),
    ):
        if count > most:
            yield f"the executor allows {most} {what}, the plan has {count}"
    yield from _residency(plan)
    yield from _sizes(plan)
    yield from _executor_faults(plan, operations)


def resident(threads: int) -> int:
    """Return the number of threadblocks that a multiprocessor runs at the same time, given their number of threads.

    >>> resident(1024), resident(512), resident(340), resident(32)
    (1, 2, 2, 4)
    """
    warps = -(-threads // 32)
    return min(MOST_RESIDENT, REGISTERS // (32 * warps))


def _residency(plan: MscclppPlan) -> Iterator[str]:
    """Yield a note with the types of GPUs that cannot run all threadblocks of the plan at the same time."""
    most, each = max(len(gpu.threadblocks) for gpu in plan.gpus), resident(plan.threads)
    few = [f"{name}: {count}" for name, count in MULTIPROCESSORS.items() if count * each < most]
    if few:
        text = f"{most} threadblocks of a GPU must run at the same time, {each} per multiprocessor"
        yield f"{text}; these GPUs have too few multiprocessors: {', '.join(few)}"


def _sizes(plan: MscclppPlan) -> Iterator[str]:
    """Yield notes on sizes of messages for which the executor leaves wrong results."""
    if plan.alignment % WORD:
        yield f"only chunks of multiples of {WORD} bytes are right: the executor handles the rest of a word wrongly"
    least = least_divisible(plan) * message_chunks(plan)
    if max(plan.min_bytes, message_chunks(plan) * plan.alignment) < least:
        text = "have fewer words than a group has threadblocks, which the executor divides wrongly"
        yield f"chunks of messages of less than {least} bytes {text}: set min_message_size"


def _executor_faults(plan: MscclppPlan, operations: list[PlanOperation]) -> Iterator[str]:
    """Yield notes on operations that the executor runs in another way than their names suggest."""
    names = {op.name for op in operations}
    if switched := sorted(names & {"glres", "gstore", "gstorepkt"}):
        yield f"{', '.join(switched)}: switch channels run on NVIDIA GPUs with NVLink switches, from H100 on"
    if "pwsf" in names:
        text = "the executor passes an address instead of the source's offset (handlePut)"
        yield f"pwsf: {text}; proved with the offset of the plan"
    if any(op.name in ("pws", "pwsf") and op.channel_type == "memory" for op in operations):
        yield "pws and pwsf on memory channels send no signal"
    if any(op.name == "ppkt" and op.channel_type == "port" for op in operations):
        text = "the executor names local memory without its first number (handlePutPackets)"
        yield f"ppkt on port channels: {text}, so only the first plan of a process reads its own buffers"
    other = sorted({op.reduce_op for op in operations} - {"sum"})
    if other:
        yield f"the executor adds; it does not read reduce_op ({', '.join(other)[:100]})"
    if plan.double:
        yield "proved for calls of this plan in a row: other plans of the process also change which half they use"
