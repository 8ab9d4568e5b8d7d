"""The program of each rank in test_torch_backend.py: every collective, in every form, compared with an oracle.

``python torch_checks.py FOLDER [CHECK ...]`` with RANK and WORLD_SIZE set runs the named checks, or all, and writes the
failures, and digests of results that all ranks must share, to FOLDER. The oracle makes all ranks' inputs from seeds and
reduces them in double precision with plain torch, without communication.
"""

import sys

import torch
import torch.distributed as dist
import torch_group_checks
from torch_oracle import (
    AVG,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    expect_reduced,
    given,
    inputs,
    raises,
    record_digest,
    run,
)

SHAPES = [(), (0,), (1,), (7, 3), (1025,), (300_001,)]
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def all_reduce_every_op_dtype_and_shape(c):
    """all_reduce gives all ranks the same bits, which are the oracle's result up to rounding errors."""
    cases = [(op, dtype) for op in (SUM, AVG, MIN, MAX, PRODUCT) for dtype in FLOATS]
    cases += [(op, dtype) for op in (SUM, AVG, MIN, MAX, PRODUCT) for dtype in INTEGERS]
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
    for dtype in (torch.float64, torch.int8):
        xs = inputs(c, (4, 6), dtype, 17)
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
    cases = ((SUM, torch.float32), (AVG, torch.bfloat16), (AVG, torch.int8), (MAX, torch.int32))
    for op, dtype in (*cases, (PRODUCT, torch.float64)):
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
    # Rank 0 sends and receives parts of equal sizes; those of the other ranks differ in size.
    rows = [[2 if 0 in (src, dst) else 1 + (src + 2 * dst) % 4 for dst in range(n)] for src in range(n)]
    xs = [[given(n * src + dst, (rows[src][dst], 2), torch.float32, 101) for dst in range(n)] for src in range(n)]
    out = [torch.empty(rows[src][c.rank], 2) for src in range(n)]
    dist.all_to_all(out, xs[c.rank])
    assert all(torch.equal(out[src], xs[src][c.rank]) for src in range(n))
    joined = torch.empty(sum(rows[src][c.rank] for src in range(n)), 2)
    dist.all_to_all_single(joined, torch.cat(xs[c.rank]), [rows[src][c.rank] for src in range(n)], rows[c.rank])
    assert torch.equal(joined, torch.cat([x[c.rank] for x in xs]))
    splits = [[1] * n] * 2 if c.rank == 0 else []  # equal parts, which only rank 0 passes explicitly
    moved = torch.empty(n)
    dist.all_to_all_single(moved, torch.arange(float(n)) + 10 * c.rank, *splits)
    assert torch.equal(moved, torch.arange(float(n)) * 10 + c.rank)
    wrong = [1] * n
    raises(
        ValueError, "another number of rows", dist.all_to_all_single, torch.empty(n), torch.empty(n + n), wrong, [2] * n
    )
    dist.barrier()


@check
def overlapping_tensors(c):
    """Collectives of tensors that overlap give what they give on copies; if results overlap, all ranks raise."""
    for size in (3, 300_001):
        whole = inputs(c, (c.size * size,), torch.float64, 102)
        parts = [x.split(size) for x in whole]
        for start in (0, size // 2, size, size + 1):
            z = whole[c.rank].clone()
            dist.reduce_scatter_tensor(z[start : start + size], z)
            expect_reduced(z[start : start + size], SUM, [x[c.rank] for x in parts])
        for source in range(c.size):
            outs = [x.clone() for x in parts[c.rank]]
            dist.all_gather(outs, outs[source])
            assert all(torch.equal(out, x[source]) for out, x in zip(outs, parts, strict=True))
            ins = [x.clone() for x in parts[c.rank]]
            outs = ins[source:] + ins[:source]
            dist.all_to_all(outs, ins)
            assert all(torch.equal(out, x[c.rank]) for out, x in zip(outs, parts, strict=True))
        for shift in (0, 1, size):
            z = torch.cat([whole[c.rank], torch.empty(size)])
            dist.all_to_all_single(z[shift : shift + c.size * size], z[: c.size * size])
            assert torch.equal(z[shift : shift + c.size * size], torch.cat([x[c.rank] for x in parts]))
    x, y = torch.ones(3), torch.zeros(9)
    raises(ValueError, "share memory", dist.all_gather, [y[k : k + 3] for k in range(c.size)], x)
    apart = [y[4 * k : 4 * k + 1] for k in range(c.size)] if c.rank else [y[:1]] * c.size  # only rank 0 is at fault
    raises(ValueError, "rank 0: all_gather", dist.all_gather, apart, x[:1])
    raises(ValueError, "share memory", dist.all_reduce, y[:1].expand(4))
    raises(ValueError, "share memory", lambda: dist.group.WORLD.allreduce_coalesced([y[:3], y[2:]]).wait())
    assert not y.any()
    twice = 2 * [torch.full((2,), 4.0**c.rank)]  # a tensor that all ranks list twice is reduced once, as in gloo
    dist.group.WORLD.allreduce_coalesced(twice).wait()
    assert torch.equal(twice[0], torch.full((2,), sum(4.0**rank for rank in range(c.size))))


@check
def messages_between_two_ranks(c):
    """Messages between two ranks arrive, with tags and from any source: in memory, or between hosts with gloo."""
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
    """torch's collectives of Python objects, which call those of tensors, give the right objects."""
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


CHECKS |= torch_group_checks.CHECKS

if __name__ == "__main__":
    run({name: CHECKS[name] for name in sys.argv[2:] or CHECKS}, sys.argv[1])
