"""Compile a program into permutations and combinations that every device executes alike.

Input: a ``Program`` whose devices are the positions along mesh axes. Output: a ``PermutationProgram`` of plain numbers,
without arrays. In one permutation each device sends to at most one device and receives from at most one. So a round
needs as many permutations as the largest number of devices to which one device sends, or from which one receives. A row
of an array holds a value of a chunk. A device's position determines the rows that it reads, so tables list them, with
one column per device; if all columns are equal, the position is not needed.

Rows are immutable: each permutation and each combination makes a new block of rows. So copies are free, and XLA does
not need to protect rows that later rounds read: when rows were updated in place, a ring over 8 CPU devices copied its
entire buffer in each of 14 rounds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ...errors import ScheduleError
from ...lowering import ChunkProgram, Numbered, Program

Pair = tuple[int, int]
"""The positions of a sender and a receiver."""

Place = tuple[int, int]
"""A row: the number of its block, and its number in the block. The blocks of each stack (see ``PermutationProgram``)
are numbered in the order in which they are made: first the device's input, then in each round what each permutation
receives and what each combination makes."""

Table = tuple[tuple[Place, ...], ...]
"""For each device the places of some rows, the same number of rows on all devices."""


class Permutation(NamedTuple):
    """Devices send rows to each other. The received rows are a new block in each stack.

    ``pairs``: ``(src, dst)``, each device at most once as ``src`` and at most once as ``dst``. ``sent``: for each stack
    the rows that each device sends.
    """

    pairs: tuple[Pair, ...]
    sent: tuple[Table, ...]


class RowCombination(NamedTuple):
    """Devices combine rows of one stack, in the order of the operands. The result is a new block of that stack."""

    stack: int
    operands: tuple[Table, ...]


class PermutationProgram(NamedTuple):
    """The operations that all devices execute.

    Args:
      devices: the number of devices.
      stacks: the numbers of the chunks, grouped by share; each chunk is one row of its stack. The lengths of chunks
        with equal shares differ by at most one element.
      by_round: for each round its permutations, independent of each other, and the combinations that follow them.
      results: for each stack the places of its chunks' results.
    """

    devices: int
    stacks: tuple[tuple[int, ...], ...]
    by_round: tuple[tuple[tuple[Permutation, ...], tuple[RowCombination, ...]], ...]
    results: tuple[Table, ...]

    @property
    def permutation_count(self) -> int:
        """The number of permutations in all rounds."""
        return sum(len(permutations) for permutations, _ in self.by_round)


@lru_cache(maxsize=256)
def compile_permutations(program: Program) -> PermutationProgram:
    """Compile a program in which every device contributes to every chunk and needs its result.

    Raises:
      ScheduleError: the program is not an all-reduce of all devices.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import direct, one_device, ring
    >>> names = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    >>> [compile_permutations(lower(planner(names))).permutation_count for planner in (ring, direct, one_device)]
    [6, 6, 6]
    """
    devices = range(len(program.devices))
    if any({*chunk.sources} != {*devices} or {*chunk.destinations} != {*devices} for chunk in program.chunks):
        problem = "along mesh axes, every device must be a source and a destination of every chunk."
        raise ScheduleError.of(problem, f"{program.collective} by {program.algorithm}", "an all_reduce of all devices")
    by_share: defaultdict[object, list[int]] = defaultdict(list)
    for number, chunk in enumerate(program.chunks):
        by_share[chunk.share].append(number)
    stacks = tuple(map(tuple, by_share.values()))
    compiler = _Compiler(program, stacks)
    rounds = tuple(
        (compiler.permute(instructions), compiler.combine(instructions)) for instructions in program.by_round
    )
    return PermutationProgram(len(devices), stacks, rounds, tuple(map(compiler.results, stacks)))


class _Compiler:
    """Compiles the rounds in order, and stores the places of each value on the devices that made or received it."""

    def __init__(self, program: Program, stacks: tuple[tuple[int, ...], ...]) -> None:
        self._program = program
        self._devices = [chunk.devices for chunk in program.chunks]  # by chunk: the device of each value
        self._stack = {chunk: stack for stack, chunks in enumerate(stacks) for chunk in chunks}
        self._repeated = list(map(_repeated, program.chunks))
        self._blocks = [1] * len(stacks)  # the number of blocks that each stack has so far
        self._places = {  # the (block, row) that stores a value, by chunk, value and device
            (chunk, value, device): (0, row)
            for chunks in stacks
            for row, chunk in enumerate(chunks)
            for value, device in enumerate(program.chunks[chunk].sources)
        }

    def permute(self, instructions: Sequence[Numbered]) -> tuple[Permutation, ...]:
        """Return the permutations of a round, which move operands to the devices of the instructions that read them."""
        messages: defaultdict[Pair, list[set[tuple[int, int]]]] = defaultdict(lambda: [set() for _ in self._blocks])
        for chunk, _, instruction in instructions:
            for value in instruction.operands:
                src = self._devices[chunk][value]
                if src != instruction.device:
                    messages[src, instruction.device][self._stack[chunk]].add((chunk, value))
        n = len(self._program.devices)
        # Pairs at the same distance that send equally many rows should share a permutation.
        order = sorted(
            messages, key=lambda pair: ([-len(rows) for rows in messages[pair]], (pair[1] - pair[0]) % n, pair)
        )
        return tuple(
            Permutation(
                tuple(pairs),
                tuple(
                    self._send(stack, {pair: sorted(messages[pair][stack]) for pair in pairs})
                    for stack in range(len(self._blocks))
                ),
            )
            for pairs in matchings(order)
        )

    def _send(self, stack: int, messages: dict[Pair, list[tuple[int, int]]]) -> Table:
        """Return the table of the rows of one stack that devices send in one permutation."""
        block = self._new_block(stack)
        longest = max(map(len, messages.values()))
        sent = {}
        for (src, dst), values in messages.items():
            for row, value in enumerate(values):
                self._places[*value, dst] = block, row
            if values:  # shorter messages end in copies of their last row; no device reads these
                padded = values + values[-1:] * (longest - len(values))
                sent[src] = [self._places[*value, src] for value in padded]
        return self._table(sent)

    def combine(self, instructions: Sequence[Numbered]) -> tuple[RowCombination, ...]:
        """Return the combinations of a round. A copy is not an operation: it gets the place of its operand."""
        # A batch: instructions of one device and stack, with operands from the same devices. It runs as one operation.
        batches: defaultdict[tuple[int, int, tuple[int, ...]], list[Numbered]] = defaultdict(list)
        for chunk, value, instruction in instructions:
            device, operands = instruction[:2]
            if len(operands) == 1:
                self._places[chunk, value, device] = self._places[chunk, operands[0], device]
                continue
            swapped = len(operands) == 2 and self._devices[chunk][operands[1]] != device
            if swapped and value not in self._repeated[chunk]:
                # a + b is b + a, except for the payload of NaN, on which devices that repeat a combination must agree.
                # With the device's own value last, all devices' tables are alike, so no device selects between blocks:
                # halving_doubling accesses 7 % less memory.
                instruction = instruction._replace(operands=operands[::-1])
            srcs = tuple(self._devices[chunk][operand] for operand in instruction.operands)
            batches[self._stack[chunk], device, srcs].append(Numbered(chunk, value, instruction))
        # Batches of different devices with the same numbers of operands and rows are merged into one combination.
        groups: defaultdict[tuple[int, int, int, int], dict[int, list[Numbered]]] = defaultdict(dict)
        seen: Counter[tuple[int, int, int, int]] = Counter()  # the batches of each kind that each device has so far
        for (stack, device, srcs), batch in sorted(batches.items()):
            kind = stack, len(srcs), len(batch)
            groups[*kind, seen[*kind, device]][device] = batch
            seen[*kind, device] += 1
        combinations = []
        for (stack, count, _, _), by_device in groups.items():
            places = [
                {
                    device: [self._places[chunk, instruction.operands[k], device] for chunk, _, instruction in batch]
                    for device, batch in by_device.items()
                }
                for k in range(count)
            ]
            combinations.append(RowCombination(stack, tuple(map(self._table, places))))
            block = self._new_block(stack)
            for device, batch in by_device.items():
                for row, (chunk, value, _) in enumerate(batch):
                    self._places[chunk, value, device] = block, row
        return tuple(combinations)

    def results(self, chunks: Sequence[int]) -> Table:
        """Return the places of the results of a stack's chunks."""
        places: dict[int, list[Place]] = defaultdict(list)
        for chunk in chunks:
            code = self._program.chunks[chunk]
            for device, value in zip(code.destinations, code.results, strict=True):
                places[device].append(self._places[chunk, value, device])
        return self._table(places)

    def _new_block(self, stack: int) -> int:
        self._blocks[stack] += 1
        return self._blocks[stack] - 1

    def _table(self, places: dict[int, list[Place]]) -> Table:
        """Return a column for each device. A device without places gets those of another one, since all must read."""
        first = places[min(places)] if places else []
        return tuple(tuple(places.get(device, first)) for device in range(len(self._program.devices)))


def _repeated(chunk: ChunkProgram) -> frozenset[int]:
    """Return the combinations that several devices compute, each for itself, from operands with the same bits."""
    origin = list(range(len(chunk.sources)))  # for each value: the first value with the same bits
    same_operands: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # combinations by operands' origins
    for value, instruction in enumerate(chunk.instructions, start=len(chunk.sources)):
        operands = tuple(origin[operand] for operand in instruction.operands)
        if len(operands) > 1:
            same_operands[operands].append(value)
        origin.append(same_operands[operands][0] if len(operands) > 1 else operands[0])
    return frozenset(value for values in same_operands.values() if len(values) > 1 for value in values)


def matchings(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Split different pairs ``(src, dst)`` into as few matchings as possible.

    Their number is the largest number of pairs with the same ``src``, or with the same ``dst``. A matching is an edge
    color of the bipartite graph of senders and receivers. Each pair gets the first color that is free at both ends, if
    there is one, so pairs that are close together in ``pairs`` are likely to share a matching.

    >>> matchings([(0, 1), (1, 2), (2, 0), (0, 2)])
    [[(0, 1), (1, 2), (2, 0)], [(0, 2)]]

    Source: D. König, Über Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre, Math. Ann. 77, 1916.
    """
    counts = [Counter(pair[side] for pair in pairs) for side in (0, 1)]
    degree = max(chain(*(count.values() for count in counts)), default=0)
    partner: tuple[dict[Pair, int], dict[Pair, int]] = ({}, {})  # of senders and of receivers, by (device, color)
    # The colors that are free at each sender and each receiver, as bits.
    free = [dict.fromkeys(count, (1 << degree) - 1) for count in counts]

    def paint(pair: Pair, color: int) -> None:
        for side in (0, 1):
            partner[side][pair[side], color] = pair[1 - side]
            free[side][pair[side]] &= ~(1 << color)

    def clear(pair: Pair, color: int) -> None:
        for side in (0, 1):
            del partner[side][pair[side], color]
            free[side][pair[side]] |= 1 << color

    for src, dst in pairs:
        free_at_both = free[0][src] & free[1][dst]
        if not free_at_both:
            # Exchange two colors along the path from dst. It cannot reach src, so src's free color becomes free at dst.
            color, other = _lowest(free[0][src]), _lowest(free[1][dst])
            path, side, device, color_now = [], 1, dst, color
            while (device, color_now) in partner[side]:
                mate = partner[side][device, color_now]
                path.append(((mate, device) if side else (device, mate), color_now))
                side, device, color_now = 1 - side, mate, other if color_now == color else color
            for pair, old in path:
                clear(pair, old)
            for pair, old in path:
                paint(pair, other if old == color else color)
        paint((src, dst), _lowest(free_at_both) if free_at_both else color)
    by_color: list[list[Pair]] = [[] for _ in range(degree)]
    for (src, color), dst in partner[0].items():
        by_color[color].append((src, dst))
    return [sorted(matching) for matching in by_color]


def _lowest(bits: int) -> int:
    """Return the number of the lowest bit that is 1."""
    return (bits & -bits).bit_length() - 1


def ranges(rows: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
    """Split row numbers, one sequence per device, into ranges of consecutive rows that are equally long on all devices.

    Returns:
      For each range its start on each device, and its length.

    >>> ranges([[0, 1, 4], [2, 3, 4]])
    [((0, 2), 2), ((4, 4), 1)]
    """
    found_ranges: list[tuple[tuple[int, ...], int]] = []
    for column in zip(*rows, strict=True):
        starts, size = found_ranges[-1] if found_ranges else ((), 0)
        if found_ranges and all(row == start + size for row, start in zip(column, starts, strict=True)):
            found_ranges[-1] = starts, size + 1
        else:
            found_ranges.append((column, 1))
    return found_ranges
