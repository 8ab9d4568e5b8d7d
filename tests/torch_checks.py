"""The program of each rank in tests/test_torch_backend.py: every collective, in every form, compared with an oracle.

``python torch_checks.py FOLDER [CHECK ...]`` with RANK and WORLD_SIZE set runs all checks in order and writes the
failures, and digests of results that all ranks must share, to FOLDER. The oracle makes all ranks' inputs from seeds and
reduces them in double precision with plain torch, without communication.
"""

import gc
import hashlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (0,), (1,), (7, 3), (1025,), (300_001,)]
CHECKS = {}
DIGESTS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def given(rank, shape, dtype=torch.float32, salt=0):
    """Return a rank's input, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    low = 0 if dtype is torch.uint8 else -50
    return torch.randint(low, 50, shape, generator=generator).to(dtype)


def expect_reduced(got, op, xs):
    """Check a reduction: integers exactly, others within the rounding errors (Higham, SISC 1993)."""
    dtype = xs[0].dtype
    assert got.dtype == dtype
    assert got.shape == xs[0].shape, (got.shape, xs[0].shape)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    ys = torch.stack([x.to(wide) for x in xs])
    if op == PRODUCT:
        want = ys.prod(0)
    elif op in (MIN, MAX):
        want = ys.amin(0) if op == MIN else ys.amax(0)
    else:
        want = ys.sum(0) / (len(xs) if op == AVG else 1)
    if not (dtype.is_complex or dtype.is_floating_point):
        assert torch.equal(got, want.to(dtype)), (got, want)
        return
    if op in (MIN, MAX):
        assert torch.equal(got.to(wide), want)
        return
    half = dtype in (torch.float16, torch.bfloat16)
    u = torch.finfo(torch.float32 if half else dtype).eps / 2
    scale = ys.abs().prod(0) if op == PRODUCT else ys.abs().sum(0)
    bound = 4 * len(xs) * u * scale  # 4: complex products have four times the roundings
    if half:
        bound = bound + torch.finfo(dtype).eps / 2 * want.abs() + torch.finfo(dtype).smallest_normal
    assert bool(((got.to(wide) - want).abs() <= bound).all()), (got, want)


def record_digest(name, tensor):
    """Record a result whose bits all ranks must share."""
    raw = tensor.detach().resolve_conj().contiguous().reshape(-1)
    raw = torch.view_as_real(raw) if raw.is_complex() else raw
    DIGESTS[name] = hashlib.sha256(raw.view(torch.uint8).numpy().tobytes()).hexdigest()


def raises(error, words, function, *args, **kwargs):
    caught = None
    try:
        function(*args, **kwargs)
    except error as raised:
        caught = raised
    assert caught is not None, f"no {error.__name__}"
    assert words in str(caught), caught
    return caught


def inputs(c, *args):
    return [given(rank, *args) for rank in range(c.size)]


@check
def all_reduce_every_op_dtype_and_shape(c):
    """all_reduce gives all ranks the same bits, those of the reduction of all inputs."""
    cases = [(op, dtype) for op in (SUM, AVG, MIN, MAX, PRODUCT) for dtype in FLOATS]
    cases += [(op, dtype) for op in (SUM, MIN, MAX, PRODUCT) for dtype in INTEGERS]
    cases += [(op, dtype) for op in (SUM, AVG) for dtype in COMPLEX] + [
        (op, torch.bool) for op in (SUM, MIN, MAX, PRODUCT)
    ]
    for salt, (op, dtype) in enumerate(cases):
        for shape in SHAPES if dtype in (torch.float32, torch.bfloat16) else SHAPES[3:5]:
            xs = inputs(c, shape, dtype, salt)
            if op == PRODUCT and not dtype.is_floating_point:
                xs = [x % 4 for x in xs]
            x = xs[c.rank].clone()
            if dtype is torch.bool:
                dist.all_reduce(x, op)
                assert torch.equal(x, torch.stack(xs).all(0) if op in (MIN, PRODUCT) else torch.stack(xs).any(0))
            else:
                dist.all_reduce(x, op)
                expect_reduced(x, op, xs)
            record_digest(f"all_reduce {op} {dtype} {shape}", x)


@check
def all_reduce_of_many_pieces(c):
    """An array of many pieces is reduced like a small one."""
    xs = inputs(c, (5_000_011,), torch.float32, 3)
    x = xs[c.rank].clone()
    dist.all_reduce(x)
    expect_reduced(x, SUM, xs)
    record_digest("large", x)


@check
def forms_of_tensors(c):
    """Tensors that are not contiguous, lazily conjugated, or require gradients are reduced like others."""
    xs = inputs(c, (6, 10), torch.float32, 5)
    for take in (lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1:, 3:7], lambda x: x.unsqueeze(0).permute(2, 0, 1)):
        base = xs[c.rank].clone()
        dist.all_reduce(take(base))
        expect_reduced(take(base).contiguous(), SUM, [take(x).contiguous() for x in xs])
        kept = torch.ones_like(base, dtype=torch.bool)
        take(kept).fill_(False)
        assert torch.equal(base[kept], xs[c.rank][kept])
    images = inputs(c, (2, 3, 4, 5), torch.float32, 6)
    x = images[c.rank].to(memory_format=torch.channels_last)
    dist.all_reduce(x)
    expect_reduced(x, SUM, images)
    parameter = torch.nn.Parameter(xs[c.rank].clone())
    dist.all_reduce(parameter)
    expect_reduced(parameter.detach(), SUM, xs)
    zs = inputs(c, (5,), torch.complex64, 7)
    z = zs[c.rank].clone().conj()
    dist.reduce(z, 1)
    if c.rank == 1:
        expect_reduced(z.resolve_conj(), SUM, [z.conj().resolve_conj() for z in zs])
    else:
        assert torch.equal(z, zs[c.rank].conj())


@check
def reduce_to_each_root(c):
    """reduce writes the result on the root, and does not change the others' tensors."""
    for root in range(c.size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            xs = inputs(c, (33, 5), dtype, 11 + root)
            x = xs[c.rank].clone()
            dist.reduce(x, root)
            if c.rank == root:
                expect_reduced(x, SUM, xs)
            else:
                assert torch.equal(x, xs[c.rank])
    xs = inputs(c, (4, 6), torch.float64, 17)
    x = xs[c.rank].clone()
    dist.reduce(x.T, 0, AVG)
    if c.rank == 0:
        expect_reduced(x, AVG, xs)


@check
def broadcast_from_each_root(c):
    """broadcast copies tensors of any dtype, also of those that cannot be reduced."""
    dtypes = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn]
    for salt, dtype in enumerate(dtypes):
        root = salt % c.size
        made = torch.float32 if dtype is torch.float8_e4m3fn else dtype
        xs = [x.to(dtype) for x in inputs(c, (40, 3), made, 20 + salt)]
        x = xs[c.rank].clone()
        dist.broadcast(x, root)
        assert torch.equal(x.view(torch.uint8), xs[root].view(torch.uint8)), dtype
    xs = inputs(c, (4, 5), torch.float32, 40)
    x = xs[c.rank].clone()
    dist.broadcast(x.T, 2 % c.size)
    assert torch.equal(x, xs[2 % c.size])
    for shape in ((), (0,), (0, 3)):
        dist.broadcast(torch.empty(shape), 0)


@check
def all_gather_forms(c):
    """all_gather collects every rank's tensor, as a list, as one tensor, coalesced, and of different sizes."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int16):
        xs = inputs(c, (5, 7), dtype, 50)
        out = [torch.empty_like(x) for x in xs]
        dist.all_gather(out, xs[c.rank])
        assert all(map(torch.equal, out, xs))
        joined = torch.empty((5 * c.size, 7), dtype=dtype)
        dist.all_gather_into_tensor(joined, xs[c.rank])
        assert torch.equal(joined, torch.cat(xs))
    xs = inputs(c, (5, 7), torch.float32, 51)
    stacked = torch.empty(c.size, 5, 7)
    dist.all_gather_into_tensor(stacked, xs[c.rank])
    assert torch.equal(stacked, torch.stack(xs))
    out = [torch.empty(7, 5).T for x in xs]
    dist.all_gather(out, xs[c.rank].T.contiguous().T)
    assert all(map(torch.equal, out, xs))
    aliased = torch.zeros(c.size, 5, 7)  # the input is a part of the output, as in FSDP
    aliased[c.rank] = xs[c.rank]
    dist.all_gather_into_tensor(aliased, aliased[c.rank])
    assert torch.equal(aliased, torch.stack(xs))
    with dist.distributed_c10d._coalescing_manager():
        ys = [torch.empty(c.size * 7), torch.empty(c.size * 4)]
        dist.all_gather_into_tensor(ys[0], xs[c.rank][0])
        dist.all_gather_into_tensor(ys[1], xs[c.rank][1, :4].clone())
    assert torch.equal(ys[0], torch.cat([x[0] for x in xs]))
    assert torch.equal(ys[1], torch.cat([x[1, :4] for x in xs]))
    uneven = [given(rank, (rank + 1, 2), torch.float64, 52) for rank in range(c.size)]
    out = [torch.empty_like(x) for x in uneven]
    dist.all_gather(out, uneven[c.rank])
    assert all(map(torch.equal, out, uneven))
    empty = [torch.empty(0) for _ in xs]
    dist.all_gather(empty, torch.empty(0))


@check
def reduce_scatter_forms(c):
    """reduce_scatter gives rank k the reduction of the k-th tensors of all ranks, in every form."""
    for op, dtype in ((SUM, torch.float32), (AVG, torch.bfloat16), (MAX, torch.int32), (PRODUCT, torch.float64)):
        xs = [[given(rank, (3, 5), dtype, 60 + part) for part in range(c.size)] for rank in range(c.size)]
        wanted = [x[c.rank] for x in xs]
        out = torch.empty(3, 5, dtype=dtype)
        dist.reduce_scatter(out, xs[c.rank], op)
        expect_reduced(out, op, wanted)
        out.zero_()
        dist.reduce_scatter_tensor(out, torch.stack(xs[c.rank]), op)
        expect_reduced(out, op, wanted)
        aliased = torch.stack(xs[c.rank])
        dist.reduce_scatter_tensor(aliased[c.rank], aliased, op)
        expect_reduced(aliased[c.rank], op, wanted)
    xs = [[given(rank, (part + 1, 2), torch.float32, 70 + part) for part in range(c.size)] for rank in range(c.size)]
    out = torch.empty(c.rank + 1, 2)
    dist.reduce_scatter(out, xs[c.rank], SUM)
    expect_reduced(out, SUM, [x[c.rank] for x in xs])
    ys = [given(rank, (2 * c.size, 3), torch.float32, 80) for rank in range(c.size)]
    outs = [torch.empty(2, 3), torch.empty(3, 2).T]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, ys[c.rank])
    for out in outs:
        expect_reduced(out, SUM, [y[2 * c.rank : 2 * c.rank + 2] for y in ys])


@check
def gather_and_scatter(c):
    """gather collects tensors on the root, and scatter distributes those of the root."""
    for root in range(c.size):
        for dtype in (torch.float32, torch.int8, torch.complex64):
            xs = inputs(c, (4, 9), dtype, 90 + root)
            out = [torch.empty_like(x) for x in xs] if c.rank == root else None
            dist.gather(xs[c.rank], out, root)
            assert c.rank != root or all(map(torch.equal, out, xs))
            parts = [given(part, (4, 9), dtype, 95 + root) for part in range(c.size)]
            got = torch.empty(9, 4, dtype=dtype).T
            dist.scatter(got, parts if c.rank == root else None, root)
            assert torch.equal(got, parts[c.rank])


@check
def all_to_all_forms(c):
    """all_to_all gives rank k the k-th part of every rank: equal or different parts, as lists and as one tensor."""
    n = c.size
    for dtype in (torch.float32, torch.complex64, torch.uint8):
        xs = [[given(n * src + dst, (3, 2), dtype, 100) for dst in range(n)] for src in range(n)]
        out = [torch.empty(3, 2, dtype=dtype) for _ in range(n)]
        dist.all_to_all(out, xs[c.rank])
        assert all(torch.equal(out[src], xs[src][c.rank]) for src in range(n))
        joined = torch.empty(3 * n, 2, dtype=dtype)
        dist.all_to_all_single(joined, torch.cat(xs[c.rank]))
        assert torch.equal(joined, torch.cat([x[c.rank] for x in xs]))
    # Only rank 0's own parts are equal.
    rows = [[2 if 0 in (src, dst) else 1 + (src + 2 * dst) % 4 for dst in range(n)] for src in range(n)]
    xs = [[given(n * src + dst, (rows[src][dst], 2), torch.float32, 101) for dst in range(n)] for src in range(n)]
    out = [torch.empty(rows[src][c.rank], 2) for src in range(n)]
    dist.all_to_all(out, xs[c.rank])
    assert all(torch.equal(out[src], xs[src][c.rank]) for src in range(n))
    joined = torch.empty(sum(rows[src][c.rank] for src in range(n)), 2)
    dist.all_to_all_single(joined, torch.cat(xs[c.rank]), [rows[src][c.rank] for src in range(n)], rows[c.rank])
    assert torch.equal(joined, torch.cat([x[c.rank] for x in xs]))
    splits = [[1] * n] * 2 if c.rank == 0 else []  # equal parts, which only one rank states
    moved = torch.empty(n)
    dist.all_to_all_single(moved, torch.arange(float(n)) + 10 * c.rank, *splits)
    assert torch.equal(moved, torch.arange(float(n)) * 10 + c.rank)
    wrong = [1] * n
    raises(
        ValueError,
        "another number of elements",
        dist.all_to_all_single,
        torch.empty(n),
        torch.empty(n + n),
        wrong,
        [2] * n,
    )
    dist.barrier()


@check
def messages_between_two_ranks(c):
    """The inner backend carries messages between two ranks, with tags and from any source."""
    after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    sent, got = given(c.rank, (100,), torch.float32, 110), torch.empty(100)
    works = [dist.isend(sent, after, tag=4), dist.irecv(got, before, tag=4)]
    for work in works:
        work.wait()
    assert torch.equal(got, given(before, (100,), torch.float32, 110))
    ops = [dist.P2POp(dist.isend, sent[:7].clone(), after), dist.P2POp(dist.irecv, got[:7], before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    sides = torch.zeros(100, 2)
    works = [dist.isend(sent, after), dist.irecv(sides[:, 1], before)]
    for work in works:
        work.wait()
    assert torch.equal(sides, torch.stack([torch.zeros(100), got]).T)
    if c.rank:
        dist.send(sent[::2], 0)
    else:
        sources = set()
        for _ in range(c.size - 1):
            part = torch.empty(50)
            src = dist.recv(part)
            sources.add(src)
            assert torch.equal(part, given(src, (100,), torch.float32, 110)[::2])
        assert sources == set(range(1, c.size))


@check
def objects(c):
    """Collectives of Python objects run on those of tensors."""
    out = [None] * c.size
    dist.all_gather_object(out, {"rank": c.rank, "text": "x" * c.rank})
    assert out == [{"rank": rank, "text": "x" * rank} for rank in range(c.size)]
    listed = [c.rank, "a" * 5000] if c.rank == 1 else [None, None]
    dist.broadcast_object_list(listed, 1)
    assert listed == [1, "a" * 5000]
    got = [None]
    dist.scatter_object_list(got, list(range(c.size)) if c.rank == 0 else None, 0)
    assert got == [c.rank]
    listed = [None] * c.size if c.rank == 0 else None
    dist.gather_object(c.rank**2, listed, 0)
    assert c.rank or listed == [rank**2 for rank in range(c.size)]


@check
def asynchronous_calls(c):
    """Asynchronous calls run in order, and a synchronous call runs after them."""
    x = given(c.rank, (1000,), torch.float64, 120)
    y = x.clone()
    works = [dist.all_reduce(y, async_op=True) for _ in range(20)]
    dist.all_reduce(y, AVG)
    assert all(work.is_completed() for work in works)
    for work in works:
        assert work.wait() is True
        assert work.is_success()
    total = torch.stack(inputs(c, (1000,), torch.float64, 120)).sum(0) * float(c.size) ** 19
    torch.testing.assert_close(y, total)
    work = dist.all_reduce(x, async_op=True)
    (result,) = work.get_future().wait()
    assert result.data_ptr() == x.data_ptr()
    work = dist.broadcast(x, 0, async_op=True)
    halved = work.get_future().then(lambda done: done.value()[0] / 2).wait()
    assert torch.equal(halved, x / 2)
    works = [dist.barrier(async_op=True), dist.reduce(x, 0, async_op=True)]
    works.append(dist.all_gather([torch.empty_like(x) for _ in range(c.size)], x, async_op=True))
    for work in works:
        work.wait(timedelta(seconds=20))


@check
def ops_in_callbacks(c):
    """Ops that a callback of a future calls run, also if the callback waits for them in the queue's thread."""
    waits = (lambda y: dist.all_reduce(y), lambda y: dist.all_reduce(y, async_op=True).wait())
    for wait in (*waits, lambda y: dist.all_reduce(y, async_op=True).get_future().wait()):
        x, y = given(c.rank, (200_000,), torch.float32, 125), given(c.rank, (9,), torch.float32, 126)
        work = dist.all_reduce(x, async_op=True)
        work.get_future().then(lambda _, wait=wait, y=y: wait(y)).wait()
        expect_reduced(y, SUM, inputs(c, (9,), torch.float32, 126))


@check
def coalesced_all_reduces(c):
    """All-reduces of several shapes in a coalescing block complete at its end."""
    xs = [given(c.rank, (k,), torch.float32, 130 + k) for k in (1, 10, 100)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for k, x in zip((1, 10, 100), xs, strict=True):
        expect_reduced(x, SUM, inputs(c, (k,), torch.float32, 130 + k))


@check
def inner_backend(c):
    """gloo executes sparse and bitwise reductions, which crossreduce does not support."""
    bits = [given(rank, (9, 4), torch.int32, 140) for rank in range(c.size)]
    for op, function in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BXOR, torch.bitwise_xor)):
        x = bits[c.rank].clone()
        dist.all_reduce(x.T, op)
        want = bits[0]
        for other in bits[1:]:
            want = function(want, other)
        assert torch.equal(x, want)
    out = torch.empty(3, 4, dtype=torch.int32)
    dist.reduce_scatter_tensor(out, torch.cat(inputs(c, (3, 4), torch.int32, 141)), dist.ReduceOp.BOR)
    assert torch.equal(out, given(c.rank, (3, 4), torch.int32, 141))
    dense = given(c.rank, (20,), torch.float32, 142)
    dense[dense < 0.5] = 0
    sparse = dense.to_sparse()
    dist.all_reduce(sparse)
    every = inputs(c, (20,), torch.float32, 142)
    for x in every:
        x[x < 0.5] = 0
    torch.testing.assert_close(sparse.to_dense(), sum(every))


@check
def inner_backend_releases_tensors(c):
    """When an op returns, gloo has released its tensors, however late its threads get the interpreter."""

    class Watched:
        def __init__(self, gloo):
            self.gloo, self.given = gloo, []

        def allreduce(self, tensors, options):
            self.given.append(weakref.ref(tensors[0]))
            return self.gloo.allreduce(tensors, options)

    collectives, interval = dist.group.WORLD._collectives, sys.getswitchinterval()
    collectives._gloo = watched = Watched(collectives._gloo)
    sys.setswitchinterval(100)
    try:
        for x in [torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.int32)] * 10:
            dist.all_reduce(x, SUM if x.is_sparse else dist.ReduceOp.BAND)
            assert watched.given.pop()() is None
    finally:
        sys.setswitchinterval(interval)
        collectives._gloo = watched.gloo


@check
def references_cause_no_delay(c):
    """References to a sparse tensor during its reduction delay neither this rank nor others."""
    tensor, seen, took = torch.eye(300).to_sparse(), [], []
    for _ in range(5):
        begun = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            seen.append(tensor)
            time.sleep(0)
        work.wait()
        took.append(time.monotonic() - begun)
    assert min(took) < 0.5, took


@check
def sparse_leaf(c):
    """A sparse tensor that requires gradients, coalesced or not, is reduced like others."""
    every = [torch.sparse_coo_tensor([[0, 0, rank + 1]], given(rank, (3,)), (c.size + 1,)) for rank in range(c.size)]
    for tensor in (every[c.rank].clone(), every[c.rank].coalesce()):
        leaf = tensor.requires_grad_()
        dist.all_reduce(leaf)
        assert leaf.is_leaf
        torch.testing.assert_close(leaf.detach().to_dense(), sum(x.to_dense() for x in every))


@check
def errors_of_a_subgroup_have_global_ranks(c):
    """Errors of a sub-group name its ranks by their numbers in the world."""
    group = dist.new_group([0, 2])
    if c.rank != 1:
        raises(ValueError, "rank 2 differs from rank 0 in shape", dist.all_reduce, torch.ones(3 + c.rank), group=group)
        dist.destroy_process_group(group)


@check
def unsupported_calls(c):
    """Unsupported calls raise on all ranks, and the group can still be used."""
    raises(TypeError, "the mean of integers is not an integer", dist.all_reduce, torch.ones(3, dtype=torch.int64), AVG)
    raises(TypeError, "mean of bools", dist.all_reduce, torch.ones(3, dtype=torch.bool), AVG)
    raises(ValueError, "do not fit together", dist.all_gather_into_tensor, torch.empty(5), torch.empty(7))
    raises(ValueError, "do not fit together", dist.all_gather, [torch.empty(5)], torch.empty(5))
    raises(ValueError, "do not fit together", dist.all_to_all, [], [])
    raises(TypeError, "dist.new_group", dist.group.WORLD.split_group, [0])
    work = dist.all_reduce(torch.ones(3, dtype=torch.int32), AVG, async_op=True)
    future = work.get_future()
    raises(TypeError, "the mean of integers", work.wait)
    raises(TypeError, "the mean of integers", future.wait)
    assert work.exception() is not None
    dist.barrier()


@check
def mismatch(c):
    """If calls of ranks differ, all ranks raise the same MismatchError, and the group can still be used."""
    from crossreduce import MismatchError

    x = torch.ones(10 + (c.rank == 1))
    error = raises(MismatchError, "rank 1", dist.all_reduce, x)
    DIGESTS["mismatch"] = str(error)
    work = dist.all_reduce(torch.ones(3), MAX if c.rank == 0 else MIN, async_op=True)
    raises(MismatchError, "rank 0", work.wait)
    sparse = torch.ones(3).to_sparse()
    raises(MismatchError, "rank 1", dist.all_reduce, sparse if c.rank == 1 else sparse.to_dense())
    moved_as_bytes = torch.float8_e5m2 if c.rank == 1 else torch.float8_e4m3fn
    raises(MismatchError, "rank 1", dist.broadcast, torch.ones(3).to(moved_as_bytes), 0)
    shape = tuple(range(2, 2 + c.size))  # the shape of one rank's tensor, and the sizes of all tensors on other ranks
    sizes = shape if c.rank == 1 else [torch.Size(shape).numel()] * c.size
    x = torch.ones(sizes[c.rank] if c.rank == 1 else shape)
    raises(MismatchError, "rank 1", dist.all_gather, [torch.empty(size).reshape(-1) for size in sizes], x)
    y = torch.full((3,), 4.0**c.rank)
    dist.all_reduce(y)
    assert torch.equal(y, torch.full((3,), sum(4.0**rank for rank in range(c.size))))


@check
def subgroups(c):
    """Groups of some ranks, of another backend, and several groups in threads at once are independent."""
    pair = dist.new_group([0, c.size - 1])
    alone = dist.new_group([1])
    plain = dist.new_group(backend="gloo")
    groups = [dist.new_group() for _ in range(3)]
    assert dist.get_backend(groups[0]) == "crossreduce"
    assert dist.get_backend(plain) == "gloo"
    if c.rank in (0, c.size - 1):
        x = given(c.rank, (50,), torch.float32, 150)
        dist.all_reduce(x, group=pair)
        expect_reduced(x, SUM, [given(rank, (50,), torch.float32, 150) for rank in (0, c.size - 1)])
        listed = [c.rank]
        dist.broadcast_object_list(listed, c.size - 1, group=pair)
        assert listed == [c.size - 1]
    if c.rank == 1:
        x = given(1, (5,))
        dist.all_reduce(x, AVG, group=alone)
        assert torch.equal(x, given(1, (5,)))
    x = given(c.rank, (50,), torch.float32, 151)
    dist.all_reduce(x, group=plain)
    torch.testing.assert_close(x, sum(inputs(c, (50,), torch.float32, 151)))
    failures = []

    def work(number):
        try:
            for turn in range(30):
                x = given(c.rank, (200 * (number + 1),), torch.float32, 160 + number + 10 * turn)
                want = inputs(c, (200 * (number + 1),), torch.float32, 160 + number + 10 * turn)
                dist.all_reduce(x, group=groups[number])
                expect_reduced(x, SUM, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for group in groups:
        dist.destroy_process_group(group)
    for _ in range(3):  # repeatedly the same name
        ranks = [0, 1] if c.rank < 2 else list(range(2, c.size))
        group = dist.new_group(ranks, use_local_synchronization=True)
        x = given(c.rank, (5,), torch.float64, 155)
        dist.all_reduce(x, group=group)
        expect_reduced(x, SUM, [given(rank, (5,), torch.float64, 155) for rank in ranks])
        dist.destroy_process_group(group)
    x = torch.ones(1)
    raises(Exception, "", dist.all_reduce, x, group=groups[0])


@check
def methods_of_the_group(c):
    """The methods of the group accept the arguments of torch's groups."""
    group = dist.group.WORLD
    assert (group.rank(), group.size(), group.name()) == (c.rank, c.size, "crossreduce")
    x = given(c.rank, (5,), torch.float32, 170)
    xs = inputs(c, (5,), torch.float32, 170)
    y = x.clone()
    group.allreduce(y).wait()
    expect_reduced(y, SUM, xs)
    y = x.clone()
    group.allreduce([y], op=MAX).wait()
    expect_reduced(y, MAX, xs)
    y = x.clone()
    group.broadcast(y, 1).wait()
    assert torch.equal(y, xs[1])
    out = [torch.empty(5) for _ in xs]
    group.allgather(out, x).wait()
    assert all(map(torch.equal, out, xs))
    group.barrier().wait()
    out = [[torch.empty(5), torch.empty(2)] for _ in xs]
    group.allgather_coalesced(out, [x, x[:2].clone()]).wait()
    assert all(torch.equal(a, want) and torch.equal(b, want[:2]) for (a, b), want in zip(out, xs, strict=True))


@check
def functional_collectives(c):
    """Functional collectives, which C++ calls, and a device mesh run on the backend."""
    import torch.distributed._functional_collectives as functional

    xs = inputs(c, (4, 6), torch.float32, 180)
    x = xs[c.rank]
    group = dist.group.WORLD
    expect_reduced(functional.wait_tensor(functional.all_reduce(x, "sum", group)), SUM, xs)
    expect_reduced(functional.wait_tensor(functional.all_reduce(x, "avg", group)), AVG, xs)
    gathered = functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
    assert torch.equal(gathered, torch.cat(xs))
    wide = given(c.rank, (2 * c.size, 3), torch.float32, 181)
    part = functional.wait_tensor(functional.reduce_scatter_tensor(wide, "sum", 0, group))
    wides = [given(rank, (2 * c.size, 3), torch.float32, 181) for rank in range(c.size)]
    expect_reduced(part, SUM, [w[2 * c.rank : 2 * c.rank + 2] for w in wides])
    moved = functional.wait_tensor(functional.all_to_all_single(wide, None, None, group))
    assert torch.equal(moved, torch.cat([w[2 * c.rank : 2 * c.rank + 2] for w in wides]))
    most = list(map(functional.wait_tensor, functional.all_reduce_coalesced([x, x + 1], "max", group)))
    expect_reduced(most[0], MAX, xs)
    expect_reduced(most[1], MAX, [x + 1 for x in xs])
    mesh = dist.init_device_mesh("cpu", (c.size,), mesh_dim_names=("data",))
    assert dist.get_backend(mesh.get_group()) == "crossreduce"
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = given(0, (9, 4), torch.float32, 182)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(spread.full_tensor(), whole)
    torch.testing.assert_close(spread.sum().redistribute(mesh, [Replicate()]).to_local(), whole.sum())


@check
def topology(c):
    """measure_topology returns the same devices and links on all ranks, and reductions are planned on them."""
    import crossreduce
    from crossreduce.torch import measure_topology

    found = measure_topology(seconds=0.2)
    assert len(found.devices) == c.size
    DIGESTS["topology"] = repr(found.links)
    xs = inputs(c, (70_000,), torch.float32, 190)
    x = xs[c.rank].clone()
    dist.all_reduce(x)
    expect_reduced(x, SUM, xs)
    record_digest("topology sum", x)
    assert crossreduce.plan(found, "all_reduce", nbytes=1 << 20).seconds > 0
    raises(ValueError, "not a group that crossreduce reduces", measure_topology, dist.new_group(backend="gloo"))


@check
def forked(c):
    """A process forked from a rank, such as a worker of DataLoader, cannot use the group, and does not affect it."""
    pid = os.fork()
    if not pid:
        try:
            raises(RuntimeError, "forked", dist.all_reduce, torch.ones(3))
            raises(RuntimeError, "forked", dist.barrier, async_op=True)
            raises(RuntimeError, "forked", dist.isend, torch.ones(3), (c.rank + 1) % c.size)
            raises(RuntimeError, "forked", dist.irecv, torch.ones(3), (c.rank + 1) % c.size)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    data = torch.utils.data.DataLoader(list(range(20)), batch_size=5, num_workers=1)
    assert sum(int(batch.sum()) for batch in data) == 190
    dist.barrier()


class Context:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()


def run(checks, folder):
    """Run checks on this rank, and write its report."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import crossreduce.torch  # noqa: F401

    def begin(number):
        where = f"file://{folder}/store{number}"
        dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timedelta(seconds=20))

    begin(0)
    context, failed = Context(), {}
    for name, function in checks.items():
        try:
            function(context)
        except BaseException:
            failed[name] = traceback.format_exc()
            print(f"rank {rank}, {name}: {failed[name]}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    # Later groups need no further threads and descriptors.
    counts = []
    for number in range(1, 4):
        begin(number)
        for group in (None, dist.new_group()):
            x = torch.full((1000,), 4.0**rank)
            work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()
            assert x[7] == sum(4.0**other for other in range(size))
        del group, work
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # caught errors reference frames, which reference groups
        listed = [len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")]
        counts.append([threading.active_count(), *listed])
    report = {"failed": failed, "digests": DIGESTS, "counts": counts}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run({name: CHECKS[name] for name in sys.argv[2:] or CHECKS}, sys.argv[1])
