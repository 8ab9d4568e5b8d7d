"""``all_reduce`` of pytrees: one tree per replica, and one result per replica with the same structure."""

import collections
import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from expect import check, cpus, digits, small
from frameworks import NAMES
from pairs import each

import crossreduce as cr

CLASSES = [
    None,
    cr.ReductionToOneDevice("cpu:1"),
    cr.HierarchicalCopyAllReduce(0),
    cr.NcclAllReduce(3),
    cr.AllReduceCrossDeviceOps("ring"),
]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    layer: Layer
    scale: Any


@dataclasses.dataclass
class Derived:
    """A dataclass with a field that __init__ does not take, and an argument of __init__ that is not a field."""

    x: Any
    twice: Any = dataclasses.field(init=False)
    calls: dataclasses.InitVar[int] = 0

    def __post_init__(self, calls):
        self.twice = 2 * self.x

    @functools.cached_property
    def norm(self):
        return float(self.x.sum())


@dataclasses.dataclass(kw_only=True)
class Child(Layer):
    extra: Any = None


def numbers(tree):
    """Return the leaves of a tree, each as a list, in the order of the tree. This knows all kinds of nodes."""
    if dataclasses.is_dataclass(tree):
        return numbers([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    if isinstance(tree, dict):
        return numbers([tree[key] for key in sorted(tree)])
    if isinstance(tree, (list, tuple, collections.deque)):
        return [x for node in tree for x in numbers(node)]
    return [] if tree is None else [np.asarray(tree).tolist()]


MAKERS = [
    lambda x: x,
    lambda x: {"b": [x, (2 * x, {"c": 3 * x})], "a": (), "d": None, "e": [None, x]},
    lambda x: Pair(x, Pair(2 * x, [3 * x])),
    lambda x: collections.OrderedDict(b=x, a=2 * x),
    lambda x: collections.defaultdict(list, b=x),
    lambda x: collections.deque([x, 2 * x], maxlen=5),
    lambda x: {"a": [Frozen(Layer(x, None), Derived(x)), Child(w=x, b=x, extra=Layer(x, [2 * x]))]},
]


@pytest.mark.parametrize(("make", "ops"), each(MAKERS, CLASSES))
def test_every_kind_of_tree(make, ops):
    """Each replica gets a new tree of the same kinds of nodes with reduced leaves. The inputs do not change."""
    xs = digits(3, (2,))
    trees, wanted = [make(x) for x in xs], make(np.sum(xs, axis=0))
    before = [numbers(tree) for tree in trees]
    results = cr.all_reduce(trees, "sum", cross_device_ops=ops)
    assert (type(results), len(results)) == (list, 3)
    for result in results:
        assert (type(result), numbers(result)) == (type(wanted), numbers(wanted))
        assert not isinstance(result, dict) or list(result) == list(wanted)
        assert getattr(result, "maxlen", 5) == 5
        assert all(result is not tree for tree in trees)
    assert [numbers(tree) for tree in trees] == before


def test_dataclasses():
    """All fields are leaves, ``__init__`` does not run again, frozen stays frozen, and results share no container."""
    xs = digits(3, (2,))
    total = np.sum(xs, axis=0)
    trees = [Derived(x) for x in xs]
    trees[0].twice = xs[0] * 0  # ``__init__`` would set 2 * x
    assert trees[0].norm == xs[0].sum()
    for result in cr.all_reduce(trees):
        assert (result.x.tolist(), result.twice.tolist()) == (total.tolist(), (2 * (total - xs[0])).tolist())
        assert result.norm == total.sum()
    first, second, _ = cr.all_reduce([Frozen(Layer(x, [x]), 1.0) for x in xs])
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'scale'"):
        first.scale = 2
    first.layer.w[:] = 0
    first.layer.b.append(1)
    assert (second.layer.w.tolist(), len(second.layer.b), second.scale.item()) == (total.tolist(), 1, 3.0)


def test_lists_of_trees():
    """Trees may be in any iterable and have no leaves. Dicts are matched by key. A tree in itself is an error."""
    a, b = digits(2, (3,))
    results = cr.all_reduce([{"x": a, "y": 2 * a, "z": {"q": a}}, {"z": {"q": b}, "y": 2 * b, "x": b}])
    assert [numbers(result) for result in results] == [[x.tolist() for x in (a + b, 2 * (a + b), a + b)]] * 2
    for trees in ((1.0, 2.0), (float(k) for k in (1, 2)), {"x": 1.0, "y": 2.0}.values()):
        assert [y.item() for y in cr.all_reduce(trees)] == [3.0, 3.0]
    for tree in ({}, [], (), None, {"a": [], "b": None}):
        for ops in CLASSES:
            assert cr.all_reduce([tree] * 3, cross_device_ops=ops) == [tree] * 3
    (result,) = cr.all_reduce([{"a": a}], "mean")
    assert result["a"].tolist() == a.tolist()
    assert not np.shares_memory(result["a"], a)
    loop = []
    loop.append(loop)
    with pytest.raises(cr.ArgumentError, match="too deep, or contains itself"):
        cr.all_reduce([loop, loop])


@pytest.mark.parametrize(
    ("op", "framework"), each([*cr.ReduceOp, "SUM", "Mean", "mIn"], NAMES), indirect=["framework"], ids=str
)
def test_leaves_stay_on_their_devices(framework, op):
    """The result of a leaf is on the device of the leaf, or, with ``devices``, on the device of the replica."""
    name = op.value if isinstance(op, cr.ReduceOp) else op.lower()
    leaves = {"w": small("float32", (3, 2), 4), "b": small("float32", (), 4, 1), "e": small("float32", (0,), 4)}
    trees = [{key: framework.array(xs[k], k) for key, xs in leaves.items()} for k in range(4)]
    results = cr.all_reduce(trees, op, cross_device_ops=cr.HierarchicalCopyAllReduce(2))
    for key, xs in leaves.items():
        result, inputs = cr.Mirrored([r[key] for r in results], cpus(0, 1, 2, 3)), [tree[key] for tree in trees]
        check(framework, result, name, xs, cpus(0, 1, 2, 3), inputs)
    given = [tree["w"] for tree in trees[:3]]
    for ops in CLASSES:
        moved = cr.all_reduce(given, op, devices=["CPU:2", "cpu:0", "/device:CPU:1"], cross_device_ops=ops)
        check(framework, cr.Mirrored(moved, cpus(2, 0, 1)), name, leaves["w"][:3], cpus(2, 0, 1), given)


def test_mixed_frameworks_in_one_tree(numpy_, torch_, jax_, tensorflow_):
    """The leaves of a tree may be arrays of several frameworks, and numbers. A named tuple of torch is a node."""
    frameworks = {"n": numpy_, "t": torch_, "j": jax_, "f": tensorflow_}
    xs = digits(3, (4,))
    trees = [{key: f.array(xs[k], k) for key, f in frameworks.items()} | {"s": float(k)} for k in range(3)]
    for ops in CLASSES:
        for result in cr.all_reduce(trees, cross_device_ops=ops):
            for key, framework in frameworks.items():
                assert framework.to_numpy(result[key]).tolist() == np.sum(xs, axis=0).tolist()
            assert (result["s"].shape, result["s"].item()) == ((), 3.0)
    for result in cr.all_reduce([{"i": 1, "f": 1.5, "c": 1j}, {"i": 2, "f": 2.0, "c": 2j}], "mean"):
        assert [y.item() for y in result.values()] == [1.5, 1.75, 1.5j]
    jnp = jax_.jax.numpy
    assert cr.all_reduce([jnp.asarray(1.0), jnp.asarray(2.0)])[0].weak_type  # as under jit
    ring = cr.AllReduceCrossDeviceOps("ring", topology=cr.Topology.ring(cpus(0, 1, 2)))
    assert [y.item() for y in cr.all_reduce([0.0, 1.0, 2.0], cross_device_ops=ring)] == [3.0] * 3
    made = torch_.torch.max(torch_.torch.ones(2, 3), 0)
    with pytest.raises(cr.ReductionError, match="max"):
        cr.AllReduceCrossDeviceOps().broadcast(made, ["cpu:0"])
    assert cr.all_reduce([[made], [made]], "sum")[0][0].values.tolist() == [2.0] * 3


def test_different_structures():
    """Trees of different structure raise an error that shows, for each replica, the leaves that only its tree has."""
    one = np.ones(1)
    for trees in (
        [{"a": one}, {"b": one}],
        [[one], (one,)],
        [[one], [one, one]],
        [None, one],
        [Layer(one, one), Pair(one, one)],
        [Layer(one, one), Layer(one, [one])],
        [Layer(one, one), Child(w=one, b=one, extra=one)],
        [{"a": one}, {"a": one}, {"a": one, "c": one}],
    ):
        with pytest.raises(cr.MismatchError, match="trees differ in structure") as caught:
            cr.all_reduce(trees)
        for k in range(len(trees)):
            assert f"replica {k}: " in str(caught.value)
    assert "replica 2: 2 leaves, only here: tree['c']" in str(caught.value)


GOOD = np.ones(2)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ((GOOD, np.ones(3)), cr.MismatchError, "differ in shape or dtype"),
        (("a", "b"), cr.ArgumentError, "this is not an array.*\n  given: 'a'"),
        ((GOOD, "b"), cr.ArgumentError, "this is not an array.*\n  given: 'b'"),
        ((np.array(["a"]), np.array(["b"])), cr.UnsupportedError, "cannot be reduced"),
        ((GOOD > 0, GOOD > 0), cr.UnsupportedError, "bools"),
    ],
)
def test_errors_contain_the_path_of_the_leaf(wrong, error, words):
    """An error about a leaf starts with the path of the leaf in the tree, and not with its number in the batch."""
    for ops in CLASSES:
        for trees, path in (
            ([{"z": GOOD, "a": [GOOD, {"w": x}], "b": GOOD} for x in wrong], r"leaf tree\['a'\]\[1\]\['w'\]: "),
            ([Frozen(Layer(GOOD, x), GOOD) for x in wrong], r"leaf tree\.layer\.b: "),
            (list(wrong), ""),
        ):
            with pytest.raises(error, match=rf"(?s)^{path}.*{words}"):
                cr.all_reduce(trees, cross_device_ops=ops)


def reduced(kind, start):
    start.wait(100)
    return cr.all_reduce([kind(1.0), kind(2.0)])[1].x


def test_many_threads_may_register_one_new_dataclass():
    """If many threads reduce instances of a new dataclass at the same time, all get the right results."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            kind, start = dataclasses.make_dataclass(f"New{number}", ["x"]), threading.Barrier(8)
            calls = [pool.submit(reduced, kind, start) for _ in range(8)]
            assert [call.result() for call in calls] == [3.0] * 8
