"""A fake CUDA driver for tests without a GPU: builds the library of fake_cuda.cpp and controls it.

``built`` compiles a ``libcuda.so.1``. ``FakeDriver`` loads it, so that a later ``dlopen("libcuda.so.1")`` in this
process finds it, and starts with a number of devices. Work is queued and runs in random allowed orders. The report has
a line for every mistake of the callers, and for every access that conflicts with an earlier one without being ordered
after it. Of two earlier accesses, one ordered after the other, only the later one is compared.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from unittest import mock

from compiled import compiled
from paths import NATIVE, ROOT, SUPPORT, program, python_path

import crossreduce
from crossreduce.engines import loop

PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed
KERNELS = ROOT / "src/crossreduce/engines/cuda/native"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC")
HOST = -1  # the "device" of pinned memory
PLAIN, POOL, MAPPED, MANAGED, FOREIGN_CONTEXT = range(5)  # kinds of memory; peers can read the first and the fourth
NON_BLOCKING = 1  # a flag of streams: not ordered with the default stream
CUBE_MESH = ["1234", "0235", "0136", "0127", "0567", "1467", "2457", "3456"]  # of each device of a DGX-1, its peers

# Of the fake driver's own functions (fake_cuda.cpp): results that are not codes, which must be 0; last parameters.
RESULTS = {"count": ctypes.c_uint64, "memory": ctypes.c_uint64, "stream": ctypes.c_uint64, "resume": ctypes.c_int}
RESULTS["text"] = ctypes.c_char_p
DEFAULTS = {"memory": (0, 0, PLAIN), "own": (0, 0, 0, PLAIN), "stream": (0, NON_BLOCKING)}


def host_bodies():
    """Return the path of the kernels' bodies, compiled for the host: an object file."""
    command = ["g++", *FLAGS, f"-I{KERNELS}", "-c"]
    return compiled("cuda_host.o", command, [NATIVE / "cuda_host.cpp"], KERNELS.iterdir())


def host_library():
    """Return the path of the kernels' bodies: a library that calls its own functions even beside the fake driver's."""
    return compiled("cuda_host.so", ["g++", "-shared", "-Wl,-Bsymbolic"], [host_bodies()])


def built(stub=False, soname="libcuda.so.1"):
    """Return the path of the driver's library. It is compiled only if none of the same sources is kept.

    ``soname``: the library's name. A process that has loaded a library named libcuda.so.1 uses it as the CUDA driver.
    ``stub``: return a driver whose calls do nothing and succeed, to measure the cost of the engine on the host.
    """
    name = "stub_cuda.cpp" if stub else "fake_cuda.cpp"
    included = [*NATIVE.glob("fake_*.hpp"), *KERNELS.iterdir()]
    objects = [compiled(f"{name}.o", ["g++", *FLAGS, f"-I{KERNELS}", "-c"], [NATIVE / name], included)]
    objects += [] if stub else [host_bodies()]
    return compiled("libcuda.so.1", ["g++", "-shared", f"-Wl,-soname,{soname}", "-ldl", "-pthread"], objects)


def printed(name, *arguments, **environment):
    """Run a program of the tests in a process, which must succeed and report nothing, and return its output."""
    command = [sys.executable, "-W", "ignore", str(program(name)), *map(str, arguments)]
    given = os.environ | {"PYTHONPATH": python_path(PACKAGE.parent)} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, done.stderr[-3000:]
    return done.stdout


PEERS = {  # whether device a can access the memory of device b
    "full": lambda a, b: True,
    "pairs": lambda a, b: a // 2 == b // 2,
    "mesh": lambda a, b: str(b) in CUBE_MESH[a],  # a DGX-1
    "none": lambda a, b: False,
}


def passed(x):
    """Return an argument of a C function: numbers and handles have 64 bits, of which a function may read fewer."""
    return ctypes.c_int64(x) if hasattr(x, "__index__") else x.encode() if isinstance(x, str) else x


class Driver:
    """A CUDA driver, the fake or a real one. ``lib`` has its functions, which return codes."""

    def __init__(self, path="libcuda.so.1"):
        self.lib = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)

    def report(self):
        """Return the mistakes so far, which only the fake driver reports."""
        return []

    def call(self, name, *arguments, gives=0):
        """Call a function, which must return the code ``gives``."""
        code = getattr(self.lib, name)(*map(passed, arguments))
        assert code == gives, (name, code, self.report()[-1:])

    def give(self, name, *arguments, kind=ctypes.c_void_p):
        """Call a function whose first parameter is the address of its result, and return the result."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def on(self, device):
        """Make the context of a device current, and return it."""
        context = self.give("cuDevicePrimaryCtxRetain", device)
        self.call("cuCtxSetCurrent", context)
        return context

    def launch(self, function, buffer, blocks, stream=None, gives=0):
        """Launch a kernel of this library whose parameters are in a buffer."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.call("cuLaunchKernel", function, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, None, gives=gives)

    def end_capture(self, stream):
        """Return the graph that a stream has captured."""
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph


def engine_only():
    """Return a context in which a call fails if a framework's operations reduce its arrays, not the CUDA engine."""
    refused = AssertionError("the framework's operations reduced the arrays, not the CUDA engine")
    return mock.patch.object(loop, "_reduce_buffer", side_effect=refused)


def cupy_on(fake):
    """Return CuPy's stand-in, with the memory of a fake driver."""
    sys.path.insert(0, str(SUPPORT / "standins"))
    machine = importlib.import_module("cupy._machine")
    machine.allocate, machine.synchronize, machine.checks_order = fake.memory, fake.run, False
    machine.free = lambda address, nbytes, device: None  # the fake driver would report later owners of the memory
    return importlib.import_module("cupy")


class FakeDriver(Driver):
    """The fake driver in this process, restarted with some devices, so that all handles and addresses become invalid.

    What ``cuInit`` did stays. There is one driver for each ``soname``. Its functions for tests are methods.
    """

    def __init__(self, devices=8, peers="full", seed=0, soname="libcuda.so.1"):
        super().__init__(built(soname=soname))
        self._kept = []
        self.reset(devices, bytes(a != b and PEERS[peers](a, b) for a, b in product(range(devices), repeat=2)), seed)

    def __getattr__(self, name):
        function = getattr(self.lib, f"fake_{name}")
        function.restype = RESULTS.get(name, ctypes.c_int)

        def control(*given):
            result = function(*map(passed, given + DEFAULTS.get(name, ())[len(given) :]))
            assert name in RESULTS or result == 0, (name, given, self.report())
            return result.decode() if isinstance(result, bytes) else result

        return control

    def on(self, device):
        context = super().on(device)
        self.call("cuDevicePrimaryCtxRelease_v2", device)
        return context

    def follow(self, device, stream, other, after):
        """Let a stream of a device wait for what is in one of another device."""
        self.on(other)
        event = self.give("cuEventCreate", 2)
        self.call("cuEventRecord", event, after)
        self.on(device)
        self.call("cuStreamWaitEvent", stream, event, 0)

    def report(self):
        """Return the mistakes so far, as a list of lines."""
        return self.text(0).splitlines()

    def live(self):
        """Return how many objects of each kind the driver's callers made and did not release, by the kind's name."""
        return {what: int(count) for what, count in (line.split(": ") for line in self.text(1).splitlines())}

    def write(self, address, data, stream=None, device=0):
        """Write bytes at once as the host or, with a stream, in an operation. Stream 0 is the device's default one."""
        data = bytes(data)
        if stream is None:
            self.host_access(address, len(data), True)
            ctypes.memmove(address, data, len(data))
        else:
            self.queue(stream, device, address, data, len(data), True)

    def read(self, address, nbytes, stream=None, device=0):
        """Return the bytes in memory or, with a stream, a buffer that an operation in the stream fills."""
        if stream is None:
            self.host_access(address, nbytes, False)
            return ctypes.string_at(address, nbytes)
        into = ctypes.create_string_buffer(nbytes)
        self._kept.append(into)
        self.queue(stream, device, address, into, nbytes, False)
        return into
