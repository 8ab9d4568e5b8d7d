"""Prepared calls: a call like an earlier one runs in compiled code, and gives the same results as in Python."""

import copy
import dataclasses
import gc
import importlib
import pickle
import sys
import threading
import tracemalloc
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from pairs import pairs

import crossreduce as cr
from crossreduce import kernels
from crossreduce.engines.host import array_memory
from crossreduce.engines.host.prepared import compiled_module, new_calls

pytestmark = pytest.mark.skipif(kernels.instruction_set() == "numpy", reason="prepared calls need the compiled kernels")

DTYPES = ("float32", "float16", "bfloat16", "int8", "complex64", "bool")
OPS = {"float32": ("sum", "mean", "MAX", "product"), "int8": ("mean", "sum"), "bool": ("max", "product")}
SHAPES = ((), (1,), (3, 0), (5, 7), (40_000,))  # the last one uses memory of the pool


def arrays(framework, dtype, shape, n, seed):
    """Return n different arrays."""
    draw = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    low, high = (0, 2) if dtype == "bool" else (-5, 6)
    made = [np.asarray(draw.integers(low, high, shape)) for _ in range(n)]
    if framework == "numpy":
        return [x.astype(kind).reshape(shape) for x in made]
    torch = pytest.importorskip("torch")
    return [torch.empty(shape, dtype=getattr(torch, dtype)).copy_(torch.from_numpy(x)) for x in made]


def bits(x):
    """Return everything about an array: class, dtype, shape, layout, whether it is writable, and its bytes."""
    if isinstance(x, np.ndarray):
        return type(x), x.dtype, x.shape, x.strides, x.flags.writeable, x.tobytes()
    raw = x.reshape(-1).view(sys.modules["torch"].uint8).numpy().tobytes() if x.numel() else b""
    return type(x), x.dtype, tuple(x.shape), x.stride(), x.requires_grad, raw


def copied(x):
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def equal(found, expected):
    assert type(found) is type(expected)
    assert found.devices == expected.devices
    assert [bits(x) for x in found.values] == [bits(x) for x in expected.values]
    return True


def cases():
    """Return dtypes, ops, shapes and numbers of replicas."""
    ops = [(dtype, op) for dtype in DTYPES for op in OPS.get(dtype, ("sum",))]
    return [(dtype, op, shape, n) for (dtype, op), shape, n in pairs(ops, SHAPES, (1, 2, 5))]


def in_python(ops):
    """Forget the prepared calls, so that the next one takes the path in Python."""
    ops._calls = None
    return ops


def prepared(ops, method, *arguments, options=None, out=None):
    """Return what a prepared call returns, in compiled code, or ``None`` if no such call is prepared."""
    return getattr(ops._calls, method)(*arguments, options, out)


KINDS = (partial(cr.AllReduceCrossDeviceOps, "ring", 2), partial(cr.ReductionToOneDevice, "cpu:1"))
for_ops = pytest.mark.parametrize(("framework", "kind"), list(product(("numpy", "torch"), KINDS)))


def cases_of(framework, kind):
    """Yield the name of a reduction, an op that prepares calls, one that runs in Python, and three values."""
    for dtype, op, shape, n in cases():
        if (framework, op, dtype) != ("torch", "mean", "int8"):  # torch's default dtype, which may change: not prepared
            yield op, kind(), kind(), *(cr.PerReplica(arrays(framework, dtype, shape, n, seed)) for seed in (1, 2, 3))


@for_ops
def test_a_prepared_reduce_gives_the_result_of_python(framework, kind):
    """A prepared reduce to the value's devices, to one device or to repeated devices gives the result of Python."""
    for op, ops, python, first, second, _ in cases_of(framework, kind):
        for to in (None, "cpu:0", cr.PerReplica([0, 0], ["cpu:3", "cpu:0"])):  # None: the devices of the value
            ops.reduce(op, first, first if to is None else to)  # prepares the next call
            where = second if to is None else to
            expected = in_python(python).reduce(op, second, where)
            assert equal(prepared(ops, "reduce", op, second, where), expected)


@for_ops
def test_a_prepared_batch_reduce_gives_the_results_of_python(framework, kind):
    """A prepared batch_reduce gives the results of Python, in new arrays or in ``out``, also if values repeat."""
    for op, ops, python, first, second, third in cases_of(framework, kind):
        of_second, of_third = (in_python(python).reduce(op, value, value) for value in (second, third))
        ops.batch_reduce(op, [(first, first)] * 3)  # prepares the next call
        batch = [(value, value) for value in (second, third, second)]
        assert all(map(equal, prepared(ops, "batch_reduce", op, batch), [of_second, of_third, of_second]))
        outs = [cr.PerReplica(list(map(copied, of_second.values))) for _ in range(3)]
        ops.batch_reduce(op, batch, out=outs)  # prepares a call with ``out``
        changed = [(third, third), (third, third), (second, second)]  # the first result differs from that in ``outs``
        found = prepared(ops, "batch_reduce", op, changed, out=outs)
        assert all(a is b for result, out in zip(found, outs, strict=True) for a, b in zip(result, out, strict=True))
        assert all(map(equal, found, [of_third, of_third, of_second]))


@for_ops
def test_a_prepared_all_reduce_and_one_in_place_give_the_results_of_python(framework, kind):
    """A prepared all_reduce of two arrays per replica, and a prepared reduce in place, give the results of Python."""
    for op, ops, python, first, second, third in cases_of(framework, kind):
        of_second, of_third = (in_python(python).reduce(op, value, value) for value in (second, third))
        if bits(of_second[0])[1] != bits(second[0])[1]:  # a mean of integers, whose dtype is not that of its sources
            continue
        rows = [[x, y] for x, y in zip(map(copied, second), map(copied, third), strict=True)]
        cr.all_reduce([[x, x] for x in first], op, cross_device_ops=ops)  # prepares the next call
        rows = prepared(ops, "all_reduce", cr.ReduceOp(op), rows, second.devices)
        expected = [[bits(a), bits(b)] for a, b in zip(of_second, of_third, strict=True)]
        assert [[bits(x) for x in row] for row in rows] == expected
        ops.reduce(op, cr.PerReplica(list(map(copied, first))), first, out=first)  # prepares a call with ``out``
        ops.reduce(op, first, first, out=first)
        assert equal(prepared(ops, "reduce", op, third, third, out=third), of_third)


def test_torch_means_of_integers_are_not_prepared():
    """A mean of integers has torch's default dtype, which may change between calls, so the call is not prepared."""
    value, ops = cr.PerReplica(arrays("torch", "int8", (5, 7), 2, seed=1)), cr.AllReduceCrossDeviceOps("ring")
    ops.reduce("mean", value, value)
    assert prepared(ops, "reduce", "mean", value, value) is None


@pytest.fixture
def probes(torch_):
    """Return tensors that show how torch's tensors lie in memory (see ``layout_probes``)."""
    assert array_memory("torch") is not None  # the compiled code reads tensors from now on
    return importlib.import_module("crossreduce.frameworks.torch.host_memory").layout_probes()


@pytest.fixture(params=["in memory", "by torch"])
def read_tensors(request, probes):
    """Let compiled code read tensors where they are in memory, or with torch's functions, as for an unknown layout."""
    use, is_known = compiled_module().use_torch_layout, request.param == "in memory"
    assert use(*(probes if is_known else ([], []))) is is_known
    yield request.param
    assert use(*probes)


def test_an_unexpected_layout_of_tensors_is_noticed(probes):
    """Tensors are read with torch's functions if one fact about one of them is not where it is expected in memory."""
    plain, special = probes
    use = compiled_module().use_torch_layout
    assert len(plain) > 15
    for number, (tensor, *facts) in enumerate(plain):
        for k in range(len(facts)):
            other = tensor, *facts[:k], facts[k] + 8, *facts[k + 1 :]
            assert not use([*plain[:number], other, *plain[number + 1 :]], special), (number, k)
    assert not use(plain, [*special, plain[0][0]])
    assert not use([], [])
    assert not use([(1, 2)], special)
    assert use(plain, special)


def test_tensors_whose_memory_is_not_simply_theirs(torch_, read_tensors):
    """A prepared call refuses parts of freed memory, and does not write into the memory that a lazy clone shares.

    It counts each write into a tensor, so that autograd notices it, also through the tensor's views.
    """
    torch, offset = torch_.torch, 3 << 20
    xs, outs = [torch.ones(3, 4), torch.ones(3, 4)], [torch.zeros(3, 4), torch.zeros(3, 4)]
    row = outs[0][1]
    for turn in range(3):
        assert [x.tolist() for x in cr.all_reduce(xs)] == [[[2.0] * 4] * 3] * 2
        cr.all_reduce(xs, out=outs)
        assert (outs[0]._version, row._version, outs[1]._version, xs[0]._version) == (turn + 1, turn + 1, turn + 1, 0)
    original = torch.zeros(3, 4)
    cr.all_reduce(xs, out=[torch._lazy_clone(original), outs[1]])
    assert original.tolist() == [[0.0] * 4] * 3
    large = torch.ones(offset + 12)
    lost = large[offset:].view(3, 4)
    cr.all_reduce([lost, xs[1]])
    large.untyped_storage().resize_(0)
    for given, out in (([lost, xs[1]], None), (xs, [lost, outs[1]])) if read_tensors == "in memory" else ():
        with pytest.raises(cr.UnsupportedError, match=r"freed|no memory"):
            cr.all_reduce(given, out=out)


def test_only_what_was_prepared_is_recognised(torch_, read_tensors):
    """A call that differs from the prepared ones takes the path in Python, which gives the right result or an error."""
    torch, ops = torch_.torch, cr.AllReduceCrossDeviceOps("direct")
    x, y = np.arange(12.0).reshape(3, 4), np.ones((3, 4))
    value, out = cr.PerReplica([x, y]), cr.PerReplica([np.empty((3, 4)), np.empty((3, 4))])
    tensors = [torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)]
    ops.reduce("sum", value, value)
    ops.reduce("sum", value, value, out=out)
    ops.reduce("sum", cr.PerReplica(tensors), cr.PerReplica(tensors))
    torch_out = cr.PerReplica([torch.empty(3, 4), torch.empty(3, 4)])
    ops.reduce("sum", cr.PerReplica(tensors), cr.PerReplica(tensors), out=torch_out)

    def found(xs, to=None, op="sum", options=None, given=None):
        given_value = xs if isinstance(xs, cr.PerReplica) else cr.PerReplica(xs)
        to = given_value if to is None else to
        return prepared(ops, "reduce", op, given_value, to, options=options, out=given)

    class Array(np.ndarray):
        pass

    twice = torch.arange(24.0).reshape(3, 8)
    shifted, read_only = np.zeros(13), np.empty((3, 4))
    read_only.flags.writeable = False
    with torch.inference_mode():
        frozen = torch.empty(3, 4)
    tracked = torch.ones(3, 4, requires_grad=True)
    other = {
        "a transposed array": [np.asfortranarray(x), y],
        "a strided array": [np.arange(24.0).reshape(3, 8)[:, ::2], y],
        "another byte order": [x.astype(">f8"), y.astype(">f8")],
        "another dtype": [x.astype("f4"), y.astype("f4")],
        "different dtypes": [x, y.astype("f4")],
        "another shape": [x.T.copy(), y.T.copy()],
        "a subclass": [x.view(Array), y],
        "more replicas": [x, y, x],
        "a scalar": [np.float64(1), np.float64(2)],
        "two frameworks": [x, tensors[1]],
        "a strided tensor": [twice[:, ::2], tensors[1]],
        "a negated view": [torch.view_as_complex(torch.ones(3, 4, 2)).conj().imag, tensors[1]],
        "a gradient": [tracked, tensors[1]],
        "a parameter": [torch.nn.Parameter(tensors[0]), tensors[1]],
        "a sparse tensor": [tensors[0].to_sparse(), tensors[1].to_sparse()],
    }
    assert found(value) is not None
    assert found(tensors) is not None
    assert [name for name, xs in other.items() if found(xs) is not None] == []
    with torch.no_grad():
        sums = [ops.reduce("sum", cr.PerReplica([twice[:, ::2], tensors[1]]), "cpu:0")[0]]
        sums += [ops.reduce("sum", cr.PerReplica(other["a negated view"]), "cpu:0")[0]]
    assert sums[0].tolist() == (twice[:, ::2] + 1).tolist()
    assert sums[1].tolist() == [[0.0] * 4] * 3
    assert found(value, op="SUM") is not None
    assert found(value, op=cr.ReduceOp.SUM) is not None
    for changed in (
        {"op": "max"}, {"op": "no such op"}, {"op": ["sum"]}, {"to": "cpu:0"}, {"to": "no such device"}, {"to": x},
        {"options": cr.CommunicationOptions(bytes_per_pack=8)}, {"options": []}, {"given": []},
        {"given": cr.PerReplica([x + 0, x + 0], ["cpu:1", "cpu:0"])}, {"given": cr.PerReplica([x + 0, x.astype("f4")])},
        {"given": cr.PerReplica([x + 0, np.empty((4, 3))])}, {"given": cr.PerReplica([x + 0, read_only])},
        {"given": cr.PerReplica([y + 0] * 2)}, {"given": cr.PerReplica([x + 0, np.asfortranarray(x)])},
        {"given": cr.PerReplica([shifted[:12].reshape(3, 4), shifted[1:].reshape(3, 4)])},
    ):  # fmt: skip
        assert found(value, **changed) is None, changed
    assert found(value, given=out) is not None
    assert found([x, shifted[1:].reshape(3, 4)], given=cr.PerReplica([shifted[:12].reshape(3, 4), x])) is None
    for given in ([frozen, frozen.clone()], [torch.empty(4, 3).T, torch.empty(3, 4)], [tracked, torch.empty(3, 4)]):
        assert found(tensors, given=cr.PerReplica(given)) is None
    assert found(tensors, given=torch_out) is not None
    seen = []
    torch.func.vmap(lambda row: seen.append(found(tensors)) or row)(tensors[0])
    assert seen == [None]
    with pytest.raises(cr.UnsupportedError, match="read-only"):
        ops.reduce("sum", value, value, out=cr.PerReplica([x + 0, read_only]))


def test_calls_without_devices_differ_by_their_replicas():
    """Calls with different numbers of replicas use different prepared calls, and each gives the right sums."""
    ops = cr.AllReduceCrossDeviceOps("direct")
    for _ in range(3):
        for replicas in (2, 5, 3):
            results = cr.all_reduce([np.ones(4)] * replicas, cross_device_ops=ops)
            assert [x.tolist() for x in results] == [[replicas] * 4] * replicas
            row = [[np.ones(4)]] * replicas
            assert prepared(ops, "all_reduce", cr.ReduceOp.SUM, row, None)[1][0].tolist() == [replicas] * 4
            assert prepared(ops, "all_reduce", cr.ReduceOp.SUM, [*row, *row], None) is None  # twice as many replicas


@dataclasses.dataclass(frozen=True)
class Frozen(cr.ReductionToOneDevice):
    """An op that does not allow attributes to be set."""

    _root: str = "cpu:0"
    _accumulate: None = None


def test_unusual_ops_and_options():
    """A subclass's own method that reduces is called each time. Calls of a frozen subclass are prepared. Calls whose
    options have no hash are not prepared."""
    calls, value = [], cr.PerReplica([np.ones(3)] * 2)

    class Watched(cr.AllReduceCrossDeviceOps):
        def batch_reduce_implementation(self, *arguments):
            calls.append(arguments)
            return super().batch_reduce_implementation(*arguments)

    class Unhashable(cr.CommunicationOptions):
        __hash__ = None

    plain, frozen = cr.AllReduceCrossDeviceOps(), Frozen()
    for ops, options in ((Watched("ring"), None), (plain, Unhashable()), (frozen, None)):
        for _ in range(3):
            assert ops.reduce("sum", value, "cpu:0", options)[0].tolist() == [2.0] * 3
    assert len(calls) == 3
    assert prepared(plain, "reduce", "sum", value, "cpu:0", options=Unhashable()) is None
    assert prepared(frozen, "reduce", "sum", value, "cpu:0") is not None


def test_ops_with_prepared_calls_are_copied_and_pickled():
    """Copies of ops, and of strategies with ops, start without prepared calls, and reduce correctly."""
    value = cr.PerReplica([np.ones(3)] * 2)
    for ops in (cr.AllReduceCrossDeviceOps("direct"), cr.ReductionToOneDevice(), Frozen()):
        ops.reduce("sum", value, "cpu:0")
        assert ops._calls is not None
        strategy = cr.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        copied = [copy.deepcopy(ops), pickle.loads(pickle.dumps(ops)), copy.deepcopy(strategy).cross_device_ops]
        for made in copied:
            assert made._calls is not ops._calls
            for _ in range(2):
                assert made.reduce("sum", value, "cpu:0")[0].tolist() == [2.0] * 3


def test_an_error_of_a_prepared_call_writes_nothing(monkeypatch):
    """If the number of threads is invalid, a prepared call raises the error of a first call, and writes nothing."""
    value = cr.PerReplica([np.ones(1 << 20, "float32") for _ in range(2)])
    ops = cr.AllReduceCrossDeviceOps("direct")
    ops.reduce("sum", value, value, out=value)
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "many")
    with pytest.raises(cr.ArgumentError, match="CROSSREDUCE_NUM_THREADS"):
        ops.reduce("sum", value, value, out=value)
    assert value[0][0] == 2


def test_threads_that_prepare_and_run_calls():
    """Threads that use one op at once, with more kinds of arrays than are kept, get their own results."""
    ops, failures = cr.AllReduceCrossDeviceOps("direct"), []

    def work(number):
        for step in range(500):
            size = 1 + (number * 500 + step) % 1699
            value = cr.PerReplica([np.full(size, float(number)), np.full(size, 1.0)])
            results = [ops.reduce("sum", value, "cpu:0")[0].tolist() for _ in range(2)]
            if results != [[number + 1.0] * size] * 2:
                failures.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_prepared_calls_keep_nothing():
    """Prepared calls keep no arrays and no results, and leave reference counts unchanged."""
    ops, xs = cr.AllReduceCrossDeviceOps("direct"), [np.ones(100) for _ in range(3)]
    value, out = cr.PerReplica(xs), cr.PerReplica([np.empty(100) for _ in range(3)])
    wrong = cr.PerReplica([np.ones(100), np.ones(100), np.ones(101)[1:][::-1]])

    def step():
        ops.reduce("sum", value, value)
        ops.reduce("sum", value, value, out=out)
        ops.batch_reduce("mean", [(value, "cpu:0")] * 3)
        cr.all_reduce([[x, x] for x in xs], cross_device_ops=ops)
        assert prepared(ops, "reduce", "sum", wrong, wrong) is None

    counted = [*xs, *out.values, xs[0].dtype, value.devices, cr.Mirrored, *wrong.values]
    for _ in range(3):
        step()
    gc.collect()
    before = list(map(sys.getrefcount, counted))
    tracemalloc.start()
    try:
        memory = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            step()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - memory < 2000
    finally:
        tracemalloc.stop()
    assert list(map(sys.getrefcount, counted)) == before
    calls = new_calls()
    with pytest.raises(TypeError, match="5 arguments expected, 1 given"):
        calls.reduce("sum")
    assert calls.all_reduce(cr.ReduceOp.SUM, [], (), None, None) is None
    with pytest.raises(ValueError, match="a row must be a tuple of arrays"):
        calls.add(cr.ReduceOp.SUM, None, ("cpu:0",), ("cpu:0",), False, [xs], [xs], False, [])


def test_one_overlap_among_many_arrays_is_found():
    """Among hundreds of results, in any order and far apart in memory, two that share a byte are found every time."""
    rng, count = np.random.default_rng(0), 150
    areas = [np.zeros(1 << 12, "int8"), np.zeros(1 << 16, "int8"), np.zeros(1 << 25, "int8")]
    rows = [[np.ones(12, "int8") for _ in range(count)] for _ in range(2)]
    for _ in range(30):
        places = [(k, 12 * at) for k, area in enumerate(areas) for at in rng.choice(area.size // 12 - 1, 100, False)]
        rng.shuffle(places)
        made = [areas[k][at : at + 12] for k, at in places]
        out = [made[:count], made[count:]]
        for _ in range(2):  # the second call is prepared
            result = cr.all_reduce(rows, "sum", out=out)
            assert all((x == 2).all() for row in result for x in row)
        (k, at), other = places[7], rng.integers(count)
        out[1][other] = areas[k][at + 11 : at + 23]  # shares the last byte of out[0][7]
        with pytest.raises(cr.ReductionError, match="memory"):
            cr.all_reduce(rows, "sum", out=out)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_one_array_per_replica_needs_no_list(name, request, monkeypatch):
    """A repeated all_reduce of bare arrays, not lists, runs in compiled code. Its results are bare arrays, too."""
    library = request.getfixturevalue(f"{name}_")
    xs = library.arrays([np.arange(5.0) + k for k in range(3)])
    out = library.arrays([np.zeros(5) for _ in range(3)])
    reduce = partial(cr.all_reduce, xs, "sum", cross_device_ops=cr.AllReduceCrossDeviceOps())
    for call in range(2):
        for found in reduce(), reduce(out=out):
            assert [library.to_numpy(x).tolist() for x in found] == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3
        assert all(a is b for a, b in zip(found, out, strict=True))
        if call == 0:
            monkeypatch.setattr("crossreduce.reduction.trees.flatten_trees", None)  # calls in Python fail from now on
