"""The JAX framework: devices, tracing, deletion, XLA's arithmetic, x64 and sparse arrays."""

import functools

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import frameworks as library

pytestmark = pytest.mark.usefixtures("jax_")


@pytest.fixture(scope="module")
def jax(jax_):
    return jax_.jax


@pytest.fixture(scope="module")
def framework(jax_):
    return library.get("jax")


def random(n, shape, dtype="float32"):
    rng = np.random.default_rng(n)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(n)]


def test_results_are_committed_where_they_belong(jax, jax_):
    """Each component is on its destination's device only, and is committed to it, whatever the default device is."""
    for algorithm, n in (("one_device", 1), ("hierarchical_copy", 5), ("ring", 9), ("direct", 2), ("auto", 3)):
        xs = jax_.arrays([np.full((3, 2), 2**k, "int32") for k in range(n)])
        result = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", cr.PerReplica(xs), cr.PerReplica(xs))
        for k, x in enumerate(result):
            assert x.devices() == {jax.devices("cpu")[k]}
            assert x.committed
            assert np.asarray(x).tolist() == [[2**n - 1] * 2] * 3
    results = cr.all_reduce(jax_.arrays(random(3, 5)), devices=["cpu:3", "cpu:3#1", "cpu:3#2"])
    assert {d for r in results for d in r.devices()} == {jax.devices("cpu")[3]}
    x = jax.numpy.ones(2)  # not committed
    with jax.default_device(jax.devices("cpu")[3]):
        y = jax.device_put(np.ones(2), jax.devices("cpu")[1])
        results = cr.all_reduce([x, y], "mean")
        copy = cr.CrossDeviceOps().broadcast(x, "cpu:0")[0]
    assert [r.devices() for r in (*results, copy)] == [x.devices(), y.devices(), x.devices()]
    there = jax_.array(np.arange(3.0), 4)  # a constant of a traced function
    assert jax.jit(lambda x: cr.all_reduce([x, there])[1])(np.ones(3)).tolist() == [1, 2, 3]


def test_devices_that_do_not_exist(jax_):
    """A device that JAX does not have raises a DeviceError, which explains how to get more CPU devices, or GPUs."""
    x = jax_.array(np.ones(2))
    for device in ("cpu:99", "cuda:70", "tpu:0", "host1/cpu:1"):
        more = r'for more on the CPU, jax\.config\.update\("jax_num_cpu_devices", n\)'
        remedy = rf"(jax\[cuda12\]|{more})" if device == "cuda:70" else more
        with pytest.raises(cr.DeviceError, match=r"JAX has no such device(.|\n)*" + device + rf"(.|\n)*{remedy}"):
            cr.HierarchicalCopyAllReduce().reduce("sum", x, device)


def test_arrays_on_several_devices(jax):
    """An array that is sharded or replicated over several devices raises a DeviceError."""
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices("cpu")[:2])
    for spec in (jax.P("a"), jax.P()):
        x = jax.device_put(np.ones(2), jax.NamedSharding(mesh, spec))
        with pytest.raises(cr.DeviceError, match="spread over several"):
            cr.all_reduce([x, x], devices=["cpu:0", "cpu:1"])


def test_a_mesh_of_one_device_and_pinned_memory(jax):
    """An array on a mesh of one device, or in pinned memory, is reduced like other arrays on that device."""
    device = jax.devices("cpu")[2]
    plain = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.make_mesh((1,), ("a",), devices=[device])
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for place in (jax.NamedSharding(mesh, jax.P("a")), pinned):
        x = jax.device_put(np.arange(3.0), place)
        results = cr.all_reduce([x, x], devices=["cpu:2", "cpu:2#1"])
        assert [r.sharding for r in results] == [plain, plain]
        results[0].delete()
        assert results[1].tolist() == [0, 2, 4]


@pytest.mark.parametrize("size", [1, 100_000])
def test_results_do_not_depend_on_other_arrays(size, jax, jax_):
    """If all inputs, and all results but one, are deleted, the remaining result keeps its values."""

    def everything(xs):
        value = cr.PerReplica(xs, ["cpu:0", "cpu:0#1"])
        yield from cr.CrossDeviceOps().broadcast(xs[0], value)
        yield from cr.CrossDeviceOps().gather(cr.PerReplica(xs[:1]), value, 0)
        yield from cr.HierarchicalCopyAllReduce().reduce("sum", xs[0], value)
        for algorithm in ("one_device", "hierarchical_copy", "ring"):
            yield from cr.AllReduceCrossDeviceOps(algorithm).reduce("max", value, value)
        slices = cr.IndexedSlices(xs[0], jax_.array(np.zeros(size, "int32")))
        for part in cr.ReductionToOneDevice().reduce("sum", slices, value):
            yield part.values

    count = len(list(everything([jax_.array(np.full(size, 7.0)), jax_.array(np.full(size, 7.0))])))
    for kept in range(count):
        xs = [jax_.array(np.full(size, 7.0)), jax_.array(np.full(size, 7.0))]
        results = list(everything(xs))
        for x in xs + results[:kept] + results[kept + 1 :]:
            x.delete()
        assert np.asarray(results[kept]).tolist() == [7.0] * size


@pytest.mark.parametrize(("n", "dtype", "traced"), [(3, "float32", True), (5, "float32", False), (7, "float64", True)])
def test_mean_divides(n, dtype, traced, jax, jax_):
    """MEAN has the bits of an IEEE division by n, where XLA would multiply by 1/n."""
    xs = random(n, (10_007,), dtype)
    one = cr.AllReduceCrossDeviceOps("one_device")

    def mean(arrays):
        return cr.all_reduce(arrays, "mean", cross_device_ops=one)[0]

    got = (jax.jit(mean) if traced else mean)(xs if traced else jax_.arrays(xs))
    total = functools.reduce(np.add, xs)
    wanted = total / np.dtype(dtype).type(n)
    np.testing.assert_array_equal(np.asarray(got), wanted)
    assert (total * np.dtype(dtype).type(1 / n) != wanted).any(), "the data would not show the difference"


def test_means_of_integers_follow_x64(jax):
    """The dtype of a mean of integers is that of JAX's own division, also if the setting changes between calls."""
    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            x = jax.numpy.arange(3)
            results = cr.all_reduce([x, x], "mean", devices=["cpu:0", "cpu:1"])
            assert {str(r.dtype) for r in results} == {str((x / 2).dtype)} == {"float64" if x64 else "float32"}


def test_float64_arrays_after_x64_was_disabled(jax):
    """A float64 array that was made while x64 was enabled is still reduced in float64."""
    with jax.enable_x64(True):
        x = jax.device_put(np.float64([1 + 2.0**-40]), jax.devices("cpu")[0])
    with jax.enable_x64(False):
        for op in ("sum", "mean"):
            (result,) = cr.all_reduce([x], op)
            assert (str(result.dtype), np.asarray(result).tolist()) == ("float64", [1 + 2.0**-40])
        result, _ = cr.all_reduce([x, x], "mean")
        assert np.asarray(result).tolist() == [1 + 2.0**-40]


@pytest.mark.parametrize("traced", [False, True])
def test_gradients(traced, jax, jax_):
    """If a loss weights the n copies of a mean, each replica's gradient is sum(weights) / n. Without jit, it is on the
    replica's device. vmap can transform a reduction, too."""

    def loss(xs):
        results = cr.all_reduce(xs, "mean", devices=["cpu:0", "cpu:1", "cpu:2"])
        at_one_place = results if traced else [jax.device_put(x, jax.devices("cpu")[0]) for x in results]
        return sum((k + 1) * x.sum() for k, x in enumerate(at_one_place))

    xs = [np.full(4, float(k)) for k in range(3)]
    grads = jax.jit(jax.grad(loss))(xs) if traced else jax.grad(loss)(jax_.arrays(xs))
    for k, grad in enumerate(grads):
        assert grad.tolist() == [(1 + 2 + 3) / 3] * 4
        assert traced or grad.devices() == {jax.devices("cpu")[k]}
    stacked = [np.stack([x, 2 * x]) for x in xs]
    total = jax.vmap(lambda *xs: cr.HierarchicalCopyAllReduce().reduce("sum", cr.PerReplica(xs), "cpu:0")[0])(*stacked)
    np.testing.assert_array_equal(np.asarray(total), sum(stacked))


def test_export_with_a_symbolic_size(jax):
    """A function exported with a symbolic size reduces arrays of any size."""
    from jax import export

    spec = jax.ShapeDtypeStruct(export.symbolic_shape("n"), "float32")
    exported = export.export(jax.jit(lambda a, b: cr.all_reduce([a, b], "mean")))(spec, spec)
    for size in (1, 5):
        a, b = random(2, size)
        np.testing.assert_array_equal(np.asarray(exported.call(a, b)[1]), (a + b) / 2)


def bcoo(jax_, k, **more):
    return jax_.jax.device_put(jax_.bcoo.fromdense(np.diag(np.float32([1, k, 0])), **more), jax_.devices[k])


@pytest.mark.parametrize(("n_dense", "traced"), [(0, False), (1, True)])
def test_bcoo(n_dense, traced, jax, jax_):
    """The results of BCOOs are BCOOs on the destinations, with the slices in the order of the replicas.

    Indices beyond the shape are JAX's padding, and ignored. The result of a BCOO and a dense array is dense.
    """
    xs = [bcoo(jax_, k, n_dense=n_dense) for k in (1, 2)]
    assert cr.PerReplica(xs).devices == ("cpu:1", "cpu:2")  # those of the data
    value = functools.partial(cr.PerReplica, devices=["cpu:1", "cpu:2"])

    def mean(xs):
        return cr.HierarchicalCopyAllReduce().reduce("mean", value(xs), value(xs)).values

    results = jax.jit(mean)(jax.tree.map(np.asarray, xs)) if traced else mean(xs)
    for k, result in zip((1, 2), results, strict=True):
        assert type(result) is jax_.bcoo
        assert (result.nse, result.n_dense, result.shape) == (4, n_dense, (3, 3))
        assert result.indices[:, 0].tolist() == [0, 1, 0, 1]
        assert result.todense().tolist() == [[1, 0, 0], [0, 1.5, 0], [0, 0, 0]]
        assert traced or result.data.devices() == result.indices.devices() == {jax_.devices[k]}
    mixed = [bcoo(jax_, 1, nse=5), jax_.array(np.ones((3, 3), "float32"), 2)]
    assert mixed[0].indices.max() == 3
    assert cr.all_reduce(mixed, devices=["cpu:1", "cpu:2"])[1].tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 1]]


def test_kinds_that_cannot_be_reduced(jax, jax_):
    """PRNG keys, batched BCOOs, BCSRs and shapes without values are rejected. The message has a remedy."""
    from jax.experimental import sparse

    dense = jax_.array(np.eye(3))
    for value, words in [
        (jax.random.key(0), "key_data"),
        (sparse.BCOO.fromdense(dense, n_batch=1), r"update_layout\(n_batch=0\)"),
        (sparse.BCSR.fromdense(dense), "todense"),
        (jax.ShapeDtypeStruct((2,), "float32"), "jax.Array"),
    ]:
        with pytest.raises(cr.UnsupportedError, match=words):
            cr.all_reduce([value, value])
        with pytest.raises(cr.UnsupportedError, match=words):
            cr.CrossDeviceOps().broadcast(value, "cpu:0")
