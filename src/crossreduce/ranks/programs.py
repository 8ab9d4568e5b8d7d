"""A collective among the ranks of one host, written down as ticks of jobs for each rank.

In: what flows from whom to whom, and how much.  Out: a ``Course``: what each rank does between two meetings of all.
Pure, and the same on every rank. A job reads and writes the caller's memory, and slots, which all ranks of the host
see. Long arrays go in pieces, so that slots stay small and in the cache: while one piece is copied in, the one before
it is reduced, and the one before that is copied out.

Who reduces what: a flow of its own (all-reduce, reduce) is shared out among all ranks, as in a ``direct`` schedule;
of several flows (reduce-scatter) each is reduced where it is wanted. Either way the order of combination is that of
the ranks, so the same inputs give the same bits, on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from .. import kernels
from ..errors import UnsupportedError, message
from ..kernels import STREAMING_BYTES, FusedProgram, Segment
from ..lowering import fused, lower
from ..ops import ACCUMULATORS, INTEGERS, ReduceOp
from ..packing import itemsize
from ..planning import direct

# What a rank copies into its slot at a time. Measured for 2, 4 and 8 ranks on 2 cores: 128 KiB takes 1.6 to 2.9 times
# as long, 2 MiB up to 1.3 times; beside the ranks' own work (DDP on 8 ranks) 512 KiB takes 1.2 times, as all must be
# scheduled for each piece.
PIECE_BYTES: Final = 1 << 20
# Up to so many bytes each rank reduces everything for itself: one meeting fewer.
SMALL_BYTES: Final = 1 << 13
# Each rank's slot: for the ops of even number and for the odd ones two pieces copied in and its shares of two reduced,
# which of 2 ranks are halves, and what rounding to lines may add.
SLOT_BYTES: Final = 2 * (3 * PIECE_BYTES + (1 << 18))
LINE: Final = 64  # bytes of a cache line; shares begin where lines do


class Numbers(NamedTuple):
    """What is computed: op, dtypes of sources, accumulator and results, and what results are divided by."""

    op: str
    dtype: str
    accumulator: str
    result: str
    divisor: int


class Flow(NamedTuple):
    """An array's way: ``(rank, buffer)`` of each rank that has a part, and of each that gets the result."""

    sources: tuple[tuple[int, int], ...]
    destinations: tuple[tuple[int, int], ...]


class Spot(NamedTuple):
    """Where an operand lies: in rank ``region``'s slot, or, for ``~k``, in the caller's buffer ``k``."""

    region: int
    offset: int


class Job(NamedTuple):
    """Combine, or copy, ``size`` elements: sources in order, the first to all results if there is but one."""

    size: int
    sources: tuple[Spot, ...]
    results: tuple[Spot, ...]
    streaming: bool = False


Tick = tuple[Job, ...]


def reduction_numbers(op: ReduceOp, dtype: str, ranks: int) -> Numbers:
    """Return in which dtypes ranks reduce, whose results are of the same dtype as what they give.

    Raises:
      UnsupportedError: the op is not defined for the dtype, or its result would be of another.
    """
    wide = ACCUMULATORS[op, dtype]
    if op is ReduceOp.MEAN and dtype in INTEGERS:
        problem = "the mean of integers is no integer."
        raise UnsupportedError(message(problem, f"op mean, dtype {dtype}", "the sum and a division, or floats"))
    mean = op is ReduceOp.MEAN
    return Numbers("sum" if mean else op.value, dtype, wide, dtype, ranks if mean else 1)


def copying(dtype: str) -> Numbers:
    """Return the numbers of a copy."""
    return Numbers("sum", dtype, dtype, dtype, 1)


@lru_cache(maxsize=256)
def flows(collective: str, ranks: int, root: int | None) -> tuple[Flow, ...]:
    """Return what flows in a collective. A rank's buffers are numbered: what it gives, then what it gets.

    >>> flows("reduce", 2, 1)
    (Flow(sources=((0, 0), (1, 0)), destinations=((1, 1),)),)
    """
    everyone = range(ranks)
    all_first = tuple((rank, 0) for rank in everyone)
    if collective == "all_reduce":
        return (Flow(all_first, tuple((rank, 1) for rank in everyone)),)
    if collective == "reduce":
        assert root is not None
        return (Flow(all_first, ((root, 1),)),)
    if collective == "broadcast":
        assert root is not None
        return (Flow(((root, 0),), tuple((rank, 0) for rank in everyone if rank != root)),)
    if collective == "all_gather":
        return tuple(Flow(((k, 0),), tuple((rank, 1 + k) for rank in everyone)) for k in everyone)
    if collective == "reduce_scatter":
        return tuple(Flow(tuple((rank, k) for rank in everyone), ((k, ranks),)) for k in everyone)
    if collective == "gather":
        assert root is not None
        return tuple(Flow(((k, 0),), ((root, 1 + k),)) for k in everyone)
    if collective == "scatter":
        assert root is not None
        return tuple(Flow(((root, 1 + k),), ((k, 0),)) for k in everyone)
    assert collective == "all_to_all", collective
    return tuple(Flow(((i, k),), ((k, ranks + i),)) for i in everyone for k in everyone)


def shares(size: int, owners: int, nbytes: int) -> tuple[int, ...]:
    """Return where each owner's share of ``size`` elements begins, in whole lines, and where the last ends.

    >>> shares(100, 3, 4)
    (0, 32, 64, 100)
    """
    line = max(1, LINE // nbytes)
    return *(min(size, k * size // owners // line * line) for k in range(owners)), size


def piece_size(flows: tuple[Flow, ...], size: int, nbytes: int) -> int:
    """Return how many elements of each flow go at a time: what any rank copies in fits ``PIECE_BYTES``."""
    crowd = _crowd(flows)
    return max(1, min(size, PIECE_BYTES // (nbytes * crowd) // LINE * LINE or PIECE_BYTES // (nbytes * crowd)))


def ticks(flows: tuple[Flow, ...], size: int, numbers: Numbers, rank: int, ranks: int) -> list[Tick]:
    """Return what a rank does, tick by tick; all ranks have the same number of ticks, two at least.

    Args:
      flows: what flows; all of one size. Buffers are the caller's, numbered as it hands them over.
      size: elements of each flow.
      numbers: what is computed where a flow has several sources; of the same ``dtype`` and ``result`` size.
      rank: whose course it is, of ``ranks``.

    >>> pair = Flow(((0, 0), (1, 0)), ((0, 1), (1, 1)))
    >>> numbers = Numbers("sum", "float32", "float32", "float32", 1)
    >>> for tick in ticks((pair,), 8, numbers, 0, 2):  # small: each rank reduces all of it
    ...     print(*(tuple(map(tuple, job.sources)) for job in tick), *(tuple(map(tuple, job.results)) for job in tick))
    ((-1, 0),) ((0, 0),)
    ((0, 0), (1, 0)) ((-2, 0),)
    """
    nbytes = itemsize(numbers.dtype)
    step = piece_size(flows, size, nbytes)
    starts = range(0, size, step)
    small = len(flows) == 1 and len(flows[0].sources) > 1 and size * nbytes <= SMALL_BYTES
    past = size * nbytes * len(flows) >= STREAMING_BYTES
    mine = _Pieces(flows, nbytes, rank, ranks, step, small, past)
    reducing = any(len(flow.sources) > 1 for flow in flows) and not small
    stages = [mine.copy_in, mine.reduce, mine.copy_out] if reducing else [mine.copy_in, mine.take]
    made: list[list[Job]] = [[] for _ in range(max(len(starts), 1) + len(stages) - 1)]
    for number, start in enumerate(starts):
        for delay, stage in enumerate(stages):
            made[number + delay] += stage(number, start, min(size, start + step))
    return [tuple(job for job in jobs if job.size) for jobs in made]


class _Pieces:
    """What one rank does with one piece, elements ``start`` to ``stop`` of each flow."""

    def __init__(
        self, flows: tuple[Flow, ...], nbytes: int, rank: int, ranks: int, step: int, small: bool, past: bool
    ) -> None:
        self.flows, self.nbytes, self.rank, self.ranks = flows, nbytes, rank, ranks
        self.small, self.past = small, past
        # A slot: what is copied in, two pieces in turn; then the own shares of what is reduced, likewise. In lines.
        self.room = -(-step * nbytes // LINE) * LINE
        self.crowd = _crowd(flows)
        self.results_at = 2 * self.crowd * self.room
        self.share_room = (step * nbytes // ranks // LINE + 2) * LINE

    def places(self, number: int) -> Iterator[tuple[Flow, dict[int, int]]]:
        """Yield each flow, and where in its sources' slots a piece of it is."""
        filled: Counter[int] = Counter()
        for flow in self.flows:
            place = {}
            for source, _ in flow.sources:
                place[source] = (number % 2 * self.crowd + filled[source]) * self.room
                filled[source] += 1
            yield flow, place

    def owned(self, flow: Flow, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return who reduces what of a piece: ``(rank, start, stop)``."""
        if len(self.flows) > 1:
            return [(flow.destinations[0][0], start, stop)]
        ends = shares(stop - start, self.ranks, self.nbytes)
        return [(owner, start + ends[owner], start + ends[owner + 1]) for owner in range(self.ranks)]

    def own(self, buffer: int, start: int) -> Spot:
        return Spot(~buffer, start * self.nbytes)

    def copy_in(self, number: int, start: int, stop: int) -> Iterator[Job]:
        """What others need of this rank's part goes into its slot."""
        for flow, place in self.places(number):
            for source, buffer in flow.sources:
                if source != self.rank:
                    continue
                if len(flow.sources) > 1 and not self.small:
                    needed = [(a, b) for owner, a, b in self.owned(flow, start, stop) if owner != source]
                elif len(flow.sources) > 1 or any(rank != source for rank, _ in flow.destinations):
                    needed = [(start, stop)]
                else:
                    needed = []
                for a, b in _joined(needed):
                    to = Spot(source, place[source] + (a - start) * self.nbytes)
                    yield Job(b - a, (self.own(buffer, a),), (to,))

    def reduce(self, number: int, start: int, stop: int) -> Iterator[Job]:
        """This rank reduces its shares: its own part from where it lies, all others from their slots."""
        for flow, place in self.places(number):
            if len(flow.sources) == 1:
                continue
            for owner, a, b in self.owned(flow, start, stop):
                if owner != self.rank:
                    continue
                at = (a - start) * self.nbytes
                sources = tuple(
                    self.own(buffer, a) if source == owner else Spot(source, place[source] + at)
                    for source, buffer in flow.sources
                )
                results = [self.own(buffer, a) for rank, buffer in flow.destinations if rank == owner]
                if any(rank != owner for rank, _ in flow.destinations):
                    results.append(self.reduced(owner, number))
                yield Job(b - a, sources, tuple(results))

    def reduced(self, owner: int, number: int) -> Spot:
        return Spot(owner, self.results_at + number % 2 * self.share_room)

    def copy_out(self, number: int, start: int, stop: int) -> Iterator[Job]:
        """What others reduced goes to this rank's results."""
        for flow, _ in self.places(number):
            for rank, buffer in flow.destinations:
                if rank != self.rank or len(flow.sources) == 1:
                    continue
                for owner, a, b in self.owned(flow, start, stop):
                    if owner != rank:
                        yield Job(b - a, (self.reduced(owner, number),), (self.own(buffer, a),), self.past)

    def take(self, number: int, start: int, stop: int) -> Iterator[Job]:
        """What needs no owner: copies of one source, and small arrays, which each rank reduces for itself."""
        for flow, place in self.places(number):
            for rank, buffer in flow.destinations:
                if rank != self.rank:
                    continue
                sources = tuple(
                    self.own(from_buffer, start)
                    if source == rank and len(flow.sources) == 1
                    else Spot(source, place[source])
                    for source, from_buffer in flow.sources
                )
                yield Job(stop - start, sources, (self.own(buffer, start),), self.past and len(sources) == 1)


def _crowd(flows: tuple[Flow, ...]) -> int:
    """Return how many flows have the same rank as a source, at most."""
    return max(Counter(rank for flow in flows for rank, _ in flow.sources).values(), default=1)


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join spans that follow on each other."""
    start = end = -1
    for a, b in spans:
        if a == end:
            end = b
            continue
        if end > start:
            yield start, end
        start, end = a, b
    if end > start:
        yield start, end


def native_course(flows: tuple[Flow, ...], size: int, numbers: Numbers, rank: int, ranks: int) -> tuple[Any, int]:
    """Return a rank's course, ready for ``Arena.begin``, and how many ticks it has."""
    made = ticks(flows, size, numbers, rank, ranks)
    return kernels.native().RankProgram([[ready(job, numbers) for job in tick] for tick in made]), len(made)


def ready(job: Job, numbers: Numbers) -> tuple[kernels.Kernel, tuple[Spot, ...], tuple[Spot, ...], bool]:
    """Return a job as the native course takes it."""
    return kernel_plan(numbers, job.size, len(job.sources), len(job.results)), job.sources, job.results, job.streaming


@lru_cache(maxsize=4096)
def kernel_plan(numbers: Numbers, size: int, sources: int, results: int) -> kernels.Kernel:
    """Return the plan that combines ``size`` elements of the sources, in order, or copies those of the only one."""
    op, dtype, accumulator, result, divisor = numbers
    everything = (Segment(0, 0, size, 0),)
    if sources == 1:
        copying = FusedProgram(0, (), (0,) * results)
        kinds = (dtype, dtype, dtype) if result == dtype else (dtype, accumulator, result)
        return kernels.compile_kernel("sum", kinds, 1, 1, results, (size,), (copying,), everything)
    reducing = fused(lower(direct([f"cpu:{k}" for k in range(sources)])).chunks[0], 1)
    reducing = reducing._replace(results=reducing.results * results)
    kinds = (dtype, accumulator, result)
    return kernels.compile_kernel(op, kinds, divisor, sources, results, (size,), (reducing,), everything)
