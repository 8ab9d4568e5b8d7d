"""Groups of torch.distributed and of crossreduce.processes with the same methods, for tests that apply to both."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from paths import ROOT
from ranks import ranks

import crossreduce.torch as crt
from crossreduce import processes
from crossreduce.errors import CollectiveTimeout, PeerLostError
from crossreduce.ranks.transports import choice
from crossreduce.torch import elastic

LONG_S = 1800.0
PLACES = {  # where the ranks are, and what carries messages between hosts
    "one_host": ("AAA", {}),
    "two_hosts": ("ABB", {}),
    "three_hosts": ("ABC", {}),
    "ucx": ("ABC", {"CROSSREDUCE_TRANSPORT": "ucx", "UCX_TLS": "tcp"}),
    "plug_in": ("ABC", {"CROSSREDUCE_TRANSPORT": "page"}),  # that of docs/how-to/rdma.md
}


class Torch:
    """The default group of ``torch.distributed``. The rendezvous is in a folder, or at an address."""

    places = dict.fromkeys(("agree", "shrink", "grow", "join"), elastic)  # where a storm may let ranks fail

    def __init__(self, rendezvous, folder, timeout_s=LONG_S):
        """Make the group of all ranks. Without a rendezvous, make no group."""
        torch.set_num_threads(1)
        if rendezvous is not None:
            rank, size = rendezvous.rank, rendezvous.size
            where = f"tcp://{folder}" if ":" in str(folder) else f"file://{folder}/store"
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timeout)

    @property
    def group(self):
        return dist.group.WORLD

    rank = property(lambda self: dist.get_rank())
    size = property(lambda self: dist.get_world_size())

    def total(self):
        return total()

    def shrink(self, **options):
        return elastic.shrink(**options).reformed

    def grow(self, **options):
        return elastic.grow(**options) is not None

    def committed(self, step, **options):
        return elastic.committed(step, **options)

    def set_timeout(self, timeout_s):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))

    def broadcast(self, numbers):
        state = torch.tensor(numbers)
        dist.broadcast(state, 0)
        return map(int, state)

    def random_calls(self, draw, size, numbers):
        """Make some collectives of ``size`` elements, and return the sum of all ranks' ``numbers``."""
        x, big, works = torch.tensor(numbers, dtype=torch.int64), torch.ones(size), []
        if draw.random() < 0.5:
            works.append(dist.all_reduce(big, async_op=draw.random() < 0.5))
        if draw.random() < 0.2:
            parts = [torch.empty_like(big) for _ in range(self.size)]
            works.append(dist.all_gather(parts, big.clone(), async_op=draw.random() < 0.5))
        if draw.random() < 0.2:
            dist.barrier()
        dist.all_reduce(x)
        for work in filter(None, works):
            work.wait()
        return map(int, x)

    def agree(self, *arguments, **options):
        return elastic.agree(*arguments, **options)

    def join(self, invitation, **options):
        elastic.join(invitation, **options)

    invitation = staticmethod(crt.invitation)
    leave = staticmethod(dist.destroy_process_group)


class Numpy:
    """A group of ``crossreduce.processes``. The rendezvous is at the address ``where``."""

    places = dict.fromkeys(("agree", "shrink", "grow"), processes.RankGroup) | {"join_invited": processes}

    def __init__(self, rendezvous, where, timeout_s=LONG_S):
        """Make the group of all ranks. Without a rendezvous, make no group."""
        self.group = rendezvous and processes.join(rendezvous.rank, rendezvous.size, where, timeout_s=timeout_s)

    rank = property(lambda self: self.group.rank)
    size = property(lambda self: self.group.size)

    def total(self):
        return summed(self.group)

    def shrink(self, **options):
        self.group = self.group.shrink(**options)
        return self.group.reformed

    def grow(self, **options):
        grown = self.group.grow(**options)
        self.group = grown or self.group
        return grown is not None

    def committed(self, step, **options):
        def run(group):
            self.group = group
            return step()

        self.group, result = self.group.committed(run, **options)
        return result

    def set_timeout(self, timeout_s):
        self.group.communicator.timeout_s = timeout_s

    def broadcast(self, numbers):
        return map(int, self.group.broadcast(np.array(numbers, np.int64), 0))

    def random_calls(self, draw, size, numbers):
        """Make some collectives of ``size`` elements, and return the sum of all ranks' ``numbers``."""
        x, big = np.array(numbers, np.int64), np.ones(size, np.float32)
        if draw.random() < 0.5:
            self.group.all_reduce(big, out=big)
        if draw.random() < 0.2:
            self.group.all_gather(big)
        if draw.random() < 0.2:
            self.group.barrier()
        return map(int, self.group.all_reduce(x))

    def agree(self, *arguments, **options):
        return self.group.agree(*arguments, **options)

    def join(self, invitation, **options):
        self.group = processes.join_invited(invitation, **options)

    def invitation(self):
        return self.group.invitation()

    def leave(self):
        self.group.close()


def total(group=None):
    """Return the sum of the ranks' numbers plus one, times ten, in a group of torch."""
    x = torch.tensor([10 * (dist.get_rank(group) + 1)])
    dist.all_reduce(x, group=group)
    return int(x)


def summed(group):
    """Return the sum of the ranks' numbers plus one, times ten, in a group of NumPy arrays."""
    return int(group.all_reduce(np.full(3, 10 * (group.rank + 1)))[0])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose(group):
    """Make calls until one fails because ranks were lost. Return these ranks."""
    while True:
        try:
            group.total()
        except (PeerLostError, CollectiveTimeout) as error:
            return error.ranks


def wait_until(condition):
    while not condition():
        time.sleep(0.01)


def wait_until_stopped(process):
    """Wait until all threads of a process have stopped."""
    states = [each / "stat" for each in Path(f"/proc/{process}/task").iterdir()]
    wait_until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in states))


def ranks_at(place, count, function, *arguments, **options):
    """Run ``function`` in ``count`` ranks. See ``PLACES``."""
    hosts, variables = PLACES[place]
    page = SimpleNamespace()
    exec((ROOT / "docs/how-to/rdma.md").read_text().split("```py\n")[1].split("```")[0], page.__dict__)
    choice._others = lambda: {"page": SimpleNamespace(load=lambda: page)}
    environment = [{"CROSSREDUCE_HOST": host, **variables} for host in hosts[:count]]
    return ranks(count, function, *arguments, environment=environment, **options)
