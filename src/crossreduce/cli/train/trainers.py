"""Adapters of the frameworks for ``train`` and ``bench``: copies to and from devices, one training step, and the
framework's own ways to all-reduce.

Input: NumPy arrays and device names. Output: a framework's arrays, or NumPy arrays. This module imports frameworks, but
only inside functions. The rest of the command line uses ``Trainer``. (``bench`` for ranks also imports PyTorch.)
"""

# ruff: noqa: ARG002 - one protocol: not every framework needs every argument

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from ...devices import parse
from ...frameworks import Array, ReplicaFramework, get
from ...values import default_devices, host_devices

Tree = dict[str, Array]
Gradient = Callable[[Tree, Array, Array], tuple[Array, Tree]]
Update = Callable[[Tree, Tree, Tree, int], tuple[Tree, Tree]]

RATE: Final = 0.1  # the learning rate
MOMENTUM: Final = 0.9


class OwnWay(NamedTuple):
    """A way to all-reduce arrays with a framework's own functions, without crossreduce."""

    run: Callable[[], Iterable[Array]]  # returns the results when they are computed
    one_result: bool = False  # whether the devices' results share memory, so that fewer bytes are written


class Trainer:
    """The operations that ``train`` and ``bench`` require from a framework; this class implements them for NumPy."""

    version = np.__version__

    def __init__(self, devices: tuple[str, ...]) -> None:
        """Import the framework and create these devices (canonical names)."""

    def put(self, x: np.ndarray[Any, Any], device: str) -> Array:
        """Return the framework's array on a device with the elements of a NumPy array."""
        return x.copy()

    def get(self, x: Array) -> np.ndarray[Any, Any]:
        """Return an array as a NumPy array."""
        return np.asarray(x)

    def wait(self, xs: Iterable[Array]) -> None:
        """Block until these arrays are computed."""

    def gradient(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        """Return the sum of the losses over a shard, which may be empty, and the gradient of the sum.

        All arguments are on one device. The model is ``relu(images @ w1 + b1) @ w2 + b2`` with softmax cross entropy.
        """
        hidden = np.maximum(images @ parameters["w1"] + parameters["b1"], 0)
        logits = hidden @ parameters["w2"] + parameters["b2"]
        logits -= logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits)
        sums = exponentials.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = np.sum(np.log(sums[:, 0]) - logits[rows, labels])
        errors = exponentials / sums
        errors[rows, labels] -= 1
        hidden_errors = (errors @ parameters["w2"].T) * (hidden > 0)
        first_layer = {"w1": images.T @ hidden_errors, "b1": hidden_errors.sum(0)}
        return loss, first_layer | {"w2": hidden.T @ errors, "b2": errors.sum(0)}

    def update(self, parameters: Tree, velocity: Tree, total: Tree, size: int) -> tuple[Tree, Tree]:
        """Return the parameters and the velocity after one step of SGD with momentum.

        ``total`` is the gradient of the sum of the losses over ``size`` samples.
        """
        velocity = {name: MOMENTUM * velocity[name] + total[name] / size for name in parameters}
        return {name: parameters[name] - RATE * velocity[name] for name in parameters}, velocity

    def own_ways(self, op: str, xs: list[Array], devices: tuple[str, ...]) -> dict[str, OwnWay]:
        """Return the usual ways, by name, to all-reduce ``xs``, one array per device, without crossreduce.

        ``op`` is sum, product, min, max or mean; the mean of integers is not supported. The dict is empty if the
        framework cannot all-reduce with this op.
        """
        functions = {"product": np.multiply, "min": np.minimum, "max": np.maximum}

        def run() -> list[Array]:
            combine, total = functions.get(op, np.add), xs[0].copy()
            for x in xs[1:]:
                combine(total, x, out=total)
            if op == "mean":
                total /= len(xs)
            return [total, *(total.copy() for _ in xs[1:])]

        return {"loop and copies": OwnWay(run)}


class TorchTrainer(Trainer):
    """PyTorch: gradients by ``torch.autograd``."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        import torch

        self._torch = torch
        self.version = torch.__version__

    def put(self, x: np.ndarray[Any, Any], device: str) -> Array:
        if x.dtype.name == "bfloat16":  # the NumPy dtype of ml_dtypes, which torch cannot read
            host = self._torch.from_numpy(x.view(np.int16).copy()).view(self._torch.bfloat16)
        else:
            host = self._torch.from_numpy(x.copy())
        place = parse(device)
        return host if place.kind == "cpu" else host.to(f"{place.kind}:{place.index}")

    def get(self, x: Array) -> np.ndarray[Any, Any]:
        import ml_dtypes

        host = x.detach().cpu()
        if host.dtype == self._torch.bfloat16:
            return np.asarray(host.view(self._torch.int16).numpy()).view(ml_dtypes.bfloat16)
        return np.asarray(host.numpy())

    def wait(self, xs: Iterable[Array]) -> None:
        for device in {x.device for x in xs if x.device.type == "cuda"}:
            self._torch.cuda.synchronize(device)

    def gradient(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        # Shards are small: on a busy machine OpenMP's second thread made a run of 1.5 s take 78 s (2 cores).
        self._torch.set_num_threads(1)
        w1, b1, w2, b2 = leaves = [parameters[name].detach().requires_grad_() for name in ("w1", "b1", "w2", "b2")]
        logits = (images @ w1 + b1).relu() @ w2 + b2
        loss = self._torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        grads = self._torch.autograd.grad(loss, leaves)
        return loss.detach(), dict(zip(("w1", "b1", "w2", "b2"), grads, strict=True))

    def own_ways(self, op: str, xs: list[Array], devices: tuple[str, ...]) -> dict[str, OwnWay]:
        torch = self._torch
        combine = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
        typed = {"dtype": xs[0].dtype} if op in ("sum", "product") else {}  # by default torch sums int8 in int64
        reduce = getattr(torch, {"product": "prod", "min": "amin", "max": "amax"}.get(op, op))

        def loop() -> list[Array]:
            total = xs[0].clone() if len(xs) == 1 else combine(xs[0], xs[1])
            for x in xs[2:]:
                combine(total, x, out=total)
            return [total.div_(len(xs)) if op == "mean" else total]

        def stack() -> list[Array]:
            return [reduce(torch.stack(xs), 0, **typed)]

        return {f"stack().{reduce.__name__}(0)": OwnWay(stack, one_result=True), "loop": OwnWay(loop, one_result=True)}


class JaxTrainer(Trainer):
    """JAX: gradients by ``jax.value_and_grad`` under ``jax.jit``."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        import jax

        self._jax = jax
        self.version = jax.__version__
        with contextlib.suppress(RuntimeError):  # if JAX is in use already, load() raises if a device is missing
            jax.config.update("jax_num_cpu_devices", _cpus(devices))
        jax.config.update("jax_enable_x64", True)  # without it JAX makes int32 and float32 of int64 and float64
        self._gradient: Gradient = jax.jit(jax.value_and_grad(self._loss))
        self._update: Update = jax.jit(super().update)

    def put(self, x: np.ndarray[Any, Any], device: str) -> Array:
        place = parse(device)
        return self._jax.device_put(x, self._jax.devices(place.kind)[place.index])

    def wait(self, xs: Iterable[Array]) -> None:
        self._jax.block_until_ready(list(xs))

    def _loss(self, parameters: Tree, images: Array, labels: Array) -> Array:
        hidden = self._jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
        logs = self._jax.nn.log_softmax(hidden @ parameters["w2"] + parameters["b2"])  # of probabilities
        return -self._jax.numpy.take_along_axis(logs, labels[:, None], axis=1).sum()

    def gradient(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        return self._gradient(parameters, images, labels)

    def update(self, parameters: Tree, velocity: Tree, total: Tree, size: int) -> tuple[Tree, Tree]:
        return self._update(parameters, velocity, total, size)

    def own_ways(self, op: str, xs: list[Array], devices: tuple[str, ...]) -> dict[str, OwnWay]:
        jax = self._jax
        name = {"sum": "psum", "mean": "pmean", "min": "pmin", "max": "pmax"}.get(op)
        if name is None:
            return {}
        mesh = jax.sharding.Mesh(np.array([device for x in xs for device in x.devices()]), ("replica",))
        rows = jax.sharding.PartitionSpec("replica")
        place = jax.sharding.NamedSharding(mesh, rows)
        joined = jax.make_array_from_single_device_arrays((len(xs) * xs[0].size,), place, xs)
        function = getattr(jax.lax, name)
        mapped = jax.shard_map(
            lambda x: function(x, "replica"), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
        )
        reduced = jax.jit(mapped)

        def run() -> list[Array]:
            return [shard.data for shard in jax.block_until_ready(reduced(joined)).addressable_shards]

        return {name: OwnWay(run)}


class TensorFlowTrainer(Trainer):
    """TensorFlow: gradients by ``tf.GradientTape`` inside ``tf.function``."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        import tensorflow as tf

        self._tf = tf
        self.version = tf.__version__
        with contextlib.suppress(RuntimeError):  # if TensorFlow is in use, load() raises if a device is missing
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * _cpus(devices)
            )
        self._gradient: Gradient = tf.function(self._loss, reduce_retracing=True)
        self._update: Update = tf.function(super().update)

    def put(self, x: np.ndarray[Any, Any], device: str) -> Array:
        place = parse(device)
        with self._tf.device(f"{'GPU' if place.kind == 'cuda' else place.kind.upper()}:{place.index}"):
            return self._tf.constant(x)

    def wait(self, xs: Iterable[Array]) -> None:
        self._tf.test.experimental.sync_devices()

    def _loss(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        with self._tf.GradientTape() as tape:
            tape.watch(parameters)
            hidden = self._tf.nn.relu(images @ parameters["w1"] + parameters["b1"])
            logits = hidden @ parameters["w2"] + parameters["b2"]
            loss = self._tf.reduce_sum(self._tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return loss, tape.gradient(loss, parameters)

    def gradient(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        with self._tf.device(images.device):
            return self._gradient(parameters, images, labels)

    def update(self, parameters: Tree, velocity: Tree, total: Tree, size: int) -> tuple[Tree, Tree]:
        with self._tf.device(parameters["w1"].device):
            return self._update(parameters, velocity, total, size)

    def own_ways(self, op: str, xs: list[Array], devices: tuple[str, ...]) -> dict[str, OwnWay]:
        from tensorflow.python.distribute import values  # TensorFlow has no public way to make a PerReplica

        if op not in ("sum", "mean"):
            return {}
        value, reduce_op = values.PerReplica(xs), getattr(self._tf.distribute.ReduceOp, op.upper())

        def reduction(ops: Any) -> Callable[[], Iterable[Array]]:
            return lambda: ops.reduce(reduce_op, value, value).values

        distribute, ways = self._tf.distribute, {}
        for ops in (distribute.HierarchicalCopyAllReduce(1), distribute.ReductionToOneDevice()):
            name, run = type(ops).__name__, reduction(ops)
            ways[name] = OwnWay(run, one_result=True)  # on CPUs, copies between devices share memory
            ways[f"{name} in tf.function"] = OwnWay(self._tf.function(run, autograph=False), one_result=True)
        return ways


class CuPyTrainer(Trainer):
    """CuPy: the same operations as in NumPy, each on the device of its arrays."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        import cupy

        self._cupy = cupy
        self.version = cupy.__version__

    def put(self, x: np.ndarray[Any, Any], device: str) -> Array:
        with self._cupy.cuda.Device(parse(device).index):
            return self._cupy.asarray(x)

    def get(self, x: Array) -> np.ndarray[Any, Any]:
        with x.device:
            return np.asarray(self._cupy.asnumpy(x))

    def wait(self, xs: Iterable[Array]) -> None:
        for number in {x.device.id for x in xs}:
            self._cupy.cuda.Device(number).synchronize()

    def gradient(self, parameters: Tree, images: Array, labels: Array) -> tuple[Array, Tree]:
        with images.device:
            return super().gradient(parameters, images, labels)

    def update(self, parameters: Tree, velocity: Tree, total: Tree, size: int) -> tuple[Tree, Tree]:
        with parameters["w1"].device:
            return super().update(parameters, velocity, total, size)

    def own_ways(self, op: str, xs: list[Array], devices: tuple[str, ...]) -> dict[str, OwnWay]:
        return {}  # CuPy's copies between devices do not wait for the sender: a loop of them needs events


TRAINERS: Final = {
    "numpy": Trainer,
    "torch": TorchTrainer,
    "jax": JaxTrainer,
    "tensorflow": TensorFlowTrainer,
    "cupy": CuPyTrainer,
}


def load(name: str, devices: tuple[str, ...]) -> Trainer:
    """Return the trainer of a framework, or raise if the framework or one of these devices is not available."""
    _quiet()
    framework = get(name)
    trainer = TRAINERS[name](devices)
    framework.require(devices)
    return trainer


def numbered_devices(name: str, count: int) -> tuple[str, ...]:
    """Return ``count`` devices for a framework: in host memory, or, for CuPy, GPUs, which may have logical devices.

    Raises:
      BackendError: CuPy is not installed.
    """
    if name != "cupy":
        return host_devices(count)
    get(name)
    import cupy

    gpus = max(1, cupy.cuda.runtime.getDeviceCount())
    return default_devices([f"cuda:{k % gpus}" for k in range(count)])


def available_devices(name: str) -> str:
    """Import a framework and return its devices as text."""
    _quiet()
    host = "cpu:k, one for each replica"
    if name == "torch":
        import torch

        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        return ", ".join([host, *(f"cuda:{k} ({gpu})" for k, gpu in enumerate(names))])
    if name == "jax":
        import jax

        listed = ", ".join(f"{'cuda' if d.platform == 'gpu' else d.platform}:{d.id}" for d in jax.devices())
        return f"{listed} (more cpu:k with jax_num_cpu_devices)"
    if name == "tensorflow":
        import tensorflow as tf

        listed = ", ".join(str(parse(device.name)) for device in tf.config.list_logical_devices())
        return f"{listed} (more cpu:k as logical devices)"
    if name == "cupy":
        cupy = get(name)
        assert isinstance(cupy, ReplicaFramework)
        return ", ".join(cupy.accelerators()) or "none: CuPy arrays need a GPU"
    return host


def _quiet() -> None:
    """Disable TensorFlow's log messages by environment variables, unless the user has set them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # with oneDNN, TensorFlow 2.21 logs regardless of the level


def _cpus(devices: tuple[str, ...]) -> int:
    """Return how many CPU devices a framework must create so that all of these exist; at least 1."""
    return 1 + max((parse(device).index for device in devices if parse(device).kind == "cpu"), default=0)


if __name__ == "__main__":  # ``crossreduce info`` runs this in a separate process, which may crash
    print(available_devices(sys.argv[1]))
