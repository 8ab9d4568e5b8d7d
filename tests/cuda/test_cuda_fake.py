"""The fake CUDA driver reports accesses that are not ordered or not allowed, and invalid calls."""

import ctypes
import json
import os
import re
import subprocess
import sys
from itertools import product

import pytest
from cuda_launches import Tensor, packed
from fake_cuda import HOST, PACKAGE, FakeDriver
from paths import ROOT

SIZE = 100  # elements
SONAME = "libfake_cuda.so.1"  # so that later tests in this process do not find a CUDA driver


class Caller:
    """Calls a fake driver of three devices, with a stream and a kernel of the first one."""

    def __init__(self):
        self.driver = driver = FakeDriver(3, "pairs", soname=SONAME)
        self.call, self.give = driver.call, driver.give
        self.call("cuInit", 0)
        self.contexts = [driver.on(device) for device in (2, 1, 0)][::-1]
        self.queue, module = driver.stream(0), self.give("cuModuleLoadData", b"image")
        self.kernel = self.give("cuModuleGetFunction", module, b"sum_f32_any")

    def sum(self, sources, results, size=SIZE, gives=0):
        """Launch a sum of float32 arrays at these addresses on device 0."""
        launch = packed([Tensor(size, 0, sources, results)], [(0, 0, 0, 0)], 1, 1, (4, 4, 4))
        self.driver.launch(self.kernel, ctypes.create_string_buffer(launch), 5, self.queue, gives)

    def copy(self, to, source, nbytes=4 * SIZE, gives=0, peers=None):
        """Copy memory on device 0, or between the two devices ``peers`` (to, from), and wait for the copy."""
        if peers is None:
            self.call("cuMemcpyAsync", to, source, nbytes, self.queue, gives=gives)
        else:
            there, here = (self.contexts[each] for each in peers)
            self.call("cuMemcpyPeerAsync", to, there, source, here, nbytes, self.queue, gives=gives)
        self.driver.run()

    def freed(self, source, result, pending):
        """Free memory that a launch still writes (``pending``), or that a later launch reads."""
        address = self.give("cuMemAlloc_v2", 4 * SIZE, kind=ctypes.c_uint64)
        self.sum([source], [address])
        if not pending:
            self.call("cuStreamSynchronize", self.queue)
        self.call("cuMemFree_v2", address)
        if not pending:
            self.sum([address], [result])


def reported(driver, words):
    """Assert that the report has one line, with these words, and forget it."""
    lines = driver.report()
    assert len(lines) == 1, lines
    assert re.search(words, lines[0]), lines
    driver.clear()


def test_accesses_are_unordered_unless_a_wait_orders_them():
    """Events, the default stream and the host order the streams of two devices. What nothing orders is reported."""
    for ordered, seed in product((None, "event", "default stream", "host"), range(5)):  # seeds: other allowed orders
        driver = FakeDriver(2, seed=seed, soname=SONAME)
        driver.call("cuInit", 0)
        a, b = driver.memory(64, 0), driver.memory(64, 0)
        first = driver.stream(0, 0)  # ordered with the default stream
        there = 0 if ordered in (None, "default stream") else 1
        second, here = None if ordered == "default stream" else driver.stream(there), driver.on(0)
        if there:
            driver.on(1)
            driver.call("cuCtxEnablePeerAccess", here, 0)
        driver.write(a, bytes(range(64)), first)
        if ordered == "event":
            driver.follow(1, second, 0, first)
        if ordered == "host":
            driver.call("cuStreamSynchronize", first)
        driver.call("cuMemcpyAsync", b, a, 64, second)
        driver.run()
        if ordered is None:
            reported(driver, "not ordered: .* writes .*, and copy reads")
        else:
            assert driver.report() == []
            assert driver.read(b, 64) == bytes(range(64))


# Actions get memory on devices 0, 0, 1 and 2, and pinned memory. The code is that of a synchronisation afterwards.
@pytest.mark.parametrize(
    ("words", "code", "action"),
    [
        (None, 0, lambda on, a, b, *_, pinned: on.sum([a, pinned], [b])),
        (None, 0, lambda on, a, *_, pinned: on.sum([a], [a])),
        ("reads, .*is not within", 700, lambda on, a, b, *_, pinned: on.sum([a], [b], SIZE + 1)),
        ("writes, .*is not within", 700, lambda on, a, b, *_, pinned: on.sum([a], [b + 4])),
        ("reads, .*device 1, to which peer access", 700, lambda on, a, b, first, *_, pinned: on.sum([a, first], [b])),
        ("threads conflict", 0, lambda on, a, *_, pinned: on.sum([a, a + 4], [a], SIZE - 1, 1)),
        ("misaligned", 0, lambda on, a, b, *_, pinned: on.sum([a + 2], [b], 9, 716)),
        (None, 0, lambda on, a, b, *_, pinned: on.copy(b, a)),
        (None, 0, lambda on, a, b, first, second, pinned: on.copy(second, a, peers=(2, 0))),
        ("crosses to device 1", 0, lambda on, a, b, first, *_, pinned: on.copy(first, a, gives=1)),
        ("copy .*reads, .*is not within", 700, lambda on, a, b, *_, pinned: on.copy(b, a, 4 * SIZE + 1)),
        ("not in memory of device 1", 0, lambda on, a, b, _, second, pinned: on.copy(second, a, gives=1, peers=(1, 0))),
        ("overlap", 0, lambda on, a, *_, pinned: on.copy(a, a, gives=1)),
        ("not ordered: sum_f32_any writes .*, and cuMemFree", 0, lambda on, a, b, *_, pinned: on.freed(a, b, True)),
        (r"reads, \[.*\), was freed", 700, lambda on, a, b, *_, pinned: on.freed(a, b, False)),
    ],
)
def test_accesses_outside_of_what_a_device_may_access_are_reported(words, code, action):
    """Bounds, owners, peer rights, alignment and the threads of one launch are checked for each launch and copy."""
    on = Caller()
    *memory, pinned = (on.driver.memory(4 * SIZE, device) for device in (0, 0, 1, 2, HOST))
    action(on, *memory, pinned=pinned)
    if words:
        reported(on.driver, words)
    on.call("cuStreamSynchronize", on.queue, gives=code)
    assert on.driver.report() == []


@pytest.mark.parametrize(
    ("only", "seconds", "setting", "outcomes"),
    [
        ("2 ", 400, "1", [("ok", ""), ("ok", "")]),  # all kernels, and calls with torch that are drawn
        ("2 kernels", 400, "0", [("RED", "exit code 1; AssertionError: CROSSREDUCE_CUDA is 0")]),
        ("8 ddp", 10, "1", [("left out", "not finished after")]),  # its limit is longer than the time that is left
    ],
)
def test_the_first_run_on_a_gpu(tmp_path, only, seconds, setting, outcomes):
    """The command for the first run on a GPU runs its cases, on the fake driver. Each red case has its reason."""
    options = [tmp_path, "--driver", "fake", "--only", only, "--seconds", str(seconds)]
    given = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(PACKAGE.parent), "CROSSREDUCE_CUDA": setting}
    done = subprocess.run(["bash", ROOT / "benchmarks/gpu_first_run", *options], timeout=450, check=False, env=given)
    _, *records = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [each["result"] for each in records] == [result for result, _ in outcomes]
    assert all(each["why"].startswith(why) for each, (_, why) in zip(records, outcomes, strict=True))
    assert done.returncode == ("ok" not in dict(outcomes))
    assert re.search(r"copy rate +>= 0\.92 +not measured\n", (tmp_path / "table.txt").read_text())


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("run", ["OUT", "--only", "nosuch"], r"no case begins with 'nosuch'\. There are: 1 versions, 2 kernels"),
        ("run", ["OUT", "--seconds", "nan"], "argument --seconds: invalid int value: 'nan'"),
        ("run", [__file__], "results cannot be written there: .*test_cuda_fake"),
        ("checks", ["nosuch"], "choose from '?versions"),
        ("rates", ["nosuch"], "choose from '?8 to 1"),
    ],
)
def test_invalid_arguments_of_the_first_run(tmp_path, program, arguments, words):
    """Its programs begin nothing with invalid arguments. The error has the cases that exist."""
    command = [sys.executable, ROOT / f"benchmarks/gpu_{program}.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(re.search(words, done.stderr)), [*tmp_path.iterdir()]) == (2, True, []), done.stderr
