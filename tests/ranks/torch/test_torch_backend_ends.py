"""The errors of ranks when others end, are late, interrupted or killed: in collectives, gloo, messages and DDP.

A scene is a function that every rank executes. A rank that is not killed must reach its end.
"""

import os
import re
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import die, wait_until
from ranks import Died, ranks
from torch_oracle import given, raises
from torch_running import HERE, finish, start

import crossreduce.torch
from crossreduce import CollectiveTimeout, PeerLostError
from crossreduce.cli.doctor.diagnosis import diagnose
from crossreduce.observe.flight_recorder import read
from crossreduce.torch.op_queue import Finished


class Rank:
    """A rank of a scene: its number, the number of ranks, and a folder for files."""

    def __init__(self, rendezvous, folder):
        self.rank, self.size, self.folder = rendezvous.rank, rendezvous.size, folder

    def begin(self, timeout_s=100.0, backend="crossreduce"):
        """Make the default group, and reduce once."""
        where, timeout = f"file://{self.folder}/store", timedelta(seconds=timeout_s)
        dist.init_process_group(backend, where, rank=self.rank, world_size=self.size, timeout=timeout)
        x = torch.full((1000,), 4.0**self.rank)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((1000,), sum(4.0**rank for rank in range(self.size))))

    def stay(self, *others):
        """Wait until other ranks have ended the scene."""
        wait_until(lambda: all((self.folder / f"ended{rank}").exists() for rank in others))


def plays(rendezvous, scene, folder):
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    me = Rank(rendezvous, folder)
    scene(me)
    (folder / f"ended{me.rank}").touch()
    return "ended"


def interrupt_soon(seconds=0.5):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def unfinished_in_gloo(me):
    """If groups of rank 0 end while gloo waits for other ranks in an op, the op fails, and the queue's thread ends."""
    me.begin()
    groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(3).to_sparse(), group=group)  # makes gloo's group
    for group in groups if me.rank else []:  # the other ranks make the call, but do not take part in gloo's
        group._collectives._gloo = SimpleNamespace(allreduce=lambda *_: Finished([]), size=lambda: 1)
    works = [dist.all_reduce(torch.ones(3).to_sparse(), group=x, async_op=True) for x in groups]
    if me.rank:
        for work in works:
            raises(PeerLostError, "rank 0 left during", work.wait)
        me.stay(0)
        return
    time.sleep(0.5)
    for end, work, group in zip((groups[0].abort, groups[1]._end), works, groups, strict=True):
        end()
        assert not group.queue._thread.is_alive()
        raises(PeerLostError, "rank 0 left during", work.wait)


def killed_while_gloo_connects(me):
    """Rank 1 dies while gloo's group is made, for the first sparse tensor. The others raise a PeerLostError."""
    os.environ["CROSSREDUCE_HOST"] = "aab"[me.rank]
    me.begin(300)
    if me.rank == 1:
        dist.ProcessGroupGloo = lambda *_args, **_options: die()
    error = raises(PeerLostError, "rank 1 died during op", dist.all_reduce, torch.ones(3).to_sparse())
    assert error.ranks == (1,)


def interrupted_while_gloo_connects(me):
    """Ctrl-C ends rank 1's wait for gloo's group. The others raise a PeerLostError that names it."""
    os.environ["CROSSREDUCE_HOST"] = "aab"[me.rank]
    me.begin(300)
    if me.rank == 1:
        dist.ProcessGroupGloo = lambda *_args, **_options: time.sleep(600)
        interrupt_soon()
        raises(KeyboardInterrupt, "", dist.all_reduce, torch.ones(3).to_sparse())
    else:
        raises(PeerLostError, "rank 1 was interrupted during op", dist.all_reduce, torch.ones(3).to_sparse())


def destroyed_with_a_pending_op(me):
    """If rank 0 destroys its group while an op waits for late ranks, it first waits ``_DRAIN_S``. Then the op fails."""
    me.begin()
    if me.rank:
        me.stay(0)
        raises(PeerLostError, "rank 0 left during op 2, all_reduce", dist.barrier)
        return
    crossreduce.torch.group._DRAIN_S, crossreduce.torch.connections._LEAVE_S = 0.5, 10.0
    work = dist.all_reduce(torch.ones(3), async_op=True)
    begun = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begun >= 0.5
    raises(PeerLostError, "rank 0 left during op 2, all_reduce", work.wait)


def interrupted(me):
    """Rank 0 is interrupted while it waits for the others. Their next call then raises a ConnectionError."""
    me.begin(300)
    if me.rank == 0:
        interrupt_soon()
        raises(KeyboardInterrupt, "", dist.all_reduce, torch.ones(3))
    else:
        me.stay(0)
        raises(ConnectionError, "rank 0", dist.all_reduce, torch.ones(3))


def interrupted_in_recv(me):
    """Rank 0 is interrupted while it waits for a message. The errors of the next calls on all ranks name rank 0 and the
    directory of the dumps. From these dumps ``diagnose`` finds the reason."""
    dumps = os.environ["CROSSREDUCE_DUMP_DIR"] = f"{me.folder}/dumps"
    me.begin(300)
    x = torch.ones(3)
    if me.rank == 0:
        dist.recv(x, 1)
        assert x.tolist() == [7, 7, 7]
        interrupt_soon()
        raises(KeyboardInterrupt, "", dist.recv, x)
    elif me.rank == 1:
        dist.send(torch.full((3,), 7.0), 0)
    waited = "was interrupted while it waited for a message"
    error = raises(PeerLostError, f"rank 0 {waited}", dist.barrier)
    assert f"; crossreduce doctor {dumps} shows the last calls" in str(error), error
    found = diagnose(read(Path(dumps)).dumps)
    assert found.behind == (0,)
    assert re.match(rf"rank 0 \(pid \d+ on \S+\) {waited}\.", found.findings[0]), found.findings
    assert all("rank 0 is behind" not in line for line in found.findings)


def late_message(me):
    """A message to rank 1 does not come in time, and rank 1 leaves. The others do not learn that it was interrupted."""
    os.environ["CROSSREDUCE_HOST"] = "aba"[me.rank]
    me.begin(300)
    if me.rank == 1:
        raises(CollectiveTimeout, "within its timeout", dist.irecv(torch.ones(3), 0).wait, timedelta(seconds=0.5))
        dist.destroy_process_group()
    else:
        raises(PeerLostError, "rank 1 left during", dist.barrier)


def model_of(hooked=False):
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50), bucket_cap_mb=0.001)
    if hooked:
        model.register_comm_hook(None, crossreduce.torch.all_reduce_hook)
    return model


def interrupted_in_backward(me):
    """Rank 0 is interrupted while DDP waits for gradients. Its ``backward`` raises KeyboardInterrupt."""
    me.begin(300)
    model = model_of()
    if me.rank == 0:
        interrupt_soon(1.0)
        raises(KeyboardInterrupt, "", lambda: model(given(me.rank, (8, 50))).sum().backward())
    else:
        me.stay(0)


def killed_in_backward(me, backend="crossreduce"):
    """Rank 1 is killed. ``backward`` raises a PeerLostError on the others."""
    me.begin(300, backend)
    model = model_of(backend == "gloo")
    for _ in range(3):
        model(given(me.rank, (8, 50))).sum().backward()
    if me.rank == 1:
        die()
    error = raises(PeerLostError, "rank 1", lambda: model(given(me.rank, (8, 50))).sum().backward())
    assert error.ranks == (1,)
    if backend == "crossreduce":
        raises(PeerLostError, "rank 1", dist.barrier)


def killed_in_hook(me):
    """Rank 1 is killed while DDP on gloo uses the hook. ``backward`` raises a PeerLostError on the others."""
    killed_in_backward(me, "gloo")


def late(me):
    """Rank 1 makes no more calls. The others raise errors after the timeout of the call, the group or one wait."""
    me.begin(2)
    short, groups = timedelta(seconds=0.4), [dist.new_group(timeout=timedelta(seconds=300)) for _ in range(5)]
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.14 prefers the next way
        dist.distributed_c10d._set_pg_timeout(short, groups[1])
    groups[2].set_timeout(short)
    groups[4].set_timeout(short)
    if me.rank == 1:
        me.stay(0, 2)
        return
    options = dist.AllreduceOptions()
    options.timeout = short
    for wait in (
        lambda: groups[0].allreduce([torch.ones(3)], options).wait(),
        lambda: dist.all_reduce(torch.ones(3), group=groups[1]),
        lambda: dist.all_reduce(torch.ones(3), group=groups[2], async_op=True).wait(),
        lambda: dist.barrier(groups[3], timeout=short),
        lambda: crossreduce.torch.weighted_mean(torch.ones(3), 1, groups[4]),
    ):
        raises(CollectiveTimeout, "the timeout of 0.4 s", wait)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    raises(CollectiveTimeout, "the timeout of this wait", work.wait, short)
    assert not work.is_completed()
    error = raises(CollectiveTimeout, "rank 1", work.wait)
    assert error.ranks == (1,)


def composed(me):
    """A group with this backend for the CPU and another one for CUDA works, and so does a second group."""
    me.begin(backend="cpu:crossreduce,cuda:nccl")
    group = dist.new_group()
    dist.barrier(group=group)
    dist.destroy_process_group()


SCENES = [unfinished_in_gloo, interrupted, destroyed_with_a_pending_op, composed, late, interrupted_in_backward]
SCENES += [
    interrupted_in_recv,
    late_message,
    killed_while_gloo_connects,
    interrupted_while_gloo_connects,
    killed_in_backward,
    pytest.param(killed_in_hook, marks=pytest.mark.system),
]


@pytest.mark.parametrize("scene", SCENES)
def test_scene(tmp_path, scene):
    """Every rank reaches the end of the scene, except rank 1 if the scene kills it."""
    killed = 1 if scene in (killed_in_backward, killed_in_hook, killed_while_gloo_connects) else None
    for rank, one in enumerate(ranks(3, plays, scene, tmp_path, check=False)):
        as_expected = isinstance(one, Died) if rank == killed else one == "ended"
        assert as_expected, getattr(one, "__notes__", one)


def test_debug_detail(tmp_path):
    """Ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL run and end without an error. (torch reads it when it is imported.)"""
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    program = ["-u", HERE / "torch_exits.py", "itself", "kept", tmp_path / "store"]
    outputs = finish(start(program, 2, lambda rank: environment), 200)
    assert [status for status, _ in outputs] == [0, 0], outputs
