"""Custom reductions: subclasses of CrossDeviceOps, accumulation functions, and the device that reduces."""

import copy
import re

import numpy as np
import pytest
from expect import check, cpus, digits, on, small
from frameworks import NAMES
from pairs import each, pairs

import crossreduce as cr
from crossreduce import CommunicationOptions, Mirrored, PerReplica, ReduceOp


class Spy(cr.CrossDeviceOps):
    """Records the arguments of its implementations."""

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
    """reduce_implementation receives a ReduceOp, a PerReplica, a tuple of canonical names and options."""
    xs = digits(2, (3,))
    spy, value = Spy(), PerReplica(framework.arrays(xs), cpus(0, 1))
    result = spy.reduce("Mean", value, "/device:CPU:1")
    check(framework, result, "sum", xs[:1], cpus(1))
    name, op, given, destinations, options = spy.calls[0]
    assert (name, op, destinations) == ("reduce", ReduceOp.MEAN, ("cpu:1",))
    assert type(destinations) is tuple
    assert isinstance(given, PerReplica)
    assert given.devices == cpus(0, 1)
    assert given.values == value.values
    with pytest.raises(AttributeError, match="a validated value is immutable, so facts cannot be set"):
        given.facts = None
    assert type(copy.copy(given)) is PerReplica
    assert options == CommunicationOptions()
    hints = cr.CollectiveHints(bytes_per_pack=3)
    spy.reduce(ReduceOp.SUM, Mirrored(value.values, cpus(1, 0)), on(2, 1), hints)
    _, op, given, destinations, options = spy.calls[2]
    assert (op, given.devices, destinations) == (ReduceOp.SUM, cpus(1, 0), cpus(2, 1))
    assert isinstance(given, PerReplica)
    assert options is hints


def test_batch_reduce_calls_the_implementation(numpy_):
    """batch_reduce_implementation receives a list of pairs (PerReplica, names), and by default reduces pair by pair."""
    spy, value = Spy(), PerReplica(numpy_.arrays(digits(2, (3,))))
    results = spy.batch_reduce("max", iter([(value, "cpu:7"), (1.5, value)]))
    name, op, pairs, options = spy.calls[0]
    assert (name, op, options) == ("batch_reduce", ReduceOp.MAX, CommunicationOptions())
    assert type(pairs) is list
    assert all(type(pair) is tuple and isinstance(pair[0], PerReplica) for pair in pairs)
    assert [pair[1] for pair in pairs] == [cpus(7), cpus(0, 1)]
    assert [call[0] for call in spy.calls[1:]] == ["reduce", "broadcast"] * 2
    assert [result.devices for result in results] == [cpus(7), cpus(0, 1)]


def test_broadcast_and_gather_call_the_implementations(numpy_):
    """broadcast_implementation and gather_implementation receive validated arguments; the axis is not negative."""
    spy, x = Spy(), np.ones((2, 3))
    spy.broadcast(x, "CPU:4")
    assert spy.calls.pop()[0::2] == ("broadcast", cpus(4))
    spy.gather(PerReplica([x, x]), on(1, 0), -1)
    name, given, destinations, axis, options = spy.calls[0]
    assert (name, destinations, axis, options) == ("gather", cpus(1, 0), 1, CommunicationOptions())
    assert isinstance(given, PerReplica)


def test_arguments_are_validated_before_an_implementation_is_called():
    """An implementation is not called if an argument is invalid."""
    spy, value = Spy(), PerReplica([np.ones(2), np.ones(2)])
    bad = PerReplica([np.ones(2), np.ones(3)])
    for words, call in (
        ("not a known reduction", lambda: spy.reduce("average", value, value)),
        ("differ in shape or dtype", lambda: spy.reduce("sum", bad, value)),
        ("destinations must be", lambda: spy.reduce("sum", value, [])),
        ("cuda:0", lambda: spy.reduce("sum", value, "cuda:0")),
        ("options must be", lambda: spy.reduce("sum", value, value, options=3)),
        ("^pair 1: ", lambda: spy.batch_reduce("sum", [(value, value), (bad, value)])),
        ("element 1", lambda: spy.batch_reduce("sum", [(value, value), 3])),
        ("broadcast requires a single array", lambda: spy.broadcast(value, "cpu:0")),
        ("destinations must be", lambda: spy.broadcast(np.ones(2), None)),
        ("do not have this axis", lambda: spy.gather(value, "cpu:0", 1)),
        ("differ in structure", lambda: cr.all_reduce([[1.0], [1.0, 2.0]], cross_device_ops=spy)),
    ):
        with pytest.raises(cr.ReductionError, match=words):
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
    """If an implementation does not return a Mirrored on the destinations, an UnsupportedError names it."""

    class Custom(cr.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            return wrong(value, destinations)

        def broadcast_implementation(self, tensor, destinations):
            return wrong([tensor], destinations)

        def gather_implementation(self, value, destinations, axis, options):
            return wrong(value, destinations)

    ops, value = Custom(), PerReplica([np.ones(2), np.ones(2)])
    for call, name in (
        (lambda: ops.reduce("sum", value, value), "reduce"),
        (lambda: ops.batch_reduce("sum", [(value, value)]), "batch_reduce"),
        (lambda: ops.broadcast(value[0], value), "broadcast"),
        (lambda: ops.gather(value, value, 0), "gather"),
    ):
        words = rf"{name}_implementation must return a Mirrored on the destinations(.|\n)*given: "
        with pytest.raises(cr.UnsupportedError, match=words):
            call()


@pytest.mark.parametrize("wrong", [None, (), [], "ab", [1, 2]], ids=str)
def test_wrong_batches(wrong):
    """A batch implementation must return a list of one Mirrored per pair."""
    custom = type("Custom", (cr.CrossDeviceOps,), {"batch_reduce_implementation": lambda *_: wrong})()
    value = PerReplica([np.ones(2), np.ones(2)])
    words = r"Custom.batch_reduce_implementation must return a list of one Mirrored per pair"
    with pytest.raises(cr.UnsupportedError, match=words):
        custom.batch_reduce("sum", [(value, value)])


def test_the_base_class_does_not_reduce():
    """CrossDeviceOps itself can broadcast; it reduces only empty batches: its error recommends a subclass."""
    value, ops = PerReplica([np.ones(2), np.ones(2)]), cr.CrossDeviceOps()
    words = r"CrossDeviceOps does not implement reduce_implementation(.|\n)*ReductionToOneDevice"
    for call in (lambda: ops.reduce("sum", value, value), lambda: ops.batch_reduce("sum", [(value, value)])):
        with pytest.raises(NotImplementedError, match=words):
            call()
    assert ops.broadcast(np.ones(2), value)[1].tolist() == [1, 1]
    assert ops.batch_reduce("sum", []) == []


@pytest.mark.parametrize("error", [KeyError("custom"), cr.ArgumentError("pair 99: custom")])
def test_exceptions_of_custom_code_are_not_changed(error):
    """An exception that custom code raises, even one of this library, reaches the caller unchanged."""

    def broken(*_):
        raise error

    custom = type("Custom", (cr.CrossDeviceOps,), {"reduce_implementation": broken})()
    for call in (
        lambda: custom.reduce("sum", 1.0, "cpu:0"),
        lambda: cr.all_reduce([1.0, 2.0], cross_device_ops=custom),
        lambda: cr.ReductionToOneDevice(accumulation_fn=broken).reduce("sum", PerReplica([1.0, 2.0]), "cpu:0"),
    ):
        with pytest.raises(type(error), match=re.escape(str(error))) as caught:
            call()
        assert caught.value is error


# ---- reduce_to_device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "to", "dtype", "framework"),
    pairs(
        ["cpu:0", "/CPU:1", "cpu:2", "cpu:5"],
        [(0, 1, 2), (2,), (4, 1), (5, 6)],
        ["int64", "int32", "float16", "int8"],
        NAMES,
    ),
    indirect=["framework"],
    ids=str,
)
def test_reduce_to_device(framework, root, to, dtype):
    """The device that reduces does not have to be a source or a destination, and does not affect the result; with
    accumulation_fn too, the mean of integers is a float, and that of a half type is of that type."""
    xs = digits(3, (4,)) if dtype == "int64" else small(dtype, (4,), 3)
    value = PerReplica(framework.arrays(xs), cpus(0, 1, 2))
    for function in (None, lambda xs: sum(xs[1:], xs[0])):
        ops = cr.ReductionToOneDevice(root, accumulation_fn=function)
        for op in ("sum", "mean"):
            check(framework, ops.reduce(op, value, on(*to)), op, xs, cpus(*to), value)
        (result,) = ops.batch_reduce("sum", [(value, on(*to))])
        check(framework, result, "sum", xs, cpus(*to), value)


# ---- accumulation_fn --------------------------------------------------------------------------------------------


def maximum(framework):
    """Return a function that computes the maximum of a list of arrays with the framework's own operation."""
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


def test_accumulation_fn_replaces_the_sum(framework):
    """accumulation_fn receives a list of arrays on one device, in the order of the replicas; a mean divides the
    returned array."""
    xs = small("float32", (3, 2), 3)
    value = PerReplica(framework.arrays(xs), cpus(0, 1, 2))
    ops = cr.ReductionToOneDevice(accumulation_fn=maximum(framework))
    check(framework, ops.reduce("sum", value, value), "max", xs, cpus(0, 1, 2), value)
    for y in ops.reduce("mean", value, on(1, 4)):
        np.testing.assert_array_equal(framework.to_numpy(y), np.maximum.reduce(xs) / np.float32(3))
    received = []

    def spy(given):
        received.extend(framework.to_numpy(x).tolist() for x in given)
        assert {framework.device_of(x) for x in given} <= {"cpu", "cpu:2"}
        return given[0]

    cr.ReductionToOneDevice("cpu:2", spy).reduce("sum", value, value)
    assert received == [x.tolist() for x in xs]


def test_accumulation_fn_may_write_into_its_arguments(framework):
    """A function that writes into its arguments, keeps them or returns one of them does not change an input."""
    xs = small("float32", (4,), 3)
    kept = []

    def in_place(given):
        total = given[0]
        for x in given[1:]:
            total += x  # in place if arrays are mutable
        kept.append(total)
        return total

    for n, function in ((3, in_place), (3, lambda given: given[1]), (1, in_place), (1, lambda given: given[0])):
        given = framework.arrays(xs[:n])
        value = PerReplica(given, cpus(*range(n)))
        for destinations in (value, on(0), on(2, 1)):
            result = cr.ReductionToOneDevice(accumulation_fn=function).reduce("sum", value, destinations)
            wanted = xs[:n] if function is in_place else [xs[min(1, n - 1)]]
            check(framework, result, "sum", wanted, destinations.devices, [*given, *kept])
            for x, original in zip(given, xs, strict=False):
                assert framework.to_numpy(x).tolist() == original.tolist()


def test_accumulation_fn_receives_copies_of_unusual_inputs(numpy_):
    """The arguments of accumulation_fn are copies, also for inputs that are views, read-only or broadcast."""
    base = np.arange(8.0)
    base.flags.writeable = False
    given = [base[::2], np.broadcast_to(np.float64(3), (4,)), np.asfortranarray(np.ones(4))]

    def in_place(xs):
        for x in xs[1:]:
            xs[0] += x
        return xs[0]

    result = cr.ReductionToOneDevice(accumulation_fn=in_place).reduce("sum", PerReplica(given), "cpu:0")
    check(numpy_, result, "sum", given, cpus(0), given)
    assert base.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("wrong", "framework"), each([(2,), (), (4, 1), (1, 4)], NAMES), indirect=["framework"], ids=str
)
def test_accumulation_fn_of_wrong_shape(framework, wrong):
    """A function whose result has another shape raises an error with the shape of the components."""
    value = PerReplica(framework.arrays(small("float32", (4,), 2)), cpus(0, 1))
    ops = cr.ReductionToOneDevice(accumulation_fn=lambda xs: framework.array(np.zeros(wrong, "float32")))
    with pytest.raises(cr.MismatchError, match=r"one array of the components' shape(.|\n)*float32\[4\]"):
        ops.reduce("sum", value, value)


def test_wrong_uses_of_accumulation_fn(accelerated):
    """A function that returns an array of another framework, None or a list raises an error, and so does an op that is
    not a sum or mean."""
    value = PerReplica(accelerated.arrays(small("float32", (4,), 2)), cpus(0, 1))
    words = rf"an array of the same framework as its arguments(.|\n)*a {accelerated.name} array"
    with pytest.raises(cr.MismatchError, match=words):
        cr.ReductionToOneDevice(accumulation_fn=lambda xs: np.zeros(4, "float32")).reduce("sum", value, value)
    for wrong in (None, [], "x"):
        with pytest.raises(cr.ArgumentError, match="this is not an array"):
            cr.ReductionToOneDevice(accumulation_fn=lambda xs, wrong=wrong: wrong).reduce("sum", value, value)
    words = r"accumulation_fn replaces the sum, so the op must be sum or mean(.|\n)*without accumulation_fn"
    for op in ("min", "max", "product"):
        with pytest.raises(cr.ArgumentError, match=words):
            cr.ReductionToOneDevice(accumulation_fn=max).reduce(op, value, value)
