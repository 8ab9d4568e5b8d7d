"""Unusual arrays: for every memory layout, they are read correctly and never written."""

import numpy as np
import oracle
import pytest
from expect import check, check_memory, cpus, small
from frameworks import DTYPES, defined
from pairs import each

import crossreduce as cr

OPS = {
    "ReductionToOneDevice": cr.ReductionToOneDevice(),
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "unpacked": cr.HierarchicalCopyAllReduce(0),
    "ring": cr.AllReduceCrossDeviceOps("ring"),
    "halving_doubling": cr.AllReduceCrossDeviceOps("halving_doubling", 2),
    "direct": cr.AllReduceCrossDeviceOps("direct", 3),
}
ops_table = pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[:] = x
    return view


def memory_mapped(x, tmp_path):
    mapped = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
    mapped[:] = x
    mapped.flush()
    return np.memmap(tmp_path / "x", x.dtype, "r", shape=x.shape)


FORMS = {
    "read-only": read_only,
    "Fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda x: x.T.copy().T,
    "stride 0": lambda x: np.broadcast_to(x[:1], x.shape),
    "unaligned": unaligned,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "matrix": lambda x: x.view(np.matrix),
    "subclass": lambda x: x.view(type("Mine", (np.ndarray,), {})),
}


@pytest.mark.parametrize(("form", "ops"), each(FORMS, OPS))
def test_forms_of_numpy_arrays(numpy_, ops, form):
    """For every memory layout and byte order of the inputs, results are contiguous, writable and in native byte order,
    and the inputs do not change."""
    ops = OPS[ops]
    plain = small("float32", (3, 4), 3)
    given = [FORMS[form](x) for x in plain]
    xs = [np.array(np.asarray(x), "float32") for x in given]
    before = [(np.asarray(x).tobytes(), x.strides, x.flags.writeable) for x in given]
    value = cr.PerReplica(given)
    for op in ("sum", "mean", "max"):
        result = ops.reduce(op, value, value)
        check(numpy_, result, op, xs, cpus(0, 1, 2), given)
        for y in result:
            assert y.dtype.isnative
            assert y.flags.writeable
            assert y.flags.c_contiguous
    for x, original in zip(given, xs, strict=True):
        check(numpy_, ops.reduce("mean", x, "cpu:0"), "mean", [original], cpus(0), given)
        check(numpy_, ops.broadcast(x, value), "sum", [original], cpus(0, 1, 2), given)
    (result,) = [ops.gather(value, value, 1)]
    check(numpy_, result, "sum", [np.concatenate(xs, 1)], cpus(0, 1, 2), given)
    assert [(np.asarray(x).tobytes(), x.strides, x.flags.writeable) for x in given] == before
    mixed = cr.PerReplica([given[0], plain[1]])
    check(numpy_, ops.reduce("sum", mixed, mixed), "sum", [xs[0], plain[1]], cpus(0, 1), [given[0], plain[1]])


@ops_table
def test_memory_mapped_arrays(numpy_, ops, tmp_path):
    """A memory-mapped array is read and not written; results are ordinary arrays."""
    (x,) = small("float32", (3, 4), 1)
    mapped = memory_mapped(x, tmp_path)
    value = cr.PerReplica([mapped, mapped])
    check(numpy_, ops.reduce("sum", value, value), "sum", [x, x], cpus(0, 1), [mapped])
    check(numpy_, ops.broadcast(mapped, value), "sum", [x], cpus(0, 1), [mapped])


@pytest.mark.parametrize(("dtype", "ops"), each(DTYPES, OPS))
def test_numpy_scalars(numpy_, ops, dtype):
    """NumPy scalars and 0-d arrays are reduced as arrays of shape ()."""
    ops = OPS[ops]
    xs = small(dtype, (), 3)
    for given in (xs, [x[()] for x in xs]):
        value = cr.PerReplica(given, cpus(0, 1, 2))
        for op in ("sum", "mean", "min", "max", "product"):
            if defined(op, dtype):
                check(numpy_, ops.reduce(op, value, value), op, xs, cpus(0, 1, 2))


def test_python_numbers(numpy_):
    """Python numbers are reduced as arrays of NumPy's default dtypes."""
    for ops in OPS.values():
        for numbers, dtype in (((1, 2), "int64"), ((1.5, 2.0), "float64"), ((1j, 2.0j), "complex128")):
            value = cr.PerReplica(numbers, cpus(0, 1))
            check(numpy_, ops.reduce("sum", value, value), "sum", [np.array(x, dtype) for x in numbers], cpus(0, 1))
        value = cr.PerReplica((True, False), cpus(0, 1))
        check(numpy_, ops.reduce("max", value, value), "max", [np.array(x) for x in (True, False)], cpus(0, 1))


def test_unsigned_numpy_dtypes(numpy_):
    """NumPy's unsigned integers of 16, 32 and 64 bits are reduced, too."""
    for ops in OPS.values():
        for dtype in ("uint16", "uint32", "uint64"):
            xs = [np.array([np.iinfo(dtype).max, 3, 0], dtype), np.array([2, 5, 1], dtype)]
            value = cr.PerReplica(xs)
            for op in ("sum", "mean", "min", "max", "product"):
                check(numpy_, ops.reduce(op, value, value), op, xs, cpus(0, 1), xs)


@ops_table
def test_forms_of_torch_tensors(torch_, ops):
    """Torch tensors with any strides, with or without gradients, are reduced like contiguous ones; no result requires
    a gradient."""
    torch = torch_.torch
    plain = [torch.arange(12.0).reshape(3, 4) + k for k in range(3)]
    forms = {
        "transposed": [x.t().contiguous().t() for x in plain],
        "expanded": [x[:1].expand(3, 4) for x in plain],
        "sliced": [torch.stack([x, -x], 2)[..., 0] for x in plain],
        "channels last": [x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last) for x in plain],
        "with gradients": [x.clone().requires_grad_() for x in plain],
        "not a leaf": [x.clone().requires_grad_() * 2 for x in plain],
        "parameters": [torch.nn.Parameter(x) for x in plain],
        "shared memory": [x.clone().share_memory_() for x in plain],
        "one storage": list(torch.stack(plain)),
        "inference": [x.clone() for x in plain],
    }
    with torch.inference_mode():
        forms["inference"] = [x.clone() for x in plain]
    for form, given in forms.items():
        xs = [x.detach().numpy().copy() for x in given]
        value = cr.PerReplica(given)
        for op in ("sum", "mean", "max"):
            result = ops.reduce(op, value, value)
            check(torch_, result, op, xs, cpus(0, 1, 2), [x.detach() for x in given])
            assert not any(y.requires_grad or y.is_inference() for y in result), form
        check(torch_, ops.broadcast(given[0], value), "sum", xs[:1], cpus(0, 1, 2), [x.detach() for x in given])
        assert all(np.array_equal(x.detach().numpy(), original) for x, original in zip(given, xs, strict=True))


@ops_table
def test_lazy_conjugates_in_torch(torch_, ops):
    """Torch's lazy conjugates and negatives are read with their actual values."""
    torch = torch_.torch
    x = torch.tensor([1 + 2j, 3 - 4j])
    for given in ([x.conj(), x.conj()], [x, x.conj()], [x.conj().imag, x.conj().imag]):
        xs = [y.resolve_conj().resolve_neg().numpy() for y in given]
        value = cr.PerReplica(given)
        check(torch_, ops.reduce("sum", value, value), "sum", xs, cpus(0, 1), given)
        check(torch_, ops.broadcast(given[1], value), "sum", xs[1:], cpus(0, 1), given)
        check(torch_, ops.gather(value, value, 0), "sum", [np.concatenate(xs)], cpus(0, 1), given)


def test_jax_arrays_that_are_not_committed(jax_):
    """The result of uncommitted JAX arrays is on the requested devices."""
    jnp = jax_.jax.numpy
    value = cr.PerReplica([jnp.arange(3), jnp.ones(3, int)], cpus(2, 1))
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    check(jax_, result, "sum", [np.arange(3), np.ones(3, int)], cpus(2, 1))


def test_results_outlive_deleted_inputs(jax_):
    """A JAX result stays valid when its input is deleted, as happens to a donated input."""
    for ops in OPS.values():
        for n in (1, 2):
            given = jax_.arrays([np.arange(3.0)] * n)
            result = ops.reduce("sum", cr.PerReplica(given), "cpu:0")
            copies = ops.broadcast(given[0], cr.PerReplica([0] * 2, cpus(0, 1)))
            for x in given:
                x.delete()
            assert np.asarray(result[0]).tolist() == [0, n, 2 * n]
            assert np.asarray(copies[0]).tolist() == [0, 1, 2]


def test_a_jax_array_on_several_devices(jax_):
    """A JAX array that is spread over devices is rejected; the error recommends its shards."""
    jax = jax_.jax
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    spread = jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    for call in (
        lambda: cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([spread, spread]), "cpu:0"),
        lambda: cr.ReductionToOneDevice().reduce("sum", cr.PerReplica([spread, spread], cpus(0, 1)), "cpu:0"),
        lambda: cr.ReductionToOneDevice().broadcast(spread, "cpu:0"),
    ):
        with pytest.raises(cr.DeviceError, match=r"spread over several(.|\n)*addressable_shards"):
            call()
    shards = [shard.data for shard in spread.addressable_shards]
    result = cr.ReductionToOneDevice().reduce("sum", cr.PerReplica(shards), "cpu:0")
    assert np.asarray(result[0]).tolist() == [2, 4]


def test_aliased_inputs(numpy_):
    """Components may be views of one array and may overlap; results do not overlap."""
    base = np.arange(8.0)
    given = [base[:5], base[3:], base[1:6]]
    xs = [x.copy() for x in given]
    value = cr.PerReplica(given)
    for ops in OPS.values():
        results = ops.batch_reduce("sum", [(value, value), (value, value)])
        for result in results:
            check(numpy_, result, "sum", xs, cpus(0, 1, 2), given)
        check_memory(numpy_, [y for result in results for y in result], given)
    assert base.tolist() == list(range(8))


def test_results_can_be_written(numpy_, torch_):
    """Writing into one result changes no other result and no input, also for one replica and for broadcasts."""
    for framework in (numpy_, torch_):
        for ops in OPS.values():
            for n in (1, 3):
                xs = small("float32", (4,), n)
                given = framework.arrays(xs)
                value = cr.PerReplica(given)
                for result in (
                    ops.reduce("sum", value, value),
                    ops.broadcast(given[0], cr.PerReplica([0] * 3, cpus(0, 1, 2))),
                    ops.gather(value, value, 0),
                ):
                    kept = [framework.to_numpy(y).copy() for y in result]
                    result[0][...] = 77
                    assert all(
                        np.array_equal(framework.to_numpy(y), k) for y, k in zip(result[1:], kept[1:], strict=True)
                    )
                    assert all(np.array_equal(framework.to_numpy(x), k) for x, k in zip(given, xs, strict=True))


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_bools_with_unusual_bytes(op):
    """A bool whose byte is neither 0 nor 1 is true, and the bytes of the result are 0 and 1."""
    a, b = np.uint8([2, 1, 0, 2] * 20).view(bool), np.uint8([1, 2, 2, 0] * 20).view(bool)
    wanted = [True, True, op == "max", op == "max"] * 20
    for result in cr.all_reduce([a, b], op):
        assert result.view(np.uint8).tolist() == [int(x) for x in wanted]


def test_numpys_error_state_has_no_effect():
    """Overflow gives infinity and underflow 0, also when the caller has set NumPy to raise on them."""
    with np.errstate(all="raise"):
        tiny = cr.all_reduce([np.float32([1e-30, 3e38])] * 2, "product")[0]
        half = cr.all_reduce([np.float16([6e-8, 65504])] * 3, "mean")[0]
    assert tiny.tolist() == [0, np.inf]
    assert half[1] == 65504


def test_weak_types_stay_weak(jax_):
    """The sum of JAX's weakly typed numbers is weakly typed, as under jit."""
    numbers = [jax_.jax.numpy.asarray(1.0), jax_.jax.numpy.asarray(2.0)]
    assert cr.all_reduce(numbers)[0].weak_type


def test_the_oracle_rejects_wrong_results(numpy_):
    """The oracle rejects a lost contribution, an error of 0.001, a wrong dtype, shape or device, and shared memory."""
    xs = small("float32", (3,), 3, 7)
    right = np.sum(xs, axis=0)
    for wrong, words in (
        (right - xs[2], "sum: got"),
        (np.nextafter(right, np.inf) + 1e-3, "sum: got"),
        (right.astype("float64"), "dtype float64, wanted float32"),
        (right[:2], r"shape \(2,\), wanted \(3,\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            oracle.check(wrong, "sum", xs)
        with pytest.raises(AssertionError, match=words):
            check(numpy_, cr.Mirrored([wrong]), "sum", xs, cpus(0))
    for devices in (cpus(1), cpus(0, 1)):
        with pytest.raises(AssertionError, match=r"a result on \('cpu:0',\), wanted \("):
            check(numpy_, cr.Mirrored([right]), "sum", xs, devices)
    with pytest.raises(AssertionError, match="two components share memory"):
        check(numpy_, cr.Mirrored([right, right]), "sum", xs, cpus(0, 1))
    with pytest.raises(AssertionError, match="a result shares memory with an input"):
        check(numpy_, cr.Mirrored([right]), "sum", xs, cpus(0), [right])
