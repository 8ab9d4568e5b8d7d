"""Runs ranks whose calls are traced, and reads the traces."""

import threading
import time

import numpy as np
from host_checks import joined
from members import array_group, member, memory, summed
from ranks import ranks

from crossreduce import Topology
from crossreduce.observe.traces.calls import read_directory
from crossreduce.ops import ReduceOp

LATE_S = 0.15
TWO_HOSTS = [{"CROSSREDUCE_HOST": name} for name in "aaabb"]
CALLS = [
    *["all_reduce sum float32[8]"] * 3,
    "all_reduce sum float64[700001]",
    "broadcast root 1 float64[700001]",
    "barrier",
    "all_reduce sum float64[700001]",
]


def traced(n, function, folder, *args, environment=None, **options):
    """Run ranks with CROSSREDUCE_TRACE, and return their results."""
    variables = [{"CROSSREDUCE_TRACE": str(folder), **own} for own in environment or [{}] * n]
    return ranks(n, function, *args, environment=variables, **options)


def only_group(folder):
    """Return the only group of the traces in a folder, and the notes about the files."""
    found = read_directory(folder)
    ((group,),) = found.runs
    return group, found.notes


def some_calls(rendezvous):
    """Make the calls ``CALLS``, most of them prepared (in native code). Rank 1 is late for the last call."""
    group = array_group(member(rendezvous))
    for _ in range(3):
        group.all_reduce(np.ones(8, np.float32))
    x = np.ones(700_001)
    group.all_reduce(x)
    group.broadcast(x, 1)
    group.barrier()
    if group.rank == 1:
        time.sleep(LATE_S)
    group.all_reduce(x)
    group.close()


def across_hosts(rendezvous):
    """Make calls of various sizes between hosts. In each call another rank is late. ``plan_on`` is call 9."""
    comm = joined(rendezvous)

    def call(size):
        x = np.ones(size, np.float32)
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
        assert x[0] == comm.size

    for k, size in enumerate((10, 1000, 100_000, 10, 300_000, 10, 1000, 50)):
        time.sleep(0.01 if k % comm.size == comm.rank else 0)
        call(size)
    comm.plan_on(Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=2, latency_s=1e-5))
    call(100_000)
    comm.close()


def in_threads(rendezvous):
    """Make calls of two groups at the same time, in a thread each. Then make calls of the first in a third thread."""
    groups = member(rendezvous), member(rendezvous, name="second")

    def run(group, count):
        for _ in range(count):
            summed(group, 10)

    for calls in ([(groups[0], 40), (groups[1], 30)], [(groups[0], 5)]):
        threads = [threading.Thread(target=run, args=each) for each in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for group in groups:
        group.close()


def copied(folder, target):
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return sorted(target.iterdir())
