"""``ExactExchange``: the exchange of a stripe between hosts in an exact reduction.

Input: the terms of this host's ranks. Output: the results. Hosts send blocks of partial sums that are exact (see
``partial_sums``). A block states how many further terms it has. If it has any, a second message with another tag
contains them. These messages are in the order of their blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ...lowering import Combination
from ...packing import itemsize
from ..failures.peer_errors import PeerDisconnected
from ..intra_host.partial_sums import FURTHER_NBYTES, PartialSums, is_pair, most_further, reals, round_sums
from ..transports.base import Transport
from .exchange import Exchange, ExchangeProgram, wait_for

FURTHER_TAG: Final = 2  # the tags of other messages are in multi_host and measurement


class HostTerms(NamedTuple):
    """``size`` elements of each rank of a host, at ``addresses``.

    ``offset``: where their sums would be in the memory of an exchange that is not exact, in bytes.
    """

    size: int
    addresses: Sequence[int]
    offset: int


class ExactExchange(Exchange):
    """One op's exchange in an exact reduction of ``ranks`` ranks; see ``Exchange``. Its partial results are blocks."""

    def __init__(self, program: ExchangeProgram, transport: Transport, tag: int, timeout_s: float, ranks: int) -> None:
        super().__init__(program, transport, tag, timeout_s)
        self._ranks = ranks
        self._further: dict[tuple[int, int], bytearray] = {}  # the further terms, by piece and value

    def add(self, piece: int, terms: Iterable[HostTerms]) -> None:
        """Write the partial sums of a piece; ``terms`` contains every element of the piece once."""
        dtype, chunks = self._program.numbers.dtype, len(self._program.spans[piece])
        width = itemsize(self._program.numbers.accumulator)
        further_terms = [bytearray() for _ in range(chunks)]
        for size, addresses, offset in terms:
            begin = (offset - self._program.partial_at(piece)) // width
            for chunk, (start, stop) in enumerate(self._program.spans[piece]):
                first, end = max(start, begin), min(stop, begin + size)
                if first < end:
                    sources = [address + (first - begin) * itemsize(dtype) for address in addresses]
                    count, at = (end - first) * reals(dtype), (first - start) * reals(dtype)
                    further_terms[chunk] += self._block(piece, chunk).add(dtype, sources, b"", at, count)
        for chunk, further in enumerate(further_terms):
            self._keep(piece, chunk, further)

    def send(self, stage: int) -> None:
        """Start to send what this stage requires."""
        super().send(stage)
        for piece, r in self._active(stage):
            for value, host in self._program.part.stages[r].sends:
                further = self._further.get((piece, value))
                if further:
                    rank = self._program.peers[host]
                    pending = self._transport.send(_address(further), len(further), rank, FURTHER_TAG)
                    self._sends[piece % self._program.window].append((pending, rank))

    def post_receives(self, stage: int) -> None:
        """Start to receive the messages of a stage; forget further terms of pieces whose memory is used again."""
        super().post_receives(stage)
        for piece, r in self._active(stage):
            if r == 0:
                for key in [key for key in self._further if key[0] == piece - self._program.window]:
                    del self._further[key]

    def _finish(self, piece: int, r: int) -> None:
        received = self._receives[piece, r]
        for value, host in self._program.part.stages[r].receives:
            if not self._program.pieces[piece].places[value][1]:
                continue
            if received:  # else it came in the first messages
                wait_for(*received[0], self._timeout_s)
                del received[0]
            if not self._program.part.values[value].final:
                self._receive_further(piece, value, self._program.peers[host])
        super()._finish(piece, r)

    def _receive_further(self, piece: int, value: int, rank: int) -> None:
        """Receive the further terms of a value whose block has arrived, if it has any."""
        block = self._block(piece, value)
        count = block.read_count()
        if not 0 <= count <= most_further(block.size, self._ranks):
            why = f"it announces {count} further terms of {block.size} partial sums of {self._ranks} ranks"
            raise PeerDisconnected(rank, why)
        if count:
            further = self._further[piece, value] = bytearray(count * FURTHER_NBYTES)
            pending = self._transport.receive(_address(further), len(further), rank, FURTHER_TAG)
            wait_for(pending, rank, self._timeout_s)

    def _combine(self, piece: int, combination: Combination) -> None:
        result, operands, final = combination
        blocks = [self._block(piece, value) for value in operands]
        further = b"".join(self._further.get((piece, value), b"") for value in operands)
        if final:
            address, numbers = self._places(piece)[0], self._program.numbers
            round_sums(blocks, further, numbers, address + self._places(piece)[1][result][0], blocks[0].size)
        else:
            sources = [array for block in blocks for array in block.arrays()]
            self._keep(piece, result, bytearray(self._block(piece, result).add("float64", sources, further)))

    def _keep(self, piece: int, value: int, further: bytearray) -> None:
        """Store the further terms of a value, and their number in its block."""
        block = self._block(piece, value)
        if block.size:
            self._further[piece, value] = further
            block.write_count(further)

    def _block(self, piece: int, value: int) -> PartialSums:
        base, places = self._places(piece)
        place, _, size = places[value]
        dtype = self._program.numbers.dtype
        return PartialSums(base + place, size * reals(dtype), is_pair(dtype))


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
