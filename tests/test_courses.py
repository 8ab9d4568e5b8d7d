"""Courses without processes: what all ranks' jobs do to plain arrays, in any order that meeting allows."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossreduce.ranks import courses
from crossreduce.ranks.programs import Numbers, flows, shares, ticks

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
DTYPES = ("uint8", "int16", "float32", "int64", "float64", "complex128")
POISON = 113


class Call(NamedTuple):
    """A collective of ``size`` elements a buffer."""

    collective: str
    size: int
    dtype: str
    root: int | None


@contextlib.contextmanager
def pieces(piece, small):
    """Cut into small pieces, so that small arrays have many."""
    before = courses.PIECE_BYTES, courses.SMALL_BYTES
    courses.PIECE_BYTES, courses.SMALL_BYTES = piece, small
    try:
        yield
    finally:
        courses.PIECE_BYTES, courses.SMALL_BYTES = before


def numbers(dtype):
    return Numbers("sum", dtype, dtype, dtype, 1)


def planned(call, ranks):
    """Every rank's course."""
    given = flows(call.collective, ranks, call.root)
    return [ticks(given, call.size, numbers(call.dtype), rank, ranks) for rank in range(ranks)]


def inputs(call, ranks, draw):
    """Every rank's buffers before a call, in the order in which ``Communicator`` hands them over, and those after it.

    Written down from what the collectives are, with no look at flows.
    """
    dtype = np.dtype(call.dtype)

    def random():
        found = draw.integers(0, 256, call.size * dtype.itemsize).astype(np.uint8)
        if dtype.kind in "fc":
            wide = draw.standard_normal(call.size) * 10.0 ** draw.integers(-3, 4, call.size)
            return wide.astype(dtype)
        return found.view(dtype)

    def blank():
        return np.full(call.size * dtype.itemsize, POISON, np.uint8).view(dtype)

    def total(arrays):
        return functools.reduce(np.add, arrays)  # rank by rank, from the first

    everyone, root, name = range(ranks), call.root, call.collective
    own = [random() for _ in everyone]
    parts = [[random() for _ in everyone] for _ in everyone]
    if name == "all_reduce":
        return [[own[r], blank()] for r in everyone], [[own[r], total(own)] for r in everyone]
    if name == "reduce":
        return (
            [[own[r], *([blank()] * (r == root))] for r in everyone],
            [[own[r], *([total(own)] * (r == root))] for r in everyone],
        )
    if name == "broadcast":
        return [[own[r]] for r in everyone], [[own[root]] for r in everyone]
    if name == "all_gather":
        return [[own[r], *(blank() for _ in everyone)] for r in everyone], [[own[r], *own] for r in everyone]
    if name == "reduce_scatter":
        return (
            [[*parts[r], blank()] for r in everyone],
            [[*parts[r], total([parts[s][r] for s in everyone])] for r in everyone],
        )
    if name == "gather":
        return (
            [[own[r], *(blank() for _ in everyone if r == root)] for r in everyone],
            [[own[r], *(own if r == root else ())] for r in everyone],
        )
    if name == "scatter":
        return (
            [[blank(), *(parts[root] if r == root else ())] for r in everyone],
            [[parts[root][r], *(parts[root] if r == root else ())] for r in everyone],
        )
    assert name == "all_to_all"
    return (
        [[*parts[r], *(blank() for _ in everyone)] for r in everyone],
        [[*parts[r], *(parts[s][r] for s in everyone)] for r in everyone],
    )


class Touched:
    """Which bytes of slots each rank read and wrote while no two ranks had met."""

    def __init__(self):
        self.spans = []  # region, start, stop, rank, written

    def add(self, region, start, stop, rank, written):
        if stop > start:
            self.spans.append((region, start, stop, rank, written))

    def races(self):
        spans = sorted(self.spans)
        for k, (region, _, stop, rank, written) in enumerate(spans):
            for other in spans[k + 1 :]:
                if other[0] != region or other[1] >= stop:
                    break
                if other[3] != rank and (written or other[4]):
                    yield spans[k], other


def run(calls, ranks, draw, in_place=False):
    """Run ops one after the other on all ranks and return what is wrong, in words.

    Two ranks are only ever kept in step by meeting after each tick of an op but its last: so the last tick of an op
    and the first of the next are one stretch of time, in which ranks may do their jobs in any order.
    """
    half = 1 << 20
    slots = np.zeros((ranks, 2, half), np.uint8)
    memories, wanted, stretches = [], [], []
    for number, call in enumerate(calls):
        before, after = inputs(call, ranks, draw)
        if in_place and call.collective == "all_reduce":
            for buffers, results in zip(before, after, strict=True):
                buffers[1], results[0] = buffers[0], results[1]
        memories.append([[b.view(np.uint8) if b.size else np.zeros(0, np.uint8) for b in bs] for bs in before])
        wanted.append(after)
        courses_ = planned(call, ranks)
        assert len({len(course) for course in courses_}) == 1, "ranks' courses have different numbers of ticks"
        count = len(courses_[0])
        assert count >= 2, "the ranks do not meet"
        for tick in range(count):
            if tick or not number:
                stretches.append([[] for _ in range(ranks)])
            for rank in range(ranks):
                stretches[-1][rank] += [(number, job) for job in courses_[rank][tick]]
    for stretch in stretches:
        touched = Touched()
        for rank in draw.permutation(ranks):
            for number, job in stretch[rank]:
                dtype = np.dtype(calls[number].dtype)
                nbytes = job.size * dtype.itemsize

                def at(spot, written, number=number, rank=int(rank), nbytes=nbytes, touched=touched):
                    if spot.region < 0:
                        memory = memories[number][rank][~spot.region]
                    else:
                        memory = slots[spot.region, number % 2]
                        region = (spot.region, number % 2)
                        touched.add(region, spot.offset, spot.offset + nbytes, rank, written)
                    assert 0 <= spot.offset <= spot.offset + nbytes <= memory.size, f"{spot} reaches too far"
                    return memory[spot.offset : spot.offset + nbytes]

                sources = [at(spot, written=False).view(dtype) for spot in job.sources]
                value = functools.reduce(np.add, sources)
                for spot in job.results:
                    at(spot, written=True)[:] = np.ascontiguousarray(value).view(np.uint8)
                assert not job.streaming or all(spot.region < 0 for spot in job.results), "a slot past the cache"
        races = list(touched.races())
        assert not races, f"(slot, half), start, stop, rank, written: {races[:3]}"
    for call, buffers, results in zip(calls, memories, wanted, strict=True):
        for rank in range(ranks):
            for k, (found, right) in enumerate(zip(buffers[rank], results[rank], strict=True)):
                same = found.tobytes() == right.tobytes()
                assert same, f"{call}: rank {rank}'s buffer {k} is not what it should be"


def drawn_calls(ranks):
    roots = st.integers(0, ranks - 1)
    sizes = st.one_of(st.integers(0, 40), st.integers(0, 700))
    return st.builds(
        lambda name, size, dtype, root: Call(name, size, dtype, root if name in ROOTED else None),
        st.sampled_from(COLLECTIVES),
        sizes,
        st.sampled_from(DTYPES),
        roots,
    )


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_ops_in_a_row_give_what_they_should(data):
    """Three ops of any kinds in a row give the oracle's bits on every rank, write nothing else, and no byte is written
    by one rank while another may read or write it."""
    ranks = data.draw(st.integers(1, 9), "ranks")
    calls = data.draw(st.lists(drawn_calls(ranks), min_size=1, max_size=3), "calls")
    piece = data.draw(st.sampled_from([128, 512, 1024, 1 << 12]), "piece bytes")
    small = data.draw(st.sampled_from([0, 64, 1 << 10]), "small bytes")
    seed = data.draw(st.integers(0, 1 << 20), "seed")
    with pieces(piece, small):
        run(calls, ranks, np.random.default_rng(seed), in_place=data.draw(st.booleans(), "in place"))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_count_and_root(collective):
    """For 1 to 9 ranks and every root, around the ends of lines, shares and pieces, results are the oracle's."""
    draw = np.random.default_rng(5)
    for ranks in range(1, 10):
        for root in range(ranks) if collective in ROOTED else [None]:
            sizes = {0, 1, 15, 16, 17, ranks * 16 - 1, ranks * 16, 128, 129, int(draw.integers(2, 400))}
            some = sorted(sizes) if root in (None, 0, ranks - 1) else [1, 129]
            with pieces(512, int(draw.choice([0, 64]))):
                run([Call(collective, size, "float32", root) for size in some], ranks, draw)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_to_all", "broadcast"])
def test_real_pieces(collective):
    """With pieces as they really are: at their ends, and one element to either side."""
    draw = np.random.default_rng(6)
    root = 1 if collective in ROOTED else None
    for ranks in (2, 3):
        step = courses.piece_size(flows(collective, ranks, root), 1 << 24, 8)
        assert 0 < step * 8 <= courses.PIECE_BYTES
        for size in (step - 1, step, step + 1, 2 * step + 1):
            given = Call(collective, size, "float64", root)
            for course in planned(given, ranks):
                assert _reach(course, 8) <= courses.SLOT_BYTES // 2
        with pieces(1 << 16, courses.SMALL_BYTES):
            step = courses.piece_size(flows(collective, ranks, root), 1 << 24, 8)
            run([Call(collective, size, "float64", root) for size in (step - 1, step, step + 1)], ranks, draw)


def _reach(course, nbytes):
    spots = [
        spot.offset + job.size * nbytes
        for tick in course
        for job in tick
        for spot in (*job.sources, *job.results)
        if spot.region >= 0
    ]
    return max(spots, default=0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slots_are_large_enough(data):
    """No course reaches beyond half of a slot, whatever flows, for up to 300 ranks."""
    collective = data.draw(st.sampled_from(COLLECTIVES), "collective")
    many = 40 if collective == "all_to_all" else 300
    ranks = data.draw(st.one_of(st.integers(1, 9), st.integers(1, many)), "ranks")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    nbytes = np.dtype(dtype).itemsize
    root = data.draw(st.integers(0, ranks - 1), "root") if collective in ROOTED else None
    given = flows(collective, ranks, root)
    step = courses.piece_size(given, 1 << 24, nbytes)
    size = data.draw(st.sampled_from([step - 1, step, step + 1, 3 * step + 7]), "size")
    for rank in {0, ranks - 1, data.draw(st.integers(0, ranks - 1), "rank")}:
        course = ticks(given, size, numbers(dtype), rank, ranks)
        assert _reach(course, nbytes) <= courses.SLOT_BYTES // 2
        assert len(course) == len(ticks(given, size, numbers(dtype), 0, ranks))


@given(st.integers(0, 5000), st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_shares(size, owners, nbytes):
    """Shares cover all elements in order, begin at whole lines, and differ by two lines at most."""
    ends = shares(size, owners, nbytes)
    assert ends[0] == 0
    assert ends[-1] == size
    assert len(ends) == owners + 1
    assert list(ends) == sorted(ends)
    line = 64 // nbytes
    assert all(end % line == 0 or end == size for end in ends)
    lengths = np.diff(ends)
    assert lengths.max() - lengths.min() <= 2 * line


def test_every_element_is_combined_in_the_order_of_ranks():
    """Each element's sources are read from rank 0's to the last's, in one job, however it is cut."""
    for collective, size in (("all_reduce", 5), ("all_reduce", 300), ("reduce", 300), ("reduce_scatter", 77)):
        for ranks in (2, 3, 8):
            given = Call(collective, size, "float32", 1 if collective == "reduce" else None)
            with pieces(512, 64):
                for rank, course in enumerate(planned(given, ranks)):
                    for job in (job for tick in course for job in tick if len(job.sources) > 1):
                        owners = [rank if spot.region < 0 else spot.region for spot in job.sources]
                        assert owners == list(range(ranks))


def test_what_goes_past_the_cache():
    """Only large results in the caller's memory do: slots are read by others at once."""
    for collective in ("all_reduce", "all_gather"):
        for size, past in ((1 << 10, False), (1 << 20, True)):
            course = planned(Call(collective, size, "float32", None), 2)[0]
            jobs = [job for tick in course for job in tick]
            assert any(job.streaming for job in jobs) == past
            assert not any(job.streaming for job in jobs if any(spot.region >= 0 for spot in job.results))
