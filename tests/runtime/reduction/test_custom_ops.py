"""Custom reductions: subclasses of CrossDeviceOps, accumulation functions, and the device that reduces."""

import copy
import re

import numpy as np
import pytest
from expect import check, cpus, digits, on, small, value

import crossreduce as cr
from crossreduce import CommunicationOptions, Mirrored, PerReplica, ReduceOp


class Spy(cr.CrossDeviceOps):
    """Records the arguments of its implementations in ``calls``."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, *args):
        self.calls.append(("reduce", *args))
        return self.broadcast_implementation(args[1][0], args[2])

    def batch_reduce_implementation(self, *args):
        self.calls.append(("batch_reduce", *args))
        return super().batch_reduce_implementation(*args)

    def broadcast_implementation(self, *args):
        self.calls.append(("broadcast", *args))
        return super().broadcast_implementation(*args)

    def gather_implementation(self, *args):
        self.calls.append(("gather", *args))
        return super().gather_implementation(*args)


def test_reduce_calls_the_implementation(framework):
    """``reduce_implementation`` receives a ReduceOp, an immutable PerReplica, canonical device names and options."""
    xs = digits(2, (3,))
    spy, value_ = Spy(), value(framework, xs)
    result = spy.reduce("Mean", value_, "/device:CPU:1")
    check(framework, result, "sum", xs[:1], cpus(1))
    name, op, given, destinations, options = spy.calls[0]
    assert (name, op, destinations, options) == ("reduce", ReduceOp.MEAN, ("cpu:1",), CommunicationOptions())
    assert isinstance(given, PerReplica)
    assert (given.devices, given.values) == (cpus(0, 1), value_.values)
    with pytest.raises(AttributeError, match="a validated value is immutable, so facts cannot be set"):
        given.facts = None
    assert type(copy.copy(given)) is PerReplica
    hints = cr.CollectiveHints(bytes_per_pack=3)
    spy.reduce(ReduceOp.SUM, Mirrored(value_.values, cpus(1, 0)), on(2, 1), hints)
    _, op, given, destinations, options = spy.calls[2]
    assert (op, given.devices, destinations) == (ReduceOp.SUM, cpus(1, 0), cpus(2, 1))
    assert isinstance(given, PerReplica)
    assert options is hints


def test_the_other_implementations_are_called(numpy_):
    """The implementations of batches, broadcasts and gathers receive validated arguments, and no negative axis."""
    spy, value, x = Spy(), PerReplica(numpy_.arrays(digits(2, (3,)))), np.ones((2, 3))
    results = spy.batch_reduce("max", iter([(value, "cpu:7"), (1.5, value)]))
    name, op, pairs, options = spy.calls[0]
    assert (name, op, options) == ("batch_reduce", ReduceOp.MAX, CommunicationOptions())
    assert type(pairs) is list
    assert all(type(pair) is tuple and isinstance(pair[0], PerReplica) for pair in pairs)
    assert [pair[1] for pair in pairs] == [result.devices for result in results] == [cpus(7), cpus(0, 1)]
    assert [call[0] for call in spy.calls[1:]] == ["reduce", "broadcast"] * 2
    spy.broadcast(x, "CPU:4")
    assert spy.calls[-1][0::2] == ("broadcast", cpus(4))
    spy.calls.clear()
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
        ("cuda:0", lambda: spy.reduce("sum", value, "cuda:0")),
        ("options must be", lambda: spy.reduce("sum", value, value, options=3)),
        ("^pair 1: ", lambda: spy.batch_reduce("sum", [(value, value), (bad, value)])),
        ("destinations must be", lambda: spy.broadcast(np.ones(2), None)),
        ("do not have this axis", lambda: spy.gather(value, "cpu:0", 1)),
        ("differ in structure", lambda: cr.all_reduce([[1.0], [1.0, 2.0]], cross_device_ops=spy)),
    ):
        with pytest.raises(cr.ReductionError, match=words):
            call()
    assert spy.calls == []


WRONG = (
    lambda value, destinations: None,
    lambda value, destinations: [value[0]] * len(destinations),
    lambda value, destinations: PerReplica([value[0]] * len(destinations), destinations),
    lambda value, destinations: Mirrored([value[0]] * 2, ["cpu:8", "cpu:9"]),
    lambda value, destinations: Mirrored([value[0]] * 2, destinations[::-1]),
    lambda value, destinations: Mirrored([value[0]], destinations[:1]),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_returns(wrong):
    """If an implementation does not return a Mirrored on the destinations, an UnsupportedError names it."""
    implementations = {
        "reduce_implementation": lambda ops, op, value, to, options: wrong(value, to),
        "broadcast_implementation": lambda ops, tensor, to: wrong([tensor], to),
        "gather_implementation": lambda ops, value, to, axis, options: wrong(value, to),
    }
    value, ops = PerReplica([np.ones(2), np.ones(2)]), type("Custom", (cr.CrossDeviceOps,), implementations)()
    for name, *args in (
        ("reduce", "sum", value, value),
        ("batch_reduce", "sum", [(value, value)]),
        ("broadcast", value[0], value),
        ("gather", value, value, 0),
    ):
        words = rf"{name}_implementation must return a Mirrored on the destinations(.|\n)*given: "
        with pytest.raises(cr.UnsupportedError, match=words):
            getattr(ops, name)(*args)


@pytest.mark.parametrize("wrong", [None, (), [], "ab", [1, 2]])
def test_wrong_returns_of_batches(wrong):
    """If ``batch_reduce_implementation`` does not return one Mirrored per pair, an UnsupportedError names it."""
    ops = type("Custom", (cr.CrossDeviceOps,), {"batch_reduce_implementation": lambda *_: wrong})()
    words = "Custom.batch_reduce_implementation must return a list of one Mirrored per pair"
    with pytest.raises(cr.UnsupportedError, match=words):
        ops.batch_reduce("sum", [(np.ones(2), "cpu:0")])


def test_the_base_class_does_not_reduce():
    """CrossDeviceOps itself can broadcast, but reduces only empty batches. Its error recommends a subclass."""
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


def test_accumulation_fn_replaces_the_sum(framework):
    """``accumulation_fn`` receives the arrays on one device, in order. For a mean, its result is divided."""
    xs, received = small("float32", (3, 2), 3), []
    given = value(framework, xs)

    def weighted(arrays):
        assert type(arrays) is list
        received.append([framework.to_numpy(x).tolist() for x in arrays])
        assert {framework.device_of(x) for x in arrays} <= {"cpu", "cpu:2"}
        return arrays[0] - 2 * arrays[2]

    ops = cr.ReductionToOneDevice("cpu:2", weighted)
    check(framework, ops.reduce("sum", given, given), "sum", [xs[0], -2 * xs[2]], cpus(0, 1, 2), given)
    for y in ops.reduce("mean", given, on(1, 4)):
        np.testing.assert_array_equal(framework.to_numpy(y), (xs[0] - 2 * xs[2]) / np.float32(3))
    assert received == [[x.tolist() for x in xs]] * 2
    given, add = value(framework, small("int8", (4,), 3)), lambda arrays: sum(arrays[1:], arrays[0])
    result = cr.ReductionToOneDevice("cpu:5", add).reduce("mean", given, given)
    check(framework, result, "mean", small("int8", (4,), 3), cpus(0, 1, 2), given)


def test_accumulation_fn_may_write_into_its_arguments(framework):
    """An ``accumulation_fn`` may write into its arguments, keep them or return one of them: no input changes."""
    xs, kept = small("float32", (4,), 3), []

    def in_place(arrays):
        total = arrays[0]
        for x in arrays[1:]:
            total += x  # in place if arrays are mutable
        kept.append(total)
        return total

    for function, inputs, summed in (
        (in_place, xs, xs),
        (lambda arrays: arrays[1], xs, xs[1:2]),
        (in_place, xs[:1], xs[:1]),
        (lambda arrays: arrays[0], xs[:1], xs[:1]),
    ):
        given = value(framework, inputs)
        for destinations in (given, on(0), on(2, 1)):
            result = cr.ReductionToOneDevice(accumulation_fn=function).reduce("sum", given, destinations)
            check(framework, result, "sum", summed, destinations.devices, [*given, *kept])
            assert [framework.to_numpy(x).tolist() for x in given] == [x.tolist() for x in inputs]


def test_wrong_uses_of_accumulation_fn(framework):
    """``accumulation_fn`` must return an array like its arguments, and the op must be a sum or mean."""
    given = value(framework, small("float32", (4,), 2))
    words, shapes = r"one array of the components' shape(.|\n)*float32\[4\]", ((2,), (), (4, 1), (1, 4))
    cases = [(framework.array(np.zeros(shape, "float32")), cr.MismatchError, words) for shape in shapes]
    cases += [(wrong, cr.ArgumentError, "this is not an array") for wrong in (None, [], "x")]
    if framework.name != "numpy":
        words = rf"an array of the same framework as its arguments(.|\n)*a {framework.name} array"
        cases.append((np.zeros(4, "float32"), cr.MismatchError, words))
    for wrong, error, words in cases:
        with pytest.raises(error, match=words):
            cr.ReductionToOneDevice(accumulation_fn=lambda xs, wrong=wrong: wrong).reduce("sum", given, given)
    words = r"accumulation_fn replaces the sum, so the op must be sum or mean(.|\n)*without accumulation_fn"
    for op in ("min", "max", "product"):
        with pytest.raises(cr.ArgumentError, match=words):
            cr.ReductionToOneDevice(accumulation_fn=max).reduce(op, given, given)
