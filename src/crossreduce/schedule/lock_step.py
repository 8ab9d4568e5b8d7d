"""The lock-step clock: a closed form for the time of a schedule in p pieces, at any p after one pass over its reads.

In tick t piece j does round t - j, so up to p rounds are in progress at once, and R rounds take R + p - 1 ticks. A tick
takes the longest latency of its reads (added up along each route), and then the time that its busiest resource needs
for all of its reads, or that in which a host queues the operations of the tick, whichever is longer. The event-driven
clock (``clock.py``) is never slower; planners rank schedules by this one.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from .traffic import Queue, Traffic


class Loads:
    """The seconds in which resources and queues serve windows of rounds, for a number of bytes.

    Window t of width w are the rounds from t - w + 1 to t, as far as they exist: those that are in progress in tick t
    if there are w pieces.
    """

    def __init__(self, traffic: Traffic, nbytes: int, queues: dict[str, Queue]) -> None:
        import numpy as np

        self.traffic, self.queues, self.rounds = traffic, queues, traffic.rounds
        uses = [(read.round, k, traffic.shares[read.chunk] * often) for read in traffic.reads for k, often in read.uses]
        size = traffic.rounds + 1, len(traffic.resources)
        self.transfers, self.messages = np.zeros(size), np.zeros(size)  # sums over all earlier rounds
        if uses:
            rounds, resources, amounts = (np.array(column) for column in zip(*uses, strict=True))
            per_byte = np.array([resource.seconds_per_byte for resource in traffic.resources]) * nbytes
            per_message = np.array([resource.seconds_per_message for resource in traffic.resources])
            np.add.at(self.transfers, (rounds + 1, resources), amounts * per_byte[resources])
            np.add.at(self.messages, (rounds + 1, resources), per_message[resources])
        self.transfers, self.messages = self.transfers.cumsum(axis=0), self.messages.cumsum(axis=0)
        self.counts_messages = bool(self.messages.any())

    def of(self, first: int, last: int, pieces: int) -> Any:
        """Return the seconds of each resource for one piece in each of the rounds from ``first`` to ``last``."""
        found = (self.transfers[last + 1] - self.transfers[first]) / pieces
        return found + (self.messages[last + 1] - self.messages[first]) if self.counts_messages else found

    def total(self, pieces: int) -> Any:
        """Return the seconds of each resource for all bytes, in so many pieces."""
        return self.transfers[-1] + pieces * self.messages[-1]

    def all_windows(self, width: int) -> tuple[Any, Any]:
        """Return for all windows, one per row, the seconds of each resource: of all bytes, and of the messages."""
        import numpy as np

        ticks = np.arange(self.rounds + width - 1)
        last, first = np.minimum(ticks, self.rounds - 1) + 1, np.maximum(ticks - width + 1, 0)
        messages = self.messages[last] - self.messages[first] if self.counts_messages else 0.0
        return self.transfers[last] - self.transfers[first], messages

    def queued(self, queue: Queue, width: int) -> list[float]:
        """Return the seconds in which a host queues the operations of each window."""
        seconds = [0.0] * (self.rounds + width - 1)
        for launch, cost in queue.launches:
            start = 0  # the first window in which this operation has not been counted
            for r in launch.rounds:
                for t in range(max(start, r), r + width):
                    seconds[t] += cost
                start = r + width
        return seconds


class LockStep:
    """The lock-step times of a schedule; shares are not rounded to elements, so that no rate exceeds the bound."""

    def __init__(self, loads: Loads) -> None:
        self.loads, self.rounds = loads, loads.rounds
        self._windows: dict[int, tuple[Any, Any, Any, Any]] = {}

    def ticks(self, pieces: int) -> list[float]:
        """Return the seconds of the ticks with different rounds.

        The one in which all rounds are in progress, number R - 1, is repeated p - R times if p exceeds R.
        """
        import numpy as np

        latency, transfers, messages, queued = self.windows(min(pieces, self.rounds))
        busiest = (transfers / pieces + messages).max(axis=1, initial=0.0)
        found: list[float] = (latency + np.maximum(busiest, queued)).tolist()
        return found

    def total(self, pieces: int) -> float:
        """Return the sum of all ticks."""
        ticks = self.ticks(pieces)
        return math.fsum([*ticks, max(0, pieces - self.rounds) * ticks[self.rounds - 1]])

    def windows(self, width: int) -> tuple[Any, Any, Any, Any]:
        """Return the latency, the seconds of all bytes and of the messages by resource, and of the busiest host.

        Each has one entry or row per window of up to ``width`` rounds.
        """
        import numpy as np

        if width not in self._windows:
            transfers, messages = self.loads.all_windows(width)
            if not self.loads.counts_messages:
                transfers = transfers.max(axis=1, initial=0.0, keepdims=True)
            queued = [self.loads.queued(queue, width) for queue in self.loads.queues.values()]
            most = np.array(queued).max(axis=0) if queued else np.zeros(len(transfers))
            latency = np.array(_sliding_max(self.loads.traffic.latency_s, width))
            self._windows[width] = latency, transfers, messages, most
        return self._windows[width]

    def candidates(self, most: int) -> list[int]:
        """Return numbers of pieces, from 1 to ``most``, one of which probably takes the least time.

        From p = R on the time is a + b p + c / p, which is least at p = sqrt(c / b), or at a p with which in some tick
        a host queues operations as long as the busiest resource serves reads. Of the smaller numbers, 1 to 32 and
        powers of two are tried.
        """
        deep = self.rounds
        tried = {1, deep, most, *range(2, min(deep, 33)), *(1 << k for k in range(deep.bit_length()))}
        latency, transfers, _, queued = self.windows(deep)
        busiest = transfers.max(axis=1, initial=0.0).tolist()
        if latency[deep - 1]:
            best = math.sqrt(max(math.fsum(busiest) - deep * busiest[deep - 1], 0.0) / latency[deep - 1])
            tried |= {math.floor(best), math.ceil(best)}
        for seconds, transfer in zip(queued.tolist(), busiest, strict=True):
            if seconds * most > transfer:
                tried |= {math.floor(transfer / seconds), math.ceil(transfer / seconds)}
        return [pieces for pieces in sorted(tried) if 1 <= pieces <= most]


def _sliding_max(values: tuple[float, ...], width: int) -> list[float]:
    """Return the greatest value of each window of up to ``width`` neighbours that slides over all values."""
    found: list[float] = []
    falling: deque[int] = deque()  # positions of values that may still be the greatest
    for t in range(len(values) + width - 1):
        if t < len(values):
            while falling and values[falling[-1]] <= values[t]:
                falling.pop()
            falling.append(t)
        if falling[0] <= t - width:
            falling.popleft()
        found.append(values[falling[0]])
    return found
