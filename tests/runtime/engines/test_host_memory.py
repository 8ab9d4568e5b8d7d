"""The host engine's access to memory: arrays are read in place, and results are the memory that the kernels wrote."""

import contextlib
import gc
import itertools
from unittest import mock

import numpy as np
import oracle
import pytest
import strategies
from engine_runs import engine_runs, on_devices
from frameworks import DTYPES, np_dtype

import crossreduce as cr
from crossreduce import PerReplica, kernels
from crossreduce.engines.host import array_memory
from crossreduce.frameworks import framework_of
from crossreduce.values import Mirrored

OPS = cr.AllReduceCrossDeviceOps()
LARGE = kernels.POOLED_BYTES  # from this size on, every framework's results are in the pool's memory


def address(framework, x):
    """Return the address of an array's first element."""
    if framework.name == "numpy":
        return x.ctypes.data
    if framework.name == "torch":
        return x.data_ptr()
    if framework.name == "jax":
        return x.unsafe_buffer_pointer()
    if x.dtype == framework.tf.bfloat16:  # the buffer protocol has no bfloat16
        x = framework.tf.bitcast(x, framework.tf.uint16)
    return np.asarray(memoryview(x)).ctypes.data


def pointed(item):
    """Return the address that the kernels get for an array."""
    if isinstance(item, int):
        return item
    return item[0] if isinstance(item, tuple) else np.asarray(memoryview(item)).ctypes.data


@contextlib.contextmanager
def blocks():
    """Record the address ranges of the memory that is allocated for results."""
    made, memory = [], kernels.memory

    def noted(nbytes):
        block = memory(nbytes)
        start = np.frombuffer(block, np.uint8).ctypes.data if nbytes else 0
        made.append(range(start, start + nbytes))
        return block

    with mock.patch.object(kernels, "memory", noted):
        yield made


def live(framework):
    """Return the bytes of results in use, after calls of the framework: JAX frees wrapped memory only in its calls.

    JAX 0.11 frees some of it in the second call.
    """
    framework.array(np.zeros(1))
    framework.array(np.zeros(1))
    return kernels.memory_usage()["live"]


def put(framework, xs):
    return PerReplica(framework.arrays(xs), strategies.names(len(xs)))


def test_inputs_are_read_in_place(framework):
    """The kernels get the addresses of the arrays' own elements: inputs are not copied."""
    for dtype in DTYPES:
        xs = [np.ones(shape, np_dtype(dtype)) for shape in ((5,), (2, 3), (), (1000,))]
        arrays = [framework.array(x, k % 2) for k, x in enumerate(xs)]
        own = framework_of(arrays[0])
        given = array_memory(own.name).readable([[own.array(x)] for x in arrays])
        assert [pointed(item) for (item,) in given] == [address(framework, x) for x in arrays], dtype


def test_large_results_wrap_the_kernels_memory(framework):
    """A large result is the memory that the kernels wrote, and returns it to the pool when it is freed.

    Where arrays are immutable, all devices' results share one memory.
    """
    gc.collect()
    before = live(framework)
    for dtype in DTYPES:
        size = LARGE // np_dtype(dtype).itemsize
        op = "max" if dtype == "bool" else "product"
        value = put(framework, [np.ones((size, 1), np_dtype(dtype)) for _ in range(3)])
        with blocks() as made:
            result = OPS.reduce(op, value, value)
        assert len(made) == (3 if framework.mutable else 1)
        places = [address(framework, y) for y in result]
        for at, block in zip(places, itertools.cycle(made)):  # immutable results share the only block
            assert at in block, dtype
            assert at + LARGE - 1 in block, dtype
        assert LARGE <= len(made[0]) < LARGE + 64  # up to 63 bytes more for alignment
        assert live(framework) - before == len(made) * len(made[0])
        last = result[2]
        del result
        assert live(framework) - before == len(made[0])
        del last
        assert live(framework) == before


def test_results_outlive_everything_else(framework):
    """A result keeps its memory and its numbers while it is referenced, whatever is freed and reduced meanwhile."""
    gc.collect()
    before = live(framework)
    held = {}
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (3, 0), (1,), (65, 5), (LARGE + 3,)]):
        op, due = ("max", 1) if dtype == "bool" else ("sum", 6)
        value = put(framework, [np.full(shape, k, np_dtype(dtype)) for k in (1, 2, 3)])
        held[dtype, shape] = OPS.reduce(op, value, value)[1], due
        value = put(framework, [np.full(shape, 0, np_dtype(dtype))] * 3)
        OPS.reduce("product", value, value)  # into memory that was freed
    del value
    gc.collect()
    for (dtype, shape), (y, due) in held.items():
        found = framework.to_numpy(y)
        assert found.shape == shape
        assert found.dtype == np_dtype(dtype)
        assert (found == due).all(), (dtype, shape)
    del y, found
    held.clear()
    assert live(framework) == before


def test_small_results_are_the_frameworks_own(framework):
    """Results below the pool's threshold come from the framework's own allocator, one for each device. But if the
    framework's arrays are immutable, all devices share one result in the pool's memory."""
    value = put(framework, [np.ones(LARGE // 4 - 1, "float32")] * 2)
    with blocks() as made:
        result = OPS.reduce("sum", value, on_devices(strategies.names(4)))
    assert type(result) is Mirrored
    assert len(made) == (0 if framework.mutable else 1)
    assert len({address(framework, y) for y in result}) == (4 if framework.mutable else 1)
    assert all((framework.to_numpy(y) == 2).all() for y in result)


def test_jax_arrays_of_another_layout(jax_):
    """An array that is stored transposed is read with its strides."""
    from jax.experimental.layout import Format, Layout

    x = np.arange(12.0).reshape(3, 4)
    place = jax_.jax.sharding.SingleDeviceSharding(jax_.devices[0])
    array = jax_.jax.device_put(x, Format(Layout((1, 0)), place))
    for arrays in ([array, jax_.array(x, 1)], [array, array, array]):
        value = PerReplica(arrays, strategies.names(len(arrays)))
        with engine_runs() as runs:
            result = OPS.reduce("sum", value, value)
        assert runs == ["host"]
        for y in result:
            oracle.check(jax_.to_numpy(y), "sum", [x] * len(arrays))


@pytest.mark.parametrize("size", [5, LARGE])
def test_arrays_may_be_deleted_and_donated(jax_, size):
    """If an input or a result is deleted, or donated and overwritten, no other result or later reduction changes."""
    overwritten = jax_.jax.jit(lambda x: x - 9, donate_argnums=0)  # writes into its argument
    value = put(jax_, [np.full(size, k, "float32") for k in (1, 2, 3)])  # the sum is 6, the mean 2
    result, copies = OPS.reduce("sum", value, value), OPS.broadcast(value[0], on_devices(strategies.names(2)))
    assert (jax_.to_numpy(overwritten(result[0])) == -3).all()
    assert all((jax_.to_numpy(y) == 2).all() for y in OPS.reduce("mean", value, value))
    assert (jax_.to_numpy(overwritten(value[0])) == -8).all()
    for x in (*value.values[1:], result[1]):
        x.delete()
    assert (jax_.to_numpy(result[2]) == 6).all()
    assert all((jax_.to_numpy(y) == 1).all() for y in copies)


def test_arrays_that_are_still_computed(jax_):
    """The kernels read an array only after JAX has computed it."""
    jnp = jax_.jax.numpy
    late = jax_.jax.jit(lambda x: jnp.linalg.matrix_power(x, 9))
    x = jax_.array(np.eye(300, dtype="float32") * 2)
    value = PerReplica([late(x), late(x)], strategies.names(2))
    assert (jax_.to_numpy(OPS.reduce("sum", value, value)[0]) == np.eye(300) * 1024).all()


def looped(function, *args):
    """Return the result of a function, and assert that only the engine "loop" reduced."""
    with engine_runs() as runs:
        found = function(*args)
    assert runs
    assert set(runs) == {"loop"}
    return found


def test_tensorflows_gradients_and_graphs(tensorflow_):
    """If a GradientTape or ForwardAccumulator records operations, or a graph is traced, the engine "loop" runs and the
    gradients are right. While recording is stopped, and in a py_function inside a graph, kernels run."""
    tf = tensorflow_.tf
    x, y = tensorflow_.array(np.arange(3.0), 0), tensorflow_.array(np.ones(3), 1)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        total = tf.reduce_sum(looped(cr.all_reduce, [x, y])[0] ** 2)
        with tape.stop_recording(), engine_runs() as runs:
            assert cr.all_reduce([x, y])[1].numpy().tolist() == [1, 2, 3]
        assert runs == ["host"]
    assert [g.numpy().tolist() for g in tape.gradient(total, [x, y])] == [[2, 4, 6]] * 2
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, 2.0, 3.0], tf.float64)) as watching:
        mean = looped(cr.all_reduce, [x, y], "mean")[1]
    assert watching.jvp(mean).numpy().tolist() == [0.5, 1, 1.5]
    assert looped(tf.function(lambda a: cr.all_reduce([a, a])[0]), x).numpy().tolist() == [0, 2, 4]
    with engine_runs() as runs:
        assert tf.py_function(lambda a: cr.all_reduce([a, a])[0], [x], tf.float64).numpy().tolist() == [0, 2, 4]
    assert runs == ["host"]


def test_torch_transformations_and_modes(torch_):
    """The engine "loop" runs under vmap, dispatch modes and for fake tensors. Under function modes, kernels run."""
    torch = torch_.torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Passing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.arange(3.0)
    stacked = torch.stack([x, x + 1])
    doubled = looped(torch.func.vmap(lambda a: cr.all_reduce([a, a])[0]), stacked)
    assert doubled.tolist() == [[0, 2, 4], [2, 4, 6]]
    with Watching():
        assert looped(cr.all_reduce, [x, x])[0].tolist() == [0, 2, 4]
    assert "aten.add.Tensor" in seen
    with FakeTensorMode() as mode:
        fakes = looped(cr.all_reduce, [mode.from_tensor(x), mode.from_tensor(x)])
    assert all(isinstance(y, FakeTensor) and y.shape == x.shape for y in fakes)
    with Passing(), torch.device("meta"), engine_runs() as runs:
        found = cr.all_reduce([torch.ones(LARGE, device="cpu")] * 2)
    assert runs == ["host"]
    assert all(y.device.type == "cpu" and (y == 2).all() for y in found)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory(torch_):
    """Tensors without memory (lazy zeros, fake tensors) can be reduced, but not be arrays of ``out``."""
    torch = torch_.torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    zero = torch._efficientzerotensor((3,))
    assert [x.tolist() for x in cr.all_reduce([zero, torch.ones(3)])] == [[1.0] * 3] * 2
    assert [x.shape for x in cr.all_reduce([fake, fake])] == [(3,)] * 2
    for given in (zero, fake):
        with pytest.raises(cr.ReductionError, match="given:"):
            cr.all_reduce([torch.ones(3)] * 2, out=[torch.ones(3), given])


def test_values_that_were_partly_sparse(framework):
    """Sparse components of a value that also has dense ones are made dense in the accumulator's dtype, and the engine
    "loop" reduces them."""
    for kind in framework.kinds:
        slices = framework.sparse(kind, np.full((2, 3), 2, "float16"), np.array([0, 2]), (4, 3))
        value = PerReplica([slices, framework.array(np.ones((4, 3), "float16"), 1)], strategies.names(2))
        result = looped(OPS.reduce, "sum", value, value)
        for y in result:
            assert framework.to_numpy(y).tolist() == [[3.0] * 3, [1.0] * 3, [3.0] * 3, [1.0] * 3]
            assert framework.to_numpy(y).dtype == "float16"
