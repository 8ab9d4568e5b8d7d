"""Sparse values: IndexedSlices and each framework's own sparse arrays."""

import numpy as np
import pytest
from expect import check, check_memory, check_places, digits
from frameworks import CLASSES, NAMES, np_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

import crossreduce as cr

OPS = {
    "ReductionToOneDevice": cr.ReductionToOneDevice(),
    "on cpu:2": cr.ReductionToOneDevice("cpu:2"),
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "ring": cr.AllReduceCrossDeviceOps("ring", 3),
    "accumulation_fn": cr.ReductionToOneDevice(accumulation_fn=lambda xs: sum(xs[1:], xs[0])),
}
ops_table = pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())
kinds_table = pytest.mark.parametrize(
    ("framework", "kind"),
    [(name, kind) for name in NAMES for kind in CLASSES[name].kinds],
    indirect=["framework"],
)
SHAPE = (6, 2)


def names(*numbers):
    return tuple(f"cpu:{k}" for k in numbers)


def on(*numbers):
    return cr.PerReplica([0] * len(numbers), names(*numbers))


def rows(*lengths, dtype="float32", seed=0):
    """Return values and indices a replica; indices repeat, inside a replica and between them."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(-9, 10, (length, SHAPE[1])).astype(np_dtype(dtype)), rng.integers(0, SHAPE[0], length))
        for length in lengths
    ]


def put(framework, kind, parts, shape=SHAPE):
    return [framework.sparse(kind, values, indices, shape, k) for k, (values, indices) in enumerate(parts)]


def dense(values, indices, shape=SHAPE):
    out = np.zeros(shape, values.dtype)
    np.add.at(out, indices, values)
    return out


def check_sparse(framework, kind, result, parts, devices, *, mean=False, inputs=()):
    """A sparse result lists all replicas' slices in their order, in the kind they came in."""
    check_places(framework, result, devices)
    values = np.concatenate([v for v, _ in parts])
    indices = np.concatenate([i for _, i in parts])
    if mean:
        dtype = framework.mean_dtype(values.dtype.name) if values.dtype.kind in "iu" else values.dtype
        values = (values.astype("complex128" if values.dtype.kind == "c" else "float64") / len(parts)).astype(dtype)
    for component in result:
        got = framework.parts(component)
        assert got.kind == kind
        assert got.indices.tolist() == indices.tolist()
        assert got.values.dtype == values.dtype
        np.testing.assert_array_equal(got.values, values)
    check_memory(framework, result, inputs)


@kinds_table
@ops_table
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_slices_are_listed_in_replica_order(framework, kind, ops, op):
    """Sum lists all slices in replica order, duplicates kept, of any lengths, empty ones too; mean divides by n."""
    for lengths in ((2, 4, 1, 1), (0, 3), (2, 0, 2), (0, 0), (3,)):
        parts = rows(*lengths)
        given = put(framework, kind, parts)
        n = len(given)
        value = cr.PerReplica(given, names(*range(n)))
        for devices in (names(*range(n)), names(4), names(1, 0, 3)):
            result = ops.reduce(op, value, cr.PerReplica([0] * len(devices), devices))
            check_sparse(framework, kind, result, parts, devices, mean=op == "mean", inputs=given)
        for component, (values, indices) in zip(given, parts, strict=True):
            assert np.array_equal(framework.parts(component).values, values)
            assert np.array_equal(framework.parts(component).indices, indices)


@kinds_table
def test_the_dense_form_is_the_dense_sum(framework, kind):
    """A sparse result stands for the dense sum, and keeps its dense shape."""
    parts = rows(3, 5, 2)
    given = cr.PerReplica(put(framework, kind, parts), names(0, 1, 2))
    for y in cr.HierarchicalCopyAllReduce().reduce("sum", given, given):
        np.testing.assert_array_equal(framework.dense(y, SHAPE), sum(dense(*part) for part in parts))
        shape = y.dense_shape if hasattr(y, "dense_shape") else y.shape
        assert tuple(int(size) for size in shape) == SHAPE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32", "int64", "complex64"])
@kinds_table
def test_every_dtype(framework, kind, dtype):
    """Sparse values of every dtype are listed; the mean of integers is a float, and halves round once."""
    parts = rows(2, 3, dtype=dtype)
    given = put(framework, kind, parts)
    value = cr.PerReplica(given, names(0, 1))
    for op in ("sum", "mean"):
        result = cr.HierarchicalCopyAllReduce().reduce(op, value, value)
        check_sparse(framework, kind, result, parts, names(0, 1), mean=op == "mean", inputs=given)


def test_mixed_index_dtypes(framework):
    """Index dtypes may differ between replicas: int32 and int64 list as int64."""
    parts = [(v, i.astype(dtype)) for (v, i), dtype in zip(rows(2, 2, 2), ("int32", "int64", "int32"), strict=True)]
    value = cr.PerReplica(put(framework, "IndexedSlices", parts), names(0, 1, 2))
    for ops in OPS.values():
        result = ops.reduce("sum", value, value)
        check_sparse(framework, "IndexedSlices", result, parts, names(0, 1, 2))
        assert all(framework.to_numpy(y.indices).dtype == np.int64 for y in result)


def test_no_dense_shape(framework):
    """dense_shape may be missing, on all replicas or on some; the known one is kept."""
    parts = rows(2, 1, 3)
    for shapes, wanted in (((None,) * 3, None), ((None, SHAPE, None), SHAPE)):
        given = [
            framework.sparse("IndexedSlices", v, i, s, k)
            for k, ((v, i), s) in enumerate(zip(parts, shapes, strict=True))
        ]
        value = cr.PerReplica(given)
        result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
        check_sparse(framework, "IndexedSlices", result, parts, names(0, 1, 2), inputs=given)
        assert {y.dense_shape for y in result} == {wanted}


@kinds_table
@ops_table
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sparse_and_dense_replicas_give_a_dense_result(framework, kind, ops, op):
    """A value that is sparse on some replicas and dense on others has the dense result."""
    parts = rows(3, 0, 4)
    full = np.arange(12, dtype="float32").reshape(SHAPE)
    for at in (0, 2, 3):
        given = put(framework, kind, parts)
        given.insert(at, framework.array(full, at))
        xs = [dense(*part) for part in parts]
        xs.insert(at, full)
        value = cr.PerReplica(given, names(0, 1, 2, 3))
        check(framework, ops.reduce(op, value, value), op, xs, names(0, 1, 2, 3), given)
        check(framework, ops.reduce(op, value, on(1, 5)), op, xs, names(1, 5), given)


def test_unknown_shape_beside_dense_replicas(framework):
    """IndexedSlices without dense_shape take the shape of the dense replica beside them."""
    (v, i), full = rows(3)[0], np.ones(SHAPE, "float32")
    value = cr.PerReplica([framework.sparse("IndexedSlices", v, i, None, 0), framework.array(full, 1)])
    result = cr.ReductionToOneDevice().reduce("sum", value, value)
    check(framework, result, "sum", [dense(v, i), full], names(0, 1))


@kinds_table
@pytest.mark.parametrize(
    "ops", [cr.HierarchicalCopyAllReduce(2), cr.NcclAllReduce(), cr.ReductionToOneDevice()], ids=str
)
def test_sparse_and_dense_values_in_one_batch(framework, kind, ops):
    """Sparse and dense values mix in one batch, and results come in the order of the pairs."""
    sparse, xs = rows(2, 1, 3), digits(3, (4,))
    other = rows(1, 1, 1, seed=5)
    batch = [
        cr.PerReplica(put(framework, kind, sparse), names(0, 1, 2)),
        cr.PerReplica(framework.arrays(xs), names(0, 1, 2)),
        cr.PerReplica(put(framework, "IndexedSlices", other), names(0, 1, 2)),
        cr.PerReplica(framework.arrays(xs), names(0, 1, 2)),
    ]
    first, second, third, fourth = ops.batch_reduce("sum", [(value, on(2, 0)) for value in batch])
    check_sparse(framework, kind, first, sparse, names(2, 0))
    check(framework, second, "sum", xs, names(2, 0))
    check_sparse(framework, "IndexedSlices", third, other, names(2, 0))
    check(framework, fourth, "sum", xs, names(2, 0))


@kinds_table
def test_one_sparse_array(framework, kind):
    """A sparse array by itself is a value of one replica, a destination, and can be broadcast."""
    parts = rows(3)
    (x,) = put(framework, kind, parts)
    for ops in OPS.values():
        check_sparse(framework, kind, ops.reduce("mean", x, "cpu:0"), parts, names(0), mean=True, inputs=[x])
        check_sparse(framework, kind, ops.reduce("sum", x, x), parts, names(0), inputs=[x])
        check_sparse(framework, kind, ops.broadcast(x, on(2, 0)), parts, names(2, 0), inputs=[x])


@kinds_table
def test_gather_makes_dense(framework, kind):
    """Gather makes sparse components dense and joins them."""
    parts = rows(3, 0, 2)
    value = cr.PerReplica(put(framework, kind, parts), names(0, 1, 2))
    for axis in (0, 1):
        for y in cr.HierarchicalCopyAllReduce().gather(value, on(1, 0), axis):
            wanted = np.concatenate([dense(*part) for part in parts], axis)
            np.testing.assert_array_equal(framework.to_numpy(y), wanted)


def test_gather_needs_the_dense_shape(framework):
    """Gather of slices whose dense shape nobody knows is an error that says what is missing."""
    (part,) = rows(2)
    value = cr.PerReplica([framework.sparse("IndexedSlices", *part, None, 0)])
    with pytest.raises(cr.ArgumentError, match="dense_shape"):
        cr.CrossDeviceOps().gather(value, "cpu:0", 0)


def test_trees_with_sparse_leaves(framework):
    """all_reduce takes sparse leaves as leaves, in every kind."""
    for kind in framework.kinds:
        parts, xs = rows(2, 3), digits(2, (3,))
        trees = [
            {"table": table, "rest": [rest]}
            for table, rest in zip(put(framework, kind, parts), framework.arrays(xs), strict=True)
        ]
        results = cr.all_reduce(trees, "sum")
        check_sparse(framework, kind, cr.Mirrored([r["table"] for r in results], names(0, 1)), parts, names(0, 1))
        assert [framework.to_numpy(r["rest"][0]).tolist() for r in results] == [np.sum(xs, axis=0).tolist()] * 2


def test_uncoalesced_and_hybrid_coo(torch_):
    """torch's COO arrays may be uncoalesced, coalesced, hybrid, or sparse in all axes; the sum is theirs."""
    torch = torch_.torch
    rng = np.random.default_rng(0)
    for sparse_axes, shape in ((1, (6,)), (2, (6, 2)), (1, (6, 2, 3)), (2, (4, 3, 2)), (3, (4, 3, 2))):
        xs = []
        for count in (5, 0, 3):
            indices = np.stack([rng.integers(0, size, count) for size in shape[:sparse_axes]])
            values = rng.integers(-9, 9, (count, *shape[sparse_axes:])).astype("float32")
            xs.append(
                torch.sparse_coo_tensor(
                    torch.from_numpy(indices), torch.from_numpy(values), shape, check_invariants=False
                )
            )
        xs.append(xs[0].coalesce())
        value = cr.PerReplica(xs)
        wanted = sum(x.to_dense() for x in xs)
        for op, divisor in (("sum", 1), ("mean", 4)):
            for y in cr.HierarchicalCopyAllReduce().reduce(op, value, value):
                assert y.layout is torch.sparse_coo
                assert y.sparse_dim() == sparse_axes
                assert y.shape == shape
                assert not y.is_coalesced() or y._nnz() == 0
                assert torch.equal(y.to_dense(), wanted / divisor)
        mixed = cr.PerReplica([*xs, torch.ones(shape)])
        for y in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
            assert torch.equal(y, wanted + 1)


def test_bcoo_of_every_shape(jax_):
    """JAX's BCOO arrays may be sparse in all axes or in the first ones, and padded beyond the shape."""
    rng = np.random.default_rng(0)
    for sparse_axes, shape in ((1, (6,)), (2, (6, 2)), (1, (6, 2, 3)), (2, (4, 3, 2))):
        xs, wanted = [], np.zeros(shape, "float32")
        for k, count in enumerate((5, 1, 3)):
            indices = np.stack([rng.integers(0, size, count) for size in shape[:sparse_axes]], 1)
            values = rng.integers(-9, 9, (count, *shape[sparse_axes:])).astype("float32")
            xs.append(jax_.sparse("bcoo", values, indices, shape, k))
            np.add.at(wanted, tuple(indices.T), values)
        value = cr.PerReplica(xs, names(0, 1, 2))
        for y in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
            assert y.shape == shape
            assert y.n_sparse == sparse_axes
            np.testing.assert_array_equal(np.asarray(y.todense()), wanted)


def test_padded_bcoo(jax_):
    """A BCOO that JAX padded (indices at the shape's end) keeps its meaning, sparse and beside dense ones."""
    x = jax_.bcoo.fromdense(jax_.array(np.array([1.0, 0, 2, 0], "float32"), 0), nse=4)
    y = jax_.bcoo.fromdense(jax_.array(np.array([0.0, 3, 0, 0], "float32"), 1), nse=3)
    value = cr.PerReplica([x, y], names(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
        assert np.asarray(z.todense()).tolist() == [1, 3, 2, 0]
    mixed = cr.PerReplica([x, jax_.array(np.ones(4, "float32"), 1)], names(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
        assert np.asarray(z).tolist() == [2, 1, 3, 1]


def test_any_slices(framework):
    """Whatever the slices, the sparse sum stands for the sum of the dense arrays."""
    kinds = st.sampled_from(framework.kinds)
    lengths = st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=4)

    @settings(max_examples=framework.examples)
    @given(kinds, lengths, st.integers(0, 99), st.sampled_from(["sum", "mean"]), st.sampled_from(list(OPS)))
    def law(kind, lengths, seed, op, ops):
        parts = rows(*lengths, seed=seed)
        value = cr.PerReplica(put(framework, kind, parts), names(*range(len(parts))))
        result = OPS[ops].reduce(op, value, value)
        check_sparse(framework, kind, result, parts, value.devices, mean=op == "mean")

    law()
