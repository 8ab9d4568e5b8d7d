"""The contract of reduce, batch_reduce, broadcast and gather, on every framework."""

import itertools
import logging

import numpy as np
import oracle
import pytest
from expect import check, check_memory, check_places, cpus, digits, on, small, unchanged, value
from frameworks import DTYPES, NAMES, defined
from pairs import each, pairs

import crossreduce as cr
from crossreduce.options import ALGORITHMS
from crossreduce.reduction import pipeline

OPS = {
    "ReductionToOneDevice": cr.ReductionToOneDevice(),
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "unpacked": cr.HierarchicalCopyAllReduce(0),
    "7 packs": cr.AllReduceCrossDeviceOps("one_device", 7),
} | {name: cr.AllReduceCrossDeviceOps(name) for name in ALGORITHMS if name not in ("nccl", "hierarchical_copy")}
REDUCTIONS = ("sum", "mean", "min", "max", "product")


def table(**factors):
    """Parametrize a test over all pairs of values of ``framework`` and the factors. The cases use the ops in turn."""
    cases = [(*case, ops) for case, ops in each(pairs(NAMES, *factors.values()), OPS)]
    rows = [pytest.param(*case[:-1], OPS[case[-1]], id="-".join(map(str, case)).replace(" ", "")) for case in cases]
    return pytest.mark.parametrize(("framework", *factors, "ops"), rows, indirect=["framework"])


DESTINATIONS = [(1,), (2, 0, 1), (16, 0), (0,), (6, 2), (4, 2, 3, 1, 0)]


@table(n=(1, 2, 3, 5, 8, 17))
def test_every_contribution_counts_once(framework, n, ops):
    """No contribution is lost, doubled or misplaced on any destinations. A result can be reduced again."""
    xs = digits(n, (5,))
    given = value(framework, xs)
    batch = [(given, on(*to)) for to in (range(n), *DESTINATIONS[n % 3 :: 3])]
    results = [*(ops.reduce("sum", *pair) for pair in batch), *ops.batch_reduce("sum", batch)]
    for result, (_, to) in zip(results, batch * 2, strict=True):
        check(framework, result, "sum", xs, to.devices, given)
    check_memory(framework, [y for result in results for y in result], given)
    if n == 3:
        for second in (ops.reduce("sum", results[0], results[0]), *ops.batch_reduce("sum", [(results[0],) * 2])):
            check(framework, second, "product", [np.sum(xs, axis=0), np.array([3] * 5)], cpus(0, 1, 2), results[0])
    assert unchanged(framework, given, xs)


SHAPES = [(3, 2), (), (0,), (1,), (2, 0, 3), (2, 3, 1), (1000,)]


@table(case=[*each(DTYPES, SHAPES), *each(["float32", "int32"], SHAPES[1:])])
def test_every_dtype_and_shape(framework, ops, case):
    """Every reduction equals the oracle in values, shape and dtype. An undefined one raises an error with a remedy."""
    dtype, shape = case
    xs = small(dtype, shape, 4)
    given = value(framework, xs)
    for op in REDUCTIONS if shape != (1000,) else ("sum", "mean"):
        if defined(op, dtype):
            check(framework, ops.reduce(op, given, given), op, xs, cpus(0, 1, 2, 3), given)
        else:
            words = rf'the {op} of bools(.|\n)*"max" \(any\)' if dtype == "bool" else f"the {op} of complex numbers"
            with pytest.raises(cr.UnsupportedError, match=words) as caught:
                ops.reduce(op, given, given)
            assert dtype in str(caught.value)
    assert unchanged(framework, given, xs)


def test_destinations(framework):
    """A device may be spelled in many ways. An array means its device. Arrays on one device are several replicas."""
    xs = digits(2, (3,))
    given = value(framework, xs)
    for name in ("CPU:1", "/cpu:1", "device:cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1", "cpu:1#0"):
        for ops in (cr.ReductionToOneDevice(name), cr.HierarchicalCopyAllReduce()):
            check(framework, ops.reduce("sum", given, name), "sum", xs, cpus(1), given)
            check(framework, ops.broadcast(given[0], name), "sum", xs[:1], cpus(1), given)
            check(framework, ops.gather(given, name, 0), "sum", [np.concatenate(xs)], cpus(1), given)
        assert cr.PerReplica(list(given), ["cpu:0", name]).devices == cpus(0, 1)
    array = framework.array(np.arange(7.0), 1)
    here = framework.device_of(array)
    together = cr.PerReplica([framework.array(x, 0) for x in xs])
    same = cr.PerReplica([given[0]] * 2, cpus(0, 1))
    assert len(set(together.devices)) == 2
    for ops in OPS.values():
        result = ops.reduce("sum", given, array)
        check(framework, result, "sum", xs, ("cpu:0" if here == "cpu" else here,), [*given, array])
        check(framework, ops.reduce("sum", together, "cpu:0"), "sum", xs, cpus(0), together)
        check(framework, ops.reduce("sum", same, same), "sum", [xs[0]] * 2, cpus(0, 1), [given[0]])
    assert unchanged(framework, [array], [np.arange(7.0)])


@table()
def test_batches(framework, ops):
    """A batch is any iterable of pairs, of several dtypes and shapes, with a value twice. Results keep the order."""
    kinds = [("float32", (3,), 3), ("int32", (), 1), ("complex64", (2,), 2), ("float32", (0,), 3), ("float32", (3,), 3)]
    rows = [small(*kind) for kind in kinds]
    values = [value(framework, xs) for xs in rows[:4]]
    batch = [(v, v) for v in (*values, values[0])]
    for made in (map(list, batch), dict(enumerate(batch)).values()):
        for xs, (v, _), result in zip(rows, batch, ops.batch_reduce("sum", made), strict=True):
            check(framework, result, "sum", xs, v.devices, v)
    assert [ops.batch_reduce("sum", empty) for empty in ([], (), iter([]))] == [[]] * 3


@table()
def test_zeros_and_denormals(framework, ops):
    """Negative zeros keep their sign. Denormals are added exactly, also where a framework's own sums flush them."""
    for n in (1, 2, 3, 5):
        given = value(framework, [np.full(3, -0.0, "float32")] * n)
        for op in ("sum", "mean", "min", "max"):
            assert all(np.signbit(framework.to_numpy(y)).all() for y in ops.reduce(op, given, given)), op
    given = value(framework, [np.full(3, 2.0**-140, "float32")] * 4)
    for y in ops.reduce("sum", given, given):
        assert framework.to_numpy(y).tolist() == [2.0**-138] * 3


@table(dtype=["float16", "bfloat16"])
def test_halves_are_rounded_once(framework, ops, dtype):
    """Half types accumulate in float32: 2048 + 1 + 1 + ... counts every 1. Means of large numbers do not overflow."""
    kind, big = oracle.dtype_of(dtype), 2048 if dtype == "float16" else 256  # above it, only even integers
    given = value(framework, [np.full(2, number, kind) for number in (big, 1, 1, 1, 1, 1, 1, 1, 1)])
    for op, wanted in (("sum", big + 8), ("mean", (big + 8) / 9)):
        for y in ops.reduce(op, given, given):
            assert framework.to_numpy(y).tolist() == np.full(2, wanted).astype(kind).tolist()
    # An intermediate product overflows float16 and the final one does not: only the final rounding counts.
    for op, numbers in (("product", (300.0, 300.0, 0.0078125)), ("mean", (40000.0, 40000.0, 40000.0))):
        xs = [np.array([number], kind) for number in numbers]
        given = value(framework, xs)
        check(framework, ops.reduce(op, given, given), op, xs, cpus(0, 1, 2), given)


@table(dtype=["float32", "bfloat16", "int8", "bool", "complex64"])
def test_broadcast_and_gather(framework, ops, dtype):
    """Broadcast copies the bits to every destination. Gather concatenates in the order of the replicas."""
    bits = np.array([0x7FC12345, 0x80000000, 0x00000001, 0xFF800000], "uint32").view("float32")  # NaN, -0, denormal
    rows = [((2, 3), 0, (0, 1, 2)), ((), 1, (2, 1)), ((0,), 0, (3,)), ((5,), 2, (2,)), (None, 1, (3, 1, 0))]
    for shape, at, to in rows:
        x = bits if shape is None else small(dtype, shape, 1)[0]
        array = framework.array(x, at)
        result = ops.broadcast(array, on(*to))
        check_places(framework, result, cpus(*to))
        for y in result:
            got = framework.to_numpy(y)
            assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
        check_memory(framework, result, [array])
        assert unchanged(framework, [array], [x])
    joined = [((2, 0, 3, 1), (0, 1, 2, 3)), ((2,), (2, 0)), ((1, 2), (5,))]
    for (sizes, to), axis in itertools.product(joined, (0, np.int64(1), -1, -2)):
        shapes = [(size, 2) if axis in (0, -2) else (2, size) for size in sizes]
        xs = [small(dtype, shape, 1, seed)[0] for seed, shape in enumerate(shapes)]
        given = value(framework, xs)
        check(framework, ops.gather(given, on(*to), axis), "product", [np.concatenate(xs, axis)], cpus(*to), given)
        assert unchanged(framework, given, xs)


def test_plans_are_logged(capsys, caplog, framework):
    """At INFO, each plan is logged once. ``options.implementation`` is used by ops without an own algorithm."""
    xs, options = digits(2, (3,)), cr.CommunicationOptions(implementation="RING")
    given = value(framework, xs)
    pipeline.log_once.cache_clear()
    pipeline.layouts.cache_clear()
    plans = []
    with caplog.at_level(logging.INFO, "crossreduce"):
        for ops in (OPS["direct"], cr.AllReduceCrossDeviceOps(), cr.NcclAllReduce()):
            for hints in (options, None, options):
                check(framework, ops.reduce("sum", given, on(1, 0, 15), hints), "sum", xs, cpus(1, 0, 15), given)
            lines = [record.getMessage() for record in caplog.records]
            plans.append({line.split()[3].strip(":") for line in lines if line.startswith("new plan: ")})
    assert [("ring" in names, "direct" in names) for names in plans] == [(False, True), (True, True), (True, True)]
    assert len(lines) == len(set(lines))
    assert len([line for line in lines if '"nccl" plans "auto"' in line]) == 1
    assert capsys.readouterr() == ("", "")
