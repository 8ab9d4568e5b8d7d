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
def every_collective_of_every_dtype(c):
    """Each collective gives the right values of each dtype, also of those that cannot be reduced.

    Forms, sizes, strides and overlaps are drawn in test_torch_overlap.py.
    """
    n = c.size
    for salt, dtype in enumerate([*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn]):
        source, root = torch.float32 if dtype is torch.float8_e4m3fn else dtype, salt % n
        xs = [torch.stack([given(rank, (4, 9), source, 20 + part) for part in range(n)]).to(dtype) for rank in range(n)]
        x, firsts = xs[c.rank], [rows[0] for rows in xs]
        out = [torch.empty_like(each) for each in firsts]
        dist.broadcast(copied := x[0].clone(), root)
        expect_same([copied], [firsts[root]])
        dist.all_gather(out, x[0].clone())
        expect_same(out, firsts)
        dist.all_gather_into_tensor(joined := torch.empty((4 * n, 9), dtype=dtype), x[0].clone())
        expect_same([joined], [torch.cat(firsts)])
        dist.gather(x[0].clone(), out if c.rank == root else None, root)
        expect_same(out, firsts)
        dist.scatter(got := torch.empty_like(x[0]), list(x) if c.rank == root else None, root)
        expect_same([got], [xs[root][c.rank]])
        dist.all_to_all_single(moved := torch.empty_like(x), x)
        expect_same([moved], [torch.stack([rows[c.rank] for rows in xs])])
        if dtype not in (torch.bool, torch.float8_e4m3fn):
            own = [rows[c.rank] for rows in xs]
            for op in (SUM, AVG):
                dist.reduce_scatter_tensor(got := torch.empty_like(x[0]), x, op)
                expect_reduced(got, op, own)
                dist.reduce(total := x[0].clone(), root, op)
                if c.rank == root:
                    expect_reduced(total, op, firsts)
                else:
                    expect_same([total], [x[0]])


def expect_same(got, wanted):
    """Check that tensors have the same bits."""
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), one.dtype


@check
def coalesced_and_aliased_gathers(c):
    """Blocks that coalesce calls run all of them, and an input may be a part of the output, as in FSDP."""
    xs = inputs(c, (5, 7), torch.float32, 51)
    aliased = torch.zeros(c.size, 5, 7)
    aliased[c.rank] = xs[c.rank]
    dist.all_gather_into_tensor(aliased, aliased[c.rank])
    assert torch.equal(aliased, torch.stack(xs))
    with dist.distributed_c10d._coalescing_manager():
        ys = [torch.empty(c.size * 7), torch.empty(c.size * 4)]
        dist.all_gather_into_tensor(ys[0], xs[c.rank][0])
        dist.all_gather_into_tensor(ys[1], xs[c.rank][1, :4].clone())
    assert torch.equal(ys[0], torch.cat([x[0] for x in xs]))
    assert torch.equal(ys[1], torch.cat([x[1, :4] for x in xs]))
    ys, outs = (
        [given(rank, (2 * c.size, 3), torch.float32, 80) for rank in range(c.size)],
        [torch.empty(2, 3), torch.empty(3, 2).T],
    )
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, ys[c.rank])
    for out in outs:
        expect_reduced(out, SUM, [y[2 * c.rank : 2 * c.rank + 2] for y in ys])


@check
def splits_of_all_to_all(c):
    """Only one rank may pass equal splits explicitly; numbers of rows that do not match raise on all ranks."""
    n = c.size
    splits = [[1] * n] * 2 if c.rank == 0 else []
    moved = torch.empty(n)
    dist.all_to_all_single(moved, torch.arange(float(n)) + 10 * c.rank, *splits)
    assert torch.equal(moved, torch.arange(float(n)) * 10 + c.rank)
    call = dist.all_to_all_single, torch.empty(n), torch.empty(n + n), [1] * n, [2] * n
    raises(ValueError, "another number of rows", *call)
    dist.barrier()


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


CHECKS |= torch_group_checks.CHECKS

if __name__ == "__main__":
    run({name: CHECKS[name] for name in sys.argv[2:] or CHECKS}, sys.argv[1])
