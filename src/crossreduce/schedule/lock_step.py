"""The lock-step clock: a closed form for the time of a schedule in p pieces, at any p after one pass over its reads.

In tick t piece j does round t - j, so up to p rounds are in progress at once, and R rounds take R + p - 1 ticks. A tick
takes the longest latency of its reads (added up along each route), and then the time that its busiest resource needs
for all of its reads, or that in which a host queues the operations of the tick, whichever is longer. The event-driven
clock (``clock.py``) is never slower; planners rank schedules by this one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from functools import cached_property

from .host_queues import Queue
from .traffic import Traffic

Load = tuple[float, float]  # the seconds per byte of the buffer, and those for the messages of each piece


class Loads:
    """The seconds in which resources and queues serve the rounds of a schedule, per byte of the buffer.

    Window t of width w are the rounds from t - w + 1 to t, as far as they exist: those that are in progress in tick t
    if there are w pieces.
    """

    def __init__(self, traffic: Traffic, queues: dict[str, Queue]) -> None:
        self.traffic, self.queues, self.rounds = traffic, queues, traffic.rounds
        # For each use of a resource by a read, the seconds per byte.
        self.uses = [
            [(k, traffic.shares[read.chunk] * often * traffic.resources[k].seconds_per_byte) for k, often in read.uses]
            for read in traffic.reads
        ]
        self.per_message = [resource.seconds_per_message for resource in traffic.resources]
        self.by_round: list[defaultdict[int, list[float]]] = [defaultdict(lambda: [0.0, 0.0]) for _ in self.per_message]
        for read, uses in zip(traffic.reads, self.uses, strict=True):
            for k, seconds in uses:
                load = self.by_round[k][read.round]
                load[0] += seconds
                load[1] += self.per_message[k]
        self._windows: dict[int, tuple[list[float], list[list[Load]], list[float]]] = {}

    @cached_property
    def different(self) -> list[dict[int, Load]]:
        """The loads of the resources by round, each only once: many links are always equally busy."""
        loads = {tuple((r, (a, b)) for r, (a, b) in load.items()) for load in self.by_round if load}
        return [dict(load) for load in sorted(loads)]

    @cached_property
    def sums(self) -> list[Load]:
        """The loads of each resource in all rounds."""
        return [
            (math.fsum(transfer for transfer, _ in load.values()), math.fsum(each for _, each in load.values()))
            for load in self.by_round
        ]

    def windows(self, width: int) -> tuple[list[float], list[list[Load]], list[float]]:
        """Return for each window of up to ``width`` rounds its latency, loads and the seconds of the busiest host.

        The loads are those that may be the greatest for some number of pieces.
        """
        if width not in self._windows:
            ticks = self.rounds + width - 1
            busiest: list[dict[float, float]] = [{} for _ in range(ticks)]  # by messages, the greatest transfer
            for by_round in self.different:
                transfer = messages = 0.0
                for t in range(min(by_round), min(max(by_round) + width, ticks)):
                    if t in by_round:
                        now = by_round[t]
                        transfer, messages = transfer + now[0], messages + now[1]
                    if t - width in by_round:
                        old = by_round[t - width]
                        transfer, messages = transfer - old[0], messages - old[1]
                    if transfer > busiest[t].get(messages, -1.0):
                        busiest[t][messages] = max(transfer, 0.0)
            queued = [0.0] * ticks
            for queue in self.queues.values():
                queued = list(map(max, queued, self.queued(queue, width)))
            loads = [[(transfer, messages) for messages, transfer in found.items()] for found in busiest]
            self._windows[width] = _sliding_max(self.traffic.latency_s, width), loads, queued
        return self._windows[width]

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

    def __init__(self, loads: Loads, nbytes: int) -> None:
        self.loads, self.nbytes, self.rounds = loads, nbytes, loads.rounds

    def ticks(self, pieces: int) -> list[float]:
        """Return the seconds of the ticks with different rounds.

        The one in which all rounds are in progress, number R - 1, is repeated p - R times if p exceeds R.
        """
        latencies, busiest, queued = self.loads.windows(min(pieces, self.rounds))
        nbytes = self.nbytes / pieces
        most = [max([each * nbytes + messages for each, messages in loads], default=0.0) for loads in busiest]
        return [latency + max(load, queue) for latency, load, queue in zip(latencies, most, queued, strict=True)]

    def total(self, pieces: int) -> float:
        """Return the sum of all ticks."""
        ticks = self.ticks(pieces)
        return math.fsum([*ticks, max(0, pieces - self.rounds) * ticks[self.rounds - 1]])

    def candidates(self, most: int) -> list[int]:
        """Return numbers of pieces, from 1 to ``most``, one of which probably takes the least time.

        From p = R on the time is a + b p + c / p, which is least at p = sqrt(c / b), or at a p with which in some tick
        a host queues operations as long as the busiest resource serves reads. Of the smaller numbers, 1 to 32 and
        powers of two are tried.
        """
        deep = self.rounds
        tried = {1, deep, most, *range(2, min(deep, 33)), *(1 << k for k in range(deep.bit_length()))}
        latency, loads, queued = self.loads.windows(deep)
        busiest = [self.nbytes * max((each for each, _ in loads_of_tick), default=0.0) for loads_of_tick in loads]
        if latency[deep - 1]:
            best = math.sqrt(max(math.fsum(busiest) - deep * busiest[deep - 1], 0.0) / latency[deep - 1])
            tried |= {math.floor(best), math.ceil(best)}
        for seconds, transfer in zip(queued, busiest, strict=True):
            if seconds * most > transfer:
                tried |= {math.floor(transfer / seconds), math.ceil(transfer / seconds)}
        return [pieces for pieces in sorted(tried) if 1 <= pieces <= most]


def _sliding_max(values: tuple[float, ...], width: int) -> list[float]:
    """Return the greatest value of each window of up to ``width`` neighbours that slides over all values."""
    greatest: list[float] = []
    falling: deque[int] = deque()  # positions of values that may still be the greatest
    for t in range(len(values) + width - 1):
        if t < len(values):
            while falling and values[falling[-1]] <= values[t]:
                falling.pop()
            falling.append(t)
        if falling[0] <= t - width:
            falling.popleft()
        greatest.append(values[falling[0]])
    return greatest
