"""MirroredStrategy in the cross-replica context: reduce, gather, split, replicate and extended."""

import itertools

import numpy as np
import oracle
import pytest
from expect import digits, value
from pairs import pairs

import crossreduce as cr

COUNTS = (1, 3, 8)
LIBRARIES = ("numpy", "torch", "jax")
context = cr.get_replica_context
pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.mark.parametrize("n", COUNTS)
def test_reduce_and_gather_return_one_array_per_leaf(library, n):
    """For a tree that ``run`` returned, reduce and gather return one array per leaf, on the first replica's device.
    all_gather gives every replica the gathered array."""
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (3,))
    tree = strategy.run(lambda x: {"x": x, "n": 2}, args=(value(library, xs),))
    total = strategy.reduce("sum", tree)
    oracle.check(library.to_numpy(total["x"]), "sum", xs)
    assert total["n"] == 2 * n
    assert library.device_of(total["x"]) in ("cpu", "cpu:0")
    joined = strategy.gather(tree["x"], axis=-1)
    assert library.to_numpy(joined).tolist() == np.concatenate(xs).tolist()
    again = strategy.run(lambda x: context().all_gather({"x": x}, 0)["x"], args=(tree["x"],))
    assert all(library.to_numpy(x).tolist() == np.concatenate(xs).tolist() for x in again)


@pytest.mark.parametrize(("library", "n", "total"), pairs(LIBRARIES, COUNTS, [0, 1, 4, 20]), indirect=["library"])
def test_reduce_along_an_axis_counts_elements(library, n, total):
    """If shares differ in size along an axis, its mean counts all samples, and min and max skip empty shares."""
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


def test_reduce_along_an_axis_accumulates_like_other_reductions(library):
    """Along an axis, too, half types are rounded only once, and the mean of integers is a float. Components that differ
    in more than their size along the axis raise a MismatchError."""
    strategy = cr.MirroredStrategy(3)
    halves = value(library, [np.full(2, 40000, np.float16)] * 3)
    got = library.to_numpy(strategy.reduce("mean", halves, axis=0))
    assert (got.dtype, got.item()) == (np.float16, 40000)
    small = value(library, [np.array([100, 101], np.int8)] * 3)
    got = library.to_numpy(strategy.reduce("mean", small, axis=0))
    assert (got.dtype.name, got.item()) == (library.mean_dtype("int8"), 100.5)
    for other in (np.ones(2, np.float32), np.ones(2, np.int64), np.ones((2, 1))):
        given = value(library, [np.ones(2), np.ones(3), other])
        with pytest.raises(cr.MismatchError, match=r"(?s)replica 1 on cpu:1: float64\[3\]; replica 2 on cpu:2"):
            strategy.reduce("sum", given, axis=0)


def test_reduce_of_a_single_array():
    """A single array is its own mean, min and max. Its sum is defined only if it is 0 or there is one replica. Invalid
    ops and axes raise errors, and a note names the argument ``axis`` if components differ in size."""
    x = np.array([1.0, 2.0])
    strategy = cr.MirroredStrategy(3)
    for op in ("mean", "min", "max"):
        assert strategy.reduce(op, x) is x
    with pytest.raises(cr.ArgumentError, match="the sum of a single array over 3 replicas"):
        strategy.reduce("sum", x)
    assert strategy.reduce("sum", {"a": 0, "b": 0.0})["b"] == 0.0
    assert cr.MirroredStrategy(1).reduce("sum", x) is x
    with pytest.raises(cr.ArgumentError, match="not a known reduction"):
        strategy.reduce("average", cr.PerReplica([1, 2, 3]))
    with pytest.raises(cr.ArgumentError, match="axis must be None or an axis of the value"):
        strategy.reduce("sum", cr.PerReplica([x] * 3), axis=1)
    assert strategy.reduce("sum", cr.PerReplica([x] * 3), axis=np.int64(0)) == 9
    with pytest.raises(cr.MismatchError, match="differ in shape or dtype") as caught:
        strategy.reduce("sum", cr.PerReplica([x, x, x[:1]]))
    assert "reduce(..., axis=...)" in caught.value.__notes__[0]


@pytest.mark.parametrize(("library", "n", "size"), pairs(LIBRARIES, COUNTS, [0, 2, 7, 24]), indirect=["library"])
def test_shares_tile_the_batch(library, n, size):
    """Shares are consecutive, on their replicas' devices, and the first ones are larger by at most one sample."""
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
    columns = strategy.split(library.array(batch.T), axis=np.int64(-1))  # an axis of any integer type
    assert [library.to_numpy(x).tolist() for x in columns] == [part.T.tolist() for part in parts]


def test_wrong_batches():
    """split raises an error for arrays of different sizes or without the axis, and for objects that are not arrays."""
    sizes = r"(?s)size along axis 0.*\['a'\]: int64\[3\].*\['b'\]: int64\[4\]"
    for error, words, batch, axis in (
        (cr.MismatchError, sizes, {"a": np.arange(3), "b": np.arange(4)}, 0),
        (cr.ArgumentError, r"leaf tree\['b'\]: the array has no axis 0", {"a": np.arange(3), "b": 1.0}, 0),
        (cr.ArgumentError, "this is not an array", {"a": "text"}, 0),
        (cr.ArgumentError, "axis must be an integer", np.arange(3), "x"),
        (cr.UnsupportedError, "sparse arrays cannot be split", cr.IndexedSlices(np.ones((1, 2)), np.array([0])), 0),
    ):
        with pytest.raises(error, match=words):
            cr.MirroredStrategy(2).split(batch, axis)


def test_a_dataset_is_split_batch_by_batch():
    """distribute_dataset splits each batch when the iteration reaches it, in every pass, also a smaller last batch."""
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
    with pytest.raises(cr.ArgumentError, match="a dataset must be an iterable"):
        strategy.distribute_dataset(5)


class Node:
    other = None


def test_values_of_each_replica(library):
    """distribute_values_from_function calls a function for each replica. replicate returns a copy of a tree for each
    replica, on its device, with the references between the tree's objects."""
    strategy = cr.MirroredStrategy(3)

    def make(here):
        k = here.replica_id_in_sync_group
        return {"x": library.array(np.full(2, k), k), "d": (here.device, here.num_replicas_in_sync)}

    made = strategy.distribute_values_from_function(make)
    assert [library.to_numpy(x).tolist() for x in made["x"]] == [[0, 0], [1, 1], [2, 2]]
    assert made["x"].devices == strategy.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert [list(x) for x in made["d"]] == [list(strategy.devices), [3, 3, 3]]
    x = library.array(np.arange(3.0))
    copies = strategy.replicate({"x": x})["x"]
    for k, y in enumerate(copies):
        assert library.to_numpy(y).tolist() == [0, 1, 2]
        assert library.device_of(y) in ("cpu", f"cpu:{k}")
        assert not library.shares(x, y)
        assert not any(library.shares(y, z) for z in copies.values[:k])
    a, b = Node(), Node()
    a.other = b
    firsts, seconds = strategy.replicate((a, b))
    assert all(first.other is second for first, second in zip(firsts, seconds, strict=True))
    assert len({id(node) for node in firsts}) == 3
    with strategy.scope():
        variable = cr.Variable(1.0)
    with pytest.raises(cr.ArgumentError, match="a variable cannot be replicated again"):
        strategy.replicate({"v": variable})


def test_extended_reduces_and_broadcasts(library):
    """extended reduces and broadcasts to any destinations, and ``update`` calls a function for each component.
    local_results returns the components."""
    n = 3
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (2,))
    given = value(library, xs)
    assert strategy.extended.reduce_to("sum", given, None).devices == strategy.devices
    (there,) = strategy.extended.reduce_to("sum", given, "cpu:2")
    oracle.check(library.to_numpy(there), "sum", xs)
    first, second = strategy.extended.batch_reduce_to("max", [(given, None), (given, "cpu:1")])
    assert (first.devices, second.devices) == (strategy.devices, ("cpu:1",))
    copies = strategy.extended.broadcast_to(library.array(xs[1]))
    assert [library.to_numpy(x).tolist() for x in copies] == [xs[1].tolist()] * n
    components, numbers, ones = strategy.extended.update(
        given, lambda x, number, one: (str(library.to_numpy(x)), number, one), args=(cr.PerReplica([7, 8, 9]), 1)
    )
    assert components.values == tuple(map(str, xs))
    assert (numbers.values, ones.values) == ((7, 8, 9), (1, 1, 1))
    with pytest.raises(cr.ArgumentError, match="var must be a variable"):
        strategy.extended.update(xs[0], print)
    with pytest.raises(cr.ArgumentError, match="is not a pair"):
        strategy.extended.batch_reduce_to("sum", [given])
    assert strategy.extended.batch_reduce_to("sum", []) == []
    assert strategy.local_results(cr.PerReplica([1, 2])) == (1, 2)
    assert strategy.local_results("x") == ("x",)
