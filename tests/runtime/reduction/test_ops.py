"""The contract of reduce, batch_reduce, broadcast and gather, on every framework."""

import logging
import threading

import numpy as np
import oracle
import pytest
from expect import check, check_memory, check_places, digits, result_dtype, small, unchanged
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


def table(**factors):
    """Parametrize a test by framework, op and further factors, so that every pair of their values occurs."""
    return parametrized(pairs(NAMES, OPS, *factors.values()), factors)


def short_table(**factors):
    """Parametrize a test whose factors are independent: every value of each factor occurs."""
    return parametrized(each(NAMES, OPS, *factors.values()), factors)


def parametrized(cases, factors):
    rows = [
        pytest.param(framework, OPS[ops], *more, id="-".join(map(str, (framework, ops, *more))).replace(" ", ""))
        for framework, ops, *more in cases
    ]
    return pytest.mark.parametrize(("framework", "ops", *factors), rows, indirect=["framework"])


ops_table = pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())  # for tests with one framework


REDUCTIONS = ("sum", "mean", "min", "max", "product")
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)


def names(*numbers):
    return tuple(f"cpu:{k}" for k in numbers)


def on(*numbers):
    """Return destinations on the devices with these numbers."""
    return cr.PerReplica([0] * len(numbers), names(*numbers))


def value(framework, xs):
    return cr.PerReplica(framework.arrays(xs), names(*range(len(xs))))


# ---- results ----------------------------------------------------------------------------------------------------


@table(n=COUNTS)
def test_every_contribution_counts_once(framework, ops, n):
    """On any number of devices no contribution is lost, doubled or misplaced, on any destination."""
    xs = digits(n, (5,))
    given = value(framework, xs)
    check(framework, ops.reduce("sum", given, given), "sum", xs, names(*range(n)), given)
    (result,) = ops.batch_reduce("sum", [(given, given)])
    check(framework, result, "sum", xs, names(*range(n)), given)
    assert unchanged(framework, given, xs)


@table(dtype=DTYPES)
def test_every_dtype(framework, ops, dtype):
    """Every reduction keeps the shape and (means of integers excepted) the dtype, and equals the oracle; one that is
    not defined for the dtype is refused."""
    xs = small(dtype, (3, 2), 3)
    given = value(framework, xs)
    for op in REDUCTIONS:
        if defined(op, dtype):
            check(framework, ops.reduce(op, given, given), op, xs, names(0, 1, 2), given)
        else:
            with pytest.raises(cr.UnsupportedError, match=dtype):
                ops.reduce(op, given, given)
    assert unchanged(framework, given, xs)


@table(shape=[(), (0,), (1,), (5,), (2, 0, 3), (3, 2), (2, 3, 4, 1), (1000,)])
def test_every_shape(framework, ops, shape):
    """Scalars, empty arrays, arrays with fewer elements than devices and large arrays keep their shape."""
    for dtype, op in (("float32", "sum"), ("int32", "mean"), ("float16", "mean")):
        xs = small(dtype, shape, 4)
        given = value(framework, xs)
        check(framework, ops.reduce(op, given, given), op, xs, names(0, 1, 2, 3), given)


@table(op=REDUCTIONS, dtype=["float32", "float16", "int8", "int32"])
def test_one_replica(framework, ops, op, dtype):
    """The reduction of one replica is a Mirrored copy of it; the mean of an integer is still a float."""
    xs = small(dtype, (3,), 1)
    (x,) = given = framework.arrays(xs)
    for what in (x, cr.PerReplica(given), cr.Mirrored(given)):
        check(framework, ops.reduce(op, what, "cpu:0"), op, xs, names(0), given)
        check(framework, ops.reduce(op, what, x), op, xs, names(0), given)
        check(framework, ops.reduce(op, what, on(2, 0)), op, xs, names(2, 0), given)


@table(
    to=[(0, 1, 2), (2, 0, 1), (0, 1, 2, 3, 4), (4, 2, 3, 1, 0), (1,), (2, 0), (5,), (4, 3), (6, 2)],
)
def test_results_are_on_their_destinations(framework, ops, to):
    """Results are on the destinations, in their order: the same devices, more, fewer, or others."""
    xs = digits(3, (4,))
    given = value(framework, xs)
    check(framework, ops.reduce("sum", given, on(*to)), "sum", xs, names(*to), given)
    first, second = ops.batch_reduce("sum", [(given, on(*to)), (given, given)])
    check(framework, first, "sum", xs, names(*to), given)
    check(framework, second, "sum", xs, names(0, 1, 2), given)


@pytest.mark.parametrize(
    "spelling",
    [
        "cpu:1",
        "CPU:1",
        "/cpu:1",
        "device:cpu:1",
        "/device:CPU:1",
        "/job:localhost/replica:0/task:0/device:CPU:1",
        "cpu:1#0",
    ],
)
def test_a_device_in_several_spellings(framework, spelling):
    """One device in any spelling is the same destination, reduce device and component's device."""
    xs = digits(2, (3,))
    given = value(framework, xs)
    for ops in (cr.ReductionToOneDevice(spelling), cr.HierarchicalCopyAllReduce()):
        check(framework, ops.reduce("sum", given, spelling), "sum", xs, names(1), given)
        check(framework, ops.broadcast(given[0], spelling), "sum", xs[:1], names(1), given)
        check(framework, ops.gather(given, spelling, 0), "sum", [np.concatenate(xs)], names(1), given)
    assert cr.PerReplica(list(given), ["cpu:0", spelling]).devices == names(0, 1)


@short_table()
def test_an_array_as_destination(framework, ops):
    """An array as destination means its device; the array is not written."""
    xs = digits(3, (4,))
    given = value(framework, xs)
    before = np.arange(7.0)
    array = framework.array(before, 1)
    device = framework.device_of(array)
    result = ops.reduce("sum", given, array)
    check(framework, result, "sum", xs, ("cpu:0" if device == "cpu" else device,), [*given, array])
    assert unchanged(framework, [array], [before])


def test_a_parameter_as_destination(torch_):
    """A torch Parameter as destination means its device; neither it nor its gradient is written."""
    parameter = torch_.torch.nn.Parameter(torch_.torch.ones(3))
    xs = digits(2, (3,))
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value(torch_, xs), parameter)
    check(torch_, result, "sum", xs, names(0), [parameter.detach()])
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.grad is None


def test_a_variable_as_destination(tensorflow_):
    """A tf.Variable as destination means its device; the variable is not written."""
    tf = tensorflow_.tf
    with tf.device("/CPU:2"):
        variable = tf.Variable([1.0, 1.0, 1.0])
    xs = digits(2, (3,))
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value(tensorflow_, xs), variable)
    check(tensorflow_, result, "sum", xs, names(2))
    assert variable.numpy().tolist() == [1, 1, 1]


def test_variables_and_parameters_as_components(torch_, tensorflow_):
    """Parameters and variables are read; results are plain tensors without gradients."""
    xs = [np.full(3, 2.0**k, "float32") for k in range(3)]
    parameters = [torch_.torch.nn.Parameter(torch_.array(x)) for x in xs]
    result = cr.HierarchicalCopyAllReduce().reduce("sum", cr.PerReplica(parameters), cr.PerReplica(parameters))
    check(torch_, result, "sum", xs, names(0, 1, 2), [p.detach() for p in parameters])
    assert not any(y.requires_grad for y in result)
    assert all(p.grad is None and p.requires_grad for p in parameters)
    variables = []
    for k, x in enumerate(xs):
        with tensorflow_.tf.device(f"/CPU:{k}"):
            variables.append(tensorflow_.tf.Variable(x))
    given = cr.PerReplica(variables)
    assert given.devices == names(0, 1, 2)
    check(tensorflow_, cr.HierarchicalCopyAllReduce().reduce("sum", given, given), "sum", xs, names(0, 1, 2))


def test_results_are_independent_of_variables(tensorflow_):
    """A result does not change when the variable that it was read from is assigned."""
    variable = tensorflow_.tf.Variable([1.0, 2.0])
    for ops in (cr.ReductionToOneDevice(), cr.HierarchicalCopyAllReduce()):
        for result in (ops.reduce("sum", variable, variable), ops.broadcast(variable, "cpu:0")):
            variable.assign([7.0, 7.0])
            assert result[0].numpy().tolist() == [1, 2]
            variable.assign([1.0, 2.0])


@short_table()
def test_mirrored_is_a_value_and_a_destination(framework, ops):
    """A result can be reduced again, and can be a destination; the sum of n copies is n times the value."""
    xs = digits(3, (4,))
    given = value(framework, xs)
    first = ops.reduce("sum", given, given)
    second = ops.reduce("sum", first, first)
    check(framework, second, "product", [np.sum(xs, axis=0), np.array([3] * 4)], names(0, 1, 2), [*given, *first])


# ---- batches ----------------------------------------------------------------------------------------------------


def mixed_batch(framework):
    """Return arrays and destinations of eleven values, with several dtypes, shapes, sets and orders of devices."""
    rows = [
        ("float32", (3,), 3, (0, 1, 2)),
        ("int32", (2, 2), 3, (0, 1, 2)),
        ("float32", (), 3, (2, 1, 0)),
        ("float32", (0,), 3, (0, 1, 2)),
        ("float64", (5,), 2, (0, 1)),
        ("float16", (4,), 3, (0, 1, 2)),
        ("int32", (), 1, (3,)),
        ("float32", (4, 2), 3, (0, 1, 2)),
        ("int32", (7,), 3, (0, 1, 2)),
        ("complex64", (2,), 2, (4, 5)),
        ("float32", (3,), 3, (1,)),
    ]
    return [(small(dtype, shape, n, seed), to) for seed, (dtype, shape, n, to) in enumerate(rows)]


@table(op=["sum", "mean"])
def test_a_mixed_batch(framework, ops, op):
    """A batch may mix dtypes, shapes, devices and destinations; results are in the order of the pairs."""
    rows = mixed_batch(framework)
    values = [value(framework, xs) for xs, _ in rows]
    pairs = [(v, on(*to)) for v, (_, to) in zip(values, rows, strict=True)]
    inputs = [x for v in values for x in v]
    results = ops.batch_reduce(op, pairs)
    assert type(results) is list
    for (xs, to), result in zip(rows, results, strict=True):
        check(framework, result, op, xs, names(*to), inputs)
    check_memory(framework, [y for result in results for y in result], inputs)
    for (xs, _), v in zip(rows, values, strict=True):
        assert unchanged(framework, v, xs)


def test_a_batch_of_all_frameworks(numpy_, torch_, jax_, tensorflow_):
    """One batch may contain values of all frameworks; each result has the framework of its value."""
    frameworks = [numpy_, torch_, jax_, tensorflow_, numpy_, jax_]
    rows = [(framework, small("float32", (3,), 3, seed)) for seed, framework in enumerate(frameworks)]
    for ops in OPS.values():
        results = ops.batch_reduce("sum", [(value(framework, xs), on(0, 2)) for framework, xs in rows])
        for (framework, xs), result in zip(rows, results, strict=True):
            check(framework, result, "sum", xs, names(0, 2))


@ops_table
def test_pairs_may_be_any_iterable(ops, numpy_):
    """Pairs may be in any iterable, and each may be a list of two; an empty batch returns an empty list."""
    xs = digits(3, (4,))
    given = value(numpy_, xs)
    for batch in (
        [(given, given), (given, "cpu:0")],
        ((given, given), (given, "cpu:0")),
        ([given, given], [given, "cpu:0"]),
        (pair for pair in [(given, given), (given, "cpu:0")]),
        zip([given, given], [given, "cpu:0"], strict=True),
        {0: (given, given), 1: (given, "cpu:0")}.values(),
    ):
        first, second = ops.batch_reduce("sum", batch)
        check(numpy_, first, "sum", xs, names(0, 1, 2), given)
        check(numpy_, second, "sum", xs, names(0), given)
    for empty in ([], (), iter([]), zip()):
        assert ops.batch_reduce("sum", empty) == []


def test_one_value_twice_in_a_batch(framework):
    """The same value may be in a batch more than once, and one array may be two replicas of a value."""
    xs = digits(3, (4,))
    given = value(framework, xs)
    results = cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(given, given)] * 3)
    for result in results:
        check(framework, result, "sum", xs, names(0, 1, 2), given)
    check_memory(framework, [y for result in results for y in result], given)
    array = framework.array(xs[0], 0)
    twice = cr.PerReplica([array, array], ["cpu:0", "cpu:1"])
    check(
        framework, cr.HierarchicalCopyAllReduce().reduce("sum", twice, twice), "sum", [xs[0]] * 2, names(0, 1), [array]
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packing_changes_no_result(numpy_, algorithm):
    """Results of exact data are the same for all numbers of packs, bytes per pack and groups of small tensors."""
    rows = mixed_batch(numpy_)
    values = [value(numpy_, xs) for xs, _ in rows]
    pairs = [(v, on(*to)) for v, (_, to) in zip(values, rows, strict=True)]
    inputs = [x for v in values for x in v]
    calls = [(cr.AllReduceCrossDeviceOps(algorithm, packs), None) for packs in range(21)]
    calls += [
        (cr.AllReduceCrossDeviceOps(algorithm, packs), kind(size))
        for size in (1, 4, 7, 64, 10**9)
        for packs, kind in ((0, cr.CommunicationOptions), (1, cr.CollectiveHints), (5, cr.CommunicationOptions))
    ]
    calls += [
        (cr.AllReduceCrossDeviceOps(algorithm, 0, size, group), None)
        for size in (0, 4, 12, 1000)
        for group in (0, 1, 2, 10)
    ]
    for ops, options in calls:
        for (xs, to), result in zip(rows, ops.batch_reduce("sum", pairs, options), strict=True):
            check(numpy_, result, "sum", xs, names(*to), inputs)


@pytest.mark.parametrize("packs", [0, 1, 2, 5, 20])
def test_packing_on_every_framework(accelerated, packs):
    """Tensors are cut at a pack's boundary and joined again on every framework (NumPy: the test above)."""
    rows = mixed_batch(accelerated)
    values = [value(accelerated, xs) for xs, _ in rows]
    for options in (None, cr.CommunicationOptions(bytes_per_pack=10)):
        pairs = [(v, on(*to)) for v, (_, to) in zip(values, rows, strict=True)]
        results = cr.HierarchicalCopyAllReduce(packs).batch_reduce("sum", pairs, options)
        for (xs, to), result in zip(rows, results, strict=True):
            check(accelerated, result, "sum", xs, names(*to), [x for v in values for x in v])


@table()
def test_the_same_input_gives_the_same_bits(framework, ops):
    """The same call on the same input gives the same bits, on every replica."""
    rng = np.random.default_rng(1)
    given = value(framework, [rng.normal(size=5).astype("float32") for _ in range(8)])
    first, again = (ops.reduce("sum", given, given) for _ in range(2))
    wanted = framework.to_numpy(first[0]).tobytes()
    for result in (first, again):
        assert {framework.to_numpy(y).tobytes() for y in result} == {wanted}


# ---- numbers ----------------------------------------------------------------------------------------------------


@table(dtype=["float16", "int8", "uint8", "int16", "int32"])
def test_means_do_not_overflow(framework, ops, dtype):
    """The mean of three 40000s in float16 is 40000, of 100s in int8 is 100: means do not overflow."""
    number = {"float16": 40000, "int8": 100, "uint8": 200, "int16": 30000, "int32": 2**31 - 1}[dtype]
    xs = [np.full(2, number, dtype)] * 3
    given = value(framework, xs)
    result = ops.reduce("mean", given, "cpu:0")
    check(framework, result, "mean", xs, names(0), given)
    if dtype != "int32":  # float32 cannot represent its mean
        assert framework.to_numpy(result[0]).tolist() == [number, number]


@table(dtype=["float16", "bfloat16", "float32", "float64"])
def test_nan_and_inf_propagate(framework, ops, dtype):
    """NaN on any replica gives NaN under every op; infinities propagate, and inf - inf is NaN."""
    nan, inf = np.nan, np.inf
    columns = [
        (1, nan, 2),
        (nan, 1, 2),
        (1, 2, nan),
        (inf, 1, 2),
        (1, -inf, 2),
        (inf, 1, -inf),
        (inf, nan, 1),
        (1, 2, inf),
    ]
    xs = [np.array([column[k] for column in columns]).astype(oracle.dtype_of(dtype)) for k in range(3)]
    given = value(framework, xs)
    for op in REDUCTIONS:
        with np.errstate(invalid="ignore"):
            result = ops.reduce(op, given, given)
            check(framework, result, op, xs, names(0, 1, 2), given)
        nans = np.isnan(framework.to_numpy(result[0]).astype("float64")).tolist()
        assert nans == [True, True, True, False, False, op in ("sum", "mean"), True, False]


@table(n=[1, 2, 3, 5])
def test_negative_zero(framework, ops, n):
    """The sum, mean, minimum and maximum of negative zeros are negative zero, also of a single replica."""
    given = value(framework, [np.full(3, -0.0, "float32")] * n)
    for op in ("sum", "mean", "min", "max"):
        for y in ops.reduce(op, given, given):
            assert np.signbit(framework.to_numpy(y)).all(), op


@table()
def test_denormals(framework, ops):
    """Denormal numbers are added exactly, also where the framework's own sums flush them (JAX, TensorFlow)."""
    tiny = np.full(3, 2.0**-140, "float32")
    wanted = 2.0**-138
    given = value(framework, [tiny] * 4)
    for y in ops.reduce("sum", given, given):
        assert framework.to_numpy(y).tolist() == [wanted] * 3


@table(dtype=["int8", "uint8", "int32", "int64"])
def test_integer_sums_and_products_wrap(framework, ops, dtype):
    """Integer sums and products beyond the dtype's range wrap around in every framework."""
    most = np.iinfo(dtype).max
    xs = [np.array([most, 3, most // 2], dtype), np.array([1, 100, 7], dtype), np.array([most, 90, 9], dtype)]
    given = value(framework, xs)
    for op in ("sum", "product"):
        with np.errstate(over="ignore"):
            check(framework, ops.reduce(op, given, given), op, xs, names(0, 1, 2), given)


@parametrized([(name, next(iter(OPS))) for name in NAMES], ())
def test_complex_products_consist_of_four_rounded_products(framework, ops):
    """A complex product has the parts ac - bd and ad + bc; each product is rounded first, NaN or not."""
    rng = np.random.default_rng(7)
    parts = rng.standard_normal((4, 500)) * 10.0 ** rng.integers(-100, 100, (4, 500))
    parts[:, 0] = 1e300, 1e300, 1e300, -1e300
    a, b, c, d = parts
    with np.errstate(over="ignore", invalid="ignore"):
        real, imaginary = (a * c) - (b * d), (a * d) + (b * c)
    given = value(
        framework, [x.view("complex128").reshape(-1) for x in (np.stack(p, 1).copy() for p in ((a, b), (c, d)))]
    )
    for y in ops.reduce("product", given, given):
        found = framework.to_numpy(y)
        np.testing.assert_array_equal(found.real, real)
        np.testing.assert_array_equal(found.imag, imaginary)


@table(dtype=["float16", "bfloat16"])
def test_halves_are_rounded_once(framework, ops, dtype):
    """Half types accumulate in float32: 2048 + 1 + 1 + ... counts every 1, which half arithmetic would lose."""
    big = 2048 if dtype == "float16" else 256  # above it, the type has only even integers
    xs = [np.full(2, number, oracle.dtype_of(dtype)) for number in (big, 1, 1, 1, 1, 1, 1, 1, 1)]
    given = value(framework, xs)
    for y in ops.reduce("sum", given, given):
        assert framework.to_numpy(y).astype("float64").tolist() == [big + 8] * 2
    for y in ops.reduce("mean", given, given):
        assert framework.to_numpy(y).tolist() == np.full(2, (big + 8) / 9).astype(oracle.dtype_of(dtype)).tolist()
    # An intermediate product overflows float16 and the final one does not: only the final rounding counts.
    xs = [np.array([number], oracle.dtype_of(dtype)) for number in (300.0, 300.0, 0.0078125)]
    given = value(framework, xs)
    check(framework, ops.reduce("product", given, given), "product", xs, names(0, 1, 2), given)


def test_jax_without_x64(jax_):
    """If 64-bit numbers are disabled in JAX, the mean of integers is float32, like the result of JAX's own division."""
    with jax_.jax.enable_x64(False):
        for dtype, op in (
            ("int32", "mean"),
            ("int8", "mean"),
            ("int32", "sum"),
            ("float32", "mean"),
            ("float16", "mean"),
        ):
            xs = small(dtype, (4,), 3)
            given = value(jax_, xs)
            wanted = "float32" if op == "mean" and "int" in dtype else dtype
            for y in cr.HierarchicalCopyAllReduce().reduce(op, given, given):
                oracle.check(jax_.to_numpy(y), op, xs, result=wanted)


# ---- broadcast and gather ---------------------------------------------------------------------------------------


@parametrized([(name, ops, dtype) for (name, dtype), ops in each(pairs(NAMES, DTYPES), OPS)], ("dtype",))
def test_broadcast(framework, ops, dtype):
    """Broadcast puts a copy of one array on every destination, in order, for any dtype and shape."""
    for shape, at, to in (
        ((2, 3), 0, (0, 1, 2)),
        ((), 1, (2, 1)),
        ((0,), 0, (3,)),
        ((5,), 2, (2,)),
        ((4,), 1, (3, 1, 0)),
    ):
        (x,) = small(dtype, shape, 1)
        array = framework.array(x, at)
        result = ops.broadcast(array, on(*to))
        check_places(framework, result, names(*to))
        for y in result:
            assert framework.to_numpy(y).dtype == x.dtype
            assert framework.to_numpy(y).shape == x.shape
            assert framework.to_numpy(y).tobytes() == x.tobytes()
        check_memory(framework, result, [array])
        assert unchanged(framework, [array], [x])


def test_broadcast_of_bits(framework):
    """Broadcast copies bits: NaN keeps its payload, and -0.0 and denormals stay as they are."""
    x = np.array([0x7FC12345, 0x80000000, 0x00000001, 0xFF800000], "uint32").view("float32")
    for ops in OPS.values():
        for y in ops.broadcast(framework.array(x, 1), on(0, 1, 2)):
            assert framework.to_numpy(y).tobytes() == x.tobytes()


def test_broadcast_of_numbers():
    """Broadcast of a Python number gives NumPy arrays of its value."""
    for number, dtype in ((3, "int64"), (2.5, "float64"), (True, "bool"), (1j, "complex128")):
        for y in cr.HierarchicalCopyAllReduce().broadcast(number, on(0, 1)):
            assert (type(y), y.dtype.name, y.item()) == (np.ndarray, dtype, number)


@table(dtype=["float32", "bfloat16", "int8", "bool", "complex64"])
def test_gather(framework, ops, dtype):
    """Gather concatenates components along an axis in the order of the replicas, on every destination."""
    sizes = (2, 0, 3, 1)
    for axis in (0, 1, -1, -2):
        shapes = [(size, 2) if axis in (0, -2) else (2, size) for size in sizes]
        xs = [small(dtype, shape, 1, seed)[0] for seed, shape in enumerate(shapes)]
        given = value(framework, xs)
        for to in ((0, 1, 2, 3), (2, 0), (5,)):
            result = ops.gather(given, on(*to), axis)
            check_places(framework, result, names(*to))
            for y in result:
                assert framework.to_numpy(y).dtype == xs[0].dtype
                assert np.array_equal(framework.to_numpy(y), np.concatenate(xs, axis))
            check_memory(framework, result, given)
        assert unchanged(framework, given, xs)


def test_gather_of_one(framework):
    """Gather of one replica is a copy; a NumPy integer is accepted as axis."""
    xs = small("float32", (2, 3), 1)
    given = framework.arrays(xs)
    for what in (given[0], cr.PerReplica(given)):
        for axis in (0, np.int64(1)):
            check(framework, cr.CrossDeviceOps().gather(what, on(0, 1), axis), "sum", xs, names(0, 1), given)


# ---- options, threads, logs -------------------------------------------------------------------------------------


def test_options_choose_the_algorithm_of_open_ops(monkeypatch, numpy_):
    """options.implementation decides for "auto" and "nccl", and is ignored if the op names an algorithm."""
    xs = digits(4, (6,))
    given = value(numpy_, xs)
    devices = on(*range(4))
    for ops, wanted in (
        (cr.AllReduceCrossDeviceOps("auto"), "ring"),
        (cr.NcclAllReduce(), "ring"),
        (cr.HierarchicalCopyAllReduce(), "hierarchical_copy"),
        (cr.AllReduceCrossDeviceOps("direct"), "direct"),
    ):
        seen = []
        original = pipeline.layouts

        def spy(*args, seen=seen, original=original):
            found = original(*args)
            seen.extend(program.algorithm for layout in found for program in layout.programs)
            return found

        monkeypatch.setattr(pipeline, "layouts", spy)
        result = ops.reduce("sum", given, devices, cr.CommunicationOptions(implementation="RING"))
        monkeypatch.undo()
        check(numpy_, result, "sum", xs, names(*range(4)), given)
        assert seen == [wanted]


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_many_threads(name, request):
    """Calls from many threads at once do not affect each other."""
    framework = request.getfixturevalue(f"{name}_")
    failures = []
    barrier = threading.Barrier(8)

    def work(seed):
        try:
            barrier.wait(60)
            for turn in range(5):
                n = 2 + (seed + turn) % 4
                xs = [x * (seed + 1) for x in digits(n, (5,))]
                given = value(framework, xs)
                ops = list(OPS.values())[(seed + turn) % len(OPS)]
                check(framework, ops.reduce("sum", given, given), "sum", xs, names(*range(n)), given)
                trees = cr.all_reduce([{"a": x} for x in given], cross_device_ops=ops)
                assert framework.to_numpy(trees[-1]["a"]).tolist() == np.sum(xs, axis=0).tolist()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_topologies_change_no_result(framework):
    """A topology decides the routes, not the result: rings, grids, islands, devices with other names."""
    xs = digits(4, (6,))
    given = value(framework, xs)
    for topology, algorithm in (
        (cr.Topology.ring(4), "ring"),
        (cr.Topology.ring(4), "auto"),
        (cr.Topology.ring(6), "auto"),
        (cr.Topology.full_mesh(4), "direct"),
        (cr.Topology.from_matrix([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 9], [1, 1, 9, 0]]), "hierarchical_copy"),
        (cr.Topology.ring(["cpu:3", "cpu:1", "cpu:0", "cpu:2"]), "ring"),
    ):
        ops = cr.AllReduceCrossDeviceOps(algorithm, 2, topology=topology)
        check(framework, ops.reduce("sum", given, given), "sum", xs, names(0, 1, 2, 3), given)


def test_log_is_silent_by_default(capsys, caplog, numpy_):
    """Nothing is printed; at INFO each plan is logged once, with its devices."""
    given = value(numpy_, digits(2, (3,)))
    with caplog.at_level(logging.INFO, "crossreduce"):
        # Plans are cached and logged when made: no other test has made one with 11 packs.
        for _ in range(3):
            cr.AllReduceCrossDeviceOps("ring", 11).reduce("sum", given, on(1, 0, 15))
    plans = [record.getMessage() for record in caplog.records if "cpu:15" in record.getMessage()]
    assert len(plans) == 1
    assert plans[0].startswith("new plan: reduce ring")
    assert capsys.readouterr() == ("", "")
    assert result_dtype(numpy_, "mean", "int8") == "float64"
