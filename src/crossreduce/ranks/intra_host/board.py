"""``Board``: values that ranks of one host exchange in memory that they share already, while they make a further group.

Input: the memory of an older group to which all of them belong, and a key that no other exchange has. Output: the
values of all, or nothing if some do not come soon. An exchange at a store takes longer: the process that serves it must
run several times. A value is read only if it is complete: it has a digest of the key and the value.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

MOST_RANKS: Final = 16  # of a host that have room in its memory
_ROOM: Final = 2048  # for a value
_VALUES: Final = 2  # of each rank: others may still read the one before the latest
NBYTES: Final = MOST_RANKS * _VALUES * _ROOM
_PATIENCE_S: Final = 0.02
_PAUSES_S: Final = (20e-6, 5e-4)  # between two reads of the memory, first and longest
_GROWTH: Final = 1.3
_DIGEST: Final = 16
_LENGTH: Final = struct.Struct("<I")
_HEAD: Final = _DIGEST + _LENGTH.size


class Board:
    """The exchanges of some ranks of a host: those at ``places``, of which one is ``own``.

    ``memory``: of the host; the last ``NBYTES`` bytes are for its boards. ``turns``: counts the exchanges of this rank.
    ``is_near``: whether all ranks may read the memory of the processes of all others.
    """

    def __init__(
        self, memory: Any, places: Sequence[int], own: int, turns: Iterator[int], is_near: bool = False
    ) -> None:
        self._memory, self._places, self._own, self._turns, self.is_near = memory, places, own, turns, is_near

    def exchange(self, key: str, value: bytes) -> list[bytes] | None:
        """Return the values of all ranks, which call this with the same ``key``, or ``None`` if some do not come soon.

        One rank may get the values, and another one ``None``.
        """
        if len(value) > _ROOM - _HEAD:
            return None
        found: dict[int, bytes] = {self._own: value}
        until, pause = time.monotonic() + _PATIENCE_S, _PAUSES_S[0]
        data = self._digest(key, self._own, value) + _LENGTH.pack(len(value)) + value
        try:
            at = self._at(self._own, next(self._turns))
            self._memory[at : at + len(data)] = data
            while True:
                for place in self._places:
                    if place not in found and (theirs := self._read(key, place)) is not None:
                        found[place] = theirs
                if len(found) == len(self._places):
                    return [found[place] for place in self._places]
                if time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(_GROWTH * pause, _PAUSES_S[1])
        except ValueError:  # the older group is closed
            return None

    def _at(self, place: int, turn: int) -> int:
        return len(self._memory) - NBYTES + (place * _VALUES + turn % _VALUES) * _ROOM

    def _read(self, key: str, place: int) -> bytes | None:
        """Return the value of a rank, or ``None`` if there is none for this key."""
        for turn in range(_VALUES):
            at = self._at(place, turn)
            data = self._memory[at : at + _HEAD]
            (length,) = _LENGTH.unpack(data[_DIGEST:])
            if 0 < length <= _ROOM - _HEAD:
                value: bytes = self._memory[at + _HEAD : at + _HEAD + length]
                if self._digest(key, place, value) == data[:_DIGEST]:
                    return value
        return None

    @staticmethod
    def _digest(key: str, place: int, value: bytes) -> bytes:
        return blake2b(f"{place} {key} ".encode() + value, digest_size=_DIGEST).digest()
