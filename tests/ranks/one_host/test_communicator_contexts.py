"""Communicators in threads, forks, signal handlers and finalizers, with little memory, and with wrong arguments."""

import gc
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from members import Resources, member, memories, memory, summed
from ranks import SocketRendezvous, ranks

from crossreduce.errors import (
    ArgumentError,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
)
from crossreduce.ops import ReduceOp
from crossreduce.ranks import membership
from crossreduce.ranks.communicator import ArrayView
from crossreduce.ranks.intra_host import shared_memory


def crowd(rendezvous):
    """Run three threads per rank with a group each, which odd and even ranks start in opposite orders. Also run two
    threads that make equal calls of a shared group."""

    def own_group(name):
        comm = member(rendezvous, name=name)
        for k in range(30):
            summed(comm, (10, 3000, 200_000)[k % 3])
        comm.close()

    shared = member(rendezvous)
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(own_group, name) for name in ("abc" if rendezvous.rank % 2 else "cba")]
        running += [pool.submit(lambda: [summed(shared, 5000) for _ in range(30)]) for _ in range(2)]
        for each in running:
            each.result(30)
    shared.close()


def test_several_groups_and_threads_at_once():
    """Groups can be made and used in different orders on the ranks. The calls of one group run one after another."""
    ranks(3, crowd)


def forking(rendezvous):
    """Fork children during calls, which use, drop or close the group. Return their exit statuses."""
    comm, statuses = member(rendezvous), []
    thread = threading.Thread(target=lambda: [summed(comm, 300_000) for _ in range(25)])
    thread.start()
    for how in ("use", "drop", "close", "use", "drop"):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # ends a child that waits for a lock
            code = 1
            try:
                if how == "use":
                    for call in (comm.barrier, comm.stats):
                        with pytest.raises(ContextError, match=r'group "world" belongs to process[\s\S]*forked'):
                            call()
                elif how == "close":
                    comm.close()
                    comm.abort()
                comm = None
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        statuses.append(os.waitpid(pid, 0)[1])
    thread.join()
    summed(comm)
    comm.close()
    return statuses


def test_forked_children_do_not_affect_the_group():
    """A child forked during a call cannot use its parent's group, but may close or drop it without an effect on it."""
    assert ranks(2, forking) == [[0] * 5] * 2


def dropped(rendezvous):
    gc.disable()
    before, error = Resources(), None
    comm = member(rendezvous, 10)
    summed(comm)
    if rendezvous.rank:
        try:
            comm.barrier()
        except PeerLostError as lost:
            error = str(lost), lost.ranks
            del lost
    del comm
    return error, before, Resources()


def test_a_rank_that_drops_its_group_leaves_it():
    """If a rank drops a group without closing it, all resources are released at once, without the garbage collector.
    The other ranks get an error that names the rank."""
    found = ranks(3, dropped)
    assert all(before == after for _, before, after in found), found
    for (text, lost), *_ in found[1:]:
        assert lost == (0,)
        assert text.startswith('rank 0 left during op 2, barrier, of group "world"')


def short_of_addresses(rendezvous):
    before = Resources()
    if rendezvous.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20),) * 2)
    try:
        member(rendezvous, 20)
    except ReductionError as error:
        caught = str(error)
    gc.collect()
    return caught, before == Resources()


def test_a_rank_that_cannot_map_the_memory_delays_no_other_rank():
    """If a rank cannot map the shared memory, all ranks raise the same error at once and keep no resources."""
    ((text, is_released),) = set(ranks(3, short_of_addresses))
    assert text.startswith("rank 1: the memory of the host cannot be mapped.\n  given: [Errno 12] Cannot allocate")
    assert is_released


def two_in_one(rendezvous):
    def one(rank):
        with pytest.raises(ContextError, match=f"ranks 0, 1 in process {os.getpid()}"):
            member(SocketRendezvous(rendezvous.path, rank, 2, "twins"), 5)
        return True

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (0, 1), timeout=100.0))


def test_two_ranks_in_one_process_are_refused():
    """Two threads of one process cannot be ranks of the same group."""
    assert ranks(1, two_in_one) == [[True, True]]


def misused(rendezvous):
    comm = member(rendezvous, 10)
    n = comm.size
    x, y = np.zeros(6, np.float32), np.zeros(7, np.float32)
    one, complex64, float8 = memory(x), *([ArrayView(0, 0, dtype, ())] * 2 for dtype in ("complex64", "float8"))
    exact = partial(comm.all_reduce, exact=True)
    for call, arguments, kind, words in (
        (comm.broadcast, (one, n), ArgumentError, "not a rank of the group"),
        (comm.broadcast, (one, -1), ArgumentError, "not a rank of the group"),
        (comm.all_gather, (one, memories([x] * (n + 1))), ArgumentError, "one array per rank"),
        (comm.all_to_all, ([], []), ArgumentError, "one array per rank"),
        (comm.all_to_all, (memories([x] * n), []), ArgumentError, "one array per rank"),
        (comm.reduce, (ReduceOp.SUM, one, None, comm.rank), ArgumentError, "the root must pass"),
        (comm.gather, (one, memories([x] * n), (comm.rank + 1) % n), ArgumentError, "only the root may"),
        (comm.all_reduce, (ReduceOp.SUM, one, memory(y)), MismatchError, "same dtype and size"),
        (comm.all_reduce, (ReduceOp.MAX, *complex64), UnsupportedError, "max of complex numbers is not defined"),
        (comm.all_reduce, (ReduceOp.SUM, *float8), UnsupportedError, "float8"),
        (exact, (ReduceOp.PRODUCT, one, one), UnsupportedError, "a product cannot be exact"),
    ):
        with pytest.raises(kind, match=words):
            call(*arguments)
    comm.all_reduce(ReduceOp.MAX, one, one, exact=comm.rank == 1)  # maxima are always exact
    summed(comm)  # the invalid calls have no effect on later ones
    comm.close()
    comm.close()
    comm.abort()
    with pytest.raises(ContextError, match="is closed"):
        comm.barrier()


def test_wrong_arguments_raise_on_the_calling_rank():
    """A call with wrong arguments raises an error on its rank, and does not count. So does a call of a closed group."""
    ranks(2, misused)


def handled(rendezvous, inside):
    """Call ``inside`` in a signal handler, during a barrier of rank 0. Return outcome, errors, and a descriptor."""
    comm, seen, outcome = member(rendezvous, 10), [], "done"

    def handler(*_):
        try:
            getattr(comm, inside)()
        except ContextError as error:
            seen.append(str(error))
        rendezvous.query("put", [inside], True)

    if comm.rank:
        assert rendezvous.query("get", [inside], timeout=100.0) == [True]
    else:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.15)
    try:
        comm.barrier()
    except PeerLostError as error:
        outcome = str(error)
    comm.close()
    return outcome, seen, comm.memory.fd


def test_a_signal_handler_during_a_call():
    """A collective in a signal handler raises an error, and the interrupted call continues. ``close`` or ``abort`` in
    the handler ends the interrupted call on all ranks."""
    for inside in ("barrier", "close", "abort"):
        (outcome, errors, fd), (other_outcome, *_) = ranks(2, handled, inside)
        assert (fd, other_outcome) == (-1, outcome)
        if inside == "barrier":
            (error,) = errors
            assert "this thread is already in a call" in error
            assert outcome == "done"
        else:
            assert errors == []
            assert outcome.startswith("rank 0 left during op 1, barrier")


def spin_times(rendezvous, cpus):
    os.sched_setaffinity(0, {cpus[rendezvous.rank]})
    with mock.patch.object(membership, "RankMemory", wraps=shared_memory.RankMemory) as made:
        member(rendezvous).close()
    return [call.args[6] for call in made.call_args_list]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this system gives the tests one CPU")
def test_ranks_spin_only_if_each_has_a_cpu():
    """Ranks that are bound to a CPU each spin while they wait. Two ranks that share a CPU do not."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert ranks(2, spin_times, (first, second)) == [[shared_memory.SPIN_S]] * 2
    assert ranks(2, spin_times, (first, first)) == [[0.0]] * 2
