"""Collectives of the ranks of one host: the same bits in every run, ends of shares and pieces, and wake-ups.

``test_multi_host`` compares all collectives with the oracle, also on one host.
"""

import random
import time

import numpy as np
import pytest
from members import member, memory, poisoned
from ranks import ranks

from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import ArrayView
from crossreduce.ranks.inter_host.one_host import SMALL_BYTES
from crossreduce.ranks.intra_host import shared_memory
from crossreduce.ranks.intra_host.programs import PIECE_BYTES


def delayed(rendezvous):
    """Check that sums whose bits depend on the order of the terms have the bits of the order of the ranks."""
    comm, delays = member(rendezvous), random.Random(rendezvous.rank)
    for size in (100, 70_000, PIECE_BYTES // 4 + 9) * 3:
        draw = np.random.default_rng(size)
        every = [(draw.standard_normal(size) * 2.0 ** draw.integers(-3, 4, size)).astype(np.float32) for _ in range(4)]
        out = poisoned(size, "float32")
        time.sleep(delays.choice([0, 0, 0.001, 0.02]))
        comm.all_reduce(ReduceOp.SUM, memory(every[comm.rank]), memory(out))
        assert out.tobytes() == (((every[0] + every[1]) + every[2]) + every[3]).tobytes()
    comm.close()


def test_bits_do_not_depend_on_arrival_order():
    """Random delays of ranks change no bit: each result on each rank is the sum in the order of the ranks."""
    ranks(4, delayed)


def edges(rendezvous):
    """Reduce arrays whose sizes are near the limits of small arrays, shares and pieces; the data shows every error."""
    comm = member(rendezvous)
    n, me = comm.size, comm.rank
    wanted = sum((n + 1) ** r for r in range(n))
    limits = (SMALL_BYTES // 8, 8 * n, PIECE_BYTES // 8, 3 * PIECE_BYTES // 8)
    larger_than_a_slot = (20 << 20) // 8 + 1
    for size in [*(limit + k for limit in limits for k in (-1, 0, 1)), larger_than_a_slot]:
        x = np.full(size, (n + 1) ** me, np.int64) + (n * np.arange(size) if me == 0 else 0)
        out = poisoned(size, "int64")
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(out))
        assert (out == wanted + n * np.arange(size)).all(), size
    nbytes = 5000 * 8
    for shift in (1, 3, 8, 63):  # unaligned addresses
        block = np.zeros(3 * nbytes, np.uint8)
        x, out = block[shift:][:nbytes], block[shift + nbytes + 1 :][:nbytes]
        x[:] = (np.arange(5000) + me).view(np.uint8)
        views = (ArrayView(part.ctypes.data, 5000, "int64", (5000,)) for part in (x, out))
        comm.all_reduce(ReduceOp.SUM, *views)
        assert (out.copy().view(np.int64) == n * np.arange(5000) + n * (n - 1) // 2).all(), shift
        out[:] = x[:] = 0
        assert not block.any(), "bytes beside the arrays were written"
    comm.close()


def test_edges_of_pieces_and_unaligned_memory():
    """No element is lost, doubled or misplaced at the ends of shares, pieces and slots, or in unaligned memory."""
    ranks(3, edges)


def unsliced(rendezvous):
    """Make many calls with waits of up to 1e5 s: a rank that is not woken sleeps for longer than the test."""
    shared_memory.SLICE_S = 1e5
    comm = member(rendezvous)
    draw = random.Random(comm.rank)
    x = np.ones(3000, np.float32)
    for k in range(400):
        part = x[: 10 if k % 2 else 3000]
        comm.all_reduce(ReduceOp.MAX, memory(part), memory(part))
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.002)
    comm.close()


@pytest.mark.parametrize("n", [2, 6])
def test_no_wake_up_is_lost(n):
    """The last rank that arrives at a barrier wakes all sleeping ranks. They do not depend on a timer."""
    ranks(n, unsliced)
