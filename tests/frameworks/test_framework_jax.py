"""The JAX framework: devices, tracing, deletion, XLA's arithmetic, x64 and sparse arrays."""

import functools

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import frameworks as library
from crossreduce.ops import Numbers

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
    """Each component is on its destination's device only, and is committed to it."""
    for algorithm, n in (("one_device", 1), ("hierarchical_copy", 5), ("ring", 9), ("direct", 2), ("auto", 3)):
        xs = jax_.arrays([np.full((3, 2), 2**k, "int32") for k in range(n)])
        result = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", cr.PerReplica(xs), cr.PerReplica(xs))
        for k, x in enumerate(result):
            assert x.devices() == {jax.devices("cpu")[k]}
            assert x.committed
            assert np.asarray(x).tolist() == [[2**n - 1] * 2] * 3


def test_default_device_does_not_move_results(jax):
    """An array that is not committed is reduced on its own device, whatever the default device is."""
    x = jax.numpy.ones(2)
    with jax.default_device(jax.devices("cpu")[3]):
        y = jax.device_put(np.ones(2), jax.devices("cpu")[1])
        results = cr.all_reduce([x, y], "mean")
        copy = cr.CrossDeviceOps().broadcast(x, "cpu:0")[0]
    assert [r.devices() for r in (*results, copy)] == [x.devices(), y.devices(), x.devices()]


def test_logical_devices_are_on_their_physical_device(jax, jax_):
    """cpu:3#1 is on the physical device cpu:3, and so is its result."""
    results = cr.all_reduce(jax_.arrays(random(3, 5)), devices=["cpu:3", "cpu:3#1", "cpu:3#2"])
    assert {d for r in results for d in r.devices()} == {jax.devices("cpu")[3]}


def test_devices_that_do_not_exist(jax_):
    """A device that JAX does not have raises a DeviceError; its message explains how to get more, or GPUs."""
    x = jax_.array(np.ones(2))
    for device in ("cpu:99", "cuda:70", "tpu:0", "host1/cpu:1"):
        remedy = r"(jax\[cuda12\]|jax_num_cpu_devices)" if device == "cuda:70" else "jax_num_cpu_devices"
        with pytest.raises(cr.DeviceError, match=r"JAX has no such device(.|\n)*" + device + rf"(.|\n)*{remedy}"):
            cr.HierarchicalCopyAllReduce().reduce("sum", x, device)


def test_arrays_on_several_devices(jax, framework):
    """An array that is sharded or replicated over several devices raises a DeviceError."""
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices("cpu")[:2])
    for spec in (jax.P("a"), jax.P()):
        x = jax.device_put(np.ones(2), jax.NamedSharding(mesh, spec))
        with pytest.raises(cr.DeviceError, match="spread over several"):
            framework.array(x)
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


def test_unpack_copies_parts_that_are_not_fresh(framework, jax_):
    """unpack returns a part that is exactly one tensor if it is fresh (has no other reference), else a copy."""
    part = jax_.array(np.arange(6.0))
    cuts = (((6,), ((0, 0, 6),)),)
    assert framework.unpack([part], cuts, True)[0] is part
    (copy,) = framework.unpack([part], cuts, False)
    assert copy.unsafe_buffer_pointer() != part.unsafe_buffer_pointer()
    assert framework.clone(part).unsafe_buffer_pointer() != part.unsafe_buffer_pointer()
    assert copy.tolist() == part.tolist()


def test_ranges_beyond_int32(framework, jax_, monkeypatch):
    """``slice`` returns the right elements also beyond the largest int32, which the test lowers to 4."""
    flat = jax_.array(np.arange(12))
    near = framework.slice(flat, 5, 9).tolist()
    monkeypatch.setattr("crossreduce.frameworks.jax.arrays._LARGEST_INT32", 4)
    monkeypatch.setattr("crossreduce.frameworks.jax.arrays._PART", None)
    assert framework.slice(flat, 5, 9).tolist() == near == [5, 6, 7, 8]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("n", "dtype"), [(3, "float32"), (5, "float32"), (7, "float64")])
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


def test_combine_keeps_the_listed_order(framework, jax_):
    """combine adds from left to right: three orders of the same numbers give three different sums."""
    xs = [np.float32([1e8]), np.float32([1]), np.float32([-1e8]), np.float32([1])]
    numbers = Numbers(cr.ReduceOp.SUM, "float32", "float32", "float32", 1)
    for order, wanted in [((0, 1, 2, 3), 1.0), ((0, 2, 1, 3), 2.0), ((3, 1, 0, 2), 0.0)]:
        arrays = [jax_.array(xs[k]) for k in order]
        assert framework.combine(arrays, numbers, False, -1).tolist() == [wanted]


def test_numbers_follow_x64(jax, framework):
    """A mean of integers is accumulated in float64 if x64 is enabled, else in float32, also if the setting changes
    between calls; its dtype is that of JAX's own division."""
    mean = cr.ReduceOp.MEAN
    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            wide = "float64" if x64 else "float32"
            assert framework.numbers(mean, "int32", 3) == Numbers(mean, "int32", wide, "float32", 3)
            assert framework.numbers(mean, "float16", 3) == Numbers(mean, "float16", "float32", "float16", 3)
            x = jax.numpy.arange(3)
            results = cr.all_reduce([x, x], "mean", devices=["cpu:0", "cpu:1"])
            assert {str(r.dtype) for r in results} == {str((x / 2).dtype)} == {wide}


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


def test_copies_of_tracers(jax, framework):
    """Under jit, ``to_device`` returns the tracer itself for any device."""

    def check(x):
        assert library.framework_of(x) is framework
        assert framework.to_device(x, "cpu:5") is x
        assert cr.PerReplica([x, x]).devices == ("cpu:0", "cpu:0#1")
        return x

    jax.jit(check)(np.ones(3))


def test_jit_with_a_constant_on_another_device(jax, jax_):
    """A traced function can reduce a concrete array that it closes over, whichever device it is on."""
    there = jax_.array(np.arange(3.0), 4)
    got = jax.jit(lambda x: cr.all_reduce([x, there])[1])(np.ones(3))
    assert got.tolist() == [1, 2, 3]


@pytest.mark.parametrize("traced", [False, True])
def test_gradients(traced, jax, jax_):
    """If a loss weights the n copies of a mean, each replica's gradient is sum(weights) / n, without jit on the
    replica's device; vmap can transform a reduction, too."""

    def loss(xs):
        results = cr.all_reduce(xs, "mean", devices=["cpu:0", "cpu:1", "cpu:2"])
        at_one_place = results if traced else [jax.device_put(x, jax.devices("cpu")[0]) for x in results]
        return sum((k + 1) * x.sum() for k, x in enumerate(at_one_place))

    xs = [np.full(4, float(k)) for k in range(3)]
    grads = jax.jit(jax.grad(loss))(xs) if traced else jax.grad(loss)(jax_.arrays(xs))
    for k, grad in enumerate(grads):
        assert grad.tolist() == [2.0] * 4
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
    """The results of BCOOs are BCOOs on the destinations, with the slices in the order of the replicas."""
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
        if not traced:
            assert result.data.devices() == result.indices.devices() == {jax_.devices[k]}


def test_bcoo_with_padding_and_dense(jax_):
    """A BCOO's indices beyond its shape are ignored as JAX's padding; a BCOO and a dense array have a dense result."""
    padded = bcoo(jax_, 1, nse=5)
    assert padded.indices.max() == 3
    value = cr.PerReplica([padded, jax_.array(np.ones((3, 3), "float32"), 2)], ["cpu:1", "cpu:2"])
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert result[1].tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 1]]


def test_kinds_that_cannot_be_reduced(jax, jax_):
    """PRNG keys, batched BCOOs, BCSRs and shapes without values are rejected; the message has a remedy."""
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
