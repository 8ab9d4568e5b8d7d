"""Divide the blocks of a collective into parts, so that several threadblocks move a chunk at the same time.

Input: a collective with one block per chunk, and the least number of parts of each chunk. Output: the same collective
with smaller units and a block per part.

Threadblocks that share a link get nearly equal parts of its bandwidth, whatever the size of their blocks. If blocks
differ much, short ones end early and long ones late. So if the shares of chunks differ, chunks are divided into more
parts than the links need, of nearly equal size, as far as the number of threadblocks allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ...collective import Block, Collective

UNEVEN: Final = 0.12  # the greatest ``_unevenness`` that counts as even
FINER: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # factors that are tried for the number of parts that the links need
FEW: Final = 4  # if a GPU has at most so many threadblocks, parts are doubled, so that links are busy while some wait
LEAST_UNITS: Final = 6  # in a part of an inexact division, so that parts differ by at most a sixth


def even_parts(collective: Collective, parts: Sequence[int], most: int, *, pipelines: bool) -> tuple[int, ...]:
    """Return the number of parts of each chunk. It is at least that in ``parts``, if ``most`` allows it.

    Args:
      collective: the collective, with a block for each chunk.
      parts: the number of parts that each chunk needs.
      most: the largest number of threadblocks per GPU.
      pipelines: whether a part has a threadblock for each value that is sent, and not only one per GPU.
    """
    sizes = {block.chunk: block.size for block in collective.blocks}
    workers = [  # by rank and chunk: the number of threadblocks for each part of the chunk
        {chunk: _senders(collective, chunk, rank) if pipelines else 1 for chunk in sizes}
        for rank in range(collective.ranks)
    ]

    def needed(counts: dict[int, int]) -> int:
        """Return the largest number of threadblocks of a GPU for these numbers of parts."""
        return max(sum(counts[chunk] * of_rank[chunk] for chunk in sizes) for of_rank in workers)

    if pipelines and needed(dict(enumerate(parts))) <= min(FEW, most // 2):
        parts = [2 * count for count in parts]
    longest = max(size / parts[chunk] for chunk, size in sizes.items())

    def uneven(counts: dict[int, int]) -> float:
        return _unevenness([(size, size / counts[chunk]) for chunk, size in sizes.items()])

    best: dict[int, int] | None = None
    if len(set(sizes.values())) == 1:  # equal powers of two need the fewest units, so the plan suits the most messages
        counts = {chunk: 1 << (parts[chunk] - 1).bit_length() for chunk in sizes}
        if len(set(counts.values())) == 1 and needed(counts) <= most:
            return tuple(counts.get(chunk, 1) for chunk in range(len(parts)))
    for factor in FINER:  # 1 - 1e-9: so that rounding errors do not add parts
        counts = {chunk: math.ceil(size / (longest / factor) * (1 - 1e-9)) for chunk, size in sizes.items()}
        if needed(counts) > most:
            break
        if best is None or uneven(counts) < uneven(best) - UNEVEN / 4:  # more parts must make a difference
            best = counts
        if uneven(best) <= (UNEVEN if factor == 1 else UNEVEN / 2):
            break
    divisor = 1
    while best is None:  # there are too many threadblocks: use fewer parts than needed
        counts = {chunk: 1 << max(1, parts[chunk] // divisor).bit_length() - 1 for chunk in sizes}
        if needed(counts) <= most or max(counts.values()) == 1:
            best = counts
        divisor *= 2
    return tuple(best.get(chunk, 1) for chunk in range(len(parts)))


def is_uneven(collective: Collective) -> bool:
    """Return whether the blocks of a collective differ much in size."""
    return _unevenness([(block.size, block.size) for block in collective.blocks]) > UNEVEN


def _unevenness(sizes: Sequence[tuple[float, float]]) -> float:
    """Return the mean of ``1 - size / longest size`` over all units of the buffer.

    ``sizes``: pairs of a number of units, and the size of each block that contains one of them.
    """
    longest = max(size for _, size in sizes)
    return sum(units * (1 - size / longest) for units, size in sizes) / sum(units for units, _ in sizes)


def _senders(collective: Collective, number: int, rank: int) -> int:
    """Return the number of values of a chunk that a rank sends, but at least 1 if the rank needs the result."""
    chunk = collective.program.chunks[number]
    devices = chunk.devices
    sent = {
        operand
        for instruction in chunk.instructions
        for operand in instruction.operands
        if devices[operand] == rank != instruction.device
    }
    return max(1, len(sent)) if rank in chunk.destinations else len(sent)


def divide_chunks(collective: Collective, parts: Sequence[int]) -> Collective:
    """Return a collective in which the block of each chunk is divided into ``parts`` blocks of nearly equal size.

    >>> from crossreduce.export.formats.collective import collective as nccl_collective
    >>> from crossreduce.planning import ring
    >>> divide_chunks(nccl_collective(ring(["cpu:0", "cpu:1"])), (2, 1)).blocks
    (Block(chunk=0, offset=0, size=1), Block(chunk=1, offset=2, size=2), Block(chunk=0, offset=1, size=1))
    """
    factor = 1  # for the number of units
    while any(
        block.size * factor % parts[block.chunk] and block.size * factor < parts[block.chunk] * LEAST_UNITS
        for block in collective.blocks
    ):
        factor *= 2
    blocks = []
    for block in collective.blocks:
        size, count = block.size * factor, parts[block.chunk]
        starts = [k * size // count for k in range(count + 1)]
        for k in range(count):
            part = Block(block.chunk, block.offset * factor + starts[k], starts[k + 1] - starts[k])
            blocks.append((k / count, part))
    blocks.sort(key=lambda entry: (entry[0], entry[1].chunk))  # the first part of each chunk, then the second ones
    return replace(collective, units=collective.units * factor, blocks=tuple(part for _, part in blocks))
