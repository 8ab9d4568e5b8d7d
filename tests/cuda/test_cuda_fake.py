"""The fake CUDA driver reports accesses that are not ordered, invalid calls and leaks, and nothing else."""

import ctypes
import re
import subprocess
import sys

import numpy as np
import pytest
from budget import count
from cuda_programs import Caller, Program
from fake_cuda import HOST, PARAMETERS, FakeDriver, built


@pytest.fixture(scope="module")
def library():
    # Under another name, so that later tests in this process do not find a CUDA driver.
    return built(soname="libfake_cuda.so.1")


def reported(driver, words):
    """Assert that the report has one line, with these words, and forget it."""
    lines = driver.report()
    assert len(lines) == 1, lines
    assert re.search(words, lines[0]), lines
    driver.clear()


def test_exactly_the_unordered_accesses_are_reported(library):
    """Random programs over streams of all kinds: the report agrees with an independent account."""
    ordered = 0
    for seed in range(count(400)):
        program = Program(FakeDriver(library, 2, seed=seed), np.random.default_rng(seed))
        for _ in range(int(program.draw.integers(4, 40))):
            program.step()
        ordered += program.check()
    assert count(50) < ordered < count(350)


def test_calls_return_the_codes_of_the_driver(library):
    """A call with a wrong argument, handle or context returns the driver's code, and is reported."""
    driver = FakeDriver(library, 4, "pairs")
    driver.lib.fake_initialised(0)
    count = ctypes.c_int()
    assert driver.lib.cuDeviceGetCount(ctypes.byref(count)) == 3
    reported(driver, r"cuDeviceGetCount: cuInit was not called \(3\)")
    caller = Caller(driver, 4)
    can = [caller.give("cuDeviceCanAccessPeer", 2, peer, kind=ctypes.c_int) for peer in range(4)]
    assert can == [0, 0, 0, 1]
    out = ctypes.byref(ctypes.c_void_p())

    def wrong(code, words, name, *arguments):
        caller.call(name, *arguments, gives=code)
        reported(driver, words + rf".*\({code}\)")

    wrong(201, "no context is current", "cuStreamCreate", out, 0)
    wrong(101, "device 4 does not exist", "cuDevicePrimaryCtxRetain", out, 4)
    wrong(201, "does not exist", "cuCtxSetCurrent", 12345)
    stream, event, function = caller.stream(0), caller.event(0), caller.function(0)
    other, address = caller.stream(1), driver.memory(64, 1)
    wrong(400, "different contexts", "cuEventRecord", event, other)
    wrong(400, "stream does not exist", "cuEventRecord", event, 12345)
    wrong(400, "event does not exist", "cuStreamWaitEvent", other, stream, 0)
    launch = (function, 1, 1, 1, 256, 1, 1, 0)
    wrong(400, "function belongs to another context", "cuLaunchKernel", *launch, other, None, None)
    caller.use(0)
    wrong(400, "stream belongs to another context", "cuLaunchKernel", *launch, other, None, None)
    wrong(1, "blocks of 256 threads", "cuLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, stream, None, None)
    wrong(1, "an argument is invalid", "cuLaunchKernel", *launch, stream, None, None)
    caller.call("cuModuleGetFunction", out, caller.made[0], b"sum_f32_any_such", gives=500)
    caller.call("cuCtxEnablePeerAccess", caller.contexts[1], 0)
    caller.call("cuCtxEnablePeerAccess", caller.contexts[1], 0, gives=704)
    caller.call("cuCtxEnablePeerAccess", caller.contexts[2], 0, gives=217)
    wrong(201, "its own peer", "cuCtxEnablePeerAccess", caller.contexts[0], 0)
    caller.call("cuStreamDestroy_v2", stream)
    wrong(400, "was destroyed", "cuStreamSynchronize", stream)
    wrong(1, "not that of an allocation", "cuMemFree_v2", address + 8)
    caller.call("cuDevicePrimaryCtxRelease_v2", 0)
    wrong(709, "was released", "cuStreamCreate", out, 0)
    wrong(709, "was released", "cuCtxSetCurrent", caller.contexts[0])
    wrong(201, "was not retained", "cuDevicePrimaryCtxRelease_v2", 0)


def test_accesses_outside_of_what_a_device_may_access_are_reported(library):
    """Bounds, owners, peer rights, alignment and the threads of one launch are checked for each launch and copy."""
    size = 100

    def attempt(words, action, code):
        """Run an action on device 0 of a new driver; its mistake is reported, and the device fails with a code."""
        driver = FakeDriver(library, 3, "pairs")
        caller = Caller(driver, 3)
        function, stream = caller.function(0), caller.stream(0)
        memory = [driver.memory(4 * size, device) for device in (0, 0, 1, 2, HOST)]
        got = action(driver, caller, function, stream, *memory)
        if words:
            reported(driver, words)
        caller.call("cuStreamSynchronize", stream, gives=code)
        assert driver.report() == []
        return got

    def launched(sources, results, n=size, code=0, change=lambda launch: launch):
        def action(driver, caller, function, stream, *memory):
            at = lambda each: memory[int(each)] + round(each % 1 * 100)  # noqa: E731  1.04: 4 bytes beyond the start of 1
            addresses = [at(each) for each in sources], [at(each) for each in results]
            caller.launch(function, stream, *addresses, n, code, change)

        return action

    def copied(to, source, n=4 * size, code=0, peers=None):
        def action(driver, caller, function, stream, *memory):
            if peers is None:
                caller.call("cuMemcpyAsync", memory[to], memory[source], n, stream, gives=code)
            else:
                there, here = (caller.contexts[each] for each in peers)
                caller.call("cuMemcpyPeerAsync", memory[to], there, memory[source], here, n, stream, gives=code)
            driver.run()

        return action

    def patched(at, byte):
        return lambda launch: launch[:at] + bytes([byte]) + launch[at + 1 :]

    attempt(None, launched([0, 4], [1]), 0)  # pinned memory, too
    attempt(None, launched([0], [0]), 0)  # in place
    attempt("reads, .*is not within", launched([0], [1], size + 1), 700)
    attempt("writes, .*is not within", launched([0], [1.04]), 700)
    attempt("reads, .*is on device 1, to which peer access is not enabled", launched([0, 2], [1]), 700)
    attempt("threads conflict", launched([0, 0.04], [0], size - 1, 1), 0)
    attempt("threads conflict", launched([0], [1, 1], code=1), 0)
    attempt("misaligned", launched([0.02], [1], 9, 716), 0)
    attempt("misaligned", launched([0.04], [1], 9, 716, patched(32 + 32 + 15, 1)), 0)  # "aligned"
    attempt("number of tiles", launched([0], [1], code=1, change=patched(12, 2)), 0)
    attempt("too large", launched([0], [1], code=1, change=patched(17, 200)), 0)
    attempt("invalid order", launched([0], [1], code=1, change=patched(32 + 32 + 12, 3)), 0)

    attempt(None, copied(1, 0), 0)
    attempt(None, copied(3, 0, peers=(2, 0)), 0)
    attempt("crosses to device 1", copied(2, 0, code=1), 0)
    attempt("copy .*reads, .*is not within", copied(1, 0, 4 * size + 1), 700)
    attempt("not in memory of device 1", copied(3, 0, code=1, peers=(1, 0)), 0)
    attempt("overlap", copied(0, 0, code=1), 0)

    def freed(pending):
        def action(driver, caller, function, stream, *memory):
            address = caller.give("cuMemAlloc_v2", 4 * size, kind=ctypes.c_uint64)
            caller.launch(function, stream, [memory[0]], [address], size)
            if not pending:
                caller.call("cuStreamSynchronize", stream)
            caller.call("cuMemFree_v2", address)
            if not pending:
                caller.launch(function, stream, [address], [memory[1]], size)

        return action

    attempt("not ordered: sum_f32_any writes in stream 1 of device 0, and cuMemFree writes", freed(True), 0)
    attempt(r"reads, \[.*\), was freed", freed(False), 700)


def test_each_rule_of_capture_is_checked(library):
    """Calls that are illegal in a capture return the driver's codes, are reported, and invalidate the capture."""
    driver = FakeDriver(library, 2)
    caller = Caller(driver, 2)
    streams = [caller.stream(0) for _ in range(3)] + [caller.stream(0, 0)]
    function, event, stray = caller.function(0), caller.event(0), caller.event(0)
    a, b = driver.memory(64, 0), driver.memory(64, 0)
    out, main = ctypes.c_void_p(), streams[0]

    def attempt(code, end, name, *arguments, mode=0, origin=main, before=lambda: None):
        """Call a function with a code in a capture, whose end has another code."""
        caller.call("cuStreamBeginCapture_v2", origin, mode)
        caller.launch(function, origin, [a], [b], 16)
        before()
        driver.clear()
        caller.call(name, *arguments, gives=code)
        if code:
            reported(driver, rf"^{name}: .*\({code}\)")
        status = caller.capture_status(origin)
        assert status == (2 if end == 901 else 1)
        caller.call("cuStreamEndCapture", origin, ctypes.byref(out), gives=end)
        assert bool(out.value) == (end == 0)
        assert caller.capture_status(origin) == 0
        driver.clear()

    def fork(to=streams[1]):
        caller.call("cuEventRecord", event, main)
        caller.call("cuStreamWaitEvent", to, event, 0)

    def forked():
        fork()
        caller.launch(function, streams[1], [b], [a], 16)

    def joined():
        forked()
        caller.order(stray, streams[1], main)

    address = ctypes.byref(ctypes.c_uint64())
    caller.call("cuEventRecord", stray, streams[2])
    attempt(0, 0, "cuEventRecord", event, main)
    attempt(0, 0, "cuStreamSynchronize", streams[2])
    attempt(900, 901, "cuStreamSynchronize", main)
    attempt(900, 901, "cuMemAlloc_v2", address, 64)
    attempt(0, 0, "cuMemAlloc_v2", address, 64, mode=2)  # relaxed
    attempt(900, 901, "cuModuleLoadData", ctypes.byref(out), b"image", mode=1)
    attempt(905, 901, "cuStreamWaitEvent", main, stray, 0)
    attempt(901, 901, "cuEventRecord", event, main, before=lambda: driver.lib.cuStreamSynchronize(main))  # invalidated
    attempt(906, 901, "cuMemcpyAsync", a, b, 8, None, origin=streams[3])
    attempt(0, 0, "cuMemcpyAsync", a, b, 8, None)  # does not wait for non-blocking streams
    attempt(401, 0, "cuStreamBeginCapture_v2", main, 0)
    attempt(903, 901, "cuStreamEndCapture", streams[1], ctypes.byref(out), before=fork)
    attempt(0, 904, "cuEventRecord", stray, main, before=forked)
    attempt(0, 0, "cuEventRecord", event, main, before=joined)

    caller.call("cuStreamWaitEvent", streams[2], event, 0, gives=907)  # the capture has ended
    reported(driver, "capture that has ended")
    caller.call("cuStreamBeginCapture_v2", streams[2], 2)
    caller.call("cuStreamBeginCapture_v2", main, 2)
    caller.call("cuEventRecord", event, main)
    driver.clear()
    caller.call("cuStreamWaitEvent", streams[2], event, 0, gives=902)  # would merge both
    reported(driver, "would be merged")
    caller.call("cuEventRecord", event, main, gives=901)
    for stream in (main, streams[2]):
        caller.call("cuStreamEndCapture", stream, ctypes.byref(out), gives=901)


def test_faults_are_injected_and_leaks_are_seen(library):
    """The n-th call fails once and does nothing; unreleased objects are counted, separately for each kind."""
    driver = FakeDriver(library, 2)
    caller = Caller(driver, 2)
    assert driver.live() == {"contexts retained": 2}
    driver.fail("cuStreamCreate", 2, 2)
    stream, event = caller.stream(0), caller.event(0)
    caller.call("cuStreamCreate", ctypes.byref(ctypes.c_void_p()), 0, gives=2)
    another = caller.stream(0)
    assert driver.count("cuStreamCreate") == 3
    function, address = caller.function(0), driver.memory(64, 0)
    device = caller.give("cuMemAlloc_v2", 100, kind=ctypes.c_uint64)
    driver.stream(1), driver.memory(10, 1)  # not the caller's
    assert driver.live() == {"contexts retained": 2, "device bytes": 100, "events": 1, "modules": 1, "streams": 2}
    caller.launch(function, stream, [address], [address], 16)
    caller.call("cuModuleUnload", caller.made[0])
    reported(driver, "a kernel of the module may still run")
    driver.run()
    for name, handle in (
        ("cuMemFree_v2", device), ("cuEventDestroy_v2", event), ("cuStreamDestroy_v2", stream),
        ("cuStreamDestroy_v2", another), ("cuDevicePrimaryCtxRelease_v2", 1), ("cuDevicePrimaryCtxRelease_v2", 0),
    ):  # fmt: skip
        caller.call(name, handle)
    assert driver.live() == {}
    assert driver.report() == []


def test_the_libraries_are_found_and_have_all_functions():
    """dlopen of libcuda.so.1 finds the loaded fake or stub, and the stub has the functions that an engine calls."""
    fake, stub = built(), built(stub=True)
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1], 256); found = ctypes.CDLL('libcuda.so.1'); \
        print(*[name for name in sys.argv[2:] if not hasattr(found, name)])"
    missing = {}
    for path in (fake, stub):
        command = [sys.executable, "-c", program, str(path), *PARAMETERS]
        missing[path] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert missing[fake] == []
    assert all("Graph" in name or "Capture" in name for name in missing[stub])
