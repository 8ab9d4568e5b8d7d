"""Two words at the start of each rank's slot in groups on several hosts: the verdict and the remote wait.

Input: the shared memory of a host. Output: the words of the current op, as ``ctypes`` objects to read and write.
"""

from __future__ import annotations

import ctypes

from .programs import SLOT_BYTES
from .shared_memory import RankMemory

SAME, DIFFERENT = 1, 2  # values of the verdict: whether all hosts made the same call
_VERDICT, _REMOTE = 0, 1  # the numbers of the words


def verdict(memory: RankMemory, rank: int) -> ctypes.c_int32:
    """Return the word in which a leader tells the ranks of its host whether all hosts made the same call."""
    return _word(memory, rank, _VERDICT)


def remote_wait(memory: RankMemory, rank: int) -> ctypes.c_int32:
    """Return the word that is 1 while a rank waits for another host."""
    return _word(memory, rank, _REMOTE)


def is_waiting_for_hosts(memory: RankMemory, rank: int) -> bool:
    """Return whether a rank of this host waits for another host, in the current op or still in the previous one."""
    other = -SLOT_BYTES // 2 if memory.number % 2 else SLOT_BYTES // 2  # ops alternate between the halves of a slot
    return any(_word(memory, rank, _REMOTE, offset).value for offset in (0, other))


def _word(memory: RankMemory, rank: int, which: int, offset: int = 0) -> ctypes.c_int32:
    """Return word number ``which`` of the half of a rank's slot that the current op uses.

    ``offset``: the distance in bytes from this half to the half with the word: 0, or not 0 for the other half.
    """
    return ctypes.c_int32.from_address(memory.address(rank) + offset + 4 * which)
