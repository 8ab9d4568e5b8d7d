"""The ends of ranks: ``python torch_endings.py SCENE FOLDER`` runs one rank of a test in test_torch_backend_ends.py."""

import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch_oracle import given, raises

import crossreduce.torch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def begin(folder, timeout_s=20.0, backend="crossreduce"):
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, f"file://{folder}/store", rank=RANK, world_size=SIZE, timeout=timeout)


def stay(*ranks):
    """Wait until other ranks have ended the scene."""
    while not all(Path(sys.argv[2], f"{sys.argv[1]}-{rank}").exists() for rank in ranks):
        time.sleep(0.01)


def interrupt_soon(seconds=0.5):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def total():
    x = torch.full((1000,), 4.0**RANK)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), sum(4.0**rank for rank in range(SIZE))))


def without_destroy(folder):
    """The process ends without destroying the groups, whose threads wait for further ops."""
    begin(folder)
    other = dist.new_group()
    total()
    dist.all_reduce(torch.ones(3), group=other, async_op=True).wait()


def unfinished_in_gloo(folder):
    """Groups of rank 0 end while gloo waits for ranks that do not execute the op: the op fails, and the thread ends."""
    from crossreduce import PeerLostError
    from crossreduce.torch.op_queue import Finished

    begin(folder)
    groups = [dist.new_group() for _ in range(2)]
    for group in groups if RANK else []:  # the other ranks make the call, but do not take part in gloo's
        group._collectives._gloo = SimpleNamespace(allreduce=lambda *_: Finished([]))
    works = [dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BAND, x, async_op=True) for x in groups]
    if RANK:
        for work in works:
            raises(PeerLostError, "rank 0 left during", work.wait)
        stay(0)
        return
    time.sleep(0.5)
    for end, work, group in zip((groups[0].abort, groups[1]._end), works, groups, strict=True):
        end()
        assert not group.queue._thread.is_alive()
        raises(PeerLostError, "rank 0 left during", work.wait)


def ends_during_gloo(folder):
    """End all ranks while gloo waits for a late one; when an op completes, gloo holds no reference to its tensor."""
    from crossreduce.torch.collectives import Collectives

    def watched(self, text, run, tensors, options):
        before = sys.getrefcount(tensors[0])
        run_in_gloo(self, text, run, tensors, options)
        if sys.getrefcount(tensors[0]) > before:
            os._exit(3)

    begin(folder)
    run_in_gloo, Collectives._run_in_gloo = Collectives._run_in_gloo, watched
    sys.setswitchinterval(100)
    if RANK == 1:
        time.sleep(0.5)
    for _ in range(5):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BAND, async_op=True)


def destroyed_with_a_pending_op(folder):
    """Rank 0 destroys its group while an op waits for late ranks: it waits for them once, and then the op fails."""
    from crossreduce import PeerLostError

    begin(folder)
    total()
    if RANK:
        stay(0)
        raises(PeerLostError, "rank 0 left during op 2, all_reduce", dist.barrier)
        return
    crossreduce.torch.group._DRAIN_S, crossreduce.torch.connections._LEAVE_S = 0.5, 10.0
    work = dist.all_reduce(torch.ones(3), async_op=True)
    begun = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begun >= 0.5
    raises(PeerLostError, "rank 0 left during op 2, all_reduce", work.wait)


def interrupted(folder):
    """Rank 0 is interrupted while it waits for the others; their next call then raises ConnectionError."""
    begin(folder, 300)
    total()
    if RANK == 0:
        interrupt_soon()
        raises(KeyboardInterrupt, "", dist.all_reduce, torch.ones(3))
    else:
        stay(0)
        raises(ConnectionError, "rank 0", dist.all_reduce, torch.ones(3))


def interrupted_in_recv(folder):
    """Rank 0 is interrupted while it waits for a message; its and the others' next calls name it, and the directory of
    the dumps, in which the doctor finds the reason."""
    from crossreduce import PeerLostError
    from crossreduce.cli.doctor.diagnosis import diagnose
    from crossreduce.observe.flight_recorder import read

    dumps = os.environ["CROSSREDUCE_DUMP_DIR"] = f"{folder}/dumps"
    begin(folder, 300)
    x = torch.ones(3)
    if RANK == 0:
        dist.recv(x, 1)
        assert x.tolist() == [7, 7, 7]
        interrupt_soon()
        raises(KeyboardInterrupt, "", dist.recv, x)
    elif RANK == 1:
        dist.send(torch.full((3,), 7.0), 0)
    waited = "was interrupted while it waited for a message"
    error = raises(PeerLostError, f"rank 0 {waited}", dist.barrier)
    assert f"; crossreduce doctor {dumps} shows the last calls" in str(error), error
    found = diagnose(read(Path(dumps)).dumps)
    assert found.behind == (0,)
    assert re.match(rf"rank 0 \(pid \d+ on \S+\) {waited}\.", found.findings[0]), found.findings
    assert all("rank 0 is behind" not in line for line in found.findings)


def model_of(hooked=False):
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50), bucket_cap_mb=0.001)
    if hooked:
        model.register_comm_hook(None, crossreduce.torch.all_reduce_hook)
    return model


def interrupted_in_backward(folder):
    """Rank 0 is interrupted while DDP waits for gradients; its backward() raises KeyboardInterrupt."""
    begin(folder, 300)
    model = model_of()
    if RANK == 0:
        interrupt_soon(1.0)
        raises(KeyboardInterrupt, "", lambda: model(given(RANK, (8, 50))).sum().backward())
    else:
        stay(0)


def killed_in_backward(folder, backend="crossreduce"):
    """Rank 1 is killed; the others' backward() raises PeerLostError."""
    from crossreduce import PeerLostError

    begin(folder, 300, backend)
    model = model_of(backend == "gloo")
    for _ in range(3):
        model(given(RANK, (8, 50))).sum().backward()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raises(PeerLostError, "rank 1", lambda: model(given(RANK, (8, 50))).sum().backward())
    assert error.ranks == (1,)
    if backend == "crossreduce":
        raises(PeerLostError, "rank 1", dist.barrier)


def killed_in_hook(folder):
    """Rank 1 is killed while DDP on gloo uses the hook; the others' backward() raises PeerLostError."""
    killed_in_backward(folder, "gloo")


def late(folder):
    """Rank 1 makes no further call; the others raise after the timeout of one wait, then after that of the group."""
    from crossreduce import CollectiveTimeout

    begin(folder, 2)
    total()
    if RANK == 1:
        stay(0, 2)
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    raises(CollectiveTimeout, "the timeout of this wait", work.wait, timedelta(seconds=0.5))
    assert not work.is_completed()
    error = raises(CollectiveTimeout, "rank 1", work.wait)
    assert error.ranks == (1,)


def late_for_one_call(folder):
    """Rank 1 makes no call; the others raise after the timeout of their call, or the one set for the group."""
    from crossreduce import CollectiveTimeout

    begin(folder, 300)
    total()
    groups = [dist.new_group() for _ in range(3)]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), groups[1])
    groups[2].set_timeout(timedelta(seconds=1))
    if RANK == 1:
        stay(0, 2)
        return
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=1)
    waits = [
        lambda: groups[0].allreduce([torch.ones(3)], options).wait(),
        lambda: dist.all_reduce(torch.ones(3), group=groups[1]),
        lambda: dist.all_reduce(torch.ones(3), group=groups[2], async_op=True).wait(),
        lambda: dist.barrier(timeout=timedelta(seconds=1)),
    ]
    for wait in waits:
        raises(CollectiveTimeout, "the timeout of 1 s", wait)


def composed(folder):
    """Use the backend for the CPU together with another one for CUDA, and make a further group."""
    begin(folder, backend="cpu:crossreduce,cuda:nccl")
    total()
    group = dist.new_group()
    dist.barrier(group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert crossreduce.torch.NAME == "crossreduce"
    globals()[sys.argv[1]](sys.argv[2])
    Path(sys.argv[2], f"{sys.argv[1]}-{RANK}").write_text("done")
