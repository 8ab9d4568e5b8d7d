"""Values, destinations and results of ``tf.distribute``, for the tests of ``crossreduce.tensorflow``'s ops."""

import numpy as np
import pytest
from frameworks import NAMES, load

if "tensorflow" not in NAMES:
    pytest.skip("CROSSREDUCE_TEST_FRAMEWORKS excludes tensorflow", allow_module_level=True)
tf = load("tensorflow").tf  # configures the logical devices, once for all tests

from tensorflow.python.distribute.values import Mirrored, PerReplica  # noqa: E402 - no public function creates one

import crossreduce.tensorflow as crt  # noqa: E402 - after TensorFlow has its devices

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
OPS = {
    "to one": crt.ReductionToOneDevice(),
    "to CPU:1": crt.ReductionToOneDevice(reduce_to_device="/device:CPU:1"),
    "add_n": crt.ReductionToOneDevice(accumulation_fn=tf.add_n),
    "all-reduce": crt.AllReduceCrossDeviceOps(),
    "unpacked": crt.AllReduceCrossDeviceOps("hierarchical_copy", 0),
    "hierarchical": crt.HierarchicalCopyAllReduce(8),
    "small tensors joined": crt.AllReduceCrossDeviceOps("hierarchical_copy", 0, 100, 10),
}
MODES = ("eager", "function")
SMALL = crt.HierarchicalCopyAllReduce()


def name(k):
    return f"/job:localhost/replica:0/task:0/device:CPU:{k}"


def place(x):
    """Return the full name of a tensor's device. Inside functions, TensorFlow shortens names."""
    return name(x.device.rpartition("/device:CPU:")[2]) if x.device else ""


def on(k, x, dtype=None):
    with tf.device(f"CPU:{k}"):
        return tf.identity(tf.constant(x, dtype))


def per_replica(xs, first=0, wrap=PerReplica):
    """Return a distributed value of class ``wrap`` whose component k is on CPU ``first + k``."""
    return wrap([on(first + k, x) for k, x in enumerate(xs)])


def outcome(result):
    """Return ("mirrored" or "bare", the devices of the components, the components) of a result."""
    if isinstance(result, tf.distribute.DistributedValues):
        assert type(result) is Mirrored
        return "mirrored", [place(x) for x in result.values], list(result.values)
    assert not isinstance(result, tf.Variable)
    return "bare", [place(result)], [result]


def outcomes(mode, call):
    """Run a function that returns a list of results, eagerly or traced. Return the ``outcome``s with NumPy arrays."""
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


def slices(k, values, indices, shape=(5, 2)):
    with tf.device(f"CPU:{k}"):
        return tf.IndexedSlices(on(k, values), on(k, indices), None if shape is None else tf.constant(shape))


def destinations_of(n):
    """Return (argument, whether the result is one bare tensor, its devices) for each kind of destinations."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(n)])
    with strategy.scope():
        shared = tf.Variable(1.0)
    here = [name(k) for k in range(n)]
    alone = n == 1
    slices = tf.IndexedSlices(on(1, [[1.0]]), on(1, [0]))
    return {
        "the same devices": (per_replica([1.0] * n, wrap=Mirrored), alone, here),
        # TensorFlow ignores this order: defect D12 of docs/contract.md
        "in another order": (Mirrored([on(k, 1.0) for k in reversed(range(n))]), alone, here[::-1]),
        "other devices": (per_replica([1.0] * 2, n, Mirrored), False, [name(n), name(n + 1)]),
        "another device": (per_replica([1.0], 3, Mirrored), True, [name(3)]),
        "a mirrored variable": (shared, alone, here),
        "a string": ("/cpu:0", True, [name(0)]),
        "a tensor": (on(1, 7), True, [name(1)]),
        "slices": (slices, True, [name(1)]),
        "a variable": (variable(2, 5.0), True, [name(2)]),
    }
