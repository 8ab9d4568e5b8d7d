"""The rank compiler: turns a lowered program into the instructions of one rank of a host.

Input: a ``Program`` whose devices are the ranks of one host; the numbers of the caller's buffers with its inputs and
results; and ``Numbers``, the op and the dtypes. Output: instructions in phases. Between two phases all ranks pass a
barrier. The compiler is a pure function of its arguments and gives all ranks the same layout of shared memory.

Phase 0 copies inputs that are read from slots into this rank's slot in shared memory. Each later phase executes one
round of the schedule. A rank reads its own inputs from the caller's buffer, except inputs that slots store in a wider
dtype. It reads all other operands from slots. It writes a value into the caller's result buffer, its slot, or both.

Large arrays are cut into pieces and pipelined, so that slots are small enough for the cache: piece j executes phase p
in stage j + p. A value that phase p writes and phase q reads last has q - p + 1 places, which pieces use in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from ...lowering import ChunkProgram, Program
from ...ops import Numbers, copy_numbers
from ...packing import itemsize
from .instructions import ArrayPlaces, BufferReference, RankInstruction, join_contiguous, pipeline

# The maximum bytes that a rank contributes to a piece. Measured for 2, 4 and 8 ranks on 2 cores: 128 KiB takes 1.6 to
# 2.9 times as long, and 2 MiB up to 1.3 times. While the ranks also compute (DDP on 8 ranks), 512 KiB takes 1.2 times
# as long, since all ranks must be scheduled for each piece.
PIECE_BYTES: Final = 1 << 20
# The size of each rank's slot. Ops with even and odd numbers use one half each, so that an op can begin while other
# ranks still read the results of the previous one. A half has room for two pieces, which the programs of ``one_host``
# need, and for rounding. Schedules with more intermediate values get smaller pieces.
SLOT_BYTES: Final = 2 * (2 * PIECE_BYTES + (1 << 18))
# In a group of two ranks, ops use this many start offsets in their half of each slot in turn, TURN_BYTES apart (as in
# the native shared_memory.hpp). So a rank writes to cache lines that have left the other rank's first-level cache:
# all-reduces of 16 and 32 KiB take 0.7 to 0.8 of the time. With 4 and 8 ranks they would take 1.0 to 1.1.
PAIR_TURNS: Final = 4
TURN_BYTES: Final = 1 << 15
# Ranks write results of at least this many bytes with streaming stores. All ranks of a host share its cache and write
# at the same time, so this is less than kernels.STREAMING_BYTES.
STREAMING_BYTES: Final = 1 << 22
LINE: Final = 64  # bytes of a cache line; chunks begin at multiples of it


def boundary(numerator: int, denominator: int, size: int, nbytes: int) -> int:
    """Return ``size * numerator / denominator``, rounded down to a cache line of elements of ``nbytes`` bytes."""
    if numerator == denominator:  # the end of the array is not rounded
        return size
    line = max(1, LINE // nbytes)
    return min(size, numerator * size // denominator // line * line)


class _ChunkValues(NamedTuple):
    """Properties of a chunk's values, in their order; the first values are the inputs.

    ``direct``: the number of inputs if ranks read their own inputs from the caller's buffers, otherwise 0. If the call
    is in place, a result may overwrite such an input, since no later step reads it.
    """

    devices: tuple[int, ...]  # the device that computes each value
    made: tuple[int, ...]  # the phase that computes each value; 0 for inputs
    last: tuple[int, ...]  # the last phase that reads each value from a slot, or -1 if it needs no slot
    dtypes: tuple[str, ...]  # the dtype of each value in slots and results
    direct: int

    def in_caller(self, operand: int, rank: int) -> bool:
        """Return whether a rank reads an operand from the caller's buffer."""
        return operand < self.direct and self.devices[operand] == rank


class _SlotGroup(NamedTuple):
    """Values ``(chunk, value)`` that a rank's slot stores during the same phases, in ``copies`` copies each."""

    copies: int
    values: tuple[tuple[int, int], ...]


class _Template(NamedTuple):
    """An instruction without addresses. It computes a value of ``chunk``.

    Operand ``~v`` is input v in the caller's buffer, operand ``v`` is value v in a slot. ``value``: the value that this
    rank stores in its slot, or -1 if it stores none. ``kept``: whether the caller's result buffer gets the result, too.
    """

    chunk: int
    operands: tuple[int, ...]
    value: int
    kept: bool
    numbers: Numbers


class RankAnalysis:
    """The properties of a program that do not depend on sizes.

    Its devices are the ranks of a host, and its flat buffer consists of ``arrays`` arrays of equal size.
    """

    def __init__(self, program: Program, numbers: Numbers, arrays: int) -> None:
        self.program, self.numbers, self.arrays = program, numbers, arrays
        rounds = sorted({instruction.round for chunk in program.chunks for instruction in chunk.instructions})
        phase = {r: 1 + k for k, r in enumerate(rounds)}  # the phase of each round
        self.phases = max(2, 1 + len(rounds))  # at least 2, with one barrier, at which the calls are compared
        self.values = [_chunk_values(chunk, phase, numbers) for chunk in program.chunks]
        slots: list[dict[tuple[int, int], list[tuple[int, int]]]] = [{} for _ in program.devices]
        for c, values in enumerate(self.values):
            for value, last in enumerate(values.last):
                if last >= 0:
                    slots[values.devices[value]].setdefault((values.made[value], last), []).append((c, value))
        self.groups = [
            [_SlotGroup(last - made + 1, tuple(members)) for (made, last), members in slot.items()] for slot in slots
        ]
        ends = list(accumulate((chunk.share * arrays for chunk in program.chunks), initial=Fraction(0)))
        self._bounds = []  # for each chunk: its array, and its boundaries within the array
        for start, stop in pairwise(ends):
            array = min(int(start), arrays - 1)
            assert stop - array <= 1, "a chunk is in one array"
            self._bounds.append((array, (start - array).as_integer_ratio(), (stop - array).as_integer_ratio()))
        self._contributed, self.demands = self._demand()
        self._templates: dict[int, list[list[_Template]]] = {}

    def templates(self, rank: int) -> list[list[_Template]]:
        """Return for each phase the instructions of a rank, without addresses."""
        if rank in self._templates:
            return self._templates[rank]
        numbers = self.numbers
        phases: list[list[_Template]] = [[] for _ in range(self.phases)]
        for c, (chunk, values) in enumerate(zip(self.program.chunks, self.values, strict=True)):
            inputs = len(chunk.sources)
            result = chunk.results[chunk.destinations.index(rank)] if rank in chunk.destinations else -1
            if rank in chunk.sources:
                own = chunk.sources.index(rank)
                dtype = values.dtypes[own]
                stored = copy_numbers(dtype) if dtype == numbers.dtype else numbers._replace(result=dtype, divisor=1)
                if values.last[own] >= 0:
                    phases[0].append(_Template(c, (~own,), own, False, stored))
                if result == own:  # a local copy, made in phase 1 like other ranks' copies
                    phases[1].append(_Template(c, (~own,), -1, True, stored))
            for value, instruction in enumerate(chunk.instructions, inputs):
                if instruction.device != rank:
                    continue
                operands = tuple(~v if values.in_caller(v, rank) else v for v in instruction.operands)
                dtype = values.dtypes[instruction.operands[0]]
                using = numbers._replace(dtype=dtype, result=values.dtypes[value])
                if not instruction.final:
                    using = using._replace(divisor=1)
                if len(operands) == 1:
                    using = copy_numbers(dtype)
                slot = value if values.last[value] >= 0 else -1
                phases[values.made[value]].append(_Template(c, operands, slot, value == result, using))
        self._templates[rank] = phases
        return phases

    def spans(self, size: int) -> list[tuple[int, int, int]]:
        """Return (array, first, end) for each chunk: its elements in a piece of ``size`` elements per array."""
        nbytes = itemsize(self.numbers.dtype)
        return [
            (array, boundary(*start, size, nbytes), boundary(*stop, size, nbytes))
            for array, start, stop in self._bounds
        ]

    def piece_size(self, size: int, room: int, most: int | None = None) -> int:
        """Return how many elements of each array are in a piece, if arrays have ``size`` elements.

        ``room``: the bytes of a slot. ``most``: the maximum bytes that a rank contributes, by default ``PIECE_BYTES``.
        """
        fits = fitting_size([self], room, int((most or PIECE_BYTES) / self._contributed))
        return max(1, min(size, fits // LINE * LINE or fits))

    def _demand(self) -> tuple[Fraction, list[tuple[int, Fraction | int]]]:
        """Return the maximum bytes that a rank contributes, and for each slot the bytes for rounding and for values.

        The bytes for rounding are absolute. The others are bytes per element of an array.
        """
        contributed = [Fraction(0)] * len(self.program.devices)
        for chunk in self.program.chunks:
            for source in chunk.sources:
                contributed[source] += chunk.share
        demands = []
        for groups in self.groups:
            # A chunk may exceed its share by a cache line, or by two if float16 or bfloat16 is stored as float32. Then
            # it is rounded up to whole lines. So 4 lines suffice.
            rounding = sum(4 * LINE * group.copies * len(group.values) for group in groups)
            stored = sum(
                group.copies * self.program.chunks[c].share * itemsize(self.values[c].dtypes[value])
                for group in groups
                for c, value in group.values
            )
            demands.append((rounding, stored * self.arrays))
        return max(contributed) * self.arrays * itemsize(self.numbers.dtype), demands


analyze: Final = lru_cache(maxsize=256)(RankAnalysis)


def fitting_size(analyses: Sequence[RankAnalysis], room: int, most: int) -> int:
    """Return how many elements per array a piece may have, at most ``most`` and at least 1.

    All of these programs run on the same ranks at the same time, and must fit into slots of ``room`` bytes together.
    """
    for demands in zip(*(analysis.demands for analysis in analyses), strict=True):
        rounding, stored = map(sum, zip(*demands, strict=True))
        if stored:
            most = min(most, int((room - rounding) / stored))
    return max(1, most)


def _chunk_values(chunk: ChunkProgram, phase: dict[int, int], numbers: Numbers) -> _ChunkValues:
    """Return the properties of a chunk's values. ``phase`` maps rounds to phases."""
    inputs, devices = len(chunk.sources), chunk.devices
    phases = [0] * inputs + [phase[instruction.round] for instruction in chunk.instructions]
    kinds = chunk.kinds
    mixed = any(len({kinds[operand] for operand in each.operands}) > 1 for each in chunk.instructions)
    # Kernels read operands of one dtype. If some step combines inputs with partial results, the copies of inputs are
    # widened to the accumulator's dtype.
    stored = numbers.accumulator if mixed else numbers.dtype
    if inputs == 1:
        assert numbers.divisor == 1, "a mean has several sources"
        stored = numbers.result
    dtype_of = {"input": stored, "partial": numbers.accumulator, "final": numbers.result}
    dtypes = tuple(dtype_of[kind] for kind in kinds)
    values = _ChunkValues(devices, tuple(phases), (), dtypes, inputs if stored == numbers.dtype else 0)
    last = [-1] * len(kinds)
    for value, instruction in enumerate(chunk.instructions, inputs):
        for operand in instruction.operands:
            if not values.in_caller(operand, instruction.device):
                last[operand] = phases[value]
    return values._replace(last=tuple(last))


class RankCompiler:
    """Returns the instructions of one rank for each piece. ``ends``: for each rank the bytes in use of its slot.

    Args:
      analysis: the properties of the program.
      rank: the device whose instructions are returned.
      sizes: the size of each piece, in elements of each array.
      inputs: where each array is in the caller's buffers, on ranks that contribute to it.
      outputs: where each array's result is in the caller's buffers, on ranks that need it.
      streaming: whether copies into the caller's buffers use streaming stores.
      bases: for each rank the bytes of its slot that other programs use; the default is 0.
    """

    def __init__(
        self,
        analysis: RankAnalysis,
        rank: int,
        sizes: Sequence[int],
        inputs: Sequence[ArrayPlaces],
        outputs: Sequence[ArrayPlaces],
        *,
        streaming: bool = False,
        bases: Sequence[int] | None = None,
    ) -> None:
        self._analysis, self._rank, self._sizes = analysis, rank, sizes
        self._inputs, self._outputs, self._streaming = inputs, outputs, streaming
        self.phases, self._templates = analysis.phases, analysis.templates(rank)
        self._spans = {size: analysis.spans(size) for size in dict.fromkeys(sizes)}
        self._places: dict[int, dict[tuple[int, int], tuple[int, int, int]]] = {size: {} for size in self._spans}
        at = bases or [0] * len(analysis.groups)
        self.ends = tuple(self._lay_out(groups, base) for groups, base in zip(analysis.groups, at, strict=True))

    def _lay_out(self, groups: list[_SlotGroup], at: int) -> int:
        """Place the values of one slot, from offset ``at`` on. Return the end of the used memory.

        ``_places`` gets, for each size of a piece, the offset of a value's first copy, the distance between copies, and
        the number of copies. Each copy of a group contains its values one after the other. Groups do not share memory,
        since they could overwrite each other's values if pieces differ in size.
        """
        for copies, values in groups:
            room, offsets = 0, {}
            for size, spans in self._spans.items():
                filled = 0
                for c, value in values:
                    _, start, stop = spans[c]
                    offsets[size, c, value] = filled
                    filled += -(-(stop - start) * itemsize(self._analysis.values[c].dtypes[value]) // LINE) * LINE
                room = max(room, filled)
            for (size, c, value), offset in offsets.items():
                self._places[size][c, value] = (at + offset, room, copies)
            at += copies * room
        return at

    def phase(self, piece: int, phase: int) -> list[RankInstruction]:
        """Return the rank's instructions for a phase of a piece."""
        spans = self._spans[self._sizes[piece]]
        instructions = []
        for chunk, operands, value, kept, numbers in self._templates[phase]:
            array, start, stop = spans[chunk]
            if stop == start:
                continue
            read = tuple(
                self._reference(piece, chunk, operand)
                if operand >= 0
                else _placed(self._inputs[array], piece, start, self._analysis.numbers.dtype)
                for operand in operands
            )
            size, streaming = stop - start, self._streaming and len(operands) == 1 and value < 0
            slot = self._reference(piece, chunk, value) if value >= 0 else None
            if kept:
                place = _placed(self._outputs[array], piece, start, numbers.result)
                if read != (place,):  # not at the root of a broadcast, which has the result already
                    instructions.append(RankInstruction(size, read, (place,), numbers, streaming))
                read, numbers = (place,), copy_numbers(numbers.result)
            if slot is not None:  # a copy of ``read``, which writes the slot without reading its cache lines
                instructions.append(RankInstruction(size, read, (slot,), numbers))
        return join_contiguous(instructions)

    def _reference(self, piece: int, chunk: int, value: int) -> BufferReference:
        """Return where a value is in the slot of the rank that computes it."""
        first, distance, copies = self._places[self._sizes[piece]][chunk, value]
        return BufferReference(self._analysis.values[chunk].devices[value], first + piece % copies * distance)


def _placed(places: ArrayPlaces, piece: int, start: int, dtype: str) -> BufferReference:
    """Return a reference to element ``start`` of a piece of an array in the caller's buffer."""
    return BufferReference(~places.buffer, places.starts[piece] + start * itemsize(dtype))


def rank_stages(
    program: Program,
    inputs: Sequence[int],
    outputs: Sequence[int],
    size: int,
    numbers: Numbers,
    rank: int,
    most: int | None = None,
) -> list[list[RankInstruction]]:
    """Return the stages of one rank. All ranks have the same number of stages, at least two.

    ``program``, ``inputs`` and ``outputs``: see ``one_host.HostCollective``. ``size``: the elements of each array.
    ``most``: see ``RankAnalysis.piece_size``.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import one_shot
    >>> program = lower(one_shot(["cpu:0", "cpu:1"]))
    >>> for stage in rank_stages(program, [0], [1], 8, copy_numbers("float32"), 0):
    ...     for size, operands, results, *_ in stage:
    ...         print(size, *map(tuple, operands), "->", *map(tuple, results))
    8 (-1, 0) -> (0, 0)
    8 (-1, 0) (1, 0) -> (-2, 0)
    """
    analysis = analyze(program, numbers, len(inputs))
    piece = analysis.piece_size(size, SLOT_BYTES // 2, most)
    pieces = range(0, size, piece)
    starts = tuple(start * itemsize(numbers.dtype) for start in pieces)
    assert itemsize(numbers.result) == itemsize(numbers.dtype), "pieces begin at the same bytes in both"
    compiler = RankCompiler(
        analysis,
        rank,
        [min(piece, size - start) for start in pieces],
        [ArrayPlaces(buffer, starts) for buffer in inputs],
        [ArrayPlaces(buffer, starts) for buffer in outputs],
        streaming=size * itemsize(numbers.result) * len(inputs) >= STREAMING_BYTES,
    )
    assert max(compiler.ends) <= SLOT_BYTES // 2, "a piece does not fit into a slot"
    phases = [(phase, partial(compiler.phase, phase=phase)) for phase in range(compiler.phases)]
    return pipeline(len(pieces), phases, compiler.phases - 1)
