"""Invalid values: each is rejected, with an error that states the fault."""

import importlib

import numpy as np
import pytest
from frameworks import NAMES
from op_cases import OPS, each_ops, label, ops_and_framework, value, with_ops
from pairs import each, pairs

import crossreduce as cr


@ops_and_framework
def test_replicas_of_different_shape(ops, framework):
    """Replicas of different shape raise an error that lists every replica with its device and shape."""
    xs = framework.arrays([np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32"), np.zeros((2, 3), "float32")])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
        ops.reduce("sum", cr.PerReplica(xs), "cpu:0")
    text = str(caught.value)
    for k, shape in enumerate(["2, 3", "3, 2", "2, 3"]):
        assert f"replica {k} on cpu:{k}: float32[{shape}]" in text


@pytest.mark.parametrize(
    ("shapes", "ops", "framework"),
    pairs([((1,), (3,)), ((), (1,)), ((0,), (1,)), ((2, 2), (4,)), ((3,), (3, 1))], OPS, NAMES),
    indirect=["framework"],
    ids=label,
)
def test_shapes_are_not_broadcast(ops, shapes, framework):
    """Shapes that NumPy could broadcast, or that have the same number of elements, still differ."""
    xs = framework.arrays([np.zeros(shape, "float32") for shape in shapes])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype"):
        ops.reduce("mean", cr.PerReplica(xs), "cpu:0")


@ops_and_framework
def test_replicas_of_different_dtype(ops, framework):
    """Replicas of different dtype raise an error that lists every replica with its dtype."""
    xs = framework.arrays([np.zeros(2, "float32"), np.zeros(2, "float16"), np.zeros(2, "int32")])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
        ops.reduce("sum", cr.PerReplica(xs), "cpu:0")
    for k, dtype in enumerate(["float32", "float16", "int32"]):
        assert f"replica {k} on cpu:{k}: {dtype}[2]" in str(caught.value)


@each_ops
def test_replicas_of_different_frameworks(ops, accelerated, numpy_):
    """Replicas of different frameworks raise an error that lists every replica with its framework."""
    mixed = cr.PerReplica([numpy_.array(np.zeros(2)), accelerated.array(np.zeros(2), 1)], ["cpu:0", "cpu:1"])
    with pytest.raises(cr.MismatchError, match="different frameworks") as caught:
        ops.reduce("sum", mixed, "cpu:0")
    assert "replica 0 on cpu:0: numpy" in str(caught.value)
    assert f"replica 1 on cpu:1: {accelerated.name}" in str(caught.value)


@with_ops("wrong", [[np.zeros(2), np.zeros(2)], (np.zeros(2),), {"a": np.zeros(2)}, None, "x", b"x"])
def test_values_of_a_wrong_type(ops, wrong):
    """A list, tuple, dict, None or text is not a value, and is not converted to one."""
    with pytest.raises(cr.ArgumentError, match="must be a PerReplica or an array"):
        ops.reduce("sum", wrong, "cpu:0")
    with pytest.raises(cr.ArgumentError, match="pair 1: a value to reduce must be a PerReplica or an array"):
        ops.batch_reduce("sum", [(value(), "cpu:0"), (wrong, "cpu:0")])


@with_ops("wrong", [object(), {1, 2}, range(3), lambda: 0, iter([1])])
def test_components_that_are_not_arrays(ops, wrong):
    """Components must be arrays of a supported framework, or numbers."""
    with pytest.raises(cr.ArgumentError, match="is not an array"):
        ops.reduce("sum", cr.PerReplica([wrong, wrong]), "cpu:0")


@each_ops
def test_a_class_instead_of_a_value(ops):
    """A class instead of a value raises a TypeError that says that a class was given."""
    with pytest.raises(cr.UnsupportedError, match="a class was given instead of a value"):
        ops.reduce("sum", np.ndarray, "cpu:0")


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


@pytest.mark.parametrize(
    ("kind", "op", "ops"), pairs(UNSUPPORTED, ["sum", "mean", "min", "max", "product"], OPS), ids=label
)
def test_dtypes_that_cannot_be_reduced(ops, op, kind):
    """Text, objects, dates, records and wide floats raise a TypeError that lists the supported dtypes."""
    x = UNSUPPORTED[kind]
    with pytest.raises(cr.UnsupportedError, match=r"cannot be reduced(.|\n)*cast to one of bfloat16, bool"):
        ops.reduce(op, cr.PerReplica([x, x]), "cpu:0")
    with pytest.raises(cr.UnsupportedError, match="pair 0: arrays of dtype"):
        ops.batch_reduce(op, [(cr.PerReplica([x, x]), "cpu:0")])


@with_ops("kind", UNSUPPORTED)
def test_dtypes_that_cannot_be_moved(ops, kind):
    """Dtypes that cannot be reduced cannot be broadcast or gathered either."""
    x = UNSUPPORTED[kind]
    y = np.atleast_1d(np.asarray(x))
    for call in (lambda: ops.broadcast(x, value()), lambda: ops.gather(cr.PerReplica([y, y]), "cpu:0", 0)):
        with pytest.raises(cr.UnsupportedError, match="cannot be reduced, broadcast or gathered"):
            call()


@each_ops
def test_masked_arrays(ops):
    """A masked array is rejected, since its mask would be lost."""
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    for call in (
        lambda: ops.reduce("sum", cr.PerReplica([masked, masked]), "cpu:0"),
        lambda: ops.broadcast(masked, "cpu:0"),
        lambda: ops.gather(cr.PerReplica([masked, masked]), "cpu:0", 0),
        lambda: ops.reduce("sum", cr.PerReplica([cr.IndexedSlices(masked, np.array([0, 1]))] * 2), "cpu:0"),
    ):
        with pytest.raises(cr.UnsupportedError, match=r"masked arrays cannot be reduced(.|\n)*filled\(0\)"):
            call()


@pytest.mark.parametrize(
    ("op", "ops", "framework"), pairs(["sum", "mean"], OPS, NAMES), indirect=["framework"], ids=label
)
def test_bools_are_not_added(ops, op, framework):
    """The sum and the mean of bools raise a TypeError that recommends max and min."""
    xs = framework.arrays([np.array([True, False])] * 2)
    with pytest.raises(cr.UnsupportedError, match=rf'the {op} of bools(.|\n)*"max" \(any\)'):
        ops.reduce(op, cr.PerReplica(xs), "cpu:0")


@pytest.mark.parametrize(
    ("op", "ops", "framework"), pairs(["min", "max"], OPS, NAMES), indirect=["framework"], ids=label
)
def test_complex_numbers_have_no_order(ops, op, framework):
    """The min and the max of complex numbers raise a TypeError."""
    xs = framework.arrays([np.ones(2, "complex64")] * 2)
    with pytest.raises(cr.UnsupportedError, match=f"the {op} of complex numbers is not defined"):
        ops.reduce(op, cr.PerReplica(xs), "cpu:0")


@pytest.mark.parametrize(
    ("op", "ops", "framework"), pairs(["min", "max", "product"], OPS, NAMES), indirect=["framework"], ids=label
)
def test_sparse_values_can_only_be_added(ops, op, framework):
    """The min, max and product of sparse values raise TypeError, for every sparse kind of every framework."""
    for kind in framework.kinds:
        xs = [framework.sparse(kind, np.ones((1, 2), "float32"), np.array([k]), (3, 2), k) for k in range(2)]
        with pytest.raises(cr.UnsupportedError, match="sparse values can only be reduced by sum or mean"):
            ops.reduce(op, cr.PerReplica(xs), "cpu:0")


def unusual_arrays():
    """Return (framework, function, words) for kinds of array that the library does not support.

    The function makes such an array with the framework's module; the error must contain the words.
    """
    cases = {
        "torch": [
            (lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
            (lambda torch: torch.empty(2, device="meta"), "meta tensors have no elements"),
        ],
        "jax": [(lambda jax: jax.random.key(0), "PRNG keys")],
        "tensorflow": [
            (lambda tf: tf.ragged.constant([[1.0], [2.0, 3.0]]), "RaggedTensor"),
            (lambda tf: tf.constant(["a", "b"]), "dtype string"),
        ],
    }
    return [(name, *case) for name, found in cases.items() if name in NAMES for case in found]


@pytest.mark.parametrize(("framework", "make", "words"), unusual_arrays(), indirect=["framework"])
def test_unusual_arrays_of_the_frameworks(framework, make, words):
    """Nested, meta, ragged, text and key arrays are rejected with an error of this library."""
    x = make(importlib.import_module(framework.name))
    with pytest.raises(cr.ReductionError, match=words):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([x, x], ["cpu:0", "cpu:1"]), "cpu:0")


def test_per_replica_needs_components():
    """A PerReplica of no components, a single array, a text or a dict cannot be created."""
    with pytest.raises(cr.ArgumentError, match="PerReplica needs at least one component"):
        cr.PerReplica([])
    for wrong in (np.zeros((2, 3)), "ab", {"a": 1}, 3, None):
        with pytest.raises(cr.ArgumentError, match="PerReplica requires a list of one array per replica"):
            cr.PerReplica(wrong)
    with pytest.raises(cr.ArgumentError, match="Mirrored needs at least one component"):
        cr.Mirrored([])


def test_indexed_slices_must_agree():
    """IndexedSlices whose values, indices and dense shape do not agree cannot be created."""
    with pytest.raises(cr.ArgumentError, match="one index per slice"):
        cr.IndexedSlices(np.zeros((2, 3)), np.array([0]))
    with pytest.raises(cr.ArgumentError, match="one index per slice"):
        cr.IndexedSlices(np.zeros(()), np.array([0]))
    with pytest.raises(cr.ArgumentError, match="dense_shape does not agree with the slices"):
        cr.IndexedSlices(np.zeros((1, 3)), np.array([0]), (5, 2))
    with pytest.raises(cr.ArgumentError, match="IndexedSlices must contain arrays"):
        cr.IndexedSlices([[1.0], [2.0, 3.0]], [0, 1])


@pytest.mark.parametrize("wrong", [5, -1])
def test_sparse_index_beyond_the_shape(wrong, framework):
    """When a sparse value is made dense, an index beyond its shape raises an error; its row is not dropped silently."""
    sparse = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([wrong]), (5, 2), 0)
    dense = framework.array(np.ones((5, 2), "float32"), 1)
    with pytest.raises(cr.ArgumentError, match="index outside its dense shape"):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([sparse, dense]), "cpu:0")


def test_an_index_beyond_the_shape_reports_its_pair_and_leaf(framework):
    """An index beyond the shape raises an error with the number of the pair in a batch, or the path of the leaf."""
    good = cr.PerReplica(framework.arrays([np.ones(2, "float32")] * 2))
    sparse = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([5]), (5, 2), 0)
    wrong = [sparse, framework.array(np.ones((5, 2), "float32"), 1)]
    with pytest.raises(cr.ArgumentError, match=r"^pair 1: a sparse array has an index outside"):
        cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(good, good), (cr.PerReplica(wrong), "cpu:0")])
    with pytest.raises(cr.ArgumentError, match=r"^leaf tree\['b'\]: a sparse array has an index outside"):
        cr.all_reduce([{"a": x, "b": y} for x, y in zip(good, wrong, strict=True)])


@pytest.mark.parametrize(("framework", "indices"), each(NAMES, [[0.5], [True], [1j]]), indirect=["framework"], ids=str)
def test_sparse_indices_are_integers(framework, indices):
    """IndexedSlices with indices that are not integers cannot be created."""

    with pytest.raises(cr.ArgumentError, match="the indices of slices must be integers"):
        framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array(indices), (5, 2))


def test_sparse_replicas_must_agree(framework):
    """Sparse components that differ in the shape of rows, dtype or dense shape raise an error that lists each."""
    ok = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([0]), (5, 2), 0)
    others = [
        framework.sparse("IndexedSlices", np.ones((1, 3), "float32"), np.array([0]), (5, 3), 1),
        framework.sparse("IndexedSlices", np.ones((1, 2), "float64"), np.array([0]), (5, 2), 1),
        framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([0]), (6, 2), 1),
    ]
    for other in others:
        with pytest.raises(
            cr.MismatchError, match="are sparse arrays that differ in shape, dtype or sparse format"
        ) as caught:
            cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([ok, other]), "cpu:0")
        assert "replica 0 on cpu:0" in str(caught.value)
        assert "replica 1 on cpu:1" in str(caught.value)
    for dense in (np.zeros((6, 2), "float32"), np.zeros((5, 2), "float64"), np.zeros((5, 2, 1), "float32")):
        with pytest.raises(
            cr.MismatchError, match="are sparse and dense arrays that differ in shape, dtype or sparse format"
        ):
            cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([ok, framework.array(dense, 1)]), "cpu:0")
