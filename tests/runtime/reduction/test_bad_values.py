"""Invalid values: each is rejected, with an error that states the fault."""

import importlib

import numpy as np
import pytest
from frameworks import NAMES
from op_cases import OPS, each_ops, label, ops_and_framework, refused_by_all, value
from pairs import each, pairs

import crossreduce as cr

DIFFERENT = [
    [((1,), "float32"), ((3,), "float32")],
    [((), "float32"), ((1,), "float32")],
    [((0,), "int8"), ((1,), "int8")],
    [((2, 2), "float32"), ((4,), "float32")],
    [((3,), "float32"), ((3, 1), "float32")],
    [((2, 3), "float32"), ((3, 2), "float32")],
    [((2,), "float32"), ((2,), "int32"), ((2,), "float16")],
]


@pytest.mark.parametrize(("specs", "framework"), pairs(DIFFERENT, NAMES), indirect=["framework"], ids=label)
def test_replicas_of_different_shape_or_dtype(specs, framework):
    """Replicas of different shape or dtype raise an error that lists every replica, also if NumPy could broadcast them,
    if they have the same size, or if the sizes of a whole batch agree (D3)."""
    xs = framework.arrays([np.zeros(*spec) for spec in specs])
    for ops in OPS:
        with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
            ops.reduce("mean", cr.PerReplica(xs), "cpu:0")
        for k, (shape, dtype) in enumerate(specs):
            assert f"replica {k} on cpu:{k}: {dtype}[{', '.join(map(str, shape))}]" in str(caught.value)
    batch = [(cr.PerReplica(xs), "cpu:0"), (cr.PerReplica(xs[::-1]), "cpu:0")]
    with pytest.raises(cr.MismatchError, match="pair 0: the replicas of one value differ"):
        cr.NcclAllReduce().batch_reduce("sum", batch)


def test_replicas_of_different_frameworks(accelerated, numpy_):
    """Replicas of different frameworks raise an error that lists every replica with its framework."""
    mixed = cr.PerReplica([numpy_.array(np.zeros(2)), accelerated.array(np.zeros(2), 1)], ["cpu:0", "cpu:1"])
    for ops in OPS:
        with pytest.raises(cr.MismatchError, match="different frameworks") as caught:
            ops.reduce("sum", mixed, "cpu:0")
        assert "replica 0 on cpu:0: numpy" in str(caught.value)
        assert f"replica 1 on cpu:1: {accelerated.name}" in str(caught.value)


@each_ops
def test_values_and_components_of_a_wrong_type(ops):
    """A list, tuple, dict, None, text or class is not a value, and is not converted to one. Components must be arrays
    of a supported framework, or numbers."""
    for wrong in ([np.zeros(2), np.zeros(2)], (np.zeros(2),), {"a": np.zeros(2)}, None, "x", b"x"):
        with pytest.raises(cr.ArgumentError, match="must be a PerReplica or an array"):
            ops.reduce("sum", wrong, "cpu:0")
        with pytest.raises(cr.ArgumentError, match="pair 1: a value to reduce must be a PerReplica or an array"):
            ops.batch_reduce("sum", [(value(), "cpu:0"), (wrong, "cpu:0")])
    with pytest.raises(cr.UnsupportedError, match="a class was given instead of a value"):
        ops.reduce("sum", np.ndarray, "cpu:0")
    for wrong in (object(), {1, 2}, range(3), lambda: 0, iter([1])):
        with pytest.raises(cr.ArgumentError, match="is not an array"):
            ops.reduce("sum", cr.PerReplica([wrong, wrong]), "cpu:0")


UNSUPPORTED = {
    "str": np.array(["a", "b"]),
    "bytes": np.array([b"a", b"b"]),
    "object": np.array([1, "a"], dtype=object),
    "datetime": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "timedelta": np.array([1], dtype="timedelta64[s]"),
    "structured": np.zeros(2, dtype=[("x", "f4"), ("y", "f4")]),
    "longdouble": np.zeros(2, dtype=np.longdouble),
    "huge int": 2**70,
}


@each_ops
def test_dtypes_that_are_not_supported(ops):
    """Text, objects, dates, records and wide floats raise a TypeError that lists the supported dtypes."""
    words = "cannot be reduced, broadcast or gathered"
    for op, x in each(["sum", "mean", "min", "max", "product"], UNSUPPORTED.values()):
        y = np.atleast_1d(np.asarray(x))
        value = cr.PerReplica([x, x])
        with pytest.raises(cr.UnsupportedError, match=r"cannot be reduced(.|\n)*cast to one of bfloat16, bool"):
            ops.reduce(op, value, "cpu:0")
        with pytest.raises(cr.UnsupportedError, match="pair 0: arrays of dtype"):
            ops.batch_reduce(op, [(value, "cpu:0")])
        with pytest.raises(cr.UnsupportedError, match=words):
            ops.broadcast(x, "cpu:0")
        with pytest.raises(cr.UnsupportedError, match=words):
            ops.gather(cr.PerReplica([y, y]), "cpu:0", 0)


@each_ops
def test_masked_arrays(ops):
    """A masked array is rejected, since its mask would be lost."""
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    refused_by_all(
        cr.UnsupportedError,
        r"masked arrays cannot be reduced(.|\n)*filled\(0\)",
        lambda: ops.reduce("sum", cr.PerReplica([masked, masked]), "cpu:0"),
        lambda: ops.broadcast(masked, "cpu:0"),
        lambda: ops.gather(cr.PerReplica([masked, masked]), "cpu:0", 0),
        lambda: ops.reduce("sum", cr.PerReplica([cr.IndexedSlices(masked, np.array([0, 1]))] * 2), "cpu:0"),
    )


@ops_and_framework
def test_sparse_values_can_only_be_added(ops, framework):
    """The min, max and product of sparse values raise TypeError, for every sparse kind of every framework."""
    for kind in framework.kinds:
        xs = [framework.sparse(kind, np.ones((1, 2), "float32"), np.array([k]), (3, 2), k) for k in range(2)]
        for op in ("min", "max", "product"):
            with pytest.raises(cr.UnsupportedError, match="sparse values can only be reduced by sum or mean"):
                ops.reduce(op, cr.PerReplica(xs), "cpu:0")


UNUSUAL = [  # a framework, a kind of array of it that is not supported, words of the error
    (
        "torch",
        lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested",
    ),
    ("torch", lambda torch: torch.empty(2, device="meta"), "meta tensors have no elements"),
    ("jax", lambda jax: jax.random.key(0), "PRNG keys"),
    ("tensorflow", lambda tf: tf.ragged.constant([[1.0], [2.0, 3.0]]), "RaggedTensor"),
    ("tensorflow", lambda tf: tf.constant(["a", "b"]), "dtype string"),
]


@pytest.mark.parametrize(("framework", "make", "words"), UNUSUAL, indirect=["framework"])
def test_unusual_arrays_of_the_frameworks(framework, make, words):
    """Nested, meta, ragged, text and key arrays are rejected with an error of this library."""
    x = make(importlib.import_module(framework.name))
    with pytest.raises(cr.ReductionError, match=words):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([x, x], ["cpu:0", "cpu:1"]), "cpu:0")


def test_wrong_indices_of_slices(framework):
    """IndexedSlices with indices that are not integers cannot be created. When a sparse value is made dense, an index
    beyond its shape raises an error with its pair or leaf; its row is not dropped silently."""
    for wrong in ([0.5], [True], [1j]):
        with pytest.raises(cr.ArgumentError, match="the indices of slices must be integers"):
            framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array(wrong), (5, 2))
    good = cr.PerReplica(framework.arrays([np.ones(2, "float32")] * 2))
    for wrong in (5, -1):
        sparse = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([wrong]), (5, 2), 0)
        mixed = cr.PerReplica([sparse, framework.array(np.ones((5, 2), "float32"), 1)])
        with pytest.raises(cr.ArgumentError, match=r"^a sparse array has an index outside its dense shape"):
            cr.ReductionToOneDevice().reduce("sum", mixed, "cpu:0")
        with pytest.raises(cr.ArgumentError, match=r"^pair 1: a sparse array has an index outside"):
            cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(good, good), (mixed, "cpu:0")])
        with pytest.raises(cr.ArgumentError, match=r"^leaf tree\['b'\]: a sparse array has an index outside"):
            cr.all_reduce([{"a": x, "b": y} for x, y in zip(good, mixed, strict=True)])


def test_sparse_replicas_must_agree(framework):
    """Sparse components that differ in the shape of rows, dtype or dense shape raise an error that lists each."""

    def slices(k, rows, dtype, shape):
        return framework.sparse("IndexedSlices", np.ones((1, rows), dtype), np.array([0]), shape, k)

    ok = slices(0, 2, "float32", (5, 2))
    where = r" that differ in shape, dtype or sparse format(.|\n)*replica 0 on cpu:0"
    others = [slices(1, 3, "float32", (5, 3)), slices(1, 2, "float64", (5, 2)), slices(1, 2, "float32", (6, 2))]
    dense = [((6, 2), "float32"), ((5, 2), "float64"), ((5, 2, 1), "float32")]
    for kinds, wrong in (
        ("sparse arrays", others),
        ("sparse and dense arrays", [framework.array(np.zeros(*spec), 1) for spec in dense]),
    ):
        for other in wrong:
            with pytest.raises(cr.MismatchError, match=f"are {kinds}{where}(.|\n)*replica 1 on cpu:1"):
                cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([ok, other]), "cpu:0")
