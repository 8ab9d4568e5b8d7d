"""A schedule as one of NCCL's collectives: its kind, and the ranges of the ranks' buffers that its chunks occupy.

Ranks are positions in the schedule's devices. Buffers are divided into equal units. Their number is the least with
which every chunk's share is a whole number of units. A block consists of neighbouring units that one operation moves.
``register_allocation.py`` determines where values are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...errors import ArgumentError, PlanError, shown
from ...lowering import Program, lower
from ...schedule import Chunk, Schedule


class Location(NamedTuple):
    """The start of a range in a rank's memory."""

    buffer: str  # "i" for input, "o" for output, "s" for scratch
    offset: int  # in units


class Block(NamedTuple):
    """Neighbouring units of a chunk that move together."""

    chunk: int
    offset: int  # of the first unit in the full buffer
    size: int  # the number of units


@dataclass(frozen=True)
class Collective:
    """A schedule as one of NCCL's collectives."""

    kind: str  # allreduce, reduce, broadcast, reducescatter or allgather
    root: int | None  # the destination of a reduce or the source of a broadcast
    units: int  # the number of equal parts of the full buffer, which is the larger of input and output
    blocks: tuple[Block, ...]  # the chunks with a share above 0, in the schedule's order, or parts of them
    program: Program

    @property
    def ranks(self) -> int:
        return len(self.program.devices)

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk the rank of each of its values."""
        return tuple(chunk.devices for chunk in self.program.chunks)

    @property
    def inputs(self) -> int:
        """The number of units of each rank's input buffer."""
        return self.units // self.ranks if self.kind == "allgather" else self.units

    @property
    def outputs(self) -> int:
        """The number of units of each rank's output buffer."""
        return self.units // self.ranks if self.kind == "reducescatter" else self.units

    def input(self, rank: int, block: Block) -> Location:
        """Return the location of a rank's contribution to a block. The rank is one of the chunk's sources."""
        return Location("i", block.offset - rank * self.inputs if self.kind == "allgather" else block.offset)

    def output(self, rank: int, block: Block) -> Location:
        """Return the location of a block's result at a rank. The rank is one of the chunk's destinations."""
        return Location("o", block.offset - rank * self.outputs if self.kind == "reducescatter" else block.offset)

    def in_place(self, rank: int, location: Location) -> Location:
        """Return the location in the larger buffer, input or output, that is the same memory in calls in place.

        >>> from crossreduce.planning import ring
        >>> collective(ring(["cpu:0", "cpu:1"])).in_place(1, Location("o", 1))
        Location(buffer='i', offset=1)
        """
        buffer, offset = location
        if self.kind == "allgather" and buffer == "i":
            return Location("o", offset + rank * self.inputs)
        if self.kind != "allgather" and buffer == "o":
            return Location("i", offset + (rank * self.outputs if self.kind == "reducescatter" else 0))
        return location


def require_integers(**numbers: object) -> None:
    """Raise an ArgumentError unless each number is an int or ``None``."""
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise ArgumentError.of(f"{name} must be an integer.", shown(number), f"an int for {name}")


def collective(schedule: Schedule) -> Collective:
    """Return a schedule as one of NCCL's collectives, with one block per chunk.

    Chunks of a reduce-scatter are placed in the part of their destination, chunks of an all-gather in their source's.

    Raises:
      PlanError: there is only one device, the schedule is not one of the five collectives, or the ranks' parts of the
        buffer in a reduce-scatter or all-gather are not equal.
      ScheduleError: ``verify`` rejects the schedule.

    >>> from crossreduce.planning import ring
    >>> all_reduce = collective(ring(["cpu:0", "cpu:1", "cpu:2"]))
    >>> all_reduce.kind, all_reduce.units, all_reduce.blocks[1]
    ('allreduce', 3, Block(chunk=1, offset=1, size=1))
    """
    program = lower(schedule)
    if len(program.devices) == 1:
        raise PlanError.of("a collective of one device has no transfers.", schedule.head, "two devices or more")
    chunks = [(number, chunk) for number, chunk in enumerate(schedule.chunks) if chunk.share]
    kind, root = _kind(schedule, [chunk for _, chunk in chunks])
    units = math.lcm(*(chunk.share.denominator for _, chunk in chunks))
    if kind in ("reducescatter", "allgather"):
        owners = {number: chunk.sources if kind == "allgather" else chunk.destinations for number, chunk in chunks}
        chunks.sort(key=lambda entry: owners[entry[0]])
        for rank, device in enumerate(schedule.devices):
            part = sum(chunk.share for number, chunk in chunks if owners[number] == (rank,))
            if part * len(schedule.devices) != 1:
                problem = f"every rank must have an equal part of the buffer in NCCL's {kind}."
                equal = f"1/{len(schedule.devices)}"
                raise PlanError.of(problem, f"{device} has {part} of it", f"chunks of {device} that add up to {equal}")
    blocks, start = [], 0
    for number, chunk in chunks:
        end = start + int(chunk.share * units)
        blocks.append(Block(number, start, end - start))
        start = end
    blocks.sort(key=lambda block: block.chunk)
    return Collective(kind, root, units, tuple(blocks), program)


def _kind(schedule: Schedule, chunks: list[Chunk]) -> tuple[str, int | None]:
    """Return the kind of a collective and its root, or ``None``. ``chunks`` are those with a share above 0."""
    everyone = tuple(range(len(schedule.devices)))
    sources = {tuple(sorted(chunk.sources)) for chunk in chunks}
    destinations = {tuple(sorted(chunk.destinations)) for chunk in chunks}
    from_all, to_all = sources == {everyone}, destinations == {everyone}
    if from_all and to_all:
        return "allreduce", None
    if from_all and all(len(ends) == 1 for ends in destinations):
        return ("reduce", min(destinations)[0]) if len(destinations) == 1 else ("reducescatter", None)
    if to_all and all(len(starts) == 1 for starts in sources):
        return ("broadcast", min(sources)[0]) if len(sources) == 1 else ("allgather", None)
    idle = set(everyone) - {rank for ranks in sources | destinations for rank in ranks}
    if idle:
        problem = "in NCCL's collectives every rank must be a source or a destination, but some nodes are neither."
        given = ", ".join(schedule.devices[rank] for rank in sorted(idle))
        remedy = "a plan that does not need these nodes; for a switch: a machine without in_network"
        raise PlanError.of(problem, given, remedy)
    counts = (" or ".join(map(str, sorted({len(group) for group in groups}))) for groups in (sources, destinations))
    given = "{}: a chunk has {} sources and {} destinations, of {} ranks".format(schedule.head, *counts, len(everyone))
    remedy = "all devices as sources of every chunk and all or one as destinations of every chunk, or the reverse"
    raise PlanError.of("no collective of NCCL has these sources and destinations.", given, remedy)
