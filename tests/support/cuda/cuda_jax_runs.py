"""JAX arrays through the CUDA engine on the fake driver: JAX's CPU devices stand in for GPUs.

The custom call that is made for CUDA is registered for the CPU as well. XLA's CPU devices have no stream, so the call
gets a device and a stream of the fake driver, and a hook lets the driver own the buffers of a call while it runs. Each
check asserts that the call ran and the driver reported nothing, and returns the number of its cases. Run as a program,
in a process of its own since the engine keeps its contexts: python cuda_jax_runs.py LIBRARY CHECK ...
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["JAX_NUM_CPU_DEVICES"] = "3"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_jax_xla import CASES, SHAPES, values
from fake_cuda import FakeDriver
from jax.experimental import serialize_executable
from jax.interpreters import mlir
from pairs import each

import crossreduce as cr
from crossreduce import frameworks
from crossreduce.devices import parse
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda import jax as cuda_jax
from crossreduce.errors import BackendError

FRAMEWORK = frameworks.get("jax")
# The bytes of an element of each dtype, by XLA's number of the dtype.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}


class Gpu:
    """The fake driver behind JAX's CPU devices."""

    def __init__(self, library):
        self.fake = FakeDriver(library, 3)
        self.streams, self.runs, self.lock = {}, 0, threading.Lock()
        assert not driver.unusable()
        handler = driver.native().xla_handler()
        jax.ffi.register_ffi_target(cuda_jax.TARGET, handler, platform="cpu")
        mlir.register_lowering(cuda_jax.REDUCE, cuda_jax.lower, platform="cpu")

    def use(self, device):
        """Let the calls run on a device, which has a stream of its own."""
        if device not in self.streams:
            self.streams[device] = self.fake.stream(device)
        self.device = device
        driver.native().use_stream(device, self.streams[device], self.hook)

    def hook(self, buffers, begins):  # ``begins``: whether a call begins, or else has ended
        memory = {address: size * SIZES[dtype] for address, dtype, size in buffers if size}
        if begins:
            self.lock.acquire()
            self.runs += 1
            for address, nbytes in memory.items():
                assert self.fake.lib.fake_own(address, nbytes, self.device) == 0
        else:
            self.fake.run()
            for address in memory:
                self.fake.disown(address)
            self.lock.release()

    def ran(self):
        """Return how many calls ran since the last ``ran``. Assert that the driver reported nothing."""
        assert not self.fake.report(), self.fake.report()[:3]
        count, self.runs = self.runs, 0
        return count


@contextmanager
def gpus(library):
    """Let ``cuda:k`` be JAX's CPU device k."""
    place = frameworks.jax.arrays.place
    gpu = Gpu(library)
    with (
        mock.patch.object(frameworks.jax.arrays, "place", lambda name: place(f"cpu:{parse(name).index}")),
        mock.patch.object(cuda_jax, "_has_plugin", return_value=True),
    ):
        gpu.use(0)
        yield gpu


def names(count, device=0):
    return [f"cuda:{device}" + (f"#{k}" if k else "") for k in range(count)]


def same(results, right):
    """Return whether arrays have the bits, dtypes and shapes of others."""
    return len(results) == len(right) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(results, right, strict=True)
    )


def check_bits(gpu, is_traced):
    """All dtypes, ops, numbers of replicas, algorithms, batches and destinations give the bits of the host engine."""
    draw = np.random.default_rng(7)
    cases = [(*case, count, SHAPES if count == 3 else [(257,)]) for case, count in each(CASES, [2, 3, 5, 9])]
    cases += [("bfloat16", "sum", "ring", 16, [(5000,)]), ("float32", "sum", "ring", 70, [(40,)])]
    for dtype, op, algorithm, count, shapes in cases:
        rows = [[values(draw, dtype, shape) for _ in range(count)] for shape in shapes]
        ops = cr.AllReduceCrossDeviceOps(algorithm)

        def reduced(rows, devices, op=op, ops=ops):
            found = [cr.PerReplica(row, devices=devices) for row in rows]
            return [list(result.values) for result in ops.batch_reduce(op, [(value, value) for value in found])]

        given = [[jax.device_put(x, jax.devices()[0]) for x in row] for row in rows]
        hosts = [f"cpu:0#{k}" if k else "cpu:0" for k in range(count)]
        right = reduced(given, hosts)
        assert gpu.ran() == 0
        where = hosts if is_traced else names(count)
        run = partial(reduced, devices=where)
        results = jax.block_until_ready((jax.jit(run) if is_traced else run)(given))
        assert gpu.ran() == 1, (dtype, op, count, algorithm)
        for a, b in zip(results, right, strict=True):
            assert same(a, b), (dtype, op, count, shapes, algorithm)
            assert all(x.devices() == {jax.devices()[0]} for x in a)
            assert is_traced or all(x.committed for x in a)
    return len(cases)


def check_eager(gpu):
    """Eager calls are right, and their results independent, also on another device. The loop engine does the rest."""
    with jax.enable_x64(True):
        count = check_bits(gpu, is_traced=False)
    xs = [jax.device_put(np.full(1000, 2.0**k, "float32"), jax.devices()[2]) for k in range(3)]
    gpu.use(2)
    first, second, third = cr.all_reduce(xs, devices=names(3, 2))
    assert (gpu.ran(), first.devices()) == (1, {jax.devices()[2]})
    first.delete()
    jax.jit(lambda x: -x, donate_argnums=0)(second)
    assert third.tolist() == [7.0] * 1000
    launches = gpu.fake.count("cuLaunchKernel")
    assert same(cr.all_reduce(xs, devices=names(3, 2)), [third] * 3)
    assert (gpu.fake.count("cuLaunchKernel"), gpu.ran()) == (launches + 1, 1)
    nans = [x * np.float32(sign) for x, sign in zip(xs, (np.inf, -np.inf, 1), strict=True)]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        cr.all_reduce(nans, devices=names(3, 2))
    gpu.ran()
    weak = cr.all_reduce([jnp.asarray(2.0), jnp.asarray(3.0)], devices=names(2))
    assert [(float(x), x.weak_type) for x in weak] == [(5.0, True)] * 2
    assert gpu.ran() == 0
    return count


def check_traced(gpu):
    """Programs of jit run one custom call per reduction, with the same bits. Those for several devices run none."""
    with jax.enable_x64(True):
        count = check_bits(gpu, is_traced=True)
    xs = [jnp.arange(6.0) + k for k in range(3)]

    def program(*xs):
        found = cr.all_reduce([2 * x for x in xs], "mean")
        return sum(found) + cr.all_reduce([x[:2] for x in xs])[0].sum()

    text = jax.jit(program).lower(*xs).as_text()
    assert text.count(f"@{cuda_jax.TARGET}") == 2
    right = 3 * np.mean([2 * np.asarray(x) for x in xs], 0) + sum(np.asarray(x)[:2].sum() for x in xs)
    assert np.allclose(jax.jit(program)(*xs), right)
    assert gpu.ran() >= 2

    exported = jax.export.export(jax.jit(program))(*xs)
    assert cuda_jax.TARGET not in exported.mlir_module()
    mesh = jax.make_mesh((3,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(np.arange(6.0, dtype="float32"), jax.NamedSharding(mesh, jax.P("d")))
    over = jax.jit(lambda x: cr.all_reduce([x, x])[0])
    assert cuda_jax.TARGET not in over.lower(sharded).as_text()
    assert over(sharded).tolist() == [0, 2, 4, 6, 8, 10]
    inside = jax.shard_map(lambda x: cr.all_reduce([x, x])[0], mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    assert cuda_jax.TARGET not in jax.jit(inside).lower(sharded).as_text()
    assert gpu.ran() == 0
    return count


def check_gradients(gpu):
    """Derivatives and vmap give the results of the loop engine, and the forward pass is the custom call."""
    draw = np.random.default_rng(3)
    xs = [jnp.asarray(draw.standard_normal((4, 3)), "float32") for _ in range(3)]
    weights = jnp.asarray(draw.standard_normal((3, 4, 3)), "float32")

    def loss(*xs, op, devices=None):
        found = cr.all_reduce([x**2 for x in xs], op, devices=devices)
        return sum((w * x).sum() for w, x in zip(weights, found, strict=True))

    every = (0, 1, 2)
    cases = [
        ("sum", jax.jit(jax.grad(partial(loss, op="sum"), every))),
        ("mean", jax.grad(partial(loss, op="mean", devices=names(3)), every)),
        ("product", jax.jit(lambda *xs: jax.jvp(partial(loss, op="product"), xs, tuple(x + 1 for x in xs)))),
        ("max", jax.jit(jax.vmap(lambda *ys: cr.all_reduce(list(ys), "max")))),
    ]
    for op, function in cases:
        with mock.patch.object(cuda_jax, "supports", return_value=False):
            right = jax.tree.leaves(function(*xs))
        assert gpu.ran() == 0
        jax.clear_caches()
        found = jax.tree.leaves(function(*xs))
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
        assert gpu.ran() or op != "product", op  # gradients of sums do not need their value
    return len(cases)


def fails(function, pattern):
    """Return whether a call raises an error whose text has a pattern."""
    try:
        jax.block_until_ready(function())
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return bool(re.search(pattern, str(error)))
    return False


def check_errors(gpu):
    """Each call of the driver that fails raises an error with its name, device and code, and later calls are right.

    JAX raises the error as a ``JaxRuntimeError``, or in its fast path (jaxlib 0.10.2, on the CPU) as a ``ValueError``.
    """
    xs = [jnp.arange(8.0) + k for k in range(2)]
    gpu.use(1)
    here = [jax.device_put(x, jax.devices()[1]) for x in xs]
    eager = lambda: cr.all_reduce(here, devices=names(2, 1))  # noqa: E731
    program = jax.jit(lambda *xs: cr.all_reduce(list(xs)))
    count, calls = 0, {"cuLaunchKernel": " on cuda:1", "cuCtxGetCurrent": "", "cuCtxSetCurrent": " on cuda:1"}
    for function in (eager, lambda: program(*here)):
        jax.block_until_ready(function())
        for name, where in calls.items():
            pattern = rf"{name}{where}\.\n  given: CUDA_ERROR_LAUNCH_FAILED \(719\)"
            gpu.fake.fail(name, 1, 719)
            count += fails(function, pattern)
            gpu.fake.clear()
            gpu.ran()
            assert function()[1].tolist() == (2 * np.arange(8.0) + 1).tolist()
    # A program of another process is an error, since its plan is not known here.
    call = jax.ffi.ffi_call(cuda_jax.TARGET, jax.ShapeDtypeStruct((8,), "float32"))
    for number, pattern in ((np.int64(5), "no plan 5 for cuda:1"), (np.int32(6), "has no number")):
        count += fails(partial(call, here[0], number=number), pattern)
    # If kernels cannot be loaded, the loop engine runs.
    jax.clear_caches()
    with mock.patch.object(cuda_jax, "load_kernels", side_effect=BackendError("no code")):
        assert cr.all_reduce(here, "max", devices=names(2, 1))[0].tolist() == (np.arange(8.0) + 1).tolist()
    gpu.ran()
    return count


def check_serialized(gpu, folder):
    """Executables that another process has serialized run the right plans, in whatever order these were made here.

    If the folder is empty, the executables are only serialized into it.
    """
    xs = [jnp.arange(64.0) ** k for k in range(5)]
    ops = ["sum", "mean", "max"]
    programs = {op: jax.jit(lambda *xs, op=op: cr.all_reduce(list(xs), op)) for op in ops}
    if not list(Path(folder).iterdir()):
        for op, program in programs.items():
            made = serialize_executable.serialize(program.lower(*xs).compile())
            Path(folder, op).write_bytes(pickle.dumps(made))
        return len(programs)
    loaded = {
        op: serialize_executable.deserialize_and_load(
            *pickle.loads(Path(folder, op).read_bytes()), execution_devices=jax.devices()[:1]
        )
        for op in ops
    }
    count = sum(fails(partial(program, *xs), "this process has no plan") for program in loaded.values())
    right = {op: programs[op](*xs) for op in reversed(ops)}
    gpu.ran()
    for op, program in loaded.items():
        assert same(program(*xs), right[op]), op
        assert gpu.ran() == 1
    return count


CHECKS = {
    "serialized": check_serialized,
    "eager": check_eager,
    "traced": check_traced,
    "gradients": check_gradients,
    "errors": check_errors,
}


def main(library, *checks):
    """Run some checks, and print the number that each returns."""
    with gpus(library) as gpu:
        for what, *more in (each.split("=") for each in checks):
            gpu.use(0)
            print(what, CHECKS[what](gpu, *more))


if __name__ == "__main__":
    main(*sys.argv[1:])
