"""The host engine: the kernels make of a batch where it lies what the loop makes of its schedules, bit for bit."""

import contextlib
import functools
import gc
import itertools
import subprocess
import sys
import threading
from collections import Counter
from unittest import mock

import numpy as np
import oracle
import pytest
import strategies
from expect import result_dtype
from frameworks import DTYPES, np_dtype
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce import (
    Chunk,
    PerReplica,
    PlanError,
    ReduceOp,
    Schedule,
    ScheduleError,
    Step,
    kernels,
    pipeline,
)
from crossreduce.engines.host import HostPlan, Part, Piece, host_plan, program, run_on_host
from crossreduce.engines.loop import execute
from crossreduce.frameworks import framework_of, get
from crossreduce.frameworks.null import NullFramework
from crossreduce.packing import Buffer, Span
from crossreduce.planning import planned, planned_for
from crossreduce.values import Mirrored, TensorSpec

OPS = cr.AllReduceCrossDeviceOps()
LARGE = kernels.KEPT_BYTES  # from here on every framework's results lie in the kernels' memory


def destinations(names):
    return PerReplica([0] * len(names), names)


@contextlib.contextmanager
def ways():
    """Note how groups are reduced: ``"host"`` for each run of the kernels, ``"loop"`` for each buffer in the loop."""
    taken = []

    def noting(way, function):
        def noted(*args, **kwargs):
            taken.append(way)
            return function(*args, **kwargs)

        return noted

    with (
        mock.patch.object(pipeline, "run_on_host", noting("host", run_on_host)),
        mock.patch.object(pipeline, "_run_loop", noting("loop", pipeline._run_loop)),
    ):
        yield taken


# ---- The law: kernels, loop and reference agree -------------------------------------------------------------------


@contextlib.contextmanager
def by_the_loop():
    """NumPy's arrays are reduced by the loop, along the schedules that the kernels' plans are made of."""
    with mock.patch.object(type(get("numpy")), "readable", return_value=None):
        yield


@contextlib.contextmanager
def by_the_kernels(name):
    """Plans are made anew, for the kernels of one name."""
    pipeline._host_plan.cache_clear()
    with mock.patch.object(kernels, "instruction_set", return_value=name):
        yield
    pipeline._host_plan.cache_clear()


def equal(a, b, op):
    """Say whether results are the same: bits, with two exceptions.

    0 and -0 are equal, so either is the least of both: the kernels keep the first, and NumPy keeps it for halves and
    returns the second of wider floats, as the processor's own minimum does. And where NumPy multiplies complex numbers
    it fuses a product and a sum into one rounding; the kernels round each product, as frameworks without do.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if op == "product" and a.dtype.kind == "c":
        return True  # `check_law` asks the oracle
    return a.tobytes() == b.tobytes() or (op in ("min", "max") and (a == b).all())


@st.composite
def batches(draw, most=9, rows=4):
    """Draw an op and a batch: arrays, where they are, and where their results go; rows often go the same way."""
    op = draw(strategies.ops)
    asks = draw(st.lists(strategies.requests(st.integers(1, most), most_packs=4), min_size=1, max_size=2))
    batch = []
    for _ in range(draw(st.integers(1, rows))):
        ask = draw(st.sampled_from(asks))
        dtype = draw(strategies.dtypes.filter(lambda dtype: op in strategies.ops_for(dtype)))
        xs = draw(strategies.arrays(dtype, draw(strategies.shapes), len(ask.sources)))
        if xs[0].dtype.kind in "fc" or dtype == "bfloat16":
            rng = np.random.default_rng(draw(st.integers(0, 99)))
            xs = [np.where(rng.random(x.shape) < 0.2, x * 0, x).astype(x.dtype) for x in xs]  # zeros of both signs
        batch.append((xs, ask))
    return op, batch


def check_law(op, batch, ops, options):
    """Kernels, the same in NumPy, and the loop give the same; written over the inputs too."""
    values = [PerReplica(xs, ask.sources) for xs, ask in batch]
    pairs = [(value, destinations(ask.destinations)) for value, (_, ask) in zip(values, batch, strict=True)]
    try:
        with by_the_loop(), ways() as taken:
            looped = ops.batch_reduce(op, pairs, options)
    except PlanError:
        assume(False)  # not every algorithm has a way on every topology
    assert {*taken} == {"loop"}
    with ways() as taken:
        found = ops.batch_reduce(op, pairs, options)
    assert {*taken} == {"host"}
    with by_the_kernels("numpy"):
        reference = ops.batch_reduce(op, pairs, options)
    for (xs, _), result, other, third in zip(batch, found, looped, reference, strict=True):
        for y, loop, numpy in zip(result, other, third, strict=True):
            assert equal(y, loop, op)
            assert y.tobytes() == numpy.tobytes()
            if op == "product" and y.dtype.kind == "c":
                oracle.check(y, op, xs)


@settings(max_examples=120)
@given(batch=batches(), packing=strategies.packings(), algorithm=st.one_of(strategies.algorithms, st.just("auto")))
def test_kernels_give_the_bits_of_the_loop(batch, packing, algorithm):
    """Any batch, algorithm and packing: the bits that walking the schedules step by step gives, and the reference."""
    ops = cr.AllReduceCrossDeviceOps(algorithm, packing.num_packs, packing.small_bytes, packing.small_group)
    check_law(*batch, ops, cr.CommunicationOptions(packing.bytes_per_pack))


@settings(max_examples=25)
@given(
    data=st.data(), packing=strategies.packings(most_packs=4), algorithm=st.one_of(strategies.named, st.just("auto"))
)
def test_kernels_give_the_bits_of_the_loop_on_topologies(data, packing, algorithm):
    """The same where the schedules follow a machine's links."""
    op, batch = data.draw(batches(most=4, rows=3))
    names = tuple(dict.fromkeys(d for _, ask in batch for d in (*ask.sources, *ask.destinations)))
    ops = cr.AllReduceCrossDeviceOps(algorithm, packing.num_packs, topology=data.draw(strategies.wired(names)))
    check_law(op, batch, ops, cr.CommunicationOptions(packing.bytes_per_pack))


@pytest.mark.parametrize("algorithm", strategies.NAMED)
@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("mean", "float16"), ("product", "complex64")])
def test_17_devices(algorithm, op, dtype):
    """More devices than the kernels hold in registers at a time."""
    n = 5 if algorithm == "forest" else 17
    rng = np.random.default_rng(17)
    rows = []
    for shape in ((1000,), (3, 5), (), (0,), (2, 4097)):
        xs = [np.asarray(rng.normal(size=shape) * 2.0**k).astype(dtype) for k in range(-n // 2, n // 2 + 1)][:n]
        rows.append((xs, strategies.Ask(*[strategies.names(n)] * 3, 0, 0)))
    check_law(op, rows, cr.AllReduceCrossDeviceOps(algorithm, num_packs=3), None)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_numbers_that_are_none(op, dtype):
    """Infinities, NaN and subnormals come out where the loop has them; not a number is not a number in both."""
    if op not in strategies.ops_for(dtype):
        return
    few = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-40, -3e-39, 6e-8], "float64")
    with np.errstate(all="ignore"):
        columns = [
            np.array(column).astype(oracle.dtype_of(dtype))
            for column in zip(*itertools.product(few, repeat=3), strict=True)
        ]
    value = PerReplica(columns)
    with by_the_loop():
        looped = cr.AllReduceCrossDeviceOps("ring").reduce(op, value, value)[1]
    found = cr.AllReduceCrossDeviceOps("ring").reduce(op, value, value)[1]
    wide = "complex128" if dtype == "complex64" else "float64"
    np.testing.assert_array_equal(found.astype(wide), looped.astype(wide))


# ---- Programs -----------------------------------------------------------------------------------------------------


def combined(values):
    """Combine from the left; what comes out says in which order, as nested pairs."""
    return functools.reduce(lambda a, b: (a, b), values)


def of_schedule(schedule, chunk):
    """Return what the destinations hold in the end, step by step in the listed order."""
    _, sources, to = schedule.chunks[chunk]
    cells = {source: k for k, source in enumerate(sources)}
    for step in itertools.chain.from_iterable(schedule.rounds):
        if step.chunk == chunk:
            cells[step.dst] = combined([cells[src] for src in step.srcs])
    return [cells[dst] for dst in to]


def of_program(made):
    """Return a program's results; KeyError for a slot that is read before it is written."""
    slots = {}
    for slot, *operands in made.folds:
        assert len(operands) > 1, "a copy"
        assert ~slot not in operands[1:], "overwrites what it has still to read"
        slots[slot] = combined([slots[~x] if x < 0 else x for x in operands])
    return [slots[~x] if x < 0 else x for x in made.results]


def pairs_in(values):
    """Return how many different combinations values are made of, each counted once."""
    seen, left = {}, list(values)
    while left:
        value = left.pop()
        if isinstance(value, tuple) and id(value) not in seen:
            seen[id(value)] = value
            left.extend(value)
    return len(seen)


def check_program(schedule, chunk):
    """A chunk's program is its steps in their order, and no more than what its results are made of."""
    made, wanted = program(schedule, chunk), of_schedule(schedule, chunk)
    assert of_program(made) == wanted
    assert sum(len(operands) - 1 for _, *operands in made.folds) == pairs_in(wanted), "a step that serves nothing"
    # Which fold's value each operand is.
    holder, values = {}, []
    for number, (slot, *operands) in enumerate(made.folds):
        values.append([holder[~x] if x < 0 else None for x in operands])
        holder[slot] = number
    last = [holder[~x] for x in made.results if x < 0]
    reads = Counter([*last, *(x for row in values for x in row if x is not None)])
    assert all(reads[number] for number in range(len(values))), "a value that nothing reads"
    assert all(row[0] is None or reads[row[0]] > 1 for row in values), "a chain in two folds"
    # No more slots than values that are needed at a time.
    until = {x: number for number, row in enumerate(values) for x in row if x is not None} | dict.fromkeys(
        last, len(values)
    )
    most = 0
    for number, row in enumerate(values):
        alive = [x for x in range(number) if until[x] >= number]
        reused = row[0] is not None and until[row[0]] == number and row.count(row[0]) == 1
        most = max(most, len(alive) + (not reused))
    assert made.slots <= most
    assert all(slot < made.slots for slot, *_ in made.folds)


@settings(max_examples=150)
@given(ask=strategies.requests(), algorithm=strategies.algorithms)
def test_a_program_is_its_steps(ask, algorithm):
    """Every planned chunk: copies are gone, and what is left is combined in the schedule's own order."""
    schedule = planned(algorithm, ask.sources, ask.destinations, ask.packs, ask.first)
    for chunk in range(len(schedule.chunks)):
        check_program(schedule, chunk)


@settings(max_examples=40)
@given(ask=strategies.requests(st.integers(1, 4), most_packs=3), data=st.data(), algorithm=strategies.named)
def test_a_program_on_a_topology_is_its_steps(ask, data, algorithm):
    """Trees of every shape, whose values wait for each other."""
    topology = data.draw(strategies.wired(ask.devices))
    try:
        schedule = planned_for(topology, algorithm, ask.sources, ask.destinations, 1 << 20, ask.packs)
    except PlanError:
        assume(False)  # not every algorithm has a way on every topology
    for chunk in range(len(schedule.chunks)):
        check_program(schedule, chunk)


@st.composite
def wasteful(draw):
    """Draw a schedule of one chunk that verifies: several destinations, each of which may hold the sources in
    another order of combination; devices that forward; steps that serve nothing."""
    n, copies, scratch = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    steps = [Step(0, u * n + s, (s,)) for u in range(1, copies) for s in range(n)]
    whole = []
    for u in range(copies):
        held = [u * n + s for s in range(n)]
        while len(held) > 1:
            chosen = draw(st.permutations(held))[: draw(st.integers(2, 3))]
            unused = [d for d in range(u * n, u * n + n) if d not in held]
            dst = draw(st.sampled_from([*chosen, *unused]))
            steps.append(Step(0, dst, tuple(chosen)))
            held = [d for d in held if d not in chosen] + [dst]
        whole += held
    for src, dst in itertools.permutations(whole, 2):
        if draw(st.integers(0, 4)) == 0:
            steps.append(Step(0, dst, (src,)))
    devices = strategies.names(n * copies + scratch)
    for dst in range(n * copies, len(devices)):  # on which nothing depends
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, len(steps)))
            holding = [*range(n), *(step.dst for step in steps[:at])]
            srcs = draw(st.lists(st.sampled_from(holding), min_size=1, max_size=3, unique=True))
            steps.insert(at, Step(0, dst, tuple(srcs)))
    chunk = Chunk(
        1, tuple(draw(st.permutations(range(n)))), tuple(draw(st.permutations(whole))[: draw(st.integers(1, 3))])
    )
    rounds = [(step,) for step in steps]
    schedule = Schedule("all_reduce", "drawn", devices, (chunk,), tuple(rounds))
    for at in range(len(rounds) - 1, 0, -1):
        if draw(st.booleans()):
            joined = [*rounds[: at - 1], rounds[at - 1] + rounds[at], *rounds[at + 1 :]]
            other = Schedule("all_reduce", "drawn", devices, (chunk,), tuple(joined))
            with contextlib.suppress(ScheduleError):
                cr.verify(other)
                rounds, schedule = joined, other
    return schedule


@st.composite
def sharing(draw):
    """Draw a schedule of one chunk that verifies, whose destinations are made of some of the same values."""
    n, scratch, ends = draw(st.integers(2, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    held = {s: frozenset([s]) for s in range(n)}  # None: some source twice
    steps = []

    def step(dst, srcs):
        parts = [held[src] for src in srcs]
        whole = None if None in parts else frozenset().union(*parts)
        held[dst] = whole if whole and len(whole) == sum(map(len, parts)) else None
        steps.append(Step(0, dst, tuple(srcs)))

    for _ in range(draw(st.integers(0, 10))):
        known = st.sampled_from(sorted(held))
        srcs = draw(st.lists(known, min_size=1, max_size=3, unique=True))
        step(draw(st.integers(n, n + scratch - 1)), srcs)
    for end in range(n + scratch, n + scratch + ends):
        srcs, missing = [], set(range(n))
        for device in (*draw(st.permutations([d for d in held if d >= n])), *range(n)):
            if held[device] and held[device] <= missing:
                srcs.append(device)
                missing -= held[device]
        step(end, draw(st.permutations(srcs)))
    devices = strategies.names(n + scratch + ends)
    chunk = Chunk(1, tuple(range(n)), tuple(range(n + scratch, n + scratch + ends)))
    return Schedule("reduce", "drawn", devices, (chunk,), tuple((one,) for one in steps))


def check_schedule(schedule, op, dtype):
    """Kernels and loop agree on a schedule of one chunk, destination by destination."""
    check_program(schedule, 0)
    _, sources, to = schedule.chunks[0]
    rng = np.random.default_rng(3)
    xs = [(rng.normal(size=37) * 2.0**k).astype(dtype) for k in range(len(sources))]
    backend, op = get("numpy"), ReduceOp(op)
    numbers = backend.numbers(op, dtype, len(xs))
    held = execute(schedule, backend, op, xs, 37, numbers)
    piece = Piece((Part(schedule, 0, 37),), Buffer(dtype, 37, (Span(0, 0, 37, (37,)),), 1, 0))
    outs = [np.empty(37, dtype) for _ in to]
    assert run_on_host(host_plan((piece,), op, numbers), [xs], [outs], None) is None
    assert [out.tobytes() for out in outs] == [own.parts[0].tobytes() for own in held]


ANY_SCHEDULE = st.one_of(wasteful(), sharing())
SOME_OPS, SOME_DTYPES = st.sampled_from(["sum", "mean", "product"]), st.sampled_from(["float32", "float16"])


@pytest.mark.parametrize("name", [kernels.instruction_set(), "numpy"])
@settings(max_examples=200)
@given(schedule=ANY_SCHEDULE, op=SOME_OPS, dtype=SOME_DTYPES)
def test_any_schedule_that_verifies(name, schedule, op, dtype):
    """Steps that serve nothing leave nothing behind, and destinations whose values were combined in another order
    keep each its own bits."""
    with by_the_kernels(name):
        check_schedule(schedule, op, dtype)


def test_destinations_may_differ():
    """Two devices that each add for themselves, in their own order, make two results; a copy is no third one."""
    mine, yours, copied = Step(0, 3, (0, 1, 2)), Step(0, 4, (2, 1, 0)), Step(0, 5, (4,))
    chunk = Chunk(1, (0, 1, 2), (3, 4, 5))
    schedule = Schedule("reduce", "by hand", strategies.names(6), (chunk,), ((mine, yours), (copied,)))
    assert program(schedule, 0) == kernels.Program(2, ((0, 0, 1, 2), (1, 2, 1, 0)), (-1, -2, -2))


# ---- Plans of whole buffers ---------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """Draw what ``pipeline.groups`` lays out and plans."""
    ask = draw(strategies.requests(st.integers(1, 9), most_packs=1))
    dtypes = draw(st.sampled_from([["float32"], ["float32", "int8"], ["float16", "float64", "bool"]]))
    some = st.builds(TensorSpec, strategies.shapes, st.sampled_from(dtypes))
    specs = tuple(draw(st.lists(some, min_size=1, max_size=12)))
    return draw(strategies.algorithms), ask.sources, ask.destinations, specs, draw(strategies.packings())


@settings(max_examples=150)
@given(layouts())
def test_segments_cover_each_element_once(asked):
    """Any packing: each element of each tensor is in one segment, whose program is that of the chunk it lies in."""
    algorithm, sources, to, specs, packing = asked
    found = pipeline.groups(get("numpy"), algorithm, sources, to, specs, packing, None, None)
    assert sorted(tensor for group in found for tensor in group.tensors) == list(range(len(specs)))
    for group in found:
        assert group.on_host
        assert group.shapes == [specs[tensor].shape for tensor in group.tensors]
        dtype = specs[group.tensors[0]].dtype
        assert {specs[tensor].dtype for tensor in group.tensors} == {dtype}
        with mock.patch.object(kernels, "plan", lambda *args: args):
            given = host_plan(group.pieces, ReduceOp.MAX, get("numpy").numbers(ReduceOp.MAX, dtype, len(sources))).plan
        _, _, count, results, sizes, programs, segments = given
        assert (count, results) == (len(sources), len(to))
        assert sizes == tuple(int(np.prod(shape)) for shape in group.shapes)
        assert len(set(programs)) == len(programs)
        made = [[None] * size for size in sizes]
        for tensor, start, stop, number in segments:
            assert start < stop
            assert made[tensor][start:stop] == [None] * (stop - start)
            made[tensor][start:stop] = [number] * (stop - start)
        tensors = iter(made)
        for parts, buffer in group.pieces:
            flat = list(itertools.chain.from_iterable(next(tensors) for _ in buffer.spans))
            due = []
            for schedule, low, high in parts:
                assert low == len(due)
                spans = enumerate(schedule.spans(high - low))
                due += [programs.index(program(schedule, c)) for c, (start, stop) in spans for _ in range(start, stop)]
            assert flat == due
        for a, b in itertools.pairwise(segments):
            assert (a.tensor, a.stop, a.program) != (b.tensor, b.start, b.program), "one segment in two"


def test_a_batch_is_one_run():
    """However many tensors and buffers, the kernels are called once for each dtype and way."""
    values = [PerReplica([np.full(k % 7, 1.0) for _ in range(4)]) for k in range(160)]
    ops = cr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=0)
    with ways() as taken:
        results = ops.batch_reduce("sum", [(value, value) for value in values])
    assert taken == ["host"]
    assert all(y.tolist() == [4.0] * (k % 7) for k, result in enumerate(results) for y in result)
    mixed = [PerReplica([np.full(3, 1, dtype) for _ in range(2)]) for dtype in ("int8", "float32", "int8", "bool")]
    with ways() as taken:
        ops.batch_reduce("max", [(value, value) for value in mixed])
    assert taken == ["host"] * 3
    with ways() as taken:
        ops.batch_reduce("sum", [(value, "cpu:1" if k % 2 else value) for k, value in enumerate(values)])
    assert taken == ["host"] * 2


class Counting:
    """A plan that notes how it is run."""

    def run(self, sources, results, threads, streaming, apart):
        return threads, streaming, apart


@pytest.mark.parametrize(
    ("threaded", "limit", "wanted"), [(True, None, 6), (True, 4, 4), (True, 64, 6), (False, None, 1), (False, 4, 1)]
)
def test_threads_are_as_many_as_both_allow(monkeypatch, threaded, limit, wanted):
    """The framework's own limit holds as the environment's does; little work gets one thread."""
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "6")
    assert run_on_host(HostPlan(Counting(), threaded, True), [], [], limit) == (wanted, True, False)


def test_much_work_is_threaded_and_goes_past_the_cache(torch_):
    """A mebibyte read and written wakes threads, four written go past the cache; torch's limit is asked for."""

    def planned_for(size, n, op="sum", dtype="float32"):
        numbers = get("numpy").numbers(ReduceOp(op), dtype, n)
        schedule = planned("direct", strategies.names(n), strategies.names(n), 1, 0)
        piece = Piece((Part(schedule, 0, size),), Buffer(dtype, size, (Span(0, 0, size, (size,)),), 1, 0))
        return host_plan((piece,), ReduceOp(op), numbers)[1:]

    assert planned_for(kernels.THREADED_BYTES // 16, 2) == (True, False)
    assert planned_for(kernels.THREADED_BYTES // 16 - 1, 2) == (False, False)
    assert planned_for(kernels.STREAMING_BYTES // 8, 2) == (True, True)
    assert planned_for(kernels.STREAMING_BYTES // 8 - 1, 2) == (True, False)
    assert planned_for(kernels.STREAMING_BYTES // 16, 2, "mean", "int8") == (True, True)
    backend = get("torch")
    assert backend.threads() == torch_.torch.get_num_threads()
    assert get("numpy").threads() is None


# ---- Where arrays lie ---------------------------------------------------------------------------------------------


def address(framework, x):
    """Return where an array lies."""
    if framework.name == "numpy":
        return x.ctypes.data
    if framework.name == "torch":
        return x.data_ptr()
    if framework.name == "jax":
        return x.unsafe_buffer_pointer()
    if x.dtype == framework.tf.bfloat16:  # no buffer can name it
        x = framework.tf.bitcast(x, framework.tf.uint16)
    return np.asarray(memoryview(x)).ctypes.data


def pointed(item):
    """Return the address that the kernels read or write in place of an array."""
    if isinstance(item, int):
        return item
    return item[0] if isinstance(item, tuple) else np.asarray(memoryview(item)).ctypes.data


@contextlib.contextmanager
def blocks():
    """Note the addresses of the memory that the kernels hand out for results, from the first byte to the last."""
    taken, memory = [], kernels.memory

    def noted(nbytes):
        block = memory(nbytes)
        start = np.frombuffer(block, np.uint8).ctypes.data if nbytes else 0
        taken.append(range(start, start + nbytes))
        return block

    with mock.patch.object(kernels, "memory", noted):
        yield taken


def live(framework):
    """Return the bytes of results in use. JAX lets go of what it adopted when it is called next."""
    framework.array(np.zeros(1))
    return kernels.usage()["live"]


def put(framework, xs):
    return PerReplica(framework.arrays(xs), strategies.names(len(xs)))


def test_inputs_are_read_where_they_lie(framework):
    """What the kernels are given points to the arrays' own elements: nothing is copied on the way in."""
    for dtype in DTYPES:
        xs = [np.ones(shape, np_dtype(dtype)) for shape in ((5,), (2, 3), (), (1000,))]
        arrays = [framework.array(x, k % 2) for k, x in enumerate(xs)]
        backend = framework_of(arrays[0])
        given = backend.readable([[backend.array(x)] for x in arrays])
        assert [pointed(item) for (item,) in given] == [address(framework, x) for x in arrays], dtype


def test_results_adopt_the_kernels_memory(framework):
    """A large result is the memory that the kernels wrote, and gives it back when it is dropped.

    Where nobody can write into results, all devices' are one.
    """
    gc.collect()
    before = live(framework)
    for dtype in DTYPES:
        size = LARGE // np_dtype(dtype).itemsize
        op = "max" if dtype == "bool" else "product"
        value = put(framework, [np.ones((size, 1), np_dtype(dtype)) for _ in range(3)])
        with blocks() as taken:
            result = OPS.reduce(op, value, value)
        assert len(taken) == (3 if framework.mutable else 1)
        places = [address(framework, y) for y in result]
        assert all(at in block and at + LARGE - 1 in block for at, block in zip(places, itertools.cycle(taken))), dtype
        assert LARGE <= len(taken[0]) < LARGE + 64
        assert live(framework) - before == len(taken) * len(taken[0])
        last = result[2]
        del result
        assert live(framework) - before == len(taken[0])
        del last
        assert live(framework) == before


def test_results_outlive_everything_else(framework):
    """A result keeps its memory while it lives, whatever else was dropped and reduced since."""
    gc.collect()
    before = live(framework)
    held = {}
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (3, 0), (1,), (65, 5), (LARGE + 3,)]):
        op, due = ("max", 1) if dtype == "bool" else ("sum", 6)
        value = put(framework, [np.full(shape, k, np_dtype(dtype)) for k in (1, 2, 3)])
        held[dtype, shape] = OPS.reduce(op, value, value)[1], due
        value = put(framework, [np.full(shape, 0, np_dtype(dtype))] * 3)
        OPS.reduce("product", value, value)  # into the memory that was freed
    del value
    gc.collect()
    for (dtype, shape), (y, due) in held.items():
        found = framework.to_numpy(y)
        assert found.shape == shape
        assert found.dtype == np_dtype(dtype)
        assert (found == due).all(), (dtype, shape)
    del y, found
    held.clear()
    assert live(framework) == before


def test_small_results_are_the_frameworks_own(framework):
    """Where arrays can be made empty, results that are not kept for reuse come from the framework's own allocator."""
    value = put(framework, [np.ones(LARGE // 4 - 1, "float32")] * 2)
    with blocks() as taken:
        OPS.reduce("sum", value, value)
    assert len(taken) == (0 if framework.mutable else 1)


# ---- Arrays that lie otherwise ------------------------------------------------------------------------------------


def check_result(framework, op, arrays, ops=OPS):
    """A reduction of arrays is that of the same numbers in C order, made by the kernels."""
    xs = [np.array(framework.to_numpy(x), order="C") for x in arrays]
    xs = [x.astype(x.dtype.newbyteorder("=")) for x in xs]
    value = PerReplica(arrays, strategies.names(len(arrays)))
    with ways() as taken:
        result = ops.reduce(op, value, value)
    assert taken == ["host"]
    for y in result:
        oracle.check(framework.to_numpy(y), op, xs, result=result_dtype(framework, op, xs[0].dtype.name))


def numpy_layouts(x):
    yield "transposed", np.ascontiguousarray(x.T).T
    yield "sliced", np.repeat(x, 2, 1)[:, ::2]
    yield "reversed", x[::-1, ::-1]
    yield "repeated", np.broadcast_to(x[:1], x.shape)
    yield "moved", np.moveaxis(np.ascontiguousarray(np.moveaxis(x.reshape(3, 2, 5), 0, 2)), 2, 0).reshape(3, 2, 5)
    yield "foreign", x.astype(x.dtype.newbyteorder(">"))
    yield "foreign and reversed", x.astype(x.dtype.newbyteorder(">"))[::-1]
    yield "unaligned", np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    yield "64 axes", x.reshape((1,) * 62 + x.shape).swapaxes(0, 63)
    yield "nothing", x[:0].T
    scalar = np.zeros(3, x.dtype)
    scalar[1] = x[0, 0]
    yield "no axes", scalar[1:2].reshape(())
    locked = x.copy()
    locked.flags.writeable = False
    yield "read-only", locked


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_numpy_arrays_of_any_layout(numpy_, dtype, op):
    """Strides of any sign, none, foreign bytes, unaligned, read-only: read as they are."""
    x = (np.arange(30).reshape(3, 10) - 11).astype(np_dtype(dtype))
    for name, array in numpy_layouts(x):
        if "foreign" in name and dtype == "bfloat16":
            continue  # ml_dtypes has none
        check_result(numpy_, op, [array, array])
        check_result(numpy_, op, [np.ones(array.shape, array.dtype), array, array])
    transposed = np.ascontiguousarray(x.T).T
    given = get("numpy").readable([[transposed, x[::-1]]])[0]
    assert [pointed(item) for item in given] == [transposed.ctypes.data, x[::-1].ctypes.data]


def torch_layouts(torch, x):
    yield "transposed", x.t().contiguous().t()
    yield "sliced", x.repeat_interleave(2, 1)[:, ::2]
    yield "flipped", x.flip(0)
    yield "expanded", x[:1].expand(x.shape)
    yield "one number", x[0, 0].expand(x.shape)
    yield "channels last", x.reshape(1, 3, 2, 5).contiguous(memory_format=torch.channels_last)
    yield "offset", torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape)
    yield "nothing", x[:0].t()
    yield "no axes", x[1, 1]
    yield "windows", x.reshape(-1).as_strided((4, 6), (2, 1))
    yield "parameter", torch.nn.Parameter(x.t().contiguous().t(), requires_grad=x.is_floating_point())
    if x.is_complex():
        yield "conjugated", x.conj()
        yield "conjugated and transposed", x.mH
    yield "negated", torch._neg_view(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_torch_tensors_of_any_layout(torch_, dtype, op):
    """Strides, memory formats, lazy conjugates and negatives, parameters: reduced as the numbers they stand for."""
    torch = torch_.torch
    x = torch_.array((np.arange(30).reshape(3, 10) - 11).astype(np_dtype(dtype)))
    for name, tensor in torch_layouts(torch, x):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        check_torch(torch_, op, [tensor, plain], name)
        check_torch(torch_, op, [plain, tensor, tensor], name)
    for name in ("transposed", "channels last", "expanded"):
        tensor = dict(torch_layouts(torch, x))[name]
        assert pointed(get("torch").readable([[tensor]])[0][0]) == tensor.data_ptr()


def check_torch(torch_, op, tensors, name):
    xs = [torch_.to_numpy(x.detach().resolve_conj().resolve_neg().contiguous()) for x in tensors]
    value = PerReplica(tensors)
    with ways() as taken:
        result = OPS.reduce(op, value, value)
    assert taken == ["host"], name
    for y in result:
        assert y.is_contiguous()
        assert not y.requires_grad
        oracle.check(torch_.to_numpy(y), op, xs, result=result_dtype(torch_, op, xs[0].dtype.name))


def test_jax_arrays_of_another_layout(jax_):
    """An array that lies transposed on its device is read with its strides."""
    jax = jax_.jax
    from jax.experimental.layout import Format, Layout

    x = np.arange(12.0).reshape(3, 4)
    place = jax.sharding.SingleDeviceSharding(jax_.devices[0])
    array = jax.device_put(x, Format(Layout((1, 0)), place))
    check_result(jax_, "sum", [array, jax_.array(x, 1)])
    check_result(jax_, "sum", [array, array, array])


# ---- JAX: deleted, donated ----------------------------------------------------------------------------------------


def test_inputs_may_be_deleted(jax_):
    """A result does not need its inputs any more, nor one component another."""
    value = put(jax_, [np.full(LARGE, k, "float32") for k in (1, 2, 3)])
    result = OPS.reduce("sum", value, value)
    for x in value:
        x.delete()
    result[0].delete()
    assert (jax_.to_numpy(result[1]) == 6).all()
    assert (jax_.to_numpy(result[2]) == 6).all()


@pytest.mark.parametrize("size", [5, LARGE])
def test_a_result_may_be_donated(jax_, size):
    """What overwrites a donated result changes no other, nor what is reduced afterwards."""
    value = put(jax_, [np.full(size, k, "float32") for k in (1, 2, 3)])
    result = OPS.reduce("sum", value, value)
    donated = jax_.jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(result[0])
    again = OPS.reduce("mean", value, value)
    assert (jax_.to_numpy(donated) == 13).all()
    assert all((jax_.to_numpy(y) == 6).all() for y in result.values[1:])
    assert all((jax_.to_numpy(y) == 2).all() for y in again)
    assert all((jax_.to_numpy(x) == k + 1).all() for k, x in enumerate(value))


def test_a_donated_input(jax_):
    """An input that is donated after the call takes nothing from the results."""
    value = put(jax_, [np.full(LARGE, k, "float32") for k in (1, 2)])
    result = OPS.reduce("sum", value, value)
    assert (jax_.to_numpy(jax_.jax.jit(lambda x: x - 9, donate_argnums=0)(value[0])) == -8).all()
    assert all((jax_.to_numpy(y) == 3).all() for y in result)


def test_arrays_that_are_still_computed(jax_):
    """The kernels wait until an array is there."""
    jnp = jax_.jax.numpy
    late = jax_.jax.jit(lambda x: jnp.linalg.matrix_power(x, 9))
    x = jax_.array(np.eye(300, dtype="float32") * 2)
    value = PerReplica([late(x), late(x)], strategies.names(2))
    assert (jax_.to_numpy(OPS.reduce("sum", value, value)[0]) == np.eye(300) * 1024).all()


# ---- Where the loop must do it ------------------------------------------------------------------------------------


def looped(function, *args):
    """Return what a function returns, which must reduce by the loop."""
    with ways() as taken:
        found = function(*args)
    assert taken
    assert set(taken) == {"loop"}
    return found


def test_a_gradient_tape_watches(tensorflow_):
    """Under a tape, gradients flow through a reduction; where recording stops, the kernels work."""
    tf = tensorflow_.tf
    x, y = tensorflow_.array(np.arange(3.0), 0), tensorflow_.array(np.ones(3), 1)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        total = tf.reduce_sum(looped(cr.all_reduce, [x, y])[0] ** 2)
        with tape.stop_recording(), ways() as taken:
            assert cr.all_reduce([x, y])[1].numpy().tolist() == [1, 2, 3]
        assert taken == ["host"]
    assert [g.numpy().tolist() for g in tape.gradient(total, [x, y])] == [[2, 4, 6]] * 2


def test_a_forward_accumulator_watches(tensorflow_):
    """Forward-mode derivatives flow too."""
    tf = tensorflow_.tf
    x, y = tensorflow_.array(np.arange(3.0), 0), tensorflow_.array(np.ones(3), 1)
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, 2.0, 3.0], tf.float64)) as watching:
        mean = looped(lambda: cr.all_reduce([x, y], "mean"))[1]
    assert watching.jvp(mean).numpy().tolist() == [0.5, 1, 1.5]


def test_tf_functions_and_what_they_call(tensorflow_):
    """A graph is made by the loop; Python that runs inside of one is eager."""
    tf = tensorflow_.tf
    x = tensorflow_.array(np.arange(3.0))
    assert looped(lambda: tf.function(lambda a: cr.all_reduce([a, a])[0])(x)).numpy().tolist() == [0, 2, 4]
    with ways() as taken:
        assert tf.py_function(lambda a: cr.all_reduce([a, a])[0], [x], tf.float64).numpy().tolist() == [0, 2, 4]
    assert taken == ["host"]


def test_scopes_and_variables_of_tf(tensorflow_):
    """Results are where their devices are, whatever scope the caller is in; a variable is read."""
    tf = tensorflow_.tf
    with tf.device("/CPU:4"):
        variable = tf.Variable([1.0, 2.0])
        value = PerReplica([variable, tensorflow_.array(np.ones(2, "float32"), 2)])
        with ways() as taken:
            result = OPS.reduce("sum", value, value)
    assert taken == ["host"]
    assert result.devices == ("cpu:4", "cpu:2")
    assert [tensorflow_.device_of(y) for y in result] == ["cpu:4", "cpu:2"]
    variable.assign([9.0, 9.0])
    assert [y.numpy().tolist() for y in result] == [[2, 3]] * 2


def test_jax_transformations(jax_):
    """jit, grad, jvp and vmap trace the loop, and see through it."""
    jax, jnp = jax_.jax, jax_.jax.numpy
    x = jnp.arange(3.0)
    assert looped(lambda: jax.jit(lambda a, b: cr.all_reduce([a, b])[0])(x, x)).tolist() == [0, 2, 4]
    assert looped(lambda: jax.grad(lambda a: cr.all_reduce([a, 2 * a])[0].sum())(x)).tolist() == [3, 3, 3]
    assert looped(lambda: jax.jvp(lambda a: cr.all_reduce([a, a])[0], (x,), (x,)))[1].tolist() == [0, 2, 4]
    stacked = jnp.stack([x, x + 1])
    assert looped(lambda: jax.vmap(lambda a: cr.all_reduce([a, a])[0])(stacked)).tolist() == [[0, 2, 4], [2, 4, 6]]
    with jax.disable_jit(), ways() as taken:
        assert cr.all_reduce([x, x])[0].tolist() == [0, 2, 4]
    assert taken == ["host"]


def test_torch_transformations_and_modes(torch_):
    """vmap's tensors, and modes that see every operation, go through the loop; a mode of functions does not matter."""
    torch = torch_.torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Passing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.arange(3.0)
    stacked = torch.stack([x, x + 1])
    assert looped(lambda: torch.func.vmap(lambda a: cr.all_reduce([a, a])[0])(stacked)).tolist() == [
        [0, 2, 4],
        [2, 4, 6],
    ]
    with Watching():
        assert looped(lambda: cr.all_reduce([x, x]))[0].tolist() == [0, 2, 4]
    assert "aten.add.Tensor" in seen
    with FakeTensorMode() as mode:
        fakes = looped(lambda: cr.all_reduce([mode.from_tensor(x), mode.from_tensor(x)]))
    assert all(isinstance(y, FakeTensor) and y.shape == x.shape for y in fakes)
    with Passing(), torch.device("meta"), ways() as taken:
        found = cr.all_reduce([torch.ones(LARGE, device="cpu")] * 2)
    assert taken == ["host"]
    assert all(y.device.type == "cpu" and (y == 2).all() for y in found)


NO_MEMORY = """
import sys
import torch
import crossreduce as cr
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    fake = torch.ones(3)
ones = torch.ones(3)
if sys.argv[1] == "zero":
    print([x.tolist() for x in cr.all_reduce([torch._efficientzerotensor((3,)), ones])])
else:
    print([tuple(x.shape) for x in cr.all_reduce([fake, fake])])
"""


@pytest.mark.parametrize(("kind", "wanted"), [("zero", [[1.0] * 3] * 2), ("fake", [(3,)] * 2)])
def test_tensors_without_memory(kind, wanted):
    """A tensor of zeros that were never written, or one that stands for others, is reduced by the loop."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_MEMORY, kind], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, str(wanted)), ran.stderr


def test_devices_that_are_not_host_memory():
    """Only where all devices of all schedules are this host's memory do the kernels see a batch."""
    null = NullFramework()

    def on_host(sources, to, root=None):
        specs = (TensorSpec((5,), "float32"), TensorSpec((2, 3), "float32"))
        (group,) = pipeline.groups(null, "one_device", sources, to, specs, cr.packing.Packing(1), None, root)
        return group.on_host

    assert on_host(("cpu:0", "cpu:3"), ("cpu:3",), "cpu:7")
    for other in ("cuda:0", "host1/cpu:0", "tpu:0", "mps:0"):
        assert not on_host(("cpu:0", other), ("cpu:0",))
        assert not on_host(("cpu:0", "cpu:1"), ("cpu:0", other))
        assert not on_host(("cpu:0", "cpu:1"), ("cpu:0",), other)
    value = PerReplica([null.zeros((5,), "float32", name) for name in ("cpu:0", "cuda:0")])
    assert [y.device for y in looped(lambda: OPS.reduce("sum", value, value))] == ["cpu:0", "cuda:0"]
    assert null.counts.additions == 5
    value = PerReplica([null.zeros((5,), "float32", name) for name in ("cpu:0", "cpu:1")])
    assert looped(lambda: OPS.reduce("sum", value, value)).devices == ("cpu:0", "cpu:1")


def test_values_that_were_partly_sparse(framework):
    """Slices are added into dense arrays first, perhaps in a wider dtype, and the loop takes those."""
    for kind in framework.kinds:
        slices = framework.sparse(kind, np.full((2, 3), 2, "float16"), np.array([0, 2]), (4, 3))
        value = PerReplica([slices, framework.array(np.ones((4, 3), "float16"), 1)], strategies.names(2))
        whole = looped(lambda value=value: OPS.reduce("sum", value, value))
        for y in whole:
            assert framework.to_numpy(y).tolist() == [[3.0] * 3, [1.0] * 3, [3.0] * 3, [1.0] * 3]
            assert framework.to_numpy(y).dtype == "float16"


# ---- Threads ------------------------------------------------------------------------------------------------------


def test_results_do_not_depend_on_the_callers_mode(torch_):
    """A thread that flushes subnormals to zero gets the same results, and keeps its mode."""
    torch = torch_.torch
    tiny = torch.tensor([1e-40, -3e-39, 1e-38, 2.0**-149])
    wanted = [(2 * x).item() for x in tiny.double()]
    for size in (4, 1 << 19):  # one thread, and several
        x = tiny.repeat(size // 4)
        out = [torch.ones(size), torch.ones(size)]
        torch.set_flush_denormal(True)
        try:
            found = cr.all_reduce([x, x])
            cr.all_reduce([x, x], out=out)
            halves = cr.all_reduce([torch.full((size,), 2.0**-24, dtype=torch.float16)] * 2)
            flushed = (torch.tensor([1e-40]) + torch.tensor([1e-40])).view(torch.int32).item()
        finally:
            torch.set_flush_denormal(False)
        assert flushed == 0
        for y in (*found, *out):
            assert [z.item() for z in y[-4:].double()] == pytest.approx(wanted, rel=2.0**-10)
            assert (y.view(torch.int32) == y[:4].view(torch.int32).repeat(size // 4)).all()
        assert all((y.double() == 2.0**-23).all() for y in halves)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    """However many threads share the work, each element is made by one of them, in one order."""
    rng = np.random.default_rng(5)
    values = [
        PerReplica([(rng.normal(size=size) * 2.0 ** rng.integers(-9, 9, size)).astype(dtype) for _ in range(5)])
        for size, dtype in ((300_001, "float32"), (70_000, "float16"), (3, "float64"), (123_457, "complex64"))
    ]
    bits = set()
    for count in ("1", "2", "5"):
        monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", count)
        results = cr.AllReduceCrossDeviceOps("ring", num_packs=3).batch_reduce("mean", [(v, v) for v in values])
        bits.add(b"".join(y.tobytes() for result in results for y in result))
    assert len(bits) == 1


def test_many_threads_at_once(framework):
    """Threads that reduce different values through one op do not see each other's."""
    ops, failures = cr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=2), []
    start = threading.Barrier(8)

    def work(number):
        try:
            start.wait()
            for k in range(6):
                size = (5, 1000, 50_000)[k % 3]
                xs = [np.full(size, 100 * number + 10 * k + replica, "float32") for replica in range(4)]
                value = put(framework, xs)
                for y in ops.reduce("sum", value, value):
                    assert (framework.to_numpy(y) == sum(x[0] for x in xs)).all()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_what_is_given_back_is_mirrored(framework):
    """Results are plain arrays in a Mirrored, of each destination's own unless nobody can write them."""
    value = put(framework, [np.ones(3, "float32"), np.ones(3, "float32")])
    result = OPS.reduce("sum", value, destinations(strategies.names(4)))
    assert type(result) is Mirrored
    assert len({address(framework, y) for y in result}) == (4 if framework.mutable else 1)
    assert [framework.to_numpy(y).tolist() for y in result] == [[2.0] * 3] * 4
