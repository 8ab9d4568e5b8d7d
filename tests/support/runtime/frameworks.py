"""One interface to the four frameworks for tests: it makes arrays on the k-th device, and returns them to NumPy."""

import functools
import importlib.util
import os
from collections import namedtuple

import numpy as np
from oracle import dtype_of as np_dtype

import crossreduce as cr

ALL = ("numpy", "torch", "jax", "tensorflow")
# The frameworks that the variable names must be installed, as in CI. Without it, tests of one that is not are skipped.
_INSTALLED = ",".join(name for name in ALL if importlib.util.find_spec(name) is not None)
NAMES = tuple((os.environ.get("CROSSREDUCE_TEST_FRAMEWORKS") or _INSTALLED).split(","))
DEVICES = 17
DTYPES = (
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8",
    "complex64", "complex128", "bool",
)  # fmt: skip
COMPLEX = ("complex64", "complex128")


def defined(op, dtype):
    """Return whether a reduction is defined for a dtype."""
    if dtype == "bool":
        return op not in ("sum", "mean")
    return not (dtype in COMPLEX and op in ("min", "max"))


Parts = namedtuple("Parts", "kind values indices")
"""The parts of a sparse array, as NumPy arrays."""


class Framework:
    """The operations that tests require from a framework."""

    name: str
    examples: int  # how many hypothesis draws for a test: few if TensorFlow or JAX's compilation is slow
    mutable: bool  # whether arrays can be written
    kinds: tuple[str, ...]  # kinds of sparse arrays; "IndexedSlices" is the class of crossreduce

    def __repr__(self):
        return self.name

    def arrays(self, xs):
        """Return arrays of the framework, the k-th on the k-th device."""
        return [self.array(x, k) for k, x in enumerate(xs)]

    def sparse(self, kind, values, indices, shape, k=0):
        """Return a sparse array of a kind in ``kinds``, on the k-th device."""
        if kind == "IndexedSlices":
            return cr.IndexedSlices(self.array(values, k), self.array(indices, k), shape)
        return self.own_sparse(values, indices, shape, k)

    def parts(self, x):
        """Return the ``Parts`` of a sparse array."""
        assert type(x) is cr.IndexedSlices
        return Parts("IndexedSlices", self.to_numpy(x.values), self.to_numpy(x.indices))

    def dense(self, x, shape):
        """Return a sparse array as a dense NumPy array."""
        _, values, indices = self.parts(x)
        out = np.zeros(shape, values.dtype)
        np.add.at(out, tuple(indices.T) if indices.ndim == 2 else indices, values)
        return out

    def mean_dtype(self, dtype):
        """Return the dtype of the mean of arrays of integers: that of true division."""
        return (self.array(np.ones(1, np_dtype(dtype))) / 2).dtype.name

    def shares(self, a, b):
        """Return whether two arrays share memory. It does not matter for immutable arrays."""
        return False

    def memory(self, x):
        """Return the arrays that a result consists of."""
        return [x.values, x.indices] if isinstance(x, cr.IndexedSlices) else [x]


class NumPy(Framework):
    name, examples, mutable, kinds = "numpy", 150, True, ("IndexedSlices",)

    def array(self, x, k=0):
        return np.array(x)

    def to_numpy(self, x):
        assert type(x) is np.ndarray
        return x

    def device_of(self, x):
        return "cpu"  # one memory, which all devices cpu:k share

    def shares(self, a, b):
        return np.shares_memory(a, b)


class Torch(Framework):
    name, examples, mutable, kinds = "torch", 60, True, ("IndexedSlices", "coo")

    def __init__(self, kind="cpu"):
        import torch

        self.torch, self.where = torch, kind

    def array(self, x, k=0):
        x = np.array(x, order="C")
        if x.dtype == np_dtype("bfloat16"):
            return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16).to(self.where)
        return self.torch.from_numpy(x).to(self.where)

    def to_numpy(self, x):
        assert type(x) is self.torch.Tensor
        x = x.detach().cpu()
        if x.dtype == self.torch.bfloat16:
            return x.contiguous().view(self.torch.int16).numpy().view(np_dtype("bfloat16"))
        return x.numpy()

    def device_of(self, x):
        return str(x.device)

    def mean_dtype(self, dtype):
        return str((self.array(np.ones(1, np_dtype(dtype))) / 2).dtype).removeprefix("torch.")

    def shares(self, a, b):
        if a.numel() == 0 or b.numel() == 0:
            return False
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

    def own_sparse(self, values, indices, shape, k):
        rows = np.atleast_2d(np.asarray(indices).T)  # of shape (number of indexed axes, number of slices)
        return self.torch.sparse_coo_tensor(self.array(rows), self.array(values), tuple(shape), check_invariants=False)

    def parts(self, x):
        if not isinstance(x, self.torch.Tensor):
            return super().parts(x)
        assert x.layout is self.torch.sparse_coo
        indices = self.to_numpy(x._indices()).T
        return Parts("coo", self.to_numpy(x._values()), indices[:, 0] if indices.shape[1] == 1 else indices)

    def memory(self, x):
        if isinstance(x, self.torch.Tensor) and x.layout is self.torch.sparse_coo:
            return [x._values(), x._indices()]
        return super().memory(x)


class Jax(Framework):
    name, examples, mutable, kinds = "jax", 20, False, ("IndexedSlices", "bcoo")

    def __init__(self, kind="cpu"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        from jax.experimental import sparse

        if jax.config.jax_num_cpu_devices != DEVICES:
            jax.config.update("jax_num_cpu_devices", DEVICES)
        jax.config.update("jax_enable_x64", True)
        self.jax, self.bcoo = jax, sparse.BCOO
        self.devices = jax.devices(kind)
        if kind == "cpu":
            assert len(self.devices) == DEVICES, "JAX was used before its devices were set up"

    def array(self, x, k=0):
        return self.jax.device_put(np.array(x), self.devices[k % len(self.devices)])

    def to_numpy(self, x):
        assert isinstance(x, self.jax.Array)
        return np.asarray(x)

    def device_of(self, x):
        (device,) = x.devices()
        return f"{device.platform}:{device.id}"

    def own_sparse(self, values, indices, shape, k):
        rows = np.asarray(indices)
        rows = rows[:, None] if rows.ndim == 1 else rows
        return self.bcoo((self.array(values, k), self.array(rows, k)), shape=tuple(shape))

    def parts(self, x):
        if not isinstance(x, self.bcoo):
            return super().parts(x)
        indices = self.to_numpy(x.indices)
        return Parts("bcoo", self.to_numpy(x.data), indices[:, 0] if indices.shape[1] == 1 else indices)

    def memory(self, x):
        return [x.data, x.indices] if isinstance(x, self.bcoo) else super().memory(x)


class TensorFlow(Framework):
    name, examples, mutable, kinds = "tensorflow", 20, False, ("IndexedSlices", "tf.IndexedSlices")

    def __init__(self):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
        tf.config.list_logical_devices()  # fixes the devices, so that no other code of this process can change them
        tf.get_logger().setLevel("ERROR")
        self.tf = tf

    def array(self, x, k=0):
        with self.tf.device(f"/CPU:{k}"):
            # The constant's value stays where it was created; identity moves it to the device.
            return self.tf.identity(self.tf.constant(np.array(x)))

    def to_numpy(self, x):
        assert self.tf.is_tensor(x)
        assert not isinstance(x, self.tf.Variable)
        return np.asarray(x.numpy())

    def device_of(self, x):
        return "cpu:" + x.device.rpartition("CPU:")[2]

    def own_sparse(self, values, indices, shape, k):
        dense_shape = None if shape is None else self.array(np.array(shape, np.int64), k)
        return self.tf.IndexedSlices(self.array(values, k), self.array(indices, k), dense_shape)

    def parts(self, x):
        if not isinstance(x, self.tf.IndexedSlices):
            return super().parts(x)
        return Parts("tf.IndexedSlices", self.to_numpy(x.values), self.to_numpy(x.indices))

    def memory(self, x):
        return [x.values, x.indices] if isinstance(x, self.tf.IndexedSlices) else super().memory(x)


CLASSES = {"numpy": NumPy, "torch": Torch, "jax": Jax, "tensorflow": TensorFlow}


@functools.cache
def load(name):
    """Return a framework with its devices configured, or raise ImportError if it is not installed."""
    importlib.import_module(name)
    return CLASSES[name]()
