"""The event-driven clock: a read starts when its operand is there and all its resources are free.

``traffic.py`` defines reads and resources. Piece j of a schedule does round r in tick t = r + j. A resource serves its
reads tick by tick. In a tick, a read has a fixed fraction of each of its resources, with which all reads of the tick on
its busiest resource end together if they start together. So a read takes the latency of its route, plus the longest
time that one of its resources needs for all reads of this tick. It waits only for its own operand, and for the reads of
earlier ticks on the same resources. A resource is occupied until all its reads of the tick have arrived, latency
included, as in Hockney's model.

This is never slower than the lock-step clock, by induction: at the end of a lock-step tick, all reads of this tick and
of earlier ones have ended here too. So the reads of the next tick can start at once, and end within that tick.

A host queues operations without a pause: first all operations of tick 0, then those of tick 1, and so on. If a device's
operations are queued, its reads of a tick do not end before the host has queued the operations of this tick.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Baccelli, Cohen, Olsder & Quadrat,
Synchronization and Linearity, 1992 (systems of maxima and sums, which grow periodically).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from ..kernels import native
from .lock_step import Loads

# Times that differ by less than this part of the longest period are equal. It is far above the rounding errors of sums.
_EQUAL: Final = 1e-9

# Up to this number of reads in all ticks, plain Python is as fast as NumPy, whose calls take microseconds each.
_MOST_PLAIN: Final = 1_500
# Up to this number, compiled code is faster. NumPy's does not compute all of many equal ticks.
_MOST_COMPILED: Final = 400_000


class Served(NamedTuple):
    """Reads that are served in one tick, or once in each of several equal ticks."""

    first: int  # the number of the first read; the others have the next numbers
    start: Any  # for each read the second at which it starts in the first of these ticks, as an array
    end: Any  # for each read the second at which it ends in the last of these ticks, as an array
    ticks: int


class EventClock:
    """The event-driven times of a schedule, for a number of bytes.

    NumPy computes all reads of a tick at once. For few reads, or without NumPy, plain Python computes the same times.
    """

    def __init__(self, loads: Loads, nbytes: int) -> None:
        self.loads, self.nbytes, self.rounds = loads, nbytes, loads.rounds

    def run(self, pieces: int) -> list[tuple[float, int]]:
        """Return (seconds by which a tick extends the total time, number of such ticks) for all ticks, in order."""
        if self._is_small(pieces):
            ends = [0.0, *(end for *_, end in self._plain_ticks(pieces))]
            return [(after - before, 1) for before, after in pairwise(ends)]
        return _Run(_arrays(self.loads), self.nbytes, pieces).tick_lengths()

    def total(self, pieces: int) -> float:
        """Return the seconds from the start of the first read to the end of the last one."""
        if self.rounds and self._reads_of_ticks(pieces) <= _MOST_COMPILED and (compiled := _compiled(self.loads)):
            queueing = [self.loads.queued(queue, min(pieces, self.rounds)) for queue in self.loads.queues.values()]
            return float(compiled.total(self.nbytes / pieces, pieces, queueing))
        if self._is_small(pieces):
            return max((end for *_, end in self._plain_ticks(pieces)), default=0.0)
        run = _Run(_arrays(self.loads), self.nbytes, pieces)
        run.tick_lengths()
        return run.end

    def intervals(self, pieces: int) -> Iterator[tuple[int, int, float, float]]:
        """Yield (tick, number of the read, start, end) for each read of each tick, in seconds."""
        for t, reads, _ in self._plain_ticks(pieces):
            for k, start, end in reads:
                yield t, k, start, end

    def served(self, pieces: int) -> Iterator[Served]:
        """Yield the reads of all ticks, where one ``Served`` may stand for many equal ticks. This needs NumPy."""
        return (served for *_, served in _Run(_arrays(self.loads), self.nbytes, pieces).equal_ticks())

    def _is_small(self, pieces: int) -> bool:
        return self._reads_of_ticks(pieces) <= _MOST_PLAIN or not _has_numpy()

    def _reads_of_ticks(self, pieces: int) -> int:
        return len(self.loads.traffic.reads) * (self.rounds + pieces)

    def _plain_ticks(self, pieces: int) -> Iterator[tuple[int, list[tuple[int, float, float]], float]]:
        """Yield for each tick its number, (number, start, end) of each of its reads, and the latest end so far."""
        loads, rounds, nbytes = self.loads, self.rounds, self.nbytes / pieces
        reads, first = loads.traffic.reads, [0] * (rounds + 1)
        for read in reads:
            first[read.round + 1] += 1
        first = list(accumulate(first))  # for each round, the number of its first read
        queues = list(loads.queues.values())
        queueing = [loads.queued(queue, min(pieces, rounds)) for queue in queues]
        queue_of_step = _queue_of_step(loads)
        queued = [0.0] * len(queues)  # when each host has queued the operations of all ticks up to this one
        free = [0.0] * len(loads.per_message)  # when each resource has served the reads of the earlier ticks
        ready: dict[tuple[int, int], float] = {}  # by step and piece, when the value that the step makes is ready
        time = 0.0
        for t in range(rounds + pieces - 1):
            window = _window(t, rounds, pieces)
            queued = [before + seconds[window] for before, seconds in zip(queued, queueing, strict=True)]
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
                queue_number = queue_of_step[read.step]
                if queue_number:
                    end = max(end, queued[queue_number - 1])
                end += read.latency_s
                for k, _ in loads.uses[number]:
                    occupied[k] = max(occupied[k], end)
                value = read.step, piece
                ready[value] = max(ready.get(value, 0.0), end)
                time = max(time, end)
                served_reads.append((number, start, end))
            free = occupied
            yield t, served_reads, time


def _window(t: int, rounds: int, pieces: int) -> int:
    """Return the number of the window of tick t (see ``Loads``). The window with all rounds occurs in several ticks."""
    return t if t < rounds else max(rounds - 1, t - max(0, pieces - rounds))


def _queue_of_step(loads: Loads) -> list[int]:
    """Return for each step the number of its queue, from 1, or 0 if its operation is not queued."""
    number = {host: q for q, queue in enumerate(loads.queues.values(), start=1) for host in queue.steps}
    return [number.get(host, 0) for host in loads.traffic.hosts]


@lru_cache(maxsize=256)
def _compiled(loads: Loads) -> Any:
    """Return the compiled clock of some loads, or ``None`` where it was not built."""
    module = native()
    return module and module.EventClock(loads.traffic.reads, loads.by_round, _queue_of_step(loads), loads.rounds)


@lru_cache(maxsize=1)
def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401 - checks only whether it is installed
    except ImportError:
        return False
    return True


@lru_cache(maxsize=64)
def _arrays(loads: Loads) -> _Arrays:
    return _Arrays(loads)


class _Arrays:
    """The reads and loads of a schedule as arrays."""

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
        # Resource 0 is a dummy that is always free and has no load. Reads on their own device use only this one.
        uses = [[0, *(k + 1 for k, _ in read.uses)] for read in reads]
        self.latency = np.array([read.latency_s for read in reads])
        self.round_of_read = np.array([read.round for read in reads])
        self.operand = np.array([read.operand + 1 for read in reads])  # the row in ``_Run.ready``, 0 for inputs
        self.resource = np.array([k for group in uses for k in group], dtype=np.intp)
        self.count = np.array([len(group) for group in uses])  # the number of resources of each read
        self.use_start = np.concatenate([[0], np.cumsum(self.count)])  # for each read, its first one in ``resource``
        step_of_read = np.array([read.step for read in reads], dtype=np.intp)
        self.queue = np.array(_queue_of_step(loads))[step_of_read]  # 0 stands for reads without a queued operation
        self.read_start = np.concatenate([np.flatnonzero(np.diff(step_of_read, prepend=-1)), [len(reads)]])
        self.round_of_step = self.round_of_read[self.read_start[:-1]]

    def load(self, first: int, last: int, nbytes: float) -> Any:
        """Return the seconds that each resource needs for rounds ``first`` to ``last`` of a buffer of ``nbytes``."""
        seconds = (self.transfers[last + 1] - self.transfers[first]) * nbytes
        return seconds + self.messages[last + 1] - self.messages[first]

    @cached_property
    def bounds(self) -> tuple[Any, Any]:
        """The numbers of the first read and of the first step of each round, each followed by the total number."""
        import numpy as np

        rounds = np.arange(self.rounds + 1)
        return np.searchsorted(self.round_of_read, rounds), np.searchsorted(self.round_of_step, rounds)


class _ActiveReads:
    """The reads of rounds ``first`` to ``last``, which are in progress at the same time."""

    def __init__(self, arrays: _Arrays, first: int, last: int, nbytes: float) -> None:
        import numpy as np

        read_bounds, step_bounds = arrays.bounds
        self.first = int(read_bounds[first])
        first_step = step_bounds[first]
        reads, steps = slice(self.first, read_bounds[last + 1]), slice(first_step, step_bounds[last + 1])
        first_use, end_of_uses = arrays.use_start[reads.start], arrays.use_start[reads.stop]
        self.rows = np.arange(first_step + 1, steps.stop + 1)  # the rows of these steps in ``_Run.ready``
        self.operand, self.latency, self.queue = arrays.operand[reads], arrays.latency[reads], arrays.queue[reads]
        self.round_of_read, self.round_of_step = arrays.round_of_read[reads], arrays.round_of_step[steps]
        self.resource, self.count = arrays.resource[first_use:end_of_uses], arrays.count[reads]
        self.use_start, self.read_start = arrays.use_start[reads] - first_use, arrays.read_start[steps] - self.first
        load = np.concatenate([[0.0], arrays.load(first, last, nbytes)])
        self.seconds = np.maximum.reduceat(load[self.resource], self.use_start) if len(self.operand) else self.latency


class _Run:
    """One simulation with arrays.

    ``ready[s + 1, j % width]`` is the time at which step s has made its value of piece j; row 0 stands for the inputs.
    At most ``width`` pieces are in progress at the same time.
    """

    def __init__(self, arrays: _Arrays, nbytes: int, pieces: int) -> None:
        import numpy as np

        self.arrays, self.nbytes, self.pieces, self.rounds = arrays, nbytes / pieces, pieces, arrays.rounds
        self.end = 0.0
        self.free = np.zeros(len(arrays.loads.traffic.resources) + 1)
        self.width = width = min(pieces, self.rounds)
        self.ready = np.zeros((len(arrays.round_of_step) + 1, width))
        # Row w: the seconds in which the operations of window w are queued; queue 0 is always empty.
        queued = [arrays.loads.queued(queue, width) for queue in arrays.loads.queues.values()]
        self.queueing = np.array([[0.0] * (self.rounds + width - 1), *queued]).T
        self.queued = np.zeros(1 + len(queued))

    def tick_lengths(self) -> list[tuple[float, int]]:
        """Run all ticks, and return their seconds: see ``EventClock.run``."""
        return [(seconds, count) for seconds, count, _ in self.equal_ticks()]

    def equal_ticks(self) -> Iterator[tuple[float, int, Served]]:
        """Run all ticks. Yield (seconds of one tick, number of equal ticks, their reads) for one or several ticks."""
        rounds, pieces = self.rounds, self.pieces
        t, active, active_rounds = 0, None, (-1, -1)
        steady = _Steady(self)
        while t < rounds + pieces - 1:
            in_progress = max(0, t - pieces + 1), min(t, rounds - 1)
            if in_progress != active_rounds:
                active, active_rounds = _ActiveReads(self.arrays, *in_progress, self.nbytes), in_progress
            assert active is not None
            before = self.end
            self.tick(active, t)
            yield self.end - before, 1, Served(active.first, self.start, self.ends, 1)
            t += 1
            if rounds <= t < pieces - 1:
                ahead = min(steady.ticks_ahead(active), pieces - 1 - t)
                if ahead > 0:
                    start, end = steady.times(ahead)
                    yield steady.jump(ahead), ahead, Served(active.first, start, end, ahead)
                    t += ahead

    def tick(self, active: _ActiveReads, t: int) -> None:
        """Run the reads of tick t."""
        import numpy as np

        self.queued = self.queued + self.queueing[_window(t, self.rounds, self.pieces)]
        if not len(active.operand):
            self.start = self.ends = active.latency
            return
        self.operand_ready = self.ready[active.operand, (t - active.round_of_read) % self.width]
        self.resource_free = self.free[active.resource]
        self.start = np.maximum(self.operand_ready, np.maximum.reduceat(self.resource_free, active.use_start))
        self.served = self.start + active.seconds
        self.in_queue = self.queued[active.queue]
        self.ends = np.maximum(self.served, self.in_queue) + active.latency
        np.maximum.at(self.free, active.resource, np.repeat(self.ends, active.count))
        self.free[0] = 0.0
        self.made = np.maximum.reduceat(self.ends, active.read_start)
        self.ready[active.rows, (t - active.round_of_step) % self.width] = self.made
        self.end = max(self.end, float(self.made.max()))


class _Times(NamedTuple):
    """The times after one tick, or by how much they grow from tick to tick. Every entry is an array."""

    operand: Any  # for each read: when its operand is ready
    resource: Any  # for each use of a resource by a read: when the resource is free
    start: Any  # for each read: the maximum of ``operand`` and all its ``resource`` entries
    served: Any  # for each read: when its resources have served it
    in_queue: Any  # for each read: when its operation is queued
    ends: Any  # for each read: the maximum of ``served`` and ``in_queue``, plus the latency
    made: Any  # for each step: the maximum of ``ends`` over its reads
    end: Any  # one number, the maximum of all ``made``
    free: Any  # for each resource: when it has served the reads of all ticks so far
    queued: Any  # for each queue: when the operations of all ticks so far are queued


class _Steady:
    """Finds ticks in which every time grows by a constant, and runs many of them at once.

    While all rounds are in progress, each tick applies the same maxima and sums. Once each time has grown by its own
    constant for R ticks, it continues to do so until another argument of some maximum becomes the greatest. The number
    of ticks until then follows from the differences between arguments and from their growth.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.previous: _Times | None = None
        self.growth: _Times | None = None
        self.equal_growths = 0  # how many ticks in succession had the same growth as the tick before

    def ticks_ahead(self, active: _ActiveReads) -> int:
        """Return for how many ticks, after the one that has just run, all times keep their constant growth."""
        import numpy as np

        run = self.run
        now = _Times(
            run.operand_ready, run.resource_free, run.start, run.served, run.in_queue, run.ends, run.made,
            np.array([run.end]), run.free.copy(), run.queued,
        )  # fmt: skip
        if self.previous is None:
            self.previous, self.equal_growths = now, 0
            return 0
        growth = _Times(*(a - b for a, b in zip(now, self.previous, strict=True)))
        self.previous, before, self.growth = now, self.growth, growth
        close = _EQUAL * max(float(growth.made.max(initial=0.0)), 0.0)
        same = before is not None and all((abs(a - b) <= close).all() for a, b in zip(growth, before, strict=True))
        self.equal_growths = self.equal_growths + 1 if same else 0
        if self.equal_growths < run.rounds + 1:
            return 0
        read_of_use = np.repeat(np.arange(len(active.count)), active.count)
        reads_of_step = np.diff(np.append(active.read_start, len(active.operand)))
        step_of_read = np.repeat(np.arange(len(active.read_start)), reads_of_step)
        before_latency = now.ends - active.latency
        maxima = [  # for each maximum and argument: the result, its growth, the argument, and the argument's growth
            (now.start, growth.start, now.operand, growth.operand),
            (now.start[read_of_use], growth.start[read_of_use], now.resource, growth.resource),
            (now.made[step_of_read], growth.made[step_of_read], now.ends, growth.ends),
            (now.end, growth.end, now.made, growth.made),
            (before_latency, growth.ends, now.served, growth.served),
            (before_latency, growth.ends, now.in_queue, growth.in_queue),
        ]
        ahead = float(1 << 62)
        for result, growth_of_result, argument, growth_of_argument in maxima:
            overtakes = growth_of_argument > growth_of_result + close
            if overtakes.any():
                gap = (np.broadcast_to(result, argument.shape) - argument)[overtakes]
                ahead = min(ahead, float((gap / (growth_of_argument - growth_of_result)[overtakes]).min()))
        return max(0, int(ahead) - 1)

    def times(self, ahead: int) -> tuple[Any, Any]:
        """Return when each read starts in the next tick, and when it ends in the last of the next ``ahead`` ticks."""
        assert self.growth is not None
        return self.run.start + self.growth.start, self.run.ends + ahead * self.growth.ends

    def jump(self, ahead: int) -> float:
        """Run ``ahead`` ticks at once, and return by how many seconds each extends the time."""
        import numpy as np

        run, growth = self.run, self.growth
        assert growth is not None
        seconds = float(growth.end[0])
        run.free = run.free + ahead * growth.free
        run.queued = run.queued + ahead * growth.queued
        run.ready = np.roll(run.ready, ahead % run.width, axis=1)
        run.ready[1:] += ahead * growth.made[:, None]
        run.end += ahead * seconds
        self.previous, self.growth, self.equal_growths = None, None, 0
        return seconds
