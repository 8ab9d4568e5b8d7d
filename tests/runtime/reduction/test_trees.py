"""all_reduce: pytrees in, pytrees out."""

import collections
import dataclasses
import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
from expect import check, digits, small
from frameworks import NAMES
from pairs import each

import crossreduce as cr
from crossreduce.reduction.trees import flatten_tree

CLASSES = [
    None,
    cr.ReductionToOneDevice(),
    cr.ReductionToOneDevice("cpu:1"),
    cr.HierarchicalCopyAllReduce(),
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


@dataclasses.dataclass(kw_only=True)
class Child(Layer):
    extra: Any = None


@dataclasses.dataclass
class Normed:
    x: np.ndarray

    @functools.cached_property
    def norm(self):
        return float(self.x.sum())


def numbers(tree):
    """Return the leaves of a tree as lists, in order, for all kinds of nodes."""
    if tree is None:
        return []
    if dataclasses.is_dataclass(tree):
        return [x for field in dataclasses.fields(tree) for x in numbers(getattr(tree, field.name))]
    if isinstance(tree, dict):
        return [x for key in sorted(tree) for x in numbers(tree[key])]
    if isinstance(tree, (list, tuple, collections.deque)):
        return [x for node in tree for x in numbers(node)]
    return [np.asarray(tree).tolist()]


def build(make, n=3):
    """Return n trees, of which tree k is made from array k of ``digits``, and the sum of these arrays."""
    xs = digits(n, (2,))
    return [make(x) for x in xs], np.sum(xs, axis=0)


MAKERS = {
    "array": lambda x: x,
    "dict": lambda x: {"b": x, "a": 2 * x},
    "nested": lambda x: {"a": [x, (2 * x, {"c": 3 * x})], "b": ()},
    "list": lambda x: [x, 2 * x],
    "tuple": lambda x: (x, 2 * x),
    "namedtuple": lambda x: Pair(x, Pair(2 * x, [3 * x])),
    "None": lambda x: {"a": None, "b": x, "c": [None, x]},
    "OrderedDict": lambda x: collections.OrderedDict(b=x, a=2 * x),
    "defaultdict": lambda x: collections.defaultdict(list, b=x),
    "deque": lambda x: collections.deque([x, 2 * x], maxlen=5),
    "dataclass": lambda x: Layer(x, 2 * x),
    "frozen dataclass": lambda x: Frozen(Layer(x, [2 * x]), 3 * x),
    "dataclass with a derived field": lambda x: Derived(x),
    "dataclass of dataclasses": lambda x: {
        "a": [Frozen(Layer(x, None), Derived(x)), Child(w=x, b=x, extra=Layer(x, x))]
    },
}


@pytest.mark.parametrize(("kind", "ops"), each(MAKERS, CLASSES), ids=str)
def test_every_kind_of_tree(kind, ops):
    """The result has one tree per replica, with the same nodes as the inputs and reduced leaves."""
    trees, total = build(MAKERS[kind])
    wanted = MAKERS[kind](total)
    results = cr.all_reduce(trees, "sum", cross_device_ops=ops)
    assert type(results) is list
    assert len(results) == 3
    for result in results:
        assert type(result) is type(wanted)
        assert numbers(result) == numbers(wanted)
        if isinstance(result, dict):
            assert list(result) == list(wanted)
        if isinstance(result, collections.deque):
            assert result.maxlen == 5


def test_inputs_are_not_changed():
    """A reduction does not change the containers, dataclasses and arrays of its inputs."""
    for make in MAKERS.values():
        trees, _ = build(make)
        before = [numbers(tree) for tree in trees]
        leaves = [[id(x) for x in tree.values()] for tree in trees if type(tree) is dict]
        results = cr.all_reduce(trees, "sum")
        assert [numbers(tree) for tree in trees] == before
        assert [[id(x) for x in tree.values()] for tree in trees if type(tree) is dict] == leaves
        assert all(result is not tree for result in results for tree in trees)


def test_frozen_dataclasses_stay_frozen():
    """The result of a frozen dataclass is frozen too."""
    trees, total = build(lambda x: Frozen(Layer(x, x), 1.0))
    result = cr.all_reduce(trees)[1]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'scale'"):
        result.scale = 2
    assert result.layer.w.tolist() == total.tolist()
    assert result.scale.item() == 3.0


def test_derived_fields_are_reduced():
    """A field that is not an argument of __init__ is a leaf like others, and __init__ does not run again."""
    trees, total = build(Derived)
    trees[0].twice = trees[0].x * 0
    result = cr.all_reduce(trees)[0]
    assert result.x.tolist() == total.tolist()
    assert result.twice.tolist() == (2 * (total - trees[0].x)).tolist()


@pytest.mark.parametrize("tree", [{}, [], (), None, {"a": [], "b": None}], ids=str)
def test_trees_without_leaves(tree):
    """The result of trees without leaves is an equal tree per replica."""
    results = cr.all_reduce([tree, tree, tree])
    assert results == [tree, tree, tree]


def test_any_iterable_of_trees_is_accepted():
    """The trees may be a tuple, a generator or the values of a dict."""
    for trees in ((1.0, 2.0), (float(k) for k in (1, 2)), {"x": 1.0, "y": 2.0}.values()):
        assert [y.item() for y in cr.all_reduce(trees)] == [3.0, 3.0]


def test_one_replica():
    """The result of one tree is a copy."""
    tree = {"a": np.arange(3.0)}
    (result,) = cr.all_reduce([tree], "mean")
    assert result["a"].tolist() == [0, 1, 2]
    assert not np.shares_memory(result["a"], tree["a"])


def test_keys_in_another_order():
    """Dicts with the same keys in another order have the same structure; leaves are matched by key."""
    a, b = digits(2, (3,))
    results = cr.all_reduce([{"x": a, "y": 2 * a, "z": {"q": a}}, {"z": {"q": b}, "y": 2 * b, "x": b}])
    for result in results:
        assert result["x"].tolist() == (a + b).tolist()
        assert result["y"].tolist() == (2 * (a + b)).tolist()
        assert result["z"]["q"].tolist() == (a + b).tolist()


def test_python_numbers_are_leaves():
    """Python numbers are leaves; their results are NumPy arrays of shape ()."""
    results = cr.all_reduce([{"i": 1, "f": 1.5, "c": 1j}, {"i": 2, "f": 2.0, "c": 2j}], "mean")
    for result in results:
        assert [(result[k].dtype.name, result[k].shape, result[k].item()) for k in "ifc"] == [
            ("float64", (), 1.5),
            ("float64", (), 1.75),
            ("complex128", (), 1.5j),
        ]
    assert cr.all_reduce([True, False], "max")[1].item() is True


def test_python_numbers_are_in_host_memory():
    """Python numbers have the devices of NumPy arrays, so a tree may contain both under a topology of CPUs."""
    assert cr.PerReplica([1.0, 2.0]).devices == cr.PerReplica([np.ones(1), np.ones(1)]).devices == ("cpu:0", "cpu:1")
    topology = cr.Topology.ring(["cpu:0", "cpu:1", "cpu:2"])
    trees = [{"array": np.full(2, float(k)), "number": float(k)} for k in range(3)]
    for result in cr.all_reduce(trees, cross_device_ops=cr.AllReduceCrossDeviceOps("ring", topology=topology)):
        assert result["array"].tolist() == [3, 3]
        assert result["number"].item() == 3


def test_a_single_array_as_the_tree(framework):
    """An array is a tree of one leaf, in every framework."""
    xs = digits(3, (4,))
    given = framework.arrays(xs)
    for ops in CLASSES:
        results = cr.all_reduce(given, "sum", cross_device_ops=ops)
        check(
            framework,
            cr.Mirrored(results, [framework.device(k) for k in range(3)]),
            "sum",
            xs,
            ["cpu:0", "cpu:1", "cpu:2"],
            given,
        )


@pytest.mark.parametrize(
    ("op", "framework"), each([*cr.ReduceOp, "SUM", "Mean", "mIn"], NAMES), indirect=["framework"], ids=str
)
def test_leaves_stay_on_their_devices(framework, op):
    """Leaf k of result i is on the device of leaf k of tree i, and has the same bits on all devices."""
    name = op.value if isinstance(op, cr.ReduceOp) else op.lower()
    leaves = {"w": small("float32", (3, 2), 4), "b": small("float32", (), 4, 1), "e": small("float32", (0,), 4)}
    trees = [{key: framework.array(xs[k], k) for key, xs in leaves.items()} for k in range(4)]
    results = cr.all_reduce(trees, op, cross_device_ops=cr.HierarchicalCopyAllReduce(2))
    for key, xs in leaves.items():
        devices = [f"cpu:{k}" for k in range(4)]
        inputs = [tree[key] for tree in trees]
        check(framework, cr.Mirrored([r[key] for r in results], devices), name, xs, devices, inputs)


def test_mixed_frameworks_in_one_tree(numpy_, torch_, jax_, tensorflow_):
    """The leaves of one tree may be of different frameworks; each result is of the framework of its leaf."""
    frameworks = {"n": numpy_, "t": torch_, "j": jax_, "f": tensorflow_}
    xs = digits(3, (4,))
    trees = [{key: f.array(xs[k], k) for key, f in frameworks.items()} | {"s": float(k)} for k in range(3)]
    for ops in CLASSES:
        for result in cr.all_reduce(trees, cross_device_ops=ops):
            for key, framework in frameworks.items():
                assert framework.to_numpy(result[key]).tolist() == np.sum(xs, axis=0).tolist()
            assert result["s"].item() == 3.0


def test_leaves_are_moved_to_the_given_devices(framework):
    """devices= has the device of each replica, in any spelling; the leaves are moved there."""
    xs = digits(3, (4,))
    trees = [{"a": framework.array(x, 0)} for x in xs]
    results = cr.all_reduce(trees, devices=["CPU:2", "cpu:0", "/device:CPU:1"])
    check(
        framework,
        cr.Mirrored([r["a"] for r in results], ["cpu:2", "cpu:0", "cpu:1"]),
        "sum",
        xs,
        ["cpu:2", "cpu:0", "cpu:1"],
    )


def test_parameters_and_modules(torch_):
    """A module's parameters are reduced like tensors without gradients, and are not changed."""
    torch = torch_.torch
    models = [torch.nn.Linear(3, 2) for _ in range(3)]
    trees = [dict(model.named_parameters()) for model in models]
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    results = cr.all_reduce(trees, "mean", cross_device_ops=cr.HierarchicalCopyAllReduce())
    for key in ("weight", "bias"):
        xs = [tree[key].detach().numpy() for tree in trees]
        check(
            torch_,
            cr.Mirrored([r[key] for r in results]),
            "mean",
            xs,
            ["cpu:0", "cpu:1", "cpu:2"],
            [t[key] for t in trees],
        )
        assert not any(r[key].requires_grad for r in results)
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))


def test_variables(tensorflow_):
    """tf.Variables are reduced like tensors and are not changed."""
    tf = tensorflow_.tf
    variables = []
    for k in range(3):
        with tf.device(f"/CPU:{k}"):
            variables.append(tf.Variable([1.0 * k, 2.0]))
    for result in cr.all_reduce([{"v": v} for v in variables], "sum"):
        assert tensorflow_.to_numpy(result["v"]).tolist() == [3, 6]
    assert [v.numpy().tolist() for v in variables] == [[0, 2], [1, 2], [2, 2]]


def test_a_custom_subclass():
    """all_reduce reduces each leaf by a custom CrossDeviceOps, which gets the op, the devices and the options."""
    calls = []

    class Custom(cr.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            calls.append((op, value.devices, destinations, options))
            return self.broadcast_implementation(value[0] * 10, destinations)

    options = cr.CommunicationOptions(bytes_per_pack=7)
    trees = [{"a": np.ones(2), "b": np.float32(k)} for k in range(2)]
    results = cr.all_reduce(trees, "max", cross_device_ops=Custom(), options=options)
    assert [r["a"].tolist() for r in results] == [[10, 10]] * 2
    assert calls == [(cr.ReduceOp.MAX, ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), options)] * 2


def test_different_structures():
    """Trees of different structure raise an error that shows each replica and the leaves that only it has."""
    one = np.ones(1)
    for trees in (
        [{"a": one}, {"b": one}],
        [{"a": one}, {"a": one, "b": one}],
        [[one], (one,)],
        [[one], [one, one]],
        [one, [one]],
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
    with pytest.raises(cr.MismatchError, match=r"replica 0: 1 leaf; replica 1: 2 leaves, only here: tree\['b'\]"):
        cr.all_reduce([{"a": one}, {"a": one, "b": one}])


@pytest.mark.parametrize("ops", CLASSES, ids=str)
def test_errors_contain_the_path_of_the_leaf(ops):
    """An error about a leaf starts with the leaf's path in the tree, not with its number in the batch."""
    good = np.ones(2)
    for wrong, error, words in (
        ((np.ones(2), np.ones(3)), cr.MismatchError, "differ in shape or dtype"),
        ((np.ones(2), np.ones(2, "float32")), cr.MismatchError, "differ in shape or dtype"),
        (("a", "b"), cr.ArgumentError, "this is not an array.*\n  given: 'a'"),
        ((good, "b"), cr.ArgumentError, "this is not an array.*\n  given: 'b'"),
        ((np.array(["a"]), np.array(["b"])), cr.UnsupportedError, "cannot be reduced"),
        ((np.ones(2, bool), np.ones(2, bool)), cr.UnsupportedError, "bools"),
    ):
        trees = [{"z": good, "a": [good, {"w": x}], "b": good} for x in wrong]
        with pytest.raises(error, match=words) as caught:
            cr.all_reduce(trees, cross_device_ops=ops)
        assert str(caught.value).startswith("leaf tree['a'][1]['w']: ")
    trees = [Frozen(Layer(good, x), good) for x in (good, np.ones(3))]
    with pytest.raises(cr.MismatchError, match=r"^leaf tree\.layer\.b: "):
        cr.all_reduce(trees, cross_device_ops=ops)
    with pytest.raises(cr.MismatchError, match=r"^the replicas of one value differ"):
        cr.all_reduce([good, np.ones(3)], cross_device_ops=ops)


def test_frameworks_that_differ_between_replicas(accelerated):
    """A leaf whose components have different frameworks raises an error with the leaf's path and every framework."""
    trees = [{"a": np.ones(2)}, {"a": accelerated.array(np.ones(2), 1)}]
    with pytest.raises(
        cr.MismatchError, match=r"leaf tree\['a'\]: the replicas of one value are of different frameworks"
    ) as caught:
        cr.all_reduce(trees)
    assert "replica 0 on cpu:0: numpy" in str(caught.value)
    assert f"replica 1 on cpu:1: {accelerated.name}" in str(caught.value)


def test_lists_of_containers_of_a_framework(torch_):
    """A list of named tuples of torch is a tree, also after a call has taken one of them for an array."""
    import torch

    made = torch.max(torch.ones(2, 3), 0)
    with pytest.raises(cr.ReductionError, match="max"):
        cr.AllReduceCrossDeviceOps().broadcast(made, ["cpu:0"])
    reduced = cr.all_reduce([[made], [made]], "sum")
    assert reduced[0][0].values.tolist() == [2.0] * 3


def test_leaves_are_not_the_list_of_the_caller():
    """A thread that changes a list does not change the leaves of a call that runs."""
    tree = [np.ones(2), 1.0]
    leaves, _ = flatten_tree(tree)
    tree.clear()
    assert len(leaves) == 2


def test_results_do_not_share_containers():
    """Each replica's tree has its own containers: changing one result changes no other."""
    trees, total = build(lambda x: {"l": Layer(x, x), "d": [x]})
    first, second, _ = cr.all_reduce(trees)
    first["l"].w[:] = 0
    first["d"].append(1)
    first["l"].b = None
    assert second["l"].w.tolist() == total.tolist()
    assert len(second["d"]) == 1
    assert second["l"].b is not None


def test_dataclasses_are_registered_once_by_many_threads():
    """When many threads reduce instances of a new dataclass at the same time, all get their results."""
    errors = []

    def call(kind):
        try:
            assert cr.all_reduce([kind(1.0), kind(2.0)])[1].x == 3.0
        except BaseException as error:
            errors.append(error)

    for number in range(20):
        kind = dataclasses.make_dataclass(f"New{number}", ["x"])
        threads = [threading.Thread(target=call, args=(kind,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_cached_properties_are_not_copied():
    """A result computes its own cached properties; those of the inputs are not copied."""
    trees = [Normed(np.ones(3)), Normed(np.full(3, 5.0))]
    assert trees[0].norm == 3
    assert [tree.norm for tree in cr.all_reduce(trees)] == [18, 18]


def test_a_tree_that_contains_itself():
    """A tree that contains itself raises an ArgumentError."""
    loop = []
    loop.append(loop)
    with pytest.raises(cr.ArgumentError, match="too deep, or contains itself"):
        cr.all_reduce([loop, loop])
