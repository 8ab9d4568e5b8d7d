"""Many threads use the library at the same time, with any interpreter; free-threaded ones keep their lock off."""

import dataclasses
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import crossreduce as cr

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
REPLICAS, ROUNDS, WORKERS = 3, 30, 2
OPS = cr.AllReduceCrossDeviceOps("auto")  # all threads use one object
PACKING = cr.HierarchicalCopyAllReduce(num_packs=2)
STRATEGY = cr.MirroredStrategy(REPLICAS)


def arrays(seed, size):
    """Return integers, one array per replica, and their sum."""
    made = [np.random.default_rng(seed + k).integers(-(10**6), 10**6, size) for k in range(REPLICAS)]
    return made, np.add.reduce(made)


def reduces_trees(seed):
    """Reduces trees of a new type, with arrays of a size that needs a new plan, and of a size that does not."""

    @dataclasses.dataclass
    class Gradients:
        w: object
        b: object

    for size in (seed % 97 + 1, 50):
        xs, total = arrays(seed, size)
        results = cr.all_reduce([Gradients(x, {"x": x[:1]}) for x in xs], cross_device_ops=OPS)
        assert all((result.w == total).all() and (result.b["x"] == total[:1]).all() for result in results)


def packs(seed):
    """Packs several tensors."""
    made = [arrays(seed + size, size) for size in (3, 1000, 70)]
    values = [cr.PerReplica(xs) for xs, _ in made]
    results = PACKING.batch_reduce("sum", list(zip(values, values, strict=True)))
    for (_, total), result in zip(made, results, strict=True):
        assert all((x == total).all() for x in result.values)


def reuses_memory(seed):
    """Frees results of the memory pool, keeps others, and writes into given arrays."""
    xs, total = arrays(seed, 1 << 17)  # with threads of the pool
    first = cr.all_reduce(xs)
    out = [np.empty_like(x) for x in xs]
    second = cr.all_reduce(xs, out=out)
    assert all((x == total).all() for x in (*first, *second))


def runs_replicas(seed):
    """Runs replicas that reduce, gather, merge and count, in one strategy that several threads use."""
    xs, total = arrays(seed, 20)
    with STRATEGY.scope():
        metric = cr.Variable(np.int64(0), synchronization="on_read", aggregation="sum")

    def step(x):
        context = cr.get_replica_context()
        for _ in range(3):
            assert (context.all_reduce("sum", {"x": x})["x"] == total).all()
        metric.assign_add(np.int64(1))
        largest = context.merge_call(lambda strategy, value: strategy.reduce("max", value), args=(x,))
        return context.all_gather(x[None], 0), largest

    rows, largest = STRATEGY.run(step, args=(cr.PerReplica(xs),))
    assert all((x == xs).all() for x in rows)
    assert all((x == np.maximum.reduce(xs)).all() for x in largest)
    assert metric.value() == REPLICAS


JOBS = (reduces_trees, packs, reuses_memory, runs_replicas)


def test_threads_use_everything_at_the_same_time():
    """Trees, packs, memory of the pool and strategies give the right results while other threads use all of them."""
    begun = threading.Barrier(len(JOBS) * WORKERS)

    def work(job, worker):
        begun.wait(30)
        for k in range(ROUNDS):
            job(1000 * worker + 10 * k)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(JOBS) * WORKERS) as pool:
            for done in [pool.submit(work, job, k) for job in JOBS for k in range(WORKERS)]:
                done.result(timeout=200)
    finally:
        sys.setswitchinterval(interval)


IMPORTS = """
import sys, numpy as np, crossreduce as cr
from crossreduce import kernels
cr.MirroredStrategy(2).run(lambda: cr.get_replica_context().all_reduce("sum", {"x": np.ones(3)}))
import crossreduce.frameworks._numpy_arrays
print(kernels.native() is not None, sys._is_gil_enabled())
"""


@pytest.mark.skipif(not FREE_THREADED, reason="needs a free-threaded interpreter")
def test_free_threaded_interpreters_keep_their_lock_off():
    """The compiled modules exist for free-threaded interpreters, and importing them does not enable the lock."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert ran.stdout == "True False\n", ran.stderr
