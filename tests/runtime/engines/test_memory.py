"""The memory of a reduction: NumPy's allocations (tracemalloc) and the result memory of the kernels."""

import gc
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import strategies
from pairs import pairs

import crossreduce as cr
from crossreduce import kernels

REPLICAS, NBYTES = 8, 1 << 20


def peak(run):
    """Return the most bytes that a run uses at once, its results included."""
    run()  # compiles and caches programs and kernels, whose memory is not counted
    gc.collect()
    before = kernels.memory_usage()["live"]
    tracemalloc.start()
    try:
        results = run()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert results
    return most + kernels.memory_usage()["live"] - before


@pytest.mark.parametrize(
    ("algorithm", "packs", "dtype", "tensors", "exact"),
    pairs(strategies.ALGORITHMS, [0, 1, 3], ["float32", "float16", "int8"], [1, 20], [False, True]),
)
def test_a_batch_needs_only_the_memory_of_its_results(algorithm, packs, dtype, tensors, exact):
    """For any num_packs, the peak memory of a batch is that of its results, since tensors are not copied to packs."""
    size = NBYTES // tensors // np.dtype(dtype).itemsize
    values = [cr.PerReplica([np.ones(size, dtype) for _ in range(REPLICAS)]) for _ in range(tensors)]
    ops = cr.AllReduceCrossDeviceOps(algorithm, num_packs=packs)
    options = cr.CommunicationOptions(exact=exact)
    most = peak(lambda: ops.batch_reduce("sum", [(value, value) for value in values], options))
    results = REPLICAS * tensors * size * np.dtype(dtype).itemsize
    assert results <= most <= results + 200_000


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_loop_with_out_allocates_nothing_after_its_first_step(op):
    """After its first step, a loop that writes its results into ``out``, or in place, allocates no arrays."""
    size = NBYTES // 4
    values = [cr.PerReplica([np.ones(size, "float32") for _ in range(REPLICAS)]) for _ in range(5)]
    outs = [cr.PerReplica([np.empty(size, "float32") for _ in range(REPLICAS)]) for _ in range(5)]
    ops = cr.AllReduceCrossDeviceOps("auto")
    pairs = [(value, value) for value in values]
    assert peak(lambda: ops.batch_reduce(op, pairs, out=outs)) < 200_000
    assert peak(lambda: ops.batch_reduce(op, pairs, out=values)) < 200_000
    trees = [[value[replica] for value in values] for replica in range(REPLICAS)]
    assert peak(lambda: cr.all_reduce(trees, op, out=trees)) < 200_000


def test_the_memory_of_freed_results_is_reused():
    """If a loop deletes its results before the next step, the next results have the same addresses."""
    value = cr.PerReplica([np.ones(NBYTES // 4, "float32") for _ in range(REPLICAS)])
    ops = cr.AllReduceCrossDeviceOps("auto")
    gc.collect()
    kernels.empty_cache()
    before = kernels.memory_usage()["live"]
    addresses = set()
    for _ in range(4):
        result = ops.reduce("sum", value, value)
        addresses.add(frozenset(x.__array_interface__["data"][0] for x in result))
        grown = kernels.memory_usage()["live"] - before
        assert 0 <= grown - REPLICAS * NBYTES <= REPLICAS * 64  # each result may need 64 bytes more to be aligned
        del result
        usage = kernels.memory_usage()
        assert usage["pooled"] >= REPLICAS * NBYTES
        assert usage["live"] + usage["pooled"] <= usage["peak"]
    assert len(addresses) == 1
    kernels.empty_cache()
    assert kernels.memory_usage()["pooled"] == 0


PEAK = """
import sys
import numpy as np
import crossreduce as cr
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))
value = cr.PerReplica([np.ones(1 << 20, "float32") for _ in range(8)])  # 4 MiB each
ops = cr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=int(sys.argv[1]))
outs = [cr.PerReplica([np.ones(1 << 20, "float32") for _ in range(8)]) for _ in range(2)]
ops.batch_reduce("sum", [(value, value)] * 2, out=outs)  # starts threads and compiles kernels
del outs
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # reset the peak
options = cr.CommunicationOptions(exact=sys.argv[2] == "True")
results = ops.batch_reduce("sum", [(value, value)] * 2, options)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status exists only on Linux")
@pytest.mark.parametrize(("packs", "exact"), [(0, False), (5, True)])
def test_the_process_grows_by_the_results_and_a_mebibyte_per_thread(packs, exact):
    """The peak memory of the process, as Linux reports it, grows by the results and at most 1 MiB for each thread."""
    command = [sys.executable, "-c", PEAK, str(packs), str(exact)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    results = 2 * REPLICAS * (4 << 10)  # in KiB
    assert results <= int(ran.stdout) <= results + 1024 * kernels.threads()
