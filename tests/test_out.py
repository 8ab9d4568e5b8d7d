"""``out=``: results are written into given arrays, into nothing else, and errors write nothing."""

import itertools
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import strategies
from expect import result_dtype, small
from frameworks import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce import ArgumentError, Mirrored, MismatchError, PerReplica, UnsupportedError

GUARD = 64  # bytes before and after each array that must stay as they are
POISON = 0xA5
OPS = cr.AllReduceCrossDeviceOps()


@pytest.fixture(params=["numpy", "torch"])
def writable(request):
    """Each framework whose arrays can be written into."""
    return request.getfixturevalue(f"{request.param}_")


@pytest.fixture
def arrays(writable):
    return Arrays(writable)


class Arrays:
    """Makes arrays of NumPy or torch in poisoned memory, all of which can be compared with what it was."""

    def __init__(self, framework):
        self.framework, self.blocks = framework, []

    def put(self, x):
        """Return an array that holds ``x``."""
        x = np.asarray(x)
        whole = np.full(x.nbytes + 2 * GUARD, POISON, np.uint8)
        self.blocks.append(whole)
        part = whole[GUARD : GUARD + x.nbytes]
        part.view(x.dtype)[...] = x.reshape(-1)
        if self.framework.name == "numpy":
            return part.view(x.dtype).reshape(x.shape)
        torch = self.framework.torch
        return torch.from_numpy(whole)[GUARD : GUARD + x.nbytes].view(getattr(torch, x.dtype.name)).reshape(x.shape)

    def blank(self, shape, dtype):
        """Return an array full of poison."""
        kind = oracle.dtype_of(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        poison = np.full(size, POISON, np.uint8) if dtype != "bool" else np.ones(size, np.uint8)
        return self.put(poison.view(kind).reshape(shape))

    def value(self, xs, devices=None):
        return PerReplica([self.put(x) for x in xs], devices)

    def blanks(self, n, shape, dtype="float64", devices=None):
        return PerReplica([self.blank(shape, dtype) for _ in range(n)], devices)

    def contents(self):
        """Return all memory that was handed out, and what lies around it."""
        return [whole.tobytes() for whole in self.blocks]

    def bits(self, x):
        return self.framework.to_numpy(x).tobytes()


def names(*numbers):
    return tuple(f"cpu:{k}" for k in numbers)


def two(k=1.0, shape=(6,)):
    return [np.full(shape, float(k)), np.full(shape, 2.0 * k)]


# ---- What is written ----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A value, where its result goes, and for each destination the component to write over, or ``None``."""

    xs: list[np.ndarray[Any, Any]]
    ask: strategies.Ask
    places: list[int | None]


@st.composite
def calls(draw, framework):
    """Draw a batch, an op that reduces it, and where its results are written."""
    op = draw(strategies.ops)
    known = strategies.dtypes if framework.name == "numpy" else st.sampled_from(DTYPES)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(known.filter(lambda dtype: op in strategies.ops_for(dtype)))
        ask = draw(strategies.requests(st.integers(1, 9)))
        xs = draw(strategies.arrays(dtype, draw(strategies.shapes), len(ask.sources)))
        places: list[int | None] = [None] * len(ask.destinations)
        if result_dtype(framework, op, dtype) == dtype and draw(st.booleans()):
            for k, source in enumerate(draw(st.permutations(range(len(xs))))[: len(places)]):
                places[k] = draw(st.sampled_from([source, source, None]))
        rows.append(Row(xs, ask, places))
    packing = draw(strategies.packings())
    made = cr.AllReduceCrossDeviceOps(
        draw(st.one_of(strategies.algorithms, st.just("auto"))),
        packing.num_packs, packing.small_bytes, packing.small_group,
    )  # fmt: skip
    ops = draw(st.sampled_from([made, made, cr.ReductionToOneDevice(draw(st.sampled_from([None, "cpu:3"])))]))
    return op, rows, ops, cr.CommunicationOptions(packing.bytes_per_pack)


def test_any_batch_into_any_arrays(writable):
    """Into new arrays or in place: the bits that come back without out, in the very arrays; no other byte."""

    @settings(max_examples=writable.examples // 2)
    @given(calls(writable))
    def law(call):
        op, rows, ops, options = call
        arrays = Arrays(writable)
        values = [arrays.value(row.xs, row.ask.sources) for row in rows]
        to = [PerReplica([0] * len(row.ask.destinations), row.ask.destinations) for row in rows]
        pairs = list(zip(values, to, strict=True))
        wanted = [[arrays.bits(y) for y in result] for result in ops.batch_reduce(op, pairs, options)]
        outs = []
        for value, row in zip(values, rows, strict=True):
            dtype = result_dtype(writable, op, row.xs[0].dtype.name)
            made = [arrays.blank(row.xs[0].shape, dtype) if k is None else value[k] for k in row.places]
            outs.append(PerReplica(made, row.ask.destinations))
        results = ops.batch_reduce(op, pairs, options, out=iter(outs))
        for value, row, out, result, due in zip(values, rows, outs, results, wanted, strict=True):
            assert type(result) is Mirrored
            assert result.devices == row.ask.destinations
            assert all(y is target for y, target in zip(result, out, strict=True))
            assert [arrays.bits(y) for y in result] == due
            for k, (x, component) in enumerate(zip(row.xs, value, strict=True)):
                assert k in row.places or arrays.bits(component) == x.tobytes()
        for whole in arrays.blocks:
            assert (whole[:GUARD] == POISON).all()
            assert (whole[whole.size - GUARD :] == POISON).all()

    law()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_large_values_in_place(arrays, op, dtype, monkeypatch):
    """Past the cache and by several threads: what is overwritten was read before."""
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "3")
    xs = [x + (np.arange(500_001) % 7).astype(dtype) for x in small(dtype, (500_001,), 3)]
    value = arrays.value(xs)
    wanted = [arrays.bits(y) for y in cr.HierarchicalCopyAllReduce(2).reduce(op, value, value)]
    out = value
    if op == "mean" and dtype == "int32":
        out = arrays.blanks(3, (500_001,), arrays.framework.mean_dtype(dtype))
    result = cr.HierarchicalCopyAllReduce(2).reduce(op, value, value, out=out)
    assert [arrays.bits(y) for y in result] == wanted


def test_reduce_in_place(arrays):
    """A value is its own out: each component becomes the result."""
    value = arrays.value([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    result = cr.AllReduceCrossDeviceOps("ring").reduce("sum", value, value, out=value)
    assert [x.tolist() for x in value] == [[9.0, 12.0]] * 3
    assert all(x is y for x, y in zip(result, value, strict=True))


def test_a_mirrored_is_as_good(arrays):
    """out may be any distributed values, on any destinations."""
    value, out = arrays.value(two()), Mirrored([arrays.blank((6,), "float64")], ["cpu:7"])
    result = cr.ReductionToOneDevice().reduce("mean", value, "cpu:7", out=out)
    assert result[0] is out[0]
    assert out[0].tolist() == [1.5] * 6


def test_a_number_goes_into_an_array(numpy_):
    """A Python number is reduced into an array of no axes."""
    out = PerReplica([np.zeros(()), np.zeros(())])
    OPS.reduce("sum", PerReplica([1.5, 2.0]), out, out=out)
    assert [x.item() for x in out] == [3.5, 3.5]


def test_a_value_that_is_elsewhere_too(arrays):
    """One value may stand in several pairs, and the same array in several replicas, where results go elsewhere."""
    x = arrays.put([1.0, 2.0])
    value, outs = PerReplica([x, x]), [arrays.blanks(2, (2,)), arrays.blanks(2, (2,))]
    OPS.batch_reduce("sum", [(value, value)] * 2, out=outs)
    assert [y.tolist() for out in outs for y in out] == [[2.0, 4.0]] * 4
    other = arrays.blank((2,), "float64")
    OPS.reduce("sum", value, value, out=PerReplica([other, x]))
    assert [other.tolist(), x.tolist()] == [[2.0, 4.0]] * 2


def test_what_was_sparse_on_some_replicas(arrays):
    """A value of sparse and dense components has a dense result, and it is written into out."""
    rows, indices = arrays.put(np.ones((2, 3))), arrays.put(np.array([0, 2]))
    value = PerReplica([cr.IndexedSlices(rows, indices, (4, 3)), arrays.put(np.full((4, 3), 2.0))])
    out = PerReplica([arrays.blank((4, 3), "float64"), value[1]])
    result = OPS.reduce("sum", value, value, out=out)
    for y, target in zip(result, out, strict=True):
        assert y is target
        assert y.tolist() == [[3.0] * 3, [2.0] * 3, [3.0] * 3, [2.0] * 3]


def test_other_layouts_are_read(arrays):
    """Only out must be in C order: what is reduced may lie in memory as it likes."""
    x = np.arange(12.0).reshape(3, 4)
    value = PerReplica([arrays.put(x.T).T, arrays.put(np.repeat(x, 2, 1))[:, ::2]])
    out = arrays.blanks(2, (3, 4))
    OPS.reduce("sum", value, value, out=out)
    assert [y.tolist() for y in out] == [(2 * x).tolist()] * 2


# ---- Trees --------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    w: Any
    b: Any


def tree(arrays, k, dtype="float32"):
    def leaf(shape, kind=dtype):
        return arrays.put(np.full(shape, k, kind))

    return {
        "layers": [Layer(leaf((2, 3)), leaf(3)), Layer(leaf((3, 1)), leaf(()))],
        "step": (leaf(1, "int32"),),
        "no": None,
    }


def leaves(node):
    if node is None:
        return []
    if isinstance(node, dict):
        return [leaf for key in sorted(node) for leaf in leaves(node[key])]
    return [leaf for child in node for leaf in leaves(child)] if isinstance(node, (list, tuple)) else [node]


def test_trees_into_trees(arrays):
    """Each leaf's result is written into the same leaf of out, and out's leaves come back in new trees."""
    trees, outs = [tree(arrays, 1), tree(arrays, 5)], [tree(arrays, 0), tree(arrays, 0)]
    results = cr.all_reduce(trees, "sum", out=(x for x in outs))
    assert [type(result["layers"][0]) for result in results] == [Layer, Layer]
    for result, out, each in zip(results, outs, trees, strict=True):
        assert all(y is target for y, target in zip(leaves(result), leaves(out), strict=True))
        assert all((np.asarray(y) == 6).all() for y in leaves(result))
        assert not any((np.asarray(x) == 6).any() for x in leaves(each))


def test_trees_in_place(arrays):
    """The inputs themselves reduce in place, mixed dtypes and all."""
    trees = [tree(arrays, 1), tree(arrays, 3), tree(arrays, 5)]
    before = [leaves(each) for each in trees]
    results = cr.all_reduce(trees, "max", out=trees)
    for result, each, old in zip(results, trees, before, strict=True):
        assert all(x is y is z for x, y, z in zip(leaves(result), leaves(each), old, strict=True))
        assert all((np.asarray(x) == 5).all() for x in leaves(each))


def test_a_mean_of_integers_needs_floats(arrays):
    """out's dtype is the result's: what true division gives, not the integers'."""
    trees = [{"n": arrays.put(np.int64([1, 2]))}, {"n": arrays.put(np.int64([4, 2]))}]
    wide = arrays.framework.mean_dtype("int64")
    outs = [{"n": arrays.blank((2,), wide)} for _ in trees]
    assert cr.all_reduce(trees, "mean", out=outs)[1]["n"].tolist() == [2.5, 2.0]
    refused(arrays, MismatchError, r"^leaf tree\['n'\]: .*like the result", cr.all_reduce, trees, "mean", out=trees)


def test_trees_of_several_frameworks(numpy_, torch_):
    """Leaves of different frameworks go each into its own."""
    ours, theirs = Arrays(numpy_), Arrays(torch_)
    trees = [[ours.put(np.full(3, k)), theirs.put(np.full(3, k))] for k in (1.0, 2.0)]
    cr.all_reduce(trees, out=trees)
    assert [x.tolist() for each in trees for x in each] == [[3.0] * 3] * 4


def test_an_empty_tree():
    """Trees without leaves have nothing to write."""
    assert cr.all_reduce([{}, {}], out=[{}, {}]) == [{}, {}]


# ---- Whose ops ----------------------------------------------------------------------------------------------------


def added(xs):
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


class Adding(cr.CrossDeviceOps):
    """Adds by itself; its results are new arrays."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return Mirrored([added(list(per_replica_value)) for _ in destinations], destinations)


class Handing(cr.CrossDeviceOps):
    """Hands on what it was given, to the implementation of another op."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return cr.HierarchicalCopyAllReduce().reduce_implementation(reduce_op, per_replica_value, destinations, options)


class Asking(cr.CrossDeviceOps):
    """Asks another op through its public face."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        to = PerReplica([0] * len(destinations), destinations)
        return cr.HierarchicalCopyAllReduce().reduce(reduce_op, per_replica_value, to, options)


class AskingForBatches(cr.CrossDeviceOps):
    """Asks another op for a batch through its public face."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        to = PerReplica([0] * len(destinations), destinations)
        return cr.HierarchicalCopyAllReduce().batch_reduce(reduce_op, [(per_replica_value, to)], options)[0]


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param(Adding(), id="adding"),
        pytest.param(Handing(), id="handing"),
        pytest.param(Asking(), id="asking"),
        pytest.param(AskingForBatches(), id="asking for batches"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_subclass_need_not_know(arrays, ops, in_place):
    """What a subclass's reduce_implementation returns is written into out, whatever it asks other ops for."""
    value = arrays.value(two())
    out = value if in_place else arrays.blanks(2, (6,))
    results = [ops.reduce("sum", value, value, out=out)]
    others = [arrays.value(two(k)) for k in (10.0, 100.0)]
    outs = others if in_place else [arrays.blanks(2, (6,)) for _ in others]
    results += ops.batch_reduce("sum", [(other, other) for other in others], out=outs)
    for result, target, due in zip(results, [out, *outs], (3.0, 30.0, 300.0), strict=True):
        assert all(y is x for y, x in zip(result, target, strict=True))
        assert [y.tolist() for y in target] == [[due] * 6] * 2


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_results_of_a_function_of_the_callers(arrays, op, in_place):
    """What accumulation_fn returns is written into out; it gets copies, so out may be the value itself."""
    value = arrays.value(two())
    out = value if in_place else arrays.blanks(2, (6,))
    result = cr.ReductionToOneDevice(accumulation_fn=added).reduce(op, value, value, out=out)
    assert all(y is x for y, x in zip(result, out, strict=True))
    assert [y.tolist() for y in out] == [[3.0 if op == "sum" else 1.5] * 6] * 2


def test_a_function_that_returns_another_dtype(arrays):
    """Where accumulation_fn's dtype is not that of out, nothing is written, and nothing beyond it."""
    wide = (lambda x: x.astype("float64")) if arrays.framework.name == "numpy" else (lambda x: x.double())
    value, out = arrays.value([np.ones(5, "float32")] * 2), arrays.blanks(2, (5,), "float32")
    ops = cr.ReductionToOneDevice(accumulation_fn=lambda xs: wide(added(xs)))
    refused(arrays, MismatchError, "float64", ops.reduce, "sum", value, value, out=out)


# ---- Errors -------------------------------------------------------------------------------------------------------


def refused(arrays, error, words, function, *args, **kwargs):
    """A call raises this error with these words, and leaves every byte as it was."""
    before = arrays.contents()
    with pytest.raises(error, match=words) as raised:
        function(*args, **kwargs)
    assert arrays.contents() == before, "something was written"
    text = str(raised.value)
    assert "\n  given: " in text
    assert "\n  try:   " in text


LIKE = "the arrays of out must be like the result"
EACH = "out must be a PerReplica or Mirrored on the destinations, in their order"
PAIRS = "out must have one PerReplica or Mirrored for each pair"
TREES = "out takes one tree a replica, as the trees themselves"
NUMPY = "results are written into writable NumPy arrays in C order"
SHARED = "results cannot be written into arrays that share memory"

WRONG = {
    "shape": (lambda a, v: a.blanks(2, (5,)), MismatchError, LIKE),
    "axes": (lambda a, v: a.blanks(2, (6, 1)), MismatchError, LIKE),
    "dtype": (lambda a, v: a.blanks(2, (6,), "float32"), MismatchError, LIKE),
    "one dtype of two": (
        lambda a, v: PerReplica([a.blank((6,), "float64"), a.blank((6,), "int64")]), MismatchError, LIKE,
    ),
    "too few": (lambda a, v: a.blanks(1, (6,)), ArgumentError, EACH),
    "too many": (lambda a, v: a.blanks(3, (6,)), ArgumentError, EACH),
    "devices": (lambda a, v: a.blanks(2, (6,), devices=names(0, 2)), ArgumentError, EACH),
    "order": (lambda a, v: a.blanks(2, (6,), devices=names(1, 0)), ArgumentError, EACH),
    "a list": (lambda a, v: list(a.blanks(2, (6,))), ArgumentError, EACH),
    "an array": (lambda a, v: a.blank((2, 6), "float64"), ArgumentError, EACH),
    "a name": (lambda a, v: "cpu:0", ArgumentError, EACH),
    "numbers": (lambda a, v: PerReplica([1.0, 2.0]), UnsupportedError, NUMPY),
    "scalars": (lambda a, v: PerReplica([np.float64(1), np.float64(2)]), UnsupportedError, NUMPY),
    "slices": (
        lambda a, v: PerReplica([cr.IndexedSlices(a.blank((6,), "float64"), a.put(np.arange(6)), (6,)) for _ in v]),
        UnsupportedError, f"{NUMPY}|this is no tensor that can be reduced",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_out(arrays, name):
    """What is no out for this result is refused, with what was given and what to do; a batch names the pair."""
    make, error, words = WRONG[name]
    value, good = arrays.value(two()), arrays.value(two())
    out = make(arrays, value)
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, error, words, ops.reduce, "sum", value, value, out=out)
        pairs, outs = [(good, good), (value, value)], [good, out]
        if isinstance(out, PerReplica):
            refused(arrays, error, f"^pair 1: ({words})", ops.batch_reduce, "sum", pairs, out=outs)
        else:
            refused(arrays, ArgumentError, PAIRS, ops.batch_reduce, "sum", pairs, out=outs)


@pytest.mark.parametrize(
    "outs",
    [[], [0], [0, 0, 0], "ab", {0: 0, 1: 1}, 3, PerReplica([1.0, 1.0])],
    ids=lambda outs: str(type(outs).__name__),
)
def test_a_wrong_number_of_outs(arrays, outs):
    """A batch has one out for each pair, in a list."""
    values = [arrays.value(two()), arrays.value(two())]
    outs = [values[0]] * len(outs) if isinstance(outs, list) else outs
    pairs = [(value, value) for value in values]
    refused(arrays, ArgumentError, PAIRS, OPS.batch_reduce, "sum", pairs, out=outs)


def test_wrong_trees(arrays):
    """out's trees are as many as the replicas; the leaf that does not fit is named."""
    trees = [{"a": arrays.put(x), "b": arrays.put(x)} for x in two()]
    a, b = arrays.blank((6,), "float64"), arrays.blank((6,), "float64")
    for out in ([], trees[:1], [*trees, trees[0]], trees[0], a, "ab", 3):
        refused(arrays, ArgumentError, TREES, cr.all_reduce, trees, out=out)
    for wrong, error, words in [
        (arrays.blank((5,), "float64"), MismatchError, LIKE),
        (1.0, UnsupportedError, "results are written into"),
        ("b", ArgumentError, "this is no array"),
        (type, ArgumentError, "this is no array"),
    ]:
        out = [{"a": a, "b": wrong}, {"a": b, "b": wrong}]
        refused(arrays, error, r"^leaf tree\['b'\]: .*" + words, cr.all_reduce, trees, out=out)


def test_trees_of_another_structure(arrays):
    """out's trees are of the replicas' structure; the message names what is too much or missing."""
    trees = [{"a": x, "b": x} for x in arrays.value(two())]
    a, b = arrays.blanks(2, (6,))
    for out, missing in (
        ([{"a": a}, {"a": b}], r"tree\['b'\]"),
        ([{"a": a, "c": a}, {"a": b, "c": b}], r"tree\['c'\]"),
        ([[a, a], [b, b]], r"tree\[0\]"),
    ):
        words = r"the trees of out differ in structure from the replicas'\.\n.*" + missing
        refused(arrays, MismatchError, words, cr.all_reduce, trees, out=out)


def test_sparse_values_have_no_out(arrays):
    """A sparse result has as many slices as there are: no array can be given for it."""
    slices = [cr.IndexedSlices(arrays.put(np.ones((2, 3))), arrays.put(np.array([0, 2])), (4, 3)) for _ in range(2)]
    value, out = PerReplica(slices), arrays.blanks(2, (4, 3))
    dense = arrays.value(two())
    words = "sparse results have sizes of their own"
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=out)
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=value)
        pairs = [(dense, dense), (value, value)]
        refused(arrays, UnsupportedError, "^pair 1: " + words, ops.batch_reduce, "sum", pairs, out=[dense, out])
    trees = [{"d": x, "s": s} for x, s in zip(dense, slices, strict=True)]
    refused(arrays, UnsupportedError, r"^leaf tree\['s'\]: " + words, cr.all_reduce, trees, out=trees)


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_arrays_that_nobody_can_write_into(request, arrays, name):
    """JAX's and TensorFlow's arrays are refused as out, and nothing of the batch is reduced."""
    final = request.getfixturevalue(f"{name}_")
    words = {"jax": "JAX arrays cannot be written into", "tensorflow": "TensorFlow's tensors cannot be written into"}[
        name
    ]
    value = PerReplica(final.arrays(two()))
    good = arrays.value(two())
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=value)
        pairs = [(good, good), (value, value)]
        refused(arrays, UnsupportedError, "^pair 1: " + words, ops.batch_reduce, "sum", pairs, out=[good, value])
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", good, value, out=value)
        refused(arrays, MismatchError, LIKE, ops.reduce, "sum", value, value, out=good)
    trees = [{"a": x, "b": y} for x, y in zip(good, value, strict=True)]
    refused(arrays, UnsupportedError, r"^leaf tree\['b'\]: " + words, cr.all_reduce, trees, out=trees)
    assert [final.to_numpy(x).tolist() for x in value] == [x.tolist() for x in two()]


def test_arrays_of_another_framework(numpy_, torch_):
    """A torch tensor takes no NumPy result, nor the other way round, though they could share memory."""
    ours, theirs = Arrays(numpy_), Arrays(torch_)
    value, other = ours.value(two()), theirs.value(two())
    for a, b in ((value, other), (other, value)):
        for out in (b, PerReplica([a[0], b[1]])):
            before = theirs.contents()
            refused(ours, MismatchError, LIKE, OPS.reduce, "sum", a, a, out=out)
            assert theirs.contents() == before


# ---- Arrays that cannot be written into, or share memory ------------------------------------------------------------

WAYS = {
    "kernels": cr.AllReduceCrossDeviceOps("direct"),
    "packs": cr.AllReduceCrossDeviceOps("ring", num_packs=3),
    "several dtypes": cr.AllReduceCrossDeviceOps("hierarchical_copy"),
    "loop": cr.AllReduceCrossDeviceOps("direct"),
    "one device": cr.ReductionToOneDevice(),
    "function": cr.ReductionToOneDevice(accumulation_fn=added),
    "subclass": Adding(),
}


def partly_sparse(arrays, value):
    """Return a value whose first component is sparse, which the loop reduces; its slices are the component."""
    rows = arrays.put(np.arange(len(value[0])))
    return PerReplica([cr.IndexedSlices(value[0], rows, tuple(value[0].shape)), *value.values[1:]], value.devices)


def read_only(a):
    value, out = a.value(two()), a.blanks(2, (6,))
    out[1].flags.writeable = False
    return [(value, out)]


def strided(a):
    return [(a.value(two()), PerReplica([a.blank((6,), "float64"), a.blank((12,), "float64")[::2]]))]


def in_fortran_order(a):
    return [(a.value(two(1, (3, 2))), PerReplica([a.blank((3, 2), "float64"), a.blank((2, 3), "float64").T]))]


def twice(a):
    return [(a.value(two()), PerReplica([a.blank((6,), "float64")] * 2))]


def overlapping(a):
    block = a.blank((9,), "float64")
    return [(a.value(two()), PerReplica([block[3:], block[:6]]))]


def one_element(a):
    block = a.blank((11,), "float64")
    return [(a.value(two()), PerReplica([block[:6], block[5:]]))]


def shared_by_pairs(a):
    out = a.blanks(2, (6,))
    return [(a.value(two()), out), (a.value(two(10)), out)]


def another_pairs_input(a):
    first, second = a.value(two()), a.value(two(10))
    return [(first, second), (second, a.blanks(2, (6,)))]


def an_earlier_pairs_input(a):
    first, second = a.value(two()), a.value(two(10))
    return [(first, a.blanks(2, (6,))), (second, first)]


def one_value_in_place_and_not(a):
    value = a.value(two())
    return [(value, value), (value, a.blanks(2, (6,)))]


def shifted(a):
    block = a.put(np.arange(7.0))
    return [(PerReplica([block[:6], a.put(np.ones(6))]), PerReplica([a.blank((6,), "float64"), block[1:]]))]


def transposed(a):
    x, y = a.put(np.arange(9.0).reshape(3, 3)), a.put(np.ones((3, 3)))
    return [(PerReplica([x.T, y]), PerReplica([x, y]))]


ORDER = r"results are written into (writable NumPy arrays in C order|contiguous tensors)"
REFUSED = {
    read_only: (UnsupportedError, f"{ORDER}[\\s\\S]*read-only"),
    strided: (UnsupportedError, ORDER),
    in_fortran_order: (UnsupportedError, ORDER),
    **dict.fromkeys(
        [
            twice, overlapping, one_element, shared_by_pairs, another_pairs_input, an_earlier_pairs_input,
            one_value_in_place_and_not, shifted, transposed,
        ],
        (ArgumentError, SHARED),
    ),
}  # fmt: skip


def _cases(kinds):
    for make, way in itertools.product(kinds, WAYS):
        yield pytest.param(make, way, id=f"{make.__name__}-{way}")


def check_refused(arrays, make, way):
    """A batch raises its error, and so does its one value where it is one, before anything is written."""
    rows = make(arrays)
    if way == "several dtypes":
        integers = arrays.value([np.int32([1, 2]), np.int32([3, 4])])
        rows = [(integers, integers), *rows]  # the first that would be written
    elif way == "loop":
        rows = [(partly_sparse(arrays, value), out) for value, out in rows]
    pairs = [(value, PerReplica([0] * len(out), out.devices)) for value, out in rows]
    error, words = REFUSED[make]
    if len(pairs) == 1:
        refused(arrays, error, words, WAYS[way].reduce, "sum", *pairs[0], out=rows[0][1])
    outs = [out for _, out in rows]
    if way != "several dtypes":
        good = arrays.value(two())
        pairs, outs = [(good, good), *pairs], [good, *outs]
    refused(arrays, error, words, WAYS[way].batch_reduce, "sum", pairs, out=outs)


@pytest.mark.parametrize(("make", "way"), list(_cases([make for make in REFUSED if make is not read_only])))
def test_nothing_is_written_where_out_cannot_be(arrays, make, way):
    """Whatever reduces a batch: arrays that cannot be written into, or share memory, are found before anything is."""
    check_refused(arrays, make, way)


@pytest.mark.parametrize(("make", "way"), list(_cases([read_only])))
def test_read_only_arrays(numpy_, make, way):
    """NumPy's read-only arrays are refused as well; torch has none."""
    check_refused(Arrays(numpy_), make, way)


def test_the_pair_or_leaf_is_named(arrays):
    """Of arrays that cannot be written into, or share memory, an error says which pair's or leaf's they are."""
    value, good = arrays.value(two()), arrays.value(two())
    for out, error in (
        (PerReplica([arrays.blank((6,), "float64"), arrays.blank((12,), "float64")[::2]]), UnsupportedError),
        (PerReplica([arrays.blank((6,), "float64")] * 2), ArgumentError),
    ):
        trees, outs = ([{"a": x, "b": y} for x, y in zip(good, other, strict=True)] for other in (value, out))
        refused(arrays, error, r"^leaf tree\['b'\]: ", cr.all_reduce, trees, out=outs)
        pairs = [(good, good), (value, value)]
        refused(arrays, error, "^pair 1: ", OPS.batch_reduce, "sum", pairs, out=[good, out])


# ---- What is torch's own --------------------------------------------------------------------------------------------


def test_parameters_in_and_out(torch_):
    """Parameters are reduced, and written into as what they are: the very parameters, which still ask for gradients."""
    torch = torch_.torch
    weights = [torch.nn.Parameter(torch.full((3,), k)) for k in (1.0, 3.0)]
    results = cr.all_reduce([{"w": w} for w in weights], "mean", out=[{"w": w} for w in weights])
    for result, w in zip(results, weights, strict=True):
        assert result["w"] is w
        assert w.requires_grad
        assert w.is_leaf
        assert w.tolist() == [2.0] * 3
    out = [torch.zeros(3) for _ in weights]
    cr.all_reduce(weights, "sum", out=out)
    assert [x.tolist() for x in out] == [[4.0] * 3] * 2
    assert not any(x.requires_grad for x in out)


@pytest.mark.parametrize("ops", [OPS, cr.ReductionToOneDevice(accumulation_fn=added), Adding()])
@pytest.mark.parametrize("size", [3, 100_000])
def test_autograd_hears_of_it(torch_, ops, size):
    """What was written into cannot serve a backward pass that saved it: its version rises, as for any write."""
    torch = torch_.torch
    w = torch.ones(size, requires_grad=True)
    saved = w * 2
    loss = (saved * saved).sum()
    other, versions = torch.zeros(size), saved._version
    cr.all_reduce([torch.ones(size)] * 2, out=[saved, other], cross_device_ops=ops)
    assert saved._version > versions
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_version_stays_where_nothing_is_written(torch_):
    """A call that is refused leaves what autograd saved as good as it was."""
    torch = torch_.torch
    w = torch.ones(6, requires_grad=True)
    saved = w * 2
    loss = (saved * saved).sum()
    for other in (saved, torch.zeros(12)[::2]):
        with pytest.raises(cr.ReductionError):
            cr.all_reduce([torch.ones(6)] * 2, out=[saved, other])
    loss.backward()
    assert w.grad.tolist() == [8.0] * 6


def test_inference_tensors(torch_):
    """Tensors that inference mode made can be read and written in it."""
    torch = torch_.torch
    with torch.inference_mode():
        value, out = [torch.ones(3), torch.ones(3)], [torch.zeros(3), torch.zeros(3)]
        cr.all_reduce(value, out=out)
        cr.all_reduce(value, out=value)
    assert [x.tolist() for x in (*out, *value)] == [[2.0] * 3] * 4


def test_conjugated_views_are_no_out(torch_):
    """A view that stands for other numbers than its memory holds is refused as out."""
    arrays = Arrays(torch_)
    x = arrays.put(np.array([1 + 2j, 3 + 4j]))
    for view in (x.conj(), x.conj().imag):
        value = arrays.value([np.ones(2, oracle.dtype_of(str(view.dtype).removeprefix("torch.")))] * 2)
        out = PerReplica([view, arrays.blank((2,), str(view.dtype).removeprefix("torch."))])
        refused(arrays, UnsupportedError, "contiguous tensors", OPS.reduce, "sum", value, value, out=out)


NO_MEMORY = """
import sys
import torch
import crossreduce as cr
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    fakes = [torch.zeros(3), torch.zeros(3)]
given = {"zero": torch._efficientzerotensor((3,)), "fake": fakes[0]}[sys.argv[1]]
try:
    cr.all_reduce([torch.ones(3), torch.ones(3)], out=[torch.ones(3), given])
except cr.ReductionError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["zero", "fake"])
def test_tensors_without_memory_are_no_out(kind):
    """Tensors that have a shape and no memory cannot be written into; the process lives on."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_MEMORY, kind], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "given:" in ran.stdout
