"""The collectives of the ranks of one host: all are correct, with the same bits on all ranks and in every run."""

import hashlib
import random
import time

import numpy as np
import oracle
import pytest
from members import member, memories, memory, poisoned, random_array, untouched
from ranks import ranks
from strategies import DTYPES, ops_for

from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import ArrayView
from crossreduce.ranks.inter_host.one_host import SMALL_BYTES
from crossreduce.ranks.intra_host import shared_memory
from crossreduce.ranks.intra_host.programs import PIECE_BYTES

ODD = 3001  # elements: if they have 4 bytes or more, they exceed SMALL_BYTES, and each rank reduces a share of them


def digest(array):
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def given(n, size, dtype, seed):
    """Return the inputs of all ranks; a seed gives the same list on every rank."""
    draw = np.random.default_rng(seed)
    return [random_array(draw, size, dtype) for _ in range(n)]


class Checks:
    """Runs one collective after the other and records the results that must be the same on all ranks."""

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
        parts = [given(n, size // n, dtype, seed + 1 + k) for k in range(n)]  # parts[k][r]: input of rank r to rank k
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
    """Run every collective for dtypes, ops, and sizes of small and large arrays; return digests of the all-reduces."""
    comm = member(rendezvous)
    checks = Checks(comm)
    for seed, dtype in enumerate(dtypes):
        for op in ops_for(dtype):
            for size in (0, 37) if op != "sum" else (0, 1, 37, ODD):
                checks.reductions(op, size, dtype, seed)
        for size in (0, 1, 37, ODD):
            checks.copies(size, dtype, seed)
    comm.close()
    return checks.common


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_every_collective_dtype_and_op(n):
    """For all dtypes and ops (all dtypes on 3 ranks) results are the oracle's, and all ranks have the same bits; an
    all-reduce in place gives the same bits; reduce and gather write only on the root."""
    found = ranks(n, table, DTYPES if n == 3 else ("bfloat16", "complex128", "uint8", "int64"))
    assert len(found[0]) > (100 if n == 3 else 30)
    assert all(one == found[0] for one in found)


def delayed(rendezvous):
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    draw = random.Random(me)
    seen = {}
    for _ in range(3):
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
    """Reduce arrays of sizes around the limits of small arrays, shares and pieces, with data that shows every error."""
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
            ReduceOp.SUM, ArrayView(at, 5000, "int64", (5000,)), ArrayView(at + gap, 5000, "int64", (5000,))
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
    """Make many calls without the timer that ends waits: a rank that is not woken sleeps for longer than the test."""
    shared_memory.SLICE_S = 1e5
    comm = member(rendezvous)
    draw = random.Random(comm.rank)
    x = np.ones(3000, np.float32)
    for k in range(600):
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
    size = (20 << 20) // 4 + 1
    x = np.arange(size, dtype=np.int32) * (comm.rank + 1)
    comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    right = bool((x == np.arange(size, dtype=np.int32) * 3).all())
    comm.close()
    return right


def test_arrays_larger_than_slots():
    """20 MiB are reduced in place, in pieces, through slots of a few MiB."""
    assert ranks(2, big) == [True, True]
