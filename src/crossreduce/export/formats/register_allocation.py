"""Where each rank stores the values of a program: register allocation for the exporters.

The program is in static single assignment, and buffers are not. An instruction may not write to memory that another
instruction of its round still has to read. An exporter therefore reports each read when it writes the operation that
performs it, and a new value gets only memory whose value has no reads left. Out of place, the inputs stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from .collective import Collective, Location


class MemoryPlacement:
    """The locations of the values of some blocks of a collective, for calls in place or out of place.

    ``b`` is the number of a block, and values are numbered within their chunk, as in ``ChunkProgram``. A new value is
    stored in the rank's output if the rank is a destination and the output is free, else in scratch memory.

    >>> from crossreduce.planning import one_device
    >>> from crossreduce.export.formats.collective import collective
    >>> placement = MemoryPlacement(collective(one_device(["cpu:0", "cpu:1"])), [0], inplace=True)
    >>> placement.store(0, 0, 2)  # cpu:0's input is not read yet
    Location(buffer='s', offset=0)
    """

    def __init__(self, made: Collective, blocks: Iterable[int], *, inplace: bool) -> None:
        self.made: Final = made
        self.inplace: Final = inplace
        self.locations: Final[dict[tuple[int, int], Location]] = {}  # where each (block, value) is stored
        self.scratch: Final = [0] * made.ranks  # units of scratch memory, by rank
        self._reads_left: Final[Counter[tuple[int, int]]] = Counter()  # by block and value; a result's never reach 0
        self._stored: Final[dict[tuple[int, int, Location], int]] = {}  # the last value by rank, block and memory
        self._spares: Final[dict[tuple[int, int], list[Location]]] = {}  # scratch memory by rank and block
        for b in blocks:
            chunk = made.program.chunks[made.blocks[b].chunk]
            for value, source in enumerate(chunk.sources):
                self._put(source, b, value, made.input(source, made.blocks[b]))
            operands = (operand for instruction in chunk.instructions for operand in instruction.operands)
            self._reads_left.update((b, value) for value in (*operands, *chunk.results))

    def read(self, b: int, value: int) -> None:
        """Record that the exporter has written an operation that reads a value."""
        self._reads_left[b, value] -= 1

    def store(self, rank: int, b: int, value: int) -> Location:
        """Choose memory for a new value, where no other value has reads left, and return its location."""
        block = self.made.blocks[b]
        if rank in self.made.program.chunks[block.chunk].destinations:
            output = self.made.output(rank, block)
            if self._free(rank, b, output):
                return self._put(rank, b, value, output)
        return self._put(rank, b, value, self.spare(rank, b))

    def move(self, rank: int, b: int, value: int, location: Location) -> None:
        """Record that a value is stored at a location other than the one from ``store``: one from ``spare``."""
        self._put(rank, b, value, location)

    def spare(self, rank: int, b: int) -> Location:
        """Return scratch memory of a rank for a value of block ``b``.

        This is memory that held values of the block before, if all reads of the last one are done; else new memory.
        """
        spares = self._spares.setdefault((rank, b), [])
        for spare in spares:
            if self._free(rank, b, spare):
                return spare
        spares.append(self.fresh(rank, b))
        return spares[-1]

    def fresh(self, rank: int, b: int) -> Location:
        """Return new scratch memory of the size of a block."""
        self.scratch[rank] += self.made.blocks[b].size
        return Location("s", self.scratch[rank] - self.made.blocks[b].size)

    def memory(self, rank: int, location: Location) -> Location:
        """Return the location; if input and output share its memory, the same location for both."""
        return self.made.in_place(rank, location) if self.inplace else location

    def _free(self, rank: int, b: int, location: Location) -> bool:
        value = self._stored.get((rank, b, self.memory(rank, location)))
        return value is None or not self._reads_left[b, value]

    def _put(self, rank: int, b: int, value: int, location: Location) -> Location:
        self.locations[b, value] = location
        self._stored[rank, b, self.memory(rank, location)] = value
        return location
