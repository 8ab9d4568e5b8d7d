"""The instructions of a chunk: numbered values, each made on one device, with final flags and liveness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Instruction(NamedTuple):
    """Makes one value of a chunk on ``device``: a copy of one operand, or the combination of several.

    Args:
      device: the number of the device that makes the value.
      operands: values, combined in this order. Those of other devices have to be sent.
      round: the schedule's round.
      final: whether the combination contains every contribution once. Means are divided and rounded only there.
      last_uses: the operands that no later instruction reads and that are not results.
      donated: the position, 0 or 1, of an operand whose memory the result may take over, or -1 if there is none. Such
        an operand is a combination that is not final, or a copy of one. No later instruction reads the operand or a
        value that may share its memory.
    """

    device: int
    operands: tuple[int, ...]
    round: int
    final: bool
    last_uses: tuple[int, ...]
    donated: int


class ChunkProgram(NamedTuple):
    """The instructions of one chunk.

    Value k is the input of ``sources[k]``, and instruction k makes value ``len(sources) + k``.
    """

    share: Fraction  # the chunk's fraction of the buffer
    sources: tuple[int, ...]  # the devices that contribute
    destinations: tuple[int, ...]  # the devices that need the result
    instructions: tuple[Instruction, ...]  # in an order in which they can run one by one
    results: tuple[int, ...]  # the value that each destination keeps

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each value."""
        return (*self.sources, *(instruction.device for instruction in self.instructions))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each value: "input", "partial" (in the accumulator's dtype) or "final" (fully reduced).

        A copy has the kind of its operand. If a chunk has only one input, the input is "final".
        """
        kinds = ["final" if len(self.sources) == 1 else "input"] * len(self.sources)
        for _, operands, _, final, *_ in self.instructions:
            kinds.append(kinds[operands[0]] if len(operands) == 1 else "final" if final else "partial")
        return tuple(kinds)


class Numbered(NamedTuple):
    """An instruction with its chunk and the number of the value that it makes."""

    chunk: int
    value: int
    instruction: Instruction


Read = tuple[int, int, tuple[int, ...]]  # the round and the device of an instruction, and its operands


def finish_instructions(inputs: int, read: Sequence[Read], results: Iterable[int]) -> tuple[Instruction, ...]:
    """Return the instructions of a chunk with ``inputs`` inputs, with final flags and liveness.

    The chunk must come from a verified schedule: then a value is final if it has as many contributions as inputs exist.
    """
    kept = {*results}
    contributions = [1] * inputs  # for each value, the number of contributions that it contains
    # A copy may share memory with its operand: ``origin`` is the input or combination that each value is or copies.
    origin = list(range(inputs))
    last_read: dict[int, int] = {}  # for each value, the last value that an instruction computes from it
    last_read_origin: dict[int, int] = {}  # the same for each origin and all its copies
    for value, (_, _, operands) in enumerate(read, start=inputs):
        for operand in operands:
            last_read[operand] = last_read_origin[origin[operand]] = value
        if len(operands) == 1:
            contributions.append(contributions[operands[0]])
            origin.append(origin[operands[0]])
        else:
            contributions.append(sum([contributions[operand] for operand in operands]))
            origin.append(value)
    instructions = []
    for value, (r, device, operands) in enumerate(read, start=inputs):
        if len(operands) == 1:
            is_last_use = last_read[operands[0]] == value and operands[0] not in kept
            instructions.append(Instruction(device, operands, r, False, operands if is_last_use else (), -1))
            continue
        last_uses = tuple([v for v in dict.fromkeys(operands) if last_read[v] == value and v not in kept])
        donated = -1
        for k, operand in enumerate(operands[:2]):  # distinct inputs or partial sums, never results
            start = origin[operand]
            if start >= inputs and last_read_origin[start] == value:
                donated = k
                break
        instructions.append(Instruction(device, operands, r, contributions[value] == inputs, last_uses, donated))
    return tuple(instructions)
