"""What callers bring along: subclasses of CrossDeviceOps, accumulation functions, a device to reduce on."""

import numpy as np
import pytest
from expect import check, digits, small

import crossreduce as cr
from crossreduce import CommunicationOptions, Mirrored, PerReplica, ReduceOp


def names(*numbers):
    return tuple(f"cpu:{k}" for k in numbers)


def on(*numbers):
    return PerReplica([0] * len(numbers), names(*numbers))


class Spy(cr.CrossDeviceOps):
    """Notes what its implementations are given."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append(("reduce", reduce_op, per_replica_value, destinations, options))
        return self.broadcast_implementation(per_replica_value[0], destinations)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.calls.append(("batch_reduce", reduce_op, value_destination_pairs, options))
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def broadcast_implementation(self, tensor, destinations):
        self.calls.append(("broadcast", tensor, destinations))
        return super().broadcast_implementation(tensor, destinations)

    def gather_implementation(self, per_replica_value, destinations, axis, options):
        self.calls.append(("gather", per_replica_value, destinations, axis, options))
        return super().gather_implementation(per_replica_value, destinations, axis, options)


# ---- subclasses -------------------------------------------------------------------------------------------------


def test_reduce_calls_the_implementation(framework):
    """reduce_implementation is given a ReduceOp, a PerReplica, a tuple of canonical names and options."""
    xs = digits(2, (3,))
    spy, value = Spy(), PerReplica(framework.arrays(xs), names(0, 1))
    result = spy.reduce("Mean", value, "/device:CPU:1")
    check(framework, result, "sum", xs[:1], names(1))
    name, op, given, destinations, options = spy.calls[0]
    assert (name, op, destinations) == ("reduce", ReduceOp.MEAN, ("cpu:1",))
    assert type(destinations) is tuple
    assert isinstance(given, PerReplica)
    assert given.devices == names(0, 1)
    assert given.values == value.values
    assert options == CommunicationOptions()
    hints = cr.CollectiveHints(bytes_per_pack=3)
    spy.reduce(ReduceOp.SUM, Mirrored(value.values, names(1, 0)), on(2, 1), hints)
    _, op, given, destinations, options = spy.calls[2]
    assert (op, given.devices, destinations) == (ReduceOp.SUM, names(1, 0), names(2, 1))
    assert isinstance(given, PerReplica)
    assert options is hints


def test_batch_reduce_calls_the_implementation(numpy_):
    """batch_reduce_implementation is given a list of pairs (PerReplica, names); by default one reduce a pair."""
    spy, value = Spy(), PerReplica(numpy_.arrays(digits(2, (3,))))
    results = spy.batch_reduce("max", iter([(value, "cpu:7"), (1.5, value)]))
    name, op, pairs, options = spy.calls[0]
    assert (name, op, options) == ("batch_reduce", ReduceOp.MAX, CommunicationOptions())
    assert type(pairs) is list
    assert all(type(pair) is tuple and isinstance(pair[0], PerReplica) for pair in pairs)
    assert [pair[1] for pair in pairs] == [names(7), names(0, 1)]
    assert [call[0] for call in spy.calls[1:]] == ["reduce", "broadcast"] * 2
    assert [result.devices for result in results] == [names(7), names(0, 1)]


def test_broadcast_and_gather_call_the_implementations(numpy_):
    """broadcast_implementation and gather_implementation are given checked arguments; the axis counts from 0."""
    spy, x = Spy(), np.ones((2, 3))
    spy.broadcast(x, "CPU:4")
    assert spy.calls.pop()[0::2] == ("broadcast", names(4))
    spy.gather(PerReplica([x, x]), on(1, 0), -1)
    name, given, destinations, axis, options = spy.calls[0]
    assert (name, destinations, axis, options) == ("gather", names(1, 0), 1, CommunicationOptions())
    assert isinstance(given, PerReplica)


def test_checks_come_first():
    """A subclass's implementation is not called where an argument is wrong."""
    spy, value = Spy(), PerReplica([np.ones(2), np.ones(2)])
    bad = PerReplica([np.ones(2), np.ones(3)])
    for call in (
        lambda: spy.reduce("avg", value, value),
        lambda: spy.reduce("sum", bad, value),
        lambda: spy.reduce("sum", value, []),
        lambda: spy.reduce("sum", value, "cuda:0"),
        lambda: spy.reduce("sum", value, value, options=3),
        lambda: spy.batch_reduce("sum", [(value, value), (bad, value)]),
        lambda: spy.batch_reduce("sum", [(value, value), 3]),
        lambda: spy.broadcast(value, "cpu:0"),
        lambda: spy.broadcast(np.ones(2), None),
        lambda: spy.gather(value, "cpu:0", 1),
        lambda: cr.all_reduce([[1.0], [1.0, 2.0]], cross_device_ops=spy),
    ):
        with pytest.raises(cr.ReductionError):
            call()
    assert spy.calls == []


WRONG = {
    "None": lambda value, destinations: None,
    "an array": lambda value, destinations: value[0],
    "a list": lambda value, destinations: [value[0]] * len(destinations),
    "a PerReplica": lambda value, destinations: PerReplica([value[0]] * len(destinations), destinations),
    "other devices": lambda value, destinations: Mirrored([value[0]] * 2, ["cpu:8", "cpu:9"]),
    "another order": lambda value, destinations: Mirrored([value[0]] * 2, destinations[::-1]),
    "too few": lambda value, destinations: Mirrored([value[0]], destinations[:1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_returns(wrong):
    """An implementation that returns no Mirrored on the destinations is a TypeError that names it."""

    class Mine(cr.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            return wrong(value, destinations)

        def broadcast_implementation(self, tensor, destinations):
            return wrong([tensor], destinations)

        def gather_implementation(self, value, destinations, axis, options):
            return wrong(value, destinations)

    ops, value = Mine(), PerReplica([np.ones(2), np.ones(2)])
    for call, name in (
        (lambda: ops.reduce("sum", value, value), "reduce_implementation"),
        (lambda: ops.batch_reduce("sum", [(value, value)]), "batch_reduce_implementation"),
        (lambda: ops.broadcast(value[0], value), "broadcast_implementation"),
        (lambda: ops.gather(value, value, 0), "gather_implementation"),
    ):
        with pytest.raises(
            cr.UnsupportedError, match=rf"{name} must return a Mirrored on the destinations(.|\n)*given: "
        ):
            call()


@pytest.mark.parametrize("wrong", [None, (), [], "ab", [1, 2]], ids=str)
def test_wrong_batches(wrong):
    """A batch implementation must return a list of one Mirrored a pair."""

    class Mine(cr.CrossDeviceOps):
        def batch_reduce_implementation(self, op, pairs, options):
            return wrong

    value = PerReplica([np.ones(2), np.ones(2)])
    with pytest.raises(
        cr.UnsupportedError, match=r"Mine.batch_reduce_implementation must return a list of one Mirrored a pair"
    ):
        Mine().batch_reduce("sum", [(value, value)])


def test_the_base_class_does_not_reduce():
    """CrossDeviceOps itself broadcasts and gathers, and says what to implement where it is asked to reduce."""
    value = PerReplica([np.ones(2), np.ones(2)])
    for call in (
        lambda: cr.CrossDeviceOps().reduce("sum", value, value),
        lambda: cr.CrossDeviceOps().batch_reduce("sum", [(value, value)]),
    ):
        with pytest.raises(
            NotImplementedError, match=r"CrossDeviceOps does not say how to reduce(.|\n)*ReductionToOneDevice"
        ):
            call()
    assert cr.CrossDeviceOps().broadcast(np.ones(2), value)[1].tolist() == [1, 1]
    assert cr.CrossDeviceOps().batch_reduce("sum", []) == []


def test_a_subclass_of_a_subclass(numpy_):
    """A subclass of HierarchicalCopyAllReduce may wrap its implementation."""

    class Doubled(cr.HierarchicalCopyAllReduce):
        def batch_reduce_implementation(self, op, pairs, options):
            results = super().batch_reduce_implementation(op, pairs, options)
            return [Mirrored([2 * x for x in result], result.devices) for result in results]

    xs = digits(3, (2,))
    value = PerReplica(numpy_.arrays(xs))
    assert Doubled().reduce("sum", value, "cpu:0")[0].tolist() == (2 * np.sum(xs, axis=0)).tolist()
    assert Doubled().batch_reduce("sum", [(value, value)])[0][2].tolist() == (2 * np.sum(xs, axis=0)).tolist()


def test_an_implementation_may_be_called_with_plain_values(numpy_):
    """The implementations check what they are given themselves, so they can be called with any PerReplica."""
    xs = digits(3, (2,))
    value = PerReplica(numpy_.arrays(xs))
    options = CommunicationOptions()
    for ops in (cr.ReductionToOneDevice(), cr.HierarchicalCopyAllReduce(), cr.AllReduceCrossDeviceOps("ring")):
        result = ops.reduce_implementation(ReduceOp.SUM, value, names(1), options)
        check(numpy_, result, "sum", xs, names(1), value)
        with pytest.raises(cr.MismatchError):
            ops.reduce_implementation(ReduceOp.SUM, PerReplica([np.ones(1), np.ones(2)]), names(1), options)


def test_what_an_implementation_raises_comes_out():
    """An exception of the user's own comes out as it is."""

    class Mine(cr.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            raise KeyError("mine")

    for call in (
        lambda: Mine().reduce("sum", 1.0, "cpu:0"),
        lambda: cr.all_reduce([1.0, 2.0], cross_device_ops=Mine()),
    ):
        with pytest.raises(KeyError, match="mine"):
            call()


# ---- reduce_to_device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["cpu:0", "/CPU:1", "cpu:2", "cpu:5"])
@pytest.mark.parametrize("to", [(0, 1, 2), (2,), (4, 1), (5, 6)], ids=str)
def test_reduce_to_device(framework, root, to):
    """The device to reduce on need be neither source nor destination, and shows in no result."""
    xs = digits(3, (4,))
    value = PerReplica(framework.arrays(xs), names(0, 1, 2))
    for ops in (
        cr.ReductionToOneDevice(root),
        cr.ReductionToOneDevice(root, accumulation_fn=lambda xs: sum(xs[1:], xs[0])),
    ):
        for op in ("sum", "mean"):
            check(framework, ops.reduce(op, value, on(*to)), op, xs, names(*to), value)
        (result,) = ops.batch_reduce("sum", [(value, on(*to))])
        check(framework, result, "sum", xs, names(*to), value)


# ---- accumulation_fn --------------------------------------------------------------------------------------------


def maximum(framework):
    """Return a function of a list of arrays: their maximum, as the framework computes it."""
    pair = {
        "numpy": np.maximum,
        "torch": lambda a, b: a.maximum(b),
        "jax": lambda a, b: framework.jax.numpy.maximum(a, b),
        "tensorflow": lambda a, b: framework.tf.maximum(a, b),
    }[framework.name]

    def function(xs):
        assert type(xs) is list
        best = xs[0]
        for x in xs[1:]:
            best = pair(best, x)
        return best

    return function


def test_accumulation_fn_stands_for_the_sum(framework):
    """accumulation_fn gets a list of arrays on one device, in replica order; mean divides what it returns."""
    xs = small("float32", (3, 2), 3)
    value = PerReplica(framework.arrays(xs), names(0, 1, 2))
    ops = cr.ReductionToOneDevice(accumulation_fn=maximum(framework))
    check(framework, ops.reduce("sum", value, value), "max", xs, names(0, 1, 2), value)
    for y in ops.reduce("mean", value, on(1, 4)):
        np.testing.assert_array_equal(framework.to_numpy(y), np.maximum.reduce(xs) / np.float32(3))
    seen = []

    def spy(given):
        seen.extend(framework.to_numpy(x).tolist() for x in given)
        assert {framework.device_of(x) for x in given} <= {"cpu", "cpu:2"}
        return given[0]

    cr.ReductionToOneDevice("cpu:2", spy).reduce("sum", value, value)
    assert seen == [x.tolist() for x in xs]


def test_accumulation_fn_on_integers_and_halves(framework):
    """The mean of integers under accumulation_fn is a float, that of halves a half."""
    for dtype in ("int32", "float16", "int8"):
        xs = small(dtype, (4,), 3)
        value = PerReplica(framework.arrays(xs), names(0, 1, 2))
        ops = cr.ReductionToOneDevice(accumulation_fn=lambda xs: sum(xs[1:], xs[0]))
        for op in ("sum", "mean"):
            check(framework, ops.reduce(op, value, value), op, xs, names(0, 1, 2), value)


def test_accumulation_fn_may_write_into_what_it_gets(framework):
    """A function that writes into its arguments, keeps them or returns one of them changes no input."""
    xs = small("float32", (4,), 3)
    kept = []

    def in_place(given):
        total = given[0]
        for x in given[1:]:
            total += x  # in place where arrays can be written
        kept.append(total)
        return total

    for n, function in ((3, in_place), (3, lambda given: given[1]), (1, in_place), (1, lambda given: given[0])):
        given = framework.arrays(xs[:n])
        value = PerReplica(given, names(*range(n)))
        for destinations in (value, on(0), on(2, 1)):
            result = cr.ReductionToOneDevice(accumulation_fn=function).reduce("sum", value, destinations)
            wanted = xs[:n] if function is in_place else [xs[min(1, n - 1)]]
            check(framework, result, "sum", wanted, destinations.devices, [*given, *kept])
            for x, original in zip(given, xs, strict=False):
                assert framework.to_numpy(x).tolist() == original.tolist()


def test_accumulation_fn_may_write_into_sparse_and_strided_inputs(numpy_):
    """What accumulation_fn gets is its own, also where inputs are views, read-only, or dense copies of sparse ones."""
    base = np.arange(8.0)
    base.flags.writeable = False
    given = [base[::2], np.broadcast_to(np.float64(3), (4,)), np.asfortranarray(np.ones(4))]

    def in_place(xs):
        for x in xs[1:]:
            xs[0] += x
        return xs[0]

    result = cr.ReductionToOneDevice(accumulation_fn=in_place).reduce("sum", PerReplica(given), "cpu:0")
    check(numpy_, result, "sum", given, names(0), given)
    assert base.tolist() == list(range(8))


@pytest.mark.parametrize("wrong", [(2,), (), (4, 1), (1, 4)], ids=str)
def test_accumulation_fn_of_wrong_shape(framework, wrong):
    """A function whose result has another shape is an error that says both."""
    value = PerReplica(framework.arrays(small("float32", (4,), 2)), names(0, 1))
    ops = cr.ReductionToOneDevice(accumulation_fn=lambda xs: framework.array(np.zeros(wrong, "float32")))
    with pytest.raises(cr.MismatchError, match=r"one array of the components' shape(.|\n)*float32\[4\]"):
        ops.reduce("sum", value, value)


def test_accumulation_fn_of_wrong_kind(accelerated):
    """A function that returns another framework's array, nothing, or a list is an error."""
    value = PerReplica(accelerated.arrays(small("float32", (4,), 2)), names(0, 1))
    with pytest.raises(
        cr.MismatchError, match=rf"array of the framework it was given(.|\n)*a {accelerated.name} array"
    ):
        cr.ReductionToOneDevice(accumulation_fn=lambda xs: np.zeros(4, "float32")).reduce("sum", value, value)
    for wrong in (None, [], "x"):
        with pytest.raises(cr.ArgumentError):
            cr.ReductionToOneDevice(accumulation_fn=lambda xs, wrong=wrong: wrong).reduce("sum", value, value)


def test_accumulation_fn_under_another_op():
    """accumulation_fn stands for the sum; min, max and product with it are an error."""
    value = PerReplica([1.0, 2.0])
    for op in ("min", "max", "product"):
        with pytest.raises(cr.ArgumentError, match=r"accumulation_fn stands for the sum(.|\n)*without accumulation_fn"):
            cr.ReductionToOneDevice(accumulation_fn=max).reduce(op, value, value)


def test_what_accumulation_fn_raises_comes_out():
    """An exception of the function's own comes out as it is, and nothing is returned."""

    def broken(xs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        cr.ReductionToOneDevice(accumulation_fn=broken).reduce("sum", PerReplica([1.0, 2.0]), "cpu:0")
