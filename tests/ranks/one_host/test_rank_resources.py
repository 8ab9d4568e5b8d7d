"""Resources of the ranks of one host after many calls and groups."""

import gc
import random
import threading
import weakref
from pathlib import Path

import pytest
from members import Resources, member, resident_bytes, summed
from ranks import SocketTransport, ranks

from crossreduce.ranks import communicator
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.connections import peer_requests
from crossreduce.ranks.inter_host import one_host
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def soak(rendezvous):
    one_host.CACHED_STAGES = 500  # small, so that the cache also removes executables
    comm = member(rendezvous)
    draw, stages = random.Random(3), []
    sizes = [draw.randrange(1, 5000) for _ in range(500)]
    sizes[::50] = range(PIECE_BYTES, PIECE_BYTES + 10)  # long arrays, whose programs have many stages

    def reductions(count):
        for k in range(count):
            summed(comm, sizes[k % 500])
            stages.append(comm.calls.executables.stages)
        gc.collect()
        return resident_bytes(), Resources()

    before, resources = reductions(800)
    after, later = reductions(1500)
    comm.close()
    return before, after, resources == later, max(stages)


def test_many_reductions_leak_nothing():
    """1,500 reductions of 500 shapes change the memory of a rank by less than 1 %, and no other resource. The cached
    executables have at most ``CACHED_STAGES`` stages."""
    for before, after, same, highest in ranks(2, soak, timeout_s=120):
        assert same
        assert abs(after - before) < before / 100, (before, after)
        assert 400 < highest <= 500


def many_groups(rendezvous):
    def make(count, base):
        for k in range(count):
            comm = member(rendezvous, 20, f"group {base + k}")
            assert threading.active_count() == 1
            summed(comm, 10)
            if k % 2 == 0:
                comm.barrier()  # so that no rank leaves before the others have finished
            comm.close()
        gc.collect()
        return resident_bytes(), Resources()

    before, resources = make(10, 0)
    after, later = make(30, 10)
    return resources == later, before, after


def test_many_groups_leave_nothing():
    """After 30 groups were made and closed, no descriptor, mapping or thread remains, and memory has grown by less than
    2 % or 1 MiB. A group on one host has no thread of its own."""
    for same, before, after in ranks(2, many_groups, timeout_s=120):
        assert same
        assert after - before < max(before / 50, 1 << 20), (before, after)


def dropped(rendezvous, several_hosts):
    gc.disable()
    transport = SocketTransport(rendezvous) if several_hosts else None
    comm = Communicator(rendezvous, transport, name="world", timeout_s=20.0)
    summed(comm, 4)
    reference = weakref.ref(comm)
    del comm
    return reference() is None


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_a_communicator_is_freed_with_its_last_reference(hosts):
    """A communicator is not part of a reference cycle. So its last reference frees it and its connections."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert ranks(2, dropped, len(set(hosts)) > 1, environment=environment) == [True, True]


def unfinished(rendezvous, several_hosts):
    made = []

    def connect(*_):
        made.append(SocketTransport(rendezvous))
        return made[-1]

    def fail(*_):
        raise MemoryError

    communicator.Statistics = fail
    peer_requests.listen()  # like another group of this process that is being formed
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
    """If the constructor fails, its transport is closed. The listener of the process stays open for other groups."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    assert ranks(2, unfinished, len(set(hosts)) > 1, environment=environment) == [(1, 0)] * 2  # (groups, leaks)
