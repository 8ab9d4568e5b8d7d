"""The memory of a symbolic run, divided into cells that every operation accesses completely or not at all.

Input: all moves of a plan, and the bytes of the ranks' buffers. Output: cells with their values, and for each move its
cells. The number of cells depends on how the moves divide the memory, not on the number of bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from .....errors import ScheduleError
from ...proof import Contributions, TooLargeError
from ..layout import Area
from .clocks import NOTHING, AccessRecord, Clock
from .data_moves import Move

MOST_CELLS: Final = 2_000_000  # in all moves together, counted once for each operand; more would take minutes
MOST_CUTS: Final = 1 << 19  # the most divisions of an operation's memory that are due to other operations


@dataclass(eq=False)
class Cell:
    """Consecutive bytes of an area."""

    area: Area
    start: int
    size: int
    value: Contributions | None = None
    packets: int = 0  # the number of the call whose packets it contains, or 0 for data without flags
    writer: AccessRecord | None = None
    readers: list[AccessRecord] = field(default_factory=list)
    sent: Clock = NOTHING  # for packets, the clock that their receiver gets
    received: bool = False  # whether the packets were read, so that they had arrived


Piece = tuple[tuple[Cell, ...], tuple[Cell, ...]]  # a fraction of a move: a cell of each source and of each destination


class Cells:
    """All cells, and for each move its pieces. ``areas`` has the ends of areas and positions where they are divided."""

    def __init__(self, name: str, moves: list[Move], areas: dict[Area, tuple[int, ...]]) -> None:
        self.cuts = {area: sorted(set(positions)) for area, positions in areas.items()}
        self._known = {area: set(positions) for area, positions in self.cuts.items()}
        self.name = name
        distinct = list(dict.fromkeys(moves))
        self._divide(distinct)
        self.cells = {area: [Cell(area, a, b - a) for a, b in pairwise(cuts)] for area, cuts in self.cuts.items()}
        self.pieces = {move: self._pieces(move) for move in distinct}
        total = sum(len(self.pieces[move]) * len(move.srcs + move.dsts) for move in moves)
        if total > MOST_CELLS:
            raise self._too_large(f"operations access {total} parts of buffers, more than {MOST_CELLS}")

    def _divide(self, moves: list[Move]) -> None:
        """Cut areas at both ends of all ranges. A cut in one operand of a move also cuts its other operands there."""
        users: defaultdict[Area, list[tuple[int, int, int, int]]] = defaultdict(list)  # start, end, scale, move
        queue: list[tuple[Area, int]] = [(area, cut) for area, cuts in self.cuts.items() for cut in cuts]
        for number, move in enumerate(moves):
            for area, start, scale in dict.fromkeys(move.srcs + move.dsts):
                end = start + scale * move.size
                users[area].append((start, end, scale, number))
                queue += [(area, cut) for cut in (start, end) if self._cut(area, cut)]
        longest = {area: max(end - start for start, end, _, _ in ranges) for area, ranges in users.items()}
        for ranges in users.values():
            ranges.sort()
        work = 0
        while queue:
            area, cut = queue.pop()
            ranges = users[area]
            first, last = (bisect_left(ranges, (end, 0, 0, 0)) for end in (cut - longest.get(area, 0), cut))
            work += last - first
            if work > MOST_CUTS:
                raise self._too_large(f"operations divide the memory of each other more than {MOST_CUTS} times")
            for start, end, scale, number in ranges[first:last]:
                if not start < cut < end:
                    continue
                if (cut - start) % scale:
                    raise ScheduleError(f"{self.name}: operations access parts of the packets of gpu {area[0]}.")
                move, offset = moves[number], (cut - start) // scale
                for other, begin, factor in move.srcs + move.dsts:
                    if self._cut(other, begin + factor * offset):
                        queue.append((other, begin + factor * offset))

    def _too_large(self, given: str) -> ScheduleError:
        return TooLargeError.of(f"{self.name}: the plan is too large to be verified.", given)

    def _cut(self, area: Area, position: int) -> bool:
        """Cut an area at a position, and return whether this is a new cut."""
        if position in self._known[area]:
            return False
        self._known[area].add(position)
        insort(self.cuts[area], position)
        return True

    def _pieces(self, move: Move) -> list[Piece]:
        operands = move.srcs + move.dsts
        lists = [self.cells_between(area, start, start + scale * move.size) for area, start, scale in operands]
        sources = len(move.srcs)
        return [(cells[:sources], cells[sources:]) for cells in zip(*lists, strict=True)]

    def cells_between(self, area: Area, start: int, end: int) -> list[Cell]:
        """Return the cells from one cut of an area to another."""
        first, last = (bisect_left(self.cuts[area], position) for position in (start, end))
        return self.cells[area][first:last]
