"""A fake CUDA driver for tests without a GPU: builds the library of fake_cuda.cpp and controls it.

``built`` compiles a ``libcuda.so.1``. ``FakeDriver`` loads it, so that a later ``dlopen("libcuda.so.1")`` in this
process finds it, and starts with a number of devices. Work is queued and runs in random allowed orders. The report has
a line for every mistake of the callers, and for every access that conflicts with an earlier one without being ordered
after it. Of two earlier accesses, one ordered after the other, only the later one is compared.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from compiled import compiled
from paths import NATIVE, ROOT, program, python_path

import crossreduce

PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed
KERNELS = ROOT / "src/crossreduce/engines/cuda/native"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC")
HOST = -1  # the "device" of pinned memory
PLAIN, POOL, MAPPED, MANAGED, FOREIGN_CONTEXT = range(5)  # kinds of memory; peers can read the first and the fourth
NON_BLOCKING = 1  # a flag of streams: not ordered with the default stream
CUBE_MESH = ["1234", "0235", "0136", "0127", "0567", "1467", "2457", "3456"]  # of each device of a DGX-1, its peers

# The parameters of the driver's functions: p pointers and handles, a addresses, z sizes, i int, u unsigned, s text.
PARAMETERS = {
    "cuInit": "u", "cuDriverGetVersion": "p", "cuDeviceGetCount": "p", "cuDeviceGet": "pi", "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii", "cuDevicePrimaryCtxRetain": "pi", "cuDevicePrimaryCtxRelease_v2": "i",
    "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuDeviceCanAccessPeer": "pii", "cuCtxEnablePeerAccess": "pu",
    "cuCtxSynchronize": "", "cuModuleLoadData": "pp", "cuModuleUnload": "p", "cuModuleGetFunction": "pps",
    "cuLaunchKernel": "puuuuuuuppp", "cuStreamCreate": "pu", "cuStreamDestroy_v2": "p", "cuStreamWaitEvent": "ppu",
    "cuStreamSynchronize": "p", "cuStreamGetCaptureInfo_v2": "pppppp", "cuStreamBeginCapture_v2": "pi",
    "cuThreadExchangeStreamCaptureMode": "p", "cuUserObjectCreate": "pppuu", "cuUserObjectRelease": "pu",
    "cuGraphRetainUserObject": "ppuu",
    "cuStreamEndCapture": "pp", "cuGraphInstantiateWithFlags": "ppz", "cuGraphLaunch": "pp", "cuGraphExecDestroy": "p",
    "cuGraphDestroy": "p", "cuEventCreate": "pu", "cuEventDestroy_v2": "p", "cuEventRecord": "pp",
    "cuMemcpyAsync": "aazp", "cuMemcpyPeerAsync": "apapzp", "cuMemAlloc_v2": "pz", "cuMemFree_v2": "a",
    "cuMemHostAlloc": "pzu", "cuMemFreeHost": "p", "cuPointerGetAttributes": "uppa", "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
}  # fmt: skip
TYPES = {"p": ctypes.c_void_p, "a": ctypes.c_uint64, "z": ctypes.c_size_t, "i": ctypes.c_int, "u": ctypes.c_uint}
TYPES["s"] = ctypes.c_char_p


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
    if not stub:
        objects.append(host_bodies())
    return compiled("libcuda.so.1", ["g++", "-shared", f"-Wl,-soname,{soname}", "-ldl", "-pthread"], objects)


def ran(name, *arguments, timeout=550, **environment):
    """Run a program of the tests in a process of its own, and return the finished process."""
    command = [sys.executable, "-W", "ignore", str(program(name)), *map(str, arguments)]
    given = os.environ | {"PYTHONPATH": python_path(PACKAGE.parent)} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=given, timeout=timeout)


def printed(name, *arguments, **environment):
    """Run a program of the tests, which must succeed and report nothing, and return its output."""
    done = ran(name, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, done.stderr[-3000:]
    return done.stdout


def peer_matrix(peers, devices):
    """Return for each device a row of 0s and 1s: whether it accesses each device. ``peers``: rows, or a kind's name."""
    if not isinstance(peers, str):
        return [[int(bool(each)) for each in row] for row in peers]
    access = {
        "full": lambda a, b: True,
        "pairs": lambda a, b: a // 2 == b // 2,
        "mesh": lambda a, b: str(b) in CUBE_MESH[a],  # a DGX-1
        "none": lambda a, b: False,
    }[peers]
    return [[int(a != b and access(a, b)) for b in range(devices)] for a in range(devices)]


class FakeDriver:
    """The fake driver in this process, restarted with some devices. There is one for each library file.

    ``lib`` has the driver's functions (``lib.cuStreamCreate(...)``), which return result codes.
    """

    def __init__(self, path, devices=8, peers="full", seed=0):
        self.path = str(path)
        self.lib = ctypes.CDLL(self.path, ctypes.RTLD_GLOBAL)
        for name, letters in PARAMETERS.items():
            getattr(self.lib, name).argtypes = [TYPES[letter] for letter in letters]
        size, pointer = ctypes.c_uint64, ctypes.c_void_p
        for name, result, *arguments in (  # functions of fake_cuda.cpp, with the types of their results and parameters
            ("reset", None, ctypes.c_int, ctypes.c_char_p, size),
            ("clear", None),
            ("fail", None, ctypes.c_char_p, size, ctypes.c_int),
            ("drop", None, ctypes.c_char_p, size),
            ("count", size, ctypes.c_char_p),
            ("report", ctypes.c_char_p),
            ("operations", ctypes.c_char_p),
            ("live", ctypes.c_char_p),
            ("run", None),
            ("memory", size, size, ctypes.c_int),
            ("own", ctypes.c_int, size, size, ctypes.c_int),
            ("disown", ctypes.c_int, size),
            ("kind", ctypes.c_int, size, ctypes.c_int),
            ("hold", None),
            ("continue", ctypes.c_int),
            ("corrupt", None, ctypes.c_int, ctypes.c_int),
            ("stream", pointer, ctypes.c_int, ctypes.c_uint),
            ("host_access", ctypes.c_int, size, size, ctypes.c_int),
            ("queue", ctypes.c_int, pointer, ctypes.c_int, size, pointer, size, ctypes.c_int),
        ):
            function = getattr(self.lib, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
        self.reset(devices, peers, seed)

    def reset(self, devices=8, peers="full", seed=0):
        """Restart: all handles and addresses become invalid. What ``cuInit`` did stays."""
        self.devices = devices
        rows = peer_matrix(peers, devices)
        self.lib.fake_reset(devices, bytes(each for row in rows for each in row), seed)
        self._kept = []

    def clear(self):
        """Forget the report, operations, counts and faults, but no handles."""
        self.lib.fake_clear()

    def fail(self, name, n, code):
        """Let the n-th call of a function from now on fail with a code and do nothing. The next call is the first."""
        self.lib.fake_fail(name.encode(), n, code)

    def drop(self, name, n):
        """Let the n-th call of a function from now on, such as ``cuStreamWaitEvent``, succeed and do nothing."""
        self.lib.fake_drop(name.encode(), n)

    def count(self, name):
        """Return how often a function was called."""
        return self.lib.fake_count(name.encode())

    def report(self):
        """Return the mistakes so far, as a list of lines."""
        return self.lib.fake_report().decode().splitlines()

    def operations(self):
        """Return the launches, copies, records and waits so far, as a list of lines."""
        return self.lib.fake_operations().decode().splitlines()

    def live(self):
        """Return how many objects of each kind the driver's callers made and did not release, by the kind's name."""
        lines = self.lib.fake_live().decode().splitlines()
        return {what: int(count) for what, count in (line.split(": ") for line in lines)}

    def run(self):
        """Execute everything, as if the host had synchronised with all streams."""
        self.lib.fake_run()

    def memory(self, nbytes, device, kind=PLAIN):
        """Return the address of new memory of a framework on a device, or pinned (``HOST``)."""
        address = self.lib.fake_memory(nbytes, device)
        assert address, self.report()
        assert self.lib.fake_kind(address, kind) == 0
        return address

    def own(self, array, device):
        """Let the memory of a NumPy array count as a device's, and return its address."""
        self._kept.append(array)
        assert self.lib.fake_own(array.ctypes.data, array.nbytes, device) == 0
        return array.ctypes.data

    def disown(self, address):
        """Free memory of ``memory``, or give back that of ``own``."""
        assert self.lib.fake_disown(address) == 0, self.report()

    def stream(self, device, flags=NON_BLOCKING):
        """Return the handle of a new stream of a framework."""
        return self.lib.fake_stream(device, flags)

    def host_access(self, address, nbytes, writes):
        """Tell the driver that the host reads or writes memory."""
        self.lib.fake_host_access(address, nbytes, writes)

    def write(self, address, data, stream=None, device=0):
        """Write bytes at once as the host or, with a stream, in an operation. Stream 0 is the device's default one."""
        data = bytes(data)
        if stream is None:
            self.host_access(address, len(data), writes=True)
            ctypes.memmove(address, data, len(data))
        else:
            self._checked(self.lib.fake_queue(stream, device, address, data, len(data), True))

    def read(self, address, nbytes, stream=None, device=0):
        """Return the bytes in memory or, with a stream, a buffer that an operation in the stream fills."""
        if stream is None:
            self.host_access(address, nbytes, writes=False)
            return ctypes.string_at(address, nbytes)
        into = ctypes.create_string_buffer(nbytes)
        self._kept.append(into)
        self._checked(self.lib.fake_queue(stream, device, address, into, nbytes, False))
        return into

    def _checked(self, code):
        if code:
            raise RuntimeError(self.report()[-1])
