"""The engine "nccl", with a stand-in for NCCL that runs on host memory and reports every misuse (fake_nccl.py).

No test here ran on a GPU or with NVIDIA's library.
"""

import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import oracle
import pytest
from expect import check, digits, small, unchanged
from frameworks import DTYPES, NAMES, defined

import crossreduce as cr
from crossreduce.engines import nccl_library

if "torch" not in NAMES:
    pytest.skip("torch is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
import fake_nccl
import torch
from engine_runs import engine_runs
from fake_nccl import on

NCCL = cr.NcclAllReduce()
OPS = ("sum", "mean", "min", "max", "product")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return fake_nccl.built(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def cuda(path, monkeypatch, torch_):
    """Yield the stand-ins. After the test, assert that nothing was misused and that no communicator is left."""
    memory = fake_nccl.install(monkeypatch, path)
    yield memory
    library = nccl_library.library()
    if not isinstance(library, str):
        library.close()
    assert memory.fake.fake_report().decode() == ""
    assert memory.fake.fake_live() == 0


def names(devices):
    return tuple(f"cuda:{k}" for k in devices)


def put(cuda, torch_, xs, devices, called=None):
    """Return NumPy arrays as a value on CUDA devices; ``called``: other names of its devices."""
    placed = [cuda.put(torch_.array(x, 0), k) for x, k in zip(xs, devices, strict=True)]
    return cr.PerReplica(placed, called or names(devices))


def collective(cuda):
    """Return the first collective of NCCL that ran since the last call of this function, or ``None``."""
    return next((name for name in cuda.called() if name in ("ncclAllReduce", "ncclReduce", "ncclBroadcast")), None)


def by_nccl(op, dtype):
    """Return whether NCCL computes an op of a dtype as this library defines it."""
    if dtype in HALVES or dtype in ("int16", "uint16"):
        return False
    if op in ("min", "max"):
        return dtype not in FLOATS
    return not (op == "mean" and "int" in dtype) and not (op == "product" and dtype.startswith("complex"))


def test_every_op_and_dtype(cuda, torch_):
    """On 2, 3 and 8 devices, every op of every dtype equals the oracle. NCCL runs if it computes the op as defined."""
    ran = 0
    for devices, dtype, op in product([(0, 1), (5, 2, 3), (7, 6, 5, 4, 3, 2, 1, 0)], DTYPES, OPS):
        if not defined(op, dtype):
            continue
        xs = small(dtype, (3, 2), len(devices))
        value = put(cuda, torch_, xs, devices)
        turned = devices[1:] + devices[:1]
        for destinations, name in ((devices, "ncclAllReduce"), (turned, "ncclAllReduce"), (devices[1:2], "ncclReduce")):
            result = NCCL.reduce(op, value, on(*destinations))
            check(torch_, result, op, xs, names(destinations), value)
            assert collective(cuda) == (name if by_nccl(op, dtype) else None), (op, dtype)
            ran += by_nccl(op, dtype)
        assert unchanged(torch_, value, xs)
    assert ran > 150


def test_contributions_all_arrive_once(cuda, torch_):
    """No contribution is lost, doubled or misplaced, in arrays of any size, empty ones and scalars included."""
    for devices, shape in product([(1, 0), (0, 1, 2), tuple(range(8))], [(), (0,), (1,), (1000,), (3, 5, 7)]):
        xs = digits(len(devices), shape)
        value = put(cuda, torch_, xs, devices)
        check(torch_, NCCL.reduce("sum", value, value), "sum", xs, names(devices), value)
        assert collective(cuda) == ("ncclAllReduce" if 0 not in shape else None)


def test_batches_are_one_group(cuda, torch_):
    """A batch of one dtype is one group of NCCL, also with strided arrays, with ``out`` and in place. With ``out``,
    the results are its arrays."""
    devices = (2, 0, 1)
    for dtype, op, where in product(["float32", "int64", "complex64"], ["sum", "mean"], ["new", "out", "in place"]):
        rows = [small(dtype, shape, 3, seed) for seed, shape in enumerate([(4, 3), (0, 2), (), (50,)])]
        values = [put(cuda, torch_, xs, devices) for xs in rows]
        if where != "in place":
            strided = [x.t().contiguous().t() for x in values[0]]
            assert not strided[0].is_contiguous()
            values[0] = cr.PerReplica([cuda.put(x, k) for x, k in zip(strided, devices, strict=True)], names(devices))
        out = None if where == "new" else values
        if where == "out":
            result = "float32" if (op, dtype) == ("mean", "int64") else dtype
            blank = [[np.zeros_like(x, result) for x in xs] for xs in rows]
            out = [put(cuda, torch_, xs, devices) for xs in blank]
        if where == "in place" and (op, dtype) == ("mean", "int64"):
            continue
        cuda.called()
        versions = [] if out is None else [x._version for value in out for x in value]
        found = NCCL.batch_reduce(op, [(value, value) for value in values], out=out)
        called = cuda.called()
        groups = 0 if (op, dtype) == ("mean", "int64") else 1  # NCCL would compute this mean in integers
        assert called.count("ncclGroupStart") == groups
        assert called.count("ncclAllReduce") == groups * 3 * 3  # for the 3 tensors that are not empty, on 3 devices
        for xs, value, result, given in zip(rows, values, found, out or [None] * 4, strict=True):
            check(torch_, result, op, xs, names(devices), value if where != "in place" else ())
            assert given is None or all(x is y for x, y in zip(result, given, strict=True))
            assert where == "in place" or unchanged(torch_, value, xs)
        if out is None and op == "sum":  # the new results of a replica share memory, which nothing fills
            assert len({result[1].untyped_storage().data_ptr() for result in found if result[1].numel()}) == 1
        if out is not None:
            assert all(x._version > old for x, old in zip((x for v in out for x in v), versions, strict=True))


def test_means_are_divided(cuda, torch_):
    """The mean of n equal numbers is that number, also for float16 40000s, whose sum NCCL could not store. The minimum
    and the maximum of NaN and a number are NaN."""
    for n, dtype in product((2, 3, 5, 7, 8), ("float16", "float32", "float64")):
        factors = 1 if dtype == "float16" else np.arange(1, 65, dtype=dtype)
        xs = [np.full(64, 40000, dtype) * factors] * n
        value = put(cuda, torch_, xs, tuple(range(n)))
        for y in NCCL.reduce("mean", value, value):
            assert torch_.to_numpy(y).tobytes() == xs[0].tobytes()
        assert collective(cuda) == ("ncclAllReduce" if dtype != "float16" else None)
    value = put(cuda, torch_, [np.float32([np.nan, 1]), np.float32([3, np.nan])], (0, 1))
    for op in ("min", "max"):
        assert all(torch.isnan(y).all() for y in NCCL.reduce(op, value, value))  # NCCL's lose NaN


def test_broadcasts(cuda, torch_):
    """A value of one array is broadcast by NCCL, for every dtype, also to devices that do not include its own."""
    for dtype, destinations in product(DTYPES, [(1, 0, 2), (2, 3), tuple(range(8))]):
        xs, op = small(dtype, (5, 2), 1), "max" if dtype == "bool" else "sum"
        value = put(cuda, torch_, xs, (1,))
        check(torch_, NCCL.reduce(op, value, on(*destinations)), op, xs, names(destinations), value)
        assert collective(cuda) == "ncclBroadcast"
        assert unchanged(torch_, value, xs)


def test_threads_share_communicators(cuda, torch_):
    """Threads with streams of their own may use one op, on the same devices and on others, at the same time."""

    def work(number):
        cuda.threads.number = number
        devices = ((0, 1, 2), (1, 0, 2), (1, 3))[number % 3]
        for seed in range(10):
            xs = small("float64", (100,), len(devices), seed)
            value = put(cuda, torch_, xs, devices)
            check(torch_, NCCL.reduce("mean", value, value), "mean", xs, names(devices), value)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    called = cuda.called()
    assert called.count("ncclAllReduce") == 10 * (3 * 2 + 3 * 2 + 2 * 2)  # two threads for each list of devices
    assert called.count("ncclCommInitAll") == 2  # one for {0, 1, 2} in any order, one for {1, 3}


ALL, ONE = "cuda:0, cuda:1, cuda:2", "cuda:1"
ERRORS = (  # the function that fails ("state": an error that NCCL reports later), and the devices in the message
    ("ncclCommInitAll", ALL), ("ncclGroupStart", ALL), ("ncclAllReduce", ONE), ("ncclReduce", ONE),
    ("ncclBroadcast", ONE), ("ncclGroupEnd", ALL), ("ncclCommGetAsyncError", ONE), ("state", ONE),
)  # fmt: skip


def test_each_error(cuda, torch_):
    """An error names NCCL's function, text and device, and aborts the communicators. The next call works again.

    An error that occurs later, inside a communicator, is reported by the next call.
    """
    for function, where in ERRORS:
        single = function == "ncclBroadcast"
        xs = small("float32", (10,), 1 if single else 3)
        value = put(cuda, torch_, xs, (0,) if single else (0, 1, 2))
        to = on(1) if function == "ncclReduce" else on(0, 1, 2)
        if function != "ncclCommInitAll":
            NCCL.reduce("sum", value, to)
        device = 1 if where == ONE else 0
        cuda.fake.fake_fail(function.encode(), device, 1)  # 1: ncclUnhandledCudaError
        called = "an earlier call" if function == "state" else function
        problem = rf"NCCL failed in {called} on {where}: unhandled cuda error\."
        pattern = rf"^{problem}\n  given: ncclResult_t 1\n  try:   NCCL_"
        with pytest.raises(cr.BackendError, match=pattern):
            NCCL.reduce("sum", value, to)
        assert cuda.fake.fake_live() == 0, function
        assert unchanged(torch_, value, xs)
        check(torch_, NCCL.reduce("sum", value, to), "sum", xs, to.devices, value)
        nccl_library.library().close()
        cuda.called()


def test_communicators_that_do_not_block(cuda, torch_, monkeypatch):
    """If a communicator is still in progress, a call waits for it, and raises an error when that takes too long."""
    value = put(cuda, torch_, xs := small("float32", (10,), 3), (0, 1, 2))
    for polls in (1, 5):
        cuda.fake.fake_polls(polls)
        for _ in range(2):
            check(torch_, NCCL.reduce("sum", value, value), "sum", xs, names((0, 1, 2)), value)
        assert cuda.called().count("ncclCommGetAsyncError") >= 2 * polls
    cuda.fake.fake_polls(1 << 30)
    monkeypatch.setattr(nccl_library, "TIMEOUT_S", 0.05)
    for function in ("ncclGroupEnd", "ncclCommInitAll"):  # the second call makes new communicators
        with pytest.raises(cr.BackendError, match=rf"NCCL did not end {function} on cuda:0\.\n  given: 0.05 s"):
            NCCL.reduce("sum", value, value)
        assert cuda.fake.fake_live() == 0
    assert unchanged(torch_, value, xs)


def test_each_reason_is_logged_once(cuda, torch_, caplog, monkeypatch):
    """If NCCL cannot be used, a plan gives the result, and the reason is logged at INFO, only once."""

    def run(op="sum", dtype="float32", devices=(0, 1, 2), to=None, logical=None, ops=NCCL, moved=False):
        xs = small(dtype, (6,), len(devices))
        value = put(cuda, torch_, xs, devices[::-1] if moved else devices, logical or names(devices))
        result = ops.reduce(op, value, to or value)
        check(torch_, result, op, xs, (to or value).devices, value)

    def numpy():
        value = cr.PerReplica([np.ones(3)] * 2)
        assert NCCL.reduce("sum", value, value)[1].tolist() == [2, 2, 2]

    def without(candidates=(), number=None):
        monkeypatch.setattr(nccl_library, "_candidates", lambda: candidates)
        nccl_library._open.cache_clear()
        if number:
            cuda.fake.fake_version(number)
        run()

    path = nccl_library._candidates()
    reasons = {
        "not all devices are CUDA devices of this process": numpy,
        "there is only one device": lambda: run(devices=(3,)),
        "several logical devices share a GPU": lambda: run(devices=(0, 0), logical=["cuda:0", "cuda:0#1"]),
        "NCCL needs one source, one destination among": lambda: run(to=on(1, 2)),
        "NCCL's mean of integers is an integer": lambda: run("mean", "int32"),
        "NCCL's minimum and maximum lose NaN": lambda: run("max"),
        "NCCL rounds every addition and product of bfloat16": lambda: run(dtype="bfloat16"),
        "NCCL cannot multiply complex numbers": lambda: run("product", "complex64"),
        "NCCL has no int16": lambda: run(dtype="int16"),
        "NCCL does not plan on the topology of an op": lambda: run(
            ops=cr.AllReduceCrossDeviceOps(topology=cr.Topology.full_mesh(names((0, 1, 2))))
        ),
        "arrays are traced, or not on the devices of their replicas": lambda: run(moved=True),
        "libnccl.so.2 cannot be opened": without,
        "NCCL 2.8.4 is older than 2.10": lambda: without(path, 2804),
        "NCCL 2.9.9 is older than 2.10": lambda: without(path, 20909),
    }
    for reason, case in reasons.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "crossreduce"):
            case()
            case()
        lines = [record.getMessage() for record in caplog.records if "nccl" in record.getMessage().lower()]
        assert len(lines) == 1, (reason, lines)
        assert lines[0].startswith(f'"nccl" plans "auto": {reason}')
        assert collective(cuda) is None


def test_arrays_in_host_memory_and_chosen_algorithms(cuda, torch_):
    """In host memory, "nccl" runs the kernels. ``CommunicationOptions.implementation`` chooses the algorithm."""
    xs = small("float32", (5,), 3)
    with engine_runs() as runs:
        for value in (cr.PerReplica(xs), cr.PerReplica([torch.tensor(x) for x in xs])):
            result = NCCL.reduce("sum", value, value)
            assert np.asarray(result[2]).tolist() == oracle.reduce("sum", xs).tolist()
        assert runs == ["host", "host"]
        value = put(cuda, torch_, xs, (0, 1, 2))
        direct, auto = cr.AllReduceCrossDeviceOps("direct"), cr.AllReduceCrossDeviceOps("auto")
        for ops, implementation in ((NCCL, "ring"), (direct, "nccl"), (auto, "auto")):
            ops.reduce("sum", value, value, cr.CommunicationOptions(implementation=implementation))
        assert runs == ["host", "host", "loop", "loop", "loop"]
        assert collective(cuda) is None
        for ops in (NCCL, auto):
            result = ops.reduce("sum", value, value, cr.CommunicationOptions(implementation="nccl"))
            check(torch_, result, "sum", xs, names((0, 1, 2)), value)
            assert collective(cuda) == "ncclAllReduce"
        assert [x.tolist() for x in NCCL.broadcast(value[1], on(1, 2))] == [xs[1].tolist()] * 2
        assert collective(cuda) == "ncclBroadcast"
    with pytest.raises(cr.ArgumentError, match="results cannot be written into arrays that share memory"):
        NCCL.reduce("sum", value, on(1, 0, 2), out=cr.PerReplica([value[0], value[0], value[2]], names((1, 0, 2))))


CHILD = """
import atexit, ctypes, os, sys
path = sys.argv[1]
fake = ctypes.CDLL(path)  # as torch does
fake.fake_called.restype = ctypes.c_char_p
fake.fake_version(22800)
atexit.register(lambda: print(fake.fake_live(), fake.fake_called().decode().split().count("ncclCommDestroy")))
from crossreduce.engines.nccl_library import Call, library
found = library()
found.run((3, 5), (4 * 4096, 6 * 4096), [])
print(found.version, fake.fake_live(), flush=True)
if os.fork() == 0:
    sys.exit()  # a forked process leaves the communicators alone
os.wait()
"""


def test_the_library_is_found_and_its_communicators_are_destroyed_at_exit(path, tmp_path):
    """NCCL comes from the process, or else a wheel. A process destroys its communicators, a forked child none."""
    mapped = fake_nccl.built(tmp_path, "-Wl,-soname,libnccl.so.2")
    paths = os.environ.get("PYTHONPATH", "")
    with_wheel = os.environ | {"PYTHONPATH": f"{path.parents[3]}{os.pathsep}{paths}"}
    command = [sys.executable, "-c", CHILD, mapped]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, env=with_wheel)
    # The version and 2 live communicators. At exit the child has 2, of which it destroyed 0, and the parent 0 and 2.
    assert ran.stdout.split("\n") == ["2.28.0 2", "2 0", "0 2", ""]
    code = "from crossreduce.engines.nccl_library import library; print(getattr(library(), 'version', library()))"
    for environment, printed in (
        (with_wheel, r"2\.27\.3"),
        (os.environ, "libnccl.so.2 cannot be opened: (?!libnccl).*"),
    ):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert re.fullmatch(printed, ran.stdout.strip())


def test_the_stand_in_reports_misuse(cuda, torch_):
    """The stand-in for NCCL reports every misuse that other tests rely on it to report."""
    a, b = (cuda.put(torch.ones(4), k) for k in (0, 1))
    library, streams = nccl_library.library(), (4096, 8192)

    def call(rank, sent, received, count=4):
        return nccl_library.Call("ncclAllReduce", rank, (sent.data_ptr(), received.data_ptr(), count, 7, 0))

    good = [call(0, a, a), call(1, b, b)]
    misuses = {
        "rank 1 of 2 is missing": (streams, good[:1]),
        "rank 0 of 2 is missing": (streams, [*good, good[1]]),
        "ranks 0 and 1 disagree": (streams, [good[0], call(1, b, b, 3)]),
        "device 1 has another's stream": ((4096, 4096), good),
        "device 1 sends another's": (streams, [good[0], call(1, a, a)]),
        "device 0 sends another's": (streams, [call(0, a, a, 5), good[1]]),
        "device 0 writes another's": (streams, [call(0, a, b), good[1]]),
    }
    for text, (used, calls) in misuses.items():
        with pytest.raises(cr.BackendError, match="invalid usage"):
            library.run((0, 1), used, calls)
        assert text in cuda.fake.fake_report().decode()
        cuda.fake.fake_clear()
    library.run((0, 1), streams, good)
    (communicators,) = library._communicators.values()
    library.close()
    library._communicators[0, 1] = communicators
    with pytest.raises(cr.BackendError, match="invalid usage"):
        library.run((0, 1), streams, good)
    assert "of a destroyed communicator" in cuda.fake.fake_report().decode()
    cuda.fake.fake_reset()
