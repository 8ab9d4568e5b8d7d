"""Checks of test_torch_backend.py: every collective, in every form, compared with an oracle.

The oracle makes all ranks' inputs from seeds and reduces them in double precision with plain torch.
"""

import torch
import torch.distributed as dist
from torch_oracle import (
    AVG,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Checks,
    expect_reduced,
    given,
    inputs,
    raises,
    record_digest,
)

SHAPES = [(), (0,), (1,), (7, 3), (300_001,), (2_000_003,)]
CHECKS = Checks()


@CHECKS.add
def all_reduce_every_op_dtype_and_shape(c):
    """all_reduce gives all ranks the same bits, which equal the oracle's result up to rounding errors."""
    ops = SUM, AVG, MIN, MAX, PRODUCT
    cases = [(op, dtype) for op in ops for dtype in (*FLOATS, *INTEGERS)]
    cases += [(op, dtype) for op in (SUM, AVG) for dtype in COMPLEX]
    cases += [(op, torch.bool) for op in (SUM, MIN, MAX, PRODUCT)]
    for salt, (op, dtype) in enumerate(cases):
        for shape in SHAPES if (op, dtype) in ((SUM, torch.float32), (AVG, torch.bfloat16)) else [(41, 25)]:
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


@CHECKS.add
def forms_of_tensors(c):
    """Tensors with another memory format, a lazy conjugation, or gradients are reduced like others."""
    images = inputs(c, (2, 3, 4, 5), torch.float32, 6)
    x = images[c.rank].to(memory_format=torch.channels_last)
    dist.all_reduce(x)
    expect_reduced(x, SUM, images)
    parameter = torch.nn.Parameter(images[c.rank].clone())
    dist.all_reduce(parameter)
    expect_reduced(parameter.detach(), SUM, images)
    zs = inputs(c, (5,), torch.complex64, 7)
    z = zs[c.rank].clone().conj()
    dist.reduce(z, 1)
    if c.rank == 1:
        expect_reduced(z.resolve_conj(), SUM, [z.conj().resolve_conj() for z in zs])
    else:
        assert torch.equal(z, zs[c.rank].conj())


@CHECKS.add
def every_collective_of_every_dtype(c):
    """Each collective gives the right values for each dtype, also for dtypes that cannot be reduced.

    For other forms, sizes, strides and overlaps see test_torch_overlap.py.
    """
    n = c.size
    for salt, dtype in enumerate([*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn]):
        source, root = (torch.float32 if dtype is torch.float8_e4m3fn else dtype, salt % n)
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


@CHECKS.add
def coalesced_calls(c):
    """All calls in a block of ``_coalescing_manager`` are executed."""
    xs, outs = (inputs(c, (2 * c.size, 3), torch.float32, 51), [torch.empty(2, 3), torch.empty(3, 2).T])
    gathered = [torch.empty(c.size * 3), torch.empty(c.size * 2)]
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(gathered[0], xs[c.rank][0])
        dist.all_gather_into_tensor(gathered[1], xs[c.rank][1, :2].clone())
    assert torch.equal(gathered[0], torch.cat([x[0] for x in xs]))
    assert torch.equal(gathered[1], torch.cat([x[1, :2] for x in xs]))
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, xs[c.rank])
    for out in outs:
        expect_reduced(out, SUM, [x[2 * c.rank : 2 * c.rank + 2] for x in xs])


@CHECKS.add
def splits_of_all_to_all(c):
    """A rank may pass equal splits that others omit. Numbers of rows that do not match are an error on all ranks."""
    n = c.size
    splits = [[1] * n] * 2 if c.rank == 0 else []
    moved = torch.empty(n)
    dist.all_to_all_single(moved, torch.arange(float(n)) + 10 * c.rank, *splits)
    assert torch.equal(moved, torch.arange(float(n)) * 10 + c.rank)
    call = dist.all_to_all_single, torch.empty(n), torch.empty(n + n), [1] * n, [2] * n
    raises(ValueError, "another number of rows", *call)
    parts = [2] * n if c.rank == 0 else [2] + [1] * (n - 1)  # those of rank 0 do not add up
    raises(ValueError, "rank 0", dist.all_to_all_single, torch.empty(n + 1), torch.empty(n + 1), parts, parts)
    received, sent, width = [2 - (c.rank > 0)] * n, [2] + [1] * (n - 1), 3 - (c.rank > 0)
    rows = torch.zeros(sum(received), width), torch.zeros(n + 1, width)
    raises(ValueError, "rows of 8 and 12 bytes", dist.all_to_all_single, *rows, received, sent)
    dist.barrier()


@CHECKS.add
def messages_between_two_ranks(c):
    """Messages between two ranks arrive, with tags and from any source, in memory and between hosts (by gloo)."""
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
