"""Unusual arrays of every memory layout are read correctly and never written."""

import numpy as np
import pytest
from engine_runs import engine_runs
from expect import check, cpus, small
from frameworks import DTYPES, defined, np_dtype
from pairs import each

import crossreduce as cr
from crossreduce.engines.host import array_memory

ONE = cr.ReductionToOneDevice()
OPS = {
    "ReductionToOneDevice": ONE,
    "HierarchicalCopyAllReduce": cr.HierarchicalCopyAllReduce(),
    "unpacked": cr.HierarchicalCopyAllReduce(0),
    "ring": cr.AllReduceCrossDeviceOps("ring"),
    "halving_doubling": cr.AllReduceCrossDeviceOps("halving_doubling", 2),
    "direct": cr.AllReduceCrossDeviceOps("direct", 3),
}


def check_forms(framework, ops, forms):
    """Check that kernels reduce arrays of any layout correctly. ``forms``: names, arrays, and copies in C order."""
    for name, x, plain in forms:
        given, xs = [x, framework.array(plain + plain), x], [plain, plain + plain, plain]
        value = cr.PerReplica(given, cpus(0, 1, 2))
        for op in ("sum", "mean"):
            with engine_runs() as runs:
                result = ops.reduce(op, value, value)
            assert runs == ["host"], name
            check(framework, result, op, xs, cpus(0, 1, 2), given)
            assert all(map(is_plain, result)), name
        check(framework, ops.reduce("sum", x, "cpu:0"), "sum", [plain], cpus(0), given)
        check(framework, ops.broadcast(x, value), "sum", [plain], cpus(0, 1, 2), given)
        if plain.ndim:
            gathered = ops.gather(value, value, plain.ndim - 1)
            check(framework, gathered, "sum", [np.concatenate(xs, -1)], cpus(0, 1, 2), given)


def is_plain(y):
    if isinstance(y, np.ndarray):
        return y.flags.c_contiguous and y.flags.writeable
    return y.is_contiguous() and not y.requires_grad and not y.is_inference()


def numpy_forms(x, tmp_path):
    """Yield names and arrays of many memory layouts, made from an array of shape (3, 10)."""
    yield "transposed", np.ascontiguousarray(x.T).T
    yield "sliced", np.repeat(x, 2, 1)[:, ::2]
    yield "reversed", x[::-1, ::-1]
    yield "repeated", np.broadcast_to(x[:1], x.shape)
    yield "moved axes", np.moveaxis(np.ascontiguousarray(np.moveaxis(x.reshape(3, 2, 5), 0, 2)), 2, 0).reshape(3, 2, 5)
    if x.dtype.kind != "V":  # ml_dtypes has no foreign byte order
        yield "big-endian", x.astype(x.dtype.newbyteorder(">"))
        yield "big-endian and reversed", x.astype(x.dtype.newbyteorder(">"))[::-1]
    yield "unaligned", np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    yield "empty", x[:0].T
    yield "0-d", np.repeat(x[0, :1], 3)[1:2].reshape(())
    locked = x.copy()
    locked.flags.writeable = False
    yield "read-only", locked
    yield "matrix", x.view(np.matrix)
    yield "subclass", x.view(type("Mine", (np.ndarray,), {}))
    np.asarray(x).tofile(tmp_path / "x")
    yield "memory-mapped", np.memmap(tmp_path / "x", x.dtype, "r", shape=x.shape)


@pytest.mark.parametrize(("dtype", "ops"), each(["float32", "float16", "int64", "complex64", "bfloat16"], OPS))
def test_numpy_arrays_of_any_form(numpy_, tmp_path, dtype, ops):
    """Arrays of any layout and byte order are reduced, strided ones without a copy, to contiguous native arrays."""
    x = (np.arange(30).reshape(3, 10) - 11).astype(np_dtype(dtype))
    forms = [(name, y, np.array(y, x.dtype, order="C")) for name, y in numpy_forms(x, tmp_path)]
    check_forms(numpy_, OPS[ops], forms)
    assert all(np.asarray(y).astype(x.dtype).tobytes() == plain.tobytes() for _, y, plain in forms)
    transposed = np.ascontiguousarray(x.T).T
    operands = array_memory("numpy").readable([[transposed, x[::-1]]])[0]  # what the kernels read
    starts = [item[0] if isinstance(item, tuple) else item.ctypes.data for item in operands]
    assert starts == [transposed.ctypes.data, x[::-1].ctypes.data]


@pytest.mark.parametrize(("dtype", "ops"), each([*DTYPES, "uint16", "uint32", "uint64"], OPS))
def test_scalars(numpy_, ops, dtype):
    """NumPy scalars, 0-d arrays and Python numbers, also zeros (D7), are reduced as arrays of shape ()."""
    xs, ops = small(dtype, (), 3), OPS[ops]
    kinds = [xs, [x[()] for x in xs]]
    if dtype in ("bool", "int64", "float64", "complex128"):
        kinds.append([x.item() for x in xs])
    for given in kinds:
        value = cr.PerReplica(given, cpus(0, 1, 2))
        for op in ("sum", "mean", "min", "max", "product"):
            if defined(op, dtype):
                check(numpy_, ops.reduce(op, value, value), op, xs, cpus(0, 1, 2))
        check(numpy_, ops.reduce("product", given[0], "cpu:0"), "product", xs[:1], cpus(0))
        check(numpy_, ops.broadcast(given[0], value), "product", xs[:1], cpus(0, 1, 2))


def torch_forms(torch, x):
    """Yield names and tensors of many layouts and kinds, made from a tensor of shape (3, 10)."""
    yield "transposed", x.t().contiguous().t()
    yield "sliced", x.repeat_interleave(2, 1)[:, ::2]
    yield "expanded", x[:1].expand(x.shape)
    yield "channels last", x.reshape(1, 3, 2, 5).contiguous(memory_format=torch.channels_last)
    yield "offset", torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape)
    yield "empty", x[:0].t()
    yield "0-d", x[1, 1]
    yield "windows", x.reshape(-1).as_strided((4, 6), (2, 1))
    yield "parameter", torch.nn.Parameter(x.t().contiguous().t(), requires_grad=x.is_floating_point())
    yield "shared memory", x.clone().share_memory_()
    if x.is_floating_point():
        yield "not a leaf", x.clone().requires_grad_() * 2
    if x.is_complex():
        yield "conjugated", x.conj()
        yield "negated part", x.conj().imag
    yield "negated", torch._neg_view(x)
    with torch.inference_mode():
        made = x.clone()
    yield "inference", made


@pytest.mark.parametrize(("dtype", "ops"), each(["float32", "bfloat16", "int32", "complex64"], OPS))
def test_torch_tensors_of_any_form(torch_, dtype, ops):
    """Tensors of any layout or lazy form are reduced, strided ones without a copy. No result requires a gradient."""
    torch = torch_.torch
    x = torch_.array((np.arange(30).reshape(3, 10) - 11).astype(np_dtype(dtype)))

    def plain(y):
        return torch_.to_numpy(torch.Tensor.detach(y).resolve_conj().resolve_neg().clone().contiguous())

    with torch.no_grad():
        forms = [(name, y, plain(y)) for name, y in torch_forms(torch, x)]
    check_forms(torch_, OPS[ops], forms)
    assert all(plain(y).tobytes() == before.tobytes() for _, y, before in forms)
    for name, y, _ in forms:
        if name in ("transposed", "channels last", "expanded"):
            (operand,) = array_memory("torch").readable([[y]])[0]
            assert (operand if isinstance(operand, int) else operand[0]) == y.data_ptr()


def test_bools_with_unusual_bytes():
    """A bool whose byte is not 0 counts as true, and the bytes of the result are 0 or 1."""
    a, b = np.uint8([2, 1, 0, 2] * 20).view(bool), np.uint8([1, 2, 2, 0] * 20).view(bool)
    for op in ("min", "max", "product"):
        for result in cr.all_reduce([a, b], op):
            assert result.view(np.uint8).tolist() == [1, 1, int(op == "max"), int(op == "max")] * 20


def test_numpys_error_state_has_no_effect():
    """Overflow gives infinity and underflow gives 0, also if the caller has set NumPy to raise errors for them."""
    with np.errstate(all="raise"):
        tiny = cr.all_reduce([np.float32([1e-30, 3e38])] * 2, "product")[0]
        half = cr.all_reduce([np.float16([6e-8, 65504])] * 3, "mean")[0]
    assert tiny.tolist() == [0, np.inf]
    assert half[1] == 65504


def test_the_oracle_rejects_wrong_results(numpy_):
    """``check`` fails for a lost contribution, an error of 0.001, a wrong dtype, shape or device, and shared memory."""
    xs = small("float32", (3,), 3, 7)
    right = np.sum(xs, axis=0)
    shared = right.copy()
    for result, devices, words in (
        ([right - xs[2]], cpus(0), "sum: got"),
        ([right + 1e-3], cpus(0), "sum: got"),
        ([right.astype("float64")], cpus(0), "dtype float64, wanted float32"),
        ([right[:2]], cpus(0), r"shape \(2,\), wanted \(3,\)"),
        ([right], cpus(1), r"a result on \('cpu:0',\), wanted \("),
        ([right, right], cpus(0, 1), "two components share memory"),
        ([shared], cpus(0), "a result shares memory with an input"),
    ):
        with pytest.raises(AssertionError, match=words):
            check(numpy_, cr.Mirrored(result), "sum", xs, devices, [shared])
