"""The exchange between hosts: one rank of each host runs a schedule of the hosts over a wire, piece by piece.

In: a verified schedule whose devices are hosts, a wire, and this host's partial result of each piece.  Out: the
whole results. Knows no other ranks of the own host and no framework.

The order of all messages is static, so none needs a name: in tick t piece j does round r where j + LAG r = t. What is
sent in a tick was made whole LAG - 1 ticks before the data that the other side waits for has come, so that the link
always has something to carry; receives are posted a tick early. What a round sends is what a host held when the round
began, which is what ``verify`` proves right. Values of a piece are never overwritten while the piece is under way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from .. import kernels
from ..lowering import DeviceProgram, for_device, lower
from ..packing import itemsize
from ..schedule import Schedule
from ..transports.base import Pending, Wire
from .programs import LINE, Numbers, kernel_plan

LAG: Final = 2
"""Ticks from one round of a piece to its next; with 1 the link would idle while a round is folded."""


class Lost(ConnectionError):  # noqa: N818 - what happened, not that it is an error
    """Rank ``rank`` of another host does not answer any more."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class Late(TimeoutError):  # noqa: N818
    """Rank ``rank`` of another host took too long."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class Layout(NamedTuple):
    """Where each value of a piece lies in the memory of a piece, and its size: bytes, elements. ``room``: of all."""

    places: tuple[tuple[int, int, int], ...]
    room: int


@lru_cache(maxsize=4096)
def layout(found: DeviceProgram, schedule: Schedule, size: int, accumulator: str, result: str) -> Layout:
    """Lay out the values of a piece of ``size`` elements: its partial result in one run, then all others."""
    spans = schedule.spans(size)
    places, at = [], 0
    for number, (chunk, whole) in enumerate(found.values):
        start, stop = spans[chunk]
        nbytes = (stop - start) * itemsize(result if whole else accumulator)
        if number < len(schedule.chunks):
            places.append((start * itemsize(accumulator), nbytes, stop - start))
            at = -(-size * itemsize(accumulator) // LINE) * LINE
        else:
            places.append((at, nbytes, stop - start))
            at += -(-nbytes // LINE) * LINE
    return Layout(tuple(places), at)


def _folding(numbers: Numbers, operands: int, whole: bool, size: int) -> kernels.Kernel:
    """Return the plan of a fold, whose operands are partial results."""
    numbers = numbers._replace(dtype=numbers.accumulator)
    if not whole:
        numbers = numbers._replace(result=numbers.accumulator, divisor=1)
    return kernel_plan(numbers, size, operands, 1)


def delay(schedule: Schedule, single: bool) -> int:
    """Return in how many ticks after its own a piece is whole, 1 at least; a single piece waits for nobody."""
    return max(1, (1 if single else LAG) * schedule.round_count - 1)


class Work(NamedTuple):
    """What one host does in an op of several pieces, laid out once for any number of calls.

    Args:
      part: in the schedule.
      peers: for each host the rank that does this work there.
      layouts: of each piece.
      numbers: what is computed: partial results are in the accumulator's dtype.
      lag: ticks from a round of a piece to its next; a single piece waits for nobody.
      delay: in how many ticks after its own a piece is whole.
      window: how many pieces have memory at a time; then it is used again.
      room: bytes of a piece's memory.
    """

    part: DeviceProgram
    peers: tuple[int, ...]
    layouts: tuple[Layout, ...]
    numbers: Numbers
    lag: int
    delay: int
    window: int
    room: int

    def place(self, piece: int) -> int:
        """Return where, in an exchange's memory, a piece's partial result belongs."""
        return piece % self.window * self.room


@lru_cache(maxsize=1024)
def work(schedule: Schedule, host: int, peers: tuple[int, ...], sizes: tuple[int, ...], numbers: Numbers) -> Work:
    """Lay out what a host does.

    Args:
      schedule: of the hosts; verified; all chunks of the same sources and destinations.
      host: the own one's number.
      peers: for each host the rank that runs this exchange there.
      sizes: elements of each piece.
      numbers: what is computed.
    """
    found = for_device(lower(schedule), host)
    late = delay(schedule, len(sizes) == 1)
    layouts = tuple(layout(found, schedule, size, numbers.accumulator, numbers.result) for size in sizes)
    # Receives are posted a tick early, and a piece's memory is used again when its last sends are LAG ticks old.
    window = min(len(sizes), late + 2)
    lag = 1 if len(sizes) == 1 else LAG
    return Work(found, peers, layouts, numbers, lag, late, window, max(made.room for made in layouts))


class Exchange:
    """A piece of work under way.

    In tick t the caller puts piece t's partial result at ``partial(t)``, calls ``tick(t)``, and then has piece
    t - ``delay`` to ``take``; ticks go on until all are taken, then ``close`` waits for what is still being sent. All
    hosts do so. Whoever breaks off keeps the exchange until the wire is gone: its memory is still being written.

    Args:
      work: what to do.
      wire: what carries messages.
      tag: of all messages.
      timeout_s: how long to wait for each message.
    """

    def __init__(self, work: Work, wire: Wire, tag: int, timeout_s: float) -> None:
        self._work, self._part = work, work.part
        self._wire, self._tag, self._timeout_s = wire, tag, timeout_s
        self._memory = kernels.memory(max(1, work.window * work.room + LINE))
        self.base = -(-ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) // LINE) * LINE
        self._sending: list[list[tuple[Pending, int]]] = [[] for _ in range(work.window)]
        self._receiving: dict[tuple[int, int], list[tuple[Pending, int]]] = {}

    def partial(self, piece: int) -> int:
        """Return where the caller puts this host's partial result of a piece, before its tick."""
        return self.base + self._work.place(piece)

    def tick(self, tick: int) -> None:
        """Do what is due: send, wait, fold.

        Raises:
          Lost, Late: a rank of another host; nothing more can come of this op.
        """
        if tick == 0:
            self._post(0)
        self._post(tick + 1)
        for piece, r in self._due(tick):
            self._send(piece, r)
        for piece, r in self._due(tick - self._work.lag + 1):
            self._finish(piece, r)

    def take(self, piece: int, address: int) -> None:
        """Copy a piece's result, where there is one here, to ``address``."""
        base, made = self.partial(piece), self._work.layouts[piece]
        at = address
        for value in self._part.results:
            if value >= 0:
                place, nbytes, _ = made.places[value]
                ctypes.memmove(at, base + place, nbytes)
                at += nbytes

    def close(self) -> None:
        """Wait until everything is sent."""
        for sending in self._sending:
            self._wait(sending)

    def _due(self, tick: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces that do a round in a tick, and which round."""
        for r in range(len(self._part.stages)):
            piece = tick - self._work.lag * r
            if 0 <= piece < len(self._work.layouts):
                yield piece, r

    def _post(self, tick: int) -> None:
        for piece, r in self._due(tick):
            if r == 0:
                self._wait(self._sending[piece % self._work.window])
            base, made, posted = self.partial(piece), self._work.layouts[piece], []
            for value, src in self._part.stages[r].receives:
                place, nbytes, _ = made.places[value]
                if nbytes:
                    rank = self._work.peers[src]
                    posted.append((self._wire.receive(base + place, nbytes, rank, self._tag), rank))
            self._receiving[piece, r] = posted

    def _send(self, piece: int, r: int) -> None:
        base, made, sending = self.partial(piece), self._work.layouts[piece], self._sending[piece % self._work.window]
        for value, dst in self._part.stages[r].sends:
            place, nbytes, _ = made.places[value]
            if nbytes:
                rank = self._work.peers[dst]
                sending.append((self._wire.send(base + place, nbytes, rank, self._tag), rank))

    def _finish(self, piece: int, r: int) -> None:
        self._wait(self._receiving.pop((piece, r)))
        base, places = self.partial(piece), self._work.layouts[piece].places
        for made, operands, whole in self._part.stages[r].combinations:
            at, nbytes, size = places[made]
            if nbytes:
                plan = _folding(self._work.numbers, len(operands), whole, size)
                plan.run([[base + places[value][0] for value in operands]], [[base + at]], 1, False, False)

    def _wait(self, pendings: list[tuple[Pending, int]]) -> None:
        while pendings:
            pending, rank = pendings[0]
            wait_for(pending, rank, self._timeout_s)
            del pendings[0]


def wait_for(pending: Pending, rank: int, timeout_s: float) -> None:
    """Wait for a message from or to a rank.

    Raises:
      Lost: it is gone.
      Late: it took too long.
    """
    try:
        pending.wait(timeout_s)
    except TimeoutError as error:
        raise Late(rank, str(error)) from error
    except OSError as error:
        raise Lost(rank, str(error)) from error


def alike(digest: bytes, peers: tuple[int, ...], host: int, wire: Wire, tag: int, timeout_s: float) -> bool:
    """Tell the ranks of other hosts what this host is about to do, and return whether all do the same.

    Args:
      digest: of what it is; as long on all hosts.
      peers: for each host the rank that is told.
      host: the own one's number.
    Raises:
      Lost, Late: a rank of another host.
    """
    size = len(digest)
    said = ctypes.create_string_buffer(digest, size)
    heard = [ctypes.create_string_buffer(size) for _ in peers]
    others = [(k, rank) for k, rank in enumerate(peers) if k != host]
    under_way = [(wire.receive(ctypes.addressof(heard[k]), size, rank, tag), rank) for k, rank in others]
    under_way += [(wire.send(ctypes.addressof(said), size, rank, tag), rank) for _, rank in others]
    for pending, rank in under_way:
        wait_for(pending, rank, timeout_s)
    return all(heard[k].raw == digest for k, _ in others)


def cut(size: int, nbytes: int, least: int, most: int, deep: int) -> tuple[int, ...]:
    """Return the sizes of pieces: small ones first and last, so that filling and draining is quick, large ones between.

    Args:
      size: elements, of ``nbytes`` bytes each.
      least: bytes of the first and the last pieces.
      most: bytes of a piece, if an element is not larger.
      deep: how many pieces are first, and last: in as many ticks the first comes through.

    >>> cut(1000, 4, 400, 1200, 1), cut(90, 4, 400, 1200, 1), cut(0, 4, 400, 1200, 1)
    ((100, 200, 200, 200, 200, 100), (90,), (0,))
    """
    step, largest = max(1, least // nbytes), max(1, most // nbytes)
    ends: list[int] = []
    while size > 3 * step and step < largest:
        ends.append(step)
        size -= 2 * step
        if len(ends) >= deep:
            step = min(2 * step, largest)
    count = max(1, -(-size // step))
    between = (b - a for a, b in pairwise(k * size // count for k in range(count + 1)))
    return *ends, *between, *ends[::-1]
