"""The program of each rank in ``test_mpi``, run by mpiexec: all collectives, invalid calls, lost ranks, messages."""

import os
import sys
import threading

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
me, n = world.Get_rank(), world.Get_size()
names = sys.argv[1]
os.environ["CROSSREDUCE_HOST"] = names[me]

import transport_laws  # noqa: E402
from array_checks import every_collective, raises, same  # noqa: E402

import crossreduce as cr  # noqa: E402
from crossreduce import mpi  # noqa: E402

before = {thread.name for thread in threading.enumerate()}
with mpi.join(timeout_s=30) as group:
    assert (group.rank, group.size) == (me, n)
    hosts = [tuple(k for k in range(n) if names[k] == name) for name in dict.fromkeys(names)]
    assert group.hosts == tuple(hosts), group.hosts
    every_collective(group)
    topology = group.measure_topology(0.2)
    assert len(topology.devices) == n
    assert len(set(world.allgather(topology.to_json()))) == 1
    same(group.all_reduce(np.arange(300_000)), n * np.arange(300_000))
    again = mpi.join(world.Split(me % 2, me), timeout_s=30)  # a group of some of the ranks
    assert "crossreduce-mpi" not in {thread.name for thread in threading.enumerate()}  # compiled code moves messages
    same(again.all_reduce(np.ones(5)), np.full(5, float(len(range(me % 2, n, 2)))))
    again.close()
assert {thread.name for thread in threading.enumerate()} <= before
# A message that arrives after an abort is not written to the receive's memory, which may already have another use.
if n > 1:
    transport, memory, word = mpi.MpiTransport(world.Dup()), np.zeros(1000, "uint8"), np.ones(1000, "uint8")
    if me == 1:
        late = transport.receive(memory.ctypes.data, memory.nbytes, 0, 0)
        transport.abort()
        raises(ConnectionError, "aborted the group", lambda: late.wait(1))
    world.Barrier()
    if me == 0:
        transport.send(word.ctypes.data, word.nbytes, 1, 0).wait(5)
    world.Barrier()
    for _ in range(100):
        world.Iprobe()  # MPI makes progress only while it is called
    assert not memory.any()
    transport.close()


def without(absent, timeout_s, leaves):
    """Let the ranks ``absent`` leave the group (``leaves``) or make no call. Return the error of the other ranks."""
    error, group = None, mpi.join(timeout_s=timeout_s)
    group.barrier()
    if me not in absent:
        error = transport_laws.raises(cr.ReductionError, group.all_reduce, np.ones(100_000))
    elif leaves:
        group.close()
    world.Barrier()
    group.close()
    return error


if len(hosts) > 1:
    late, left = without([n - 1], 1.0, False), without(hosts[0], 50.0, True)
    assert me == n - 1 or (type(late), late.ranks) == (cr.CollectiveTimeout, (n - 1,)), late
    assert me in hosts[0] or (type(left), f"rank {hosts[0][0]} left" in str(left)) == (cr.PeerLostError, True), left
transport_laws.run_under_mpi()
raises(cr.ArgumentError, "mpi4py intracommunicator", lambda: mpi.join(3))
raises(cr.ArgumentError, "above 0", lambda: mpi.join(world, timeout_s=0))
print(f"rank {me} of {n} is done", flush=True)
