"""Calls between hosts that compiled code executes: messages, rounds and stages, late hosts, and differing calls."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from host_checks import joined, on
from members import array_group, memory
from ranks import ranks

from crossreduce.errors import MismatchError
from crossreduce.ops import ReduceOp, copy_numbers
from crossreduce.ranks.call_runner import CallRunner
from crossreduce.ranks.failures.watchdog import WatchedTransport
from crossreduce.ranks.inter_host import compiled_calls
from crossreduce.ranks.inter_host.multi_host import MultiHostEngine
from crossreduce.ranks.intra_host.instructions import HostCheck, HostMessages, reduction_numbers

HOSTS = ((0, 1), (2, 3))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("nbytes", "leaders", "rounds"), [(64, 1, 1), (1024, 1, 1), (160 << 10, 2, 2)])
def test_a_small_call_takes_one_message_per_host(collective, nbytes, leaders, rounds, monkeypatch):
    """A call of at most 1 KiB takes three stages, in which one rank of a host sends one message. Larger ones take one
    more round of messages, in which all leaders take part."""
    monkeypatch.setattr(compiled_calls, "native_program", lambda stages, *_: stages)
    reduces = collective in ("all_reduce", "reduce_scatter")
    numbers = reduction_numbers(ReduceOp.SUM, "float32", 4) if reduces else copy_numbers("float32")
    root = 0 if collective == "broadcast" else None
    for rank, host in ((0, 0), (1, 0), (3, 1)):
        shared = SimpleNamespace(host=HOSTS[host])
        engine = MultiHostEngine(HOSTS, rank, shared, None, watch=lambda pending, _: pending)
        made = engine.compile(collective, nbytes // 4, numbers, root, b"call")
        stages = made.program
        assert (len(stages), made.stages) == (3, 3)
        messages = [each for each in stages[1] if isinstance(each, HostMessages)]
        assert [each for stage in (stages[0], stages[2]) for each in stage if isinstance(each, HostMessages)] == []
        assert isinstance(stages[2][0], HostCheck)
        leads = rank % 2 < leaders
        assert made.compares == leads
        assert len(messages) == (rounds if leads else 0)
        for first in messages[:1]:
            assert first.compared == (rank ^ 2,)
            assert bool(first.sends or first.receives) == (rounds == 1)


def counted(rendezvous):
    """Make each call three times. Return which calls and messages ran in Python after the first time."""
    comm = joined(rendezvous)
    group, counts = array_group(comm), []
    x = np.arange(64, dtype="float32") + comm.rank
    calls = [
        lambda: group.all_reduce(x),
        lambda: group.broadcast(x.copy(), 1),
        lambda: group.all_gather(x),
        lambda: group.reduce_scatter(np.stack([x] * 4)),
        lambda: group.all_to_all(np.stack([x] * 4)),
    ]
    for call in calls:
        call()
    for method, owner in (("run", CallRunner), ("send", WatchedTransport), ("receive", WatchedTransport)):
        original = getattr(owner, method)

        def counting(*args, method=method, original=original):
            counts.append(method)
            return original(*args)

        setattr(owner, method, counting)  # in this process, which ends after this function
    for call in calls * 2:
        call()
    assert np.array_equal(group.all_reduce(x), 4 * np.arange(64, dtype="float32") + 6)
    comm.close()
    return counts


def test_repeated_calls_do_not_run_in_python():
    """A collective that was called before runs in compiled code, with all its messages."""
    assert ranks(4, counted, environment=on(*"aabb")) == [[]] * 4


def late(rendezvous):
    """Let one host, and then the other, begin a call late. Return the sums."""
    comm = joined(rendezvous)
    sums = []
    for turn, size in enumerate((10, 10, 100_000, 10)):
        x = np.full(size, comm.rank + 1.0)
        if comm.rank == turn:
            time.sleep(0.3)  # longer than compiled code waits at a time
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
        sums.append({*x})
    comm.close()
    return sums


def test_a_rank_that_waits_for_a_late_host_reaches_each_barrier_once():
    """Ranks that wait for messages longer than compiled code waits at a time continue where they were."""
    assert ranks(4, late, environment=on(*"aabb")) == [[{10.0}] * 4] * 4


def differing(rendezvous):
    """Make calls of different sizes, for which different numbers of ranks exchange messages. Return what is raised."""
    comm = joined(rendezvous)
    errors = []
    for sizes in ((4, 8), (4, 30_000), (4, 3_000_000), (30_000, 3_000_000), (4, 4)):
        x = np.ones(sizes[comm.rank // 2])
        try:
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
            errors.append({*x})
        except MismatchError as error:
            errors.append(len(set(error.calls)) if {*x} == {1.0} else "written")
    within = np.ones(3 + (comm.rank == 0))  # the ranks of one host differ
    with pytest.raises(MismatchError, match="shape"):
        comm.all_reduce(ReduceOp.SUM, memory(within), memory(within))
    comm.barrier()
    comm.close()
    return errors


def test_small_and_large_calls_that_differ_are_named():
    """A rank that exchanges nothing in its own call still answers the ranks of other hosts that make another call."""
    assert ranks(4, differing, environment=on(*"aabb")) == [[2, 2, 2, 2, {4.0}]] * 4
