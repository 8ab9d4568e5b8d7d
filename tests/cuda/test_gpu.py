"""One CUDA device: torch and JAX with eight logical replicas, cuda:0 to cuda:0#7.

Each dense reduction must launch kernels of the CUDA engine: if it is not installed, or JAX refuses its custom call, the
framework's own operations give the same results, and these tests would prove nothing. docs/cuda.md has the command.
"""

from functools import partial

import numpy as np
import oracle
import pytest
from engine_runs import kernel_launches
from expect import check_memory, digits, result_dtype, small
from frameworks import DTYPES, Jax, Torch
from pairs import each, pairs
from strategies import ops_for

import crossreduce as cr
from crossreduce.options import ALGORITHMS

pytestmark = pytest.mark.gpu
LOGICAL = ("cuda:0", *(f"cuda:0#{k}" for k in range(1, 8)))


@pytest.fixture(scope="module", params=["torch", "jax"])
def gpu(request):
    return Torch("cuda") if request.param == "torch" else Jax("cuda")


def on_gpu(framework, x):
    return framework.device_of(x) in ("cuda:0", "gpu:0")


def put(framework, xs):
    return [framework.array(x, 0) for x in xs]


def check(framework, run, op, xs, devices, inputs):
    """Return the result of ``run``. Assert that the engine's kernels made it, and that it is right.

    It must be on the devices, that of the oracle on all of them, and have its own memory.
    """
    launches = kernel_launches()
    result = run()
    assert type(result) is cr.Mirrored
    assert result.devices == tuple(devices)
    ys = [framework.to_numpy(y) for y in result]
    oracle.check(ys[0], op, xs, result=result_dtype(framework, op, xs[0].dtype.name))
    assert kernel_launches() > launches, "the kernels of the CUDA engine did not run"
    assert len({y.tobytes() for y in ys}) == 1
    assert all(on_gpu(framework, y) for y in result)
    check_memory(framework, result, inputs)
    return result


def test_every_contribution_is_added_once_on_gpu(gpu):
    """On 1 to 8 logical devices, packed or not, no contribution is lost, doubled or misplaced."""
    for algorithm, n, packs in pairs(ALGORITHMS, range(1, 9), [0, 1, 3]):
        xs = digits(n, (5,))
        given = put(gpu, xs)
        value = cr.PerReplica(given)
        assert value.devices == LOGICAL[:n]
        ops = cr.AllReduceCrossDeviceOps(algorithm, packs)
        check(gpu, partial(ops.reduce, "sum", value, value), "sum", xs, LOGICAL[:n], given)
        check(gpu, partial(ops.reduce, "sum", value, "cuda:0#9"), "sum", xs, ("cuda:0#9",), given)


def test_every_dtype_on_gpu(gpu):
    """Every reduction of every dtype equals the oracle, for every algorithm, with the same bits in every run."""
    for algorithm, dtype in each(ALGORITHMS, DTYPES):
        xs = small(dtype, (3, 2), 8)
        given = put(gpu, xs)
        value = cr.PerReplica(given)
        for op in ops_for(dtype):
            runs = [partial(cr.AllReduceCrossDeviceOps(algorithm).reduce, op, value, value) for _ in range(2)]
            first, again = (check(gpu, run, op, xs, LOGICAL, given) for run in runs)
            assert gpu.to_numpy(first[0]).tobytes() == gpu.to_numpy(again[0]).tobytes()
        assert all(np.array_equal(gpu.to_numpy(x), kept) for x, kept in zip(given, xs, strict=True))
    for n in (3, 5, 6, 7):  # a mean is divided by n, not multiplied by 1/n
        value = cr.PerReplica(put(gpu, [np.arange(100, dtype="float32")] * n))
        for y in cr.HierarchicalCopyAllReduce().reduce("mean", value, value):
            assert gpu.to_numpy(y).tolist() == list(range(100))


def test_sparse_on_gpu(gpu):
    """On the GPU, slices are concatenated in replica order. If another replica is dense, they are made dense."""
    for kind in gpu.kinds:
        parts = [(np.full((k % 3, 2), k, "float32"), np.arange(k % 3)) for k in range(8)]
        given = [gpu.sparse(kind, v, i, (4, 2), 0) for v, i in parts]
        dense = [gpu.dense(x, (4, 2)) for x in given]
        value = cr.PerReplica(given, LOGICAL)
        for y in cr.HierarchicalCopyAllReduce().reduce("sum", value, value):
            assert gpu.parts(y).indices.tolist() == np.concatenate([i for _, i in parts]).tolist()
            assert np.array_equal(gpu.dense(y, (4, 2)), sum(dense))
        mixed = cr.PerReplica([*given[:7], gpu.array(dense[7])], LOGICAL)
        run = partial(cr.HierarchicalCopyAllReduce().reduce, "sum", mixed, mixed)
        check(gpu, run, "sum", dense, LOGICAL, [])


def test_gather_and_broadcast_on_gpu(gpu):
    """Gather and broadcast work between logical devices, and between the GPU and the host."""
    xs = digits(3, (4,))
    value = cr.PerReplica(put(gpu, xs))
    for y in cr.HierarchicalCopyAllReduce().gather(value, value, 0):
        assert gpu.to_numpy(y).tolist() == np.concatenate(xs).tolist()
    launches = [kernel_launches()]
    (y,) = cr.HierarchicalCopyAllReduce().reduce("sum", value, "cpu:0")
    assert ("cpu" in gpu.device_of(y), gpu.to_numpy(y).tolist()) == (True, np.sum(xs, axis=0).tolist())
    launches.append(kernel_launches())
    copies = cr.HierarchicalCopyAllReduce().broadcast(y, value)
    assert all(on_gpu(gpu, copy) for copy in copies)
    assert [gpu.to_numpy(copy).tolist() for copy in copies] == [gpu.to_numpy(y).tolist()] * 3
    assert launches[0] < launches[1] < kernel_launches(), "the kernels of the CUDA engine did not run"
    with pytest.raises(cr.DeviceError, match="cuda:99"):
        cr.HierarchicalCopyAllReduce().reduce("sum", value, "cuda:99")
