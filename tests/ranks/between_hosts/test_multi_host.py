"""Collectives over several hosts, which CROSSREDUCE_HOST simulates on this machine."""

import os
import random
import signal
import threading
import time
from unittest import mock

import numpy as np
import oracle
import pytest
from members import Resources, Warnings, memories, memory
from ranks import Moment, SocketTransport, ranks

from crossreduce.errors import CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.failures import watchdog
from crossreduce.ranks.inter_host.exchange import Exchange
from crossreduce.ranks.inter_host.two_level import host_names
from crossreduce.topology import Topology


def on(*names):
    """Return the environment of each rank, with the name of its simulated host."""
    return [{"CROSSREDUCE_HOST": name} for name in names]


def joined(rendezvous, timeout_s=20.0):
    transport = SocketTransport(rendezvous)
    return Communicator(rendezvous, transport, name="world", timeout_s=timeout_s), transport


def parts(n, size, dtype, seed=0):
    """Return the arrays of all ranks: random floats, or integers made of powers of n + 1, whose sums
    show lost and doubled contributions."""
    draw = np.random.default_rng(seed + size)
    if dtype.startswith("int"):
        return [((n + 1) ** k * draw.integers(1, 2, size) + np.arange(size) % 3).astype(dtype) for k in range(n)]
    if dtype.startswith("complex"):
        return [(draw.standard_normal(size) + 1j * draw.standard_normal(size)).astype(dtype) for _ in range(n)]
    return [draw.standard_normal(size).astype(oracle.dtype_of(dtype)) for _ in range(n)]


CASES = [
    ("sum", "float32", 1),
    ("sum", "float32", 1000),
    ("sum", "int64", 100_003),
    ("mean", "float32", 300_001),
    ("sum", "bfloat16", 70_001),
    ("mean", "float16", 513),
    ("max", "bfloat16", 1025),
    ("product", "float64", 77),
    ("min", "int8", 4099),
    ("mean", "int8", 4099),
    ("mean", "int64", 70_003),
    ("sum", "complex64", 999),
    ("sum", "float32", 0),
]


def table(rendezvous):
    """Run all cases, and return the results of this rank by case and collective."""
    comm, transport = joined(rendezvous)
    got = {}
    n, me = comm.size, comm.rank
    for op, dtype, size in CASES:
        given = parts(n, size, dtype)[me]
        before = given.tobytes()
        out = np.full_like(given, 7)
        comm.all_reduce(ReduceOp(op), memory(given), memory(out))
        assert given.tobytes() == before
        got["all_reduce", op, dtype, size] = out.copy()
        again = given.copy()
        comm.all_reduce(ReduceOp(op), memory(again), memory(again))
        got["in place", op, dtype, size] = again
        for root in (0, n - 1):
            out = np.full_like(given, 7)
            comm.reduce(ReduceOp(op), memory(given), memory(out) if me == root else None, root)
            got[f"reduce {root}", op, dtype, size] = out
            assert given.tobytes() == before
            shared = given.copy()
            comm.broadcast(memory(shared), root)
            got[f"broadcast {root}", op, dtype, size] = shared
        check_rows(comm, ReduceOp(op), dtype, -(-size // n))
    hosts = comm.hosts
    # On links of different speeds, hosts forward what others send, and messages of several parts share a connection.
    speeds = [[0 if a == b else 1 if {a, b} == {0, 2} else 5 for b in range(len(hosts))] for a in range(len(hosts))]
    comm.plan_on(Topology.from_matrix(speeds, host_names(len(hosts)), latency_s=1e-4))
    for op, dtype, size in (("sum", "float32", 40_001), ("mean", "bfloat16", 3)):
        check_rows(comm, ReduceOp(op), dtype, size)
    comm.barrier()
    assert "crossreduce watchdog" in {thread.name for thread in threading.enumerate()}
    assert comm.supports(ReduceOp.SUM, "bfloat16")
    assert comm.supports(None, "complex64")
    assert not comm.supports(ReduceOp.MAX, "complex64")
    comm.close()
    transport.close()
    assert "crossreduce watchdog" not in {thread.name for thread in threading.enumerate()}
    return hosts, got


def check_rows(comm, op, dtype, size):
    """Compare the collectives with an array per rank, also in place, with NumPy. Row k of rank i is ``every[i][k]``."""
    n, me = comm.size, comm.rank
    every = list(zip(*(parts(n, size, dtype, 100 + k) for k in range(n)), strict=True))
    own = every[me][me]

    def filled(count=n):
        return [np.full_like(own, 7) for _ in range(count)]

    def same(found, due):
        assert [x.tobytes() for x in found] == [x.tobytes() for x in due], (op, dtype, size)

    for in_place in (False, True):
        given, got = [x.copy() for x in every[me]], filled()
        if in_place:
            got[me] = given[me]
        comm.all_gather(memory(given[me]), memories(got))
        same(got, [every[k][k] for k in range(n)])
        (result,) = [given[me]] if in_place else filled(1)
        comm.reduce_scatter(op, memories(given), memory(result))
        close(result, [every[k][me] for k in range(n)], op.value, dtype)
        given = [x.copy() for x in every[me]]
        got = given if in_place else filled()
        comm.all_to_all(memories(given), memories(got))
        same(got, [every[k][me] for k in range(n)])
        for root in (0, n - 1):
            given = [x.copy() for x in every[me]]
            got = filled()
            if in_place:
                got[me] = given[me]
            comm.gather(memory(given[me]), memories(got) if me == root else None, root)
            same(
                [*got[:me], *got[me + 1 :]], [every[k][k] if me == root else filled(1)[0] for k in range(n) if k != me]
            )
            same(given, every[me])
            (result,) = [given[me]] if in_place else filled(1)
            comm.scatter(memories(given) if me == root else None, memory(result), root)
            same([result], [every[root][me]])


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("aaabbbbb", ((0, 1, 2), (3, 4, 5, 6, 7))),
        ("abab", ((0, 2), (1, 3))),
        ("abbcccc", ((0,), (1, 2), (3, 4, 5, 6))),
        ("ab", ((0,), (1,))),
    ],
)
def test_every_collective_over_hosts(names, hosts):
    """Every collective, with any op, dtype and size, in place or not, is correct; all ranks have the same bits."""
    found = ranks(len(names), table, environment=on(*names), timeout_s=90)
    n = len(names)
    assert {one for one, _ in found} == {hosts}
    for op, dtype, size in CASES:
        inputs = parts(n, size, dtype)
        for root in (None, 0, n - 1):
            names_of = ("all_reduce", "in place") if root is None else (f"reduce {root}",)
            destinations = range(n) if root is None else [root]
            for name in names_of:
                for rank in destinations:
                    result = found[rank][1][name, op, dtype, size]
                    assert (
                        result.tobytes() == found[destinations[0]][1]["all_reduce", op, dtype, size].tobytes()
                        or root is not None
                    )
                    close(result, inputs, op, dtype)
                for rank in set(range(n)) - set(destinations):
                    assert (found[rank][1][name, op, dtype, size] == 7).all()
            if root is not None:
                for rank in range(n):
                    assert found[rank][1][f"broadcast {root}", op, dtype, size].tobytes() == inputs[root].tobytes()


def close(result, inputs, op, dtype):
    """Compare with NumPy's reduction, for floats in higher precision: integers, minima and maxima exactly, others
    within n roundings."""
    wide = np.array(
        [
            x.astype(dtype if dtype.startswith("int") else "complex128" if "complex" in dtype else "float64")
            for x in inputs
        ]
    )
    due = {"sum": wide.sum, "mean": wide.mean, "max": wide.max, "min": wide.min, "product": wide.prod}[op](axis=0)
    if dtype.startswith("int") and op == "mean":  # of the wrapped sum, truncated towards zero
        due = np.trunc(wide.sum(axis=0, dtype=dtype) / len(inputs))
    if dtype.startswith("int") or op in ("min", "max"):
        assert (result == due.astype(result.dtype)).all()
        return
    n, u = len(inputs), oracle.ROUNDOFF[dtype]
    depth = 1 if dtype in oracle.HALVES else n
    size = np.abs(wide).prod(axis=0) if op == "product" else np.abs(wide).sum(axis=0) / (n if op == "mean" else 1)
    slack = depth * u / (1 - depth * u) * size * (1 + 1e-3) + n * 2.0**-24 * size + oracle.SMALLEST[dtype]
    assert (np.abs(result.astype(wide.dtype) - due) <= slack).all()


def disagreeing(rendezvous):
    """Make calls that differ between ranks; return the texts of the errors, and the result of a correct call."""
    comm, transport = joined(rendezvous)
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
    transport.close()
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


def until_lost(rendezvous, victim, how, at, timeout_s):
    """Reduce repeatedly until one rank kills or stops itself. Return the error, and how long it took to be raised."""
    comm, transport = joined(rendezvous, timeout_s)
    x, out = np.ones(1_000_000, "float32"), np.empty(1_000_000, "float32")
    began = Moment()
    try:
        for number in range(200):
            if comm.rank == victim and number == at:
                os.kill(os.getpid(), how)
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
            began = Moment()
    except (PeerLostError, CollectiveTimeout) as error:
        elapsed, took = time.monotonic() - began.time, Moment().seconds_since(began)
        again = None
        try:
            comm.barrier()
        except type(error) as second:
            again = str(second) == str(error)
        # No rank leaves before all have raised: if a process ends, ranks that wait for it raise at once.
        rendezvous.query("put", [("raised", comm.rank)], b"")
        others = [("raised", rank) for rank in range(comm.size) if rank != victim]
        assert all(value is not None for value in rendezvous.query("get", others, timeout=10.0)), "some wait too long"
        return type(error).__name__, list(error.ranks), elapsed, took, again
    finally:
        transport.abort()


@pytest.mark.parametrize(
    ("names", "victim"), [("aabb", 3), ("aabb", 2), ("abb", 0), ("aaabb", 2), ("aabbb", 4), ("aaabbbb", 6)]
)
def test_a_rank_that_dies_is_named_on_all_hosts(names, victim):
    """If a leader, another rank, or the only rank of a host dies, all other ranks soon name it in their errors."""
    found = ranks(len(names), until_lost, victim, signal.SIGKILL, 5, 20.0, environment=on(*names), check=False)
    for rank, result in enumerate(found):
        if rank != victim:
            kind, lost, _, took, again = result
            assert (kind, lost, again) == ("PeerLostError", [victim], True), result
            assert took < 3


@pytest.mark.parametrize(("names", "victim"), [("aabb", 3), ("aabb", 2), ("abb", 0)])
def test_a_rank_that_stops_is_named_on_all_hosts_after_the_timeout(names, victim):
    """A rank that hangs is named after the timeout, also by the ranks of other hosts."""
    found = ranks(
        len(names), until_lost, victim, signal.SIGSTOP, 5, 1.5,
        environment=on(*names), check=False, begun=lambda pids: ended(pids[victim], 5),
    )  # fmt: skip
    for rank, result in enumerate(found):
        if rank != victim:
            kind, late, elapsed, took, again = result
            assert (kind, late, again) == ("CollectiveTimeout", [victim], True), result
            assert elapsed > 1.4
            assert took < 3.5


def ended(pid, after_s):
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)


def last_sum(comm, transport):
    """Sum 10 numbers of each rank, leave the group, and return the result."""
    x = np.arange(10.0) * 4**comm.rank
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    comm.close()
    transport.close()
    return x


def waiting(rendezvous):
    """Delay rank 2; return the warnings of this rank, and the sum."""
    comm, transport = joined(rendezvous, 4.0)
    warned = Warnings()
    if comm.rank == 2:
        time.sleep(3)
    return warned.texts, last_sum(comm, transport)


def test_a_late_host_is_not_blamed_on_the_rank_that_waits_for_it():
    """A rank that waits for a leader, which waits for another host, warns of the other host and not of the leader."""
    (first, x), (second, y), (_, z) = ranks(3, waiting, environment=on(*"aab"))
    (warning,) = second
    assert "s for another host in op 1, all_reduce sum float64[10]" in warning
    assert "rank 0 exchanges messages with other hosts and waits for them" in warning
    (itself,) = first
    assert itself.startswith("rank 0: waited 2")
    assert " s for another host in op 1, all_reduce sum float64[10]" in itself
    assert "waits for them: for rank 2, which may itself wait for other ranks of its host" in itself
    assert all((one == 21 * np.arange(10.0)).all() for one in (x, y, z))


def next_op(rendezvous):
    """Let the leaders' last messages of op 1 take longer than the timeout; return the results of ops 1 and 2."""
    comm, transport = joined(rendezvous, 1.5)
    close = Exchange.close

    def slow(exchange):
        if comm.memory.number == 1:
            time.sleep(2.5)
        close(exchange)

    x = np.full(3, 2.0**comm.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "close", slow)
        comm.reduce(ReduceOp.SUM, memory(x), memory(x) if comm.rank == 0 else None, 0)
        if comm.rank < 2:
            time.sleep(0.4)  # a leader takes some time from the end of op 1 to op 2
        return x[0], last_sum(comm, transport)[1]


def test_a_rank_that_is_an_op_ahead_does_not_blame_its_leader():
    """A rank whose part of an op is done waits in the next op for its leader, which still exchanges messages, and
    leaves it to the leader to name the rank at fault."""
    assert ranks(3, next_op, environment=on(*"abb")) == [(7, 21), (2, 21), (4, 21)]


def without_a_thread(rendezvous):
    """Let the start of rank 0's watchdog thread fail; return the warnings, and the sum."""
    start, warned = threading.Thread.start, Warnings()

    def refused(thread):
        if rendezvous.rank == 0 and thread.name == "crossreduce watchdog":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        comm, transport = joined(rendezvous, 5.0)
    return warned.texts, last_sum(comm, transport)


def test_a_group_works_without_a_watchdog():
    """A rank that cannot start its watchdog thread logs that it will not warn, and takes part in collectives."""
    (first, x), (second, y) = ranks(2, without_a_thread, environment=on(*"ab"))
    assert first == ["this rank will not warn if another host is late: can't start new thread"]
    assert second == []
    assert all((one == 5 * np.arange(10.0)).all() for one in (x, y))


def interrupted_close(rendezvous):
    """Close while Ctrl-C ends the wait for the watchdog thread; return the remaining resources."""
    before = Resources()
    comm, transport = joined(rendezvous)
    comm.barrier()

    def interrupted(_):
        raise KeyboardInterrupt("for the test")

    watchdog._WATCHDOG._thread.join = interrupted
    with pytest.raises(KeyboardInterrupt, match="for the test"):
        comm.close()
    transport.close()
    after = Resources()
    return [link for link in after.files if "memfd" in link], after.mappings - before.mappings


def test_a_close_that_is_interrupted_has_left_the_group():
    """If Ctrl-C interrupts ``close``, the memory, and the lock that shows that this rank is alive, are released."""
    assert ranks(2, interrupted_close, environment=on(*"ab")) == [([], 0)] * 2


def test_bits_do_not_depend_on_arrival_order():
    """For any order in which the ranks arrive, a sum over hosts has the same bits on all ranks."""
    found = ranks(5, shuffled, environment=on(*"abbab"))
    assert len({bits for result in found for bits in result}) == 1


def shuffled(rendezvous):
    comm, transport = joined(rendezvous)
    draw = random.Random(comm.rank)
    x = parts(5, 50_001, "float32")[comm.rank]
    seen = set()
    for _ in range(8):
        time.sleep(draw.random() * 0.01)
        out = np.empty_like(x)
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
        seen.add(out.tobytes())
    comm.close()
    transport.close()
    return seen


def test_each_byte_crosses_a_link_once():
    """The transport carries partial results of a host, not of its ranks, and each array once."""
    # In arrays, for two hosts of two ranks: each host sends its partial result of an all-reduce once, those of the
    # other's two arrays of a reduce-scatter, its own two arrays of an all-gather, and four of an all-to-all.
    due = {"all_reduce": 2, "reduce": 1, "broadcast": 1, "all_gather": 4, "reduce_scatter": 4, "all_to_all": 8}
    due |= {"gather": 2, "scatter": 2}
    found = ranks(4, counted, environment=on(*"aabb"))
    assert {name: sum(one[name] for one in found) for name in found[0]} == {
        name: arrays * 400_000 for name, arrays in due.items()
    }


def counted(rendezvous):
    """Return the bytes that this rank sends in each collective."""
    comm, transport = joined(rendezvous)
    x, rows, others = np.ones(100_000, "float32"), *(list(np.ones((4, 100_000), "float32")) for _ in range(2))
    one, each, root = memory(x), memories(rows), comm.rank == 0
    comm.barrier()
    sent, send = [], transport.send
    transport.send = lambda address, nbytes, dst, tag: (sent.append(nbytes), send(address, nbytes, dst, tag))[1]
    calls = {
        "all_reduce": lambda: comm.all_reduce(ReduceOp.SUM, one, one),
        "reduce": lambda: comm.reduce(ReduceOp.SUM, one, each[0] if root else None, 0),
        "broadcast": lambda: comm.broadcast(one, 0),
        "all_gather": lambda: comm.all_gather(one, each),
        "reduce_scatter": lambda: comm.reduce_scatter(ReduceOp.SUM, each, one),
        "all_to_all": lambda: comm.all_to_all(each, memories(others)),
        "gather": lambda: comm.gather(one, each if root else None, 0),
        "scatter": lambda: comm.scatter(each if root else None, one, 0),
    }
    counts = {}
    for name, call in calls.items():
        sent.clear()
        call()
        counts[name] = sum(size for size in sent if size > 16)
    comm.close()
    transport.close()
    return counts


def interrupted_twice(rendezvous):
    comm, transport = joined(rendezvous)
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
    transport.close()


def test_an_op_that_two_interrupts_ended_is_not_followed_by_another():
    """If Ctrl-C ends the end of an op, and another one its abort, the next call aborts the group: memory of messages
    that are still being sent must not be used again."""
    ranks(2, interrupted_twice, environment=on("a", "b"))
