"""Resources of ranks after many calls and groups, and ranks that lack some."""

import _thread
import gc
import mmap
import random
import re
import resource
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from free_port import free_port
from kinds_of_groups import die
from members import Resources, member, resident_bytes, summed
from ranks import SocketTransport, ranks

from crossreduce import processes
from crossreduce.errors import ExcludedError, ReductionError
from crossreduce.ranks import communicator
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.connections import peer_requests, repeated_request
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
    for before, after, same, highest in ranks(2, soak):
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
    for same, before, after in ranks(2, many_groups):
        assert same
        assert after - before < max(before / 50, 1 << 20), (before, after)


def dropped(rendezvous, several_hosts):
    gc.disable()
    transport = SocketTransport(rendezvous) if several_hosts else None
    comm = Communicator(rendezvous, transport, name="world", timeout_s=100)
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
        Communicator(rendezvous, connect if several_hosts else None, name="world", timeout_s=100)
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


def lacks_in_shrink(rendezvous, address, kind, used):
    group = processes.join(rendezvous.rank, rendezvous.size, address)
    if group.rank == 2:
        die()
    if group.rank == 0:
        resource.setrlimit(kind, (used(), resource.getrlimit(kind)[1]))
        held = threading.Lock()
        held.acquire()
        with suppress(RuntimeError):  # use up the stacks of ended threads, which the C library keeps
            while kind == resource.RLIMIT_AS:
                _thread.start_new_thread(held.acquire, ())
    try:
        group.shrink(timeout_s=3)
    except ReductionError as error:
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)
        return type(error), str(error)


@pytest.mark.parametrize(("kind", "used", "reason"), [
    (resource.RLIMIT_NOFILE, lambda: len([*Path("/proc/self/fd").iterdir()]) - 1, "Too many open files"),
    (resource.RLIMIT_AS, lambda: int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(),
     "Cannot allocate memory|can't start new thread|not enough memory"),
], ids=["files", "memory"])  # fmt: skip
def test_a_rank_without_resources_says_so(kind, used, reason):
    """If a rank has no file descriptors or no memory left, the error of its ``shrink`` says so. Other ranks name no
    rank as lost, since this one lives."""
    (_, first), (other, second), _ = ranks(3, lacks_in_shrink, f"127.0.0.1:{free_port()}", kind, used, check=False)
    assert re.search(reason, first), first
    assert other is ReductionError
    assert re.search(f"{reason}|read the error", second), second


def lacks_memory_until_it_leaves(rendezvous, address):
    group, mapped = processes.join(rendezvous.rank, rendezvous.size, address), mmap.mmap
    if rendezvous.rank == 0:
        return group.agree(True, timeout_s=0)
    time.sleep(0.4)  # it decides meanwhile
    repeated_request.start_new_thread = lambda *_: None  # threads start, but Python has no memory to run them

    def mapping(*arguments):
        if group.communicator.memory.fd >= 0:
            raise MemoryError
        return mapped(*arguments)

    mmap.mmap = mapping
    with pytest.raises(ExcludedError, match=r"rank 1 cannot form group .*\n.*not enough memory"):
        group.agree(True, timeout_s=0.1)
    return False


def test_a_rank_that_lacks_memory_only_until_it_leaves_says_so():
    """The error of a rank that lacked memory for its requests to other hosts says so, although it has more memory after
    it has left the group."""
    address, environment = f"127.0.0.1:{free_port()}", [{"CROSSREDUCE_HOST": host} for host in "ab"]
    assert ranks(2, lacks_memory_until_it_leaves, address, environment=environment) == [True, False]


def joins_without_files(rendezvous):
    with processes.join(0, 1) as group:
        invited, (_, most) = group.invitation(), resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len([*Path("/proc/self/fd").iterdir()]) - 1
        for more in (0, 1):  # one is enough to connect, but not to find out which addresses are those of this machine
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, most))
            with pytest.raises(ReductionError, match=r"this process cannot join the group\.\n.*Too many open files"):
                processes.join_invited(invited, timeout_s=0.3)


def test_a_process_without_files_cannot_join():
    """If a process that wants to join has too few file descriptors, its error says so, and not that others are late."""
    ranks(1, joins_without_files)
