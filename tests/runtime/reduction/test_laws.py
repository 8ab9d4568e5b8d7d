"""Laws of the cross-device ops, for any request, dtype, op, algorithm and packing that hypothesis draws."""

from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import strategies
from budget import examples
from expect import check, check_memory, cpus, result_dtype, unchanged
from frameworks import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from running import ENGINES, only

import crossreduce as cr

# Few shapes, since JAX compiles for each of them.
FEW_SHAPES = st.sampled_from([(), (0,), (5,), (3, 2)])


class Call(NamedTuple):
    """A batch: the op's name, rows of (arrays, request), the cross-device ops and the options."""

    op: str
    rows: list[tuple[list[np.ndarray[Any, Any]], tuple[str, ...]]]
    ops: cr.CrossDeviceOps
    options: cr.CommunicationOptions


def dtypes_of(framework):
    """Return a strategy for the dtypes of a framework: the common ones; for NumPy also the wider unsigned integers."""
    return strategies.dtypes if framework.name == "numpy" else st.sampled_from(DTYPES)


def make_ops(draw, algorithm, packing):
    if algorithm == "ReductionToOneDevice":
        return cr.ReductionToOneDevice(draw(st.sampled_from([None, "cpu:0", "cpu:16"])))
    return cr.AllReduceCrossDeviceOps(algorithm, packing.num_packs, packing.small_bytes, packing.small_group)


@st.composite
def calls(draw, framework, most=17, rows=3):
    algorithm = draw(st.one_of(strategies.algorithms, st.sampled_from(["auto", "nccl", "ReductionToOneDevice"])))
    packing = draw(strategies.packings())
    op = draw(strategies.ops)
    usable = dtypes_of(framework).filter(lambda dtype: op in strategies.ops_for(dtype))
    shapes = FEW_SHAPES if framework.name == "jax" else strategies.shapes
    batch = []
    for _ in range(draw(st.integers(1, rows))):
        ask = draw(strategies.requests(st.integers(1, most)))
        xs = draw(strategies.arrays(draw(usable), draw(shapes), len(ask.sources)))
        batch.append((xs, ask))
    return Call(op, batch, make_ops(draw, algorithm, packing), cr.CommunicationOptions(packing.bytes_per_pack))


def number(device):
    return int(device.removeprefix("cpu:"))


def put(framework, xs, ask):
    return cr.PerReplica([framework.array(x, number(d)) for x, d in zip(xs, ask.sources, strict=True)], ask.sources)


def test_any_batch(framework):
    """Any batch, destinations, algorithm and packing give the oracle's results, and inputs are not written."""
    check_any_batch(framework, framework.examples)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "host"])
def test_any_batch_on_every_engine(numpy_, engine):
    """Any batch gives the oracle's results also on the engines other than host, NumPy's default engine."""
    with only(engine):
        check_any_batch(numpy_, numpy_.examples // 2)


def check_any_batch(framework, count):
    @examples(count)
    @given(calls(framework, most=5 if framework.name == "jax" else 17))
    def law(call):
        values = [put(framework, xs, ask) for xs, ask in call.rows]
        pairs = [
            (v, cr.PerReplica([0] * len(ask.destinations), ask.destinations))
            for v, (_, ask) in zip(values, call.rows, strict=True)
        ]
        inputs = [x for v in values for x in v]
        with np.errstate(all="ignore"):  # integers over their whole range overflow
            results = call.ops.batch_reduce(call.op, pairs, call.options)
        for v, (xs, ask), result in zip(values, call.rows, results, strict=True):
            check(framework, result, call.op, xs, ask.destinations, inputs)
            assert unchanged(framework, v, xs)
        check_memory(framework, [y for result in results for y in result], inputs)

    law()


def test_reduce_equals_a_batch_of_one(framework):
    """reduce gives the same bits as a batch of one value."""

    @examples(framework.examples // 2)
    @given(calls(framework, most=5, rows=1))
    def law(call):
        ((xs, ask),) = call.rows
        value = put(framework, xs, ask)
        to = cr.PerReplica([0] * len(ask.destinations), ask.destinations)
        with np.errstate(all="ignore"):
            one = call.ops.reduce(call.op, value, to, call.options)
            (other,) = call.ops.batch_reduce(call.op, [(value, to)], call.options)
        assert [framework.to_numpy(y).tobytes() for y in one] == [framework.to_numpy(y).tobytes() for y in other]

    law()


def test_all_frameworks_agree(numpy_, torch_, jax_, tensorflow_):
    """One schedule gives the same bits in all frameworks: floats and integers, under sum, min, max and product."""
    frameworks = (numpy_, torch_, jax_, tensorflow_)

    @examples(15)
    @given(
        st.sampled_from(["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]),
        st.sampled_from(["sum", "min", "max", "product"]),
        st.sampled_from([*strategies.ALGORITHMS]),
        st.sampled_from([2, 3, 5]),
        st.integers(0, 99),
    )
    def law(dtype, op, algorithm, n, seed):
        rng = np.random.default_rng(seed)
        xs = [(rng.normal(size=5) * 100).astype(oracle.dtype_of(dtype)) for _ in range(n)]
        names = tuple(f"cpu:{k}" for k in range(n))
        bits = set()
        for framework in frameworks:
            value = cr.PerReplica(framework.arrays(xs), names)
            with np.errstate(all="ignore"):
                result = cr.AllReduceCrossDeviceOps(algorithm).reduce(op, value, value)
            bits |= {framework.to_numpy(y).tobytes() for y in result}
        assert len(bits) == 1

    law()


def test_gather_undoes_a_split(framework):
    """A gather of the parts of an array that was split along an axis, at any cuts, is that array."""

    @examples(framework.examples // 2)
    @given(st.data())
    def law(data):
        shape = data.draw(st.sampled_from([(6,), (4, 3), (0, 2), (2, 3, 4)]))
        (x,) = data.draw(strategies.arrays(data.draw(dtypes_of(framework)), shape, 1))
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))
        parts = np.split(x, sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=3))), axis)
        value = cr.PerReplica(framework.arrays(parts), cpus(*range(len(parts))))
        for y in cr.CrossDeviceOps().gather(value, value, axis):
            assert framework.to_numpy(y).dtype == x.dtype
            assert np.array_equal(framework.to_numpy(y), x)

    law()


def test_trees_equal_their_leaves(framework):
    """all_reduce of a tree gives the oracle's result for each of its leaves."""
    leaves = st.tuples(st.sampled_from(["float32", "int32"]), FEW_SHAPES)
    trees = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda nodes: ["list", *nodes]),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=6,
    )

    def fill(tree, rng, k):
        if isinstance(tree, tuple):
            dtype, shape = tree
            return framework.array(np.asarray(rng.integers(-9, 9, shape)).astype(dtype), k)
        if isinstance(tree, dict):
            return {key: fill(tree[key], rng, k) for key in sorted(tree)}
        return [fill(node, rng, k) for node in tree[1:]]

    def flat(tree):
        if isinstance(tree, dict):
            return [leaf for key in sorted(tree) for leaf in flat(tree[key])]
        return [leaf for node in tree for leaf in flat(node)] if isinstance(tree, list) else [tree]

    @examples(framework.examples // 2)
    @given(trees, st.integers(1, 4), strategies.ops, st.integers(0, 99))
    def law(tree, n, op, seed):
        rng = np.random.default_rng(seed)
        replicas = [fill(tree, rng, k) for k in range(n)]
        columns = list(zip(*(flat(replica) for replica in replicas), strict=True))
        results = cr.all_reduce(replicas, op, cross_device_ops=cr.HierarchicalCopyAllReduce(2))
        assert len(results) == n
        names = [f"cpu:{k}" for k in range(n)]
        outs = list(zip(*(flat(result) for result in results), strict=True))
        for column, out in zip(columns, outs, strict=True):
            xs = [framework.to_numpy(x) for x in column]
            check(framework, cr.Mirrored(out, names), op, xs, names, column)
            assert framework.to_numpy(out[0]).dtype.name == result_dtype(framework, op, xs[0].dtype.name)

    law()
