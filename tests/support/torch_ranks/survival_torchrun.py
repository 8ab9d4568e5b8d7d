"""The program of test_survival_torchrun.py: a rank or a new process that torchrun has started.

``torchrun ... survival_torchrun.py FOLDER [join]``: ranks make steps until a new process has joined, and ten more.
Files in FOLDER: "process <pid>" of each rank, with its first rank; "invitation"; "step", the number of the last step;
"done 0" and so on, the reports.
"""

import json
import os
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

import crossreduce.torch

STEPS_AFTER = 10
folder, joins = Path(sys.argv[1]), sys.argv[2:] == ["join"]


def write(name, text):
    folder.joinpath(f"{name}.new {os.getpid()}").write_text(text)
    folder.joinpath(f"{name}.new {os.getpid()}").rename(folder / name)


def one_step():
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert x.tolist() == [float(dist.get_world_size())] * 1000


def synchronise(step):
    known = torch.tensor(step)
    dist.broadcast(known, 0)
    return int(known)


step, sizes, left = 0, [], STEPS_AFTER
if joins:
    crossreduce.torch.join((folder / "invitation").read_text(), timeout_s=200)
    step = crossreduce.torch.committed(partial(synchronise, step))
else:
    dist.init_process_group("crossreduce")
    if dist.get_rank() == 1:
        write("invitation", crossreduce.torch.invitation())
write(f"process {os.getpid()}", str(dist.get_rank()))
complete = joins
while left:
    if not complete and crossreduce.torch.grow() is not None:
        step, complete = crossreduce.torch.committed(partial(synchronise, step)), True
    crossreduce.torch.committed(one_step)
    step += 1
    sizes.append(dist.get_world_size())
    left -= complete
    write("step", str(step))
write(f"done {dist.get_rank()}", json.dumps({"step": step, "sizes": [size for size, _ in groupby(sizes)]}))
dist.destroy_process_group()
