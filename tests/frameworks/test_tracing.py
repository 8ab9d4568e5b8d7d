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


def traced(framework, function):
    """Return the function as one that the framework traces."""
    return framework.jax.jit(function) if framework.name == "jax" else framework.tf.function(function)


@pytest.fixture(scope="session", params=TRACING)
def tracing(request):
    """Return a framework that traces functions: JAX or TensorFlow."""
    return request.getfixturevalue(f"{request.param}_")


@pytest.mark.parametrize(("ops", "tracing"), each(OPS, TRACING), indirect=["tracing"])
def test_traced_equals_eager(tracing, ops):
    """A traced reduction gives the right result, with the same bits on all replicas. With JAX, they are the eager bits.

    TensorFlow's graph optimizer may reorder additions on one device, so that the bits differ from the eager ones.
    """
    ops, rng = OPS[ops], np.random.default_rng(0)
    xs = [rng.normal(size=(3, 2)).astype("float32") for _ in range(5)]
    given = [tracing.array(x) for x in xs]
    value = cr.PerReplica([tracing.array(x, k) for k, x in enumerate(xs)], cpus(*range(5)))

    def both(*arrays):
        replicas = cr.PerReplica(arrays)
        return [list(ops.reduce(op, replicas, replicas)) for op in ("sum", "mean")]

    function = traced(tracing, both)
    for op, ys in zip(("sum", "mean"), function(*given), strict=True):
        assert len(ys) == 5
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
def test_traced_batches_trees_and_slices(tracing, ops):
    """A function with a batch to several destinations, trees, slices, a broadcast and a gather can be traced."""
    ops, array, number = OPS[ops], tracing.array, tracing.to_numpy
    xs, ns = digits(3, (4,)), small("float32", (), 3)
    rows = [np.array([[1.0, 2.0]], "float32"), np.array([[3.0, 4.0], [5.0, 6.0]], "float32")]
    indices = [np.array([1]), np.array([1, 3])]

    def function(arrays, scalars, rows, indices, full):
        a, s = cr.PerReplica(arrays), cr.PerReplica(scalars)
        batch = ops.batch_reduce("sum", [(a, a), (a, "cpu:0"), (a, on(3, 1, 0, 2)), (s, "cpu:0")])
        trees = cr.all_reduce([{"x": x, "y": [y]} for x, y in zip(arrays, scalars, strict=True)], cross_device_ops=ops)
        parts = [cr.IndexedSlices(v, i, (5, 2)) for v, i in zip(rows, indices, strict=True)]
        slices = ops.reduce("mean", cr.PerReplica(parts), "cpu:0")[0]
        dense = ops.reduce("sum", cr.PerReplica([parts[1], full]), "cpu:0")[0]
        copies, joined = ops.broadcast(arrays[1], a), ops.gather(a, "cpu:0", 0)
        return list(map(list, batch)), trees, list(copies), joined[0], slices.values, slices.indices, dense

    given = ([array(x) for x in each] for each in (xs, ns, rows, indices))
    made = traced(tracing, function)(*given, array(np.ones((5, 2), "float32")))
    (*batch, scalar), trees, copies, joined, values, where, dense = made
    total = np.sum(xs, axis=0).tolist()
    assert [[number(y).tolist() for y in ys] for ys in batch] == [[total] * 3, [total], [total] * 4]
    assert number(scalar[0]) == np.sum(ns)
    assert [(number(t["x"]).tolist(), number(t["y"][0])) for t in trees] == [(total, np.sum(ns))] * 3
    assert [number(y).tolist() for y in copies] == [xs[1].tolist()] * 3
    assert number(joined).tolist() == np.concatenate(xs).tolist()
    # The example of TensorFlow's documentation: slices of row 1, and of rows 1 and 3; the mean divides the values.
    assert number(values).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert number(where).tolist() == [1, 1, 3]
    assert number(dense).tolist() == [[1, 1], [4, 5], [1, 1], [6, 7], [1, 1]]


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
    """In a tf.function, all results have every contribution, with one device per replica and if XLA compiles it."""
    xs = digits(5, (3,))

    @tensorflow_.tf.function(jit_compile=compiled)
    def function(*arrays):
        value = cr.PerReplica(arrays, None if compiled else cpus(*range(5)))
        return [list(ops.reduce("sum", value, value)) for ops in (OPS["unpacked"], OPS["ring"])]

    arrays = [tensorflow_.array(x) for x in xs] if compiled else tensorflow_.arrays(xs)
    for ys in function(*arrays):
        assert [tensorflow_.to_numpy(y).tolist() for y in ys] == [np.sum(xs, axis=0).tolist()] * 5


def test_shapes_that_differ(tracing, tensorflow_):
    """Known shapes are checked during tracing, with the message of eager calls. Others are checked at run time."""
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype"):
        traced(tracing, lambda *xs: cr.all_reduce(list(xs)))(*(tracing.array(np.zeros(n)) for n in (2, 3)))
    tf, spec = tensorflow_.tf, tensorflow_.tf.TensorSpec

    @tf.function(input_signature=[spec([None]), spec([None]), spec([3]), spec([2])])
    def batch(a0, b0, a1, b1):
        pairs = [(cr.PerReplica([a0, a1]), "cpu:0"), (cr.PerReplica([b0, b1]), "cpu:0")]
        return [r[0] for r in cr.HierarchicalCopyAllReduce().batch_reduce("sum", pairs)]

    right = batch([1.0, 2.0, 3.0], [10.0, 20.0], [100.0] * 3, [1000.0] * 2)
    assert [x.numpy().tolist() for x in right] == [[101, 102, 103], [1010, 1020]]
    words = r"tensor (a0 \[2\]|b0 \[3\]) is not compatible with expected shape"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        batch([1.0, 2.0], [10.0, 20.0, 30.0], [100.0] * 3, [1000.0] * 2)
    greatest = tf.function(lambda a, b: cr.all_reduce([a, b], "max")[0], input_signature=[spec([None])] * 2)
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
