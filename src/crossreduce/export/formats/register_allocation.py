"""Choose where each rank stores the values of a program: register allocation for the exporters.

The program is in static single assignment, but buffers are reused. An instruction must not write to memory that another
instruction of the same round still has to read. So an exporter records each read when it writes the operation that
reads. A new value only gets memory whose old value has no pending reads. Out of place, the inputs stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from .collective import Collective, Location


class MemoryPlacement:
    """The locations of the values of some blocks of a collective, for calls in place or out of place.

    ``b`` is the number of a block. Values are numbered within their chunk, as in ``ChunkProgram``. A new value is
    stored in the rank's output if the rank is a destination and the output is free, and otherwise in scratch memory.

    >>> from crossreduce.planning import one_device
    >>> from crossreduce.export.formats.collective import collective as nccl_collective
    >>> placement = MemoryPlacement(nccl_collective(one_device(["cpu:0", "cpu:1"])), [0], inplace=True)
    >>> placement.store(0, 0, 2)  # cpu:0's input is not read yet
    Location(buffer='s', offset=0)
    """

    def __init__(self, collective: Collective, blocks: Iterable[int], *, inplace: bool) -> None:
        self.collective: Final = collective
        self.inplace: Final = inplace
        self.locations: Final[dict[tuple[int, int], Location]] = {}  # where each (block, value) is stored
        self.scratch: Final = [0] * collective.ranks  # units of scratch memory, by rank
        self._pending_reads: Final[Counter[tuple[int, int]]] = Counter()  # by block and value; never 0 for a result
        self._stored: Final[dict[tuple[int, int, Location], int]] = {}  # the latest value by rank, block and memory
        self._reusable: Final[dict[tuple[int, int], list[Location]]] = {}  # scratch memory by rank and block
        for b in blocks:
            chunk = collective.program.chunks[collective.blocks[b].chunk]
            for value, source in enumerate(chunk.sources):
                self._put(source, b, value, collective.input(source, collective.blocks[b]))
            operands = (operand for instruction in chunk.instructions for operand in instruction.operands)
            self._pending_reads.update((b, value) for value in (*operands, *chunk.results))

    def read(self, b: int, value: int) -> None:
        """Record that the exporter has written an operation that reads a value."""
        self._pending_reads[b, value] -= 1

    def store(self, rank: int, b: int, value: int) -> Location:
        """Choose memory for a new value, and return its location. No value that is stored there has pending reads."""
        block = self.collective.blocks[b]
        if rank in self.collective.program.chunks[block.chunk].destinations:
            output = self.collective.output(rank, block)
            if self._is_free(rank, b, output):
                return self._put(rank, b, value, output)
        return self._put(rank, b, value, self.scratch_for(rank, b))

    def move(self, rank: int, b: int, value: int, location: Location) -> None:
        """Record that a value is stored at a location from ``scratch_for`` instead of the one from ``store``."""
        self._put(rank, b, value, location)

    def scratch_for(self, rank: int, b: int) -> Location:
        """Return scratch memory of a rank for a value of data block ``b``.

        Memory of an earlier value of the block is reused once that value has no pending reads.
        """
        locations = self._reusable.setdefault((rank, b), [])
        for location in locations:
            if self._is_free(rank, b, location):
                return location
        locations.append(self.fresh(rank, b))
        return locations[-1]

    def fresh(self, rank: int, b: int) -> Location:
        """Return scratch memory of the size of block ``b`` that no value has used before."""
        self.scratch[rank] += self.collective.blocks[b].size
        return Location("s", self.scratch[rank] - self.collective.blocks[b].size)

    def memory(self, rank: int, location: Location) -> Location:
        """Return the location under which memory is recorded. Input and output that share memory have the same one."""
        return self.collective.in_place(rank, location) if self.inplace else location

    def _is_free(self, rank: int, b: int, location: Location) -> bool:
        value = self._stored.get((rank, b, self.memory(rank, location)))
        return value is None or not self._pending_reads[b, value]

    def _put(self, rank: int, b: int, value: int, location: Location) -> Location:
        """Record that a value is stored at a location, and return the location."""
        self.locations[b, value] = location
        self._stored[rank, b, self.memory(rank, location)] = value
        return location
