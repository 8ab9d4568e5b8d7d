"""Helpers for checks of crossreduce.torch: inputs from seeds, an oracle, and the function that runs checks on a rank.

The oracle makes the inputs of all ranks itself and reduces them with plain torch, in double precision.
"""

import gc
import hashlib
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import crossreduce.torch

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DIGESTS = {}


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
    """Check a reduction: integers exactly, and floats within the bound of rounding errors (Higham, SISC 1993)."""
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
    if op == AVG and wide is torch.int64:  # as in NCCL: the sum wraps around, the quotient is truncated
        want = torch.div(ys.sum(0).to(dtype).to(wide), len(xs), rounding_mode="trunc")
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


class Checks(list):
    """A list of checks: functions of a rank's context, which has ``rank`` and ``size``."""

    def add(self, function):
        self.append(function)
        return function


def call_directly():
    """Let this process make the synchronous all-reduces of groups of crossreduce without ``torch.distributed``."""
    in_torch = dist.all_reduce

    def all_reduce(tensor, op=SUM, group=None, async_op=False):
        used, joined = group or dist.group.WORLD, dist.distributed_c10d._world.pg_coalesce_state
        if async_op or used in joined or not isinstance(used, crossreduce.torch.Group):
            return in_torch(tensor, op, group, async_op)
        assert used.all_reduce(tensor, op) is tensor
        return None

    dist.all_reduce = all_reduce


def run(rendezvous, checks, folder, direct=()):
    """Run checks in a group of all ranks. Then make, use and destroy groups three times. ``direct``: ranks that call
    ``all_reduce`` of the group, while the others call that of ``torch.distributed``.

    Return the errors of failed checks, the digests, and after each time [Python threads, threads, descriptors].
    """
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    warnings.simplefilter("ignore")  # torch's warnings about functions that have newer names
    rank, size = rendezvous.rank, rendezvous.size

    def begin(number):
        where = f"file://{folder}/store{number}"
        dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timedelta(seconds=20))

    if rank in direct:
        call_directly()
    begin(0)
    failed, counts = [], []
    for check in checks:
        try:
            check(SimpleNamespace(rank=rank, size=size))
        except BaseException:
            failed.append(f"{check.__name__}: {traceback.format_exc()}")
    dist.destroy_process_group()
    crossreduce.empty_cache()
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
    return failed, DIGESTS, counts
