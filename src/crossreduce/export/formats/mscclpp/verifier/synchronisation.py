"""Channels and semaphores of a symbolic run: the vector clocks of threads after a wait, a flush or an acquire.

- The k-th wait on an end of a channel receives the k-th signal of the other end. Threads count them without atomic
  operations. So the signals of an end must be ordered, and so must its waits. Threads that signal or wait are in the
  first warp of their threadblock. If two of them use a channel one after the other without a ``nop`` between them, they
  are ordered only if the threads of the warp run the operations together. A note states this.
- A port channel makes transfers some time after they were posted. It makes transfers and sends signals in the order of
  the posts. So a signal is received after the transfers before it, and a flush ends after them.
- A semaphore only counts. When an acquire ends, a number of releases have happened, but it is not known which ones. A
  release is certainly among them if fewer other releases can happen before it.

Source: include/mscclpp/{semaphore_device,port_channel_device,fifo_device,concurrency_device}.hpp and
src/core/port_channel.cc in github.com/microsoft/mscclpp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from .....errors import ScheduleError
from .clocks import NOTHING, AccessRecord, BlockClock, Clock, one_thread


@dataclass
class Channel:
    """One direction of a channel."""

    name: str
    is_port: bool
    notes: list[str]  # the notes of the run, to which the channel adds
    sent: list[tuple[Clock, int, bool]] = field(default_factory=list)  # by signal: clock, visible at start, relaxed
    received: int = 0
    last_signal: AccessRecord | None = None
    last_wait: AccessRecord | None = None
    posts: list[tuple[AccessRecord, Clock]] = field(
        default_factory=list
    )  # of a port channel, with the clocks at the ends
    collected: dict[tuple[int, int], tuple[Clock, list[int], int]] = field(default_factory=dict)  # see ``collect``

    def signal(self, block: BlockClock, thread: int, text: str, *, relaxed: bool) -> None:
        """Send a signal. On a port channel, it arrives after all transfers that were posted before."""
        self.last_signal = self._next(self.last_signal, block, thread, text, "signals")
        clock = self.collect(block, thread) if self.is_port else block.clock_of(thread)
        self.sent.append((clock, block.start, relaxed))

    def wait(self, block: BlockClock, thread: int, text: str, *, relaxed: bool) -> None:
        """Receive the next signal, which must have been sent."""
        self.last_wait = self._next(self.last_wait, block, thread, text, "waits")
        clock, start, sent_relaxed = self.sent[self.received]
        self.received += 1
        block.extend(thread, Clock(clock.ended, start) if relaxed or sent_relaxed else clock)

    def post(self, block: BlockClock, thread: int, text: str, bits: int) -> Clock:
        """Post a transfer to a port channel, and return the clock at its start. ``bits`` stand for its accesses."""
        clock = self.collect(block, thread)
        self.posts.append((block.record(thread, text), clock.union(Clock(bits, bits))))
        return clock

    def flush(self, block: BlockClock, thread: int) -> None:
        """Wait until a port channel has made its transfers."""
        block.extend(thread, self.collect(block, thread))

    def collect(self, block: BlockClock, thread: int) -> Clock:
        """Return the clock of ``thread`` joined with those of all transfers whose posts precede its current action."""
        known, key = block.clock_of(thread), (block.number, thread)
        # What the thread has collected: the joined clock, the numbers of the other posts, and how many there were.
        clock, others, seen = self.collected.get(key, (NOTHING, [], 0))
        remaining = []
        for number in chain(others, range(seen, len(self.posts))):
            record, after = self.posts[number]
            if block.is_after(record, known.ended, one_thread(thread)):
                clock = clock.union(after)
            else:
                remaining.append(number)
        self.collected[key] = clock, remaining, len(self.posts)
        return clock.union(known)

    def _next(self, last: AccessRecord | None, block: BlockClock, thread: int, text: str, does: str) -> AccessRecord:
        """Return the record of a signal or wait, which must come after the last one."""
        if last is not None and not block.is_after(last, block.clock_of(thread).ended, one_thread(thread)):
            problem = f"It {does} on {self.name}, as {last.text} does, and the two are not ordered"
            if last.block != block.number:
                raise ScheduleError(f"{text}: a race. {problem}.")
            self.notes.append(f"{text}: {problem} by a nop, but only if the threads of a warp run operations together")
        return block.record(thread, text)


@dataclass
class Semaphore:
    """A semaphore of a GPU during a call."""

    name: str
    initial: int
    releasers: Counter[int]  # how often each threadblock releases it in a call
    releases: list[tuple[AccessRecord, Clock]] = field(default_factory=list)
    acquired: int = 0
    last_acquire: AccessRecord | None = None

    def begin(self) -> None:
        self.releases, self.acquired, self.last_acquire = [], 0, None

    @property
    def is_free(self) -> bool:
        """Whether it can be acquired."""
        return self.acquired < self.initial + len(self.releases)

    def release(self, block: BlockClock, thread: int, text: str) -> None:
        """Increase the value."""
        clock = block.clock_of(thread)
        self.releases.append((block.record(thread, text), clock))

    def acquire(self, block: BlockClock, thread: int, text: str) -> None:
        """Decrease the value, which must not be 0."""
        last = self.last_acquire
        if last is not None and not block.is_after(last, block.clock_of(thread).ended, one_thread(thread)):
            problem = f"It acquires {self.name}, as {last.text} does, and nothing determines which of them is first"
            raise ScheduleError(f"{text}: a race. {problem}.")
        self.last_acquire = block.record(thread, text)
        self.acquired += 1
        needed = self.acquired - self.initial
        for index, (_, clock) in enumerate(self.releases if needed > 0 else ()):
            if self._releases_not_after(index) < needed:
                block.extend(thread, clock)

    def _releases_not_after(self, index: int) -> int:
        """Return how many other releases of the call, pending ones included, may happen before release ``index``."""
        record, _ = self.releases[index]
        pending = self.releasers - Counter(other.block for other, _ in self.releases)
        others = sum(times for block, times in pending.items() if block != record.block)
        for k, (other, clock) in enumerate(self.releases):
            same = (other.block, other.threads) == (record.block, record.threads)
            is_later = k > index if same else bool(clock.ended >> record.bit & 1)
            others += k != index and not is_later
        return others
