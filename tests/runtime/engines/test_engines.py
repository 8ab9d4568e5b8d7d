"""The engines: each gives the results of the oracle for any schedule, and runs no schedule that verify rejects."""

import random
from fractions import Fraction
from itertools import product

import numpy as np
import oracle
import pytest
import strategies
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairs
from planned import planned
from running import ENGINES, only, run, run_engine, run_on
from strategies import NAMED, arrays, named, names, op_and_dtype, requests

import crossreduce as cr
from crossreduce import Chunk, Schedule, ScheduleError, Step
from crossreduce.engines.base import Layout, LoweredBuffer, OverlapError, ProgramRange, engine_named
from crossreduce.frameworks import get
from crossreduce.frameworks.null import Counts, NullFramework
from crossreduce.lowering import lower
from crossreduce.packing import Buffer, Span
from crossreduce.planning import PLANNERS
from crossreduce.reduction.pipeline import select

sizes = st.integers(0, 40)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def plan(algorithm, ask):
    if algorithm == "forest":
        return planned(algorithm, ask.sources, ask.destinations)
    return strategies.plan(algorithm, ask)


def all_reduce(algorithm, n, packs=1):
    return planned(algorithm, names(n), names(n), packs)


@given(named, requests(most_packs=4), op_and_dtype(), sizes, st.data())
@examples(250)
def test_results_are_the_oracles(algorithm, ask, pair, size, data):
    """For any plan, op, dtype and size, each engine gives each destination the oracle's result, integers exactly. All
    engines, and a second run, give the same bits, since the lowered program fixes the order of combination."""
    op, dtype = pair
    schedule = plan(algorithm, ask)
    xs = data.draw(arrays(dtype, (size,), len(ask.sources)))
    before = [x.copy() for x in xs]
    bits = set()
    for engine in (*ENGINES, ENGINES[0]):
        with np.errstate(all="ignore"):
            results = run_engine(engine, schedule, op, xs)
        assert len(results) == len(ask.destinations)
        bits |= {result.tobytes() for result in results}
        for k, result in enumerate(results):
            assert not any(np.shares_memory(result, other) for other in [*xs, *results[:k]])
        assert all(x.tobytes() == old.tobytes() for x, old in zip(xs, before, strict=True))  # no input was written
    assert len(bits) == 1
    oracle.check(results[0], op, before, oracle.depth(schedule))


def chance(rng):
    """Return a random schedule of one chunk, which may be wrong."""
    n = rng.choice([2, 3, 3, 4])
    everyone = tuple(range(n))
    rounds = [[(0, rng.randrange(n), tuple(rng.sample(everyone, rng.randint(1, n))))] for _ in range(rng.randint(1, 4))]
    root = rng.randrange(n)
    if rng.random() < 0.8:  # collect along a chain of devices, with up to two random steps in between
        chain = rng.sample(everyone, n)
        rounds = [[(0, chain[k], (chain[k - 1], chain[k])[:: rng.choice([1, -1])])] for k in range(1, n)]
        root = chain[-1]
        for _ in range(rng.randint(0, 2)):
            step = (0, rng.randrange(n), tuple(rng.sample(everyone, rng.randint(1, min(2, n)))))
            rounds.insert(rng.randrange(len(rounds) + 1), [step])
    rounds += [[(0, dst, (root,)) for dst in everyone if dst != root]]
    steps = tuple(tuple(Step(*step) for step in steps) for steps in rounds)
    return Schedule("all_reduce", "chance", names(n), (Chunk(Fraction(1), everyone, everyone),), steps)


@each_engine
@pytest.mark.parametrize("dtype", ["int64", "float16"])
def test_any_right_schedule_gives_the_right_sum(engine, dtype):
    """Random schedules that verify accepts give exact sums, too, and do not write the inputs.

    No engine reuses the memory of an intermediate value that a later step reads.
    """
    done = 0
    for seed in range(1_500 if engine == "loop" else 600):
        schedule = chance(random.Random(seed))
        if not oracle.right(schedule):
            continue
        done += 1
        n = len(schedule.devices)
        xs = [x.astype(dtype) for x in oracle.contributions(n, "int64", (3,))]
        results = run_engine(engine, schedule, "sum", xs)
        due = sum((n + 1) ** k for k in range(n))
        assert all(result.tolist() == [due] * 3 for result in results), str(schedule)
        assert [x.tolist() for x in xs] == [[(n + 1) ** k] * 3 for k in range(n)], str(schedule)
        for k, result in enumerate(results):
            assert not any(np.shares_memory(result, other) for other in [*xs, *results[:k]]), str(schedule)
    assert done > 100


def with_specials(dtype, n, special):
    """Return an array per device: each has the special number in another element, and the last element is inf - inf."""
    xs = [np.arange(1, n + 3).astype(oracle.dtype_of(dtype)) for _ in range(n)]
    for device in range(n):
        xs[device][device] = special
    xs[0][n], xs[1][n] = np.inf, -np.inf
    return xs


SPECIALS = (np.nan, np.inf, -np.inf)
REDUCTIONS = ("sum", "mean", "min", "max", "product")


@each_engine
def test_nan_and_inf_propagate(engine):
    """If one device has a NaN, the result is NaN. Infinities follow the rules of arithmetic."""
    for algorithm, special, dtype, op in pairs(NAMED, SPECIALS, strategies.FLOATS, REDUCTIONS):
        xs = with_specials(dtype, 5, special)
        with np.errstate(invalid="ignore"):
            results = run_engine(engine, all_reduce(algorithm, 5), op, xs)
        for result in results:
            oracle.check(result, op, xs)


@each_engine
def test_results_are_written_into_out(engine):
    """An engine writes its results into the arrays of ``out`` and returns these, also if they are the inputs."""
    xs = oracle.contributions(3, "float32", (7,))
    for out in ([np.empty(7, "float32") for _ in range(3)], xs):
        results = run_engine(engine, all_reduce("ring", 3), "sum", xs, out=out)
        assert all(result is target for result, target in zip(results, out, strict=True))
        assert all(x.tolist() == [21.0] * 7 for x in out)


def custom(chunks, *rounds):
    """Return a schedule on two devices. Each round is a list of steps (chunk, dst, srcs)."""
    steps = tuple(tuple(Step(*step) for step in steps) for steps in rounds)
    return Schedule("all_reduce", "custom", names(2), chunks, steps)


WHOLE = (Chunk(Fraction(1), (0, 1), (0, 1)),)
HALF = Fraction(1, 2)
REFUSED = [
    (custom(WHOLE, [(0, 0, (0, 1))]), "the contribution of device cpu:0 is lost"),
    (custom(WHOLE, [(0, 0, (0, 1))], [(0, 1, (0, 1))]), "a second time"),
    (custom(WHOLE, [(0, 0, (0, 1)), (0, 1, (0,))]), "stale"),
    # only the last chunk, whose share is 0, is wrong
    (custom((Chunk(Fraction(1), (0,), (0,)), Chunk(Fraction(0), (0,), (1,)))), "no step brings chunk 1"),
    # a reduce-scatter: its chunks have different destinations
    (
        custom((Chunk(HALF, (0, 1), (0,)), Chunk(HALF, (0, 1), (1,))), [(0, 0, (0, 1)), (1, 1, (0, 1))]),
        "same sources and destinations",
    ),
    # an all-gather: its chunks have different sources
    (
        custom((Chunk(HALF, (0,), (0, 1)), Chunk(HALF, (1,), (0, 1))), [(0, 1, (0,)), (1, 0, (1,))]),
        "same sources and destinations",
    ),
]


@pytest.mark.parametrize(("engine", "of_null"), [*((engine, False) for engine in ENGINES), ("loop", True)])
def test_wrong_schedules_are_refused_before_anything_runs(engine, of_null):
    """A schedule that verify rejects, or with chunks of different sources or destinations, raises before any step."""
    null = NullFramework()
    framework = null if of_null else get("numpy")
    xs = [null.zeros((4,), "float32", name) if of_null else np.ones(4, "float32") for name in names(2)]
    for schedule, text in [*REFUSED, *REFUSED]:  # a second call is refused, too
        with pytest.raises(ScheduleError, match=text):
            run_engine(engine, schedule, "sum", xs, framework)
    assert null.counts == Counts()


def layout_of(framework, xs, mixed=False, size=4, devices=None):
    """Return the arguments of ``select`` for an all-reduce of one tensor; ``mixed``: of sparse and dense arrays."""
    devices = devices or names(2)
    program = lower(planned("one_device", devices, devices))
    buffer = Buffer("float32", size, (Span(0, 0, size or 0, (size or 0,)),), 1, 0)
    lowered = LoweredBuffer(buffer, (ProgramRange(program, 0, size or 0),))
    return Layout(framework, (0,), (lowered,), program.devices, program.devices, mixed), [list(xs)]


def test_the_engine_of_a_layout():
    """NumPy arrays in host memory are reduced by the engine "host", without copies. "loop" reduces values with sparse
    and dense arrays, null arrays, arrays of unknown size, and those outside this host's memory."""
    xs, null = [np.ones(4, "float32") for _ in range(2)], NullFramework()
    for change, name in (
        ({}, "host"),
        ({"mixed": True}, "loop"),
        ({"size": None}, "loop"),
        ({"devices": ("cpu:0", "cuda:1")}, "loop"),
        ({"devices": ("cpu:0", "host1/cpu:0")}, "loop"),
    ):
        engine, operands = select(*layout_of(get("numpy"), xs, **change))
        assert engine is engine_named(name), change
        assert operands[0][0] is xs[0]
    engine, _ = select(*layout_of(null, [null.zeros((4,), "float32", device) for device in names(2)]))
    assert engine is engine_named("loop")


def test_traced_arrays_run_on_the_loop(jax_):
    """Traced arrays, which the kernels of the engine "host" cannot read, run on the engine "loop"."""
    import jax

    seen = []

    def traced(x, y):
        seen.append(select(*layout_of(get("jax"), [x, y]))[0].name)
        return x

    jax.make_jaxpr(traced)(np.ones(4, "float32"), np.ones(4, "float32"))
    assert seen == ["loop"]


def test_a_new_engine_runs_whole_calls():
    """A registered engine runs the calls that it supports, with or without ``out``, once for each dtype."""
    grads = [{"w": np.full((2, 3), float(k)), "b": np.arange(3) * k} for k in range(4)]
    with only("recording") as engine:
        engine.runs.clear()
        reduced = cr.all_reduce(grads, "mean")
        assert reduced[3]["w"].tolist() == [[1.5] * 3] * 2
        assert reduced[0]["b"].tolist() == [0.0, 1.5, 3.0]
        assert engine.runs == [(((3,),), False), (((2, 3),), False)]
        value = cr.PerReplica([np.ones(3), np.ones(3)])
        assert cr.AllReduceCrossDeviceOps("ring").reduce("sum", value, value, out=value)[1] is value[1]
        assert engine.runs[-1] == (((3,),), True)
        assert value[0].tolist() == [2.0] * 3
    cr.all_reduce(grads)
    assert len(engine.runs) == 3  # outside ``only`` the engine is not selected


@each_engine
def test_overlapping_out_is_refused_for_every_engine(engine):
    """Arrays of ``out`` that share memory are refused before any write, also if the engine does not check for them. The
    host engine's kernel finds them itself."""
    block = np.zeros(4)
    with only(engine):
        value, out = cr.PerReplica([np.ones(3), np.ones(3)]), cr.PerReplica([block[:3], block[1:]])
        with pytest.raises(cr.ArgumentError, match="arrays that share memory"):
            cr.AllReduceCrossDeviceOps("ring").reduce("sum", value, value, out=out)
    with pytest.raises(OverlapError) as caught:
        run_engine("host", all_reduce("ring", 2), "sum", [np.ones(3), np.ones(3)], out=list(out))
    assert (caught.value.tensor, caught.value.result) in ((0, 0), (0, 1))
    assert block.tolist() == [0.0] * 4


@examples(200)
@given(
    named, requests(most_packs=3), st.sampled_from([("sum", "float16"), ("mean", "int32"), ("max", "float32")]), sizes
)
def test_fresh_parts_belong_to_one_destination(algorithm, ask, pair, size):
    """A part of a result that "loop" marks as fresh shares no memory with inputs or other results' fresh parts."""
    op, dtype = pair
    xs = [np.ones(size, dtype) for _ in ask.sources]
    results = run(plan(algorithm, ask), op, xs, size)
    fresh = [(number, part) for number, (parts, is_fresh) in enumerate(results) if is_fresh for part in parts]
    for number, part in fresh:
        assert not any(np.shares_memory(part, x) for x in xs)
        assert not any(np.shares_memory(part, other) for k, other in fresh if k != number)


@pytest.mark.parametrize("algorithm", ["one_device", "hierarchical_copy"])
def test_arrays_of_unknown_size_are_not_cut(algorithm):
    """Without a size, the engine "loop" reduces whole arrays of any shape by a schedule of one chunk, and refuses
    schedules of several, since it cannot cut the arrays."""
    for shape in ((), (2, 3), (0,)):
        xs = [np.full(shape, 6.0**k) for k in range(5)]
        for parts, _ in run(PLANNERS[algorithm](names(5)), "sum", xs, None):
            (part,) = parts
            oracle.check(part, "sum", xs)
    with pytest.raises(ScheduleError, match=r"unknown size need a schedule of one chunk[\s\S]*all_reduce by ring, 3"):
        run(PLANNERS["ring"](names(3)), "sum", [np.ones(3)] * 3, None)


def test_the_loop_runs_a_frameworks_own_operations():
    """The engine "loop" copies and adds by calls of the framework, which the null framework counts."""
    null = NullFramework()
    run_on(null, all_reduce("one_device", 3), "sum", [null.zeros((5,), "float32", d) for d in names(3)], 5, "float32")
    assert null.counts.copies == 4  # two arrays to the root, and the result back
    assert null.counts.additions == 2 * 5  # of two arrays of 5 elements


def test_the_loop_adds_the_parts_of_complex_numbers_separately(framework):
    """NaN or infinity in the real part of a complex number leaves the imaginary part of a sum or mean finite."""
    for special in (np.nan, np.inf):
        xs = [np.complex64([complex(special, 2), 4 + 4j]), np.complex64([1 + 2j, 4 + 4j])]
        for op, imaginary in (("sum", 4), ("mean", 2)):
            outputs = run_on(get(framework.name), all_reduce("one_device", 2), op, framework.arrays(xs), 2, "complex64")
            for (part,), _ in outputs:
                first, second = framework.to_numpy(part)
                assert str(first.real) == str(special)
                assert first.imag == imaginary
                assert second == complex(2 * imaginary, 2 * imaginary)


def test_the_loop_propagates_nan_and_inf_in_every_framework(framework):
    """In the engine "loop", the operations of every framework propagate NaN and treat infinities as arithmetic does."""
    schedule = all_reduce("direct", 3)
    for op, special in product(REDUCTIONS, SPECIALS):
        xs = with_specials("float32", 3, special)
        with np.errstate(invalid="ignore"):
            outputs = run_on(get(framework.name), schedule, op, framework.arrays(xs), 5, "float32")
        for parts, _ in outputs:
            oracle.check(np.concatenate([framework.to_numpy(part) for part in parts]), op, xs)
