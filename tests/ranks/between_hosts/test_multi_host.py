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
from members import Resources, Warnings, every_call, memories, memory, starter
from ranks import Died, ranks

from crossreduce.errors import CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.observe import periodic_checks
from crossreduce.ops import ReduceOp
from crossreduce.ranks.failures import watchdog
from crossreduce.ranks.inter_host.exchange import Exchange
from crossreduce.ranks.inter_host.two_level import host_names
from crossreduce.topology import Topology


def table(rendezvous):
    """Check all cases, and return the hosts, and the bits of the all-reduces."""
    comm = joined(rendezvous)
    bits = check_cases(comm, CASES)
    hosts = comm.hosts
    # On links of different speeds, hosts forward what others send, and messages of several parts share a connection.
    count = len(hosts)
    speeds = [[0 if a == b else 1 if {a, b} == {0, 2} else 5 for b in range(count)] for a in range(count)]
    if count > 1:
        comm.plan_on(Topology.from_matrix(speeds, host_names(count), latency_s=1e-4))
    for op, dtype, size in (("sum", "float32", 40_001), ("mean", "bfloat16", 3)):
        check_rows(comm, ReduceOp(op), dtype, size)
    comm.barrier()
    watched = "crossreduce watchdog" in {thread.name for thread in threading.enumerate()}
    assert watched == (len(hosts) > 1)
    comm.close()
    assert "crossreduce watchdog" not in {thread.name for thread in threading.enumerate()}
    return hosts, bits


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
    """Every collective, with any op, dtype and size, in place or not, is correct; all ranks have the same bits."""
    draw_parts(len(names), CASES)
    found = ranks(len(names), table, environment=on(*names), timeout_s=90)
    assert {one for one, _ in found} == {hosts}
    assert len({bits for _, bits in found}) == 1


def disagreeing(rendezvous):
    """Make calls that differ between ranks; return the texts of the errors, and the result of a correct call."""
    comm = joined(rendezvous)
    me, texts = comm.rank, []
    x = np.arange(50_000, dtype="float32") + me
    out, rows = np.full_like(x, 7), np.full((5, *x.shape), 7, "float32")
    calls = [
        # The calls differ in the op (twice: also within a host), the size, the collective, or the text of ``agree``.
        lambda: comm.all_reduce(ReduceOp.SUM if me < 2 else ReduceOp.MAX, memory(x), memory(out)),
        lambda: comm.all_reduce(ReduceOp.MAX if me == 1 else ReduceOp.SUM, memory(x), memory(out)),
        lambda: comm.all_reduce(ReduceOp.SUM, memory(x[: 10_000 + me]), memory(out[: 10_000 + me])),
        lambda: comm.barrier() if me == 4 else comm.all_reduce(ReduceOp.SUM, memory(x), memory(out)),
        lambda: comm.require_same(f"inner op {me // 3}"),
        lambda: comm.barrier() if me == 0 else comm.all_gather(memory(x), memories(rows)),
    ]
    for call in calls:
        with pytest.raises(MismatchError) as error:
            call()
        texts.append(str(error.value))
        assert (out == 7).all()
        assert (rows == 7).all()
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
    comm.close()
    return texts, out


def test_ranks_whose_calls_differ_raise_the_same_error_before_anything_is_written():
    """If calls differ, within a host or between hosts, all ranks raise the same error, which names the ranks that
    differ; the group can still be used."""
    found = ranks(5, disagreeing, environment=on(*"aaabb"))
    texts = found[0][0]
    assert all(each == texts for each, _ in found)
    assert "ranks 2-4" in texts[0]
    assert "ranks 0, 1" in texts[0]
    assert "rank 1 " in texts[1]
    assert "float32[10000]" in texts[2]
    assert "float32[10004]" in texts[2]
    assert "rank 4 " in texts[3]
    assert "inner op 0" in texts[4]
    assert "inner op 1" in texts[4]
    for _, out in found:
        assert (out == 5 * np.arange(50_000, dtype="float32") + 10).all()


def until_lost(rendezvous, victim, how, timeout_s, raised):
    """Reduce repeatedly until one rank kills or stops itself. Return the error."""
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


SYSTEM = [pytest.param(*case, marks=pytest.mark.system) for case in (("aabb", 3), ("abb", 0))]


@pytest.mark.parametrize(("names", "victim"), [("aaabb", 2), *SYSTEM])
@pytest.mark.parametrize(
    ("how", "timeout_s", "kind"),
    [(signal.SIGKILL, 20.0, PeerLostError), (signal.SIGSTOP, 1.5, CollectiveTimeout)],
    ids=["dies", "stops"],
)
def test_a_lost_rank_is_named_on_all_hosts(names, victim, how, timeout_s, kind):
    """If a leader, another rank, or the only rank of a host dies, all other ranks soon name it in their errors; if it
    hangs, after the timeout."""
    with starter(len(names) - 1) as raised:

        def end(pids):
            raised.wait()
            os.kill(pids[victim], signal.SIGKILL)

        found = ranks(
            len(names), until_lost, victim, how, timeout_s, raised, environment=on(*names), check=False, begun=end
        )
    assert isinstance(found.pop(victim), Died)
    assert set(found) == {(kind, (victim,))}


def last_sum(comm):
    """Sum 10 numbers of each rank, leave the group, and return the result."""
    x = np.arange(10.0) * 4**comm.rank
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    comm.close()
    return x


def waiting(rendezvous):
    """Delay rank 2; return the warnings of this rank, and the sum."""
    comm = joined(rendezvous)
    comm.detector.warn_s = 0.6
    warned = Warnings()
    if comm.rank == 2:
        time.sleep(1.5)
    return warned.texts, last_sum(comm)


def test_a_late_host_is_not_blamed_on_the_rank_that_waits_for_it():
    """A rank that waits for a leader, which waits for another host, warns of the other host and not of the leader."""
    (first, x), (second, y), (_, z) = ranks(3, waiting, environment=on(*"aab"))
    (warning,) = second
    assert "s for another host in op 1, all_reduce sum float64[10]" in warning
    assert "rank 0 exchanges messages with other hosts and waits for them" in warning
    (itself,) = first
    assert itself.startswith("rank 0: waited ")
    assert " s for another host in op 1, all_reduce sum float64[10]" in itself
    assert "waits for them: for rank 2, which may itself wait for other ranks of its host" in itself
    assert all((one == 21 * np.arange(10.0)).all() for one in (x, y, z))


def next_op(rendezvous):
    """Let the leaders' last messages of op 1 take longer than the timeout; return the results of ops 1 and 2."""
    comm = joined(rendezvous, 1.0)
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
        return x[0], last_sum(comm)[1]


def test_a_rank_that_is_an_op_ahead_does_not_blame_its_leader():
    """A rank whose part of an op is done waits in the next op for its leader, which still exchanges messages, and
    leaves it to the leader to name the rank at fault."""
    assert ranks(3, next_op, environment=on(*"abb")) == [(7, 21), (2, 21), (4, 21)]


def without_a_thread(rendezvous):
    """Let the start of rank 0's watchdog thread fail; return the warnings, and the sum."""
    warned = Warnings()

    def refused(_):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        if rendezvous.rank == 0:
            patch.setattr(periodic_checks, "start_thread", refused)
        comm = joined(rendezvous, 5.0)
    return warned.texts, last_sum(comm)


def test_a_group_works_without_a_watchdog():
    """A rank that cannot start its watchdog thread logs that it will not warn, and takes part in collectives."""
    (first, x), (second, y) = ranks(2, without_a_thread, environment=on(*"ab"))
    assert first == ["this rank will not warn if another host is late: can't start new thread"]
    assert second == []
    assert all((one == 5 * np.arange(10.0)).all() for one in (x, y))


def interrupted_close(rendezvous):
    """Close while Ctrl-C ends the wait for the watchdog thread; return the remaining resources."""
    before = Resources()
    comm = joined(rendezvous)
    comm.barrier()

    def interrupted(_):
        raise KeyboardInterrupt("for the test")

    watchdog._WATCHDOG._thread.join = interrupted
    with pytest.raises(KeyboardInterrupt, match="for the test"):
        comm.close()
    after = Resources()
    return [link for link in after.files if "memfd" in link], after.mappings - before.mappings


def test_a_close_that_is_interrupted_has_left_the_group():
    """If Ctrl-C interrupts ``close``, the memory, and the lock that shows that this rank is alive, are released."""
    assert ranks(2, interrupted_close, environment=on(*"ab")) == [([], 0)] * 2


def counted(rendezvous):
    """Return the bytes that this rank sends in each collective, digests of calls not included."""
    comm, sent, counts = joined(rendezvous), [], {}
    comm.barrier()
    send = comm.transport.send
    comm.transport.send = lambda address, nbytes, dst, tag: (sent.append(nbytes), send(address, nbytes, dst, tag))[1]
    for name, call in every_call(comm, 100_000).items():
        sent.clear()
        call()
        counts[name] = sum(size for size in sent if size > 16)
    comm.close()
    return counts


def test_each_byte_crosses_a_link_once():
    """The transport carries partial results of a host, not of its ranks, and each array once."""
    # In arrays, for two hosts of two ranks: each host sends its partial result of an all-reduce once, those of the
    # other's two arrays of a reduce-scatter, its own two arrays of an all-gather, and four of an all-to-all.
    due = {"all_reduce": 2, "reduce": 1, "broadcast": 1, "all_gather": 4, "reduce_scatter": 4, "all_to_all": 8}
    due |= {"gather": 2, "scatter": 2, "barrier": 0}
    found = ranks(4, counted, environment=on(*"aabb"))
    assert {name: sum(one[name] for one in found) / 400_000 for name in found[0]} == due


def interrupted_twice(rendezvous):
    comm = joined(rendezvous)
    x = np.ones(1 << 20, "float32")
    if comm.rank == 0:

        def interrupt(*_):
            raise KeyboardInterrupt("by the test")

        # The first Ctrl-C comes while the last messages are sent, the second while the abort is published.
        with (
            mock.patch.object(Exchange, "close", interrupt),
            mock.patch.object(comm.rendezvous, "publish_abort", interrupt),
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
    """If Ctrl-C ends the end of an op, and another one its abort, the next call aborts the group: memory of messages
    that are still being sent must not be used again."""
    ranks(2, interrupted_twice, environment=on("a", "b"))
