"""Checks of test_torch_backend.py: training with torch's tools for several processes.

Most checks compare with the same model, trained on all ranks' samples in one process. It is float64, so that rounding
differences are tiny.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_oracle import Checks, given, raises

from crossreduce.torch import HookState, all_reduce_hook

CHECKS = Checks()


class Model(torch.nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 33)
        self.second = torch.nn.Linear(33, 5, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.never = torch.nn.Linear(4, 4) if unused else None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x):
        self.calls += 1
        return self.second(torch.tanh(self.first(x))) * self.scale


def loss_of(model, rank, step):
    x, y = (given(rank, (6, width), torch.float64, 10 * step + width) for width in (7, 5))
    return ((model(x) - y) ** 2).mean()


def trained(model, ranks, steps=3, optimizer=None):
    """Train on the samples of ``ranks``, and return the gradients of the last step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in ranks) / len(ranks)).backward()
        optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


def expect_close(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@CHECKS.add
def ddp(c):
    """In each mode, DistributedDataParallel gives the same gradients and weights as training in one process."""
    for options in (
        {},
        {"static_graph": True},
        {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0005, "find_unused_parameters": True},
    ):
        unused = "find_unused_parameters" in options
        alone = Model(unused)
        want = trained(alone, range(c.size))
        model = Model(unused)
        if c.rank:
            for p in model.parameters():  # DDP replaces them by the parameters of rank 0
                p.data.normal_()
        replica = DistributedDataParallel(model, **options)
        got = trained(replica, [c.rank])
        used = [p for name, p in model.named_parameters() if "never" not in name]
        expect_close([p.grad for p in used], want)
        expect_close(list(model.parameters()), list(alone.parameters()))
        assert unused or len(got) == len(want)


@CHECKS.add
def ddp_accumulates_and_joins(c):
    """With no_sync, gradients are accumulated on each rank. With join, ranks may have fewer batches than others."""
    model, alone = Model(), Model()
    replica = DistributedDataParallel(model)
    with replica.no_sync():
        loss_of(replica, c.rank, 0).backward()
    loss_of(replica, c.rank, 1).backward()
    for step in (0, 1):
        (sum(loss_of(alone, rank, step) for rank in range(c.size)) / c.size).backward()
    expect_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
    with replica.join():
        for step in range(c.rank + 1):
            loss_of(replica, c.rank, step).backward()
    dist.barrier()


@CHECKS.add
def hook(c):
    """all_reduce_hook reduces the gradients of DDP on gloo, with each kind of state, and inside a hook of torch."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    gloo = dist.new_group(backend="gloo")
    alone = Model()
    want = trained(alone, range(c.size))
    state = HookState(gloo)
    for given_state in (state, gloo, dist.group.WORLD, None):
        model = Model()
        replica = DistributedDataParallel(model, process_group=gloo, bucket_cap_mb=0.0005)
        replica.register_comm_hook(given_state, all_reduce_hook)
        expect_close(trained(replica, [c.rank]), want)
    model = Model()
    replica = DistributedDataParallel(model, process_group=gloo)
    replica.register_comm_hook(state, fp16_compress_wrapper(all_reduce_hook))
    for one, other in zip(trained(replica, [c.rank], 1), trained(Model(), range(c.size), 1), strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=1e-4)
    state.close()
    state.close()


@CHECKS.add
def hook_that_reduces_in_callbacks(c):
    """torch's PowerSGD hook works. It calls collectives, and waits for them, in callbacks of futures."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = torch.nn.Linear(40, 40)
    replica = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        replica(given(c.rank, (4, 40), torch.float32, step)).square().sum().backward()
    grads = torch.empty(c.size, 40, 40)
    dist.all_gather_into_tensor(grads, model.weight.grad)
    assert torch.equal(grads, model.weight.grad.expand_as(grads))
    assert bool(grads.isfinite().all())


@CHECKS.add
def hook_after_another(c):
    """The hook ``before`` of a HookState runs first, and the value of its future is reduced."""
    gloo = dist.new_group(backend="gloo")
    seen, doubled = [], []

    def twice(state, bucket):
        seen.append(bucket.index())
        assert state == "mine"
        future = torch.futures.Future()
        doubled.append(bucket.buffer() * 2)
        future.set_result(doubled[-1])
        return future

    model = Model()
    replica = DistributedDataParallel(model, process_group=gloo)
    state = HookState(gloo, before=twice, before_state="mine")
    replica.register_comm_hook(state, all_reduce_hook)
    got = trained(replica, [c.rank], 1)
    expect_close([g / 2 for g in got], trained(Model(), range(c.size), 1))
    assert seen
    assert min(x._version for x in doubled) > 0  # autograd is told that the hook has written into them
    raises(ValueError, "not a process group", HookState, "world")
    state.close()


@CHECKS.add
def fully_sharded(c):
    """FSDP2 on the CPU gives the same gradients and weights as training in one process."""
    from torch.distributed.fsdp import fully_shard

    alone, model = Model(), Model()
    want = trained(alone, range(c.size))
    mesh = dist.init_device_mesh("cpu", (c.size,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got = trained(model, [c.rank])
    expect_close([g.full_tensor() for g in got], want)
    expect_close([p.full_tensor() for p in model.parameters()], list(alone.parameters()))


@CHECKS.add
def zero_redundancy(c):
    """ZeroRedundancyOptimizer, which shards the optimizer's state, gives the weights of training in one process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    alone, model = Model(), Model()
    trained(alone, range(c.size), optimizer=torch.optim.Adam(alone.parameters(), 0.01))
    replica = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.Adam, lr=0.01)
    trained(replica, [c.rank], optimizer=optimizer)
    for p, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-8, atol=1e-9)
    optimizer.consolidate_state_dict(0)


@CHECKS.add
def compiled_replica(c):
    """With DDP and torch.compile, a model gets the same gradients as in one process, up to rounding."""
    alone, model = Model().float(), Model().float()
    replica = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    for step in range(3):
        alone.zero_grad()
        model.zero_grad()
        xs = [given(rank, (6, 7), torch.float32, step) for rank in range(c.size)]
        (sum(alone(x).square().mean() for x in xs) / c.size).backward()
        replica(xs[c.rank]).square().mean().backward()
    for p, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-4, atol=1e-6)


@CHECKS.add
def differentiable(c):
    """The differentiable all_reduce of torch.distributed.nn works on the backend, and so does its gradient."""
    from torch.distributed.nn.functional import all_reduce

    x = given(c.rank, (5,), torch.float64).requires_grad_()
    (all_reduce(x) ** 2).sum().backward()
    total = sum(given(rank, (5,), torch.float64) for rank in range(c.size))
    torch.testing.assert_close(x.grad, 2 * c.size * total)


@CHECKS.add
def mismatch_in_ddp(c):
    """``backward`` raises a MismatchError if the calls of DDP, which C++ code makes, differ between ranks."""
    from crossreduce import MismatchError

    class ExtraCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if c.rank == 1:  # one more call than the other ranks make
                dist.all_reduce(torch.ones(3), async_op=True)
            return grad

    model = Model()
    replica = DistributedDataParallel(model)
    x = given(c.rank, (6, 7), torch.float64)
    raises(MismatchError, "rank 1", lambda: ExtraCall.apply(replica(x)).sum().backward())
    if c.rank != 1:
        raises(MismatchError, "rank 1", dist.barrier)
    dist.barrier()
