"""The fake CUDA driver reports accesses that are not ordered or not allowed, and invalid calls."""

import ctypes
import re
import subprocess
import sys

import pytest
from cuda_launches import Tensor, packed
from fake_cuda import HOST, NON_BLOCKING, PARAMETERS, FakeDriver, built


class Caller:
    """Calls the fake driver, on some devices."""

    def __init__(self, driver, devices):
        self.driver = driver
        self.call("cuInit", 0)
        self.contexts = [self.give("cuDevicePrimaryCtxRetain", device) for device in range(devices)]

    def call(self, name, *arguments, gives=0):
        """Call a function, which must return a code."""
        code = getattr(self.driver.lib, name)(*arguments)
        assert code == gives, (name, code, self.driver.report())

    def give(self, name, *arguments, kind=ctypes.c_void_p):
        """Call a function whose first parameter is the address of its result; return that."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def stream(self, device, flags=NON_BLOCKING):
        self.call("cuCtxSetCurrent", self.contexts[device])
        return self.give("cuStreamCreate", flags)

    def launch(self, function, stream, sources, results, size, code=0):
        """Launch a sum of float32 arrays at these addresses; the current context must be the function's."""
        launch = packed([Tensor(size, 0, list(sources), list(results))], [(0, 0, 0, 0)], 1, 1, (4, 4, 4))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(kept := ctypes.create_string_buffer(launch)))
        self.call("cuLaunchKernel", function, 5, 1, 1, 256, 1, 1, 0, stream, parameters, None, gives=code)
        del kept


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


def test_accesses_are_unordered_unless_a_wait_orders_them(library):
    """Events, the default stream and the host order the streams of two devices; what nothing orders is reported."""
    for ordered in (None, "event", "default stream", "host"):
        for seed in range(5):  # the queues run in random allowed orders
            driver = FakeDriver(library, 2, seed=seed)
            caller = Caller(driver, 2)
            a, b = driver.memory(64, 0), driver.memory(64, 0)
            first = caller.stream(0, 0)
            event = caller.give("cuEventCreate", 2)
            second = None if ordered == "default stream" else caller.stream(1 - (ordered is None))
            if ordered in ("event", "host"):
                caller.call("cuCtxEnablePeerAccess", caller.contexts[0], 0)
            driver.write(a, bytes(range(64)), first)
            if ordered == "event":
                caller.call("cuEventRecord", event, first)
                caller.call("cuStreamWaitEvent", second, event, 0)
            if ordered == "host":
                caller.call("cuStreamSynchronize", first)
            caller.call("cuMemcpyAsync", b, a, 64, second)
            driver.run()
            if ordered is None:
                reported(driver, "not ordered: .* writes .*, and copy reads")
            else:
                assert driver.report() == []
                assert driver.read(b, 64) == bytes(range(64))


def test_accesses_outside_of_what_a_device_may_access_are_reported(library):
    """Bounds, owners, peer rights, alignment and the threads of one launch are checked for each launch and copy."""
    size = 100

    def attempt(words, action, code):
        """Run an action on device 0 of a new driver; its mistake is reported, and the device fails with a code."""
        driver = FakeDriver(library, 3, "pairs")
        caller = Caller(driver, 3)
        stream = caller.stream(0)
        function = caller.give("cuModuleGetFunction", caller.give("cuModuleLoadData", b"image"), b"sum_f32_any")
        memory = [driver.memory(4 * size, device) for device in (0, 0, 1, 2, HOST)]
        action(driver, caller, function, stream, *memory)
        if words:
            reported(driver, words)
        caller.call("cuStreamSynchronize", stream, gives=code)
        assert driver.report() == []

    def launched(sources, results, n=size, code=0):
        def action(driver, caller, function, stream, *memory):
            at = lambda each: memory[int(each)] + round(each % 1 * 100)  # noqa: E731  1.04: 4 bytes beyond the start of 1
            addresses = [at(each) for each in sources], [at(each) for each in results]
            caller.launch(function, stream, *addresses, n, code)

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

    attempt(None, launched([0, 4], [1]), 0)  # pinned memory, too
    attempt(None, launched([0], [0]), 0)  # in place
    attempt("reads, .*is not within", launched([0], [1], size + 1), 700)
    attempt("writes, .*is not within", launched([0], [1.04]), 700)
    attempt("reads, .*is on device 1, to which peer access is not enabled", launched([0, 2], [1]), 700)
    attempt("threads conflict", launched([0, 0.04], [0], size - 1, 1), 0)
    attempt("misaligned", launched([0.02], [1], 9, 716), 0)
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
