"""The TensorFlow framework: devices, tf.function, XLA, gradients, variables, sparse tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow_values import on, tf

import crossreduce as cr

HIERARCHICAL = cr.HierarchicalCopyAllReduce()


def place(x: tf.Tensor) -> str:
    """Return this library's name of an eager tensor's device."""
    return x.device.replace("/job:localhost/replica:0/task:0/device:CPU:", "cpu:")


def same(x: tf.Tensor, want: np.ndarray) -> bool:
    return x.dtype.as_numpy_dtype == want.dtype and x.shape == want.shape and np.array_equal(x.numpy(), want)


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


def test_devices_that_do_not_exist() -> None:
    """A device that TensorFlow does not have is rejected, and the message explains how to get more devices."""
    for name in ("cpu:99", "GPU:7", "host1/cpu:0", "cpu:99#1"):
        with pytest.raises(cr.DeviceError, match=r"(?s)no such logical device.*set_logical_device_configuration"):
            HIERARCHICAL.reduce("sum", tf.ones(2), name)


def test_mean_of_equal_integers_is_exact() -> None:
    """The mean of n equal integers is that integer: the sum is divided by n, and int8 does not wrap around."""
    value = cr.PerReplica([on(k, [100, -128], tf.int8) for k in range(3)])
    assert same(HIERARCHICAL.reduce("mean", value, value)[2], np.array([100, -128], np.float32))
    traced = tf.function(lambda *xs: cr.all_reduce(list(xs), "mean"), autograph=False)
    assert [float(x) for x in traced(*[tf.constant(1)] * 49)] == [1.0] * 49  # 49 * (1 / 49) is not 1


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
                    "either": tf.ones([4]) if k else tf.IndexedSlices(tf.ones([2]), tf.constant([3, 3]), [4]),
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


def escaped() -> Any:
    """Return a symbolic tensor that has escaped from a tf.function."""
    seen: list[Any] = []
    tf.function(lambda x: (seen.append(x), x)[1], autograph=False)(tf.ones(3))
    return seen[0]


UNSUPPORTED = {
    "SparseTensor": (lambda: tf.sparse.from_dense([1.0, 0.0]), r"tf\.sparse\.to_dense"),
    "RaggedTensor": (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]), "to_tensor"),
    "string": (lambda: tf.constant(["a"]), "dtype string"),
    "resource": (lambda: tf.Variable([1.0]).handle, "dtype resource"),
    "quantized": (lambda: tf.quantization.quantize([1.0], 0, 1, tf.qint8).output, "dtype qint8"),
    "symbolic": (lambda: escaped(), "symbolic tensor of a tf.function"),
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


def test_unknown_rank() -> None:
    """A tensor of unknown rank is rejected while tracing, and the message names ensure_shape."""
    traced = tf.function(lambda x: cr.all_reduce([x, x]), input_signature=[tf.TensorSpec(None)], autograph=False)
    with pytest.raises(cr.UnsupportedError, match=r"(?s)unknown rank.*ensure_shape"):
        traced(tf.ones([3]))


@pytest.mark.parametrize(("algorithm", "traced"), [("ring", False), ("hierarchical_copy", True), ("one_device", True)])
def test_gradients(algorithm: str, traced: bool) -> None:
    """The gradient of an all-reduced sum is the all-reduced sum of the gradients. The same holds for means."""
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


def test_gradients_of_other_ops_and_of_variables() -> None:
    """The gradient of a max is 1 for the largest value and 0 for others, that of a product the product of the others.
    A tape records the read of a variable. A Keras variable can be reduced."""
    xs = [on(k, x) for k, x in enumerate((2.0, 5.0, 3.0))]
    halves = [on(k, 1.0, tf.float16) for k in range(3)]
    variables = [tf.Variable(1.0), tf.Variable(3.0)]
    for op, sources, want in (
        ("max", xs, [0.0, 1.0, 0.0]),
        ("product", xs, [15.0, 6.0, 10.0]),
        ("sum", halves, [1.0] * 3),
        ("mean", variables, [0.5] * 2),
    ):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = HIERARCHICAL.reduce(op, cr.PerReplica(sources), "cpu:0")[0]
        assert [float(g) for g in tape.gradient(y, sources)] == want
    assert cr.all_reduce([tf.keras.Variable([1.0, float(k)]) for k in range(2)])[1].numpy().tolist() == [2.0, 1.0]
