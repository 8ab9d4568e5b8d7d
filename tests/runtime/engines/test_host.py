"""The host engine: for a whole batch, the kernels give the bits that the loop engine gives with the same programs."""

import contextlib
import itertools
from functools import partial
from unittest import mock

import numpy as np
import oracle
import pytest
import strategies
from budget import examples
from engine_runs import engine_runs, on_devices
from hypothesis import assume, given
from hypothesis import strategies as st
from pairs import each
from running import only

import crossreduce as cr
from crossreduce import PerReplica, PlanError, ReduceOp, kernels
from crossreduce.engines.host import HostExecutable, array_memory, kernel
from crossreduce.frameworks import get
from crossreduce.frameworks.null import NullFramework
from crossreduce.lowering import fuse
from crossreduce.packing import Packing
from crossreduce.reduction import pipeline
from crossreduce.values import TensorSpec


@contextlib.contextmanager
def on_kernels(name):
    """Compile layouts again for the named kernels, and discard them at the end."""
    pipeline._compile.cache_clear()
    with mock.patch.object(kernels, "instruction_set", return_value=name):
        yield
    pipeline._compile.cache_clear()


def equal(a, b, op):
    """Return whether two results have the same bits, except that the minimum or maximum of 0 and -0 may be either.

    The kernels return the first of both. NumPy does so for halves, but returns the second of wider floats, as the
    processor's own minimum does.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tobytes() == b.tobytes() or (op in ("min", "max") and (a == b).all())


@st.composite
def batches(draw, most=9, rows=4):
    """Draw an op and a batch: arrays and the request for them in each row. Often rows have the same request."""
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


def check_law(op, batch, packing, algorithm, topology=None):
    """Check that the compiled kernels, the reference kernels in NumPy, and the loop engine give the same results."""
    num_packs, nbytes, *small = packing
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs, *small, topology=topology)
    pairs = [(PerReplica(xs, ask.sources), on_devices(ask.destinations)) for xs, ask in batch]
    reduce = partial(ops.batch_reduce, op, pairs, cr.CommunicationOptions(nbytes))
    try:
        with only("loop"), engine_runs() as runs:
            looped = reduce()
    except PlanError:
        assume(False)  # not every algorithm has routes on every topology
    assert {*runs} == {"loop"}
    with engine_runs() as runs:
        found = reduce()
    assert {*runs} == {"host"}
    with on_kernels("numpy"):
        reference = reduce()
    for (xs, _), *results in zip(batch, found, looped, reference, strict=True):
        for y, loop, numpy in zip(*results, strict=True):
            assert equal(y, loop, op)
            assert y.tobytes() == numpy.tobytes()
            if op == "product" and y.dtype.kind == "c":
                oracle.check(y, op, xs)


@examples(120)
@given(batches(), strategies.packings(), st.one_of(strategies.algorithms, st.just("auto")))
def test_kernels_give_the_bits_of_the_loop(drawn, packing, algorithm):
    """For any batch, algorithm and packing, kernels give the bits of the loop engine and of the reference kernels."""
    check_law(*drawn, packing, algorithm)


@examples(25)
@given(st.data(), strategies.packings(most_packs=4), st.one_of(strategies.named, st.just("auto")))
def test_kernels_give_the_bits_of_the_loop_on_topologies(data, packing, algorithm):
    """On schedules that follow the links of a topology, the kernels give the bits of the loop engine, too."""
    op, batch = data.draw(batches(most=4, rows=3))
    names = tuple(dict.fromkeys(d for _, ask in batch for d in (*ask.sources, *ask.destinations)))
    check_law(op, batch, packing, algorithm, data.draw(strategies.wired(names)))


@pytest.mark.parametrize(
    ("algorithm", "pair"), each(strategies.NAMED, [("sum", "float32"), ("product", "complex64"), ("mean", "float16")])
)
def test_17_devices(algorithm, pair):
    """With 17 sources, too many for one pass, the kernels give the bits of the loop engine. "forest" gets only 5."""
    n, (op, dtype) = 5 if algorithm == "forest" else 17, pair
    rng, ask = np.random.default_rng(17), strategies.DeviceRequest(*[strategies.names(n)] * 3, 0, 0)
    scales = [2.0**k for k in range(-n // 2, n // 2 + 1)][:n]
    shapes = ((1000,), (), (2, 4097))
    rows = [([np.asarray(rng.normal(size=shape) * scale).astype(dtype) for scale in scales], ask) for shape in shapes]
    check_law(op, rows, Packing(3), algorithm)


@st.composite
def batch_layouts(draw):
    """Draw arguments of ``pipeline.layouts``: algorithm, sources, destinations, specs and packing."""
    ask = draw(strategies.requests(st.integers(1, 9), most_packs=1))
    dtypes = draw(st.sampled_from([["float32"], ["float32", "int8"], ["float16", "float64", "bool"]]))
    some = st.builds(TensorSpec, strategies.shapes, st.sampled_from(dtypes))
    specs = tuple(draw(st.lists(some, min_size=1, max_size=12)))
    return draw(strategies.algorithms), ask.sources, ask.destinations, specs, draw(strategies.packings())


@examples(150)
@given(batch_layouts())
def test_segments_cover_each_element_once(drawn):
    """For any packing, each element of each tensor is in one segment, with the program of its chunk."""
    algorithm, sources, to, specs, packing = drawn
    found = pipeline.layouts(get("numpy"), algorithm, sources, to, specs, packing, None, None)
    assert sorted(tensor for layout in found for tensor in layout.tensors) == list(range(len(specs)))
    for layout in found:
        assert layout.on_host
        assert layout.shapes == [specs[tensor].shape for tensor in layout.tensors]
        dtype = specs[layout.tensors[0]].dtype
        assert {specs[tensor].dtype for tensor in layout.tensors} == {dtype}
        numbers = get("numpy").numbers(ReduceOp.MAX, dtype, len(sources))
        with mock.patch.object(kernels, "compile_kernel", lambda *args: args):
            _, _, _, count, results, sizes, programs, segments, _ = kernel(layout, numbers, len(to))
        assert (count, results) == (len(sources), len(to))
        assert sizes == tuple(int(np.prod(shape)) for shape in layout.shapes)
        assert len(set(programs)) == len(programs)
        covered_by = [[None] * size for size in sizes]  # for each element, the number of its segment's program
        for tensor, start, stop, number in segments:
            assert start < stop
            assert covered_by[tensor][start:stop] == [None] * (stop - start)
            covered_by[tensor][start:stop] = [number] * (stop - start)
        tensors = iter(covered_by)
        for buffer, ranges in layout.buffers:
            flat = list(itertools.chain.from_iterable(next(tensors) for _ in buffer.spans))
            due = []
            for program, low, high in ranges:
                assert low == len(due)
                spans = zip(program.chunks, program.spans(high - low), strict=True)
                due += [programs.index(fuse(c, len(to))) for c, (start, stop) in spans for _ in range(start, stop)]
            assert flat == due
        for a, b in itertools.pairwise(segments):
            assert (a.tensor, a.stop, a.program) != (b.tensor, b.start, b.program), "one segment in two"


def test_a_batch_is_one_run():
    """For any number of tensors and buffers, the kernels run once for each (dtype, sources, destinations)."""
    values = [PerReplica([np.full(k % 7, 1.0) for _ in range(4)]) for k in range(160)]
    mixed = [PerReplica([np.full(3, 1, dtype) for _ in range(2)]) for dtype in ("int8", "float32", "int8", "bool")]
    ops = cr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=0)
    for op, batch, count in (
        ("sum", [(value, value) for value in values], 1),
        ("max", [(value, value) for value in mixed], 3),  # dtypes
        ("sum", [(value, "cpu:1" if k % 2 else value) for k, value in enumerate(values)], 2),  # lists of destinations
    ):
        with engine_runs() as runs:
            results = ops.batch_reduce(op, batch)
        assert runs == ["host"] * count
    assert all(y.tolist() == [4.0] * (k % 7) for k, result in enumerate(results) for y in result)


def executable(size, n, op="sum", dtype="float32"):
    """Return the executable of a direct all-reduce of one tensor."""
    numpy, names = get("numpy"), strategies.names(n)
    (layout,) = pipeline.layouts(numpy, "direct", names, names, (TensorSpec((size,), dtype),), Packing(1), None, None)
    return HostExecutable(layout, numpy.numbers(ReduceOp(op), dtype, n), False)


@pytest.mark.parametrize(
    ("size", "limit", "threads"), [(1 << 19, None, 6), (1 << 19, 4, 4), (1 << 19, 64, 6), (9, 4, 1)]
)
def test_the_number_of_threads(monkeypatch, size, limit, threads):
    """The number of threads is the lesser of the framework's ``limit`` and the environment's, 6. Small arrays get 1."""
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "6")
    made = executable(size, 2)
    made.kernel = mock.Mock()
    with mock.patch.object(array_memory("numpy"), "threads", return_value=limit):
        made.run([[np.ones(size, "float32")] * 2], None)
    assert made.kernel.run.call_args.args[2] == threads


def test_large_arrays_use_threads_and_streaming_stores(torch_):
    """Kernels use threads if they move 1 MiB, and streaming stores if they write 4 MiB. torch limits the threads."""

    def settings_of(*args):
        made = executable(*args)
        return made.threaded, made.streaming

    assert settings_of(kernels.THREADED_BYTES // 16, 2) == (True, False)
    assert settings_of(kernels.THREADED_BYTES // 16 - 1, 2) == (False, False)
    assert settings_of(kernels.STREAMING_BYTES // 8, 2) == (True, True)
    assert settings_of(kernels.STREAMING_BYTES // 8 - 1, 2) == (True, False)
    assert settings_of(kernels.STREAMING_BYTES // 16, 2, "mean", "int8") == (True, True)
    assert array_memory("torch").threads() == torch_.torch.get_num_threads()
    assert array_memory("numpy").threads() is None


def test_only_host_memory_runs_on_the_kernels():
    """The kernels run a layout only if all devices of all its programs are this host's memory."""
    null = NullFramework()

    def on_host(sources, to, root=None):
        specs = (TensorSpec((5,), "float32"), TensorSpec((2, 3), "float32"))
        (layout,) = pipeline.layouts(null, "one_device", sources, to, specs, Packing(1), None, root)
        return layout.on_host

    assert on_host(("cpu:0", "cpu:3"), ("cpu:3",), "cpu:7")
    for other in ("cuda:0", "host1/cpu:0", "tpu:0", "mps:0"):
        assert not on_host(("cpu:0", other), ("cpu:0",))
        assert not on_host(("cpu:0", "cpu:1"), ("cpu:0", other))
        assert not on_host(("cpu:0", "cpu:1"), ("cpu:0",), other)


def test_results_do_not_depend_on_threads_or_the_callers_mode(torch_, monkeypatch):
    """For a caller that flushes subnormals to zero, results and this mode do not change, with any number of threads."""
    torch = torch_.torch
    tiny = torch.tensor([1e-40, -3e-39, 1e-38, 2.0**-149])
    wanted = (2 * tiny.double()).float().view(torch.int32)
    for size, threads in ((4, 1), (1 << 19, 1), (1 << 19, 2), ((1 << 19) + 4, 5)):
        monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", str(threads))
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
        assert all((y.view(torch.int32) == wanted.repeat(size // 4)).all() for y in (*found, *out))
        assert all((y.double() == 2.0**-23).all() for y in halves)


def test_a_wrong_number_of_threads_is_refused_before_the_first_run(monkeypatch):
    """A batch of several runs writes nothing if the environment's number of threads is invalid."""
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "many")
    small, large = (PerReplica([np.ones(size, dtype)] * 2) for size, dtype in ((3, "int8"), (1 << 19, "float32")))
    outs = [PerReplica([np.zeros_like(x) for x in value]) for value in (small, large)]
    with pytest.raises(cr.ArgumentError, match="CROSSREDUCE_NUM_THREADS must be an integer"):
        cr.AllReduceCrossDeviceOps("auto").batch_reduce("sum", [(small, small), (large, large)], out=outs)
    assert not any(x.any() for out in outs for x in out)
