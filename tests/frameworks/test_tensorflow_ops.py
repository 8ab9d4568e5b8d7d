"""The ops of ``crossreduce.tensorflow``, called as ``tf.distribute`` calls them: all kinds of values and destinations.

TensorFlow's own tests of its ops (cross_device_ops_test.py) have these assertions. D1 to D17 are the defects of
TensorFlow that docs/contract.md lists.
"""

import copy
import itertools

import numpy as np
import pytest
from pairs import each, pairs
from tensorflow_values import (
    MEAN,
    MODES,
    OPS,
    SMALL,
    SUM,
    Mirrored,
    PerReplica,
    crt,
    destinations_of,
    name,
    on,
    outcomes,
    per_replica,
    place,
    slices,
    tf,
)

import crossreduce as cr
from crossreduce.engines.host import HostExecutable

ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "forest", "nccl", "auto")


@pytest.mark.parametrize(("op", "n", "mode"), each(OPS, [1, 3, 8], MODES))
def test_reduction_and_broadcast(op, n, mode):
    """Every op reduces and broadcasts to all kinds of destinations. One device receives a bare tensor (D2, D12)."""
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
def test_batches_over_all_pairs_of_destinations(mode):
    """In a batch each pair has the result that it would have alone, for any destination of the other (D11, D13)."""
    op, n, first, second = OPS["small tensors joined"], 3, [1.0, 4.0, 16.0], [1.0, 2.0, 3.0]
    there = destinations_of(n)
    both = list(itertools.product(("the same devices", "another device", "a string", "in another order"), repeat=2))
    made = outcomes(mode, lambda: [
        x for a, b in both
        for x in op.batch_reduce(MEAN, [(per_replica(first), there[a][0]), (per_replica(second), there[b][0])])
    ])  # fmt: skip
    wanted = [(key, xs) for pair in both for key, xs in zip(pair, (first, second), strict=True)]
    for (kind, places, components), (key, xs) in zip(made, wanted, strict=True):
        assert (kind == "bare", places) == there[key][1:], key
        assert [float(x) for x in components] == [np.float32(sum(xs) / n)] * len(places)


@pytest.mark.parametrize(("op", "reduce_op", "mode"), pairs(["to one", "hierarchical"], [SUM, MEAN], MODES))
def test_indexed_slices(op, reduce_op, mode):
    """Slices are concatenated in the order of the replicas, with duplicates. A mean divides them."""
    op = OPS[op]
    value = PerReplica([slices(0, [[1.0, 2.0]], [1]), slices(1, [[3.0, 4.0], [5.0, 6.0]], [1, 3])])

    def body():
        several, bare = op.batch_reduce(reduce_op, [(value, value), (value, "CPU:1")])
        assert type(several) is Mirrored
        found = [*several.values, bare, op.reduce(reduce_op, value, "CPU:1")]
        assert all(isinstance(x, tf.IndexedSlices) for x in found)
        assert [place(x) for x in found] == [name(0), name(1), name(1), name(1)]
        return [(x.values, x.indices, tf.convert_to_tensor(x)) for x in found]

    by = 1 if reduce_op is SUM else 2
    dense = np.zeros((5, 2), "float32")
    dense[1], dense[3] = np.array([4.0, 6.0]) / by, np.array([5.0, 6.0]) / by
    for values, indices, converted in tf.function(body, autograph=False)() if mode == "function" else body():
        assert values.numpy().tolist() == [[1 / by, 2 / by], [3 / by, 4 / by], [5 / by, 6 / by]]
        assert indices.numpy().tolist() == [1, 1, 3]
        assert converted.numpy().tolist() == dense.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_slices_and_dense_tensors(mode):
    """If a value is sparse on some replicas only, its result is dense. A component may lack slices or a dense_shape."""
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


@pytest.mark.parametrize(
    ("algorithm", "mode", "counts"),
    [*((a, "eager", range(1, 10)) for a in ALGORITHMS), *each(ALGORITHMS[:-2], ["function"], [[5], [9], [2]])],
)
def test_every_algorithm_on_every_number_of_devices(algorithm, mode, counts):
    """Every algorithm is right on 1 to 9 devices, with packs and without. Odd numbers lose no contribution (D1)."""
    rng = np.random.default_rng(0)
    for n in counts:
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


def test_large_tensors_are_not_joined_in_host_memory():
    """In a tf.function only small tensors are joined into one. Each result is right, wherever it is in the batch."""
    sizes = [3, 70_000, 0, 5, 20_000, 7]
    given = [[(np.arange(size) % 97) * (k + 1.0) * (j + 1) for k in range(3)] for j, size in enumerate(sizes)]
    values = [per_replica(xs) for xs in given]
    made = tf.function(lambda: [x.values for x in SMALL.batch_reduce(SUM, [(x, values[0]) for x in values])])
    for components, xs in zip(made(), given, strict=True):
        assert [x.numpy().tolist() for x in components] == [sum(xs).tolist()] * 3
    operations = made.get_concrete_function().graph.get_operations()
    assert {x.outputs[0].shape[0] for x in operations if x.type == "ConcatV2"} == {3 + 0 + 5 + 7}


def test_ops_can_be_copied():
    """An op can be copied, as TensorFlow's cluster coordinator copies strategies. The copy reduces in the same way."""
    ops = [*OPS.values(), crt.HierarchicalCopyAllReduce(2, cr.Topology.ring(3, 25))]
    value = per_replica([1.0, 2.0, 4.0])
    for op in ops:
        assert float(copy.deepcopy(op).reduce(SUM, value, "CPU:1")) == 7.0


@pytest.mark.parametrize("mode", MODES)
def test_variables_are_read(mode):
    """A variable of TensorFlow or Keras, mirrored or synchronized on read, has one component per replica, as value and
    as destination. It is read and never written."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        mirrored = tf.Variable([2.0, 3.0])
        on_read = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        keras = tf.keras.Variable([2.0, 3.0], dtype="float32")
    strategy.run(lambda: on_read.assign_add(1.0))  # to 2, 2, 2, or 2, 1, 1 if only the first had the initial value
    given = [mirrored, on_read, keras, keras.value]
    made = outcomes(mode, lambda: [*SMALL.batch_reduce(SUM, [(x, x) for x in given]), SMALL.broadcast(keras, keras)])
    total = sum(float(x) for x in on_read.values)
    for (_, places, components), want in zip(made, ([6, 9], total, [6, 9], [6, 9], [2, 3]), strict=True):
        assert places == [name(k) for k in range(3)]
        assert [x.tolist() for x in components] == [want] * 3
    assert mirrored.numpy().tolist() == [2.0, 3.0]


def test_workers_in_a_graph_of_tensorflow_1():
    """A graph of TensorFlow 1 may name devices that only its session has. Results are on the devices of the value."""
    places = [f"/job:worker/replica:0/task:1/device:CPU:{k}" for k in (0, 9, 300)]
    with tf.Graph().as_default():
        xs = []
        for k, where in enumerate(places):
            with tf.device(where):
                xs.append(tf.constant([1.0, 2.0]) * 2.0**k)
        result = SMALL.reduce(SUM, PerReplica(xs), PerReplica(xs)).values
        assert [x.device for x in result] == places
        with pytest.raises(cr.DeviceError, match="no such logical device"):
            SMALL.reduce(SUM, per_replica([1.0, 2.0]), "host1/cpu:0")
        graph = xs[0].graph.as_graph_def()
    for node in graph.node:
        node.device = ""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = session.run(tf.import_graph_def(graph, return_elements=[x.name for x in result]))
    assert [x.tolist() for x in found] == [[7.0, 14.0]] * 3


def test_arguments_of_functions_have_no_device():
    """Arguments of a tf.function have no device. Results are right, and are on devices only if other values are."""

    @tf.function
    def plain(*xs):
        assert all(x.device == "" for x in xs)
        return SMALL.reduce(SUM, PerReplica(xs), PerReplica(xs[::-1])).values

    @tf.function
    def placed(*xs):
        where = per_replica([0.0] * len(xs), 4)
        result = SMALL.reduce(SUM, PerReplica(xs), where)
        # The destinations, xs, have no devices: each replica's result is on the device of its component.
        back = SMALL.reduce(SUM, where, PerReplica(xs))
        for made in result, back:
            assert [place(x) for x in made.values] == [name(4 + k) for k in range(len(xs))]
        return (*result.values, SMALL.reduce(SUM, PerReplica(xs), "CPU:3"), *(x + 7.0 for x in back.values))

    xs = [on(k, 2.0**k) for k in range(3)]
    for function in plain, placed:
        assert {float(x) for x in function(*xs)} == {7.0}
    assert {o.device for o in plain.get_concrete_function(*xs).graph.get_operations()} == {""}
    with tf.Graph().as_default(), pytest.raises(ValueError, match="not empty"):
        SMALL.reduce(SUM, per_replica([1.0, 2.0]), "")


def unranked(k, x):
    """Return a tensor on a device whose rank TensorFlow does not know."""
    with tf.device(f"CPU:{k}"):
        return tf.numpy_function(lambda: np.asarray(x, "float32"), [], tf.float32)


@pytest.mark.parametrize(("op", "shape"), each(["to one", "add_n", "unpacked"], [(), (0, 2), (2, 3, 1)]))
def test_unknown_ranks_while_tracing(op, shape):
    """Tensors of unknown rank are reduced, also in a batch with others, with right shapes and gradients."""
    op, given = OPS[op], [np.full(shape, 2.0**k) for k in range(3)]

    @tf.function(autograph=False)
    def reduced():
        xs = [unranked(k, x) for k, x in enumerate(given)]
        mixed = PerReplica([xs[0], on(1, given[1], "float32"), xs[2]])  # the second one has a known rank
        fixed = per_replica([1.0, 2.0, 4.0])
        with tf.GradientTape() as tape:
            tape.watch(xs)
            batch = op.batch_reduce(MEAN, [(PerReplica(xs), PerReplica(xs)), (fixed, fixed), (mixed, "CPU:1")])
        assert [place(x) for x in (*batch[0].values, batch[2])] == [name(k) for k in (0, 1, 2, 1)]
        return batch[0].values, batch[1].values, batch[2], tape.gradient(batch[0].values[0], xs)

    mean, fixed, mixed, gradients = reduced()
    for x in (*mean, mixed):
        np.testing.assert_array_equal(x, np.full(shape, 7 / 3, "float32"), strict=True)
    assert [float(x) for x in fixed] == [np.float32(7 / 3)] * 3
    for x in gradients:
        np.testing.assert_array_equal(x, np.full(shape, 1 / 3, "float32"), strict=True)


def test_gather():
    """``_gather`` joins components in the order of replicas, to all kinds of destinations, also of unknown sizes."""
    given = [np.full((1 + k, 2), k) for k in range(3)]
    there = destinations_of(3).values()
    made = outcomes("eager", lambda: [SMALL._gather(per_replica(given), where, 0, None) for where, *_ in there])
    for (kind, found, components), (_, alone, places) in zip(made, there, strict=True):
        assert (kind == "bare", found) == (alone, places)
        assert all(x.tolist() == np.concatenate(given).tolist() for x in components)

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([3, None]), tf.TensorSpec([None, None])])
    def of_unknown_sizes(*xs):
        return SMALL._gather(PerReplica(xs), "CPU:1", 1)

    xs = [np.full((3, width), width, "float32") for width in (2, 1, 4)]
    assert of_unknown_sizes(*xs).numpy().tolist() == np.concatenate(xs, 1).tolist()


def test_any_tensor_can_be_moved():
    """Text can be broadcast and gathered, and a Mirrored can be broadcast. The value ``None`` is an error."""
    text = per_replica([["a"], ["b"], ["c"]])
    assert SMALL._gather(text, "CPU:1", 0).numpy().tolist() == [b"a", b"b", b"c"]
    copies = SMALL.broadcast(tf.constant("a"), text)
    assert [x.numpy() for x in copies.values] == [b"a"] * 3
    assert [x.device for x in copies.values] == [name(k) for k in range(3)]
    assert float(SMALL.broadcast(per_replica([4.0, 4.0], wrap=Mirrored), "CPU:3")) == 4.0
    with pytest.raises(ValueError, match="cannot be converted to a tensor"):
        SMALL.broadcast(None, "CPU:0")


def test_eager_batches_run_in_the_host_engine(monkeypatch):
    """The host engine reduces eager tensors into one array that all results share, unless a tape records them."""
    runs = []
    run = HostExecutable.run
    monkeypatch.setattr(HostExecutable, "run", lambda *args: runs.append(1) or run(*args))
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
