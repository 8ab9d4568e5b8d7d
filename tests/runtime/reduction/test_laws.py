"""Laws of the cross-device ops, for any request, dtype, op, algorithm and packing that hypothesis draws."""

from typing import Any, NamedTuple

import numpy as np
import oracle
import strategies
from budget import examples
from expect import check, check_memory, result_dtype, unchanged, value
from frameworks import DTYPES
from guarded import GUARD, POISON, WRITABLE, Arrays
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr

# Few shapes, since JAX compiles for each of them.
FEW_SHAPES = st.sampled_from([(), (0,), (5,), (3, 2)])


class Row(NamedTuple):
    """A value, the devices of its result, and for each of these the component that ``out`` overwrites, if any."""

    xs: list[np.ndarray[Any, Any]]
    ask: strategies.DeviceRequest
    targets: list[int | None]


@st.composite
def calls(draw, framework):
    """Draw the op, the rows, the cross-device ops and the options of a batch."""
    most, shapes = (5, FEW_SHAPES) if framework.name == "jax" else (17, strategies.shapes)
    known = strategies.dtypes if framework.name == "numpy" else st.sampled_from(DTYPES)
    op, packing = draw(strategies.ops), draw(strategies.packings())
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(known.filter(lambda dtype: op in strategies.ops_for(dtype)))
        ask = draw(strategies.requests(st.integers(1, most)))
        xs = draw(strategies.arrays(dtype, draw(shapes), len(ask.sources)))
        targets: list[int | None] = [None] * len(ask.destinations)
        if result_dtype(framework, op, dtype) == dtype and draw(st.booleans()):
            for k, source in enumerate(draw(st.permutations(range(len(xs))))[: len(targets)]):
                targets[k] = draw(st.sampled_from([source, source, None]))
        rows.append(Row(xs, ask, targets))
    algorithm = draw(st.one_of(strategies.algorithms, st.sampled_from(["auto", "nccl"])))
    ops = cr.AllReduceCrossDeviceOps(algorithm, packing.num_packs, packing.small_bytes, packing.small_group)
    if draw(st.integers(0, 3)) == 0:
        ops = cr.ReductionToOneDevice(draw(st.sampled_from([None, "cpu:0", "cpu:16"])))
    return op, rows, ops, cr.CommunicationOptions(packing.bytes_per_pack)


def put(framework, arrays, row):
    if arrays:
        return arrays.value(row.xs, row.ask.sources)
    numbers = [int(device.removeprefix("cpu:")) for device in row.ask.sources]
    components = [framework.array(x, k) for x, k in zip(row.xs, numbers, strict=True)]
    return cr.PerReplica(components, row.ask.sources)


def test_any_batch(framework):
    """Any batch gives the results of the oracle and writes no input. ``out`` receives the same bits."""

    @examples(framework.examples)
    @given(calls(framework))
    def law(call):
        op, rows, ops, options = call
        arrays = Arrays(framework) if framework.name in WRITABLE else None
        values = [put(framework, arrays, row) for row in rows]
        to = [cr.PerReplica([0] * len(row.ask.destinations), row.ask.destinations) for row in rows]
        pairs = list(zip(values, to, strict=True))
        inputs = [x for v in values for x in v]
        with np.errstate(all="ignore"):  # integers over their whole range overflow
            results = ops.batch_reduce(op, pairs, options)
        for v, row, result in zip(values, rows, results, strict=True):
            check(framework, result, op, row.xs, row.ask.destinations, inputs)
            assert unchanged(framework, v, row.xs)
        check_memory(framework, [y for result in results for y in result], inputs)
        if arrays:
            check_out(arrays, call, pairs, results)

    law()


def check_out(arrays, call, pairs, wanted):
    """Check that ``out``, with new arrays or in place, receives the same bits, and that no other byte changes."""
    op, rows, ops, options = call
    outs = []
    for (v, _), row in zip(pairs, rows, strict=True):
        dtype = result_dtype(arrays.framework, op, row.xs[0].dtype.name)
        made = [arrays.blank(row.xs[0].shape, dtype) if k is None else v[k] for k in row.targets]
        outs.append(cr.PerReplica(made, row.ask.destinations))
    with np.errstate(all="ignore"):
        results = ops.batch_reduce(op, pairs, options, out=iter(outs))
    for (v, _), row, out, result, due in zip(pairs, rows, outs, results, wanted, strict=True):
        assert type(result) is cr.Mirrored
        assert result.devices == row.ask.destinations
        assert all(y is target for y, target in zip(result, out, strict=True))
        assert [arrays.bits(y) for y in result] == [arrays.bits(y) for y in due]
        for k, (x, component) in enumerate(zip(row.xs, v, strict=True)):
            assert k in row.targets or arrays.bits(component) == x.tobytes()
    for block in arrays.blocks:
        assert (block[:GUARD] == POISON).all()
        assert (block[block.size - GUARD :] == POISON).all()


@examples(15)
@given(
    st.sampled_from(["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]),
    st.sampled_from(["sum", "min", "max", "product"]),
    st.sampled_from([*strategies.ALGORITHMS]),
    st.sampled_from([2, 3, 5]),
    st.integers(0, 99),
)
def test_all_frameworks_agree(numpy_, torch_, jax_, tensorflow_, dtype, op, algorithm, n, seed):
    """One schedule gives the same bits in all frameworks, for floats and integers, and sum, min, max and product."""
    rng = np.random.default_rng(seed)
    xs = [(rng.normal(size=5) * 100).astype(oracle.dtype_of(dtype)) for _ in range(n)]
    bits = set()
    for framework in (numpy_, torch_, jax_, tensorflow_):
        given = value(framework, xs)
        with np.errstate(all="ignore"):
            result = cr.AllReduceCrossDeviceOps(algorithm).reduce(op, given, given)
        bits |= {framework.to_numpy(y).tobytes() for y in result}
    assert len(bits) == 1
