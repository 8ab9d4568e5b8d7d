"""``all_reduce(trees, "mean", weights=...)`` in every framework, compared with rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from exact_cases import terms_of, wide
from exact_oracle import decoded, nearest
from oracle import ROUNDOFF, SMALLEST, dtype_of
from pairs import each

import crossreduce as cr
from crossreduce import AllReduceCrossDeviceOps, ArgumentError, CommunicationOptions, ReductionToOneDevice
from crossreduce.frameworks.null import NullFramework
from crossreduce.ops import read_weights

EXACT = CommunicationOptions(exact=True)
WEIGHTS = ([64, 64, 17], [0.1, 3.5, 1e-3], [1, 0, 2], [7, 7, 7], [0, 5, 0], [2**60, 1, 3], [1e300, 1e299, 0])
FLOATS = ("float16", "bfloat16", "float32", "float64")


def inputs(dtype, n=3, shape=(5, 7)):
    """Return n arrays of a dtype, of moderate numbers."""
    rng = np.random.default_rng(n)
    made = dtype_of(dtype)
    if made.kind in "iu":
        return list(rng.integers(np.iinfo(made).min, np.iinfo(made).max, (n, *shape), made, endpoint=True))
    xs = rng.standard_normal((n, *shape)) * 100
    return list((xs + 1j * rng.standard_normal((n, *shape)) if made.kind == "c" else xs).astype(made))


def narrow(framework, dtype):
    """Return a dtype that the framework has. By default JAX has no 64-bit numbers."""
    narrower = {"float64": "float32", "int64": "int16", "complex128": "complex64"}
    return narrower.get(dtype, dtype) if framework.name == "jax" else dtype


def parts(x):
    """Return the elements of an array as fractions: real and imaginary parts are elements of their own."""
    reals = np.ascontiguousarray(x).reshape(-1)
    reals = reals.view(reals.real.dtype) if reals.dtype.kind == "c" else reals
    return [Fraction(int(value)) if reals.dtype.kind in "iu" else Fraction(float(value)) for value in reals]


def wanted(xs, weights):
    """Return the weighted mean of each element, and the sum of |w x| over the sum of the weights, as fractions."""
    exact = [Fraction(weight) for weight in weights]
    columns = list(zip(*map(parts, xs), strict=True))
    means = [sum(w * x for w, x in zip(exact, column, strict=True)) / sum(exact) for column in columns]
    return means, [sum(w * abs(x) for w, x in zip(exact, column, strict=True)) / sum(exact) for column in columns]


def check(got, xs, weights):
    """Check a result: n products, n - 1 sums, a division and the rounded weights and their sum, each rounded once."""
    accumulator = {"float16": "float32", "bfloat16": "float32"}.get(xs[0].dtype.name, got.dtype.name)
    means, sizes = wanted(xs, weights)
    unit = Fraction(ROUNDOFF[accumulator]) * (len(xs) + 4)
    for found, mean, size in zip(parts(got), means, sizes, strict=True):
        rounding = Fraction(ROUNDOFF[got.dtype.name]) * abs(mean) + Fraction(SMALLEST[got.dtype.name])
        assert abs(found - mean) <= unit / (1 - unit) * size + rounding


@pytest.mark.parametrize(
    ("dtype", "weights"), each([*FLOATS, "complex64", "int8", "int32", "uint8", "int64", "complex128"], WEIGHTS)
)
def test_weighted_means_of_every_dtype(framework, dtype, weights):
    """The result is sum(w x) / sum(w) within the bound of rounding errors, in the dtype of a mean, on all replicas."""
    dtype = narrow(framework, dtype)
    xs = inputs(dtype)
    given = framework.arrays(xs)
    trees = [{"a": x, "b": [x[:1]]} for x in given]
    got = cr.all_reduce(trees, "mean", weights=weights)
    plain = cr.all_reduce(trees, "mean")
    for k, tree in enumerate(got):
        found, part = (framework.to_numpy(x) for x in (tree["a"], tree["b"][0]))
        assert found.dtype == framework.to_numpy(plain[k]["a"]).dtype
        assert found.tobytes() == framework.to_numpy(got[0]["a"]).tobytes()
        check(found, xs, weights)
        check(part, [x[:1] for x in xs], weights)
    if weights == [7, 7, 7]:
        assert framework.to_numpy(got[0]["a"]).tobytes() == framework.to_numpy(plain[0]["a"]).tobytes()
    for x, before in zip(given, xs, strict=True):
        assert framework.to_numpy(x).tobytes() == before.tobytes()


@pytest.mark.parametrize("algorithm", ["auto", "ring", "one_device", "hierarchical_copy"])
def test_every_algorithm_and_place(framework, algorithm):
    """Weighted means take all algorithms, arrays without axes, results of the same kind, and one replica."""
    ops = AllReduceCrossDeviceOps(algorithm, num_packs=2)
    xs = [np.float32(k + 0.5) for k in range(5)]
    weights = [3, 0, 2, 1, 10]
    listed = framework.arrays(list(np.float32(weights))) if algorithm == "ring" else np.array(weights)
    got = cr.all_reduce(framework.arrays(xs), "mean", cross_device_ops=ops, weights=listed)
    for x in got:
        check(framework.to_numpy(x), xs, weights)
    (alone,) = cr.all_reduce(framework.arrays(xs[:1]), "mean", cross_device_ops=ops, weights=[9])
    assert framework.to_numpy(alone) == xs[0]
    one = ReductionToOneDevice()
    check(
        framework.to_numpy(cr.all_reduce(framework.arrays(xs), "mean", cross_device_ops=one, weights=weights)[4]),
        xs,
        weights,
    )


def test_weights_are_not_kept_for_other_calls():
    """After an exact weighted mean, means of the same arrays have no weights, and other weights are used."""
    xs = [np.zeros(3), np.array([4.0, 8.0, 12.0])]
    for weights, right in (([1, 3], [3, 6, 9]), (None, [2, 4, 6]), ([3, 1], [1, 2, 3]), (None, [2, 4, 6])):
        for result in cr.all_reduce(xs, "mean", weights=weights, options=EXACT):
            assert result.tolist() == right


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_weighted_means_are_rounded_once(framework, dtype):
    """With ``exact`` and weights in the ratio of whole numbers, the result is that of rational arithmetic, also for
    subnormal numbers and those whose products would overflow."""
    dtype = narrow(framework, dtype)
    for n, weights in ((3, [64, 32, 7]), (2, [2**24 - 1, 1]), (4, [0.5, 0.25, 0, 1.75]), (3, [1, 1, 0])):
        bits = terms_of(wide, n, dtype, n, 40)
        given = framework.arrays(list(bits.view(dtype_of(dtype))))
        total = sum(Fraction(weight) for weight in weights)
        right = []
        for column in bits.T:
            mean = sum(Fraction(w) * decoded(int(x), dtype) for w, x in zip(weights, column, strict=True)) / total
            sign = 1 << (8 * dtype_of(dtype).itemsize - 1)
            right.append((nearest(abs(mean), dtype) | (sign if mean < 0 else 0)) if mean else 0)
        for x in cr.all_reduce(given, "mean", weights=weights, options=EXACT):
            assert framework.to_numpy(x).view(bits.dtype).tolist() == right


def test_exact_weighted_means_of_integers_and_complex_numbers(numpy_):
    """Integers give the float64 nearest to their weighted mean, complex numbers two exact parts."""
    xs, weights = inputs("int32"), [5, 3, 11]
    got = cr.all_reduce(xs, "mean", weights=weights, options=EXACT)[1]
    assert got.dtype == np.float64
    assert [Fraction(x) for x in got.reshape(-1)] == [Fraction(float(x)) for x in wanted(xs, weights)[0]]
    xs = inputs("complex128")
    got = cr.all_reduce(xs, "mean", weights=weights, options=EXACT)[1]
    assert parts(got) == [Fraction(float(x)) for x in wanted(xs, weights)[0]]


def test_replicas_of_weight_zero_are_not_read(framework):
    """Elements of a replica of weight 0 do not matter, even NaN and infinity; the result is also put there."""
    xs = [np.float32([1, 2]), np.float32([np.nan, np.inf]), np.float32([4, 5])]
    for options in (None, EXACT):
        got = cr.all_reduce(framework.arrays(xs), "mean", weights=[1, 0, 2], options=options)
        assert [framework.to_numpy(x).tolist() for x in got] == [[3, 4]] * 3


def test_equal_numbers_keep_their_value(framework):
    """The weighted mean of equal whole numbers is that number, for weights that are whole numbers."""
    xs = [np.full(9, 5, "float32") for _ in range(3)]
    assert framework.to_numpy(cr.all_reduce(framework.arrays(xs), "mean", weights=[3, 7, 9])[2]).tolist() == [5] * 9


def test_sparse_leaves(framework):
    """Slices of sparse leaves are weighted, also beside dense leaves on other replicas."""
    values, indices, shape = [np.float32([[2, 4]]), np.float32([[6, 8]])], [np.int64([1]), np.int64([1])], (3, 2)
    for kind in framework.kinds:
        leaves = [framework.sparse(kind, values[k], indices[k], shape, k) for k in range(2)]
        got = cr.all_reduce(leaves, "mean", weights=[1, 3])
        for x in got:
            assert framework.dense(x, shape).tolist() == [[0, 0], [5, 7], [0, 0]]
        if framework.name in ("numpy", "torch"):
            mixed = [leaves[0], framework.array(np.ones(shape, "float32"), 1)]
            dense = framework.to_numpy(cr.all_reduce(mixed, "mean", weights=[1, 3])[0])
            assert dense.tolist() == [[0.75, 0.75], [1.25, 1.75], [0.75, 0.75]]


def test_results_in_given_arrays(numpy_, torch_):
    """``out`` gets the results, also in place."""
    for framework in (numpy_, torch_):
        xs = framework.arrays([np.float16([1, 5]), np.float16([2, 9])])
        out = framework.arrays([np.zeros(2, "float16")] * 2)
        assert cr.all_reduce(xs, "mean", weights=[1, 3], out=out)[1] is out[1]
        cr.all_reduce(xs, "mean", weights=[1, 3], out=xs)
        assert [framework.to_numpy(x).tolist() for x in (*out, *xs)] == [[1.75, 8]] * 4


@pytest.mark.parametrize(
    ("weights", "op", "words"),
    [
        ([1, 2], "mean", "one number for each replica"),
        (np.array(3), "mean", "one number for each replica"),
        ({1, 2, 3}, "mean", "one number for each replica"),
        (3, "mean", "one number for each replica"),
        ([1, -2, 3], "mean", r"-2 .*for replica 1"),
        ([1, math.nan, 3], "mean", r"nan .*for replica 1"),
        ([1, math.inf, 3], "mean", r"inf .*for replica 1"),
        ([1, "2", 3], "mean", "for replica 1"),
        ([1, True, 3], "mean", r"True .*for replica 1"),
        ([1, 2j, 3], "mean", "for replica 1"),
        ([1, 10**400, 3], "mean", "for replica 1"),
        ([0, 0.0, 0], "mean", "must not all be 0"),
        ([1, 2, 3], "sum", "only a mean can have weights"),
    ],
)
def test_invalid_weights(weights, op, words):
    """Invalid weights are errors that name the replica, before anything is written."""
    xs = [np.ones(3) for _ in range(3)]
    with pytest.raises(ArgumentError, match=words):
        cr.all_reduce(xs, op, weights=weights, out=xs)
    assert [x.tolist() for x in xs] == [[1, 1, 1]] * 3


def test_what_cannot_be_weighted():
    """Custom ops, accumulation functions, bools, and weights without a common ratio in exact means are refused."""
    xs = [np.ones(3), np.ones(3)]
    for ops in (cr.CrossDeviceOps(), ReductionToOneDevice(accumulation_fn=sum)):
        with pytest.raises(cr.UnsupportedError, match="compute weighted means"):
            cr.all_reduce(xs, "mean", cross_device_ops=ops, weights=[1, 2])
    with pytest.raises(cr.UnsupportedError, match="whole numbers with a sum of at most 16777216"):
        cr.all_reduce(xs, "mean", weights=[0.1, 0.3], options=EXACT)
    with pytest.raises(cr.UnsupportedError, match="mean of bools"):
        cr.all_reduce([np.ones(3, bool)] * 2, "mean", weights=[1, 2])
    with pytest.raises(cr.MismatchError, match="differ in shape"):
        cr.all_reduce([np.ones(3), np.ones(4)], "mean", weights=[1, 0])


def test_traced_weighted_means(jax_, tensorflow_):
    """``jax.jit``, ``jax.grad`` and ``tf.function`` trace weighted means. Traced weights are refused."""
    import jax
    import tensorflow as tf

    def mean(a, b):
        return cr.all_reduce([a, b], "mean", weights=[1, 3])[0]

    assert jax.jit(mean)(jax.numpy.float32(2), jax.numpy.float32(6)) == 5
    assert jax.grad(lambda a, b: mean(a, b) ** 2)(jax.numpy.float32(2), jax.numpy.float32(6)) == 2.5
    assert float(tf.function(mean)(tf.constant(2.0), tf.constant(6.0))) == 5
    with pytest.raises(ArgumentError, match="for replica 0"):
        jax.jit(lambda w: cr.all_reduce([1.0, 2.0], "mean", weights=[w, 1]))(1.0)


def test_weights_are_counted_once():
    """Arrays without elements pass, and weights are scaled to less than 1 by a power of two."""
    null = NullFramework()
    arrays = [null.zeros((4,), "float16", f"cpu:{k}") for k in range(3)]
    assert cr.all_reduce(arrays, "mean", weights=[1, 2, 3])[0].shape == (4,)
    assert read_weights([2**70, 2**71], 2).factors == (0.25, 0.5)
    assert read_weights([0.75, 0.25, 0], 3).whole == (3, 1)
