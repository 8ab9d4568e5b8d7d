"""Ranks that end in different ways: ``python torch_exits.py LAUNCHER ENDING STORE``. See test_torch_exits.py.

LAUNCHER is "itself" if another program starts a process for each rank. Otherwise it is "spawn" or "fork".
"""

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import crossreduce.torch
from crossreduce.torch.collectives import Collectives

GROUPS = []  # a global that keeps the groups until Python clears its modules


def run(rank, size, ending, store):
    os.environ["CROSSREDUCE_HOST"] = "ab"[rank] if ending.endswith("over_hosts") else "a"
    torch.set_num_threads(1)
    dist.init_process_group("crossreduce", f"file://{store}" if store else "env://", rank=rank, world_size=size)
    GROUPS.extend([dist.group.WORLD, dist.new_group(), crossreduce.torch])
    x = torch.ones(1000)
    dist.all_reduce(x)
    dist.all_gather([torch.ones(1000) for _ in range(size)], x)
    dist.all_reduce(torch.ones(3).to_sparse())  # by gloo
    if ending.startswith("exit"):
        dist.all_reduce(x, async_op=True)
        sys.exit(7)
    elif ending.startswith("exception"):
        raise ArithmeticError("a failure of the program")
    elif ending.startswith("one_fails"):
        if rank == 0:
            raise ArithmeticError("a failure of the program")
        dist.all_gather([torch.ones(1000) for _ in range(size)], x)
    elif ending.startswith("pending") and rank == 0:
        dist.all_reduce(x, async_op=True)
    elif ending == "during_gloo":
        during_gloo(rank)


def during_gloo(rank):
    """End while gloo waits for a late rank. Exit with 3 if gloo still refers to the tensor of a completed op."""

    def watched(self, text, run, tensors, options):
        before = sys.getrefcount(tensors[0])
        run_in_gloo(self, text, run, tensors, options)
        if sys.getrefcount(tensors[0]) > before:
            os._exit(3)

    run_in_gloo, Collectives._run_in_gloo = Collectives._run_in_gloo, watched
    sys.setswitchinterval(100)
    if rank == 1:
        time.sleep(0.5)
    for _ in range(5):
        dist.all_reduce(torch.ones(3).to_sparse(), async_op=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    launcher, ending, store = sys.argv[1:]
    if launcher == "itself":
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ending, store)
    else:
        mp.start_processes(run, (2, ending, store), nprocs=2, start_method=launcher)
