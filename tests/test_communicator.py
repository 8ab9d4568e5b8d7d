"""The collectives of the ranks of one host: all are correct, with the same bits on all ranks and in every run."""

import gc
import hashlib
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import oracle
import pytest
from members import Resources, member, memories, memory, poisoned, random_array, untouched
from ranks import SocketRendezvous, ranks
from strategies import DTYPES, FLOATS, ops_for

from crossreduce.errors import (
    ArgumentError,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
)
from crossreduce.ops import INTEGERS, ReduceOp
from crossreduce.ranks import shared_memory
from crossreduce.ranks.collectives import SMALL_BYTES
from crossreduce.ranks.communicator import ArrayMemory
from crossreduce.ranks.programs import PIECE_BYTES


@pytest.fixture(autouse=True)
def dumps(tmp_path, monkeypatch):
    """Let ranks write their flight recorder dumps into a directory of the test."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))


ODD = 3001  # elements: for dtypes of at least four bytes more than each rank reduces itself


def digest(array):
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def given(n, size, dtype, seed):
    """Return the arrays of all ranks; every rank gets the same list."""
    draw = np.random.default_rng(seed)
    return [random_array(draw, size, dtype) for _ in range(n)]


class Checks:
    """Runs one collective after the other and records the results that all ranks must share."""

    def __init__(self, comm):
        self.comm, self.common, self.turn = comm, {}, 0

    def is_checked_here(self):
        """Return whether this rank compares with the oracle, which takes long; the ranks take turns."""
        self.turn += 1
        return self.turn % self.comm.size == self.comm.rank

    def reductions(self, op, size, dtype, seed):
        comm, n, me = self.comm, self.comm.size, self.comm.rank
        arrays = given(n, size, dtype, seed)
        name = ReduceOp(op)
        out = poisoned(size, dtype)
        comm.all_reduce(name, memory(arrays[me]), memory(out))
        if self.is_checked_here():
            oracle.check(out, op, arrays, result=dtype)
        self.common["all_reduce", op, size, dtype] = digest(out)
        same = arrays[me].copy()
        comm.all_reduce(name, memory(same), memory(same))
        assert same.tobytes() == out.tobytes(), "in place"
        root = seed % n
        rooted = poisoned(size, dtype)
        comm.reduce(name, memory(arrays[me]), memory(rooted) if me == root else None, root)
        assert rooted.tobytes() == out.tobytes() if me == root else untouched(rooted), "reduce"
        parts = [given(n, size // n, dtype, seed + 1 + k) for k in range(n)]  # parts[k][r]: of rank r for rank k
        share = poisoned(size // n, dtype)
        comm.reduce_scatter(name, memories([parts[k][me] for k in range(n)]), memory(share))
        if self.is_checked_here():
            oracle.check(share, op, parts[me], result=dtype)

    def copies(self, size, dtype, seed):
        comm, n, me = self.comm, self.comm.size, self.comm.rank
        arrays, root = given(n, size, dtype, seed), seed % n
        grid = [given(n, size // n, dtype, seed + 1 + k) for k in range(n)]  # grid[i][k]: from rank i to rank k
        x = arrays[me].copy()
        comm.broadcast(memory(x), root)
        assert x.tobytes() == arrays[root].tobytes(), "broadcast"
        outs = [poisoned(size, dtype) for _ in range(n)]
        comm.all_gather(memory(arrays[me]), memories(outs))
        assert [o.tobytes() for o in outs] == [a.tobytes() for a in arrays], "all_gather"
        outs = [poisoned(size, dtype) for _ in range(n)]
        comm.gather(memory(arrays[me]), memories(outs) if me == root else None, root)
        assert me != root or [o.tobytes() for o in outs] == [a.tobytes() for a in arrays], "gather"
        assert me == root or all(untouched(o) for o in outs), "gather"
        out = poisoned(size // n, dtype)
        comm.scatter(memories(grid[root]) if me == root else None, memory(out), root)
        assert out.tobytes() == grid[root][me].tobytes(), "scatter"
        outs = [poisoned(size // n, dtype) for _ in range(n)]
        comm.all_to_all(memories(grid[me]), memories(outs))
        assert [o.tobytes() for o in outs] == [grid[i][me].tobytes() for i in range(n)], "all_to_all"
        comm.barrier()


def table(rendezvous, dtypes):
    """Run every collective for dtypes, ops and sizes of each schedule; return the results that all ranks share."""
    comm = member(rendezvous)
    checks = Checks(comm)
    for seed, dtype in enumerate(dtypes):
        for op in ops_for(dtype):
            if op == "mean" and dtype in INTEGERS:
                x = np.zeros(3, dtype)
                with pytest.raises(UnsupportedError, match="the mean of integers"):
                    comm.all_reduce(ReduceOp.MEAN, memory(x), memory(x))
                continue
            for size in (0, 37) if op != "sum" else (0, 1, 37, ODD):
                checks.reductions(op, size, dtype, seed)
        for size in (0, 1, 37, ODD):
            checks.copies(size, dtype, seed)
    comm.close()
    return checks.common


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_every_collective_dtype_and_op(n):
    """For every dtype, op, root and size results are the oracle's; all ranks have the same bits; nothing else is
    written; in-place calls give the same results."""
    found = ranks(n, table, DTYPES if n < 9 else ("bfloat16", "complex128", "uint8", "int64"))
    assert len(found[0]) > (100 if n < 9 else 30)
    assert all(one == found[0] for one in found)


def specials(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    common = {}
    for dtype in (*FLOATS, "complex64", "complex128"):
        made = oracle.dtype_of(dtype)
        tiny, most = oracle.SMALLEST[dtype], float(np.finfo(np.float32 if dtype == "bfloat16" else made).max)
        most = 3.3895e38 if dtype == "bfloat16" else most
        columns = [
            [np.nan if r == n - 1 else 1.0 for r in range(n)],
            [np.nan] * n,
            [np.inf if r == 0 else 2.0 for r in range(n)],
            [(-1.0) ** r * np.inf for r in range(n)],
            [-0.0] * n,
            [0.0 if r else -0.0 for r in range(n)],
            [tiny * (r + 1) for r in range(n)],
            [-tiny] * n,
            [most] * n,
            [-most] * n,
        ]
        rows = np.ascontiguousarray(
            np.array(columns * 20).T.astype(made)
        )  # 200 elements, so that whole vectors are computed, too
        for op in ops_for(dtype):
            if "complex" in dtype and op == "product":
                continue  # the C standard does not define the parts of a product with infinities
            with np.errstate(all="ignore"):
                out = poisoned(rows.shape[1], dtype)
                comm.all_reduce(ReduceOp(op), memory(rows[me]), memory(out))
                # Beyond the accumulator's range a mean is infinite, but the oracle's exact mean is not.
                kept = np.arange(200) % 10 < (8 if op == "mean" and dtype != "float16" else 10)
                oracle.check(out[kept], op, [row[kept] for row in rows])
                assert op != "mean" or dtype == "float16" or np.isinf(out[~kept]).all()
                if op == "sum":
                    zeros = out.reshape(20, 10)[:, 4]
                    assert np.signbit(zeros.real.astype("float64")).all(), "the sum of -0 is -0"
            common[dtype, op] = digest(out)
    for dtype in sorted(INTEGERS):
        info = np.iinfo(dtype)
        rows = np.array([[info.max, info.min, info.max // 2 + 1, 3] * 50 for _ in range(n)], dtype)
        for op in ("sum", "product", "min", "max"):
            out = poisoned(200, dtype)
            comm.all_reduce(ReduceOp(op), memory(rows[me]), memory(out))
            oracle.check(out, op, list(rows))
    comm.close()
    return common


def test_special_numbers():
    """NaN, infinities, negative zeros, subnormals and overflows follow IEEE 754; integers wrap around."""
    found = ranks(3, specials)
    assert found[0] == found[1] == found[2]


def halves(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    worst = 0.0
    for dtype, mantissa in (("float16", 10), ("bfloat16", 7)):
        for op in ("sum", "mean"):
            draw = np.random.default_rng(3)
            arrays = [draw.uniform(1, 2, 4000).astype(oracle.dtype_of(dtype)) for _ in range(n)]
            out = poisoned(4000, dtype)
            comm.all_reduce(ReduceOp(op), memory(arrays[me]), memory(out))
            exact = np.sum([a.astype("float64") for a in arrays], axis=0) / (n if op == "mean" else 1)
            ulp = 2.0 ** (np.floor(np.log2(exact)) - mantissa)
            worst = max(worst, float((np.abs(out.astype("float64") - exact) / ulp).max()))
    x = np.full(100, 40000, np.float16)
    comm.all_reduce(ReduceOp.MEAN, memory(x), memory(x))
    assert (x == 40000).all(), "the sum is beyond float16, the mean is not"
    comm.close()
    return worst


def test_halves_are_rounded_once():
    """Sums and means of half types are within 0.51 units in the last place of the exact ones, and do not overflow."""
    assert max(ranks(7, halves)) <= 0.51


def delayed(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    draw = random.Random(me)
    seen = {}
    for _ in range(6):
        for size in (100, 70_000, PIECE_BYTES // 4 + 9):
            arrays = given(n, size, "float32", size)
            out = poisoned(size, "float32")
            time.sleep(draw.choice([0, 0, 0.001, 0.02]))
            comm.all_reduce(ReduceOp.SUM, memory(arrays[me]), memory(out))
            seen.setdefault(size, set()).add(digest(out))
    comm.close()
    return seen


def test_bits_do_not_depend_on_arrival_order():
    """Delays of ranks do not change a bit: every result on every rank is the sum in the order of the ranks."""
    found = ranks(4, delayed)
    assert all(one == found[0] for one in found)
    for size, digests in found[0].items():
        arrays = given(4, size, "float32", size)
        assert digests == {digest(((arrays[0] + arrays[1]) + arrays[2]) + arrays[3])}


def edges(rendezvous):
    """Reduce sizes at the limits of small arrays, of shares and of pieces, with data that shows every error."""
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    wanted = sum((n + 1) ** r for r in range(n))
    for middle in (SMALL_BYTES // 8, 8 * n, PIECE_BYTES // 8, 3 * PIECE_BYTES // 8):
        for size in (middle - 1, middle, middle + 1):
            x = np.full(size, (n + 1) ** me, np.int64) + (n * np.arange(size) if me == 0 else 0)
            out = poisoned(size, "int64")
            comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
            assert (out == wanted + n * np.arange(size)).all(), size
    block = np.zeros(3 * 5000 * 8 + 64, np.uint8)
    for shift in (1, 3, 8, 63):  # unaligned addresses
        at = block.ctypes.data + shift
        values = np.arange(5000, dtype=np.int64) + me
        block[:] = 0
        block[shift : shift + 40000] = values.view(np.uint8)
        gap = 40000 + 1
        comm.all_reduce(
            ReduceOp.SUM, ArrayMemory(at, 5000, "int64", (5000,)), ArrayMemory(at + gap, 5000, "int64", (5000,))
        )
        found = block[shift + gap : shift + gap + 40000].copy().view(np.int64)
        assert (found == n * np.arange(5000) + n * (n - 1) // 2).all(), shift
        assert not block[shift + gap + 40000 :].any()
        assert not block[:shift].any()
        assert block[shift + 40000] == 0
    comm.close()


@pytest.mark.parametrize("n", [2, 3])
def test_edges_of_pieces_and_unaligned_memory(n):
    """No element is lost, doubled or misplaced at the ends of shares and pieces, or in unaligned memory."""
    ranks(n, edges)


def unsliced(rendezvous):
    """Make many calls with more ranks than cores; waits end by a wake-up, or not within the test."""
    shared_memory.SLICE_S = 1e5
    comm = member(rendezvous)
    draw = random.Random(comm.rank)
    x = np.ones(3000, np.float32)
    for k in range(1500):
        part = x[: 10 if k % 2 else 3000]
        comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.002)
    comm.close()


@pytest.mark.parametrize("n", [2, 6])
def test_no_wake_up_is_lost(n):
    """The last rank to arrive wakes the sleeping ranks; no timer is needed."""
    ranks(n, unsliced, timeout_s=40)


def big(rendezvous):
    comm = member(rendezvous)
    size = (72 << 20) // 4 + 1
    x = np.arange(size, dtype=np.int32) * (comm.rank + 1)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    right = bool((x == np.arange(size, dtype=np.int32) * 3).all())
    comm.close()
    return right


def test_arrays_larger_than_slots():
    """72 MiB are reduced in place, in pieces, through slots of a few MiB."""
    assert ranks(2, big) == [True, True]


def crowd(rendezvous):
    """Run three threads per rank, each with its own group, made in opposite orders; and two threads with one group."""
    n, me = rendezvous.size, rendezvous.rank
    wrong, done = [], []

    def work(name):
        try:
            comm = member(rendezvous, name=name)
            for k in range(90):
                size = (10, 3000, 200_000)[k % 3]
                x = np.full(size, k + (n + 1) ** me, np.int64)
                comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
                if not (x == n * k + sum((n + 1) ** r for r in range(n))).all():
                    wrong.append((name, k))
            comm.close()
            done.append(name)
        except BaseException as error:
            wrong.append((name, repr(error)))

    names = ["a", "b", "c"]
    threads = [threading.Thread(target=work, args=(name,)) for name in (names if me % 2 else names[::-1])]
    shared = member(rendezvous)
    for thread in threads:
        thread.start()
    x = [np.full(5000, me + 1, np.int32) for _ in range(2)]
    pair = [
        threading.Thread(target=lambda y=y: [shared.all_reduce(ReduceOp.MAX, memory(y), memory(y)) for _ in range(30)])
        for y in x
    ]
    for thread in pair:  # equal calls of one group from two threads, which may run in any order
        thread.start()
    for thread in (*threads, *pair):
        thread.join(30)
    assert all((y == n).all() for y in x)
    shared.close()
    return wrong, sorted(done)


def test_several_groups_and_threads_at_once():
    """Groups are independent of each other, made and used in any order; calls of one group run one after another."""
    assert ranks(3, crowd) == [([], ["a", "b", "c"])] * 3


def forking(rendezvous):
    """Fork children during calls; the children use, drop or close the group."""
    comm = member(rendezvous)
    x = np.ones(300_000, np.float32)
    statuses = []
    stop = threading.Event()

    def busy():
        y = np.ones(300_000, np.float32)
        for _ in range(25):
            comm.all_reduce(ReduceOp.MAX, memory(y), memory(y))
        stop.set()

    thread = threading.Thread(target=busy)
    thread.start()
    for how in ("use", "drop", "close", "use", "drop"):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # ends a child that waits for a lock
            code = 1
            try:
                if how == "use":
                    with pytest.raises(ContextError, match="forked"):
                        comm.barrier()
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
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    assert (x == comm.size).all()
    comm.close()
    return statuses


def test_forked_children_do_not_affect_the_group():
    """A child forked during a call cannot use its parent's group, can close and drop it, and the parent continues."""
    assert ranks(2, forking) == [[0] * 5] * 2


def dropped(rendezvous):
    before = Resources()
    comm = member(rendezvous, 10)
    x = np.ones(10, np.float32)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    error = None
    if rendezvous.rank:
        try:
            comm.barrier()
        except PeerLostError as lost:
            error = str(lost), lost.ranks, comm.peers[0].pid == os.getppid()
            del lost
    del comm
    gc.collect()
    return error, before == Resources(), (before, Resources())


def test_a_rank_whose_group_is_garbage_collected_leaves_it():
    """A rank that drops a group without closing it releases all resources, and the other ranks get an error."""
    found = ranks(3, dropped)
    assert all(same for _, same, _ in found), found
    for error, *_ in found[1:]:
        text, lost, _ = error
        assert lost == (0,)
        assert text.startswith('rank 0 left during op 2, barrier, of group "world"')


def short_of_addresses(rendezvous):
    before, began = Resources(), time.monotonic()
    if rendezvous.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20),) * 2)
    try:
        member(rendezvous, 20)
    except ReductionError as error:
        caught = str(error)
    took = time.monotonic() - began
    gc.collect()
    return caught, took, before == Resources()


def test_a_rank_that_cannot_map_the_memory_delays_no_other_rank():
    """If a limit prevents one rank from mapping the shared memory, all ranks raise at once and keep no resources."""
    found = ranks(3, short_of_addresses)
    text, *_ = found[0]
    assert "given: rank 1: [Errno 12] Cannot allocate memory\n" in text
    for again, took, same in found:
        assert again == text
        assert took < 10  # the timeout is 20 s
        assert same


def two_in_one(rendezvous):
    caught = [None, None]

    def one(rank):
        try:
            member(SocketRendezvous(rendezvous.path, rank, 2, "twins"), 5)
        except ContextError as error:
            caught[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return caught, os.getpid()


def test_two_ranks_in_one_process_are_refused():
    """Ranks must be processes; threads cannot be ranks of one group."""
    ((caught, pid),) = ranks(1, two_in_one)
    assert all(f"ranks 0, 1 in process {pid}" in text for text in caught)


def misused(rendezvous):
    comm = member(rendezvous, 10)
    n = comm.size
    x, y = np.zeros(6, np.float32), np.zeros(7, np.float32)
    wrong = [
        (lambda: comm.broadcast(memory(x), n), ArgumentError, "not a rank of the group"),
        (lambda: comm.broadcast(memory(x), -1), ArgumentError, "not a rank of the group"),
        (lambda: comm.all_gather(memory(x), memories([x] * (n + 1))), ArgumentError, "one array per rank"),
        (lambda: comm.all_to_all([], []), ArgumentError, "one array per rank"),
        (lambda: comm.all_to_all(memories([x] * n), []), ArgumentError, "one array per rank"),
        (lambda: comm.reduce(ReduceOp.SUM, memory(x), None, comm.rank), ArgumentError, "only the root"),
        (lambda: comm.gather(memory(x), memories([x] * n), (comm.rank + 1) % n), ArgumentError, "only the root"),
        (lambda: comm.all_reduce(ReduceOp.SUM, memory(x), memory(y)), MismatchError, "same dtype and size"),
        (
            lambda: comm.all_reduce(ReduceOp.MAX, *[ArrayMemory(0, 0, "complex64", ())] * 2),
            UnsupportedError,
            "no order",
        ),
        (lambda: comm.all_reduce(ReduceOp.SUM, *[ArrayMemory(0, 0, "float8", ())] * 2), UnsupportedError, "float8"),
    ]
    for call, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    assert comm.supports("all_reduce", ReduceOp.SUM, "complex64")
    assert not comm.supports("all_reduce", ReduceOp.MAX, "complex64")
    assert not comm.supports("all_reduce", ReduceOp.MEAN, "int8")
    assert comm.supports("broadcast", None, "complex128")
    assert comm.supports("all_to_all", None, "bool")
    assert not comm.supports("broadcast", None, "float8")
    x[:] = comm.rank
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))  # the wrong calls do not count
    assert (x == n * (n - 1) / 2).all()
    comm.close()
    comm.close()
    comm.abort()
    with pytest.raises(ContextError, match="is closed"):
        comm.barrier()


def test_wrong_arguments_raise_on_the_calling_rank():
    """A call with wrong arguments raises and does not count as a call; a closed group raises, too."""
    ranks(2, misused)


def handled(rendezvous, inside):
    """Use the group in a signal handler during a call of rank 0."""
    comm = member(rendezvous, 10)
    seen = []
    if comm.rank:
        time.sleep(0.5)
        try:
            comm.barrier()
        except PeerLostError as error:
            return str(error)
        finally:
            comm.close()
        return "done"

    def handler(*_):
        try:
            getattr(comm, inside)()
            seen.append("done")
        except ContextError as error:
            seen.append(str(error))

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    began = time.monotonic()
    try:
        comm.barrier()
        outcome = "done"
    except PeerLostError as error:
        outcome = str(error)
    finally:
        comm.close()
    return seen, outcome, time.monotonic() - began, comm.memory.fd


def test_a_signal_handler_during_a_call():
    """A call in the handler raises and the interrupted call continues; close and abort end it on all ranks."""
    (seen, outcome, _, fd), other = ranks(2, handled, "barrier")
    assert "this thread is already in a call" in seen[0]
    assert (outcome, other, fd) == ("done", "done", -1)
    for inside in ("close", "abort"):
        (seen, outcome, took, fd), other = ranks(2, handled, inside)
        assert seen == ["done"]
        assert outcome.startswith("rank 0 left during op 1, barrier")
        assert outcome == other
        assert took < 5
        assert fd == -1


def handled_while_it_closes(rendezvous):
    comm, seen = member(rendezvous), []

    def handler(*_):
        with pytest.raises(ContextError, match="is closed") as error:
            comm.barrier()
        seen.append(str(error.value))

    def record_leaving(record_leaving=comm.memory.record_leaving):
        signal.raise_signal(signal.SIGUSR1)
        record_leaving()

    signal.signal(signal.SIGUSR1, handler)
    comm.memory.record_leaving = record_leaving
    comm.close()
    return seen, comm.memory.fd


def test_a_signal_handler_while_a_group_closes():
    """A call in the handler raises and does not wait for the interrupted thread."""
    (((text,), fd),) = ranks(1, handled_while_it_closes, timeout_s=10)
    assert 'group "world" is closed' in text
    assert fd == -1


def spin_times(rendezvous, cpus):
    os.sched_setaffinity(0, {cpus[rendezvous.rank]})
    recorded, original = [], shared_memory.RankMemory.__init__

    def recording(self, fd, host, rank, slot, spin_s):
        recorded.append(spin_s)
        original(self, fd, host, rank, slot, spin_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory.RankMemory, "__init__", recording)
        member(rendezvous).close()
    return recorded


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this system gives the tests one CPU")
def test_ranks_spin_only_if_each_has_a_cpu():
    """Ranks that a launcher bound to one CPU each spin while they wait; two that share a CPU do not."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    assert ranks(2, spin_times, (first, second)) == [[shared_memory.SPIN_S]] * 2
    assert ranks(2, spin_times, (first, first)) == [[0.0]] * 2
