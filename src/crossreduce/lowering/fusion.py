"""The fused program of a chunk, for devices that share memory: without copies, and with merged combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ..kernels import FusedProgram
from .instructions import ChunkProgram


@lru_cache(maxsize=4096)
def fuse(chunk: ChunkProgram, results: int | None = None) -> FusedProgram:
    """Return the fused program that makes the results of all destinations of a chunk, or of the first ``results``.

    Copies are removed. Equal combinations are computed once. A combination that is read only once, as first operand of
    another one, is merged into the other one. The order of combination does not change, so results keep the same bits.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import direct, hierarchical_copy
    >>> fuse(lower(direct(["cpu:0", "cpu:1", "cpu:2"])).chunks[1])
    FusedProgram(slots=1, folds=((0, 0, 1, 2),), results=(-1, -1, -1))
    >>> fuse(lower(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])).chunks[0]).folds
    ((0, 2, 3), (1, 0, 1, -1))
    """
    combinations, number = distinct_combinations(chunk)
    return fold_combinations(len(chunk.sources), combinations, [number[result] for result in chunk.results[:results]])


def distinct_combinations(chunk: ChunkProgram) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Return the distinct combinations of a chunk, and for each of its values the input or combination that it equals.

    Both are numbered: first the inputs, then the combinations. Operands of combinations are such numbers. A copy has
    the number of the original.
    """
    inputs = len(chunk.sources)
    number = list(range(inputs))
    distinct: dict[tuple[int, ...], int] = {}
    for instruction in chunk.instructions:
        operands = tuple([number[operand] for operand in instruction.operands])
        if len(operands) == 1:
            number.append(operands[0])
        else:
            number.append(distinct.setdefault(operands, inputs + len(distinct)))
    return tuple(distinct), number


def fold_combinations(inputs: int, combinations: Sequence[tuple[int, ...]], wanted: Sequence[int]) -> FusedProgram:
    """Return the fused program of some combinations.

    ``wanted`` lists the values that are results. Values are numbered as in ``distinct_combinations``.
    """
    folds = {fold: list(read) for fold, read in enumerate(combinations, start=inputs)}
    needed = set(wanted)
    for value in reversed(folds):
        if value in needed:
            needed.update(folds[value])
    folds = {fold: read for fold, read in folds.items() if fold in needed}
    reads = Counter([*wanted, *(operand for read in folds.values() for operand in read)])
    merged = set()
    for read in folds.values():
        if read[0] in folds and reads[read[0]] == 1:
            merged.add(read[0])
            read[:1] = folds[read[0]]
    return _assign_slots({fold: read for fold, read in folds.items() if fold not in merged}, wanted)


def _assign_slots(folds: dict[int, list[int]], results: Sequence[int]) -> FusedProgram:
    """Return the fused program of ``folds``, the operands of each value. A slot is reused after its value's last read.

    In the program, an operand or result k >= 0 is input k, and ~k is slot k.
    """
    last_read = {operand: value for value, operands in folds.items() for operand in operands}
    kept = {*results}
    slot_of: dict[int, int] = {}
    free: list[int] = []
    slots = 0
    written = []
    for value, operands in folds.items():
        unused = [x for x in dict.fromkeys(operands) if x in folds and last_read[x] == value and x not in kept]
        read = [~slot_of[x] if x in folds else x for x in operands]
        if operands[0] in unused and operands.count(operands[0]) == 1:
            slot_of[value] = slot_of[operands[0]]  # the combination replaces its first operand
            unused.remove(operands[0])
        elif free:
            slot_of[value] = free.pop()
        else:
            slot_of[value] = slots
            slots += 1
        free.extend(slot_of[x] for x in unused)
        written.append((slot_of[value], *read))
    return FusedProgram(slots, tuple(written), tuple([~slot_of[x] if x in folds else x for x in results]))
