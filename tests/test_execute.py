"""The loop: what it computes is what the oracle computes, and it runs nothing that was not verified."""

import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import bounds, run, run_on
from strategies import NAMED, arrays, device_counts, named, names, op_and_dtype, requests

from crossreduce import Chunk, Schedule, ScheduleError, Step
from crossreduce.frameworks.null import NullFramework
from crossreduce.planning import PLANNERS, planned

sizes = st.integers(0, 40)


def plan(algorithm, ask):
    if algorithm == "forest":
        return planned(algorithm, ask.sources, ask.destinations)
    return PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)


def all_reduce(algorithm, n, packs=1):
    return planned(algorithm, names(n), names(n), packs)


@settings(max_examples=400)
@given(named, requests(most_packs=4), op_and_dtype(), sizes, st.data())
def test_executed_results_are_the_oracles(algorithm, ask, pair, size, data):
    """For any plan, op, dtype and size, each destination holds the oracle's result; integers to the bit."""
    op, dtype = pair
    schedule = plan(algorithm, ask)
    xs = data.draw(arrays(dtype, (size,), len(ask.sources)))
    before = [x.copy() for x in xs]
    with np.errstate(all="ignore"):
        results = run(schedule, op, xs, size)
    spans = bounds(schedule, size)
    assert len(results) == len(ask.destinations)
    assert [stop - start for start, stop in spans] == [len(part) for part in results[0].parts]
    wholes = [np.concatenate(parts) for parts, _ in results]
    for whole in wholes:
        oracle.check(whole, op, before, oracle.depth(schedule))
        assert whole.tobytes() == wholes[0].tobytes()  # every destination has the same bits
    assert all(x.tobytes() == old.tobytes() for x, old in zip(xs, before, strict=True))  # no input was written


@settings(max_examples=200)
@given(
    named,
    requests(most_packs=3),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from(["float16", "float32", "int32"]),
    sizes,
)
def test_fresh_parts_belong_to_one_destination(algorithm, ask, op, dtype, size):
    """Parts that are called fresh share memory with no input and no other fresh destination's parts."""
    xs = [np.ones(size, dtype) for _ in ask.sources]
    results = run(plan(algorithm, ask), op, xs, size)
    fresh = [(number, part) for number, (parts, is_fresh) in enumerate(results) if is_fresh for part in parts]
    for number, part in fresh:
        assert not any(np.shares_memory(part, x) for x in xs)
        assert not any(np.shares_memory(part, other) for k, other in fresh if k != number)


@pytest.mark.parametrize("dtype", ["int64", "float32", "float16"])
def test_any_right_schedule_runs_right(dtype):
    """Not only planned schedules: whatever steps verify accepts give exact sums, leave the inputs alone, and call
    parts fresh only where they are. Memory that is used again in between is never memory that is still needed."""
    done = 0
    for seed in range(4_000):
        rng = random.Random(seed)
        n = rng.choice([2, 3, 3, 4])
        everyone = tuple(range(n))
        rounds = [
            [(0, rng.randrange(n), tuple(rng.sample(everyone, rng.randint(1, n))))] for _ in range(rng.randint(1, 4))
        ]
        root = rng.randrange(n)
        if rng.random() < 0.8:  # collect step by step on a chain of devices, with copies and rubbish in between
            way = rng.sample(everyone, n)
            rounds = [[(0, way[k], (way[k - 1], way[k])[:: rng.choice([1, -1])])] for k in range(1, n)]
            root = way[-1]
            for _ in range(rng.randint(0, 2)):
                step = (0, rng.randrange(n), tuple(rng.sample(everyone, rng.randint(1, min(2, n)))))
                rounds.insert(rng.randrange(len(rounds) + 1), [step])
        rounds += [[(0, dst, (root,))] for dst in everyone if dst != root]
        chunk = Chunk(Fraction(1), everyone, everyone)
        steps = tuple(tuple(Step(*step) for step in steps) for steps in rounds)
        schedule = Schedule("all_reduce", "by chance", names(n), (chunk,), steps)
        if not oracle.right(schedule):
            continue
        done += 1
        xs = oracle.contributions(n, "int64", (3,))
        xs = [x.astype(dtype) for x in xs]
        results = run(schedule, "sum", xs, 3)
        due = sum((n + 1) ** k for k in range(n))
        assert all(parts[0].tolist() == [due] * 3 for parts, _ in results), str(schedule)
        assert [x.tolist() for x in xs] == [[(n + 1) ** k] * 3 for k in range(n)], str(schedule)
        fresh = [parts[0] for parts, is_fresh in results if is_fresh]
        for part in fresh:
            assert sum(np.shares_memory(part, other) for other in [*xs, *fresh]) == 1, str(schedule)
    assert done > 500


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("n", range(1, 16))
def test_contributions_all_arrive_once(algorithm, n):
    """(n + 1) ** device sums exactly on every device: no contribution is lost, doubled or taken for another's."""
    xs = oracle.contributions(n, "int64", (11,))
    for parts, _ in run(all_reduce(algorithm, n, packs=2), "sum", xs, 11):
        assert np.concatenate(parts).tolist() == [sum((n + 1) ** k for k in range(n))] * 11


@given(named, device_counts, st.sampled_from(["float16", "bfloat16"]))
def test_halves_are_rounded_once(algorithm, n, dtype):
    """The mean of equal halves is that half, however large: sums are kept in float32 and rounded at the end."""
    largest = np.full(3, float(oracle.dtype_of(dtype).type(3e4 if dtype == "float16" else 1e37))).astype(
        oracle.dtype_of(dtype)
    )
    for parts, _ in run(all_reduce(algorithm, n), "mean", [largest] * n, 3):
        assert np.concatenate(parts).tobytes() == largest.tobytes()


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_nan_and_inf_propagate(algorithm, dtype, op):
    """A NaN of any one device is in the result; infinities go by the rules of arithmetic."""
    n = 5
    for special in (np.nan, np.inf, -np.inf):
        xs = [np.arange(1, n + 3).astype(oracle.dtype_of(dtype)) for _ in range(n)]
        for device in range(n):
            xs[device][device] = special
        xs[0][n] = np.inf
        xs[1][n] = -np.inf
        with np.errstate(invalid="ignore"):
            results = run(all_reduce(algorithm, n), op, xs, n + 2)
        for parts, _ in results:
            oracle.check(np.concatenate(parts), op, xs)


@given(named, requests(most_packs=3))
def test_the_same_input_gives_the_same_bits(algorithm, ask):
    """With a fixed schedule, run after run gives the same bits."""
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=9).astype("float32") for _ in ask.sources]
    once, again = (run(plan(algorithm, ask), "sum", xs, 9) for _ in range(2))
    assert [part.tobytes() for parts, _ in once for part in parts] == [
        part.tobytes() for parts, _ in again for part in parts
    ]


@pytest.mark.parametrize("algorithm", ["one_device", "hierarchical_copy"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_an_open_size_is_reduced_whole(algorithm, shape):
    """With size None arrays of any shape go through the schedule's one chunk."""
    xs = [np.full(shape, 6.0**k) for k in range(5)]
    for parts, _ in run(PLANNERS[algorithm](names(5)), "sum", xs, None):
        (part,) = parts
        oracle.check(part, "sum", xs)


def by_hand(chunks, *rounds):
    return Schedule(
        "all_reduce", "by hand", names(2), chunks, tuple(tuple(Step(*step) for step in steps) for steps in rounds)
    )


WHOLE = (Chunk(Fraction(1), (0, 1), (0, 1)),)
HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (by_hand(WHOLE, [(0, 0, (0, 1))]), "the contribution of device cpu:0 is lost"),
        (by_hand(WHOLE, [(0, 0, (0, 1))], [(0, 1, (0, 1))]), "a second time"),
        (by_hand(WHOLE, [(0, 0, (0, 1)), (0, 1, (0,))]), "depends on the order"),
        # of all chunks only the last, which has no elements here, is wrong
        (by_hand((Chunk(Fraction(1), (0,), (0,)), Chunk(Fraction(0), (0,), (1,)))), "same sources and destinations"),
        # a reduce-scatter
        (
            by_hand((Chunk(HALF, (0, 1), (0,)), Chunk(HALF, (0, 1), (1,))), [(0, 0, (0, 1)), (1, 1, (0, 1))]),
            "same sources and dest",
        ),
        # an all-gather
        (
            by_hand((Chunk(HALF, (0,), (0, 1)), Chunk(HALF, (1,), (0, 1))), [(0, 1, (0,)), (1, 0, (1,))]),
            "same sources and dest",
        ),
    ],
)
@pytest.mark.parametrize("size", [4, 0, None])
def test_what_cannot_be_executed_is_refused_before_anything_is_done(schedule, text, size):
    """A schedule that verify refuses, or whose chunks differ, raises before one byte moves or one element is added."""
    null = NullFramework()
    flats = [null.zeros((size or 0,), "float32", name) for name in names(2)]
    for _ in range(2):  # the refusal is not forgotten
        with pytest.raises(ScheduleError, match=text):
            run_on(null, schedule, "sum", flats, size, "float32")
    assert null.counts == NullFramework().counts


def test_all_chunks_are_verified_not_only_those_with_elements():
    """A wrong step in a chunk that is empty at this size is refused all the same."""
    chunk = Chunk(HALF, (0, 1), (0,))
    schedule = by_hand((chunk, chunk), [(1, 0, (0, 1))])
    assert schedule.spans(1) == ((0, 0), (0, 1))
    with pytest.raises(ScheduleError, match="chunk 0"):
        run(schedule, "sum", [np.ones(1)] * 2, 1)


@given(named, requests(most_packs=6), sizes)
def test_bounds_cover_the_buffer(algorithm, ask, size):
    """A result's parts follow each other and cover the buffer; none is empty, unless all is."""
    found = bounds(plan(algorithm, ask), size)
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(stop > start for start, stop in found) or found == ((0, 0),)
