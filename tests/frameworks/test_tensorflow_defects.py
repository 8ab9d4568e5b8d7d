"""The ops of ``crossreduce.tensorflow`` do not have the defects D1 to D17 of TensorFlow's (docs/contract.md), and wrong
calls raise errors.

Each defect except D7 and D16 has a test that names it: D1, D2, D11 and D12 in test_tensorflow_ops.py, D5, D8 and D9 in
test_tensorflow_pages.py, the others here. D7 and D16 are in functions of TensorFlow that call no cross-device op.
"""

import pickle

import numpy as np
import pytest
from tensorflow_values import (
    MEAN,
    MODES,
    OPS,
    SMALL,
    SUM,
    Mirrored,
    PerReplica,
    crt,
    on,
    outcomes,
    per_replica,
    slices,
    tf,
)  # fmt: skip

import crossreduce as cr


@pytest.mark.parametrize("mode", MODES)
def test_d3_shapes_must_agree(mode):
    """D3: replicas of different shapes raise an error, even if their sizes agree."""
    alone = PerReplica([on(0, np.ones((2, 3))), on(1, np.ones((3, 2)))])
    a = PerReplica([on(0, [1.0, 2.0]), on(1, [1.0, 2.0, 3.0])])
    b = PerReplica([on(0, [1.0, 2.0, 3.0]), on(1, [1.0, 2.0])])
    for pairs in ([(alone, alone)], [(a, a), (b, b)]):
        with pytest.raises(ValueError, match=r"differ in shape or dtype"):
            outcomes(mode, lambda pairs=pairs: SMALL.batch_reduce(SUM, pairs))


@pytest.mark.parametrize("mode", MODES)
def test_replicas_that_differ_raise_both_libraries_errors(mode):
    """A MismatchError of an op for TensorFlow is also TensorFlow's InvalidArgumentError, as its own ops raise."""
    value = PerReplica([on(0, [1.0]), on(1, [[1.0, 2.0]])])
    for call in (
        lambda: SMALL.reduce(SUM, value, value),
        lambda: SMALL.batch_reduce(SUM, [(value, value), (value, "CPU:0")]),
        lambda: SMALL._gather(value, value, 0),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"replicas .*differ in") as found:
            outcomes(mode, call)
        error = pickle.loads(pickle.dumps(found.value))
        assert isinstance(error, cr.MismatchError)
        assert error.message == str(error) == str(found.value)
        assert (error.op, error.node_def, error.error_code) == (None, None, tf.errors.INVALID_ARGUMENT)


@pytest.mark.parametrize("mode", MODES)
def test_d4_d6_dtypes_mix_in_a_batch(mode):
    """D4, D6: a batch may have several dtypes, integers included, with any packing."""
    given = [np.array([1.5, 2.5]), np.array([1, 2, 3], "int32"), np.array(2.0, "float16"), np.array([1 + 2j])]
    values = [per_replica([x, (x * 2).astype(x.dtype), (x * 4).astype(x.dtype)]) for x in given]
    for packs in (0, 1, 3):
        made = outcomes(mode, lambda packs=packs: crt.HierarchicalCopyAllReduce(packs).batch_reduce(
            SUM, [(value, value) for value in values]
        ))  # fmt: skip
        for (_, _, components), x in zip(made, given, strict=True):
            assert all(c.dtype == x.dtype and (c == x * 7).all() for c in components)


def test_d10_d13_mirrored_values_and_two_replicas_on_one_device():
    """D10, D13: a Mirrored is summed like a PerReplica, and two replicas on one device are both summed."""
    for value in per_replica([1.0, 2.0], wrap=Mirrored), PerReplica([on(0, 1.0), on(0, 2.0)]):
        for call in (
            lambda op, where, value=value: SMALL.reduce(op, value, where),
            lambda op, where, value=value: SMALL.batch_reduce(op, [(value, where)])[0],
        ):
            assert float(call(SUM, "CPU:0")) == 3.0
            assert [float(x) for x in call(MEAN, value).values] == [1.5, 1.5]


@pytest.mark.parametrize("mode", MODES)
def test_d14_means_neither_overflow_nor_wrap(mode):
    """D14: the mean of two 40000s in float16 is 40000, of two 100s in int8 100."""
    given = [np.array([40000.0], "float16"), np.array([100], "int8"), np.array([2**31 - 1], "int32")]
    values = [per_replica([x, x]) for x in given]
    made = outcomes(mode, lambda: SMALL.batch_reduce(MEAN, [(value, value) for value in values]))
    dtypes = ["float16", "float32", "float64"]
    for (_, _, components), x, dtype in zip(made, given, dtypes, strict=True):
        assert [(c.dtype, c.tolist()) for c in components] == [(dtype, x.tolist())] * 2


@pytest.mark.parametrize(("group", "joined"), [(10, 3), (1, 25), (25, 1), (0, 25)])
def test_d15_a_group_has_at_most_the_given_number(group, joined):
    """D15: at most ``agg_small_grads_max_group`` small tensors (0: only 1) form a group, which has one AddN."""
    op = crt.AllReduceCrossDeviceOps("one_device", 0, 100, group)
    values = [per_replica([float(k), 2.0]) for k in range(25)]
    pairs = [(value, value) for value in values]
    function = tf.function(lambda: [x.values[0] for x in op.batch_reduce(SUM, pairs)], autograph=False)
    assert [float(x) for x in function()] == [k + 2.0 for k in range(25)]
    graph = function.get_concrete_function().graph
    assert sum(o.type == "AddN" for o in graph.get_operations()) == joined


def test_d17_strategies_accept_an_op():
    """D17: ops are instances of ``tf.distribute.CrossDeviceOps`` and true as a bool, so a strategy uses them."""
    for op in OPS.values():
        assert isinstance(op, tf.distribute.CrossDeviceOps)
        assert bool(op)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=op)
        assert strategy.extended._cross_device_ops is op


def test_bad_values():
    """Invalid values and arguments of ops raise the exceptions that TensorFlow's users catch."""
    value = per_replica([1.0, 2.0])
    cases = [
        (ValueError, "not of tf.distribute", lambda: SMALL.reduce(SUM, cr.PerReplica([1.0, 2.0]), "CPU:0")),
        (ValueError, "not of tf.distribute", lambda: SMALL.reduce(SUM, value, cr.PerReplica([1.0, 2.0]))),
        (ValueError, "not of tf.distribute", lambda: SMALL.broadcast(cr.Mirrored([1.0, 1.0]), value)),
        (ValueError, "at least one component", lambda: SMALL.reduce(SUM, PerReplica(()), "CPU:0")),
        (TypeError, "string", lambda: SMALL.reduce(SUM, per_replica(["a", "b"]), "CPU:0")),
        (TypeError, "bool", lambda: SMALL.reduce(SUM, per_replica([True, False]), "CPU:0")),
        (TypeError, "SparseTensor", lambda: SMALL.reduce(SUM, tf.sparse.from_dense([1.0, 0.0]), "CPU:0")),
        (ValueError, "differ in", lambda: SMALL.reduce(SUM, PerReplica([on(0, 1.0), on(1, 1)]), "CPU:0")),
        (ValueError, "one of its components", lambda: SMALL.broadcast(value, "CPU:0")),
        (ValueError, "no such logical device", lambda: SMALL.reduce(SUM, value, "GPU:7")),
        (ValueError, "given:", lambda: SMALL.broadcast(tf.constant(1.0), PerReplica(()))),
        (ValueError, "given:", lambda: SMALL._gather(per_replica([[1.0], [2.0]]), np.ones(2), 0)),
        (ValueError, r"pair 1: destinations", lambda: SMALL.batch_reduce(SUM, [(value, value), (value, [])])),
        (ValueError, "topology", lambda: crt.HierarchicalCopyAllReduce(1, 3)),
        (ValueError, "accumulation_fn", lambda: crt.ReductionToOneDevice(None, 3)),
        (ValueError, "cannot be parsed", lambda: crt.ReductionToOneDevice("foo")),
        (NotImplementedError, "gather does not", lambda: SMALL._gather(slices(0, [[1.0, 2.0]], [1]), "CPU:0", 0)),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text) as found:
            call()
        assert isinstance(found.value, cr.ReductionError), text
