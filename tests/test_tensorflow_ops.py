"""The ops of ``crossreduce.tensorflow``, called as ``tf.distribute`` calls them: values, destinations, errors.

What TensorFlow's own tests assert of its ops (cross_device_ops_test.py: reduction and broadcast over all kinds of
destinations, IndexedSlices) is asserted here of ours, on 1 to 9 devices, eagerly and in functions. The defects D1 to
D17 that were found in TensorFlow's ops each have a test that names them, but D2, which the first test covers, and D7
and D16, which lie in code that no op takes part in.
"""

from __future__ import annotations

import copy
import itertools
import logging

import numpy as np
import pytest
from frameworks import NAMES, load

import crossreduce as cr

if "tensorflow" not in NAMES:
    pytest.skip("tensorflow is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
tf = load("tensorflow").tf  # sets up logical devices, once for all tests

from tensorflow.python.distribute.values import Mirrored, PerReplica  # noqa: E402 - nothing public makes one

import crossreduce.tensorflow as crt  # noqa: E402 - after TensorFlow has its devices

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "forest", "nccl", "auto")
OPS = {
    "to one": crt.ReductionToOneDevice(),
    "to CPU:1": crt.ReductionToOneDevice(reduce_to_device="/device:CPU:1"),
    "add_n": crt.ReductionToOneDevice(accumulation_fn=tf.add_n),
    "all-reduce": crt.AllReduceCrossDeviceOps(),
    "unpacked": crt.AllReduceCrossDeviceOps("hierarchical_copy", 0),
    "hierarchical": crt.HierarchicalCopyAllReduce(8),
    "small ones joined": crt.AllReduceCrossDeviceOps("hierarchical_copy", 0, 100, 10),
}
MODES = ("eager", "function")
SMALL = crt.HierarchicalCopyAllReduce()


def name(k):
    return f"/job:localhost/replica:0/task:0/device:CPU:{k}"


def place(x):
    """Return where a tensor is; inside functions TensorFlow leaves out what is said elsewhere."""
    return name(x.device.rpartition("/device:CPU:")[2]) if x.device else ""


def on(k, x, dtype=None):
    with tf.device(f"CPU:{k}"):
        return tf.identity(tf.constant(x, dtype))


def per_replica(xs, first=0, wrap=PerReplica):
    return wrap([on(first + k, x) for k, x in enumerate(xs)])


def outcome(result):
    """Return a result's kind, where its components are and the components."""
    if isinstance(result, tf.distribute.DistributedValues):
        assert type(result) is Mirrored
        return "mirrored", [place(x) for x in result.values], list(result.values)
    assert not isinstance(result, tf.Variable)
    return "bare", [place(result)], [result]


def outcomes(mode, call):
    """Run a function that returns a list of results, eagerly or traced; values come as NumPy's."""
    seen = []

    def body():
        seen[:] = [outcome(result) for result in call()]
        return [components for _, _, components in seen]

    made = tf.function(body, autograph=False)() if mode == "function" else body()
    values = [[np.asarray(tf.convert_to_tensor(x)) for x in components] for components in made]
    return [(kind, where, each) for (kind, where, _), each in zip(seen, values, strict=True)]


def variable(k, x):
    with tf.device(f"CPU:{k}"):
        return tf.Variable(x)


def destinations_of(n):
    """Return all kinds of destinations: what to give, whether the result is one bare tensor, and its devices."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(n)])
    with strategy.scope():
        shared = tf.Variable(1.0)
    here = [name(k) for k in range(n)]
    alone = n == 1
    slices = tf.IndexedSlices(on(1, [[1.0]]), on(1, [0]))
    return {
        "the same devices": (per_replica([1.0] * n, wrap=Mirrored), alone, here),
        "in another order": (Mirrored([on(k, 1.0) for k in reversed(range(n))]), alone, here[::-1]),  # D12
        "other devices": (per_replica([1.0] * 2, n, Mirrored), False, [name(n), name(n + 1)]),
        "another device": (per_replica([1.0], 3, Mirrored), True, [name(3)]),
        "a mirrored variable": (shared, alone, here),
        "a string": ("/cpu:0", True, [name(0)]),
        "a short string": ("CPU:2", True, [name(2)]),
        "a tensor": (on(1, 7), True, [name(1)]),
        "slices": (slices, True, [name(1)]),
        "a variable": (variable(2, 5.0), True, [name(2)]),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_reduction_and_broadcast(op, n, mode):
    """Every op reduces to, and broadcasts to, all kinds of destinations; one device gets a bare tensor (D2, D12)."""
    op = OPS[op]
    first, second = [float((n + 1) ** k % 8191) for k in range(n)], [k + 1.0 for k in range(n)]
    values = [per_replica(first), per_replica(second)]
    there = destinations_of(n)

    def call():
        found = []
        for where, *_ in there.values():
            found += [op.reduce(kind, value, destinations=where) for kind in (MEAN, SUM) for value in values]
            found.append(op.broadcast(tf.constant(3.0), where))
        return found

    made = iter(outcomes(mode, call))
    for key, (_, alone, devices) in there.items():
        sums = [sum(first) / n, sum(second) / n, sum(first), sum(second), 3.0]
        for want in sums:
            kind, places, components = next(made)
            assert kind == ("bare" if alone else "mirrored"), key
            assert places == devices, key
            assert [float(x) for x in components] == [np.float32(want)] * len(devices), key
    assert float(there["a variable"][0]) == 5.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_batches_over_all_pairs_of_destinations(op, n, mode):
    """A batch gives each pair what it would get alone, whatever the other's destination is (D11, D13)."""
    op = OPS[op]
    first, second = [float((n + 1) ** k) for k in range(n)], [k + 1.0 for k in range(n)]
    values = [per_replica(first), per_replica(second)]
    there = destinations_of(n)
    pairs = list(itertools.product(("the same devices", "another device", "a string", "in another order"), repeat=2))

    def call():
        found = []
        for a, b in pairs:
            for kind in (SUM, MEAN):
                found += op.batch_reduce(kind, [(values[0], there[a][0]), (values[1], there[b][0])])
        return found

    made = iter(outcomes(mode, call))
    for pair in pairs:
        for divisor in (1, n):
            for key, xs in zip(pair, (first, second), strict=True):
                kind, places, components = next(made)
                assert (kind == "bare", places) == there[key][1:], (pair, key)
                assert [float(x) for x in components] == [np.float32(sum(xs) / divisor)] * len(places)


def slices(k, values, indices, shape=(5, 2)):
    with tf.device(f"CPU:{k}"):
        return tf.IndexedSlices(on(k, values), on(k, indices), None if shape is None else tf.constant(shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("reduce_op", [SUM, MEAN])
@pytest.mark.parametrize("op", ["to one", "all-reduce", "hierarchical"])
def test_indexed_slices(op, reduce_op, batch, mode):
    """Slices are listed in the order of the replicas, duplicates kept; a mean divides them."""
    op = OPS[op]
    value = PerReplica([slices(0, [[1.0, 2.0]], [1]), slices(1, [[3.0, 4.0], [5.0, 6.0]], [1, 3])])

    def body():
        result = op.batch_reduce(reduce_op, [(value, value)])[0] if batch else op.reduce(reduce_op, value, value)
        assert type(result) is Mirrored
        assert all(isinstance(x, tf.IndexedSlices) for x in result.values)
        assert [x.device for x in result.values] == [name(0), name(1)]
        bare = op.reduce(reduce_op, value, "CPU:1")
        assert isinstance(bare, tf.IndexedSlices)
        return [(x.values, x.indices, tf.convert_to_tensor(x)) for x in (*result.values, bare)]

    by = 1 if reduce_op is SUM else 2
    dense = np.zeros((5, 2), "float32")
    dense[1], dense[3] = np.array([4.0, 6.0]) / by, np.array([5.0, 6.0]) / by
    for values, indices, whole in tf.function(body, autograph=False)() if mode == "function" else body():
        assert values.numpy().tolist() == [[1 / by, 2 / by], [3 / by, 4 / by], [5 / by, 6 / by]]
        assert indices.numpy().tolist() == [1, 1, 3]
        assert whole.numpy().tolist() == dense.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_slices_beside_dense_ones(mode):
    """Sparse on some replicas and dense on others gives a dense result; no slices, or no dense_shape, fit too."""
    mixed = PerReplica([slices(0, [[1.0, 2.0]], [1]), on(1, np.ones((5, 2), "float32")), slices(2, [[4.0, 4.0]], [1])])
    empty = PerReplica([slices(0, np.zeros((0, 2), "float32"), np.zeros(0, "int32")), slices(1, [[3.0, 4.0]], [2])])
    shapeless = PerReplica([slices(k, [[float(k)]], [k], None) for k in range(2)])

    def body():
        a, b, c = SMALL.batch_reduce(SUM, [(mixed, mixed), (empty, empty), (shapeless, shapeless)])
        assert not isinstance(a.values[0], tf.IndexedSlices)
        return a.values, [(x.values, x.indices) for x in b.values], [(x.values, x.indices) for x in c.values]

    a, b, c = tf.function(body, autograph=False)() if mode == "function" else body()
    want = np.ones((5, 2))
    want[1] += [5.0, 6.0]
    assert [x.numpy().tolist() for x in a] == [want.tolist()] * 3
    assert [(v.numpy().tolist(), i.numpy().tolist()) for v, i in b] == [([[3.0, 4.0]], [2])] * 2
    assert [(v.numpy().tolist(), i.numpy().tolist()) for v, i in c] == [([[0.0], [1.0]], [0, 1])] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_on_every_number_of_devices(algorithm, mode):
    """Any algorithm, with packs or without, is right on 1 to 9 devices; D1: an odd number loses nobody's part."""
    rng = np.random.default_rng(0)
    for n in range(1, 10):
        op = crt.AllReduceCrossDeviceOps(algorithm, num_packs=n % 4)
        given = [rng.integers(-1000, 1000, (n, *shape)).astype("float32") for shape in ((), (0,), (3, 2), (17,))]
        given[0] = np.array([2.0**k for k in range(n)], "float32")
        values = [per_replica(list(rows)) for rows in given]
        made = outcomes(mode, lambda values=values, op=op: op.batch_reduce("SUM", [(v, v) for v in values]))
        for (kind, places, components), rows in zip(made, given, strict=True):
            assert kind == ("bare" if n == 1 else "mirrored")
            assert places == [name(k) for k in range(n)]
            for x in components:
                np.testing.assert_array_equal(x, rows.sum(0))


@pytest.mark.parametrize("mode", MODES)
def test_a_topology_is_planned_on(mode, caplog):
    """The op plans on the topology it was given, matched by position, and says so once at INFO."""
    part = cr.Topology.machine("dgx-1v").subset(["cuda:0", "cuda:1", "cuda:2", "cuda:4", "cuda:6"])
    value = per_replica([2.0**k * np.ones(5, "float32") for k in range(5)])
    with caplog.at_level(logging.INFO, "crossreduce"):
        for op in (crt.AllReduceCrossDeviceOps("forest", topology=part), crt.HierarchicalCopyAllReduce(2, part)):
            ((_, _, components),) = outcomes(mode, lambda op=op: [op.reduce(SUM, value, value)])
            assert [x.tolist() for x in components] == [[31.0] * 5] * 5
    assert "topology" in repr(op)


def test_d1_the_last_of_an_odd_number():
    """D1: the sum of 2^d and its mean are right where TensorFlow's op leaves the last device out."""
    for n in (3, 5, 7, 9):
        value = per_replica([2.0**k for k in range(n)])
        for op, want in ((SUM, 2.0**n - 1), (MEAN, (2.0**n - 1) / n)):
            (result,) = SMALL.batch_reduce(op, [(value, value)])
            assert [float(x) for x in result.values] == [np.float32(want)] * n


@pytest.mark.parametrize("mode", MODES)
def test_d3_shapes_must_agree(mode):
    """D3: replicas of different shapes are an error, though their sizes agree, and nothing is added to anything."""
    alone = PerReplica([on(0, np.ones((2, 3))), on(1, np.ones((3, 2)))])
    a = PerReplica([on(0, [1.0, 2.0]), on(1, [1.0, 2.0, 3.0])])
    b = PerReplica([on(0, [1.0, 2.0, 3.0]), on(1, [1.0, 2.0])])
    for pairs in ([(alone, alone)], [(a, a), (b, b)]):
        with pytest.raises(ValueError, match=r"differ in shape or dtype"):
            outcomes(mode, lambda pairs=pairs: SMALL.batch_reduce(SUM, pairs))


@pytest.mark.parametrize("mode", MODES)
def test_d4_d6_dtypes_mix_in_a_batch(mode):
    """D4, D6: a batch may hold several dtypes, integers too, whatever the packing."""
    given = [np.array([1.5, 2.5]), np.array([1, 2, 3], "int32"), np.array(2.0, "float16"), np.array([1 + 2j])]
    values = [per_replica([x, (x * 2).astype(x.dtype), (x * 4).astype(x.dtype)]) for x in given]
    for packs in (0, 1, 3):
        made = outcomes(mode, lambda packs=packs: crt.HierarchicalCopyAllReduce(packs).batch_reduce(
            SUM, [(value, value) for value in values]
        ))  # fmt: skip
        for (_, _, components), x in zip(made, given, strict=True):
            assert all(c.dtype == x.dtype and (c == x * 7).all() for c in components)


def test_d5_nccl_plans_auto():
    """D5: without NCCL "nccl" plans another way that works."""
    value = per_replica([1.0, 2.0, 4.0])
    assert float(crt.AllReduceCrossDeviceOps("nccl").reduce(SUM, value, "CPU:0")) == 7.0


@pytest.mark.parametrize("op", OPS)
def test_d8_an_empty_batch(op):
    """D8: an empty batch gives an empty list; a generator is a batch."""
    assert OPS[op].batch_reduce(SUM, []) == []
    value = per_replica([1.0, 2.0])
    (result,) = OPS[op].batch_reduce(SUM, (pair for pair in [(value, value)]))
    assert float(result.values[1]) == 3.0
    assert float(OPS[op].batch_reduce(SUM, zip([value], ["CPU:0"], strict=True))[0]) == 3.0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_d9_the_op_is_looked_at(op, n):
    """D9: what is no reduction is an error, on one device too; names are read, so "MEAN" is a mean."""
    value = per_replica([1.0, 3.0][:n])
    for bad in ("average", None, 3, tf.VariableAggregation.MEAN):
        with pytest.raises(ValueError, match="no such reduction"):
            OPS[op].reduce(bad, value, value)
        with pytest.raises(ValueError, match="no such reduction"):
            OPS[op].batch_reduce(bad, [(value, value)])
    assert float(OPS[op].reduce("MEAN", value, "CPU:0")) == n
    assert float(OPS[op].reduce(cr.ReduceOp.SUM, value, "CPU:0")) == [1.0, 4.0][n - 1]
    if "accumulation" not in repr(OPS[op]):
        assert float(OPS[op].reduce("max", value, "CPU:0")) == [1.0, 3.0][n - 1]


def test_d10_mirrored_values_are_summed():
    """D10: the copies of a Mirrored are summed like any others, by both calls."""
    value = per_replica([5.0, 5.0], wrap=Mirrored)
    assert float(SMALL.reduce(SUM, value, "CPU:0")) == 10.0
    assert float(SMALL.batch_reduce(SUM, [(value, value)])[0].values[1]) == 10.0
    assert float(SMALL.batch_reduce(MEAN, [(value, value)])[0].values[1]) == 5.0


@pytest.mark.parametrize("mode", MODES)
def test_d11_the_rest_of_the_batch_changes_nothing(mode):
    """D11: a value's result is the same beside values that go elsewhere."""
    value, other = per_replica([1.0, 2.0, 4.0]), per_replica([1.0, 1.0], 3)
    for beside in ((value, value), (value, "CPU:5"), (other, other)):
        first = outcomes(mode, lambda beside=beside: SMALL.batch_reduce(SUM, [(value, value), beside]))[0]
        assert first == ("mirrored", [name(k) for k in range(3)], [7.0] * 3)


def test_d13_two_replicas_on_one_device():
    """D13: two replicas on one device are both summed; a device's name gets one tensor, the value itself two."""
    value = PerReplica([on(0, 1.0), on(0, 2.0)])
    for call in (
        lambda where: SMALL.reduce(SUM, value, where),
        lambda where: SMALL.batch_reduce(SUM, [(value, where)])[0],
    ):
        assert float(call("CPU:0")) == 3.0
        assert [float(x) for x in call(value).values] == [3.0, 3.0]


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
def test_d15_a_group_has_as_many_as_were_asked_for(group, joined):
    """D15: of 25 small tensors at most ``agg_small_grads_max_group`` are joined: as many sums are in the graph."""
    op = crt.AllReduceCrossDeviceOps("one_device", 0, 100, group)
    values = [per_replica([float(k), 2.0]) for k in range(25)]
    pairs = [(value, value) for value in values]
    function = tf.function(lambda: [x.values[0] for x in op.batch_reduce(SUM, pairs)], autograph=False)
    assert [float(x) for x in function()] == [k + 2.0 for k in range(25)]
    graph = function.get_concrete_function().graph
    assert sum(o.type == "AddN" for o in graph.get_operations()) == joined


@pytest.mark.parametrize("n", [1, 3, 8])
def test_large_tensors_are_not_joined_in_host_memory(n):
    """In a function only small tensors are joined; each result is that of its own tensor, wherever in the batch."""
    sizes = [3, 70_000, 0, 5, 20_000, 7]
    given = [[(np.arange(size) % 97) * (k + 1.0) * (j + 1) for k in range(n)] for j, size in enumerate(sizes)]
    values = [per_replica(xs, wrap=Mirrored) for xs in given]
    made = tf.function(lambda: [x.values for x in SMALL.batch_reduce(SUM, [(x, values[0]) for x in values])])
    if n == 1:  # one destination gets bare tensors
        made = tf.function(lambda: [(x,) for x in SMALL.batch_reduce(SUM, [(x, values[0]) for x in values])])
    for components, xs in zip(made(), given, strict=True):
        assert [x.numpy().tolist() for x in components] == [sum(xs).tolist()] * n
    operations = made.get_concrete_function().graph.get_operations()
    joined = {x.outputs[0].shape[0] for x in operations if x.type == "ConcatV2"}
    assert joined == {3 + 0 + 5 + 7}


def test_d17_an_op_is_an_instance_that_holds():
    """D17: our ops are ``tf.distribute.CrossDeviceOps``, and true, so a strategy does not take its default instead."""
    for op in OPS.values():
        assert isinstance(op, tf.distribute.CrossDeviceOps)
        assert bool(op)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=op)
        assert strategy.extended._cross_device_ops is op


def test_parameters_read_like_our_own():
    """Names, order and defaults of the parameters are those of crossreduce's own classes."""
    import inspect

    for kind in crt.__all__:
        here, there = (list(inspect.signature(getattr(where, kind)).parameters.values()) for where in (crt, cr))
        assert [(p.name, p.default) for p in here] == [(p.name, p.default) for p in there]
    assert repr(crt.HierarchicalCopyAllReduce(3)) == "crossreduce.tensorflow.HierarchicalCopyAllReduce(num_packs=3)"


def test_deepcopy():
    """An op can be copied, as the coordinator copies strategies, and the copy reduces alike."""
    ops = [*OPS.values(), crt.HierarchicalCopyAllReduce(2, cr.Topology.ring(3, 25))]
    value = per_replica([1.0, 2.0, 4.0])
    for op in ops:
        assert float(copy.deepcopy(op).reduce(SUM, value, "CPU:1")) == 7.0


@pytest.mark.parametrize("mode", MODES)
def test_single_values(mode):
    """What is no distributed value counts as one replica's: tensors, variables, slices, numbers, lists, arrays."""
    given = [on(1, [1.0, 2.0]), variable(1, [1.0, 2.0]), [1.0, 2.0], np.array([1.0, 2.0], "float32")]
    for op in OPS.values():
        made = outcomes(mode, lambda op=op: [op.reduce(k, x, "CPU:2") for x in given for k in (SUM, MEAN)])
        assert [(kind, places) for kind, places, _ in made] == [("bare", [name(2)])] * 8
        assert all(x[0].tolist() == [1.0, 2.0] for _, _, x in made)
        made = outcomes(mode, lambda op=op: [op.reduce(SUM, x, "CPU:0") for x in (3.0, 3, np.int64(4))])
        assert [(x.dtype.name, x.item()) for _, _, (x,) in made] == [("float32", 3), ("int32", 3), ("int64", 4)]
        copies = op.reduce(SUM, on(0, 2.0), per_replica([0.0, 0.0], 1))
        assert [float(x) for x in copies.values] == [2.0, 2.0]
    assert SMALL.reduce(SUM, slices(1, [[1.0, 2.0]], [1]), "CPU:1").values.numpy().tolist() == [[1.0, 2.0]]
    assert [float(x) for x in SMALL.reduce(SUM, PerReplica((1.0, 2.0)), PerReplica((1.0, 2.0))).values] == [3.0, 3.0]


def test_variables_are_read():
    """Components may be variables, mirrored or synchronized on read; they are read and never written."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        mirrored = tf.Variable([2.0, 3.0])
        on_read = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    strategy.run(lambda: on_read.assign_add(1.0))  # 2 on each replica, or 1 where the first one's start is shared
    total = sum(float(x) for x in on_read.values)
    for mode in MODES:
        made = outcomes(mode, lambda: SMALL.batch_reduce(SUM, [(mirrored, mirrored), (on_read, on_read)]))
        assert [x.tolist() for x in made[0][2]] == [[6.0, 9.0]] * 3
        assert [x.tolist() for x in made[1][2]] == [total] * 3
        assert made[0][1] == [name(k) for k in range(3)]
    assert mirrored.numpy().tolist() == [2.0, 3.0]


@pytest.mark.parametrize("mode", MODES)
def test_keras_variables_count_as_what_they_hold(mode):
    """A Keras variable of a strategy is as many replicas as it has, as value and as destination; so TensorFlow's."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        variable = tf.keras.Variable([2.0, 3.0], dtype="float32")
    for given in (variable, variable.value):
        call = lambda given=given: [SMALL.reduce(SUM, given, given), SMALL.broadcast(given, given)]  # noqa: E731
        reduced, copied = outcomes(mode, call)
        assert reduced[1] == copied[1] == [name(k) for k in range(3)]
        assert [x.tolist() for x in reduced[2]] == [[6.0, 9.0]] * 3
        assert [x.tolist() for x in copied[2]] == [[2.0, 3.0]] * 3


def test_arguments_of_functions_do_not_say_where_they_are():
    """Inside a function an argument has no device: the result is right, and nothing is tied to a device in vain."""

    @tf.function
    def plain(*xs):
        assert all(x.device == "" for x in xs)
        value = PerReplica(xs)
        return [x.values for x in SMALL.batch_reduce(SUM, [(value, value), (value, PerReplica(xs[::-1]))])]

    @tf.function
    def placed(*xs):
        where = per_replica([0.0] * len(xs), 4)
        result = SMALL.reduce(SUM, PerReplica(xs), where)
        assert [place(x) for x in result.values] == [name(4 + k) for k in range(len(xs))]
        one = SMALL.reduce(SUM, PerReplica(xs), "CPU:3")
        back = SMALL.reduce(SUM, where, PerReplica(xs))  # as replica by replica, they are where the value is
        assert [place(x) for x in back.values] == [name(4 + k) for k in range(len(xs))]
        return [result.values, [one], [x + 15.0 for x in back.values]]

    for n in (2, 3, 5):
        xs = [on(k, 2.0**k) for k in range(n)]
        for each in plain(*xs):
            assert [float(x) for x in each] == [2.0**n - 1] * n
        graph = plain.get_concrete_function(*xs).graph
        assert {o.device for o in graph.get_operations()} == {""}
    for each in placed(*[on(k, x) for k, x in enumerate((1.0, 2.0, 4.0, 8.0))]):
        assert [float(x) for x in each] == [15.0] * len(each)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="not empty"):
        SMALL.reduce(SUM, per_replica([1.0, 2.0]), "")


def test_sizes_that_tracing_leaves_open():
    """Sizes may be open in a function; that they agree is made sure when it runs."""
    signature = [tf.TensorSpec([None, 2])] * 3

    @tf.function(input_signature=signature)
    def summed(*xs):
        value = PerReplica([placed(k, x) for k, x in enumerate(xs)])
        fixed = PerReplica([tf.ones([2]) for _ in xs])
        return [x.values for x in SMALL.batch_reduce(SUM, [(value, value), (fixed, fixed)])]

    def placed(k, x):
        with tf.device(f"CPU:{k}"):
            return tf.identity(x)

    for rows in (0, 1, 4):
        xs = [np.full((rows, 2), 2.0**k, "float32") for k in range(3)]
        opened, fixed = summed(*xs)
        assert [x.numpy().tolist() for x in opened] == [[[7.0, 7.0]] * rows] * 3
        assert [x.numpy().tolist() for x in fixed] == [[3.0, 3.0]] * 3
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        summed(*[np.ones((1 + k, 2), "float32") for k in range(3)])


BAD_DESTINATIONS = [
    None,
    [],
    ["CPU:0"],
    ("CPU:0",),
    3,
    0.5,
    b"CPU:0",
    np.ones(2),
    "",
    "foo",
    "XPU:zero",
    PerReplica(()),
]


@pytest.mark.parametrize("op", ["to one", "hierarchical"])
def test_bad_destinations(op):
    """What names no device is a ValueError that says what was given, and nothing moves."""
    op, value = OPS[op], per_replica([1.0, 2.0])
    for bad in BAD_DESTINATIONS:
        for call in (
            lambda bad=bad: op.reduce(SUM, value, bad),
            lambda bad=bad: op.batch_reduce(SUM, [(value, value), (value, bad)]),
            lambda bad=bad: op.broadcast(tf.constant(1.0), bad),
            lambda bad=bad: op._gather(per_replica([[1.0], [2.0]]), bad, 0),
        ):
            with pytest.raises(cr.ArgumentError, match="given:"):
                call()
    with pytest.raises(ValueError, match=r"pair 1: destinations must be"):
        op.batch_reduce(SUM, [(value, value), (value, [])])
    with pytest.raises(ValueError, match="no such logical device"):
        op.reduce(SUM, value, "GPU:7")


def test_bad_values():
    """Values, pairs, options and op arguments that are none raise what TensorFlow's users catch."""
    value = per_replica([1.0, 2.0])
    cases = [
        (ValueError, "none of tf.distribute", lambda: SMALL.reduce(SUM, cr.PerReplica([1.0, 2.0]), "CPU:0")),
        (ValueError, "none of tf.distribute", lambda: SMALL.reduce(SUM, value, cr.PerReplica([1.0, 2.0]))),
        (ValueError, "none of tf.distribute", lambda: SMALL.broadcast(cr.Mirrored([1.0, 1.0]), value)),
        (ValueError, "none of tf.distribute", lambda: SMALL._gather(cr.PerReplica([1.0]), "CPU:0", 0)),
        (ValueError, "crossreduce.tensorflow's", lambda: cr.CrossDeviceOps().reduce(SUM, value, "CPU:0")),
        (ValueError, "at least one component", lambda: SMALL.reduce(SUM, PerReplica(()), "CPU:0")),
        (ValueError, "cannot be made a tensor", lambda: SMALL.reduce(SUM, None, "CPU:0")),
        (ValueError, "cannot be made a tensor", lambda: SMALL.reduce(SUM, [[1.0], [2.0, 3.0]], "CPU:0")),
        (TypeError, "string", lambda: SMALL.reduce(SUM, per_replica(["a", "b"]), "CPU:0")),
        (TypeError, "bool", lambda: SMALL.reduce(SUM, per_replica([True, False]), "CPU:0")),
        (TypeError, "SparseTensor", lambda: SMALL.reduce(SUM, tf.sparse.from_dense([1.0, 0.0]), "CPU:0")),
        (TypeError, "RaggedTensor", lambda: SMALL.reduce(SUM, tf.ragged.constant([[1.0], []]), "CPU:0")),
        (ValueError, "differ in", lambda: SMALL.reduce(SUM, PerReplica([on(0, 1.0), on(1, 1)]), "CPU:0")),
        (ValueError, "no pair", lambda: SMALL.batch_reduce(SUM, [value])),
        (ValueError, "no pair", lambda: SMALL.batch_reduce(SUM, [(value, value, value)])),
        (ValueError, "pairs of value", lambda: SMALL.batch_reduce(SUM, 3)),
        (ValueError, "options must be", lambda: SMALL.reduce(SUM, value, value, options="ring")),
        (ValueError, "one of its components", lambda: SMALL.broadcast(value, "CPU:0")),
        (ValueError, "no such algorithm", lambda: crt.AllReduceCrossDeviceOps("bogus")),
        (ValueError, "num_packs", lambda: crt.HierarchicalCopyAllReduce(-1)),
        (ValueError, "num_packs", lambda: crt.HierarchicalCopyAllReduce(1.5)),
        (ValueError, "topology", lambda: crt.HierarchicalCopyAllReduce(1, "dgx-1v")),
        (ValueError, "accumulation_fn", lambda: crt.ReductionToOneDevice(None, 3)),
        (ValueError, "no device is spelled", lambda: crt.ReductionToOneDevice("foo")),
        (NotImplementedError, "gather does not", lambda: SMALL._gather(slices(0, [[1.0, 2.0]], [1]), "CPU:0", 0)),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text) as found:
            call()
        assert isinstance(found.value, cr.ReductionError), text


def test_options():
    """``bytes_per_pack`` cuts the batch; TensorFlow's implementation and timeout leave the plan alone."""
    value = per_replica([np.full(100, 2.0**k, "float32") for k in range(3)])
    op = crt.AllReduceCrossDeviceOps("one_device")
    options = tf.distribute.experimental.CommunicationOptions

    def sums(given):
        function = tf.function(lambda: op.reduce(SUM, value, value, options=given).values, autograph=False)
        assert [x.numpy().tolist() for x in function()] == [[7.0] * 100] * 3
        return sum(o.type == "AddN" for o in function.get_concrete_function().graph.get_operations())

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    assert sums(None) == sums(options()) == sums(options(implementation=ring, timeout_seconds=0)) == 1
    assert sums(options(bytes_per_pack=100)) == 4
    assert sums(cr.CommunicationOptions(bytes_per_pack=100)) == 4


def test_accumulation_functions():
    """``accumulation_fn`` gets the components on the device it is to work on, and stands for the sum."""
    seen = []

    def largest(xs):
        made = tf.reduce_max(tf.stack(xs), 0)
        seen.append([x.device for x in (*xs, made)])
        return made

    op = crt.ReductionToOneDevice("CPU:4", largest)
    value = per_replica([[1.0, 5.0], [3.0, 4.0]])
    assert op.reduce(SUM, value, value).values[1].numpy().tolist() == [3.0, 5.0]
    assert op.reduce(MEAN, value, "CPU:0").numpy().tolist() == [1.5, 2.5]
    assert seen == [[name(4)] * 3] * 2
    assert "largest" in repr(op)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["to one", "hierarchical"])
def test_gather(op, mode):
    """``_gather`` joins components along any axis in the order of the replicas, to every kind of destination."""
    op = OPS[op]
    given = [np.arange(4.0).reshape(1, 2, 2) + 10 * k for k in range(3)]
    value = per_replica(given)
    ragged = per_replica([np.full((1 + k, 2), k) for k in range(3)])
    for where, alone, places in destinations_of(3).values():
        made = outcomes(mode, lambda where=where: [
            *(op._gather(value, where, axis) for axis in (0, 1, 2, -1)), op._gather(ragged, where, 0, None)
        ])  # fmt: skip
        wanted = [np.concatenate(given, axis) for axis in (0, 1, 2, -1)]
        wanted.append(np.concatenate([np.full((1 + k, 2), k) for k in range(3)]))
        for (kind, found, components), want in zip(made, wanted, strict=True):
            assert (kind == "bare", found) == (alone, places)
            assert all((x == want).all() and x.shape == want.shape for x in components)
    for bad, axis in ((ragged, 1), (per_replica([[1.0], [[1.0]]]), 0), (per_replica([1.0, 2.0]), 0), (value, 3)):
        with pytest.raises(ValueError, match=r"gather needs an axis|differ in dtype"):
            outcomes(mode, lambda bad=bad, axis=axis: [op._gather(bad, "CPU:0", axis)])


def test_gather_of_sizes_that_tracing_leaves_open():
    """Sizes that are not known fit any: only what is known to differ is refused."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([3, None]), tf.TensorSpec([None, None])])
    def gathered(*xs):
        return SMALL._gather(PerReplica(xs), "CPU:1", 1)

    xs = [np.full((3, width), width, "float32") for width in (2, 1, 4)]
    assert gathered(*xs).numpy().tolist() == np.concatenate(xs, 1).tolist()


def test_what_is_only_moved_may_be_anything():
    """Text can be broadcast and gathered, though not reduced; a Mirrored is broadcast by its first component."""
    text = per_replica([["a"], ["b"], ["c"]])
    assert SMALL._gather(text, "CPU:1", 0).numpy().tolist() == [b"a", b"b", b"c"]
    copies = SMALL.broadcast(tf.constant("a"), text)
    assert [x.numpy() for x in copies.values] == [b"a"] * 3
    assert [x.device for x in copies.values] == [name(k) for k in range(3)]
    assert float(SMALL.broadcast(per_replica([4.0, 4.0], wrap=Mirrored), "CPU:3")) == 4.0
    with pytest.raises(ValueError, match="cannot be made a tensor"):
        SMALL.broadcast(None, "CPU:0")


def test_a_subclass_may_say_how():
    """A subclass that overrides an implementation is asked, as with TensorFlow's own ops."""

    class Doubled(crt.HierarchicalCopyAllReduce):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            found = super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)
            return [Mirrored([2 * x for x in result.values]) for result in found]

    value = per_replica([1.0, 2.0])
    assert [float(x) for x in Doubled().batch_reduce(SUM, [(value, value)])[0].values] == [6.0, 6.0]


def test_eager_batches_go_to_the_kernels(monkeypatch):
    """Eagerly the compiled kernels reduce, to one array that all share; where a tape watches, the loop does."""
    from crossreduce import pipeline

    runs = []
    kernels = pipeline.run_on_host
    monkeypatch.setattr(pipeline, "run_on_host", lambda *args, **names: runs.append(1) or kernels(*args, **names))
    xs = [on(k, [1.0, 2.0]) for k in range(3)]
    value = PerReplica(xs)
    result = SMALL.batch_reduce(SUM, [(value, value)])[0]
    assert runs == [1]
    assert len({np.asarray(memoryview(x)).ctypes.data for x in result.values}) == 1
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = SMALL.reduce(MEAN, value, "CPU:0")
    assert runs == [1]
    assert [g.numpy().tolist() for g in tape.gradient(y, xs)] == [[np.float32(1 / 3)] * 2] * 3
