"""The exchange of a stripe between hosts: one rank of each host runs the hosts' schedule over a transport.

Input: a lowered program whose devices are hosts, a transport, and this host's partial result of each piece. Output: the
fully reduced pieces. The other ranks of the host are not involved.

Pieces are pipelined: piece j executes round r in stage t = j + lag * r of the exchange. The lag is that of the
transport, by default ROUND_LAG, or 1 for a single piece. The order of all messages is fixed, so messages need no names.
A message is sent lag - 1 stages before the receiver waits for it, so that the link is not idle. Receives are posted one
stage early. A round sends only values that were complete when it began, as ``verify`` proves. No value of a piece is
overwritten before the piece is complete.
An op may consist of several exchanges, which execute each stage together (``run_stage``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

from ... import kernels
from ...lowering import Combination, DeviceProgram, Program
from ...ops import Numbers, copy_numbers
from ...packing import itemsize
from ..failures.peer_errors import PeerDisconnected, PeerTimeout
from ..intra_host.instructions import BufferReference, HostTransfer, RankInstruction, kernel
from ..intra_host.partial_sums import header_nbytes, partial_itemsize
from ..intra_host.programs import LINE
from ..transports.base import PendingMessage, Transport

EAGER_BYTES: Final = 1 << 16
"""If a leader's stripes have at most this many bytes, the messages that compare the calls also carry round 0."""
ROUND_LAG: Final = 2
"""Stages from a round to the next, if there are several pieces. With 1, the link would be idle while values combine."""


class PieceMemory(NamedTuple):
    """Where the values of a piece are in the memory of the piece, which has ``nbytes`` bytes.

    ``places``: for each local value its offset in bytes, its size in bytes, and its number of elements. ``results_at``:
    the offset of the first chunk's result. The results of the other chunks follow in the order of the chunks.
    ``arrays``: if the exchange uses the caller's arrays (see ``ExchangeProgram.arrays``), for each value 0 or 1 if it
    has its place in the piece of the first or the second one, or 2. ``copies``: for each value the offset of a copy,
    which messages use in place of the caller's array, or -1; empty if there are none.
    """

    places: tuple[tuple[int, int, int], ...]
    results_at: int
    nbytes: int
    arrays: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class ExchangeProgram(NamedTuple):
    """What one host executes in an exchange. The program is compiled once and can be run any number of times."""

    part: DeviceProgram  # what this host executes of the lowered program
    peers: tuple[int, ...]  # for each host the rank that runs the exchange there
    pieces: tuple[PieceMemory, ...]  # the memory of each piece
    spans: tuple[tuple[tuple[int, int], ...], ...]  # for each piece: first and end element of each chunk
    numbers: Numbers  # the op and dtypes; partial results have the accumulator's dtype, or are blocks of exact sums
    lag: int  # stages from a round of a piece to its next round
    delay: int  # a piece that enters in stage t is complete in stage t + delay
    window: int  # the number of pieces that have memory at the same time
    room: int  # bytes of each piece's memory
    eager: bool  # whether the op's first messages carry the first round, see ``first_data``; only if there is one piece
    # If the partial results are the caller's array, and the results go into one: the numbers of these buffers.
    arrays: tuple[int, int] | None = None
    starts: tuple[int, ...] = ()  # the number of elements before each piece

    def partial_at(self, piece: int) -> int:
        """Return the offset in the exchange's memory at which the caller must write a piece's partial result."""
        return piece % self.window * self.room

    def results_at(self, piece: int) -> int:
        """Return the offset in the exchange's memory at which a piece's results are, if this host needs them."""
        return self.partial_at(piece) + self.pieces[piece].results_at

    @property
    def nbytes(self) -> int:
        """The bytes of the exchange's memory."""
        return self.window * self.room

    def transfers(self, r: int, buffer: int, received: bool, piece: int = 0) -> tuple[HostTransfer, ...]:
        """Return what round ``r`` of a piece sends or receives. ``buffer``: the number of the memory."""
        stage, places = self.part.stages[r], self.pieces[piece].places
        moves = stage.receives if received else stage.sends
        return tuple(
            HostTransfer(self.peers[host], self._copy(piece, value, buffer), places[value][1])
            for value, host in moves
            if places[value][1]
        )

    def combined(self, r: int, buffer: int, piece: int = 0) -> list[RankInstruction]:
        """Return what round ``r`` of a piece computes. ``buffer``: the number of the memory."""
        places = self.pieces[piece].places
        return [
            RankInstruction(
                places[result][2],
                tuple(self._reference(piece, value, buffer) for value in operands),
                (self._reference(piece, result, buffer),),
                self.numbers_of(final),
            )
            for result, operands, final in self.part.stages[r].combinations
            if places[result][1]
        ]

    def copied(self, r: int, buffer: int, received: bool, piece: int, streaming: bool = False) -> list[RankInstruction]:
        """Return what copies the values that round ``r`` of a piece sends, or has received: see ``PieceMemory``."""
        stages, places, copies = self.part.stages, self.pieces[piece].places, self.pieces[piece].copies
        arrived = {value for stage in stages for value, _ in stage.receives}
        before = {value for stage in stages[:r] for value, _ in stage.sends} | arrived
        moves = stages[r].receives if received else stages[r].sends
        chosen = dict.fromkeys(value for value, _ in moves if received or value not in before)
        made = []
        for value in chosen:
            if copies and copies[value] >= 0 and places[value][1]:
                ends = self._reference(piece, value, buffer), self._copy(piece, value, buffer)
                target, source = ends if received else ends[::-1]
                using = copy_numbers(self.numbers.dtype)
                made.append(RankInstruction(places[value][2], (source,), (target,), using, streaming and received))
        return made

    def _copy(self, piece: int, value: int, buffer: int) -> BufferReference:
        """Return where messages have a value of a piece."""
        copies = self.pieces[piece].copies
        if not copies or copies[value] < 0:
            return self._reference(piece, value, buffer)
        return BufferReference(~buffer, self.partial_at(piece) + copies[value])

    def _reference(self, piece: int, value: int, buffer: int) -> BufferReference:
        """Return where a value of a piece is: in the memory, whose number is ``buffer``, or in a caller's array."""
        offset = self.pieces[piece].places[value][0]
        if self.arrays is None or (array := self.pieces[piece].arrays[value]) == 2:
            return BufferReference(~buffer, self.partial_at(piece) + offset)
        return BufferReference(~self.arrays[array], self.starts[piece] * itemsize(self.numbers.dtype) + offset)

    def active(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield each piece that executes a round in a stage, and this round."""
        for r in range(len(self.part.stages)):
            piece = stage - self.lag * r
            if 0 <= piece < len(self.pieces):
                yield piece, r

    def numbers_of(self, final: bool) -> Numbers:
        """Return the numbers with which values are combined. Only a final result is divided and rounded."""
        numbers = self.numbers._replace(dtype=self.numbers.accumulator)
        return numbers if final else numbers._replace(result=numbers.accumulator, divisor=1)


def delay(program: Program, pieces: int, lag: int = ROUND_LAG) -> int:
    """Return the number of stages from a piece's first stage to its completion, at least 1."""
    return max(1, (1 if pieces == 1 else lag) * program.round_count - 1)  # a single piece does not wait for others


@lru_cache(maxsize=1024)
def exchange_program(
    program: Program,
    host: int,
    peers: tuple[int, ...],
    sizes: tuple[int, ...],
    numbers: Numbers,
    eager: bool = False,
    arrays: tuple[int, int] | None = None,
    lag: int = ROUND_LAG,
    copies: bool = False,
) -> ExchangeProgram:
    """Return the program of host number ``host`` for an exchange between hosts.

    ``sizes``: the elements of each piece. ``program``: the lowered schedule. Its devices are the hosts, and all chunks
    must have the same sources and destinations. ``peers``, ``eager``, ``arrays``: see ``ExchangeProgram``. ``lag``: of
    several pieces. ``copies``: whether messages use copies of the caller's arrays.
    """
    program.require_uniform()
    part = program.on(host)
    stages_late, lag = delay(program, len(sizes), lag), 1 if len(sizes) == 1 else lag
    # If this host is the only source, its partial result is already the result.
    has_results = program.chunks[0].sources == (host,)
    given = part, program, numbers, has_results, arrays is not None, copies
    pieces = tuple(_piece_memory(size, *given) for size in sizes)
    # The memory of a piece is used for stages_late + 2 stages: from the stage before its first one, which posts its
    # receives, to the one that completes it. When it is used again, its last sends are some stages old.
    window = min(len(sizes), stages_late + 2)
    room = max(piece.nbytes for piece in pieces)
    spans = tuple(program.spans(size) for size in sizes)
    return ExchangeProgram(
        part,
        peers,
        pieces,
        spans,
        numbers,
        lag,
        stages_late,
        window,
        room,
        eager,
        arrays,
        tuple(accumulate(sizes, initial=0)),
    )


@lru_cache(maxsize=4096)
def _piece_memory(
    size: int, part: DeviceProgram, program: Program, numbers: Numbers, has_results: bool, is_direct: bool, copies: bool
) -> PieceMemory:
    """Return where the values are: the partial result, then results (none if ``has_results``), then other values.

    ``is_direct``: whether the partial result and the results are in the caller's arrays. ``copies``: whether messages
    use copies of them.
    """
    spans = program.spans(size)
    partial, result, header = partial_itemsize(numbers), itemsize(numbers.result), header_nbytes(numbers)
    kept = set() if has_results else {value for value in part.results if value >= 0}
    inputs = 0 if is_direct else _rounded_to_lines(size * partial + len(spans) * header)
    results_at = inputs if kept else 0
    at = inputs + _rounded_to_lines(size * result) if kept and not is_direct else inputs
    places = []
    for number, (chunk, final) in enumerate(part.values):
        start, stop = spans[chunk]
        nbytes = (stop - start) * (result if final else partial)
        if not final and nbytes:
            nbytes += header
        if number < len(spans):
            place = start * partial + number * header
        elif number in kept:
            place = results_at + start * result
        else:
            place = at
            at += _rounded_to_lines(nbytes)
        places.append((place, nbytes, stop - start))
    arrays = [0 if value < len(spans) else 1 if value in kept else 2 for value in range(len(places))]
    if not is_direct:
        return PieceMemory(tuple(places), results_at, at)
    moved = {value for stage in part.stages for value, _ in (*stage.sends, *stage.receives)} if copies else set()
    copied = [-1] * len(places)
    for value in sorted(moved):
        if arrays[value] != 2:
            copied[value] = at
            at += _rounded_to_lines(places[value][1])
    return PieceMemory(tuple(places), results_at, at, tuple(arrays), tuple(copied) if moved else ())


def _rounded_to_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


class Exchange:
    """Runs ``program`` for one op. Its messages have ``tag``, and each must complete within ``timeout_s`` seconds.

    In stage t the caller writes the partial result of piece t at ``program.partial_at(t)`` and calls
    ``run_stage([self], t)``. Then the results of piece t - ``delay`` are at ``program.results_at(t - delay)``. After
    the last piece the caller calls ``close``. All hosts make the same calls. After a failure the caller must keep the
    exchange until the transport is freed, since messages may still be written to its memory.
    """

    def __init__(self, program: ExchangeProgram, transport: Transport, tag: int, timeout_s: float) -> None:
        self._program = program
        self._transport, self._tag, self._timeout_s = transport, tag, timeout_s
        self._memory = kernels.memory(max(1, program.nbytes + LINE))
        self.base = _rounded_to_lines(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))
        self._sends: list[list[tuple[PendingMessage, int]]] = [[] for _ in range(program.window)]
        self._receives: dict[tuple[int, int], list[tuple[PendingMessage, int]]] = {}

    def first_sends(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, bytes and receiving rank of each value that this host adds to the op's first messages."""
        return self._first(self._program.part.stages[0].sends)

    def first_receives(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, bytes and sending rank of each value that other hosts add to the op's first messages."""
        return self._first(self._program.part.stages[0].receives)

    def _first(self, moves: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield address, bytes and rank for each (value, host) of ``moves``, if the exchange is eager."""
        places = self._places(0)
        for value, host in moves if self._program.eager else ():
            address, nbytes, _ = places[value]
            yield address, nbytes, self._program.peers[host]

    def send(self, stage: int) -> None:
        """Start to send the values of a stage."""
        for piece, r in self._program.active(stage):
            if r == 0 and self._program.eager:
                continue
            sends = self._sends[piece % self._program.window]
            self._start(piece, self._program.part.stages[r].sends, self._transport.send, sends)

    def complete(self, stage: int) -> None:
        """Wait for the messages that must arrive in this stage, and combine their values."""
        for piece, r in self._program.active(stage - self._program.lag + 1):
            self._finish(piece, r)

    def close(self) -> None:
        """Wait until all messages are sent."""
        for sends in self._sends:
            self._wait(sends)

    def _places(self, piece: int) -> list[tuple[int, int, int]]:
        """Return address, bytes and number of elements of each value of a piece."""
        base, memory = self.base + self._program.partial_at(piece), self._program.pieces[piece]
        return [(base + place, nbytes, size) for place, nbytes, size in memory.places]

    def post_receives(self, stage: int) -> None:
        """Start to receive the messages of a stage. Before memory is used again, wait for the sends from it."""
        for piece, r in self._program.active(stage):
            if r == 0:
                self._wait(self._sends[piece % self._program.window])
            receives = self._receives[piece, r] = []
            if r > 0 or not self._program.eager:
                self._start(piece, self._program.part.stages[r].receives, self._transport.receive, receives)

    def _start(
        self,
        piece: int,
        moves: Sequence[tuple[int, int]],
        start: Callable[[int, int, int, int], PendingMessage],
        started: list[tuple[PendingMessage, int]],
    ) -> None:
        """Start to send or receive each (value, host) of ``moves``, and append the messages to ``started``."""
        places = self._places(piece)
        for value, host in moves:
            address, nbytes, _ = places[value]
            if nbytes:
                rank = self._program.peers[host]
                started.append((start(address, nbytes, rank, self._tag), rank))

    def _finish(self, piece: int, r: int) -> None:
        """Wait for the messages of round ``r`` of a piece, and combine their values."""
        self._wait(self._receives.pop((piece, r)))
        for combination in self._program.part.stages[r].combinations:
            if self._program.pieces[piece].places[combination.made][1]:
                self._combine(piece, combination)

    def _combine(self, piece: int, combination: Combination) -> None:
        """Combine values in the memory of a piece."""
        result, operands, final = combination
        places = self._places(piece)
        combine = kernel(self._program.numbers_of(final), places[result][2], len(operands), 1)
        sources = [places[value][0] for value in operands]
        combine.run([sources], [[places[result][0]]], 1, False, False)  # threads, streaming, check_overlap

    def _wait(self, messages: list[tuple[PendingMessage, int]]) -> None:
        while messages:  # after an error the list still has the message that failed, and the later ones
            wait_for(*messages[0], self._timeout_s)
            del messages[0]


def first_data(exchanges: Iterable[Exchange]) -> dict[int, bytes]:
    """Return the data that eager exchanges add to an op's first messages, for each receiving rank."""
    data: dict[int, bytes] = {}
    for address, nbytes, rank in chain.from_iterable(each.first_sends() for each in exchanges):
        data[rank] = data.get(rank, b"") + ctypes.string_at(address, nbytes)
    return data


def take_first(exchanges: Iterable[Exchange], data: Mapping[int, bytes]) -> None:
    """Copy the data that other ranks have added to their first messages into the memory of eager exchanges."""
    at = dict.fromkeys(data, 0)
    for address, nbytes, rank in chain.from_iterable(each.first_receives() for each in exchanges):
        ctypes.memmove(address, data[rank][at[rank] : at[rank] + nbytes], nbytes)
        at[rank] += nbytes


def run_stage(exchanges: Sequence[Exchange], stage: int) -> None:
    """Send, receive and combine the values of one stage of an op, which consists of these exchanges.

    The exchanges must have the same number of pieces and rounds. Any two hosts must list their common exchanges in the
    same order. So messages need no names: they are ordered by stage, exchange and round. The messages of all exchanges
    are started before any of them is waited for.

    Raises:
      PeerError: a rank of another host was lost or is late. The op cannot continue.
    """
    for next_stage in range(stage + 1 if stage else 0, stage + 2):  # receives are posted one stage early
        for each in exchanges:
            each.post_receives(next_stage)
    for each in exchanges:
        each.send(stage)
    for each in exchanges:
        each.complete(stage)


def wait_for(pending: PendingMessage, rank: int, timeout_s: float) -> None:
    """Wait for a message from or to a rank. Raise a ``PeerError`` if it fails or does not complete in time."""
    try:
        pending.wait(timeout_s)
    except TimeoutError as error:
        raise PeerTimeout(rank, str(error)) from error
    except OSError as error:
        raise PeerDisconnected(rank, str(error)) from error


def piece_sizes(size: int, nbytes: int, smallest: int, largest: int, depth: int) -> tuple[int, ...]:
    """Return the elements of each piece. The first and last ones are small, so that the pipeline fills quickly.

    Args:
      size: the number of elements, of ``nbytes`` bytes each.
      smallest: the maximum bytes of the first and the last pieces, or one element if that is larger.
      largest: the maximum bytes of any piece, or one element if that is larger.
      depth: how many small pieces a large array has at either end: the number of stages that the first piece needs.

    >>> piece_sizes(1000, 4, 400, 1200, 1), piece_sizes(90, 4, 400, 1200, 1), piece_sizes(0, 4, 400, 1200, 1)
    ((100, 200, 200, 200, 200, 100), (90,), (0,))
    """
    step, most = max(1, smallest // nbytes), max(1, largest // nbytes)
    ends: list[int] = []
    while size > 3 * step and step < most:
        ends.append(step)
        size -= 2 * step
        if len(ends) >= depth:
            step = min(2 * step, most)
    count = max(1, -(-size // step))
    middle = (b - a for a, b in pairwise(k * size // count for k in range(count + 1)))
    return *ends, *middle, *ends[::-1]
