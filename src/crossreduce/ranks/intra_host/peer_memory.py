"""Collectives whose ranks read the memory of each other's processes.

Input: a collective, its size, and ``Numbers``. Output: the stages of one rank. No rank copies its array to the shared
memory. Each rank waits until the others have made the call, reads their arrays, and waits until its own array was read.
Time relative to copies through slots, measured on 2 cores: 0.5 to 0.8 for two ranks from 8 KiB on; 0.55 to 0.75 for
all-to-alls of 4 and 8 ranks from 32 KiB per pair on. All-reduces, and collectives in which several ranks read the same
array, take longer than with slots, so they use slots.
"""

from __future__ import annotations

from typing import Final

from ...ops import Numbers, copy_numbers
from ...packing import itemsize
from .instructions import PEER_BUFFER, READABLE_BUFFERS, BufferReference, RankInstruction
from .programs import STREAMING_BYTES

OF_TWO_RANKS: Final = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
LEAST_BYTES: Final = 1 << 15
LEAST_BYTES_OF_TWO_RANKS: Final = 1 << 13
# Pieces of the other rank's array are read into the slot. They should stay in the second-level cache.
PIECE_BYTES: Final = 1 << 17


def is_used(collective: str, ranks: int, nbytes: int) -> bool:
    """Return whether ranks read each other's memory in a collective whose arrays have ``nbytes`` bytes.

    >>> is_used("broadcast", 2, 10_000), is_used("all_to_all", 8, 10_000), is_used("all_to_all", 8, 40_000)
    (True, False, True)
    """
    if ranks == 2:
        return collective in OF_TWO_RANKS and nbytes >= LEAST_BYTES_OF_TWO_RANKS
    return collective == "all_to_all" and 2 < ranks <= READABLE_BUFFERS and nbytes >= LEAST_BYTES


def peer_stages(
    collective: str, ranks: int, root: int | None, size: int, numbers: Numbers, rank: int
) -> list[list[RankInstruction]]:
    """Return the stages of a rank. The caller's buffers are numbered as in ``one_host.host_collective``.

    >>> for stage in peer_stages("reduce_scatter", 2, None, 64, copy_numbers("float32"), 0):
    ...     print([(each.size, *map(tuple, each.operands + each.results)) for each in stage])
    []
    [(64, (1048640, 0), (0, 0)), (64, (-1, 0), (0, 0), (-3, 0))]
    []
    """
    nbytes = itemsize(numbers.dtype)
    others = [(rank + k) % ranks for k in range(1, ranks)]  # ranks begin with different peers, to read in parallel

    def copy(source: int, result: int) -> RankInstruction:
        return RankInstruction(size, (BufferReference(source, 0),), (BufferReference(result, 0),), numbers)

    def peer_region(peer: int, buffer: int) -> int:
        return PEER_BUFFER + READABLE_BUFFERS * peer + buffer

    # Region ~k is the caller's buffer k: first the sources, then the results.
    if collective == "all_to_all":
        own = copy(~rank, ~(ranks + rank))
        return [[], [own, *(copy(peer_region(peer, rank), ~(ranks + peer)) for peer in others)], []]
    (other,) = others
    if collective == "broadcast":
        return [[], [] if rank == root else [copy(peer_region(other, 0), ~0)], []]
    if collective == "all_gather":
        return [[], [copy(~0, ~(1 + rank)), copy(peer_region(other, 0), ~(1 + other))], []]
    assert collective == "reduce_scatter", collective
    streaming, instructions = size * nbytes >= STREAMING_BYTES, []
    for start in range(0, size, PIECE_BYTES // nbytes):
        count, offset = min(PIECE_BYTES // nbytes, size - start), start * nbytes
        slot, mine = BufferReference(rank, 0), BufferReference(~rank, offset)
        theirs = BufferReference(peer_region(other, rank), offset)
        instructions.append(RankInstruction(count, (theirs,), (slot,), copy_numbers(numbers.dtype)))
        operands = (mine, slot) if rank == 0 else (slot, mine)
        instructions.append(RankInstruction(count, operands, (BufferReference(~2, offset),), numbers, streaming))
    return [[], instructions, []]
