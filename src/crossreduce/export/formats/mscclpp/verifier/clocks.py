"""The happens-before order of a run of an MSCCL++ plan: clocks of threadblocks, as sets of bits.

A bit stands for the accesses of one threadblock between two synchronisations of its threads, for the actions of one
thread on channels and semaphores in this time, or for one piece of an operation that writes packets or of a transfer
of a port channel. A ``Clock`` has two sets: accesses that are over, and writes that are visible.

- A signal passes both sets of its sender on to the wait that receives it. If the signal or the wait is relaxed, the
  receiver gets only the first set, so it may overwrite memory that was read. Of the writes, it gets only those that
  were visible when the sender's kernel began. The same holds for packets, which are read in a loop until their flags
  arrive, and later accesses depend on that loop.
- A signal, wait or packet is an action of single threads. The other threads of the threadblock get the clock of such a
  thread, and the bits of its accesses, when the threads are synchronised. Until then, only accesses of the same thread
  are ordered.

Source: include/mscclpp/{semaphore_device,concurrency_device,packet_device}.hpp in github.com/microsoft/mscclpp; the
memory model of NVIDIA's PTX ISA (release and acquire patterns, causality order).
"""

from __future__ import annotations

from itertools import count
from typing import Final, NamedTuple


class Clock(NamedTuple):
    """A vector clock: the accesses that precede a moment in every execution, as sets of bits."""

    ended: int = 0  # accesses that are over
    visible: int = 0  # writes that are visible

    def union(self, other: Clock) -> Clock:
        return Clock(self.ended | other.ended, self.visible | other.visible)


NOTHING: Final = Clock()


class AccessRecord(NamedTuple):
    """An access to memory."""

    bit: int  # the bit that stands for it
    block: int  # the number of the threadblock, or -1 for a port channel or the user between two calls
    threads: tuple[int, int]  # if this is equal for two accesses to the same bytes, the same threads made them
    text: str


def one_thread(thread: int) -> tuple[int, int]:
    """Return ``AccessRecord.threads`` for an action of one thread."""
    return -1, thread


class BlockClock:
    """The clocks of the threads of one threadblock."""

    def __init__(self, number: int, bits: count[int]) -> None:
        self.number, self.bits = number, bits
        self.begin(NOTHING)

    def begin(self, clock: Clock) -> None:
        """Begin a kernel with this clock."""
        self.known = clock  # of all threads
        self.start = clock.visible
        self.own: dict[int, Clock] = {}  # by thread: the clocks that it has received since the last synchronisation
        self.own_bits: dict[int, int] = {}  # by thread: the bit of its actions on channels and semaphores
        self.arrived = NOTHING  # from packets that threads have read
        self.unsynced = 0  # the bits of accesses since the last synchronisation
        self.bit = next(self.bits)

    def sync(self) -> None:
        for clock in (*self.own.values(), self.arrived, Clock(self.unsynced, self.unsynced)):
            self.known = self.known.union(clock)
        self.own, self.own_bits, self.arrived, self.unsynced = {}, {}, NOTHING, 0
        self.bit = next(self.bits)

    def clock_of(self, thread: int) -> Clock:
        """Return the clock of one thread."""
        return self.known.union(self.own[thread]) if thread in self.own else self.known

    def extend(self, thread: int, clock: Clock) -> None:
        """Add the accesses of a clock to the clock of one thread."""
        self.own[thread] = self.own.get(thread, NOTHING).union(clock)

    def record(self, thread: int, text: str) -> AccessRecord:
        """Return the record of an action of one thread on a channel or semaphore, and add it to the thread's clock."""
        bit = self.own_bits.setdefault(thread, next(self.bits))
        self.extend(thread, Clock(1 << bit, 1 << bit))
        self.unsynced |= 1 << bit
        return AccessRecord(bit, self.number, one_thread(thread), text)

    def is_after(self, record: AccessRecord, known: int, threads: tuple[int, int]) -> bool:
        """Return whether an access is over for threads of this threadblock.

        Either its bit is in the set ``known``, or the same threads of this threadblock made it.
        """
        if known >> record.bit & 1:
            return True
        same = record.block == self.number and record.threads == threads
        return same and bool(self.unsynced >> record.bit & 1)
