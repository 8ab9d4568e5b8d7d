"""Sparse values: IndexedSlices and each framework's own sparse arrays."""

import numpy as np
import pytest
from budget import examples
from expect import check, check_memory, check_places, cpus, digits, on
from frameworks import CLASSES, NAMES, np_dtype
from hypothesis import given
from hypothesis import strategies as st
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


def crossed(names, *factors):
    """Parametrize a test over the cases that ``pairs`` returns for the kinds of sparse arrays and further factors."""
    cases = [(*kind, *others) for kind, *others in pairs(KINDS, *factors)]
    return pytest.mark.parametrize(("framework", "kind", *names), cases, indirect=["framework"])


def rows(*lengths, dtype="float32", seed=0):
    """Return random values and indices for each replica; indices may repeat within a replica and between replicas."""
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
    """Assert that a sparse result has the slices of all replicas, in their order, and the kind of the inputs."""
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


@crossed(["ops", "op", "lengths"], OPS, ["sum", "mean"], [(2, 4, 1, 1), (0, 3), (2, 0, 2), (0, 0), (3,)])
def test_slices_are_concatenated_in_replica_order(framework, kind, ops, op, lengths):
    """The sum has all slices in the order of the replicas, for all numbers of slices, including 0; slices of one row
    stay separate. The mean divides them by the number of replicas. The inputs do not change."""
    parts = rows(*lengths)
    given = put(framework, kind, parts)
    n = len(given)
    value = cr.PerReplica(given, cpus(*range(n)))
    for devices in (cpus(*range(n)), cpus(4), cpus(1, 0, 3)):
        result = OPS[ops].reduce(op, value, cr.PerReplica([0] * len(devices), devices))
        check_sparse(framework, kind, result, parts, devices, mean=op == "mean", inputs=given)
    for component, (values, indices) in zip(given, parts, strict=True):
        assert np.array_equal(framework.parts(component).values, values)
        assert np.array_equal(framework.parts(component).indices, indices)


@kinds_table
def test_the_dense_form_is_the_dense_sum(framework, kind):
    """The dense form of a sparse result is the dense sum, and the result keeps its dense shape."""
    parts = rows(3, 5, 2)
    given = cr.PerReplica(put(framework, kind, parts), cpus(0, 1, 2))
    for y in cr.HierarchicalCopyAllReduce().reduce("sum", given, given):
        np.testing.assert_array_equal(framework.dense(y, SHAPE), sum(dense(*part) for part in parts))
        shape = y.dense_shape if hasattr(y, "dense_shape") else y.shape
        assert tuple(int(size) for size in shape) == SHAPE


@pytest.mark.parametrize(
    ("framework", "dtype", "kind"),
    [(name, *case) for name in NAMES for case in each(DTYPES, CLASSES[name].kinds)],
    indirect=["framework"],
)
def test_every_dtype(framework, dtype, kind):
    """Slices of every dtype are concatenated; the mean of integers is a float, and half types are rounded once."""
    parts = rows(2, 3, dtype=dtype)
    given = put(framework, kind, parts)
    value = cr.PerReplica(given, cpus(0, 1))
    for op in ("sum", "mean"):
        result = cr.HierarchicalCopyAllReduce().reduce(op, value, value)
        check_sparse(framework, kind, result, parts, cpus(0, 1), mean=op == "mean", inputs=given)


def test_mixed_index_dtypes(framework):
    """Index dtypes may differ between replicas: int32 and int64 become int64."""
    parts = [(v, i.astype(dtype)) for (v, i), dtype in zip(rows(2, 2, 2), ("int32", "int64", "int32"), strict=True)]
    value = cr.PerReplica(put(framework, "IndexedSlices", parts), cpus(0, 1, 2))
    for ops in OPS.values():
        result = ops.reduce("sum", value, value)
        check_sparse(framework, "IndexedSlices", result, parts, cpus(0, 1, 2))
        assert all(framework.to_numpy(y.indices).dtype == np.int64 for y in result)


def test_no_dense_shape(framework):
    """dense_shape may be missing on all replicas or on some; the result has the one that a replica gives, if any."""
    parts = rows(2, 1, 3)
    for shapes, wanted in (((None,) * 3, None), ((None, SHAPE, None), SHAPE)):
        given = [
            framework.sparse("IndexedSlices", v, i, s, k)
            for k, ((v, i), s) in enumerate(zip(parts, shapes, strict=True))
        ]
        value = cr.PerReplica(given)
        result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
        check_sparse(framework, "IndexedSlices", result, parts, cpus(0, 1, 2), inputs=given)
        assert {y.dense_shape for y in result} == {wanted}


@crossed(["ops", "op", "position"], OPS, ["sum", "mean"], [0, 2, 3])
def test_sparse_and_dense_replicas_give_a_dense_result(framework, kind, ops, op, position):
    """A value that is sparse on some replicas and dense on others has a dense result."""
    parts = rows(3, 0, 4)
    full = np.arange(12, dtype="float32").reshape(SHAPE)
    given = put(framework, kind, parts)
    given.insert(position, framework.array(full, position))
    xs = [dense(*part) for part in parts]
    xs.insert(position, full)
    value = cr.PerReplica(given, cpus(0, 1, 2, 3))
    check(framework, OPS[ops].reduce(op, value, value), op, xs, cpus(0, 1, 2, 3), given)
    check(framework, OPS[ops].reduce(op, value, on(1, 5)), op, xs, cpus(1, 5), given)


def test_the_dense_shape_may_be_that_of_a_dense_replica(framework):
    """IndexedSlices without dense_shape get the shape of a dense component of the same value."""
    (v, i), full = rows(3)[0], np.ones(SHAPE, "float32")
    value = cr.PerReplica([framework.sparse("IndexedSlices", v, i, None, 0), framework.array(full, 1)])
    result = cr.ReductionToOneDevice().reduce("sum", value, value)
    check(framework, result, "sum", [dense(v, i), full], cpus(0, 1))


@kinds_table
@pytest.mark.parametrize(
    "ops", [cr.HierarchicalCopyAllReduce(2), cr.NcclAllReduce(), cr.ReductionToOneDevice()], ids=str
)
def test_sparse_and_dense_values_in_one_batch(framework, kind, ops):
    """A batch may contain sparse and dense values; results have the order of the pairs."""
    sparse, xs = rows(2, 1, 3), digits(3, (4,))
    other = rows(1, 1, 1, seed=5)
    batch = [
        cr.PerReplica(put(framework, kind, sparse), cpus(0, 1, 2)),
        cr.PerReplica(framework.arrays(xs), cpus(0, 1, 2)),
        cr.PerReplica(put(framework, "IndexedSlices", other), cpus(0, 1, 2)),
        cr.PerReplica(framework.arrays(xs), cpus(0, 1, 2)),
    ]
    first, second, third, fourth = ops.batch_reduce("sum", [(value, on(2, 0)) for value in batch])
    check_sparse(framework, kind, first, sparse, cpus(2, 0))
    check(framework, second, "sum", xs, cpus(2, 0))
    check_sparse(framework, "IndexedSlices", third, other, cpus(2, 0))
    check(framework, fourth, "sum", xs, cpus(2, 0))


@kinds_table
def test_one_sparse_array(framework, kind):
    """A sparse array may be the value of one replica, a destination, and the value of a broadcast."""
    parts = rows(3)
    (x,) = put(framework, kind, parts)
    for ops in OPS.values():
        check_sparse(framework, kind, ops.reduce("mean", x, "cpu:0"), parts, cpus(0), mean=True, inputs=[x])
        check_sparse(framework, kind, ops.reduce("sum", x, x), parts, cpus(0), inputs=[x])
        check_sparse(framework, kind, ops.broadcast(x, on(2, 0)), parts, cpus(2, 0), inputs=[x])


@kinds_table
def test_gather_of_sparse_components(framework, kind):
    """Gather makes sparse components dense and concatenates them."""
    parts = rows(3, 0, 2)
    value = cr.PerReplica(put(framework, kind, parts), cpus(0, 1, 2))
    for axis in (0, 1):
        for y in cr.HierarchicalCopyAllReduce().gather(value, on(1, 0), axis):
            wanted = np.concatenate([dense(*part) for part in parts], axis)
            np.testing.assert_array_equal(framework.to_numpy(y), wanted)


def test_gather_needs_the_dense_shape(framework):
    """Gather of slices without dense_shape raises an error that states the missing argument."""
    (part,) = rows(2)
    value = cr.PerReplica([framework.sparse("IndexedSlices", *part, None, 0)])
    with pytest.raises(cr.ArgumentError, match="a sparse array without dense_shape cannot be made dense"):
        cr.CrossDeviceOps().gather(value, "cpu:0", 0)


def test_trees_with_sparse_leaves(framework):
    """The leaves of all_reduce may be sparse arrays of every kind."""
    for kind in framework.kinds:
        parts, xs = rows(2, 3), digits(2, (3,))
        trees = [
            {"table": table, "rest": [rest]}
            for table, rest in zip(put(framework, kind, parts), framework.arrays(xs), strict=True)
        ]
        results = cr.all_reduce(trees, "sum")
        check_sparse(framework, kind, cr.Mirrored([r["table"] for r in results], cpus(0, 1)), parts, cpus(0, 1))
        assert [framework.to_numpy(r["rest"][0]).tolist() for r in results] == [np.sum(xs, axis=0).tolist()] * 2


def test_uncoalesced_and_hybrid_coo(torch_):
    """torch's COO arrays may be uncoalesced, coalesced, hybrid, or sparse in all axes; the sum equals torch's."""
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
    """JAX's BCOO arrays may be sparse in all axes or in the first ones."""
    rng = np.random.default_rng(0)
    for sparse_axes, shape in ((1, (6,)), (2, (6, 2)), (1, (6, 2, 3)), (2, (4, 3, 2))):
        xs, wanted = [], np.zeros(shape, "float32")
        for k, count in enumerate((5, 1, 3)):
            indices = np.stack([rng.integers(0, size, count) for size in shape[:sparse_axes]], 1)
            values = rng.integers(-9, 9, (count, *shape[sparse_axes:])).astype("float32")
            xs.append(jax_.sparse("bcoo", values, indices, shape, k))
            np.add.at(wanted, tuple(indices.T), values)
        value = cr.PerReplica(xs, cpus(0, 1, 2))
        for y in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
            assert y.shape == shape
            assert y.n_sparse == sparse_axes
            np.testing.assert_array_equal(np.asarray(y.todense()), wanted)


def test_padded_bcoo(jax_):
    """A BCOO that JAX padded (with indices beyond the shape) keeps its value, also in a value with dense components."""
    x = jax_.bcoo.fromdense(jax_.array(np.array([1.0, 0, 2, 0], "float32"), 0), nse=4)
    y = jax_.bcoo.fromdense(jax_.array(np.array([0.0, 3, 0, 0], "float32"), 1), nse=3)
    value = cr.PerReplica([x, y], cpus(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
        assert np.asarray(z.todense()).tolist() == [1, 3, 2, 0]
    mixed = cr.PerReplica([x, jax_.array(np.ones(4, "float32"), 1)], cpus(0, 1))
    for z in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
        assert np.asarray(z).tolist() == [2, 1, 3, 1]


def test_any_slices(framework):
    """For any slices, the sum and the mean have the slices of all replicas; those of the mean are divided."""
    kinds = st.sampled_from(framework.kinds)
    lengths = st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=4)

    @examples(framework.examples)
    @given(kinds, lengths, st.integers(0, 99), st.sampled_from(["sum", "mean"]), st.sampled_from(list(OPS)))
    def law(kind, lengths, seed, op, ops):
        parts = rows(*lengths, seed=seed)
        value = cr.PerReplica(put(framework, kind, parts), cpus(*range(len(parts))))
        result = OPS[ops].reduce(op, value, value)
        check_sparse(framework, kind, result, parts, value.devices, mean=op == "mean")

    law()


def slices(rows, dtype, shape=(2, 1)):
    """Return IndexedSlices of NumPy arrays; all slices are of row 0."""
    return cr.IndexedSlices(np.array(rows, dtype).reshape(-1, 1), np.zeros(len(rows), int), shape)


@pytest.mark.parametrize(
    ("op", "dtype", "rows", "wanted"),
    [
        ("mean", "float16", [40000, 40000], 40000),
        ("mean", "int8", [100, 100], 100),
        ("sum", "float16", [2048, 1, 1], 2050),
    ],
)
def test_slices_of_one_row_are_added_in_the_accumulator(op, dtype, rows, wanted):
    """A sparse component of a value with dense components is made dense in the dtype that the op accumulates in."""
    value = cr.PerReplica([slices(rows, dtype), np.zeros((2, 1), dtype)])
    assert cr.ReductionToOneDevice().reduce(op, value, "cpu:0")[0][0, 0] == wanted


def test_gathered_slices_keep_their_dtype():
    """Gathering float16 slices adds slices of one row in float32 and returns float16."""
    value = cr.PerReplica([slices([2048, 1, 1], "float16")])
    gathered = cr.CrossDeviceOps().gather(value, "cpu:0", 0)[0]
    assert gathered.dtype == np.float16
    assert gathered[0, 0] == 2050


def test_dense_and_partly_sparse_half_values_share_a_pack(framework):
    """A float16 value that was made dense in float32 can be packed with one that was dense from the start."""
    dense = [framework.array(np.full((5, 2), k + 1, "float16"), k) for k in range(2)]
    rows = framework.sparse("IndexedSlices", np.ones((1, 2), "float16"), np.array([1]), (5, 2), 0)
    mixed = cr.PerReplica([rows, dense[1]])
    plain = cr.PerReplica(dense)
    results = cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(mixed, mixed), (plain, plain)])
    assert framework.to_numpy(results[0][1]).tolist() == [[2, 2], [3, 3], [2, 2], [2, 2], [2, 2]]
    assert framework.to_numpy(results[1][0]).tolist() == [[3, 3]] * 5
    assert str(framework.to_numpy(results[0][0]).dtype) == "float16"


def test_signed_and_unsigned_indices_stay_integers():
    """Indices that are int64 on one replica and uint64 on another become int64, not floats."""
    rows = [
        cr.IndexedSlices(np.ones((1, 2)), np.array([k], kind), (4, 2)) for k, kind in enumerate(["int64", "uint64"])
    ]
    result = cr.ReductionToOneDevice().reduce("sum", cr.PerReplica(rows), "cpu:0")[0]
    assert result.indices.tolist() == [0, 1]
    assert result.indices.dtype == np.int64
