"""Collectives over several hosts: pretended ones on this machine, and ones made of network namespaces."""

import os
import random
import signal
import threading
import time

import numpy as np
import oracle
import pytest
from members import Holds, Warnings, buffer
from ranks import SocketWire, ranks

from crossreduce.errors import CollectiveTimeout, MismatchError, PeerLostError, UnsupportedError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator


def on(*names):
    """Return each rank's environment: which host it believes to be on."""
    return [{"CROSSREDUCE_HOST": name} for name in names]


def joined(rendezvous, timeout_s=20.0):
    wire = SocketWire(rendezvous)
    return Communicator(rendezvous, wire, name="world", timeout_s=timeout_s), wire


def parts(n, size, dtype, seed=0):
    """Return every rank's array: digits of base n + 1 where sums hold them, random beside."""
    draw = np.random.default_rng(seed + size)
    if dtype.startswith("int"):
        return [((n + 1) ** k * (draw.integers(1, 2, size)) + 0).astype(dtype) + np.arange(size) % 3 for k in range(n)]
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
    ("sum", "complex64", 999),
    ("sum", "float32", 0),
]


def table(rendezvous):
    """Run all cases, and return what this rank got, by case and collective."""
    comm, wire = joined(rendezvous)
    got = {}
    n, me = comm.size, comm.rank
    for op, dtype, size in CASES:
        given = parts(n, size, dtype)[me]
        before = given.tobytes()
        out = np.full_like(given, 7)
        comm.all_reduce(ReduceOp(op), buffer(given), buffer(out))
        assert given.tobytes() == before
        got["all_reduce", op, dtype, size] = out.copy()
        again = given.copy()
        comm.all_reduce(ReduceOp(op), buffer(again), buffer(again))
        got["in place", op, dtype, size] = again
        for root in (0, n - 1):
            out = np.full_like(given, 7)
            comm.reduce(ReduceOp(op), buffer(given), buffer(out) if me == root else None, root)
            got[f"reduce {root}", op, dtype, size] = out
            assert given.tobytes() == before
            shared = given.copy()
            comm.broadcast(buffer(shared), root)
            got[f"broadcast {root}", op, dtype, size] = shared
    comm.barrier()
    hosts = comm.hosts
    assert "crossreduce lookout" in {thread.name for thread in threading.enumerate()}
    assert comm.plans("all_reduce", ReduceOp.SUM, "bfloat16")
    assert not comm.plans("all_gather", None, "float32")
    with pytest.raises(UnsupportedError, match="another engine"):
        comm.all_gather(buffer(np.zeros(1)), [buffer(np.zeros(1)) for _ in range(n)])
    comm.close()
    wire.close()
    assert "crossreduce lookout" not in {thread.name for thread in threading.enumerate()}
    return hosts, got


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("aaabbbbb", ((0, 1, 2), (3, 4, 5, 6, 7))),
        ("abab", ((0, 2), (1, 3))),
        ("abcc", ((0,), (1,), (2, 3))),
        ("ab", ((0,), (1,))),
    ],
)
def test_every_collective_over_hosts_gives_what_it_should(names, hosts):
    """Sums of any kind and size, in place and not, to one rank and to all: right, and the same bits on all."""
    found = ranks(len(names), table, environment=on(*names), timeout_s=90)
    n = len(names)
    assert {one for one, _ in found} == {hosts}
    for op, dtype, size in CASES:
        inputs = parts(n, size, dtype)
        for root in (None, 0, n - 1):
            names_of = ("all_reduce", "in place") if root is None else (f"reduce {root}",)
            takers = range(n) if root is None else [root]
            for name in names_of:
                for rank in takers:
                    result = found[rank][1][name, op, dtype, size]
                    assert (
                        result.tobytes() == found[takers[0]][1]["all_reduce", op, dtype, size].tobytes()
                        or root is not None
                    )
                    close(result, inputs, op, dtype)
                for rank in set(range(n)) - set(takers):
                    assert (found[rank][1][name, op, dtype, size] == 7).all()
            if root is not None:
                for rank in range(n):
                    assert found[rank][1][f"broadcast {root}", op, dtype, size].tobytes() == inputs[root].tobytes()


def close(result, inputs, op, dtype):
    """Compare with the sum in higher precision: exactly for integers, within what n roundings may do for floats."""
    wide = np.array(
        [
            x.astype(dtype if dtype.startswith("int") else "complex128" if "complex" in dtype else "float64")
            for x in inputs
        ]
    )
    due = {"sum": wide.sum, "mean": wide.mean, "max": wide.max, "min": wide.min, "product": wide.prod}[op](axis=0)
    if dtype.startswith("int") or op in ("min", "max"):
        assert (result == due.astype(result.dtype)).all()
        return
    n, u = len(inputs), oracle.ROUNDOFF[dtype]
    depth = 1 if dtype in oracle.HALVES else n
    size = np.abs(wide).prod(axis=0) if op == "product" else np.abs(wide).sum(axis=0) / (n if op == "mean" else 1)
    slack = depth * u / (1 - depth * u) * size * (1 + 1e-3) + n * 2.0**-24 * size + oracle.SMALLEST[dtype]
    assert (np.abs(result.astype(wide.dtype) - due) <= slack).all()


def disagreeing(rendezvous):
    """Make calls that differ between ranks in several ways; return each error's text, and what a good call gives."""
    comm, wire = joined(rendezvous)
    me, said = comm.rank, []
    x = np.arange(50_000, dtype="float32") + me
    out = np.full_like(x, 7)
    calls = [
        # Between hosts; within a host; both; one rank calls something else.
        lambda: comm.all_reduce(ReduceOp.SUM if me < 2 else ReduceOp.MAX, buffer(x), buffer(out)),
        lambda: comm.all_reduce(ReduceOp.MAX if me == 1 else ReduceOp.SUM, buffer(x), buffer(out)),
        lambda: comm.all_reduce(ReduceOp.SUM, buffer(x[: 10_000 + me]), buffer(out[: 10_000 + me])),
        lambda: comm.barrier() if me == 4 else comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(out)),
        lambda: comm.agree(f"inner op {me // 3}"),
    ]
    for call in calls:
        with pytest.raises(MismatchError) as error:
            call()
        said.append(str(error.value))
        assert (out == 7).all()
    comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(out))
    comm.close()
    wire.close()
    return said, out


def test_ranks_that_disagree_all_raise_the_same_before_anything_is_written():
    """Wherever the ranks are that differ, all of all hosts raise one text that names them, and the group goes on."""
    found = ranks(5, disagreeing, environment=on(*"aaabb"))
    said = found[0][0]
    assert all(one == said for one, _ in found)
    assert "ranks 2-4" in said[0]
    assert "ranks 0, 1" in said[0]
    assert "rank 1 " in said[1]
    assert "float32[10000]" in said[2]
    assert "float32[10004]" in said[2]
    assert "rank 4 " in said[3]
    assert "inner op 0" in said[4]
    assert "inner op 1" in said[4]
    for _, out in found:
        assert (out == 5 * np.arange(50_000, dtype="float32") + 10).all()


def until_lost(rendezvous, victim, how, at, timeout_s):
    """Reduce again and again; one rank ends itself, or stops. Return the error, and how long it took to come."""
    comm, wire = joined(rendezvous, timeout_s)
    x, out = np.ones(1_000_000, "float32"), np.empty(1_000_000, "float32")
    began = time.monotonic()
    try:
        for number in range(200):
            if comm.rank == victim and number == at:
                if how == signal.SIGKILL:
                    rendezvous.ask("put", [("died",)], str(time.monotonic()).encode())
                os.kill(os.getpid(), how)
            comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(out))
            began = time.monotonic()
    except (PeerLostError, CollectiveTimeout) as error:
        took = time.monotonic() - began
        again = None
        try:
            comm.barrier()
        except type(error) as second:
            again = str(second) == str(error)
        # Nobody leaves before all have raised: a process that ends lets go of whoever waits for it.
        rendezvous.ask("put", [("raised", comm.rank)], b"")
        others = [("raised", rank) for rank in range(comm.size) if rank != victim]
        assert all(said is not None for said in rendezvous.ask("get", others, timeout=10.0)), "some wait too long"
        return type(error).__name__, list(error.ranks), took, again
    finally:
        wire.abort()


@pytest.mark.parametrize(
    ("names", "victim"), [("aabb", 3), ("aabb", 2), ("abb", 0), ("aaabb", 2), ("aabbb", 4), ("aaabbbb", 6)]
)
def test_a_rank_that_dies_is_named_on_all_hosts(names, victim):
    """Whether a lane dies, a rank behind one, or a whole host: all others name it, soon."""
    found = ranks(len(names), until_lost, victim, signal.SIGKILL, 5, 20.0, environment=on(*names), check=False)
    for rank, result in enumerate(found):
        if rank != victim:
            kind, lost, took, again = result
            assert (kind, lost, again) == ("PeerLostError", [victim], True), result
            assert took < 3


@pytest.mark.parametrize(("names", "victim"), [("aabb", 3), ("aabb", 2), ("abb", 0)])
def test_a_rank_that_stops_is_named_on_all_hosts_after_the_timeout(names, victim):
    """A rank that hangs is named when the timeout is over, by the ranks of other hosts too."""
    found = ranks(
        len(names), until_lost, victim, signal.SIGSTOP, 5, 1.5,
        environment=on(*names), check=False, begun=lambda pids: ended(pids[victim], 5),
    )  # fmt: skip
    for rank, result in enumerate(found):
        if rank != victim:
            kind, late, took, again = result
            assert (kind, late, again) == ("CollectiveTimeout", [victim], True), result
            assert 1.4 < took < 3.5


def ended(pid, after_s):
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)


def last_sum(comm, wire):
    """Sum 10 numbers of each rank's, leave the group, and return what came out."""
    x = np.arange(10.0) * 4**comm.rank
    comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(x))
    comm.close()
    wire.close()
    return x


def waiting(rendezvous):
    """Let rank 2 come late; return what this rank is warned of, and the sum."""
    comm, wire = joined(rendezvous, 4.0)
    warned = Warnings()
    if comm.rank == 2:
        time.sleep(3)
    return warned.texts, last_sum(comm, wire)


def test_a_late_host_is_not_blamed_on_the_rank_that_waits_for_it():
    """Behind a rank that waits for another host the warning says so, and does not say that this one has stopped."""
    (first, x), (said, y), (_, z) = ranks(3, waiting, environment=on(*"aab"))
    (warning,) = said
    assert "without another host in op 1, all_reduce sum float64[10]" in warning
    assert "rank 0 exchanges with other hosts, and waits for them" in warning
    (itself,) = first
    assert itself.startswith("rank 0: 2")
    assert " s without another host in op 1, all_reduce sum float64[10]" in itself
    assert "rank 0 exchanges with other hosts, and waits for them: for rank 2, or for ranks of its host" in itself
    assert all((one == 21 * np.arange(10.0)).all() for one in (x, y, z))


def without_a_thread(rendezvous):
    """Let the system grant rank 0 no thread to look out; return what is warned of, and the sum."""
    start, warned = threading.Thread.start, Warnings()

    def refused(thread):
        if rendezvous.rank == 0 and thread.name == "crossreduce lookout":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        comm, wire = joined(rendezvous, 5.0)
    return warned.texts, last_sum(comm, wire)


def test_a_group_needs_no_thread_to_look_out():
    """A rank that gets no more threads says that it will not warn, and takes part all the same."""
    (first, x), (second, y) = ranks(2, without_a_thread, environment=on(*"ab"))
    assert first == ["this rank will not warn when another host is late: can't start new thread"]
    assert second == []
    assert all((one == 5 * np.arange(10.0)).all() for one in (x, y))


def interrupted_close(rendezvous):
    """Close while Ctrl-C ends the wait for the thread that looks out; return what is left."""
    before = Holds()
    comm, wire = joined(rendezvous)
    comm.barrier()

    def interrupted(_):
        raise KeyboardInterrupt

    comm._lookout._thread.join = interrupted
    with pytest.raises(KeyboardInterrupt):
        comm.close()
    wire.close()
    after = Holds()
    return [link for link in after.files if "memfd" in link], after.mappings - before.mappings


def test_a_close_that_is_interrupted_has_left_the_group():
    """Ctrl-C in a close does not keep the memory, nor the lock that says that this rank lives."""
    assert ranks(2, interrupted_close, environment=on(*"ab")) == [([], 0)] * 2


def test_the_bits_do_not_depend_on_who_is_late():
    """However the ranks' arrival is shuffled, a sum over hosts has the same bits on all ranks."""
    found = ranks(5, shuffled, environment=on(*"abbab"))
    assert len({bits for result in found for bits in result}) == 1


def shuffled(rendezvous):
    comm, wire = joined(rendezvous)
    draw = random.Random(comm.rank)
    x = parts(5, 50_001, "float32")[comm.rank]
    seen = set()
    for _ in range(8):
        time.sleep(draw.random() * 0.01)
        out = np.empty_like(x)
        comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(out))
        seen.add(out.tobytes())
    comm.close()
    wire.close()
    return seen


def test_a_host_is_reduced_before_its_sum_travels():
    """The wire carries one partial result a host, not one a rank."""
    found = ranks(4, counted, environment=on(*"aabb"))
    assert sum(found) == 2 * 400_000  # each of two hosts sends the array once


def counted(rendezvous):
    comm, wire = joined(rendezvous)
    x = np.ones(100_000, "float32")
    comm.barrier()
    sent, send = [], wire.send
    wire.send = lambda address, nbytes, dst, tag: (sent.append(nbytes), send(address, nbytes, dst, tag))[1]
    comm.all_reduce(ReduceOp.SUM, buffer(x), buffer(x))
    assert (x == 4).all()
    comm.close()
    wire.close()
    return sum(size for size in sent if size > 16)
