"""Sparse values: IndexedSlices and each framework's own sparse arrays."""

import numpy as np
import pytest
from expect import check, check_memory, check_places, cpus, digits, on
from frameworks import CLASSES, NAMES, np_dtype
from pairs import each, pairs

import crossreduce as cr

OPS = {
    "ReductionToOneDevice": cr.ReductionToOneDevice(),
    "on cpu:2": cr.ReductionToOneDevice("cpu:2"),
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "ring": cr.AllReduceCrossDeviceOps("ring", 3),
    "accumulation_fn": cr.ReductionToOneDevice(accumulation_fn=lambda xs: sum(xs[1:], xs[0])),
}
KINDS = [(name, kind) for name in NAMES for kind in CLASSES[name].kinds]
DTYPES = ("float16", "bfloat16", "float64", "int8", "int32", "int64", "complex64")
SHAPE = (6, 2)
kinds_table = pytest.mark.parametrize(("framework", "kind"), KINDS, indirect=["framework"])


def rows(*lengths, dtype="float32", seed=0):
    """Return random values and indices for each replica. Indices may repeat within a replica and between replicas."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(-9, 10, (length, SHAPE[1])).astype(np_dtype(dtype)), rng.integers(0, SHAPE[0], length))
        for length in lengths
    ]


def put(framework, kind, parts, shape=SHAPE):
    return [framework.sparse(kind, values, indices, shape, k) for k, (values, indices) in enumerate(parts)]


def check_sparse(framework, kind, result, parts, devices, *, mean=False, inputs=()):
    """Check that a sparse result has the slices of all replicas, in their order, and the kind of the inputs."""
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


@pytest.mark.parametrize(
    ("framework", "dtype", "kind", "ops"),
    [(name, *case) for name in NAMES for case in each(DTYPES, CLASSES[name].kinds, OPS)],
    indirect=["framework"],
)
def test_slices_are_concatenated(framework, dtype, kind, ops):
    """A sum has the slices of all replicas, in order, and the same dense shape. In a mean, each is divided once."""
    parts = rows(2, 0, 3, dtype=dtype)
    given = put(framework, kind, parts)
    for op, to in (("sum", (0, 1, 2)), ("mean", (3, 0))):
        result = OPS[ops].reduce(op, cr.PerReplica(given, cpus(0, 1, 2)), on(*to))
        check_sparse(framework, kind, result, parts, cpus(*to), mean=op == "mean", inputs=given)
        for y in result:
            shape = y.dense_shape if hasattr(y, "dense_shape") else y.shape
            assert tuple(int(size) for size in shape) == SHAPE
    for component, (values, indices) in zip(given, parts, strict=True):
        kept = framework.parts(component)
        assert (kept.values.tolist(), kept.indices.tolist()) == (values.tolist(), indices.tolist())


def test_different_index_dtypes_and_dense_shapes(framework):
    """Index dtypes may differ. ``dense_shape`` may be missing, except in a gather, which makes slices dense."""
    parts = rows(2, 1, 3)
    for kinds in (("int32", "int64", "int32"), ("int64", "uint64", "int64"))[: 2 if framework.name == "numpy" else 1]:
        cast = [(v, i.astype(kind)) for (v, i), kind in zip(parts, kinds, strict=True)]
        value = cr.PerReplica(put(framework, "IndexedSlices", cast), cpus(0, 1, 2))
        for ops in OPS.values():
            result = ops.reduce("sum", value, value)
            check_sparse(framework, "IndexedSlices", result, parts, cpus(0, 1, 2))
            assert all(framework.to_numpy(y.indices).dtype == np.int64 for y in result)
    for shapes, wanted in (((None,) * 3, None), ((None, SHAPE, None), SHAPE)):
        given = [framework.sparse("IndexedSlices", *parts[k], shape, k) for k, shape in enumerate(shapes)]
        value = cr.PerReplica(given)
        result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
        check_sparse(framework, "IndexedSlices", result, parts, cpus(0, 1, 2), inputs=given)
        assert {y.dense_shape for y in result} == {wanted}
    first, full = framework.sparse("IndexedSlices", *parts[0], None, 0), np.ones(SHAPE, "float32")
    value = cr.PerReplica([first, framework.array(full, 1)])
    result = cr.ReductionToOneDevice().reduce("sum", value, value)
    check(framework, result, "sum", [framework.dense(first, SHAPE), full], cpus(0, 1))
    with pytest.raises(cr.ArgumentError, match="a sparse array without dense_shape cannot be made dense"):
        cr.CrossDeviceOps().gather(cr.PerReplica([first]), "cpu:0", 0)


@pytest.mark.parametrize(
    ("framework", "kind", "ops", "op", "position"),
    [(*kind, ops, op, at) for (kind, op), ops, at in each(pairs(KINDS, ["sum", "mean"]), OPS, [0, 2, 3])],
    indirect=["framework"],
)
def test_sparse_and_dense_replicas_give_a_dense_result(framework, kind, ops, op, position):
    """A value that is sparse on some replicas and dense on others has a dense result."""
    parts = rows(3, 0, 4)
    full = np.arange(12, dtype="float32").reshape(SHAPE)
    given = put(framework, kind, parts)
    xs = [framework.dense(x, SHAPE) for x in given]
    given.insert(position, framework.array(full, position))
    xs.insert(position, full)
    value = cr.PerReplica(given, cpus(0, 1, 2, 3))
    check(framework, OPS[ops].reduce(op, value, value), op, xs, cpus(0, 1, 2, 3), given)
    check(framework, OPS[ops].reduce(op, value, on(1, 5)), op, xs, cpus(1, 5), given)


@kinds_table
def test_sparse_and_dense_values_in_one_batch(framework, kind):
    """A batch, or the leaves of trees, may be sparse and dense. Results have the order of the pairs or leaves."""
    sparse, other, xs = rows(2, 1, 3), rows(1, 1, 1, seed=5), digits(3, (4,))
    values = [put(framework, kind, sparse), framework.arrays(xs), put(framework, "IndexedSlices", other)]
    batch = [(cr.PerReplica(value, cpus(0, 1, 2)), on(2, 0)) for value in values]
    for ops in (cr.HierarchicalCopyAllReduce(2), cr.NcclAllReduce(), cr.ReductionToOneDevice()):
        trees = cr.all_reduce([dict(enumerate(row)) for row in zip(*values, strict=True)], cross_device_ops=ops)
        leaves = [cr.Mirrored([tree[k] for tree in trees], cpus(0, 1, 2)) for k in range(3)]
        for (first, second, third), names in ((ops.batch_reduce("sum", batch), cpus(2, 0)), (leaves, cpus(0, 1, 2))):
            check_sparse(framework, kind, first, sparse, names)
            check(framework, second, "sum", xs, names)
            check_sparse(framework, "IndexedSlices", third, other, names)


@kinds_table
def test_one_sparse_array_and_gathers(framework, kind):
    """A sparse array may be a value and a destination, and may be broadcast. Gather makes it dense."""
    (x,) = put(framework, kind, rows(3))
    for ops in OPS.values():
        check_sparse(framework, kind, ops.reduce("mean", x, x), rows(3), cpus(0), mean=True, inputs=[x])
        check_sparse(framework, kind, ops.broadcast(x, on(2, 0)), rows(3), cpus(2, 0), inputs=[x])
    parts = rows(3, 0, 2)
    value = cr.PerReplica(put(framework, kind, parts), cpus(0, 1, 2))
    for axis in (0, 1):
        wanted = np.concatenate([framework.dense(x, SHAPE) for x in value], axis)
        for y in cr.HierarchicalCopyAllReduce().gather(value, on(1, 0), axis):
            np.testing.assert_array_equal(framework.to_numpy(y), wanted)


@pytest.mark.parametrize(("framework", "kind"), [("torch", "coo"), ("jax", "bcoo")], indirect=["framework"])
def test_arrays_that_are_sparse_in_any_axes(framework, kind):
    """COO arrays of torch, coalesced or not, and BCOO arrays of JAX may be sparse in all axes or only in the first."""
    rng = np.random.default_rng(0)
    for axes, shape in ((1, (6, 2, 3)), (3, (4, 3, 2))):
        xs = []
        for k, count in enumerate((5, 1, 3)):
            indices = np.stack([rng.integers(0, size, count) for size in shape[:axes]], 1)
            values = rng.integers(-9, 9, (count, *shape[axes:])) * 1.0
            xs.append(framework.sparse(kind, values, indices, shape, k))
        if kind == "coo":
            xs[2] = xs[2].coalesce()
        wanted = sum(framework.dense(x, shape) for x in xs)
        value = cr.PerReplica(xs, cpus(0, 1, 2))
        for op, divisor in (("sum", 1), ("mean", 3)):
            for y in cr.HierarchicalCopyAllReduce().reduce(op, value, value):
                assert (framework.parts(y).kind, tuple(y.shape)) == (kind, shape)
                assert (y.sparse_dim() if kind == "coo" else y.n_sparse) == axes
                np.testing.assert_allclose(framework.dense(y, shape), wanted / divisor, rtol=0, atol=1e-13)
                assert kind == "bcoo" or not y.is_coalesced()
    mixed = cr.PerReplica([*xs, framework.array(np.ones(shape), 3)], cpus(0, 1, 2, 3))
    for y in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
        assert framework.to_numpy(y).tolist() == (wanted + 1).tolist()


def test_padded_bcoo(jax_):
    """A BCOO that JAX padded, with indices beyond the shape, is added correctly, also to a dense component."""
    x = jax_.sparse("bcoo", np.float32([1, 2, 0, 0]), np.array([0, 2, 4, 4]), (4,))
    y = jax_.sparse("bcoo", np.float32([3, 0, 0]), np.array([1, 4, 4]), (4,), 1)
    value = cr.PerReplica([x, y], cpus(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
        _, values, indices = jax_.parts(z)
        assert np.bincount(indices, values).tolist() == [1, 3, 2, 0, 0]  # the last element is that of the padding
    mixed = cr.PerReplica([x, jax_.array(np.ones(4, "float32"), 1)], cpus(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
        assert np.asarray(z).tolist() == [2, 1, 3, 1]
