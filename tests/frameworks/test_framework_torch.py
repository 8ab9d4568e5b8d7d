"""The PyTorch framework: layouts, parameters, dtypes, memory, devices, sparse tensors."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
from frameworks import NAMES

import crossreduce as cr
from crossreduce.frameworks import get

if "torch" not in NAMES:
    pytest.skip("torch is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
import torch

ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "auto")
OPS = ("sum", "mean", "min", "max", "product")
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.complex64, torch.complex128, torch.bool,
)  # fmt: skip
SHAPES = ((), (0,), (3, 2))


def defined(op: str, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return op in ("min", "max", "product")
    return not (dtype.is_complex and op in ("min", "max"))


def oracle(op: str, xs: list[torch.Tensor], default: torch.dtype = torch.float32) -> torch.Tensor:
    """Reduce element by element in Python's own numbers, which are exact for the tests' small integers."""
    dtype = xs[0].dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    combine = {"sum": operator.add, "mean": operator.add, "min": min, "max": max, "product": operator.mul}[op]
    found = [functools.reduce(combine, column) for column in zip(*(x.flatten().tolist() for x in xs), strict=True)]
    if op == "mean":  # exact, or rounded to 53 bits, and then once to the result's dtype
        mean = torch.tensor([x / len(xs) for x in found], dtype=torch.complex128 if dtype.is_complex else torch.float64)
        return mean.to(default if whole else dtype).reshape(xs[0].shape)
    if whole and dtype is not torch.bool:
        bits = torch.iinfo(dtype).bits
        found = [(x + (1 << bits)) % (1 << bits) for x in found]  # two's complement wraps around
        found = [x - (1 << bits) if x > torch.iinfo(dtype).max else x for x in found]
    return torch.tensor(found, dtype=torch.complex128 if dtype.is_complex else None).to(dtype).reshape(xs[0].shape)


def random(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor(rng.integers(0, 4, shape)).to(dtype)


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_own(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Every result is contiguous, requires no gradient, and has its own storage."""
    for x in results:
        assert type(x) is torch.Tensor
        assert x.is_contiguous()
        assert not x.requires_grad
        assert x.untyped_storage().nbytes() == x.numel() * x.itemsize
    places = [address(x) for x in results if x.numel()]
    assert len(set(places)) == len(places)
    assert set(places).isdisjoint(address(x) for x in inputs)


@pytest.mark.parametrize("packs", [0, 3])
@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_op_dtype_and_shape(algorithm: str, n: int, packs: int) -> None:
    """Every op over every dtype gives what Python's numbers give, for any number of replicas and packs."""
    rng = np.random.default_rng(n)
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs)
    for op in OPS:
        dtypes = [dtype for dtype in DTYPES if defined(op, dtype)]
        batch = [[random(shape, dtype, rng) for _ in range(n)] for dtype in dtypes for shape in SHAPES]
        before = [[x.clone() for x in xs] for xs in batch]
        values = [cr.PerReplica(xs) for xs in batch]
        results = ops.batch_reduce(op, [(value, value) for value in values])
        for xs, kept, result in zip(batch, before, results, strict=True):
            assert all(same(x, y) for x, y in zip(xs, kept, strict=True))
            want = oracle(op, kept)
            for x in result:
                assert same(x, want), (op, xs[0].dtype, x, want)
        assert_own([x for result in results for x in result], [x for xs in batch for x in xs])


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_contribution_counts_once(algorithm: str, n: int) -> None:
    """Each replica counts once in the sum: powers of n + 1 would show a lost or doubled contribution."""
    value = cr.PerReplica([torch.full((5,), (n + 1) ** k) for k in range(n)])
    for x in cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value):
        assert x.tolist() == [sum((n + 1) ** k for k in range(n))] * 5


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
    """Views with any strides are reduced correctly, and the results are contiguous and have their own memory."""
    for n, packs, values in itertools.product([1, 3], [0, 1], [1, 2]):
        xs = [layouts()[kind] for _ in range(n)]
        before = [x.clone() for x in xs]
        batch = [cr.PerReplica(xs)] * values
        ops = cr.AllReduceCrossDeviceOps("direct", num_packs=packs)
        results = ops.batch_reduce("sum", [(value, value) for value in batch])
        for result in results:
            for x in result:
                assert torch.equal(x, before[0].resolve_conj().resolve_neg() * n), (n, packs, values)
                assert not x.is_conj()
                assert not x.is_neg()
        assert_own([x for result in results for x in result], xs)
        assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True))


@pytest.mark.parametrize("kind", ["negative view", "conjugate view"])
def test_lazy_views_are_resolved(kind: str) -> None:
    """``array`` returns a tensor that stores its elements: it resolves conjugate and negative views."""
    x = layouts()[kind]
    assert x.is_conj() or x.is_neg()
    plain = get("torch").array(x)
    assert not plain.is_conj()
    assert not plain.is_neg()
    assert torch.equal(plain, x)


def test_results_are_not_part_of_a_graph() -> None:
    """Parameters and tensors of an autograd graph are reduced by value; results require no gradient."""
    parameters = [torch.nn.Parameter(torch.tensor([1.0, 2.0]) * (k + 1)) for k in range(3)]
    inside = [parameter * 2 for parameter in parameters]
    trees = [{"w": w, "inside": [x]} for w, x in zip(parameters, inside, strict=True)]
    for tree in cr.all_reduce(trees):
        assert tree["w"].tolist() == [6.0, 12.0]
        assert tree["inside"][0].tolist() == [12.0, 24.0]
        assert type(tree["w"]) is torch.Tensor
        assert not tree["w"].requires_grad
        assert tree["inside"][0].grad_fn is None
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)
    sum(x.sum() for x in inside).backward()  # the caller's graph is still valid
    assert parameters[0].grad.tolist() == [2.0, 2.0]


def test_results_can_be_trained_on() -> None:
    """A result can be written in place and can require gradients, like any new tensor."""
    value = cr.PerReplica([torch.ones(2, 2), torch.ones(2, 2)])
    a, b = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    a.mul_(torch.nn.Parameter(torch.full((2, 2), 3.0)))
    assert a.requires_grad
    b.requires_grad_()
    (b * 2).sum().backward()
    assert b.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_subclasses_give_plain_tensors() -> None:
    """A tensor subclass that only adds methods is reduced like a plain tensor."""

    class Named(torch.Tensor):
        pass

    value = cr.PerReplica([torch.ones(3).as_subclass(Named) for _ in range(2)])
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert [type(x) for x in result] == [torch.Tensor] * 2
    assert result[1].tolist() == [2.0] * 3


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_wins(op: str, dtype: torch.dtype) -> None:
    """A NaN in any replica makes the same element of the minimum and the maximum NaN, and no other element."""
    for place in range(4):
        xs = [torch.ones(33, dtype=dtype) * k for k in range(4)]
        xs[place][5] = float("nan")
        value = cr.PerReplica(xs)
        for x in cr.HierarchicalCopyAllReduce().reduce(op, value, value):
            assert x.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_once(dtype: torch.dtype) -> None:
    """Half types accumulate in float32: a mean cannot overflow, and small terms are not lost."""
    high = torch.tensor([40000.0], dtype=dtype)
    value = cr.PerReplica([high, high])
    assert cr.HierarchicalCopyAllReduce().reduce("mean", value, value)[1].tolist() == high.tolist()
    value = cr.PerReplica([torch.tensor([x], dtype=dtype) for x in (2048.0, 1.0, 1.0, 1.0, 1.0)])
    want = torch.tensor([2052.0]).to(dtype)
    for algorithm in ALGORITHMS:
        assert same(cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value)[0], want)


def test_mean_of_integers_has_the_current_default_dtype() -> None:
    """The mean of integers has torch's default dtype at the time of the call, and does not wrap around."""
    value = cr.PerReplica([torch.tensor([100, 127], dtype=torch.int8)] * 2)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            result = cr.HierarchicalCopyAllReduce().reduce("mean", value, value)
            alone = cr.HierarchicalCopyAllReduce().reduce("mean", value[0], "cpu:0")
        finally:
            torch.set_default_dtype(torch.float32)
        assert same(result[1], torch.tensor([100, 127], dtype=dtype))
        assert same(alone[0], torch.tensor([100, 127], dtype=dtype))


def test_mean_of_equal_integers_is_exact() -> None:
    """The mean of n equal integers is that integer: the sum is divided by n, not multiplied by 1 / n."""
    framework = get("torch")
    for n in range(1, 200):
        numbers = framework.numbers(cr.ReduceOp.MEAN, "int64", n)._replace(result="float64")
        assert framework.finish(torch.tensor([n * 7]), numbers).tolist() == [7.0]
        numbers = framework.numbers(cr.ReduceOp.MEAN, "complex64", n)
        assert framework.finish(torch.tensor([n * (7 + 5j)]), numbers).tolist() == [7 + 5j]


def test_infinity_in_one_part_of_a_complex_mean() -> None:
    """In the mean of complex numbers, an infinite real part does not change the imaginary part."""
    value = cr.PerReplica([torch.tensor([complex(float("inf"), 1)]), torch.tensor([2 + 2j])])
    result = cr.HierarchicalCopyAllReduce().reduce("mean", value, value)
    assert torch.view_as_real(result[1]).tolist() == [[float("inf"), 1.5]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_that_torch_cannot_add(dtype: torch.dtype) -> None:
    """Reducing dtypes that torch cannot add raises an UnsupportedError; broadcasting them works."""
    xs = [torch.tensor([1, 2]).to(dtype) for _ in range(2)]
    value = cr.PerReplica(xs)
    for op in OPS:
        with pytest.raises(cr.UnsupportedError, match=r"PyTorch cannot compute with uint"):
            cr.HierarchicalCopyAllReduce().reduce(op, value, value)
    result = cr.CrossDeviceOps().broadcast(xs[0], value)
    assert [x.tolist() for x in result] == [[1, 2]] * 2
    assert_own(list(result), xs)


class Wrapping(torch.Tensor):
    """A tensor that wraps others by torch's convention, ``__tensor_flatten__``, as DTensor does."""

    def __tensor_flatten__(self) -> None: ...


UNSUPPORTED = {
    "meta": (lambda: torch.ones(2, device="meta"), "meta tensors have no elements"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "to_dense"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "run the module once"),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn cannot be reduced"),
    "wrapping": (lambda: torch.ones(2).as_subclass(Wrapping), "wraps other tensors"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), "to_sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind"),
    "sparse float8": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1).to(torch.float8_e4m3fn), (2,)),
        "float8_e4m3fn cannot be reduced",
    ),
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


@pytest.mark.parametrize("name", ["cuda:99", "host1/cpu:0", "xpu:99", "mps:9", "tpu:0"])
def test_devices_that_do_not_exist(name: str) -> None:
    """A device that torch does not have is rejected, and the message lists the existing devices."""
    with pytest.raises(cr.DeviceError, match=r'(?s)no such device.*"cpu:0", "cpu:1"'):
        cr.HierarchicalCopyAllReduce().reduce("sum", torch.ones(2), name)


def test_devices_of_host_tensors() -> None:
    """Host tensors are on cpu:0, cpu:1, ...; results are in host memory."""
    value = cr.PerReplica([torch.ones(2) for _ in range(3)])
    assert value.devices == ("cpu:0", "cpu:1", "cpu:2")
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, torch.nn.Parameter(torch.zeros(1)))
    assert result.devices == ("cpu:0",)
    assert result[0].device == torch.device("cpu")


def coo(indices: list[list[int]], values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)


def test_slices_of_sparse_tensors_are_concatenated() -> None:
    """Slices are concatenated in the order of the replicas, with duplicates; inputs stay uncoalesced."""
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


def test_sparse_in_two_axes() -> None:
    """A COO tensor with two sparse axes is reduced too, also beside a dense replica."""
    a = coo([[0, 2, 2], [1, 0, 0]], torch.tensor([1, 2, 3]), (3, 2))
    value = cr.PerReplica([a, a])
    for x in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
        assert x.to_dense().tolist() == [[0, 2], [0, 0], [10, 0]]
    mixed = cr.PerReplica([torch.ones(3, 2, dtype=torch.int64), a])
    for x in cr.HierarchicalCopyAllReduce().reduce("sum", mixed, mixed):
        assert same(x, torch.tensor([[1, 2], [1, 1], [6, 1]]))


def test_sparse_and_dense_in_one_tree() -> None:
    """Each leaf of a tree keeps its kind: COO, IndexedSlices or dense. A leaf with a dense replica becomes dense."""
    trees = [
        {
            "coo": coo([[0]], torch.tensor([float(k)]), (2,)),
            "slices": cr.IndexedSlices(torch.full((1, 3), float(k)), torch.tensor([k]), (4, 3)),
            "dense": torch.full((2, 2), float(k)),
            "either": torch.ones(2) if k else coo([[1]], torch.tensor([5.0]), (2,)),
        }
        for k in range(3)
    ]
    for tree in cr.all_reduce(trees):
        assert tree["coo"].to_dense().tolist() == [3.0, 0.0]
        assert isinstance(tree["slices"], cr.IndexedSlices)
        assert tree["slices"].indices.tolist() == [0, 1, 2]
        assert tree["slices"].values.tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        assert tree["slices"].dense_shape == (4, 3)
        assert tree["dense"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert tree["either"].tolist() == [2.0, 7.0]


@pytest.mark.parametrize("index", [-1, 4])
def test_indices_beyond_the_shape(index: int) -> None:
    """Slices with an index outside the dense shape, also a negative one, raise an error when they are made dense."""
    slices = cr.IndexedSlices(torch.ones(1, 2), torch.tensor([index]), (4, 2))
    value = cr.PerReplica([slices, torch.ones(4, 2)])
    with pytest.raises(cr.ArgumentError, match=rf"(?s)outside its dense shape.*from {index} to {index}"):
        cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    a = torch.sparse_coo_tensor(torch.tensor([[0], [index]]), torch.ones(1), (4, 4), check_invariants=False)
    value = cr.PerReplica([a, torch.ones(4, 4)])
    with pytest.raises(cr.ArgumentError, match=r"outside its dense shape"):
        cr.HierarchicalCopyAllReduce().reduce("sum", value, value)


def test_sparse_slices_that_are_views() -> None:
    """Empty slices, conjugate views and slices that require gradients are reduced by value."""
    z = torch.tensor([[1 + 2j]]).conj()
    slices = [
        cr.IndexedSlices(z, torch.tensor([0], dtype=torch.int32), (2, 1)),
        cr.IndexedSlices(z[:0], torch.tensor([], dtype=torch.int64), (2, 1)),
    ]
    value = cr.PerReplica(slices)
    result = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert result[1].values.tolist() == [[1 - 2j]]
    assert result[1].indices.dtype is torch.int64
    leaf = torch.ones(1, requires_grad=True)
    x = cr.HierarchicalCopyAllReduce().reduce("sum", coo([[1]], leaf * 2, (3,)), "cpu:0")[0]
    assert not x.requires_grad
    assert x.to_dense().tolist() == [0.0, 2.0, 0.0]


def test_broadcast_and_gather() -> None:
    """A broadcast copies a view's elements; a gather makes sparse tensors dense and joins in the replicas' order."""
    x = torch.arange(6.0).reshape(2, 3).t()
    result = cr.CrossDeviceOps().broadcast(x, cr.PerReplica([0, 0, 0]))
    assert all(torch.equal(y, x) for y in result)
    assert_own(list(result), [x])
    parts = [torch.ones(2, 1), torch.zeros(2, 2)]
    gathered = cr.CrossDeviceOps().gather(cr.PerReplica(parts), "cpu:0", axis=1)[0]
    assert gathered.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert_own([gathered], parts)
    mixed = cr.PerReplica([torch.ones(2, 1), coo([[0], [0]], torch.tensor([7.0]), (2, 1))])
    assert cr.CrossDeviceOps().gather(mixed, "cpu:0", axis=1)[0].tolist() == [[1.0, 7.0], [1.0, 0.0]]


def test_inference_mode_changes_nothing() -> None:
    """Reductions run under inference_mode and on inference tensors."""
    with torch.inference_mode():
        value = cr.PerReplica([torch.ones(3), torch.ones(3)])
        inside = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    outside = cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
    assert inside[1].tolist() == outside[1].tolist() == [2.0] * 3


@pytest.mark.parametrize(("donated", "nbytes"), [(-1, 4000), (0, 0), (1, 0)])
def test_allocations_of_a_combination(donated: int, nbytes: int) -> None:
    """Combining 5 arrays allocates one array, or no array if one of the first two is donated."""
    framework = get("torch")
    xs = [torch.full((1000,), 6.0**k) for k in range(5)]
    numbers = framework.numbers(cr.ReduceOp.SUM, "float32", 5)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = framework.combine(xs, numbers, True, donated)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) == nbytes
    assert out.tolist() == [sum(6.0**k for k in range(5))] * 1000
    assert [k for k, x in enumerate(xs) if x[0] != 6.0**k] == ([] if donated < 0 else [donated])


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_logical_devices_of_one_gpu(algorithm: str) -> None:
    """Logical devices of one GPU reduce dense and sparse tensors in its memory."""
    xs = [torch.arange(10.0, device="cuda:0") * k for k in range(5)]
    value = cr.PerReplica(xs)
    assert value.devices == ("cuda:0", *(f"cuda:0#{k}" for k in range(1, 5)))
    result = cr.AllReduceCrossDeviceOps(algorithm, num_packs=2).reduce("mean", value, value)
    assert all(torch.equal(x.cpu(), torch.arange(10.0) * 2) and x.is_cuda for x in result)
    assert_own(list(result), xs)
    sparse = cr.PerReplica([coo([[1, 1]], torch.ones(2), (3,)).cuda(), torch.ones(3, device="cuda:0")])
    assert cr.HierarchicalCopyAllReduce().reduce("sum", sparse, "cpu:0")[0].tolist() == [1.0, 3.0, 1.0]
    framework = get("torch")
    for n in range(1, 200):
        numbers = framework.numbers(cr.ReduceOp.MEAN, "int64", n)._replace(result="float64")
        assert framework.finish(torch.tensor([n * 7], device="cuda:0"), numbers).tolist() == [7.0]
