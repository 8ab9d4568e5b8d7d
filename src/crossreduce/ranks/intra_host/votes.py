"""``vote``: the ranks of one host find out, in memory that they share, that all of them have come to a point.

Input: memory, at first zero. Output: the same on all ranks that get one. This takes less time than an exchange at the
rendezvous, but waits only for ranks that come soon: the first rank that has waited for longer ends the vote for all.
"""

from __future__ import annotations

import time
from typing import Any, Final

from ... import kernels
from . import board

NBYTES: Final = 4096 + board.NBYTES  # of the memory, which is the end of that of a host; a ``Board`` has the rest
_PAGE: Final = 1 << 16  # the largest page of any system
_PATIENCE_S: Final = 0.05
_PAUSES_S: Final = (20e-6, 1e-3)  # between two reads of the memory, first and longest
_GROWTH: Final = 1.3  # of these pauses
_COUNT, _AGAINST, _ENDED = (1 << 32) - 1, 1 << 32, 1 << 33  # of a vote's word: the ranks that have come; flags


def offset(nbytes: int) -> int:
    """Return where the memory for the vote begins in that of a host, which uses ``nbytes`` bytes for other purposes."""
    return -(-nbytes // _PAGE) * _PAGE


def vote(memory: Any, ranks: int, agrees: bool | None) -> bool | None:
    """Return whether all ``ranks`` ranks agree, or ``None``, on all of them, if some do not come soon.

    ``memory``: ends with the memory for a vote. ``agrees``: ``None`` if this rank has found that some do not.
    """
    native, (pause, longest), began = kernels.native(), _PAUSES_S, time.monotonic()
    at, flag = (len(memory) - NBYTES) // 8, _ENDED if agrees is None else 0 if agrees else _AGAINST
    while True:
        word = native.load_word(memory, at)
        if native.swap_word(memory, at, word, (word + 1) | flag):
            break
    while (word := native.load_word(memory, at)) & _COUNT < ranks and not word & _ENDED:
        if time.monotonic() > began + _PATIENCE_S:
            native.swap_word(memory, at, word, word | _ENDED)  # not if a rank has come just now
        else:
            time.sleep(pause)
            pause = min(_GROWTH * pause, longest)
    return None if word & _ENDED else not word & _AGAINST
