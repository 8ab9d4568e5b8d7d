"""Prepared calls: a call that repeats an earlier one runs in native code, with the same results and errors."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from array_checks import check
from members import array_group, member
from ranks import Died, ranks

from crossreduce.errors import ContextError, MismatchError, PeerLostError
from crossreduce.ranks import prepared
from crossreduce.ranks.inter_host import one_host
from crossreduce.ranks.intra_host import shared_memory


class Counted:
    """Wraps the native table of prepared calls, and counts the calls that it executes."""

    def __init__(self, calls):
        self.calls, self.hits, self.add = calls, 0, calls.add

    def run(self, *arguments):
        found = self.calls.run(*arguments)
        self.hits += found is not None
        return found


def group_of(rendezvous):
    """Return a group for NumPy arrays, and the counter of its prepared calls."""
    group = array_group(member(rendezvous))
    assert group._calls is not prepared.NO_CALLS
    group._calls = Counted(group._calls)
    return group, group._calls


def prepared_group(rendezvous, size, calls=2):
    """Return a group, and an array whose all-reduce was called ``calls`` times, the first time in Python."""
    group, counter = group_of(rendezvous)
    x = np.ones(size, np.float32)
    for _ in range(calls):
        group.all_reduce(x)
    assert counter.hits == calls - 1
    return group, x


def every_collective(rendezvous):
    """Make each call three times. Only the first one runs in Python."""
    group, counter = group_of(rendezvous)
    rows = ("float32", ()), (ml_dtypes.bfloat16, (0,)), ("int64", (3, 5)), ("bool", (40_001,)), ("float32", (40_001,))
    for dtype, row in rows:
        for turn in range(3):
            before = counter.hits
            check(group, row, dtype)
            prepared_calls = 3 * (2 if dtype == "bool" else 3) + 5  # three of each reduction
            assert turn == 0 or counter.hits - before == prepared_calls, (dtype, row, turn)
    group.close()


def every_collective_without_reading_peers(rendezvous):
    can_read_all = mock.Mock(return_value=rendezvous.rank != 1)
    reading = mock.patch.object(shared_memory.RankMemory, "can_read_all", can_read_all)
    with reading, mock.patch.object(one_host, "peer_stages", None):
        every_collective(rendezvous)
    can_read_all.assert_called_once()


def test_every_prepared_collective_gives_the_result_of_the_first_call():
    """Every collective gives NumPy's results, and runs in native code from the second call on. If one of two ranks may
    not read the memory of the other's process, both use the shared memory."""
    for n in (1, 2, 3):
        ranks(n, every_collective)
    ranks(2, every_collective_without_reading_peers)


def calls_in_python(rendezvous):
    group, counter = group_of(rendezvous)
    n, x = group.size, np.ones((4, 6), np.float32)
    for _ in range(2):
        group.all_reduce(x)
    hits = counter.hits
    for given in (np.asfortranarray(x), x.astype(">f4"), x.tolist()) * 2:  # other layout, other byte order, a list
        assert (group.all_reduce(given) == n).all()
    for _ in range(2):
        both = np.ones((8, 6), np.float32)
        group.all_reduce(both[:4], out=both[2:6])  # the result overlaps the input
        assert both[:, 0].tolist() == [1, 1, n, n, n, n, 1, 1]
    assert counter.hits == hits
    for bad in (np.empty((6, 4), np.float32), np.empty((4, 6)), [1.0], x[:, :5]):
        with pytest.raises(ValueError, match="out must be"):
            group.all_reduce(x, out=bad)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        group.all_reduce(x, out=frozen)
    with pytest.raises(ValueError, match="not a known reduction"):
        group.all_reduce(x, "sums")
    for _ in range(2):
        mean = group.all_reduce(np.arange(3) + group.rank, "mean")
        assert mean.tolist() == [k + (n - 1) / 2 for k in range(3)]
    group.close()


def test_a_call_that_differs_from_the_prepared_one_takes_the_path_in_python():
    """Calls with other layouts, byte orders, overlaps, results or invalid arguments, and means of integers, do so."""
    ranks(2, calls_in_python)


def mismatches(rendezvous):
    group, x = prepared_group(rendezvous, 5)
    y = np.ones(5 + group.rank, np.float32)
    group.all_reduce(np.ones(6, np.float32))
    for _ in range(3):
        out = np.full_like(y, -1)
        with pytest.raises(MismatchError, match=r"float32\[6\].*float32\[5\]"):
            group.all_reduce(y, out=out)
        assert (out == -1).all(), "a result was written"
        root = np.full(5, group.rank, np.float32)
        with pytest.raises(MismatchError, match="broadcast"):
            group.broadcast(root, 0, out=root) if group.rank else group.all_reduce(root, out=root)
        assert (root == group.rank).all()
        assert (group.all_reduce(x) == 2).all()
    group.close()


def test_prepared_calls_that_differ_between_ranks_write_nothing():
    """If the prepared calls of ranks differ, all raise a MismatchError, write nothing, and can still use the group."""
    ranks(2, mismatches)


def lost(rendezvous):
    group, x = prepared_group(rendezvous, 1000, calls=3)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1") as error:
            group.all_reduce(x)
        assert error.value.ranks == (1,)
    return str(error.value)


def test_a_rank_that_dies_during_prepared_calls_is_named():
    """The other ranks raise a PeerLostError that names the rank, in the prepared call and in every later call."""
    first, died, third = ranks(3, lost, check=False)
    assert (type(died), first) == (Died, third)


def killed_after_its_part(rendezvous):
    """Stop rank 0 while it reads, kill rank 1, which has read, at the last barrier, and then let rank 0 continue."""
    group, _ = group_of(rendezvous)
    big = np.ones((2, 1 << 24), np.float32)
    pids = group.communicator.peers
    group.all_reduce(np.ones(1, np.float32))
    if group.rank == 1:
        threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if os.fork() == 0:  # continues rank 0 after this rank's end
            time.sleep(1.3)
            os.kill(pids[0].pid, signal.SIGCONT)
            os._exit(0)
    else:
        threading.Timer(0.004, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        result = group.reduce_scatter(big)
    except PeerLostError as error:
        return error.ranks
    return bool((result == 2).all())


def test_a_rank_that_dies_while_its_memory_is_read():
    """The other rank either returns the right result, or raises a PeerLostError that names the rank."""
    first, died = ranks(2, killed_after_its_part, check=False)
    assert isinstance(died, Died)
    assert first in (True, (1,))


def interrupted(rendezvous, delay_s):
    group, x = prepared_group(rendezvous, 64)
    if group.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            group.all_reduce(x)
        assert "rank 0 was interrupted" in str(group.communicator.memory.abort_cause())
    while group.communicator.failure is None:
        time.sleep(0.01)
    with pytest.raises(PeerLostError, match="rank 0 was interrupted"):
        group.all_reduce(x)


def test_ctrl_c_ends_the_wait_in_a_prepared_call():
    """Ctrl-C ends a prepared call that waits in native code, and aborts the group on all ranks."""
    for delay_s in (0.02, 0.3):  # before and after the first time that the wait returns to Python
        ranks(3, interrupted, delay_s)


def handled(rendezvous):
    group, x = prepared_group(rendezvous, 64)
    errors = []

    def handler(*_):
        if errors:
            group.close()
        else:
            with pytest.raises(ContextError, match="already in a call") as error:
                group.all_reduce(x)
            errors.append(error)
        rendezvous.query("put", [f"handled {number}"], True)

    signal.signal(signal.SIGALRM, handler)
    for number in (1, 2):
        if group.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            assert rendezvous.query("get", [f"handled {number}"], timeout=100.0) == [True]
        if number == 1:
            assert (group.all_reduce(x) == 2).all()
        else:
            with pytest.raises(PeerLostError, match="rank 0 left"):
                group.all_reduce(x)


def test_signal_handlers_during_a_prepared_call():
    """A signal handler that calls the group gets a ContextError. A handler that closes the group ends the call."""
    ranks(2, handled)


def other_threads(rendezvous):
    group, x = prepared_group(rendezvous, 64)
    if group.rank == 0:  # a thread waits in native code, while the main thread makes the next call
        with ThreadPoolExecutor() as pool:
            pool.submit(group.all_reduce, x)
            time.sleep(0.1)
            result = group.all_reduce(x * 2)
    else:
        time.sleep(0.3)
        group.all_reduce(x)
        result = group.all_reduce(x * 2)
    assert (result == 4).all()
    child = os.fork()
    if not child:
        try:
            group.all_reduce(x)
        except ContextError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.close()
    with pytest.raises(ContextError, match="is closed"):
        group.all_reduce(x)


def test_prepared_calls_of_threads_forked_processes_and_closed_groups():
    """A call waits for the call of another thread. In a forked process or of a closed group it raises ContextError."""
    ranks(2, other_threads)
