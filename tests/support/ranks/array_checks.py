"""Checks of every collective of an ``ArrayGroup``, which all its ranks call: results are compared with NumPy's."""

import math

import ml_dtypes
import numpy as np
import transport_laws

import crossreduce as cr

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int8", "int64", "uint16", "complex64", "bool"]


def part(rank, shape, dtype):
    """Return the input of a rank: small integers of a dtype."""
    least, most = {"b": (0, 2), "u": (0, 4)}.get(np.dtype(dtype).kind, (-3, 4))
    return np.random.default_rng(rank).integers(least, most, shape).astype(dtype)


def same(a, b):
    assert isinstance(a, np.ndarray), type(a)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.tobytes() == np.ascontiguousarray(b).tobytes(), (a.ravel()[:5], b.ravel()[:5])


def raises(kind, text, call):
    error = transport_laws.raises(kind, call)
    assert text in str(error), str(error)


def check(group, shape, dtype):
    """Compare the collectives of arrays of a shape and a dtype with NumPy. The inputs are small integers, so all bits
    are compared, except those of complex products."""
    me, n = group.rank, group.size
    every = [part(k, shape, dtype) for k in range(n)]
    tables = [np.stack([part(100 * k + j, shape, dtype) for j in range(n)]) for k in range(n)]
    x, rows, column = every[me], tables[me], np.stack([table[me] for table in tables])
    kind, root = np.dtype(dtype).kind, n - 1
    ops = ["max", "min"] if kind == "b" else ["sum", "product"] if kind == "c" else ["sum", "max", "min"]
    wide = "complex128" if kind == "c" else "float64" if kind in "fV" else dtype
    for op in ops:
        reduce = {"sum": np.sum, "product": np.prod, "min": np.min, "max": np.max}[op]
        total = np.asarray(reduce(np.stack(every).astype(wide), axis=0)).astype(dtype)
        if op == "product":
            np.testing.assert_allclose(group.all_reduce(x, op), total, rtol=1e-5)
            continue
        same(group.all_reduce(x, op), total)
        kept = x.copy()
        same(group.all_reduce(kept, op.upper(), out=kept), total)
        for at in (0, root):
            got = group.reduce(x, op, at)
            assert (got is None) == (me != at)
            if me == at:
                same(got, total)
        same(group.reduce_scatter(rows, op), np.asarray(reduce(column.astype(wide), axis=0)).astype(dtype))
    same(group.broadcast(x, root), every[root])
    kept = x.copy()
    assert group.broadcast(kept, root, out=kept) is kept
    same(kept, every[root])
    same(group.all_gather(x), np.stack(every))
    got = group.gather(x, root=root)
    assert (got is None) == (me != root)
    if me == root:
        same(got, np.stack(every))
    same(group.all_to_all(rows), column)
    out = np.empty_like(rows)
    assert group.all_to_all(rows, out) is out
    same(out, column)
    out = np.empty(shape, dtype)
    assert group.scatter(rows if me == 0 else None, out) is out
    same(out, tables[0][me])
    same(x, part(me, shape, dtype))
    same(rows, np.stack([part(100 * me + j, shape, dtype) for j in range(n)]))


def every_collective(group):
    """Compare the collectives with NumPy. Then call them with invalid arguments, after which the group still works."""
    me, n = group.rank, group.size
    for dtype in DTYPES:
        check(group, (3, 4, 5), dtype)
    for shape, dtype in (((), "float32"), ((0,), "int64"), ((5,), "complex64"), ((70_001,), "float32")):
        check(group, shape, dtype)
    # Means of integers are floats, means of half types do not overflow, and any layout and byte order is accepted.
    same(group.all_reduce(np.full(3, me), "mean"), np.full(3, (n - 1) / 2))
    same(group.all_reduce(np.full(3, 40000, "float16"), "mean"), np.full(3, 40000, "float16"))
    grid = np.arange(12.0).reshape(3, 4)
    same(group.all_reduce(grid.T), n * grid.T)
    same(group.all_reduce(grid.astype(">f8")), n * grid)
    same(group.all_reduce([1, 2]), np.array([n, 2 * n]))
    # Exact sums are rounded once, like math.fsum (test_rank_exact tests the other reductions and data).
    every = [np.random.default_rng(k).standard_normal(500) * 10.0 ** np.arange(-250, 250) for k in range(n)]
    same(group.all_reduce(every[me], exact=True), np.array([math.fsum(column) for column in np.transpose(every)]))
    # If out overlaps the input, no element is written before it is read (test_mpi tests the other collectives).
    long = np.arange(3_000_001.0)
    for src, dst in ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1))):
        moved = long.copy()
        same(group.all_reduce(moved[src], out=moved[dst]), n * long[src])
    table = np.zeros((n, 300_001)) + me
    assert group.all_to_all(table, out=table) is table
    assert (table == np.arange(n)[:, None]).all()
    before = group.stats().total
    group.barrier()
    counted = group.stats()
    assert (counted.rank, counted.size) == (me, n)
    assert counted.total.calls == 1 + before.calls > 100
    assert counted.total.nbytes == before.nbytes > n << 20

    # Invalid arguments raise before any rank waits; calls that differ raise on all ranks.
    raises(cr.UnsupportedError, "dtype object", lambda: group.all_reduce(np.array([None])))
    raises(cr.UnsupportedError, "sum of bools", lambda: group.all_reduce(np.array([True])))
    raises(cr.ArgumentError, "out must be", lambda: group.all_reduce(grid, out=grid.T))
    raises(cr.ArgumentError, "out must be", lambda: group.all_reduce(grid, out=grid.astype("float32")))
    masked = np.ma.array(grid, mask=True)
    raises(cr.ArgumentError, "masked", lambda: group.all_reduce(grid, out=masked))
    raises(cr.UnsupportedError, "masked", lambda: group.all_to_all([grid] * (n - 1) + [masked]))
    raises(cr.ArgumentError, "not a known reduction", lambda: group.all_reduce(grid, "summ"))
    raises(cr.ArgumentError, "one row for each", lambda: group.all_to_all(np.zeros(n + 1)))
    called = group.communicator.memory.number
    raises(cr.ArgumentError, "out must be", lambda: group.all_to_all(np.zeros(n), out=np.zeros(n + 1)))
    assert group.communicator.memory.number == called
    raises(cr.ArgumentError, "not a rank", lambda: group.broadcast(grid, n))
    raises(cr.ArgumentError, "not a rank", lambda: group.gather(grid, -1))
    if n > 1:
        raises(cr.MismatchError, f"float64[{n + 3}]", lambda: group.all_reduce(np.zeros(n + 3 if me == n - 1 else 2)))
        raises(cr.MismatchError, "all_gather", lambda: group.all_gather(grid) if me else group.barrier())
    same(group.all_reduce(grid), n * grid)
