"""``Program``: a verified schedule in static single assignment, which every engine and every exporter consumes.

It stores no sizes, dtypes or arrays, so one program serves every size. ``Program.fused`` is for engines whose devices
share memory: it has no copies, and merges chains of combinations. ``Program.on`` is for engines whose devices exchange
messages: it lists the sends, receives and combinations of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..errors import ScheduleError
from ..kernels import FusedProgram
from ..schedule import Route
from ..schedule.schedule import many, spans
from .device_programs import ChunkEvents, DeviceProgram, PartInChunk, device_program
from .fusion import fuse
from .instructions import ChunkProgram, Numbered


class Transfer(NamedTuple):
    """A value of a chunk that moves from device ``src`` to device ``dst``."""

    chunk: int
    src: int
    dst: int
    through: tuple[str, ...] | None  # the nodes that the schedule routes it through, or None for the topology's route
    final: bool  # whether the value is fully reduced


@dataclass(frozen=True, eq=False)  # lower() is cached, so programs are compared by identity: a cheap cache key
class Program:
    """A verified schedule in static single assignment.

    ``devices`` are canonical names. A device's number is its position there. ``pieces`` is the number of pipelined
    pieces per chunk. Both, and the collective, the algorithm and the routes, are those of the schedule.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import one_device
    >>> print(lower(one_device(["cpu:0", "cpu:1"])))
    all_reduce one_device: 2 devices, 1 chunk, 2 instructions
      chunk 0: v2 on cpu:0 = v0 + v1 (final)
      chunk 0: v3 on cpu:1 = v2
    """

    collective: str
    algorithm: str
    devices: tuple[str, ...]
    chunks: Sequence[ChunkProgram]
    round_count: int
    pieces: int
    routes: tuple[Route, ...]

    @cached_property
    def by_round(self) -> tuple[tuple[Numbered, ...], ...]:
        """The instructions of each round, chunk by chunk. They read only inputs and values of earlier rounds."""
        rounds: list[list[Numbered]] = [[] for _ in range(self.round_count)]
        for c, chunk in enumerate(self.chunks):
            for value, instruction in enumerate(chunk.instructions, start=len(chunk.sources)):
                rounds[instruction.round].append(Numbered(c, value, instruction))
        return tuple(map(tuple, rounds))

    @cached_property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers of each round, chunk by chunk: every operand that is on another device."""
        places = [chunk.devices for chunk in self.chunks]
        kinds = [chunk.kinds for chunk in self.chunks]
        return tuple(
            tuple(
                Transfer(c, src, i.device, self.through(r, c, src, i.device), kinds[c][value] == "final")
                for c, _, i in instructions
                for value in i.operands
                if (src := places[c][value]) != i.device
            )
            for r, instructions in enumerate(self.by_round)
        )

    @cached_property
    def _through(self) -> dict[tuple[int, int, int, int | None], tuple[str, ...]]:
        """The nodes that each route passes, by chunk, source, destination and round: see ``Route``."""
        return {(route.chunk, route.src, route.dst, route.round): route.through for route in self.routes}

    def through(self, r: int, chunk: int, src: int, dst: int) -> tuple[str, ...] | None:
        """Return the nodes that a transfer passes in round ``r``, or ``None`` if it takes the topology's own route."""
        return self._through.get((chunk, src, dst, r), self._through.get((chunk, src, dst, None)))

    @cached_property
    def _moved(self) -> frozenset[tuple[int, int, int, int]]:
        """The (round, chunk, src, dst) of every transfer."""
        rounds = enumerate(self.transfers)
        return frozenset((r, move.chunk, move.src, move.dst) for r, transfers in rounds for move in transfers)

    def moves(self, r: int, chunk: int, src: int, dst: int) -> bool:
        """Return whether the program has this transfer of the schedule. It omits those that no destination needs."""
        return (r, chunk, src, dst) in self._moved

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sources and destinations of every chunk, or ``None`` if chunks differ in them."""
        ends = {(chunk.sources, chunk.destinations) for chunk in self.chunks}
        return ends.pop() if len(ends) == 1 else None

    def fused(self, chunk: int, results: int | None = None) -> FusedProgram:
        """Return the fused program of a chunk, for devices that share memory: see ``fusion.fuse``."""
        return fuse(self.chunks[chunk], results)

    def on(self, device: int) -> DeviceProgram:
        """Return the part of one device in the program, for engines whose devices exchange messages.

        Every read of another device's value is a message, as in the simulation.

        >>> from crossreduce.lowering import lower
        >>> from crossreduce.planning import direct
        >>> for stage in lower(direct(["cpu:0", "cpu:1"])).on(0).stages:
        ...     print(*stage)
        ((1, 1),) ((2, 1),) (Combination(made=3, operands=(0, 2), final=True),)
        ((3, 1),) ((4, 1),) ()
        """
        assert 0 <= device < len(self.devices), f"device {device} of {len(self.devices)}"
        return _on(self, device)

    @property
    def alike(self) -> dict[int, int]:
        """For one device of each group of devices whose programs differ only in device numbers, the group's size."""
        return dict.fromkeys(range(len(self.devices)), 1)

    @cached_property
    def chunk_events(self) -> list[ChunkEvents]:
        """The events of each chunk on every device."""
        return [ChunkEvents(chunk) for chunk in self.chunks]

    def part(self, device: int) -> DeviceProgram:
        """Compute the program of one device. ``on`` caches the results of this method."""
        parts = [PartInChunk(events, device, lambda other: other) for events in self.chunk_events]
        return device_program(self.round_count, parts)

    @property
    def shares(self) -> Sequence[Fraction]:
        """Each chunk's fraction of the buffer."""
        return [chunk.share for chunk in self.chunks]

    def require_uniform(self) -> None:
        """Raise a ScheduleError unless all chunks have the same ends, so that inputs and results are whole arrays."""
        if self.ends is None:
            problem = "only schedules whose chunks all have the same sources and destinations can run on whole arrays."
            given = f"{self.collective} by {self.algorithm}, {len(self.chunks)} chunks"
            raise ScheduleError.of(problem, given, "all_reduce, reduce or broadcast")

    def spans(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return each chunk's range of elements in a buffer of ``size`` elements: see ``Schedule.spans``."""
        return spans(self.shares, size)

    def __str__(self) -> str:
        count = sum(len(chunk.instructions) for chunk in self.chunks)
        counts = f"{len(self.devices)} devices, {many(len(self.chunks), 'chunk')}, {count} instructions"
        lines = [f"{self.collective} {self.algorithm}: {counts}"]
        for c, chunk in enumerate(self.chunks):
            for value, instruction in enumerate(chunk.instructions, start=len(chunk.sources)):
                operands = " + ".join(f"v{operand}" for operand in instruction.operands)
                final = " (final)" if instruction.final else ""
                lines.append(f"  chunk {c}: v{value} on {self.devices[instruction.device]} = {operands}{final}")
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def _on(program: Program, device: int) -> DeviceProgram:
    return program.part(device)


@lru_cache(maxsize=4096)
def element_ranges(program: Program, size: int) -> tuple[tuple[int, int, int], ...]:
    """Return ``(chunk, start, stop)`` for each chunk that has elements in a buffer of ``size`` elements.

    An empty buffer passes through chunk 0, so that its result gets the right dtype.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import direct
    >>> element_ranges(lower(direct(["cpu:0", "cpu:1", "cpu:2"])), 2)
    ((1, 0, 1), (2, 1, 2))
    """
    spans = enumerate(program.spans(size))
    return tuple((c, start, stop) for c, (start, stop) in spans if stop > start) or ((0, 0, 0),)


@lru_cache(maxsize=4096)
def part_of(program: Program, sources: tuple[int, ...], destinations: tuple[int, ...]) -> Program:
    """Return the program of only the chunks with these sources and destinations.

    Their shares are scaled to add up to 1. The rounds keep their numbers.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import plan
    >>> program = lower(plan("dgx-1v", "reduce_scatter").schedule)
    >>> print({chunk.destinations for chunk in part_of(program, tuple(range(8)), (3,)).chunks})
    {(3,)}
    """
    wanted = set(sources), set(destinations)
    if program.ends is not None and (set(program.ends[0]), set(program.ends[1])) == wanted:
        return program
    chunks = [chunk for chunk in program.chunks if (set(chunk.sources), set(chunk.destinations)) == wanted]
    total = sum(chunk.share for chunk in chunks)
    parts = tuple(chunk._replace(share=chunk.share / total) for chunk in chunks)
    return Program(
        program.collective, program.algorithm, program.devices, parts, program.round_count, program.pieces, routes=()
    )
