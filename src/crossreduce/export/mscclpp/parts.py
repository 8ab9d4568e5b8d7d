"""Blocks of a collective divided into parts, so that several threadblocks move a chunk at the same time.

Input: a collective with one block per chunk, and how many parts each chunk needs. Output: the same collective with
smaller units and a block per part. Numbers of parts are powers of two, so that a plan fits as many messages as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..collective import Block, Collective


def divided(made: Collective, parts: Sequence[int]) -> Collective:
    """Return a collective whose blocks are divided into at least so many equal parts, by chunk.

    >>> from crossreduce.export.collective import collective
    >>> from crossreduce.planning import ring
    >>> divided(collective(ring(["cpu:0", "cpu:1"])), (3, 1)).blocks
    (Block(chunk=0, offset=0, size=1), Block(chunk=0, offset=1, size=1), Block(chunk=0, offset=2, size=1), \
Block(chunk=0, offset=3, size=1), Block(chunk=1, offset=4, size=4))
    """
    counts = {block.chunk: 1 << (parts[block.chunk] - 1).bit_length() for block in made.blocks}
    finer = 1
    while any(block.size * finer % counts[block.chunk] for block in made.blocks):
        finer *= 2
    blocks = []
    for block in made.blocks:
        size = block.size * finer // counts[block.chunk]
        blocks += [Block(block.chunk, block.offset * finer + k * size, size) for k in range(counts[block.chunk])]
    return replace(made, units=made.units * finer, blocks=tuple(blocks))
