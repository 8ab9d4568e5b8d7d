"""Prove that an MSCCL++ execution plan, of any tool, computes its collective.

No GPU runs; contributions are counted (never, once, more than once), as in ``schedule/verify.py``. The operations have
the same effect as in the executor's kernel: see ``data_moves.py``, ``instructions.py`` and ``simulation.py``.

The size of a message determines the number of iterations of a pipeline, the parts into which groups of threadblocks
divide chunks, and the thread that processes each word. So plans are proved for a few sizes that represent all others:
the smallest one, odd and even multiples of the parts, and chunks of less than one, 1, 2, 3, and more than two units of
each pipeline. Iterations are alike, so a plan that is right for 1, 2 and 3 iterations is right for more.
"""

from __future__ import annotations

from dataclasses import dataclass

from .....errors import ScheduleError
from ...collective import require_integers
from ...proof import check_request, cut, prove_results, quoted_name, report_text
from ..format import MscclppPlan, read_mscclpp_json
from ..layout import (
    PlanLayout,
    all_operations,
    check_buffers,
    chunk_bytes,
    message_chunks,
    reuse_chunk,
    typical_chunks,
    unit_bytes,
)
from ..limits import broken_limits
from .simulation import PlanRun


@dataclass(frozen=True)
class MscclppReport:
    """The proved facts about a plan."""

    name: str
    collective: str
    root: int | None  # the destination of a reduce or the source of a broadcast, else None
    protocol: str
    ngpus: int  # the number of ranks
    chunks: int  # the number of equal parts of the full buffer
    threadblocks: int  # the largest number of threadblocks of a GPU
    operations: int  # the number of operations of all threadblocks of all GPUs
    inplace: bool  # whether it is right for calls in which input and output share memory, or for other calls
    unit: int  # the number that must divide the bytes of a message
    min_bytes: int
    max_bytes: int
    nbytes: tuple[int, ...]  # the messages for which the plan was run
    notes: tuple[str, ...]  # limits of the executor that the plan exceeds, and other facts for the user

    def __str__(self) -> str:
        counts = (
            f"{self.ngpus} GPUs, {self.chunks} chunks, {self.threadblocks} threadblocks per GPU, "
            f"{self.operations} operations, {self.protocol}"
        )
        sizes = f"proved with messages of {', '.join(map(str, self.nbytes))} bytes"
        mode = "in place" if self.inplace else "out of place"
        return report_text(self.collective, self.root, mode, [counts, sizes], self.notes)

    @property
    def sizes(self) -> str:
        """The messages for which the executor runs the plan, in words."""
        fit = f"messages whose number of bytes is a multiple of {self.unit}"
        if self.min_bytes:
            fit += f", at least {self.min_bytes}"
        if self.max_bytes < 2**64 - 1:
            fit += f", at most {self.max_bytes}"
        if self.unit & (self.unit - 1):
            fit += "; IT IS NOT A POWER OF TWO: the executor raises an error for others"
        return fit


def verify_mscclpp_json(text: str, *, root: int | None = None, nbytes: int | None = None) -> MscclppReport:
    """Prove that an MSCCL++ plan computes its collective, without deadlocks, races and unpaired signals.

    Args:
      text: the plan.
      root: the destination of a reduce or source of a broadcast. By default it is found: the format does not store it.
      nbytes: the size of the messages for which the plan is proved: the bytes of the output for an all-gather, and of
        the input otherwise. By default, these are a few sizes that represent all others.
    Returns:
      The facts about the plan, and notes on limits of the executor that it exceeds.
    Raises:
      ScheduleError: the plan is malformed or too large, has a deadlock, a race or an unpaired signal, reads memory that
        was never written, accesses bytes outside of a buffer, or leaves a wrong result. The message names the operation
        at fault, if there is one. Collectives other than all-reduce, reduce, reduce-scatter, broadcast, all-gather and
        all-to-all raise it, too.
      ArgumentError: the root is invalid, or the executor refuses messages of this size.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.formats.mscclpp import to_mscclpp_json
    >>> report = verify_mscclpp_json(to_mscclpp_json(ring(["cuda:0", "cuda:1"])))
    >>> print(str(report).splitlines()[0])
    allreduce, in place: right.
    >>> report.ngpus, report.sizes
    (2, 'messages whose number of bytes is a multiple of 32')
    """
    plan = read_mscclpp_json(text)
    require_integers(root=root, nbytes=nbytes)
    check_request(f"plan {quoted_name(plan.name)}", plan.collective, len(plan.gpus), root, "plan")
    check_buffers(plan)
    chunks = typical_chunks(plan) if nbytes is None else [chunk_bytes(plan, nbytes)]
    notes = list(broken_limits(plan))
    for chunk in reversed(chunks):  # largest first, so that a fault of all sizes is reported for a long message
        root = _prove(plan, chunk, root, notes)
    if nbytes is None and plan.reuse:
        chunks += _proved_with_reuse(plan, chunks[-1], root, notes)
    notes += _without_flushes(plan, chunks[-1], root)
    if root is not None:
        limit = f"the executor uses the plan for every root, but it is right only for {root}"
        notes.append(f"the format does not store a root: {limit}")
    blocks = [block for gpu in plan.gpus for block in gpu.threadblocks]
    counts = (
        message_chunks(plan),
        max(len(gpu.threadblocks) for gpu in plan.gpus),
        sum(len(block.operations) + sum(len(op.operations) for op in block.operations) for block in blocks),
    )
    limits = unit_bytes(plan), plan.min_bytes, plan.max_bytes
    sizes, unique = tuple(PlanLayout(plan, chunk).nbytes for chunk in chunks), tuple(dict.fromkeys(notes))
    facts = plan.name, plan.collective, root, plan.protocol, len(plan.gpus)
    return MscclppReport(*facts, *counts, plan.inplace, *limits, sizes, unique)


def _prove(plan: MscclppPlan, chunk: int, root: int | None, notes: list[str]) -> int | None:
    """Prove a plan for messages whose chunks have ``chunk`` bytes. Return the root of the collective, if it has one."""

    def run(sources: range) -> PlanRun:
        simulation = PlanRun(plan, chunk, sources).run()
        notes.extend(simulation.notes)
        return simulation

    ranks = range(len(plan.gpus))
    return prove_results(f"plan {quoted_name(plan.name)}", plan.collective, ranks, root, run)


def _short(error: ScheduleError) -> str:
    return cut(str(error).splitlines()[0], 300)


def _without_flushes(plan: MscclppPlan, chunk: int, root: int | None) -> list[str]:
    """Return a note if a plan is right only with flushes that wait, since in the executor flushes do nothing."""
    if not any(op.name == "flush" for op in all_operations(plan)):
        return []
    sources = range(len(plan.gpus)) if plan.collective != "broadcast" or root is None else range(root, root + 1)
    try:
        PlanRun(plan, chunk, sources, flushes=False).run()
    except ScheduleError as error:
        reason = "the executor's handleFlush takes the number of channels from dst_buff, which they do not have"
        return [f"the plan needs its flushes, but flushes do nothing ({reason}). Without them: {_short(error)}"]
    return []


def _proved_with_reuse(plan: MscclppPlan, largest: int, root: int | None, notes: list[str]) -> list[int]:
    """Prove a plan for chunks longer than their share of scratch memory. Return their size, or add a note."""
    chunk = reuse_chunk(plan)
    if chunk is None or chunk <= largest:
        return []
    try:
        _prove(plan, chunk, root, notes)
    except ScheduleError as error:
        limit = PlanLayout(plan, chunk).share(0) * message_chunks(plan)
        notes.append(f"not proved for messages of more than {limit} bytes (max_message_size): {_short(error)}")
        return []
    return [chunk]
