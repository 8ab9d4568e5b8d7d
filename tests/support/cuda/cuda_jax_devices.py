"""Checks of JAX arrays on several CUDA devices, without a GPU, for test_cuda_jax.py: see cuda_jax_xla.py.

Run as a program, in a process of its own since the engine keeps its contexts:
python cuda_jax_devices.py LIBRARY PEERS CHECK ...
"""

from __future__ import annotations

import gc
import os
import sys
from unittest import mock

os.environ["JAX_NUM_CPU_DEVICES"] = "9"

import jax
import jax.experimental.layout
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_jax_xla import CASES, HOST, LOCATE, SHAPES, number, start, values
from fake_cuda import PLAIN, POOL
from pairs import each

import crossreduce as cr
from crossreduce import values as values_module
from crossreduce.devices import parse
from crossreduce.engines import loop
from crossreduce.engines.cuda.jax import memory
from crossreduce.errors import DriverError
from crossreduce.frameworks.jax import arrays as framework
from crossreduce.reduction import pipeline

DEVICES = {
    "four": ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    "mixed": ("cuda:0", "cuda:0#1", "cuda:1"),
    "eight": tuple(f"cuda:{k}" for k in range(8)),
    "seven": ("cuda:5", "cuda:2", "cuda:5#1", "cuda:6", "cuda:2#1", "cuda:5#2", "cuda:3"),
    "pair": ("cuda:4", "cuda:1"),
}


def no_loop():
    return mock.patch.object(loop, "_reduce_buffer", side_effect=AssertionError("the loop engine ran"))


def value_on(devices):
    """Return a value that names destinations."""
    return cr.PerReplica([jnp.zeros(())] * len(devices), devices=devices)


def on_host(rows, op, ops, destinations=None):
    """Return the result of each tensor, as the host engine computes it."""
    count = len(rows[0])
    hosts = [f"cpu:0#{k}" if k else "cpu:0" for k in range(count)]
    pairs = []
    for row in rows:
        value = cr.PerReplica([jax.device_put(x, jax.devices()[HOST]) for x in row], devices=hosts)
        pairs.append((value, value if destinations is None else value_on([hosts[k] for k in destinations])))
    return [np.asarray(each.values[0]) for each in ops.batch_reduce(op, pairs)]


def reduced(xla, devices, rows, op, ops, destinations=None):
    """Reduce values on devices. Return the results of each tensor, and their contents, which are read later."""
    places = [parse(name).index for name in devices]
    given = [[xla.put(x, place) for x, place in zip(row, places, strict=True)] for row in rows]
    pairs = []
    for row in given:
        value = cr.PerReplica(row, devices=devices)
        pairs.append((value, value if destinations is None else value_on([devices[k] for k in destinations])))
    with no_loop():
        results = [list(each.values) for each in ops.batch_reduce(op, pairs)]
    return results, [xla.content(row) for row in results]


def is_right(read, right):
    return all(bytes(each) == x.tobytes() for row, x in zip(read, right, strict=True) for each in row)


def check_bits(xla):
    """All dtypes, ops, algorithms, devices and destinations give the bits of the host engine. All work is ordered."""
    for device in range(8):
        assert memory.MEMORY.stream(device) == memory.MEMORY.stream(device)
    draw, count = np.random.default_rng(3), 0
    ends = {"seven": [2], "eight": [7, 0, 3], "four": [1, 2], "mixed": [2, 0]}
    cases = [
        (*case, SHAPES if k < 5 else [(257,)], where, None) for k, (case, where) in enumerate(each(CASES, DEVICES))
    ]
    cases += [("float32", "sum", "direct", SHAPES[:3], *chosen) for chosen in ends.items()]
    for dtype, op, algorithm, shapes, where, ends in cases:
        devices, ops = DEVICES[where], cr.AllReduceCrossDeviceOps(algorithm)
        rows = [[values(draw, dtype, shape) for _ in devices] for shape in shapes]
        right = on_host(rows, op, ops, ends)
        results, read = reduced(xla, devices, rows, op, ops, ends)
        xla.fake.run()
        assert is_right(read, right), (dtype, op, algorithm, where, ends)
        pointers = [x.unsafe_buffer_pointer() for row in results for x in row if x.size]
        assert len({*pointers}) == len(pointers), "results share memory"
        there = devices if ends is None else [devices[k] for k in ends]
        for row, x in zip(results, right, strict=True):
            for got, name in zip(row, there, strict=True):
                assert got.sharding == framework.place(name)[1]
                assert got.committed
                assert not got.weak_type
                assert (got.shape, got.dtype) == (x.shape, x.dtype)
        del results, got, row
        report = xla.end()
        assert not report, (dtype, op, algorithm, where, ends, report[:3])
        count += 1
    return count


def check_failures(xla):
    """A call of the driver that fails raises a ``DriverError``. Nothing is unordered, and later calls are right."""
    ops, devices, failed = cr.AllReduceCrossDeviceOps("ring"), DEVICES["mixed"], 0
    rows = [[values(np.random.default_rng(6), "float32", (300,)) for _ in devices]]
    right = on_host(rows, "mean", ops)
    for name in ("cuLaunchKernel", "cuMemcpyPeerAsync", "cuStreamGetCaptureInfo_v2"):
        before = xla.fake.count(name)
        read = reduced(xla, devices, rows, "mean", ops)[1]
        xla.fake.run()
        assert is_right(read, right)
        calls = xla.fake.count(name) - before
        assert not (report := xla.end()), report[:3]
        for n in {1, calls} & set(range(1, calls + 1)):
            xla.fake.fail(name, n, 719)
            with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                reduced(xla, devices, rows, "mean", ops)
            assert (caught.value.call, caught.value.code) == (name, 719)
            failed += 1
            del caught
            gc.collect()  # frees all memory of the call
            assert not (report := xla.end()), (name, n, report[:3])
    return failed


def real(xla, rows, devices):
    """Return arrays that are ready, on JAX's devices."""
    places = [jax.devices()[HOST if parse(name).kind == "cpu" else parse(name).index] for name in devices]
    return [[jax.device_put(x, place) for x in row] for row, place in zip(rows, places, strict=True)]


def check_calls(xla):
    """Broadcasts, topologies, and arrays on the host or on other devices run in the engine, too."""
    draw, count, four = np.random.default_rng(8), 0, DEVICES["four"]
    x = values(draw, "float32", (1000,))

    def expect(results, right):
        nonlocal count
        read = xla.content(results)
        xla.fake.run()
        assert [bytes(each) for each in read] == [np.asarray(y).tobytes() for y in right]
        assert xla.fake.count("cuLaunchKernel") > 0
        results.clear()
        assert not (report := xla.end()), report[:3]
        count += 1

    def at(array):  # counts the CPU devices that stand in for GPUs as CUDA devices
        found = LOCATE(array)
        return found.replace("cpu", "cuda") if isinstance(array, jax.Array) and found != f"cpu:{HOST}" else found

    def elsewhere(size=9):
        return [jax.device_put(np.full(size, 2.0**k, "float32"), jax.devices()[(3 * k) % 5]) for k in range(4)]

    with no_loop():
        with mock.patch.object(values_module, "locate", at), mock.patch.object(pipeline, "locate", at):
            for to in four, ("cuda:2", "cuda:5"), ("cuda:6",):
                expect(list(cr.CrossDeviceOps().broadcast(xla.put(x, 2), value_on(to)).values), [x] * len(to))
        rows = [[values(draw, "float32", (500,)) for _ in range(8)]]
        ops = cr.AllReduceCrossDeviceOps("forest", topology=cr.Topology.machine("dgx-1v"))
        results, _ = reduced(xla, DEVICES["eight"], rows, "max", ops)
        expect(results[0], [np.max(rows[0], 0)] * 8)
        devices = ("cpu:0", "cuda:1", "cuda:3", "cpu:1")
        rows = [[np.full(300, 2.0**k, "float32"), np.full((2, 2), 3.0**k, "float32")] for k in range(4)]
        results = cr.all_reduce(real(xla, rows, devices), "mean", devices=devices)
        assert [x.device.id for x, _ in results] == [HOST, 1, 3, HOST]
        expect([x for row in results for x in row], [np.mean(column, 0) for column in zip(*rows, strict=True)] * 4)
        expect(cr.all_reduce([jnp.ones(9, "float32")] * 4, devices=four), [np.full(9, 4, "float32")] * 4)
        # The memory of results that are not read is free at once. A donated result does not change the others.
        results = cr.all_reduce(elsewhere(), devices=four)
        for each_result in results:
            xla.free(each_result.unsafe_buffer_pointer(), each_result.nbytes, number(each_result.device))
        assert not (report := xla.end()), report[:3]
        results = cr.all_reduce(elsewhere(), devices=DEVICES["mixed"] + ("cuda:1#1",))
        xla.fake.run()
        jax.jit(lambda x: -x, donate_argnums=0)(results[1])
        expect([results[k] for k in (0, 2, 3)], [np.full(9, 15, "float32")] * 3)
        for size, kind, copies in (5, PLAIN, False), (6, POOL, True):
            with mock.patch.object(xla, "kind", kind):
                ops = cr.AllReduceCrossDeviceOps("direct")
                results = cr.all_reduce(elsewhere(size), devices=four, cross_device_ops=ops)
            assert (xla.fake.count("cuMemcpyPeerAsync") > 0) == copies
            expect(results, [np.full(size, 15, "float32")] * 4)
    return count


def check_left(xla):
    """What this engine cannot reduce, the loop engine reduces as usual. Deleted arrays are errors."""
    four, count = DEVICES["four"], 0
    rows = [[np.full((3, 2), 2.0**k, "float32")] for k in range(4)]
    arrays = real(xla, rows, four)

    def is_left(function, right, is_weak=False):
        nonlocal count
        results = [x for row in function() for x in row]
        assert all((np.asarray(x) == right).all() for x in results), results
        assert all(x.weak_type == is_weak for x in results)
        assert xla.fake.count("cuLaunchKernel") == 0
        assert not xla.end()
        count += 1

    def over(given=arrays, op="sum"):
        return cr.all_reduce(given, op, devices=four)

    scalars = [[jax.device_put(jnp.asarray(1.5), jax.devices()[k])] for k in range(4)]
    is_left(lambda: over(scalars), 6, is_weak=True)
    for mode in jax.debug_nans, jax.disable_jit:
        with mode(True):
            is_left(over, 15)
    wide = [[x.astype("float64") for x in row] for row in arrays]
    with jax.enable_x64(False):
        is_left(lambda: over(wide), 15)
    order = jax.experimental.layout.Layout((0, 1) if arrays[0][0].format.layout.major_to_minor == (1, 0) else (1, 0))
    fortran = [jax.device_put(x, jax.experimental.layout.Format(order, x.sharding)) for x in arrays[2]]
    is_left(lambda: over([*arrays[:2], fortran, arrays[3]]), 15)
    gradients = jax.grad(lambda x: over([[x], *arrays[1:]], "mean")[0][0].sum())(arrays[0][0])
    is_left(lambda: [[gradients]], 0.25)
    refused = mock.patch.object(memory, "_external_stream", side_effect=jax.errors.JaxRuntimeError("UNIMPLEMENTED"))
    with mock.patch.dict(memory._STREAMS, clear=True), refused:
        is_left(lambda: over([[x[:1]] for row in arrays for x in row]), 15)
    over()
    assert xla.fake.count("cuLaunchKernel") > 0
    arrays[2][0].delete()
    with pytest.raises(RuntimeError, match="delete"):
        over()
    return count


CHECKS = {"bits": check_bits, "calls": check_calls, "failures": check_failures, "left": check_left}


def main(library, peers, *checks):
    """Run some checks, and print the number that each returns."""
    xla = start(library, peers)
    gc.freeze()  # what exists now is not garbage; to look at all of JAX in each collection takes long
    with jax.enable_x64(True):
        for what in checks:
            print(what, CHECKS[what](xla))


if __name__ == "__main__":
    main(*sys.argv[1:])
