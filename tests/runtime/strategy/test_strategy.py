"""MirroredStrategy: replicas, contexts, calls of ``run``, and its arguments."""

import dataclasses
import threading

import numpy as np
import oracle
import pytest
from expect import check_memory, check_places, cpus, digits, unchanged, value

import crossreduce as cr

context = cr.get_replica_context
pytestmark = pytest.mark.usefixtures("no_thread_stays")
LOOP = []  # contains itself
LOOP.append(LOOP)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_all_reduce_in_replicas_gives_each_the_reduction(library, n):
    """Each replica gets the reduction on its device, in new memory. Inputs are not written."""
    xs = digits(n, (2, 3))
    strategy, given = cr.MirroredStrategy(n), value(library, xs)
    for op in ("sum", "max", "min"):
        result = strategy.run(lambda x, op=op: context().all_reduce(op, x), args=(given,))
        check_places(library, cr.Mirrored(list(result), result.devices), strategy.devices)
        assert type(result) is cr.PerReplica
        for y in result:
            oracle.check(library.to_numpy(y), op, xs)
        check_memory(library, result, given)
    assert unchanged(library, given, xs)


class Spy(cr.HierarchicalCopyAllReduce):
    """Records the devices of the values of each batch."""

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        self.calls.append([value.devices for value, _ in pairs])
        return super().batch_reduce_implementation(reduce_op, pairs, options)


@pytest.mark.parametrize("devices", [cpus(0), cpus(5, 3), cpus(*range(8))], ids=len)
def test_a_tree_is_reduced_in_one_batch(devices):
    """The leaves of a tree are reduced in one batch, under the names of the strategy's devices, as a topology needs."""
    ops, n = Spy(topology=cr.Topology.ring(cpus(*range(8)), 10)), len(devices)
    ops.calls = []
    strategy = cr.MirroredStrategy(devices, ops)
    xs = digits(n, (3,))

    def step(x):
        return context().all_reduce(cr.ReduceOp.SUM, {"b": (x, 2 * x), "a": [1.5]})

    result = strategy.run(step, args=(cr.PerReplica(xs, devices),))
    assert ops.calls == [[devices] * 3]  # one batch of the three leaves
    assert sorted(result) == ["a", "b"]
    for k in range(n):
        oracle.check(result["b"][1][k], "sum", [2 * x for x in xs])
        assert result["a"][0][k] == 1.5 * n
    assert float(strategy.reduce("sum", result["a"][0])) == 1.5 * n * n
    assert ops.calls[1:] == [[devices]]


def test_a_context_identifies_its_replica():
    """A replica's context has its number, the number of replicas, its device and its strategy."""
    strategy = cr.MirroredStrategy(["cpu:2", "cpu:7", "cpu:0"])

    def step():
        here = context()
        assert here.strategy is strategy is cr.get_strategy()
        assert here is context()
        assert (cr.has_strategy(), cr.in_cross_replica_context()) == (True, False)
        assert f"replica {here.replica_id_in_sync_group} of 3" in repr(here)
        return here.replica_id_in_sync_group, here.num_replicas_in_sync, *here.devices

    number, count, device = strategy.run(step)
    assert (number.values, count.values, strategy.num_replicas_in_sync) == ((0, 1, 2), (3, 3, 3), 3)
    assert device.values == strategy.devices == strategy.extended.worker_devices == ("cpu:2", "cpu:7", "cpu:0")


def test_outside_a_strategy_there_is_one_replica():
    """Outside all strategies the context is that of a single replica, as in TensorFlow."""

    def merge(strategy, v):
        return bool(cr.in_cross_replica_context()), bool(cr.has_strategy()), strategy.reduce("sum", v).tolist()

    here, x = context(), np.array([1.0, 2.0])
    assert (here.replica_id_in_sync_group, here.num_replicas_in_sync) == (0, 1)
    assert (cr.has_strategy(), cr.in_cross_replica_context()) == (False, False)
    assert here.all_reduce("mean", {"x": x})["x"].tolist() == here.all_gather(x, 0).tolist() == [1.0, 2.0]
    assert tuple(here.merge_call(merge, args=(x,))) == (True, False, [1.0, 2.0])
    assert cr.get_strategy().num_replicas_in_sync == 1


def test_scope_is_the_cross_replica_context():
    """In a scope there is no replica context. Scopes of one strategy can be nested, but not those of two strategies. A
    scope ends with its block, also after an error."""
    strategy, other = cr.MirroredStrategy(2), cr.MirroredStrategy(3)
    words = "inside another strategy's scope"
    with strategy.scope() as entered:
        assert entered is strategy is cr.get_strategy()
        assert context() is None
        with strategy.scope():
            assert cr.in_cross_replica_context()
        assert cr.in_cross_replica_context()
        with pytest.raises(cr.ContextError, match=words), other.scope():
            pass
        with pytest.raises(cr.ContextError, match=words):
            other.run(lambda: 1)
    with pytest.raises(KeyError, match="own"), strategy.scope():
        raise KeyError("own")
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        strategy.run(lambda: 1 / 0)
    assert not cr.has_strategy()
    assert other.run(lambda: 1).values == (1, 1, 1)


@pytest.mark.parametrize("n", [1, 3])
def test_cross_replica_calls_are_errors_in_a_replica(n):
    """reduce, gather, run, scope and similar calls raise a ContextError inside a replica."""
    strategy = cr.MirroredStrategy(n)
    value, extended = cr.PerReplica([1.0] * n), strategy.extended
    for call, *args in (
        (strategy.reduce, "sum", value),
        (strategy.gather, value, 0),
        (strategy.run, print),
        (extended.reduce_to, "sum", value, value),
        (extended.batch_reduce_to, "sum", [(value, value)]),
        (extended.broadcast_to, 1.0),
        (extended.update, value, print),
        (strategy.split, np.arange(3)),
        (strategy.replicate, 1.0),
        (strategy.distribute_values_from_function, print),
    ):
        words = rf"{call.__name__} can only be called in the cross-replica context.*\n.*inside replica \d"
        with pytest.raises(cr.ContextError, match=words):
            strategy.run(lambda call=call, args=args: call(*args))
    with pytest.raises(cr.ContextError, match=r"scope\(\) can only be called in the cross-replica context"):
        strategy.run(lambda: strategy.scope().__enter__())
    assert issubclass(cr.ContextError, RuntimeError)


@pytest.mark.parametrize("n", [1, 3])
def test_merge_call_runs_once_for_all_replicas(library, n):
    """merge_call's function runs once, in the caller's thread, and may call reduce and run."""
    strategy, xs, threads = cr.MirroredStrategy(n), digits(n, (2,)), []

    def merge(same, x, *, factor):
        threads.append(threading.get_ident())
        assert same is strategy
        assert context() is None
        assert (type(x["x"]), factor) == (cr.PerReplica, "two")
        nested = same.run(lambda v: context().all_reduce("sum", v), args=(x["x"],))
        return {"total": same.reduce("sum", x)["x"], "nested": nested, "own": x["x"]}

    def step(x):
        result = context().merge_call(merge, args=({"x": x},), kwargs={"factor": "two"})
        assert context() is not None
        return result

    result = strategy.run(step, args=(value(library, xs),))
    assert threads == [threading.get_ident()]
    for k in range(n):
        oracle.check(library.to_numpy(result["total"][k]), "sum", xs)
        oracle.check(library.to_numpy(result["nested"][k]), "sum", xs)
        assert library.to_numpy(result["own"][k]).tolist() == xs[k].tolist()


def test_each_replica_receives_its_components():
    """A replica receives its component in place of each distributed value; other arguments are unchanged. all_reduce
    uses the replica's components, also of variables."""
    strategy = cr.MirroredStrategy(3)
    log, given = [], {"x": [cr.PerReplica([np.full(2, k) for k in range(3)]), 5], "y": None}

    def step(tree, same, *, log):
        assert (tree["x"][1], tree["y"]) == (5, None)
        log.append(None)
        return tree["x"][0], same is given

    got, same = strategy.run(step, args=(given, given), kwargs={"log": log})
    assert [x.tolist() for x in got] == [[0, 0], [1, 1], [2, 2]]
    assert same.values == (False, False, False)  # the argument was copied, since it contained distributed values
    assert len(log) == 3
    with pytest.raises(cr.ArgumentError, match=r"(?s)argument 0: .*2 components on cpu:0, cpu:1, for 3 replicas"):
        strategy.run(step, args=(cr.PerReplica([1, 2]), 0), kwargs={"log": log})
    with strategy.scope():
        counter = cr.Variable(2.0, synchronization="on_read", aggregation="sum")
    a, b = strategy.run(lambda: context().all_reduce("sum", (cr.PerReplica([1.0, 10.0, 100.0]), counter)))
    assert (a.values, b.values) == ((111.0,) * 3, (6.0,) * 3)


@dataclasses.dataclass
class Output:
    loss: object
    name: str


class WithUnknownDevice:
    device = "an unknown place"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_are_regrouped_the_same_way_for_any_number_of_replicas(n):
    """Leaves become PerReplica, also for one replica. None, equal strings and variables are kept."""
    strategy, marker = cr.MirroredStrategy(n), object()
    made = strategy.run(lambda: (Output(np.float32(1), "a"), None, "same", 3, marker, True))
    assert (type(made[0]), type(made[0].loss), made[0].name) == (Output, cr.PerReplica, "a")
    assert made[1:3] == (None, "same")
    for leaf, wanted in zip(made[3:], (3, marker, True), strict=True):
        assert type(leaf) is cr.PerReplica
        assert leaf.values == (wanted,) * n
    unknown = strategy.run(WithUnknownDevice)
    assert (unknown.devices, {type(x) for x in unknown}) == (strategy.devices, {WithUnknownDevice})
    with strategy.scope():
        variable = cr.Variable(1.0)
    assert strategy.run(lambda: variable) is variable


@pytest.mark.parametrize("n", [2, 4])
def test_results_that_differ_between_replicas(n):
    """Different strings become a PerReplica. Different structures or different distributed values are errors."""
    strategy = cr.MirroredStrategy(n)
    names = strategy.run(lambda: f"replica {context().replica_id_in_sync_group}")
    assert names.values == tuple(f"replica {k}" for k in range(n))
    with pytest.raises(cr.MismatchError, match=r"differ in structure.*\n.*replica 1"):
        strategy.run(lambda: None if context().replica_id_in_sync_group else 1.0)
    words = "must pass or return the same distributed value, or each one an ordinary value"
    with pytest.raises(cr.ArgumentError, match=words):
        strategy.run(lambda: cr.PerReplica([1.0, 2.0]))


def test_devices():
    """Devices may be a number. The default without accelerators is one replica on cpu:0, as in TensorFlow."""
    import torch

    if not torch.cuda.is_available():
        assert cr.MirroredStrategy().devices == ("cpu:0",)
    assert cr.MirroredStrategy(3).devices == ("cpu:0", "cpu:1", "cpu:2")


STRATEGY = cr.MirroredStrategy(2)
WRONG = [
    ("at least one device", cr.MirroredStrategy, (0,)),
    ("at least one device", cr.MirroredStrategy, ([],)),
    ("devices must be a whole number", cr.MirroredStrategy, (-1,)),
    ("devices must be a whole number", cr.MirroredStrategy, (2.0,)),
    ("devices must be a whole number", cr.MirroredStrategy, (True,)),
    ("devices must be a list of names", cr.MirroredStrategy, ("cpu:0",)),
    ("only once", cr.MirroredStrategy, (["cpu:0", "CPU:0"],)),
    ("cannot be parsed", cr.MirroredStrategy, (["disk:0"],)),
    ("fn must be a function", STRATEGY.run, (5,)),
    ("merge_fn must be a function", STRATEGY.run, (lambda: context().merge_call(5),)),
    ("options must be CommunicationOptions", lambda: STRATEGY.run(print, options=5), ()),
    ("contains itself", STRATEGY.run, (len, (LOOP,))),
    ("contains itself", STRATEGY.run, (lambda: context().all_reduce("sum", LOOP),)),
    ("contains itself", STRATEGY.reduce, ("sum", LOOP)),
    ("contains itself", STRATEGY.split, (LOOP,)),
    ("args must be a tuple", STRATEGY.run, (print, 5)),
    ("args must be a tuple", STRATEGY.run, (print, (), [1])),
    ("args must be a tuple", STRATEGY.run, (lambda: context().merge_call(print, np.ones(2)),)),
    ("args must be a tuple", STRATEGY.extended.update, (cr.PerReplica([1, 2]), print, 5)),
]


@pytest.mark.parametrize(("words", "call", "args"), WRONG)
def test_wrong_arguments(words, call, args):
    """Invalid devices, functions, args, kwargs, options or trees raise an ArgumentError that names the problem."""
    with pytest.raises(cr.ArgumentError, match=words):
        call(*args)


def test_tensorflow_is_referred_to_its_own_strategy(tensorflow_):
    """For TensorFlow's tensors in replicas or variables, an error names the classes to use. reduce accepts them."""
    x = cr.PerReplica(tensorflow_.arrays([np.ones(2), np.ones(2)]))
    with pytest.raises(cr.UnsupportedError, match=r"tf\.distribute\.MirroredStrategy.*crossreduce\.tensorflow"):
        STRATEGY.run(lambda v: context().all_reduce("sum", v), args=(x,))
    with pytest.raises(cr.UnsupportedError, match=r"crossreduce\.tensorflow"):
        cr.Variable(x[0])
    assert tensorflow_.to_numpy(STRATEGY.reduce("sum", x)).tolist() == [2, 2]
