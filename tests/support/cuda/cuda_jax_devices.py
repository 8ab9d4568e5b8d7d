"""Checks of JAX arrays on several CUDA devices: JAX's CPU devices stand in for GPUs, with the fake driver.

``Xla`` does on the fake driver what XLA does on a GPU: programs run on a compute stream per device, arrays that pass
through DLPack wait for events, and freed memory belongs to the next program of the compute stream, which writes into
it. So each missing dependency is reported. Run as a program, in a process of its own since the engine keeps its
contexts: python cuda_jax_devices.py PEERS CHECK ...
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from itertools import cycle
from unittest import mock

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "9")

import jax
import jax.experimental.layout
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from fake_cuda import PLAIN, POOL, FakeDriver, engine_only
from jax_programs import draw
from pairs import each

import crossreduce as cr
from crossreduce import values as values_module
from crossreduce.devices import parse
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda import jax as cuda_jax
from crossreduce.engines.cuda.jax import memory
from crossreduce.errors import DriverError
from crossreduce.frameworks.jax import arrays as framework
from crossreduce.reduction import pipeline

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8", "complex64", "bool")
ALGORITHMS = ("direct", "ring", "hierarchical_copy", "one_device", "halving_doubling", "auto")
SHAPES = [(257,), (3, 5), (), (0, 2), (1000,), (7, 1, 2)]
# Each dtype with one of its ops, each op, and each algorithm.
CASES = [
    (dtype, strategies.ops_for(dtype)[k % len(strategies.ops_for(dtype))], algorithm)
    for k, (dtype, algorithm) in enumerate(each(DTYPES, ALGORITHMS))
]
assert {op for _, op, _ in CASES} == {*strategies.OPS}
HOST = 8  # of 9 JAX devices, the one that stands in for the host


def number(device):
    """Return the driver's number of a JAX device. It differs from JAX's own number, as it may on a real machine."""
    return 7 - device.id


class Capsule:
    """A capsule of XLA. When the capsule of an input is released, the memory is freed, as if the input were deleted.

    JAX's ``from_dlpack`` gets it instead of an array of the engine, as an array on a CPU device.
    """

    def __init__(self, xla, x):
        self.xla, self.real, self.address, self.nbytes = xla, x.__dlpack__(), x.unsafe_buffer_pointer(), x.nbytes
        self.device, self.jax_device, self.is_used = number(x.device), x.device.id, False

    def __del__(self):
        if not self.is_used and self.address not in self.xla.made:
            self.xla.kept.append(self.real)
            self.xla.free(self.address, self.nbytes, self.device)

    def __dlpack_device__(self):
        return 1, self.jax_device

    def __dlpack__(self, stream):
        assert stream is None
        return self.real


class Block(memory._Block):
    """Memory for a result, or temporary memory. It is freed with its owner, unless an array was made of it."""

    xla = None

    def __del__(self):
        if self.capsule is None and self.address and not self.array.is_deleted():
            self.xla.kept.append(self.array)
            self.xla.free(self.address, self.array.nbytes, self.device)


class Xla:
    """XLA's streams, events and allocator, on the fake driver."""

    kind = PLAIN  # of the memory of arrays

    def __init__(self, peers):
        self.fake = FakeDriver(8, peers)
        self.compute = [self.fake.stream(k) for k in range(8)]
        self.ready = [cycle([self.fake.stream(k) for _ in range(4)]) for k in range(8)]
        self.owned, self.kept, self.imports, self.probes = {}, [], {}, set()
        self.made = set()  # the addresses of results and temporary memory
        self.follow = driver.native().follow  # a stream begins what is queued later when what is in another one is done
        assert not driver.unusable()
        jax.ffi.register_ffi_target(memory.EMPTY, driver.native().xla_empty_handler(), platform="cpu")

    def event(self, device, stream):
        """Return an event that is recorded in a stream: a stream that waits for what is in it now."""
        self.follow(device, made := self.fake.stream(device), stream)
        return made

    def own(self, x):
        """Let the memory of an array belong to the array's device. Return its address."""
        address = x.unsafe_buffer_pointer()
        if x.nbytes and address not in self.owned:
            self.owned[address] = x
            jax.block_until_ready(x)
            self.fake.own(address, x.nbytes, number(x.device), self.kind)
        return address

    def put(self, values, index):
        """Return an array on a JAX device, which a program of XLA fills on its compute stream."""
        x = jax.device_put(np.zeros_like(values), jax.devices()[index]).copy()
        address, device = self.own(x), number(x.device)
        if x.nbytes:
            self.fake.write(address, values.tobytes(), self.compute[device], device)
        return x

    def free(self, address, nbytes, device):
        """Free memory: its next owner writes into it at once."""
        if address not in self.probes:
            self.fake.write(address, bytes([77]) * nbytes, self.compute[device], device)

    # ---- replacements of JAX's functions

    def empty(self, number, shapes, dtype):
        def made():
            arrays = REAL["_empty"](number, shapes, dtype)()
            for x in arrays:
                assert x.devices() == {jax.devices()[7 - number]}
                if x.nbytes:
                    self.free(self.own(x), x.nbytes, number)  # the program before it still writes
                    self.made.add(x.unsafe_buffer_pointer())
            return arrays

        return made

    def capsule(self, x, stream):
        self.own(x)
        self.follow(number(x.device), stream, self.compute[number(x.device)])
        return Capsule(self, x)

    def next_ready(self, device):
        return next(self.ready[number(device)])

    def from_dlpack(self, exported):
        if not isinstance(exported, memory._Exported):
            return REAL["from_dlpack"](exported)
        kind, device = exported.__dlpack_device__()
        assert kind == 2
        stream = self.next_ready(jax.devices()[7 - device])
        capsule = exported.__dlpack__(stream=stream)
        capsule.is_used = True
        made = REAL["from_dlpack"](capsule)
        assert made.unsafe_buffer_pointer() == capsule.address, "a copy"
        self.imports[id(made)] = made, self.event(device, stream)
        return made

    def small(self, number):
        x = REAL["_small"](number)
        self.probes.add(x.unsafe_buffer_pointer())
        return x

    def pass_on(self, small, xs):
        """Run a program on the compute stream that reads a small array, and returns donated ones."""
        device, addresses = number(small.device), [x.unsafe_buffer_pointer() for x in xs]
        self.follow(device, self.compute[device], self.imports[id(small)][1])
        self.fake.read(small.unsafe_buffer_pointer(), small.nbytes, self.compute[device], device)
        read, arrays = REAL["_PASS_ON"](small, xs)
        assert [x.unsafe_buffer_pointer() for x in arrays] == addresses, "a copy"
        for x in arrays:
            self.imports[id(x)] = x, self.event(device, self.compute[device])
        return read, arrays

    def moved(self, x, name):
        if id(x) in self.imports and parse(name).kind == "cpu":
            self.fake.run()
        return REAL["to_device"](framework.FRAMEWORK, x, name)

    # ---- calls

    def content(self, results):
        """Return functions that return the content of results, each read in a stream of its own."""
        reads = []
        for x in results:
            if x.nbytes and x.device.id != HOST:
                stream = self.event(number(x.device), self.imports[id(x)][1])
                reads.append(self.fake.read(x.unsafe_buffer_pointer(), x.nbytes, stream, number(x.device)))
            else:
                reads.append(np.asarray(x).tobytes())
        return reads

    def end(self, *case):
        """Wait for everything, and free all memory. Assert that the driver reported nothing."""
        self.fake.run()
        gc.collect()
        self.fake.run()
        self.imports.clear()
        self.kept.clear()
        self.made.clear()
        for address in self.owned.keys() - self.probes:
            self.fake.disown(address)
            del self.owned[address]
        assert not (report := self.fake.report()), (case, report[:3])
        self.fake.clear()


LOCATE = values_module.locate
REAL = {name: getattr(memory, name) for name in ("_empty", "_small", "_PASS_ON")}
REAL |= {"from_dlpack": jax.dlpack.from_dlpack, "to_device": framework.Jax.to_device, "place": framework.place}


def start(peers):
    """Let JAX's CPU devices be CUDA devices, and return their ``Xla``."""
    Block.xla = xla = Xla(peers)
    place = lambda name: REAL["place"](f"cpu:{HOST if parse(name).kind == 'cpu' else parse(name).index}")  # noqa: E731
    for target, name, new in (
        (memory, "_empty", xla.empty),
        (memory, "_capsule", xla.capsule),
        (memory, "_small", xla.small),
        (memory, "_PASS_ON", xla.pass_on),
        (memory, "_Block", Block),
        (memory, "_external_stream", xla.next_ready),
        (memory, "_number", number),
        (memory, "_local_devices", lambda: jax.devices()[:8]),
        (jax.dlpack, "from_dlpack", xla.from_dlpack),
        (framework.Jax, "to_device", lambda _, x, name: xla.moved(x, name)),
        (framework, "place", place),
        (cuda_jax, "_has_plugin", lambda: True),
    ):
        mock.patch.object(target, name, new).start()
    return xla


# ---- the checks

DEVICES = {
    "four": ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    "mixed": ("cuda:0", "cuda:0#1", "cuda:1"),
    "eight": tuple(f"cuda:{k}" for k in range(8)),
    "seven": ("cuda:5", "cuda:2", "cuda:5#1", "cuda:6", "cuda:2#1", "cuda:5#2", "cuda:3"),
    "pair": ("cuda:4", "cuda:1"),
}


def value_on(devices):
    """Return a value that names destinations."""
    return cr.PerReplica([jnp.zeros(())] * len(devices), devices=devices)


def reduced(devices, rows, op, ops, ends=None):
    """Reduce the arrays of rows. ``ends``: the positions of the devices with results, if not all."""
    to = value_on(devices if ends is None else [devices[k] for k in ends])
    pairs = [(cr.PerReplica(row, devices=devices), to) for row in rows]
    return [list(each.values) for each in ops.batch_reduce(op, pairs)]


def run(xla, devices, rows, op, ops, ends=None):
    """Reduce on GPUs. Assert that the results have the bits of the host engine, and return both."""
    hosts = ["cpu:0", *(f"cpu:0#{k}" for k in range(1, len(devices)))]
    here = [[jax.device_put(x, jax.devices()[HOST]) for x in row] for row in rows]
    right = [np.asarray(row[0]) for row in reduced(hosts, here, op, ops, ends)]
    given = [[xla.put(x, parse(name).index) for x, name in zip(row, devices, strict=True)] for row in rows]
    with engine_only():
        results = reduced(devices, given, op, ops, ends)
    read = [xla.content(row) for row in results]
    xla.fake.run()
    assert all(bytes(each) == x.tobytes() for row, x in zip(read, right, strict=True) for each in row), (op, ops, ends)
    return results, right


def check_bits(xla):
    """All dtypes, ops, algorithms, devices and destinations give the bits of the host engine. All work is ordered."""
    for device in range(8):
        assert memory.MEMORY.stream(device) == memory.MEMORY.stream(device)
    rng = np.random.default_rng(3)
    cases = [
        (*case, SHAPES if k < 5 else [(257,)], where, None) for k, (case, where) in enumerate(each(CASES, DEVICES))
    ]
    some = {"seven": [2], "eight": [7, 0, 3], "four": [1, 2], "mixed": [2, 0]}
    cases += [("float32", "sum", "direct", SHAPES[:3], *chosen) for chosen in some.items()]
    for dtype, op, algorithm, shapes, where, ends in cases:
        devices, ops = DEVICES[where], cr.AllReduceCrossDeviceOps(algorithm)
        rows = [[draw(rng, dtype, shape) for _ in devices] for shape in shapes]
        results, right = run(xla, devices, rows, op, ops, ends)
        pointers = [x.unsafe_buffer_pointer() for row in results for x in row if x.size]
        assert len({*pointers}) == len(pointers), "results share memory"
        there = [framework.place(devices[k])[1] for k in (range(len(devices)) if ends is None else ends)]
        for row, x in zip(results, right, strict=True):
            assert [got.sharding for got in row] == there
            assert all((y.committed, y.weak_type, y.shape, y.dtype) == (True, False, x.shape, x.dtype) for y in row)
        del results, row
        xla.end(dtype, op, algorithm, where)


def check_failures(xla):
    """A call of the driver that fails raises a ``DriverError``. Nothing is unordered, and later calls are right."""
    devices, failed = DEVICES["mixed"], 0
    rows = [[draw(np.random.default_rng(6), "float32", (300,)) for _ in devices]]
    mean = partial(run, xla, devices, rows, "mean", cr.AllReduceCrossDeviceOps("ring"))
    for name in ("cuLaunchKernel", "cuMemcpyPeerAsync", "cuStreamGetCaptureInfo_v2"):
        mean()
        calls = xla.fake.count(name)
        xla.end()
        for n in {1, calls} if calls else ():
            xla.fake.fail(name, n, 719)
            with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                mean()
            assert (caught.value.call, caught.value.code) == (name, 719)
            failed += 1
            del caught
            gc.collect()  # frees all memory of the call
            xla.end(name, n)
    return failed


def check_calls(xla):
    """Broadcasts, topologies, and arrays on the host or on other devices run in the engine, too."""
    four = DEVICES["four"]

    def expect(results, right):
        read = xla.content(results)
        xla.fake.run()
        assert [bytes(each) for each in read] == [np.asarray(y).tobytes() for y in right]
        assert xla.fake.count("cuLaunchKernel") > 0
        results.clear()
        xla.end()

    def at(array):  # counts the CPU devices that stand in for GPUs as CUDA devices
        found = LOCATE(array)
        return found.replace("cpu", "cuda") if isinstance(array, jax.Array) and found != f"cpu:{HOST}" else found

    def elsewhere(size=9, places=(0, 3, 1, 4)):
        return [jax.device_put(np.full(size, 2.0**k, "float32"), jax.devices()[at]) for k, at in enumerate(places)]

    with engine_only():
        x = draw(np.random.default_rng(8), "float32", (1000,))
        with mock.patch.object(values_module, "locate", at), mock.patch.object(pipeline, "locate", at):
            for to in four, ("cuda:2", "cuda:5"), ("cuda:6",):
                expect(list(cr.CrossDeviceOps().broadcast(xla.put(x, 2), value_on(to)).values), [x] * len(to))
        given = [[x, x.reshape(3, 100)] for x in elsewhere(300, (HOST, 1, 3, HOST))]
        results = cr.all_reduce(given, "mean", devices=("cpu:0", "cuda:1", "cuda:3", "cpu:1"))
        assert [x.device.id for x, _ in results] == [HOST, 1, 3, HOST]
        right = np.full(300, 3.75, "float32")
        expect([x for row in results for x in row], [right, right.reshape(3, 100)] * 4)
        expect(cr.all_reduce([jnp.ones(9, "float32")] * 4, devices=four), [np.full(9, 4, "float32")] * 4)
        # The memory of results that are not read is free at once. A donated result does not change the others.
        for unread in cr.all_reduce(elsewhere(), devices=four):
            xla.free(unread.unsafe_buffer_pointer(), unread.nbytes, number(unread.device))
        xla.end()
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


def check_left(xla):
    """What this engine cannot reduce, the loop engine reduces as usual. Deleted arrays are errors."""
    arrays = [[jax.device_put(np.full((3, 2), 2.0**k, "float32"), jax.devices()[k])] for k in range(4)]

    def over(given=arrays, op="sum"):
        return cr.all_reduce(given, op, devices=DEVICES["four"])

    def is_left(function, right, is_weak=False):
        results = jax.tree.leaves(function())
        assert all((np.asarray(x) == right).all() and x.weak_type == is_weak for x in results), results
        assert xla.fake.count("cuLaunchKernel") == 0
        xla.end()

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
    is_left(lambda: gradients, 0.25)
    refused = mock.patch.object(memory, "_external_stream", side_effect=jax.errors.JaxRuntimeError("UNIMPLEMENTED"))
    with mock.patch.dict(memory._STREAMS, clear=True), refused:
        is_left(lambda: over([[x[:1]] for row in arrays for x in row]), 15)
    over()
    assert xla.fake.count("cuLaunchKernel") > 0
    arrays[2][0].delete()
    with pytest.raises(RuntimeError, match="delete"):
        over()


if __name__ == "__main__":
    machine = start(sys.argv[1])
    gc.freeze()  # what exists now is not garbage; to look at all of JAX in each collection takes long
    with jax.enable_x64(True):
        for what in sys.argv[2:]:
            print(what, globals()[f"check_{what}"](machine) or "done")
