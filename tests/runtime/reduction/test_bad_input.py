"""Invalid arguments other than values: each is rejected before an array is read, with a message that states what to do.

Invalid values: test_bad_values.py.
"""

import importlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from frameworks import NAMES
from op_cases import OPS, each_ops, label, ops_and_framework, value, with_ops
from pairs import each

import crossreduce as cr
from crossreduce.devices import canonical

# ---- destinations and devices -----------------------------------------------------------------------------------


@with_ops("wrong", [["cpu:0"], ("cpu:0", "cpu:1"), (), [], None, 0, 1.5, True, {}, b"cpu:0", str, object()])
def test_destinations_of_a_wrong_type(ops, wrong):
    """Destinations of a wrong type raise an error that shows the given object and the accepted types."""
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


@each_ops
def test_invalid_device_names(ops):
    """A device's name that is empty or cannot be parsed raises an error with valid names; see test_devices.py."""
    words = {
        "": r"a device's name must not be empty(.|\n)*a name such as",
        "cpu:0:1": r"cannot be parsed(.|\n)*cuda:0#2",
    }
    for wrong, text in words.items():
        for call in (
            lambda wrong=wrong: ops.reduce("sum", value(), wrong),
            lambda wrong=wrong: cr.ReductionToOneDevice(wrong),
        ):
            with pytest.raises(cr.DeviceError, match=text):
                call()
    with pytest.raises(cr.DeviceError, match="cannot be parsed"):
        cr.ReductionToOneDevice(3)
    with pytest.raises(cr.ArgumentError, match=r"this is not a topology(.|\n)*a machine such as"):
        cr.HierarchicalCopyAllReduce(topology=3)
    with pytest.raises(cr.ArgumentError, match="accumulation_fn must be a function"):
        cr.ReductionToOneDevice(accumulation_fn=3)


MISSING = ["cuda:99", "host1/cpu:0", "/job:worker/task:1/device:CPU:0", "tpu:0"]
MISSING = [(framework, name) for framework in NAMES for name in MISSING] + [
    # For NumPy and torch, host memory has any number of cpu:k; JAX and TensorFlow are configured with 17.
    (framework, "cpu:99")
    for framework in NAMES
    if framework in ("jax", "tensorflow")
]


@pytest.mark.parametrize(
    ("framework", "name", "ops"), [(*case, ops) for case, ops in each(MISSING, OPS)], indirect=["framework"], ids=label
)
def test_devices_that_do_not_exist(ops, name, framework):
    """A device that the framework does not have raises an error with its name."""
    xs = cr.PerReplica(framework.arrays([np.zeros(2, "float32")] * 2))
    for call, words in (
        (lambda: ops.reduce("sum", xs, name), canonical(name)),
        (lambda: ops.broadcast(xs[0], name), canonical(name)),
        (lambda: ops.gather(xs, name, axis=0), canonical(name)),
        (lambda: ops.reduce("sum", cr.PerReplica(list(xs), [name, "cpu:1"]), "cpu:0"), canonical(name)),
        (lambda: cr.ReductionToOneDevice(name).reduce("sum", xs, xs), canonical(name)),
        (lambda: ops.batch_reduce("sum", [(xs, xs), (xs, name)]), "pair 1: "),
    ):
        with pytest.raises(cr.DeviceError, match=words):
            call()


def test_each_device_may_be_listed_once():
    """Devices are a list of one name per component; one that is listed twice, in any spelling, raises an error that
    recommends logical devices."""
    with pytest.raises(cr.ArgumentError, match=r'only once: cpu:0 is listed more than once(.|\n)*"cpu:0#1"'):
        cr.PerReplica([1, 2], ["cpu:0", "/device:CPU:0"])
    with pytest.raises(cr.ArgumentError, match=r"one device for each component(.|\n)*2 components, 1 devices"):
        cr.PerReplica([1, 2], ["cpu:0"])
    for wrong in ("cpu:0", 3):
        with pytest.raises(cr.ArgumentError, match="devices must be a list of names"):
            cr.PerReplica([1], wrong)


# ---- ops, pairs, numbers ----------------------------------------------------------------------------------------


@with_ops("wrong", ["average", "", "MEANS", 3, None, 0, np.add, sum, b"sum", ["sum"], np.array([1, 2])])
def test_unknown_reductions(ops, wrong):
    """An unknown reduction raises an error that lists the known ones, also for one replica and an empty batch."""
    words = r'not a known reduction(.|\n)*"sum", "mean", "avg", "min", "max", "p'
    for call in (
        lambda: ops.reduce(wrong, value(), "cpu:0"),
        lambda: ops.reduce(wrong, value(1), "cpu:0"),
        lambda: ops.batch_reduce(wrong, []),
        lambda: cr.all_reduce([1.0, 2.0], wrong, cross_device_ops=ops),
    ):
        with pytest.raises(cr.ArgumentError, match=words):
            call()


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", None, True, np.nan])
def test_invalid_counts(wrong):
    """num_packs and agg_small_grads_max_* must be integers, 0 or more; a bool raises an error, too."""
    for name, make in (
        ("num_packs", lambda: cr.HierarchicalCopyAllReduce(wrong)),
        ("num_packs", lambda: cr.NcclAllReduce(wrong)),
        ("num_packs", lambda: cr.AllReduceCrossDeviceOps("ring", wrong)),
        ("agg_small_grads_max_bytes", lambda: cr.AllReduceCrossDeviceOps("ring", 0, wrong, 10)),
        ("agg_small_grads_max_group", lambda: cr.AllReduceCrossDeviceOps("ring", 0, 10, wrong)),
    ):
        with pytest.raises(cr.ArgumentError, match=rf"{name} must be a whole number, 0 or more(.|\n)*given: "):
            make()


@with_ops("wrong", [{}, 0, "ring", (1 << 20, None), cr.CommunicationOptions])
def test_options_of_a_wrong_type(ops, wrong):
    """Options other than CommunicationOptions or None raise an error, in every call that accepts options."""
    for call in (
        lambda: ops.reduce("sum", value(), "cpu:0", wrong),
        lambda: ops.batch_reduce("sum", [], wrong),
        lambda: ops.gather(value(), "cpu:0", 0, wrong),
        lambda: cr.all_reduce([1.0], cross_device_ops=ops, options=wrong),
    ):
        with pytest.raises(cr.ArgumentError, match="options must be CommunicationOptions"):
            call()


def test_too_many_packs():
    """bytes_per_pack=1 for a large buffer is rejected before it creates gigabytes of schedules."""
    x = cr.PerReplica([np.zeros(100_000, "float32")] * 2)
    words = r"cut into 100000 packs; 10000 is the most(.|\n)*bytes_per_pack of 0 or at least 40$"
    with pytest.raises(cr.ArgumentError, match=words):
        cr.HierarchicalCopyAllReduce().reduce("sum", x, x, cr.CommunicationOptions(bytes_per_pack=1))


@with_ops("wrong", [3, None, "pairs", b"x", {"a": 1}, value()])
def test_pairs_of_a_wrong_type(ops, wrong):
    """The pairs of a batch are an iterable, not text, a dict or a distributed value; an element has two components."""
    with pytest.raises(cr.ArgumentError, match="value_destination_pairs must be pairs"):
        ops.batch_reduce("sum", wrong)
    for element in (3, None, "ab", (1,), (1, 2, 3), {1, 2}, {"a": 1, "b": 2}):
        with pytest.raises(cr.ArgumentError, match="element 1 of value_destination_pairs is not a pair"):
            ops.batch_reduce("sum", [(value(), "cpu:0"), element])


@each_ops
def test_broadcast_takes_one_array(ops):
    """Broadcast rejects distributed values, lists, text, classes and None."""
    with pytest.raises(cr.ArgumentError, match=r"broadcast requires a single array(.|\n)*value\[0\]"):
        ops.broadcast(value(), "cpu:0")
    for wrong in ([1.0], None, "x", (np.zeros(2),), np.ndarray):
        with pytest.raises(cr.ReductionError, match="is not an array"):
            ops.broadcast(wrong, "cpu:0")


@with_ops("axis", [2, -3, None, "0", 0.0, True, (0,)])
def test_gather_needs_an_axis(ops, axis):
    """Gather rejects an axis that is not an integer or that the components lack; the error states the valid range."""
    x = cr.PerReplica([np.zeros((2, 3))] * 2)
    problem = "the components do not have this axis" if type(axis) is int else "axis must be an integer"
    with pytest.raises(cr.ArgumentError, match=rf"{problem}(.|\n)*an axis from -2 to 1"):
        ops.gather(x, "cpu:0", axis)


@ops_and_framework
def test_gather_needs_components_that_agree(ops, framework):
    """Gather rejects 0-d components, and components that differ in dtype or in another axis."""
    with pytest.raises(cr.ArgumentError, match=r"components with one axis: x\.reshape\(1\)"):
        ops.gather(cr.PerReplica(framework.arrays([np.float32(1)] * 2)), "cpu:0", 0)
    for other in (np.zeros((2, 4), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 3, 1), "float32")):
        xs = cr.PerReplica(framework.arrays([np.zeros((2, 3), "float32"), other]))
        with pytest.raises(cr.MismatchError, match="differ in dtype, or in an axis other than 0") as caught:
            ops.gather(xs, "cpu:0", 0)
        assert "replica 1 on cpu:1" in str(caught.value)


# ---- all_reduce -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [cr.HierarchicalCopyAllReduce, "ring", 3, object(), False, []], ids=lambda x: type(x).__name__
)
def test_cross_device_ops_of_a_wrong_type(wrong):
    """cross_device_ops must be an instance of CrossDeviceOps; a class or another object raises an UnsupportedError."""
    remedy = r"HierarchicalCopyAllReduce\(\)" if isinstance(wrong, type) else r'AllReduceCrossDeviceOps\("ring"\)'
    with pytest.raises(cr.UnsupportedError, match=rf"cross_device_ops must be(.|\n)*{remedy}"):
        cr.all_reduce([1.0, 2.0], cross_device_ops=wrong)


class Falsy(cr.HierarchicalCopyAllReduce):
    """Cross-device ops whose truth value is False."""

    __len__ = lambda self: 0  # noqa: E731

    def batch_reduce_implementation(self, op, pairs, options):
        return [cr.Mirrored([-1] * len(to), to) for _, to in pairs]


def test_falsy_ops_are_used():
    """Ops whose truth value is False are used, not replaced by the default ones (D17)."""
    assert cr.all_reduce([1.0, 2.0], cross_device_ops=Falsy()) == [-1, -1]


def test_invalid_lists_of_trees():
    """all_reduce needs a list with at least one tree, and one device per tree if devices are given."""
    for wrong in ({"a": 1}, "ab", 3, None, value()):
        remedy = r"list\(value\)" if isinstance(wrong, cr.PerReplica) else r"\[tree, tree\]: one tree per replica"
        with pytest.raises(cr.ArgumentError, match=f"trees must be a list of one tree per replica.*\n.*\n.*{remedy}"):
            cr.all_reduce(wrong)
    with pytest.raises(cr.ArgumentError, match=r"'mean'.*\n.*as in all_reduce\(\[tree, tree\], op\)"):
        cr.all_reduce("mean", [1.0, 2.0])
    with pytest.raises(cr.ArgumentError, match="at least one replica's tree"):
        cr.all_reduce([])
    with pytest.raises(cr.ArgumentError, match="2 trees; cpu:0"):
        cr.all_reduce([1.0, 2.0], devices=["cpu:0"])
    with pytest.raises(cr.ArgumentError, match="is listed more than once"):
        cr.all_reduce([1.0, 2.0], devices=["cpu:0", "CPU:0"])


# ---- an error changes nothing ---------------------------------------------------------------------------------


@ops_and_framework
def test_one_invalid_value_stops_the_batch(ops, framework):
    """One invalid value in a batch raises an error with the number of its pair; no input changes."""
    xs = [np.arange(3, dtype="float32") + k for k in range(2)]
    good, kept = framework.arrays(xs), framework.arrays([np.zeros(3, "float32"), np.zeros(4, "float32")])
    with pytest.raises(cr.MismatchError, match="pair 2: the replicas of one value differ"):
        ops.batch_reduce("sum", [(cr.PerReplica(good), "cpu:0")] * 2 + [(cr.PerReplica(kept), "cpu:0")])
    for x, given in zip(good, xs, strict=True):
        assert np.array_equal(framework.to_numpy(x), given)


def test_a_generator_that_fails_stops_the_batch():
    """An exception of the caller's generator is not changed."""
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        cr.ReductionToOneDevice().batch_reduce("sum", ((value(), "cpu:0") for k in (1, 0) if 1 / k))


# ---- frameworks that are not installed --------------------------------------------------------------------------


def python(code, *missing):
    """Run code in a Python process in which some modules cannot be imported, and return its output."""
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    program = f"import sys\n{block}{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


MISSING_FRAMEWORKS = """
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
    """A missing framework raises an ImportError with its name and the extra that installs it; NumPy needs no other."""
    *lines, reduced = python(MISSING_FRAMEWORKS, "torch", "jax", "jaxlib", "tensorflow").splitlines()
    for name, line in zip(("torch",) * 2 + ("jax",) * 2 + ("tensorflow",) * 2, lines, strict=True):
        assert line.startswith(f'True framework "{name}" was requested, but {name} cannot be imported')
        assert f"pip install 'crossreduce[{name}]'" in line
    assert reduced == "[2.0, 2.0]"


def test_unknown_frameworks():
    """An unknown name of a framework raises an error that lists the known ones."""
    from crossreduce.frameworks import get

    with pytest.raises(
        cr.ArgumentError, match=r"this framework is not supported(.|\n)*numpy, torch, jax, tensorflow, cupy"
    ):
        get("mxnet")
