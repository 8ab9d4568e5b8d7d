"""CuPy arrays, with a stand-in for CuPy (support/standins/cupy) that computes in host memory: nothing here needs a GPU.

The stand-in raises an error if an operation runs while another device is the current one, and lists work that is not
ordered between streams. No test may leave such a fault, an array, or another current device.
"""

import gc
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from command_line import run_python
from paths import SUPPORT
from strategies import DTYPES, OPS, ops_for

import crossreduce as cr
from crossreduce import frameworks
from crossreduce.options import ALGORITHMS

STANDINS = str(SUPPORT / "standins")
PATH = os.pathsep.join([STANDINS, str(Path(cr.__file__).parents[1])])


def forget():
    """Let crossreduce and Python forget CuPy."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        del sys.modules[name]
    sys.modules.pop("crossreduce.frameworks.cupy.arrays", None)
    frameworks.get.cache_clear()
    for kind in [kind for kind, framework in frameworks.KNOWN.items() if framework.name == "cupy"]:
        del frameworks.KNOWN[kind]


@pytest.fixture(scope="module")
def standin():
    """Import the stand-in as ``cupy`` for this module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDINS)
        forget()
        import cupy

        assert cupy.__file__.startswith(STANDINS)
        yield cupy
        forget()


@pytest.fixture
def cupy(standin):
    """Return the stand-in, and check that the test leaves nothing that is not ordered, and no memory."""
    machine = standin._machine
    gc.collect()
    for state in (machine.faults, machine._clocks, machine._host, machine._waits, machine._seen):
        state.clear()
    before = len(machine._blocks)
    yield standin
    gc.collect()
    assert machine.faults == []
    assert len(machine._blocks) == before
    assert standin.cuda.Device().id == 0


@pytest.fixture
def put(cupy):
    """Return a function that puts a NumPy array onto a device."""

    def function(x, device=0):
        with cupy.cuda.Device(device):
            return cupy.asarray(x)

    return function


@pytest.fixture
def get(cupy):
    """Return a function that checks that a value is a CuPy array on a device, and returns it as a NumPy array."""

    def function(x, device=None):
        assert type(x) is cupy.ndarray
        assert device in (None, x.device.id)
        with x.device:
            return cupy.asnumpy(x)

    return function


def same(got, want):
    """Return whether arrays have the same bits. NaNs may differ in sign and payload."""
    want = np.asarray(want)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if got.dtype.kind == "c":
        return same(got.real.copy(), want.real.copy()) and same(got.imag.copy(), want.imag.copy())
    if got.dtype.kind in "fV":
        lost = np.isnan(got)
        return np.array_equal(lost, np.isnan(want)) and got[~lost].tobytes() == want[~lost].tobytes()
    return got.tobytes() == want.tobytes()


def drawn(dtype, shape, rng):
    """Return an array whose sums and products round, or wrap around."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    x = rng.normal(size=shape)
    if kind == "c":  # whole numbers, as the products of others depend on fused multiplications
        return np.asarray(np.round(4 * x) + 1j * np.round(4 * rng.normal(size=shape))).astype(dtype)
    return np.asarray(x > 0 if dtype == "bool" else x).astype(dtype)


@contextmanager
def own_streams(cupy, devices):
    """Make a new stream the current one of each of these devices."""
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(cupy.cuda.Device(device))
            stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        stack.enter_context(cupy.cuda.Device(0))
        yield


def test_every_op_and_dtype_gives_the_bits_of_numpy(cupy, put, get):
    """Each op over each dtype gives NumPy's bits, with all algorithms, on 1 to 8 devices, for any packs and streams."""
    rng = np.random.default_rng(0)
    cases = ((1, 0, 0), (2, 1, 2), (3, 3, 0), (3, 0, 2), (8, 2, 8))  # devices, packs, streams
    for number, algorithm in enumerate(ALGORITHMS):
        for k in (number % 5, (number + 2) % 5):  # two ops
            op, (n, packs, streams) = OPS[k], cases[(number + k) % len(cases)]
            with own_streams(cupy, range(streams)):
                kinds = [(d, s) for d in DTYPES if op in ops_for(d) for s in ((), (0,), (5, 3))]
                batch = [[drawn(*kind, rng) for _ in range(n)] for kind in kinds]
                ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs)
                wanted = ops.batch_reduce(op, [(cr.PerReplica(xs),) * 2 for xs in batch])
                given = [[put(x, k) for k, x in enumerate(xs)] for xs in batch]
                results = ops.batch_reduce(op, [(cr.PerReplica(xs),) * 2 for xs in given])
                for xs, kept, result, host in zip(given, batch, results, wanted, strict=True):
                    assert result.devices == tuple(f"cuda:{k}" for k in range(n))
                    for k, x in enumerate(result):
                        assert same(get(x, k), host[k]), (op, x.dtype, x.shape)
                        assert x.flags.c_contiguous
                        assert x.data.mem.nbytes == x.nbytes
                        assert same(get(xs[k], k), kept[k])  # inputs are not changed
                memory = [x.data.mem for xs in (*given, *results) for x in xs if x.size]
                assert len(set(map(id, memory))) == len(memory)  # nor shared


def test_special_values(put, get):
    """Half types accumulate in float32, integers have float64 means and wrap around, NaN and inf propagate."""
    nan, inf = np.nan, np.inf
    cases = [
        ("mean", "float16", [[40000, 65504], [40000, 65504], [40000, 65504]], [40000, 65504]),
        ("sum", "bfloat16", [[256], [1], [1]], [258]),
        ("mean", "int8", [[127, -128], [127, -128], [1, 1]], [85, -85]),
        ("sum", "uint8", [[200], [100]], [44]),
        ("min", "float32", [[nan, 1, -inf], [1, nan, 2]], [nan, nan, -inf]),
        ("max", "bfloat16", [[nan, 1, inf], [1, nan, 2]], [nan, nan, inf]),
        ("mean", "complex64", [[complex(nan, 3)], [complex(1, inf)]], [complex(nan, inf)]),
        ("sum", "float32", [[1e-40]] * 2, [0]),  # CuPy's own kernels flush it
    ]
    trees = [{"w": put(np.full(3, k), k), "n": [float(k), np.arange(2) * k]} for k in range(3)]
    for k, tree in enumerate(cr.all_reduce(trees)):  # arrays of NumPy and numbers stay in their framework
        assert get(tree["w"], k).tolist() == [3, 3, 3]
        assert (tree["n"][0], tree["n"][1].tolist()) == (3, [0, 3])
    for op, dtype, rows, wanted in cases:
        result_dtype = "float64" if op == "mean" and dtype == "int8" else dtype
        for x in cr.all_reduce([put(np.array(row, dtype), 0) for row in rows], op):
            assert same(get(x, 0), np.array(wanted, result_dtype)), (op, dtype)


def test_weighted_means_give_the_bits_of_numpy(put, get):
    """A weighted mean has NumPy's bits on every device, for each dtype, algorithm and kind of weights, also in given
    arrays. A replica of weight 0 is not read. Sparse arrays have weights, too. Inputs are not changed."""
    rng = np.random.default_rng(0)
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "int8", "int64"):
        for weights in ([64, 64, 17], [0.1, 3.5, 1e-3], [1, 0, 2], [7, 7, 7]):
            xs = [drawn(dtype, (5, 3), rng) for _ in weights]
            if weights[1] == 0 and xs[1].dtype.kind in "fV":
                xs[1][:] = np.nan
            given = [put(x, k) for k, x in enumerate(xs)]
            for algorithm in ("auto", "ring", "one_device"):
                ops = cr.AllReduceCrossDeviceOps(algorithm)
                wanted = cr.all_reduce(xs, "mean", cross_device_ops=ops, weights=weights)
                for k, x in enumerate(cr.all_reduce(given, "mean", cross_device_ops=ops, weights=weights)):
                    assert same(get(x, k), wanted[k]), (dtype, weights, algorithm)
            out = [put(np.zeros_like(wanted[0]), k) for k in range(3)]
            cr.all_reduce(given, "mean", cross_device_ops=ops, weights=weights, out=out)
            assert all(same(get(x, k), wanted[k]) for k, x in enumerate(out))
            assert all(same(get(x, k), before) for k, (x, before) in enumerate(zip(given, xs, strict=True)))
    slices = [cr.IndexedSlices(put(np.full((1, 2), k + 1.0), k), put(np.array([k]), k), (4, 2)) for k in range(2)]
    found = cr.all_reduce(slices, "mean", weights=[1, 3])[1]
    assert get(found.values, 1).tolist() == [[0.25, 0.25], [1.5, 1.5]]


def test_layouts_and_logical_devices(cupy, put, get):
    """Views with any strides, several per GPU, are reduced. Several arrays on one GPU are on its logical devices."""
    base = np.arange(24.0).reshape(4, 6)
    views = [lambda x: x.T, lambda x: x[::2, ::3], lambda x: x[1:3], lambda x: x[::-1], lambda x: x[2, 3]]
    places = (0, 0, 3, 0, 3)
    for view in views:
        given = [view(put(base * 10**k, place)) for k, place in enumerate(places)]  # their sum: base * 11111
        value = cr.PerReplica(given)
        assert value.devices == ("cuda:0", "cuda:0#1", "cuda:3", "cuda:0#2", "cuda:3#1")
        for algorithm in ("ring", "hierarchical_copy", "direct"):
            result = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value)
            for x, place in zip(result, places, strict=True):
                assert same(get(x, place), np.ascontiguousarray(view(base * 11111)).reshape(view(base).shape))
        moved = cr.PerReplica(given, [f"cuda:{place}#5" for place in range(5)])  # strided arrays are copied first
        for place, x in enumerate(cr.AllReduceCrossDeviceOps("ring").reduce("sum", moved, moved)):
            assert get(x, place).tolist() == view(base * 11111).tolist()
    assert cr.ReductionToOneDevice().reduce("max", value, "cuda:7#2")[0].device.id == 7
    one = cr.HierarchicalCopyAllReduce().broadcast(given[1], cr.PerReplica(given))
    assert [get(x, k).tolist() for x, k in zip(one, places, strict=True)] == [view(base).item() * 10] * 5
    rows = cr.PerReplica([put(np.full((k, 2), k), k) for k in range(3)])
    (joined,) = cr.HierarchicalCopyAllReduce().gather(rows, "cuda:1", 0)
    assert get(joined, 1).tolist() == [[1, 1], [2, 2], [2, 2]]
    with cupy.cuda.Device(4):  # the current device does not matter
        (x,) = cr.ReductionToOneDevice().reduce("sum", cr.PerReplica(given), "cuda:2")
        assert cupy.cuda.Device().id == 4
    assert get(x, 2) == view(base) * 11111


def test_out(cupy, put, get):
    """Results are written into given arrays, or in place. If one cannot be written, none is, and an error is raised."""
    for dtype, shape in (("float16", (5, 3)), ("int64", ())):
        given = [put(np.full(shape, k + 1, dtype), k) for k in range(3)]
        wanted = np.full(shape, 2, "float64" if dtype == "int64" else dtype)
        out = [put(np.zeros_like(wanted), k) for k in range(3)]
        found = cr.all_reduce(given, "mean", out=out)
        assert all(x is y and same(get(x, k), wanted) for k, (x, y) in enumerate(zip(found, out, strict=True)))
        found = cr.all_reduce(given, "sum", out=given)
        assert all(x is y and same(get(x), np.full(shape, 6, dtype)) for x, y in zip(found, given, strict=True))

    class Own(cupy.ndarray):
        pass

    given = [put(np.ones((2, 2)), k) for k in range(2)]
    assert get(cr.all_reduce([x.view(Own) for x in given])[0], 0).tolist() == [[2, 2], [2, 2]]
    first, whole = put(np.zeros((2, 2)), 0), put(np.zeros((3, 2)), 1)
    needs = "results need CuPy arrays in C order that are on their destination"
    for wrong, kind, words in (
        (put(np.zeros((2, 2)), 0), cr.UnsupportedError, rf"{needs}(.|\n)*on cuda:0, for cuda:1(.|\n)*Device\(1\)"),
        (put(np.zeros((2, 2)), 1).T, cr.UnsupportedError, rf"{needs}(.|\n)*not in C order"),
        (put(np.zeros((2, 2)), 1).view(Own), cr.UnsupportedError, rf"{needs}(.|\n)*Own float64\[2, 2\]"),
        (np.zeros((2, 2)), cr.MismatchError, r"component 1 of out: numpy float64\[2, 2\](.|\n)*cupy float64\[2, 2\]"),
        (put(np.zeros((2, 2), "f4"), 1), cr.MismatchError, r"component 1 of out: cupy float32\[2, 2\]"),
    ):
        with pytest.raises(kind, match=words):
            cr.all_reduce(given, out=[first, wrong])
        assert not get(first).any()
    overlapping = [put(np.ones((2, 2)), 0), whole[:2]]
    with pytest.raises(cr.ArgumentError, match="share memory"):
        cr.all_reduce(overlapping, out=[first, whole[1:]])


def test_sparse(put, get):
    """Slices are concatenated in replica order. If a replica is dense, the slices of a row are added in that order."""
    rng = np.random.default_rng(0)
    for dtype in DTYPES[:-1]:
        rows = [rng.integers(0, 4, 9), np.array([], "int64"), np.array([3, 3, 3], "uint64")]
        slices = [drawn(dtype, (len(r), 2), rng) for r in rows]
        dense = drawn(dtype, (4, 2), rng)

        def value(array, dense, slices=slices, rows=rows):
            parts = [
                cr.IndexedSlices(array(s, k), array(r, k), (4, 2))
                for k, (s, r) in enumerate(zip(slices, rows, strict=True))
            ]
            return cr.PerReplica(parts if dense is None else [*parts, array(dense, 3)])

        for op in ("sum", "mean"):
            for mixed in (None, dense):
                ours, theirs = value(put, mixed), value(lambda x, _: x, mixed)
                ops = cr.AllReduceCrossDeviceOps("direct")
                result, wanted = ops.reduce(op, ours, ours), ops.reduce(op, theirs, theirs)
                for k, (x, y) in enumerate(zip(result, wanted, strict=True)):
                    if mixed is not None:
                        assert same(get(x, k), y), (dtype, op)
                        continue
                    assert type(x) is cr.IndexedSlices
                    assert x.dense_shape == (4, 2)
                    assert same(get(x.values, k), y.values)
                    assert same(get(x.indices, k), y.indices)
    bad = cr.IndexedSlices(put(np.ones((2, 2)), 0), put(np.array([0, 4]), 0), (4, 2))
    with pytest.raises(cr.ArgumentError, match=r"outside its dense shape(.|\n)*0 to 4(.|\n)*0 to 3"):
        cr.all_reduce([bad, put(np.ones((4, 2)), 1)])


def test_bad_input(cupy, put, monkeypatch):
    """Errors name the problem. Replicas of CuPy beside those of NumPy are refused."""
    x = put(np.ones(2), 0)
    foreign = type("csr_matrix", (), {"__module__": "cupyx.scipy.sparse._csr", "shape": (2,)})()
    half = put(np.ones(2, "bfloat16"), 0)
    cases = [
        (lambda: cr.all_reduce([put(np.ones(2, bool)), put(np.ones(2, bool))]), cr.UnsupportedError, "sum of bools"),
        (lambda: cr.all_reduce([x, put(np.ones(3), 1)]), cr.MismatchError, r"cuda:1: float64\[3\]"),
        (lambda: cr.all_reduce([x, foreign], devices=["cuda:0", "cuda:1"]), cr.UnsupportedError, "toarray"),
        (lambda: cr.ReductionToOneDevice().reduce("sum", x, "cuda:8"), cr.DeviceError, 'cuda:8(.|\n)*"cuda:0"'),
        (lambda: cr.ReductionToOneDevice().reduce("sum", x, "cpu:0"), cr.DeviceError, "only be on CUDA devices"),
        (lambda: cr.ReductionToOneDevice().reduce("sum", x, "host1/cuda:0"), cr.DeviceError, "of this process"),
        (lambda: cr.all_reduce([put(np.ones(2, "complex64"))], "max"), cr.UnsupportedError, "max of complex"),
        (lambda: cr.MirroredStrategy(["cpu:0"]).split(x), cr.DeviceError, "only be on CUDA devices"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    with pytest.raises(cr.MismatchError, match="different frameworks"):
        cr.all_reduce([np.ones(2), x], devices=["cuda:0", "cuda:1"])
    monkeypatch.setattr(sys.modules["crossreduce.frameworks.cupy.arrays"], "_HAS_BFLOAT16", False)  # as in CuPy 13
    with pytest.raises(cr.UnsupportedError, match=r"CuPy 14.2.0 cannot compute with bfloat16(.|\n)*CuPy 14 or newer"):
        cr.all_reduce([half, half])


def test_strategy(cupy, put, get):
    """Replicas run on their devices and the caller's streams. All calls of the strategy work on every device."""
    assert cr.MirroredStrategy().devices == tuple(f"cuda:{k}" for k in range(8))
    strategy, places, n = cr.MirroredStrategy(["cuda:0", "cuda:0#1", "cuda:5"]), [0, 0, 5], 3
    with own_streams(cupy, {0, 5}):
        with strategy.scope():
            weights = cr.Variable(put(np.zeros(3), 5), aggregation="sum")
            seen = cr.Variable(put(np.array(5), 2), synchronization="on_read", aggregation="sum")
        given = put(np.full(3, 1.5), 0)
        weights.assign(given)
        with given.device:
            given += 1  # this does not change the variable, which has copies
        host = np.arange(n * 6.0).reshape(n * 2, 3)
        streams = [cupy.cuda.get_current_stream(place) for place in places]

        def step(x):
            context = cr.get_replica_context()
            k = context.replica_id_in_sync_group
            assert cupy.cuda.Device().id == places[k]
            assert cupy.cuda.get_current_stream() is streams[k]
            before = weights.value()
            weights.assign_sub(x[0] * 0.25)
            seen.assign(1 + k)
            return context.all_reduce("mean", {"x": x[0], "k": k})["x"], context.all_gather(x, 0), before

        shares = strategy.split(put(host, 2))
        assert [x.device.id for x in shares] == places
        means, rows, before = strategy.run(step, args=(shares,))
        for k, place in enumerate(places):
            assert same(get(means[k], place), host[::2].mean(0))  # each replica has two rows, and used the first
            assert same(get(rows[k], place), host)
            assert get(weights[k], place).tolist() == (1.5 - 0.25 * host[::2].sum(0)).tolist()
            assert get(before[k], place).tolist() == [1.5] * 3
        assert get(seen.value()) == 1 + 2 + 3
        for op, axis, wanted in (("mean", 0, host.mean(0)), ("max", 1, host.reshape(n, 2, 3).max((0, 2)))):
            assert same(get(strategy.reduce(op, shares, axis=axis), 0), wanted)
        assert get(strategy.gather(shares, 0), 0).tolist() == host.tolist()
        assert [x.device.id for x in strategy.replicate({"w": shares[0]})["w"]] == places


def test_cupy_is_imported_at_the_first_array_only():
    """``import crossreduce`` and reductions of NumPy arrays do not import CuPy. ``train`` lists its devices.

    Where CuPy finds no GPU, it has no accelerators, strategies use the host, and devices raise an error.
    """
    code = """
import sys, crossreduce as cr, numpy as np
cr.all_reduce([np.ones(2)] * 2)
assert "cupy" not in sys.modules
from crossreduce.cli.train.trainers import available_devices
from crossreduce.frameworks import get
assert available_devices("cupy") == "cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5, cuda:6, cuda:7"
sys.modules["crossreduce.frameworks.cupy.arrays"]._count.cache_clear()
sys.modules["cupy"]._machine.DEVICES = 0
assert get("cupy").accelerators() == ()
assert cr.MirroredStrategy().devices == ("cpu:0",)
total = cr.MirroredStrategy(2).run(lambda: cr.get_replica_context().all_reduce("sum", np.ones(1)))
assert [x.tolist() for x in total] == [[2], [2]]
try:
    get("cupy").require(("cuda:0",))
except cr.DeviceError as error:
    print(error)
"""
    ran = run_python(code, PYTHONPATH=PATH)
    assert "a machine with a GPU" in ran.stdout, ran.stderr


def test_the_command_line(crossreduce, cupy, tmp_path):
    """``train`` and ``bench`` run with CuPy arrays. ``info`` lists the devices."""
    options = ("--epochs", 1, "--output", tmp_path / "run.json")
    code, _, error = crossreduce("train", "--framework", "cupy", "--devices", "cuda:0-2", *options)
    assert (code, error) == (0, "")
    ours = json.loads((tmp_path / "run.json").read_text())
    assert crossreduce("train", "--devices", "3", *options)[0] == 0
    theirs = json.loads((tmp_path / "run.json").read_text())
    assert ours["framework_version"] == "14.2.0"
    assert np.allclose(ours["losses"], theirs["losses"], rtol=1e-5)
    code, _, error = crossreduce("train", "--framework", "cupy", "--devices", "cpu:0-1")
    assert code
    assert "only be on CUDA devices" in error
    sizes = ("-b", "1K", "-e", "2K", "-n", 2)
    code, out, error = crossreduce("bench", "--framework", "cupy", "--devices", "cuda:0-1", *sizes)
    assert (code, error) == (0, "")
    assert "2048" in out
