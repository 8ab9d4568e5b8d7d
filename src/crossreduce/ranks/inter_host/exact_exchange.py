"""``ExactExchange``: the exchange of a stripe between hosts in an exact reduction.

Input: the terms of this host's ranks. Output: the results. Hosts send blocks of exact partial sums (see
``partial_sums``). The header of a block contains the number of its overflow terms: the doubles that do not fit into the
block. If there are any, a second message with ``OVERFLOW_TAG`` has them. These messages follow the order of blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ...lowering import Combination
from ...packing import itemsize
from ..failures.peer_errors import PeerDisconnected
from ..intra_host.partial_sums import OVERFLOW_NBYTES, PartialSums, is_pair, most_overflow, reals, round_sums
from ..transports.base import Transport
from .exchange import Exchange, ExchangeProgram, wait_for

OVERFLOW_TAG: Final = 2  # the tags of other messages are in multi_host and measurement


class HostTerms(NamedTuple):
    """Terms of a reduction: for each rank of a host the address of ``size`` elements.

    ``offset``: the offset in bytes at which an exchange that is not exact would store the sums of these elements.
    """

    size: int
    addresses: Sequence[int]
    offset: int


class ExactExchange(Exchange):
    """The exchange of one exact reduction of ``ranks`` ranks. Its partial results are blocks of ``PartialSums``."""

    def __init__(self, program: ExchangeProgram, transport: Transport, tag: int, timeout_s: float, ranks: int) -> None:
        super().__init__(program, transport, tag, timeout_s)
        self._ranks = ranks
        self._overflow: dict[tuple[int, int], bytearray] = {}  # overflow terms, by the numbers of piece and value

    def add(self, piece: int, terms: Iterable[HostTerms]) -> None:
        """Write this host's partial sums of a piece. Each element of the piece must be in exactly one of ``terms``."""
        dtype, chunks = self._program.numbers.dtype, len(self._program.spans[piece])
        width = itemsize(self._program.numbers.accumulator)
        overflows = [bytearray() for _ in range(chunks)]
        for size, addresses, offset in terms:
            begin = (offset - self._program.partial_at(piece)) // width  # number of the first element in the piece
            for chunk, (start, stop) in enumerate(self._program.spans[piece]):
                first, end = max(start, begin), min(stop, begin + size)
                if first < end:
                    sources = [address + (first - begin) * itemsize(dtype) for address in addresses]
                    count, at = (end - first) * reals(dtype), (first - start) * reals(dtype)
                    overflows[chunk] += self._block(piece, chunk).add(dtype, sources, b"", at, count)
        for chunk, overflow in enumerate(overflows):
            self._keep(piece, chunk, overflow)

    def send(self, stage: int) -> None:
        """Start to send the blocks of a stage, and their overflow terms."""
        super().send(stage)
        for piece, r in self._program.active(stage):
            for value, host in self._program.part.stages[r].sends:
                overflow = self._overflow.get((piece, value))
                if overflow:
                    rank = self._program.peers[host]
                    pending = self._transport.send(_address(overflow), len(overflow), rank, OVERFLOW_TAG)
                    self._sends[piece % self._program.window].append((pending, rank))

    def post_receives(self, stage: int) -> None:
        """Start to receive the blocks of a stage. Free the overflow terms of pieces whose memory is used again."""
        super().post_receives(stage)
        for piece, r in self._program.active(stage):
            if r == 0:
                for key in [key for key in self._overflow if key[0] == piece - self._program.window]:
                    del self._overflow[key]

    def _finish(self, piece: int, r: int) -> None:
        """Wait for each block of round ``r`` of a piece, receive its overflow terms, and combine the values."""
        received = self._receives[piece, r]
        for value, host in self._program.part.stages[r].receives:
            if not self._program.pieces[piece].places[value][1]:
                continue
            if received:  # there is nothing to wait for if the op's first messages contained the block
                wait_for(*received[0], self._timeout_s)
                del received[0]
            if not self._program.part.values[value].final:
                self._receive_overflow(piece, value, self._program.peers[host])
        super()._finish(piece, r)

    def _receive_overflow(self, piece: int, value: int, rank: int) -> None:
        """Receive the overflow terms of a value, if its block, which has arrived, announces any."""
        block = self._block(piece, value)
        count = block.read_count()
        if not 0 <= count <= most_overflow(block.size, self._ranks):
            why = f"it announces {count} overflow terms for {block.size} partial sums of {self._ranks} ranks"
            raise PeerDisconnected(rank, why)
        if count:
            overflow = self._overflow[piece, value] = bytearray(count * OVERFLOW_NBYTES)
            pending = self._transport.receive(_address(overflow), len(overflow), rank, OVERFLOW_TAG)
            wait_for(pending, rank, self._timeout_s)

    def _combine(self, piece: int, combination: Combination) -> None:
        """Add the operands' partial sums. If the result is final, round it, otherwise store its overflow terms."""
        result, operands, final = combination
        blocks = [self._block(piece, value) for value in operands]
        overflow = b"".join(self._overflow.get((piece, value), b"") for value in operands)
        if final:
            round_sums(blocks, overflow, self._program.numbers, self._places(piece)[result][0], blocks[0].size)
        else:
            sources = [array for block in blocks for array in block.arrays()]
            self._keep(piece, result, bytearray(self._block(piece, result).add("float64", sources, overflow)))

    def _keep(self, piece: int, value: int, overflow: bytearray) -> None:
        """Store the overflow terms of a value, and write their number into the header of its block."""
        block = self._block(piece, value)
        if block.size:
            self._overflow[piece, value] = overflow
            block.write_count(overflow)

    def _block(self, piece: int, value: int) -> PartialSums:
        address, _, size = self._places(piece)[value]
        dtype = self._program.numbers.dtype
        return PartialSums(address, size * reals(dtype), is_pair(dtype))


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
