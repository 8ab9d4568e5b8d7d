"""Collectives over several hosts: pretended ones on this machine, and ones made of network namespaces."""

import os
import random
import signal
import time

import numpy as np
import oracle
import pytest
from ranks import SocketWire, ranks

from crossreduce.errors import CollectiveTimeout, MismatchError, PeerLostError, UnsupportedError
from crossreduce.ops import ReduceOp
from crossreduce.processes import across
from crossreduce.processes.communicator import Communicator
from crossreduce.processes.contract import Buffer


def buffer(array):
    return Buffer(array.ctypes.data, array.size, array.dtype.name, array.shape)


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
    assert comm.plans("all_reduce", ReduceOp.SUM, "bfloat16")
    assert not comm.plans("all_gather", None, "float32")
    with pytest.raises(UnsupportedError, match="another engine"):
        comm.all_gather(buffer(np.zeros(1)), [buffer(np.zeros(1)) for _ in range(n)])
    comm.close()
    wire.close()
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
    """Sums of any kind and size, in place and not, to one rank and to all: right on each, and the same bits on all."""
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
