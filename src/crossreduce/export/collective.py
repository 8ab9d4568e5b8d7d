"""Which of NCCL's collectives a schedule is, and where its chunks lie in that collective's buffers.

In: a ``Schedule``.  Out: a ``Collective``, which the exports write down in their own formats.

Ranks are positions in the schedule's devices. The buffers are cut into equal units, as many as the shares need;
a block is a run of units that moves as one. An export reads a rank's part where the caller put it, writes a
result where the caller wants it, and keeps everything else in scratch memory, so that no input is overwritten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

from ..errors import PlanError, message
from ..schedule.schedule import Chunk, Schedule, Step
from ..schedule.verify import verify

KINDS: Final = ("allreduce", "reduce", "broadcast", "reducescatter", "allgather")


class Place(NamedTuple):
    """Where a block lies: in the input ("i"), the output ("o") or the scratch buffer ("s"), from which unit on."""

    buffer: str
    offset: int


class Block(NamedTuple):
    """Units of a chunk that move together: where they begin in the collective's full buffer, and how many."""

    chunk: int
    offset: int
    size: int


@dataclass(frozen=True)
class Collective:
    """A schedule as one of NCCL's collectives.

    Args:
      kind: one of ``KINDS``, in NCCL's spelling.
      root: the rank that gets a reduction or gives a broadcast, else ``None``.
      ranks: how many.
      units: into how many equal parts the full buffer (the larger one) is cut.
      blocks: the chunks that hold anything, in the schedule's order, cut to the export's largest size.
      steps: what has to be done, one after the other; needless steps are gone.
      sources: for each chunk of the schedule, who contributes.
      destinations: for each chunk, who needs its result.
    """

    kind: str
    root: int | None
    ranks: int
    units: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    sources: tuple[frozenset[int], ...]
    destinations: tuple[frozenset[int], ...]

    @property
    def inputs(self) -> int:
        """Units of each rank's input buffer."""
        return self.units // self.ranks if self.kind == "allgather" else self.units

    @property
    def outputs(self) -> int:
        """Units of each rank's output buffer."""
        return self.units // self.ranks if self.kind == "reducescatter" else self.units

    def input(self, rank: int, block: Block) -> Place | None:
        """Return where a rank's own part of a block lies, or ``None`` where it contributes nothing."""
        if rank not in self.sources[block.chunk]:
            return None
        return Place("i", block.offset - rank * self.inputs if self.kind == "allgather" else block.offset)

    def output(self, rank: int, block: Block) -> Place | None:
        """Return where a rank wants a block's result, or ``None`` where it does not need it."""
        if rank not in self.destinations[block.chunk]:
            return None
        return Place("o", block.offset - rank * self.outputs if self.kind == "reducescatter" else block.offset)


def collective(schedule: Schedule, largest: int | None = None) -> Collective:
    """Find which of NCCL's collectives a schedule is, and lay its chunks out in that one's buffers.

    A reduce-scatter's chunks are put into their destination's part of the buffer, an all-gather's into their
    source's, in the schedule's order.

    Args:
      schedule: any that ``verify`` accepts.
      largest: the most units of a block; ``None``: no limit.
    Raises:
      ScheduleError: the schedule is wrong.
      PlanError: it is none of the five collectives, with the reason.

    >>> from crossreduce.planning import ring
    >>> made = collective(ring(["cpu:0", "cpu:1", "cpu:2"]))
    >>> made.kind, made.units, made.blocks[1]
    ('allreduce', 3, Block(chunk=1, offset=1, size=1))
    """
    verify(schedule)
    n = len(schedule.devices)
    if n == 1:
        raise PlanError(message("one device has nobody to send to.", schedule.head, "two devices or more"))
    chunks = [(number, chunk) for number, chunk in enumerate(schedule.chunks) if chunk.share]
    kind, root = _kind(schedule, [chunk for _, chunk in chunks])
    units = math.lcm(*(chunk.share.denominator for _, chunk in chunks))
    if kind in ("reducescatter", "allgather"):  # a chunk lies in the part of its destination or source

        def owner(chunk: Chunk) -> int:
            return (chunk.sources if kind == "allgather" else chunk.destinations)[0]

        _check_equal_parts(schedule, kind, [(owner(chunk), chunk.share) for _, chunk in chunks])
        chunks.sort(key=lambda entry: owner(entry[1]))
    blocks, start = [], 0
    for number, chunk in chunks:
        end = start + int(chunk.share * units)
        cuts = range(start, end, largest or units)
        blocks += [Block(number, cut, stop - cut) for cut, stop in pairwise([*cuts, end])]
        start = end
    blocks.sort(key=lambda block: (block.chunk, block.offset))
    return Collective(
        kind,
        root,
        n,
        units,
        tuple(blocks),
        needed(schedule),
        tuple(frozenset(chunk.sources) for chunk in schedule.chunks),
        tuple(frozenset(chunk.destinations) for chunk in schedule.chunks),
    )


def needed(schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps that some destination's result depends on, in an order in which they can run one by one.

    >>> from crossreduce.planning import direct
    >>> len(needed(direct(["cpu:0", "cpu:1"])))
    4
    """
    wanted = {(c, dst) for c, chunk in enumerate(schedule.chunks) if chunk.share for dst in chunk.destinations}
    kept = []
    for steps in reversed(schedule.rounds):
        for step in reversed(steps):
            if (step.chunk, step.dst) in wanted and step.srcs != (step.dst,):
                wanted.remove((step.chunk, step.dst))
                wanted.update((step.chunk, src) for src in step.srcs)
                kept.append(step)
    return tuple(reversed(kept))


def _kind(schedule: Schedule, chunks: list[Chunk]) -> tuple[str, int | None]:
    everyone = tuple(range(len(schedule.devices)))
    sources = {tuple(sorted(chunk.sources)) for chunk in chunks}
    destinations = {tuple(sorted(chunk.destinations)) for chunk in chunks}
    gives, takes = sources == {everyone}, destinations == {everyone}
    if gives and takes:
        return "allreduce", None
    if gives and all(len(ends) == 1 for ends in destinations):
        return ("reduce", min(destinations)[0]) if len(destinations) == 1 else ("reducescatter", None)
    if takes and all(len(starts) == 1 for starts in sources):
        return ("broadcast", min(sources)[0]) if len(sources) == 1 else ("allgather", None)
    idle = set(everyone) - {rank for ranks in sources | destinations for rank in ranks}
    if idle:
        raise PlanError(
            message(
                "every rank takes part in one of NCCL's collectives, but a device neither gives nor gets anything.",
                ", ".join(schedule.devices[rank] for rank in sorted(idle)),
                "a plan for the other devices only",
            )
        )
    raise PlanError(
        message(
            "NCCL's collectives have all ranks as sources, as destinations, or both, for every chunk.",
            f"{schedule.head}: {len(sources)} sets of sources, {len(destinations)} sets of destinations",
            "all devices as sources or as destinations",
        )
    )


def _check_equal_parts(schedule: Schedule, kind: str, owned: list[tuple[int, Fraction]]) -> None:
    n = len(schedule.devices)
    for rank in range(n):
        part = sum(share for owner, share in owned if owner == rank)
        if part * n != 1:
            raise PlanError(
                message(
                    f"every rank has the same part of the buffer in NCCL's {kind}.",
                    f"{schedule.devices[rank]} has {part} of it, {n} ranks",
                    f"chunks of {schedule.devices[rank]} that add up to 1/{n}",
                )
            )
