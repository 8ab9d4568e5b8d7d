"""The event-driven clock: a read starts when its operand is there and all its resources are free.

Piece j of a schedule does round r in tick t = r + j. A resource serves its reads tick by tick, in the order of the
ticks. In a tick, a read has a fixed part of each of its resources: the part that lets all reads of the tick on its
busiest resource end together, if they start together. So it takes the latency of its route, and as long as the busiest
of its resources needs for all its reads of this tick; but it waits only for its own operand, and for the reads of
earlier ticks on its own resources. A resource is occupied until all its reads of the tick have arrived, latency
included, as in Hockney's model.

This is never slower than the lock-step clock, by induction: at the end of a lock-step tick all reads of this tick and
of earlier ones have ended here too, so those of the next tick can start at once, and none takes longer than that tick.

A host queues operations without a pause, so those of tick t are queued after all of the earlier ticks. A read of a
device whose operations are queued does not end before this.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Baccelli, Cohen, Olsder & Quadrat,
Synchronization and Linearity, 1992 (systems of maxima and sums, which grow periodically).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from .lock_step import Loads

# Times that differ by less than this part of the period are equal: it is far above the rounding errors of sums.
_EQUAL: Final = 1e-9

# With at most so many reads in all ticks, plain Python is as fast as NumPy, whose calls take microseconds each.
_MOST_PLAIN: Final = 1_500


class Served(NamedTuple):
    """Reads that are served in one tick, or once in each of several equal ticks."""

    first: int  # the number of the first read; the others follow it
    start: Any  # for each read the second at which it starts in the first of these ticks, as an array
    end: Any  # for each read the second at which it ends in the last of them
    ticks: int


class EventClock:
    """The event-driven times of a schedule, for a number of bytes.

    NumPy runs the reads of a tick together. For few reads, or without NumPy, plain Python does, with the same results.
    """

    def __init__(self, loads: Loads, nbytes: int) -> None:
        self.loads, self.nbytes, self.rounds = loads, nbytes, loads.rounds

    def run(self, pieces: int) -> list[tuple[float, int]]:
        """Return by how many seconds each tick extends the time, as (seconds, number of equal ticks)."""
        if self._is_small(pieces):
            return [(after - before, 1) for before, after in pairwise([0.0, *(end for *_, end in self._plain(pieces))])]
        return _Run(_arrays(self.loads), self.nbytes, pieces).steps()

    def total(self, pieces: int) -> float:
        """Return the seconds from the start of the first read to the end of the last one."""
        if self._is_small(pieces):
            return max((end for *_, end in self._plain(pieces)), default=0.0)
        run = _Run(_arrays(self.loads), self.nbytes, pieces)
        run.steps()
        return run.end

    def intervals(self, pieces: int) -> Iterator[tuple[int, int, float, float]]:
        """Yield for each tick and read their numbers, and the seconds at which the read starts and ends."""
        for t, reads, _ in self._plain(pieces):
            for k, start, end in reads:
                yield t, k, start, end

    def served(self, pieces: int) -> Iterator[Served]:
        """Yield the reads of all ticks, with many equal ticks at once. Unlike ``intervals``, this needs NumPy."""
        return (served for *_, served in _Run(_arrays(self.loads), self.nbytes, pieces).parts())

    def _is_small(self, pieces: int) -> bool:
        uses = len(self.loads.traffic.reads) * (self.rounds + pieces)
        return uses <= _MOST_PLAIN or not _has_numpy()

    def _plain(self, pieces: int) -> Iterator[tuple[int, list[tuple[int, float, float]], float]]:
        """Yield for each tick its number, the number, start and end of each of its reads, and the time at its end."""
        loads, rounds, nbytes = self.loads, self.rounds, self.nbytes / pieces
        reads, first = loads.traffic.reads, [0] * (rounds + 1)
        for read in reads:
            first[read.round + 1] += 1
        first = list(accumulate(first))
        queues = list(loads.queues.values())
        queueing = [loads.queued(queue, min(pieces, rounds)) for queue in queues]
        waits = [next((q for q, queue in enumerate(queues) if host in queue.steps), -1) for host in loads.traffic.hosts]
        queued = [0.0] * len(queues)
        free = [0.0] * len(loads.per_message)
        ready: dict[tuple[int, int], float] = {}  # by step and piece
        time = 0.0
        for t in range(rounds + pieces - 1):
            row = t if t < rounds else max(rounds - 1, t - max(0, pieces - rounds))
            queued = [before + seconds[row] for before, seconds in zip(queued, queueing, strict=True)]
            active = range(first[max(0, t - pieces + 1)], first[min(t, rounds - 1) + 1])
            load = [0.0] * len(free)
            for number in active:
                for k, seconds in loads.uses[number]:
                    load[k] += seconds * nbytes + loads.per_message[k]
            occupied, served_reads = list(free), []
            for number in active:
                read = reads[number]
                piece = t - read.round
                start = ready.get((read.operand, piece), 0.0)
                served = 0.0
                for k, _ in loads.uses[number]:
                    start, served = max(start, free[k]), max(served, load[k])
                end = start + served
                if waits[read.step] >= 0:
                    end = max(end, queued[waits[read.step]])
                end += read.latency_s
                for k, _ in loads.uses[number]:
                    occupied[k] = max(occupied[k], end)
                place = read.step, piece
                ready[place] = max(ready.get(place, 0.0), end)
                time = max(time, end)
                served_reads.append((number, start, end))
            free = occupied
            yield t, served_reads, time


@lru_cache(maxsize=1)
def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401 - only whether it is installed
    except ImportError:
        return False
    return True


@lru_cache(maxsize=64)
def _arrays(loads: Loads) -> _Arrays:
    return _Arrays(loads)


class _Arrays:
    """The reads of a schedule as arrays."""

    def __init__(self, loads: Loads) -> None:
        import numpy as np

        self.loads, self.rounds = loads, loads.rounds
        traffic = loads.traffic
        size = traffic.rounds + 1, len(traffic.resources)
        self.transfers, self.messages = np.zeros(size), np.zeros(size)  # sums over all earlier rounds
        for k, by_round in enumerate(loads.by_round):
            for r, (transfer, message) in by_round.items():
                self.transfers[r + 1, k], self.messages[r + 1, k] = transfer, message
        self.transfers, self.messages = self.transfers.cumsum(axis=0), self.messages.cumsum(axis=0)
        reads = traffic.reads
        # Resource 0 is a dummy: it is always free and without load. Reads on their own device use only this.
        uses = [[0, *(k + 1 for k, _ in read.uses)] for read in reads]
        self.latency = np.array([read.latency_s for read in reads])
        self.round_of_read = np.array([read.round for read in reads])
        self.operand = np.array([read.operand + 1 for read in reads])
        self.resource = np.array([k for group in uses for k in group], dtype=np.intp)
        self.count = np.array([len(group) for group in uses])
        self.use_start = np.concatenate([[0], np.cumsum(self.count)])
        step_of_read = np.array([read.step for read in reads])
        self.read_start = np.concatenate([np.flatnonzero(np.diff(step_of_read, prepend=-1)), [len(reads)]])
        self.round_of_step = self.round_of_read[self.read_start[:-1]]
        self.queue = np.zeros(len(reads), dtype=np.intp)
        for number, queue in enumerate(loads.queues.values(), start=1):
            mine = [traffic.hosts[read.step] in queue.steps for read in reads]
            self.queue[np.array(mine)] = number

    def load(self, first: int, last: int, nbytes: float) -> Any:
        """Return the seconds of each resource for so many bytes in each of the rounds from ``first`` to ``last``."""
        seconds = (self.transfers[last + 1] - self.transfers[first]) * nbytes
        return seconds + self.messages[last + 1] - self.messages[first]

    @cached_property
    def bounds(self) -> tuple[Any, Any]:
        """For each round, the first of its reads and the first of its steps; and one more entry for the end."""
        import numpy as np

        every = np.arange(self.rounds + 1)
        return np.searchsorted(self.round_of_read, every), np.searchsorted(self.round_of_step, every)


class _Part:
    """The reads of neighbouring rounds, which are in progress at the same time."""

    def __init__(self, arrays: _Arrays, first: int, last: int, nbytes: float) -> None:
        import numpy as np

        by_read, by_step = arrays.bounds
        a, b = by_read[first], by_read[last + 1]
        s, e = by_step[first], by_step[last + 1]
        u, v = arrays.use_start[a], arrays.use_start[b]
        self.first = int(a)
        self.rows = np.arange(s + 1, e + 1)
        self.operand, self.latency, self.queue = arrays.operand[a:b], arrays.latency[a:b], arrays.queue[a:b]
        self.age = arrays.round_of_read[a:b]
        self.step_age = arrays.round_of_step[s:e]
        self.resource, self.count = arrays.resource[u:v], arrays.count[a:b]
        self.use_start, self.read_start = arrays.use_start[a:b] - u, arrays.read_start[s:e] - a
        load = np.concatenate([[0.0], arrays.load(first, last, nbytes)])
        self.seconds = np.maximum.reduceat(load[self.resource], self.use_start) if b > a else self.latency


class _Run:
    """One run of the arrays.

    ``ready[s, j % width]``: when step s has made its value of piece j; row 0: the inputs. No more than ``width`` pieces
    are in progress.
    """

    def __init__(self, arrays: _Arrays, nbytes: int, pieces: int) -> None:
        import numpy as np

        self.arrays, self.nbytes, self.pieces, self.rounds = arrays, nbytes / pieces, pieces, arrays.rounds
        self.end = 0.0
        self.free = np.zeros(len(arrays.loads.traffic.resources) + 1)
        self.width = width = min(pieces, self.rounds)
        self.ready = np.zeros((len(arrays.round_of_step) + 1, width))
        # Row t: when the operations of tick t are queued after those of tick t - 1; queue 0 is always empty.
        queued = [arrays.loads.queued(queue, width) for queue in arrays.loads.queues.values()]
        self.queueing = np.array([[0.0] * (self.rounds + width - 1), *queued]).T
        self.queued = np.zeros(1 + len(queued))

    def steps(self) -> list[tuple[float, int]]:
        """Run all ticks, see ``EventClock.run``."""
        return [(seconds, count) for seconds, count, _ in self.parts()]

    def parts(self) -> Iterator[tuple[float, int, Served]]:
        """Run all ticks; yield for each or for several equal ones the seconds of each, their number, and the reads."""
        rounds, pieces = self.rounds, self.pieces
        t, part, known = 0, None, (-1, -1)
        steady = _Steady(self)
        while t < rounds + pieces - 1:
            window = max(0, t - pieces + 1), min(t, rounds - 1)
            if window != known:
                part, known = _Part(self.arrays, *window, self.nbytes), window
            assert part is not None
            before = self.end
            self.tick(part, t)
            yield self.end - before, 1, Served(part.first, self.start, self.ends, 1)
            t += 1
            if rounds <= t < pieces - 1:
                ahead = min(steady.ticks_ahead(part), pieces - 1 - t)
                if ahead > 0:
                    start, end = steady.times(ahead)
                    yield steady.jump(ahead), ahead, Served(part.first, start, end, ahead)
                    t += ahead

    def tick(self, part: _Part, t: int) -> None:
        """Run the reads of tick t."""
        import numpy as np

        pieces, rounds, width = self.pieces, self.rounds, self.width
        row = t if t < rounds else max(rounds - 1, t - max(0, pieces - rounds))
        self.queued = self.queued + self.queueing[row]
        if not len(part.operand):
            self.start = self.ends = part.latency
            return
        self.operand_ready = self.ready[part.operand, (t - part.age) % width]
        self.resource_free = self.free[part.resource]
        self.start = np.maximum(self.operand_ready, np.maximum.reduceat(self.resource_free, part.use_start))
        self.served = self.start + part.seconds
        self.in_queue = self.queued[part.queue]
        self.ends = np.maximum(self.served, self.in_queue) + part.latency
        np.maximum.at(self.free, part.resource, np.repeat(self.ends, part.count))
        self.free[0] = 0.0
        self.made = np.maximum.reduceat(self.ends, part.read_start)
        self.ready[part.rows, (t - part.step_age) % width] = self.made
        self.end = max(self.end, float(self.made.max()))


class _Steady:
    """Finds ticks in which every time grows by a constant, and runs many of them at once.

    From a tick on in which all rounds are in progress, each tick applies the same maxima and sums. Once all times have
    grown by constants for R ticks (each by its own), this continues until in some maximum another argument becomes
    the greatest; the number of ticks until then follows from the differences and the growth.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.last: tuple[Any, ...] | None = None
        self.growth: tuple[Any, ...] | None = None
        self.since = 0

    def ticks_ahead(self, part: _Part) -> int:
        """Return for how many ticks after the last one, which has just run, all times grow by constants."""
        import numpy as np

        run = self.run
        now = (
            run.operand_ready, run.resource_free, run.start, run.served, run.in_queue, run.ends, run.made,
            np.array([run.end]), run.free.copy(), run.queued,
        )  # fmt: skip
        if self.last is None:
            self.last, self.since = now, 0
            return 0
        growth = tuple(a - b for a, b in zip(now, self.last, strict=True))
        self.last, before, self.growth = now, self.growth, growth
        close = _EQUAL * max(float(growth[6].max(initial=0.0)), 0.0)
        same = before is not None and all((abs(a - b) <= close).all() for a, b in zip(growth, before, strict=True))
        self.since = self.since + 1 if same else 0
        if self.since < run.rounds + 1:
            return 0
        operand, free, start, served, queue, ends, made, end, *_ = range(10)
        starts, reads = (
            np.repeat(np.arange(len(part.count)), part.count),
            np.repeat(np.arange(len(part.read_start)), np.diff(np.append(part.read_start, len(part.operand)))),
        )
        pairs = [  # in each maximum: the result, and an argument
            (now[start], growth[start], now[operand], growth[operand]),
            (now[start][starts], growth[start][starts], now[free], growth[free]),
            (now[made][reads], growth[made][reads], now[ends], growth[ends]),
            (now[end], growth[end], now[made], growth[made]),
        ]
        after, faster = now[ends] - part.latency, growth[ends]
        pairs += [(after, faster, now[served], growth[served]), (after, faster, now[queue], growth[queue])]
        ahead = float(1 << 62)
        for value, rate, argument, its_rate in pairs:
            overtakes = its_rate > rate + close
            if overtakes.any():
                gap = np.broadcast_to(value, its_rate.shape) - argument
                ahead = min(ahead, float((gap[overtakes] / (its_rate - rate)[overtakes]).min()))
        return max(0, int(ahead) - 1)

    def times(self, ahead: int) -> tuple[Any, Any]:
        """Return when each read starts in the next tick, and when it ends in the last of the next ``ahead`` ticks."""
        assert self.growth is not None
        return self.run.start + self.growth[2], self.run.ends + ahead * self.growth[5]

    def jump(self, ahead: int) -> float:
        """Run ``ahead`` ticks at once, and return by how many seconds each extends the time."""
        import numpy as np

        run, growth = self.run, self.growth
        assert growth is not None
        made, end, free, queued = growth[6], float(growth[7][0]), growth[8], growth[9]
        run.free = run.free + ahead * free
        run.queued = run.queued + ahead * queued
        run.ready = np.roll(run.ready, ahead % run.width, axis=1)
        run.ready[1:] += ahead * made[:, None]
        run.end += ahead * end
        self.last, self.growth, self.since = None, None, 0
        return end
