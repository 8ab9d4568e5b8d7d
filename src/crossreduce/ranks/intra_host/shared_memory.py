"""``RankMemory``: the memory that the ranks of one host share, with barriers, liveness and the abort reason.

Input: a file descriptor of the memory, which all of these ranks have, and compiled rank programs. Output: executed
programs, or the outcome (see ``DONE``) that ended a call early. The kernels move the data; ``stage_runner`` waits.

Each rank holds a record lock on its own byte of the memory's file. The operating system releases the lock when the
process ends for any reason, so other ranks can detect this.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ... import kernels
from ...errors import ReductionError, UnsupportedError, decoded, encoded
from ...observe.diagnostics import CallSignature
from ...observe.liveness import LEFT, is_stopped, lock_holder
from . import board, votes
from .registers import Registers

with suppress(ImportError):  # Windows has no fcntl; there, ranks raise a BackendError before they need it
    import fcntl

SLICE_S: Final = 0.05  # a rank waits this long before it handles signals and checks the other ranks
SPIN_S: Final = 50e-6  # a rank spins this long before it sleeps; about the time that sleeping and waking take
EXCUSE_S: Final = 1.0  # a late rank counts as excused until this long after its excuse has ended
MAX_TEXT_BYTES: Final = 232  # the limit of a call's description; as in the native shared_memory.hpp
MAX_CAUSE_BYTES: Final = 2040
READS_PEERS: Final = True  # whether receivers read messages from the sender's process, if the system allows it
_PAGE: Final = 1 << 16  # the largest page of any system
_READY_BYTES: Final = 1 << 15  # allocated in each half of a slot; all of it would take most of the time of a group
_PAUSE_S: Final = 20e-6

DONE, WAITING, MISMATCH, BROKEN, NO_MEMORY, UNREADABLE, ELSEWHERE, DIFFERS = range(8)
"""The outcomes: all required stages are executed; ``SLICE_S`` ended before that; the ranks' calls differ; the group was
aborted; the kernels could not allocate working memory; another rank's process memory cannot be read; this rank waits
for a message of another host, which ``RankMemory.awaited`` returns; the call of another host differs."""


class RankMemory:
    """Access of one rank to its host's shared memory.

    Args:
      fd: a descriptor of at least ``RankMemory.nbytes`` bytes of memory; it is closed with this object.
      host: the ranks of this host, ascending.
      rank: this rank.
      slot: bytes of each rank's slot.
      size: the number of ranks in the group.
      hosts: the number of hosts of the group.
      spin_s: how long this rank spins before it yields its CPU to other processes; 0 if ranks share a CPU.
      turns: the number of start offsets that ops use in turn; see ``programs.PAIR_TURNS``.
      is_whole: whether the whole memory is allocated, not only the ranges ``first``.

    ``native`` and ``mailboxes`` are compiled objects; the mailboxes are for messages between two ranks (see
    ``messages``). ``registers`` are for agreements (see ``agreement``).
    """

    def __init__(
        self,
        fd: int,
        host: tuple[int, ...],
        rank: int,
        slot: int,
        size: int,
        hosts: int,
        spin_s: float,
        turns: int = 1,
        is_whole: bool = True,
    ) -> None:
        self.host, self.place, self.fd = host, host.index(rank), fd
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.place)
        threads = max(1, kernels.threads() // len(host))
        ready = 0 if is_whole else _READY_BYTES
        self.native = kernels.native().SharedMemory(fd, self.place, len(host), slot, spin_s, threads, turns, ready)
        offset = _mailboxes_offset(len(host), slot)
        self.mailboxes = kernels.native().Mailboxes(fd, offset, self.place, len(host), spin_s, READS_PEERS)
        # mmap duplicates the descriptor. Closing the copy would release this process's lock, so only ``close`` does so.
        offset = _registers_offset(len(host), slot)
        self._mapping = self._registers = None
        self._turns, self.reads_peers = itertools.count(), False  # see ``Board``
        if os.fstat(fd).st_size >= votes.offset(offset + Registers.nbytes(len(host), size, hosts)) + votes.NBYTES:
            self._mapping = mmap.mmap(fd, os.fstat(fd).st_size - offset, offset=offset)
            self._registers = Registers(self._mapping, self.place, len(host), size, hosts)

    @staticmethod
    def nbytes(ranks: int, slot: int, size: int, hosts: int) -> int:
        """Return the bytes of memory that ``ranks`` ranks of a group of ``size`` on ``hosts`` hosts share.

        ``slot``: bytes of each rank's slot.
        """
        return _registers_offset(ranks, slot) + Registers.nbytes(ranks, size, hosts)

    @staticmethod
    def first(ranks: int, slot: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the ranges (offset, size) that are needed at first of memory of ``nbytes`` bytes on a single host.

        A rank allocates more of its own slot when an op needs it, and more of its mailboxes when it sends a message.
        """
        native, registers = kernels.native(), _registers_offset(ranks, slot)
        begin, head = int(native.SharedMemory.nbytes(ranks, 0)), int(native.Mailboxes.head_nbytes(ranks))
        halves = [(begin + k * slot // 2, _READY_BYTES) for k in range(2 * ranks)]
        return [(0, begin), *halves, (_mailboxes_offset(ranks, slot), head), (registers, nbytes - registers)]

    @property
    def registers(self) -> Registers:
        """The registers of this host.

        Raises:
          UnsupportedError: the memory has no room for them, since too many ranks of other hosts could not share memory.
        """
        if self._registers is None:
            problem = "the ranks of this group cannot agree after a failure: too many could not share memory."
            raise UnsupportedError.of(problem, remedy="the remedy in the warning logged when the group started")
        return self._registers

    def can_read_all(self) -> bool | None:
        """Return whether this process may read the memory of all ranks of the host. Call it before the first op.

        The result is ``None`` if some of them do not map the memory soon.
        """
        until, places = time.monotonic() + SLICE_S, range(len(self.host))
        while None in (found := [self.native.can_read(place) for place in places]) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return None if None in found else all(found)

    def vote(self, agrees: bool | None) -> bool | None:
        """Return whether all ranks of the host agree, the same on all, or ``None``. Call it once. See ``votes``."""
        return votes.vote(self._mapping, len(self.host), agrees) if self._mapping is not None else None

    def board(self, ranks: Sequence[int]) -> board.Board | None:
        """Return where ranks of this group can exchange values, or ``None`` if not all of them have room here."""
        places = [self.host.index(rank) for rank in ranks if rank in self.host]
        if self._mapping is None or len(places) < len(ranks) or max(places) >= board.MOST_RANKS:
            return None
        return board.Board(self._mapping, places, self.place, self._turns, self.reads_peers)

    def begin(self, program: Any, addresses: Sequence[int], text: bytes, until: int) -> int:
        """Begin the next op and execute the stages before ``until``. Return an outcome (see ``DONE``).

        If the outcome is ``WAITING``, call ``advance`` to continue.

        Args:
          program: a native ``RankProgram``.
          addresses: the addresses of the caller's buffers.
          text: describes the call; the ranks' texts must be equal.
          until: the number of the first stage that is not executed.
        """
        return int(self.native.begin(program, addresses, text, until, SLICE_S))

    def advance(self, until: int) -> int:
        """Execute the next stages of the current op, before ``until``. Return an outcome as ``begin`` does."""
        return int(self.native.advance(until, SLICE_S))

    def awaited(self) -> tuple[Any, int]:
        """Return the message of another host for which an op waits (``ELSEWHERE``), and the rank of that host."""
        pending, rank = self.native.awaited()
        return pending, rank

    def end_op(self) -> None:
        """End the current op early. All ranks of the host must do so in the same stage."""
        self.native.end_op()

    @property
    def running(self) -> bool:
        """Whether an op has begun and has not ended."""
        return bool(self.native.running())

    @property
    def number(self) -> int:
        """The sequence number of this rank's latest op, from 1."""
        return int(self.native.number())

    def address(self, rank: int) -> int:
        """Return the address of the half of a rank's slot that the current op uses."""
        return int(self.native.address(self.host.index(rank)))

    def ops(self, rank: int) -> list[tuple[int, str, float, float | None]]:
        """Return (number, text, begin, end) of a rank's last calls. Times are monotonic; the end may be ``None``."""
        return list(self.native.ops(self.host.index(rank)))

    def completed(self) -> int:
        """Return how many ops of this rank have succeeded, or 0 if the memory is closed."""
        with suppress(ValueError):
            return max((number for number, _, _, end in self.native.ops(self.place) if end is not None), default=0)
        return 0

    def describe(self, global_ranks: Sequence[int], about: Mapping[str, str | int]) -> None:
        """Write a description of the group for programs that are not ranks, such as ``crossreduce top``.

        ``global_ranks``: the numbers of all ranks. ``about``: facts about the group, stored as JSON of at most 1000
        bytes. So texts are cut after 100 characters, of which each takes at most 6 bytes in JSON.
        """
        short = {key: value[:100] if isinstance(value, str) else value for key, value in about.items()}
        text = json.dumps(short, ensure_ascii=False).encode(errors="replace")
        self.native.describe([global_ranks[rank] for rank in self.host], text)

    def counts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
        """Return the native counters of this rank, which ``counters.rank_counts`` reads."""
        kinds, waits = self.native.counts(self.place)
        return kinds, waits

    def count_between_hosts(self, ns: int) -> None:
        """Add nanoseconds to the time that the current op has spent in the exchange with other hosts."""
        self.native.count_between_hosts(ns)

    def last_call(self, rank: int) -> CallSignature:
        """Return the last call that a rank of this host began; its number is 0 if there was none."""
        ops = self.ops(rank)
        return CallSignature(*ops[-1][:2]) if ops else CallSignature(0, "")

    def arrivals(self) -> int:
        """Return the number of barriers at which this rank has arrived."""
        return int(self.native.arrivals()[self.place])

    def missing(self) -> list[int]:
        """Return the ranks of this host that have not arrived at the barrier at which this rank waits."""
        arrivals = self.native.arrivals()
        return [rank for k, rank in enumerate(self.host) if arrivals[k] < arrivals[self.place]]

    def alive(self, rank: int) -> bool:
        """Return whether a rank of this host has neither ended nor closed its memory. It may be stopped."""
        if self.host[self.place] == rank:
            return True
        return lock_holder(self.fd, self.host.index(rank)) is not None

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of another rank of this host was stopped by a signal."""
        holder = lock_holder(self.fd, self.host.index(rank))
        return holder is not None and is_stopped(holder)

    def record_leaving(self) -> None:
        """Record, as the text of an op, that this rank leaves the group on purpose."""
        if not self.native.cause():
            with suppress(ValueError):  # raised if an interrupted op of this rank has not ended
                self.native.begin(kernels.native().RankProgram([[], []]), (), LEFT, 0, 0.0)

    def abort(self, error: ReductionError) -> None:
        """Abort the group for all ranks of this host. Only the error of the first abort becomes the reason."""
        self.native.abort(encoded(error, MAX_CAUSE_BYTES))

    def abort_cause(self) -> ReductionError | None:
        """Return the error that aborted the group, or ``None``. All ranks of this host return the same error."""
        text = self.native.cause()
        return decoded(text) if text else None

    def aborting_rank(self) -> int | None:
        """Return the rank of this host that is currently writing the reason of an abort, or ``None``."""
        place = self.native.aborting_rank()
        return None if place < 0 else self.host[place]

    def close(self) -> None:
        """Release the memory and the lock that shows other ranks that this rank is alive."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.mailboxes.close()
            self.native.close()
            if self._registers is not None and self._mapping is not None:
                self._registers.close()
                self._mapping.close()
            os.close(fd)

    def __del__(self) -> None:
        """Close the descriptor. The native object unmaps the memory, except in a forked process."""
        if getattr(self, "fd", -1) >= 0 and os is not None:  # Python sets ``os`` to None when it ends
            self.mailboxes = None  # its thread may use the descriptor
            os.close(self.fd)


def _mailboxes_offset(ranks: int, slot: int) -> int:
    return -(-int(kernels.native().SharedMemory.nbytes(ranks, slot)) // _PAGE) * _PAGE


def _registers_offset(ranks: int, slot: int) -> int:
    end = _mailboxes_offset(ranks, slot) + int(kernels.native().Mailboxes.nbytes(ranks))
    return -(-end // _PAGE) * _PAGE


class WaitTimer:
    """Measures how long a rank waits at one barrier. After ``warn_s`` seconds a warning is due."""

    def __init__(self, warn_s: float) -> None:
        self._began = self._queried = time.monotonic()
        self._warn_s, self._warned = warn_s, False
        self._excused = -EXCUSE_S
        self._arrivals: int | None = None

    def waited_s(self, arrivals: int) -> float:
        """Return how many seconds this rank has waited at its current barrier. ``arrivals``: the barrier's number."""
        if arrivals != self._arrivals:
            if self._arrivals is not None:
                self._began = time.monotonic()
            self._arrivals = arrivals
        return time.monotonic() - self._began

    def has_excuse(self, now: bool) -> bool:
        """Return whether the late ranks have an excuse now (``now``), or had one in the last ``EXCUSE_S`` seconds.

        A rank needs some time to reach the barrier after its excuse has ended.
        """
        if now:
            self._excused = time.monotonic()
        return time.monotonic() < self._excused + EXCUSE_S

    def is_warning_due(self) -> bool:
        """Return whether a warning is due now. It is ``True`` at most once."""
        is_due = not self._warned and time.monotonic() >= self._began + self._warn_s
        self._warned = self._warned or is_due
        return is_due

    def query(self, function: Callable[[], bytes | None], every_s: float = 0.25) -> bytes | None:
        """Call ``function`` at most once in ``every_s`` seconds. Return its result, or ``None`` if it is not called."""
        if time.monotonic() < self._queried + every_s:
            return None
        self._queried = time.monotonic()
        return function()


class GroupAborted(Exception):  # noqa: N818 - internal: the public error is raised from the recorded reason
    """A rank of this host has aborted the group."""
