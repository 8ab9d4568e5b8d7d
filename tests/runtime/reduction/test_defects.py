"""The defects of TensorFlow's cross-device reductions, D1 to D17: this library does not have them.

docs/contract.md lists the defects by these numbers. Three of them have no direct counterpart here:

* D5 (the check for the NCCL kernel is always true): this library has no kernel registry. ``test_d05`` checks the
  behaviour without NCCL: a fallback that works and is logged.
* D7 (``reduce_non_distributed_value`` fails for a Python 0): this library has no such function. ``test_d07`` checks
  that a Python 0 can be reduced.
* D16 (``check_inf_nan`` and ``use_mean`` of an inner function raise): this library has no such function. The mean and
  NaN are tested in test_ops.py.
"""

import logging

import numpy as np
import pytest
from budget import examples
from expect import check, cpus, digits, on, small
from frameworks import NAMES
from hypothesis import given as drawn
from hypothesis import strategies as st
from pairs import pairs

import crossreduce as cr
from crossreduce.options import ALGORITHMS
from crossreduce.reduction import pipeline

ALL = [cr.ReductionToOneDevice(), *(cr.AllReduceCrossDeviceOps(name) for name in ALGORITHMS)]


def value(framework, xs):
    return cr.PerReplica(framework.arrays(xs), cpus(*range(len(xs))))


@pytest.mark.parametrize(
    ("n", "packs", "framework"), pairs([3, 5, 7, 9, 11, 17], [0, 1, 3], NAMES), indirect=["framework"]
)
def test_d01_odd_numbers_of_devices(framework, n, packs):
    """D1: hierarchical copy on an odd number of devices includes the last one; the mean is the true mean."""
    xs = [np.full(2, 2.0**k) for k in range(n)]
    given = value(framework, xs)
    ops = cr.HierarchicalCopyAllReduce(packs)
    for y in ops.reduce("sum", given, given):
        assert framework.to_numpy(y).tolist() == [2.0**n - 1] * 2
    for y in ops.batch_reduce("mean", [(given, given)])[0]:
        assert framework.to_numpy(y).tolist() == [(2.0**n - 1) / n] * 2


def test_d02_one_device(framework):
    """D2: every algorithm works on one device, in a batch and alone, and returns a Mirrored."""
    (x,) = xs = small("float32", (3,), 1)
    for ops in ALL:
        given = value(framework, xs)
        check(framework, ops.reduce("mean", given, given), "mean", xs, cpus(0), given)
        (result,) = ops.batch_reduce("sum", [(framework.array(x), "cpu:0")])
        check(framework, result, "sum", xs, cpus(0), given)


def test_d03_shapes_that_packing_could_hide(framework):
    """D3: replicas of different shape raise an error even if the sizes of the whole batch agree."""
    a = [np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32")]
    with pytest.raises(cr.MismatchError, match=r"float32\[2, 3\](.|\n)*float32\[3, 2\]"):
        cr.HierarchicalCopyAllReduce(2).reduce("sum", value(framework, a), "cpu:0")
    b, c = [np.zeros(2), np.zeros(3)], [np.zeros(3), np.zeros(2)]
    pairs = [(value(framework, b), "cpu:0"), (value(framework, c), "cpu:0")]
    with pytest.raises(cr.MismatchError, match="pair 0: the replicas of one value differ"):
        cr.HierarchicalCopyAllReduce(1).batch_reduce("sum", pairs)
    with pytest.raises(cr.MismatchError, match=r"leaf tree\['a'\]: the replicas of one value differ"):
        cr.all_reduce([{"a": b[0], "b": c[0]}, {"a": b[1], "b": c[1]}])


def test_d04_a_packed_batch_of_several_dtypes(framework):
    """D4: a packed batch may contain several dtypes, complex and real ones included."""
    rows = [small(dtype, (3,), 3, k) for k, dtype in enumerate(["float32", "complex64", "float16", "int32", "float32"])]
    for packs in (1, 2, 4):
        ops = cr.HierarchicalCopyAllReduce(packs)
        pairs = [(value(framework, xs), on(0, 1, 2)) for xs in rows]
        for xs, result in zip(rows, ops.batch_reduce("sum", pairs), strict=True):
            check(framework, result, "sum", xs, cpus(0, 1, 2))


def test_d05_without_nccl(framework, caplog):
    """D5: "nccl" on devices without NCCL plans "auto", returns the correct result, and logs that once, at INFO."""
    pipeline.log_once.cache_clear()
    xs = digits(3, (2,))
    given = value(framework, xs)
    with caplog.at_level(logging.DEBUG, "crossreduce"):
        for ops in (cr.NcclAllReduce(), cr.AllReduceCrossDeviceOps(), cr.NcclAllReduce(4)):
            check(framework, ops.reduce("sum", given, given), "sum", xs, cpus(0, 1, 2), given)
    records = [record for record in caplog.records if "nccl" in record.getMessage()]
    assert len(records) == 1
    assert records[0].levelno == logging.INFO
    assert '"nccl" plans "auto"' in records[0].getMessage()


def test_d06_batches_of_integers(framework):
    """D6: a batch may contain several int32 values, alone or together with floats."""
    for dtypes in (["int32"] * 3, ["int32", "float32"], ["float32", "int32", "int64"]):
        rows = [small(dtype, (2,), 2, k) for k, dtype in enumerate(dtypes)]
        for ops in ALL:
            results = ops.batch_reduce("sum", [(value(framework, xs), on(0, 1)) for xs in rows])
            for xs, result in zip(rows, results, strict=True):
                check(framework, result, "sum", xs, cpus(0, 1))


def test_d07_python_zeros():
    """D7: a Python 0 or 0.0 is a valid value."""
    for ops in ALL:
        for zero, dtype in ((0, "int64"), (0.0, "float64")):
            (y,) = ops.reduce("sum", zero, "cpu:0")
            assert (y.item(), y.dtype.name, y.shape) == (0, dtype, ())
            assert [y.item() for y in cr.all_reduce([zero, zero, zero], cross_device_ops=ops)] == [0] * 3


def test_d08_empty_batches():
    """D8: the result of an empty list or generator of pairs is an empty list; trees may have no leaves."""
    for ops in ALL:
        assert ops.batch_reduce("sum", []) == []
        assert ops.batch_reduce("mean", (pair for pair in ())) == []
        assert cr.all_reduce([{}, {}], cross_device_ops=ops) == [{}, {}]


def test_d09_ops_are_checked():
    """D9: "MEAN" is the mean, and an unknown reduction raises an error, also for one replica and an empty batch."""
    given = cr.PerReplica([np.array([1.0]), np.array([3.0])])
    for ops in ALL:
        for mean in ("MEAN", "Mean", "mean", cr.ReduceOp.MEAN):
            assert ops.reduce(mean, given, "cpu:0")[0].item() == 2
        for wrong in ("average", "add", 0, None, object()):
            for call in (
                lambda ops=ops, wrong=wrong: ops.reduce(wrong, given, "cpu:0"),
                lambda ops=ops, wrong=wrong: ops.reduce(wrong, 1.0, "cpu:0"),
                lambda ops=ops, wrong=wrong: ops.batch_reduce(wrong, []),
            ):
                with pytest.raises(cr.ArgumentError, match="this is not a known reduction"):
                    call()


def test_d10_mirrored_values(framework):
    """D10: both reduce and batch_reduce reduce a Mirrored like a PerReplica: the sum of 5 and 5 is 10."""
    given = cr.Mirrored(framework.arrays([np.float32(5), np.float32(5)]), cpus(0, 1))
    for ops in ALL:
        for op, wanted in (("sum", 10), ("mean", 5), ("max", 5), ("product", 25)):
            assert [framework.to_numpy(y).item() for y in ops.reduce(op, given, given)] == [wanted] * 2
            assert [framework.to_numpy(y).item() for y in ops.batch_reduce(op, [(given, given)])[0]] == [wanted] * 2


def test_d11_a_result_does_not_depend_on_its_batch(framework):
    """D11: the exact result of a value does not depend on the other values of its batch, or on the packing."""
    numbers = st.integers(1, 4)
    rows = st.tuples(st.sampled_from(["int32", "float32"]), st.sampled_from([(), (0,), (3,)]), numbers, numbers)

    @examples(framework.examples // 2)
    @drawn(st.lists(rows, max_size=4), st.lists(rows, max_size=4), st.integers(0, 3), st.sampled_from(ALGORITHMS))
    def law(before, after, packs, algorithm):
        xs = digits(3, (3,))
        ops = cr.AllReduceCrossDeviceOps(algorithm, packs)
        others = [
            [(value(framework, small(d, s, n)), on(*range(to))) for d, s, n, to in part] for part in (before, after)
        ]
        given = value(framework, xs)
        result = ops.batch_reduce("sum", [*others[0], (given, given), *others[1]])[len(before)]
        check(framework, result, "sum", xs, cpus(0, 1, 2), given)

    law()


def test_d11_bits_do_not_depend_on_the_batch():
    """D11: with a fixed algorithm, floats give the same bits, alone or in a batch with values on other devices."""
    rng = np.random.default_rng(3)
    given = cr.PerReplica([rng.normal(size=3).astype("float32") for _ in range(9)])
    other = cr.PerReplica([np.ones(2, "float32")] * 2)
    for ops in (cr.ReductionToOneDevice(), cr.HierarchicalCopyAllReduce(), cr.HierarchicalCopyAllReduce(0)):
        alone = ops.reduce("sum", given, given)[0].tobytes()
        for batch in ([(given, given), (other, other)], [(given, given), (given, "cpu:5")], [(given, given)]):
            assert ops.batch_reduce("sum", batch)[0][0].tobytes() == alone


def test_d12_the_order_of_the_destinations(framework):
    """D12: components have the order of the destinations, for every algorithm, alone and in a batch."""
    xs = digits(3, (2,))
    given = value(framework, xs)
    for ops in ALL:
        check(framework, ops.reduce("sum", given, on(2, 0, 1)), "sum", xs, cpus(2, 0, 1), given)
        for result, to in zip(
            ops.batch_reduce("sum", [(given, on(1, 0, 2)), (given, on(0, 1, 2))]), [(1, 0, 2), (0, 1, 2)], strict=True
        ):
            check(framework, result, "sum", xs, cpus(*to), given)


def test_d13_two_replicas_on_one_device(framework):
    """D13: two arrays on one device are two replicas; a result on one destination has one component."""
    xs = digits(2, (2,))
    given = cr.PerReplica([framework.array(x, 0) for x in xs])
    assert len(set(given.devices)) == 2
    for ops in ALL:
        check(framework, ops.reduce("sum", given, "cpu:0"), "sum", xs, cpus(0), given)
        (result,) = ops.batch_reduce("sum", [(given, "CPU:0")])
        check(framework, result, "sum", xs, cpus(0), given)
        assert len(ops.reduce("sum", given, given)) == 2
    with pytest.raises(cr.ArgumentError, match="each device may be listed only once"):
        cr.PerReplica(list(given), ["CPU:0", "cpu:0"])


def test_d14_means_of_small_types(framework):
    """D14: the mean of 40000 and 40000 in float16 is 40000, not inf; of 100 and 100 in int8 100, not -28."""
    for ops in ALL:
        for dtype, number in (("float16", 40000), ("int8", 100)):
            given = value(framework, [np.full(2, number, dtype)] * 2)
            for result in (ops.reduce("mean", given, given), ops.batch_reduce("mean", [(given, given)])[0]):
                for y in result:
                    assert framework.to_numpy(y).tolist() == [number] * 2


@pytest.mark.parametrize("group", [0, 1, 2, 3, 10, 12])
def test_d15_groups_of_small_tensors(monkeypatch, group):
    """D15: agg_small_grads_max_group=g joins at most g tensors: 25 scalars are in ceil(25/g) buffers; 0 joins none."""
    runs = []
    layouts = pipeline.layouts

    def record(*args):
        found = layouts(*args)
        runs.extend(lowered.buffer.size for layout in found for lowered in layout.buffers)
        return found

    monkeypatch.setattr(pipeline, "layouts", record)
    given = cr.PerReplica([np.float32(1), np.float32(2)], cpus(0, 1))
    results = cr.AllReduceCrossDeviceOps("one_device", 0, 100, group).batch_reduce("sum", [(given, given)] * 25)
    assert [y.item() for result in results for y in result] == [3.0] * 50
    assert sum(runs) == 25
    assert max(runs) == max(1, min(group, 25))
    assert len(runs) == -(-25 // max(1, group))


class Falsy(cr.HierarchicalCopyAllReduce):
    """Cross-device ops whose truth value is False."""

    used = 0

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def batch_reduce_implementation(self, op, pairs, options):
        self.used += 1
        return super().batch_reduce_implementation(op, pairs, options)


def test_d17_the_type_of_cross_device_ops():
    """D17: a class, a name or another object raises a TypeError; a falsy instance is used and not replaced."""
    for wrong in (
        cr.HierarchicalCopyAllReduce,
        "hierarchical_copy",
        object(),
        0,
        [],
        type("Duck", (), {"batch_reduce": max})(),
    ):
        with pytest.raises(TypeError, match="cross_device_ops must be"):
            cr.all_reduce([1.0, 2.0], cross_device_ops=wrong)
    ops = Falsy()
    assert [y.item() for y in cr.all_reduce([1.0, 2.0, 4.0], cross_device_ops=ops)] == [7.0] * 3
    assert ops.used == 1
