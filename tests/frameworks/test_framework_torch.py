"""The PyTorch framework: layouts, parameters, dtypes, memory, devices, sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from frameworks import NAMES

import crossreduce as cr

if "torch" not in NAMES:
    pytest.skip("torch is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
import torch


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_own(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Assert that each result is contiguous, requires no gradient, and has its own storage of exactly its size."""
    for x in results:
        assert type(x) is torch.Tensor
        assert x.is_contiguous()
        assert not x.requires_grad
        assert x.untyped_storage().nbytes() == x.numel() * x.itemsize
    places = [address(x) for x in results if x.numel()]
    assert len(set(places)) == len(places)
    assert set(places).isdisjoint(address(x) for x in inputs)


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "one element everywhere": torch.tensor(3.0).expand(7),
        "flat strided": torch.arange(10.0)[1::2],
        "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "negative view": torch.arange(6.0).to(torch.complex64).mul(1j).conj().imag,
        "conjugate view": torch.arange(6.0).to(torch.complex64).mul(1 + 2j).conj(),
        "slice of a buffer": torch.arange(100.0)[20:26],
    }


@pytest.mark.parametrize("kind", layouts())
def test_layouts(kind: str) -> None:
    """Views with any strides are reduced correctly. Results are contiguous, not lazy, and have their own memory."""
    for n, packs, batch_size in ((1, 1, 1), (3, 0, 1), (3, 1, 2)):
        xs = [layouts()[kind] for _ in range(n)]
        before = [x.clone() for x in xs]
        value = cr.PerReplica(xs)
        batch = cr.AllReduceCrossDeviceOps("direct", num_packs=packs).batch_reduce("sum", [(value, value)] * batch_size)
        results = [x for result in batch for x in result]
        for x in results:
            assert torch.equal(x, before[0].resolve_conj().resolve_neg() * n), (n, packs, batch_size)
            assert (x.is_conj(), x.is_neg()) == (False, False)
        assert_own(results, xs)
        assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True))


def test_results_are_plain_and_not_part_of_a_graph() -> None:
    """Parameters, tensors of an autograd graph and of a subclass are reduced by value. Results are plain tensors."""

    class Named(torch.Tensor):
        pass

    parameters = [torch.nn.Parameter(torch.tensor([1.0, 2.0]) * (k + 1)) for k in range(3)]
    inside = [parameter * 2 for parameter in parameters]
    named = [parameter.detach().as_subclass(Named) for parameter in parameters]
    trees = [{"w": w, "inside": [x], "named": y} for w, x, y in zip(parameters, inside, named, strict=True)]
    for tree in cr.all_reduce(trees):
        assert tree["w"].tolist() == [6.0, 12.0]
        assert tree["inside"][0].tolist() == [12.0, 24.0]
        assert tree["named"].tolist() == [6.0, 12.0]
        assert type(tree["w"]) is type(tree["named"]) is torch.Tensor
        assert not tree["w"].requires_grad
        assert tree["inside"][0].grad_fn is None
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)
    sum(x.sum() for x in inside).backward()  # the caller's graph is still valid
    assert parameters[0].grad.tolist() == [2.0, 2.0]


def test_mean_of_integers_has_the_current_default_dtype() -> None:
    """The mean of integers has torch's default dtype at the time of the call, and does not wrap around."""
    xs = [torch.tensor([100, 127], dtype=torch.int8)] * 2
    for dtype in (torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            result, alone = cr.all_reduce(xs, "mean")[1], cr.all_reduce(xs[:1], "mean")[0]
        finally:
            torch.set_default_dtype(torch.float32)
        for x in result, alone:
            assert same(x, torch.tensor([100, 127], dtype=dtype))


def test_unsigned_integers_that_torch_cannot_add() -> None:
    """Reducing dtypes that torch cannot add raises an UnsupportedError. Broadcasting them works."""
    for dtype, op in ((torch.uint16, "sum"), (torch.uint32, "min"), (torch.uint64, "mean")):
        xs = [torch.tensor([1, 2]).to(dtype) for _ in range(2)]
        value = cr.PerReplica(xs)
        with pytest.raises(cr.UnsupportedError, match=r"PyTorch cannot compute with uint"):
            cr.HierarchicalCopyAllReduce().reduce(op, value, value)
        result = cr.CrossDeviceOps().broadcast(xs[0], value)
        assert [x.tolist() for x in result] == [[1, 2]] * 2
        assert_own(list(result), xs)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.uint1, torch.int7])
def test_short_integers_are_not_bytes(dtype: Any) -> None:
    """Integers of less than 8 bits are refused, also after calls with bytes of the same shape, and as results."""
    xs = [torch.arange(4).to(torch.int8 if dtype is torch.int7 else torch.uint8) for _ in range(2)]
    for _ in range(2):
        cr.all_reduce(xs)
        cr.all_reduce(xs, out=[x.clone() for x in xs])
    short = [x.clone().view(dtype) for x in xs]
    for given, out in ((short, None), (xs, short)):
        with pytest.raises(cr.UnsupportedError, match=str(dtype)):
            cr.all_reduce(given, out=out)


class Wrapping(torch.Tensor):
    """A tensor that wraps others by torch's convention, ``__tensor_flatten__``, as DTensor does."""

    def __tensor_flatten__(self) -> None: ...


def freed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has been freed, as FSDP does with the parameters of other ranks."""
    x.untyped_storage().resize_(0)
    return x


def escaped(transform: Any) -> torch.Tensor:
    """Return a tensor that has escaped from a function that torch.func transformed."""
    seen: list[torch.Tensor] = []
    transform(lambda x: (seen.append(x), x.sum())[1])(torch.ones(3))
    return seen[0]


UNSUPPORTED = {
    "meta": (lambda: torch.ones(2, device="meta"), "meta tensors have no elements"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "to_dense"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "run the module once"),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn cannot be reduced"),
    "wrapping": (lambda: torch.ones(2).as_subclass(Wrapping), "wraps other tensors"),
    "masked": (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "wraps other tensors"),
    "freed": (lambda: freed(torch.ones(2)), "memory of a tensor's elements was freed"),
    "freed part": (lambda: freed(torch.ones(5)[3:]), "memory of a tensor's elements was freed"),
    "freed strided part": (lambda: freed(torch.ones(5)[1::2]), "memory of a tensor's elements was freed"),
    "of vmap": (lambda: escaped(torch.func.vmap), "transformation by torch.func that has ended"),
    "of grad": (lambda: escaped(torch.func.grad), "transformation by torch.func that has ended"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), "to_sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
}


# torch warns once per process that some of these kinds are beta or deprecated: here, or in an earlier test.
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated|invariant)")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_kinds_that_cannot_be_reduced(kind: str) -> None:
    """A tensor of an unsupported kind or dtype is rejected, with an error that states the reason or a remedy."""
    make, text = UNSUPPORTED[kind]
    value = make()
    with pytest.raises(cr.UnsupportedError, match=text):
        cr.HierarchicalCopyAllReduce().reduce("sum", cr.PerReplica([value], ["cpu:0"]), "cpu:0")
    with pytest.raises(cr.UnsupportedError, match=text):
        cr.CrossDeviceOps().broadcast(value, "cpu:0")
    if kind.startswith(
        ("freed", "of vmap")
    ):  # these look like other tensors, also to calls that run again without Python
        like = torch.ones(value.shape)
        for _ in range(3):
            cr.all_reduce([like, like.clone()], out=[like.clone(), like.clone()])
        for options in ({}, {"out": [like.clone(), like.clone()]}):
            with pytest.raises(cr.UnsupportedError, match=text):
                cr.all_reduce([value, like], **options)
        with pytest.raises(cr.UnsupportedError, match=rf"{text}|need tensors that have memory"):
            cr.all_reduce([like, like.clone()], out=[value, like])


@pytest.mark.parametrize("op", ["sum", "mean", "max", "product"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_transformations_of_torch_func(op: str, n: int) -> None:
    """torch.func vectorizes and differentiates a reduction of any number of replicas, in any nesting."""
    func, x = torch.func, torch.tensor([[1.0, 2.0, -3.0], [0.5, -1.0, 4.0]])

    def total(x: torch.Tensor, reduce: Callable[..., Any] = cr.all_reduce) -> torch.Tensor:
        return reduce([x * (k + 1) for k in range(n)], op)[n - 1].sum()

    def by_torch(xs: list[torch.Tensor], op: str) -> list[torch.Tensor]:
        stacked = torch.stack(xs)
        return [getattr(stacked, {"max": "amax", "product": "prod"}.get(op, op))(0)] * n

    for transform in (
        func.vmap, func.grad, func.jacfwd, func.functionalize, lambda f: func.vmap(func.grad(f)),
        lambda f: func.grad(lambda x: func.vmap(f)(x).sum()), lambda f: lambda x: func.jvp(f, (x,), (x,)),
    ):  # fmt: skip
        torch.testing.assert_close(transform(total)(x), transform(partial(total, reduce=by_torch))(x))


def test_lazy_zeros() -> None:
    """Lazily allocated zeros, which torch does not write into, can be reduced and assigned."""
    zero = torch._efficientzerotensor((3,))
    for op in ("sum", "mean", "max"):
        for n in (1, 2, 3):
            results = cr.all_reduce([zero] * n, op)
            assert [x.add_(1).tolist() for x in results] == [[1.0] * 3] * n
    variable = cr.Variable(torch.ones(3))
    assert variable.assign_add(zero).value().tolist() == [1.0] * 3
    assert variable.assign(zero).value().tolist() == [0.0] * 3


def test_devices_that_do_not_exist() -> None:
    """A device that torch does not have is rejected, and the message lists the existing devices."""
    for name in ("cuda:99", "host1/cpu:0", "xpu:99", "mps:9", "tpu:0"):
        with pytest.raises(cr.DeviceError, match=r'(?s)no such device.*"cpu:0", "cpu:1"'):
            cr.HierarchicalCopyAllReduce().reduce("sum", torch.ones(2), name)


def coo(indices: list[list[int]], values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)


def test_slices_of_sparse_tensors_are_concatenated() -> None:
    """Slices are concatenated in the order of the replicas, with duplicates. Inputs stay uncoalesced."""
    a = coo([[1, 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (5, 2))
    b = coo([[3]], torch.tensor([[5.0, 6.0]]), (5, 2))
    value = cr.PerReplica([a, b])
    result = cr.HierarchicalCopyAllReduce().reduce("mean", value, value)
    for x in result:
        assert x.layout is torch.sparse_coo
        assert not x.is_coalesced()
        assert x._indices().tolist() == [[1, 1, 3]]
        assert x._values().tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
        assert torch.equal(x.to_dense(), (a.to_dense() + b.to_dense()) / 2)
    assert not a.is_coalesced()
    assert_own([x._values() for x in result], [a._values(), b._values()])
    assert len({address(x._indices()) for x in (*result, a, b)}) == 4
    slices = [cr.IndexedSlices(torch.full((1, 3), float(k)), torch.tensor([k]), (4, 3)) for k in range(3)]
    joined = cr.all_reduce(slices)[0]
    assert (type(joined), joined.dense_shape) == (cr.IndexedSlices, (4, 3))
    assert (joined.indices.tolist(), joined.values.tolist()) == ([0, 1, 2], [[0.0] * 3, [1.0] * 3, [2.0] * 3])
    two = coo([[0, 2, 2], [1, 0, 0]], torch.tensor([1, 2, 3]), (3, 2))  # two sparse axes
    mixed = [two, torch.ones(3, 2, dtype=torch.int64)]
    assert cr.all_reduce([two, two])[1].to_dense().tolist() == [[0, 2], [0, 0], [10, 0]]
    assert same(cr.all_reduce(mixed)[1], torch.tensor([[1, 2], [1, 1], [6, 1]]))


def test_indices_of_slices() -> None:
    """An index outside the dense shape is an error, also a negative one. Slices may be views, and may be empty."""
    for index in (-1, 4):
        slices = cr.IndexedSlices(torch.ones(1, 2), torch.tensor([index]), (4, 2))
        with pytest.raises(cr.ArgumentError, match=rf"(?s)outside its dense shape.*from {index} to {index}"):
            cr.all_reduce([slices, torch.ones(4, 2)])
        a = torch.sparse_coo_tensor(torch.tensor([[0], [index]]), torch.ones(1), (4, 4), check_invariants=False)
        with pytest.raises(cr.ArgumentError, match=r"outside its dense shape"):
            cr.all_reduce([a, torch.ones(4, 4)])
    z = torch.tensor([[1 + 2j]]).conj()  # a lazy view, and empty slices
    rows = torch.tensor([0], dtype=torch.int32), torch.tensor([], dtype=torch.int64)
    value = cr.PerReplica([cr.IndexedSlices(z, rows[0], (2, 1)), cr.IndexedSlices(z[:0], rows[1], (2, 1))])
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert result[1].values.tolist() == [[1 - 2j]]
    assert result[1].indices.dtype is torch.int64
