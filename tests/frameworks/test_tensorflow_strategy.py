"""The ops of ``crossreduce.tensorflow`` inside ``tf.distribute.MirroredStrategy``.

The assertions of TensorFlow's own tests of strategies and their ops (strategy_test_lib.py, mirrored_strategy_test.py,
strategy_gather_test.py, strategy_reduce_test.py) are repeated here for crossreduce's ops.
"""

import numpy as np
import pytest
from pairs import each, pairs
from tensorflow_values import MODES, crt, tf

import crossreduce as cr

keras = tf.keras
OPS = {
    "hierarchical": crt.HierarchicalCopyAllReduce(),
    "to one": crt.ReductionToOneDevice(),
    "ring on a ring": crt.AllReduceCrossDeviceOps("ring", 2, topology=cr.Topology.ring(9, 25)),
    "direct": crt.AllReduceCrossDeviceOps("direct", 0),
}


def strategy_of(n, op="hierarchical"):
    return tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(n)], cross_device_ops=OPS[op])


def replica():
    return tf.distribute.get_replica_context()


def number():
    return replica().replica_id_in_sync_group


def in_mode(mode, function):
    return tf.function(function) if mode == "function" else function


def local(strategy, value):
    return [np.asarray(tf.convert_to_tensor(x)) for x in strategy.experimental_local_results(value)]


def distributed(strategy, rows):
    """Return a distributed value whose component on replica k is ``rows[k]``."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )


# A third mode, so that the lists have lengths without a common divisor, and their values are mixed.
@pytest.mark.parametrize(("op", "n", "mode"), each(OPS, [1, 2, 3, 5, 9], [*MODES, MODES[0]]))
def test_all_reduce(op, n, mode):
    """``ctx.all_reduce`` gives every replica the sum or mean over all replicas, for any structure of tensors."""
    strategy = strategy_of(n, op)
    powers = [float((n + 1) ** k % 4099) for k in range(n)]
    rows = np.random.default_rng(n).integers(-99, 99, (n, 3, 2)).astype("float32")
    given = distributed(strategy, powers), distributed(strategy, rows)

    def step(x, y):
        nested = {"a": x, "b": [y, (x, y[:0])]}
        return replica().all_reduce("sum", nested), replica().all_reduce(tf.distribute.ReduceOp.MEAN, [x, y])

    sums, means = strategy.run(in_mode(mode, step), args=given)
    wanted = [sum(powers), rows.sum(0), sum(powers), np.zeros((0, 2))]
    for made, want in zip((sums["a"], sums["b"][0], sums["b"][1][0], sums["b"][1][1]), wanted, strict=True):
        found = local(strategy, made)
        assert len(found) == n
        assert all(x.shape == np.shape(want) and (x == np.float32(want)).all() for x in found)
    for made, want in zip(means, wanted[:2], strict=True):
        assert all((x == np.float32(want) / np.float32(n)).all() for x in local(strategy, made))


@pytest.mark.parametrize(("n", "kind", "mode"), pairs([1, 3], ["sum", "mean"], MODES))
def test_gradients(n, kind, mode):
    """The gradient of an all-reduced sum is the sum of all replicas' gradients, and that of a mean is their mean. The
    gradient of an all-gather is the sum of all replicas' gradients of the replica's own part."""
    strategy = strategy_of(n)
    factors = [1.0, 3.0, 8.0, 2.0, 4.0][:n]

    def step(factor):
        x, part = tf.identity(42.0), tf.identity([[3.0], [5.0]])
        with tf.GradientTape() as tape:
            tape.watch([x, part])
            y = replica().all_reduce(kind, x) * factor
            z = replica().all_gather(tf.identity(part), 1) * factor
        return tape.gradient([y, z], [x, part])

    of_x, of_part = strategy.run(in_mode(mode, step), args=(distributed(strategy, factors),))
    want = np.float32(sum(factors)) / np.float32(n if kind == "mean" else 1)
    assert [float(x) for x in local(strategy, of_x)] == [want] * n
    assert [x.tolist() for x in local(strategy, of_part)] == [[[sum(factors)]] * 2] * n


@pytest.mark.parametrize(("n", "mode"), [(1, "eager"), (3, "eager"), (3, "function")])
def test_gather(n, mode):
    """``strategy.gather`` and ``all_gather`` concatenate along any axis, also with sizes that differ along it."""
    strategy = strategy_of(n)
    cases = [(np.array([1.0, 2, 3]), 0), *((np.arange(4.0).reshape(1, 2, 2), axis) for axis in (0, 1, 2))]
    given = [([x + 10 * k for k in range(n)], axis) for x, axis in cases]
    given += [([np.ones((k + 1, 1)) for k in range(n)], 0), ([np.ones((1, k + 1)) for k in range(n)], 1)]
    values = [distributed(strategy, rows) for rows, _ in given]
    wanted = [np.concatenate(rows, axis).tolist() for rows, axis in given]
    axes = [axis for _, axis in given]
    gather = in_mode(mode, lambda: [strategy.gather(x, axis=axis) for x, axis in zip(values, axes, strict=True)])
    assert [x.numpy().tolist() for x in gather()] == wanted

    def step(*xs):
        return [replica().all_gather([tf.identity(x)], axis=axis)[0] for x, axis in zip(xs, axes, strict=True)]

    for everywhere, want in zip(strategy.run(in_mode(mode, step), args=values), wanted, strict=True):
        assert [x.tolist() for x in local(strategy, everywhere)] == [want] * n


@pytest.mark.parametrize("mode", MODES)
def test_gather_errors(mode):
    """Shapes that differ in another axis than the gathered one raise a ValueError. A gather of slices is an error."""
    strategy = strategy_of(2)
    for rows in ([np.ones((1, 1)), np.ones((1, 2))], [np.ones(1), np.ones((1, 2))]):
        value = distributed(strategy, rows)
        with pytest.raises(ValueError, match="differ in dtype, or in an axis other than 0"):
            in_mode(mode, lambda value=value: strategy.gather(value, axis=0))()
        with pytest.raises(ValueError, match="differ in dtype, or in an axis other than 0"):
            strategy.run(in_mode(mode, lambda x: replica().all_gather(tf.identity(x), axis=0)), args=(value,))
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([2]), tf.constant([5, 2]))
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        in_mode(mode, lambda: strategy.gather(slices, axis=0))()


def test_merge_call_and_variables_with_aggregation():
    """Assignments to variables with an aggregation, and reductions in merge_call, give the right values."""
    strategy = strategy_of(3)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        read = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                           aggregation=tf.VariableAggregation.SUM)  # fmt: skip

    def merged(strategy, x):
        return strategy.extended.batch_reduce_to("SUM", [(x, x)])[0]

    @tf.function
    def step():
        x = 2.0 ** tf.cast(number(), tf.float32)
        total.assign_add(x)
        mean.assign(x)
        read.assign(x)
        return replica().merge_call(merged, args=(x,))

    assert [float(x) for x in local(strategy, strategy.run(step))] == [7.0] * 3
    assert [float(x) for x in total.values] == [7.0] * 3
    assert [float(x) for x in mean.values] == [np.float32(7 / 3)] * 3
    assert float(read.read_value()) == 7.0


CLASSES, SAMPLES, FEATURES = 3, 120, 8


def trained(strategy, eager=False):
    """Train with Keras' ``fit`` and return all losses and weights. The embedding's gradients are sparse."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((SAMPLES, FEATURES)).astype("float32")
    y = np.argmax(x @ rng.standard_normal((FEATURES, CLASSES)), 1)
    x = np.abs(x * 3).astype("int32") % 11
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = keras.layers.Embedding(11, 4), keras.layers.Flatten(), keras.layers.Dense(CLASSES, "tanh")
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Without XLA: compiling takes longer than training.
        model.compile(keras.optimizers.SGD(0.5, momentum=0.5), loss, run_eagerly=eager, jit_compile=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(SAMPLES).with_options(options)
    history = model.fit(dataset, epochs=1 if eager else 4, shuffle=False, verbose=0)
    return np.array(history.history["loss"]), [np.asarray(w) for w in model.get_weights()]


# A step adds the gradients of 120 samples in another order, with an error of at most about 120 roundings, each 2**-24
# of the largest partial sum (Higham, SISC 1993); in each of 4 steps at rate 0.5, tanh and momentum multiply it by less
# than 4: 120 * 2**-24 * 4**4 = 1.8e-3 of the largest weight.
CLOSE = 120 * 2.0**-24 * 4**4


@pytest.mark.parametrize(
    ("n", "op", "eager"),
    [
        (3, "hierarchical", False),
        pytest.param(5, "ring on a ring", False, marks=pytest.mark.slow),
        pytest.param(3, "hierarchical", True, marks=pytest.mark.slow),  # in eager steps the host engine reduces
    ],
)
def test_keras_fit_on_n_replicas_is_fit_on_one(n, op, eager):
    """Keras' ``fit`` on several replicas gives the losses and the weights of one replica, up to rounding."""
    losses, weights = trained(tf.distribute.get_strategy(), eager)
    assert eager or losses[-1] < losses[0] * 0.99
    found, others = trained(strategy_of(n, op), eager)
    np.testing.assert_allclose(found, losses, rtol=CLOSE, atol=0)
    for other, weight in zip(others, weights, strict=True):
        np.testing.assert_allclose(other, weight, rtol=0, atol=CLOSE * np.abs(weight).max())
