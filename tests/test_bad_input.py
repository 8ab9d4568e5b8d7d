"""Wrong arguments: each is refused before an array is touched, with words that say what to do."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from frameworks import NAMES

import crossreduce as cr

OPS = [
    cr.ReductionToOneDevice(),
    cr.HierarchicalCopyAllReduce(),
    cr.AllReduceCrossDeviceOps("ring"),
    cr.NcclAllReduce(),
]
each_ops = pytest.mark.parametrize("ops", OPS, ids=lambda ops: type(ops).__name__)


def value(n=2):
    return cr.PerReplica([np.full(3, float(k)) for k in range(n)])


# ---- values -----------------------------------------------------------------------------------------------------


@each_ops
def test_replicas_of_different_shape(ops, framework):
    """Replicas of different shape are an error that names every replica, its device and its shape."""
    xs = framework.arrays([np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32"), np.zeros((2, 3), "float32")])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
        ops.reduce("sum", cr.PerReplica(xs), "cpu:0")
    text = str(caught.value)
    for k, shape in enumerate(["2, 3", "3, 2", "2, 3"]):
        assert f"replica {k} on cpu:{k}: float32[{shape}]" in text


@each_ops
@pytest.mark.parametrize("shapes", [((1,), (3,)), ((), (1,)), ((0,), (1,)), ((2, 2), (4,)), ((3,), (3, 1))])
def test_shapes_are_not_broadcast(ops, shapes, framework):
    """Shapes that NumPy could broadcast, or that have as many elements, still differ."""
    xs = framework.arrays([np.zeros(shape, "float32") for shape in shapes])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype"):
        ops.reduce("mean", cr.PerReplica(xs), "cpu:0")


@each_ops
def test_replicas_of_different_dtype(ops, framework):
    """Replicas of different dtype are an error that names every replica and its dtype."""
    xs = framework.arrays([np.zeros(2, "float32"), np.zeros(2, "float16"), np.zeros(2, "int32")])
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
        ops.reduce("sum", cr.PerReplica(xs), "cpu:0")
    for k, dtype in enumerate(["float32", "float16", "int32"]):
        assert f"replica {k} on cpu:{k}: {dtype}[2]" in str(caught.value)


@each_ops
def test_replicas_of_different_frameworks(ops, accelerated, numpy_):
    """Replicas of different frameworks are an error that names every replica's."""
    mixed = cr.PerReplica([numpy_.array(np.zeros(2)), accelerated.array(np.zeros(2), 1)], ["cpu:0", "cpu:1"])
    with pytest.raises(cr.MismatchError, match="different frameworks") as caught:
        ops.reduce("sum", mixed, "cpu:0")
    assert "replica 0 on cpu:0: numpy" in str(caught.value)
    assert f"replica 1 on cpu:1: {accelerated.name}" in str(caught.value)


@each_ops
@pytest.mark.parametrize("wrong", [[np.zeros(2), np.zeros(2)], (np.zeros(2),), {"a": np.zeros(2)}, None, "x", b"x"])
def test_a_value_that_is_no_value(ops, wrong):
    """A list, tuple, dict, None or text is no value, and is not turned into one."""
    with pytest.raises(cr.ArgumentError, match="must be a PerReplica or an array"):
        ops.reduce("sum", wrong, "cpu:0")
    with pytest.raises(cr.ArgumentError, match="pair 1: a value to reduce must be a PerReplica or an array"):
        ops.batch_reduce("sum", [(value(), "cpu:0"), (wrong, "cpu:0")])


@each_ops
@pytest.mark.parametrize("wrong", [object(), {1, 2}, range(3), lambda: 0, iter([1])])
def test_a_component_that_is_no_array(ops, wrong):
    """Components must be arrays or numbers of a known framework."""
    with pytest.raises(cr.ArgumentError, match="is no array"):
        ops.reduce("sum", cr.PerReplica([wrong, wrong]), "cpu:0")


@each_ops
def test_a_class_instead_of_a_value(ops):
    """A class where a value is meant is a TypeError that says so."""
    with pytest.raises(cr.UnsupportedError, match="a class stands where a value is meant"):
        ops.reduce("sum", np.ndarray, "cpu:0")


UNSUPPORTED = {
    "str": np.array(["a", "b"]),
    "bytes": np.array([b"a", b"b"]),
    "object": np.array([1, "a"], dtype=object),
    "datetime": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "timedelta": np.array([1], dtype="timedelta64[s]"),
    "structured": np.zeros(2, dtype=[("x", "f4"), ("y", "f4")]),
    "longdouble": np.zeros(2, dtype=np.longdouble),
    "huge int": 2**70,
}


@each_ops
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_dtypes_that_cannot_be_reduced(ops, op, kind):
    """Text, objects, dates, records and odd floats are a TypeError that lists what can be reduced."""
    x = UNSUPPORTED[kind]
    with pytest.raises(cr.UnsupportedError, match=r"cannot be reduced(.|\n)*cast to one of bfloat16, bool"):
        ops.reduce(op, cr.PerReplica([x, x]), "cpu:0")
    with pytest.raises(cr.UnsupportedError, match="pair 0: arrays of dtype"):
        ops.batch_reduce(op, [(cr.PerReplica([x, x]), "cpu:0")])


@each_ops
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_dtypes_that_cannot_be_moved(ops, kind):
    """Broadcast and gather of what cannot be reduced either work or raise an error of ours."""
    x = UNSUPPORTED[kind]
    y = np.atleast_1d(np.asarray(x))
    for call in (lambda: ops.broadcast(x, value()), lambda: ops.gather(cr.PerReplica([y, y]), "cpu:0", 0)):
        try:
            result = call()
        except cr.ReductionError:
            continue
        assert type(result) is cr.Mirrored


@each_ops
def test_masked_arrays(ops):
    """A masked array is refused: its mask would be lost."""
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    for call in (
        lambda: ops.reduce("sum", cr.PerReplica([masked, masked]), "cpu:0"),
        lambda: ops.broadcast(masked, "cpu:0"),
        lambda: ops.gather(cr.PerReplica([masked, masked]), "cpu:0", 0),
        lambda: ops.reduce("sum", cr.PerReplica([cr.IndexedSlices(masked, np.array([0, 1]))] * 2), "cpu:0"),
    ):
        with pytest.raises(cr.UnsupportedError, match=r"masked arrays cannot be reduced(.|\n)*filled\(0\)"):
            call()


@each_ops
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_bools_are_not_added(ops, op, framework):
    """The sum and the mean of bools are a TypeError that names max and min instead."""
    xs = framework.arrays([np.array([True, False])] * 2)
    with pytest.raises(cr.UnsupportedError, match=rf'the {op} of bools(.|\n)*"max" \(any\)'):
        ops.reduce(op, cr.PerReplica(xs), "cpu:0")


@each_ops
@pytest.mark.parametrize("op", ["min", "max"])
def test_complex_numbers_have_no_order(ops, op, framework):
    """The min and the max of complex numbers are a TypeError."""
    xs = framework.arrays([np.ones(2, "complex64")] * 2)
    with pytest.raises(cr.UnsupportedError, match="complex numbers have no order"):
        ops.reduce(op, cr.PerReplica(xs), "cpu:0")


@each_ops
@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_sparse_values_can_only_be_added(ops, op, framework):
    """Sparse values under min, max or product are a TypeError, in every sparse kind of every framework."""
    for kind in framework.kinds:
        xs = [framework.sparse(kind, np.ones((1, 2), "float32"), np.array([k]), (3, 2), k) for k in range(2)]
        with pytest.raises(cr.UnsupportedError, match="sparse values can be added, and nothing else"):
            ops.reduce(op, cr.PerReplica(xs), "cpu:0")


def test_frameworks_own_odd_arrays(tensorflow_):
    """Quantized, ragged, nested and key arrays are refused with an error of ours."""
    odd = []
    if "torch" in NAMES:
        import torch

        odd.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        odd.append(torch.empty(2, device="meta"))
    if "jax" in NAMES:
        import jax

        odd.append(jax.random.key(0))
    if "tensorflow" in NAMES:
        import tensorflow as tf

        odd.append(tf.ragged.constant([[1.0], [2.0, 3.0]]))
        odd.append(tf.constant(["a", "b"]))
    for x in odd:
        with pytest.raises(cr.ReductionError):
            cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([x, x], ["cpu:0", "cpu:1"]), "cpu:0")


def test_per_replica_needs_components():
    """A PerReplica without components, or of one bare array, a text or a dict, cannot be made."""
    with pytest.raises(cr.ArgumentError, match="PerReplica needs at least one component"):
        cr.PerReplica([])
    for wrong in (np.zeros((2, 3)), "ab", {"a": 1}, 3, None):
        with pytest.raises(cr.ArgumentError, match="PerReplica takes a list with one array a replica"):
            cr.PerReplica(wrong)
    with pytest.raises(cr.ArgumentError, match="Mirrored needs at least one component"):
        cr.Mirrored([])


def test_indexed_slices_must_fit():
    """IndexedSlices whose values, indices and dense shape do not fit together cannot be made."""
    with pytest.raises(cr.ArgumentError, match="one index for each slice"):
        cr.IndexedSlices(np.zeros((2, 3)), np.array([0]))
    with pytest.raises(cr.ArgumentError, match="one index for each slice"):
        cr.IndexedSlices(np.zeros(()), np.array([0]))
    with pytest.raises(cr.ArgumentError, match="dense_shape does not fit the slices"):
        cr.IndexedSlices(np.zeros((1, 3)), np.array([0]), (5, 2))
    with pytest.raises(cr.ArgumentError, match="IndexedSlices take arrays"):
        cr.IndexedSlices([[1.0], [2.0, 3.0]], [0, 1])


@pytest.mark.parametrize("wrong", [5, -1])
def test_sparse_index_beyond_the_shape(wrong, framework):
    """Where a sparse value has to become dense, an index beyond its shape is an error, not a lost row."""
    sparse = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([wrong]), (5, 2), 0)
    dense = framework.array(np.ones((5, 2), "float32"), 1)
    with pytest.raises(cr.ArgumentError, match="index beyond its dense shape"):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([sparse, dense]), "cpu:0")


def test_an_index_beyond_the_shape_names_its_pair_and_leaf(framework):
    """An index beyond the shape is found late; the error still names the pair of a batch and the path of a leaf."""
    good = cr.PerReplica(framework.arrays([np.ones(2, "float32")] * 2))
    sparse = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([5]), (5, 2), 0)
    wrong = [sparse, framework.array(np.ones((5, 2), "float32"), 1)]
    with pytest.raises(cr.ArgumentError, match=r"^pair 1: a sparse array has an index beyond"):
        cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(good, good), (cr.PerReplica(wrong), "cpu:0")])
    with pytest.raises(cr.ArgumentError, match=r"^leaf tree\['b'\]: a sparse array has an index beyond"):
        cr.all_reduce([{"a": x, "b": y} for x, y in zip(good, wrong, strict=True)])


@pytest.mark.parametrize("indices", [[0.5], [True], [1j]], ids=str)
def test_sparse_indices_are_integers(framework, indices):
    """Slices whose indices are no integers are refused, where they are made or where they are reduced."""

    def call():
        slices = [
            framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array(indices), (5, 2), k)
            for k in range(2)
        ]
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica(slices), "cpu:0")

    with pytest.raises(cr.ReductionError):
        call()


def test_sparse_replicas_must_fit_together(framework):
    """Sparse components of different row shape, dtype or dense shape are an error that names each."""
    ok = framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([0]), (5, 2), 0)
    others = [
        framework.sparse("IndexedSlices", np.ones((1, 3), "float32"), np.array([0]), (5, 3), 1),
        framework.sparse("IndexedSlices", np.ones((1, 2), "float64"), np.array([0]), (5, 2), 1),
        framework.sparse("IndexedSlices", np.ones((1, 2), "float32"), np.array([0]), (6, 2), 1),
    ]
    for other in others:
        with pytest.raises(cr.MismatchError, match="the replicas of one value ") as caught:
            cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([ok, other]), "cpu:0")
        assert "replica 0 on cpu:0" in str(caught.value)
        assert "replica 1 on cpu:1" in str(caught.value)
    for dense in (np.zeros((6, 2), "float32"), np.zeros((5, 2), "float64"), np.zeros((5, 2, 1), "float32")):
        with pytest.raises(cr.MismatchError):
            cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([ok, framework.array(dense, 1)]), "cpu:0")


# ---- destinations and devices -----------------------------------------------------------------------------------


@each_ops
@pytest.mark.parametrize(
    "wrong", [["cpu:0"], ("cpu:0", "cpu:1"), (), [], None, 0, 1.5, True, {}, b"cpu:0", str, object()]
)
def test_destinations_of_a_wrong_kind(ops, wrong):
    """Destinations that are no device are an error that says what was given and what is accepted."""
    accepted = r"destinations must be distributed values, a device's name, or an array(.|\n)*given: "
    x = value()
    for call in (
        lambda: ops.reduce("sum", x, wrong),
        lambda: ops.broadcast(x[0], wrong),
        lambda: ops.gather(x, wrong, axis=0),
    ):
        with pytest.raises(cr.ArgumentError, match=accepted):
            call()
    with pytest.raises(cr.ArgumentError, match="pair 1: destinations must be"):
        ops.batch_reduce("sum", [(x, x), (x, wrong)])


def framework_objects():
    found = [("np.dtype", lambda: np.dtype("float32")), ("np.random", lambda: np.random.default_rng(0))]
    if "torch" in NAMES:
        found.append(("torch.device", lambda: __import__("torch").device("cpu", 1)))
        found.append(("torch.dtype", lambda: __import__("torch").float32))
        found.append(("torch.nn.Module", lambda: __import__("torch").nn.Linear(1, 1)))
    if "jax" in NAMES:
        found.append(("jax.Device", lambda: __import__("jax").devices("cpu")[-1]))
    if "tensorflow" in NAMES:
        found.append(("tf.DType", lambda: __import__("tensorflow").float32))
        found.append(("tf.LogicalDevice", lambda: __import__("tensorflow").config.list_logical_devices("CPU")[-1]))
    return [pytest.param(make, id=name) for name, make in found]


@pytest.mark.parametrize("make", framework_objects())
def test_frameworks_objects_that_are_no_arrays(make):
    """A dtype, a device object or a module is no array: never a place, never a component."""
    thing = make()
    with pytest.raises(cr.ReductionError):
        cr.ReductionToOneDevice().reduce("sum", value(), thing)
    with pytest.raises(cr.ReductionError):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([thing, thing], ["cpu:0", "cpu:1"]), "cpu:0")


@each_ops
def test_the_empty_device(ops):
    """ "" is no device."""
    with pytest.raises(cr.DeviceError, match=r"a device's name must not be empty(.|\n)*a name such as"):
        ops.reduce("sum", value(), "")


@each_ops
@pytest.mark.parametrize(
    "name", ["foo", "cpu:-1", "cpu:x", "cpu:0:1", "a/b/cpu:0", "/job/cpu:0", "cpu:0#", "cpu 0", "cpu:٣"]
)
def test_device_spellings_that_nobody_uses(ops, name):
    """A device's name that cannot be read is shown, with names that can."""
    with pytest.raises(cr.DeviceError, match=r"no device is spelled like this(.|\n)*cuda:0#2"):
        ops.reduce("sum", value(), name)


AWAY = ["cuda:99", "host1/cpu:0", "/job:worker/task:1/device:CPU:0", "tpu:0"]
AWAY = [(framework, name) for framework in NAMES for name in AWAY] + [
    # NumPy's and torch's host memory has as many cpu:k as are asked for; these have 17.
    (framework, "cpu:99")
    for framework in NAMES
    if framework in ("jax", "tensorflow")
]


@each_ops
@pytest.mark.parametrize(("framework", "name"), AWAY, indirect=["framework"])
def test_devices_that_are_not_here(ops, name, framework):
    """A device that does not exist for the framework is an error before anything moves."""
    xs = cr.PerReplica(framework.arrays([np.zeros(2, "float32")] * 2))
    for call in (
        lambda: ops.reduce("sum", xs, name),
        lambda: ops.broadcast(xs[0], name),
        lambda: ops.gather(xs, name, axis=0),
        lambda: ops.reduce("sum", cr.PerReplica(list(xs), [name, "cpu:1"]), "cpu:0"),
    ):
        with pytest.raises(cr.DeviceError) as caught:
            call()
        assert cr.PerReplica([0], [name]).devices[0] in str(caught.value)
    with pytest.raises(cr.DeviceError, match="pair 1: "):
        ops.batch_reduce("sum", [(xs, xs), (xs, name)])
    if type(ops) is cr.ReductionToOneDevice:
        with pytest.raises(cr.DeviceError):
            cr.ReductionToOneDevice(name).reduce("sum", xs, xs)


def test_each_device_once():
    """A device that stands twice, in whatever spelling, is an error that names logical devices instead."""
    with pytest.raises(cr.ArgumentError, match=r'only once, and cpu:0 stands more often(.|\n)*"cpu:0#1"'):
        cr.PerReplica([1, 2], ["cpu:0", "/device:CPU:0"])
    with pytest.raises(cr.ArgumentError, match=r"one device for each component(.|\n)*2 components, 1 devices"):
        cr.PerReplica([1, 2], ["cpu:0"])
    for wrong in ("cpu:0", 3):
        with pytest.raises(cr.ArgumentError, match="devices must be a list of names"):
            cr.PerReplica([1], wrong)


# ---- ops, pairs, numbers ----------------------------------------------------------------------------------------


@each_ops
@pytest.mark.parametrize("wrong", ["avg", "", "MEANS", 3, None, 0, np.add, sum, b"sum", ["sum"]])
def test_unknown_reductions(ops, wrong):
    """A reduction that does not exist is an error that lists those that do; it is never taken for a sum."""
    for call in (
        lambda: ops.reduce(wrong, value(), "cpu:0"),
        lambda: ops.reduce(wrong, value(1), "cpu:0"),
        lambda: ops.batch_reduce(wrong, [(value(), "cpu:0")]),
        lambda: ops.batch_reduce(wrong, []),
        lambda: cr.all_reduce([1.0, 2.0], wrong, cross_device_ops=ops),
        lambda: cr.ReduceOp(wrong),
    ):
        with pytest.raises(cr.ArgumentError, match=r'no such reduction(.|\n)*"sum", "mean", "min", "max", "product"'):
            call()


@pytest.mark.parametrize("wrong", ["bogus", "", "RING", None, 3, cr.HierarchicalCopyAllReduce])
def test_unknown_algorithms(wrong):
    """An algorithm that does not exist is an error that lists those that do."""
    with pytest.raises(cr.ArgumentError, match=r"no such algorithm(.|\n)*hierarchical_copy, ring"):
        cr.AllReduceCrossDeviceOps(wrong)
    if wrong != "RING":
        with pytest.raises(cr.ArgumentError, match=r"no such algorithm(.|\n)*hierarchical_copy, ring"):
            cr.CommunicationOptions(implementation=wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, 2.0, "2", None, True, False, np.nan])
def test_counts_that_are_none(wrong):
    """Packs, bytes and groups are whole numbers from 0 on; a bool is none."""
    for name, make in {
        "num_packs": lambda: cr.HierarchicalCopyAllReduce(wrong),
        "num_packs ": lambda: cr.NcclAllReduce(wrong),
        "num_packs  ": lambda: cr.AllReduceCrossDeviceOps("ring", wrong),
        "agg_small_grads_max_bytes": lambda: cr.AllReduceCrossDeviceOps("ring", 0, wrong, 10),
        "agg_small_grads_max_group": lambda: cr.AllReduceCrossDeviceOps("ring", 0, 10, wrong),
        "bytes_per_pack": lambda: cr.CommunicationOptions(wrong),
        "bytes_per_pack ": lambda: cr.CollectiveHints(wrong),
    }.items():
        with pytest.raises(cr.ArgumentError, match=rf"{name.strip()} must be a whole number, 0 or more(.|\n)*given: "):
            make()


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "3", True])
def test_timeouts_that_are_none(wrong):
    """A timeout is a positive number of seconds, or None."""
    with pytest.raises(cr.ArgumentError, match="timeout_seconds must be a positive number"):
        cr.CommunicationOptions(timeout_seconds=wrong)


@each_ops
@pytest.mark.parametrize("wrong", [{}, 0, "ring", (1 << 20, None), cr.CommunicationOptions])
def test_options_of_a_wrong_kind(ops, wrong):
    """Options are CommunicationOptions or None, in every call that takes them."""
    for call in (
        lambda: ops.reduce("sum", value(), "cpu:0", wrong),
        lambda: ops.batch_reduce("sum", [], wrong),
        lambda: ops.gather(value(), "cpu:0", 0, wrong),
        lambda: cr.all_reduce([1.0], cross_device_ops=ops, options=wrong),
    ):
        with pytest.raises(cr.ArgumentError, match="options must be CommunicationOptions"):
            call()


def test_too_many_packs():
    """bytes_per_pack=1 for a large buffer is refused before gigabytes of plan are made."""
    x = cr.PerReplica([np.zeros(100_000, "float32")] * 2)
    with pytest.raises(cr.ArgumentError, match=r"cut into 100000 packs; 10000 is the most(.|\n)*more bytes a pack"):
        cr.HierarchicalCopyAllReduce().reduce("sum", x, x, cr.CommunicationOptions(bytes_per_pack=1))


@each_ops
@pytest.mark.parametrize("wrong", [3, None, "pairs", b"x", {"a": 1}])
def test_pairs_that_are_none(ops, wrong):
    """What cannot be a list of pairs is an error."""
    with pytest.raises(cr.ArgumentError, match="value_destination_pairs must be pairs"):
        ops.batch_reduce("sum", wrong)
    with pytest.raises(cr.ArgumentError, match="value_destination_pairs must be pairs"):
        ops.batch_reduce("sum", value())


@each_ops
@pytest.mark.parametrize("wrong", [3, None, "ab", (1,), (1, 2, 3), {1, 2}, {"a": 1, "b": 2}])
def test_an_element_that_is_no_pair(ops, wrong):
    """An element that is no pair is an error that names its place."""
    with pytest.raises(cr.ArgumentError, match="element 1 of value_destination_pairs is no pair"):
        ops.batch_reduce("sum", [(value(), "cpu:0"), wrong])


@each_ops
def test_broadcast_takes_one_array(ops):
    """Broadcast refuses distributed values, lists and nothing."""
    with pytest.raises(cr.ArgumentError, match=r"broadcast takes one array(.|\n)*value\[0\]"):
        ops.broadcast(value(), "cpu:0")
    for wrong in ([1.0], None, "x", (np.zeros(2),), np.ndarray):
        with pytest.raises(cr.ReductionError, match="is no array"):
            ops.broadcast(wrong, "cpu:0")


@each_ops
@pytest.mark.parametrize("axis", [2, -3, None, "0", 0.0, True, (0,)])
def test_gather_needs_an_axis(ops, axis):
    """Gather refuses what is no axis of its components, and says which there are."""
    x = cr.PerReplica([np.zeros((2, 3))] * 2)
    with pytest.raises(cr.ArgumentError, match=r"gather needs an axis(.|\n)*an axis from -2 to 1"):
        ops.gather(x, "cpu:0", axis)


@each_ops
def test_gather_refuses_what_does_not_join(ops, framework):
    """Gather refuses 0-d components, and those that differ in dtype or in another axis."""
    with pytest.raises(cr.ArgumentError, match=r"components of one axis: x\.reshape\(1\)"):
        ops.gather(cr.PerReplica(framework.arrays([np.float32(1)] * 2)), "cpu:0", 0)
    for other in (np.zeros((2, 4), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 3, 1), "float32")):
        xs = cr.PerReplica(framework.arrays([np.zeros((2, 3), "float32"), other]))
        with pytest.raises(cr.MismatchError, match="differ in dtype or in another axis than 0") as caught:
            ops.gather(xs, "cpu:0", 0)
        assert "replica 1 on cpu:1" in str(caught.value)


def test_constructors_refuse_what_they_cannot_use():
    """A topology, a function and a device are checked where they are given."""
    with pytest.raises(cr.ArgumentError, match="topology must be a Topology"):
        cr.HierarchicalCopyAllReduce(topology="dgx-1")
    with pytest.raises(cr.ArgumentError, match="accumulation_fn must be a function"):
        cr.ReductionToOneDevice(accumulation_fn=3)
    for wrong in ("", "foo", 3):
        with pytest.raises(cr.DeviceError):
            cr.ReductionToOneDevice(wrong)


# ---- all_reduce -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [cr.HierarchicalCopyAllReduce, "ring", 3, object(), False], ids=["class", "str", "int", "object", "False"]
)
def test_cross_device_ops_of_a_wrong_kind(wrong):
    """cross_device_ops is an instance; a class, a name or a look-alike is a TypeError at the door."""
    with pytest.raises(
        cr.UnsupportedError, match=r"cross_device_ops must be(.|\n)*AllReduceCrossDeviceOps\(\"ring\"\)"
    ):
        cr.all_reduce([1.0, 2.0], cross_device_ops=wrong)


def test_trees_that_are_none():
    """all_reduce needs a list with at least one tree, and a device for each where devices are given."""
    for wrong in ({"a": 1}, "ab", 3, None, value()):
        with pytest.raises(cr.ArgumentError, match="all_reduce takes a list with one tree a replica"):
            cr.all_reduce(wrong)
    with pytest.raises(cr.ArgumentError, match="at least one replica's tree"):
        cr.all_reduce([])
    with pytest.raises(cr.ArgumentError, match="2 trees; cpu:0"):
        cr.all_reduce([1.0, 2.0], devices=["cpu:0"])
    with pytest.raises(cr.ArgumentError, match="stands more often"):
        cr.all_reduce([1.0, 2.0], devices=["cpu:0", "CPU:0"])


# ---- nothing moves ----------------------------------------------------------------------------------------------


@each_ops
def test_a_failing_value_stops_the_batch(ops, framework):
    """One wrong value in a batch: an error that names its pair, no result, and all inputs untouched."""
    xs = [np.arange(3, dtype="float32") + k for k in range(2)]
    good, kept = framework.arrays(xs), framework.arrays([np.zeros(3, "float32"), np.zeros(4, "float32")])
    with pytest.raises(cr.MismatchError, match="pair 2: the replicas of one value differ"):
        ops.batch_reduce("sum", [(cr.PerReplica(good), "cpu:0")] * 2 + [(cr.PerReplica(kept), "cpu:0")])
    for x, given in zip(good, xs, strict=True):
        assert np.array_equal(framework.to_numpy(x), given)


def test_a_generator_that_fails_stops_the_batch():
    """What the caller's own generator raises comes out as it is."""

    def pairs():
        yield value(), "cpu:0"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cr.ReductionToOneDevice().batch_reduce("sum", pairs())


# ---- frameworks that are not installed --------------------------------------------------------------------------


def python(code, **blocked):
    """Run code in a Python where some modules cannot be imported; return what it printed."""
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in blocked.get("without", ()))
    program = f"import sys\n{block}{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])
def test_a_framework_that_is_not_installed(name):
    """Where a framework is missing, the error names it and the extra that brings it."""
    out = python(
        f"""
        import crossreduce as cr
        from crossreduce.frameworks import get
        class Foreign:
            device = "cpu"
        Foreign.__module__ = "{name}.somewhere"
        for call in (lambda: get("{name}"), lambda: cr.ReductionToOneDevice().reduce("sum", Foreign(), "cpu:0")):
            try:
                call()
            except cr.BackendError as error:
                print(isinstance(error, ImportError), error)
        """,
        without=[name],
    )
    assert out.count(f'backend "{name}" was asked for') == 2
    assert out.count(f"pip install 'crossreduce[{name}]'") == 2
    assert out.count("True") == 2


def test_numpy_works_without_the_others():
    """With NumPy alone everything that needs NumPy alone works."""
    out = python(
        """
        import numpy as np, crossreduce as cr
        print(cr.all_reduce([{"a": np.ones(2)}, {"a": np.ones(2)}], "sum")[1]["a"].tolist())
        """,
        without=["torch", "jax", "jaxlib", "tensorflow"],
    )
    assert out.strip() == "[2.0, 2.0]"


def test_there_is_no_backend_of_that_name():
    """An unknown framework's name is an error that lists those that are known."""
    from crossreduce.frameworks import get

    with pytest.raises(cr.ArgumentError, match=r"no backend for this framework(.|\n)*numpy, torch, jax, tensorflow"):
        get("cupy")
