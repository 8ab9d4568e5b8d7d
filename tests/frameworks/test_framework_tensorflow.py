"""The TensorFlow framework: devices, tf.function, XLA, gradients, variables, sparse tensors."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
from frameworks import NAMES, load

import crossreduce as cr
from crossreduce.frameworks import get

if "tensorflow" not in NAMES:
    pytest.skip("tensorflow is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
tf = load("tensorflow").tf  # sets up logical devices, once for all tests

ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "auto")
OPS = ("sum", "mean", "min", "max", "product")
DTYPES = (
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16,
    tf.uint32, tf.uint64, tf.complex64, tf.complex128, tf.bool,
)  # fmt: skip
SHAPES = ((), (0,), (3, 2))
HIERARCHICAL = cr.HierarchicalCopyAllReduce()


def on(k: int, x: object, dtype: object = None) -> tf.Tensor:
    with tf.device(f"CPU:{k}"):
        return tf.identity(tf.constant(x, dtype))


def place(x: tf.Tensor) -> str:
    """Return this library's name of an eager tensor's device."""
    return x.device.replace("/job:localhost/replica:0/task:0/device:CPU:", "cpu:")


def defined(op: str, dtype: tf.DType) -> bool:
    if dtype is tf.bool:
        return op in ("min", "max", "product")
    return not (dtype.is_complex and op in ("min", "max"))


def oracle(op: str, xs: list[tf.Tensor]) -> np.ndarray:
    """Reduce element by element in Python's own numbers, which are exact for the tests' small integers."""
    dtype = xs[0].dtype.as_numpy_dtype
    combine = {"sum": operator.add, "mean": operator.add, "min": min, "max": max, "product": operator.mul}[op]
    columns = zip(*(x.numpy().reshape(-1).tolist() for x in xs), strict=True)
    found = [functools.reduce(combine, column) for column in columns]
    if op == "mean":
        narrow = xs[0].dtype in (tf.int8, tf.int16, tf.uint8, tf.uint16)
        result = np.float32 if narrow else np.float64 if xs[0].dtype.is_integer else dtype
        return np.array([x / len(xs) for x in found]).astype(result).reshape(xs[0].shape)
    if xs[0].dtype.is_integer:
        found = [x % (1 << 64) for x in found]  # the cast below keeps the low bits, so it wraps around
        return np.array(found, np.uint64).astype(dtype).reshape(xs[0].shape)
    return np.array(found).astype(dtype).reshape(xs[0].shape)


def random(k: int, shape: tuple[int, ...], dtype: tf.DType, rng: np.random.Generator) -> tf.Tensor:
    return on(k, rng.integers(0, 4, shape).astype(dtype.as_numpy_dtype))


def same(x: tf.Tensor, want: np.ndarray) -> bool:
    return x.dtype.as_numpy_dtype == want.dtype and x.shape == want.shape and np.array_equal(x.numpy(), want)


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_op_dtype_and_shape(algorithm: str, n: int) -> None:
    """Every op over every dtype gives what Python's numbers give, on each replica's device."""
    rng = np.random.default_rng(n)
    for packs, op in enumerate(OPS):
        ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=(packs + n) % 4)
        dtypes = [dtype for dtype in DTYPES if defined(op, dtype)]
        batch = [[random(k, shape, dtype, rng) for k in range(n)] for dtype in dtypes for shape in SHAPES]
        values = [cr.PerReplica(xs) for xs in batch]
        for xs, result in zip(batch, ops.batch_reduce(op, [(value, value) for value in values]), strict=True):
            want = oracle(op, xs)
            for k, x in enumerate(result):
                assert same(x, want), (op, xs[0].dtype, x, want)
                assert place(x) == f"cpu:{k}"


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_contribution_counts_once(algorithm: str, n: int) -> None:
    """In a sum of different powers of n + 1, every lost or doubled contribution is visible."""
    value = cr.PerReplica([on(k, [(n + 1) ** k] * 5, tf.int64) for k in range(n)])
    for x in cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value):
        assert x.numpy().tolist() == [sum((n + 1) ** k for k in range(n))] * 5


@pytest.mark.parametrize("n", [2, 9, 10, 12])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
def test_the_order_of_additions(n: int, dtype: tf.DType) -> None:
    """ReductionToOneDevice adds any number of replicas in their order, from left to right."""
    rng = np.random.default_rng(n)
    xs = [rng.standard_normal(1000).astype(dtype.as_numpy_dtype) * np.float16(10.0 ** (k % 3)) for k in range(n)]
    want = functools.reduce(operator.add, [x.astype(np.float32) for x in xs]).astype(dtype.as_numpy_dtype)
    value = cr.PerReplica([on(k, x) for k, x in enumerate(xs)])
    assert same(cr.ReductionToOneDevice().reduce("sum", value, "cpu:0")[0], want)


@pytest.mark.parametrize("packs", [0, 2])
def test_results_are_on_their_destinations(packs: int) -> None:
    """Results are on their destinations, also inside the scope of another device."""
    pairs = []
    for shape in ((2, 2), (5,), ()):
        value = cr.PerReplica([on(k, np.ones(shape, np.float16)) for k in range(4)])
        pairs += [(value, value), (value, cr.PerReplica([0, 0], ["cpu:6", "cpu:2"])), (value, "/CPU:7")]
    with tf.device("CPU:5"):
        for op in ("mean", "max"):
            for ops in (cr.AllReduceCrossDeviceOps("direct", packs), cr.ReductionToOneDevice("cpu:8")):
                for (_, destinations), result in zip(pairs, ops.batch_reduce(op, pairs), strict=True):
                    devices = ("cpu:7",) if isinstance(destinations, str) else destinations.devices
                    assert result.devices == devices
                    assert tuple(place(x) for x in result) == devices
        assert tuple(place(x) for x in HIERARCHICAL.broadcast(tf.ones([2, 2]), pairs[1][1])) == ("cpu:6", "cpu:2")
        value = pairs[0][0]
        assert place(HIERARCHICAL.gather(value, "cpu:3", 1)[0]) == "cpu:3"


def test_components_are_moved_to_the_devices_of_the_value() -> None:
    """If a value names devices, its components are moved there first."""
    xs = [on(9, [float(k)]) for k in range(3)]
    assert cr.PerReplica(xs).devices == ("cpu:9", "cpu:9#1", "cpu:9#2")
    here = HIERARCHICAL.reduce("sum", cr.PerReplica(xs), cr.PerReplica(xs))
    assert [place(x) for x in here] == ["cpu:9"] * 3
    value = cr.PerReplica(xs, devices=["cpu:1", "cpu:2", "cpu:3#4"])
    there = HIERARCHICAL.reduce("sum", value, value)
    assert [place(x) for x in there] == ["cpu:1", "cpu:2", "cpu:3"]
    assert [x.numpy().tolist() for x in (*here, *there)] == [[3.0]] * 6


@pytest.mark.parametrize("name", ["cpu:99", "GPU:7", "host1/cpu:0", "cpu:99#1"])
def test_devices_that_do_not_exist(name: str) -> None:
    """A device that TensorFlow does not have is rejected, and the message explains how to get more devices."""
    with pytest.raises(cr.DeviceError, match=r"(?s)no such logical device.*set_logical_device_configuration"):
        HIERARCHICAL.reduce("sum", tf.ones(2), name)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_nan_wins(op: str, dtype: tf.DType) -> None:
    """A NaN in any replica makes the same element of the minimum and the maximum NaN, and no other element."""
    for lost in range(4):
        rows = np.ones((4, 33), np.float32) * np.arange(4)[:, None]
        rows[lost, 5] = np.nan
        value = cr.PerReplica([on(k, row.astype(dtype.as_numpy_dtype)) for k, row in enumerate(rows)])
        for x in HIERARCHICAL.reduce(op, value, value):
            assert np.isnan(x.numpy().astype(np.float32)).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types_round_once(dtype: tf.DType) -> None:
    """Half types accumulate in float32: a mean cannot overflow, and small terms are not lost."""
    high = tf.constant([40000.0], dtype)
    value = cr.PerReplica([high, high])
    assert HIERARCHICAL.reduce("mean", value, value)[1].numpy() == high.numpy()
    value = cr.PerReplica([on(k, [x], dtype) for k, x in enumerate((2048.0, 1.0, 1.0, 1.0, 1.0))])
    want = np.array([2052.0]).astype(dtype.as_numpy_dtype)
    for algorithm in ALGORITHMS:
        assert same(cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value)[0], want)


def test_mean_of_equal_integers_is_exact() -> None:
    """The mean of n equal integers is that integer: the sum is divided by n, and int8 does not wrap around."""
    framework = get("tensorflow")
    for n in range(1, 100):
        numbers = framework.numbers(cr.ReduceOp.MEAN, "int64", n)
        assert framework.finish(tf.constant([n * 7], tf.int64), numbers).numpy().tolist() == [7.0]
    value = cr.PerReplica([on(k, [100, -128], tf.int8) for k in range(3)])
    assert same(HIERARCHICAL.reduce("mean", value, value)[2], np.array([100, -128], np.float32))
    traced = tf.function(reducing("mean", HIERARCHICAL, 49, []), autograph=False)
    assert [float(x) for x in traced(*[tf.constant(1)] * 49)[0]] == [1.0] * 49  # 49 * (1 / 49) is not 1


def test_infinity_in_one_part_of_a_complex_mean() -> None:
    """In the mean of complex numbers, an infinite real part does not change the imaginary part."""
    value = cr.PerReplica([on(0, [complex(np.inf, 1)]), on(1, [2 + 2j])])
    result = HIERARCHICAL.reduce("mean", value, value)[1].numpy()
    assert (result.real.tolist(), result.imag.tolist()) == ([np.inf], [1.5])


def test_a_tree_of_variables_tensors_and_slices() -> None:
    """Variables are read on their devices, and one tree may contain tensors, variables and sparse leaves."""
    trees = []
    for k in range(3):
        with tf.device(f"CPU:{k}"):
            trees.append(
                {
                    "variable": tf.Variable([1.0, float(k)]),
                    "slices": tf.IndexedSlices(tf.ones([1, 2]) * k, tf.constant([k]), tf.constant([4, 2])),
                    "ours": cr.IndexedSlices(tf.ones([1, 2]), tf.constant([k], tf.int64), (4, 2)),
                    "either": tf.ones([4])
                    if k
                    else tf.IndexedSlices(tf.ones([2]), tf.constant([3, 3]), tf.constant([4])),
                    "number": tf.constant(k),
                }
            )
    with tf.device("CPU:8"):
        results = cr.all_reduce(trees)
    for k, tree in enumerate(results):
        assert tree["variable"].numpy().tolist() == [3.0, 3.0]
        assert isinstance(tree["slices"], tf.IndexedSlices)
        assert tree["slices"].indices.numpy().tolist() == [0, 1, 2]
        assert tree["slices"].dense_shape.numpy().tolist() == [4, 2]
        assert isinstance(tree["ours"], cr.IndexedSlices)
        assert tree["ours"].indices.numpy().tolist() == [0, 1, 2]
        assert tree["either"].numpy().tolist() == [2.0, 2.0, 2.0, 4.0]
        assert tree["number"].numpy() == 3
        slices = tree["slices"]
        arrays = (tree["variable"], slices.values, slices.indices, slices.dense_shape, tree["either"], tree["number"])
        assert {place(x) for x in (*arrays, tree["ours"].values)} == {f"cpu:{k}"}
    assert [tree["variable"].numpy().tolist() for tree in trees] == [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]


def test_a_result_is_independent_of_a_variable() -> None:
    """A result that was computed from a variable does not change when the variable is assigned later."""
    variable = tf.Variable([1.0, 2.0])
    copies = HIERARCHICAL.broadcast(variable, cr.PerReplica([0, 0]))
    alone = HIERARCHICAL.reduce("sum", variable, variable)
    variable.assign_add([5.0, 5.0])
    variable.scatter_nd_add([[0]], [1.0])
    assert [x.numpy().tolist() for x in (*copies, *alone)] == [[1.0, 2.0]] * 3


def test_slices_are_concatenated() -> None:
    """Slices are concatenated in the order of the replicas, equal indices stay apart, and index dtypes may differ."""
    a = tf.IndexedSlices(on(0, [[1.0, 2.0]]), on(0, [1]), on(0, [5, 2]))
    b = tf.IndexedSlices(on(1, [[3.0, 4.0], [5.0, 6.0]]), on(1, [1, 3], tf.int64), on(1, [5, 2]))
    value = cr.PerReplica([a, b])
    assert value.devices == ("cpu:0", "cpu:1")
    for k, x in enumerate(HIERARCHICAL.reduce("mean", value, value)):
        assert x.indices.numpy().tolist() == [1, 1, 3]
        assert x.indices.dtype is tf.int64
        assert x.values.numpy().tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
        assert tf.convert_to_tensor(x).numpy()[1].tolist() == [2.0, 3.0]
        assert {place(part) for part in (x.values, x.indices, x.dense_shape)} == {f"cpu:{k}"}
    bare = tf.IndexedSlices(tf.constant([1, 2]), tf.constant([0, 0]))
    result = HIERARCHICAL.reduce("mean", bare, bare)[0]
    assert result.dense_shape is None
    assert same(result.values, np.array([1.0, 2.0]))


@pytest.mark.parametrize("index", [-1, 4])
def test_indices_beyond_the_shape(index: int) -> None:
    """An index outside the dense shape raises an error when slices are made dense; the slice is not dropped."""
    value = cr.PerReplica(
        [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([index]), tf.constant([4, 2])), tf.ones([4, 2])]
    )
    with pytest.raises(cr.ArgumentError, match=rf"(?s)outside its dense shape.*from {index} to {index}"):
        HIERARCHICAL.reduce("sum", value, value)


UNSUPPORTED = {
    "SparseTensor": (lambda: tf.sparse.from_dense([1.0, 0.0]), r"tf\.sparse\.to_dense"),
    "RaggedTensor": (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]), "to_tensor"),
    "string": (lambda: tf.constant(["a"]), "dtype string"),
    "resource": (lambda: tf.Variable([1.0]).handle, "dtype resource"),
    "variant": (lambda: tf.raw_ops.EmptyTensorList(element_shape=[1], max_num_elements=1, element_dtype=tf.int32),
                "dtype variant"),
    "quantized": (lambda: tf.quantization.quantize([1.0], 0, 1, tf.qint8).output, "dtype qint8"),
    "slices of strings": (lambda: tf.IndexedSlices(tf.constant(["a"]), tf.constant([0])), "dtype string"),
    "dataset": (lambda: tf.data.Dataset.range(3), "cannot be reduced"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_kinds_that_cannot_be_reduced(kind: str) -> None:
    """Sparse and ragged tensors, unsupported dtypes and datasets raise an UnsupportedError, in reduce and broadcast."""
    make, text = UNSUPPORTED[kind]
    value = cr.PerReplica([make()], ["cpu:0"])
    for call in (HIERARCHICAL.reduce, lambda _, x, there: HIERARCHICAL.broadcast(x[0], there)):
        with pytest.raises(cr.UnsupportedError, match=text):
            call("sum", value, "cpu:0")


def reducing(op: str, ops: cr.CrossDeviceOps, n: int, seen: list[object]) -> object:
    def reduce(*xs: tf.Tensor) -> list[tf.Tensor]:
        seen.append([x.shape for x in xs])
        pairs = [(cr.PerReplica(xs[k : k + n]), cr.PerReplica(xs[k : k + n])) for k in range(0, len(xs), n)]
        return [list(result) for result in ops.batch_reduce(op, pairs)]

    return reduce


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_inside_a_function(algorithm: str, compiled: bool) -> None:
    """A reduction traces under tf.function, also with XLA, with the same results; it is traced once per shape."""
    rng = np.random.default_rng(0)
    for op in ("sum", "mean", "max"):
        for dtype in (tf.float16, tf.float32, tf.int8):
            seen: list[object] = []
            reduce = reducing(op, cr.AllReduceCrossDeviceOps(algorithm, num_packs=2), 3, seen)
            traced = tf.function(reduce, jit_compile=compiled, autograph=False)
            for size in (5, 5, 2):
                xs = [random(k % 3, shape, dtype, rng) for shape in ((size, 2), (size,)) for k in range(3)]
                for k, result in enumerate(traced(*xs)):
                    want = oracle(op, xs[3 * k : 3 * k + 3])
                    # XLA multiplies by 1/3 and does not divide by 3: an error of one ulp of numbers below 4.
                    slack = 2.0 ** (-9 if dtype is tf.float16 else -22) if compiled and op == "mean" else 0.0
                    for x in result:
                        assert x.dtype == want.dtype
                        assert x.shape == want.shape
                        off = np.abs(x.numpy().astype(np.float64) - want)
                        assert off.max() <= slack, (op, dtype, x, want)
            assert len(seen) == 2


@pytest.mark.parametrize("op", OPS)
def test_unknown_sizes(op: str) -> None:
    """Sizes may be unknown while tracing: one trace serves all sizes, and known sizes stay known."""
    for algorithm in ALGORITHMS:
        for packs in (0, 1, 2):
            seen: list[object] = []
            reduce = reducing(op, cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs), 3, seen)
            spec = [tf.TensorSpec([None, 2], tf.int32)] * 3 + [tf.TensorSpec([4], tf.float32)] * 3
            traced = tf.function(reduce, input_signature=spec, autograph=False)
            rng = np.random.default_rng(1)
            for rows in (1, 4, 0):
                xs = [random(0, (rows, 2), tf.int32, rng) for _ in range(3)]
                ys = [random(0, (4,), tf.float32, rng) for _ in range(3)]
                first, second = traced(*xs, *ys)
                assert all(same(x, oracle(op, xs)) for x in first)
                assert all(same(y, oracle(op, ys)) for y in second)
            assert len(seen) == 1
            assert traced.get_concrete_function().output_shapes[0][0].as_list() == [None, 2]


def test_a_size_that_is_unknown_on_one_replica() -> None:
    """A size may be known on one replica and unknown on another; if they differ at run time, it is an error."""
    spec = [tf.TensorSpec([None], tf.float32), tf.TensorSpec([3], tf.float32)]
    traced = tf.function(reducing("sum", HIERARCHICAL, 2, []), input_signature=spec, autograph=False)
    assert [x.numpy().tolist() for x in traced(tf.ones([3]), tf.ones([3]))[0]] == [[2.0] * 3] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        traced(tf.ones([2]), tf.ones([3]))


def test_unknown_rank() -> None:
    """A tensor of unknown rank is rejected while tracing, and the message names ensure_shape."""
    traced = tf.function(reducing("sum", HIERARCHICAL, 1, []), input_signature=[tf.TensorSpec(None)], autograph=False)
    with pytest.raises(cr.UnsupportedError, match=r"(?s)unknown rank.*ensure_shape"):
        traced(tf.ones([3]))


def test_named_devices_inside_a_function() -> None:
    """Inside tf.function, values with devices are reduced on these; for others, TensorFlow's placer chooses."""
    names = ["cpu:1", "cpu:2", "cpu:0"]

    @tf.function(autograph=False)
    def reduce(*xs: tf.Tensor) -> list[tf.Tensor]:
        value = cr.PerReplica(xs, names)
        named = list(HIERARCHICAL.reduce("sum", value, value))
        assert [cr.PerReplica([x]).devices[0] for x in named] == names
        with tf.device("CPU:7"):
            free = list(HIERARCHICAL.reduce("sum", cr.PerReplica(xs), cr.PerReplica(xs)))
        assert [x.device for x in free] == ["", "", ""]
        return [*named, *free]

    assert [float(x) for x in reduce(*(on(k, float(k)) for k in range(3)))] == [3.0] * 6


def test_sparse_inside_a_function() -> None:
    """Slices are reduced while tracing, too; a known dense shape is kept."""

    @tf.function(autograph=False)
    def reduce(rows: tf.Tensor, dense: tf.Tensor) -> object:
        table = tf.zeros([4, 2])
        shape = tf.shape(table)
        a = tf.IndexedSlices(rows, tf.range(tf.shape(rows)[0]), shape)
        value, mixed = cr.PerReplica([a, a]), cr.PerReplica([a, dense])
        return HIERARCHICAL.reduce("sum", value, "cpu:0")[0], HIERARCHICAL.reduce("sum", mixed, "cpu:0")[0]

    slices, dense = reduce(tf.ones([2, 2]), tf.ones([4, 2]))
    assert slices.indices.numpy().tolist() == [0, 1, 0, 1]
    assert slices.dense_shape.numpy().tolist() == [4, 2]
    assert dense.numpy().tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients(algorithm: str, traced: bool) -> None:
    """The gradient of an all-reduced sum is the all-reduced sum of the gradients; the same holds for means."""
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=2)
    weights = (1.0, 10.0, 100.0)

    def gradients(op: str, xs: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(xs)
            value = cr.PerReplica(xs)
            loss = tf.add_n([tf.reduce_sum(x) * w for x, w in zip(ops.reduce(op, value, value), weights, strict=True)])
        return tape.gradient(loss, xs)

    run = tf.function(gradients, autograph=False) if traced else gradients
    xs = [on(k, np.ones((2, 2), np.float32)) for k in range(3)]
    assert [x.numpy().tolist() for x in run("sum", xs)] == [[[111.0, 111.0]] * 2] * 3
    assert [x.numpy().tolist() for x in run("mean", xs)] == [[[37.0, 37.0]] * 2] * 3


def test_gradients_of_other_ops_and_of_half_types() -> None:
    """The gradient of a max is 1 for the largest value, else 0; of a product, the others' product; of a sum, 1."""
    xs = [on(k, x) for k, x in enumerate((2.0, 5.0, 3.0))]
    halves = [on(k, 1.0, tf.float16) for k in range(3)]
    wanted = [("max", xs, [0.0, 1.0, 0.0]), ("product", xs, [15.0, 6.0, 10.0]), ("sum", halves, [1.0] * 3)]
    for op, sources, want in wanted:
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = HIERARCHICAL.reduce(op, cr.PerReplica(sources), "cpu:0")[0]
        assert [float(g) for g in tape.gradient(y, sources)] == want


def test_variables_are_differentiable() -> None:
    """The tape records the read of a variable, so the variable has a gradient."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    with tf.GradientTape() as tape:
        y = HIERARCHICAL.reduce("mean", cr.PerReplica(variables), "cpu:0")[0]
    assert [g.numpy().tolist() for g in tape.gradient(y, variables)] == [[0.5, 0.5]] * 2


def test_keras_variables() -> None:
    """A Keras variable is read like the tf.Variable inside it."""
    keras = pytest.importorskip("keras", exc_type=ImportError)
    xs = [keras.Variable([1.0, float(k)]) for k in range(2)]
    assert cr.all_reduce(xs)[1].numpy().tolist() == [2.0, 1.0]
