"""``CommunicationOptions(exact=True)``: sums and means with the bits of rational arithmetic, in every framework."""

from fractions import Fraction

import numpy as np
import pytest
from budget import examples
from exact_cases import KINDS, UNSIGNED, any_bits, cancelling, large, near, subnormal, terms_of, wide
from exact_oracle import FORMATS, nearest
from exact_reference import reference_sums
from hypothesis import given
from hypothesis import strategies as st
from oracle import dtype_of
from pairs import each, pairs

import crossreduce as cr
from crossreduce import ArgumentError, CommunicationOptions, UnsupportedError
from crossreduce.options import ALGORITHMS

EXACT = CommunicationOptions(exact=True)
DTYPES = tuple(UNSIGNED)


def parts_of(seed, kind, dtype, n, size):
    """Return the components of n replicas, and their exact sum and mean, each rounded once."""
    bits = terms_of(kind, seed, dtype, n, size)
    sums = {"sum": reference_sums(bits, dtype), "mean": reference_sums(bits, dtype, n)}
    return list(bits.view(dtype_of(dtype))), {op: x.view(dtype_of(dtype)) for op, x in sums.items()}


def bits_of(framework, arrays):
    return [framework.to_numpy(x).tobytes() for x in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_framework_gives_the_bits_of_rational_arithmetic(framework, dtype):
    """Exact results are correctly rounded, in the first call and in prepared calls, for one tensor and for a batch."""
    for n, kind, size in ((1, near, 50), (2, wide, 1), (3, any_bits, 50), (8, cancelling, 50), (5, large, 50)):
        xs, right = parts_of(n, kind, dtype, n, size)
        given = framework.arrays(xs)
        trees = [{"a": x, "b": [x[:1], x]} for x in given]
        for op in ("sum", "mean"):
            for _ in range(2):
                got = cr.all_reduce(given, op, options=EXACT)
                assert bits_of(framework, got) == [right[op].tobytes()] * n
            for tree in cr.all_reduce(trees, op, options=EXACT):
                found = bits_of(framework, [tree["a"], *tree["b"]])
                assert found == [right[op].tobytes(), right[op][:1].tobytes(), right[op].tobytes()]


CASES = [(*case, dtype) for case, dtype in each(pairs(ALGORITHMS, (0, 1, 3)), (*DTYPES, "complex64"))]


@pytest.mark.parametrize(("algorithm", "packs", "dtype"), CASES)
@examples(10)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 9), kind=st.sampled_from(KINDS), order=st.randoms())
def test_the_order_the_algorithm_and_the_packs_do_not_matter(algorithm, packs, dtype, seed, n, kind, order):
    """Any order of replicas, any algorithm and any packs give the same bits."""
    part = "float32" if dtype == "complex64" else dtype
    xs, right = parts_of(seed, kind, part, n, 60)
    kept = order.sample(range(n), n)
    arrays = [xs[k].view(dtype) if dtype == "complex64" else xs[k] for k in kept]
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs)
    options = CommunicationOptions(bytes_per_pack=order.choice([0, 64, 100]), exact=True)
    for op in ("sum", "mean"):
        for result in cr.all_reduce([[x, x[:7]] for x in arrays], op, cross_device_ops=ops, options=options):
            assert result[0].tobytes() == right[op].tobytes()
            assert result[1].tobytes() == right[op][: result[1].nbytes // right[op].itemsize].tobytes()


def test_reduce_and_batch_reduce_to_other_destinations():
    """``reduce`` and ``batch_reduce`` are exact for any destinations, in place, and on devices without a replica."""
    xs, right = parts_of(3, cancelling, "float32", 5, 40)
    value = cr.PerReplica(xs)
    for ops in (cr.ReductionToOneDevice(), cr.ReductionToOneDevice("cpu:7"), cr.AllReduceCrossDeviceOps("ring")):
        (one,) = ops.reduce("sum", value, "cpu:9", EXACT).values
        assert one.tobytes() == right["sum"].tobytes()
        two = ops.batch_reduce("mean", [(value, value), (value, "cpu:1")], EXACT)
        assert {x.tobytes() for result in two for x in result.values} == {right["mean"].tobytes()}
        own = cr.PerReplica([x.copy() for x in xs])
        ops.reduce("sum", own, own, EXACT, out=own)
        assert {x.tobytes() for x in own.values} == {right["sum"].tobytes()}


def test_other_reductions_are_as_without_the_option():
    """The option does not change reductions of integers and bools, minima, maxima, and concatenations of slices."""
    rng = np.random.default_rng(0)
    for op, dtype in (*each(("sum", "mean", "min", "max", "product"), ("int32", "uint8")), ("max", "bool")):
        xs = [rng.integers(0, 2, 30).astype(dtype) for _ in range(4)]
        for a, b in zip(cr.all_reduce(xs, op, options=EXACT), cr.all_reduce(xs, op), strict=True):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    values = [np.float32([[1.0], [3.0]]), np.float32([[1e30], [2.0**-149]])]
    sparse = [cr.IndexedSlices(x, np.array([k, 5])) for k, x in enumerate(values)]
    for op, divisor in (("sum", 1), ("mean", 2)):
        result = cr.all_reduce(sparse, op, options=EXACT)[1]
        assert (result.values == np.concatenate(values) / np.float32(divisor)).all()


def test_means_of_integers_are_rounded_once(framework):
    """The exact mean of integers of up to 32 bits is the float that is nearest to the real mean."""
    for dtype in ("int8", "uint8", "int16", "int32"):
        bounds = np.iinfo(dtype)
        xs = [np.random.default_rng(k).integers(bounds.min, bounds.max, 50, dtype, endpoint=True) for k in range(7)]
        (result, *_) = (framework.to_numpy(x) for x in cr.all_reduce(framework.arrays(xs), "mean", options=EXACT))
        means = [Fraction(int(sum(map(int, column))), 7) for column in zip(*xs, strict=True)]
        name = result.dtype.name
        right = [nearest(abs(mean), name) | (mean < 0) << sum(FORMATS[name]) for mean in means]
        assert result.view(UNSIGNED[name]).tolist() == right


def test_ops_that_cannot_be_exact_are_refused(framework):
    """Exact products of floats, exact means of 64-bit integers, accumulation_fn and invalid options are errors."""
    xs = framework.arrays([np.float32([1, 2]), np.float32([3, 4])])
    with pytest.raises(UnsupportedError, match=r"^a product cannot be exact: the product of n floats has n times"):
        cr.all_reduce(xs, "product", options=EXACT)
    value, wide = cr.PerReplica(xs), cr.PerReplica(framework.arrays([np.array(2), np.array(3)]))
    with pytest.raises(UnsupportedError, match=r"^pair 1: a product cannot be exact"):
        cr.ReductionToOneDevice().batch_reduce("product", [(wide, wide), (value, value)], EXACT)
    with pytest.raises(UnsupportedError, match=r"^the mean of 2 int64 values is not exact, because it .* float64\."):
        cr.all_reduce(list(wide), "mean", options=EXACT)
    assert [framework.to_numpy(x).item() for x in cr.all_reduce(list(wide), "sum", options=EXACT)] == [5, 5]
    with pytest.raises(ArgumentError, match=r"^accumulation_fn replaces the sum, so the sum cannot be made exact"):
        cr.ReductionToOneDevice(accumulation_fn=sum).reduce("sum", value, value, EXACT)
    for wrong in (1, 0, None, "yes", np.True_):
        with pytest.raises(ArgumentError, match=r"^exact must be True or False\.\n  given: "):
            CommunicationOptions(exact=wrong)


def test_traced_arrays_are_refused(jax_, tensorflow_):
    """Under ``jax.jit`` and ``tf.function``, the option raises an error, since kernels cannot run there."""
    xs = [np.float32([1, 2]), np.float32([3, 4])]
    words = "exact sums are computed only in host memory, from dense arrays that are neither traced nor recorded"
    with pytest.raises(UnsupportedError, match=words):
        jax_.jax.jit(lambda *values: cr.all_reduce(list(values), options=EXACT))(*xs)
    with pytest.raises(UnsupportedError, match=words):
        tensorflow_.tf.function(lambda *values: cr.all_reduce(list(values), options=EXACT))(*tensorflow_.arrays(xs))


def test_a_batch_that_is_refused_writes_nothing(numpy_):
    """If one value of a batch cannot be added exactly, no result is written."""
    value = cr.PerReplica([np.ones(2), np.ones(2)])
    mixed = cr.PerReplica([np.ones((6, 1)), cr.IndexedSlices(np.ones((2, 1)), np.array([1, 1]), (6, 1))])
    outs = [cr.PerReplica([np.full(2, 7.0) for _ in range(2)]), cr.PerReplica([np.full((6, 1), 7.0) for _ in range(2)])]
    with pytest.raises(UnsupportedError, match="exact sums are computed only in host memory"):
        cr.AllReduceCrossDeviceOps("ring").batch_reduce("sum", [(value, value), (mixed, mixed)], EXACT, out=outs)
    assert all((x == 7).all() for out in outs for x in out.values)


def test_flushed_subnormals(torch_):
    """Sums are exact also if the caller has set the processor to flush subnormal numbers to zero."""
    cases = [(op, *parts_of(1, subnormal, dtype, 3, 40)) for op in ("sum", "mean") for dtype in DTYPES]
    torch_.torch.set_flush_denormal(True)  # returns False on processors that cannot
    try:
        found = [cr.all_reduce(xs, op, options=EXACT)[0].tobytes() for op, xs, _ in cases]
    finally:
        torch_.torch.set_flush_denormal(False)
    assert found == [right[op].tobytes() for op, _, right in cases]


def test_replicas_of_strategies(tensorflow_):
    """The option works in ``MirroredStrategy.run`` and in the ops for ``tf.distribute``."""
    import crossreduce.tensorflow as plug_in

    xs, right = parts_of(5, cancelling, "float32", 3, 20)
    given = cr.PerReplica(xs)
    result = cr.MirroredStrategy(3).run(lambda x: cr.get_replica_context().all_reduce("mean", x, EXACT), args=(given,))
    assert {x.tobytes() for x in result.values} == {right["mean"].tobytes()}
    tf = tensorflow_.tf
    strategy = tf.distribute.MirroredStrategy([f"/CPU:{k}" for k in range(3)])
    given = tensorflow_.arrays(xs)
    value = strategy.experimental_distribute_values_from_function(lambda c: given[c.replica_id_in_sync_group])
    for ops in (plug_in.HierarchicalCopyAllReduce(), plug_in.ReductionToOneDevice()):
        result = ops.reduce(tf.distribute.ReduceOp.MEAN, value, value, EXACT)
        assert bits_of(tensorflow_, strategy.experimental_local_results(result)) == [right["mean"].tobytes()] * 3
