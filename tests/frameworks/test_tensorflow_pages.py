"""The table of docs/contract.md that goes through TensorFlow's pages of its ops, r1.14 to r2.4: a test for each row."""

import inspect
import re

import numpy as np
import pytest
from paths import ROOT
from tensorflow_values import MEAN, SUM, Mirrored, crt, name, on, per_replica, place, tf, variable

import crossreduce as cr

SHARED = ("ReductionToOneDevice", "AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce")
KINDS = [*(getattr(cr, kind) for kind in (*SHARED, "NcclAllReduce")), *(getattr(crt, kind) for kind in SHARED)]
HINTS = tf.distribute.experimental.CollectiveHints  # removed from TensorFlow's pages in r2.5, not from its code
SIGNATURES = {  # of classes and methods: the names and defaults of what can be given by position, without ``self``
    "CrossDeviceOps": "",
    "ReductionToOneDevice": "reduce_to_device=None, accumulation_fn=None",
    "AllReduceCrossDeviceOps": "all_reduce_alg='nccl', num_packs=1, agg_small_grads_max_bytes=0, "
    "agg_small_grads_max_group=10, topology=None",
    "HierarchicalCopyAllReduce": "num_packs=1, topology=None",
    "NcclAllReduce": "num_packs=1",
    "reduce": "reduce_op, per_replica_value, destinations, options=None",
    "batch_reduce": "reduce_op, value_destination_pairs, options=None",
    "broadcast": "tensor, destinations",
    "CollectiveHints": "bytes_per_pack=0, timeout_seconds=None",
    "CommunicationOptions": "bytes_per_pack=0, timeout_seconds=None, implementation='auto', exact=False",
}


def is_plug_in(op):
    return isinstance(op, tf.distribute.CrossDeviceOps)


def value_of(op, xs=(1.0, 2.0, 4.0)):
    """Return a per-replica value of the op's library, which is TensorFlow or crossreduce."""
    return per_replica(list(xs)) if is_plug_in(op) else cr.PerReplica(list(map(np.float32, xs)))


def first(result):
    """Return the first component of a result, or its only one, as a number."""
    values = result.values if isinstance(result, (tf.distribute.DistributedValues, cr.Mirrored)) else (result,)
    return float(values[0])


every_op = pytest.mark.parametrize("op", [kind() for kind in KINDS], ids=lambda op: f"{type(op).__module__}.{op!r}")


def test_each_row_has_a_test():
    """The rows of the table are numbered from P1, and each number is in the name of one test."""
    page = (ROOT / "docs/contract.md").read_text("utf-8")
    rows = [int(number) for number in re.findall(r"^\| P(\d+) \|", page, re.MULTILINE)]
    tests = [int(number) for key in globals() if key.startswith("test_") for number in re.findall(r"_p(\d+)", key)]
    assert rows == sorted(tests) == list(range(1, len(rows) + 1))
    assert len(rows) > 15


def test_p1_p4_p5_p9_p19_classes_and_signatures():
    """Classes, bases, parameters and defaults are those of the pages. Ops for several processes are not offered."""
    kinds = {*KINDS, cr.CrossDeviceOps, cr.CollectiveHints, cr.CommunicationOptions}
    methods = {getattr(kind, method) for kind in KINDS for method in ("reduce", "batch_reduce", "broadcast")}
    for each in kinds | methods:
        found = [p for p in inspect.signature(each).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found if p.name != "self"]
        assert ", ".join(named) == SIGNATURES[each.__name__], each
    assert isinstance(cr.CrossDeviceOps(), cr.CrossDeviceOps)
    for module, base in ((cr, cr.CrossDeviceOps), (crt, tf.distribute.CrossDeviceOps)):
        assert issubclass(module.ReductionToOneDevice, base)
        assert issubclass(module.AllReduceCrossDeviceOps, base)
        assert issubclass(module.HierarchicalCopyAllReduce, module.AllReduceCrossDeviceOps)
        assert not hasattr(module, "MultiWorkerAllReduce")
        assert not hasattr(module, "CollectiveAllReduce")
    assert issubclass(cr.NcclAllReduce, cr.AllReduceCrossDeviceOps)
    assert not hasattr(crt, "NcclAllReduce")
    shown = repr(crt.AllReduceCrossDeviceOps("nccl"))
    assert shown == "crossreduce.tensorflow.AllReduceCrossDeviceOps('nccl', num_packs=1)"


@pytest.mark.parametrize("module", [cr, crt])
def test_p2_p3_p6_arguments_of_constructors(module):
    """``accumulation_fn`` replaces the sum, also that of a mean. "nccl" needs no NCCL (D5). 0 packs are valid."""
    op = module.ReductionToOneDevice(accumulation_fn=lambda xs: xs[0] * xs[1] * xs[2])
    assert first(op.reduce("mean", value_of(op), "cpu:0")) == np.float32(8 / 3)
    large = [np.float16(40000)] * 2
    large = cr.PerReplica(large) if module is cr else per_replica(large)
    assert first(module.ReductionToOneDevice().reduce("mean", large, "cpu:0")) == 40000
    for algorithm in ("nccl", "hierarchical_copy", "ring"):
        op = module.AllReduceCrossDeviceOps(algorithm, 0, 100, 10)
        assert first(op.reduce("sum", value_of(op), "cpu:0")) == 7.0
    with pytest.raises(ValueError, match="there is no such algorithm"):
        module.AllReduceCrossDeviceOps("bogus")
    for kind in (kind for kind in KINDS if "num_packs" in inspect.signature(kind).parameters):
        assert first(kind(num_packs=0).reduce("sum", value_of(kind()), "cpu:0")) == 7.0
        for wrong in (-1, 1.5, "1", None):
            with pytest.raises(ValueError, match="num_packs must be a whole number, 0 or more"):
                kind(num_packs=wrong)


@every_op
def test_p7_p8_options(op):
    """The options may be given by position, as ``options`` or as ``experimental_hints``, but not by both names."""
    value, hints = value_of(op), cr.CollectiveHints(bytes_per_pack=4)
    given = {"reduce_op": "sum", "per_replica_value": value, "destinations": value}
    pairs = {"reduce_op": "sum", "value_destination_pairs": [(value, value), (value, "cpu:1")]}
    for more in ({}, {"options": hints}, {"experimental_hints": hints}):
        assert first(op.reduce(**given, **more)) == 7.0
        assert list(map(first, op.batch_reduce(**pairs, **more))) == [7.0] * 2
    assert first(op.reduce("sum", value, value, hints)) == 7.0
    assert first(op.batch_reduce("sum", [(value, value)], hints)[0]) == 7.0
    assert first(op.broadcast(tensor=3.0, destinations=value)) == 3.0
    with pytest.raises(ValueError, match="options and its older name experimental_hints cannot both be given"):
        op.reduce("sum", value, value, cr.CommunicationOptions(), experimental_hints=hints)
    with pytest.raises(ValueError, match="cannot both be given"):
        op.batch_reduce("sum", [(value, value)], hints, experimental_hints=hints)
    with pytest.raises(ValueError, match="options must be CommunicationOptions"):
        op.reduce("sum", value, value, experimental_hints=8)


@every_op
def test_p10_reductions(op):
    """Five reductions are known by name, others are errors (D9). Only the plug-in accepts TensorFlow's reductions."""
    value = value_of(op)
    for reduce_op, want in (("sum", 7.0), ("MEAN", 7 / 3), ("min", 1.0), (cr.ReduceOp.MAX, 4.0), ("product", 8.0)):
        assert first(op.reduce(reduce_op, value, value)) == np.float32(want)
    for wrong in ("median", 0, None, tf.VariableAggregation.MEAN):
        with pytest.raises(ValueError, match="this is not a known reduction"):
            op.reduce(wrong, value, value)
        with pytest.raises(ValueError, match="this is not a known reduction"):
            op.batch_reduce(wrong, [(value_of(op, [1.0]), "cpu:0")])
    if is_plug_in(op):
        assert [first(op.reduce(kind, value, value)) for kind in (SUM, MEAN)] == [7.0, np.float32(7 / 3)]
    else:
        with pytest.raises(ValueError, match=r"crossreduce\.tensorflow's op of the same name"):
            op.reduce(SUM, value, value)


@every_op
def test_p11_p12_p14_values_destinations_and_results(op):
    """Values may be arrays and numbers. Destinations may be names, tensors and variables, which are not written.

    For one device the plug-in returns a tensor, for several TensorFlow's ``Mirrored``. crossreduce always returns its
    own ``Mirrored``.
    """
    values = [value_of(op, [3.0]), on(0, 3.0), variable(1, 3.0), np.float32(3.0), 3.0]
    values.append(per_replica([3.0], wrap=Mirrored) if is_plug_in(op) else cr.Mirrored([np.float32(3)]))
    for value in values:
        assert first(op.reduce("sum", value, "cpu:0")) == 3.0
    for wrong in (None, {"a": 1.0}, *([] if is_plug_in(op) else [[1.0, 2.0], (1.0,), "text"])):
        with pytest.raises(ValueError, match=r"a value to reduce must be a PerReplica or an array|cannot be converted"):
            op.reduce("sum", wrong, "cpu:0")
    value, where = value_of(op), variable(0, 5.0)
    for destinations in (value, where, on(0, 1.0), "CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"):
        assert first(op.reduce("sum", value, destinations)) == 7.0
    assert float(where) == 5.0
    for wrong in (["cpu:0"], ("cpu:0",), [], None, 0, b"cpu:0", "", "foo"):
        with pytest.raises(ValueError, match=r"destinations must be|must not be empty|cannot be parsed"):
            op.reduce("sum", value, wrong)
    one, several = op.reduce("sum", value, "cpu:1"), op.reduce("sum", value, value)
    if is_plug_in(op):
        assert op.reduce("sum", [1.0, 2.0], "cpu:0").numpy().tolist() == [1.0, 2.0]
        assert tf.is_tensor(one)
        assert place(one) == name(1)
        assert type(several) is Mirrored
    else:
        assert type(one) is type(several) is cr.Mirrored
        assert one.devices == ("cpu:1",)


@every_op
def test_p13_pairs(op):
    """Any iterable of pairs is a batch, also an empty one (D8). The error for an invalid pair has its number."""
    value = value_of(op)
    pair = (value, value)
    for pairs in ([pair], (pair,), iter([pair]), zip([value], [value], strict=True), [[value, value]]):
        assert [first(x) for x in op.batch_reduce("sum", pairs)] == [7.0]
    assert op.batch_reduce("sum", []) == []
    for wrong in (None, 3, value, "pairs"):
        with pytest.raises(ValueError, match="value_destination_pairs must be pairs"):
            op.batch_reduce("sum", wrong)
    for wrong in (value, (value,), (value, value, value)):
        with pytest.raises(ValueError, match="element 1 of value_destination_pairs is not a pair"):
            op.batch_reduce("sum", [pair, wrong])


def test_p15_subclasses():
    """A subclass with the methods of r2.2 gets the hints as the last argument. Without methods, a call is an error."""
    seen = []

    class Own(cr.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, value, destinations, experimental_hints):
            seen.append((reduce_op, destinations, experimental_hints))
            return self.broadcast_implementation(value[0], destinations)

    class Theirs(crt.ReductionToOneDevice):
        def reduce_implementation(self, reduce_op, value, destinations, experimental_hints):
            seen.append((reduce_op, destinations, experimental_hints))
            return super().reduce_implementation(reduce_op, value, destinations, experimental_hints)

    hints, value = cr.CollectiveHints(8), value_of(Own())
    assert first(Own().reduce("sum", value, value, experimental_hints=hints)) == 1.0
    assert [first(x) for x in Own().batch_reduce("sum", [(value, "cpu:1")], experimental_hints=hints)] == [1.0]
    assert first(Theirs().reduce(SUM, value_of(Theirs()), "CPU:0", experimental_hints=hints)) == 7.0
    ours = [(cr.ReduceOp.SUM, value.devices, hints), (cr.ReduceOp.SUM, ("cpu:1",), hints)]
    assert seen == [*ours, (SUM, "CPU:0", hints)]
    with pytest.raises(NotImplementedError, match="CrossDeviceOps does not implement reduce_implementation"):
        cr.CrossDeviceOps().reduce("sum", value, value)


def test_p16_p17_hints_and_communication_options():
    """``CollectiveHints`` are those of r2.4. ``implementation`` is an algorithm's name, in upper or lower case.

    The plug-in accepts TensorFlow's options by both names. Their timeout of 0 is ignored; ours must be positive.
    """
    for words, call in (
        ("bytes_per_pack must be a whole number, 0 or more", lambda: cr.CollectiveHints(-1)),
        ("there is no such algorithm", lambda: cr.CommunicationOptions(implementation="bogus")),
        ("timeout_seconds must be a positive number", lambda: cr.CommunicationOptions(timeout_seconds=0)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for implementation in ("AUTO", "RING", "NCCL"):
        assert cr.CommunicationOptions(implementation=implementation).implementation == implementation.lower()
    op, kinds = crt.HierarchicalCopyAllReduce(), tf.distribute.experimental
    options = [
        kinds.CommunicationOptions(timeout_seconds=0, implementation=each) for each in kinds.CommunicationImplementation
    ]
    for given in (*({"options": each} for each in (HINTS(8), *options)), {"experimental_hints": HINTS(8, 2.0)}):
        assert first(op.reduce(SUM, value_of(op), "CPU:0", **given)) == 7.0


def test_p18_bytes_per_pack():
    """The hints limit the size of packs, by either name."""
    op = crt.AllReduceCrossDeviceOps("one_device")
    value = per_replica([np.full(100, 2.0**k, "float32") for k in range(3)])

    def packs(**given):
        function = tf.function(lambda: op.batch_reduce(SUM, [(value, value)], **given)[0].values, autograph=False)
        # Each pack is added by one AddN.
        return sum(o.type == "AddN" for o in function.get_concrete_function().graph.get_operations())

    theirs, ours = tf.distribute.experimental.CommunicationOptions(100), cr.CommunicationOptions(bytes_per_pack=100)
    given = HINTS(100), theirs, ours
    assert packs() == 1
    assert [packs(options=each) for each in given] == [packs(experimental_hints=given[0])] * 3 == [4] * 3
