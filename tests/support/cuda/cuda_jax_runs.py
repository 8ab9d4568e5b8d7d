"""JAX arrays through the CUDA engine on the fake driver: JAX's CPU devices stand in for GPUs.

The custom call that is made for CUDA is registered for the CPU as well. XLA's CPU devices have no stream, so the call
gets a device and a stream of the fake driver, and a hook lets the driver own the buffers of a call while it runs. Each
check asserts how many calls ran and that the driver reported nothing. Run as a program, in a process of its own since
the engine keeps its contexts: python cuda_jax_runs.py CHECK ...
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

os.environ["JAX_NUM_CPU_DEVICES"] = "3"

import frameworks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_jax_devices import SHAPES
from fake_cuda import FakeDriver
from jax.interpreters import mlir
from jax_programs import draw
from paths import ROOT

import crossreduce as cr
from crossreduce import values
from crossreduce.devices import parse
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda import jax as cuda_jax
from crossreduce.errors import ArgumentError, DriverError
from crossreduce.frameworks.jax import arrays
from crossreduce.reduction import pipeline

DEVICES = 3
# The bytes of an element of each dtype, by XLA's number of the dtype.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}


class Gpu:
    """The fake driver behind JAX's CPU devices."""

    def __init__(self):
        self.fake, self.lock, self.calls = FakeDriver(DEVICES), threading.Lock(), 0
        assert not driver.unusable()
        self.streams = [self.fake.stream(k) for k in range(DEVICES)]
        jax.ffi.register_ffi_target(cuda_jax.TARGET, driver.native().xla_handler(), platform="cpu")
        mlir.register_lowering(cuda_jax.REDUCE, cuda_jax.lower, platform="cpu")
        self.use(0)

    def use(self, device):
        """Let the calls run on a device."""
        self.device = device
        driver.native().use_stream(device, self.streams[device], self.hook)

    def hook(self, buffers, begins):  # ``begins``: whether a call begins, or else has ended
        memory = {address: size * SIZES[dtype] for address, dtype, size in buffers if size}
        if begins:
            self.lock.acquire()
            for address, nbytes in memory.items():
                self.fake.own(address, nbytes, self.device)
        else:
            self.fake.run()
            for address in memory:
                self.fake.disown(address)
            self.lock.release()

    def ran(self):
        """Return how many calls ran since the last ``ran``. Assert that the driver reported nothing."""
        assert not self.fake.report(), self.fake.report()[:3]
        before, self.calls = self.calls, driver.native().counts()[1]
        return self.calls - before


@contextmanager
def gpus():
    """Let ``cuda:k`` be JAX's CPU device k."""
    place = arrays.place
    with (
        mock.patch.object(arrays, "place", lambda name: place(f"cpu:{parse(name).index}")),
        mock.patch.object(cuda_jax, "_has_plugin", return_value=True),
    ):
        yield Gpu()


def names(count, device=0):
    return [f"cuda:{device}" + (f"#{k}" if k else "") for k in range(count)]


def check_bits(gpu):
    """In programs, batches and large numbers of replicas give the bits of the host engine, by one custom call.

    The tests of test_gpu.py check eager calls, which are lowered in the same way, for all dtypes, ops and algorithms.
    """
    rng = np.random.default_rng(7)
    for dtype, op, algorithm, count, shapes in (
        ("float32", "mean", "hierarchical_copy", 3, SHAPES),
        ("float64", "product", "auto", 9, SHAPES),
        ("bfloat16", "sum", "ring", 16, [(5000,)]),
        ("float32", "sum", "ring", 70, [(40,)]),  # needs temporary memory
    ):
        hosts, ops = ["cpu:0", *(f"cpu:0#{k}" for k in range(1, count))], cr.AllReduceCrossDeviceOps(algorithm)
        reduced = partial(cr.all_reduce, op=op, devices=hosts, cross_device_ops=ops)
        with jax.enable_x64(True):
            given = [[jax.device_put(draw(rng, dtype, shape), jax.devices()[0]) for shape in shapes] for _ in hosts]
            right = jax.tree.leaves(reduced(given))
            assert gpu.ran() == 0
            results = jax.tree.leaves(jax.block_until_ready(jax.jit(reduced)(given)))
        assert gpu.ran() == 1, (dtype, op, algorithm)
        a, b = ([(np.asarray(x).tobytes(), x.aval, x.device) for x in xs] for xs in (results, right))
        assert a == b, (dtype, op, algorithm)


def check_eager(gpu):
    """Results are independent, also on another device. The loop engine reduces what the custom call would change."""
    xs = [jax.device_put(np.full(1000, 2.0**k, "float32"), jax.devices()[2]) for k in range(3)]
    gpu.use(2)
    over = partial(cr.all_reduce, devices=names(3, 2))
    first, second, third = over(xs)
    assert (gpu.ran(), first.devices(), first.committed) == (1, {jax.devices()[2]}, True)
    first.delete()
    jax.jit(lambda x: -x, donate_argnums=0)(second)
    assert third.tolist() == [7.0] * 1000
    launches = driver.native().counts()[0]
    assert [x.tolist() for x in over(xs)] == [third.tolist()] * 3
    assert (driver.native().counts()[0], gpu.ran()) == (launches + 1, 1)
    nans = [x * np.float32(sign) for x, sign in zip(xs, (np.inf, -np.inf, 1), strict=True)]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        over(nans)
    gpu.ran()
    weak = cr.all_reduce([jnp.asarray(2.0), jnp.asarray(3.0)], devices=names(2))
    assert [(float(x), x.weak_type) for x in weak] == [(5.0, True)] * 2
    assert gpu.ran() == 0


def check_programs(gpu):
    """Programs for one device run one custom call per reduction, if that was chosen; others run none."""
    xs = [jnp.arange(6.0) + k for k in range(3)]
    mesh = jax.make_mesh((3,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(np.arange(6.0, dtype="float32"), jax.NamedSharding(mesh, jax.P("d")))
    over = jax.jit(lambda x: cr.all_reduce([x, x])[0])
    inside = jax.shard_map(lambda x: cr.all_reduce([x, x])[0], mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))

    def program(*xs):
        found = cr.all_reduce([2 * x for x in xs], "mean", devices=names(3))
        return sum(found) + cr.all_reduce([x[:2] for x in xs])[0].sum()

    right = 3 * np.mean([2 * np.asarray(x) for x in xs], 0) + sum(np.asarray(x)[:2].sum() for x in xs)
    calls = 2 * cuda_jax.reduces_traced()
    assert jax.jit(program).lower(*xs).as_text().count(f"@{cuda_jax.TARGET}") == calls
    assert np.allclose(jax.jit(program)(*xs), right)
    assert gpu.ran() == calls
    exported = jax.export.export(jax.jit(program))(*xs).mlir_module()
    for text in exported, over.lower(sharded).as_text(), jax.jit(inside).lower(sharded).as_text():
        assert cuda_jax.TARGET not in text
    assert over(sharded).tolist() == [0, 2, 4, 6, 8, 10]
    assert gpu.ran() == 0
    with mock.patch.dict(os.environ, CROSSREDUCE_CUDA_JIT="yes"), pytest.raises(ArgumentError, match="must be 0 or 1"):
        cuda_jax.reduces_traced.__wrapped__()
    print("calls in programs:", calls)


def check_gradients(gpu):
    """Derivatives and vmap give the results of the loop engine, and the forward pass is the custom call."""
    *xs, weights = (draw(np.random.default_rng(k), "float32", (4, 3)) for k in range(4))

    def loss(*xs, op, devices=None):
        found = cr.all_reduce([x**2 for x in xs], op, devices=devices)
        return sum(((k + weights) * x).sum() for k, x in enumerate(found))

    for op, function in (
        ("sum", jax.jit(jax.grad(partial(loss, op="sum"), (0, 1, 2)))),
        ("mean", jax.grad(partial(loss, op="mean", devices=names(3)), (0, 1, 2))),
        ("product", jax.jit(lambda *xs: jax.jvp(partial(loss, op="product"), xs, tuple(x + 1 for x in xs)))),
        ("max", jax.jit(jax.vmap(lambda *ys: cr.all_reduce(list(ys), "max")))),
    ):
        with mock.patch.object(cuda_jax, "supports", return_value=False):
            right = jax.tree.leaves(function(*xs))
        assert gpu.ran() == 0
        jax.clear_caches()
        for a, b in zip(jax.tree.leaves(function(*xs)), right, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
        assert gpu.ran() or op != "product", op  # gradients of sums do not need their value


def fails(function, pattern):
    """Assert that a call raises JAX's error with a pattern, or ValueError: JAX's fast path (jaxlib 0.10.2, CPU)."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=pattern):
        jax.block_until_ready(function())


def check_errors(gpu):
    """Each call of the driver that fails raises an error with its name, device and code, and later calls are right.

    A program of another process is an error if its plan is not known here, and so is a GPU that fails when it gets the
    kernels. Where JAX or the kernels do not allow a custom call, the loop engine runs.
    """
    gpu.use(1)
    here = [jax.device_put(jnp.arange(8.0) + k, jax.devices()[1]) for k in range(2)]
    eager = partial(cr.all_reduce, here, devices=names(2, 1))
    for function in eager, partial(jax.jit(lambda *xs: cr.all_reduce(list(xs))), *here):
        jax.block_until_ready(function())
        for name in "cuLaunchKernel on cuda:1", "cuCtxGetCurrent", "cuCtxSetCurrent on cuda:1":
            gpu.fake.fail(name.split()[0], 1, 719)
            fails(function, rf"{name}\.\n  given: CUDA_ERROR_LAUNCH_FAILED \(719\)")
            gpu.fake.clear()
            assert function()[1].tolist() == (2 * np.arange(8.0) + 1).tolist()
    call = jax.ffi.ffi_call(cuda_jax.TARGET, jax.ShapeDtypeStruct((8,), "float32"))
    for number, pattern in ((np.int64(5), "no plan 5 for cuda:1"), (np.int32(6), "has no number")):
        fails(partial(call, here[0], number=number), pattern)
    gpu.ran()
    for name, change in ("lacks_kernels", lambda number: "no code"), ("_is_alone", lambda context: context.missing):
        jax.clear_caches()
        with mock.patch.object(cuda_jax, name, change):
            assert eager("max")[0].tolist() == (np.arange(8.0) + 1).tolist()
    lost = driver._error("cuModuleLoadData", 1, 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "")
    with mock.patch.object(cuda_jax, "load_kernels", side_effect=lost), pytest.raises(DriverError, match="NVLINK"):
        eager("min")
    assert gpu.ran() == 0


def check_tests(gpu):
    """Tests of test_gpu.py pass with the engine, and fail if JAX refuses the custom call, or without the module."""
    sys.path.insert(0, str(ROOT / "tests/cuda"))
    import test_gpu

    with mock.patch.object(frameworks, "DEVICES", DEVICES):
        here = frameworks.Jax()
    here.devices = here.devices[:1]
    here.device_of = lambda x: "gpu:0" if x.devices() == {*here.devices} else "elsewhere"
    changes = {
        "": nullcontext(),
        "the kernels of the CUDA engine did not run": mock.patch.object(cuda_jax, "_register", return_value=False),
        "the compiled module of the CUDA engine is": mock.patch.object(driver, "native", return_value=None),
    }
    on_cuda = [mock.patch.object(module, "locate", return_value="cuda:0") for module in (values, pipeline)]
    for outcome, change in changes.items():
        jax.clear_caches()
        for test in test_gpu.test_every_contribution_is_added_once_on_gpu, test_gpu.test_every_dtype_on_gpu:
            expected = pytest.raises(AssertionError, match=outcome) if outcome else nullcontext()
            with on_cuda[0], on_cuda[1], change, expected:
                test(here)
    gpu.ran()


def check_numbers(gpu, *ops):
    """Plans have the same numbers in each process, in whatever order they are made: JAX keeps programs on disk."""
    for op in ops:
        with mock.patch.object(cuda_jax, "number_of", side_effect=cuda_jax.number_of) as number_of:
            cr.all_reduce([jnp.ones(9)] * 3, op, devices=names(3))
        print(op, cuda_jax.number_of(number_of.call_args[0][0]))


if __name__ == "__main__":
    with gpus() as machine:
        for what, *more in (each.split("=") for each in sys.argv[1:]):
            machine.use(0)
            globals()[f"check_{what}"](machine, *more)
