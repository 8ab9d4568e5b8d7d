"""A collective over several hosts: reduced on each through its memory, exchanged between them, spread again, in pieces.

In: what is reduced, where the hosts' ranks are, the links between them if they were measured.  Out: a ``Crossing`` for
each rank, and the walk through it. The first ranks of each host, as many as the smallest host has, are its lanes: each
owns a stripe of every piece, reduces it on its host and exchanges it with the same lane of the other hosts. While a
piece is exchanged, the next is copied in and reduced, and the one before is copied out. Partial results travel in the
accumulator's dtype; where they become whole they are divided and rounded, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from .. import kernels
from ..packing import itemsize
from ..planning import plan, planned
from ..schedule import Schedule
from ..topology import Topology
from ..transports.base import Wire
from . import exchange as between
from .exchange import Exchange
from .programs import LINE, SLOT_BYTES, Job, Numbers, Spot, copying, ready, shares
from .shared_memory import Arena

TAG: Final = 0
LEAST_PIECE: Final = 1 << 17
MOST_PIECE: Final = 1 << 20
"""Bytes of a piece, of all lanes together; a slot has room for two pieces, and for two results of a stripe."""

# Words at the start of a lane's slot: whether all hosts are about to do the same; whether it waits for another host.
_VERDICT, _AFAR = 0, 1
_SAME, _OTHER = 1, 2


class Crossing(NamedTuple):
    """A rank's part in a call over several hosts, ready to run.

    Args:
      course: its jobs, for the arena.
      ticks: how many.
      text: what the call is.
      work: what it exchanges with other hosts; ``None``: it is no lane, or nothing moves.
      digest: of all that hosts must agree on.
      takes: for each piece where the own stripe's result goes: an offset in its slot, or -1; the place in the caller's
        buffer, or -1.
      result: which of the caller's buffers takes the result.
    """

    course: Any
    ticks: int
    text: bytes
    work: between.Work | None
    digest: bytes
    takes: tuple[tuple[int, int], ...]
    result: int


class Across:
    """The lanes of a group's hosts.

    Args:
      hosts: the ranks of each.
      rank: this one.
      arena: its host's memory.
      wire: between hosts.
    """

    def __init__(self, hosts: tuple[tuple[int, ...], ...], rank: int, arena: Arena, wire: Wire) -> None:
        self.hosts, self.rank, self.arena, self.wire = hosts, rank, arena, wire
        self.host = hosts.index(arena.host)
        self.lanes = min(map(len, hosts))
        place = arena.host.index(rank)
        self.lane = place if place < self.lanes else None
        self.peers = tuple(ranks[place] for ranks in hosts) if self.lane is not None else ()
        self.topology: Topology | None = None  # of the hosts, if it was measured
        self._under_way: Exchange | None = None

    def crossing(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> Crossing:
        """Return this rank's part in a call.

        Args:
          collective: "all_reduce", "reduce", "broadcast", or anything else of size 0, which moves nothing.
          size: elements.
          numbers: what is computed.
          root: the rank, of a reduce or broadcast.
          text: what the call is, in words; all ranks must say the same.
        """
        if size == 0:
            nothing = kernels.native().RankProgram([[]] * 3)
            return Crossing(nothing, 3, text, None, _digest(text, ""), (), 0)
        nbytes = itemsize(numbers.dtype)
        main = None if root is None else next(k for k, ranks in enumerate(self.hosts) if root in ranks)
        schedule = host_schedule(self.topology, len(self.hosts), collective, size * nbytes, main)
        most = (SLOT_BYTES // 2 - 8 * LINE) * self.lanes // (2 * self.lanes + 2)
        sizes = between.cut(size, nbytes, LEAST_PIECE, min(MOST_PIECE, most), between.delay(schedule, False))
        laid = _Laid(self, collective, sizes, numbers, root)
        work = None
        if self.lane is not None:
            mine = tuple(ends[self.lane + 1] - ends[self.lane] for ends in laid.stripes)
            order = [names(len(self.hosts)).index(name) for name in schedule.devices]  # it has its own
            peers = tuple(self.peers[host] for host in order)
            work = between.work(schedule, order.index(self.host), peers, mine, numbers)
        late = between.delay(schedule, len(sizes) == 1)
        ticks = laid.ticks(work, late)
        course = kernels.native().RankProgram([[ready(job, using) for job, using in tick] for tick in ticks])
        takes = laid.takes() if work is not None and any(value >= 0 for value in work.part.results) else ()
        return Crossing(
            course, len(ticks), text, work, _digest(text, f"{schedule.to_json()} {sizes}"), takes, laid.result
        )

    def run(
        self,
        crossing: Crossing,
        addresses: tuple[int, ...],
        begin: Callable[[Any, tuple[int, ...], bytes, int], bool],
        reach: Callable[[int], None],
        timeout_s: float,
    ) -> bool:
        """Walk through a crossing; return whether all ranks of all hosts called the same, else nothing was written.

        Args:
          addresses: the caller's buffers.
          begin: begins a course as ``Arena.begin`` does, waits, and says whether the ranks of this host are alike.
          reach: waits until the ticks before a number are done.
          timeout_s: how long to wait for another host.
        Raises:
          Lost, Late: a rank of another host; and what ``begin`` and ``reach`` raise.
        """
        exchange = None
        if crossing.work is not None:
            exchange = self._under_way = Exchange(crossing.work, self.wire, TAG, timeout_s)
            addresses = (*addresses, exchange.base)
        same = here = begin(crossing.course, addresses, crossing.text, 2)
        if self.lane is not None:
            digest = blake2b(crossing.digest + str(self.arena.number).encode(), digest_size=16).digest()
            digest = digest if here else bytes(len(digest))  # what no call's is
            with self._afar():
                same = between.alike(digest, self.peers, self.host, self.wire, TAG, timeout_s) and here
        if not here:
            self._under_way = None
            return False
        if self.lane is not None:
            self._word(_VERDICT).value = _SAME if same else _OTHER
        if exchange is not None and same:
            self._stage(crossing, exchange, addresses, 1)
        reach(3)
        if self._word(_VERDICT, self.hosts[self.host][0]).value != _SAME:
            self.arena.abandon()
            self._under_way = None
            return False
        if exchange is None and crossing.ticks > 3:
            reach(crossing.ticks)
        elif exchange is not None:
            for tick in range(2, crossing.ticks - 1):
                self._stage(crossing, exchange, addresses, tick)
                reach(tick + 2)
            with self._afar():
                exchange.close()
            self._under_way = None
        return True

    def _stage(self, crossing: Crossing, exchange: Exchange, addresses: tuple[int, ...], tick: int) -> None:
        """Do what a tick has to do between hosts, after its jobs."""
        assert crossing.work is not None
        with self._afar():
            exchange.tick(tick - 1)
        piece = tick - 1 - crossing.work.delay
        if piece >= 0 and crossing.takes:
            slot, own = crossing.takes[piece]
            if slot >= 0:
                exchange.take(piece, self.arena.address(self.rank) + slot)
            if own >= 0:
                exchange.take(piece, addresses[crossing.result] + own)

    def afar(self, rank: int) -> bool:
        """Return whether a rank of this host waits for another host in the current op."""
        return bool(self._word(_AFAR, rank).value)

    @contextmanager
    def _afar(self) -> Iterator[None]:
        word = self._word(_AFAR)
        word.value = 1
        yield  # what is raised here breaks the group, and the word stands
        word.value = 0

    def _word(self, which: int, rank: int | None = None) -> ctypes.c_int32:
        """Return a word in the first line of a rank's slot."""
        return ctypes.c_int32.from_address(self.arena.address(self.rank if rank is None else rank) + 4 * which)


class _Laid:
    """Where a call's pieces lie in a rank's slot, and what it does with each.

    A slot: a line of words; what is copied in, two pieces in turn; then the results of the rank's own stripe,
    likewise.
    """

    def __init__(
        self, across: Across, collective: str, sizes: tuple[int, ...], numbers: Numbers, root: int | None
    ) -> None:
        self.numbers, self.copying = numbers, copying(numbers.dtype)
        self.rank, self.lane, self.lanes = across.rank, across.lane, across.lanes
        self.ranks = across.hosts[across.host]
        main, others = [rank for rank in self.ranks if rank == root], [rank for rank in self.ranks if rank != root]
        self.gives = main if collective == "broadcast" else self.ranks
        self.wants = {"all_reduce": self.ranks, "reduce": main, "broadcast": others}[collective]
        self.buffers = 1 if collective == "broadcast" or (collective == "reduce" and self.rank != root) else 2
        self.result = self.buffers - 1
        self.nbytes = itemsize(numbers.dtype)
        self.sizes = sizes
        self.starts = list(accumulate(sizes, initial=0))
        self.stripes = [shares(size, self.lanes, self.nbytes) for size in sizes]
        self.room = -(-max(sizes) * self.nbytes // LINE) * LINE
        self.out_at = LINE + 2 * self.room
        self.out_room = max(
            -(-(b - a) * self.nbytes // LINE) * LINE for ends in self.stripes for a, b in pairwise(ends)
        )
        assert self.out_at + 2 * self.out_room <= SLOT_BYTES // 2, "a piece does not fit a slot"
        self.past = self.starts[-1] * self.nbytes >= kernels.STREAMING_BYTES

    def ticks(self, work: between.Work | None, late: int) -> list[list[tuple[Job, Numbers]]]:
        """Return the jobs of each tick: a piece is copied in, reduced a tick later, and copied out when it is whole."""
        count = len(self.sizes)
        ticks: list[list[tuple[Job, Numbers]]] = [[] for _ in range(count + late + 2)]
        for piece in range(count):
            ticks[piece] += self.copy_in(piece)
            if work is not None and self.gives:
                ticks[piece + 1] += self.reduce(piece, work.place(piece))
            ticks[piece + late + 2] += self.copy_out(piece)
        return [[(job, using) for job, using in tick if job.size] for tick in ticks]

    def takes(self) -> tuple[tuple[int, int], ...]:
        """Return for each piece where this lane's results go: see ``Crossing``."""
        assert self.lane is not None
        shared = any(rank != self.rank for rank in self.wants)
        return tuple(
            (
                self.result_at(piece) if shared else -1,
                (self.starts[piece] + ends[self.lane]) * self.nbytes if self.rank in self.wants else -1,
            )
            for piece, ends in enumerate(self.stripes)
        )

    def result_at(self, piece: int) -> int:
        return self.out_at + piece % 2 * self.out_room

    def given_at(self, piece: int, start: int) -> int:
        return LINE + piece % 2 * self.room + start * self.nbytes

    def copy_in(self, piece: int) -> list[tuple[Job, Numbers]]:
        """What other ranks' lanes need of this rank's part goes into its slot."""
        if self.rank not in self.gives:
            return []
        jobs = []
        ends = self.stripes[piece]
        for a, b in _others(ends, self.lane):
            own = Spot(~0, (self.starts[piece] + a) * self.nbytes)
            jobs.append((Job(b - a, (own,), (Spot(self.me(self.rank), self.given_at(piece, a)),)), self.copying))
        return jobs

    def reduce(self, piece: int, place: int) -> list[tuple[Job, Numbers]]:
        """This lane reduces its stripe: its own part from where it lies, all others' from their slots."""
        assert self.lane is not None
        a, b = self.stripes[piece][self.lane : self.lane + 2]
        sources = tuple(
            Spot(~0, (self.starts[piece] + a) * self.nbytes)
            if rank == self.rank
            else Spot(self.me(rank), self.given_at(piece, a))
            for rank in self.gives
        )
        numbers = self.numbers._replace(result=self.numbers.accumulator, divisor=1)
        return [(Job(b - a, sources, (Spot(~self.buffers, place),)), numbers)]

    def copy_out(self, piece: int) -> list[tuple[Job, Numbers]]:
        """What other lanes got goes to this rank's result."""
        if self.rank not in self.wants:
            return []
        jobs = []
        for lane, (a, b) in enumerate(pairwise(self.stripes[piece])):
            if lane != self.lane:
                there = Spot(self.me(self.ranks[lane]), self.result_at(piece))
                own = Spot(~self.result, (self.starts[piece] + a) * self.nbytes)
                jobs.append((Job(b - a, (there,), (own,), self.past), self.copying))
        return jobs

    def me(self, rank: int) -> int:
        """Return a rank's place on its host."""
        return self.ranks.index(rank)


def _others(ends: tuple[int, ...], lane: int | None) -> list[tuple[int, int]]:
    """Return what lies before and after a lane's stripe."""
    if lane is None:
        return [(0, ends[-1])]
    return [(0, ends[lane]), (ends[lane + 1], ends[-1])]


def _digest(text: bytes, more: str) -> bytes:
    return blake2b(text + b"\0" + more.encode(), digest_size=16).digest()


def names(hosts: int) -> tuple[str, ...]:
    """Return what hosts are called in their topology and schedules."""
    return tuple(f"host{k}/cpu:0" for k in range(hosts))


def host_schedule(topology: Topology | None, hosts: int, collective: str, nbytes: int, root: int | None) -> Schedule:
    """Return the schedule by which hosts exchange what their ranks have reduced.

    Args:
      topology: the links between hosts; ``None``: as long as nobody has measured them they count as equal.
      hosts: how many.
      collective: "all_reduce", "reduce" or "broadcast".
      nbytes: of an array.
      root: the host, of a reduce or broadcast.
    """
    return _planned(topology, hosts, collective, 1 << (nbytes - 1).bit_length(), root)


@lru_cache(maxsize=256)
def _planned(topology: Topology | None, hosts: int, collective: str, nbytes: int, root: int | None) -> Schedule:
    every = names(hosts)
    if topology is None and (hosts == 2 or collective == "all_reduce"):  # what nothing beats, found without a search
        end = every if root is None else (every[root],)
        sources, destinations = (
            (end if collective == "broadcast" else every),
            (end if collective == "reduce" else every),
        )
        return planned("direct" if root is None else "one_device", sources, destinations)
    wiring = topology or Topology.full_mesh(every, gb_per_s=1, latency_s=1e-4)
    main = None if root is None else wiring.devices[root]
    return plan(wiring, collective, nbytes, root=main).schedule.cut_into(1)
