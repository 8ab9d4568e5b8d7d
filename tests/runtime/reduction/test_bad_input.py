"""Invalid arguments and values raise errors, with a remedy, before anything is reduced."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from frameworks import NAMES
from pairs import each, pairs

import crossreduce as cr
from crossreduce import frameworks
from crossreduce.devices import canonical

ONE = cr.ReductionToOneDevice()
OPS = [ONE, cr.HierarchicalCopyAllReduce(), cr.AllReduceCrossDeviceOps("ring"), cr.NcclAllReduce()]


def label(x):
    """Return the id of an op in tests. Other values keep the ids of pytest."""
    return type(x).__name__ if isinstance(x, cr.CrossDeviceOps) else None


each_ops = pytest.mark.parametrize("ops", OPS, ids=label)
ops_and_framework = pytest.mark.parametrize(("ops", "framework"), each(OPS, NAMES), indirect=["framework"], ids=label)


def value(n=2):
    """Return a valid value of n replicas."""
    return cr.PerReplica([np.full(3, float(k)) for k in range(n)])


def refused(error, words, function, *args, **kwargs):
    """Assert that a call raises an error with these words, and return its text."""
    with pytest.raises(error, match=words) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def summed(ops, x, devices=None):
    """Return the sum of two replicas of one object."""
    return ops.reduce("sum", cr.PerReplica([x, x], devices), "cpu:0")


@each_ops
def test_destinations_of_a_wrong_type(ops):
    """Destinations of a wrong type raise an error that shows the given object and the accepted types."""
    x = value()
    for wrong in (["cpu:0"], ("cpu:0", "cpu:1"), (), None, 0, 1.5, True, {}, b"cpu:0", str, object()):
        words = r"destinations must be distributed values, a device's name, or an array(.|\n)*given: "
        refused(cr.ArgumentError, words, ops.reduce, "sum", x, wrong)
        refused(cr.ArgumentError, words, ops.broadcast, x[0], wrong)
        refused(cr.ArgumentError, words, ops.gather, x, wrong, axis=0)
        words = "pair 1: destinations must be"
        refused(cr.ArgumentError, words, ops.batch_reduce, "sum", [(x, x), (x, wrong)])


DESTINATIONS = "destinations must be distributed values"
NOT_ARRAYS = [  # a framework, an object of it that is not an array, words of the error for a component
    ("numpy", lambda np: np.dtype("float32"), "arrays of dtype object cannot be reduced"),
    ("torch", lambda torch: torch.device("cpu", 1), "this is not a tensor that can be reduced"),
    ("torch", lambda torch: torch.nn.Linear(1, 1), "this is not a tensor that can be reduced"),
    ("jax", lambda jax: jax.devices("cpu")[-1], "this kind of JAX value cannot be reduced"),
    ("tensorflow", lambda tf: tf.float32, "a DType cannot be reduced"),
    ("tensorflow", lambda tf: tf.config.list_logical_devices("CPU")[-1], "component 0 of a PerReplica is not an array"),
]
UNUSUAL_ARRAYS = [
    ("torch", lambda torch: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    ("torch", lambda torch: torch.empty(2, device="meta"), "meta tensors have no elements"),
    ("jax", lambda jax: jax.random.key(0), "PRNG keys"),
    ("tensorflow", lambda tf: tf.ragged.constant([[1.0], [2.0, 3.0]]), "RaggedTensor"),
    ("tensorflow", lambda tf: tf.constant(["a", "b"]), "dtype string"),
]


@pytest.mark.parametrize(("framework", "make", "words"), NOT_ARRAYS + UNUSUAL_ARRAYS, indirect=["framework"])
def test_objects_of_the_frameworks(framework, make, words):
    """Objects that are not arrays, and nested, meta, ragged, text and key arrays, raise errors that name their kind."""
    thing = make(importlib.import_module(framework.name))
    refused(cr.ReductionError, words, summed, ONE, thing, ["cpu:0", "cpu:1"])
    if any(make is of_table for _, of_table, _ in NOT_ARRAYS):
        refused(cr.ArgumentError, DESTINATIONS, ONE.reduce, "sum", value(), thing)


def test_invalid_arguments_of_ops():
    """Invalid devices, topologies, functions and counts of ops raise an error with valid examples."""
    for wrong, words in (("", r"name must not be empty(.|\n)*a name such as"), ("cpu:0:1", r"parsed(.|\n)*cuda:0#2")):
        for ops in OPS:
            refused(cr.DeviceError, words, ops.reduce, "sum", value(), wrong)
        refused(cr.DeviceError, words, cr.ReductionToOneDevice, wrong)
    refused(cr.DeviceError, "cannot be parsed", cr.ReductionToOneDevice, 3)
    words = r"this is not a topology(.|\n)*a machine such as"
    refused(cr.ArgumentError, words, cr.HierarchicalCopyAllReduce, topology=3)
    words = "accumulation_fn must be a function"
    refused(cr.ArgumentError, words, cr.ReductionToOneDevice, accumulation_fn=3)
    for wrong in (-1, 1.5, "2", None, True, np.nan):
        for name, make, *args in (
            ("num_packs", cr.HierarchicalCopyAllReduce, wrong),
            ("num_packs", cr.NcclAllReduce, wrong),
            ("num_packs", cr.AllReduceCrossDeviceOps, "ring", wrong),
            ("agg_small_grads_max_bytes", cr.AllReduceCrossDeviceOps, "ring", 0, wrong, 10),
            ("agg_small_grads_max_group", cr.AllReduceCrossDeviceOps, "ring", 0, 10, wrong),
        ):
            words = rf"{name} must be a whole number, 0 or more(.|\n)*given: "
            refused(cr.ArgumentError, words, make, *args)
    # The number of packs is checked before schedules are made, which would need gigabytes.
    x, options = cr.PerReplica([np.zeros(100_000, "float32")] * 2), cr.CommunicationOptions(bytes_per_pack=1)
    words = r"cut into 100000 packs; 10000 is the most(.|\n)*bytes_per_pack of 0 or at least 40$"
    refused(cr.ArgumentError, words, cr.HierarchicalCopyAllReduce().reduce, "sum", x, x, options)
    words = r"cut into 20000 packs(.|\n)*num_packs=20000"
    refused(cr.ArgumentError, words, cr.HierarchicalCopyAllReduce(20_000).reduce, "sum", x, x)


MISSING = [
    (name, device)
    for name in NAMES
    for device in ("cuda:99", "host1/cpu:0", "/job:worker/task:1/device:CPU:0", "tpu:0")
]
# For NumPy and torch, host memory has any number of cpu:k; JAX and TensorFlow are configured with 17.
MISSING += [(name, "cpu:99") for name in NAMES if name in ("jax", "tensorflow")]


@pytest.mark.parametrize(
    ("framework", "name", "ops"), [(*case, ops) for case, ops in each(MISSING, OPS)], indirect=["framework"], ids=label
)
def test_devices_that_do_not_exist(ops, name, framework):
    """A device that the framework does not have raises an error with the name of the device."""
    xs = cr.PerReplica(framework.arrays([np.zeros(2, "float32")] * 2))
    words = canonical(name)
    refused(cr.DeviceError, words, ops.reduce, "sum", xs, name)
    refused(cr.DeviceError, words, ops.broadcast, xs[0], name)
    refused(cr.DeviceError, words, ops.gather, xs, name, axis=0)
    refused(cr.DeviceError, words, ops.reduce, "sum", cr.PerReplica(list(xs), [name, "cpu:1"]), "cpu:0")
    refused(cr.DeviceError, words, cr.ReductionToOneDevice(name).reduce, "sum", xs, xs)
    refused(cr.DeviceError, "pair 1: ", ops.batch_reduce, "sum", [(xs, xs), (xs, name)])


@each_ops
def test_wrong_reductions_options_and_pairs(ops):
    """Unknown reductions, invalid options and invalid pairs raise an error in every call."""
    words = r'not a known reduction(.|\n)*"sum", "mean", "avg", "min", "max", "p'
    for wrong in ("average", 3, None, np.add, np.array([1, 2])):
        refused(cr.ArgumentError, words, ops.reduce, wrong, value(), "cpu:0")
        refused(cr.ArgumentError, words, ops.reduce, wrong, value(1), "cpu:0")
        refused(cr.ArgumentError, words, ops.batch_reduce, wrong, [])
        refused(cr.ArgumentError, words, cr.all_reduce, [1.0, 2.0], wrong, cross_device_ops=ops)
    words = "options must be CommunicationOptions"
    for wrong in ({}, 0, "ring", (1 << 20, None), cr.CommunicationOptions):
        refused(cr.ArgumentError, words, ops.reduce, "sum", value(), "cpu:0", wrong)
        refused(cr.ArgumentError, words, ops.batch_reduce, "sum", [], wrong)
        refused(cr.ArgumentError, words, ops.gather, value(), "cpu:0", 0, wrong)
        refused(cr.ArgumentError, words, cr.all_reduce, [1.0], cross_device_ops=ops, options=wrong)
    for wrong in (3, None, "pairs", b"x", {"a": 1}, value()):
        refused(cr.ArgumentError, "value_destination_pairs must be pairs", ops.batch_reduce, "sum", wrong)
    words = "element 1 of value_destination_pairs is not a pair"
    for element in (3, None, "ab", (1,), (1, 2, 3), {1, 2}, {"a": 1, "b": 2}):
        refused(cr.ArgumentError, words, ops.batch_reduce, "sum", [(value(), "cpu:0"), element])


@ops_and_framework
def test_wrong_arguments_of_broadcast_and_gather(ops, framework):
    """Broadcast requires one array. Gather requires an axis that all components have, and equal sizes in all others."""
    words = r"broadcast requires a single array(.|\n)*value\[0\]"
    refused(cr.ArgumentError, words, ops.broadcast, value(), "cpu:0")
    for wrong in ([1.0], None, "x", (np.zeros(2),), np.ndarray):
        refused(cr.ReductionError, "is not an array", ops.broadcast, wrong, "cpu:0")
    first = np.zeros((2, 3), "float32")
    same = cr.PerReplica(framework.arrays([first, first]))
    for axis in (2, -3, None, "0", 0.0, True, (0,)):
        problem = "the components do not have this axis" if type(axis) is int else "axis must be an integer"
        refused(cr.ArgumentError, rf"{problem}(.|\n)*an axis from -2 to 1", ops.gather, same, "cpu:0", axis)
    scalars = cr.PerReplica(framework.arrays([np.float32(1)] * 2))
    refused(cr.ArgumentError, r"components with one axis: x\.reshape\(1\)", ops.gather, scalars, "cpu:0", 0)
    words = r"differ in dtype, or in an axis other than 0(.|\n)*replica 1 on cpu:1"
    for other in (np.zeros((2, 4), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 3, 1), "float32")):
        different = cr.PerReplica(framework.arrays([first, other]))
        refused(cr.MismatchError, words, ops.gather, different, "cpu:0", 0)


def test_cross_device_ops():
    """``cross_device_ops`` must be an instance, or an UnsupportedError is raised. Ops that are falsy are used (D17)."""
    for wrong in (cr.HierarchicalCopyAllReduce, "ring", 3, object(), False, []):
        remedy = r"HierarchicalCopyAllReduce\(\)" if isinstance(wrong, type) else r'AllReduceCrossDeviceOps\("ring"\)'
        words = rf"cross_device_ops must be an instance(.|\n)*{remedy}"
        refused(cr.UnsupportedError, words, cr.all_reduce, [1.0, 2.0], cross_device_ops=wrong)
        refused(cr.UnsupportedError, words, cr.MirroredStrategy, 2, wrong)
    assert issubclass(cr.UnsupportedError, TypeError)
    falsy = type("Falsy", (cr.HierarchicalCopyAllReduce,), {"__bool__": lambda self: False})()
    falsy.batch_reduce_implementation = lambda op, pairs, options: [cr.Mirrored([-1] * len(to), to) for _, to in pairs]
    assert cr.all_reduce([1.0, 2.0], cross_device_ops=falsy) == [-1, -1]
    assert cr.MirroredStrategy(2, falsy).cross_device_ops is falsy
    assert "auto" in repr(cr.MirroredStrategy(2).cross_device_ops)


def test_invalid_lists_of_trees():
    """``all_reduce`` requires at least one tree in a list, and one device per tree if devices are given."""
    for wrong in ({"a": 1}, "ab", 3, None, value()):
        remedy = r"list\(value\)" if isinstance(wrong, cr.PerReplica) else r"\[tree, tree\]: one tree per replica"
        words = f"trees must be a list of one tree per replica.*\n.*\n.*{remedy}"
        refused(cr.ArgumentError, words, cr.all_reduce, wrong)
    for words, args, devices in (
        (r"'mean'.*\n.*as in all_reduce\(\[tree, tree\], op\)", ("mean", [1.0, 2.0]), None),
        ("at least one replica's tree", ([],), None),
        ("2 trees; cpu:0", ([1.0, 2.0],), ["cpu:0"]),
        ("is listed more than once", ([1.0, 2.0],), ["cpu:0", "CPU:0"]),
    ):
        refused(cr.ArgumentError, words, cr.all_reduce, *args, devices=devices)


@ops_and_framework
def test_one_invalid_value_stops_the_batch(ops, framework):
    """An invalid value raises an error with the number of its pair. The exception of a generator is not changed."""
    xs = [np.arange(3, dtype="float32") + k for k in range(2)]
    good, wrong = framework.arrays(xs), framework.arrays([np.zeros(3, "float32"), np.zeros(4, "float32")])
    pairs = [(cr.PerReplica(good), "cpu:0")] * 2 + [(cr.PerReplica(wrong), "cpu:0")]
    refused(cr.MismatchError, "pair 2: the replicas of one value differ", ops.batch_reduce, "sum", pairs)
    assert [framework.to_numpy(x).tolist() for x in good] == [x.tolist() for x in xs]
    made = ((value(), "cpu:0") for k in (1, 0) if 1 / k)
    refused(ZeroDivisionError, "division by zero", ops.batch_reduce, "sum", made)


MISSING_FRAMEWORKS = """
import sys
for name in ("torch", "jax", "jaxlib", "tensorflow"):
    sys.modules[name] = None
import numpy as np, crossreduce as cr
from crossreduce.frameworks import get
for name in ("torch", "jax", "tensorflow"):
    foreign = type("Foreign", (), {"device": "cpu", "__module__": f"{name}.somewhere"})()
    for call in (lambda: get(name), lambda: cr.ReductionToOneDevice().reduce("sum", foreign, "cpu:0")):
        try:
            call()
        except cr.BackendError as error:
            print(isinstance(error, ImportError), str(error).replace(chr(10), ""))
print(cr.all_reduce([{"a": np.ones(2)}, {"a": np.ones(2)}], "sum")[1]["a"].tolist())
"""


def test_frameworks_that_are_not_installed():
    """A missing framework raises an ImportError with its name and its package. An unknown name is an ArgumentError."""
    done = subprocess.run([sys.executable, "-c", MISSING_FRAMEWORKS], capture_output=True, text=True, check=True)
    *lines, reduced = done.stdout.splitlines()
    for name, line in zip(("torch",) * 2 + ("jax",) * 2 + ("tensorflow",) * 2, lines, strict=True):
        assert line.startswith(f'True framework "{name}" was requested, but {name} cannot be imported')
        assert line.endswith(f"try:   pip install {name}")
    assert reduced == "[2.0, 2.0]"
    words = r"this framework is not supported(.|\n)*numpy, torch, jax, tensorflow, cupy"
    refused(cr.ArgumentError, words, frameworks.get, "mxnet")


DIFFERENT = [
    [((1,), "float32"), ((3,), "float32")],
    [((), "float32"), ((1,), "float32")],
    [((0,), "int8"), ((1,), "int8")],
    [((2, 2), "float32"), ((4,), "float32")],
    [((2, 3), "float32"), ((3, 2), "float32")],
    [((2,), "float32"), ((2,), "int32"), ((2,), "float16")],
]


@pytest.mark.parametrize(("specs", "framework"), pairs(DIFFERENT, NAMES), indirect=["framework"])
def test_replicas_of_different_shape_or_dtype(specs, framework):
    """Replicas of different shape or dtype raise an error that lists all of them, also if the sizes agree (D3)."""
    xs = framework.arrays([np.zeros(*spec) for spec in specs])
    for ops in OPS:
        text = refused(cr.MismatchError, "differ in shape or dtype", ops.reduce, "mean", cr.PerReplica(xs), "cpu:0")
        for k, (shape, dtype) in enumerate(specs):
            assert f"replica {k} on cpu:{k}: {dtype}[{', '.join(map(str, shape))}]" in text
    batch = [(cr.PerReplica(xs), "cpu:0"), (cr.PerReplica(xs[::-1]), "cpu:0")]
    refused(cr.MismatchError, "pair 0: the replicas of one value differ", OPS[3].batch_reduce, "sum", batch)


def test_replicas_of_different_frameworks(accelerated, numpy_):
    """Replicas of different frameworks raise an error that lists every replica with its framework."""
    mixed = cr.PerReplica([numpy_.array(np.zeros(2)), accelerated.array(np.zeros(2), 1)], ["cpu:0", "cpu:1"])
    words = rf"different frameworks(.|\n)*replica 0 on cpu:0: numpy(.|\n)*replica 1 on cpu:1: {accelerated.name}"
    for ops in OPS:
        refused(cr.MismatchError, words, ops.reduce, "sum", mixed, "cpu:0")


@each_ops
def test_values_and_components_of_a_wrong_type(ops):
    """Values must be arrays or PerReplica, and components must be arrays or numbers. Masked arrays are errors."""
    for wrong in ([np.zeros(2), np.zeros(2)], (np.zeros(2),), {"a": np.zeros(2)}, None, "x", b"x"):
        refused(cr.ArgumentError, "must be a PerReplica or an array", ops.reduce, "sum", wrong, "cpu:0")
        words = "pair 1: a value to reduce must be a PerReplica or an array"
        refused(cr.ArgumentError, words, ops.batch_reduce, "sum", [(value(), "cpu:0"), (wrong, "cpu:0")])
    refused(cr.UnsupportedError, "a class was given instead of a value", ops.reduce, "sum", np.ndarray, "cpu:0")
    for wrong in (object(), {1, 2}, range(3), lambda: 0, iter([1])):
        refused(cr.ArgumentError, "is not an array", summed, ops, wrong)
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    words = r"masked arrays cannot be reduced(.|\n)*filled\(0\)"
    for x in (masked, cr.IndexedSlices(masked, np.array([0, 1]))):
        refused(cr.UnsupportedError, words, summed, ops, x)
    refused(cr.UnsupportedError, words, ops.broadcast, masked, "cpu:0")
    refused(cr.UnsupportedError, words, ops.gather, cr.PerReplica([masked, masked]), "cpu:0", 0)


UNSUPPORTED = [
    np.array(["a", "b"]),
    np.array([b"a", b"b"]),
    np.array([1, "a"], dtype=object),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.zeros(2, dtype=[("x", "f4"), ("y", "f4")]),
    np.zeros(2, dtype=np.longdouble),
    2**70,
]


@each_ops
def test_dtypes_that_are_not_supported(ops):
    """Arrays of text, objects, dates, records and long doubles raise a TypeError that lists the supported dtypes."""
    words = r"cannot be reduced(.|\n)*cast to one of bfloat16, bool"
    for op, x in each(["sum", "mean", "min", "max", "product"], UNSUPPORTED):
        y, given = np.atleast_1d(np.asarray(x)), cr.PerReplica([x, x])
        refused(cr.UnsupportedError, words, ops.reduce, op, given, "cpu:0")
        refused(cr.UnsupportedError, "pair 0: arrays of dtype", ops.batch_reduce, op, [(given, "cpu:0")])
        refused(cr.UnsupportedError, "cannot be reduced, broadcast or gathered", ops.broadcast, x, "cpu:0")
        refused(cr.UnsupportedError, "cannot be reduced, broadcast", ops.gather, cr.PerReplica([y, y]), "cpu:0", 0)


def test_wrong_indices_of_slices(framework):
    """Indices of slices must be integers. An index outside of the dense shape raises an error with the pair or leaf."""
    one = np.ones((1, 2), "float32")
    for wrong in ([0.5], [True], [1j]):
        words = "the indices of slices must be integers"
        refused(cr.ArgumentError, words, framework.sparse, "IndexedSlices", one, np.array(wrong), (5, 2))
    good = cr.PerReplica(framework.arrays([np.ones(2, "float32")] * 2))
    words = "a sparse array has an index outside its dense shape"
    for wrong in (5, -1):
        sparse = framework.sparse("IndexedSlices", one, np.array([wrong]), (5, 2), 0)
        mixed = cr.PerReplica([sparse, framework.array(np.ones((5, 2), "float32"), 1)])
        refused(cr.ArgumentError, f"^{words}", ONE.reduce, "sum", mixed, "cpu:0")
        refused(cr.ArgumentError, f"^pair 1: {words}", OPS[1].batch_reduce, "sum", [(good, good), (mixed, "cpu:0")])
        trees = [{"a": x, "b": y} for x, y in zip(good, mixed, strict=True)]
        refused(cr.ArgumentError, rf"^leaf tree\['b'\]: {words}", cr.all_reduce, trees)


def test_sparse_replicas(framework):
    """Sparse values can only be added. Components that differ raise an error that lists all of them."""
    for kind in framework.kinds:
        xs = [framework.sparse(kind, np.ones((1, 2), "float32"), np.array([k]), (3, 2), k) for k in range(2)]
        for ops, op in each(OPS, ("min", "max", "product")):
            words = "sparse values can only be reduced by sum or mean"
            refused(cr.UnsupportedError, words, ops.reduce, op, cr.PerReplica(xs), "cpu:0")

    def slices(k, rows, dtype, shape):
        return framework.sparse("IndexedSlices", np.ones((1, rows), dtype), np.array([0]), shape, k)

    first = slices(0, 2, "float32", (5, 2))
    wrong = [slices(1, 3, "float32", (5, 3)), slices(1, 2, "float64", (5, 2)), slices(1, 2, "float32", (6, 2))]
    dense = [framework.array(np.zeros(shape, dtype), 1) for shape, dtype in (((6, 2), "float32"), ((5, 2), "float64"))]
    for kinds, others in (("sparse arrays", wrong), ("sparse and dense arrays", dense)):
        words = rf"are {kinds} that differ in shape, dtype or sparse format(.|\n)*replica 0 on cpu:0(.|\n)*replica 1 on"
        for other in others:
            refused(cr.MismatchError, words, ONE.reduce, "sum", cr.PerReplica([first, other]), "cpu:0")
