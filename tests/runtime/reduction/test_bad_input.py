"""Invalid arguments other than values: each is rejected before an array is read, with a message that states what to do.

Invalid values: test_bad_values.py.
"""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from frameworks import NAMES
from op_cases import OPS, each_ops, label, ops_and_framework, refused_by_all, value
from pairs import each

import crossreduce as cr
from crossreduce import frameworks
from crossreduce.devices import canonical

# ---- destinations and devices -----------------------------------------------------------------------------------


@each_ops
def test_destinations_of_a_wrong_type(ops):
    """Destinations of a wrong type raise an error that shows the given object and the accepted types."""
    x = value()
    for wrong in (["cpu:0"], ("cpu:0", "cpu:1"), (), [], None, 0, 1.5, True, {}, b"cpu:0", str, object()):
        refused_by_all(
            cr.ArgumentError,
            r"destinations must be distributed values, a device's name, or an array(.|\n)*given: ",
            lambda wrong=wrong: ops.reduce("sum", x, wrong),
            lambda wrong=wrong: ops.broadcast(x[0], wrong),
            lambda wrong=wrong: ops.gather(x, wrong, axis=0),
        )
        with pytest.raises(cr.ArgumentError, match="pair 1: destinations must be"):
            ops.batch_reduce("sum", [(x, x), (x, wrong)])


TENSOR = "this is not a tensor that can be reduced"
NUMPY = "arrays of dtype object cannot be reduced"
OBJECTS = [  # a framework, an object of it that is not an array, words of the error
    ("numpy", lambda np: np.dtype("float32"), NUMPY),
    ("numpy", lambda np: np.random.default_rng(0), NUMPY),
    ("torch", lambda torch: torch.device("cpu", 1), TENSOR),
    ("torch", lambda torch: torch.float32, TENSOR),
    ("torch", lambda torch: torch.nn.Linear(1, 1), TENSOR),
    ("jax", lambda jax: jax.devices("cpu")[-1], "this kind of JAX value cannot be reduced"),
    ("tensorflow", lambda tf: tf.float32, "a DType cannot be reduced"),
    ("tensorflow", lambda tf: tf.config.list_logical_devices("CPU")[-1], "component 0 of a PerReplica is not an array"),
]


@pytest.mark.parametrize(("framework", "make", "words"), OBJECTS, indirect=["framework"])
def test_objects_of_the_frameworks_that_are_not_arrays(framework, make, words):
    """A dtype, a device object or a module is an invalid destination and an invalid component."""
    thing = make(importlib.import_module(framework.name))
    with pytest.raises(cr.ArgumentError, match="destinations must be distributed values"):
        cr.ReductionToOneDevice().reduce("sum", value(), thing)
    with pytest.raises(cr.ReductionError, match=words):
        cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([thing, thing], ["cpu:0", "cpu:1"]), "cpu:0")


def test_invalid_arguments_of_ops():
    """A device's name that is empty or cannot be parsed, an object that is not a topology or a function, and a count
    that is not an integer, 0 or more, raise an error with valid ones; more names of devices: test_devices.py."""
    for wrong, text in {
        "": r"name must not be empty(.|\n)*a name such as",
        "cpu:0:1": r"parsed(.|\n)*cuda:0#2",
    }.items():
        for ops in OPS:
            with pytest.raises(cr.DeviceError, match=text):
                ops.reduce("sum", value(), wrong)
        with pytest.raises(cr.DeviceError, match=text):
            cr.ReductionToOneDevice(wrong)
    with pytest.raises(cr.DeviceError, match="cannot be parsed"):
        cr.ReductionToOneDevice(3)
    with pytest.raises(cr.ArgumentError, match=r"this is not a topology(.|\n)*a machine such as"):
        cr.HierarchicalCopyAllReduce(topology=3)
    with pytest.raises(cr.ArgumentError, match="accumulation_fn must be a function"):
        cr.ReductionToOneDevice(accumulation_fn=3)
    for wrong in (-1, 1.5, "2", None, True, np.nan):
        for name, make, args in (
            ("num_packs", cr.HierarchicalCopyAllReduce, (wrong,)),
            ("num_packs", cr.NcclAllReduce, (wrong,)),
            ("num_packs", cr.AllReduceCrossDeviceOps, ("ring", wrong)),
            ("agg_small_grads_max_bytes", cr.AllReduceCrossDeviceOps, ("ring", 0, wrong, 10)),
            ("agg_small_grads_max_group", cr.AllReduceCrossDeviceOps, ("ring", 0, 10, wrong)),
        ):
            with pytest.raises(cr.ArgumentError, match=rf"{name} must be a whole number, 0 or more(.|\n)*given: "):
                make(*args)


MISSING = ["cuda:99", "host1/cpu:0", "/job:worker/task:1/device:CPU:0", "tpu:0"]
# For NumPy and torch, host memory has any number of cpu:k; JAX and TensorFlow are configured with 17.
MISSING = [(framework, name) for framework in NAMES for name in MISSING]
MISSING += [(framework, "cpu:99") for framework in NAMES if framework in ("jax", "tensorflow")]


@pytest.mark.parametrize(
    ("framework", "name", "ops"), [(*case, ops) for case, ops in each(MISSING, OPS)], indirect=["framework"], ids=label
)
def test_devices_that_do_not_exist(ops, name, framework):
    """A device that the framework does not have raises an error with its name."""
    xs = cr.PerReplica(framework.arrays([np.zeros(2, "float32")] * 2))
    refused_by_all(
        cr.DeviceError,
        canonical(name),
        lambda: ops.reduce("sum", xs, name),
        lambda: ops.broadcast(xs[0], name),
        lambda: ops.gather(xs, name, axis=0),
        lambda: ops.reduce("sum", cr.PerReplica(list(xs), [name, "cpu:1"]), "cpu:0"),
        lambda: cr.ReductionToOneDevice(name).reduce("sum", xs, xs),
    )
    with pytest.raises(cr.DeviceError, match="pair 1: "):
        ops.batch_reduce("sum", [(xs, xs), (xs, name)])


@each_ops
def test_unknown_reductions_and_options(ops):
    """An unknown reduction, and options other than CommunicationOptions or None, raise an error in every call that
    accepts them, also for one replica and an empty batch."""
    for wrong in ("average", 3, None, np.add, np.array([1, 2])):
        refused_by_all(
            cr.ArgumentError,
            r'not a known reduction(.|\n)*"sum", "mean", "avg", "min", "max", "p',
            lambda wrong=wrong: ops.reduce(wrong, value(), "cpu:0"),
            lambda wrong=wrong: ops.reduce(wrong, value(1), "cpu:0"),
            lambda wrong=wrong: ops.batch_reduce(wrong, []),
            lambda wrong=wrong: cr.all_reduce([1.0, 2.0], wrong, cross_device_ops=ops),
        )
    for wrong in ({}, 0, "ring", (1 << 20, None), cr.CommunicationOptions):
        refused_by_all(
            cr.ArgumentError,
            "options must be CommunicationOptions",
            lambda wrong=wrong: ops.reduce("sum", value(), "cpu:0", wrong),
            lambda wrong=wrong: ops.batch_reduce("sum", [], wrong),
            lambda wrong=wrong: ops.gather(value(), "cpu:0", 0, wrong),
            lambda wrong=wrong: cr.all_reduce([1.0], cross_device_ops=ops, options=wrong),
        )


def test_too_many_packs():
    """bytes_per_pack=1 for a large buffer is rejected before it creates gigabytes of schedules."""
    x = cr.PerReplica([np.zeros(100_000, "float32")] * 2)
    words = r"cut into 100000 packs; 10000 is the most(.|\n)*bytes_per_pack of 0 or at least 40$"
    with pytest.raises(cr.ArgumentError, match=words):
        cr.HierarchicalCopyAllReduce().reduce("sum", x, x, cr.CommunicationOptions(bytes_per_pack=1))


@each_ops
def test_pairs_of_a_wrong_type(ops):
    """The pairs of a batch are an iterable, not text, a dict or a distributed value; an element has two components."""
    for wrong in (3, None, "pairs", b"x", {"a": 1}, value()):
        with pytest.raises(cr.ArgumentError, match="value_destination_pairs must be pairs"):
            ops.batch_reduce("sum", wrong)
    for element in (3, None, "ab", (1,), (1, 2, 3), {1, 2}, {"a": 1, "b": 2}):
        with pytest.raises(cr.ArgumentError, match="element 1 of value_destination_pairs is not a pair"):
            ops.batch_reduce("sum", [(value(), "cpu:0"), element])


@ops_and_framework
def test_wrong_arguments_of_broadcast_and_gather(ops, framework):
    """Broadcast rejects all but an array. Gather rejects an axis that is not an integer or that the components lack,
    0-d components, and components that differ in dtype or in another axis."""
    with pytest.raises(cr.ArgumentError, match=r"broadcast requires a single array(.|\n)*value\[0\]"):
        ops.broadcast(value(), "cpu:0")
    for wrong in ([1.0], None, "x", (np.zeros(2),), np.ndarray):
        with pytest.raises(cr.ReductionError, match="is not an array"):
            ops.broadcast(wrong, "cpu:0")
    first = np.zeros((2, 3), "float32")
    for axis in (2, -3, None, "0", 0.0, True, (0,)):
        problem = "the components do not have this axis" if type(axis) is int else "axis must be an integer"
        with pytest.raises(cr.ArgumentError, match=rf"{problem}(.|\n)*an axis from -2 to 1"):
            ops.gather(cr.PerReplica(framework.arrays([first, first])), "cpu:0", axis)
    with pytest.raises(cr.ArgumentError, match=r"components with one axis: x\.reshape\(1\)"):
        ops.gather(cr.PerReplica(framework.arrays([np.float32(1)] * 2)), "cpu:0", 0)
    for other in (np.zeros((2, 4), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 3, 1), "float32")):
        with pytest.raises(cr.MismatchError, match="differ in dtype, or in an axis other than 0") as caught:
            ops.gather(cr.PerReplica(framework.arrays([first, other])), "cpu:0", 0)
        assert "replica 1 on cpu:1" in str(caught.value)


class Falsy(cr.HierarchicalCopyAllReduce):
    """Cross-device ops whose truth value is False."""

    def __bool__(self):
        return False

    def batch_reduce_implementation(self, op, pairs, options):
        return [cr.Mirrored([-1] * len(to), to) for _, to in pairs]


@pytest.mark.parametrize("call", [lambda ops: cr.all_reduce([1.0, 2.0], cross_device_ops=ops), cr.MirroredStrategy])
def test_cross_device_ops(call):
    """cross_device_ops must be an instance of CrossDeviceOps; a class or another object raises an UnsupportedError. Ops
    whose truth value is False are used, not replaced by the default ones (D17)."""
    strategy = call is cr.MirroredStrategy
    for wrong in (cr.HierarchicalCopyAllReduce, "ring", 3, object(), False, []):
        remedy = r"HierarchicalCopyAllReduce\(\)" if isinstance(wrong, type) else r'AllReduceCrossDeviceOps\("ring"\)'
        with pytest.raises(
            cr.UnsupportedError, match=rf"cross_device_ops must be an instance(.|\n)*{remedy}"
        ) as caught:
            call(2, wrong) if strategy else call(wrong)
        assert isinstance(caught.value, TypeError)
    ops = Falsy()
    if strategy:
        assert call(2, ops).cross_device_ops is ops
        assert "auto" in repr(call(2).cross_device_ops)
    else:
        assert call(ops) == [-1, -1]


def test_invalid_lists_of_trees():
    """all_reduce needs a list with at least one tree, and one device per tree if devices are given."""
    for wrong in ({"a": 1}, "ab", 3, None, value()):
        remedy = r"list\(value\)" if isinstance(wrong, cr.PerReplica) else r"\[tree, tree\]: one tree per replica"
        with pytest.raises(cr.ArgumentError, match=f"trees must be a list of one tree per replica.*\n.*\n.*{remedy}"):
            cr.all_reduce(wrong)
    for words, args, devices in (
        (r"'mean'.*\n.*as in all_reduce\(\[tree, tree\], op\)", ("mean", [1.0, 2.0]), None),
        ("at least one replica's tree", ([],), None),
        ("2 trees; cpu:0", ([1.0, 2.0],), ["cpu:0"]),
        ("is listed more than once", ([1.0, 2.0],), ["cpu:0", "CPU:0"]),
    ):
        with pytest.raises(cr.ArgumentError, match=words):
            cr.all_reduce(*args, devices=devices)


@ops_and_framework
def test_one_invalid_value_stops_the_batch(ops, framework):
    """One invalid value in a batch raises an error with the number of its pair; no input changes. An exception of the
    caller's generator is not changed."""
    xs = [np.arange(3, dtype="float32") + k for k in range(2)]
    good, kept = framework.arrays(xs), framework.arrays([np.zeros(3, "float32"), np.zeros(4, "float32")])
    with pytest.raises(cr.MismatchError, match="pair 2: the replicas of one value differ"):
        ops.batch_reduce("sum", [(cr.PerReplica(good), "cpu:0")] * 2 + [(cr.PerReplica(kept), "cpu:0")])
    for x, given in zip(good, xs, strict=True):
        assert np.array_equal(framework.to_numpy(x), given)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        ops.batch_reduce("sum", ((value(), "cpu:0") for k in (1, 0) if 1 / k))


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
    """A missing framework raises an ImportError with its name and the extra that installs it; NumPy needs no other. An
    unknown name of a framework raises an error that lists the known ones."""
    done = subprocess.run([sys.executable, "-c", MISSING_FRAMEWORKS], capture_output=True, text=True, check=True)
    *lines, reduced = done.stdout.splitlines()
    for name, line in zip(("torch",) * 2 + ("jax",) * 2 + ("tensorflow",) * 2, lines, strict=True):
        assert line.startswith(f'True framework "{name}" was requested, but {name} cannot be imported')
        assert f"pip install 'crossreduce[{name}]'" in line
    assert reduced == "[2.0, 2.0]"
    words = r"this framework is not supported(.|\n)*numpy, torch, jax, tensorflow, cupy"
    with pytest.raises(cr.ArgumentError, match=words):
        frameworks.get("mxnet")
