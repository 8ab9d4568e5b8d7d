"""The lock-step clock: a closed form for the time of a schedule in p pieces. One pass over the reads serves all p.

In tick t piece j does round t - j, so up to p rounds are in progress at once, and R rounds take R + p - 1 ticks. A tick
takes the longest latency of its reads (added up along each route), and then the longer of two times: the time that the
busiest resource needs for all its reads of the tick, and the time in which a host queues the operations of the tick.
The event-driven clock (``clock.py``) never predicts a longer time. Planners rank schedules by the lock-step clock.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from functools import cached_property

from .host_queues import Queue
from .traffic import Traffic

Load = tuple[float, float]  # seconds per byte of the buffer, and seconds per piece for messages


class Loads:
    """The seconds in which resources and queues serve the rounds of a schedule, per byte of the buffer.

    Window t of width w has the existing rounds from t - w + 1 to t: with w pieces, those in progress in tick t.
    """

    def __init__(self, traffic: Traffic, queues: dict[str, Queue]) -> None:
        self.traffic, self.queues, self.rounds = traffic, queues, traffic.rounds
        # For each read, the number of each resource that it uses, and the seconds per byte of the buffer.
        known: dict[tuple[float, tuple[tuple[int, float], ...]], list[tuple[int, float]]] = {}
        self.uses = []
        for read in traffic.reads:
            share = traffic.shares[read.chunk]
            found = known.get((share, read.uses))
            if found is None:
                found = [(k, share * often * traffic.resources[k].seconds_per_byte) for k, often in read.uses]
                known[share, read.uses] = found
            self.uses.append(found)
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
        """The different loads by round. Many resources, such as links, have the same load in every round."""
        loads = {tuple((r, (a, b)) for r, (a, b) in load.items()) for load in self.by_round if load}
        return [dict(load) for load in sorted(loads)]

    @cached_property
    def sums(self) -> list[Load]:
        """The loads of each resource in all rounds."""
        return [
            (math.fsum(transfer for transfer, _ in load.values()), math.fsum(messages for _, messages in load.values()))
            for load in self.by_round
        ]

    def windows(self, width: int) -> tuple[list[float], list[list[Load]], list[float]]:
        """Return three lists with an entry per window: its latency, its loads, and the seconds of the busiest host.

        Only loads that may be the greatest for some number of pieces are listed.
        """
        if width not in self._windows:
            ticks = self.rounds + width - 1
            # For each window and each load for messages, the greatest load per byte.
            busiest: list[dict[float, float]] = [{} for _ in range(ticks)]
            for by_round in self.different:
                transfer = messages = 0.0
                for t in range(min(by_round), min(max(by_round) + width, ticks)):
                    if t in by_round:
                        added = by_round[t]
                        transfer, messages = transfer + added[0], messages + added[1]
                    if t - width in by_round:
                        dropped = by_round[t - width]
                        transfer, messages = transfer - dropped[0], messages - dropped[1]
                    if transfer > busiest[t].get(messages, -1.0):
                        busiest[t][messages] = max(transfer, 0.0)
            queued = [0.0] * ticks
            for queue in self.queues.values():
                queued = list(map(max, queued, self.queued(queue, width)))
            loads = [[(transfer, messages) for messages, transfer in greatest.items()] for greatest in busiest]
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
    """The lock-step times of a schedule. Shares are not rounded to elements, so that no rate exceeds the bound."""

    def __init__(self, loads: Loads, nbytes: int) -> None:
        self.loads, self.nbytes, self.rounds = loads, nbytes, loads.rounds

    def ticks(self, pieces: int) -> list[float]:
        """Return the seconds of the ticks, where tick R - 1, in which all rounds are in progress, is listed once.

        If p exceeds R, this tick occurs p - R more times.
        """
        latencies, loads, queued = self.loads.windows(min(pieces, self.rounds))
        nbytes = self.nbytes / pieces
        busy = [max([per_byte * nbytes + messages for per_byte, messages in tick], default=0.0) for tick in loads]
        return [latency + max(load, queue) for latency, load, queue in zip(latencies, busy, queued, strict=True)]

    def total(self, pieces: int) -> float:
        """Return the sum of all ticks."""
        ticks = self.ticks(pieces)
        return math.fsum([*ticks, max(0, pieces - self.rounds) * ticks[self.rounds - 1]])

    def candidates(self, most: int) -> list[int]:
        """Return numbers of pieces from 1 to ``most``, one of which probably takes the least time.

        For p >= R the time is a + b p + c / p. It is least at p = sqrt(c / b), or at a p for which a host queues
        operations in some tick for as long as the busiest resource serves reads. Below R, the numbers 1 to 32 and
        powers of two are candidates.
        """
        rounds = self.rounds
        tried = {1, rounds, most, *range(2, min(rounds, 33)), *(1 << k for k in range(rounds.bit_length()))}
        latency, loads, queued = self.loads.windows(rounds)
        busiest = [self.nbytes * max((per_byte for per_byte, _ in tick), default=0.0) for tick in loads]
        if latency[rounds - 1]:
            best = math.sqrt(max(math.fsum(busiest) - rounds * busiest[rounds - 1], 0.0) / latency[rounds - 1])
            tried |= {math.floor(best), math.ceil(best)}
        for seconds, transfer in zip(queued, busiest, strict=True):
            if seconds * most > transfer:
                tried |= {math.floor(transfer / seconds), math.ceil(transfer / seconds)}
        return [pieces for pieces in sorted(tried) if 1 <= pieces <= most]


def _sliding_max(values: tuple[float, ...], width: int) -> list[float]:
    """Return the greatest value of each window of up to ``width`` neighbours that slides over all values."""
    greatest: list[float] = []
    candidates: deque[int] = deque()  # positions of values that may still become the greatest; their values decrease
    for t in range(len(values) + width - 1):
        if t < len(values):
            while candidates and values[candidates[-1]] <= values[t]:
                candidates.pop()
            candidates.append(t)
        if candidates[0] <= t - width:
            candidates.popleft()
        greatest.append(values[candidates[0]])
    return greatest
