"""Resources of the ranks of one host after many calls and groups."""

import gc
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from members import Resources, member, memory, resident_bytes, summed
from ranks import SocketTransport, ranks

from crossreduce.errors import ContextError
from crossreduce.ops import ReduceOp
from crossreduce.ranks import communicator
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.connections import peer_requests
from crossreduce.ranks.inter_host import one_host
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def soak(rendezvous):
    one_host.CACHED_STAGES = 2000  # small, so that the cache also removes executables
    comm = member(rendezvous)
    x = np.ones(5000, np.float32)
    draw = random.Random(3)
    sizes = [draw.randrange(1, 5000) for _ in range(2000)]

    def reductions(count):
        for k in range(count):
            part = x[: sizes[k % 2000]]
            comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))

    reductions(2500)
    gc.collect()
    before, resources = resident_bytes(), Resources()
    reductions(3000)
    gc.collect()
    after, same = resident_bytes(), Resources() == resources
    comm.close()
    return before, after, same


def test_many_reductions_leak_nothing():
    """3,000 reductions of over 1,000 shapes change the memory of a rank by less than 1 %, and no other resource."""
    for before, after, same in ranks(2, soak, timeout_s=120):
        assert same
        assert abs(after - before) < before / 100, (before, after)


def many_shapes(rendezvous):
    comm = member(rendezvous)
    x = np.ones(PIECE_BYTES, np.float32)  # its long parts run programs of 6 stages, short ones fewer
    highest = 0
    one_host.CACHED_STAGES = 100
    for k in range(60):
        part = x[k if k % 3 else -k - 1 :]
        comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))
        highest = max(highest, comm.calls.executables.stages)
    comm.close()
    return highest


def test_the_cache_of_executables_is_bounded():
    """The cache is limited by the number of stages, not by the number of calls."""
    for highest in ranks(2, many_shapes):
        assert 50 < highest <= 100


def many_groups(rendezvous):
    def make(count, base):
        for k in range(count):
            comm = member(rendezvous, 20, f"group {base + k}")
            summed(comm, 10)
            if k % 2:
                comm.close()
            else:
                comm.barrier()  # so that no rank leaves before the others have finished
                comm.close()

    make(20, 0)
    gc.collect()
    before, resources = resident_bytes(), Resources()
    make(60, 20)
    gc.collect()
    return resources == Resources(), before, resident_bytes()


def test_many_groups_leave_nothing():
    """60 groups, made and closed, leave no descriptor, mapping or thread; memory grows by less than 2 % or 1 MiB."""
    for same, before, after in ranks(2, many_groups, timeout_s=120):
        assert same
        assert after - before < max(before / 50, 1 << 20), (before, after)


def used_after(rendezvous):
    before = Resources()
    comm = member(rendezvous)
    threads = threading.active_count()
    assert before != Resources()
    comm.close()
    assert before == Resources()
    with pytest.raises(ContextError, match='group "world" is closed'):
        comm.barrier()
    return threads


def test_a_closed_group_has_no_resources():
    """A group on one host has no thread of its own; once closed, it has no memory and no descriptor."""
    assert ranks(2, used_after) == [1, 1]


def dropped(rendezvous, several_hosts):
    gc.disable()
    transport = SocketTransport(rendezvous) if several_hosts else None
    comm, x = Communicator(rendezvous, transport, name="world", timeout_s=20.0), np.ones(4, np.float32)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    reference = weakref.ref(comm)
    del comm
    return reference() is None


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_a_communicator_is_freed_with_its_last_reference(hosts):
    """A communicator is not in a reference cycle, so its transport's connections close with its last reference."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert ranks(2, dropped, len(set(hosts)) > 1, environment=environment) == [True, True]


def unfinished(rendezvous, several_hosts):
    made = []

    def connect(cancelled, hosts):
        made.append(SocketTransport(rendezvous))
        return made[-1]

    def fail(*_):
        raise MemoryError

    communicator.Statistics = fail
    peer_requests.listen()  # as another group of this process that is being made
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        Communicator(rendezvous, connect if several_hosts else None, name="world", timeout_s=20.0)
    except MemoryError as error:
        error.__traceback__ = None
    gc.collect()
    (joining,) = (contact.joining for contact in peer_requests._open.values())
    return joining, len(list(Path("/proc/self/fd").iterdir())) - before


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_a_communicator_that_cannot_be_made_keeps_nothing(hosts):
    """It closes the transport that it connected, and leaves the listener to the other groups of the process."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert ranks(2, unfinished, len(set(hosts)) > 1, environment=environment) == [(1, 0)] * 2
