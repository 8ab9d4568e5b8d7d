"""``GeneratedProgram``: the program of a ``GeneratedSchedule``, stored as a few chunks and the symmetry.

It offers everything that a ``Program`` with all chunks offers. The fused program of a chunk and the program of a device
are computed from the stored chunks by renumbering. The time for a device grows only with this device's messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, overload

from ..kernels import FusedProgram
from ..schedule import GeneratedSchedule, Route
from ..topology.symmetry import inverse
from .device_programs import DeviceProgram, PartInChunk, device_program
from .fusion import distinct_combinations, fold_combinations
from .instructions import ChunkProgram, Instruction, Read, finish_instructions
from .program import Program


class GeneratedProgram(Program):
    """The images of the chunks of a program under the symmetry of a schedule.

    ``chunks``, ``by_round``, ``transfers`` and ``routes`` make the images when they are read.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import ring
    >>> program = lower(ring([f"cpu:{k}" for k in range(40)]))
    >>> len(program.base.chunks), len(program.chunks), program.fused(39).folds[0][:5]
    (1, 40, (0, 39, 0, 1, 2))
    """

    schedule: GeneratedSchedule
    base: Program

    def __init__(self, schedule: GeneratedSchedule, base: Program) -> None:
        self.__dict__.update(
            schedule=schedule, base=base, collective=base.collective, algorithm=base.algorithm, devices=base.devices,
            round_count=base.round_count, pieces=base.pieces,
        )  # fmt: skip

    @cached_property
    def chunks(self) -> Sequence[ChunkProgram]:
        """All chunks, each made when it is read."""
        return _Images(self)

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """All routes."""
        return self.schedule.routes

    def through(self, r: int, chunk: int, src: int, dst: int) -> tuple[str, ...] | None:
        """Return the nodes that a transfer passes in round ``r``, or ``None`` if it takes the topology's own route."""
        return self.schedule.through(r, chunk, src, dst)

    def moves(self, r: int, chunk: int, src: int, dst: int) -> bool:
        """Return whether the program has this transfer of the schedule. It omits those that no destination needs."""
        element, number = self.schedule.numbering[chunk]
        return self.base.moves(r, number, *(self.schedule.symmetry.origin(element, node) for node in (src, dst)))

    @cached_property
    def shares(self) -> Sequence[Fraction]:
        """Each chunk's fraction of the buffer."""
        parts = [chunk.share / self.schedule.symmetry.order for chunk in self.base.chunks]
        return [parts[chunk] for _, chunk in self.schedule.numbering]

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sources and destinations of every chunk, or ``None`` if chunks differ in them."""
        ends = self.base.ends  # the images have the same ends if the symmetry keeps both lists
        return ends if ends is not None and all(map(self.schedule.keeps, ends)) else None

    def fused(self, chunk: int, results: int | None = None) -> FusedProgram:
        """Return the fused program of a chunk, as ``fusion.fuse`` does. It is cached."""
        return _fused(self, chunk, results)

    def _fused(self, chunk: int, results: int | None) -> FusedProgram:
        element, number = self.schedule.numbering[chunk]
        return self._bases[number].fused(self._elements[element], results)

    def image(self, number: int) -> ChunkProgram:
        """Compute one chunk. ``chunks`` caches the results."""
        element, chunk = self.schedule.numbering[number]
        return self._bases[chunk].image(self._elements[element], self.shares[number])

    @property
    def alike(self) -> dict[int, int]:
        """For one device of each group of devices whose programs differ only in device numbers, the group's size."""
        count = len(self.devices)
        return {orbit: size for orbit, size in self.schedule.symmetry.sizes.items() if orbit < count}

    @cached_property
    def _elements(self) -> list[tuple[int, ...]]:
        """The elements of the symmetry group, each as the position to which it moves every node."""
        return list(self.schedule.symmetry.elements())

    @cached_property
    def _bases(self) -> list[_Base]:
        kind = _SortedBase if self.schedule.in_order else _Base
        lists = {devices for chunk in self.base.chunks for devices in (chunk.sources, chunk.destinations)}
        kept = {devices: self.schedule.keeps(devices) for devices in lists}
        folded: dict[Any, FusedProgram] = {}
        return [kind(chunk, kept[chunk.sources], kept[chunk.destinations], folded) for chunk in self.base.chunks]

    def part(self, device: int) -> DeviceProgram:
        """Compute the program of one device."""
        symmetry, events = self.schedule.symmetry, self.base.chunk_events
        origins = list(symmetry.origins(device))
        parts = [
            PartInChunk(events[chunk], origins[element], partial(symmetry.image, element))
            for element, chunk in self.schedule.numbering
        ]
        return device_program(self.round_count, parts, self.schedule.in_order)


@lru_cache(maxsize=4096)
def _fused(program: GeneratedProgram, chunk: int, results: int | None) -> FusedProgram:
    return program._fused(chunk, results)


class _Images(Sequence[ChunkProgram]):
    """The chunks of a generated program, each made when it is read first."""

    def __init__(self, program: GeneratedProgram) -> None:
        self._program = program
        self._made: dict[int, ChunkProgram] = {}

    def __len__(self) -> int:
        return self._program.schedule.chunk_count

    @overload
    def __getitem__(self, number: int) -> ChunkProgram: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ChunkProgram]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return tuple([self[k] for k in range(*number.indices(len(self)))])
        at = range(len(self))[number]  # raises IndexError
        if at not in self._made:
            self._made[at] = self._program.image(at)
        return self._made[at]


class _Base:
    """A chunk of the base, for making its images, which have its instructions in the same order.

    Its methods take an element of the symmetry group as ``moves``, which has the new position of each device.

    Args:
      chunk: the chunk's program.
      keeps_sources: whether all images list the same sources in the same order. If not, sources are moved like devices.
      keeps_destinations: the same for the destinations.
      folded: a cache of ``fold_combinations`` by its arguments, shared by all chunks of the base.
    """

    def __init__(
        self, chunk: ChunkProgram, keeps_sources: bool, keeps_destinations: bool, folded: dict[Any, FusedProgram]
    ) -> None:
        self.chunk, self.inputs = chunk, len(chunk.sources)
        self._source_at = {source: k for k, source in enumerate(chunk.sources)} if keeps_sources else None
        self._result_at = {dst: k for k, dst in enumerate(chunk.destinations)} if keeps_destinations else None
        self._folded = folded

    @cached_property
    def _combined(self) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
        """The distinct combinations, and the number of each destination's result: see ``distinct_combinations``."""
        combinations, number = distinct_combinations(self.chunk)
        return combinations, [number[result] for result in self.chunk.results]

    def fused(self, moves: Sequence[int], results: int | None) -> FusedProgram:
        """Return the fused program of an image: the chunk's program with other input numbers."""
        combinations, values = self._combined
        wanted = self._by_destination(moves, values)[:results]
        distinct = tuple(sorted({*wanted}))
        program = self._shared(combinations, distinct)
        image = [*self._positions(moves), *range(-program.slots, 0)]  # image[~k] is ~k: slots keep their numbers
        folds = tuple([(fold[0], *[image[operand] for operand in fold[1:]]) for fold in program.folds])
        operand = {value: image[result] for value, result in zip(distinct, program.results, strict=True)}
        if len(distinct) == 1:  # as in an all-reduce, without a look-up for each destination
            return FusedProgram(program.slots, folds, (operand[distinct[0]],) * len(wanted))
        return FusedProgram(program.slots, folds, tuple([operand[value] for value in wanted]))

    def _shared(self, combinations: tuple[tuple[int, ...], ...], wanted: tuple[int, ...]) -> FusedProgram:
        """Return the cached result of ``fold_combinations``, which all chunks with the same combinations share."""
        key = self.inputs, combinations, wanted
        if key not in self._folded:
            self._folded[key] = fold_combinations(*key)
        return self._folded[key]

    def image(self, moves: Sequence[int], share: Fraction) -> ChunkProgram:
        """Return the image of the chunk under an element of the group, with this share."""
        _, sources, destinations, _, results = self.chunk
        if self._source_at is None:
            sources = tuple([moves[k] for k in sources])
        number = self._numbers(moves)
        image_results = tuple(self._by_destination(moves, [number[result] for result in results]))
        if self._result_at is None:
            destinations = tuple([moves[k] for k in destinations])
        return ChunkProgram(share, sources, destinations, self._instructions(moves, number), image_results)

    def _numbers(self, moves: Sequence[int]) -> list[int]:
        """Return the number that each value of the chunk has in an image."""
        return [*self._positions(moves), *range(self.inputs, self.inputs + len(self.chunk.instructions))]

    def _instructions(self, moves: Sequence[int], number: list[int]) -> tuple[Instruction, ...]:
        """Return the instructions of an image. ``number`` has the new number of each value."""
        instructions = []
        for device, operands, r, final, last_uses, donated in self.chunk.instructions:
            read, last = tuple([number[k] for k in operands]), tuple([number[k] for k in last_uses])
            instructions.append(Instruction(moves[device], read, r, final, last, donated))
        return tuple(instructions)

    def _positions(self, moves: Sequence[int]) -> list[int]:
        """Return the number that each input has in an image."""
        number = self._source_at
        return list(range(self.inputs)) if number is None else [number[moves[source]] for source in self.chunk.sources]

    def _by_destination(self, moves: Sequence[int], values: list[int]) -> list[int]:
        """Return ``values``, one for each destination of the chunk, in the order of the image's destinations."""
        if self._result_at is None:
            return values
        sorted_values = list(values)
        for dst, value in zip(self.chunk.destinations, values, strict=True):
            sorted_values[self._result_at[moves[dst]]] = value
        return sorted_values


class _MadeValue(NamedTuple):
    """A combination of a chunk. Operands that are copies are replaced by the originals."""

    device: int
    value: int
    holders: tuple[int, ...]  # for each operand the device from which it is read
    operands: tuple[int, ...]


class _SortedBase(_Base):
    """A chunk of the base whose images have the instructions of a round, and the operands of each, sorted by device.

    So an image can have other combinations than the chunk, in another order. Most images have the same combinations,
    and share a fused program.
    """

    @cached_property
    def _rounds(self) -> tuple[list[list[_MadeValue]], list[int]]:
        """The combinations of each round, and the value of each result. Copies are replaced by the originals."""
        origin, places = list(range(self.inputs)), self.chunk.devices
        rounds: dict[int, list[_MadeValue]] = {}
        for value, (device, operands, r, *_) in enumerate(self.chunk.instructions, start=self.inputs):
            if len(operands) == 1:
                origin.append(origin[operands[0]])
            else:
                origin.append(value)
                read = tuple([origin[operand] for operand in operands])
                holders = tuple([places[operand] for operand in operands])
                rounds.setdefault(r, []).append(_MadeValue(device, value, holders, read))
        return list(rounds.values()), [origin[result] for result in self.chunk.results]

    def fused(self, moves: Sequence[int], results: int | None) -> FusedProgram:
        rounds, values = self._rounds
        number = [*self._positions(moves), *[0] * len(self.chunk.instructions)]  # of each value, in the image
        distinct: dict[tuple[int, ...], int] = {}
        for combinations in rounds:
            devices = [moves[made.device] for made in combinations]
            for k in sorted(range(len(devices)), key=devices.__getitem__):
                _, value, holders, read = combinations[k]
                if len(read) == 2:  # the usual case, without the cost of sorted()
                    a, b = read if moves[holders[0]] < moves[holders[1]] else read[::-1]
                    operands: tuple[int, ...] = (number[a], number[b])
                else:
                    by_holder = sorted(zip([moves[holder] for holder in holders], read, strict=True))
                    operands = tuple([number[operand] for _, operand in by_holder])
                number[value] = distinct.setdefault(operands, self.inputs + len(distinct))
        wanted = tuple([number[value] for value in self._by_destination(moves, values)[:results]])
        return self._shared(tuple(distinct), wanted)

    def _numbers(self, moves: Sequence[int]) -> list[int]:
        instructions = self.chunk.instructions
        order = sorted(range(len(instructions)), key=lambda k: (instructions[k].round, moves[instructions[k].device]))
        return [*self._positions(moves), *[self.inputs + k for k in inverse(order)]]

    def _instructions(self, moves: Sequence[int], number: list[int]) -> tuple[Instruction, ...]:
        places = self.chunk.devices
        read: list[Read] = [(0, 0, ())] * len(self.chunk.instructions)
        for value, (device, operands, r, *_) in enumerate(self.chunk.instructions, start=self.inputs):
            in_order = sorted(operands, key=lambda operand: moves[places[operand]])
            read[number[value] - self.inputs] = r, moves[device], tuple([number[operand] for operand in in_order])
        return finish_instructions(self.inputs, read, [number[result] for result in self.chunk.results])
