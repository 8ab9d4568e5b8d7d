"""How much memory a reduction takes, counted by NumPy's own allocations (tracemalloc)."""

import tracemalloc

import numpy as np
import pytest
import strategies

import crossreduce as cr

REPLICAS, NBYTES = 8, 1 << 20


def peak(run):
    """Return the most bytes that a run held beyond what was there before, its results included."""
    run()  # plans and layouts are made once
    tracemalloc.start()
    try:
        results = run()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert results
    return most


@pytest.mark.parametrize("algorithm", strategies.ALGORITHMS)
@pytest.mark.parametrize("packs", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("tensors", [1, 20])
def test_a_batch_takes_its_results_and_at_most_one_further_copy(algorithm, packs, dtype, tensors):
    """A batch's peak is its results and one further copy of the batch, whatever the packing."""
    size = NBYTES // tensors // np.dtype(dtype).itemsize
    values = [cr.PerReplica([np.ones(size, dtype) for _ in range(REPLICAS)]) for _ in range(tensors)]
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs)
    most = peak(lambda: ops.batch_reduce("sum", [(value, value) for value in values]))
    batch = REPLICAS * NBYTES
    assert batch <= most <= 2 * batch + 200_000
