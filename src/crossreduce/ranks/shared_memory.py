"""The memory that the ranks of one host share: they meet in it, see who is missing, and say why nothing goes on.

In: a file descriptor that all of them have, and courses.  Out: courses done, or an error that names who is to blame.
The data goes through the compiled kernels; here is what happens while a rank waits. What a rank holds as long as it
lives is a record lock on its own byte of the memory's file: the kernel lets go of it, whatever ends the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .. import kernels
from ..errors import CollectiveTimeout, PeerLostError, ReductionError
from .diagnostics import Said

SLICE_S: Final = 0.05  # so long a rank waits before it looks round: for signals, for the dead
SPIN_S: Final = 50e-6  # before it sleeps; about what sleeping and waking take
MOST_TEXT: Final = 232  # bytes of a call's description, and below of a cause (arena.hpp)
MOST_CAUSE: Final = 2040
LEFT: Final = "left the group"
_LOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid

DONE, WAITING, MISMATCH, BROKEN = range(4)


class Arena:
    """One host's shared memory, as one of its ranks sees it.

    Args:
      fd: the memory, of ``Arena.nbytes(len(host), slot)`` bytes; closed with the arena.
      host: the ranks of this host, ascending.
      rank: this one's.
      slot: bytes of each rank's part.
      spin_s: how long this rank waits awake before it sleeps: none at all where ranks share a CPU.
    """

    def __init__(self, fd: int, host: tuple[int, ...], rank: int, slot: int, spin_s: float) -> None:
        self.host, self.me, self.fd = host, host.index(rank), fd
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.me)
        threads = max(1, kernels.threads() // len(host))
        self._native = kernels.native().SharedMemory(fd, self.me, len(host), slot, spin_s, threads)

    @staticmethod
    def nbytes(ranks: int, slot: int) -> int:
        """Return how much memory so many ranks with slots of ``slot`` bytes share."""
        return int(kernels.native().SharedMemory.nbytes(ranks, slot))

    def begin(self, course: Any, addresses: Sequence[int], text: bytes, until: int) -> int:
        """Begin the next op and do the ticks before ``until``; see ``DONE`` and its neighbours for what is returned."""
        return self._outcome(self._native.begin(course, addresses, text, until, SLICE_S))

    def advance(self, until: int) -> int:
        """Go on with the op under way."""
        return self._outcome(self._native.advance(until, SLICE_S))

    def abandon(self) -> None:
        """End the op under way; all ranks of the host do so in the same tick."""
        self._native.end_op()

    def _outcome(self, outcome: int) -> int:
        if outcome > BROKEN:
            raise MemoryError("the kernels had no working memory")
        return outcome

    @property
    def running(self) -> bool:
        """Whether an op is under way."""
        return bool(self._native.running())

    @property
    def number(self) -> int:
        """The number of this rank's latest op, from 1."""
        return int(self._native.number())

    def address(self, rank: int) -> int:
        """Return where the part of a rank's slot begins that the current op uses."""
        return int(self._native.address(self.host.index(rank)))

    def said(self, rank: int) -> Said:
        """Return the last call that a rank of this host began; of number 0: none so far."""
        ops = self._native.ops(self.host.index(rank))
        return Said(ops[-1][0], ops[-1][1]) if ops else Said(0, "")

    def ops(self, rank: int) -> list[tuple[int, str, float, float | None]]:
        """Return a rank's last calls: number, text, begun and over (``None``: not yet) by ``time.monotonic``."""
        found: list[tuple[int, str, float, float | None]] = self._native.ops(self.host.index(rank))
        return found

    def call(self, rank: int, number: int) -> Said | None:
        """Return what a rank of this host called as its op of that number, if that is still known."""
        return next((Said(op[0], op[1]) for op in self.ops(rank) if op[0] == number), None)

    def arrivals(self) -> int:
        """Return how often this rank has come to where all meet."""
        return int(self._native.arrivals()[self.me])

    def missing(self) -> list[int]:
        """Return the ranks of this host that have not come where this one waits."""
        arrivals = self._native.arrivals()
        return [rank for k, rank in enumerate(self.host) if arrivals[k] < arrivals[self.me]]

    def alive(self, rank: int) -> bool:
        """Return whether the process of a rank of this host is there, stopped or not."""
        if self.host[self.me] == rank:
            return True
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, self.host.index(rank), 1, 0)
        found = struct.unpack(_LOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))
        return bool(found[0] != fcntl.F_UNLCK)

    def leave(self, course: Any) -> None:
        """Write down that this rank leaves on purpose."""
        if not self._native.cause():
            try:
                self._native.begin(course, (), LEFT, 0, 0.0)
            except ValueError:  # in the middle of an op: its end is written down already
                return

    def give_up(self, error: ReductionError) -> None:
        """Say why nothing goes on, for all ranks of this host; the first cause stands."""
        self._native.abort(packed(error))

    def cause(self) -> ReductionError | None:
        """Return why nothing goes on, if so; the same on all ranks of this host."""
        text = self._native.cause()
        return unpacked(text) if text else None

    def close(self) -> None:
        """Let go of the memory, and with that of the lock that says that this rank lives."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._native.close()
            os.close(fd)

    def __del__(self) -> None:
        """Close; in a process forked from this rank's nothing but its own descriptor."""
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def stopped(pid: int) -> bool:
    """Return whether a process is there but has been stopped, as far as the system says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


KINDS: Final = {"timeout": CollectiveTimeout, "lost": PeerLostError}


def packed(error: ReductionError) -> bytes:
    """Return an error as bytes, at most ``MOST_CAUSE``.

    >>> unpacked(packed(PeerLostError("rank 3 died.", [3])))
    PeerLostError('rank 3 died.')
    """
    kind = "timeout" if isinstance(error, CollectiveTimeout) else "lost"
    ranks, text = list(getattr(error, "ranks", ())), str(error)
    while len(made := json.dumps([kind, ranks, text]).encode()) > MOST_CAUSE:
        ranks, text = ranks[:64], text[: max(0, len(text) - 64)]
    return made


def unpacked(cause: bytes) -> ReductionError:
    """Return the error that ``packed`` wrote."""
    kind, ranks, text = json.loads(cause)
    return KINDS[kind](text, ranks)


class Watch:
    """What a rank looks at while it waits: whether others live, what other hosts say, and the clock."""

    def __init__(self, warn_s: float) -> None:
        self.began = time.monotonic()
        self.warn_s = warn_s
        self.came: int | None = None
        self.warn_at: float | None = self.began + warn_s
        self.heard_at = self.began

    def waited_s(self, came: int) -> float:
        """Return for how long this rank has waited where it is, ``came`` being how often it has come where all meet."""
        if self.came is None:
            self.came = came
        elif came != self.came:
            self.came, self.began = came, time.monotonic()
            if self.warn_at is not None:
                self.warn_at = self.began + self.warn_s
        return time.monotonic() - self.began

    def due_to_warn(self) -> bool:
        """Return whether to warn now; once."""
        if self.warn_at is None or time.monotonic() < self.warn_at:
            return False
        self.warn_at = None
        return True

    def heard(self, ask: Callable[[], bytes | None], every_s: float = 0.25) -> bytes | None:
        """Ask what other hosts say, not too often."""
        if time.monotonic() - self.heard_at < every_s:
            return None
        self.heard_at = time.monotonic()
        return ask()
