"""Collectives over several hosts, which CROSSREDUCE_HOST simulates on this machine."""

import os
import re
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
from host_checks import CASES, check_cases, check_rows, draw_parts, joined, on
from members import Resources, Warnings, every_call, memories, memory, starter, summed
from ranks import Died, ranks

from crossreduce.errors import CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.failures import watchdog
from crossreduce.ranks.inter_host.exchange import Exchange
from crossreduce.ranks.inter_host.two_level import host_names
from crossreduce.topology import Topology


def table(rendezvous, in_python=False):
    """Check all cases, and return the hosts."""
    comm = joined(rendezvous, in_python=in_python)
    check_cases(comm, CASES)
    # On links of different speeds, hosts forward the data of others, and several arrays share a connection.
    count = len(comm.hosts)
    speeds = [[0 if a == b else 1 if {a, b} == {0, 2} else 5 for b in range(count)] for a in range(count)]
    if count > 1:
        comm.plan_on(Topology.from_matrix(speeds, host_names(count), latency_s=1e-4))
    for op, dtype, size in (("sum", "float32", 40_001), ("mean", "bfloat16", 3)):
        check_rows(comm, ReduceOp(op), dtype, size)
    comm.barrier()
    for is_watched in (count > 1, False):  # before and after the group is closed
        assert ("crossreduce watchdog" in {thread.name for thread in threading.enumerate()}) == is_watched
        comm.close()
    return comm.hosts


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aaa", ((0, 1, 2),)),
        ("abab", ((0, 2), (1, 3))),
        ("abbcc", ((0,), (1, 2), (3, 4))),
        pytest.param("aaaaaaaaa", (tuple(range(9)),), marks=pytest.mark.slow),
        pytest.param("aaabbbbb", ((0, 1, 2), (3, 4, 5, 6, 7)), marks=pytest.mark.slow),
    ],
)
def test_every_collective(names, hosts):
    """Every collective, with any op, dtype and size, in place or not, is correct on ``hosts``, the ranks of each."""
    draw_parts(len(names), CASES)
    assert set(ranks(len(names), table, environment=on(*names))) == {hosts}


def test_every_collective_in_python():
    """Over a transport without a compiled object, the exchanges run in Python, with the same results."""
    draw_parts(4, CASES)
    assert set(ranks(4, table, True, environment=on(*"abab"))) == {((0, 2), (1, 3))}


def disagreeing(rendezvous, in_python):
    """Make calls that differ between ranks. Return the texts of the errors, and the result of a correct call."""
    comm = joined(rendezvous, in_python=in_python)
    me, texts = comm.rank, []
    x = np.arange(50_000, dtype="float32") + me
    out, rows = np.full_like(x, 7), np.full((5, *x.shape), 7, "float32")

    def reduce(op=ReduceOp.SUM, size=50_000):
        return comm.all_reduce(op, memory(x[:size]), memory(out[:size]))

    calls = [
        # The calls differ in the op (twice: also within a host), the size, the collective, a text, or the collective.
        lambda: reduce(ReduceOp.SUM if me < 2 else ReduceOp.MAX),
        lambda: reduce(ReduceOp.MAX if me == 1 else ReduceOp.SUM),
        lambda: reduce(size=10_000 + me),
        lambda: comm.barrier() if me == 4 else reduce(),
        lambda: comm.require_same(f"inner op {me // 3}"),
        lambda: comm.barrier() if me == 0 else comm.all_gather(memory(x), memories(rows)),
    ]
    for call in calls:
        with pytest.raises(MismatchError) as error:
            call()
        texts.append(str(error.value))
        assert (out == 7).all()
        assert (rows == 7).all()
    reduce()
    comm.close()
    return texts, out


@pytest.mark.parametrize("in_python", [False, True])
def test_ranks_whose_calls_differ_raise_the_same_error_before_anything_is_written(in_python):
    """If calls differ, within a host or between hosts, all ranks raise the same error, which names the ranks that
    differ. Nothing is written, and the group can still be used."""
    found = ranks(5, disagreeing, in_python, environment=on(*"aaabb"))
    texts = found[0][0]
    named = ["ranks 2-4", "ranks 0, 1"], ["rank 1 "], ["float32[10000]", "float32[10004]"], ["rank 4 "]
    for text, words in zip(texts, [*named, ["inner op 0", "inner op 1"], ["rank 0"]], strict=True):
        assert all(word in text for word in words), text
    for each, out in found:
        assert each == texts
        assert (out == 5 * np.arange(50_000, dtype="float32") + 10).all()


def until_lost(rendezvous, victim, how, timeout_s, raised):
    """Reduce repeatedly until rank ``victim`` kills or stops itself. Return the class of the error and its ranks."""
    comm = joined(rendezvous, timeout_s)
    x, out = np.ones(1_000_000, "float32"), np.empty(1_000_000, "float32")
    try:
        for number in range(200):
            if comm.rank == victim and number == 5:
                os.kill(os.getpid(), how)
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
    except (PeerLostError, CollectiveTimeout) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            comm.barrier()
        # No rank leaves before all have raised: if a process ends, ranks that wait for it raise at once.
        raised.ready()
        rendezvous.query("put", [("raised", comm.rank)], b"")
        others = [("raised", rank) for rank in range(comm.size) if rank != victim]
        assert all(value is not None for value in rendezvous.query("get", others, timeout=10.0)), "some wait too long"
        return type(error), error.ranks
    finally:
        comm.transport.abort()


@pytest.mark.parametrize(
    ("names", "victim"),
    [("aaabb", 2), *(pytest.param(*case, marks=pytest.mark.system) for case in (("aabb", 3), ("abb", 0)))],
)
@pytest.mark.parametrize(
    ("how", "timeout_s", "kind"),
    [(signal.SIGKILL, 200.0, PeerLostError), (signal.SIGSTOP, 1.5, CollectiveTimeout)],
    ids=["dies", "stops"],
)
def test_a_lost_rank_is_named_on_all_hosts(names, victim, how, timeout_s, kind):
    """If a leader, another rank, or the only rank of a host dies, all other ranks soon raise errors that name it. If it
    hangs, they do so after the timeout."""
    with starter(len(names) - 1) as raised:

        def end(pids):
            raised.wait()
            os.kill(pids[victim], signal.SIGKILL)

        given = victim, how, timeout_s, raised
        found = ranks(len(names), until_lost, *given, environment=on(*names), check=False, begun=end)
    assert isinstance(found.pop(victim), Died)
    assert set(found) == {(kind, (victim,))}


def last_sum(comm):
    """Make a last call, and leave the group."""
    summed(comm, 10)
    comm.close()


def waiting(rendezvous):
    """Delay rank 2. Return the warnings of this rank."""
    comm = joined(rendezvous)
    comm.detector.warn_s = 0.6
    warned = Warnings()
    if comm.rank == 2:
        time.sleep(1.5)
    last_sum(comm)
    return warned.texts


def test_a_late_host_is_not_blamed_on_the_rank_that_waits_for_it():
    """If a leader waits for another host, it warns of a rank of that host. A rank of the leader's host, which waits for
    the leader, warns of the other host, too, and not of the leader."""
    (of_leader,), (of_other,), _ = ranks(3, waiting, environment=on(*"aab"))
    assert "s for another host in op 1, all_reduce sum int64[10]" in of_other
    assert "rank 0 exchanges messages with other hosts and waits for them" in of_other
    assert of_leader.startswith("rank 0: waited ")
    assert " s for another host in op 1, all_reduce sum int64[10]" in of_leader
    assert "waits for them: for rank 2, which may itself wait for other ranks of its host" in of_leader


def next_op(rendezvous):
    """Make the leaders' last messages of op 1 take longer than the timeout. Return the result of op 1."""
    comm = joined(rendezvous, 1.0, in_python=True)
    close = Exchange.close

    def slow(exchange):
        if comm.memory.number == 1:
            time.sleep(1.7)
        close(exchange)

    x = np.full(3, 2.0**comm.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "close", slow)
        comm.reduce(ReduceOp.SUM, memory(x), memory(x) if comm.rank == 0 else None, 0)
        if comm.rank < 2:
            time.sleep(0.4)  # a leader takes some time from the end of op 1 to op 2
        last_sum(comm)
    return x[0]


def test_a_rank_that_is_an_op_ahead_does_not_blame_its_leader():
    """A rank that waits in op 2 for its leader, which still exchanges messages of op 1, does not time out before the
    leader, since only the leader can name a rank at fault. Here the messages are late, and then both ops succeed."""
    assert ranks(3, next_op, environment=on(*"abb")) == [7, 2, 4]


def interrupted_close(rendezvous):
    """Close while Ctrl-C ends the wait for the watchdog thread. Return the remaining memory files and mappings."""
    before = Resources()
    comm = joined(rendezvous)
    comm.barrier()
    watchdog._WATCHDOG._thread.join = mock.Mock(side_effect=KeyboardInterrupt("for the test"))
    with pytest.raises(KeyboardInterrupt, match="for the test"):
        comm.close()
    after = Resources()
    return [link for link in after.files if "memfd" in link], after.mappings - before.mappings


def test_a_close_that_is_interrupted_has_left_the_group():
    """If Ctrl-C interrupts ``close``, the memory, and the lock that shows that this rank is alive, are released."""
    assert ranks(2, interrupted_close, environment=on(*"ab")) == [([], 0)] * 2


def counted(rendezvous):
    """Return the bytes that this rank sends in each collective, digests of calls not included."""
    comm, sent, counts = joined(rendezvous, in_python=True), [], {}
    comm.barrier()
    send = comm.transport.send
    comm.transport.send = lambda address, nbytes, dst, tag: (sent.append(nbytes), send(address, nbytes, dst, tag))[1]
    for name, call in every_call(comm, 100_000).items():
        sent.clear()
        call()
        counts[name] = sum(size for size in sent if size > 16)  # smaller messages are digests
    comm.close()
    return counts


def test_each_byte_crosses_a_link_once():
    """The transport carries one partial result per host, and not one per rank, and each array once."""
    # In arrays, for two hosts of two ranks: each host sends its partial result of an all-reduce once, those of the
    # other's two arrays of a reduce-scatter, its own two arrays of an all-gather, and four of an all-to-all.
    due = {"all_reduce": 2, "reduce": 1, "broadcast": 1, "all_gather": 4, "reduce_scatter": 4, "all_to_all": 8}
    due |= {"gather": 2, "scatter": 2, "barrier": 0}
    found = ranks(4, counted, environment=on(*"aabb"))
    assert {name: sum(one[name] for one in found) / 400_000 for name in found[0]} == due


def interrupted_twice(rendezvous):
    comm = joined(rendezvous, in_python=True)
    x, interrupt = np.ones(1 << 20, "float32"), KeyboardInterrupt("by the test")
    if comm.rank == 0:
        # The first Ctrl-C comes while the last messages are sent, the second while the abort is published.
        with (
            mock.patch.object(Exchange, "close", side_effect=interrupt),
            mock.patch.object(comm.rendezvous, "publish_abort", side_effect=interrupt),
            pytest.raises(KeyboardInterrupt, match="by the test"),
        ):
            comm.broadcast(memory(x), 0)
        with pytest.raises((PeerLostError, ConnectionError), match="rank 0 was interrupted"):
            comm.broadcast(memory(x), 0)
    else:
        with pytest.raises(PeerLostError, match="rank 0 was interrupted"):
            comm.broadcast(memory(x), 0), comm.broadcast(memory(x), 0)
    comm.close()


def test_an_op_that_two_interrupts_ended_is_not_followed_by_another():
    """If one Ctrl-C interrupts the end of an op, and another one the abort of the group, the next call aborts the
    group: the memory of messages that are still being sent must not be used again."""
    ranks(2, interrupted_twice, environment=on("a", "b"))
