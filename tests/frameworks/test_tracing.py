"""jax.jit, tf.function and torch.jit: a traced call has the result of the eager one."""

import warnings

import numpy as np
import oracle
import pytest
from expect import cpus, digits, on, result_dtype, small
from pairs import each

import crossreduce as cr
from crossreduce.options import ALGORITHMS

OPS = {
    "ReductionToOneDevice": cr.ReductionToOneDevice(),
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "unpacked": cr.HierarchicalCopyAllReduce(0),
    "3 packs": cr.HierarchicalCopyAllReduce(3),
    "NcclAllReduce": cr.NcclAllReduce(),
} | {name: cr.AllReduceCrossDeviceOps(name) for name in ALGORITHMS}
FEW = ["ReductionToOneDevice", "unpacked", "3 packs", "ring", "forest"]
TRACING = ["jax", "tensorflow"]


def traced(framework, function, **options):
    return framework.jax.jit(function) if framework.name == "jax" else framework.tf.function(function, **options)


@pytest.fixture(scope="session", params=TRACING)
def tracing(request):
    """Return a framework that traces functions: JAX or TensorFlow."""
    return request.getfixturevalue(f"{request.param}_")


@pytest.mark.parametrize(("ops", "tracing"), each(OPS, TRACING), indirect=["tracing"])
def test_traced_equals_eager(tracing, ops):
    """A traced reduction has the result of the eager one, with the same bits on all replicas and in every run.

    With JAX, the bits are also those of the eager call. TensorFlow's graph optimizer may reorder additions on one
    device.
    """
    ops, rng = OPS[ops], np.random.default_rng(0)
    xs = [rng.normal(size=(3, 2)).astype("float32") for _ in range(5)]
    given = [tracing.array(x) for x in xs]
    value = cr.PerReplica([tracing.array(x, k) for k, x in enumerate(xs)], cpus(*range(5)))

    def both(*arrays):
        replicas = cr.PerReplica(arrays)
        return [list(ops.reduce(op, replicas, replicas)) for op in ("sum", "mean")]

    function = traced(tracing, both)
    for op, ys, again in zip(("sum", "mean"), function(*given), function(*given), strict=True):
        assert len(ys) == 5
        assert tracing.to_numpy(again[0]).tobytes() == tracing.to_numpy(ys[0]).tobytes()
        eager = tracing.to_numpy(ops.reduce(op, value, value)[0])
        for y in ys:
            oracle.check(tracing.to_numpy(y), op, xs)
            assert tracing.to_numpy(y).tobytes() == tracing.to_numpy(ys[0]).tobytes()
        if tracing.name == "jax":
            assert tracing.to_numpy(ys[0]).tobytes() == eager.tobytes()


def test_traced_dtypes(tracing):
    """The rules of dtypes are the same under tracing: half types are rounded once, the mean of integers is a float."""
    dtypes = ("float16", "bfloat16", "int8", "int64", "complex64", "bool")
    xs = {dtype: small(dtype, (4,), 3) for dtype in dtypes}

    def function(arrays):
        found = {}
        for dtype, row in arrays.items():
            value = cr.PerReplica(row)
            for op in ("max", "product") if dtype == "bool" else ("sum", "mean"):
                for ops in (cr.ReductionToOneDevice(), cr.HierarchicalCopyAllReduce()):
                    found.setdefault(f"{dtype} {op}", []).extend(ops.reduce(op, value, value))
        return found

    got = traced(tracing, function)({dtype: [tracing.array(x) for x in row] for dtype, row in xs.items()})
    assert len(got) == 2 * len(dtypes)
    for key, results in got.items():
        dtype, op = key.split()
        for y in results:
            oracle.check(tracing.to_numpy(y), op, xs[dtype], result=result_dtype(tracing, op, dtype))


@pytest.mark.parametrize(("ops", "tracing"), each(FEW, TRACING[::-1]), indirect=["tracing"])
def test_traced_batches_and_trees(tracing, ops):
    """A batch of several dtypes, a tree, a broadcast and a gather can be traced."""
    ops = OPS[ops]
    xs, ns = digits(3, (4,)), small("float32", (), 3)
    arrays, scalars = [tracing.array(x) for x in xs], [tracing.array(x) for x in ns]

    def function(arrays, scalars):
        a, s = cr.PerReplica(arrays), cr.PerReplica(scalars)
        first, second, third = ops.batch_reduce("sum", [(a, a), (s, "cpu:0"), (a, "cpu:0")])
        trees = cr.all_reduce([{"x": x, "y": [y]} for x, y in zip(arrays, scalars, strict=True)], cross_device_ops=ops)
        copies = ops.broadcast(arrays[1], a)
        joined = ops.gather(a, "cpu:0", 0)
        return list(first), second[0], third[0], trees, list(copies), joined[0]

    first, second, third, trees, copies, joined = traced(tracing, function)(arrays, scalars)
    total = np.sum(xs, axis=0).tolist()
    assert [tracing.to_numpy(y).tolist() for y in first] == [total] * 3
    assert tracing.to_numpy(second) == np.sum(ns)
    assert tracing.to_numpy(third).tolist() == total
    assert [tracing.to_numpy(t["x"]).tolist() for t in trees] == [total] * 3
    assert [tracing.to_numpy(t["y"][0]) for t in trees] == [np.sum(ns)] * 3
    assert [tracing.to_numpy(y).tolist() for y in copies] == [xs[1].tolist()] * 3
    assert tracing.to_numpy(joined).tolist() == np.concatenate(xs).tolist()


def test_traced_destinations(tracing):
    """Under tracing, a result may have other devices than the value, in any number and order."""
    xs = digits(3, (4,))
    every = (cr.ReductionToOneDevice("cpu:1"), cr.HierarchicalCopyAllReduce(), cr.AllReduceCrossDeviceOps("ring"))
    where = ((0, 1, 2), (2, 0), (4,), (3, 1, 0, 2))

    def function(*arrays):
        value = cr.PerReplica(arrays, cpus(0, 1, 2))
        return [list(ops.reduce("sum", value, on(*to))) for ops in every for to in where]

    for k, ys in enumerate(traced(tracing, function)(*[tracing.array(x) for x in xs])):
        assert [tracing.to_numpy(y).tolist() for y in ys] == [np.sum(xs, axis=0).tolist()] * len(where[k % 4])


def test_tracing_again(tracing):
    """Calls with the same shapes are traced once; another shape or dtype is traced again, with a correct result."""
    traces = []

    def function(*arrays):
        traces.append(1)
        value = cr.PerReplica(arrays)
        return list(cr.HierarchicalCopyAllReduce(2).reduce("mean", value, value))

    compiled = traced(tracing, function)
    for turn, (dtype, shape) in enumerate(
        [("float32", (3,))] * 3 + [("float32", (4,)), ("int32", (3,)), ("float32", (3,))]
    ):
        xs = small(dtype, shape, 3, turn)
        for y in compiled(*[tracing.array(x) for x in xs]):
            oracle.check(tracing.to_numpy(y), "mean", xs, result=result_dtype(tracing, "mean", dtype))
    assert len(traces) == 3


def test_errors_while_tracing(tracing):
    """Shapes are checked during tracing, with the same message as in an eager call."""

    def function(*arrays):
        value = cr.PerReplica(arrays)
        return list(cr.HierarchicalCopyAllReduce().reduce("sum", value, value))

    with pytest.raises(cr.MismatchError, match="differ in shape or dtype"):
        traced(tracing, function)(tracing.array(np.zeros(2)), tracing.array(np.zeros(3)))


@pytest.mark.parametrize("ops", ["3 packs", "ring"])
def test_unknown_sizes_of_tensorflow(tensorflow_, ops):
    """A tf.function whose signature leaves a size unknown is traced once and reduces arrays of any size."""
    tf, ops = tensorflow_.tf, OPS[ops]

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)] * 3)
    def function(*arrays):
        value = cr.PerReplica(arrays)
        first, second = ops.batch_reduce("mean", [(value, value), (value, "cpu:0")])
        return list(first), second[0]

    for rows in (1, 4, 0):
        xs = small("float32", (rows, 2), 3, rows)
        first, second = function(*[tensorflow_.array(x) for x in xs])
        for y in (*first, second):
            oracle.check(tensorflow_.to_numpy(y), "mean", xs)
    assert function.experimental_get_tracing_count() == 1
    assert function.get_concrete_function().output_shapes[0][0].as_list() == [None, 2]  # known sizes stay known


@pytest.mark.parametrize("compiled", [False, True])
def test_arrays_on_devices_inside_a_tf_function(tensorflow_, compiled):
    """In a tf.function, with a device for each replica or compiled by XLA, all results have every contribution."""
    xs = digits(5, (3,))

    @tensorflow_.tf.function(jit_compile=compiled)
    def function(*arrays):
        value = cr.PerReplica(arrays, None if compiled else cpus(*range(5)))
        return [list(ops.reduce("sum", value, value)) for ops in (OPS["unpacked"], OPS["ring"])]

    arrays = [tensorflow_.array(x) for x in xs] if compiled else tensorflow_.arrays(xs)
    for ys in function(*arrays):
        assert [tensorflow_.to_numpy(y).tolist() for y in ys] == [np.sum(xs, axis=0).tolist()] * 5


def test_sparse_under_tracing(tracing):
    """Under tracing, IndexedSlices are concatenated in replica order, or made dense if another replica is dense."""
    rows = [np.array([[1.0, 2.0]], "float32"), np.array([[3.0, 4.0], [5.0, 6.0]], "float32")]
    indices = [np.array([1]), np.array([1, 3])]

    def function(values, indices, full):
        parts = [cr.IndexedSlices(v, i, (5, 2)) for v, i in zip(values, indices, strict=True)]
        y = cr.HierarchicalCopyAllReduce().reduce("mean", cr.PerReplica(parts), "cpu:0")[0]
        z = cr.HierarchicalCopyAllReduce().reduce("sum", cr.PerReplica([parts[1], full]), "cpu:0")[0]
        return y.values, y.indices, z

    values, where, dense = traced(tracing, function)(
        [tracing.array(x) for x in rows], [tracing.array(i) for i in indices], tracing.array(np.ones((5, 2), "float32"))
    )
    # The example of TensorFlow's documentation: slices of row 1, and of rows 1 and 3; the mean divides the values.
    assert tracing.to_numpy(values).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert tracing.to_numpy(where).tolist() == [1, 1, 3]
    assert tracing.to_numpy(dense).tolist() == [[1, 1], [4, 5], [1, 1], [6, 7], [1, 1]]


def test_unknown_sizes_that_differ_are_errors_at_run_time(tensorflow_):
    """If tf.function leaves sizes unknown, components of different shapes raise an error when the function runs."""
    tf, spec = tensorflow_.tf, tensorflow_.tf.TensorSpec

    @tf.function(input_signature=[spec([None]), spec([None]), spec([3]), spec([2])])
    def batch(a0, b0, a1, b1):
        a, b = cr.PerReplica([a0, a1]), cr.PerReplica([b0, b1])
        return [r[0] for r in cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(a, "cpu:0"), (b, "cpu:0")])]

    right = batch([1.0, 2.0, 3.0], [10.0, 20.0], [100.0] * 3, [1000.0] * 2)
    assert [x.numpy().tolist() for x in right] == [[101, 102, 103], [1010, 1020]]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"tensor (a0 \[2\]|b0 \[3\]) is not compatible with expected shape"
    ):
        batch([1.0, 2.0], [10.0, 20.0, 30.0], [100.0] * 3, [1000.0] * 2)

    @tf.function(input_signature=[spec([None]), spec([None])])
    def greatest(a, b):
        return cr.all_reduce([a, b], "max")[0]

    assert greatest([1.0, 5.0], [3.0, 2.0]).numpy().tolist() == [3, 5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the replicas of one value differ in shape"):
        greatest([1.0, 2.0, 3.0], [7.0])


def test_torch_traces_a_reduction(torch_):
    """torch.jit.trace records a reduction as operations, not as memory that was filled during tracing."""
    torch = torch_.torch

    def total(a, b):
        value = cr.PerReplica([a, b])
        return cr.AllReduceCrossDeviceOps().reduce("sum", value, value)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(total, (torch.tensor(1.0), torch.tensor(2.0)))
    assert traced(torch.tensor(10.0), torch.tensor(10.0)).item() == 20
