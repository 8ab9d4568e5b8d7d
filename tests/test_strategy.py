"""MirroredStrategy: replicas, contexts, reductions, splitting."""

import contextvars
import copy
import dataclasses
import itertools
import threading

import numpy as np
import oracle
import pytest
from expect import digits

import crossreduce as cr

COUNTS = (1, 2, 3, 5, 8, 9)
context = cr.get_replica_context
pytestmark = pytest.mark.usefixtures("no_thread_stays")


def values(library, xs):
    return cr.PerReplica(library.arrays(xs))


@pytest.mark.parametrize("n", COUNTS)
def test_all_reduce_in_replicas_gives_each_the_reduction(library, n):
    """Each replica's all_reduce gives the reduction of all replicas' arrays, in every op, on its own device."""
    xs = digits(n, (2, 3))
    strategy = cr.MirroredStrategy(n)
    for op in ("sum", "max", "min"):
        result = strategy.run(lambda x: context().all_reduce(op, x), args=(values(library, xs),))  # noqa: B023
        assert type(result) is cr.PerReplica
        assert result.devices == strategy.devices
        for k, y in enumerate(result):
            oracle.check(library.to_numpy(y), op, xs)
            assert library.device_of(y) in ("cpu", f"cpu:{k}")


@pytest.mark.parametrize("n", COUNTS)
def test_trees_go_through_one_batch(numpy_, n):
    """A tree's leaves are reduced by one batch_reduce; the structure comes back, numbers as arrays."""
    calls = []

    class Spy(cr.HierarchicalCopyAllReduce):
        def batch_reduce_implementation(self, reduce_op, pairs, options):
            calls.append(len(pairs))
            return super().batch_reduce_implementation(reduce_op, pairs, options)

    strategy = cr.MirroredStrategy(n, Spy())
    xs = digits(n, (3,))

    def step(x):
        return context().all_reduce(cr.ReduceOp.SUM, {"b": (x, 2 * x), "a": [1.5]})

    result = strategy.run(step, args=(cr.PerReplica(xs),))
    assert calls == [3]
    assert sorted(result) == ["a", "b"]
    for k in range(n):
        oracle.check(result["b"][1][k], "sum", [2 * x for x in xs])
        assert result["a"][0][k] == 1.5 * n


def test_replicas_run_at_the_same_time():
    """Replicas are threads of their own that all run at once: they can wait for each other."""
    barrier = threading.Barrier(4, timeout=20)
    idents = cr.MirroredStrategy(4).run(lambda: (barrier.wait(), threading.get_ident())[1])
    assert len(set(idents)) == 4
    assert threading.get_ident() not in list(idents)


def test_context_says_who_it_is():
    """A replica's context has its number, the number of replicas, its device and its strategy."""
    strategy = cr.MirroredStrategy(["cpu:2", "cpu:7", "cpu:0"])

    def step():
        here = context()
        assert here.strategy is strategy is cr.get_strategy()
        assert here is context()
        assert cr.has_strategy()
        assert not cr.in_cross_replica_context()
        assert f"replica {here.replica_id_in_sync_group} of 3" in repr(here)
        return here.replica_id_in_sync_group, here.num_replicas_in_sync, *here.devices

    number, count, device = strategy.run(step)
    assert number.values == (0, 1, 2)
    assert count.values == (3, 3, 3)
    assert device.values == strategy.devices == ("cpu:2", "cpu:7", "cpu:0")
    assert strategy.extended.worker_devices == strategy.devices
    assert strategy.num_replicas_in_sync == 3


def test_outside_of_a_strategy_there_is_one_replica():
    """Outside of all strategies the context is that of a single replica, as in TensorFlow."""
    here = context()
    assert (here.replica_id_in_sync_group, here.num_replicas_in_sync) == (0, 1)
    assert not cr.has_strategy()
    assert not cr.in_cross_replica_context()
    x = np.array([1.0, 2.0])
    assert here.all_reduce("mean", {"x": x})["x"].tolist() == [1.0, 2.0]
    assert here.all_gather(x, 0).tolist() == [1.0, 2.0]
    seen = here.merge_call(
        lambda strategy, v: (cr.in_cross_replica_context(), cr.has_strategy(), strategy.reduce("sum", v)), args=(x,)
    )
    assert (bool(seen[0]), bool(seen[1])) == (True, False)
    assert seen[2].tolist() == [1.0, 2.0]
    assert cr.get_strategy().num_replicas_in_sync == 1


def test_scope_is_the_cross_replica_context():
    """In scope there is no replica context; scopes of one strategy nest, and end with the block, after errors too."""
    strategy, other = cr.MirroredStrategy(2), cr.MirroredStrategy(3)
    with strategy.scope() as entered:
        assert entered is strategy is cr.get_strategy()
        assert context() is None
        assert cr.in_cross_replica_context()
        with strategy.scope():
            assert cr.in_cross_replica_context()
        with pytest.raises(cr.ContextError, match="inside of another's scope"), other.scope():
            pass
        with pytest.raises(cr.ContextError, match="inside of another's scope"):
            other.run(lambda: 1)
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert not cr.has_strategy()
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert not cr.has_strategy()
    assert other.run(lambda: 1).values == (1, 1, 1)


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_for_all_replicas_is_refused_in_one(n):
    """reduce and its kin, run and scope belong to the cross-replica context, and say so in a replica."""
    strategy = cr.MirroredStrategy(n)
    value = cr.PerReplica([1.0] * n)
    calls = {
        "reduce": lambda: strategy.reduce("sum", value),
        "gather": lambda: strategy.gather(value, 0),
        "run": lambda: strategy.run(lambda: 1),
        r"scope\(\)": lambda: strategy.scope().__enter__(),
        "reduce_to": lambda: strategy.extended.reduce_to("sum", value, value),
        "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("sum", [(value, value)]),
        "broadcast_to": lambda: strategy.extended.broadcast_to(1.0),
        "update": lambda: strategy.extended.update(value, print),
        "split": lambda: strategy.split(np.arange(3)),
        "replicate": lambda: strategy.replicate(1.0),
        "distribute_values_from_function": lambda: strategy.distribute_values_from_function(print),
    }
    for name, call in calls.items():
        with pytest.raises(
            cr.ContextError, match=rf"{name} belongs to the cross-replica context.*\n.*inside replica \d"
        ):
            strategy.run(call)
        with pytest.raises(RuntimeError):
            strategy.run(call)


@pytest.mark.parametrize("n", COUNTS)
def test_merge_call_runs_once_for_all(library, n):
    """merge_call's function runs once, in the caller's thread, where reduce and run work."""
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (2,))
    threads = []

    def merge(same, x, *, factor):
        threads.append(threading.get_ident())
        assert same is strategy
        assert context() is None
        assert type(x["x"]) is cr.PerReplica
        assert factor == "two"
        total = same.reduce("sum", x)["x"]
        nested = same.run(lambda v: context().all_reduce("sum", v), args=(x["x"],))
        return {"total": total, "nested": nested, "own": x["x"]}

    def step(x):
        got = context().merge_call(merge, args=({"x": x},), kwargs={"factor": "two"})
        assert context() is not None
        return got

    result = strategy.run(step, args=(values(library, xs),))
    assert threads == [threading.get_ident()]
    for k in range(n):
        oracle.check(library.to_numpy(result["total"][k]), "sum", xs)
        oracle.check(library.to_numpy(result["nested"][k]), "sum", xs)
        assert library.to_numpy(result["own"][k]).tolist() == xs[k].tolist()


def test_arguments_become_each_replicas_own():
    """Of distributed values in args and kwargs each replica gets its component; all else is handed on as it is."""
    strategy = cr.MirroredStrategy(3)
    own = cr.PerReplica([np.full(2, k) for k in range(3)])
    log, given = [], {"x": [own, 5], "y": None}

    def step(tree, same, *, log):
        assert tree["x"][1] == 5
        assert tree["y"] is None
        log.append(None)
        return tree["x"][0], same is given

    got, same = strategy.run(step, args=(given, given), kwargs={"log": log})
    assert [x.tolist() for x in got] == [[0, 0], [1, 1], [2, 2]]
    assert same.values == (False, False, False)  # it had distributed values inside
    assert len(log) == 3
    with pytest.raises(cr.ArgumentError, match=r"(?s)argument 0: .*2 components on cpu:0, cpu:1, for 3 replicas"):
        strategy.run(step, args=(cr.PerReplica([1, 2]), 0), kwargs={"log": log})
    loop = []
    loop.append(loop)
    with pytest.raises(cr.ArgumentError, match="contains itself"):
        strategy.run(len, args=(loop,))


@dataclasses.dataclass
class Output:
    loss: object
    name: str


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_are_regrouped_the_same_way_for_any_number_of_replicas(n):
    """Leaves become PerReplica, for one replica too; None and equal strings stay; structures must agree."""
    strategy = cr.MirroredStrategy(n)
    marker = object()
    made = strategy.run(lambda: (Output(np.float32(1), "a"), None, "same", 3, marker, True))
    assert type(made[0]) is Output
    assert type(made[0].loss) is cr.PerReplica
    assert made[0].name == "a"
    assert made[1:3] == (None, "same")
    for leaf, wanted in zip(made[3:], (3, marker, True), strict=True):
        assert type(leaf) is cr.PerReplica
        assert leaf.values == (wanted,) * n

    class Odd:
        device = "where nobody knows"

    odd = strategy.run(Odd)
    assert odd.devices == strategy.devices
    assert {type(x) for x in odd} == {Odd}
    names = strategy.run(lambda: f"replica {context().replica_id_in_sync_group}")
    assert list(names) == [f"replica {k}" for k in range(n)] if n > 1 else names == "replica 0"
    with strategy.scope():
        variable = cr.Variable(1.0)
    assert strategy.run(lambda: variable) is variable
    if n > 1:
        with pytest.raises(cr.MismatchError, match=r"differ in structure.*\n.*replica 1"):
            strategy.run(lambda: None if context().replica_id_in_sync_group else 1.0)
        with pytest.raises(cr.ArgumentError, match="cannot hold values of all replicas"):
            strategy.run(lambda: cr.PerReplica([1.0, 2.0]))


@pytest.mark.parametrize("n", COUNTS)
def test_reduce_and_gather_give_one_array(library, n):
    """reduce and gather of what run returned give one array a leaf, on the first replica's device."""
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (3,))
    tree = strategy.run(lambda x: {"x": x, "n": 2}, args=(values(library, xs),))
    total = strategy.reduce("sum", tree)
    oracle.check(library.to_numpy(total["x"]), "sum", xs)
    assert total["n"] == 2 * n
    assert library.device_of(total["x"]) in ("cpu", "cpu:0")
    joined = strategy.gather(tree["x"], axis=-1)
    assert library.to_numpy(joined).tolist() == np.concatenate(xs).tolist()
    again = strategy.run(lambda x: context().all_gather({"x": x}, 0)["x"], args=(tree["x"],))
    assert all(library.to_numpy(x).tolist() == np.concatenate(xs).tolist() for x in again)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("total", [0, 1, 4, 7, 20])
def test_reduce_along_an_axis_counts_elements(library, n, total):
    """Along an axis of uneven shares the mean counts all samples, and min and max skip empty shares."""
    strategy = cr.MirroredStrategy(n)
    batch = np.random.default_rng(total).integers(-9, 10, (total, 2)).astype(np.float32)
    split = strategy.split(library.array(batch))
    for op in ("sum", "mean", "min", "max", "product"):
        if total == 0 and op in ("mean", "min", "max"):
            with pytest.raises(cr.ArgumentError, match=f"the {op} of no elements"):
                strategy.reduce(op, split, axis=0)
            continue
        got = library.to_numpy(strategy.reduce(op, split, axis=0))
        rows = list(batch) if total else [np.float32([op == "product"] * 2)]
        oracle.check(got, op, rows, depth=total + n)
    numbers = np.random.default_rng(n).integers(-9, 10, (5, total)).astype(np.int32)
    summed = library.to_numpy(strategy.reduce("sum", strategy.split(library.array(numbers), axis=1), axis=-1))
    assert summed.dtype == np.int32
    assert summed.tolist() == numbers.sum(1).tolist()


def test_reduce_along_an_axis_is_wide_where_reductions_are(library):
    """Halves are added in float32 and rounded once along an axis, too; the mean of integers is a float."""
    strategy = cr.MirroredStrategy(3)
    halves = values(library, [np.full(2, 40000, np.float16)] * 3)
    got = library.to_numpy(strategy.reduce("mean", halves, axis=0))
    assert (got.dtype, got.item()) == (np.float16, 40000)
    small = values(library, [np.array([100, 101], np.int8)] * 3)
    got = library.to_numpy(strategy.reduce("mean", small, axis=0))
    assert (got.dtype.name, got.item()) == (library.mean_dtype("int8"), 100.5)


def test_reduce_of_what_is_the_same_for_all():
    """A single array's mean, min and max over replicas are itself; it has no sum, but for one replica or a 0."""
    x = np.array([1.0, 2.0])
    strategy = cr.MirroredStrategy(3)
    for op in ("mean", "min", "max"):
        assert strategy.reduce(op, x) is x
    with pytest.raises(cr.ArgumentError, match="the sum of a single array over 3 replicas"):
        strategy.reduce("sum", x)
    assert strategy.reduce("sum", {"a": 0, "b": 0.0})["b"] == 0.0
    assert cr.MirroredStrategy(1).reduce("sum", x) is x
    with pytest.raises(cr.ArgumentError, match="no such reduction"):
        strategy.reduce("avg", cr.PerReplica([1, 2, 3]))
    with pytest.raises(cr.ArgumentError, match="no such axis"):
        strategy.reduce("sum", cr.PerReplica([x] * 3), axis=1)
    assert strategy.reduce("sum", cr.PerReplica([x] * 3), axis=np.int64(0)) == 9
    with pytest.raises(cr.MismatchError) as caught:
        strategy.reduce("sum", cr.PerReplica([x, x, x[:1]]))
    assert "reduce(..., axis=...)" in caught.value.__notes__[0]


@pytest.mark.parametrize("other", [np.ones(2, np.float32), np.ones(2, np.int64), np.ones((2, 1))])
def test_replicas_that_differ_are_not_reduced_along_an_axis(library, other):
    """Along an axis, too, replicas of different dtypes or shapes are an error that says which, not a cast."""
    value = values(library, [np.ones(2), np.ones(3), other])
    with pytest.raises(cr.MismatchError, match=r"(?s)replica 1 on cpu:1: float64\[3\]; replica 2 on cpu:2"):
        cr.MirroredStrategy(3).reduce("sum", value, axis=0)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("size", [0, 1, 2, 7, 24])
def test_shares_tile_the_batch(library, n, size):
    """Shares are the batch cut in its order; they differ by at most one sample, and each lies on its device."""
    strategy = cr.MirroredStrategy(n)
    batch = np.arange(size * 3).reshape(size, 3)
    tree = strategy.split({"x": library.array(batch), "y": (library.array(batch[:, 0]),)})
    parts = [library.to_numpy(x) for x in tree["x"]]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert [len(y) for y in tree["y"][0]] == sizes
    assert tree["x"].devices == strategy.devices
    assert all(library.device_of(x) in ("cpu", f"cpu:{k}") for k, x in enumerate(tree["x"]))
    columns = strategy.split(library.array(batch.T), axis=np.int64(-1))  # any whole number
    assert [library.to_numpy(x).tolist() for x in columns] == [part.T.tolist() for part in parts]


def test_split_says_what_is_wrong():
    """Arrays of different sizes, without the axis, or no arrays are errors that name the leaf."""
    strategy = cr.MirroredStrategy(2)
    with pytest.raises(cr.MismatchError, match=r"(?s)size along axis 0.*\['a'\]: int64\[3\].*\['b'\]: int64\[4\]"):
        strategy.split({"a": np.arange(3), "b": np.arange(4)})
    with pytest.raises(cr.ArgumentError, match=r"leaf tree\['b'\]: an array without axis 0"):
        strategy.split({"a": np.arange(3), "b": 1.0})
    with pytest.raises(cr.ArgumentError, match="this is no array"):
        strategy.split({"a": "text"})
    with pytest.raises(cr.ArgumentError, match="axis must be a whole number"):
        strategy.split(np.arange(3), axis="x")
    with pytest.raises(cr.UnsupportedError, match="sparse arrays cannot be split"):
        strategy.split(cr.IndexedSlices(np.ones((1, 2)), np.array([0])))


def test_a_dataset_is_split_batch_by_batch():
    """distribute_dataset splits each batch when it is asked for, again on every pass, uneven last batches included."""
    strategy = cr.MirroredStrategy(3)
    data = np.arange(10)
    batches = [data[k : k + 4] for k in range(0, 10, 4)]
    dataset = strategy.distribute_dataset(batches)
    assert len(dataset) == 3
    for _ in range(2):
        sizes = [[len(x) for x in batch] for batch in dataset]
        assert sizes == [[2, 1, 1], [2, 1, 1], [1, 1, 0]]
        assert sum(int(strategy.reduce("sum", batch, axis=0)) for batch in dataset) == 45
    endless = iter(strategy.distribute_dataset(itertools.repeat(data)))
    assert len(next(endless)) == 3
    with pytest.raises(cr.ArgumentError, match="a dataset is an iterable"):
        strategy.distribute_dataset(5)


def test_values_are_made_replica_by_replica(library):
    """distribute_values_from_function calls once a replica, in order, and returns per-replica values."""
    strategy = cr.MirroredStrategy(3)
    made = strategy.distribute_values_from_function(
        lambda here: {
            "x": library.array(np.full(2, here.replica_id_in_sync_group), here.replica_id_in_sync_group),
            "d": here.device,
            "n": here.num_replicas_in_sync,
        }
    )
    assert [library.to_numpy(x).tolist() for x in made["x"]] == [[0, 0], [1, 1], [2, 2]]
    assert made["x"].devices == ("cpu:0", "cpu:1", "cpu:2")
    assert list(made["d"]) == list(strategy.devices)
    assert made["n"].values == (3, 3, 3)


def test_replicate_copies_to_each_device(library):
    """replicate gives each replica a copy of its own, on its device; what refers to each other still does."""
    strategy = cr.MirroredStrategy(3)
    x = library.array(np.arange(3.0))
    copies = strategy.replicate({"x": x})["x"]
    for k, y in enumerate(copies):
        assert library.to_numpy(y).tolist() == [0, 1, 2]
        assert library.device_of(y) in ("cpu", f"cpu:{k}")
        assert not library.shares(x, y)
        assert not any(library.shares(y, z) for z in copies.values[:k])

    class Node:
        other = None

    a, b = Node(), Node()
    a.other = b
    firsts, seconds = strategy.replicate((a, b))
    assert all(first.other is second for first, second in zip(firsts, seconds, strict=True))
    assert len({id(node) for node in firsts}) == 3
    with strategy.scope():
        variable = cr.Variable(1.0)
    with pytest.raises(cr.ArgumentError, match="replicated already"):
        strategy.replicate({"v": variable})


def test_local_results():
    """local_results gives a distributed value's components, and anything else as the only one."""
    strategy = cr.MirroredStrategy(2)
    assert strategy.local_results(cr.PerReplica([1, 2])) == (1, 2)
    assert strategy.local_results("x") == ("x",)


def test_extended_reduces_and_broadcasts(library):
    """extended has reduce_to, batch_reduce_to, broadcast_to with destinations, None being all devices; update."""
    n = 3
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (2,))
    value = values(library, xs)
    everywhere = strategy.extended.reduce_to("sum", value, None)
    assert everywhere.devices == strategy.devices
    (there,) = strategy.extended.reduce_to("sum", value, "cpu:2")
    oracle.check(library.to_numpy(there), "sum", xs)
    first, second = strategy.extended.batch_reduce_to("max", [(value, None), (value, "cpu:1")])
    assert (first.devices, second.devices) == (strategy.devices, ("cpu:1",))
    copies = strategy.extended.broadcast_to(library.array(xs[1]))
    assert [library.to_numpy(x).tolist() for x in copies] == [xs[1].tolist()] * n
    log = strategy.extended.update(
        value, lambda x, k, same: (library.to_numpy(x).tolist(), k, same), args=(cr.PerReplica([7, 8, 9]), 1)
    )
    assert log[1].values == (7, 8, 9)
    with pytest.raises(cr.ArgumentError, match="update takes a variable"):
        strategy.extended.update(xs[0], print)
    with pytest.raises(cr.ArgumentError, match="is no pair"):
        strategy.extended.batch_reduce_to("sum", [value])
    assert strategy.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (cr.HierarchicalCopyAllReduce, TypeError, "an instance of CrossDeviceOps, not the class"),
        ("hierarchical_copy", TypeError, "must be a CrossDeviceOps"),
        (object(), TypeError, "must be a CrossDeviceOps"),
    ],
)
def test_cross_device_ops_are_checked(given, error, words):
    """Anything but an instance of CrossDeviceOps is refused at once (TensorFlow's D17)."""
    with pytest.raises(error, match=words):
        cr.MirroredStrategy(2, given)


def test_falsy_ops_are_kept():
    """An op that counts as false is used all the same (D17)."""

    class Falsy(cr.ReductionToOneDevice):
        def __bool__(self):
            return False

    ops = Falsy()
    assert cr.MirroredStrategy(2, ops).cross_device_ops is ops
    assert "auto" in repr(cr.MirroredStrategy(2).cross_device_ops)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (0, "at least one device"),
        ([], "at least one device"),
        (-1, "devices must be a whole number"),
        (2.0, "devices must be a whole number"),
        (True, "devices must be a whole number"),
        ("cpu:0", "devices must be a list of names"),
        (["cpu:0", "CPU:0"], "only once"),
        (["disk:0"], "no device is spelled like this"),
    ],
)
def test_devices_are_checked(devices, words):
    """Devices are a count, or names that can be read, each once."""
    with pytest.raises(cr.ArgumentError, match=words):
        cr.MirroredStrategy(devices)


def test_without_devices_there_is_one_on_the_host():
    """Where no framework sees an accelerator, the default is one replica on cpu:0, as in TensorFlow."""
    import torch

    if not torch.cuda.is_available():
        assert cr.MirroredStrategy().devices == ("cpu:0",)
    assert cr.MirroredStrategy(3).devices == ("cpu:0", "cpu:1", "cpu:2")


def test_devices_are_those_of_the_topology(numpy_):
    """Arrays in host memory are reduced under the strategy's names, so that its topology's links are found."""
    seen = []

    class Spy(cr.AllReduceCrossDeviceOps):
        def batch_reduce_implementation(self, reduce_op, pairs, options):
            seen.extend(value.devices for value, _ in pairs)
            return super().batch_reduce_implementation(reduce_op, pairs, options)

    ring = cr.Topology.ring([f"cpu:{k}" for k in range(6)], 10)
    strategy = cr.MirroredStrategy(["cpu:5", "cpu:3"], Spy("auto", topology=ring))
    result = strategy.run(lambda: context().all_reduce("sum", np.ones(2)))
    assert result.devices == ("cpu:5", "cpu:3")
    assert float(strategy.reduce("sum", result)[0]) == 4
    assert seen == [("cpu:5", "cpu:3")] * 2


def test_bad_calls_of_run():
    """What cannot be called, and arguments that are none, are errors."""
    strategy = cr.MirroredStrategy(2)
    with pytest.raises(cr.ArgumentError, match="fn must be a function"):
        strategy.run(5)
    with pytest.raises(cr.ArgumentError, match="args must be a tuple"):
        strategy.run(print, args=np.ones(2))
    with pytest.raises(cr.ArgumentError, match="args must be a tuple"):
        strategy.run(print, kwargs=[1])
    with pytest.raises(cr.ArgumentError, match="options must be CommunicationOptions"):
        strategy.run(print, options=5)
    with pytest.raises(cr.ArgumentError, match="merge_fn must be a function"):
        strategy.run(lambda: context().merge_call(5))
    for wrong in ({"args": 5}, {"args": np.ones(2)}, {"kwargs": [1]}):
        with pytest.raises(cr.ArgumentError, match="args must be a tuple"):
            strategy.run(lambda wrong=wrong: context().merge_call(print, **wrong))
        with pytest.raises(cr.ArgumentError, match="args must be a tuple"):
            strategy.extended.update(cr.PerReplica([1.0, 2.0]), print, **wrong)
    loop = []
    loop.append(loop)
    for call in (
        lambda: strategy.run(lambda: context().all_reduce("sum", loop)),
        lambda: strategy.reduce("sum", loop),
        lambda: strategy.split(loop),
    ):
        with pytest.raises(cr.ArgumentError, match="contains itself"):
            call()


def test_context_variables_reach_replicas_and_stay_there():
    """Replicas start with the caller's context variables, NumPy's errstate among them, and do not change them."""
    colour = contextvars.ContextVar("colour", default="grey")
    colour.set("blue")

    def step():
        before = colour.get()
        colour.set("red")
        return before, colour.get(), np.geterr()["divide"]

    with np.errstate(divide="raise"):
        assert cr.MirroredStrategy(2).run(step) == ("blue", "red", "raise")
    assert colour.get() == "blue"


def test_runs_of_several_threads_do_not_mix():
    """Two threads may run replicas of one strategy, or of two, at the same time."""
    strategies = [cr.MirroredStrategy(3), cr.MirroredStrategy(2)]
    results = {}

    def work(number):
        strategy = strategies[number % 2]

        def step():
            here = context()
            assert here.strategy is strategy
            return [float(here.all_reduce("sum", float(number))) for _ in range(20)]

        results[number] = strategy.run(step)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2, 3]
    for number, got in results.items():
        assert all(x.values == (number * strategies[number % 2].num_replicas_in_sync,) * len(x) for x in got)


def test_tensorflow_is_sent_to_its_own_strategy(tensorflow_):
    """TensorFlow's tensors in replicas are refused with a pointer to tf.distribute and crossreduce.tensorflow."""
    x = cr.PerReplica(tensorflow_.arrays([np.ones(2), np.ones(2)]))
    strategy = cr.MirroredStrategy(2)
    with pytest.raises(cr.UnsupportedError, match=r"tf\.distribute\.MirroredStrategy.*crossreduce\.tensorflow"):
        strategy.run(lambda v: context().all_reduce("sum", v), args=(x,))
    with pytest.raises(cr.UnsupportedError, match=r"crossreduce\.tensorflow"):
        cr.Variable(x[0])
    assert tensorflow_.to_numpy(strategy.reduce("sum", x)).tolist() == [2, 2]


def test_inputs_stay_as_they_are_and_results_are_apart(library):
    """all_reduce in replicas writes no input, and its results share memory with nothing."""
    xs = digits(3, (4,))
    arrays = library.arrays([copy.deepcopy(x) for x in xs])
    result = cr.MirroredStrategy(3).run(lambda v: context().all_reduce("sum", v), args=(cr.PerReplica(arrays),))
    assert [library.to_numpy(a).tolist() for a in arrays] == [x.tolist() for x in xs]
    assert not any(library.shares(a, y) for a in arrays for y in result)


def test_distributed_values_in_a_replica_are_its_component():
    """A PerReplica or a variable handed to all_reduce inside a replica counts as the replica's component."""
    strategy = cr.MirroredStrategy(3)
    outside = cr.PerReplica([1.0, 10.0, 100.0])
    with strategy.scope():
        counter = cr.Variable(2.0, synchronization="on_read", aggregation="sum")
    a, b = strategy.run(lambda: context().all_reduce("sum", (outside, counter)))
    assert a.values == (111.0,) * 3
    assert b.values == (6.0,) * 3
