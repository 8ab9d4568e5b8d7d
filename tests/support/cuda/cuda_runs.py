"""The CUDA engine on the fake driver: draws layouts, runs them in random allowed orders, and checks bits and ordering.

Before each call the callers' streams write the sources, and after it they read the results and free all arrays, whose
memory others write into, so that every missing dependency is reported. Run as a program, in a process of its own since
the engine keeps its contexts: python cuda_runs.py PEERS SEED CHECK=COUNT ...
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from unittest import mock

import cuda_launches
import numpy as np
import pytest
from cuda_cases import NUMPY, PLACES, Case, Memory, drawn, made_layouts
from fake_cuda import FakeDriver

from crossreduce.engines import cuda, host
from crossreduce.engines.cuda import driver
from crossreduce.errors import DriverError
from crossreduce.ops import ReduceOp
from crossreduce.packing import Packing
from crossreduce.values import TensorSpec

MANY = ("ring", 66, 2), ("hierarchical_copy", 3, 70), ("one_device", 5, 66)  # replicas on two devices


def spread(count):
    """Return the numbers of ``count`` drawn cases, at most 98. Even a few of them have most algorithms and devices."""
    return [37 * k % 98 for k in range(count)]


def check_draws(memory, count, seed):
    """Run drawn cases twice each: all bits are right, and nothing is unordered."""
    fake = memory.fake
    for number in spread(count):
        case, draw = drawn(memory, number, seed), np.random.default_rng([seed, number])
        for _ in range(2):
            assert case.run(draw), (number, case.names, case.numbers)
            assert not fake.report(), (number, case.names, case.numbers, fake.report()[:3])
        fake.clear()


def check_dropped(memory, count, seed):
    """Drop each dependency of drawn cases once: each time something is reported to be unordered."""
    fake = memory.fake
    dropped = 0
    for number in spread(count):
        case, draw = drawn(memory, number, seed), np.random.default_rng([seed, number])
        if not any(case.sizes) or (case.inplace and len(set(case.places)) < len(case.places)):
            continue  # the plan also has waits for results that are in the memory of other sources
        before = fake.count("cuStreamWaitEvent")
        case.run(draw, check=False)
        waits = fake.count("cuStreamWaitEvent") - before
        for k in range(1, waits + 1):
            fake.clear()
            fake.fail("cuStreamWaitEvent", k, 0)
            case.run(draw, check=False)
            assert fake.report(), (number, k, waits, case.names, case.numbers)
            dropped += 1
        fake.clear()
    return dropped


def check_many(memory, count, seed):
    """If there are more sources than bits in a kernel's masks, partial results of other devices and inputs combine.

    In the last case a launch has so many parts that its table is split, and another device waits for it.
    """
    cases = [
        (algorithm, (0,) * first + (1,) * second, "sum", dtype, [first + second + 300])
        for algorithm, first, second in MANY[:count]
        for dtype in ("float16", "float32")
    ]
    cases.append(("ring", PLACES["two"], "product", "float32", [9] * 70))
    # All numbers are of similar size, so that each sum depends on the order.
    normal = mock.patch.object(cuda_launches, "values", lambda draw, dtype, n: draw.normal(size=n).astype(dtype))
    for number, (algorithm, places, op, dtype, sizes) in enumerate(cases):
        case = Case(memory, algorithm, places, op, dtype, sizes, Packing(), number // 2 == 1)
        with normal:
            assert case.run(np.random.default_rng([seed, number])), number
        assert not memory.fake.report(), (number, memory.fake.report()[:3])


def check_hosts(memory, count, seed):
    """If some replicas are in host memory, their arrays are copied to and from a device, also with ``out``."""
    fake, names, draw = memory.fake, ("cpu:0", "cuda:5", "cpu:1", "cuda:2", "cuda:5#1"), np.random.default_rng(seed)

    def moved(self, x, name):  # returns an array's copy on a device, or on the host
        if name.startswith("cuda"):
            made, device = memory.array(x.size, x.dtype, int(name[5])), int(name[5])
            fake.write(made.ctypes.data, x.tobytes(), memory.stream(device), device)
            return made
        place = memory.devices[x.ctypes.data][0]
        read = fake.read(x.ctypes.data, x.nbytes, memory.stream(place), place)
        fake.run()
        return np.frombuffer(read, x.dtype)[: x.size]

    def placed(rows, names):
        return [[moved(None, x, k) if k[1] == "u" else x for x, k in zip(row, names, strict=True)] for row in rows]

    engine, numbers = cuda.CudaEngine(), NUMPY.numbers(ReduceOp("mean"), "float32", len(names))
    specs = tuple(TensorSpec((size,), "float32") for size in (1000, 3))
    for algorithm, to in [*product(("one_device", "direct"), (names, names[::2], names[1::2]))][:count]:
        (layout,) = made_layouts(algorithm, names, to, specs, Packing(num_packs=2), None, None)
        assert engine.supports(layout)
        given = [[draw.normal(size=spec.shape).astype("float32") for _ in names] for spec in specs]
        right = [[np.zeros(spec.shape, "float32") for _ in to] for spec in specs]
        arrays, out = placed(given, names), placed(right, to)
        host.kernel(layout, numbers, len(to)).run(given, right, 1, False, False)  # one thread
        for into in None, [[x.copy() if k[1] == "p" else x for x, k in zip(row, to, strict=True)] for row in out]:
            with mock.patch.object(type(NUMPY), "to_device", moved):
                executable = engine.compile(layout, numbers, into is not None)
                results = executable.run(engine.bind(layout, arrays), into)
            fake.run()
            assert into is None or results is into
            assert all(map(np.array_equal, chain(*results), chain(*right))), (algorithm, to)
        assert not fake.report(), fake.report()[:3]


def check_failures(memory, count, seed):
    """Let each call of the driver fail once: the error names it, nothing is left running, and later runs are right."""
    fake, failed = memory.fake, 0
    names = ("cuLaunchKernel", "cuMemcpyPeerAsync", "cuStreamWaitEvent", "cuEventRecord", "cuEventCreate")
    names += ("cuStreamGetCaptureInfo_v2", "cuCtxSetCurrent", "cuCtxGetCurrent", "cuPointerGetAttributes")
    for number, name in product(spread(count), names):
        case, memory.is_strided = drawn(memory, number, seed), False
        draw, before = np.random.default_rng([seed, number]), fake.count(name)
        assert case.run(draw)
        calls = fake.count(name) - before
        for n in sorted({1, 2, calls // 2, calls} & set(range(1, calls + 1))):
            if name == "cuEventCreate":
                case.compile()  # a new plan has no events yet
            fake.clear()
            fake.call("cuCtxSetCurrent", None)
            if failed % 2:
                fake.on(7)
            context, error = fake.give("cuCtxGetCurrent"), None
            fake.fail(name, n, 719)
            try:
                case.run(draw)
            except DriverError as raised:
                error = raised.with_traceback(None)  # its frames have temporary memory
                assert fake.give("cuCtxGetCurrent") == context, (number, name, n)
                assert (error.call, error.code) == (name, 719), error
                assert re.search(r"(?s)CUDA_ERROR_LAUNCH_FAILED.*try:", str(error)), error
                failed += 1
            # These are called less often now, or one that fails makes the former context current again.
            assert error or name in ("cuCtxSetCurrent", "cuEventCreate"), name
            memory.release_all()
            fake.run()
            assert not fake.report(), (number, name, n, fake.report()[:2])
            fake.clear()
            assert case.run(draw), (number, name, n)
        fake.clear()
    del case
    gc.collect()
    live = fake.live()
    assert set(live) <= {"modules", "streams", "contexts retained"}, live
    assert live["modules"] == live["contexts retained"] <= 8, live
    return failed


def check_captures(memory, count, seed):
    """Capture calls in a graph, which runs again on other values. The callers' streams take part in the capture."""
    fake, others, graph = memory.fake, memory.devices.keys() | {0}, ctypes.c_void_p()
    case = Case(memory, "direct", (0, 1), "sum", "float32", [500], Packing(), False)
    assert case.run(np.random.default_rng(seed))
    _, stream = memory.capturing(0), memory.capturing(1)
    fake.on(1)
    fake.call("cuStreamBeginCapture_v2", stream, 0)  # that of one device only
    with pytest.raises(DriverError) as error:
        case.run(np.random.default_rng(seed))
    assert (error.value.call, error.value.code) == ("cuStreamWaitEvent", 905)
    fake.call("cuStreamEndCapture", stream, ctypes.byref(graph), gives=901)  # invalidated
    memory.threads.streams = {}
    memory.release_all()
    fake.run()
    fake.clear()
    for number in spread(count):
        case, draw = drawn(memory, number, seed), np.random.default_rng([seed, number])
        assert case.run(draw)
        streams = fake.live().get("streams")
        case.run_captured(draw)
        assert case.run(draw)  # this frees what the graphs kept
        gc.collect()
        assert not memory.devices.keys() - others, (number, memory.devices.keys() - others)
        assert not fake.report(), (number, fake.report()[:3])
        fake.clear()
        memory.threads.streams = {}
        del case
        gc.collect()
        assert fake.live().get("streams") == streams, fake.live()


def check_devices(fake):
    """The first use of devices does not disturb another thread's global capture, and Python goes on meanwhile.

    Then each device reads its peers; a device that reads another one wrongly is named. Return the number of pairs.
    """
    fake.call("cuInit", 0)
    stream = fake.stream(7)
    fake.on(7)
    fake.call("cuStreamBeginCapture_v2", stream, 0)
    fake.hold()
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(driver.check_peer_reads, range(4))
        while not failing.done() and not fake.resume():  # the thread waits in a call of the driver
            time.sleep(0.005)
        assert failing.result() == []
    fake.call("cuGraphDestroy", fake.end_capture(stream))
    fake.call("cuCtxSetCurrent", None)
    pairs = [(a, b) for a, b in product(range(4), repeat=2) if a != b and driver.native().enable_peer(a, b)]
    for pair in pairs[1:2]:
        fake.corrupt(*pair)
        assert driver.check_peer_reads(range(4)) == [pair]
    assert not fake.report(), fake.report()
    assert set(fake.live()) == {"modules", "contexts retained"}
    fake.clear()
    return len(pairs)


def check_private(memory, count, seed):
    """With ``CROSSREDUCE_P2P=0`` no device gets access to another one's memory."""
    refused = mock.patch.object(driver.native(), "enable_peer", side_effect=AssertionError("a peer was enabled"))
    driver.allows_peers.cache_clear()
    with refused, mock.patch.dict(os.environ, {"CROSSREDUCE_P2P": "0"}):
        check_draws(memory, count, seed)
        assert driver.check_peer_reads(range(8)) == []
    driver.allows_peers.cache_clear()


def check_threads(memory, count, seed):
    """Several threads run the same and other executables at once, on streams of their own."""
    shared = [drawn(memory, number, seed) for number in spread(4)]

    def work(thread):
        draw = np.random.default_rng([seed, thread])
        return all(shared[(thread + number) % 4].run(draw, finish=False) for number in range(count))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert not memory.fake.report(), memory.fake.report()[:3]


def main(peers, seed, *checks):
    """Run some checks, and print the number that each returns, or how often it was to repeat."""
    fake = FakeDriver(8, peers, int(seed))
    print("devices", check_devices(fake))
    memory = Memory(fake)
    if peers == "full":  # device 5 can access device 7 already, as if a framework had enabled it
        other = fake.on(7)
        fake.on(5)
        fake.call("cuCtxEnablePeerAccess", other, 0)
        fake.call("cuCtxSetCurrent", None)
    module = sys.modules["crossreduce.engines.cuda.batching"]
    small = mock.patch.object(module, "_PIECE_NBYTES", 1 << 10)  # so that small arrays are cut into pieces
    with small, mock.patch.object(cuda, "device_memory", return_value=memory):
        for what, count in (each.split("=") for each in checks):
            memory.kinds, memory.is_strided = {}, False  # not as the last case of another check
            print(what, globals()[f"check_{what}"](memory, int(count), int(seed)) or count)


if __name__ == "__main__":
    main(*sys.argv[1:])
