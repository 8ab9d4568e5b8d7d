"""Helpers for tests of groups on several simulated hosts: inputs, and comparisons of results with NumPy."""

import functools

import numpy as np
import oracle
from members import memories, memory
from ranks import SocketTransport

from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator


def on(*names):
    """Return the environment of each rank, with the name of its simulated host."""
    return [{"CROSSREDUCE_HOST": name} for name in names]


def joined(rendezvous, timeout_s=60.0, in_python=False):
    """Return this rank's communicator, which exchanges data between hosts over sockets. See ``SocketTransport``."""
    transport = SocketTransport(rendezvous, in_python=in_python)
    return Communicator(rendezvous, transport, name="world", timeout_s=timeout_s)


@functools.cache
def parts(n, size, dtype, seed=0):
    """Return the arrays of all ranks, which must not be changed. They contain integers, whose sums are exact in any
    order. In integer dtypes these are based on powers of n + 1, whose sums show lost and doubled contributions."""
    draw = np.random.default_rng(seed + size)
    if dtype.startswith("int"):
        return [((n + 1) ** k * draw.integers(1, 2, size) + np.arange(size) % 3).astype(dtype) for k in range(n)]
    most = 3 if dtype == "float64" else 100
    arrays = [draw.integers(-most, most + 1, size) for _ in range(n)]
    if "complex" in dtype:
        arrays = [x + 1j * x[::-1] for x in arrays]
    return [x.astype(oracle.dtype_of(dtype)) for x in arrays]


def reduced(inputs, op, dtype):
    """Return the exact reduction of arrays of ``parts`` by NumPy, divided and rounded once."""
    kind = dtype if dtype.startswith("int") else "complex128" if "complex" in dtype else "float64"
    wide = np.array([x.astype(kind) for x in inputs])
    if op == "mean":
        due = wide.sum(axis=0, dtype=kind) / len(inputs)
        due = np.trunc(due) if dtype.startswith("int") else due
    else:
        due = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}[op].reduce(wide, dtype=kind)
    return due.astype(inputs[0].dtype)


CASES = [
    ("sum", "float32", 1000),
    ("sum", "int64", 100_003),
    ("mean", "float32", 300_001),
    ("sum", "bfloat16", 70_001),
    ("mean", "float16", 513),
    ("max", "bfloat16", 1025),
    ("product", "float64", 77),
    ("min", "int8", 4099),
    ("mean", "int64", 70_003),
    ("sum", "complex64", 999),
    ("sum", "float32", 0),
]


def draw_parts(n, cases):
    """Draw the arrays of all ranks into the cache before the ranks are forked, so that ranks need not draw them."""
    for _, dtype, size in cases:
        parts(n, size, dtype)
        for k in range(n):
            parts(n, -(-size // n), dtype, 100 + k)


def check_cases(comm, cases):
    """Compare the bits of all collectives with NumPy's, for (op, dtype, size) in ``cases``."""
    n, me = comm.size, comm.rank
    for name, dtype, size in cases:
        op, every = ReduceOp(name), parts(n, size, dtype)
        due = reduced(every, name, dtype).tobytes()
        given, out = every[me].copy(), np.full_like(every[me], 7)
        comm.all_reduce(op, memory(given), memory(out))
        assert out.tobytes() == due, (name, dtype, size)
        again = given.copy()
        comm.all_reduce(op, memory(again), memory(again))
        assert again.tobytes() == due, (name, dtype, size)
        for root in (0, n - 1):
            out = np.full_like(given, 7)
            comm.reduce(op, memory(given), memory(out) if me == root else None, root)
            assert out.tobytes() == due if me == root else (out == 7).all()
            shared = given.copy()
            comm.broadcast(memory(shared), root)
            assert shared.tobytes() == every[root].tobytes()
        assert given.tobytes() == every[me].tobytes()
        check_rows(comm, op, dtype, -(-size // n))


def check_rows(comm, op, dtype, size):
    """Compare the collectives that take one array per rank with NumPy, also in place. Rank i passes ``every[i]``."""
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
        same([result], [reduced([every[k][me] for k in range(n)], op.value, dtype)])
        given, got = [x.copy() for x in every[me]], filled()
        comm.all_to_all(memories(given), memories(got))
        same(got, [every[k][me] for k in range(n)])
        for root in (0, n - 1):
            given = [x.copy() for x in every[me]]
            got = filled()
            if in_place:
                got[me] = given[me]
            comm.gather(memory(given[me]), memories(got) if me == root else None, root)
            due = [every[k][k] if me == root else filled(1)[0] for k in range(n) if k != me]
            same([*got[:me], *got[me + 1 :]], due)
            same(given, every[me])
            (result,) = [given[me]] if in_place else filled(1)
            comm.scatter(memories(given) if me == root else None, memory(result), root)
            same([result], [every[root][me]])
