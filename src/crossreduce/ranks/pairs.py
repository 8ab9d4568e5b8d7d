"""Collectives of two ranks of a host that may read the memory of each other's process.

Input: a collective, its size, and how values are computed. Output: the stages of one rank. Instead of copying its array
to the shared memory, from which the other rank copies it, a rank waits until the other one has made the call, and then
reads the other's array. Both leave when nobody reads their arrays any more. Measured on 2 cores, this takes 0.5 to 0.8
of the time of slots from 8 KiB on. Not used where it takes longer: all-reduces, and broadcasts to several ranks.
"""

from __future__ import annotations

from typing import Final

from ..ops import Numbers, copying
from ..packing import itemsize
from .instructions import PEER_BUFFER, BufferReference, RankInstruction
from .programs import STREAMING_BYTES

PAIRED: Final = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
# Pieces of the other rank's array are read into the slot. They should stay in the second-level cache.
PIECE_BYTES: Final = 1 << 17


def pair_stages(
    collective: str, root: int | None, size: int, numbers: Numbers, rank: int
) -> list[list[RankInstruction]]:
    """Return the stages of a rank; for the caller's buffers see ``one_host.host_collective``.

    >>> for stage in pair_stages("reduce_scatter", None, 64, copying("float32"), 0):
    ...     print([(each.size, *map(tuple, each.operands + each.results)) for each in stage])
    []
    [(64, (1048578, 0), (0, 0)), (64, (-1, 0), (0, 0), (-3, 0))]
    []
    """
    other, nbytes = 1 - rank, itemsize(numbers.dtype)
    streaming = size * nbytes >= STREAMING_BYTES

    def copied(source: int, result: int) -> RankInstruction:
        return RankInstruction(size, (BufferReference(source, 0),), (BufferReference(result, 0),), numbers)

    def of_peer(buffer: int) -> int:
        return PEER_BUFFER + 2 * other + buffer

    if collective == "broadcast":
        return [[], [] if rank == root else [copied(of_peer(0), ~0)], []]
    if collective == "all_gather":
        return [[], [copied(~0, ~(1 + rank)), copied(of_peer(0), ~(1 + other))], []]
    if collective == "all_to_all":
        return [[], [copied(~rank, ~(2 + rank)), copied(of_peer(rank), ~(2 + other))], []]
    assert collective == "reduce_scatter", collective
    made = []
    for start in range(0, size, PIECE_BYTES // nbytes):
        count, offset = min(PIECE_BYTES // nbytes, size - start), start * nbytes
        slot, own = BufferReference(rank, 0), BufferReference(~rank, offset)
        made.append(RankInstruction(count, (BufferReference(of_peer(rank), offset),), (slot,), copying(numbers.dtype)))
        operands = (own, slot) if rank == 0 else (slot, own)
        made.append(RankInstruction(count, operands, (BufferReference(~2, offset),), numbers, streaming))
    return [[], made, []]
