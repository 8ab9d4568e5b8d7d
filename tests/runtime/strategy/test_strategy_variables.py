"""Variables: mirrored and sync-on-read, read and assigned in both contexts."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
from expect import digits, value
from numpy.lib.stride_tricks import as_strided
from pairs import each

import crossreduce as cr

COUNTS = (1, 2, 5)
context = cr.get_replica_context
# The methods that assign, and what each makes of the old value and its argument.
HOW = {"assign": lambda old, x: x, "assign_add": lambda old, x: old + x, "assign_sub": lambda old, x: old - x}


def variable(strategy, value, **how):
    with strategy.scope():
        return cr.Variable(value, **how)


def components(library, var):
    return [library.to_numpy(x).tolist() for x in var.values]


@pytest.mark.parametrize("n", COUNTS)
def test_mirrored_variables_stay_equal(library, n):
    """The values that replicas assign to a mirrored variable are combined, and all components become equal."""
    strategy = cr.MirroredStrategy(n)
    start, xs = np.arange(4.0), [x.astype(float) for x in digits(n, (4,))]
    for aggregation, how in each(["sum", "mean", "only_first_replica"], HOW):
        combined = xs[0] if aggregation == "only_first_replica" else oracle.reduce(aggregation, xs, "float64")
        var = variable(strategy, library.array(start), aggregation=aggregation)

        def step(x, var=var, how=how):
            assert getattr(var, how)(x) is var
            return var.value()

        seen = strategy.run(step, args=(value(library, xs),))
        wanted = HOW[how](start, combined).tolist()
        assert components(library, var) == [library.to_numpy(x).tolist() for x in seen] == [wanted] * n, how
        assert all(library.device_of(x) in ("cpu", f"cpu:{k}") for k, x in enumerate(var)), how
        assert library.to_numpy(var.value()).tolist() == wanted, how
        assert not any(library.shares(a, b) for k, a in enumerate(var.values) for b in var.values[:k]), how


@pytest.mark.parametrize("n", [1, 3])
def test_mirrored_variables_are_assigned_to_all_in_the_cross_replica_context(library, n):
    """In the cross-replica context, an array or number is assigned to all components. A PerReplica is combined first,
    but a Mirrored is not."""
    strategy = cr.MirroredStrategy(n)
    xs = digits(n, (2,))
    start = library.array(np.zeros(2, np.int64))
    var = variable(strategy, start, aggregation="sum")
    var.assign(library.array(xs[0]))
    assert components(library, var) == [xs[0].tolist()] * n
    with strategy.scope():
        var.assign_add(1)
    var.assign_sub(value(library, xs))
    assert components(library, var) == [(xs[0] + 1 - sum(xs)).tolist()] * n
    var.assign(cr.Mirrored(library.arrays([xs[0]] * n)))
    var.assign_add(variable(strategy, library.array(xs[0])))
    assert components(library, var) == [(2 * xs[0]).tolist()] * n
    assert library.to_numpy(start).tolist() == [0, 0]


@pytest.mark.parametrize("n", [1, 3])
def test_a_mirrored_variable_without_aggregation_cannot_be_assigned_in_a_replica(n):
    """A replica's assignment to a mirrored variable without aggregation is an error, also if there is one replica."""
    strategy = cr.MirroredStrategy(n)
    var = variable(strategy, np.zeros(2), name="w")
    words = r"(?s)variable without aggregation.*assign_add of Variable\(w: float64\[2\].*aggregation="
    with pytest.raises(ValueError, match=words):
        strategy.run(lambda: var.assign_add(1.0))
    if n > 1:
        words = "replicas cannot be assigned to a mirrored variable without aggregation"
        with pytest.raises(cr.ArgumentError, match=words):
            var.assign(cr.PerReplica([np.ones(2)] * n))
    assert [x.tolist() for x in var] == [[0, 0]] * n


@pytest.mark.parametrize("n", COUNTS)
def test_values_that_are_components_of_the_variable_itself(library, n):
    """An assigned value may be another component of the variable, or a view of one: it is read before anything is
    written, in every method that assigns, and in both contexts."""
    strategy = cr.MirroredStrategy(n)
    start = [np.arange(4.0).reshape(2, 2) + 10 * k for k in range(n)]
    rotated = [start[(k + 1) % n] for k in range(n)]
    transposed = [library.array(x.T) if library.name == "tensorflow" else None for x in start]
    for how, combined in HOW.items():
        var = variable(strategy, library.array(start[0]), synchronization="on_read")

        def check(given, values, how=how, combined=combined, var=var, update=False):
            if update:
                strategy.extended.update(var, lambda own, _, given: getattr(own, how)(given[0]), args=("", [given]))
            else:
                getattr(var, how)(given)
            assert components(library, var) == [combined(a, b).tolist() for a, b in zip(start, values, strict=True)]
            var.assign(value(library, start))

        var.assign(value(library, start))
        for update in (False, True):
            check(cr.PerReplica([var[(k + 1) % n] for k in range(n)]), rotated, update=update)
            views = [x.T if y is None else y for x, y in zip(var, transposed, strict=True)]
            check(cr.PerReplica(views), [x.T for x in start], update=update)
            check(var[0], [start[0]] * n, update=update)
            if library.name == "torch":  # another tensor at other addresses of the same memory
                arrays = [var[(k + 1) % n].numpy()[1] for k in range(n)]
                rows = [library.torch.from_numpy(as_strided(x, (2, 2), (0, x.strides[0]))) for x in arrays]
                check(cr.PerReplica(rows), [np.stack([x[1], x[1]]) for x in rotated], update=update)
        strategy.extended.update(var, lambda own, x, how=how: getattr(own, how)(x), args=(var,))
        assert components(library, var) == [combined(x, x).tolist() for x in start], how
        var.assign(value(library, start))
        for given, values in ((var, start), (var[0], [start[0]] * n)):
            var.assign(value(library, start))  # a function may assign twice
            strategy.extended.update(var, lambda own, xs: own.assign_add(xs[0]).assign_add(xs[0]), args=([given],))
            assert components(library, var) == [(a + 2 * b).tolist() for a, b in zip(start, values, strict=True)]
        var.assign(value(library, start))
        strategy.run(lambda var=var, how=how: getattr(var, how)(var.value()[::1]))
        assert components(library, var) == [combined(x, x).tolist() for x in start], how


@pytest.mark.parametrize("n", COUNTS)
def test_each_replica_has_its_component_of_a_sync_on_read_variable(library, n):
    """A replica reads and writes only its component of a sync-on-read variable. Reads elsewhere aggregate them."""
    strategy = cr.MirroredStrategy(n)
    xs = [x.astype(float) for x in digits(n, (2,))]
    made = {
        how: variable(strategy, library.array(np.ones(2)), synchronization="ON_READ", aggregation=how)
        for how in ("sum", "mean", "only_first_replica", "none")
    }

    def step(x):
        for var in made.values():
            var.assign_add(x)
            if context().replica_id_in_sync_group == 0:  # one replica assigns without waiting for others
                var.assign_sub(1.0)
        return made["none"].value()

    seen = strategy.run(step, args=(value(library, xs),))
    own = [x + (k > 0) for k, x in enumerate(xs)]
    assert [library.to_numpy(x).tolist() for x in seen] == [x.tolist() for x in own]
    for how in ("sum", "mean"):
        oracle.check(library.to_numpy(made[how].value()), how, own)
    with strategy.scope():
        assert library.to_numpy(made["only_first_replica"].value()).tolist() == own[0].tolist()
    assert strategy.local_results(made["none"]) == made["none"].values
    assert library.to_numpy(strategy.reduce("max", made["none"])).tolist() == np.max(own, 0).tolist()
    if n > 1:
        with pytest.raises(cr.ArgumentError, match="without aggregation cannot be read outside of replicas"):
            made["none"].value()


@pytest.mark.parametrize("n", COUNTS)
def test_sync_on_read_variables_are_assigned_in_the_cross_replica_context(library, n):
    """In the cross-replica context, a sync-on-read sum has the value that was assigned to it. assign_add is an error
    for a sum of several replicas, as in TensorFlow."""
    strategy, seven = cr.MirroredStrategy(n), library.array(np.full(2, 7))
    total, mean = (
        variable(strategy, library.array(np.ones(2, dtype)), synchronization="on_read", aggregation=how)
        for how, dtype in (("sum", "int64"), ("mean", "float64"))
    )
    assert library.to_numpy(total.assign(seven).value()).tolist() == [7, 7]
    assert library.to_numpy(mean.assign_add(2.0).value()).tolist() == [3, 3]
    if n > 1:
        with pytest.raises(cr.ContextError, match="assign_add outside of replicas is not defined for a sync-on-read"):
            total.assign_add(seven)
    total.assign(value(library, [np.full(2, 10**k) for k in range(n)]))
    assert library.to_numpy(total.value()).tolist() == [sum(10**k for k in range(n))] * 2


def test_values_that_were_read_do_not_change(library):
    """Assignments replace the components in NumPy and JAX, and write into them in torch. Neither the initial value nor
    an assigned array shares memory with the variable."""
    strategy = cr.MirroredStrategy(2)
    start = library.array(np.zeros(3))
    var = variable(strategy, start, aggregation="mean")
    before = var.values
    strategy.run(lambda: var.assign(library.array(np.ones(3))))
    assert library.to_numpy(start).tolist() == [0, 0, 0]
    in_place = library.name == "torch"
    assert all(a is b for a, b in zip(before, var.values, strict=True)) == in_place
    assert [library.to_numpy(x).tolist() for x in before] == [[1.0 if in_place else 0.0] * 3] * 2
    if library.name == "numpy":
        with pytest.raises(ValueError, match="read-only"):
            var.value()[0] = 5
    assert components(library, var) == [[1, 1, 1]] * 2
    given = library.array(np.full(3, 5.0))
    var.assign(given)
    assert not any(library.shares(given, x) for x in var)


def test_runs_in_several_threads_keep_a_variable_consistent():
    """If several threads run replicas that assign to one mirrored variable, no assignment is lost or mixed."""
    strategy = cr.MirroredStrategy(3)
    var = variable(strategy, np.zeros(1000), aggregation="sum")
    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(strategy.run, lambda: var.assign_add(1.0)) for _ in range(30)]:
            call.result()
    assert [x.tolist() for x in var] == [[3 * 30.0] * 1000] * 3


def test_update_runs_for_each_component(library):
    """extended.update calls the function for each component, in order, with the arguments of the same replica."""
    strategy = cr.MirroredStrategy(3)
    var = variable(strategy, library.array(np.ones(2)))
    grads = value(library, [np.full(2, float(k)) for k in range(3)])
    order = []

    def fn(w, g, rate, *, name):
        assert cr.in_cross_replica_context()
        order.append((w.device, rate, name))
        w.assign_sub(rate * g)
        w.assign(w.assign_add(1.0).value())
        return library.to_numpy(w.value()).tolist()

    result = strategy.extended.update(var, fn, args=(grads, 2.0), kwargs={"name": "sgd"})
    assert order == [(f"cpu:{k}", 2.0, "sgd") for k in range(3)]
    assert components(library, var) == [[2.0 - 2 * k] * 2 for k in range(3)]
    assert [list(x) for x in zip(*result, strict=True)] == components(library, var)
    assert strategy.extended.variable_created_in_scope(var)
    assert not cr.MirroredStrategy(3).extended.variable_created_in_scope(var)
    assert strategy.extended.update(var, lambda w: w.assign_add(1.0)) is None


def test_numbers_shapes_and_dtypes(library):
    """A variable keeps its framework, shape and dtype. Numbers can be added, and assigned to a variable without axes,
    if its dtype can represent them."""
    strategy = cr.MirroredStrategy(2)
    scalar = variable(strategy, library.array(np.float32(1)), aggregation="mean")
    vector = variable(strategy, library.array(np.ones(2, np.float32)), name="v")
    integer = variable(strategy, library.array(np.int32(1)), aggregation="sum")
    flag = variable(strategy, library.array(np.bool_(True)))
    assert components(library, scalar.assign(4)) == [4, 4]
    strategy.run(lambda: scalar.assign_add(float(context().replica_id_in_sync_group)))
    assert components(library, scalar) == [4.5, 4.5]
    assert library.to_numpy(scalar.value()).dtype == np.float32
    assert components(library, variable(strategy, library.array(np.complex64(1))).assign(2)) == [2, 2]
    words = "(?s)must have the framework, shape and dtype of the variable"
    for wrong in (1.0, library.array(np.ones(3, np.float32)), library.array(np.ones(2, np.int32)), np.complex64(1)):
        with pytest.raises(cr.MismatchError, match=words + r".*Variable\(v: float32\[2\]"):
            vector.assign(wrong)
    for assign, wrong in ((integer.assign_add, 0.5), (integer.assign, 0.5), (integer.assign, 1j), (flag.assign, 2)):
        with pytest.raises(cr.MismatchError, match=words):
            assign(wrong)
    for count in (1, 3):
        given = value(library, [np.int32(5)] * count)
        with pytest.raises(cr.ArgumentError, match="needs one component for each replica"):
            strategy.run(lambda given=given: integer.assign(given))
    assert components(library, integer) == [1, 1]
    with pytest.raises(cr.MismatchError, match="must have as many components as the variable"):
        vector.assign(value(library, [np.ones(2, np.float32)] * 3))


def test_a_variable_reads_as_a_numpy_array(library):
    """np.asarray returns the value that the variable has in the current context. ``copy=False`` refuses a cast."""
    strategy = cr.MirroredStrategy(2)
    var = variable(strategy, library.array(np.arange(3.0)))
    assert np.array(var, dtype=np.float32).dtype == np.float32
    copied = np.array(var)
    copied += 1
    assert np.asarray(var).tolist() == var.__array__(np.dtype("float64"), copy=False).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot be converted to float32 without a copy"):
        var.__array__(np.dtype("float32"), copy=False)
    own = variable(strategy, library.array(np.zeros(())), synchronization="on_read", aggregation="sum")

    def step():
        own.assign_add(1.0 + context().replica_id_in_sync_group)
        return float(np.asarray(own))

    assert strategy.run(step).values == (1.0, 2.0)
    assert float(np.asarray(own)) == 3.0


def test_arguments():
    """Synchronization and aggregation may be given by name, in any case. Errors list the valid names."""
    var = cr.Variable(1.0, "x", cr.VariableSynchronization.AUTO, "Only_First_Replica")
    assert var.synchronization is cr.VariableSynchronization.ON_WRITE
    assert var.aggregation is cr.VariableAggregation.ONLY_FIRST_REPLICA
    assert (var.name, len(var)) == ("x", 1)
    assert cr.Variable(lambda: np.ones(2)).value().tolist() == [1, 1]
    slices = cr.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    for error, words, args, named in (
        (cr.ArgumentError, r'(?s)invalid VariableAggregation.*"none", "sum", "mean"', (1.0,), {"aggregation": "avg"}),
        (cr.ArgumentError, "invalid VariableAggregation", (1.0,), {"aggregation": None}),
        (cr.ArgumentError, r'(?s)invalid VariableSynchronization.*"on_read"', (1.0,), {"synchronization": 3}),
        (cr.ArgumentError, "the mean of integers is a float", (1,), {"aggregation": "mean"}),
        (cr.ArgumentError, "this is not an array", ("text",), {}),
        (cr.UnsupportedError, "a variable must be dense", (slices,), {}),
    ):
        with pytest.raises(error, match=words):
            cr.Variable(*args, **named)


def test_variables_belong_to_a_strategy():
    """A variable cannot be created in a replica, nor used with another strategy than its own. A variable without a
    strategy has one component, which replicas can read."""
    first, second = cr.MirroredStrategy(2), cr.MirroredStrategy(2)
    var, alone = variable(first, 1.0, aggregation="sum"), cr.Variable(np.ones(2), aggregation="sum")
    for words, strategy, call in (
        ("inside a strategy that does not own it", second, var.value),
        ("variables must be created in the cross-replica context", first, lambda: cr.Variable(1.0)),
        ("cannot assign to a variable that was created outside", first, lambda: alone.assign_add(1.0)),
    ):
        with pytest.raises(cr.ContextError, match=words):
            strategy.run(call)
    with pytest.raises(cr.ContextError, match="inside a strategy that does not own it"), second.scope():
        var.assign(2.0)
    assert alone.devices == ("cpu:0",)
    assert all(first.run(lambda: alone.value()[0] == 1))
    assert alone.assign_add(1.0).value().tolist() == [2, 2]


def test_different_assignments_are_listed():
    """If replicas make different assignments, or assign to different variables, a MismatchError lists them."""
    strategy = cr.MirroredStrategy(2)
    a, b = (variable(strategy, 1.0, name=name, aggregation="sum") for name in "ab")
    words = r"(?s)replica 0.*assign of Variable\(a.*replica 1.*assign of Variable\(b"
    with pytest.raises(cr.MismatchError, match=words):
        strategy.run(lambda: (b if context().replica_id_in_sync_group else a).assign(2.0))
    with pytest.raises(cr.MismatchError, match=r"(?s)assign_add of Variable\(a"):
        strategy.run(lambda: a.assign(2.0) if context().replica_id_in_sync_group else a.assign_add(2.0))
    assert list(a) == list(b) == [1.0, 1.0]
