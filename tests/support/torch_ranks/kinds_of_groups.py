"""Groups of torch.distributed and of crossreduce.processes with the same methods, for tests of what both promise."""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import crossreduce.torch as crt
from crossreduce import processes
from crossreduce.errors import CollectiveTimeout, PeerLostError

LONG_S = 1800.0


class Torch:
    """The default group of ``torch.distributed``."""

    def __init__(self, rendezvous, folder, timeout_s=LONG_S):
        """Make the group of all ranks, or none if there is no rendezvous."""
        torch.set_num_threads(1)
        if rendezvous is not None:
            rank, size, where = rendezvous.rank, rendezvous.size, f"file://{folder}/store"
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
        return crt.shrink(**options).reformed

    def grow(self, **options):
        return crt.grow(**options) is not None

    def committed(self, step, **options):
        return crt.committed(step, **options)

    agree = staticmethod(crt.agree)
    join = staticmethod(crt.join)
    invitation = staticmethod(crt.invitation)
    leave = staticmethod(dist.destroy_process_group)


class Numpy:
    """A group of ``crossreduce.processes``; the ranks meet at ``where``, an address."""

    def __init__(self, rendezvous, where, timeout_s=LONG_S):
        """Make the group of all ranks, or none if there is no rendezvous."""
        self.group = rendezvous and processes.join(rendezvous.rank, rendezvous.size, where, timeout_s=timeout_s)

    rank = property(lambda self: self.group.rank)
    size = property(lambda self: self.group.size)

    def total(self):
        """Return the sum of the ranks' numbers plus one, times ten."""
        return int(self.group.all_reduce(np.full(3, 10 * (self.group.rank + 1)))[0])

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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose(group):
    """Make calls until one fails because ranks were lost, and return these."""
    while True:
        try:
            group.total()
        except (PeerLostError, CollectiveTimeout) as error:
            return error.ranks


def wait_until(true):
    while not true():
        time.sleep(0.01)
