"""JAX arrays on several CUDA devices, without a GPU: JAX's CPU devices stand in for GPUs, with the fake driver.

``Xla`` does on the fake driver what XLA does on a GPU: programs run on a compute stream per device, arrays that pass
through DLPack wait for events, and freed memory belongs to the next program of the compute stream, which writes into
it. So each missing dependency is reported.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import contextmanager
from unittest import mock

import jax
import jax.experimental.layout
import numpy as np
import strategies
from fake_cuda import PLAIN, FakeDriver
from pairs import each

from crossreduce import values as values_module
from crossreduce.devices import parse
from crossreduce.engines.cuda import driver
from crossreduce.engines.cuda import jax as cuda_jax
from crossreduce.engines.cuda.jax import memory
from crossreduce.frameworks.jax import arrays as framework

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


def values(draw, dtype, shape):
    """Return drawn values. Those of floats are such that their sums depend on the order."""
    kind = jax.numpy.dtype(dtype)
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return np.asarray(draw.integers(0, 100, shape)).astype(kind)
    found = np.asarray(draw.standard_normal(shape) * 8.0 ** draw.integers(-3, 4, shape))
    return (found + 1j * draw.standard_normal(shape)).astype(kind) if kind.kind == "c" else found.astype(kind)


def number(device):
    """Return the driver's number of a JAX device. It differs from JAX's own number, as it may on a real machine."""
    return 7 - device.id


class Capsule:
    """A capsule of XLA. When the capsule of an input is released, the memory is freed, as if the input were deleted."""

    def __init__(self, xla, x):
        self.xla, self.real, self.address, self.nbytes = xla, x.__dlpack__(), x.unsafe_buffer_pointer(), x.nbytes
        self.device, self.jax_device, self.is_used = number(x.device), x.device.id, False

    def __del__(self):
        if not self.is_used and self.address not in self.xla.made:
            self.xla.kept.append(self.real)
            self.xla.free(self.address, self.nbytes, self.device)


class Block(memory._Block):
    """Memory for a result, or temporary memory. It is freed with its owner, unless an array was made of it."""

    xla = None

    def __del__(self):
        if self.capsule is None and self.address and not self.array.is_deleted():
            self.xla.kept.append(self.array)
            self.xla.free(self.address, self.array.nbytes, self.device)


class Exported:
    """The array on a CPU device that JAX's ``from_dlpack`` gets instead of an array of the engine."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return 1, self.capsule.jax_device

    def __dlpack__(self, stream):
        assert stream is None
        return self.capsule.real


class Xla:
    """XLA's streams, events and allocator, on the fake driver."""

    kind = PLAIN  # of the memory of arrays

    def __init__(self, library, peers, seed=0):
        self.fake = FakeDriver(library, 8, peers, seed)
        self.compute = [self.fake.stream(k) for k in range(8)]
        self.ready = [[self.fake.stream(k) for _ in range(4)] for k in range(8)]
        self.turns, self.contexts = [0] * 8, []
        for k in range(8):
            context = ctypes.c_void_p()
            assert self.fake.lib.cuInit(0) == 0
            assert self.fake.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), k) == 0
            self.contexts.append(context)
        self.owned, self.kept, self.imports, self.probes = {}, [], {}, set()
        self.made = set()  # the addresses of results and temporary memory
        handler = driver.native().xla_empty_handler()
        jax.ffi.register_ffi_target(memory.EMPTY, handler, platform="cpu")

    def called(self, name, *arguments):
        """Call the driver."""
        assert getattr(self.fake.lib, name)(*arguments) == 0, self.fake.report()

    @contextmanager
    def on(self, device):
        """Make the context of a device current."""
        before = ctypes.c_void_p()
        self.called("cuCtxGetCurrent", ctypes.byref(before))
        self.called("cuCtxSetCurrent", self.contexts[device])
        yield
        self.called("cuCtxSetCurrent", before)

    def event(self, device, stream):
        """Return an event that is recorded in a stream."""
        event = ctypes.c_void_p()
        with self.on(device):
            self.called("cuEventCreate", ctypes.byref(event), 2)
            self.called("cuEventRecord", event, stream)
        return event

    def wait(self, device, stream, event):
        """Let a stream wait for an event."""
        with self.on(device):
            self.called("cuStreamWaitEvent", stream, event, 0)

    def own(self, x):
        """Let the memory of an array belong to the array's device. Return its address."""
        address = x.unsafe_buffer_pointer()
        if x.nbytes and address not in self.owned:
            self.owned[address] = x
            jax.block_until_ready(x)
            assert self.fake.lib.fake_own(address, x.nbytes, number(x.device)) == 0
            assert self.fake.lib.fake_kind(address, self.kind) == 0
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
        assert stream in self.ready[number(x.device)]
        self.own(x)
        self.wait(number(x.device), stream, self.event(number(x.device), self.compute[number(x.device)]))
        return Capsule(self, x)

    def next_ready(self, device):
        at = number(device)
        self.turns[at] += 1
        return self.ready[at][self.turns[at] % 4]

    def from_dlpack(self, exported):
        if not isinstance(exported, memory._Exported):
            return REAL["from_dlpack"](exported)
        kind, device = exported.__dlpack_device__()
        assert kind == 2
        stream = self.next_ready(jax.devices()[7 - device])
        capsule = exported.__dlpack__(stream=stream)
        capsule.is_used = True
        made = REAL["from_dlpack"](Exported(capsule))
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
        self.wait(device, self.compute[device], self.imports[id(small)][1])
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
                stream = self.fake.stream(number(x.device))
                self.wait(number(x.device), stream, self.imports[id(x)][1])
                reads.append(self.fake.read(x.unsafe_buffer_pointer(), x.nbytes, stream, number(x.device)))
            else:
                reads.append(np.asarray(x).tobytes())
        return reads

    def end(self):
        """Wait for everything, and free all memory."""
        self.fake.run()
        gc.collect()
        self.fake.run()
        self.imports.clear()
        self.kept.clear()
        self.made.clear()
        for address in [at for at in self.owned if at not in self.probes]:
            self.fake.disown(address)
            del self.owned[address]
        report = self.fake.report()
        self.fake.clear()
        return report


LOCATE = values_module.locate
REAL = {name: getattr(memory, name) for name in ("_empty", "_small", "_PASS_ON", "_capsule")}
REAL |= {name: getattr(memory.JaxDeviceMemory, name) for name in ("operands", "scratch")}
REAL |= {"from_dlpack": jax.dlpack.from_dlpack, "to_device": framework.Jax.to_device, "place": framework.place}


def start(library, peers):
    """Let JAX's CPU devices be CUDA devices, and return their ``Xla``."""
    Block.xla = xla = Xla(library, peers)
    at = {"cpu": HOST}
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
        (framework, "place", lambda name: REAL["place"](f"cpu:{at.get(parse(name).kind, parse(name).index)}")),
        (cuda_jax, "_has_plugin", lambda: True),
    ):
        mock.patch.object(target, name, new).start()
    return xla
