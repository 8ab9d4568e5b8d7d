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
from cuda_jax_xla import CASES, HOST, LOCATE, SHAPES, number, start
from jax_programs import draw
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


def reduced(devices, rows, op, ops, ends=None):
    """Reduce the arrays of rows. ``ends``: the positions of the devices with results, if not all."""
    pairs = []
    for row in rows:
        value = cr.PerReplica(row, devices=devices)
        pairs.append((value, value if ends is None else value_on([devices[k] for k in ends])))
    return [list(each.values) for each in ops.batch_reduce(op, pairs)]


def on_host(rows, op, ops, ends=None):
    """Return the result of each tensor, as the host engine computes it."""
    hosts = ["cpu:0", *(f"cpu:0#{k}" for k in range(1, len(rows[0])))]
    here = [[jax.device_put(x, jax.devices()[HOST]) for x in row] for row in rows]
    return [np.asarray(row[0]) for row in reduced(hosts, here, op, ops, ends)]


def on_gpus(xla, devices, rows, op, ops, ends=None):
    """Return the results of each tensor, and their contents, which are read later."""
    given = [[xla.put(x, parse(name).index) for x, name in zip(row, devices, strict=True)] for row in rows]
    with no_loop():
        results = reduced(devices, given, op, ops, ends)
    return results, [xla.content(row) for row in results]


def is_right(read, right):
    return all(bytes(each) == x.tobytes() for row, x in zip(read, right, strict=True) for each in row)


def check_bits(xla):
    """All dtypes, ops, algorithms, devices and destinations give the bits of the host engine. All work is ordered."""
    for device in range(8):
        assert memory.MEMORY.stream(device) == memory.MEMORY.stream(device)
    rng = np.random.default_rng(3)
    cases = [
        (*case, SHAPES if k < 5 else [(257,)], where, None) for k, (case, where) in enumerate(each(CASES, DEVICES))
    ]
    ends = {"seven": [2], "eight": [7, 0, 3], "four": [1, 2], "mixed": [2, 0]}
    cases += [("float32", "sum", "direct", SHAPES[:3], *chosen) for chosen in ends.items()]
    for case in cases:
        dtype, op, algorithm, shapes, where, ends = case
        devices, ops = DEVICES[where], cr.AllReduceCrossDeviceOps(algorithm)
        rows = [[draw(rng, dtype, shape) for _ in devices] for shape in shapes]
        right = on_host(rows, op, ops, ends)
        results, read = on_gpus(xla, devices, rows, op, ops, ends)
        xla.fake.run()
        assert is_right(read, right), case
        pointers = [x.unsafe_buffer_pointer() for row in results for x in row if x.size]
        assert len({*pointers}) == len(pointers), "results share memory"
        there = devices if ends is None else [devices[k] for k in ends]
        for row, x in zip(results, right, strict=True):
            for got, name in zip(row, there, strict=True):
                assert (got.sharding, got.committed, got.weak_type) == (framework.place(name)[1], True, False)
                assert (got.shape, got.dtype) == (x.shape, x.dtype)
        del results, got, row
        assert not (report := xla.end()), (case, report[:3])
    return len(cases)


def check_failures(xla):
    """A call of the driver that fails raises a ``DriverError``. Nothing is unordered, and later calls are right."""
    ops, devices, failed = cr.AllReduceCrossDeviceOps("ring"), DEVICES["mixed"], 0
    rows = [[draw(np.random.default_rng(6), "float32", (300,)) for _ in devices]]
    right = on_host(rows, "mean", ops)
    for name in ("cuLaunchKernel", "cuMemcpyPeerAsync", "cuStreamIsCapturing"):
        before = xla.fake.count(name)
        read = on_gpus(xla, devices, rows, "mean", ops)[1]
        xla.fake.run()
        assert is_right(read, right)
        calls = xla.fake.count(name) - before
        assert not (report := xla.end()), report[:3]
        for n in {1, calls} & set(range(1, calls + 1)):
            xla.fake.fail(name, n, 719)
            with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                on_gpus(xla, devices, rows, "mean", ops)
            assert (caught.value.call, caught.value.code) == (name, 719)
            failed += 1
            del caught
            gc.collect()  # frees all memory of the call
            assert not (report := xla.end()), (name, n, report[:3])
    return failed


def check_calls(xla):
    """Broadcasts, topologies, and arrays on the host or on other devices run in the engine, too."""
    count, four = 0, DEVICES["four"]

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
        x = draw(np.random.default_rng(8), "float32", (1000,))
        with mock.patch.object(values_module, "locate", at), mock.patch.object(pipeline, "locate", at):
            for to in four, ("cuda:2", "cuda:5"), ("cuda:6",):
                expect(list(cr.CrossDeviceOps().broadcast(xla.put(x, 2), value_on(to)).values), [x] * len(to))
        rows = [np.split(x[:800], 8)]
        ops = cr.AllReduceCrossDeviceOps("forest", topology=cr.Topology.machine("dgx-1v"))
        expect(on_gpus(xla, DEVICES["eight"], rows, "max", ops)[0][0], [np.max(rows[0], 0)] * 8)
        rows = [[np.full(300, 2.0**k, "float32"), np.full((2, 2), 3.0**k, "float32")] for k in range(4)]
        given = [
            [jax.device_put(x, jax.devices()[k]) for x in row] for k, row in zip((HOST, 1, 3, HOST), rows, strict=True)
        ]
        results = cr.all_reduce(given, "mean", devices=("cpu:0", "cuda:1", "cuda:3", "cpu:1"))
        assert [x.device.id for x, _ in results] == [HOST, 1, 3, HOST]
        expect([x for row in results for x in row], [np.mean(column, 0) for column in zip(*rows, strict=True)] * 4)
        expect(cr.all_reduce([jnp.ones(9, "float32")] * 4, devices=four), [np.full(9, 4, "float32")] * 4)
        # The memory of results that are not read is free at once. A donated result does not change the others.
        for unread in cr.all_reduce(elsewhere(), devices=four):
            xla.free(unread.unsafe_buffer_pointer(), unread.nbytes, number(unread.device))
        assert not (report := xla.end()), report[:3]
        results = cr.all_reduce(elsewhere(), devices=DEVICES["mixed"] + ("cuda:1#1",))
        xla.fake.run()
        jax.jit(lambda x: -x, donate_argnums=0)(results[1])
        expect([results[k] for k in (0, 2, 3)], [np.full(9, 15, "float32")] * 3)
        for size, allocator, copies in (5, "default", False), (6, "cuda_async", True):
            with mock.patch.dict(os.environ, XLA_PYTHON_CLIENT_ALLOCATOR=allocator):
                ops = cr.AllReduceCrossDeviceOps("direct")
                results = cr.all_reduce(elsewhere(size), devices=four, cross_device_ops=ops)
            assert (xla.fake.count("cuMemcpyPeerAsync") > 0) == copies
            expect(results, [np.full(size, 15, "float32")] * 4)
    return count


def check_left(xla):
    """What this engine cannot reduce, the loop engine reduces as usual. Deleted arrays are errors."""
    arrays, count = [[jax.device_put(np.full((3, 2), 2.0**k, "float32"), jax.devices()[k])] for k in range(4)], 0

    def over(given=arrays, op="sum"):
        return cr.all_reduce(given, op, devices=DEVICES["four"])

    def is_left(function, right, is_weak=False):
        nonlocal count
        results = [x for row in function() for x in row]
        assert all((np.asarray(x) == right).all() and x.weak_type == is_weak for x in results), results
        assert xla.fake.count("cuLaunchKernel") == 0
        assert not xla.end()
        count += 1

    is_left(lambda: over([[jax.device_put(jnp.asarray(1.5), x.device)] for (x,) in arrays]), 6, is_weak=True)
    for mode in jax.debug_nans, jax.disable_jit:
        with mode(True):
            is_left(over, 15)
    wide = [[x.astype("float64") for x in row] for row in arrays]
    with jax.enable_x64(False):
        is_left(lambda: over(wide), 15)
    order = jax.experimental.layout.Layout(arrays[0][0].format.layout.major_to_minor[::-1])
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
