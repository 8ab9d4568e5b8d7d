"""Checks of test_torch_backend.py: exact sums of tensors, compared with rational arithmetic."""

import os

import numpy as np
import torch
import torch.distributed as dist
from exact_cases import UNSIGNED, exact_sums, terms_of, wide
from torch.nn.parallel import DistributedDataParallel
from torch_oracle import Checks, raises

import crossreduce as cr
from crossreduce.torch import HookState, Options, all_reduce_hook

CHECKS = Checks()
SIZE = 400
STORED = {name: getattr(torch, f"int{8 * np.dtype(bits).itemsize}") for name, bits in UNSIGNED.items()}


def tensor(bits, dtype):
    """Return bits as a tensor of a dtype."""
    return torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(getattr(torch, dtype))


def inputs(c, dtype):
    """Return the tensors of all ranks, and their bits."""
    terms = terms_of(wide, 5, dtype, c.size, SIZE)
    return [tensor(row, dtype) for row in terms], terms


def expect(x, bits, dtype):
    got = x.detach().contiguous().view(STORED[dtype]).numpy().view(bits.dtype)
    assert (got.ravel() == bits).all(), dtype


def reduced(c, group):
    """Check every reduction of a group, twice, since the second call may be prepared."""
    for dtype in UNSIGNED:
        every, terms = inputs(c, dtype)
        total, mean = exact_sums(terms, dtype), exact_sums(terms, dtype, c.size)
        for _ in range(2):
            dist.all_reduce(x := every[c.rank].clone(), group=group)
            expect(x, total, dtype)
            dist.all_reduce(x := every[c.rank].clone(), dist.ReduceOp.AVG, group=group)
            expect(x, mean, dtype)
            dist.reduce(x := every[c.rank].clone(), 1, group=group)
            expect(x, total if c.rank == 1 else terms[c.rank], dtype)
            rows, out = (torch.stack([every[c.rank].roll(k) for k in range(c.size)]), torch.empty_like(x))
            dist.reduce_scatter_tensor(out, rows, group=group)
            expect(out, np.roll(total, c.rank), dtype)
            dist.reduce_scatter(out, list(rows), dist.ReduceOp.AVG, group=group)
            expect(out, np.roll(mean, c.rank), dtype)
        grid = every[c.rank].reshape(20, 20).clone().T
        dist.all_reduce(grid, group=group)
        expect(grid.T, total, dtype)
    every, terms = inputs(c, "float32")
    x = torch.view_as_complex(every[c.rank].reshape(-1, 2).clone())
    dist.all_reduce(x, group=group)
    expect(torch.view_as_real(x), exact_sums(terms, "float32"), "float32")


@CHECKS.add
def groups_with_options(c):
    """``pg_options`` of new_group decide whether its sums are exact. Without them, CROSSREDUCE_EXACT decides."""
    assert "CROSSREDUCE_EXACT" not in os.environ
    reduced(c, dist.new_group(pg_options=Options(exact=True)))
    every, terms = inputs(c, "float32")
    os.environ["CROSSREDUCE_EXACT"] = "1"
    dist.all_reduce(x := every[c.rank].clone(), group=dist.new_group())
    expect(x, exact_sums(terms, "float32"), "float32")
    inexact = dist.new_group(pg_options=Options())
    os.environ["CROSSREDUCE_EXACT"] = "yes"
    raises(cr.ArgumentError, "CROSSREDUCE_EXACT must be 0 or 1", dist.new_group)
    del os.environ["CROSSREDUCE_EXACT"]
    raises(cr.ArgumentError, "not the options of a process group", lambda: dist.new_group(pg_options={"exact": True}))
    raises(cr.ArgumentError, "exact must be True or False", lambda: Options(exact=1))
    dist.all_reduce(x := every[c.rank].clone(), group=inexact)
    bits = x.view(torch.int32).numpy().view("u4")
    assert (bits != exact_sums(terms, "float32")).any(), "by default some sums are rounded otherwise"


@CHECKS.add
def what_is_refused(c):
    """Products of floats, and sums that gloo would compute, raise an error on all ranks. Other calls still work."""
    group = dist.new_group(pg_options=Options(exact=True))
    x = torch.ones(4)
    raises(cr.UnsupportedError, "a product cannot be exact", lambda: dist.all_reduce(x, dist.ReduceOp.PRODUCT, group))
    sparse = torch.ones(4).to_sparse()
    raises(cr.UnsupportedError, "can be summed exactly", lambda: dist.all_reduce(sparse, group=group))
    for op, result in ((dist.ReduceOp.PRODUCT, 2**c.size), (dist.ReduceOp.BOR, 2), (dist.ReduceOp.SUM, 2 * c.size)):
        y = torch.full((3,), 2)
        dist.all_reduce(y, op, group)
        assert (y == result).all(), op
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    dist.all_reduce(x, group=group)
    assert (x == c.size).all()


@CHECKS.add
def ranks_with_different_options(c):
    """If only some ranks have exact=True, sums and products of floats raise an error that names these ranks, and
    nothing is reduced. Sums of integers work, since they are always exact."""
    group, x = dist.new_group(pg_options=Options(exact=c.rank == 0)), torch.full((3,), float(c.rank))
    for call, text in (
        (lambda: dist.all_reduce(x, group=group), "all_reduce {}sum float32[3]"),
        (lambda: dist.reduce(x, 0, group=group), "reduce {}sum root 0 float32[3]"),
        (lambda: dist.all_reduce(x, dist.ReduceOp.PRODUCT, group), "all_reduce {}product float32[3]"),
    ):
        error = raises(cr.MismatchError, "rank 0 differs from ranks 1, 2 in op at op ", call)
        assert f"given: rank 0: {text.format('exact_')}; ranks 1, 2: {text.format('')}\n" in str(error)
    assert (x == c.rank).all()
    dist.all_reduce(counts := torch.tensor([c.rank]), group=group)
    assert counts.item() == sum(range(c.size))


@CHECKS.add
def the_hook_of_ddp(c):
    """With the exact hook, DDP's gradients are the exact mean of all ranks' gradients, rounded once."""
    every, terms = inputs(c, "float32")
    due = exact_sums(terms, "float32", c.size)
    for exact, value in ((True, "0"), (None, "1")):
        os.environ["CROSSREDUCE_EXACT"] = value
        model = torch.nn.Linear(SIZE, 1, bias=False)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(HookState(exact=exact), all_reduce_hook)
        del os.environ["CROSSREDUCE_EXACT"]
        ddp(every[c.rank].reshape(1, SIZE)).sum().backward()  # the gradient of the weights is the input
        expect(model.weight.grad, due, "float32")
